-- SPDX-License-Identifier: MIT
-- 7: ranges projected onto streams: of each NVTX range, the operations that were started by calls inside it, on its
-- thread, found by their correlation; from the first one's start to the last one's end, per stream.
WITH
    ranges AS (
        SELECT s.id, s.name, s.ts, s.ts + s.dur AS end_ts, t.utid
        FROM slice AS s
        JOIN thread_track AS t ON s.track_id = t.id
        WHERE s.category = 'user_annotation'
    ),
    calls AS (
        SELECT s.ts, t.utid, EXTRACT_ARG(s.arg_set_id, 'args.correlation') AS correlation
        FROM slice AS s
        JOIN thread_track AS t ON s.track_id = t.id
        WHERE s.category IN ('cuda_runtime', 'cuda_driver')
    ),
    operations AS (
        SELECT
            ts,
            ts + dur AS end_ts,
            EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation,
            EXTRACT_ARG(arg_set_id, 'args.device') AS device,
            EXTRACT_ARG(arg_set_id, 'args.stream') AS stream
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    -- What each call started, per stream, so that a range has to look only at the calls.
    launches AS (
        SELECT c.ts, c.utid, o.device, o.stream, min(o.ts) AS begin_ts, max(o.end_ts) AS end_ts, count(*) AS operations
        FROM calls AS c
        JOIN operations AS o ON o.correlation = c.correlation
        GROUP BY c.correlation, c.ts, c.utid, o.device, o.stream
    ),
    spans AS (
        SELECT r.name, l.device, l.stream, min(l.begin_ts) AS begin_ts, max(l.end_ts) AS end_ts,
            sum(l.operations) AS operations
        FROM ranges AS r
        JOIN launches AS l ON l.utid = r.utid AND l.ts BETWEEN r.ts AND r.end_ts
        GROUP BY r.id, r.name, l.device, l.stream
    )
SELECT
    name,
    device,
    stream,
    count(*) AS count,
    sum(operations) AS operations,
    sum(end_ts - begin_ts) AS total_ns,
    sum(end_ts - begin_ts) / count(*) AS each_ns
FROM spans
GROUP BY name, device, stream
ORDER BY name, device, stream;

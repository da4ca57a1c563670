-- SPDX-License-Identifier: MIT
-- 7: ranges projected onto streams: of each NVTX range, the operations that were started by calls inside it, on its
-- thread, found by their correlation; from the first one's start to the last one's end, per stream.
WITH RECURSIVE
    operations AS MATERIALIZED (
        SELECT
            ts,
            ts + dur AS end_ts,
            EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation,
            EXTRACT_ARG(arg_set_id, 'args.device') AS device,
            EXTRACT_ARG(arg_set_id, 'args.stream') AS stream
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    calls AS MATERIALIZED (
        SELECT id, parent_id, EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation
        FROM slice
        WHERE category IN ('cuda_runtime', 'cuda_driver')
    ),
    -- What each call started, per stream.
    launches AS MATERIALIZED (
        SELECT
            c.id AS call,
            c.parent_id,
            o.device,
            o.stream,
            min(o.ts) AS ts,
            max(o.end_ts) AS end_ts,
            count(*) AS operations
        FROM calls AS c
        JOIN operations AS o ON o.correlation = c.correlation
        GROUP BY c.id, c.parent_id, o.device, o.stream
    ),
    -- The same for every slice that contains the call, from the innermost outwards.
    around AS (
        SELECT parent_id AS id, device, stream, ts, end_ts, operations FROM launches WHERE parent_id IS NOT NULL
        UNION ALL
        SELECT s.parent_id, a.device, a.stream, a.ts, a.end_ts, a.operations
        FROM around AS a
        JOIN slice AS s ON s.id = a.id
        WHERE s.parent_id IS NOT NULL
    ),
    spans AS (
        SELECT id, device, stream, min(ts) AS ts, max(end_ts) AS end_ts, sum(operations) AS operations
        FROM around
        GROUP BY id, device, stream
    )
SELECT
    r.name,
    s.device,
    s.stream,
    count(*) AS count,
    sum(s.operations) AS operations,
    sum(s.end_ts - s.ts) AS total_ns,
    sum(s.end_ts - s.ts) / count(*) AS each_ns,
    min(s.end_ts - s.ts) AS shortest_ns,
    max(s.end_ts - s.ts) AS longest_ns
FROM spans AS s
JOIN slice AS r ON r.id = s.id
WHERE r.category = 'user_annotation'
GROUP BY r.name, s.device, s.stream
ORDER BY r.name, s.device, s.stream;

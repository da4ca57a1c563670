-- SPDX-License-Identifier: MIT
-- 6: the launch row: calls that start work on a GPU, and the gaps between them on each thread.
WITH
    started AS (
        SELECT DISTINCT EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    calls AS (
        SELECT s.ts, s.dur, t.utid
        FROM slice AS s
        JOIN thread_track AS t ON s.track_id = t.id
        JOIN started ON started.correlation = EXTRACT_ARG(s.arg_set_id, 'args.correlation')
        WHERE s.category IN ('cuda_runtime', 'cuda_driver')
    ),
    ordered AS (SELECT *, ts - lag(ts + dur) OVER (PARTITION BY utid ORDER BY ts) AS gap FROM calls)
SELECT
    count(*) AS calls,
    sum(dur) AS in_calls_ns,
    coalesce(sum(max(gap, 0)), 0) AS between_ns,
    coalesce(max(gap), 0) AS longest_ns
FROM ordered;

-- SPDX-License-Identifier: MIT
-- 6: gaps in which no operation runs, by the operation after them, with what passed before its call began (the host
-- did something else), in its call, and after that; all of a gap is unknown if the call is not in the trace.
WITH
    operations AS (
        SELECT
            ts,
            ts + dur AS end_ts,
            CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS operation,
            EXTRACT_ARG(arg_set_id, 'args.device') AS device,
            EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    -- `until` is when the last of the operations before this one ended, on this GPU.
    ordered AS (
        SELECT
            *,
            max(end_ts) OVER (PARTITION BY device ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until
        FROM operations
    ),
    -- The calls of the CUDA API, one per correlation.
    calls AS (
        SELECT EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation, min(ts) AS ts, max(ts + dur) AS end_ts
        FROM slice
        WHERE category IN ('cuda_runtime', 'cuda_driver')
        GROUP BY 1
    ),
    gaps AS (
        SELECT
            o.operation,
            o.until,
            o.ts,
            min(max(c.ts, o.until), o.ts) AS call_begin, -- NULL without a call
            min(max(c.end_ts, o.until), o.ts) AS call_end
        FROM ordered AS o
        LEFT JOIN calls AS c ON c.correlation = o.correlation
        WHERE o.ts > o.until
    )
SELECT
    operation,
    count(*) AS count,
    sum(ts - until) AS total_ns,
    sum(coalesce(call_begin - until, 0)) AS before_call_ns,
    sum(coalesce(call_end - call_begin, 0)) AS in_call_ns,
    sum(coalesce(ts - call_end, 0)) AS after_call_ns,
    max(ts - until) AS longest_ns
FROM gaps
GROUP BY operation
ORDER BY total_ns DESC, operation;

-- SPDX-License-Identifier: MIT
-- 2: events of the GPU and the host that take more than 10 us, in order of time. Put another number before "* 1000".
WITH
    events AS (
        SELECT ts, dur, name
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset', 'cuda_runtime', 'cuda_driver', 'user_annotation')
    )
SELECT
    ts - (SELECT min(ts) FROM events) AS at_ns,
    dur AS ns,
    CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS event
FROM events
WHERE dur > 10 * 1000
ORDER BY ts;

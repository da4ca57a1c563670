-- SPDX-License-Identifier: MIT
-- 2: the longest operations, in order of time from the first operation on.
WITH
    operations AS (SELECT ts, dur, name FROM slice WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')),
    longest AS (SELECT * FROM operations ORDER BY dur DESC, ts LIMIT 50)
SELECT
    ts - (SELECT min(ts) FROM operations) AS at_ns,
    dur AS ns,
    CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS operation
FROM longest
ORDER BY ts;

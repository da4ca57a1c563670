-- SPDX-License-Identifier: MIT
-- 2: the longest operations, in order of time from the first operation on.
WITH
    operations AS (
        SELECT id, ts, dur, name FROM slice WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    longest AS (SELECT * FROM operations ORDER BY dur DESC, ts LIMIT 6)
SELECT ts - (SELECT min(ts) FROM operations) AS at_ns, dur AS ns, name AS operation
FROM longest
ORDER BY ts;

-- SPDX-License-Identifier: MIT
-- 3: operations of less than 5 us that are launched more than 100 times. Put another number after HAVING.
SELECT
    CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS operation,
    count(*) AS count,
    sum(dur) AS total_ns,
    sum(dur) / count(*) AS each_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns
FROM slice
WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset') AND dur < 5000
GROUP BY operation
HAVING count(*) > 100
ORDER BY total_ns DESC, operation;

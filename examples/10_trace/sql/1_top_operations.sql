-- SPDX-License-Identifier: MIT
-- 1: top operations by total time. torch's "Memcpy HtoD (Pinned -> Device)" is "Memcpy HtoD" here.
SELECT
    CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS operation,
    count(*) AS count,
    sum(dur) AS total_ns,
    sum(dur) / count(*) AS each_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns,
    100.0 * sum(dur) / sum(sum(dur)) OVER () AS share
FROM slice
WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
GROUP BY operation
ORDER BY total_ns DESC, operation
LIMIT 50;

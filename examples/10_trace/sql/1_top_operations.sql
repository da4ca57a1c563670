-- SPDX-License-Identifier: MIT
-- 1: top operations by total time.
SELECT
    CASE
        WHEN category = 'gpu_memset' THEN 'memset'
        WHEN name GLOB 'Memcpy *' THEN 'copy ' || substr(name, 8, 4) -- torch: Memcpy HtoD (Pinned -> Device)
        ELSE name
    END AS operation,
    count(*) AS count,
    sum(dur) AS total_ns,
    sum(dur) / count(*) AS each_ns,
    100.0 * sum(dur) / (SELECT sum(dur) FROM slice WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')) AS share
FROM slice
WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
GROUP BY operation
ORDER BY total_ns DESC, operation
LIMIT 6;

-- SPDX-License-Identifier: MIT
-- 3: the host's time in calls of the CUDA API (kind 1) and in NVTX ranges (kind 2).
SELECT
    CASE WHEN category = 'user_annotation' THEN 2 ELSE 1 END AS kind,
    name,
    count(*) AS count,
    sum(dur) AS total_ns,
    sum(dur) / count(*) AS each_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns
FROM slice
WHERE category IN ('cuda_runtime', 'cuda_driver', 'user_annotation')
GROUP BY kind, name
ORDER BY kind, total_ns DESC, name;

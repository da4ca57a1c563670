-- SPDX-License-Identifier: MIT
-- 8: operations by category. The first line that fits counts; LIKE takes either case.
SELECT
    CASE
        WHEN name LIKE '%attend%' OR name LIKE '%attention%' OR name LIKE '%flash%' OR name LIKE '%fmha%'
            OR name LIKE '%sdpa%' THEN 'attention'
        WHEN name LIKE '%gemm%' OR name LIKE '%gemv%' OR name LIKE '%matmul%' OR name LIKE '%cutlass%'
            OR name LIKE '%cublas%' OR name LIKE '%xmma%' OR name LIKE '%nvjet%' THEN 'matrix product'
        WHEN name LIKE '%memcpy%' OR name LIKE '%memset%' OR name LIKE '%direct\_copy\_kernel%' ESCAPE '\' THEN 'memory'
        WHEN name LIKE '%concat%' OR name LIKE '%CatArray%' THEN 'concatenation'
        ELSE 'other'
    END AS share_of,
    count(*) AS count,
    sum(dur) AS total_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns,
    100.0 * sum(dur) / sum(sum(dur)) OVER () AS share
FROM slice
WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
GROUP BY share_of
ORDER BY total_ns DESC, share_of;

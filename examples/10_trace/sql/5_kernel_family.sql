-- SPDX-License-Identifier: MIT
-- 5: one family of kernels. Put another pattern between the quotes: '*' are all kernels.
SELECT
    count(*) AS count,
    sum(dur) AS total_ns,
    1.0 * sum(dur) / count(*) AS each_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns
FROM slice
WHERE category = 'kernel' AND name GLOB '*kvpc_*';

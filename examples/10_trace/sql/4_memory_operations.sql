-- SPDX-License-Identifier: MIT
-- 4: memory operations by direction. torch's "Memcpy HtoD (Pinned -> Device)" is "Memcpy HtoD" here.
SELECT
    CASE WHEN name GLOB 'Mem* (*' THEN substr(name, 1, instr(name, ' (') - 1) ELSE name END AS direction,
    count(*) AS count,
    sum(dur) AS total_ns,
    min(dur) AS shortest_ns,
    max(dur) AS longest_ns,
    sum(EXTRACT_ARG(arg_set_id, 'args.bytes')) AS bytes,
    1.0 * sum(EXTRACT_ARG(arg_set_id, 'args.bytes')) / sum(dur) AS gb_per_s
FROM slice
WHERE category IN ('gpu_memcpy', 'gpu_memset')
GROUP BY direction
ORDER BY total_ns DESC, direction;

-- SPDX-License-Identifier: MIT
-- 3: small and frequent operations: how many take less than 5 us, about the time of a launch; how long at least one
-- operation runs, and how long it is from the first to the last (of several GPUs, the sum).
WITH
    operations AS (
        SELECT
            ts,
            ts + dur AS end_ts,
            dur,
            EXTRACT_ARG(arg_set_id, 'args.device') AS device
        FROM slice
        WHERE category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
    ),
    -- `until` is when the last of the operations before this one ended, on this GPU.
    ordered AS (
        SELECT
            *,
            max(end_ts) OVER (PARTITION BY device ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until
        FROM operations
    ),
    devices AS (
        SELECT max(end_ts) - min(ts) AS span, sum(max(0, ts - coalesce(until, ts))) AS idle FROM ordered GROUP BY device
    )
SELECT
    (SELECT count(*) FROM operations WHERE dur < 5000) AS small,
    (SELECT count(*) FROM operations) AS operations,
    (SELECT coalesce(sum(dur), 0) FROM operations WHERE dur < 5000) AS small_ns,
    sum(span - idle) AS busy_ns,
    sum(span) AS span_ns
FROM devices;

/* SPDX-License-Identifier: MIT */
/* What the machine allows: how long the links take for the bytes of a collective, and how long kernels take that only
   exchange a flag. */
#ifndef BENCH_LINK_H
#define BENCH_LINK_H

#include "bench_ranks.h"
#include "opponents_launch.h"
#include <map>

/* ---- the link ----

   Each rank writes to the next one's memory, all at once, because that is what a collective does. */

/* Four words on their way per thread. Eight are no faster, nor are other stores (relaxed, streaming), nor more than 66
   blocks of 512 threads (H200). */
static __global__ void __launch_bounds__(1024) push_words(uint4 *dst, const uint4 *src, size_t words)
{
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {
        const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
        dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
    }
    for (; i < words; i += step)
        dst[i] = src[i];
}

struct link_way {
    const char *name;
    size_t blocks; /* 0: the copy engine */
    unsigned threads;
};

inline void enqueue_push(rank_state &r, const link_way &way, size_t bytes)
{
    char *const to = ranks[size_t((r.rank + 1) % world)].y;
    if (way.blocks == 0)
        return CUDA(cudaMemcpyAsync(to, r.x, bytes, cudaMemcpyDefault, r.stream));
    const size_t blocks = std::min(way.blocks, (bytes / 16 + way.threads - 1) / way.threads);
    push_words<<<unsigned(blocks), way.threads, 0, r.stream>>>(reinterpret_cast<uint4 *>(to),
                                                               reinterpret_cast<uint4 *>(r.x), bytes / 16);
    CUDA(cudaGetLastError());
}

/* Microseconds for these bytes. push: of the fastest kernel; narrow: of one on 32 multiprocessors. */
struct link_time {
    double push_us, narrow_us, copy_us;
};

inline rank_way way_to_push(const link_way &way, size_t bytes)
{
    return {[=](rank_state &r, int) { enqueue_push(r, way, bytes); },
            [=](rank_state &r) { CUDA(cudaMemsetAsync(r.y, 0xee, bytes, r.stream)); },
            [=](rank_state &r) {
                const int from = (r.rank + world - 1) % world;
                check_result<__nv_bfloat16>(r, r.y, {copy_of, from, from + 1, 0}, bytes / 2, way.name);
            }};
}

/* ---- flags ----

   A kernel of one warp sends a flag to every other rank and waits for theirs. Launches take two sets of flags by turns,
   and a rank clears what it has read. So nothing but the exchange takes time: no turn is loaded, unlike in a sum. */

struct flag_params {
    volatile uint32_t *mine, *theirs[8]; /* of rank r: flag [sender] */
    uint32_t rank, world, rounds;
};

static __global__ void exchange_flags(flag_params p)
{
    const uint32_t peer = threadIdx.x;
    pdl_wait<true>();
    if (peer < p.world && peer != p.rank)
        for (uint32_t k = 0; k < p.rounds; k++) {
            p.theirs[peer][k * 8 + p.rank] = 1;
            while (p.mine[k * 8 + peer] == 0)
                continue;
            p.mine[k * 8 + peer] = 0;
        }
}

static uint32_t *flags[8]; /* two sets of a rank: of each round, one of every sender */

inline void open_flags(rank_state &r)
{
    CUDA(cudaMalloc(reinterpret_cast<void **>(&flags[r.rank]), 4096));
    CUDA(cudaMemset(flags[r.rank], 0, 4096));
    CUDA(cudaDeviceSynchronize());
}

inline void enqueue_flags(rank_state &r, int call, uint32_t rounds)
{
    flag_params p = {};
    const int set = call % 2 * 64;
    p.rank = uint32_t(r.rank), p.world = uint32_t(world), p.rounds = rounds;
    p.mine = flags[r.rank] + set;
    for (int k = 0; k < world; k++)
        p.theirs[k] = flags[k] + set;
    /* launched as kvprim's kernels are: its blocks may be resident before the previous kernel ends */
    CUDA(launch_opponent(exchange_flags, 1, 32, true, r.stream, p));
}

/* Microseconds of an empty node of a graph; of an empty one that is launched as kvprim's kernels are; with a flag to
   every other rank; with a flag there and one back. */
struct floor_times {
    double empty_us, dependent_us, once_us, back_us;
};

inline floor_times measure_floor()
{
    std::vector<rank_way> ways = {{[](rank_state &r, int) { empty_kernel<<<1, 32, 0, r.stream>>>(); }}};
    for (const uint32_t rounds : {0u, 1u, 2u})
        ways.push_back({[rounds](rank_state &r, int call) { enqueue_flags(r, call, rounds); }});
    on_all(open_flags);
    measure(ways, 50);
    on_all([](rank_state &r) { CUDA(cudaFree(flags[r.rank])); });
    return {ways[0].us, ways[1].us, ways[2].us, ways[3].us};
}

#endif /* BENCH_LINK_H */

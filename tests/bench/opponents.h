/* SPDX-License-Identifier: MIT */
/* The kernels with which other projects gather and store rows, written anew for bench_cuda.cu. Each is at least as fast
   as the project's own: the row size is known at compile time, a lane moves words of the width that theirs has, the
   launch is theirs, and a warp loads all of its part of a row before its first store. Checks that theirs make are left
   out. `make sass` checks the order of loads and stores: a kernel that may not assume that rows do not overlap issues
   them by turns and takes longer (H200: gather of one row of 1,152 bytes 2.28 us, not 1.09; store of 48 tokens of 8,192
   bytes 12.4, not 2.7).

   With pdl, kernels wait and trigger where the project's do. Sources written like the projects' compile to loads and
   stores by turns then, because the wait keeps loads off the path for constant data. These do not, and are faster (that
   gather: 0.80 us, not 1.93).

   A launch returns CUDA's error. */
#ifndef OPPONENTS_H
#define OPPONENTS_H

#include <stdint.h>
#include <type_traits>
#include <utility>
#include <vector>
#include "opponents_launch.h"

constexpr unsigned opponent_threads = 128; /* per block, in both projects */

/* What a lane moves at once if a warp moves `bytes` (in both projects): 16, 8 or 4 bytes, the widest that lanes can
   share evenly. For other sizes SGLang takes 4, and some lanes idle in the last step. mini-sglang refuses those sizes;
   here it does as SGLang. */
template <int bytes>
using lane_word = std::conditional_t<bytes % 512 == 0, uint4, std::conditional_t<bytes % 256 == 0, uint2, unsigned>>;

/* Warps per row: mini-sglang's gather (kernel/index.py) and SGLang's store (jit_kernel/kvcache.py) choose alike. */
template <int row_bytes> constexpr int parts_of = row_bytes % 2048 == 0 ? 4 : row_bytes % 1024 == 0 ? 2 : 1;

/* A lane's words of `bytes` that its warp moves. */
template <int bytes> struct lane_words {
    using word = lane_word<bytes>;
    static constexpr int count = bytes / int(sizeof(word)), steps = (count + 31) / 32;
    static_assert(count * sizeof(word) == bytes, "whole words");
    word held[steps];

    __device__ static bool has(int step)
    {
        return 32 * (step + 1) <= count || 32 * step + int(threadIdx.x % 32) < count;
    }
    /* Without PDL nothing before the kernel can still be writing, so loads may take the path for constant data, as
       the compiler decides for both projects. */
    template <bool pdl> __device__ void load(const char *row)
    {
        const word *const from = reinterpret_cast<const word *>(row) + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (has(i))
                held[i] = pdl ? from[32 * i] : __ldg(from + 32 * i);
    }
    __device__ void store(char *row) const
    {
        word *const to = reinterpret_cast<word *>(row) + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (has(i))
                to[32 * i] = held[i];
    }
};

template <bool pdl> __device__ inline int64_t row_number(const int32_t *index)
{
    return pdl ? *index : __ldg(index);
}

/* With this order, and counts of 64 bits as theirs, ptxas reads addresses of parameters into uniform registers. With 32
   bits it loads them just before they are needed, and a gather of few rows takes 0.03 us longer. */
__device__ inline unsigned opponent_warp()
{
    return threadIdx.x / 32 + blockIdx.x * (opponent_threads / 32);
}

template <typename params> cudaError_t launch_warps(void (*kernel)(params), const params &p, bool pdl, cudaStream_t on)
{
    constexpr unsigned in_block = opponent_threads / 32;
    return launch_opponent(kernel, dim3(unsigned((p.warps + in_block - 1) / in_block)), dim3(opponent_threads), pdl, on,
                           p);
}

/* ---- mini-sglang: gather ---- */

struct gather_params {
    char *out;
    const char *table;
    const int32_t *index;
    uint64_t warps;
};

/* mini-sglang (sgl-project/mini-sglang), python/minisgl/kernel/csrc/jit/index.cu and index.py: indexing(). One warp per
   part of a row, blocks of 128 threads, __launch_bounds__(128, 1). It ships without PDL; with it, the kernel waits
   first and triggers last. */
template <int row_bytes, bool pdl>
__global__ void __launch_bounds__(opponent_threads, 1) mini_gather_kernel(const __grid_constant__ gather_params p)
{
    constexpr int parts = parts_of<row_bytes>, bytes = row_bytes / parts;
    const unsigned warp = opponent_warp();
    pdl_wait<pdl>();
    if (warp < p.warps && lane_words<bytes>::has(0)) {
        lane_words<bytes> words;
        words.template load<pdl>(p.table + row_number<pdl>(p.index + warp / parts) * row_bytes + warp % parts * bytes);
        words.store(p.out + int64_t(warp) * bytes);
    }
    pdl_trigger<pdl>();
}

template <int row_bytes, bool pdl>
cudaError_t launch_mini_gather(char *out, const char *table, const int32_t *index, unsigned rows, cudaStream_t on)
{
    return launch_warps(mini_gather_kernel<row_bytes, pdl>,
                        gather_params{out, table, index, uint64_t(rows) * parts_of<row_bytes>}, pdl, on);
}

/* ---- mini-sglang and SGLang: store ---- */

struct token_rows {
    char *k_cache, *v_cache;
    const char *k, *v;
};

/* Loads of K and of V, then the stores; with one tensor, of K alone. K first, if a lane has more than 60 words of 16
   bytes of both: they do not fit into 255 registers. */
template <int bytes, int tensors, bool pdl> __device__ inline void move_token(const token_rows &t)
{
    lane_words<bytes> k, v;
    constexpr bool together = 2 * sizeof k <= 60 * 16;
    k.template load<pdl>(t.k);
    if (tensors == 2 && together)
        v.template load<pdl>(t.v);
    k.store(t.k_cache);
    if (tensors == 2 && !together)
        v.template load<pdl>(t.v);
    if (tensors == 2)
        v.store(t.v_cache);
}

struct store_params {
    char *k_cache, *v_cache;
    const char *k, *v;
    const int32_t *slot;
    int64_t cache_stride, input_stride; /* of K and of V */
    uint64_t warps;                     /* mini-sglang's, one per token */
};

/* mini-sglang, python/minisgl/kernel/csrc/jit/store.cu and store.py: store_cache(). One warp per token, blocks of 128
   threads, __launch_bounds__(128, 1). It ships without PDL; with it, the kernel waits first and triggers last. Its
   source moves K, then V; compiled without PDL, it loads both before the first store. */
template <int row_bytes, int tensors, bool pdl>
__global__ void __launch_bounds__(opponent_threads, 1) mini_store_kernel(const __grid_constant__ store_params p)
{
    const unsigned warp = opponent_warp();
    pdl_wait<pdl>();
    if (warp < p.warps && lane_words<row_bytes>::has(0)) {
        const int64_t to = row_number<pdl>(p.slot + warp) * p.cache_stride, from = warp * p.input_stride;
        move_token<row_bytes, tensors, pdl>({p.k_cache + to, p.v_cache + to, p.k + from, p.v + from});
    }
    pdl_trigger<pdl>();
}

template <int row_bytes, int tensors, bool pdl> cudaError_t launch_mini_store(const store_params &p, cudaStream_t on)
{
    return launch_warps(mini_store_kernel<row_bytes, tensors, pdl>, p, pdl, on);
}

/* Parameters as SGLang's: with fewer strides and another width of the count, few rows take 0.01 to 0.02 us longer. */
struct sglang_params {
    const char *k, *v;
    char *k_cache, *v_cache;
    const int32_t *slot;
    int64_t k_stride, v_stride, cache_stride, slot_stride;
    uint32_t tokens, warps;
};

/* SGLang (sgl-project/sglang), python/sglang/jit_kernel/csrc/elementwise/kvcache.cuh and jit_kernel/kvcache.py:
   store_cache(). 4, 2 or 1 warps per token, blocks of 128 threads, PDL on Hopper and newer. Warps past the end return
   first; the others wait, and trigger last. Its newest version also asserts that a slot is in the cache; this one does
   not. Theirs has no launch bounds, and ptxas then puts some stores between the loads, to use fewer registers. */
template <int row_bytes, int tensors, bool pdl>
__global__ void __launch_bounds__(opponent_threads, 1) sglang_store_kernel(const __grid_constant__ sglang_params p)
{
    constexpr int parts = parts_of<row_bytes>, bytes = row_bytes / parts;
    const unsigned warp = blockIdx.x * (opponent_threads / 32) + threadIdx.x / 32, token = warp / parts;
    if (token >= p.tokens || !lane_words<bytes>::has(0))
        return;
    const int32_t *const slot = p.slot + token * p.slot_stride;
    pdl_wait<pdl>();
    const unsigned part = warp % parts * bytes;
    const int64_t to = row_number<pdl>(slot) * p.cache_stride + part;
    move_token<bytes, tensors, pdl>(
        {p.k_cache + to, p.v_cache + to, p.k + (token * p.k_stride + part), p.v + (token * p.v_stride + part)});
    pdl_trigger<pdl>();
}

template <int row_bytes, int tensors, bool pdl> cudaError_t launch_sglang_store(const store_params &p, cudaStream_t on)
{
    const uint32_t tokens = uint32_t(p.warps);
    const sglang_params q = {p.k,
                             p.v,
                             p.k_cache,
                             p.v_cache,
                             p.slot,
                             p.input_stride,
                             p.input_stride,
                             p.cache_stride,
                             1,
                             tokens,
                             tokens * parts_of<row_bytes>};
    return launch_warps(sglang_store_kernel<row_bytes, tensors, pdl>, q, pdl, on);
}

/* ---- every kernel by row size ---- */

typedef cudaError_t gather_launch(char *out, const char *table, const int32_t *index, unsigned rows, cudaStream_t on);
typedef cudaError_t store_launch(const store_params &p, cudaStream_t on);

/* Of launches [0] is without PDL, [1] with it. Of stores [0] is of K alone, which neither project stores this way, and
   [1] of K and V. */
struct opponent {
    int row_bytes;
    gather_launch *mini_gather[2];
    store_launch *mini_store[2][2], *sglang_store[2][2];
};

/* Opponents for these sizes, or for those of bench_cuda.cu: heads of 64 and 128 elements of 1 and 2 bytes, 1 to 64 of
   them, MLA's latents (576 and 656 bytes with 8-bit values, 1,152 in bf16), and sizes that no design is made for. */
template <int... sizes> std::vector<opponent> opponents_for(std::integer_sequence<int, sizes...> = {})
{
    return {opponent{sizes,
                     {launch_mini_gather<sizes, false>, launch_mini_gather<sizes, true>},
                     {{launch_mini_store<sizes, 1, false>, launch_mini_store<sizes, 1, true>},
                      {launch_mini_store<sizes, 2, false>, launch_mini_store<sizes, 2, true>}},
                     {{launch_sglang_store<sizes, 1, false>, launch_sglang_store<sizes, 1, true>},
                      {launch_sglang_store<sizes, 2, false>, launch_sglang_store<sizes, 2, true>}}}...};
}

using bench_sizes =
    std::integer_sequence<int, 96, 128, 160, 256, 416, 512, 576, 640, 656, 1024, 1152, 2048, 4096, 8192, 14336, 16384>;

#endif /* OPPONENTS_H */

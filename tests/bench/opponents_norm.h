/* SPDX-License-Identifier: MIT */
/* What engines do around a sum: kernels written as theirs are, to compare kvprim_all_reduce_norm with. bf16.

   add_norm      The fused add and RMSNorm of vLLM and FlashInfer, which runs after the sum: a block for each token, 16
                 bytes per load. Here a row stays in registers, there is one barrier per row, and the weight and the
                 residual are loaded before the kernel waits for the sum. vLLM's kernels with an e4m3 output are the
                 same with another end.
   one_shot_norm The one-shot kernel of TensorRT-LLM and FlashInfer, which sums and normalises: each rank writes its
                 addend to all others, the data is its own flag (negative zero: not yet there), of three buffers one is
                 written, one is read and one is cleared, and a row belongs to a cluster of blocks. Here a rank does not
                 write to itself, and one barrier of the cluster does for what takes two there. */
#ifndef OPPONENTS_NORM_H
#define OPPONENTS_NORM_H

#include <algorithm>
#include <stdint.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include "opponents_launch.h"

namespace opponents
{
enum norm_output { to_bf16, to_e4m3, to_e4m3_by_token };

/* Rows of `packs` packs of eight elements. */
struct norm_params {
    const uint4 *x; /* the sum, or this rank's addend */
    const uint4 *residual, *weight;
    uint4 *residual_out, *out;
    uint2 *quantised;
    float *scale; /* read: one; written, by token: one for each */
    float eps;
    uint32_t tokens, packs;
};

enum { most_threads = 1024, most_packs = 2048, most_warps = most_packs / 32, most_cluster = 8 };

struct eight {
    float of[8];
};

__device__ inline eight unpack(uint4 v)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    eight e;
    for (int i = 0; i < 4; i++) {
        e.of[2 * i] = __uint_as_float(words[i] << 16);
        e.of[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return e;
}

__device__ inline uint4 pack(const eight &e)
{
    uint32_t words[4];
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(e.of[2 * i], e.of[2 * i + 1]);
        memcpy(&words[i], &two, 4);
    }
    return {words[0], words[1], words[2], words[3]};
}

__device__ inline uint4 add(uint4 a, uint4 b)
{
    eight sum = unpack(a);
    const eight more = unpack(b);
    for (int i = 0; i < 8; i++)
        sum.of[i] += more.of[i];
    return pack(sum);
}

__device__ inline uint2 quantise(const eight &e, float inverse)
{
    uint32_t words[2] = {};
    for (int i = 0; i < 4; i++) {
        const float2 two = {e.of[2 * i] * inverse, e.of[2 * i + 1] * inverse};
        words[i / 2] |= uint32_t(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 16 * (i % 2);
    }
    return {words[0], words[1]};
}

template <bool maximum> __device__ float combine(float a, float b)
{
    return maximum ? fmaxf(a, b) : a + b;
}

template <bool maximum> __device__ float over_warp(float v)
{
    for (int step = 16; step > 0; step /= 2)
        v = combine<maximum>(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

#if __CUDA_ARCH__ >= 900
#define OPPONENTS_PTX(...) asm volatile(__VA_ARGS__)
#else
#define OPPONENTS_PTX(...) (void)0 /* never run: see open_all of bench_decode.cu */
#endif

__device__ inline uint32_t cluster_rank()
{
    uint32_t v = 0;
    OPPONENTS_PTX("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}

__device__ inline uint32_t cluster_size()
{
    uint32_t v = 1;
    OPPONENTS_PTX("mov.u32 %0, %%cluster_nctarank;" : "=r"(v));
    return v;
}

__device__ inline void cluster_arrive()
{
    OPPONENTS_PTX("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ inline void cluster_wait()
{
    OPPONENTS_PTX("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* `at`: in shared memory. */
__device__ inline void store_in_cluster(float *at, uint32_t block, float v)
{
    OPPONENTS_PTX("{\n\t.reg .u32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
                  "st.shared::cluster.f32 [there], %2;\n\t}" ::"r"(uint32_t(__cvta_generic_to_shared(at))),
                  "r"(block), "f"(v)
                  : "memory");
}

/* Combines what all threads of a block, or of a cluster, have. room: a place for each of their warps, not in use since
   the barrier before the last one. */
template <bool maximum, bool clusters> __device__ float over_row(float v, float *room)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32,
                   blocks = clusters ? cluster_size() : 1;
    v = over_warp<maximum>(v);
    if (clusters && blocks > 1) {
        if (lane < blocks)
            store_in_cluster(room + cluster_rank() * warps + warp, lane, v);
        cluster_arrive();
        cluster_wait();
    } else {
        if (lane == 0)
            room[warp] = v;
        __syncthreads();
    }
    v = maximum ? -INFINITY : 0;
    for (uint32_t k = lane; k < blocks * warps; k += 32)
        v = combine<maximum>(v, room[k]);
    return over_warp<maximum>(v);
}

/* Normalises a row, of which a thread has some packs, `step` packs apart. room: two places for each warp. */
template <norm_output output, int packs, bool clusters>
__device__ void finish_row(const norm_params &p, uint32_t token, uint32_t first, uint32_t step, const uint4 (&r)[packs],
                           const uint4 (&weight)[packs], float (*room)[most_warps])
{
    float squares = 0, most = 0;
    eight y[packs];
    for (int k = 0; k < packs; k++) {
        y[k] = unpack(r[k]);
        for (int i = 0; i < 8; i++)
            squares += y[k].of[i] * y[k].of[i];
    }
    const float factor = rsqrtf(over_row<false, clusters>(squares, room[0]) / float(8 * p.packs) + p.eps);
    for (int k = 0; k < packs; k++) {
        const eight w = unpack(weight[k]);
        for (int i = 0; i < 8; i++)
            y[k].of[i] *= factor * w.of[i], most = fmaxf(most, fabsf(y[k].of[i]));
    }
    float scale = output == to_e4m3 ? *p.scale : 1;
    if (output == to_e4m3_by_token) {
        scale = over_row<true, clusters>(most, room[1]) / 448;
        if (first == 0)
            p.scale[token] = scale;
    }
    for (int k = 0; k < packs; k++) {
        const uint32_t at = first + uint32_t(k) * step;
        if (packs > 1 && at >= p.packs)
            break;
        const size_t to = size_t(token) * p.packs + at;
        if (output == to_bf16)
            p.out[to] = pack(y[k]);
        else
            p.quantised[to] = quantise(y[k], 1 / scale);
    }
}

template <norm_output output, int packs> __global__ void __launch_bounds__(most_threads) add_norm(norm_params p)
{
    __shared__ float room[2][most_warps];
    const uint32_t token = blockIdx.x, step = blockDim.x;
    const size_t row = size_t(token) * p.packs;
    uint4 r[packs], weight[packs];
    for (int k = 0; k < packs; k++) {
        const uint32_t at = threadIdx.x + uint32_t(k) * step;
        const bool inside = packs == 1 || at < p.packs;
        weight[k] = inside ? p.weight[at] : uint4{};
        r[k] = inside ? p.residual[row + at] : uint4{};
    }
    pdl_wait<true>();
    uint4 x[packs];
    for (int k = 0; k < packs; k++) {
        const uint32_t at = threadIdx.x + uint32_t(k) * step;
        x[k] = packs == 1 || at < p.packs ? p.x[row + at] : uint4{};
    }
    for (int k = 0; k < packs; k++) {
        const uint32_t at = threadIdx.x + uint32_t(k) * step;
        r[k] = add(x[k], r[k]);
        if (packs == 1 || at < p.packs)
            p.residual_out[row + at] = r[k];
    }
    finish_row<output, packs, false>(p, token, threadIdx.x, step, r, weight, room);
}

/* ---- one shot ---- */

/* Buffers of a rank: three, each with `most` packs from every sender. */
struct one_shot_params {
    norm_params norm;
    uint4 *buffers[8]; /* of rank r */
    uint32_t *state;   /* of this rank: which buffer is next, how many packs are to be cleared, blocks that are done */
    uint32_t rank, world, most;
};

__device__ inline uint32_t without_flag(uint32_t word)
{
    return word == 0x80000000u ? 0 : word;
}

__device__ inline bool has_flag(uint4 v)
{
    return v.x == 0x80000000u || v.y == 0x80000000u || v.z == 0x80000000u || v.w == 0x80000000u;
}

__device__ inline uint4 load_volatile(const uint4 *at)
{
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ inline uint4 load_addend(const one_shot_params &p, size_t at)
{
    const uint4 v = p.norm.x[at];
    return {without_flag(v.x), without_flag(v.y), without_flag(v.z), without_flag(v.w)};
}

/* Waits for pack `at` of all other ranks, and adds them up in the order of the ranks. */
template <int most_ranks> __device__ uint4 sum_of_ranks(const one_shot_params &p, const uint4 *buffer, size_t at)
{
    const uint4 own = load_addend(p, at);
    uint4 v[most_ranks];
    for (bool there = false; !there;) {
        there = true;
#pragma unroll
        for (uint32_t r = 0; r < most_ranks; r++)
            if (r < p.world) {
                v[r] = r == p.rank ? own : load_volatile(buffer + size_t(r) * p.most + at);
                there = there && !has_flag(v[r]);
            }
    }
    eight sum = {};
#pragma unroll
    for (uint32_t r = 0; r < most_ranks; r++)
        if (r < p.world) {
            const eight more = unpack(v[r]);
            for (int i = 0; i < 8; i++)
                sum.of[i] += more.of[i];
        }
    return pack(sum);
}

/* The last block lets the next call take the next buffer. All have read the state, because they add one after that. */
__device__ inline void end_of_one_shot(const one_shot_params &p, uint32_t turn)
{
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(p.state + 2, 1u) == gridDim.x - 1) {
        p.state[0] = turn == 2 ? 0 : turn + 1;
        p.state[1] = p.norm.tokens * p.norm.packs;
        p.state[2] = 0;
    }
}

template <norm_output output, int most_ranks>
__global__ void __launch_bounds__(most_threads) one_shot_norm(one_shot_params p)
{
    __shared__ float room[4][most_warps];
    const uint32_t blocks = cluster_size(), first = cluster_rank() * blockDim.x + threadIdx.x,
                   begin = blockIdx.x / blocks, step = gridDim.x / blocks;
    const uint4 weight[1] = {p.norm.weight[first]};
    uint4 residual = p.norm.residual[size_t(begin) * p.norm.packs + first];
    cluster_arrive(); /* before a block writes to the memory of another one, that one must run */
    pdl_wait<true>();
    pdl_trigger<true>(); /* it waits as above */
    const size_t buffer_packs = size_t(p.most) * p.world;
    const uint32_t turn = p.state[0], clear = p.state[1];
    for (uint32_t token = begin; token < p.norm.tokens; token += step) {
        const size_t at = size_t(token) * p.norm.packs + first;
        const uint4 own = load_addend(p, at);
#pragma unroll
        for (uint32_t r = 0; r < most_ranks; r++)
            if (r < p.world && r != p.rank)
                p.buffers[r][turn * buffer_packs + size_t(p.rank) * p.most + at] = own;
    }
    const uint32_t all = gridDim.x * blockDim.x;
    uint4 *const old = p.buffers[p.rank] + (turn + 2) % 3 * buffer_packs;
    for (uint32_t r = 0; r < p.world; r++)
        for (uint32_t k = blockIdx.x * blockDim.x + threadIdx.x; k < clear && r != p.rank; k += all)
            old[size_t(r) * p.most + k] = uint4{0x80000000u, 0x80000000u, 0x80000000u, 0x80000000u};
    cluster_wait();
    uint32_t half = 0;
    for (uint32_t token = begin; token < p.norm.tokens; token += step, half ^= 2) {
        const size_t at = size_t(token) * p.norm.packs + first;
        residual = token == begin ? residual : p.norm.residual[at];
        const uint4 r[1] = {add(sum_of_ranks<most_ranks>(p, p.buffers[p.rank] + turn * buffer_packs, at), residual)};
        p.norm.residual_out[at] = r[0];
        finish_row<output, 1, true>(p.norm, token, first, 0, r, weight, room + half);
    }
    end_of_one_shot(p, turn);
}

/* ---- launches ---- */

inline cudaError_t launch(cudaStream_t stream, const void *kernel, uint32_t blocks, uint32_t threads, uint32_t cluster,
                          void *params)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster ? 2 : 1;
    return cudaLaunchKernelExC(&config, kernel, &params);
}

template <norm_output output> const void *pick_add_norm(uint32_t packs)
{
    return packs <= most_threads ? reinterpret_cast<const void *>(add_norm<output, 1>)
                                 : reinterpret_cast<const void *>(add_norm<output, 2>);
}

/* Rows of up to 2,048 packs, a multiple of 32. */
inline cudaError_t launch_add_norm(norm_output output, norm_params p, cudaStream_t stream)
{
    const void *const kernel = output == to_bf16   ? pick_add_norm<to_bf16>(p.packs)
                               : output == to_e4m3 ? pick_add_norm<to_e4m3>(p.packs)
                                                   : pick_add_norm<to_e4m3_by_token>(p.packs);
    return launch(stream, kernel, p.tokens, std::min(p.packs, uint32_t(most_threads)), 0, &p);
}

template <norm_output output> const void *pick_one_shot(uint32_t world)
{
    return world == 2   ? reinterpret_cast<const void *>(one_shot_norm<output, 2>)
           : world <= 4 ? reinterpret_cast<const void *>(one_shot_norm<output, 4>)
                        : reinterpret_cast<const void *>(one_shot_norm<output, 8>);
}

/* The blocks of a row's cluster, as TensorRT-LLM chooses them: up to 8, of at least 128 threads, and fewer of more
   threads if otherwise not all rows' blocks run at once. */
inline uint32_t choose_cluster(uint32_t tokens, uint32_t packs, uint32_t sms)
{
    uint32_t cluster = most_cluster;
    while (cluster > 1 && (packs % (32 * cluster) || packs / cluster < 128))
        cluster /= 2;
    while (cluster > 1 && tokens * cluster > sms && packs / cluster <= most_threads / 2)
        cluster /= 2;
    return cluster;
}

inline cudaError_t launch_one_shot(norm_output output, one_shot_params p, uint32_t sms, cudaStream_t stream)
{
    const uint32_t cluster = choose_cluster(p.norm.tokens, p.norm.packs, sms),
                   clusters = std::min(p.norm.tokens, sms / cluster);
    const void *const kernel = output == to_bf16   ? pick_one_shot<to_bf16>(p.world)
                               : output == to_e4m3 ? pick_one_shot<to_e4m3>(p.world)
                                                   : pick_one_shot<to_e4m3_by_token>(p.world);
    return launch(stream, kernel, clusters * cluster, p.norm.packs / cluster, cluster, &p);
}
} // namespace opponents

#endif /* OPPONENTS_NORM_H */

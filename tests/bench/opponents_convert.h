/* SPDX-License-Identifier: MIT */
/* The kernels with which other projects store and gather quantised rows, written anew for bench_convert.cu. Each does
   what the project's own does, with its launch, and is at least as fast: sizes that theirs reads at run time are
   constants; a thread loads all that it moves before it stores; elements are converted in pairs, where vLLM's compile
   to a conversion for each; checks of theirs that only end the program are left out. Divisions, 64-bit indices and
   pages of a size that is known at run time are as theirs. `make sass` checks the order of loads and stores.

   Kernels of vLLM as of its csrc/libtorch_stable/cache_kernels.cu of 2026 (before: csrc/cache_kernels.cu), of SGLang as
   of its python/sglang/jit_kernel/csrc of 2026. They differ from the contract in kvprim.h in this:
   - SGLang's multiply by the inverse, 1 / scale in fp32; kvprim does so with scale_inverse.
   - Smallest scales are 1e-4 ("fp8_ds_mla"), 1e-4 / 448 (indexer, DeepSeek V4) and 1e-6 (per token and head); kvprim's
     is scale_min.

   FlashInfer has none to compare: its append copies rows of the cache's type, and its only kernel that quantises into a
   cache rotates Q and K in the same pass. SGLang's store of "fp8_ds_mla" rows is two kernels (Triton) and is left out
   for vLLM's, which is one. No project has an int8 cache with a scale per tensor.

   A launch returns CUDA's error. */
#ifndef OPPONENTS_CONVERT_H
#define OPPONENTS_CONVERT_H

#include <algorithm>
#include <stdint.h>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include "opponents_launch.h"

/* Eight elements of a lane, in 16 bytes and in 8. */
struct alignas(16) eight_bf16 {
    __nv_bfloat162 pair[4];
};
struct alignas(8) eight_e4m3 {
    __nv_fp8x2_storage_t pair[4];
};

/* stored = x / scale, or x * scale. */
template <bool divide> __device__ inline eight_e4m3 quantise(const eight_bf16 &in, float scale)
{
    eight_e4m3 out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 x = __bfloat1622float2(in.pair[i]);
        x.x = divide ? x.x / scale : x.x * scale;
        x.y = divide ? x.y / scale : x.y * scale;
        out.pair[i] = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
    }
    return out;
}

/* e4m3 becomes fp16, fp32, and bf16 after the multiplication, as in vLLM: no processor converts it to bf16. */
__device__ inline eight_bf16 dequantise(const eight_e4m3 &in, float scale)
{
    eight_bf16 out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(in.pair[i], __NV_E4M3)));
        out.pair[i] = __floats2bfloat162_rn(x.x * scale, x.y * scale);
    }
    return out;
}

/* Sizes in elements of the cache's and of the input's type; the cache's are bytes. */
struct convert_params {
    const __nv_bfloat16 *k, *v;
    uint8_t *k_cache, *v_cache;
    const int64_t *slot;
    const float *k_scale, *v_scale;
    int64_t page_stride, row_stride, head_stride; /* of the cache */
    int64_t k_stride, v_stride;                   /* of the inputs */
    int32_t page_rows, scale_step;                /* scale_step: 1 if each head has a scale, else 0 */
    uint32_t tokens;
};

/* A word of 16, 8 or 4 bytes at once. What a kernel before this one may still be writing is not loaded by the path for
   constant data. */
template <class type>
using word_of = std::conditional_t<sizeof(type) == 16, uint4, std::conditional_t<sizeof(type) == 8, uint2, uint32_t>>;

template <bool pdl, class type> __device__ inline type read_word(const type *from)
{
    const word_of<type> *const word = reinterpret_cast<const word_of<type> *>(from);
    const word_of<type> held = pdl ? *word : __ldg(word);
    return reinterpret_cast<const type &>(held);
}

template <class type> __device__ inline void write_word(type *to, const type &value)
{
    *reinterpret_cast<word_of<type> *>(to) = reinterpret_cast<const word_of<type> &>(value);
}

/* ---- vLLM: stores ---- */

/* reshape_and_cache_flash. A block per token, of as many threads as it has elements, at most 512. Token-major with one
   scale: the threads move K's vectors of 8 elements, then V's. Head-major, or with a scale for each head: a warp moves
   a head. No PDL. 4 blocks fit on a multiprocessor; with as many registers as ptxas would like, 2 do by heads, and take
   twice as long (H200). */
template <int heads, int head_elements, bool by_head>
__global__ void __launch_bounds__(512, 4) vllm_quant_store_kernel(const __grid_constant__ convert_params p)
{
    constexpr int threads = heads * head_elements < 512 ? heads * head_elements : 512;
    constexpr int vectors = head_elements / 8 * (by_head ? 1 : heads), lanes = by_head ? 32 : threads;
    constexpr int steps = (vectors + lanes - 1) / lanes, warps = threads / 32;
    const int64_t token = blockIdx.x, slot = p.slot[token];
    if (slot < 0)
        return;
    const int64_t page = slot / p.page_rows, row = slot % p.page_rows;
    const int64_t to = page * p.page_stride + row * p.row_stride;
    const int lane = by_head ? int(threadIdx.x) % 32 : int(threadIdx.x);
#pragma unroll
    for (int head = by_head ? int(threadIdx.x) / 32 : 0; head < (by_head ? heads : 1); head += warps) {
        const eight_bf16 *const k =
            reinterpret_cast<const eight_bf16 *>(p.k + token * p.k_stride + head * head_elements);
        const eight_bf16 *const v =
            reinterpret_cast<const eight_bf16 *>(p.v + token * p.v_stride + head * head_elements);
        eight_e4m3 *const k_to = reinterpret_cast<eight_e4m3 *>(p.k_cache + to + head * p.head_stride);
        eight_e4m3 *const v_to = reinterpret_cast<eight_e4m3 *>(p.v_cache + to + head * p.head_stride);
        eight_bf16 a[steps], b[steps];
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (lane + i * lanes < vectors) {
                a[i] = read_word<false>(k + lane + i * lanes);
                b[i] = read_word<false>(v + lane + i * lanes);
            }
        const float k_scale = __ldg(p.k_scale + head * p.scale_step), v_scale = __ldg(p.v_scale + head * p.scale_step);
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (lane + i * lanes < vectors) {
                write_word(k_to + lane + i * lanes, quantise<true>(a[i], k_scale));
                write_word(v_to + lane + i * lanes, quantise<true>(b[i], v_scale));
            }
    }
}

template <int heads, int head_elements> cudaError_t launch_vllm_store(const convert_params &p, bool, cudaStream_t on)
{
    const bool by_head = p.head_stride != head_elements || p.scale_step != 0;
    return launch_opponent(by_head ? vllm_quant_store_kernel<heads, head_elements, true>
                                   : vllm_quant_store_kernel<heads, head_elements, false>,
                           dim3(p.tokens), dim3(std::min(heads * head_elements, 512)), false, on, p);
}

/* concat_and_cache_mla, with "fp8": latents of 512 elements, then 64 of the position. A block of 512 threads per token;
   a thread moves an element of the first kind and, if it is one of the first 64, one of the second. */
__global__ void __launch_bounds__(512) vllm_mla_store_kernel(const __grid_constant__ convert_params p)
{
    const int64_t token = blockIdx.x, slot = p.slot[token];
    if (slot < 0)
        return;
    const int64_t page = slot / p.page_rows, row = slot % p.page_rows;
    uint8_t *const to = p.k_cache + page * p.page_stride + row * p.row_stride + threadIdx.x;
    const float scale = __ldg(p.k_scale);
    const __nv_bfloat16 k = p.k[token * p.k_stride + threadIdx.x];
    const __nv_bfloat16 v = threadIdx.x < 64 ? p.v[token * p.v_stride + threadIdx.x] : k;
    to[0] = __nv_cvt_float_to_fp8(__bfloat162float(k) / scale, __NV_SATFINITE, __NV_E4M3);
    if (threadIdx.x < 64)
        to[512] = __nv_cvt_float_to_fp8(__bfloat162float(v) / scale, __NV_SATFINITE, __NV_E4M3);
}

inline cudaError_t launch_vllm_mla(const convert_params &p, bool, cudaStream_t on)
{
    return launch_opponent(vllm_mla_store_kernel, dim3(p.tokens), dim3(512), false, on, p);
}

/* The largest x of each group of lanes. */
template <int lanes> __device__ inline float over_lanes(float x)
{
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, step, lanes));
    return x;
}

__device__ inline float largest_of_four(float2 a, float2 b)
{
    return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
}

__device__ inline uint32_t four_e4m3(float2 a, float2 b)
{
    const uint32_t low = __nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

__device__ inline float largest_of(const eight_bf16 &x)
{
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = __bfloat1622float2(x.pair[i]);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    return most;
}

/* concat_and_cache_ds_mla: a block of 96 threads per token. Each half of the first two warps quantises a tile of 128
   elements, 8 in a lane, and writes its scale; the third warp copies 64 bf16. */
__global__ void __launch_bounds__(96) vllm_ds_mla_store_kernel(const __grid_constant__ convert_params p)
{
    const int64_t token = blockIdx.x, slot = p.slot[token];
    if (slot < 0)
        return;
    const int64_t page = slot / p.page_rows, row = slot % p.page_rows;
    uint8_t *const to = p.k_cache + page * p.page_stride + row * p.row_stride;
    if (threadIdx.x >= 64) {
        const int i = int(threadIdx.x) - 64;
        const uint32_t pair = __ldg(reinterpret_cast<const uint32_t *>(p.v + token * p.v_stride) + i);
        reinterpret_cast<uint32_t *>(to + 528)[i] = pair;
        return;
    }
    const eight_bf16 x = read_word<false>(reinterpret_cast<const eight_bf16 *>(p.k + token * p.k_stride) + threadIdx.x);
    const float most = over_lanes<16>(largest_of(x));
    const float scale = exp2f(ceilf(log2f(fmaxf(most / 448.f, 1e-4f))));
    if (threadIdx.x % 16 == 0)
        reinterpret_cast<float *>(to + 512)[threadIdx.x / 16] = scale;
    write_word(reinterpret_cast<eight_e4m3 *>(to) + threadIdx.x, quantise<true>(x, scale));
}

inline cudaError_t launch_vllm_ds_mla(const convert_params &p, bool, cudaStream_t on)
{
    return launch_opponent(vllm_ds_mla_store_kernel, dim3(p.tokens), dim3(96), false, on, p);
}

/* indexer_k_quant_and_cache, 128 elements: a block of 4 warps per token, of which one has elements, 4 in a lane. Theirs
   stores them byte by byte. */
template <bool power_of_two>
__global__ void __launch_bounds__(128) vllm_indexer_kernel(const __grid_constant__ convert_params p)
{
    const int64_t token = blockIdx.x, slot = p.slot[token];
    const int64_t page = slot / p.page_rows, row = slot % p.page_rows;
    if (slot < 0 || threadIdx.y > 0)
        return;
    const uint2 word = __ldg(reinterpret_cast<const uint2 *>(p.k + token * 128) + threadIdx.x);
    const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162 &>(word.x));
    const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162 &>(word.y));
    const float most = over_lanes<32>(largest_of_four(a, b));
    float scale = fmaxf(most, 1e-4f) / 448.f;
    if (power_of_two)
        scale = exp2f(ceilf(log2f(scale)));
    uint8_t *const to = p.k_cache + page * p.page_stride;
    reinterpret_cast<uint32_t *>(to + row * 128)[threadIdx.x] =
        four_e4m3(make_float2(a.x / scale, a.y / scale), make_float2(b.x / scale, b.y / scale));
    if (threadIdx.x == 0)
        reinterpret_cast<float *>(to + p.page_rows * 128)[row] = scale;
}

template <bool power_of_two> cudaError_t launch_vllm_indexer(const convert_params &p, bool, cudaStream_t on)
{
    return launch_opponent(vllm_indexer_kernel<power_of_two>, dim3(p.tokens), dim3(32, 4), false, on, p);
}

/* triton_reshape_and_cache_flash_per_token_head_quant, e4m3: a block for each token and head, of an element in each
   thread, as Triton lays out 128 elements over 4 warps; K, then V. It multiplies by the inverse of the scale. */
template <int heads, int head_elements>
__global__ void __launch_bounds__(head_elements) vllm_token_head_kernel(const __grid_constant__ convert_params p)
{
    constexpr int warps = head_elements / 32;
    __shared__ float most_of[2][warps];
    const int64_t token = blockIdx.x, slot = p.slot[token];
    const int head = int(blockIdx.y), i = head * head_elements + int(threadIdx.x);
    if (slot < 0)
        return;
    const float k = __bfloat162float(p.k[token * p.k_stride + i]), v = __bfloat162float(p.v[token * p.v_stride + i]);
    const int64_t page = slot / p.page_rows, row = slot % p.page_rows;
    float k_most = fabsf(k), v_most = fabsf(v);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        k_most = fmaxf(k_most, __shfl_xor_sync(~0u, k_most, step));
        v_most = fmaxf(v_most, __shfl_xor_sync(~0u, v_most, step));
    }
    most_of[0][threadIdx.x / 32] = k_most, most_of[1][threadIdx.x / 32] = v_most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; w++)
        k_most = fmaxf(k_most, most_of[0][w]), v_most = fmaxf(v_most, most_of[1][w]);
    const float k_scale = fmaxf(k_most / 448.f, 1e-6f), v_scale = fmaxf(v_most / 448.f, 1e-6f);
    const int64_t to = page * p.page_stride + row * p.row_stride + head * p.head_stride + threadIdx.x;
    p.k_cache[to] = __nv_cvt_float_to_fp8(k * (1.f / k_scale), __NV_SATFINITE, __NV_E4M3);
    p.v_cache[to] = __nv_cvt_float_to_fp8(v * (1.f / v_scale), __NV_SATFINITE, __NV_E4M3);
    if (threadIdx.x == 0) { /* after the head */
        *reinterpret_cast<float *>(p.k_cache + to + head_elements) = k_scale;
        *reinterpret_cast<float *>(p.v_cache + to + head_elements) = v_scale;
    }
}

template <int heads, int head_elements>
cudaError_t launch_vllm_token_head(const convert_params &p, bool, cudaStream_t on)
{
    return launch_opponent(vllm_token_head_kernel<heads, head_elements>, dim3(p.tokens, heads), dim3(head_elements),
                           false, on, p);
}

/* ---- SGLang: stores ---- */

/* elementwise/kvcache.cuh, store_kvcache_quant: a warp per token, blocks of 128 threads, 16 bytes of input in a lane,
   PDL on Hopper and newer. It waits, reads the slot and the scales, and triggers last. Before that kernel, and still
   where sizes do not fit it, SGLang divided and converted with torch and then stored, in five launches. */
template <int elements, bool pdl>
__global__ void __launch_bounds__(128, 1) sglang_quant_kernel(const __grid_constant__ convert_params p)
{
    constexpr int vectors = elements / 8, steps = (vectors + 31) / 32;
    constexpr bool together = steps <= 20; /* K and V fit into the registers */
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32;
    const int lane = int(threadIdx.x) % 32;
    if (token >= p.tokens)
        return;
    pdl_wait<pdl>();
    const int64_t to = (pdl ? p.slot[token] : __ldg(p.slot + token)) * p.row_stride;
    const eight_bf16 *const k = reinterpret_cast<const eight_bf16 *>(p.k + token * p.k_stride) + lane;
    const eight_bf16 *const v = reinterpret_cast<const eight_bf16 *>(p.v + token * p.v_stride) + lane;
    eight_e4m3 *const k_to = reinterpret_cast<eight_e4m3 *>(p.k_cache + to) + lane;
    eight_e4m3 *const v_to = reinterpret_cast<eight_e4m3 *>(p.v_cache + to) + lane;
    const float k_scale = read_word<pdl>(p.k_scale), v_scale = read_word<pdl>(p.v_scale);
    eight_bf16 a[steps], b[steps];
#pragma unroll
    for (int i = 0; i < steps; i++)
        if (lane + 32 * i < vectors)
            a[i] = read_word<pdl>(k + 32 * i);
    if (together)
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (lane + 32 * i < vectors)
                b[i] = read_word<pdl>(v + 32 * i);
    __syncwarp(); /* else ptxas puts loads after the division */
    const float k_inverse = 1.f / k_scale, v_inverse = 1.f / v_scale;
#pragma unroll
    for (int i = 0; i < steps; i++)
        if (lane + 32 * i < vectors)
            write_word(k_to + 32 * i, quantise<false>(a[i], k_inverse));
    if (!together)
#pragma unroll
        for (int i = 0; i < steps; i++)
            if (lane + 32 * i < vectors)
                b[i] = read_word<pdl>(v + 32 * i);
#pragma unroll
    for (int i = 0; i < steps; i++)
        if (lane + 32 * i < vectors)
            write_word(v_to + 32 * i, quantise<false>(b[i], v_inverse));
    pdl_trigger<pdl>();
}

template <int elements> cudaError_t launch_sglang_quant(const convert_params &p, bool pdl, cudaStream_t on)
{
    return launch_opponent(pdl ? sglang_quant_kernel<elements, true> : sglang_quant_kernel<elements, false>,
                           dim3((p.tokens + 3) / 4), dim3(128), pdl, on, p);
}

/* The power of two at or above x > 0, as the byte of UE8M0. */
__device__ inline uint32_t to_e8m0(float x)
{
    const uint32_t bits = __float_as_uint(x);
    return (bits >> 23) + ((bits & 0x7fffff) != 0);
}

/* deepseek_v4/store.cuh, fused_store_flashmla_cache: a block of 8 warps per token, each of 64 elements, 2 in a lane; 7
   warps quantise, with a scale of a byte behind all rows of the page, and the last copies. PDL. */
template <bool pdl> __global__ void __launch_bounds__(256) sglang_v4_kernel(const __grid_constant__ convert_params p)
{
    const uint32_t warp = threadIdx.x / 32, shift = 31 - __clz(p.page_rows);
    pdl_wait<pdl>();
    const int64_t slot = pdl ? p.slot[blockIdx.x] : __ldg(p.slot + blockIdx.x);
    const uint32_t page = uint32_t(slot >> shift), row = uint32_t(slot) & (uint32_t(p.page_rows) - 1);
    const __nv_bfloat162 pair =
        read_word<pdl>(reinterpret_cast<const __nv_bfloat162 *>(p.k) + threadIdx.x + blockIdx.x * 256ll);
    uint8_t *const at = p.k_cache + page * p.page_stride, *const to = at + row * 576;
    if (warp != 7) {
        const float2 x = __bfloat1622float2(pair);
        const float most = over_lanes<32>(fmaxf(fabsf(x.x), fabsf(x.y)));
        const uint32_t scale = to_e8m0(fmaxf(1e-4f, most) / 448.f);
        const float inverse = __uint_as_float((254 - scale) << 23);
        reinterpret_cast<__nv_fp8x2_storage_t *>(to)[threadIdx.x] =
            __nv_cvt_float2_to_fp8x2(make_float2(x.x * inverse, x.y * inverse), __NV_SATFINITE, __NV_E4M3);
        if (threadIdx.x % 32 == 0) /* theirs: all lanes */
            at[576 * p.page_rows + row * 8 + warp] = uint8_t(scale);
    } else
        reinterpret_cast<__nv_bfloat162 *>(to + 448)[threadIdx.x - 224] = pair;
    pdl_trigger<pdl>();
}

inline cudaError_t launch_sglang_v4(const convert_params &p, bool pdl, cudaStream_t on)
{
    return launch_opponent(pdl ? sglang_v4_kernel<true> : sglang_v4_kernel<false>, dim3(p.tokens), dim3(256), pdl, on,
                           p);
}

/* dsa/fused_store_index_cache.cuh: a warp per token of 128 elements, blocks of 4 warps. PDL. */
template <bool pdl>
__global__ void __launch_bounds__(128) sglang_indexer_kernel(const __grid_constant__ convert_params p)
{
    const uint32_t thread = blockIdx.x * 128 + threadIdx.x, token = thread / 32, shift = 31 - __clz(p.page_rows);
    if (token >= p.tokens)
        return;
    pdl_wait<pdl>();
    const int64_t slot = pdl ? p.slot[token] : __ldg(p.slot + token);
    const uint2 word = read_word<pdl>(reinterpret_cast<const uint2 *>(p.k) + thread);
    const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162 &>(word.x));
    const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162 &>(word.y));
    const float most = over_lanes<32>(largest_of_four(a, b));
    const float scale = fmaxf(1e-4f, most) / 448.f, inverse = 1.f / scale;
    const uint32_t page = uint32_t(slot >> shift), row = uint32_t(slot) & (uint32_t(p.page_rows) - 1);
    uint8_t *const to = p.k_cache + page * p.page_stride;
    reinterpret_cast<uint32_t *>(to + row * 128)[threadIdx.x % 32] =
        four_e4m3(make_float2(a.x * inverse, a.y * inverse), make_float2(b.x * inverse, b.y * inverse));
    if (threadIdx.x % 32 == 0) /* theirs: all lanes */
        reinterpret_cast<float *>(to + p.page_rows * 128)[row] = scale;
    pdl_trigger<pdl>();
}

inline cudaError_t launch_sglang_indexer(const convert_params &p, bool pdl, cudaStream_t on)
{
    return launch_opponent(pdl ? sglang_indexer_kernel<true> : sglang_indexer_kernel<false>, dim3((p.tokens + 3) / 4),
                           dim3(128), pdl, on, p);
}

/* ---- vLLM: gathers ---- */

struct gather_convert_params {
    const uint8_t *cache;
    __nv_bfloat16 *dst;
    const int32_t *table, *starts, *request; /* pages of the requests; where tokens start; the request of a token */
    const float *scale;
    int64_t pages_per_request, page_stride, row_stride, dst_stride; /* of the cache, and elements of dst */
    int32_t requests, tokens, page_rows;
};

/* The tokens of a page that one request has. */
struct page_task {
    int32_t request, page, first, end, to;
};

/* Its newest kernels have a block for each page that some request has. Thread 0 looks for it, request by request. */
__device__ inline bool find_page(const gather_convert_params &p, int32_t block, page_task *task)
{
    for (int32_t r = 0; r < p.requests; r++) {
        const int32_t begin = min(p.starts[r], p.tokens), length = max(min(p.starts[r + 1], p.tokens) - begin, 0);
        const int32_t pages = (length + p.page_rows - 1) / p.page_rows;
        if (block < pages) {
            *task = {r, block, 0, min(p.page_rows, length - block * p.page_rows), begin + block * p.page_rows};
            return true;
        }
        block -= pages;
    }
    return false;
}

/* gather_and_maybe_dequant_cache, kernel of 2026 (gather_and_maybe_dequant_cache_page): a block of 256 threads per page
   (128 from 1,048,576 tokens on), a vector of 8 elements in a thread after the other. vLLM has it for rows of 320, 512
   and 576 elements. */
template <int elements>
__global__ void __launch_bounds__(256) vllm_gather_page_kernel(const __grid_constant__ gather_convert_params p)
{
    constexpr int vectors = elements / 8;
    __shared__ page_task task;
    __shared__ int32_t page;
    __shared__ bool found;
    if (threadIdx.x == 0) {
        found = find_page(p, int32_t(blockIdx.x), &task);
        if (found)
            page = p.table[task.request * p.pages_per_request + task.page];
    }
    __syncthreads();
    if (!found)
        return;
    const float scale = __ldg(p.scale);
    const int32_t count = (task.end - task.first) * vectors;
    const uint8_t *const from = p.cache + page * p.page_stride + task.first * p.row_stride;
    __nv_bfloat16 *const to = p.dst + task.to * p.dst_stride;
    constexpr int at_once = 4;
    for (int32_t i = int32_t(threadIdx.x); i < count; i += at_once * int32_t(blockDim.x)) {
        eight_e4m3 x[at_once];
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int32_t n = i + k * int32_t(blockDim.x), row = n / vectors;
            if (n < count)
                x[k] = read_word<false>(reinterpret_cast<const eight_e4m3 *>(from + row * p.row_stride) +
                                        (n - row * vectors));
        }
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int32_t n = i + k * int32_t(blockDim.x), row = n / vectors;
            if (n < count)
                write_word(reinterpret_cast<eight_bf16 *>(to + row * p.dst_stride) + (n - row * vectors),
                           dequantise(x[k], scale));
        }
    }
}

template <int elements> cudaError_t launch_vllm_gather_page(const gather_convert_params &p, cudaStream_t on)
{
    const unsigned blocks = unsigned((p.tokens + p.page_rows - 1) / p.page_rows + 2 * p.requests);
    vllm_gather_page_kernel<elements><<<blocks, p.tokens >= 1 << 20 ? 128 : 256, 0, on>>>(p);
    return cudaGetLastError();
}

/* The same, kernel before that: a block of 64 threads per token. */
template <int elements>
__global__ void __launch_bounds__(64) vllm_gather_token_kernel(const __grid_constant__ gather_convert_params p)
{
    constexpr int vectors = elements / 8, steps = (vectors + 63) / 64;
    const int32_t token = int32_t(blockIdx.x);
    const int64_t request = p.request[token], begin = p.starts[request];
    if (token >= p.starts[request + 1])
        return;
    const int32_t at = token - int32_t(begin), page = p.table[request * p.pages_per_request + at / p.page_rows];
    const eight_e4m3 *const from =
        reinterpret_cast<const eight_e4m3 *>(p.cache + page * p.page_stride + at % p.page_rows * p.row_stride) +
        threadIdx.x;
    eight_bf16 *const to = reinterpret_cast<eight_bf16 *>(p.dst + token * p.dst_stride) + threadIdx.x;
    const float scale = __ldg(p.scale);
    eight_e4m3 x[steps];
#pragma unroll
    for (int i = 0; i < steps; i++)
        if (int(threadIdx.x) + 64 * i < vectors)
            x[i] = read_word<false>(from + 64 * i);
#pragma unroll
    for (int i = 0; i < steps; i++)
        if (int(threadIdx.x) + 64 * i < vectors)
            write_word(to + 64 * i, dequantise(x[i], scale));
}

template <int elements> cudaError_t launch_vllm_gather_token(const gather_convert_params &p, cudaStream_t on)
{
    vllm_gather_token_kernel<elements><<<unsigned(p.tokens), 64, 0, on>>>(p);
    return cudaGetLastError();
}

/* cp_gather_and_upconvert_fp8_kv_cache, kernel of 2026: rows of "fp8_ds_mla". A block of 16 warps per page; a warp
   takes every 16th token of it. */
__global__ void __launch_bounds__(512) vllm_upconvert_kernel(const __grid_constant__ gather_convert_params p)
{
    __shared__ page_task task;
    __shared__ int32_t page;
    __shared__ bool found;
    if (threadIdx.x == 0) {
        found = find_page(p, int32_t(blockIdx.x), &task);
        if (found)
            page = p.table[task.request * p.pages_per_request + task.page];
    }
    __syncthreads();
    if (!found)
        return;
    const int lane = int(threadIdx.x) % 32;
    for (int32_t row = task.first + int32_t(threadIdx.x) / 32; row < task.end; row += 16) {
        const uint8_t *const from = p.cache + page * p.page_stride + row * p.row_stride;
        __nv_bfloat16 *const to = p.dst + (task.to + row - task.first) * p.dst_stride;
        eight_e4m3 x[2];
        float scale[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            x[k] = read_word<false>(reinterpret_cast<const eight_e4m3 *>(from) + 32 * k + lane);
            scale[k] = __ldg(reinterpret_cast<const float *>(from + 512) + (32 * k + lane) / 16);
        }
        const uint32_t pair = __ldg(reinterpret_cast<const uint32_t *>(from + 528) + lane);
        /* Keeps ptxas from loading the second half after the first is stored. */
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 2; k++)
            write_word(reinterpret_cast<eight_bf16 *>(to) + 32 * k + lane, dequantise(x[k], scale[k]));
        reinterpret_cast<uint32_t *>(to + 512)[lane] = pair;
    }
}

template <int> cudaError_t launch_vllm_upconvert(const gather_convert_params &p, cudaStream_t on)
{
    const unsigned blocks = unsigned((p.tokens + p.page_rows - 1) / p.page_rows + 2 * p.requests);
    vllm_upconvert_kernel<<<blocks, 512, 0, on>>>(p);
    return cudaGetLastError();
}

typedef cudaError_t convert_launch(const convert_params &p, bool pdl, cudaStream_t on);
typedef cudaError_t gather_convert_launch(const gather_convert_params &p, cudaStream_t on);

#endif /* OPPONENTS_CONVERT_H */

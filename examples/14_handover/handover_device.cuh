/* SPDX-License-Identifier: MIT */
/* handover_device.cuh: fills a cache on the GPU with the pattern of handover_pattern.h, and verifies every byte of it,
   those of nobody's slots included. CUDA, C++17. All functions but handover_describe only enqueue. */
#ifndef HANDOVER_DEVICE_CUH
#define HANDOVER_DEVICE_CUH

#include "handover_pattern.h"
#include <cuda_runtime.h>

/* What a verification found, in device memory; handover_verify sets it. */
typedef struct handover_faults {
    unsigned long long bytes; /* that are wrong */
    unsigned long long first; /* the first of them, from the beginning of the cache on */
} handover_faults;

static __global__ void handover_own_kernel(int64_t *owner, int64_t slots, const int64_t *slot, int64_t request,
                                           int64_t first_token, int64_t tokens)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < tokens; i += step)
        if (slot[i] >= 0 && slot[i] < slots)
            owner[slot[i]] = request < 0 ? -1 : handover_owner(request, first_token + i);
}

static __global__ void handover_reset_kernel(handover_faults *faults)
{
    faults->bytes = 0;
    faults->first = ~0ull;
}

/* Each thread writes, or compares, one unit (see handover_unit) of the cache at a time. */
template <bool verify, class word>
static __global__ void handover_pattern_kernel(handover_cache c, uint64_t bytes, const int64_t *owner,
                                               uint64_t background, handover_faults *faults)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x * sizeof(word);
    for (uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * sizeof(word); at < bytes; at += step) {
        const handover_place p = handover_place_of(&c, at);
        const uint64_t want = handover_expected(&p, owner[p.slot], background, at);
        word *const cell = (word *)(c.data + at);
        uint32_t first = 0;
        if (!verify) {
            *cell = (word)want;
            continue;
        }
        const uint32_t wrong = handover_differing((uint64_t)*cell, want, sizeof(word), &first);
        if (wrong) {
            atomicAdd(&faults->bytes, (unsigned long long)wrong);
            atomicMin(&faults->first, (unsigned long long)(at + first));
        }
    }
}

template <bool verify>
static cudaError_t handover_run_pattern(const handover_cache *c, const int64_t *owner, uint64_t background,
                                        handover_faults *faults, cudaStream_t stream)
{
    const unsigned blocks = 1056, threads = 256; /* 8 blocks on each of an H200's 132 multiprocessors: all it holds */
    const uint64_t bytes = handover_cache_bytes(c);
    if (handover_unit(c) == 8)
        handover_pattern_kernel<verify, uint64_t><<<blocks, threads, 0, stream>>>(*c, bytes, owner, background, faults);
    else
        handover_pattern_kernel<verify, uint8_t><<<blocks, threads, 0, stream>>>(*c, bytes, owner, background, faults);
    return cudaGetLastError();
}

/* Says that tokens [first_token, first_token + tokens) of a request lie in these slots (device memory, one for each of
   them), or that nobody's do if request is -1. owner: one for each of the cache's `slots` slots, in device memory; set
   all to -1 first (cudaMemset to 0xff). */
static inline cudaError_t handover_own(int64_t *owner, int64_t slots, const int64_t *slot, int64_t request,
                                       int64_t first_token, int64_t tokens, cudaStream_t stream)
{
    if (tokens > 0)
        handover_own_kernel<<<64, 256, 0, stream>>>(owner, slots, slot, request, first_token, tokens);
    return cudaGetLastError();
}

/* Writes the whole cache. */
static inline cudaError_t handover_fill(const handover_cache *c, const int64_t *owner, uint64_t background,
                                        cudaStream_t stream)
{
    return handover_run_pattern<false>(c, owner, background, NULL, stream);
}

/* Compares the whole cache, and counts what is wrong in *faults (device memory). */
static inline cudaError_t handover_verify(const handover_cache *c, const int64_t *owner, uint64_t background,
                                          handover_faults *faults, cudaStream_t stream)
{
    handover_reset_kernel<<<1, 1, 0, stream>>>(faults);
    return handover_run_pattern<true>(c, owner, background, faults, stream);
}

/* Describes the first wrong byte. `faults` is a copy in host memory, of a cache that has not changed since. Reads the
   GPU's memory and waits for that. */
static inline cudaError_t handover_describe(const handover_cache *c, const int64_t *owner, uint64_t background,
                                            const handover_faults *faults, char *text, size_t size)
{
    unsigned char got = 0;
    int64_t whose = -1;
    const handover_place p = handover_place_of(c, faults->first);
    cudaError_t error = cudaMemcpy(&got, c->data + faults->first, 1, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess)
        error = cudaMemcpy(&whose, owner + p.slot, sizeof whose, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess)
        handover_describe_byte(c, whose, background, faults->first, got, text, size);
    return error;
}

#endif

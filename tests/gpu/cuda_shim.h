/* SPDX-License-Identifier: MIT */
/* The part of CUDA's C++ that the kernels of kvprim_cuda.cuh use, on the CPU, one thread after another; the threads of
   a kernel that has barriers take turns. Include it before kvprim_cuda.cuh, and define KVPRIM_CUDA_EMULATE. */
#ifndef CUDA_SHIM_H
#define CUDA_SHIM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <set>
#include "../../kvprim.h"
#include "cuda_turns.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define KVPRIM_UNROLL
#define KVPRIM_ROLLED
/* Up to 32 KB of parameters are not copied for each thread. */
#define KVPRIM_IN_PLACE &

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

static inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t shift)
{
    return uint32_t((uint64_t(hi) << 32 | lo) >> (shift & 31));
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return uint32_t(uint64_t(a) * b >> 32);
}

/* A thread may touch memory: the launch is not a dependent one, or the thread has waited for the kernel before. */
static bool kvprim_emulate_ready = true;
static unsigned kvprim_emulate_early; /* accesses of threads that may not, so far */

/* A thread reads or writes so many bytes at once, which a GPU does at multiples of them only. */
static inline void kvprim_emulate_access(uint64_t address, uint32_t bytes)
{
    kvprim_emulate_early += !kvprim_emulate_ready;
    if (address % bytes) {
        printf("FAIL no GPU accesses %u bytes at %llx\n", bytes, static_cast<unsigned long long>(address));
        fflush(stdout);
        abort();
    }
}

static inline uint32_t atomicAdd(uint32_t *at, uint32_t value)
{
    kvprim_emulate_access(reinterpret_cast<uintptr_t>(at), 4);
    const uint32_t before = *at;
    *at = before + value;
    return before;
}

static inline int32_t atomicMax(int32_t *at, int32_t value)
{
    kvprim_emulate_access(reinterpret_cast<uintptr_t>(at), 4);
    const int32_t before = *at;
    *at = before > value ? before : value;
    return before;
}

static inline uint32_t atomicExch(uint32_t *at, uint32_t value)
{
    kvprim_emulate_access(reinterpret_cast<uintptr_t>(at), 4);
    const uint32_t before = *at;
    *at = value;
    return before;
}

static inline uint32_t atomicOr(uint32_t *at, uint32_t bits)
{
    kvprim_emulate_access(reinterpret_cast<uintptr_t>(at), 4);
    const uint32_t before = *at;
    *at = before | bits;
    return before;
}

static inline int __popc(uint32_t bits)
{
    return __builtin_popcount(bits);
}

[[maybe_unused]] static bool kvprim_emulate_pdl;        /* as if the device had programmatic dependent launch */
static bool kvprim_emulate_last_only;                   /* run only the last block of a launch */
static bool kvprim_emulate_last_first;                  /* run blocks, and the threads in them, from last to first */
static unsigned kvprim_emulate_launches;                /* so far */
static std::set<void (*)()> kvprim_emulate_kernels;     /* launched so far */
[[maybe_unused]] static void (*kvprim_emulate_last)();  /* the last of them */
[[maybe_unused]] static bool kvprim_emulate_idle;       /* launches and copies are noted, and do nothing */
[[maybe_unused]] static bool kvprim_emulate_fails;      /* launches fail */
[[maybe_unused]] static unsigned kvprim_emulate_copies; /* by CUDA itself, so far */
static bool kvprim_emulate_dependent;                   /* the launch is a dependent one */
static unsigned kvprim_emulate_waits;                   /* threads that waited for the kernel before, so far */
static unsigned kvprim_emulate_unasked;                 /* triggers of launches that are not dependent */

/* Whether a kernel has barriers, and how many threads meet at them: 0 for all of a block, 1 if it is not known. */
struct kvpc_meta;
template <class Params> static bool kvprim_emulate_meets(const Params &)
{
    return false;
}
static inline bool kvprim_emulate_meets(const kvpc_meta &)
{
    return true;
}
struct kvpc_fetch;
static inline bool kvprim_emulate_meets(const kvpc_fetch &)
{
    return true;
}
struct kvpc_convert_tiles;
static inline bool kvprim_emulate_meets(const kvpc_convert_tiles &)
{
    return true;
}
struct kvpc_conversion;
static inline bool kvprim_emulate_meets(const kvpc_conversion &)
{
    return true; /* if it computes scales */
}
template <class Params> static unsigned kvprim_emulate_together(const Params &)
{
    return 0;
}
static inline unsigned kvprim_emulate_together(const kvpc_conversion &)
{
    return 1;
}
static inline unsigned kvprim_emulate_together(const kvpc_convert_tiles &)
{
    return 32; /* those that copy V end before */
}

template <class Kernel, class Params>
static void kvprim_emulate_turns(Kernel *kernel, unsigned threads, const Params &params)
{
    struct call {
        Kernel *kernel;
        const Params &params;
    } const one = {kernel, params};
    static std::vector<char> ready;
    ready.assign(threads, !kvprim_emulate_dependent);
    const bool meet = turns_run(
        threads, kvprim_emulate_last_first, kvprim_emulate_together(params),
        [](const void *what) {
            const call *const c = static_cast<const call *>(what);
            c->kernel(c->params);
        },
        &one, [&](unsigned i) { threadIdx = dim3(i, 0, 0), kvprim_emulate_ready = ready[i] != 0; },
        [&](unsigned i) { ready[i] = kvprim_emulate_ready; });
    if (!meet) {
        printf("FAIL some threads end while others wait for them\n");
        fflush(stdout);
        abort();
    }
}

template <class Kernel, class Params>
static void kvprim_emulate_block(Kernel *kernel, unsigned threads, const Params &params)
{
    if (kvprim_emulate_meets(params)) {
        kvprim_emulate_turns(kernel, threads, params);
        return;
    }
    for (unsigned i = 0; i < threads; i++) {
        threadIdx = dim3(kvprim_emulate_last_first ? threads - 1 - i : i, 0, 0);
        kvprim_emulate_ready = !kvprim_emulate_dependent;
        kernel(params);
    }
}

/* Tests that look at parameters overload it. */
template <class Params> static void kvprim_emulate_note(const Params &)
{
}

template <class Kernel, class Params>
static void kvprim_emulate_launch(Kernel *kernel, dim3 grid, unsigned threads, const Params &params)
{
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    if (blocks == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024) {
        printf("FAIL no GPU takes a launch of %llu blocks of %u threads\n", static_cast<unsigned long long>(blocks),
               threads);
        fflush(stdout);
        abort();
    }
    gridDim = grid;
    blockDim = dim3(threads, 1, 1);
    kvprim_emulate_note(params);
    kvprim_emulate_launches++;
    kvprim_emulate_last = reinterpret_cast<void (*)()>(kernel);
    if (kvprim_emulate_idle)
        return;
    kvprim_emulate_kernels.insert(reinterpret_cast<void (*)()>(kernel));
    for (uint64_t i = kvprim_emulate_last_only ? blocks - 1 : 0; i < blocks; i++) {
        const uint64_t block = kvprim_emulate_last_first && !kvprim_emulate_last_only ? blocks - 1 - i : i;
        blockIdx = dim3(unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / grid.x / grid.y));
        kvprim_emulate_block(kernel, threads, params);
    }
}

/* What kvprim_cuda.cuh leaves to PTX and to CUDA's runtime. */
static inline void kvpc_pdl_wait(bool waits = true)
{
    kvprim_emulate_waits += waits && kvprim_emulate_dependent;
    kvprim_emulate_ready = kvprim_emulate_ready || waits;
}

static inline void kvpc_pdl_trigger(bool now = true)
{
    kvprim_emulate_unasked += now && !kvprim_emulate_dependent;
}

static inline bool kvpc_leaves_room(uint32_t)
{
    return true;
}

static inline uint4 kvpc_load16(uint64_t address)
{
    kvprim_emulate_access(address, 16);
    return *reinterpret_cast<const uint4 *>(uintptr_t(address));
}

static inline void kvpc_store16(uint64_t address, uint4 v)
{
    kvprim_emulate_access(address, 16);
    *reinterpret_cast<uint4 *>(uintptr_t(address)) = v;
}

static inline uint4 kvpc_load16_once(uint64_t address)
{
    return kvpc_load16(address);
}

static inline void kvpc_store16_once(uint64_t address, uint4 v)
{
    kvpc_store16(address, v);
}

static inline uint2 kvpc_load8(uint64_t address)
{
    kvprim_emulate_access(address, 8);
    return *reinterpret_cast<const uint2 *>(uintptr_t(address));
}

static inline void kvpc_store8(uint64_t address, uint2 v)
{
    kvprim_emulate_access(address, 8);
    *reinterpret_cast<uint2 *>(uintptr_t(address)) = v;
}

static inline float kvpc_load_f32(uint64_t address)
{
    kvprim_emulate_access(address, 4);
    return *reinterpret_cast<const float *>(uintptr_t(address));
}

static inline uint32_t kvpc_load_u8(uint64_t address)
{
    kvprim_emulate_access(address, 1);
    return *reinterpret_cast<const uint8_t *>(uintptr_t(address));
}

static inline int32_t kvpc_load_i32(uint64_t address)
{
    kvprim_emulate_access(address, 4);
    return *reinterpret_cast<const int32_t *>(uintptr_t(address));
}

static inline int32_t kvpc_load_new(uint64_t address)
{
    return kvpc_load_i32(address);
}

static inline uint64_t kvpc_add64(uint64_t address, uint64_t value)
{
    kvprim_emulate_access(address, 8);
    const uint64_t before = *reinterpret_cast<uint64_t *>(uintptr_t(address));
    *reinterpret_cast<uint64_t *>(uintptr_t(address)) = before + value;
    return before;
}

static inline uint64_t kvpc_load_told(uint64_t address)
{
    kvprim_emulate_access(address, 8);
    return *reinterpret_cast<const uint64_t *>(uintptr_t(address));
}

static inline void kvpc_tell(uint64_t address, uint32_t number, uint32_t launch)
{
    kvprim_emulate_access(address, 8);
    *reinterpret_cast<uint64_t *>(uintptr_t(address)) = uint64_t(launch) << 32 | number;
}

static inline int64_t kvpc_load_i64(uint64_t address)
{
    kvprim_emulate_access(address, 8);
    return *reinterpret_cast<const int64_t *>(uintptr_t(address));
}

static inline char *kvpc_global(uint64_t address)
{
    kvprim_emulate_access(address, 1);
    return reinterpret_cast<char *>(uintptr_t(address));
}

static inline void kvpc_settle(uint64_t)
{
}

static inline uint64_t kvpc_row_at(uint64_t base, uint32_t row, uint32_t stride)
{
    return base + uint64_t(row) * stride;
}

/* AddressSanitizer knows whether the row is one. */
static inline void kvpc_fetch_edges(uint64_t row, uint32_t bytes, bool fetches = true)
{
    if (!fetches)
        return;
    kvprim_emulate_access(row, 1);
    (void)*reinterpret_cast<const volatile char *>(uintptr_t(row));
    (void)*reinterpret_cast<const volatile char *>(uintptr_t(row + bytes - 1));
}

static inline bool kvpc_has_pdl()
{
    return kvprim_emulate_pdl;
}

[[maybe_unused]] static uint32_t kvprim_emulate_multiprocessors = 1; /* so that small stores take two loads, too */

static inline uint32_t kvpc_multiprocessors()
{
    return kvprim_emulate_multiprocessors;
}

[[maybe_unused]] static bool kvprim_emulate_link;     /* as if one side of every transfer were pinned host memory, */
[[maybe_unused]] static bool kvprim_emulate_to_host;  /* the destination */
[[maybe_unused]] static bool kvprim_emulate_inside;   /* as if both sides were memory of one GPU */
[[maybe_unused]] static bool kvprim_emulate_captured; /* as if the stream were being captured */
[[maybe_unused]] static bool kvprim_emulate_refuse;   /* CUDA's own copy refuses */

static inline bool kvpc_is_link(const void *, const void *, bool *to_host, bool *inside)
{
    *to_host = kvprim_emulate_to_host, *inside = kvprim_emulate_inside;
    return kvprim_emulate_link;
}

[[maybe_unused]] static const void *kvprim_emulate_pageable, *kvprim_emulate_device; /* memory of that kind */

static inline bool kvpc_is_out_of_reach(const void *p, bool host_reads)
{
    return p == (host_reads ? kvprim_emulate_device : kvprim_emulate_pageable) && p;
}

template <class Call> static bool kvpc_is_captured(const Call *)
{
    return kvprim_emulate_captured;
}

template <class Call>
static bool kvpc_copy_rows(const Call *, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                           int64_t row_bytes, int64_t rows)
{
    if (kvprim_emulate_refuse)
        return false;
    gridDim = dim3(1);
    if (!src)
        memset(dst, 0, size_t(row_bytes));
    for (int64_t r = 0; r < rows && src && !kvprim_emulate_idle; r++)
        memcpy(static_cast<char *>(dst) + r * dst_stride, static_cast<const char *>(src) + r * src_stride,
               size_t(row_bytes));
    kvprim_emulate_copies++;
    return true;
}

template <class Call, class Params>
static kvprim_status kvpc_start(const Call *call, void (*kernel)(const Params &), dim3 blocks, uint32_t threads,
                                const Params &params)
{
    if (kvprim_emulate_fails)
        return KVPRIM_ERROR_CUDA;
    kvprim_emulate_dependent = call->launch.pdl != 0;
    kvprim_emulate_launch(kernel, blocks, threads, params);
    kvprim_emulate_dependent = false;
    return KVPRIM_OK;
}

#endif /* CUDA_SHIM_H */

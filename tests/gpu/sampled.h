/* SPDX-License-Identifier: MIT */
/* Stands between kvprim_cuda.cuh and CUDA in test_cuda.cu: counts the launches of each kernel, and chooses the few
   cases of the tests that run under compute-sanitizer, where a launch takes milliseconds. Included twice: before
   kvprim_cuda.cuh, and after it, so that the tests' own calls are CUDA's again. */
#ifndef SAMPLED_H
#define SAMPLED_H
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

static bool sampled_on; /* set before the first call */
static std::mutex sampled_mutex;
static std::map<const void *, unsigned> sampled_launches, sampled_cases; /* of each kernel */
static thread_local bool sampled_skims;                                  /* calls only say what they would enqueue */
static thread_local std::set<const void *> sampled_met;                  /* by the call that skims */

static cudaError_t sampled_launch(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    if (sampled_skims) {
        sampled_met.insert(kernel);
        return cudaSuccess;
    }
    if (sampled_on) {
        const std::lock_guard<std::mutex> lock(sampled_mutex);
        sampled_launches[kernel]++;
    }
    return cudaLaunchKernelExC(config, kernel, args);
}

/* What the headers leave to CUDA counts as one more kernel. */
static cudaError_t sampled_memcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    sampled_met.insert(nullptr);
    return sampled_skims ? cudaSuccess : cudaMemcpyAsync(dst, src, bytes, kind, stream);
}

static cudaError_t sampled_memcpy_2d(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
    sampled_met.insert(nullptr);
    return sampled_skims ? cudaSuccess : cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, stream);
}

static cudaError_t sampled_memset(void *p, int byte, size_t bytes, cudaStream_t stream)
{
    sampled_met.insert(nullptr);
    return sampled_skims ? cudaSuccess : cudaMemsetAsync(p, byte, bytes, stream);
}

/* Whether a case runs: if it is the first, second, fourth, eighth ... of one of its kernels. So each kernel that any
   case reaches runs, and with sizes from all over its cases. A call that enqueues nothing does not. */
template <class Call> static bool sampled_chooses(const Call &call)
{
    bool chosen = false;
    sampled_met.clear();
    sampled_skims = true;
    (void)call();
    sampled_skims = false;
    const std::lock_guard<std::mutex> lock(sampled_mutex);
    for (const void *const kernel : sampled_met) {
        const unsigned n = ++sampled_cases[kernel];
        chosen = chosen || (n & (n - 1)) == 0;
    }
    return chosen;
}

/* Prints a line for each kernel that was launched. tests/profile/profile.py reads them. */
static inline void sampled_print(void)
{
    for (const auto &kernel : sampled_launches) {
        const char *name = nullptr;
#if CUDART_VERSION >= 12030
        (void)cudaFuncGetName(&name, kernel.first);
#endif
        if (name)
            printf("launched %s %u\n", name, kernel.second);
    }
}

#define cudaLaunchKernelExC sampled_launch
#define cudaMemcpyAsync sampled_memcpy
#define cudaMemcpy2DAsync sampled_memcpy_2d
#define cudaMemsetAsync sampled_memset
#else
#undef cudaLaunchKernelExC
#undef cudaMemcpyAsync
#undef cudaMemcpy2DAsync
#undef cudaMemsetAsync
#endif

/* SPDX-License-Identifier: MIT */
/* Implements kvprim_nccl.h for test_nccl_gpu under compute-sanitizer: says at the end how often each kernel ran, and
   runs each once when a communicator loads it, for which nccl_ranks.h has the reason. */
#include "../gpu/sampled.h"

#ifdef __CUDACC__ /* other compilers, for which it is only checked, leave the kernels out */
static cudaError_t warm_up(cudaFuncAttributes *attributes, const void *kernel);
#define cudaFuncGetAttributes warm_up
#endif
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#undef cudaFuncGetAttributes
#include "../gpu/sampled.h"
#ifdef __CUDACC__
#include "norm_numbers.h"
#endif

static const bool counted = (sampled_on = true, atexit(sampled_print) == 0);

#ifdef __CUDACC__
/* With nothing to do, for a rank that has stopped: such kernels wait for none. */
static cudaError_t warm_up(cudaFuncAttributes *attributes, const void *kernel)
{
    static std::mutex mutex;
    static std::set<const void *> done;
    static char *memory; /* a page that says so, and what any tensor points to */
    const std::lock_guard<std::mutex> lock(mutex);
    const cudaError_t loaded = cudaFuncGetAttributes(attributes, kernel);
    bool parts_kernel = false;
    if (loaded != cudaSuccess || !done.insert(kernel).second)
        return loaded;
    for (int k = 0; k < 20; k++)
        parts_kernel = parts_kernel || kernel == kvpn_kernel_of(kvpn_way(kvpn_by_parts + k % 5), KVPRIM_U8,
                                                                k < 10 ? 2 : 3, k / 5 % 2 == 1);
    if (!memory && (cudaMalloc(&memory, 1 << 16) != cudaSuccess || cudaMemset(memory, 1, 1 << 16) != cudaSuccess))
        return cudaErrorMemoryAllocation;
    kvpn_norm_params norm = {};
    kvpn_parts_params parts = {};
    for (char *&peer : norm.peer)
        peer = memory + kvpn_page;
    norm.turn = norm.stop = (uint32_t *)memory, norm.world = 2;
    norm.send = norm.recv = memory + kvpn_page;
    norm.residual = norm.weight = norm.out = norm.residual_out = memory + kvpn_page;
    static_cast<kvpn_params &>(parts) = norm;
    void *args[] = {parts_kernel ? (void *)&parts : (void *)&norm};
    const cudaError_t launched = cudaLaunchKernel(kernel, dim3(1), dim3(32), args, 0, cudaStreamLegacy);
    return launched != cudaSuccess ? launched : cudaStreamSynchronize(cudaStreamLegacy);
}
#endif

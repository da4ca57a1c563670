/* SPDX-License-Identifier: MIT */
/* How kernels of other projects are launched: with programmatic dependent launch, or without. */
#ifndef OPPONENTS_LAUNCH_H
#define OPPONENTS_LAUNCH_H

#include <cuda_runtime.h>

/* Waits for the kernel before this one. */
template <bool pdl> __device__ inline void pdl_wait()
{
#if __CUDA_ARCH__ >= 900
    if (pdl)
        asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the next kernel start. */
template <bool pdl> __device__ inline void pdl_trigger()
{
#if __CUDA_ARCH__ >= 900
    if (pdl)
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Returns CUDA's error. pdl: blocks may start before the previous kernel ends. */
template <class... parameters, class... arguments>
cudaError_t launch_opponent(void (*kernel)(parameters...), dim3 grid, dim3 block, bool pdl, cudaStream_t on,
                            const arguments &...given)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid, config.blockDim = block, config.stream = on;
    config.attrs = &attribute, config.numAttrs = pdl;
    return cudaLaunchKernelEx(&config, kernel, given...);
}

#endif /* OPPONENTS_LAUNCH_H */

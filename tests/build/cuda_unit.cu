// SPDX-License-Identifier: MIT
// Implements kvprim.h and kvprim_cuda.cuh in a CUDA unit, next to CUDA's own headers.
#define KVPRIM_CORE_IMPLEMENTATION
#define KVPRIM_CUDA_IMPLEMENTATION
#include "use.c"
#include <cuda_runtime.h>

// The stream in the declarations is CUDA's own type.
static_assert(sizeof(cudaStream_t) == sizeof launch.stream, "cudaStream_t is a pointer to CUstream_st");
static cudaStream_t stream_of(const kvprim_cuda_launch *desc)
{
    return desc->stream;
}

int main()
{
    return caller() != 0 || stream_of(&launch) != nullptr;
}

/* SPDX-License-Identifier: MIT */
/* The only file of the engine that nvcc compiles: kvprim's implementation, and the rest of CUDA that the engine needs.
   Without ENGINE_NCCL it leaves out the collectives and needs no NCCL. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#ifdef ENGINE_NCCL
#include "kvprim_nccl.h"
#endif
#include "engine_device.h"
#include <cuda_runtime.h>

static const char *text_of(cudaError_t error)
{
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

const char *device_count(int *count)
{
    return text_of(cudaGetDeviceCount(count));
}

const char *device_use(int device)
{
    return text_of(cudaSetDevice(device));
}

/* Non-blocking: it does not wait for the legacy stream, which a library that the engine calls may use. */
const char *device_open_stream(struct CUstream_st **stream)
{
    return text_of(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
}

const char *device_close_stream(struct CUstream_st *stream)
{
    return text_of(cudaStreamDestroy(stream));
}

const char *device_poll(struct CUstream_st *stream, int *done)
{
    const cudaError_t error = cudaStreamQuery(stream);
    *done = error == cudaSuccess;
    return error == cudaErrorNotReady ? NULL : text_of(error);
}

const char *device_alloc(void **memory, size_t bytes)
{
    return text_of(cudaMalloc(memory, bytes));
}

const char *device_free(void *memory)
{
    return text_of(cudaFree(memory));
}

const char *device_alloc_pinned(void **memory, size_t bytes)
{
    return text_of(cudaHostAlloc(memory, bytes, cudaHostAllocDefault));
}

const char *device_free_pinned(void *memory)
{
    return text_of(cudaFreeHost(memory));
}

const char *device_copy(void *dst, const void *src, size_t bytes, struct CUstream_st *stream)
{
    return text_of(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}

/* SPDX-License-Identifier: MIT */
/* What examples for a GPU share: an error ends the program. Include it after the headers of kvprim. C++. */
#ifndef GPU_CUH
#define GPU_CUH

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void cuda_or_exit(cudaError_t error, const char *call)
{
    if (error == cudaSuccess)
        return;
    printf("%s: %s\n", call, cudaGetErrorString(error));
    exit(1);
}
#define CU(call) cuda_or_exit(call, #call)

#if defined(KVPRIM_H)
static inline void kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}
#endif

static inline void need_gpu(void)
{
    int devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    if (found == cudaSuccess)
        return;
    printf("this program needs a CUDA device: %s\n", cudaGetErrorString(found));
    exit(1);
}

/* Allocates device memory for `count` elements, and fills it from `from` unless that is NULL. */
template <class T> static inline T *on_device(size_t count, const T *from = NULL)
{
    void *memory;
    CU(cudaMalloc(&memory, count * sizeof(T)));
    if (from)
        CU(cudaMemcpy(memory, from, count * sizeof(T), cudaMemcpyHostToDevice));
    CU(cudaDeviceSynchronize()); /* other streams do not wait for it */
    return (T *)memory;
}

/* Does not wait for the legacy stream. */
static inline cudaStream_t new_stream(void)
{
    cudaStream_t stream;
    CU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static inline cudaEvent_t new_event(void)
{
    cudaEvent_t event;
    CU(cudaEventCreate(&event));
    return event;
}

static inline float elapsed_ms(cudaEvent_t from, cudaEvent_t to)
{
    float ms;
    CU(cudaEventElapsedTime(&ms, from, to));
    return ms;
}
#endif

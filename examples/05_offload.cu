/* Offload: the KV pages of one sequence, K and V of every layer, go out to pinned host memory and come back to other
   pages, by two launches on 8 SMs, while a compute kernel runs on the rest of the GPU. Shows what each costs the other
   and checks every byte.

       nvcc -arch=native -I. examples/05_offload.cu -o 05_offload && ./05_offload
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

/* A page of one layer: 16 tokens of 2 KB. The sequence has 64 of the 256 pages in each table. */
enum { tables = 2 * 32, pages = 256, moved = 64, page_bytes = 16 * 2048, sms_for_transfer = 8 };
static const int64_t table_bytes = (int64_t)pages * page_bytes, host_table_bytes = (int64_t)moved * page_bytes;
static const double moved_gb = 1e-9 * 2 * tables * (double)host_table_bytes; /* out and back */

static void cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

static __host__ __device__ uint32_t byte_words(int64_t word) /* what the cache holds */
{
    return (uint32_t)word * 2654435761u ^ (uint32_t)(word >> 20);
}

static __global__ void fill(uint32_t *words, int64_t count)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        words[i] = byte_words(i);
}

/* Stands for the model: arithmetic alone. Blocks take jobs until none is left, so it may run on any number of SMs. */
static __global__ void compute(unsigned *next, unsigned jobs, float *sink)
{
    __shared__ unsigned job;
    float x = threadIdx.x;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0)
            job = atomicAdd(next, 1);
        __syncthreads();
        if (job >= jobs)
            break;
        for (int i = 0; i < 20000; i++)
            x = x * 1.0001f + 0.5f;
    }
    if (x == 1)
        *sink = x;
}

/* SPDX-License-Identifier: MIT */
/* Sums a tensor in place over all GPUs of this machine, with a thread per GPU, as the layers of a tensor-parallel model
   do, and then gathers a part from each. Verifies every element.

       nvcc -x cu -std=c++17 -O2 -arch=native -I. examples/06_allreduce.c -lnccl -o allreduce && ./allreduce

   Or without the fast kernels, in C: cc -std=c11 -I. -I$CUDA_HOME/include examples/06_allreduce.c -L$CUDA_HOME/lib64
   -lcudart -lnccl -lpthread. 06_allreduce_mpi.c works across machines. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_nccl.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { count = 16 * 4096, max_gpus = 8 }; /* 16 tokens of a hidden size of 4096, fp32 */

static int world;
static kvprim_comm_id id;

typedef struct job {
    pthread_t thread;
    int rank, wrong;
} job;

static void check_cuda(cudaError_t error, int line)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
    exit(1);
}

static void check_kvprim(kvprim_status status, int line)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "line %d: %s: %s\n", line, kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

static float value(int rank, size_t i)
{
    return (float)(i % 1000) * (float)(rank + 1);
}

/* Uploads this rank's values, sums them in place, and counts the sums that are wrong. */
static int sum(kvprim_comm *comm, float *device, float *host, cudaStream_t stream)
{
    int wrong = 0;
    for (size_t i = 0; i < count; i++)
        host[i] = value(comm->rank, i);
    check_cuda(cudaMemcpyAsync(device, host, sizeof(float) * count, cudaMemcpyHostToDevice, stream), __LINE__);
    check_kvprim(kvprim_all_reduce(comm, device, device, count, KVPRIM_F32, KVPRIM_SUM, stream), __LINE__);
    check_cuda(cudaMemcpyAsync(host, device, sizeof(float) * count, cudaMemcpyDeviceToHost, stream), __LINE__);
    check_cuda(cudaStreamSynchronize(stream), __LINE__);
    check_kvprim(kvprim_comm_check(comm), __LINE__);
    for (size_t i = 0; i < count; i++) {
        float expected = 0;
        for (int r = 0; r < world; r++)
            expected += value(r, i);
        wrong += host[i] != expected;
    }
    return wrong;
}

/* The same for a gather, in place: as of logits, of which each rank has those of its part of the vocabulary. */
static int gather(kvprim_comm *comm, float *device, float *host, cudaStream_t stream)
{
    const size_t part = count / max_gpus, all = part * (size_t)world;
    float *const mine = device + part * (size_t)comm->rank;
    int wrong = 0;
    for (size_t i = 0; i < part; i++)
        host[i] = value(comm->rank, i);
    check_cuda(cudaMemcpyAsync(mine, host, sizeof(float) * part, cudaMemcpyHostToDevice, stream), __LINE__);
    check_kvprim(kvprim_all_gather(comm, device, mine, part, KVPRIM_F32, stream), __LINE__);
    check_cuda(cudaMemcpyAsync(host, device, sizeof(float) * all, cudaMemcpyDeviceToHost, stream), __LINE__);
    check_cuda(cudaStreamSynchronize(stream), __LINE__);
    check_kvprim(kvprim_comm_check(comm), __LINE__);
    for (size_t i = 0; i < all; i++)
        wrong += host[i] != value((int)(i / part), i % part);
    return wrong;
}

static void *run(void *argument)
{
    job *const mine = (job *)argument;
    kvprim_comm comm;
    kvprim_comm_desc desc;
    cudaStream_t stream;
    void *device, *host;
    memset(&comm, 0, sizeof comm);
    memset(&desc, 0, sizeof desc);
    desc.rank = mine->rank;
    desc.world = world;
    desc.id = id;
    check_cuda(cudaSetDevice(mine->rank), __LINE__);
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), __LINE__);
    check_cuda(cudaMalloc(&device, sizeof(float) * count), __LINE__);
    check_cuda(cudaHostAlloc(&host, sizeof(float) * count, cudaHostAllocDefault), __LINE__);
    check_kvprim(kvprim_comm_init(&comm, &desc), __LINE__);
    printf("%s\n", kvprim_comm_describe(&comm));

    mine->wrong = sum(&comm, (float *)device, (float *)host, stream);
    mine->wrong += gather(&comm, (float *)device, (float *)host, stream);

    check_kvprim(kvprim_comm_destroy(&comm), __LINE__);
    check_cuda(cudaFreeHost(host), __LINE__);
    check_cuda(cudaFree(device), __LINE__);
    check_cuda(cudaStreamDestroy(stream), __LINE__);
    return NULL;
}

int main(void)
{
    static job jobs[max_gpus];
    int wrong = 0;
    check_cuda(cudaGetDeviceCount(&world), __LINE__);
    world = world > max_gpus ? max_gpus : world;
    check_kvprim(kvprim_comm_new_id(&id), __LINE__);
    for (int r = 0; r < world; r++) {
        jobs[r].rank = r;
        if (pthread_create(&jobs[r].thread, NULL, run, &jobs[r]) != 0)
            return 1;
    }
    for (int r = 0; r < world; r++) {
        pthread_join(jobs[r].thread, NULL);
        wrong += jobs[r].wrong;
    }
    printf("%d GPUs, %d sums and %d gathered elements each: %d wrong\n", world, count, count / max_gpus * world, wrong);
    return wrong != 0;
}

/* SPDX-License-Identifier: MIT */
/* Sums a tensor over all GPUs of any number of machines, with a process per GPU. MPI starts the processes and carries
   the id. Verifies every element.

       nvcc -x cu -std=c++17 -O2 -arch=native -ccbin mpicxx -I. examples/06_allreduce_mpi.c -lnccl -o allreduce_mpi
       mpirun -n 8 ./allreduce_mpi

   Or without the fast kernels, in C: mpicc -std=c11 -I. -I$CUDA_HOME/include examples/06_allreduce_mpi.c
   -L$CUDA_HOME/lib64 -lcudart -lnccl. With another launcher, only the way in which 128 bytes get from rank 0 to the
   others differs. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_nccl.h"
#include <mpi.h>
#include <stdlib.h>

enum { count = 16 * 4096 }; /* 16 tokens of a hidden size of 4096, fp32 */

static void check_cuda(cudaError_t error, int line)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check_kvprim(kvprim_status status, int line)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "line %d: %s: %s\n", line, kvprim_status_name(status), kvprim_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* This process's number among those of its machine. It takes the GPU of that number. */
static int rank_on_machine(void)
{
    MPI_Comm machine;
    int rank;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &rank);
    MPI_Comm_free(&machine);
    return rank;
}

static float value(int rank, size_t i)
{
    return (float)(i % 1000) * (float)(rank + 1);
}

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
        for (int r = 0; r < comm->world; r++)
            expected += value(r, i);
        wrong += host[i] != expected;
    }
    return wrong;
}

int main(int argc, char **argv)
{
    kvprim_comm comm;
    kvprim_comm_desc desc;
    cudaStream_t stream;
    void *device, *host;
    int wrong, all_wrong, devices;
    memset(&comm, 0, sizeof comm);
    memset(&desc, 0, sizeof desc);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &desc.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &desc.world);
    if (desc.rank == 0)
        check_kvprim(kvprim_comm_new_id(&desc.id), __LINE__);
    MPI_Bcast(desc.id.bytes, (int)sizeof desc.id.bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    desc.timeout_ms = 10000;

    check_cuda(cudaGetDeviceCount(&devices), __LINE__);
    check_cuda(cudaSetDevice(rank_on_machine() % devices), __LINE__);
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), __LINE__);
    check_cuda(cudaMalloc(&device, sizeof(float) * count), __LINE__);
    check_cuda(cudaHostAlloc(&host, sizeof(float) * count, cudaHostAllocDefault), __LINE__);
    check_kvprim(kvprim_comm_init(&comm, &desc), __LINE__);
    printf("%s\n", kvprim_comm_describe(&comm));

    wrong = sum(&comm, (float *)device, (float *)host, stream);
    MPI_Allreduce(&wrong, &all_wrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (desc.rank == 0)
        printf("%d processes, %d sums each: %d wrong\n", (int)desc.world, (int)count, all_wrong);

    check_kvprim(kvprim_comm_destroy(&comm), __LINE__);
    check_cuda(cudaFreeHost(host), __LINE__);
    check_cuda(cudaFree(device), __LINE__);
    check_cuda(cudaStreamDestroy(stream), __LINE__);
    MPI_Finalize();
    return all_wrong != 0;
}

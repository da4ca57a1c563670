/* SPDX-License-Identifier: MIT */
/* An NCCL that moves nothing, for ranks that share a GPU, which NCCL refuses (nccl_ranks.h). Communicators begin and
   end. A collective of more than one rank is an error, so no test passes that needs one. Its version is 0.0.0. */
#include <cstring>
#include <cuda_runtime.h>
#include <nccl.h>

struct ncclComm {
    int rank, world, device;
};

/* Functions of one expression. */
#define NCCL(name, parameters, result)                                                                                 \
    ncclResult_t name parameters                                                                                       \
    {                                                                                                                  \
        return (result);                                                                                               \
    }
#define MOVES const void *send, void *recv, size_t count, ncclDataType_t
#define BY ncclComm_t comm, cudaStream_t stream

#pragma GCC diagnostic ignored "-Wunused-parameter"
extern "C" {
const char *ncclGetErrorString(ncclResult_t)
{
    return "an error";
}

const char *ncclGetLastError(ncclComm_t)
{
    return "there is no NCCL here";
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId, int rank)
{
    int device = 0;
    (void)cudaGetDevice(&device);
    *comm = new ncclComm{rank, world, device};
    return ncclSuccess;
}

/* Of bytes: init exchanges so, if it has one rank. */
ncclResult_t ncclAllGather(MOVES, BY)
{
    return comm->world == 1 && cudaMemcpyAsync(recv, send, count, cudaMemcpyDefault, stream) == cudaSuccess
               ? ncclSuccess
               : ncclInvalidUsage;
}

// clang-format off
NCCL(ncclGetVersion, (int *version), (*version = 0, ncclSuccess))
NCCL(ncclGetUniqueId, (ncclUniqueId *id), (memset(id, 0, sizeof *id), ncclSuccess))
NCCL(ncclCommDestroy, (ncclComm_t comm), (delete comm, ncclSuccess))
NCCL(ncclCommAbort, (ncclComm_t comm), ncclCommDestroy(comm))
NCCL(ncclCommUserRank, (ncclComm_t comm, int *rank), (*rank = comm->rank, ncclSuccess))
NCCL(ncclCommCount, (ncclComm_t comm, int *world), (*world = comm->world, ncclSuccess))
NCCL(ncclCommCuDevice, (ncclComm_t comm, int *device), (*device = comm->device, ncclSuccess))
NCCL(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t *result), (*result = ncclSuccess))
NCCL(ncclMemAlloc, (void **memory, size_t bytes),
     cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError)
NCCL(ncclMemFree, (void *memory), cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError)
NCCL(ncclAllReduce, (MOVES, ncclRedOp_t, BY), ncclInvalidUsage)
NCCL(ncclReduceScatter, (MOVES, ncclRedOp_t, BY), ncclInvalidUsage)
NCCL(ncclReduce, (MOVES, ncclRedOp_t, int, BY), ncclInvalidUsage)
NCCL(ncclBroadcast, (MOVES, int, BY), ncclInvalidUsage)
NCCL(ncclSend, (const void *send, size_t count, ncclDataType_t, int, BY), ncclInvalidUsage)
NCCL(ncclRecv, (void *recv, size_t count, ncclDataType_t, int, BY), ncclInvalidUsage)
NCCL(ncclGroupStart, (), ncclSuccess)
NCCL(ncclGroupEnd, (), ncclSuccess)
// clang-format on
}

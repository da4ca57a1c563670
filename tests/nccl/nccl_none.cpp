/* SPDX-License-Identifier: MIT */
/* An NCCL that moves nothing, for ranks that share a GPU, which NCCL refuses (nccl_ranks.h). Communicators begin and
   end. A collective of more than one rank is an error, so no test passes that needs one. Its version is 0.0.0. */
#include <cstring>
#include <cuda_runtime.h>
#include <nccl.h>

struct ncclComm {
    int rank, world, device;
};

extern "C" {
ncclResult_t ncclGetVersion(int *version)
{
    *version = 0;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t)
{
    return "an error";
}

const char *ncclGetLastError(ncclComm_t)
{
    return "there is no NCCL here";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId, int rank)
{
    int device = 0;
    (void)cudaGetDevice(&device);
    *comm = new ncclComm{rank, world, device};
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return ncclCommDestroy(comm);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *world)
{
    *world = comm->world;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *result)
{
    *result = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **memory, size_t bytes)
{
    return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *memory)
{
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

/* Of bytes: init exchanges so, if it has one rank. */
ncclResult_t ncclAllGather(const void *send, void *recv, size_t bytes, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t stream)
{
    return comm->world == 1 && cudaMemcpyAsync(recv, send, bytes, cudaMemcpyDefault, stream) == cudaSuccess
               ? ncclSuccess
               : ncclInvalidUsage;
}

ncclResult_t ncclAllReduce(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclReduceScatter(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclReduce(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclBroadcast(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclSend(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclRecv(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
{
    return ncclInvalidUsage;
}

ncclResult_t ncclGroupStart()
{
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd()
{
    return ncclSuccess;
}
}

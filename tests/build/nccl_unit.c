/* SPDX-License-Identifier: MIT */
/* kvprim's declarations after NCCL's and CUDA's own: the types are the same, and nothing is declared twice in different
   ways. */
#include <nccl.h>
#include <cuda_runtime.h>
#include "../../kvprim_nccl.h"
#include "../../kvprim_cuda.cuh"

ncclComm_t nccl_of(const kvprim_comm *comm);
ncclComm_t nccl_of(const kvprim_comm *comm)
{
    return comm->nccl;
}

cudaStream_t stream_of(const kvprim_cuda_launch *launch);
cudaStream_t stream_of(const kvprim_cuda_launch *launch)
{
    return launch->stream;
}

/* SPDX-License-Identifier: MIT */
/* Runs examples/07_engine/engine.c without a GPU: implements on the CPU what it calls of CUDA, kvprim_cuda.cuh and
   kvprim_nccl.h. GPUS is the number of GPUs to report. The environment's DAMAGE makes something wrong that the engine
   must notice:
       1, 2   a byte of a gathered row, of a stored row       3   rank 0 adds nothing to the sums */
#define KVPRIM_CORE_IMPLEMENTATION
#include "../../kvprim.h"
#include "../../kvprim_cuda.cuh"
#include "../../kvprim_nccl.h"
#include "../../examples/07_engine/engine_device.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#ifndef GPUS
#define GPUS 4
#endif

static int damaged(int what)
{
    const char *const damage = getenv("DAMAGE");
    return damage && atoi(damage) == what;
}

const char *device_count(int *count)
{
    *count = GPUS;
    return NULL;
}

const char *device_use(int device)
{
    return device < GPUS ? NULL : "no such device";
}

const char *device_alloc(void **memory, size_t bytes)
{
    *memory = malloc(bytes);
    return *memory ? NULL : "out of memory";
}

const char *device_free(void *memory)
{
    free(memory);
    return NULL;
}

const char *device_alloc_pinned(void **memory, size_t bytes)
{
    return device_alloc(memory, bytes);
}

const char *device_free_pinned(void *memory)
{
    return device_free(memory);
}

const char *device_copy(void *dst, const void *src, size_t bytes, struct CUstream_st *stream)
{
    memcpy(dst, src, bytes);
    return stream ? NULL : "not on the stream";
}

/* A stream is a byte of memory, so that a stream that is not closed is a leak. */
const char *device_open_stream(struct CUstream_st **stream)
{
    void *memory;
    const char *const error = device_alloc(&memory, 1);
    *stream = (struct CUstream_st *)memory;
    return error;
}

const char *device_close_stream(struct CUstream_st *stream)
{
    return device_free(stream);
}

const char *device_poll(struct CUstream_st *stream, int *done)
{
    *done = 1;
    return stream ? NULL : "not the stream";
}

kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch)
{
    const kvprim_status status = kvprim_gather(desc);
    if (damaged(1))
        ((char *)desc->dst.data)[desc->row_bytes - 1] ^= 1;
    return launch->stream ? status : KVPRIM_ERROR_ARGUMENT;
}

kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch)
{
    const kvprim_status status = kvprim_store(desc);
    if (damaged(2))
        ((char *)desc->v_cache.data)[0] ^= 1;
    return launch->stream ? status : KVPRIM_ERROR_ARGUMENT;
}

/* The ranks, which are threads, meet here. One communicator at a time. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_here = PTHREAD_COND_INITIALIZER;
static int here, meeting;
static const void *sent[GPUS];

static void meet(int world)
{
    pthread_mutex_lock(&lock);
    const int mine = meeting;
    if (++here == world)
        here = 0, meeting++, pthread_cond_broadcast(&all_here);
    while (meeting == mine)
        pthread_cond_wait(&all_here, &lock);
    pthread_mutex_unlock(&lock);
}

kvprim_status kvprim_comm_new_id(kvprim_comm_id *out)
{
    memset(out, 7, sizeof *out);
    return KVPRIM_OK;
}

kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc)
{
    memset(comm, 0, sizeof *comm);
    comm->rank = desc->rank, comm->world = desc->world, comm->self = comm;
    comm->scratch = malloc(1); /* a leak, unless destroy is called */
    meet(desc->world);
    return desc->id.bytes[0] == 7 ? KVPRIM_OK : KVPRIM_ERROR_ARGUMENT;
}

kvprim_status kvprim_comm_destroy(kvprim_comm *comm)
{
    meet(comm->world);
    free(comm->scratch);
    comm->self = NULL;
    return KVPRIM_OK;
}

kvprim_status kvprim_comm_check(kvprim_comm *comm)
{
    return comm->self == comm ? KVPRIM_OK : KVPRIM_ERROR_ARGUMENT;
}

const char *kvprim_comm_describe(const kvprim_comm *comm)
{
    return comm->self == comm ? "threads of the CPU" : "not a communicator";
}

/* Sums bf16 of which only one rank's is not zero. */
kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count, kvprim_dtype dtype,
                                kvprim_op op, struct CUstream_st *stream)
{
    uint16_t *const sum = (uint16_t *)calloc(count, sizeof *sum);
    sent[comm->rank] = send;
    meet(comm->world);
    for (int r = damaged(3); r < comm->world && sum; r++)
        for (size_t i = 0; i < count; i++)
            sum[i] = (uint16_t)(sum[i] | ((const uint16_t *)sent[r])[i]);
    meet(comm->world);
    if (!sum || dtype != KVPRIM_BF16 || op != KVPRIM_SUM || !stream)
        return KVPRIM_ERROR_ARGUMENT;
    memcpy(recv, sum, count * sizeof *sum);
    free(sum);
    return KVPRIM_OK;
}

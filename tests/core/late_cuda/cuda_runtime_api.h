/* SPDX-License-Identifier: MIT */
/* The part of CUDA's runtime that examples/02_kv_replay/kv_device.h uses, on the CPU. Work runs as late as CUDA may run it: only
   when the host waits for it. A batch that is reused too early, or compared too early, therefore has wrong bytes. An
   address in device memory is never one of the host's, and each call checks its addresses.

   LATE_CUDA_FAIL=n in the environment makes the n-th call fail, of those that can fail. LATE_CUDA_MEMORY=n gives the
   GPU n bytes. */
#ifndef LATE_CUDA_H
#define LATE_CUDA_H

#include "kvprim_cuda.cuh"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum cudaError { cudaSuccess, cudaErrorNoDevice, cudaErrorUnknown } cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaStreamNonBlocking = 1 };

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
};

typedef struct CUevent_st {
    uint64_t recorded, done; /* numbers of operations; 0: never */
} * cudaEvent_t;

typedef struct late_operation {
    enum { late_copy, late_set, late_store, late_gather, late_transfer, late_record } what;
    void *dst;
    const void *src;
    int value;
    size_t bytes;
    kvprim_store_desc store;
    kvprim_gather_desc gather;
    kvprim_transfer_desc transfer;
    int32_t *indices; /* of the transfer, as they were at the call */
    cudaEvent_t event;
} late_operation;

enum { late_queue = 256 };

typedef struct CUstream_st {
    late_operation operations[late_queue];
    uint64_t enqueued, done;
} * cudaStream_t;

/* ---- addresses ---- */

static const uintptr_t late_device_bit = (uintptr_t)1 << 60; /* no host address has this bit */

static bool late_on_device(const void *p)
{
    return ((uintptr_t)p & late_device_bit) != 0;
}

static void *late_on_host(const void *p)
{
    return (void *)((uintptr_t)p & ~late_device_bit);
}

static void late_check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "late_cuda: %s\n", what);
    abort();
}

/* ---- calls that fail ---- */

static bool late_fails(void)
{
    static long calls;
    const char *const fail = getenv("LATE_CUDA_FAIL");
    return ++calls == (fail ? strtol(fail, NULL, 10) : 0);
}

static const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorNoDevice ? "no device" : "an error that was asked for";
}

/* ---- the queue ---- */

static void late_run(const late_operation *o, uint64_t number)
{
    switch (o->what) {
    case late_copy:
        memcpy(late_on_host(o->dst), late_on_host(o->src), o->bytes);
        break;
    case late_set:
        memset(late_on_host(o->dst), o->value, o->bytes);
        break;
    case late_store:
        late_check(kvprim_store(&o->store) == KVPRIM_OK, "kvprim_store fails");
        break;
    case late_gather:
        late_check(kvprim_gather(&o->gather) == KVPRIM_OK, "kvprim_gather fails");
        break;
    case late_transfer:
        late_check(kvprim_transfer(&o->transfer) == KVPRIM_OK, "kvprim_transfer fails");
        free(o->indices);
        break;
    case late_record:
        o->event->done = number;
        break;
    }
}

static void late_run_to(cudaStream_t stream, uint64_t number)
{
    while (stream->done < number) {
        stream->done++;
        late_run(&stream->operations[stream->done % late_queue], stream->done);
    }
}

static cudaError_t late_enqueue(cudaStream_t stream, const late_operation *o)
{
    if (late_fails())
        return cudaErrorUnknown;
    late_check(stream != NULL, "work on the legacy stream");
    late_check(stream->enqueued - stream->done < late_queue, "the host never waits");
    stream->operations[++stream->enqueued % late_queue] = *o;
    if (o->what == late_record)
        o->event->recorded = stream->enqueued;
    return cudaSuccess;
}

/* ---- the runtime ---- */

static cudaStream_t late_stream; /* the only one */

static cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return late_fails() ? cudaErrorUnknown : cudaSuccess;
}

static cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    const char *const memory = getenv("LATE_CUDA_MEMORY");
    snprintf(properties->name, sizeof properties->name, "late CUDA device %d", device);
    properties->totalGlobalMem = memory ? strtoull(memory, NULL, 10) : (size_t)1 << 40;
    return late_fails() ? cudaErrorUnknown : cudaSuccess;
}

static cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    late_check(late_stream == NULL && flags == cudaStreamNonBlocking, "more than one stream, or a blocking one");
    if (late_fails())
        return cudaErrorUnknown;
    *stream = late_stream = (cudaStream_t)calloc(1, sizeof **stream);
    return *stream ? cudaSuccess : cudaErrorUnknown;
}

static cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    late_run_to(stream, stream->enqueued);
    return late_fails() ? cudaErrorUnknown : cudaSuccess;
}

/* All memory, so that a check for leaks finds what only addresses in device memory point to. */
enum { late_most = 64 };
static void *late_memory[late_most];
static int late_count;

static cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    if (late_fails())
        return cudaErrorUnknown;
    late_check(late_count < late_most, "more memory than the fake keeps account of");
    *p = late_memory[late_count++] = malloc(bytes);
    return *p ? cudaSuccess : cudaErrorUnknown;
}

static cudaError_t cudaMalloc(void **p, size_t bytes)
{
    const cudaError_t error = cudaMallocHost(p, bytes);
    if (error == cudaSuccess)
        *p = (void *)((uintptr_t)*p | late_device_bit);
    return error;
}

static cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    const late_operation o = {.what = late_set, .dst = dst, .value = value, .bytes = bytes};
    late_check(late_on_device(dst), "cudaMemsetAsync of host memory");
    return late_enqueue(stream, &o);
}

static cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    const late_operation o = {.what = late_copy, .dst = dst, .src = src, .bytes = bytes};
    const bool in = kind == cudaMemcpyHostToDevice;
    late_check(late_on_device(dst) == in && late_on_device(src) == !in, "cudaMemcpyAsync in the wrong direction");
    return late_enqueue(stream, &o);
}

static cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    late_check(late_stream->done == late_stream->enqueued, "cudaMemcpy with work under way on another stream");
    late_check(kind == cudaMemcpyDeviceToHost && late_on_device(src) && !late_on_device(dst), "cudaMemcpy's kind");
    if (late_fails())
        return cudaErrorUnknown;
    memcpy(dst, late_on_host(src), bytes);
    return cudaSuccess;
}

static cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    if (late_fails())
        return cudaErrorUnknown;
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    return *event ? cudaSuccess : cudaErrorUnknown;
}

static cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const late_operation o = {.what = late_record, .event = event};
    return late_enqueue(stream, &o);
}

static cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    late_run_to(late_stream, event->recorded);
    return late_fails() ? cudaErrorUnknown : cudaSuccess;
}

static cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    late_check(from->recorded && from->done == from->recorded && to->done == to->recorded && from->done <= to->done,
               "the time between events that have not happened");
    *milliseconds = 0.001F;
    return late_fails() ? cudaErrorUnknown : cudaSuccess;
}

/* ---- kvprim_cuda.cuh ---- */

static void late_to_host(kvprim_table *table)
{
    late_check(late_on_device(table->data), "a table in host memory");
    table->data = late_on_host(table->data);
}

KVPRIM_API kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch)
{
    late_operation o = {.what = late_store, .store = *desc};
    late_check(late_on_device(desc->slot) && late_on_device(desc->rejected), "slots or a counter in host memory");
    late_to_host(&o.store.k_cache), late_to_host(&o.store.v_cache), late_to_host(&o.store.k), late_to_host(&o.store.v);
    o.store.slot = late_on_host(desc->slot);
    o.store.rejected = (uint32_t *)late_on_host(desc->rejected);
    return late_enqueue(launch->stream, &o) == cudaSuccess ? KVPRIM_OK : KVPRIM_ERROR_CUDA;
}

KVPRIM_API kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch)
{
    late_operation o = {.what = late_gather, .gather = *desc};
    late_check(late_on_device(desc->index) && late_on_device(desc->rejected), "slots or a counter in host memory");
    late_to_host(&o.gather.dst), late_to_host(&o.gather.src);
    o.gather.index = late_on_host(desc->index);
    o.gather.rejected = (uint32_t *)late_on_host(desc->rejected);
    return late_enqueue(launch->stream, &o) == cudaSuccess ? KVPRIM_OK : KVPRIM_ERROR_CUDA;
}

KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch)
{
    late_operation o = {.what = late_transfer, .transfer = *desc};
    const size_t count = (size_t)desc->count;
    late_check(late_on_device(desc->dst.data) != late_on_device(desc->src.data), "a transfer that stays on one side");
    late_check(desc->host_index && desc->index_type == KVPRIM_I32, "indices that the fake does not know");
    o.indices = (int32_t *)malloc(2 * count * sizeof *o.indices);
    late_check(o.indices != NULL, "out of memory");
    memcpy(o.indices, desc->dst_index, count * sizeof *o.indices);
    memcpy(o.indices + count, desc->src_index, count * sizeof *o.indices);
    o.transfer.dst_index = o.indices;
    o.transfer.src_index = o.indices + count;
    o.transfer.dst.data = late_on_host(desc->dst.data);
    o.transfer.src.data = late_on_host(desc->src.data);
    const cudaError_t error = late_enqueue(launch->stream, &o);
    if (error != cudaSuccess)
        free(o.indices);
    return error == cudaSuccess ? KVPRIM_OK : KVPRIM_ERROR_CUDA;
}

#endif

/* SPDX-License-Identifier: MIT */
/* kv_device.h: the memory that holds the replay's cache, and the calls that move its rows. C11.

   The device is the CPU (this machine's memory, kvprim_store and kvprim_gather) or, if KV_REPLAY_CUDA is defined, a GPU
   (its own memory, kvprim_cuda_store and kvprim_cuda_gather).

   Rows travel in batches, each of one layer. A batch has memory that the host reads and writes, and memory that the
   device does; on the CPU both are the same. Each batch goes through these calls:

       kv_device_next     returns the least recently used batch of a few
       kv_device_wait     waits for the end of its last use, after which its host memory may be written
       kv_device_layout   makes room for a number of slots, K rows and V rows; then the caller writes the slots, and the
                          rows if they are to be stored
       kv_device_store    or kv_device_gather, with a descriptor whose slots and rows are those in device memory

   On a GPU the last two only enqueue: copies between pinned memory and the GPU before and after the library's call, all
   on one stream, so that stores and gathers take effect in the order of the calls. The host goes on meanwhile, and
   waits only for a batch that it needs again.

   Whole pages travel between the cache and host memory from kv_device_allocate_host, which the device reads and writes
   itself (pinned). kv_device_transfer takes effect in the same order, and waits for its end.

   Functions that can fail return false and set `error`. */
#ifndef KV_DEVICE_H
#define KV_DEVICE_H

#include "kvprim.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(KV_REPLAY_CUDA)
#include "kvprim_cuda.cuh"
#include <cuda_runtime_api.h>
#endif
#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

enum { KV_BATCHES_MAX = 4, KV_HOST_ALIGN = 4096 };

typedef struct kv_place { /* a batch's part of one memory */
    unsigned char *memory;
    int32_t *slots;
    unsigned char *k, *v; /* packed rows */
} kv_place;

typedef struct kv_batch {
    kv_place host, device;
    size_t count;                   /* of slots, of K rows and of V rows */
    size_t slots_bytes, rows_bytes; /* the slots come first in memory, then the rows */
    bool gathered;                  /* the rows come from the cache */
    size_t first, layer;            /* for the caller: the first token of the batch, and its layer */
#if defined(KV_REPLAY_CUDA)
    bool in_flight;
    cudaEvent_t begun, arrived, moved, done; /* before the copy in; after it; after the call; after the copy out */
#endif
} kv_batch;

typedef struct kv_device {
    const struct kv_device_kind *kind;
    char name[256]; /* of the GPU, or why there is none */
    char error[512];
    uint64_t memory; /* bytes, all in all, of the memory for the cache; 0: unknown */
    unsigned char *cache;
    unsigned char *host; /* for pages that are not in the cache; NULL if there are none */
    double touch_seconds;
    kv_batch batches[KV_BATCHES_MAX]; /* a ring */
    size_t next, batch_rows, row_bytes;
    uint32_t *rejected;                    /* in device memory */
    double store, gather, copies, waiting; /* seconds; on a GPU the first three pass on the GPU, not on the host */
#if defined(KV_REPLAY_CUDA)
    cudaStream_t stream;
    cudaEvent_t transfer_begun, transfer_done;
#endif
} kv_device;

typedef struct kv_device_kind {
    const char *name;
    bool gpu; /* has its own memory, and works while the host goes on */
    size_t batches;
    size_t batch_bytes, batch_rows; /* the most of K rows, and of V rows, in a batch */
    bool (*allocate)(kv_device *d, size_t cache_bytes);
    bool (*allocate_batch)(kv_device *d, kv_batch *b, size_t bytes);
    bool (*allocate_host)(kv_device *d, size_t bytes);
    bool (*store)(kv_device *d, kv_batch *b, const kvprim_store_desc *desc);
    bool (*gather)(kv_device *d, kv_batch *b, const kvprim_gather_desc *k, const kvprim_gather_desc *v);
    bool (*transfer)(kv_device *d, const kvprim_transfer_desc *desc, double *seconds);
    bool (*wait)(kv_device *d, kv_batch *b);
    bool (*rejected)(kv_device *d, uint32_t *rejected);
    void (*close)(kv_device *d);
} kv_device_kind;

/* `wanted` is "cpu", "cuda", or NULL: a GPU if there is one, else the CPU. Call kv_device_close even if this fails. */
static inline bool kv_device_open(kv_device *d, const char *wanted);
static inline void kv_device_close(kv_device *d);

/* Allocates the cache, touches all its pages, and allocates the batches for rows of row_bytes. */
static inline bool kv_device_allocate(kv_device *d, size_t cache_bytes, size_t row_bytes);

/* Allocates d->host, which begins at a multiple of KV_HOST_ALIGN. */
static inline bool kv_device_allocate_host(kv_device *d, size_t bytes);

/* Moves pages between the cache and d->host. The indices are host memory. Adds to *seconds what that took: on a GPU, by
   its own clock. */
static inline bool kv_device_transfer(kv_device *d, const kvprim_transfer_desc *desc, double *seconds);

static inline kv_batch *kv_device_next(kv_device *d);
static inline bool kv_device_wait(kv_device *d, kv_batch *b);
static inline void kv_device_layout(const kv_device *d, kv_batch *b, size_t count); /* count <= batch_rows */
static inline bool kv_device_store(kv_device *d, kv_batch *b, const kvprim_store_desc *desc);
static inline bool kv_device_gather(kv_device *d, kv_batch *b, const kvprim_gather_desc *k,
                                    const kvprim_gather_desc *v);

/* Returns the number of slots outside the cache so far, after waiting for all work in flight. */
static inline bool kv_device_rejected(kv_device *d, uint32_t *rejected);

static inline double kv_seconds(void)
{
#if defined(_WIN32)
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (double)now.QuadPart / (double)frequency.QuadPart;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
}

static inline bool kv_device_kvprim(kv_device *d, kvprim_status status)
{
    if (status != KVPRIM_OK)
        snprintf(d->error, sizeof d->error, "%s: %s", kvprim_status_name(status), kvprim_last_error());
    return status == KVPRIM_OK;
}

static inline bool kv_device_out_of_memory(kv_device *d)
{
    snprintf(d->error, sizeof d->error, "out of memory");
    return false;
}

/* ---- the CPU ----------------------------------------------------------------------------------------------------- */

static inline uint64_t kv_cpu_memory(void)
{
#if defined(_SC_PHYS_PAGES) && defined(_SC_PAGESIZE)
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
#else
    return 0;
#endif
}

/* Page faults come now, not when the memory is used. */
static inline void kv_cpu_touch(unsigned char *memory, size_t bytes)
{
#if defined(MADV_HUGEPAGE)
    const size_t huge = (size_t)2 << 20, skip = huge - (uintptr_t)memory % huge;
    if (bytes > skip)
        (void)madvise(memory + skip, bytes - skip, MADV_HUGEPAGE);
#endif
    for (size_t i = 0; i < bytes; i += 4096)
        ((volatile unsigned char *)memory)[i] = 0xEE;
}

static inline bool kv_cpu_allocate(kv_device *d, size_t cache_bytes)
{
    d->cache = (unsigned char *)malloc(cache_bytes);
    d->rejected = (uint32_t *)calloc(1, sizeof *d->rejected);
    if (!d->cache || !d->rejected)
        return kv_device_out_of_memory(d);
    kv_cpu_touch(d->cache, cache_bytes);
    return true;
}

/* Standard C has no aligned memory that Windows has too, so the memory says before it where it begins. */
static inline bool kv_cpu_allocate_host(kv_device *d, size_t bytes)
{
    unsigned char *const memory = (unsigned char *)malloc(bytes + 2 * KV_HOST_ALIGN);
    if (!memory)
        return kv_device_out_of_memory(d);
    d->host = memory + 2 * KV_HOST_ALIGN - (uintptr_t)memory % KV_HOST_ALIGN;
    memcpy(d->host - sizeof memory, &memory, sizeof memory);
    kv_cpu_touch(d->host, bytes);
    return true;
}

static inline bool kv_cpu_allocate_batch(kv_device *d, kv_batch *b, size_t bytes)
{
    b->host.memory = b->device.memory = (unsigned char *)malloc(bytes);
    return b->host.memory || kv_device_out_of_memory(d);
}

static inline bool kv_cpu_store(kv_device *d, kv_batch *b, const kvprim_store_desc *desc)
{
    const double start = kv_seconds();
    const kvprim_status status = kvprim_store(desc);
    d->store += kv_seconds() - start;
    (void)b;
    return kv_device_kvprim(d, status);
}

static inline bool kv_cpu_gather(kv_device *d, kv_batch *b, const kvprim_gather_desc *k, const kvprim_gather_desc *v)
{
    const double start = kv_seconds();
    kvprim_status status = kvprim_gather(k);
    if (status == KVPRIM_OK)
        status = kvprim_gather(v);
    d->gather += kv_seconds() - start;
    (void)b;
    return kv_device_kvprim(d, status);
}

static inline bool kv_cpu_transfer(kv_device *d, const kvprim_transfer_desc *desc, double *seconds)
{
    const double start = kv_seconds();
    const kvprim_status status = kvprim_transfer(desc);
    *seconds += kv_seconds() - start;
    return kv_device_kvprim(d, status);
}

static inline bool kv_cpu_wait(kv_device *d, kv_batch *b)
{
    (void)d, (void)b;
    return true;
}

static inline bool kv_cpu_rejected(kv_device *d, uint32_t *rejected)
{
    *rejected = *d->rejected;
    return true;
}

static inline void kv_cpu_close(kv_device *d)
{
    for (size_t i = 0; i < d->kind->batches; i++)
        free(d->batches[i].host.memory);
    if (d->host) {
        unsigned char *memory;
        memcpy(&memory, d->host - sizeof memory, sizeof memory);
        free(memory);
    }
    free(d->rejected);
    free(d->cache);
}

/* Two batches, which stay in a core's cache. With one, a gather could write where the same rows were stored from, and a
   gather that does nothing would pass. */
static const kv_device_kind kv_cpu_kind = {
    .name = "cpu",
    .batches = 2,
    .batch_bytes = (size_t)128 << 10,
    .batch_rows = 4096,
    .allocate = kv_cpu_allocate,
    .allocate_batch = kv_cpu_allocate_batch,
    .allocate_host = kv_cpu_allocate_host,
    .store = kv_cpu_store,
    .gather = kv_cpu_gather,
    .transfer = kv_cpu_transfer,
    .wait = kv_cpu_wait,
    .rejected = kv_cpu_rejected,
    .close = kv_cpu_close,
};

/* ---- a GPU ------------------------------------------------------------------------------------------------------- */

#if defined(KV_REPLAY_CUDA)

static inline bool kv_cuda(kv_device *d, cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        snprintf(d->error, sizeof d->error, "%s: %s", what, cudaGetErrorString(error));
    return error == cudaSuccess;
}

static inline bool kv_cuda_open(kv_device *d)
{
    struct cudaDeviceProp properties;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0)
        error = cudaErrorNoDevice;
    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&properties, 0);
    if (error == cudaSuccess) /* does not wait for the legacy stream, which is unused */
        error = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    snprintf(d->name, sizeof d->name, "%s", error == cudaSuccess ? properties.name : cudaGetErrorString(error));
    d->memory = error == cudaSuccess ? properties.totalGlobalMem : d->memory;
    return error == cudaSuccess;
}

static inline bool kv_cuda_allocate_batch(kv_device *d, kv_batch *b, size_t bytes)
{
    return kv_cuda(d, cudaMallocHost((void **)&b->host.memory, bytes), "cudaMallocHost") &&
           kv_cuda(d, cudaMalloc((void **)&b->device.memory, bytes), "cudaMalloc") &&
           kv_cuda(d, cudaMemsetAsync(b->device.memory, 0xEE, bytes, d->stream), "cudaMemsetAsync") &&
           kv_cuda(d, cudaEventCreate(&b->begun), "cudaEventCreate") &&
           kv_cuda(d, cudaEventCreate(&b->arrived), "cudaEventCreate") &&
           kv_cuda(d, cudaEventCreate(&b->moved), "cudaEventCreate") &&
           kv_cuda(d, cudaEventCreate(&b->done), "cudaEventCreate");
}

static inline bool kv_cuda_allocate(kv_device *d, size_t cache_bytes)
{
    return kv_cuda(d, cudaMalloc((void **)&d->cache, cache_bytes), "cudaMalloc") &&
           kv_cuda(d, cudaMalloc((void **)&d->rejected, sizeof *d->rejected), "cudaMalloc") &&
           kv_cuda(d, cudaMemsetAsync(d->cache, 0xEE, cache_bytes, d->stream), "cudaMemsetAsync") &&
           kv_cuda(d, cudaMemsetAsync(d->rejected, 0, sizeof *d->rejected, d->stream), "cudaMemsetAsync") &&
           kv_cuda(d, cudaStreamSynchronize(d->stream), "cudaStreamSynchronize");
}

static inline bool kv_cuda_allocate_host(kv_device *d, size_t bytes)
{
    return kv_cuda(d, cudaMallocHost((void **)&d->host, bytes), "cudaMallocHost") &&
           kv_cuda(d, cudaEventCreate(&d->transfer_begun), "cudaEventCreate") &&
           kv_cuda(d, cudaEventCreate(&d->transfer_done), "cudaEventCreate");
}

static inline void kv_cuda_close(kv_device *d)
{
    if (d->stream)
        (void)cudaStreamSynchronize(d->stream);
    if (d->transfer_begun)
        (void)cudaEventDestroy(d->transfer_begun);
    if (d->transfer_done)
        (void)cudaEventDestroy(d->transfer_done);
    (void)cudaFreeHost(d->host);
    for (size_t i = 0; i < KV_BATCHES_MAX; i++) {
        kv_batch *const b = &d->batches[i];
        const cudaEvent_t events[] = {b->begun, b->arrived, b->moved, b->done};
        for (size_t k = 0; k < sizeof events / sizeof events[0]; k++)
            if (events[k])
                (void)cudaEventDestroy(events[k]);
        (void)cudaFreeHost(b->host.memory);
        (void)cudaFree(b->device.memory);
    }
    (void)cudaFree(d->rejected);
    (void)cudaFree(d->cache);
    if (d->stream)
        (void)cudaStreamDestroy(d->stream);
}

static inline bool kv_cuda_record(kv_device *d, cudaEvent_t event)
{
    return kv_cuda(d, cudaEventRecord(event, d->stream), "cudaEventRecord");
}

static inline bool kv_cuda_copy(kv_device *d, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    return kv_cuda(d, cudaMemcpyAsync(dst, src, bytes, kind, d->stream), "cudaMemcpyAsync");
}

static inline bool kv_cuda_store(kv_device *d, kv_batch *b, const kvprim_store_desc *desc)
{
    const kvprim_cuda_launch launch = {.stream = d->stream};
    b->in_flight = true;
    return kv_cuda_record(d, b->begun) &&
           kv_cuda_copy(d, b->device.memory, b->host.memory, b->slots_bytes + b->rows_bytes, cudaMemcpyHostToDevice) &&
           kv_cuda_record(d, b->arrived) && kv_device_kvprim(d, kvprim_cuda_store(desc, &launch)) &&
           kv_cuda_record(d, b->moved) && kv_cuda_record(d, b->done);
}

static inline bool kv_cuda_gather(kv_device *d, kv_batch *b, const kvprim_gather_desc *k, const kvprim_gather_desc *v)
{
    const kvprim_cuda_launch launch = {.stream = d->stream};
    b->in_flight = true;
    return kv_cuda_record(d, b->begun) &&
           kv_cuda_copy(d, b->device.memory, b->host.memory, b->slots_bytes, cudaMemcpyHostToDevice) &&
           kv_cuda_record(d, b->arrived) && kv_device_kvprim(d, kvprim_cuda_gather(k, &launch)) &&
           kv_device_kvprim(d, kvprim_cuda_gather(v, &launch)) && kv_cuda_record(d, b->moved) &&
           kv_cuda_copy(d, b->host.memory + b->slots_bytes, b->device.memory + b->slots_bytes, b->rows_bytes,
                        cudaMemcpyDeviceToHost) &&
           kv_cuda_record(d, b->done);
}

static inline bool kv_cuda_transfer(kv_device *d, const kvprim_transfer_desc *desc, double *seconds)
{
    const kvprim_cuda_launch launch = {.stream = d->stream};
    const double start = kv_seconds();
    float ms = 0;
    if (!kv_cuda_record(d, d->transfer_begun) || !kv_device_kvprim(d, kvprim_cuda_transfer(desc, &launch)) ||
        !kv_cuda_record(d, d->transfer_done) ||
        !kv_cuda(d, cudaEventSynchronize(d->transfer_done), "cudaEventSynchronize") ||
        !kv_cuda(d, cudaEventElapsedTime(&ms, d->transfer_begun, d->transfer_done), "cudaEventElapsedTime"))
        return false;
    d->waiting += kv_seconds() - start;
    *seconds += 1e-3 * (double)ms;
    return true;
}

static inline bool kv_cuda_wait(kv_device *d, kv_batch *b)
{
    float in_ms, move_ms, out_ms;
    const double start = kv_seconds();
    if (!b->in_flight)
        return true;
    if (!kv_cuda(d, cudaEventSynchronize(b->done), "cudaEventSynchronize"))
        return false;
    d->waiting += kv_seconds() - start;
    b->in_flight = false;
    if (!kv_cuda(d, cudaEventElapsedTime(&in_ms, b->begun, b->arrived), "cudaEventElapsedTime") ||
        !kv_cuda(d, cudaEventElapsedTime(&move_ms, b->arrived, b->moved), "cudaEventElapsedTime") ||
        !kv_cuda(d, cudaEventElapsedTime(&out_ms, b->moved, b->done), "cudaEventElapsedTime"))
        return false;
    *(b->gathered ? &d->gather : &d->store) += 1e-3 * (double)move_ms;
    d->copies += 1e-3 * ((double)in_ms + (double)out_ms);
    return true;
}

static inline bool kv_cuda_rejected(kv_device *d, uint32_t *rejected)
{
    return kv_cuda(d, cudaStreamSynchronize(d->stream), "cudaStreamSynchronize") &&
           kv_cuda(d, cudaMemcpy(rejected, d->rejected, sizeof *rejected, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

/* 1 MiB took the least total time of 512 KiB, 1 MiB and 4 MiB on an H200. Smaller batches need more launches; the host
   takes longer to make and compare batches that do not fit in the core's cache. */
static const kv_device_kind kv_cuda_kind = {
    .name = "cuda",
    .gpu = true,
    .batches = KV_BATCHES_MAX,
    .batch_bytes = (size_t)1 << 20,
    .batch_rows = 1 << 16,
    .allocate = kv_cuda_allocate,
    .allocate_batch = kv_cuda_allocate_batch,
    .allocate_host = kv_cuda_allocate_host,
    .store = kv_cuda_store,
    .gather = kv_cuda_gather,
    .transfer = kv_cuda_transfer,
    .wait = kv_cuda_wait,
    .rejected = kv_cuda_rejected,
    .close = kv_cuda_close,
};
#endif

/* ---- both -------------------------------------------------------------------------------------------------------- */

static inline bool kv_device_open(kv_device *d, const char *wanted)
{
    memset(d, 0, sizeof *d);
    d->kind = &kv_cpu_kind;
    d->memory = kv_cpu_memory();
    if (wanted && strcmp(wanted, d->kind->name) == 0)
        return true;
#if defined(KV_REPLAY_CUDA)
    if (kv_cuda_open(d))
        d->kind = &kv_cuda_kind;
#else
    snprintf(d->name, sizeof d->name, "built without CUDA");
#endif
    snprintf(d->error, sizeof d->error, "%s", d->name);
    return !wanted || strcmp(wanted, d->kind->name) == 0;
}

static inline void kv_device_close(kv_device *d)
{
    if (d->kind)
        d->kind->close(d);
}

static inline size_t kv_device_align(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static inline bool kv_device_allocate(kv_device *d, size_t cache_bytes, size_t row_bytes)
{
    const size_t rows = d->kind->batch_bytes / row_bytes;
    const double start = kv_seconds();
    bool ok = d->kind->allocate(d, cache_bytes);
    d->touch_seconds = kv_seconds() - start;
    d->row_bytes = row_bytes;
    d->batch_rows = rows > d->kind->batch_rows ? d->kind->batch_rows : rows ? rows : 1;
    const size_t slots_bytes = kv_device_align(d->batch_rows * sizeof(int32_t));
    for (size_t i = 0; i < d->kind->batches && ok; i++)
        ok = d->kind->allocate_batch(d, &d->batches[i], slots_bytes + 2 * kv_device_align(d->batch_rows * row_bytes));
    return ok;
}

static inline bool kv_device_allocate_host(kv_device *d, size_t bytes)
{
    return d->kind->allocate_host(d, bytes);
}

static inline bool kv_device_transfer(kv_device *d, const kvprim_transfer_desc *desc, double *seconds)
{
    return d->kind->transfer(d, desc, seconds);
}

static inline kv_batch *kv_device_next(kv_device *d)
{
    kv_batch *const b = &d->batches[d->next];
    d->next = (d->next + 1) % d->kind->batches;
    return b;
}

static inline bool kv_device_wait(kv_device *d, kv_batch *b)
{
    return d->kind->wait(d, b);
}

/* Slots, K rows and V rows follow each other, so that one copy moves them all. */
static inline void kv_place_layout(kv_place *place, size_t slots_bytes, size_t k_bytes)
{
    place->slots = (int32_t *)(void *)place->memory;
    place->k = place->memory + slots_bytes;
    place->v = place->k + k_bytes;
}

static inline void kv_device_layout(const kv_device *d, kv_batch *b, size_t count)
{
    const size_t k_bytes = kv_device_align(count * d->row_bytes);
    b->count = count;
    b->slots_bytes = kv_device_align(count * sizeof(int32_t));
    b->rows_bytes = k_bytes + count * d->row_bytes;
    kv_place_layout(&b->host, b->slots_bytes, k_bytes);
    kv_place_layout(&b->device, b->slots_bytes, k_bytes);
}

static inline bool kv_device_store(kv_device *d, kv_batch *b, const kvprim_store_desc *desc)
{
    b->gathered = false;
    return d->kind->store(d, b, desc);
}

static inline bool kv_device_gather(kv_device *d, kv_batch *b, const kvprim_gather_desc *k, const kvprim_gather_desc *v)
{
    b->gathered = true;
    return d->kind->gather(d, b, k, v);
}

static inline bool kv_device_rejected(kv_device *d, uint32_t *rejected)
{
    return d->kind->rejected(d, rejected);
}

#endif

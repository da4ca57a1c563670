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
       kv_device_move     stores or gathers, with descriptors whose slots and rows are those in device memory

   On a GPU the last one only enqueues: copies between pinned memory and the GPU before and after the library's calls,
   all on one stream, so that stores and gathers take effect in the order of the calls. The host goes on meanwhile, and
   waits only for a batch that it needs again.

   Whole pages travel between the cache and pinned host memory, which the device reads and writes itself.
   kv_device_transfer takes effect in the same order, and waits for its end.

   A call that fails ends the program: kv_die says why. Nothing is freed: what the program allocates, it needs to its
   end. */
#ifndef KV_DEVICE_H
#define KV_DEVICE_H

#include "kvprim.h"
#include <stdarg.h>
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

enum { KV_EXIT_REFUSED = 2, KV_BATCHES_MAX = 4, KV_HOST_ALIGN = 4096 };

enum { KV_BEGUN, KV_ARRIVED, KV_MOVED, KV_DONE, KV_EVENTS }; /* before the copy in; after it, the call, the copy out */

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
    bool in_flight;
    double times[KV_EVENTS]; /* seconds, on the CPU */
#if defined(KV_REPLAY_CUDA)
    cudaEvent_t events[KV_EVENTS]; /* the same on a GPU */
#endif
} kv_batch;

/* How much travels at once. */
typedef struct kv_device_kind {
    const char *name;
    size_t batches;
    size_t batch_bytes, batch_rows; /* the most of K rows, and of V rows, in a batch */
} kv_device_kind;

/* Two batches, which stay in a core's cache. With one, a gather could write where the same rows were stored from, and a
   gather that does nothing would pass. */
static const kv_device_kind kv_cpu_kind = {"cpu", 2, (size_t)128 << 10, 4096};

typedef struct kv_device {
    const kv_device_kind *kind;
    bool gpu;        /* has its own memory, and works while the host goes on */
    char name[256];  /* of the GPU, or why there is none */
    uint64_t memory; /* bytes, all in all, of the memory for the cache; 0: unknown */
    unsigned char *cache;
    unsigned char *host; /* for pages that are not in the cache; NULL if there are none */
    double touch_seconds;
    kv_batch batches[KV_BATCHES_MAX + 1]; /* a ring, and one whose events time transfers */
    size_t next, batch_rows, row_bytes;
    uint32_t *rejected;                    /* in device memory: how many slots were outside the cache */
    double store, gather, copies, waiting; /* seconds; on a GPU the first three pass on the GPU, not on the host */
#if defined(KV_REPLAY_CUDA)
    cudaStream_t stream;
#endif
} kv_device;

static inline _Noreturn void kv_die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("02_kv_replay: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(KV_EXIT_REFUSED);
}

/* malloc that does not fail. */
static inline void *kv_allocate(size_t count, size_t element)
{
    void *const memory = count <= SIZE_MAX / element ? malloc(count ? count * element : 1) : NULL;
    if (!memory)
        kv_die("out of memory");
    return memory;
}

static inline void kv_check(kvprim_status status)
{
    if (status != KVPRIM_OK)
        kv_die("%s: %s", kvprim_status_name(status), kvprim_last_error());
}

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

/* ---- a GPU ------------------------------------------------------------------------------------------------------- */

#if defined(KV_REPLAY_CUDA)

/* 1 MiB took the least total time of 512 KiB, 1 MiB and 4 MiB on an H200. Smaller batches need more launches; the host
   takes longer to make and compare batches that do not fit in the core's cache. */
static const kv_device_kind kv_cuda_kind = {"cuda", KV_BATCHES_MAX, (size_t)1 << 20, 1 << 16};

static inline void kv_cuda(cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        kv_die("%s: %s", what, cudaGetErrorString(error));
}

static inline bool kv_cuda_open(kv_device *d)
{
    struct cudaDeviceProp properties;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count); /* no device is an error */
    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&properties, 0);
    if (error == cudaSuccess) /* does not wait for the legacy stream, which is unused */
        error = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    snprintf(d->name, sizeof d->name, "%s", error == cudaSuccess ? properties.name : cudaGetErrorString(error));
    d->memory = error == cudaSuccess ? properties.totalGlobalMem : d->memory;
    return error == cudaSuccess;
}

static inline void *kv_cuda_allocate(kv_device *d, size_t bytes, bool on_host)
{
    void *memory;
    const cudaError_t error = on_host ? cudaMallocHost(&memory, bytes) : cudaMalloc(&memory, bytes);
    if (error != cudaSuccess)
        kv_die("no %s memory for %zu bytes (%s): set --slots or a smaller --kv-bytes", on_host ? "pinned" : "GPU",
               bytes, cudaGetErrorString(error));
    if (!on_host)
        kv_cuda(cudaMemsetAsync(memory, 0, bytes, d->stream), "cudaMemsetAsync");
    kv_cuda(cudaStreamSynchronize(d->stream), "cudaStreamSynchronize");
    return memory;
}

#endif

/* ---- both -------------------------------------------------------------------------------------------------------- */

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
static inline void *kv_cpu_allocate(size_t bytes)
{
#if defined(_WIN32) /* has no tier that needs the alignment */
    void *const memory = malloc(bytes);
#else
    void *const memory = aligned_alloc(KV_HOST_ALIGN, (bytes + KV_HOST_ALIGN - 1) / KV_HOST_ALIGN * KV_HOST_ALIGN);
#endif
    if (!memory)
        kv_die("no memory for %zu bytes: set --slots or a smaller --kv-bytes", bytes);
#if defined(MADV_HUGEPAGE)
    const size_t huge = (size_t)2 << 20, skip = huge - (uintptr_t)memory % huge;
    if (bytes > skip)
        (void)madvise((char *)memory + skip, bytes - skip, MADV_HUGEPAGE);
#endif
    return memset(memory, 0, bytes);
}

/* Allocates zeros on the device, or host memory that the device reads and writes itself, which begins at a multiple of
   KV_HOST_ALIGN. */
static inline void *kv_device_memory(kv_device *d, size_t bytes, bool on_host)
{
#if defined(KV_REPLAY_CUDA)
    if (d->gpu)
        return kv_cuda_allocate(d, bytes, on_host);
#endif
    (void)d, (void)on_host;
    return kv_cpu_allocate(bytes);
}

/* `wanted` is "cpu", "cuda", or NULL: a GPU if there is one, else the CPU. Returns false if that is not there: d->name
   says why. */
static inline bool kv_device_open(kv_device *d, const char *wanted)
{
    memset(d, 0, sizeof *d);
    d->kind = &kv_cpu_kind;
    d->memory = kv_cpu_memory();
    if (wanted && strcmp(wanted, "cpu") == 0)
        return true;
#if defined(KV_REPLAY_CUDA)
    d->gpu = kv_cuda_open(d);
    d->kind = d->gpu ? &kv_cuda_kind : d->kind;
#else
    snprintf(d->name, sizeof d->name, "built without CUDA");
#endif
    return !wanted || d->gpu;
}

/* Calls kvprim_NAME, or kvprim_cuda_NAME, which only enqueues. */
#if defined(KV_REPLAY_CUDA)
#define KV_CALL(d, name, desc)                                                                                         \
    kv_check((d)->gpu ? kvprim_cuda_##name(desc, &(const kvprim_cuda_launch){.stream = (d)->stream})                   \
                      : kvprim_##name(desc))
#else
#define KV_CALL(d, name, desc) kv_check(((void)(d), kvprim_##name(desc)))
#endif

/* Notes when all that was called before has happened. */
static inline void kv_device_record(kv_device *d, kv_batch *b, int event)
{
#if defined(KV_REPLAY_CUDA)
    if (d->gpu)
        kv_cuda(cudaEventRecord(b->events[event], d->stream), "cudaEventRecord");
    else
#endif
        b->times[event] = kv_seconds();
    (void)d;
}

static inline double kv_device_elapsed(const kv_device *d, const kv_batch *b, int from, int to)
{
#if defined(KV_REPLAY_CUDA)
    float ms;
    if (d->gpu) {
        kv_cuda(cudaEventElapsedTime(&ms, b->events[from], b->events[to]), "cudaEventElapsedTime");
        return 1e-3 * (double)ms;
    }
#endif
    (void)d;
    return b->times[to] - b->times[from];
}

/* Copies between a batch's host and device memory, which on the CPU are the same. */
static inline void kv_device_copy(kv_device *d, void *dst, const void *src, size_t bytes, bool in)
{
#if defined(KV_REPLAY_CUDA)
    if (d->gpu)
        kv_cuda(cudaMemcpyAsync(dst, src, bytes, in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, d->stream),
                "cudaMemcpyAsync");
#endif
    (void)d, (void)dst, (void)src, (void)bytes, (void)in;
}

static inline void kv_device_done(kv_device *d, kv_batch *b)
{
#if defined(KV_REPLAY_CUDA)
    const double start = kv_seconds();
    if (d->gpu)
        kv_cuda(cudaEventSynchronize(b->events[KV_DONE]), "cudaEventSynchronize");
    d->waiting += kv_seconds() - start;
#endif
    (void)d, (void)b;
}

static inline size_t kv_device_align(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Allocates the cache, and the batches for rows of row_bytes. */
static inline void kv_device_allocate(kv_device *d, size_t cache_bytes, size_t row_bytes)
{
    const size_t rows = d->kind->batch_bytes / row_bytes;
    const double start = kv_seconds();
    d->cache = (unsigned char *)kv_device_memory(d, cache_bytes, false);
    d->touch_seconds = kv_seconds() - start;
    d->row_bytes = row_bytes;
    d->batch_rows = rows > d->kind->batch_rows ? d->kind->batch_rows : rows ? rows : 1;
    const size_t batch_bytes =
        kv_device_align(d->batch_rows * sizeof(int32_t)) + 2 * kv_device_align(d->batch_rows * row_bytes);
    for (kv_batch *b = d->batches; b < d->batches + d->kind->batches; b++) {
        b->host.memory = (unsigned char *)kv_device_memory(d, batch_bytes, true);
        b->device.memory = d->gpu ? (unsigned char *)kv_device_memory(d, batch_bytes, false) : b->host.memory;
    }
    d->rejected = (uint32_t *)kv_device_memory(d, sizeof *d->rejected, false);
#if defined(KV_REPLAY_CUDA)
    for (size_t i = 0; d->gpu && i < KV_EVENTS * (KV_BATCHES_MAX + 1); i++)
        kv_cuda(cudaEventCreate(&d->batches[i / KV_EVENTS].events[i % KV_EVENTS]), "cudaEventCreate");
#endif
}

static inline kv_batch *kv_device_next(kv_device *d)
{
    kv_batch *const b = &d->batches[d->next];
    d->next = (d->next + 1) % d->kind->batches;
    return b;
}

static inline void kv_device_wait(kv_device *d, kv_batch *b)
{
    if (!b->in_flight)
        return;
    b->in_flight = false;
    kv_device_done(d, b);
    *(b->gathered ? &d->gather : &d->store) += kv_device_elapsed(d, b, KV_ARRIVED, KV_MOVED);
    d->copies += kv_device_elapsed(d, b, KV_BEGUN, KV_ARRIVED) + kv_device_elapsed(d, b, KV_MOVED, KV_DONE);
}

/* Slots, K rows and V rows follow each other, so that one copy moves them all. */
static inline void kv_device_layout(const kv_device *d, kv_batch *b, size_t count) /* count <= batch_rows */
{
    const size_t k_bytes = kv_device_align(count * d->row_bytes);
    kv_place *const places[] = {&b->host, &b->device};
    b->count = count;
    b->slots_bytes = kv_device_align(count * sizeof(int32_t));
    b->rows_bytes = k_bytes + count * d->row_bytes;
    for (int i = 0; i < 2; i++) {
        places[i]->slots = (int32_t *)(void *)places[i]->memory;
        places[i]->k = places[i]->memory + b->slots_bytes;
        places[i]->v = places[i]->k + k_bytes;
    }
}

/* Stores; or, if `store` is NULL, gathers K rows by gather[0] and V rows by gather[1]. */
static inline void kv_device_move(kv_device *d, kv_batch *b, const kvprim_store_desc *store,
                                  const kvprim_gather_desc *gather)
{
    const kv_place *const host = &b->host, *const device = &b->device;
    kv_device_record(d, b, KV_BEGUN);
    kv_device_copy(d, device->memory, host->memory, b->slots_bytes + (store ? b->rows_bytes : 0), true);
    kv_device_record(d, b, KV_ARRIVED);
    if (store)
        KV_CALL(d, store, store);
    for (int v = 0; v < 2 && !store; v++)
        KV_CALL(d, gather, &gather[v]);
    kv_device_record(d, b, KV_MOVED);
    if (!store)
        kv_device_copy(d, host->memory + b->slots_bytes, device->memory + b->slots_bytes, b->rows_bytes, false);
    kv_device_record(d, b, KV_DONE);
    b->gathered = !store, b->in_flight = true;
}

/* Moves pages between the cache and d->host. The indices are host memory. Adds to *seconds what that took: on a GPU, by
   its own clock. */
static inline void kv_device_transfer(kv_device *d, const kvprim_transfer_desc *desc, double *seconds)
{
    kv_batch *const b = &d->batches[KV_BATCHES_MAX];
    kv_device_record(d, b, KV_BEGUN);
    KV_CALL(d, transfer, desc);
    kv_device_record(d, b, KV_DONE);
    kv_device_done(d, b);
    *seconds += kv_device_elapsed(d, b, KV_BEGUN, KV_DONE);
}

/* Returns the number of slots outside the cache so far, after waiting for all work in flight. */
static inline uint32_t kv_device_rejected(kv_device *d)
{
#if defined(KV_REPLAY_CUDA)
    uint32_t rejected;
    if (d->gpu) {
        kv_cuda(cudaStreamSynchronize(d->stream), "cudaStreamSynchronize");
        kv_cuda(cudaMemcpy(&rejected, d->rejected, sizeof rejected, cudaMemcpyDeviceToHost), "cudaMemcpy");
        return rejected;
    }
#endif
    return *d->rejected;
}

#endif

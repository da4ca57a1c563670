/* SPDX-License-Identifier: MIT */
/* What `make ncu` looks at. Each operation runs once between cudaProfilerStart and cudaProfilerStop, on rows of 2 KB.
   Large ones read and write at least 256 MiB, those of a decode step move 64 rows. Every result is compared with
   kvprim.h's. The program prints the plan that tests/profile/profile.py reads, a line for each operation:
   `# operation|kernel|bytes moved|kind|us`, with the microseconds of a call without ncu, or 0.

       build/ncu/profile                     on one GPU
       build/ncu/profile all_reduce 0|1 ID   as rank 0 or 1 of two processes that meet through the file ID
       build/ncu/ranks ranks                 linked with nccl_none.cpp: collectives of two threads that share a GPU,
                                             whose kernels run at the same time; both are counted, as one range */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#ifdef PROFILE_NCCL
#include "../../kvprim_nccl.h"
#endif
#include "../harness.h"
#include <algorithm>
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <thread>
#include <time.h>
#include <unistd.h>

#define CUDA(call) check_cuda(call, #call, __LINE__)

[[noreturn]] HARNESS_PRINTF static void quit(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

static void check_cuda(cudaError_t error, const char *call, int line)
{
    if (error != cudaSuccess)
        quit("line %d: %s: %s", line, call, cudaGetErrorString(error));
}

static void check_kvprim(kvprim_status status)
{
    if (status != KVPRIM_OK)
        quit("%s: %s", kvprim_status_name(status), kvprim_last_error());
}

static thread_local cudaStream_t stream; /* a rank may be a thread */
static thread_local cudaEvent_t start_event, end_event;
static thread_local kvprim_cuda_launch launch;

static void open_gpu(int device)
{
    cudaDeviceProp properties;
    CUDA(cudaSetDevice(device));
    CUDA(cudaGetDeviceProperties(&properties, device));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch.stream = stream;
    CUDA(cudaEventCreate(&start_event));
    CUDA(cudaEventCreate(&end_event));
    if (device == 0)
        printf("%s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
}

/* Where operations work: in the GPU's memory, from pinned memory to it or the other way, or in the host's, where
   kvprim.h makes the bytes that are expected. */
typedef struct place {
    char *src, *dst;                       /* all_bytes each */
    int32_t *of_all, *of_half, *to, *from; /* rows of both tables, of one, of a layer, in random order */
    int32_t *in_order;                     /* rows of one table */
    int32_t *pages, *request, *position;   /* of tokens: see run_slots */
    kvprim_unpack_meta_item *meta;         /* the fragments */
    uint64_t *meta_count;
    char *set, *empty_set; /* of run_fetch */
} place;
static place gpu, in, out, host;

/* Returns the microseconds of each of `calls` calls in a row. */
static double time_calls(void (*run)(const place *, int64_t), int64_t count, int calls, const place *p = &gpu)
{
    float ms;
    run(p, count);
    CUDA(cudaEventRecord(start_event, stream));
    for (int i = 0; i < calls; i++)
        run(p, count);
    CUDA(cudaEventRecord(end_event, stream));
    CUDA(cudaEventSynchronize(end_event));
    CUDA(cudaEventElapsedTime(&ms, start_event, end_event));
    return 1000.0 * ms / calls;
}

/* ---- rows ---- */

enum {
    row_bytes = 2048,
    cache_rows = 131072, /* of K, and again of V after them */
    all_rows = 2 * cache_rows,
    layers = 32,
    layer_rows = cache_rows / layers,
    fragment_bytes = 16384,
    fragment_rows = fragment_bytes / row_bytes,
    most_fragments = 8192,
    requests = 1024, /* each of so many pages, of so many rows */
    request_pages = 1024,
    page_rows = 16,
    tokens = requests * request_pages * page_rows,
    hot_rows = 2048,
    set_bytes = 1 << 20,
    poison = 0xee
};
static const size_t all_bytes = (size_t)all_rows * row_bytes;
static kvprim_fragment fragments[most_fragments];

/* The reference for the others: each block copies 16 KB. */
__global__ static void copy_kernel(uint4 *to, const uint4 *from)
{
    const size_t first = blockIdx.x * (size_t)(4 * 256) + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        v[k] = from[first + 256 * k];
#pragma unroll
    for (int k = 0; k < 4; k++)
        to[first + 256 * k] = v[k];
}

static void run_copy(const place *p, int64_t rows)
{
    if (p != &host)
        copy_kernel<<<(unsigned)(rows * row_bytes / 16384), 256, 0, stream>>>((uint4 *)p->dst, (const uint4 *)p->src);
    else
        memcpy(p->dst, p->src, (size_t)(rows * row_bytes));
    CUDA(cudaGetLastError());
}

static void run_memcpy(const place *p, int64_t rows)
{
    CUDA(cudaMemcpyAsync(p->dst, p->src, (size_t)(rows * row_bytes), cudaMemcpyDefault, stream));
}

static kvprim_format format_of(kvprim_dtype dtype)
{
    kvprim_format format = {};
    format.dtype = dtype;
    return format;
}
static const kvprim_format bf16 = format_of(KVPRIM_BF16), e4m3[2] = {format_of(KVPRIM_F8E4M3), e4m3[0]};

static kvprim_table table_of(char *data, int64_t first, int64_t rows)
{
    kvprim_table table = {};
    table.data = data + first * row_bytes;
    table.rows = rows;
    return table;
}

static void gather_from(const place *p, int64_t rows, const kvprim_format *format, int64_t elements = row_bytes / 2)
{
    kvprim_gather_desc gather = {};
    gather.dst = table_of(p->dst, 0, rows);
    gather.src = table_of(p->src, 0, all_rows);
    gather.index = p->of_all;
    gather.index_type = KVPRIM_I32;
    gather.count = rows;
    gather.src.format = format, gather.dst.format = format ? &bf16 : NULL;
    gather.row_bytes = format ? elements : (int64_t)row_bytes;
    check_kvprim(p != &host ? kvprim_cuda_gather(&gather, &launch) : kvprim_gather(&gather));
}

static void run_gather(const place *p, int64_t rows)
{
    gather_from(p, rows, NULL);
}

/* Rows of 8 KB, of 4,096 fp16 as the documents have them. */
static void run_gather_wide(const place *p, int64_t rows)
{
    kvprim_gather_desc gather = {};
    gather.dst = table_of(p->dst, 0, rows);
    gather.src = table_of(p->src, 0, layer_rows);
    gather.row_bytes = 4 * row_bytes;
    gather.index = p->from;
    gather.index_type = KVPRIM_I32;
    gather.count = rows;
    check_kvprim(p != &host ? kvprim_cuda_gather(&gather, &launch) : kvprim_gather(&gather));
}

static void run_gather_e4m3(const place *p, int64_t rows)
{
    gather_from(p, rows, &e4m3[0]);
}

static void run_gather_odd(const place *p, int64_t rows)
{
    gather_from(p, rows, &e4m3[0], 1001);
}

/* With caches of these formats: from bf16; without a second one, K alone. */
static void store_to(const place *p, const int32_t *slots, int64_t count, const kvprim_format *formats = NULL)
{
    kvprim_store_desc store = {};
    store.k_cache = table_of(p->dst, 0, cache_rows);
    store.v_cache = table_of(p->dst, cache_rows, cache_rows);
    store.k = table_of(p->src, 0, count);
    store.v = table_of(p->src, cache_rows, count);
    store.k_bytes = store.v_bytes = row_bytes;
    store.slot = slots;
    store.slot_type = KVPRIM_I32;
    store.count = count;
    if (formats) {
        store.k.format = store.v.format = &bf16;
        store.k_cache.format = &formats[0], store.v_cache.format = &formats[1];
        if (!formats[1].dtype)
            store.v_cache = store.v = {}, store.v_bytes = 0;
    }
    check_kvprim(p != &host ? kvprim_cuda_store(&store, &launch) : kvprim_store(&store));
}

static void run_store(const place *p, int64_t count)
{
    store_to(p, p->of_half, count);
}

static void run_store_in_order(const place *p, int64_t count)
{
    store_to(p, p->in_order, count);
}

static void run_store_e4m3(const place *p, int64_t count)
{
    store_to(p, p->of_half, count, e4m3);
}

/* 128 elements share a scale, which is computed; the scales lie after the caches. */
static void run_store_tiles(const place *p, int64_t count)
{
    kvprim_format formats[2] = {e4m3[0], e4m3[1]};
    for (int v = 0; v < 2; v++) {
        formats[v].scale = KVPRIM_SCALE_TILE, formats[v].tile = 128;
        formats[v].scales = p->dst + all_bytes / 4 * (size_t)(1 + 2 * v);
    }
    store_to(p, p->of_half, count, formats);
}

/* NVFP4: 16 elements of 4 bits share a scale of 8 bits. `data`: where the scales are. */
static kvprim_format nvfp4_of(char *data)
{
    kvprim_format format = format_of(KVPRIM_F4E2M1);
    format.scale = KVPRIM_SCALE_TILE, format.scale_dtype = KVPRIM_F8E4M3, format.tile = 16;
    format.scales = data;
    return format;
}

static void run_store_nvfp4(const place *p, int64_t count)
{
    const kvprim_format formats[2] = {nvfp4_of(p->dst + all_bytes / 4), nvfp4_of(p->dst + all_bytes / 4 * 3)};
    store_to(p, p->of_half, count, formats);
}

static void run_gather_nvfp4(const place *p, int64_t rows)
{
    const kvprim_format format = nvfp4_of(p->src + all_bytes / 2);
    gather_from(p, rows, &format, row_bytes / 4);
}

/* V would take a launch of its own. */
static void run_store_int4(const place *p, int64_t count)
{
    const kvprim_format formats[2] = {format_of(KVPRIM_INT4)};
    store_to(p, p->of_half, count, formats);
}

static kvprim_fetch_set fetch_set_of(const place *p)
{
    kvprim_fetch_set set = {};
    set.memory = p->set, set.bytes = set_bytes;
    set.states = 1, set.hot_rows = hot_rows, set.tokens = layer_rows, set.entries = hot_rows;
    return set;
}

/* All tokens that a request wants are missing: before each call its set becomes empty. */
static void run_fetch(const place *p, int64_t count)
{
    kvprim_fetch_desc fetch = {};
    fetch.set = fetch_set_of(p);
    fetch.count = 1, fetch.state = p->in_order, fetch.wanted = p->from, fetch.top_k = count;
    fetch.state_type = fetch.wanted_type = KVPRIM_I32;
    fetch.k_hot = table_of(p->dst, 0, hot_rows), fetch.k = table_of(p->src, 0, layer_rows);
    fetch.k_bytes = row_bytes;
    fetch.rows = (int32_t *)(p->dst + all_bytes / 2);
    if (p == &host)
        check_kvprim(kvprim_fetch_reset(&fetch.set, -1));
    else
        CUDA(cudaMemcpyAsync(p->set, p->empty_set, set_bytes, cudaMemcpyDefault, stream));
    check_kvprim(p != &host ? kvprim_cuda_fetch(&fetch, &launch) : kvprim_fetch(&fetch));
}

static void run_transfer(const place *p, int64_t rows)
{
    kvprim_transfer_desc transfer = {};
    transfer.dst = table_of(p->dst, 0, layer_rows);
    transfer.src = table_of(p->src, 0, layer_rows);
    transfer.layers = layers;
    transfer.row_bytes = row_bytes;
    transfer.dst_index = p->to;
    transfer.src_index = p->from;
    transfer.index_type = KVPRIM_I32;
    transfer.count = rows;
    check_kvprim(p != &host ? kvprim_cuda_transfer(&transfer, &launch) : kvprim_transfer(&transfer));
}

static void run_unpack(const place *p, int64_t count)
{
    kvprim_unpack_desc unpack = {};
    unpack.src = p->src;
    unpack.dst = p->dst;
    unpack.src_bytes = unpack.dst_bytes = (uint64_t)cache_rows * row_bytes;
    unpack.fragments = fragments;
    unpack.count = (size_t)count;
    check_kvprim(p != &host ? kvprim_cuda_unpack(&unpack, &launch) : kvprim_unpack(&unpack));
}

static void run_unpack_meta(const place *p, int64_t count)
{
    kvprim_unpack_meta_desc unpack = {};
    unpack.src = p->src;
    unpack.dst = p->dst;
    unpack.src_bytes = unpack.dst_bytes = (uint64_t)cache_rows * row_bytes;
    unpack.meta = p->meta;
    unpack.count = p->meta_count;
    unpack.max_count = (uint64_t)count;
    check_kvprim(p != &host ? kvprim_cuda_unpack_meta(&unpack, &launch) : kvprim_unpack_meta(&unpack));
}

static void run_copies(const place *p, int64_t count)
{
    static kvprim_copy_item items[most_fragments];
    for (int64_t i = 0; i < count; i++)
        items[i] = {p->src + fragments[i].src_offset, p->dst + fragments[i].dst_offset, fragments[i].bytes};
    const kvprim_copy_desc copy = {items, (size_t)count, 0};
    check_kvprim(p != &host ? kvprim_cuda_copy(&copy, &launch) : kvprim_copy(&copy));
}

static void run_slots(const place *p, int64_t count)
{
    kvprim_slots_desc slots = {};
    slots.pages = p->pages;
    slots.requests = requests;
    slots.max_pages = request_pages;
    slots.page_rows = page_rows;
    slots.rows = tokens;
    slots.request = p->request;
    slots.position = p->position;
    slots.slot = p->dst;
    slots.pages_type = slots.token_type = slots.slot_type = KVPRIM_I32;
    slots.count = count;
    check_kvprim(p != &host ? kvprim_cuda_slots(&slots, &launch) : kvprim_slots(&slots));
}

typedef struct operation {
    const char *name, *kernel, *kind;
    void (*run)(const place *p, int64_t count);
    int64_t count, bytes;      /* bytes: read, and as many written, or half of both */
    const place *where = NULL; /* gpu */
} operation;

static const operation operations[] = {
    {"copy, 64 Ki rows in order", "copy_kernel", "copy", run_copy, 65536, 65536 * row_bytes},
    {"gather, 64 Ki rows", "kvpc_gather_kernel", "large", run_gather, 65536, 65536 * row_bytes},
    {"store, 64 Ki tokens, in order", "kvpc_store_kernel", "large", run_store_in_order, 65536, 2 * 65536 * row_bytes},
    {"store, 64 Ki tokens, random slots", "kvpc_store_kernel", "large", run_store, 65536, 2 * 65536 * row_bytes},
    {"transfer, 2,048 rows of 32 layers", "kvpc_move_kernel", "large", run_transfer, 2048, 2048 * layers *row_bytes},
    {"unpack, 8,192 fragments of 16 KB", "kvpc_unpack_kernel", "large", run_unpack, most_fragments,
     most_fragments *fragment_bytes},
    {"unpack_meta, 8,192 of 16 KB", "kvpc_meta_kernel", "large", run_unpack_meta, most_fragments,
     most_fragments *fragment_bytes},
    {"copy by address, 8,192 of 16 KB", "kvpc_unpack_kernel", "large", run_copies, most_fragments,
     most_fragments *fragment_bytes},
    {"store as e4m3, 64 Ki tokens", "kvpc_convert_store_kernel", "converts", run_store_e4m3, 65536, 3 * 65536 * 1024},
    {"gather from e4m3, 64 Ki rows", "kvpc_convert_gather_kernel", "converts", run_gather_e4m3, 65536, 3 * 65536 * 512},
    {"store as e4m3, tiles of 128", "kvpc_convert_tiles_kernel", "converts", run_store_tiles, 65536, 65536 * 3104},
    {"store as NVFP4, 64 Ki tokens", "kvpc_convert_tiles_kernel", "converts", run_store_nvfp4, 65536, 65536 * 2624},
    {"gather from NVFP4, 64 Ki rows", "kvpc_convert_gather_kernel", "converts", run_gather_nvfp4, 65536, 65536 * 1312},
    {"store as int4, K of 64 Ki tokens", "kvpc_convert_kernel", "converts", run_store_int4, 65536, 65536 * 1280},
    {"gather from e4m3, rows of 1,001", "kvpc_convert_kernel", "converts", run_gather_odd, 65536, 3 * 65536 * 1001 / 2},
    {"transfer from the host", "kvpc_move_few_kernel", "host", run_transfer, 2048, 2048 * layers *row_bytes, &in},
    {"transfer to the host", "kvpc_move_few_kernel", "host", run_transfer, 2048, 2048 * layers *row_bytes, &out},
    {"fetch, 1,024 rows from the host", "kvpc_fetch_kernel", "host", run_fetch, 1024, 1024 * row_bytes, &in},
    {"slots, 16 Mi tokens", "kvpc_slots_kernel", "slots", run_slots, tokens, 6 * tokens}, /* 8 bytes to 4 */
    {"gather, 64 rows of 8 KB", "kvpc_gather_kernel", "small", run_gather_wide, 64, 4 * 64 * row_bytes},
    {"gather, 64 rows", "kvpc_gather_kernel", "small", run_gather, 64, 64 * row_bytes},
    {"store, 64 tokens, random slots", "kvpc_store_kernel", "small", run_store, 64, 2 * 64 * row_bytes},
    {"slots, 64 tokens", "kvpc_slots_kernel", "small", run_slots, 64, 6 * 64}};

/* Ends the program at a row that is neither as it should be, nor unchanged. */
static void compare(const operation *o)
{
    static char *const found = (char *)allocate(all_bytes);
    memset(host.dst, poison, all_bytes);
    o->run(&host, o->count);
    CUDA(cudaMemcpy(found, o->where ? o->where->dst : gpu.dst, all_bytes, cudaMemcpyDefault));
    for (size_t row = 0; row < all_rows; row++)
        if (memcmp(found + row * row_bytes, host.dst + row * row_bytes, row_bytes) != 0)
            quit("%s: row %zu of dst is wrong", o->name, row);
}

static void profile(const operation *o)
{
    const place *const p = o->where ? o->where : &gpu;
    const double us = time_calls(o->run, o->count, 20, p); /* CUDA loads a kernel at its first launch */
    CUDA(cudaMemsetAsync(p->dst, poison, all_bytes, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaProfilerStart());
    o->run(p, o->count);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaProfilerStop());
    compare(o);
    /* Calls of small operations follow each other as fast as the host enqueues them. */
    printf("# %s|%s|%lld|%s|%.2f\n", o->name, o->kernel, (long long)(2 * o->bytes), o->kind,
           strcmp(o->kind, "small") == 0 ? 0 : us);
}

/* Allocates on the GPU, with the host's bytes. */
template <class T> static T *on_gpu(const T *from, size_t bytes)
{
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    return (T *)p;
}

/* The first n numbers from 0 on, in random order (Fisher-Yates, from the front). */
static void make_order(int32_t **on_host, int32_t **on_device, int32_t n)
{
    int32_t *const order = *on_host = (int32_t *)allocate((size_t)n * sizeof *order);
    for (int32_t i = 0; i < n; i++) {
        const uint64_t at = below((uint64_t)i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    *on_device = on_gpu(order, (size_t)n * sizeof *order);
}

/* Token i is of request i / (tokens / requests), in whose pages it is the next. */
static void open_tokens(void)
{
    make_order(&host.pages, &gpu.pages, requests * request_pages);
    host.request = (int32_t *)allocate(tokens * sizeof *host.request);
    host.position = (int32_t *)allocate(tokens * sizeof *host.position);
    for (int32_t i = 0; i < tokens; i++) {
        host.request[i] = i / (request_pages * page_rows);
        host.position[i] = i % (request_pages * page_rows);
    }
    gpu.request = on_gpu(host.request, tokens * sizeof *host.request);
    gpu.position = on_gpu(host.position, tokens * sizeof *host.position);
}

static void open_fragments(const int32_t *places)
{
    host.meta = (kvprim_unpack_meta_item *)allocate(most_fragments * sizeof *host.meta);
    host.meta_count = (uint64_t *)allocate(sizeof *host.meta_count);
    *host.meta_count = most_fragments;
    for (int f = 0; f < most_fragments; f++) {
        fragments[f].src_offset = (uint64_t)places[f] * fragment_bytes;
        fragments[f].dst_offset = (uint64_t)f * fragment_bytes;
        fragments[f].bytes = fragment_bytes;
        host.meta[f] = {(uint32_t)fragments[f].src_offset, fragment_bytes, fragments[f].dst_offset};
    }
    gpu.meta = on_gpu(host.meta, most_fragments * sizeof *host.meta);
    gpu.meta_count = on_gpu(host.meta_count, sizeof *host.meta_count);
}

static void open_rows(void)
{
    int32_t *places, *unused;
    open_gpu(0);
    host.src = (char *)allocate(all_bytes);
    host.dst = (char *)allocate(all_bytes);
    fill(host.src, all_bytes);
    for (size_t i = 1; i < all_bytes; i += 2) /* bf16 of 0.5 to 2: the scales are usual ones */
        host.src[i] = (char)((host.src[i] & 0x80) | 0x3f);
    gpu.src = on_gpu(host.src, all_bytes);
    gpu.dst = on_gpu(host.dst, all_bytes);
    make_order(&host.of_all, &gpu.of_all, all_rows);
    make_order(&host.of_half, &gpu.of_half, cache_rows);
    make_order(&host.to, &gpu.to, layer_rows);
    make_order(&host.from, &gpu.from, layer_rows);
    make_order(&places, &unused, cache_rows / fragment_rows);
    host.in_order = (int32_t *)allocate(cache_rows * sizeof *host.in_order);
    for (int32_t i = 0; i < cache_rows; i++)
        host.in_order[i] = i;
    gpu.in_order = on_gpu(host.in_order, cache_rows * sizeof *host.in_order);
    open_tokens();
    open_fragments(places);
    host.set = (char *)allocate(set_bytes);
    const kvprim_fetch_set set = fetch_set_of(&host);
    check_kvprim(kvprim_fetch_reset(&set, -1));
    gpu.set = on_gpu(host.set, set_bytes);
    gpu.empty_set = on_gpu(host.set, set_bytes);
    in = out = gpu;
    CUDA(cudaHostRegister(host.src, all_bytes, cudaHostRegisterDefault));
    in.src = host.src;
    CUDA(cudaMallocHost((void **)&out.dst, all_bytes));
}

static int profile_rows(void)
{
    const int64_t rows = operations[0].count;
    open_rows();
    const double gigabytes = 2e-9 * (double)(rows * row_bytes);
    printf("GB/s read and written, without ncu: cudaMemcpyAsync %.0f, copy_kernel %.0f\n",
           1e6 * gigabytes / time_calls(run_memcpy, rows, 20), 1e6 * gigabytes / time_calls(run_copy, rows, 20));
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        profile(&operations[i]);
    return 0;
}

/* ---- all-reduce ---- */

#ifdef PROFILE_NCCL
static thread_local kvprim_comm comm;
static thread_local uint16_t *send_bf16, *recv_bf16;   /* on the GPU */
enum { most_count = 4 << 20, most_shared = 16 << 20 }; /* of elements */

static void write_id(const kvprim_comm_id *id, const char *path)
{
    char unfinished[4096];
    if (snprintf(unfinished, sizeof unfinished, "%s.new", path) >= (int)sizeof unfinished)
        quit("%s: too long", path);
    FILE *const f = fopen(unfinished, "wb");
    if (!f || fwrite(id, sizeof *id, 1, f) != 1 || fclose(f) != 0 || rename(unfinished, path) != 0)
        quit("cannot write %s", unfinished);
}

/* Takes the file away, because the next run's rank 0 is another one. A shorter file means that there is no next run. */
static kvprim_comm_id wait_for_id(const char *path)
{
    const struct timespec pause = {0, 20000000};
    for (int tries = 0; tries < 2500; tries++) {
        kvprim_comm_id id;
        FILE *const f = fopen(path, "rb");
        const size_t bytes = f ? fread(id.bytes, 1, sizeof id.bytes, f) : 0;
        if (f)
            (void)fclose(f);
        if (f && bytes < sizeof id.bytes)
            exit(1);
        if (f && remove(path) == 0)
            return id;
        (void)nanosleep(&pause, NULL);
    }
    quit("rank 0 wrote no %s", path);
}

static uint16_t bf16_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Whole numbers below 256: bf16 holds them and their sums exactly. */
static float value_at(int64_t i, int rank)
{
    return (float)(i % 61 + 3 * rank);
}

static void run_all_reduce(const place *, int64_t count)
{
    check_kvprim(kvprim_all_reduce(&comm, recv_bf16, send_bf16, (size_t)count, KVPRIM_BF16, KVPRIM_SUM, stream));
}

/* What can be measured without ncu: the median of some rounds, in microseconds. In the first round the other rank may
   not have begun. */
static double describe_all_reduce(const char *name, int64_t count)
{
    enum { rounds = 9 };
    double us[rounds];
    for (int i = 0; i < rounds; i++)
        us[i] = time_calls(run_all_reduce, count, 50);
    std::sort(us, us + rounds);
#ifdef KVPRIM_NCCL_KERNELS
    int blocks;
    cudaFuncAttributes kernel;
    const kvpn_way way = kvpn_choose_sum(&comm, false, (size_t)count * 2, KVPRIM_BF16, KVPRIM_SUM);
    const void *const function = kvpn_kernel_of(way, KVPRIM_BF16, comm.world, true);
    CUDA(cudaFuncGetAttributes(&kernel, function));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kvpn_max_threads, 0));
    if (comm.rank == 0)
        printf("%s, without ncu: %.2f us a call, %d registers, %zu bytes of local memory, room for %d blocks of %d "
               "threads on a multiprocessor\n",
               name, us[rounds / 2], kernel.numRegs, kernel.localSizeBytes, blocks, (int)kvpn_max_threads);
#else
    (void)name;
#endif
    return us[rounds / 2];
}

static void compare_all_reduce(int64_t count)
{
    uint16_t *const host = (uint16_t *)allocate((size_t)count * sizeof *host);
    CUDA(cudaMemcpy(host, recv_bf16, (size_t)count * sizeof *host, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) {
        const uint16_t want = bf16_of(value_at(i, 0) + value_at(i, 1));
        if (host[i] != want)
            quit("rank %d: all-reduce of %lld: element %lld: expected %04x, got %04x", (int)comm.rank, (long long)count,
                 (long long)i, want, host[i]);
    }
    free(host);
}

static void profile_all_reduce(const char *name, int64_t count)
{
    const double us = describe_all_reduce(name, count);
    CUDA(cudaMemsetAsync(recv_bf16, poison, (size_t)count * sizeof *recv_bf16, stream));
    CUDA(cudaStreamSynchronize(stream));
    if (comm.rank == 0)
        CUDA(cudaProfilerStart());
    run_all_reduce(&gpu, count);
    CUDA(cudaStreamSynchronize(stream));
    if (comm.rank == 0)
        CUDA(cudaProfilerStop());
    check_kvprim(kvprim_comm_check(&comm));
    compare_all_reduce(count);
    if (comm.rank == 0)
        printf("# %s|kvpn_kernel|%lld|linked|%.2f\n", name, (long long)(4 * count), us);
}

static void open_all_reduce(int rank, const char *path)
{
    kvprim_comm_desc desc = {};
    uint16_t *const host = (uint16_t *)allocate(most_count * sizeof *host);
    open_gpu(rank);
    if (rank == 0) {
        check_kvprim(kvprim_comm_new_id(&desc.id));
        write_id(&desc.id, path);
    } else {
        desc.id = wait_for_id(path);
    }
    (void)alarm(25); /* ends a rank that waits for one that is gone, wherever it waits */
    desc.rank = rank;
    desc.world = 2;
    desc.timeout_ms = 15000;
    check_kvprim(kvprim_comm_init(&comm, &desc));
    for (int64_t i = 0; i < most_count; i++)
        host[i] = bf16_of(value_at(i, rank));
    CUDA(cudaMalloc((void **)&recv_bf16, most_count * sizeof *recv_bf16));
    send_bf16 = on_gpu(host, most_count * sizeof *host);
    free(host);
}

static int profile_collectives(int rank, const char *path)
{
    open_all_reduce(rank, path);
    if (rank == 0)
        printf("%s\n", kvprim_comm_describe(&comm));
    if (comm.peer[0]) {
        profile_all_reduce("all-reduce, 64 KB of bf16", 32768);
        profile_all_reduce("all-reduce, 8 MB of bf16", most_count);
    } else if (rank == 0) {
        printf("all-reduce is NCCL's here, which is not looked at\n");
    }
    check_kvprim(kvprim_comm_destroy(&comm));
    return 0;
}

/* ---- collectives of two ranks that share the GPU ---- */

static pthread_barrier_t all_ranks;
static void *peers[2];
static char exchanged[2][1024];
static uint16_t *sends[2]; /* host memory */

static void meet(void)
{
    (void)pthread_barrier_wait(&all_ranks);
}

/* From a thread of init's: `slot` says whose it is. */
static int exchange(void *slot, const void *mine, void *all, size_t bytes)
{
    if (bytes > sizeof exchanged[0])
        return 1;
    memcpy(slot, mine, bytes);
    meet();
    for (size_t r = 0; r < 2; r++)
        memcpy((char *)all + r * bytes, exchanged[r], bytes);
    meet();
    return 0;
}

enum { hidden = 4096 };
static uint16_t *weight_on_gpu, *normed; /* the weights are what rank 0 sends first */

static kvprim_norm_desc norm_of(int64_t count, const uint16_t *send, const uint16_t *weight, uint16_t *y)
{
    kvprim_norm_desc norm = {};
    norm.dtype = KVPRIM_BF16, norm.eps = 1e-5f, norm.hidden = hidden, norm.tokens = count / hidden;
    norm.send = send, norm.weight = weight, norm.out = y;
    return norm;
}

static void run_norm(const place *, int64_t count)
{
    const kvprim_norm_desc norm = norm_of(count, send_bf16, weight_on_gpu, recv_bf16);
    check_kvprim(kvprim_all_reduce_norm(&comm, &norm, stream));
}

/* Also as FP8, with a scale of each 128 elements. */
static void run_norm_groups(const place *, int64_t count)
{
    kvprim_norm_desc norm = norm_of(count, send_bf16, weight_on_gpu, recv_bf16);
    norm.quantised = recv_bf16 + most_shared / 2, norm.scale = (float *)(recv_bf16 + most_shared / 4 * 3);
    norm.scale_group = 128;
    check_kvprim(kvprim_all_reduce_norm(&comm, &norm, stream));
}

static void run_reduce_scatter(const place *, int64_t count)
{
    check_kvprim(
        kvprim_reduce_scatter(&comm, recv_bf16, send_bf16, (size_t)count / 2, KVPRIM_BF16, KVPRIM_SUM, stream));
}

static void run_all_gather(const place *, int64_t count)
{
    check_kvprim(kvprim_all_gather(&comm, recv_bf16, send_bf16, (size_t)count / 2, KVPRIM_BF16, stream));
}

static void run_all_to_all(const place *, int64_t count)
{
    check_kvprim(kvprim_all_to_all(&comm, recv_bf16, send_bf16, (size_t)count / 2, KVPRIM_BF16, stream));
}

typedef struct collective {
    const char *name;
    void (*run)(const place *, int64_t count);
    int64_t count;
} collective;

static const collective collectives[] = {{"2 ranks: all-reduce, 64 KB", run_all_reduce, 32768},
                                         {"2 ranks: all-reduce, 8 MB", run_all_reduce, 4 << 20},
                                         {"2 ranks: all-reduce, 32 MB, pipeline", run_all_reduce, most_shared},
                                         {"2 ranks: reduce-scatter, 8 MB", run_reduce_scatter, 4 << 20},
                                         {"2 ranks: all-gather, 8 MB", run_all_gather, 4 << 20},
                                         {"2 ranks: all-to-all, 8 MB", run_all_to_all, 4 << 20},
                                         {"2 ranks: sum and norm, 64 x 8 KB", run_norm, 64 * hidden},
                                         {"2 ranks: the same with groups", run_norm_groups, 64 * hidden},
                                         {"2 ranks: sum and norm, 1,024 x 8 KB", run_norm, 1024 * hidden}};

/* Element i of what this rank gets; of a reduce-scatter those of its half. */
static uint16_t wanted(const collective *c, int64_t i)
{
    const int64_t half = c->count / 2, at = c->run == run_reduce_scatter ? comm.rank * half + i : i;
    return c->run == run_norm || c->run == run_norm_groups ? normed[i]
           : c->run == run_all_to_all                      ? sends[i / half][comm.rank * half + i % half]
           : c->run == run_all_gather                      ? sends[i / half][i % half]
                                                           : bf16_of(value_at(at, 0) + value_at(at, 1));
}

static void profile_shared(const collective *c)
{
    uint16_t *const found = (uint16_t *)allocate(most_shared * sizeof *found);
    meet();
    const double us = time_calls(c->run, c->count, 20);
    CUDA(cudaMemsetAsync(recv_bf16, poison, most_shared * sizeof *recv_bf16, stream));
    CUDA(cudaStreamSynchronize(stream));
    meet();
    if (comm.rank == 0)
        CUDA(cudaProfilerStart());
    meet();
    c->run(&gpu, c->count);
    CUDA(cudaStreamSynchronize(stream));
    meet();
    if (comm.rank == 0)
        CUDA(cudaProfilerStop());
    check_kvprim(kvprim_comm_check(&comm));
    CUDA(cudaMemcpy(found, recv_bf16, most_shared * sizeof *found, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < (c->run == run_reduce_scatter ? c->count / 2 : c->count); i++)
        if (found[i] != wanted(c, i))
            quit("rank %d: %s: element %lld: expected %04x, got %04x", (int)comm.rank, c->name, (long long)i,
                 wanted(c, i), found[i]);
    if (comm.rank == 0)
        printf("# %s|range|%lld|ranks|%.2f\n", c->name, (long long)(8 * c->count), us);
    free(found);
}

static void be_rank(int rank)
{
    kvprim_comm_desc desc = {};
    open_gpu(0);
    CUDA(cudaMalloc(&peers[rank], 33 << 20));
    CUDA(cudaMalloc((void **)&recv_bf16, most_shared * sizeof *recv_bf16));
    send_bf16 = on_gpu(sends[rank], most_shared * sizeof *send_bf16);
    desc.rank = rank, desc.world = 2;
    desc.exchange = exchange, desc.exchange_context = exchanged[rank], desc.peers = peers, desc.peer_bytes = 33 << 20;
    desc.max_sms = 32; /* with which sums of more than 8 MB go by the pipeline */
    desc.all_reduce_limit = desc.reduce_scatter_limit = desc.all_gather_limit = SIZE_MAX;
    meet();
    check_kvprim(kvprim_comm_init(&comm, &desc));
    if (rank == 0)
        printf("%s\n", kvprim_comm_describe(&comm));
    for (const collective &c : collectives)
        profile_shared(&c);
    meet();
    check_kvprim(kvprim_comm_destroy(&comm));
}

static int profile_ranks(void)
{
    (void)alarm(50); /* ends ranks that wait for each other for ever */
    for (int r = 0; r < 2; r++) {
        sends[r] = (uint16_t *)allocate(most_shared * sizeof *sends[r]);
        for (int64_t i = 0; i < most_shared; i++)
            sends[r][i] = bf16_of(value_at(i, r));
    }
    normed = (uint16_t *)allocate(1024 * hidden * sizeof *normed);
    const kvprim_norm_desc norm = norm_of(1024 * hidden, NULL, sends[0], normed);
    const void *const both[2] = {sends[0], sends[1]};
    check_kvprim(kvprim_all_reduce_norm_host(&norm, both, 2));
    weight_on_gpu = on_gpu(sends[0], hidden * sizeof *sends[0]);
    (void)pthread_barrier_init(&all_ranks, NULL, 2);
    std::thread other(be_rank, 1);
    be_rank(0);
    other.join();
    return 0;
}
#endif

int main(int argc, char **argv)
{
    if (argc == 1)
        return profile_rows();
#ifdef PROFILE_NCCL
    if (argc == 4 && strcmp(argv[1], "all_reduce") == 0 && (argv[2][0] == '0' || argv[2][0] == '1'))
        return profile_collectives(argv[2][0] - '0', argv[3]);
    if (argc == 2 && strcmp(argv[1], "ranks") == 0)
        return profile_ranks();
#endif
    fprintf(stderr, "usage: %s [all_reduce 0|1 ID | ranks]\n", argv[0]);
    return 2;
}

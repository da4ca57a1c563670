/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_gather, _store, _slots, _transfer, _unpack, _unpack_meta, _copy, _move and the device functions
   on a GPU with the host functions, byte by byte.

       nvcc -arch=native -std=c++17 -O2 -I. tests/gpu/test_cuda.cu -o test_cuda && ./test_cuda

   The argument `quick` runs about a tenth of the cases. `sanitize` runs some of those, for compute-sanitizer: of each
   kernel, the first, second, fourth, eighth ... case that launches it (sampled.h). It ends with what was launched. */
#define KVPRIM_IMPLEMENTATION
#include "sampled.h"
#include "../../kvprim_cuda.cuh"
#include "sampled.h"
static bool quick;

#include "test_rows.h"
#include "test_transfers.h"
#include "test_fragments.h"
#include "test_slots.h"
#include "test_layouts.h"
#include "test_copies.h"
#include "test_meta.h"
#include "test_convert.h"
#include "test_choice.h"
#include "test_refusals.h"
#include "test_shared.h"
#include "test_fetch.h"
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

/* ---- CUDA ---- */

static void check_cuda(cudaError_t error, const char *call, int line)
{
    if (error == cudaSuccess)
        return;
    printf("FAIL line %d: %s: %s\n", line, call, cudaGetErrorString(error));
    counts->failed++;
    exit(finish());
}
#define CUDA(call) check_cuda(call, #call, __LINE__)

template <class T> static T *device_memory(size_t count)
{
    void *p;
    CUDA(cudaMalloc(&p, count * sizeof(T)));
    return static_cast<T *>(p);
}

/* What cudaMemset and cudaMemcpy from ordinary memory began has landed: they may return before that, and streams that
   do not block do not wait for it. */
static void settle()
{
    CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}

/* Device memory that begins with copies of one byte, or as a copy of the host's, and is freed at the block's end. */
template <class T> struct gpu_array {
    T *const p;
    const size_t count;

    gpu_array(size_t n, int byte) : p(device_memory<T>(n)), count(n)
    {
        CUDA(cudaMemset(p, byte, n * sizeof(T)));
        settle();
    }
    gpu_array(const T *host, size_t n) : p(device_memory<T>(n)), count(n)
    {
        CUDA(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice));
        settle();
    }
    gpu_array(const gpu_array &) = delete;
    ~gpu_array()
    {
        CUDA(cudaFree(p));
    }
    void read(T *host) const
    {
        CUDA(cudaMemcpy(host, p, count * sizeof(T), cudaMemcpyDeviceToHost));
    }
    T first() const
    {
        T value;
        CUDA(cudaMemcpy(&value, p, sizeof value, cudaMemcpyDeviceToHost));
        return value;
    }
};

/* Returns NULL and skips the test if there is not that much. */
static unsigned char *much_device_memory(size_t bytes)
{
    void *p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        skip("%.1f GB of device memory are not free", double(bytes) / 1e9);
        return nullptr;
    }
    CUDA(error);
    return static_cast<unsigned char *>(p);
}

static kvprim_cuda_launch main_launch;

static cudaStream_t stream_of(const arena *a)
{
    return a->launch ? a->launch->stream : nullptr;
}

static void upload(const arena *a)
{
    CUDA(cudaMemcpyAsync(a->device, a->got, a->used, cudaMemcpyDefault, stream_of(a)));
}

static void download(const arena *a)
{
    CUDA(cudaMemcpyAsync(a->got, a->device, a->used, cudaMemcpyDefault, stream_of(a)));
    CUDA(cudaStreamSynchronize(stream_of(a)));
}

/* What is in `source` of an arena. */
static thread_local std::vector<unsigned char> source_contents;

static void before(arena *a)
{
    upload(a);
    if (!a->source)
        return;
    source_contents.assign(a->got, a->got + a->used);
    CUDA(cudaMemcpyAsync(a->source, a->got, a->used, cudaMemcpyDefault, stream_of(a)));
}

static void allow(arena *, size_t, size_t)
{
}

static void after(arena *a, bool)
{
    const cudaError_t left = cudaGetLastError();
    if (left != cudaSuccess)
        fail("%s: left behind the error %s", current, cudaGetErrorString(left));
    download(a);
    if (!a->source)
        return;
    std::vector<unsigned char> contents(source_contents.size());
    CUDA(cudaMemcpy(contents.data(), a->source, contents.size(), cudaMemcpyDefault));
    if (contents != source_contents)
        fail("%s: the memory of the source has changed", current);
}

static void check_launches(const char *)
{
}

static unsigned enqueued()
{
    return 0;
}

static void to_device(size_t bytes)
{
    memory.used = bytes;
    upload(&memory);
}

static void from_device(size_t bytes)
{
    memory.used = bytes;
    download(&memory);
}

/* memory.got is pinned. What the transfer does not write stays as it is in both memories. */
static void layout_run_over_link(const layout_case *which, layout_call *c, uint8_t *got)
{
    const ptrdiff_t further = got - memory.device;
    const auto to_pinned = [further](void *p) { return p ? static_cast<char *>(p) + further : nullptr; };
    for (void *&layer : c->host_layers)
        layer = to_pinned(layer);
    for (size_t k = 0; k < c->n; k++) {
        kvprim_side &host = c->back ? c->moves[k].src : c->moves[k].dst;
        host.table.data = to_pinned(host.table.data);
        if (!c->back)
            c->moves[k].rejected = reinterpret_cast<uint32_t *>(to_pinned(c->moves[k].rejected));
    }
    to_device(which->bytes);
    if (kvprim_cuda_move(c->moves, c->n, &layout_launch) != KVPRIM_OK)
        fail("layout %s: %s", which->name, kvprim_last_error());
    if (c->back)
        from_device(which->bytes);
    CUDA(cudaStreamSynchronize(stream_of(&memory)));
}

template <class Params> static void launch_threads(void (*kernel)(Params), int64_t threads, const Params &params)
{
    kernel<<<unsigned((threads + 127) / 128), 128, 0, stream_of(&memory)>>>(params);
    CUDA(cudaGetLastError());
}

/* For reports. */
static void name_table(const char *name, const kvprim_table &t, int64_t row_bytes)
{
    memory.tables.push_back({name, 0, kvprim_table_resolve(t, row_bytes), row_bytes});
}

static void compare_as(const char *what)
{
    snprintf(current, sizeof current, "%s", what);
    compare(&memory);
}

/* Gives an arena its own memory. Its descriptors run as `launch` says. */
static void open_arena(arena *a, size_t capacity, const kvprim_cuda_launch *launch)
{
    void *pinned[2];
    for (void *&p : pinned)
        CUDA(cudaMallocHost(&p, capacity));
    a->expected = static_cast<unsigned char *>(pinned[0]);
    a->got = static_cast<unsigned char *>(pinned[1]);
    a->device = device_memory<unsigned char>(capacity);
    a->capacity = capacity;
    a->launch = launch;
}

static void close_arena(arena *a)
{
    CUDA(cudaFreeHost(a->expected));
    CUDA(cudaFreeHost(a->got));
    CUDA(cudaFree(a->device));
}

/* ---- the same as in emulation ---- */

/* Runs a test with each of these limits of multiprocessors, with pdl and without. */
static void with_options(const std::vector<int32_t> &limits, void (*test)(arena *))
{
    for (const int32_t max_sms : limits)
        for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++) {
            main_launch.max_sms = max_sms;
            test(&memory);
        }
    main_launch.pdl = main_launch.max_sms = 0;
}

static void with_options(void (*test)(arena *))
{
    with_options({0, 1, 8, 10000}, test);
}

static void test_kernels()
{
    with_options({0}, kernel_matrix);
}

static void test_null_launch()
{
    memory.launch = nullptr;
    small_matrix(&memory);
    small_batches(&memory);
    small_copies(&memory);
    memory.launch = &main_launch;
}

static void test_listed()
{
    listed_matrix(&memory);
    with_options({0, 4}, listed_options);
}

static void test_moves()
{
    with_options({0, 4}, several_moves);
}

/* ---- unpack ---- */

static void test_unpack_lengths()
{
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes += quick && bytes > 64 ? 37 : 1) {
        one_length(&memory, bytes, false);
        if (bytes % 3 == 0)
            one_length(&memory, bytes, true);
    }
}

static void test_unpack_counts()
{
    static const size_t counts[] = {1023, 2100, 9000, 100000};
    large_batches(&memory, counts, quick ? 2 : 4);
    uneven_batches(&memory);
    empty_fragments(&memory);
    last_fragments(&memory);
    for (const launches_case &c : launches_cases)
        one_batch(&memory, &c.batch);
}

/* ---- copy ---- */

static void test_copy_lengths()
{
    for (size_t bytes = 0; bytes <= 300; bytes += quick && bytes > 64 ? 37 : 1)
        one_copy_length(&memory, bytes, bytes % 2 != 0);
}

/* ---- memory ---- */

/* Memory of each kind, as the current device addresses it. */
enum memory_kind { DEVICE, PINNED, MANAGED, PEER };
static const char *const kind_names[] = {"device", "pinned", "managed", "peer"};

static unsigned char *open_memory(memory_kind kind, size_t bytes)
{
    void *p, *mapped;
    if (kind == PEER)
        CUDA(cudaSetDevice(1));
    if (kind == PINNED)
        CUDA(cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    else
        CUDA(kind == MANAGED ? cudaMallocManaged(&p, bytes) : cudaMalloc(&p, bytes));
    CUDA(cudaSetDevice(0));
    if (kind != PINNED)
        return static_cast<unsigned char *>(p);
    CUDA(cudaHostGetDevicePointer(&mapped, p, 0));
    return static_cast<unsigned char *>(mapped);
}

static void close_memory(memory_kind kind, unsigned char *p)
{
    CUDA(kind == PINNED ? cudaFreeHost(p) : cudaFree(p));
}

/* All memory of a move is of this kind, including indices and counter. */
static void moves_in(memory_kind kind)
{
    unsigned char *const device = memory.device;
    memory.device = open_memory(kind, size_t(24) << 20);
    small_matrix(&memory);
    small_batches(&memory);
    close_memory(kind, memory.device);
    memory.device = device;
}

static void test_other_memory()
{
    moves_in(PINNED);
    moves_in(MANAGED);
}

/* Transfers to memory of one kind from that of another, first with the whole GPU, then with a part of it. */
static void transfers_between(memory_kind dst, memory_kind src)
{
    const size_t bytes = size_t(24) << 20;
    unsigned char *const device = memory.device;
    const int before_it = counts->faults;
    memory.device = open_memory(dst, bytes);
    memory.source = open_memory(src, bytes);
    for (main_launch.max_sms = 0; main_launch.max_sms <= 8; main_launch.max_sms += 8)
        small_transfers(&memory), long_transfers(&memory), transfer_lines(&memory), convert_transfers(&memory);
    main_launch.max_sms = 0;
    close_memory(src, memory.source);
    close_memory(dst, memory.device);
    memory.source = nullptr;
    memory.device = device;
    if (counts->faults != before_it)
        fail("these were transfers to %s from %s memory", kind_names[dst], kind_names[src]);
}

static void test_transfer_memory()
{
    for (const memory_kind dst : {DEVICE, PINNED, MANAGED})
        for (const memory_kind src : {DEVICE, PINNED, MANAGED})
            transfers_between(dst, src);
}

static void test_peer_memory()
{
    int devices = 0, can = 0;
    CUDA(cudaGetDeviceCount(&devices));
    if (devices > 1)
        CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        skip("none of %d devices can access another one's memory", devices);
        return;
    }
    CUDA(cudaDeviceEnablePeerAccess(1, 0));
    for (const memory_kind kind : {DEVICE, PINNED, MANAGED, PEER}) {
        transfers_between(PEER, kind);
        transfers_between(kind, PEER);
    }
    moves_in(PEER);
    CUDA(cudaDeviceDisablePeerAccess(1));
}

/* Compares device memory with what it should hold, row by row. */
static void check_rows(const char *what, const unsigned char *on_device, const std::vector<unsigned char> &want,
                       int64_t row_bytes)
{
    std::vector<unsigned char> got(want.size());
    CUDA(cudaMemcpy(got.data(), on_device, got.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < got.size(); i++)
        if (got[i] != want[i]) {
            fail("%s of %lld bytes: row %zu byte %zu: expected %02x, got %02x", what, print_i64(row_bytes),
                 i / size_t(row_bytes), i % size_t(row_bytes), want[i], got[i]);
            return;
        }
}

/* A gather, and a store of its source over its output. Each table's allocation ends with the table's last byte; a
   source's ends with the aligned 16-byte word that holds it. compute-sanitizer knows where allocations end. */
static void exact_moves(int64_t row_bytes, const kvprim_cuda_launch *launch)
{
    enum { rows = 6, count = 9 };
    static const int32_t index[count] = {5, 0, -1, 6, 5, 3, INT32_MIN, INT32_MAX, 1}, slots[rows] = {8, 0, -1, 9, 3, 1};
    const size_t src_bytes = size_t(rows * row_bytes), src_room = (src_bytes + 15) / 16 * 16;
    std::vector<unsigned char> src(src_room), want(size_t(count * row_bytes));
    fill(src.data(), src_bytes);
    const gpu_array<unsigned char> src_on(src.data(), src_room), dst_on(want.size(), 0xa5);
    const gpu_array<int32_t> index_on(index, count), slots_on(slots, rows);
    const kvprim_table src_host = table_of(src.data(), rows), src_table = table_of(src_on.p, rows);
    const kvprim_table dst_host = table_of(want.data(), count), dst_table = table_of(dst_on.p, count);
    const kvprim_gather_desc gather_host =
        gather_of(dst_host, src_host, row_bytes, index, KVPRIM_I32, 0, count, nullptr);
    const kvprim_gather_desc gather =
        gather_of(dst_table, src_table, row_bytes, index_on.p, KVPRIM_I32, 0, count, nullptr);
    CHECK(kvprim_gather(&gather_host) == KVPRIM_OK && kvprim_cuda_gather(&gather, launch) == KVPRIM_OK);
    check_rows("gather", dst_on.p, want, row_bytes);
    const kvprim_store_desc store_host = store_of(dst_host, src_host, row_bytes, slots, KVPRIM_I32, rows, nullptr);
    const kvprim_store_desc store = store_of(dst_table, src_table, row_bytes, slots_on.p, KVPRIM_I32, rows, nullptr);
    CHECK(kvprim_store(&store_host) == KVPRIM_OK && kvprim_cuda_store(&store, launch) == KVPRIM_OK);
    check_rows("store", dst_on.p, want, row_bytes);
}

static void test_exact_memory()
{
    kvprim_cuda_launch few = {}; /* other kernels */
    few.max_sms = 4;
    for (const int64_t row_bytes : row_sizes) {
        exact_moves(row_bytes, nullptr);
        exact_moves(row_bytes, &few);
    }
}

/* ---- large ---- */

static __global__ void count_others(const unsigned char *p, size_t bytes, unsigned char usual,
                                    unsigned long long *count)
{
    unsigned long long n = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < bytes; i += size_t(gridDim.x) * blockDim.x)
        n += p[i] != usual;
    if (n)
        atomicAdd(count, n);
}

static uint64_t bytes_other_than(unsigned char usual, const unsigned char *p, size_t bytes)
{
    const gpu_array<unsigned long long> count(1, 0);
    count_others<<<2048, 256>>>(p, bytes, usual, count.p);
    CUDA(cudaGetLastError());
    return count.first();
}

/* No byte outside the rows may have changed. */
static void one_large_table(int64_t row_bytes, void (*move)(const large_move *, int64_t))
{
    const size_t bytes = size_t(large_rows * row_bytes), small = large_count * large_row_most;
    unsigned char input[small], output[small], stored[large_row_most];
    unsigned char *const table = much_device_memory(bytes);
    if (!table)
        return;
    for (size_t i = 0; i < small; i++)
        input[i] = static_cast<unsigned char>(1 + i); /* never the poison, nor 0 */
    const gpu_array<unsigned char> input_on(input, small), output_on(small, 0);
    const gpu_array<int64_t> slots(large_slots, large_count);
    const gpu_array<uint32_t> rejected(1, 0);
    const large_move m = {table, input_on.p, output_on.p, slots.p, rejected.p};
    CUDA(cudaMemset(table, 0xa5, bytes));
    move(&m, row_bytes);
    output_on.read(output);
    CHECK(rejected.first() == 2 * large_past);
    for (int i = 0; i < large_count; i++) {
        if (in_large_table(i))
            CUDA(cudaMemcpy(stored, table + large_slots[i] * row_bytes, size_t(row_bytes), cudaMemcpyDeviceToHost));
        check_large_row(i, row_bytes, input, output, in_large_table(i) ? stored : nullptr);
    }
    CHECK(bytes_other_than(0xa5, table, bytes) == uint64_t(large_stored * row_bytes));
    CUDA(cudaFree(table));
}

static void test_large_table()
{
    for (const int64_t row_bytes : {3, 16}) {
        one_large_table(row_bytes, large_store_and_gather);
        one_large_table(row_bytes, large_transfers);
    }
}

enum { many_rows = 1000 };

/* Index i of a gather of more than 2^31 rows. One in 1,000 is padding and one is past the end. */
static __device__ int32_t many_index(uint64_t i)
{
    return i % 1000 == 0 ? -1 : i % 1000 == 1 ? many_rows : int32_t((i * 2654435761u >> 7) % many_rows);
}

static __global__ void fill_many(int32_t *index, uint64_t count)
{
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x)
        index[i] = many_index(i);
}

static __global__ void check_many(const unsigned char *dst, const unsigned char *src, uint64_t count,
                                  unsigned long long *wrong)
{
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count;
         i += uint64_t(gridDim.x) * blockDim.x) {
        const int32_t row = many_index(i);
        if (dst[i] != (row >= 0 && row < many_rows ? src[row] : 0))
            atomicAdd(wrong, 1ull);
    }
}

static void test_many_rows()
{
    const uint64_t count = (uint64_t(1) << 31) + 77, past = (count - 2) / 1000 + 1;
    unsigned char *const block = much_device_memory(count * 5 + 4096);
    if (!block)
        return;
    int32_t *const index = reinterpret_cast<int32_t *>(block);
    unsigned char *const dst = block + count * 4;
    unsigned char table[many_rows + 8] = {0};
    fill(table, many_rows);
    const gpu_array<unsigned char> src(table, sizeof table);
    const gpu_array<unsigned long long> wrong(1, 0);
    const gpu_array<uint32_t> rejected(1, 0);
    CUDA(cudaMemset(dst, 0xa5, count + 4096));
    fill_many<<<2048, 256>>>(index, count);
    CUDA(cudaGetLastError());
    const int64_t rows = int64_t(count);
    const kvprim_gather_desc d =
        gather_of(table_of(dst, rows), table_of(src.p, many_rows), 1, index, KVPRIM_I32, 0, rows, rejected.p);
    kvprim_transfer_desc t = transfer_of(d.dst, d.src, 1, rows);
    t.src_index = index, t.rejected = rejected.p;
    for (uint64_t moves = 1; moves <= 2; moves++) {
        if ((moves == 1 ? kvprim_cuda_gather(&d, nullptr) : kvprim_cuda_transfer(&t, nullptr)) != KVPRIM_OK)
            fail("%s", kvprim_last_error());
        check_many<<<2048, 256>>>(dst, src.p, count, wrong.p);
        CUDA(cudaGetLastError());
        if (wrong.first() != 0 || rejected.first() != moves * past)
            fail("move %d: %llu of %llu rows are wrong, %u indices rejected, expected %llu", int(moves), wrong.first(),
                 print_u64(count), rejected.first(), print_u64(moves * past));
        CHECK(bytes_other_than(0xa5, dst + count, 4096) == 0);
        CUDA(cudaMemset(dst, 0, count)); /* a transfer skips the rows of padding */
    }
    CUDA(cudaFree(block));
}

/* Row i of a store of more than 2^31 rows goes to the cache's row count - 1 - i. Slots start at INT32_MIN. */
static __device__ unsigned char many_byte(uint64_t i)
{
    return static_cast<unsigned char>(i * 2654435761u >> 13);
}

static __global__ void fill_store(int32_t *slot, unsigned char *input, uint64_t count)
{
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count;
         i += uint64_t(gridDim.x) * blockDim.x) {
        slot[i] = int32_t(int64_t(count - 1 - i) + INT32_MIN);
        input[i] = many_byte(i);
    }
}

static __global__ void check_store(const unsigned char *cache, uint64_t count, unsigned long long *wrong)
{
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x)
        if (cache[i] != many_byte(count - 1 - i))
            atomicAdd(wrong, 1ull);
}

static void test_many_slots()
{
    const uint64_t count = (uint64_t(1) << 31) + 77;
    unsigned char *const block = much_device_memory(count * 6 + 4096);
    if (!block)
        return;
    int32_t *const slot = reinterpret_cast<int32_t *>(block);
    unsigned char *const input = block + count * 4, *const cache = input + count;
    const gpu_array<unsigned long long> wrong(1, 0);
    CUDA(cudaMemset(cache, 0xa5, count + 4096));
    fill_store<<<2048, 256>>>(slot, input, count);
    CUDA(cudaGetLastError());
    const int64_t rows = int64_t(count);
    kvprim_store_desc d = store_of(table_of(cache, rows), table_of(input, rows), 1, slot, rows);
    d.slot_base = INT32_MIN;
    if (kvprim_cuda_store(&d, nullptr) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    check_store<<<2048, 256>>>(cache, count, wrong.p);
    CUDA(cudaGetLastError());
    if (wrong.first() != 0)
        fail("%llu of %llu rows are wrong", wrong.first(), print_u64(count));
    CHECK(bytes_other_than(0xa5, cache + count, 4096) == 0);
    CUDA(cudaFree(block));
}

/* ---- graphs, chains, streams ---- */

static void begin_capture()
{
    CUDA(cudaStreamBeginCapture(main_launch.stream, cudaStreamCaptureModeGlobal));
}

static const size_t any_nodes = SIZE_MAX;

static cudaGraphExec_t end_capture(size_t want_nodes)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t n = 0;
    CUDA(cudaStreamEndCapture(main_launch.stream, &graph));
    CUDA(cudaGraphGetNodes(graph, nullptr, &n));
    if (want_nodes != any_nodes && n != want_nodes)
        fail("the graph has %zu nodes, expected %zu", n, want_nodes);
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* Captures what `enqueue` does, and replays it. Before each replay `prepare` sets what is expected and, in `got`, what
   the GPU starts from. */
template <class Enqueue, class Prepare>
static void replay_graph(size_t nodes, int replays, const char *what, const Enqueue &enqueue, const Prepare &prepare)
{
    begin_capture();
    enqueue();
    const cudaGraphExec_t exec = end_capture(nodes);
    for (int replay = 0; replay < replays; replay++) {
        prepare();
        upload(&memory);
        CUDA(cudaGraphLaunch(exec, main_launch.stream));
        download(&memory);
        snprintf(current, sizeof current, "%s, pdl %d, replay %d", what, main_launch.pdl, replay);
        compare(&memory);
    }
    CUDA(cudaGraphExecDestroy(exec));
}

/* Runs the same from a stream, and from a graph, where the launches follow each other without a gap. `start`: what the
   GPU starts from each time. */
template <class Enqueue>
static void run_and_replay(const std::vector<unsigned char> &start, size_t nodes, int replays, const char *what,
                           const Enqueue &enqueue)
{
    const auto restart = [&] { memcpy(memory.got, start.data(), memory.used); };
    restart();
    upload(&memory);
    enqueue();
    download(&memory);
    snprintf(current, sizeof current, "%s, pdl %d", what, main_launch.pdl);
    compare(&memory);
    replay_graph(nodes, replays, what, enqueue, restart);
}

/* Stores and gathers that follow each other in one arena. */
struct chain {
    std::vector<kvprim_store_desc> stores;
    std::vector<kvprim_gather_desc> gathers; /* gather i follows store i */
};

static void chain_on_host(const chain *c)
{
    for (size_t i = 0; i < c->stores.size(); i++)
        CHECK(kvprim_store(&c->stores[i]) == KVPRIM_OK && kvprim_gather(&c->gathers[i]) == KVPRIM_OK);
}

static void enqueue_chain(const chain *c)
{
    for (size_t i = 0; i < c->stores.size(); i++) {
        const kvprim_store_desc store = on_device(&memory, c->stores[i]);
        const kvprim_gather_desc gather = on_device(&memory, c->gathers[i]);
        if (kvprim_cuda_store(&store, &main_launch) != KVPRIM_OK ||
            kvprim_cuda_gather(&gather, &main_launch) != KVPRIM_OK)
            fail("link %zu: %s", i, kvprim_last_error());
    }
}

/* Link i stores what link i - 1 gathered, as K and as V, into one of two pairs of caches, and gathers from that V. The
   second pair's V has the layout `last`: if it has heads, another kernel moves that pair. */
static chain make_chain(int64_t count, int64_t row_bytes, const layout *last, int depth)
{
    const int64_t rows = count + count / 2 + 1;
    chain c;
    empty(&memory);
    kvprim_table cache[4], x = place(&memory, &layouts[0], count, row_bytes, 0);
    for (int k = 0; k < 4; k++)
        cache[k] = place(&memory, k == 3 ? last : &layouts[0], rows, row_bytes, 0);
    for (int i = 0; i < depth; i++) {
        const kvprim_index_type type = type_of(unsigned(i));
        void *const slot = place_index(&memory, type, count, 0, rows, true);
        kvprim_store_desc store = store_of(cache[i % 2 * 2], x, row_bytes, slot, type, count, reserve_counter(&memory));
        add_v(&store, cache[i % 2 * 2 + 1], x, row_bytes);
        x = place(&memory, &layouts[0], count, row_bytes, 0);
        const kvprim_gather_desc gather =
            gather_of(x, store.v_cache, row_bytes, place_index(&memory, KVPRIM_I32, count, 0, rows, false), KVPRIM_I32,
                      0, count, nullptr);
        name_table("gathered", gather.dst, row_bytes);
        name_table("k_cache", store.k_cache, row_bytes);
        name_table("v_cache", store.v_cache, row_bytes);
        c.stores.push_back(store);
        c.gathers.push_back(gather);
    }
    return c;
}

static void one_chain(int64_t count, int64_t row_bytes, const layout *last)
{
    const int depth = 50;
    const chain c = make_chain(count, row_bytes, last, depth);
    const std::vector<unsigned char> start(memory.expected, memory.expected + memory.used);
    char what[80];
    chain_on_host(&c);
    snprintf(what, sizeof what, "chain of %lld rows of %lld bytes", print_i64(count), print_i64(row_bytes));
    run_and_replay(start, 2 * depth, quick ? 2 : 10, what, [&] { enqueue_chain(&c); });
}

static void test_chains()
{
    static const int64_t counts[] = {1, 8, 64, 64, 1000, 5000, 40}, sizes[] = {4096, 4096, 128, 1024, 256, 100, 20001};
    for (main_launch.pdl = 1; main_launch.pdl >= 0; main_launch.pdl--)
        for (int i = 0; i < 14; i++)
            one_chain(counts[i / 2], sizes[i / 2], &layouts[i % 2 * 8]);
    main_launch.pdl = 0;
}

static unsigned char *fetch_memory(size_t bytes)
{
    void *p;
    CUDA(cudaMallocManaged(&p, bytes));
    return static_cast<unsigned char *>(p);
}

static void fetch_release(unsigned char *p)
{
    CUDA(cudaFree(p));
}

static void fetch_wait()
{
    CUDA(cudaDeviceSynchronize());
}

/* Everything that a fetch reads changes between replays, and so does the set. */
static void test_fetch_graphs()
{
    static const fetch_sizes sizes[] = {{5, 60, 300, 30, 700}, {2, 3000, 9000, 2500, 1200}};
    fetch_pair p(32 << 20);
    for (int round = 0; round < 20; round++) {
        main_launch.pdl = round % 2;
        if (!fetch_place_pair(&p, &sizes[round / 2 % 2]))
            continue;
        begin_capture();
        CHECK(kvprim_cuda_fetch(&p.d, &main_launch) == KVPRIM_OK);
        const cudaGraphExec_t graph = end_capture(1);
        for (int replay = 0; replay < 10; replay++) {
            fetch_fill(&p.c, 0);
            fetch_copy_inputs(&p);
            CHECK(kvprim_fetch(&p.c.d) == KVPRIM_OK);
            CUDA(cudaGraphLaunch(graph, main_launch.stream));
            fetch_wait();
            if (!fetch_compare_pair(&p, "replay"))
                break;
        }
        CUDA(cudaGraphExecDestroy(graph));
    }
    main_launch.pdl = 0;
}

/* Indices change between replays, and everything else too. */
static void one_graph(int64_t count, int64_t row_bytes)
{
    const chain c = make_chain(count, row_bytes, &layouts[4], 2);
    const auto change_all = [&] {
        refill(&memory);
        memcpy(memory.got, memory.expected, memory.used);
        chain_on_host(&c);
    };
    replay_graph(
        4, 6, "other indices", [&] { enqueue_chain(&c); }, change_all);
}

static void test_graphs()
{
    static const int64_t counts[] = {1, 8, 300, 3000}, sizes[] = {64, 100, 1024, 4096};
    for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++)
        for (int i = 0; i < 16; i++)
            one_graph(counts[i % 4], sizes[i / 4]);
    main_launch.pdl = 0;
    kvprim_gather_desc nothing = good_gather(&memory), refused = on_device(&memory, nothing);
    nothing.count = 0;
    refused.index = nullptr;
    begin_capture();
    CHECK(kvprim_cuda_gather(&nothing, &main_launch) == KVPRIM_OK);
    CHECK(kvprim_cuda_gather(&refused, &main_launch) == KVPRIM_ERROR_NULL);
    const kvprim_transfer_desc no_transfer = {};
    CHECK(kvprim_cuda_transfer(&no_transfer, &main_launch) == KVPRIM_OK);
    CUDA(cudaGraphExecDestroy(end_capture(0)));
}

/* The page table, positions and lengths change between replays: a store and a gather find other rows. */
static void one_slots_graph(int form, unsigned types, int64_t count, int64_t row_bytes)
{
    const slots_round_trip t = make_round_trip(&memory, form, types, count, row_bytes);
    const auto change_all = [&] {
        fill(memory.expected, memory.used);
        deal_pages(&t);
        memcpy(memory.got, memory.expected, memory.used);
        round_trip_on_host(&t);
    };
    replay_graph(
        3, 6, "slots, store, gather", [&] { enqueue_round_trip(&memory, &t); }, change_all);
}

static void test_slots_graphs()
{
    for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++)
        for (int form = 0; form < n_slots_forms; form++)
            for (const int64_t count : {1, 32, 5000})
                one_slots_graph(form, unsigned(below(8)), count, count == 32 ? 2048 : 100);
    main_launch.pdl = 0;
    kvprim_slots_desc none = good_slots(&memory, 0), refused = on_device(&memory, none);
    none.count = 0;
    refused.pages = nullptr;
    begin_capture();
    CHECK(kvprim_cuda_slots(&none, &main_launch) == KVPRIM_OK);
    CHECK(kvprim_cuda_slots(&refused, &main_launch) == KVPRIM_ERROR_NULL);
    CUDA(cudaGraphExecDestroy(end_capture(0)));
}

/* Captures an offload and a restore. The arrays of layers are gone when the graph runs, and the contents change. */
static void one_transfer_graph(int32_t layers, int64_t row_bytes)
{
    const int64_t rows = 60, count = 40;
    std::vector<void *> cache(static_cast<size_t>(layers)), store(cache.size());
    empty(&memory);
    kvprim_transfer_desc out = {};
    out.src = place_layers(&memory, {8, 0}, rows, row_bytes, layers, true, cache.data(), &out.src_layer_stride);
    out.dst = place_layers(&memory, {0, 0}, rows, row_bytes, layers, true, store.data(), &out.dst_layer_stride);
    out.src_layers = cache.data(), out.dst_layers = store.data(), out.layers = layers;
    out.row_bytes = row_bytes, out.count = count;
    out.src_index = place_index(&memory, KVPRIM_I32, count, 0, rows, true), out.index_type = KVPRIM_I32;
    out.rejected = reserve_counter(&memory);
    kvprim_transfer_desc back = out;
    std::swap(back.dst, back.src);
    std::swap(back.dst_layers, back.src_layers);
    std::swap(back.dst_index, back.src_index);
    const auto enqueue = [&] {
        device_transfer on(&memory, out), on_back(&memory, back);
        CHECK(kvprim_cuda_transfer(&on.d, &main_launch) == KVPRIM_OK);
        CHECK(kvprim_cuda_transfer(&on_back.d, &main_launch) == KVPRIM_OK);
        for (device_transfer *const gone : {&on, &on_back})
            memset(static_cast<void *>(gone), 0xa5, sizeof *gone);
    };
    const auto change_all = [&] {
        refill(&memory);
        memcpy(memory.got, memory.expected, memory.used);
        CHECK(kvprim_transfer(&out) == KVPRIM_OK && kvprim_transfer(&back) == KVPRIM_OK);
    };
    replay_graph(layers > 231 ? 4 : 2, 4, "transfers", enqueue, change_all);
}

static void test_transfer_graphs()
{
    for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++)
        for (const int32_t layers : {1, 64, 231, 300})
            for (const int64_t row_bytes : {100, 2048})
                one_transfer_graph(layers, row_bytes);
    main_launch.pdl = 0;
}

/* A captured transfer finds other pointers in its arrays at each replay, but the host's indices of the capture. */
static void one_listed_graph(unsigned how, int32_t layers, int64_t row_bytes)
{
    std::vector<void *> dst(static_cast<size_t>(layers)), src(dst.size());
    const transfer_case c = {row_bytes, {4, 0}, {8, 0}, 50, layers, 3, 3, type_of(how), true};
    kvprim_transfer_desc resolved;
    empty(&memory);
    kvprim_transfer_desc d = make_transfer(&memory, c, dst.data(), src.data());
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK);
    listed_transfer listed(&memory, d, resolved, how), captured(&memory, d, resolved, HOST_LISTS);
    if (how & HOST_LISTS)
        d.dst_index = captured.lists[0].get(), d.src_index = captured.lists[1].get();
    const auto enqueue = [&] {
        CHECK(kvprim_cuda_transfer(&listed.on.d, &main_launch) == KVPRIM_OK);
        listed.forget_lists();
    };
    const auto change_all = [&] {
        refill(&memory);
        if (how & DST_TABLE)
            std::rotate(dst.begin(), dst.begin() + 1, dst.end());
        if (how & SRC_TABLE)
            std::rotate(src.begin(), src.begin() + layers / 2, src.end());
        listed.refresh(&memory);
        memcpy(memory.got, memory.expected, memory.used);
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    };
    replay_graph(1, 4, "listed transfers", enqueue, change_all);
}

static void test_listed_graphs()
{
    for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++)
        for (unsigned how = 1; how < LISTED_KINDS; how++)
            for (const int32_t layers : {2, 61})
                for (const int64_t row_bytes : {100, 2048})
                    one_listed_graph(how, layers, row_bytes);
    main_launch.pdl = 0;
}

/* ---- max_sms ---- */

/* Each block takes half of an SM's threads, says where it runs, and stays until `stop`. */
static __global__ void __launch_bounds__(1024) crowd(volatile unsigned *sm_of_block, const volatile unsigned *stop)
{
    unsigned sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x > 0)
        return;
    sm_of_block[blockIdx.x] = 1 + sm;
    while (!*stop)
        ;
}

/* Returns how many SMs a transfer with this max_sms runs on: those that a crowd as large as the GPU cannot fill. Every
   layer has the same source in host memory, so the transfer takes long. Returns 0 and skips the test if there is no
   device memory for the layers' copies. */
static int sms_of_transfer(int32_t max_sms, int sms)
{
    enum { rows = 4096, row_bytes = 4096, layers = 128 }; /* 40 ms; the test looks at the crowd after 10 ms */
    unsigned char *const on = much_device_memory(size_t(rows) * row_bytes * layers);
    if (!on)
        return 0;
    unsigned char *const host = open_memory(PINNED, size_t(rows) * row_bytes);
    const size_t blocks = 2 * size_t(sms);
    volatile unsigned *seen;
    void *pinned;
    int32_t *const index = reinterpret_cast<int32_t *>(open_memory(MANAGED, rows * sizeof(int32_t)));
    for (int32_t i = 0; i < rows; i++)
        index[i] = i;
    cudaStream_t beside;
    cudaEvent_t done;
    CUDA(cudaHostAlloc(&pinned, (blocks + 1) * sizeof *seen, cudaHostAllocMapped));
    memset(pinned, 0, (blocks + 1) * sizeof *seen);
    seen = static_cast<unsigned *>(pinned); /* the last one is `stop` */
    CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    void *from[layers];
    std::fill_n(from, layers, host);
    kvprim_transfer_desc d = {};
    d.dst.rows = d.src.rows = d.count = rows;
    d.dst.data = on;
    d.src_layers = from;
    d.layers = layers;
    d.row_bytes = row_bytes;
    d.dst_index = index, d.index_type = KVPRIM_I32; /* without one the copy engine would move the rows */
    const kvprim_cuda_launch limited = launch_like(&memory, 0, max_sms);
    CHECK(kvprim_cuda_transfer(&d, &limited) == KVPRIM_OK);
    CUDA(cudaEventRecord(done, main_launch.stream));
    crowd<<<unsigned(blocks), 1024, 0, beside>>>(seen, seen + blocks);
    CUDA(cudaGetLastError());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::vector<int> on_sm(static_cast<size_t>(sms));
    for (size_t b = 0; b < blocks; b++)
        if (seen[b])
            on_sm[seen[b] - 1]++;
    if (cudaEventQuery(done) != cudaErrorNotReady)
        fail("max_sms %d: the transfer was too short to be seen", max_sms);
    seen[blocks] = 1;
    CUDA(cudaDeviceSynchronize());
    (void)cudaGetLastError(); /* not ready */
    CUDA(cudaEventDestroy(done));
    CUDA(cudaStreamDestroy(beside));
    CUDA(cudaFree(on));
    CUDA(cudaFreeHost(pinned));
    CUDA(cudaFreeHost(host));
    close_memory(MANAGED, reinterpret_cast<unsigned char *>(index));
    return sms - int(std::count(on_sm.begin(), on_sm.end(), 2));
}

static void test_crowds()
{
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    if (device.maxThreadsPerMultiProcessor != 2048) {
        skip("an SM of this GPU holds %d threads, not 2,048", device.maxThreadsPerMultiProcessor);
        return;
    }
    cudaFuncAttributes loaded;
    CUDA(cudaFuncGetAttributes(&loaded, crowd)); /* load it before it is to run beside something */
    for (const int32_t max_sms : {1, 4, 8, 32}) {
        const int got = sms_of_transfer(max_sms, device.multiProcessorCount);
        if (!counts->skip[0] && (got < 1 || got > max_sms))
            fail("max_sms %d: a transfer is seen on %d SMs", max_sms, got);
    }
}

/* Captures what `enqueue` does, which must be one node. Returns its type, and if that is a kernel, its blocks. */
template <class Enqueue> static cudaGraphNodeType capture_one(const Enqueue &enqueue, unsigned *blocks)
{
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaGraphNodeType type;
    cudaKernelNodeParams kernel;
    size_t n = 0;
    begin_capture();
    CHECK(enqueue() == KVPRIM_OK);
    CUDA(cudaStreamEndCapture(main_launch.stream, &graph));
    CUDA(cudaGraphGetNodes(graph, nullptr, &n));
    CHECK(n == 1);
    n = 1;
    CUDA(cudaGraphGetNodes(graph, &node, &n));
    CUDA(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeKernel) {
        CUDA(cudaGraphKernelNodeGetParams(node, &kernel));
        *blocks = kernel.gridDim.x * kernel.gridDim.y * kernel.gridDim.z;
    }
    CUDA(cudaGraphDestroy(graph));
    return type;
}

static unsigned blocks_of(kvprim_status (*call)(const kvprim_cuda_launch *), const kvprim_cuda_launch *launch)
{
    unsigned blocks = 0;
    CHECK(capture_one([=] { return call(launch); }, &blocks) == cudaGraphNodeTypeKernel);
    return blocks;
}

/* Nothing is moved, only captured. */
static kvprim_status call_gather(const kvprim_cuda_launch *launch)
{
    const int64_t bytes = 12 << 20;
    size_t span;
    kvprim_table dst = lay_out(&layouts[0], 5000, 1024, &span), src = lay_out(&layouts[8], 6000, 1024, &span);
    dst.data = memory.device, src.data = memory.device + bytes;
    const kvprim_gather_desc d = gather_of(dst, src, 1024, memory.device + 3 * bytes, KVPRIM_I32, 0, 5000, nullptr);
    return kvprim_cuda_gather(&d, launch);
}

static kvprim_status call_transfer(const kvprim_cuda_launch *launch)
{
    kvprim_transfer_desc d =
        transfer_of(table_of(memory.device, 100), table_of(memory.device + (16 << 20), 100), 2048, 100);
    d.layers = 64;
    return kvprim_cuda_transfer(&d, launch);
}

static kvprim_status call_store(const kvprim_cuda_launch *launch)
{
    const kvprim_table cache = table_of(memory.device, 4000), input = table_of(memory.device + (16 << 20), 4000);
    const kvprim_store_desc d = store_of(cache, input, 2048, memory.device + (32 << 20), KVPRIM_I32, 4000, nullptr);
    return kvprim_cuda_store(&d, launch);
}

static kvprim_status call_unpack(const kvprim_cuda_launch *launch)
{
    static kvprim_fragment f[1000];
    for (uint64_t i = 0; i < 1000; i++)
        f[i] = {i * 7001, i * 8192, 7000};
    kvprim_unpack_desc d = {};
    d.src = memory.device, d.dst = memory.device + (16 << 20);
    d.src_bytes = d.dst_bytes = 8 << 20;
    d.fragments = f, d.count = 1000;
    return kvprim_cuda_unpack(&d, launch);
}

static kvprim_status call_copy(const kvprim_cuda_launch *launch)
{
    static kvprim_copy_item items[1000];
    for (size_t i = 0; i < 1000; i++)
        items[i] = {i % 3 ? memory.device + i * 7001 : nullptr, memory.device + (16 << 20) + i * 8192, 7000};
    const kvprim_copy_desc d = {items, 1000, 0};
    return kvprim_cuda_copy(&d, launch);
}

static kvprim_status call_unpack_meta(const kvprim_cuda_launch *launch)
{
    kvprim_unpack_meta_desc d = {};
    d.src = memory.device, d.dst = memory.device + (16 << 20);
    d.src_bytes = d.dst_bytes = 8 << 20;
    d.meta = reinterpret_cast<kvprim_unpack_meta_item *>(memory.device + (32 << 20)), d.max_count = 1000;
    d.count = reinterpret_cast<uint64_t *>(memory.device + (48 << 20));
    return kvprim_cuda_unpack_meta(&d, launch);
}

/* A limited launch has as many blocks as SMs are allowed: no block runs on more than one SM. */
static void test_blocks()
{
    for (const auto call : {call_gather, call_store, call_transfer, call_unpack, call_copy, call_unpack_meta}) {
        for (const int32_t max_sms : {1, 3, 8, 100}) {
            const kvprim_cuda_launch limited = launch_like(&memory, 0, max_sms);
            CHECK(blocks_of(call, &limited) == unsigned(max_sms));
        }
        CHECK(blocks_of(call, &main_launch) > 132);
    }
}

/* Of a transfer of rows of 4 KB between these kinds of memory. */
static cudaGraphNodeType captured_as(memory_kind dst, memory_kind src, int64_t count, bool indexed, unsigned *blocks)
{
    const size_t bytes = size_t(count) << 12;
    unsigned char *const to = open_memory(dst, bytes), *const from = open_memory(src, bytes);
    kvprim_transfer_desc d = transfer_of(table_of(to, count), table_of(from, count), 4096, count);
    d.dst_index = indexed ? memory.device : nullptr; /* nothing is moved, only captured */
    const cudaGraphNodeType type = capture_one([&] { return kvprim_cuda_transfer(&d, &main_launch); }, blocks);
    close_memory(dst, to);
    close_memory(src, from);
    return type;
}

/* Transfers over the link to the host take few multiprocessors, or the copy engine; others the whole GPU. */
static void test_link()
{
    for (const memory_kind dst : {DEVICE, PINNED, MANAGED})
        for (const memory_kind src : {DEVICE, PINNED, MANAGED}) {
            const bool link = dst == PINNED ? src == DEVICE : src == PINNED && dst == DEVICE;
            const unsigned filling = dst == PINNED ? 5 : 8, joined = 4; /* see kvpc_on_link, kvpc_join_rows */
            unsigned blocks = 0;
            CHECK(captured_as(dst, src, 4096, true, &blocks) == cudaGraphNodeTypeKernel);
            CHECK(link ? blocks == filling : blocks > 132);
            CHECK(captured_as(dst, src, 4096, false, &blocks) ==
                  (link ? cudaGraphNodeTypeMemcpy : cudaGraphNodeTypeKernel));
            CHECK(captured_as(dst, src, 64, false, &blocks) == cudaGraphNodeTypeKernel);
            CHECK(link ? blocks == joined : blocks > 2);
            CHECK(captured_as(dst, src, 15, false, &blocks) == cudaGraphNodeTypeKernel && blocks > 2);
        }
    CHECK(cudaGetLastError() == cudaSuccess);
}

/* Unpacks that follow each other between two buffers. Each moves what the one before it left. */
struct relay {
    std::vector<std::vector<kvprim_fragment>> batches;
    unsigned char *side[2];
    size_t bytes;
};

static relay make_relay(size_t count, uint64_t bytes, sizes kind, size_t steps)
{
    relay r;
    for (size_t s = 0; s < steps; s++) {
        const batch_case c = {count, bytes, kind, SHUFFLED, ANYWHERE, s % 2 ? 16u : 1u, 0, 0, 1};
        std::vector<kvprim_fragment> f(count);
        for (size_t i = 0; i < count; i++)
            f[i].bytes = size_of(&c, i);
        const uint64_t dst_bytes = place_side(&c, c.dst, &f, &kvprim_fragment::dst_offset);
        const uint64_t src_bytes = place_side(&c, c.src, &f, &kvprim_fragment::src_offset);
        r.bytes = std::max({s ? r.bytes : 0, size_t(dst_bytes), size_t(src_bytes)});
        r.batches.push_back(f);
    }
    empty(&memory);
    for (unsigned char *&side : r.side)
        side = reserve<unsigned char>(&memory, r.bytes, 0);
    return r;
}

static kvprim_unpack_desc step_of(const relay *r, size_t s)
{
    kvprim_unpack_desc d = {};
    d.src = r->side[s % 2], d.dst = r->side[1 - s % 2];
    d.src_bytes = d.dst_bytes = r->bytes;
    d.fragments = r->batches[s].data(), d.count = r->batches[s].size();
    return d;
}

static void enqueue_relay(const relay *r)
{
    for (size_t s = 0; s < r->batches.size(); s++) {
        kvprim_unpack_desc d = step_of(r, s);
        d.src = on_device(&memory, d.src);
        d.dst = on_device(&memory, d.dst);
        if (kvprim_cuda_unpack(&d, &main_launch) != KVPRIM_OK)
            fail("step %zu: %s", s, kvprim_last_error());
    }
}

static void one_relay(size_t count, uint64_t bytes, sizes kind)
{
    const relay r = make_relay(count, bytes, kind, 8);
    const std::vector<unsigned char> start(memory.expected, memory.expected + memory.used);
    char what[80];
    for (size_t s = 0; s < r.batches.size(); s++) {
        const kvprim_unpack_desc d = step_of(&r, s);
        CHECK(kvprim_unpack(&d) == KVPRIM_OK);
    }
    snprintf(what, sizeof what, "relay of %zu fragments of %llu bytes", count, print_u64(bytes));
    run_and_replay(start, any_nodes, quick ? 2 : 5, what, [&] {
        relay gone = r;
        enqueue_relay(&gone);
        for (std::vector<kvprim_fragment> &f : gone.batches)
            memset(f.data(), 0xff, f.size() * sizeof f[0]);
    });
}

/* Batches of one launch, and of several that overlap. */
static void test_unpack_relays()
{
    for (main_launch.pdl = 1; main_launch.pdl >= 0; main_launch.pdl--) {
        one_relay(100, 4096, EVEN);
        one_relay(20000, 64, EVEN);
        one_relay(20000, 1000, EVEN);
        one_relay(6000, 300, LOGARITHMIC);
        one_relay(3000, 100, ONE_LARGE);
    }
    main_launch.pdl = 0;
}

/* ---- descriptors that the GPU reads ---- */

#include "test_late.h"

/* Copies and zeros that follow each other inside one block of slots: each step moves some slots to others, in one or
   several launches. */
static std::vector<copy_items> make_slot_steps(size_t slots, size_t bytes, size_t n_steps, bool vary)
{
    std::vector<copy_items> steps;
    empty(&memory);
    unsigned char *const block = reserve<unsigned char>(&memory, slots * bytes, vary ? 5 : 0);
    for (size_t s = 0; s < n_steps; s++) {
        const std::vector<int64_t> turn = shuffled(int64_t(slots));
        copy_items items;
        for (size_t i = 0; i + 1 < slots; i += 2) {
            const unsigned char *const src = block + size_t(turn[i]) * bytes;
            unsigned char *const dst = block + size_t(turn[i + 1]) * bytes;
            items.push_back({i % 7 == 4 ? nullptr : src, dst, vary ? bytes - i % 5 : bytes});
        }
        steps.push_back(items);
    }
    return steps;
}

static void one_slot_relay(size_t slots, size_t bytes, bool vary)
{
    const std::vector<copy_items> steps = make_slot_steps(slots, bytes, 6, vary);
    const std::vector<unsigned char> start(memory.expected, memory.expected + memory.used);
    char what[80];
    for (const copy_items &items : steps) {
        const kvprim_copy_desc d = {items.data(), items.size(), 0};
        CHECK(kvprim_copy(&d) == KVPRIM_OK);
    }
    snprintf(what, sizeof what, "copies between %zu slots of %zu bytes", slots, bytes);
    run_and_replay(start, any_nodes, quick ? 2 : 5, what, [&] {
        for (copy_items items : steps) {
            for (kvprim_copy_item &c : items)
                c.src = on_device(&memory, c.src), c.dst = on_device(&memory, c.dst);
            const kvprim_copy_desc d = {items.data(), items.size(), 0};
            if (kvprim_cuda_copy(&d, &main_launch) != KVPRIM_OK)
                fail("%s: %s", what, kvprim_last_error());
            memset(static_cast<void *>(items.data()), 0xff, items.size() * sizeof items[0]);
        }
    });
}

static void test_copy_relays()
{
    for (main_launch.pdl = 1; main_launch.pdl >= 0; main_launch.pdl--) {
        one_slot_relay(200, 4096, false);
        one_slot_relay(300, 1001, true);
        one_slot_relay(20000, 100, true);
        one_slot_relay(40000, 64, false);
    }
    main_launch.pdl = 0;
}

/* Copies from the first pair of blocks to the second, and from there with pdl to the third, in a graph or not. Returns
   how many bytes of the second and third are wrong. */
static size_t one_copy(unsigned char *const pairs[3][2], size_t block, size_t from, size_t to, size_t bytes, bool graph)
{
    std::vector<unsigned char> all(2 * block), want(2 * block, 0xee), got(block);
    const kvprim_copy_item first = {pairs[0][0] + from, pairs[1][0] + to, bytes};
    const kvprim_copy_item second = {pairs[1][0] + to, pairs[2][0] + to, bytes};
    const kvprim_copy_desc copy = {&first, 1, 0}, again = {&second, 1, 0};
    kvprim_cuda_launch dependent = main_launch;
    dependent.pdl = 1;
    fill(all.data(), 2 * block);
    memcpy(want.data() + to, all.data() + from, bytes);
    for (size_t i = 0; i < 2; i++) {
        CUDA(cudaMemcpy(pairs[0][i], all.data() + i * block, block, cudaMemcpyDefault));
        CUDA(cudaMemset(pairs[1][i], 0xee, block));
        CUDA(cudaMemset(pairs[2][i], 0xee, block));
    }
    CUDA(cudaDeviceSynchronize());
    if (graph)
        begin_capture();
    sampled_met.clear();
    CHECK(kvprim_cuda_copy(&copy, &main_launch) == KVPRIM_OK);
    if (from + bytes <= block && to + bytes <= block)
        CHECK(sampled_met.count(nullptr) == (bytes <= 384 << 10));
    CHECK(kvprim_cuda_copy(&again, &dependent) == KVPRIM_OK);
    const cudaGraphExec_t exec = graph ? end_capture(2) : nullptr;
    if (graph)
        CUDA(cudaGraphLaunch(exec, main_launch.stream));
    CUDA(cudaStreamSynchronize(main_launch.stream));
    if (graph)
        CUDA(cudaGraphExecDestroy(exec));
    size_t wrong = 0;
    for (size_t k = 2; k < 6; k++) {
        CUDA(cudaMemcpy(got.data(), pairs[k / 2][k % 2], block, cudaMemcpyDefault));
        for (size_t i = 0; i < block; i++)
            wrong += got[i] != want[k % 2 * block + i];
    }
    return wrong;
}

/* One item that does not lie at multiples of 16. CUDA copies it, unless it is long; it refuses one that lies in two
   allocations, which follow each other here: then a kernel does, in a graph too. */
static void test_one_copy()
{
    enum { blocks = 24 };
    const size_t block = 1 << 20, last = block - 4999;
    unsigned char *at[blocks], *pairs[3][2];
    size_t n = 0;
    for (unsigned char *&p : at)
        CUDA(cudaMalloc(&p, block));
    std::sort(at, at + blocks, std::less<>());
    for (size_t i = 0; i + 1 < blocks && n < 3; i++)
        if (at[i + 1] == at[i] + block)
            pairs[n][0] = at[i], pairs[n++][1] = at[i + 1], i++;
    for (size_t i = 0; i < 6 && n < 3; i++)
        pairs[i / 2][i % 2] = at[i];
    for (const bool graph : {false, true}) {
        for (const size_t bytes : {1, 5000, 384 << 10, (384 << 10) + 1})
            CHECK(one_copy(pairs, block, 3, 5, bytes, graph) == 0);
        if (n < 3)
            continue;
        CHECK(one_copy(pairs, block, 3, last, 5000, graph) == 0);
        CHECK(one_copy(pairs, block, last, 5, 5000, graph) == 0);
    }
    for (unsigned char *p : at)
        CUDA(cudaFree(p));
    if (n < 3)
        skip("too few allocations of 1 MB follow each other");
}

/* From every kind of memory to every kind, and zeros, in one list; 16 MB or more of zeros are set by CUDA. */
static void test_copy_memory()
{
    const size_t half = 90000, bytes = 2 * half, large = (16 << 20) + 48;
    unsigned char *at[3], *host = static_cast<unsigned char *>(allocate(3 * bytes));
    std::vector<unsigned char> got(bytes);
    copy_items items;
    for (int k = 0; k < 3; k++) {
        at[k] = open_memory(memory_kind(k), bytes);
        fill(host + size_t(k) * bytes, bytes);
        CUDA(cudaMemcpy(at[k], host + size_t(k) * bytes, bytes, cudaMemcpyDefault));
    }
    CUDA(cudaDeviceSynchronize());
    for (size_t i = 0; i < 120; i++) { /* the first halves are sources */
        const size_t from = i % 3, to = i / 3 % 3, n = i % 7 ? 1 + i * 2 : 16 * i;
        const size_t src = below(half - 2000), dst = half + (i / 9 * 3 + from) * 2000;
        items.push_back({i % 11 == 10 ? nullptr : at[from] + src, at[to] + dst, n});
        if (i % 9 != from + 3 * to) {
            fail("a pair of kinds is missing");
            break;
        }
        if (items.back().src)
            memcpy(host + to * bytes + dst, host + from * bytes + src, n);
        else
            memset(host + to * bytes + dst, 0, n);
    }
    kvprim_copy_desc d = {items.data(), items.size(), 0};
    CHECK(kvprim_cuda_copy(&d, &main_launch) == KVPRIM_OK);
    CUDA(cudaStreamSynchronize(main_launch.stream));
    for (int k = 0; k < 3; k++) {
        CUDA(cudaMemcpy(got.data(), at[k], bytes, cudaMemcpyDefault));
        CHECK(memcmp(got.data(), host + size_t(k) * bytes, bytes) == 0);
        close_memory(memory_kind(k), at[k]);
    }
    for (const memory_kind kind : {DEVICE, PINNED, MANAGED}) {
        unsigned char *const p = open_memory(kind, large);
        std::vector<unsigned char> all(large, 0xff);
        const kvprim_copy_item zeros = {nullptr, p + 16, large - 32};
        d.items = &zeros, d.count = 1;
        CUDA(cudaMemcpy(p, all.data(), large, cudaMemcpyDefault));
        CUDA(cudaDeviceSynchronize());
        CHECK(kvprim_cuda_copy(&d, &main_launch) == KVPRIM_OK);
        CUDA(cudaStreamSynchronize(main_launch.stream));
        CUDA(cudaMemcpy(all.data(), p, large, cudaMemcpyDefault));
        CHECK(size_t(std::count(all.begin(), all.end(), 0)) == large - 32 && all[15] == 0xff &&
              all[large - 16] == 0xff);
        close_memory(kind, p);
    }
    free(host);
}

/* Returns a source byte, never the poison. */
static __device__ unsigned char far_byte(uint64_t at)
{
    return static_cast<unsigned char>(1 + (at * 0x9e3779b97f4a7c15u >> 40) % 100);
}

static __global__ void fill_far(unsigned char *src)
{
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < far_bytes;
         i += uint64_t(gridDim.x) * blockDim.x)
        src[i] = far_byte(i);
}

static __global__ void check_far(const unsigned char *dst, const kvprim_fragment *f, unsigned long long *wrong)
{
    const kvprim_fragment one = f[blockIdx.x];
    for (uint64_t b = blockIdx.y * uint64_t(blockDim.x) + threadIdx.x; b < one.bytes; b += gridDim.y * blockDim.x)
        if (dst[one.dst_offset + b] != far_byte(one.src_offset + b))
            atomicAdd(wrong, 1ull);
}

static void one_far_batch(const far_case *c, unsigned char *dst, const unsigned char *src)
{
    const std::vector<kvprim_fragment> f = far_fragments(c);
    const gpu_array<kvprim_fragment> on(f.data(), f.size());
    const gpu_array<unsigned long long> wrong(1, 0);
    uint64_t total = 0;
    for (const kvprim_fragment &one : f)
        total += one.bytes;
    CUDA(cudaMemset(dst, 0xa5, far_bytes));
    unpack_far(c, f, dst, src, nullptr);
    check_far<<<dim3(unsigned(f.size()), c->count < 10 ? 1024 : 1), 256>>>(dst, on.p, wrong.p);
    CUDA(cudaGetLastError());
    if (wrong.first() != 0 || bytes_other_than(0xa5, dst, far_bytes) != total)
        fail("%s: %llu bytes are wrong, or others were written", current, wrong.first());
}

/* The last case's fragments are cut and have more than 4 GiB together; then comes one fragment of 4 GiB. */
static void test_far_fragments()
{
    static const far_case whole = {1, uint64_t(1) << 32, 1, true};
    unsigned char *const both = much_device_memory(2 * far_bytes);
    if (!both)
        return;
    fill_far<<<2048, 256>>>(both);
    CUDA(cudaGetLastError());
    for (const far_case &c : far_cases)
        one_far_batch(&c, both + far_bytes, both);
    one_far_batch(&whole, both + far_bytes, both);
    CUDA(cudaFree(both));
}

/* Fragments of almost 4 GiB among small ones, from odd sources to destinations past 4 GiB. */
static void test_far_metas()
{
    const std::vector<kvprim_fragment> f = {
        {3, 700000001, UINT32_MAX}, {UINT32_MAX, 5, 100}, {17, 200, 40000}, {UINT32_MAX - 15, 50000, 16}};
    std::vector<kvprim_unpack_meta_item> meta;
    const uint64_t count = f.size();
    uint64_t total = 0;
    for (const kvprim_fragment &one : f) {
        meta.push_back({uint32_t(one.src_offset), uint32_t(one.bytes), one.dst_offset});
        total += one.bytes;
    }
    meta.push_back({8, UINT32_MAX, far_bytes - UINT32_MAX + 1}); /* outside by a byte */
    unsigned char *const both = much_device_memory(2 * far_bytes);
    if (!both)
        return;
    const gpu_array<kvprim_fragment> on(f.data(), f.size());
    const gpu_array<kvprim_unpack_meta_item> list(meta.data(), meta.size());
    const gpu_array<uint64_t> given(std::vector<uint64_t>{count + 1}.data(), 1);
    const gpu_array<uint32_t> rejected(1, 0);
    const gpu_array<unsigned long long> wrong(1, 0);
    const kvprim_unpack_meta_desc d = {both, far_bytes, both + far_bytes, far_bytes, list.p, given.p, 5, rejected.p, 0};
    fill_far<<<2048, 256>>>(both);
    CUDA(cudaMemset(both + far_bytes, 0xa5, far_bytes));
    CHECK(kvprim_cuda_unpack_meta(&d, nullptr) == KVPRIM_OK);
    check_far<<<dim3(unsigned(count), 1024), 256>>>(both + far_bytes, on.p, wrong.p);
    CUDA(cudaGetLastError());
    CHECK(wrong.first() == 0 && rejected.first() == 1);
    CHECK(bytes_other_than(0xa5, both + far_bytes, far_bytes) == total);
    CUDA(cudaFree(both));
}

static void thread_main(unsigned seed)
{
    arena a = {};
    kvprim_cuda_launch launch = {};
    random_state = uint64_t(seed) << 40;
    CUDA(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking));
    open_arena(&a, size_t(24) << 20, &launch);
    for (int round = 0; round < (quick ? 1 : 4); round++) {
        launch.pdl = round % 2;
        small_matrix(&a);
        small_transfers(&a);
        refusals(&a);
        small_batches(&a);
        small_metas(&a);
    }
    close_arena(&a);
    CUDA(cudaStreamDestroy(launch.stream));
}

static void test_threads()
{
    std::thread first(thread_main, 1000u), second(thread_main, 2000u);
    first.join();
    second.join();
}

/* ---- duplicate slots ---- */

/* Whether the bytes at `offset` of a cache row come from one of the rows that were stored there. */
static bool is_from_a_token(const kvprim_store_desc *d, const kvprim_table *input, const unsigned char *bytes,
                            int64_t offset, size_t n, int64_t row)
{
    for (int64_t i = 0; i < d->count; i++)
        if (index_at(d->slot, d->slot_type, i) == row &&
            memcmp(static_cast<const char *>(input->data) + i * input->stride + offset, bytes, n) == 0)
            return true;
    return false;
}

/* Checks a cache's rows by aligned 16-byte blocks, and by bytes at unaligned ends; then accepts them. */
static void check_duplicates(const kvprim_store_desc *d, const char *name, const kvprim_table *cache,
                             const kvprim_table *input, int64_t row_bytes)
{
    for (int64_t row = 0; row < cache->rows; row++) {
        const size_t start = offset_of(&memory, cache->data) + size_t(row * cache->stride);
        for (int64_t b = 0; b < row_bytes;) {
            const size_t here = start + size_t(b);
            const size_t n = here % 16 == 0 && b + 16 <= row_bytes ? 16 : 1;
            if (!is_from_a_token(d, input, memory.got + here, b, n, row))
                fail("%s row %lld of %lld bytes: %zu bytes at %lld are of no token", name, print_i64(row),
                     print_i64(row_bytes), n, print_i64(b));
            b += int64_t(n);
        }
        memcpy(memory.expected + start, memory.got + start, size_t(row_bytes));
    }
}

static void one_duplicates(int64_t row_bytes, size_t cache_align, size_t input_align)
{
    const int64_t count = 3000, rows = 7;
    empty(&memory);
    kvprim_store_desc d = {};
    d.k_cache = place(&memory, &layouts[0], rows, row_bytes, cache_align);
    d.v_cache = place(&memory, &layouts[0], rows, row_bytes, 0);
    d.k = place(&memory, &layouts[0], count, row_bytes, input_align);
    d.v = place(&memory, &layouts[0], count, row_bytes, input_align);
    d.k_bytes = d.v_bytes = row_bytes;
    void *const slot = place_index(&memory, KVPRIM_I32, count, 0, rows, false);
    for (int64_t i = 0; i < count; i++)
        set_index(slot, KVPRIM_I32, i, i < rows ? i : int64_t(below(uint64_t(rows))));
    d.slot = slot;
    d.slot_type = KVPRIM_I32;
    d.count = count;
    memcpy(memory.got, memory.expected, memory.used);
    upload(&memory);
    const kvprim_store_desc on = on_device(&memory, d);
    CHECK(kvprim_cuda_store(&on, &main_launch) == KVPRIM_OK);
    download(&memory);
    check_duplicates(&d, "k_cache", &d.k_cache, &d.k, row_bytes);
    check_duplicates(&d, "v_cache", &d.v_cache, &d.v, row_bytes);
    compare_as("duplicate slots");
}

static void test_duplicates()
{
    main_launch.max_sms = 16; /* another kernel */
    one_duplicates(100, 3, 5);
    one_duplicates(1152, 0, 0);
    one_duplicates(5000, 7, 4);
    main_launch.max_sms = 0;
    static const int64_t sizes[] = {16, 64, 100, 128, 256, 1000, 1152, 2048, 4096};
    for (const int64_t row_bytes : sizes)
        for (int round = 0; round < 4; round++) {
            static const size_t cache[] = {0, 0, 8, 3}, input[] = {0, 5, 8, 12};
            one_duplicates(row_bytes, cache[round], input[round]);
        }
}

/* ---- kvprim_warp_copy and kvprim_warp_zero ---- */

static void one_warp_length(unsigned char *src, unsigned char *src_on, size_t bytes, bool zero, dim3 block)
{
    const size_t slot = warp_slot(bytes), all = warp_alignments * slot;
    const warp_cases c = {memory.device, src_on, slot, bytes, zero};
    memset(memory.expected, 0xc3, all);
    memcpy(memory.got, memory.expected, all);
    expect_warps(memory.expected, src, bytes, zero);
    memory.used = all;
    upload(&memory);
    move_by_warps<<<warp_alignments * 32 / (block.x * block.y), block, 0, main_launch.stream>>>(c);
    CUDA(cudaGetLastError());
    download(&memory);
    compare_warps(memory.got, memory.expected, bytes, zero);
}

static void test_warps()
{
    const size_t most = warp_alignments * warp_slot(longest_warp_copy);
    std::vector<unsigned char> src(most);
    static const dim3 blocks[] = {dim3(128), dim3(32), dim3(256), dim3(32, 4)};
    fill(src.data(), most);
    const gpu_array<unsigned char> src_on(src.data(), most);
    CUDA(cudaDeviceSynchronize());
    empty(&memory);
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes += bytes <= 64 || !quick ? 1 : sampled_on ? 97 : 17) {
        one_warp_length(src.data(), src_on.p, bytes, false, blocks[bytes % 4]);
        if (bytes % 3 == 0 || bytes < 300)
            one_warp_length(src.data(), src_on.p, bytes, true, blocks[bytes / 3 % 4]);
    }
}

/* ---- errors of others ---- */

/* An earlier CUDA error of the caller is neither taken for an error of this call nor cleared. */
static void test_earlier_error()
{
    const kvprim_gather_desc d = good_gather(&memory), on = on_device(&memory, d);
    memcpy(memory.got, memory.expected, memory.used);
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    upload(&memory);
    void *p;
    const cudaError_t earlier = cudaMalloc(&p, SIZE_MAX / 2);
    CHECK(earlier != cudaSuccess);
    if (kvprim_cuda_gather(&on, &main_launch) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    CHECK(cudaGetLastError() == earlier);
    download(&memory);
    compare_as("after an earlier error");
}

/* CUDA refuses an implicit synchronisation with a stream that is being captured. The error says so. */
static void test_legacy_capture()
{
    const kvprim_gather_desc d = good_gather(&memory), on = on_device(&memory, d);
    cudaStream_t blocking;
    cudaGraph_t graph = nullptr;
    CUDA(cudaStreamCreate(&blocking));
    CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    CHECK(kvprim_cuda_gather(&on, nullptr) == KVPRIM_ERROR_CUDA);
    if (!strstr(kvprim_last_error(), "cudaErrorStreamCaptureImplicit"))
        fail("a launch on the legacy stream beside a capture: %s", kvprim_last_error());
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    CHECK(graph == nullptr);
    CUDA(cudaStreamDestroy(blocking));
}

static void expect_refused(const kvprim_transfer_desc &d, const char *field, const char *advice)
{
    if (kvprim_cuda_transfer(&d, &main_launch) != KVPRIM_ERROR_ARGUMENT || !strstr(kvprim_last_error(), field) ||
        !strstr(kvprim_last_error(), advice))
        fail("%s: %s", field, kvprim_last_error());
}

/* Transfers name ordinary host memory, in release builds too, and what to do. What is pinned afterwards is taken. */
static void test_pageable()
{
    int pageable;
    CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
    if (pageable) {
        skip("this GPU reaches all of the host's memory");
        return;
    }
    const size_t bytes = 1 << 20;
    char *const host = static_cast<char *>(calloc(1, bytes));
    int32_t *const list = reinterpret_cast<int32_t *>(host);
    const gpu_array<unsigned char> on_gpu(bytes, 0x11);
    kvprim_transfer_desc good = {}, d;
    good.dst = table_of(on_gpu.p, 8), good.src = table_of(on_gpu.p + 8192, 8);
    good.row_bytes = 1024, good.count = 8, good.index_type = KVPRIM_I32;
    const auto with = [&](const std::function<void(kvprim_transfer_desc *)> &change) {
        d = good;
        change(&d);
        return d;
    };
    for (const int64_t count : {1, 8}) { /* the second is 64 KB long, so that CUDA is asked anyhow */
        good.count = count, good.row_bytes = 1024 * count;
        good.src.data = on_gpu.p + 8192 * 16;
        expect_refused(with([&](auto *t) { t->dst.data = host; }), "kvprim_cuda_transfer: dst (", "pin it");
        expect_refused(with([&](auto *t) { t->src.data = host; }), "kvprim_cuda_transfer: src (", "pin it");
        expect_refused(with([&](auto *t) { t->dst_index = list; }), "dst_index (", "or set host_index = 1");
        expect_refused(with([&](auto *t) { t->src_index = list; }), "src_index (", "or set host_index = 1");
        expect_refused(with([&](auto *t) { t->src_device_layers = reinterpret_cast<void **>(host); }),
                       "src_device_layers (", "pin it");
        expect_refused(with([&](auto *t) { t->src_index = on_gpu.p + (1 << 19), t->host_index = 1; }), "src_index (",
                       "is memory of a GPU, but host_index is 1");
        expect_refused(with([&](auto *t) { t->dst_index = on_gpu.p + (1 << 19), t->host_index = 1; }), "dst_index (",
                       "is memory of a GPU, but host_index is 1");
    }
    CHECK(cudaGetLastError() == cudaSuccess);
    good.src_index = list, good.host_index = 1;
    CHECK(kvprim_cuda_transfer(&good, &main_launch) == KVPRIM_OK);
    good.src_index = nullptr, good.host_index = 0;
    CUDA(cudaHostRegister(host, bytes, cudaHostRegisterDefault));
    for (int n = 0; n < 2; n++) {
        memset(host, 0x33 + n, bytes);
        d = with([&](auto *t) { t->src.data = host; });
        CHECK(kvprim_cuda_transfer(&d, &main_launch) == KVPRIM_OK);
        CUDA(cudaStreamSynchronize(main_launch.stream));
        CHECK(on_gpu.first() == 0x33 + n);
    }
    CUDA(cudaHostUnregister(host));
    free(host);
}

#ifdef KVPRIM_DEBUG
struct pointer_field {
    const char *name;
    void *at;
};

template <class Desc> static void expect_unreachable(const Desc *d, const char *name)
{
    CHECK_ERROR(functions<Desc>::gpu(d, &main_launch), KVPRIM_ERROR_ARGUMENT, name);
    CHECK(strstr(kvprim_last_error(), "which the GPU cannot"));
}

/* A good descriptor: in turn, each of these pointers becomes one to ordinary host memory. */
template <class Desc>
static void unreachable(const Desc *d, const void *host, const std::vector<pointer_field> &pointers)
{
    CHECK(functions<Desc>::gpu(d, &main_launch) == KVPRIM_OK);
    for (const pointer_field &p : pointers) {
        void *was;
        memcpy(&was, p.at, sizeof was);
        memcpy(p.at, &host, sizeof host);
        expect_unreachable(d, p.name);
        memcpy(p.at, &was, sizeof was);
    }
}

static void unreachable_rows(void *host)
{
    kvprim_gather_desc g = on_device(&memory, good_gather(&memory));
    unreachable(&g, host, {{"dst", &g.dst.data}, {"src", &g.src.data}, {"index", &g.index}, {"rejected", &g.rejected}});
    kvprim_gather_desc far = g;
    far.dst.rows = int64_t(1) << 44; /* a side without an index only has its first `count` rows touched */
    CHECK(kvprim_cuda_gather(&far, &main_launch) == KVPRIM_OK);
    far = g;
    far.src.data = on_device(&memory, memory.expected + memory.used); /* after all that it would overlap */
    far.src.rows = int64_t(1) << 44;
    expect_unreachable(&far, "src");
    kvprim_transfer_desc t = transfer_of(g.dst, g.src, g.row_bytes, g.count);
    void *layers[] = {g.dst.data, host};
    t.src_index = g.index;
    unreachable(&t, host,
                {{"dst", &t.dst.data},
                 {"src", &t.src.data},
                 {"src_index", &t.src_index},
                 {"dst_index", &t.dst_index},
                 {"rejected", &t.rejected}});
    t.layers = 2, t.dst_layers = layers, t.src.rows /= 2;
    expect_unreachable(&t, "dst");
    kvprim_store_desc s = on_device(&memory, good_store(&memory));
    unreachable(&s, host,
                {{"k_cache", &s.k_cache.data},
                 {"v_cache", &s.v_cache.data},
                 {"k reaches", &s.k.data},
                 {"v reaches", &s.v.data},
                 {"slot", &s.slot},
                 {"rejected", &s.rejected}});
}

static void unreachable_unpacks(void *host)
{
    const kvprim_gather_desc g = on_device(&memory, good_gather(&memory));
    const kvprim_fragment f = {0, 0, 16};
    kvprim_unpack_desc u = {g.src.data, 16, g.dst.data, 16, &f, 1, 0};
    unreachable(&u, host, {{"src", &u.src}, {"dst", &u.dst}});
    char *const to = static_cast<char *>(g.dst.data), *const from = static_cast<char *>(host);
    kvprim_copy_item items[2] = {{g.src.data, to, 16}, {from, from + 16, 0}};
    const kvprim_copy_desc c = {items, 2, 0};
    CHECK(kvprim_cuda_copy(&c, &main_launch) == KVPRIM_OK);
    items[1] = {from, to + 16, 16};
    expect_unreachable(&c, "items[1].src");
    items[1] = {nullptr, from, 16};
    expect_unreachable(&c, "items[1].dst");
    alignas(16) static const unsigned char none[64] = {};
    const gpu_array<unsigned char> list(none, sizeof none);
    kvprim_unpack_meta_desc m = {u.src,
                                 16,
                                 u.dst,
                                 16,
                                 reinterpret_cast<kvprim_unpack_meta_item *>(list.p),
                                 reinterpret_cast<uint64_t *>(list.p + 16),
                                 1,
                                 nullptr,
                                 0};
    unreachable(&m, host,
                {{"src", &m.src}, {"dst", &m.dst}, {"meta", &m.meta}, {"count", &m.count}, {"rejected", &m.rejected}});
}

static void unreachable_slots(void *host)
{
    for (int form = 0; form < 2; form++) {
        kvprim_slots_desc d = on_device(&memory, good_slots(&memory, form));
        unreachable(&d, host,
                    {{"pages", &d.pages},
                     {form ? "cu_seqlens" : "request", form ? &d.cu_seqlens : &d.request},
                     {form ? "starts" : "position", form ? &d.starts : &d.position},
                     {"rejected", &d.rejected},
                     {"slot", &d.slot}});
    }
}

static void unreachable_fetches(void *host)
{
    static const fetch_sizes sizes = {4, 20, 60, 12, 30};
    fetch_pair p(1 << 20);
    kvprim_fetch_desc &d = p.d;
    while (!fetch_place_pair(&p, &sizes) || !d.fresh || !d.pages || !d.plan_src || !d.v.data || !d.hits || !d.misses ||
           !d.rejected)
        continue;
    unreachable(&d, host,
                {{"set.memory", &d.set.memory},
                 {"state", &d.state},
                 {"wanted", &d.wanted},
                 {"fresh", &d.fresh},
                 {"pages", &d.pages},
                 {"rows", &d.rows},
                 {"fresh_rows", &d.fresh_rows},
                 {"plan_src", &d.plan_src},
                 {"plan_dst", &d.plan_dst},
                 {"k_hot", &d.k_hot.data},
                 {"v_hot", &d.v_hot.data},
                 {"k (", &d.k.data},
                 {"v (", &d.v.data},
                 {"hits", &d.hits},
                 {"misses", &d.misses},
                 {"rejected", &d.rejected}});
    fetch_wait(); /* before its memory goes */
}

/* Scales and counters of formats, in memory of their own. */
static void unreachable_formats(void *host)
{
    const gpu_array<unsigned char> cache(64 * 128, 0), rows(8 * 256, 0), scales(64 * 4 * 4, 0), slots(8 * 4, 0);
    kvprim_format int8 = format_of(KVPRIM_INT8), bf16 = format_of(KVPRIM_BF16);
    kvprim_table to = table_of(cache.p, 64), from = table_of(rows.p, 8);
    to.format = &int8, from.format = &bf16;
    int8.scale = KVPRIM_SCALE_TILE, int8.tile = 32, int8.scales = scales.p;
    const kvprim_store_desc d = store_of(to, from, 256, slots.p, KVPRIM_I32, 8, nullptr);
    unreachable(&d, host, {{"k_cache.format.nans", &int8.nans}, {"k_cache.format.scales", &int8.scales}});
    int8.scale = KVPRIM_SCALE_TENSOR, int8.tile = 0;
    unreachable(&d, host, {{"k_cache.format.scales", &int8.scales}});
}

/* Each pointer in turn is ordinary host memory, and a table reaches past its allocation. */
static void test_unreachable()
{
    int pageable;
    CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
    if (pageable) {
        skip("this GPU reaches all of the host's memory");
        return;
    }
    void *const host = calloc(1, 1 << 20);
    unreachable_rows(host);
    unreachable_unpacks(host);
    unreachable_slots(host);
    unreachable_fetches(host);
    unreachable_formats(host);
    CUDA(cudaStreamSynchronize(main_launch.stream));
    free(host);
}
#endif

static __global__ void trap()
{
    asm volatile("trap;");
}

/* One row to a block, as 130 threads move it. */
static void test_many_blocks()
{
    one_store(&memory, 8, {2072, 8, {2, 0}, {2, 0}, kvpc_grid_rows + 65, kvpc_grid_rows + 75, K_ONLY});
}

/* Afterwards nothing works in this process. */
static void test_earlier_work()
{
    const kvprim_gather_desc d = good_gather(&memory), on = on_device(&memory, d);
    trap<<<1, 1, 0, main_launch.stream>>>();
    CHECK(cudaStreamSynchronize(main_launch.stream) == cudaErrorLaunchFailure);
    CHECK(kvprim_cuda_gather(&on, &main_launch) == KVPRIM_ERROR_CUDA);
    if (!strstr(kvprim_last_error(), "work before it failed: cudaErrorLaunchFailure"))
        fail("after a kernel that trapped: %s", kvprim_last_error());
}

static void test_no_device()
{
    alignas(16) static char bytes[64];
    static const int32_t index[1] = {0};
    kvprim_gather_desc d = {};
    d.dst.data = bytes, d.dst.rows = 1;
    d.src.data = bytes + 32, d.src.rows = 1;
    d.row_bytes = 16, d.index = index, d.index_type = KVPRIM_I32, d.count = 1;
    CHECK(kvprim_cuda_gather(&d, nullptr) == KVPRIM_ERROR_CUDA);
    if (!strstr(kvprim_last_error(), "kvprim_cuda_gather: cudaError"))
        fail("without a device: %s", kvprim_last_error());
}

static bool find_device()
{
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);
    cudaDeviceProp device;
    if (error != cudaSuccess || n == 0) {
        run("cuda: a call without a device", test_no_device);
        printf("skip cuda: no CUDA device (%s)\n", error != cudaSuccess ? cudaGetErrorString(error) : "0 devices");
        counts->skipped++;
        return false;
    }
    CUDA(cudaGetDeviceProperties(&device, 0));
    printf("device %s, sm_%d%d%s\n", device.name, device.major, device.minor, quick ? ", quick" : "");
    return true;
}

#ifndef KVPRIM_DEBUG
/* Tables claim more rows than 32 bits count, and have the first few: moves by other kernels, of one task or of two. The
   caches come last, as nothing may lie where they claim to; K's rows and V's take turns. */
static void claimed_rows(arena *a)
{
    const int64_t count = 40, rows = 64, row_bytes = 24;
    for (const bool both : {false, true}) {
        empty(a);
        kvprim_store_desc d = {};
        void *const slot = place_index(a, KVPRIM_I64, count, 0, rows, true);
        for (int64_t i = 0; i < count; i++)
            set_index(slot, KVPRIM_I64, i, i % 9 == 0 ? -1 - i : i % 9 == 1 ? large_rows : i * 11 % rows);
        d.slot = slot, d.slot_type = KVPRIM_I64, d.count = count, d.rejected = reserve_counter(a);
        d.k = place(a, &layouts[0], count, row_bytes, 0);
        d.v = place(a, &layouts[0], count, row_bytes - 4, 0);
        d.k_bytes = row_bytes, d.v_bytes = row_bytes - 4; /* or they are two layers of one task */
        char *const caches = reserve<char>(a, size_t(2 * rows * row_bytes), 0);
        d.k_cache = table_of(caches, large_rows, 2 * row_bytes);
        d.v_cache = table_of(caches + row_bytes, large_rows, 2 * row_bytes);
        if (!both)
            drop_v(&d);
        CHECK(try_move(a, &d, "claimed rows") == RAN);
    }
}
/* The same for a transfer with a list of the host, whose rows take 64 bits each then. */
static void claimed_lists(arena *a)
{
    const int64_t count = 40, rows = 64, row_bytes = 24;
    empty(a);
    kvprim_transfer_desc d = {};
    void *const list = place_index(a, KVPRIM_I64, count, 0, rows, true);
    for (int64_t i = 0; i < count; i++)
        set_index(list, KVPRIM_I64, i, i % 9 == 0 ? -1 - i : i % 9 == 1 ? large_rows : i * 11 % rows);
    d.dst_index = list, d.index_type = KVPRIM_I64, d.count = count, d.rejected = reserve_counter(a);
    d.src = place(a, &layouts[0], count, row_bytes, 0), d.row_bytes = row_bytes;
    d.dst = place(a, &layouts[0], rows, row_bytes, 0);
    d.dst.rows = large_rows;
    CHECK(try_listed(a, &d, HOST_LISTS, "claimed rows") == RAN);
}

static void claimed_tables(arena *a)
{
    claimed_rows(a);
    claimed_lists(a);
}
#endif

/* ---- moves that convert ---- */

/* Every kernel of plain rows: each pair of types, few and many rows, short and long tiles. */
static void convert_kernels(arena *a)
{
    static const struct {
        int64_t count, elements, tile;
    } sizes[] = {{8, 512, 0}, {1100, 512, 0}, {8, 512, 128}, {1100, 512, 128}, {8, 1024, 1024}};
    for (const auto &pair : convert_pairs())
        for (const auto &size : sizes) {
            if (is_small(pair.first) == is_small(pair.second))
                continue;
            convert_case c =
                convert_case_of(0, pair.first, pair.second, size.tile ? KVPRIM_SCALE_TILE : KVPRIM_SCALE_TENSOR);
            c.form = is_small(pair.first) ? CONVERT_STORE : CONVERT_GATHER, c.v = NO_V;
            c.elements = size.elements, c.tile = size.tile, c.count = size.count, c.rows = size.count + 3;
            run_convert(a, &c);
        }
}

static void convert_on_gpu(arena *a)
{
    convert_kernels(a);
    convert_several(a);
}

/* Counts numbers of one binade, and of each exponent, whose quick reciprocal is not the rounded one. */
static __global__ void check_reciprocals(unsigned long long *wrong)
{
    const uint32_t fraction = blockIdx.x * blockDim.x + threadIdx.x, exponent = 63 + fraction % 148;
    for (const uint32_t bits : {127u << 23 | fraction, exponent << 23 | fraction}) {
        const float a = __uint_as_float(bits);
        if (!kvpc_is_unusual(a) && __float_as_uint(kvpc_usual_reciprocal(a)) != __float_as_uint(__frcp_rn(a)))
            atomicAdd(wrong, 1ull);
    }
}

static void test_convert()
{
    const gpu_array<unsigned long long> wrong(1, 0);
    check_reciprocals<<<1 << 15, 256>>>(wrong.p);
    CUDA(cudaGetLastError());
    CHECK(wrong.first() == 0);
    static const int64_t row_counts[] = {1, 33, 1000, 9000, 100000};
    convert_counts(&memory, row_counts, quick ? 4 : 5);
    convert_choices(&memory);
    with_options({0, 1, 8}, convert_on_gpu);
#ifndef KVPRIM_DEBUG
    convert_claimed(&memory);
#endif
}

/* Graphs that are replayed with other scales, rows and indices. */
static void one_convert_graph(unsigned n)
{
    convert_case c = convert_case_of(n * 5, n % 2 ? small_types[n % 3] : KVPRIM_BF16,
                                     n % 2 ? KVPRIM_BF16 : small_types[n % 3], int(n % 4));
    c.form = n % 2 ? CONVERT_STORE : CONVERT_GATHER;
    c.v = NO_V;
    convert_call call = {};
    empty(&memory);
    make_convert(&memory, &c, &call);
    kvprim_store_desc store = on_device(&memory, call.store);
    kvprim_gather_desc gather = on_device(&memory, call.gather);
    const device_formats formats(&memory, &call);
    formats.point(&store), formats.point(&gather);
    const auto change_all = [&] {
        refill(&memory);
        memcpy(memory.got, memory.expected, memory.used);
        CHECK((n % 2 ? kvprim_store(&call.store) : kvprim_gather(&call.gather)) == KVPRIM_OK);
    };
    const auto enqueue = [&] {
        CHECK((n % 2 ? kvprim_cuda_store(&store, &main_launch) : kvprim_cuda_gather(&gather, &main_launch)) ==
              KVPRIM_OK);
    };
    replay_graph(1, 3, "a conversion with other scales", enqueue, change_all);
}

static void test_convert_graphs()
{
    for (main_launch.max_sms = 0; main_launch.max_sms <= 4; main_launch.max_sms += 4)
        for (unsigned n = 0; n < 32; n++) {
            main_launch.pdl = n / 8 % 2;
            one_convert_graph(n);
        }
    main_launch.pdl = main_launch.max_sms = 0;
}

/* As `uses`, except for tests that look at results which sampling leaves out. */
static void kinds_of_rows(arena *a)
{
    padding_alone(a);
    row_tails(a);
    row_parts(a);
    plain_sizes(a);
#ifndef KVPRIM_DEBUG
    claimed_tables(a);
#endif
}

/* Prints how long the test took, and how many kernels kvprim launched in it. */
static void run_timed(const char *name, void (*test)())
{
    static unsigned before_it;
    const auto start = std::chrono::steady_clock::now();
    run(name, test);
    unsigned launches = 0;
    for (const auto &kernel : sampled_launches)
        launches += kernel.second;
    printf("   %.1f s, %u launches\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
           launches - before_it);
    before_it = launches;
    fflush(stdout);
}

#define emulated(name, ...)

/* Each kernel, and each function for kernels of others. */
static void run_sanitize()
{
#define both(name, ...)
#define both_long(name, ...)
#define on_gpu(name, ...)
#define on_gpu_long(name, ...)
#define sampled(name, ...) run_timed("cuda: " name, __VA_ARGS__)
#define on_gpu_sampled sampled
#define only_sampled sampled
#include "test_list.h"
#undef both
#undef on_gpu
#undef sampled
#undef on_gpu_sampled
#undef only_sampled
    sampled_print();
}

static void run_quick()
{
#define both(name, ...) run("cuda: " name, __VA_ARGS__)
#define sampled both
#define on_gpu both
#define on_gpu_sampled both
#define only_sampled(name, ...)
#include "test_list.h"
#undef both
#undef both_long
#undef sampled
#undef on_gpu
#undef on_gpu_sampled
#undef on_gpu_long
}

/* Not under compute-sanitizer, which would report the error that is made here, and take minutes for 2^31 rows. */
static void run_long()
{
#define both(name, ...)
#define sampled(name, ...)
#define on_gpu(name, ...)
#define on_gpu_sampled(name, ...)
#define both_long(name, ...) run("cuda: " name, __VA_ARGS__)
#define on_gpu_long both_long
#include "test_list.h"
}

int main(int argc, char **argv)
{
    sampled_on = argc == 2 && strcmp(argv[1], "sanitize") == 0;
    quick = sampled_on || (argc == 2 && strcmp(argv[1], "quick") == 0);
    if (argc > 2 || (argc == 2 && !quick)) {
        fprintf(stderr, "usage: %s [quick|sanitize]\n", argv[0]);
        return 2;
    }
    if (!find_device())
        return finish();
    thin = quick ? 13 : 1;
    fuzz_rounds = quick ? 300 : 5000;
    most.counts = quick ? 2 << 20 : 60 << 20, most.moves = quick ? 40 : 300;
    most.batches = quick ? 1 << 20 : 8 << 20, most.copies = quick ? 1 << 18 : 4 << 20,
    most.metas = quick ? 1 << 20 : 24 << 20;
    most.meta_step = quick ? 60 : 5, most.random_metas = fuzz_rounds;
    CUDA(cudaStreamCreateWithFlags(&main_launch.stream, cudaStreamNonBlocking));
    open_arena(&memory, size_t(288) << 20, &main_launch);
    sampled_on ? run_sanitize() : run_quick();
    if (!quick) {
        run_long();
        return finish(); /* nothing can be freed after a trap */
    }
    close_arena(&memory);
    CUDA(cudaStreamDestroy(main_launch.stream));
    return finish();
}

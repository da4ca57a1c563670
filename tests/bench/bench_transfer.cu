/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_transfer with the copy engines, and gathers and stores of paged tables with plain ones, on one
   GPU (and, if there are two, to another one). Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_transfer.cu -o build/bench_transfer
       build/bench_transfer [--quick] [--only host|device|peer|paged]

   Rows are random on both sides. Times are of GPU work: launches inside a replayed CUDA graph. Copies that a graph
   cannot hold (batches) or that are many go to a stream one by one while the GPU is kept waiting. Times are medians of
   repetitions in which the contenders take turns. The rows of every transfer are compared with their source before it
   is timed; gathers and stores of paged tables are not. GB/s of a link counts each byte once, GB/s of device memory
   counts it as read and as written. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include <memory>

constexpr int64_t KiB = 1 << 10, MiB = 1 << 20, GiB = 1 << 30;
constexpr int64_t host_bytes = 2 * GiB, device_bytes = 8 * GiB; /* of each of two parts of device memory */
constexpr int64_t copy_bytes = 256 * MiB; /* of the copy that others are compared with; most launches move as much */
constexpr int index_sets_count = 4;

static char *host_memory, *device_memory[2], *peer_memory;
static unsigned long long *wrong_bytes;

__host__ __device__ static uint64_t hash(uint64_t word) /* splitmix64 */
{
    uint64_t z = (word + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- jobs ---- */

/* Lists of `count` distinct random rows out of `rows`. */
struct index_sets {
    int64_t rows, count;
    std::vector<int32_t> host;
    int32_t *device;

    index_sets(int64_t out_of, int64_t in_set, uint64_t seed) : rows(out_of), count(in_set)
    {
        std::vector<int32_t> order(static_cast<size_t>(rows));
        for (size_t i = 0; i < order.size(); i++)
            order[i] = int32_t(i);
        for (int set = 0; set < index_sets_count; set++)
            for (int64_t i = 0; i < count; i++) {
                const uint64_t random = hash(seed << 40 | uint64_t(set) << 32 | uint64_t(i));
                std::swap(order[size_t(i)], order[size_t(i) + random % uint64_t(rows - i)]);
                host.push_back(order[size_t(i)]);
            }
        CUDA(cudaMalloc(&device, host.size() * sizeof host[0]));
        CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof host[0], cudaMemcpyHostToDevice));
    }
    ~index_sets()
    {
        CUDA(cudaFree(device));
    }
    index_sets(const index_sets &) = delete;
    index_sets &operator=(const index_sets &) = delete;
    const int32_t *set(int i) const
    {
        return device + i % index_sets_count * count;
    }
    const int32_t *host_set(int i) const
    {
        return host.data() + i % index_sets_count * count;
    }
};

/* Packed rows of packed layers, random on both sides. */
struct job {
    char *dst, *src;
    int64_t row_bytes;
    int32_t layers;
    const index_sets *to, *from;
};

static int64_t bytes_of(const job &j)
{
    return j.layers * j.to->count * j.row_bytes;
}

/* Moves the first `rows` of the job's rows. */
static void enqueue_job(const job &j, int64_t rows, int32_t max_sms, int i)
{
    kvprim_transfer_desc d = {};
    d.dst.data = j.dst;
    d.dst.rows = j.to->rows;
    d.src.data = j.src;
    d.src.rows = j.from->rows;
    d.layers = j.layers;
    d.row_bytes = j.row_bytes;
    d.dst_index = j.to->set(i);
    d.src_index = j.from->set(i);
    d.index_type = KVPRIM_I32;
    d.count = rows;
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    launch.max_sms = max_sms;
    check_kvprim(kvprim_cuda_transfer(&d, &launch));
}

static char *dst_row(const job &j, int i, int64_t layer, int64_t r)
{
    return j.dst + (layer * j.to->rows + j.to->host_set(i)[r]) * j.row_bytes;
}

static const char *src_row(const job &j, int i, int64_t layer, int64_t r)
{
    return j.src + (layer * j.from->rows + j.from->host_set(i)[r]) * j.row_bytes;
}

/* Copies the first rows, one copy for each. */
static void enqueue_copies(const job &j, int64_t rows, int i)
{
    for (int64_t r = 0; r < rows; r++)
        CUDA(cudaMemcpyAsync(dst_row(j, i, 0, r), src_row(j, i, 0, r), size_t(j.row_bytes), cudaMemcpyDefault, stream));
}

/* What cudaMemcpyBatchAsync needs for the first rows. Made before it is timed. */
struct copy_list {
    std::vector<const void *> src;
    std::vector<void *> dst;
    std::vector<size_t> sizes;
};

static std::vector<copy_list> make_lists(const job &j, int64_t rows)
{
    std::vector<copy_list> lists(index_sets_count);
    for (int i = 0; i < index_sets_count; i++)
        for (int64_t r = 0; r < rows; r++) {
            lists[size_t(i)].dst.push_back(dst_row(j, i, 0, r));
            lists[size_t(i)].src.push_back(src_row(j, i, 0, r));
            lists[size_t(i)].sizes.push_back(size_t(j.row_bytes));
        }
    return lists;
}

#if CUDART_VERSION >= 12080
static void enqueue_batch(copy_list &list)
{
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    CUDA(cudaMemcpyBatchAsync(list.dst.data(), list.src.data(), list.sizes.data(), list.sizes.size(), &attributes,
                              &first, 1, stream));
#else
    size_t failed;
    CUDA(cudaMemcpyBatchAsync(list.dst.data(), const_cast<void **>(list.src.data()), list.sizes.data(),
                              list.sizes.size(), &attributes, &first, 1, &failed, stream));
#endif
}
#else
static void enqueue_batch(copy_list &list)
{
    for (size_t k = 0; k < list.sizes.size(); k++) /* without that call: the next best one */
        CUDA(cudaMemcpyAsync(list.dst[k], list.src[k], list.sizes[k], cudaMemcpyDefault, stream));
}
#endif

/* ---- verification ---- */

__global__ static void compare_rows(const job j, const int32_t *to, const int32_t *from, int64_t to_rows,
                                    int64_t from_rows, int64_t count, unsigned long long *wrong)
{
    const int64_t all = j.layers * count;
    for (int64_t n = blockIdx.x; n < all; n += gridDim.x) {
        const int64_t layer = n / count, r = n % count;
        const char *const got = j.dst + (layer * to_rows + to[r]) * j.row_bytes;
        const char *const want = j.src + (layer * from_rows + from[r]) * j.row_bytes;
        for (int64_t b = threadIdx.x; b < j.row_bytes; b += blockDim.x)
            if (got[b] != want[b])
                atomicAdd(wrong, 1ull);
    }
}

/* Checks the first `count` rows of every layer. */
static void verify(const char *name, const job &j, int64_t count, int i)
{
    unsigned long long wrong;
    CUDA(cudaMemsetAsync(wrong_bytes, 0, sizeof *wrong_bytes, stream));
    compare_rows<<<4224, 256, 0, stream>>>(j, j.to->set(i), j.from->set(i), j.to->rows, j.from->rows, count,
                                           wrong_bytes);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(&wrong, wrong_bytes, sizeof wrong, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    if (wrong == 0)
        return;
    printf("FAIL %s, rows of %lld B: %llu of %lld bytes are wrong\n", name, (long long)j.row_bytes, wrong,
           (long long)(j.layers * count * j.row_bytes));
    exit(1);
}

/* ---- contenders ---- */

/* `rows`: how many of the job's rows. */
static contender contend(const char *name, const job &j, int64_t rows, const std::function<void(int)> &enqueue)
{
    contender c = {};
    c.name = name;
    c.bytes_moved = double(j.layers * rows * j.row_bytes);
    c.enqueue = enqueue;
    c.poison = [j](int) { CUDA(cudaMemsetAsync(j.dst, 0xee, size_t(j.layers * j.to->rows * j.row_bytes), stream)); };
    c.verify = [name, j, rows](int i) { verify(name, j, rows, i); };
    c.launches = 4;
    return c;
}

static contender contend_kvprim(const job &j, int32_t max_sms)
{
    return contend("kvprim", j, j.to->count, [j, max_sms](int i) { enqueue_job(j, j.to->count, max_sms, i); });
}

/* Uses a stream, as whatever waits for it does. */
static contender contend_once(const char *name, const job &j, int64_t rows, const std::function<void(int)> &enqueue)
{
    contender c = contend(name, j, rows, enqueue);
    c.launches = 1;
    c.plain = true;
    return c;
}

static contender contend_copy(char *dst, const char *src, bool plain)
{
    contender c = {};
    c.name = "copy";
    c.bytes_moved = double(copy_bytes);
    c.enqueue = [dst, src](int) { CUDA(cudaMemcpyAsync(dst, src, size_t(copy_bytes), cudaMemcpyDefault, stream)); };
    c.launches = 4;
    c.plain = plain;
    return c;
}

/* ---- pinned host memory ---- */

static const int32_t sm_counts[] = {4, 8, 16, 0};
static std::vector<figure> host_large, host_batch;

/* Times both from the call to the end of its work, including the host's time. Returns the first's time divided by the
   second's. */
static double called_ratio(const std::function<void(int)> &first, const std::function<void(int)> &second)
{
    std::vector<double> us[2];
    for (int r = 0; r < 18; r++) {
        CUDA(cudaStreamSynchronize(stream));
        const double begin = now_us();
        (r % 2 ? second : first)(r / 2);
        CUDA(cudaStreamSynchronize(stream));
        us[r % 2].push_back(now_us() - begin);
    }
    return median(us[0]) / median(us[1]);
}

static std::string size_name(int64_t bytes)
{
    return bytes % KiB ? std::to_string(bytes) + " B" : std::to_string(bytes / KiB) + " KB";
}

static void host_point(bool out, int64_t row_bytes)
{
    const int64_t rows = copy_bytes / row_bytes, batch_rows = std::min(rows, 64 * MiB / row_bytes);
    const int64_t each_rows = std::min<int64_t>(rows, 2000);
    const index_sets in_host(host_bytes / row_bytes, rows, 1), in_device(host_bytes / row_bytes, rows, 2);
    const job j = out ? job{host_memory, device_memory[0], row_bytes, 1, &in_host, &in_device}
                      : job{device_memory[0], host_memory, row_bytes, 1, &in_device, &in_host};
    std::vector<contender> c;
    for (const int32_t sms : sm_counts)
        c.push_back(contend_kvprim(j, sms));
    c.push_back(contend_copy(j.dst, j.src, false));
    std::vector<copy_list> lists = make_lists(j, batch_rows);
    const auto batch_call = [&](int i) { enqueue_batch(lists[size_t(i % index_sets_count)]); };
    c.push_back(contend_once("batch", j, batch_rows, batch_call));
    c.push_back(contend_once("copies", j, each_rows, [&](int i) { enqueue_copies(j, each_rows, i); }));
    measure(c);
    const double got = gb_per_s(c[1]), copy = gb_per_s(c[4]), batch = gb_per_s(c[5]);
    const double called = called_ratio(batch_call, [&](int i) { enqueue_job(j, batch_rows, 8, i); });
    printf("%8s %8s", out ? "to host" : "to GPU", size_name(row_bytes).c_str());
    for (const contender &k : c)
        printf(" %8.1f", gb_per_s(k));
    printf(" %8.3f %8.2f %8.2f\n", got / copy, got / batch, called);
    const std::string where = std::string(out ? "to host " : "to GPU ") + size_name(row_bytes);
    if (row_bytes >= 4 * KiB)
        host_large.push_back({got / copy, where});
    if (row_bytes == 4 * KiB)
        host_batch.push_back({called, where});
}

static void host()
{
    printf("\npinned host memory: GB/s of kvprim on some SMs, of a copy of 256 MiB, of cudaMemcpyBatchAsync and of a\n"
           "cudaMemcpyAsync for each row; kvprim on 8 SMs against the copy, against the batch, and against the batch "
           "from\n"
           "the call to the end of its work\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "4 SMs", "8 SMs", "16 SMs", "all", "copy", "batch", "each", "/ copy", "/ batch", "called");
    for (const bool out : {false, true})
        for (const int64_t row_bytes : {KiB, 2 * KiB, 4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB})
            if (!quick || row_bytes == 4 * KiB || row_bytes == 64 * KiB)
                host_point(out, row_bytes);
}

/* ---- device memory ---- */

static double device_copy; /* GB/s, read plus written */
static std::vector<figure> device_pages;

static void measure_device_copy()
{
    std::vector<contender> c = {contend_copy(device_memory[1], device_memory[0], false),
                                contend_copy(device_memory[1], device_memory[0], true)};
    c[0].launches = c[1].launches = 24;
    measure(c);
    device_copy = 2 * std::max(gb_per_s(c[0]), gb_per_s(c[1]));
    printf("cudaMemcpyAsync device to device of 256 MiB: %.0f GB/s\n", device_copy);
}

/* Per layer of 64, which have room for 2,048 pages of 16 tokens of 2 KB. */
static void device_point(const char *what, int64_t row_bytes, int64_t pages, int64_t offset)
{
    constexpr int64_t page_bytes = 32 * KiB, table_pages = 2048;
    constexpr int32_t layers = 64;
    const int64_t table_rows = table_pages * page_bytes / row_bytes - (offset > 0),
                  rows = pages * page_bytes / row_bytes;
    const index_sets to(table_rows, rows, 3), from(table_rows, rows, 4);
    const job j = {device_memory[1], device_memory[0] + offset, row_bytes, layers, &to, &from};
    static const int32_t sms[] = {0, 8, 16, 32, 64};
    std::vector<contender> c;
    for (const int32_t n : sms) {
        c.push_back(contend_kvprim(j, n));
        c.back().launches = bytes_of(j) >= 64 * MiB ? 24 : 64;
    }
    measure(c);
    printf("%8s %8s %9.1f %9.2f", what, size_name(row_bytes).c_str(), double(bytes_of(j)) / double(MiB), c[0].us);
    for (const contender &k : c)
        printf(" %8.0f", 2 * gb_per_s(k));
    printf(" %8.3f\n", 2 * gb_per_s(c[0]) / device_copy);
    if (row_bytes == page_bytes && bytes_of(j) >= copy_bytes)
        device_pages.push_back({2 * gb_per_s(c[0]) / device_copy, std::to_string(pages) + " pages"});
}

static void device()
{
    printf("\ndevice memory, 64 layers in one launch: GB/s on all and on some SMs, all against the copy\n"
           "%8s %8s %9s %9s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "MiB", "us", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "/ copy");
    for (const int64_t pages : {1, 8, 64, 128, 256, 512})
        device_point("pages", 32 * KiB, pages, 0);
    for (const int64_t row_bytes : {128, 256, 512, 1024, 2048})
        if (!quick || row_bytes == 2048)
            device_point("tokens", row_bytes, 128, 0);
    for (const int64_t row_bytes : {256, 2048})
        device_point("src + 3", row_bytes, 128, 3);
}

/* ---- another GPU's memory ---- */

static double peer_share = -1;

static void peer()
{
    int devices = 0, can = 0;
    CUDA(cudaGetDeviceCount(&devices));
    if (devices > 1)
        CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        printf("\nanother GPU's memory: none can be accessed\n");
        return;
    }
    CUDA(cudaDeviceEnablePeerAccess(1, 0));
    CUDA(cudaSetDevice(1));
    CUDA(cudaMalloc(&peer_memory, size_t(host_bytes)));
    CUDA(cudaSetDevice(0));
    CUDA(cudaMemcpy(peer_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault));
    printf("\nanother GPU's memory: GB/s on all and on some SMs, of cudaMemcpyPeerAsync of 256 MiB, all against that\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "copy", "/ copy");
    for (const bool from_peer : {false, true})
        for (const int64_t row_bytes : {KiB, 4 * KiB, 32 * KiB}) {
            const int64_t rows = copy_bytes / row_bytes;
            const index_sets to(host_bytes / row_bytes, rows, 5), from(host_bytes / row_bytes, rows, 6);
            char *const dst = from_peer ? device_memory[1] : peer_memory, *const src = from_peer ? peer_memory
                                                                                                 : device_memory[0];
            const job j = {dst, src, row_bytes, 1, &to, &from};
            std::vector<contender> c;
            for (const int32_t n : {0, 8, 16, 32, 64})
                c.push_back(contend_kvprim(j, n));
            c.push_back(contend_copy(j.dst, j.src, true));
            c.back().enqueue = [dst, src, from_peer](int) {
                CUDA(cudaMemcpyPeerAsync(dst, from_peer ? 0 : 1, src, from_peer ? 1 : 0, size_t(copy_bytes), stream));
            };
            measure(c);
            printf("%8s %8s", from_peer ? "from it" : "to it", size_name(row_bytes).c_str());
            for (const contender &k : c)
                printf(" %8.1f", gb_per_s(k));
            const double share = gb_per_s(c[0]) / gb_per_s(c.back());
            printf(" %8.3f\n", share);
            if (!from_peer && row_bytes == 4 * KiB)
                peer_share = share;
        }
    CUDA(cudaFree(peer_memory));
    CUDA(cudaDeviceDisablePeerAccess(1));
}

/* ---- gathers and stores of paged tables ---- */

/* Pages of 16 tokens of 8 heads of 256 bytes. K and V of a page follow each other. */
enum { page_rows = 16, heads = 8, head_bytes = 256, token_bytes = heads * head_bytes };
enum table_kind { PLAIN, NHD, HND };

static kvprim_table cache_table(table_kind kind, char *data, int64_t rows, int v)
{
    const int64_t half_page = page_rows * token_bytes;
    kvprim_table t = {};
    t.data = data + (kind == PLAIN ? v * rows * token_bytes : v * half_page);
    t.rows = rows;
    if (kind == PLAIN)
        return t;
    t.page_rows = page_rows;
    t.page_stride = 2 * half_page;
    if (kind == HND) {
        t.heads = heads;
        t.head_stride = page_rows * head_bytes;
    }
    return t;
}

static contender contend_paged(bool store, table_kind kind, int32_t max_sms, int64_t count, const index_sets &sets)
{
    contender c = {};
    c.name = "paged";
    c.bytes_moved = 2.0 * double(count * token_bytes) * (store ? 2 : 1);
    c.launches = count > 4096 ? 24 : 64;
    c.enqueue = [=, &sets](int i) {
        const int64_t dense = count * token_bytes, at = i % (device_bytes / 2 / dense) * dense;
        kvprim_cuda_launch launch = {};
        launch.stream = stream;
        launch.max_sms = max_sms;
        kvprim_table k = {}, v = {};
        k.data = device_memory[1] + at;
        v.data = device_memory[1] + device_bytes / 2 + at;
        k.rows = v.rows = count;
        if (store) {
            kvprim_store_desc d = {};
            d.k_cache = cache_table(kind, device_memory[0], sets.rows, 0);
            d.v_cache = cache_table(kind, device_memory[0], sets.rows, 1);
            d.k = k;
            d.v = v;
            d.k_bytes = d.v_bytes = token_bytes;
            d.slot = sets.set(i);
            d.slot_type = KVPRIM_I32;
            d.count = count;
            check_kvprim(kvprim_cuda_store(&d, &launch));
        } else {
            kvprim_gather_desc d = {};
            d.dst = k;
            d.src = cache_table(kind, device_memory[0], sets.rows, 0);
            d.row_bytes = token_bytes;
            d.index = sets.set(i);
            d.index_type = KVPRIM_I32;
            d.count = count;
            check_kvprim(kvprim_cuda_gather(&d, &launch));
        }
    };
    return c;
}

static void paged()
{
    printf(
        "\ngathers and stores of 2 KB rows: us of plain tables; and their speed in pages, token-major and head-major,\n"
        "and in plain tables on some SMs, as parts of that\n"
        "%6s %8s %9s %8s %8s %8s %8s %8s %8s\n",
        "", "rows", "us", "GB/s", "NHD", "HND", "8 SMs", "32 SMs", "64 SMs");
    for (const bool store : {false, true})
        for (const int64_t count : {1, 64, 1024, 65536}) {
            const index_sets sets(device_bytes / 2 / token_bytes, count, 7);
            std::vector<contender> c;
            for (const table_kind kind : {PLAIN, NHD, HND})
                c.push_back(contend_paged(store, kind, 0, count, sets));
            for (const int32_t sms : {8, 32, 64})
                c.push_back(contend_paged(store, PLAIN, sms, count, sets));
            measure(c);
            printf("%6s %8lld %9.2f %8.0f", store ? "store" : "gather", (long long)count, c[0].us, gb_per_s(c[0]));
            for (size_t k = 1; k < c.size(); k++)
                printf(" %8.3f", c[0].us / c[k].us);
            printf("\n");
        }
}

/* ---- the machine ---- */

__global__ static void fill(uint64_t *words, uint64_t count)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = hash(i);
}

static void open_machine()
{
    open_gpu(2 * device_bytes + GiB);
    CUDA(cudaMallocHost(&host_memory, size_t(host_bytes)));
    CUDA(cudaMalloc(&wrong_bytes, sizeof *wrong_bytes));
    for (char *&memory : device_memory) {
        CUDA(cudaMalloc(&memory, size_t(device_bytes)));
        fill<<<4096, 256, 0, stream>>>(reinterpret_cast<uint64_t *>(memory), uint64_t(device_bytes) / 8);
        CUDA(cudaGetLastError());
    }
    CUDA(cudaMemcpyAsync(host_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
}

static void close_machine()
{
    CUDA(cudaFree(wrong_bytes));
    CUDA(cudaFreeHost(host_memory));
    for (char *memory : device_memory)
        CUDA(cudaFree(memory));
    close_gpu();
}

static void summary()
{
    judge_worst("pinned host memory on 8 SMs / copy, rows of 4 KB and more", host_large, '>', 0.92);
    judge_worst("host memory, 8 SMs / cudaMemcpyBatchAsync, 4 KB, called", host_batch, '>', 4);
    judge_worst("device memory / copy, pages of 64 layers, 256 MiB and more", device_pages, '>', 0.93);
    if (peer_share >= 0)
        judge("to another GPU / cudaMemcpyPeerAsync, 4 KB", peer_share, '>', 0.85, "");
}

static void open_all()
{
    open_machine();
    measure_device_copy();
}

int main(int argc, char **argv)
{
    const program p = {
        {{"host", host}, {"device", device}, {"peer", peer}, {"paged", paged}}, open_all, summary, close_machine};
    return run_program(argc, argv, p);
}

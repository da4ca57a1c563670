/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_transfer with the copy engines on one GPU (and, if there are two, to another one). Ratios are
   within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_transfer.cu -o build/bench_transfer
       build/bench_transfer [--quick] [--only host|device|peer]

   Rows are random on both sides. Times are of GPU work: launches inside a replayed CUDA graph. Copies that a graph
   cannot hold (batches) or that are many go to a stream one by one while the GPU is kept waiting. Times are medians of
   repetitions in which the contenders take turns. The rows of every transfer are compared with their source before it
   is timed. GB/s of a link counts each byte once, GB/s of device memory counts it as read and as written. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"

constexpr int64_t host_bytes = 2 * GiB, device_bytes = 8 * GiB; /* of each of two parts of device memory */
constexpr int64_t copy_bytes = 256 * MiB; /* of the copy that others are compared with; most launches move as much */
constexpr int sets_count = 4;             /* of indices */

static char *host_memory, *device_memory[2], *peer_memory;

/* ---- jobs ---- */

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
    d.dst = table_at(j.dst, j.to->rows);
    d.src = table_at(j.src, j.from->rows);
    d.layers = j.layers;
    d.row_bytes = j.row_bytes;
    d.dst_index = j.to->set(i);
    d.src_index = j.from->set(i);
    d.index_type = KVPRIM_I32;
    d.count = rows;
    const kvprim_cuda_launch launch = on_stream(false, max_sms);
    check_kvprim(kvprim_cuda_transfer(&d, &launch));
}

/* Returns the copies of the first rows, for each set of indices. */
static std::vector<copy_list> make_lists(const job &j, int64_t rows)
{
    std::vector<copy_list> lists(sets_count);
    for (int i = 0; i < sets_count; i++)
        for (int64_t r = 0; r < rows; r++)
            lists[size_t(i)].add(j.dst + j.to->host_set(i)[r] * j.row_bytes,
                                 j.src + j.from->host_set(i)[r] * j.row_bytes, size_t(j.row_bytes));
    return lists;
}

/* The first `count` rows of every layer. */
struct moved_rows {
    job j;
    int64_t count, to_rows, from_rows;
    const int32_t *to, *from;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t layer = n / count, r = n % count;
        return {j.dst + (layer * to_rows + to[r]) * j.row_bytes, j.src + (layer * from_rows + from[r]) * j.row_bytes,
                j.row_bytes};
    }
};

/* ---- contenders ---- */

/* Moves the first `rows` of the job's rows. `plain`: once, from a stream, as whatever waits for it does. */
static contender contend(const char *name, const job &j, int64_t rows, const std::function<void(int)> &enqueue,
                         bool plain = false)
{
    contender c = {name, enqueue, double(j.layers * rows * j.row_bytes), plain ? 1 : 4, plain};
    check_pieces(c, "rows of " + size_name(j.row_bytes), j.layers * rows, [j, rows](int i) {
        return moved_rows{j, rows, j.to->rows, j.from->rows, j.to->set(i), j.from->set(i)};
    });
    return c;
}

static contender contend_kvprim(const job &j, int32_t max_sms)
{
    return contend("kvprim", j, j.to->count, [j, max_sms](int i) { enqueue_job(j, j.to->count, max_sms, i); });
}

static contender contend_copy(char *dst, const char *src, bool plain)
{
    const auto copy = [=](int) { CUDA(cudaMemcpyAsync(dst, src, size_t(copy_bytes), cudaMemcpyDefault, stream)); };
    return {"copy", copy, double(copy_bytes), 4, plain};
}

/* ---- pinned host memory ---- */

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

static void host_point(bool out, int64_t row_bytes, std::vector<figure> *large, std::vector<figure> *batches)
{
    const int64_t rows = copy_bytes / row_bytes, batch_rows = std::min(rows, 64 * MiB / row_bytes);
    const int64_t each_rows = std::min<int64_t>(rows, 2000);
    const index_sets in_host(host_bytes / row_bytes, rows, sets_count, 1),
        in_device(host_bytes / row_bytes, rows, sets_count, 2);
    const job j = out ? job{host_memory, device_memory[0], row_bytes, 1, &in_host, &in_device}
                      : job{device_memory[0], host_memory, row_bytes, 1, &in_device, &in_host};
    std::vector<contender> c;
    for (const int32_t sms : {4, 8, 16, 0})
        c.push_back(contend_kvprim(j, sms));
    c.push_back(contend_copy(j.dst, j.src, false));
    std::vector<copy_list> lists = make_lists(j, batch_rows), few = make_lists(j, each_rows);
    const auto batch_call = [&](int i) { lists[size_t(i % sets_count)].enqueue(); };
    c.push_back(contend("batch", j, batch_rows, batch_call, true));
    c.push_back(contend(
        "copies", j, each_rows, [&](int i) { few[size_t(i % sets_count)].enqueue_each(); }, true));
    measure(c);
    const double got = gb_per_s(c[1]), copy = gb_per_s(c[4]), batch = gb_per_s(c[5]);
    const double called = called_ratio(batch_call, [&](int i) { enqueue_job(j, batch_rows, 8, i); });
    printf("%8s %8s", out ? "to host" : "to GPU", size_name(row_bytes).c_str());
    for (const contender &k : c)
        printf(" %8.1f", gb_per_s(k));
    printf(" %8.3f %8.2f %8.2f\n", got / copy, got / batch, called);
    const std::string where = std::string(out ? "to host " : "to GPU ") + size_name(row_bytes);
    if (row_bytes >= 4 * KiB)
        large->push_back({got / copy, where});
    if (row_bytes == 4 * KiB)
        batches->push_back({called, where});
}

static void host()
{
    std::vector<figure> large, batches;
    printf("\npinned host memory: GB/s of kvprim on some SMs, of a copy of 256 MiB, of cudaMemcpyBatchAsync and of a\n"
           "cudaMemcpyAsync for each row; kvprim on 8 SMs against the copy, against the batch, and against the batch "
           "from\n"
           "the call to the end of its work\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "4 SMs", "8 SMs", "16 SMs", "all", "copy", "batch", "each", "/ copy", "/ batch", "called");
    for (const bool out : {false, true})
        for (const int64_t row_bytes : {KiB, 2 * KiB, 4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB})
            if (!quick || row_bytes == 4 * KiB || row_bytes == 64 * KiB)
                host_point(out, row_bytes, &large, &batches);
    judge_worst("pinned host memory on 8 SMs / copy, rows of 4 KB and more", large, '>', 0.92);
    judge_worst("host memory, 8 SMs / cudaMemcpyBatchAsync, 4 KB, called", batches, '>', 4);
}

/* ---- device memory ---- */

static double device_copy; /* GB/s, read plus written */

static void measure_device_copy()
{
    std::vector<contender> c = {contend_copy(device_memory[1], device_memory[0], false),
                                contend_copy(device_memory[1], device_memory[0], true)};
    c[0].launches = c[1].launches = 24;
    measure(c);
    device_copy = 2 * std::max(gb_per_s(c[0]), gb_per_s(c[1]));
    printf("cudaMemcpyAsync device to device of 256 MiB: %.0f GB/s\n", device_copy);
}

/* Per layer of 64, which have room for 2,048 pages of 16 tokens of 2 KB. Returns the part of the copy's speed. */
static double device_point(const char *what, int64_t row_bytes, int64_t pages, int64_t offset)
{
    constexpr int64_t page_bytes = 32 * KiB, table_pages = 2048;
    constexpr int32_t layers = 64;
    const int64_t table_rows = table_pages * page_bytes / row_bytes - (offset > 0),
                  rows = pages * page_bytes / row_bytes;
    const index_sets to(table_rows, rows, sets_count, 3), from(table_rows, rows, sets_count, 4);
    const job j = {device_memory[1], device_memory[0] + offset, row_bytes, layers, &to, &from};
    std::vector<contender> c;
    for (const int32_t n : {0, 8, 16, 32, 64}) {
        c.push_back(contend_kvprim(j, n));
        c.back().launches = bytes_of(j) >= 64 * MiB ? 24 : 64;
    }
    measure(c);
    printf("%8s %8s %9.1f %9.2f", what, size_name(row_bytes).c_str(), double(bytes_of(j)) / double(MiB), c[0].us);
    for (const contender &k : c)
        printf(" %8.0f", 2 * gb_per_s(k));
    printf(" %8.3f\n", 2 * gb_per_s(c[0]) / device_copy);
    return 2 * gb_per_s(c[0]) / device_copy;
}

static void device()
{
    std::vector<figure> large;
    printf("\ndevice memory, 64 layers in one launch: GB/s on all and on some SMs, all against the copy\n"
           "%8s %8s %9s %9s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "MiB", "us", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "/ copy");
    for (const int64_t pages : {1, 8, 64, 128, 256, 512}) {
        const double part = device_point("pages", 32 * KiB, pages, 0);
        if (pages >= 128) /* 256 MiB in all layers */
            large.push_back({part, std::to_string(pages) + " pages"});
    }
    for (const int64_t row_bytes : {128, 256, 512, 1024, 2048})
        if (!quick || row_bytes == 2048)
            device_point("tokens", row_bytes, 128, 0);
    for (const int64_t row_bytes : {256, 2048})
        device_point("src + 3", row_bytes, 128, 3);
    judge_worst("device memory / copy, pages of 64 layers, 256 MiB and more", large, '>', 0.93);
}

/* ---- another GPU's memory ---- */

/* Returns the part of the copy's speed. */
static double peer_point(bool from_peer, int64_t row_bytes)
{
    const int64_t rows = copy_bytes / row_bytes;
    const index_sets to(host_bytes / row_bytes, rows, sets_count, 5), from(host_bytes / row_bytes, rows, sets_count, 6);
    char *const dst = from_peer ? device_memory[1] : peer_memory, *const src =
                                                                      from_peer ? peer_memory : device_memory[0];
    const job j = {dst, src, row_bytes, 1, &to, &from};
    std::vector<contender> c;
    for (const int32_t n : {0, 8, 16, 32, 64})
        c.push_back(contend_kvprim(j, n));
    c.push_back(contend_copy(dst, src, true));
    c.back().enqueue = [=](int) {
        CUDA(cudaMemcpyPeerAsync(dst, from_peer ? 0 : 1, src, from_peer ? 1 : 0, size_t(copy_bytes), stream));
    };
    measure(c);
    printf("%8s %8s", from_peer ? "from it" : "to it", size_name(row_bytes).c_str());
    for (const contender &k : c)
        printf(" %8.1f", gb_per_s(k));
    printf(" %8.3f\n", gb_per_s(c[0]) / gb_per_s(c.back()));
    return gb_per_s(c[0]) / gb_per_s(c.back());
}

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
    CUDA(cudaMemcpyAsync(peer_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault, stream));
    printf("\nanother GPU's memory: GB/s on all and on some SMs, of cudaMemcpyPeerAsync of 256 MiB, all against that\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "copy", "/ copy");
    for (const bool from_peer : {false, true})
        for (const int64_t row_bytes : {KiB, 4 * KiB, 32 * KiB}) {
            const double part = peer_point(from_peer, row_bytes);
            if (!from_peer && row_bytes == 4 * KiB)
                judge("to another GPU / cudaMemcpyPeerAsync, 4 KB", part, '>', 0.85);
        }
    CUDA(cudaFree(peer_memory));
    CUDA(cudaDeviceDisablePeerAccess(1));
}

/* ---- the program ---- */

static void open_all()
{
    open_gpu(2 * device_bytes + GiB);
    CUDA(cudaMallocHost(&host_memory, size_t(host_bytes)));
    for (char *&memory : device_memory)
        memory = allocate_hashed(device_bytes);
    CUDA(cudaMemcpy(host_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault));
    measure_device_copy();
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all, {{"host", host}, {"device", device}, {"peer", peer}});
}

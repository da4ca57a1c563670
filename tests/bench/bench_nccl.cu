/* SPDX-License-Identifier: MIT */
/* Compares kvprim_nccl.h with NCCL on ordinary memory, on a symmetric window, and copied into a window and out again. A
   thread per GPU, all GPUs of the machine; times are per call, inside a replayed CUDA graph.

       nvcc -arch=native -std=c++17 -O3 tests/bench/bench_nccl.cu -o build/bench_nccl -lnccl
       NCCL_NVLS_ENABLE=0 build/bench_nccl [quick | tune]

   With -DBENCH_CUBLAS and -lcublas it also measures how much a sum that waits for a rank slows down a matrix product on
   another stream. `quick` takes fewer repetitions; `tune` measures the ways of summing one by one. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#include "bench_gpu.h"
#include <array>
#include <atomic>
#include <condition_variable>
#include <ctime>
#include <map>
#include <mutex>
#include <thread>
#ifdef BENCH_CUBLAS
#include <cublas_v2.h>
#endif

#define NCCL(call) check_nccl(call, #call, __LINE__)

static void check_nccl(ncclResult_t result, const char *call, int line)
{
    if (result == ncclSuccess)
        return;
    fprintf(stderr, "line %d: %s: %s\n", line, call, ncclGetErrorString(result));
    exit(2);
}

static int world;
static const size_t most_bytes = 64 * MiB;

struct rank_state {
    int rank;
    kvprim_comm comm, wide; /* wide: may use all multiprocessors */
    ncclComm_t nccl;        /* separate: what is registered with comm does not help it */
    cudaStream_t stream;
    cudaEvent_t start, end, spinning, blocking; /* the last two: to wait for */
    char *x, *y, *window;                       /* most_bytes each, the window twice that */
};
static std::vector<rank_state> ranks;

static void meet()
{
    static std::mutex mutex;
    static std::condition_variable changed;
    static int here;
    static uint64_t times;
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t now = times;
    if (++here == world) {
        here = 0, times++;
        changed.notify_all();
    } else {
        changed.wait(lock, [now] { return times != now; });
    }
}

/* The same for ranks that must go on together: a thread that sleeps takes up to 50 us to wake up. */
static void meet_spinning()
{
    static std::atomic<uint64_t> arrivals(0);
    const uint64_t mine = arrivals++, all = uint64_t(world);
    while (arrivals.load() < (mine / all + 1) * all)
        continue;
}

static void on_all(const std::function<void(rank_state &)> &body)
{
    std::vector<std::thread> threads;
    for (int r = 0; r < world; r++)
        threads.emplace_back([&body, r] {
            CUDA(cudaSetDevice(r));
            body(ranks[size_t(r)]);
        });
    for (std::thread &t : threads)
        t.join();
}

/* Whether each GPU can write to the next one's memory. */
static bool open_links()
{
    for (int r = 0; r < world; r++) {
        int can = 0;
        CUDA(cudaDeviceCanAccessPeer(&can, r, (r + 1) % world));
        if (!can)
            return false;
    }
    for (int r = 0; r < world; r++) {
        CUDA(cudaSetDevice(r));
        const cudaError_t error = cudaDeviceEnablePeerAccess((r + 1) % world, 0);
        if (error != cudaErrorPeerAccessAlreadyEnabled)
            CUDA(error);
        (void)cudaGetLastError();
    }
    return true;
}

static void open_rank(rank_state &r)
{
    static kvprim_comm_id id, wide_id;
    static ncclUniqueId nccl_id;
    kvprim_comm_desc desc = {};
    if (r.rank == 0) {
        check_kvprim(kvprim_comm_new_id(&id));
        check_kvprim(kvprim_comm_new_id(&wide_id));
        NCCL(ncclGetUniqueId(&nccl_id));
    }
    meet();
    desc.rank = r.rank, desc.world = world, desc.id = id, desc.buffer_bytes = 2 * most_bytes;
    desc.nccl_window = 1; /* for NCCL's way with a window */
    check_kvprim(kvprim_comm_init(&r.comm, &desc));
    desc.id = wide_id, desc.buffer_bytes = 0, desc.nccl_window = 0, desc.max_sms = 1000;
    check_kvprim(kvprim_comm_init(&r.wide, &desc));
    NCCL(ncclCommInitRank(&r.nccl, world, nccl_id, r.rank));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&r.start));
    CUDA(cudaEventCreate(&r.end));
    CUDA(cudaSetDeviceFlags(cudaDeviceScheduleSpin)); /* what a wait does for an event that says nothing else */
    CUDA(cudaEventCreateWithFlags(&r.spinning, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&r.blocking, cudaEventDisableTiming | cudaEventBlockingSync));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.x), most_bytes));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.y), most_bytes));
    r.window = static_cast<char *>(kvprim_comm_buffer(&r.comm, nullptr));
    std::vector<uint16_t> host(most_bytes / 2); /* small integers as bf16, so that sums are exact */
    for (size_t i = 0; i < host.size(); i++) {
        const float f = float((i * 2654435761u >> 13) % 61 + size_t(r.rank) * 3) - 40;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        host[i] = uint16_t(bits >> 16);
    }
    CUDA(cudaMemcpy(r.x, host.data(), most_bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(r.window, host.data(), most_bytes, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    if (r.rank == 0)
        printf("%s\n", kvprim_comm_describe(&r.comm));
}

static void close_rank(rank_state &r)
{
    CUDA(cudaFree(r.x));
    CUDA(cudaFree(r.y));
    NCCL(ncclCommDestroy(r.nccl));
    check_kvprim(kvprim_comm_destroy(&r.comm));
    check_kvprim(kvprim_comm_destroy(&r.wide));
}

/* ---- collectives ----

   `bytes` are those of the whole tensor: what every rank gives to an all_reduce or a reduce_scatter, and gets from an
   all_reduce or an all_gather. to_next is none: each rank writes them to the next one's memory, which shows what the
   links carry if both directions are busy. */

enum collective { all_reduce, all_reduce_int32, all_gather, reduce_scatter, to_next };

/* NCCL: from x to y; from one half of its window to the other; from x to y with copies into the window and out of it.
   kvprim: from x to y; from one half of its buffer to the other; on all multiprocessors; by its ways one by one.
   to_next, from x to the next rank's y: by a kernel that only pushes words of 16 bytes; by the copy engine. */
enum way {
    by_nccl,
    by_window,
    by_wrapper,
    by_kvprim,
    in_buffer,
    by_all_sms,
    by_one_shot,
    by_two_shot,
    by_push,
    by_copy,
    ways
};

/* Four words on their way per thread. Eight are no faster, nor are other stores (relaxed, streaming), nor more than 66
   blocks (H200). */
static __global__ void __launch_bounds__(512) push_words(uint4 *dst, const uint4 *src, size_t words)
{
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {
        const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
        dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
    }
    for (; i < words; i += step)
        dst[i] = src[i];
}

static void enqueue_to_next(rank_state &r, way how, size_t bytes)
{
    char *const to = ranks[size_t((r.rank + 1) % world)].y;
    const size_t blocks = std::min(size_t(132), (bytes / 16 + 511) / 512);
    if (how == by_copy)
        return CUDA(cudaMemcpyAsync(to, r.x, bytes, cudaMemcpyDefault, r.stream));
    push_words<<<unsigned(blocks), 512, 0, r.stream>>>(reinterpret_cast<uint4 *>(to), reinterpret_cast<uint4 *>(r.x),
                                                       bytes / 16);
    CUDA(cudaGetLastError());
}

static size_t result_bytes(collective what, size_t bytes)
{
    const size_t part = bytes / size_t(world);
    return what == all_gather ? part * size_t(world) : what == reduce_scatter ? part : bytes;
}

static void enqueue_nccl(collective what, rank_state &r, ncclComm_t comm, const void *from, void *to, size_t bytes)
{
    const size_t part = bytes / size_t(world);
    switch (what) {
    case all_reduce:
        return NCCL(ncclAllReduce(from, to, bytes / 2, ncclBfloat16, ncclSum, comm, r.stream));
    case all_reduce_int32:
        return NCCL(ncclAllReduce(from, to, bytes / 4, ncclInt32, ncclSum, comm, r.stream));
    case all_gather:
        return NCCL(ncclAllGather(from, to, part, ncclUint8, comm, r.stream));
    case reduce_scatter:
        return NCCL(ncclReduceScatter(from, to, part / 2, ncclBfloat16, ncclSum, comm, r.stream));
    case to_next:
        break;
    }
}

static void enqueue_kvprim(collective what, rank_state &r, kvprim_comm *comm, const void *from, void *to, size_t bytes)
{
    const size_t part = bytes / size_t(world);
    switch (what) {
    case all_reduce:
        return check_kvprim(kvprim_all_reduce(comm, to, from, bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream));
    case all_reduce_int32:
        return check_kvprim(kvprim_all_reduce(comm, to, from, bytes / 4, KVPRIM_INT32, KVPRIM_SUM, r.stream));
    case all_gather:
        return check_kvprim(kvprim_all_gather(comm, to, from, part, KVPRIM_U8, r.stream));
    case reduce_scatter:
        return check_kvprim(kvprim_reduce_scatter(comm, to, from, part / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream));
    case to_next:
        break;
    }
}

static void enqueue_forced(rank_state &r, kvpn_way how, size_t bytes)
{
    kvpn_call c =
        kvpn_make_call(kvpn_all_reduce, "tune", &r.comm, r.y, r.x, bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream);
    c.element = 2;
    check_kvprim(kvpn_launch_chunks(&c, how));
}

static void enqueue(collective what, way how, rank_state &r, size_t bytes)
{
    char *const half = r.window + most_bytes;
    switch (how) {
    case by_nccl:
        return enqueue_nccl(what, r, r.nccl, r.x, r.y, bytes);
    case by_window:
        return enqueue_nccl(what, r, r.comm.nccl, r.window, half, bytes);
    case by_wrapper:
        CUDA(cudaMemcpyAsync(half, r.x, bytes, cudaMemcpyDeviceToDevice, r.stream));
        enqueue_nccl(what, r, r.comm.nccl, half, half, bytes);
        return CUDA(cudaMemcpyAsync(r.y, half, bytes, cudaMemcpyDeviceToDevice, r.stream));
    case by_kvprim:
        return enqueue_kvprim(what, r, &r.comm, r.x, r.y, bytes);
    case in_buffer:
        return enqueue_kvprim(what, r, &r.comm, r.window, half, bytes);
    case by_all_sms:
        return enqueue_kvprim(what, r, &r.wide, r.x, r.y, bytes);
    case by_push:
    case by_copy:
        return enqueue_to_next(r, how, bytes);
    default:
        return enqueue_forced(r, how == by_one_shot ? kvpn_by_one_shot : kvpn_by_two_shot, bytes);
    }
}

/* ---- timing ----

   As in bench_gpu.h, on all GPUs at once. A small NCCL call first makes them begin together. The slowest one counts. */

/* Enqueues the call, compares its result with the one expected, and returns a graph of `launches` of it. */
static cudaGraphExec_t prepare(rank_state &r, collective what, way how, size_t bytes, int launches,
                               std::vector<char> &expected)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    std::vector<char> got(result_bytes(what, bytes));
    const char *const result = how == by_window || how == in_buffer ? r.window + most_bytes : r.y;
    CUDA(cudaMemsetAsync(r.y, 0xee, got.size(), r.stream));
    CUDA(cudaMemsetAsync(r.window + most_bytes, 0xee, got.size(), r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet(); /* to_next writes to memory that the other rank has just set */
    enqueue(what, how, r, bytes);
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    CUDA(cudaMemcpyAsync(got.data(), result, got.size(), cudaMemcpyDeviceToHost, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    if (expected.empty())
        expected = got;
    if (got != expected) {
        fprintf(stderr, "rank %d: way %d of collective %d, %zu bytes: not the result of the first way\n", r.rank, how,
                what, bytes);
        exit(2);
    }
    meet();
    CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; i++)
        enqueue(what, how, r, bytes);
    CUDA(cudaStreamEndCapture(r.stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaGraphLaunch(executable, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    return executable;
}

/* Returns the milliseconds of what `body` enqueues. */
template <class function> static double time_ms(rank_state &r, cudaStream_t on, function body)
{
    float ms;
    CUDA(cudaEventRecord(r.start, on));
    body();
    CUDA(cudaEventRecord(r.end, on));
    CUDA(cudaStreamSynchronize(on));
    CUDA(cudaEventElapsedTime(&ms, r.start, r.end));
    return double(ms);
}

/* Returns the milliseconds of the graph on the slowest GPU. */
static double time_once(rank_state &r, cudaGraphExec_t graph)
{
    static double ms[8];
    meet();
    spin<<<1, 1, 0, r.stream>>>(300000);
    NCCL(ncclAllReduce(r.x, r.y, 1, ncclBfloat16, ncclSum, r.nccl, r.stream));
    ms[r.rank] = time_ms(r, r.stream, [&] { CUDA(cudaGraphLaunch(graph, r.stream)); });
    meet();
    const double slowest = *std::max_element(ms, ms + world);
    meet();
    return slowest;
}

/* Returns the microseconds of a call by each of these ways. */
static std::array<double, ways> measure(collective what, size_t bytes, const std::vector<way> &list)
{
    const int launches = bytes <= 1 << 20 ? 50 : 10, repetitions = quick ? 3 : 9;
    std::array<double, ways> us = {};
    on_all([&](rank_state &r) {
        cudaGraphExec_t graphs[ways];
        std::vector<double> times[ways];
        std::vector<char> expected;
        for (const way how : list)
            graphs[how] = prepare(r, what, how, bytes, launches, expected);
        for (int k = 0; k < repetitions; k++)
            for (size_t j = 0; j < list.size(); j++) {
                const way how = list[k % 2 ? list.size() - 1 - j : j];
                times[how].push_back(1000 * time_once(r, graphs[how]) / launches);
            }
        for (const way how : list) {
            if (r.rank == 0)
                us[how] = median(times[how]);
            CUDA(cudaGraphExecDestroy(graphs[how]));
        }
    });
    return us;
}

/* ---- tables ---- */

/* Prints a row for each size from 2 KB on: what `row` returns, after the size's name. */
static void for_sizes(const std::function<void(size_t bytes, const std::string &name)> &row)
{
    for (size_t bytes = 2 << 10; bytes <= most_bytes; bytes *= 2) {
        printf("%8s", size_name(int64_t(bytes)).c_str());
        row(bytes, size_name(int64_t(bytes)));
        fflush(stdout);
    }
}

static double raw_target(size_t bytes)
{
    const bool two = world == 2;
    return bytes <= 8 << 10     ? 0.62
           : bytes <= 16 << 10  ? (two ? 0.62 : 0.67)
           : bytes <= 128 << 10 ? (two ? 0.48 : 0.52)
           : bytes <= 256 << 10 ? (two ? 0.52 : 0.65)
           : bytes <= 1 << 20   ? (two ? 0.68 : 0.75)
           : bytes <= 8 << 20   ? (two ? 0.75 : 0.87)
                                : 1.02;
}

static double wrapper_target(size_t bytes)
{
    return bytes <= 128 << 10 ? 0.45 : bytes <= 1 << 20 ? 0.60 : 0.82;
}

/* What each rank sends, and receives, in an all_reduce of `bytes` at least. */
static double bus_bytes(size_t bytes)
{
    return 2.0 * double(bytes) * (world - 1) / world;
}

/* Microseconds for these bytes, by a kernel and by the copy engine. */
struct link_time {
    double push_us, copy_us;
};
static std::map<size_t, link_time> link_times; /* by an all_reduce's bytes; empty if the GPUs are not linked */

static void bench_link()
{
    printf("\neach GPU writes the bytes of an all_reduce to the next one, all at once, us; the faster way is the "
           "link's 100 %%\n%8s %8s %11s   %s\n",
           "", "kernel", "copy engine", "GB/s each way, of the faster one");
    for_sizes([](size_t bytes, const std::string &) {
        const auto us = measure(to_next, bytes, {by_push, by_copy});
        const double share = bus_bytes(bytes) / double(bytes);
        link_times[bytes] = {share * us[by_push], share * us[by_copy]};
        printf(" %8.2f %11.2f   %.0f\n", share * us[by_push], share * us[by_copy],
               1e-3 * double(bytes) / std::min(us[by_push], us[by_copy]));
    });
}

/* Returns 100 if kvprim takes as long as the link for as many bytes, or "-". */
static std::string percent_of_link(size_t bytes, double us)
{
    const auto link = link_times.find(bytes);
    if (link == link_times.end())
        return "-";
    return std::to_string(std::lround(100 * std::min(link->second.push_us, link->second.copy_us) / us));
}

/* A figure of the documents that the project began with, beside ours. Lines that begin with a bracket are no rows. */
static void print_document(size_t bytes, double us)
{
    const double datasheet = 450, kb = 1e-3 * bus_bytes(bytes); /* GB/s each way of an H100 or H200; kb / us: GB/s */
    const auto link = link_times.find(bytes);
    if (bytes != size_t(8 * MiB) || world != 2 || link == link_times.end())
        return;
    const double push_us = link->second.push_us, copy_us = link->second.copy_us;
    printf("(8 MB: the document says 20-25 us and 60-70 %% of NVLink; 20-25 us are %.0f-%.0f %% of an H200's %.0f "
           "GB/s. Here "
           "%.2f us, %.0f GB/s, %.0f %%)\n",
           100 * kb / 25 / datasheet, 100 * kb / 20 / datasheet, datasheet, us, kb / us, 100 * kb / us / datasheet);
    printf(
        "(the link takes %.2f us for these bytes by a kernel that only pushes them, %.2f by the copy engine: 20 us is "
        "%s what it carries)\n",
        push_us, copy_us, std::min(push_us, copy_us) > 20 ? "below" : "within");
}

static void bench_all_reduce()
{
    struct ratio {
        std::string name;
        double value, target;
    };
    std::vector<ratio> to_raw, to_wrapper;
    std::map<size_t, double> ours_us;
    printf("\nall_reduce, bf16 sum, us\n%8s %8s %8s %8s %8s %9s   %-9s %-9s %-10s %s\n", "", "NCCL", "window",
           "wrapper", "kvprim", "in buffer", "to raw", "wrapper", "GB/s (bus)", "% of link");
    for_sizes([&](size_t bytes, const std::string &name) {
        const auto us = measure(all_reduce, bytes, {by_nccl, by_window, by_wrapper, by_kvprim, in_buffer});
        const double ours = us[by_kvprim], raw = ours / std::min(us[by_nccl], us[by_window]);
        ours_us[bytes] = ours;
        to_raw.push_back({name + " to raw", raw, raw_target(bytes)});
        to_wrapper.push_back({name + " to the wrapper", ours / us[by_wrapper], wrapper_target(bytes)});
        printf(" %8.2f %8.2f %8.2f %8.2f %9.2f   %-9.3f %-9.3f %-10.0f %s\n", us[by_nccl], us[by_window],
               us[by_wrapper], ours, us[in_buffer], raw, ours / us[by_wrapper], 1e-3 * bus_bytes(bytes) / ours,
               percent_of_link(bytes, ours).c_str());
    });
    for (const auto &one : ours_us)
        print_document(one.first, one.second);
    for (const auto *const ratios : {&to_raw, &to_wrapper})
        for (const ratio &r : *ratios)
            judge("all_reduce of " + r.name, r.value, '<', r.target);
}

static void bench_parts(collective what)
{
    const bool gather = what == all_gather;
    const std::string name = gather ? "all_gather" : "reduce_scatter";
    std::vector<figure> small, large;
    printf("\n%s\n%8s %8s %8s %8s %9s   %-9s %s\n",
           gather ? "all_gather, us, by bytes of the result"
                  : "reduce_scatter, bf16 sum, us, by bytes that each rank gives",
           "", "NCCL", "window", "kvprim", "in buffer", "to NCCL", "to raw");
    for_sizes([&](size_t bytes, const std::string &where) {
        const auto us = measure(what, bytes, {by_nccl, by_window, by_kvprim, in_buffer});
        const double ours = us[by_kvprim], raw = std::min(us[by_nccl], us[by_window]);
        printf(" %8.2f %8.2f %8.2f %9.2f   %-9.3f %.3f\n", us[by_nccl], us[by_window], ours, us[in_buffer],
               ours / us[by_nccl], ours / raw);
        if (bytes <= (gather ? 256 : 128) << 10)
            small.push_back({ours / (gather ? us[by_nccl] : raw), where});
        large.push_back({std::min(ours, us[in_buffer]) / raw, where});
    });
    judge_worst(name + (gather ? " to ordinary-memory NCCL, up to 256 KB" : " to raw, up to 128 KB"), small, '<',
                gather ? 0.60 : 0.62);
    judge_worst(name + " to raw, from its buffer if that is faster", large, '<', 1.02);
}

/* Launches one call after the other, while the last rank begins a millisecond late. A rank that has waited must not be
   late in turn. Returns the time per call of the last rank. */
static double time_behind(rank_state &r, way how, size_t bytes, int calls)
{
    meet();
    if (r.rank == world - 1)
        spin<<<1, 1, 0, r.stream>>>(1000000);
    return 1000.0 / calls * time_ms(r, r.stream, [&] {
               for (int i = 0; i < calls; i++)
                   enqueue(all_reduce, how, r, bytes);
           });
}

static void bench_late()
{
    std::vector<figure> ratios;
    printf("\nall_reduce, launched one by one behind a late rank, us\n%8s %8s %8s\n", "", "NCCL", "kvprim");
    for (const int64_t bytes : {2 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB}) {
        std::vector<double> nccl, own;
        on_all([&](rank_state &r) {
            for (int k = 0; k < (quick ? 3 : 9); k++) {
                const double of_nccl = time_behind(r, by_nccl, size_t(bytes), 50),
                             of_own = time_behind(r, by_kvprim, size_t(bytes), 50);
                if (r.rank == world - 1)
                    nccl.push_back(of_nccl), own.push_back(of_own);
            }
        });
        printf("%8s %8.2f %8.2f\n", size_name(bytes).c_str(), median(nccl), median(own));
        fflush(stdout);
        ratios.push_back({median(own) / median(nccl), size_name(bytes)});
    }
    /* on 8 GPUs, 16 MB go through NCCL */
    judge_worst("all_reduce behind a late rank to NCCL", ratios, '<', 1.02);
}

/* ---- how many multiprocessors ---- */

/* What it costs to leave half of the multiprocessors to others when no rank is late. */
static void bench_halves()
{
    std::vector<figure> ratios;
    printf("\nall_reduce by multiprocessors, us\n%8s %8s %8s   %s\n", "", "default", "all", "default to all");
    for_sizes([&](size_t bytes, const std::string &name) {
        const auto us = measure(all_reduce, bytes, {by_kvprim, by_all_sms});
        ratios.push_back({us[by_kvprim] / us[by_all_sms], name});
        printf(" %8.2f %8.2f   %.3f\n", us[by_kvprim], us[by_all_sms], ratios.back().value);
    });
    judge_worst("all_reduce on the default multiprocessors to all", ratios, '<', 1.08);
}

#ifdef BENCH_CUBLAS
enum { product_size = 4096, products = 4 };

struct product {
    cublasHandle_t handle;
    cudaStream_t stream;
    void *a, *b, *c;
};

static product open_product(rank_state &r)
{
    const size_t bytes = size_t(product_size) * product_size * 2;
    product p = {};
    if (cublasCreate(&p.handle) != CUBLAS_STATUS_SUCCESS) {
        fprintf(stderr, "no cuBLAS\n");
        exit(2);
    }
    CUDA(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    cublasSetStream(p.handle, p.stream);
    for (void **m : {&p.a, &p.b, &p.c}) {
        CUDA(cudaMalloc(m, bytes));
        CUDA(cudaMemcpyAsync(*m, r.x, bytes, cudaMemcpyDeviceToDevice, p.stream));
    }
    return p;
}

static void close_product(product &p)
{
    cublasDestroy(p.handle);
    CUDA(cudaStreamDestroy(p.stream));
    for (void *m : {p.a, p.b, p.c})
        CUDA(cudaFree(m));
}

static double time_products(rank_state &r, product &p)
{
    const float one = 1, zero = 0;
    const int n = product_size;
    return time_ms(r, p.stream, [&] {
        for (int i = 0; i < products; i++)
            cublasGemmEx(p.handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, p.a, CUDA_R_16BF, n, p.b, CUDA_R_16BF, n,
                         &zero, p.c, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
}

/* How many times longer products take on rank 0 while a sum there waits for the last rank. That rank comes after they
   end: 45 ms is 25 times what they take alone. */
static double product_beside(rank_state &r, product &p, way how, size_t bytes)
{
    double alone = 0, beside = 0;
    meet();
    if (r.rank == 0)
        alone = time_products(r, p);
    meet();
    if (r.rank == world - 1)
        spin<<<1, 1, 0, r.stream>>>(45000000);
    enqueue(all_reduce, how, r, bytes);
    if (r.rank == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2)); /* the sum is on the GPU, and waits */
        beside = time_products(r, p);
    }
    CUDA(cudaStreamSynchronize(r.stream));
    return alone > 0 ? beside / alone : 0;
}

static void bench_beside()
{
    static const way list[] = {by_nccl, by_kvprim, by_all_sms};
    std::vector<figure> figures;
    printf("\na product of %d^3, bf16, beside an all_reduce that waits: its time to that alone\n%8s %8s %8s %8s\n",
           product_size, "", "NCCL", "kvprim", "all");
    for_sizes([&](size_t bytes, const std::string &name) {
        std::vector<double> ratios[ways];
        on_all([&](rank_state &r) {
            product p = open_product(r);
            (void)time_products(r, p);
            for (int k = 0; k < 3; k++)
                for (const way how : list) {
                    const double ratio = product_beside(r, p, how, bytes);
                    if (r.rank == 0)
                        ratios[how].push_back(ratio);
                }
            close_product(p);
        });
        for (const way how : list)
            printf(" %8.2f", median(ratios[how]));
        printf("\n");
        figures.push_back({median(ratios[by_kvprim]), name});
    });
    judge_worst("a product beside an all_reduce that waits, to alone", figures, '<', 2.2);
}
#endif

/* The memset before NCCL's symmetric kernels, for versions that start them too early. */
static void bench_before_nccl()
{
    const auto us = measure(all_reduce_int32, size_t(64 * KiB), {by_window, in_buffer});
    printf("\nall_reduce of 64 KB of int32 in NCCL's window, us: NCCL alone %.2f, with what goes before it %.2f\n",
           us[by_window], us[in_buffer]);
}

/* Microseconds that a call takes on the host. No call blocks, because a stream holds more than these. */
template <class function> static double host_us(rank_state &r, function call)
{
    enum { calls = 200 };
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    const double begun = now_us();
    for (int i = 0; i < calls; i++)
        call();
    return (now_us() - begun) / calls;
}

/* In turns, because a host's speed changes. The median of the turns' differences counts. */
static void bench_host()
{
    static const collective list[] = {all_reduce, all_reduce_int32}; /* of 4,096 elements */
    static const size_t sizes[] = {8192, 16384};
    std::vector<double> nccl[2], own[2], above[2];
    on_all([&](rank_state &r) {
        for (int turn = 0; turn < 25; turn++)
            for (int k = 0; k < 2; k++) {
                const double a = host_us(r, [&] { enqueue_nccl(list[k], r, r.comm.nccl, r.x, r.y, sizes[k]); }),
                             b = host_us(r, [&] { enqueue_kvprim(list[k], r, &r.comm, r.x, r.y, sizes[k]); });
                if (r.rank == 0)
                    nccl[k].push_back(a), own[k].push_back(b), above[k].push_back(b - a);
            }
        CUDA(cudaStreamSynchronize(r.stream));
    });
    printf("\nhost time of a call, us: bf16 NCCL %.2f, kvprim %.2f; int32, through NCCL, NCCL %.2f, kvprim %.2f\n",
           median(nccl[0]), median(own[0]), median(nccl[1]), median(own[1]));
    judge("host time above NCCL's, own kernel, us", median(above[0]), '<', 0.5);
    judge("host time above NCCL's, through NCCL, us", median(above[1]), '<', 0.5);
}

/* One call to its end, as an engine that waits for it sees it. */
struct waited_call {
    double wall_us, cpu_us; /* cpu: of the thread that calls and waits */
};

static double thread_us()
{
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e6 * double(t.tv_sec) + 1e-3 * double(t.tv_nsec);
}

static waited_call wait_for_call(rank_state &r, way how, size_t bytes, cudaEvent_t end)
{
    meet_spinning();
    const double cpu_us = thread_us(), wall_us = now_us();
    enqueue(all_reduce, how, r, bytes);
    CUDA(cudaEventRecord(end, r.stream));
    CUDA(cudaEventSynchronize(end));
    const double end_us = now_us();
    return {end_us - wall_us, thread_us() - cpu_us};
}

/* Rank 0's medians: by NCCL and by kvprim, waiting by spinning and by blocking. */
static void print_waits(size_t bytes)
{
    const int repetitions = quick ? 20 : 100;
    std::vector<double> wall[4], cpu[4];
    on_all([&](rank_state &r) {
        for (int k = -1; k < repetitions; k++) /* the first ones warm up */
            for (int j = 0; j < 4; j++) {
                const waited_call c =
                    wait_for_call(r, j % 2 ? by_kvprim : by_nccl, bytes, j < 2 ? r.spinning : r.blocking);
                if (r.rank == 0 && k >= 0)
                    wall[j].push_back(c.wall_us), cpu[j].push_back(c.cpu_us);
            }
    });
    for (int j = 0; j < 4; j++)
        printf("%s %7.1f %7.1f", j == 2 ? "   |" : "", median(wall[j]), median(cpu[j]));
    printf("\n");
}

static void bench_waits()
{
    printf("\nall_reduce, one eager call from its begin to the end of the wait for it, us: wall time, and the thread's "
           "CPU time\n%8s %15s %15s    | %15s %15s\n",
           "", "NCCL, spinning", "kvprim", "NCCL, blocking", "kvprim");
    for_sizes([](size_t bytes, const std::string &) { print_waits(bytes); });
}

static void tune()
{
    printf("\nall_reduce by its ways, us\n%8s %8s %8s\n", "", "one shot", "two shot");
    for_sizes([](size_t bytes, const std::string &) {
        std::vector<way> list = {by_two_shot};
        if (bytes <= kvpn_capacity_bytes(&ranks[0].comm, kvpn_by_one_shot))
            list.push_back(by_one_shot);
        const auto us = measure(all_reduce, bytes, list);
        printf(" %8.2f %8.2f\n", us[by_one_shot], us[by_two_shot]);
    });
}

int main(int argc, char **argv)
{
    quick = argc == 2 && strcmp(argv[1], "quick") == 0;
    const bool tuning = argc == 2 && strcmp(argv[1], "tune") == 0;
    if (argc > 2 || (argc == 2 && !quick && !tuning)) {
        fprintf(stderr, "usage: %s [quick | tune]\n", argv[0]);
        return 2;
    }
    if (cudaGetDeviceCount(&world) != cudaSuccess || world < 2) {
        printf("skip: the benchmark of collectives takes two GPUs, there are %d\n", world);
        return 0;
    }
    const double begin_us = now_us();
    world = std::min(world, 8);
    ranks.resize(size_t(world));
    for (int r = 0; r < world; r++)
        ranks[size_t(r)].rank = r;
    std::vector<std::function<void()>> benches = {bench_all_reduce, [] { bench_parts(all_gather); },
                                                  [] { bench_parts(reduce_scatter); }, bench_late, bench_halves};
    if (open_links())
        benches.insert(benches.begin(), bench_link);
    else
        printf("no links: not every GPU can write to the next one's memory\n");
#ifdef BENCH_CUBLAS
    benches.push_back(bench_beside);
#endif
    benches.push_back(bench_before_nccl);
    benches.push_back(bench_host);
    benches.push_back(bench_waits);
    if (tuning)
        benches = {tune};
    on_all(open_rank);
    for (const auto &bench : benches) {
        bench();
        print_verdicts();
    }
    on_all(close_rank);
    if (!tuning)
        printf("\n%d targets met, %d missed\n%.0f s\n", met, missed, (now_us() - begin_us) * 1e-6);
    return 0;
}

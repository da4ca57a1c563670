/* SPDX-License-Identifier: MIT */
/* Compares kvprim_nccl.h with NCCL on ordinary memory, on a symmetric window, and copied into a window and out again. A
   thread per GPU, all GPUs of the machine; times are per call, inside a replayed CUDA graph.

       nvcc -arch=native -std=c++17 -O3 -I. tests/bench/bench_nccl.cu -o bench_nccl -lnccl && NCCL_NVLS_ENABLE=0 ./bench_nccl

   With -DBENCH_CUBLAS and -lcublas it also measures how much a sum that waits for a rank slows down a matrix product on
   another stream. The argument `quick` takes fewer repetitions; `tune` measures the ways of summing one by one. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#include "bench_gpu.h"
#include <condition_variable>
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
static const size_t most_bytes = size_t(64) << 20;

struct rank_state {
    int rank;
    kvprim_comm comm, wide; /* wide: may use all multiprocessors */
    ncclComm_t nccl;        /* separate: what is registered with comm does not help it */
    cudaStream_t stream;
    cudaEvent_t start, end;
    char *x, *y, *window; /* most_bytes each, the window twice that */
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

/* ---- timing ----

   As in bench_gpu.h, on all GPUs at once. A small NCCL call first makes them begin together. The slowest one counts. */

struct way {
    const char *name;
    std::function<void(rank_state &)> enqueue;
    bool in_window = false; /* true: the result is in the window, not in y */
    double us = 0;
    cudaGraphExec_t graphs[8] = {};
};

static void prepare(rank_state &r, way &w, int launches, size_t result_bytes, std::vector<char> &expected)
{
    cudaGraph_t graph;
    std::vector<char> got(result_bytes);
    const char *const result = w.in_window ? r.window + most_bytes : r.y;
    CUDA(cudaMemsetAsync(r.y, 0xee, result_bytes, r.stream));
    CUDA(cudaMemsetAsync(r.window + most_bytes, 0xee, result_bytes, r.stream));
    w.enqueue(r);
    CUDA(cudaMemcpyAsync(got.data(), result, result_bytes, cudaMemcpyDeviceToHost, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    if (expected.empty())
        expected = got;
    if (got != expected) {
        fprintf(stderr, "rank %d: %s of %zu bytes: not the result of the first\n", r.rank, w.name, result_bytes);
        exit(2);
    }
    meet();
    CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; i++)
        w.enqueue(r);
    CUDA(cudaStreamEndCapture(r.stream, &graph));
    CUDA(cudaGraphInstantiate(&w.graphs[r.rank], graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaGraphLaunch(w.graphs[r.rank], r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
}

static double time_once(rank_state &r, way &w, int launches)
{
    static double us[8];
    float ms;
    meet();
    spin<<<1, 1, 0, r.stream>>>(300000);
    NCCL(ncclAllReduce(r.x, r.y, 1, ncclBfloat16, ncclSum, r.nccl, r.stream));
    CUDA(cudaEventRecord(r.start, r.stream));
    CUDA(cudaGraphLaunch(w.graphs[r.rank], r.stream));
    CUDA(cudaEventRecord(r.end, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    CUDA(cudaEventElapsedTime(&ms, r.start, r.end));
    us[r.rank] = 1000.0 * double(ms) / launches;
    meet();
    const double slowest = *std::max_element(us, us + world);
    meet();
    return slowest;
}

/* Sets .us of every way. */
static void measure(std::vector<way> &ways, size_t bytes, size_t result_bytes)
{
    const int launches = bytes <= 1 << 20 ? 50 : 10, repetitions = quick ? 3 : 9;
    on_all([&](rank_state &r) {
        std::vector<std::vector<double>> us(ways.size());
        std::vector<char> expected;
        for (way &w : ways)
            prepare(r, w, launches, result_bytes, expected);
        for (int k = 0; k < repetitions; k++)
            for (size_t j = 0; j < ways.size(); j++) {
                const size_t who = k % 2 ? ways.size() - 1 - j : j;
                us[who].push_back(time_once(r, ways[who], launches));
            }
        for (size_t j = 0; j < ways.size(); j++) {
            if (r.rank == 0)
                ways[j].us = median(us[j]);
            CUDA(cudaGraphExecDestroy(ways[j].graphs[r.rank]));
        }
    });
}

/* ---- tables ---- */

static std::string size_name(size_t bytes)
{
    return bytes < 1 << 20 ? std::to_string(bytes >> 10) + " KB" : std::to_string(bytes >> 20) + " MB";
}

static std::vector<size_t> sizes()
{
    std::vector<size_t> all;
    for (size_t bytes = 2 << 10; bytes <= most_bytes; bytes *= 2)
        all.push_back(bytes);
    return all;
}

static std::vector<way> all_reduces(size_t bytes)
{
    const size_t n = bytes / 2;
    return {{"NCCL", [n](rank_state &r) { NCCL(ncclAllReduce(r.x, r.y, n, ncclBfloat16, ncclSum, r.nccl, r.stream)); }},
            {"window",
             [n](rank_state &r) {
                 NCCL(ncclAllReduce(r.window, r.window + most_bytes, n, ncclBfloat16, ncclSum, r.comm.nccl, r.stream));
             },
             true},
            {"wrapper",
             [n](rank_state &r) {
                 char *const w = r.window + most_bytes;
                 CUDA(cudaMemcpyAsync(w, r.x, 2 * n, cudaMemcpyDeviceToDevice, r.stream));
                 NCCL(ncclAllReduce(w, w, n, ncclBfloat16, ncclSum, r.comm.nccl, r.stream));
                 CUDA(cudaMemcpyAsync(r.y, w, 2 * n, cudaMemcpyDeviceToDevice, r.stream));
             }},
            {"kvprim",
             [n](rank_state &r) {
                 check_kvprim(kvprim_all_reduce(&r.comm, r.y, r.x, n, KVPRIM_BF16, KVPRIM_SUM, r.stream));
             }},
            {"in buffer",
             [n](rank_state &r) {
                 check_kvprim(
                     kvprim_all_reduce(&r.comm, r.window + most_bytes, r.window, n, KVPRIM_BF16, KVPRIM_SUM, r.stream));
             },
             true}};
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

static void bench_all_reduce()
{
    struct row {
        size_t bytes;
        double raw, wrapper;
    };
    std::vector<row> rows;
    printf("\nall_reduce, bf16 sum, us\n%8s %8s %8s %8s %8s %9s   %-9s %-9s %s\n", "", "NCCL", "window", "wrapper",
           "kvprim", "in buffer", "to raw", "wrapper", "GB/s (bus)");
    for (const size_t bytes : sizes()) {
        std::vector<way> w = all_reduces(bytes);
        measure(w, bytes, bytes);
        const double raw = std::min(w[0].us, w[1].us);
        rows.push_back({bytes, w[3].us / raw, w[3].us / w[2].us});
        printf("%8s %8.2f %8.2f %8.2f %8.2f %9.2f   %-9.3f %-9.3f %.0f\n", size_name(bytes).c_str(), w[0].us, w[1].us,
               w[2].us, w[3].us, w[4].us, rows.back().raw, rows.back().wrapper,
               2e-3 * double(bytes) * (world - 1) / world / w[3].us);
        fflush(stdout);
    }
    for (const row &r : rows)
        judge("all_reduce of " + size_name(r.bytes) + " to raw", r.raw, '<', raw_target(r.bytes), "");
    for (const row &r : rows)
        judge("all_reduce of " + size_name(r.bytes) + " to the wrapper", r.wrapper, '<', wrapper_target(r.bytes), "");
}

/* `bytes`: of the result. */
static void bench_all_gather()
{
    std::vector<figure> to_nccl, to_raw;
    printf("\nall_gather, us, by bytes of the result\n%8s %8s %8s %8s %9s   %-9s %s\n", "", "NCCL", "window", "kvprim",
           "in buffer", "to NCCL", "to raw");
    for (const size_t bytes : sizes()) {
        const size_t n = bytes / size_t(world);
        std::vector<way> w = {
            {"NCCL", [n](rank_state &r) { NCCL(ncclAllGather(r.x, r.y, n, ncclUint8, r.nccl, r.stream)); }},
            {"window",
             [n](rank_state &r) {
                 NCCL(ncclAllGather(r.window, r.window + most_bytes, n, ncclUint8, r.comm.nccl, r.stream));
             },
             true},
            {"kvprim",
             [n](rank_state &r) { check_kvprim(kvprim_all_gather(&r.comm, r.y, r.x, n, KVPRIM_U8, r.stream)); }},
            {"in buffer",
             [n](rank_state &r) {
                 check_kvprim(kvprim_all_gather(&r.comm, r.window + most_bytes, r.window, n, KVPRIM_U8, r.stream));
             },
             true}};
        measure(w, bytes, n * size_t(world));
        const double raw = std::min(w[0].us, w[1].us);
        printf("%8s %8.2f %8.2f %8.2f %9.2f   %-9.3f %.3f\n", size_name(bytes).c_str(), w[0].us, w[1].us, w[2].us,
               w[3].us, w[2].us / w[0].us, w[2].us / raw);
        fflush(stdout);
        if (bytes <= 256 << 10)
            to_nccl.push_back({w[2].us / w[0].us, size_name(bytes)});
        to_raw.push_back({std::min(w[2].us, w[3].us) / raw, size_name(bytes)});
    }
    judge_worst("all_gather to ordinary-memory NCCL, up to 256 KB", to_nccl, '<', 0.60);
    judge_worst("all_gather to raw, from its buffer if that is faster", to_raw, '<', 1.02);
}

/* `bytes`: of what each rank sends. */
static void bench_reduce_scatter()
{
    std::vector<figure> small, to_raw;
    printf("\nreduce_scatter, bf16 sum, us, by bytes that each rank gives\n%8s %8s %8s %8s %9s   %-9s %s\n", "", "NCCL",
           "window", "kvprim", "in buffer", "to NCCL", "to raw");
    for (const size_t bytes : sizes()) {
        const size_t n = bytes / 2 / size_t(world);
        std::vector<way> w = {
            {"NCCL",
             [n](rank_state &r) { NCCL(ncclReduceScatter(r.x, r.y, n, ncclBfloat16, ncclSum, r.nccl, r.stream)); }},
            {"window",
             [n](rank_state &r) {
                 NCCL(ncclReduceScatter(r.window, r.window + most_bytes, n, ncclBfloat16, ncclSum, r.comm.nccl,
                                        r.stream));
             },
             true},
            {"kvprim",
             [n](rank_state &r) {
                 check_kvprim(kvprim_reduce_scatter(&r.comm, r.y, r.x, n, KVPRIM_BF16, KVPRIM_SUM, r.stream));
             }},
            {"in buffer",
             [n](rank_state &r) {
                 check_kvprim(kvprim_reduce_scatter(&r.comm, r.window + most_bytes, r.window, n, KVPRIM_BF16,
                                                    KVPRIM_SUM, r.stream));
             },
             true}};
        measure(w, bytes, 2 * n);
        const double raw = std::min(w[0].us, w[1].us);
        printf("%8s %8.2f %8.2f %8.2f %9.2f   %-9.3f %.3f\n", size_name(bytes).c_str(), w[0].us, w[1].us, w[2].us,
               w[3].us, w[2].us / w[0].us, w[2].us / raw);
        fflush(stdout);
        if (bytes <= 128 << 10)
            small.push_back({w[2].us / raw, size_name(bytes)});
        to_raw.push_back({std::min(w[2].us, w[3].us) / raw, size_name(bytes)});
    }
    judge_worst("reduce_scatter to raw, up to 128 KB", small, '<', 0.62);
    judge_worst("reduce_scatter to raw, from its buffer if that is faster", to_raw, '<', 1.02);
}

/* Launches one call after the other, while the last rank begins a millisecond late. A rank that has waited must not be
   late in turn. Returns the time per call of the last rank. */
static double time_behind(rank_state &r, const way &w, int calls)
{
    float ms;
    meet();
    if (r.rank == world - 1)
        spin<<<1, 1, 0, r.stream>>>(1000000);
    CUDA(cudaEventRecord(r.start, r.stream));
    for (int i = 0; i < calls; i++)
        w.enqueue(r);
    CUDA(cudaEventRecord(r.end, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    CUDA(cudaEventElapsedTime(&ms, r.start, r.end));
    return 1000.0 * double(ms) / calls;
}

static void bench_late()
{
    std::vector<figure> ratios;
    printf("\nall_reduce, launched one by one behind a late rank, us\n%8s %8s %8s\n", "", "NCCL", "kvprim");
    for (const size_t bytes : {size_t(2) << 10, size_t(64) << 10, size_t(1) << 20, size_t(4) << 20, size_t(16) << 20}) {
        const std::vector<way> ways = all_reduces(bytes);
        std::vector<double> nccl, own;
        on_all([&](rank_state &r) {
            for (int k = 0; k < (quick ? 3 : 9); k++) {
                const double of_nccl = time_behind(r, ways[0], 50), of_own = time_behind(r, ways[3], 50);
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

static void enqueue_wide(rank_state &r, size_t bytes)
{
    check_kvprim(kvprim_all_reduce(&r.wide, r.y, r.x, bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream));
}

/* What it costs to leave half of the multiprocessors to others when no rank is late. */
static void bench_halves()
{
    std::vector<figure> ratios;
    printf("\nall_reduce by multiprocessors, us\n%8s %8s %8s   %s\n", "", "default", "all", "default to all");
    for (const size_t bytes : sizes()) {
        std::vector<way> w = {{"default", all_reduces(bytes)[3].enqueue},
                              {"all", [bytes](rank_state &r) { enqueue_wide(r, bytes); }}};
        measure(w, bytes, bytes);
        ratios.push_back({w[0].us / w[1].us, size_name(bytes)});
        printf("%8s %8.2f %8.2f   %.3f\n", size_name(bytes).c_str(), w[0].us, w[1].us, w[0].us / w[1].us);
        fflush(stdout);
    }
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
    float ms;
    CUDA(cudaEventRecord(r.start, p.stream));
    for (int i = 0; i < products; i++)
        cublasGemmEx(p.handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, p.a, CUDA_R_16BF, n, p.b, CUDA_R_16BF, n, &zero,
                     p.c, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    CUDA(cudaEventRecord(r.end, p.stream));
    CUDA(cudaStreamSynchronize(p.stream));
    CUDA(cudaEventElapsedTime(&ms, r.start, r.end));
    return double(ms);
}

/* How many times longer products take on rank 0 while a sum there waits for the last rank. That rank comes after they
   end: 45 ms is 25 times what they take alone. */
static double product_beside(rank_state &r, product &p, const std::function<void(rank_state &)> &sum)
{
    double alone = 0, beside = 0;
    meet();
    if (r.rank == 0)
        alone = time_products(r, p);
    meet();
    if (r.rank == world - 1)
        spin<<<1, 1, 0, r.stream>>>(45000000);
    sum(r);
    if (r.rank == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2)); /* the sum is on the GPU, and waits */
        beside = time_products(r, p);
    }
    CUDA(cudaStreamSynchronize(r.stream));
    return alone > 0 ? beside / alone : 0;
}

static void bench_beside()
{
    static const char *const names[] = {"NCCL", "kvprim", "all"};
    std::vector<figure> figures;
    printf("\na product of %d^3, bf16, beside an all_reduce that waits: its time to that alone\n%8s", product_size, "");
    for (const char *const name : names)
        printf(" %8s", name);
    printf("\n");
    for (const size_t bytes : sizes()) {
        const std::function<void(rank_state &)> sums[] = {all_reduces(bytes)[0].enqueue, all_reduces(bytes)[3].enqueue,
                                                          [bytes](rank_state &r) { enqueue_wide(r, bytes); }};
        std::vector<double> ratios[3];
        on_all([&](rank_state &r) {
            product p = open_product(r);
            (void)time_products(r, p);
            for (int k = 0; k < 3; k++)
                for (int w = 0; w < 3; w++) {
                    const double ratio = product_beside(r, p, sums[w]);
                    if (r.rank == 0)
                        ratios[w].push_back(ratio);
                }
            close_product(p);
        });
        printf("%8s", size_name(bytes).c_str());
        for (int w = 0; w < 3; w++)
            printf(" %8.2f", median(ratios[w]));
        printf("\n");
        fflush(stdout);
        figures.push_back({median(ratios[1]), size_name(bytes)});
    }
    judge_worst("a product beside an all_reduce that waits, to alone", figures, '<', 2.2);
}
#endif

/* The memset before NCCL's symmetric kernels, for versions that start them too early. */
static void bench_before_nccl()
{
    const size_t bytes = size_t(64) << 10;
    std::vector<way> w = {
        {"NCCL",
         [bytes](rank_state &r) {
             NCCL(ncclAllReduce(r.window, r.window + most_bytes, bytes / 4, ncclInt32, ncclSum, r.comm.nccl, r.stream));
         },
         true},
        {"kvprim",
         [bytes](rank_state &r) {
             check_kvprim(kvprim_all_reduce(&r.comm, r.window + most_bytes, r.window, bytes / 4, KVPRIM_INT32,
                                            KVPRIM_SUM, r.stream));
         },
         true}};
    measure(w, bytes, bytes);
    printf("\nall_reduce of 64 KB of int32 in NCCL's window, us: NCCL alone %.2f, with what goes before it %.2f\n",
           w[0].us, w[1].us);
}

/* Microseconds that a call takes on the host. No call blocks, because a stream holds more than these. */
static double host_us(rank_state &r, const std::function<void(rank_state &)> &call)
{
    enum { calls = 200 };
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    const double begun = now_us();
    for (int i = 0; i < calls; i++)
        call(r);
    return (now_us() - begun) / calls;
}

/* In turns, because a host's speed changes. The median of the turns' differences counts. */
static void bench_host()
{
    const std::function<void(rank_state &)> calls[] = {
        [](rank_state &s) { NCCL(ncclAllReduce(s.x, s.y, 4096, ncclBfloat16, ncclSum, s.comm.nccl, s.stream)); },
        [](rank_state &s) {
            check_kvprim(kvprim_all_reduce(&s.comm, s.y, s.x, 4096, KVPRIM_BF16, KVPRIM_SUM, s.stream));
        },
        [](rank_state &s) { NCCL(ncclAllReduce(s.x, s.y, 4096, ncclInt32, ncclSum, s.comm.nccl, s.stream)); },
        [](rank_state &s) {
            check_kvprim(kvprim_all_reduce(&s.comm, s.y, s.x, 4096, KVPRIM_INT32, KVPRIM_SUM, s.stream));
        }};
    std::vector<double> us[4], own, through;
    on_all([&](rank_state &r) {
        for (int turn = 0; turn < 25; turn++) {
            double mine[4];
            for (int k = 0; k < 4; k++)
                mine[k] = host_us(r, calls[k]);
            if (r.rank != 0)
                continue;
            for (int k = 0; k < 4; k++)
                us[k].push_back(mine[k]);
            own.push_back(mine[1] - mine[0]);
            through.push_back(mine[3] - mine[2]);
        }
        CUDA(cudaStreamSynchronize(r.stream));
    });
    printf("\nhost time of a call, us: bf16 NCCL %.2f, kvprim %.2f; int32, through NCCL, NCCL %.2f, kvprim %.2f\n",
           median(us[0]), median(us[1]), median(us[2]), median(us[3]));
    judge("host time above NCCL's, own kernel, us", median(own), '<', 0.5, "");
    judge("host time above NCCL's, through NCCL, us", median(through), '<', 0.5, "");
}

/* ---- tuning ---- */

#ifdef KVPRIM_NCCL_KERNELS
static way forced(const char *name, kvpn_way how, size_t bytes)
{
    return {name, [=](rank_state &r) {
                kvpn_call c = kvpn_make_call(kvpn_all_reduce, "tune", &r.comm, r.y, r.x, bytes / 2, KVPRIM_BF16,
                                             KVPRIM_SUM, r.stream);
                c.element = 2;
                check_kvprim(kvpn_launch_chunks(&c, how));
            }};
}

static void tune()
{
    printf("\nall_reduce by its ways, us\n%8s %8s %8s\n", "", "one shot", "two shot");
    for (const size_t bytes : sizes()) {
        std::vector<way> w = {forced("two shot", kvpn_by_two_shot, bytes)};
        if (bytes <= kvpn_capacity_bytes(&ranks[0].comm, kvpn_by_one_shot))
            w.push_back(forced("one shot", kvpn_by_one_shot, bytes));
        measure(w, bytes, bytes);
        printf("%8s %8.2f %8.2f\n", size_name(bytes).c_str(), w.size() > 1 ? w[1].us : 0, w[0].us);
        fflush(stdout);
    }
}
#endif

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
    world = std::min(world, 8);
    ranks.resize(size_t(world));
    for (int r = 0; r < world; r++)
        ranks[size_t(r)].rank = r;
    on_all(open_rank);
    if (tuning) {
#ifdef KVPRIM_NCCL_KERNELS
        tune();
#endif
    } else {
        bench_all_reduce();
        bench_all_gather();
        bench_reduce_scatter();
        bench_late();
        bench_halves();
#ifdef BENCH_CUBLAS
        bench_beside();
#endif
        bench_before_nccl();
        bench_host();
    }
    on_all(close_rank);
    if (!tuning)
        printf("\n%d targets met, %d missed\n", met, missed);
    return 0;
}

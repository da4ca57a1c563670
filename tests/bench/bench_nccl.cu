/* SPDX-License-Identifier: MIT */
/* Compares kvprim_nccl.h with NCCL on ordinary memory, on a symmetric window, and copied into a window and out again. A
   thread per GPU, all GPUs of the machine; times are per call, inside a replayed CUDA graph.

       nvcc -arch=native -std=c++17 -O3 tests/bench/bench_nccl.cu build/kvprim_nccl.o -o build/bench_nccl -lnccl
       NCCL_NVLS_ENABLE=0 build/bench_nccl [--quick] [--only SECTION]

   kvprim_nccl.o: the implementation. With -DBENCH_CUBLAS and -lcublas it also measures how much a sum that waits for a
   rank slows down a matrix product on another stream. With -DBENCH_WAYS instead of the implementation it also has the
   section "ways", which suggests limits for the header (`make nccl-limits`). */
#ifdef BENCH_WAYS
#define KVPRIM_IMPLEMENTATION
#endif
#include "../../kvprim_nccl.h"
#include "bench_link.h"
#ifdef BENCH_WAYS
#include "bench_ways.h"
#endif
#include <array>
#include <ctime>
#ifdef BENCH_CUBLAS
#include <cublas_v2.h>
#endif

/* Of each rank: may use all multiprocessors; may use 32. */
static kvprim_comm wide[8], narrow[8];

static void open_more(rank_state &r)
{
    kvprim_comm_desc desc = {};
    desc.max_sms = 1000;
    open_comm(r, &wide[r.rank], desc);
    desc.max_sms = 32;
    open_comm(r, &narrow[r.rank], desc);
    CUDA(cudaSetDeviceFlags(cudaDeviceScheduleSpin)); /* what a wait does for an event that says nothing else */
}

static void close_more(rank_state &r)
{
    check_kvprim(kvprim_comm_destroy(&wide[r.rank]));
    check_kvprim(kvprim_comm_destroy(&narrow[r.rank]));
}

/* ---- collectives ----

   `bytes` are those of the whole tensor: what every rank gives to an all_reduce or a reduce_scatter, and gets from an
   all_reduce or an all_gather. */

enum collective {
    all_reduce,
    all_reduce_max,
    all_reduce_avg,
    all_reduce_e4m3,
    all_reduce_int32,
    all_gather,
    reduce_scatter
};

/* NCCL: from x to y; from one half of its window to the other; from x to y with copies into the window and out of it.
   kvprim: from x to y; from one half of its buffer to the other; on all multiprocessors; on 32. */
enum way { by_nccl, by_window, by_wrapper, by_kvprim, in_buffer, by_all_sms, by_32_sms, ways };

/* A sum, say, of elements of a type. */
struct operation {
    ncclDataType_t nccl_type;
    ncclRedOp_t nccl_op;
    kvprim_dtype type;
    kvprim_op op;
    size_t element;
};

static operation operation_of(collective what)
{
    switch (what) {
    case all_reduce_max:
        return {ncclBfloat16, ncclMax, KVPRIM_BF16, KVPRIM_MAX, 2};
    case all_reduce_avg:
        return {ncclBfloat16, ncclAvg, KVPRIM_BF16, KVPRIM_AVG, 2};
#if NCCL_VERSION_CODE >= 22400
    case all_reduce_e4m3:
        return {ncclFloat8e4m3, ncclSum, KVPRIM_F8E4M3, KVPRIM_SUM, 1};
#endif
    case all_reduce_int32:
        return {ncclInt32, ncclSum, KVPRIM_INT32, KVPRIM_SUM, 4};
    case all_gather:
        return {ncclUint8, ncclSum, KVPRIM_U8, KVPRIM_SUM, 1};
    default:
        return {ncclBfloat16, ncclSum, KVPRIM_BF16, KVPRIM_SUM, 2};
    }
}

/* A rank's part of a tensor: whole packs of 16 bytes. */
static size_t part_of(size_t bytes)
{
    return bytes / 16 / size_t(world) * 16;
}

static size_t result_bytes(collective what, size_t bytes)
{
    const size_t part = part_of(bytes);
    return what == all_gather ? part * size_t(world) : what == reduce_scatter ? part : bytes;
}

static void enqueue_nccl(collective what, rank_state &r, ncclComm_t comm, const void *from, void *to, size_t bytes)
{
    const operation o = operation_of(what);
    const size_t count = bytes / o.element, part = part_of(bytes) / o.element;
    if (what == all_gather)
        NCCL(ncclAllGather(from, to, part, o.nccl_type, comm, r.stream));
    else if (what == reduce_scatter)
        NCCL(ncclReduceScatter(from, to, part, o.nccl_type, o.nccl_op, comm, r.stream));
    else
        NCCL(ncclAllReduce(from, to, count, o.nccl_type, o.nccl_op, comm, r.stream));
}

static void enqueue_kvprim(collective what, rank_state &r, kvprim_comm *comm, const void *from, void *to, size_t bytes)
{
    const operation o = operation_of(what);
    const size_t count = bytes / o.element, part = part_of(bytes) / o.element;
    if (what == all_gather)
        check_kvprim(kvprim_all_gather(comm, to, from, part, o.type, r.stream));
    else if (what == reduce_scatter)
        check_kvprim(kvprim_reduce_scatter(comm, to, from, part, o.type, o.op, r.stream));
    else
        check_kvprim(kvprim_all_reduce(comm, to, from, count, o.type, o.op, r.stream));
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
        return enqueue_kvprim(what, r, &wide[r.rank], r.x, r.y, bytes);
    default:
        return enqueue_kvprim(what, r, &narrow[r.rank], r.x, r.y, bytes);
    }
}

static const char *result_of(rank_state &r, way how)
{
    return how == by_window || how == in_buffer ? r.window + most_bytes : r.y;
}

static void verify(collective what, way how, rank_state &r, size_t bytes)
{
    const std::string name = "way " + std::to_string(how) + " of collective " + std::to_string(what);
    const char *const at = result_of(r, how);
    const size_t part = part_of(bytes);
    expectation e = {sum_of, 0, world, 0};
    if (what == all_reduce_int32)
        return check_result<uint32_t>(r, at, e, bytes / 4, name);
    if (what == all_reduce_e4m3)
        return check_result<__nv_fp8_e4m3>(r, at, e, bytes, name);
    if (what == all_gather) {
        for (int from = 0; from < world; from++)
            check_result<__nv_bfloat16>(r, at + size_t(from) * part, {copy_of, from, from + 1, 0}, part / 2, name);
        return;
    }
    e.by = what == all_reduce_max ? most_of : what == all_reduce_avg ? mean_of : sum_of;
    e.first = what == reduce_scatter ? size_t(r.rank) * part / 2 : 0;
    check_result<__nv_bfloat16>(r, at, e, result_bytes(what, bytes) / 2, name);
}

/* Returns the microseconds of a call by each of these ways. */
static std::array<double, ways> measure(collective what, size_t bytes, const std::vector<way> &list)
{
    std::vector<rank_way> all;
    std::array<double, ways> us = {};
    for (const way how : list)
        all.push_back({[=](rank_state &r, int) { enqueue(what, how, r, bytes); },
                       [=](rank_state &r) {
                           CUDA(cudaMemsetAsync(const_cast<char *>(result_of(r, how)), 0xee, bytes, r.stream));
                       },
                       [=](rank_state &r) { verify(what, how, r, bytes); }});
    measure(all, calls_in_graph(bytes));
    for (size_t k = 0; k < list.size(); k++)
        us[list[k]] = all[k].us;
    return us;
}

/* ---- tables ---- */

static void for_these(const std::vector<size_t> &sizes,
                      const std::function<void(size_t bytes, const std::string &name)> &row)
{
    for (const size_t bytes : sizes) {
        printf("%8s", size_name(int64_t(bytes)).c_str());
        row(bytes, size_name(int64_t(bytes)));
        fflush(stdout);
    }
}

/* Prints a row for each size from 2 KB on: what `row` prints, after the size's name. */
static void for_sizes(const std::function<void(size_t bytes, const std::string &name)> &row)
{
    std::vector<size_t> sizes;
    for (size_t bytes = 2 << 10; bytes <= most_bytes; bytes *= 2)
        sizes.push_back(bytes);
    for (const size_t bytes : {size_t(24 * MiB), size_t(48 * MiB)})
        sizes.push_back(bytes);
    std::sort(sizes.begin(), sizes.end());
    for_these(sizes, row);
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

static std::map<size_t, link_time> link_times; /* by an all_reduce's bytes; empty if the GPUs are not linked */
static floor_times lowest;                     /* the same */

static void bench_link()
{
    static const link_way list[] = {{"push by 132 blocks", 132, 512},
                                    {"push by 64 blocks", 64, 1024},
                                    {"push by 32 blocks", 32, 1024},
                                    {"copy", 0, 0}};
    printf("\neach GPU writes the bytes of an all_reduce to the next one, all at once, us; the push: the faster of 132 "
           "blocks of 512 threads and 64 of 1,024\n%8s %10s %9s %9s %11s   %s\n",
           "", "132 blocks", "64 blocks", "32 blocks", "copy engine", "GB/s each way, of the fastest");
    for_sizes([](size_t bytes, const std::string &) {
        const double share = bus_bytes(bytes) / double(bytes);
        std::vector<rank_way> all;
        for (const link_way &one : list)
            all.push_back(way_to_push(one, bytes));
        measure(all, calls_in_graph(bytes));
        for (rank_way &one : all)
            one.us *= share;
        const link_time t = {std::min(all[0].us, all[1].us), all[2].us, all[3].us};
        link_times[bytes] = t;
        printf(" %10.2f %9.2f %9.2f %11.2f   %.0f\n", all[0].us, all[1].us, all[2].us, all[3].us,
               1e-3 * bus_bytes(bytes) / std::min({t.push_us, t.narrow_us, t.copy_us}));
    });
}

static void bench_floor()
{
    lowest = measure_floor();
    printf("\nkernels that do nothing else, us: an empty node %.2f, an empty one launched as kvprim's are %.2f, a flag "
           "to each other rank %.2f, a flag there and one back %.2f\n",
           lowest.empty_us, lowest.dependent_us, lowest.once_us, lowest.back_us);
}

/* Returns a ratio as text, or "-" if one of the times was not measured. */
static std::string ratio_text(double a, double b, int digits)
{
    char text[32];
    snprintf(text, sizeof text, "%.*f", digits, a / b);
    return a > 0 && b > 0 ? text : "-";
}

static link_time link_of(size_t bytes)
{
    const auto found = link_times.find(bytes);
    return found == link_times.end() ? link_time{} : found->second;
}

/* A figure of the documents that the project began with, beside ours. Lines that begin with a bracket are no rows. */
static void print_document(double us)
{
    const double datasheet = 450, kb = 1e-3 * bus_bytes(8 * MiB); /* GB/s each way of an H100 or H200; kb / us: GB/s */
    const link_time link = link_of(8 * MiB);
    if (world != 2 || link.push_us <= 0)
        return;
    printf("(8 MB: the document says 20-25 us and 60-70 %% of NVLink; 20-25 us are %.0f-%.0f %% of an H200's %.0f "
           "GB/s. Here %.2f us, %.0f GB/s, %.0f %%)\n",
           100 * kb / 25 / datasheet, 100 * kb / 20 / datasheet, datasheet, us, kb / us, 100 * kb / us / datasheet);
    printf(
        "(us of these bytes: link's limit %.2f, copy engine %.2f, a kernel that only pushes them %.2f, this all-reduce "
        "%.2f, %.3f of the push. 20 us is %s what the link carries)\n",
        kb / datasheet, link.copy_us, link.push_us, us, us / link.push_us,
        std::min(link.push_us, link.copy_us) > 20 ? "below" : "within");
}

/* A small sum beside kernels that do less. */
static void print_floor(double us)
{
    if (lowest.once_us <= 0)
        return;
    printf("(8 KB: %.2f us, %.2f times a flag to each other rank, %.2f times a flag there and one back, %.2f times an "
           "empty node)\n",
           us, us / lowest.once_us, us / lowest.back_us, us / lowest.empty_us);
}

/* How many times the push's time a sum may take; 0: no target. */
static double push_target(size_t bytes)
{
    const double mb = double(bytes) / double(MiB);
    return world != 2 ? 0 : mb == 8 ? 1.04 : mb == 24 || mb == 48 || mb == 64 ? 1.05 : 0;
}

static void bench_all_reduce()
{
    struct ratio {
        std::string name;
        double value, target;
    };
    std::vector<ratio> to_raw, to_wrapper, to_push;
    std::map<size_t, double> ours_us;
    printf("\nall_reduce, bf16 sum, us; floors: times a flag to each other rank\n%8s %8s %8s %8s %8s %9s   %-9s %-9s "
           "%-10s %9s %9s %7s\n",
           "", "NCCL", "window", "wrapper", "kvprim", "in buffer", "to raw", "wrapper", "GB/s (bus)", "% of push",
           "% of copy", "floors");
    for_sizes([&](size_t bytes, const std::string &name) {
        const auto us = measure(all_reduce, bytes, {by_nccl, by_window, by_wrapper, by_kvprim, in_buffer});
        const double ours = us[by_kvprim], raw = ours / std::min(us[by_nccl], us[by_window]);
        const link_time link = link_of(bytes);
        ours_us[bytes] = ours;
        to_raw.push_back({name + " to raw", raw, raw_target(bytes)});
        to_wrapper.push_back({name + " to the wrapper", ours / us[by_wrapper], wrapper_target(bytes)});
        if (push_target(bytes) > 0 && link.push_us > 0)
            to_push.push_back({name + " to the push", ours / link.push_us, push_target(bytes)});
        printf(" %8.2f %8.2f %8.2f %8.2f %9.2f   %-9.3f %-9.3f %-10.0f %9s %9s %7s\n", us[by_nccl], us[by_window],
               us[by_wrapper], ours, us[in_buffer], raw, ours / us[by_wrapper], 1e-3 * bus_bytes(bytes) / ours,
               ratio_text(100 * link.push_us, ours, 0).c_str(), ratio_text(100 * link.copy_us, ours, 0).c_str(),
               bytes > 64 << 10 ? "-" : ratio_text(ours, lowest.once_us, 2).c_str());
    });
    print_floor(ours_us[8 << 10]);
    print_document(ours_us[8 << 20]);
    for (const auto *const ratios : {&to_raw, &to_wrapper, &to_push})
        for (const ratio &r : *ratios)
            judge("all_reduce of " + r.name, r.value, '<', r.target);
}

static void write_inputs(void (*fill)(rank_state &, char *))
{
    on_all([fill](rank_state &r) {
        fill(r, r.x);
        CUDA(cudaStreamSynchronize(r.stream));
    });
}

/* What NCCL alone did before: reductions other than a sum, and sums of e4m3. */
static void bench_operations()
{
    static const std::pair<collective, const char *> list[] = {
        {all_reduce_max, "max of bf16"},
        {all_reduce_avg, "average of bf16"},
#if NCCL_VERSION_CODE >= 22400
        {all_reduce_e4m3, "sum of e4m3"},
#endif
    };
    std::vector<figure> ratios;
    for (const auto &one : list) {
        if (one.first == all_reduce_avg && (world & (world - 1)) != 0) {
            printf("\nall_reduce, %s: not on %d GPUs, because NCCL multiplies by a rounded 1/%d\n", one.second, world,
                   world);
            continue;
        }
        write_inputs(one.first == all_reduce_e4m3 ? enqueue_samples<__nv_fp8_e4m3> : enqueue_samples<__nv_bfloat16>);
        printf("\nall_reduce, %s, us\n%8s %8s %8s   %s\n", one.second, "", "NCCL", "kvprim", "to NCCL");
        for_these({8 << 10, 64 << 10, 512 << 10, 8 << 20, 64 << 20}, [&](size_t bytes, const std::string &name) {
            const auto us = measure(one.first, bytes, {by_nccl, by_kvprim});
            ratios.push_back({us[by_kvprim] / us[by_nccl], std::string(one.second) + " " + name});
            printf(" %8.2f %8.2f   %.3f\n", us[by_nccl], us[by_kvprim], ratios.back().value);
        });
    }
    write_inputs(enqueue_samples<__nv_bfloat16>);
    judge_worst("max, average, e4m3 to ordinary-memory NCCL", ratios, '<', 1.02);
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

/* What it costs to leave multiprocessors to others when no rank is late. */
static void bench_sms()
{
    std::vector<figure> ratios, to_push;
    printf("\nall_reduce by multiprocessors, us\n%8s %8s %8s %8s   %-14s %9s %9s\n", "", "default", "all", "32",
           "default to all", "32 to all", "32 / push");
    for_sizes([&](size_t bytes, const std::string &name) {
        const auto us = measure(all_reduce, bytes, {by_kvprim, by_all_sms, by_32_sms});
        const double push_us = link_of(bytes).push_us;
        ratios.push_back({us[by_kvprim] / us[by_all_sms], name});
        if (push_target(bytes) > 0 && push_us > 0)
            to_push.push_back({us[by_32_sms] / push_us, name});
        printf(" %8.2f %8.2f %8.2f   %-14.3f %9.3f %9s\n", us[by_kvprim], us[by_all_sms], us[by_32_sms],
               ratios.back().value, us[by_32_sms] / us[by_all_sms], ratio_text(us[by_32_sms], push_us, 3).c_str());
    });
    judge_worst("all_reduce on the default multiprocessors to all", ratios, '<', 1.08);
    judge_worst("all_reduce on 32 multiprocessors to the push", to_push, '<', 1.10);
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
    bench_before_nccl();
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

/* As meet(), for ranks that must go on together: a thread that sleeps takes up to 50 us to wake up. */
static void meet_spinning()
{
    static std::atomic<uint64_t> arrivals(0);
    const uint64_t mine = arrivals++, all = uint64_t(world);
    while (arrivals.load() < (mine / all + 1) * all)
        continue;
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
        cudaEvent_t ends[2]; /* waited for by spinning, and by blocking */
        CUDA(cudaEventCreateWithFlags(&ends[0], cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&ends[1], cudaEventDisableTiming | cudaEventBlockingSync));
        for (int k = -1; k < repetitions; k++) /* the first ones warm up */
            for (int j = 0; j < 4; j++) {
                const waited_call c = wait_for_call(r, j % 2 ? by_kvprim : by_nccl, bytes, ends[j / 2]);
                if (r.rank == 0 && k >= 0)
                    wall[j].push_back(c.wall_us), cpu[j].push_back(c.cpu_us);
            }
        for (const cudaEvent_t end : ends)
            CUDA(cudaEventDestroy(end));
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

static bool linked;

static void open_all()
{
    open_ranks();
    on_all(open_more);
    linked = open_links();
    if (!linked)
        printf("no links: not every GPU can write to the next one's memory\n");
}

static void bench_limits()
{
    if (!linked)
        return;
    bench_link();
    bench_floor();
}

int main(int argc, char **argv)
{
    const int code = run_program(argc, argv, open_all,
                                 {
                                     {"limits", bench_limits},
                                     {"all_reduce", bench_all_reduce},
                                     {"operations", bench_operations},
                                     {"all_gather", [] { bench_parts(all_gather); }},
                                     {"reduce_scatter", [] { bench_parts(reduce_scatter); }},
                                     {"late", bench_late},
                                     {"sms", bench_sms},
#ifdef BENCH_CUBLAS
                                     {"beside", bench_beside},
#endif
                                     {"host", bench_host},
                                     {"waits", bench_waits},
#ifdef BENCH_WAYS
                                     {"ways", bench_ways},
#endif
                                 });
    if (!ranks.empty()) {
        on_all(close_more);
        on_all(close_rank);
    }
    return code;
}

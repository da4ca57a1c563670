/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_gather and kvprim_cuda_store with other ways to move rows on one GPU. Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_cuda.cu -o build/bench_cuda
       build/bench_cuda [--quick] [--only gather|store|store_k|repeated|others|large|order|odd|misaligned|host]

   Times are microseconds per launch, as bench_gpu.h takes them, over 8 index sets and rotating dense buffers. GB/s
   counts bytes read plus bytes written.

       mini    mini-sglang's gather: a warp per row, or 2 or 4; its store: a warp per token
       SGLang  its store: 1, 2 or 4 warps per token
       PDL     both with programmatic dependent launch, the others triggering where their projects do: opponents.h

   A table of gather, store and store_k has a row per shape: times without PDL, and kvprim's as a part of the best
   opponent's; the same with PDL; kvprim's better way as a part of the opponents' best way; kvprim's time with PDL as a
   part of that without; GB/s without. A summary follows: a shape is lost if kvprim takes longer. tests/bench/plots.py
   reads the tables. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include "opponents.h"
#include <cub/device/device_memcpy.cuh>
#include <thrust/iterator/constant_iterator.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

static int64_t cache_bytes;     /* for K, and again for V; gather writes to K's */
static int64_t table_bytes;     /* twice that; gather reads it all, store K from a half and V from the other */
constexpr int64_t slack = 4096; /* past the end of each, for misaligned bases */
constexpr int64_t most_output = 2 * GiB;

static char *table_memory, *cache_memory[2], *cub_memory;
constexpr size_t cub_memory_bytes = 256 * MiB;

/* ---- shapes: which bytes a launch moves ---- */

enum operation { gather, store, store_k }; /* store_k: without V */
static const char *const operation_names[] = {"gather", "store", "store_k"};

static int tensors_of(operation op)
{
    return op == store ? 2 : 1;
}

/* The indexed side is the source of a gather and the destination of a store. The other side is dense. */
struct shape {
    operation op;
    int64_t row_bytes, rows, src_stride, dst_stride, src_offset, dst_offset;
    const index_sets *sets;
};

static shape packed(operation op, int64_t row_bytes, int64_t rows, const index_sets &sets)
{
    return {op, row_bytes, rows, row_bytes, row_bytes, 0, 0, &sets};
}

static int64_t indexed_rows(operation op, int64_t stride)
{
    return (op == gather ? table_bytes : cache_bytes) / stride;
}

static int64_t output_bytes(const shape &s)
{
    return s.rows * s.row_bytes * tensors_of(s.op);
}

/* Where launch i of a graph reads and writes: K, then V of a store. */
struct addresses {
    char *dst[2];
    char *src[2];
    const int32_t *index, *host_index;
};

static addresses addresses_of(const shape &s, int i)
{
    const int64_t stride = s.op == gather ? s.dst_stride : s.src_stride;
    const int64_t dense = rotated(i, s.rows * stride + 16, cache_bytes); /* where in the dense buffers */
    addresses a = {};
    for (int kv = 0; kv < 2; kv++) {
        a.src[kv] = table_memory + s.src_offset + (s.op == gather ? 0 : kv * (table_bytes / 2) + dense);
        a.dst[kv] = cache_memory[kv] + s.dst_offset + (s.op == gather ? dense : 0);
    }
    a.index = s.sets->set(i);
    a.host_index = s.sets->host_set(i);
    return a;
}

/* ---- opponents ---- */

typedef std::function<void(const shape &, int i)> enqueue_fn;

static store_params store_params_of(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    return {a.dst[0], a.dst[1], a.src[0], a.src[1], a.index, s.dst_stride, s.src_stride, unsigned(s.rows)};
}

static enqueue_fn gather_by(gather_launch *launch)
{
    return [launch](const shape &s, int i) {
        const addresses a = addresses_of(s, i);
        CUDA(launch(a.dst[0], a.src[0], a.index, unsigned(s.rows), stream));
    };
}

static enqueue_fn store_by(store_launch *launch)
{
    return [launch](const shape &s, int i) { CUDA(launch(store_params_of(s, i), stream)); };
}

static void enqueue_copy_each(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    for (int64_t r = 0; r < s.rows; r++)
        CUDA(cudaMemcpyAsync(a.dst[0] + r * s.dst_stride, a.src[0] + a.host_index[r] * s.src_stride,
                             size_t(s.row_bytes), cudaMemcpyDeviceToDevice, stream));
}

struct row_address {
    char *data;
    const int32_t *index; /* NULL: row i */
    int64_t stride;

    __host__ __device__ void *operator()(uint32_t i) const
    {
        return data + (index ? int64_t(index[i]) : int64_t(i)) * stride;
    }
};

static void enqueue_cub(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    const thrust::counting_iterator<uint32_t> numbers(0);
    const auto from = thrust::make_transform_iterator(numbers, row_address{a.src[0], a.index, s.src_stride});
    const auto to = thrust::make_transform_iterator(numbers, row_address{a.dst[0], nullptr, s.dst_stride});
    const thrust::constant_iterator<uint32_t> sizes(uint32_t(s.row_bytes));
    size_t bytes = 0;
    CUDA(cub::DeviceMemcpy::Batched(nullptr, bytes, from, to, sizes, s.rows, stream));
    if (bytes > cub_memory_bytes) {
        fprintf(stderr, "bench_cuda: CUB asks for %zu bytes, has %zu\n", bytes, cub_memory_bytes);
        exit(2);
    }
    CUDA(cub::DeviceMemcpy::Batched(cub_memory, bytes, from, to, sizes, s.rows, stream));
}

constexpr int block_threads = 128; /* of empty kernels */

template <bool PDL> static void enqueue_empty(int)
{
    CUDA(launch_opponent(empty_kernel, 1, block_threads, PDL, stream));
}

/* ---- kvprim ---- */

static kvprim_gather_desc gather_desc(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    return gather_of(table_at(a.dst[0], s.rows, s.dst_stride), table_at(a.src[0], s.sets->rows, s.src_stride),
                     s.row_bytes, a.index, s.rows);
}

static kvprim_store_desc store_desc(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    const auto cache = [&](int kv) { return table_at(a.dst[kv], s.sets->rows, s.dst_stride); };
    const auto input = [&](int kv) { return table_at(a.src[kv], s.rows, s.src_stride); };
    kvprim_store_desc d = store_of(cache(0), input(0), s.row_bytes, a.index, s.rows);
    if (s.op == store)
        d.v_cache = cache(1), d.v = input(1), d.v_bytes = s.row_bytes;
    return d;
}

template <bool PDL> static void enqueue_kvprim(const shape &s, int i)
{
    if (s.op == gather)
        call_kvprim(kvprim_cuda_gather, gather_desc(s, i), PDL);
    else
        call_kvprim(kvprim_cuda_store, store_desc(s, i), PDL);
}

/* ---- contenders ---- */

/* The rows that a launch moves: those of K, then those of V. */
struct moved_rows {
    shape s;
    addresses a;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t r = n % s.rows, indexed = a.index[r], kv = n / s.rows;
        return {a.dst[kv] + (s.op == gather ? r : indexed) * s.dst_stride,
                a.src[kv] + (s.op == gather ? indexed : r) * s.src_stride, s.row_bytes};
    }
};

static contender contend(const char *name, const shape &s, const enqueue_fn &enqueue)
{
    const double bytes = 2.0 * double(output_bytes(s));
    contender c = {name, [s, enqueue](int i) { enqueue(s, i); }, bytes, launches_for(bytes)};
    check_pieces(c, operation_names[s.op] + (" of " + rows_name(s.row_bytes, s.rows)), s.rows * tensors_of(s.op),
                 [s](int i) {
                     return moved_rows{s, addresses_of(s, i)};
                 });
    return c;
}

/* ---- the grid ---- */

struct point {
    operation op;
    int64_t row_bytes, rows;
    double kvprim[2], best[2]; /* us, of the best opponent; without and with PDL */
};

static std::vector<int64_t> grid_rows()
{
    if (quick)
        return {1, 48, 1024, 65536, 200000};
    return {1, 8, 48, 333, 1024, 3000, 16384, 65536, 200000};
}

/* kvprim's time as a part of the best opponent's, both without or both with PDL. */
template <int pdl> static double ratio(const point &p)
{
    return p.kvprim[pdl] / p.best[pdl];
}

static double best_ways(const point &p)
{
    return std::min(p.kvprim[0], p.kvprim[1]) / std::min(p.best[0], p.best[1]);
}

/* mini-sglang gathers without PDL, SGLang stores with it. */
static double best_to_shipped(const point &p)
{
    return std::min(p.kvprim[0], p.kvprim[1]) / p.best[p.op == gather ? 0 : 1];
}

static double pdl_to_off(const point &p)
{
    return p.kvprim[1] / p.kvprim[0];
}

/* `c`: kvprim and its opponents without PDL, then all with it. */
static void print_point(const point &p, const std::vector<contender> &c)
{
    printf("%6lld %7lld", (long long)p.row_bytes, (long long)p.rows);
    for (size_t k = 0; k < c.size(); k++) {
        printf(" %9.3f", c[k].us);
        if ((k + 1) % (c.size() / 2) == 0)
            printf(" %6.3f |", k + 1 < c.size() ? ratio<0>(p) : ratio<1>(p));
    }
    printf(" %6.3f %7.3f %6.0f\n", best_ways(p), pdl_to_off(p), gb_per_s(c[0]));
}

static point measure_point(const shape &s, const opponent &o)
{
    std::vector<contender> c;
    for (const bool pdl : {false, true}) {
        c.push_back(contend("kvprim", s, pdl ? enqueue_kvprim<true> : enqueue_kvprim<false>));
        const bool with_v = s.op == store;
        c.push_back(contend("mini-sglang", s,
                            s.op == gather ? gather_by(o.mini_gather[pdl]) : store_by(o.mini_store[with_v][pdl])));
        if (s.op != gather)
            c.push_back(contend("SGLang", s, store_by(o.sglang_store[with_v][pdl])));
    }
    measure(c);
    point p = {s.op, s.row_bytes, s.rows, {}, {}};
    const size_t ways = c.size() / 2;
    for (size_t pdl = 0; pdl < 2; pdl++) {
        p.kvprim[pdl] = c[pdl * ways].us;
        p.best[pdl] = c[pdl * ways + 1].us;
        for (size_t k = 2; k < ways; k++)
            p.best[pdl] = std::min(p.best[pdl], c[pdl * ways + k].us);
    }
    print_point(p, c);
    return p;
}

/* What is promised of points: the worst value, or the mean. */
struct target {
    const char *what;
    double (*value)(const point &);
    bool (*in)(const point &);
    bool mean;
    double limit;
};

static std::vector<target> targets_of(operation op)
{
    const auto all = [](const point &) { return true; };
    const auto few = [](const point &p) { return p.rows <= 1024; };
    const auto wide_few = [](const point &p) { return p.row_bytes == 4096 && p.rows >= 8 && p.rows <= 48; };
    const auto many_128 = [](const point &p) { return p.row_bytes == 128 && p.rows >= 16384; };
    const auto many_256 = [](const point &p) { return p.row_bytes == 256 && p.rows >= 16384; };
    if (op == gather)
        return {{"gather / mini-sglang, PDL off", ratio<0>, all, true, 0.97},
                {"gather / mini-sglang, PDL off", ratio<0>, all, false, 1.03},
                {"gather / mini-sglang, PDL off, 128 B, 16,384 rows and more", ratio<0>, many_128, false, 0.62},
                {"gather / mini-sglang, PDL off, 256 B, 16,384 rows and more", ratio<0>, many_256, false, 0.85},
                {"gather / mini-sglang, PDL on", ratio<1>, all, false, 1.04},
                {"gather / mini-sglang, PDL on, to 1,024 rows", ratio<1>, few, true, 0.95},
                {"gather, best way / best way", best_ways, all, true, 0.80},
                {"gather, best way / as shipped (PDL off)", best_to_shipped, all, true, 0.80},
                {"gather, PDL on / off", pdl_to_off, all, false, 1.02}};
    if (op == store_k)
        return {{"store of K alone / best of two, PDL off", ratio<0>, all, true, 0.95},
                {"store of K alone / best of two, PDL off", ratio<0>, all, false, 1.04},
                {"store of K alone / best of two, PDL on", ratio<1>, all, true, 0.95},
                {"store of K alone / best of two, PDL on", ratio<1>, all, false, 1.04},
                {"store of K alone, PDL on / off", pdl_to_off, all, false, 1.02}};
    return {{"store / best of two, PDL off", ratio<0>, all, true, 0.95},
            {"store / best of two, PDL off", ratio<0>, all, false, 1.04},
            {"store / best of two, PDL off, 4,096 B, 8-48 tokens", ratio<0>, wide_few, false, 0.90},
            {"store / best of two, PDL on", ratio<1>, all, true, 0.95},
            {"store / best of two, PDL on", ratio<1>, all, false, 1.04},
            {"store / best of two, PDL on, 4,096 B, 8-48 tokens", ratio<1>, wide_few, false, 0.90},
            {"store / best of two, PDL on, to 1,024 tokens", ratio<1>, few, true, 0.95},
            {"store, PDL on / off", pdl_to_off, all, false, 1.02}};
}

static void judge_points(operation op, const std::vector<point> &points)
{
    for (const target &t : targets_of(op)) {
        std::vector<figure> f;
        for (const point &p : points)
            if (t.in(p))
                f.push_back({t.value(p), rows_name(p.row_bytes, p.rows)});
        t.mean ? judge_mean(t.what, f, t.limit) : judge_worst(t.what, f, '<', t.limit);
    }
}

static void summarise(operation op, const std::vector<point> &points)
{
    static const struct {
        const char *what;
        double (*value)(const point &);
    } rows[] = {{"PDL off", ratio<0>},
                {"PDL on both", ratio<1>},
                {"best way / best way", best_ways},
                {"best way / as shipped", best_to_shipped},
                {"kvprim, PDL / off", pdl_to_off}};
    printf("\n%s, summary %18s %7s %7s\n", operation_names[op], "mean", "lost", "worst");
    for (const auto &row : rows) {
        double logs = 0;
        int lost = 0;
        const point *worst = &points[0];
        for (const point &p : points) {
            logs += std::log(row.value(p));
            lost += row.value(p) > 1;
            if (row.value(p) > row.value(*worst))
                worst = &p;
        }
        printf("%-26s %7.3f %3d/%3zu %7.3f at %s\n", row.what, std::exp(logs / double(points.size())), lost,
               points.size(), row.value(*worst), rows_name(worst->row_bytes, worst->rows).c_str());
    }
}

static void grid(operation op, const std::vector<opponent> &opponents)
{
    const char *const second = op == gather ? "" : "    SGLang";
    std::vector<point> points;
    printf("\n%s: us per launch, and kvprim's time as a part of the best opponent's\n%6s %7s %9s %9s%s  ratio | %9s "
           "%9s%s  ratio |   best PDL/off   GB/s\n",
           operation_names[op], "row B", "rows", "kvprim", "mini", second, "PDL", "mini", second);
    for (const opponent &o : opponents) {
        const index_sets sets(indexed_rows(op, o.row_bytes), grid_rows().back());
        for (const int64_t rows : grid_rows()) {
            const shape s = packed(op, o.row_bytes, rows, sets);
            if (output_bytes(s) <= most_output)
                points.push_back(measure_point(s, o));
        }
    }
    summarise(op, points);
    judge_points(op, points);
}

/* ---- one row over and over ---- */

/* Every warp then writes to, or reads from, the same lines of the L2 cache. */
static void repeat_first_rows(index_sets &sets)
{
    for (auto set = sets.host.begin(); set != sets.host.end(); set += sets.count)
        std::fill(set, set + sets.count, *set);
    sets.device = upload(sets.host);
}

static void repeated()
{
    std::vector<figure> figures;
    printf("\none row over and over, its number repeated: us\n%7s %6s %7s %9s %9s %8s\n", "", "row B", "rows", "kvprim",
           "PDL", "PDL/off");
    for (const operation op : {gather, store, store_k})
        for (const int64_t row_bytes : {128, 576, 1152, 2048}) {
            index_sets sets(indexed_rows(op, row_bytes), 200000);
            repeat_first_rows(sets);
            for (const int64_t rows : {3000, 200000}) {
                const shape s = packed(op, row_bytes, rows, sets);
                std::vector<contender> c = {contend("kvprim", s, enqueue_kvprim<false>),
                                            contend("kvprim+PDL", s, enqueue_kvprim<true>)};
                for (contender &one : c)
                    if (op != gather) /* any row may win */
                        one.poison = one.verify = {};
                measure(c);
                printf("%7s %6lld %7lld %9.3f %9.3f %8.3f\n", operation_names[op], (long long)row_bytes,
                       (long long)rows, c[0].us, c[1].us, c[1].us / c[0].us);
                figures.push_back({c[1].us / c[0].us, operation_names[op] + (" " + rows_name(row_bytes, rows))});
            }
        }
    judge_worst("one row over and over, PDL on / off", figures, '<', 1.02);
}

/* ---- others: CUB, and a copy for each row ---- */

static void others_point(const shape &s)
{
    std::vector<contender> c = {contend("kvprim", s, enqueue_kvprim<false>), contend("CUB", s, enqueue_cub)};
    c[1].launches = 16;
    if (s.rows <= 64) {
        c.push_back(contend("cudaMemcpyAsync", s, enqueue_copy_each));
        c[2].launches = 8;
    }
    measure(c);
    printf("%6lld %7lld %9.3f %9.3f %7.1f", (long long)s.row_bytes, (long long)s.rows, c[0].us, c[1].us,
           c[1].us / c[0].us);
    if (c.size() > 2)
        printf(" %14.3f %7.1f", c[2].us, c[2].us / c[0].us);
    printf("\n");
}

static void others()
{
    printf("\ngather by other means: us, and times kvprim's\n%6s %7s %9s %9s %7s %14s %7s\n", "row B", "rows", "kvprim",
           "CUB", "", "memcpy each", "");
    for (const int64_t row_bytes : {128, 2048, 14336}) {
        const index_sets sets(indexed_rows(gather, row_bytes), 65536);
        for (const int64_t rows : {1, 8, 64, 1024, 65536})
            others_point(packed(gather, row_bytes, rows, sets));
    }
}

/* ---- large moves against one large copy ---- */

static std::vector<contender> copies()
{
    return copy_contenders(cache_memory[0], table_memory, cache_bytes);
}

/* Returns the part of the copy's speed. */
static double large_point(const shape &s)
{
    std::vector<contender> c = copies();
    c.insert(c.begin(), contend("kvprim", s, enqueue_kvprim<false>));
    measure(c);
    const double got = gb_per_s(c[0]), copy = std::max(gb_per_s(c[1]), gb_per_s(c[2]));
    printf("%6s %6lld %8lld %9.2f %9.0f %9.0f %7.3f\n", operation_names[s.op], (long long)s.row_bytes,
           (long long)s.rows, c[0].us, got, copy, got / copy);
    return got / copy;
}

static void large()
{
    constexpr int64_t most_rows = 4 << 20; /* the host makes the indices */
    printf("\nlarge moves, PDL off, against a device-to-device cudaMemcpyAsync of 256 MiB, the faster of graph and "
           "stream\n%6s %6s %8s %9s %9s %9s %7s\n",
           "", "row B", "rows", "us", "GB/s", "copy GB/s", "ratio");
    for (const operation op : {gather, store}) {
        std::vector<figure> figures[4]; /* of rows of 128, 256, 512, and of 1,024 bytes and more */
        for (const int64_t row_bytes : {128, 256, 512, 1024, 1152, 2048, 4096, 8192, 14336})
            for (const int64_t output : {128 * MiB, 512 * MiB, 2 * GiB}) {
                const int64_t row = row_bytes * tensors_of(op), rows = (output + row - 1) / row;
                if (rows > most_rows || (quick && output > 128 * MiB))
                    continue;
                const index_sets sets(indexed_rows(op, row_bytes), rows);
                const double part = large_point(packed(op, row_bytes, rows, sets));
                const int which = row_bytes >= 1024 ? 3 : row_bytes >= 512 ? 2 : row_bytes >= 256 ? 1 : 0;
                figures[which].push_back({part, rows_name(row_bytes, rows)});
            }
        const std::string what = std::string("large ") + operation_names[op] + "s / copy, GB/s, rows of ";
        judge_worst(what + "1024 B and more", figures[3], '>', 0.96);
        judge_worst(what + "512 B", figures[2], '>', 0.90);
        judge_worst(what + "256 B", figures[1], '>', 0.85);
        judge_worst(what + "128 B", figures[0], '>', 0.74);
    }
}

/* ---- the order of slots ---- */

/* Rows in runs that follow each other, and lie anywhere; mixed: the same rows in random order. */
static index_sets in_runs(int64_t rows, int64_t count, int64_t run, bool mixed = false)
{
    const index_sets starts(rows / run, (count + run - 1) / run), turns(count, count);
    index_sets sets(rows, count);
    for (int64_t n = 0; n < sets.sets * count; n++) {
        const int64_t i = mixed ? turns.host[size_t(n)] : n % count;
        sets.host[size_t(n)] = int32_t(starts.host[size_t(n / count * starts.count + i / run)] * run + i % run);
    }
    sets.device = upload(sets.host);
    return sets;
}

/* What the memory's clock and width allow. */
static double specified_gb_per_s()
{
    int khz, bits;
    CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, 0));
    CUDA(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    return 2e-6 * khz * bits / 8; /* two transfers a clock */
}

/* Returns how much longer random rows of the whole table take than rows in order. */
static double order_point(operation op, int64_t row_bytes, int64_t rows)
{
    const int64_t all = indexed_rows(op, row_bytes);
    const index_sets in_order = in_runs(all, rows, rows), pages = in_runs(all, rows, 16),
                     near = in_runs(all, rows, rows, true), far(all, rows);
    std::vector<contender> c = copies();
    for (const index_sets *const sets : {&in_order, &pages, &near, &far})
        c.push_back(contend("kvprim", packed(op, row_bytes, rows, *sets), enqueue_kvprim<false>));
    measure(c);
    const double copy = std::max(gb_per_s(c[0]), gb_per_s(c[1])), peak = specified_gb_per_s();
    printf("%6s %6lld %7lld", operation_names[op], (long long)row_bytes, (long long)rows);
    for (size_t k = 2; k < c.size(); k++)
        printf(" | %6.0f %5.3f %4.1f%%", gb_per_s(c[k]), gb_per_s(c[k]) / copy, 100 * gb_per_s(c[k]) / peak);
    printf(" | %6.3f %6.3f\n", c[4].us / c[2].us, c[5].us / c[2].us);
    return c[5].us / c[2].us;
}

/* mini-sglang's report expects of its store 70 to 75 % of the peak with slots in order, 55 to 65 % with random ones,
   which take 10 to 20 % longer. */
static void order()
{
    std::vector<figure> wide;
    printf("\nthe order of slots, PDL off: GB/s, as a part of one copy's, and of the specified %.0f GB/s; random rows "
           "/ in "
           "order, time\n%6s %6s %7s | %-18s | %-18s | %-18s | %-18s | %6s %6s\n",
           specified_gb_per_s(), "", "row B", "rows", "in order", "pages of 16", "random, these rows",
           "random, anywhere", "these", "any");
    for (const operation op : {store, gather})
        for (const int64_t row_bytes : {128, 256, 512, 1024, 2048, 4096})
            for (const int64_t rows : {65536, 262144}) {
                if (quick && rows != 65536)
                    continue;
                const double ratio = order_point(op, row_bytes, rows);
                if (op == store && row_bytes >= 1024)
                    wide.push_back({ratio, rows_name(row_bytes, rows)});
            }
    judge_worst("store, random slots / in order, time, from 1,024 B on", wide, '<', 1.10);
}

/* ---- odd rows ---- */

static int64_t round_up(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) / to * to;
}

/* Odd rows: packed, with the stride rounded up to 16 and to 128, and rows as wide as the last of these. Returns the
   ratio of the second to the last. */
static double odd_point(operation op, int64_t row_bytes, int64_t rows)
{
    const int64_t wide = round_up(row_bytes, 128);
    std::vector<std::unique_ptr<index_sets>> sets;
    std::vector<contender> c;
    for (const int64_t stride : {row_bytes, round_up(row_bytes, 16), wide, wide}) {
        sets.push_back(std::make_unique<index_sets>(indexed_rows(op, stride), rows));
        const int64_t bytes = c.size() == 3 ? wide : row_bytes;
        c.push_back(
            contend("kvprim", {op, bytes, rows, stride, stride, 0, 0, sets.back().get()}, enqueue_kvprim<false>));
    }
    measure(c);
    printf("%6s %6lld %7lld", operation_names[op], (long long)row_bytes, (long long)rows);
    for (const contender &k : c)
        printf(" %9.0f", gb_per_s(k));
    const double ratio = gb_per_s(c[1]) / gb_per_s(c[3]);
    printf(" %7.3f\n", ratio);
    return ratio;
}

static void odd()
{
    printf("\nodd rows, PDL off: GB/s of rows packed, with strides that are multiples of 16 and of 128, and of rows of "
           "the next\nmultiple of 128; ratio of the second to the last\n%6s %6s %7s %9s %9s %9s %9s %7s\n",
           "", "row B", "rows", "packed", "16", "128", "wide", "ratio");
    for (const operation op : {gather, store}) {
        std::vector<figure> many;
        for (const int64_t row_bytes : {132, 576, 656, 1000, 1170})
            for (const int64_t rows : {1024, 65536, 262144}) {
                const double ratio = quick && rows != 262144 ? 0 : odd_point(op, row_bytes, rows);
                if (rows == 262144)
                    many.push_back({ratio, rows_name(row_bytes, rows)});
            }
        judge_worst(std::string(operation_names[op]) + ", odd rows / next multiple of 128, GB/s", many, '>', 0.85);
    }
}

/* ---- misaligned bases ---- */

static void misaligned_point(operation op, int64_t row_bytes, int64_t rows, const index_sets &sets,
                             std::vector<figure> *figures)
{
    static const char *const side_names[] = {"src", "dst", "both"};
    const std::vector<int64_t> offsets = quick ? std::vector<int64_t>{1, 8} : std::vector<int64_t>{1, 2, 4, 8, 15};
    const shape aligned = packed(op, row_bytes, rows, sets);
    std::vector<contender> c = {contend("kvprim", aligned, enqueue_kvprim<false>)};
    for (int side = 0; side < 3; side++)
        for (const int64_t offset : offsets) {
            shape s = aligned;
            s.src_offset = side != 1 ? offset : 0;
            s.dst_offset = side != 0 ? offset : 0;
            c.push_back(contend("kvprim", s, enqueue_kvprim<false>));
        }
    measure(c);
    for (int side = 0; side < 3; side++) {
        printf("%6s %6lld %7lld %5s", operation_names[op], (long long)row_bytes, (long long)rows, side_names[side]);
        for (size_t k = 0; k < offsets.size(); k++) {
            const double ratio = c[0].us / c[1 + size_t(side) * offsets.size() + k].us;
            printf("  +%-2lld %5.3f", (long long)offsets[k], ratio);
            figures->push_back(
                {ratio, rows_name(row_bytes, rows) + " " + side_names[side] + " +" + std::to_string(offsets[k])});
        }
        printf("\n");
    }
}

static void misaligned()
{
    printf("\nbases misaligned by some bytes, PDL off: GB/s as a part of the aligned GB/s\n");
    for (const operation op : {gather, store}) {
        std::vector<figure> figures;
        for (const int64_t row_bytes : {256, 1024, 2048, 8192}) {
            /* one row less: the last one must not reach past the memory */
            const index_sets sets(indexed_rows(op, row_bytes) - 1, 65536);
            for (const int64_t rows : {64, 1024, 65536})
                if (!quick || rows != 1024)
                    misaligned_point(op, row_bytes, rows, sets, &figures);
        }
        judge_worst(std::string(operation_names[op]) + ", misaligned / aligned GB/s", figures, '>', 0.6);
    }
}

/* ---- host time of a call ---- */

static void host()
{
    constexpr int64_t row_bytes = 2048, rows = 8; /* the GPU finishes a call before the host does */
    const index_sets from(indexed_rows(gather, row_bytes), rows), to(indexed_rows(store, row_bytes), rows);
    const kvprim_gather_desc g = gather_desc(packed(gather, row_bytes, rows, from), 0);
    const kvprim_store_desc s = store_desc(packed(store, row_bytes, rows, to), 0);
    const kvprim_cuda_launch off = on_stream(), on = on_stream(true);
    const void *const empty = reinterpret_cast<const void *>(empty_kernel);
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(1), config.blockDim = dim3(block_threads), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    std::vector<host_call> calls = {
        {"cudaLaunchKernel", [=] { CUDA(cudaLaunchKernel(empty, 1, block_threads, nullptr, 0, stream)); }},
        {"cudaLaunchKernelExC, PDL", [&] { CUDA(cudaLaunchKernelExC(&config, empty, nullptr)); }},
        {"kvprim_cuda_gather", [&] { check_kvprim(kvprim_cuda_gather(&g, &off)); }},
        {"kvprim_cuda_gather, PDL", [&] { check_kvprim(kvprim_cuda_gather(&g, &on)); }},
        {"kvprim_cuda_store", [&] { check_kvprim(kvprim_cuda_store(&s, &off)); }},
        {"kvprim_cuda_store, PDL", [&] { check_kvprim(kvprim_cuda_store(&s, &on)); }}};
    measure_host("host time of one call", calls, 301);
    for (size_t k = 2; k < calls.size(); k++)
        judge(std::string("host: us of ") + calls[k].name + " above a bare launch", calls[k].us - calls[k % 2].us, '<',
              0.3, std::string("against ") + calls[k % 2].name);
}

/* ---- the program ---- */

static void open_all()
{
    size_t free_bytes, total_bytes;
    open_gpu(18 * GiB); /* two outputs of 2 GiB in each cache, and 2 GiB for CUB's memory and indices */
    CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    cache_bytes = std::min(8 * GiB, (int64_t(free_bytes) - 2 * GiB) / 4 / GiB * GiB);
    table_bytes = 2 * cache_bytes;
    printf("tables of %lld GiB, caches of %lld GiB\n", (long long)(table_bytes / GiB), (long long)(cache_bytes / GiB));
    table_memory = allocate_hashed(table_bytes + slack);
    for (char *&cache : cache_memory)
        cache = allocate_hashed(cache_bytes + slack);
    CUDA(cudaMalloc(&cub_memory, cub_memory_bytes));
    std::vector<contender> empty = {{"empty", enqueue_empty<false>}, {"empty+PDL", enqueue_empty<true>}};
    measure_copy(cache_memory[0], table_memory, cache_bytes);
    measure(empty);
    printf("empty kernel in a graph: %.3f us, with PDL %.3f us\n", empty[0].us, empty[1].us);
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all,
                       {{"gather", [] { grid(gather, opponents_for(bench_sizes())); }},
                        {"store", [] { grid(store, opponents_for(bench_sizes())); }},
                        {"store_k", [] { grid(store_k, opponents_for<128, 512, 576, 656, 1152, 4096>()); }},
                        {"repeated", repeated},
                        {"others", others},
                        {"large", large},
                        {"order", order},
                        {"odd", odd},
                        {"misaligned", misaligned},
                        {"host", host}});
}

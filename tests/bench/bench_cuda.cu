/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_gather and kvprim_cuda_store with other ways to move rows on one GPU. Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_cuda.cu -o build/bench_cuda
       build/bench_cuda [--quick] [--only gather|store|others|large|odd|misaligned|host]

   Times are microseconds per launch inside a replayed CUDA graph of 64 launches (24 if one moves more than 64 MB), over
   8 index sets and rotating dense buffers. They are medians of repetitions in which the contenders take turns. The
   table and the caches hold hashed bytes. Before a contender is timed, the rows of its last launch are compared with
   them. GB/s counts bytes read plus bytes written.

       warp    one warp per row part (gather) or per token, K then V (store); each step loads, then stores
       split   store: one warp per part of a token, all loads of K and V before the first store
       +PDL    waits for the previous kernel first, and lets the next one start last or first: the better of the two */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include <memory>
#include <type_traits>
#include <cub/device/device_memcpy.cuh>
#include <thrust/iterator/constant_iterator.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

constexpr int64_t MiB = 1 << 20, GiB = 1 << 30;
constexpr int64_t table_bytes = 16 * GiB; /* gather's dense side; store reads K from its first half, V from the other */
constexpr int64_t cache_bytes = 8 * GiB;  /* for K, and again for V; gather writes to K's */
constexpr int64_t slack = 4096;           /* past the end of each, for misaligned bases */
constexpr int64_t copy_bytes = 256 * MiB; /* for the cudaMemcpyAsync that large moves are compared with */
constexpr int64_t most_output = 2 * GiB;
constexpr int index_sets_count = 8;

static char *table_memory, *cache_memory[2], *cub_memory;
constexpr size_t cub_memory_bytes = 256 * MiB;

/* Returns 8 bytes of the table, those at number `word`; also the source of random numbers (splitmix64). */
__host__ __device__ static uint64_t hash(uint64_t word)
{
    uint64_t z = (word + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- shapes: which bytes a launch moves ---- */

/* Eight lists of `rows` distinct random rows of a table of table_rows rows. Set s starts at s * rows. */
struct index_sets {
    int64_t table_rows, rows;
    std::vector<int32_t> host;
    int32_t *device;

    index_sets(int64_t in_table, int64_t in_set);
    ~index_sets()
    {
        CUDA(cudaFree(device));
    }
    index_sets(const index_sets &) = delete;
    index_sets &operator=(const index_sets &) = delete;
};

/* Maps the numbers of `bits` bits one to one: every step can be undone. */
static uint64_t shuffled(uint64_t x, uint64_t key, int bits)
{
    const uint64_t mask = (uint64_t(1) << bits) - 1;
    for (int round = 0; round < 3; round++) {
        x = (x + (key >> 16 * round)) & mask;
        x = x * 0x94d049bb133111ebu & mask;
        x ^= x >> (bits + 1) / 2;
    }
    return x;
}

index_sets::index_sets(int64_t in_table, int64_t in_set)
    : table_rows(in_table), rows(in_set), host(size_t(index_sets_count * in_set))
{
    int bits = 1;
    while (int64_t(1) << bits < table_rows)
        bits++;
    for (int set = 0; set < index_sets_count; set++)
        for (int64_t i = 0; i < rows; i++) {
            uint64_t row = uint64_t(i);
            do
                row = shuffled(row, hash(uint64_t(set)), bits);
            while (row >= uint64_t(table_rows)); /* still one to one: walks the permutation's cycle */
            host[size_t(set * rows + i)] = int32_t(row);
        }
    CUDA(cudaMalloc(&device, host.size() * sizeof host[0]));
    CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof host[0], cudaMemcpyHostToDevice));
}

enum operation { gather, store };

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
    return s.rows * s.row_bytes * (s.op == store ? 2 : 1);
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
    const int64_t region = (s.rows * stride + 16 + 255) / 256 * 256;
    const int64_t dense = i % (cache_bytes / region) * region; /* where in the dense buffers of 8 GiB */
    const int64_t set = i % index_sets_count * s.sets->rows;
    addresses a = {};
    for (int kv = 0; kv < 2; kv++) {
        a.src[kv] = table_memory + s.src_offset + (s.op == store ? kv * (table_bytes / 2) + dense : 0);
        a.dst[kv] = cache_memory[kv] + s.dst_offset + (s.op == gather ? dense : 0);
    }
    a.index = s.sets->device + set;
    a.host_index = s.sets->host.data() + set;
    return a;
}

/* ---- opponents ---- */

/* Whether an opponent uses programmatic dependent launch, and when it lets the next kernel start. */
enum { without_pdl, trigger_last, trigger_first };

template <int PDL> __device__ static void pdl_wait()
{
#if __CUDA_ARCH__ >= 900
    if constexpr (PDL == trigger_first)
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if constexpr (PDL != 0)
        asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int PDL> __device__ static void pdl_launch()
{
#if __CUDA_ARCH__ >= 900
    if constexpr (PDL == trigger_last)
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr int block_threads = 128;

/* The type that a lane moves at once when a warp moves `bytes`. */
template <int bytes>
using lane_word = std::conditional_t<bytes % 512 == 0, uint4, std::conditional_t<bytes % 256 == 0, uint2, unsigned>>;

template <int row_bytes> constexpr int parts_of = row_bytes % 2048 == 0 ? 4 : row_bytes % 1024 == 0 ? 2 : 1;

__device__ static unsigned warp_number()
{
    return blockIdx.x * (block_threads / 32) + threadIdx.x / 32;
}

template <int bytes> __device__ static void copy_by_warp(char *dst, const char *src)
{
    using word = lane_word<bytes>;
    constexpr int steps = bytes / int(32 * sizeof(word));
    static_assert(steps * 32 * sizeof(word) == bytes, "whole steps");
    word *const to = reinterpret_cast<word *>(dst) + threadIdx.x % 32;
    const word *const from = reinterpret_cast<const word *>(src) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < steps; i++)
        to[32 * i] = from[32 * i];
}

struct gather_params {
    char *out;
    const char *table;
    const int32_t *index;
    unsigned warps;
};

template <int row_bytes, int PDL>
__global__ static void __launch_bounds__(block_threads) gather_warp(const __grid_constant__ gather_params p)
{
    constexpr int parts = parts_of<row_bytes>, bytes = row_bytes / parts;
    const unsigned warp = warp_number();
    pdl_wait<PDL>();
    if (warp < p.warps) {
        const int64_t row = p.index[warp / parts];
        copy_by_warp<bytes>(p.out + int64_t(warp) * bytes, p.table + row * row_bytes + int(warp % parts) * bytes);
    }
    pdl_launch<PDL>();
}

struct store_params {
    char *k_cache, *v_cache;
    const char *k, *v;
    const int32_t *slot;
    int64_t cache_stride, input_stride;
    unsigned warps;
};

template <int row_bytes, int PDL>
__global__ static void __launch_bounds__(block_threads) store_warp(const __grid_constant__ store_params p)
{
    const unsigned warp = warp_number();
    pdl_wait<PDL>();
    if (warp < p.warps) {
        const int64_t to = p.slot[warp] * p.cache_stride, from = warp * p.input_stride;
        copy_by_warp<row_bytes>(p.k_cache + to, p.k + from);
        copy_by_warp<row_bytes>(p.v_cache + to, p.v + from);
    }
    pdl_launch<PDL>();
}

template <int bytes>
__device__ static void copy_two_by_warp(char *k_dst, char *v_dst, const char *k_src, const char *v_src)
{
    using word = lane_word<bytes>;
    constexpr int steps = bytes / int(32 * sizeof(word));
    const unsigned lane = threadIdx.x % 32;
    word k[steps], v[steps];
#pragma unroll
    for (int i = 0; i < steps; i++) {
        k[i] = reinterpret_cast<const word *>(k_src)[32 * i + lane];
        v[i] = reinterpret_cast<const word *>(v_src)[32 * i + lane];
    }
#pragma unroll
    for (int i = 0; i < steps; i++) {
        reinterpret_cast<word *>(k_dst)[32 * i + lane] = k[i];
        reinterpret_cast<word *>(v_dst)[32 * i + lane] = v[i];
    }
}

template <int row_bytes, int PDL>
__global__ static void __launch_bounds__(block_threads) store_split(const __grid_constant__ store_params p)
{
    constexpr int parts = parts_of<row_bytes>, bytes = row_bytes / parts;
    const unsigned warp = warp_number();
    pdl_wait<PDL>();
    if (warp < p.warps) {
        const int part = int(warp % parts) * bytes;
        const int64_t to = p.slot[warp / parts] * p.cache_stride + part, from = warp / parts * p.input_stride + part;
        copy_two_by_warp<bytes>(p.k_cache + to, p.v_cache + to, p.k + from, p.v + from);
    }
    pdl_launch<PDL>();
}

static cudaLaunchConfig_t launch_config(unsigned blocks, cudaLaunchAttribute *pdl)
{
    pdl->id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl->val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(block_threads);
    config.stream = stream;
    config.attrs = pdl;
    return config;
}

template <typename params> static void launch(void (*kernel)(params), const params &p, bool pdl)
{
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = launch_config((p.warps + block_threads / 32 - 1) / (block_threads / 32), &attribute);
    config.numAttrs = pdl;
    CUDA(cudaLaunchKernelEx(&config, kernel, p));
}

template <int row_bytes, int PDL> static void enqueue_gather_warp(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    launch(gather_warp<row_bytes, PDL>,
           gather_params{a.dst[0], a.src[0], a.index, unsigned(s.rows * parts_of<row_bytes>)}, PDL != 0);
}

static store_params store_params_of(const shape &s, int i, int parts)
{
    const addresses a = addresses_of(s, i);
    return {a.dst[0], a.dst[1], a.src[0], a.src[1], a.index, s.dst_stride, s.src_stride, unsigned(s.rows * parts)};
}

template <int row_bytes, int PDL> static void enqueue_store_warp(const shape &s, int i)
{
    launch(store_warp<row_bytes, PDL>, store_params_of(s, i, 1), PDL != 0);
}

template <int row_bytes, int PDL> static void enqueue_store_split(const shape &s, int i)
{
    launch(store_split<row_bytes, PDL>, store_params_of(s, i, parts_of<row_bytes>), PDL != 0);
}

static void enqueue_copy(int i)
{
    const int64_t at = i % (cache_bytes / copy_bytes) * copy_bytes;
    CUDA(
        cudaMemcpyAsync(cache_memory[0] + at, table_memory + at, size_t(copy_bytes), cudaMemcpyDeviceToDevice, stream));
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

template <bool PDL> static void enqueue_empty(int)
{
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = launch_config(1, &attribute);
    config.numAttrs = PDL;
    CUDA(cudaLaunchKernelEx(&config, empty_kernel));
}

/* ---- kvprim ---- */

static kvprim_table table_at(char *data, int64_t rows, int64_t stride)
{
    kvprim_table t = {};
    t.data = data;
    t.rows = rows;
    t.stride = stride;
    return t;
}

static kvprim_gather_desc gather_desc(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    kvprim_gather_desc d = {};
    d.dst = table_at(a.dst[0], s.rows, s.dst_stride);
    d.src = table_at(a.src[0], s.sets->table_rows, s.src_stride);
    d.row_bytes = s.row_bytes;
    d.index = a.index;
    d.index_type = KVPRIM_I32;
    d.count = s.rows;
    return d;
}

static kvprim_store_desc store_desc(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    kvprim_store_desc d = {};
    d.k_cache = table_at(a.dst[0], s.sets->table_rows, s.dst_stride);
    d.v_cache = table_at(a.dst[1], s.sets->table_rows, s.dst_stride);
    d.k = table_at(a.src[0], s.rows, s.src_stride);
    d.v = table_at(a.src[1], s.rows, s.src_stride);
    d.k_bytes = d.v_bytes = s.row_bytes;
    d.slot = a.index;
    d.slot_type = KVPRIM_I32;
    d.count = s.rows;
    return d;
}

static kvprim_cuda_launch launch_options(bool pdl)
{
    kvprim_cuda_launch options = {};
    options.stream = stream;
    options.pdl = pdl;
    return options;
}

template <bool PDL> static void enqueue_kvprim(const shape &s, int i)
{
    const kvprim_cuda_launch options = launch_options(PDL);
    if (s.op == gather) {
        const kvprim_gather_desc d = gather_desc(s, i);
        check_kvprim(kvprim_cuda_gather(&d, &options));
    } else {
        const kvprim_store_desc d = store_desc(s, i);
        check_kvprim(kvprim_cuda_store(&d, &options));
    }
}

/* ---- verification: a few rows of a contender's last launch ---- */

constexpr int samples = 8;

static int64_t sample_row(const shape &s, int sample)
{
    return sample == 0 ? 0 : sample == 1 ? s.rows - 1 : int64_t(hash(uint64_t(sample)) % uint64_t(s.rows));
}

static char *src_row(const shape &s, const addresses &a, int kv, int64_t r)
{
    return a.src[kv] + (s.op == gather ? a.host_index[r] : r) * s.src_stride;
}

static char *dst_row(const shape &s, const addresses &a, int kv, int64_t r)
{
    return a.dst[kv] + (s.op == gather ? r : a.host_index[r]) * s.dst_stride;
}

static void poison_samples(const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    for (int kv = 0; kv < (s.op == store ? 2 : 1); kv++)
        for (int sample = 0; sample < samples; sample++)
            CUDA(cudaMemsetAsync(dst_row(s, a, kv, sample_row(s, sample)), 0xee, size_t(s.row_bytes), stream));
}

static void verify_row(const char *name, const shape &s, const addresses &a, int kv, int64_t r)
{
    std::vector<unsigned char> got(size_t(s.row_bytes));
    CUDA(cudaMemcpyAsync(got.data(), dst_row(s, a, kv, r), got.size(), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    const uint64_t at = uint64_t(src_row(s, a, kv, r) - table_memory);
    for (size_t b = 0; b < got.size(); b++) {
        const unsigned char expected = (unsigned char)(hash((at + b) / 8) >> (at + b) % 8 * 8);
        if (got[b] == expected)
            continue;
        printf("FAIL %s, %s of %lld rows of %lld B: %s row %lld byte %zu is 0x%02x, expected 0x%02x\n", name,
               s.op == gather ? "gather" : "store", (long long)s.rows, (long long)s.row_bytes, kv ? "V" : "K",
               (long long)r, b, got[b], expected);
        exit(1);
    }
}

static void verify_samples(const char *name, const shape &s, int i)
{
    const addresses a = addresses_of(s, i);
    for (int kv = 0; kv < (s.op == store ? 2 : 1); kv++)
        for (int sample = 0; sample < samples; sample++)
            verify_row(name, s, a, kv, sample_row(s, sample));
}

/* ---- contenders ---- */

typedef void enqueue_fn(const shape &, int i);

static contender contend(const char *name, const shape &s, enqueue_fn *enqueue)
{
    contender c = {};
    c.name = name;
    c.bytes_moved = 2.0 * double(output_bytes(s));
    c.enqueue = [s, enqueue](int i) { enqueue(s, i); };
    c.poison = [s](int i) { poison_samples(s, i); };
    c.verify = [s, name](int i) { verify_samples(name, s, i); };
    c.launches = c.bytes_moved > 64e6 ? 24 : 64;
    return c;
}

static std::string place(int64_t row_bytes, int64_t rows)
{
    return std::to_string(row_bytes) + " B x " + std::to_string(rows);
}

/* ---- the grid ---- */

struct opponent { /* without PDL; with the trigger last; with the trigger first */
    int row_bytes;
    enqueue_fn *gather[3], *store[3], *split[3];
};

template <int row_bytes> static opponent opponents_for()
{
    return {row_bytes,
            {enqueue_gather_warp<row_bytes, without_pdl>, enqueue_gather_warp<row_bytes, trigger_last>,
             enqueue_gather_warp<row_bytes, trigger_first>},
            {enqueue_store_warp<row_bytes, without_pdl>, enqueue_store_warp<row_bytes, trigger_last>,
             enqueue_store_warp<row_bytes, trigger_first>},
            {enqueue_store_split<row_bytes, without_pdl>, enqueue_store_split<row_bytes, trigger_last>,
             enqueue_store_split<row_bytes, trigger_first>}};
}

static const opponent opponents[] = {opponents_for<128>(),  opponents_for<256>(),  opponents_for<512>(),
                                     opponents_for<1024>(), opponents_for<1152>(), opponents_for<2048>(),
                                     opponents_for<4096>(), opponents_for<8192>(), opponents_for<14336>()};

struct point {
    operation op;
    int64_t row_bytes, rows;
    double kvprim[2], best[2]; /* us, of the best opponent */
};
static std::vector<point> points;

static std::vector<int64_t> grid_rows()
{
    if (quick)
        return {1, 64, 1024, 65536, 262144};
    return {1, 8, 64, 256, 1024, 4096, 16384, 65536, 262144};
}

/* In us: of kvprim and of each kind of opponent. With PDL the better trigger counts. */
static void print_point(const point &p, const std::vector<double> us[2], double gb_per_s)
{
    printf("%6lld %7lld", (long long)p.row_bytes, (long long)p.rows);
    for (int pdl = 0; pdl < 2; pdl++) {
        for (const double one : us[pdl])
            printf(" %9.3f", one);
        printf(" %6.3f %s", p.kvprim[pdl] / p.best[pdl], pdl ? "" : "|");
    }
    printf("| %7.3f %6.0f\n", p.kvprim[1] / p.kvprim[0], gb_per_s);
}

static void measure_point(const shape &s, const opponent &o)
{
    std::vector<contender> c = {contend("kvprim", s, enqueue_kvprim<false>),
                                contend("kvprim+PDL", s, enqueue_kvprim<true>)};
    for (enqueue_fn *const warp : s.op == gather ? o.gather : o.store)
        c.push_back(contend("warp", s, warp));
    for (enqueue_fn *const split : o.split)
        if (s.op == store)
            c.push_back(contend("split", s, split));
    measure(c);
    std::vector<double> us[2] = {{c[0].us}, {c[1].us}};
    point p = {s.op, s.row_bytes, s.rows, {c[0].us, c[1].us}, {c[2].us, std::min(c[3].us, c[4].us)}};
    for (size_t k = 2; k < c.size(); k += 3) {
        us[0].push_back(c[k].us);
        us[1].push_back(std::min(c[k + 1].us, c[k + 2].us));
        for (int pdl = 0; pdl < 2; pdl++)
            p.best[pdl] = std::min(p.best[pdl], us[pdl].back());
    }
    points.push_back(p);
    print_point(p, us, gb_per_s(c[0]));
}

static void grid(operation op)
{
    const char *const split = op == store ? "     split" : "";
    printf(
        "\n%s: us per launch, and kvprim's time as a part of the best opponent's\n%6s %7s %9s %9s%s  ratio | %9s %9s%s"
        "  ratio | PDL/off   GB/s\n",
        op == gather ? "gather" : "store", "row B", "rows", "kvprim", "warp", split, "PDL", "warp", split);
    for (const opponent &o : opponents) {
        const index_sets sets(indexed_rows(op, o.row_bytes), grid_rows().back());
        for (const int64_t rows : grid_rows()) {
            const shape s = packed(op, o.row_bytes, rows, sets);
            if (output_bytes(s) <= most_output)
                measure_point(s, o);
        }
    }
}

typedef std::function<bool(const point &)> point_filter;
typedef std::function<double(const point &)> point_value;

static std::vector<figure> figures(operation op, const point_filter &in, const point_value &value)
{
    std::vector<figure> f;
    for (const point &p : points)
        if (p.op == op && in(p))
            f.push_back({value(p), place(p.row_bytes, p.rows)});
    return f;
}

static bool every_point(const point &)
{
    return true;
}

static bool few_rows(const point &p)
{
    return p.rows <= 1024;
}

static double ratio_off(const point &p)
{
    return p.kvprim[0] / p.best[0];
}

static double ratio_on(const point &p)
{
    return p.kvprim[1] / p.best[1];
}

static double ratio_pdl(const point &p)
{
    return p.kvprim[1] / p.kvprim[0];
}

/* The opponent checks nothing, so the time that kvprim takes longer contains its check. Uses sizes that suit the
   opponent. */
static void judge_bounds_check()
{
    judge_worst("bounds check: us above the opponent at 64 rows",
                figures(
                    gather,
                    [](const point &p) {
                        return p.rows == 64 && p.row_bytes <= 2048 && (p.row_bytes & (p.row_bytes - 1)) == 0;
                    },
                    [](const point &p) { return p.kvprim[0] - p.best[0]; }),
                '<', 0.03);
}

static void judge_gather()
{
    const auto many_of = [](int64_t row_bytes) {
        return [row_bytes](const point &p) { return p.row_bytes == row_bytes && p.rows >= 16384; };
    };
    judge_worst("gather / warp, PDL off", figures(gather, every_point, ratio_off), '<', 1.06);
    judge_mean("gather / warp, PDL off", figures(gather, every_point, ratio_off), 0.93);
    judge_worst("gather / warp, PDL off, 128 B, 16,384 rows and more", figures(gather, many_of(128), ratio_off), '<',
                0.62);
    judge_worst("gather / warp, PDL off, 256 B, 16,384 rows and more", figures(gather, many_of(256), ratio_off), '<',
                0.85);
    judge_worst("gather / warp, PDL on", figures(gather, every_point, ratio_on), '<', 1.04);
    judge_mean("gather / warp, PDL on, to 1,024 rows", figures(gather, few_rows, ratio_on), 0.95);
    judge_worst("gather, PDL on / off", figures(gather, every_point, ratio_pdl), '<', 1.02);
    judge_bounds_check();
}

static void judge_store()
{
    const auto wide_few = [](const point &p) { return p.row_bytes == 4096 && p.rows >= 8 && p.rows <= 64; };
    for (int pdl = 0; pdl < 2; pdl++) {
        const point_value ratio = pdl ? ratio_on : ratio_off;
        const std::string name = pdl ? "store / best of two, PDL on" : "store / best of two, PDL off";
        judge_worst(name, figures(store, every_point, ratio), '<', 1.06);
        judge_mean(name, figures(store, every_point, ratio), 1.00);
        judge_worst(name + ", 4,096 B, 8-64 tokens", figures(store, wide_few, ratio), '<', 0.90);
    }
    judge_mean("store / best of two, PDL on, to 1,024 tokens", figures(store, few_rows, ratio_on), 0.95);
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

/* A job without rows to verify. */
static contender contend_simply(const char *name, void (*enqueue)(int))
{
    contender c = {};
    c.name = name;
    c.enqueue = enqueue;
    return c;
}

static contender contend_copy(bool plain)
{
    contender c = contend_simply("copy", enqueue_copy);
    c.launches = 24;
    c.plain = plain;
    return c;
}

static double copy_gb_per_s(const contender &graph, const contender &plain)
{
    return 2e-3 * double(copy_bytes) / std::min(graph.us, plain.us);
}

struct large_figures {
    int64_t from_bytes; /* of a row */
    double target;
    std::vector<figure> f[2]; /* by operation */
};
static large_figures large_rows[] = {{1024, 0.96, {}}, {512, 0.90, {}}, {256, 0.85, {}}, {128, 0.74, {}}};

static void large_point(const shape &s)
{
    std::vector<contender> c = {contend("kvprim", s, enqueue_kvprim<false>), contend_copy(false), contend_copy(true)};
    measure(c);
    const double got = gb_per_s(c[0]), copy = copy_gb_per_s(c[1], c[2]);
    printf("%6s %6lld %8lld %9.2f %9.0f %9.0f %7.3f\n", s.op == gather ? "gather" : "store", (long long)s.row_bytes,
           (long long)s.rows, c[0].us, got, copy, got / copy);
    for (large_figures &l : large_rows)
        if (s.row_bytes >= l.from_bytes) {
            l.f[s.op].push_back({got / copy, place(s.row_bytes, s.rows)});
            return;
        }
}

static void large()
{
    constexpr int64_t most_rows = 4 << 20; /* the host makes the indices */
    printf("\nlarge moves, PDL off, against a device-to-device cudaMemcpyAsync of 256 MiB, the faster of graph and "
           "stream\n"
           "%6s %6s %8s %9s %9s %9s %7s\n",
           "", "row B", "rows", "us", "GB/s", "copy GB/s", "ratio");
    for (const operation op : {gather, store})
        for (const opponent &o : opponents)
            for (const int64_t output : {128 * MiB, 512 * MiB, 2 * GiB}) {
                const int64_t row = o.row_bytes * (op == store ? 2 : 1), rows = (output + row - 1) / row;
                if (rows > most_rows || (quick && output > 128 * MiB))
                    continue;
                const index_sets sets(indexed_rows(op, o.row_bytes), rows);
                large_point(packed(op, o.row_bytes, rows, sets));
            }
}

static void judge_large()
{
    for (const operation op : {gather, store})
        for (const large_figures &l : large_rows)
            judge_worst(std::string("large ") + (op == gather ? "gathers" : "stores") + " / copy, GB/s, rows of " +
                            std::to_string(l.from_bytes) + (l.from_bytes == 1024 ? " B and more" : " B"),
                        l.f[op], '>', l.target);
}

/* ---- odd rows ---- */

static std::vector<figure> odd_figures[2];

static int64_t round_up(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) / to * to;
}

/* Odd rows: packed, with the stride rounded up to 16 and to 128, and rows as wide as the last of these. */
static void odd_point(operation op, int64_t row_bytes, int64_t rows)
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
    printf("%6s %6lld %7lld", op == gather ? "gather" : "store", (long long)row_bytes, (long long)rows);
    for (const contender &k : c)
        printf(" %9.0f", gb_per_s(k));
    const double ratio = gb_per_s(c[1]) / gb_per_s(c[3]);
    printf(" %7.3f\n", ratio);
    if (rows == 262144)
        odd_figures[op].push_back({ratio, place(row_bytes, rows)});
}

static void odd()
{
    printf("\nodd rows, PDL off: GB/s of rows packed, with strides that are multiples of 16 and of 128, and of rows of "
           "the "
           "next\nmultiple of 128; ratio of the second to the last\n%6s %6s %7s %9s %9s %9s %9s %7s\n",
           "", "row B", "rows", "packed", "16", "128", "wide", "ratio");
    for (const operation op : {gather, store})
        for (const int64_t row_bytes : {132, 576, 656, 1000, 1170})
            for (const int64_t rows : {1024, 65536, 262144})
                if (!quick || rows == 262144)
                    odd_point(op, row_bytes, rows);
}

static void judge_odd()
{
    judge_worst("gather, odd rows / next multiple of 128, GB/s", odd_figures[gather], '>', 0.85);
    judge_worst("store, odd rows / next multiple of 128, GB/s", odd_figures[store], '>', 0.85);
}

/* ---- misaligned bases ---- */

static std::vector<figure> misaligned_figures[2];
static const char *const side_names[] = {"src", "dst", "both"};

static void misaligned_point(operation op, int64_t row_bytes, int64_t rows, const index_sets &sets)
{
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
        printf("%6s %6lld %7lld %5s", op == gather ? "gather" : "store", (long long)row_bytes, (long long)rows,
               side_names[side]);
        for (size_t k = 0; k < offsets.size(); k++) {
            const double ratio = c[0].us / c[1 + size_t(side) * offsets.size() + k].us;
            printf("  +%-2lld %5.3f", (long long)offsets[k], ratio);
            misaligned_figures[op].push_back(
                {ratio, place(row_bytes, rows) + " " + side_names[side] + " +" + std::to_string(offsets[k])});
        }
        printf("\n");
    }
}

static void misaligned()
{
    printf("\nbases misaligned by some bytes, PDL off: GB/s as a part of the aligned GB/s\n");
    for (const operation op : {gather, store})
        for (const int64_t row_bytes : {256, 1024, 2048, 8192}) {
            /* one row less: the last one must not reach past the memory */
            const index_sets sets(indexed_rows(op, row_bytes) - 1, 65536);
            for (const int64_t rows : {64, 1024, 65536})
                if (!quick || rows != 1024)
                    misaligned_point(op, row_bytes, rows, sets);
        }
}

static void judge_misaligned()
{
    judge_worst("gather, misaligned / aligned GB/s", misaligned_figures[gather], '>', 0.6);
    judge_worst("store, misaligned / aligned GB/s", misaligned_figures[store], '>', 0.6);
}

/* ---- host time of a call ---- */

struct host_call {
    const char *name;
    int compared_with; /* which of the calls; -1: none */
    std::function<void()> call;
    std::vector<double> us;
};
static std::vector<host_call> host_calls;

/* Times batches small enough for the launch queue, which is empty when one begins. */
static void time_host_calls()
{
    constexpr int calls = 50;
    const int batches = quick ? 51 : 301;
    for (int b = -1; b < batches; b++) /* the first one warms up */
        for (host_call &h : host_calls) {
            CUDA(cudaStreamSynchronize(stream));
            const double begin = now_us();
            for (int i = 0; i < calls; i++)
                h.call();
            const double us = (now_us() - begin) / calls;
            if (b >= 0)
                h.us.push_back(us);
        }
    CUDA(cudaStreamSynchronize(stream));
}

static void host()
{
    constexpr int64_t row_bytes = 2048, rows = 8; /* the GPU finishes a call before the host does */
    const index_sets from(indexed_rows(gather, row_bytes), rows), to(indexed_rows(store, row_bytes), rows);
    const kvprim_gather_desc g = gather_desc(packed(gather, row_bytes, rows, from), 0);
    const kvprim_store_desc s = store_desc(packed(store, row_bytes, rows, to), 0);
    const kvprim_cuda_launch off = launch_options(false), on = launch_options(true);
    const void *const empty = reinterpret_cast<const void *>(empty_kernel);
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = launch_config(1, &attribute);
    config.numAttrs = 1;
    host_calls = {
        {"cudaLaunchKernel", -1, [=] { CUDA(cudaLaunchKernel(empty, 1, block_threads, nullptr, 0, stream)); }, {}},
        {"cudaLaunchKernelExC, PDL", -1, [&] { CUDA(cudaLaunchKernelExC(&config, empty, nullptr)); }, {}},
        {"kvprim_cuda_gather", 0, [&] { check_kvprim(kvprim_cuda_gather(&g, &off)); }, {}},
        {"kvprim_cuda_gather, PDL", 1, [&] { check_kvprim(kvprim_cuda_gather(&g, &on)); }, {}},
        {"kvprim_cuda_store", 0, [&] { check_kvprim(kvprim_cuda_store(&s, &off)); }, {}},
        {"kvprim_cuda_store, PDL", 1, [&] { check_kvprim(kvprim_cuda_store(&s, &on)); }, {}}};
    time_host_calls();
    printf("\nhost time of one call, us\n");
    for (const host_call &h : host_calls)
        printf("%28s %7.3f\n", h.name, median(h.us));
}

static void judge_host()
{
    for (const host_call &h : host_calls)
        if (h.compared_with >= 0) {
            const host_call &bare = host_calls[size_t(h.compared_with)];
            judge(std::string("host: us of ") + h.name + " above a bare launch", median(h.us) - median(bare.us), '<',
                  0.3, std::string("against ") + bare.name);
        }
}

/* ---- the machine ---- */

__global__ static void fill(uint64_t *words, uint64_t count)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = hash(i);
}

static char *allocate(int64_t bytes)
{
    char *memory;
    CUDA(cudaMalloc(&memory, size_t(bytes + slack)));
    fill<<<4096, 256, 0, stream>>>(reinterpret_cast<uint64_t *>(memory), uint64_t(bytes + slack) / 8);
    CUDA(cudaGetLastError());
    return memory;
}

static void open_machine()
{
    open_gpu(table_bytes + 2 * cache_bytes + GiB);
    table_memory = allocate(table_bytes);
    for (char *&cache : cache_memory)
        cache = allocate(cache_bytes);
    CUDA(cudaMalloc(&cub_memory, cub_memory_bytes));
    CUDA(cudaStreamSynchronize(stream));
}

static void close_machine()
{
    CUDA(cudaFree(cub_memory));
    for (char *cache : cache_memory)
        CUDA(cudaFree(cache));
    CUDA(cudaFree(table_memory));
    close_gpu();
}

static void limits()
{
    std::vector<contender> copies = {contend_copy(false), contend_copy(true)};
    measure(copies);
    std::vector<contender> kernels = {contend_simply("empty", enqueue_empty<false>),
                                      contend_simply("empty+PDL", enqueue_empty<true>)};
    measure(kernels);
    printf("cudaMemcpyAsync device to device of 256 MiB: %.0f GB/s in a graph, %.0f on a stream\n",
           2e-3 * double(copy_bytes) / copies[0].us, 2e-3 * double(copy_bytes) / copies[1].us);
    printf("empty kernel in a graph: %.3f us, with PDL %.3f us\n", kernels[0].us, kernels[1].us);
}

static void open_all()
{
    open_machine();
    limits();
}

static void summary()
{
    judge_gather();
    judge_store();
    judge_large();
    judge_odd();
    judge_misaligned();
    judge_host();
}

int main(int argc, char **argv)
{
    const program p = {{{"gather", [] { grid(gather); }},
                        {"store", [] { grid(store); }},
                        {"others", others},
                        {"large", large},
                        {"odd", odd},
                        {"misaligned", misaligned},
                        {"host", host}},
                       open_all,
                       summary,
                       close_machine};
    return run_program(argc, argv, p);
}

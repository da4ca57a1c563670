/* SPDX-License-Identifier: MIT */
/* Rows of production caches: 576 bytes (fp8), 584 (DeepSeek-V4), 656 (DeepSeek's fp8 with scales) and 1,152 (bf16), in
   flat tables, pages of tokens (NHD) and pages of heads (HND); a cache of such rows, moved to and from the pages of
   pinned memory; and half of the heads of a cache, packed into a staging area and back.

       nvcc -arch=sm_90 -std=c++17 -O3 -I. tests/bench/bench_layouts.cu -o build/bench_layouts
       build/bench_layouts [--quick] [--only rows|host|packs]

   bench_gpu.h says how times are taken; ratios are within one run. Rows are random. GB/s of device memory count each
   byte as read and as written, GB/s of the link once. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"

constexpr int64_t page_rows = 64, table_rows = 1 << 19; /* of 1,152 bytes: 0.6 GB, more than the second-level cache */
constexpr int64_t few_rows = 64, many_rows = 65536;
constexpr int32_t heads = 4;
constexpr int inputs = 4;

static char *cache_memory, *row_memory, *host_memory;

/* ---- stores and gathers ---- */

enum place { FLAT, NHD, HND };
static const char *const place_names[] = {"flat", "NHD", "HND"};

/* Pages have room for V after K. A row of HND has `heads` pieces of `bytes`, in a quarter as many rows. */
struct row_job {
    place where;
    int64_t bytes;
    const index_sets *slots;

    __host__ __device__ int64_t row_bytes() const
    {
        return where == HND ? heads * bytes : bytes;
    }
    kvprim_table table() const
    {
        kvprim_table t = table_at(cache_memory, slots->rows);
        t.page_rows = where == FLAT ? 0 : page_rows;
        t.page_stride = where == FLAT ? 0 : 2 * page_rows * row_bytes();
        t.heads = where == HND ? heads : 0;
        t.head_stride = where == HND ? page_rows * bytes : 0;
        return t;
    }
};

static char *rows_of(const row_job &j, int i)
{
    return row_memory + i % inputs * j.slots->count * j.row_bytes();
}

static void enqueue_rows(const row_job &j, bool store, int i)
{
    const kvprim_table rows = table_at(rows_of(j, i), j.slots->count);
    if (store)
        call_kvprim(kvprim_cuda_store, store_of(j.table(), rows, j.row_bytes(), j.slots->set(i), j.slots->count));
    else
        call_kvprim(kvprim_cuda_gather, gather_of(rows, j.table(), j.row_bytes(), j.slots->set(i), j.slots->count));
}

/* What is contiguous on both sides. */
struct row_pieces {
    place where;
    int64_t bytes, in_row;
    char *cache, *rows;
    const int32_t *slot;
    bool store;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t i = n / in_row, h = n % in_row, s = slot[i], page = s / page_rows, r = s % page_rows;
        const int64_t at = where == FLAT  ? s * bytes
                           : where == NHD ? (2 * page * page_rows + r) * bytes
                                          : ((2 * page * heads + h) * page_rows + r) * bytes;
        char *const in_cache = cache + at, *const row = rows + n * bytes;
        return store ? piece{in_cache, row, bytes} : piece{row, in_cache, bytes};
    }
};

static contender contend_rows(const row_job &j, bool store)
{
    contender c = {store ? "store" : "gather", [=](int i) { enqueue_rows(j, store, i); },
                   2 * double(j.slots->count * j.row_bytes()), j.slots->count < 1000 ? 64 : 16};
    const int64_t in_row = j.where == HND ? heads : 1;
    check_pieces(c, std::string(place_names[j.where]) + ", " + size_name(j.bytes), j.slots->count * in_row, [=](int i) {
        return row_pieces{j.where, j.bytes, in_row, cache_memory, rows_of(j, i), j.slots->set(i), store};
    });
    return c;
}

static void rows_point(int64_t bytes, int64_t count, std::vector<figure> *stores)
{
    const int64_t next = (bytes + 127) / 128 * 128;
    const index_sets flat(table_rows, count, sets_count, 1), hnd(table_rows / heads, count / heads, sets_count, 2);
    std::vector<contender> c;
    for (const bool store : {true, false}) {
        for (const place where : {FLAT, NHD, HND})
            c.push_back(contend_rows({where, bytes, where == HND ? &hnd : &flat}, store));
        c.push_back(contend_rows({FLAT, next, &flat}, store));
    }
    measure(c);
    for (const size_t op : {0, 4}) {
        printf("%8s %8s %8lld", size_name(bytes).c_str(), c[op].name, (long long)count);
        for (size_t k = op; k < op + 4; k++)
            printf(" %8.2f %6.0f", c[k].us, gb_per_s(c[k]));
        for (size_t k = op; k < op + 3; k++)
            printf(" %6.3f", gb_per_s(c[k]) / gb_per_s(c[op + 3]));
        printf("\n");
    }
    if (bytes == 656 && count == many_rows)
        stores->push_back({gb_per_s(c[0]) / gb_per_s(c[3]), size_name(bytes)});
}

/* DeepSeek-V4's pages of 64 tokens, 576 bytes of each and then 8 of scales, by one store, or by one for each part. */
static void enqueue_v4(const index_sets &slots, bool values, bool scales, int i)
{
    constexpr int64_t page_bytes = 37440;
    kvprim_table caches[2] = {table_at(cache_memory, slots.rows), table_at(cache_memory + page_rows * 576, slots.rows)};
    char *const rows = row_memory + i % inputs * slots.count * 584;
    const kvprim_table of[2] = {table_at(rows, slots.count), table_at(rows + slots.count * 576, slots.count)};
    for (kvprim_table &t : caches)
        t.page_rows = page_rows, t.page_stride = page_bytes;
    kvprim_store_desc d = store_of(caches[!values], of[!values], values ? 576 : 8, slots.set(i), slots.count);
    if (values && scales)
        d.v_cache = caches[1], d.v = of[1], d.v_bytes = 8;
    call_kvprim(kvprim_cuda_store, d);
}

static void v4_point(int64_t count)
{
    const index_sets slots(table_rows, count, sets_count, 7);
    const auto one = [&slots](bool values, bool scales) {
        return [&slots, values, scales](int i) { enqueue_v4(slots, values, scales, i); };
    };
    const auto both = [&slots](int i) { enqueue_v4(slots, true, false, i), enqueue_v4(slots, false, true, i); };
    const double bytes = 2 * 584 * double(count);
    const int launches = count < 1000 ? 64 : 16;
    std::vector<contender> c = {{"one store", one(true, true), bytes, launches},
                                {"two stores", both, bytes, launches},
                                {"values", one(true, false), bytes, launches},
                                {"scales", one(false, true), bytes, launches}};
    measure(c);
    printf("%8lld", (long long)count);
    print_us(c, 10, 2);
    printf("\n");
}

static void rows()
{
    std::vector<figure> stores;
    printf("\nrows of production caches: us and GB/s, flat, NHD, HND, and flat rows of the next multiple of 128 bytes; "
           "GB/s / those\n%8s %8s %8s %15s %15s %15s %15s\n",
           "row", "", "rows", "flat", "NHD", "HND", "next");
    for (const int64_t count : {few_rows, many_rows})
        for (const int64_t bytes : {576, 584, 656, 1152})
            rows_point(bytes, count, &stores);
    printf("\nDeepSeek-V4's pages, 576 B and 8 B: us of one store, of two, of each part\n%8s %10s %10s %10s %10s\n",
           "rows", "one", "two", "values", "scales");
    v4_point(few_rows);
    v4_point(many_rows);
    judge_worst("stores of 656 B, flat / of 768 B, GB/s", stores, '>', 0.9);
}

/* ---- to pinned memory, page first ---- */

constexpr int32_t layers = 61;
constexpr int64_t latent = 656, pool_rows = 8192, moved = 4096; /* a pool is 328 MB */
constexpr int64_t moved_bytes = moved * layers * latent;        /* by a launch */

/* SGLang's kernel for this (sgl-kernel/csrc/kvcacheio/transfer.cu, layer first to page first): a warp moves all layers
   of a token, in 8-byte words, each row loaded before it is stored; launched in 2 blocks. This one is at least as fast:
   words of 16 bytes, and four layers loaded before they are stored. */
static __global__ void __launch_bounds__(1024, 1)
    sglang_page_first(char *dst, const char *src, const int32_t *to, const int32_t *from)
{
    const uint32_t lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32, words = latent / 16;
    for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < moved; i += warps)
        for (uint32_t l = 0; l < layers; l += 4)
            for (uint32_t w = lane; w < words; w += 32) {
                uint4 v[4];
                for (uint32_t k = 0; k < 4; k++)
                    if (l + k < layers)
                        v[k] = __ldcs((const uint4 *)(src + ((l + k) * pool_rows + from[i]) * latent) + w);
                for (uint32_t k = 0; k < 4; k++)
                    if (l + k < layers)
                        __stcs((uint4 *)(dst + (int64_t(to[i]) * layers + l + k) * latent) + w, v[k]);
            }
}

enum offload { LAYERS, PIECES, PAGES };

/* LAYERS: a row is a token of a layer. PIECES: all layers of a token, pieces of one row, so that the host's row is
   written from end to end. PAGES: whole pages of a layer, for [page][layer][token][row]. */
static void enqueue_offload(offload how, const index_sets *to, const index_sets *from, bool out, int32_t max_sms, int i)
{
    const int64_t token = layers * latent, page = page_rows * latent;
    kvprim_table gpu = table_at(cache_memory, from->rows), host = table_at(host_memory, to->rows);
    const int64_t row = how == LAYERS ? latent : how == PIECES ? token : page;
    int64_t gpu_layer = pool_rows * latent, host_layer = row;
    if (how == PIECES) {
        gpu.stride = latent, gpu.heads = layers, gpu.head_stride = gpu_layer;
        gpu_layer = host_layer = 0;
    } else
        host.stride = layers * row;
    kvprim_transfer_desc d = transfer_of(out ? host : gpu, out ? gpu : host, row, how == PIECES ? 1 : layers,
                                         (out ? to : from)->set(i), (out ? from : to)->set(i), to->count);
    d.dst_layer_stride = out ? host_layer : gpu_layer, d.src_layer_stride = out ? gpu_layer : host_layer;
    call_kvprim(kvprim_cuda_transfer, d, false, max_sms);
}

/* The pieces of all layers. `unit`: rows of a page, or 1. */
struct offload_pieces {
    const int32_t *to, *from;
    char *host, *gpu;
    int64_t unit;
    bool out;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t i = n / layers, l = n % layers, bytes = unit * latent;
        char *const in_host = host + (to[i] * layers + l) * bytes;
        char *const in_gpu = gpu + l * pool_rows * latent + from[i] * bytes;
        return out ? piece{in_host, in_gpu, bytes} : piece{in_gpu, in_host, bytes};
    }
};

static contender contend_offload(const char *name, int64_t unit, const index_sets *to, const index_sets *from, bool out,
                                 const std::function<void(int)> &enqueue)
{
    contender c = {name, enqueue, double(moved_bytes), 2};
    check_pieces(c, name, to->count * layers,
                 [=](int i) { return offload_pieces{to->set(i), from->set(i), host_memory, cache_memory, unit, out}; });
    return c;
}

static contender contend_sglang(unsigned blocks, const index_sets &to, const index_sets &from)
{
    return contend_offload("SGLang", 1, &to, &from, true, [=, &to, &from](int i) {
        sglang_page_first<<<blocks, 1024, 0, stream>>>(host_memory, cache_memory, to.set(i), from.set(i));
        CUDA(cudaGetLastError());
    });
}

static contender contend_engine(bool out)
{
    char *const dst = out ? host_memory : cache_memory, *const src = out ? cache_memory : host_memory;
    return {"copy", [=](int) { CUDA(cudaMemcpyAsync(dst, src, size_t(moved_bytes), cudaMemcpyDefault, stream)); },
            double(moved_bytes), 2};
}

static void host()
{
    const index_sets to(pool_rows, moved, sets_count, 3), from(pool_rows, moved, sets_count, 4),
        to_page(pool_rows / page_rows, moved / page_rows, sets_count, 5),
        from_page(pool_rows / page_rows, moved / page_rows, sets_count, 6);
    static const char *const names[] = {"layers", "pieces", "pages"};
    printf(
        "\n656 B x 61 layers, layer first on the GPU, page first in pinned memory, GB/s: a row is a token of a layer; "
        "a token, its layers are pieces;\na page of 64 tokens of a layer ([page][layer][token]); SGLang's kernel; one "
        "copy\n%8s %8s %8s %8s %8s %8s %8s %8s\n",
        "", "layers", "8 SMs", "pieces", "8 SMs", "pages", "SGLang", "copy");
    for (const bool out : {true, false}) {
        std::vector<contender> c;
        for (const offload how : {LAYERS, PIECES, PAGES})
            for (const int32_t sms : {0, 8}) {
                const index_sets *const t = how == PAGES ? &to_page : &to, *const f = how == PAGES ? &from_page : &from;
                if (how != PAGES || sms == 0)
                    c.push_back(contend_offload(names[how], how == PAGES ? page_rows : 1, t, f, out,
                                                [=](int i) { enqueue_offload(how, t, f, out, sms, i); }));
            }
        if (out)
            c.push_back(contend_sglang(2, to, from));
        c.push_back(contend_engine(out));
        measure(c);
        printf("%8s", out ? "to host" : "to GPU");
        for (size_t k = 0; k < c.size(); k++)
            printf("%*.1f", !out && k == 5 ? 18 : 9, gb_per_s(c[k]));
        printf("\n");
        judge(std::string(out ? "to host" : "to GPU") + ", 656 B page first, GB/s", gb_per_s(c[0]), '>', 50);
    }
}

/* ---- a staging area for half of the heads, as for twice as many ranks ---- */

constexpr int64_t pack_page = 16, pack_bytes = 128 * MiB;
constexpr int32_t pack_layers = 8, pack_heads = 16;

/* FlashInfer's NHD; a row of K or V has a piece of each half of its heads. */
static kvprim_layout pack_cache(int64_t piece)
{
    kvprim_layout cache;
    kvprim_layout_sizes z = {};
    z.data = cache_memory, z.k_bytes = z.v_bytes = 2 * piece, z.layers = pack_layers, z.heads = pack_heads;
    z.page_rows = pack_page, z.rows = 2 * table_rows * 1152 / (4 * piece * pack_layers) / pack_page * pack_page;
    check_kvprim(kvprim_layout_find("flashinfer_nhd", &z, &cache));
    return cache;
}

struct pack_pieces {
    char *cache, *area;
    const int32_t *slot;
    int64_t bytes, count, pages;
    bool packs;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t i = n % count, part = n / count, s = slot[i];
        const int64_t page = (part / 2 * pages + s / pack_page) * 2 + part % 2;
        char *const in_cache = cache + ((page * pack_page + s % pack_page) * 2 + 1) * bytes;
        return packs ? piece{area + n * bytes, in_cache, bytes} : piece{in_cache, area + n * bytes, bytes};
    }
};

static contender contend_pack(const kvprim_layout &cache, int64_t bytes, const value_sets<int32_t> &slots, bool packs)
{
    contender c = {packs ? "pack" : "unpack",
                   [&cache, &slots, packs](int i) {
                       kvprim_pack_desc d = {};
                       kvprim_pack plan;
                       d.cache = &cache, d.head = pack_heads / 2, d.count = slots.count;
                       d.slot = slots.set(i), d.slot_type = KVPRIM_I32;
                       d.staging = row_memory, d.staging_bytes = pack_bytes;
                       check_kvprim(kvprim_pack_plan(&d, &plan));
                       kvprim_move m[2];
                       for (int kv = 0; kv < 2; kv++)
                           check_kvprim(kvprim_transfer_moves(packs ? &plan.pack[kv] : &plan.unpack[kv], &m[kv]));
                       const kvprim_cuda_launch launch = on_stream();
                       check_kvprim(kvprim_cuda_move(m, 2, &launch));
                   },
                   2 * double(pack_bytes), 8};
    check_pieces(c, size_name(bytes), 2 * pack_layers * slots.count, [=, &slots](int i) {
        return pack_pieces{cache_memory, row_memory, slots.set(i), bytes, slots.count, cache.k_cache.rows / pack_page,
                           packs};
    });
    return c;
}

static void packs()
{
    std::vector<figure> parts;
    printf("\nhalf of the heads of %d layers, pages of %lld rows, into a staging area and back: GB/s, and as a part of "
           "a device copy's\n%8s %8s %8s %8s %6s %6s\n",
           pack_layers, (long long)pack_page, "piece", "pack", "unpack", "copy", "pack", "unpack");
    for (const int64_t bytes : {512, 2048, 8192}) {
        const kvprim_layout cache = pack_cache(bytes);
        const int64_t count = pack_bytes / (2 * pack_layers * bytes);
        const index_sets pages(cache.k_cache.rows / pack_page, count / pack_page, sets_count, 8);
        const value_sets<int32_t> slots(
            count, [&](int set, int64_t i) { return pages.host_set(set)[i / pack_page] * pack_page + i % pack_page; });
        const auto copy = [](int i) {
            CUDA(cudaMemcpyAsync(cache_memory + rotated(i, pack_bytes, GiB), row_memory, size_t(pack_bytes),
                                 cudaMemcpyDeviceToDevice, stream));
        };
        std::vector<contender> c = {contend_pack(cache, bytes, slots, true),
                                    contend_pack(cache, bytes, slots, false),
                                    {"copy", copy, 2 * double(pack_bytes), 8}};
        measure(c);
        printf("%8s", size_name(bytes).c_str());
        for (const contender &one : c)
            printf(" %8.0f", gb_per_s(one));
        for (int k = 0; k < 2; k++) {
            printf(" %6.3f", gb_per_s(c[k]) / gb_per_s(c[2]));
            if (bytes >= 2048)
                parts.push_back({gb_per_s(c[k]) / gb_per_s(c[2]), size_name(bytes) + " " + c[k].name});
        }
        printf("\n");
    }
    judge_worst("half of the heads packed and unpacked, part of a copy", parts, '>', 0.9);
}

/* ---- the program ---- */

static void open_all()
{
    open_gpu(2 * GiB + 256 * MiB);
    cache_memory = allocate_hashed(2 * table_rows * 1152);
    row_memory = allocate_hashed(inputs * many_rows * 1152);
    CUDA(cudaMallocHost(&host_memory, size_t(pool_rows * layers * latent)));
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all, {{"rows", rows}, {"host", host}, {"packs", packs}});
}

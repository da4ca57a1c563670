/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_store and kvprim_cuda_gather in paged caches with the kernels of vLLM, FlashInfer and SGLang,
   and with kvprim in a flat cache. Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_paged.cu -o build/bench_paged
       build/bench_paged [--quick] [--only store|mla|layouts|gather|v0]

   Times are microseconds per launch, as bench_gpu.h takes them, over 8 sets of slots and rotating dense buffers.

   The opponents are written anew, each with the launch of the project that it stands for, and at least as fast: it
   checks nothing that theirs does not, sizes that theirs read at run time are constants, and a thread loads all that it
   moves of a token before it stores. vLLM takes int64 slots, FlashInfer int32 page tables. None uses programmatic
   dependent launch except SGLang's. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include "opponents_launch.h"
#include <type_traits>

constexpr int64_t cache_bytes = 8 * GiB; /* K and V */
constexpr int64_t dense_bytes = 4 * GiB; /* K, and V in the other half; what a gather writes */

static char *cache_memory, *dense_memory;
static uint32_t multiprocessors;

/* ---- where tokens go ---- */

/* Slots in pages of page_rows tokens, as each of the projects takes them. They are random, as of requests that decode,
   each with a token and a page in FlashInfer's lists; or random pages are filled one after the other, as by one
   request's prompt. */
struct slot_sets {
    int64_t rows, page_rows;
    bool prompt;
    value_sets<int32_t> slot, batch, position, first_page, table, length; /* length: of each request's last page */
    value_sets<int64_t> slot64;

    slot_sets(int64_t rows_, int64_t page_rows_, int64_t most, bool prompt_)
        : rows(rows_), page_rows(page_rows_), prompt(prompt_)
    {
        const int64_t pages = (most + page_rows - 1) / page_rows;
        const index_sets random(prompt ? rows / page_rows : rows, prompt ? pages : most, sets_count, 11);
        const auto at = [&](int set, int64_t i) {
            const int32_t *const one = random.host_set(set);
            return prompt ? one[i / page_rows] * page_rows + i % page_rows : int64_t(one[i]);
        };
        const auto make32 = [&](int64_t count, const std::function<int64_t(int, int64_t)> &value) {
            return value_sets<int32_t>(count, value);
        };
        slot = make32(most, at);
        slot64 = value_sets<int64_t>(most, at);
        batch = make32(most, [&](int, int64_t i) { return prompt ? 0 : i; });
        position = make32(most, [&](int set, int64_t i) { return prompt ? i : at(set, i) % page_rows; });
        first_page = make32(most + 1, [&](int, int64_t i) { return i; });
        table = make32(prompt ? pages : most, [&](int set, int64_t i) {
            return prompt ? int64_t(random.host_set(set)[i]) : at(set, i) / page_rows;
        });
        length = make32(most, [&](int set, int64_t i) { return at(set, i) % page_rows + 1; });
    }
};

enum layout { FLAT, NHD, NHD_BOTH, BESIDE, HND, HND_BOTH, LAYOUTS };
static const char *const layout_names[] = {"flat",
                                           "NHD",              /* [K or V][page][row][head] */
                                           "NHD, K V in page", /* [page][K or V][row][head] */
                                           "NHD, K V in row",  /* [page][row][K or V][head] */
                                           "HND",              /* [K or V][page][head][row] */
                                           "HND, K V in page" /* [page][K or V][head][row] */};

/* A cache of K and V; all strides in bytes. Pages of 0 rows: flat. */
struct cache {
    char *k, *v;
    int64_t rows, heads, head_bytes, page_rows, page_stride, row_stride, head_stride;
};

static cache make_cache(layout l, int64_t heads, int64_t head_bytes, int64_t page_rows)
{
    const int64_t row = heads * head_bytes, page = page_rows * row;
    const bool hnd = l == HND || l == HND_BOTH, both = l == NHD_BOTH || l == HND_BOTH || l == BESIDE;
    return {cache_memory,
            cache_memory + (l == BESIDE ? row
                            : both      ? page
                                        : cache_bytes / 2),
            cache_bytes / 2 / row,
            heads,
            head_bytes,
            l == FLAT ? 0 : page_rows,
            both ? 2 * page : page,
            hnd           ? head_bytes
            : l == BESIDE ? 2 * row
                          : row,
            hnd ? page_rows * head_bytes : head_bytes};
}

static kvprim_table table_of(const cache &c, bool v)
{
    kvprim_table t = table_at(v ? c.v : c.k, c.rows, c.row_stride);
    t.page_rows = c.page_rows;
    t.page_stride = c.page_rows ? c.page_stride : 0;
    if (c.head_stride != c.head_bytes) {
        t.heads = int32_t(c.heads);
        t.head_stride = c.head_stride;
    }
    return t;
}

/* ---- opponents in caches of K and V ---- */

/* Where an opponent writes, and how many tokens. page_rows is a power of two: n / page_rows is __umulhi(n, magic). */
struct paged {
    char *k, *v;
    int64_t page_stride, row_stride, head_stride;
    uint32_t count, page_rows, magic;
};

/* What it reads. */
struct dense {
    const char *k, *v;
    const int64_t *slot;
    const int32_t *batch, *position, *first_page, *table, *length;
};

/* vLLM, csrc/libtorch_stable/cache_kernels.cu, reshape_and_cache_flash. A block per token, of as many threads as it has
   elements, at most 512. Token-major: the threads copy K's and then V's vectors of 8 elements (4 if these are bytes).
   Head-major: a warp copies a head. The slot is divided by a page size that is known at run time, with 64 bits. */
template <int head_bytes, int heads, int element_bytes, bool hnd>
__global__ static void vllm_store(const paged p, const char *__restrict__ k, const char *__restrict__ v,
                                  const int64_t *__restrict__ slots)
{
    using vector = std::conditional_t<element_bytes == 2, uint4, uint32_t>;
    constexpr int vectors = head_bytes / int(sizeof(vector)) * (hnd ? 1 : heads);
    static_assert(vectors <= (hnd ? 32 : 512), "at most one vector for each thread");
    const int64_t token = blockIdx.x, slot = slots[token];
    if (slot < 0)
        return;
    const int64_t page = slot / int(p.page_rows), row = slot % int(p.page_rows);
    const int head = hnd ? int(threadIdx.x) / 32 : 0, i = hnd ? int(threadIdx.x) % 32 : int(threadIdx.x);
    if (head >= heads || i >= vectors)
        return;
    const int64_t from = token * (heads * head_bytes) + head * head_bytes;
    const int64_t to = page * p.page_stride + row * p.row_stride + head * p.head_stride;
    const vector a = reinterpret_cast<const vector *>(k + from)[i], b = reinterpret_cast<const vector *>(v + from)[i];
    reinterpret_cast<vector *>(p.k + to)[i] = a;
    reinterpret_cast<vector *>(p.v + to)[i] = b;
}

/* Both of FlashInfer's: thread x, y of a block copies 16 bytes of head y, of K and of V. */
template <int head_bytes, int heads>
__device__ static uint4 load_of_head(const char *__restrict__ dense, uint32_t token)
{
    const int64_t at = (int64_t(token) * heads + threadIdx.y) * head_bytes + threadIdx.x * 16;
    return *reinterpret_cast<const uint4 *>(dense + at);
}

__device__ static void store_of_head(const paged &p, uint4 k, uint4 v, int64_t page, uint32_t row)
{
    const int64_t to = page * p.page_stride + threadIdx.y * p.head_stride + row * p.row_stride + threadIdx.x * 16;
    *reinterpret_cast<uint4 *>(p.k + to) = k;
    *reinterpret_cast<uint4 *>(p.v + to) = v;
}

/* FlashInfer, include/flashinfer/page.cuh, AppendPagedKVCache: of prompts. As many blocks as multiprocessors hold, no
   more than there are tokens (rounded up to all multiprocessors). A block takes every grid's token, four in a turn of
   the loop. The page is looked up by request and position; page sizes are divided by with a multiplication. */
template <int head_bytes, int heads>
__global__ static void flashinfer_append(const paged p, const char *__restrict__ k, const char *__restrict__ v,
                                         const int32_t *__restrict__ batch, const int32_t *__restrict__ position,
                                         const int32_t *__restrict__ first_page, const int32_t *__restrict__ table)
{
#pragma unroll 4
    for (uint32_t i = blockIdx.x; i < p.count; i += gridDim.x) {
        const uint4 a = load_of_head<head_bytes, heads>(k, i), b = load_of_head<head_bytes, heads>(v, i);
        const uint32_t n = uint32_t(first_page[batch[i]]) * p.page_rows + uint32_t(position[i]);
        const uint32_t page = __umulhi(n, p.magic);
        store_of_head(p, a, b, table[page], n - page * p.page_rows);
    }
}

/* The same file, AppendPagedKVCacheDecode: of decode steps. A block per request, which appends one token to it, at the
   end of its last page. */
template <int head_bytes, int heads>
__global__ static void flashinfer_decode(const paged p, const char *__restrict__ k, const char *__restrict__ v,
                                         const int32_t *__restrict__ first_page, const int32_t *__restrict__ table,
                                         const int32_t *__restrict__ length)
{
    const uint32_t i = blockIdx.x;
    const uint4 a = load_of_head<head_bytes, heads>(k, i), b = load_of_head<head_bytes, heads>(v, i);
    const int32_t first = first_page[i], pages = first_page[i + 1] - first;
    const uint32_t last = uint32_t(pages - 1) * p.page_rows + uint32_t(length[i]) - 1;
    const uint32_t page = __umulhi(last, p.magic);
    store_of_head(p, a, b, table[uint32_t(first) + page], last - page * p.page_rows);
}

enum opponent { VLLM, APPEND, DECODE, OPPONENTS };
static const char *const opponent_names[] = {"vLLM", "FlashInfer append", "FlashInfer decode"};

template <int head_bytes, int heads, int element_bytes> static void enqueue_vllm(const paged &p, const dense &d)
{
    const unsigned elements = heads * head_bytes / element_bytes;
    CUDA(launch_opponent(p.head_stride != head_bytes ? vllm_store<head_bytes, heads, element_bytes, true>
                                                     : vllm_store<head_bytes, heads, element_bytes, false>,
                         p.count, std::min(elements, 512u), false, stream, p, d.k, d.v, d.slot));
}

template <int head_bytes, int heads> static void enqueue_append(const paged &p, const dense &d)
{
    static int fit = 0;
    const auto kernel = flashinfer_append<head_bytes, heads>;
    if (fit == 0)
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, head_bytes / 16 * heads, 0));
    const uint32_t wanted = (p.count + multiprocessors - 1) / multiprocessors;
    CUDA(launch_opponent(kernel, std::min(uint32_t(fit), wanted) * multiprocessors, dim3(head_bytes / 16, heads), false,
                         stream, p, d.k, d.v, d.batch, d.position, d.first_page, d.table));
}

template <int head_bytes, int heads> static void enqueue_decode(const paged &p, const dense &d)
{
    CUDA(launch_opponent(flashinfer_decode<head_bytes, heads>, p.count, dim3(head_bytes / 16, heads), false, stream, p,
                         d.k, d.v, d.first_page, d.table, d.length));
}

struct shape {
    const char *name;
    int heads, head_bytes;
    void (*opponents[OPPONENTS])(const paged &, const dense &);
};

template <int head_bytes, int heads, int element_bytes> static shape make_shape(const char *name)
{
    return {name,
            heads,
            head_bytes,
            {enqueue_vllm<head_bytes, heads, element_bytes>, enqueue_append<head_bytes, heads>,
             enqueue_decode<head_bytes, heads>}};
}

static const shape shapes[] = {
    make_shape<256, 8, 2>("8 heads of 128 x 2 B"), make_shape<128, 8, 2>("8 heads of 64 x 2 B"),
    make_shape<128, 4, 1>("4 heads of 128 x 1 B"), make_shape<256, 1, 2>("1 head of 128 x 2 B")};

/* ---- contenders ---- */

/* A store of `tokens` tokens. */
struct store_job {
    const shape *s;
    layout l;
    cache c;
    const slot_sets *slots;
    int64_t tokens;
};

/* Where launch i reads. */
static char *dense_at(int i, int64_t bytes, bool v)
{
    return dense_memory + (v ? dense_bytes / 2 : 0) + rotated(i, bytes, dense_bytes / 2);
}

/* What moves of head n % heads: of a store K and V of token n / heads / 2, of a gather K of token n / heads. */
struct moved_heads {
    cache c;
    char *dense[2];
    const int32_t *slot;
    bool gathers;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t all = n / c.heads, token = gathers ? all : all / 2, head = n % c.heads, v = gathers ? 0 : all % 2;
        const int64_t page = c.page_rows ? slot[token] / c.page_rows : 0, row = slot[token] - page * c.page_rows;
        char *const there = (v ? c.v : c.k) + page * c.page_stride + row * c.row_stride + head * c.head_stride;
        char *const here = dense[v] + (token * c.heads + head) * c.head_bytes;
        return {gathers ? here : there, gathers ? there : here, c.head_bytes};
    }
};

static contender contend(const char *name, const store_job &j, const std::function<void(int)> &enqueue,
                         bool gathers = false)
{
    const int64_t row = j.c.heads * j.c.head_bytes;
    const int64_t rows = j.tokens * (gathers ? 1 : 2);
    const double bytes = 2.0 * double(rows * row);
    contender c = {name, enqueue, bytes, launches_for(bytes)};
    const auto moved = [=](int i) {
        return moved_heads{j.c,
                           {dense_at(i, j.tokens * row, false), dense_at(i, j.tokens * row, true)},
                           j.slots->slot.set(i),
                           gathers};
    };
    check_pieces(c, layout_names[j.l] + (" of " + rows_name(row, j.tokens)), rows * j.c.heads, moved);
    return c;
}

/* K's and V's rows go to `slot`. */
template <class T> void enqueue_store(const store_job &j, const T *slot, bool pdl, int i)
{
    const int64_t row = j.c.heads * j.c.head_bytes;
    kvprim_store_desc d =
        store_of(table_of(j.c, false), table_at(dense_at(i, j.tokens * row, false), j.tokens), row, slot, j.tokens);
    d.v_cache = table_of(j.c, true), d.v = table_at(dense_at(i, j.tokens * row, true), j.tokens), d.v_bytes = row;
    call_kvprim(kvprim_cuda_store, d, pdl);
}

static contender contend_kvprim(const store_job &j, bool i64, bool pdl)
{
    return contend("kvprim", j, [=](int i) {
        i64 ? enqueue_store(j, j.slots->slot64.set(i), pdl, i) : enqueue_store(j, j.slots->slot.set(i), pdl, i);
    });
}

static contender contend_opponent(const store_job &j, opponent o)
{
    const int64_t row = j.c.heads * j.c.head_bytes;
    const uint32_t page_rows = uint32_t(j.c.page_rows);
    const paged p = {j.c.k,           j.c.v,
                     j.c.page_stride, j.c.row_stride,
                     j.c.head_stride, uint32_t(j.tokens),
                     page_rows,       uint32_t((int64_t(1) << 32) / page_rows)};
    return contend(opponent_names[o], j, [=](int i) {
        const slot_sets &s = *j.slots;
        j.s->opponents[o](p, {dense_at(i, j.tokens * row, false), dense_at(i, j.tokens * row, true), s.slot64.set(i),
                              s.batch.set(i), s.position.set(i), s.first_page.set(i), s.table.set(i), s.length.set(i)});
    });
}

/* ---- stores in caches of K and V ---- */

/* us: kvprim with int32 and int64 slots, each without and with PDL; the opponents, 0 where there is none. */
struct store_point {
    const shape *s;
    layout l;
    int64_t page_rows, tokens;
    bool prompt;
    double us[4], opponents[OPPONENTS];

    int best() const
    {
        int best = VLLM;
        for (int o = 0; o < OPPONENTS; o++)
            best = opponents[o] > 0 && opponents[o] < opponents[best] ? o : best;
        return best;
    }
    std::string where() const
    {
        return std::string(layout_names[l]) + (page_rows ? "/" + std::to_string(page_rows) : "") + " " +
               rows_name(s->heads * s->head_bytes, tokens) + (prompt ? " of a prompt" : "");
    }
};

static store_point measure_store(const shape &s, layout l, const slot_sets &slots, int64_t tokens)
{
    const store_job j = {&s, l, make_cache(l, s.heads, s.head_bytes, slots.page_rows), &slots, tokens};
    store_point p = {&s, l, j.c.page_rows, tokens, slots.prompt, {}, {}};
    std::vector<contender> c;
    for (int k = 0; k < 4; k++)
        c.push_back(contend_kvprim(j, k / 2, k % 2));
    for (int o = 0; o < OPPONENTS && l != FLAT; o++)
        if (o != DECODE || !slots.prompt)
            c.push_back(contend_opponent(j, opponent(o)));
    measure(c);
    for (size_t k = 0; k < c.size(); k++)
        (k < 4 ? p.us[k] : p.opponents[k - 4]) = c[k].us;
    return p;
}

/* Prints a line: us of kvprim with int32 slots, its part of the best opponent's, and which one that is. */
static void print_store(const std::vector<store_point> &line)
{
    printf("%-16s %3lld", layout_names[line[0].l], (long long)line[0].page_rows);
    for (const store_point &p : line)
        if (p.l == FLAT)
            printf(" %6.2f      ", p.us[0]);
        else
            printf(" %6.2f %4.2f%c", p.us[0], p.us[0] / p.opponents[p.best()], "vad"[p.best()]);
    printf("\n");
}

static std::vector<int64_t> store_tokens(bool prompt)
{
    if (prompt)
        return quick ? std::vector<int64_t>{4096} : std::vector<int64_t>{512, 4096, 32768};
    return quick ? std::vector<int64_t>{1, 48, 4096}
                 : std::vector<int64_t>{1, 8, 17, 32, 48, 64, 128, 512, 1500, 4096, 32768};
}

/* Measures one shape in all layouts. */
static void store_shape(const shape &s, std::vector<store_point> *all)
{
    const int64_t rows = cache_bytes / 2 / (s.heads * s.head_bytes);
    for (const int64_t page_rows : {16, 64}) {
        const slot_sets random(rows, page_rows, 32768, false), prompt(rows, page_rows, 32768, true);
        for (int l = page_rows == 16 ? FLAT : NHD; l < (s.heads == 1 ? HND : LAYOUTS); l++) {
            std::vector<store_point> line;
            for (const int64_t tokens : store_tokens(false))
                line.push_back(measure_store(s, layout(l), random, tokens));
            for (const int64_t tokens : store_tokens(true))
                line.push_back(measure_store(s, layout(l), prompt, tokens));
            print_store(line);
            all->insert(all->end(), line.begin(), line.end());
        }
    }
}

/* Returns what `value` says of the points that are `in`. */
static std::vector<figure> figures(const std::vector<store_point> &all,
                                   const std::function<bool(const store_point &)> &in,
                                   const std::function<double(const store_point &)> &value)
{
    std::vector<figure> f;
    for (const store_point &p : all)
        if (in(p))
            f.push_back({value(p), p.where()});
    return f;
}

/* Int32 and int64 slots, without PDL as their opponents. */
static void judge_opponents(const std::vector<store_point> &all)
{
    const auto paged = [](const store_point &p) { return p.l != FLAT; };
    std::vector<figure> both;
    for (const int type : {0, 2}) {
        const auto ratio = [type](const store_point &p) { return p.us[type] / p.opponents[p.best()]; };
        for (const figure &f : figures(all, paged, ratio))
            both.push_back({f.value, f.where + (type ? " int64" : "")});
    }
    judge_both("paged store / best of three", both, 0.95, 1.03);
    for (int l = NHD; l < LAYOUTS; l++) {
        const auto same = [l](const store_point &p) { return p.l == l; };
        const auto ratio = [](const store_point &p) { return p.us[0] / p.opponents[p.best()]; };
        judge_mean(std::string(layout_names[l]) + " / best of three, int32", figures(all, same, ratio), 0.95);
    }
    for (int o = 0; o < OPPONENTS; o++) {
        const auto measured = [o](const store_point &p) { return p.opponents[o] > 0; };
        const auto ratio = [o](const store_point &p) { return p.us[0] / p.opponents[o]; };
        judge_mean(std::string("paged store / ") + opponent_names[o], figures(all, measured, ratio), 0.95);
    }
}

static void judge_stores(const std::vector<store_point> &all)
{
    const auto any = [](const store_point &) { return true; };
    const auto few = [](const store_point &p) { return p.l >= NHD_BOTH && p.tokens <= 48; };
    const auto paged = [](const store_point &p) { return p.l != FLAT && p.tokens <= 64; };
    const auto to_decode = [](const store_point &p) { return p.us[0] / p.opponents[DECODE]; };
    const auto to_flat = [&](const store_point &p) {
        for (const store_point &f : all)
            if (f.l == FLAT && f.s == p.s && f.tokens == p.tokens && f.prompt == p.prompt)
                return p.us[0] / f.us[0];
        return 1.0;
    };
    judge_worst("paged store / FlashInfer decode, to 48 tokens", figures(all, few, to_decode), '<', 1.00);
    judge_worst("paged store / flat, to 64 tokens", figures(all, paged, to_flat), '<', 1.05);
    for (const int type : {0, 2}) {
        const auto pdl_to_off = [type](const store_point &p) { return p.us[type + 1] / p.us[type]; };
        judge_worst(std::string("store, pdl = 1 / pdl = 0, int") + (type ? "64" : "32"), figures(all, any, pdl_to_off),
                    '<', 1.02);
    }
}

static void store()
{
    std::vector<store_point> all;
    printf(
        "\nstore of K and V, PDL off: us of kvprim with int32 slots, its part of the best opponent's time, and that\n"
        "one's letter: vLLM, FlashInfer's Append, FlashInfer's Decode. Page sizes in tokens. Random slots, then those\n"
        "of a prompt (no decode kernel)\n%-20s",
        "tokens");
    for (const bool prompt : {false, true})
        for (const int64_t tokens : store_tokens(prompt))
            printf(" %6lld %5s", (long long)tokens, prompt ? "(pr.)" : "");
    printf("\n");
    for (const shape &s : shapes)
        if (!quick || s.heads == 8) {
            printf("%s\n", s.name);
            store_shape(s, &all);
        }
    judge_opponents(all);
    judge_stores(all);
}

/* ---- MLA: a row of kv_c (512 elements) and k_pe (64), bf16 ---- */

constexpr int64_t mla_c_bytes = 1024, mla_pe_bytes = 128, mla_bytes = mla_c_bytes + mla_pe_bytes;

struct mla_cache {
    char *data;
    int64_t rows, page_rows, page_stride;
};

struct mla_job {
    mla_cache c;
    const slot_sets *slots;
    int64_t tokens;
};

/* vLLM, csrc/libtorch_stable/cache_kernels.cu, concat_and_cache_mla. A block of 512 threads per token; a thread copies
   one element of kv_c, and one of k_pe if there is one. */
__global__ static void vllm_mla(const mla_cache c, const uint16_t *__restrict__ kv_c, const uint16_t *__restrict__ k_pe,
                                const int64_t *__restrict__ slots)
{
    constexpr int c_elements = mla_c_bytes / 2, pe_elements = mla_pe_bytes / 2;
    const int64_t token = blockIdx.x, slot = slots[token];
    if (slot < 0)
        return;
    const int64_t page = slot / int(c.page_rows), row = slot % int(c.page_rows);
    uint16_t *const to = reinterpret_cast<uint16_t *>(c.data + page * c.page_stride + row * mla_bytes);
    const int i = int(threadIdx.x);
    const uint16_t a = kv_c[token * c_elements + i], b = i < pe_elements ? k_pe[token * pe_elements + i] : uint16_t(0);
    to[i] = a;
    if (i < pe_elements)
        to[c_elements + i] = b;
}

/* SGLang, jit_kernel/csrc/elementwise/set_mla_kv_buffer.cuh: a warp per token, blocks of 1, 2, 4 or 8 warps, the fewest
   that give no multiprocessor two blocks; loads, trigger, stores. An earlier version split kv_c between `parts` - 1
   warps, and gave k_pe to another one, in blocks of one warp. */
template <int parts, bool PDL>
__global__ static void sglang_mla(const mla_cache c, const char *__restrict__ kv_c, const char *__restrict__ k_pe,
                                  const int64_t *__restrict__ slots, uint32_t tokens)
{
    constexpr int steps = parts == 1 ? 2 : 1, bytes = int(mla_c_bytes) / (parts == 1 ? 1 : parts - 1);
    using word = std::conditional_t<bytes / steps == 512, uint4, uint2>;
    const uint32_t warp = blockIdx.x * blockDim.y + threadIdx.y, token = warp / parts, part = warp % parts;
    if (token >= tokens)
        return;
    pdl_wait<PDL>();
    const int64_t slot = slots[token];
    const bool has_c = parts == 1 || part < parts - 1, has_pe = parts == 1 || !has_c;
    word a[steps];
    uint32_t b = 0;
    if (has_c)
        for (int k = 0; k < steps; k++)
            a[k] = reinterpret_cast<const word *>(kv_c + token * mla_c_bytes + part * bytes)[32 * k + threadIdx.x];
    if (has_pe)
        b = reinterpret_cast<const uint32_t *>(k_pe + token * mla_pe_bytes)[threadIdx.x];
    pdl_trigger<PDL>();
    char *const to = c.data + slot * mla_bytes;
    if (has_c)
        for (int k = 0; k < steps; k++)
            reinterpret_cast<word *>(to + part * bytes)[32 * k + threadIdx.x] = a[k];
    if (has_pe)
        reinterpret_cast<uint32_t *>(to + mla_c_bytes)[threadIdx.x] = b;
}

/* The same file, a version before: a warp gathers a token's row in shared memory and writes it with one bulk copy.
   Blocks of 4 warps, 8 from 769 tokens on. */
template <int warps, bool PDL>
__global__ static void sglang_mla_bulk(const mla_cache c, const char *__restrict__ kv_c, const char *__restrict__ k_pe,
                                       const int64_t *__restrict__ slots, uint32_t tokens)
{
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(16) char rows[warps][mla_bytes];
    const uint32_t token = blockIdx.x * warps + threadIdx.y;
    if (token >= tokens)
        return;
    pdl_wait<PDL>();
    char *const row = rows[threadIdx.y];
    const uint4 *const from = reinterpret_cast<const uint4 *>(kv_c + token * mla_c_bytes);
    const uint4 a = from[threadIdx.x], b = from[32 + threadIdx.x];
    const uint32_t pe = reinterpret_cast<const uint32_t *>(k_pe + token * mla_pe_bytes)[threadIdx.x];
    char *const to = c.data + slots[token] * mla_bytes;
    reinterpret_cast<uint4 *>(row)[threadIdx.x] = a;
    reinterpret_cast<uint4 *>(row)[32 + threadIdx.x] = b;
    reinterpret_cast<uint32_t *>(row + mla_c_bytes)[threadIdx.x] = pe;
    __syncwarp();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                     "cp.async.bulk.commit_group;\n"
                     "cp.async.bulk.wait_group 0;" ::"l"(to),
                     "r"(uint32_t(__cvta_generic_to_shared(row))), "n"(mla_bytes)
                     : "memory");
    pdl_trigger<PDL>();
#endif
}

typedef void mla_kernel(const mla_cache, const char *__restrict__, const char *__restrict__,
                        const int64_t *__restrict__, uint32_t);

static void launch_mla(mla_kernel *kernel, bool pdl, uint32_t warps, uint32_t warps_per_block, const mla_job &j, int i)
{
    const char *const kv_c = dense_at(i, j.tokens * mla_c_bytes, false);
    const char *const k_pe = dense_at(i, j.tokens * mla_pe_bytes, true);
    CUDA(launch_opponent(kernel, dim3((warps + warps_per_block - 1) / warps_per_block), dim3(32, warps_per_block), pdl,
                         stream, j.c, kv_c, k_pe, j.slots->slot64.set(i), uint32_t(j.tokens)));
}

template <int parts, bool PDL> static void enqueue_sglang_mla(const mla_job &j, int i)
{
    uint32_t per_block = 1;
    while (parts == 1 && per_block < 8 && uint32_t(j.tokens) > multiprocessors * per_block)
        per_block *= 2;
    launch_mla(sglang_mla<parts, PDL>, PDL, uint32_t(j.tokens) * parts, per_block, j, i);
}

template <bool PDL> static void enqueue_sglang_bulk(const mla_job &j, int i)
{
    const bool many = j.tokens > 768;
    launch_mla(many ? sglang_mla_bulk<8, PDL> : sglang_mla_bulk<4, PDL>, PDL, uint32_t(j.tokens), many ? 8 : 4, j, i);
}

static void enqueue_vllm_mla(const mla_job &j, int i)
{
    vllm_mla<<<uint32_t(j.tokens), 512, 0, stream>>>(
        j.c, reinterpret_cast<const uint16_t *>(dense_at(i, j.tokens * mla_c_bytes, false)),
        reinterpret_cast<const uint16_t *>(dense_at(i, j.tokens * mla_pe_bytes, true)), j.slots->slot64.set(i));
    CUDA(cudaGetLastError());
}

template <bool i64, bool PDL> static void enqueue_mla(const mla_job &j, int i)
{
    kvprim_table cache = table_at(j.c.data, j.c.rows, mla_bytes);
    cache.page_rows = j.c.page_rows, cache.page_stride = j.c.page_stride;
    const kvprim_table kv_c = table_at(dense_at(i, j.tokens * mla_c_bytes, false), j.tokens);
    kvprim_store_desc d = i64 ? store_of(cache, kv_c, mla_c_bytes, j.slots->slot64.set(i), j.tokens)
                              : store_of(cache, kv_c, mla_c_bytes, j.slots->slot.set(i), j.tokens);
    d.v_cache = cache, d.v_cache.data = j.c.data + mla_c_bytes;
    d.v = table_at(dense_at(i, j.tokens * mla_pe_bytes, true), j.tokens), d.v_bytes = mla_pe_bytes;
    call_kvprim(kvprim_cuda_store, d, PDL);
}

/* kv_c of all tokens, then k_pe. */
struct moved_mla {
    mla_cache c;
    char *kv_c, *k_pe;
    int64_t tokens;
    const int32_t *slot;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t token = n % tokens, page = slot[token] / c.page_rows, row = slot[token] % c.page_rows;
        char *const to = c.data + page * c.page_stride + row * mla_bytes;
        return n < tokens ? piece{to, kv_c + token * mla_c_bytes, mla_c_bytes}
                          : piece{to + mla_c_bytes, k_pe + token * mla_pe_bytes, mla_pe_bytes};
    }
};

/* kvprim's first, then vLLM's. SGLang's have no pages: where these lie apart, they are left out. */
static const struct {
    const char *name;
    void (*enqueue)(const mla_job &, int);
} mla_ways[] = {{"kvprim", enqueue_mla<false, false>},
                {"kvprim", enqueue_mla<true, false>},
                {"kvprim+PDL", enqueue_mla<false, true>},
                {"kvprim+PDL", enqueue_mla<true, true>},
                {"vLLM", enqueue_vllm_mla},
                {"SGLang", enqueue_sglang_mla<1, false>},
                {"SGLang, 3 warps", enqueue_sglang_mla<3, false>},
                {"SGLang, 5 warps", enqueue_sglang_mla<5, false>},
                {"SGLang, bulk", enqueue_sglang_bulk<false>},
                {"SGLang+PDL", enqueue_sglang_mla<1, true>},
                {"SGLang+PDL, 3 warps", enqueue_sglang_mla<3, true>},
                {"SGLang+PDL, 5 warps", enqueue_sglang_mla<5, true>},
                {"SGLang+PDL, bulk", enqueue_sglang_bulk<true>}};

static std::vector<contender> mla_contenders(const mla_job &j, bool packed)
{
    const double bytes = 2.0 * double(j.tokens * mla_bytes);
    std::vector<contender> all;
    for (const auto &way : mla_ways) {
        if (all.size() == 5 && !packed)
            break;
        contender c = {way.name, [j, way](int i) { way.enqueue(j, i); }, bytes, launches_for(bytes)};
        check_pieces(c, "MLA store of " + rows_name(mla_bytes, j.tokens), 2 * j.tokens, [j](int i) {
            return moved_mla{j.c, dense_at(i, j.tokens * mla_c_bytes, false),
                             dense_at(i, j.tokens * mla_pe_bytes, true), j.tokens, j.slots->slot.set(i)};
        });
        all.push_back(c);
    }
    return all;
}

/* kvprim's time divided by that of the best opponent, without PDL; with PDL on both; the best way of each; with PDL by
   its own without. Of pages that lie apart: by vLLM's, and by its own where they do not. */
struct mla_figures {
    std::vector<figure> off, on, best, pdl, vllm, apart;
    std::vector<double> packed;
};

static void mla_figures_of(const std::vector<contender> &c, bool packed, int64_t tokens, mla_figures *f)
{
    double off = c[4].us, on = 1e9;
    for (size_t k = 5; k < c.size(); k++)
        (k < 9 ? off : on) = std::min(k < 9 ? off : on, c[k].us);
    for (size_t type = 0; type < 2; type++) {
        const std::string where = (packed ? "" : "apart ") + std::to_string(tokens) + (type ? " int64" : "");
        f->vllm.push_back({c[type].us / c[4].us, where});
        f->pdl.push_back({c[2 + type].us / c[type].us, where});
        if (packed) {
            f->off.push_back({c[type].us / off, where});
            f->on.push_back({c[2 + type].us / on, where});
            f->best.push_back({std::min(c[type].us, c[2 + type].us) / std::min(off, on), where});
        }
    }
    if (packed)
        f->packed.push_back(c[0].us);
    else if (tokens <= 64)
        f->apart.push_back({c[0].us / f->packed[f->apart.size()], std::to_string(tokens)});
}

static void mla_point(const mla_job &j, mla_figures *f)
{
    const bool packed = j.c.page_stride == j.c.page_rows * mla_bytes;
    std::vector<contender> c = mla_contenders(j, packed);
    measure(c);
    printf("%6s %7lld", packed ? "packed" : "apart", (long long)j.tokens);
    print_us(c, 7, 2);
    printf("\n");
    mla_figures_of(c, packed, j.tokens, f);
}

static void mla()
{
    mla_figures f;
    printf(
        "\nMLA store, rows of 1,152 B in pages of 64 tokens: us. SGLang's with a warp per token, with 3 and 5 warps,\n"
        "with a bulk copy; then these with PDL. The last lines: pages that lie apart\n"
        "%6s %7s %7s %7s %7s %7s %7s %31s %31s\n",
        "", "tokens", "i32", "i64", "i32 PDL", "i64 PDL", "vLLM", "SGLang", "SGLang+PDL");
    for (const bool apart : {false, true}) {
        mla_cache c = {cache_memory, cache_bytes / mla_bytes / 64 * 64, 64, 64 * mla_bytes};
        if (apart)
            c.page_stride *= 2, c.rows /= 2;
        const slot_sets slots(c.rows / 64 * 64, 64, 32768, false);
        for (const int64_t tokens : store_tokens(false))
            mla_point({c, &slots, tokens}, &f);
    }
    judge_both("MLA store / best of five, PDL off", f.off, 0.90, 1.03);
    judge_both("MLA store / best of SGLang's, PDL on", f.on, 0.90, 1.03);
    judge_mean("MLA store, best way / best way of all", f.best, 0.90);
    judge_both("MLA store / vLLM", f.vllm, 0.90, 1.03);
    judge_worst("MLA store, pages apart / packed, to 64 tokens", f.apart, '<', 1.05);
    judge_worst("MLA store, pdl = 1 / pdl = 0", f.pdl, '<', 1.02);
}

/* ---- gather of K from all layouts ---- */

/* Makes the cache's rows differ again: stores have put the same ones into many slots. */
static void hash_cache()
{
    hash_words<<<4096, 256, 0, stream>>>(reinterpret_cast<uint64_t *>(cache_memory), uint64_t(cache_bytes) / 8);
    CUDA(cudaGetLastError());
}

static contender contend_layout(const store_job &j, bool pdl)
{
    const int64_t row = j.c.heads * j.c.head_bytes;
    const auto enqueue = [=](int i) {
        const kvprim_table dst = table_at(dense_at(i, j.tokens * row, false), j.tokens);
        call_kvprim(kvprim_cuda_gather, gather_of(dst, table_of(j.c, false), row, j.slots->slot.set(i), j.tokens), pdl);
    };
    return contend(pdl ? "kvprim+PDL" : "kvprim", j, enqueue, true);
}

/* Prints a line. `flat`: us of the flat cache, which comes first. */
static void layout_line(const shape &s, layout l, const slot_sets &slots, std::vector<double> *flat,
                        std::vector<figure> f[2])
{
    const cache c = make_cache(l, s.heads, s.head_bytes, slots.page_rows);
    printf("%-16s %3lld", layout_names[l], (long long)c.page_rows);
    size_t n = 0;
    for (const int64_t tokens : {1, 8, 48, 64, 512, 4096}) {
        const store_job j = {&s, l, c, &slots, tokens};
        std::vector<contender> k = {contend_layout(j, false), contend_layout(j, true)};
        measure(k);
        if (l == FLAT)
            flat->push_back(k[0].us);
        const double ratio = k[0].us / (*flat)[n++];
        const std::string where =
            layout_names[l] + ("/" + std::to_string(c.page_rows)) + " " + rows_name(s.heads * s.head_bytes, tokens);
        if (l != FLAT && tokens <= 64)
            f[0].push_back({ratio, where});
        f[1].push_back({k[1].us / k[0].us, where});
        printf(" %7.2f %5.2f", k[0].us, ratio);
    }
    printf("\n");
}

static void layouts()
{
    std::vector<figure> f[2];
    hash_cache();
    printf("\ngather of K, random slots, PDL off: us, and its part of a flat cache's\n%-20s %7d %13d %13d %13d %13d "
           "%13d\n",
           "tokens", 1, 8, 48, 64, 512, 4096);
    for (const shape &s : shapes) {
        std::vector<double> flat;
        printf("%s\n", s.name);
        for (const int64_t page_rows : {16, 64}) {
            const slot_sets slots(cache_bytes / 2 / (s.heads * s.head_bytes), page_rows, 4096, false);
            for (int l = page_rows == 16 ? FLAT : NHD; l < (s.heads == 1 ? HND : LAYOUTS); l++)
                layout_line(s, layout(l), slots, &flat, f);
        }
    }
    judge_worst("gather / flat, to 64 tokens", f[0], '<', 1.05);
    judge_worst("gather, pdl = 1 / pdl = 0", f[1], '<', 1.02);
}

/* ---- gather of requests' tokens from pages ---- */

/* Rows of requests' tokens. A cache of K alone, or of pages that hold K and V. */
struct gather_job {
    int64_t row_bytes, page_rows, page_stride;
    const page_sets *sets;

    int64_t count() const
    {
        return sets->tokens;
    }
    char *dst(int i) const
    {
        return dense_at(i, count() * row_bytes, false);
    }
};

/* vLLM, csrc/libtorch_stable/cache_kernels.cu, cp_gather_cache: 16 blocks of 1,024 threads per request (4 from 65
   requests on, 2 from 129 on). A block copies its part of the tokens one after the other, a thread 2 bytes of each. */
__global__ static void vllm_gather(const uint16_t *__restrict__ cache, uint16_t *__restrict__ dst,
                                   const int32_t *__restrict__ table, const int32_t *__restrict__ starts,
                                   int32_t page_rows, int32_t elements, int64_t pages_per_request, int64_t page_stride)
{
    const int32_t start = starts[blockIdx.x], length = starts[blockIdx.x + 1] - start;
    const int32_t part = (length + int32_t(gridDim.y) - 1) / int32_t(gridDim.y);
    const int32_t first = int32_t(blockIdx.y) * part, end = min(first + part, length);
    for (int32_t t = first; t < end; t++) {
        const int64_t page = table[blockIdx.x * pages_per_request + t / page_rows];
        const uint16_t *const from = cache + page * page_stride + int64_t(t % page_rows) * elements;
        uint16_t *const to = dst + int64_t(start + t) * elements;
        for (int32_t i = int32_t(threadIdx.x); i < elements; i += int32_t(blockDim.x))
            to[i] = from[i];
    }
}

/* The same file, gather_and_maybe_dequant_cache (of MLA's 576 elements): a block of 64 threads per token; each thread
   copies 16 bytes, and 16 bytes more until the row ends. */
template <int row_bytes>
__global__ static void vllm_gather_tokens(const char *__restrict__ cache, char *__restrict__ dst,
                                          const int32_t *__restrict__ table, const int32_t *__restrict__ starts,
                                          const int32_t *__restrict__ request, int32_t page_rows,
                                          int64_t pages_per_request, int64_t page_stride)
{
    constexpr int words = row_bytes / 16, steps = (words + 63) / 64;
    const int32_t token = int32_t(blockIdx.x), owner = request[token], t = token - starts[owner];
    const int64_t page = table[owner * pages_per_request + t / page_rows];
    const uint4 *const from = reinterpret_cast<const uint4 *>(cache + page * page_stride + t % page_rows * row_bytes);
    uint4 *const to = reinterpret_cast<uint4 *>(dst + int64_t(token) * row_bytes);
    uint4 v[steps];
    for (int k = 0; k < steps; k++)
        if (64 * k + int(threadIdx.x) < words)
            v[k] = from[64 * k + threadIdx.x];
    for (int k = 0; k < steps; k++)
        if (64 * k + int(threadIdx.x) < words)
            to[64 * k + threadIdx.x] = v[k];
}

static void enqueue_vllm_gather(const gather_job &j, int i)
{
    const page_sets &s = *j.sets;
    const uint32_t requests = uint32_t(s.requests()), splits = requests > 128 ? 2 : requests > 64 ? 4 : 16;
    vllm_gather<<<dim3(requests, splits), 1024, 0, stream>>>(
        reinterpret_cast<const uint16_t *>(cache_memory), reinterpret_cast<uint16_t *>(j.dst(i)), s.table.set(i),
        s.starts.get(), int32_t(j.page_rows), int32_t(j.row_bytes / 2), s.length / j.page_rows, j.page_stride / 2);
    CUDA(cudaGetLastError());
}

static void enqueue_vllm_tokens(const gather_job &j, int i)
{
    const page_sets &s = *j.sets;
    const auto kernel = j.row_bytes == mla_bytes ? vllm_gather_tokens<mla_bytes> : vllm_gather_tokens<2048>;
    kernel<<<uint32_t(j.count()), 64, 0, stream>>>(cache_memory, j.dst(i), s.table.set(i), s.starts.get(),
                                                   s.request.get(), int32_t(j.page_rows), s.length / j.page_rows,
                                                   j.page_stride);
    CUDA(cudaGetLastError());
}

/* Tokens by their slots, or pages as rows. */
template <bool pages, bool PDL> static void enqueue_gather(const gather_job &j, int i)
{
    const int64_t rows = pages ? j.page_rows : 1, in_cache = j.sets->pages * j.page_rows / rows;
    const kvprim_table dst = table_at(j.dst(i), j.count() / rows);
    kvprim_table src = table_at(cache_memory, in_cache, pages ? j.page_stride : j.row_bytes);
    if (!pages)
        src.page_rows = j.page_rows, src.page_stride = j.page_stride;
    call_kvprim(kvprim_cuda_gather, gather_of(dst, src, rows * j.row_bytes, j.sets->index(pages, i), dst.rows), PDL);
}

struct moved_tokens {
    char *dst, *data;
    int64_t row_bytes, page_rows, page_stride;
    const int32_t *slot;

    __device__ piece operator()(int64_t n) const
    {
        return {dst + n * row_bytes, data + slot[n] / page_rows * page_stride + slot[n] % page_rows * row_bytes,
                row_bytes};
    }
};

static contender contend_gather(const char *name, const gather_job &j, void (*enqueue)(const gather_job &, int))
{
    const double bytes = 2.0 * double(j.count() * j.row_bytes);
    contender c = {name, [j, enqueue](int i) { enqueue(j, i); }, bytes, launches_for(bytes)};
    check_pieces(c, "page gather of " + rows_name(j.row_bytes, j.count()), j.count(), [j](int i) {
        return moved_tokens{j.dst(i), cache_memory, j.row_bytes, j.page_rows, j.page_stride, j.sets->slots.set(i)};
    });
    return c;
}

static void gather_point(const gather_job &j, std::vector<figure> f[3])
{
    std::vector<contender> c = {contend_gather("kvprim, pages", j, enqueue_gather<true, false>),
                                contend_gather("kvprim, pages+PDL", j, enqueue_gather<true, true>),
                                contend_gather("kvprim, tokens", j, enqueue_gather<false, false>),
                                contend_gather("kvprim, tokens+PDL", j, enqueue_gather<false, true>),
                                contend_gather("vLLM, requests", j, enqueue_vllm_gather),
                                contend_gather("vLLM, tokens", j, enqueue_vllm_tokens)};
    measure(c);
    const double theirs = std::min(c[4].us, c[5].us);
    printf("%6lld %4lld%s %6lld %7lld", (long long)j.row_bytes, (long long)j.page_rows,
           j.page_stride > j.page_rows * j.row_bytes ? "+" : " ", (long long)j.sets->requests(),
           (long long)j.sets->length);
    print_us(c, 9, 2);
    printf(" %7.3f %7.3f\n", c[0].us / theirs, c[2].us / theirs);
    const std::string where = rows_name(j.row_bytes, j.count()) + " in " + std::to_string(j.page_rows);
    f[0].push_back({c[0].us / theirs, where + " pages"});
    f[1].push_back({c[2].us / theirs, where + " tokens"});
    for (const size_t k : {0, 2})
        f[2].push_back({c[k + 1].us / c[k].us, where + (k ? " tokens" : " pages")});
}

/* Rows of row_bytes; `both`: V's rows lie in the same page. */
static void gather_pages(int64_t row_bytes, int64_t page_rows, bool both, std::vector<figure> f[3])
{
    for (const auto &size :
         std::vector<std::pair<int64_t, int64_t>>{{1, 64}, {1, 4096}, {32, 128}, {8, 1024}, {32, 2048}}) {
        const int64_t page_stride = page_rows * row_bytes * (both ? 2 : 1);
        const page_sets sets(cache_bytes / page_stride, page_rows, size.first * size.second, size.second, 13);
        gather_point({row_bytes, page_rows, page_stride, &sets}, f);
    }
}

static void gather()
{
    std::vector<figure> f[3];
    hash_cache();
    printf(
        "\ngather of requests' tokens from random pages: us, kvprim by pages and by tokens; both against the better\n"
        "of vLLM's cp_gather_cache (by requests) and gather_and_maybe_dequant_cache (by tokens). +: pages hold V "
        "too\n%6s %5s %6s %7s %9s %9s %9s %9s %9s %9s %7s %7s\n",
        "row B", "page", "batch", "length", "pages", "+PDL", "tokens", "+PDL", "requests", "tokens", "pages", "tokens");
    for (const int64_t page_rows : {16, 64}) {
        gather_pages(mla_bytes, page_rows, false, f);
        gather_pages(2048, page_rows, true, f);
    }
    judge_both("page gather, by pages / best of vLLM", f[0], 1.0, 1.0);
    judge_both("page gather, by tokens / best of vLLM", f[1], 1.0, 1.03);
    judge_worst("page gather, pdl = 1 / pdl = 0", f[2], '<', 1.02);
}

/* ---- vLLM's first layout ---- */

/* K lies in pieces of 16 bytes [page][head][head_bytes / 16][row][16 bytes], V in pieces of one element
   [page][head][element][row]: a row of V has 1,024 pieces of 2 bytes. */
constexpr int64_t v0_page_rows = 16, v0_row_bytes = 2048, v0_piece[2] = {16, 2};

struct v0_job {
    const slot_sets *slots;
    int64_t tokens;
};

static char *v0_cache(int v)
{
    return cache_memory + v * (cache_bytes / 2);
}

/* vLLM, csrc/libtorch_stable/cache_kernels.cu, reshape_and_cache. A block per token, of a thread for each 16 bytes: it
   writes these of K at once, and these of V as 8 elements. */
__global__ static void vllm_v0(char *k_cache, char *v_cache, const char *__restrict__ k, const char *__restrict__ v,
                               const int64_t *__restrict__ slots, int page_rows)
{
    const int64_t token = blockIdx.x, slot = slots[token];
    if (slot < 0)
        return;
    const int64_t page = slot / page_rows, row = slot % page_rows, word = token * (v0_row_bytes / 16) + threadIdx.x;
    const uint4 a = reinterpret_cast<const uint4 *>(k)[word];
    union {
        uint4 whole;
        uint16_t elements[8];
    } b = {reinterpret_cast<const uint4 *>(v)[word]};
    const int64_t at = (page * (v0_row_bytes / 16) + threadIdx.x) * page_rows; /* in 16 bytes */
    reinterpret_cast<uint4 *>(k_cache)[at + row] = a;
    uint16_t *const to = reinterpret_cast<uint16_t *>(v_cache) + at * 8 + row;
#pragma unroll
    for (int e = 0; e < 8; e++)
        to[e * page_rows] = b.elements[e];
}

/* torch, aten/src/ATen/native/cuda/IndexKernel.cu, cache[page, :, row] = v (index_put_), of V alone: blocks of 128
   threads, 4 elements each, 128 apart. */
__global__ static void torch_v0(uint16_t *v_cache, const uint16_t *__restrict__ v, const int64_t *__restrict__ slots)
{
    constexpr int row_elements = v0_row_bytes / 2, each = 4;
    uint16_t value[each];
    int64_t slot[each], first = int64_t(blockIdx.x) * (128 * each) + threadIdx.x;
    for (int k = 0; k < each; k++) {
        value[k] = v[first + 128 * k];
        slot[k] = slots[(first + 128 * k) / row_elements];
    }
    for (int k = 0; k < each; k++) {
        const int64_t element = (first + 128 * k) % row_elements;
        v_cache[(slot[k] / v0_page_rows * row_elements + element) * v0_page_rows + slot[k] % v0_page_rows] = value[k];
    }
}

static void enqueue_torch_v0(const v0_job &j, int i)
{
    torch_v0<<<uint32_t(j.tokens * v0_row_bytes / 2 / 512), 128, 0, stream>>>(
        reinterpret_cast<uint16_t *>(v0_cache(1)),
        reinterpret_cast<const uint16_t *>(dense_at(i, j.tokens * v0_row_bytes, true)), j.slots->slot64.set(i));
    CUDA(cudaGetLastError());
}

static void enqueue_vllm_v0(const v0_job &j, int i)
{
    vllm_v0<<<uint32_t(j.tokens), unsigned(v0_row_bytes / 16), 0, stream>>>(
        v0_cache(0), v0_cache(1), dense_at(i, j.tokens * v0_row_bytes, false),
        dense_at(i, j.tokens * v0_row_bytes, true), j.slots->slot64.set(i), int(v0_page_rows));
    CUDA(cudaGetLastError());
}

static kvprim_table v0_table(int v, int64_t rows)
{
    kvprim_table t = table_at(v0_cache(v), rows, v0_piece[v]);
    t.page_rows = v0_page_rows;
    t.page_stride = v0_page_rows * v0_row_bytes;
    t.heads = int32_t(v0_row_bytes / v0_piece[v]);
    t.head_stride = v0_page_rows * v0_piece[v];
    return t;
}

template <bool with_k, bool PDL> static void enqueue_v0(const v0_job &j, int i)
{
    const auto dense = [&](bool v) { return table_at(dense_at(i, j.tokens * v0_row_bytes, v), j.tokens); };
    kvprim_store_desc d =
        store_of(v0_table(!with_k, j.slots->rows), dense(!with_k), v0_row_bytes, j.slots->slot.set(i), j.tokens);
    if (with_k)
        d.v_cache = v0_table(1, j.slots->rows), d.v = dense(true), d.v_bytes = v0_row_bytes;
    call_kvprim(kvprim_cuda_store, d, PDL);
}

/* V's pieces, then K's if there are some. */
struct moved_v0 {
    char *cache[2], *dense[2];
    int64_t v_pieces, tokens;
    const int32_t *slot;

    __device__ piece operator()(int64_t n) const
    {
        const int v = n < v_pieces;
        const int64_t bytes = v ? 2 : 16, each = v0_row_bytes / bytes, one = v ? n : n - v_pieces;
        const int64_t token = one / each, e = one % each, page = slot[token] / v0_page_rows;
        return {cache[v] + ((page * each + e) * v0_page_rows + slot[token] % v0_page_rows) * bytes,
                dense[v] + token * v0_row_bytes + e * bytes, bytes};
    }
};

static contender contend_v0(const char *name, const v0_job &j, bool with_k, void (*enqueue)(const v0_job &, int))
{
    contender c = {name, [j, enqueue](int i) { enqueue(j, i); }, 0, 24};
    const int64_t v_pieces = j.tokens * v0_row_bytes / 2, k_pieces = j.tokens * v0_row_bytes / 16;
    check_pieces(c, "v0 store of " + std::to_string(j.tokens), v_pieces + (with_k ? k_pieces : 0), [=](int i) {
        char *const k = dense_at(i, j.tokens * v0_row_bytes, false), *const v =
                                                                         dense_at(i, j.tokens * v0_row_bytes, true);
        return moved_v0{{v0_cache(0), v0_cache(1)}, {k, v}, v_pieces, j.tokens, j.slots->slot.set(i)};
    });
    return c;
}

static void v0()
{
    const slot_sets slots(cache_bytes / 2 / v0_row_bytes, v0_page_rows, 4096, false);
    std::vector<figure> v, both, pdl;
    printf(
        "\nstore of 2 KB rows in vLLM's first layout (V: 1,024 pieces of 2 B): us of V, also by torch's index_put_;\n"
        "of K and V, also by vLLM's reshape_and_cache; kvprim's part of theirs\n"
        "%7s %9s %9s %9s %7s %9s %9s %9s %7s\n",
        "tokens", "V", "+PDL", "torch", "", "K, V", "+PDL", "vLLM", "");
    for (const int64_t tokens : {1, 8, 64, 512, 4096}) {
        const v0_job j = {&slots, tokens};
        std::vector<contender> c = {contend_v0("kvprim, V", j, false, enqueue_v0<false, false>),
                                    contend_v0("kvprim, V+PDL", j, false, enqueue_v0<false, true>),
                                    contend_v0("torch, V", j, false, enqueue_torch_v0),
                                    contend_v0("kvprim", j, true, enqueue_v0<true, false>),
                                    contend_v0("kvprim+PDL", j, true, enqueue_v0<true, true>),
                                    contend_v0("vLLM", j, true, enqueue_vllm_v0)};
        measure(c);
        printf("%7lld", (long long)tokens);
        for (size_t k = 0; k < c.size(); k += 3) {
            const double ratio = c[k].us / c[k + 2].us;
            print_us(c, 9, 2, k, k + 3);
            printf(" %7.3f", ratio);
            (k ? both : v).push_back({ratio, std::to_string(tokens)});
            pdl.push_back({c[k + 1].us / c[k].us, std::to_string(tokens)});
        }
        printf("\n");
    }
    judge_worst("V in vLLM's first layout / torch's index_put_", v, '<', 1.0);
    judge_worst("K and V in vLLM's first layout / vLLM", both, '<', 1.0);
    judge_worst("vLLM's first layout, pdl = 1 / pdl = 0", pdl, '<', 1.02);
}

/* ---- the program ---- */

static void open_all()
{
    cudaDeviceProp device;
    open_gpu(cache_bytes + dense_bytes + GiB);
    CUDA(cudaGetDeviceProperties(&device, 0));
    multiprocessors = uint32_t(device.multiProcessorCount);
    cache_memory = allocate_hashed(cache_bytes);
    dense_memory = allocate_hashed(dense_bytes);
    std::vector<contender> empty = {{"empty", [](int) { empty_kernel<<<1, 128, 0, stream>>>(); }}};
    measure(empty);
    printf("empty kernel in a graph: %.3f us\n", empty[0].us);
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all,
                       {{"store", store}, {"mla", mla}, {"layouts", layouts}, {"gather", gather}, {"v0", v0}});
}

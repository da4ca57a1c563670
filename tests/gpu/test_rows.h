/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share. They run gathers, stores and transfers in one block of memory,
   once by the host function and once by the GPU's, and compare every byte. Include it after kvprim_cuda.cuh and define
   before, allow and after. */
#ifndef TEST_ROWS_H
#define TEST_ROWS_H

#include "../core/bad_descriptors.h"
#include <string>
#include <utility>
#include <vector>

/* For printf: %lld and %llu. */
typedef long long print_i64;
typedef unsigned long long print_u64;

/* What runs now. It is static so that it can be printed if AddressSanitizer ends the program. */
static thread_local char current[600];

/* ---- memory ---- */

/* A table of the call that runs now, resolved, for reports. */
struct named_table {
    const char *name;
    int32_t layer;
    kvprim_table t;
    int64_t row_bytes;
};

/* An index in the arena, and how it is filled. */
struct placed_index {
    void *data;
    kvprim_index_type type;
    int64_t count, base, rows, stride;
    bool distinct;
};

/* All memory of one move: tables, indices and counter, with random bytes in and between them. Both sides start with the
   same contents. Descriptors hold addresses in `expected`. */
struct arena {
    unsigned char *expected, *got; /* where the host functions work; the result of the code under test */
    unsigned char *device;         /* where the code under test finds its copy */
    unsigned char *source;         /* where it finds what transfers read, which must not change; NULL: `device` */
    size_t capacity, used;
    int64_t index_room; /* how many indices there is memory for */
    std::vector<placed_index> indices;
    const kvprim_cuda_launch *launch;
    std::vector<std::pair<size_t, size_t>> allowed; /* offset and bytes of what may be accessed */
    std::vector<unsigned char> taken;               /* per byte: 1 if it is written, or is of an index or the counter */
    std::vector<named_table> tables;
};

enum { margin = 256, most_layers = 300 };

static arena memory; /* of the main thread */

/* Brings `got` to where the code under test sees it. */
static void before(arena *a);
/* From now on these bytes may be accessed, and no others of the arena. */
static void allow(arena *a, size_t offset, size_t bytes);
/* Waits for the code under test and brings its result to `got`. enqueues: it had something to do. */
static void after(arena *a, bool enqueues);
/* Kernels and copies that were enqueued so far, or 0 where nobody counts them. */
static unsigned enqueued();

/* For run(): a test in the memory of the main thread. */
template <void (*test)(arena *)> static void in_memory()
{
    test(&memory);
}

static void empty(arena *a)
{
    a->used = 0;
    a->index_room = 0;
    a->indices.clear();
    a->tables.clear();
}

/* Reserves `bytes` of random contents, `align` bytes past a multiple of 64, with guard bytes on both sides. */
template <class T = void> static T *reserve(arena *a, size_t bytes, size_t align)
{
    const size_t start = a->used, offset = start + margin + align;
    a->used = (offset + bytes + margin + 63) / 64 * 64;
    if (a->used > a->capacity) {
        printf("FAIL a test needs %zu bytes of memory, and there are %zu\n0 passed, 1 failed, 0 skipped\n", a->used,
               a->capacity);
        exit(1);
    }
    fill(a->expected + start, a->used - start);
    return reinterpret_cast<T *>(a->expected + offset);
}

static uint32_t *reserve_counter(arena *a)
{
    uint32_t *const counter = reserve<uint32_t>(a, 4, 4 * below(16));
    *counter = uint32_t(5 + below(3) * (UINT32_MAX - 6)); /* may wrap around */
    return counter;
}

static size_t offset_of(const arena *a, const void *p)
{
    return size_t(static_cast<const unsigned char *>(p) - a->expected);
}

/* Turns an address in one memory into that of the same byte in another. */
template <class T> static T *moved(T *p, const void *from, const void *to)
{
    if (!p)
        return nullptr;
    return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(to) + reinterpret_cast<uintptr_t>(p) -
                                 reinterpret_cast<uintptr_t>(from));
}

template <class T> static T *on_device(const arena *a, T *p)
{
    return moved(p, a->expected, a->device);
}

template <class T> static T *on_source(const arena *a, T *p)
{
    return moved(p, a->expected, a->source ? a->source : a->device);
}

/* ---- descriptors ---- */

static kvprim_table table_of(void *data, int64_t rows, int64_t stride)
{
    return strided_table(data, rows, stride);
}

/* Has no rows and no memory. Its heads must not matter. */
static kvprim_table empty_table()
{
    kvprim_table t = {};
    t.heads = 4;
    t.head_stride = 32;
    return t;
}

static kvprim_gather_desc gather_of(const kvprim_table &dst, const kvprim_table &src, int64_t row_bytes,
                                    const void *index, kvprim_index_type type, int64_t base, int64_t count,
                                    uint32_t *rejected)
{
    kvprim_gather_desc d = {};
    d.dst = dst, d.src = src, d.row_bytes = row_bytes;
    d.index = index, d.index_type = type, d.index_base = base;
    d.count = count, d.rejected = rejected;
    return d;
}

/* Stores K only. */
static kvprim_store_desc store_of(const kvprim_table &cache, const kvprim_table &input, int64_t row_bytes,
                                  const void *slot, kvprim_index_type type, int64_t count, uint32_t *rejected)
{
    kvprim_store_desc d = {};
    d.k_cache = cache, d.k = input, d.k_bytes = row_bytes;
    d.slot = slot, d.slot_type = type;
    d.count = count, d.rejected = rejected;
    return d;
}

static void drop_v(kvprim_store_desc *d)
{
    d->v_cache = d->v = table_of(nullptr, 0);
    d->v_bytes = 0;
}

/* Makes the options of a launch into the arena's stream. */
static kvprim_cuda_launch launch_like(const arena *a, int32_t pdl, int32_t max_sms)
{
    kvprim_cuda_launch launch = {};
    launch.stream = a->launch ? a->launch->stream : nullptr;
    launch.pdl = pdl;
    launch.max_sms = max_sms;
    return launch;
}

static kvprim_table on_device(const arena *a, kvprim_table t)
{
    t.data = on_device(a, t.data);
    return t;
}

static kvprim_gather_desc on_device(const arena *a, kvprim_gather_desc d)
{
    d.dst = on_device(a, d.dst);
    d.src = on_device(a, d.src);
    d.index = on_device(a, d.index);
    d.rejected = on_device(a, d.rejected);
    return d;
}

static kvprim_store_desc on_device(const arena *a, kvprim_store_desc d)
{
    for (kvprim_table *const t : {&d.k_cache, &d.v_cache, &d.k, &d.v})
        *t = on_device(a, *t);
    d.slot = on_device(a, d.slot);
    d.rejected = on_device(a, d.rejected);
    return d;
}

/* A descriptor for the code under test, with its arrays of layers. */
template <class Desc> struct on_gpu {
    Desc d;

    on_gpu(const arena *a, const Desc &host) : d(on_device(a, host))
    {
    }
};

template <> struct on_gpu<kvprim_transfer_desc> {
    kvprim_transfer_desc d;
    void *dst_layers[most_layers], *src_layers[most_layers];

    on_gpu(const arena *a, const kvprim_transfer_desc &host) : d(host)
    {
        for (int32_t l = 0; l < (d.layers ? d.layers : 1) && l < most_layers; l++) { /* 0 means 1 */
            dst_layers[l] = d.dst_layers ? on_device(a, d.dst_layers[l]) : nullptr;
            src_layers[l] = d.src_layers ? on_source(a, d.src_layers[l]) : nullptr;
        }
        d.dst_layers = d.dst_layers ? dst_layers : nullptr;
        d.src_layers = d.src_layers ? src_layers : nullptr;
        d.dst.data = on_device(a, d.dst.data);
        d.src.data = on_source(a, d.src.data);
        d.dst_index = on_device(a, d.dst_index);
        d.src_index = on_source(a, d.src_index);
        d.rejected = on_device(a, d.rejected);
    }
    on_gpu(const on_gpu &) = delete;
};
typedef on_gpu<kvprim_transfer_desc> device_transfer;

/* What each kind of descriptor is for. */
template <class Desc> struct functions;
#define FUNCTIONS(operation, ...)                                                                                      \
    template <> struct functions<kvprim_##operation##_desc> {                                                          \
        static constexpr const char *name = #operation;                                                                \
        static constexpr auto check = kvprim_##operation##_check;                                                      \
        static constexpr auto host = kvprim_##operation;                                                               \
        static constexpr auto gpu = kvprim_cuda_##operation;                                                           \
        __VA_ARGS__                                                                                                    \
    }
FUNCTIONS(gather, static constexpr auto moves = kvprim_gather_moves;);
FUNCTIONS(store, static constexpr auto moves = kvprim_store_moves;);
FUNCTIONS(transfer, static constexpr auto moves = kvprim_transfer_moves;);
FUNCTIONS(slots, );
FUNCTIONS(unpack, );
FUNCTIONS(unpack_meta, );
FUNCTIONS(copy, );
FUNCTIONS(fetch, );

/* ---- rows, as the contract states them ---- */

/* Returns where byte `byte` of row `row` lies in a resolved table. */
static int64_t row_offset(const kvprim_table *t, int64_t row_bytes, int64_t row, int64_t byte)
{
    const int64_t piece = row_bytes / t->heads;
    const int64_t start =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    return start + byte / piece * t->head_stride + byte % piece;
}

static int64_t index_at(const void *index, kvprim_index_type type, int64_t i)
{
    return type == KVPRIM_I64 ? static_cast<const int64_t *>(index)[i] : static_cast<const int32_t *>(index)[i];
}

/* Returns the row of an index, -1 for padding, or -2 past the end. */
static int64_t ruled(int64_t value, int64_t base, int64_t rows)
{
    if (value < base)
        return -1;
    if (base >= 0 ? value - base >= rows : value >= rows + base)
        return -2;
    return value - base;
}

/* One side of a move, resolved: where its rows lie, and what names them. `index` NULL: row i. */
struct side {
    const char *name;
    kvprim_table table;
    const void *index;
    kvprim_index_type type;
    int64_t base, stride;
    void *const *layers;
    int64_t layer_stride;
};

/* What a descriptor stands for: in every layer, dst row = src row. */
struct rows_move {
    side dst, src;
    int64_t row_bytes, count;
    int32_t layers;
    bool zero; /* a row without a source becomes zeros */
    uint32_t *rejected;
    std::vector<std::pair<int64_t, int64_t>> rows; /* of dst and src, or less than 0 */
};

static side side_of(const char *name, const kvprim_table &table, const void *index = nullptr,
                    kvprim_index_type type = KVPRIM_I32, int64_t base = 0, int64_t stride = 1)
{
    side s = {name, table, index, type, base, stride, nullptr, 0};
    s.table.head_stride = table.head_stride > 0 ? table.head_stride : 0; /* KVPRIM_HEADS_SHARED */
    return s;
}

/* From resolved descriptors, not from kvprim's own moves, which are under test as well. */
static std::vector<rows_move> rows_of(const kvprim_gather_desc *d)
{
    return {{side_of("dst", d->dst),
             side_of("src", d->src, d->index, d->index_type, d->index_base, d->index_stride),
             d->row_bytes,
             d->count,
             1,
             !d->keep_padding,
             d->rejected,
             {}}};
}

static std::vector<rows_move> rows_of(const kvprim_store_desc *d)
{
    const side k = side_of("k_cache", d->k_cache, d->slot, d->slot_type, d->slot_base, d->slot_stride);
    const side v = side_of("v_cache", d->v_cache, d->slot, d->slot_type, d->slot_base, d->slot_stride);
    std::vector<rows_move> moves = {{k, side_of("k", d->k), d->k_bytes, d->count, 1, false, d->rejected, {}}};
    if (d->v_cache.data)
        moves.push_back({v, side_of("v", d->v), d->v_bytes, d->count, 1, false, nullptr, {}});
    return moves;
}

static std::vector<rows_move> rows_of(const kvprim_transfer_desc *d)
{
    side dst = side_of("dst", d->dst, d->dst_index, d->dst_index_type ? d->dst_index_type : d->index_type,
                       d->dst_index_base, d->dst_index_stride);
    side src = side_of("src", d->src, d->src_index, d->src_index_type ? d->src_index_type : d->index_type,
                       d->src_index_base, d->src_index_stride);
    dst.layers = d->dst_layers, dst.layer_stride = d->dst_layer_stride;
    src.layers = d->src_layers, src.layer_stride = d->src_layer_stride;
    return {{dst, src, d->row_bytes, d->count, d->layers, false, d->rejected, {}}};
}

static kvprim_table layer_of(const side *s, int32_t l)
{
    kvprim_table layer = s->table;
    if (s->layers)
        layer.data = s->layers[l];
    else if (layer.data)
        layer.data = static_cast<char *>(layer.data) + l * s->layer_stride;
    return layer;
}

static int64_t row_at(const side *s, int64_t i)
{
    return s->index ? ruled(index_at(s->index, s->type, i * s->stride), s->base, s->table.rows) : i;
}

/* Allows access to a row: a write to its bytes only, a read to the aligned 16-byte words that hold them. Returns false
   if the row lies outside the memory, or where another row is written or an index or the counter lies. */
static bool visit(arena *a, const kvprim_table *t, int64_t row_bytes, int64_t row, bool write)
{
    const int64_t piece = row_bytes / t->heads, room = int64_t(a->used);
    for (int64_t head = 0; head < t->heads; head++) {
        const int64_t from_table = row_offset(t, row_bytes, row, head * piece);
        if (from_table >= room || piece > room)
            return false;
        const size_t bytes = size_t(piece);
        const size_t begin = offset_of(a, t->data) + size_t(from_table);
        if (begin + bytes > a->used || memchr(&a->taken[begin], 1, bytes))
            return false;
        if (write)
            memset(&a->taken[begin], 1, bytes);
        const size_t first = write ? begin : begin / 16 * 16;
        const size_t end = write ? begin + bytes : (begin + bytes + 15) / 16 * 16;
        a->allowed.push_back({first, end - first});
    }
    return true;
}

/* Takes all permissions back. */
static void start_visit(arena *a)
{
    a->allowed.clear();
    a->taken.assign(a->used, 0);
    a->tables.clear();
}

static void visit_word(arena *a, const void *word, size_t bytes)
{
    a->allowed.push_back({offset_of(a, word), bytes});
    memset(&a->taken[offset_of(a, word)], 1, bytes);
}

/* Allows access to the elements of an index that are used. */
static bool visit_index(arena *a, const side *s, int64_t count)
{
    const size_t width = s->type == KVPRIM_I64 ? 8 : 4;
    if (!s->index)
        return true;
    if (count > a->index_room || (count > 1 && s->stride > (a->index_room - 1) / (count - 1)))
        return false;
    if (s->stride == 1)
        visit_word(a, s->index, size_t(count) * width);
    for (int64_t i = 0; s->stride > 1 && i < count; i++)
        visit_word(a, static_cast<const char *>(s->index) + size_t(i * s->stride) * width, width);
    return true;
}

/* With KVPRIM_DEBUG a call asks whether the GPU can reach all rows of an indexed table. It refuses a table that claims
   more rows than the memory has, even if no index names them. The last whole page may end after the last partial one.
   */
static bool reachable(const arena *a, const kvprim_table *t, int64_t row_bytes)
{
#ifdef KVPRIM_DEBUG
    const size_t begin = offset_of(a, t->data);
    const int64_t rows = t->rows, whole = t->page_rows ? rows / t->page_rows * t->page_rows : 0;
    if (rows < 1)
        return true;
    if (begin >= a->used)
        return false;
    const int64_t room = int64_t(a->used - begin);
    return row_offset(t, row_bytes, rows - 1, row_bytes - 1) < room &&
           (whole == 0 || row_offset(t, row_bytes, whole - 1, row_bytes - 1) < room);
#else
    (void)a, (void)t, (void)row_bytes;
    return true;
#endif
}

/* Visits one layer's rows that are written, or those that are read. A source without an index may be read even if its
   row goes nowhere. */
static bool visit_layer(arena *a, const rows_move *m, int32_t l, bool write)
{
    const side *const s = write ? &m->dst : &m->src;
    const kvprim_table t = layer_of(s, l);
    bool good = !s->index || reachable(a, &t, m->row_bytes);
    a->tables.push_back({s->name, l, t, m->row_bytes});
    for (size_t i = 0; good && i < m->rows.size(); i++) {
        const int64_t to = m->rows[i].first, from = m->rows[i].second;
        const bool writes = to >= 0 && (from >= 0 || m->zero), reads = from >= 0 && (to >= 0 || !m->src.index);
        good = (write ? !writes : !reads) || visit(a, &t, m->row_bytes, write ? to : from, write);
    }
    return good;
}

/* Visits indices and counters, then all that is written; then checks that none of it is read. */
static bool visit_moves(arena *a, std::vector<rows_move> moves)
{
    bool good = true;
    for (rows_move &m : moves) {
        if (m.rejected)
            visit_word(a, m.rejected, 4);
        good = good && visit_index(a, &m.dst, m.count) && visit_index(a, &m.src, m.count);
        for (int64_t i = 0; good && i < m.count; i++)
            m.rows.push_back({row_at(&m.dst, i), row_at(&m.src, i)});
    }
    for (const bool write : {true, false})
        for (const rows_move &m : moves)
            for (int32_t l = 0; good && l < m.layers; l++)
                good = visit_layer(a, &m, l, write);
    return good;
}

/* Adds to `current` how the rows lie. */
static void describe(const std::vector<rows_move> &moves)
{
    size_t n = strlen(current);
    for (const rows_move &m : moves)
        for (const side *const s : {&m.dst, &m.src}) {
            const kvprim_table &t = s->table;
            if (n < sizeof current)
                n += size_t(
                    snprintf(current + n, sizeof current - n,
                             "; %s %p + %td, %d x %td rows of %td bytes %td apart, %td a page %td apart, %d heads %td "
                             "apart, index type %d, base %td, stride %td",
                             s->name, t.data, s->layer_stride, m.layers, t.rows, m.row_bytes, t.stride, t.page_rows,
                             t.page_stride, t.heads, t.head_stride, s->index ? s->type : 0, s->base, s->stride));
        }
}

/* ---- one call, by the host function and by the code under test ---- */

/* Says which byte of which row lies at offset `bad`. */
static void report(const arena *a, size_t bad)
{
    for (const named_table &n : a->tables)
        for (int64_t row = 0; row < n.t.rows && row < 200000; row++)
            for (int64_t byte = 0; byte < n.row_bytes; byte++)
                if (offset_of(a, n.t.data) + size_t(row_offset(&n.t, n.row_bytes, row, byte)) == bad) {
                    fail("%s: %s layer %d row %lld byte %lld: expected %02x, got %02x", current, n.name, n.layer,
                         print_i64(row), print_i64(byte), a->expected[bad], a->got[bad]);
                    return;
                }
    fail("%s: byte %zu of the memory, in no row: expected %02x, got %02x", current, bad, a->expected[bad], a->got[bad]);
}

/* Compares all memory after what `current` names. */
static void compare(const arena *a)
{
    if (memcmp(a->expected, a->got, a->used) == 0)
        return;
    size_t bad = 0;
    while (a->expected[bad] == a->got[bad])
        bad++;
    report(a, bad);
}

/* `want_text` comes from the host function. An error of kvprim_cuda_* says the same and begins with its own name. */
static void check_status(kvprim_status got, kvprim_status want, const std::string &want_text)
{
    static const char host[] = "kvprim_";
    const bool named = want_text.compare(0, strlen(host), host) == 0;
    const std::string text = named ? "kvprim_cuda_" + want_text.substr(strlen(host)) : want_text;
    if (got != want || text != kvprim_last_error())
        fail("%s: expected %s \"%s\", got %s \"%s\"", current, kvprim_status_name(want), text.c_str(),
             kvprim_status_name(got), kvprim_last_error());
}

enum outcome { REFUSED, OUTSIDE, RAN }; /* OUTSIDE: valid, but it would leave the memory that it has here */

/* is_left_out: whether a case does not run. is_asked: a call is made only to find that out, and may be made again. */
#ifdef SAMPLED_H
template <class Gpu> static bool is_left_out(const Gpu &gpu)
{
    return sampled_on && !sampled_chooses(gpu);
}

static inline bool is_asked()
{
    return sampled_skims;
}
#else
template <class Gpu> static bool is_left_out(const Gpu &)
{
    return false;
}

static inline bool is_asked()
{
    return false;
}
#endif

/* Runs what was visited on both sides and compares all memory. What must be refused must leave it as it is. enqueues:
   there is something to do. */
template <class Host, class Gpu>
static outcome run_both(arena *a, kvprim_status want, const std::string &want_text, bool enqueues, const Host &host,
                        const Gpu &gpu)
{
    if (is_left_out(gpu))
        return want == KVPRIM_OK ? RAN : REFUSED;
    memcpy(a->got, a->expected, a->used);
    if (want == KVPRIM_OK)
        CHECK(host() == KVPRIM_OK);
    (void)kvprim_fail(KVPRIM_OK, "-");
    before(a);
    for (const std::pair<size_t, size_t> &bytes : a->allowed)
        allow(a, bytes.first, bytes.second);
    const kvprim_status got = gpu();
    after(a, enqueues);
    check_status(got, want, want_text);
    compare(a);
    return want == KVPRIM_OK ? RAN : REFUSED;
}

/* Runs a valid descriptor on both sides. An invalid one must be refused as the host function refuses it. */
template <class Desc> static outcome try_move(arena *a, const Desc *desc, const char *what)
{
    const on_gpu<Desc> on(a, *desc);
    Desc resolved = {};
    snprintf(current, sizeof current, "%s: %s", functions<Desc>::name, what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = functions<Desc>::check(&on.d, nullptr);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (functions<Desc>::check(desc, &resolved) != KVPRIM_OK || !visit_moves(a, rows_of(&resolved))))
        return OUTSIDE;
    if (runs)
        describe(rows_of(&resolved));
    return run_both(
        a, want, want_text, runs, [&] { return functions<Desc>::host(desc); },
        [&] { return functions<Desc>::gpu(&on.d, a->launch); });
}

/* ---- layouts and indices ---- */

/* heads_inside: the heads of a row follow each other, as in a token-major cache. */
struct layout {
    int64_t pad, page_rows, page_pad;
    int32_t heads;
    bool heads_inside;
};

/* Rows packed and strided; pages packed, padded, of 1 row, and one alone; heads in pages, padded, and without pages;
   8 heads; heads inside; pages of 6, no power of two. */
static const layout layouts[] = {
    {0, 0, 0, 0, false},  {48, 0, 0, 0, false}, {24, 0, 0, 0, false},  {4, 0, 0, 0, false},  {0, 16, 0, 0, false},
    {7, 5, 33, 0, false}, {0, 1, 32, 0, false}, {0, 128, 0, 0, false}, {0, 16, 0, 4, false}, {3, 4, 11, 2, false},
    {0, 0, 0, 4, false},  {16, 8, 0, 8, false}, {16, 16, 0, 4, true},  {0, 6, 0, 2, false}};
enum { n_layouts = sizeof layouts / sizeof *layouts };

/* Returns the layout's table with every field filled in, and how many bytes it spans. */
static kvprim_table lay_out(const layout *l, int64_t rows, int64_t row_bytes, size_t *span)
{
    const bool split = l->heads > 1 && row_bytes % l->heads == 0;
    const int64_t heads = split ? l->heads : 1, piece = row_bytes / heads;
    const int64_t in_page = l->page_rows ? l->page_rows : rows > 0 ? rows : 1, pages = (rows + in_page - 1) / in_page;
    kvprim_table t = table_of(nullptr, rows, piece + l->pad);
    t.page_rows = l->page_rows;
    t.heads = split ? l->heads : 0;
    if (split && l->heads_inside) {
        t.stride = row_bytes + l->pad;
        t.head_stride = piece;
    } else if (split) {
        t.head_stride = in_page * t.stride;
    }
    const int64_t page = in_page * t.stride * (split && !l->heads_inside ? heads : 1) + l->page_pad;
    t.page_stride = l->page_rows ? page : 0;
    *span = size_t(pages * page);
    return t;
}

static kvprim_table place(arena *a, const layout *l, int64_t rows, int64_t row_bytes, size_t align)
{
    size_t span;
    kvprim_table t = lay_out(l, rows, row_bytes, &span);
    t.data = reserve(a, span, align);
    return t;
}

static int64_t wild(kvprim_index_type type)
{
    static const int64_t wild64[] = {INT64_MIN,        INT64_MAX,        INT64_MIN + 1,       INT64_MAX - 1,
                                     int64_t(1) << 40, int64_t(1) << 32, -(int64_t(1) << 32), int64_t(1) << 31};
    static const int64_t wild32[] = {INT32_MIN, INT32_MAX, INT32_MIN + 1, INT32_MAX - 1, 1 << 30, -65536, 65536, -2};
    return type == KVPRIM_I64 ? wild64[below(8)] : wild32[below(8)];
}

static void set_index(void *index, kvprim_index_type type, int64_t i, int64_t value)
{
    if (type == KVPRIM_I64)
        static_cast<int64_t *>(index)[i] = value;
    else
        static_cast<int32_t *>(index)[i] = int32_t(value);
}

/* Returns 0 to rows - 1 in random order. */
static std::vector<int64_t> shuffled(int64_t rows)
{
    std::vector<int64_t> order(static_cast<size_t>(rows));
    for (size_t i = 0; i < order.size(); i++)
        order[i] = int64_t(i);
    for (size_t i = order.size(); i > 1; i--)
        std::swap(order[i - 1], order[below(i)]);
    return order;
}

/* Fills in rows, padding, indices past the end, and indices far out. `distinct`: no row occurs twice, and count is at
   most rows. */
static void fill_index(const placed_index &x)
{
    const std::vector<int64_t> order = shuffled(x.distinct ? x.rows : 0);
    for (int64_t i = 0; i < x.count; i++) {
        const int64_t row = x.distinct ? order[size_t(i)] : int64_t(below(uint64_t(x.rows)));
        const uint64_t kind = below(12);
        int64_t value = x.base + (kind == 1 ? x.rows : kind == 2 ? -1 : row);
        if (kind == 0)
            value = wild(x.type);
        if (x.distinct && kind == 0 && ruled(value, x.base, x.rows) >= 0)
            value = x.base + row;
        set_index(x.data, x.type, i * x.stride, value);
    }
}

/* Fills all memory, and the indices in it, with other contents. */
static void refill(arena *a)
{
    fill(a->expected, a->used);
    for (const placed_index &x : a->indices)
        fill_index(x);
}

/* Every stride-th element is an index, the others are noise. */
static void *place_index(arena *a, kvprim_index_type type, int64_t count, int64_t base, int64_t rows, bool distinct,
                         int64_t stride = 1)
{
    const size_t width = type == KVPRIM_I64 ? 8 : 4;
    const int64_t step = stride ? stride : 1, elements = count > 0 ? (count - 1) * step + 1 : 0;
    void *const index = reserve(a, size_t(elements) * width, width * below(4));
    a->indices.push_back({index, type, count, base, rows, step, distinct});
    fill_index(a->indices.back());
    a->index_room = elements > a->index_room ? elements : a->index_room;
    return index;
}

static const int64_t row_sizes[] = {1,    2,    3,    4,    7,    8,    12,   15,   16,    17,    20,   24,
                                    31,   32,   33,   40,   48,   64,   80,   96,   100,   112,   128,  132,
                                    144,  192,  208,  255,  256,  257,  264,  320,  400,   496,   512,  528,
                                    576,  640,  656,  768,  1000, 1024, 1040, 1152, 1170,  1536,  2048, 2051,
                                    2064, 2304, 3000, 4096, 4100, 5120, 8192, 9000, 14336, 16400, 20000};
enum { n_row_sizes = sizeof row_sizes / sizeof *row_sizes };
static const int64_t bases[] = {0, 1, 1000, -7};
static const int64_t index_strides[] = {0, 1, 2, 0, 3, 0, 5, 0}; /* in elements; 2: one column of an [N, 2] mapping */

/* ---- the matrix ---- */

/* Every thin-th case of a matrix runs, and so many rounds of random descriptors. small_bytes: at most, of a table where
   many options are tried. */
static int thin = 1;
static unsigned fuzz_rounds = 6000;
static int64_t small_bytes = 1 << 20;

static kvprim_index_type type_of(unsigned n)
{
    return n % 2 ? KVPRIM_I64 : KVPRIM_I32;
}

static int64_t rows_for(int64_t row_bytes)
{
    return row_bytes <= 2100 ? 37 : 7;
}

/* Where rows lie: which layout, and how many bytes past a multiple of 64. */
struct placing {
    unsigned layout;
    size_t align;
};

static kvprim_table place(arena *a, const placing &l, int64_t rows, int64_t row_bytes)
{
    return place(a, &layouts[l.layout], rows, row_bytes, l.align);
}

/* Makes case n. Whatever is not given follows from n. */
/* Some sources have one piece for all heads. */
static void share_heads(kvprim_table *t)
{
    if (t->heads > 1 && below(4) == 0)
        t->head_stride = KVPRIM_HEADS_SHARED;
}

static kvprim_gather_desc make_gather(arena *a, unsigned n, int64_t row_bytes, const placing &to, const placing &from,
                                      int64_t count, int64_t src_rows)
{
    kvprim_gather_desc d = {};
    d.dst = place(a, to, count, row_bytes);
    d.src = place(a, from, src_rows, row_bytes);
    d.row_bytes = row_bytes, d.count = count;
    d.index_type = type_of(n), d.index_base = bases[n / 2 % 4], d.index_stride = index_strides[below(8)];
    d.index = place_index(a, d.index_type, count, d.index_base, src_rows, false, d.index_stride);
    d.rejected = n % 3 ? reserve_counter(a) : nullptr;
    d.keep_padding = below(8) == 0;
    share_heads(&d.src);
    return d;
}

static void one_gather(arena *a, unsigned n, int64_t row_bytes, const placing &to, const placing &from, int64_t count,
                       int64_t src_rows)
{
    empty(a);
    const kvprim_gather_desc d = make_gather(a, n, row_bytes, to, from, count, src_rows);
    CHECK(try_move(a, &d, "a case") == RAN);
}

/* Where the inputs and caches of a store lie. PACKED: Q, K and V of a token follow each other. INTERLEAVED: the cache
   is [page][K or V][row], and the inputs are separate. */
enum store_form { K_ONLY, PACKED, APART, INTERLEAVED };
static const unsigned n_forms = 4;

struct store_case {
    int64_t k_bytes, v_bytes;
    placing cache, input;
    int64_t count, rows;
    store_form form;
};

static void place_inputs(arena *a, const store_case *c, kvprim_store_desc *d)
{
    if (c->form != PACKED) {
        d->k = place(a, c->input, c->count, c->k_bytes);
        d->v = place(a, {c->input.layout, (c->input.align * 5 + 3) % 16}, c->count, c->v_bytes);
        return;
    }
    const int64_t q_bytes = c->k_bytes * 2, token = q_bytes + c->k_bytes + c->v_bytes;
    char *const qkv = reserve<char>(a, size_t(c->count * token), c->input.align);
    d->k = table_of(qkv + q_bytes, c->count, token);
    d->v = table_of(qkv + q_bytes + c->k_bytes, c->count, token);
}

static void place_caches(arena *a, const store_case *c, kvprim_store_desc *d)
{
    if (c->form != INTERLEAVED) {
        d->k_cache = place(a, c->cache, c->rows, c->k_bytes);
        d->v_cache = place(a, {c->cache.layout, (c->cache.align * 3 + 16 - c->input.align) % 16}, c->rows, c->v_bytes);
        return;
    }
    const int64_t page_rows = 4, pages = (c->rows + page_rows - 1) / page_rows;
    const int64_t page = page_rows * (c->k_bytes + c->v_bytes);
    char *const cache = reserve<char>(a, size_t(pages * page), c->cache.align);
    d->k_cache = paged_table(cache, c->rows, page_rows, page);
    d->v_cache = paged_table(cache + page_rows * c->k_bytes, c->rows, page_rows, page);
}

static kvprim_store_desc make_store(arena *a, unsigned n, const store_case &c)
{
    kvprim_store_desc d = {};
    place_inputs(a, &c, &d);
    place_caches(a, &c, &d);
    d.k_bytes = c.k_bytes, d.v_bytes = c.v_bytes, d.count = c.count;
    d.slot_type = type_of(n), d.slot_base = bases[n / 2 % 4], d.slot_stride = index_strides[below(8)];
    d.slot = place_index(a, d.slot_type, c.count, d.slot_base, c.rows, true, d.slot_stride);
    d.rejected = n % 3 ? reserve_counter(a) : nullptr;
    if (c.form == K_ONLY)
        drop_v(&d);
    share_heads(&d.k);
    return d;
}

static void one_store(arena *a, unsigned n, const store_case &c)
{
    empty(a);
    const kvprim_store_desc d = make_store(a, n, c);
    CHECK(try_move(a, &d, "a case") == RAN);
}

static void numbered_gather(arena *a, unsigned n, int64_t row_bytes, const placing &to, const placing &from)
{
    one_gather(a, n, row_bytes, to, from, rows_for(row_bytes), rows_for(row_bytes) - 5);
}

typedef void numbered_move(arena *a, unsigned n, int64_t row_bytes, const placing &to, const placing &from);

/* Combines every size with every pair of layouts, and every size with every pair of alignments. */
static void size_matrix(arena *a, numbered_move *move)
{
    const unsigned step = unsigned(thin);
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned l = s % step; l < n_layouts * n_layouts; l += step)
            move(a, l + s, row_sizes[s], {l % n_layouts, (l * 5 + s) % 4 ? 0 : l % 16},
                 {l / n_layouts, (l * 3 + s) % 4 ? 0 : (l * 7 + s) % 16});
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned align = s % step; align < 256; align += step)
            move(a, align + s, row_sizes[s], {(align + s) % 5 ? 0u : 5u, align % 16},
                 {(align + s) % 3 ? 0 : align % n_layouts, align / 16});
}

static void gather_matrix(arena *a)
{
    size_matrix(a, numbered_gather);
}

static void numbered_store(arena *a, unsigned n, int64_t k_bytes, int64_t v_bytes, unsigned layout, size_t cache_align,
                           size_t input_align)
{
    const int64_t count = rows_for(k_bytes > v_bytes ? k_bytes : v_bytes);
    one_store(a, n,
              {k_bytes,
               v_bytes,
               {layout, cache_align},
               {n / 3 % n_layouts, input_align},
               count,
               count + 11,
               store_form(n / 4 % n_forms)});
}

/* In every other case K and V are equally wide. */
static void store_matrix(arena *a)
{
    const unsigned step = unsigned(thin);
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned l = s % step; l < n_layouts * n_forms * 4; l += step)
            numbered_store(a, l / n_layouts * 4 + l % 4, row_sizes[s],
                           row_sizes[l / n_layouts % 2 ? (s + l) % n_row_sizes : s], l % n_layouts,
                           (l + s) % 3 ? 0 : (l + s) / 3 % 16, (l + s) % 4 ? 0 : (l + s) / 4 % 16);
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned align = s % step; align < 256; align += step)
            numbered_store(a, align * 5 + s, row_sizes[s], row_sizes[align % 2 ? (s + 1) % n_row_sizes : s],
                           align % 4 ? 0 : align / 4 % n_layouts, align % 16, align / 16);
}

/* Counts around the sizes of warps and blocks, and more rows than threads. */
static void count_matrix(arena *a, int64_t most_bytes, const int64_t *counts, size_t n_counts)
{
    static const int64_t sizes[] = {4, 16, 100, 128, 256, 576, 1024, 2048, 4096, 512};
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (unsigned i = 0; i < n_counts; i++) {
            if (counts[i] * sizes[s] > most_bytes)
                continue;
            const int64_t count = counts[i], rows = count + 3, v_bytes = sizes[s] - sizes[s] % 16 / 2;
            const unsigned i64 = (s + i) % 2; /* the cases below have a counter; base 1 for gathers, 0 for stores */
            one_gather(a, i64 ? 11 : 2, sizes[s], {s % 2 * 4, 0}, {i % 2 * 4, 0}, count, rows);
            one_store(a, i64 ? 1 : 8, {sizes[s], v_bytes, {i % 2 * 4, 0}, {0, 0}, count, rows, s % 3 ? APART : K_ONLY});
        }
}

/* Runs a few of everything, for the options of a launch. */
static void small_matrix(arena *a)
{
    static const int64_t sizes[] = {1, 12, 16, 100, 128, 256, 257, 512, 1000, 1152, 2048, 4096, 8192, 20000};
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (unsigned l = 0; l < n_layouts; l++) {
            numbered_gather(a, l + s, sizes[s], {l, l % 2 * s}, {(l + s) % n_layouts, 0});
            numbered_store(a, l + s, sizes[s], sizes[(s + l) % 2 ? s : 3], l, 0, l % 3 ? 0 : s);
        }
    static const int64_t counts[] = {1, 33, 1000, 5000};
    count_matrix(a, small_bytes, counts, 4);
}

/* ---- uses ---- */

/* A table holds one of several shards of a vocabulary. Ids of the other shards give zeros. */
static void vocabulary_shard(arena *a)
{
    const int64_t vocabulary = 10000, first = 4000, rows = 2000, count = 3000, row_bytes = 264;
    for (unsigned n = 0; n < 2; n++) {
        empty(a);
        const kvprim_table dst = place(a, &layouts[0], count, row_bytes, 0);
        const kvprim_table src = place(a, &layouts[0], rows, row_bytes, 0);
        void *const ids = place_index(a, type_of(n), count, 0, vocabulary, false);
        for (int64_t i = 0; i < count; i++)
            set_index(ids, type_of(n), i, int64_t(below(uint64_t(vocabulary))));
        const kvprim_gather_desc d = gather_of(dst, src, row_bytes, ids, type_of(n), first, count, reserve_counter(a));
        CHECK(try_move(a, &d, "a shard of a vocabulary") == RAN);
        int64_t zero_rows = 0, foreign = 0;
        for (int64_t i = 0; i < count; i++) {
            static const unsigned char zeros[264] = {0};
            const int64_t id = index_at(ids, type_of(n), i);
            zero_rows += memcmp(a->got + offset_of(a, dst.data) + i * row_bytes, zeros, sizeof zeros) == 0;
            foreign += id < first || id >= first + rows;
        }
        CHECK(zero_rows == foreign && foreign > count / 2 && foreign < count);
    }
}

/* No index names a row of the source. Only the index and the output may be accessed. */
static void padding_alone(arena *a)
{
    for (int empty_table = 0; empty_table < 2; empty_table++) {
        empty(a);
        const kvprim_table dst = place(a, &layouts[0], 4, 128, 0), src = place(a, &layouts[0], 8, 128, 0);
        void *const index = place_index(a, KVPRIM_I32, 4, 0, 8, false);
        for (int i = 0; i < 4; i++)
            set_index(index, KVPRIM_I32, i, i % 2 ? -1 - i : empty_table ? i : 8 + i);
        kvprim_gather_desc d = gather_of(dst, src, 128, index, KVPRIM_I32, 0, 4, reserve_counter(a));
        if (empty_table)
            d.src = table_of(nullptr, 0);
        CHECK(try_move(a, &d, "padding alone") == RAN);
    }
}

/* Rows that begin at multiples of 16 bytes and end anywhere, for each way to end. Some have a V of the next size. */
static void row_tails(arena *a)
{
    for (int64_t row_bytes = 1; row_bytes <= 160; row_bytes += row_bytes < 48 ? 1 : 13) {
        const int64_t rows = 9, count = 7, stride = (row_bytes + 16) / 16 * 16;
        const size_t cache_bytes = size_t(rows * stride), bytes = size_t(count * stride);
        empty(a);
        const kvprim_table cache = table_of(reserve(a, cache_bytes, 0), rows, stride);
        const kvprim_table input = table_of(reserve(a, bytes, 0), count, stride);
        void *const index = place_index(a, KVPRIM_I32, count, 0, rows, true);
        kvprim_store_desc store = store_of(cache, input, row_bytes, index, KVPRIM_I32, count, reserve_counter(a));
        if (row_bytes % 2) {
            store.v_cache = table_of(reserve(a, cache_bytes, 0), rows, stride);
            store.v = table_of(reserve(a, bytes, 0), count, stride);
            store.v_bytes = row_bytes + 1;
        }
        CHECK(try_move(a, &store, "tails") == RAN);
        const kvprim_gather_desc gather = gather_of(input, cache, row_bytes, index, KVPRIM_I32, 0, count, nullptr);
        CHECK(try_move(a, &gather, "tails") == RAN);
    }
}

/* Aligned rows of sizes that the kernels cut into parts in different ways; heads that are not aligned. */
static void row_parts(arena *a)
{
    static const int64_t sizes[][2] = {{1536, 0},   {3072, 0},  {1536, 1536}, {3072, 3072}, {1024, 512},
                                       {512, 1024}, {256, 128}, {128, 256},   {2048, 1024}, {64, 128}};
    for (const int64_t(&bytes)[2] : sizes) {
        const int64_t rows = 70, count = 60;
        empty(a);
        kvprim_store_desc d = {};
        d.k_cache = place(a, &layouts[0], rows, bytes[0], 0), d.k = place(a, &layouts[0], count, bytes[0], 0);
        if (bytes[1])
            d.v_cache = place(a, &layouts[0], rows, bytes[1], 0), d.v = place(a, &layouts[0], count, bytes[1], 0);
        d.k_bytes = bytes[0], d.v_bytes = bytes[1], d.count = count, d.slot_type = KVPRIM_I32;
        d.slot = place_index(a, KVPRIM_I32, count, 0, rows, true);
        CHECK(try_move(a, &d, "parts") == RAN);
        kvprim_gather_desc gather = gather_of(d.k, d.k_cache, bytes[0], d.slot, KVPRIM_I32, 0, count, nullptr);
        CHECK(try_move(a, &gather, "parts") == RAN);
        gather.src.rows = rows / 2 - 1, gather.src.stride = 2 * bytes[0] + 16;
        gather.src.heads = 2, gather.src.head_stride = bytes[0] / 2 + 8;
        CHECK(try_move(a, &gather, "parts") == RAN);
    }
}

/* Plain rows of the sizes and counts at which another kernel takes over. */
static void plain_sizes(arena *a)
{
    static const int64_t cases[][2] = {{1024, 128}, {1024, 129}, {512, 2048},  {512, 2049}, {256, 4096},
                                       {256, 4097}, {128, 9},    {128, 16385}, {64, 9},     {80, 9}};
    for (const int64_t(&c)[2] : cases) {
        one_gather(a, 2, c[0], {0, 0}, {0, 0}, c[1], c[1] + 3);
        one_store(a, 8, {c[0], c[0], {0, 0}, {0, 0}, c[1], c[1] + 3, K_ONLY});
        one_store(a, 8, {c[0], c[0], {0, 0}, {0, 0}, c[1], c[1] + 3, APART});
    }
}

/* Aligned rows of K and V, and their layouts: for each way in which words of threads fit rows. V's rows, pages and heads
   are further apart than K's. */
static const struct {
    int64_t k_bytes, v_bytes;
    unsigned cache, input;
} row_shapes[] = {
    {256, 256, 0, 0},   {48, 48, 0, 0},   {8192, 8192, 0, 0},  {256, 128, 0, 0}, {48, 64, 0, 0},    /* whole words */
    {24, 40, 2, 2},     {4120, 24, 2, 2},                                                           /* tails */
    {256, 256, 8, 0},   {96, 96, 13, 0},  {8224, 8224, 13, 0},                                      /* heads */
    {8192, 8192, 6, 0}, {4112, 48, 6, 0}, {48, 4112, 6, 0},    {48, 48, 6, 0},   {256, 256, 10, 0}, /* pages, heads */
};

/* Moves so much memory that each kernel of plain rows has its turn: see kvpc_loads_of. */
static void kernel_matrix(arena *a)
{
    const int64_t two_loads = 16 * 2100 * int64_t(kvpc_multiprocessors());
    for (const auto &s : row_shapes)
        for (const int64_t bytes : {int64_t(1), two_loads, int64_t(300) << 10, int64_t(1100) << 10})
            for (const bool wide : {false, true}) {
                layout v_cache = layouts[s.cache];
                v_cache.pad += 32, v_cache.page_pad += 32;
                const int64_t count = 2 * bytes / (s.k_bytes + (wide ? s.v_bytes : s.k_bytes)) + 1, rows = count + 3;
                empty(a);
                kvprim_store_desc d = {};
                d.k_cache = place(a, {s.cache, 0}, rows, s.k_bytes), d.k = place(a, {s.input, 0}, count, s.k_bytes);
                if (wide)
                    d.v_cache = place(a, &v_cache, rows, s.v_bytes, 0), d.v = place(a, {s.input, 0}, count, s.v_bytes);
                d.k_bytes = s.k_bytes, d.v_bytes = wide ? s.v_bytes : 0, d.count = count;
                d.slot_type = type_of(wide), d.slot_base = 7, d.slot_stride = 1 + wide;
                d.slot = place_index(a, d.slot_type, count, d.slot_base, rows, true, d.slot_stride);
                d.rejected = reserve_counter(a);
                kvprim_gather_desc g =
                    gather_of(d.k, d.k_cache, s.k_bytes, d.slot, d.slot_type, d.slot_base, count, d.rejected);
                g.index_stride = d.slot_stride;
                CHECK(try_move(a, &d, "a kernel") == RAN);
                CHECK(try_move(a, &g, "a kernel") == RAN);
            }
}

static void uses(arena *a)
{
    vocabulary_shard(a);
    padding_alone(a);
    row_tails(a);
    row_parts(a);
    plain_sizes(a);
}

/* ---- good descriptors ---- */

static kvprim_gather_desc good_gather(arena *a)
{
    empty(a);
    void *const src = reserve(a, 4096, 0), *const dst = reserve(a, 4096, 0);
    const void *const index = place_index(a, KVPRIM_I32, 4, 0, 8, false);
    return gather_of(table_of(dst, 4), table_of(src, 8), 128, index, KVPRIM_I32, 0, 4, reserve_counter(a));
}

static kvprim_store_desc good_store(arena *a)
{
    empty(a);
    void *const k_cache = reserve(a, 1024, 0), *const v_cache = reserve(a, 1024, 0);
    void *const k = reserve(a, 512, 0), *const v = reserve(a, 512, 0);
    const void *const slot = place_index(a, KVPRIM_I64, 2, 0, 8, true);
    kvprim_store_desc d = store_of(table_of(k_cache, 8), table_of(k, 2), 64, slot, KVPRIM_I64, 2, reserve_counter(a));
    d.v_cache = table_of(v_cache, 8);
    d.v = table_of(v, 2);
    d.v_bytes = 32;
    return d;
}

static kvprim_transfer_desc good_transfer(arena *a)
{
    empty(a);
    kvprim_transfer_desc d = {};
    d.dst = table_of(reserve(a, 2048, 0), 8);
    d.src = table_of(reserve(a, 4096, 0), 16);
    d.layers = 2, d.row_bytes = 128;
    d.dst_index = place_index(a, KVPRIM_I32, 4, 0, 8, true);
    d.src_index = place_index(a, KVPRIM_I32, 4, 0, 16, false);
    d.index_type = KVPRIM_I32, d.count = 4;
    d.rejected = reserve_counter(a);
    return d;
}

/* ---- random descriptors ---- */

/* Of each table's part of the memory, and of an index with the counter. */
enum { fuzz_bytes = 1 << 14, fuzz_indices = 80, fuzz_index_bytes = 8 * fuzz_indices + 256 };

static bool chance(uint64_t one_in)
{
    return below(one_in) == 0;
}

static int64_t random_below(uint64_t n)
{
    return int64_t(below(n));
}

/* Makes strides of dimensions that enclose each other in any order, some with padding; or a packed table. */
static kvprim_table random_table(int64_t rows, int64_t row_bytes)
{
    static const int32_t head_counts[] = {0, 1, 2, 3, 4, 8, 16};
    kvprim_table t = table_of(nullptr, rows);
    if (chance(2))
        t.heads = chance(8) ? int32_t(row_bytes) : head_counts[below(7)];
    if (t.heads > 1 && row_bytes % t.heads && !chance(16))
        t.heads = 1;
    t.page_rows = chance(2) ? int64_t(below(18)) : 0;
    const int64_t in_page = t.page_rows ? t.page_rows : rows, heads = t.heads > 1 ? t.heads : 1;
    t.head_stride = heads > 1 ? (in_page ? in_page : 1) * (row_bytes / heads) : 0;
    if (chance(3))
        return t;
    const int64_t counts[] = {in_page, t.page_rows ? (rows + in_page - 1) / in_page : 1, heads};
    int64_t *const strides[] = {&t.stride, &t.page_stride, &t.head_stride};
    int64_t extent = row_bytes / heads;
    const uint64_t first = below(3), step = 1 + below(2), unit = uint64_t(1) << below(5);
    for (uint64_t i = 0; i < 3; i++) {
        const uint64_t k = (first + i * step) % 3;
        const int64_t up = chance(2) ? int64_t((unit - uint64_t(extent) % unit) % unit) : 0;
        *strides[k] = extent + up + (chance(2) ? int64_t(below(3) * unit) : 0) - chance(64);
        extent += *strides[k] * (counts[k] > 1 ? counts[k] - 1 : 0);
    }
    return t;
}

static int64_t wild_value()
{
    const int64_t near = int64_t(below(5)) - 2;
    switch (below(4)) {
    case 0:
        return int64_t(random_u64());
    case 1:
        return near;
    case 2:
        return int64_t((uint64_t(1) << below(64)) + uint64_t(near));
    default:
        return int64_t(uint64_t(INT64_MAX) + uint64_t(near));
    }
}

static void spoil(int64_t *field)
{
    if (chance(40))
        *field = wild_value();
}

static void spoil_table(kvprim_table *t)
{
    int64_t *const fields[] = {&t->rows, &t->stride, &t->page_rows, &t->page_stride, &t->head_stride};
    for (int64_t *const field : fields)
        spoil(field);
    if (chance(40))
        t->heads = int32_t(wild_value());
    if (chance(60))
        t->data = nullptr;
    if (chance(40))
        t->bytes = chance(4) ? wild_value() : int64_t(below(2 * fuzz_bytes));
    if (chance(200))
        t->reserved = 1;
}

/* Returns an address near the start of part `part` of the memory; sometimes any address, which may overlap another
   part. */
static void *random_place(arena *a, uint64_t part)
{
    return a->expected + (chance(20) ? below(a->used) : part * fuzz_bytes + (chance(2) ? 16 * below(8) : below(64)));
}

/* Fills one of two places with indices. */
static const void *random_index(arena *a, size_t place, kvprim_index_type type, int64_t rows, int64_t base,
                                bool distinct)
{
    const uint64_t start = below(64), range = uint64_t(rows) + 3;
    void *const index = a->expected + 4 * fuzz_bytes + place * fuzz_index_bytes + 8 * below(4);
    a->index_room = fuzz_indices;
    for (uint64_t i = 0; i < fuzz_indices; i++) {
        const uint64_t step = distinct ? start + i : random_u64();
        int64_t value = int64_t(uint64_t(base) + step % range - 1); /* wraps */
        if (chance(16))
            value = wild_value();
        set_index(index, type, int64_t(i), value);
    }
    return index;
}

static int64_t random_row_bytes()
{
    static const int64_t usual[] = {16, 32, 64, 128, 256, 48, 96, 8, 4, 512};
    return chance(2) ? usual[below(10)] : 1 + random_below(300);
}

static int64_t random_base()
{
    return chance(2) ? 0 : chance(4) ? wild_value() : random_below(2000) - 1000;
}

static int64_t random_stride()
{
    return chance(60) ? wild_value() : index_strides[chance(4) ? below(8) : 0];
}

static uint32_t *random_counter(arena *a)
{
    void *const counter = a->expected + 4 * fuzz_bytes + 8 * fuzz_indices + 64 + 4 * below(8);
    return chance(4) ? nullptr : static_cast<uint32_t *>(counter);
}

/* A table in part `part` of the memory, and its rows' size, which may both be nonsense. */
static kvprim_table random_side(arena *a, uint64_t part, int64_t rows, int64_t row_bytes)
{
    kvprim_table t = random_table(rows, row_bytes);
    t.data = random_place(a, part);
    spoil_table(&t);
    return t;
}

static void random_desc(arena *a, kvprim_gather_desc *d, kvprim_index_type type)
{
    const int64_t rows = 1 + random_below(40), base = random_base();
    d->count = random_below(fuzz_indices);
    d->row_bytes = random_row_bytes();
    d->dst = random_side(a, 0, d->count + random_below(3), d->row_bytes);
    d->src = random_side(a, 2, rows, d->row_bytes);
    d->index_type = type, d->index_base = base, d->index_stride = random_stride();
    d->index = random_index(a, 0, type, rows, base, false);
    d->rejected = random_counter(a);
    spoil(&d->row_bytes);
}

static void random_desc(arena *a, kvprim_store_desc *d, kvprim_index_type type)
{
    const int64_t rows = 1 + random_below(40), base = random_base();
    d->count = random_below(40);
    d->k_bytes = random_row_bytes();
    d->k_cache = random_side(a, 0, rows, d->k_bytes);
    d->k = random_side(a, 2, d->count + random_below(3), d->k_bytes);
    if (!chance(3)) {
        d->v_bytes = chance(2) ? d->k_bytes : random_row_bytes();
        d->v_cache = random_side(a, 1, rows, d->v_bytes);
        d->v = random_side(a, 3, d->count + random_below(3), d->v_bytes);
        spoil(&d->v_bytes);
    }
    d->slot_type = type, d->slot_base = base, d->slot_stride = random_stride();
    d->slot = random_index(a, 0, type, rows < d->count ? d->count : rows, base, true);
    d->rejected = random_counter(a);
    spoil(&d->k_bytes);
}

/* Each side has two parts of the memory. */
static void random_desc(arena *a, kvprim_transfer_desc *d, kvprim_index_type type)
{
    enum { layers = 3 };
    static thread_local void *dst_bases[layers], *src_bases[layers];
    const int64_t count = random_below(fuzz_indices / 2);
    const bool dst_indexed = !chance(3), src_indexed = !chance(3);
    const int64_t dst_rows = count + random_below(dst_indexed ? 9 : 3);
    const int64_t src_rows = src_indexed ? 1 + random_below(40) : count + random_below(3);
    d->index_type = type, d->count = count;
    d->row_bytes = random_row_bytes();
    d->layers = int32_t(below(layers + 1));
    d->dst = random_side(a, 0, dst_rows, d->row_bytes);
    d->src = random_side(a, 2, src_rows, d->row_bytes);
    for (int l = 0; l < layers; l++) {
        dst_bases[l] = static_cast<char *>(random_place(a, 0)) + 8192 * l;
        src_bases[l] = static_cast<char *>(random_place(a, 2)) + 8192 * l;
    }
    d->dst_layers = chance(3) ? dst_bases : nullptr;
    d->src_layers = chance(3) ? src_bases : nullptr;
    d->dst_layer_stride = !d->dst_layers && chance(6) ? 16 * random_below(600) : 0;
    d->src_layer_stride = !d->src_layers && chance(6) ? random_below(10000) : 0;
    const void *const to = random_index(a, 1, type, dst_rows > count ? dst_rows : count, 0, true);
    const void *const from = random_index(a, 0, type, src_rows, 0, false);
    d->dst_index = dst_indexed ? to : nullptr;
    d->src_index = src_indexed ? from : nullptr;
    d->dst_index_base = chance(8) ? random_base() : 0;
    d->src_index_base = chance(8) ? random_base() : 0;
    d->dst_index_stride = random_stride();
    d->src_index_stride = random_stride();
    d->rejected = random_counter(a);
    spoil(&d->row_bytes);
}

template <class Desc> static outcome random_move(arena *a, unsigned round)
{
    Desc d = {};
    char what[40];
    empty(a);
    (void)reserve(a, 4 * fuzz_bytes + 2 * fuzz_index_bytes, 0);
    random_desc(a, &d, type_of(round));
    spoil(&d.count);
    snprintf(what, sizeof what, "round %u", round);
    return try_move(a, &d, what);
}

/* Enough descriptors must have run and been refused, or the test would test nothing. */
template <outcome (*one)(arena *, unsigned)> static void fuzz(arena *a)
{
    const unsigned rounds = fuzz_rounds;
    unsigned n[3] = {0, 0, 0};
    for (unsigned round = 0; round < rounds; round++) {
        random_state = uint64_t(round + 1) << 32;
        n[one(a, round)]++;
    }
    if (n[RAN] < rounds / 4 || n[REFUSED] < rounds / 10)
        fail("of %u descriptors only %u ran and %u were refused", rounds, n[RAN], n[REFUSED]);
}

/* ---- a table past 4 GiB, with indices past 2^31 ---- */

enum { large_count = 9, large_stored = 5, large_past = 3, large_row_most = 16 };
static const int64_t large_rows = (int64_t(1) << 31) + 1000;
static const int64_t large_slots[large_count] = {large_rows - 1,         0,          large_rows,
                                                 int64_t(1) << 31,       INT64_MAX,  INT64_MIN,
                                                 (int64_t(1) << 32) + 1, 1500000000, (int64_t(1) << 31) - 1};

/* Where the code under test finds the parts of a store into a large table and of a gather of the same rows. */
struct large_move {
    unsigned char *table, *input, *output;
    int64_t *slots;
    uint32_t *rejected;
};

static void large_store_and_gather(const large_move *m, int64_t row_bytes)
{
    const kvprim_table cache = table_of(m->table, large_rows);
    const kvprim_table input = table_of(m->input, large_count), output = table_of(m->output, large_count);
    const kvprim_store_desc store = store_of(cache, input, row_bytes, m->slots, KVPRIM_I64, large_count, m->rejected);
    const kvprim_gather_desc gather =
        gather_of(output, cache, row_bytes, m->slots, KVPRIM_I64, 0, large_count, m->rejected);
    if (kvprim_cuda_store(&store, nullptr) != KVPRIM_OK || kvprim_cuda_gather(&gather, nullptr) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
}

/* Checks row i of the output. `stored`: what the table holds at slot i, or NULL if the slot is outside the table. */
static void check_large_row(int i, int64_t row_bytes, const unsigned char *input, const unsigned char *output,
                            const unsigned char *stored)
{
    for (int64_t b = 0; b < row_bytes; b++) {
        const int want = stored ? input[i * row_bytes + b] : 0, got = output[i * row_bytes + b];
        if (got != want || (stored && stored[b] != want))
            fail("row %lld byte %lld: expected %02x, stored %02x, gathered %02x", print_i64(large_slots[i]),
                 print_i64(b), want, stored ? stored[b] : 0, got);
    }
}

static bool in_large_table(int i)
{
    return large_slots[i] >= 0 && large_slots[i] < large_rows;
}

/* ---- kvprim_warp_copy and kvprim_warp_zero ---- */

enum { warp_alignments = 256, warp_threads = 128, longest_warp_copy = 4200 };

/* Warp w copies from byte 16 + w / 16 of its slot of src to byte 16 + w % 16 of its slot of dst. zero: it writes zeros.
   */
struct warp_cases {
    unsigned char *dst;
    const unsigned char *src;
    size_t slot, bytes;
    int32_t zero;
};

static __global__ void move_by_warps(const warp_cases c)
{
    const unsigned thread = blockIdx.x * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
    const unsigned warp = thread / 32;
    unsigned char *const dst = c.dst + warp * c.slot + 16 + warp % 16;
    if (c.zero)
        kvprim_warp_zero(dst, c.bytes);
    else
        kvprim_warp_copy(dst, c.src + warp * c.slot + 16 + warp / 16, c.bytes);
}

static size_t warp_slot(size_t bytes)
{
    return (bytes + 63) / 16 * 16;
}

/* Turns a copy of dst's slots into what they should hold. */
static void expect_warps(unsigned char *slots, const unsigned char *src, size_t bytes, bool zero)
{
    for (size_t w = 0; w < warp_alignments; w++) {
        unsigned char *const dst = slots + w * warp_slot(bytes) + 16 + w % 16;
        if (zero)
            memset(dst, 0, bytes);
        else
            memcpy(dst, src + w * warp_slot(bytes) + 16 + w / 16, bytes);
    }
}

static void compare_warps(const unsigned char *got, const unsigned char *want, size_t bytes, bool zero)
{
    const size_t slot = warp_slot(bytes), all = warp_alignments * slot;
    if (memcmp(got, want, all) == 0)
        return;
    size_t bad = 0;
    while (got[bad] == want[bad])
        bad++;
    const size_t warp = bad / slot;
    fail("%s of %zu bytes, alignments %zu and %zu, byte %lld of them: expected %02x, got %02x", zero ? "zeros" : "copy",
         bytes, warp % 16, warp / 16, print_i64(bad % slot) - print_i64(16 + warp % 16), want[bad], got[bad]);
}

#endif /* TEST_ROWS_H */

/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share. They run gathers and stores in one block of memory, once by the
   host functions and once by kvprim_cuda_gather and kvprim_cuda_store, and compare every byte. Include it after
   kvprim_cuda.cuh and define before, allow and after. */
#ifndef TEST_ROWS_H
#define TEST_ROWS_H

#include <atomic>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <utility>
#include <vector>

/* ---- harness ---- */

static int passed, failed, skipped;
static std::atomic<int> failures; /* in the test that runs now */
static char skip_reason[200];     /* why the test that runs now cannot run here */

/* Prints like printf and fails the test. Only a test's first few failures are printed. */
__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (failures++ < 5)
        printf("  %s\n", text);
}
#define CHECK(condition) ((condition) ? (void)0 : fail("line %d: %s", __LINE__, #condition))

static void run(const char *name, void (*test)())
{
    failures = 0;
    skip_reason[0] = 0;
    test();
    if (failures)
        printf("FAIL %s: %d failures\n", name, failures.load());
    else if (skip_reason[0])
        printf("skip %s: %s\n", name, skip_reason);
    else
        printf("ok %s\n", name);
    fflush(stdout);
    failed += failures != 0;
    skipped += failures == 0 && skip_reason[0];
    passed += failures == 0 && !skip_reason[0];
}

static int finish()
{
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

static thread_local uint64_t random_state = 1;

static uint64_t random_u64() /* splitmix64 */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t below(uint64_t n)
{
    return random_u64() % n;
}

static void fill(unsigned char *p, size_t bytes)
{
    for (; bytes >= 8; p += 8, bytes -= 8) {
        const uint64_t value = random_u64();
        memcpy(p, &value, 8);
    }
    for (; bytes > 0; p++, bytes--)
        *p = static_cast<unsigned char>(random_u64());
}

/* ---- memory ---- */

/* All memory of one move: tables, indices and counter, with random bytes in and between them. Both sides start with the
   same contents. Descriptors hold addresses in `expected`. */
struct arena {
    unsigned char *expected, *got; /* where the host functions work; the result of the code under test */
    unsigned char *device;         /* where the code under test finds its copy */
    size_t capacity, used;
    int64_t index_room; /* how many indices there is memory for */
    const kvprim_cuda_launch *launch;
    std::vector<std::pair<size_t, size_t>> allowed; /* offset and bytes of what may be accessed */
    std::vector<unsigned char> taken;               /* per byte: 1 if it is written, or is of an index or the counter */
};

enum { margin = 256 };

/* Brings `got` to where the code under test sees it. */
static void before(arena *a);
/* From now on these bytes may be accessed, and no others of the arena. */
static void allow(arena *a, size_t offset, size_t bytes);
/* Waits for the code under test and brings its result to `got`. enqueued: it had something to do. */
static void after(arena *a, bool enqueued);

static void empty(arena *a)
{
    a->used = 0;
    a->index_room = 0;
}

/* Reserves `bytes` of random contents, `align` bytes past a multiple of 64, with guard bytes on both sides. */
static void *reserve(arena *a, size_t bytes, size_t align)
{
    const size_t start = a->used, offset = start + margin + align;
    a->used = (offset + bytes + margin + 63) / 64 * 64;
    if (a->used > a->capacity) {
        printf("FAIL a test needs %zu bytes of memory, and there are %zu\n0 passed, 1 failed, 0 skipped\n", a->used,
               a->capacity);
        exit(1);
    }
    fill(a->expected + start, a->used - start);
    return a->expected + offset;
}

static uint32_t *reserve_counter(arena *a)
{
    uint32_t *const counter = static_cast<uint32_t *>(reserve(a, 4, 4 * below(16)));
    *counter = static_cast<uint32_t>(5 + below(3) * (UINT32_MAX - 6)); /* may wrap around */
    return counter;
}

static size_t offset_of(const arena *a, const void *p)
{
    return static_cast<size_t>(static_cast<const unsigned char *>(p) - a->expected);
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

/* Rows are `stride` bytes apart, 0: without a gap. Every other field is zero. */
static kvprim_table table_of(void *data, int64_t rows, int64_t stride = 0)
{
    kvprim_table t = {};
    t.data = data;
    t.rows = rows;
    t.stride = stride;
    return t;
}

static kvprim_table pages_of(void *data, int64_t rows, int64_t page_rows, int64_t page_stride)
{
    kvprim_table t = table_of(data, rows);
    t.page_rows = page_rows;
    t.page_stride = page_stride;
    return t;
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
    d.dst = dst;
    d.src = src;
    d.row_bytes = row_bytes;
    d.index = index;
    d.index_type = type;
    d.index_base = base;
    d.count = count;
    d.rejected = rejected;
    return d;
}

/* Stores K only. */
static kvprim_store_desc store_of(const kvprim_table &cache, const kvprim_table &input, int64_t row_bytes,
                                  const void *slot, kvprim_index_type type, int64_t count, uint32_t *rejected)
{
    kvprim_store_desc d = {};
    d.k_cache = cache;
    d.k = input;
    d.k_bytes = row_bytes;
    d.slot = slot;
    d.slot_type = type;
    d.count = count;
    d.rejected = rejected;
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
    d.k_cache = on_device(a, d.k_cache);
    d.v_cache = on_device(a, d.v_cache);
    d.k = on_device(a, d.k);
    d.v = on_device(a, d.v);
    d.slot = on_device(a, d.slot);
    d.rejected = on_device(a, d.rejected);
    return d;
}

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

/* How one side of a move names its rows. `data` NULL: row i. */
struct index_list {
    const void *data;
    kvprim_index_type type;
    int64_t base, stride;
};

static index_list list_of(const void *data, kvprim_index_type type, int64_t base, int64_t stride)
{
    return {data, type, base, stride ? stride : 1};
}

static int64_t row_at(const index_list *list, int64_t i, int64_t rows)
{
    return list->data ? ruled(index_at(list->data, list->type, i * list->stride), list->base, rows) : i;
}

/* Allows access to a row: a write to its bytes only, a read to the aligned 16-byte words that hold them. Returns false
   if the row lies outside the memory, or where another row is written or an index or the counter lies. */
static bool visit(arena *a, const kvprim_table *t, int64_t row_bytes, int64_t row, bool write)
{
    const int64_t piece = row_bytes / t->heads, room = static_cast<int64_t>(a->used);
    for (int64_t head = 0; head < t->heads; head++) {
        const int64_t from_table = row_offset(t, row_bytes, row, head * piece);
        if (from_table >= room || piece > room)
            return false;
        const size_t bytes = static_cast<size_t>(piece);
        const size_t begin = offset_of(a, t->data) + static_cast<size_t>(from_table);
        if (begin + bytes > a->used)
            return false;
        if (memchr(&a->taken[begin], 1, bytes))
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
}

static void visit_word(arena *a, const void *word, size_t bytes)
{
    a->allowed.push_back({offset_of(a, word), bytes});
    memset(&a->taken[offset_of(a, word)], 1, bytes);
}

/* Allows access to the counter and to the elements of an index that are used. Comes before the rows. */
static bool visit_index(arena *a, const index_list *list, int64_t count, const uint32_t *rejected)
{
    const size_t width = list->type == KVPRIM_I64 ? 8 : 4;
    if (rejected)
        visit_word(a, rejected, 4);
    if (!list->data)
        return true;
    if (count > a->index_room || (count > 1 && list->stride > (a->index_room - 1) / (count - 1)))
        return false;
    if (list->stride == 1)
        visit_word(a, list->data, static_cast<size_t>(count) * width);
    for (int64_t i = 0; list->stride > 1 && i < count; i++)
        visit_word(a, static_cast<const char *>(list->data) + static_cast<size_t>(i * list->stride) * width, width);
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
    const int64_t room = static_cast<int64_t>(a->used - begin);
    return row_offset(t, row_bytes, rows - 1, row_bytes - 1) < room &&
           (whole == 0 || row_offset(t, row_bytes, whole - 1, row_bytes - 1) < room);
#else
    (void)a, (void)t, (void)row_bytes;
    return true;
#endif
}

static bool visit_gather(arena *a, const kvprim_gather_desc *d)
{
    const index_list list = list_of(d->index, d->index_type, d->index_base, d->index_stride);
    bool good = visit_index(a, &list, d->count, d->rejected) && reachable(a, &d->src, d->row_bytes);
    for (int64_t i = 0; good && i < d->count; i++) {
        const int64_t row = row_at(&list, i, d->src.rows);
        good = (row < 0 || visit(a, &d->src, d->row_bytes, row, false)) && visit(a, &d->dst, d->row_bytes, i, true);
    }
    return good;
}

/* An input's row may be read even if its slot turns out to be padding. */
static bool visit_store(arena *a, const kvprim_store_desc *d)
{
    const index_list list = list_of(d->slot, d->slot_type, d->slot_base, d->slot_stride);
    bool good = visit_index(a, &list, d->count, d->rejected) && reachable(a, &d->k_cache, d->k_bytes) &&
                (!d->v_cache.data || reachable(a, &d->v_cache, d->v_bytes));
    for (int64_t i = 0; good && i < d->count; i++) {
        const int64_t row = row_at(&list, i, d->k_cache.rows);
        good = visit(a, &d->k, d->k_bytes, i, false) && (row < 0 || visit(a, &d->k_cache, d->k_bytes, row, true));
        if (good && d->v_cache.data)
            good = visit(a, &d->v, d->v_bytes, i, false) && (row < 0 || visit(a, &d->v_cache, d->v_bytes, row, true));
    }
    return good;
}

/* ---- one move, by the host function and by the code under test ---- */

struct named_table {
    const char *name;
    const kvprim_table *t; /* resolved */
    int64_t row_bytes, rows;
};

/* Says which byte of which row lies at offset `bad`. */
static void report(const arena *a, size_t bad, const char *what, const named_table *tables, int n)
{
    for (int k = 0; k < n; k++)
        for (int64_t row = 0; tables[k].t->data && row < tables[k].rows && row < 200000; row++)
            for (int64_t byte = 0; byte < tables[k].row_bytes; byte++)
                if (offset_of(a, tables[k].t->data) +
                        static_cast<size_t>(row_offset(tables[k].t, tables[k].row_bytes, row, byte)) ==
                    bad) {
                    fail("%s: %s row %lld byte %lld: expected %02x, got %02x", what, tables[k].name,
                         static_cast<long long>(row), static_cast<long long>(byte), a->expected[bad], a->got[bad]);
                    return;
                }
    fail("%s: byte %zu of the memory, in no row: expected %02x, got %02x", what, bad, a->expected[bad], a->got[bad]);
}

static void compare(const arena *a, const char *what, const named_table *tables, int n)
{
    if (memcmp(a->expected, a->got, a->used) == 0)
        return;
    size_t bad = 0;
    while (a->expected[bad] == a->got[bad])
        bad++;
    report(a, bad, what, tables, n);
}

/* `want_text` comes from the host function. An error of kvprim_cuda_* says the same and begins with its own name. */
static void check_status(const char *what, kvprim_status got, kvprim_status want, const char *got_text,
                         const char *want_text)
{
    static const char host[] = "kvprim_", gpu[] = "kvprim_cuda_";
    const bool named = strncmp(want_text, host, strlen(host)) == 0;
    const std::string text = named ? gpu + std::string(want_text + strlen(host)) : want_text;
    if (got != want || text != got_text)
        fail("%s: expected %s \"%s\", got %s \"%s\"", what, kvprim_status_name(want), text.c_str(),
             kvprim_status_name(got), got_text);
}

/* What runs now. It is static so that it can be printed if AddressSanitizer ends the program. */
static thread_local char current[320];

enum outcome { REFUSED, OUTSIDE, RAN }; /* OUTSIDE: valid, but it would leave the memory that it has here */

/* Runs a valid descriptor on both sides and compares all memory. An invalid one must be refused as the host function
   refuses it. */
static outcome try_gather(arena *a, const kvprim_gather_desc *desc, const char *what)
{
    const kvprim_gather_desc on = on_device(a, *desc);
    kvprim_gather_desc resolved = {};
    char want_text[512];
    snprintf(current, sizeof current, "gather: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_gather_check(&on, nullptr);
    snprintf(want_text, sizeof want_text, "%s", kvprim_last_error());
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (kvprim_gather_check(desc, &resolved) != KVPRIM_OK || !visit_gather(a, &resolved)))
        return OUTSIDE;
    memcpy(a->got, a->expected, a->used);
    if (want == KVPRIM_OK)
        CHECK(kvprim_gather(desc) == KVPRIM_OK);
    (void)kvprim_fail(KVPRIM_OK, "-");
    before(a);
    for (size_t i = 0; runs && i < a->allowed.size(); i++)
        allow(a, a->allowed[i].first, a->allowed[i].second);
    const kvprim_status got = kvprim_cuda_gather(&on, a->launch);
    after(a, runs);
    check_status(current, got, want, kvprim_last_error(), want_text);
    const named_table tables[] = {{"dst", &resolved.dst, desc->row_bytes, desc->count},
                                  {"src", &resolved.src, desc->row_bytes, resolved.src.rows}};
    compare(a, current, tables, runs ? 2 : 0);
    return want == KVPRIM_OK ? RAN : REFUSED;
}

static outcome try_store(arena *a, const kvprim_store_desc *desc, const char *what)
{
    const kvprim_store_desc on = on_device(a, *desc);
    kvprim_store_desc resolved = {};
    char want_text[512];
    snprintf(current, sizeof current, "store: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_store_check(&on, nullptr);
    snprintf(want_text, sizeof want_text, "%s", kvprim_last_error());
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (kvprim_store_check(desc, &resolved) != KVPRIM_OK || !visit_store(a, &resolved)))
        return OUTSIDE;
    memcpy(a->got, a->expected, a->used);
    if (want == KVPRIM_OK)
        CHECK(kvprim_store(desc) == KVPRIM_OK);
    (void)kvprim_fail(KVPRIM_OK, "-");
    before(a);
    for (size_t i = 0; runs && i < a->allowed.size(); i++)
        allow(a, a->allowed[i].first, a->allowed[i].second);
    const kvprim_status got = kvprim_cuda_store(&on, a->launch);
    after(a, runs);
    check_status(current, got, want, kvprim_last_error(), want_text);
    const named_table tables[] = {{"k_cache", &resolved.k_cache, desc->k_bytes, resolved.k_cache.rows},
                                  {"v_cache", &resolved.v_cache, desc->v_bytes, resolved.v_cache.rows},
                                  {"k", &resolved.k, desc->k_bytes, desc->count},
                                  {"v", &resolved.v, desc->v_bytes, desc->count}};
    compare(a, current, tables, !runs ? 0 : resolved.v_cache.data ? 4 : 3);
    return want == KVPRIM_OK ? RAN : REFUSED;
}

/* ---- layouts and indices ---- */

/* heads_inside: the heads of a row follow each other, as in a token-major cache. */
struct layout {
    const char *name;
    int64_t pad, page_rows, page_pad;
    int32_t heads;
    bool heads_inside;
};

static const layout layouts[] = {
    {"packed", 0, 0, 0, 0, false},        {"strided 48", 48, 0, 0, 0, false},   {"strided 24", 24, 0, 0, 0, false},
    {"strided 4", 4, 0, 0, 0, false},     {"paged", 0, 16, 0, 0, false},        {"padded pages", 7, 5, 33, 0, false},
    {"pages of 1", 0, 1, 32, 0, false},   {"one page", 0, 128, 0, 0, false},    {"HND pages", 0, 16, 0, 4, false},
    {"HND padded", 3, 4, 11, 2, false},   {"HND unpaged", 0, 0, 0, 4, false},   {"HND of 8", 16, 8, 0, 8, false},
    {"heads inside", 16, 16, 0, 4, true}, {"HND pages of 6", 0, 6, 0, 2, false}};
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
    *span = static_cast<size_t>(pages * page);
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
        static_cast<int32_t *>(index)[i] = static_cast<int32_t>(value);
}

/* Returns 0 to rows - 1 in random order. */
static std::vector<int64_t> shuffled(int64_t rows)
{
    std::vector<int64_t> order(static_cast<size_t>(rows));
    for (size_t i = 0; i < order.size(); i++)
        order[i] = static_cast<int64_t>(i);
    for (size_t i = order.size(); i > 1; i--)
        std::swap(order[i - 1], order[below(i)]);
    return order;
}

/* Fills in rows, padding, indices past the end, and indices far out. `distinct`: no row occurs twice, and count is at
   most rows. */
static void fill_index(void *index, kvprim_index_type type, int64_t count, int64_t base, int64_t rows, bool distinct,
                       int64_t stride = 1)
{
    const std::vector<int64_t> order = shuffled(distinct ? rows : 0);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row =
            distinct ? order[static_cast<size_t>(i)] : static_cast<int64_t>(below(static_cast<uint64_t>(rows)));
        const uint64_t kind = below(12);
        int64_t value = base + (kind == 1 ? rows : kind == 2 ? -1 : row);
        if (kind == 0)
            value = wild(type);
        if (distinct && kind == 0 && ruled(value, base, rows) >= 0)
            value = base + row;
        set_index(index, type, i * stride, value);
    }
}

/* Every stride-th element is an index, the others are noise. */
static void *place_index(arena *a, kvprim_index_type type, int64_t count, int64_t base, int64_t rows, bool distinct,
                         int64_t stride = 0)
{
    const size_t width = type == KVPRIM_I64 ? 8 : 4;
    const int64_t elements = stride > 1 && count > 0 ? (count - 1) * stride + 1 : count;
    void *const index = reserve(a, static_cast<size_t>(elements) * width, width * below(4));
    fill_index(index, type, count, base, rows, distinct, stride > 1 ? stride : 1);
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

struct gather_case {
    int64_t row_bytes;
    const layout *dst_layout, *src_layout;
    size_t dst_align, src_align;
    int64_t count, src_rows, base;
    kvprim_index_type type;
    bool counted;
};

static void one_gather(arena *a, const gather_case *c)
{
    empty(a);
    const kvprim_table dst = place(a, c->dst_layout, c->count, c->row_bytes, c->dst_align);
    const kvprim_table src = place(a, c->src_layout, c->src_rows, c->row_bytes, c->src_align);
    const int64_t stride = index_strides[below(8)];
    const void *const index = place_index(a, c->type, c->count, c->base, c->src_rows, false, stride);
    kvprim_gather_desc d =
        gather_of(dst, src, c->row_bytes, index, c->type, c->base, c->count, c->counted ? reserve_counter(a) : nullptr);
    d.index_stride = stride;
    char what[240];
    snprintf(what, sizeof what,
             "%lld rows of %lld bytes, %s <- %s, alignments %zu and %zu, base %lld, int%d, index stride %lld",
             static_cast<long long>(c->count), static_cast<long long>(c->row_bytes), c->dst_layout->name,
             c->src_layout->name, c->dst_align, c->src_align, static_cast<long long>(c->base),
             c->type == KVPRIM_I64 ? 64 : 32, static_cast<long long>(stride));
    CHECK(try_gather(a, &d, what) == RAN);
}

/* Where the inputs and caches of a store lie. PACKED: Q, K and V of a token follow each other. INTERLEAVED: the cache
   is [page][K or V][row], and the inputs are separate. */
enum store_form { K_ONLY, PACKED, APART, INTERLEAVED };
static const unsigned n_forms = 4;
static const char *const form_names[] = {"K only", "packed QKV", "K and V apart", "interleaved caches"};

struct store_case {
    int64_t k_bytes, v_bytes;
    const layout *cache_layout, *input_layout;
    size_t cache_align, input_align;
    int64_t count, rows, base;
    kvprim_index_type type;
    store_form form;
    bool counted;
};

static void place_inputs(arena *a, const store_case *c, kvprim_store_desc *d)
{
    if (c->form != PACKED) {
        d->k = place(a, c->input_layout, c->count, c->k_bytes, c->input_align);
        d->v = place(a, c->input_layout, c->count, c->v_bytes, (c->input_align * 5 + 3) % 16);
        return;
    }
    const int64_t q_bytes = c->k_bytes * 2, token = q_bytes + c->k_bytes + c->v_bytes;
    char *const qkv = static_cast<char *>(reserve(a, static_cast<size_t>(c->count * token), c->input_align));
    d->k = table_of(qkv + q_bytes, c->count, token);
    d->v = table_of(qkv + q_bytes + c->k_bytes, c->count, token);
}

static void place_caches(arena *a, const store_case *c, kvprim_store_desc *d)
{
    if (c->form != INTERLEAVED) {
        d->k_cache = place(a, c->cache_layout, c->rows, c->k_bytes, c->cache_align);
        d->v_cache = place(a, c->cache_layout, c->rows, c->v_bytes, (c->cache_align * 3 + 16 - c->input_align) % 16);
        return;
    }
    const int64_t page_rows = 4, pages = (c->rows + page_rows - 1) / page_rows;
    const int64_t page = page_rows * (c->k_bytes + c->v_bytes);
    char *const cache = static_cast<char *>(reserve(a, static_cast<size_t>(pages * page), c->cache_align));
    d->k_cache = pages_of(cache, c->rows, page_rows, page);
    d->v_cache = pages_of(cache + page_rows * c->k_bytes, c->rows, page_rows, page);
}

static void one_store(arena *a, const store_case *c)
{
    empty(a);
    kvprim_store_desc d = {};
    place_inputs(a, c, &d);
    place_caches(a, c, &d);
    d.k_bytes = c->k_bytes;
    d.v_bytes = c->v_bytes;
    d.slot_stride = index_strides[below(8)];
    d.slot = place_index(a, c->type, c->count, c->base, c->rows, true, d.slot_stride);
    d.slot_type = c->type;
    d.slot_base = c->base;
    d.count = c->count;
    d.rejected = c->counted ? reserve_counter(a) : nullptr;
    if (c->form == K_ONLY)
        drop_v(&d);
    char what[260];
    snprintf(
        what, sizeof what,
        "%lld rows of %lld and %lld bytes, %s, %s <- %s, alignments %zu and %zu, base %lld, int%d, slot stride %lld",
        static_cast<long long>(c->count), static_cast<long long>(c->k_bytes), static_cast<long long>(c->v_bytes),
        form_names[c->form], c->cache_layout->name, c->input_layout->name, c->cache_align, c->input_align,
        static_cast<long long>(c->base), c->type == KVPRIM_I64 ? 64 : 32, static_cast<long long>(d.slot_stride));
    CHECK(try_store(a, &d, what) == RAN);
}

/* Every thin-th case of a matrix runs, and so many rounds of random descriptors. */
static int thin = 1;
static unsigned fuzz_rounds = 6000;

static kvprim_index_type type_of(unsigned n)
{
    return n % 2 ? KVPRIM_I64 : KVPRIM_I32;
}

static int64_t rows_for(int64_t row_bytes)
{
    return row_bytes <= 2100 ? 37 : 7;
}

/* Runs case n. Whatever is not given follows from n. */
static void numbered_gather(arena *a, unsigned n, int64_t row_bytes, unsigned dst_layout, unsigned src_layout,
                            size_t dst_align, size_t src_align)
{
    const gather_case c = {row_bytes,           &layouts[dst_layout],    &layouts[src_layout], dst_align,  src_align,
                           rows_for(row_bytes), rows_for(row_bytes) - 5, bases[n / 2 % 4],     type_of(n), n % 3 != 0};
    one_gather(a, &c);
}

typedef void numbered_move(arena *a, unsigned n, int64_t row_bytes, unsigned dst_layout, unsigned src_layout,
                           size_t dst_align, size_t src_align);

/* Combines every size with every pair of layouts, and every size with every pair of alignments. */
static void size_matrix(arena *a, numbered_move *move)
{
    const unsigned step = static_cast<unsigned>(thin);
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned l = s % step; l < n_layouts * n_layouts; l += step)
            move(a, l + s, row_sizes[s], l % n_layouts, l / n_layouts, (l * 5 + s) % 4 ? 0 : l % 16,
                 (l * 3 + s) % 4 ? 0 : (l * 7 + s) % 16);
    for (unsigned s = 0; s < n_row_sizes; s++)
        for (unsigned align = s % step; align < 256; align += step)
            move(a, align + s, row_sizes[s], (align + s) % 5 ? 0 : 5, (align + s) % 3 ? 0 : align % n_layouts,
                 align % 16, align / 16);
}

static void gather_matrix(arena *a)
{
    size_matrix(a, numbered_gather);
}

static void numbered_store(arena *a, unsigned n, int64_t k_bytes, int64_t v_bytes, unsigned cache_layout,
                           size_t cache_align, size_t input_align)
{
    const int64_t count = rows_for(k_bytes > v_bytes ? k_bytes : v_bytes);
    const store_case c = {k_bytes,
                          v_bytes,
                          &layouts[cache_layout],
                          &layouts[n / 3 % n_layouts],
                          cache_align,
                          input_align,
                          count,
                          count + 11,
                          bases[n / 2 % 4],
                          type_of(n),
                          static_cast<store_form>(n / 4 % n_forms),
                          n % 3 != 0};
    one_store(a, &c);
}

/* In every other case K and V are equally wide. */
static void store_matrix(arena *a)
{
    const unsigned step = static_cast<unsigned>(thin);
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
            const int64_t rows = counts[i] + 3;
            const gather_case g = {
                sizes[s], &layouts[s % 2 * 4], &layouts[i % 2 * 4], 0, 0, counts[i], rows, 1, type_of(s + i), true};
            const store_case t = {sizes[s],
                                  sizes[s] - sizes[s] % 16 / 2,
                                  &layouts[i % 2 * 4],
                                  &layouts[0],
                                  0,
                                  0,
                                  counts[i],
                                  rows,
                                  0,
                                  type_of(s + i),
                                  s % 3 ? APART : K_ONLY,
                                  true};
            one_gather(a, &g);
            one_store(a, &t);
        }
}

/* Runs a few of everything, for the options of a launch. */
static void small_matrix(arena *a)
{
    static const int64_t sizes[] = {1, 12, 16, 100, 128, 256, 257, 512, 1000, 1152, 2048, 4096, 8192, 20000};
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (unsigned l = 0; l < n_layouts; l++) {
            numbered_gather(a, l + s, sizes[s], l, (l + s) % n_layouts, l % 2 * s, 0);
            numbered_store(a, l + s, sizes[s], sizes[(s + l) % 2 ? s : 3], l, 0, l % 3 ? 0 : s);
        }
    static const int64_t counts[] = {1, 33, 1000, 5000};
    count_matrix(a, 1 << 20, counts, 4);
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
            set_index(ids, type_of(n), i, static_cast<int64_t>(below(uint64_t(vocabulary))));
        const kvprim_gather_desc d = gather_of(dst, src, row_bytes, ids, type_of(n), first, count, reserve_counter(a));
        CHECK(try_gather(a, &d, "a shard of a vocabulary") == RAN);
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
        CHECK(try_gather(a, &d, "padding alone") == RAN);
    }
}

/* Rows that begin at multiples of 16 bytes and end anywhere, for each way to end. Some have a V of the next size. */
static void row_tails(arena *a)
{
    for (int64_t row_bytes = 1; row_bytes <= 160; row_bytes += row_bytes < 48 ? 1 : 13) {
        const int64_t rows = 9, count = 7, stride = (row_bytes + 16) / 16 * 16;
        const size_t cache_bytes = static_cast<size_t>(rows * stride), bytes = static_cast<size_t>(count * stride);
        char what[40];
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
        snprintf(what, sizeof what, "tail of %lld bytes", static_cast<long long>(row_bytes));
        CHECK(try_store(a, &store, what) == RAN);
        const kvprim_gather_desc gather = gather_of(input, cache, row_bytes, index, KVPRIM_I32, 0, count, nullptr);
        CHECK(try_gather(a, &gather, what) == RAN);
    }
}

/* Aligned rows of sizes that the kernels cut into parts in different ways; heads that are not aligned. */
static void row_parts(arena *a)
{
    static const int64_t sizes[][2] = {{1536, 0},   {3072, 0},  {1536, 1536}, {3072, 3072}, {1024, 512},
                                       {512, 1024}, {256, 128}, {128, 256},   {2048, 1024}, {64, 128}};
    for (const int64_t(&bytes)[2] : sizes) {
        const int64_t rows = 70, count = 60;
        char what[60];
        empty(a);
        kvprim_store_desc d = {};
        d.k_cache = place(a, &layouts[0], rows, bytes[0], 0), d.k = place(a, &layouts[0], count, bytes[0], 0);
        if (bytes[1])
            d.v_cache = place(a, &layouts[0], rows, bytes[1], 0), d.v = place(a, &layouts[0], count, bytes[1], 0);
        d.k_bytes = bytes[0], d.v_bytes = bytes[1], d.count = count, d.slot_type = KVPRIM_I32;
        d.slot = place_index(a, KVPRIM_I32, count, 0, rows, true);
        snprintf(what, sizeof what, "parts of %lld and %lld bytes", static_cast<long long>(bytes[0]),
                 static_cast<long long>(bytes[1]));
        CHECK(try_store(a, &d, what) == RAN);
        kvprim_gather_desc gather = gather_of(d.k, d.k_cache, bytes[0], d.slot, KVPRIM_I32, 0, count, nullptr);
        CHECK(try_gather(a, &gather, what) == RAN);
        gather.src.rows = rows / 2 - 1, gather.src.stride = 2 * bytes[0] + 16;
        gather.src.heads = 2, gather.src.head_stride = bytes[0] / 2 + 8;
        CHECK(try_gather(a, &gather, what) == RAN);
    }
}

/* ---- descriptors that must be refused ---- */

static kvprim_gather_desc good_gather(arena *a)
{
    empty(a);
    void *const src = reserve(a, 4096, 0), *const dst = reserve(a, 4096, 0);
    const void *const index = place_index(a, KVPRIM_I32, 4, 0, 8, false);
    return gather_of(table_of(dst, 4), table_of(src, 8), 128, index, KVPRIM_I32, 0, 4, reserve_counter(a));
}

static uint32_t *odd_counter(uint32_t *rejected)
{
    return reinterpret_cast<uint32_t *>(reinterpret_cast<char *>(rejected) + 2);
}

static void bad_gathers(arena *a)
{
    const kvprim_gather_desc good = good_gather(a);
    kvprim_gather_desc d = good;
    CHECK(try_gather(a, &good, "good") == RAN);
#define BAD(change)                                                                                                    \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    CHECK(try_gather(a, &d, #change) == REFUSED)
    BAD(dst.data = nullptr);
    BAD(src.data = nullptr);
    BAD(index = nullptr);
    BAD(count = -1);
    BAD(count = INT64_MIN);
    BAD(count = INT64_MAX);
    BAD(row_bytes = 0);
    BAD(row_bytes = -128);
    BAD(row_bytes = INT64_MAX);
    BAD(src.rows = -2);
    BAD(dst.rows = 3);
    BAD(src.stride = 127);
    BAD(dst.stride = -128);
    BAD(src.stride = INT64_MIN);
    BAD(src.stride = INT64_MAX);
    BAD(src.page_rows = -1);
    BAD(dst.page_rows = INT64_MIN);
    BAD(src.page_stride = -1);
    BAD(src.heads = -1);
    BAD(src.heads = 3);
    BAD(dst.heads = INT32_MIN);
    BAD(src.rows = INT64_MAX);
    BAD(src.data = static_cast<char *>(good.dst.data) + 511);
    BAD(dst.data = static_cast<char *>(good.src.data) + 1023);
    BAD(src.data = good.dst.data);
    BAD(index_type = static_cast<kvprim_index_type>(0));
    BAD(index_stride = -1);
    BAD(index_stride = INT64_MAX);
    BAD(src.rows = 0);
    BAD(src.heads = 2); /* and no head_stride */
    BAD(dst.heads = 2);
    BAD(src.bytes = 8 * 128 - 1);
    BAD(dst.bytes = 4 * 128 - 1);
    BAD(src.bytes = -1);
    BAD(reserved_index = 1);
    BAD(reserved = 1);
    BAD(src.reserved_heads = 1);
    BAD(dst.reserved[1] = -1);
    BAD(rejected = odd_counter(good.rejected));
    BAD(rejected = static_cast<uint32_t *>(good.dst.data) + 127);
    BAD(rejected = static_cast<uint32_t *>(good.src.data) + 255);
    BAD(rejected = static_cast<uint32_t *>(const_cast<void *>(good.index)) + 3);
#undef BAD
    d = good;
    d.src.bytes = 8 * 128;
    d.dst.bytes = 4 * 128;
    CHECK(try_gather(a, &d, "tables as large as their memory") == RAN);
    d = good;
    d.src.page_rows = 4;
    d.src.page_stride = 400;
    CHECK(try_gather(a, &d, "pages that overlap") == REFUSED);
    d = good;
    d.src.heads = 2;
    d.src.stride = 64;
    d.src.head_stride = 100;
    CHECK(try_gather(a, &d, "heads that overlap") == REFUSED);
    d = {};
    CHECK(try_gather(a, &d, "count 0") == RAN);
    d.rejected = odd_counter(good.rejected);
    d.reserved = d.row_bytes = -1;
    CHECK(try_gather(a, &d, "count 0, and all else is wrong") == RAN);
    d = good;
    d.src = empty_table();
    CHECK(try_gather(a, &d, "an empty table") == RAN);
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

static void bad_stores(arena *a)
{
    const kvprim_store_desc good = good_store(a);
    kvprim_store_desc d = good;
    CHECK(try_store(a, &good, "good") == RAN);
#define BAD(change)                                                                                                    \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    CHECK(try_store(a, &d, #change) == REFUSED)
    BAD(slot = nullptr);
    BAD(k_cache.data = nullptr);
    BAD(k.data = nullptr);
    BAD(v.data = nullptr);
    BAD(k_bytes = 0);
    BAD(v_bytes = 0);
    BAD(v_bytes = INT64_MIN);
    BAD(k.rows = 1);
    BAD(v.rows = 0);
    BAD(v_cache.rows = 7);
    BAD(k_cache.rows = INT64_MAX);
    BAD(v.stride = 31);
    BAD(k.heads = 7);
    BAD(v_cache.page_rows = -4);
    BAD(count = INT64_MIN);
    BAD(count = INT64_MAX);
    BAD(v.data = static_cast<char *>(good.k_cache.data) + 100);
    BAD(k.data = static_cast<char *>(good.v_cache.data) + 100);
    BAD(k.data = good.k_cache.data);
    BAD(v_cache.data = static_cast<char *>(good.k_cache.data) + 63);
    BAD(v_cache.data = nullptr);
    BAD(slot_type = static_cast<kvprim_index_type>(0));
    BAD(slot_stride = -1);
    BAD(k_cache.rows = 0);
    BAD(k_cache.heads = 2);
    BAD(k_cache.bytes = 8 * 64 - 1);
    BAD(v.bytes = 2 * 32 - 1);
    BAD(reserved_slot = 1);
    BAD(reserved = 1);
    BAD(v_cache.reserved[0] = 1);
    BAD(rejected = odd_counter(good.rejected));
    BAD(rejected = static_cast<uint32_t *>(good.k_cache.data) + 127);
    BAD(rejected = static_cast<uint32_t *>(good.v_cache.data) + 63);
    BAD(rejected = static_cast<uint32_t *>(good.k.data) + 31);
    BAD(rejected = static_cast<uint32_t *>(good.v.data));
    BAD(rejected = static_cast<uint32_t *>(const_cast<void *>(good.slot)) + 3);
#undef BAD
    d = good;
    d.v_cache = table_of(nullptr, 0);
    CHECK(try_store(a, &d, "an input V without a cache") == REFUSED);
    d.v = table_of(nullptr, 0);
    CHECK(try_store(a, &d, "the bytes of V without V") == REFUSED);
    d.v_bytes = 0;
    CHECK(try_store(a, &d, "K only") == RAN);
    d = {};
    CHECK(try_store(a, &d, "count 0") == RAN);
}

/* An option that is out of range is refused by name, and nothing is written. */
static void bad_launch(arena *a, int32_t pdl, int32_t max_sms, const char *field)
{
    const kvprim_cuda_launch bad = launch_like(a, pdl, max_sms);
    snprintf(current, sizeof current, "launch with pdl %d, max_sms %d", pdl, max_sms);
    for (int store = 0; store < 2; store++) {
        const kvprim_gather_desc gather = good_gather(a), gather_on = on_device(a, gather);
        kvprim_store_desc store_on = {};
        if (store)
            store_on = on_device(a, good_store(a));
        memcpy(a->got, a->expected, a->used);
        (void)kvprim_fail(KVPRIM_OK, "-");
        before(a);
        const kvprim_status got = store ? kvprim_cuda_store(&store_on, &bad) : kvprim_cuda_gather(&gather_on, &bad);
        after(a, false);
        if (got != KVPRIM_ERROR_ARGUMENT || !strstr(kvprim_last_error(), field))
            fail("%s: %s \"%s\"", current, kvprim_status_name(got), kvprim_last_error());
        compare(a, current, nullptr, 0);
    }
}

/* Without rows nothing is looked at, not even the options. */
static void idle_launches(arena *a)
{
    const kvprim_gather_desc gather = {};
    const kvprim_store_desc store = {};
    const kvprim_transfer_desc transfer = {};
    const kvprim_unpack_desc unpack = {};
    const kvprim_cuda_launch bad = launch_like(a, 7, -1);
    CHECK(kvprim_cuda_gather(&gather, &bad) == KVPRIM_OK);
    CHECK(kvprim_cuda_store(&store, &bad) == KVPRIM_OK);
    CHECK(kvprim_cuda_transfer(&transfer, &bad) == KVPRIM_OK);
    CHECK(kvprim_cuda_unpack(&unpack, &bad) == KVPRIM_OK);
}

static void bad_launches(arena *a)
{
    idle_launches(a);
    bad_launch(a, 2, 0, "pdl");
    bad_launch(a, -1, 0, "pdl");
    bad_launch(a, 0, -1, "max_sms");
    bad_launch(a, 1, INT32_MIN, "max_sms");
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_cuda_gather(nullptr, a->launch) == KVPRIM_ERROR_NULL && strstr(kvprim_last_error(), "desc is NULL"));
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_cuda_store(nullptr, a->launch) == KVPRIM_ERROR_NULL && strstr(kvprim_last_error(), "desc is NULL"));
}

/* ---- random descriptors ---- */

enum { fuzz_bytes = 1 << 14, fuzz_indices = 80 }; /* bytes: of each table's part of the memory */

static bool chance(uint64_t one_in)
{
    return below(one_in) == 0;
}

/* Makes strides of dimensions that enclose each other in any order, some with padding; or a packed table. */
static kvprim_table random_table(int64_t rows, int64_t row_bytes)
{
    static const int32_t head_counts[] = {0, 1, 2, 3, 4, 8, 16};
    kvprim_table t = table_of(nullptr, rows);
    if (chance(2))
        t.heads = chance(8) ? static_cast<int32_t>(row_bytes) : head_counts[below(7)];
    if (t.heads > 1 && row_bytes % t.heads && !chance(16))
        t.heads = 1;
    t.page_rows = chance(2) ? static_cast<int64_t>(below(18)) : 0;
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
        const int64_t up = chance(2) ? static_cast<int64_t>((unit - static_cast<uint64_t>(extent) % unit) % unit) : 0;
        *strides[k] = extent + up + (chance(2) ? static_cast<int64_t>(below(3) * unit) : 0) - chance(64);
        extent += *strides[k] * (counts[k] > 1 ? counts[k] - 1 : 0);
    }
    return t;
}

static int64_t wild_value()
{
    const int64_t near = static_cast<int64_t>(below(5)) - 2;
    switch (below(4)) {
    case 0:
        return static_cast<int64_t>(random_u64());
    case 1:
        return near;
    case 2:
        return static_cast<int64_t>((uint64_t(1) << below(64)) + static_cast<uint64_t>(near));
    default:
        return static_cast<int64_t>(static_cast<uint64_t>(INT64_MAX) + static_cast<uint64_t>(near));
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
        t->heads = static_cast<int32_t>(wild_value());
    if (chance(60))
        t->data = nullptr;
    if (chance(40))
        t->bytes = chance(4) ? wild_value() : static_cast<int64_t>(below(2 * fuzz_bytes));
    if (chance(200))
        t->reserved[below(2)] = 1;
}

/* Returns an address near the start of part `part` of the memory; sometimes any address, which may overlap another
   part. */
static void *random_place(arena *a, uint64_t part)
{
    return a->expected + (chance(20) ? below(a->used) : part * fuzz_bytes + (chance(2) ? 16 * below(8) : below(64)));
}

static const void *random_index(arena *a, kvprim_index_type type, int64_t rows, int64_t base, bool distinct)
{
    const uint64_t start = below(64), range = static_cast<uint64_t>(rows) + 3;
    void *const index = a->expected + 4 * fuzz_bytes + 8 * below(4);
    a->index_room = fuzz_indices;
    for (uint64_t i = 0; i < fuzz_indices; i++) {
        const uint64_t step = distinct ? start + i : random_u64();
        int64_t value = static_cast<int64_t>(static_cast<uint64_t>(base) + step % range - 1); /* wraps */
        if (chance(16))
            value = wild_value();
        set_index(index, type, static_cast<int64_t>(i), value);
    }
    return index;
}

static int64_t random_row_bytes()
{
    static const int64_t usual[] = {16, 32, 64, 128, 256, 48, 96, 8, 4, 512};
    return chance(2) ? usual[below(10)] : 1 + static_cast<int64_t>(below(300));
}

static int64_t random_base()
{
    return chance(2) ? 0 : chance(4) ? wild_value() : static_cast<int64_t>(below(2000)) - 1000;
}

static int64_t random_stride()
{
    return chance(60) ? wild_value() : index_strides[chance(4) ? below(8) : 0];
}

static void start_round(arena *a)
{
    empty(a);
    (void)reserve(a, 4 * fuzz_bytes + 8 * fuzz_indices + 256, 0);
}

static uint32_t *random_counter(arena *a)
{
    void *const counter = a->expected + 4 * fuzz_bytes + 8 * fuzz_indices + 64 + 4 * below(8);
    return chance(4) ? nullptr : static_cast<uint32_t *>(counter);
}

static outcome random_gather(arena *a, unsigned round)
{
    const int64_t rows = 1 + static_cast<int64_t>(below(40)), count = static_cast<int64_t>(below(fuzz_indices));
    const int64_t row_bytes = random_row_bytes();
    start_round(a);
    kvprim_gather_desc d = {};
    d.dst = random_table(count + static_cast<int64_t>(below(3)), row_bytes);
    d.src = random_table(rows, row_bytes);
    d.dst.data = random_place(a, 0);
    d.src.data = random_place(a, 2);
    d.row_bytes = row_bytes;
    d.index_type = type_of(round);
    d.index_base = random_base();
    d.index = random_index(a, d.index_type, rows, d.index_base, false);
    d.index_stride = random_stride();
    d.count = count;
    d.rejected = random_counter(a);
    spoil_table(&d.dst);
    spoil_table(&d.src);
    spoil(&d.row_bytes);
    spoil(&d.count);
    char what[40];
    snprintf(what, sizeof what, "round %u", round);
    return try_gather(a, &d, what);
}

static outcome random_store(arena *a, unsigned round)
{
    const int64_t rows = 1 + static_cast<int64_t>(below(40)), count = static_cast<int64_t>(below(40));
    start_round(a);
    kvprim_store_desc d = {};
    d.k_bytes = random_row_bytes();
    d.v_bytes = chance(2) ? d.k_bytes : random_row_bytes();
    d.k_cache = random_table(rows, d.k_bytes);
    d.v_cache = random_table(rows, d.v_bytes);
    d.k = random_table(count + static_cast<int64_t>(below(3)), d.k_bytes);
    d.v = random_table(count + static_cast<int64_t>(below(3)), d.v_bytes);
    d.k_cache.data = random_place(a, 0);
    d.v_cache.data = random_place(a, 1);
    d.k.data = random_place(a, 2);
    d.v.data = random_place(a, 3);
    if (chance(3))
        drop_v(&d);
    d.slot_type = type_of(round);
    d.slot_base = random_base();
    d.slot = random_index(a, d.slot_type, rows < count ? count : rows, d.slot_base, true);
    d.slot_stride = random_stride();
    d.count = count;
    d.rejected = random_counter(a);
    const bool with_v = d.v_cache.data != nullptr;
    spoil_table(&d.k_cache);
    spoil_table(&d.k);
    spoil(&d.k_bytes);
    if (with_v) {
        spoil_table(&d.v_cache);
        spoil_table(&d.v);
        spoil(&d.v_bytes);
    }
    spoil(&d.count);
    char what[40];
    snprintf(what, sizeof what, "round %u", round);
    return try_store(a, &d, what);
}

/* Enough descriptors must have run and been refused, or the test would test nothing. */
static void fuzz(arena *a, outcome (*one)(arena *, unsigned))
{
    const unsigned rounds = fuzz_rounds;
    unsigned n[3] = {0, 0, 0};
    for (unsigned round = 0; round < rounds; round++) {
        random_state = round * 7919 + 1;
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
            fail("row %lld byte %lld: expected %02x, stored %02x, gathered %02x",
                 static_cast<long long>(large_slots[i]), static_cast<long long>(b), want, stored ? stored[b] : 0, got);
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
         bytes, warp % 16, warp / 16, static_cast<long long>(bad % slot) - static_cast<long long>(16 + warp % 16),
         want[bad], got[bad]);
}

#endif /* TEST_ROWS_H */

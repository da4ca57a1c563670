/* SPDX-License-Identifier: MIT */
/* Tests of kvprim.h. They compute what they expect from the contracts, not with the code under test.

       cc -O2 -I. tests/core/test_kvprim.c -lpthread && ./a.out [quick|threads]

   `quick` takes every fourth case where there are thousands alike: for a run under sanitizers. `threads` runs only the
   tests that have threads. */
#if !defined(_WIN32)
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif
#if defined(__has_include)
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h> /* keys of XXH3 */
#endif
#endif
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "../harness.h"
#include "test_layouts.h"
#include <time.h>
#if !defined(_WIN32)
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#define LENGTH(array) (sizeof(array) / sizeof *(array))
static size_t every = 1; /* 4 if quick */

/* ---- status ---- */

static void test_status(void)
{
    CHECK(strcmp(kvprim_status_name(KVPRIM_OK), "KVPRIM_OK") == 0);
    CHECK(strcmp(kvprim_status_name(KVPRIM_ERROR_OVERLAP), "KVPRIM_ERROR_OVERLAP") == 0);
    CHECK(strcmp(kvprim_status_name((kvprim_status)99), "unknown kvprim_status") == 0);
    CHECK(strlen(kvprim_status_text(KVPRIM_ERROR_NULL)) > 10);
    CHECK(strcmp(kvprim_last_error(), "") == 0);
    CHECK_ERROR(kvprim_gather(NULL), KVPRIM_ERROR_NULL, "kvprim_gather: desc is NULL");
    (void)kvprim_fail(KVPRIM_ERROR_NULL, "mine: %s", kvprim_last_error()); /* as a wrapper would */
    CHECK(strcmp(kvprim_last_error(), "mine: kvprim_gather: desc is NULL") == 0);
}

_Static_assert(KVPRIM_VERSION == KVPRIM_VERSION_MAJOR * 10000 + KVPRIM_VERSION_MINOR * 100 + KVPRIM_VERSION_PATCH,
               "one number for a version");
_Static_assert(KVPRIM_I32 == 1 && KVPRIM_I64 == 2 && KVPRIM_F16 >= 16, "no element type is taken for an index type");

/* Bindings compare these. */
static void test_version_and_sizes(void)
{
#define SIZE_OF(type)                                                                                                  \
    {                                                                                                                  \
#type, sizeof(type)                                                                                            \
    }
    static const struct {
        const char *name;
        size_t size;
    } types[] = {SIZE_OF(kvprim_table),
                 SIZE_OF(kvprim_gather_desc),
                 SIZE_OF(kvprim_store_desc),
                 SIZE_OF(kvprim_slots_desc),
                 SIZE_OF(kvprim_transfer_desc),
                 SIZE_OF(kvprim_unpack_desc),
                 SIZE_OF(kvprim_unpack_meta_item),
                 SIZE_OF(kvprim_unpack_meta_desc),
                 SIZE_OF(kvprim_fragment),
                 SIZE_OF(kvprim_copy_desc),
                 SIZE_OF(kvprim_copy_item),
                 SIZE_OF(kvprim_fetch_set),
                 SIZE_OF(kvprim_fetch_desc),
                 SIZE_OF(kvprim_move),
                 SIZE_OF(kvprim_format),
                 SIZE_OF(kvprim_layout_sizes),
                 SIZE_OF(kvprim_layout),
                 SIZE_OF(kvprim_pack_desc),
                 SIZE_OF(kvprim_pack),
                 SIZE_OF(kvprim_key_extra),
                 SIZE_OF(kvprim_keys_desc),
                 SIZE_OF(kvprim_key_table),
                 {"kvprim", 0},
                 {"", 0}};
#undef SIZE_OF
    CHECK(kvprim_version() == KVPRIM_VERSION);
    for (size_t i = 0; i < LENGTH(types); i++)
        CHECK(kvprim_sizeof(types[i].name) == types[i].size);
}

/* ---- prefix ---- */

typedef size_t prefix_i32_fn(const int32_t *, size_t, const int32_t *, size_t);
typedef size_t prefix_i64_fn(const int64_t *, size_t, const int64_t *, size_t);
typedef struct variant {
    const char *name;
    prefix_i32_fn *i32;
    prefix_i64_fn *i64;
} variant;

/* Writes every variant that this machine can run and returns how many there are. */
static int variants(variant *out)
{
    int n = 0;
    out[n++] = (variant){"plain", kvprim_prefix_i32, kvprim_prefix_i64};
    out[n++] = (variant){"scalar", kvprim_prefix_i32_scalar, kvprim_prefix_i64_scalar};
#ifdef KVPRIM_X86
    if (strcmp(kvprim_isa(), "scalar") != 0)
        out[n++] = (variant){"avx2", kvprim_prefix_i32_avx2, kvprim_prefix_i64_avx2};
    if (strcmp(kvprim_isa(), "avx512") == 0)
        out[n++] = (variant){"avx512", kvprim_prefix_i32_avx512, kvprim_prefix_i64_avx512};
#endif
#ifdef KVPRIM_NEON
    out[n++] = (variant){"neon", kvprim_prefix_i32_neon, kvprim_prefix_i64_neon};
#endif
    return n;
}

static size_t naive(const void *a, size_t a_len, const void *b, size_t b_len, size_t token)
{
    size_t i = 0;
    while (i < a_len && i < b_len && memcmp((const char *)a + i * token, (const char *)b + i * token, token) == 0)
        i++;
    return i;
}

/* Compares arrays of int32 or int64, whose size is `token`, with every variant that this machine can run. */
static void check_prefix(const void *a, size_t a_len, const void *b, size_t b_len, size_t token)
{
    variant v[8];
    const int n = variants(v);
    const size_t want = naive(a, a_len, b, b_len, token);
    for (int k = 0; k < n; k++) {
        const size_t got = token == 4 ? v[k].i32(a, a_len, b, b_len) : v[k].i64(a, a_len, b, b_len);
        if (got != want)
            fail("%s, tokens of %zu bytes: lengths %zu and %zu, alignments %zu and %zu: %zu, expected %zu", v[k].name,
                 token, a_len, b_len, (size_t)((uintptr_t)a % 64), (size_t)((uintptr_t)b % 64), got, want);
    }
}

/* An error of kvprim_prefix_many_i32. */
#define CHECK_PREFIX_ERROR(call, words)                                                                                \
    CHECK_ERROR((call) == KVPRIM_PREFIX_ERROR ? KVPRIM_ERROR_NULL : KVPRIM_OK, KVPRIM_ERROR_NULL, words)

enum { longest = 300, longer = 720, step_i32 = 16 };

/* b differs from a in one bit at `bad`, or nowhere if that is n. The plain name calls another variant in each pass over
   the instruction sets; if there is one pass, the scalar variant is checked beside it. */
static void check_place(const int32_t *a, int32_t *b, size_t n, size_t bad)
{
    const int32_t was = b[bad];
    b[bad] ^= bad < n ? (int32_t)(1u << (n + bad) % 32) : 0;
    const size_t got = kvprim_prefix_i32(a, n, b, n);
#ifdef KVPRIM_X86
    const size_t scalar = bad;
#else
    const size_t scalar = kvprim_prefix_i32_scalar(a, n, b, n);
#endif
    b[bad] = was;
    if (got != bad || scalar != bad)
        fail("length %zu, alignments %zu and %zu, differs at %zu: %zu, scalar %zu", n, (size_t)((uintptr_t)a % 64),
             (size_t)((uintptr_t)b % 64), bad, got, scalar);
}

/* Compares lengths 0 to 300 at all alignments of both arrays in a cache line, with a difference at each place in turn;
   and lengths around the ends of whole blocks, with a difference at every 11th place. */
static void test_prefix_everywhere(void)
{
    static const size_t lengths[] = {400, 511, 512, 513, 575, 576, 577, 591, 592, 593, 608, 640, 655, 656, 700, longer};
    static int32_t a_memory[longer + 64], b_memory[longer + 64];
    for (size_t align = 0; align < step_i32 * step_i32; align++) {
        int32_t *const a = a_memory + align % step_i32, *const b = b_memory + align / step_i32;
        fill(a, sizeof *a * longer);
        memcpy(b, a, sizeof *b * longer);
        for (size_t n = (align + align / step_i32) % every; n <= longest; n += every)
            for (size_t bad = 0; bad <= n; bad++)
                check_place(a, b, n, bad);
        for (size_t l = 0; l < LENGTH(lengths); l++)
            for (size_t bad = (align + l) % 11; bad <= lengths[l] + 11; bad += 11)
                check_place(a, b, lengths[l], bad < lengths[l] ? bad : lengths[l]);
    }
}

static void test_prefix_lengths_and_i64(void)
{
    static int64_t a_memory[longest + 64], b_memory[longest + 64];
    for (int round = 0; round < 40000; round++) {
        int64_t *const a = a_memory + below(8), *const b = b_memory + below(8);
        const size_t a_len = below(longest / 2), b_len = below(longest / 2);
        fill(a, sizeof *a * (longest / 2));
        memcpy(b, a, sizeof *b * (longest / 2));
        if (b_len > 0 && round % 4 != 0) /* in either half of an int64 */
            b[below(b_len)] ^= (int64_t)((uint64_t)1 << below(64));
        check_prefix(a, a_len, b, b_len, 8);
        check_prefix(a, 2 * a_len, b, 2 * b_len + 1, 4);
    }
}

static void test_prefix_large(void)
{
    const size_t n = 200000;
    int32_t *const a = allocate(4 * (n + 16)), *const b = allocate(4 * (n + 16));
    for (size_t i = 0; i < n + 16; i++)
        a[i] = b[i] = (int32_t)i;
    for (size_t shift = 0; shift < 4; shift++) {
        memmove(b + shift, a, 4 * n);
        check_prefix(a, n, b + shift, n - shift, 4);
        b[shift + n / 2] = -1;
        check_prefix(a, n, b + shift, n, 4);
    }
    free(a);
    free(b);
}

static void test_prefix_null_and_pages(void)
{
    const int32_t a[] = {1, 2, 3};
    const int64_t b[] = {1, 2, 3};
    size_t out[2] = {77, 77};
    const int32_t *const keys[] = {a, NULL};
    const size_t lens[] = {3, 2};
    CHECK(kvprim_prefix_i32(NULL, 0, NULL, 0) == 0);
    CHECK(kvprim_prefix_i32(NULL, 0, a, 3) == 0);
    CHECK(kvprim_prefix_i64(b, 3, NULL, 0) == 0);
    CHECK_ERROR((kvprim_status)kvprim_prefix_i32(NULL, 5, a, 3), KVPRIM_OK,
                "kvprim_prefix_i32: a is NULL and a_len is 5");
    CHECK_ERROR((kvprim_status)kvprim_prefix_i32(NULL, 5, a, 0), KVPRIM_OK,
                "kvprim_prefix_i32: a is NULL and a_len is 5");
    CHECK_ERROR((kvprim_status)kvprim_prefix_i32(a, 3, NULL, 900), KVPRIM_OK, "b is NULL and b_len is 900");
    CHECK_ERROR((kvprim_status)kvprim_prefix_i64(b, 3, NULL, 7), KVPRIM_OK,
                "kvprim_prefix_i64: b is NULL and b_len is 7");
    CHECK_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, keys, lens, 2, out), "keys[1] is NULL and its length is 2");
    CHECK_PREFIX_ERROR(kvprim_prefix_many_i32(NULL, 3, keys, lens, 1, out), "query is NULL, query_len is 3");
    CHECK_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, NULL, lens, 1, out), "keys is NULL");
    CHECK_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, keys, NULL, 1, out), "key_lens is NULL");
    CHECK(out[0] == 77 && out[1] == 77);
    CHECK(kvprim_prefix_pages(35, 16) == 32 && kvprim_prefix_pages(35, 0) == 35 && kvprim_prefix_pages(15, 16) == 0);
}

_Static_assert(KVPRIM_PREFIX_NONE == SIZE_MAX && KVPRIM_PREFIX_ERROR == SIZE_MAX - 1, "bindings know these values");

/* "Key 0 matches best", "no key matches" and "an argument is wrong" are three answers. */
static void test_prefix_many_answers(void)
{
    const int32_t query[] = {1, 2, 3}, same[] = {1, 2, 4}, other[] = {7, 2, 3}, less[] = {1, 5};
    const int32_t *keys[] = {same, other, less, NULL};
    size_t lens[] = {3, 3, 2, 0}, out[4] = {77, 77, 77, 77};
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_prefix_many_i32(query, 3, keys, lens, 4, out) == 0);
    CHECK(out[0] == 2 && out[1] == 0 && out[2] == 1 && out[3] == 0);
    CHECK(kvprim_prefix_many_i32(query, 3, keys + 1, lens + 1, 3, NULL) == 1);

    out[0] = out[1] = 77; /* no match: lengths are written, the error text is not */
    CHECK(kvprim_prefix_many_i32(query + 1, 2, keys, lens, 2, out) == KVPRIM_PREFIX_NONE && out[0] == 0 && out[1] == 0);
    out[0] = 77;
    CHECK(kvprim_prefix_many_i32(query, 3, keys + 3, lens + 3, 1, out) == KVPRIM_PREFIX_NONE && out[0] == 0);
    out[0] = 77;
    CHECK(kvprim_prefix_many_i32(NULL, 0, keys, lens, 1, out) == KVPRIM_PREFIX_NONE && out[0] == 0);
    CHECK(kvprim_prefix_many_i32(query, 3, NULL, NULL, 0, NULL) == KVPRIM_PREFIX_NONE);
    CHECK(kvprim_prefix_many_i32(NULL, 3, NULL, NULL, 0, NULL) == KVPRIM_PREFIX_NONE);
    CHECK(strcmp(kvprim_last_error(), "-") == 0);

    out[0] = 77; /* an error: nothing is written, also for the keys before the wrong one */
    lens[3] = 1;
    CHECK_PREFIX_ERROR(kvprim_prefix_many_i32(query, 3, keys, lens, 4, out), "keys[3] is NULL and its length is 1");
    CHECK(out[0] == 77);
}

static void test_prefix_many(void)
{
    enum { n_keys = 200 };
    static int32_t query[longest], memory[n_keys][longest];
    const int32_t *keys[n_keys];
    size_t lens[n_keys], out[n_keys];
    for (int round = 0; round < 300; round++) {
        const size_t query_len = below(longest), span = round % 3 == 0 ? longest : 24;
        size_t best = KVPRIM_PREFIX_NONE, best_len = 0;
        fill(query, sizeof query);
        for (size_t k = 0; k < n_keys; k++) {
            memcpy(memory[k], query, sizeof query);
            memory[k][below(span)] ^= 1;
            const size_t start = below(4);
            memmove(memory[k] + start, memory[k], sizeof query - 4 * start);
            keys[k] = memory[k] + start;
            lens[k] = below(longest - start);
            const size_t len = naive(query, query_len, keys[k], lens[k], 4);
            if (len > best_len) {
                best_len = len;
                best = k;
            }
        }
        CHECK(kvprim_prefix_many_i32(query, query_len, keys, lens, n_keys, out) == best);
        CHECK(kvprim_prefix_many_i32(query, query_len, keys, lens, n_keys, NULL) == best);
        for (size_t k = 0; k < n_keys; k++)
            if (out[k] != naive(query, query_len, keys[k], lens[k], 4))
                fail("key %zu of length %zu, query %zu: %zu", k, lens[k], query_len, out[k]);
    }
}

#if !defined(_WIN32)
/* Returns `pages` readable pages between two that are not readable. */
static char *guarded(size_t pages)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *const p = mmap(NULL, (pages + 2) * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, pages * page, PROT_READ | PROT_WRITE) != 0) {
        perror("mmap");
        exit(1);
    }
    return p + page;
}

/* Nothing before or after an array is read. */
static void test_prefix_guard_pages(void)
{
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    char *const a = guarded(1), *const b = guarded(1);
    size_t out;
    memset(a, 7, bytes);
    memset(b, 7, bytes);
    /* a ends `gap` bytes before the end of its page, or starts `gap` bytes after its start; b ends with its page */
    for (size_t n = 0; n <= 700; n += n < longest ? 1 : 13)
        for (size_t gap = 0; gap <= 68; gap += 4) {
            const char *const a_end = a + bytes - gap - 4 * n, *const b_end = b + bytes - 4 * n;
            const int32_t *const key = (const int32_t *)(const void *)b_end;
            check_prefix(a_end, n, b_end, n, 4);
            check_prefix(a + gap, n, b_end, n, 4);
            check_prefix(b, n, a_end, n, 4);
            check_prefix(a_end, n, b, bytes / 4, 4);
            if (8 * n <= bytes)
                check_prefix(a + bytes - 8 * n, n, b, n, 8);
            CHECK(kvprim_prefix_many_i32((const int32_t *)(const void *)a_end, n, &key, &n, 1, &out) ==
                      (n ? 0 : KVPRIM_PREFIX_NONE) &&
                  out == n);
        }
    munmap(a - bytes, 3 * bytes);
    munmap(b - bytes, 3 * bytes);
}

static void *dispatch_thread(void *result)
{
    static const int32_t a[40] = {0};
    *(size_t *)result = kvprim_prefix_i32(a, 40, a, 33) + (strlen(kvprim_isa()) > 0);
    return NULL;
}

/* Must run first, so that the threads race to pick the variant. */
static void test_threads(void)
{
    enum { n = 8 };
    pthread_t thread[n];
    size_t result[n] = {0};
    for (int i = 0; i < n; i++)
        if (pthread_create(&thread[i], NULL, dispatch_thread, &result[i]) != 0)
            exit(1);
    for (int i = 0; i < n; i++) {
        pthread_join(thread[i], NULL);
        CHECK(result[i] == 34);
    }
}
#endif

#include "bad_descriptors.h"
#include "test_slots.h"

/* ---- rows: the contract, byte by byte ---- */

/* Finds byte `byte` of row `row` of a table with every field given. */
static unsigned char *at(const kvprim_table *t, int64_t row_bytes, int64_t row, int64_t byte)
{
    const int64_t heads = t->heads > 1 ? t->heads : 1, piece = row_bytes / heads;
    int64_t offset =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    offset += byte / piece * t->head_stride + byte % piece;
    return (unsigned char *)t->data + offset;
}

/* Copies a row, or writes zeros if there is no row to copy. */
static void copy_row(const kvprim_table *to, int64_t to_row, const kvprim_table *from, int64_t from_row,
                     int64_t row_bytes)
{
    const int64_t to_piece = row_bytes / (to->heads > 1 ? to->heads : 1);
    const int64_t from_piece = from ? row_bytes / (from->heads > 1 ? from->heads : 1) : row_bytes;
    for (int64_t b = 0, n; b < row_bytes; b += n) {
        const int64_t to_rest = to_piece - b % to_piece, from_rest = from_piece - b % from_piece;
        n = to_rest < from_rest ? to_rest : from_rest;
        if (from)
            memcpy(at(to, row_bytes, to_row, b), at(from, row_bytes, from_row, b), (size_t)n);
        else
            memset(at(to, row_bytes, to_row, b), 0, (size_t)n);
    }
}

/* A table, its memory with guard bytes on both sides, and a copy for the reference to work on. */
typedef struct memory {
    kvprim_table t;
    unsigned char *bytes, *reference;
    size_t size;
} memory;

enum { margin = 256 };

/* Makes a table of `span` random bytes whose data lies `align` bytes past a 64-byte line. */
static memory make(kvprim_table t, size_t span, size_t align)
{
    memory m = {t, NULL, NULL, span + 2 * margin + 128};
    m.bytes = allocate(m.size);
    m.reference = allocate(m.size);
    fill(m.bytes, m.size);
    memcpy(m.reference, m.bytes, m.size);
    m.t.data = m.bytes + margin + (64 - (uintptr_t)m.bytes % 64) % 64 + align;
    return m;
}

static void release(memory *m)
{
    free(m->bytes);
    free(m->reference);
}

/* The same table in the reference's copy. */
static kvprim_table on_reference(const memory *m)
{
    kvprim_table t = m->t;
    t.data = m->reference + ((unsigned char *)m->t.data - m->bytes);
    return t;
}

static void check_same(const memory *m, const char *what)
{
    size_t i = 0;
    if (memcmp(m->bytes, m->reference, m->size) == 0)
        return;
    while (m->bytes[i] == m->reference[i])
        i++;
    const long long offset = (long long)i - ((unsigned char *)m->t.data - m->bytes);
    fail("%s: byte %lld of the table: got %02x, expected %02x", what, offset, m->bytes[i], m->reference[i]);
}

/* The layout of a test's table: padded or not, in pages or not, head-major or not. */
typedef struct layout {
    const char *name;
    int64_t pad, page_rows, page_pad;
    int32_t heads;
} layout;

static const layout layouts[] = {
    {"packed", 0, 0, 0, 0},     {"strided", 24, 0, 0, 0},    {"paged", 0, 16, 0, 0},      {"padded pages", 7, 5, 33, 0},
    {"HND pages", 0, 16, 0, 4}, {"HND padded", 3, 4, 11, 2}, {"HND unpaged", 0, 0, 0, 4}, {"pages apart", 0, 16, 2, 0}};
enum { n_layouts = (int)LENGTH(layouts) };

/* Returns the layout's table with every field filled in, and how many bytes it spans. */
static kvprim_table lay_out(const layout *l, int64_t rows, int64_t row_bytes, size_t *span)
{
    kvprim_table t = paged_table(NULL, rows, l->page_rows, 0);
    t.heads = row_bytes % 4 == 0 ? l->heads : 0;
    const int64_t heads = t.heads > 1 ? t.heads : 1, in_page = t.page_rows ? t.page_rows : rows;
    t.stride = row_bytes / heads + l->pad;
    t.head_stride = heads > 1 ? in_page * t.stride : 0;
    t.page_stride = t.page_rows ? heads * in_page * t.stride + l->page_pad : 0;
    *span = (size_t)(t.page_rows ? (rows + in_page - 1) / in_page * t.page_stride : heads * in_page * t.stride);
    return t;
}

/* The index rule as the contract states it: returns the row, -1 for padding, or -2 past the end. */
static int64_t ruled(int64_t value, int64_t base, int64_t rows)
{
    if (value < base)
        return -1;
    if (base >= 0 ? value - base >= rows : value >= rows + base)
        return -2;
    return value - base;
}

/* Indices that are `stride` elements apart, with noise between them. */
typedef struct index_list {
    kvprim_index_type type;
    int64_t base, stride;
    union {
        int32_t i32[200];
        int64_t i64[200];
    } u;
} index_list;

/* Returns the row of index i, or what `ruled` returns. */
static int64_t row_of(const index_list *x, int64_t i, int64_t rows)
{
    return ruled(x->type == KVPRIM_I64 ? x->u.i64[i * x->stride] : x->u.i32[i * x->stride], x->base, rows);
}

/* Makes `count` indices: rows, each at most once if they are `distinct`; padding; some past the end, some far out.
   Every second list has what the fast paths want: int32, one after another, mostly from 0 on. */
static void make_index(index_list *x, int64_t count, int64_t rows, int distinct)
{
    static const int64_t bases64[] = {0, 1, -1, 1000, -7, INT64_MIN, INT64_MAX - 10, (int64_t)1 << 40};
    static const int64_t bases32[] = {0, 1, -1, 1000, -7, INT32_MIN, INT32_MAX - 10, 1 << 20};
    static const int64_t wild64[] = {INT64_MIN, INT64_MAX, -1, INT64_MAX - 1, (int64_t)1 << 40};
    static const int64_t wild32[] = {INT32_MIN, INT32_MAX, -1, INT32_MAX - 1, 1 << 30};
    const int plain = (int)below(2), wide = !plain && below(2);
    x->type = wide ? KVPRIM_I64 : KVPRIM_I32;
    x->base = (wide ? bases64 : bases32)[plain && below(2) ? 0 : below(8)];
    x->stride = plain ? 1 : 1 + (int64_t)below(5);
    fill(&x->u, sizeof x->u);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t kind = below(8);
        const uint64_t base = (uint64_t)x->base,
                       row = distinct ? (uint64_t)((i * 17 + 3) % rows) : below((uint64_t)rows);
        int64_t value = (int64_t)(base + row); /* what wraps is below the base, so padding */
        if (kind == 0)
            value = (wide ? wild64 : wild32)[below(5)];
        else if (kind == 1)
            value = (int64_t)(base + (uint64_t)rows + below(3));
        else if (kind == 2 && x->base != INT64_MIN && x->base != INT32_MIN)
            value = x->base - 1;
        if (distinct && ruled(value, x->base, rows) >= 0) /* a wild one, too */
            value = (int64_t)(base + row);
        if (wide)
            x->u.i64[i * x->stride] = value;
        else
            x->u.i32[i * x->stride] = (int32_t)value;
    }
}

static const int64_t row_sizes[] = {1,  2,  3,   4,   7,   8,   12,  15,  16,  17,   31,   32,
                                    48, 64, 100, 128, 132, 255, 256, 257, 576, 1000, 1152, 2051};
enum { n_row_sizes = (int)LENGTH(row_sizes) };

/* One side of a move. The caller sets the first line; `pointers`: layers lie in an array, the last one first; 2: the
   executing side reads it. */
typedef struct side {
    size_t layout, align;
    int indexed, pointers;
    index_list index;
    memory m;
    int64_t rows, step;
    void *layers[5];
} side;

enum { move_count = 23 };

static void make_side(side *s, int64_t row_bytes, int32_t layers, int64_t rows, int distinct)
{
    size_t span;
    s->rows = s->indexed ? rows : move_count + 3;
    const kvprim_table t = lay_out(&layouts[s->layout], s->rows, row_bytes, &span);
    s->step = (int64_t)span + 5;
    s->m = make(t, (size_t)(layers * s->step), s->align);
    for (int32_t l = 0; l < layers; l++)
        s->layers[l] = (char *)s->m.t.data + (layers - 1 - l) * s->step;
    make_index(&s->index, move_count, s->rows, distinct);
}

/* Returns the table of a layer. */
static kvprim_table layer_of(const side *s, kvprim_table t, int32_t layer, int32_t layers)
{
    t.data = (char *)t.data + (s->pointers ? layers - 1 - layer : layer) * s->step;
    return t;
}

/* Moves rows in the reference as the contract says, and returns how many indices are rejected. */
static uint32_t expect_move(side *dst, const side *src, int64_t row_bytes, int32_t layers, int zero)
{
    uint32_t rejected = 0;
    for (int32_t l = 0; l < layers; l++) {
        const kvprim_table to = layer_of(dst, on_reference(&dst->m), l, layers);
        const kvprim_table from = layer_of(src, src->m.t, l, layers);
        for (int64_t i = 0; i < move_count; i++) {
            const int64_t dst_row = dst->indexed ? row_of(&dst->index, i, dst->rows) : i;
            const int64_t src_row = src->indexed ? row_of(&src->index, i, src->rows) : i;
            rejected += l == 0 && (dst_row == -2 || src_row == -2);
            if (dst_row >= 0 && (src_row >= 0 || zero))
                copy_row(&to, dst_row, src_row >= 0 ? &from : NULL, src_row, row_bytes);
        }
    }
    return rejected;
}

static kvprim_status gather_sides(const side *dst, const side *src, int64_t row_bytes, uint32_t *rejected, int keep)
{
    const index_list *const x = &src->index;
    kvprim_gather_desc d = gather_of(dst->m.t, src->m.t, row_bytes, x->u.i32, move_count);
    d.index_type = x->type, d.index_base = x->base, d.index_stride = x->stride, d.rejected = rejected;
    d.keep_padding = keep;
    return kvprim_gather(&d);
}

static kvprim_status store_sides(const side *dst, const side *src, int64_t row_bytes, uint32_t *rejected)
{
    const index_list *const x = &dst->index;
    kvprim_store_desc d = store_of(dst->m.t, src->m.t, row_bytes, x->u.i32, move_count);
    d.slot_type = x->type, d.slot_base = x->base, d.slot_stride = x->stride, d.rejected = rejected;
    return kvprim_store(&d);
}

/* layers 0: one, without saying so. */
static kvprim_status transfer_sides(const side *dst, const side *src, int64_t row_bytes, int32_t layers,
                                    uint32_t *rejected)
{
    const index_list *const to = &dst->index, *const from = &src->index;
    kvprim_transfer_desc d = transfer_of(dst->m.t, src->m.t, row_bytes, move_count);
    d.layers = layers, d.rejected = rejected;
    d.dst_layer_stride = dst->pointers ? 0 : dst->step, d.src_layer_stride = src->pointers ? 0 : src->step;
    *(dst->pointers == 2 ? &d.dst_device_layers : &d.dst_layers) = dst->pointers ? dst->layers : NULL;
    *(src->pointers == 2 ? &d.src_device_layers : &d.src_layers) = src->pointers ? src->layers : NULL;
    d.host_index = (int32_t)below(2); /* the CPU's indices are always the host's */
    d.dst_index = dst->indexed ? &to->u : NULL, d.src_index = src->indexed ? &from->u : NULL;
    d.dst_index_base = to->base, d.dst_index_stride = to->stride;
    d.src_index_base = from->base, d.src_index_stride = from->stride;
    const int said = (int)below(3); /* both types; one for both, and src's if it is another one; or dst's */
    const kvprim_index_type unset = (kvprim_index_type)0;
    d.index_type = said == 0 ? unset : said == 1 ? to->type : from->type;
    d.dst_index_type = to->type == d.index_type ? unset : to->type;
    d.src_index_type = from->type == d.index_type ? unset : from->type;
    return kvprim_transfer(&d);
}

/* One piece for all heads of a source: rows of three pieces, each the same as the source's only one. */
static void test_shared_heads(void)
{
    static unsigned char src[8][20], got[8][64], want[8][64];
    const int32_t index[] = {3, -1, 7, 0, 9, 1};
    enum { n = LENGTH(index) };
    for (int64_t piece = 1; piece <= 20; piece++)
        for (int operation = 0; operation < 4; operation++) {
            const int32_t paged = operation == 3 ? 2 : 0;
            const kvprim_table dst = {.data = got, .rows = 8, .stride = 64};
            const kvprim_table from = {.data = src,
                                       .rows = 8,
                                       .stride = 20,
                                       .heads = 3,
                                       .page_rows = paged,
                                       .head_stride = KVPRIM_HEADS_SHARED};
            const kvprim_gather_desc g = gather_of(dst, from, 3 * piece, index, n);
            kvprim_gather_desc resolved;
            kvprim_store_desc s = store_of(dst, from, 3 * piece, index, n);
            kvprim_transfer_desc t = transfer_of(dst, from, 3 * piece, 8);
            fill(src, sizeof src);
            memset(got, 0x5a, sizeof got), memset(want, 0x5a, sizeof want);
            for (int i = 0; i < (operation == 2 ? 8 : n); i++)
                for (int64_t b = 0; b < 3 * piece; b++) {
                    const int row = operation == 2 ? i : index[i], inside = row >= 0 && row < 8;
                    if (operation == 1 && inside)
                        want[row][b] = src[i][b % piece];
                    else if (operation != 1)
                        want[i][b] = inside ? src[row][b % piece] : 0;
                }
            CHECK(kvprim_store_check(&s, &s) == KVPRIM_OK && kvprim_transfer_check(&t, &t) == KVPRIM_OK);
            if (operation == 3)
                CHECK(kvprim_gather_check(&g, &resolved) == KVPRIM_OK &&
                      kvprim_gather_check(&resolved, &resolved) == KVPRIM_OK && kvprim_gather(&resolved) == KVPRIM_OK);
            else
                CHECK((operation == 0   ? kvprim_gather(&g)
                       : operation == 1 ? kvprim_store(&s)
                                        : kvprim_transfer(&t)) == KVPRIM_OK);
            CHECK(memcmp(got, want, sizeof want) == 0);
        }
    kvprim_table shared = {.data = got, .rows = 8, .stride = 64, .heads = 2, .head_stride = KVPRIM_HEADS_SHARED};
    kvprim_transfer_desc t = transfer_of(shared, table_of(src, 8), 8, 8);
    kvprim_transfer_desc from_shared = transfer_of(table_of(src, 8), shared, 8, 8);
    from_shared.src.bytes = -5;
    CHECK_ERROR(kvprim_transfer(&from_shared), KVPRIM_ERROR_SIZE, "src.bytes is -5, less than 0");
    CHECK_ERROR(kvprim_transfer(&t), KVPRIM_ERROR_SIZE, "dst.head_stride is -1, less than 0");
    t = transfer_of(table_of(src, 8), shared, 8, 8);
    t.src.heads = 1;
    CHECK_ERROR(kvprim_transfer(&t), KVPRIM_ERROR_SIZE, "src.head_stride is -1, less than 0");
    t.dst = t.src = shared, t.same_cache = 1;
    CHECK_ERROR(kvprim_transfer(&t), KVPRIM_ERROR_SIZE, "head_stride is -1, less than 0");
}

enum { gathers, stores, transfers };

static void one_move(int operation, int64_t row_bytes, int32_t layers, side *dst, side *src)
{
    const int32_t n = layers ? layers : 1;
    uint32_t rejected = 5;
    make_side(dst, row_bytes, n, 31, 1);
    make_side(src, row_bytes, n, 29, 0);
    const int keep = operation == gathers && below(4) == 0;
    const uint32_t past = expect_move(dst, src, row_bytes, n, operation == gathers && !keep);
    const kvprim_status status = operation == gathers  ? gather_sides(dst, src, row_bytes, &rejected, keep)
                                 : operation == stores ? store_sides(dst, src, row_bytes, &rejected)
                                                       : transfer_sides(dst, src, row_bytes, layers, &rejected);
    char what[200];
    snprintf(what, sizeof what, "operation %d, %lld bytes, %s <- %s, alignments %zu %zu, bases %lld %lld, %d layers",
             operation, (long long)row_bytes, layouts[dst->layout].name, layouts[src->layout].name, dst->align,
             src->align, (long long)dst->index.base, (long long)src->index.base, (int)layers);
    if (status != KVPRIM_OK || rejected != 5 + past)
        fail("%s: %u rejected, expected %u (%s)", what, rejected, 5 + past, kvprim_last_error());
    check_same(&dst->m, what);
    check_same(&src->m, "the source");
    release(&dst->m);
    release(&src->m);
}

static void test_gather(void)
{
    for (size_t n = 0; n < n_row_sizes * n_layouts * n_layouts + 256; n++) {
        const size_t s = n / (n_layouts * n_layouts), l = n % (n_layouts * n_layouts), align = n % 256;
        const int all = s < n_row_sizes; /* sizes and layouts; the rest is alignments of 100 bytes */
        side dst = {.layout = all ? l % n_layouts : 0, .align = (all ? l * 5 + s : align) % 16};
        side src = {.layout = all ? l / n_layouts : 1, .align = all ? (l * 3 + 2 * s) % 16 : align / 16, .indexed = 1};
        one_move(gathers, all ? row_sizes[s] : 100, 0, &dst, &src);
    }
}

static void test_transfer(void)
{
    for (size_t s = 0; s < n_row_sizes; s += 2)
        for (size_t l = 0; l < n_layouts * n_layouts; l++)
            for (int32_t layers = 0; layers <= 5; layers += 1 + (int32_t)(l % 3)) {
                side dst = {.layout = l % n_layouts, .align = 3, .indexed = l & 1, .pointers = (int)((l + s) % 3)};
                side src = {.layout = l / n_layouts, .align = 8, .indexed = l >> 1 & 1, .pointers = (int)(l / 3 % 3)};
                one_move(transfers, row_sizes[s], layers, &dst, &src);
            }
}

/* Packed rows, so that most of the work is the index rule. */
static void test_index_rule(void)
{
    for (int round = 0; round < 4000; round++) {
        const int operation = round % 5 < 2 ? round % 5 : transfers;
        side dst = {.indexed = operation == stores || round % 5 == 2 || round % 5 == 4};
        side src = {.indexed = operation == gathers || round % 5 >= 3};
        one_move(operation, 24, 0, &dst, &src);
    }
}

static void one_store(int64_t k_bytes, int64_t v_bytes, const layout *cache_layout, size_t align, int with_v)
{
    enum { count = move_count, rows = 61 };
    size_t k_span, v_span;
    const kvprim_table k_table = lay_out(cache_layout, rows, k_bytes, &k_span);
    const kvprim_table v_table = lay_out(cache_layout, rows, v_bytes, &v_span);
    memory k_cache = make(k_table, k_span, align), v_cache = make(v_table, v_span, 15 - align);
    const int64_t token = k_bytes + v_bytes + 3; /* a packed tensor: K and V of a token side by side */
    memory input = make(strided_table(NULL, count, token), (size_t)(count * token), align / 2);
    kvprim_table v_input = input.t;
    v_input.data = (char *)input.t.data + k_bytes;
    index_list slot;
    make_index(&slot, count, rows, 1);
    uint32_t rejected = 0, want_rejected = 0;
    kvprim_store_desc d = store_of(k_cache.t, input.t, k_bytes, slot.u.i32, count);
    d.slot_type = slot.type, d.slot_base = slot.base, d.slot_stride = slot.stride, d.rejected = &rejected;
    if (with_v)
        add_v(&d, v_cache.t, v_input, v_bytes);
    if (kvprim_store(&d) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    const kvprim_table k_reference = on_reference(&k_cache), v_reference = on_reference(&v_cache);
    for (int i = 0; i < count; i++) {
        const int64_t row = row_of(&slot, i, rows);
        want_rejected += row == -2;
        if (row >= 0)
            copy_row(&k_reference, row, &input.t, i, k_bytes);
        if (row >= 0 && with_v)
            copy_row(&v_reference, row, &v_input, i, v_bytes);
    }
    check_same(&k_cache, "k_cache");
    check_same(&v_cache, "v_cache");
    check_same(&input, "the input");
    CHECK(rejected == want_rejected);
    release(&k_cache);
    release(&v_cache);
    release(&input);
}

static void test_store(void)
{
    for (int s = 0; s < n_row_sizes; s++)
        for (int l = 0; l < n_layouts; l++)
            for (size_t align = (size_t)(s + l) % every; align < 16; align += every)
                one_store(row_sizes[s], row_sizes[(s + (int)align) % n_row_sizes], &layouts[l], align,
                          (l + s) % 4 != 0);
}

/* K and V interleave in one cache: [page][K or V][row in page]. */
static void test_store_interleaved(void)
{
    enum { page_rows = 4, row_bytes = 24, rows = 20, count = 3 };
    static unsigned char cache[rows * 2 * row_bytes], want[sizeof cache];
    unsigned char input[2][count * row_bytes];
    const int32_t slot[count] = {19, 0, 6};
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    fill(input, sizeof input);
    const int64_t page_stride = 2 * page_rows * row_bytes;
    kvprim_store_desc d =
        store_of(paged_table(cache, rows, page_rows, page_stride), table_of(input[0], count), row_bytes, slot, count);
    add_v(&d, paged_table(cache + page_rows * row_bytes, rows, page_rows, page_stride), table_of(input[1], count),
          row_bytes);
    CHECK(kvprim_store(&d) == KVPRIM_OK);
    for (int i = 0; i < count; i++)
        for (int kv = 0; kv < 2; kv++)
            memcpy(want + ((slot[i] / page_rows * 2 + kv) * page_rows + slot[i] % page_rows) * row_bytes,
                   input[kv] + i * row_bytes, row_bytes);
    CHECK(memcmp(cache, want, sizeof cache) == 0);
}

/* Zero fields stand for their defaults, for every layout without padding. */
static void test_defaults(void)
{
    for (int l = 0; l < n_layouts; l++) {
        if (layouts[l].pad || layouts[l].page_pad)
            continue;
        size_t span;
        const kvprim_table want = lay_out(&layouts[l], 32, 64, &span);
        kvprim_table zeros = paged_table(NULL, 32, layouts[l].page_rows, 0);
        zeros.heads = layouts[l].heads;
        zeros.head_stride = want.head_stride; /* has no default */
        const kvprim_table got = kvprim_table_resolve(zeros, 64);
        CHECK(got.stride == want.stride && got.page_stride == want.page_stride && got.head_stride == want.head_stride);
        CHECK(got.heads == (want.heads ? want.heads : 1));
    }
    kvprim_table inside = strided_table(NULL, 32, 64); /* heads inside the row */
    inside.page_rows = 8;
    inside.heads = 4;
    inside.head_stride = 16;
    CHECK(kvprim_table_resolve(inside, 64).page_stride == 8 * 64);
    inside.stride = 0;
    CHECK(kvprim_table_resolve(inside, 64).stride == 64);
}

/* ---- unpack ---- */

/* The descriptor itself may lie in dst. */
static void test_unpack_over_descriptor(void)
{
    unsigned char src[2 * sizeof(kvprim_unpack_desc)];
    union {
        kvprim_unpack_desc d;
        unsigned char bytes[sizeof src];
    } dst;
    const size_t half = sizeof(kvprim_unpack_desc);
    const kvprim_fragment f[2] = {{half, 0, half}, {0, half, half}};
    fill(src, sizeof src);
    dst.d = (kvprim_unpack_desc){
        .src = src, .src_bytes = sizeof src, .dst = &dst, .dst_bytes = sizeof dst, .fragments = f, .count = 2};
    CHECK(kvprim_unpack(&dst.d) == KVPRIM_OK);
    CHECK(memcmp(dst.bytes, src + half, half) == 0 && memcmp(dst.bytes + half, src, half) == 0);
}

#include "test_copies.h"
#include "test_meta.h"
#include "test_fetch.h"

/* ---- bad descriptors ---- */

/* Compares the products of the size checks with long multiplication: around powers of two, and where the product is
   about the largest. */
static void test_products(void)
{
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 65; j++)
            for (uint64_t n = 0; n < 25; n++) {
                const uint64_t a = ((uint64_t)1 << i) + n / 5 - 2;
                const uint64_t b = (j < 64 ? (uint64_t)1 << j : a ? kvpi_too_large / a : 0) + n % 5 - 2;
                const uint64_t low = (a & UINT32_MAX) * (b & UINT32_MAX), one = (a >> 32) * (b & UINT32_MAX),
                               other = (a & UINT32_MAX) * (b >> 32);
                const uint64_t middle = (low >> 32) + (one & UINT32_MAX) + (other & UINT32_MAX);
                const uint64_t high = (a >> 32) * (b >> 32) + (one >> 32) + (other >> 32) + (middle >> 32);
                const uint64_t product = middle << 32 | (low & UINT32_MAX);
                CHECK(kvpi_mul(a, b) == (high || product > kvpi_too_large ? kvpi_too_large : product));
            }
}

/* `check`, and for moves `moves`, call the other functions. */
#define EXPECTED(operation, check, moves)                                                                              \
    static void expect_##operation(int line, const kvprim_##operation##_desc *d, kvprim_status status,                 \
                                   const char *words)                                                                  \
    {                                                                                                                  \
        kvprim_status (*const same)(const kvprim_##operation##_desc *) = kvprim_##operation;                           \
        (void)kvprim_fail(KVPRIM_OK, "-");                                                                             \
        check_error(line, same(d), status, words);                                                                     \
        (void)kvprim_fail(KVPRIM_OK, "-");                                                                             \
        check_error(line, check, status, words);                                                                       \
        moves                                                                                                          \
    }
#define EXPECTED_MOVES(operation)                                                                                      \
    EXPECTED(operation, kvprim_##operation##_check(d, NULL), kvprim_move m[2]; (void)kvprim_fail(KVPRIM_OK, "-");      \
             check_error(line, kvprim_##operation##_moves(d, m), status, words);)
EXPECTED_MOVES(gather)
EXPECTED_MOVES(store)
EXPECTED_MOVES(transfer)
EXPECTED(slots, kvprim_slots_check(d, NULL), )
EXPECTED(unpack, kvprim_unpack_check(d), )
EXPECTED(unpack_meta, kvprim_unpack_meta_check(d), )
EXPECTED(copy, kvprim_copy_check(d), )
EXPECTED(fetch, kvprim_fetch_check(d, NULL, NULL), )

static void run_bad_descriptors(void)
{
    for (size_t i = 0; i < n_bad_lists; i++) {
        char name[100];
        snprintf(name, sizeof name, "bad descriptors: %s", bad_lists[i].name);
        run(name, bad_lists[i].run);
    }
}

/* Empty tables: every index is past them, and they have no layout to get wrong. */
static void test_empty_tables(void)
{
    static unsigned char rows[2][512];
    static const int32_t index[4] = {0, 1, 2, 3};
    const kvprim_table none = with_heads(table_of(NULL, 0), 4, 32), some = table_of(rows[1], 4);
    uint32_t rejected = 0;
    kvprim_gather_desc gather = gather_of(table_of(rows[0], 4), none, 128, index, 4);
    kvprim_store_desc store = store_of(none, some, 128, index, 4);
    fill(rows, sizeof rows);
    gather.rejected = store.rejected = &rejected;
    CHECK(kvprim_gather(&gather) == KVPRIM_OK && rejected == 4 && rows[0][0] == 0 && rows[0][511] == 0);
    add_v(&store, none, some, 128);
    CHECK(kvprim_store(&store) == KVPRIM_OK && rejected == 8);
}

/* Layers by pointers alone, each in memory of its own; and layers of both sides in turn: [layer][src or dst][row]. */
static void test_places_of_layers(void)
{
    static unsigned char dst[4096], src[4096];
    static const int32_t index[2] = {1, 3};
    void *const layers[2] = {dst, dst + 2048};
    kvprim_transfer_desc d = transfer_of(table_of(NULL, 8), table_of(src, 8), 64, 2);
    d.layers = 2, d.dst_index = d.src_index = index, d.dst_layers = layers;
    fill(src, sizeof src);
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 2048 + 192, src + 512 + 192, 64) == 0);
    d.dst.bytes = 512;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    fill(dst, sizeof dst);
    d = transfer_of(table_of(dst, 8), table_of(dst + 512, 8), 64, 2);
    d.layers = 2, d.dst_index = d.src_index = index, d.dst_layer_stride = d.src_layer_stride = 1024;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 1024 + 192, dst + 1536 + 192, 64) == 0);
}

/* Copies pages inside one cache whose layers have pointers, the second time those that the executing side reads. One
   source is copied twice, one index is padding. */
static void test_same_cache(void)
{
    enum { rows = 12, row_bytes = 48, layer_bytes = rows * row_bytes, layers = 4 };
    static unsigned char cache[layers * layer_bytes], want[sizeof cache];
    static const int32_t to[] = {7, 2, 11, -1, 3}, from[] = {0, 0, 5, 4, 12};
    void *pointers[layers];
    for (int device = 0; device < 2; device++) {
        uint32_t rejected = 0;
        fill(cache, sizeof cache);
        memcpy(want, cache, sizeof cache);
        for (int l = 0; l < layers; l++) {
            pointers[l] = cache + (layers - 1 - l) * layer_bytes;
            for (int i = 0; i < 3; i++)
                memcpy(want + l * layer_bytes + to[i] * row_bytes, cache + l * layer_bytes + from[i] * row_bytes,
                       row_bytes);
        }
        const kvprim_table table = paged_table(NULL, rows, 4, 0);
        kvprim_transfer_desc d = transfer_of(table, table, row_bytes, 5);
        *(device ? &d.dst_device_layers : &d.dst_layers) = pointers;
        *(device ? &d.src_device_layers : &d.src_layers) = pointers;
        d.layers = layers, d.dst_index = to, d.src_index = from;
        d.rejected = &rejected, d.same_cache = 1;
        CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(cache, want, sizeof cache) == 0 && rejected == 1);
    }
}

/* Arrays of layers that the side that executes reads: when it does, and nobody else. */
static void test_device_layers(void)
{
    enum { rows = 4, row_bytes = 16 };
    unsigned char to[2][rows * row_bytes], from[2][rows * row_bytes];
    void *dst[2] = {to[0], to[1]}, *src[2] = {from[0], from[1]};
    kvprim_transfer_desc resolved, d = transfer_of(table_of(NULL, rows), table_of(NULL, rows), row_bytes, rows);
    kvprim_move m;
    d.layers = 2, d.dst_device_layers = dst, d.src_device_layers = src;
    d.dst.bytes = sizeof to[0];   /* of the memory at each pointer */
    d.dst.data = d.src.data = &d; /* ignored */
    fill(from, sizeof from);
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && kvprim_transfer_check(&resolved, NULL) == KVPRIM_OK);
    CHECK(kvprim_transfer_moves(&d, &m) == KVPRIM_OK && !kvprim_side_layer(&m.dst, 1));
    src[0] = from[1], src[1] = from[0];
    CHECK(kvprim_cpu_move(&m, 1) == KVPRIM_OK);
    CHECK(memcmp(to[0], from[1], sizeof to[0]) == 0 && memcmp(to[1], from[0], sizeof to[1]) == 0);
    d.layers = 1, d.src_device_layers = src + 1, d.dst_device_layers = NULL, d.dst.data = to[0];
    d.src.bytes = sizeof from[0];
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(to[0], from[0], sizeof to[0]) == 0);
    d.src.bytes = 0, d.src.rows = (int64_t)1 << 8 * (sizeof(void *) - 2); /* nobody knows where they lie */
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
}

#include "test_convert.h"
#include "test_keys.h"

/* ---- what a table says its memory has ---- */

/* Returns the bytes from the table's start to the end of the row that ends last. */
static int64_t reach_of(const kvprim_table *t, int64_t row_bytes)
{
    int64_t reach = 0;
    for (int64_t row = 0; row < t->rows; row++)
        for (int64_t b = 0; b < row_bytes; b++) {
            const int64_t end = at(t, row_bytes, row, b) - (unsigned char *)t->data + 1;
            reach = end > reach ? end : reach;
        }
    return reach;
}

enum { bytes_rows = 21, bytes_of_row = 48 };

/* A table may claim exactly the bytes that it reaches, or more, but not one byte less, even if fewer rows are used. */
static void one_bytes(const kvprim_table *t, unsigned char *other, int64_t step)
{
    static const int32_t index[1] = {0};
    const int64_t reach = reach_of(t, bytes_of_row);
    for (int n = 0; n < 12; n++) {
        const int dst = n % 2, missing = n / 2 % 3 - 1, layers = n < 6 ? 1 : 3;
        kvprim_transfer_desc d = transfer_of(table_of(other, bytes_rows), table_of(other, bytes_rows), bytes_of_row, 1);
        d.layers = layers, d.src_index = index;
        kvprim_table *const told = dst ? &d.dst : &d.src;
        *told = *t;
        told->bytes = reach + (layers - 1) * step - missing;
        *(dst ? &d.dst_layer_stride : &d.src_layer_stride) = step;
        if (missing > 0)
            CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, dst ? "dst.bytes is" : "src.bytes is");
        else
            CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    }
}

static void test_bytes(void)
{
    static _Alignas(16) unsigned char block[32768];
    size_t span;
    kvprim_table t;
    for (int l = 0; l < n_layouts; l++) {
        t = lay_out(&layouts[l], bytes_rows, bytes_of_row, &span);
        t.data = block;
        one_bytes(&t, block + 16384, (int64_t)span + 8);
    }
    t = paged_table(block, bytes_rows, 4, 64); /* the rows of all pages in turn: the first page ends last */
    t.stride = 512;
    one_bytes(&t, block + 16384, 2048);
}

/* What a table reaches and how far apart its layers are, if its last page is not full. */
static void test_partial_pages(void)
{
    static unsigned char to[16384], from[4096];
    kvprim_transfer_desc resolved, d = transfer_of(paged_table(to, 5, 4, 0), table_of(from, 5), 64, 5);
    d.layers = 2;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 2 * 4 * 64);
    d.dst = paged_table(to, 4, 100, 256), d.count = 4; /* less than one page */
    d.dst_layer_stride = 256;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(to, from, 512) == 0);
    /* Pages inside the rows' stride: the first one, which is whole, reaches further than the last row. */
    d.dst = paged_table(to, 5, 4, 1024), d.dst.stride = 4096, d.dst.bytes = 3 * 4096 + 512;
    d.row_bytes = 512, d.layers = 1, d.count = 5, d.dst_layer_stride = 0;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    d.dst.bytes--;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "dst.bytes is 12799");
}

/* ---- many layers ---- */

/* The order of an array of layers. */
enum { most_layers = 65536, layer_bytes = 16, ascending = 0, descending, shuffled, orders };

static void order_layers(void **layers, unsigned char *first, size_t step, int order)
{
    for (size_t l = 0; l < most_layers; l++)
        layers[l] = first + step * (order == descending ? most_layers - 1 - l : l);
    for (size_t l = most_layers; order == shuffled && l > 1; l--) {
        const size_t other = below(l);
        void *const layer = layers[l - 1];
        layers[l - 1] = layers[other];
        layers[other] = layer;
    }
}

static kvprim_transfer_desc many_layers(void *const *dst, void *const *src)
{
    kvprim_transfer_desc d = transfer_of(table_of(NULL, 1), table_of(NULL, 1), layer_bytes, 1);
    d.dst_layers = dst, d.src_layers = src, d.layers = most_layers;
    return d;
}

/* Layers of dst and src alternate. They are accepted whatever the order of both arrays, and one byte of overlap is
   found. */
static void one_layer_order(unsigned char *memory_of, void **dst, void **src, int dst_order, int src_order)
{
    const size_t step = 2 * layer_bytes;
    order_layers(dst, memory_of, step, dst_order);
    order_layers(src, memory_of + layer_bytes, step, src_order);
    const kvprim_transfer_desc d = many_layers(dst, src);
    const clock_t start = clock();
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (seconds >= 1)
        fail("the check of %d layers takes %.1f s, orders %d and %d", most_layers, seconds, dst_order, src_order);
    void *const last = dst[most_layers - 1], *const first = dst[0];
    dst[most_layers - 1] = (unsigned char *)last + 1; /* into the layer of src after it */
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer 65535");
    dst[most_layers - 1] = first;
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "layer of dst");
    dst[most_layers - 1] = last;
    const size_t later = last == memory_of ? 0 : most_layers - 1; /* has a layer of src before it */
    void *const was = dst[later];
    dst[later] = (unsigned char *)was - 1;
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer");
    dst[later] = was;
    void *const some = src[most_layers / 3];
    src[most_layers / 3] = (unsigned char *)first + layer_bytes - 1;
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer 0 (");
    src[most_layers / 3] = some;
}

static void test_many_layers(void)
{
    unsigned char *const memory_of = allocate((size_t)2 * layer_bytes * most_layers + layer_bytes);
    void **const dst = allocate(most_layers * sizeof *dst), **const src = allocate(most_layers * sizeof *src);
    for (int order = 0; order < orders * orders; order += (int)every) /* quick: the same order on both sides */
        one_layer_order(memory_of, dst, src, order % orders, order / orders);
    kvprim_transfer_desc d = many_layers(dst, src);
    fill(memory_of, (size_t)2 * layer_bytes * most_layers);
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    for (size_t l = 0; l < most_layers; l++)
        CHECK(memcmp(dst[l], src[l], layer_bytes) == 0);
    d.src.rows = (int64_t)1 << (sizeof(size_t) == 8 ? 50 : 20); /* each layer is a table of its own, in size too */
    d.src.page_rows = 4;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.layers = most_layers + 1;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "layers is 65537");
    free(memory_of);
    free(dst);
    free(src);
}

/* A layer that is written twice is found wherever its two places in the array are. */
static void test_repeated_layers(void)
{
    enum { n = 5000 };
    static const int places[] = {0, 1, 1023, 1024, 2047, 2048, 2049, 4095, 4096, n - 1};
    static unsigned char dst[n], src[n];
    static void *layers[n];
    kvprim_transfer_desc d = transfer_of(table_of(NULL, 1), table_of(src, 1), 1, 1);
    d.dst_layers = layers, d.layers = n;
    for (int order = 0; order < 2; order++) {
        for (int l = 0; l < n; l++)
            layers[l] = dst + (order ? n - 1 - l : l);
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        for (int k = 0; k < 100; k++) {
            void **const place = &layers[places[k % 10]], *const was = *place;
            *place = layers[places[k / 10]];
            if (k % 10 != k / 10)
                CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "layer of dst");
            *place = was;
        }
    }
}

/* If a side has no rows, the call counts the indices past it, once whatever the layers are, and does nothing else. */
static void test_empty_side(void)
{
    enum { count = 100000 };
    static int32_t index[count];
    static unsigned char byte[most_layers];
    for (int empty = 0; empty < 2; empty++) {
        uint32_t rejected = 7;
        kvprim_transfer_desc d =
            transfer_of(table_of(empty ? byte : NULL, empty), table_of(empty ? NULL : byte, !empty), 1, count);
        d.layers = most_layers, d.dst_index = d.src_index = index, d.rejected = &rejected;
        for (int i = 0; i < count; i++)
            index[i] = i % 3 - 1; /* -1; 0 and 1, which are past one side or both */
        const clock_t start = clock();
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 1);
        CHECK(rejected == 7 + count / 3 * 2);
        d.count = 3;
        d.layers = most_layers + 1;
        CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "layers is 65537");
    }
}

/* ---- K and V in one block of memory ---- */

/* Caches of `rows` rows of k_bytes and v_bytes with the same geometry. V starts `delta` bytes after K. */
typedef struct pair_case {
    const char *name;
    int64_t rows, k_bytes, v_bytes, stride, page_rows, page_stride;
    int32_t heads;
    int64_t head_stride, delta;
    int legal;
} pair_case;

static const pair_case pair_cases[] = {
    {"V one row after K", 4, 64, 64, 64, 0, 0, 0, 0, 64, 0},
    {"V after all rows of K", 4, 64, 64, 64, 0, 0, 0, 0, 256, 1},
    {"V a byte before that", 4, 64, 64, 64, 0, 0, 0, 0, 255, 0},
    {"V one row before K", 4, 64, 64, 64, 0, 0, 0, 0, -64, 0},
    {"V of all rows before K", 4, 64, 64, 64, 0, 0, 0, 0, -256, 1},
    {"K and V of a row in turn", 4, 64, 64, 128, 0, 0, 0, 0, 64, 1},
    {"V and K of a row in turn", 4, 64, 64, 128, 0, 0, 0, 0, -64, 1},
    {"K and V of a row in turn, the last page of one row", 3, 64, 64, 128, 2, 256, 0, 0, 64, 1},
    {"V and K of a row in turn, the last page of one row", 3, 64, 64, 128, 2, 256, 0, 0, -64, 1},
    {"V and K of a row in turn, a byte too near", 4, 64, 64, 128, 0, 0, 0, 0, -63, 0},
    {"V and K of a row in turn, a byte too far", 4, 64, 64, 128, 0, 0, 0, 0, -65, 0},
    {"K and V of a row, a byte too near", 4, 64, 64, 128, 0, 0, 0, 0, 63, 0},
    {"K and V of a row, a byte too far", 4, 64, 64, 128, 0, 0, 0, 0, 65, 0},
    {"V and K of a row, a byte too far", 4, 64, 64, 128, 0, 0, 0, 0, -65, 0},
    {"a wide K, a small V", 4, 192, 128, 320, 0, 0, 0, 0, 192, 1},
    {"a wide K, a small V, a byte too near", 4, 192, 128, 320, 0, 0, 0, 0, 191, 0},
    {"K and V of a page in turn", 11, 32, 32, 32, 4, 256, 0, 0, 128, 1},
    {"V two pages after K", 11, 32, 32, 32, 4, 256, 0, 0, 256, 0},
    {"V after all pages of K, in the second half", 11, 32, 32, 32, 4, 256, 0, 0, 3 * 256 + 128, 1},
    {"V in the gap after the last, partial page", 11, 32, 32, 32, 4, 256, 0, 0, 2 * 256 + 96, 1},
    {"V on the last row of K", 11, 32, 32, 32, 4, 256, 0, 0, 2 * 256 + 64, 0},
    {"K and V of a head in turn", 4, 64, 64, 32, 0, 0, 2, 256, 128, 1},
    {"V's first head on K's second", 4, 64, 64, 32, 0, 0, 2, 256, 256, 0},
    {"K and V of a row's heads in turn", 4, 64, 64, 128, 0, 0, 2, 64, 32, 1},
    {"the same, a byte too near", 4, 64, 64, 128, 0, 0, 2, 64, 31, 0},
    {"V's second row where K's last page has none", 3, 16, 16, 8, 2, 120, 2, 60, 120, 0},
    {"V's first row where K's last page has none", 3, 16, 16, 8, 2, 120, 2, 60, 128, 1},
    {"the same, a byte too near", 3, 16, 16, 8, 2, 120, 2, 60, 127, 0},
    {"K where V's last page has no row", 3, 16, 16, 8, 2, 120, 2, 60, -128, 1},
    {"the same, a byte too near to K", 3, 16, 16, 8, 2, 120, 2, 60, -127, 0},
    {"both last pages on each other's gaps", 5, 8, 8, 32, 4, 8, 0, 0, 40, 1},
    {"pages inside rows, V on K", 5, 8, 8, 32, 4, 8, 0, 0, 32, 0},
    {"heads of pages in turn", 10, 64, 64, 32, 4, 512, 2, 256, 128, 1},
    {"heads of pages, V a row too early", 10, 64, 64, 32, 4, 512, 2, 256, 96, 0},
};

static kvprim_table pair_table(const pair_case *c, unsigned char *data)
{
    kvprim_table t = with_heads(paged_table(data, c->rows, c->page_rows, c->page_stride), c->heads, c->head_stride);
    t.stride = c->stride;
    return t;
}

/* Stores all rows. If that is legal, each row is complete afterwards. */
static void one_pair(const pair_case *c)
{
    enum { most_rows = 16, middle = 2048 };
    static unsigned char cache[2 * middle + 1024], input[2][most_rows * 256];
    int32_t slot[most_rows];
    for (int32_t i = 0; i < most_rows; i++)
        slot[i] = i;
    fill(input, sizeof input);
    kvprim_store_desc d =
        store_of(pair_table(c, cache + middle), table_of(input[0], c->rows), c->k_bytes, slot, c->rows);
    add_v(&d, pair_table(c, cache + middle + c->delta), table_of(input[1], c->rows), c->v_bytes);
    const kvprim_status status = kvprim_store(&d);
    if (status != (c->legal ? KVPRIM_OK : KVPRIM_ERROR_OVERLAP))
        fail("%s: %s (%s)", c->name, kvprim_status_name(status), kvprim_last_error());
    unsigned char row[2][256];
    for (int64_t i = 0; c->legal && i < c->rows; i++) {
        const kvprim_table k_row = table_of(row[0], 1), v_row = table_of(row[1], 1);
        copy_row(&k_row, 0, &d.k_cache, i, c->k_bytes);
        copy_row(&v_row, 0, &d.v_cache, i, c->v_bytes);
        if (memcmp(row[0], input[0] + i * c->k_bytes, (size_t)c->k_bytes) != 0 ||
            memcmp(row[1], input[1] + i * c->v_bytes, (size_t)c->v_bytes) != 0)
            fail("%s: row %lld of K or of V", c->name, (long long)i);
    }
}

/* Whether a row of k overlaps a row of v, by comparing each with each. */
static int pair_meets(const kvprim_table *k, const kvprim_table *v, int64_t piece)
{
    for (int64_t i = 0; i < k->rows * k->heads; i++)
        for (int64_t j = 0; j < v->rows * v->heads; j++) {
            const char *const x = (char *)kvprim_table_row(k, i / k->heads) + i % k->heads * k->head_stride;
            const char *const y = (char *)kvprim_table_row(v, j / v->heads) + j % v->heads * v->head_stride;
            if (x < y + piece && y < x + piece)
                return 1;
        }
    return 0;
}

/* V lies in other strides than K, from 1,200 bytes before the place that is given to 1,200 after it. */
static void check_unlike_pair(kvprim_table k_cache, kvprim_table v_cache)
{
    static unsigned char input[2][1024];
    static const int32_t slot[1] = {0};
    const int64_t row_bytes = k_cache.heads ? 64 : 32, piece = 32;
    int both[2] = {0, 0};
    for (int64_t shift = -1200; shift <= 1200; shift++) {
        kvprim_store_desc d = store_of(k_cache, table_of(input[0], 1), row_bytes, slot, 1);
        add_v(&d, v_cache, table_of(input[1], 1), row_bytes);
        d.v_cache.data = (char *)v_cache.data + shift;
        const kvprim_table k = kvprim_table_resolve(d.k_cache, row_bytes);
        const kvprim_table v = kvprim_table_resolve(d.v_cache, row_bytes);
        const int meets = pair_meets(&k, &v, piece);
        both[meets]++;
        if (kvprim_store_check(&d, NULL) != (meets ? KVPRIM_ERROR_OVERLAP : KVPRIM_OK))
            fail("V %lld bytes after K: the check %s", (long long)((char *)d.v_cache.data - (char *)k_cache.data),
                 meets ? "overlooks an overlap" : kvprim_last_error());
    }
    CHECK(both[0] > 0 && both[1] > 0);
}

/* Strides of 2^20 rows that have nothing in common take too many steps. Such caches are taken as long as row 0 of V does
   not lie on row 0 of K. Nothing is at these addresses. */
static void check_hopeless_pair(void)
{
#if UINTPTR_MAX == UINT64_MAX
    static unsigned char input[2][64];
    static const int32_t slot[1] = {0};
    char *const far = (char *)((uintptr_t)1 << 40);
    kvprim_store_desc d = store_of(strided_table(far, 1 << 20, 1018), table_of(input[0], 1), 1, slot, 1);
    add_v(&d, strided_table(far + 1, 1 << 20, 1026), table_of(input[1], 1), 1);
    const clock_t start = clock();
    CHECK(kvprim_store_check(&d, NULL) == KVPRIM_OK);
    CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 1);
    d.v_cache.data = far;
    CHECK_ERROR(kvprim_store_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "a row of v_cache (");
#endif
}

static void test_k_beside_v(void)
{
    static unsigned char cache[8192], *const k = cache + 4096;
    for (size_t i = 0; i < LENGTH(pair_cases); i++)
        one_pair(&pair_cases[i]);
    check_unlike_pair(paged_table(k, 8, 4, 512), paged_table(k - 512, 8, 4, 640));
    check_unlike_pair(paged_table(k, 16, 8, 512), paged_table(k - 640, 16, 4, 512));
    check_unlike_pair(paged_table(k, 11, 4, 512), strided_table(k + 128, 11, 128));
    check_unlike_pair(strided_table(k, 4, 64), strided_table(k + 256, 4, 128));
    check_unlike_pair(with_heads(strided_table(k, 4, 32), 2, 256), with_heads(strided_table(k - 256, 4, 32), 2, 384));
    check_unlike_pair(with_heads(strided_table(k, 4, 96), 2, 48), with_heads(strided_table(k, 4, 32), 2, 512));
    check_hopeless_pair();
}

/* Rows that follow each other on both sides move together. The row after the last one of these is the first one: it
   moves no second time, and the last one moves. */
static void test_closed_run(void)
{
    enum { most = 128, row_bytes = 8 };
    unsigned char to[most * row_bytes], from[most * row_bytes];
    int32_t index[most];
    for (int32_t count = 2; count <= most; count++) {
        fill(to, sizeof to);
        fill(from, sizeof from);
        for (int32_t i = 0; i < count; i++)
            index[i] = (i + 1) % count;
        kvprim_transfer_desc d = transfer_of(table_of(to, count), table_of(from, count), row_bytes, count);
        d.dst_index = d.src_index = index;
        if (kvprim_transfer(&d) != KVPRIM_OK || memcmp(to, from, (size_t)count * row_bytes) != 0)
            fail("%d rows in a circle: not all of them moved", (int)count);
    }
}

/* ---- moves ---- */

enum { most_moves = 5, moves_bytes = 1 << 16 };

/* Makes the moves of one kind: a gather, values with their scales, K and V of different width, or layers. Each kind has
   its own part of `memory_of`, so all kinds may run one after another. */
static size_t make_moves(int kind, unsigned char *memory_of, const int32_t *index, uint32_t *rejected,
                         kvprim_move *moves)
{
    unsigned char *const to = memory_of, *const from = memory_of + moves_bytes / 2;
    kvprim_gather_desc gather = gather_of(table_of(to, 9), table_of(from, 30), 100, index, 9);
    kvprim_store_desc store = store_of(strided_table(to + 1000, 30, 320), table_of(from + 3000, 11), 192, index, 11);
    kvprim_transfer_desc transfer = transfer_of(table_of(to + 20000, 12), table_of(from + 12000, 12), 40, 12);
    add_v(&store, strided_table(to + 1192, 30, 320), table_of(from + 6000, 11), 128);
    transfer.dst_index = index, transfer.layers = 3;
    gather.rejected = store.rejected = transfer.rejected = rejected;
    if (kind == 0)
        return kvprim_gather_moves(&gather, moves) == KVPRIM_OK ? 1 : 0;
    if (kind == 1) { /* values of 576 bytes, each followed by its scale of 8 */
        store.k_cache = strided_table(to + 1000, 30, 584), store.v_cache = strided_table(to + 1576, 30, 584);
        store.k_bytes = 576, store.v_bytes = 8;
    }
    if (kind <= 2)
        return kvprim_store_moves(&store, moves) == KVPRIM_OK ? 2 : 0;
    if (kind == 4)
        transfer.dst = table_of(to + 24000, 12), transfer.row_bytes = 17, transfer.layers = 7;
    return kvprim_transfer_moves(&transfer, moves) == KVPRIM_OK ? 1 : 0;
}

/* Several moves in one call, checked once and run twice, do what the single moves do. */
static void test_moves(void)
{
    unsigned char *const got = allocate(moves_bytes), *const want = allocate(moves_bytes);
    int32_t index[12] = {3, 29, -1, 0, 30, 7, 11, 25, 2, 5, 31, 8};
    for (int kinds = 1; kinds < 32; kinds++) {
        kvprim_move moves[2 * most_moves], one[2];
        size_t n = 0;
        uint32_t rejected = 0, want_rejected = 0;
        for (int kind = 0; kind < most_moves; kind++) {
            if (kinds >> kind & 1)
                n += make_moves(kind, got, index, &rejected, moves + n);
        }
        for (int run_number = 0; run_number < 2; run_number++) {
            index[0] = 3 + run_number;
            fill(got, moves_bytes);
            memcpy(want, got, moves_bytes);
            for (int kind = 0; kind < most_moves; kind++) {
                if (!(kinds >> kind & 1))
                    continue;
                const size_t of_kind = make_moves(kind, want, index, &want_rejected, one);
                CHECK(of_kind > 0);
                for (size_t k = 0; k < of_kind; k++)
                    CHECK(kvprim_cpu_move(&one[k], 1) == KVPRIM_OK);
            }
            CHECK(kvprim_cpu_move(moves, n) == KVPRIM_OK);
            if (memcmp(got, want, moves_bytes) != 0 || rejected != want_rejected)
                fail("kinds %d, run %d: the moves together are not what they are one by one", kinds, run_number);
        }
    }
    CHECK_ERROR(kvprim_cpu_move(NULL, 1), KVPRIM_ERROR_NULL, "kvprim_cpu_move: moves is NULL");
    CHECK_ERROR(kvprim_gather_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_gather_moves: moves is NULL");
    CHECK_ERROR(kvprim_store_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_store_moves: moves is NULL");
    CHECK_ERROR(kvprim_transfer_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_transfer_moves: moves is NULL");
    CHECK(kvprim_cpu_move(NULL, 0) == KVPRIM_OK);
    free(got);
    free(want);
}

/* ---- large tables ---- */

/* Moves enough bytes to be written past the caches, in rows of whole, aligned cache lines and in others. */
static void one_stream(unsigned char *dst, const unsigned char *src, const int32_t *index, kvprim_table cache,
                       int64_t row_bytes)
{
    const int64_t rows = cache.rows;
    cache.data = dst;
    const kvprim_table input = strided_table((unsigned char *)(uintptr_t)src, rows, 1024);
    const kvprim_gather_desc gather = gather_of(cache, input, row_bytes, index, rows);
    const kvprim_store_desc store = store_of(cache, input, row_bytes, index, rows);
    memset(dst, 1, 1024);
    CHECK(kvprim_gather(&gather) == KVPRIM_OK);
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(at(&cache, row_bytes, i, 0), src + index[i] * 1024, (size_t)row_bytes) != 0)
            fail("gather of %lld bytes: row %lld differs", (long long)row_bytes, (long long)i);
    memset(dst, 1, 1024);
    CHECK(kvprim_store(&store) == KVPRIM_OK);
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(at(&cache, row_bytes, index[i], 0), src + i * 1024, (size_t)row_bytes) != 0)
            fail("store of %lld bytes: row %lld differs", (long long)row_bytes, (long long)i);
    CHECK(cache.stride <= row_bytes || dst[row_bytes] == 1); /* bytes between rows are not written */
}

static void test_streaming(void)
{
    enum { rows = 50000, bytes = rows * 1024 };
    unsigned char *const src_memory = allocate(bytes + 128), *const dst_memory = allocate(bytes + 128);
    unsigned char *const src = src_memory + 64 - (uintptr_t)src_memory % 64, *const dst = dst_memory + 64 -
                                                                                          (uintptr_t)dst_memory % 64;
    int32_t *const index = allocate(rows * sizeof *index);
    for (int32_t i = 0; i < rows; i++)
        index[i] = (int32_t)((int64_t)i * 7919 % rows);
    fill(src, bytes);
    one_stream(dst, src, index, strided_table(NULL, rows, 1024), 1024);
    one_stream(dst, src, index, strided_table(NULL, rows, 1024), 1000);
    one_stream(dst + 16, src, index, strided_table(NULL, rows, 1024), 1024);
    one_stream(dst, src, index, strided_table(NULL, rows, 720), 704);
    kvprim_table pages = paged_table(NULL, rows, 4, 4 * 704 + 16);
    pages.stride = 704;
    one_stream(dst, src, index, pages, 704);
    free(src_memory);
    free(dst_memory);
    free(index);
}

#if !defined(_WIN32)
/* Rows past 4 GiB and indices past 2^31, in memory that is reserved but hardly touched. */
static void test_large_table(void)
{
    const int64_t rows = ((int64_t)1 << 31) + 1000;
    const size_t bytes = (size_t)rows * 3;
    unsigned char *const table =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED || bytes / 3 != (uint64_t)rows) {
        skip("2^31 rows of 3 bytes cannot be reserved here");
        return;
    }
    int64_t index[] = {rows - 1, 0, rows, (int64_t)1 << 31, INT64_MAX, INT64_MIN, ((int64_t)1 << 32) + 1, 1500000000};
    unsigned char input[8][3], output[8][3];
    uint32_t rejected = 0;
    fill(input, sizeof input);
    fill(output, sizeof output);
    kvprim_store_desc store = store_of(table_of(table, rows), table_of(input, 8), 3, NULL, 8);
    kvprim_gather_desc gather = gather_of(table_of(output, 8), table_of(table, rows), 3, NULL, 8);
    store.slot = gather.index = index, store.slot_type = gather.index_type = KVPRIM_I64;
    store.rejected = gather.rejected = &rejected;
    CHECK(kvprim_store(&store) == KVPRIM_OK && rejected == 3);
    CHECK(kvprim_gather(&gather) == KVPRIM_OK && rejected == 6);
    for (int i = 0; i < 8; i++)
        for (int b = 0; b < 3; b++) {
            const int in_range = index[i] >= 0 && index[i] < rows;
            CHECK(output[i][b] == (in_range ? input[i][b] : 0));
            CHECK(!in_range || table[(size_t)index[i] * 3 + (size_t)b] == input[i][b]);
        }
    munmap(table, bytes);
}

/* Stores into the last row before a page that must not be touched, and gathers from it. */
static void test_rows_guard_pages(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int64_t row_bytes = 1; row_bytes <= 300; row_bytes++) {
        char *const cache = guarded(1), *const input = guarded(1);
        const int64_t rows = (int64_t)page / row_bytes;
        const int32_t slots[] = {(int32_t)rows - 1, 0, -1, (int32_t)rows};
        const kvprim_table last = table_of(cache + page - rows * row_bytes, rows);
        const kvprim_table packed = table_of(input + page - 4 * row_bytes, 4);
        kvprim_store_desc store = store_of(last, packed, row_bytes, slots, 4);
        kvprim_gather_desc gather = gather_of(packed, last, row_bytes, slots, 4);
        CHECK(kvprim_store(&store) == KVPRIM_OK && kvprim_gather(&gather) == KVPRIM_OK);
        store.k_cache.data = cache; /* and the first rows directly after a guard page */
        store.k.data = gather.dst.data = input;
        gather.src.data = cache;
        CHECK(kvprim_store(&store) == KVPRIM_OK && kvprim_gather(&gather) == KVPRIM_OK);
        munmap(cache - page, 3 * page);
        munmap(input - page, 3 * page);
    }
}
#endif

/* ---- edges ---- */

/* No index lies inside what is written: neither that of a gather, nor slots in K or V, nor those of a transfer in a
   later layer. The last 8 bytes are refused, those after them are not. */
static void test_index_inside(void)
{
    static _Alignas(16) unsigned char to[2][1024], from[2][1024];
    static const char *const words[] = {"overlaps dst", "overlaps k_cache", "overlaps v_cache", "dst_index (",
                                        "src_index ("};
    kvprim_gather_desc gather = {.row_bytes = 64, .index_type = KVPRIM_I64, .count = 8};
    kvprim_store_desc store = {.k_bytes = 64, .v_bytes = 64, .slot_type = KVPRIM_I64, .count = 8};
    kvprim_transfer_desc transfer = {.layers = 2, .row_bytes = 64, .index_type = KVPRIM_I64, .count = 8};
    gather.dst = transfer.dst = store.k_cache = table_of(to[0], 8), store.v_cache = table_of(to[1], 8);
    gather.src = transfer.src = store.k = table_of(from[0], 8), store.v = table_of(from[1], 8);
    transfer.dst_layer_stride = transfer.src_layer_stride = 1024;
    for (int n = 0; n < 10; n++) {
        const int kind = n / 2, inside = n % 2 == 0;
        const void *const index = to[kind >= 2] + (inside ? 504 : 512); /* all of them are 0 */
        gather.index = store.slot = index;
        transfer.dst_index = kind == 3 ? index : NULL, transfer.src_index = kind == 4 ? index : NULL;
        CHECK_ERROR(kind == 0  ? kvprim_gather_check(&gather, NULL)
                    : kind < 3 ? kvprim_store_check(&store, NULL)
                               : kvprim_transfer_check(&transfer, NULL),
                    inside ? KVPRIM_ERROR_OVERLAP : KVPRIM_OK, inside ? words[kind] : "");
    }
}

#ifdef KVPRIM_X86
/* Only rows that are whole, aligned lines are written past the caches: a streaming store to another place crashes, on
   some processors only. Nothing is touched here. */
static void test_streamed_rows(void)
{
    static const struct {
        size_t at;
        int64_t row_bytes, stride, page_stride;
        int streams;
    } cases[] = {
        {0, 1024, 0, 0, 1},    {32, 1024, 0, 0, 0},   {16, 1024, 0, 0, 0},           {0, 1024, 1088, 0, 1},
        {0, 1024, 1056, 0, 0}, {0, 1056, 1088, 0, 0}, {0, 1024, 0, 4 * 1024, 1},     {0, 1024, 0, 4 * 1024 + 64, 1},
        {0, 992, 1024, 0, 0},  {64, 1024, 0, 0, 1},   {0, 1024, 0, 4 * 1024 + 32, 0}};
    char *const places[] = {(char *)((uintptr_t)1 << 44), (char *)((uintptr_t)1 << 45), (char *)((uintptr_t)1 << 46)};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        const int64_t count = kvpi_stream_bytes / cases[n].row_bytes + 1;
        kvprim_table to =
            paged_table(places[0] + cases[n].at, count, cases[n].page_stride ? 4 : 0, cases[n].page_stride);
        to.stride = cases[n].stride;
        const kvprim_gather_desc d = {.dst = to,
                                      .src = table_of(places[1], 1),
                                      .row_bytes = cases[n].row_bytes,
                                      .index = places[2],
                                      .index_type = KVPRIM_I32,
                                      .count = count};
        kvprim_move m;
        CHECK(kvprim_gather_moves(&d, &m) == KVPRIM_OK);
        if (kvpi_streams(&m) != cases[n].streams)
            fail("case %d: streamed %d", (int)n, kvpi_streams(&m));
    }
}
#endif

/* ---- layouts ---- */

static void layout_run_on_cpu(const layout_case *which, layout_call *c, uint8_t *got)
{
    (void)got;
    if (kvprim_cpu_move(c->moves, c->n) != KVPRIM_OK)
        fail("layout %s: %s", which->name, kvprim_last_error());
}

static void test_layouts(void)
{
    uint8_t *const got = allocate(LAYOUT_MOST_BYTES), *const want = allocate(LAYOUT_MOST_BYTES);
    for (int n = 0; n < LAYOUT_CASES; n++)
        layout_one(&layout_cases[n], layout_run_on_cpu, got, got, want);
    free(got);
    free(want);
}

/* Runs what depends on the instruction set. */
static void run_for_isa(void)
{
    printf("on %s:\n", kvprim_isa());
    run("prefix: lengths x alignments x places, blocks", test_prefix_everywhere);
    run("prefix: unequal lengths, int64", test_prefix_lengths_and_i64);
    run("prefix: long arrays", test_prefix_large);
    run("prefix: NULL, pages", test_prefix_null_and_pages);
    run("prefix: many keys", test_prefix_many);
    run("prefix: many keys: first key, no match, error", test_prefix_many_answers);
    run("gather", test_gather);
    run("indices: types, bases, strides", test_index_rule);
    run("rows: one piece for all heads", test_shared_heads);
    run("rows in a circle", test_closed_run);
    run("store", test_store);
    run("transfer", test_transfer);
    run("transfer: inside one cache", test_same_cache);
    run("rows: streaming", test_streaming);
    run("layouts of engines", test_layouts);
    run("layouts by name", test_named_places);
    run("layouts by name: errors", test_named_errors);
    run("any layout to any", test_named_pairs);
    run("runs", test_runs);
    run("staging areas", test_packs);
    run("staging areas: errors", test_pack_errors);
    run_keys();
#if !defined(_WIN32)
    run("prefix: guard pages", test_prefix_guard_pages);
    run("rows: guard pages", test_rows_guard_pages);
#endif
}

#if defined(_WIN32)
static void test_posix(void)
{
    skip("no POSIX threads and mmap here");
}
#endif

int main(int argc, char **argv)
{
    every = argc > 1 && strcmp(argv[1], "quick") == 0 ? 4 : 1;
#if !defined(_WIN32)
    run("threads race to the first call", test_threads);
    if (argc > 1 && strcmp(argv[1], "threads") == 0) {
        run("key table: readers", test_key_readers);
        return finish();
    }
    run("rows: past 4 GiB and 2^31", test_large_table);
#else
    run("threads, guard pages, large tables", test_posix);
#endif
    run("status", test_status);
    run("version and sizes", test_version_and_sizes);
    run("table: bytes", test_bytes);
    run("table: partial pages", test_partial_pages);
    run("moves", test_moves);
    run("table: defaults", test_defaults);
    run("sizes: products that do not wrap", test_products);
    run_bad_descriptors();
    run("table: none", test_empty_tables);
    run("store: K and V interleaved", test_store_interleaved);
    run("store: K and V rows that overlap, and that do not", test_k_beside_v);
    run("transfer: places of layers", test_places_of_layers);
    run("transfer: layers that the executing side reads", test_device_layers);
    run("transfer: 65,536 layers in any order", test_many_layers);
    run("transfer: a layer that is written twice", test_repeated_layers);
    run("transfer: a side without rows", test_empty_side);
    run_slots();
    run_conversions();
#if defined(KVPRIM_X86) || defined(KVPRIM_ARM_SHA)
    kvpi_isa = kvpi_isa_known; /* and as on a processor without such instructions */
    run_keys();
    kvpi_isa = 0;
#endif
    run_key_table();
    run("unpack: over its descriptor", test_unpack_over_descriptor);
    run("unpack: inside one buffer", test_unpack_in_place);
    run("unpack_meta", test_metas);
    run("unpack_meta: counts", test_meta_limits);
    run("unpack_meta: a source that overlaps its destination", test_meta_overlap);
    run("unpack_meta: no buffers", test_meta_without_buffers);
    run("fetch", test_fetches);
    run("fetch: the order of use", test_fetch_order);
    run("fetch: a plan for several layers", test_fetch_plan);
    run("fetch: sets that hold anything", test_fetch_garbage);
    run("fetch: a resolved copy", test_fetch_resolved);
    run("copy, unpack", test_copies);
    run("copy: sizes x alignments", test_copies_aligned);
    run("copy: over its descriptor", test_copies_over_descriptor);
    run("copy: what is no error", test_good_copies);
    run("copy and unpack: small lists that overlap, and that do not", test_small_overlaps);
    run("copy and unpack: large lists that overlap, and that do not", test_large_overlaps);
    run("copy and unpack: lists of pages that overlap, and that do not", test_page_overlaps);
    run("copy and unpack: as many pages as are looked at at a time", test_page_ranges);
    run("copy: as many as there may be", test_most_copies);
    run("copy: as many in crowds", test_crowded_copies);
    run("edges: indices inside what is written", test_index_inside);
#ifdef KVPRIM_X86
    run("edges: rows that are streamed", test_streamed_rows);
#endif
    run_for_isa();
#ifdef KVPRIM_X86
    if (kvpi_has_avx512()) { /* and as on a processor with less */
        kvpi_prefix = kvprim_prefix_i32_avx2;
        run_for_isa();
    }
    if (kvpi_has_avx2()) {
        kvpi_prefix = kvprim_prefix_i32_scalar;
        run_for_isa();
    }
#endif
    return finish();
}

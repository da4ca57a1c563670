/* Tests of kvprim.h. What is expected comes from the contracts, computed byte by byte here, not by the code under test.
   cc -O2 -I. tests/test_kvprim.c -lpthread && ./a.out */
#if !defined(_WIN32)
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif
#define KVPRIM_IMPLEMENTATION
#include "../kvprim.h"
#include <stdlib.h>
#if !defined(_WIN32)
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

/* ---- harness ---- */

static int passed, failed, skipped, failures; /* failures: in the test that runs now */

/* Like printf, and the test fails; only a test's first few failures are printed. */
#define FAIL(...) (failures++ < 5 ? (printf("  "), printf(__VA_ARGS__), printf("\n")) : 0)
#define CHECK(condition) ((condition) ? 0 : FAIL("line %d: %s", __LINE__, #condition))

static void run(const char *name, void (*test)(void))
{
    failures = 0;
    test();
    printf(failures ? "FAIL %s: %d failures\n" : "ok %s\n", name, failures);
    failed += failures != 0;
    passed += failures == 0;
}

static uint64_t random_state = 1;

static uint64_t random_u64(void) /* splitmix64 */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void fill(void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)p)[i] = (unsigned char)(random_u64() >> 56);
}

static void *allocate(size_t bytes)
{
    void *const p = malloc(bytes ? bytes : 1);
    if (!p) {
        printf("FAIL out of memory\n0 passed, 1 failed, 0 skipped\n");
        exit(1);
    }
    return p;
}

static void expect_error(int line, kvprim_status got, kvprim_status want, const char *words)
{
    if (got != want)
        FAIL("line %d: status %s, expected %s (%s)", line, kvprim_status_name(got), kvprim_status_name(want),
             kvprim_last_error());
    if (!strstr(kvprim_last_error(), words))
        FAIL("line %d: the error \"%s\" does not say \"%s\"", line, kvprim_last_error(), words);
}
/* The text is cleared first, so that an older one cannot pass for this call's. */
#define EXPECT_ERROR(call, want, words) ((void)kvprim_fail(KVPRIM_OK, "-"), expect_error(__LINE__, call, want, words))

/* ---- status ---- */

static void test_status(void)
{
    CHECK(strcmp(kvprim_status_name(KVPRIM_OK), "KVPRIM_OK") == 0);
    CHECK(strcmp(kvprim_status_name(KVPRIM_ERROR_OVERLAP), "KVPRIM_ERROR_OVERLAP") == 0);
    CHECK(strcmp(kvprim_status_name((kvprim_status)99), "unknown kvprim_status") == 0);
    CHECK(strlen(kvprim_status_text(KVPRIM_ERROR_NULL)) > 10);
    CHECK(strcmp(kvprim_last_error(), "") == 0);
    EXPECT_ERROR(kvprim_gather(NULL), KVPRIM_ERROR_NULL, "kvprim_gather: desc is NULL");
    (void)kvprim_fail(KVPRIM_ERROR_NULL, "mine: %s", kvprim_last_error()); /* as a wrapper would */
    CHECK(strcmp(kvprim_last_error(), "mine: kvprim_gather: desc is NULL") == 0);
}

/* ---- prefix ---- */

typedef size_t prefix_i32_fn(const int32_t *, size_t, const int32_t *, size_t);
typedef size_t prefix_i64_fn(const int64_t *, size_t, const int64_t *, size_t);
typedef struct variant {
    const char *name;
    prefix_i32_fn *i32;
    prefix_i64_fn *i64;
} variant;

/* Every variant that this machine can run. */
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

static size_t naive_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    size_t i = 0;
    while (i < a_len && i < b_len && a[i] == b[i])
        i++;
    return i;
}

static size_t naive_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)
{
    size_t i = 0;
    while (i < a_len && i < b_len && a[i] == b[i])
        i++;
    return i;
}

static void check_i32(const variant *v, const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t want = naive_i32(a, a_len, b, b_len), got = v->i32(a, a_len, b, b_len);
    if (got != want)
        FAIL("%s i32: lengths %zu and %zu, alignments %zu and %zu: %zu, expected %zu", v->name, a_len, b_len,
             (size_t)((uintptr_t)a % 64), (size_t)((uintptr_t)b % 64), got, want);
}

static void check_i64(const variant *v, const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)
{
    const size_t want = naive_i64(a, a_len, b, b_len), got = v->i64(a, a_len, b, b_len);
    if (got != want)
        FAIL("%s i64: lengths %zu and %zu, alignments %zu and %zu: %zu, expected %zu", v->name, a_len, b_len,
             (size_t)((uintptr_t)a % 64), (size_t)((uintptr_t)b % 64), got, want);
}

enum { longest = 300, step_i32 = 16 };

/* Lengths 0 to 300, all alignments of both arrays in a cache line, the mismatch at every place or nowhere. */
static void test_prefix_everywhere(void)
{
    variant v[8];
    const int n_variants = variants(v);
    static int32_t a_memory[longest + 64], b_memory[longest + 64];
    for (size_t align = 0; align < step_i32 * step_i32; align++) {
        int32_t *const a = a_memory + align % step_i32, *const b = b_memory + align / step_i32;
        for (size_t i = 0; i < longest; i++)
            a[i] = b[i] = (int32_t)random_u64();
        for (size_t n = 0; n <= longest; n++)
            for (size_t bad = 0; bad <= n; bad++) {
                const int32_t was = b[bad];
                b[bad] ^= bad < n ? (int32_t)(1u << (align + bad) % 32) : 0;
                for (int k = 0; k < n_variants; k++) {
                    const size_t got = v[k].i32(a, n, b, n);
                    if (got != bad)
                        FAIL("%s: length %zu, differs at %zu: %zu", v[k].name, n, bad, got);
                }
                b[bad] = was;
            }
    }
}

/* The same where whole blocks are compared: lengths around their ends, places sampled. */
static void test_prefix_blocks(void)
{
    enum { most = 720 };
    static const size_t lengths[] = {400, 511, 512, 513, 575, 576, 577, 591, 592, 593, 608, 640, 655, 656, 700, most};
    variant v[8];
    const int n_variants = variants(v);
    static int32_t a_memory[most + 64], b_memory[most + 64];
    for (size_t align = 0; align < step_i32 * step_i32; align++) {
        int32_t *const a = a_memory + align % step_i32, *const b = b_memory + align / step_i32;
        for (size_t i = 0; i < most; i++)
            a[i] = b[i] = (int32_t)random_u64();
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (size_t bad = (align + l) % 11; bad <= lengths[l] + 11; bad += 11) {
                const size_t n = lengths[l], want = bad < n ? bad : n;
                const int32_t flip = bad < n ? (int32_t)(1u << bad % 32) : 0;
                b[want] ^= flip;
                for (int k = 0; k < n_variants; k++) {
                    const size_t got = v[k].i32(a, n, b, n);
                    if (got != want)
                        FAIL("%s: length %zu, alignment %zu, differs at %zu: %zu", v[k].name, n, align, want, got);
                }
                b[want] ^= flip;
            }
    }
}

static void test_prefix_lengths_and_i64(void)
{
    variant v[8];
    const int n_variants = variants(v);
    static int64_t a_memory[longest + 64], b_memory[longest + 64];
    for (int round = 0; round < 40000; round++) {
        int64_t *const a = a_memory + random_u64() % 8, *const b = b_memory + random_u64() % 8;
        const size_t a_len = random_u64() % (longest / 2), b_len = random_u64() % (longest / 2);
        for (size_t i = 0; i < longest / 2; i++)
            a[i] = b[i] = (int64_t)random_u64();
        if (b_len > 0 && round % 4 != 0) /* in the low or the high half of an int64 */
            b[random_u64() % b_len] ^= (int64_t)((uint64_t)1 << random_u64() % 64);
        for (int k = 0; k < n_variants; k++) {
            check_i64(&v[k], a, a_len, b, b_len);
            check_i32(&v[k], (const int32_t *)(const void *)a, 2 * a_len, (const int32_t *)(const void *)b,
                      2 * b_len + 1);
        }
    }
}

static void test_prefix_large(void)
{
    variant v[8];
    const int n_variants = variants(v);
    const size_t n = 200000;
    int32_t *const a = allocate(4 * (n + 16)), *const b = allocate(4 * (n + 16));
    for (size_t i = 0; i < n + 16; i++)
        a[i] = b[i] = (int32_t)i;
    for (size_t shift = 0; shift < 4; shift++)
        for (int k = 0; k < n_variants; k++) {
            memmove(b + shift, a, 4 * n);
            check_i32(&v[k], a, n, b + shift, n - shift);
            b[shift + n / 2] = -1;
            check_i32(&v[k], a, n, b + shift, n);
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
    EXPECT_ERROR((kvprim_status)kvprim_prefix_i32(NULL, 5, a, 3), KVPRIM_OK,
                 "kvprim_prefix_i32: a is NULL and a_len is 5");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_i32(NULL, 5, a, 0), KVPRIM_OK,
                 "kvprim_prefix_i32: a is NULL and a_len is 5");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_i32(a, 3, NULL, 900), KVPRIM_OK, "b is NULL and b_len is 900");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_i64(b, 3, NULL, 7), KVPRIM_OK,
                 "kvprim_prefix_i64: b is NULL and b_len is 7");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_many_i32(a, 3, keys, lens, 2, out), KVPRIM_OK, "keys[1] is NULL");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_many_i32(NULL, 3, keys, lens, 1, out), KVPRIM_OK, "query is NULL");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_many_i32(a, 3, NULL, lens, 1, out), KVPRIM_OK, "keys is NULL");
    EXPECT_ERROR((kvprim_status)kvprim_prefix_many_i32(a, 3, keys, NULL, 1, out), KVPRIM_OK, "key_lens is NULL");
    CHECK(out[0] == 77 && out[1] == 77);
    CHECK(kvprim_prefix_many_i32(NULL, 0, keys, lens, 1, out) == 0 && out[0] == 0);
    CHECK(kvprim_prefix_many_i32(a, 3, NULL, NULL, 0, NULL) == 0);
    CHECK(kvprim_prefix_pages(35, 16) == 32 && kvprim_prefix_pages(35, 0) == 35 && kvprim_prefix_pages(15, 16) == 0);
}

static void test_prefix_many(void)
{
    enum { n_keys = 200 };
    static int32_t query[longest], memory[n_keys][longest];
    const int32_t *keys[n_keys];
    size_t lens[n_keys], out[n_keys];
    for (int round = 0; round < 300; round++) {
        const size_t query_len = random_u64() % longest, span = round % 3 == 0 ? longest : 24;
        size_t best = 0, best_len = 0;
        for (size_t i = 0; i < longest; i++)
            query[i] = (int32_t)random_u64();
        for (size_t k = 0; k < n_keys; k++) {
            memcpy(memory[k], query, sizeof query);
            memory[k][random_u64() % span] ^= 1;
            const size_t start = random_u64() % 4;
            memmove(memory[k] + start, memory[k], sizeof query - 4 * start);
            keys[k] = memory[k] + start;
            lens[k] = random_u64() % (longest - start);
            const size_t len = naive_i32(query, query_len, keys[k], lens[k]);
            if (len > best_len) {
                best_len = len;
                best = k;
            }
        }
        CHECK(kvprim_prefix_many_i32(query, query_len, keys, lens, n_keys, out) == best);
        CHECK(kvprim_prefix_many_i32(query, query_len, keys, lens, n_keys, NULL) == best);
        for (size_t k = 0; k < n_keys; k++)
            if (out[k] != naive_i32(query, query_len, keys[k], lens[k]))
                FAIL("key %zu of length %zu, query %zu: %zu", k, lens[k], query_len, out[k]);
    }
}

#if !defined(_WIN32)
/* `pages` readable pages between two that are not. */
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

/* Nothing in front of an array is read, and nothing behind it. */
static void test_prefix_guard_pages(void)
{
    variant v[8];
    const int n_variants = variants(v);
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    char *const a = guarded(1), *const b = guarded(1);
    size_t out;
    for (size_t i = 0; i < bytes / 4; i++)
        ((int32_t *)(void *)a)[i] = ((int32_t *)(void *)b)[i] = 7;
    /* a ends `gap` before its page's end, or starts so far behind its start; b ends with its page */
    for (size_t n = 0; n <= 700; n += n < longest ? 1 : 13)
        for (size_t gap = 0; gap <= 68; gap += 4) {
            const int32_t *const a_end = (const int32_t *)(const void *)(a + bytes - gap) - n;
            const int32_t *const b_end = (const int32_t *)(const void *)(b + bytes) - n;
            const int32_t *const a_start = (const int32_t *)(const void *)(a + gap);
            for (int k = 0; k < n_variants; k++) {
                check_i32(&v[k], a_end, n, b_end, n);
                check_i32(&v[k], a_start, n, b_end, n);
                check_i32(&v[k], (const int32_t *)(const void *)b, n, a_end, n);
                check_i32(&v[k], a_end, n, (const int32_t *)(const void *)b, bytes / 4);
                if (8 * n <= bytes)
                    check_i64(&v[k], (const int64_t *)(const void *)(a + bytes - 8 * n), n,
                              (const int64_t *)(const void *)b, n);
            }
            CHECK(kvprim_prefix_many_i32(a_end, n, &b_end, &n, 1, &out) == 0 && out == n);
        }
    const size_t page = bytes;
    munmap(a - page, 3 * page);
    munmap(b - page, 3 * page);
}

static void *dispatch_thread(void *result)
{
    static const int32_t a[40] = {0};
    *(size_t *)result = kvprim_prefix_i32(a, 40, a, 33) + (strlen(kvprim_isa()) > 0);
    return NULL;
}

/* Run first: the threads race to pick the variant. */
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

/* ---- rows: the contract, byte by byte ---- */

/* Byte `byte` of row `row` of a table with every field given. */
static unsigned char *at(const kvprim_table *t, int64_t row_bytes, int64_t row, int64_t byte)
{
    const int64_t heads = t->heads > 1 ? t->heads : 1, piece = row_bytes / heads;
    int64_t offset =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    offset += byte / piece * t->head_stride + byte % piece;
    return (unsigned char *)t->data + offset;
}

/* A table, its memory with a margin of guard bytes on both sides, and a copy on which the reference works. */
typedef struct memory {
    kvprim_table t;
    unsigned char *bytes, *reference;
    size_t size;
} memory;

enum { margin = 256 };

/* A table of `span` bytes whose data lies `align` past a 64-byte line; random contents. */
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

/* The same table on the reference's copy. */
static kvprim_table on_reference(const memory *m)
{
    kvprim_table t = m->t;
    t.data = m->reference + ((unsigned char *)m->t.data - m->bytes);
    return t;
}

static void check_same(const memory *m, const char *what)
{
    for (size_t i = 0; i < m->size; i++)
        if (m->bytes[i] != m->reference[i]) {
            const long long offset = (long long)i - ((unsigned char *)m->t.data - m->bytes);
            FAIL("%s: byte %lld of the table: got %02x, expected %02x", what, offset, m->bytes[i], m->reference[i]);
            return;
        }
}

/* A layout of a test: unpadded or padded, in pages or not, head-major or not. */
typedef struct layout {
    const char *name;
    int64_t pad, page_rows, page_pad;
    int32_t heads;
} layout;

static const layout layouts[] = {{"packed", 0, 0, 0, 0},        {"strided", 24, 0, 0, 0},   {"paged", 0, 16, 0, 0},
                                 {"padded pages", 7, 5, 33, 0}, {"HND pages", 0, 16, 0, 4}, {"HND padded", 3, 4, 11, 2},
                                 {"HND unpaged", 0, 0, 0, 4}};
enum { n_layouts = sizeof layouts / sizeof *layouts };

/* The layout's table with every field filled in, and how many bytes it spans. */
static kvprim_table lay_out(const layout *l, int64_t rows, int64_t row_bytes, size_t *span)
{
    kvprim_table t = {NULL, rows, 0, l->page_rows, 0, row_bytes % 4 == 0 ? l->heads : 0, 0};
    const int64_t heads = t.heads > 1 ? t.heads : 1, in_page = t.page_rows ? t.page_rows : rows;
    t.stride = row_bytes / heads + l->pad;
    t.head_stride = heads > 1 ? in_page * t.stride : 0;
    t.page_stride = t.page_rows ? heads * in_page * t.stride + l->page_pad : 0;
    *span = (size_t)(t.page_rows ? (rows + in_page - 1) / in_page * t.page_stride : heads * in_page * t.stride);
    return t;
}

/* The index's value i as either type. */
typedef struct index_list {
    kvprim_index_type type;
    int32_t i32[64];
    int64_t i64[64];
} index_list;

static const void *index_data(const index_list *list)
{
    return list->type == KVPRIM_I64 ? (const void *)list->i64 : (const void *)list->i32;
}

/* In range, padding, past the end, and far out; relative to base. */
static void fill_index(index_list *list, int count, int64_t base, int64_t rows)
{
    for (int i = 0; i < count; i++) {
        static const int64_t wild64[] = {INT64_MIN, INT64_MAX, -1, INT64_MAX - 1, (int64_t)1 << 40};
        static const int64_t wild32[] = {INT32_MIN, INT32_MAX, -1, INT32_MAX - 1, 1 << 30};
        const uint64_t kind = random_u64() % 8;
        int64_t value = base + (int64_t)(random_u64() % (uint64_t)rows);
        if (kind == 0)
            value = list->type == KVPRIM_I64 ? wild64[random_u64() % 5] : wild32[random_u64() % 5];
        if (kind == 1)
            value = base + rows;
        if (kind == 2)
            value = base - 1;
        list->i64[i] = value;
        list->i32[i] = (int32_t)value;
    }
}

/* The index rule as the contract states it: the row, -1 for padding, -2 past the end. */
static int64_t ruled(int64_t value, int64_t base, int64_t rows)
{
    if (value < base)
        return -1;
    if (base >= 0 ? value - base >= rows : value >= rows + base)
        return -2;
    return value - base;
}

static const int64_t row_sizes[] = {1,  2,  3,   4,   7,   8,   12,  15,  16,  17,   31,   32,
                                    48, 64, 100, 128, 132, 255, 256, 257, 576, 1000, 1152, 2051};
enum { n_row_sizes = sizeof row_sizes / sizeof *row_sizes };
static const int64_t bases[] = {0, 1, 1000, -7};

static void one_gather(int64_t row_bytes, const layout *dst_layout, const layout *src_layout, size_t dst_align,
                       size_t src_align, int64_t base, kvprim_index_type type)
{
    enum { count = 37, src_rows = 29 };
    size_t dst_span, src_span;
    const kvprim_table dst_table = lay_out(dst_layout, count, row_bytes, &dst_span);
    const kvprim_table src_table = lay_out(src_layout, src_rows, row_bytes, &src_span);
    memory dst = make(dst_table, dst_span, dst_align), src = make(src_table, src_span, src_align);
    index_list index = {type, {0}, {0}};
    fill_index(&index, count, base, src_rows);
    uint32_t rejected = 5, want_rejected = 5;
    const kvprim_gather_desc d = {dst.t, src.t, row_bytes, index_data(&index), type, base, count, &rejected};
    const kvprim_status status = kvprim_gather(&d);
    if (status != KVPRIM_OK)
        FAIL("%s", kvprim_last_error());
    const kvprim_table reference = on_reference(&dst);
    for (int i = 0; i < count; i++) {
        const int64_t row = ruled(index.i64[i], base, src_rows);
        want_rejected += row == -2;
        for (int64_t b = 0; b < row_bytes; b++)
            *at(&reference, row_bytes, i, b) = row >= 0 ? *at(&src.t, row_bytes, row, b) : 0;
    }
    char what[200];
    snprintf(what, sizeof what, "gather %lld bytes, %s <- %s, alignments %zu %zu, base %lld", (long long)row_bytes,
             dst_layout->name, src_layout->name, dst_align, src_align, (long long)base);
    check_same(&dst, what);
    check_same(&src, "the source");
    CHECK(rejected == want_rejected);
    release(&dst);
    release(&src);
}

static void test_gather(void)
{
    for (int s = 0; s < n_row_sizes; s++)
        for (int l = 0; l < n_layouts * n_layouts; l++)
            one_gather(row_sizes[s], &layouts[l % n_layouts], &layouts[l / n_layouts], (size_t)(l * 5 + s) % 16,
                       (size_t)(l * 3 + 2 * s) % 16, bases[(l + s) % 4], (l + s) % 2 ? KVPRIM_I64 : KVPRIM_I32);
    for (size_t align = 0; align < 256; align++)
        one_gather(100, &layouts[0], &layouts[1], align % 16, align / 16, 0, KVPRIM_I32);
}

static void one_store(int64_t k_bytes, int64_t v_bytes, const layout *cache_layout, size_t align, int64_t base,
                      kvprim_index_type type, int with_v)
{
    enum { count = 23, rows = 61 };
    size_t k_span, v_span;
    const kvprim_table k_table = lay_out(cache_layout, rows, k_bytes, &k_span);
    const kvprim_table v_table = lay_out(cache_layout, rows, v_bytes, &v_span);
    memory k_cache = make(k_table, k_span, align), v_cache = make(v_table, v_span, 15 - align);
    const int64_t token = k_bytes + v_bytes + 3; /* a packed tensor: K and V of a token side by side */
    const kvprim_table kv_table = {NULL, count, token, 0, 0, 0, 0};
    memory input = make(kv_table, (size_t)(count * token), align / 2);
    kvprim_table v_input = input.t;
    v_input.data = (char *)input.t.data + k_bytes;
    index_list slot = {type, {0}, {0}};
    fill_index(&slot, count, base, rows);
    for (int i = 0; i < count; i++) /* distinct, where they are in range */
        if (ruled(slot.i64[i], base, rows) >= 0)
            slot.i32[i] = (int32_t)(slot.i64[i] = base + (i * 17 + 3) % rows);
    uint32_t rejected = 0, want_rejected = 0;
    kvprim_store_desc d = {k_cache.t,         v_cache.t, input.t, v_input, k_bytes,  v_bytes,
                           index_data(&slot), type,      base,    count,   &rejected};
    if (!with_v)
        memset(&d.v_cache, 0, sizeof d.v_cache);
    if (kvprim_store(&d) != KVPRIM_OK)
        FAIL("%s", kvprim_last_error());
    const kvprim_table k_reference = on_reference(&k_cache), v_reference = on_reference(&v_cache);
    for (int i = 0; i < count; i++) {
        const int64_t row = ruled(slot.i64[i], base, rows);
        want_rejected += row == -2;
        for (int64_t b = 0; b < k_bytes && row >= 0; b++)
            *at(&k_reference, k_bytes, row, b) = *at(&input.t, k_bytes, i, b);
        for (int64_t b = 0; b < v_bytes && row >= 0 && with_v; b++)
            *at(&v_reference, v_bytes, row, b) = *at(&v_input, v_bytes, i, b);
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
            for (size_t align = 0; align < 16; align++)
                one_store(row_sizes[s], row_sizes[(s + (int)align) % n_row_sizes], &layouts[l], align, bases[align % 4],
                          align % 3 ? KVPRIM_I32 : KVPRIM_I64, (l + s) % 4 != 0);
}

/* K and V interleaved in one cache: [page][K or V][row in page]. */
static void test_store_interleaved(void)
{
    enum { page_rows = 4, row_bytes = 24, rows = 20, count = 3 };
    static unsigned char cache[rows * 2 * row_bytes], want[sizeof cache];
    unsigned char input[2][count * row_bytes];
    const int32_t slot[count] = {19, 0, 6};
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    fill(input, sizeof input);
    const kvprim_table k_cache = {cache, rows, 0, page_rows, 2 * page_rows * row_bytes, 0, 0};
    kvprim_table v_cache = k_cache;
    v_cache.data = cache + page_rows * row_bytes;
    const kvprim_store_desc d = {k_cache,
                                 v_cache,
                                 {input[0], count, 0, 0, 0, 0, 0},
                                 {input[1], count, 0, 0, 0, 0, 0},
                                 row_bytes,
                                 row_bytes,
                                 slot,
                                 KVPRIM_I32,
                                 0,
                                 count,
                                 NULL};
    CHECK(kvprim_store(&d) == KVPRIM_OK);
    for (int i = 0; i < count; i++)
        for (int kv = 0; kv < 2; kv++)
            memcpy(want + ((slot[i] / page_rows * 2 + kv) * page_rows + slot[i] % page_rows) * row_bytes,
                   input[kv] + i * row_bytes, row_bytes);
    CHECK(memcmp(cache, want, sizeof cache) == 0);
}

static void one_transfer(int64_t row_bytes, const layout *dst_layout, const layout *src_layout, int indexed,
                         int pointers, int32_t layers)
{
    enum { count = 19, rows = 26, most_layers = 5 };
    size_t dst_span, src_span;
    const kvprim_table dst_table = lay_out(dst_layout, rows, row_bytes, &dst_span);
    const kvprim_table src_table = lay_out(src_layout, rows, row_bytes, &src_span);
    const int64_t dst_step = (int64_t)dst_span + 5, src_step = (int64_t)src_span;
    const int32_t n = layers ? layers : 1;
    memory dst = make(dst_table, (size_t)(n * dst_step), 3), src = make(src_table, (size_t)(n * src_step), 8);
    index_list to = {KVPRIM_I32, {0}, {0}}, from = {KVPRIM_I32, {0}, {0}};
    fill_index(&to, count, 0, rows);
    fill_index(&from, count, 0, rows);
    for (int i = 0; i < count; i++)
        if (ruled(to.i64[i], 0, rows) >= 0)
            to.i32[i] = (int32_t)(to.i64[i] = (i * 7 + 1) % rows); /* distinct */
    void *dst_layers[most_layers], *src_layers[most_layers];
    for (int l = 0; l < n; l++) {
        dst_layers[l] = (char *)dst.t.data + (n - 1 - l) * dst_step; /* in the opposite order */
        src_layers[l] = (char *)src.t.data + l * src_step;
    }
    uint32_t rejected = 0, want_rejected = 0;
    kvprim_transfer_desc d = {
        dst.t,     src.t,     pointers & 1 ? dst_layers : NULL, pointers & 2 ? src_layers : NULL, dst_step,   src_step,
        layers,    row_bytes, indexed & 1 ? to.i32 : NULL,      indexed & 2 ? from.i32 : NULL,    KVPRIM_I32, count,
        &rejected, 0};
    if (kvprim_transfer(&d) != KVPRIM_OK)
        FAIL("%s", kvprim_last_error());
    for (int l = 0; l < n; l++) {
        kvprim_table reference = on_reference(&dst), source = src.t;
        reference.data = (char *)reference.data + (pointers & 1 ? n - 1 - l : l) * dst_step;
        source.data = (char *)source.data + l * src_step;
        for (int i = 0; i < count; i++) {
            const int64_t dst_row = indexed & 1 ? ruled(to.i64[i], 0, rows) : i;
            const int64_t src_row = indexed & 2 ? ruled(from.i64[i], 0, rows) : i;
            want_rejected += l == 0 && (dst_row == -2 || src_row == -2);
            for (int64_t b = 0; b < row_bytes && dst_row >= 0 && src_row >= 0; b++)
                *at(&reference, row_bytes, dst_row, b) = *at(&source, row_bytes, src_row, b);
        }
    }
    check_same(&dst, "transfer");
    CHECK(rejected == want_rejected);
    release(&dst);
    release(&src);
}

static void test_transfer(void)
{
    for (int s = 0; s < n_row_sizes; s += 2)
        for (int l = 0; l < n_layouts * n_layouts; l++)
            for (int32_t layers = 0; layers <= 5; layers += 1 + l % 3)
                one_transfer(row_sizes[s], &layouts[l % n_layouts], &layouts[l / n_layouts], l % 4, l / 4 % 4, layers);
}

/* The defaults of zero fields, for every layout without padding. */
static void test_defaults(void)
{
    for (int l = 0; l < n_layouts; l++) {
        if (layouts[l].pad || layouts[l].page_pad)
            continue;
        size_t span;
        const kvprim_table want = lay_out(&layouts[l], 32, 64, &span);
        const kvprim_table zeros = {NULL, 32, 0, layouts[l].page_rows, 0, layouts[l].heads, 0};
        const kvprim_table got = kvprim_table_resolve(zeros, 64);
        CHECK(got.stride == want.stride && got.page_stride == want.page_stride && got.head_stride == want.head_stride);
        CHECK(got.heads == (want.heads ? want.heads : 1));
    }
    const kvprim_table nhd_heads = kvprim_table_resolve((kvprim_table){NULL, 32, 64, 8, 0, 4, 16}, 64);
    CHECK(nhd_heads.page_stride == 8 * 64); /* heads inside the row */
}

/* ---- unpack ---- */

static void test_unpack(void)
{
    enum { src_bytes = 20000, dst_bytes = 24000, n = 60 };
    unsigned char *const src = allocate(src_bytes), *const dst = allocate(dst_bytes), *const want = allocate(dst_bytes);
    for (int round = 0; round < 200; round++) {
        kvprim_fragment f[n];
        uint64_t at_dst = random_u64() % 16;
        fill(src, src_bytes);
        fill(dst, dst_bytes);
        memcpy(want, dst, dst_bytes);
        for (int i = 0; i < n; i++) {
            const uint64_t bytes = random_u64() % 400;
            f[i] = (kvprim_fragment){random_u64() % (src_bytes - bytes + 1), at_dst, bytes};
            memcpy(want + at_dst, src + f[i].src_offset, bytes);
            at_dst += bytes + random_u64() % 3 * (random_u64() % 2);
        }
        const kvprim_unpack_desc d = {src, src_bytes, dst, dst_bytes, f, n, 0};
        CHECK(at_dst <= dst_bytes && kvprim_unpack(&d) == KVPRIM_OK);
        for (int i = 0; i < dst_bytes; i++)
            if (dst[i] != want[i]) {
                FAIL("byte %d: got %02x, expected %02x", i, dst[i], want[i]);
                break;
            }
    }
    free(src);
    free(dst);
    free(want);
}

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
    dst.d = (kvprim_unpack_desc){src, sizeof src, &dst, sizeof dst, f, 2, 0};
    CHECK(kvprim_unpack(&dst.d) == KVPRIM_OK);
    CHECK(memcmp(dst.bytes, src + half, half) == 0 && memcmp(dst.bytes + half, src, half) == 0);
}

static void test_unpack_errors(void)
{
    unsigned char src[64], dst[64], want[64];
    memset(dst, 1, sizeof dst);
    memcpy(want, dst, sizeof dst);
    kvprim_fragment f[2] = {{0, 0, 8}, {60, 0, 8}};
    kvprim_unpack_desc d = {src, 64, dst, 64, f, 2, 0};
    EXPECT_ERROR(kvprim_unpack(NULL), KVPRIM_ERROR_NULL, "desc is NULL");
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1] is 8 bytes at src_offset 60, past src_bytes 64");
    f[1] = (kvprim_fragment){0, 57, 8};
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1] is 8 bytes at dst_offset 57, past dst_bytes 64");
    f[1] = (kvprim_fragment){UINT64_MAX - 3, 0, 8};
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1]");
    f[1] = (kvprim_fragment){0, 8, UINT64_MAX};
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1]");
    f[1] = (kvprim_fragment){8, UINT64_MAX - 7, 8};
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1]");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    f[1] = (kvprim_fragment){UINT64_MAX / 2, UINT64_MAX / 2, UINT64_MAX / 2}; /* no bit beyond, but their sum */
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1]");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
#ifdef KVPRIM_DEBUG
    f[1] = (kvprim_fragment){0, 7, 8};
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "fragments[0] and fragments[1] overlap in dst");
    f[0].dst_offset = 14;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "fragments[0] and fragments[1] overlap in dst");
    f[0].dst_offset = 15;
    CHECK(kvprim_unpack(&d) == KVPRIM_OK);
#endif
    d.reserved = 1;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_ARGUMENT, "reserved is 1, not 0");
    d.reserved = 0;
    d.dst = src + 63;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "overlaps src");
    d.dst = f;
    d.dst_bytes = sizeof f;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "overlaps fragments");
    d.dst_bytes = 64;
    d.dst = NULL;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_NULL, "dst is NULL");
    d.dst = dst;
    d.fragments = NULL;
    EXPECT_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_NULL, "fragments is NULL");
    d.count = 0;
    CHECK(kvprim_unpack(&d) == KVPRIM_OK);
}

/* ---- bad descriptors ---- */

/* What the sizes are checked with, against long multiplication: around powers of two, and where the product is about
   the largest. */
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

static void test_gather_errors(void)
{
    static unsigned char dst[4096], src[4096], want[4096];
    int32_t index[4] = {0, 1, 2, 3};
    const kvprim_gather_desc good = {
        {dst, 4, 0, 0, 0, 0, 0}, {src, 8, 0, 0, 0, 0, 0}, 128, index, KVPRIM_I32, 0, 4, NULL};
    kvprim_gather_desc d;
    fill(src, sizeof src);
    CHECK(kvprim_gather(&good) == KVPRIM_OK && memcmp(dst, src, 512) == 0);
    memcpy(want, dst, sizeof dst);
    fill(src, sizeof src);
#define BAD(change, status, words)                                                                                     \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    EXPECT_ERROR(kvprim_gather(&d), status, words)
    BAD(dst.data = NULL, KVPRIM_ERROR_NULL, "kvprim_gather: dst.data is NULL");
    BAD(src.data = NULL, KVPRIM_ERROR_NULL, "src.data is NULL");
    BAD(index = NULL, KVPRIM_ERROR_NULL, "index is NULL");
    BAD(index_type = (kvprim_index_type)7, KVPRIM_ERROR_ARGUMENT, "index_type is 7");
    BAD(count = -1, KVPRIM_ERROR_SIZE, "count is -1");
    BAD(row_bytes = 0, KVPRIM_ERROR_SIZE, "kvprim_gather: row_bytes is 0, less than 1");
    BAD(row_bytes = -128, KVPRIM_ERROR_SIZE, "row_bytes is -128");
    BAD(src.rows = -2, KVPRIM_ERROR_SIZE, "src.rows is -2");
    BAD(dst.rows = 3, KVPRIM_ERROR_SIZE, "dst.rows is 3, less than count, which is 4");
    BAD(src.stride = 127, KVPRIM_ERROR_SIZE, "src.stride is 127, less than a row's bytes, 128");
    BAD(dst.stride = -128, KVPRIM_ERROR_SIZE, "dst.stride is -128");
    BAD(src.stride = INT64_MIN, KVPRIM_ERROR_SIZE, "src.stride is -9223372036854775808");
    BAD(src.page_rows = -1, KVPRIM_ERROR_SIZE, "src.page_rows is -1");
    BAD(src.page_stride = -1, KVPRIM_ERROR_SIZE, "src.page_stride is -1");
    BAD(src.heads = -1, KVPRIM_ERROR_SIZE, "src.heads is -1");
    BAD(src.heads = 3, KVPRIM_ERROR_SIZE, "src.heads is 3, which does not divide the bytes of a row, 128");
    BAD(src.rows = INT64_MAX, KVPRIM_ERROR_SIZE, "src.rows is 9223372036854775807");
    BAD(src.stride = INT64_MAX, KVPRIM_ERROR_SIZE, "src.rows is 8");
    BAD(src.data = dst + 511, KVPRIM_ERROR_OVERLAP, "overlaps");
    BAD(dst.data = src + 1023, KVPRIM_ERROR_OVERLAP, "overlaps");
    BAD(dst.data = index, KVPRIM_ERROR_OVERLAP, "index (");
    BAD(index = (const char *)index + 1, KVPRIM_ERROR_ARGUMENT, "is not aligned to its type");
#undef BAD
    d = good;
    d.src.page_rows = 4;
    d.src.page_stride = 400;
    EXPECT_ERROR(kvprim_gather(&d), KVPRIM_ERROR_SIZE,
                 "src.page_stride is 400, but what lies inside that step takes bytes: 512");
    d = good;
    d.src.heads = 2;
    d.src.stride = 64;
    d.src.head_stride = 100;
    EXPECT_ERROR(kvprim_gather(&d), KVPRIM_ERROR_SIZE,
                 "src.head_stride is 100, but what lies inside that step takes bytes: 512");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    memset(&d, 0, sizeof d);
    CHECK(kvprim_gather(&d) == KVPRIM_OK); /* count 0 */
    d = good;
    d.src.rows = 0;
    d.src.data = NULL; /* an empty shard: every index is past it */
    uint32_t rejected = 0;
    d.rejected = &rejected;
    CHECK(kvprim_gather(&d) == KVPRIM_OK && rejected == 4 && dst[0] == 0 && dst[511] == 0);
    d = good; /* an empty table has no layout to get wrong */
    d.src = (kvprim_table){NULL, 0, 0, 0, 0, 4, 0};
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    d = good; /* right behind each other, the last page in part: not an overlap */
    d.src = (kvprim_table){src, 5, 0, 4, 0, 0, 0};
    d.dst.data = src + 5 * 128;
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
}

static void test_store_errors(void)
{
    static unsigned char cache[2][2048], input[2][1024], want[2][2048];
    const int64_t slot[2] = {1, 3};
    const kvprim_store_desc good = {{cache[0], 8, 0, 0, 0, 0, 0},
                                    {cache[1], 8, 0, 0, 0, 0, 0},
                                    {input[0], 2, 0, 0, 0, 0, 0},
                                    {input[1], 2, 0, 0, 0, 0, 0},
                                    64,
                                    32,
                                    slot,
                                    KVPRIM_I64,
                                    0,
                                    2,
                                    NULL};
    kvprim_store_desc d;
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    EXPECT_ERROR(kvprim_store(NULL), KVPRIM_ERROR_NULL, "kvprim_store: desc is NULL");
#define BAD(change, status, words)                                                                                     \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    EXPECT_ERROR(kvprim_store(&d), status, words)
    BAD(slot = NULL, KVPRIM_ERROR_NULL, "slot is NULL");
    BAD(slot_type = (kvprim_index_type)-1, KVPRIM_ERROR_ARGUMENT, "slot_type is -1");
    BAD(k_cache.data = NULL, KVPRIM_ERROR_NULL, "k_cache.data is NULL");
    BAD(v.data = NULL, KVPRIM_ERROR_NULL, "v.data is NULL");
    BAD(v_bytes = 0, KVPRIM_ERROR_SIZE, "v_bytes is 0");
    BAD(k.rows = 1, KVPRIM_ERROR_SIZE, "k.rows is 1, less than count, which is 2");
    BAD(v_cache.rows = 7, KVPRIM_ERROR_SIZE, "v_cache.rows is 7, but k_cache.rows is 8");
    BAD(v.stride = 31, KVPRIM_ERROR_SIZE, "v.stride is 31");
    BAD(count = INT64_MIN, KVPRIM_ERROR_SIZE, "count is -9223372036854775808");
    BAD(v.data = cache[0] + 100, KVPRIM_ERROR_OVERLAP, "k_cache");
    BAD(k.data = cache[1] + 100, KVPRIM_ERROR_OVERLAP, "v_cache");
    BAD(k.data = cache[0], KVPRIM_ERROR_OVERLAP, "k_cache");
    BAD(v_cache.data = cache[0] + 63, KVPRIM_ERROR_OVERLAP, "v_cache");
#undef BAD
    CHECK(memcmp(cache, want, sizeof cache) == 0);
    memset(&d, 0, sizeof d);
    CHECK(kvprim_store(&d) == KVPRIM_OK);
}

static void test_transfer_errors(void)
{
    static unsigned char dst[4096], src[4096], want[4096];
    const int32_t index[2] = {1, 3};
    void *const dst_layers[2] = {dst, dst + 2048}, *const null_layers[2] = {src, NULL},
                *const mixed[2] = {src, dst + 100};
    const kvprim_transfer_desc good = {{dst, 8, 0, 0, 0, 0, 0},
                                       {src, 8, 0, 0, 0, 0, 0},
                                       NULL,
                                       NULL,
                                       0,
                                       0,
                                       2,
                                       64,
                                       index,
                                       index,
                                       KVPRIM_I32,
                                       2,
                                       NULL,
                                       0};
    kvprim_transfer_desc d;
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    EXPECT_ERROR(kvprim_transfer(NULL), KVPRIM_ERROR_NULL, "kvprim_transfer: desc is NULL");
#define BAD(change, status, words)                                                                                     \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    EXPECT_ERROR(kvprim_transfer(&d), status, words)
    BAD(layers = -1, KVPRIM_ERROR_SIZE, "layers is -1");
    BAD(src_layers = null_layers, KVPRIM_ERROR_NULL, "src_layers[1] is NULL");
    BAD(src_layers = mixed, KVPRIM_ERROR_OVERLAP, "overlaps");
    BAD(dst_layer_stride = 500, KVPRIM_ERROR_SIZE,
        "kvprim_transfer: dst_layer_stride is 500, but what lies inside that step takes bytes: 512");
    BAD(src_layer_stride = -8, KVPRIM_ERROR_SIZE, "src_layer_stride is -8");
    BAD(index_type = (kvprim_index_type)2, KVPRIM_ERROR_ARGUMENT, "index_type is 2");
    BAD(src.data = dst + 1000, KVPRIM_ERROR_OVERLAP, "overlaps"); /* dst's second layer */
    BAD(src.data = NULL, KVPRIM_ERROR_NULL, "src.data is NULL");
    BAD(dst.heads = 5, KVPRIM_ERROR_SIZE, "dst.heads is 5");
    BAD(same_cache = 2, KVPRIM_ERROR_ARGUMENT, "same_cache is 2");
    BAD(same_cache = -1, KVPRIM_ERROR_ARGUMENT, "same_cache is -1");
    BAD(same_cache = 1, KVPRIM_ERROR_ARGUMENT, "same_cache is 1, but layer 0 is at");
    BAD(src.data = dst, KVPRIM_ERROR_OVERLAP, "dst layer 0");
#undef BAD
    d.same_cache = 1; /* otherwise it is one cache now */
    d.src.page_rows = 4;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.page_rows is 0 and src.page_rows 4");
    d.src.page_rows = 0;
    d.src_layer_stride = 1024;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "layer 1 is at");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    d = good;
    d.dst.data = NULL; /* layers say it all */
    d.dst_layers = dst_layers;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 2048 + 192, src + 512 + 192, 64) == 0);
    d = good; /* an empty table: its layer stride leads nowhere */
    d.dst.rows = 0;
    d.dst_layer_stride = INT64_MAX;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    d = good; /* the indices in the second layer of what is written */
    d.dst_index = d.src_index = (const int32_t *)(const void *)(dst + 512);
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "dst_index (");
    d = good; /* layers of both sides in turn: [layer][src or dst][row] */
    d.src.data = dst + 512;
    d.dst_layer_stride = d.src_layer_stride = 1024;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 1024 + 192, dst + 1536 + 192, 64) == 0);
    d.src.data = dst + 511;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "dst layer 0");
    memset(&d, 0, sizeof d);
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
}

/* Pages copied inside one cache, K and V of two layers by their pointers; one source for two copies, one padded. */
static void test_same_cache(void)
{
    enum { rows = 12, row_bytes = 48, layer_bytes = rows * row_bytes, layers = 4 };
    static unsigned char cache[layers * layer_bytes], want[sizeof cache];
    static const int32_t to[] = {7, 2, 11, -1, 3}, from[] = {0, 0, 5, 4, 12};
    void *pointers[layers];
    uint32_t rejected = 0;
    kvprim_transfer_desc d;
    memset(&d, 0, sizeof d);
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    for (int l = 0; l < layers; l++) {
        pointers[l] = cache + (layers - 1 - l) * layer_bytes;
        for (int i = 0; i < 3; i++)
            memcpy(want + l * layer_bytes + to[i] * row_bytes, cache + l * layer_bytes + from[i] * row_bytes,
                   row_bytes);
    }
    d.dst.rows = d.src.rows = rows;
    d.dst.page_rows = d.src.page_rows = 4;
    d.dst_layers = d.src_layers = pointers;
    d.layers = layers;
    d.row_bytes = row_bytes;
    d.dst_index = to;
    d.src_index = from;
    d.count = 5;
    d.rejected = &rejected;
    d.same_cache = 1;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(cache, want, sizeof cache) == 0 && rejected == 1);
}

/* ---- large tables ---- */

/* So many bytes that they are written past the caches, on rows of whole lines and on others. */
static void test_streaming(void)
{
    enum { rows = 50000, stride = 1024 };
    unsigned char *const src_memory = allocate(rows * stride + 64), *const dst_memory = allocate(rows * stride + 64);
    unsigned char *const src = src_memory + 64 - (uintptr_t)src_memory % 64, *const dst = dst_memory + 64 -
                                                                                          (uintptr_t)dst_memory % 64;
    int32_t *const index = allocate(rows * sizeof *index);
    for (int32_t i = 0; i < rows; i++)
        index[i] = (int32_t)((int64_t)i * 7919 % rows);
    for (int i = 0; i < rows * stride / 8; i++)
        ((uint64_t *)(void *)src)[i] = random_u64();
    for (int64_t row_bytes = 1024; row_bytes >= 1000; row_bytes -= 24) {
        const kvprim_table dst_table = {dst, rows, stride, 0, 0, 0, 0}, src_table = {src, rows, stride, 0, 0, 0, 0};
        const kvprim_gather_desc gather = {dst_table, src_table, row_bytes, index, KVPRIM_I32, 0, rows, NULL};
        memset(dst, 1, rows * stride);
        CHECK(kvprim_gather(&gather) == KVPRIM_OK);
        for (int i = 0; i < rows; i++)
            if (memcmp(dst + (size_t)i * stride, src + (size_t)index[i] * stride, (size_t)row_bytes) != 0)
                FAIL("gather of %lld bytes: row %d differs", (long long)row_bytes, i);
        const kvprim_store_desc store = {dst_table, {NULL, 0, 0, 0, 0, 0, 0},
                                         src_table, {NULL, 0, 0, 0, 0, 0, 0},
                                         row_bytes, 0,
                                         index,     KVPRIM_I32,
                                         0,         rows,
                                         NULL};
        memset(dst, 1, rows * stride);
        CHECK(kvprim_store(&store) == KVPRIM_OK);
        for (int i = 0; i < rows; i++)
            if (memcmp(dst + (size_t)index[i] * stride, src + (size_t)i * stride, (size_t)row_bytes) != 0)
                FAIL("store of %lld bytes: row %d differs", (long long)row_bytes, i);
        CHECK(row_bytes == stride || dst[stride - 1] == 1); /* what lies between rows is not written */
    }
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
    if (table == MAP_FAILED) {
        printf("skip rows past 4 GiB: %zu bytes cannot be reserved here\n", bytes);
        skipped++;
        return;
    }
    int64_t index[] = {rows - 1, 0, rows, (int64_t)1 << 31, INT64_MAX, INT64_MIN, ((int64_t)1 << 32) + 1, 1500000000};
    unsigned char input[8][3], output[8][3];
    uint32_t rejected = 0;
    fill(input, sizeof input);
    fill(output, sizeof output);
    const kvprim_store_desc store = {{table, rows, 0, 0, 0, 0, 0},
                                     {NULL, 0, 0, 0, 0, 0, 0},
                                     {input, 8, 0, 0, 0, 0, 0},
                                     {NULL, 0, 0, 0, 0, 0, 0},
                                     3,
                                     0,
                                     index,
                                     KVPRIM_I64,
                                     0,
                                     8,
                                     &rejected};
    CHECK(kvprim_store(&store) == KVPRIM_OK && rejected == 3);
    const kvprim_gather_desc gather = {
        {output, 8, 0, 0, 0, 0, 0}, {table, rows, 0, 0, 0, 0, 0}, 3, index, KVPRIM_I64, 0, 8, &rejected};
    CHECK(kvprim_gather(&gather) == KVPRIM_OK && rejected == 6);
    for (int i = 0; i < 8; i++)
        for (int b = 0; b < 3; b++) {
            const int in_range = index[i] >= 0 && index[i] < rows;
            CHECK(output[i][b] == (in_range ? input[i][b] : 0));
            CHECK(!in_range || table[(size_t)index[i] * 3 + (size_t)b] == input[i][b]);
        }
    munmap(table, bytes);
}

/* A store into the last row before a page that must not be touched, and a gather from it. */
static void test_rows_guard_pages(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int64_t row_bytes = 1; row_bytes <= 300; row_bytes++) {
        char *const cache = guarded(1), *const input = guarded(1);
        const int64_t rows = (int64_t)page / row_bytes;
        const int32_t slots[] = {(int32_t)rows - 1, 0, -1, (int32_t)rows};
        const kvprim_table cache_table = {cache + page - rows * row_bytes, rows, 0, 0, 0, 0, 0};
        const kvprim_table input_table = {input + page - 4 * row_bytes, 4, 0, 0, 0, 0, 0};
        kvprim_store_desc store = {cache_table, {NULL, 0, 0, 0, 0, 0, 0},
                                   input_table, {NULL, 0, 0, 0, 0, 0, 0},
                                   row_bytes,   0,
                                   slots,       KVPRIM_I32,
                                   0,           4,
                                   NULL};
        kvprim_gather_desc gather = {input_table, cache_table, row_bytes, slots, KVPRIM_I32, 0, 4, NULL};
        CHECK(kvprim_store(&store) == KVPRIM_OK && kvprim_gather(&gather) == KVPRIM_OK);
        store.k_cache.data = cache; /* and the first rows right behind a guard */
        store.k.data = gather.dst.data = input;
        gather.src.data = cache;
        CHECK(kvprim_store(&store) == KVPRIM_OK && kvprim_gather(&gather) == KVPRIM_OK);
        munmap(cache - page, 3 * page);
        munmap(input - page, 3 * page);
    }
}
#endif

/* What depends on the instruction set. */
static void run_for_isa(void)
{
    printf("on %s:\n", kvprim_isa());
    run("prefix: lengths x alignments x places", test_prefix_everywhere);
    run("prefix: blocks", test_prefix_blocks);
    run("prefix: unequal lengths, int64", test_prefix_lengths_and_i64);
    run("prefix: long arrays", test_prefix_large);
    run("prefix: NULL, pages", test_prefix_null_and_pages);
    run("prefix: many keys", test_prefix_many);
    run("gather", test_gather);
    run("store", test_store);
    run("transfer", test_transfer);
    run("transfer: inside one cache", test_same_cache);
    run("rows: streaming", test_streaming);
#if !defined(_WIN32)
    run("prefix: guard pages", test_prefix_guard_pages);
    run("rows: guard pages", test_rows_guard_pages);
#endif
}

int main(void)
{
#if !defined(_WIN32)
    run("threads race to the first call", test_threads);
    run("rows: past 4 GiB and 2^31", test_large_table);
#else
    printf("skip threads, guard pages, large tables: no POSIX threads and mmap here\n");
    skipped++;
#endif
    run("status", test_status);
    run("table: defaults", test_defaults);
    run("sizes: products that do not wrap", test_products);
    run("gather: bad descriptors", test_gather_errors);
    run("store: K and V interleaved", test_store_interleaved);
    run("store: bad descriptors", test_store_errors);
    run("transfer: bad descriptors", test_transfer_errors);
    run("unpack", test_unpack);
    run("unpack: bad descriptors", test_unpack_errors);
    run("unpack: over its descriptor", test_unpack_over_descriptor);
    run_for_isa();
#ifdef KVPRIM_X86
    if (kvpi_has_avx512()) { /* and as on a processor with less */
        kvpi_inline_end = 0;
        kvpi_prefix = kvprim_prefix_i32_avx2;
        run_for_isa();
    }
    if (kvpi_has_avx2()) {
        kvpi_prefix = kvprim_prefix_i32_scalar;
        run_for_isa();
    }
#endif
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

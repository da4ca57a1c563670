/* SPDX-License-Identifier: MIT */
/* Tests of kvprim.h. They compute what they expect from the contracts, byte by byte, not with the code under test.

       cc -O2 -I. tests/core/test_kvprim.c -lpthread && ./a.out */
#if !defined(_WIN32)
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include <stdlib.h>
#include <time.h>
#if !defined(_WIN32)
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

/* ---- harness ---- */

static int passed, failed, skipped, failures; /* failures: in the test that runs now */

/* Prints like printf and fails the test. Only a test's first few failures are printed. */
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
/* Clears the text first, so that an older one cannot pass for this call's. */
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

_Static_assert(KVPRIM_VERSION == KVPRIM_VERSION_MAJOR * 10000 + KVPRIM_VERSION_MINOR * 100 + KVPRIM_VERSION_PATCH,
               "one number for a version");
_Static_assert(KVPRIM_I32 == 1 && KVPRIM_I64 == 2 && KVPRIM_F16 >= 16, "no element type is taken for an index type");

/* Bindings compare these. */
static void test_version_and_sizes(void)
{
    CHECK(kvprim_version() == KVPRIM_VERSION);
    CHECK(kvprim_sizeof("kvprim_table") == sizeof(kvprim_table));
    CHECK(kvprim_sizeof("kvprim_gather_desc") == sizeof(kvprim_gather_desc));
    CHECK(kvprim_sizeof("kvprim_store_desc") == sizeof(kvprim_store_desc));
    CHECK(kvprim_sizeof("kvprim_transfer_desc") == sizeof(kvprim_transfer_desc));
    CHECK(kvprim_sizeof("kvprim_unpack_desc") == sizeof(kvprim_unpack_desc));
    CHECK(kvprim_sizeof("kvprim_fragment") == sizeof(kvprim_fragment));
    CHECK(kvprim_sizeof("kvprim_move") == sizeof(kvprim_move));
    CHECK(kvprim_sizeof("kvprim") == 0 && kvprim_sizeof("") == 0);
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

/* An error of kvprim_prefix_many_i32. */
#define EXPECT_PREFIX_ERROR(call, words)                                                                               \
    EXPECT_ERROR((call) == KVPRIM_PREFIX_ERROR ? KVPRIM_ERROR_NULL : KVPRIM_OK, KVPRIM_ERROR_NULL, words)

enum { longest = 300, step_i32 = 16 };

/* Compares lengths 0 to 300 at all alignments of both arrays in a cache line. The arrays differ at each place in turn, or
   nowhere. */
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

/* Does the same for arrays long enough that whole blocks are compared: lengths around the ends of blocks, and every 11th
   place. */
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
        if (b_len > 0 && round % 4 != 0) /* in either half of an int64 */
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
    EXPECT_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, keys, lens, 2, out), "keys[1] is NULL and its length is 2");
    EXPECT_PREFIX_ERROR(kvprim_prefix_many_i32(NULL, 3, keys, lens, 1, out), "query is NULL, query_len is 3");
    EXPECT_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, NULL, lens, 1, out), "keys is NULL");
    EXPECT_PREFIX_ERROR(kvprim_prefix_many_i32(a, 3, keys, NULL, 1, out), "key_lens is NULL");
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
    EXPECT_PREFIX_ERROR(kvprim_prefix_many_i32(query, 3, keys, lens, 4, out), "keys[3] is NULL and its length is 1");
    CHECK(out[0] == 77);
}

static void test_prefix_many(void)
{
    enum { n_keys = 200 };
    static int32_t query[longest], memory[n_keys][longest];
    const int32_t *keys[n_keys];
    size_t lens[n_keys], out[n_keys];
    for (int round = 0; round < 300; round++) {
        const size_t query_len = random_u64() % longest, span = round % 3 == 0 ? longest : 24;
        size_t best = KVPRIM_PREFIX_NONE, best_len = 0;
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
    variant v[8];
    const int n_variants = variants(v);
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    char *const a = guarded(1), *const b = guarded(1);
    size_t out;
    for (size_t i = 0; i < bytes / 4; i++)
        ((int32_t *)(void *)a)[i] = ((int32_t *)(void *)b)[i] = 7;
    /* a ends `gap` bytes before the end of its page, or starts `gap` bytes after its start; b ends with its page */
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
            CHECK(kvprim_prefix_many_i32(a_end, n, &b_end, &n, 1, &out) == (n ? 0 : KVPRIM_PREFIX_NONE) && out == n);
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

/* ---- rows: the contract, byte by byte ---- */

/* Rows follow each other without a gap. Every other field is zero. */
static kvprim_table table_of(void *data, int64_t rows)
{
    kvprim_table t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.rows = rows;
    return t;
}

static kvprim_table strided(void *data, int64_t rows, int64_t stride)
{
    kvprim_table t = table_of(data, rows);
    t.stride = stride;
    return t;
}

static kvprim_table paged(void *data, int64_t rows, int64_t page_rows, int64_t page_stride)
{
    kvprim_table t = table_of(data, rows);
    t.page_rows = page_rows;
    t.page_stride = page_stride;
    return t;
}

/* Finds byte `byte` of row `row` of a table with every field given. */
static unsigned char *at(const kvprim_table *t, int64_t row_bytes, int64_t row, int64_t byte)
{
    const int64_t heads = t->heads > 1 ? t->heads : 1, piece = row_bytes / heads;
    int64_t offset =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    offset += byte / piece * t->head_stride + byte % piece;
    return (unsigned char *)t->data + offset;
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
    for (size_t i = 0; i < m->size; i++)
        if (m->bytes[i] != m->reference[i]) {
            const long long offset = (long long)i - ((unsigned char *)m->t.data - m->bytes);
            FAIL("%s: byte %lld of the table: got %02x, expected %02x", what, offset, m->bytes[i], m->reference[i]);
            return;
        }
}

/* The layout of a test's table: padded or not, in pages or not, head-major or not. */
typedef struct layout {
    const char *name;
    int64_t pad, page_rows, page_pad;
    int32_t heads;
} layout;

static const layout layouts[] = {{"packed", 0, 0, 0, 0},        {"strided", 24, 0, 0, 0},   {"paged", 0, 16, 0, 0},
                                 {"padded pages", 7, 5, 33, 0}, {"HND pages", 0, 16, 0, 4}, {"HND padded", 3, 4, 11, 2},
                                 {"HND unpaged", 0, 0, 0, 4}};
enum { n_layouts = sizeof layouts / sizeof *layouts };

/* Returns the layout's table with every field filled in, and how many bytes it spans. */
static kvprim_table lay_out(const layout *l, int64_t rows, int64_t row_bytes, size_t *span)
{
    kvprim_table t = paged(NULL, rows, l->page_rows, 0);
    t.heads = row_bytes % 4 == 0 ? l->heads : 0;
    const int64_t heads = t.heads > 1 ? t.heads : 1, in_page = t.page_rows ? t.page_rows : rows;
    t.stride = row_bytes / heads + l->pad;
    t.head_stride = heads > 1 ? in_page * t.stride : 0;
    t.page_stride = t.page_rows ? heads * in_page * t.stride + l->page_pad : 0;
    *span = (size_t)(t.page_rows ? (rows + in_page - 1) / in_page * t.page_stride : heads * in_page * t.stride);
    return t;
}

/* The same indices in both types. */
typedef struct index_list {
    kvprim_index_type type;
    int32_t i32[64];
    int64_t i64[64];
} index_list;

static const void *index_data(const index_list *list)
{
    return list->type == KVPRIM_I64 ? (const void *)list->i64 : (const void *)list->i32;
}

/* Fills in rows, padding, indices past the end, and indices far out, all relative to base. */
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

/* The index rule as the contract states it: returns the row, -1 for padding, or -2 past the end. */
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
    const kvprim_gather_desc d = {.dst = dst.t,
                                  .src = src.t,
                                  .row_bytes = row_bytes,
                                  .index = index_data(&index),
                                  .index_type = type,
                                  .index_base = base,
                                  .count = count,
                                  .rejected = &rejected};
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
    memory input = make(strided(NULL, count, token), (size_t)(count * token), align / 2);
    kvprim_table v_input = input.t;
    v_input.data = (char *)input.t.data + k_bytes;
    index_list slot = {type, {0}, {0}};
    fill_index(&slot, count, base, rows);
    for (int i = 0; i < count; i++) /* those in range are distinct */
        if (ruled(slot.i64[i], base, rows) >= 0)
            slot.i32[i] = (int32_t)(slot.i64[i] = base + (i * 17 + 3) % rows);
    uint32_t rejected = 0, want_rejected = 0;
    kvprim_store_desc d = {.k_cache = k_cache.t,
                           .k = input.t,
                           .k_bytes = k_bytes,
                           .slot = index_data(&slot),
                           .slot_type = type,
                           .slot_base = base,
                           .count = count,
                           .rejected = &rejected};
    if (with_v)
        d.v_cache = v_cache.t, d.v = v_input, d.v_bytes = v_bytes;
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
    const kvprim_store_desc d = {.k_cache = paged(cache, rows, page_rows, page_stride),
                                 .v_cache = paged(cache + page_rows * row_bytes, rows, page_rows, page_stride),
                                 .k = table_of(input[0], count),
                                 .v = table_of(input[1], count),
                                 .k_bytes = row_bytes,
                                 .v_bytes = row_bytes,
                                 .slot = slot,
                                 .slot_type = KVPRIM_I32,
                                 .count = count};
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
    kvprim_transfer_desc d = {.dst = dst.t,
                              .src = src.t,
                              .dst_layers = pointers & 1 ? dst_layers : NULL,
                              .src_layers = pointers & 2 ? src_layers : NULL,
                              .dst_layer_stride = pointers & 1 ? 0 : dst_step,
                              .src_layer_stride = pointers & 2 ? 0 : src_step,
                              .layers = layers,
                              .row_bytes = row_bytes,
                              .dst_index = indexed & 1 ? to.i32 : NULL,
                              .src_index = indexed & 2 ? from.i32 : NULL,
                              .index_type = KVPRIM_I32,
                              .count = count,
                              .rejected = &rejected};
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

/* Zero fields stand for their defaults, for every layout without padding. */
static void test_defaults(void)
{
    for (int l = 0; l < n_layouts; l++) {
        if (layouts[l].pad || layouts[l].page_pad)
            continue;
        size_t span;
        const kvprim_table want = lay_out(&layouts[l], 32, 64, &span);
        kvprim_table zeros = paged(NULL, 32, layouts[l].page_rows, 0);
        zeros.heads = layouts[l].heads;
        zeros.head_stride = want.head_stride; /* has no default */
        const kvprim_table got = kvprim_table_resolve(zeros, 64);
        CHECK(got.stride == want.stride && got.page_stride == want.page_stride && got.head_stride == want.head_stride);
        CHECK(got.heads == (want.heads ? want.heads : 1));
    }
    kvprim_table inside = strided(NULL, 32, 64); /* heads inside the row */
    inside.page_rows = 8;
    inside.heads = 4;
    inside.head_stride = 16;
    CHECK(kvprim_table_resolve(inside, 64).page_stride == 8 * 64);
    inside.stride = 0;
    CHECK(kvprim_table_resolve(inside, 64).stride == 64);
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
        const kvprim_unpack_desc d = {
            .src = src, .src_bytes = src_bytes, .dst = dst, .dst_bytes = dst_bytes, .fragments = f, .count = n};
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
    dst.d = (kvprim_unpack_desc){
        .src = src, .src_bytes = sizeof src, .dst = &dst, .dst_bytes = sizeof dst, .fragments = f, .count = 2};
    CHECK(kvprim_unpack(&dst.d) == KVPRIM_OK);
    CHECK(memcmp(dst.bytes, src + half, half) == 0 && memcmp(dst.bytes + half, src, half) == 0);
}

static void test_unpack_errors(void)
{
    unsigned char src[64], dst[64], want[64];
    memset(dst, 1, sizeof dst);
    memcpy(want, dst, sizeof dst);
    kvprim_fragment f[2] = {{0, 0, 8}, {60, 0, 8}};
    kvprim_unpack_desc d = {.src = src, .src_bytes = 64, .dst = dst, .dst_bytes = 64, .fragments = f, .count = 2};
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
    f[1] = (kvprim_fragment){UINT64_MAX / 2, UINT64_MAX / 2, UINT64_MAX / 2}; /* only their sum is out of range */
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

/* Returns an address where a counter could lie by mistake. */
static uint32_t *counter_at(void *block, size_t offset)
{
    return (uint32_t *)(void *)((char *)block + offset);
}

static void test_gather_errors(void)
{
    static _Alignas(16) unsigned char dst[4096], src[4096], want[4096];
    int32_t index[4] = {0, 1, 2, 3};
    const kvprim_gather_desc good = {.dst = table_of(dst, 4),
                                     .src = table_of(src, 8),
                                     .row_bytes = 128,
                                     .index = index,
                                     .index_type = KVPRIM_I32,
                                     .count = 4};
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
    BAD(index_type = (kvprim_index_type)0, KVPRIM_ERROR_ARGUMENT, "index_type is 0");
    BAD(index_stride = -1, KVPRIM_ERROR_SIZE, "index_stride is -1");
    BAD(index_stride = INT64_MAX, KVPRIM_ERROR_SIZE, "index_stride is 9223372036854775807");
    BAD(src.rows = 0, KVPRIM_ERROR_SIZE, "src.rows is 0");
    BAD(src.heads = 2, KVPRIM_ERROR_SIZE, "src.head_stride is 0, less than the bytes of one head, 64");
    BAD(src.page_rows = 8; d.src.page_stride = 127, KVPRIM_ERROR_SIZE, "src.page_stride is 127, less than a row's");
    BAD(src.bytes = -1, KVPRIM_ERROR_SIZE, "src.bytes is -1");
    BAD(reserved = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_gather: a reserved field");
    BAD(reserved_index = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_gather: a reserved field");
    BAD(src.reserved_heads = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field of src");
    BAD(dst.reserved[1] = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field of dst");
    BAD(rejected = counter_at(index, 2), KVPRIM_ERROR_ARGUMENT, "rejected (");
    BAD(rejected = counter_at(dst, 508), KVPRIM_ERROR_OVERLAP, "rejected (");
    BAD(rejected = counter_at(src, 1020), KVPRIM_ERROR_OVERLAP, "rejected (");
    BAD(rejected = counter_at(index, 12), KVPRIM_ERROR_OVERLAP, "rejected (");
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
    d = good; /* the last of the indices, which lie apart, is in dst */
    d.index = dst + 1024;
    d.dst.data = dst + 1024 + 4 * 90;
    d.index_stride = 30;
    EXPECT_ERROR(kvprim_gather(&d), KVPRIM_ERROR_OVERLAP, "index (");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    memset(&d, 0, sizeof d);
    d.reserved = d.row_bytes = d.src.rows = -1;
    CHECK(kvprim_gather(&d) == KVPRIM_OK); /* count 0 */
    d = good;
    d.src.rows = 0;
    d.src.data = NULL; /* an empty shard: every index is past it */
    uint32_t rejected = 0;
    d.rejected = &rejected;
    CHECK(kvprim_gather(&d) == KVPRIM_OK && rejected == 4 && dst[0] == 0 && dst[511] == 0);
    d = good; /* an empty table has no layout to get wrong */
    d.src = table_of(NULL, 0);
    d.src.heads = 4;
    d.src.head_stride = 32;
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    d = good; /* one table starts where the other's partial last page ends: no overlap */
    d.src = paged(src, 5, 4, 0);
    d.dst.data = src + 5 * 128;
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    d = good; /* dst begins right after the last of the indices, which lie two apart */
    memset(src, 0, sizeof src);
    d.src.data = dst;
    d.dst.data = src + 28;
    d.index = src;
    d.index_stride = 2;
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    d.dst.data = src + 27;
    EXPECT_ERROR(kvprim_gather(&d), KVPRIM_ERROR_OVERLAP, "index (");
    d = good;
    d.count = 1;
    d.index_stride = KVPRIM_MAX_INDEX_STRIDE;
    CHECK(kvprim_gather(&d) == KVPRIM_OK);
    d.index_stride++;
    EXPECT_ERROR(kvprim_gather(&d), KVPRIM_ERROR_SIZE, "index_stride is 268435457");
}

static void test_store_errors(void)
{
    static _Alignas(16) unsigned char cache[2][2048], input[2][1024], want[2][2048];
    int64_t slot[2] = {1, 3};
    const kvprim_store_desc good = {.k_cache = table_of(cache[0], 8),
                                    .v_cache = table_of(cache[1], 8),
                                    .k = table_of(input[0], 2),
                                    .v = table_of(input[1], 2),
                                    .k_bytes = 64,
                                    .v_bytes = 32,
                                    .slot = slot,
                                    .slot_type = KVPRIM_I64,
                                    .count = 2};
    kvprim_store_desc d;
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    EXPECT_ERROR(kvprim_store(NULL), KVPRIM_ERROR_NULL, "kvprim_store: desc is NULL");
#define BAD(change, status, words)                                                                                     \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    EXPECT_ERROR(kvprim_store(&d), status, words)
    BAD(slot = NULL, KVPRIM_ERROR_NULL, "slot is NULL");
    BAD(slot = (const char *)slot + 4, KVPRIM_ERROR_ARGUMENT, "slot (");
    BAD(slot_type = (kvprim_index_type)-1, KVPRIM_ERROR_ARGUMENT, "slot_type is -1");
    BAD(k_cache.data = NULL, KVPRIM_ERROR_NULL, "k_cache.data is NULL");
    BAD(v.data = NULL, KVPRIM_ERROR_NULL, "v.data is NULL");
    BAD(v_bytes = 0, KVPRIM_ERROR_SIZE, "v_bytes is 0");
    BAD(k.rows = 1, KVPRIM_ERROR_SIZE, "k.rows is 1, less than count, which is 2");
    BAD(v_cache.rows = 7, KVPRIM_ERROR_SIZE, "v_cache.rows is 7, but k_cache.rows is 8");
    BAD(v_cache.rows = 9, KVPRIM_ERROR_SIZE, "v_cache.rows is 9, but k_cache.rows is 8");
    BAD(v.stride = 31, KVPRIM_ERROR_SIZE, "v.stride is 31");
    BAD(count = INT64_MIN, KVPRIM_ERROR_SIZE, "count is -9223372036854775808");
    BAD(v.data = cache[0] + 100, KVPRIM_ERROR_OVERLAP, "k_cache");
    BAD(k.data = cache[1] + 100, KVPRIM_ERROR_OVERLAP, "v_cache");
    BAD(k.data = cache[0], KVPRIM_ERROR_OVERLAP, "k_cache");
    BAD(v_cache.data = cache[0] + 63, KVPRIM_ERROR_OVERLAP, "v_cache");
    BAD(slot_type = (kvprim_index_type)0, KVPRIM_ERROR_ARGUMENT, "slot_type is 0");
    BAD(slot_stride = -3, KVPRIM_ERROR_SIZE, "slot_stride is -3");
    BAD(k_cache.rows = 0, KVPRIM_ERROR_SIZE, "k_cache.rows is 0");
    BAD(v_cache.heads = 4, KVPRIM_ERROR_SIZE, "v_cache.head_stride is 0");
    BAD(v_cache.data = NULL, KVPRIM_ERROR_NULL, "v_cache.data is NULL");
    BAD(reserved = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_store: a reserved field");
    BAD(reserved_slot = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_store: a reserved field");
    BAD(v.reserved[0] = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field of v");
    BAD(rejected = counter_at(slot, 2), KVPRIM_ERROR_ARGUMENT, "rejected (");
    BAD(rejected = counter_at(slot, 12), KVPRIM_ERROR_OVERLAP, "rejected (");
    BAD(rejected = counter_at(cache[0], 508), KVPRIM_ERROR_OVERLAP, "k_cache");
    BAD(rejected = counter_at(cache[1], 252), KVPRIM_ERROR_OVERLAP, "v_cache");
    BAD(rejected = counter_at(input[0], 124), KVPRIM_ERROR_OVERLAP, "k (");
    BAD(rejected = counter_at(input[1], 60), KVPRIM_ERROR_OVERLAP, "v (");
    d.rejected = NULL; /* half of V */
    BAD(v_cache = table_of(NULL, 0), KVPRIM_ERROR_NULL, "v_cache.data is NULL");
    d.v = table_of(NULL, 0);
    EXPECT_ERROR(kvprim_store(&d), KVPRIM_ERROR_NULL, "v_cache.data is NULL");
    d.v = good.v;
    d.v_bytes = 0;
    EXPECT_ERROR(kvprim_store(&d), KVPRIM_ERROR_NULL, "v_cache.data is NULL");
#undef BAD
    uint32_t rejected = 0;
    d = good; /* an empty shard: no slot lies in it */
    d.k_cache = d.v_cache = table_of(NULL, 0);
    d.rejected = &rejected;
    CHECK(kvprim_store(&d) == KVPRIM_OK && rejected == 2);
    CHECK(memcmp(cache, want, sizeof cache) == 0);
    memset(&d, 0, sizeof d);
    CHECK(kvprim_store(&d) == KVPRIM_OK);
}

static void test_transfer_errors(void)
{
    static _Alignas(16) unsigned char dst[4096], src[4096], want[4096];
    int32_t index[2] = {1, 3};
    void *const dst_layers[2] = {dst, dst + 2048}, *const src_layers[2] = {src, src + 512};
    void *const null_layers[2] = {src, NULL}, *const none[2] = {NULL, NULL};
    void *const mixed[2] = {src, dst + 100}, *const twice[2] = {dst, dst};
    const kvprim_transfer_desc good = {.dst = table_of(dst, 8),
                                       .src = table_of(src, 8),
                                       .layers = 2,
                                       .row_bytes = 64,
                                       .dst_index = index,
                                       .src_index = index,
                                       .index_type = KVPRIM_I32,
                                       .count = 2};
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
    BAD(count = INT64_MAX, KVPRIM_ERROR_SIZE, "kvprim_transfer: count is 9223372036854775807, which makes dst_index");
    BAD(count = (int64_t)1 << 60, KVPRIM_ERROR_SIZE, "count is 1152921504606846976, which makes dst_index");
    BAD(dst_index = NULL; d.dst.rows = d.count = (int64_t)1 << 50; d.dst.bytes = 0;
        d.src_index_stride = 1 << 28, KVPRIM_ERROR_SIZE, "which makes src_index");
    BAD(dst.heads = 2; d.dst.head_stride = 32; d.dst.page_rows = 4;
        d.dst.page_stride = 31, KVPRIM_ERROR_SIZE, "dst.page_stride is 31, less than the bytes of one head, 32");
    BAD(src_layers = mixed, KVPRIM_ERROR_OVERLAP, "overlaps");
    BAD(dst_layer_stride = 500, KVPRIM_ERROR_SIZE,
        "kvprim_transfer: dst_layer_stride is 500, but what lies inside that step takes bytes: 512");
    BAD(src_layer_stride = -8, KVPRIM_ERROR_SIZE, "src_layer_stride is -8");
    BAD(index_type = (kvprim_index_type)3, KVPRIM_ERROR_ARGUMENT, "index_type is 3");
    BAD(src.data = dst + 1000, KVPRIM_ERROR_OVERLAP, "overlaps"); /* dst's second layer */
    BAD(src.data = NULL, KVPRIM_ERROR_NULL, "src.data is NULL");
    BAD(dst.heads = 5, KVPRIM_ERROR_SIZE, "dst.heads is 5");
    BAD(same_cache = 2, KVPRIM_ERROR_ARGUMENT, "same_cache is 2");
    BAD(same_cache = -1, KVPRIM_ERROR_ARGUMENT, "same_cache is -1");
    BAD(same_cache = 1, KVPRIM_ERROR_ARGUMENT, "same_cache is 1, but layer 0 is at");
    BAD(index_type = (kvprim_index_type)0, KVPRIM_ERROR_ARGUMENT, "index_type is 0");
    BAD(src_index_type = (kvprim_index_type)3, KVPRIM_ERROR_ARGUMENT, "src_index_type is 3");
    BAD(dst_index_stride = -1, KVPRIM_ERROR_SIZE, "dst_index_stride is -1");
    BAD(src.rows = 0, KVPRIM_ERROR_SIZE, "src.rows is 0");
    BAD(src = table_of(NULL, 0); d.src_layers = src_layers, KVPRIM_ERROR_SIZE, "src.rows is 0");
    BAD(src = table_of(NULL, 0); d.src_layers = none, KVPRIM_ERROR_SIZE, "src.rows is 0");
    BAD(dst.heads = 2, KVPRIM_ERROR_SIZE, "dst.head_stride is 0");
    BAD(reserved = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_transfer: a reserved field");
    BAD(reserved_index = 1, KVPRIM_ERROR_ARGUMENT, "kvprim_transfer: a reserved field");
    BAD(layers = 65537, KVPRIM_ERROR_SIZE, "layers is 65537");
    BAD(layers = INT32_MAX, KVPRIM_ERROR_SIZE, "layers is 2147483647");
    BAD(dst_layers = twice, KVPRIM_ERROR_OVERLAP, "layer of dst");
    BAD(dst_layers = dst_layers; d.dst_layer_stride = 2048, KVPRIM_ERROR_ARGUMENT, "dst_layer_stride");
    BAD(src_layers = src_layers; d.src_layer_stride = 512, KVPRIM_ERROR_ARGUMENT, "src_layer_stride");
    BAD(rejected = counter_at(index, 2), KVPRIM_ERROR_ARGUMENT, "rejected (");
    BAD(rejected = counter_at(index, 4), KVPRIM_ERROR_OVERLAP, "rejected (");
    BAD(rejected = counter_at(dst, 1020), KVPRIM_ERROR_OVERLAP, "dst"); /* in the second layer */
    BAD(rejected = counter_at(src, 512), KVPRIM_ERROR_OVERLAP, "src");
    BAD(src.data = dst, KVPRIM_ERROR_OVERLAP, "to copy rows inside one cache set same_cache");
    BAD(src.data = dst, KVPRIM_ERROR_OVERLAP, "dst layer 0");
#undef BAD
    d.same_cache = 1; /* except for what changes here it is one cache now */
    d.src.page_rows = 4;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.page_rows is 0 and src.page_rows 4");
    d.dst.page_rows = 4;
    d.src.page_stride = 300;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.page_stride is 256 and src.page_stride 300");
    d.dst = d.src = table_of(dst, 8);
    d.src.stride = 72;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.stride is 64 and src.stride 72");
    d.src.stride = 64;
    d.src.heads = 2;
    d.src.head_stride = 1024;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.heads is 1 and src.heads 2");
    d.dst = d.src;
    d.dst.head_stride = 512;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.head_stride is 512 and src.head_stride 1024");
    d.dst = d.src = table_of(dst, 8);
    d.src_layer_stride = 1024;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "layer 1 is at");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    d = good;
    d.dst.data = NULL; /* the layers' pointers are enough */
    d.dst_layers = dst_layers;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 2048 + 192, src + 512 + 192, 64) == 0);
    d.dst.bytes = 512; /* each of them has memory of its own */
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    d.dst.bytes = 511;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "dst.bytes is 511");
    d = good; /* an empty table: its layer stride leads nowhere */
    d.dst = table_of(NULL, 0);
    d.dst_layer_stride = INT64_MAX;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    d = good; /* the indices lie in the second layer of dst */
    d.dst_index = d.src_index = (const int32_t *)(const void *)(dst + 512);
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "dst_index (");
    d = good; /* layers of both sides alternate: [layer][src or dst][row] */
    d.src.data = dst + 512;
    d.dst_layer_stride = d.src_layer_stride = 1024;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(dst + 1024 + 192, dst + 1536 + 192, 64) == 0);
    d.src.data = dst + 511;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "dst layer 0");
    d.src.data = dst + 513;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "dst layer 1");
    memset(&d, 0, sizeof d);
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
}

/* Copies pages inside one cache whose layers have pointers. One source is copied twice, one index is padding. */
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
    d.index_type = KVPRIM_I32;
    d.count = 5;
    d.rejected = &rejected;
    d.same_cache = 1;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(cache, want, sizeof cache) == 0 && rejected == 1);
}

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
        kvprim_transfer_desc d = {.dst = table_of(other, bytes_rows),
                                  .src = table_of(other, bytes_rows),
                                  .layers = layers,
                                  .row_bytes = bytes_of_row,
                                  .src_index = index,
                                  .index_type = KVPRIM_I32,
                                  .count = 1};
        kvprim_table *const told = dst ? &d.dst : &d.src;
        *told = *t;
        told->bytes = reach + (layers - 1) * step - missing;
        *(dst ? &d.dst_layer_stride : &d.src_layer_stride) = step;
        if (missing > 0)
            EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, dst ? "dst.bytes is" : "src.bytes is");
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
    t = paged(block, bytes_rows, 4, 64); /* the rows of all pages in turn: the first page ends last */
    t.stride = 512;
    one_bytes(&t, block + 16384, 2048);
}

/* What a table reaches and how far apart its layers are, if its last page is not full. */
static void test_partial_pages(void)
{
    static unsigned char to[16384], from[4096];
    kvprim_transfer_desc d = {
        .dst = paged(to, 5, 4, 0), .src = table_of(from, 5), .layers = 2, .row_bytes = 64, .count = 5};
    kvprim_transfer_desc resolved;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 2 * 4 * 64);
    d.dst = paged(to, 4, 100, 256), d.count = 4; /* less than one page */
    d.dst_layer_stride = 256;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(to, from, 512) == 0);
    /* Pages inside the rows' stride: the first one, which is whole, reaches further than the last row. */
    d.dst = paged(to, 5, 4, 1024), d.dst.stride = 4096, d.dst.bytes = 3 * 4096 + 512;
    d.row_bytes = 512, d.layers = 1, d.count = 5, d.dst_layer_stride = 0;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    d.dst.bytes--;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "dst.bytes is 12799");
}

/* ---- many layers ---- */

/* The order of an array of layers. */
enum { most_layers = 65536, layer_bytes = 16, ascending = 0, descending, shuffled, orders };

static void order_layers(void **layers, unsigned char *first, size_t step, int order)
{
    for (size_t l = 0; l < most_layers; l++)
        layers[l] = first + step * (order == descending ? most_layers - 1 - l : l);
    for (size_t l = most_layers; order == shuffled && l > 1; l--) {
        const size_t other = random_u64() % l;
        void *const layer = layers[l - 1];
        layers[l - 1] = layers[other];
        layers[other] = layer;
    }
}

static kvprim_transfer_desc many_layers(void *const *dst, void *const *src)
{
    const kvprim_transfer_desc d = {.dst = table_of(NULL, 1),
                                    .src = table_of(NULL, 1),
                                    .dst_layers = dst,
                                    .src_layers = src,
                                    .layers = most_layers,
                                    .row_bytes = layer_bytes,
                                    .count = 1};
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
        FAIL("the check of %d layers takes %.1f s, orders %d and %d", most_layers, seconds, dst_order, src_order);
    void *const last = dst[most_layers - 1], *const first = dst[0];
    dst[most_layers - 1] = (unsigned char *)last + 1; /* into the layer of src after it */
    EXPECT_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer 65535");
    dst[most_layers - 1] = first;
    EXPECT_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "layer of dst");
    dst[most_layers - 1] = last;
    const size_t later = last == memory_of ? 0 : most_layers - 1; /* has a layer of src before it */
    void *const was = dst[later];
    dst[later] = (unsigned char *)was - 1;
    EXPECT_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer");
    dst[later] = was;
    void *const some = src[most_layers / 3];
    src[most_layers / 3] = (unsigned char *)first + layer_bytes - 1;
    EXPECT_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "dst layer 0 (");
    src[most_layers / 3] = some;
}

static void test_many_layers(void)
{
    unsigned char *const memory_of = allocate((size_t)2 * layer_bytes * most_layers + layer_bytes);
    void **const dst = allocate(most_layers * sizeof *dst), **const src = allocate(most_layers * sizeof *src);
    for (int order = 0; order < orders * orders; order++)
        one_layer_order(memory_of, dst, src, order % orders, order / orders);
    kvprim_transfer_desc d = many_layers(dst, src);
    fill(memory_of, (size_t)2 * layer_bytes * most_layers);
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    for (size_t l = 0; l < most_layers; l++)
        CHECK(memcmp(dst[l], src[l], layer_bytes) == 0);
    d.src.rows = (int64_t)1 << 50; /* each layer of an array is a table of its own, in size as well */
    d.src.page_rows = 4;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.layers = most_layers + 1;
    EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "layers is 65537");
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
    kvprim_transfer_desc d = {.dst = table_of(NULL, 1),
                              .src = table_of(src, 1),
                              .dst_layers = layers,
                              .layers = n,
                              .row_bytes = 1,
                              .count = 1};
    for (int order = 0; order < 2; order++) {
        for (int l = 0; l < n; l++)
            layers[l] = dst + (order ? n - 1 - l : l);
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        for (int k = 0; k < 100; k++) {
            void **const place = &layers[places[k % 10]], *const was = *place;
            *place = layers[places[k / 10]];
            if (k % 10 != k / 10)
                EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "layer of dst");
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
    for (int side = 0; side < 2; side++) {
        uint32_t rejected = 7;
        kvprim_transfer_desc d = {.dst = table_of(side ? byte : NULL, side),
                                  .src = table_of(side ? NULL : byte, !side),
                                  .layers = most_layers,
                                  .row_bytes = 1,
                                  .dst_index = index,
                                  .src_index = index,
                                  .index_type = KVPRIM_I32,
                                  .count = count,
                                  .rejected = &rejected};
        for (int i = 0; i < count; i++)
            index[i] = i % 3 - 1; /* -1; 0 and 1, which are past one side or both */
        const clock_t start = clock();
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 1);
        CHECK(rejected == 7 + count / 3 * 2);
        d.count = 3;
        d.layers = most_layers + 1;
        EXPECT_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "layers is 65537");
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
    kvprim_table t = paged(data, c->rows, c->page_rows, c->page_stride);
    t.stride = c->stride;
    t.heads = c->heads;
    t.head_stride = c->head_stride;
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
    const kvprim_store_desc d = {.k_cache = pair_table(c, cache + middle),
                                 .v_cache = pair_table(c, cache + middle + c->delta),
                                 .k = table_of(input[0], c->rows),
                                 .v = table_of(input[1], c->rows),
                                 .k_bytes = c->k_bytes,
                                 .v_bytes = c->v_bytes,
                                 .slot = slot,
                                 .slot_type = KVPRIM_I32,
                                 .count = c->rows};
    const kvprim_status status = kvprim_store(&d);
    if (status != (c->legal ? KVPRIM_OK : KVPRIM_ERROR_OVERLAP))
        FAIL("%s: %s (%s)", c->name, kvprim_status_name(status), kvprim_last_error());
    for (int64_t i = 0; c->legal && i < c->rows; i++) {
        for (int64_t b = 0; b < c->k_bytes; b++)
            if (*at(&d.k_cache, c->k_bytes, i, b) != input[0][i * c->k_bytes + b])
                FAIL("%s: K row %lld byte %lld", c->name, (long long)i, (long long)b);
        for (int64_t b = 0; b < c->v_bytes; b++)
            if (*at(&d.v_cache, c->v_bytes, i, b) != input[1][i * c->v_bytes + b])
                FAIL("%s: V row %lld byte %lld", c->name, (long long)i, (long long)b);
    }
}

/* V lies between rows of K, in other strides than K. With the strides of K it would lie on them. */
static void check_unlike_pair(kvprim_table k_cache, kvprim_table v_cache)
{
    static unsigned char input[2][1024];
    static const int32_t slot[1] = {0};
    const kvprim_store_desc d = {.k_cache = k_cache,
                                 .v_cache = v_cache,
                                 .k = table_of(input[0], 1),
                                 .v = table_of(input[1], 1),
                                 .k_bytes = k_cache.heads ? 64 : 32,
                                 .v_bytes = k_cache.heads ? 64 : 32,
                                 .slot = slot,
                                 .slot_type = KVPRIM_I32,
                                 .count = 1};
    CHECK(kvprim_store(&d) == KVPRIM_OK);
}

static void test_k_beside_v(void)
{
    static unsigned char cache[2048], *const k = cache + 1024;
    for (size_t i = 0; i < sizeof pair_cases / sizeof *pair_cases; i++)
        one_pair(&pair_cases[i]);
    check_unlike_pair(paged(k, 8, 4, 512), paged(k - 512, 8, 4, 640));
    check_unlike_pair(paged(k, 12, 8, 512), paged(k - 640, 12, 4, 512));
    kvprim_table heads = strided(k, 4, 32), others = strided(k - 256, 4, 32);
    heads.heads = others.heads = 2;
    heads.head_stride = 256, others.head_stride = 384;
    check_unlike_pair(heads, others);
}

/* ---- indices: types, bases, strides ---- */

/* Indices that are `stride` elements apart, with noise between them. */
typedef struct strided_index {
    kvprim_index_type type;
    int64_t base, stride;
    union {
        int32_t i32[200];
        int64_t i64[200];
    } u;
} strided_index;

static int64_t strided_at(const strided_index *x, int64_t i)
{
    return x->type == KVPRIM_I64 ? x->u.i64[i * x->stride] : x->u.i32[i * x->stride];
}

/* Makes `count` indices: distinct rows from 0 to rows - 1, padding, and some past the end. */
static void make_index(strided_index *x, int64_t count, int64_t rows)
{
    static const int64_t bases64[] = {0, 1, -1, 1000, -7, INT64_MIN, INT64_MAX - 100, (int64_t)1 << 40};
    static const int64_t bases32[] = {0, 1, -1, 1000, -7, INT32_MIN, INT32_MAX - 100, 1 << 20};
    x->type = random_u64() % 2 ? KVPRIM_I64 : KVPRIM_I32;
    x->base = x->type == KVPRIM_I64 ? bases64[random_u64() % 8] : bases32[random_u64() % 8];
    x->stride = 1 + (int64_t)(random_u64() % 5);
    fill(&x->u, sizeof x->u);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t kind = random_u64() % 8;
        int64_t value = x->base + (i * 7 + 3) % rows;
        if (kind == 0)
            value = x->base + rows + (int64_t)(random_u64() % 3);
        if (kind == 1 && x->base != INT64_MIN && x->base != INT32_MIN)
            value = x->base - 1;
        if (x->type == KVPRIM_I64)
            x->u.i64[i * x->stride] = value;
        else
            x->u.i32[i * x->stride] = (int32_t)value;
    }
}

enum { ruled_count = 31, ruled_rows = 40, ruled_bytes = 24 };

/* Copies rows as the contract says and returns how many indices are rejected. */
static uint32_t expect_rows(unsigned char *to, const unsigned char *from, const strided_index *dst,
                            const strided_index *src, int zero)
{
    uint32_t rejected = 0;
    for (int64_t i = 0; i < ruled_count; i++) {
        const int64_t t = dst ? ruled(strided_at(dst, i), dst->base, ruled_rows) : i;
        const int64_t f = src ? ruled(strided_at(src, i), src->base, ruled_rows) : i;
        rejected += t == -2 || f == -2;
        if (t >= 0 && f >= 0)
            memcpy(to + t * ruled_bytes, from + f * ruled_bytes, ruled_bytes);
        else if (t >= 0 && zero)
            memset(to + t * ruled_bytes, 0, ruled_bytes);
    }
    return rejected;
}

/* Operation 0 is a gather, 1 a store, 2 to 4 are transfers with an index on dst, on src, on both. */
static void one_rule(int operation)
{
    unsigned char to[ruled_rows * ruled_bytes], from[sizeof to], want[sizeof to];
    strided_index dst, src;
    const int has_dst = operation == 1 || operation == 2 || operation == 4, has_src = !has_dst || operation == 4;
    uint32_t rejected = 3;
    make_index(&dst, ruled_count, ruled_rows);
    make_index(&src, ruled_count, ruled_rows);
    fill(to, sizeof to);
    fill(from, sizeof from);
    memcpy(want, to, sizeof to);
    const uint32_t past = expect_rows(want, from, has_dst ? &dst : NULL, has_src ? &src : NULL, operation == 0);
    const kvprim_table to_table = table_of(to, ruled_rows), from_table = table_of(from, ruled_rows);
    const kvprim_gather_desc gather = {.dst = to_table,
                                       .src = from_table,
                                       .row_bytes = ruled_bytes,
                                       .index = &src.u,
                                       .index_type = src.type,
                                       .index_base = src.base,
                                       .index_stride = src.stride,
                                       .count = ruled_count,
                                       .rejected = &rejected};
    const kvprim_store_desc store = {.k_cache = to_table,
                                     .k = from_table,
                                     .k_bytes = ruled_bytes,
                                     .slot = &dst.u,
                                     .slot_type = dst.type,
                                     .slot_base = dst.base,
                                     .slot_stride = dst.stride,
                                     .count = ruled_count,
                                     .rejected = &rejected};
    kvprim_transfer_desc transfer = {.dst = to_table,
                                     .src = from_table,
                                     .row_bytes = ruled_bytes,
                                     .dst_index = has_dst ? &dst.u : NULL,
                                     .src_index = has_src ? &src.u : NULL,
                                     .dst_index_type = dst.type,
                                     .src_index_type = src.type,
                                     .dst_index_base = dst.base,
                                     .src_index_base = src.base,
                                     .dst_index_stride = dst.stride,
                                     .src_index_stride = src.stride,
                                     .count = ruled_count,
                                     .rejected = &rejected};
    if (dst.type == src.type || random_u64() % 2) { /* dst's type, and src's only if it is another one */
        transfer.index_type = dst.type;
        transfer.dst_index_type = (kvprim_index_type)0;
        if (dst.type == src.type)
            transfer.src_index_type = (kvprim_index_type)0;
    } else if (random_u64() % 2) { /* src's type, and dst's own one */
        transfer.index_type = src.type;
        transfer.src_index_type = (kvprim_index_type)0;
    }
    const kvprim_status status = operation == 0   ? kvprim_gather(&gather)
                                 : operation == 1 ? kvprim_store(&store)
                                                  : kvprim_transfer(&transfer);
    if (status != KVPRIM_OK || memcmp(to, want, sizeof to) != 0 || rejected != 3 + past)
        FAIL("operation %d, types %d and %d, bases %lld and %lld, strides %lld and %lld: %s, %u rejected, expected %u",
             operation, dst.type, src.type, (long long)dst.base, (long long)src.base, (long long)dst.stride,
             (long long)src.stride, kvprim_status_name(status), rejected, 3 + past);
}

static void test_index_rule(void)
{
    for (int round = 0; round < 4000; round++)
        one_rule(round % 5);
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
        const kvprim_transfer_desc d = {.dst = table_of(to, count),
                                        .src = table_of(from, count),
                                        .row_bytes = row_bytes,
                                        .dst_index = index,
                                        .src_index = index,
                                        .index_type = KVPRIM_I32,
                                        .count = count};
        if (kvprim_transfer(&d) != KVPRIM_OK || memcmp(to, from, (size_t)count * row_bytes) != 0)
            FAIL("%d rows in a circle: not all of them moved", (int)count);
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
    const kvprim_gather_desc gather = {.dst = table_of(to, 9),
                                       .src = table_of(from, 30),
                                       .row_bytes = 100,
                                       .index = index,
                                       .index_type = KVPRIM_I32,
                                       .count = 9,
                                       .rejected = rejected};
    kvprim_store_desc store = {.k_cache = strided(to + 1000, 30, 320),
                               .v_cache = strided(to + 1192, 30, 320),
                               .k = table_of(from + 3000, 11),
                               .v = table_of(from + 6000, 11),
                               .k_bytes = 192,
                               .v_bytes = 128,
                               .slot = index,
                               .slot_type = KVPRIM_I32,
                               .count = 11,
                               .rejected = rejected};
    kvprim_transfer_desc transfer = {.dst = table_of(to + 20000, 12),
                                     .src = table_of(from + 12000, 12),
                                     .layers = 3,
                                     .row_bytes = 40,
                                     .dst_index = index,
                                     .index_type = KVPRIM_I32,
                                     .count = 12,
                                     .rejected = rejected};
    if (kind == 0)
        return kvprim_gather_moves(&gather, moves) == KVPRIM_OK ? 1 : 0;
    if (kind == 1) { /* values of 576 bytes, each followed by its scale of 8 */
        store.k_cache = strided(to + 1000, 30, 584), store.v_cache = strided(to + 1576, 30, 584);
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
                FAIL("kinds %d, run %d: the moves together are not what they are one by one", kinds, run_number);
        }
    }
    EXPECT_ERROR(kvprim_cpu_move(NULL, 1), KVPRIM_ERROR_NULL, "kvprim_cpu_move: moves is NULL");
    EXPECT_ERROR(kvprim_gather_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_gather_moves: moves is NULL");
    EXPECT_ERROR(kvprim_store_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_store_moves: moves is NULL");
    EXPECT_ERROR(kvprim_transfer_moves(NULL, NULL), KVPRIM_ERROR_NULL, "kvprim_transfer_moves: moves is NULL");
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
    const kvprim_table input = strided((unsigned char *)(uintptr_t)src, rows, 1024);
    const kvprim_gather_desc gather = {
        .dst = cache, .src = input, .row_bytes = row_bytes, .index = index, .index_type = KVPRIM_I32, .count = rows};
    memset(dst, 1, 1024);
    CHECK(kvprim_gather(&gather) == KVPRIM_OK);
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(at(&cache, row_bytes, i, 0), src + index[i] * 1024, (size_t)row_bytes) != 0)
            FAIL("gather of %lld bytes: row %lld differs", (long long)row_bytes, (long long)i);
    const kvprim_store_desc store = {
        .k_cache = cache, .k = input, .k_bytes = row_bytes, .slot = index, .slot_type = KVPRIM_I32, .count = rows};
    memset(dst, 1, 1024);
    CHECK(kvprim_store(&store) == KVPRIM_OK);
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(at(&cache, row_bytes, index[i], 0), src + i * 1024, (size_t)row_bytes) != 0)
            FAIL("store of %lld bytes: row %lld differs", (long long)row_bytes, (long long)i);
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
    for (int i = 0; i < bytes / 8; i++)
        ((uint64_t *)(void *)src)[i] = random_u64();
    one_stream(dst, src, index, strided(NULL, rows, 1024), 1024);
    one_stream(dst, src, index, strided(NULL, rows, 1024), 1000);
    one_stream(dst + 16, src, index, strided(NULL, rows, 1024), 1024);
    one_stream(dst, src, index, strided(NULL, rows, 720), 704);
    kvprim_table pages = paged(NULL, rows, 4, 4 * 704 + 16);
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
    const kvprim_store_desc store = {.k_cache = table_of(table, rows),
                                     .k = table_of(input, 8),
                                     .k_bytes = 3,
                                     .slot = index,
                                     .slot_type = KVPRIM_I64,
                                     .count = 8,
                                     .rejected = &rejected};
    CHECK(kvprim_store(&store) == KVPRIM_OK && rejected == 3);
    const kvprim_gather_desc gather = {.dst = table_of(output, 8),
                                       .src = table_of(table, rows),
                                       .row_bytes = 3,
                                       .index = index,
                                       .index_type = KVPRIM_I64,
                                       .count = 8,
                                       .rejected = &rejected};
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
        kvprim_store_desc store = {.k_cache = table_of(cache + page - rows * row_bytes, rows),
                                   .k = table_of(input + page - 4 * row_bytes, 4),
                                   .k_bytes = row_bytes,
                                   .slot = slots,
                                   .slot_type = KVPRIM_I32,
                                   .count = 4};
        kvprim_gather_desc gather = {.dst = store.k,
                                     .src = store.k_cache,
                                     .row_bytes = row_bytes,
                                     .index = slots,
                                     .index_type = KVPRIM_I32,
                                     .count = 4};
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
        EXPECT_ERROR(kind == 0  ? kvprim_gather_check(&gather, NULL)
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
        kvprim_table to = paged(places[0] + cases[n].at, count, cases[n].page_stride ? 4 : 0, cases[n].page_stride);
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
            FAIL("case %d: streamed %d", (int)n, kvpi_streams(&m));
    }
}
#endif

/* Runs what depends on the instruction set. */
static void run_for_isa(void)
{
    printf("on %s:\n", kvprim_isa());
    run("prefix: lengths x alignments x places", test_prefix_everywhere);
    run("prefix: blocks", test_prefix_blocks);
    run("prefix: unequal lengths, int64", test_prefix_lengths_and_i64);
    run("prefix: long arrays", test_prefix_large);
    run("prefix: NULL, pages", test_prefix_null_and_pages);
    run("prefix: many keys", test_prefix_many);
    run("prefix: many keys: first key, no match, error", test_prefix_many_answers);
    run("gather", test_gather);
    run("indices: types, bases, strides", test_index_rule);
    run("rows in a circle", test_closed_run);
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
    run("version and sizes", test_version_and_sizes);
    run("table: bytes", test_bytes);
    run("table: partial pages", test_partial_pages);
    run("moves", test_moves);
    run("table: defaults", test_defaults);
    run("sizes: products that do not wrap", test_products);
    run("gather: bad descriptors", test_gather_errors);
    run("store: K and V interleaved", test_store_interleaved);
    run("store: bad descriptors", test_store_errors);
    run("store: K and V rows that overlap, and that do not", test_k_beside_v);
    run("transfer: bad descriptors", test_transfer_errors);
    run("transfer: 65,536 layers in any order", test_many_layers);
    run("transfer: a layer that is written twice", test_repeated_layers);
    run("transfer: a side without rows", test_empty_side);
    run("unpack", test_unpack);
    run("unpack: bad descriptors", test_unpack_errors);
    run("unpack: over its descriptor", test_unpack_over_descriptor);
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
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

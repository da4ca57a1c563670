/* SPDX-License-Identifier: MIT */
/* Compares the prefix compare with std::mismatch (bench_mismatch.cpp, g++ -O3) and memcmp on one core. The arrays are
   equal, so every call reads them to the end. Cycles are core cycles per call, medians of interleaved repetitions.
   "std fast" and "std slow" are the best and the worst of eight placements of std::mismatch's loop; targets are ratios
   to the fast one. Calls are independent of each other, except in the tables whose title says that a call waits for
   the last result: these show the latency of a call, the others its throughput. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include "bench.h"
#include <sys/mman.h>
#include <unistd.h>

typedef size_t i32_fn(const int32_t *, size_t, const int32_t *, size_t);
typedef size_t i64_fn(const int64_t *, size_t, const int64_t *, size_t);
extern i32_fn *mismatch_i32[8]; /* bench_mismatch.cpp */
extern i64_fn *mismatch_i64[8];

/* A function to measure: i32, or i64 where i32 is NULL. */
typedef struct contender {
    const char *name;
    i32_fn *i32;
    i64_fn *i64;
} contender;

typedef struct target {
    size_t tokens;
    double ratio;
} target;

enum { repetitions = 15, placements = 8, max_contenders = 8 + placements };
enum { independent = 0, dependent = 1 }; /* whether a call's addresses depend on the result of the call before */

/* memcmp says only whether arrays differ, not where. It stands for the C library's fastest compare. */
static size_t memcmp_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    return memcmp(a, b, 4 * a_len) == 0 ? b_len : 0;
}

static size_t memcmp_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)
{
    return memcmp(a, b, 8 * a_len) == 0 ? b_len : 0;
}

/* The sum of all results. `next` is how many tokens the next call skips, always 0: a call's result is n. */
#define CALL_MANY(name, function_type, token, next)                                                                    \
    static size_t name(function_type *f, const token *a, const token *b, size_t n, size_t calls)                       \
    {                                                                                                                  \
        size_t sum = 0, skip = 0;                                                                                      \
        for (size_t i = 0; i < calls; i++) {                                                                           \
            const size_t result = f(a + skip, n, b + skip, n);                                                         \
            sum += result;                                                                                             \
            skip = (next);                                                                                             \
        }                                                                                                              \
        return sum;                                                                                                    \
    }
CALL_MANY(call_i32, i32_fn, int32_t, 0)
CALL_MANY(call_i64, i64_fn, int64_t, 0)
CALL_MANY(chain_i32, i32_fn, int32_t, result - n)
CALL_MANY(chain_i64, i64_fn, int64_t, result - n)

static size_t call_many(const contender *f, int order, const void *a, const void *b, size_t n, size_t calls)
{
    return f->i32
               ? (order == dependent ? chain_i32 : call_i32)(f->i32, (const int32_t *)a, (const int32_t *)b, n, calls)
               : (order == dependent ? chain_i64 : call_i64)(f->i64, (const int64_t *)a, (const int64_t *)b, n, calls);
}

/* ns of one call, measured after 20 us of such calls: a core takes that long to run wide vectors at full speed. */
static double time_call(const contender *f, int order, const void *a, const void *b, size_t n)
{
    const size_t calls = n < 100000 ? 400000 / (n + 40) + 8 : 2;
    double start = bench_ns();
    while (bench_ns() - start < 20000)
        (void)call_many(f, order, a, b, n, 1);
    start = bench_ns();
    const size_t sum = call_many(f, order, a, b, n, calls);
    const double ns = (bench_ns() - start) / (double)calls;
    if (sum != n * calls) {
        printf("%s: wrong result at %zu tokens\n", f->name, n);
        exit(1);
    }
    return ns;
}

/* Core cycles per call of each contender. */
static void measure(const contender *f, int count, int order, const void *a, const void *b, size_t n, double *cycles)
{
    static double ns[max_contenders][repetitions], cycle[repetitions];
    for (int r = 0; r < repetitions; r++) {
        cycle[r] = bench_cycle_ns();
        for (int k = 0; k < count; k++)
            ns[k][r] = time_call(&f[k], order, a, b, n);
    }
    const double cycle_ns = bench_median(cycle, repetitions);
    for (int k = 0; k < count; k++)
        cycles[k] = bench_median(ns[k], repetitions) / cycle_ns;
}

/* Contender 0 is ours; the last eight are std::mismatch. Sizes and targets end with a 0. */
static void table(const char *title, const contender *f, int count, int order, const void *a, const void *b,
                  const size_t *sizes, const target *targets)
{
    const int others = count - placements, bytes = f->i32 ? 4 : 8;
    printf("\n%s: cycles per call\n%8s", title, "tokens");
    for (int k = 0; k < others; k++)
        printf(" %9s", f[k].name);
    printf("  std fast  std slow   x fast  x slow  bytes/cycle\n");
    for (; *sizes; sizes++) {
        const size_t n = *sizes;
        double c[max_contenders], fast = 1e30, slow = 0;
        measure(f, count, order, a, b, n, c);
        for (int k = others; k < count; k++) {
            fast = c[k] < fast ? c[k] : fast;
            slow = c[k] > slow ? c[k] : slow;
        }
        printf("%8zu", n);
        for (int k = 0; k < others; k++)
            printf(" %9.1f", c[k]);
        printf(" %9.1f %9.1f  %6.2f  %6.2f  %6.1f\n", fast, slow, fast / c[0], slow / c[0],
               2.0 * bytes * (double)n / c[0]);
        const int judged =
            strcmp(kvprim_isa(), "avx512") == 0; /* the targets are for AVX-512; other variants are only printed */
        for (const target *t = targets; judged && t->tokens; t++)
            if (t->tokens == n)
                bench_target("times as fast as std::mismatch (fast)", fast / c[0], ">=", t->ratio);
        if (judged && order == independent && bytes == 4 && n == 4096 && (uintptr_t)b % 64 == 0)
            bench_target("bytes per cycle", 2.0 * bytes * (double)n / c[0], ">=", 110);
        if (judged && order == independent && n * (size_t)bytes <= 1 << 19) /* what fits into L2 */
            bench_target("of memcmp's time", c[0] / c[others - 1], "<=", 1);
    }
}

static int contenders(contender *f, int i64)
{
    int n = 0;
    f[n++] = (contender){"kvprim", i64 ? NULL : kvprim_prefix_i32, kvprim_prefix_i64};
#ifdef KVPRIM_X86
    if (strcmp(kvprim_isa(), "avx512") == 0)
        f[n++] = (contender){"avx512", i64 ? NULL : kvprim_prefix_i32_avx512, kvprim_prefix_i64_avx512};
    if (strcmp(kvprim_isa(), "scalar") != 0)
        f[n++] = (contender){"avx2", i64 ? NULL : kvprim_prefix_i32_avx2, kvprim_prefix_i64_avx2};
#endif
#ifdef KVPRIM_NEON
    f[n++] = (contender){"neon", i64 ? NULL : kvprim_prefix_i32_neon, kvprim_prefix_i64_neon};
#endif
    f[n++] = (contender){"scalar", i64 ? NULL : kvprim_prefix_i32_scalar, kvprim_prefix_i64_scalar};
    f[n++] = (contender){"memcmp", i64 ? NULL : memcmp_i32, memcmp_i64};
    for (int k = 0; k < placements; k++)
        f[n++] = (contender){"std", i64 ? NULL : mismatch_i32[k], mismatch_i64[k]};
    return n;
}

/* Up to 15 tokens that end with their page, and no page follows: a masked load of 16 would take ~700 cycles there. */
static void page_end(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *const p = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, page, PROT_NONE) != 0) {
        perror("mmap");
        exit(2);
    }
    const contender f[] = {{"kvprim", kvprim_prefix_i32, NULL}};
    static int32_t other[16];
    printf("\nat the end of a page, the next one not mapped: cycles per call\n");
    for (size_t n = 1; n <= 15; n += 7) {
        double cycles;
        memset(p, 0, page);
        measure(f, 1, independent, p + page - 4 * n, other, n, &cycles);
        printf("%8zu %9.1f\n", n, cycles);
        bench_target("cycles at the end of a page", cycles, "<=", 30);
    }
    munmap(p, 2 * page);
}

/* One query against keys in cache that each differ from it within 16 tokens. */
static void many_keys(void)
{
    enum { n_keys = 1024, tokens = 32 };
    static int32_t memory[n_keys][tokens + 1], query[tokens];
    static const int32_t *keys[n_keys];
    static size_t lens[n_keys], out[n_keys];
    double ns[repetitions], loop_ns[repetitions], cycle[repetitions];
    for (size_t k = 0; k < n_keys; k++) {
        keys[k] = memory[k];
        lens[k] = tokens;
        memory[k][below(16)] = 1;
    }
    for (int r = 0; r < repetitions; r++) {
        enum { rounds = 50 };
        cycle[r] = bench_cycle_ns();
        double start = bench_ns();
        for (int i = 0; i < rounds; i++)
            (void)kvprim_prefix_many_i32(query, tokens, keys, lens, n_keys, out);
        ns[r] = (bench_ns() - start) / (rounds * n_keys);
        start = bench_ns();
        for (int i = 0; i < rounds; i++)
            for (size_t k = 0; k < n_keys; k++)
                out[k] = mismatch_i32[0](query, tokens, keys[k], lens[k]);
        loop_ns[r] = (bench_ns() - start) / (rounds * n_keys);
    }
    const double cycle_ns = bench_median(cycle, repetitions);
    const double ours = bench_median(ns, repetitions) / cycle_ns,
                 theirs = bench_median(loop_ns, repetitions) / cycle_ns;
    printf("\none query, %d keys that differ within 16 tokens: %.1f cycles per key, std::mismatch %.1f\n", n_keys, ours,
           theirs);
    bench_target("cycles per key", ours, "<=", 10);
}

int main(void)
{
    static const size_t sizes[] = {1,   2,    4,    8,    16,    32,    64,     128,     256,
                                   512, 1024, 2048, 4096, 16384, 65536, 131072, 1 << 20, 0};
    static const size_t dependent_sizes[] = {1, 4, 8, 16, 32, 64, 128, 256, 1024, 0};
    static const size_t short_sizes[] = {1, 4, 16, 64, 256, 1024, 4096, 16384, 131072, 0};
    static const target aligned[] = {{4, 1},     {8, 1},     {16, 3},    {32, 1},     {64, 8},      {128, 1}, {256, 12},
                                     {1024, 12}, {4096, 12}, {16384, 5}, {131072, 5}, {1 << 20, 1}, {0, 0}};
    static const target misaligned[] = {{4, 1},    {16, 3},    {64, 1},     {256, 7}, {1024, 9},
                                        {4096, 9}, {16384, 1}, {131072, 1}, {0, 0}};
    static const target i64[] = {{4, 1}, {16, 2}, {64, 1}, {256, 7}, {1024, 7}, {0, 0}};
    static const target waiting[] = {{16, 1}, {64, 2}, {256, 4}, {0, 0}};
    const size_t bytes = (size_t)4 << 20;
    char *const a = (char *)allocate(2 * bytes + 256), *const b = (char *)allocate(2 * bytes + 256);
    char *const x = a + 64 - (uintptr_t)a % 64, *const y = b + 64 - (uintptr_t)b % 64; /* aligned to 64 bytes */
    contender f[max_contenders];
    bench_machine();
    bench_pin();
    printf("kvprim runs on %s\n", kvprim_isa());
    for (size_t i = 0; i < 2 * bytes + 128; i++)
        x[i] = y[i] = (char)random_u64();
    table("int32, both aligned to 64 bytes", f, contenders(f, 0), independent, x, y, sizes, aligned);
    table("int64, both aligned to 64 bytes", f, contenders(f, 1), independent, x, y, short_sizes, i64);
    table("int32, both aligned to 64 bytes, a call waits for the last result", f, contenders(f, 0), dependent, x, y,
          dependent_sizes, waiting);
    table("int64, both aligned to 64 bytes, a call waits for the last result", f, contenders(f, 1), dependent, x, y,
          dependent_sizes, waiting);
    memmove(y + 4, x, 2 * bytes);
    table("int32, mutually misaligned", f, contenders(f, 0), independent, x, y + 4, short_sizes, misaligned);
    page_end();
    many_keys();
    bench_summary();
    free(a);
    free(b);
    return 0;
}

/* SPDX-License-Identifier: MIT */
/* Measures the keys of 10,000 tokens on one core, and how long it takes to find 625 keys in a table of 10^6. Beside it
   in the same run: one SHA-256 of as many pieces of 64 bytes, the least that a chain of them takes. Minima, as other
   work only adds. What is asked of them was measured where a piece takes 32.3 ns, and is scaled by that.
   bench_keys.py measures the engines' own Python. */
#define _GNU_SOURCE /* sched_setaffinity */
#if defined(__has_include)
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h> /* keys of XXH3 */
#endif
#endif
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include "bench.h"

enum { tokens = 10000, sets = 8, repetitions = 1500, known = 625, table_keys = 1000000 };

static int32_t prompt[sets][tokens]; /* taken in turn: no branch is foreseen because the tokens are known */
static uint8_t keys[2][tokens * 32], again[32];

static void must(kvprim_status status)
{
    if (status != KVPRIM_OK)
        printf("%s\n", kvprim_last_error()), exit(1);
}

/* Microseconds for one request, and for each of two at once. They take turns. */
static void microseconds(kvprim_key_rule rule, int64_t block, double best[2])
{
    static const uint8_t seed[16] = "a seed";
    best[0] = best[1] = 1e9;
    for (int r = 0; r < repetitions; r++) {
        kvprim_keys_desc d[2];
        memset(d, 0, sizeof d);
        for (int i = 0; i < 2; i++) {
            d[i].tokens = prompt[(r + i) % sets], d[i].token_type = KVPRIM_I32, d[i].count = tokens;
            d[i].rule = rule, d[i].block_tokens = block, d[i].keys = keys[i], d[i].keys_bytes = sizeof keys[i];
            d[i].parent = rule == KVPRIM_KEY_VLLM_XXHASH || rule == KVPRIM_KEY_VLLM_XXHASH_CBOR ? seed : NULL;
        }
        for (size_t n = 1; n <= 2; n++) {
            const double start = bench_ns();
            must(kvprim_keys(d, n));
            const double us = (bench_ns() - start) / 1000 / (double)n;
            best[n - 1] = us < best[n - 1] ? us : best[n - 1];
        }
    }
}

/* Nanoseconds of a piece of 64 bytes in one SHA-256. */
static double piece_ns(void)
{
    static uint8_t data[64 * 2000];
    double best = 1e9;
    for (int r = 0; r < repetitions; r++) {
        const double start = bench_ns();
        kvprim_sha256(data, sizeof data, again);
        const double ns = bench_ns() - start;
        best = ns < best ? ns : best;
    }
    return best / 2001;
}

/* most: where a piece of 64 bytes takes 32.3 ns; `slower` is how much longer it takes here. */
static void measure(const char *name, kvprim_key_rule rule, int sha, double most, double slower)
{
    double small[2], large[2];
    kvprim_keys_desc none;
    memset(&none, 0, sizeof none);
    none.rule = rule, none.count = none.block_tokens = 1, none.token_type = KVPRIM_I32;
    if (kvprim_keys(&none, 1) == KVPRIM_ERROR_UNSUPPORTED) {
        printf("%-18s no xxhash.h\n", name);
        return;
    }
    microseconds(rule, 16, small);
    microseconds(rule, 64, large);
    printf("%-18s %9.1f %9.1f %9.1f %9.2f\n", name, small[0], large[0], small[1], small[1] / small[0]);
    if (most > 0)
        bench_target("us, beside SHA-256 alone", small[0] / slower, "<=", most);
    if (sha)
        bench_target("two at once, each of one", small[1] / small[0], "<=", 0.66);
}

static void measure_table(void)
{
    const size_t bytes = kvprim_key_table_bytes(table_keys, 32);
    uint8_t *const memory = allocate(bytes), *const all = allocate((size_t)table_keys * 32);
    int64_t values[known];
    double cold = 1e9, warm = 1e9;
    kvprim_key_table t;
    must(kvprim_key_table_init(&t, memory, bytes, 32));
    fill(all, (size_t)table_keys * 32);
    for (int64_t i = 0; i < table_keys; i++)
        must(kvprim_key_table_put(&t, all + 32 * i, i));
    for (int r = 0; r < 1500; r++) { /* each list once, and at once again */
        const uint8_t *const list = all + (size_t)(r % 1500) * 32 * (size_t)known;
        for (int k = 0; k < known * 32; k += 64)
            (void)*(volatile const uint8_t *)(list + k); /* the keys themselves have just been computed */
        for (int again_ = 0; again_ < 2; again_++) {
            const double start = bench_ns();
            const size_t n = kvprim_key_table_longest(&t, list, known, values);
            const double us = (bench_ns() - start) / 1000;
            if (n != known)
                printf("%zu keys are known\n", n), exit(1);
            double *const best = again_ ? &warm : &cold;
            *best = us < *best ? us : *best;
        }
    }
    printf("\nlongest of %d known keys, table of %d: cold %.1f us, warm %.1f us\n", known, table_keys, cold, warm);
    bench_target("cold", cold, "<=", 60);
    bench_target("warm", warm, "<=", 12);
    free(memory), free(all);
}

int main(void)
{
    bench_machine();
    bench_pin();
    for (int s = 0; s < sets; s++)
        for (int i = 0; i < tokens; i++)
            prompt[s][i] = (int32_t)below(151936);
    const double piece = piece_ns(), slower = piece / 32.3;
    printf("SHA-256 alone: %.1f ns for 64 bytes, %.1f us for 625 keys of 2 pieces, %.1f of 3\n\n", piece, piece * 1.25,
           piece * 1.875);
    printf("us for %d tokens   blocks of 16        64  two, each  of one\n", tokens);
    measure("vllm_sha256", KVPRIM_KEY_VLLM_SHA256, 1, 62, slower);
    measure("vllm_sha256_cbor", KVPRIM_KEY_VLLM_SHA256_CBOR, 1, 52, slower);
    measure("sglang", KVPRIM_KEY_SGLANG, 1, 46, slower);
    measure("trtllm", KVPRIM_KEY_TRTLLM, 1, 0, slower);
    measure("lmcache", KVPRIM_KEY_LMCACHE, 1, 0, slower);
    measure("vllm_xxhash", KVPRIM_KEY_VLLM_XXHASH, 0, 13, slower);
    measure("vllm_xxhash_cbor", KVPRIM_KEY_VLLM_XXHASH_CBOR, 0, 0, slower);
    measure("dynamo", KVPRIM_KEY_DYNAMO, 0, 0, slower);
    measure("xxh3", KVPRIM_KEY_XXH3, 0, 9, slower);
    measure_table();
    bench_summary();
    return 0;
}

/* SPDX-License-Identifier: MIT */
/* What the fuzzers share: reading an input, memory, and counting how far the inputs lead. Include it after the header
   under test. A run whose inputs stay short, or lead nowhere, ends with an error. */
#ifndef FUZZ_H
#define FUZZ_H

#include "../harness.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static inline void require(int condition, const char *what)
{
    if (condition)
        return;
#ifdef KVPRIM_H
    fprintf(stderr, "kvprim_last_error(): '%s'\n", kvprim_last_error());
#endif
    fprintf(stderr, "%s\n", what);
    abort();
}

/* ---- the input: what lies past its end is 0 ---- */

struct input {
    const uint8_t *next, *end;
};

static inline uint64_t take(struct input *in, size_t bytes)
{
    uint64_t value = 0;
    while (bytes-- && in->next < in->end)
        value = value << 8 | *in->next++;
    return value;
}

static inline int chance(struct input *in, unsigned one_in)
{
    return take(in, 1) % one_in == one_in - 1;
}

/* ---- memory ---- */

/* Fills in bytes that look random. A byte a time would take longer than what is tested. */
static inline void fill_fast(void *p, size_t bytes)
{
    enum { pool_bytes = 1 << 18 };
    static uint8_t pool[pool_bytes];
    static uint64_t calls;
    if (calls == 0)
        fill(pool, sizeof pool);
    require(bytes <= pool_bytes / 2, "more bytes than there are random ones");
    memcpy(p, pool + hash_u64(calls++) % (pool_bytes / 2), bytes);
}

/* A block of exactly this size, so that the sanitizer sees accesses beyond it. */
static inline uint8_t *new_bytes(size_t bytes)
{
    uint8_t *const p = (uint8_t *)allocate(bytes);
    fill_fast(p, bytes);
    return p;
}

/* ---- how far the inputs lead ---- */

/* Of one operation: its inputs, those of them that hold all that it may take, and the most items (rows, fragments,
   keys, lines) in a call that did what it was to do. */
struct reach {
    const char *operation, *items;
    size_t full_length, limit; /* an input's bytes; the largest number of items */
    uint64_t inputs, full, most;
};

static struct reach reaches[4]; /* the fuzzer fills them in */

/* Fewer inputs cannot tell, and are no error: one may be given as a file. */
enum { least_inputs = 1000 };

static inline void judge_reach(void)
{
    int bad = 0;
    uint64_t inputs = 0;
    for (const struct reach *r = reaches; r->operation; r++)
        inputs += r->inputs;
    for (const struct reach *r = reaches; r->operation; r++) {
        const int reached = inputs >= least_inputs && r->full >= r->inputs / 10 && r->most >= r->limit / 4;
        printf("%s: %llu of %llu inputs have at least %zu bytes; up to %llu %s; %s\n", r->operation,
               (unsigned long long)r->full, (unsigned long long)r->inputs, r->full_length, (unsigned long long)r->most,
               r->items, reached ? "reached" : "NOT reached");
        bad |= inputs >= least_inputs && !reached;
    }
    fflush(stdout);
    if (bad) {
        fprintf(stderr, "FAIL: inputs are too short, or lead nowhere\n");
        _Exit(1);
    }
}

static inline void count_reach(struct reach *r, size_t size, uint64_t items)
{
    static int asked;
    if (!asked++)
        (void)atexit(judge_reach);
    r->inputs++;
    r->full += size >= r->full_length;
    r->most = items > r->most ? items : r->most;
}

/* ---- libFuzzer ---- */

/* libFuzzer alone lets inputs grow slowly: after seconds they have 40 bytes. Every other one gets its full length. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    const size_t now = LLVMFuzzerMutate(data, size, most);
    if (seed % 2 == 0 || now >= most)
        return now;
    fill_fast(data + now, most - now);
    return most;
}

#endif

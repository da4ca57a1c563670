/* SPDX-License-Identifier: MIT */
/* Fuzzes the prefix compare: every variant that runs on this machine must return what a plain loop returns. An array ends
   where an inaccessible page starts, starts where one ends, or is a malloc block of exactly its size. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include <stdlib.h>
#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PAGE = 4096, ROOM = 20 * PAGE, MAX_TOKENS = 9000, MAX_KEYS = 8 }; /* MAX_TOKENS int64 fit into ROOM */

struct input {
    const uint8_t *next, *end;
};

static uint32_t take(struct input *in, size_t bytes)
{
    uint32_t value = 0;
    while (bytes-- && in->next < in->end)
        value = value << 8 | *in->next++;
    return value;
}

static void expect(size_t got, size_t expected, const char *what)
{
    if (got == expected)
        return;
    fprintf(stderr, "%s: %zu, expected %zu\n", what, got, expected);
    abort();
}

/* Returns ROOM bytes between two inaccessible pages. */
static char *guarded(void)
{
    char *const p = mmap(NULL, ROOM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + PAGE, ROOM, PROT_READ | PROT_WRITE) != 0)
        abort();
    return p + PAGE;
}

/* Returns an array of `bytes` bytes. `where` 0: it ends `shift` bytes before the inaccessible page; 1: it starts `shift`
   bytes after one; 2: it is a block of its own. */
static char *place(char *room, unsigned where, size_t bytes, size_t shift)
{
    if (where == 2)
        return malloc(bytes ? bytes : 1);
    return where == 1 ? room + shift : room + ROOM - bytes - shift;
}

static size_t naive(const char *a, size_t a_len, const char *b, size_t b_len, size_t token)
{
    size_t n = 0;
    while (n < a_len && n < b_len && memcmp(a + n * token, b + n * token, token) == 0)
        n++;
    return n;
}

static void compare_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len, size_t expected)
{
    expect(kvprim_prefix_i32(a, a_len, b, b_len), expected, "prefix_i32");
    expect(kvprim_prefix_i32_scalar(a, a_len, b, b_len), expected, "prefix_i32_scalar");
#ifdef KVPRIM_X86
    if (strcmp(kvprim_isa(), "scalar") != 0)
        expect(kvprim_prefix_i32_avx2(a, a_len, b, b_len), expected, "prefix_i32_avx2");
    if (strcmp(kvprim_isa(), "avx512") == 0)
        expect(kvprim_prefix_i32_avx512(a, a_len, b, b_len), expected, "prefix_i32_avx512");
#endif
#ifdef KVPRIM_NEON
    expect(kvprim_prefix_i32_neon(a, a_len, b, b_len), expected, "prefix_i32_neon");
#endif
}

static void compare_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len, size_t expected)
{
    expect(kvprim_prefix_i64(a, a_len, b, b_len), expected, "prefix_i64");
    expect(kvprim_prefix_i64_scalar(a, a_len, b, b_len), expected, "prefix_i64_scalar");
#ifdef KVPRIM_X86
    if (strcmp(kvprim_isa(), "scalar") != 0)
        expect(kvprim_prefix_i64_avx2(a, a_len, b, b_len), expected, "prefix_i64_avx2");
    if (strcmp(kvprim_isa(), "avx512") == 0)
        expect(kvprim_prefix_i64_avx512(a, a_len, b, b_len), expected, "prefix_i64_avx512");
#endif
#ifdef KVPRIM_NEON
    expect(kvprim_prefix_i64_neon(a, a_len, b, b_len), expected, "prefix_i64_neon");
#endif
}

static void compare(const void *a, size_t a_len, const void *b, size_t b_len, size_t token)
{
    const size_t expected = naive(a, a_len, b, b_len, token);
    if (token == 4)
        compare_i32(a, a_len, b, b_len, expected);
    else
        compare_i64(a, a_len, b, b_len, expected);
}

/* The keys are slices of b. Either all of them end where b ends, or all start where b starts. */
static void compare_many(struct input *in, const char *a, size_t a_len, const char *b, size_t b_len)
{
    const int32_t *keys[MAX_KEYS];
    size_t lens[MAX_KEYS], out[MAX_KEYS], best = KVPRIM_PREFIX_NONE, best_len = 0;
    const size_t count = take(in, 1) % (MAX_KEYS + 1), from_end = take(in, 1) % 2;
    for (size_t i = 0; i < count; i++) {
        lens[i] = take(in, 1) % 2 ? b_len - take(in, 1) % (b_len + 1) : take(in, 2) % (b_len + 1);
        keys[i] = (const int32_t *)(const void *)(b + (from_end ? (b_len - lens[i]) * 4 : 0));
    }
    const int32_t *const query = (const int32_t *)(const void *)a;
    const size_t got = kvprim_prefix_many_i32(query, a_len, keys, lens, count, out);
    for (size_t i = 0; i < count; i++) {
        const size_t n = naive(a, a_len, (const char *)keys[i], lens[i], 4);
        expect(out[i], n, "prefix_many_i32: out_len");
        if (n > best_len) {
            best_len = n;
            best = i;
        }
    }
    expect(got, best, "prefix_many_i32");
    expect(kvprim_prefix_many_i32(query, a_len, keys, lens, count, NULL), best, "prefix_many_i32 without out_len");
}

/* Mostly lengths near the vector sizes, sometimes long ones. */
static size_t take_length(struct input *in)
{
    const uint32_t kind = take(in, 1) % 8;
    return kind < 4 ? take(in, 1) % 80 : kind < 7 ? take(in, 2) % 700 : take(in, 2) % MAX_TOKENS;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *room_a, *room_b;
    if (!room_a) {
        room_a = guarded();
        room_b = guarded();
    }
    struct input in = {data, data + size};
    const size_t token = take(&in, 1) % 2 ? 4 : 8, a_len = take_length(&in);
    const size_t b_len = take(&in, 1) % 2 ? a_len : take_length(&in);
    const unsigned where_a = take(&in, 1) % 3, where_b = take(&in, 1) % 3;
    char *const a = place(room_a, where_a, a_len * token, take(&in, 1) % 80);
    char *const b = place(room_b, where_b, b_len * token, take(&in, 1) % 80);
    if (!a || !b)
        abort();

    uint32_t x = take(&in, 4) | 1;
    for (size_t i = 0; i < a_len * token; i++)
        a[i] = (char)((x = x * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < b_len * token; i++)
        b[i] = (char)(i < a_len * token ? a[i] : 0x55);
    /* A flip changes one bit, so a compare that ignores any bit of any lane is found. */
    for (uint32_t flips = take(&in, 1) % 4; flips && b_len; flips--)
        b[take(&in, 3) % (b_len * token)] ^= (char)(1u << take(&in, 1) % 8);

    compare(a, a_len, b, b_len, token);
    compare(b, b_len, a, a_len, token);
    compare(NULL, 0, b, b_len, token);
    const size_t skip = a_len ? take(&in, 2) % a_len : 0; /* arrays may overlap */
    compare(a, a_len, a + skip * token, a_len - skip, token);
    if (token == 4)
        compare_many(&in, a, a_len, b, b_len);
    const size_t page = take(&in, 2);
    expect(kvprim_prefix_pages(a_len, page), page > 1 ? a_len / page * page : a_len, "prefix_pages");

    if (where_a == 2)
        free(a);
    if (where_b == 2)
        free(b);
    return 0;
}

/* SPDX-License-Identifier: MIT */
/* Fuzzes the prefix compare: every variant that runs on this machine must return what a plain loop returns. An array ends
   where an inaccessible page starts, starts where one ends, or is a malloc block of exactly its size. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"
#include <sys/mman.h>

enum { PAGE = 4096, ROOM = 20 * PAGE, MAX_TOKENS = 9000, MAX_KEYS = 8 }; /* MAX_TOKENS int64 fit into ROOM */

static struct reach reaches[4] = {{"prefix_i32", "tokens", 60, MAX_TOKENS, 0, 0, 0},
                                  {"prefix_i64", "tokens", 60, MAX_TOKENS, 0, 0, 0},
                                  {"prefix_many_i32", "keys", 60, MAX_KEYS, 0, 0, 0}};

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
        return allocate(bytes);
    return where == 1 ? room + shift : room + ROOM - bytes - shift;
}

static size_t naive(const char *a, size_t a_len, const char *b, size_t b_len, size_t token)
{
    const size_t bytes = (a_len < b_len ? a_len : b_len) * token;
    size_t n = 0;
    while (bytes - n >= 64 && memcmp(a + n, b + n, 64) == 0)
        n += 64;
    while (n < bytes && a[n] == b[n])
        n++;
    return n / token;
}

#define EACH_VARIANT(width, suffix, condition)                                                                         \
    if (condition)                                                                                                     \
    expect(kvprim_prefix_##width##suffix(a, a_len, b, b_len), expected, "prefix_" #width #suffix)
#ifdef KVPRIM_X86
#define EACH_SIMD(width)                                                                                               \
    EACH_VARIANT(width, _avx2, strcmp(kvprim_isa(), "scalar") != 0);                                                   \
    EACH_VARIANT(width, _avx512, strcmp(kvprim_isa(), "avx512") == 0)
#elif defined(KVPRIM_NEON)
#define EACH_SIMD(width) EACH_VARIANT(width, _neon, 1)
#else
#define EACH_SIMD(width) (void)0
#endif

static void compare(const void *a, size_t a_len, const void *b, size_t b_len, size_t token)
{
    const size_t expected = naive(a, a_len, b, b_len, token);
    if (token == 4) {
        EACH_VARIANT(i32, , 1);
        EACH_VARIANT(i32, _scalar, 1);
        EACH_SIMD(i32);
    } else {
        EACH_VARIANT(i64, , 1);
        EACH_VARIANT(i64, _scalar, 1);
        EACH_SIMD(i64);
    }
}

/* The keys are slices of b. Either all of them end where b ends, or all start where b starts. */
static size_t compare_many(struct input *in, const char *a, size_t a_len, const char *b, size_t b_len)
{
    const int32_t *keys[MAX_KEYS];
    size_t lens[MAX_KEYS], out[MAX_KEYS], best = KVPRIM_PREFIX_NONE, best_len = 0;
    const size_t count = (size_t)take(in, 1) % (MAX_KEYS + 1), from_end = take(in, 1) % 2;
    for (size_t i = 0; i < count; i++) {
        lens[i] = take(in, 1) % 2 ? b_len - (size_t)take(in, 1) % (b_len + 1) : (size_t)take(in, 2) % (b_len + 1);
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
    return count;
}

/* Mostly lengths near the vector sizes, sometimes long ones. */
static size_t take_length(struct input *in)
{
    const uint64_t kind = take(in, 1) % 8;
    return (size_t)(kind < 4 ? take(in, 1) % 80 : kind < 7 ? take(in, 2) % 700 : take(in, 2) % MAX_TOKENS);
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
    const unsigned where_a = (unsigned)take(&in, 1) % 3, where_b = (unsigned)take(&in, 1) % 3;
    char *const a = place(room_a, where_a, a_len * token, (size_t)take(&in, 1) % 80);
    char *const b = place(room_b, where_b, b_len * token, (size_t)take(&in, 1) % 80);
    const size_t common = (a_len < b_len ? a_len : b_len) * token;
    fill_fast(a, a_len * token);
    memcpy(b, a, common);
    memset(b + common, 0x55, b_len * token - common);
    /* A flip changes one bit, so a compare that ignores any bit of any lane is found. */
    for (uint64_t flips = take(&in, 1) % 4; flips && b_len; flips--)
        b[take(&in, 3) % (b_len * token)] ^= (char)(1u << take(&in, 1) % 8);

    compare(a, a_len, b, b_len, token);
    compare(b, b_len, a, a_len, token);
    compare(NULL, 0, b, b_len, token);
    const size_t skip = a_len ? (size_t)take(&in, 2) % a_len : 0; /* arrays may overlap */
    compare(a, a_len, a + skip * token, a_len - skip, token);
    count_reach(&reaches[token == 8], size, a_len);
    if (token == 4)
        count_reach(&reaches[2], size, compare_many(&in, a, a_len, b, b_len));
    const size_t page = (size_t)take(&in, 2);
    expect(kvprim_prefix_pages(a_len, page), page > 1 ? a_len / page * page : a_len, "prefix_pages");

    if (where_a == 2)
        free(a);
    if (where_b == 2)
        free(b);
    return 0;
}

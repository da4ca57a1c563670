/* SPDX-License-Identifier: MIT */
/* Keys of blocks, against keys of the engines' own Python (key_vectors.h), and the table of keys against a list. Part of
   test_kvprim.c. */
#ifndef CORE_TEST_KEYS_H
#define CORE_TEST_KEYS_H

enum { KEY_MOST = 9000 }; /* tokens of a request */

enum key_kind { key_vocabulary, key_small, key_int32, key_uint31, key_uint32, key_wide, key_int64, key_edges };

typedef struct key_vector {
    kvprim_key_rule rule;
    enum key_kind kind;
    int64_t count, block;
    uint64_t seed;
    int32_t bigrams;
    const char *parent, *extra, *key; /* hexadecimal; extra: "block token bytes ..." */
} key_vector;

static const key_vector key_vectors[] = {
#include "key_vectors.h"
};

/* What key_vectors.py makes. */
static void key_tokens(enum key_kind kind, int64_t count, int64_t *tokens)
{
    static const int64_t edges[] = {0,
                                    1,
                                    23,
                                    24,
                                    25,
                                    -26,
                                    255,
                                    256,
                                    65535,
                                    65536,
                                    INT32_MAX,
                                    (int64_t)1 << 31,
                                    UINT32_MAX,
                                    (int64_t)1 << 32,
                                    ((int64_t)1 << 39) - 1,
                                    (int64_t)1 << 39,
                                    (int64_t)1 << 47,
                                    ((int64_t)1 << 55) - 1,
                                    (int64_t)1 << 55,
                                    INT64_MAX,
                                    -1,
                                    -24,
                                    -25,
                                    -256,
                                    -257,
                                    -65536,
                                    -65537,
                                    INT32_MIN,
                                    (int64_t)INT32_MIN - 1,
                                    -((int64_t)1 << 32),
                                    -((int64_t)1 << 32) - 1,
                                    -((int64_t)1 << 39),
                                    -((int64_t)1 << 39) - 1,
                                    -((int64_t)1 << 47) - 1,
                                    -((int64_t)1 << 55),
                                    -((int64_t)1 << 55) - 1,
                                    INT64_MIN};
    for (int64_t i = 0; i < count; i++) {
        const uint64_t any = hash_u64((uint64_t)i);
        tokens[i] = kind == key_vocabulary ? (int64_t)(any % 151936)
                    : kind == key_small    ? (int64_t)(any % 300)
                    : kind == key_int32    ? (int32_t)(uint32_t)(any >> 32)
                    : kind == key_uint31   ? (int64_t)(any >> 33)
                    : kind == key_uint32   ? (int64_t)(any >> 32)
                    : kind == key_wide     ? (int64_t)(any >> (i % 40 < 3 ? 24 : 40))
                    : kind == key_int64    ? (int64_t)any
                                           : edges[(size_t)i % LENGTH(edges)];
    }
}

static size_t key_unhex(const char **from, uint8_t *to)
{
    size_t n = 0;
    unsigned byte;
    for (; sscanf(*from, "%2x", &byte) == 1 && **from != ' '; *from += 2)
        to[n++] = (uint8_t)byte;
    return n;
}

/* A request and all that it points to. */
typedef struct key_request {
    kvprim_keys_desc d;
    int64_t wide[KEY_MOST];
    int32_t narrow[KEY_MOST];
    uint8_t parent[64], bytes[2000], keys[KEY_MOST * 32], want[32];
    kvprim_key_extra extra[8];
} key_request;

static int64_t key_blocks(const kvprim_keys_desc *d)
{
    return (d->count - d->bigrams) / d->block_tokens;
}

static const uint8_t *key_last(const key_request *r)
{
    return r->keys + (key_blocks(&r->d) - 1) * kvprim_key_bytes(r->d.rule);
}

/* Returns 0 if the rule is not compiled in. */
static int key_make(key_request *r, const key_vector *v, int narrow)
{
    const char *hex = v->parent, *extra = v->extra, *key = v->key;
    memset(r, 0, sizeof *r);
    key_tokens(v->kind, v->count, r->wide);
    for (int64_t i = 0; i < v->count; i++)
        r->narrow[i] = (int32_t)r->wide[i];
    r->d.tokens = narrow ? (const void *)r->narrow : r->wide, r->d.token_type = narrow ? KVPRIM_I32 : KVPRIM_I64;
    r->d.rule = v->rule, r->d.count = v->count, r->d.block_tokens = v->block;
    r->d.seed = v->seed, r->d.bigrams = v->bigrams, r->d.keys = r->keys;
    r->d.keys_bytes = key_blocks(&r->d) * kvprim_key_bytes(v->rule);
    r->d.parent_bytes = (int64_t)key_unhex(&hex, r->parent), r->d.parent = r->d.parent_bytes ? r->parent : NULL;
    (void)key_unhex(&key, r->want);
    uint8_t *bytes = r->bytes;
    for (int n = 0; *extra; extra += *extra == ' ') {
        kvprim_key_extra *const x = &r->extra[r->d.extra_count++];
        long long block, token;
        (void)sscanf(extra, "%lld %lld %n", &block, &token, &n);
        extra += n;
        x->block = block, x->token = token, x->data = bytes;
        x->bytes = (int64_t)key_unhex(&extra, bytes), bytes += x->bytes;
    }
    r->d.extra = r->d.extra_count ? r->extra : NULL;
#ifdef XXH_VERSION_NUMBER
    return 1;
#else
    return v->rule == KVPRIM_KEY_SGLANG || v->rule == KVPRIM_KEY_TRTLLM || v->rule == KVPRIM_KEY_LMCACHE ||
           v->rule <= KVPRIM_KEY_VLLM_SHA256_CBOR;
#endif
}

/* Fails the test unless the last key is that of the vector, and nothing was written after it. */
static void key_judge(const key_request *r, const char *what)
{
    const int64_t bytes = kvprim_key_bytes(r->d.rule);
    if (memcmp(key_last(r), r->want, (size_t)bytes) != 0)
        fail("%s: rule %d, %lld tokens, blocks of %lld: another key", what, (int)r->d.rule, (long long)r->d.count,
             (long long)r->d.block_tokens);
    for (int64_t i = r->d.keys_bytes; i < r->d.keys_bytes + 64 && i < (int64_t)sizeof r->keys; i++)
        if (r->keys[i])
            fail("%s: rule %d writes past its keys", what, (int)r->d.rule);
}

/* All vectors: alone, in two calls, and side by side with each other. */
static void test_key_vectors(void)
{
    enum { most = LENGTH(key_vectors) };
    key_request *const all = allocate(most * sizeof *all), *const r = all;
    kvprim_keys_desc *const descs = allocate(most * sizeof *descs);
    int n = 0, left_out = 0;
    for (size_t k = 0; k < most; k++)
        for (int narrow = 0; narrow <= (key_vectors[k].kind <= key_uint31); narrow++) {
            if (!key_make(r, &key_vectors[k], narrow)) {
                CHECK_ERROR(kvprim_keys(&r->d, 1), KVPRIM_ERROR_UNSUPPORTED, "needs xxhash.h");
                left_out += !narrow;
                continue;
            }
            if (kvprim_keys(&r->d, 1) != KVPRIM_OK)
                fail("vector %zu: %s", k, kvprim_last_error());
            key_judge(r, "alone");
            const int64_t first = key_blocks(&r->d) / 2, bytes = kvprim_key_bytes(r->d.rule);
            if (first == 0 || r->d.extra)
                continue;
            memset(r->keys, 0, sizeof r->keys);
            kvprim_keys_desc part = r->d;
            part.count = first * part.block_tokens + part.bigrams;
            CHECK(kvprim_keys(&part, 1) == KVPRIM_OK);
            part = r->d;
            part.tokens = (const char *)part.tokens + first * part.block_tokens * (narrow ? 4 : 8);
            part.count -= first * part.block_tokens, part.parent_bytes = 0;
            part.parent = r->keys + (first - 1) * bytes, part.keys = r->keys + first * bytes;
            part.keys_bytes -= first * bytes;
            CHECK(kvprim_keys(&part, 1) == KVPRIM_OK);
            key_judge(r, "in two calls");
        }
    for (size_t k = 0; k < most; k++)
        if (key_make(&all[n], &key_vectors[k], 0))
            descs[n] = all[n].d, n++;
    CHECK(kvprim_keys(descs, (size_t)n) == KVPRIM_OK);
    for (int k = 0; k < n; k++)
        key_judge(&all[k], "side by side");
    if (left_out)
        printf("  %d vectors of %d need xxhash.h\n", left_out, (int)most);
    free(all);
    free(descs);
}

static void test_sha256(void)
{
    static const struct {
        const char *text, *digest;
        size_t repeats;
    } cases[] = {{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1},
                 {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1},
                 {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1},
                 {"a", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 1000000}}; /* FIPS 180-2 */
    for (size_t k = 0; k < LENGTH(cases); k++) {
        const size_t length = strlen(cases[k].text), bytes = length * cases[k].repeats;
        uint8_t *const data = allocate(bytes), digest[33] = {0}, want[32];
        const char *hex = cases[k].digest;
        for (size_t i = 0; i < cases[k].repeats; i++)
            memcpy(data + i * length, cases[k].text, length);
        kvprim_sha256(data, bytes, digest);
        (void)key_unhex(&hex, want);
        CHECK(memcmp(digest, want, 32) == 0 && digest[32] == 0);
        free(data);
    }
    uint8_t data[300], digest[32], all[32 * 300] = {0}, want[32]; /* every length, in one digest */
    const char *hex = "f65f14b090e805017546322e618401d41f0710c213e013a5131eb38bbe8f367f";
    for (size_t n = 0; n < sizeof data; n++) {
        data[n] = (uint8_t)(7 * n);
        kvprim_sha256(data, n, digest);
        memcpy(all + 32 * n, digest, 32);
    }
    kvprim_sha256(all, sizeof all, digest);
    (void)key_unhex(&hex, want);
    CHECK(memcmp(digest, want, 32) == 0);
}

static void test_key_events(void)
{
    static const uint8_t key[32] = {1, 2, 3, 4, 5, 6, 7, 8, 9, [24] = 0x91, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98};
    CHECK(kvprim_key_event(KVPRIM_KEY_VLLM_SHA256, key) == 0x9192939495969798);
    CHECK(kvprim_key_event(KVPRIM_KEY_VLLM_XXHASH_CBOR, key + 16) == 0x9192939495969798);
    CHECK(kvprim_key_event(KVPRIM_KEY_SGLANG, key) == 0x0102030405060708);
    CHECK(kvprim_key_event(KVPRIM_KEY_TRTLLM, key + 1) == 0x0203040506070809);
    CHECK(kvprim_key_event(KVPRIM_KEY_LMCACHE, key) == 0x0102030405060708);
    CHECK(kvprim_key_event(KVPRIM_KEY_DYNAMO, key) == 0x0807060504030201);
    CHECK(kvprim_key_event(KVPRIM_KEY_XXH3, key) == 0x0102030405060708);
    CHECK(kvprim_key_event((kvprim_key_rule)0, key) == 0 && kvprim_key_event((kvprim_key_rule)10, key) == 0);
    static const int64_t bytes[] = {0, 32, 32, 16, 16, 32, 32, 8, 8, 16, 0};
    for (int rule = 0; rule <= 10; rule++)
        CHECK(kvprim_key_bytes((kvprim_key_rule)rule) == bytes[rule]);
}

/* ---- bad descriptors ---- */

#define BAD_KEYS(change, status, words)                                                                                \
    do {                                                                                                               \
        kvprim_keys_desc d[2];                                                                                         \
        d[0] = d[1] = good;                                                                                            \
        d[1].change;                                                                                                   \
        CHECK_ERROR(kvprim_keys(d, 2), KVPRIM_ERROR_##status, words);                                                  \
        CHECK(strstr(kvprim_last_error(), "(requests["));                                                              \
        CHECK(memcmp(keys, untouched, sizeof keys) == 0);                                                              \
    } while (0)

static void test_bad_keys(void)
{
    int64_t around[128] = {0}, wide[64] = {0}, *const tokens = around + 32;
    int32_t narrow[64] = {0};
    uint8_t keys[4 * 32], untouched[4 * 32], digest[64] = {0}, *const big = allocate(KVPRIM_MAX_KEY_BLOCK + 1);
    memset(big, 1, KVPRIM_MAX_KEY_BLOCK + 1);
    memset(keys, 0x5a, sizeof keys), memcpy(untouched, keys, sizeof keys);
    kvprim_key_extra extra[6] = {[4] = {0, 0, digest, 5}, [5] = {1, 0, digest, 5}}, *const x = extra + 4;
    kvprim_keys_desc good = {.tokens = tokens,
                             .token_type = KVPRIM_I64,
                             .rule = KVPRIM_KEY_VLLM_SHA256,
                             .count = 64,
                             .block_tokens = 16,
                             .parent = digest,
                             .keys = keys,
                             .keys_bytes = sizeof keys};
    CHECK_ERROR(kvprim_keys(NULL, 1), KVPRIM_ERROR_NULL, "kvprim_keys: requests is NULL");
    CHECK(kvprim_keys(NULL, 0) == KVPRIM_OK);
    kvprim_keys_desc less = good; /* than a block: nothing else counts */
    less.count = 1, less.extra_count = 1;
    CHECK(kvprim_keys(&less, 1) == KVPRIM_OK);
    BAD_KEYS(count = -1, SIZE, "kvprim_keys: count is -1, less than 0 (requests[1])");
    BAD_KEYS(rule = (kvprim_key_rule)0, ARGUMENT, "rule is 0,");
    BAD_KEYS(rule = (kvprim_key_rule)10, ARGUMENT, "rule is 10,");
    BAD_KEYS(token_type = (kvprim_index_type)0, ARGUMENT, "token_type is 0, neither");
    BAD_KEYS(token_type = (kvprim_index_type)3, ARGUMENT, "token_type is 3, neither");
    BAD_KEYS(tokens = NULL, NULL, "tokens is NULL");
    BAD_KEYS(tokens = (char *)tokens + 2, ARGUMENT, "is not aligned to");
    BAD_KEYS(keys = NULL, NULL, "keys is NULL");
    BAD_KEYS(keys = (char *)(tokens + 32), OVERLAP, "keys");
    BAD_KEYS(keys = (char *)tokens - sizeof keys + 1, OVERLAP, "tokens");
    BAD_KEYS(parent = keys + 127, OVERLAP, "parent");
    BAD_KEYS(block_tokens = 0, SIZE, "block_tokens is 0, less than 1");
    BAD_KEYS(block_tokens = -16, SIZE, "block_tokens is -16, less than 1");
    BAD_KEYS(block_tokens = KVPRIM_MAX_KEY_BLOCK / 10 + 1, SIZE,
             "block_tokens is 2458, less than 1 or more than fit into KVPRIM_MAX_KEY_BLOCK, 2457");
    BAD_KEYS(keys_bytes = 127, SIZE, "keys_bytes is 127, less than the keys of all blocks, 4 times 32");
    BAD_KEYS(keys_bytes = -128, SIZE, "keys_bytes is -128, less than");
    BAD_KEYS(parent_bytes = -1, ARGUMENT, "parent_bytes is -1");
    BAD_KEYS(parent_bytes = 65, ARGUMENT, "parent_bytes is 65, not as the rule's keys, 32, nor up to 64");
    BAD_KEYS(seed = 1, ARGUMENT, "seed is 1, but");
    BAD_KEYS(bigrams = 1, ARGUMENT, "bigrams is 1,");
    BAD_KEYS(reserved = 1, ARGUMENT, "reserved is 1");
    BAD_KEYS(extra_count = -1, ARGUMENT, "extra_count is -1");
    BAD_KEYS(extra_count = 1, NULL, "extra is NULL");
    good.extra = x, good.extra_count = 2;
    BAD_KEYS(keys = (char *)x - 127, OVERLAP, "extra");
    BAD_KEYS(extra_count = (int64_t)1 << 59, SIZE,
             "extra_count is 576460752303423488, more than the 4 blocks"); /* 2^64 bytes */
    x[1].data = NULL;
    BAD_KEYS(count = 64, NULL, "extra[1].data is NULL");
    x[1].data = digest;
    x[1].block = 0;
    BAD_KEYS(count = 64, SIZE, "extra[1] has block 0 and token 0");
    x[1].block = 1;
    x[1].block = 4;
    BAD_KEYS(count = 64, SIZE, "extra[1] has block 4 and token 0");
    x[1].block = 1;
    x[0].block = -1;
    BAD_KEYS(count = 64, SIZE, "extra[0] has block -1 and token 0");
    x[0].block = 0;
    x[1].token = 1;
    BAD_KEYS(count = 64, SIZE, "extra[1] has block 1 and token 1");
    x[1].token = 0;
    x[1].bytes = 0;
    BAD_KEYS(count = 64, SIZE, "extra[1].bytes is 0,");
    x[1].bytes = 5;
    x[1].data = big, x[1].bytes = KVPRIM_MAX_KEY_BLOCK - 159;
    BAD_KEYS(count = 64, SIZE, "extra[1].bytes is 24417,");
    x[1].bytes = KVPRIM_MAX_KEY_BLOCK - 160;
    CHECK(kvprim_keys(&good, 1) == KVPRIM_OK); /* the most that fits */
    memcpy(keys, untouched, sizeof keys);
    BAD_KEYS(rule = KVPRIM_KEY_LMCACHE, ARGUMENT, "extra_count is 2, less than 0, or more");
    BAD_KEYS(rule = KVPRIM_KEY_SGLANG, ARGUMENT, "extra_count is 2");
    good.rule = KVPRIM_KEY_TRTLLM;
    BAD_KEYS(count = 64, SIZE, "extra[0].bytes is 5,");
    x[0].bytes = x[1].bytes = 32, x[1].block = 0;
    BAD_KEYS(count = 64, SIZE, "extra[1] has block 0 and token 0");
    x[1].token = 16;
    BAD_KEYS(count = 64, SIZE, "extra[1] has block 0 and token 16");
    x[1].token = 1;
    x[1].bytes = INT64_MAX; /* the sum with the block's first 32 has more than 63 bits */
    BAD_KEYS(count = 64, SIZE, "extra[1].bytes is 9223372036854775807,");
    x[1].bytes = 32;
    CHECK(kvprim_keys(&good, 1) == KVPRIM_OK);
    memcpy(keys, untouched, sizeof keys);
    good.extra = NULL, good.extra_count = 0;
    BAD_KEYS(parent_bytes = 31, ARGUMENT, "parent_bytes is 31");
    memset(wide, 0, sizeof wide);
    wide[63] = (int64_t)1 << 31;
    BAD_KEYS(tokens = wide, SIZE, "tokens[63] is 2147483648, less than 0 or more than 2147483647");
    good.rule = KVPRIM_KEY_SGLANG;
    for (int at = 0; at < 64; at++) {
        char words[40];
        (void)snprintf(words, sizeof words, "tokens[%d] is -1, less than 0", at);
        memset(wide, 0, sizeof wide), wide[at] = -1;
        BAD_KEYS(tokens = wide, SIZE, words);
        memset(narrow, 0, sizeof narrow), narrow[at] = -1;
        good.token_type = KVPRIM_I32;
        BAD_KEYS(tokens = narrow, SIZE, words);
        good.token_type = KVPRIM_I64;
    }
    wide[63] = -1, good.count = 63, good.keys_bytes = 96; /* a token of no block */
    good.tokens = wide, wide[63] = 0, wide[62] = -1;
    CHECK(kvprim_keys(&good, 1) == KVPRIM_OK);
    memcpy(keys, untouched, sizeof keys);
    BAD_KEYS(bigrams = 2, ARGUMENT, "bigrams is 2");
    wide[62] = 0, wide[16] = -1, good.count = 17; /* the token after the only block of pairs */
    BAD_KEYS(bigrams = 1, SIZE, "tokens[16] is -1");
    good.count = 15, good.tokens = NULL, good.keys = NULL, good.keys_bytes = 0; /* no block */
    CHECK(kvprim_keys(&good, 1) == KVPRIM_OK);
    memset(&good, 0, sizeof good);
    CHECK(kvprim_keys(&good, 1) == KVPRIM_OK);
    free(big);
}

#if !defined(_WIN32)
/* Tokens and keys between inaccessible pages: nothing past either end is read or written. */
static void test_keys_guard_pages(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = 16 * page;
    char *const pages = mmap(NULL, 2 * room + 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *const from = pages + page, *const to = from + room + page;
    CHECK(pages != MAP_FAILED && mprotect(from, room, PROT_READ | PROT_WRITE) == 0 &&
          mprotect(to, room, PROT_READ | PROT_WRITE) == 0);
    memset(from, 0, room);
    for (int rule = 1; rule <= 9; rule++)
        for (int64_t block = 1; block <= 40; block++)
            for (int k = 0; k < 8; k++) {
                const int at_end = k & 1, wide = k >> 1 & 1;
                kvprim_keys_desc d = {.tokens = from, .token_type = wide ? KVPRIM_I64 : KVPRIM_I32};
                d.rule = (kvprim_key_rule)rule, d.block_tokens = block, d.count = 5 * block + block / 2;
                d.bigrams = k >> 2 && (rule == KVPRIM_KEY_SGLANG || rule == KVPRIM_KEY_DYNAMO);
                d.keys_bytes = (d.count - d.bigrams) / block * kvprim_key_bytes(d.rule);
                const int64_t read =
                    (d.count - d.bigrams) / block * block + d.bigrams; /* no byte of the rest is read */
                d.tokens = at_end ? from + room - read * (wide ? 8 : 4) : from;
                d.keys = at_end ? to + room - d.keys_bytes : to;
                d.parent = at_end ? to + room - d.keys_bytes - 32 : to + d.keys_bytes;
                const kvprim_status status = kvprim_keys(&d, 1);
                if (status != KVPRIM_OK && status != KVPRIM_ERROR_UNSUPPORTED)
                    fail("rule %d: %s", rule, kvprim_last_error());
            }
    munmap(pages, 2 * room + 3 * page);
}
#endif

/* ---- the table ---- */

enum { TABLE_KEYS = 200 };

/* Random calls, beside a list of what is in the table. Few different first bytes: keys collide, and chains wrap around
   the end of a table that is nearly full. */
static void one_table(int64_t key_bytes, int64_t slots)
{
    uint64_t keys[TABLE_KEYS][8], *const room = allocate((size_t)slots * (8 + (size_t)key_bytes));
    int64_t values[TABLE_KEYS], got[TABLE_KEYS], count = 0;
    kvprim_key_table t;
    CHECK(kvprim_key_table_init(&t, room, (size_t)slots * (8 + (size_t)key_bytes) + 7, key_bytes) == KVPRIM_OK);
    CHECK(t.slots == (uint64_t)slots && t.count == 0);
    for (int k = 0; k < TABLE_KEYS; k++) {
        memset(keys[k], 0, sizeof keys[k]);
        keys[k][0] = key_bytes == 8 ? hash_u64((uint64_t)k) : hash_u64((uint64_t)k % 7);
        keys[k][key_bytes / 8 - 1] += (uint64_t)k;
        values[k] = -1;
    }
    for (int step = 0; step < 4000; step++) {
        const int k = (int)below(TABLE_KEYS), n = (int)below(6);
        if (below(2)) {
            const int64_t value = (int64_t)(random_u64() >> 1);
            const int fits = values[k] >= 0 || count + 1 < slots;
            const kvprim_status status = kvprim_key_table_put(&t, keys[k], value);
            CHECK(status == (fits ? KVPRIM_OK : KVPRIM_ERROR_SIZE));
            count += fits && values[k] < 0;
            values[k] = fits ? value : values[k];
        } else {
            CHECK(kvprim_key_table_erase(&t, keys[k]) == values[k]);
            count -= values[k] >= 0;
            values[k] = -1;
        }
        CHECK(t.count == count);
        uint8_t packed[6 * 64];
        int known = 0, first = (int)below(TABLE_KEYS - 6);
        for (int i = 0; i < n; i++)
            memcpy(packed + i * key_bytes, keys[first + i], (size_t)key_bytes);
        while (known < n && values[first + known] >= 0)
            known++;
        memset(got, 0x77, sizeof got);
        CHECK(kvprim_key_table_longest(&t, packed, (size_t)n, step % 3 ? got : NULL) == (size_t)known);
        for (int i = 0; i < n; i++)
            CHECK(got[i] == (step % 3 && i < known ? values[first + i] : 0x7777777777777777));
    }
    for (int k = 0; k < TABLE_KEYS; k++)
        CHECK(kvprim_key_table_longest(&t, keys[k], 1, got) == (values[k] >= 0));
    free(room);
}

static void test_key_table(void)
{
    static const int64_t slots[] = {2, 3, 17, 150, 199, 300, 1000};
    for (int64_t key_bytes = 8; key_bytes <= 64; key_bytes += 8)
        for (size_t k = 0; k < LENGTH(slots); k++)
            one_table(key_bytes, slots[k]);
}

/* Long lists, whose slots are fetched ahead. */
static void test_key_table_longest(void)
{
    enum { n = 5000 };
    const size_t bytes = kvprim_key_table_bytes(n, 16);
    uint64_t *const keys = allocate(n * 16);
    int64_t *const values = allocate(n * sizeof *values);
    void *const room = allocate(bytes);
    kvprim_key_table t;
    CHECK(kvprim_key_table_init(&t, room, bytes, 16) == KVPRIM_OK && t.slots >= n * 4 / 3);
    fill(keys, n * 16);
    for (int64_t i = 0; i < n; i++)
        CHECK(kvprim_key_table_put(&t, keys + 2 * i, i) == KVPRIM_OK);
    CHECK(kvprim_key_table_longest(&t, keys, n, values) == n);
    for (int64_t i = 0; i < n; i++)
        CHECK(values[i] == i);
    for (int64_t i = n; i-- > 0; CHECK(kvprim_key_table_longest(&t, keys, n, NULL) == (size_t)i), i -= i > 40 ? 37 : 0)
        CHECK(kvprim_key_table_erase(&t, keys + 2 * i) == i);
    CHECK(kvprim_key_table_erase(&t, keys) == -1);
    free(room), free(values), free(keys);
}

static void test_bad_key_table(void)
{
    uint64_t room[20], key[4] = {0};
    kvprim_key_table t;
    CHECK_ERROR(kvprim_key_table_init(NULL, room, 160, 32), KVPRIM_ERROR_NULL, "kvprim_key_table_init: table is NULL");
    CHECK_ERROR(kvprim_key_table_init(&t, NULL, 160, 32), KVPRIM_ERROR_NULL, "memory is NULL");
    CHECK_ERROR(kvprim_key_table_init(&t, room, 79, 32), KVPRIM_ERROR_SIZE, "bytes is 79, less than two slots");
    CHECK_ERROR(kvprim_key_table_init(&t, room, 160, 12), KVPRIM_ERROR_SIZE, "key_bytes is 12, not a multiple");
    CHECK_ERROR(kvprim_key_table_init(&t, room, 160, 0), KVPRIM_ERROR_SIZE, "key_bytes is 0");
    CHECK_ERROR(kvprim_key_table_init(&t, room, 160, 72), KVPRIM_ERROR_SIZE, "key_bytes is 72");
    CHECK_ERROR(kvprim_key_table_init(&t, (char *)room + 2, 150, 32), KVPRIM_ERROR_ARGUMENT, "not aligned as int64_t");
    CHECK(kvprim_key_table_init(&t, room, 80, 32) == KVPRIM_OK && t.slots == 2);
    CHECK_ERROR(kvprim_key_table_put(NULL, key, 1), KVPRIM_ERROR_NULL, "kvprim_key_table_put: table is NULL");
    CHECK_ERROR(kvprim_key_table_put(&t, NULL, 1), KVPRIM_ERROR_NULL, "key is NULL");
    CHECK_ERROR(kvprim_key_table_put(&t, key, -1), KVPRIM_ERROR_SIZE, "value is -1, less than 0");
    CHECK(kvprim_key_table_put(&t, key, 1) == KVPRIM_OK && kvprim_key_table_put(&t, key, 2) == KVPRIM_OK);
    key[0] = 1;
    CHECK_ERROR(kvprim_key_table_put(&t, key, 1), KVPRIM_ERROR_SIZE, "the table is full: count is 1");
    CHECK(kvprim_key_table_bytes(0, 32) == 0 && kvprim_key_table_bytes(-1, 32) == 0);
    CHECK(kvprim_key_table_bytes(10, 31) == 0 && kvprim_key_table_bytes(INT64_MAX, 32) == 0);
    CHECK(kvprim_key_table_bytes(1, 32) >= 80 && kvprim_key_table_bytes(3000, 8) >= 4000 * 16);
}

#if !defined(_WIN32)
/* Any number of readers at once, and a writer alone, as the contract has it. */
static struct key_readers {
    kvprim_key_table table;
    pthread_rwlock_t lock;
    uint64_t keys[256];
} key_readers;

static void *key_reader(void *arg)
{
    struct key_readers *const r = arg;
    int64_t values[256];
    for (int k = 0; k < 3000; k++) {
        pthread_rwlock_rdlock(&r->lock);
        const size_t n = kvprim_key_table_longest(&r->table, r->keys, 256, values);
        pthread_rwlock_unlock(&r->lock);
        CHECK(n >= 128 && values[0] == 0 && values[n - 1] == (int64_t)n - 1);
    }
    return NULL;
}

static void test_key_readers(void)
{
    static uint64_t room[2 * 300];
    struct key_readers *const r = &key_readers;
    pthread_t threads[4];
    fill(r->keys, sizeof r->keys);
    pthread_rwlock_init(&r->lock, NULL);
    CHECK(kvprim_key_table_init(&r->table, room, sizeof room, 8) == KVPRIM_OK);
    for (int64_t k = 0; k < 128; k++)
        CHECK(kvprim_key_table_put(&r->table, &r->keys[k], k) == KVPRIM_OK);
    for (int t = 0; t < 4; t++)
        pthread_create(&threads[t], NULL, key_reader, r);
    for (int k = 0; k < 3000; k++) {
        const int64_t i = 128 + (int64_t)below(128);
        pthread_rwlock_wrlock(&r->lock);
        if (k % 2)
            CHECK(kvprim_key_table_put(&r->table, &r->keys[i], i) == KVPRIM_OK);
        else
            (void)kvprim_key_table_erase(&r->table, &r->keys[i]);
        pthread_rwlock_unlock(&r->lock);
    }
    for (int t = 0; t < 4; t++)
        pthread_join(threads[t], NULL);
    pthread_rwlock_destroy(&r->lock);
}
#endif

static void run_keys(void)
{
    run("keys: SHA-256", test_sha256);
    run("keys: as the engines' Python computes them", test_key_vectors);
    run("keys: numbers for events", test_key_events);
#if !defined(_WIN32)
    run("keys: guard pages", test_keys_guard_pages);
#endif
}

static void run_key_table(void)
{
    run("keys: bad requests", test_bad_keys);
    run("key table", test_key_table);
    run("key table: long lists", test_key_table_longest);
    run("key table: bad arguments", test_bad_key_table);
#if !defined(_WIN32)
    run("key table: readers", test_key_readers);
#endif
}

#endif

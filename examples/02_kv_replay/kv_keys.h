/* SPDX-License-Identifier: MIT */
/* kv_keys.h finds the cached prefix of a prompt by the keys of its pages, as the engines do that have no tree. C11. A
   table leads from the key of a page, which stands for all tokens up to its end, to the page's number. */
#ifndef KV_KEYS_H
#define KV_KEYS_H

#include "kv_device.h"
#include "kvprim.h"

static const struct {
    const char *name;
    kvprim_key_rule rule;
} kv_key_names[] = {{"vllm_sha256", KVPRIM_KEY_VLLM_SHA256},
                    {"vllm_sha256_cbor", KVPRIM_KEY_VLLM_SHA256_CBOR},
                    {"vllm_xxhash", KVPRIM_KEY_VLLM_XXHASH},
                    {"vllm_xxhash_cbor", KVPRIM_KEY_VLLM_XXHASH_CBOR},
                    {"sglang", KVPRIM_KEY_SGLANG},
                    {"trtllm", KVPRIM_KEY_TRTLLM},
                    {"lmcache", KVPRIM_KEY_LMCACHE},
                    {"dynamo", KVPRIM_KEY_DYNAMO},
                    {"xxh3", KVPRIM_KEY_XXH3}};

typedef struct kv_keys {
    kvprim_key_rule rule; /* 0: no keys */
    int64_t bytes, page_tokens;
    kvprim_key_table table;
    unsigned char *of_page;        /* the keys of the cache's pages; valid for those in the table */
    double seconds, other_seconds; /* of finding prefixes; of put and erase */
} kv_keys;

/* Returns 0 for an unknown name. */
static inline kvprim_key_rule kv_keys_rule(const char *name)
{
    for (size_t i = 0; i < sizeof kv_key_names / sizeof *kv_key_names; i++)
        if (strcmp(kv_key_names[i].name, name) == 0)
            return kv_key_names[i].rule;
    return (kvprim_key_rule)0;
}

static inline void kv_keys_init(kv_keys *k, kvprim_key_rule rule, size_t page_tokens, size_t pages)
{
    k->rule = rule, k->bytes = kvprim_key_bytes(rule), k->page_tokens = (int64_t)page_tokens;
    const size_t bytes = kvprim_key_table_bytes((int64_t)pages, k->bytes);
    k->of_page = (unsigned char *)kv_allocate(pages, (size_t)k->bytes);
    if (kvprim_key_table_init(&k->table, kv_allocate(bytes, 1), bytes, k->bytes) != KVPRIM_OK)
        kv_die("%s", kvprim_last_error());
}

/* Computes the keys of all whole pages of a prompt, and returns how many pages of its first `most` tokens are known.
   Their numbers go to pages[]. keys[] and values[] have room for all whole pages. */
static inline size_t kv_keys_match(kv_keys *k, const int32_t *tokens, size_t count, size_t most, unsigned char *keys,
                                   int64_t *values, int32_t *pages)
{
    static const unsigned char seed[16] = "a fixed seed"; /* vLLM draws one for XXH3 */
    const int drawn = k->rule == KVPRIM_KEY_VLLM_XXHASH || k->rule == KVPRIM_KEY_VLLM_XXHASH_CBOR;
    const int64_t whole = (int64_t)count / k->page_tokens;
    const double start = kv_seconds();
    const kvprim_keys_desc desc = {
        .tokens = tokens,
        .token_type = KVPRIM_I32,
        .rule = k->rule,
        .count = (int64_t)count,
        .block_tokens = k->page_tokens,
        .parent = drawn ? seed : NULL,
        .keys = keys,
        .keys_bytes = whole * k->bytes,
    };
    if (kvprim_keys(&desc, 1) != KVPRIM_OK)
        kv_die("%s", kvprim_last_error());
    const size_t known = kvprim_key_table_longest(&k->table, keys, most / (size_t)k->page_tokens, values);
    for (size_t i = 0; i < known; i++)
        pages[i] = (int32_t)values[i];
    k->seconds += kv_seconds() - start;
    return known;
}

/* Adds pages of the cache, whose keys these are. */
static inline void kv_keys_add(kv_keys *k, const unsigned char *keys, const int32_t *pages, size_t count)
{
    const double start = kv_seconds();
    for (size_t i = 0; i < count; i++) {
        unsigned char *const own = k->of_page + (size_t)pages[i] * (size_t)k->bytes;
        memcpy(own, keys + i * (size_t)k->bytes, (size_t)k->bytes);
        if (kvprim_key_table_put(&k->table, own, pages[i]) != KVPRIM_OK)
            kv_die("%s", kvprim_last_error());
    }
    k->other_seconds += kv_seconds() - start;
}

/* Forgets pages that left the cache. */
static inline void kv_keys_forget(kv_keys *k, const int32_t *pages, size_t count)
{
    const double start = kv_seconds();
    for (size_t i = 0; i < count; i++)
        if (kvprim_key_table_erase(&k->table, k->of_page + (size_t)pages[i] * (size_t)k->bytes) != pages[i])
            kv_die("page %" PRId32 " left the cache and has no key", pages[i]);
    k->other_seconds += kv_seconds() - start;
}

#endif /* KV_KEYS_H */

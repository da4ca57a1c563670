/* SPDX-License-Identifier: MIT */
/* Fuzzes the keys: a request gives the same keys whole and block by block, from int32 and from int64, beside another
   request and alone; a bad one writes nothing. The table is compared with a list.
   Arrays are blocks of exactly their size. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

enum { MAX_TOKENS = 4000, MAX_EXTRA = 6, TABLE_KEYS = 64 };

static struct reach reaches[4] = {{"keys", "tokens", 40, MAX_TOKENS, 0, 0, 0},
                                  {"bad requests", "tokens", 40, 0, 0, 0, 0},
                                  {"key table", "calls", 100, 200, 0, 0, 0}};

/* A request whose arrays are blocks of their own. */
struct request {
    kvprim_keys_desc d;
    kvprim_key_extra extra[MAX_EXTRA];
};

static int64_t take_token(struct input *in)
{
    const uint64_t kind = take(in, 1);
    return kind < 128   ? (int64_t)take(in, 2)
           : kind < 192 ? (int64_t)take(in, 3)
           : kind < 224 ? (int32_t)(uint32_t)take(in, 4)
                        : (int64_t)(take(in, 8) >> kind % 32);
}

/* Changes one number, but none that says how much there is to read. */
static void damage(struct input *in, struct request *r)
{
    kvprim_keys_desc *const d = &r->d;
    kvprim_key_extra *const x = &r->extra[take(in, 1) % MAX_EXTRA];
    const int64_t value = (int64_t)take(in, 1) - 128;
    switch (take(in, 1) % 10) {
    case 0:
        d->rule = (kvprim_key_rule)value;
        break;
    case 1:
        d->token_type = (kvprim_index_type)value;
        break;
    case 2:
        d->block_tokens = value;
        break;
    case 3:
        d->keys_bytes -= (int64_t)take(in, 1) % 200;
        break;
    case 4:
        d->bigrams = (int32_t)value, d->count -= d->count > 0;
        break;
    case 5:
        d->seed = (uint64_t)value;
        break;
    case 6:
        d->reserved = (int32_t)value;
        break;
    case 7:
        x->block = value;
        break;
    case 8:
        x->token = value;
        break;
    default:
        x->bytes = value < x->bytes ? value : x->bytes;
    }
}

static void take_request(struct input *in, struct request *r)
{
    memset(r, 0, sizeof *r);
    kvprim_keys_desc *const d = &r->d;
    const uint64_t mostly = take(in, 1);
    d->rule = (kvprim_key_rule)(mostly < 250 ? 1 + mostly % 9 : take(in, 1));
    d->block_tokens = (int64_t)(chance(in, 8) ? take(in, 2) : 1 + take(in, 1) % 40);
    d->count = (int64_t)(chance(in, 4) ? take(in, 2) % MAX_TOKENS : take(in, 2) % 300);
    d->bigrams = (d->rule == KVPRIM_KEY_SGLANG || d->rule == KVPRIM_KEY_DYNAMO) && chance(in, 3);
    d->seed = d->rule == KVPRIM_KEY_DYNAMO ? take(in, 8) : 0;
    const int small = !chance(in, 4);
    int64_t *const tokens = (int64_t *)(void *)new_bytes((size_t)d->count * 8);
    for (int64_t i = 0; i < d->count; i++)
        tokens[i] = i < 30 && !small ? take_token(in) : (int64_t)(hash_u64((uint64_t)tokens[i]) % 200000);
    d->tokens = tokens, d->token_type = KVPRIM_I64;
    const int vllm = d->rule <= KVPRIM_KEY_VLLM_XXHASH_CBOR;
    d->parent_bytes = vllm && chance(in, 2) ? 1 + (int64_t)take(in, 1) % 64 : 0;
    if (chance(in, 2) || (vllm && kvprim_key_bytes(d->rule) == 16))
        d->parent = new_bytes((size_t)(d->parent_bytes ? d->parent_bytes : kvprim_key_bytes(d->rule)));
    d->extra_count =
        vllm || d->rule == KVPRIM_KEY_DYNAMO || d->rule == KVPRIM_KEY_TRTLLM ? (int64_t)take(in, 1) % 7 : 0;
    for (int64_t k = 0, block = 0; k < d->extra_count; k++) {
        kvprim_key_extra *const x = &r->extra[k];
        block += (int64_t)take(in, 1) % 3 + (k && d->rule != KVPRIM_KEY_TRTLLM);
        x->block = block, x->token = d->rule == KVPRIM_KEY_TRTLLM ? (int64_t)take(in, 1) % 40 : 0;
        x->bytes = d->rule == KVPRIM_KEY_TRTLLM ? 32 : (int64_t)(chance(in, 8) ? take(in, 2) : take(in, 1) % 90);
        x->data = new_bytes((size_t)x->bytes);
    }
    d->extra = d->extra_count ? r->extra : NULL;
    const int64_t step = d->block_tokens > 0 ? d->block_tokens : 1, blocks = (d->count - d->bigrams) / step;
    d->keys_bytes = blocks > 0 ? blocks * kvprim_key_bytes(d->rule) : 0;
    if (chance(in, 20))
        damage(in, r);
}

static void free_request(struct request *r, const struct request *before)
{
    for (int64_t k = 0; k < before->d.extra_count; k++)
        free((void *)(uintptr_t)r->extra[k].data);
    free((void *)(uintptr_t)before->d.tokens);
    free((void *)(uintptr_t)before->d.parent);
}

static size_t bytes_of(const kvprim_keys_desc *d)
{
    return d->count > 0 ? (size_t)((d->count - d->bigrams) / d->block_tokens * kvprim_key_bytes(d->rule)) : 0;
}

static void run_keys_again(const kvprim_keys_desc *d, size_t n, const uint8_t *want, const char *what)
{
    uint8_t *const again = new_bytes((size_t)d->keys_bytes);
    kvprim_keys_desc other[2] = {*d, n > 1 ? d[1] : *d};
    uint8_t *const beside = new_bytes((size_t)other[1].keys_bytes);
    other[0].keys = again, other[1].keys = beside;
    require(kvprim_keys(other, n) == KVPRIM_OK && memcmp(again, want, bytes_of(d)) == 0, what);
    free(again), free(beside);
}

static void compare_keys(const kvprim_keys_desc *d, const uint8_t *want)
{
    const int64_t bytes = kvprim_key_bytes(d->rule), blocks = (d->count - d->bigrams) / d->block_tokens;
    kvprim_keys_desc other[2] = {*d, *d};
    run_keys_again(other, 2, want, "beside itself");
    other[1].rule = KVPRIM_KEY_SGLANG, other[1].token_type = KVPRIM_I32, other[1].count = 0;
    run_keys_again(other, 2, want, "beside none");
    int32_t *const narrow = (int32_t *)(void *)new_bytes((size_t)d->count * 4);
    int same = 1;
    for (int64_t i = 0; i < d->count; i++) {
        narrow[i] = (int32_t)((const int64_t *)d->tokens)[i];
        same &= narrow[i] == ((const int64_t *)d->tokens)[i];
    }
    other[0] = *d, other[0].tokens = narrow, other[0].token_type = KVPRIM_I32;
    if (same)
        run_keys_again(other, 1, want, "int32");
    free(narrow);
    const uint8_t *parent = d->parent;
    for (int64_t b = 0, x = 0; b < blocks; b++) { /* one by one */
        kvprim_key_extra extra[MAX_EXTRA];
        kvprim_keys_desc one = *d;
        one.count = d->block_tokens + d->bigrams, one.tokens = (const int64_t *)d->tokens + b * d->block_tokens;
        one.parent = parent, one.parent_bytes = b ? 0 : d->parent_bytes, one.keys_bytes = bytes;
        one.extra = extra, one.extra_count = 0;
        for (; x < d->extra_count && d->extra[x].block == b; x++)
            extra[one.extra_count] = d->extra[x], extra[one.extra_count++].block = 0;
        run_keys_again(&one, 1, want + b * bytes, "one by one");
        parent = want + b * bytes;
    }
}

static void fuzz_table(struct input *in, size_t size)
{
    const int64_t bytes = 8 * (1 + (int64_t)take(in, 1) % 8), slots = 2 + (int64_t)take(in, 1) % 80;
    const size_t room = (size_t)(slots * (8 + bytes));
    uint8_t *const memory = new_bytes(room), *const keys = new_bytes((size_t)(TABLE_KEYS * bytes));
    int64_t values[TABLE_KEYS], got[TABLE_KEYS], count = 0;
    uint64_t calls = 0;
    kvprim_key_table t;
    require(kvprim_key_table_init(&t, memory, room, bytes) == KVPRIM_OK, "init");
    for (int k = 0; k < TABLE_KEYS; k++) { /* half of them begin alike */
        values[k] = -1;
        keys[k * bytes] = (uint8_t)k;
        if (k % 2 && bytes > 8)
            memcpy(keys + k * bytes, keys + bytes, 8), keys[k * bytes + 8] = (uint8_t)k;
    }
    for (; in->next < in->end && calls < 200; calls++) {
        const uint64_t what = take(in, 1), k = what % TABLE_KEYS;
        if (what < 128) {
            const int fits = values[k] >= 0 || count + 1 < slots;
            require((kvprim_key_table_put(&t, keys + k * (uint64_t)bytes, (int64_t)calls) == KVPRIM_OK) == fits, "put");
            count += fits && values[k] < 0;
            values[k] = fits ? (int64_t)calls : values[k];
        } else if (what < 192) {
            require(kvprim_key_table_erase(&t, keys + k * (uint64_t)bytes) == values[k], "erase");
            count -= values[k] >= 0;
            values[k] = -1;
        } else {
            size_t n = 0;
            while (k + n < TABLE_KEYS && values[k + n] >= 0)
                n++;
            require(kvprim_key_table_longest(&t, keys + k * (uint64_t)bytes, TABLE_KEYS - k, got) == n &&
                        memcmp(got, values + k, n * sizeof *got) == 0,
                    "longest");
        }
        require(t.count == count, "count");
    }
    count_reach(&reaches[2], size, calls);
    free(memory), free(keys);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    if (chance(&in, 4)) {
        fuzz_table(&in, size);
        return 0;
    }
    struct request r;
    take_request(&in, &r);
    struct request before = r;
    const size_t room = r.d.keys_bytes > 0 && r.d.keys_bytes < 32 * MAX_TOKENS ? (size_t)r.d.keys_bytes : 0;
    uint8_t *const keys = new_bytes(room), *const untouched = new_bytes(room);
    memcpy(untouched, keys, room);
    r.d.keys = room ? keys : NULL;
    if (kvprim_keys(&r.d, 1) != KVPRIM_OK) {
        require(memcmp(keys, untouched, room) == 0, "an error after something was written");
        count_reach(&reaches[1], size, 0);
    } else {
        if (r.d.count > 0 && (r.d.count - r.d.bigrams) / r.d.block_tokens > 0)
            compare_keys(&r.d, keys);
        count_reach(&reaches[0], size, (uint64_t)r.d.count);
    }
    free(keys), free(untouched);
    free_request(&r, &before);
    return 0;
}

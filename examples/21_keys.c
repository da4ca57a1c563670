/* SPDX-License-Identifier: MIT */
/* Two requests that share a prefix, found by the keys of its blocks, which are those of vLLM: computes the keys, asks the
   table how many are known, takes pages for the rest, stores its rows, and gathers all rows back. Checks each of them.

       cc -O2 -I. examples/21_keys.c -o 21_keys && ./21_keys
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { page = 4, pages = 8, tokens = 11, most_pages = 3, key_bytes = 32 };

static int64_t cache[pages * page]; /* a row of 8 bytes for each slot: token and position; an engine has K and V */
static kvprim_key_table table;
static int64_t next_page;

static void check(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

/* Returns how many tokens were known, or -1 if a row comes back wrong. */
static int64_t run(const int32_t *prompt)
{
    const int64_t whole = tokens / page;
    unsigned char keys[most_pages * key_bytes];
    int64_t page_table[most_pages], slot[tokens], made[tokens], got[tokens];
    const int64_t ends[] = {0, tokens};
    kvprim_keys_desc request = {.tokens = prompt, .token_type = KVPRIM_I32, .rule = KVPRIM_KEY_VLLM_SHA256};
    request.count = tokens, request.block_tokens = page, request.keys = keys, request.keys_bytes = sizeof keys;
    check(kvprim_keys(&request, 1));
    const int64_t known = (int64_t)kvprim_key_table_longest(&table, keys, (size_t)whole, page_table);
    for (int64_t i = known; i < most_pages; i++)
        page_table[i] = next_page++;

    kvprim_slots_desc slots = {.pages = page_table, .requests = 1, .max_pages = most_pages, .cu_seqlens = ends};
    slots.pages_type = slots.token_type = slots.slot_type = KVPRIM_I64;
    slots.page_rows = page, slots.rows = pages * page, slots.slot = slot, slots.count = tokens;
    check(kvprim_slots(&slots));
    for (int i = 0; i < tokens; i++)
        made[i] = 1000 * prompt[i] + i;
    const kvprim_table rows = {.data = made, .rows = tokens}, in_cache = {.data = cache, .rows = pages * page};
    kvprim_store_desc store = {.k_cache = in_cache, .k = rows, .k_bytes = sizeof *cache};
    store.slot = slot + known * page, store.slot_type = KVPRIM_I64, store.count = tokens - known * page;
    store.k.data = made + known * page, store.k.rows = store.count;
    check(kvprim_store(&store)); /* only what was not known */
    kvprim_gather_desc gather = {.dst = rows, .src = in_cache, .row_bytes = sizeof *cache, .index = slot};
    gather.dst.data = got, gather.index_type = KVPRIM_I64, gather.count = tokens;
    check(kvprim_gather(&gather));
    for (int64_t i = known; i < whole; i++) /* full pages can be found from now on */
        check(kvprim_key_table_put(&table, keys + i * key_bytes, page_table[i]));
    printf("%d of %d tokens known, pages %d %d %d, events call its first page %016llx\n", (int)(known * page),
           (int)tokens, (int)page_table[0], (int)page_table[1], (int)page_table[2],
           (unsigned long long)kvprim_key_event(request.rule, keys));
    return memcmp(got, made, sizeof got) == 0 ? known * page : -1;
}

int main(void)
{
    const int32_t first[tokens] = {7, 1, 4, 9, 3, 3, 8, 2, 6, 5, 0}, second[tokens] = {7, 1, 4, 9, 3, 3, 8, 1, 2, 2, 5};
    const size_t bytes = kvprim_key_table_bytes(pages, key_bytes);
    void *const memory = malloc(bytes);
    check(kvprim_key_table_init(&table, memory, bytes, key_bytes));
    const int right = run(first) == 0 && run(second) == page && run(first) == 2 * page;
    free(memory);
    return !right;
}

/* SPDX-License-Identifier: MIT */
/* A step of an engine, on the CPU: finds how much of a new prompt an earlier one has left in the cache, turns the page
   table of the request into slots, stores K and V of its other tokens there, and gathers those of all its tokens, as
   attention would. Checks every row, and prints what it did.

       cc -O2 -I. examples/18_step.c -o 18_step && ./18_step
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct row { /* of K (v = 0) or V; a model's would have numbers that depend on all tokens so far */
    int32_t v, token, position, unused;
} row;

enum { page_rows = 4, slots = 8 * page_rows, tokens = 11, max_pages = 3 };

static row cache[2][slots]; /* K, V */

static void kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

/* Runs a prompt whose first `cached` tokens lie in the cache. Returns how many rows come back wrong. */
static int step(const char *name, const int32_t *prompt, int cached, const int32_t *pages)
{
    static row made[2][tokens], got[2][tokens];
    const int32_t ends[] = {0, tokens}; /* one request, whose tokens are at positions 0, 1, ... */
    int32_t slot[tokens];
    int wrong = 0;
    kvprim_slots_desc where = {.pages = pages, .requests = 1, .max_pages = max_pages, .cu_seqlens = ends};
    where.pages_type = where.token_type = where.slot_type = KVPRIM_I32;
    where.page_rows = page_rows, where.rows = slots;
    where.slot = slot, where.count = tokens;
    kvprim(kvprim_slots(&where));

    for (int i = 0; i < 2 * tokens; i++)
        made[i / tokens][i % tokens] = (row){i / tokens, prompt[i % tokens], i % tokens, 0};
    kvprim_store_desc store = {.slot = slot + cached, .slot_type = KVPRIM_I32, .count = tokens - cached};
    store.k_cache.data = cache[0], store.v_cache.data = cache[1];
    store.k_cache.rows = store.v_cache.rows = slots;
    store.k.data = made[0] + cached, store.v.data = made[1] + cached;
    store.k.rows = store.v.rows = tokens - cached;
    store.k_bytes = store.v_bytes = sizeof(row);
    kvprim(kvprim_store(&store));

    for (int v = 0; v < 2; v++) {
        kvprim_gather_desc gather = {
            .index = slot, .index_type = KVPRIM_I32, .row_bytes = sizeof(row), .count = tokens};
        gather.src.data = cache[v], gather.src.rows = slots;
        gather.dst.data = got[v], gather.dst.rows = tokens;
        kvprim(kvprim_gather(&gather));
    }
    printf("%s: %d tokens cached, %d stored, slots", name, cached, tokens - cached);
    for (int i = 0; i < tokens; i++)
        printf(" %d", (int)slot[i]);
    for (int i = 0; i < 2 * tokens; i++)
        wrong += memcmp(&got[i / tokens][i % tokens], &made[i / tokens][i % tokens], sizeof(row)) != 0;
    printf(", %d of %d rows wrong\n", wrong, 2 * tokens);
    return wrong;
}

int main(void)
{
    const int32_t first[tokens] = {7, 1, 4, 9, 3, 3, 8, 2, 6, 5, 0}, second[tokens] = {7, 1, 4, 9, 3, 3, 1, 1, 2, 2, 5};
    const int32_t first_pages[max_pages] = {2, 5, 0},
                  second_pages[max_pages] = {2, 7, 3}; /* the first page is shared */
    const size_t same = kvprim_prefix_i32(first, tokens, second, tokens), cached = kvprim_prefix_pages(same, page_rows);
    int wrong = step("first prompt", first, 0, first_pages);
    printf("the second has %d tokens in common with it, %d of them in whole pages\n", (int)same, (int)cached);
    wrong += step("second prompt", second, (int)cached, second_pages);
    wrong += step("the first, again", first, tokens - 1, first_pages); /* the second has left it as it was */
    return wrong || same != 6 || cached != page_rows;
}

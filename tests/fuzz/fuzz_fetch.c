/* SPDX-License-Identifier: MIT */
/* Compares kvprim_fetch with its contract, by fetch_cases.h. The input says which sizes a set has, how often it is
   called, what its memory holds in the end, and which one field of the descriptor is wild. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"
#include "../core/fetch_cases.h"

enum { ROOM = 1 << 18, MOST_CALLS = 8 };

static struct reach reaches[4] = {{"fetch", "calls", 24, MOST_CALLS, 0, 0, 0}};

/* Any number, near an end or a power of two. */
static int64_t take_wild(struct input *in)
{
    const uint64_t power = (uint64_t)1 << take(in, 1) % 64;
    return (int64_t)((take(in, 1) % 2 ? power : 0 - power) + take(in, 1) % 5 - 2);
}

/* One field becomes wild. The call may take it, if it may be so; if not, it writes nothing. */
static void spoil(struct input *in, fetch_case *c)
{
    kvprim_fetch_desc d = c->d;
    int64_t *const sizes[] = {&d.set.bytes,     &d.set.states, &d.set.hot_rows, &d.set.tokens,    &d.set.entries,
                              &d.set.reserved,  &d.count,      &d.top_k,        &d.wanted_stride, &d.fresh_count,
                              &d.fresh_stride,  &d.max_pages,  &d.pages_stride, &d.page_rows,     &d.host_rows,
                              &d.k_bytes,       &d.v_bytes,    &d.k_hot.rows,   &d.k.rows,        &d.k_hot.stride,
                              &d.v.page_stride, &d.reserved};
    const size_t which = (size_t)take(in, 1) % (sizeof sizes / sizeof *sizes);
    const int64_t wild = take_wild(in), was = *sizes[which];
    if (wild >= 0 && wild <= was) /* a smaller one may be good, and is no more than what there is room for */
        return;
    *sizes[which] = wild;
    memcpy(c->want, c->memory, c->used);
    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status status = kvprim_fetch_check(&d, NULL, NULL);
    require((status == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    if (status == KVPRIM_OK)
        return; /* its arrays may be larger than there are */
    require(kvprim_fetch(&d) == status, "kvprim_fetch_check and kvprim_fetch differ");
    require(memcmp(c->memory, c->want, c->used) == 0, "wrote in spite of an error");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fetch_case c;
    struct input in = {data, data + size};
    const fetch_sizes most = {1 + (int64_t)take(&in, 1) % 3, 1 + (int64_t)take(&in, 1) % 20,
                              1 + (int64_t)take(&in, 2) % 60, 1 + (int64_t)take(&in, 1) % 20,
                              1 + (int64_t)take(&in, 1) % 40};
    if (!c.memory)
        c = fetch_new(ROOM, 4 * 40);
    random_state = take(&in, 8); /* of all that is in the arrays */
    const int calls = 1 + (int)take(&in, 1) % MOST_CALLS;
    if (!fetch_place(&c, &most))
        return 0;
    fill(c.memory, c.used);
    require(kvprim_fetch_reset(&c.d.set, -1) == KVPRIM_OK, "kvprim_fetch_reset refuses a good set");
    fetch_expect_reset(&c, -1);
    for (int call = 0; call < calls; call++) {
        fetch_fill(&c, chance(&in, 4));
        fetch_expect(&c);
        require(kvprim_fetch(&c.d) == KVPRIM_OK, "kvprim_fetch refuses a good descriptor");
        require(fetch_compare(&c, c.memory, "fetch"), "not what the contract says");
    }
    spoil(&in, &c);
    fill((char *)c.d.set.memory + c.scratch, (size_t)c.d.set.bytes - c.scratch); /* anything: it must not crash */
    require(kvprim_fetch(&c.d) == KVPRIM_OK, "kvprim_fetch refuses a good descriptor");
    for (int64_t i = 0; i < c.d.count * (c.entries - c.d.fresh_count); i++)
        require(c.d.rows[i] >= -1 && c.d.rows[i] < c.d.set.states * c.d.set.hot_rows, "a row is out of range");
    count_reach(reaches, size, (uint64_t)calls);
    return 0;
}

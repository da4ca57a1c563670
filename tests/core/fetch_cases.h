/* SPDX-License-Identifier: MIT */
/* Random sets, descriptors and inputs of fetches, and what must come of them by the contract alone: a time of use for
   each slot, and a search for the oldest. C11 and C++, for test_kvprim.c, fuzz_fetch.c and tests/gpu. Include it after
   harness.h. */
#ifndef FETCH_CASES_H
#define FETCH_CASES_H

#include "slots_oracle.h"

typedef struct fetch_case {
    kvprim_fetch_desc d;
    unsigned char *memory, *want; /* all that the call may touch; what it must hold after it */
    unsigned char *block;         /* that memory lies in */
    size_t used, room;
    size_t scratch; /* bytes at set.memory that calls keep for themselves */
    int64_t entries, clock;
    int32_t *tag; /* of each hot row: its token, -1 */
    int64_t *use; /* and when it was used */
    uint32_t *counters;
} fetch_case;

/* Sizes, at most. */
typedef struct fetch_sizes {
    int64_t states, hot_rows, tokens, top_k, row_bytes;
} fetch_sizes;

/* Bytes after a gap that nobody may touch. NULL if there is no room. */
static inline void *fetch_reserve(fetch_case *c, int64_t bytes, size_t align, size_t past)
{
    const size_t at = (c->used + 16 + below(64) + 63) / 64 * 64 + (64 + past) / align * align % 64;
    if (at + (size_t)bytes + 64 > c->room)
        return NULL;
    c->used = at + (size_t)bytes;
    return c->memory + at;
}

static inline void *fetch_array(fetch_case *c, kvprim_index_type type, int64_t elements)
{
    const size_t size = type == KVPRIM_I64 ? 8 : 4;
    return fetch_reserve(c, elements * (int64_t)size, size, below(64));
}

/* Rows one after the other, in pages, in heads inside a page or a row, with gaps or without. */
static inline kvprim_table fetch_table(fetch_case *c, int64_t rows, int64_t row_bytes, int aligned)
{
    kvprim_table t = table_of(NULL, rows);
    const int64_t unit = aligned ? 16 : 1, gap = below(2) ? unit * (int64_t)below(3) : 0;
    const int64_t heads = 1 + (int64_t)below(3), in_page = 1 + (int64_t)below(6);
    int64_t bytes = row_bytes + gap, piece = row_bytes;
    if (heads > 1 && row_bytes % (heads * unit) == 0)
        t.heads = (int32_t)heads, piece = row_bytes / heads;
    if (below(2))
        t.page_rows = in_page;
    const int64_t group = t.page_rows ? t.page_rows : rows;
    if (t.heads && below(2)) { /* head-major */
        t.stride = piece + gap, t.head_stride = group * t.stride;
        bytes = t.head_stride * t.heads;
    } else {
        t.stride = bytes, t.head_stride = t.heads ? piece : 0;
        bytes = group * t.stride;
    }
    if (t.page_rows)
        t.page_stride = bytes + gap, bytes = (rows + in_page - 1) / in_page * t.page_stride;
    t.data = fetch_reserve(c, bytes, 1, aligned ? 16 * below(4) : below(64));
    return t;
}

static inline unsigned char *fetch_byte(const kvprim_table *t, int64_t row_bytes, int64_t row, int64_t byte)
{
    const int64_t piece = row_bytes / (t->heads ? t->heads : 1);
    const int64_t start =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    return (unsigned char *)t->data + start + byte / piece * t->head_stride + byte % piece;
}

static inline int64_t fetch_most(int64_t most)
{
    return 1 + (int64_t)below((uint64_t)most);
}

static inline kvprim_index_type fetch_type(void)
{
    return below(2) ? KVPRIM_I64 : KVPRIM_I32;
}

/* Makes a descriptor in c->memory, which has c->room bytes. Returns 0 if there is too little room. */
static inline int fetch_place(fetch_case *c, const fetch_sizes *most)
{
    kvprim_fetch_desc *const d = &c->d;
    kvprim_fetch_set *const set = &d->set;
    const int words = below(3) == 0;                          /* tokens and rows as the GPU takes four at a time */
    const int parts = (int)below(4), aligned = (int)below(2); /* 0: a plan alone, 1: K, others: K and V */
    memset(d, 0, sizeof *d);
    c->used = 0, c->clock = 0;
    set->states = fetch_most(most->states), set->hot_rows = fetch_most(most->hot_rows);
    set->tokens = fetch_most(most->tokens);
    d->count = fetch_most(set->states), d->steps = (int32_t)below(5);
    d->top_k = below(4) ? fetch_most(most->top_k) : set->hot_rows < most->top_k ? set->hot_rows : most->top_k;
    d->fresh_count = words || below(2) ? 0 : fetch_most(4);
    d->top_k = words ? (d->top_k + 3) / 4 * 4 : d->top_k;
    c->entries = d->fresh_count + (d->steps ? d->steps : 1) * d->top_k;
    set->entries = c->entries + (int64_t)below(5);
    d->state_type = fetch_type(), d->wanted_type = words ? KVPRIM_I32 : fetch_type(), d->pages_type = fetch_type();
    set->bytes = (int64_t)kvprim_fetch_state_bytes(set);
    set->memory = fetch_reserve(c, set->bytes, 16, 0);
    d->state = fetch_array(c, d->state_type, d->count);
    d->wanted_stride = words || below(2) ? 0 : d->top_k + (int64_t)below(3);
    const int64_t wanted_stride = d->wanted_stride ? d->wanted_stride : d->top_k;
    const int64_t wanted = d->count * (d->steps ? d->steps : 1) * wanted_stride;
    d->wanted = words ? fetch_reserve(c, 4 * wanted, 16, 0) : fetch_array(c, d->wanted_type, wanted);
    if (d->fresh_count) {
        d->fresh_stride = below(2) ? 0 : d->fresh_count + (int64_t)below(3);
        d->fresh = fetch_array(c, d->wanted_type, d->count * (d->fresh_stride ? d->fresh_stride : d->fresh_count));
        d->fresh_rows = (int32_t *)fetch_array(c, KVPRIM_I32, d->count * d->fresh_count);
    }
    const int64_t rows = d->count * (c->entries - d->fresh_count);
    d->rows = (int32_t *)(words ? fetch_reserve(c, 4 * rows, 16, 0) : fetch_array(c, KVPRIM_I32, rows));
    if (below(2)) {
        d->plan_src = (int32_t *)fetch_array(c, KVPRIM_I32, d->count * c->entries);
        d->plan_dst = (int32_t *)fetch_array(c, KVPRIM_I32, d->count * c->entries);
    }
    const int64_t hot = set->states * set->hot_rows + (int64_t)below(3);
    const int64_t host = below(2) ? set->tokens : fetch_most(set->tokens + 20);
    if (parts >= 1) {
        d->k_bytes = aligned ? 16 * fetch_most((most->row_bytes + 15) / 16) : fetch_most(most->row_bytes);
        d->k_hot = fetch_table(c, hot, d->k_bytes, aligned), d->k = fetch_table(c, host, d->k_bytes, aligned);
    }
    if (parts >= 2) {
        d->v_bytes = below(2) ? d->k_bytes : fetch_most(most->row_bytes);
        d->v_hot = fetch_table(c, hot, d->v_bytes, 0), d->v = fetch_table(c, host, d->v_bytes, 0);
    }
    d->host_rows = parts == 0 || below(3) == 0 ? fetch_most(host) : 0;
    if (below(2)) {
        d->page_rows = fetch_most(5), d->max_pages = set->tokens / d->page_rows + (int64_t)below(2);
        d->max_pages += d->max_pages == 0;
        d->pages_by_state = (int32_t)below(2), d->pages_stride = below(2) ? 0 : d->max_pages + (int64_t)below(3);
        const int64_t stride = d->pages_stride ? d->pages_stride : d->max_pages;
        d->pages = fetch_array(c, d->pages_type, (d->pages_by_state ? set->states : d->count) * stride);
    } else
        d->pages_type = (kvprim_index_type)0;
    c->counters = (uint32_t *)fetch_reserve(c, 12, 4, below(64));
    if (c->used + 64 > c->room || !c->counters || !d->rows || !set->memory || (parts && !d->k.data) ||
        (parts > 1 && !d->v.data) || (d->fresh_count && !d->fresh_rows) || (d->plan_src && !d->plan_dst))
        return 0;
    c->used += 64;
    d->hits = below(4) ? c->counters : NULL;
    d->misses = below(4) ? c->counters + 1 : NULL;
    d->rejected = below(4) ? c->counters + 2 : NULL;
    c->scratch = (size_t)kvpi_fetch_layout_of(set).states;
    return 1;
}

/* ---- inputs ---- */

/* One in `wild` names nothing. Others come from a part of the tokens, which moves slowly, so that some are hot. */
static inline void fetch_tokens(const fetch_case *c, const void *array, int64_t rows, int64_t n, int64_t stride,
                                uint64_t wild, int64_t spread)
{
    const kvprim_fetch_desc *const d = &c->d;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t start = (int64_t)below((uint64_t)d->set.tokens);
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = (start + (int64_t)below((uint64_t)spread)) % d->set.tokens;
            set_element((void *)(uintptr_t)array, d->wanted_type, r * stride + i,
                        below(wild) ? token : wild_number(d->wanted_type, d->set.tokens));
        }
    }
}

/* Everything that a call reads, except the tables' rows. twice: two requests may have one state. */
static inline void fetch_fill(fetch_case *c, int twice)
{
    const kvprim_fetch_desc *const d = &c->d;
    const int64_t steps = d->steps ? d->steps : 1, hot = d->set.hot_rows, states = d->set.states;
    const int64_t shift = (int64_t)below((uint64_t)states),
                  spread = below(3) ? fetch_most(hot + hot / 2) : d->set.tokens;
    for (int64_t i = 0; i < d->count; i++) {
        const int64_t state = twice ? (int64_t)below((uint64_t)states) : (i + shift) % states;
        set_element((void *)(uintptr_t)d->state, d->state_type, i,
                    below(8) ? state : wild_number(d->state_type, states) | (int64_t)(twice ? 0 : below(2)));
    }
    if (!twice) /* wild ones may name a state that another request has */
        for (int64_t i = 0; i < d->count; i++) {
            const int64_t state = element_of(d->state, d->state_type, i);
            if (state >= 0 && state < states && state != (i + shift) % states)
                set_element((void *)(uintptr_t)d->state, d->state_type, i, -1);
        }
    fetch_tokens(c, d->wanted, d->count * steps, d->top_k, d->wanted_stride ? d->wanted_stride : d->top_k, 10, spread);
    if (d->fresh_count)
        fetch_tokens(c, d->fresh, d->count, d->fresh_count, d->fresh_stride ? d->fresh_stride : d->fresh_count, 6,
                     spread);
    const int64_t pages = d->pages ? (d->k.rows ? d->k.rows : d->host_rows) / d->page_rows + 1 : 0;
    const int64_t stride = d->pages_stride ? d->pages_stride : d->max_pages;
    for (int64_t r = 0; d->pages && r < (d->pages_by_state ? states : d->count); r++)
        for (int64_t i = 0; i < d->max_pages; i++)
            set_element((void *)(uintptr_t)d->pages, d->pages_type, r * stride + i,
                        below(12) ? (int64_t)below((uint64_t)pages) : wild_number(d->pages_type, pages));
}

/* ---- what must come of it ---- */

static inline unsigned char *fetch_wanted_byte(fetch_case *c, const void *p)
{
    return c->want + ((const unsigned char *)p - c->memory);
}

/* Copies a row, byte by byte, to what is wanted. */
static inline void fetch_expect_copy(fetch_case *c, const kvprim_table *hot, const kvprim_table *host,
                                     int64_t row_bytes, int64_t to, int64_t from)
{
    for (int64_t b = 0; b < row_bytes; b++)
        *fetch_wanted_byte(c, fetch_byte(hot, row_bytes, to, b)) =
            *fetch_wanted_byte(c, fetch_byte(host, row_bytes, from, b));
}

static inline int64_t fetch_host_row(const kvprim_fetch_desc *d, int64_t request, int64_t state, int64_t token)
{
    const int64_t bound = d->host_rows ? d->host_rows : d->k.rows;
    int64_t row = token;
    if (d->pages) {
        if (token / d->page_rows >= d->max_pages)
            return -1;
        const int64_t page =
            element_of(d->pages, d->pages_type,
                       (d->pages_by_state ? state : request) * (d->pages_stride ? d->pages_stride : d->max_pages) +
                           token / d->page_rows);
        if (page < 0 || page > bound)
            return -1;
        row = page * d->page_rows + token % d->page_rows;
    }
    return row < bound ? row : -1;
}

static inline int64_t fetch_find(const fetch_case *c, int64_t state, int64_t token)
{
    for (int64_t s = state * c->d.set.hot_rows; s < (state + 1) * c->d.set.hot_rows; s++)
        if (c->tag[s] == token)
            return s;
    return -1;
}

/* The row that has not been used for the longest time, and not since `since`; -1: there is none. */
static inline int64_t fetch_oldest(const fetch_case *c, int64_t state, int64_t since)
{
    int64_t oldest = -1;
    for (int64_t s = state * c->d.set.hot_rows; s < (state + 1) * c->d.set.hot_rows; s++)
        if (c->use[s] < since && (oldest < 0 || c->use[s] < c->use[oldest]))
            oldest = s;
    return oldest;
}

static inline void fetch_expect_reset(fetch_case *c, int64_t state)
{
    const int64_t hot = c->d.set.hot_rows;
    for (int64_t s = 0; s < c->d.set.states * hot; s++)
        if (state < 0 || s / hot == state)
            c->tag[s] = -1, c->use[s] = s % hot - hot;
}

static inline void fetch_store32(fetch_case *c, int32_t *at, int64_t value)
{
    const int32_t v = (int32_t)value;
    if (at)
        memcpy(fetch_wanted_byte(c, at), &v, 4);
}

static inline void fetch_count(fetch_case *c, uint32_t *counter)
{
    uint32_t n;
    if (!counter)
        return;
    memcpy(&n, fetch_wanted_byte(c, counter), 4);
    n++;
    memcpy(fetch_wanted_byte(c, counter), &n, 4);
}

/* The token that an entry names. */
static inline int64_t fetch_token(const fetch_case *c, int64_t request, int64_t e)
{
    const kvprim_fetch_desc *const d = &c->d;
    const int64_t steps = d->steps ? d->steps : 1, in = e - d->fresh_count;
    if (in < 0)
        return element_of(d->fresh, d->wanted_type, request * (d->fresh_stride ? d->fresh_stride : d->fresh_count) + e);
    return element_of(d->wanted, d->wanted_type,
                      (request * steps + in / d->top_k) * (d->wanted_stride ? d->wanted_stride : d->top_k) +
                          in % d->top_k);
}

/* One request; `served`: it has a state of its own. */
static inline void fetch_expect_request(fetch_case *c, int64_t request, int served)
{
    kvprim_fetch_desc *const d = &c->d;
    const int64_t state = element_of(d->state, d->state_type, request), tokens = d->set.tokens, since = c->clock;
    int64_t planned = request * c->entries;
    for (int64_t e = 0; served && e < c->entries; e++) {
        const int64_t token = fetch_token(c, request, e);
        const int64_t row = token >= 0 && token < tokens ? fetch_find(c, state, token) : -1;
        if (row >= 0)
            c->use[row] = since + e;
    }
    for (int64_t e = 0; e < c->entries; e++) {
        const int64_t token = fetch_token(c, request, e);
        const int fresh = e < d->fresh_count, inside = served && token >= 0 && token < tokens;
        int64_t row = inside ? fetch_find(c, state, token) : -1;
        if (row >= 0)
            fetch_count(c, fresh ? NULL : d->hits);
        else if (inside) {
            const int64_t from = fresh ? -1 : fetch_host_row(d, request, state, token);
            row = fresh || from >= 0 ? fetch_oldest(c, state, since) : -1;
            if (row >= 0) {
                c->tag[row] = (int32_t)token;
                fetch_count(c, fresh ? NULL : d->misses);
                if (d->plan_src) {
                    fetch_store32(c, d->plan_src + planned, from);
                    fetch_store32(c, d->plan_dst + planned++, row);
                }
                if (from >= 0 && d->k_bytes)
                    fetch_expect_copy(c, &d->k_hot, &d->k, d->k_bytes, row, from);
                if (from >= 0 && d->v_bytes)
                    fetch_expect_copy(c, &d->v_hot, &d->v, d->v_bytes, row, from);
            }
        }
        if (row >= 0)
            c->use[row] = since + e;
        else if (token >= 0 && state >= 0)
            fetch_count(c, d->rejected);
        fetch_store32(c,
                      fresh ? d->fresh_rows + request * d->fresh_count + e
                            : d->rows + request * (c->entries - d->fresh_count) + e - d->fresh_count,
                      row);
    }
    for (; d->plan_src && planned < (request + 1) * c->entries; planned++) {
        fetch_store32(c, d->plan_src + planned, -1);
        fetch_store32(c, d->plan_dst + planned, -1);
    }
    c->clock += c->entries;
}

/* c->want becomes what c->memory must hold after the call, except the set. */
static inline void fetch_expect(fetch_case *c)
{
    const kvprim_fetch_desc *const d = &c->d;
    memcpy(c->want, c->memory, c->used);
    for (int64_t i = 0; i < d->count; i++) {
        const int64_t state = element_of(d->state, d->state_type, i);
        int served = state >= 0 && state < d->set.states;
        for (int64_t other = 0; other < i; other++)
            served = served && element_of(d->state, d->state_type, other) != state;
        fetch_expect_request(c, i, served);
    }
}

/* Compares; returns whether all is as it must be. */
static inline int fetch_compare(const fetch_case *c, const unsigned char *got, const char *what)
{
    const size_t set = (size_t)((const unsigned char *)c->d.set.memory - c->memory), set_bytes = (size_t)c->d.set.bytes;
    for (size_t b = 0; b < c->used; b++)
        if (got[b] != c->want[b] && (b < set || b >= set + set_bytes)) {
            fail("%s: byte %zu (%zd of rows, %zd of k_hot) is %d, not %d", what, b,
                 (const char *)c->memory + b - (const char *)c->d.rows,
                 (const char *)c->memory + b - (const char *)c->d.k_hot.data, got[b], c->want[b]);
            return 0;
        }
    return 1;
}

/* most_hot: rows of all states. */
static inline fetch_case fetch_new(size_t room, size_t most_hot)
{
    fetch_case c;
    memset(&c, 0, sizeof c);
    c.room = room;
    c.block = (unsigned char *)allocate(room + 64);
    c.memory = c.block + (64 - (uintptr_t)c.block % 64) % 64;
    c.want = (unsigned char *)allocate(room);
    c.tag = (int32_t *)allocate(most_hot * sizeof *c.tag);
    c.use = (int64_t *)allocate(most_hot * sizeof *c.use);
    return c;
}

static inline void fetch_free(fetch_case *c)
{
    free(c->block), free(c->want), free(c->tag), free(c->use);
}

#endif

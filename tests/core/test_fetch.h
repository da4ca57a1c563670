/* SPDX-License-Identifier: MIT */
/* kvprim_fetch against an order of its own (fetch_cases.h). Part of test_kvprim.c. */
#ifndef CORE_TEST_FETCH_H
#define CORE_TEST_FETCH_H

#include "fetch_cases.h"

enum { FETCH_ROOM = 1 << 22, FETCH_HOT = 4096 };

/* Many calls of one random set, some of which empty a state. */
static void one_fetch_case(fetch_case *c, const fetch_sizes *most, int calls)
{
    if (!fetch_place(c, most))
        return;
    fill(c->memory, c->used);
    CHECK(kvprim_fetch_reset(&c->d.set, -1) == KVPRIM_OK);
    fetch_expect_reset(c, -1);
    for (int call = 0; call < calls && !counts->faults; call++) {
        if (below(20) == 0) {
            const int64_t state = (int64_t)below((uint64_t)c->d.set.states);
            CHECK(kvprim_fetch_reset(&c->d.set, state) == KVPRIM_OK);
            fetch_expect_reset(c, state);
        }
        fetch_fill(c, below(4) == 0);
        fetch_expect(c);
        if (kvprim_fetch(&c->d) != KVPRIM_OK)
            fail("%s", kvprim_last_error());
        (void)fetch_compare(c, c->memory, "fetch");
    }
}

static void test_fetches(void)
{
    static const fetch_sizes sizes[] = {
        {3, 20, 60, 12, 90}, {5, 60, 300, 50, 40}, {2, 4, 9, 4, 20}, {1, 1, 3, 2, 16}, {2, 900, 5000, 300, 8}};
    fetch_case c = fetch_new(FETCH_ROOM, FETCH_HOT);
    for (int round = 0; round < 200 / (int)every; round++)
        one_fetch_case(&c, &sizes[(size_t)round % LENGTH(sizes)], 30);
    one_fetch_case(&c, &(fetch_sizes){1, 60, 300, 7000, 8},
                   4); /* as many entries as a call of the GPU takes in parts */
    fetch_free(&c);
}

/* A set that fills up, told step by step: the oldest row goes, what a call wants stays, and repeats use a row last. */
static void test_fetch_order(void)
{
    enum { hot = 3, tokens = 8 };
    _Alignas(16) static char set_memory[2048];
    char host[tokens][2], rows_of[hot][2];
    int32_t wanted[4], rows[4];
    const int32_t state = 0;
    uint32_t misses = 0, rejected = 0;
    kvprim_fetch_desc d = {.set = {set_memory, sizeof set_memory, 1, hot, tokens, 4, 0}, .count = 1, .state = &state};
    d.state_type = d.wanted_type = KVPRIM_I32, d.wanted = wanted, d.top_k = 4, d.rows = rows;
    d.k_hot = table_of(rows_of, hot), d.k = table_of(host, tokens), d.k_bytes = 2;
    d.misses = &misses, d.rejected = &rejected;
    static const struct {
        int32_t wanted[4], rows[4];
        uint32_t misses, rejected;
    } steps[] = {{{4, 5, -1, -1}, {0, 1, -1, -1}, 2, 0},     /* the lowest rows first */
                 {{6, -1, -1, 4}, {2, -1, -1, 0}, 3, 0},     /* 5 is the oldest now */
                 {{7, -1, 7, -1}, {1, -1, 1, -1}, 4, 0},     /* and goes; then 6 */
                 {{0, 4, -1, -1}, {2, 0, -1, -1}, 5, 0},     /* which goes for 0, though 4 is wanted after it */
                 {{1, 2, 3, 5}, {1, 2, 0, -1}, 8, 1},        /* more than there is room for */
                 {{8, 1, 2, 1}, {-1, 1, 2, 1}, 8, 2},        /* no such token */
                 {{6, -1, -1, -1}, {0, -1, -1, -1}, 9, 2},   /* 3 was the oldest */
                 {{7, -1, -1, -1}, {2, -1, -1, -1}, 10, 2}}; /* then 2: 1 was used after it, too */
    memset(set_memory, 0xff, sizeof set_memory);
    memset(rows_of, '-', sizeof rows_of);
    for (int t = 0; t < tokens; t++)
        host[t][0] = (char)('a' + t), host[t][1] = '.';
    CHECK(kvprim_fetch_state_bytes(&d.set) <= sizeof set_memory && kvprim_fetch_reset(&d.set, -1) == KVPRIM_OK);
    memset(set_memory + 4, 0xff, 4); /* launches so far: the next number is not 0, which states have after a reset */
    for (size_t i = 0; i < LENGTH(steps); i++) {
        memcpy(wanted, steps[i].wanted, sizeof wanted);
        CHECK(kvprim_fetch(&d) == KVPRIM_OK && misses == steps[i].misses && rejected == steps[i].rejected);
        if (memcmp(rows, steps[i].rows, sizeof rows) != 0)
            fail("step %zu: rows %d %d %d %d", i, rows[0], rows[1], rows[2], rows[3]);
        for (int k = 0; k < 4; k++)
            CHECK(rows[k] < 0 || rows_of[rows[k]][0] == 'a' + wanted[k]);
    }
}

/* Other layers fetch the same rows by the plan, in one transfer. */
static void test_fetch_plan(void)
{
    enum { layers = 3, hot = 6, tokens = 20, top_k = 4, n = 2 };
    _Alignas(16) static char set_memory[4096];
    static char host[layers][tokens * 2][5], rows_of[layers][n * hot][5];
    int32_t wanted[n][top_k], rows[n][top_k], plan[2][n * top_k], pages[n][tokens];
    const int32_t state[n] = {1, 0};
    kvprim_fetch_desc d = {
        .set = {set_memory, sizeof set_memory, n, hot, tokens, top_k, 0}, .count = n, .state = state};
    d.state_type = d.wanted_type = d.pages_type = KVPRIM_I32, d.wanted = wanted, d.top_k = top_k, d.rows = rows[0];
    d.pages = pages, d.max_pages = tokens, d.page_rows = 1, d.host_rows = 2 * tokens;
    d.plan_src = plan[0], d.plan_dst = plan[1];
    kvprim_transfer_desc move = {
        .dst = table_of(rows_of, n * hot), .src = table_of(host, 2 * tokens), .layers = layers};
    move.row_bytes = 5, move.src_index = plan[0], move.dst_index = plan[1], move.index_type = KVPRIM_I32;
    move.count = n * top_k;
    fill(host, sizeof host);
    for (int i = 0; i < n * tokens; i++)
        pages[i / tokens][i % tokens] = (i * 7) % (2 * tokens);
    CHECK(kvprim_fetch_reset(&d.set, -1) == KVPRIM_OK);
    for (int call = 0; call < 50; call++) {
        for (int i = 0; i < n * top_k; i++)
            wanted[i / top_k][i % top_k] = (int32_t)below(tokens);
        CHECK(kvprim_fetch(&d) == KVPRIM_OK && kvprim_transfer(&move) == KVPRIM_OK);
        for (int l = 0; l < layers; l++)
            for (int i = 0; i < n * top_k; i++) {
                const int32_t row = rows[i / top_k][i % top_k], from = pages[i / top_k][wanted[i / top_k][i % top_k]];
                CHECK(row / hot == state[i / top_k] && memcmp(rows_of[l][row], host[l][from], 5) == 0);
            }
    }
}

/* A set whose memory holds anything: nothing outside it is touched, and no call hangs. */
static void test_fetch_garbage(void)
{
    static const fetch_sizes sizes = {3, 20, 60, 12, 30};
    fetch_case c = fetch_new(FETCH_ROOM, FETCH_HOT);
    for (int round = 0; round < 100; round++) {
        if (!fetch_place(&c, &sizes))
            continue;
        fill(c.memory, c.used);
        for (int call = 0; call < 5; call++) {
            const size_t word = c.scratch + 4 * (size_t)below(((uint64_t)c.d.set.bytes - c.scratch) / 4);
            const int32_t wild = below(2) ? (int32_t)below(70) : (int32_t)random_u64();
            memcpy((char *)c.d.set.memory + word, &wild, 4);
            fetch_fill(&c, 0);
            CHECK(kvprim_fetch(&c.d) == KVPRIM_OK);
            for (int64_t i = 0; i < c.d.count * (c.entries - c.d.fresh_count); i++)
                CHECK(c.d.rows[i] >= -1 && c.d.rows[i] < c.d.set.states * c.d.set.hot_rows);
        }
    }
    fetch_free(&c);
}

/* What kvprim_fetch_check resolves is as good as what it resolves it from. */
static void test_fetch_resolved(void)
{
    static char set[1 << 14], rows[16][8], hot[4][4][8];
    static const int32_t state = 0, wanted[4] = {0, 1, 2, 3};
    int32_t places[4];
    kvprim_fetch_desc d = {.set = {.states = 1, .hot_rows = 4, .tokens = 16, .entries = 4}, .count = 1, .k_bytes = 32};
    d.set.bytes = (int64_t)kvprim_fetch_state_bytes(&d.set);
    d.set.memory = set + (16 - (uintptr_t)set % 16) % 16;
    CHECK(d.set.bytes > 0 && d.set.bytes <= (int64_t)sizeof set - 16);
    d.state = &state, d.wanted = wanted, d.state_type = d.wanted_type = KVPRIM_I32, d.top_k = 4, d.rows = places;
    d.k_hot = (kvprim_table){.data = hot, .rows = 4, .heads = 4, .head_stride = 8, .stride = 32};
    d.k = (kvprim_table){.data = rows, .rows = 16, .heads = 4, .head_stride = KVPRIM_HEADS_SHARED};
    for (int again = 0; again < 2; again++)
        CHECK(kvprim_fetch_check(&d, &d, NULL) == KVPRIM_OK && d.k.head_stride == KVPRIM_HEADS_SHARED);
}

#endif

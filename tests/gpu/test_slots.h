/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for kvprim_cuda_slots. They make slots in the memory of
   test_rows.h, once by kvprim_slots and once on the GPU, and compare every byte. Include it after test_rows.h. */
#ifndef TEST_SLOTS_H
#define TEST_SLOTS_H

/* ---- one descriptor, by the host function and by the code under test ---- */

static kvprim_slots_desc on_device(const arena *a, kvprim_slots_desc d)
{
    for (const void **const array : {&d.pages, &d.page_starts, &d.request, &d.position, &d.cu_seqlens, &d.starts})
        *array = on_device(a, *array);
    d.slot = on_device(a, d.slot);
    d.rejected = on_device(a, d.rejected);
    return d;
}

/* Allows access to elements of an array. Returns false if they lie outside the memory. */
static bool visit_array(arena *a, const void *array, kvprim_index_type type, int64_t elements)
{
    const int64_t size = type == KVPRIM_I64 ? 8 : 4;
    if (!array)
        return true;
    if (offset_of(a, array) > a->used || elements > int64_t(a->used - offset_of(a, array)) / size)
        return false;
    visit_word(a, array, size_t(elements * size));
    return true;
}

/* The page numbers of each request, which have gaps between them. */
static bool visit_pages(arena *a, const kvprim_slots_desc *d)
{
    const int64_t size = d->pages_type == KVPRIM_I64 ? 8 : 4, room = int64_t(a->used);
    if (d->page_starts)
        return visit_array(a, d->pages, d->pages_type, d->max_pages) &&
               visit_array(a, d->page_starts, d->pages_type, d->requests + 1);
    if (d->requests > 1 && (d->requests > room || d->pages_stride > room / d->requests))
        return false;
    for (int64_t r = 0; r < d->requests; r++)
        if (!visit_array(a, static_cast<const char *>(d->pages) + r * d->pages_stride * size, d->pages_type,
                         d->max_pages))
            return false;
    return true;
}

/* d is resolved. */
static bool visit_slots(arena *a, const kvprim_slots_desc *d)
{
    return visit_pages(a, d) && visit_array(a, d->slot, d->slot_type, d->count) &&
           visit_array(a, d->request, d->token_type, d->count) &&
           visit_array(a, d->position, d->token_type, d->count) &&
           visit_array(a, d->cu_seqlens, d->token_type, d->requests + 1) &&
           visit_array(a, d->starts, d->token_type, d->requests) && visit_array(a, d->rejected, KVPRIM_I32, 1);
}

/* As try_move. */
static outcome try_slots(arena *a, const kvprim_slots_desc *desc, const char *what)
{
    kvprim_slots_desc on = on_device(a, *desc), resolved = {};
    snprintf(current, sizeof current, "slots: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_slots_check(&on, nullptr);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (kvprim_slots_check(desc, &resolved) != KVPRIM_OK || !visit_slots(a, &resolved)))
        return OUTSIDE;
    return run_both(
        a, want, want_text, runs, [&] { return kvprim_slots(desc); },
        [&] {
            const kvprim_status got = kvprim_cuda_slots(&on, a->launch);
            if (!is_asked())
                memset(&on, 0xff, sizeof on);
            return got;
        });
}

/* ---- descriptors ---- */

enum { by_pairs, by_lengths, by_lengths_and_starts, n_slots_forms };

struct slots_case {
    int form;
    unsigned types; /* bits: of pages, tokens and slots; whether with page_starts */
    int64_t requests, max_pages, pad, page_rows, rows, count;
    bool plain; /* no padding, and nothing outside */
};

static void *reserve_array(arena *a, kvprim_index_type type, int64_t elements)
{
    const size_t size = type == KVPRIM_I64 ? 8 : 4;
    return reserve(a, size_t(elements) * size, size * below(4));
}

/* Mostly below n, and sometimes negative, n or more, or any number. */
static int64_t some_number(const slots_case *c, kvprim_index_type type, int64_t n)
{
    if (!c->plain && chance(12))
        return chance(2) ? n + random_below(3) : chance(2) ? -1 - random_below(3) : wild(type);
    return random_below(uint64_t(n));
}

/* The counts of requests, some of which are 0: at the beginning, at the end, and every third one between. Some tokens
   may lie before the first request or after the last. */
static void fill_lengths(const kvprim_slots_desc *d, const slots_case *c)
{
    const int64_t empty_ends = d->requests > 4 ? 2 : 0, outside = c->plain || d->count < 8 ? 0 : 3;
    const int64_t tokens = d->count - 2 * outside, others = d->requests - 2 * empty_ends;
    int64_t at = chance(4) && !c->plain ? -5 : outside;
    void *const cu = const_cast<void *>(d->cu_seqlens);
    for (int64_t r = 0; r <= d->requests; r++) {
        const int64_t k = r - empty_ends, until = outside + (k < 0 ? 0 : k < others ? tokens * k / others : tokens);
        if (at < until && (r == d->requests || r > d->requests - empty_ends || r % 3))
            at = until;
        set_index(cu, d->token_type, r, at);
    }
}

/* Most are those of requests with up to max_pages pages each. */
static void fill_page_starts(const kvprim_slots_desc *d, const slots_case *c)
{
    int64_t at = 0;
    for (int64_t r = 0; d->page_starts && r <= c->requests; r++) {
        set_index(const_cast<void *>(d->page_starts), d->pages_type, r,
                  c->plain || !chance(12) ? at : some_number(c, d->pages_type, d->max_pages));
        at += c->plain ? c->max_pages : random_below(uint64_t(c->max_pages) + 1);
    }
}

static void fill_slots(const kvprim_slots_desc *d, const slots_case *c)
{
    const int64_t positions = c->max_pages * c->page_rows, pages = c->rows / c->page_rows;
    void *const arrays[] = {const_cast<void *>(d->pages), const_cast<void *>(d->request),
                            const_cast<void *>(d->position), const_cast<void *>(d->starts)};
    const int64_t step = c->max_pages + c->pad;
    fill_page_starts(d, c);
    for (int64_t n = 0; n < c->requests * step - c->pad; n++)
        set_index(arrays[0], d->pages_type, n,
                  n % step < c->max_pages ? some_number(c, d->pages_type, pages ? pages : 1) : 0);
    for (int64_t i = 0; arrays[1] && i < c->count; i++) {
        set_index(arrays[1], d->token_type, i, some_number(c, d->token_type, c->requests));
        set_index(arrays[2], d->token_type, i, some_number(c, d->token_type, positions));
    }
    for (int64_t r = 0; arrays[3] && r < c->requests; r++)
        set_index(arrays[3], d->token_type, r, some_number(c, d->token_type, positions));
    if (d->cu_seqlens)
        fill_lengths(d, c);
}

static kvprim_slots_desc make_slots(arena *a, const slots_case *c)
{
    kvprim_slots_desc d = {};
    d.pages_type = type_of(c->types), d.token_type = type_of(c->types >> 1), d.slot_type = type_of(c->types >> 2);
    d.requests = c->requests, d.max_pages = c->max_pages, d.page_rows = c->page_rows, d.rows = c->rows;
    d.pages_stride = c->pad && c->types < 8 ? c->max_pages + c->pad : 0;
    d.count = c->count;
    if (c->types >= 8) {
        d.max_pages *= c->requests;
        d.page_starts = reserve_array(a, d.pages_type, c->requests + 1);
    }
    d.pages = reserve_array(a, d.pages_type, c->requests * (c->max_pages + c->pad) - c->pad);
    if (c->form == by_pairs) {
        d.request = reserve_array(a, d.token_type, c->count);
        d.position = reserve_array(a, d.token_type, c->count);
    } else {
        d.cu_seqlens = reserve_array(a, d.token_type, c->requests + 1);
        d.starts = c->form == by_lengths ? nullptr : reserve_array(a, d.token_type, c->requests);
    }
    d.slot = reserve_array(a, d.slot_type, c->count);
    d.rejected = chance(4) ? nullptr : reserve_counter(a);
    fill_slots(&d, c);
    return d;
}

static void one_slots(arena *a, const slots_case *c)
{
    char what[200];
    empty(a);
    const kvprim_slots_desc d = make_slots(a, c);
    snprintf(what, sizeof what,
             "form %d, types %u, %lld requests x %lld pages (+ %lld) of %lld, %lld rows, %lld tokens", c->form,
             c->types, print_i64(c->requests), print_i64(c->max_pages), print_i64(c->pad), print_i64(c->page_rows),
             print_i64(c->rows), print_i64(c->count));
    if (try_slots(a, &d, what) != RAN)
        fail("%s: did not run", current);
}

/* ---- matrices ---- */

/* Every form and all types; the last two sizes take 64-bit arithmetic, and only int64 slots name so many rows. */
static void slots_matrix(arena *a)
{
    static const struct {
        int64_t requests, max_pages, page_rows, rows;
    } sizes[] = {{1, 1, 1, 1},
                 {1, 40, 16, 1000},
                 {7, 9, 1, 50},
                 {7, 9, 3, 50},
                 {40, 5, 64, 4000},
                 {300, 3, 16, 700},
                 {5, 20, 5, 3},
                 {20, 6, 1 << 16, 1 << 20},
                 {3, 2, 1 << 30, int64_t(1) << 31},
                 {9, 5, int64_t(1) << 31, int64_t(1) << 33},
                 {9, 5, 1000003, int64_t(1) << 40}};
    for (const auto &s : sizes)
        for (int form = 0; form < n_slots_forms; form++)
            for (unsigned types = 0; types < 16; types++) {
                slots_case c = {form, types, s.requests, s.max_pages, 0, s.page_rows, s.rows, 0, false};
                if (s.rows > int64_t(1) << 31 && !(types & 4))
                    continue;
                for (const int64_t count : {1, 2, 33, 500}) {
                    c.count = count, c.pad = random_below(4), c.plain = chance(5);
                    one_slots(a, &c);
                }
            }
}

static void slots_counts(arena *a)
{
    static const struct {
        int64_t requests, count;
    } sizes[] = {{1, 8192},   {2, 129},     {16, 128},  {17, 256},    {18, 257},    {32, 32},    {33, 8192},
                 {256, 8192}, {289, 3000},  {290, 1},   {5000, 8192}, {5000, 32},   {4913, 600}, {4914, 600},
                 {1, 100000}, {64, 100000}, {500, 500}, {8192, 8192}, {1000, 4000}, {37, 296}};
    for (const auto &s : sizes)
        for (int form = 0; form < n_slots_forms; form++)
            for (unsigned types = 0; types < 8; types++) {
                const slots_case c = {form, types * 2, s.requests, 5, 0, 16, 1000, s.count, chance(3)};
                one_slots(a, &c);
            }
}

/* More tokens than threads in a launch. */
static void slots_rounds(arena *a)
{
    for (int form = 0; form < 2; form++) {
        const slots_case c = {form, 0, 100, 900, 0, 16, 1 << 20, 300 + 2 * kvpc_slots_most_blocks * kvpc_slots_threads,
                              false};
        one_slots(a, &c);
    }
}

static void small_slots(arena *a)
{
    for (int form = 0; form < n_slots_forms; form++)
        for (const int64_t count : {1, 32, 513, 20000}) {
            const slots_case c = {form, unsigned(below(16)), 1 + random_below(60), 7, 1, 16, 500, count, false};
            one_slots(a, &c);
        }
}

/* Positions up to 2^63 and past it, strides that only one request takes, and products past 2^64. */
static void slots_limits(arena *a)
{
    static const int64_t most = INT64_MAX;
    static const struct {
        int64_t start, first, page_rows, rows, stride;
    } cases[] = {{most, 0, 16, most, 0},
                 {most - 1, 0, most, most, 0},
                 {-3, 0, 1, 8, 0},
                 {INT64_MIN, 0, 4, 9, 0},
                 {most, INT64_MIN, 2, 100, 0},
                 {INT64_MIN, INT64_MIN, 2, 100, 0},
                 {-2, INT64_MIN + 2, 4, 9, 0},
                 {5, -7, 3, 1000, most >> 4},
                 {0, 0, most, 1, 0},
                 {0, 0, int64_t(1) << 62, most, 0},
                 {0, -1, most / 2, most, 1 << 20},
                 {most - 2, 2, most / 3, most, most >> 4},
                 {1, -5, 1, most, 0}};
    for (const auto &k : cases)
        for (int f = 0; f < 2 * n_slots_forms; f++) {
            const int form = f % n_slots_forms;
            empty(a);
            const slots_case c = {form, f == form ? 7u : 15u, 1, 4, 0, 1, 6, 8, true};
            kvprim_slots_desc d = make_slots(a, &c);
            d.page_rows = k.page_rows, d.rows = k.rows, d.pages_stride = f == form ? k.stride : 0;
            for (int64_t i = 0; d.position && i < d.count; i++)
                set_index(const_cast<void *>(d.position), d.token_type, i, i % 2 ? k.start : k.first + i);
            for (int64_t n = 0; n < 4; n++)
                set_index(const_cast<void *>(d.pages), d.pages_type, n, n < 2 ? n : n < 3 ? most / k.page_rows : most);
            if (d.cu_seqlens) {
                set_index(const_cast<void *>(d.cu_seqlens), d.token_type, 0, k.first);
                set_index(const_cast<void *>(d.cu_seqlens), d.token_type, 1, 8);
            }
            if (d.starts)
                set_index(const_cast<void *>(d.starts), d.token_type, 0, k.start);
            if (try_slots(a, &d, "limits") != RAN)
                fail("form %d, start %lld: did not run", form, print_i64(k.start));
        }
}

/* Counts that descend, or are noise: nothing outside the arrays is touched, and each slot is -1 or in the cache. */
static void slots_unordered(arena *a)
{
    for (int round = 0; round < 60; round++) {
        empty(a);
        const slots_case c = {1 + round % 2, unsigned(below(16)), 1 + random_below(400), 3, 0, 16, 1000, 300, true};
        kvprim_slots_desc d = make_slots(a, &c);
        for (int64_t r = 0; d.page_starts && r <= d.requests; r++)
            set_index(const_cast<void *>(d.page_starts), d.pages_type, r,
                      round % 2 ? wild(d.pages_type) : random_below(uint64_t(d.max_pages) + 2));
        for (int64_t r = 0; r <= d.requests; r++)
            set_index(const_cast<void *>(d.cu_seqlens), d.token_type, r,
                      round % 3 == 0   ? wild(d.token_type)
                      : round % 3 == 1 ? 300 - r
                                       : random_below(300));
        memcpy(a->got, a->expected, a->used);
        start_visit(a);
        d.pages_stride = d.page_starts ? 0 : d.max_pages;
        CHECK(visit_slots(a, &d));
        before(a);
        for (const std::pair<size_t, size_t> &bytes : a->allowed)
            allow(a, bytes.first, bytes.second);
        const kvprim_slots_desc on = on_device(a, d);
        CHECK(kvprim_cuda_slots(&on, a->launch) == KVPRIM_OK);
        after(a, true);
        for (int64_t i = 0; i < d.count; i++) {
            const int64_t slot = index_at(a->got + offset_of(a, d.slot), d.slot_type, i);
            if (slot < -1 || slot >= d.rows)
                fail("unordered counts, round %d: slot %lld", round, print_i64(slot));
        }
    }
}

static kvprim_slots_desc good_slots(arena *a, int form)
{
    empty(a);
    const slots_case c = {form, 0, 3, 4, 0, 16, 100, 9, true};
    kvprim_slots_desc d = make_slots(a, &c);
    if (!d.rejected)
        d.rejected = reserve_counter(a);
    return d;
}

/* ---- random descriptors ---- */

static outcome random_slots(arena *a, unsigned round)
{
    empty(a);
    const int64_t page_rows = chance(20) ? int64_t(1) << below(40) : 1 + random_below(70);
    const slots_case c = {int(below(n_slots_forms)),
                          unsigned(below(16)),
                          1 + random_below(chance(3) ? 600 : 20),
                          1 + random_below(30),
                          chance(3) ? random_below(9) : 0,
                          page_rows,
                          1 + random_below(chance(3) ? uint64_t(1) << 31 : uint64_t(page_rows) * 20),
                          1 + random_below(600),
                          chance(3)};
    kvprim_slots_desc d = make_slots(a, &c);
    for (int64_t *const field : {&d.requests, &d.max_pages, &d.pages_stride, &d.page_rows, &d.rows, &d.count})
        spoil(field);
    const void **const arrays[] = {&d.pages, &d.request, &d.position, &d.cu_seqlens, &d.starts};
    for (const void **const array : arrays)
        if (chance(60))
            *array = chance(2) ? nullptr : chance(2) ? d.slot : static_cast<const char *>(d.pages) + 2;
    char what[40];
    snprintf(what, sizeof what, "random %u", round);
    return try_slots(a, &d, what);
}

/* ---- slots, then a store, then a gather of what it stored ---- */

struct slots_round_trip {
    slots_case c;
    kvprim_slots_desc slots;
    kvprim_store_desc store;
    kvprim_gather_desc gather;
};

/* Gives the table other pages, each once, so that no two tokens of a case without wrong numbers share a slot. */
static void deal_pages(const slots_round_trip *t)
{
    const std::vector<int64_t> pages = shuffled(t->c.rows / t->c.page_rows);
    fill_slots(&t->slots, &t->c);
    for (int64_t n = 0; n < t->c.requests * t->c.max_pages; n++)
        set_index(const_cast<void *>(t->slots.pages), t->slots.pages_type, n, pages[size_t(n)]);
    for (int64_t i = 0; t->slots.position && i < t->c.count; i++) {
        set_index(const_cast<void *>(t->slots.request), t->slots.token_type, i, i % t->c.requests);
        set_index(const_cast<void *>(t->slots.position), t->slots.token_type, i, i / t->c.requests);
    }
    for (int64_t r = 0; t->slots.starts && r < t->c.requests; r++)
        set_index(const_cast<void *>(t->slots.starts), t->slots.token_type, r, r % 3);
}

static slots_round_trip make_round_trip(arena *a, int form, unsigned types, int64_t count, int64_t row_bytes)
{
    slots_round_trip t = {};
    const int64_t requests = 1 + count / 9, max_pages = 5;
    t.c = {form, types, requests, max_pages, 0, 16, requests * max_pages * 16, count, true};
    empty(a);
    t.slots = make_slots(a, &t.c);
    deal_pages(&t);
    const kvprim_table cache = place(a, &layouts[4], t.c.rows, row_bytes, 0);
    const kvprim_table input = place(a, &layouts[0], count, row_bytes, 0),
                       output = place(a, &layouts[0], count, row_bytes, 0);
    t.store = store_of(cache, input, row_bytes, t.slots.slot, t.slots.slot_type, count, nullptr);
    t.gather = gather_of(output, cache, row_bytes, t.slots.slot, t.slots.slot_type, 0, count, nullptr);
    return t;
}

static void round_trip_on_host(const slots_round_trip *t)
{
    CHECK(kvprim_slots(&t->slots) == KVPRIM_OK);
    CHECK(kvprim_store(&t->store) == KVPRIM_OK && kvprim_gather(&t->gather) == KVPRIM_OK);
    const size_t bytes = size_t(t->c.count * t->store.k_bytes);
    CHECK(memcmp(t->gather.dst.data, t->store.k.data, bytes) == 0);
}

static void enqueue_round_trip(const arena *a, const slots_round_trip *t)
{
    const kvprim_slots_desc slots = on_device(a, t->slots);
    const kvprim_store_desc store = on_device(a, t->store);
    const kvprim_gather_desc gather = on_device(a, t->gather);
    CHECK(kvprim_cuda_slots(&slots, a->launch) == KVPRIM_OK);
    CHECK(kvprim_cuda_store(&store, a->launch) == KVPRIM_OK);
    CHECK(kvprim_cuda_gather(&gather, a->launch) == KVPRIM_OK);
}

#endif /* TEST_SLOTS_H */

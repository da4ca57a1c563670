/* SPDX-License-Identifier: MIT */
/* Tests of kvprim_slots, for test_kvprim.c. */
#ifndef TEST_SLOTS_H
#define TEST_SLOTS_H

#include "slots_oracle.h"

/* All numbers are of one type. Which tokens there are, and their slots, is still to be said. */
static kvprim_slots_desc slots_of(kvprim_index_type type, const void *pages, int64_t requests, int64_t max_pages,
                                  int64_t page_rows, int64_t rows, int64_t count)
{
    kvprim_slots_desc d = {.pages = pages, .requests = requests, .max_pages = max_pages, .page_rows = page_rows};
    d.pages_type = d.token_type = d.slot_type = type;
    d.rows = rows, d.count = count;
    return d;
}

/* Runs it, and compares. What lies around the slots must stay as it is. */
static void check_slots(kvprim_slots_desc d, const char *what)
{
    const size_t size = d.slot_type == KVPRIM_I64 ? 8 : 4, bytes = (size_t)d.count * size;
    char *const memory = (char *)allocate(bytes + 64);
    uint32_t rejected = UINT32_MAX - 1, want_rejected = rejected; /* may wrap */
    kvprim_slots_desc resolved;
    memset(memory, 0x55, bytes + 64);
    d.slot = memory + 32;
    d.rejected = &rejected;
    CHECK(kvprim_slots_check(&d, &resolved) == KVPRIM_OK);
    if (kvprim_slots(&d) != KVPRIM_OK)
        fail("%s: %s", what, kvprim_last_error());
    for (int64_t i = 0; i < d.count; i++) {
        int counted;
        const int64_t want = want_slot(&resolved, i, &counted), got = element_of(d.slot, d.slot_type, i);
        want_rejected += (uint32_t)counted;
        if (got != want)
            fail("%s: token %lld has slot %lld, not %lld", what, (long long)i, (long long)got, (long long)want);
    }
    if (rejected != want_rejected)
        fail("%s: rejected %u, not %u", what, rejected, want_rejected);
    for (size_t b = 0; b < 32; b++)
        if (memory[b] != 0x55 || memory[32 + bytes + b] != 0x55)
            fail("%s: wrote beside the slots", what);
    d.rejected = NULL; /* and without a counter */
    memset(memory + 32, 0x55, bytes);
    CHECK(kvprim_slots(&d) == KVPRIM_OK && rejected == want_rejected);
    for (int64_t i = 0; i < d.count; i++) {
        int counted;
        CHECK(element_of(d.slot, d.slot_type, i) == want_slot(&resolved, i, &counted));
    }
    free(memory);
}

/* ---- random requests ---- */

static kvprim_index_type index_type_of(unsigned n)
{
    return n % 2 ? KVPRIM_I64 : KVPRIM_I32;
}

/* Below n; one in `wild` names nothing. */
static int64_t number_below(kvprim_index_type type, int64_t n, uint64_t wild)
{
    return wild == 0 || below(wild) ? (int64_t)below((uint64_t)n) : wild_number(type, n);
}

/* Counts of tokens in ascending order: the first `empty` requests have none, nor have the last, nor others between.
   `outside` tokens lie before the first request, and as many after the last. */
static void fill_counts(void *cu, kvprim_index_type type, int64_t requests, int64_t tokens, int64_t empty,
                        int64_t outside)
{
    int64_t at = outside;
    for (int64_t r = 0; r <= requests; r++) {
        const int64_t inner = r - empty, inners = requests - 2 * empty, left = tokens - outside;
        if (inner > 0 && inner <= inners && (r % 3 || inner == inners))
            at = inner == inners ? left : at + (int64_t)below((uint64_t)((left - at) / (inners - inner) + 1));
        set_element(cu, type, r, at);
    }
}

struct slots_shape {
    int64_t requests, max_pages, gap, page_rows, rows, count;
};

/* form 0: pairs; 1: counts; 2: counts and starts. Bit 3 of types: with page_starts, as many pages in all. */
static void random_slots(const struct slots_shape *s, int form, unsigned types, uint64_t wild)
{
    kvprim_slots_desc d = slots_of(KVPRIM_I32, NULL, s->requests, s->max_pages, s->page_rows, s->rows, s->count);
    d.pages_type = index_type_of(types), d.token_type = index_type_of(types >> 1);
    d.slot_type = index_type_of(types >> 2), d.pages_stride = s->gap && types < 8 ? s->max_pages + s->gap : 0;
    const int64_t stride = s->max_pages + s->gap, positions = s->max_pages * s->page_rows;
    const int64_t pages_count = s->rows / s->page_rows ? s->rows / s->page_rows : 1;
    void *const pages = allocate((size_t)(s->requests * stride) * 8), *const a = allocate((size_t)(s->count + 1) * 8);
    void *const b = allocate((size_t)(s->count + 1) * 8), *const cu = allocate((size_t)(s->requests + 1) * 8);
    void *const starts = allocate((size_t)s->requests * 8), *const page_starts =
                                                                allocate((size_t)(s->requests + 1) * 8);
    for (int64_t n = 0; n < s->requests * stride; n++)
        set_element(pages, d.pages_type, n, number_below(d.pages_type, pages_count, wild));
    for (int64_t i = 0; i < s->count; i++) {
        set_element(a, d.token_type, i, number_below(d.token_type, s->requests, wild));
        set_element(b, d.token_type, i, number_below(d.token_type, positions, wild));
    }
    for (int64_t r = 0; r < s->requests; r++)
        set_element(starts, d.token_type, r, number_below(d.token_type, positions, wild));
    fill_counts(cu, d.token_type, s->requests, s->count, s->requests > 6 ? 2 : 0, s->count > 9 && wild ? 3 : 0);
    d.pages = pages;
    if (types >= 8) {
        d.page_starts = page_starts, d.max_pages *= s->requests;
        for (int64_t r = 0, at = 0; r <= s->requests; r++) {
            set_element(page_starts, d.pages_type, r,
                        wild && !below(wild) ? number_below(d.pages_type, d.max_pages, 2) : at);
            at += (int64_t)below((uint64_t)(s->max_pages + 1));
        }
    }
    d.request = form == 0 ? a : NULL, d.position = form == 0 ? b : NULL;
    d.cu_seqlens = form ? cu : NULL, d.starts = form == 2 ? starts : NULL;
    char what[160];
    snprintf(what, sizeof what, "slots: form %d, types %u, %lld requests x %lld pages of %lld, %lld tokens", form,
             types, (long long)s->requests, (long long)s->max_pages, (long long)s->page_rows, (long long)s->count);
    check_slots(d, what);
    free(pages), free(a), free(b), free(cu), free(starts), free(page_starts);
}

/* ---- tests ---- */

/* Worked by hand: pages of 4, two requests in pages 5, 2 and 7, -1, and three tokens that lie outside. */
static void test_slots_by_hand(void)
{
    const int32_t pages[] = {5, 2, 7, -1};
    const int64_t request[] = {0, 0, 0, 0, 1, 1, 1, -1, 2, 0, 1}, position[] = {0, 3, 4, 7, 0, 3, 4, 2, 0, 8, -9};
    const int32_t want[] = {20, 23, 8, 11, 28, -1, -1, -1, -1, -1, -1};
    int32_t slot[11];
    uint32_t rejected = 0;
    kvprim_slots_desc d = slots_of(KVPRIM_I32, pages, 2, 2, 4, 31, 11);
    d.request = request, d.position = position, d.token_type = KVPRIM_I64;
    d.slot = slot, d.rejected = &rejected;
    CHECK(kvprim_slots(&d) == KVPRIM_OK && memcmp(slot, want, sizeof want) == 0);
    CHECK(rejected == 3); /* row 31 of the cache, request 2, position 8 */

    const int32_t lengths[] = {1, 1, 4, 4, 6, 6}, starts[] = {9, 2, 9, 3, 9}; /* requests 0, 2 and 4 are empty */
    const int32_t rows_of[] = {9, 9, 5, 2, 9, 9, 7, -1, 9, 9};
    const int32_t want_by_counts[] = {-1, 22, 23, 8, -1, -1, -1};
    d.pages = rows_of, d.requests = 5, d.count = 7, rejected = 0;
    d.request = d.position = NULL;
    d.cu_seqlens = lengths, d.starts = starts, d.token_type = KVPRIM_I32;
    CHECK(kvprim_slots(&d) == KVPRIM_OK && memcmp(slot, want_by_counts, sizeof want_by_counts) == 0);
    CHECK(rejected == 3); /* token 0, row 31, token 6; token 5 is on page -1 */

    const int32_t want_from_0[] = {-1, 20, 21, 22, 28, 29, -1};
    d.starts = NULL, rejected = 0;
    CHECK(kvprim_slots(&d) == KVPRIM_OK && memcmp(slot, want_from_0, sizeof want_from_0) == 0 && rejected == 2);

    const int32_t one_by_one[] = {5, 2, 7, -1, 6}, page_starts[] = {0, 2, 2, 5, 4, 6};
    const int64_t of[] = {0, 0, 0, 1, 2, 2, 2, 2, 3, 4}, at[] = {0, 7, 8, 0, 3, 4, 11, 12, 0, 0};
    const int32_t want_by_starts[] = {20, 11, -1, -1, -1, -1, 27, -1, -1, -1}; /* slot 31 is past the rows */
    d = slots_of(KVPRIM_I32, one_by_one, 5, 5, 4, 31, 10);
    d.page_starts = page_starts, d.request = of, d.position = at, d.token_type = KVPRIM_I64;
    d.slot = slot, d.rejected = &rejected, rejected = 0;
    CHECK(kvprim_slots(&d) == KVPRIM_OK && memcmp(slot, want_by_starts, sizeof want_by_starts) == 0);
    CHECK(rejected == 6); /* position 8, no page, slot 31, position 12; starts that descend, and that pass the end */
}

static void test_slots_matrix(void)
{
    static const int64_t page_rows[] = {1, 3, 16, 64}, requests[] = {1, 2, 7, 8, 300, 5000};
    static const int64_t token_counts[] = {0, 1, 2, 30, 500};
    size_t n = 0;
    for (size_t p = 0; p < LENGTH(page_rows); p++)
        for (size_t r = 0; r < LENGTH(requests); r++)
            for (size_t c = 0; c < LENGTH(token_counts); c++)
                for (unsigned k = 0; k < 48; k++) {
                    const struct slots_shape s = {requests[r],
                                                  1 + (int64_t)below(9),
                                                  (int64_t)below(3),
                                                  page_rows[p],
                                                  page_rows[p] * 40 + (int64_t)below(3),
                                                  token_counts[c]};
                    if (n++ % (requests[r] == 5000 ? 8 * every : every) == 0)
                        random_slots(&s, (int)(k % 3), k / 3, n % 4 ? 9 : 0);
                }
    for (int form = 0; form < 3; form++) {
        const struct slots_shape many = {200, 30, 0, 16, 1 << 20, 8192}, more = {64, 200, 5, 16, 1 << 20, 100000};
        random_slots(&many, form, (unsigned)below(16), 20);
        random_slots(&more, form, (unsigned)below(16), 20);
    }
}

/* Numbers near the ends of their types: nothing overflows, which UBSan sees. */
static void test_slots_limits(void)
{
    static const int64_t most = INT64_MAX, least = INT64_MIN;
    static const int64_t numbers[] = {0,
                                      1,
                                      -1,
                                      3,
                                      INT64_MAX,
                                      INT64_MAX - 1,
                                      INT64_MAX - 2,
                                      INT64_MIN,
                                      INT64_MIN + 1,
                                      INT64_MAX / 2,
                                      INT64_MIN / 2,
                                      (int64_t)1 << 31,
                                      ((int64_t)1 << 32) - 1};
    int64_t pages[4] = {0, 1, 2, INT64_MAX}, cu[3], starts[2], request[8], position[8];
    for (size_t x = 0; x < LENGTH(numbers); x++)
        for (size_t y = 0; y < LENGTH(numbers); y++)
            for (size_t z = 0; z < LENGTH(numbers); z++) {
                const int64_t page_rows = numbers[z] > 0 ? numbers[z] : 1;
                pages[2] = most / page_rows;
                kvprim_slots_desc d = slots_of(KVPRIM_I64, pages, 2, 2, page_rows, y % 2 ? most : most - 5, 8);
                d.request = request, d.position = position;
                for (int i = 0; i < 8; i++) {
                    request[i] = i % 4 == 3 ? numbers[x] : i % 2;
                    position[i] = i < 4 ? numbers[y] : (int64_t)((uint64_t)page_rows * 2 - (uint64_t)i / 2 + 2);
                }
                check_slots(d, "slots: limits, pairs");
                cu[0] = numbers[x] < 5 ? numbers[x] : least, cu[1] = cu[0] < 4 ? 4 : cu[0], cu[2] = 7;
                starts[0] = numbers[y], starts[1] = numbers[x] < 0 ? most + numbers[x] / 2 : most - numbers[x] / 2;
                d.request = d.position = NULL, d.cu_seqlens = cu, d.starts = starts;
                check_slots(d, "slots: limits, counts");
            }
    kvprim_slots_desc one = slots_of(KVPRIM_I64, pages, 1, 4, most, most, 8);
    one.pages_stride = most, one.cu_seqlens = cu;
    check_slots(one, "slots: a stride that nothing takes");
}

/* Slots are what a store and a gather take. */
static void test_slots_then_store(void)
{
    enum { tokens = 60, requests = 7, pages_each = 3, in_page = 4, row = 24, rows = requests * pages_each * in_page };
    int32_t pages[requests * pages_each], cu[requests + 1], slot[tokens];
    static char cache[rows * row], input[tokens * row], output[tokens * row];
    for (int32_t n = 0; n < requests * pages_each; n++)
        pages[n] = (n * 8 + 5) % (requests * pages_each); /* each once */
    for (int32_t r = 0; r <= requests; r++)
        cu[r] = r * tokens / requests;
    fill(input, sizeof input);
    kvprim_slots_desc d = slots_of(KVPRIM_I32, pages, requests, pages_each, in_page, rows, tokens);
    d.cu_seqlens = cu, d.slot = slot;
    const kvprim_store_desc store = store_of(table_of(cache, rows), table_of(input, tokens), row, slot, tokens);
    const kvprim_gather_desc gather = gather_of(table_of(output, tokens), table_of(cache, rows), row, slot, tokens);
    CHECK(kvprim_slots(&d) == KVPRIM_OK);
    CHECK(kvprim_store(&store) == KVPRIM_OK && kvprim_gather(&gather) == KVPRIM_OK);
    CHECK(memcmp(input, output, sizeof input) == 0);
    for (int32_t i = 0; i < tokens; i++) /* and they lie where the table says */
        for (int32_t r = 0; r < requests; r++)
            if (cu[r] <= i && i < cu[r + 1]) {
                const int32_t at = i - cu[r], page = pages[r * pages_each + at / in_page];
                CHECK(memcmp(cache + (page * in_page + at % in_page) * row, input + i * row, row) == 0);
            }
}

static void run_slots(void)
{
    run("slots: worked by hand", test_slots_by_hand);
    run("slots: forms x types x sizes", test_slots_matrix);
    run("slots: numbers near the ends of their types", test_slots_limits);
    run("slots: then a store and a gather", test_slots_then_store);
}

#endif /* TEST_SLOTS_H */

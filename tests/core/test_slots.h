/* SPDX-License-Identifier: MIT */
/* Tests of kvprim_slots, for test_kvprim.c. */
#ifndef TEST_SLOTS_H
#define TEST_SLOTS_H

#include "slots_oracle.h"

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

/* Below n; one in `wild`: negative, past n, or any number of its type. */
static int64_t number_below(kvprim_index_type type, int64_t n, uint64_t wild)
{
    if (wild == 0 || below(wild))
        return (int64_t)below((uint64_t)n);
    switch (below(4)) {
    case 0:
        return -1 - (int64_t)below(3);
    case 1:
        return n + (int64_t)below(3);
    case 2:
        return type == KVPRIM_I64 ? INT64_MAX - (int64_t)below(2) : INT32_MAX;
    default:
        return type == KVPRIM_I64 ? (int64_t)random_u64() : (int32_t)random_u64();
    }
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

/* form 0: pairs; 1: counts; 2: counts and starts. */
static void random_slots(const struct slots_shape *s, int form, unsigned types, uint64_t wild)
{
    kvprim_slots_desc d = {.pages_type = index_type_of(types),
                           .token_type = index_type_of(types >> 1),
                           .slot_type = index_type_of(types >> 2),
                           .requests = s->requests,
                           .max_pages = s->max_pages,
                           .pages_stride = s->gap ? s->max_pages + s->gap : 0,
                           .page_rows = s->page_rows,
                           .rows = s->rows,
                           .count = s->count};
    const int64_t stride = s->max_pages + s->gap, positions = s->max_pages * s->page_rows;
    const int64_t pages_count = s->rows / s->page_rows ? s->rows / s->page_rows : 1;
    void *const pages = allocate((size_t)(s->requests * stride) * 8), *const a = allocate((size_t)(s->count + 1) * 8);
    void *const b = allocate((size_t)(s->count + 1) * 8), *const cu = allocate((size_t)(s->requests + 1) * 8);
    void *const starts = allocate((size_t)s->requests * 8);
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
    d.request = form == 0 ? a : NULL, d.position = form == 0 ? b : NULL;
    d.cu_seqlens = form ? cu : NULL, d.starts = form == 2 ? starts : NULL;
    char what[160];
    snprintf(what, sizeof what, "slots: form %d, types %u, %lld requests x %lld pages of %lld, %lld tokens", form,
             types, (long long)s->requests, (long long)s->max_pages, (long long)s->page_rows, (long long)s->count);
    check_slots(d, what);
    free(pages), free(a), free(b), free(cu), free(starts);
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
    kvprim_slots_desc d = {.pages = pages,
                           .pages_type = KVPRIM_I32,
                           .requests = 2,
                           .max_pages = 2,
                           .page_rows = 4,
                           .rows = 31,
                           .request = request,
                           .position = position,
                           .token_type = KVPRIM_I64,
                           .slot = slot,
                           .slot_type = KVPRIM_I32,
                           .count = 11,
                           .rejected = &rejected};
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
}

static void test_slots_matrix(void)
{
    static const int64_t page_rows[] = {1, 3, 16, 64}, requests[] = {1, 2, 7, 8, 300, 5000};
    static const int64_t token_counts[] = {0, 1, 2, 30, 500};
    size_t n = 0;
    for (size_t p = 0; p < LENGTH(page_rows); p++)
        for (size_t r = 0; r < LENGTH(requests); r++)
            for (size_t c = 0; c < LENGTH(token_counts); c++)
                for (unsigned k = 0; k < 24; k++) {
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
        random_slots(&many, form, (unsigned)below(8), 20);
        random_slots(&more, form, (unsigned)below(8), 20);
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
                kvprim_slots_desc d = {.pages = pages,
                                       .pages_type = KVPRIM_I64,
                                       .requests = 2,
                                       .max_pages = 2,
                                       .page_rows = page_rows,
                                       .rows = y % 2 ? most : most - 5,
                                       .request = request,
                                       .position = position,
                                       .token_type = KVPRIM_I64,
                                       .slot_type = KVPRIM_I64,
                                       .count = 8};
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
    kvprim_slots_desc one = {.pages = pages,
                             .pages_type = KVPRIM_I64,
                             .requests = 1,
                             .max_pages = 4,
                             .pages_stride = most,
                             .page_rows = most,
                             .rows = most,
                             .cu_seqlens = cu,
                             .token_type = KVPRIM_I64,
                             .slot_type = KVPRIM_I64,
                             .count = 8};
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
    const kvprim_slots_desc d = {.pages = pages,
                                 .pages_type = KVPRIM_I32,
                                 .requests = requests,
                                 .max_pages = pages_each,
                                 .page_rows = in_page,
                                 .rows = rows,
                                 .cu_seqlens = cu,
                                 .token_type = KVPRIM_I32,
                                 .slot = slot,
                                 .slot_type = KVPRIM_I32,
                                 .count = tokens};
    const kvprim_store_desc store = {.k_cache = table_of(cache, rows),
                                     .k = table_of(input, tokens),
                                     .k_bytes = row,
                                     .slot = slot,
                                     .slot_type = KVPRIM_I32,
                                     .count = tokens};
    const kvprim_gather_desc gather = {.dst = table_of(output, tokens),
                                       .src = table_of(cache, rows),
                                       .row_bytes = row,
                                       .index = slot,
                                       .index_type = KVPRIM_I32,
                                       .count = tokens};
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

/* All arrays of a good descriptor, apart from each other. */
static struct slots_memory {
    int64_t pages[40], request[20], position[20], cu[20], starts[20], slot[20];
    uint32_t rejected[4];
} slots_memory;

static kvprim_slots_desc good_slots(int form)
{
    struct slots_memory *const m = &slots_memory;
    memset(m, 0, sizeof *m);
    memset(m->slot, 0x55, sizeof m->slot);
    m->cu[1] = m->cu[2] = m->cu[3] = 8;
    const kvprim_slots_desc d = {.pages = m->pages,
                                 .pages_type = KVPRIM_I64,
                                 .requests = 3,
                                 .max_pages = 4,
                                 .page_rows = 16,
                                 .rows = 100,
                                 .request = form ? NULL : m->request,
                                 .position = form ? NULL : m->position,
                                 .cu_seqlens = form ? m->cu : NULL,
                                 .starts = form ? m->starts : NULL,
                                 .token_type = KVPRIM_I64,
                                 .slot = m->slot,
                                 .slot_type = KVPRIM_I64,
                                 .count = 8,
                                 .rejected = m->rejected};
    return d;
}

/* Each is refused with this text, and nothing is written. */
#define REFUSE(form, change, status, words)                                                                            \
    do {                                                                                                               \
        kvprim_slots_desc d = good_slots(form);                                                                        \
        change;                                                                                                        \
        const struct slots_memory before = slots_memory;                                                               \
        CHECK_ERROR(kvprim_slots(&d), status, words);                                                                  \
        CHECK_ERROR(kvprim_slots_check(&d, NULL), status, words);                                                      \
        CHECK(memcmp(&before, &slots_memory, sizeof before) == 0);                                                     \
    } while (0)

static void test_slots_missing(void)
{
    CHECK_ERROR(kvprim_slots(NULL), KVPRIM_ERROR_NULL, "kvprim_slots: desc is NULL");
    for (int form = 0; form < 2; form++) {
        kvprim_slots_desc good = good_slots(form);
        CHECK(kvprim_slots(&good) == KVPRIM_OK);
        REFUSE(form, d.pages = NULL, KVPRIM_ERROR_NULL, "kvprim_slots: pages is NULL");
        REFUSE(form, d.slot = NULL, KVPRIM_ERROR_NULL, "slot is NULL");
        REFUSE(form, d.reserved_pages = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field is not 0");
        REFUSE(form, d.reserved_token = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field is not 0");
        REFUSE(form, d.reserved_slot = 1, KVPRIM_ERROR_ARGUMENT, "a reserved field is not 0");
        REFUSE(form, d.reserved = -1, KVPRIM_ERROR_ARGUMENT, "a reserved field is not 0");
        REFUSE(form, d.pages_type = (kvprim_index_type)0, KVPRIM_ERROR_ARGUMENT, "pages_type is 0, neither KVPRIM_I32");
        REFUSE(form, d.token_type = (kvprim_index_type)3, KVPRIM_ERROR_ARGUMENT, "token_type is 3");
        REFUSE(form, d.slot_type = (kvprim_index_type)KVPRIM_INT64, KVPRIM_ERROR_ARGUMENT, "slot_type is 23");
        good.count = 0, good.pages = good.slot = NULL;
        CHECK(kvprim_slots(&good) == KVPRIM_OK);
    }
    REFUSE(0, d.request = NULL, KVPRIM_ERROR_NULL, "request is NULL");
    REFUSE(0, d.position = NULL, KVPRIM_ERROR_NULL, "position is NULL");
    REFUSE(0, d.position = d.request = NULL, KVPRIM_ERROR_NULL, "request, position and cu_seqlens");
    REFUSE(0, d.cu_seqlens = slots_memory.cu, KVPRIM_ERROR_ARGUMENT, "both cu_seqlens");
    REFUSE(0, d.starts = slots_memory.starts, KVPRIM_ERROR_ARGUMENT, "starts (");
    REFUSE(1, d.cu_seqlens = NULL, KVPRIM_ERROR_ARGUMENT, "but cu_seqlens is NULL");
    REFUSE(1, d.request = slots_memory.request, KVPRIM_ERROR_ARGUMENT, "and request (");
    REFUSE(1, d.position = slots_memory.position, KVPRIM_ERROR_ARGUMENT, "and position (");
}

static void test_slots_sizes(void)
{
    const int64_t most = INT64_MAX;
    REFUSE(0, d.count = -1, KVPRIM_ERROR_SIZE, "kvprim_slots: count is -1, less than 0");
    REFUSE(0, d.requests = 0, KVPRIM_ERROR_SIZE, "requests is 0, less than 1");
    REFUSE(0, d.max_pages = -4, KVPRIM_ERROR_SIZE, "max_pages is -4, less than 1");
    REFUSE(0, d.page_rows = 0, KVPRIM_ERROR_SIZE, "page_rows is 0, less than 1");
    REFUSE(0, d.rows = 0, KVPRIM_ERROR_SIZE, "rows is 0, less than 1");
    REFUSE(0, d.pages_stride = 3, KVPRIM_ERROR_SIZE, "pages_stride is 3, less than max_pages, 4");
    REFUSE(0, d.pages_stride = -8, KVPRIM_ERROR_SIZE, "pages_stride is -8, less than max_pages, 4");
    REFUSE(0, d.requests = most, KVPRIM_ERROR_SIZE, "requests is 9223372036854775807, which makes pages larger than");
    REFUSE(0, d.max_pages = most, KVPRIM_ERROR_SIZE, "which makes pages larger");
    REFUSE(0, d.pages_stride = most, KVPRIM_ERROR_SIZE, "which makes pages larger");
    REFUSE(0, d.count = most, KVPRIM_ERROR_SIZE, "count is 9223372036854775807, which makes slot larger than");
    REFUSE(1, d.requests = most; d.max_pages = 1, KVPRIM_ERROR_SIZE, "requests is");
    REFUSE(0, d.slot_type = KVPRIM_I32; d.rows = ((int64_t)1 << 31) + 1, KVPRIM_ERROR_SIZE,
                                        "rows is 2147483649, more than int32 slots can name, 2147483648");
    kvprim_slots_desc good = good_slots(0), resolved;
    good.slot_type = KVPRIM_I32, good.rows = (int64_t)1 << 31;
    CHECK(kvprim_slots_check(&good, &resolved) == KVPRIM_OK && resolved.pages_stride == 4);
    good.pages_stride = 9;
    CHECK(kvprim_slots_check(&good, &resolved) == KVPRIM_OK && resolved.pages_stride == 9);
}

static void *plus(const void *p, size_t bytes)
{
    return (char *)(uintptr_t)p + bytes;
}

static void test_slots_places(void)
{
    struct slots_memory *const m = &slots_memory;
    REFUSE(0, d.pages = plus(m->pages, 2), KVPRIM_ERROR_ARGUMENT, "is not aligned to its type");
    REFUSE(0, d.request = plus(m->request, 1), KVPRIM_ERROR_ARGUMENT, "kvprim_slots: request (");
    REFUSE(0, d.position = plus(m->position, 2), KVPRIM_ERROR_ARGUMENT, "position (");
    REFUSE(1, d.cu_seqlens = plus(m->cu, 1), KVPRIM_ERROR_ARGUMENT, "cu_seqlens (");
    REFUSE(1, d.starts = plus(m->starts, 2), KVPRIM_ERROR_ARGUMENT, "starts (");
    REFUSE(0, d.slot = plus(m->slot, 2), KVPRIM_ERROR_ARGUMENT, "slot (");
    REFUSE(0, d.rejected = (uint32_t *)plus(m->rejected, 2), KVPRIM_ERROR_ARGUMENT, "rejected (");
    REFUSE(0, d.slot = m->position, KVPRIM_ERROR_OVERLAP, "overlaps position (");
    REFUSE(0, d.slot = m->request + 7, KVPRIM_ERROR_OVERLAP, "overlaps request (");
    REFUSE(0, d.slot = m->pages + 11, KVPRIM_ERROR_OVERLAP, "64 bytes) overlaps pages (");
    REFUSE(0, d.slot = m->pages + 20; d.pages_stride = 9, KVPRIM_ERROR_OVERLAP, "176 bytes)"); /* 2 * 9 + 4 numbers */
    REFUSE(1, d.slot = m->cu + 3, KVPRIM_ERROR_OVERLAP, "overlaps cu_seqlens (");
    REFUSE(1, d.slot = m->starts + 2, KVPRIM_ERROR_OVERLAP, "24 bytes)");
    REFUSE(0, d.slot = m->rejected, KVPRIM_ERROR_OVERLAP, "overlaps rejected (");
    REFUSE(0, d.rejected = (uint32_t *)plus(m->position, 60), KVPRIM_ERROR_OVERLAP, "rejected (");
    REFUSE(1, d.rejected = (uint32_t *)plus(m->pages, 92), KVPRIM_ERROR_OVERLAP, "overlaps pages (");
    kvprim_slots_desc d = good_slots(0);
    d.slot = m->pages + 12; /* right after the table */
    CHECK(kvprim_slots(&d) == KVPRIM_OK);
    d.request = d.position; /* inputs may be one */
    CHECK(kvprim_slots(&d) == KVPRIM_OK);
}
#undef REFUSE

static void run_slots(void)
{
    run("slots: worked by hand", test_slots_by_hand);
    run("slots: forms x types x sizes", test_slots_matrix);
    run("slots: numbers near the ends of their types", test_slots_limits);
    run("slots: then a store and a gather", test_slots_then_store);
    run("slots: bad descriptors", test_slots_missing);
    run("slots: bad sizes", test_slots_sizes);
    run("slots: alignment and overlap", test_slots_places);
}

#endif /* TEST_SLOTS_H */

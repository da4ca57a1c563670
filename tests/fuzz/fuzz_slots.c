/* SPDX-License-Identifier: MIT */
/* Compares kvprim_slots with its contract. Numbers in the arrays may be any, sizes may be wild, pointers may be missing
   or misaligned, and slot may lie in another array. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"
#include "../core/slots_oracle.h"

enum { MAX_TOKENS = 40, MAX_REQUESTS = 12, MAX_PAGES = 6 };

static struct reach reaches[4] = {{"slots", "tokens", 250, MAX_TOKENS, 0, 0, 0}};

/* Mostly below n, and sometimes any number of its type, near a power of two or an end. */
static int64_t take_number(struct input *in, kvprim_index_type type, int64_t n)
{
    const uint64_t kind = take(in, 1), near = take(in, 1) % 5;
    if (kind < 200)
        return (int64_t)(take(in, 2) % (uint64_t)n);
    const uint64_t power = kind < 210 ? (uint64_t)INT64_MAX : kind < 220 ? 0 : (uint64_t)1 << take(in, 1) % 64;
    const int64_t x = (int64_t)(power + near - 2);
    return type == KVPRIM_I64 ? x : (int32_t)x;
}

/* A block of exactly so many elements. */
static void *new_array(kvprim_index_type type, int64_t elements)
{
    return new_bytes((size_t)elements * (type == KVPRIM_I64 ? 8 : 4));
}

static void take_array(struct input *in, void *array, kvprim_index_type type, int64_t elements, int64_t n)
{
    for (int64_t k = 0; k < elements; k++)
        set_element(array, type, k, take_number(in, type, n));
}

/* Counts that never descend, from any number on. */
static void take_counts(struct input *in, void *array, kvprim_index_type type, int64_t requests)
{
    int64_t at = chance(in, 8) ? take_number(in, type, 5) : 0;
    at = at > 1000 ? 1000 : at;
    for (int64_t r = 0; r <= requests; r++) {
        set_element(array, type, r, at);
        const int64_t step = (int64_t)(take(in, 1) % 8);
        at = at < 0 && chance(in, 2) ? 0 : at + (step > 5 ? 0 : step);
    }
}

/* Changes one thing of a good descriptor. Returns the status that the call must have then. */
static kvprim_status spoil(struct input *in, kvprim_slots_desc *d)
{
    const int by_count = d->cu_seqlens != NULL;
    int64_t *const sizes[] = {&d->count, &d->requests, &d->max_pages, &d->page_rows, &d->rows};
    kvprim_index_type *const types[] = {&d->pages_type, &d->token_type, &d->slot_type};
    const void **const inputs[] = {&d->pages, by_count ? &d->cu_seqlens : &d->request,
                                   by_count ? &d->starts : &d->position};
    const uint64_t which = take(in, 1);
    const void *other;
    switch (take(in, 1) % 10) {
    case 0:
        *sizes[which % 5] = -(int64_t)(take(in, 8) >> 1) - 1;
        return KVPRIM_ERROR_SIZE;
    case 1:
        *sizes[1 + which % 4] = 0;
        return KVPRIM_ERROR_SIZE;
    case 2:
        d->pages_stride =
            which % 2 && !d->page_starts ? d->max_pages - 1 - (int64_t)which : -(int64_t)(take(in, 8) >> 1) - 1;
        return d->page_starts    ? KVPRIM_ERROR_ARGUMENT
               : d->pages_stride ? KVPRIM_ERROR_SIZE
                                 : KVPRIM_OK; /* 0: max_pages */
    case 3:
        *sizes[which % 2] = INT64_MAX - (int64_t)take(in, 1);
        return KVPRIM_ERROR_SIZE;
    case 4:
        if (by_count && which % 3 == 2)
            d->starts = NULL; /* they are optional */
        else
            *inputs[which % 3] = NULL;
        if (!d->pages)
            return KVPRIM_ERROR_NULL;
        return d->cu_seqlens || (d->request && d->position) ? KVPRIM_OK
               : d->starts                                  ? KVPRIM_ERROR_ARGUMENT
                                                            : KVPRIM_ERROR_NULL;
    case 5:
        *types[which % 3] = (kvprim_index_type)(3 + take(in, 1) % 30);
        return KVPRIM_ERROR_ARGUMENT;
    case 6:
        *inputs[which % 3] = (const char *)*inputs[which % 3] + 1 + which % 2;
        return KVPRIM_ERROR_ARGUMENT;
    case 7:
        *(by_count ? &d->position : &d->starts) = d->pages;
        return KVPRIM_ERROR_ARGUMENT;
    case 8:
        other = *inputs[which % 3];
        d->slot = (char *)(uintptr_t)other;
        return KVPRIM_ERROR_OVERLAP;
    default:
        *(which % 2 ? &d->reserved_pages : &d->reserved_slot) = 1;
        return KVPRIM_ERROR_ARGUMENT;
    }
}

/* The good descriptor's memory. */
struct arrays {
    void *pages, *page_starts, *first, *second, *slot, *before;
    uint32_t *rejected;
    size_t slot_bytes;
};

static kvprim_slots_desc take_desc(struct input *in, struct arrays *a)
{
    const uint64_t types = take(in, 1), form = take(in, 1) % 3;
    kvprim_slots_desc d = {.pages_type = types & 1 ? KVPRIM_I64 : KVPRIM_I32,
                           .token_type = types & 2 ? KVPRIM_I64 : KVPRIM_I32,
                           .slot_type = types & 4 ? KVPRIM_I64 : KVPRIM_I32,
                           .requests = 1 + (int64_t)take(in, 1) % MAX_REQUESTS,
                           .max_pages = 1 + (int64_t)take(in, 1) % MAX_PAGES,
                           .page_rows = take_number(in, KVPRIM_I64, 40),
                           .rows = take_number(in, KVPRIM_I64, 400),
                           .count = 1 + (int64_t)take(in, 1) % MAX_TOKENS};
    const int64_t gap = (int64_t)take(in, 1) % 4, most = d.slot_type == KVPRIM_I32 ? (int64_t)1 << 31 : INT64_MAX;
    const int64_t numbers = (d.requests - 1) * (d.max_pages + gap) + d.max_pages;
    d.page_rows = d.page_rows < 1 ? 1 : d.page_rows;
    d.rows = d.rows < 1 ? 1 : d.rows > most ? most : d.rows;
    d.pages_stride = gap ? d.max_pages + gap : 0;
    a->pages = new_array(d.pages_type, numbers);
    a->first = new_array(d.token_type, form ? d.requests + 1 : d.count);
    a->second = new_array(d.token_type, form ? d.requests : d.count);
    a->slot_bytes = (size_t)d.count * (d.slot_type == KVPRIM_I64 ? 8 : 4);
    a->slot = new_bytes(a->slot_bytes), a->before = new_bytes(a->slot_bytes);
    a->rejected = (uint32_t *)(void *)new_bytes(4);
    memcpy(a->before, a->slot, a->slot_bytes);
    take_array(in, a->pages, d.pages_type, numbers, 10);
    if (form)
        take_counts(in, a->first, d.token_type, d.requests);
    else
        take_array(in, a->first, d.token_type, d.count, d.requests);
    take_array(in, a->second, d.token_type, form ? d.requests : d.count, 80);
    d.pages = a->pages, d.slot = a->slot, d.rejected = chance(in, 4) ? NULL : a->rejected;
    *(form ? &d.cu_seqlens : &d.request) = a->first;
    *(form ? &d.starts : &d.position) = a->second;
    a->page_starts = new_array(d.pages_type, d.requests + 1);
    if (types & 8) {
        take_counts(in, a->page_starts, d.pages_type, d.requests);
        d.page_starts = a->page_starts, d.max_pages = numbers, d.pages_stride = 0;
    } else if (d.requests == 1 && chance(in, 4))
        d.pages_stride = INT64_MAX; /* nothing takes it */
    return d;
}

static void compare(const kvprim_slots_desc *d, uint32_t before)
{
    kvprim_slots_desc resolved;
    uint32_t rejected = before;
    require(kvprim_slots_check(d, &resolved) == KVPRIM_OK, "kvprim_slots_check refuses what was run");
    for (int64_t i = 0; i < d->count; i++) {
        int counted;
        require(element_of(d->slot, d->slot_type, i) == want_slot(&resolved, i, &counted), "a slot is wrong");
        rejected += (uint32_t)counted;
    }
    require(!d->rejected || *d->rejected == rejected, "rejected is wrong");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct arrays a;
    const int bad = chance(&in, 4);
    kvprim_slots_desc d = take_desc(&in, &a);
    const uint32_t before = *a.rejected;
    const kvprim_status want = bad ? spoil(&in, &d) : KVPRIM_OK;
    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status checked = kvprim_slots_check(&d, NULL), status = kvprim_slots(&d);
    require(checked == status, "kvprim_slots_check and kvprim_slots differ");
    require((status == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    require(status == want, "not the status that the descriptor calls for");
    if (status == KVPRIM_OK)
        compare(&d, before);
    else
        require(memcmp(a.slot, a.before, a.slot_bytes) == 0 && *a.rejected == before, "wrote in spite of an error");
    count_reach(reaches, size, status == KVPRIM_OK ? (uint64_t)d.count : 0);
    free(a.pages), free(a.page_starts), free(a.first), free(a.second), free(a.slot), free(a.before), free(a.rejected);
    return 0;
}

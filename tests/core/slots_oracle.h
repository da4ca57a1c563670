/* SPDX-License-Identifier: MIT */
/* What kvprim_slots should give, from its contract alone: requests are found one by one, sums are made of halves, and
   products are tested for overflow. Include it after kvprim.h. */
#ifndef SLOTS_ORACLE_H
#define SLOTS_ORACLE_H

static inline int64_t element_of(const void *array, kvprim_index_type type, int64_t i)
{
    return type == KVPRIM_I64 ? ((const int64_t *)array)[i] : ((const int32_t *)array)[i];
}

static inline void set_element(void *array, kvprim_index_type type, int64_t i, int64_t value)
{
    if (type == KVPRIM_I64)
        ((int64_t *)array)[i] = value;
    else
        ((int32_t *)array)[i] = (int32_t)value;
}

/* Any number that names none of n. */
static inline int64_t wild_number(kvprim_index_type type, int64_t n)
{
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

static inline int64_t high_half(int64_t x)
{
    return x < 0 ? -1 - (-1 - x) / ((int64_t)1 << 32) : x / ((int64_t)1 << 32);
}

/* Sets *sum = a + b - c, and returns whether it is less than 2^63. If it is less than -2^63, *sum is negative. */
static inline int sum_fits(int64_t a, int64_t b, int64_t c, int64_t *sum)
{
    const int64_t low = (int64_t)(uint32_t)a + (int64_t)(uint32_t)b - (int64_t)(uint32_t)c;
    const int64_t high = high_half(a) + high_half(b) - high_half(c) + high_half(low);
    const int64_t half = (int64_t)1 << 31;
    *sum = high < -half ? -1 : (int64_t)((uint64_t)high << 32 | (uint32_t)low);
    return high < half;
}

/* Returns token i's slot, or -1, and whether it counts as rejected. d is resolved. */
static inline int64_t want_slot(const kvprim_slots_desc *d, int64_t i, int *counts_too)
{
    int64_t request = 0, position = 0, found = 0, most, slot;
    *counts_too = 0;
    if (d->request) {
        request = element_of(d->request, d->token_type, i);
        position = element_of(d->position, d->token_type, i);
    } else {
        for (int64_t r = 0; r < d->requests; r++)
            if (element_of(d->cu_seqlens, d->token_type, r) <= i && i < element_of(d->cu_seqlens, d->token_type, r + 1))
                request = r, found++;
        if (found != 1 || !sum_fits(d->starts ? element_of(d->starts, d->token_type, request) : 0, i,
                                    element_of(d->cu_seqlens, d->token_type, request), &position)) {
            *counts_too = 1;
            return -1;
        }
    }
    if (request < 0 || position < 0)
        return -1;
    *counts_too = 1;
    if (request >= d->requests)
        return -1;
    int64_t begin = 0, pages = d->max_pages;
    if (d->page_starts) {
        const int64_t end = element_of(d->page_starts, d->pages_type, request + 1);
        begin = element_of(d->page_starts, d->pages_type, request);
        if (begin < 0 || begin > end || end > d->max_pages)
            return -1;
        pages = end - begin;
    } else
        begin = request * d->pages_stride;
    const int all = __builtin_mul_overflow(pages, d->page_rows, &most); /* all positions are less */
    if (!all && position >= most)
        return -1;
    const int64_t page = element_of(d->pages, d->pages_type, begin + position / d->page_rows);
    *counts_too = page >= 0;
    if (page < 0 || __builtin_mul_overflow(page, d->page_rows, &slot) ||
        __builtin_add_overflow(slot, position % d->page_rows, &slot) || slot >= d->rows)
        return -1;
    *counts_too = 0;
    return slot;
}

#endif /* SLOTS_ORACLE_H */

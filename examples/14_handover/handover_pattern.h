/* SPDX-License-Identifier: MIT */
/* handover_pattern.h: what every byte of a cache must be, so that a byte out of place is seen. C11, C++17 and CUDA.

   owner[slot] says whose token a slot holds: handover_owner(request, token), or -1 for nobody's. A byte of a token is a
   hash of (request, token, layer, K or V, the model's head, byte of the head), wherever it lies: the pattern does not
   depend on layout, pages or tensor parallelism, so what a receiver must hold follows from its own page table alone. A
   byte of nobody is a hash of its place and of `background`, and must never change. Caches are looked at in words of 8
   bytes, so head_bytes is a multiple of 8. */
#ifndef HANDOVER_PATTERN_H
#define HANDOVER_PATTERN_H

#include "handover_plan.h"
#include <stdio.h>

/* What a byte of a cache belongs to. */
typedef struct handover_place {
    int32_t layer, part, head, byte; /* part 0: K, 1: V; the model's head; byte of the head */
    int64_t slot;
} handover_place;

/* 0 <= request < 2^31, 0 <= token < 2^32 */
HANDOVER_ANYWHERE int64_t handover_owner(int64_t request, int64_t token)
{
    return (int64_t)((uint64_t)request << 32 | (uint64_t)token);
}

/* The finalizer of splitmix64: each bit of x changes each bit of the result. */
HANDOVER_ANYWHERE uint64_t handover_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Byte `at` of a cache; 0 <= at < handover_cache_bytes(c). */
HANDOVER_ANYWHERE handover_place handover_place_of(const handover_cache *c, uint64_t at)
{
    const uint64_t head_bytes = (uint64_t)c->head_bytes, rows = (uint64_t)c->page_rows, heads = (uint64_t)c->heads;
    const uint64_t piece = at / head_bytes, page = piece / (rows * heads), in_page = piece % (rows * heads);
    const uint64_t row = c->head_major ? in_page % rows : in_page / heads;
    const uint64_t head = c->head_major ? in_page / rows : in_page % heads, part = page / (uint64_t)c->pages;
    handover_place p;
    p.layer = (int32_t)(part / 2), p.part = (int32_t)(part % 2);
    p.head = c->first_head + (int32_t)head;
    p.byte = (int32_t)(at % head_bytes);
    p.slot = (int64_t)(page % (uint64_t)c->pages * rows + row);
    return p;
}

/* What the 8 bytes from `at` on must be, which lie at p in a slot of owner `whose`. `at` is a multiple of 8. */
HANDOVER_ANYWHERE uint64_t handover_expected(const handover_place *p, int64_t whose, uint64_t background, uint64_t at)
{
    /* up to 65,536 heads of 128 MB each, and 2^23 layers */
    const uint64_t where =
        ((uint64_t)p->layer * 2 + (uint64_t)p->part) << 40 | (uint64_t)p->head << 24 | (uint64_t)(p->byte / 8);
    return whose < 0 ? handover_mix(handover_mix(~background) ^ at / 8)
                     : handover_mix(handover_mix((uint64_t)whose + 1) ^ where);
}

/* Returns how many of 8 bytes differ; *first is the first of them. */
HANDOVER_ANYWHERE uint32_t handover_differing(uint64_t got, uint64_t want, uint32_t *first)
{
    uint32_t differing = 0;
    for (uint32_t b = 8; b-- > 0;)
        if (((got ^ want) >> 8 * b & 255) != 0)
            differing++, *first = b;
    return differing;
}

/* Describes the wrong byte `at` in `text`: where it lies, whose it is, what it is and what it must be. */
static inline void handover_describe_byte(const handover_cache *c, int64_t whose, uint64_t background, uint64_t at,
                                          unsigned got, char *text, size_t size)
{
    const handover_place p = handover_place_of(c, at);
    const uint64_t want = handover_expected(&p, whose, background, at / 8 * 8) >> at % 8 * 8;
    char of[80] = "nobody";
    if (whose >= 0)
        (void)snprintf(of, sizeof of, "request %lld, token %lld", (long long)(whose >> 32),
                       (long long)(whose & 0xffffffff));
    (void)snprintf(text, size, "byte %llu: layer %d, %s, page %lld, row %lld, head %d, byte %d of %s: got %u, not %u",
                   (unsigned long long)at, (int)p.layer, p.part ? "V" : "K", (long long)(p.slot / c->page_rows),
                   (long long)(p.slot % c->page_rows), (int)p.head, (int)p.byte, of, got, (unsigned)(want & 255));
}

#endif

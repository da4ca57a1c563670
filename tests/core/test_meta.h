/* SPDX-License-Identifier: MIT */
/* kvprim_unpack_meta against a plain loop. Part of test_kvprim.c. */
#ifndef CORE_TEST_META_H
#define CORE_TEST_META_H

enum { META_SIDE = 20000, META_MOST = 90 };

/* What a call works on. */
static struct meta_memory {
    _Alignas(16) kvprim_unpack_meta_item meta[META_MOST];
    uint64_t count;
    uint32_t rejected;
    unsigned char src[META_SIDE], dst[META_SIDE], want[META_SIDE];
} meta_memory;

static kvprim_unpack_meta_desc metas_of(struct meta_memory *m, uint64_t max_count)
{
    return (kvprim_unpack_meta_desc){.src = m->src,
                                     .src_bytes = META_SIDE,
                                     .dst = m->dst,
                                     .dst_bytes = META_SIDE,
                                     .meta = m->meta,
                                     .count = &m->count,
                                     .max_count = max_count,
                                     .rejected = &m->rejected};
}

/* Whether bytes [offset, offset + bytes) lie in a side, one by one. */
static int is_in_side(uint64_t offset, uint64_t bytes)
{
    return offset <= META_SIDE && bytes <= META_SIDE && offset + bytes <= META_SIDE;
}

static void one_round_of_metas(struct meta_memory *m)
{
    const uint64_t max_count = 1 + below(META_MOST);
    uint32_t rejected = 5;
    size_t at = (size_t)below(16);
    m->count = below(4) ? below(max_count + 1) : max_count + below(1000);
    m->rejected = rejected;
    fill(m->src, META_SIDE);
    fill(m->dst, META_SIDE);
    memcpy(m->want, m->dst, META_SIDE);
    if (m->count > max_count)
        rejected += (uint32_t)(m->count - max_count);
    for (uint64_t i = 0; i < META_MOST; i++) {
        kvprim_unpack_meta_item *const d = &m->meta[i];
        *d = (kvprim_unpack_meta_item){(uint32_t)below(META_SIDE - 300), (uint32_t)below(200), at};
        at += d->bytes + (size_t)below(3);
        switch (below(30)) {
        case 0: /* to the end, or one byte past it */
            d->src_offset = META_SIDE - d->bytes + (uint32_t)below(2);
            break;
        case 1:
            d->dst_offset = META_SIDE - d->bytes + 1 + below(2);
            break;
        case 2:
            d->dst_offset = 0 - (uint64_t)d->bytes;
            break;
        case 3:
            d->src_offset = UINT32_MAX - (uint32_t)below(300);
            break;
        case 4:
            d->bytes = UINT32_MAX - (uint32_t)below(META_SIDE);
        }
        if (i >= m->count || i >= max_count)
            continue;
        if (!is_in_side(d->src_offset, d->bytes) || !is_in_side(d->dst_offset, d->bytes))
            rejected++;
        else
            for (uint32_t k = 0; k < d->bytes; k++)
                m->want[d->dst_offset + k] = m->src[d->src_offset + k];
    }
    const kvprim_unpack_meta_desc d = metas_of(m, max_count);
    CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK);
    CHECK(memcmp(m->dst, m->want, META_SIDE) == 0);
    CHECK(m->rejected == rejected);
}

static void test_metas(void)
{
    struct meta_memory *const m = &meta_memory;
    for (int round = 0; round < 300; round++)
        one_round_of_metas(m);
}

/* A count that is none cannot wrap the counter back to what it was, and without a counter nothing is counted. */
static void test_meta_limits(void)
{
    struct meta_memory *const m = &meta_memory;
    const uint64_t counts_of[] = {0, 1, 2, 3, 2 + (uint64_t)INT32_MAX, 2 + ((uint64_t)1 << 32), UINT64_MAX};
    const uint32_t excess[] = {0, 0, 0, 1, INT32_MAX, INT32_MAX, INT32_MAX};
    kvprim_unpack_meta_desc d = metas_of(m, 2);
    for (size_t i = 0; i < LENGTH(counts_of); i++) {
        memset(m, 0, sizeof *m);
        m->meta[0] = (kvprim_unpack_meta_item){7, 1, 3}, m->meta[1] = (kvprim_unpack_meta_item){7, 2, 5};
        m->src[7] = 1, m->src[8] = 2;
        m->count = counts_of[i];
        CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK);
        CHECK(m->dst[3] == (m->count > 0) && m->dst[5] == (m->count > 1) && m->dst[6] == 2 * (m->count > 1));
        CHECK(m->dst[4] == 0 && m->dst[7] == 0 && m->rejected == excess[i]);
    }
    d.rejected = NULL;
    m->rejected = 9;
    CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK && m->rejected == 9);
}

/* A destination that overlaps its source breaks the caller's promise, but no rule of C, and no byte outside changes. */
static void test_meta_overlap(void)
{
    struct meta_memory *const m = &meta_memory;
    kvprim_unpack_meta_desc d = metas_of(m, 1);
    memset(m, 0, sizeof *m);
    d.src = m->dst, m->count = 1, m->meta[0] = (kvprim_unpack_meta_item){100, 200, 150};
    m->dst[149] = m->dst[350] = 7;
    CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK && m->dst[149] == 7 && m->dst[350] == 7 && m->rejected == 0);
}

/* Then every fragment with bytes is rejected. */
static void test_meta_without_buffers(void)
{
    struct meta_memory *const m = &meta_memory;
    kvprim_unpack_meta_desc d = metas_of(m, 4);
    d.src = d.dst = NULL, d.src_bytes = d.dst_bytes = 0;
    m->count = 2, m->rejected = 0;
    m->meta[0] = (kvprim_unpack_meta_item){0, 0, 0}, m->meta[1] = (kvprim_unpack_meta_item){0, 1, 0};
    CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK && m->rejected == 1);
}

#endif

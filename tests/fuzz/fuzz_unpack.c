/* SPDX-License-Identifier: MIT */
/* Compares kvprim_unpack and kvprim_unpack_meta with a loop over bytes. Fragments lie anywhere, offsets and sizes may be
   wild, and src and dst may share a block, without or with bytes in common. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

enum { MAX_BYTES = 4096, MAX_FRAGMENTS = 40 };

static struct reach reaches[4] = {{"unpack", "fragments", 250, MAX_FRAGMENTS, 0, 0, 0},
                                  {"unpack_meta", "fragments", 250, MAX_FRAGMENTS, 0, 0, 0}};

/* Returns mostly a number up to `limit`, and sometimes one near 2^64 or a power of two. */
static uint64_t take_offset(struct input *in, uint64_t limit)
{
    const uint64_t kind = take(in, 1);
    if (kind < 2)
        return UINT64_MAX - take(in, 1) % 64;
    if (kind < 4)
        return (UINT64_MAX >> (1 + take(in, 1) % 33)) + take(in, 1) % 3;
    return kind < 8 ? limit + take(in, 1) % 3 : take(in, 2) % (limit + 1);
}

static int inside(uint64_t offset, uint64_t bytes, uint64_t limit)
{
    return offset <= limit && bytes <= limit - offset;
}

static size_t take_fragments(struct input *in, kvprim_fragment *fragments, size_t src_bytes, size_t dst_bytes)
{
    const size_t count = (size_t)take(in, 1) % (MAX_FRAGMENTS + 1);
    const int wild = take(in, 1) % 4 == 0;
    for (size_t i = 0; i < count; i++) {
        kvprim_fragment *const f = &fragments[i];
        f->src_offset = wild ? take_offset(in, src_bytes) : take(in, 2) % (src_bytes + 1);
        f->dst_offset = wild ? take_offset(in, dst_bytes) : take(in, 2) % (dst_bytes + 1);
        const size_t room_src = wild ? src_bytes : src_bytes - (size_t)f->src_offset;
        const size_t room_dst = wild ? dst_bytes : dst_bytes - (size_t)f->dst_offset;
        const size_t most = room_src < room_dst ? room_src : room_dst;
        f->bytes = wild ? take_offset(in, most) : take(in, 1) % 4 ? take(in, 1) % 40 : take(in, 2);
        if (!wild && f->bytes > most)
            f->bytes = most;
    }
    return count;
}

/* A byte of dst that no fragment covers must be as it was. Every other byte must come from a fragment that covers it. */
static void compare(const kvprim_unpack_desc *desc, const uint8_t *before)
{
    static uint8_t covered[MAX_BYTES], right[MAX_BYTES];
    const uint8_t *const src = desc->src, *const dst = desc->dst;
    memset(covered, 0, (size_t)desc->dst_bytes);
    memset(right, 0, (size_t)desc->dst_bytes);
    for (size_t i = 0; i < desc->count; i++) {
        const kvprim_fragment *const f = &desc->fragments[i];
        memset(covered + f->dst_offset, 1, (size_t)f->bytes);
        for (uint64_t k = 0; k < f->bytes; k++)
            right[f->dst_offset + k] |= dst[f->dst_offset + k] == src[f->src_offset + k];
    }
    for (uint64_t at = 0; at < desc->dst_bytes; at++)
        require(covered[at] ? right[at] : dst[at] == before[at],
                covered[at] ? "a fragment's byte is wrong" : "wrote between fragments");
}

/* Whether a destination shares a byte with a source, each with each. dst begins dst_at bytes after src. */
static int any_meet(const kvprim_fragment *f, size_t count, uint64_t dst_at)
{
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++)
            if (f[i].bytes && f[j].bytes && dst_at + f[i].dst_offset < f[j].src_offset + f[j].bytes &&
                f[j].src_offset < dst_at + f[i].dst_offset + f[i].bytes)
                return 1;
    return 0;
}

/* What may be wrong with the descriptor, and what src and dst are. */
struct faults {
    int null, maybe_null, outside, overlap;
};

/* Compares the status with what is wrong. */
static kvprim_status run_unpack(const kvprim_unpack_desc *desc, const struct faults *w)
{
    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status checked = kvprim_unpack_check(desc), status = kvprim_unpack(desc);
    require(checked == status, "kvprim_unpack_check and kvprim_unpack differ");
    require((status == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    if (desc->count == 0)
        require(status == KVPRIM_OK, "count 0 is not KVPRIM_OK");
    else if (w->null || w->outside || w->overlap)
        require(((w->null || w->maybe_null) && status == KVPRIM_ERROR_NULL) ||
                    (w->outside && status == KVPRIM_ERROR_BOUNDS) || (w->overlap && status == KVPRIM_ERROR_OVERLAP),
                "a bad descriptor has another status");
    else
        require(status == KVPRIM_OK || (w->maybe_null && status == KVPRIM_ERROR_NULL), "a good descriptor is refused");
    return status;
}

/* ---- descriptors with a count that is read late ---- */

/* Returns how many descriptors were read, and adds to *want what must be counted. Those inside are moved to `dst`, byte
   by byte; 0 is returned if a destination meets another one or a source, as then the bytes are unspecified. */
static size_t expect_meta(const kvprim_unpack_meta_desc *d, uint8_t *dst, uint32_t *want)
{
    kvprim_fragment good[MAX_FRAGMENTS];
    size_t n = 0;
    const uint64_t count = *d->count < d->max_count ? *d->count : d->max_count, excess = *d->count - count;
    *want += excess < INT32_MAX ? (uint32_t)excess : INT32_MAX;
    for (uint64_t i = 0; i < count; i++) {
        const kvprim_unpack_meta_item m = d->meta[i];
        if (!inside(m.src_offset, m.bytes, d->src_bytes) || !inside(m.dst_offset, m.bytes, d->dst_bytes)) {
            ++*want;
            continue;
        }
        for (size_t k = 0; k < n; k++)
            if (m.bytes && good[k].bytes && m.dst_offset < good[k].dst_offset + good[k].bytes &&
                good[k].dst_offset < m.dst_offset + m.bytes)
                return 0;
        good[n++] = (kvprim_fragment){m.src_offset, m.dst_offset, m.bytes};
        for (uint32_t k = 0; k < m.bytes; k++)
            dst[m.dst_offset + k] = ((const uint8_t *)d->src)[m.src_offset + k];
    }
    return (size_t)count;
}

static void fuzz_meta(struct input *in, size_t size)
{
    const size_t src_bytes = (size_t)take(in, 2) % MAX_BYTES, dst_bytes = (size_t)take(in, 2) % MAX_BYTES;
    const size_t max_count = (size_t)take(in, 1) % (MAX_FRAGMENTS + 1);
    const int wild = chance(in, 4);
    uint8_t *const src = new_bytes(src_bytes), *const dst = new_bytes(dst_bytes), *const want = new_bytes(dst_bytes);
    kvprim_unpack_meta_item *const meta = allocate(max_count * sizeof *meta); /* malloc aligns to 16 */
    const uint64_t count = chance(in, 4) ? take_offset(in, max_count) : max_count - take(in, 1) % (max_count / 4 + 1);
    uint32_t rejected = 7, want_rejected = 7;
    uint64_t at = 0;
    for (size_t i = 0; i < max_count; i++) {
        const uint64_t bytes = take(in, 1), gap = take(in, 1) % 3;
        meta[i].bytes = wild && bytes % 8 == 0 ? (uint32_t)take_offset(in, src_bytes) : (uint32_t)bytes;
        meta[i].src_offset = wild ? (uint32_t)take_offset(in, src_bytes) : (uint32_t)(take(in, 2) % (src_bytes + 1));
        meta[i].dst_offset = wild && gap == 2 ? take_offset(in, dst_bytes) : at + gap;
        at += bytes + gap;
    }
    const kvprim_unpack_meta_desc desc = {.src = src,
                                          .src_bytes = src_bytes,
                                          .dst = dst,
                                          .dst_bytes = dst_bytes,
                                          .meta = meta,
                                          .count = &count,
                                          .max_count = max_count,
                                          .rejected = &rejected};
    memcpy(want, dst, dst_bytes);
    require(kvprim_unpack_meta(&desc) == KVPRIM_OK, "a good descriptor is refused");
    const size_t moved = max_count ? expect_meta(&desc, want, &want_rejected) : 0;
    if (moved || max_count == 0 || count == 0) {
        require(memcmp(dst, want, dst_bytes) == 0, "a byte is wrong");
        require(rejected == want_rejected, "rejected is wrong");
    }
    count_reach(&reaches[1], size, moved);
    free(meta);
    free(want);
    free(dst);
    free(src);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    if (chance(&in, 3)) {
        fuzz_meta(&in, size);
        return 0;
    }
    const size_t most = take(&in, 1) % 2 ? 64 : MAX_BYTES, src_bytes = (size_t)take(&in, 2) % most;
    const size_t dst_bytes = (size_t)take(&in, 2) % most, shared = chance(&in, 8);
    const size_t dst_at = shared ? (size_t)take(&in, 2) % (src_bytes + 1) : 0;
    uint8_t *const src = new_bytes(shared ? src_bytes + dst_bytes : src_bytes);
    uint8_t *const dst = shared ? src + dst_at : new_bytes(dst_bytes), *const before = new_bytes(dst_bytes);
    memcpy(before, dst, dst_bytes);

    kvprim_fragment *const fragments = allocate(MAX_FRAGMENTS * sizeof *fragments);
    const size_t count = take_fragments(&in, fragments, src_bytes, dst_bytes);
    const uint64_t missing = take(&in, 1); /* sometimes a pointer is missing */
    const kvprim_unpack_desc desc = {.src = missing == 1 ? NULL : src,
                                     .src_bytes = src_bytes,
                                     .dst = missing == 2 ? NULL : dst,
                                     .dst_bytes = dst_bytes,
                                     .fragments = missing == 3 ? NULL : fragments,
                                     .count = count};
    struct faults w = {0, missing == 1 || missing == 2, 0, 0};
    for (size_t i = 0; i < count; i++)
        w.outside |= !inside(fragments[i].src_offset, fragments[i].bytes, src_bytes) ||
                     !inside(fragments[i].dst_offset, fragments[i].bytes, dst_bytes);
    w.null = (missing == 1 && src_bytes) || (missing == 2 && dst_bytes) || missing == 3;
    if (!w.maybe_null && shared && !w.outside)
        w.overlap = any_meet(fragments, count, dst_at);

    const kvprim_status status = run_unpack(&desc, &w);
    if (status != KVPRIM_OK || count == 0)
        require(memcmp(before, dst, dst_bytes) == 0, "wrote although nothing was to be written");
    else if (desc.dst && desc.src)
        compare(&desc, before);
    count_reach(reaches, size, status == KVPRIM_OK ? count : 0);

    free(fragments);
    free(before);
    if (!shared)
        free(dst);
    free(src);
    return 0;
}

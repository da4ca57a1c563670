/* SPDX-License-Identifier: MIT */
/* Compares kvprim_unpack, kvprim_unpack_meta and kvprim_copy with a loop over bytes, and their checks with one of each
   item with each. Fragments lie anywhere, offsets, addresses and sizes may be wild, and sources and destinations may
   share a block, without or with bytes in common. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

enum { MAX_BYTES = 4096, MAX_FRAGMENTS = 40, BLOCKS = 3 };

static struct reach reaches[4] = {{"unpack", "fragments", 250, MAX_FRAGMENTS, 0, 0, 0},
                                  {"unpack_meta", "fragments", 250, MAX_FRAGMENTS, 0, 0, 0},
                                  {"copy", "items", 250, MAX_FRAGMENTS, 0, 0, 0}};

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

/* A byte of dst that no item covers must be as it was. Every other byte must come from an item that covers it. */
static void compare(const uint8_t *dst, const uint8_t *before, size_t bytes, const kvprim_copy_item *items,
                    size_t count)
{
    static uint8_t covered[MAX_BYTES], right[MAX_BYTES];
    memset(covered, 0, bytes);
    memset(right, 0, bytes);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *const src = items[i].src;
        const size_t at = (uintptr_t)items[i].dst - (uintptr_t)dst;
        for (uint64_t n = 0; at < bytes && n < items[i].bytes; n++) {
            covered[at + n] = 1;
            right[at + n] |= dst[at + n] == (src ? src[n] : 0);
        }
    }
    for (size_t at = 0; at < bytes; at++)
        require(covered[at] ? right[at] : dst[at] == before[at],
                covered[at] ? "an item's byte is wrong" : "wrote between items");
}

static int meets(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    const uint64_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a_bytes && b_bytes && x <= y + (b_bytes - 1) && y <= x + (a_bytes - 1);
}

/* Whether a destination shares a byte with a source, each with each. */
static int any_meet(const kvprim_copy_item *items, size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++)
            if (items[j].src && meets(items[i].dst, items[i].bytes, items[j].src, items[j].bytes))
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

static void fuzz_unpack(struct input *in, size_t size)
{
    const size_t most = take(in, 1) % 2 ? 64 : MAX_BYTES, src_bytes = (size_t)take(in, 2) % most;
    const size_t dst_bytes = (size_t)take(in, 2) % most, shared = chance(in, 8);
    const size_t dst_at = shared ? (size_t)take(in, 2) % (src_bytes + 1) : 0;
    uint8_t *const src = new_bytes(shared ? src_bytes + dst_bytes : src_bytes);
    uint8_t *const dst = shared ? src + dst_at : new_bytes(dst_bytes), *const before = new_bytes(dst_bytes);
    memcpy(before, dst, dst_bytes);

    kvprim_fragment *const fragments = allocate(MAX_FRAGMENTS * sizeof *fragments);
    kvprim_copy_item items[MAX_FRAGMENTS];
    const size_t count = take_fragments(in, fragments, src_bytes, dst_bytes);
    const uint64_t missing = take(in, 1); /* sometimes a pointer is missing */
    const kvprim_unpack_desc desc = {.src = missing == 1 ? NULL : src,
                                     .src_bytes = src_bytes,
                                     .dst = missing == 2 ? NULL : dst,
                                     .dst_bytes = dst_bytes,
                                     .fragments = missing == 3 ? NULL : fragments,
                                     .count = count};
    struct faults w = {0, missing == 1 || missing == 2, 0, 0};
    for (size_t i = 0; i < count; i++) {
        const kvprim_fragment f = fragments[i];
        w.outside |= !inside(f.src_offset, f.bytes, src_bytes) || !inside(f.dst_offset, f.bytes, dst_bytes);
        items[i] =
            w.outside ? (kvprim_copy_item){0} : (kvprim_copy_item){src + f.src_offset, dst + f.dst_offset, f.bytes};
    }
    w.null = (missing == 1 && src_bytes) || (missing == 2 && dst_bytes) || missing == 3;
    w.overlap = !w.maybe_null && !w.outside && any_meet(items, count);

    const kvprim_status status = run_unpack(&desc, &w);
    if (status != KVPRIM_OK || count == 0)
        require(memcmp(before, dst, dst_bytes) == 0, "wrote although nothing was to be written");
    else if (desc.dst && desc.src)
        compare(dst, before, dst_bytes, items, count);
    count_reach(reaches, size, status == KVPRIM_OK ? count : 0);

    free(fragments);
    free(before);
    if (!shared)
        free(dst);
    free(src);
}

/* ---- lists of addresses, in blocks that are as large as what lies in them ---- */

struct blocks {
    uint8_t *at[BLOCKS], *before[BLOCKS];
    size_t bytes[BLOCKS];
};

static struct blocks take_blocks(struct input *in)
{
    struct blocks b;
    const size_t most = take(in, 1) % 2 ? 64 : MAX_BYTES;
    for (int k = 0; k < BLOCKS; k++) {
        b.bytes[k] = (size_t)take(in, 2) % most;
        b.at[k] = new_bytes(b.bytes[k]);
        b.before[k] = new_bytes(b.bytes[k]);
        memcpy(b.before[k], b.at[k], b.bytes[k]);
    }
    return b;
}

/* A place in a block, and how many bytes follow it there. */
static uint8_t *take_place(struct input *in, const struct blocks *b, uint64_t block, size_t *room)
{
    const size_t at = (size_t)take(in, 2) % (b->bytes[block] + 1);
    *room = b->bytes[block] - at;
    return b->at[block] + at;
}

/* Sources mostly lie in block 0, and destinations in the others. */
static size_t take_items(struct input *in, const struct blocks *b, kvprim_copy_item *items)
{
    const size_t count = (size_t)take(in, 1) % (MAX_FRAGMENTS + 1);
    const uint64_t kind = take(in, 1), mixed = kind % 4 == 0, wild = kind % 16 == 1;
    for (size_t i = 0; i < count; i++) {
        size_t src_room, dst_room;
        const uint64_t where = take(in, 1);
        items[i].src = take_place(in, b, mixed ? where % BLOCKS : 0, &src_room);
        items[i].dst = take_place(in, b, mixed ? where / 3 % BLOCKS : 1 + where / 3 % 2, &dst_room);
        if (where % 8 == 7)
            items[i].src = NULL;
        const size_t most = !items[i].src || dst_room < src_room ? dst_room : src_room;
        const uint64_t wanted = take(in, 1) % 4 ? take(in, 1) % 40 : take(in, 2);
        items[i].bytes = wanted < most ? wanted : most;
        if (wild && chance(in, 4))
            items[i].bytes = UINT64_MAX - take(in, 1) % 64;
        if (wild && chance(in, 4))
            items[i].dst = chance(in, 2) ? NULL : (void *)(uintptr_t)(UINTPTR_MAX - (uintptr_t)(take(in, 1) % 64));
    }
    return count;
}

/* top: an item without another fault lies at the top of memory, where there is none. */
struct item_faults {
    int null, size, overlap, top;
};

static struct item_faults faults_of(const kvprim_copy_item *items, size_t count)
{
    struct item_faults w = {0, 0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        const uint64_t last = items[i].bytes - 1, src = (uintptr_t)items[i].src, dst = (uintptr_t)items[i].dst;
        w.null |= items[i].bytes && !items[i].dst;
        w.size |= items[i].bytes && items[i].dst && (src + last < src || dst + last < dst);
        w.top |= items[i].bytes && dst > UINTPTR_MAX - 64;
    }
    if (w.null || w.size)
        return w;
    w.overlap = any_meet(items, count);
    for (size_t i = 0; i < count; i++)
        w.overlap |= meets(items[i].dst, items[i].bytes, items, count * sizeof *items);
    return w;
}

static void fuzz_copy(struct input *in, size_t size)
{
    struct blocks b = take_blocks(in);
    kvprim_copy_item room[MAX_FRAGMENTS];
    const size_t count = take_items(in, &b, room);
    kvprim_copy_item *const items = allocate(count * sizeof *items); /* the sanitizer sees what lies past them */
    if (count)
        memcpy(items, room, count * sizeof *items);
    const struct item_faults w = faults_of(items, count);
    const kvprim_copy_desc desc = {.items = chance(in, 64) ? NULL : items, .count = count, .reserved = 0};
    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status checked = kvprim_copy_check(&desc);
    const kvprim_status status = checked == KVPRIM_OK && w.top ? checked : kvprim_copy(&desc);
    require(checked == status, "kvprim_copy_check and kvprim_copy differ");
    require((status == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    if (count && (!desc.items || w.null || w.size || w.overlap))
        require(((!desc.items || w.null) && status == KVPRIM_ERROR_NULL) || (w.size && status == KVPRIM_ERROR_SIZE) ||
                    (w.overlap && status == KVPRIM_ERROR_OVERLAP),
                "a bad list has another status");
    else
        require(status == KVPRIM_OK, "a good list is refused");
    for (int k = 0; k < BLOCKS; k++)
        compare(b.at[k], b.before[k], b.bytes[k], items, status == KVPRIM_OK && !w.top ? count : 0);
    count_reach(&reaches[2], size, status == KVPRIM_OK ? count : 0);
    for (int k = 0; k < BLOCKS; k++) {
        free(b.at[k]);
        free(b.before[k]);
    }
    free(items);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const operations[])(struct input *, size_t) = {fuzz_unpack, fuzz_meta, fuzz_copy};
    struct input in = {data, data + size};
    operations[take(&in, 1) % 3](&in, size);
    return 0;
}

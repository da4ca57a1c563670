/* SPDX-License-Identifier: MIT */
/* Compares kvprim_unpack with a loop over bytes. Fragments lie anywhere, offsets and sizes may be wild, and src and dst
   may share a block. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_BYTES = 4096, MAX_FRAGMENTS = 40 };

struct input {
    const uint8_t *next, *end;
};

static uint64_t take(struct input *in, size_t bytes)
{
    uint64_t value = 0;
    while (bytes-- && in->next < in->end)
        value = value << 8 | *in->next++;
    return value;
}

static void require(int condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "%s; kvprim_last_error(): '%s'\n", what, kvprim_last_error());
    abort();
}

/* A block of exactly this size, so that the sanitizer sees accesses beyond it. */
static uint8_t *block(size_t bytes, uint32_t x)
{
    uint8_t *const p = malloc(bytes ? bytes : 1);
    require(p != NULL, "out of memory");
    for (size_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
    return p;
}

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
    const uint8_t *const src = desc->src, *const dst = desc->dst;
    for (uint64_t at = 0; at < desc->dst_bytes; at++) {
        int covered = 0, right = 0;
        for (size_t i = 0; i < desc->count; i++) {
            const kvprim_fragment *const f = &desc->fragments[i];
            if (at < f->dst_offset || at - f->dst_offset >= f->bytes)
                continue;
            covered = 1;
            right |= dst[at] == src[f->src_offset + (at - f->dst_offset)];
        }
        require(covered ? right : dst[at] == before[at],
                covered ? "a fragment's byte is wrong" : "wrote between fragments");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    const int small = (int)(take(&in, 1) % 2);
    const size_t src_bytes = (size_t)take(&in, 2) % (small ? 64 : MAX_BYTES);
    const size_t dst_bytes = (size_t)take(&in, 2) % (small ? 64 : MAX_BYTES);
    const size_t shared = take(&in, 1) % 8 == 0, dst_at = shared ? (size_t)take(&in, 2) % (src_bytes + 1) : 0;
    uint8_t *const src = block(shared ? src_bytes + dst_bytes : src_bytes, (uint32_t)size);
    uint8_t *const dst = shared ? src + dst_at : block(dst_bytes, ~(uint32_t)size);
    uint8_t *const before = block(dst_bytes, 0);
    memcpy(before, dst, dst_bytes);

    kvprim_fragment *const fragments = malloc(MAX_FRAGMENTS * sizeof *fragments);
    require(fragments != NULL, "out of memory");
    kvprim_unpack_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.src = src;
    desc.src_bytes = src_bytes;
    desc.dst = dst;
    desc.dst_bytes = dst_bytes;
    desc.count = take_fragments(&in, fragments, src_bytes, dst_bytes);
    desc.fragments = fragments;
    const uint64_t missing = take(&in, 1); /* sometimes a pointer is missing */
    desc.src = missing == 1 ? NULL : desc.src;
    desc.dst = missing == 2 ? NULL : desc.dst;
    desc.fragments = missing == 3 ? NULL : desc.fragments;

    int outside = 0;
    for (size_t i = 0; i < desc.count; i++)
        outside |= !inside(fragments[i].src_offset, fragments[i].bytes, src_bytes) ||
                   !inside(fragments[i].dst_offset, fragments[i].bytes, dst_bytes);
    const int null = (missing == 1 && src_bytes) || (missing == 2 && dst_bytes) || missing == 3;
    const int maybe_null = missing == 1 || missing == 2;
    const int overlap = !maybe_null && shared && src_bytes && dst_bytes && dst_at < src_bytes;

    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status checked = kvprim_unpack_check(&desc), status = kvprim_unpack(&desc);
    require(checked == status, "kvprim_unpack_check and kvprim_unpack differ");
    require((status == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    if (desc.count == 0)
        require(status == KVPRIM_OK, "count 0 is not KVPRIM_OK");
    else if (null || outside || overlap)
        require((null && status == KVPRIM_ERROR_NULL) || (outside && status == KVPRIM_ERROR_BOUNDS) ||
                    (overlap && status == KVPRIM_ERROR_OVERLAP) || (maybe_null && status == KVPRIM_ERROR_NULL),
                "a bad descriptor has another status");
    else
        require(status == KVPRIM_OK || (maybe_null && status == KVPRIM_ERROR_NULL), "a good descriptor is refused");
    if (status != KVPRIM_OK || desc.count == 0)
        require(memcmp(before, dst, dst_bytes) == 0, "wrote although nothing was to be written");
    else if (desc.dst && desc.src)
        compare(&desc, before);

    free(fragments);
    free(before);
    if (!shared)
        free(dst);
    free(src);
    return 0;
}

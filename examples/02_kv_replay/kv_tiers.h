/* SPDX-License-Identifier: MIT */
/* kv_tiers.h: the memories that hold the pages of the prefix tree. C11, uses kv_device.h, kv_disk.h and kv_radix.h.

   Each page of the tree lies in one of these tiers, each a pool of page numbers:

       KV_CACHE   the cache, where requests read and write
       KV_HOST    memory of the host, pinned if there is a GPU
       KV_DISK    a file

   The last two tiers are optional. Where there are none, a page that the cache has no room for is gone.

       kv_tiers_make_room   moves the least recently used pages a tier down, and drops those of the last tier
       kv_tiers_lift        reads pages that a prompt matches to host memory, and takes them out of their tier
       kv_tiers_land        writes them to pages of the cache

   Between the last two, the caller takes pages of the cache. This may send others down, which find the room that the
   lifted ones have left. So host memory has some pages more than the host tier: they hold what is on its way.

       cache  <- kvprim_transfer, pages of all layers in one call ->  host memory  <- pwritev, preadv ->  file */
#ifndef KV_TIERS_H
#define KV_TIERS_H

#include "kv_device.h"
#include "kv_disk.h"
#include "kv_radix.h"

enum { KV_CACHE, KV_HOST, KV_DISK };

/* Pages that move at once. Of 1, 8 and 32 MiB, 8 was the fastest to write to a disk: 1.4, 1.8 and 1.5 GB/s. */
enum { KV_CHUNK_BYTES = 8 << 20, KV_CHUNK_PAGES = 1024 };

typedef struct kv_pool { /* a new page is the free page that was returned last */
    int32_t *free_pages; /* a stack */
    size_t free_count;
    size_t untouched; /* pages from here on were never used */
    size_t page_count;
} kv_pool;

typedef struct kv_traffic {
    uint64_t bytes;
    double seconds;
} kv_traffic;

typedef struct kv_disk_page {
    int32_t page, host;
} kv_disk_page;

typedef struct kv_tiers {
    /* The caller sets these before kv_tiers_open. */
    kv_device *device;
    kv_radix *tree;
    size_t capacity[KV_RADIX_TIERS]; /* pages; 0: there is no such tier */
    size_t tables, piece_bytes;      /* K and V of each layer are a table; a page has a piece of each */

    kv_pool pool[KV_RADIX_TIERS];
    kv_disk disk;
    size_t page_stride; /* bytes from page to page in host memory, and in the file */
    size_t chunk;       /* pages */
    size_t lifted;      /* pages of host memory that hold lifted pages */
    int32_t *below, *leaving, *passing;
    kv_disk_page *order;
    struct iovec *pieces;
    kv_traffic to_host, from_host, to_disk, from_disk; /* to_host: from the cache to host memory, and so on */
    uint64_t dropped;                                  /* pages */
    double tree_seconds;
} kv_tiers;

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static inline size_t kv_pool_available(const kv_pool *pool)
{
    return pool->free_count + pool->page_count - pool->untouched;
}

static inline void kv_pool_take(kv_pool *pool, int32_t *pages, size_t count)
{
    for (size_t i = 0; i < count; i++)
        pages[i] = pool->free_count ? pool->free_pages[--pool->free_count] : (int32_t)pool->untouched++;
}

static inline void kv_pool_return(kv_pool *pool, const int32_t *pages, size_t count)
{
    memcpy(pool->free_pages + pool->free_count, pages, count * sizeof *pages);
    pool->free_count += count;
}

/* Returns whether there are tiers below the cache. */
static inline bool kv_tiers_lower(const kv_tiers *t)
{
    return t->capacity[KV_HOST] || t->capacity[KV_DISK];
}

/* Returns for how many pages there is room in a tier. */
static inline size_t kv_tiers_room(const kv_tiers *t, uint32_t tier)
{
    const kv_pool *const pool = &t->pool[tier];
    const size_t available = kv_pool_available(pool);
    return tier == KV_HOST ? available + t->lifted + t->capacity[tier] - pool->page_count : available;
}

/* ---- cache <-> host memory <-> file ------------------------------------------------------------------------------ */

static inline void kv_tiers__cache(kv_tiers *t, bool up, const int32_t *pages, const int32_t *host, size_t count)
{
    kv_traffic *const traffic = up ? &t->from_host : &t->to_host;
    const int64_t piece = (int64_t)t->piece_bytes, cache_pages = (int64_t)t->capacity[KV_CACHE];
    const kvprim_table in_cache = {.data = t->device->cache, .rows = cache_pages};
    const kvprim_table in_host = {
        .data = t->device->host, .rows = (int64_t)t->pool[KV_HOST].page_count, .stride = (int64_t)t->page_stride};
    const kvprim_transfer_desc desc = {
        .dst = up ? in_cache : in_host,
        .src = up ? in_host : in_cache,
        .dst_layer_stride = up ? cache_pages * piece : piece,
        .src_layer_stride = up ? piece : cache_pages * piece,
        .layers = (int32_t)t->tables,
        .row_bytes = piece,
        .dst_index = up ? pages : host,
        .src_index = up ? host : pages,
        .index_type = KVPRIM_I32,
        .host_index = 1,
        .count = (int64_t)count,
    };
    traffic->bytes += count * t->tables * t->piece_bytes;
    kv_device_transfer(t->device, &desc, &traffic->seconds);
}

static inline int kv_tiers__by_page(const void *a, const void *b)
{
    const int32_t x = ((const kv_disk_page *)a)->page, y = ((const kv_disk_page *)b)->page;
    return (x > y) - (x < y);
}

/* Pages that are neighbours in the file take one call. */
static inline void kv_tiers__file(kv_tiers *t, bool write, const int32_t *pages, const int32_t *host, size_t count)
{
    kv_traffic *const traffic = write ? &t->to_disk : &t->from_disk;
    const double start = kv_seconds();
    for (size_t i = 0; i < count; i++)
        t->order[i] = (kv_disk_page){pages[i], host[i]};
    qsort(t->order, count, sizeof *t->order, kv_tiers__by_page);
    for (size_t i = 0, n; i < count; i += n) {
        const kv_disk_page *const first = &t->order[i];
        for (n = 0; i + n < count && (size_t)first[n].page == (size_t)first->page + n; n++)
            t->pieces[n] = (struct iovec){t->device->host + (size_t)first[n].host * t->page_stride, t->page_stride};
        if (!kv_disk_move(&t->disk, write, t->pieces, n, (uint64_t)first->page * t->page_stride))
            kv_die("%s", t->disk.error);
    }
    traffic->bytes += count * t->page_stride;
    traffic->seconds += kv_seconds() - start;
}

/* Copies pages between pages host[] of host memory and pages[] of a tier, where these are not the same. */
static inline void kv_tiers__copy(kv_tiers *t, uint32_t tier, bool write, const int32_t *pages, const int32_t *host,
                                  size_t count)
{
    if (tier == KV_CACHE)
        kv_tiers__cache(t, write, pages, host, count);
    else if (tier == KV_DISK)
        kv_tiers__file(t, write, pages, host, count);
}

/* ---- down -------------------------------------------------------------------------------------------------------- */

static inline void kv_tiers_make_room(kv_tiers *t, uint32_t tier, size_t want);

/* Copies pages to a lower tier: through the pages of host memory that are one of the two, or that are free. */
static inline void kv_tiers__copy_down(kv_tiers *t, uint32_t from, uint32_t to, size_t count)
{
    const bool passes = from != KV_HOST && to != KV_HOST;
    const int32_t *const host = passes ? t->passing : from == KV_HOST ? t->leaving : t->below;
    if (passes)
        kv_pool_take(&t->pool[KV_HOST], t->passing, count);
    kv_tiers__copy(t, from, false, t->leaving, host, count);
    kv_tiers__copy(t, to, true, t->below, host, count);
    if (passes)
        kv_pool_return(&t->pool[KV_HOST], t->passing, count);
}

/* Moves up to `want` pages to a lower tier, and returns how many they were. */
static inline size_t kv_tiers__demote(kv_tiers *t, uint32_t from, uint32_t to, size_t want)
{
    want = want < t->chunk ? want : t->chunk;
    want = want < t->capacity[to] ? want : t->capacity[to];
    kv_tiers_make_room(t, to, want);
    want = want < kv_tiers_room(t, to) ? want : kv_tiers_room(t, to);
    kv_pool_take(&t->pool[to], t->below, want);
    const double start = kv_seconds();
    const size_t count = kv_radix_demote(t->tree, from, to, want, t->below, t->leaving);
    t->tree_seconds += kv_seconds() - start;
    if (count > 0)
        kv_tiers__copy_down(t, from, to, count);
    kv_pool_return(&t->pool[to], t->below + count, want - count);
    kv_pool_return(&t->pool[from], t->leaving, count);
    return count;
}

static inline size_t kv_tiers__drop(kv_tiers *t, uint32_t tier, size_t want)
{
    kv_pool *const pool = &t->pool[tier];
    const double start = kv_seconds();
    const size_t count = kv_radix_evict(t->tree, tier, want, pool->free_pages + pool->free_count);
    t->tree_seconds += kv_seconds() - start;
    t->dropped += count;
    pool->free_count += count;
    return count;
}

/* Makes room for `want` pages, or for fewer if all other pages of the tier are locked. */
static inline void kv_tiers_make_room(kv_tiers *t, uint32_t tier, size_t want)
{
    uint32_t below = tier + 1;
    while (below < KV_RADIX_TIERS && t->capacity[below] == 0)
        below++;
    for (size_t room, count = 1; count > 0 && (room = kv_tiers_room(t, tier)) < want;)
        count = below == KV_RADIX_TIERS ? kv_tiers__drop(t, tier, want - room)
                                        : kv_tiers__demote(t, tier, below, want - room);
}

/* ---- up ---------------------------------------------------------------------------------------------------------- */

/* Lifts up to `chunk` pages, which are locked. They are in pages host[] of host memory until kv_tiers_land. */
static inline void kv_tiers_lift(kv_tiers *t, uint32_t tier, const int32_t *pages, size_t count, int32_t *host)
{
    t->lifted += count;
    if (tier == KV_HOST) {
        memcpy(host, pages, count * sizeof *pages);
        return;
    }
    kv_pool_take(&t->pool[KV_HOST], host, count);
    kv_tiers__copy(t, tier, false, pages, host, count);
    kv_pool_return(&t->pool[tier], pages, count);
}

static inline void kv_tiers_land(kv_tiers *t, const int32_t *host, const int32_t *pages, size_t count)
{
    kv_tiers__copy(t, KV_CACHE, true, pages, host, count);
    kv_pool_return(&t->pool[KV_HOST], host, count);
    t->lifted -= count;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* Opens the file if there is to be one: at disk_path, or where kv_disk_open says. The caller then allocates host memory:
   page_stride bytes for each page of its pool. This has, beside the tier, a chunk of lifted pages and one of pages on
   their way from the cache to the file. */
static inline void kv_tiers_open(kv_tiers *t, const char *disk_path)
{
    const size_t page_bytes = t->tables * t->piece_bytes, disk_pages = t->capacity[KV_DISK];
    const uint64_t block_bytes = (page_bytes + KV_DISK_BLOCK - 1) / KV_DISK_BLOCK * KV_DISK_BLOCK;
    const bool fits = disk_pages <= INT64_MAX / block_bytes;
    if (disk_pages && !kv_disk_open(&t->disk, disk_path, NULL, fits ? disk_pages * block_bytes : INT64_MAX))
        kv_die("%s", t->disk.error);
    const size_t align = disk_pages ? t->disk.align : 1;
    t->page_stride = (page_bytes + align - 1) / align * align;
    const size_t pages = KV_CHUNK_BYTES / t->page_stride;
    t->chunk = pages > KV_CHUNK_PAGES ? KV_CHUNK_PAGES : pages ? pages : 1;
    t->below = (int32_t *)kv_allocate(t->chunk, sizeof *t->below);
    t->leaving = (int32_t *)kv_allocate(t->chunk, sizeof *t->leaving);
    t->passing = (int32_t *)kv_allocate(t->chunk, sizeof *t->passing);
    t->order = (kv_disk_page *)kv_allocate(t->chunk, sizeof *t->order);
    t->pieces = (struct iovec *)kv_allocate(t->chunk, sizeof *t->pieces);
    for (uint32_t tier = 0; tier < KV_RADIX_TIERS; tier++) {
        kv_pool *const pool = &t->pool[tier];
        pool->page_count = t->capacity[tier] + (tier == KV_HOST && kv_tiers_lower(t) ? 2 * t->chunk : 0);
        pool->free_pages = (int32_t *)kv_allocate(pool->page_count, sizeof *pool->free_pages);
    }
}

#endif /* KV_TIERS_H */

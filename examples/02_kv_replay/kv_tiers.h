/* SPDX-License-Identifier: MIT */
/* kv_tiers.h: the memories that hold the pages of the prefix tree. C11, uses kv_device.h, kv_disk.h and kv_radix.h.

   Each page of the tree lies in one of these tiers:

       KV_CACHE   the cache, where requests read and write
       KV_HOST    memory of the host, pinned if there is a GPU
       KV_DISK    a file

   A tier is a pool of page numbers, and two functions that write pages from host memory and read them to there. The
   last two tiers are optional. Where there are none, a page that the cache has no room for is gone.

       kv_tiers_make_room   moves the least recently used pages a tier down, and drops those of the last tier
       kv_tiers_lift        reads pages that a prompt matches to host memory, and takes them out of their tier
       kv_tiers_land        writes them to pages of the cache

   Between the last two, the caller takes pages of the cache. This may send others down, which find the room that the
   lifted ones have left. So host memory has some pages more than the host tier: they hold what is on its way.

       cache  <- kvprim_transfer, pages of all layers in one call ->  host memory  <- pwritev, preadv ->  file

   Functions that can fail return false and set `error`. */
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

typedef struct kv_tiers kv_tiers;

typedef struct kv_tier {
    size_t capacity; /* pages; 0: there is no such tier */
    kv_pool pool;
    bool (*write)(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count);
    bool (*read)(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count);
} kv_tier;

typedef struct kv_traffic {
    uint64_t bytes;
    double seconds;
} kv_traffic;

struct kv_tiers {
    kv_tier tier[KV_RADIX_TIERS];
    kv_device *device;
    kv_radix *tree;
    kv_disk disk;
    size_t tables, piece_bytes; /* K and V of each layer are a table; a page has a piece of each */
    size_t page_stride;         /* bytes from page to page in host memory, and in the file */
    size_t chunk;               /* pages */
    size_t lifted;              /* pages of host memory that hold lifted pages */
    int32_t *below, *leaving, *passing;
    struct kv_disk_page *order;
    struct iovec *pieces;
    kv_traffic to_host, from_host, to_disk, from_disk; /* to_host: from the cache to host memory, and so on */
    uint64_t dropped;                                  /* pages */
    double tree_seconds;
    const char *error;
};

/* Prepares the cache of so many pages and the lower tiers, whose pages may be 0, and opens the file if there is one to
   be: at disk_path, or where kv_disk_open says. Call kv_tiers_close even if this fails. */
typedef struct kv_tiers_desc {
    kv_device *device;
    kv_radix *tree;
    size_t cache_pages, host_pages, disk_pages;
    size_t tables, piece_bytes;
    const char *disk_path;
} kv_tiers_desc;
static inline bool kv_tiers_open(kv_tiers *t, const kv_tiers_desc *desc);
static inline void kv_tiers_close(kv_tiers *t);

/* Whether there are tiers below the cache. */
static inline bool kv_tiers_lower(const kv_tiers *t);

/* Bytes of host memory, which the caller allocates in the device; 0 if there are no lower tiers. */
static inline size_t kv_tiers_host_bytes(const kv_tiers *t);

/* Pages for which there is room in a tier. */
static inline size_t kv_tiers_room(const kv_tiers *t, uint32_t tier);

/* Makes room for `want` pages, or for fewer if all other pages of the tier are locked. */
static inline bool kv_tiers_make_room(kv_tiers *t, uint32_t tier, size_t want);

/* Lifts up to `chunk` pages, which are locked. They are in pages host[] of host memory until kv_tiers_land. */
static inline bool kv_tiers_lift(kv_tiers *t, uint32_t tier, const int32_t *pages, size_t count, int32_t *host);
static inline bool kv_tiers_land(kv_tiers *t, const int32_t *host, const int32_t *pages, size_t count);

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static inline bool kv_pool_init(kv_pool *pool, size_t page_count)
{
    pool->page_count = page_count;
    pool->free_pages = (int32_t *)malloc((page_count ? page_count : 1) * sizeof *pool->free_pages);
    return pool->free_pages != NULL;
}

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

/* ---- cache <-> host memory --------------------------------------------------------------------------------------- */

static inline bool kv_tiers__transfer(kv_tiers *t, bool up, const int32_t *pages, const int32_t *host, size_t count)
{
    kv_traffic *const traffic = up ? &t->from_host : &t->to_host;
    const int64_t piece = (int64_t)t->piece_bytes, cache_pages = (int64_t)t->tier[KV_CACHE].capacity;
    const kvprim_table in_cache = {.data = t->device->cache, .rows = cache_pages};
    const kvprim_table in_host = {
        .data = t->device->host, .rows = (int64_t)t->tier[KV_HOST].pool.page_count, .stride = (int64_t)t->page_stride};
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
    t->error = t->device->error;
    traffic->bytes += count * t->tables * t->piece_bytes;
    return kv_device_transfer(t->device, &desc, &traffic->seconds);
}

static inline bool kv_tiers__write_cache(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count)
{
    return kv_tiers__transfer(t, true, pages, host, count);
}

static inline bool kv_tiers__read_cache(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count)
{
    return kv_tiers__transfer(t, false, pages, host, count);
}

/* ---- host memory <-> file ---------------------------------------------------------------------------------------- */

typedef struct kv_disk_page {
    int32_t page, host;
} kv_disk_page;

static inline int kv_tiers__by_page(const void *a, const void *b)
{
    const int32_t x = ((const kv_disk_page *)a)->page, y = ((const kv_disk_page *)b)->page;
    return (x > y) - (x < y);
}

/* Pages that are neighbours in the file take one call. */
static inline bool kv_tiers__file(kv_tiers *t, bool write, const int32_t *pages, const int32_t *host, size_t count)
{
    kv_traffic *const traffic = write ? &t->to_disk : &t->from_disk;
    const double start = kv_seconds();
    bool ok = true;
    for (size_t i = 0; i < count; i++)
        t->order[i] = (kv_disk_page){pages[i], host[i]};
    qsort(t->order, count, sizeof *t->order, kv_tiers__by_page);
    for (size_t i = 0, n; i < count && ok; i += n) {
        const kv_disk_page *const first = &t->order[i];
        for (n = 0; i + n < count && (size_t)first[n].page == (size_t)first->page + n; n++)
            t->pieces[n] = (struct iovec){t->device->host + (size_t)first[n].host * t->page_stride, t->page_stride};
        const uint64_t offset = (uint64_t)first->page * t->page_stride;
        ok = write ? kv_disk_write(&t->disk, t->pieces, n, offset) : kv_disk_read(&t->disk, t->pieces, n, offset);
    }
    t->error = t->disk.error;
    traffic->bytes += count * t->page_stride;
    traffic->seconds += kv_seconds() - start;
    return ok;
}

static inline bool kv_tiers__write_file(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count)
{
    return kv_tiers__file(t, true, pages, host, count);
}

static inline bool kv_tiers__read_file(kv_tiers *t, const int32_t *pages, const int32_t *host, size_t count)
{
    return kv_tiers__file(t, false, pages, host, count);
}

/* ---- down -------------------------------------------------------------------------------------------------------- */

static inline uint32_t kv_tiers__below(const kv_tiers *t, uint32_t tier)
{
    do
        tier++;
    while (tier < KV_RADIX_TIERS && t->tier[tier].capacity == 0);
    return tier;
}

static inline size_t kv_tiers_room(const kv_tiers *t, uint32_t tier)
{
    const kv_tier *const in = &t->tier[tier];
    const size_t available = kv_pool_available(&in->pool);
    return tier == KV_HOST ? available + t->lifted + in->capacity - in->pool.page_count : available;
}

/* Copies pages to a lower tier: through the pages of host memory that are one of the two, or that are free. */
static inline bool kv_tiers__copy_down(kv_tiers *t, uint32_t from, uint32_t to, size_t count)
{
    const bool passes = from != KV_HOST && to != KV_HOST;
    const int32_t *const host = passes ? t->passing : from == KV_HOST ? t->leaving : t->below;
    if (passes)
        kv_pool_take(&t->tier[KV_HOST].pool, t->passing, count);
    const bool ok = (from == KV_HOST || t->tier[from].read(t, t->leaving, host, count)) &&
                    (to == KV_HOST || t->tier[to].write(t, t->below, host, count));
    if (passes)
        kv_pool_return(&t->tier[KV_HOST].pool, t->passing, count);
    return ok;
}

/* Moves up to *count pages to a lower tier, and returns in *count how many they were. */
static inline bool kv_tiers__demote(kv_tiers *t, uint32_t from, uint32_t to, size_t *count)
{
    size_t want = *count < t->chunk ? *count : t->chunk;
    want = want < t->tier[to].capacity ? want : t->tier[to].capacity;
    if (!kv_tiers_make_room(t, to, want))
        return false;
    want = want < kv_tiers_room(t, to) ? want : kv_tiers_room(t, to);
    kv_pool_take(&t->tier[to].pool, t->below, want);
    const double start = kv_seconds();
    const bool ok = kv_radix_demote(t->tree, from, to, want, t->below, t->leaving, count);
    t->tree_seconds += kv_seconds() - start;
    t->error = "out of memory";
    if (!ok || (*count > 0 && !kv_tiers__copy_down(t, from, to, *count)))
        return false;
    kv_pool_return(&t->tier[to].pool, t->below + *count, want - *count);
    kv_pool_return(&t->tier[from].pool, t->leaving, *count);
    return true;
}

static inline size_t kv_tiers__drop(kv_tiers *t, uint32_t tier, size_t want)
{
    kv_pool *const pool = &t->tier[tier].pool;
    const double start = kv_seconds();
    const size_t count = kv_radix_evict(t->tree, tier, want, pool->free_pages + pool->free_count);
    t->tree_seconds += kv_seconds() - start;
    t->dropped += count;
    pool->free_count += count;
    return count;
}

static inline bool kv_tiers_make_room(kv_tiers *t, uint32_t tier, size_t want)
{
    const uint32_t below = kv_tiers__below(t, tier);
    size_t count = 1;
    for (size_t room; count > 0 && (room = kv_tiers_room(t, tier)) < want;) {
        count = want - room;
        if (below == KV_RADIX_TIERS)
            count = kv_tiers__drop(t, tier, count);
        else if (!kv_tiers__demote(t, tier, below, &count))
            return false;
    }
    return true;
}

/* ---- up ---------------------------------------------------------------------------------------------------------- */

static inline bool kv_tiers_lift(kv_tiers *t, uint32_t tier, const int32_t *pages, size_t count, int32_t *host)
{
    t->lifted += count;
    if (tier == KV_HOST) {
        memcpy(host, pages, count * sizeof *pages);
        return true;
    }
    kv_pool_take(&t->tier[KV_HOST].pool, host, count);
    if (!t->tier[tier].read(t, pages, host, count))
        return false;
    kv_pool_return(&t->tier[tier].pool, pages, count);
    return true;
}

static inline bool kv_tiers_land(kv_tiers *t, const int32_t *host, const int32_t *pages, size_t count)
{
    if (!t->tier[KV_CACHE].write(t, pages, host, count))
        return false;
    kv_pool_return(&t->tier[KV_HOST].pool, host, count);
    t->lifted -= count;
    return true;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static inline bool kv_tiers_lower(const kv_tiers *t)
{
    return t->tier[KV_HOST].capacity || t->tier[KV_DISK].capacity;
}

static inline size_t kv_tiers_host_bytes(const kv_tiers *t)
{
    return t->tier[KV_HOST].pool.page_count * t->page_stride;
}

/* Host memory holds a chunk of lifted pages beside the tier, and one of pages on their way from the cache to a file. */
static inline bool kv_tiers__prepare(kv_tiers *t)
{
    const size_t pages = KV_CHUNK_BYTES / t->page_stride;
    t->chunk = pages > KV_CHUNK_PAGES ? KV_CHUNK_PAGES : pages ? pages : 1;
    t->below = (int32_t *)malloc(t->chunk * sizeof *t->below);
    t->leaving = (int32_t *)malloc(t->chunk * sizeof *t->leaving);
    t->passing = (int32_t *)malloc(t->chunk * sizeof *t->passing);
    t->order = (kv_disk_page *)malloc(t->chunk * sizeof *t->order);
    t->pieces = (struct iovec *)malloc(t->chunk * sizeof *t->pieces);
    t->error = "out of memory";
    return t->below && t->leaving && t->passing && t->order && t->pieces &&
           kv_pool_init(&t->tier[KV_CACHE].pool, t->tier[KV_CACHE].capacity) &&
           kv_pool_init(&t->tier[KV_HOST].pool, kv_tiers_lower(t) ? t->tier[KV_HOST].capacity + 2 * t->chunk : 0) &&
           kv_pool_init(&t->tier[KV_DISK].pool, t->tier[KV_DISK].capacity);
}

static inline bool kv_tiers_open(kv_tiers *t, const kv_tiers_desc *desc)
{
    const size_t page_bytes = desc->tables * desc->piece_bytes;
    const uint64_t block_bytes = (page_bytes + KV_DISK_BLOCK - 1) / KV_DISK_BLOCK * KV_DISK_BLOCK;
    const bool fits = desc->disk_pages <= INT64_MAX / block_bytes;
    memset(t, 0, sizeof *t);
    t->tier[KV_CACHE] =
        (kv_tier){.capacity = desc->cache_pages, .write = kv_tiers__write_cache, .read = kv_tiers__read_cache};
    t->tier[KV_HOST] = (kv_tier){.capacity = desc->host_pages};
    t->tier[KV_DISK] =
        (kv_tier){.capacity = desc->disk_pages, .write = kv_tiers__write_file, .read = kv_tiers__read_file};
    t->device = desc->device;
    t->tree = desc->tree;
    t->tables = desc->tables;
    t->piece_bytes = desc->piece_bytes;
    t->error = t->disk.error;
    if (desc->disk_pages &&
        !kv_disk_open(&t->disk, desc->disk_path, NULL, fits ? desc->disk_pages * block_bytes : INT64_MAX))
        return false;
    const size_t align = desc->disk_pages ? t->disk.align : 1;
    t->page_stride = (page_bytes + align - 1) / align * align;
    return kv_tiers__prepare(t);
}

static inline void kv_tiers_close(kv_tiers *t)
{
    kv_disk_close(&t->disk);
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++)
        free(t->tier[tier].pool.free_pages);
    free(t->below);
    free(t->leaving);
    free(t->passing);
    free(t->order);
    free(t->pieces);
}

#endif /* KV_TIERS_H */

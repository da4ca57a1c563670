/* SPDX-License-Identifier: MIT */
/* Compares kvprim_copy with a loop over bytes, and its check with one of each item with each. Items lie in one of three
   blocks, which are as large as what lies in them; pointers and sizes may be wild, sources may be NULL. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

enum { BLOCKS = 3, MAX_BYTES = 4096, MAX_ITEMS = 40 };

static struct reach reaches[4] = {{"copy", "items", 250, MAX_ITEMS, 0, 0, 0}};

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
    const size_t count = (size_t)take(in, 1) % (MAX_ITEMS + 1);
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

static int meets(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    const uint64_t x = (uint64_t)(uintptr_t)a, y = (uint64_t)(uintptr_t)b;
    return a_bytes && b_bytes && x <= y + (b_bytes - 1) && y <= x + (a_bytes - 1);
}

/* top: an item without another fault lies at the top of memory, where there is none. */
struct faults {
    int null, size, overlap, top;
};

static struct faults faults_of(const kvprim_copy_item *items, size_t count)
{
    struct faults w = {0, 0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        const uint64_t last = items[i].bytes - 1, src = (uintptr_t)items[i].src, dst = (uintptr_t)items[i].dst;
        w.null |= items[i].bytes && !items[i].dst;
        w.size |= items[i].bytes && items[i].dst && (src + last < src || dst + last < dst);
        w.top |= items[i].bytes && dst > UINTPTR_MAX - 64;
    }
    for (size_t i = 0; i < count && !w.null && !w.size; i++) {
        w.overlap |= meets(items[i].dst, items[i].bytes, items, count * sizeof *items);
        for (size_t j = 0; j < count; j++)
            w.overlap |= items[j].src && meets(items[i].dst, items[i].bytes, items[j].src, items[j].bytes);
    }
    return w;
}

/* A byte that no item covers must be as it was. Every other byte must come from an item that covers it. */
static void compare(const struct blocks *b, const kvprim_copy_item *items, size_t count)
{
    static uint8_t covered[BLOCKS][MAX_BYTES], right[BLOCKS][MAX_BYTES];
    memset(covered, 0, sizeof covered);
    memset(right, 0, sizeof right);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *const src = items[i].src, *const dst = items[i].dst;
        int k = 0;
        while (items[i].bytes && (uintptr_t)dst - (uintptr_t)b->at[k] >= b->bytes[k])
            k++;
        for (uint64_t n = 0; n < items[i].bytes; n++) {
            covered[k][dst + n - b->at[k]] = 1;
            right[k][dst + n - b->at[k]] |= dst[n] == (src ? src[n] : 0);
        }
    }
    for (int k = 0; k < BLOCKS; k++)
        for (size_t at = 0; at < b->bytes[k]; at++)
            require(covered[k][at] ? right[k][at] : b->at[k][at] == b->before[k][at],
                    covered[k][at] ? "an item's byte is wrong" : "wrote between items");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct blocks b = take_blocks(&in);
    kvprim_copy_item *const room = allocate(MAX_ITEMS * sizeof *room);
    const size_t count = take_items(&in, &b, room);
    kvprim_copy_item *const items = allocate(count * sizeof *items); /* the sanitizer sees what lies past them */
    if (count)
        memcpy(items, room, count * sizeof *items);
    const struct faults w = faults_of(items, count);
    const kvprim_copy_desc desc = {.items = chance(&in, 64) ? NULL : items, .count = count, .reserved = 0};
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
    compare(&b, items, status == KVPRIM_OK && !w.top ? count : 0);
    count_reach(reaches, size, status == KVPRIM_OK ? count : 0);
    for (int k = 0; k < BLOCKS; k++) {
        free(b.at[k]);
        free(b.before[k]);
    }
    free(items);
    free(room);
    return 0;
}

/* SPDX-License-Identifier: MIT */
/* Descriptors that must be refused, each beside a good one: what is changed, the status, and the error's words. C11 and
   C++. test_kvprim.c runs them through the functions of kvprim.h, tests/gpu through those of kvprim_cuda.cuh: they must
   write and enqueue nothing. Memory is of one thread each, as threads run these at the same time. */
#ifndef BAD_DESCRIPTORS_H
#define BAD_DESCRIPTORS_H

#include "../harness.h"
#include <stddef.h>

#define THREAD_MEMORY static __thread __attribute__((aligned(16)))

/* Calls every function that takes the descriptor: all return this status, with an error that contains `words`. Those on
   a GPU are called only if the status is an error, as its memory is the host's. */
#define EXPECTS(operation)                                                                                             \
    static void expect_##operation(int line, const kvprim_##operation##_desc *d, kvprim_status status,                 \
                                   const char *words)
EXPECTS(gather);
EXPECTS(store);
EXPECTS(transfer);
EXPECTS(slots);
EXPECTS(unpack);
EXPECTS(unpack_meta);
EXPECTS(copy);
EXPECTS(fetch);
#define EXPECT(operation, d, status, words) expect_##operation(__LINE__, d, status, words)

/* A change to `d`, which begins as a copy of `good`. */
#define BAD(operation, change, status, words)                                                                          \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    EXPECT(operation, &d, KVPRIM_ERROR_##status, words)

/* ---- descriptors whose indices are int32 ---- */

static inline kvprim_gather_desc gather_of(kvprim_table dst, kvprim_table src, int64_t row_bytes, const int32_t *index,
                                           int64_t count)
{
    kvprim_gather_desc d;
    memset(&d, 0, sizeof d);
    d.dst = dst, d.src = src, d.row_bytes = row_bytes, d.index = index, d.index_type = KVPRIM_I32, d.count = count;
    return d;
}

/* K only. */
static inline kvprim_store_desc store_of(kvprim_table k_cache, kvprim_table k, int64_t k_bytes, const int32_t *slot,
                                         int64_t count)
{
    kvprim_store_desc d;
    memset(&d, 0, sizeof d);
    d.k_cache = k_cache, d.k = k, d.k_bytes = k_bytes, d.slot = slot, d.slot_type = KVPRIM_I32, d.count = count;
    return d;
}

static inline void add_v(kvprim_store_desc *d, kvprim_table v_cache, kvprim_table v, int64_t v_bytes)
{
    d->v_cache = v_cache, d->v = v, d->v_bytes = v_bytes;
}

/* Row i to row i, until an index is set. */
static inline kvprim_transfer_desc transfer_of(kvprim_table dst, kvprim_table src, int64_t row_bytes, int64_t count)
{
    kvprim_transfer_desc d;
    memset(&d, 0, sizeof d);
    d.dst = dst, d.src = src, d.row_bytes = row_bytes, d.index_type = KVPRIM_I32, d.count = count;
    return d;
}

static inline kvprim_table with_pages(kvprim_table t, int64_t page_rows, int64_t page_stride)
{
    t.page_rows = page_rows, t.page_stride = page_stride;
    return t;
}

static inline kvprim_table with_heads(kvprim_table t, int32_t heads, int64_t head_stride)
{
    t.heads = heads, t.head_stride = head_stride;
    return t;
}

/* Returns an address where something could lie by mistake. */
static inline void *plus(const void *block, ptrdiff_t bytes)
{
    return (char *)((uintptr_t)block + (uintptr_t)bytes);
}

static inline uint32_t *counter_at(const void *block, ptrdiff_t bytes)
{
    return (uint32_t *)plus(block, bytes);
}

/* ---- what all operations that move rows have in common ---- */

/* An operation names its own fields. A store is there twice: what is wrong is in K, or in V. */
typedef struct operands {
    kvprim_table dst, src;
    const void *index;
    uint32_t *rejected;
    int64_t row_bytes, count, index_type, index_stride, reserved, reserved_index;
} operands;

static const struct operation {
    const char *function, *dst, *src, *index, *row_bytes;
    int dst_indexed;
} operations[] = {{"kvprim_gather: ", "dst", "src", "index", "row_bytes", 0},
                  {"kvprim_store: ", "k_cache", "k", "slot", "k_bytes", 1},
                  {"kvprim_store: ", "v_cache", "v", "slot", "v_bytes", 1},
                  {"kvprim_transfer: ", "dst", "src", "src_index", "row_bytes", 0},
                  {"kvprim_transfer: ", "dst", "src", "dst_index", "row_bytes", 1}};
enum { n_operations = 5 };

static void expect_operands(size_t operation, const operands *o, kvprim_status status, const char *words)
{
    THREAD_MEMORY unsigned char k_cache[1024], k[512]; /* while V is looked at, nothing is wrong here */
    const kvprim_index_type type = (kvprim_index_type)o->index_type;
    const int32_t reserved_index = (int32_t)o->reserved_index, *const index = (const int32_t *)o->index;
    if (operation == 0) {
        kvprim_gather_desc d = gather_of(o->dst, o->src, o->row_bytes, index, o->count);
        d.index_type = type, d.index_stride = o->index_stride, d.rejected = o->rejected;
        d.reserved = o->reserved, d.keep_padding = reserved_index;
        EXPECT(gather, &d, status, words);
    } else if (operation <= 2) {
        kvprim_store_desc d = store_of(o->dst, o->src, o->row_bytes, index, o->count);
        d.slot_type = type, d.slot_stride = o->index_stride, d.rejected = o->rejected;
        d.reserved = o->reserved, d.reserved_slot = reserved_index;
        if (operation == 2) {
            d.k_cache = table_of(k_cache, 8), d.k = table_of(k, 8), d.k_bytes = 64;
            add_v(&d, o->dst, o->src, o->row_bytes);
        }
        EXPECT(store, &d, status, words);
    } else {
        kvprim_transfer_desc d = transfer_of(o->dst, o->src, o->row_bytes, o->count);
        *(operation == 3 ? &d.src_index : &d.dst_index) = o->index;
        *(operation == 3 ? &d.src_index_stride : &d.dst_index_stride) = o->index_stride;
        d.index_type = type, d.rejected = o->rejected;
        d.reserved = o->reserved, d.host_index = reserved_index;
        EXPECT(transfer, &d, status, words);
    }
}

/* Which field becomes what. */
typedef struct changed_field {
    size_t at, size;
    int64_t value;
} changed_field;

static inline void change_field(void *descriptor, const changed_field *f)
{
    const int32_t narrow = (int32_t)f->value; /* big-endian machines have it at the other end */
    memcpy((char *)descriptor + f->at, f->size == sizeof narrow ? (const void *)&narrow : &f->value, f->size);
}

#define T(field, value)                                                                                                \
    {                                                                                                                  \
        offsetof(kvprim_table, field), sizeof(((kvprim_table *)NULL)->field), value                                    \
    }
#define SIZE KVPRIM_ERROR_SIZE
#define ARGUMENT KVPRIM_ERROR_ARGUMENT

/* What becomes of a good table of eight rows of 128 bytes, and the error after the table's name. */
static const struct bad_table {
    changed_field fields[4];
    kvprim_status status;
    const char *words;
} bad_tables[] = {
    {{T(rows, -2)}, SIZE, ".rows is -2"},
    {{T(rows, 0)}, SIZE, ".rows is 0"},
    {{T(rows, INT64_MAX)}, SIZE, ".rows is 9223372036854775807"},
    {{T(stride, 127)}, SIZE, ".stride is 127, less than a row's bytes, 128"},
    {{T(stride, -128)}, SIZE, ".stride is -128"},
    {{T(stride, INT64_MIN)}, SIZE, ".stride is -9223372036854775808"},
    {{T(stride, INT64_MAX)}, SIZE, ".rows is 8"},
    {{T(page_rows, 4), T(stride, INT64_MAX)}, SIZE, ".rows is 8, which makes the table larger"},
    {{T(page_rows, -1)}, SIZE, ".page_rows is -1"},
    {{T(page_rows, INT64_MIN)}, SIZE, ".page_rows is -9223372036854775808"},
    {{T(page_stride, -1)}, SIZE, ".page_stride is -1"},
    {{T(page_rows, 8), T(page_stride, 127)}, SIZE, ".page_stride is 127, less than a row's"},
    {{T(page_rows, 4), T(page_stride, 511)}, SIZE, ".page_stride is 511, but what lies inside that step takes"},
    {{T(heads, -1)}, SIZE, ".heads is -1"},
    {{T(head_stride, -1)}, SIZE, ".head_stride is -1"},
    {{T(heads, INT32_MIN)}, SIZE, ".heads is -2147483648"},
    {{T(heads, 3)}, SIZE, ".heads is 3, which does not divide the bytes of a row, 128"},
    {{T(heads, 2)}, SIZE, ".head_stride is 0, less than the bytes of one head, 64"},
    {{T(heads, 2), T(stride, 64), T(head_stride, 100)}, SIZE, ".head_stride is 100, but what lies inside that"},
    {{T(heads, 2), T(head_stride, 64), T(page_rows, 4), T(page_stride, 63)}, SIZE, ".page_stride is 63, less"},
    {{T(bytes, -1)}, SIZE, ".bytes is -1"},
    {{T(bytes, 1023)}, SIZE, ".bytes is 1023"},
    {{T(bytes, 1024)}, KVPRIM_OK, ""},
    {{T(page_rows, 4), T(bytes, 1024)}, KVPRIM_OK, ""},
    {{T(reserved_heads, 1)}, ARGUMENT, " is not 0"},
    {{T(reserved, 1)}, ARGUMENT, " is not 0"},
    {{T(reserved, (int64_t)1 << 32)}, ARGUMENT, " is not 0"},
};
#undef T

typedef struct bad_memory {
    unsigned char dst[2048], src[2048], index[2048];
} bad_memory;
THREAD_MEMORY bad_memory bad_got, bad_want;

/* Unless all is good, nothing is written, and the error has a name and some words after it. */
static void check_operands(size_t operation, const operands *o, kvprim_status status, const char *name,
                           const char *words)
{
    char text[200];
    snprintf(text, sizeof text, "%s%s", name, words);
    expect_operands(operation, o, status, status == KVPRIM_OK ? "-" : text);
    if (status != KVPRIM_OK && memcmp(&bad_got, &bad_want, sizeof bad_got) != 0)
        fail("%swrites although %s", operations[operation].function, text);
    memcpy(&bad_got, &bad_want, sizeof bad_got);
}

static void check_bad_tables(size_t operation, const operands *good)
{
    const struct operation *const names = &operations[operation];
    for (size_t i = 0; i < 2 * sizeof bad_tables / sizeof *bad_tables; i++) {
        const struct bad_table *const b = &bad_tables[i / 2];
        operands o = *good;
        for (int k = 0; k < 4; k++)
            change_field(i % 2 ? &o.src : &o.dst, &b->fields[k]);
        check_operands(operation, &o, b->status, i % 2 ? names->src : names->dst, b->words);
    }
    operands o = *good;
    (names->dst_indexed ? &o.src : &o.dst)->rows = 3;
    check_operands(operation, &o, SIZE, names->dst_indexed ? names->src : names->dst,
                   ".rows is 3, less than count, which is 4");
}

#define O(field, value)                                                                                                \
    {                                                                                                                  \
        offsetof(operands, field), sizeof(((operands *)NULL)->field), (int64_t)(value)                                 \
    }
#define AT(pointer) (intptr_t)(pointer)
#define OVERLAP KVPRIM_ERROR_OVERLAP

static void check_bad_fields(size_t operation, const operands *good)
{
    const struct operation *const n = &operations[operation];
    unsigned char *const dst = bad_got.dst, *const src = bad_got.src, *const index = bad_got.index;
    /* the side with indices has eight rows to reach, the other one has four */
    unsigned char *const dst_end = dst + (n->dst_indexed ? 1024 : 512), *const src_end = src + 1536 - (dst_end - dst);
    const struct {
        changed_field field;
        kvprim_status status;
        const char *name, *words;
    } cases[] = {
        {O(dst.data, 0), KVPRIM_ERROR_NULL, n->dst, ".data is NULL"},
        {O(src.data, 0), KVPRIM_ERROR_NULL, n->src, ".data is NULL"},
        {O(index, AT(index + 1)), ARGUMENT, n->index, " ("},
        {O(index_type, 3), ARGUMENT, n->index, "_type is 3"},
        {O(index_type, 0), ARGUMENT, n->index, "_type is 0"},
#ifndef __cplusplus /* its enumerations have no such values */
        {O(index_type, 7), ARGUMENT, n->index, "_type is 7"},
        {O(index_type, -1), ARGUMENT, n->index, "_type is -1"},
#endif
        {O(index_stride, -1), SIZE, n->index, "_stride is -1"},
        {O(index_stride, INT64_MAX), SIZE, n->index, "_stride is 9223372036854775807"},
        {O(index_stride, KVPRIM_MAX_INDEX_STRIDE + 1), SIZE, n->index, "_stride is 268435457"},
        {O(count, -1), SIZE, n->function, "count is -1"},
        {O(count, INT64_MIN), SIZE, n->function, "count is -9223372036854775808"},
        {O(count, INT64_MAX), SIZE, n->function, "count is 9223372036854775807, which makes "},
        {O(count, (int64_t)1 << 60), SIZE, n->function, "count is 1152921504606846976, which makes "},
        {O(row_bytes, 0), SIZE, n->row_bytes, " is 0, less than 1"},
        {O(row_bytes, -128), SIZE, n->row_bytes, " is -128"},
        {O(row_bytes, INT64_MIN), SIZE, n->row_bytes, " is -9223372036854775808"},
        {O(row_bytes, INT64_MAX), SIZE, n->dst, ".rows is 8, which makes the table larger"},
        {O(reserved, 1), ARGUMENT, n->function, "a reserved field"},
        {O(reserved_index, 2), ARGUMENT, n->function,
         operation == 0  ? "keep_padding is 2, neither 0 nor 1"
         : operation < 3 ? "a reserved field"
                         : "host_index is 2"},
        {O(src.data, AT(dst)), OVERLAP, "", "overlap"},
        {O(src.data, AT(dst_end - 1)), OVERLAP, "", "overlaps"},
        {O(dst.data, AT(src_end - 1)), OVERLAP, "", "overlaps"},
        {O(dst.data, AT(index + 15)), OVERLAP, n->index, " ("},
        {O(rejected, AT(index + 2)), ARGUMENT, "", "rejected ("},
        {O(rejected, AT(dst_end - 4)), OVERLAP, "overlaps ", n->dst},
        {O(rejected, AT(src_end - 4)), OVERLAP, "overlaps ", n->src},
        {O(rejected, AT(index + 12)), OVERLAP, "overlaps ", n->index},
        {O(src.data, AT(dst_end)), KVPRIM_OK, "", ""},
        {O(dst.data, AT(src_end)), KVPRIM_OK, "", ""},
        {O(dst.data, AT(index + 16)), KVPRIM_OK, "", ""},
        {O(rejected, AT(dst_end)), KVPRIM_OK, "", ""},
        {O(rejected, AT(src - 4)), KVPRIM_OK, "", ""},
        {O(rejected, AT(index + 16)), KVPRIM_OK, "", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        operands o = *good;
        change_field(&o, &cases[i].field);
        check_operands(operation, &o, cases[i].status, cases[i].name, cases[i].words);
    }
}
#undef O
#undef AT
#undef SIZE
#undef ARGUMENT
#undef OVERLAP

static void bad_operands(void)
{
    static const int32_t index[4] = {0, 1, 2, 3};
    fill(&bad_got, sizeof bad_got);
    memcpy(bad_got.index, index, sizeof index);
    memcpy(&bad_want, &bad_got, sizeof bad_want);
    for (size_t operation = 0; operation < n_operations; operation++) {
        operands good;
        memset(&good, 0, sizeof good);
        good.dst = table_of(bad_got.dst, 8), good.src = table_of(bad_got.src, 8), good.index = bad_got.index;
        good.row_bytes = 128, good.index_type = KVPRIM_I32, good.count = 4;
        check_operands(operation, &good, KVPRIM_OK, "", "");
        check_bad_tables(operation, &good);
        check_bad_fields(operation, &good);
    }
}

/* ---- what only one operation refuses ---- */

static void bad_gathers(void)
{
    THREAD_MEMORY unsigned char dst[4096], src[4096];
    static const int32_t index[4] = {0, 1, 2, 3};
    const kvprim_gather_desc good = gather_of(table_of(dst, 4), table_of(src, 8), 128, index, 4);
    kvprim_gather_desc d;
    memset(dst, 0, sizeof dst); /* indices, in some of these */
    EXPECT(gather, NULL, KVPRIM_ERROR_NULL, "kvprim_gather: desc is NULL");
    BAD(gather, index = NULL, NULL, "index is NULL");
    /* the last of the indices, which lie apart, is in dst, or before it */
    BAD(gather, index = dst + 1024; d.dst.data = dst + 1024 + 4 * 90; d.index_stride = 30, OVERLAP, "index (");
    BAD(gather, src.data = dst + 2048; d.dst.data = dst + 27; d.index = dst; d.index_stride = 2, OVERLAP, "index (");
    d.dst.data = dst + 28;
    EXPECT(gather, &d, KVPRIM_OK, "");
    d = good; /* the padding after the last row is nobody's */
    d.dst.stride = 200, d.src.data = dst + 3 * 200 + 128;
    EXPECT(gather, &d, KVPRIM_OK, "");
    d = good; /* one table starts where the other's partial last page ends: no overlap */
    d.src = paged_table(src, 5, 4, 0), d.dst.data = src + 5 * 128;
    EXPECT(gather, &d, KVPRIM_OK, "");
    d = good;
    d.count = 1, d.index_stride = KVPRIM_MAX_INDEX_STRIDE;
    EXPECT(gather, &d, KVPRIM_OK, "");
    memset(&d, 0, sizeof d);
    d.reserved = d.row_bytes = d.src.rows = -1;
    EXPECT(gather, &d, KVPRIM_OK, ""); /* count 0 */
}

/* What is wrong between K and V. */
static void bad_stores(void)
{
    THREAD_MEMORY unsigned char cache[2][2048], input[2][1024], want[2][2048];
    THREAD_MEMORY int64_t slot[2];
    struct aligned {
        char before;
        int64_t i64;
    };
    const size_t alignment = offsetof(struct aligned, i64); /* 8; on 32-bit x86 4 */
    kvprim_store_desc d, good = store_of(table_of(cache[0], 8), table_of(input[0], 2), 64, NULL, 2);
    add_v(&good, table_of(cache[1], 8), table_of(input[1], 2), 32);
    good.slot = slot, good.slot_type = KVPRIM_I64;
    slot[0] = 1, slot[1] = 3;
    fill(cache, sizeof cache);
    memcpy(want, cache, sizeof cache);
    EXPECT(store, NULL, KVPRIM_ERROR_NULL, "kvprim_store: desc is NULL");
    BAD(store, slot = NULL, NULL, "slot is NULL");
    BAD(store, slot = plus(slot, (ptrdiff_t)alignment / 2), ARGUMENT, "slot (");
    BAD(store, v_cache.rows = 7, SIZE, "v_cache.rows is 7, but k_cache.rows is 8");
    BAD(store, v_cache.rows = 9, SIZE, "v_cache.rows is 9, but k_cache.rows is 8");
    BAD(store, v.data = cache[0] + 100, OVERLAP, "k_cache");
    BAD(store, k.data = cache[1] + 100, OVERLAP, "v_cache");
    BAD(store, v_cache.data = cache[0] + 63, OVERLAP, "v_cache");
    BAD(store, v_cache.data = NULL, NULL, "v_cache.data is NULL");
    BAD(store, rejected = counter_at(slot, 12), OVERLAP, "rejected (");
    BAD(store, rejected = counter_at(cache[0], 508), OVERLAP, "k_cache");
    BAD(store, rejected = counter_at(cache[1], 252), OVERLAP, "v_cache");
    BAD(store, rejected = counter_at(input[0], 124), OVERLAP, "k (");
    BAD(store, rejected = counter_at(input[1], 60), OVERLAP, "v (");
    BAD(store, v_cache = table_of(NULL, 0), NULL, "v_cache.data is NULL"); /* parts of V */
    BAD(store, v_cache = table_of(NULL, 0); d.v = table_of(NULL, 0), NULL, "v_cache.data is NULL");
    BAD(store, v_cache = table_of(NULL, 0); d.v_bytes = 0, NULL, "v_cache.data is NULL");
    CHECK(memcmp(cache, want, sizeof cache) == 0);
    d = good;
    d.slot = plus(slot, (ptrdiff_t)alignment), d.count = 1;
    EXPECT(store, &d, KVPRIM_OK, "");
    memset(&d, 0, sizeof d);
    EXPECT(store, &d, KVPRIM_OK, "");
}

/* One cache on both sides, except for what differs in each case. */
static void bad_unlike_sides(unsigned char *cache, kvprim_transfer_desc d)
{
    const kvprim_table plain = table_of(cache, 8), strided = strided_table(cache, 8, 64);
    const struct {
        kvprim_table dst, src;
        int64_t src_layer_stride;
        const char *words;
    } cases[] = {
        {plain, with_pages(plain, 4, 0), 0, "dst.page_rows is 0 and src.page_rows 4"},
        {with_pages(plain, 4, 0), with_pages(plain, 4, 300), 0, "dst.page_stride is 256 and src.page_stride 300"},
        {plain, strided_table(cache, 8, 72), 0, "dst.stride is 64 and src.stride 72"},
        {plain, with_heads(strided, 2, 1024), 0, "dst.heads is 1 and src.heads 2"},
        {with_heads(strided, 2, 512), with_heads(strided, 2, 1024), 0,
         "dst.head_stride is 512 and src.head_stride 1024"},
        {plain, plain, 1024, "layer 1 is at"},
    };
    d.same_cache = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        d.dst = cases[i].dst, d.src = cases[i].src, d.src_layer_stride = cases[i].src_layer_stride;
        EXPECT(transfer, &d, KVPRIM_ERROR_ARGUMENT, cases[i].words);
    }
}

/* What is wrong with layers, with one of two indices, and with one cache on both sides. */
static void bad_transfers(void)
{
    THREAD_MEMORY unsigned char dst[4096], src[4096], want[4096];
    static const int32_t index[2] = {1, 3};
    void *const dst_layers[2] = {dst, dst + 2048}, *const src_layers[2] = {src, src + 512};
    void *const null_layers[2] = {src, NULL}, *const none[2] = {NULL, NULL};
    void *const mixed[2] = {src, dst + 100}, *const twice[2] = {dst, dst};
    kvprim_transfer_desc d, good = transfer_of(table_of(dst, 8), table_of(src, 8), 64, 2);
    good.layers = 2, good.dst_index = good.src_index = index;
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    EXPECT(transfer, NULL, KVPRIM_ERROR_NULL, "kvprim_transfer: desc is NULL");
    BAD(transfer, layers = -1, SIZE, "layers is -1");
    BAD(transfer, layers = INT32_MIN, SIZE, "layers is -2147483648");
    BAD(transfer, layers = 65537, SIZE, "layers is 65537");
    BAD(transfer, layers = INT32_MAX, SIZE, "layers is 2147483647");
    BAD(transfer, count = (int64_t)1 << 62; d.layers = 4, SIZE, "count is 4611686018427387904, which makes ");
    BAD(transfer, src_layers = null_layers, NULL, "src_layers[1] is NULL");
    BAD(transfer, dst_layers = null_layers, NULL, "dst_layers[1] is NULL");
    BAD(transfer, dst_index = NULL; d.dst.rows = d.count = (int64_t)1 << 50; d.dst.bytes = 0;
        d.src_index_stride = 1 << 28, SIZE, "which makes src_index");
    BAD(transfer, dst = with_heads(with_pages(table_of(dst, 8), 4, 31), 2, 32), SIZE,
        "dst.page_stride is 31, less than the bytes of one head, 32");
    BAD(transfer, src_layers = mixed, OVERLAP, "overlaps");
    BAD(transfer, dst_layer_stride = 500, SIZE,
        "kvprim_transfer: dst_layer_stride is 500, but what lies inside that step takes bytes: 512");
    BAD(transfer, src_layer_stride = -8, SIZE, "src_layer_stride is -8");
    BAD(transfer, src.data = dst + 1000, OVERLAP, "overlaps"); /* dst's second layer */
    BAD(transfer, same_cache = 2, ARGUMENT, "same_cache is 2");
    BAD(transfer, same_cache = -1, ARGUMENT, "same_cache is -1");
    BAD(transfer, same_cache = 1, ARGUMENT, "same_cache is 1, but layer 0 is at");
    BAD(transfer, src_index_type = (kvprim_index_type)3, ARGUMENT, "src_index_type is 3");
    BAD(transfer, dst_index_type = (kvprim_index_type)3, ARGUMENT, "dst_index_type is 3");
    BAD(transfer, src = table_of(NULL, 0); d.src_layers = src_layers, SIZE, "src.rows is 0");
    BAD(transfer, src = table_of(NULL, 0); d.src_layers = none, SIZE, "src.rows is 0");
    BAD(transfer, dst_layers = twice, OVERLAP, "layer of dst");
    BAD(transfer, dst_layers = dst_layers; d.dst_layer_stride = 2048, ARGUMENT, "dst_layer_stride");
    BAD(transfer, src_layers = src_layers; d.src_layer_stride = 512, ARGUMENT, "src_layer_stride");
    BAD(transfer, dst_layers = dst_layers; d.dst.bytes = 511, SIZE, "dst.bytes is 511");
    BAD(transfer, rejected = counter_at(dst, 1020), OVERLAP, "dst"); /* in the second layer */
    BAD(transfer, rejected = counter_at(src, 512), OVERLAP, "src");
    BAD(transfer, dst_index = dst + 512, OVERLAP, "dst_index (");
    BAD(transfer, src.data = dst, OVERLAP, "to copy rows inside one cache set same_cache");
    BAD(transfer, src.data = dst, OVERLAP, "dst layer 0");
    /* layers of both sides alternate: [layer][src or dst][row] */
    BAD(transfer, dst_layer_stride = d.src_layer_stride = 1024; d.src.data = dst + 511, OVERLAP, "dst layer 0");
    BAD(transfer, dst_layer_stride = d.src_layer_stride = 1024; d.src.data = dst + 513, OVERLAP, "dst layer 1");
    bad_unlike_sides(dst, good);
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    d = good; /* an empty table: its layer stride leads nowhere */
    d.dst = table_of(NULL, 0), d.dst_layer_stride = INT64_MAX;
    EXPECT(transfer, &d, KVPRIM_OK, "");
    memset(&d, 0, sizeof d);
    EXPECT(transfer, &d, KVPRIM_OK, "");
}

/* Layers that the executing side reads. */
static void bad_device_layers(void)
{
    enum { room = 512, rows = 4, row_bytes = 64 };
    THREAD_MEMORY unsigned char dst[3][room], src[3][room], want[3][room];
    static const int32_t index[4] = {3, -1, 4, 0};
    void *dst_layers[3], *src_layers[3], *others[3];
    kvprim_transfer_desc d, good = transfer_of(table_of(NULL, rows), table_of(NULL, rows), row_bytes, 4);
    for (int l = 0; l < 3; l++)
        dst_layers[l] = dst[2 - l], src_layers[l] = others[l] = src[l];
    void **const inside = (void **)(void *)dst[1];
    void *const *const odd = (void *const *)plus(src_layers, sizeof(void *) / 2);
    good.layers = 3, good.dst_device_layers = dst_layers, good.src_device_layers = src_layers;
    good.dst_index = good.src_index = index;
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    BAD(transfer, dst_layers = dst_layers, ARGUMENT, "both dst_layers and dst_device_layers are set");
    BAD(transfer, src_layers = src_layers, ARGUMENT, "both src_layers and src_device_layers are set");
    BAD(transfer, dst_layer_stride = room, ARGUMENT, "both dst_device_layers and dst_layer_stride are set");
    BAD(transfer, src_layer_stride = 1, ARGUMENT, "both src_device_layers and src_layer_stride are set");
    BAD(transfer, src_device_layers = odd, ARGUMENT, "is not aligned to");
    BAD(transfer, src.rows = 0, SIZE, "src.rows is 0, but its data is set");
    BAD(transfer, dst.rows = 0, SIZE, "dst.rows is 0");
    BAD(transfer, src.rows = -1, SIZE, "src.rows is -1");
    BAD(transfer, dst_index = NULL; d.dst.rows = 3, SIZE, "dst.rows is 3, less than count, which is 4");
    BAD(transfer, dst.bytes = rows * row_bytes - 1, SIZE, "dst.bytes is 255");
    BAD(transfer, src.rows = INT64_MAX, SIZE, "which makes the table larger than");
    BAD(transfer, dst.stride = 63, SIZE, "dst.stride is 63");
    BAD(transfer, src_index_stride = -1, SIZE, "src_index_stride is -1");
    BAD(transfer, host_index = 2, ARGUMENT, "host_index is 2, neither 0 nor 1");
    BAD(transfer, host_index = -1, ARGUMENT, "host_index is -1, neither 0 nor 1");
    BAD(transfer, dst_device_layers = NULL; d.dst_layers = dst_layers;
        d.src_device_layers = inside, OVERLAP, "src_device_layers (");
    BAD(transfer, rejected = counter_at(src_layers, 8), OVERLAP, "overlaps src_device_layers (");
    BAD(transfer, rejected = counter_at(dst_layers, 8), OVERLAP, "overlaps dst_device_layers (");
    BAD(transfer, dst_device_layers = NULL; d.dst_layers = dst_layers; d.dst_index = dst[2], OVERLAP, "dst_index (");
    BAD(transfer, dst_device_layers = NULL, NULL, "dst.data is NULL");
    BAD(transfer, src_device_layers = dst_layers, OVERLAP, "to copy rows inside one cache set same_cache");
    BAD(transfer, same_cache = 1, ARGUMENT, "same_cache is 1, but dst_device_layers is");
    BAD(transfer, same_cache = 1; d.dst_device_layers = others, ARGUMENT, "same_cache is 1, but dst_device_layers is");
    BAD(transfer, same_cache = 1; d.src_device_layers = NULL;
        d.src_layers = dst_layers, ARGUMENT, "same_cache is 1, but dst_device_layers is");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
}

/* ---- fragments and copies ---- */

static inline kvprim_fragment fragment_of(uint64_t src_offset, uint64_t dst_offset, uint64_t bytes)
{
    const kvprim_fragment f = {src_offset, dst_offset, bytes};
    return f;
}

static void bad_unpacks(void)
{
    static const struct {
        kvprim_fragment second;
        const char *words;
    } cases[] = {{{60, 0, 8}, "fragments[1] is 8 bytes at src_offset 60, past src_bytes 64"},
                 {{0, 57, 8}, "fragments[1] is 8 bytes at dst_offset 57, past dst_bytes 64"},
                 {{UINT64_MAX - 3, 0, 8}, "fragments[1]"},
                 {{0, 8, UINT64_MAX}, "fragments[1]"},
                 {{8, UINT64_MAX - 7, 8}, "fragments[1]"},
                 {{UINT64_MAX / 2, UINT64_MAX / 2, UINT64_MAX / 2}, "fragments[1]"}}; /* only their sum is too large */
    THREAD_MEMORY unsigned char src[64], dst[64], want[64];
    kvprim_fragment f[3] = {{0, 0, 8}, {0, 0, 0}, {0, 16, 0}};
    kvprim_unpack_desc d, good = {src, 64, dst, 64, f, 3, 0};
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    EXPECT(unpack, NULL, KVPRIM_ERROR_NULL, "kvprim_unpack: desc is NULL");
    for (size_t i = 0; i < 3 * sizeof cases / sizeof *cases; i++) { /* as the first, second and last fragment */
        char words[80];
        f[0] = fragment_of(0, 0, 8), f[1] = fragment_of(0, 0, 0), f[2] = fragment_of(0, 16, 0);
        f[i % 3] = cases[i / 3].second;
        snprintf(words, sizeof words, "fragments[%d]%s", (int)(i % 3), cases[i / 3].words + strlen("fragments[1]"));
        EXPECT(unpack, &good, KVPRIM_ERROR_BOUNDS, words);
    }
#ifdef KVPRIM_DEBUG
    good.count = 2;
    for (uint64_t first = 0; first <= 14; first += 14) {
        f[0] = fragment_of(0, first, 8), f[1] = fragment_of(0, 7, 8);
        EXPECT(unpack, &good, KVPRIM_ERROR_OVERLAP, "fragments[0] and fragments[1] overlap in dst");
    }
    f[0].dst_offset = 15;
    EXPECT(unpack, &good, KVPRIM_OK, "");
    good.count = 3;
    f[0].dst_offset = 32, f[1].dst_offset = 8, f[2] = fragment_of(0, 15, 8); /* not in order */
    EXPECT(unpack, &good, KVPRIM_ERROR_OVERLAP, "fragments[1] and fragments[2] overlap in dst");
    memcpy(dst, want, sizeof dst);
#endif
    f[0] = fragment_of(56, 0, 8), f[1] = fragment_of(0, 8, 8), f[2] = fragment_of(0, 0, 0);
    BAD(unpack, reserved = 1, ARGUMENT, "reserved is 1, not 0");
    BAD(unpack, src_bytes = 63, BOUNDS, "past src_bytes 63");
    BAD(unpack, dst_bytes = 15, BOUNDS, "past dst_bytes 15");
    BAD(unpack, src = NULL, NULL, "src is NULL");
    BAD(unpack, dst = NULL, NULL, "dst is NULL");
    BAD(unpack, fragments = NULL, NULL, "fragments is NULL");
    /* byte 63 is the last one of a source, and the first one of its destination */
    BAD(unpack, dst = src + 63, OVERLAP, "dst of fragments[0]");
    BAD(unpack, dst = src + 63, OVERLAP, "overlaps src of fragments[0]");
    BAD(unpack, dst = f; d.dst_bytes = sizeof f, OVERLAP, "overlaps fragments");
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    d.count = 0, d.fragments = NULL, d.reserved = 1;
    EXPECT(unpack, &d, KVPRIM_OK, "");
}

static void bad_copies(void)
{
    THREAD_MEMORY unsigned char src[64], dst[64], want[64];
    void *const high = (void *)(uintptr_t)(UINTPTR_MAX - 6); /* 7 bytes, and the last address */
    const struct {
        kvprim_copy_item second;
        kvprim_status status;
        const char *words;
    } cases[] = {
        {{src, NULL, 1}, KVPRIM_ERROR_NULL, "kvprim_copy: items[1].dst is NULL, and its bytes are 1"},
        {{NULL, NULL, 7}, KVPRIM_ERROR_NULL, "items[1].dst is NULL, and its bytes are 7"},
        {{src, high, 8}, KVPRIM_ERROR_SIZE, "kvprim_copy: items[1] is 8 bytes from dst"},
        {{high, dst + 8, 8}, KVPRIM_ERROR_SIZE, "items[1] is 8 bytes from src"},
        {{src, dst + 8, UINT64_MAX}, KVPRIM_ERROR_SIZE, "items[1] is 18446744073709551615 bytes from"},
        {{src, dst + 8, UINTPTR_MAX > UINT32_MAX ? (uint64_t)1 << 62 : 1 << 20}, KVPRIM_ERROR_OVERLAP, "items[1]"},
        {{dst + 7, dst + 8, 1}, KVPRIM_ERROR_OVERLAP, "kvprim_copy: dst of items[0]"},
        {{dst + 6, dst + 8, 2}, KVPRIM_ERROR_OVERLAP, "8 bytes) overlaps src of items[1]"},
        {{dst + 16, dst + 17, 2}, KVPRIM_ERROR_OVERLAP, "dst of items[1]"}, /* with itself */
        {{src + 16, src + 7, 1}, KVPRIM_ERROR_OVERLAP, "overlaps src of items[0]"},
    };
    kvprim_copy_item around[3], *const items = around + 1;
    kvprim_copy_desc d, good = {items, 2, 0};
    memset(around, 0, sizeof around);
    items[0].src = src, items[0].dst = dst, items[0].bytes = 8;
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    EXPECT(copy, NULL, KVPRIM_ERROR_NULL, "kvprim_copy: desc is NULL");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        items[1] = cases[i].second;
        EXPECT(copy, &good, cases[i].status, cases[i].words);
    }
    const struct {
        void *dst;
        uint64_t bytes;
    } over[] = {{&items[1], sizeof items[1]}, {plus(items + 2, -1), 1}, {plus(items, -3), 4}};
    for (size_t i = 0; i < sizeof over / sizeof *over; i++) {
        items[1].src = src + 32, items[1].dst = over[i].dst, items[1].bytes = over[i].bytes;
        EXPECT(copy, &good, KVPRIM_ERROR_OVERLAP, "kvprim_copy: dst of items[1]");
        EXPECT(copy, &good, KVPRIM_ERROR_OVERLAP, ") overlaps items (");
        CHECK(items[1].dst == over[i].dst && items[1].bytes == over[i].bytes);
    }
    items[1].src = src, items[1].dst = dst + 8, items[1].bytes = 8;
    BAD(copy, reserved = 7, ARGUMENT, "kvprim_copy: reserved is 7, not 0");
    BAD(copy, count = KVPRIM_MAX_COPIES + 1, SIZE, "kvprim_copy: count is 262145, more than 262144");
    BAD(copy, items = NULL, NULL, "kvprim_copy: items is NULL");
#ifdef KVPRIM_DEBUG
    items[1].dst = dst + 7;
    EXPECT(copy, &good, KVPRIM_ERROR_OVERLAP, "kvprim_copy: items[0] and items[1] overlap in dst");
#endif
    CHECK(memcmp(dst, want, sizeof dst) == 0);
    d.count = 0, d.reserved = 7;
    EXPECT(copy, &d, KVPRIM_OK, "");
}

static void bad_metas(void)
{
    enum { side = 256 };
    THREAD_MEMORY kvprim_unpack_meta_item meta[4];
    THREAD_MEMORY unsigned char src[side], dst[side], want[side];
    THREAD_MEMORY uint64_t count;
    THREAD_MEMORY uint32_t rejected;
    kvprim_unpack_meta_desc d, good = {src, side, dst, side, meta, &count, 4, &rejected, 0};
    memset(meta, 0, sizeof meta);
    count = rejected = 0;
    fill(dst, sizeof dst);
    memcpy(want, dst, sizeof dst);
    EXPECT(unpack_meta, NULL, KVPRIM_ERROR_NULL, "kvprim_unpack_meta: desc is NULL");
    BAD(unpack_meta, meta = NULL, NULL, "kvprim_unpack_meta: meta is NULL");
    BAD(unpack_meta, count = NULL, NULL, "kvprim_unpack_meta: count is NULL");
    BAD(unpack_meta, src = NULL, NULL, "kvprim_unpack_meta: src is NULL");
    BAD(unpack_meta, dst = NULL, NULL, "kvprim_unpack_meta: dst is NULL");
    BAD(unpack_meta, reserved = 3, ARGUMENT, "kvprim_unpack_meta: reserved is 3, not 0");
    BAD(unpack_meta, max_count = (uint64_t)KVPRIM_MAX_UNPACK_META + 1, SIZE,
        "kvprim_unpack_meta: max_count is 268435457, more than 268435456");
    BAD(unpack_meta, meta = (kvprim_unpack_meta_item *)plus(meta, 8), ARGUMENT, "kvprim_unpack_meta: meta (");
    BAD(unpack_meta, count = (uint64_t *)plus(&count, 4), ARGUMENT, "kvprim_unpack_meta: count (");
    BAD(unpack_meta, rejected = counter_at(&rejected, 2), ARGUMENT, "kvprim_unpack_meta: rejected (");
    BAD(unpack_meta, dst = &meta[3], OVERLAP, "kvprim_unpack_meta: dst (");
    BAD(unpack_meta, dst = plus(meta, 1 - side), OVERLAP, "kvprim_unpack_meta: dst (");
    BAD(unpack_meta, dst = &count, OVERLAP, "kvprim_unpack_meta: dst (");
    BAD(unpack_meta, dst = &rejected, OVERLAP, "kvprim_unpack_meta: dst (");
    BAD(unpack_meta, count = (uint64_t *)plus(dst, side - 8), OVERLAP, "kvprim_unpack_meta: dst (");
    BAD(unpack_meta, rejected = counter_at(dst, side - 4), OVERLAP, "rejected (");
    BAD(unpack_meta, rejected = counter_at(&count, 4), OVERLAP, "kvprim_unpack_meta: rejected (");
    BAD(unpack_meta, rejected = &meta[3].bytes, OVERLAP, "kvprim_unpack_meta: rejected (");
    CHECK(memcmp(dst, want, sizeof dst) == 0 && count == 0 && rejected == 0);
    memset(&d, 0, sizeof d);
    EXPECT(unpack_meta, &d, KVPRIM_OK, "");
}

/* ---- slots ---- */

/* All arrays of a good descriptor, apart from each other. */
typedef struct slots_memory {
    int64_t pages[40], request[20], position[20], cu[20], starts[20], page_starts[20], slot[20];
    uint32_t rejected[4];
} slots_memory;

/* form 0: pairs; 1: counts and starts. */
static kvprim_slots_desc slots_in(slots_memory *m, int form)
{
    kvprim_slots_desc d;
    memset(m, 0, sizeof *m);
    memset(&d, 0, sizeof d);
    memset(m->slot, 0x55, sizeof m->slot);
    m->cu[1] = m->cu[2] = m->cu[3] = 8;
    d.pages = m->pages, d.slot = m->slot, d.rejected = m->rejected;
    d.requests = 3, d.max_pages = 4, d.page_rows = 16, d.rows = 100, d.count = 8;
    d.pages_type = d.token_type = d.slot_type = KVPRIM_I64;
    if (form)
        d.cu_seqlens = m->cu, d.starts = m->starts;
    else
        d.request = m->request, d.position = m->position;
    return d;
}

/* `change` is to descriptor d of this form, in memory m. */
#define BAD_SLOTS(form, change, status, words)                                                                         \
    do {                                                                                                               \
        kvprim_slots_desc d = slots_in(m, form);                                                                       \
        change;                                                                                                        \
        const slots_memory before_it = *m;                                                                             \
        EXPECT(slots, &d, KVPRIM_ERROR_##status, words);                                                               \
        CHECK(memcmp(&before_it, m, sizeof *m) == 0);                                                                  \
    } while (0)

static void bad_slots_fields(slots_memory *m)
{
    EXPECT(slots, NULL, KVPRIM_ERROR_NULL, "kvprim_slots: desc is NULL");
    for (int form = 0; form < 2; form++) {
        kvprim_slots_desc good = slots_in(m, form);
        EXPECT(slots, &good, KVPRIM_OK, "");
        BAD_SLOTS(form, d.pages = NULL, NULL, "kvprim_slots: pages is NULL");
        BAD_SLOTS(form, d.slot = NULL, NULL, "slot is NULL");
        BAD_SLOTS(form, d.reserved_pages = 1, ARGUMENT, "a reserved field is not 0");
        BAD_SLOTS(form, d.reserved_token = 1, ARGUMENT, "a reserved field is not 0");
        BAD_SLOTS(form, d.reserved_slot = 1, ARGUMENT, "a reserved field is not 0");
        BAD_SLOTS(form, d.page_starts = m->page_starts;
                  d.pages_stride = 4, ARGUMENT, "pages_stride is 4, but page_starts (");
        BAD_SLOTS(form, d.pages_type = (kvprim_index_type)0, ARGUMENT, "pages_type is 0, neither KVPRIM_I32");
        BAD_SLOTS(form, d.token_type = (kvprim_index_type)3, ARGUMENT, "token_type is 3");
        BAD_SLOTS(form, d.slot_type = (kvprim_index_type)3, ARGUMENT, "slot_type is 3");
#ifndef __cplusplus
        BAD_SLOTS(form, d.slot_type = (kvprim_index_type)KVPRIM_INT64, ARGUMENT, "slot_type is 23");
#endif
        BAD_SLOTS(form, d.count = -1, SIZE, "kvprim_slots: count is -1, less than 0");
        BAD_SLOTS(form, d.pages_stride = 3, SIZE, "pages_stride is 3, less than max_pages, 4");
        good.count = 0, good.pages = good.slot = NULL;
        EXPECT(slots, &good, KVPRIM_OK, "");
    }
    BAD_SLOTS(0, d.request = NULL, NULL, "request is NULL");
    BAD_SLOTS(0, d.position = NULL, NULL, "position is NULL");
    BAD_SLOTS(0, d.position = d.request = NULL, NULL, "request, position and cu_seqlens");
    BAD_SLOTS(0, d.cu_seqlens = m->cu, ARGUMENT, "both cu_seqlens");
    BAD_SLOTS(0, d.starts = m->starts, ARGUMENT, "starts (");
    BAD_SLOTS(1, d.cu_seqlens = NULL, ARGUMENT, "but cu_seqlens is NULL");
    BAD_SLOTS(1, d.request = m->request, ARGUMENT, "and request (");
    BAD_SLOTS(1, d.position = m->position, ARGUMENT, "and position (");
}

static void bad_slots_sizes(slots_memory *m)
{
    const int64_t most = INT64_MAX;
    BAD_SLOTS(0, d.requests = 0, SIZE, "requests is 0, less than 1");
    BAD_SLOTS(0, d.max_pages = -4, SIZE, "max_pages is -4, less than 1");
    BAD_SLOTS(0, d.page_rows = 0, SIZE, "page_rows is 0, less than 1");
    BAD_SLOTS(0, d.rows = 0, SIZE, "rows is 0, less than 1");
    BAD_SLOTS(0, d.pages_stride = -8, SIZE, "pages_stride is -8, less than max_pages, 4");
    BAD_SLOTS(0, d.requests = most, SIZE, "requests is 9223372036854775807, which makes pages larger than");
    BAD_SLOTS(0, d.max_pages = most, SIZE, "max_pages is 9223372036854775807, which makes pages larger");
    BAD_SLOTS(0, d.pages_stride = most, SIZE, "pages_stride is 9223372036854775807, which makes pages larger");
    BAD_SLOTS(1, d.requests = 1;
              d.max_pages = most, SIZE, "max_pages is 9223372036854775807, which makes pages larger");
    BAD_SLOTS(0, d.count = most, SIZE, "count is 9223372036854775807, which makes slot larger than");
    BAD_SLOTS(1, d.requests = most; d.max_pages = 1, SIZE, "requests is");
    BAD_SLOTS(0, d.slot_type = KVPRIM_I32;
              d.rows = ((int64_t)1 << 31) + 1, SIZE, "rows is 2147483649, more than int32 slots can name, 2147483648");
    kvprim_slots_desc good = slots_in(m, 0), resolved;
    good.slot_type = KVPRIM_I32, good.rows = (int64_t)1 << 31;
    CHECK(kvprim_slots_check(&good, &resolved) == KVPRIM_OK && resolved.pages_stride == 4);
    good.pages_stride = 9;
    CHECK(kvprim_slots_check(&good, &resolved) == KVPRIM_OK && resolved.pages_stride == 9);
}

static void bad_slots_places(slots_memory *m)
{
    BAD_SLOTS(0, d.pages = plus(m->pages, 2), ARGUMENT, "is not aligned to");
    BAD_SLOTS(0, d.request = plus(m->request, 1), ARGUMENT, "kvprim_slots: request (");
    BAD_SLOTS(0, d.position = plus(m->position, 2), ARGUMENT, "position (");
    BAD_SLOTS(1, d.cu_seqlens = plus(m->cu, 1), ARGUMENT, "cu_seqlens (");
    BAD_SLOTS(1, d.starts = plus(m->starts, 2), ARGUMENT, "starts (");
    BAD_SLOTS(0, d.slot = plus(m->slot, 2), ARGUMENT, "slot (");
    BAD_SLOTS(0, d.page_starts = plus(m->page_starts, 2), ARGUMENT, "page_starts (");
    BAD_SLOTS(1, d.page_starts = m->page_starts; d.slot = m->page_starts + 3, OVERLAP, "overlaps page_starts (");
    BAD_SLOTS(1, d.page_starts = m->page_starts; d.slot = m->pages + 3, OVERLAP, "32 bytes)"); /* max_pages numbers */
    BAD_SLOTS(0, d.rejected = counter_at(m->rejected, 2), ARGUMENT, "rejected (");
    BAD_SLOTS(0, d.slot = m->position, OVERLAP, "overlaps position (");
    BAD_SLOTS(0, d.slot = m->request + 7, OVERLAP, "overlaps request (");
    BAD_SLOTS(0, d.slot = m->pages + 11, OVERLAP, "64 bytes) overlaps pages (");
    BAD_SLOTS(0, d.slot = m->pages + 20; d.pages_stride = 9, OVERLAP, "176 bytes)"); /* 2 * 9 + 4 numbers */
    BAD_SLOTS(1, d.slot = m->cu + 3, OVERLAP, "overlaps cu_seqlens (");
    BAD_SLOTS(1, d.slot = m->starts + 2, OVERLAP, "24 bytes)");
    BAD_SLOTS(0, d.slot = m->rejected, OVERLAP, "overlaps rejected (");
    BAD_SLOTS(0, d.rejected = counter_at(m->position, 60), OVERLAP, "rejected (");
    BAD_SLOTS(1, d.rejected = counter_at(m->pages, 92), OVERLAP, "overlaps pages (");
    kvprim_slots_desc d = slots_in(m, 0);
    d.slot = m->pages + 12; /* right after the table */
    EXPECT(slots, &d, KVPRIM_OK, "");
    d.page_starts = m->cu; /* of which there are 4 */
    EXPECT(slots, &d, KVPRIM_OK, "");
    d.page_starts = NULL;
    d.request = d.position; /* inputs may be one */
    EXPECT(slots, &d, KVPRIM_OK, "");
}

static void bad_slots(void)
{
    THREAD_MEMORY slots_memory m;
    bad_slots_fields(&m);
    bad_slots_sizes(&m);
    bad_slots_places(&m);
}

static void bad_fetches(void)
{
    enum { n = 2, top_k = 4, fresh = 1, entries = 5, hot = 6, tokens = 20, bytes = 16 };
    THREAD_MEMORY unsigned char memory[4096], k_hot[n * hot * bytes], v_hot[n * hot * bytes], want[4096];
    THREAD_MEMORY unsigned char k[tokens * bytes], v[tokens * bytes];
    THREAD_MEMORY int32_t state[n], wanted[n * top_k], fresh_tokens[n], rows[n * top_k], fresh_rows[n];
    THREAD_MEMORY int32_t plan_src[n * entries], plan_dst[n * entries], pages[n * tokens];
    THREAD_MEMORY uint32_t hits[3];
    kvprim_format format;
    kvprim_fetch_desc d, good;
    memset(&good, 0, sizeof good), memset(&format, 0, sizeof format), format.dtype = KVPRIM_U8;
    good.set.memory = memory, good.set.bytes = sizeof memory, good.set.states = n, good.set.hot_rows = hot;
    good.set.tokens = tokens, good.set.entries = entries;
    good.count = n, good.state = state, good.wanted = wanted, good.top_k = top_k, good.rows = rows;
    good.state_type = good.wanted_type = good.pages_type = KVPRIM_I32;
    good.fresh = fresh_tokens, good.fresh_count = fresh, good.fresh_rows = fresh_rows;
    good.pages = pages, good.max_pages = tokens, good.page_rows = 1;
    good.k_hot = table_of(k_hot, n * hot), good.v_hot = table_of(v_hot, n * hot);
    good.k = table_of(k, tokens), good.v = table_of(v, tokens), good.k_bytes = good.v_bytes = bytes;
    good.plan_src = plan_src, good.plan_dst = plan_dst;
    good.hits = hits, good.misses = hits + 1, good.rejected = hits + 2;
    fill(memory, sizeof memory);
    memcpy(want, memory, sizeof memory);
    EXPECT(fetch, NULL, KVPRIM_ERROR_NULL, "kvprim_fetch: desc is NULL");
    BAD(fetch, count = -1, SIZE, "kvprim_fetch: count is -1, less than 0");
    BAD(fetch, count = 3, SIZE, "kvprim_fetch: count is 3, less than 0 or more than 2");
    BAD(fetch, set.memory = NULL, NULL, "kvprim_fetch: set.memory is NULL");
    BAD(fetch, set.memory = plus(memory, 8), ARGUMENT, "kvprim_fetch: set.memory (");
    BAD(fetch, set.bytes = 700, SIZE, "kvprim_fetch: set.bytes is 700, less than 816");
    BAD(fetch, set.states = 0, SIZE, "kvprim_fetch: set.states is 0, less than 1 or more than ");
    BAD(fetch, set.states = (int64_t)1 << 40, SIZE, "kvprim_fetch: set.states is 1099511627776, ");
    BAD(fetch, set.states = 1 << 20;
        d.set.hot_rows = 1 << 12, SIZE, "set.states is 1048576, less than 1 or more than ");
    BAD(fetch, set.hot_rows = 0, SIZE, "set.hot_rows is 0, less than 1");
    BAD(fetch, set.hot_rows = KVPRIM_MAX_HOT_ROWS + 1, SIZE, "hot_rows is 65537, ");
    BAD(fetch, set.tokens = 0, SIZE, "tokens is 0, less than 1");
    BAD(fetch, set.tokens = (int64_t)INT32_MAX + 1, SIZE, "tokens is 2147483648, ");
    BAD(fetch, set.entries = 0, SIZE, "entries is 0, less than 1");
    BAD(fetch, set.entries = KVPRIM_MAX_FETCH_ENTRIES + 1, SIZE, "entries is 32769, ");
    BAD(fetch, set.reserved = 1, ARGUMENT, "kvprim_fetch: set.reserved is 1, less than 0 or more than 0");
    BAD(fetch, state = NULL, NULL, "kvprim_fetch: state is NULL");
    BAD(fetch, wanted = NULL, NULL, "kvprim_fetch: wanted is NULL");
    BAD(fetch, rows = NULL, NULL, "kvprim_fetch: rows is NULL");
    BAD(fetch, fresh = NULL, NULL, "kvprim_fetch: fresh is NULL");
    BAD(fetch, fresh_rows = NULL, NULL, "kvprim_fetch: fresh_rows is NULL");
    BAD(fetch, plan_src = NULL, NULL, "kvprim_fetch: plan_src is NULL");
    BAD(fetch, plan_dst = NULL, NULL, "kvprim_fetch: plan_dst is NULL");
    BAD(fetch, steps = -1, SIZE, "kvprim_fetch: steps is -1");
    BAD(fetch, steps = 2, SIZE, "kvprim_fetch: top_k is 4, less than 1 or more than 2");
    BAD(fetch, steps = INT32_MAX, SIZE, "kvprim_fetch: steps is 2147483647");
    BAD(fetch, top_k = 0, SIZE, "kvprim_fetch: top_k is 0");
    BAD(fetch, top_k = 5, SIZE, "kvprim_fetch: top_k is 5");
    BAD(fetch, fresh_count = -1, SIZE, "kvprim_fetch: fresh_count is -1");
    BAD(fetch, fresh_count = INT64_MIN, SIZE, "kvprim_fetch: fresh_count is -9223372036854775808");
    BAD(fetch, fresh_count = 6, SIZE, "kvprim_fetch: fresh_count is 6");
    BAD(fetch, wanted_stride = 3, SIZE, "kvprim_fetch: wanted_stride is 3, less than 4");
    BAD(fetch, wanted_stride = INT64_MAX, SIZE,
        "kvprim_fetch: wanted_stride is 9223372036854775807, which makes wanted");
    BAD(fetch, fresh_stride = -1, SIZE, "kvprim_fetch: fresh_stride is -1");
    BAD(fetch, pages_stride = tokens - 1, SIZE, "kvprim_fetch: pages_stride is 19");
    BAD(fetch, max_pages = 0, SIZE, "kvprim_fetch: max_pages is 0");
    BAD(fetch, page_rows = 0, SIZE, "kvprim_fetch: page_rows is 0");
    BAD(fetch, pages = NULL, SIZE, "kvprim_fetch: max_pages is 20, less than 0 or more than 0");
    BAD(fetch, max_pages = INT64_MAX, SIZE, "kvprim_fetch: max_pages is 9223372036854775807");
    BAD(fetch, pages = NULL; d.max_pages = 0; d.page_rows = 0;
        d.pages_stride = 7, SIZE, "pages_stride is 7, less than 0 or more than 0");
    BAD(fetch, pages_by_state = 2, ARGUMENT, "kvprim_fetch: pages_by_state is 2");
    BAD(fetch, pages = NULL; d.max_pages = 0; d.page_rows = 0; d.pages_stride = 0;
        d.pages_by_state = 1, SIZE, "pages_by_state is 1, less than 0 or more than 0");
    BAD(fetch, state_type = (kvprim_index_type)0, ARGUMENT, "kvprim_fetch: state_type is 0");
    BAD(fetch, wanted_type = (kvprim_index_type)3, ARGUMENT, "kvprim_fetch: wanted_type is 3");
    BAD(fetch, pages_type = (kvprim_index_type)0, ARGUMENT, "kvprim_fetch: pages_type is 0");
    BAD(fetch, reserved = 1, ARGUMENT, "kvprim_fetch: reserved is 1");
    BAD(fetch, reserved_steps = 1, ARGUMENT, "kvprim_fetch: reserved_steps is 1");
    BAD(fetch, host_rows = -1, SIZE, "kvprim_fetch: host_rows is -1");
    BAD(fetch, host_rows = tokens + 1, SIZE, "kvprim_fetch: k.rows is 20, less than host_rows, 21");
    BAD(fetch, v.rows = tokens - 1, SIZE, "kvprim_fetch: v.rows is 19, less than host_rows, 20");
    BAD(fetch, k_hot.rows = n * hot - 1, SIZE,
        "kvprim_fetch: k_hot.rows is 11, less than set.states * set.hot_rows, 12");
    BAD(fetch, v_hot.rows = 0, SIZE, "kvprim_fetch: v_hot.rows is 0");
    BAD(fetch, k_bytes = 0, SIZE, "kvprim_fetch: k_bytes is 0");
    BAD(fetch, v_bytes = -1, SIZE, "kvprim_fetch: v_bytes is -1");
    BAD(fetch, k_hot.stride = bytes - 1, SIZE, "kvprim_fetch: k_hot.stride is 15");
    BAD(fetch, k.bytes = tokens * bytes - 1, SIZE, "kvprim_fetch: k.bytes is 319");
    BAD(fetch, k.data = NULL, NULL, "kvprim_fetch: k.data is NULL");
    BAD(fetch, k.format = &format, ARGUMENT, "kvprim_fetch: k.format is set");
    BAD(fetch, v_hot.format = &format, ARGUMENT, "kvprim_fetch: v_hot.format is set");
    BAD(fetch, k = table_of(NULL, 0); d.k_hot = d.k; d.k_bytes = 0, NULL, "but k_hot.data is NULL");
    BAD(fetch, k_hot.data = k, OVERLAP, "kvprim_fetch: k_hot (");
    BAD(fetch, v_hot.data = k_hot + bytes, OVERLAP, "v_hot (");
    BAD(fetch, k_hot.data = plus(memory, -1), OVERLAP, "k_hot (");
    BAD(fetch, wanted = memory + 64, OVERLAP, "kvprim_fetch: ");
    BAD(fetch, state = rows, OVERLAP, "rows (");
    BAD(fetch, rows = wanted, OVERLAP, "rows (");
    BAD(fetch, fresh_rows = rows + 7, OVERLAP, "fresh_rows (");
    BAD(fetch, plan_src = pages, OVERLAP, "plan_src (");
    BAD(fetch, plan_dst = plan_src + 9, OVERLAP, "plan_dst (");
    BAD(fetch, misses = hits, OVERLAP, "misses (");
    BAD(fetch, rejected = counter_at(v, 16), OVERLAP, "rejected (");
    BAD(fetch, hits = counter_at(hits, 2), ARGUMENT, "hits (");
    BAD(fetch, wanted = plus(wanted, 2), ARGUMENT, "wanted (");
    d = good;
    CHECK(memcmp(memory, want, sizeof memory) == 0);
    d.count = 0, d.set.states = -5, d.reserved = 1;
    EXPECT(fetch, &d, KVPRIM_OK, "");
    d = good; /* a plan alone */
    d.k = d.v = d.k_hot = d.v_hot = table_of(NULL, 0), d.k_bytes = d.v_bytes = 0;
    EXPECT(fetch, &d, KVPRIM_ERROR_SIZE, "kvprim_fetch: host_rows is 0");
    d = good;
    CHECK(kvprim_fetch_state_bytes(&d.set) > 0 && kvprim_fetch_state_bytes(NULL) == 0);
    d.set.hot_rows = 0;
    CHECK(kvprim_fetch_state_bytes(&d.set) == 0);
    CHECK_ERROR(kvprim_fetch_reset(&d.set, 0), KVPRIM_ERROR_SIZE, "kvprim_fetch_reset: set.hot_rows is 0");
    CHECK_ERROR(kvprim_fetch_reset(NULL, 0), KVPRIM_ERROR_NULL, "kvprim_fetch_reset: set is NULL");
    CHECK_ERROR(kvprim_fetch_reset(&good.set, n), KVPRIM_ERROR_SIZE, "kvprim_fetch_reset: state is 2, ");
    CHECK_ERROR(kvprim_fetch_reset(&good.set, -2), KVPRIM_ERROR_SIZE, "kvprim_fetch_reset: state is -2, ");
    CHECK(memcmp(memory, want, sizeof memory) == 0);
}

/* For run(). */
static const struct bad_list {
    const char *name;
    void (*run)(void);
} bad_lists[] = {{"what gathers, stores and transfers have in common", bad_operands},
                 {"gather", bad_gathers},
                 {"store", bad_stores},
                 {"transfer", bad_transfers},
                 {"transfer, layers that the executing side reads", bad_device_layers},
                 {"slots", bad_slots},
                 {"unpack", bad_unpacks},
                 {"unpack_meta", bad_metas},
                 {"copy", bad_copies},
                 {"fetch", bad_fetches}};
enum { n_bad_lists = sizeof bad_lists / sizeof *bad_lists };

#undef BAD
#undef BAD_SLOTS
#undef EXPECTS
#undef THREAD_MEMORY

#endif /* BAD_DESCRIPTORS_H */

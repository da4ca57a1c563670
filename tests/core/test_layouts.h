/* SPDX-License-Identifier: MIT */
/* The caches of engines, each written as an array of C and as kvprim's tables. A layout is a struct: what it holds moves
   one way (into a cache, or out of the GPU) and back, and all of its bytes are compared with what array subscripts
   alone make of them. C11 and C++; test_kvprim.c runs them on the CPU, tests/gpu/test_layouts.h on the GPU. */
#ifndef TEST_LAYOUTS_H
#define TEST_LAYOUTS_H

#include "../harness.h"

enum {
    LAYOUT_COUNT = 40,  /* rows of a call */
    LAYOUT_SLOTS = 112, /* of a GPU's cache, 7 pages */
    LAYOUT_HOST = 160,  /* of a host's cache, 10 pages */
    LAYOUT_PAGE = 16,   /* slots of a page, except where it says otherwise */
    LAYOUT_HEADS = 4,
    LAYOUT_DIM = 32, /* bytes of a head */
    LAYOUT_ROW = LAYOUT_HEADS * LAYOUT_DIM,
    LAYOUT_LAYERS = 3,
    LAYOUT_MOST_LAYERS = 2 * LAYOUT_LAYERS,
    LAYOUT_MOST_BYTES = 2 << 20
};

/* The beginning of each layout. Some numbers are padding, some past the tables' ends; the others are distinct. */
typedef struct layout_names {
    int32_t slot[LAYOUT_COUNT]; /* slots or pages of the cache */
    int64_t host[LAYOUT_COUNT]; /* ... of the other cache, if there are two */
    uint32_t rejected, reserved[3];
} layout_names;

/* One way to run a layout: `at` is the layout's memory as the side that runs it sees it. The arrays of layers are host
   memory. */
typedef struct layout_call {
    void *at;
    int back; /* 1: out of the cache, or to the GPU */
    void *cache_layers[LAYOUT_MOST_LAYERS], *host_layers[LAYOUT_MOST_LAYERS];
    kvprim_move moves[4];
    size_t n;
} layout_call;

typedef struct layout_case {
    const char *name;
    size_t bytes;
    int slots, host, count;                 /* bounds of names.slot and names.host; rows of a call */
    void (*describe)(layout_call *c);       /* by kvprim's tables */
    void (*expect)(void *memory, int back); /* by subscripts */
} layout_case;

/* ---- descriptors ---- */

static inline kvprim_table layout_table(void *data, int64_t rows, int64_t stride, int64_t page_rows,
                                        int64_t page_stride)
{
    kvprim_table t = paged_table(data, rows, page_rows, page_stride);
    t.stride = stride;
    return t;
}

static inline kvprim_table layout_heads(kvprim_table t, int32_t heads, int64_t head_stride)
{
    t.heads = heads;
    t.head_stride = head_stride;
    return t;
}

static inline void layout_add(layout_call *c, kvprim_status status, size_t moves)
{
    if (status != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    c->n += status == KVPRIM_OK ? moves : 0;
}

/* One side of K or of V: cache, input and bytes of a row. */
typedef struct layout_part {
    kvprim_table cache, rows;
    int64_t bytes;
} layout_part;

/* A store of K and V, or, back, a gather of each. Slots past the cache count once. */
static inline void layout_store(layout_call *c, const layout_part *k, const layout_part *v)
{
    layout_names *const names = (layout_names *)c->at;
    kvprim_store_desc s;
    kvprim_gather_desc g;
    memset(&s, 0, sizeof s);
    memset(&g, 0, sizeof g);
    s.k_cache = k->cache, s.v_cache = v->cache, s.k = k->rows, s.v = v->rows;
    s.k_bytes = k->bytes, s.v_bytes = v->bytes;
    s.slot = g.index = names->slot, s.slot_type = g.index_type = KVPRIM_I32;
    s.count = g.count = LAYOUT_COUNT, s.rejected = g.rejected = &names->rejected;
    if (!c->back) {
        layout_add(c, kvprim_store_moves(&s, c->moves), 2);
        return;
    }
    g.src = k->cache, g.dst = k->rows, g.row_bytes = k->bytes;
    layout_add(c, kvprim_gather_moves(&g, c->moves), 1);
    g.src = v->cache, g.dst = v->rows, g.row_bytes = v->bytes, g.rejected = NULL;
    layout_add(c, kvprim_gather_moves(&g, c->moves + 1), 1);
}

/* Adds a transfer between a cache that names.slot names and one that names.host names. */
static inline void layout_transfer(layout_call *c, kvprim_transfer_desc d, int64_t count)
{
    layout_names *const names = (layout_names *)c->at;
    d.src_index = names->slot, d.src_index_type = KVPRIM_I32;
    d.dst_index = names->host, d.dst_index_type = KVPRIM_I64;
    d.count = count, d.rejected = c->n == 0 ? &names->rejected : NULL;
    if (c->back) {
        const kvprim_transfer_desc there = d;
        d.src = there.dst, d.src_layers = there.dst_layers, d.src_layer_stride = there.dst_layer_stride;
        d.dst = there.src, d.dst_layers = there.src_layers, d.dst_layer_stride = there.src_layer_stride;
        d.src_index = there.dst_index, d.src_index_type = there.dst_index_type;
        d.dst_index = there.src_index, d.dst_index_type = there.src_index_type;
    }
    layout_add(c, kvprim_transfer_moves(&d, c->moves + c->n), 1);
}

static inline kvprim_transfer_desc layout_transfer_of(kvprim_table cache, kvprim_table host, int64_t row_bytes,
                                                      int32_t layers)
{
    kvprim_transfer_desc d;
    memset(&d, 0, sizeof d);
    d.src = cache, d.dst = host, d.row_bytes = row_bytes, d.layers = layers;
    return d;
}

/* ---- what must come out ---- */

/* The cache's side of a row or a part of one, and the other side, which may have no row. */
static inline void layout_move(uint8_t *cache, uint8_t *other, size_t bytes, int back)
{
    if (back)
        memcpy(cache, other, bytes);
    else
        memcpy(other, cache, bytes);
}

/* For a store, whose rows go into the cache; back, rows without a slot become zeros. */
static inline void layout_put(uint8_t *cache, uint8_t *row, size_t bytes, int back)
{
    if (cache)
        layout_move(cache, row, bytes, !back);
    else if (back)
        memset(row, 0, bytes);
}

/* The slot of token i, or -1. */
static inline int layout_slot(layout_names *names, int i, int slots)
{
    const int32_t slot = names->slot[i];
    names->rejected += slot >= slots;
    return slot < 0 || slot >= slots ? -1 : (int)slot;
}

/* Whether row i of a transfer moves. */
static inline int layout_moves(layout_names *names, int i, int slots, int host)
{
    const int past = names->slot[i] >= slots || names->host[i] >= host;
    names->rejected += (uint32_t)past;
    return !past && names->slot[i] >= 0 && names->host[i] >= 0;
}

/* Heads of K and V of all layers, of rows `slot` and `host`: where head h lies on both sides. */
#define LAYOUT_EXPECT(name, on_gpu, on_host)                                                                           \
    static void layout_##name##_expect(void *memory, int back)                                                         \
    {                                                                                                                  \
        layout_##name *const m = (layout_##name *)memory;                                                              \
        for (int i = 0; i < LAYOUT_COUNT; i++) {                                                                       \
            const int64_t slot = m->names.slot[i], host = m->names.host[i];                                            \
            if (!layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))                                                \
                continue;                                                                                              \
            for (int kv = 0; kv < 2; kv++)                                                                             \
                for (int l = 0; l < LAYOUT_LAYERS; l++)                                                                \
                    for (int h = 0; h < LAYOUT_HEADS; h++)                                                             \
                        layout_move(on_gpu, on_host, LAYOUT_DIM, back);                                                \
        }                                                                                                              \
    }

/* ---- MLA: the latent vector and its rotary part come apart and lie together ---- */

typedef struct layout_mla {
    layout_names names;
    uint8_t cache[LAYOUT_SLOTS][2 * (512 + 64)], kv_c[LAYOUT_COUNT][2 * 512], k_pe[LAYOUT_COUNT][2 * 64];
} layout_mla;

static void layout_mla_tables(layout_call *c)
{
    layout_mla *const m = (layout_mla *)c->at;
    const int64_t row = sizeof m->cache[0];
    const layout_part k = {strided_table(m->cache, LAYOUT_SLOTS, row), table_of(m->kv_c, LAYOUT_COUNT), 2 * 512},
                      v = {strided_table(&m->cache[0][2 * 512], LAYOUT_SLOTS, row), table_of(m->k_pe, LAYOUT_COUNT),
                           2 * 64};
    layout_store(c, &k, &v);
}

static void layout_mla_expect(void *memory, int back)
{
    layout_mla *const m = (layout_mla *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, LAYOUT_SLOTS);
        layout_put(s < 0 ? NULL : m->cache[s], m->kv_c[i], 2 * 512, back);
        layout_put(s < 0 ? NULL : m->cache[s] + 2 * 512, m->k_pe[i], 2 * 64, back);
    }
}

/* ---- FlashInfer: K and V of a page together ---- */

typedef struct layout_nhd {
    layout_names names;
    uint8_t cache[LAYOUT_SLOTS / LAYOUT_PAGE][2][LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_DIM];
    uint8_t kv[2][LAYOUT_COUNT][LAYOUT_HEADS][LAYOUT_DIM];
} layout_nhd;

static void layout_nhd_tables(layout_call *c)
{
    layout_nhd *const m = (layout_nhd *)c->at;
    const int64_t page = sizeof m->cache[0];
    const layout_part k = {paged_table(m->cache[0][0], LAYOUT_SLOTS, LAYOUT_PAGE, page),
                           table_of(m->kv[0], LAYOUT_COUNT), LAYOUT_ROW},
                      v = {paged_table(m->cache[0][1], LAYOUT_SLOTS, LAYOUT_PAGE, page),
                           table_of(m->kv[1], LAYOUT_COUNT), LAYOUT_ROW};
    layout_store(c, &k, &v);
}

static void layout_nhd_expect(void *memory, int back)
{
    layout_nhd *const m = (layout_nhd *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, LAYOUT_SLOTS);
        for (int kv = 0; kv < 2; kv++)
            layout_put(s < 0 ? NULL : m->cache[s / LAYOUT_PAGE][kv][s % LAYOUT_PAGE][0], m->kv[kv][i][0], LAYOUT_ROW,
                       back);
    }
}

typedef struct layout_hnd {
    layout_names names;
    uint8_t cache[LAYOUT_SLOTS / LAYOUT_PAGE][2][LAYOUT_HEADS][LAYOUT_PAGE][LAYOUT_DIM];
    uint8_t kv[2][LAYOUT_COUNT][LAYOUT_HEADS][LAYOUT_DIM];
} layout_hnd;

static void layout_hnd_tables(layout_call *c)
{
    layout_hnd *const m = (layout_hnd *)c->at;
    const int64_t page = sizeof m->cache[0], head = sizeof m->cache[0][0][0];
    layout_part part[2];
    for (int kv = 0; kv < 2; kv++) {
        const kvprim_table pages = paged_table(m->cache[0][kv], LAYOUT_SLOTS, LAYOUT_PAGE, page);
        part[kv].cache = layout_heads(pages, LAYOUT_HEADS, head);
        part[kv].rows = table_of(m->kv[kv], LAYOUT_COUNT), part[kv].bytes = LAYOUT_ROW;
    }
    layout_store(c, &part[0], &part[1]);
}

static void layout_hnd_expect(void *memory, int back)
{
    layout_hnd *const m = (layout_hnd *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, LAYOUT_SLOTS);
        for (int kv = 0; kv < 2; kv++)
            for (int h = 0; h < LAYOUT_HEADS; h++)
                layout_put(s < 0 ? NULL : m->cache[s / LAYOUT_PAGE][kv][h][s % LAYOUT_PAGE], m->kv[kv][i][h],
                           LAYOUT_DIM, back);
    }
}

/* ---- vLLM's first layout: 16 bytes of K at a time, V by the element ---- */

enum { LAYOUT_X = 8, LAYOUT_ELEMENTS = LAYOUT_DIM / 2 }; /* of 2 bytes */

typedef struct layout_x {
    layout_names names;
    uint8_t k_cache[LAYOUT_SLOTS / LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_ELEMENTS / LAYOUT_X][LAYOUT_PAGE][LAYOUT_X][2];
    uint8_t v_cache[LAYOUT_SLOTS / LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_ELEMENTS][LAYOUT_PAGE][2];
    uint8_t k[LAYOUT_COUNT][LAYOUT_HEADS][LAYOUT_ELEMENTS][2], v[LAYOUT_COUNT][LAYOUT_HEADS][LAYOUT_ELEMENTS][2];
} layout_x;

static void layout_x_tables(layout_call *c)
{
    layout_x *const m = (layout_x *)c->at;
    const kvprim_table k_pages = paged_table(m->k_cache, LAYOUT_SLOTS, LAYOUT_PAGE, 0),
                       v_pages = paged_table(m->v_cache, LAYOUT_SLOTS, LAYOUT_PAGE, 0);
    const layout_part k = {layout_heads(k_pages, LAYOUT_HEADS * LAYOUT_ELEMENTS / LAYOUT_X, LAYOUT_PAGE * LAYOUT_X * 2),
                           table_of(m->k, LAYOUT_COUNT), LAYOUT_ROW},
                      v = {layout_heads(v_pages, LAYOUT_HEADS * LAYOUT_ELEMENTS, LAYOUT_PAGE * 2),
                           table_of(m->v, LAYOUT_COUNT), LAYOUT_ROW};
    layout_store(c, &k, &v);
}

static void layout_x_expect(void *memory, int back)
{
    layout_x *const m = (layout_x *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, LAYOUT_SLOTS), page = s / LAYOUT_PAGE, row = s % LAYOUT_PAGE;
        for (int h = 0; h < LAYOUT_HEADS; h++)
            for (int e = 0; e < LAYOUT_ELEMENTS; e++) {
                layout_put(s < 0 ? NULL : m->k_cache[page][h][e / LAYOUT_X][row][e % LAYOUT_X], m->k[i][h][e], 2, back);
                layout_put(s < 0 ? NULL : m->v_cache[page][h][e][row], m->v[i][h][e], 2, back);
            }
    }
}

/* ---- pages that end with scales ---- */

/* DeepSeek-V4: 64 rows of 448 fp8 and 64 bf16, then their scales; a page is a multiple of 576 bytes. */
typedef struct layout_v4_page {
    uint8_t values[64][576], scales[64][8], padding[64];
} layout_v4_page;

typedef struct layout_v4 {
    layout_names names;
    layout_v4_page cache[3];
    uint8_t rows[LAYOUT_COUNT][576 + 8];
} layout_v4;

static void layout_v4_tables(layout_call *c)
{
    layout_v4 *const m = (layout_v4 *)c->at;
    const int64_t page = sizeof(layout_v4_page), row = sizeof m->rows[0];
    const layout_part values = {paged_table(m->cache[0].values, 3 * 64, 64, page),
                                strided_table(m->rows, LAYOUT_COUNT, row), 576},
                      scales = {paged_table(m->cache[0].scales, 3 * 64, 64, page),
                                strided_table(&m->rows[0][576], LAYOUT_COUNT, row), 8};
    layout_store(c, &values, &scales);
}

static void layout_v4_expect(void *memory, int back)
{
    layout_v4 *const m = (layout_v4 *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, 3 * 64);
        layout_put(s < 0 ? NULL : m->cache[s / 64].values[s % 64], m->rows[i], 576, back);
        layout_put(s < 0 ? NULL : m->cache[s / 64].scales[s % 64], m->rows[i] + 576, 8, back);
    }
}

/* The indexer's keys: 64 rows of 128 fp8, then a float each. */
typedef struct layout_indexer_page {
    uint8_t keys[64][128], scales[64][4];
} layout_indexer_page;

typedef struct layout_indexer {
    layout_names names;
    layout_indexer_page cache[3];
    uint8_t keys[LAYOUT_COUNT][128], scales[LAYOUT_COUNT][4];
} layout_indexer;

static void layout_indexer_tables(layout_call *c)
{
    layout_indexer *const m = (layout_indexer *)c->at;
    const int64_t page = sizeof(layout_indexer_page);
    const layout_part keys = {paged_table(m->cache[0].keys, 3 * 64, 64, page), table_of(m->keys, LAYOUT_COUNT), 128},
                      scales = {paged_table(m->cache[0].scales, 3 * 64, 64, page), table_of(m->scales, LAYOUT_COUNT),
                                4};
    layout_store(c, &keys, &scales);
}

static void layout_indexer_expect(void *memory, int back)
{
    layout_indexer *const m = (layout_indexer *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, 3 * 64);
        layout_put(s < 0 ? NULL : m->cache[s / 64].keys[s % 64], m->keys[i], 128, back);
        layout_put(s < 0 ? NULL : m->cache[s / 64].scales[s % 64], m->scales[i], 4, back);
    }
}

/* ---- heads of 192 elements in K and of 128 in V ---- */

typedef struct layout_wide {
    layout_names names;
    uint8_t k_cache[LAYOUT_SLOTS / LAYOUT_PAGE][2][LAYOUT_PAGE][192][2];
    uint8_t v_cache[LAYOUT_SLOTS / LAYOUT_PAGE][2][LAYOUT_PAGE][128][2];
    uint8_t k[LAYOUT_COUNT][2][192][2], v[LAYOUT_COUNT][2][128][2];
} layout_wide;

static void layout_wide_tables(layout_call *c)
{
    layout_wide *const m = (layout_wide *)c->at;
    const kvprim_table k_pages = paged_table(m->k_cache, LAYOUT_SLOTS, LAYOUT_PAGE, 0),
                       v_pages = paged_table(m->v_cache, LAYOUT_SLOTS, LAYOUT_PAGE, 0);
    const layout_part k = {layout_heads(k_pages, 2, LAYOUT_PAGE * 192 * 2), table_of(m->k, LAYOUT_COUNT), 2 * 192 * 2},
                      v = {layout_heads(v_pages, 2, LAYOUT_PAGE * 128 * 2), table_of(m->v, LAYOUT_COUNT), 2 * 128 * 2};
    layout_store(c, &k, &v);
}

static void layout_wide_expect(void *memory, int back)
{
    layout_wide *const m = (layout_wide *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int s = layout_slot(&m->names, i, LAYOUT_SLOTS), page = s / LAYOUT_PAGE, row = s % LAYOUT_PAGE;
        for (int h = 0; h < 2; h++) {
            layout_put(s < 0 ? NULL : m->k_cache[page][h][row][0], m->k[i][h][0], 192 * 2, back);
            layout_put(s < 0 ? NULL : m->v_cache[page][h][row][0], m->v[i][h][0], 128 * 2, back);
        }
    }
}

/* ---- SGLang's HiCache: the GPU's memory is [layer][slot][head][dim], K and V apart; the host's is one of these ---- */

typedef uint8_t layout_layer[LAYOUT_SLOTS][LAYOUT_HEADS][LAYOUT_DIM];

typedef struct layout_page_first {
    layout_names names;
    layout_layer gpu[2][LAYOUT_LAYERS];
    uint8_t host[2][LAYOUT_HOST][LAYOUT_LAYERS][LAYOUT_HEADS][LAYOUT_DIM];
} layout_page_first;

static void layout_page_first_tables(layout_call *c)
{
    layout_page_first *const m = (layout_page_first *)c->at;
    kvprim_transfer_desc d =
        layout_transfer_of(table_of(NULL, LAYOUT_SLOTS), strided_table(NULL, LAYOUT_HOST, LAYOUT_LAYERS * LAYOUT_ROW),
                           LAYOUT_ROW, 2 * LAYOUT_LAYERS);
    for (int l = 0; l < 2 * LAYOUT_LAYERS; l++) {
        c->cache_layers[l] = m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS];
        c->host_layers[l] = m->host[l / LAYOUT_LAYERS][0][l % LAYOUT_LAYERS];
    }
    d.src_layers = c->cache_layers, d.dst_layers = c->host_layers;
    layout_transfer(c, d, LAYOUT_COUNT);
}

static void layout_page_first_expect(void *memory, int back)
{
    layout_page_first *const m = (layout_page_first *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++)
        if (layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            for (int l = 0; l < 2 * LAYOUT_LAYERS; l++)
                layout_move(m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS][m->names.slot[i]][0],
                            m->host[l / LAYOUT_LAYERS][m->names.host[i]][l % LAYOUT_LAYERS][0], LAYOUT_ROW, back);
}

/* page_first_direct: names are those of pages, each a row. */
typedef struct layout_page_direct {
    layout_names names;
    layout_layer gpu[2][LAYOUT_LAYERS];
    uint8_t host[2][LAYOUT_HOST / LAYOUT_PAGE][LAYOUT_LAYERS][LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_DIM];
} layout_page_direct;

enum { LAYOUT_PAGE_NAMES = 6 };

static void layout_page_direct_tables(layout_call *c)
{
    layout_page_direct *const m = (layout_page_direct *)c->at;
    kvprim_transfer_desc d = layout_transfer_of(table_of(NULL, LAYOUT_SLOTS / LAYOUT_PAGE),
                                                strided_table(NULL, LAYOUT_HOST / LAYOUT_PAGE, sizeof m->host[0][0]),
                                                LAYOUT_PAGE * LAYOUT_ROW, 2 * LAYOUT_LAYERS);
    for (int l = 0; l < 2 * LAYOUT_LAYERS; l++) {
        c->cache_layers[l] = m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS];
        c->host_layers[l] = m->host[l / LAYOUT_LAYERS][0][l % LAYOUT_LAYERS];
    }
    d.src_layers = c->cache_layers, d.dst_layers = c->host_layers;
    layout_transfer(c, d, LAYOUT_PAGE_NAMES);
}

static void layout_page_direct_expect(void *memory, int back)
{
    layout_page_direct *const m = (layout_page_direct *)memory;
    for (int i = 0; i < LAYOUT_PAGE_NAMES; i++)
        if (layout_moves(&m->names, i, LAYOUT_SLOTS / LAYOUT_PAGE, LAYOUT_HOST / LAYOUT_PAGE))
            for (int l = 0; l < 2 * LAYOUT_LAYERS; l++)
                for (int r = 0; r < LAYOUT_PAGE; r++)
                    layout_move(m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS][m->names.slot[i] * LAYOUT_PAGE + r][0],
                                m->host[l / LAYOUT_LAYERS][m->names.host[i]][l % LAYOUT_LAYERS][r][0], LAYOUT_ROW,
                                back);
}

typedef struct layout_page_head {
    layout_names names;
    layout_layer gpu[2][LAYOUT_LAYERS];
    uint8_t host[2][LAYOUT_HOST / LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_PAGE][LAYOUT_LAYERS][LAYOUT_DIM];
} layout_page_head;

static void layout_page_head_tables(layout_call *c)
{
    layout_page_head *const m = (layout_page_head *)c->at;
    const kvprim_table pages = layout_table(NULL, LAYOUT_HOST, LAYOUT_LAYERS * LAYOUT_DIM, LAYOUT_PAGE, 0);
    kvprim_transfer_desc d = layout_transfer_of(
        table_of(NULL, LAYOUT_SLOTS), layout_heads(pages, LAYOUT_HEADS, LAYOUT_PAGE * LAYOUT_LAYERS * LAYOUT_DIM),
        LAYOUT_ROW, 2 * LAYOUT_LAYERS);
    for (int l = 0; l < 2 * LAYOUT_LAYERS; l++) {
        c->cache_layers[l] = m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS];
        c->host_layers[l] = m->host[l / LAYOUT_LAYERS][0][0][0][l % LAYOUT_LAYERS];
    }
    d.src_layers = c->cache_layers, d.dst_layers = c->host_layers;
    layout_transfer(c, d, LAYOUT_COUNT);
}

LAYOUT_EXPECT(page_head, m->gpu[kv][l][slot][h], m->host[kv][host / LAYOUT_PAGE][h][host % LAYOUT_PAGE][l])

/* page_unified: K and V of each layer, and all layers of a group of heads, are one run of a page. */
enum { LAYOUT_GROUPS = 2, LAYOUT_IN_GROUP = LAYOUT_HEADS / LAYOUT_GROUPS };

typedef struct layout_unified {
    layout_names names;
    layout_layer gpu[2][LAYOUT_LAYERS];
    uint8_t host[LAYOUT_HOST / LAYOUT_PAGE][LAYOUT_GROUPS][LAYOUT_LAYERS][2][LAYOUT_PAGE][LAYOUT_IN_GROUP][LAYOUT_DIM];
} layout_unified;

static void layout_unified_tables(layout_call *c)
{
    layout_unified *const m = (layout_unified *)c->at;
    const int64_t page = sizeof m->host[0], group = sizeof m->host[0][0];
    const kvprim_table pages = layout_table(m->host, LAYOUT_HOST, LAYOUT_IN_GROUP * LAYOUT_DIM, LAYOUT_PAGE, page);
    kvprim_transfer_desc d = layout_transfer_of(table_of(NULL, LAYOUT_SLOTS), layout_heads(pages, LAYOUT_GROUPS, group),
                                                LAYOUT_ROW, 2 * LAYOUT_LAYERS);
    for (int l = 0; l < 2 * LAYOUT_LAYERS; l++)
        c->cache_layers[l] = m->gpu[l % 2][l / 2];
    d.src_layers = c->cache_layers, d.dst_layer_stride = LAYOUT_PAGE * LAYOUT_IN_GROUP * LAYOUT_DIM;
    layout_transfer(c, d, LAYOUT_COUNT);
}

LAYOUT_EXPECT(unified, m->gpu[kv][l][slot][h],
              m->host[host / LAYOUT_PAGE][h / LAYOUT_IN_GROUP][l][kv][host % LAYOUT_PAGE][h % LAYOUT_IN_GROUP])

/* MLA, page first. The layers of the GPU lie equally far apart, so they can be the pieces of one row: the host's row is
   then written from its first byte to its last. */
typedef struct layout_latent {
    layout_names names;
    uint8_t gpu[LAYOUT_LAYERS][LAYOUT_SLOTS][656], host[LAYOUT_HOST][LAYOUT_LAYERS][656];
} layout_latent;

static void layout_latent_tables(layout_call *c)
{
    layout_latent *const m = (layout_latent *)c->at;
    const kvprim_table gpu = layout_heads(strided_table(m->gpu, LAYOUT_SLOTS, 656), LAYOUT_LAYERS, sizeof m->gpu[0]);
    layout_transfer(c, layout_transfer_of(gpu, table_of(m->host, LAYOUT_HOST), LAYOUT_LAYERS * 656, 1), LAYOUT_COUNT);
}

static void layout_latent_expect(void *memory, int back)
{
    layout_latent *const m = (layout_latent *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++)
        if (layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            for (int l = 0; l < LAYOUT_LAYERS; l++)
                layout_move(m->gpu[l][m->names.slot[i]], m->host[m->names.host[i]][l], 656, back);
}

/* The same as rows of 656 bytes in two pools of layers, each with its pointers. */
typedef struct layout_pools {
    layout_names names;
    uint8_t gpu[2][LAYOUT_LAYERS][LAYOUT_SLOTS][656], host[2][LAYOUT_HOST][LAYOUT_LAYERS][656];
} layout_pools;

static void layout_some_pools_tables(layout_call *c, int32_t layers)
{
    layout_pools *const m = (layout_pools *)c->at;
    const kvprim_table gpu = table_of(NULL, LAYOUT_SLOTS), host = strided_table(NULL, LAYOUT_HOST, LAYOUT_LAYERS * 656);
    kvprim_transfer_desc d = layout_transfer_of(gpu, host, 656, layers);
    for (int l = 0; l < layers; l++) {
        c->cache_layers[l] = m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS];
        c->host_layers[l] = m->host[l / LAYOUT_LAYERS][0][l % LAYOUT_LAYERS];
    }
    d.src_layers = c->cache_layers, d.dst_layers = c->host_layers;
    layout_transfer(c, d, LAYOUT_COUNT);
}

static void layout_some_pools_expect(void *memory, int layers, int back)
{
    layout_pools *const m = (layout_pools *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++)
        if (layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            for (int l = 0; l < layers; l++)
                layout_move(m->gpu[l / LAYOUT_LAYERS][l % LAYOUT_LAYERS][m->names.slot[i]],
                            m->host[l / LAYOUT_LAYERS][m->names.host[i]][l % LAYOUT_LAYERS], 656, back);
}

static void layout_pools_tables(layout_call *c)
{
    layout_some_pools_tables(c, 2 * LAYOUT_LAYERS);
}

static void layout_pools_expect(void *memory, int back)
{
    layout_some_pools_expect(memory, 2 * LAYOUT_LAYERS, back);
}

/* The second pool is not moved whole. */
typedef layout_pools layout_uneven;

static void layout_uneven_tables(layout_call *c)
{
    layout_some_pools_tables(c, 2 * LAYOUT_LAYERS - 1);
}

static void layout_uneven_expect(void *memory, int back)
{
    layout_some_pools_expect(memory, 2 * LAYOUT_LAYERS - 1, back);
}

/* ---- other numbers of tensor-parallel ranks ---- */

/* Two ranks of four have two heads of each row, one rank of two has four, here head-major. */
typedef struct layout_slices {
    layout_names names;
    uint8_t whole[LAYOUT_LAYERS][LAYOUT_SLOTS / LAYOUT_PAGE][4][LAYOUT_PAGE][LAYOUT_DIM];
    uint8_t part[2][LAYOUT_LAYERS][LAYOUT_HOST][2][LAYOUT_DIM];
} layout_slices;

static void layout_slices_tables(layout_call *c)
{
    layout_slices *const m = (layout_slices *)c->at;
    const int64_t head = sizeof m->whole[0][0][0], page = sizeof m->whole[0][0];
    for (int rank = 0; rank < 2; rank++) {
        const kvprim_table pages = paged_table(m->whole[0][0][2 * rank], LAYOUT_SLOTS, LAYOUT_PAGE, page);
        kvprim_transfer_desc d = layout_transfer_of(layout_heads(pages, 2, head), table_of(m->part[rank], LAYOUT_HOST),
                                                    2 * LAYOUT_DIM, LAYOUT_LAYERS);
        d.src_layer_stride = sizeof m->whole[0];
        layout_transfer(c, d, LAYOUT_COUNT);
    }
}

static void layout_slices_expect(void *memory, int back)
{
    layout_slices *const m = (layout_slices *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int64_t slot = m->names.slot[i], host = m->names.host[i];
        if (!layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            continue;
        for (int l = 0; l < LAYOUT_LAYERS; l++)
            for (int h = 0; h < 4; h++)
                layout_move(m->whole[l][slot / LAYOUT_PAGE][h][slot % LAYOUT_PAGE], m->part[h / 2][l][host][h % 2],
                            LAYOUT_DIM, back);
    }
}

/* ---- two layouts by their names ---- */

typedef struct layout_named {
    layout_names names;
    uint8_t gpu[LAYOUT_SLOTS / LAYOUT_PAGE][LAYOUT_LAYERS][2][LAYOUT_HEADS][LAYOUT_PAGE][LAYOUT_DIM];
    uint8_t host[2][LAYOUT_HOST / LAYOUT_PAGE][LAYOUT_HEADS][LAYOUT_PAGE][LAYOUT_LAYERS][LAYOUT_DIM];
} layout_named;

static inline kvprim_layout layout_by_name(const char *name, void *data, int64_t rows)
{
    kvprim_layout_sizes z;
    kvprim_layout layout;
    memset(&z, 0, sizeof z), memset(&layout, 0, sizeof layout);
    z.data = data, z.rows = rows, z.page_rows = LAYOUT_PAGE, z.layers = LAYOUT_LAYERS, z.heads = LAYOUT_HEADS;
    z.k_bytes = z.v_bytes = LAYOUT_ROW;
    if (kvprim_layout_find(name, &z, &layout) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    return layout;
}

static void layout_named_tables(layout_call *c)
{
    layout_named *const m = (layout_named *)c->at;
    const kvprim_layout gpu = layout_by_name("trtllm", m->gpu, LAYOUT_SLOTS),
                        host = layout_by_name("sglang_page_head", m->host, LAYOUT_HOST);
    kvprim_transfer_desc k = layout_transfer_of(gpu.k_cache, host.k_cache, gpu.k_bytes, LAYOUT_LAYERS),
                         v = layout_transfer_of(gpu.v_cache, host.v_cache, gpu.v_bytes, LAYOUT_LAYERS);
    k.src_layer_stride = gpu.k_layer_stride, k.dst_layer_stride = host.k_layer_stride;
    v.src_layer_stride = gpu.v_layer_stride, v.dst_layer_stride = host.v_layer_stride;
    layout_transfer(c, k, LAYOUT_COUNT);
    layout_transfer(c, v, LAYOUT_COUNT);
}

LAYOUT_EXPECT(named, m->gpu[slot / LAYOUT_PAGE][l][kv][h][slot % LAYOUT_PAGE],
              m->host[kv][host / LAYOUT_PAGE][h][host % LAYOUT_PAGE][l])

/* ---- all of them ---- */

#define LAYOUT(name, slots, host, count)                                                                               \
    {                                                                                                                  \
#name, sizeof(layout_##name), slots, host, count, layout_##name##_tables, layout_##name##_expect               \
    }
static const layout_case layout_cases[] = {
    LAYOUT(mla, LAYOUT_SLOTS, 0, LAYOUT_COUNT),
    LAYOUT(nhd, LAYOUT_SLOTS, 0, LAYOUT_COUNT),
    LAYOUT(hnd, LAYOUT_SLOTS, 0, LAYOUT_COUNT),
    LAYOUT(x, LAYOUT_SLOTS, 0, LAYOUT_COUNT),
    LAYOUT(v4, 3 * 64, 0, LAYOUT_COUNT),
    LAYOUT(indexer, 3 * 64, 0, LAYOUT_COUNT),
    LAYOUT(wide, LAYOUT_SLOTS, 0, LAYOUT_COUNT),
    LAYOUT(page_first, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(page_direct, LAYOUT_SLOTS / LAYOUT_PAGE, LAYOUT_HOST / LAYOUT_PAGE, LAYOUT_PAGE_NAMES),
    LAYOUT(page_head, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(unified, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(latent, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(pools, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(uneven, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(slices, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
    LAYOUT(named, LAYOUT_SLOTS, LAYOUT_HOST, LAYOUT_COUNT),
};
#undef LAYOUT
enum { LAYOUT_CASES = sizeof layout_cases / sizeof *layout_cases };

/* Row i is one of `rows` in random order; every fifth from the second on is padding, every ninth past the end. */
static inline int64_t layout_name(int64_t *order, int64_t rows, int i)
{
    const int64_t other = i + (int64_t)below((uint64_t)(rows - i)), row = order[other];
    order[other] = order[i];
    return i % 5 == 1 ? -1 - i : i % 9 == 3 ? rows + i - 3 : row;
}

/* Fills a layout's memory with random bytes and names. */
static inline void layout_fill(const layout_case *c, void *memory)
{
    layout_names *const names = (layout_names *)memory;
    int64_t slots[3 * 64], hosts[LAYOUT_HOST];
    random_state = c->bytes;
    fill(memory, c->bytes);
    for (int i = 0; i < 3 * 64; i++)
        slots[i] = i;
    for (int i = 0; i < LAYOUT_HOST; i++)
        hosts[i] = i;
    for (int i = 0; i < c->count; i++) {
        names->slot[i] = (int32_t)layout_name(slots, c->slots, i);
        names->host[i] = c->host ? hosts[i] : 0;
        if (c->host && i % 4 < 2) /* every kind of name meets every other */
            names->host[i] = layout_name(hosts, c->host, i);
    }
    names->rejected = 7;
}

/* Runs a layout one way: `run` runs the moves on the memory that the call has, and returns with the results in `got`.
   Both have room for LAYOUT_MOST_BYTES. */
typedef void layout_run(const layout_case *which, layout_call *c, uint8_t *got);

static inline void layout_one(const layout_case *which, layout_run *run_moves, void *at, uint8_t *got, uint8_t *want)
{
    for (int back = 0; back < 2; back++) {
        layout_call c;
        memset(&c, 0, sizeof c);
        c.at = at, c.back = back;
        layout_fill(which, want);
        memcpy(got, want, which->bytes);
        which->expect(want, back);
        which->describe(&c);
        run_moves(which, &c, got);
        for (size_t b = 0; b < which->bytes; b++)
            if (got[b] != want[b]) {
                fail("layout %s, %s: byte %zu is %02x, not %02x", which->name, back ? "back" : "there", b, got[b],
                     want[b]);
                break;
            }
    }
}

/* ---- layouts by name ---- */

enum {
    NAMED_L = 3,
    NAMED_B = 4,
    NAMED_H = 4,
    NAMED_N = 8,
    NAMED_C = 6,
    NAMED_PART = NAMED_L * NAMED_B * NAMED_H * NAMED_N
};

/* The place of a head in an array of C: x is K (0) or V (1). */
typedef char *named_place(void *memory, int l, int b, int h, int n, int x);
#define NAMED_L_ [NAMED_L]
#define NAMED_B_ [NAMED_B]
#define NAMED_H_ [NAMED_H]
#define NAMED_N_ [NAMED_N]
#define NAMED_2_ [2]
#define NAMED(a, b1, c, d, e)                                                                                          \
    static inline char *named_##a##b1##c##d##e(void *memory, int l, int b, int h, int n, int x)                        \
    {                                                                                                                  \
        typedef char array NAMED_##a##_ NAMED_##b1##_ NAMED_##c##_ NAMED_##d##_ NAMED_##e##_[NAMED_C];                 \
        return (*(array *)memory)NAMED_AT_##a NAMED_AT_##b1 NAMED_AT_##c NAMED_AT_##d NAMED_AT_##e;                    \
    }
#define NAMED_AT_L [l]
#define NAMED_AT_B [b]
#define NAMED_AT_H [h]
#define NAMED_AT_N [n]
#define NAMED_AT_2 [x]
NAMED(L, B, 2, N, H)
NAMED(L, B, 2, H, N)
NAMED(2, L, B, N, H)
NAMED(2, L, B, H, N)
NAMED(2, B, N, L, H)
NAMED(2, B, L, N, H)
NAMED(2, B, H, N, L)
NAMED(B, H, L, 2, N)
NAMED(B, L, 2, H, N)
NAMED(B, L, 2, N, H)
NAMED(B, 2, L, N, H)
NAMED(L, B, N, 2, H)
NAMED(L, 2, B, N, H)
NAMED(L, 2, B, H, N)
NAMED(L, B, H, N, 2)
NAMED(L, B, N, H, 2)
NAMED(L, H, B, N, 2)
NAMED(B, L, H, N, 2)
NAMED(B, L, N, H, 2)
NAMED(B, H, L, N, 2)
#undef NAMED

typedef struct named_case {
    const char *name;
    named_place *place;
} named_case;

/* First one name of each order. */
static const named_case named_cases[] = {{"flashinfer_nhd", named_LB2NH},
                                         {"flashinfer_hnd", named_LB2HN},
                                         {"sglang_mha", named_2LBNH},
                                         {"flashinfer_hnd_split", named_2LBHN},
                                         {"sglang_page_first", named_2BNLH},
                                         {"sglang_page_first_direct", named_2BLNH},
                                         {"sglang_page_head", named_2BHNL},
                                         {"sglang_page_unified", named_BHL2N},
                                         {"trtllm", named_BL2HN},
                                         {"dynamo_operational_nhd", named_BL2NH},
                                         {"KV_2LTD", named_B2LNH},
                                         {"KV_T2D", named_LBN2H},
                                         {"NL_X_TWO_NB_BS_NH_HS", named_L2BNH},
                                         {"NL_X_TWO_NB_NH_BS_HS", named_L2BHN},
                                         {"LBHNC", named_LBHN2},
                                         {"LBNHC", named_LBNH2},
                                         {"LHBNC", named_LHBN2},
                                         {"BLHNC", named_BLHN2},
                                         {"BLNHC", named_BLNH2},
                                         {"BHLNC", named_BHLN2},
                                         {"flashinfer_nhd_split", named_2LBNH},
                                         {"sglang_layer_first", named_2LBNH},
                                         {"dynamo_operational_hnd", named_BL2HN},
                                         {"dynamo_universal", named_BHL2N},
                                         {"KV_2TD", named_LB2NH},
                                         {"KV_MLA_FMT", named_BLNH2},
                                         {"NB_NL_TWO_BS_NH_HS", named_BL2NH},
                                         {"NB_NL_TWO_NH_BS_HS", named_BL2HN},
                                         {"NL_X_NB_TWO_BS_NH_HS", named_LB2NH},
                                         {"NL_X_NB_TWO_NH_BS_HS", named_LB2HN},
                                         {"NL_X_NB_NH_BS_TWO_HS", named_LBHN2},
                                         {"NL_X_NB_BS_NH_TWO_HS", named_LBNH2},
                                         {"NL_X_NB_NH_BS_CS", named_LBHN2},
                                         {"NL_X_NB_BS_NH_CS", named_LBNH2},
                                         {"NL_X_NB_BS_HS", named_LBNH2},
                                         {"NL_X_NBBS_ONE_HS", named_LBNH2},
                                         {"TWO_X_NL_X_NBBS_NH_HS", named_2LBNH},
                                         {"TWO_X_NL_X_NB_BS_NH_HS", named_2LBNH},
                                         {"LB2NHC", named_LB2NH},
                                         {"BHLN2C", named_BHLN2}};
enum {
    NAMED_ORDERS = 20,
    NAMED_CASES = sizeof named_cases / sizeof *named_cases,
    NAMED_BYTES = 2 * NAMED_PART * NAMED_C
};

static inline kvprim_layout_sizes named_sizes(void *data)
{
    kvprim_layout_sizes z;
    memset(&z, 0, sizeof z);
    z.data = data, z.rows = NAMED_B * NAMED_N, z.page_rows = NAMED_N, z.layers = NAMED_L, z.heads = NAMED_H;
    z.k_bytes = z.v_bytes = NAMED_H * NAMED_C;
    return z;
}

static inline kvprim_layout named_layout(const char *name, void *data)
{
    const kvprim_layout_sizes z = named_sizes(data);
    kvprim_layout layout;
    memset(&layout, 0, sizeof layout);
    if (kvprim_layout_find(name, &z, &layout) != KVPRIM_OK)
        fail("layout %s: %s", name, kvprim_last_error());
    return layout;
}

/* Head h of row n of page b, by the tables alone. */
static inline char *layout_place(const kvprim_layout *o, int l, int b, int h, int n, int x)
{
    const kvprim_table *const t = x ? &o->v_cache : &o->k_cache;
    return (char *)t->data + l * (x ? o->v_layer_stride : o->k_layer_stride) + b * t->page_stride + n * t->stride +
           h * t->head_stride;
}

/* For each head of each row of each page of each layer, of K and V. */
#define EACH_NAMED(l, b, h, n, x)                                                                                      \
    for (int l = 0; l < NAMED_L; l++)                                                                                  \
        for (int b = 0; b < NAMED_B; b++)                                                                              \
            for (int h = 0; h < NAMED_H; h++)                                                                          \
                for (int n = 0; n < NAMED_N; n++)                                                                      \
                    for (int x = 0; x < 2; x++)

static inline void test_named_places(void)
{
    static char memory[2 * NAMED_PART * 16];
    for (int k = 0; k < NAMED_CASES; k++) {
        const kvprim_layout o = named_layout(named_cases[k].name, memory);
        CHECK(o.bytes == NAMED_BYTES && o.k_bytes == NAMED_H * NAMED_C && o.v_bytes == o.k_bytes);
        CHECK(o.layers == NAMED_L && !o.k_cache.format && o.v_offset == (char *)o.v_cache.data - memory);
        int wrong = 0;
        EACH_NAMED(l, b, h, n, x)
        wrong += layout_place(&o, l, b, h, n, x) != named_cases[k].place(memory, l, b, h, n, x);
        if (wrong)
            fail("layout %s: %d wrong addresses", named_cases[k].name, wrong);
    }
    /* rows of V of another size; padded pages; no V; no memory yet; a page that is not full */
    typedef struct page {
        char k[NAMED_H][NAMED_N][NAMED_C], v[NAMED_H][NAMED_N][4];
    } page;
    page(*const pages)[NAMED_L] = (page(*)[NAMED_L])(void *)memory; /* BL2HNC */
    kvprim_layout_sizes z = named_sizes(memory);
    kvprim_layout o, none;
    z.v_bytes = NAMED_H * 4;
    CHECK(kvprim_layout_find("trtllm", &z, &o) == KVPRIM_OK && o.bytes == (int64_t)sizeof(page) * NAMED_L * NAMED_B);
    int wrong = 0;
    EACH_NAMED(l, b, h, n, x)
    wrong += layout_place(&o, l, b, h, n, x) != (x ? pages[b][l].v[h][n] : pages[b][l].k[h][n]);
    CHECK(wrong == 0);
    z.page_stride = NAMED_L * (int64_t)sizeof(page) + 100, z.rows -= NAMED_N - 1;
    CHECK(kvprim_layout_find("trtllm", &z, &o) == KVPRIM_OK && o.bytes == z.page_stride * NAMED_B);
    CHECK(o.k_cache.rows == z.rows && o.v_cache.page_stride == z.page_stride);
    z.page_stride = 0, z.data = NULL;
    CHECK(kvprim_layout_find("BL2HNC", &z, &none) == KVPRIM_OK && !none.k_cache.data && !none.v_cache.data);
    CHECK(none.v_offset == (int64_t)sizeof pages[0][0].k && none.bytes == (int64_t)sizeof(page) * NAMED_L * NAMED_B);
    z.v_bytes = 0, z.data = memory, z.heads = 0, z.layers = 0;
    CHECK(kvprim_layout_find("LBNHC", &z, &o) == KVPRIM_OK && o.k_cache.stride == z.k_bytes && o.k_cache.heads == 1);
    CHECK(!o.v_cache.data && o.v_cache.rows == 0 && o.v_offset == 0 && o.v_layer_stride == 0 && o.layers == 1);
    CHECK(kvprim_layout_find("fp8_ds_mla", &z, &o) != KVPRIM_OK);
    z.k_bytes = 0, z.layers = 3;
    CHECK(kvprim_layout_find("fp8_ds_mla", &z, &o) == KVPRIM_OK && o.k_layer_stride == NAMED_B * NAMED_N * 656);
    CHECK(o.v_layer_stride == o.k_layer_stride && o.v_offset == 528 && o.k_bytes == 512 && o.v_bytes == 128);
}

static inline void bad_layout(const char *name, kvprim_layout_sizes z, kvprim_status status, const char *words)
{
    kvprim_layout o;
    memset(&o, 0x5a, sizeof o);
    const kvprim_layout before = o;
    CHECK_ERROR(kvprim_layout_find(name, &z, &o), status, words);
    CHECK(memcmp(&o, &before, sizeof o) == 0);
}

static inline void test_named_errors(void)
{
    static const char *const unknown[] = {"",        "LBHN",   "LBHNCC",  "LBHN2",  "CLBHN2", "LB2NHHC",
                                          "LLBN2C",  "lbhnc",  "LB2NHC ", "XB2NHC", "L2C",    "trtllm ",
                                          "trtllm=", "22BNHC", "LBHNC2",  "KV_2LT"};
    char data[8];
    kvprim_layout o;
    kvprim_layout_sizes z = named_sizes(data), bad = z;
    CHECK_ERROR(kvprim_layout_find(NULL, &z, &o), KVPRIM_ERROR_NULL, "kvprim_layout_find: name is NULL");
    CHECK_ERROR(kvprim_layout_find("LBHNC", NULL, &o), KVPRIM_ERROR_NULL, "sizes is NULL");
    CHECK_ERROR(kvprim_layout_find("LBHNC", &z, NULL), KVPRIM_ERROR_NULL, "layout is NULL");
    for (size_t k = 0; k < sizeof unknown / sizeof *unknown; k++)
        bad_layout(unknown[k], z, KVPRIM_ERROR_ARGUMENT, unknown[k]);
    bad_layout("KV_2TD=LB2NHC KV_T2D", z, KVPRIM_ERROR_ARGUMENT, "neither a name of"); /* two that follow each other */
    bad_layout("a_name_that_is_longer_than_every_other_name", z, KVPRIM_ERROR_ARGUMENT, "neither a name of");
    bad_layout("fp8_ds_mla_v41", z, KVPRIM_ERROR_ARGUMENT, "has its own k_bytes, v_bytes and heads, not 24, 24 and 4");
#define BAD(field, value, words)                                                                                       \
    bad = z, bad.field = value;                                                                                        \
    bad_layout("LBHNC", bad, KVPRIM_ERROR_SIZE, words)
    BAD(rows, 0, "rows is 0, less than 1");
    BAD(page_rows, 0, "page_rows is 0, less than 1");
    BAD(layers, -1, "layers is -1, less than 1");
    BAD(heads, -2, "heads is -2, less than 1");
    BAD(heads, 5, "heads is 5, but k_bytes 24 and v_bytes 24");
    BAD(v_bytes, 25, "heads is 4, but k_bytes 24 and v_bytes 25");
    BAD(k_bytes, 0, "k_bytes is 0, less than 1");
    BAD(v_bytes, -4, "v_bytes is -4, less than 0");
    BAD(page_stride, -1, "page_stride is -1, less than 0");
    BAD(page_stride, 383, "page_stride is 383, less than a page's bytes, 384");
    bad = z, bad.k_bytes = 12, bad.page_stride = 191;
    bad_layout("2LBNHC", bad, KVPRIM_ERROR_SIZE, "page_stride is 191, less than a page's bytes, 192"); /* V's */
    bad = z, bad.v_bytes = 0, bad.page_stride = 1024; /* without V its place takes none */
    for (int k = 0; k < 3; k++) {
        static const char *const orders[] = {"LBNHC", "L2BNHC", "2LBNHC"};
        kvprim_layout got;
        CHECK(kvprim_layout_find(orders[k], &bad, &got) == KVPRIM_OK);
        CHECK(got.bytes == bad.layers * 1024 * ((bad.rows - 1) / bad.page_rows + 1) && got.v_bytes == 0);
        CHECK(got.k_layer_stride == got.bytes / bad.layers && got.k_cache.page_stride == 1024);
    }
    BAD(rows, INT64_MAX / 8, "too large");
    BAD(k_bytes, INT64_MAX / 4 * 4, "k_bytes 9223372036854775804, v_bytes 24 and layers");
#undef BAD
}

/* ---- any layout to any: transfers, and the same as runs ---- */

enum { NAMED_COUNT = 3 * NAMED_N };

/* The rows that move: a page in order, one shifted, and single ones; some are padding. */
static inline void named_rows(int32_t *from, int32_t *to)
{
    for (int i = 0; i < NAMED_COUNT; i++) {
        from[i] = i < NAMED_N ? NAMED_N + i : i < 2 * NAMED_N ? 2 * NAMED_N + i - 4 : i * 7 % NAMED_N;
        to[i] = i < NAMED_N ? 2 * NAMED_N + i : i < 2 * NAMED_N ? i - 5 : 3 * NAMED_N + i * 5 % NAMED_N;
        from[i] = i == NAMED_COUNT - 2 ? -1 : i == 2 ? NAMED_B * NAMED_N : from[i];
    }
}

/* The transfers of K and V from one layout into the other. */
static inline void named_moves(const kvprim_layout *from, const kvprim_layout *to, const int32_t *rows,
                               kvprim_move *moves)
{
    for (int x = 0; x < 2; x++) {
        kvprim_transfer_desc d;
        memset(&d, 0, sizeof d);
        d.src = x ? from->v_cache : from->k_cache, d.dst = x ? to->v_cache : to->k_cache;
        d.src_layer_stride = x ? from->v_layer_stride : from->k_layer_stride;
        d.dst_layer_stride = x ? to->v_layer_stride : to->k_layer_stride;
        d.layers = NAMED_L, d.row_bytes = x ? from->v_bytes : from->k_bytes, d.count = NAMED_COUNT;
        d.src_index = rows, d.dst_index = rows + NAMED_COUNT, d.index_type = KVPRIM_I32;
        if (kvprim_transfer_moves(&d, &moves[x]) != KVPRIM_OK)
            fail("%s", kvprim_last_error());
    }
}

/* Copies what kvprim_runs lists, and checks that nothing joins that it left apart. Returns how many runs there are. */
static inline int64_t copy_runs(const kvprim_move *moves, size_t n)
{
    static kvprim_copy_item items[8192];
    const int64_t count = kvprim_runs(moves, n, items, 8192);
    CHECK(count >= 0 && count <= 8192 && kvprim_runs(moves, n, NULL, 0) == count);
    for (int64_t k = 0; k < count; k++) {
        if (items[k].src)
            memcpy(items[k].dst, items[k].src, (size_t)items[k].bytes);
        else
            memset(items[k].dst, 0, (size_t)items[k].bytes);
        if (k > 0 && (char *)items[k - 1].dst + items[k - 1].bytes == items[k].dst &&
            !items[k - 1].src == !items[k].src &&
            (!items[k].src || (const char *)items[k - 1].src + items[k - 1].bytes == items[k].src))
            fail("runs %lld and %lld are one", (long long)k - 1, (long long)k);
    }
    return count;
}

static inline void test_named_pairs(void)
{
    static char a[NAMED_BYTES], got[NAMED_BYTES], want[NAMED_BYTES], by_runs[NAMED_BYTES];
    int32_t rows[2 * NAMED_COUNT];
    named_rows(rows, rows + NAMED_COUNT);
    fill(a, sizeof a);
    for (int pair = 0; pair < NAMED_ORDERS * NAMED_ORDERS; pair++) {
        const named_case *const from = &named_cases[pair / NAMED_ORDERS], *const to = &named_cases[pair % NAMED_ORDERS];
        const kvprim_layout source = named_layout(from->name, a);
        kvprim_move moves[2];
        memset(want, 0x77, sizeof want), memset(got, 0x77, sizeof got), memset(by_runs, 0x77, sizeof by_runs);
        for (int i = 0; i < NAMED_COUNT; i++) {
            const int s = rows[i], d = rows[NAMED_COUNT + i];
            for (int l = 0; s >= 0 && s < NAMED_B * NAMED_N && l < NAMED_L; l++)
                for (int h = 0; h < NAMED_H; h++)
                    for (int x = 0; x < 2; x++)
                        memcpy(to->place(want, l, d / NAMED_N, h, d % NAMED_N, x),
                               from->place(a, l, s / NAMED_N, h, s % NAMED_N, x), NAMED_C);
        }
        kvprim_layout target = named_layout(to->name, got);
        named_moves(&source, &target, rows, moves);
        CHECK(kvprim_cpu_move(moves, 2) == KVPRIM_OK);
        target = named_layout(to->name, by_runs);
        named_moves(&source, &target, rows, moves);
        (void)copy_runs(moves, 2);
        if (memcmp(got, want, sizeof got) != 0 || memcmp(by_runs, want, sizeof got) != 0)
            fail("%s to %s: %s differ", from->name, to->name, memcmp(got, want, sizeof got) ? "bytes" : "runs");
    }
}

/* How many runs rows [first, first + count) of one layer or three are, from a layout into another. */
static inline int64_t runs_between(const char *from, const char *to, int first, int count, int parts)
{
    static char a[NAMED_BYTES], b[NAMED_BYTES];
    const kvprim_layout source = named_layout(from, a), target = named_layout(to, b);
    int32_t rows[2 * NAMED_COUNT];
    kvprim_move moves[2];
    for (int i = 0; i < NAMED_COUNT; i++)
        rows[i] = rows[NAMED_COUNT + i] = i < count ? first + i : -1;
    named_moves(&source, &target, rows, moves);
    return copy_runs(moves, (size_t)parts);
}

static inline void test_runs(void)
{
    static const struct {
        const char *from, *to;
        int first, count, parts, runs;
    } cases[] = {
        {"LBHNC", "LBHNC", 0, NAMED_N, 1, NAMED_L * NAMED_H * NAMED_N},   /* a head's K, without its V */
        {"2LBNHC", "2LBNHC", 0, NAMED_N, 2, 2 * NAMED_L},                 /* pages are whole ... */
        {"2LBHNC", "2LBHNC", NAMED_N, 2 * NAMED_N, 2, 2 * NAMED_L},       /* ... and follow each other, ... */
        {"2LBHNC", "2LBHNC", 3, NAMED_N, 1, NAMED_L * NAMED_H * 2},       /* ... cut, they are heads */
        {"2LBHNC", "2LBNHC", 0, NAMED_N, 1, NAMED_L * NAMED_H * NAMED_N}, /* nothing joins */
        {"2BLNHC", "2BLNHC", 0, 2 * NAMED_N, 1, 1},                       /* all layers of a page, and pages */
        {"2BNLHC", "2BNLHC", 1, NAMED_N, 1, 1},                           /* all layers of a row */
        {"2BHNLC", "2BHNLC", 0, NAMED_N, 2, 2},                           /* all layers of a head */
        {"BL2NHC", "BL2NHC", NAMED_N, NAMED_N, 2, 2 * NAMED_L},           /* V lies between layers */
        {"B2LNHC", "B2LNHC", NAMED_N, NAMED_N, 2, 1},                     /* K and V of a page */
        {"2BNHLC", "2BNHLC", 1, NAMED_N, 2, 2},                           /* ... of a row of heads */
        {"2BLNHC", "LB2NHC", 0, NAMED_N, 1, NAMED_L},                     /* a page of a layer */
        {"LHB2NC", "LHB2NC", 0, 2 * NAMED_N, 1, NAMED_L * NAMED_H * 2},   /* rows of a page of a head */
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int64_t runs = runs_between(cases[k].from, cases[k].to, cases[k].first, cases[k].count, cases[k].parts);
        if (runs != cases[k].runs)
            fail("runs of %s to %s, case %zu: %lld, not %d", cases[k].from, cases[k].to, k, (long long)runs,
                 cases[k].runs);
    }
    /* a gather's zeros; fewer items than runs; layers by pointers; pieces of two sizes; what has no runs */
    char table[8][4], rows[8][4], want[8][4];
    const int32_t index[8] = {2, 3, 4, -1, 9, 0, 1, 7};
    kvprim_gather_desc g;
    kvprim_move m[2];
    uint32_t rejected = 5;
    memset(&g, 0, sizeof g);
    fill(table, sizeof table), fill(rows, sizeof rows);
    g.src = table_of(table, 8), g.dst = table_of(rows, 8), g.row_bytes = 4, g.index = index;
    g.index_type = KVPRIM_I32, g.count = 8, g.rejected = &rejected;
    CHECK(kvprim_gather_moves(&g, m) == KVPRIM_OK);
    kvprim_copy_item items[5];
    memset(items, 0x33, sizeof items);
    CHECK(kvprim_runs(m, 1, items, 2) == 4 && rejected == 5);
    CHECK(items[0].src == table[2] && items[0].dst == rows[0] && items[0].bytes == 12);
    CHECK(!items[1].src && items[1].dst == rows[3] && items[1].bytes == 8);
    CHECK(items[2].bytes == 0x3333333333333333); /* not written */
    CHECK(kvprim_runs(m, 1, items, 4) == 4 && items[2].bytes == 8 && items[3].src == table[7]);
    CHECK(copy_runs(m, 1) == 4);
    memcpy(want, rows, sizeof want), memset(rows, 1, sizeof rows);
    CHECK(kvprim_cpu_move(m, 1) == KVPRIM_OK && memcmp(rows, want, sizeof want) == 0);
    const int32_t place[3] = {-1, 1, 2}; /* a row's own place, after zeros */
    g.index = place, g.count = 3;
    CHECK(kvprim_gather_moves(&g, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == 2);
    CHECK(!items[0].src && items[0].bytes == 4 && items[1].src == table[1] && items[1].bytes == 8);
    CHECK(kvprim_runs(NULL, 0, NULL, 0) == 0);
    g.src.page_rows = 1, g.src.page_stride = 4, g.src.stride = INT64_MAX; /* of one row: no other is so far away */
    CHECK(kvprim_gather_moves(&g, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == 2 && items[1].bytes == 8);
    CHECK(kvprim_runs(NULL, 1, items, 2) == -1 && strstr(kvprim_last_error(), "kvprim_runs: moves is NULL"));
    CHECK(kvprim_runs(m, 1, NULL, 2) == -1 && strstr(kvprim_last_error(), "items is NULL"));

    void *const from_layers[2] = {table[4], table[0]}, *const to_layers[2] = {rows[0], rows[4]};
    kvprim_transfer_desc t;
    memset(&t, 0, sizeof t);
    t.src = table_of(NULL, 4), t.dst = table_of(NULL, 4), t.row_bytes = 4, t.count = 4, t.layers = 2;
    t.src_layers = from_layers, t.dst_layers = to_layers;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == 2);
    kvprim_transfer_desc one = t; /* only one side has pointers */
    one.dst_layers = NULL, one.dst.data = rows;
    CHECK(kvprim_transfer_moves(&one, m + 1) == KVPRIM_OK && kvprim_runs(m + 1, 1, NULL, 0) == 2);
    CHECK(items[0].src == table[4] && items[1].dst == rows[4] && items[1].src == table[0] && items[1].bytes == 16);
    memset(&t, 0, sizeof t);
    t.src = layout_heads(strided_table(table, 2, 1), 4, 2), t.dst = layout_heads(strided_table(rows, 2, 2), 2, 8);
    t.row_bytes = 4, t.count = 2;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 0) == 8);
    CHECK(copy_runs(m, 1) == 8);
    memcpy(want, rows, sizeof want), memset(rows, 1, sizeof rows);
    CHECK(kvprim_cpu_move(m, 1) == KVPRIM_OK && memcmp(rows[0], want[0], 4) == 0 && memcmp(rows[2], want[2], 4) == 0);
    t.src = layout_heads(strided_table(table, 1, 3), 2, 6), t.dst = layout_heads(strided_table(rows, 1, 2), 3, 4);
    t.row_bytes = 6, t.count = 1;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == -1);
    CHECK(strstr(kvprim_last_error(), "heads that share no piece") != NULL);
    memset(&t, 0, sizeof t);
    t.src = t.dst = table_of(NULL, 4), t.row_bytes = 4, t.count = 4, t.src_device_layers = from_layers;
    t.dst_device_layers = to_layers, t.layers = 2;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == -1);
    CHECK(strstr(kvprim_last_error(), "device layers") != NULL);
    t.dst_device_layers = NULL, t.dst.data = rows, t.layers = 1;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == -1);
    float wide[4] = {0};
    uint16_t narrow[4] = {0};
    kvprim_format f32, bf16;
    memset(&f32, 0, sizeof f32), memset(&bf16, 0, sizeof bf16);
    f32.dtype = KVPRIM_F32, bf16.dtype = KVPRIM_BF16;
    memset(&t, 0, sizeof t);
    t.src = table_of(wide, 4), t.dst = table_of(narrow, 4), t.src.format = &f32, t.dst.format = &bf16;
    t.row_bytes = 4, t.count = 4;
    CHECK(kvprim_transfer_moves(&t, m) == KVPRIM_OK && kvprim_runs(m, 1, items, 5) == -1);
    CHECK(strstr(kvprim_last_error(), "kvprim_runs: a move of kvprim_transfer converts rows") != NULL);
}

/* ---- the staging area: any tensor parallelism to any other ---- */

enum { PACK_HEADS = 4, PACK_ROWS = 21, PACK_LAYERS = 2, PACK_SLOTS = 48, PACK_AREA = 1 << 14 };

typedef struct pack_side {
    kvprim_layout cache[4]; /* of each rank */
    int32_t slots[PACK_ROWS];
    int world, heads; /* of a rank */
} pack_side;

/* Byte c of a head of a token, of K or V. */
static inline char pack_byte(int l, int token, int h, int x, int c)
{
    return (char)(l * 101 + token * 31 + h * 17 + x * 7 + c * 3 + 1);
}

static inline void pack_make(pack_side *s, const char *name, int world, int64_t page, int mla, int odd, char *memory)
{
    s->world = world, s->heads = mla ? 1 : PACK_HEADS / world;
    for (int r = 0; r < world; r++) {
        kvprim_layout_sizes z;
        memset(&z, 0, sizeof z);
        z.data = memory + r * PACK_AREA, z.rows = PACK_SLOTS, z.page_rows = page, z.layers = PACK_LAYERS;
        z.heads = s->heads, z.k_bytes = s->heads * 5, z.v_bytes = mla ? 0 : s->heads * 3;
        CHECK(kvprim_layout_find(name, &z, &s->cache[r]) == KVPRIM_OK && s->cache[r].bytes <= PACK_AREA);
    }
    for (int i = 0; i < PACK_ROWS; i++)
        s->slots[i] = (i * (odd ? 11 : 5) + odd) % PACK_SLOTS;
}

/* Writes the tokens of a side (check 0), or compares all its bytes in rows that have one. */
static inline void pack_tokens(const pack_side *s, int check, const char *what)
{
    int wrong = 0;
    for (int r = 0; r < s->world; r++)
        for (int l = 0; l < PACK_LAYERS; l++)
            for (int i = 0; i < PACK_ROWS; i++)
                for (int h = 0; h < s->heads; h++)
                    for (int x = 0; x < (s->cache[r].v_bytes ? 2 : 1); x++)
                        for (int c = 0; c < (x ? 3 : 5); c++) {
                            const int64_t page = s->cache[r].k_cache.page_rows;
                            char *const at = layout_place(&s->cache[r], l, (int)(s->slots[i] / page), h,
                                                          (int)(s->slots[i] % page), x) +
                                             c;
                            const int head = s->cache[r].v_bytes ? r * s->heads + h : 0;
                            if (check)
                                wrong += *at != pack_byte(l, i, head, x, c);
                            else
                                *at = pack_byte(l, i, head, x, c);
                        }
    if (wrong)
        fail("packed %s, %d ranks: %d wrong bytes", what, s->world, wrong);
}

static inline kvprim_pack pack_planned(const pack_side *s, int rank, int first, int last, char *area)
{
    kvprim_pack_desc d;
    kvprim_pack plan;
    memset(&d, 0, sizeof d), memset(&plan, 0, sizeof plan);
    d.cache = &s->cache[rank], d.head = s->cache[rank].v_bytes ? first - rank * s->heads : 0;
    d.heads = last - first, d.slot = s->slots, d.slot_type = KVPRIM_I32, d.count = PACK_ROWS;
    d.staging = area, d.staging_bytes = PACK_AREA;
    if (kvprim_pack_plan(&d, &plan) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    return plan;
}

/* The same with an array of pointers to K's layers gives what is in `area`. */
static inline void pack_by_pointers(const kvprim_layout *cache, const kvprim_pack *plan, const char *area)
{
    static char again[PACK_AREA];
    kvprim_transfer_desc t = plan->pack[0];
    void *layers[PACK_LAYERS];
    for (int l = 0; l < PACK_LAYERS; l++)
        layers[l] = (char *)cache->k_cache.data + l * cache->k_layer_stride + plan->head_offset[0];
    for (int64_t i = 0; i < plan->bytes; i++)
        again[i] = (char)~area[i];
    t.dst.data = again, t.src_layers = layers, t.src_layer_stride = 0;
    CHECK(kvprim_transfer(&t) == KVPRIM_OK);
    t = plan->pack[1];
    if (t.count > 0) {
        t.dst.data = again + ((char *)t.dst.data - (char *)plan->pack[0].dst.data);
        CHECK(kvprim_transfer(&t) == KVPRIM_OK);
    }
    CHECK(memcmp(again, area, (size_t)plan->bytes) == 0);
}

static inline void test_packs(void)
{
    static char memory[2][4 * PACK_AREA], area[2][PACK_AREA];
    static const char *const names[] = {"LB2NHC", "BL2HNC", "2BHNLC", "LBHNC"};
    for (int n = 0; n < 4 * 4 * 9 + 1; n++) {
        const int mla = n == 4 * 4 * 9;
        pack_side from, to;
        memset(memory, 0x55, sizeof memory);
        pack_make(&from, names[n % 4], mla ? 2 : 1 << n / 16 % 3, 4, mla, 0, memory[0]);
        pack_make(&to, names[n / 4 % 4], mla ? 4 : 1 << n / 48 % 3, 16, mla, 1, memory[1]);
        pack_tokens(&from, 0, "");
        int64_t pieces = 0, areas = 0;
        for (int r = 0; r < to.world; r++)
            for (int s = 0; s < from.world; s++) {
                int first = r * to.heads > s * from.heads ? r * to.heads : s * from.heads;
                int last = (r + 1) * to.heads < (s + 1) * from.heads ? (r + 1) * to.heads : (s + 1) * from.heads;
                if (mla) /* each rank has all of it: one sends to each */
                    first = 0, last = s == r % 2;
                if (first >= last)
                    continue;
                memset(area, 0x66, sizeof area);
                const kvprim_pack out = pack_planned(&from, s, first, last, area[0]);
                const kvprim_pack in = pack_planned(&to, r, first, last, area[1]);
                CHECK(out.bytes == in.bytes &&
                      out.bytes == (int64_t)PACK_LAYERS * PACK_ROWS * (last - first) * (mla ? 5 : 8));
                for (int x = 0; x < (mla ? 1 : 2); x++) {
                    kvprim_move m;
                    CHECK(kvprim_transfer_moves(&out.pack[x], &m) == KVPRIM_OK);
                    pieces += kvprim_runs(&m, 1, NULL, 0);
                    CHECK(kvprim_transfer(&out.pack[x]) == KVPRIM_OK);
                }
                memcpy(area[1], area[0], (size_t)out.bytes), areas++;
                pack_by_pointers(&from.cache[s], &out, area[1]);
                CHECK(area[0][out.bytes] == 0x66 && out.pack[1].count == (mla ? 0 : PACK_ROWS));
                CHECK(kvprim_transfer(&in.unpack[0]) == KVPRIM_OK && kvprim_transfer(&in.unpack[1]) == KVPRIM_OK);
            }
        CHECK(areas <= 4 && pieces > 10 * areas);
        pack_tokens(&to, 1, names[n / 4 % 4]);
    }
}

static inline void test_pack_errors(void)
{
    char memory[1] = {0};
    const kvprim_layout cache = named_layout("LB2NHC", memory);
    kvprim_layout quantised = cache, empty = cache;
    quantised.k_cache.format = &quantised.k_format, empty.layers = 0;
    kvprim_pack plan;
    kvprim_pack_desc d, bad;
    memset(&d, 0, sizeof d);
    d.cache = &cache, d.count = 10, d.head = 1;
    CHECK(kvprim_pack_plan(&d, &plan) == KVPRIM_OK && plan.bytes == 10 * NAMED_L * 2 * 3 * NAMED_C);
    CHECK(!plan.pack[0].dst.data && plan.pack[1].src.heads == 3);
    CHECK_ERROR(kvprim_pack_plan(NULL, &plan), KVPRIM_ERROR_NULL, "kvprim_pack_plan: desc is NULL");
    CHECK_ERROR(kvprim_pack_plan(&d, NULL), KVPRIM_ERROR_NULL, "plan is NULL");
#define BAD(field, value, status, words)                                                                               \
    bad = d, bad.field = value;                                                                                        \
    CHECK_ERROR(kvprim_pack_plan(&bad, &plan), status, words)
    BAD(cache, NULL, KVPRIM_ERROR_NULL, "cache is NULL");
    BAD(cache, &quantised, KVPRIM_ERROR_ARGUMENT, "cache has a format");
    BAD(cache, &empty, KVPRIM_ERROR_SIZE, "the cache has 4, and 0 layers"); /* its transfers would move one */
    BAD(count, -1, KVPRIM_ERROR_SIZE, "count is -1, head 1 and heads 0; the cache has 4");
    BAD(head, -1, KVPRIM_ERROR_SIZE, "head -1");
    BAD(head, 4, KVPRIM_ERROR_SIZE, "head 4 and heads 0");
    BAD(heads, 4, KVPRIM_ERROR_SIZE, "head 1 and heads 4");
    BAD(heads, -1, KVPRIM_ERROR_SIZE, "heads -1");
    BAD(staging, memory, KVPRIM_ERROR_SIZE, "staging_bytes is 0, less than the area's, 1080");
    BAD(count, INT64_MAX / 4, KVPRIM_ERROR_SIZE, "kvprim_pack_plan: count is 2305843009213693951, too large");
#undef BAD
    d.count = 0;
    CHECK(kvprim_pack_plan(&d, &plan) == KVPRIM_OK && plan.bytes == 0 && plan.pack[0].count == 0);
}

#endif

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

static void layout_page_head_expect(void *memory, int back)
{
    layout_page_head *const m = (layout_page_head *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int64_t slot = m->names.slot[i], host = m->names.host[i];
        if (!layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            continue;
        for (int kv = 0; kv < 2; kv++)
            for (int l = 0; l < LAYOUT_LAYERS; l++)
                for (int h = 0; h < LAYOUT_HEADS; h++)
                    layout_move(m->gpu[kv][l][slot][h], m->host[kv][host / LAYOUT_PAGE][h][host % LAYOUT_PAGE][l],
                                LAYOUT_DIM, back);
    }
}

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

static void layout_unified_expect(void *memory, int back)
{
    layout_unified *const m = (layout_unified *)memory;
    for (int i = 0; i < LAYOUT_COUNT; i++) {
        const int64_t slot = m->names.slot[i], host = m->names.host[i];
        if (!layout_moves(&m->names, i, LAYOUT_SLOTS, LAYOUT_HOST))
            continue;
        for (int kv = 0; kv < 2; kv++)
            for (int l = 0; l < LAYOUT_LAYERS; l++)
                for (int h = 0; h < LAYOUT_HEADS; h++)
                    layout_move(m->gpu[kv][l][slot][h],
                                m->host[host / LAYOUT_PAGE][h / LAYOUT_IN_GROUP][l][kv][host % LAYOUT_PAGE]
                                       [h % LAYOUT_IN_GROUP],
                                LAYOUT_DIM, back);
    }
}

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

#endif

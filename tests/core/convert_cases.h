/* SPDX-License-Identifier: MIT */
/* Random moves that convert, each in a block of memory that holds all that it reads and writes: tables of rows, heads,
   pages and layers in any order and with gaps, scales wherever >>format lets them lie, indices, counters. `pick`
   chooses, so that tests and fuzzers share them. Include it after kvprim.h. */
#ifndef CONVERT_CASES_H
#define CONVERT_CASES_H

#include "convert_oracle.h"

enum {
    CASE_BYTES = 1 << 17,
    CASE_LAYERS = 3,
    CASE_ROWS = 24,
    CASE_COUNT = 20,
};

typedef uint64_t case_pick(uint64_t n); /* returns less than n */

typedef struct convert_case {
    unsigned char *memory; /* CASE_BYTES, aligned to 16 */
    size_t used;
    oracle_move move;
    kvprim_format dst, src;
    float tensor_scale[2];
    void *dst_layers[CASE_LAYERS], *src_layers[CASE_LAYERS];
} convert_case;

/* One loop over memory, inside others. */
typedef struct case_loop {
    int64_t n, *stride;
} case_loop;

/* Lays loops around `span` bytes in any order, with gaps, all strides multiples of `align`; returns what they span. */
static int64_t case_nest(case_pick *pick, int64_t span, case_loop *loops, int n, int64_t align)
{
    while (n > 0) {
        const int k = (int)pick((uint64_t)n);
        const int64_t gap = pick(3) ? 0 : (int64_t)pick(5) * align;
        *loops[k].stride = (span + align - 1) / align * align + gap;
        span += (loops[k].n - 1) * *loops[k].stride;
        loops[k] = loops[--n];
    }
    return span;
}

static unsigned char *case_take(convert_case *c, int64_t bytes, int64_t align, int64_t off)
{
    c->used = (c->used + 15) / 16 * 16 + (size_t)(off * align);
    unsigned char *const at = c->memory + c->used;
    c->used += (size_t)bytes;
    return at;
}

/* A scale as numbers are, or any other. */
static float case_scale(case_pick *pick)
{
    static const float odd[] = {0, -1, 0.0625f, -0.3f, FLT_MIN, FLT_MAX, 1e-41f, INFINITY, NAN, 1.7014118e38f};
    if (pick(4) == 0)
        return odd[pick(sizeof odd / sizeof *odd)];
    return (float)oracle_ldexp(1 + (double)pick(1 << 20) / (1 << 20), (int)pick(24) - 12);
}

/* One element: mostly numbers that the types share, sometimes any code. */
static uint32_t case_element(case_pick *pick, kvprim_dtype dtype)
{
    if (pick(16) == 0)
        return (uint32_t)(pick(65536) << 16 | pick(65536)) &
               (uint32_t)(0xffffffffu >> (32 - 8 * oracle_type_of(dtype)->bytes / oracle_packed(dtype)));
    return oracle_encode(dtype, (float)oracle_ldexp((double)pick(1 << 16) / 32768 - 1, (int)pick(20) - 10));
}

/* A side's table and scales, for n elements. `dst`: scales are computed. */
static void case_side(convert_case *c, case_pick *pick, int dst, int64_t n, int32_t layers, int64_t rows)
{
    oracle_side *const part = dst ? &c->move.dst : &c->move.src;
    kvprim_format *const f = dst ? &c->dst : &c->src;
    kvprim_table *const t = &part->table;
    const int64_t element = oracle_type_of(f->dtype)->bytes;
    const int quantised = element == 1, array = pick(3) == 0;
    void **const bases = dst ? c->dst_layers : c->src_layers;
    const int64_t packed_in = oracle_packed(c->dst.dtype) * oracle_packed(c->src.dtype);
    const int four = oracle_packed(f->dtype) > 1;
    int32_t heads = 1 + (int32_t)pick(4);
    while (n % (heads * packed_in) != 0)
        heads--;
    const int64_t page_rows = pick(2) ? four && pick(2) ? 4 + 4 * (int64_t)pick(2) : 1 + (int64_t)pick(6) : 0,
                  piece = oracle_bytes(f->dtype, n / heads);
    const int64_t pages = page_rows ? (rows + page_rows - 1) / page_rows : 1;
    f->scale = quantised ? (kvprim_scale_kind)pick(4) : (kvprim_scale_kind)0;
    f->scale_dtype = f->scale && pick(3) == 0 ? KVPRIM_F8E8M0 : f->scale && pick(2) ? KVPRIM_F32 : (kvprim_dtype)0;
    const int tiled = f->scale == KVPRIM_SCALE_TILE, inside = f->scale && pick(2);
    if (four && tiled && pick(2))
        f->scale_dtype = pick(3) ? KVPRIM_F8E4M3 : KVPRIM_F16;
    if (four && tiled && pick(2)) {
        float *const outer = &c->tensor_scale[dst];
        *outer = pick(4) ? case_scale(pick) : 0.01f;
        f->tensor_scale = outer;
    }
    const int64_t size = oracle_scale_bytes(f->scale_dtype), align = inside && size > element ? size : element;
    if (f->scale >= KVPRIM_SCALE_HEAD && !(pick(3) == 0 && (tiled || heads > 1))) {
        f->tile = packed_in + (int64_t)pick((uint64_t)(n - packed_in + 1));
        while (n % f->tile != 0 || f->tile % packed_in != 0)
            f->tile--;
    }
    const int64_t tile = f->scale == KVPRIM_SCALE_TENSOR ? n : f->tile ? f->tile : tiled ? n : n / heads;
    const int64_t tiles = f->scale ? n / tile : 0;
    if (four && tiled && size == 1 && pick(2)) {
        f->scale_heads = 1 + (int32_t)pick(4);
        while (tiles % f->scale_heads != 0)
            f->scale_heads--;
        f->scale_order = tiles / f->scale_heads % 4 == 0 && page_rows % 4 == 0 && rows % 4 == 0;
    }
    /* scales of heads are one block in each page */
    const int64_t in_page = !tiled ? 1 : page_rows ? page_rows : rows, block = f->scale_heads ? in_page * tiles : 0;
    f->scale_inverse = f->scale && (dst || tiled) && pick(3) == 0;
    f->scale_power_of_two = tiled && pick(3) == 0;
    f->scale_min = tiled && pick(3) == 0 ? (float)oracle_ldexp(1.3, (int)pick(30) - 20) : 0;
    t->rows = rows, t->page_rows = page_rows, t->heads = heads > 1 || pick(2) ? heads : 0, t->format = f;
    int64_t head_stride = 0, stride = 0, page_stride = 0, layer_stride = 0, span;
    case_loop rows_loops[] = {{page_rows ? page_rows : rows, &stride}, {heads, &head_stride}};
    case_loop outer[] = {{pages, &page_stride}, {array ? 1 : layers, &layer_stride}};
    if (inside && tiled && heads == 1 && !block && pick(2)) { /* behind each row */
        const int64_t row = (piece + align - 1) / align * align;
        f->scale_offset = row;
        span = case_nest(pick, row + tiles * size, rows_loops, 1, align);
        f->scale_stride = pick(2) ? stride : 0;
    } else { /* behind all rows of the page, or, without pages, of the table */
        span = case_nest(pick, piece, rows_loops, 2, align);
        if (inside) {
            case_loop scales[] = {{in_page, &f->scale_stride}, {tiles, &f->scale_tile_stride}};
            f->scale_offset = (span + align - 1) / align * align + (int64_t)pick(3) * align;
            span = f->scale_offset + (block ? block : case_nest(pick, size, scales, 2, size));
            if (!tiled)
                f->scale_stride = 0;
            if (f->scale == KVPRIM_SCALE_TENSOR)
                f->scale_tile_stride = 0;
        }
    }
    span = case_nest(pick, span, outer, 2, align);
    t->stride = stride, t->head_stride = heads > 1 ? head_stride : 0, t->page_stride = page_rows ? page_stride : 0;
    part->layer_stride = array || layers == 1 ? 0 : layer_stride;
    for (int32_t l = 0; l < (array ? layers : 1); l++)
        bases[l] = case_take(c, span, align, (int64_t)pick((uint64_t)(16 / align)));
    t->data = bases[0];
    part->layers = array ? bases : NULL;
    if (f->scale && !inside) {
        int64_t tile_stride = 0, row_stride = 0, scale_page_stride = 0, scale_layer_stride = 0;
        case_loop loops[] = {{tiled ? pages : 1, &scale_page_stride},
                             {layers, &scale_layer_stride},
                             {tiles, &tile_stride},
                             {in_page, &row_stride}};
        const int packed = pick(2) == 0;
        span = packed ? tiles * size * (tiled ? pages * in_page : 1) * layers
                      : case_nest(pick, block ? block : size, loops, block ? 2 : 4, size);
        f->scales = case_take(c, span, size, (int64_t)pick((uint64_t)(16 / size)));
        f->scales_bytes = pick(2) ? span : 0;
        if (!packed) {
            f->scale_tile_stride = f->scale == KVPRIM_SCALE_TENSOR ? 0 : tile_stride;
            f->scale_stride = tiled ? row_stride : 0, f->scale_page_stride = tiled && page_rows ? scale_page_stride : 0;
            f->scale_layer_stride = scale_layer_stride;
        }
        if (!tiled && layers > 1 && f->scale_layer_stride == 0)
            f->scale_layer_stride = KVPRIM_SCALES_SHARED;
    }
}

/* Rows that a side names: some padding, some past the table, and none twice if it is written. */
static void case_index(convert_case *c, case_pick *pick, oracle_side *part, int distinct)
{
    const int64_t rows = part->table.rows, count = c->move.count;
    part->type = pick(2) ? KVPRIM_I64 : KVPRIM_I32;
    part->base = (int64_t)pick(3) - 1;
    part->stride = pick(3) ? 0 : 1 + (int64_t)pick(3);
    const int64_t step = part->stride ? part->stride : 1, size = part->type == KVPRIM_I64 ? 8 : 4;
    unsigned char *const at = case_take(c, count * step * size, size, 0);
    unsigned char taken[CASE_ROWS] = {0};
    part->index = at;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = (int64_t)pick((uint64_t)rows);
        for (int64_t k = 0; distinct && k < rows && taken[row]; k++)
            row = (row + 1) % rows;
        const int skip = pick(8) == 0 || (distinct && taken[row]);
        const int64_t value = part->base + (!skip ? row : pick(2) ? rows + (int64_t)pick(5) : -1 - (int64_t)pick(5));
        const int32_t value32 = (int32_t)value;
        if (!skip)
            taken[row] = 1;
        memcpy(at + i * step * size, size == 8 ? (const void *)&value : (const void *)&value32, (size_t)size);
    }
}

/* All elements and scales of the source, and the scales that a store reads. */
static void case_values(convert_case *c, case_pick *pick)
{
    for (int k = 0; k < 2; k++) {
        const oracle_side *const part = k ? &c->move.src : &c->move.dst;
        const kvprim_format *const f = k ? &c->src : &c->dst;
        const int64_t n = c->move.row_bytes * oracle_packed(c->src.dtype) / oracle_type_of(c->src.dtype)->bytes;
        for (int32_t l = 0; l < c->move.layers; l++)
            for (int64_t row = 0; row < part->table.rows; row++)
                for (int64_t e = 0; e < n; e++) {
                    unsigned char *const base = oracle_layer(part, l);
                    if (k)
                        oracle_put(f->dtype, oracle_element(part, base, row, n, e), e % oracle_packed(f->dtype),
                                   case_element(pick, f->dtype));
                    const float scale = f->scale && e % oracle_tile(part, n) == 0 ? case_scale(pick) : 0;
                    if (f->scale_dtype == KVPRIM_F16 && e % oracle_tile(part, n) == 0)
                        oracle_put_code(oracle_scale(part, l, row, n, e), 2, (uint32_t)pick(65536));
                    else if (f->scale && e % oracle_tile(part, n) == 0 && oracle_scale_bytes(f->scale_dtype) == 4)
                        memcpy(oracle_scale(part, l, row, n, e), &scale, sizeof scale);
                    else if (f->scale && e % oracle_tile(part, n) == 0)
                        *oracle_scale(part, l, row, n, e) = (unsigned char)(pick(8) ? 115 + pick(24) : pick(256));
                }
    }
}

/* Which descriptor stands for the move. */
enum { case_gather, case_store, case_transfer };

/* `values` chooses elements and scales. `k`: NULL, or a store's K, of which this is the V. */
static void case_make(convert_case *c, case_pick *pick, case_pick *values, unsigned char *block, int operation,
                      const convert_case *k)
{
    static const kvprim_dtype floats[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32},
                              quantised[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8, KVPRIM_F4E2M1, KVPRIM_INT4};
    const int kind = (int)pick(5);
    memset(c, 0, sizeof *c);
    c->memory = block;
    c->used = k ? k->used : 0;
    c->src.dtype = kind < 2 ? quantised[pick(5)] : floats[pick(3)];
    c->dst.dtype = kind == 2 || kind == 3 ? quantised[pick(5)] : floats[pick(3)];
    if (c->dst.dtype == c->src.dtype)
        c->dst.dtype = c->src.dtype == KVPRIM_F16 ? KVPRIM_F32 : KVPRIM_F16;
    const int64_t packed = oracle_packed(c->src.dtype) * oracle_packed(c->dst.dtype);
    const int64_t n = pick(4) ? packed * (1 + (int64_t)pick(packed > 1 ? 20 : 40)) : 8 * (1 + (int64_t)pick(20));
    const int64_t most = n > 40 ? 6 : CASE_ROWS;
    c->move.row_bytes = oracle_bytes(c->src.dtype, n);
    c->move.layers = operation == case_transfer ? 1 + (int32_t)pick(CASE_LAYERS) : 1;
    c->move.zero = operation == case_gather && pick(4);
    const int dst_index = operation == case_store || (operation == case_transfer && pick(2));
    const int src_index = operation == case_gather || (operation == case_transfer && pick(2));
    const int64_t dst_rows = k ? k->move.dst.table.rows : 1 + (int64_t)pick((uint64_t)most);
    const int64_t src_rows = k ? k->move.src.table.rows : 1 + (int64_t)pick((uint64_t)most);
    const int64_t limit = !dst_index && !src_index ? (dst_rows < src_rows ? dst_rows : src_rows)
                          : !dst_index             ? dst_rows
                          : !src_index             ? src_rows
                                                   : CASE_COUNT;
    c->move.count = k ? k->move.count : 1 + (int64_t)pick((uint64_t)limit);
    case_side(c, pick, 1, n, c->move.layers, dst_rows);
    case_side(c, pick, 0, n, c->move.layers, src_rows);
    if (operation != case_transfer) { /* one layer, and no array of them */
        c->move.dst.layers = c->move.src.layers = NULL;
    }
    if (dst_index && !k)
        case_index(c, pick, &c->move.dst, 1);
    if (src_index)
        case_index(c, pick, &c->move.src, 0);
    uint32_t *const counters = (uint32_t *)(void *)case_take(c, 8, 4, 0);
    counters[0] = 5, counters[1] = 7;
    c->move.rejected = pick(3) && !k ? counters : NULL;
    c->dst.nans = pick(3) ? counters + 1 : NULL;
    if (k) {
        oracle_side *const part = &c->move.dst;
        part->index = k->move.dst.index, part->type = k->move.dst.type;
        part->base = k->move.dst.base, part->stride = k->move.dst.stride;
    }
    case_values(c, values);
}

/* Runs it by kvprim's descriptors, or only checks them. `v`: NULL, or the V of a store. */
static kvprim_status case_run(const convert_case *c, const convert_case *v, int operation, int check_only)
{
    const oracle_move *const m = &c->move;
    if (operation == case_gather) {
        kvprim_gather_desc d;
        memset(&d, 0, sizeof d);
        d.dst = m->dst.table, d.src = m->src.table, d.row_bytes = m->row_bytes;
        d.index = m->src.index, d.index_type = m->src.type, d.index_base = m->src.base, d.index_stride = m->src.stride;
        d.count = m->count, d.rejected = m->rejected, d.keep_padding = !m->zero;
        return check_only ? kvprim_gather_check(&d, NULL) : kvprim_gather(&d);
    }
    if (operation == case_store) {
        kvprim_store_desc d;
        memset(&d, 0, sizeof d);
        d.k_cache = m->dst.table, d.k = m->src.table, d.k_bytes = m->row_bytes;
        d.slot = m->dst.index, d.slot_type = m->dst.type, d.slot_base = m->dst.base, d.slot_stride = m->dst.stride;
        d.count = m->count, d.rejected = m->rejected;
        if (v)
            d.v_cache = v->move.dst.table, d.v = v->move.src.table, d.v_bytes = v->move.row_bytes;
        return check_only ? kvprim_store_check(&d, NULL) : kvprim_store(&d);
    }
    kvprim_transfer_desc d;
    memset(&d, 0, sizeof d);
    d.dst = m->dst.table, d.src = m->src.table, d.row_bytes = m->row_bytes, d.layers = m->layers;
    d.dst_layers = m->dst.layers, d.src_layers = m->src.layers;
    d.dst_layer_stride = m->dst.layer_stride, d.src_layer_stride = m->src.layer_stride;
    d.dst_index = m->dst.index, d.dst_index_type = m->dst.type, d.dst_index_base = m->dst.base;
    d.src_index = m->src.index, d.src_index_type = m->src.type, d.src_index_base = m->src.base;
    d.dst_index_stride = m->dst.stride, d.src_index_stride = m->src.stride;
    d.count = m->count, d.rejected = m->rejected;
    return check_only ? kvprim_transfer_check(&d, NULL) : kvprim_transfer(&d);
}

#endif

/* SPDX-License-Identifier: MIT */
/* Moves that convert, on libFuzzer's terms. An input lays out a move as tests/core/convert_cases.h does, and may then
   spoil some of its numbers. What is right must be taken, and must do to every byte of its memory what the oracle does.
   What is spoiled may be refused, and then nothing is written. If it is taken, no byte that it writes may be anything
   else that the call uses, and all elements and scales must be aligned; and the bytes must be right again. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

#include "../core/convert_cases.h"

static struct reach reaches[4] = {{"gather", "rows", 200, CASE_COUNT, 0, 0, 0},
                                  {"store", "rows", 200, CASE_COUNT, 0, 0, 0},
                                  {"transfer", "rows", 200, CASE_COUNT, 0, 0, 0}};

static struct input in;

static uint64_t pick(uint64_t n)
{
    return take(&in, n <= 256 ? 1 : 3) % n;
}

typedef __int128 wide;

/* ---- what is spoiled ---- */

static int64_t spoiled(int64_t value)
{
    static const int64_t steps[] = {1, -1, 2, -2, 4, -4, 8, 16, -16, 64};
    switch (take(&in, 1) % 8) {
    case 0:
        return (int64_t)take(&in, 8);
    case 1:
        return -value;
    case 2:
        return value / 2;
    case 3:
        return (int64_t)take(&in, 1);
    default:
        return (int64_t)((uint64_t)value + (uint64_t)steps[take(&in, 1) % 10]);
    }
}

/* Changes one number. Strides of tables do not become 0: the oracle has no defaults for them. */
static void spoil(convert_case *c)
{
    const int dst = (int)pick(2);
    kvprim_format *const f = dst ? &c->dst : &c->src;
    kvprim_table *const t = dst ? &c->move.dst.table : &c->move.src.table;
    int64_t *const strides[] = {&t->stride, &t->head_stride, &t->page_stride, &t->page_rows, &t->rows};
    int64_t *const numbers[] = {&f->tile,         &f->scale_offset,      &f->scale_tile_stride,
                                &f->scale_stride, &f->scale_page_stride, &f->scale_layer_stride,
                                &f->scales_bytes};
    const uint64_t which = pick(26);
    if (which < 5) {
        const int64_t value = spoiled(*strides[which]);
        *strides[which] = value ? value : *strides[which];
    } else if (which < 16) {
        int64_t *const number = numbers[(which - 5) % 7];
        *number = spoiled(*number);
    } else if (which == 16) {
        c->move.row_bytes = spoiled(c->move.row_bytes);
    } else if (which == 17) {
        f->scales = f->scales ? (void *)((char *)f->scales + (int64_t)pick(64) - 32) : c->memory + pick(c->used);
    } else if (which == 18) {
        t->data = (char *)t->data + (int64_t)pick(64) - 32;
    } else if (which == 19) {
        f->scale = (kvprim_scale_kind)spoiled(f->scale);
    } else if (which == 20) {
        f->dtype = (kvprim_dtype)(16 + pick(14));
    } else if (which == 21) {
        f->scale_dtype = (kvprim_dtype)(pick(2) ? 0 : 16 + pick(12));
    } else if (which == 22) {
        c->dst.nans = (uint32_t *)(void *)(c->memory + pick(c->used));
    } else if (which == 23) {
        f->scale_heads = (int32_t)spoiled(f->scale_heads);
    } else if (which == 24) {
        f->scale_order = (int32_t)pick(3);
    } else {
        (pick(2) ? &c->dst : &c->src)->scale_inverse = (int32_t)pick(3);
    }
}

/* ---- judgement of what was taken ---- */

enum { nobody, index_bytes, counter_bytes, nan_bytes, src_bytes, scale_bytes, first_row };
static uint16_t owners[2][CASE_BYTES], *owner = owners[0]; /* of each byte, in K's move and in V's */
static int outside, shared, askew; /* of the block; two owners, of whom one writes; not aligned */

static void own(const convert_case *c, wide at, int64_t bytes, int who, int writes, int64_t align)
{
    if (at < 0 || at + bytes > CASE_BYTES) {
        outside = 1;
        return;
    }
    askew |= ((uintptr_t)c->memory + (uint64_t)at) % (uint64_t)align != 0;
    for (int64_t b = 0; b < bytes; b++) {
        uint16_t *const o = &owner[at + b];
        const int others_write = (*o & 0x8000) != 0, other = *o & 0x7fff;
        shared |= other != nobody && (other != who || who == scale_bytes) && (writes || others_write);
        *o = (uint16_t)(who | (writes || others_write ? 0x8000 : 0));
    }
}

/* All elements and scales of a side's rows. Layers in an array may overlap each other, and are looked at one by one.
   Returns 0 if a number is too large to multiply. */
static int own_side(const convert_case *c, int dst, int32_t layer)
{
    const oracle_side *const part = dst ? &c->move.dst : &c->move.src;
    const kvprim_table *const t = &part->table;
    const kvprim_format *const f = t->format;
    const int64_t limit = (int64_t)1 << 40, size = oracle_scale_bytes(f->scale_dtype);
    const int64_t n = c->move.row_bytes * oracle_packed(c->src.dtype) / oracle_type_of(c->src.dtype)->bytes;
    const int64_t bytes = oracle_type_of(f->dtype)->bytes;
    const int64_t layer_stride = f->scale_layer_stride == KVPRIM_SCALES_SHARED ? 0 : f->scale_layer_stride;
    const int64_t numbers[] = {t->stride,       t->page_stride,       t->head_stride, f->scale_offset,
                               f->scale_stride, f->scale_page_stride, layer_stride,   f->scale_tile_stride};
    const int64_t rows = part->index ? t->rows : c->move.count;
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
        if (numbers[k] < 0 || numbers[k] > limit)
            return 0;
    if (rows > 4096 || n > 4096 || t->rows > limit || t->page_rows > limit || (t->page_rows && !t->page_stride))
        return 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t e = 0; e < n; e++) {
            unsigned char *const base = oracle_layer(part, layer);
            own(c, (wide)(uintptr_t)oracle_element(part, base, row, n, e) - (wide)(uintptr_t)c->memory, bytes,
                dst ? first_row + (int)row + 4096 * layer % 28672 : src_bytes, dst, bytes);
        }
    const int tiled = f->scale == KVPRIM_SCALE_TILE;
    for (int64_t row = 0; f->scale && row < (tiled ? rows : 1); row++)
        for (int64_t e = 0; e < n; e += oracle_tile(part, n)) {
            const unsigned char *const at = oracle_scale(part, layer, row, n, e);
            own(c, (wide)(uintptr_t)at - (wide)(uintptr_t)c->memory, size, dst && tiled ? scale_bytes : src_bytes,
                dst && tiled, size);
            outside |= f->scales_bytes && at + size > (unsigned char *)f->scales + f->scales_bytes;
        }
    return 1;
}

/* Whether the oracle can run what was taken. What it writes must be its own. V's slots are K's. */
static int judge(const convert_case *c, int is_v)
{
    const oracle_move *const m = &c->move;
    const int arrays = m->dst.layers || m->src.layers;
    owner = owners[is_v];
    outside = shared = askew = 0;
    for (int32_t first = 0; first < (arrays ? m->layers : 1); first++) {
        memset(owner, 0, sizeof owners[0]);
        for (int32_t l = first; l < (arrays ? first + 1 : m->layers); l++)
            if (!own_side(c, 1, l) || !own_side(c, 0, l))
                return 0;
        for (int k = 0; k < 2; k++) {
            const oracle_side *const part = k ? &m->src : &m->dst;
            const int64_t size = part->type == KVPRIM_I64 ? 8 : 4, step = part->stride ? part->stride : 1;
            if (part->index && !is_v)
                own(c, (wide)(uintptr_t)part->index - (wide)(uintptr_t)c->memory, ((m->count - 1) * step + 1) * size,
                    index_bytes, 0, size);
        }
        if (m->rejected)
            own(c, (wide)(uintptr_t)m->rejected - (wide)(uintptr_t)c->memory, 4, counter_bytes, 1, 4);
        if (c->dst.nans)
            own(c, (wide)(uintptr_t)c->dst.nans - (wide)(uintptr_t)c->memory, 4, nan_bytes, 1, 4);
    }
    if (outside)
        return 0;
    require(!shared, "took a move that writes what belongs to others");
    require(!askew, "took a move whose elements or scales are not aligned");
    return 1;
}

/* K's bytes and V's. Both may count the same NaNs. Rows of caches that lie differently are not compared by kvprim. */
static void judge_pair(void)
{
    for (size_t b = 0; b < CASE_BYTES; b++) {
        const int k = owners[0][b] & 0x7fff, v = owners[1][b] & 0x7fff;
        const int writes = (owners[0][b] | owners[1][b]) & 0x8000;
        const int rows = k >= first_row && v >= first_row, nans = k == nan_bytes && v == nan_bytes;
        require(!k || !v || !writes || rows || nans, "took a store that writes what belongs to K and to V");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static _Alignas(16) unsigned char block[CASE_BYTES], before[CASE_BYTES], want[CASE_BYTES];
    static convert_case c, v;
    in = (struct input){data, data + size};
    const int operation = (int)pick(3), spoils = pick(3) ? 0 : 1 + (int)pick(2);
    const int has_v = operation == case_store && pick(2);
    random_state = take(&in, 4);
    fill_fast(block, sizeof block);
    case_make(&c, pick, below, block, operation, NULL);
    if (has_v)
        case_make(&v, pick, below, block, operation, &c);
    for (int k = 0; k < spoils; k++)
        spoil(has_v && pick(2) ? &v : &c);
    if (has_v && spoils && pick(2))
        v.move.dst.table.data = (char *)c.move.dst.table.data + pick(c.used);
    (void)kvprim_fail(KVPRIM_OK, "%s", "");
    const kvprim_status checked = case_run(&c, has_v ? &v : NULL, operation, 1);
    require((checked == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    require(spoils || checked == KVPRIM_OK, "refused a good move");
    int can_run = 1;
    if (checked == KVPRIM_OK)
        can_run = c.dst.dtype != c.src.dtype && judge(&c, 0);
    if (checked == KVPRIM_OK && has_v && can_run)
        can_run = v.dst.dtype != v.src.dtype && judge(&v, 1);
    if (checked == KVPRIM_OK && has_v && can_run)
        judge_pair();
    if (can_run) {
        memcpy(before, block, sizeof block);
        if (checked == KVPRIM_OK)
            oracle_run(&c.move);
        if (checked == KVPRIM_OK && has_v)
            oracle_run(&v.move);
        memcpy(want, block, sizeof block);
        memcpy(block, before, sizeof block);
        require(case_run(&c, has_v ? &v : NULL, operation, 0) == checked, "the check and the call differ");
        require(memcmp(block, want, sizeof block) == 0,
                checked == KVPRIM_OK ? "bytes differ" : "wrote in spite of an error");
    }
    count_reach(&reaches[operation], size, checked == KVPRIM_OK && can_run ? (uint64_t)c.move.count : 0);
    return 0;
}

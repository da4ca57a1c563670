/* SPDX-License-Identifier: MIT */
/* Compares kvprim_gather, _store and _transfer with a byte-by-byte reading of their contracts: tables with pages and
   heads in any order of strides, tables that share memory, wild sizes and indices. The reference follows only the text
   in kvprim.h and calculates in 128 bits. kvprim must accept some descriptors that reach outside the memory they have
   here, because it cannot know that. Those are only checked and not run. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "fuzz.h"

enum { MAX_COUNT = 80, MAX_ROW = 300, MAX_LAYERS = 3, MAX_BYTES = 1 << 15, MAX_BLOCKS = 4 * MAX_LAYERS + 2 };

static struct reach reaches[4] = {{"gather", "rows", 300, MAX_COUNT, 0, 0, 0},
                                  {"store", "rows", 300, MAX_COUNT, 0, 0, 0},
                                  {"transfer", "rows of all layers", 400, MAX_COUNT *MAX_LAYERS, 0, 0, 0}};

__extension__ typedef __int128 wide;
static const wide too_much = (wide)1 << 63;      /* saturates, so that the product of two fits */
static const wide address_space = (wide)1 << 57; /* a table that exceeds it may be refused for that */

static wide least(wide a, wide b)
{
    return a < b ? a : b;
}

static wide most(wide a, wide b)
{
    return a > b ? a : b;
}

static wide times(wide a, wide b) /* of two that are not negative */
{
    return least(least(a, too_much) * least(b, too_much), too_much);
}

static int64_t take_wild(struct input *in)
{
    const uint64_t kind = take(in, 1) % 4, power = (uint64_t)1 << take(in, 1) % 64, near = take(in, 1) % 5;
    const uint64_t around = kind == 1 ? 0 : kind == 2 ? power : (uint64_t)INT64_MAX;
    return (int64_t)(kind == 0 ? take(in, 8) : around + near - 2); /* wraps to the most negative */
}

/* ---- memory: blocks of exactly the bytes that may be touched, and what they should hold afterwards ---- */

static struct block {
    uint8_t *now, *expected;
    size_t bytes;
} blocks[MAX_BLOCKS];
static size_t blocks_count, index_blocks; /* those of indices come first */

/* What the reference wrote: several values for one byte if destinations repeat. */
static struct write {
    uint8_t *at;
    const uint8_t *value;
    size_t bytes;
} writes[MAX_COUNT * MAX_ROW * MAX_LAYERS];
static uint8_t values[MAX_COUNT * MAX_ROW * MAX_LAYERS];
static size_t writes_count, values_count;

static uint8_t *new_block(size_t bytes)
{
    require(blocks_count < MAX_BLOCKS, "too few blocks");
    struct block *const b = &blocks[blocks_count++];
    b->now = new_bytes(bytes);
    b->expected = memcpy(allocate(bytes), b->now, bytes);
    b->bytes = bytes;
    return b->now;
}

static void free_blocks(void)
{
    for (size_t i = 0; i < blocks_count; i++) {
        free(blocks[i].now);
        free(blocks[i].expected);
    }
    blocks_count = index_blocks = writes_count = values_count = 0;
}

/* Expects what `from` holds now; NULL: zeros. */
static void expect_bytes(uint8_t *at, const uint8_t *from, size_t bytes)
{
    uint8_t *const value = values + values_count;
    require(writes_count < sizeof writes / sizeof *writes && values_count + bytes <= sizeof values, "too few writes");
    writes[writes_count++] = (struct write){at, value, bytes};
    values_count += bytes;
    if (from)
        memcpy(value, from, bytes);
    else
        memset(value, 0, bytes);
    for (size_t i = 0; i < blocks_count; i++) {
        const uintptr_t offset = (uintptr_t)at - (uintptr_t)blocks[i].now;
        if (offset < blocks[i].bytes && bytes <= blocks[i].bytes - offset) {
            memcpy(blocks[i].expected + offset, value, bytes);
            return;
        }
    }
    require(0, "the reference writes outside of the blocks");
}

static int was_written(const uint8_t *at)
{
    for (size_t i = 0; i < writes_count; i++) {
        const uintptr_t offset = (uintptr_t)at - (uintptr_t)writes[i].at;
        if (offset < writes[i].bytes && writes[i].value[offset] == *at)
            return 1;
    }
    return 0;
}

static void compare_blocks(void)
{
    for (size_t i = 0; i < blocks_count; i++) {
        const struct block *const b = &blocks[i];
        if (memcmp(b->now, b->expected, b->bytes) == 0)
            continue;
        for (size_t j = 0; j < b->bytes; j++)
            require(b->now[j] == b->expected[j] || was_written(&b->now[j]), "a byte is wrong");
    }
}

/* ---- the reference ---- */

/* One bit per status with which a descriptor must, or may, be refused. `may` is for what the contract leaves open. */
struct verdict {
    unsigned must, may;
    int outside; /* valid, but it would leave the memory that it has here */
};

#define BIT(status) (1u << (status))

static void must(struct verdict *v, int wrong, kvprim_status status)
{
    v->must |= wrong ? BIT(status) : 0;
}

static void may(struct verdict *v, int doubtful, kvprim_status status)
{
    v->may |= doubtful ? BIT(status) : 0;
}

/* The layers of one side. Zero fields: one layer; `stride` apart; at `bases`, which only the executing side reads */
struct stack {
    int32_t layers;
    int64_t stride;
    void **bases;
    int device;
};

/* A table with its defaults filled in, and its layers. */
struct layout {
    kvprim_table *table;
    wide piece, stride, page_rows, page_stride, heads, head_stride, layers, layer_stride;
    wide used;   /* rows that may be touched: count, if no index leads to others */
    wide extent; /* bytes from a layer's start to the end of what is touched; 0 if the geometry is wrong */
    wide reach;  /* of all rows and layers, from table.data on */
    void **bases;
    int device;
};

struct dimension {
    wide stride, count;
};

/* From the innermost dimension out, each step must be at least as large as what it steps over. */
static int overlaps_itself(struct dimension *dims, size_t count, wide extent)
{
    for (; count; count--) {
        size_t inner = 0;
        for (size_t i = 1; i < count; i++)
            if (dims[i].stride < dims[inner].stride)
                inner = i;
        if (dims[inner].stride < extent)
            return 1;
        extent = least(extent + times(dims[inner].stride, dims[inner].count - 1), too_much);
        dims[inner] = dims[count - 1];
    }
    return 0;
}

static int rows_overlap(const struct layout *t, wide rows, wide rows_in_page)
{
    const wide pages = t->page_rows ? (rows + t->page_rows - 1) / t->page_rows : 1;
    const struct dimension all[] = {
        {t->stride, rows_in_page}, {t->page_stride, pages}, {t->head_stride, t->heads}, {t->layer_stride, t->layers}};
    struct dimension dims[4];
    size_t count = 0;
    for (size_t i = 0; rows > 0 && i < 4; i++)
        if (all[i].count > 1 && !(i == 3 && t->bases) &&
            !(i == 2 && t->head_stride == 0)) /* heads that share a piece */
            dims[count++] = all[i];
    return overlaps_itself(dims, count, t->piece);
}

static wide offset_of(const struct layout *t, wide row)
{
    return t->page_rows ? times(row / t->page_rows, t->page_stride) + times(row % t->page_rows, t->stride)
                        : times(row, t->stride);
}

/* Returns where the first `rows` rows end: in the last page, or in the one before if that reaches further. */
static wide extent_of(const struct layout *t, wide rows)
{
    if (rows == 0)
        return 0;
    wide last = offset_of(t, rows - 1);
    if (t->page_rows && rows > t->page_rows)
        last = most(last, offset_of(t, rows / t->page_rows * t->page_rows - 1));
    else if (t->page_rows == 0)
        last = times(rows - 1, t->stride);
    return least(last + times(t->heads - 1, t->head_stride) + t->piece, too_much);
}

/* source: every head may be the same piece. */
static struct layout judge_table(struct verdict *v, kvprim_table *judged, int64_t row_bytes, wide used,
                                 const struct stack *stack, int source)
{
    const kvprim_table table = *judged;
    const int shared = source && table.heads > 1 && table.head_stride == KVPRIM_HEADS_SHARED;
    const int64_t head_stride = shared ? 0 : table.head_stride;
    const int32_t layers = stack->layers;
    const int64_t layer_stride = stack->stride;
    void **const bases = stack->bases;
    const int negative = table.rows < 0 || table.stride < 0 || table.page_rows < 0 || table.heads < 0 || layers < 0 ||
                         (table.page_rows > 0 && table.page_stride < 0) || (table.heads > 1 && head_stride < 0) ||
                         (layers > 1 && !bases && layer_stride < 0);
    struct layout t = {.table = judged, .bases = bases, .device = stack->device};
    t.layers = most(layers, 1);
    const int wrong = negative || row_bytes < 1 || table.bytes < 0 || layers > 65536 ||
                      (table.heads > 1 && head_stride == 0 && !shared);
    must(v, wrong, KVPRIM_ERROR_SIZE);
    must(v, table.reserved != 0, KVPRIM_ERROR_ARGUMENT);
    may(v, table.page_stride < 0 || head_stride < 0 || layer_stride < 0, KVPRIM_ERROR_SIZE);
    if (wrong)
        return t;

    t.heads = most(table.heads, 1);
    t.piece = row_bytes / t.heads;
    t.stride = table.stride ? table.stride : shared || head_stride > t.piece ? t.piece : row_bytes;
    t.page_rows = table.page_rows;
    const wide in_page = t.page_rows ? t.page_rows : table.rows;
    t.head_stride = t.heads > 1 ? head_stride : t.piece;
    const wide page_packed = most(times(t.page_rows, t.stride), t.heads > 1 ? times(t.heads, t.head_stride) : 0);
    t.page_stride = table.page_stride > 0 ? table.page_stride : page_packed;
    const wide whole = t.page_rows ? (table.rows + t.page_rows - 1) / t.page_rows * t.page_rows : table.rows;
    /* packed layers: whole pages and rows, padding included */
    const wide rows_packed = times(least(in_page, most(table.rows, 0)), t.stride);
    const wide pages_packed = t.page_rows ? times(whole / t.page_rows, t.page_stride) : 0;
    const wide heads_packed = t.heads > 1 ? times(t.heads, t.head_stride) : 0;
    const wide layer_packed = most(rows_packed, most(pages_packed, heads_packed));
    t.layer_stride = layer_stride > 0 ? layer_stride : layer_packed;
    t.used = most(least(used, table.rows), 0);

    const int bad = row_bytes % t.heads != 0 || t.stride < t.piece;
    const int overlap = rows_overlap(&t, t.used, least(in_page, t.used));
    must(v, bad || overlap, KVPRIM_ERROR_SIZE);
    /* rows that exist but are not used may be judged too, and so may strides that no row needs */
    may(v, rows_overlap(&t, most(table.rows, 1), most(in_page, 1)) || t.page_stride < t.piece, KVPRIM_ERROR_SIZE);
    const wide other_layers = bases ? 0 : times(t.layers - 1, t.layer_stride);
    const wide all = extent_of(&t, whole) + other_layers;
    may(v, most(all, most(page_packed, t.head_stride)) >= address_space, KVPRIM_ERROR_SIZE);
    if (!bad && !overlap)
        t.extent = extent_of(&t, t.used);
    t.reach = table.rows > 0 ? extent_of(&t, table.rows) + other_layers : 0;
    must(v, table.bytes > 0 && t.reach > table.bytes, KVPRIM_ERROR_SIZE);
    v->outside |= t.extent > MAX_BYTES || other_layers > MAX_BYTES || t.layers > MAX_LAYERS || row_bytes > MAX_ROW;
    return t;
}

static uint8_t *layer_of(const struct layout *t, wide layer)
{
    const uintptr_t layers = (uintptr_t)t->table->data; /* NULL if there are no rows: no pointer to add to */
    return t->bases ? t->bases[layer] : (uint8_t *)(layers + (uintptr_t)(layer * t->layer_stride));
}

static uint8_t *piece_of(const struct layout *t, wide layer, wide row, wide head)
{
    return layer_of(t, layer) + (int64_t)(offset_of(t, row) + head * t->head_stride);
}

static void judge_memory(struct verdict *v, const struct layout *t)
{
    must(v, t->table->rows == 0 && (t->table->data || t->bases), KVPRIM_ERROR_SIZE);
    for (wide layer = 0; layer < (t->bases ? t->layers : 1); layer++) { /* no array has more than MAX_LAYERS */
        const void *const base = t->bases ? t->bases[layer] : t->table->data;
        must(v, !base && t->used > 0 && !t->device, KVPRIM_ERROR_NULL);
        may(v, !base && !t->device, KVPRIM_ERROR_NULL);
        v->outside |= !base;
    }
}

static void judge_overlap(struct verdict *v, const struct layout *a, const struct layout *b)
{
    may(v, v->outside, KVPRIM_ERROR_OVERLAP);
    if (v->outside || !a->extent || !b->extent)
        return;
    for (wide i = 0; i < a->layers; i++)
        for (wide j = 0; j < b->layers; j++) {
            const wide x = (wide)(uintptr_t)layer_of(a, i), y = (wide)(uintptr_t)layer_of(b, j);
            if (!a->device && !b->device)
                must(v, x < y + b->extent && y < x + a->extent, KVPRIM_ERROR_OVERLAP);
            else /* nobody notices */
                v->outside |= x < y + b->extent && y < x + a->extent;
        }
    /* layers by stride may be judged as one range, including the gaps between them */
    may(v, a->layers > 1 && !(a->bases && b->bases), KVPRIM_ERROR_OVERLAP);
}

/* Whether a row of one layer overlaps a row of another. Both layers have at most MAX_BYTES, and they overlap. */
static int rows_meet(const struct layout *a, const struct layout *b)
{
    static uint8_t taken[2 * MAX_BYTES];
    const uint8_t *const low = layer_of(a, 0) < layer_of(b, 0) ? layer_of(a, 0) : layer_of(b, 0);
    memset(taken, 0, sizeof taken);
    for (wide i = 0; i < a->used * a->heads; i++)
        memset(taken + (piece_of(a, 0, i / a->heads, i % a->heads) - low), 1, (size_t)a->piece);
    for (wide i = 0; i < b->used * b->heads; i++)
        if (memchr(taken + (piece_of(b, 0, i / b->heads, i % b->heads) - low), 1, (size_t)b->piece))
            return 1;
    return 0;
}

/* K and V may interleave. */
static void judge_pair(struct verdict *v, const struct layout *k, const struct layout *v_cache)
{
    struct verdict shared = {0, 0, v->outside};
    judge_overlap(&shared, k, v_cache);
    may(v, v->outside, KVPRIM_ERROR_OVERLAP);
    must(v, shared.must && rows_meet(k, v_cache), KVPRIM_ERROR_OVERLAP);
}

/* How a side names its rows. `data` NULL: row i. */
struct index_list {
    const void *data;
    kvprim_index_type type;
    int64_t base, stride;
};

/* Returns the row of index i exactly: it may exceed 64 bits. */
static wide row_of(const struct index_list *x, int64_t i)
{
    const int64_t at = i * (x->stride ? x->stride : 1);
    if (!x->data)
        return i;
    return (x->type == KVPRIM_I64 ? (wide)((const int64_t *)x->data)[at] : (wide)((const int32_t *)x->data)[at]) -
           x->base;
}

/* The heads of dst and src may divide a row differently. */
static void expect_row(const struct layout *dst, wide dst_row, const struct layout *src, wide src_row)
{
    const wide row_bytes = dst->piece * dst->heads;
    for (wide layer = 0; layer < dst->layers; layer++)
        for (wide at = 0, bytes; at < row_bytes; at += bytes) {
            uint8_t *const to = piece_of(dst, layer, dst_row, at / dst->piece);
            const uint8_t *const from = src ? piece_of(src, layer, src_row, at / src->piece) : NULL;
            const wide skip_to = at % dst->piece, skip_from = src ? at % src->piece : 0;
            bytes = least(dst->piece - skip_to, src ? src->piece - skip_from : row_bytes);
            expect_bytes(to + (size_t)skip_to, from ? from + (size_t)skip_from : NULL, (size_t)bytes);
        }
}

/* ---- descriptors from input ---- */

/* Makes strides of dimensions that enclose each other in any order, some with padding; or a packed table. */
static kvprim_table take_table(struct input *in, int64_t rows, int64_t row_bytes)
{
    kvprim_table t;
    memset(&t, 0, sizeof t);
    t.rows = rows;
    t.heads = chance(in, 2) ? (int32_t)(take(in, 1) % 5) : 0;
    if (t.heads > 1 && row_bytes % t.heads != 0 && !chance(in, 16))
        t.heads = 1;
    t.page_rows = chance(in, 2) ? (int64_t)(take(in, 1) % 6) : 0;
    const int64_t in_page = t.page_rows ? t.page_rows : rows, pages = t.page_rows ? (rows + in_page - 1) / in_page : 1;
    if (t.heads > 1)
        t.head_stride = (in_page > 1 ? in_page : 1) * (row_bytes / t.heads);
    if (chance(in, 2))
        return t;
    int64_t *const strides[] = {&t.stride, &t.page_stride, &t.head_stride};
    const int64_t counts[] = {in_page, pages, t.heads > 1 ? t.heads : 1};
    int64_t extent = t.heads > 1 ? row_bytes / t.heads : row_bytes;
    const size_t first = take(in, 1) % 3, step = 1 + take(in, 1) % 2;
    for (size_t i = 0; i < 3; i++) {
        const size_t k = (first + i * step) % 3;
        *strides[k] = extent + (chance(in, 2) ? (int64_t)(take(in, 1) % 20) : 0) - chance(in, 64);
        extent += *strides[k] * (counts[k] > 1 ? counts[k] - 1 : 0);
    }
    return t;
}

/* Sets `bytes` to exactly what the table reaches, or to a byte more or less. */
static void take_bytes(struct input *in, kvprim_table *t, int64_t row_bytes, const struct stack *stack, int source)
{
    struct verdict ignored = {0, 0, 0};
    if (!chance(in, 4))
        return;
    const wide reach = judge_table(&ignored, t, row_bytes, t->rows, stack, source).reach;
    t->bytes = chance(in, 16) ? take_wild(in) : (int64_t)least(reach, MAX_BYTES) + (int64_t)(take(in, 1) % 3) - 1;
}

static void spoil_table(struct input *in, kvprim_table *t)
{
    t->reserved = chance(in, 200);
    if (!chance(in, 16))
        return;
    int64_t *const fields[] = {&t->rows, &t->stride, &t->page_rows, &t->page_stride, &t->head_stride};
    const uint64_t field = take(in, 1) % 6;
    const int64_t value = take_wild(in);
    if (field < 5)
        *fields[field] = value;
    else
        t->heads = (int32_t)(uint64_t)value;
}

/* Makes `count` indices around [0, rows) + base, some of them wild, in a block of exactly their size. They are `stride`
   elements apart. */
static void *take_index(struct input *in, struct index_list *x, int64_t count, int64_t rows)
{
    const size_t width = x->type == KVPRIM_I64 ? 8 : 4, step = (size_t)(x->stride ? x->stride : 1);
    uint8_t *const index = new_block(count > 0 ? (((size_t)count - 1) * step + 1) * width : 0);
    const uint64_t range = (uint64_t)(rows < 0 || rows > 64 ? 64 : rows) + 4;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t row = take(in, 1) % range - 2 + (uint64_t)x->base; /* may wrap: only the value counts */
        const int64_t value = chance(in, 16) ? take_wild(in) : (int64_t)row;
        const int32_t narrow = (int32_t)(uint32_t)(uint64_t)value;
        memcpy(index + (size_t)i * step * width, width == 8 ? (const void *)&value : (const void *)&narrow, width);
    }
    struct block *const b = &blocks[blocks_count - 1];
    memcpy(b->expected, index, b->bytes); /* nothing writes there */
    index_blocks = blocks_count;
    x->data = index;
    return index;
}

/* Gives a table its memory: its own blocks, or a place in the previous table's block. */
static void place(struct input *in, struct layout *t)
{
    const wide layers = least(most(t->layers, 1), MAX_LAYERS);
    const wide others = t->bases ? 0 : least(times(layers - 1, t->layer_stride), MAX_BYTES);
    const size_t bytes = (size_t)(least(t->extent, MAX_BYTES) + others), shift = take(in, 1) % 17;
    const struct block *const before = blocks_count > index_blocks ? &blocks[blocks_count - 1] : NULL;
    for (wide l = 0; t->bases && l < layers; l++)
        t->bases[l] = chance(in, 64) ? NULL : l && chance(in, 64) ? t->bases[0] : new_block(bytes + shift) + shift;
    if (t->bases)
        return;
    if (before && bytes <= before->bytes && chance(in, 4))
        t->table->data = before->now + take(in, 2) % (before->bytes - bytes + 1);
    else
        t->table->data = new_block(shift + bytes + (chance(in, 4) ? take(in, 2) % 2000 : 0)) + shift;
    if ((t->table->rows == 0 && !chance(in, 8)) || chance(in, 64))
        t->table->data = NULL;
}

/* ---- the three operations ---- */

static const struct stack single = {0, 0, NULL, 0};

/* All three operations begin with this: the number of rows to move, their bytes, and the rows of the indexed side. */
struct shape {
    int64_t count, row_bytes, rows;
};

static int64_t take_row_bytes(struct input *in)
{
    return 1 + (int64_t)(chance(in, 4) ? take(in, 2) % MAX_ROW : take(in, 1) % 70);
}

static struct shape take_shape(struct input *in)
{
    const int many = chance(in, 2); /* more rows than kvprim prefetches ahead */
    const int64_t row_bytes = take_row_bytes(in), count = (int64_t)(take(in, 1) % (many ? MAX_COUNT + 1 : 8));
    return (struct shape){count, row_bytes, (int64_t)(take(in, 1) % (many ? MAX_COUNT + 1 : 20))};
}

static struct index_list take_list(struct input *in)
{
    struct index_list x = {NULL, KVPRIM_I32, 0, 0};
    x.base = chance(in, 8) ? take_wild(in) : chance(in, 4) ? (int64_t)(take(in, 1) % 3) : 0;
    x.stride = chance(in, 4) ? (int64_t)(take(in, 1) % 4) : 0;
    x.type = chance(in, 64) ? (kvprim_index_type)(chance(in, 2) ? 3 : 0) : chance(in, 2) ? KVPRIM_I64 : KVPRIM_I32;
    return x;
}

/* Rows of a side without an index: at least count, or sometimes one too few. */
static int64_t rows_for(struct input *in, int64_t count)
{
    return count + (chance(in, 2) ? (int64_t)(take(in, 1) % 4) : 0) - chance(in, 32);
}

static void spoil(struct input *in, int64_t *size)
{
    if (chance(in, 48))
        *size = take_wild(in);
}

/* `stride` is the descriptor's, which may be spoilt. */
static void judge_index(struct verdict *v, const struct index_list *x, int64_t stride, int64_t count)
{
    must(v, stride < 0, KVPRIM_ERROR_SIZE);
    may(v, stride > 1 << 20, KVPRIM_ERROR_SIZE); /* there may be a limit */
    may(v, times(times(most(count, 0), 8), most(stride, 1)) >= address_space, KVPRIM_ERROR_SIZE);
    must(v, !x->data, KVPRIM_ERROR_NULL);
    must(v, x->type != KVPRIM_I32 && x->type != KVPRIM_I64, KVPRIM_ERROR_ARGUMENT);
    v->outside |= stride != x->stride;
}

static uint32_t rejected, rejected_expected; /* descriptors point at the first */

static uint32_t *take_rejected(struct input *in)
{
    rejected = chance(in, 8) ? UINT32_MAX : (uint32_t)take(in, 1);
    (void)kvprim_fail(KVPRIM_OK, "%s", ""); /* so that an error's text must be its own */
    return chance(in, 4) ? NULL : &rejected;
}

/* Rows that an operation moves. A side without an index has a list without data. */
struct move {
    struct layout dst, src;
    struct index_list to, from;
    int zero; /* a row without a source is filled with zeros */
};

/* Compares the check's status with the verdict, and expects what the moves are to do. Returns whether the operation is to
   succeed. If not, it may still be called if the check refused it. */
static int expect_call(struct verdict *v, const struct move *moves, size_t n, int64_t count, kvprim_status checked,
                       uint32_t *counter)
{
    if (count == 0)
        v->must = v->may = 0;
    require(!v->must || checked != KVPRIM_OK, "a bad descriptor is accepted");
    require(checked == KVPRIM_OK || ((v->must | v->may) & BIT(checked)), "refused with a status that does not fit");
    require((checked == KVPRIM_OK) == (*kvprim_last_error() == 0), "status and text do not go together");
    const int good = checked == KVPRIM_OK && (count == 0 || !v->outside);
    rejected_expected = rejected;
    for (const struct move *m = moves; good && m < moves + n; m++)
        for (int64_t i = 0; i < count; i++) {
            const wide dst_rows = m->dst.table->rows, src_rows = m->src.table->rows;
            const wide to = row_of(&m->to, i), from = row_of(&m->from, i);
            rejected_expected += counter && m == moves && (to >= dst_rows || from >= src_rows);
            if (to < 0 || to >= dst_rows)
                continue;
            if (from >= 0 && from < src_rows)
                expect_row(&m->dst, to, &m->src, from);
            else if (m->zero)
                expect_row(&m->dst, to, NULL, 0);
        }
    return good;
}

/* Ends a call that has run, or must not run. `again`: the check of what the first check resolved. Returns how many rows
   were moved, and compared. */
static int64_t end_call(int good, kvprim_status checked, kvprim_status status, kvprim_status again, int64_t count,
                        int32_t layers)
{
    require(checked == status, "the check and the operation differ");
    require(rejected == rejected_expected, "rejected is wrong");
    compare_blocks();
    require(!good || again == KVPRIM_OK, "what was resolved is refused");
    return good ? count * layers : 0;
}

#define CALL(operation, moves, n)                                                                                      \
    const kvprim_status checked = operation##_check(&d, &resolved);                                                    \
    const int good = expect_call(&v, moves, n, d.count, checked, d.rejected);                                          \
    const kvprim_status status = good || checked != KVPRIM_OK ? operation(&d) : checked;                               \
    const kvprim_status again = good ? operation##_check(&resolved, NULL) : KVPRIM_OK

/* Each operation returns how many rows it moved, and has compared. */
static int64_t fuzz_gather(struct input *in)
{
    const struct shape s = take_shape(in);
    struct verdict v = {0, 0, 0};
    struct index_list x = take_list(in);
    kvprim_gather_desc resolved, d = {.row_bytes = s.row_bytes,
                                      .index_type = x.type,
                                      .index_base = x.base,
                                      .index_stride = x.stride,
                                      .count = s.count};
    d.src = take_table(in, s.rows, s.row_bytes);
    d.dst = take_table(in, rows_for(in, s.count), s.row_bytes);
    void *const index = take_index(in, &x, s.count, s.rows);
    x.data = d.index = chance(in, 64) ? NULL : index;
    spoil(in, &d.index_stride);
    spoil_table(in, &d.src);
    spoil_table(in, &d.dst);
    spoil(in, &d.row_bytes);
    spoil(in, &d.count);
    d.rejected = take_rejected(in);

    take_bytes(in, &d.src, d.row_bytes, &single, 1);
    take_bytes(in, &d.dst, d.row_bytes, &single, 0);
    struct move m = {.from = x, .zero = 1};
    m.src = judge_table(&v, &d.src, d.row_bytes, d.src.rows, &single, 1);
    m.dst = judge_table(&v, &d.dst, d.row_bytes, d.count, &single, 0);
    place(in, &m.src);
    place(in, &m.dst);
    must(&v, d.count < 0 || d.dst.rows < d.count, KVPRIM_ERROR_SIZE);
    v.outside |= d.count > s.count;
    judge_index(&v, &x, d.index_stride, d.count);
    judge_memory(&v, &m.src);
    judge_memory(&v, &m.dst);
    judge_overlap(&v, &m.dst, &m.src);
    CALL(kvprim_gather, &m, 1);
    return end_call(good, checked, status, again, d.count, 1);
}

/* What may be wrong with a store's sides: K's, V's, and the one beside the other. m[0] is K, m[1] is V. */
static void judge_store(struct verdict *v, const kvprim_store_desc *d, const struct verdict *v_half,
                        const struct move *m)
{
    must(v, d->count < 0 || d->k.rows < d->count, KVPRIM_ERROR_SIZE);
    judge_memory(v, &m[0].dst);
    judge_memory(v, &m[0].src);
    judge_overlap(v, &m[0].dst, &m[0].src);
    if (!d->v_cache.data) {
        must(v, d->k_cache.rows != 0 && (d->v.data || d->v_bytes), KVPRIM_ERROR_NULL);
        return;
    }
    v->must |= v_half->must;
    v->may |= v_half->may;
    v->outside |= v_half->outside;
    must(v, d->v.rows < d->count || d->k_cache.rows != d->v_cache.rows, KVPRIM_ERROR_SIZE);
    judge_memory(v, &m[1].dst);
    judge_memory(v, &m[1].src);
    judge_overlap(v, &m[1].dst, &m[1].src);
    judge_overlap(v, &m[1].dst, &m[0].src);
    judge_overlap(v, &m[0].dst, &m[1].src);
    judge_pair(v, &m[0].dst, &m[1].dst);
}

static kvprim_store_desc take_store(struct input *in, const struct shape *s, struct index_list *x)
{
    *x = take_list(in);
    kvprim_store_desc d = {.k_bytes = s->row_bytes,
                           .v_bytes = chance(in, 2) ? take_row_bytes(in) : s->row_bytes,
                           .slot_type = x->type,
                           .slot_base = x->base,
                           .slot_stride = x->stride,
                           .count = s->count};
    d.k_cache = take_table(in, s->rows, d.k_bytes);
    d.v_cache = take_table(in, s->rows, d.v_bytes);
    d.k = take_table(in, rows_for(in, s->count), d.k_bytes);
    d.v = take_table(in, rows_for(in, s->count), d.v_bytes);
    void *const slot = take_index(in, x, s->count, s->rows);
    x->data = d.slot = chance(in, 64) ? NULL : slot;
    spoil(in, &d.slot_stride);
    kvprim_table *const tables[] = {&d.k_cache, &d.v_cache, &d.k, &d.v};
    spoil_table(in, tables[take(in, 1) % 4]);
    spoil_table(in, tables[take(in, 1) % 4]);
    spoil(in, chance(in, 2) ? &d.k_bytes : &d.v_bytes);
    spoil(in, &d.count);
    d.rejected = take_rejected(in);
    return d;
}

static int64_t fuzz_store(struct input *in)
{
    const struct shape s = take_shape(in);
    struct verdict v = {0, 0, 0}, v_half = {0, 0, 0};
    struct index_list x;
    kvprim_store_desc d = take_store(in, &s, &x), resolved;
    const int k_only = chance(in, 4);
    take_bytes(in, &d.k_cache, d.k_bytes, &single, 0);
    take_bytes(in, &d.v, d.v_bytes, &single, 1);
    struct move m[2] = {{.to = x}, {.to = x}};
    m[0].dst = judge_table(&v, &d.k_cache, d.k_bytes, d.k_cache.rows, &single, 0);
    m[0].src = judge_table(&v, &d.k, d.k_bytes, d.count, &single, 1);
    m[1].dst = judge_table(&v_half, &d.v_cache, d.v_bytes, d.v_cache.rows, &single, 0);
    m[1].src = judge_table(&v_half, &d.v, d.v_bytes, d.count, &single, 1);
    place(in, &m[0].dst);
    place(in, &m[1].dst);
    place(in, &m[0].src);
    place(in, &m[1].src);
    if (k_only) {
        memset(&d.v_cache, 0, sizeof d.v_cache);
        memset(&d.v, 0, sizeof d.v);
        d.v_bytes = 0;
    }
    v.outside |= d.count > s.count;
    judge_index(&v, &x, d.slot_stride, d.count);
    judge_store(&v, &d, &v_half, m);
    CALL(kvprim_store, m, d.v_cache.data ? 2 : 1);
    return end_call(good, checked, status, again, d.count, 1);
}

/* No layer is written twice. */
static void judge_layers(struct verdict *v, const struct layout *dst)
{
    may(v, v->outside, KVPRIM_ERROR_OVERLAP);
    for (wide i = 0; dst->bases && !v->outside && i < dst->layers; i++)
        for (wide j = 0; j < i; j++)
            if (!dst->device)
                must(v, dst->extent && dst->bases[i] == dst->bases[j], KVPRIM_ERROR_OVERLAP);
            else
                v->outside |= dst->bases[i] == dst->bases[j];
}

/* dst and src are one cache. A row that is both written and read in one call has no bytes to expect. */
static void judge_same_cache(struct verdict *v, const kvprim_transfer_desc *d, const struct move *m, int same)
{
    must(v, d->same_cache != 0 && d->same_cache != 1, KVPRIM_ERROR_ARGUMENT);
    if (!d->same_cache) {
        judge_overlap(v, &m->dst, &m->src);
        return;
    }
    may(v, v->outside, KVPRIM_ERROR_OVERLAP); /* for the cache and the indices, if count is wild */
    if (!same) {                              /* two caches that may lie in one place */
        must(v, m->dst.extent && m->src.extent && layer_of(&m->dst, 0) != layer_of(&m->src, 0), KVPRIM_ERROR_ARGUMENT);
        may(v, 1, KVPRIM_ERROR_ARGUMENT);
        v->outside = 1;
    }
    for (int64_t i = 0; !v->outside && i < d->count; i++)
        for (int64_t j = 0; j < d->count; j++)
            v->outside |= row_of(&m->to, i) == row_of(&m->from, j);
}

/* Makes the indices. If both sides have the same type, only index_type says so; otherwise src has its own. */
static void take_lists(struct input *in, kvprim_transfer_desc *d, struct index_list *to, struct index_list *from)
{
    void *const dst_index = take_index(in, to, d->count, d->dst.rows);
    void *const src_index = take_index(in, from, d->count, d->src.rows);
    to->data = d->dst_index = d->dst_index ? dst_index : NULL;
    from->data = d->src_index = d->src_index ? src_index : NULL;
    d->index_type = to->type;
    d->src_index_type = from->type == to->type ? (kvprim_index_type)0 : from->type;
    if (from->type == (kvprim_index_type)0) { /* not set, so the common type must not be set either */
        d->index_type = (kvprim_index_type)0;
        d->dst_index_type = to->type;
    }
    d->dst_index_base = to->base;
    d->src_index_base = from->base;
    d->dst_index_stride = to->stride;
    d->src_index_stride = from->stride;
}

static void take_stack(struct input *in, struct stack *stack, void **bases)
{
    stack->bases = chance(in, 3) ? bases : NULL;
    stack->device = stack->bases && chance(in, 2);
    stack->stride = (!stack->bases || chance(in, 32)) && chance(in, 3) ? (int64_t)(take(in, 2) % 2000) : 0;
}

/* Sets everything except where the memory is. */
static kvprim_transfer_desc take_transfer(struct input *in, const struct shape *s, struct index_list *to,
                                          struct index_list *from, struct stack *dst, struct stack *src)
{
    static void *dst_bases[MAX_LAYERS], *src_bases[MAX_LAYERS];
    kvprim_transfer_desc d = {.row_bytes = s->row_bytes, .count = s->count};
    *to = take_list(in), *from = take_list(in);
    d.dst_index = chance(in, 3) ? NULL : "";
    d.src_index = chance(in, 3) ? NULL : "";
    d.same_cache = chance(in, 4);
    d.dst = take_table(in, d.dst_index ? (int64_t)(take(in, 1) % 20) : rows_for(in, s->count), s->row_bytes);
    d.src = take_table(in, d.src_index ? s->rows : rows_for(in, s->count), s->row_bytes);
    take_lists(in, &d, to, from);
    take_stack(in, dst, dst_bases);
    take_stack(in, src, src_bases);
    spoil_table(in, &d.src);
    spoil_table(in, &d.dst);
    d.src = d.same_cache ? d.dst : d.src;
    *src = d.same_cache ? *dst : *src;
    spoil(in, &d.row_bytes);
    spoil(in, &d.count);
    struct stack *const spoilt = chance(in, 2) ? dst : src;
    if (!d.same_cache && !spoilt->bases)
        spoil(in, &spoilt->stride);
    d.layers = (int32_t)(take(in, 1) % (MAX_LAYERS + 1));
    if (!dst->bases && !src->bases && chance(in, 48))
        d.layers = (int32_t)(uint64_t)take_wild(in);
    dst->layers = src->layers = d.layers;
    *(dst->device ? &d.dst_device_layers : &d.dst_layers) = dst->bases, d.dst_layer_stride = dst->stride;
    *(src->device ? &d.src_device_layers : &d.src_layers) = src->bases, d.src_layer_stride = src->stride;
    if ((dst->device && chance(in, 64)) || chance(in, 200))
        d.dst_layers = d.dst_device_layers = dst_bases;
    d.host_index = chance(in, 64) ? (int32_t)(uint64_t)take_wild(in) : chance(in, 2);
    d.rejected = take_rejected(in);
    return d;
}

static int64_t fuzz_transfer(struct input *in)
{
    const struct shape s = take_shape(in);
    struct verdict v = {0, 0, 0};
    struct move m = {.zero = 0};
    struct stack dst_stack, src_stack;
    kvprim_transfer_desc d = take_transfer(in, &s, &m.to, &m.from, &dst_stack, &src_stack), resolved;
    const int same = d.same_cache;
    if (chance(in, 32))
        d.same_cache = (int32_t)(uint64_t)take_wild(in);

    const wide dst_used = d.dst_index ? d.dst.rows : d.count, src_used = d.src_index ? d.src.rows : d.count;
    take_bytes(in, &d.dst, d.row_bytes, &dst_stack, 0);
    if (!same)
        take_bytes(in, &d.src, d.row_bytes, &src_stack, 1);
    m.src = judge_table(&v, &d.src, d.row_bytes, src_used, &src_stack, !d.same_cache);
    m.dst = judge_table(&v, &d.dst, d.row_bytes, dst_used, &dst_stack, 0);
    if (same) {
        struct layout *const larger = m.dst.extent > m.src.extent ? &m.dst : &m.src;
        place(in, larger);
        d.dst.data = d.src.data = larger->table->data;
    } else {
        place(in, &m.src);
        place(in, &m.dst);
    }
    must(&v, (dst_stack.bases && d.dst_layer_stride) || (src_stack.bases && d.src_layer_stride), KVPRIM_ERROR_ARGUMENT);
    must(&v, d.dst_layers && d.dst_device_layers, KVPRIM_ERROR_ARGUMENT);
    must(&v, d.host_index != 0 && d.host_index != 1, KVPRIM_ERROR_ARGUMENT);
    must(&v, d.dst_device_layers && d.dst_device_layers == d.src_device_layers && d.same_cache == 0,
         KVPRIM_ERROR_OVERLAP);
    must(&v, d.dst_device_layers != d.src_device_layers && d.same_cache == 1, KVPRIM_ERROR_ARGUMENT);
    must(&v, d.count < 0 || (!d.dst_index && d.dst.rows < d.count) || (!d.src_index && d.src.rows < d.count),
         KVPRIM_ERROR_SIZE);
    v.outside |= d.count > s.count;
    if (d.dst_index)
        judge_index(&v, &m.to, d.dst_index_stride, d.count);
    if (d.src_index)
        judge_index(&v, &m.from, d.src_index_stride, d.count);
    judge_memory(&v, &m.src);
    judge_memory(&v, &m.dst);
    judge_layers(&v, &m.dst);
    judge_same_cache(&v, &d, &m, same);

    CALL(kvprim_transfer, &m, 1);
    return end_call(good, checked, status, again, d.count, d.layers ? d.layers : 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int64_t (*const operations[])(struct input *) = {fuzz_gather, fuzz_store, fuzz_transfer};
    struct input in = {data, data + size};
    const size_t which = take(&in, 1) % 3;
    count_reach(&reaches[which], size, (uint64_t)operations[which](&in));
    free_blocks();
    return 0;
}

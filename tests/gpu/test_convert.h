/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for moves that convert. They run in the memory of test_rows.h,
   once by the host function and once on the GPU, and every byte is compared. What the host function gives is tested in
   tests/core. Include it after test_transfers.h. */
#ifndef GPU_TEST_CONVERT_H
#define GPU_TEST_CONVERT_H

/* ---- cases ---- */

enum scale_place { OWN_MEMORY, IN_ROW, BEHIND_PAGE, n_scale_places };
enum convert_form { CONVERT_GATHER, CONVERT_STORE, CONVERT_TRANSFER, n_convert_forms };
enum v_form { NO_V, V_CONVERTS, V_BYTES, n_v_forms };

/* One converting move. Alignments count elements past a multiple of 64 bytes. */
struct convert_case {
    kvprim_dtype to, from;
    kvprim_scale_kind scale; /* of the quantised side */
    int64_t elements, tile;  /* tile 0: the row */
    scale_place where;
    bool is_e8m0, power_of_two, inverse;
    placing dst, src;
    convert_form form;
    int64_t count, rows; /* rows: of an indexed side */
    int32_t layers;      /* of a transfer */
    unsigned indexed;    /* sides of a transfer: 1: dst, 2: src */
    v_form v;            /* of a store */
    kvprim_dtype scales; /* 0, or the type of tiles' scales beside 4 bits */
    int32_t scale_heads; /* that such scales of 1 byte form, or 0 */
    bool swizzled;       /* K's; then V's are linear, otherwise V's are swizzled */
    bool outer;          /* 1: they have a tensor's scale, too */
    uint32_t outer_bits; /* 0: any */
    unsigned n;          /* chooses whatever is not given */
};

static const kvprim_dtype float_types[] = {KVPRIM_F32, KVPRIM_F16, KVPRIM_BF16};
static const kvprim_dtype small_types[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8, KVPRIM_F4E2M1, KVPRIM_INT4};

static int64_t bytes_of_type(kvprim_dtype t)
{
    return t == KVPRIM_F32 ? 4 : t == KVPRIM_F16 || t == KVPRIM_BF16 ? 2 : 1;
}

static bool is_four_bit(kvprim_dtype t)
{
    return t == KVPRIM_F4E2M1 || t == KVPRIM_INT4;
}

/* Bytes of n elements. */
static int64_t bytes_of_elements(kvprim_dtype t, int64_t n)
{
    return is_four_bit(t) ? n / 2 : n * bytes_of_type(t);
}

static bool is_small(kvprim_dtype t)
{
    return bytes_of_type(t) == 1;
}

static uint32_t bits_of_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* Numbers of which most lie where quantised types round: any bits, near 1, halves of small steps, and edges. */
static uint32_t random_f32()
{
    static const uint32_t edges[] = {0,          0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
                                     0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc12345, 0x7fffffff,
                                     0x43e00000, 0x43e80000, 0x47600000, 0x42fe0000, 0x42ff0000, 0x3a800000};
    const uint64_t n = random_u64(), more = n >> 35;
    const uint32_t any = uint32_t(n), sign = any & 0x80000000, fraction = any & 0x7fffff;
    switch (n >> 32 & 7) {
    case 0:
        return any;
    case 1:
        return edges[more % (sizeof edges / sizeof *edges)];
    case 2:
        return bits_of_float((float(more % 4096) - 2048) / 16);
    case 3:
        return sign | uint32_t(107 + more % 40) << 23 | fraction;
    default:
        return sign | uint32_t(120 + more % 10) << 23 | fraction;
    }
}

/* Fills memory with elements of a type. */
static void fill_elements(void *to, kvprim_dtype type, size_t count)
{
    const bool wide = type == KVPRIM_F32;
    char *at = static_cast<char *>(to);
    if (bytes_of_type(type) == 1) {
        fill(to, count); /* any bits, each as often */
        return;
    }
    for (size_t i = 0; i < count; i++, at += wide ? 4 : 2) {
        const uint32_t bits = random_f32(), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
        uint32_t x = bits;
        if (type == KVPRIM_BF16)
            x = bits >> 16;
        else if (type == KVPRIM_F16 && a >= 0x38800000 && a < 0x47800000 && !chance(4))
            x = sign | (a - 0x38000000) >> 13;
        if (wide) /* under sanitizers, a memcpy of a size that is not constant is a call */
            memcpy(at, &x, 4);
        else
            memcpy(at, &x, 2);
    }
}

static uint32_t random_scale()
{
    static const uint32_t edges[] = {0x00800000, 0x7f000000, 0,          0x80000000, 0x7f800000, 0x7fc00000,
                                     0xbf800000, 0x00000001, 0x1f800000, 0x5f800000, 0x1f7fffff, 0x5f800001};
    if (chance(4))
        return edges[below(sizeof edges / sizeof *edges)];
    return uint32_t((chance(8) ? 64 + below(128) : 117 + below(16)) << 23 | (chance(3) ? 0 : below(1 << 23)));
}

/* ---- one case in memory ---- */

/* A side with its format: `full` has every default filled in, `given` leaves some out. */
struct convert_side {
    kvprim_table table;
    kvprim_format full, given;
    int64_t row_bytes, layer_stride;
};

struct convert_call {
    convert_side dst, src, v_dst, v_src;
    kvprim_gather_desc gather;
    kvprim_store_desc store;
    kvprim_transfer_desc transfer;
};

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static kvprim_format format_of(kvprim_dtype type)
{
    kvprim_format f = {};
    f.dtype = type;
    return f;
}

static void place_plain(arena *a, convert_side *s, kvprim_dtype type, const placing &at, int64_t rows, int64_t elements,
                        int32_t layers, int packed = 1)
{
    const int64_t size = bytes_of_type(type);
    size_t span = 0;
    layout l = layouts[at.layout % n_layouts];
    l.pad = l.pad / (at.layout / n_layouts ? 1 : 8) * size, l.page_pad *= size;
    l.heads = l.heads > 0 && elements % (packed * l.heads) == 0 ? l.heads : 0;
    s->row_bytes = bytes_of_elements(type, elements);
    s->table = lay_out(&l, rows, s->row_bytes, &span);
    s->layer_stride = round_up(int64_t(span), size);
    s->table.data = reserve(a, size_t(s->layer_stride * layers), at.align % 16 * size_t(size));
    s->full = s->given = format_of(type);
    fill_elements(s->table.data, type, size_t(s->layer_stride * layers / size));
}

static size_t scale_bytes(const kvprim_format *f)
{
    return f->scale_dtype == KVPRIM_F8E8M0 || f->scale_dtype == KVPRIM_F8E4M3 ? 1
           : f->scale_dtype == KVPRIM_F16                                     ? 2
                                                                              : 4;
}

/* Scales of heads in memory of their own: pages of all rows of each head in turn. */
static void place_heads(const convert_case *c, convert_side *s, int64_t in_page, int64_t pages)
{
    kvprim_format *const f = &s->full;
    f->scale_stride = c->elements / f->tile / f->scale_heads;
    f->scale_tile_stride = in_page * f->scale_stride;
    f->scale_page_stride = s->table.page_rows ? f->scale_heads * f->scale_tile_stride + (c->n % 4 == 1 ? 5 : 0) : 0;
    f->scale_layer_stride =
        s->table.page_rows ? (pages ? pages : 1) * f->scale_page_stride : f->scale_heads * f->scale_tile_stride;
    s->given = *f;
    s->given.scale_stride = s->given.scale_tile_stride = 0;
    if (c->n % 4 != 1)
        s->given.scale_page_stride = s->given.scale_layer_stride = 0;
}

/* Scales of the rows of a table in memory of their own. */
static void place_own_scales(arena *a, const convert_case *c, convert_side *s, int64_t rows, int32_t layers)
{
    const kvprim_table *const t = &s->table;
    kvprim_format *const f = &s->full;
    const int64_t size = int64_t(scale_bytes(f));
    const int64_t scales = f->scale == KVPRIM_SCALE_TENSOR ? 1 : c->elements / f->tile;
    const bool tiles = f->scale == KVPRIM_SCALE_TILE;
    const int64_t in_page = t->page_rows ? t->page_rows : rows > 0 ? rows : 1, pages = (rows + in_page - 1) / in_page;
    if (f->scale_heads) {
        place_heads(c, s, in_page, pages);
        f->scales = reserve(a, size_t(f->scale_layer_stride * layers), below(5));
        s->given.scales = f->scales;
        for (int64_t i = 0; i < f->scale_layer_stride * layers; i++)
            static_cast<uint8_t *>(f->scales)[i] = uint8_t(chance(4) ? below(256) : 117 + below(20));
        return;
    }
    f->scale_tile_stride = size * (c->n % 5 == 1 ? 3 : 1);
    f->scale_stride = tiles ? scales * f->scale_tile_stride + (c->n % 3 == 1 ? 2 * size : 0) : 0;
    f->scale_page_stride = tiles && t->page_rows ? in_page * f->scale_stride + (c->n % 4 == 1 ? 5 * size : 0) : 0;
    int64_t layer = scales * f->scale_tile_stride;
    if (tiles)
        layer = t->page_rows ? (pages ? pages : 1) * f->scale_page_stride : in_page * f->scale_stride;
    f->scale_layer_stride = tiles || c->n % 2 ? layer : 0;
    const size_t bytes = size_t(f->scale_layer_stride * (layers - 1) + layer);
    f->scales = reserve(a, bytes, size_t(size) * below(5));
    for (size_t i = 0; i < bytes / size_t(size); i++) {
        const uint32_t scale = size == 4   ? random_scale()
                               : size == 2 ? uint32_t(below(65536))
                                           : uint32_t(chance(4) ? below(256) : 117 + below(20));
        memcpy(static_cast<char *>(f->scales) + i * size_t(size), &scale, size_t(size));
    }
    s->given = *f;
    if (layers > 1 && f->scale_layer_stride == 0)
        s->given.scale_layer_stride = KVPRIM_SCALES_SHARED;
    if (f->scale == KVPRIM_SCALE_TENSOR)
        s->given.scale_tile_stride = 0;
    if (tiles && f->scale_tile_stride == size && c->n % 3 != 1 && c->n % 4 != 1 && c->n % 7 != 0)
        s->given.scale_tile_stride = s->given.scale_stride = s->given.scale_page_stride = s->given.scale_layer_stride =
            0;
}

/* Rows with their scales inside, or after the rows of each page. */
static void place_in_table(arena *a, const convert_case *c, convert_side *s, const placing &at, int64_t rows,
                           int32_t layers)
{
    kvprim_format *const f = &s->full;
    const int64_t size = int64_t(scale_bytes(f)), scales = c->elements / f->tile * size;
    const int64_t elements = bytes_of_elements(f->dtype, c->elements);
    const int64_t page_rows = f->scale_heads            ? 4 + 4 * int64_t(at.layout % 5)
                              : c->where == BEHIND_PAGE ? 1 + int64_t(at.layout % 5) * 3
                              : at.layout % 3           ? 0
                                                        : 4;
    const int64_t offset = round_up(elements, size), row = c->where == IN_ROW ? offset + scales : elements;
    const int64_t stride = f->scale_heads ? row : c->where == IN_ROW ? row + size * (c->n % 3) : row + (c->n % 3);
    const int64_t behind = round_up(page_rows * stride, size);
    const int64_t page = c->where == IN_ROW ? page_rows * stride : behind + page_rows * scales + size * (c->n % 2);
    const int64_t pages = page_rows ? (rows + page_rows - 1) / page_rows : 0;
    s->row_bytes = elements;
    s->table = table_of(nullptr, rows, stride);
    s->table.page_rows = page_rows, s->table.page_stride = page_rows ? page + (c->where == IN_ROW ? size : 0) : 0;
    s->layer_stride =
        round_up((page_rows ? (pages ? pages : 1) * s->table.page_stride : (rows ? rows : 1) * stride), 16);
    s->table.data = reserve(a, size_t(s->layer_stride * layers), size_t(size) * at.align);
    f->scale_offset = c->where == IN_ROW ? offset : behind;
    f->scale_tile_stride = size;
    f->scale_stride = c->where == IN_ROW ? stride : scales;
    f->scale_page_stride = page_rows ? s->table.page_stride : 0;
    if (f->scale_heads) { /* and rows in heads, or not */
        f->scale_stride = scales / f->scale_heads, f->scale_tile_stride = page_rows * f->scale_stride;
        s->table.heads = c->n % 2 ? f->scale_heads : 0, s->table.stride = c->n % 2 ? stride / f->scale_heads : stride;
        s->table.head_stride = page_rows * s->table.stride;
    }
    s->given = *f;
    if (f->scale_heads)
        s->given.scale_stride = s->given.scale_tile_stride = 0;
    if (c->where == IN_ROW && c->n % 2)
        s->given.scale_tile_stride = s->given.scale_stride = s->given.scale_page_stride = 0;
}

static void place_small(arena *a, const convert_case *c, convert_side *s, const placing &at, int64_t rows,
                        int32_t layers, bool written)
{
    const kvprim_dtype type = is_small(c->to) ? c->to : c->from;
    const bool in_table = c->scale == KVPRIM_SCALE_TILE && c->where != OWN_MEMORY;
    kvprim_format f = format_of(type);
    f.scale = c->scale;
    f.tile = c->scale == KVPRIM_SCALE_TENSOR || c->scale == 0 ? 0 : c->tile ? c->tile : c->elements;
    f.scale_dtype = c->scales ? c->scales : c->is_e8m0 ? KVPRIM_F8E8M0 : KVPRIM_F32;
    f.scale_heads = c->scale_heads, f.scale_order = c->scale_heads && c->swizzled;
    f.scale_power_of_two = c->power_of_two && c->scale == KVPRIM_SCALE_TILE;
    f.scale_inverse = c->inverse && (written || c->scale == KVPRIM_SCALE_TILE);
    f.scale_min = c->scale == KVPRIM_SCALE_TILE && c->n % 5 == 2 ? 1.0f / 512 : 0;
    if (c->scale == 0)
        f.scale_dtype = kvprim_dtype(0), f.scale_inverse = 0;
    if ((type == KVPRIM_INT8 || is_four_bit(type)) && written && c->n % 4)
        f.nans = reserve_counter(a);
    if (c->outer) {
        float *const outer = reserve<float>(a, 4, 0);
        const uint32_t bits = c->outer_bits ? c->outer_bits : random_scale();
        memcpy(outer, &bits, 4);
        f.tensor_scale = outer;
    }
    s->full = s->given = f;
    if (in_table)
        place_in_table(a, c, s, at, rows, layers);
    else {
        place_plain(a, s, type, at, rows, c->elements, layers, is_four_bit(type) ? 2 : 1);
        s->full = s->given = f;
        if (c->scale)
            place_own_scales(a, c, s, rows, layers);
    }
    if (c->scale == KVPRIM_SCALE_TILE && c->tile == 0)
        s->given.tile = 0;
    if (!c->is_e8m0 && !c->scales)
        s->given.scale_dtype = kvprim_dtype(0);
}

static void place_side(arena *a, const convert_case *c, convert_side *s, bool dst, int64_t rows)
{
    const kvprim_dtype type = dst ? c->to : c->from;
    const int32_t layers = c->form == CONVERT_TRANSFER ? c->layers : 1;
    if (is_small(type))
        place_small(a, c, s, dst ? c->dst : c->src, rows, layers, dst);
    else
        place_plain(a, s, type, dst ? c->dst : c->src, rows, c->elements, layers,
                    is_four_bit(c->to) || is_four_bit(c->from) ? 2 : 1);
    s->table.format = &s->given;
}

/* V of a store: the same as K in other memory, or bytes. */
static void place_v(arena *a, const convert_case *c, convert_call *call)
{
    kvprim_store_desc *const d = &call->store;
    if (c->v == V_CONVERTS) {
        convert_case v = *c;
        v.swizzled = !c->swizzled;
        v.scale_heads = c->n % 8 == 5 ? std::min(c->scale_heads, 1) : c->scale_heads;
        place_side(a, &v, &call->v_dst, true, c->rows);
        place_side(a, &v, &call->v_src, false, c->count);
    } else {
        call->v_dst.row_bytes = call->v_src.row_bytes = row_sizes[c->n % 40];
        call->v_dst.table = place(a, {c->dst.layout % n_layouts, c->dst.align}, c->rows, call->v_dst.row_bytes);
        call->v_src.table = place(a, {c->src.layout % n_layouts, c->src.align}, c->count, call->v_src.row_bytes);
    }
    d->v_cache = call->v_dst.table, d->v = call->v_src.table, d->v_bytes = call->v_src.row_bytes;
}

static void make_transfer(const convert_case *c, const convert_call *call, kvprim_transfer_desc *d)
{
    d->dst = call->dst.table, d->src = call->src.table;
    d->dst_layer_stride = call->dst.layer_stride, d->src_layer_stride = call->src.layer_stride;
    d->layers = c->layers, d->row_bytes = call->src.row_bytes, d->count = c->count;
}

/* Makes a case, beside what the memory holds already. Descriptors point to the call's own formats. */
static void make_convert(arena *a, const convert_case *c, convert_call *call)
{
    const bool dst_index = c->form == CONVERT_STORE || (c->form == CONVERT_TRANSFER && c->indexed & 1);
    const bool src_index = c->form == CONVERT_GATHER || (c->form == CONVERT_TRANSFER && c->indexed & 2);
    const kvprim_index_type type = type_of(c->n);
    const int64_t base = bases[c->n / 2 % 4], stride = index_strides[c->n % 8];
    place_side(a, c, &call->dst, true, dst_index ? c->rows : c->count);
    place_side(a, c, &call->src, false, src_index ? c->rows : c->count);
    void *const to = dst_index ? place_index(a, type, c->count, base, c->rows, true, stride) : nullptr;
    void *const from = src_index ? place_index(a, type, c->count, base, c->rows, false, stride) : nullptr;
    uint32_t *const rejected = c->n % 3 ? reserve_counter(a) : nullptr;
    const int64_t row_bytes = call->src.row_bytes;
    if (c->form == CONVERT_GATHER) {
        call->gather = gather_of(call->dst.table, call->src.table, row_bytes, from, type, base, c->count, rejected);
        call->gather.index_stride = stride, call->gather.keep_padding = c->n % 5 == 4;
        share_heads(&call->gather.src);
    } else if (c->form == CONVERT_STORE) {
        call->store = store_of(call->dst.table, call->src.table, row_bytes, to, type, c->count, rejected);
        call->store.slot_base = base, call->store.slot_stride = stride;
        if (c->v != NO_V)
            place_v(a, c, call);
    } else {
        kvprim_transfer_desc *const d = &call->transfer;
        make_transfer(c, call, d);
        d->rejected = rejected;
        d->dst_index = to, d->src_index = from, d->index_type = type;
        d->dst_index_base = to ? base : 0, d->src_index_base = from ? base : 0;
        d->dst_index_stride = to ? stride : 0, d->src_index_stride = from ? stride : 0;
    }
}

/* ---- what a case may touch ---- */

/* Allows access to the scales of a row, which the contract places. Returns false if they are written and lie on
   something else. */
static bool visit_scales(arena *a, const convert_side *s, const kvprim_table *layer, int32_t l, int64_t row, bool write)
{
    const kvprim_format *const f = &s->full;
    if (f->scale == 0 || layer->rows == 0)
        return true;
    const int64_t elements = s->row_bytes * (is_four_bit(f->dtype) ? 2 : 1) / bytes_of_type(f->dtype);
    const int64_t scales = f->scale == KVPRIM_SCALE_TENSOR ? 1 : elements / f->tile;
    char *const first = f->scales ? static_cast<char *>(f->scales) + l * f->scale_layer_stride
                                  : static_cast<char *>(layer->data) + f->scale_offset;
    const int64_t in_head = f->scale_heads ? scales / f->scale_heads : scales, quarter = in_head / 4;
    for (int64_t t = 0; t < scales; t++) {
        int64_t in_page = layer->page_rows ? row % layer->page_rows : row, s_in_head = t % in_head;
        if (f->scale_order) {
            const int64_t linear = in_page;
            in_page = linear / 4 * 4 + s_in_head / quarter, s_in_head = s_in_head % quarter * 4 + linear % 4;
        }
        char *at = first + (f->scale_heads ? t / in_head * f->scale_tile_stride + s_in_head : t * f->scale_tile_stride);
        if (f->scale == KVPRIM_SCALE_TILE)
            at += (layer->page_rows ? row / layer->page_rows * f->scale_page_stride : 0) + in_page * f->scale_stride;
        const size_t begin = offset_of(a, at), bytes = scale_bytes(f);
        if (begin + bytes > a->used || (write && memchr(&a->taken[begin], 1, bytes)))
            return false;
        if (write)
            memset(&a->taken[begin], 1, bytes);
        a->allowed.push_back({begin, bytes});
    }
    return true;
}

/* Visits the rows of a side, and their scales. Those that no row has of its own may be read in any case. */
static bool visit_side(arena *a, rows_move *m, const convert_side *s, bool write)
{
    bool good = true;
    m->row_bytes = s->row_bytes;
    for (int32_t l = 0; good && l < m->layers; l++) {
        const kvprim_table layer = layer_of(write ? &m->dst : &m->src, l);
        const bool of_rows = s->full.scale == KVPRIM_SCALE_TILE;
        good = visit_layer(a, m, l, write) && (of_rows || visit_scales(a, s, &layer, l, 0, false));
        for (size_t i = 0; good && i < m->rows.size(); i++) {
            const int64_t to = m->rows[i].first, from = m->rows[i].second;
            if (!write && from >= 0) /* may be read even if the row goes nowhere */
                good = visit(a, &layer, s->row_bytes, from, false) &&
                       (!of_rows || visit_scales(a, s, &layer, l, from, false));
            if (write && of_rows && to >= 0 && (from >= 0 || m->zero))
                good = visit_scales(a, s, &layer, l, to, true);
        }
    }
    return good;
}

/* As visit_moves. Sides have rows of different sizes. */
static bool visit_convert(arena *a, std::vector<rows_move> moves, const convert_call *call)
{
    bool good = true;
    for (size_t k = 0; k < moves.size(); k++) {
        rows_move &m = moves[k];
        uint32_t *const nans = k ? call->v_dst.full.nans : call->dst.full.nans;
        if (m.rejected)
            visit_word(a, m.rejected, 4);
        if (nans)
            visit_word(a, nans, 4);
        for (const convert_side *const s : {&call->dst, &call->src, &call->v_dst, &call->v_src})
            if (s->full.tensor_scale)
                a->allowed.push_back({offset_of(a, s->full.tensor_scale), 4});
        good = good && visit_index(a, &m.dst, m.count) && visit_index(a, &m.src, m.count);
        for (int64_t i = 0; good && i < m.count; i++)
            m.rows.push_back({row_at(&m.dst, i), row_at(&m.src, i)});
    }
    for (const bool write : {true, false})
        for (size_t k = 0; good && k < moves.size(); k++)
            good = visit_side(a, &moves[k],
                              k       ? write ? &call->v_dst : &call->v_src
                              : write ? &call->dst
                                      : &call->src,
                              write);
    return good;
}

/* Formats for the code under test. */
struct device_formats {
    kvprim_format dst, src, v_dst, v_src;

    static kvprim_format moved_format(const arena *a, kvprim_format f, bool source)
    {
        f.scales = source ? on_source(a, f.scales) : on_device(a, f.scales);
        f.nans = on_device(a, f.nans);
        f.tensor_scale = source ? on_source(a, f.tensor_scale) : on_device(a, f.tensor_scale);
        return f;
    }
    device_formats(const arena *a, const convert_call *call)
        : dst(moved_format(a, call->dst.given, false)), src(moved_format(a, call->src.given, true)),
          v_dst(moved_format(a, call->v_dst.given, false)), v_src(moved_format(a, call->v_src.given, true))
    {
    }
    void point(kvprim_gather_desc *d) const
    {
        d->dst.format = &dst, d->src.format = &src;
    }
    void point(kvprim_store_desc *d) const
    {
        d->k_cache.format = &dst, d->k.format = &src;
        d->v_cache.format = v_dst.dtype ? &v_dst : nullptr, d->v.format = v_src.dtype ? &v_src : nullptr;
    }
    void point(kvprim_transfer_desc *d) const
    {
        d->dst.format = &dst, d->src.format = &src;
    }
    void forget()
    {
        memset(static_cast<void *>(this), 0xff, sizeof *this);
    }
};

/* Runs a descriptor on both sides, or its moves. Its formats are overwritten before the code under test can have
   run. */
template <class Desc>
static outcome try_convert(arena *a, const Desc *desc, const convert_call *call, const char *what,
                           bool as_moves = false)
{
    on_gpu<Desc> on(a, *desc);
    device_formats formats(a, call);
    Desc resolved = {};
    formats.point(&on.d);
    snprintf(current, sizeof current, "%s: %s", functions<Desc>::name, what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = functions<Desc>::check(&on.d, nullptr);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (functions<Desc>::check(desc, &resolved) != KVPRIM_OK || !visit_convert(a, rows_of(&resolved), call)))
        return OUTSIDE;
    if (runs)
        describe(rows_of(&resolved));
    return run_both(
        a, want, want_text, runs, [&] { return functions<Desc>::host(desc); },
        [&] {
            kvprim_move moves[2]; /* what their formats leave unset may be anything */
            memset(static_cast<void *>(moves), 0xa5, sizeof moves);
            if (!call->v_dst.row_bytes)
                moves[1] = kvprim_move{};
            const kvprim_status got = !as_moves ? functions<Desc>::gpu(&on.d, a->launch)
                                      : functions<Desc>::moves(&on.d, moves) == KVPRIM_OK
                                          ? kvprim_cuda_move(moves, 2, a->launch)
                                          : KVPRIM_ERROR_ARGUMENT;
            if (!is_asked())
                formats.forget();
            return got;
        });
}

/* The same with layers that only the GPU knows, or rows that the host names: see test_tables.h. */
static outcome try_listed_convert(arena *a, const convert_call *call, unsigned how, const char *what)
{
    const kvprim_transfer_desc *const d = &call->transfer;
    kvprim_transfer_desc resolved = {};
    device_formats formats(a, call);
    start_visit(a);
    if (kvprim_transfer_check(d, &resolved) != KVPRIM_OK || !visit_convert(a, rows_of(&resolved), call))
        return OUTSIDE;
    listed_transfer listed(a, *d, resolved, how);
    formats.point(&listed.on.d);
    listed.visit_tables(a);
    snprintf(current, sizeof current, "transfer, kind %u: %s", how, what);
    describe(rows_of(&resolved));
    return run_both(
        a, KVPRIM_OK, "-", true, [&] { return kvprim_transfer(d); },
        [&] {
            const kvprim_status status = kvprim_cuda_transfer(&listed.on.d, a->launch);
            if (!is_asked())
                listed.forget_lists(), formats.forget();
            return status;
        });
}

/* `layers` of a side as an array of the host, from the last to the first. */
static void turn_layers(kvprim_transfer_desc *d, void **dst, void **src)
{
    for (int32_t l = 0; l < d->layers; l++) {
        dst[l] = static_cast<char *>(d->dst.data) + (d->layers - 1 - l) * d->dst_layer_stride;
        src[l] = static_cast<char *>(d->src.data) + l * d->src_layer_stride;
    }
    d->dst_layers = dst, d->dst_layer_stride = 0;
    d->src_layers = src, d->src_layer_stride = 0;
}

static void say_case(const convert_case *c, char *what, size_t room)
{
    snprintf(what, room,
             "%d <- %d, scale %d, %lld elements, tile %lld, scales %d, e8m0 %d, power of two %d, inverse %d, v %d, "
             "case %u",
             c->to, c->from, c->scale, print_i64(c->elements), print_i64(c->tile), c->where, c->is_e8m0,
             c->power_of_two, c->inverse, c->v, c->n);
}

static void run_convert(arena *a, const convert_case *c)
{
    convert_call call = {};
    char what[300];
    void *layers[2][most_layers];
    empty(a);
    make_convert(a, c, &call);
    say_case(c, what, sizeof what);
    outcome result;
    if (c->form == CONVERT_GATHER)
        result = try_convert(a, &call.gather, &call, what);
    else if (c->form == CONVERT_STORE)
        result = try_convert(a, &call.store, &call, what, c->v == V_BYTES && c->n % 3 == 0);
    else {
        if (c->n / 4 % 2)
            turn_layers(&call.transfer, layers[0], layers[1]);
        const unsigned how = c->n / 8 % (2 * LISTED_KINDS); /* half of them are none of these */
        result = how > 0 && how < LISTED_KINDS ? try_listed_convert(a, &call, how, what)
                                               : try_convert(a, &call.transfer, &call, what);
    }
    if (result != RAN)
        fail("%s: outcome %d: %s", current, result, kvprim_last_error());
}

/* ---- the matrix ---- */

/* All pairs of types that convert. */
static std::vector<std::pair<kvprim_dtype, kvprim_dtype>> convert_pairs()
{
    std::vector<std::pair<kvprim_dtype, kvprim_dtype>> pairs;
    for (const kvprim_dtype x : float_types) {
        for (const kvprim_dtype y : float_types)
            if (x != y)
                pairs.push_back({x, y});
        for (const kvprim_dtype y : small_types)
            pairs.push_back({x, y}), pairs.push_back({y, x});
    }
    return pairs;
}

static const struct {
    int64_t elements, tile;
} convert_sizes[] = {{512, 128}, {128, 0},  {64, 16},   {448, 64}, {576, 192}, {1024, 128}, {8, 8},    {1, 1},
                     {7, 7},     {100, 10}, {1000, 40}, {24, 3},   {2048, 0},  {2056, 257}, {5000, 0}, {96, 48}};
enum { n_convert_sizes = sizeof convert_sizes / sizeof *convert_sizes };

/* Case n of a pair of types and a kind of scale; the rest follows from n. */
static convert_case convert_case_of(unsigned n, kvprim_dtype to, kvprim_dtype from, int scale)
{
    convert_case c = {};
    const auto &size = convert_sizes[n % n_convert_sizes];
    const bool small = is_small(to) || is_small(from), tiles = small && scale == KVPRIM_SCALE_TILE;
    c.to = to, c.from = from, c.n = n;
    c.scale = kvprim_scale_kind(small ? scale : 0);
    c.elements = size.elements;
    c.tile = c.scale == KVPRIM_SCALE_HEAD && size.tile == 0 ? size.elements : size.tile;
    c.where = tiles ? scale_place(n / 3 % n_scale_places) : OWN_MEMORY;
    c.is_e8m0 = c.scale && n % 7 == 3;
    c.power_of_two = n % 3 == 2;
    c.inverse = n % 4 == 3;
    c.form = convert_form(n / 2 % n_convert_forms);
    c.dst = {n * 5 % (2 * n_layouts), n % 2 ? n / 4 % 16 : 0};
    c.src = {n / 2 * 3 % (2 * n_layouts), n % 2 ? n / 8 % 16 : 0};
    c.count = 1 + n * 7 % 40, c.rows = c.count + 3;
    c.layers = 1 + int32_t(n % 3), c.indexed = n / 5 % 4;
    c.v = n % 5 < 3 ? v_form(n % 5) : NO_V;
    if (is_four_bit(to) || is_four_bit(from)) {
        static const kvprim_dtype types[] = {kvprim_dtype(0), KVPRIM_F8E4M3, KVPRIM_F16, KVPRIM_F8E4M3};
        c.scales = tiles && !c.is_e8m0 ? types[n / 2 % 4] : types[0], c.outer = tiles && n / 3 % 2;
        if (c.elements % 2 || c.tile % 2)
            c.elements *= 2, c.tile *= 2;
    }
    return c;
}

static void convert_matrix(arena *a)
{
    unsigned n = 0;
    for (int round = 0; round < 64 / thin + 1; round++)
        for (const auto &pair : convert_pairs())
            for (int scale = 0; scale <= KVPRIM_SCALE_TILE; scale++, n++) {
                if (scale && !is_small(pair.first) && !is_small(pair.second))
                    continue;
                const convert_case c = convert_case_of(n * 11 + unsigned(below(1024)), pair.first, pair.second, scale);
                run_convert(a, &c);
            }
}

/* Row i to row i. */
static int32_t *place_identity(arena *a, int64_t count)
{
    int32_t *const slot = reserve<int32_t>(a, size_t(count) * 4, 0);
    a->index_room = count;
    for (int32_t i = 0; i < count; i++)
        slot[i] = i;
    return slot;
}

/* Both sides say their formats in full. */
static void give_formats(convert_call *call)
{
    call->dst.given = call->dst.full, call->src.given = call->src.full;
    call->dst.table.format = &call->dst.given, call->src.table.format = &call->src.given;
}

/* ---- every input ---- */

static const uint32_t every_scale[] = {0x3f800000, 0x00800000, 0x7f000000, 0x1f800000, 0x5f800000, 0x1f7fffff,
                                       0x69800000, 0x3c23d70a, 0x40490fdb, 0xbf19999a, 0x00000000, 0x80000000,
                                       0x7f800000, 0xff800000, 0x7fc00000, 0x00000001, 0x007fffff, 0x3f7fffff,
                                       0x3dcccccd, 0x42c80000, 0x35800001, 0x4b7fffff};

/* All values of a type of 8 or 16 bits, or so many of fp32. */
static void every_element(kvprim_dtype type, void *to, size_t count)
{
    for (uint32_t i = 0; type != KVPRIM_F32 && i < count; i++)
        memcpy(static_cast<char *>(to) + i * size_t(bytes_of_type(type)), &i, size_t(bytes_of_type(type)));
    if (type == KVPRIM_F32)
        fill_elements(to, type, count);
}

/* Every value, and of fp32 many, into another type with one scale. `odd`: one by one, as rows begin at odd elements. */
static void one_every_input(arena *a, kvprim_dtype to, kvprim_dtype from, uint32_t scale, bool inverse, size_t odd)
{
    const int64_t count = 64, elements = is_four_bit(from) ? 8 : is_small(from) ? 4 : 1024, rows = count;
    const bool small = is_small(to) || is_small(from);
    convert_call call = {};
    convert_side *const quantised = is_small(to) ? &call.dst : &call.src;
    char what[120];
    empty(a);
    call.dst.full = format_of(to), call.src.full = format_of(from);
    call.dst.row_bytes = bytes_of_elements(to, elements), call.src.row_bytes = bytes_of_elements(from, elements);
    call.dst.table = table_of(reserve(a, size_t(rows * call.dst.row_bytes), odd * size_t(bytes_of_type(to))), rows);
    call.src.table = table_of(reserve(a, size_t(count * call.src.row_bytes), odd * size_t(bytes_of_type(from))), count);
    every_element(from, call.src.table.data, size_t(bytes_of_elements(from, count * elements) / bytes_of_type(from)));
    if (small) {
        quantised->full.scale = KVPRIM_SCALE_TENSOR, quantised->full.scale_inverse = inverse && is_small(to);
        quantised->full.scales = reserve(a, 4, 0);
        memcpy(quantised->full.scales, &scale, 4);
    }
    if (to == KVPRIM_INT8 || is_four_bit(to))
        call.dst.full.nans = reserve_counter(a);
    give_formats(&call);
    const int32_t *const slot = place_identity(a, count);
    snprintf(what, sizeof what, "every input, %d <- %d, scale %08x, inverse %d, odd %zu", to, from, scale, inverse,
             odd);
    const kvprim_store_desc d =
        store_of(call.dst.table, call.src.table, call.src.row_bytes, slot, KVPRIM_I32, count, nullptr);
    CHECK(try_convert(a, &d, &call, what) == RAN);
}

static void every_input(arena *a)
{
    unsigned n = 0;
    for (const auto &pair : convert_pairs())
        for (const uint32_t scale : every_scale) {
            if (n++ % unsigned(thin > 7 ? 7 : 1))
                continue;
            one_every_input(a, pair.first, pair.second, scale, n % 3 == 0, n % 2);
            if (!is_small(pair.first) && !is_small(pair.second))
                break;
        }
}

/* ---- several moves in one call, of which some convert ---- */

static void run_convert_moves(arena *a, unsigned n)
{
    enum { most = 4 };
    static const kvprim_dtype to[] = {KVPRIM_F8E4M3, KVPRIM_BF16, KVPRIM_INT8, KVPRIM_F32};
    static const kvprim_dtype from[] = {KVPRIM_BF16, KVPRIM_F8E5M2, KVPRIM_F32, KVPRIM_F16};
    convert_call calls[most] = {};
    kvprim_move host[2 * most], on[2 * most];
    std::unique_ptr<device_formats> formats[most];
    size_t moves = 0;
    bool good = true;
    empty(a);
    start_visit(a);
    for (unsigned k = 0; k < 1 + n % most; k++) {
        convert_case c = convert_case_of(n * 7 + k, to[(n + k) % 4], from[(n + k) % 4], int((n + k) % 4));
        c.form = is_small(c.to) ? CONVERT_STORE : CONVERT_GATHER;
        c.v = is_small(c.to) ? v_form((n + k) % n_v_forms) : NO_V;
        make_convert(a, &c, &calls[k]);
    }
    a->taken.assign(a->used, 0);
    const auto add = [&](auto d, const convert_call *call, size_t parts) {
        auto resolved = d, device = on_device(a, d);
        typedef functions<decltype(d)> function;
        formats[call - calls].reset(new device_formats(a, call));
        formats[call - calls]->point(&device);
        good = good && function::check(&d, &resolved) == KVPRIM_OK && visit_convert(a, rows_of(&resolved), call) &&
               function::moves(&d, &host[moves]) == KVPRIM_OK && function::moves(&device, &on[moves]) == KVPRIM_OK;
        moves += parts;
    };
    for (unsigned k = 0; k < 1 + n % most; k++)
        if (calls[k].gather.count)
            add(calls[k].gather, &calls[k], 1);
        else
            add(calls[k].store, &calls[k], 2); /* it writes two moves */
    snprintf(current, sizeof current, "%zu moves, some convert, case %u", moves, n);
    if (!good)
        fail("%s: %s", current, kvprim_last_error());
    else
        CHECK(run_both(
                  a, KVPRIM_OK, "-", true, [&] { return kvprim_cpu_move(host, moves); },
                  [&] { return kvprim_cuda_move(on, moves, a->launch); }) == RAN);
}

static void convert_moves(arena *a)
{
    const unsigned step = thin > 99 ? 31 : thin > 7 ? 7 : 1;
    for (unsigned n = 0; n < 240; n += step)
        run_convert_moves(a, n);
}

/* ---- many rows, and lists of them that take large parameters, or several launches ---- */

static void convert_counts(arena *a, const int64_t *row_counts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (unsigned k = 0; k < 6; k++) {
            const bool small = k % 2 != 0;
            convert_case c = convert_case_of(k + unsigned(i), small ? KVPRIM_F8E4M3 : KVPRIM_F16,
                                             small ? KVPRIM_BF16 : KVPRIM_INT8, int(k % 4));
            c.elements = 16, c.tile = 8, c.count = row_counts[i], c.rows = c.count + 5, c.layers = 1 + int32_t(k % 2);
            c.form = k < 3 ? CONVERT_TRANSFER : small ? CONVERT_STORE : CONVERT_GATHER, c.v = NO_V;
            c.n = k == 1 ? 4 * 8 : 8 * (HOST_LISTS + k % 4); /* how rows are named: see run_convert */
            c.indexed = 1 + k % 3;
            run_convert(a, &c);
        }
}

/* ---- the formats of engines by name ---- */

struct preset_case {
    const char *name;
    int64_t rows, page_rows, count, page_gap;
};

/* Stores rows of bf16 by a preset, or gathers them from it. */
static void run_preset(arena *a, const preset_case *c, bool store)
{
    kvprim_layout host, on;
    unsigned char none[1] = {0};
    empty(a);
    CHECK(find_quantised(c->name, none, c->rows, c->page_rows, 0, &host) == KVPRIM_OK);
    const int64_t page = host.k_cache.page_stride + c->page_gap, pages = (c->rows + c->page_rows - 1) / c->page_rows;
    const int64_t elements = host.k_elements, v_bytes = host.v_elements * 2;
    const size_t bytes = size_t(page * pages);
    unsigned char *const cache = reserve<unsigned char>(a, bytes, 0);
    CHECK(find_quantised(c->name, cache, c->rows, c->page_rows, page, &host) == KVPRIM_OK);
    CHECK(find_quantised(c->name, on_device(a, cache), c->rows, c->page_rows, page, &on) == KVPRIM_OK);
    kvprim_format bf16 = format_of(KVPRIM_BF16);
    kvprim_table k = table_of(reserve(a, size_t(c->count * elements * 2), 0), c->count);
    kvprim_table v = v_bytes ? table_of(reserve(a, size_t(c->count * v_bytes), 0), c->count) : table_of(nullptr, 0);
    fill_elements(k.data, KVPRIM_BF16, size_t(c->count * elements));
    k.format = &bf16;
    void *const slot = place_index(a, KVPRIM_I64, c->count, 0, c->rows, store);
    snprintf(current, sizeof current, "preset %s, %s, %lld rows of %lld, pages of %lld", c->name,
             store ? "store" : "gather", print_i64(c->count), print_i64(c->rows), print_i64(c->page_rows));
    start_visit(a);
    a->allowed.push_back({0, a->used});
    const auto run_call = [a](const auto &d, const auto &e) {
        typedef functions<typename std::decay<decltype(d)>::type> function;
        CHECK(run_both(
                  a, KVPRIM_OK, "-", true, [&] { return function::host(&d); },
                  [&] { return function::gpu(&e, a->launch); }) == RAN);
    };
    if (store) {
        kvprim_store_desc d = store_of(host.k_cache, k, elements * 2, slot, KVPRIM_I64, c->count, nullptr);
        d.v_cache = host.v_cache, d.v = v, d.v_bytes = v_bytes;
        kvprim_store_desc e = on_device(a, d);
        e.k_cache = on.k_cache, e.v_cache = on.v_cache;
        run_call(d, e);
    } else {
        const kvprim_gather_desc d = gather_of(k, host.k_cache, bytes_of_elements(host.k_format.dtype, elements), slot,
                                               KVPRIM_I64, 0, c->count, nullptr);
        kvprim_gather_desc e = on_device(a, d);
        e.src = on.k_cache;
        run_call(d, e);
    }
}

/* If there are few of all cases, other ones each time. */
static void convert_presets(arena *a)
{
    static unsigned n;
    for (const char *const name :
         {"fp8_ds_mla", "fp8_ds_mla_sglang", "fp8_ds_mla_v4", "fp8_indexer", "fp8_indexer_ue8m0"})
        for (const int64_t page_rows : {1, 16, 64})
            for (const int64_t count : {1, 5, 64, 130})
                for (const bool store : {true, false}) {
                    if (n++ % (thin > 7 ? 7u : 1u))
                        continue;
                    const preset_case c = {name, count + 70, page_rows, count, page_rows == 16 ? 64 : 0};
                    run_preset(a, &c, store);
                }
}

/* Plain rows of elements of 4 bits: scales of all types and in all places, tiles of all sizes, few rows and many; and so
   many tiles that a thread takes several. */
static void convert_packed(arena *a)
{
    static const int64_t tiles[] = {16, 32, 128, 16, 48, 512, 8, 64};
    static const kvprim_dtype types[] = {KVPRIM_F8E4M3, KVPRIM_F16, kvprim_dtype(0), KVPRIM_F8E4M3};
    const unsigned step = thin > 30 ? 11 : 1;
    for (unsigned n = 0; n < 256; n += step) {
        const bool store = n % 2;
        const kvprim_dtype small = n % 8 == 6 ? KVPRIM_INT4 : KVPRIM_F4E2M1,
                           other = n / 2 % 2 ? KVPRIM_F16 : KVPRIM_BF16;
        convert_case c = convert_case_of(n, store ? small : other, store ? other : small, KVPRIM_SCALE_TILE);
        c.form = store ? CONVERT_STORE : CONVERT_GATHER, c.v = n / 2 % 2 ? V_CONVERTS : v_form(n / 2 % 4);
        c.tile = tiles[n / 4 % 8], c.elements = 2 * c.tile * (c.tile < 64 ? 4 : 1);
        c.dst = c.src = {0, 0};
        (store ? c.dst : c.src) = {n / 32 % 2 * 8, 0}; /* 8: heads in pages */
        c.where = scale_place(n / 64 % n_scale_places), c.is_e8m0 = n % 5 == 2;
        c.scales = c.is_e8m0 ? kvprim_dtype(0) : types[n / 8 % 4];
        c.power_of_two = n % 7 == 3, c.inverse = n / 4 % 2, c.outer = n / 16 % 2;
        c.count = n % 3 ? 5 + n % 40 : 900, c.rows = c.count + 3, c.n = n / 5 * 3;
        run_convert(a, &c);
    }
    for (unsigned n = 0; n < 2; n++) {
        convert_case c = convert_case_of(n, KVPRIM_F4E2M1, KVPRIM_BF16, KVPRIM_SCALE_TILE);
        c.form = CONVERT_STORE, c.v = NO_V, c.tile = 16, c.elements = 2048, c.dst = {n * 8, 0}, c.src = {0, 0};
        c.where = OWN_MEMORY, c.is_e8m0 = n, c.scales = n ? kvprim_dtype(0) : KVPRIM_F8E4M3, c.outer = !n;
        c.count = 20 * int64_t(kvpc_multiprocessors()), c.rows = c.count + 3;
        run_convert(a, &c);
    }
    /* Padding is zeros without a sign, and no NaNs, if the tensor's scale is negative, NaN or small (1 / 2^-137). */
    static const uint32_t outers[] = {0xc0000000, 0x7fc00000, 0x3a000000};
    for (unsigned n = 0; n < 6; n++) {
        convert_case c = convert_case_of(n, n % 2 ? KVPRIM_F4E2M1 : KVPRIM_INT4, KVPRIM_BF16, KVPRIM_SCALE_TILE);
        c.form = CONVERT_GATHER, c.where = OWN_MEMORY, c.scales = kvprim_dtype(0), c.n = 2 * n + 1;
        c.outer = true, c.outer_bits = outers[n / 2], c.inverse = true, c.is_e8m0 = false, c.count = 40, c.rows = 43;
        run_convert(a, &c);
    }
}

/* Scales of heads, linear and swizzled, of rows with heads or without, in pages or not: by the kernels of plain rows,
   also with so many tiles that a thread takes several, and, of other rows or layers, by the others. */
static void convert_scale_heads(arena *a)
{
    static const unsigned places[] = {0, 4, 7, 8, 11, 12}; /* 8, 11 and 12 have heads */
    unsigned n = 0;
    for (const int32_t heads : {1, 2, 4, 8})
        for (const unsigned place : places)
            for (unsigned kind = 0; kind < 24; kind++, n++) {
                if (thin > 30 && n % 7)
                    continue;
                const bool store = kind % 2, plain = kind / 2 % 3;
                const kvprim_dtype small = plain || kind % 4 < 2 ? KVPRIM_F4E2M1 : KVPRIM_INT4,
                                   other = plain ? kind % 4 < 2 ? KVPRIM_BF16 : KVPRIM_F16 : KVPRIM_F32;
                convert_case c = convert_case_of(n, store ? small : other, store ? other : small, KVPRIM_SCALE_TILE);
                c.form = !plain && kind % 4 < 2 ? CONVERT_TRANSFER : store ? CONVERT_STORE : CONVERT_GATHER;
                c.v = plain && kind / 6 % 2 ? n / 2 % 2 ? V_CONVERTS : V_BYTES : NO_V;
                c.layers = 2, c.indexed = store ? 1 : 2;
                c.scale_heads = heads, c.swizzled = kind / 12, c.is_e8m0 = n % 5 == 0;
                c.scales = c.is_e8m0 ? kvprim_dtype(0) : KVPRIM_F8E4M3, c.tile = plain ? 16 : 10;
                c.elements = c.tile * heads * (n % 3 ? 8 : 4), c.where = n % 2 ? OWN_MEMORY : BEHIND_PAGE;
                c.dst = c.src = {0, 0};
                (store ? c.dst : c.src) = {place, 0};
                c.count = 4 + n % 40 / 4 * 4;
                c.rows = c.count + 4;
                run_convert(a, &c);
            }
    for (n = 0; n < 5; n++) { /* whose threads take several tiles: rows in heads, too, or not; the last: rows alone */
        convert_case c = convert_case_of(n, KVPRIM_F4E2M1, KVPRIM_BF16, KVPRIM_SCALE_TILE);
        c.form = CONVERT_STORE, c.v = n / 2 ? V_CONVERTS : NO_V, c.tile = 16, c.elements = 1024;
        c.dst = {n % 2 ? 4u : 8u, 0}, c.src = {0, 0}, c.where = OWN_MEMORY;
        c.is_e8m0 = false, c.scales = KVPRIM_F8E4M3, c.scale_heads = n % 2 ? 8 : n < 4 ? 4 : 1;
        c.swizzled = n % 2 == 0, c.count = 36 * int64_t(kvpc_multiprocessors()), c.rows = c.count + 4;
        run_convert(a, &c);
    }
}

/* Tiles whose scales lie at the boundary between two codes of E4M3, or less than a unit of its last place beside it: an
   estimate cannot tell. */
static void convert_packed_boundaries(arena *a)
{
    static const uint32_t outers[] = {0x3f800000, 0x3f800001, 0x3f7fffff}; /* 1 and its neighbours */
    const int64_t codes = 126, elements = 16 * codes;
    for (unsigned n = 0; n < 6; n++) {
        convert_call call = {};
        kvprim_format *const f = &call.dst.full;
        empty(a);
        place_plain(a, &call.src, n % 2 ? KVPRIM_F16 : KVPRIM_BF16, {0, 0}, 1, elements, 1);
        memset(call.src.table.data, 0, size_t(2 * elements));
        for (int64_t code = 0; code < codes; code++) {
            const auto value = [](int64_t x) { return x < 8 ? float(x) / 512 : float((8 + x % 8) << x / 8) / 1024; };
            const uint32_t largest = bits_of_float(6 * (value(code) + value(code + 1)) / 2);
            const uint16_t x = uint16_t(n % 2 ? (largest - 0x38000000) >> 13 : largest >> 16);
            memcpy(static_cast<char *>(call.src.table.data) + 32 * code, &x, 2);
        }
        *f = format_of(KVPRIM_F4E2M1);
        f->scale = KVPRIM_SCALE_TILE, f->scale_dtype = KVPRIM_F8E4M3, f->tile = 16, f->scale_inverse = 1;
        f->scales = reserve(a, size_t(codes), 0);
        f->scale_tile_stride = 1, f->scale_stride = codes;
        float *const outer = reserve<float>(a, 4, 0);
        memcpy(outer, &outers[n / 2], 4);
        f->tensor_scale = outer;
        call.dst.table = table_of(reserve(a, size_t(elements / 2), 0), 1, elements / 2);
        call.dst.row_bytes = elements / 2;
        give_formats(&call);
        const int32_t *const slot = place_identity(a, 1);
        const kvprim_store_desc d =
            store_of(call.dst.table, call.src.table, call.src.row_bytes, slot, KVPRIM_I32, 1, nullptr);
        CHECK(try_convert(a, &d, &call, "boundaries of scales") == RAN);
    }
}

/* Stores a row, whose source is in place, as E4M3 with a scale for each tile. */
static void store_tiles(arena *a, convert_call *call, int64_t tile, int64_t elements, bool inverse, const char *what)
{
    kvprim_format *const f = &call->dst.full;
    *f = format_of(KVPRIM_F8E4M3);
    f->scale = KVPRIM_SCALE_TILE, f->scale_dtype = KVPRIM_F32, f->tile = tile, f->scale_inverse = inverse;
    f->scale_tile_stride = 4, f->scale_stride = 4 * elements / tile;
    f->scales = reserve(a, size_t(f->scale_stride), 0);
    call->dst.table = table_of(reserve(a, size_t(elements), 0), 1, elements);
    call->dst.row_bytes = elements;
    give_formats(call);
    const int32_t *const slot = place_identity(a, 1);
    const kvprim_store_desc d =
        store_of(call->dst.table, call->src.table, call->src.row_bytes, slot, KVPRIM_I32, 1, nullptr);
    CHECK(try_convert(a, &d, call, what) == RAN);
}

/* Tiles of k times 448 and times the midpoints of E4M3's numbers from 16 to 32. Divided by k these are ties, which
   products with the rounded inverse of k often miss. */
static void convert_ties(arena *a)
{
    const int64_t tiles = 63, tile = 16, elements = tiles * tile;
    for (const bool inverse : {false, true}) {
        convert_call call = {};
        empty(a);
        place_plain(a, &call.src, KVPRIM_F16, {0, 0}, 1, elements, 1);
        for (int64_t e = 0; e < elements; e++) {
            const int64_t k = 1 + e / tile, times = e % tile ? 17 + 2 * (e % 8) : 448;
            const uint16_t x = uint16_t((bits_of_float(float(k * times)) - 0x38000000) >> 13);
            memcpy(static_cast<char *>(call.src.table.data) + 2 * e, &x, 2);
        }
        store_tiles(a, &call, tile, elements, inverse, "ties");
    }
}

/* Threads past a row's end load its last octet, whose scale alone would be a rare one, and must not store it. This runs
   twice, as the emulation turns the order of threads around each time: in one of both, their store would come last. */
static void convert_idle(arena *a)
{
    const int64_t tile = 64, elements = 5 * tile;
    for (int n = 0; n < 2; n++) {
        convert_call call = {};
        empty(a);
        place_plain(a, &call.src, KVPRIM_BF16, {0, 0}, 1, elements, 1);
        for (int64_t e = 0; e < elements; e++) {
            const uint16_t x = e < elements - 8 ? 0x3f80 : 0x0040; /* 1, then 2^-127 */
            memcpy(static_cast<char *>(call.src.table.data) + 2 * e, &x, 2);
        }
        store_tiles(a, &call, tile, elements, false, "idle threads");
    }
}

/* All slots are past the table. Each is counted once: V does not count it again, nor do threads past the last row,
   which read the first slot or the last, nor those that fill up a block's last warp. */
static void convert_past(arena *a)
{
    for (int n = 0; n < 2 * (KVPRIM_SCALE_TILE + 1); n++) {
        convert_case c = convert_case_of(16, KVPRIM_F8E4M3, KVPRIM_BF16, n / 2);
        convert_call call = {};
        empty(a);
        c.form = CONVERT_STORE, c.v = V_CONVERTS, c.where = OWN_MEMORY, c.dst = c.src = {0, 0};
        c.elements = n % 2 ? 320 : 512, c.tile = 64, c.count = 3, c.rows = 5;
        make_convert(a, &c, &call);
        int32_t *const slot = place_identity(a, c.count);
        for (int64_t i = 0; i < c.count; i++)
            slot[i] += int32_t(c.rows);
        call.store.slot = slot;
        CHECK(call.store.rejected && try_convert(a, &call.store, &call, "slots past the table") == RAN);
    }
}

/* Heads that begin inside 16 bytes, in rows that do not. */
static void convert_heads_apart(arena *a)
{
    const int64_t count = 3, heads = 3, piece = 16;
    for (unsigned n = 0; n < 32; n++) {
        const bool apart_dst = n % 2;
        convert_call call = {};
        empty(a);
        place_plain(a, &call.dst, n / 2 % 2 ? KVPRIM_F8E4M3 : KVPRIM_F32, {0, 0}, count, heads * piece, 1);
        place_plain(a, &call.src, n / 2 % 2 ? KVPRIM_BF16 : KVPRIM_INT8, {0, 0}, count, heads * piece, 1);
        convert_side *const apart = apart_dst ? &call.dst : &call.src;
        const int64_t size = bytes_of_type(apart->given.dtype);
        apart->table.heads = heads, apart->table.head_stride = (piece + 1 + n / 4) * size;
        apart->table.stride = round_up(heads * apart->table.head_stride, 64);
        apart->table.data = reserve(a, size_t(count * apart->table.stride), 0);
        fill_elements(apart->table.data, apart->given.dtype, size_t(count * apart->table.stride / size));
        give_formats(&call);
        const kvprim_transfer_desc d = transfer_of(call.dst.table, call.src.table, call.src.row_bytes, count);
        CHECK(try_convert(a, &d, &call, "heads apart") == RAN);
    }
}

/* So many rows that their edges and those of their scales are fetched first; nothing after these may be. */
static void convert_edges(arena *a)
{
    enum { NO_SCALES, SCALES_APART, SCALES_IN_ROW, V_APART, n_kinds };
    const int64_t count = 1100, elements = 528, tile = 88, behind = 4096, tiles = elements / tile, step = 64;
    const int64_t v_bytes = 1536; /* more words than K has */
    for (int kind = 0; kind < n_kinds; kind++) {
        convert_call call = {};
        kvprim_format *const f = &call.dst.full;
        int64_t stride = elements;
        empty(a);
        place_plain(a, &call.src, KVPRIM_BF16, {0, 0}, count, elements, 1);
        *f = format_of(KVPRIM_F8E4M3);
        if (kind != NO_SCALES) {
            f->scale = KVPRIM_SCALE_TILE, f->scale_dtype = KVPRIM_F32, f->tile = tile;
            f->scale_tile_stride = kind == V_APART ? 4 : step;
            stride = kind == SCALES_IN_ROW ? elements + tiles * step - 56 : kind == V_APART ? elements + 24 : stride;
            f->scale_offset = kind == SCALES_APART ? 0 : elements;
            f->scale_stride = kind == SCALES_APART ? tiles * step : stride;
        }
        if (kind == SCALES_APART)
            f->scales = reserve(a, size_t(count * tiles * step - step + 4), 0);
        reserve(a, behind, 0);
        call.dst.table = table_of(reserve(a, size_t(count * stride), 0), count, stride);
        call.dst.row_bytes = elements;
        reserve(a, behind, 0);
        give_formats(&call);
        const int32_t *const slot = place_identity(a, count);
        kvprim_store_desc d =
            store_of(call.dst.table, call.src.table, call.src.row_bytes, slot, KVPRIM_I32, count, nullptr);
        if (kind == V_APART) {
            d.v_bytes = call.v_dst.row_bytes = call.v_src.row_bytes = v_bytes;
            d.v_cache = call.v_dst.table = table_of(reserve(a, size_t(count * v_bytes), 0), count);
            d.v = call.v_src.table = table_of(reserve(a, size_t(count * v_bytes), 0), count);
        }
        CHECK(try_convert(a, &d, &call, "edges of rows") == RAN);
    }
}

/* A side without rows or memory, whose scales would lie in it: nothing of them is read, and all rows are past it. */
static void convert_empty(arena *a)
{
    const int64_t count = 3, elements = 128;
    for (const int scale : {KVPRIM_SCALE_TENSOR, KVPRIM_SCALE_HEAD, KVPRIM_SCALE_TILE})
        for (int form = 0; form < n_convert_forms; form++)
            for (const bool into : {true, false})
                for (unsigned how = 0; how < 3; how++) { /* by itself, as a move, a transfer by the host's list */
                    if (form != CONVERT_TRANSFER && (into == (form == CONVERT_GATHER) || how == 2))
                        continue;
                    convert_call call = {};
                    convert_side *const none = into ? &call.dst : &call.src, *const other =
                                                                                 into ? &call.src : &call.dst;
                    empty(a);
                    none->full = format_of(KVPRIM_F8E4M3);
                    none->full.scale = kvprim_scale_kind(scale), none->full.scale_offset = 64;
                    none->full.tile = scale == KVPRIM_SCALE_TENSOR ? 0 : 64;
                    none->given = none->full, none->row_bytes = elements;
                    none->table = table_of(nullptr, 0);
                    none->table.format = &none->given;
                    place_plain(a, other, KVPRIM_BF16, {0, 0}, count, elements, 1);
                    other->table.format = &other->given;
                    int32_t *const index = reserve<int32_t>(a, 4 * size_t(count), 0);
                    index[0] = 0, index[1] = -1, index[2] = 7;
                    a->index_room = count;
                    uint32_t *const rejected = reserve_counter(a);
                    const int64_t bytes = call.src.row_bytes;
                    call.gather =
                        gather_of(call.dst.table, call.src.table, bytes, index, KVPRIM_I32, 0, count, rejected);
                    call.store = store_of(call.dst.table, call.src.table, bytes, index, KVPRIM_I32, count, rejected);
                    kvprim_transfer_desc *const d = &call.transfer;
                    d->dst = call.dst.table, d->src = call.src.table, d->row_bytes = bytes, d->count = count;
                    (into ? d->dst_index : d->src_index) = index, d->index_type = KVPRIM_I32, d->rejected = rejected;
                    CHECK((how == 2                 ? try_listed_convert(a, &call, HOST_LISTS, "no rows")
                           : form == CONVERT_GATHER ? try_convert(a, &call.gather, &call, "no rows", how == 1)
                           : form == CONVERT_STORE  ? try_convert(a, &call.store, &call, "no rows", how == 1)
                                                    : try_convert(a, d, &call, "no rows", how == 1)) == RAN);
                }
}

/* Transfers alone, for sides in memories of other kinds. */
static void convert_transfers(arena *a)
{
    unsigned n = 0;
    for (const auto &pair : convert_pairs())
        for (int scale = 0; scale <= KVPRIM_SCALE_TILE; scale++, n++) {
            convert_case c = convert_case_of(n * 13, pair.first, pair.second, scale);
            c.form = CONVERT_TRANSFER, c.v = NO_V;
            c.count = c.rows = n % 5 ? c.count : 300; /* some are long enough for the rules of the link to the host */
            run_convert(a, &c);
        }
}

/* ---- tables that claim more rows than there are, so that numbers have 64 bits ---- */

#ifndef KVPRIM_DEBUG
static void convert_claimed(arena *a)
{
    const int64_t count = 40, rows = 64, elements = 72;
    for (unsigned n = 0; n < 8; n++) {
        const kvprim_dtype type = small_types[n % 3];
        convert_call call = {};
        empty(a);
        void *const slot = place_index(a, KVPRIM_I64, count, 0, rows, true);
        for (int64_t i = 0; i < count; i++)
            set_index(slot, KVPRIM_I64, i, i % 9 == 0 ? -1 - i : i % 9 == 1 ? int64_t(1) << 33 : i * 11 % rows);
        place_plain(a, &call.src, float_types[n % 2], {0, n / 4}, count, elements, 1);
        place_plain(a, &call.dst, type, {0, n / 4}, rows, elements, 1);
        call.dst.table.rows = int64_t(1) << 33;
        call.dst.table.stride = n % 2 ? 2 * elements : elements + 8;
        call.dst.table.data = reserve(a, size_t(rows * call.dst.table.stride), 0);
        if (n % 2) {
            call.dst.full.scale = KVPRIM_SCALE_TILE, call.dst.full.tile = 24, call.dst.full.scale_dtype = KVPRIM_F32;
            call.dst.full.scale_offset = elements, call.dst.full.scale_tile_stride = 4;
            call.dst.full.scale_stride = call.dst.table.stride;
        }
        give_formats(&call);
        const kvprim_store_desc d =
            store_of(call.dst.table, call.src.table, call.src.row_bytes, slot, KVPRIM_I64, count, nullptr);
        CHECK(try_convert(a, &d, &call, "claimed rows") == RAN);
    }
}
#endif

#endif /* GPU_TEST_CONVERT_H */

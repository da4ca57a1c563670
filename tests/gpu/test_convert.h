/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for moves that convert. They run in the memory of test_rows.h,
   once by the host function and once on the GPU, and every byte is compared. What the host function gives is tested in
   tests/core. Include it after test_rows.h. */
#ifndef GPU_TEST_CONVERT_H
#define GPU_TEST_CONVERT_H

#include <cmath>

/* ---- cases ---- */

enum scale_place { OWN_MEMORY, IN_ROW, BEHIND_PAGE, n_scale_places };
enum convert_form { CONVERT_GATHER, CONVERT_STORE, CONVERT_TRANSFER, n_convert_forms };

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
    unsigned n;          /* chooses whatever is not given */
};

static const kvprim_dtype float_types[] = {KVPRIM_F32, KVPRIM_F16, KVPRIM_BF16};
static const kvprim_dtype small_types[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8};

static int64_t bytes_of_type(kvprim_dtype t)
{
    return t == KVPRIM_F32 ? 4 : t == KVPRIM_F16 || t == KVPRIM_BF16 ? 2 : 1;
}

static bool is_small(kvprim_dtype t)
{
    return bytes_of_type(t) == 1;
}

static float float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
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
    switch (below(8)) {
    case 0:
        return static_cast<uint32_t>(below(UINT64_C(1) << 32));
    case 1:
        return edges[below(sizeof edges / sizeof *edges)];
    case 2:
        return bits_of_float((static_cast<float>(below(4096)) - 2048) / 16);
    case 3:
        return static_cast<uint32_t>(below(2) << 31 | (107 + below(40)) << 23 | below(1 << 23));
    default:
        return static_cast<uint32_t>(below(2) << 31 | (120 + below(10)) << 23 | below(1 << 23));
    }
}

/* Fills memory with elements of a type. */
static void fill_elements(void *to, kvprim_dtype type, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = random_f32(), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
        uint32_t x = bits;
        if (type == KVPRIM_BF16)
            x = bits >> 16;
        else if (type == KVPRIM_F16 && a >= 0x38800000 && a < 0x47800000 && !chance(4))
            x = sign | (a - 0x38000000) >> 13;
        memcpy(static_cast<char *>(to) + i * static_cast<size_t>(bytes_of_type(type)), &x,
               static_cast<size_t>(bytes_of_type(type)));
    }
}

static uint32_t random_scale()
{
    static const uint32_t edges[] = {0x00800000, 0x7f000000, 0,          0x80000000, 0x7f800000, 0x7fc00000,
                                     0xbf800000, 0x00000001, 0x1f800000, 0x5f800000, 0x1f7fffff, 0x5f800001};
    if (chance(4))
        return edges[below(sizeof edges / sizeof *edges)];
    return static_cast<uint32_t>((chance(8) ? 64 + below(128) : 117 + below(16)) << 23 |
                                 (chance(3) ? 0 : below(1 << 23)));
}

/* ---- one case in memory ---- */

/* A side with its format: `full` has every default filled in, `given` leaves some out. */
struct convert_side {
    kvprim_table table;
    kvprim_format full, given;
    int64_t row_bytes, layer_stride;
};

struct convert_call {
    convert_side dst, src;
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
                        int32_t layers)
{
    const int64_t size = bytes_of_type(type);
    size_t span = 0;
    layout l = layouts[at.layout % n_layouts];
    l.pad = l.pad / (at.layout / n_layouts ? 1 : 8) * size, l.page_pad *= size;
    l.heads = l.heads > 0 && elements % l.heads == 0 ? l.heads : 0;
    s->row_bytes = elements * size;
    s->table = lay_out(&l, rows, s->row_bytes, &span);
    s->layer_stride = round_up(static_cast<int64_t>(span), size);
    s->table.data =
        reserve(a, static_cast<size_t>(s->layer_stride * layers), at.align % 16 * static_cast<size_t>(size));
    s->full = s->given = format_of(type);
    fill_elements(s->table.data, type, static_cast<size_t>(s->layer_stride * layers / size));
}

/* Scales of the rows of a table in memory of their own. */
static void place_own_scales(arena *a, const convert_case *c, convert_side *s, int64_t rows, int32_t layers)
{
    const kvprim_table *const t = &s->table;
    kvprim_format *const f = &s->full;
    const int64_t size = f->scale_dtype == KVPRIM_F8E8M0 ? 1 : 4;
    const int64_t scales = f->scale == KVPRIM_SCALE_TENSOR ? 1 : c->elements / f->tile;
    const bool tiles = f->scale == KVPRIM_SCALE_TILE;
    const int64_t in_page = t->page_rows ? t->page_rows : rows > 0 ? rows : 1, pages = (rows + in_page - 1) / in_page;
    f->scale_tile_stride = size * (c->n % 5 == 1 ? 3 : 1);
    f->scale_stride = tiles ? scales * f->scale_tile_stride + (c->n % 3 == 1 ? 2 * size : 0) : 0;
    f->scale_page_stride = tiles && t->page_rows ? in_page * f->scale_stride + (c->n % 4 == 1 ? 5 * size : 0) : 0;
    int64_t layer = scales * f->scale_tile_stride;
    if (tiles)
        layer = t->page_rows ? (pages ? pages : 1) * f->scale_page_stride : in_page * f->scale_stride;
    f->scale_layer_stride = tiles || c->n % 2 ? layer : 0;
    const size_t bytes = static_cast<size_t>(f->scale_layer_stride * (layers - 1) + layer);
    f->scales = reserve(a, bytes, static_cast<size_t>(size) * below(5));
    for (size_t i = 0; i < bytes / static_cast<size_t>(size); i++) {
        const uint32_t scale =
            size == 4 ? random_scale() : static_cast<uint32_t>(chance(4) ? below(256) : 117 + below(20));
        memcpy(static_cast<char *>(f->scales) + i * static_cast<size_t>(size), &scale, static_cast<size_t>(size));
    }
    s->given = *f;
    if (tiles && f->scale_tile_stride == size && c->n % 3 != 1 && c->n % 4 != 1 && c->n % 7 != 0)
        s->given.scale_tile_stride = s->given.scale_stride = s->given.scale_page_stride = s->given.scale_layer_stride =
            0;
}

/* Rows with their scales inside, or behind the rows of each page. */
static void place_in_table(arena *a, const convert_case *c, convert_side *s, const placing &at, int64_t rows,
                           int32_t layers)
{
    kvprim_format *const f = &s->full;
    const int64_t size = f->scale_dtype == KVPRIM_F8E8M0 ? 1 : 4, scales = c->elements / f->tile * size;
    const int64_t page_rows = c->where == BEHIND_PAGE ? 1 + int64_t(at.layout % 5) * 3 : at.layout % 3 ? 0 : 4;
    const int64_t offset = round_up(c->elements, size), row = c->where == IN_ROW ? offset + scales : c->elements;
    const int64_t stride = c->where == IN_ROW ? row + size * (c->n % 3) : row + (c->n % 3);
    const int64_t behind = round_up(page_rows * stride, size);
    const int64_t page = c->where == IN_ROW ? page_rows * stride : behind + page_rows * scales + size * (c->n % 2);
    const int64_t pages = page_rows ? (rows + page_rows - 1) / page_rows : 0;
    s->row_bytes = c->elements;
    s->table = table_of(nullptr, rows, stride);
    s->table.page_rows = page_rows, s->table.page_stride = page_rows ? page + (c->where == IN_ROW ? size : 0) : 0;
    s->layer_stride =
        round_up((page_rows ? (pages ? pages : 1) * s->table.page_stride : (rows ? rows : 1) * stride), 16);
    s->table.data = reserve(a, static_cast<size_t>(s->layer_stride * layers), static_cast<size_t>(size) * at.align);
    f->scale_offset = c->where == IN_ROW ? offset : behind;
    f->scale_tile_stride = size;
    f->scale_stride = c->where == IN_ROW ? stride : scales;
    f->scale_page_stride = page_rows ? s->table.page_stride : 0;
    s->given = *f;
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
    f.scale_dtype = c->is_e8m0 ? KVPRIM_F8E8M0 : KVPRIM_F32;
    f.scale_power_of_two = c->power_of_two && c->scale == KVPRIM_SCALE_TILE;
    f.scale_inverse = c->inverse && (written || c->scale == KVPRIM_SCALE_TILE);
    f.scale_min = c->scale == KVPRIM_SCALE_TILE && c->n % 5 == 2 ? 1.0f / 512 : 0;
    if (c->scale == 0)
        f.scale_dtype = static_cast<kvprim_dtype>(0), f.scale_inverse = 0;
    if (type == KVPRIM_INT8 && written && c->n % 4)
        f.nans = reserve_counter(a);
    s->full = s->given = f;
    if (in_table)
        place_in_table(a, c, s, at, rows, layers);
    else {
        place_plain(a, s, type, at, rows, c->elements, layers);
        s->full = s->given = f;
        if (c->scale)
            place_own_scales(a, c, s, rows, layers);
    }
    if (c->scale == KVPRIM_SCALE_TILE && c->tile == 0)
        s->given.tile = 0;
    if (!c->is_e8m0)
        s->given.scale_dtype = static_cast<kvprim_dtype>(0);
}

static void place_side(arena *a, const convert_case *c, convert_side *s, bool dst, int64_t rows)
{
    const kvprim_dtype type = dst ? c->to : c->from;
    const int32_t layers = c->form == CONVERT_TRANSFER ? c->layers : 1;
    if (is_small(type))
        place_small(a, c, s, dst ? c->dst : c->src, rows, layers, dst);
    else
        place_plain(a, s, type, dst ? c->dst : c->src, rows, c->elements, layers);
    s->table.format = &s->given;
}

/* Makes a case. Descriptors point to the call's own formats. */
static void make_convert(arena *a, const convert_case *c, convert_call *call)
{
    const bool dst_index = c->form == CONVERT_STORE || (c->form == CONVERT_TRANSFER && c->indexed & 1);
    const bool src_index = c->form == CONVERT_GATHER || (c->form == CONVERT_TRANSFER && c->indexed & 2);
    const kvprim_index_type type = type_of(c->n);
    const int64_t base = bases[c->n / 2 % 4], stride = index_strides[c->n % 8];
    empty(a);
    place_side(a, c, &call->dst, true, dst_index ? c->rows : c->count);
    place_side(a, c, &call->src, false, src_index ? c->rows : c->count);
    void *const to = dst_index ? place_index(a, type, c->count, base, c->rows, true, stride) : nullptr;
    void *const from = src_index ? place_index(a, type, c->count, base, c->rows, false, stride) : nullptr;
    uint32_t *const rejected = c->n % 3 ? reserve_counter(a) : nullptr;
    const int64_t row_bytes = call->src.row_bytes;
    if (c->form == CONVERT_GATHER) {
        call->gather = gather_of(call->dst.table, call->src.table, row_bytes, from, type, base, c->count, rejected);
        call->gather.index_stride = stride;
    } else if (c->form == CONVERT_STORE) {
        call->store = store_of(call->dst.table, call->src.table, row_bytes, to, type, c->count, rejected);
        call->store.slot_base = base, call->store.slot_stride = stride;
    } else {
        kvprim_transfer_desc d = {};
        d.dst = call->dst.table, d.src = call->src.table;
        d.dst_layer_stride = call->dst.layer_stride, d.src_layer_stride = call->src.layer_stride;
        d.layers = c->layers, d.row_bytes = row_bytes, d.count = c->count, d.rejected = rejected;
        d.dst_index = to, d.src_index = from, d.index_type = type;
        d.dst_index_base = to ? base : 0, d.src_index_base = from ? base : 0;
        d.dst_index_stride = to ? stride : 0, d.src_index_stride = from ? stride : 0;
        call->transfer = d;
    }
}

/* ---- what a case may touch ---- */

static size_t scale_bytes(const kvprim_format *f)
{
    return f->scale_dtype == KVPRIM_F8E8M0 ? 1 : 4;
}

/* Allows access to the scales of a row, which the contract places. Returns false if they are written and lie on
   something else. */
static bool visit_scales(arena *a, const convert_side *s, const kvprim_table *layer, int32_t l, int64_t row, bool write)
{
    const kvprim_format *const f = &s->full;
    if (f->scale == 0)
        return true;
    const int64_t elements = s->row_bytes / bytes_of_type(f->dtype);
    const int64_t scales = f->scale == KVPRIM_SCALE_TENSOR ? 1 : elements / f->tile;
    char *at = f->scales ? static_cast<char *>(f->scales) + l * f->scale_layer_stride
                         : static_cast<char *>(layer->data) + f->scale_offset;
    if (f->scale == KVPRIM_SCALE_TILE)
        at += layer->page_rows
                  ? row / layer->page_rows * f->scale_page_stride + row % layer->page_rows * f->scale_stride
                  : row * f->scale_stride;
    for (int64_t t = 0; t < scales; t++, at += f->scale_tile_stride) {
        const size_t begin = offset_of(a, at), bytes = scale_bytes(f);
        if (begin + bytes > a->used || (write && memchr(&a->taken[begin], 1, bytes)))
            return false;
        if (write)
            memset(&a->taken[begin], 1, bytes);
        a->allowed.push_back({begin, bytes});
    }
    return true;
}

/* As visit_moves. Sides have rows of different sizes. */
static bool visit_convert(arena *a, rows_move m, const convert_call *call)
{
    bool good = true;
    if (m.rejected)
        visit_word(a, m.rejected, 4);
    if (call->dst.full.nans)
        visit_word(a, call->dst.full.nans, 4);
    good = visit_index(a, &m.dst, m.count) && visit_index(a, &m.src, m.count);
    for (int64_t i = 0; good && i < m.count; i++)
        m.rows.push_back({row_at(&m.dst, i), row_at(&m.src, i)});
    for (const bool write : {true, false})
        for (int32_t l = 0; good && l < m.layers; l++) {
            const convert_side *const s = write ? &call->dst : &call->src;
            const kvprim_table layer = layer_of(write ? &m.dst : &m.src, l);
            m.row_bytes = s->row_bytes;
            good = visit_layer(a, &m, l, write);
            for (size_t i = 0; good && i < m.rows.size(); i++) {
                const int64_t to = m.rows[i].first, from = m.rows[i].second;
                const bool moves = to >= 0 && (from >= 0 || (m.zero && write));
                good = !moves ||
                       visit_scales(a, s, &layer, l, write ? to : from, write && s->full.scale == KVPRIM_SCALE_TILE);
            }
        }
    return good;
}

/* A side's format for the code under test. */
static kvprim_format format_on_device(const arena *a, kvprim_format f, bool source)
{
    f.scales = source ? on_source(a, f.scales) : on_device(a, f.scales);
    f.nans = on_device(a, f.nans);
    return f;
}

static void point(kvprim_gather_desc *d, const kvprim_format *dst, const kvprim_format *src)
{
    d->dst.format = dst, d->src.format = src;
}

static void point(kvprim_store_desc *d, const kvprim_format *dst, const kvprim_format *src)
{
    d->k_cache.format = dst, d->k.format = src;
}

static void point(kvprim_transfer_desc *d, const kvprim_format *dst, const kvprim_format *src)
{
    d->dst.format = dst, d->src.format = src;
}

/* Runs a case on both sides. */
template <class Desc> static outcome try_convert(arena *a, const Desc *desc, const convert_call *call, const char *what)
{
    on_gpu<Desc> on(a, *desc);
    kvprim_format dst = format_on_device(a, call->dst.given, false), src = format_on_device(a, call->src.given, true);
    Desc resolved = {};
    point(&on.d, &dst, &src);
    snprintf(current, sizeof current, "%s: %s", functions<Desc>::name, what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = functions<Desc>::check(&on.d, nullptr);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs &&
        (functions<Desc>::check(desc, &resolved) != KVPRIM_OK || !visit_convert(a, rows_of(&resolved)[0], call)))
        return OUTSIDE;
    if (runs)
        describe(rows_of(&resolved));
    const outcome result = run_both(
        a, want, want_text, runs, [&] { return functions<Desc>::host(desc); },
        [&] {
            const kvprim_status got = functions<Desc>::gpu(&on.d, a->launch);
            if (!is_asked())
                memset(static_cast<void *>(&dst), 0xff, sizeof dst),
                    memset(static_cast<void *>(&src), 0xff, sizeof src);
            return got;
        });
    return result;
}

static outcome run_convert(arena *a, const convert_case *c)
{
    convert_call call = {};
    char what[300];
    make_convert(a, c, &call);
    snprintf(what, sizeof what,
             "%d <- %d, scale %d, %lld elements, tile %lld, scales %d, e8m0 %d, power of two %d, inverse %d, case %u",
             c->to, c->from, c->scale, static_cast<long long>(c->elements), static_cast<long long>(c->tile), c->where,
             c->is_e8m0, c->power_of_two, c->inverse, c->n);
    const outcome result = c->form == CONVERT_GATHER  ? try_convert(a, &call.gather, &call, what)
                           : c->form == CONVERT_STORE ? try_convert(a, &call.store, &call, what)
                                                      : try_convert(a, &call.transfer, &call, what);
    if (result != RAN)
        fail("%s: outcome %d: %s", current, result, kvprim_last_error());
    return result;
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
    c.scale = static_cast<kvprim_scale_kind>(small ? scale : 0);
    c.elements = size.elements;
    c.tile = c.scale == KVPRIM_SCALE_HEAD && size.tile == 0 ? size.elements : size.tile;
    c.where = tiles ? static_cast<scale_place>(n / 3 % n_scale_places) : OWN_MEMORY;
    c.is_e8m0 = c.scale && n % 7 == 3;
    c.power_of_two = n % 3 == 2;
    c.inverse = n % 4 == 3;
    c.form = static_cast<convert_form>(n / 2 % n_convert_forms);
    c.dst = {n * 5 % (2 * n_layouts), n % 2 ? n / 4 % 16 : 0};
    c.src = {n / 2 * 3 % (2 * n_layouts), n % 2 ? n / 8 % 16 : 0};
    c.count = 1 + n * 7 % 40, c.rows = c.count + 3;
    c.layers = 1 + int32_t(n % 3), c.indexed = n / 5 % 4;
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
                const convert_case c = convert_case_of(n * 11 + below(64), pair.first, pair.second, scale);
                (void)run_convert(a, &c);
            }
}

#endif /* GPU_TEST_CONVERT_H */

/* SPDX-License-Identifier: MIT */
/* Which kernel converts one or two moves, and with which parameters: for each condition of >>impl_convert_plan a case
   on either side. Every byte is compared, as in test_convert.h, after which test_cuda.cu and test_cuda_emulated.cpp
   include it. */
#ifndef GPU_TEST_CHOICE_H
#define GPU_TEST_CHOICE_H

/* Fails unless the last call launched these kernels, a letter for each (see kvprim_emulate_note), where it is known. */
static void check_launches(const char *letters);

/* A store from elements of `large` to quantised ones, or a gather back; or one of bytes. Distances and alignments are
   bytes, of which memory begins so many past a multiple of 64. */
struct choice_move {
    bool gather, counted, own_index;
    int64_t count, rows, bytes; /* rows: of the indexed side. bytes: of a row that moves as it is, or 0 */
    kvprim_dtype large;
    kvprim_format f; /* of the quantised side */
    int64_t elements, large_pad, large_page_rows;
    int32_t heads;
    int64_t head_gap, pad, page_rows, page_gap; /* of the quantised side, or of the bytes' */
    size_t align, large_align;
    bool inside;                               /* scales follow the elements of each row */
    int64_t scale_pad, scale_page_gap, behind; /* behind: so many bytes after K's rows begin V's, in K's table; or 0 */
    bool scale_pages_first;                    /* the scales of a row of all pages lie together */
    int64_t tail;                              /* after the table */
    int nans;                                  /* 0: not counted; 1, 2: which counter */
};

struct choice {
    choice_move k, v;
    int moves;
};

struct choice_case {
    const char *name, *launches;
    void (*change)(choice &);
};

static choice usual_choice()
{
    choice c = {};
    c.moves = 1;
    c.k.count = 40, c.k.rows = 50, c.k.counted = true;
    c.k.large = KVPRIM_BF16, c.k.elements = 256, c.k.heads = 1;
    c.k.f = format_of(KVPRIM_F8E4M3);
    c.k.f.scale = KVPRIM_SCALE_TILE, c.k.f.scale_dtype = KVPRIM_F32, c.k.f.tile = 64;
    c.v = c.k;
    c.v.counted = false;
    return c;
}

/* A store of K and V, which convert alike. */
static void with_v(choice &c)
{
    c.moves = 2;
}

/* Of V that is copied, as many bytes. */
static void with_bytes(choice &c, int64_t bytes)
{
    c.moves = 2;
    c.v.bytes = bytes;
}

static void with_gather(choice &c)
{
    c.k.gather = c.v.gather = true;
}

static void with_scale(choice &c, kvprim_scale_kind scale)
{
    for (choice_move *const m : {&c.k, &c.v}) {
        m->f.scale = scale;
        m->f.tile = scale == KVPRIM_SCALE_TENSOR || scale == 0 ? 0 : m->f.tile;
        m->f.scale_dtype = scale ? m->f.scale_dtype : kvprim_dtype(0);
    }
}

static void with_elements(choice &c, int64_t elements, int64_t tile)
{
    c.k.elements = c.v.elements = elements;
    c.k.f.tile = c.v.f.tile = tile;
}

static void with_many(choice &c, int64_t count)
{
    c.k.count = c.v.count = c.k.rows = c.v.rows = count;
}

/* ---- one case ---- */

static int64_t choice_scales(const choice_move *m)
{
    return m->f.scale == 0 ? 0 : m->f.scale == KVPRIM_SCALE_TENSOR ? 1 : m->elements / m->f.tile;
}

/* The table of quantised rows, or of bytes. `k`: K's, in which V may lie. */
static void place_choice(arena *a, const choice_move *m, convert_side *s, const convert_side *k, int64_t rows)
{
    const int64_t row = m->bytes ? m->bytes : m->elements * bytes_of_type(m->f.dtype), piece = row / m->heads;
    const int64_t scale_bytes = m->f.scale_dtype == KVPRIM_F8E8M0 ? 1 : 4, scales = choice_scales(m);
    const bool tiled = m->f.scale == KVPRIM_SCALE_TILE;
    kvprim_format *const f = &s->full;
    *f = m->f;
    s->row_bytes = row;
    if (!f->scale_tile_stride && scales && f->scale != KVPRIM_SCALE_TENSOR)
        f->scale_tile_stride = scale_bytes;
    const int64_t of_scales = scales ? (scales - 1) * f->scale_tile_stride + scale_bytes : 0;
    s->table = table_of(nullptr, rows);
    s->table.heads = m->heads, s->table.head_stride = m->heads > 1 ? piece + m->head_gap : 0;
    s->table.stride = (m->heads > 1 ? m->heads * s->table.head_stride : row) + (m->inside ? of_scales : 0) + m->pad;
    s->table.page_rows = m->page_rows;
    s->table.page_stride = m->page_rows ? m->page_rows * s->table.stride + m->page_gap : 0;
    const int64_t pages = m->page_rows ? (rows + m->page_rows - 1) / m->page_rows : 0;
    const int64_t span = pages ? pages * s->table.page_stride : (rows ? rows : 1) * s->table.stride;
    s->table.data =
        m->behind ? static_cast<char *>(k->table.data) + m->behind : reserve(a, size_t(span + m->tail), m->align);
    if (m->bytes) {
        *f = kvprim_format{};
        return;
    }
    if (m->inside)
        f->scale_offset = row;
    if (f->scale_offset) {
        f->scale_stride = s->table.stride, f->scale_page_stride = s->table.page_stride;
    } else if (scales) {
        const int64_t in_page = m->page_rows ? m->page_rows : rows ? rows : 1, own = of_scales + m->scale_pad;
        f->scale_stride = !tiled ? 0 : m->scale_pages_first ? pages * own : own;
        f->scale_page_stride = !tiled || !m->page_rows ? 0
                               : m->scale_pages_first  ? own
                                                       : in_page * own + m->scale_page_gap;
        const int64_t bytes = tiled ? (in_page + m->page_rows * pages) * own + pages * m->scale_page_gap : own;
        f->scales = reserve(a, size_t(bytes), 0);
        for (int64_t i = 0; i < bytes / scale_bytes; i++) {
            const uint32_t scale = scale_bytes == 4 ? random_scale() : uint32_t(117 + below(20));
            memcpy(static_cast<char *>(f->scales) + i * scale_bytes, &scale, size_t(scale_bytes));
        }
    }
    s->given = *f;
    s->table.format = &s->given;
}

/* The other side, whose rows no index names. */
static void place_large(arena *a, const choice_move *m, convert_side *s)
{
    const int64_t size = m->bytes ? 1 : bytes_of_type(m->large), row = m->bytes ? m->bytes : m->elements * size;
    s->row_bytes = row;
    s->table = table_of(nullptr, m->count, row + m->large_pad);
    s->table.page_rows = m->large_page_rows;
    s->table.page_stride = m->large_page_rows ? m->large_page_rows * s->table.stride + 16 : 0;
    const size_t bytes = size_t((m->count + m->large_page_rows) * (s->table.stride + 16));
    s->table.data = reserve(a, bytes, m->large_align);
    if (m->bytes)
        return;
    fill_elements(s->table.data, m->large, bytes / size_t(size));
    s->full = s->given = format_of(m->large);
    s->table.format = &s->given;
}

/* Makes a move on both sides, and visits what it may touch. Returns false if it is refused. */
template <class Desc>
static bool make_choice_move(arena *a, const Desc &d, bool converts, const convert_call *call,
                             const device_formats *formats, kvprim_move *host, kvprim_move *on)
{
    Desc device = on_device(a, d), resolved;
    if (converts)
        formats->point(&device);
    return functions<Desc>::check(&d, &resolved) == KVPRIM_OK && functions<Desc>::moves(&d, host) == KVPRIM_OK &&
           functions<Desc>::moves(&device, on) == KVPRIM_OK && visit_convert(a, {rows_of(&resolved)[0]}, call);
}

static void run_choice(arena *a, const choice_case *which)
{
    choice c = usual_choice();
    convert_call calls[2] = {};
    std::unique_ptr<device_formats> formats[2];
    kvprim_move host[3], on[3]; /* a store writes two */
    void *index = nullptr;
    which->change(c);
    snprintf(current, sizeof current, "%s", which->name);
    empty(a);
    uint32_t *const nans[3] = {nullptr, reserve_counter(a), reserve_counter(a)};
    for (int n = 0; n < c.moves; n++) {
        choice_move *const m = n ? &c.v : &c.k;
        m->f.nans = nans[m->nans];
        convert_side *const small = m->gather ? &calls[n].src : &calls[n].dst;
        place_choice(a, m, small, &calls[0].dst, m->rows);
        place_large(a, m, m->gather ? &calls[n].dst : &calls[n].src);
        if (n == 0 || m->own_index)
            index = place_index(a, KVPRIM_I32, m->count, 0, m->rows, !c.k.gather || !c.v.gather);
        uint32_t *const rejected = m->counted ? reserve_counter(a) : nullptr;
        const kvprim_table &dst = calls[n].dst.table, &src = calls[n].src.table;
        const int64_t bytes = calls[n].src.row_bytes;
        calls[n].gather = gather_of(dst, src, bytes, index, KVPRIM_I32, 0, m->count, rejected);
        calls[n].store = store_of(dst, src, bytes, index, KVPRIM_I32, m->count, rejected);
    }
    start_visit(a);
    for (int n = 0; n < c.moves; n++) {
        const choice_move *const m = n ? &c.v : &c.k;
        const convert_call *const call = &calls[n];
        formats[n].reset(new device_formats(a, call));
        const device_formats *const f = formats[n].get();
        if (!(m->gather ? make_choice_move(a, call->gather, !m->bytes, call, f, &host[n], &on[n])
                        : make_choice_move(a, call->store, !m->bytes, call, f, &host[n], &on[n]))) {
            fail("%s: %s", which->name, kvprim_last_error());
            return;
        }
    }
    const size_t moves = size_t(c.moves);
    CHECK(run_both(
              a, KVPRIM_OK, "-", true, [&] { return kvprim_cpu_move(host, moves); },
              [&] { return kvprim_cuda_move(on, moves, a->launch); }) == RAN);
    check_launches(which->launches);
}

/* ---- the cases ---- */

static const kvprim_scale_kind no_scale = kvprim_scale_kind(0);

/* The kernels of plain rows convert a store (C), one that computes scales (T) and a gather (C), or others do (G). */
static const choice_case plain_choices[] = {
    {"store, tiles", "T", [](choice &) {}},
    {"store, one scale", "C", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"store, scales of heads", "C", [](choice &c) { with_scale(c, KVPRIM_SCALE_HEAD); }},
    {"store, no scale", "C", [](choice &c) { with_scale(c, no_scale); }},
    {"gather, tiles", "C", [](choice &c) { with_gather(c); }},
    {"gather, one scale", "C", [](choice &c) { with_gather(c), with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"no side is quantised", "G", [](choice &c) { with_scale(c, no_scale), c.k.f.dtype = KVPRIM_F16; }},
    {"8,192 bytes, one scale", "C", [](choice &c) { with_elements(c, 4096, 0), with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"gather of a tile of 8,192 bytes", "C", [](choice &c) { with_gather(c), with_elements(c, 4096, 4096); }},
    {"K is empty", "T", [](choice &c) { c.moves = 2, c.v.own_index = true, c.k.count = 0; }},
    {"rows 16 bytes further", "T", [](choice &c) { c.k.large_pad = 16; }},
    {"rows 8 bytes further", "G", [](choice &c) { c.k.large_pad = 8; }},
    {"rows from 8 bytes on", "G", [](choice &c) { c.k.large_align = 8; }},
    {"rows in pages", "G", [](choice &c) { c.k.large_page_rows = 8; }},
    {"528 bytes", "C", [](choice &c) { with_elements(c, 264, 0), with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"520 bytes", "G", [](choice &c) { with_elements(c, 260, 0), with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"520 bytes of no scale", "G", [](choice &c) { with_elements(c, 260, 0), with_scale(c, no_scale); }},
    {"cache from 8 bytes on", "T", [](choice &c) { c.k.align = 8; }},
    {"cache from 4 bytes on", "T", [](choice &c) { c.k.align = 4; }},
    {"cache from 2 bytes on", "G", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), c.k.align = 2; }},
    {"one scale multiplies, cache from 4 bytes on", "C",
     [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), c.k.f.scale_inverse = 1, c.k.align = 4; }},
    {"gather from 4 bytes on", "C", [](choice &c) { with_gather(c), c.k.align = 4; }},
    {"cache of fp32 from 4 bytes on", "G", [](choice &c) { c.k.align = 4, c.k.large = KVPRIM_F32; }},
    {"cache rows 8 bytes further", "T", [](choice &c) { c.k.pad = 8; }},
    {"cache rows 4 bytes further", "T", [](choice &c) { c.k.pad = 4; }},
    {"cache rows 2 bytes further", "G", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), c.k.pad = 2; }},
    {"pages 16 bytes further", "T", [](choice &c) { c.k.page_rows = 7, c.k.page_gap = 16; }},
    {"pages 4 bytes further", "T", [](choice &c) { c.k.page_rows = 7, c.k.page_gap = 4; }},
    {"heads 16 bytes further", "T", [](choice &c) { c.k.heads = 2, c.k.head_gap = 16; }},
    {"heads 4 bytes further", "T", [](choice &c) { c.k.heads = 2, c.k.head_gap = 4; }},
    {"tiles inside heads", "T", [](choice &c) { with_elements(c, 192, 48), c.k.heads = 2, c.k.head_gap = 16; }},
    {"a tile across heads", "G", [](choice &c) { with_elements(c, 192, 64), c.k.heads = 2, c.k.head_gap = 16; }},
    {"gather of a tile across heads", "C",
     [](choice &c) { with_gather(c), with_elements(c, 192, 64), c.k.heads = 2, c.k.head_gap = 16; }},
    {"4,096 bytes", "T", [](choice &c) { with_elements(c, 2048, 512); }},
    {"4,112 bytes", "G", [](choice &c) { with_elements(c, 2056, 8); }},
    {"gather of 4,112 bytes", "C", [](choice &c) { with_gather(c), with_elements(c, 2056, 8); }},
    {"scales of 2^126 or more", "T", [](choice &c) { c.k.f.scale_min = 8.507059e37f; }},
    {"scales above 2^126", "G", [](choice &c) { c.k.f.scale_min = 8.50706e37f; }},
    {"powers from 2^126 on", "T", [](choice &c) { c.k.f.scale_min = 8.507059e37f, c.k.f.scale_power_of_two = 1; }},
    {"powers from 2^127 on", "G", [](choice &c) { c.k.f.scale_min = 1.7014118e38f, c.k.f.scale_power_of_two = 1; }},
    {"tiles, E8M0", "T", [](choice &c) { c.k.f.scale_dtype = KVPRIM_F8E8M0; }},
    {"one scale, E8M0", "G", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), c.k.f.scale_dtype = KVPRIM_F8E8M0; }},
    {"gather, one scale, E8M0", "G",
     [](choice &c) { with_gather(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.k.f.scale_dtype = KVPRIM_F8E8M0; }},
    {"tiles of 8", "T", [](choice &c) { c.k.f.tile = 8; }},
    {"tiles of 4", "G", [](choice &c) { c.k.f.tile = 4; }},
    {"tiles of 4 fp32", "G", [](choice &c) { c.k.f.tile = 4, c.k.large = KVPRIM_F32; }},
    {"heads of 4", "G", [](choice &c) { with_scale(c, KVPRIM_SCALE_HEAD), c.k.f.tile = 4; }},
    {"gather of tiles of 4", "G", [](choice &c) { with_gather(c), c.k.f.tile = 4; }},
    {"scales in pages", "T", [](choice &c) { c.k.page_rows = 7; }},
    {"scales in pages apart", "T", [](choice &c) { c.k.page_rows = 7, c.k.scale_page_gap = 12; }},
    {"scales of all pages together", "G", [](choice &c) { c.k.page_rows = 7, c.k.scale_pages_first = true; }},
    {"gather, scales of all pages together", "G",
     [](choice &c) { with_gather(c), c.k.page_rows = 7, c.k.scale_pages_first = true; }},
    {"scales behind rows", "T", [](choice &c) { c.k.inside = true; }},
};

/* One launch takes two moves, or each takes its own. P and B: V is copied by itself. */
static const choice_case pair_choices[] = {
    {"K and V", "T", [](choice &c) { with_v(c); }},
    {"two gathers", "CC", [](choice &c) { with_v(c), with_gather(c); }},
    {"a store, then a gather", "TC", [](choice &c) { with_v(c), c.v.gather = true; }},
    {"V counts", "TT", [](choice &c) { with_v(c), c.v.counted = true; }},
    {"V has fewer rows", "TT", [](choice &c) { with_v(c), c.v.count--; }},
    {"V has other slots", "TT", [](choice &c) { with_v(c), c.v.own_index = true; }},
    {"V's cache is shorter", "TT", [](choice &c) { with_v(c), c.v.rows--; }},
    {"the same pages", "T", [](choice &c) { with_v(c), c.k.page_rows = c.v.page_rows = 7, c.v.page_gap = 16; }},
    {"only K has pages", "T", [](choice &c) { with_v(c), c.k.page_rows = 7, c.k.page_gap = 16; }},
    {"only V has pages", "T", [](choice &c) { with_v(c), c.v.page_rows = 7, c.v.page_gap = 16; }},
    {"unlike pages", "TT",
     [](choice &c) { with_v(c), c.k.page_rows = 7, c.v.page_rows = 5, c.k.page_gap = c.v.page_gap = 16; }},
    {"the same heads", "T", [](choice &c) { with_v(c), c.k.heads = c.v.heads = 2, c.k.head_gap = c.v.head_gap = 16; }},
    {"unlike heads", "TT", [](choice &c) { with_v(c), c.k.heads = 2, c.k.head_gap = 16; }},
    {"V is copied", "T", [](choice &c) { with_bytes(c, 1024); }},
    {"K has one scale, V is copied", "CP", [](choice &c) { with_bytes(c, 1024), with_scale(c, KVPRIM_SCALE_TENSOR); }},
    {"K has heads, V is copied", "TP",
     [](choice &c) { with_bytes(c, 1024), c.k.heads = c.v.heads = 2, c.k.head_gap = c.v.head_gap = 16; }},
    {"V is copied from pages", "TB", [](choice &c) { with_bytes(c, 1024), c.v.large_page_rows = 8; }},
    {"V is copied from 8 bytes on", "TP", [](choice &c) { with_bytes(c, 1024), c.v.large_align = 8; }},
    {"V is copied, 1,032 bytes", "TP", [](choice &c) { with_bytes(c, 1032); }},
    {"V is copied, 1,032 of 1,040 bytes", "TP", [](choice &c) { with_bytes(c, 1032), c.v.pad = c.v.large_pad = 8; }},
    {"V is copied, 3,072 bytes with K", "T", [](choice &c) { with_bytes(c, 2560); }},
    {"V is copied beside tiles of a warp", "T", [](choice &c) { with_elements(c, 512, 256), with_bytes(c, 48); }},
    {"gather, V is copied", "C", [](choice &c) { with_gather(c), with_bytes(c, 128); }},
    {"gather of many, V is copied", "C", [](choice &c) { with_gather(c), with_bytes(c, 48), with_many(c, 2049); }},
    {"gather in pages, V is copied", "C",
     [](choice &c) {
         with_gather(c), with_bytes(c, 128), c.k.page_rows = c.v.page_rows = 7, c.k.page_gap = c.v.page_gap = 16;
     }},
    {"gather, V has other pages", "CP",
     [](choice &c) {
         with_gather(c), with_bytes(c, 128), c.k.page_rows = 7, c.v.page_rows = 8, c.k.page_gap = c.v.page_gap = 16;
     }},
    {"gather, V is copied, as many words", "C",
     [](choice &c) { with_gather(c), with_elements(c, 256, 128), with_bytes(c, 512); }},
    {"gather, V is copied, a word more", "CP",
     [](choice &c) { with_gather(c), with_elements(c, 256, 128), with_bytes(c, 528); }},
    {"gather, V is copied, 4,080 bytes with K", "C",
     [](choice &c) { with_gather(c), with_elements(c, 1024, 128), with_bytes(c, 2032); }},
    {"gather, V is copied, 4,096 bytes with K", "CP",
     [](choice &c) { with_gather(c), with_elements(c, 1024, 128), with_bytes(c, 2048); }},
    {"gather, V is copied from other rows", "CP",
     [](choice &c) { with_gather(c), with_bytes(c, 128), c.v.own_index = true; }},
    {"gather, V is copied and counted", "CP",
     [](choice &c) { with_gather(c), with_bytes(c, 128), c.v.counted = true; }},
    {"gather, V is copied, 136 bytes", "CP", [](choice &c) { with_gather(c), with_bytes(c, 136); }},
    {"V is copied, 3,088 bytes with K", "TP", [](choice &c) { with_bytes(c, 2576); }},
    {"only K is plain", "TG", [](choice &c) { with_v(c), c.v.large_pad = 8; }},
    {"only V is plain", "GT", [](choice &c) { with_v(c), c.k.large_pad = 8; }},
    {"rows of unlike tiles", "TT", [](choice &c) { with_v(c), c.v.elements = 128; }},
    {"unlike rows, one scale", "C",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.v.elements = 128; }},
    {"unlike rows, more of V", "C", [](choice &c) { with_v(c), with_scale(c, no_scale), c.v.elements = 320; }},
    {"unlike rows, scales of heads", "C",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_HEAD), c.v.elements = 128; }},
    {"V comes from rows further apart, one scale", "C",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.v.large_pad = 16; }},
    {"V's scales are further apart, scales of heads", "C",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_HEAD), c.v.f.scale_tile_stride = 12; }},
    {"like rows in heads, one scale", "C",
     [](choice &c) {
         with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.k.heads = c.v.heads = 2, c.k.head_gap = c.v.head_gap = 16;
     }},
    {"unlike rows in heads, one scale", "CC",
     [](choice &c) {
         with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.k.heads = c.v.heads = 2;
         c.v.elements = 128, c.k.head_gap = c.v.head_gap = 16;
     }},
    {"unlike quantised types", "TT", [](choice &c) { with_v(c), c.v.f.dtype = KVPRIM_F8E5M2; }},
    {"unlike types", "TT", [](choice &c) { with_v(c), c.v.large = KVPRIM_F16; }},
    {"unlike types, no scale", "CC", [](choice &c) { with_v(c), with_scale(c, no_scale), c.v.large = KVPRIM_F16; }},
    {"unlike kinds of scales", "CC",
     [](choice &c) {
         with_v(c), with_scale(c, KVPRIM_SCALE_HEAD);
         c.v.f.scale = KVPRIM_SCALE_TENSOR, c.v.f.tile = 0;
     }},
    {"K has one scale, V has those of heads", "CC",
     [](choice &c) {
         with_v(c), with_scale(c, KVPRIM_SCALE_HEAD);
         c.k.f.scale = KVPRIM_SCALE_TENSOR, c.k.f.tile = 0;
     }},
    {"unlike types of powers of two", "TT",
     [](choice &c) { with_v(c), c.k.f.scale_power_of_two = 1, c.v.f.scale_dtype = KVPRIM_F8E8M0; }},
    {"unlike tiles", "TT", [](choice &c) { with_v(c), c.v.f.tile = 32; }},
    {"unlike scales of heads", "CC", [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_HEAD), c.v.f.tile = 32; }},
    {"unlike types of scales", "TT", [](choice &c) { with_v(c), c.v.f.scale_dtype = KVPRIM_F8E8M0; }},
    {"only V multiplies", "TT", [](choice &c) { with_v(c), c.v.f.scale_inverse = 1; }},
    {"only K multiplies", "CC",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), c.k.f.scale_inverse = 1; }},
    {"only V has powers of two", "TT", [](choice &c) { with_v(c), c.v.f.scale_power_of_two = 1; }},
    {"the same least scale", "T", [](choice &c) { with_v(c), c.v.f.scale_min = 1.17549435e-38f; }},
    {"unlike least scales", "TT", [](choice &c) { with_v(c), c.v.f.scale_min = 1024; }},
    {"NaNs are counted together", "T",
     [](choice &c) { with_v(c), c.k.f.dtype = c.v.f.dtype = KVPRIM_INT8, c.k.nans = c.v.nans = 1; }},
    {"NaNs are counted apart", "TT",
     [](choice &c) { with_v(c), c.k.f.dtype = c.v.f.dtype = KVPRIM_INT8, c.k.nans = 1, c.v.nans = 2; }},
    {"NaNs of V are not counted", "TT",
     [](choice &c) { with_v(c), c.k.f.dtype = c.v.f.dtype = KVPRIM_INT8, c.k.nans = 1; }},
};

/* How threads share tiles and rows. H: threads take an octet of each half of K's rows. */
static const choice_case shape_choices[] = {
    {"tiles of 1 octet of two", "T", [](choice &c) { with_v(c), with_elements(c, 256, 8); }},
    {"fewer tiles than a warp has room for", "T", [](choice &c) { with_elements(c, 320, 64), with_many(c, 1); }},
    {"tiles of 2 octets", "T", [](choice &c) { with_elements(c, 256, 16); }},
    {"tiles of 3 octets", "T", [](choice &c) { with_elements(c, 264, 24); }},
    {"tiles of 32 octets", "T", [](choice &c) { with_elements(c, 512, 256); }},
    {"tiles of 64 octets", "T", [](choice &c) { with_elements(c, 1024, 512); }},
    {"tiles of 65 octets", "T", [](choice &c) { with_elements(c, 1040, 520); }},
    {"tiles of 128 octets", "T", [](choice &c) { with_elements(c, 2048, 1024); }},
    {"tiles of 256 octets", "T", [](choice &c) { with_elements(c, 2048, 2048); }},
    {"tiles of 64 octets of fp32", "G", [](choice &c) { with_elements(c, 512, 256), c.k.large = KVPRIM_F32; }},
    {"tiles of 32 octets, INT8", "T", [](choice &c) { with_elements(c, 512, 256), c.k.f.dtype = KVPRIM_INT8; }},
    {"tiles of 33 octets, INT8", "G", [](choice &c) { with_elements(c, 528, 264), c.k.f.dtype = KVPRIM_INT8; }},
    {"tiles of 128 octets, INT8", "G", [](choice &c) { with_elements(c, 2048, 1024), c.k.f.dtype = KVPRIM_INT8; }},
    {"store of INT8", "C", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), c.k.f.dtype = KVPRIM_INT8; }},
    {"gather of INT8", "C", [](choice &c) { with_gather(c), c.k.f.dtype = KVPRIM_INT8; }},
    {"gather of more than 1 MB", "C", [](choice &c) { with_gather(c), with_many(c, 2049); }},
    {"gather of INT8 to fp16", "C",
     [](choice &c) { with_gather(c), c.k.f.dtype = KVPRIM_INT8, c.k.large = KVPRIM_F16; }},
    {"gather of INT8 to fp32", "G",
     [](choice &c) { with_gather(c), c.k.f.dtype = KVPRIM_INT8, c.k.large = KVPRIM_F32; }},
    {"gather to fp16", "C", [](choice &c) { with_gather(c), c.k.large = KVPRIM_F16; }},
    {"gather to fp32", "G", [](choice &c) { with_gather(c), c.k.large = KVPRIM_F32; }},
    {"gather of more than 1 MB to fp16", "C",
     [](choice &c) { with_gather(c), with_many(c, 2049), c.k.large = KVPRIM_F16; }},
    {"gather of more than 1 MB to fp32", "G",
     [](choice &c) { with_gather(c), with_many(c, 2049), c.k.large = KVPRIM_F32; }},
    {"gather of more than 1 MB, odd", "C",
     [](choice &c) { with_gather(c), with_elements(c, 264, 88), with_many(c, 2049); }},
    {"store of 1 MB", "C", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), with_many(c, 2048); }},
    {"store of more than 1 MB", "H", [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), with_many(c, 2049); }},
    {"store of more than 1 MB, odd", "C",
     [](choice &c) { with_scale(c, KVPRIM_SCALE_TENSOR), with_elements(c, 264, 0), with_many(c, 2049); }},
    {"store of more than 1 MB in heads", "H",
     [](choice &c) {
         with_scale(c, KVPRIM_SCALE_HEAD), with_many(c, 2049);
         c.k.f.tile = 32, c.k.heads = 4, c.k.head_gap = 208;
     }},
    {"store of more than 1 MB, K and V", "C",
     [](choice &c) { with_v(c), with_scale(c, KVPRIM_SCALE_TENSOR), with_many(c, 1025); }},
};

/* From 1 MB on the edges of rows and scales are fetched first. Nothing else may be. */
static void with_edges(choice &c)
{
    with_elements(c, 2048, 1024), with_many(c, 257);
    c.k.pad = c.v.pad = 16;
}

/* V's bytes begin where K's first row ends. */
static void with_behind(choice &c, int64_t pad)
{
    with_elements(c, 1024, 1024), with_many(c, 513), with_bytes(c, 64);
    c.v.behind = 1024, c.k.pad = pad;
}

/* Rows of bytes in pages, which do not fill whole sectors of memory. */
static void with_pages(choice &c)
{
    with_many(c, 2049);
    for (choice_move *const m : {&c.k, &c.v})
        m->bytes = 528, m->page_rows = 16, m->page_gap = m->large_pad = 16;
}

static const choice_case edge_choices[] = {
    {"heads apart", "T", [](choice &c) { with_edges(c), c.k.heads = 2, c.k.head_gap = 1040; }},
    {"V's scales are shorter", "T",
     [](choice &c) { with_edges(c), with_many(c, 129), with_v(c), c.k.f.scale_tile_stride = 400; }},
    {"V's rows are shorter", "T",
     [](choice &c) {
         with_edges(c), with_many(c, 129), with_v(c);
         c.k.inside = c.v.inside = true, c.k.f.scale_tile_stride = 400, c.v.f.scale_tile_stride = 8;
         c.k.pad = c.v.pad = 12;
     }},
    {"only K's scales follow its rows", "T",
     [](choice &c) { with_edges(c), with_many(c, 129), with_v(c), c.k.inside = true, c.k.pad = 8; }},
    {"only K's scales follow its heads", "T",
     [](choice &c) {
         with_v(c), with_elements(c, 256, 128), with_many(c, 1100);
         c.k.heads = c.v.heads = 2, c.k.head_gap = c.v.head_gap = 4, c.v.pad = -4;
         c.k.f.scale_offset = 128, c.k.f.scale_tile_stride = c.v.f.scale_tile_stride = 132;
     }},
    {"V behind K", "T", [](choice &c) { with_behind(c, 80), c.v.pad = 1040; }},
    {"V behind K, twice as far apart", "T",
     [](choice &c) { with_behind(c, 80), c.v.pad = 2144, c.k.tail = 513 * 1104; }},
    {"V behind K, in pages", "T",
     [](choice &c) { with_behind(c, 656), c.v.pad = 1616, c.v.page_rows = 64, c.v.page_gap = 64; }},
    {"bytes from pages", "P", [](choice &c) { with_pages(c), with_gather(c); }},
    {"bytes to pages", "P", [](choice &c) { with_pages(c); }},
    {"bytes of K and V to pages", "P", [](choice &c) { with_pages(c), c.moves = 2; }},
    {"heads apart, one scale", "H",
     [](choice &c) {
         with_edges(c), with_scale(c, KVPRIM_SCALE_TENSOR);
         c.k.heads = 2, c.k.head_gap = 1040;
     }},
};

static void run_choices(arena *a, const choice_case *cases, size_t n)
{
    for (size_t i = 0; i < n; i++)
        run_choice(a, &cases[i]);
}

/* Layers of two launches, whose scales are their own. Rows past the table are counted once. */
static void convert_layers(arena *a)
{
    for (const int scale : {KVPRIM_SCALE_TENSOR, KVPRIM_SCALE_HEAD, KVPRIM_SCALE_TILE})
        for (const bool into : {true, false}) {
            convert_case c =
                convert_case_of(5, into ? KVPRIM_F8E4M3 : KVPRIM_BF16, into ? KVPRIM_BF16 : KVPRIM_F8E4M3, scale);
            c.form = CONVERT_TRANSFER, c.layers = most_layers, c.indexed = into ? 1 : 2;
            c.elements = 8, c.tile = 8, c.where = OWN_MEMORY, c.count = 5, c.rows = 8;
            run_convert(a, &c);
            check_launches("GG");
        }
}

static void convert_choices(arena *a)
{
    convert_layers(a);
    run_choices(a, plain_choices, sizeof plain_choices / sizeof *plain_choices);
    run_choices(a, pair_choices, sizeof pair_choices / sizeof *pair_choices);
    run_choices(a, shape_choices, sizeof shape_choices / sizeof *shape_choices);
    run_choices(a, edge_choices, sizeof edge_choices / sizeof *edge_choices);
}

/* ---- transfers between pinned memory and a GPU ---- */

/* Layers whose rows, of `unit` bytes, follow each other on the near side in runs, or rows in heads on the far side. */
struct line_move {
    int64_t unit, count;
    int32_t layers, run, heads, near_heads; /* run: layers that follow each other */
    int64_t run_gap, run_shift;             /* more from one run to the next, and to the last one */
    int64_t near_pad;                       /* after each row */
    size_t near_align, far_align;           /* far: of the last layer */
    bool from_near;
    unsigned indexed, how; /* sides, 1: dst, 2: src; as listed_transfer */
};

struct line_case {
    const char *name, *launches;
    void (*change)(line_move &);
};

/* R: kvpc_lines_kernel, B and L: others. */
static const line_case line_cases[] = {
    {"layers side by side", "R", [](line_move &) {}},
    {"layers side by side to layers apart", "R", [](line_move &m) { m.from_near = true; }},
    {"the other side has an index", "R", [](line_move &m) { m.indexed = 1; }},
    {"both sides have an index", "R", [](line_move &m) { m.indexed = 3; }},
    {"no side has an index", "B", [](line_move &m) { m.indexed = 0; }},
    {"layers of the GPU", "L", [](line_move &m) { m.how = SRC_TABLE; }},
    {"rows of the host", "L", [](line_move &m) { m.how = HOST_LISTS; }},
    {"units of 2,032 bytes", "R", [](line_move &m) { m.unit = 2032, m.count = 40; }},
    {"units of 2,064 bytes", "B", [](line_move &m) { m.unit = 2064, m.count = 40; }},
    {"units of 144 bytes", "R", [](line_move &m) { m.unit = 144; }},
    {"units of 128 bytes", "B", [](line_move &m) { m.unit = 128; }},
    {"two runs", "R", [](line_move &m) { m.run = 2; }},
    {"three runs", "R", [](line_move &m) { m.layers = 6, m.run = 2; }},
    {"the last of three runs further", "B", [](line_move &m) { m.layers = 6, m.run = 2, m.run_shift = 64; }},
    {"half a run", "B", [](line_move &m) { m.layers = 3, m.run = 2; }},
    {"runs of one", "B", [](line_move &m) { m.run = 1; }},
    {"runs 16 bytes further", "R", [](line_move &m) { m.run = 2, m.run_gap = 16; }},
    {"runs 8 bytes further", "B", [](line_move &m) { m.run = 2, m.run_gap = 8; }},
    {"runs from 8 bytes on", "B", [](line_move &m) { m.near_align = 8; }},
    {"a layer from 8 bytes on", "B", [](line_move &m) { m.far_align = 8; }},
    {"rows of runs 8 bytes further", "B", [](line_move &m) { m.near_pad = 8; }},
    {"rows to heads", "R", [](line_move &m) { m.layers = 1, m.heads = 4; }},
    {"heads to rows", "R", [](line_move &m) { m.layers = 1, m.heads = 4, m.from_near = true; }},
    {"rows of layers to heads", "B", [](line_move &m) { m.layers = 2, m.heads = 4, m.run = 1; }},
    {"heads to heads", "B", [](line_move &m) { m.layers = 1, m.heads = m.near_heads = 4; }},
    {"rows to 400 heads", "R", [](line_move &m) { m.layers = 1, m.heads = 400, m.count = 6; }},
    {"rows to 401 heads", "B", [](line_move &m) { m.layers = 1, m.heads = 401, m.count = 6; }},
};

static void run_line(arena *a, const line_case *c)
{
    line_move m = {48, 400, 4, 0, 1, 1, 0, 0, 0, 0, 0, false, 2, 0};
    void *near_layers[most_layers], *far_layers[most_layers];
    c->change(m);
    const int32_t run = m.run ? m.run : m.layers;
    const int64_t rows = m.count + 9, row_bytes = m.unit * m.heads, head = rows * m.unit;
    const int64_t stride = run * row_bytes + m.near_pad, step = rows * stride + m.run_gap;
    kvprim_transfer_desc d = {};
    empty(a);
    char *const near_memory = reserve<char>(a, size_t((m.layers + run - 1) / run * step + m.run_shift), m.near_align);
    for (int32_t l = 0; l < m.layers; l++) {
        near_layers[l] = near_memory + l / run * step + l % run * row_bytes + (l / run == 2 ? m.run_shift : 0);
        far_layers[l] = reserve(a, size_t(m.heads * head), l + 1 == m.layers ? m.far_align : 0);
    }
    kvprim_table near_table = table_of(nullptr, rows, stride), far_table = table_of(nullptr, rows, m.unit);
    far_table.heads = m.heads, far_table.head_stride = head;
    if (m.near_heads > 1)
        near_table.heads = m.near_heads, near_table.stride = m.unit, near_table.head_stride = head;
    d.dst = m.from_near ? far_table : near_table, d.src = m.from_near ? near_table : far_table;
    d.dst_layers = m.from_near ? far_layers : near_layers, d.src_layers = m.from_near ? near_layers : far_layers;
    d.layers = m.layers, d.row_bytes = row_bytes, d.count = m.count;
    place_indices(a, &d, m.indexed, KVPRIM_I64);
    CHECK((m.how ? try_listed(a, &d, m.how, c->name) : try_move(a, &d, c->name)) == RAN);
    check_launches(c->launches);
}

static void transfer_lines(arena *a)
{
    for (const line_case &c : line_cases)
        run_line(a, &c);
}

#endif /* GPU_TEST_CHOICE_H */

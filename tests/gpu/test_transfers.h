/* SPDX-License-Identifier: MIT */
/* Transfers, and several moves in one call, for test_cuda.cu and test_cuda_emulated.cpp: see test_rows.h. */
#ifndef TEST_TRANSFERS_H
#define TEST_TRANSFERS_H

#include <algorithm>
#include <functional>
#include <memory>
#include "test_tables.h"

/* ---- the matrix ---- */

/* indexed, apart: bit 0 is for dst, bit 1 for src. apart: each layer has its own memory, found by a pointer. */
struct transfer_case {
    int64_t row_bytes;
    placing to, from;
    int64_t count;
    int32_t layers;
    unsigned indexed, apart;
    kvprim_index_type type;
    bool counted;
};

/* Places the layers of one side and puts pointers to them into `starts`. Layers that lie apart are in reverse order. */
static kvprim_table place_layers(arena *a, const placing &l, int64_t rows, int64_t row_bytes, int32_t layers,
                                 bool apart, void **starts, int64_t *layer_stride)
{
    size_t span;
    kvprim_table t = lay_out(&layouts[l.layout], rows, row_bytes, &span);
    const size_t align = l.align, step = align ? span + 7 : (span + 31) / 16 * 16;
    *layer_stride = apart ? 0 : int64_t(step);
    char *const block = apart ? nullptr : reserve<char>(a, step * size_t(layers), align);
    for (int32_t n = 0; n < layers; n++)
        starts[apart ? layers - 1 - n : n] = apart ? reserve(a, span, align) : block + size_t(n) * step;
    t.data = apart ? nullptr : block;
    return t;
}

/* Both indices are columns of one [N, 2] array. */
static void place_mapping(arena *a, kvprim_transfer_desc *d)
{
    const size_t width = d->index_type == KVPRIM_I64 ? 8 : 4;
    char *const mapping = reserve<char>(a, 2 * size_t(d->count) * width, 0);
    a->indices.push_back({mapping, d->index_type, d->count, 0, d->src.rows, 2, false});
    a->indices.push_back({mapping + width, d->index_type, d->count, 0, d->dst.rows, 2, true});
    fill_index(a->indices.end()[-2]);
    fill_index(a->indices.back());
    d->src_index = mapping;
    d->dst_index = mapping + width;
    d->src_index_stride = d->dst_index_stride = 2;
    a->index_room = std::max(a->index_room, 2 * d->count);
}

/* Each side has its own base and stride, and sometimes its own type. indexed: bit 0 is for dst, bit 1 for src. */
static void place_indices(arena *a, kvprim_transfer_desc *d, unsigned indexed, kvprim_index_type type)
{
    d->index_type = type;
    if (indexed == 3 && chance(3)) {
        place_mapping(a, d);
        return;
    }
    const kvprim_index_type other = type == KVPRIM_I64 ? KVPRIM_I32 : KVPRIM_I64;
    d->dst_index_type = chance(3) ? other : kvprim_index_type(0);
    d->src_index_type = chance(3) ? other : kvprim_index_type(0);
    if (d->dst_index_type && d->src_index_type && chance(2))
        d->index_type = kvprim_index_type(0);
    d->dst_index_base = bases[below(4)];
    d->src_index_base = bases[below(4)];
    d->dst_index_stride = index_strides[below(8)];
    d->src_index_stride = index_strides[below(8)];
    if (indexed & 1)
        d->dst_index = place_index(a, d->dst_index_type ? other : type, d->count, d->dst_index_base, d->dst.rows, true,
                                   d->dst_index_stride);
    if (indexed & 2)
        d->src_index = place_index(a, d->src_index_type ? other : type, d->count, d->src_index_base, d->src.rows, false,
                                   d->src_index_stride);
}

/* dst_bases and src_bases have room for a pointer for each layer. */
static kvprim_transfer_desc make_transfer(arena *a, const transfer_case &c, void **dst_bases, void **src_bases)
{
    const int64_t dst_rows = c.count + (c.indexed & 1 ? 9 : 0), src_rows = c.count + (c.indexed & 2 ? 4 : 2);
    kvprim_transfer_desc d = {};
    d.dst = place_layers(a, c.to, dst_rows, c.row_bytes, c.layers, c.apart & 1, dst_bases, &d.dst_layer_stride);
    d.src = place_layers(a, c.from, src_rows, c.row_bytes, c.layers, c.apart & 2, src_bases, &d.src_layer_stride);
    d.dst_layers = c.apart & 1 ? dst_bases : nullptr;
    d.src_layers = c.apart & 2 ? src_bases : nullptr;
    d.layers = c.layers, d.row_bytes = c.row_bytes, d.count = c.count;
    place_indices(a, &d, c.indexed, c.type);
    d.rejected = c.counted ? reserve_counter(a) : nullptr;
    return d;
}

static void one_transfer(arena *a, const transfer_case &c)
{
    static thread_local void *dst_bases[most_layers], *src_bases[most_layers];
    empty(a);
    const kvprim_transfer_desc d = make_transfer(a, c, dst_bases, src_bases);
    CHECK(try_transfer(a, &d, "a case") == RAN);
}

/* Runs case n. Whatever is not given follows from n. */
static void numbered_transfer(arena *a, unsigned n, int64_t row_bytes, const placing &to, const placing &from)
{
    const int32_t layers = 1 + int32_t(n / 3 % 3);
    one_transfer(
        a, {row_bytes, to, from, rows_for(row_bytes) - n % 2, layers, n % 4, n / 4 % 4, type_of(n / 2), n % 5 != 0});
}

static void transfer_matrix(arena *a)
{
    size_matrix(a, numbered_transfer);
}

/* Runs 1 to 128 layers, and counts around and above what one launch takes. */
static void layer_matrix(arena *a)
{
    static const int32_t counts[] = {1, 2, 3, 7, 32, 61, 64, 100, 127, 128, 230, 231, 232, 300};
    static const int64_t sizes[] = {16, 100, 576, 2048};
    unsigned n = 0;
    for (const int32_t layers : counts)
        for (const int64_t row_bytes : sizes)
            for (unsigned apart = 0; apart < 4; apart++, n++) {
                if (layers > 61 && n % unsigned(2 * thin - 1)) /* only some cases, as these take long */
                    continue;
                one_transfer(
                    a, {row_bytes, {n % 3 * 4, 0}, {n / 4 % 3 * 4, 0}, 5, layers, n / 3 % 4, apart, type_of(n), true});
            }
}

/* Few and many rows, large and small ones. */
static void transfer_counts(arena *a, int64_t most_bytes)
{
    static const int64_t counts[] = {1, 2, 15, 16, 17, 64, 1000, 4096}, sizes[] = {4, 64, 256, 512, 1152, 4096, 32768};
    unsigned n = 0;
    for (const int64_t count : counts)
        for (const int64_t row_bytes : sizes)
            for (unsigned indexed = 0; indexed < 4; indexed++, n++) {
                const placing to = {n / 4 % 2 * 4, 0}, from = {n / 8 % 2 * 4, 0};
                if (count * row_bytes <= most_bytes)
                    one_transfer(a, {row_bytes, to, from, count, 2, indexed, n % 4, type_of(n), true});
            }
}

/* Rows without an index that follow each other without a gap, except that the heads of one side lie apart. */
static void transfer_heads_apart(arena *a)
{
    for (int side = 0; side < 2; side++) {
        empty(a);
        const kvprim_table to = table_of(reserve(a, 4096, 0), 8, 64), from = table_of(reserve(a, 4096, 0), 8, 64);
        kvprim_transfer_desc d = transfer_of(to, from, 64, 8);
        kvprim_table *const apart = side ? &d.src : &d.dst;
        apart->heads = 2, apart->head_stride = 1024;
        CHECK(try_transfer(a, &d, side ? "heads of src lie apart" : "heads of dst lie apart") == RAN);
    }
}

/* Runs a few of everything, for the options of a launch and the kinds of memory. */
static void small_transfers(arena *a)
{
    static const int64_t sizes[] = {1, 12, 16, 128, 257, 512, 1152, 2048, 4096, 20000};
    unsigned n = 0;
    for (const int64_t row_bytes : sizes)
        for (unsigned l = 0; l < n_layouts; l++, n++)
            numbered_transfer(a, n, row_bytes, {l, n % 3 ? 0 : n % 16},
                              {(l * 5 + n) % n_layouts, n % 7 ? 0 : n / 7 % 16});
    transfer_counts(a, small_bytes);
}

/* Runs transfers of 64 KB and more. To and from pinned memory they take few multiprocessors or the copy engine. */
static void long_transfers(arena *a)
{
    static const int64_t sizes[] = {48, 528, 1000, 4096, 24000, 65536, 131088};
    unsigned n = 0;
    for (const int64_t row_bytes : sizes)
        for (unsigned l = 0; l < (row_bytes > 4096 ? 6 : n_layouts); l++, n++) { /* pages of 128 rows are too long */
            const placing to = {n % 3 ? l : 0, 0}, from = {n % 3 == 1 ? 0 : l, n % 5 == 4 ? 4u : 0};
            const int64_t count = (n % 2 ? 132000 : 66000) / row_bytes + 1;
            one_transfer(a, {row_bytes, to, from, count, 1 + int32_t(n / 4 % 3), n % 2 ? 0 : n / 2 % 4, n / 3 % 4,
                             type_of(n), true});
        }
}

/* ---- copies inside one cache ---- */

/* Copies half of the rows, in random order, over the other half. Some are copied twice, and some indices are padding.
   */
static void one_copy_on_write(arena *a, unsigned n, int64_t row_bytes, const placing &l)
{
    static thread_local void *starts[most_layers];
    const int64_t rows = 40, count = rows / 2;
    const kvprim_index_type type = type_of(n);
    empty(a);
    kvprim_transfer_desc d = {};
    d.layers = 1 + int32_t(n % 3);
    d.dst = place_layers(a, l, rows, row_bytes, d.layers, n % 2, starts, &d.dst_layer_stride);
    d.dst_layers = n % 2 ? starts : nullptr;
    d.src = d.dst;
    d.src_layers = d.dst_layers;
    d.src_layer_stride = d.dst_layer_stride;
    void *const to = place_index(a, type, count, 0, rows, true), *const from =
                                                                     place_index(a, type, count, 0, rows, true);
    const std::vector<int64_t> order = shuffled(rows);
    for (int64_t i = 0; i < count; i++) {
        set_index(to, type, i, chance(9) ? -1 - i : order[size_t(i)]);
        set_index(from, type, i, chance(9) ? rows + i : order[size_t(count + (i > 2 && chance(4) ? 1 : i))]);
    }
    d.row_bytes = row_bytes, d.count = count;
    d.dst_index = to, d.src_index = from, d.index_type = type;
    d.rejected = reserve_counter(a);
    CHECK(try_move(a, &d, "one cache, and it is not said") == REFUSED);
    d.same_cache = 1;
    CHECK(try_transfer(a, &d, "inside one cache") == RAN);
}

static void copies_on_write(arena *a)
{
    static const int64_t sizes[] = {1, 16, 24, 100, 256, 512, 1152, 2048, 4096};
    unsigned n = 0;
    for (const int64_t row_bytes : sizes)
        for (unsigned l = 0; l < n_layouts; l++, n++)
            one_copy_on_write(a, n, row_bytes, {l, n % 3 ? 0 : n % 16});
}

/* ---- several moves in one call ---- */

/* Calls whose moves run together. */
struct together {
    std::vector<kvprim_move> moves; /* checked at the addresses of the code under test */
    std::vector<rows_move> rows;
    std::vector<std::function<kvprim_status()>> one_by_one;
    std::vector<std::shared_ptr<void>> kept; /* what `moves` point to */
};

template <class Desc> static void add_call(arena *a, together *t, const Desc &d)
{
    const std::shared_ptr<on_gpu<Desc>> on = std::make_shared<on_gpu<Desc>>(a, d);
    Desc resolved;
    kvprim_move m[2];
    CHECK(functions<Desc>::check(&d, &resolved) == KVPRIM_OK && functions<Desc>::moves(&on->d, m) == KVPRIM_OK);
    t->moves.insert(t->moves.end(), m, m + (std::is_same<Desc, kvprim_store_desc>::value ? 2 : 1));
    for (const rows_move &one : rows_of(&resolved))
        t->rows.push_back(one);
    t->one_by_one.push_back([d] { return functions<Desc>::host(&d); });
    t->kept.push_back(on);
}

/* Adds a store of K and V, or of K only if v_bytes is 0. */
static void add_store(arena *a, together *t, unsigned n, int64_t count, int64_t k_bytes, int64_t v_bytes)
{
    add_call(a, t,
             make_store(a, n,
                        {k_bytes,
                         v_bytes ? v_bytes : 16,
                         {n % n_layouts, 0},
                         {0, n / 5 % 3 * n % 16},
                         count,
                         count + 7,
                         v_bytes ? APART : K_ONLY}));
}

static void add_transfer(arena *a, together *t, unsigned n, int64_t count, int64_t row_bytes, int32_t layers)
{
    const std::shared_ptr<std::vector<void *>> bases = std::make_shared<std::vector<void *>>(2 * most_layers);
    const placing to = {n % n_layouts, 0}, from = {n / 3 % n_layouts, 0};
    t->kept.push_back(bases);
    add_call(a, t,
             make_transfer(a, {row_bytes, to, from, count, layers, n / 2 % 4, 1, type_of(n), true}, bases->data(),
                           bases->data() + most_layers));
}

/* Runs the moves, after what `current` names. Everything that they may touch is visited. */
static void run_now(arena *a, const together *t)
{
    run_both(
        a, KVPRIM_OK, "-", true,
        [&] {
            for (const std::function<kvprim_status()> &call : t->one_by_one)
                CHECK(call() == KVPRIM_OK);
            return KVPRIM_OK;
        },
        [&] { return kvprim_cuda_move(t->moves.data(), t->moves.size(), a->launch); });
}

/* Runs the moves twice. In between all of the memory changes, including the indices. */
static void run_together(arena *a, const together *t, const char *what)
{
    for (int round = 0; round < 2; round++) {
        if (round)
            refill(a);
        snprintf(current, sizeof current, "%zu moves at once, run %d: %s", t->moves.size(), round, what);
        start_visit(a);
        CHECK(visit_moves(a, t->rows));
        run_now(a, t);
    }
}

/* Caches in use, each of which takes several moves. */
static void usual_moves(arena *a)
{
    for (unsigned n = 0; n < 4; n++) {
        together t;
        empty(a);
        const int64_t count = n % 2 == 0 ? 8 : small_bytes < 1 << 20 ? 60 : 300;
        switch (n / 2 + n % 2 * 2) {
        case 0: /* K and V of different width */
            add_store(a, &t, n * 7 + 1, count, 192, 128);
            break;
        case 1: /* values, their scales, and an index key */
            add_store(a, &t, n * 7 + 1, count, 576, 8);
            add_store(a, &t, n * 7 + 1, count, 132, 0);
            break;
        case 2: /* layers of different row size */
            add_transfer(a, &t, n * 7 + 1, count, 192, 30);
            add_transfer(a, &t, n * 7 + 1, count, 128, 30);
            add_transfer(a, &t, n * 7 + 1, count, 1152, 7);
            break;
        default: /* more layers than one launch takes */
            add_transfer(a, &t, n * 7 + 1, count, 64, 150);
            add_transfer(a, &t, n * 7 + 1, count, 16, 300);
        }
        run_together(a, &t, "a usual cache");
    }
}

/* One to five operations of any kind. */
static void random_moves(arena *a, unsigned rounds)
{
    static const int64_t sizes[] = {8, 16, 24, 64, 100, 128, 192, 256, 577, 1024, 1152, 2051, 4096};
    static const int64_t counts[] = {1, 2, 17, 64, 200};
    for (unsigned round = 0; round < rounds; round++) {
        together t;
        random_state = uint64_t(round + 1) << 40;
        empty(a);
        for (unsigned n = 0; n <= round % 5; n++) {
            const int64_t count = counts[below(5)], row_bytes = sizes[below(13)];
            const unsigned any = unsigned(below(1 << 20));
            const placing to = {any % n_layouts, any / 3 % 3 * any % 16}, from = {any / 7 % n_layouts, 0};
            if (chance(3))
                add_call(a, &t, make_gather(a, any, row_bytes, to, from, count, count + 5));
            else if (chance(2))
                add_store(a, &t, any, count, row_bytes, chance(3) ? 0 : sizes[below(13)]);
            else
                add_transfer(a, &t, any, count, row_bytes, 1 + int32_t(below(4)));
        }
        char what[40];
        snprintf(what, sizeof what, "round %u", round);
        run_together(a, &t, what);
    }
}

/* n: bit 0 two layers, not one; bit 1 arrays of layers; bit 2 rows of any alignment; bit 3 no index of src. */
static kvprim_transfer_desc place_move(arena *a, unsigned n, int64_t count, void **dst_layers, void **src_layers)
{
    kvprim_transfer_desc d = {};
    d.row_bytes = n & 4 ? 61 : 64;
    d.layers = 1 + int32_t(n & 1);
    for (int32_t l = 0; l < d.layers; l++) {
        dst_layers[l] = reserve(a, 8 * 64, 0);
        src_layers[l] = reserve(a, 16 * 64, 0);
    }
    const bool arrays = (n & 2) != 0;
    d.dst = table_of(arrays ? nullptr : reserve(a, 2 * 8 * 64, 0), 8);
    d.src = table_of(arrays ? nullptr : reserve(a, 2 * 16 * 64, 0), 16);
    d.dst_layers = arrays ? dst_layers : nullptr;
    d.src_layers = arrays ? src_layers : nullptr;
    d.index_type = KVPRIM_I32;
    d.dst_index = place_index(a, d.index_type, count, 0, 8, true);
    d.src_index = n & 8 ? nullptr : place_index(a, d.index_type, count, 0, 16, false);
    d.rejected = reserve_counter(a);
    d.count = count;
    return d;
}

/* Checks a move once. Before it runs, tables, layers, indices and the counter become others, and count falls. */
static void repointed_moves(arena *a)
{
    for (unsigned n = 0; n < 16; n++) {
        void *layers[4][2];
        kvprim_transfer_desc resolved;
        kvprim_move m;
        empty(a);
        snprintf(current, sizeof current, "a move that is pointed at other memory, %u", n);
        const device_transfer before_it(a, place_move(a, n, 6, layers[0], layers[1]));
        const kvprim_transfer_desc d = place_move(a, n, 4, layers[2], layers[3]);
        const device_transfer after_it(a, d);
        CHECK(kvprim_transfer_moves(&before_it.d, &m) == KVPRIM_OK);
        m.dst.table.data = after_it.d.dst.data, m.src.table.data = after_it.d.src.data;
        m.dst.layers = after_it.d.dst_layers, m.src.layers = after_it.d.src_layers;
        m.dst.index = after_it.d.dst_index, m.src.index = after_it.d.src_index;
        m.rejected = after_it.d.rejected, m.count = after_it.d.count;
        start_visit(a);
        CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && visit_moves(a, rows_of(&resolved)));
        run_both(
            a, KVPRIM_OK, "-", true, [&] { return kvprim_transfer(&d); },
            [&] { return kvprim_cuda_move(&m, 1, a->launch); });
    }
}

/* ---- layers that only the GPU knows, and rows that the host names ---- */

static void listed_random_transfers(arena *a, unsigned rounds)
{
    unsigned ran = 0;
    for (unsigned round = 0; round < rounds; round++) {
        kvprim_transfer_desc d = {};
        random_state = uint64_t(round + 1) << 32;
        empty(a);
        (void)reserve(a, 4 * fuzz_bytes + 2 * fuzz_index_bytes, 0);
        random_desc(a, &d, type_of(round));
        ran += try_transfer(a, &d, "a random one") == RAN;
    }
    if (ran < rounds / 5)
        fail("of %u descriptors only %u ran", rounds, ran);
}

/* The same transfers as everywhere. */
static void listed_transfers(arena *a)
{
    list_all = true;
    small_transfers(a);
    long_transfers(a);
    transfer_heads_apart(a);
    list_all = false;
}

static void listed_matrix(arena *a)
{
    list_all = true;
    transfer_matrix(a);
    layer_matrix(a);
    copies_on_write(a);
    listed_random_transfers(a, fuzz_rounds);
    list_all = false;
}

/* Layers in any order, each at another alignment, of rows that are whole words. */
static void unaligned_bases(arena *a)
{
    static const size_t aligns[] = {0, 1, 8, 0, 4, 15, 16, 2};
    static const int64_t sizes[] = {16, 64, 512, 1024, 1040, 4096, 20000};
    enum { layers = 8 };
    void *dst[layers], *src[layers];
    unsigned n = 0;
    for (const int64_t row_bytes : sizes)
        for (unsigned how = 1; how < LISTED_KINDS; how++, n++) {
            const int64_t rows = 30;
            empty(a);
            kvprim_transfer_desc d = {};
            d.dst = table_of(nullptr, rows), d.src = table_of(nullptr, rows);
            for (unsigned l = 0; l < layers; l++) {
                const size_t bytes = size_t(rows * row_bytes);
                dst[(3 * l + 5) % layers] = reserve(a, bytes, aligns[l]);
                src[(5 * l + 2) % layers] = reserve(a, bytes, aligns[n % 3 ? (l + n) % layers : l]);
            }
            d.dst_layers = dst, d.src_layers = src, d.layers = layers;
            d.row_bytes = row_bytes, d.count = 20;
            d.index_type = type_of(n);
            d.dst_index = n % 2 ? nullptr : place_index(a, d.index_type, 20, 0, rows, true);
            d.src_index = place_index(a, d.index_type, 20, 0, rows, false);
            d.rejected = reserve_counter(a);
            CHECK(try_listed(a, &d, how, "bases of any alignment") == RAN);
        }
}

/* Lists of the host from one index to more than several launches take: int32 and int64, apart, with bases, padding and
   indices past the table. */
static void host_lists(arena *a)
{
    static const int64_t counts[] = {1, 2, 10, 400, 900, 1000, 4000, 8200, 9000, 100000};
    unsigned n = 0;
    for (const int64_t count : counts)
        for (unsigned how = HOST_LISTS; how < LISTED_KINDS; how++, n++) {
            if (count > 9000 && small_bytes < 1 << 20 && how != HOST_LISTS + n % 2)
                continue;
            const transfer_case c = {n % 3 ? 16 : 20,
                                     {n % 5 ? 0u : 4u, 0},
                                     {n % 7 ? 0u : 8u, 0},
                                     count,
                                     1 + (count < 5000) * 2,
                                     1 + n % 3,
                                     n / 3 % 4,
                                     type_of(n),
                                     true};
            void *dst[3], *src[3];
            empty(a);
            const kvprim_transfer_desc d = make_transfer(a, c, dst, src);
            CHECK(try_listed(a, &d, how, "lists of the host") == RAN);
        }
}

/* More layers than parameters hold by value. */
static void many_device_layers(arena *a)
{
    static void *dst[1000], *src[1000];
    for (unsigned how = 1; how < LISTED_KINDS; how++) {
        empty(a);
        kvprim_transfer_desc d = {};
        d.dst = table_of(nullptr, 6), d.src = table_of(nullptr, 6);
        char *const to = reserve<char>(a, 1000 * 6 * 16, 0), *const from = reserve<char>(a, 1000 * 6 * 16, 0);
        for (int l = 0; l < 1000; l++)
            dst[l * 7 % 1000] = to + 96 * l, src[l * 9 % 1000] = from + 96 * l;
        d.dst_layers = how & DST_TABLE ? dst : nullptr, d.dst.data = how & DST_TABLE ? nullptr : to;
        d.src_layers = how & SRC_TABLE ? src : nullptr, d.src.data = how & SRC_TABLE ? nullptr : from;
        d.layers = 1000;
        d.row_bytes = 16, d.count = 5, d.index_type = KVPRIM_I32;
        d.dst_index = place_index(a, KVPRIM_I32, 5, 0, 6, true);
        d.rejected = reserve_counter(a);
        CHECK(try_listed(a, &d, how, "1,000 layers") == RAN);
    }
}

/* A store, a transfer as every other has it, and transfers of each kind, in one call, twice. In between memory, indices
   and tables change. */
static void listed_moves(arena *a)
{
    enum { kinds = LISTED_KINDS - 1 };
    for (unsigned n = 0; n < 4; n++) {
        together t;
        empty(a);
        add_store(a, &t, n, 40, 64, n % 2 ? 48 : 64);
        add_transfer(a, &t, n, 30, 112, 3);
        std::vector<std::shared_ptr<listed_transfer>> listed;
        std::vector<kvprim_transfer_desc> descs(kinds);
        std::vector<void *> layers(2 * kinds * most_layers);
        for (unsigned how = 1; how <= kinds; how++) {
            kvprim_transfer_desc resolved, &d = descs[how - 1];
            void **const bases = &layers[2 * (how - 1) * most_layers];
            d = make_transfer(a, {n % 2 ? 96 : 100, {n, 0}, {n + how, 0}, 20, 4, 1 + how % 3, 3, type_of(how), true},
                              bases, bases + most_layers);
            CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK);
            listed.push_back(std::make_shared<listed_transfer>(a, d, resolved, how));
            kvprim_move m;
            CHECK(kvprim_transfer_moves(&listed.back()->on.d, &m) == KVPRIM_OK);
            t.moves.insert(t.moves.begin() + how % 3, m);
            t.rows.push_back(rows_of(&resolved)[0]);
            t.one_by_one.push_back([&d] { return kvprim_transfer(&d); });
        }
        for (int round = 0; round < 2; round++) {
            snprintf(current, sizeof current, "listed and other moves in one call, %u, run %d", n, round);
            start_visit(a);
            CHECK(visit_moves(a, t.rows));
            for (const std::shared_ptr<listed_transfer> &l : listed)
                l->visit_tables(a);
            run_now(a, &t);
            refill(a);
            for (unsigned k = 0; k < kinds; k++) { /* other layers, in the same memory */
                std::swap(layers[2 * k * most_layers], layers[2 * k * most_layers + 3]);
                std::swap(layers[(2 * k + 1) * most_layers], layers[(2 * k + 1) * most_layers + 2]);
                listed[k]->refresh(a);
            }
        }
    }
}

/* ---- tables past 4 GiB ---- */

/* Like large_store_and_gather, except that a row without a source stays as it is. */
static void large_transfers(const large_move *m, int64_t row_bytes)
{
    const kvprim_table table = table_of(m->table, large_rows);
    kvprim_transfer_desc in = transfer_of(table, table_of(m->input, large_count), row_bytes, large_count);
    kvprim_transfer_desc out = transfer_of(table_of(m->output, large_count), table, row_bytes, large_count);
    in.dst_index = out.src_index = m->slots, in.index_type = out.index_type = KVPRIM_I64;
    in.rejected = out.rejected = m->rejected;
    if (kvprim_cuda_transfer(&in, nullptr) != KVPRIM_OK || kvprim_cuda_transfer(&out, nullptr) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
}

#endif /* TEST_TRANSFERS_H */

/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share about transfers. They run them in one block of memory, once by
   kvprim_transfer and once by kvprim_cuda_transfer, and compare every byte. Include it after test_rows.h and define the
   three functions that concern the source's memory. */
#ifndef TEST_TRANSFERS_H
#define TEST_TRANSFERS_H

#include <memory>
#include <string>

/* The source and its index may lie in other memory than the arena, which then has a whole copy of the arena. */
static void before_source(arena *a);
static unsigned char *source_of(const arena *a);
static void after_source(arena *a); /* checks that nothing in it has changed */

enum { most_layers = 300 };

/* A descriptor for the code under test, with its arrays of layers. */
struct device_transfer {
    kvprim_transfer_desc d;
    void *dst_layers[most_layers], *src_layers[most_layers];

    device_transfer(const arena *a, const kvprim_transfer_desc &host);
    device_transfer(const device_transfer &) = delete;
};

template <class T> static T *on_source(const arena *a, T *p)
{
    return moved(p, a->expected, source_of(a));
}

device_transfer::device_transfer(const arena *a, const kvprim_transfer_desc &host) : d(host)
{
    for (int32_t l = 0; l < (d.layers ? d.layers : 1) && l < most_layers; l++) { /* 0 means 1 */
        dst_layers[l] = d.dst_layers ? on_device(a, d.dst_layers[l]) : nullptr;
        src_layers[l] = d.src_layers ? on_source(a, d.src_layers[l]) : nullptr;
    }
    d.dst_layers = d.dst_layers ? dst_layers : nullptr;
    d.src_layers = d.src_layers ? src_layers : nullptr;
    d.dst.data = on_device(a, d.dst.data);
    d.src.data = on_source(a, d.src.data);
    d.dst_index = on_device(a, d.dst_index);
    d.src_index = on_source(a, d.src_index);
    d.rejected = on_device(a, d.rejected);
}

/* ---- one transfer, by the host function and by the code under test ---- */

static kvprim_table layer_of(const kvprim_table *t, void *const *layers, int64_t layer_stride, int32_t l)
{
    kvprim_table layer = *t;
    layer.data = layers ? layers[l] : t->data ? static_cast<char *>(t->data) + l * layer_stride : nullptr;
    return layer;
}

static index_list dst_list_of(const kvprim_transfer_desc *d)
{
    return list_of(d->dst_index, d->dst_index_type ? d->dst_index_type : d->index_type, d->dst_index_base,
                   d->dst_index_stride);
}

static index_list src_list_of(const kvprim_transfer_desc *d)
{
    return list_of(d->src_index, d->src_index_type ? d->src_index_type : d->index_type, d->src_index_base,
                   d->src_index_stride);
}

/* A source without an index may be read even if its row goes nowhere. */
static bool visit_layer(arena *a, const kvprim_transfer_desc *d, int32_t l, bool write)
{
    const kvprim_table dst = layer_of(&d->dst, d->dst_layers, d->dst_layer_stride, l);
    const kvprim_table src = layer_of(&d->src, d->src_layers, d->src_layer_stride, l);
    bool good =
        (!d->dst_index || reachable(a, &dst, d->row_bytes)) && (!d->src_index || reachable(a, &src, d->row_bytes));
    const index_list dst_list = dst_list_of(d), src_list = src_list_of(d);
    for (int64_t i = 0; good && i < d->count; i++) {
        const int64_t to = row_at(&dst_list, i, d->dst.rows), from = row_at(&src_list, i, d->src.rows);
        const bool moves = to >= 0 && from >= 0, reads = moves || !d->src_index;
        good = (write ? !moves : !reads) || visit(a, write ? &dst : &src, d->row_bytes, write ? to : from, write);
    }
    return good;
}

/* Visits everything that is written, then checks that none of it is read. */
static bool visit_transfer(arena *a, const kvprim_transfer_desc *d)
{
    const index_list dst_list = dst_list_of(d), src_list = src_list_of(d);
    bool good = visit_index(a, &dst_list, d->count, d->rejected) && visit_index(a, &src_list, d->count, nullptr);
    for (int32_t n = 0; good && n < 2 * d->layers; n++)
        good = visit_layer(a, d, n % d->layers, n < d->layers);
    return good;
}

static void compare_transfer(const arena *a, const kvprim_transfer_desc *d)
{
    if (memcmp(a->expected, a->got, a->used) == 0)
        return;
    std::vector<kvprim_table> tables;
    std::vector<named_table> named;
    std::vector<std::string> names;
    for (int32_t n = 0; n < 2 * d->layers; n++) {
        names.push_back((n % 2 ? "src layer " : "dst layer ") + std::to_string(n / 2));
        tables.push_back(n % 2 ? layer_of(&d->src, d->src_layers, d->src_layer_stride, n / 2)
                               : layer_of(&d->dst, d->dst_layers, d->dst_layer_stride, n / 2));
    }
    for (size_t n = 0; n < tables.size(); n++)
        named.push_back({names[n].c_str(), &tables[n], d->row_bytes, tables[n].rows});
    compare(a, current, named.data(), static_cast<int>(named.size()));
}

static outcome try_transfer(arena *a, const kvprim_transfer_desc *desc, const char *what)
{
    const device_transfer on(a, *desc);
    kvprim_transfer_desc resolved = {};
    char want_text[512];
    snprintf(current, sizeof current, "transfer: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_transfer_check(&on.d, nullptr);
    snprintf(want_text, sizeof want_text, "%s", kvprim_last_error());
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    start_visit(a);
    if (runs && (kvprim_transfer_check(desc, &resolved) != KVPRIM_OK || !visit_transfer(a, &resolved)))
        return OUTSIDE;
    memcpy(a->got, a->expected, a->used);
    if (want == KVPRIM_OK)
        CHECK(kvprim_transfer(desc) == KVPRIM_OK);
    (void)kvprim_fail(KVPRIM_OK, "-");
    before_source(a);
    before(a);
    for (size_t i = 0; runs && i < a->allowed.size(); i++)
        allow(a, a->allowed[i].first, a->allowed[i].second);
    const kvprim_status got = kvprim_cuda_transfer(&on.d, a->launch);
    after(a, runs);
    after_source(a);
    check_status(current, got, want, kvprim_last_error(), want_text);
    compare_transfer(a, &resolved);
    return want == KVPRIM_OK ? RAN : REFUSED;
}

/* ---- the matrix ---- */

/* indexed, apart: bit 0 is for dst, bit 1 for src. apart: each layer has its own memory, found by a pointer. */
struct transfer_case {
    int64_t row_bytes;
    const layout *dst_layout, *src_layout;
    size_t dst_align, src_align;
    int64_t count;
    int32_t layers;
    unsigned indexed, apart;
    kvprim_index_type type;
    bool counted;
};

/* Places the layers of one side and puts pointers to them into `starts`. Layers that lie apart are in reverse order. */
static kvprim_table place_layers(arena *a, const layout *l, int64_t rows, int64_t row_bytes, size_t align,
                                 int32_t layers, bool apart, void **starts, int64_t *layer_stride)
{
    size_t span;
    kvprim_table t = lay_out(l, rows, row_bytes, &span);
    const size_t step = align ? span + 7 : (span + 31) / 16 * 16;
    *layer_stride = apart ? 0 : static_cast<int64_t>(step);
    char *const block = apart ? nullptr : static_cast<char *>(reserve(a, step * static_cast<size_t>(layers), align));
    for (int32_t n = 0; n < layers; n++)
        starts[apart ? layers - 1 - n : n] = apart ? reserve(a, span, align) : block + static_cast<size_t>(n) * step;
    t.data = apart ? nullptr : block;
    return t;
}

/* Both indices are columns of one [N, 2] array. */
static void place_mapping(arena *a, kvprim_transfer_desc *d)
{
    const size_t width = d->index_type == KVPRIM_I64 ? 8 : 4;
    char *const mapping = static_cast<char *>(reserve(a, 2 * static_cast<size_t>(d->count) * width, 0));
    fill_index(mapping, d->index_type, d->count, 0, d->src.rows, false, 2);
    fill_index(mapping + width, d->index_type, d->count, 0, d->dst.rows, true, 2);
    d->src_index = mapping;
    d->dst_index = mapping + width;
    d->src_index_stride = d->dst_index_stride = 2;
    a->index_room = 2 * d->count;
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
    d->dst_index_type = chance(3) ? other : static_cast<kvprim_index_type>(0);
    d->src_index_type = chance(3) ? other : static_cast<kvprim_index_type>(0);
    if (d->dst_index_type && d->src_index_type && chance(2))
        d->index_type = static_cast<kvprim_index_type>(0);
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

static void one_transfer(arena *a, const transfer_case *c)
{
    static thread_local void *dst_bases[most_layers], *src_bases[most_layers];
    const int64_t dst_rows = c->count + (c->indexed & 1 ? 9 : 0), src_rows = c->count + (c->indexed & 2 ? 4 : 2);
    empty(a);
    kvprim_transfer_desc d = {};
    d.dst = place_layers(a, c->dst_layout, dst_rows, c->row_bytes, c->dst_align, c->layers, c->apart & 1, dst_bases,
                         &d.dst_layer_stride);
    d.src = place_layers(a, c->src_layout, src_rows, c->row_bytes, c->src_align, c->layers, c->apart & 2, src_bases,
                         &d.src_layer_stride);
    d.dst_layers = c->apart & 1 ? dst_bases : nullptr;
    d.src_layers = c->apart & 2 ? src_bases : nullptr;
    d.layers = c->layers;
    d.row_bytes = c->row_bytes;
    d.count = c->count;
    place_indices(a, &d, c->indexed, c->type);
    d.rejected = c->counted ? reserve_counter(a) : nullptr;
    char what[240];
    snprintf(
        what, sizeof what,
        "%lld rows of %lld bytes, %d layers, %s <- %s, alignments %zu and %zu, indexed %u, apart %u, types %d %d %d",
        static_cast<long long>(c->count), static_cast<long long>(c->row_bytes), c->layers, c->dst_layout->name,
        c->src_layout->name, c->dst_align, c->src_align, c->indexed, c->apart, d.index_type, d.dst_index_type,
        d.src_index_type);
    CHECK(try_transfer(a, &d, what) == RAN);
}

/* Runs case n. Whatever is not given follows from n. */
static void numbered_transfer(arena *a, unsigned n, int64_t row_bytes, unsigned dst_layout, unsigned src_layout,
                              size_t dst_align, size_t src_align)
{
    const transfer_case c = {row_bytes,
                             &layouts[dst_layout],
                             &layouts[src_layout],
                             dst_align,
                             src_align,
                             rows_for(row_bytes) - n % 2,
                             1 + static_cast<int32_t>(n / 3 % 3),
                             n % 4,
                             n / 4 % 4,
                             type_of(n / 2),
                             n % 5 != 0};
    one_transfer(a, &c);
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
                if (layers > 61 && n % static_cast<unsigned>(2 * thin - 1)) /* only some cases, as these take long */
                    continue;
                const transfer_case c = {row_bytes,
                                         &layouts[n % 3 * 4],
                                         &layouts[n / 4 % 3 * 4],
                                         0,
                                         0,
                                         5,
                                         layers,
                                         n / 3 % 4,
                                         apart,
                                         type_of(n),
                                         true};
                one_transfer(a, &c);
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
                const transfer_case c = {row_bytes,
                                         &layouts[n / 4 % 2 * 4],
                                         &layouts[n / 8 % 2 * 4],
                                         0,
                                         0,
                                         count,
                                         2,
                                         indexed,
                                         n % 4,
                                         type_of(n),
                                         true};
                if (count * row_bytes <= most_bytes)
                    one_transfer(a, &c);
            }
}

/* Rows without an index that follow each other without a gap, except that the heads of one side lie apart. */
static void transfer_heads_apart(arena *a)
{
    for (int side = 0; side < 2; side++) {
        empty(a);
        kvprim_transfer_desc d = {};
        d.dst = table_of(reserve(a, 4096, 0), 8, 64);
        d.src = table_of(reserve(a, 4096, 0), 8, 64);
        (side ? d.src : d.dst).heads = 2;
        (side ? d.src : d.dst).head_stride = 1024;
        d.row_bytes = 64;
        d.count = 8;
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
            numbered_transfer(a, n, row_bytes, l, (l * 5 + n) % n_layouts, n % 3 ? 0 : n % 16, n % 7 ? 0 : n / 7 % 16);
    transfer_counts(a, 1 << 20);
}

/* ---- copies inside one cache ---- */

/* Copies half of the rows, in random order, over the other half. Some are copied twice, and some indices are padding.
   */
static void one_copy_on_write(arena *a, unsigned n, int64_t row_bytes, const layout *l, size_t align)
{
    static thread_local void *starts[most_layers];
    const int64_t rows = 40, count = rows / 2;
    const kvprim_index_type type = type_of(n);
    empty(a);
    kvprim_transfer_desc d = {};
    d.layers = 1 + static_cast<int32_t>(n % 3);
    d.dst = place_layers(a, l, rows, row_bytes, align, d.layers, n % 2, starts, &d.dst_layer_stride);
    d.dst_layers = n % 2 ? starts : nullptr;
    d.src = d.dst;
    d.src_layers = d.dst_layers;
    d.src_layer_stride = d.dst_layer_stride;
    void *const to = place_index(a, type, count, 0, rows, true), *const from =
                                                                     place_index(a, type, count, 0, rows, true);
    const std::vector<int64_t> order = shuffled(rows);
    for (int64_t i = 0; i < count; i++) {
        set_index(to, type, i, chance(9) ? -1 - i : order[static_cast<size_t>(i)]);
        set_index(from, type, i,
                  chance(9) ? rows + i : order[static_cast<size_t>(count + (i > 2 && chance(4) ? 1 : i))]);
    }
    d.row_bytes = row_bytes;
    d.dst_index = to;
    d.src_index = from;
    d.index_type = type;
    d.count = count;
    d.rejected = reserve_counter(a);
    char what[160];
    CHECK(try_transfer(a, &d, "one cache, and it is not said") == REFUSED);
    d.same_cache = 1;
    snprintf(what, sizeof what, "inside one cache, rows of %lld bytes, %s, alignment %zu, %d layers",
             static_cast<long long>(row_bytes), l->name, align, d.layers);
    CHECK(try_transfer(a, &d, what) == RAN);
}

static void copies_on_write(arena *a)
{
    static const int64_t sizes[] = {1, 16, 24, 100, 256, 512, 1152, 2048, 4096};
    unsigned n = 0;
    for (const int64_t row_bytes : sizes)
        for (unsigned l = 0; l < n_layouts; l++, n++)
            one_copy_on_write(a, n, row_bytes, &layouts[l], n % 3 ? 0 : n % 16);
}

/* ---- several moves in one call ---- */

struct placed_index {
    void *data;
    kvprim_index_type type;
    int64_t count, base, rows, stride;
    bool distinct;
};

/* Gathers, stores and transfers whose moves run together, and the transfers' arrays of layers. */
struct together {
    std::vector<kvprim_gather_desc> gathers;
    std::vector<kvprim_store_desc> stores;
    std::vector<kvprim_transfer_desc> transfers;
    std::vector<placed_index> indices;
    std::vector<std::vector<void *>> layers;
    std::vector<std::unique_ptr<device_transfer>> on;
};

static const placed_index *add_index(arena *a, together *t, int64_t count, int64_t rows, bool distinct)
{
    const kvprim_index_type type = type_of(static_cast<unsigned>(below(2)));
    const int64_t base = bases[below(4)], stride = index_strides[below(8)];
    void *const data = place_index(a, type, count, base, rows, distinct, stride);
    t->indices.push_back({data, type, count, base, rows, stride ? stride : 1, distinct});
    return &t->indices.back();
}

static void add_gather(arena *a, together *t, int64_t count, int64_t row_bytes)
{
    const kvprim_table dst = place(a, &layouts[below(n_layouts)], count, row_bytes, below(3) * below(16));
    const kvprim_table src = place(a, &layouts[below(n_layouts)], count + 5, row_bytes, 0);
    const placed_index *const x = add_index(a, t, count, count + 5, false);
    kvprim_gather_desc d = gather_of(dst, src, row_bytes, x->data, x->type, x->base, count, reserve_counter(a));
    d.index_stride = x->stride;
    t->gathers.push_back(d);
}

/* Adds a store of K and V, or of K only if v_bytes is 0. */
static void add_store(arena *a, together *t, int64_t count, int64_t k_bytes, int64_t v_bytes)
{
    const layout *const l = &layouts[below(n_layouts)];
    kvprim_store_desc d = {};
    d.k_cache = place(a, l, count + 7, k_bytes, 0);
    d.k = place(a, &layouts[0], count, k_bytes, below(3) * below(16));
    d.k_bytes = k_bytes;
    if (v_bytes) {
        d.v_cache = place(a, l, count + 7, v_bytes, 0);
        d.v = place(a, &layouts[0], count, v_bytes, 0);
        d.v_bytes = v_bytes;
    }
    const placed_index *const x = add_index(a, t, count, count + 7, true);
    d.slot = x->data, d.slot_type = x->type, d.slot_base = x->base, d.slot_stride = x->stride;
    d.count = count;
    d.rejected = reserve_counter(a);
    t->stores.push_back(d);
}

static void add_transfer(arena *a, together *t, int64_t count, int64_t row_bytes, int32_t layers)
{
    kvprim_transfer_desc d = {};
    t->layers.push_back(std::vector<void *>(static_cast<size_t>(layers)));
    void **const starts = t->layers.back().data();
    void *unused[most_layers];
    d.dst =
        place_layers(a, &layouts[below(n_layouts)], count + 9, row_bytes, 0, layers, true, starts, &d.dst_layer_stride);
    d.src = place_layers(a, &layouts[below(n_layouts)], count + 4, row_bytes, 0, layers, false, unused,
                         &d.src_layer_stride);
    d.dst_layers = starts;
    d.layers = layers;
    d.row_bytes = row_bytes;
    d.count = count;
    if (chance(2)) {
        const placed_index *const x = add_index(a, t, count, count + 9, true);
        d.dst_index = x->data, d.dst_index_type = x->type, d.dst_index_base = x->base, d.dst_index_stride = x->stride;
    }
    if (chance(2)) {
        const placed_index *const x = add_index(a, t, count, count + 4, false);
        d.src_index = x->data, d.src_index_type = x->type, d.src_index_base = x->base, d.src_index_stride = x->stride;
    }
    d.rejected = reserve_counter(a);
    t->transfers.push_back(d);
}

/* Makes the moves of all of them, checked at the addresses of the code under test. */
static std::vector<kvprim_move> moves_of(const arena *a, together *t)
{
    std::vector<kvprim_move> all;
    kvprim_move m[2];
    for (const kvprim_gather_desc &d : t->gathers) {
        const kvprim_gather_desc on = on_device(a, d);
        CHECK(kvprim_gather_moves(&on, m) == KVPRIM_OK);
        all.push_back(m[0]);
    }
    for (const kvprim_store_desc &d : t->stores) {
        const kvprim_store_desc on = on_device(a, d);
        CHECK(kvprim_store_moves(&on, m) == KVPRIM_OK);
        all.insert(all.end(), m, m + 2);
    }
    for (const kvprim_transfer_desc &d : t->transfers) {
        t->on.emplace_back(new device_transfer(a, d));
        CHECK(kvprim_transfer_moves(&t->on.back()->d, m) == KVPRIM_OK);
        all.push_back(m[0]);
    }
    return all;
}

/* Does in `expected` what the single calls do, and allows access to their memory. */
static void run_one_by_one(arena *a, const together *t)
{
    kvprim_gather_desc gather;
    kvprim_store_desc store;
    kvprim_transfer_desc transfer;
    start_visit(a);
    for (const kvprim_gather_desc &d : t->gathers)
        CHECK(kvprim_gather_check(&d, &gather) == KVPRIM_OK && visit_gather(a, &gather));
    for (const kvprim_store_desc &d : t->stores)
        CHECK(kvprim_store_check(&d, &store) == KVPRIM_OK && visit_store(a, &store));
    for (const kvprim_transfer_desc &d : t->transfers)
        CHECK(kvprim_transfer_check(&d, &transfer) == KVPRIM_OK && visit_transfer(a, &transfer));
    for (const kvprim_gather_desc &d : t->gathers)
        CHECK(kvprim_gather(&d) == KVPRIM_OK);
    for (const kvprim_store_desc &d : t->stores)
        CHECK(kvprim_store(&d) == KVPRIM_OK);
    for (const kvprim_transfer_desc &d : t->transfers)
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
}

/* Checks the moves once and runs them twice. In between all of the memory changes, including the indices. */
static void run_together(arena *a, together *t, const char *what)
{
    const std::vector<kvprim_move> moves = moves_of(a, t);
    for (int round = 0; round < 2; round++) {
        if (round)
            fill(a->expected, a->used);
        for (const placed_index &x : t->indices)
            fill_index(x.data, x.type, x.count, x.base, x.rows, x.distinct, x.stride);
        memcpy(a->got, a->expected, a->used);
        snprintf(current, sizeof current, "%zu moves at once, run %d: %s", moves.size(), round, what);
        run_one_by_one(a, t);
        before(a);
        for (const std::pair<size_t, size_t> &bytes : a->allowed)
            allow(a, bytes.first, bytes.second);
        const kvprim_status got = kvprim_cuda_move(moves.data(), moves.size(), a->launch);
        after(a, true);
        if (got != KVPRIM_OK)
            fail("%s: %s", current, kvprim_last_error());
        compare(a, current, nullptr, 0);
    }
}

/* Caches in use, each of which takes several moves. */
static void usual_moves(arena *a)
{
    for (unsigned n = 0; n < 4; n++) {
        together t;
        empty(a);
        const int64_t count = n % 2 ? 300 : 8;
        switch (n / 2 + n % 2 * 2) {
        case 0: /* K and V of different width */
            add_store(a, &t, count, 192, 128);
            break;
        case 1: /* values, their scales, and an index key */
            add_store(a, &t, count, 576, 8);
            add_store(a, &t, count, 132, 0);
            break;
        case 2: /* layers of different row size */
            add_transfer(a, &t, count, 192, 30);
            add_transfer(a, &t, count, 128, 30);
            add_transfer(a, &t, count, 1152, 7);
            break;
        default: /* more layers than one launch takes */
            add_transfer(a, &t, count, 64, 150);
            add_transfer(a, &t, count, 16, 300);
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
        random_state = round * 7919 + 5;
        empty(a);
        for (unsigned n = 0; n <= round % 5; n++) {
            const int64_t count = counts[below(5)], row_bytes = sizes[below(13)];
            if (chance(3))
                add_gather(a, &t, count, row_bytes);
            else if (chance(2))
                add_store(a, &t, count, row_bytes, chance(3) ? 0 : sizes[below(13)]);
            else
                add_transfer(a, &t, count, row_bytes, 1 + static_cast<int32_t>(below(4)));
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
    d.layers = 1 + static_cast<int32_t>(n & 1);
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
        memcpy(a->got, a->expected, a->used);
        start_visit(a);
        CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && visit_transfer(a, &resolved));
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        before_source(a);
        before(a);
        for (const std::pair<size_t, size_t> &bytes : a->allowed)
            allow(a, bytes.first, bytes.second);
        CHECK(kvprim_cuda_move(&m, 1, a->launch) == KVPRIM_OK);
        after(a, true);
        after_source(a);
        compare(a, current, nullptr, 0);
    }
}

static void bad_moves(arena *a)
{
    const kvprim_gather_desc on = on_device(a, good_gather(a));
    kvprim_gather_desc none = on;
    none.count = 0;
    kvprim_move m[2];
    CHECK(kvprim_gather_moves(&none, &m[0]) == KVPRIM_OK);
    const kvprim_cuda_launch bad = launch_like(a, 7, 0);
    CHECK(kvprim_cuda_move(m, 1, &bad) == KVPRIM_OK);
    CHECK(kvprim_cuda_move(nullptr, 0, &bad) == KVPRIM_OK);
    CHECK(kvprim_gather_moves(&on, &m[1]) == KVPRIM_OK);
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_cuda_move(m, 2, &bad) == KVPRIM_ERROR_ARGUMENT);
    CHECK(strncmp(kvprim_last_error(), "kvprim_cuda_move: ", 18) == 0 && strstr(kvprim_last_error(), "pdl"));
    kvprim_cuda_launch reserved = launch_like(a, 0, 0);
    reserved.reserved = 1;
    CHECK(kvprim_cuda_move(m, 2, &reserved) == KVPRIM_ERROR_ARGUMENT && strstr(kvprim_last_error(), "reserved"));
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_cuda_move(nullptr, 1, a->launch) == KVPRIM_ERROR_NULL);
    CHECK(strcmp(kvprim_last_error(), "kvprim_cuda_move: moves is NULL") == 0);
}

/* ---- descriptors that must be refused ---- */

static kvprim_transfer_desc good_transfer(arena *a)
{
    empty(a);
    kvprim_transfer_desc d = {};
    d.dst = table_of(reserve(a, 2048, 0), 8);
    d.src = table_of(reserve(a, 4096, 0), 16);
    d.layers = 2;
    d.row_bytes = 128;
    d.dst_index = place_index(a, KVPRIM_I32, 4, 0, 8, true);
    d.src_index = place_index(a, KVPRIM_I32, 4, 0, 16, false);
    d.index_type = KVPRIM_I32;
    d.count = 4;
    d.rejected = reserve_counter(a);
    return d;
}

static void bad_transfers(arena *a)
{
    const kvprim_transfer_desc good = good_transfer(a);
    char *const dst = static_cast<char *>(good.dst.data), *const src = static_cast<char *>(good.src.data);
    void *const no_layer[2] = {dst, nullptr}, *const shared[2] = {src, dst + 1900};
    void *const twice[2] = {dst, dst}, *const stacked[2] = {dst, dst + 1024};
    kvprim_transfer_desc d = good;
    CHECK(try_transfer(a, &good, "good") == RAN);
#define BAD(change)                                                                                                    \
    d = good;                                                                                                          \
    d.change;                                                                                                          \
    CHECK(try_transfer(a, &d, #change) == REFUSED)
    BAD(dst.data = nullptr);
    BAD(src.data = nullptr);
    BAD(dst_layers = no_layer);
    BAD(src_layers = no_layer);
    BAD(src_layers = shared);
    BAD(layers = -1);
    BAD(layers = INT32_MIN);
    BAD(row_bytes = 0);
    BAD(row_bytes = INT64_MAX);
    BAD(count = -1);
    BAD(count = INT64_MAX);
    BAD(count = int64_t(1) << 62; d.layers = 4);
    BAD(dst_index = static_cast<const char *>(good.dst_index) + 1);
    BAD(src_index = static_cast<const char *>(good.src_index) + 2);
    BAD(dst_index = dst + 1024 + 512);
    BAD(dst.rows = -1);
    BAD(dst.stride = 127);
    BAD(src.stride = INT64_MIN);
    BAD(src.page_rows = -1);
    BAD(dst.page_stride = -1);
    BAD(dst.heads = 3);
    BAD(src.heads = INT32_MIN);
    BAD(dst_layer_stride = 1023);
    BAD(src_layer_stride = -1);
    BAD(src.data = dst + 2047);
    BAD(src.data = dst);
    BAD(same_cache = 2);
    BAD(same_cache = -1);
    BAD(same_cache = 1);
    BAD(index_type = static_cast<kvprim_index_type>(0));
    BAD(dst_index_type = static_cast<kvprim_index_type>(3));
    BAD(dst_index_stride = -1);
    BAD(src_index_stride = INT64_MAX);
    BAD(src.rows = 0);
    BAD(dst.heads = 2);
    BAD(layers = 65537);
    BAD(dst_layers = twice);
    BAD(dst_layers = stacked; d.dst_layer_stride = 1024);
    BAD(dst.bytes = 2 * 8 * 128 - 1);
    BAD(src.bytes = 2 * 16 * 128 - 1);
    BAD(reserved_index = 1);
    BAD(reserved = -1);
    BAD(src.reserved[0] = 1);
    BAD(rejected = odd_counter(good.rejected));
    BAD(rejected = static_cast<uint32_t *>(good.dst.data) + 511);
    BAD(rejected = static_cast<uint32_t *>(good.src.data) + 1023);
    BAD(rejected = static_cast<uint32_t *>(const_cast<void *>(good.dst_index)) + 3);
    BAD(rejected = static_cast<uint32_t *>(const_cast<void *>(good.src_index)));
#undef BAD
    d = good;
    d.dst.bytes = 2 * 8 * 128;
    d.src.bytes = 2 * 16 * 128;
    CHECK(try_transfer(a, &d, "tables as large as their memory") == RAN);
    for (int side = 0; side < 2; side++) { /* a side without an index has as many rows as are moved */
        d = good;
        (side ? d.dst_index : d.src_index) = nullptr;
        (side ? d.dst : d.src).rows = 3;
        CHECK(try_transfer(a, &d, "too few rows") == REFUSED);
    }
    d = {};
    CHECK(try_transfer(a, &d, "count 0") == RAN);
    d = good;
    d.src = empty_table();
    CHECK(try_transfer(a, &d, "an empty table") == RAN);
    (void)kvprim_fail(KVPRIM_OK, "-");
    CHECK(kvprim_cuda_transfer(nullptr, a->launch) == KVPRIM_ERROR_NULL && strstr(kvprim_last_error(), "desc is NULL"));
    const kvprim_cuda_launch bad = launch_like(a, 0, -1);
    const device_transfer on(a, good);
    CHECK(kvprim_cuda_transfer(&on.d, &bad) == KVPRIM_ERROR_ARGUMENT && strstr(kvprim_last_error(), "max_sms"));
}

/* ---- random descriptors ---- */

/* Each side has two parts of the memory. Both indices are made in the same place, so one is copied. */
static outcome random_transfer(arena *a, unsigned round)
{
    enum { layers = 3 };
    const int64_t count = static_cast<int64_t>(below(fuzz_indices / 2));
    const bool dst_indexed = !chance(3), src_indexed = !chance(3);
    const int64_t dst_rows =
        dst_indexed ? count + static_cast<int64_t>(below(9)) : count + static_cast<int64_t>(below(3));
    const int64_t src_rows = src_indexed ? 1 + static_cast<int64_t>(below(40)) : count + static_cast<int64_t>(below(3));
    void *dst_bases[layers], *src_bases[layers];
    empty(a);
    (void)reserve(a, 4 * fuzz_bytes + 2 * (8 * fuzz_indices + 256), 0);
    void *const second = a->expected + 4 * fuzz_bytes + 8 * fuzz_indices + 256;
    kvprim_transfer_desc d = {};
    d.index_type = type_of(round);
    d.row_bytes = random_row_bytes();
    d.count = count;
    d.layers = static_cast<int32_t>(below(layers + 1));
    d.dst = random_table(dst_rows, d.row_bytes);
    d.src = random_table(src_rows, d.row_bytes);
    d.dst.data = random_place(a, 0);
    d.src.data = random_place(a, 2);
    for (int l = 0; l < layers; l++) {
        dst_bases[l] = static_cast<char *>(random_place(a, 0)) + 8192 * l;
        src_bases[l] = static_cast<char *>(random_place(a, 2)) + 8192 * l;
    }
    d.dst_layers = chance(3) ? dst_bases : nullptr;
    d.src_layers = chance(3) ? src_bases : nullptr;
    d.dst_layer_stride = !d.dst_layers && chance(6) ? static_cast<int64_t>(16 * below(600)) : 0;
    d.src_layer_stride = !d.src_layers && chance(6) ? static_cast<int64_t>(below(10000)) : 0;
    memcpy(second, random_index(a, d.index_type, dst_rows > count ? dst_rows : count, 0, true), 8 * fuzz_indices);
    d.dst_index = dst_indexed ? second : nullptr;
    const void *const first = random_index(a, d.index_type, src_rows, 0, false);
    d.src_index = src_indexed ? first : nullptr;
    d.dst_index_base = chance(8) ? random_base() : 0;
    d.src_index_base = chance(8) ? random_base() : 0;
    d.dst_index_stride = random_stride();
    d.src_index_stride = random_stride();
    d.rejected = random_counter(a);
    spoil_table(&d.dst);
    spoil_table(&d.src);
    spoil(&d.row_bytes);
    spoil(&d.count);
    char what[40];
    snprintf(what, sizeof what, "round %u", round);
    return try_transfer(a, &d, what);
}

/* ---- tables past 4 GiB ---- */

/* Like large_store_and_gather, except that a row without a source stays as it is. */
static void large_transfers(const large_move *m, int64_t row_bytes)
{
    kvprim_transfer_desc in = {}, out = {};
    in.dst = out.src = table_of(m->table, large_rows);
    in.src = table_of(m->input, large_count);
    out.dst = table_of(m->output, large_count);
    in.dst_index = out.src_index = m->slots;
    in.index_type = out.index_type = KVPRIM_I64;
    in.row_bytes = out.row_bytes = row_bytes;
    in.count = out.count = large_count;
    in.rejected = out.rejected = m->rejected;
    if (kvprim_cuda_transfer(&in, nullptr) != KVPRIM_OK || kvprim_cuda_transfer(&out, nullptr) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
}

#endif /* TEST_TRANSFERS_H */

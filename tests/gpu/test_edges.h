/* SPDX-License-Identifier: MIT */
/* Limits that random descriptors rarely meet: strides past 4 GiB, indices whose difference to the base wraps, rows that
   end just after a part, second launches. test_cuda_emulated.cpp includes it after its other tests. */
#ifndef TEST_EDGES_H
#define TEST_EDGES_H

/* Runs n moves on the CPU, and on the GPU on all of its multiprocessors and on one. `reset` comes before each run, and
   `check` after it. */
template <class Reset, class Check>
static void everywhere(const kvprim_move *moves, size_t n, const Reset &reset, const Check &check)
{
    static const char *const names[] = {"CPU", "GPU", "one multiprocessor"};
    for (int where = 0; where < 3; where++) {
        kvprim_cuda_launch launch = {};
        launch.max_sms = where == 2;
        reset();
        CHECK((where ? kvprim_cuda_move(moves, n, &launch) : kvprim_cpu_move(moves, n)) == KVPRIM_OK);
        check(names[where]);
    }
}

/* The same for moves that write somewhere in `got`, which becomes `want`. */
typedef std::vector<unsigned char> block;
static void everywhere(const kvprim_move *moves, size_t n, block *got, const block &want, const char *what)
{
    const block before = *got;
    everywhere(
        moves, n, [&] { memcpy(got->data(), before.data(), before.size()); },
        [&](const char *where) {
            if (*got == want)
                return;
            const auto bad = std::mismatch(want.begin(), want.end(), got->begin());
            fail("%s, %s: byte %lld is %02x, not %02x", what, where, print_i64(bad.first - want.begin()), *bad.second,
                 *bad.first);
        });
    memcpy(got->data(), before.data(), before.size());
}

/* ---- strides past 4 GiB ---- */

struct far_table {
    const char *name;
    int64_t rows, stride, page_rows, page_stride;
    int32_t heads, layers;
    int64_t head_stride, layer_stride;
};

static const int64_t gib = int64_t(1) << 30;
static const far_table far_tables[] = {{"rows", 3, 5 * gib, 0, 0, 0, 1, 0, 0},
                                       {"rows 3 GiB apart", 3, 3 * gib, 0, 0, 0, 1, 0, 0},
                                       {"pages of 2", 5, 0, 2, 5 * gib, 0, 1, 0, 0},
                                       {"pages of 3", 5, 0, 3, 5 * gib, 0, 1, 0, 0},
                                       {"pages of 2 inside a stride", 5, 5 * gib, 2, 4096, 0, 1, 0, 0},
                                       {"pages of 3 inside a stride", 5, 5 * gib, 3, 4096, 0, 1, 0, 0},
                                       {"heads", 3, 0, 0, 0, 2, 1, 5 * gib, 0},
                                       {"layers", 3, 0, 0, 0, 0, 3, 0, 5 * gib}};

/* Moves rows between a far table and packed ones. */
static void one_far_table(const far_table *f, unsigned char *far_memory, int64_t row_bytes, bool into)
{
    int64_t index[5];
    alignas(16) unsigned char near_rows[3 * 5 * 64];
    kvprim_transfer_desc d = {};
    kvprim_table &far_side = into ? d.dst : d.src;
    kvprim_move m;
    for (int64_t i = 0; i < f->rows; i++)
        index[i] = (2 * i + 1) % f->rows;
    d.dst = d.src = table_of(near_rows, f->rows);
    far_side = table_of(far_memory, f->rows, f->stride);
    far_side.page_rows = f->page_rows, far_side.page_stride = f->page_stride;
    far_side.heads = f->heads, far_side.head_stride = f->head_stride;
    (into ? d.dst_index : d.src_index) = index;
    (into ? d.dst_layer_stride : d.src_layer_stride) = f->layer_stride;
    d.layers = f->layers, d.row_bytes = row_bytes, d.index_type = KVPRIM_I64, d.count = f->rows;
    const kvprim_gather_desc gather =
        gather_of(d.dst, d.src, row_bytes, index, KVPRIM_I64, 0, f->rows, nullptr); /* the kernels of plain rows */
    CHECK((into || f->layers > 1 ? kvprim_transfer_moves(&d, &m) : kvprim_gather_moves(&gather, &m)) == KVPRIM_OK);
    const kvprim_table t = kvprim_table_resolve(far_side, row_bytes);
    const auto in_far = [&](int64_t l, int64_t i, int64_t b) {
        return far_memory + l * f->layer_stride + row_offset(&t, row_bytes, index[i], b);
    };
    const auto each = [&](auto visit) {
        for (int64_t l = 0; l < f->layers; l++)
            for (int64_t i = 0; i < f->rows; i++)
                for (int64_t b = 0; b < row_bytes; b++)
                    visit(in_far(l, i, b), near_rows + (l * f->rows + i) * row_bytes + b);
    };
    for (int64_t i = 0; i < f->rows; i++)
        CHECK(kvprim_table_row(&t, index[i]) == in_far(0, i, 0));
    everywhere(
        &m, 1,
        [&] {
            fill(near_rows, sizeof near_rows);
            each([](unsigned char *to, unsigned char *from) { *to = static_cast<unsigned char>(*from + 1); });
        },
        [&](const char *where) {
            bool same = true;
            each([&](unsigned char *x, unsigned char *y) { same &= *x == *y; });
            if (!same)
                fail("%s, %lld bytes, %s, %s: rows differ", f->name, print_i64(row_bytes), into ? "store" : "load",
                     where);
        });
}

static void test_far_tables()
{
    const addresses memory_of(uint64_t(10 * gib + 65536));
    for (const far_table &f : far_tables)
        for (int n = 0; memory_of.p && n < 4; n++)
            one_far_table(&f, memory_of.p, n / 2 ? 64 : 34, n % 2);
}

/* Indices 2 GiB apart, and rows past 2^32. */
static void one_far_index(unsigned char *index, unsigned char *table, int64_t rows, kvprim_index_type type, bool into)
{
    enum { count = 9 };
    const int64_t stride = KVPRIM_MAX_INDEX_STRIDE;
    alignas(16) unsigned char near_rows[16]; /* whole words are read */
    kvprim_transfer_desc d = {};
    kvprim_move m;
    d.dst = d.src = table_of(near_rows, count);
    (into ? d.dst : d.src) = table_of(table, rows);
    (into ? d.dst_index : d.src_index) = index;
    d.dst_index_stride = d.src_index_stride = stride;
    d.row_bytes = 1, d.index_type = type, d.count = count;
    for (int64_t i = 0; i < count; i++)
        set_index(index, type, i * stride, rows - 1 - i * 4099);
    kvprim_gather_desc gather = gather_of(d.dst, d.src, 1, index, type, 0, count, nullptr);
    gather.index_stride = stride;
    CHECK((into ? kvprim_transfer_moves(&d, &m) : kvprim_gather_moves(&gather, &m)) == KVPRIM_OK);
    everywhere(
        &m, 1,
        [&] {
            fill(near_rows, count);
            for (int64_t i = 0; i < count; i++)
                table[rows - 1 - i * 4099] = static_cast<unsigned char>(near_rows[i] + 1);
        },
        [&](const char *where) {
            for (int64_t i = 0; i < count; i++)
                if (table[rows - 1 - i * 4099] != near_rows[i])
                    fail("%lld rows, %s, %s: row %d differs", print_i64(rows), into ? "store" : "load", where, int(i));
        });
}

static void test_far_indices()
{
    const int64_t many = (int64_t(1) << 32) + 7;
    const addresses index(uint64_t(8 * int64_t(KVPRIM_MAX_INDEX_STRIDE) + 1) * 8), table(static_cast<uint64_t>(many));
    for (int n = 0; index.p && table.p && n < 6; n++)
        one_far_index(index.p, table.p, n < 4 ? 1 << 20 : many, n < 2 ? KVPRIM_I32 : KVPRIM_I64, n % 2);
}

/* ---- indices whose difference to the base wraps, rows that end near the end of a part ---- */

/* Indices into `rows` rows from `base` on. Some are padding, `past` of them are past the table. */
struct ruled_index {
    kvprim_index_type type;
    int64_t base, rows, past, count, values[9];
};

/* Bytes past a multiple of 16 at which rows begin, and their strides. */
struct row_place {
    int64_t dst, src, stride;
};

/* Operation 0 is a gather, 1 a store, 2 a transfer by src_index. A store also has V if v_bytes. */
static void one_ruled(const ruled_index *x, int operation, int64_t k_bytes, int64_t v_bytes, const row_place *place)
{
    enum { most = 20480 };
    static const char *const names[] = {"gather", "store", "transfer"};
    alignas(64) static unsigned char from[2][most];
    static block got(2 * most + 64, 0xa5), want;
    unsigned char *const to = got.data() + (64 - reinterpret_cast<uintptr_t>(got.data()) % 64) % 64 + place->dst;
    const bool into = operation == 1;
    int64_t index[9];
    uint32_t rejected = 0;
    char what[120];
    kvprim_move m[2];
    kvprim_gather_desc g = {};
    kvprim_store_desc s = {};
    kvprim_transfer_desc t = {};
    fill(from[0], sizeof from);
    want = got;
    for (int v = 0; v < (v_bytes ? 2 : 1); v++) {
        const int64_t bytes = v ? v_bytes : k_bytes, stride = (bytes + 31) / 16 * 16 + place->stride;
        unsigned char *const wanted = want.data() + (to - got.data()) + v * most, *const source = from[v] + place->src;
        for (int64_t i = 0; i < x->count; i++) {
            const int64_t row = ruled(x->values[i], x->base, x->rows);
            set_index(index, x->type, i, x->values[i]);
            if (row >= 0)
                memcpy(wanted + (into ? row : i) * stride, source + (into ? i : row) * stride, size_t(bytes));
            else if (operation == 0)
                memset(wanted + i * stride, 0, size_t(bytes));
        }
        const kvprim_table dst = table_of(to + v * most, into ? x->rows : x->count, stride);
        const kvprim_table src = table_of(source, into ? x->count : x->rows, stride);
        g = gather_of(dst, src, bytes, index, x->type, x->base, x->count, &rejected);
        t.dst = dst, t.src = src, t.row_bytes = bytes;
        (v ? s.v_cache : s.k_cache) = dst, (v ? s.v : s.k) = src, (v ? s.v_bytes : s.k_bytes) = bytes;
    }
    s.slot = t.src_index = index, s.slot_type = t.index_type = x->type, s.slot_base = t.src_index_base = x->base;
    s.count = t.count = x->count, s.rejected = t.rejected = &rejected;
    CHECK((operation == 0 ? kvprim_gather_moves(&g, m)
           : into         ? kvprim_store_moves(&s, m)
                          : kvprim_transfer_moves(&t, m)) == KVPRIM_OK);
    snprintf(what, sizeof what, "%s of %d and %d bytes, alignments %d, %d and %d, base %lld", names[operation],
             int(k_bytes), int(v_bytes), int(place->dst), int(place->src), int(place->stride), print_i64(x->base));
    everywhere(m, into ? 2 : 1, &got, want, what);
    if (rejected != 3 * x->past)
        fail("%s: %u rejected in three runs", what, rejected);
}

static const row_place places[] = {{0, 0, 0}, {15, 0, 0}, {3, 9, 0}, {3, 3, 0}, {0, 0, 8}, {5, 2, 1}};

/* The tables begin below the largest index and end past it: no index of the other sign is in them. */
static void test_wraps()
{
    static const int64_t most[] = {INT32_MAX, INT64_MAX}, least[] = {INT32_MIN, INT64_MIN};
    for (int wide = 0; wide < 2; wide++) {
        const int64_t last = most[wide], first = least[wide];
        const ruled_index x = {type_of(unsigned(wide)),
                               last - 39,
                               100,
                               0,
                               9,
                               {last, last - 39, last - 40, first, first + 10, first + 58, first + 59, -1, last - 19}};
        for (int operation = 0; operation < 3; operation++)
            for (const row_place &place : places)
                one_ruled(&x, operation, 64, 0, &place);
    }
}

static void test_row_ends()
{
    static const int64_t parts[] = {128, 256, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 2064};
    static const ruled_index indices[] = {
        {KVPRIM_I32, 5, 3, 1, 6, {7, 4, 5, 8, 6, -1}},
        {KVPRIM_I64, 5, 3, 3, 9, {7, 4, 5, 8, 6, -1, int64_t(1) << 32, (int64_t(1) << 31) + 5, -(int64_t(1) << 32)}}};
    for (const int64_t part : parts)
        for (const int64_t more : {-15, -2, -1, 0, 1, 2, 16, 18})
            for (const row_place &place : places) {
                const ruled_index *const x = &indices[(part / 128 + more) & 1];
                one_ruled(x, 0, part + more, 0, &place);
                one_ruled(x, 1, part + more, part % 256 ? 0 : 1170, &place);
                one_ruled(x, 1, 1170, part + more, &place);
            }
}

/* ---- launches of unpack ---- */

/* Two launches hold each fragment, as merged, once: a second one that begins too early copies bytes again. The last
   case has one launch, and a last fragment that is shorter than the others. */
static void test_second_launches()
{
    static const struct {
        batch_case batch;
        uint64_t fragments;
    } cases[] = {{{11000, 17, EVEN, IN_ORDER, SHUFFLED, 1, 3, 0, 1}, 11000},
                 {{11000, 17, SHORT_LAST, SHUFFLED, SPACED, 1, 0, 5, 1}, 11000},
                 {{6600, 33, EVEN, SHUFFLED, SHUFFLED, 1, 0, 0, 1}, 6600},
                 {{17000, 16, EVEN, SPACED, SHUFFLED, 16, 0, 0, 1}, 17000},
                 {{33000, 8, EVEN, IN_ORDER, SHUFFLED, 1, 3, 0, 2}, 16500},
                 {{100, 48, SHORT_LAST, IN_ORDER, SHUFFLED, 16, 0, 0, 1}, 100}}; /* in one launch */
    for (const auto &c : cases) {
        uint64_t fragments = 0;
        noted.clear();
        one_batch(&memory, &c.batch);
        for (const kvpc_unpack &launch : noted)
            fragments += launch.count;
        if (noted.size() != (c.fragments > 100 ? 2 : 1) || fragments != c.fragments)
            fail("case %d: %llu fragments in %zu launches", int(&c - cases), print_u64(fragments), noted.size());
    }
}

#endif /* TEST_EDGES_H */

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
            fail("%s, %s: byte %lld is %02x, not %02x", what, where, static_cast<long long>(bad.first - want.begin()),
                 *bad.second, *bad.first);
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
                fail("%s, %lld bytes, %s, %s: rows differ", f->name, static_cast<long long>(row_bytes),
                     into ? "store" : "load", where);
        });
}

static void test_far_tables()
{
    const uint64_t bytes = static_cast<uint64_t>(10 * gib + 65536);
    unsigned char *const far_memory = reserve_addresses(bytes);
    for (const far_table &f : far_tables)
        for (int n = 0; far_memory && n < 4; n++)
            one_far_table(&f, far_memory, n / 2 ? 64 : 34, n % 2);
    if (far_memory)
        munmap(far_memory, bytes);
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
                    fail("%lld rows, %s, %s: row %d differs", static_cast<long long>(rows), into ? "store" : "load",
                         where, static_cast<int>(i));
        });
}

static void test_far_indices()
{
    const int64_t many = (int64_t(1) << 32) + 7;
    const uint64_t index_bytes = uint64_t(8 * int64_t(KVPRIM_MAX_INDEX_STRIDE) + 1) * 8, bytes = uint64_t(many);
    unsigned char *const index = reserve_addresses(index_bytes), *const table = reserve_addresses(bytes);
    for (int n = 0; index && table && n < 6; n++)
        one_far_index(index, table, n < 4 ? 1 << 20 : many, n < 2 ? KVPRIM_I32 : KVPRIM_I64, n % 2);
    if (index)
        munmap(index, index_bytes);
    if (table)
        munmap(table, bytes);
}

/* ---- indices whose difference to the base wraps ---- */

/* Tables that begin below the largest index and end past it: no index of the other sign is in them. */
static void one_wrap(kvprim_index_type type, int operation, int64_t row_bytes)
{
    const int64_t count = 9, rows = 100;
    const int64_t least = type == KVPRIM_I64 ? INT64_MIN : INT32_MIN, most = type == KVPRIM_I64 ? INT64_MAX : INT32_MAX;
    const int64_t base = most - 39,
                  values[count] = {most, base, base - 1, least, least + 10, least + 58, least + 59, -1, base + 20};
    const size_t table_bytes = size_t(rows) * 64, near_bytes = size_t(count) * 64;
    block got(near_bytes + table_bytes + 64), want;
    alignas(8) unsigned char index[count * 8];
    unsigned char *const near_rows = got.data() + (64 - reinterpret_cast<uintptr_t>(got.data()) % 64) % 64;
    unsigned char *const table = near_rows + near_bytes;
    const bool into = operation == 1;
    uint32_t rejected = 0;
    kvprim_move m;
    for (int i = 0; i < count; i++)
        set_index(index, type, i, values[i]);
    fill(got.data(), got.size());
    want = got;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = ruled(values[i], base, rows);
        unsigned char *const wanted = want.data() + (near_rows - got.data()) + i * 64;
        if (row >= 0 && into)
            memcpy(want.data() + (table - got.data()) + row * 64, wanted, static_cast<size_t>(row_bytes));
        else if (row >= 0)
            memcpy(wanted, table + row * 64, static_cast<size_t>(row_bytes));
        else if (operation == 0)
            memset(wanted, 0, static_cast<size_t>(row_bytes));
    }
    kvprim_transfer_desc d = {};
    d.dst = table_of(into ? table : near_rows, into ? rows : count, 64);
    d.src = table_of(into ? near_rows : table, into ? count : rows, 64);
    (into ? d.dst_index : d.src_index) = index;
    (into ? d.dst_index_base : d.src_index_base) = base;
    d.row_bytes = row_bytes, d.index_type = type, d.count = count, d.rejected = &rejected;
    const kvprim_gather_desc gather = gather_of(d.dst, d.src, row_bytes, index, type, base, count, &rejected);
    CHECK((operation ? kvprim_transfer_moves(&d, &m) : kvprim_gather_moves(&gather, &m)) == KVPRIM_OK);
    everywhere(&m, 1, &got, want, operation == 0 ? "gather" : into ? "store" : "transfer");
    CHECK(rejected == 0);
}

static void test_wraps()
{
    for (const kvprim_index_type type : {KVPRIM_I32, KVPRIM_I64})
        for (int operation = 0; operation < 3; operation++)
            for (const int64_t row_bytes : {64, 20})
                one_wrap(type, operation, row_bytes);
}

/* ---- rows that end near the end of a part ---- */

/* Bytes past a multiple of 16 at which rows begin, and their strides. */
struct row_place {
    int64_t dst, src, stride;
};

/* Rows of K, and of V if v_bytes. Some indices are padding, one or two are past the table. */
static void one_end(int64_t k_bytes, int64_t v_bytes, const row_place *place, bool gather)
{
    enum { most = 16384 };
    const int64_t rows = 3;
    static const int64_t values[] = {2, -1, 0, 3, 1, int64_t(1) << 32, -(int64_t(1) << 32)};
    alignas(64) static unsigned char from[2][most];
    static block got(2 * most + 64), want;
    unsigned char *const to = got.data() + (64 - reinterpret_cast<uintptr_t>(got.data()) % 64) % 64 + place->dst;
    const kvprim_index_type type = type_of(k_bytes % 2 != 0);
    const int64_t count = type == KVPRIM_I64 ? 7 : 5;
    int64_t index[7];
    uint32_t rejected = 0;
    char what[100];
    kvprim_move m[2];
    kvprim_store_desc d = {};
    kvprim_gather_desc g = {};
    snprintf(what, sizeof what, "%s of %lld and %lld bytes, alignments %d, %d and %d", gather ? "gather" : "store",
             static_cast<long long>(k_bytes), static_cast<long long>(v_bytes), int(place->dst), int(place->src),
             int(place->stride));
    fill(from[0], sizeof from);
    want = got;
    for (int v = 0; v < (v_bytes ? 2 : 1); v++) {
        const int64_t bytes = v ? v_bytes : k_bytes, stride = (bytes + 31) / 16 * 16 + place->stride;
        unsigned char *const wanted = want.data() + (to - got.data()) + v * most, *const source = from[v] + place->src;
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = ruled(values[i], 0, rows);
            set_index(index, type, i, values[i]);
            if (row >= 0)
                memcpy(wanted + (gather ? i : row) * stride, source + (gather ? row : i) * stride, size_t(bytes));
            else if (gather)
                memset(wanted + i * stride, 0, size_t(bytes));
        }
        const kvprim_table dst = table_of(to + v * most, gather ? count : rows, stride);
        const kvprim_table src = table_of(source, gather ? rows : count, stride);
        g = gather_of(dst, src, bytes, index, type, 0, count, &rejected);
        (v ? d.v_cache : d.k_cache) = dst, (v ? d.v : d.k) = src, (v ? d.v_bytes : d.k_bytes) = bytes;
    }
    d.slot = index, d.slot_type = type, d.count = count, d.rejected = &rejected;
    CHECK((gather ? kvprim_gather_moves(&g, m) : kvprim_store_moves(&d, m)) == KVPRIM_OK);
    everywhere(m, gather ? 1 : 2, &got, want, what);
    if (rejected != (type == KVPRIM_I64 ? 6u : 3u))
        fail("%s: %u rejected in three runs", what, rejected);
}

static void test_row_ends()
{
    static const row_place places[] = {{0, 0, 0}, {15, 0, 0}, {3, 9, 0}, {3, 3, 0}, {0, 0, 8}, {5, 2, 1}};
    static const int64_t parts[] = {128, 256, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 2064};
    for (const int64_t part : parts)
        for (const int64_t more : {-15, -2, -1, 0, 1, 2, 16, 18})
            for (const row_place &place : places) {
                one_end(part + more, 0, &place, true);
                one_end(part + more, part % 256 ? 0 : 1170, &place, false);
                one_end(1170, part + more, &place, false);
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
    } cases[] = {{{8400, 17, EVEN, IN_ORDER, SHUFFLED, 1, 3, 0, 1}, 8400},
                 {{8400, 17, SHORT_LAST, SHUFFLED, SPACED, 1, 0, 5, 1}, 8400},
                 {{4200, 33, EVEN, SHUFFLED, SHUFFLED, 1, 0, 0, 1}, 4200},
                 {{17000, 16, EVEN, SPACED, SHUFFLED, 16, 0, 0, 1}, 17000},
                 {{17000, 8, EVEN, IN_ORDER, SHUFFLED, 1, 3, 0, 2}, 8500},
                 {{100, 48, SHORT_LAST, IN_ORDER, SHUFFLED, 16, 0, 0, 1}, 100}}; /* in one launch */
    for (const auto &c : cases) {
        uint64_t fragments = 0;
        noted.clear();
        one_batch(&memory, &c.batch);
        for (const kvpc_unpack &launch : noted)
            fragments += launch.count;
        if (noted.size() != (c.fragments > 100 ? 2 : 1) || fragments != c.fragments)
            fail("case %d: %llu fragments in %zu launches", static_cast<int>(&c - cases),
                 static_cast<unsigned long long>(fragments), noted.size());
    }
}

static void run_edges()
{
    run("edges: strides past 4 GiB", test_far_tables);
    run("edges: indices 2 GiB apart, rows past 2^32", test_far_indices);
    run("edges: indices that wrap", test_wraps);
    run("edges: ends of rows", test_row_ends);
    run("edges: second launches of unpack", test_second_launches);
}

#endif /* TEST_EDGES_H */

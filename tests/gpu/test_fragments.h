/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for kvprim_cuda_unpack. They unpack batches of fragments in the
   memory of test_rows.h, once by kvprim_unpack and once on the GPU, and compare every byte. Include it after
   test_rows.h. */
#ifndef TEST_FRAGMENTS_H
#define TEST_FRAGMENTS_H

#include <algorithm>

/* ---- one batch, by the host function and by the code under test ---- */

/* Allows access to the bytes of one copy: to src's in aligned words, if it is not NULL. Returns false if they lie
   outside the memory, or if destinations overlap: then their bytes are unspecified. */
static bool visit_bytes(arena *a, const void *from, const void *to, uint64_t bytes)
{
    const size_t src = offset_of(a, from), dst = offset_of(a, to);
    if (bytes == 0)
        return true;
    if (bytes > a->used || (from && src > a->used - bytes) || dst > a->used - bytes || memchr(&a->taken[dst], 1, bytes))
        return false;
    memset(&a->taken[dst], 1, bytes);
    a->allowed.push_back({dst, bytes});
    if (from)
        a->allowed.push_back({src / 16 * 16, (src + bytes + 15) / 16 * 16 - src / 16 * 16});
    return true;
}

/* Names a buffer, for reports. */
static void name_buffer(arena *a, void *dst, uint64_t bytes)
{
    a->tables.push_back({"dst", 0, kvprim_table_resolve(table_of(dst, 1), int64_t(bytes)), int64_t(bytes)});
}

static bool visit_unpack(arena *a, const kvprim_unpack_desc *d)
{
    name_buffer(a, d->dst, d->dst_bytes);
    if (d->src_bytes > a->used - offset_of(a, d->src) || d->dst_bytes > a->used - offset_of(a, d->dst))
        return false;
    for (size_t i = 0; i < d->count; i++) {
        const kvprim_fragment f = d->fragments[i];
        if (!visit_bytes(a, static_cast<const char *>(d->src) + f.src_offset,
                         static_cast<char *>(d->dst) + f.dst_offset, f.bytes))
            return false;
    }
    return true;
}

static bool any_bytes(const kvprim_unpack_desc *d)
{
    for (size_t i = 0; i < d->count; i++)
        if (d->fragments[i].bytes)
            return true;
    return false;
}

/* Without KVPRIM_DEBUG the code under test takes this for the check of all fragments. */
static bool survey_says_fit(const kvprim_unpack_desc *d)
{
    kvpc_unpack_job job;
    job.list = kvpc_list_of(d), job.zeros = false;
    kvpc_survey(&job, false);
    return job.fit;
}

/* As try_move. The code under test gets copies of the descriptor and the fragments, which are overwritten before it
   can have run. */
static outcome try_unpack(arena *a, const kvprim_unpack_desc *desc, const char *what)
{
    std::vector<kvprim_fragment> fragments;
    kvprim_unpack_desc on = *desc;
    on.dst = on_device(a, desc->dst);
    on.src = on_device(a, desc->src);
    if (desc->fragments) {
        fragments.assign(desc->fragments, desc->fragments + desc->count);
        fragments.push_back({0, 0, 0}); /* so that there is an address */
        on.fragments = fragments.data();
    }
    snprintf(current, sizeof current, "unpack: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_unpack_check(&on);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->count > 0;
    const bool huge = (desc->src_bytes | desc->dst_bytes) >> 62 != 0; /* of which the survey says nothing */
    if (runs || want == KVPRIM_ERROR_BOUNDS)
        CHECK(survey_says_fit(&on) == (runs && !huge));
    start_visit(a);
    if (runs && (kvprim_unpack_check(desc) != KVPRIM_OK || !visit_unpack(a, desc)))
        return OUTSIDE;
    return run_both(
        a, want, want_text, runs && any_bytes(desc), [&] { return kvprim_unpack(desc); },
        [&] {
            const kvprim_status got = kvprim_cuda_unpack(&on, a->launch);
            if (is_asked())
                return got;
            if (!fragments.empty())
                memset(fragments.data(), 0xff, fragments.size() * sizeof fragments[0]);
            memset(&on, 0xff, sizeof on);
            return got;
        });
}

/* ---- batches ---- */

enum sizes { EVEN, SHORT_LAST, LOGARITHMIC, ONE_LARGE, SOME_EMPTY, n_sizes };
static const char *const sizes_names[] = {"even", "short last", "64-fold", "one large", "some empty"};
enum order { IN_ORDER, SPACED, REVERSED, SHUFFLED, ANYWHERE, n_orders }; /* ANYWHERE: only sources, which may overlap */
static const char *const order_names[] = {"in order", "spaced", "reversed", "shuffled", "anywhere"};

struct batch_case {
    size_t count;
    uint64_t bytes; /* of a fragment, or about so many */
    sizes kind;
    order dst, src;
    uint64_t unit; /* what offsets are multiples of, where they are not packed */
    size_t dst_align, src_align;
    size_t run; /* so many fragments at a time keep together */
};

static uint64_t size_of(const batch_case *c, size_t i)
{
    switch (c->kind) {
    case SHORT_LAST:
        return i + 1 == c->count ? c->bytes / 3 : c->bytes;
    case LOGARITHMIC:
        return 1 + (c->bytes / 8 + below(c->bytes)) * (uint64_t(1) << below(4)) / 8;
    case ONE_LARGE:
        return i == c->count * 2 / 3 ? c->bytes * 300 + 7 : c->bytes;
    case SOME_EMPTY:
        return chance(4) ? 0 : c->bytes;
    default:
        return c->bytes;
    }
}

/* Gives one side's fragments their offsets; returns the bytes that this side needs. */
static uint64_t place_side(const batch_case *c, order how, std::vector<kvprim_fragment> *f,
                           uint64_t kvprim_fragment::*offset)
{
    const size_t runs = (c->count + c->run - 1) / c->run;
    std::vector<int64_t> turn = shuffled(int64_t(runs));
    uint64_t at = 0, end = 0;
    for (size_t k = 0; k < runs; k++) {
        const size_t r = how == SHUFFLED ? size_t(turn[k]) : how == REVERSED ? runs - 1 - k : k;
        if (how != IN_ORDER)
            at = (at + c->unit - 1) / c->unit * c->unit;
        for (size_t i = r * c->run; i < c->count && i < (r + 1) * c->run; i++) {
            (*f)[i].*offset = at;
            at += (*f)[i].bytes;
        }
        end = at;
        if (how == SPACED || how == SHUFFLED)
            at += c->unit;
    }
    if (how == ANYWHERE)
        for (kvprim_fragment &one : *f)
            one.*offset = below((end - one.bytes) / c->unit + 1) * c->unit;
    return end;
}

/* Fragments between two buffers in the arena. */
struct placed_batch {
    std::vector<kvprim_fragment> f;
    unsigned char *dst, *src;
    uint64_t dst_bytes, src_bytes;
};

static void reserve_buffers(arena *a, placed_batch *b, size_t dst_align = 0, size_t src_align = 0)
{
    empty(a);
    b->dst = reserve<unsigned char>(a, b->dst_bytes, dst_align);
    b->src = reserve<unsigned char>(a, b->src_bytes, src_align);
}

static placed_batch place_batch(arena *a, const batch_case *c)
{
    placed_batch b;
    b.f.resize(c->count);
    for (size_t i = 0; i < c->count; i++)
        b.f[i].bytes = size_of(c, i);
    b.dst_bytes = place_side(c, c->dst, &b.f, &kvprim_fragment::dst_offset);
    b.src_bytes = place_side(c, c->src, &b.f, &kvprim_fragment::src_offset);
    reserve_buffers(a, &b, c->dst_align, c->src_align);
    return b;
}

static std::string say_batch(const batch_case *c)
{
    char what[240];
    snprintf(what, sizeof what, "%zu of %llu bytes, %s, %s <- %s, unit %llu, alignments %zu and %zu, runs of %zu",
             c->count, print_u64(c->bytes), sizes_names[c->kind], order_names[c->dst], order_names[c->src],
             print_u64(c->unit), c->dst_align, c->src_align, c->run);
    return what;
}

static void unpack_batch(arena *a, const placed_batch &b, const std::string &what)
{
    const kvprim_unpack_desc d = {b.src, b.src_bytes, b.dst, b.dst_bytes, b.f.data(), b.f.size(), 0};
    CHECK(try_unpack(a, &d, what.c_str()) == RAN);
}

static void one_batch(arena *a, const batch_case *c)
{
    unpack_batch(a, place_batch(a, c), say_batch(c));
}

static const uint64_t fragment_sizes[] = {1,   2,   8,   15,  16,   17,   48,   64,   100,  127,  128,  256,   257,
                                          383, 512, 513, 576, 1000, 1024, 1152, 1536, 2048, 2049, 4096, 10007, 65536};

/* Every size and kind, and so many variants of each. Alignments, units, runs and counts vary with them. one(n, variant,
   case) sets the orders, and runs it. */
template <class One> static void each_batch(uint64_t most_bytes, unsigned variants, const One &one)
{
    static const size_t counts[] = {1, 2, 3, 7, 33, 100, 330}, runs[] = {1, 1, 1, 2, 5};
    static const uint64_t units[] = {1, 16, 1, 256, 4};
    unsigned n = 0;
    for (const uint64_t bytes : fragment_sizes)
        for (int kind = 0; kind < n_sizes; kind++)
            for (unsigned variant = 0; variant < variants; variant++, n++) {
                const size_t count = counts[n % 7];
                const bool odd = n / 3 % 2;
                batch_case c = {count, bytes, sizes(kind), IN_ORDER, IN_ORDER, units[n / 2 % 5], 0, 0, runs[n / 4 % 5]};
                if (odd)
                    c.dst_align = n / 6 % 16, c.src_align = n / 96 % 16;
                if ((count + (kind == ONE_LARGE ? 300 : 0)) * bytes <= most_bytes)
                    one(n, variant, c);
            }
}

static void batch_matrix(arena *a, uint64_t most_bytes)
{
    each_batch(most_bytes, ANYWHERE * n_orders, [a](unsigned n, unsigned variant, batch_case c) {
        c.dst = order(variant / n_orders), c.src = order(variant % n_orders);
        if (n % unsigned(thin) == 0)
            one_batch(a, &c);
    });
}

/* More fragments than fit the parameters of a launch, or just as many. */
static void large_batches(arena *a, const size_t *counts, size_t n_counts)
{
    unsigned n = 0;
    for (size_t i = 0; i < n_counts; i++)
        for (int kind = 0; kind < n_sizes; kind++)
            for (int order_of = 0; order_of < 4; order_of++, n++) {
                static const order dst[] = {IN_ORDER, SHUFFLED, SHUFFLED, REVERSED};
                static const order src[] = {SHUFFLED, IN_ORDER, ANYWHERE, SPACED};
                const uint64_t bytes = kind == EVEN ? 64 : 40;
                const batch_case c = {counts[i], bytes,     sizes(kind), dst[order_of],  src[order_of],
                                      16,        n % 2 * 3, n % 2 * 8,   n % 3 ? 1u : 2u};
                one_batch(a, &c);
            }
}

/* One side's offsets are multiples of 16, or neither's: aligned fragments have other kernels, and small ones another. The
   uneven ones of many take as many tiles each as the longest, of which the last begins just inside it. */
static void uneven_batches(arena *a)
{
    static const struct {
        size_t count;
        uint64_t longest, less, unit, dst_step,
            src_step; /* sizes: up to `less` units less; steps: beyond the longest */
    } cases[] = {{100, 32, 0, 16, 8, 0},     {100, 32, 0, 16, 0, 8},     {100, 32, 0, 16, 16, 16},
                 {100, 512, 31, 16, 0, 0},   {100, 512, 0, 16, 0, 0},    {100, 528, 0, 16, 0, 0},
                 {2100, 1521, 300, 1, 1, 2}, {2100, 1522, 300, 1, 1, 2}, {2100, 3058, 500, 1, 1, 2},
                 {2100, 2048, 30, 16, 0, 0}, {2100, 2064, 30, 16, 0, 0}};
    for (const auto &c : cases) {
        std::vector<kvprim_fragment> f(c.count);
        const std::vector<int64_t> order = shuffled(int64_t(c.count));
        kvprim_unpack_desc d = {};
        for (size_t i = 0; i < c.count; i++) {
            f[i].bytes = c.longest - c.unit * (c.less && i % 7 ? below(c.less) : 0); /* the longest have any lead */
            f[i].dst_offset = i * (c.longest + c.dst_step);
            f[i].src_offset = uint64_t(order[i]) * (c.longest + c.src_step);
        }
        d.dst_bytes = c.count * (c.longest + c.dst_step), d.src_bytes = c.count * (c.longest + c.src_step);
        empty(a);
        d.dst = reserve(a, d.dst_bytes, 0), d.src = reserve(a, d.src_bytes, 0);
        d.fragments = f.data(), d.count = c.count;
        CHECK(try_unpack(a, &d, "fragments of one length, about") == RAN);
    }
}

/* So many empty ones at the end that a launch has no others. */
static void empty_fragments(arena *a)
{
    std::vector<kvprim_fragment> f;
    uint64_t at = 0;
    for (size_t i = 0; i < 20000; i++) {
        f.push_back({at, at, i >= 3000 ? 0 : i ? 16 * (1 + i * 7 % 64) : 100000});
        at += f[i].bytes + 16;
    }
    placed_batch b = {std::move(f), nullptr, nullptr, at, at};
    reserve_buffers(a, &b);
    unpack_batch(a, b, "a launch of empty ones");
}

/* How many launches a batch takes: fragments per launch follow from the bytes that are stored of each. */
struct launches_case {
    batch_case batch;
    unsigned launches;
};

static const launches_case launches_cases[] = {
    {{20000, 64, EVEN, IN_ORDER, IN_ORDER, 16, 0, 0, 1}, 1},         /* they all join */
    {{60000, 16, EVEN, SPACED, REVERSED, 32, 0, 0, 1}, 1},           /* nothing is stored */
    {{16000, 64, EVEN, IN_ORDER, SHUFFLED, 64, 0, 0, 1}, 1},         /* 2 bytes each */
    {{20000, 256, SHORT_LAST, IN_ORDER, SHUFFLED, 256, 0, 0, 1}, 2}, /* 2 bytes */
    {{20000, 48, EVEN, IN_ORDER, SHUFFLED, 1, 3, 0, 1}, 2},          /* 2 bytes */
    {{9000, 528, EVEN, IN_ORDER, SHUFFLED, 528, 0, 0, 1}, 1},        /* 2 bytes, aligned and not small */
    {{20000, 20, EVEN, IN_ORDER, ANYWHERE, 4, 0, 7, 1}, 2},          /* 3 bytes */
    {{8000, 128, SHORT_LAST, SHUFFLED, SHUFFLED, 128, 5, 5, 1}, 1},  /* 13 bits for either side: 4 bytes */
    {{4200, 2100, EVEN, SHUFFLED, SHUFFLED, 16, 0, 9, 1}, 1},        /* 18 bits for either side: 5 bytes */
    {{6600, 1700, EVEN, SHUFFLED, SHUFFLED, 16, 0, 9, 1}, 2},        /* 20 bits: the same */
    {{5000, 200, LOGARITHMIC, IN_ORDER, SHUFFLED, 1, 0, 0, 1}, 1},   /* 6 bytes */
    {{5000, 200, SOME_EMPTY, IN_ORDER, SHUFFLED, 2, 0, 2, 1}, 1},    /* 5 bytes */
    {{2000, 3000, LOGARITHMIC, IN_ORDER, SHUFFLED, 1, 0, 0, 1}, 1},  /* 8 bytes, 4 for tiles, and the table */
    {{5000, 3000, LOGARITHMIC, IN_ORDER, SHUFFLED, 1, 0, 0, 1}, 2},  /* 8 bytes; as many tiles each as the longest */
    {{5000, 900, ONE_LARGE, IN_ORDER, SHUFFLED, 1, 0, 0, 1}, 3},     /* 8 bytes, 4 for tiles, and the table */
    {{32, 4096, EVEN, IN_ORDER, SHUFFLED, 16, 0, 0, 1}, 1},
};

/* Fragments of one length at all 16 x 16 alignments; `vary`: the lengths differ a little. */
static placed_batch place_lengths(arena *a, size_t bytes, bool vary)
{
    const size_t slot = (bytes + 64 + 15) / 16 * 16;
    placed_batch b;
    b.src_bytes = b.dst_bytes = 256 * slot;
    for (size_t i = 0; i < 256; i++)
        b.f.push_back({(i * 7 + 3) % 256 * slot + 16 + i / 16, i * slot + 16 + i % 16, bytes + (vary ? i * 5 % 4 : 0)});
    reserve_buffers(a, &b);
    return b;
}

static std::string say_length(size_t bytes, bool vary)
{
    return std::to_string(bytes) + (vary ? " to 3 bytes more" : " bytes") + " at all alignments";
}

static void one_length(arena *a, size_t bytes, bool vary)
{
    unpack_batch(a, place_lengths(a, bytes, vary), say_length(bytes, vary));
}

/* Three fragments, the last of which is a byte longer than a tile, or lies as far as 2 bytes count. */
static void last_fragments(arena *a)
{
    const kvprim_fragment tiles[] = {{0, 1600, 1536}, {3200, 0, 1536}, {1600, 3200, 1537}};
    empty(a);
    kvprim_unpack_desc t = {};
    t.src_bytes = t.dst_bytes = 4800;
    t.dst = reserve(a, 4800, 0), t.src = reserve(a, 4800, 0);
    t.fragments = tiles, t.count = 3;
    CHECK(try_unpack(a, &t, "three fragments, the last one longer than a tile") == RAN);
    for (const uint64_t far : {65535u, 65536u, 65537u})
        for (uint64_t longer = 0; longer < 2; longer++) {
            const kvprim_fragment f[] = {{0, 200, 100}, {far, 100, 100}, {far - 200, far, 100 + longer}};
            kvprim_unpack_desc d = {};
            empty(a);
            d.src_bytes = far + 100, d.dst_bytes = far + 100 + longer;
            d.dst = reserve(a, d.dst_bytes, 0);
            d.src = reserve(a, d.src_bytes, 0);
            d.fragments = f, d.count = 3;
            CHECK(try_unpack(a, &d, "three fragments, the last one far") == RAN);
            d.count = longer ? 3 : 2, d.src_bytes = d.dst_bytes = far + 1;
            const kvprim_fragment bytes[] = {{0, 2, 1}, {1, far, 1}, {far, 0, 1}};
            d.fragments = bytes;
            CHECK(try_unpack(a, &d, "single bytes, the last one far") == RAN);
        }
}

/* One fragment, whole or in two or three pieces that join, around the sizes where another kernel takes it:
   run_one(batch, shift, text for reports). */
template <class Run> static void each_single(arena *a, const Run &run_one)
{
    const uint64_t mb = 1 << 20;
    for (const uint64_t bytes : {uint64_t(1), uint64_t(15), uint64_t(16), uint64_t(17), uint64_t(4095), uint64_t(4097),
                                 mb - 1, mb, mb + 1, 2 * mb + 4096})
        for (uint64_t pieces = 1; pieces <= 3 && pieces <= bytes; pieces++)
            for (uint64_t shift = 0; shift < 32; shift += bytes < 5000 ? 4 : 16) {
                placed_batch b;
                char what[80];
                for (uint64_t i = 0, at = 0; i < pieces; at += b.f[i++].bytes)
                    b.f.push_back({shift + at, 16 + at, i + 1 == pieces ? bytes - at : bytes / pieces});
                b.src_bytes = b.dst_bytes = bytes + 64;
                reserve_buffers(a, &b);
                snprintf(what, sizeof what, "%llu bytes in %llu pieces, %llu past an aligned address", print_u64(bytes),
                         print_u64(pieces), print_u64(shift));
                run_one(b, shift, what);
            }
}

static void single_fragments(arena *a)
{
    each_single(a, [a](const placed_batch &b, uint64_t, const char *what) { unpack_batch(a, b, what); });
}

/* A few of everything, for the options of a launch: one(n, case). */
template <class One> static void each_small_batch(const One &one)
{
    static const uint64_t sizes_of[] = {16, 100, 256, 1024, 4096, 10007};
    unsigned n = 0;
    for (const uint64_t bytes : sizes_of)
        for (int kind = 0; kind < n_sizes; kind++, n++) {
            const size_t count = bytes < 1000 ? 2500 : 150, align = n % 3 == 2 ? n % 16 : 0;
            one(n, batch_case{count, bytes, sizes(kind), n % 2 ? SHUFFLED : IN_ORDER, SHUFFLED, 16, align, 0, 1});
        }
}

static void small_batches(arena *a)
{
    single_fragments(a);
    each_small_batch([a](unsigned, const batch_case &c) { one_batch(a, &c); });
}

/* ---- random descriptors ---- */

static uint64_t random_offset(uint64_t limit)
{
    return chance(60) ? uint64_t(wild_value()) : below(limit + 1);
}

static outcome random_unpack(arena *a, unsigned round)
{
    const uint64_t room = below(20) == 0 ? 40 : 1 + below(30000), even = below(2) ? 1 + below(600) : 0;
    std::vector<kvprim_fragment> f;
    kvprim_unpack_desc d = {};
    empty(a);
    d.dst_bytes = d.src_bytes = room;
    d.dst = reserve(a, room, below(64));
    d.src = reserve(a, room, below(64));
    uint64_t dst = below(20);
    const uint64_t count = below(60), unit = below(2) ? 16 : 1, wild_round = below(8);
    while (f.size() < count) {
        kvprim_fragment one = {0, dst, even ? even : below(chance(8) ? 5000 : 200)};
        if (one.bytes > room || dst > room - one.bytes)
            break;
        one.src_offset = random_offset((room - one.bytes) / unit) * unit;
        if (!f.empty() && chance(3) && f.back().src_offset + f.back().bytes + one.bytes <= room)
            one.src_offset = f.back().src_offset + f.back().bytes;
        if (wild_round == 0 && chance(30))
            one.bytes = random_offset(room);
        dst += one.bytes + (chance(3) ? below(40) * unit : 0);
        f.push_back(one);
    }
    if (chance(3))
        for (size_t i = f.size(); i > 1; i--)
            std::swap(f[i - 1], f[below(i)]);
    d.fragments = f.data();
    d.count = f.size();
    if (chance(50))
        d.src_bytes = random_offset(room);
    if (chance(50))
        d.dst_bytes = random_offset(room);
    char what[40];
    snprintf(what, sizeof what, "random batch %u", round);
    return try_unpack(a, &d, what);
}

/* ---- offsets past 4 GiB ---- */

static const uint64_t far_bytes = (uint64_t(5) << 30) + 4096; /* of each side */

struct far_case {
    size_t count;
    uint64_t bytes, unit; /* what all offsets are multiples of */
    bool vary;            /* every third fragment is a byte longer */
};

/* Offsets of the first are stored in 4 bytes each, those of the second in 8. The next ones need several launches. The
   last one is cut. */
static const far_case far_cases[] = {{300, 1000, 16, false}, {300, 1000, 1, false}, {300, 1000, 16, true},
                                     {9000, 100, 4, false},  {9000, 100, 1, true},  {2, uint64_t(5) << 29, 1, true}};

static std::vector<kvprim_fragment> far_fragments(const far_case *c)
{
    std::vector<kvprim_fragment> f(c->count);
    const uint64_t slot = far_bytes / c->count / 16 * 16;
    const std::vector<int64_t> turn = shuffled(int64_t(c->count));
    for (size_t i = 0; i < c->count; i++) {
        const uint64_t room = slot - c->bytes - 1;
        f[i].src_offset = (uint64_t(turn[i]) * slot + below(room)) / c->unit * c->unit;
        f[i].dst_offset = (i * slot + below(room)) / c->unit * c->unit;
        f[i].bytes = c->bytes + (c->vary && i % 3 == 0);
    }
    return f;
}

static void unpack_far(const far_case *c, const std::vector<kvprim_fragment> &f, void *dst, const void *src,
                       const kvprim_cuda_launch *launch)
{
    const kvprim_unpack_desc d = {src, far_bytes, dst, far_bytes, f.data(), f.size(), 0};
    snprintf(current, sizeof current, "unpack: %zu fragments of %llu bytes in 5 GiB, unit %llu", c->count,
             print_u64(c->bytes), print_u64(c->unit));
    if (kvprim_cuda_unpack(&d, launch) != KVPRIM_OK)
        fail("%s: %s", current, kvprim_last_error());
}

#endif /* TEST_FRAGMENTS_H */

/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for kvprim_cuda_copy. They copy lists in the memory of
   test_rows.h, once by kvprim_copy and once on the GPU, and compare every byte. Include it after test_fragments.h. */
#ifndef GPU_TEST_COPIES_H
#define GPU_TEST_COPIES_H

using copy_items = std::vector<kvprim_copy_item>;

/* ---- one list, by the host function and by the code under test ---- */

static bool visit_copies(arena *a, const copy_items &items)
{
    for (const kvprim_copy_item &c : items)
        if (!visit_bytes(a, c.src, c.dst, c.bytes))
            return false;
    return true;
}

/* Without KVPRIM_DEBUG the code under test takes this for the check of all items. */
static bool survey_takes(const kvprim_copy_desc *d)
{
    kvpc_unpack_job job;
    job.list = kvpc_list_of(d), job.zeros = false;
    kvpc_survey(&job, false);
    return job.fit && job.apart;
}

/* As try_move. The code under test gets copies of the descriptor and the items, which are overwritten before it can
   have run. */
static outcome try_copy(arena *a, const copy_items &items, const char *what, int64_t reserved = 0)
{
    const kvprim_copy_desc desc = {items.data(), items.size(), reserved};
    copy_items moved_items = items;
    uint64_t bytes = 0;
    for (kvprim_copy_item &c : moved_items) {
        c.src = on_device(a, c.src), c.dst = on_device(a, c.dst);
        bytes |= c.bytes;
    }
    kvprim_copy_desc on = {moved_items.data(), moved_items.size(), reserved};
    snprintf(current, sizeof current, "copy: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_copy_check(&on);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && !items.empty();
    if (!items.empty() && !reserved && want_text.find("in dst") == std::string::npos)
        CHECK(!survey_takes(&on) || want == KVPRIM_OK);
    start_visit(a);
    if (runs && (kvprim_copy_check(&desc) != KVPRIM_OK || !visit_copies(a, items)))
        return OUTSIDE;
    return run_both(
        a, want, want_text, runs && bytes, [&] { return kvprim_copy(&desc); },
        [&] {
            const kvprim_status got = kvprim_cuda_copy(&on, a->launch);
            if (is_asked())
                return got;
            if (!moved_items.empty())
                memset(static_cast<void *>(moved_items.data()), 0xff, moved_items.size() * sizeof moved_items[0]);
            memset(static_cast<void *>(&on), 0xff, sizeof on);
            return got;
        });
}

/* ---- lists ---- */

enum zeros_of { NO_ZEROS, SOME_ZEROS, ALL_ZEROS, n_zeros };

/* The fragments of a batch, as copies; SOME_ZEROS: about every third one has no source. */
static void copy_batch(arena *a, const placed_batch &b, zeros_of zeros, const std::string &what)
{
    copy_items items;
    for (const kvprim_fragment &f : b.f)
        items.push_back({zeros == ALL_ZEROS || (zeros == SOME_ZEROS && chance(3)) ? nullptr : b.src + f.src_offset,
                         b.dst + f.dst_offset, f.bytes});
    CHECK(try_copy(a, items, (what + ", zeros " + std::to_string(zeros)).c_str()) == RAN);
}

static void one_copy_batch(arena *a, const batch_case *c, zeros_of zeros)
{
    copy_batch(a, place_batch(a, c), zeros, say_batch(c));
}

static void copy_matrix(arena *a, uint64_t most_bytes)
{
    each_batch(most_bytes, 4 * n_zeros, [a](unsigned, unsigned variant, batch_case c) {
        c.dst = variant % 2 ? SHUFFLED : IN_ORDER, c.src = variant / 2 % 2 ? ANYWHERE : IN_ORDER;
        one_copy_batch(a, &c, zeros_of(variant / 4));
    });
}

static void one_copy_length(arena *a, size_t bytes, bool vary)
{
    copy_batch(a, place_lengths(a, bytes, vary), vary ? SOME_ZEROS : NO_ZEROS, say_length(bytes, vary));
}

/* Blocks of memory in turn for sources and destinations, as of many tensors: all copies lie between others. */
static void scattered_copies(arena *a, size_t count, uint64_t most, bool aligned, zeros_of zeros)
{
    copy_items items;
    char what[80];
    empty(a);
    for (size_t i = 0; i < count; i++) {
        const uint64_t bytes = aligned ? 16 * (1 + below(most / 16)) : 1 + below(most);
        void *const src = reserve(a, bytes, aligned ? 0 : below(16)), *const dst =
                                                                          reserve(a, bytes, aligned ? 0 : below(16));
        const void *const from = i && chance(5) ? items[below(i)].src : src; /* which may be shorter, and NULL */
        const bool none = zeros == ALL_ZEROS || (zeros == SOME_ZEROS && chance(3));
        items.push_back({none ? nullptr : from == src ? src : nullptr, dst, bytes});
        if (!none && from != src && from)
            items.back().src = from, items.back().bytes = 1 + below(16);
    }
    for (size_t i = count; i > 1; i--)
        std::swap(items[i - 1], items[below(i)]);
    snprintf(what, sizeof what, "%zu scattered ones up to %llu bytes, aligned %d, zeros %d", count, print_u64(most),
             aligned, zeros);
    CHECK(try_copy(a, items, what) == RAN);
}

static void scattered_lists(arena *a)
{
    for (const bool aligned : {true, false})
        for (int zeros = 0; zeros < n_zeros; zeros++)
            for (const size_t count : {1u, 5u, 100u, 1100u, 3000u})
                scattered_copies(a, count, count > 100 ? 300 : 3000, aligned, zeros_of(zeros));
}

/* One copy, or zeros past an aligned address. */
static void single_copies(arena *a)
{
    each_single(a, [a](placed_batch b, uint64_t shift, const char *what) {
        copy_batch(a, b, NO_ZEROS, what);
        b.dst += shift;
        copy_batch(a, b, ALL_ZEROS, what);
    });
}

static void small_copies(arena *a)
{
    each_small_batch([a](unsigned n, const batch_case &c) { one_copy_batch(a, &c, zeros_of(n % n_zeros)); });
    scattered_copies(a, 1500, 400, false, SOME_ZEROS);
}

/* More items than fit the parameters of a launch: 8 bytes each, and with uneven sizes more. */
static void many_copies(arena *a)
{
    for (const size_t count : {4200u, 9000u})
        for (int kind = 0; kind < n_sizes; kind++)
            for (int zeros = 0; zeros < n_zeros; zeros++) {
                const batch_case c = {count,
                                      kind == EVEN ? 64u : 40u,
                                      sizes(kind),
                                      SHUFFLED,
                                      SHUFFLED,
                                      kind == EVEN ? 16u : 1u,
                                      size_t(kind == EVEN ? 0 : 3),
                                      0,
                                      1};
                one_copy_batch(a, &c, zeros_of(zeros));
            }
}

/* Items without bytes, whatever their pointers. */
static void empty_copies(arena *a)
{
    void *const top = reinterpret_cast<void *>(UINTPTR_MAX);
    empty(a);
    unsigned char *const dst = reserve<unsigned char>(a, 300, 1);
    unsigned char *const src = reserve<unsigned char>(a, 300, 2);
    CHECK(try_copy(a, {}, "no items") == RAN);
    CHECK(try_copy(a, {{nullptr, nullptr, 0}, {dst, dst, 0}}, "empty items") == RAN);
    CHECK(try_copy(a, {{top, top, 0}}, "an empty item at the top") == RAN);
    CHECK(try_copy(a, {{src, dst, 100}, {nullptr, nullptr, 0}, {src + 50, dst + 100, 70}}, "NULL and empty") == RAN);
    CHECK(try_copy(a, {{src, dst, 100}, {top, top, 0}, {nullptr, dst + 100, 70}}, "the top and empty") == RAN);
    CHECK(try_copy(a, {{src, dst, 100}, {nullptr, dst + 100, 0}, {src + 100, dst + 100, 70}}, "no zeros") == RAN);
}

/* ---- random lists ---- */

/* A wild number stands in the way now and then. */
static outcome random_copy(arena *a, unsigned round)
{
    const uint64_t room = below(20) == 0 ? 40 : 1 + below(20000), even = below(2) ? 1 + below(600) : 0;
    unsigned char *block[4];
    copy_items items;
    empty(a);
    for (unsigned char *&b : block)
        b = reserve<unsigned char>(a, room, below(64));
    uint64_t dst = below(20);
    const uint64_t count = below(60), unit = below(2) ? 16 : 1, wild_round = below(6), half = below(count + 1);
    while (items.size() < count) {
        const uint64_t bytes = even ? even : below(chance(8) ? 5000 : 200);
        if (items.size() == half)
            dst = below(20);
        if (bytes > room || dst > room - bytes)
            break;
        const uint64_t src = below((room - bytes) / unit + 1) * unit;
        kvprim_copy_item one = {block[1 + 2 * below(2)] + src, block[items.size() < half ? 0 : 2] + dst, bytes};
        if (chance(5))
            one.src = nullptr;
        else if (!items.empty() && items.back().src && chance(3))
            one.src =
                reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(items.back().src) + items.back().bytes);
        if (wild_round == 0 && chance(30))
            one.bytes = random_offset(room);
        if (wild_round == 1 && chance(30))
            one.dst = chance(2)
                          ? nullptr
                          : reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(one.dst) + random_offset(3 * room));
        if (wild_round == 2 && chance(30))
            one.src = reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(block[0]) + random_offset(3 * room));
        dst += bytes + (chance(3) ? below(40) * unit : 0);
        items.push_back(one);
    }
    if (chance(3))
        for (size_t i = items.size(); i > 1; i--)
            std::swap(items[i - 1], items[below(i)]);
    char what[40];
    snprintf(what, sizeof what, "random list %u", round);
    return try_copy(a, items, what, chance(40));
}

#endif /* GPU_TEST_COPIES_H */

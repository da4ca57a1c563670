/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for kvprim_cuda_unpack_meta. They unpack in the memory of
   test_rows.h, where the descriptors and their count lie, too, once by kvprim_unpack_meta and once on the GPU, and
   compare every byte. Include it after test_fragments.h. */
#ifndef TEST_META_H
#define TEST_META_H

static bool meta_is_inside(const kvprim_unpack_meta_desc *d, const kvprim_unpack_meta_item &m)
{
    return m.src_offset <= d->src_bytes && m.bytes <= d->src_bytes - m.src_offset && m.dst_offset <= d->dst_bytes &&
           m.bytes <= d->dst_bytes - m.dst_offset;
}

/* Allows access to what the contract names. Returns false if destinations overlap: then their bytes are unspecified. */
static bool visit_meta(arena *a, const kvprim_unpack_meta_desc *d)
{
    const uint64_t n = *d->count < d->max_count ? *d->count : d->max_count;
    name_buffer(a, d->dst, d->dst_bytes);
    a->allowed.push_back({offset_of(a, d->meta), d->max_count * sizeof *d->meta});
    a->allowed.push_back({offset_of(a, d->count), sizeof *d->count});
    if (d->rejected)
        a->allowed.push_back({offset_of(a, d->rejected), sizeof *d->rejected});
    for (uint64_t i = 0; i < n; i++) {
        const kvprim_unpack_meta_item m = d->meta[i];
        if (meta_is_inside(d, m) && !visit_bytes(a, static_cast<const char *>(d->src) + m.src_offset,
                                                 static_cast<char *>(d->dst) + m.dst_offset, m.bytes))
            return false;
    }
    return true;
}

/* As try_move. The code under test gets a copy of the descriptor, which is overwritten before it can have run. */
static outcome try_meta(arena *a, const kvprim_unpack_meta_desc *desc, const char *what)
{
    kvprim_unpack_meta_desc on = *desc;
    on.dst = on_device(a, desc->dst), on.src = on_device(a, desc->src);
    on.meta = on_device(a, desc->meta), on.count = on_device(a, desc->count);
    on.rejected = on_device(a, desc->rejected);
    snprintf(current, sizeof current, "unpack_meta: %s", what);
    (void)kvprim_fail(KVPRIM_OK, "-");
    const kvprim_status want = kvprim_unpack_meta_check(&on);
    const std::string want_text = kvprim_last_error();
    const bool runs = want == KVPRIM_OK && desc->max_count > 0;
    start_visit(a);
    if (runs && !visit_meta(a, desc))
        return OUTSIDE;
    return run_both(
        a, want, want_text, runs, [&] { return kvprim_unpack_meta(desc); },
        [&] {
            kvprim_unpack_meta_desc copy = on; /* it may be called twice: see sampled.h */
            const kvprim_status got = kvprim_cuda_unpack_meta(&copy, a->launch);
            memset(&copy, 0xff, sizeof copy);
            return got;
        });
}

/* ---- batches ---- */

/* What the kernel reads, and descriptors of a batch's fragments. */
static kvprim_unpack_meta_desc place_metas(arena *a, const placed_batch &b, uint64_t max_count, uint64_t given)
{
    kvprim_unpack_meta_desc d = {b.src, b.src_bytes, b.dst, b.dst_bytes, nullptr, nullptr, max_count, nullptr, 0};
    d.rejected = chance(3) ? nullptr : reserve_counter(a);
    auto *const meta = reserve<kvprim_unpack_meta_item>(a, max_count * sizeof *d.meta, 16 * below(4));
    uint64_t *const count = reserve<uint64_t>(a, sizeof *count, 8 * below(8));
    for (size_t i = 0; i < b.f.size() && i < max_count; i++)
        meta[i] = {uint32_t(b.f[i].src_offset), uint32_t(b.f[i].bytes), b.f[i].dst_offset};
    *count = given;
    d.meta = meta, d.count = count;
    return d;
}

/* `given`: what *count says; of the descriptors past the batch's, up to max_count, nothing may be moved. */
static void one_meta_batch(arena *a, const batch_case *c, uint64_t max_count, uint64_t given, uint64_t bad_every)
{
    const kvprim_unpack_meta_desc d = place_metas(a, place_batch(a, c), max_count, given);
    kvprim_unpack_meta_item *const meta = const_cast<kvprim_unpack_meta_item *>(d.meta);
    for (uint64_t i = 0; i < max_count && bad_every; i++)
        if (below(bad_every) == 0) /* past an end by one byte, by far, or by a sum that wraps around */
            switch (below(5)) {
            case 0:
                meta[i].dst_offset = d.dst_bytes - meta[i].bytes + 1;
                break;
            case 1:
                meta[i].src_offset = uint32_t(d.src_bytes - meta[i].bytes + 1);
                break;
            case 2:
                meta[i].dst_offset = 0 - uint64_t(meta[i].bytes);
                break;
            case 3:
                meta[i].bytes = UINT32_MAX - uint32_t(below(20));
                break;
            default:
                meta[i].src_offset = uint32_t(0 - meta[i].bytes);
            }
    const std::string limits = ", max " + std::to_string(max_count) + ", count " + std::to_string(given);
    CHECK(try_meta(a, &d, (say_batch(c) + limits).c_str()) == RAN);
}

/* What is past a batch's descriptors varies, too. */
static void meta_matrix(arena *a, uint64_t most_bytes)
{
    each_batch(most_bytes, 4, [a](unsigned n, unsigned variant, batch_case c) {
        c.dst = variant % 2 ? SHUFFLED : IN_ORDER, c.src = variant / 2 ? ANYWHERE : IN_ORDER;
        one_meta_batch(a, &c, c.count + (n % 3 == 2 ? n % 50 : 0), c.count, 0);
    });
}

static void one_meta_length(arena *a, size_t bytes, bool vary)
{
    const kvprim_unpack_meta_desc d = place_metas(a, place_lengths(a, bytes, vary), 256, 256);
    CHECK(try_meta(a, &d, say_length(bytes, vary).c_str()) == RAN);
}

static void meta_lengths(arena *a, size_t step)
{
    for (size_t bytes = 0; bytes < 800; bytes += 1 + below(step))
        one_meta_length(a, bytes, bytes % 2);
    for (const size_t bytes : {1535, 1536, 1537, 2047, 2048, 2049, 3071, 4096, 6130, 8192})
        one_meta_length(a, bytes, bytes % 2);
}

/* Counts below, at and past the limit, also absurd ones, and descriptors that reach outside. */
static void meta_counts(arena *a)
{
    static const uint64_t counts_of[] = {0, 1, 31, 32, 33, 255, 256, 257, 600};
    for (const uint64_t count : counts_of)
        for (const uint64_t max : {uint64_t(1), uint64_t(32), uint64_t(40), uint64_t(256), uint64_t(300)}) {
            const size_t real = size_t(count < max ? count : max);
            const batch_case c = {real ? real : 1, 16 + below(3000), LOGARITHMIC, SHUFFLED, SHUFFLED, 1, 3, 5, 1};
            one_meta_batch(a, &c, max, count, 0);
            one_meta_batch(a, &c, max, count, 3);
        }
    for (const uint64_t count : {UINT64_MAX, uint64_t(1) << 32, (uint64_t(1) << 31) + 9, uint64_t(INT32_MAX) + 10}) {
        const batch_case c = {10, 700, EVEN, SHUFFLED, SHUFFLED, 1, 3, 5, 1};
        one_meta_batch(a, &c, 10, count, 4);
    }
}

static void random_meta(arena *a)
{
    const size_t count = 1 + size_t(below(chance(4) ? 700 : 60));
    const uint64_t bytes = 1 + below(uint64_t(1) << below(12));
    const batch_case c = {count,
                          bytes,
                          sizes(count * bytes < 1 << 16 ? below(n_sizes) : below(LOGARITHMIC)),
                          order(below(ANYWHERE)),
                          order(below(n_orders)),
                          uint64_t(1) << below(9),
                          chance(2) ? 0 : below(64),
                          chance(2) ? 0 : below(64),
                          1 + below(4)};
    const uint64_t max = chance(2) ? count : count + below(100);
    one_meta_batch(a, &c, max,
                   chance(6)   ? max + below(1000)
                   : chance(6) ? below(count + 1)
                               : count,
                   chance(3) ? 1 + below(10) : 0);
}

/* Few, and several ranges of them. */
static void small_metas(arena *a)
{
    for (const size_t count : {40, 1200, 3000}) {
        const batch_case c = {count, 120, count == 40 ? ONE_LARGE : LOGARITHMIC, SHUFFLED, SHUFFLED, 1, 1, 2, 1};
        one_meta_batch(a, &c, count + 5, count, 100);
    }
}

#endif /* TEST_META_H */

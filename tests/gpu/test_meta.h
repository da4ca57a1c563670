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
    a->tables.push_back(
        {"dst", 0, kvprim_table_resolve(table_of(d->dst, 1), int64_t(d->dst_bytes)), int64_t(d->dst_bytes)});
    a->allowed.push_back({offset_of(a, d->meta), d->max_count * sizeof *d->meta});
    a->allowed.push_back({offset_of(a, d->count), sizeof *d->count});
    if (d->rejected)
        a->allowed.push_back({offset_of(a, d->rejected), sizeof *d->rejected});
    for (uint64_t i = 0; i < n; i++) {
        const kvprim_unpack_meta_item m = d->meta[i];
        if (!meta_is_inside(d, m) || m.bytes == 0)
            continue;
        const size_t src = offset_of(a, d->src) + m.src_offset, dst = offset_of(a, d->dst) + m.dst_offset;
        if (memchr(&a->taken[dst], 1, m.bytes))
            return false;
        memset(&a->taken[dst], 1, m.bytes);
        a->allowed.push_back({dst, m.bytes});
        a->allowed.push_back({src / 16 * 16, (src + m.bytes + 15) / 16 * 16 - src / 16 * 16});
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

/* `given`: what *count says; of the descriptors past the batch's, up to max_count, nothing may be moved. */
static void one_meta_batch(arena *a, const batch_case *c, uint64_t max_count, uint64_t given, uint64_t bad_every)
{
    std::vector<kvprim_fragment> f(c->count);
    kvprim_unpack_meta_desc d = {};
    char what[300];
    for (size_t i = 0; i < c->count; i++)
        f[i].bytes = size_of(c, i);
    d.dst_bytes = place_side(c, c->dst, &f, &kvprim_fragment::dst_offset);
    d.src_bytes = place_side(c, c->src, &f, &kvprim_fragment::src_offset);
    d.max_count = max_count;
    empty(a);
    d.dst = reserve(a, d.dst_bytes, c->dst_align);
    d.src = reserve(a, d.src_bytes, c->src_align);
    d.rejected = chance(3) ? nullptr : reserve_counter(a);
    kvprim_unpack_meta_item *const meta =
        static_cast<kvprim_unpack_meta_item *>(reserve(a, max_count * sizeof *meta, 16 * below(4)));
    uint64_t *const count = static_cast<uint64_t *>(reserve(a, sizeof *count, 8 * below(8)));
    for (size_t i = 0; i < c->count && i < max_count; i++)
        meta[i] = {uint32_t(f[i].src_offset), uint32_t(f[i].bytes), f[i].dst_offset};
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
    *count = given;
    d.meta = meta, d.count = count;
    snprintf(what, sizeof what,
             "%zu of %llu bytes, %s, %s <- %s, unit %llu, alignments %zu and %zu, max %llu, count %llu", c->count,
             static_cast<unsigned long long>(c->bytes), sizes_names[c->kind], order_names[c->dst], order_names[c->src],
             static_cast<unsigned long long>(c->unit), c->dst_align, c->src_align,
             static_cast<unsigned long long>(max_count), static_cast<unsigned long long>(given));
    CHECK(try_meta(a, &d, what) == RAN);
}

/* Every size and kind; orders, alignments, counts and what is past them vary. */
static void meta_matrix(arena *a, uint64_t most_bytes)
{
    static const size_t counts_of[] = {1, 2, 33, 7, 100, 330, 32};
    static const uint64_t units[] = {1, 16, 256, 4};
    unsigned n = 0;
    for (const uint64_t bytes : fragment_sizes)
        for (int kind = 0; kind < n_sizes; kind++)
            for (int order_of = 0; order_of < 4; order_of++, n++) {
                const size_t count = counts_of[n % 7];
                if ((count + (kind == ONE_LARGE ? 300 : 0)) * bytes > most_bytes)
                    continue;
                const bool odd = n / 3 % 2;
                const batch_case c = {count,
                                      bytes,
                                      static_cast<sizes>(kind),
                                      order_of % 2 ? SHUFFLED : IN_ORDER,
                                      order_of / 2 ? ANYWHERE : IN_ORDER,
                                      units[n % 4],
                                      odd ? n / 6 % 16 : 0,
                                      odd ? n / 96 % 16 : 0,
                                      1};
                one_meta_batch(a, &c, count + (n % 3 == 2 ? n % 50 : 0), count, 0);
            }
}

/* Fragments of one length at all 16 x 16 alignments; in every other round the lengths differ a little. */
static void one_meta_length(arena *a, size_t bytes, bool vary)
{
    const size_t slot = (bytes + 64 + 15) / 16 * 16;
    kvprim_unpack_meta_desc d = {};
    char what[80];
    empty(a);
    d.dst = reserve(a, 256 * slot, 0), d.dst_bytes = 256 * slot;
    d.src = reserve(a, 256 * slot, 0), d.src_bytes = 256 * slot;
    kvprim_unpack_meta_item *const meta = static_cast<kvprim_unpack_meta_item *>(reserve(a, 256 * sizeof *meta, 0));
    uint64_t *const count = static_cast<uint64_t *>(reserve(a, sizeof *count, 0));
    for (uint32_t i = 0; i < 256; i++)
        meta[i] = {uint32_t(i * slot + i / 16), uint32_t(bytes + (vary ? below(17) : 0)), (255 - i) * slot + i % 16};
    *count = d.max_count = 256;
    d.meta = meta, d.count = count;
    snprintf(what, sizeof what, "%zu bytes%s at all alignments", bytes, vary ? " or up to 16 more" : "");
    CHECK(try_meta(a, &d, what) == RAN);
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
                          static_cast<sizes>(count * bytes < 1 << 16 ? below(n_sizes) : below(LOGARITHMIC)),
                          static_cast<order>(below(ANYWHERE)),
                          static_cast<order>(below(n_orders)),
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

/* SPDX-License-Identifier: MIT */
/* kvprim_copy, and which lists of copies and fragments overlap. Part of test_kvprim.c. */
#ifndef TEST_COPIES_H
#define TEST_COPIES_H

static kvprim_copy_desc copies_of(const kvprim_copy_item *items, size_t count)
{
    return (kvprim_copy_desc){.items = items, .count = count};
}

/* ---- bytes ---- */

/* What must be there after a list of copies: each destination has what its source had before. */
static void expect_copies(const kvprim_copy_item *items, size_t count, const unsigned char *block,
                          const unsigned char *before, unsigned char *want)
{
    for (size_t i = 0; i < count; i++) {
        const unsigned char *const src = items[i].src, *const dst = items[i].dst;
        for (uint64_t k = 0; k < items[i].bytes; k++)
            want[dst + k - block] = src ? before[src + k - block] : 0;
    }
}

/* Sources anywhere in the first half of a buffer, repeated and in any order, to places in the second half. Every other
   list has no zeros, and is unpacked as fragments, too. */
static void test_copies(void)
{
    enum { half = 60000, n = 80 };
    unsigned char *const block = allocate(2 * half), *const before = allocate(2 * half);
    unsigned char *const want = allocate(2 * half);
    for (int round = 0; round < 200; round++) {
        kvprim_copy_item items[n];
        size_t at = half + (size_t)below(16);
        fill(block, 2 * half);
        memcpy(before, block, 2 * half);
        memcpy(want, block, 2 * half);
        for (int i = 0; i < n; i++) {
            const size_t bytes = (size_t)below(i % 20 ? 300 : 6000);
            const unsigned char *const src = i % 7 == 3 ? items[i - 1].src : block + below(half - 6000);
            items[i] = (kvprim_copy_item){round % 2 || below(5) ? src : NULL, block + at, bytes};
            at += bytes + (size_t)(below(3) * below(2));
        }
        for (size_t i = n; i > 1; i--) {
            const size_t j = (size_t)below(i);
            const kvprim_copy_item item = items[j];
            items[j] = items[i - 1], items[i - 1] = item;
        }
        const kvprim_copy_desc d = copies_of(items, n);
        expect_copies(items, n, block, before, want);
        CHECK(at <= 2 * half && kvprim_copy(&d) == KVPRIM_OK);
        CHECK(memcmp(block, want, 2 * half) == 0);
        if (round % 2 == 0)
            continue;
        kvprim_fragment f[n];
        for (int i = 0; i < n; i++)
            f[i] = fragment_of((uint64_t)((const unsigned char *)items[i].src - block),
                               (uint64_t)((unsigned char *)items[i].dst - block - half), items[i].bytes);
        const kvprim_unpack_desc u = {
            .src = block, .src_bytes = half, .dst = block + half, .dst_bytes = half, .fragments = f, .count = n};
        memcpy(block, before, 2 * half);
        CHECK(kvprim_unpack(&u) == KVPRIM_OK && memcmp(block, want, 2 * half) == 0);
    }
    free(block);
    free(before);
    free(want);
}

/* Every size up to 300 bytes, at all alignments of both sides, each copy in blocks of its own. */
static void test_copies_aligned(void)
{
    enum { guard = 32, most = 300 };
    for (size_t bytes = 0; bytes <= most; bytes += every)
        for (size_t shifts = 0; shifts < 256; shifts++) {
            unsigned char src[most + 2 * guard], dst[most + 2 * guard], want[most + 2 * guard];
            unsigned char *const to = dst + guard + shifts % 16;
            fill(src, sizeof src);
            fill(dst, sizeof dst);
            memcpy(want, dst, sizeof dst);
            const kvprim_copy_item item = {shifts % 5 == 2 ? NULL : src + shifts / 16, to, bytes};
            const kvprim_copy_desc d = copies_of(&item, 1);
            for (size_t k = 0; k < bytes; k++)
                want[to - dst + (ptrdiff_t)k] = item.src ? src[shifts / 16 + k] : 0;
            if (kvprim_copy(&d) != KVPRIM_OK || memcmp(dst, want, sizeof dst) != 0)
                fail("%zu bytes, shifts %zu: %s", bytes, shifts, kvprim_last_error());
        }
}

/* The descriptor itself may be a destination, and two halves of a buffer may swap places with others. */
static void test_copies_over_descriptor(void)
{
    kvprim_copy_desc src, dst;
    fill(&src, sizeof src);
    const kvprim_copy_item items[2] = {{&src, &dst, sizeof src / 2},
                                       {(char *)&src + sizeof src / 2, (char *)&dst + sizeof src / 2, sizeof src / 2}};
    dst = copies_of(items, 2);
    CHECK(kvprim_copy(&dst) == KVPRIM_OK);
    CHECK(memcmp(&dst, &src, sizeof dst) == 0);
}

/* What is no error: nothing to copy from and to anywhere, the last address, and neighbours. */
static void test_good_copies(void)
{
    unsigned char block[64] = {0}, dst[8];
    void *const last = (void *)(uintptr_t)UINTPTR_MAX;
    const kvprim_copy_item empty[] = {{NULL, NULL, 0},         {last, last, 0}, {block, block, 0},
                                      {block, block + 32, 32}, {NULL, dst, 8},  {block + 33, block + 40, 0}};
    kvprim_copy_desc d = copies_of(empty, LENGTH(empty));
    (void)kvprim_fail(KVPRIM_OK, "-");
    block[5] = 5, dst[7] = 7;
    CHECK(kvprim_copy(&d) == KVPRIM_OK && block[37] == 5 && dst[7] == 0);
    const kvprim_copy_item ends = {block, (void *)(uintptr_t)(UINTPTR_MAX - 7), 8};
    d = copies_of(&ends, 1);
    CHECK(kvprim_copy_check(&d) == KVPRIM_OK);
#ifdef KVPRIM_DEBUG
    const kvprim_copy_item twice[] = {{block, dst, 4}, {block, dst + 4, 4}, {NULL, dst + 3, 1}};
    d = copies_of(twice, 3);
    CHECK_ERROR(kvprim_copy(&d), KVPRIM_ERROR_OVERLAP, "kvprim_copy: items[0] and items[2] overlap in dst");
    d.count = 2;
    CHECK(kvprim_copy(&d) == KVPRIM_OK);
#endif
    CHECK(strcmp(kvprim_last_error(), "-") == 0 || strstr(kvprim_last_error(), "in dst"));
}

/* ---- which lists overlap ---- */

static int bytes_meet(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes)
{
    return a_bytes && b_bytes && a < b + b_bytes && b < a + a_bytes;
}

static uint64_t address_of(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

static int item_meets(const kvprim_copy_item *to, const kvprim_copy_item *from)
{
    return from->src && bytes_meet(address_of(to->dst), to->bytes, address_of(from->src), from->bytes);
}

enum { overlap_items = 9000 };

/* Each with each: 1 if a destination shares a byte with a source, 2 if only with another destination. Half of the time
   of all tests was spent here, so items without bytes or source are sorted out before, and the rest are plain arrays. */
static int overlap_of(const kvprim_copy_item *items, size_t n)
{
    static uint64_t dst[overlap_items], dst_end[overlap_items], src[overlap_items], src_end[overlap_items];
    size_t written = 0, read = 0;
    int twice = 0;
    for (size_t i = 0; i < n; i++) {
        if (items[i].bytes == 0)
            continue;
        dst[written] = address_of(items[i].dst), dst_end[written++] = address_of(items[i].dst) + items[i].bytes;
        if (items[i].src)
            src[read] = address_of(items[i].src), src_end[read++] = address_of(items[i].src) + items[i].bytes;
    }
    for (size_t i = 0; i < written; i++) {
        const uint64_t begin = dst[i], end = dst_end[i];
        int once = 0;
        for (size_t j = 0; j < read; j++)
            once |= (begin < src_end[j]) & (src[j] < end);
        if (once)
            return 1;
        for (size_t j = i + 1; j < written; j++)
            twice |= (begin < dst_end[j]) & (dst[j] < end);
    }
    return twice ? 2 : 0;
}

/* The status is as `want`, and the two items that an error names overlap. */
static void check_overlap(kvprim_status status, const kvprim_copy_item *items, size_t n, int want, const char *what)
{
#ifdef KVPRIM_DEBUG
    const int refuses_twice = 1; /* destinations that overlap are refused */
#else
    const int refuses_twice = 0;
#endif
    const kvprim_status expected = want == 1 || (want && refuses_twice) ? KVPRIM_ERROR_OVERLAP : KVPRIM_OK;
    unsigned long long dst = 0, src = 0;
    if (status != expected) {
        fail("%s of %zu: status %d, not %d (%s)", what, n, (int)status, (int)expected, kvprim_last_error());
        return;
    }
    if (want == 0 || (want == 2 && status == KVPRIM_OK))
        return;
    const char *const d = strchr(kvprim_last_error(), '['), *const s = d ? strchr(d + 1, '[') : NULL;
    CHECK(s && sscanf(d, "[%llu]", &dst) == 1 && sscanf(s, "[%llu]", &src) == 1 && dst < n && src < n);
    const int both_dst = strstr(kvprim_last_error(), " overlap in dst") != NULL;
    CHECK(both_dst || (strstr(kvprim_last_error(), ": dst of ") && strstr(kvprim_last_error(), " overlaps src of ")));
    CHECK(both_dst ? dst != src && refuses_twice : want == 1);
    if (dst < n && src < n &&
        !(both_dst
              ? bytes_meet(address_of(items[dst].dst), items[dst].bytes, address_of(items[src].dst), items[src].bytes)
              : item_meets(&items[dst], &items[src])))
        fail("%s: these do not overlap: %s", what, kvprim_last_error());
}

static unsigned unpacks_checked;

/* As copies, and as fragments of one buffer. Nothing is copied: there is no memory at these addresses. Returns what
   overlap_of does. */
static int one_overlap(const kvprim_copy_item *items, size_t n, const char *what)
{
    const kvprim_copy_desc d = copies_of(items, n);
    const int want = overlap_of(items, n);
    kvprim_fragment *const fragments = allocate(n * sizeof *fragments);
    const uint64_t base = 4096;
    int zeros = 0;
    check_overlap(kvprim_copy_check(&d), items, n, want, what);
    for (size_t i = 0; i < n; i++) {
        fragments[i] =
            (kvprim_fragment){address_of(items[i].src) - base, address_of(items[i].dst) - base, items[i].bytes};
        zeros |= !items[i].src;
    }
    void *const buffer = (void *)(uintptr_t)base;
    const uint64_t bytes = (uint64_t)1 << (UINTPTR_MAX > UINT32_MAX ? 45 : 27); /* the fragments lie past them */
    const kvprim_unpack_desc u = {
        .src = buffer, .src_bytes = bytes, .dst = buffer, .dst_bytes = bytes, .fragments = fragments, .count = n};
    if (!zeros && address_of(fragments) > base + bytes) {
        check_overlap(kvprim_unpack_check(&u), items, n, want, what);
        unpacks_checked++;
    }
    free(fragments);
    return want;
}

/* Addresses of a few hundred bytes, of which about every other list overlaps. */
static void test_small_overlaps(void)
{
    for (unsigned round = 0; round < 20000 / every; round++) {
        kvprim_copy_item items[12];
        const size_t n = 1 + (size_t)below(LENGTH(items));
        const uint64_t room = 20 + below(500), most = 1 + below(20), apart = below(4) ? 0 : below(room);
        for (size_t i = 0; i < n; i++) {
            const uint64_t src = 5000 + below(room), dst = 5000 + apart + below(room);
            items[i] =
                (kvprim_copy_item){below(12) ? (void *)(uintptr_t)src : NULL, (void *)(uintptr_t)dst, below(most + 1)};
        }
        one_overlap(items, n, "small list");
    }
}

/* Neighbours without a byte in common, of which each is a destination, or the source of some; shuffled. `clusters`:
   they lie far apart in so many places. `one`: all sources are the same one, and some destinations are its neighbours.
   Every other time one item is a byte longer than there is room for, or all but one have the same start. */
static size_t make_neighbours(kvprim_copy_item *items, size_t n, unsigned clusters, int one)
{
    const int high = UINTPTR_MAX > UINT32_MAX ? 36 : 18;
    uint64_t at = 0, src = 1 << 16;
    for (size_t i = 0; i < n; i++) {
        const uint64_t bytes = 1 + below(1 + 30 * (i % 3)), cluster = (1 << 16) + ((uint64_t)(i % clusters) << high);
        if (i < clusters || i % 5 == 0 || below(2)) {
            src = one && i ? src : cluster + at;
            items[i].dst = (void *)(uintptr_t)(cluster + at + bytes);
            at += 2 * bytes;
        } else { /* the source of the one before, again */
            items[i].dst = (void *)(uintptr_t)(cluster + at);
            at += bytes;
        }
        items[i].src = one || below(9) ? (void *)(uintptr_t)src : NULL;
        items[i].bytes = one && src != cluster + at - 2 * bytes ? 1 : i && items[i].src == items[i - 1].src ? 1 : bytes;
    }
    for (size_t i = n; i > 1; i--) {
        const size_t j = (size_t)below(i);
        const kvprim_copy_item item = items[j];
        items[j] = items[i - 1], items[i - 1] = item;
    }
    return n;
}

/* More than are sorted at a time. */
static void test_large_overlaps(void)
{
    static kvprim_copy_item items[overlap_items];
    static const size_t sizes[] = {1000, 1024, 1025, 2048, 3000, 5000, 9000};
    int refused = 0, taken = 0;
    for (unsigned round = 0; round < 84 / every; round++) {
        static const unsigned clusters[] = {1, 2, 3, 200};
        const size_t n = make_neighbours(items, sizes[round % 7], clusters[round % 4], round % 3 == 2);
        const size_t odd = (size_t)below(n);
        if (round % 2)
            items[odd].bytes += 1 + below(3);
        *(one_overlap(items, n, "large list") == 1 ? &refused : &taken) += 1;
    }
    CHECK(refused > 10 / (int)every && taken > 10 / (int)every);
    /* A program that is not position-independent lies inside the buffers that the unpacks name. */
    CHECK(unpacks_checked > 1000 / every || address_of(items) >> 30 == 0);
    for (size_t i = 0; i < LENGTH(items); i++) /* thousands that start at one address, on either side */
        items[i] = (kvprim_copy_item){(void *)(uintptr_t)(1 << 20), (void *)(uintptr_t)(i % 2 ? 1 << 19 : 1 << 21), 7};
    const kvprim_copy_desc d = copies_of(items, LENGTH(items));
    items[7].dst = (void *)(uintptr_t)((1 << 20) + 7);
    check_overlap(kvprim_copy_check(&d), items, LENGTH(items), 2, "one source");
    items[7].dst = (void *)(uintptr_t)((1 << 20) + 6);
    check_overlap(kvprim_copy_check(&d), items, LENGTH(items), 1, "one source");
    items[7].dst = (void *)(uintptr_t)(1 << 20);
    check_overlap(kvprim_copy_check(&d), items, LENGTH(items), 1, "one source");
}

/* Addresses and sizes that are multiples of some number, as those of pages. */
static void test_page_overlaps(void)
{
    static const uint64_t pages[] = {1, 16, 48, 4096, 65536};
    kvprim_copy_item items[600];
    for (unsigned round = 0; round < 6000 / every; round++) {
        const size_t n =
            make_neighbours(items, round % 20 ? 256 : 250 + (size_t)below(350), 1 + round % 2, round % 7 == 6);
        const uint64_t page = pages[round % LENGTH(pages)];
        if (UINTPTR_MAX == UINT32_MAX && page > 16)
            continue;
        for (size_t i = 0; i < n; i++) {
            items[i].src = (void *)(uintptr_t)(address_of(items[i].src) % (1 << 30) * page);
            items[i].dst = (void *)(uintptr_t)(address_of(items[i].dst) % (1 << 30) * page);
            items[i].bytes *= page;
        }
        if (round % 3 == 1)
            items[below(n)].bytes += page * (1 + below(3));
        if (round % 3 == 2)
            items[below(n)].dst = (char *)items[below(n)].dst - 1;
        one_overlap(items, n, "pages");
    }
}

/* 2^18 pages, and one less or more, of which the first and the last one are destinations or both. */
static void test_page_ranges(void)
{
    const uint64_t base = 1 << 24, largest = UINTPTR_MAX > UINT32_MAX ? 4096 : 64;
    kvprim_copy_item items[300];
    for (uint64_t page = 1; page <= largest; page *= 64)
        for (uint64_t pages = (1 << 18) - 2; pages <= (1 << 18) + 2; pages++)
            for (int both = 0; both < 3; both++) {
                const uint64_t last = base + page * pages;
                for (size_t i = 0; i < LENGTH(items); i++) /* sources in between */
                    items[i] = (kvprim_copy_item){(void *)(uintptr_t)(base + page * (1 + i)),
                                                  (void *)(uintptr_t)(base - page * (1 + i)), page};
                items[0].dst = (void *)(uintptr_t)base;
                items[7].dst = (void *)(uintptr_t)last;
                items[8].src = (void *)(uintptr_t)(last + page);
                items[9].src = (void *)(uintptr_t)(both == 1 ? last : both == 2 ? base : last + page);
                one_overlap(items, LENGTH(items), "2^18 pages");
            }
}

/* Buffers of one list that lie in one block without a common byte. */
static void test_unpack_in_place(void)
{
    unsigned char block[5 << 10], want[5 << 10];
    fill(block, sizeof block);
    memcpy(want, block, sizeof block);
    kvprim_fragment f[2] = {{0, 2 << 10, 1 << 10}, {3 << 10, 4 << 10, 1 << 10}};
    const kvprim_unpack_desc d = {
        .src = block, .src_bytes = sizeof block, .dst = block, .dst_bytes = sizeof block, .fragments = f, .count = 2};
    memcpy(want + (2 << 10), want, 1 << 10);
    memcpy(want + (4 << 10), want + (3 << 10), 1 << 10);
    CHECK(kvprim_unpack(&d) == KVPRIM_OK && memcmp(block, want, sizeof block) == 0);
    f[1].src_offset--;
    CHECK_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "kvprim_unpack: dst of fragments[0] (");
    CHECK_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_OVERLAP, "1024 bytes) overlaps src of fragments[1] (");
    CHECK(memcmp(block, want, sizeof block) == 0);
    f[1] = (kvprim_fragment){UINT64_MAX, 0, 8};
    CHECK_ERROR(kvprim_unpack(&d), KVPRIM_ERROR_BOUNDS, "fragments[1]");
}

/* As many as a call takes, in no order, of which each lies between others. */
static void test_most_copies(void)
{
    const size_t n = every > 1 ? KVPRIM_MAX_COPIES / 16 : KVPRIM_MAX_COPIES;
    kvprim_copy_item *const items = allocate(n * sizeof *items);
    const kvprim_copy_desc d = copies_of(items, n);
    for (size_t i = 0; i < n; i++) { /* an odd factor makes a permutation of 2 n places of 64 bytes */
        const uint64_t src = 2 * i * 0x9e3779b1u % (2 * n), dst = (2 * i + 1) * 0x9e3779b1u % (2 * n);
        items[i] = (kvprim_copy_item){(void *)(uintptr_t)((1 << 16) + 64 * src),
                                      (void *)(uintptr_t)((1 << 16) + 64 * dst), 64};
    }
    CHECK(kvprim_copy_check(&d) == KVPRIM_OK);
    items[n / 3].bytes = 65;
    check_overlap(kvprim_copy_check(&d), items, n, 1, "most copies");
    free(items);
}

/* As many, in crowds of more than the check can sort at a time. Stragglers make each crowd look wide, so that the check
   passes over the list at every level of recursion. It may take as long as 1,500 checks of 2^18 items that lie apart:
   1 s where such an item takes 2.5 ns. */
static void test_crowded_copies(void)
{
    enum { crowd = 5000, levels = UINTPTR_MAX > UINT32_MAX ? 4 : 1, plain = 1 << 18 };
    const size_t n = every > 1 ? KVPRIM_MAX_COPIES / 16 : KVPRIM_MAX_COPIES, most = n > plain ? n : plain;
    kvprim_copy_item *const items = allocate(most * sizeof *items);
    kvprim_copy_desc d = copies_of(items, plain);
    clock_t quickest = 0;
    for (size_t i = 0; i < most; i++)
        items[i] = (kvprim_copy_item){(void *)(uintptr_t)(1 << 20), (void *)(uintptr_t)((2 << 20) + i), 1};
    for (int round = 0; round < 10; round++) {
        const clock_t start = clock();
        CHECK(kvprim_copy_check(&d) == KVPRIM_OK);
        const clock_t took = clock() - start;
        quickest = round == 0 || took < quickest ? took : quickest;
    }
    const uintptr_t gap = (UINTPTR_MAX >> 1) / (n / crowd + 1);
    for (size_t i = 0; i < n; i++) { /* destinations, in the same order, follow the sources of their crowd */
        const size_t k = i % crowd;
        const uintptr_t src = 4096 + gap * (i / crowd) + (k < levels ? gap >> (2 + 12 * k) : k);
        items[i] = (kvprim_copy_item){(void *)src, (void *)(src + gap / 2), 1};
    }
    d.count = n;
    const clock_t start = clock();
    CHECK(kvprim_copy_check(&d) == KVPRIM_OK);
    const clock_t took = clock() - start;
    if (took > 1500 * (quickest > 0 ? quickest : 1))
        fail("crowded copies take %g s, and those that lie apart %g s", (double)took / CLOCKS_PER_SEC,
             (double)quickest / CLOCKS_PER_SEC);
    free(items);
}

#endif

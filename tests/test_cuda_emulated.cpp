/* SPDX-License-Identifier: MIT */
/* Runs the kernels of kvprim_cuda.cuh thread by thread on the CPU, without a GPU or CUDA. With AddressSanitizer
   all bytes that a contract does not name are out of bounds.

       c++ -std=c++17 -O2 -g -fsanitize=address,undefined -I. tests/test_cuda_emulated.cpp && ./a.out

   With the argument `all` it runs three times as many cases. */
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_DEBUG
#include "cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../kvprim_cuda.cuh"
#include "test_rows.h"
#include "test_transfers.h"
#include "test_fragments.h"
#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif

#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

static void say_where()
{
    fprintf(stderr, "in %s\n", current);
}
#else
#define ASAN_POISON_MEMORY_REGION(p, bytes) ((void)(p), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(p, bytes) ((void)(p), (void)(bytes))
#endif

/* ---- memory ---- */

static arena memory;
static unsigned launches_before;

static void before(arena *a)
{
    launches_before = kvprim_emulate_launches;
    kvprim_emulate_last_first = !kvprim_emulate_last_first; /* the order must not matter */
    ASAN_POISON_MEMORY_REGION(a->got, a->used);
}

static void allow(arena *a, size_t offset, size_t bytes)
{
    ASAN_UNPOISON_MEMORY_REGION(a->got + offset, bytes);
}

static void after(arena *a, bool enqueued)
{
    ASAN_UNPOISON_MEMORY_REGION(a->got, a->used);
    if ((kvprim_emulate_launches != launches_before) != enqueued)
        fail("%s: %u kernels were launched", current, kvprim_emulate_launches - launches_before);
    if (enqueued && a->launch && a->launch->max_sms > 0 && gridDim.x > static_cast<unsigned>(a->launch->max_sms))
        fail("%s: %u blocks, max_sms is %d", current, gridDim.x, a->launch->max_sms);
}

static void before_source(arena *)
{
}

static unsigned char *source_of(const arena *a)
{
    return a->device;
}

static void after_source(arena *)
{
}

static unsigned char *allocate(size_t bytes)
{
    unsigned char *const p = static_cast<unsigned char *>(malloc(bytes + 64));
    if (!p) {
        printf("FAIL out of memory\n0 passed, 1 failed, 0 skipped\n");
        exit(1);
    }
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
}

/* ---- tests ---- */

static void test_gather()
{
    gather_matrix(&memory);
}

static void test_store()
{
    store_matrix(&memory);
}

static void test_counts()
{
    static const int64_t counts[] = {1, 2, 7, 8, 31, 32, 33, 127, 128, 129, 1000, 2048, 2049, 4096, 4097, 20000};
    count_matrix(&memory, 1 << 21, counts, sizeof counts / sizeof *counts);
}

static void test_max_sms()
{
    kvprim_cuda_launch launch = {};
    memory.launch = &launch;
    for (launch.max_sms = 0; launch.max_sms <= 5; launch.max_sms++) {
        launch.pdl = launch.max_sms % 2;
        small_matrix(&memory);
        small_transfers(&memory);
    }
    memory.launch = nullptr;
}

static void test_uses()
{
    vocabulary_shard(&memory);
    padding_alone(&memory);
}

static void test_refused()
{
    bad_gathers(&memory);
    bad_stores(&memory);
    bad_transfers(&memory);
    bad_launches(&memory);
    bad_moves(&memory);
}

static void test_transfer()
{
    transfer_matrix(&memory);
    transfer_counts(&memory, 4 << 20);
}

/* A launch takes at least as many layers as the header says. */
static void test_layers()
{
    layer_matrix(&memory);
    for (const int32_t layers : {1, 128, 216, 217, 433}) {
        std::vector<unsigned char> dst(433), src(433);
        kvprim_transfer_desc d = {};
        d.dst = table_of(dst.data(), 1);
        d.src = table_of(src.data(), 1);
        d.row_bytes = d.count = 1;
        d.layers = layers;
        fill(src.data(), src.size());
        const unsigned before_it = kvprim_emulate_launches;
        CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK);
        CHECK(kvprim_emulate_launches - before_it <= static_cast<unsigned>(layers + 215) / 216);
        CHECK(memcmp(dst.data(), src.data(), static_cast<size_t>(layers)) == 0);
    }
}

static void test_moves()
{
    kvprim_cuda_launch launch = {};
    usual_moves(&memory);
    random_moves(&memory, 200);
    repointed_moves(&memory);
    memory.launch = &launch;
    for (launch.max_sms = 1; launch.max_sms <= 5; launch.max_sms += 4)
        random_moves(&memory, 40);
    memory.launch = nullptr;
}

static void test_copies_on_write()
{
    copies_on_write(&memory);
}

static void test_fuzzed_transfer()
{
    fuzz(&memory, 6000, random_transfer);
}

static void test_fuzzed_gather()
{
    fuzz(&memory, 6000, random_gather);
}

static void test_fuzzed_store()
{
    fuzz(&memory, 6000, random_store);
}

/* Of exactly this size, rounded up to lines: the sanitizer sees what lies beyond. */
static void *lend(size_t bytes)
{
    static unsigned char *block;
    free(block);
    block = static_cast<unsigned char *>(malloc(bytes));
    return block;
}

static void test_unpack()
{
    batch_matrix(&memory, 700000);
}

static void test_unpack_lengths()
{
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes += bytes < 300 ? 1 : 61)
        one_length(&memory, bytes, bytes % 2 != 0);
}

static void test_unpack_counts()
{
    static const size_t counts[] = {243, 244, 1023, 2100};
    large_batches(&memory, counts, sizeof counts / sizeof *counts);
}

static unsigned launches_of(batch_case c, bool workspace)
{
    const unsigned first = kvprim_emulate_launches;
    c.workspace = workspace;
    one_batch(&memory, &c);
    return kvprim_emulate_launches - first;
}

static void test_unpack_workspace()
{
    for (const batch_case &c : lent_cases) {
        CHECK(launches_of(c, true) == 1);
        CHECK(launches_of(c, false) > 1);
    }
}

static void test_unpack_options()
{
    kvprim_cuda_launch launch = {};
    memory.launch = &launch;
    for (launch.max_sms = 0; launch.max_sms <= 3; launch.max_sms++) {
        launch.pdl = launch.max_sms % 2;
        small_batches(&memory);
    }
    memory.launch = nullptr;
}

static void test_bad_unpacks()
{
    bad_unpacks(&memory);
}

static void test_random_unpacks()
{
    fuzz(&memory, 6000, random_unpack);
}

static void one_warp_length(unsigned char *src, unsigned char *got, unsigned char *want, size_t bytes, bool zero)
{
    const size_t slot = warp_slot(bytes), all = warp_alignments * slot;
    const warp_cases c = {got, src, slot, bytes, zero};
    fill(want, all);
    memcpy(got, want, all);
    expect_warps(want, src, bytes, zero);
    snprintf(current, sizeof current, "warp %s of %zu bytes", zero ? "zeros" : "copy", bytes);
    ASAN_POISON_MEMORY_REGION(got, all);
    ASAN_POISON_MEMORY_REGION(src, all);
    for (size_t w = 0; w < warp_alignments && bytes > 0; w++) {
        ASAN_UNPOISON_MEMORY_REGION(got + w * slot + 16 + w % 16, bytes);
        if (!zero)
            ASAN_UNPOISON_MEMORY_REGION(src + w * slot + 16, (w / 16 + bytes + 15) / 16 * 16);
    }
    kvprim_emulate_last_first = !kvprim_emulate_last_first;
    kvprim_emulate_launch(move_by_warps, dim3(warp_alignments * 32 / warp_threads), warp_threads, c);
    ASAN_UNPOISON_MEMORY_REGION(got, all);
    ASAN_UNPOISON_MEMORY_REGION(src, all);
    compare_warps(got, want, bytes, zero);
}

/* Runs all pairs of alignments, all short lengths and some longer ones. */
static void test_warps()
{
    const size_t most = warp_alignments * warp_slot(longest_warp_copy);
    unsigned char *const src = memory.expected + most;
    fill(src, most);
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes += bytes < 300 ? 1 : 61) {
        one_warp_length(src, memory.got, memory.expected, bytes, false);
        one_warp_length(src, memory.got, memory.expected, bytes, true);
    }
}

/* Launches of one unpack that may overlap: one that lets the next begin early has a next, which ends after it. */
static std::vector<kvpc_unpack> noted;

template <uint32_t capacity> static void kvprim_emulate_note(const kvpc_unpack_params<capacity> &p)
{
    noted.push_back(p.head);
}

static void one_chain(size_t count, bool empty, int32_t pdl)
{
    std::vector<kvprim_fragment> f;
    for (size_t i = 0; i < count; i++) /* steps that differ: nothing merges, and the sizes are uneven */
        f.push_back({2 * i, i, empty ? 0u : 1u});
    f.push_back({2 * count + 100, count + 7, 100000});
    const uint64_t src_bytes = 2 * count + 100 + 100000, dst_bytes = count + 7 + 100000;
    std::vector<unsigned char> src(src_bytes + 16); /* whole words are read */
    std::vector<unsigned char> got(dst_bytes, 0xee), want(dst_bytes, 0xee);
    fill(src.data(), src_bytes);
    kvprim_unpack_desc d = {};
    d.src = src.data(), d.src_bytes = src_bytes, d.dst_bytes = dst_bytes;
    d.fragments = f.data(), d.count = f.size();
    kvprim_cuda_launch launch = {};
    launch.pdl = pdl;
    d.dst = want.data();
    CHECK(kvprim_unpack(&d) == KVPRIM_OK);
    d.dst = got.data();
    noted.clear();
    CHECK(kvprim_cuda_unpack(&d, &launch) == KVPRIM_OK);
    CHECK(got == want);
    CHECK(noted.size() > 1);
    for (size_t k = 0; k < noted.size(); k++) {
        const bool last = k + 1 == noted.size();
        CHECK(noted[k].wait == (k == 0 ? pdl : 0));
        CHECK(noted[k].wait_last == (k > 0));
        CHECK(noted[k].trigger == (last ? pdl : 1));
    }
}

static void test_chains_of_launches()
{
    kvprim_emulate_pdl = true;
    for (int32_t pdl = 0; pdl < 2; pdl++) {
        one_chain(5000, false, pdl);
        one_chain(5000, true, pdl); /* a whole launch of empty fragments */
    }
    kvprim_emulate_pdl = false;
}

/* Fragments of so many pieces each, and the table of them, in as much memory as kvpc_words_for gives it. */
static void one_table(const std::vector<uint32_t> &pieces, uint32_t each)
{
    const uint32_t count = static_cast<uint32_t>(pieces.size());
    const size_t room = pieces.size() * each + pieces.size() / kvpc_table_share + 2;
    uint32_t *const words = static_cast<uint32_t *>(malloc(room * sizeof *words));
    kvpc_unpack h = {};
    h.count = count;
    for (uint32_t i = 0; words && i < count; h.pieces += pieces[i++])
        words[i * each + 3] = h.pieces;
    kvpc_encode_table(&h, words, each);
    const uint32_t places = static_cast<uint32_t>((h.pieces + (uint64_t(1) << h.table_shift) - 1) >> h.table_shift);
    CHECK(h.table == count * each && h.table + places < room && words[h.table + places] == count - 1);
    for (uint32_t k = 0, i = 0; k < places; k++) {
        while (i + 1 < count && words[(i + 1) * each + 3] <= k << h.table_shift)
            i++;
        if (words[h.table + k] != i)
            fail("table of %u fragments, %u pieces: word %u is %u, not %u", count, h.pieces, k, words[h.table + k], i);
    }
    free(words);
}

/* Empty fragments at every place; as many pieces as there may be. */
static void test_unpack_tables()
{
    const uint32_t most = kvpc_most_pieces - 1;
    for (const uint32_t each : {4u, 6u}) {
        for (uint32_t bits = 0; bits < 1 << 17; bits++) {
            std::vector<uint32_t> pieces(1 + bits % 17);
            for (size_t i = 0; i < pieces.size(); i++)
                pieces[i] = (bits >> i & 1) * (1 + bits % 3 * 40);
            one_table(pieces, each);
        }
        for (unsigned n = 0; n < 2000; n++) {
            std::vector<uint32_t> pieces(1 + below(n % 20 ? 60 : 5000));
            for (uint32_t &p : pieces)
                p = n % 4 == 0 ? most / static_cast<uint32_t>(pieces.size()) : chance(3) ? 0 : uint32_t(below(200));
            pieces[below(pieces.size())] += n % 8 == 0 ? 1u << 23 : 0; /* the last one may go beyond */
            one_table(pieces, each);
        }
    }
}

#if !defined(_WIN32)
/* The table lies in memory that is reserved but hardly touched. */
static void one_large_table(int64_t row_bytes, void (*move)(const large_move *, int64_t))
{
    const size_t bytes = static_cast<size_t>(large_rows * row_bytes);
    void *const table =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED) {
        snprintf(skip_reason, sizeof skip_reason, "%zu bytes of addresses cannot be reserved", bytes);
        return;
    }
    alignas(16) unsigned char input[large_count * large_row_most], output[large_count * large_row_most];
    int64_t slots[large_count];
    uint32_t rejected = 0;
    fill(input, sizeof input);
    memset(output, 0, sizeof output);
    memcpy(slots, large_slots, sizeof slots);
    const large_move m = {static_cast<unsigned char *>(table), input, output, slots, &rejected};
    move(&m, row_bytes);
    CHECK(rejected == 2 * large_past);
    for (int i = 0; i < large_count; i++)
        check_large_row(i, row_bytes, input, output,
                        in_large_table(i) ? m.table + large_slots[i] * row_bytes : nullptr);
    munmap(table, bytes);
}

static void test_large_table()
{
    for (const int64_t row_bytes : {3, 16}) {
        one_large_table(row_bytes, large_store_and_gather);
        one_large_table(row_bytes, large_transfers);
    }
}

static unsigned char *reserve_addresses(uint64_t bytes)
{
    void *const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED)
        return static_cast<unsigned char *>(p);
    snprintf(skip_reason, sizeof skip_reason, "%llu bytes of addresses cannot be reserved",
             static_cast<unsigned long long>(bytes));
    return nullptr;
}

/* Takes more than 2^32 threads, of which only the last block runs. All indices are 0. */
static void one_long_gather(int64_t row_bytes)
{
    const int64_t count = (int64_t(1) << 29) + 1;
    const uint64_t dst_bytes = static_cast<uint64_t>(count * row_bytes), index_bytes = static_cast<uint64_t>(count) * 4;
    unsigned char *const dst = reserve_addresses(dst_bytes), *const index = reserve_addresses(index_bytes);
    if (!dst || !index)
        return;
    alignas(16) unsigned char row[16];
    fill(row, sizeof row);
    kvprim_gather_desc d = {};
    d.dst.data = dst, d.dst.rows = count;
    d.src.data = row, d.src.rows = 1;
    d.row_bytes = row_bytes, d.index = index, d.index_type = KVPRIM_I32, d.count = count;
    kvprim_emulate_last_only = true;
    CHECK(kvprim_cuda_gather(&d, nullptr) == KVPRIM_OK);
    kvprim_emulate_last_only = false;
    CHECK(memcmp(dst + (count - 1) * row_bytes, row, static_cast<size_t>(row_bytes)) == 0);
    munmap(dst, dst_bytes);
    munmap(index, index_bytes);
}

static void test_long_gathers()
{
    one_long_gather(4);
    one_long_gather(16);
}

/* The bytes around a fragment are zero before and after. */
static void one_far_batch(const far_case *c, bool workspace)
{
    const std::vector<kvprim_fragment> f = far_fragments(c);
    unsigned char *const src = reserve_addresses(far_bytes), *const dst = reserve_addresses(far_bytes);
    if (!src || !dst)
        return;
    for (const kvprim_fragment &one : f)
        fill(src + one.src_offset, one.bytes);
    unpack_far(c, f, dst, src, workspace, nullptr);
    for (const kvprim_fragment &one : f)
        if (memcmp(dst + one.dst_offset, src + one.src_offset, one.bytes) != 0 || dst[one.dst_offset + one.bytes] ||
            (one.dst_offset && dst[one.dst_offset - 1]))
            fail("%s: fragment %zu is wrong", current, static_cast<size_t>(&one - f.data()));
    munmap(src, far_bytes);
    munmap(dst, far_bytes);
}

static void test_far_fragments()
{
    for (const far_case &c : far_cases)
        if (c.bytes < 1 << 20) { /* longer ones are for a GPU */
            one_far_batch(&c, false);
            one_far_batch(&c, true);
        }
}
#endif

int main(int argc, char **argv)
{
#ifdef WITH_ASAN
    __sanitizer_set_death_callback(say_where);
#else
    printf("built without AddressSanitizer: accesses out of bounds that change nothing go unseen\n");
#endif
    const bool all = argc == 2 && strcmp(argv[1], "all") == 0;
    if (argc > 2 || (argc == 2 && !all)) {
        fprintf(stderr, "usage: %s [all]\n", argv[0]);
        return 2;
    }
    thin = all ? 1 : 3;
    memory.capacity = 24 << 20;
    memory.expected = allocate(memory.capacity);
    memory.got = memory.device = allocate(memory.capacity);
    run("emulated: gather, sizes x layouts, sizes x alignments", test_gather);
    run("emulated: store, sizes x layouts, sizes x alignments", test_store);
    run("emulated: counts", test_counts);
    run("emulated: max_sms, pdl", test_max_sms);
    run("emulated: vocabulary shard, padding alone", test_uses);
    run("emulated: bad descriptors", test_refused);
    run("emulated: random gathers", test_fuzzed_gather);
    run("emulated: random stores", test_fuzzed_store);
    run("emulated: transfer, sizes x layouts, sizes x alignments, counts", test_transfer);
    run("emulated: transfer, layers", test_layers);
    run("emulated: transfer inside one cache", test_copies_on_write);
    run("emulated: several moves at once", test_moves);
    run("emulated: random transfers", test_fuzzed_transfer);
    run("emulated: unpack, sizes x kinds x orders", test_unpack);
    run("emulated: unpack, lengths x alignments", test_unpack_lengths);
    run("emulated: unpack, counts, with and without a workspace", test_unpack_counts);
    run("emulated: unpack, one launch with a workspace", test_unpack_workspace);
    run("emulated: unpack, max_sms, pdl", test_unpack_options);
    run("emulated: unpack, bad descriptors", test_bad_unpacks);
    run("emulated: random unpacks", test_random_unpacks);
    run("emulated: warp copy and zero", test_warps);
    run("emulated: unpack, tables of uneven batches", test_unpack_tables);
    run("emulated: unpack, chains of launches", test_chains_of_launches);
#if !defined(_WIN32)
    run("emulated: past 4 GiB and 2^31", test_large_table);
    run("emulated: past 2^32 threads", test_long_gathers);
    run("emulated: unpack, offsets past 4 GiB", test_far_fragments);
#endif
    return finish();
}

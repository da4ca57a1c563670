/* SPDX-License-Identifier: MIT */
/* Runs the kernels of kvprim_cuda.cuh thread by thread on the CPU, without a GPU or CUDA. With AddressSanitizer
   all bytes that a contract does not name are out of bounds.

       c++ -std=c++17 -O2 -g -fsanitize=address,undefined -I. tests/gpu/test_cuda_emulated.cpp && ./a.out

   The argument `quick` runs about a fifth of the cases, but every test; `all` runs three times as many. */
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_DEBUG
#include <algorithm>
#include "cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
static bool quick;

#include "test_rows.h"
#include "test_transfers.h"
#include "test_fragments.h"
#include "test_slots.h"
#include "test_layouts.h"
#include "test_copies.h"
#include "test_meta.h"
#include "test_convert.h"
#include "test_choice.h"
#include "test_refusals.h"
#include "test_shared.h"
#include "test_fetch.h"
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

static unsigned enqueued_before, launches_before;

static unsigned enqueued()
{
    return kvprim_emulate_launches + kvprim_emulate_copies;
}

/* What the last call launched, a letter for each launch. */
static std::string letters;

static void check_launches(const char *wanted)
{
    if (letters != wanted)
        fail("%s: launches %s, not %s", current, letters.c_str(), wanted);
}

static bool moved_apart; /* blocks of their own have stored K and V whose scales are given */

/* Checks the launch bounds of the kernels of plain rows. */
static void check_block()
{
    if (blockDim.x > kvpc_most_threads)
        fail("%s: %u threads in a block", current, blockDim.x);
}

static void kvprim_emulate_note(const kvpc_convert &p)
{
    moved_apart = moved_apart || p.apart;
    letters += p.route[1].octet ? 'H' : 'C';
    check_block();
}

static void kvprim_emulate_note(const kvpc_convert_tiles &)
{
    letters += 'T';
    check_block();
    if (blockDim.x % 32)
        fail("%s: a block of %u threads, whose shuffles take whole warps", current, blockDim.x);
}

static void kvprim_emulate_note(const kvpc_conversion &)
{
    letters += 'G';
}

template <uint32_t most_tasks> static void kvprim_emulate_note(const kvpc_batch<most_tasks> &)
{
    letters += 'B';
}

template <uint32_t bytes> static void kvprim_emulate_note(const kvpc_listed<bytes> &)
{
    letters += 'L';
}

static void kvprim_emulate_note(const kvpc_lines &)
{
    letters += 'R';
}

/* When kernels of plain rows have let the next one start: by kvpc_dependence. */
static bool triggers[3];

static void kvprim_emulate_note(const kvpc_plain &p)
{
    letters += 'P';
    triggers[p.pdl] = true;
    check_block();
}

static void before(arena *a)
{
    letters.clear();
    enqueued_before = enqueued();
    launches_before = kvprim_emulate_launches;
    kvprim_emulate_last_first = !kvprim_emulate_last_first; /* the order must not matter */
    ASAN_POISON_MEMORY_REGION(a->got, a->used);
}

static void allow(arena *a, size_t offset, size_t bytes)
{
    ASAN_UNPOISON_MEMORY_REGION(a->got + offset, bytes);
}

static void after(arena *a, bool enqueues)
{
    ASAN_UNPOISON_MEMORY_REGION(a->got, a->used);
    if ((enqueued() != enqueued_before) != enqueues)
        fail("%s: %u kernels and copies were enqueued", current, enqueued() - enqueued_before);
    if (kvprim_emulate_launches != launches_before && a->launch && a->launch->max_sms > 0 &&
        gridDim.x > unsigned(a->launch->max_sms))
        fail("%s: %u blocks, max_sms is %d", current, gridDim.x, a->launch->max_sms);
}

/* Returns memory that begins at a multiple of 64, for free(). */
static unsigned char *allocate_aligned(size_t bytes)
{
    void *const p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) {
        fail("out of memory: %zu bytes", bytes);
        exit(1);
    }
    return static_cast<unsigned char *>(p);
}

static void to_device(size_t)
{
}

static void from_device(size_t)
{
}

static void layout_run_over_link(const layout_case *which, layout_call *c, uint8_t *got)
{
    kvprim_emulate_link = true;
    layout_run_on_gpu(which, c, got);
    kvprim_emulate_link = false;
}

template <class Params> static void launch_threads(void (*kernel)(Params), int64_t threads, const Params &params)
{
    kvprim_emulate_launch(kernel, dim3(unsigned((threads + 127) / 128)), 128, params);
}

/* ---- tests ---- */

/* Whether a kernel was launched. */
template <class Kernel> static bool ran(Kernel *kernel)
{
    return kvprim_emulate_kernels.count(reinterpret_cast<void (*)()>(kernel)) != 0;
}

/* If a launch is a dependent one, its threads wait for the kernel before, and touch no memory until then. */
static void with_options(void (*test)(arena *))
{
    kvprim_cuda_launch launch = {};
    memory.launch = &launch;
    kvprim_emulate_pdl = true;
    for (const int32_t max_sms : {0, 1, 2, 5})
        for (const int32_t pdl : {1, 0}) {
            const unsigned early = kvprim_emulate_early, waits = kvprim_emulate_waits;
            if (quick && max_sms != (pdl ? 0 : 5))
                continue;
            launch.max_sms = max_sms, launch.pdl = pdl;
            test(&memory);
            CHECK(kvprim_emulate_waits != waits || !pdl);
            if (test != small_copies) /* of which some take two launches: the second one waits at its end */
                CHECK(kvprim_emulate_early == early);
        }
    kvprim_emulate_pdl = false;
    memory.launch = nullptr;
}

static void test_kernels()
{
    kernel_matrix(&memory);
}

/* Returns a transfer of packed rows, the destination's `gap` bytes apart. */
static kvprim_transfer_desc plain_transfer(unsigned char *dst, const unsigned char *src, int64_t row_bytes,
                                           int64_t count, int32_t layers, int64_t gap)
{
    kvprim_transfer_desc d = transfer_of(table_of(dst, count, row_bytes + gap),
                                         table_of(const_cast<unsigned char *>(src), count), row_bytes, count);
    d.layers = layers;
    return d;
}

/* Which transfers over the link to the host the copy engine takes, and how many blocks the others have: 0 if any. */
static void link_choices()
{
    static const struct {
        int64_t row_bytes, count;
        int32_t layers;
        int64_t gap;
        bool indexed, captured;
        unsigned copies, blocks[2]; /* to the GPU; to the host */
    } cases[] = {
        {65536, 1, 1, 0, false, false, 1, {}},     {65520, 1, 1, 0, false, false, 0, {16, 16}},
        {4096, 16, 1, 0, false, false, 1, {}},     {65536, 1, 2, 0, false, false, 0, {4, 4}},
        {65536, 1, 3, 0, false, false, 0, {4, 4}}, {65536, 32, 2, 0, false, false, 2, {}},
        {512, 256, 1, 16, false, false, 1, {}},    {496, 256, 1, 16, false, false, 0, {8, 8}},
        {65536, 2, 1, 0, true, false, 0, {4, 4}},  {65536, 31, 1, 0, false, true, 0, {4, 4}},
        {65536, 32, 1, 0, false, true, 1, {}},     {65536, 32, 1, 64, false, true, 1, {}},
        {1000, 100, 1, 0, true, false, 0, {8, 8}}, {4096, 64, 1, 0, true, false, 0, {8, 5}},
    };
    static int32_t index[256];
    const size_t room = 5 << 20;
    std::vector<unsigned char> to(room), from(room);
    unsigned char *const dst = to.data(), *const src = from.data();
    fill(src, room);
    for (int32_t i = 0; i < 256; i++)
        index[i] = i;
    for (const auto &c : cases) {
        kvprim_transfer_desc d = plain_transfer(dst, src, c.row_bytes, c.count, c.layers, c.gap);
        if (c.indexed)
            d.dst_index = index, d.index_type = KVPRIM_I32;
        memset(dst, 0, room);
        kvprim_emulate_captured = c.captured;
        const unsigned launches = kvprim_emulate_launches, copies = kvprim_emulate_copies;
        CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK);
        CHECK(kvprim_emulate_copies - copies == c.copies && kvprim_emulate_launches - launches == (c.copies == 0));
        CHECK(c.copies || gridDim.x == c.blocks[kvprim_emulate_to_host]);
        for (int64_t r = 0; r < c.layers * c.count; r++)
            CHECK(memcmp(dst + r * (c.row_bytes + c.gap), src + r * c.row_bytes, size_t(c.row_bytes)) == 0);
    }
    kvprim_emulate_captured = false;
}

/* How many copies of one side's few items CUDA makes itself, and that a kernel makes the rest. The second is empty. */
static void link_few()
{
    enum { room = (384 << 10) + 100 }; /* more than inside a GPU */
    static unsigned char src[4][room], got[4][room];
    const auto bytes_of = [](uint64_t i) { return i == 1 ? 0 : room - 1 - i; };
    for (uint64_t n = 1; n <= 4; n++)
        for (const bool alone : {true, false}) {
            kvprim_copy_item items[4] = {};
            for (uint64_t i = 0; i < n; i++)
                items[i].dst = got[i], items[i].src = src[i] + 1, items[i].bytes = bytes_of(i);
            kvprim_copy_desc d = {};
            d.items = items, d.count = n;
            fill(src[0], sizeof src);
            memset(got, 0, sizeof got);
            kvprim_emulate_captured = !alone;
            const unsigned before = kvprim_emulate_copies, most = kvprim_emulate_to_host ? 3 : 2;
            CHECK(kvprim_cuda_copy(&d, nullptr) == KVPRIM_OK);
            CHECK(kvprim_emulate_copies - before == (alone && n <= most && !kvprim_emulate_refuse ? n - (n > 1) : 0));
            for (uint64_t i = 0; i < n; i++)
                CHECK(memcmp(got[i], src[i] + 1, bytes_of(i)) == 0 && got[i][bytes_of(i)] == 0);
        }
    kvprim_emulate_captured = false;
}

/* Two layers of rows of 48 bytes, which follow each other in a run on one side, named by indices whose difference to the
   base may wrap. */
static void link_runs()
{
    enum { rows = 100, count = 900, row_bytes = 48, layers = 2 };
    static const int64_t base = INT64_MAX - 39;
    static const int64_t values[] = {INT64_MAX,      base,           base - 1, INT64_MIN,
                                     INT64_MIN + 10, INT64_MIN + 59, -1,       base + 20};
    static int64_t index[count];
    static unsigned char src[layers * rows * row_bytes], got[layers * count * row_bytes], want[sizeof got];
    uint32_t rejected = 0;
    for (int i = 0; i < count; i++)
        index[i] = values[i % 8];
    for (const bool into_runs : {true, false}) {
        kvprim_transfer_desc d = {};
        d.dst = table_of(got, count, into_runs ? layers * row_bytes : row_bytes);
        d.src = table_of(src, rows, into_runs ? row_bytes : layers * row_bytes);
        d.dst_layer_stride = into_runs ? row_bytes : count * row_bytes;
        d.src_layer_stride = into_runs ? rows * row_bytes : row_bytes;
        d.row_bytes = row_bytes, d.layers = layers, d.count = count;
        d.src_index = index, d.src_index_type = KVPRIM_I64, d.src_index_base = base, d.rejected = &rejected;
        fill(src, sizeof src);
        fill(got, sizeof got);
        memcpy(want, got, sizeof got);
        for (int l = 0; l < layers; l++)
            for (int i = 0; i < count; i++)
                if (index[i] >= base)
                    memcpy(want + l * d.dst_layer_stride + i * d.dst.stride,
                           src + l * d.src_layer_stride + (index[i] - base) * d.src.stride, row_bytes);
        CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK);
        CHECK(memcmp(got, want, sizeof got) == 0 && rejected == 0);
        CHECK(ran(kvpc_lines_kernel));
    }
}

/* Two transfers in one call, of which kvpc_lines_kernel could take either. */
static void link_pairs()
{
    enum { count = 400, row_bytes = 48, layers = 4 };
    static const int32_t index[count] = {};
    alignas(16) static unsigned char src[2][layers * row_bytes], got[2][count * layers * row_bytes];
    alignas(16) static unsigned char want[2][sizeof got[0]];
    fill(src, sizeof src);
    for (auto *const to : {want, got}) {
        kvprim_move moves[2];
        for (int k = 0; k < 2; k++) {
            kvprim_transfer_desc d =
                transfer_of(table_of(to[k], count, layers * row_bytes), table_of(src[k], 1), row_bytes, count);
            d.dst_layer_stride = row_bytes, d.layers = layers, d.src_index = index;
            CHECK(kvprim_transfer_moves(&d, &moves[k]) == KVPRIM_OK);
        }
        CHECK((to == want ? kvprim_cpu_move(moves, 2) : kvprim_cuda_move(moves, 2, nullptr)) == KVPRIM_OK);
    }
    CHECK(memcmp(got, want, sizeof got) == 0);
}

/* What the GPU, or the host, reads where the other's memory would be. */
static void test_listed()
{
    kvprim_cuda_launch launch = {};
    memory.launch = &launch;
    listed_matrix(&memory);
    for (int n = 0; n < (quick ? 2 : 3); n++) { /* on the whole GPU, over the link, on five multiprocessors */
        kvprim_emulate_link = n == 1;
        launch.max_sms = n == 2 ? 5 : 0;
        listed_options(&memory);
    }
    kvprim_emulate_link = false;
    memory.launch = nullptr;
}

/* The same transfers as everywhere, as if one side were pinned host memory; at last, the engine refuses every copy. */
static void test_link()
{
    long_transfers(&memory);
    kvprim_emulate_link = true;
    for (const bool to_host : {true, false}) {
        kvprim_emulate_to_host = to_host;
        link_choices();
        link_few();
    }
    kvprim_emulate_refuse = true;
    link_few();
    kvprim_emulate_refuse = false;
    link_runs();
    link_pairs();
    transfer_lines(&memory);
    kvprim_cuda_launch launch = {};
    memory.launch = &launch;
    launch.pdl = 1, kvprim_emulate_pdl = true, kvprim_emulate_early = 0;
    transfer_lines(&memory);
    CHECK(kvprim_emulate_early == 0);
    launch.pdl = 0, kvprim_emulate_pdl = false;
    const unsigned copies = kvprim_emulate_copies;
    long_transfers(&memory);
    CHECK(kvprim_emulate_copies > copies);
    for (launch.max_sms = 1; launch.max_sms <= 9; launch.max_sms += 8) {
        kvprim_emulate_refuse = launch.max_sms == 9;
        long_transfers(&memory);
    }
    memory.launch = nullptr;
    kvprim_emulate_link = kvprim_emulate_refuse = false;
}

/* A launch takes at least as many layers as the header says. */
static void test_launches_of_layers()
{
    for (const int32_t layers : {1, 128, 231, 232, 433}) {
        std::vector<unsigned char> dst(433), src(433);
        kvprim_transfer_desc d = transfer_of(table_of(dst.data(), 1), table_of(src.data(), 1), 1, 1);
        d.layers = layers;
        fill(src.data(), src.size());
        const unsigned before_it = kvprim_emulate_launches;
        CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK);
        CHECK(kvprim_emulate_launches - before_it <= unsigned(layers + 230) / 231);
        CHECK(memcmp(dst.data(), src.data(), size_t(layers)) == 0);
        static const int32_t past[1] = {1};
        uint32_t rejected = 0;
        d.src_index = past, d.index_type = KVPRIM_I32, d.rejected = &rejected;
        CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK && rejected == 1); /* however many launches */
    }
}

/* arrays: bit 0 for a host array of dst's layers, bit 1 of src's. */
struct listed_launches {
    int64_t count;
    int32_t layers;
    unsigned how, arrays, launches;
};

/* Rows of a byte. The last index is past the table. */
static void one_listed_launch(const listed_launches &c)
{
    const size_t count = size_t(c.count), layers = size_t(c.layers);
    const size_t step = c.how & SRC_TABLE || c.arrays & 2 ? 1 : count; /* from layer to layer of src */
    std::vector<unsigned char> dst(layers * count), src((layers * step + count + 15) / 16 * 16); /* 16 bytes are read */
    std::vector<void *> to(layers), from(layers);
    std::vector<int32_t> index(count);
    uint32_t rejected = 0;
    fill(src.data(), src.size());
    for (size_t l = 0; l < layers; l++)
        to[l] = &dst[l * count], from[l] = &src[l * step];
    for (size_t i = 0; i < count; i++)
        index[i] = int32_t(i + (i == count - 1));
    kvprim_transfer_desc d = transfer_of(table_of(dst.data(), c.count), table_of(src.data(), c.count), 1, c.count);
    d.layers = c.layers, d.rejected = &rejected;
    d.src_index = index.data(), d.host_index = c.how & HOST_LISTS ? 1 : 0;
    d.dst_device_layers = c.how & DST_TABLE ? to.data() : nullptr;
    d.src_device_layers = c.how & SRC_TABLE ? from.data() : nullptr;
    d.dst_layers = c.arrays & 1 ? to.data() : nullptr;
    d.src_layers = c.arrays & 2 ? from.data() : nullptr;
    const unsigned before_it = kvprim_emulate_launches;
    const kvprim_status status = kvprim_cuda_transfer(&d, nullptr);
    if (status != KVPRIM_OK || kvprim_emulate_launches - before_it != c.launches)
        fail("%lld rows of %d layers, kind %u, arrays %u: %u launches; %s", print_i64(c.count), c.layers, c.how,
             c.arrays, kvprim_emulate_launches - before_it, kvprim_last_error());
    CHECK(rejected == 1); /* however many launches */
    for (size_t l = 0; l < layers; l++)
        if (memcmp(to[l], from[l], count - 1) != 0 || dst[l * count + count - 1] != 0)
            fail("%lld rows of %d layers, kind %u: layer %zu is wrong", print_i64(c.count), c.layers, c.how, l);
}

/* Device layers need no room, lists and host arrays as much as the header says. */
static void test_listed_launches()
{
    static const listed_launches cases[] = {{4, 64, DST_TABLE | SRC_TABLE, 0, 1},
                                            {2, 65536, DST_TABLE | SRC_TABLE, 0, 1},
                                            {2, 454, DST_TABLE, 2, 1},
                                            {2, 455, DST_TABLE, 2, 2},
                                            {2, 1000, SRC_TABLE, 1, 3},
                                            {908, 1, HOST_LISTS, 2, 1},
                                            {909, 1, HOST_LISTS, 2, 1},
                                            {8096, 1, HOST_LISTS, 2, 1},
                                            {8097, 1, HOST_LISTS, 2, 2},
                                            {20000, 1, HOST_LISTS, 2, 3},
                                            {100, 3000, HOST_LISTS, 3, 3},
                                            {100, 3000, HOST_LISTS, 1, 2},
                                            {100, 3000, HOST_LISTS, 2, 2},
                                            {4100, 1012, HOST_LISTS, 3, 2},
                                            {9000, 5, HOST_LISTS | 3, 0, 2}};
    for (const listed_launches &c : cases)
        one_listed_launch(c);
}

/* What the GPU or the host does not reach must be refused by its name. */
static void unreachable_listed(arena *a)
{
    const kvprim_transfer_desc good = good_transfer(a);
    kvprim_transfer_desc resolved;
    CHECK(kvprim_transfer_check(&good, &resolved) == KVPRIM_OK);
    listed_transfer listed(a, good, resolved, LISTED_KINDS - 1);
    kvprim_transfer_desc d = listed.on.d;
    const auto refused = [&](const char *field, const char *advice) {
        memcpy(a->got, a->expected, a->used);
        expect_refusal(__LINE__, &d, nullptr, KVPRIM_ERROR_ARGUMENT, field);
        CHECK(strstr(kvprim_last_error(), advice) && memcmp(a->got, a->expected, a->used) == 0);
        d = listed.on.d;
    };
    kvprim_emulate_pageable = d.src_device_layers;
    refused("src_device_layers (", "");
    kvprim_emulate_pageable = a->got + 64;
    d.dst_device_layers = nullptr, d.dst.data = a->got + 64;
    refused("dst (", "pin it (cudaMallocHost, cudaHostRegister");
    kvprim_emulate_pageable = d.src_index;
    d.host_index = 0;
    refused("src_index (", "or set host_index = 1");
    kvprim_emulate_device = d.dst_index;
    refused("dst_index (", "is memory of a GPU, but host_index is 1");
    kvprim_emulate_pageable = kvprim_emulate_device = nullptr;
}

/* Each list of moves takes as few launches as the header says: up to 4 moves of any kind, and alike ones with up to 231
   layers, are one launch. */
static void test_launches_of_moves()
{
    unsigned char bytes[4096] = {0};
    const int32_t index[4] = {0, 1, 2, 3};
    kvprim_move m[5];
    for (size_t n = 1; n <= 5; n++)
        for (int kind = 0; kind < 4; kind++) {
            for (size_t k = 0; k < n; k++) {
                kvprim_transfer_desc d = transfer_of(table_of(bytes + 256 * k, 4), table_of(bytes + 2048 + 256 * k, 4),
                                                     kind % 2 ? int64_t(16 + 16 * k) : 16, 4);
                if (kind < 2)
                    d.dst_index = d.src_index = index;
                CHECK(kvprim_transfer_moves(&d, &m[k]) == KVPRIM_OK);
            }
            const unsigned first = kvprim_emulate_launches;
            CHECK(kvprim_cuda_move(m, n, nullptr) == KVPRIM_OK);
            CHECK(kvprim_emulate_launches - first == (n == 5 && kind % 2 ? 2u : 1u));
        }
}

/* Values of whole words, and scales that are none, of one store: a launch, and two if they are many. */
static void moves_apart()
{
    enum { page = 64, page_bytes = 37440, most = 7400 };
    const size_t cache_bytes = size_t((most + page - 1) / page) * page_bytes;
    static int32_t slot[most];
    static unsigned char rows[most * 584];
    std::vector<unsigned char> got(cache_bytes), want(cache_bytes);
    fill(rows, sizeof rows);
    for (int i = 0; i < most; i++)
        slot[i] = i % 7 == 3 ? -1 : (i * 41 + 11) % most;
    for (const int count : {100, int(most)}) {
        kvprim_store_desc d = {};
        d.k_cache = paged_table(got.data(), most, page, page_bytes);
        d.v_cache = paged_table(got.data() + page * 576, most, page, page_bytes);
        d.k = table_of(rows, count), d.v = table_of(rows + count * 576, count);
        d.k_bytes = 576, d.v_bytes = 8, d.slot = slot, d.slot_type = KVPRIM_I32, d.count = count;
        for (int i = 0; i < count; i++)
            if (slot[i] >= 0) {
                unsigned char *const in = want.data() + slot[i] / page * page_bytes;
                memcpy(in + slot[i] % page * 576, rows + i * 576, 576);
                memcpy(in + page * 576 + slot[i] % page * 8, rows + count * 576 + i * 8, 8);
            }
        const unsigned launches = kvprim_emulate_launches;
        CHECK(kvprim_cuda_store(&d, nullptr) == KVPRIM_OK && got == want);
        CHECK(kvprim_emulate_launches - launches == (count == most ? 2u : 1u));
    }
}

static void test_moves()
{
    kvprim_cuda_launch launch = {};
    several_moves(&memory);
    moves_apart();
    memory.launch = &launch;
    for (launch.max_sms = 1; launch.max_sms <= 5; launch.max_sms += 4)
        random_moves(&memory, quick ? 10 : 40);
    memory.launch = nullptr;
}

/* The threads that move something wait for the kernel before if, and only if, the launch is a dependent one. They touch
   no memory before that. Other launches must not let the next one start before their end, as it may not wait. */
static void expect_waits(const char *what, bool dependent, kvprim_status status)
{
    CHECK(status == KVPRIM_OK);
    if ((kvprim_emulate_waits > 0) != dependent || kvprim_emulate_early > 0)
        fail("%s: %u threads waited, %u accesses came before that", what, kvprim_emulate_waits, kvprim_emulate_early);
    if (kvprim_emulate_unasked > 0)
        fail("%s: %u threads let the next launch start, unasked", what, kvprim_emulate_unasked);
    kvprim_emulate_waits = kvprim_emulate_early = kvprim_emulate_unasked = 0;
}

static void one_dependent(const kvprim_cuda_launch *launch, bool dependent, int64_t row_bytes, kvprim_index_type type)
{
    alignas(16) static unsigned char dst[2][8192], src[2][8192];
    const int64_t index[4] = {}; /* zeros of either type */
    const kvprim_table to = table_of(dst[0], 1), from = table_of(src[0], 2);
    const kvprim_gather_desc gather =
        gather_of(table_of(dst[1], 2), table_of(src[1], 2), row_bytes, index, type, 0, 2, nullptr);
    kvprim_store_desc store = store_of(to, from, row_bytes, index, type, 2, nullptr);
    const kvprim_transfer_desc transfer = transfer_of(to, from, row_bytes, 1);
    kvprim_move moves[2];
    CHECK(kvprim_gather_moves(&gather, &moves[0]) == KVPRIM_OK);
    CHECK(kvprim_transfer_moves(&transfer, &moves[1]) == KVPRIM_OK);
    store.v_cache = table_of(dst[1], 1), store.v = table_of(src[1], 2), store.v_bytes = row_bytes;
    expect_waits("gather", dependent, kvprim_cuda_gather(&gather, launch));
    expect_waits("store of K and V", dependent, kvprim_cuda_store(&store, launch));
    drop_v(&store);
    expect_waits("store of K", dependent, kvprim_cuda_store(&store, launch));
    store.k_cache.heads = int32_t(row_bytes / 4), store.k_cache.head_stride = 8;
    expect_waits("store in pieces", dependent, kvprim_cuda_store(&store, launch));
    expect_waits("transfer", dependent, kvprim_cuda_transfer(&transfer, launch));
    void *const dst_layers[1] = {dst[0]}, *const src_layers[1] = {src[0]};
    kvprim_transfer_desc listed = transfer;
    listed.dst_device_layers = dst_layers, listed.src_device_layers = src_layers;
    expect_waits("transfer of device layers", dependent, kvprim_cuda_transfer(&listed, launch));
    listed.src_index = index, listed.index_type = type, listed.host_index = 1;
    expect_waits("transfer of a list of the host", dependent, kvprim_cuda_transfer(&listed, launch));
    expect_waits("two moves", dependent, kvprim_cuda_move(moves, 2, launch));
    const kvprim_fragment f = {0, 0, uint64_t(row_bytes)};
    const kvprim_unpack_desc unpack = {src, sizeof src, dst, sizeof dst, &f, 1, 0};
    expect_waits("unpack", dependent, kvprim_cuda_unpack(&unpack, launch));
}

static void test_dependent_launches()
{
    for (int device = 0; device < 2; device++)
        for (int32_t pdl = 0; pdl < 2; pdl++)
            for (const int64_t row_bytes : {24, 64, 100, 128, 192, 256, 512, 1024, 4096})
                for (const int32_t max_sms : {0, 1}) {
                    const kvprim_cuda_launch launch = launch_like(&memory, pdl, max_sms);
                    kvprim_emulate_pdl = device != 0;
                    kvprim_emulate_waits = kvprim_emulate_unasked = 0;
                    one_dependent(&launch, device && pdl, row_bytes, row_bytes % 3 ? KVPRIM_I32 : KVPRIM_I64);
                }
    const kvprim_cuda_launch dependent = launch_like(&memory, 1, 0);
    memory.launch = &dependent;
    kvprim_emulate_pdl = true;
    plain_sizes(&memory);
    kernel_matrix(&memory);
    CHECK(kvprim_emulate_early == 0);
    memory.launch = nullptr;
    kvprim_emulate_pdl = false;
}

/* Up to which sizes the kernels of plain rows take a gather: their arithmetic has 32 bits. Nothing is moved. */
static void test_plain_limits()
{
    static const struct {
        int64_t row_bytes, count, base, rows, stride;
        bool plain;
    } cases[] = {
        {1 << 20, 1, 0, 8, 0, true},
        {(1 << 20) + 16, 1, 0, 8, 0, false},
        {16, 1 << 24, 0, 8, 0, true},
        {16, (1 << 24) + 1, 0, 8, 0, false},
        {512, 1 << 23, 0, 8, 0, true},
        {512, (1 << 23) + 1, 0, 8, 0, false},
        {16, 4, -1, 8, 0, false},
        {16, 4, 0, int64_t(1) << 31, 0, true},
        {16, 4, 0, (int64_t(1) << 31) + 1, 0, false},
        {16, 4, INT32_MAX, 1, 0, true},
        {16, 4, INT32_MAX, 2, 0, false},
        {16, 4, int64_t(1) << 31, 0, 0, false},
        {16, 4, 0, 8, UINT32_MAX, true},
        {16, 4, 0, 8, int64_t(UINT32_MAX) + 1, false},
    };
    for (const auto &c : cases) {
        void *const far[] = {reinterpret_cast<void *>(uintptr_t(1) << 44), reinterpret_cast<void *>(uintptr_t(1) << 45),
                             reinterpret_cast<void *>(uintptr_t(1) << 46)};
        kvprim_move move;
        uint64_t bits = 0;
        const kvprim_gather_desc d =
            gather_of(table_of(far[0], c.count), table_of(c.rows ? far[1] : nullptr, c.rows, c.stride), c.row_bytes,
                      far[2], KVPRIM_I64, c.base, c.count, nullptr);
        CHECK(kvprim_gather_moves(&d, &move) == KVPRIM_OK);
        if (kvpc_is_plain(&move, &bits) != c.plain)
            fail("case %d", int(&c - cases));
    }
}

/* Which K and V, of other sizes, take a launch each: one of 4 MB or more in whole words, the other in others. */
static void test_splits()
{
    static const struct {
        int64_t k_bytes, v_bytes, count;
        int32_t max_sms;
        bool splits;
    } cases[] = {
        {512, 8, 8192, 0, true},   {512, 8, 8191, 0, false}, {8, 512, 8192, 0, true},   {512, 8, 8192, 1, false},
        {512, 16, 8192, 0, false}, {520, 8, 8192, 0, false}, {520, 16, 8192, 0, false},
    };
    for (const auto &c : cases) {
        const auto far = [](int i) { return reinterpret_cast<void *>(uintptr_t(i + 1) << 44); };
        kvprim_move moves[2];
        kvpc_call call = {};
        call.launch.max_sms = c.max_sms;
        for (int k = 0; k < 2; k++) {
            const int64_t bytes = k ? c.v_bytes : c.k_bytes;
            const kvprim_store_desc d = store_of(table_of(far(2 * k), c.count), table_of(far(2 * k + 1), c.count),
                                                 bytes, far(4), KVPRIM_I32, c.count, nullptr);
            kvprim_move made[2];
            CHECK(kvprim_store_moves(&d, made) == KVPRIM_OK);
            moves[k] = made[0];
        }
        if (kvpc_splits_launch(&call, moves, 2) != c.splits)
            fail("case %d", int(&c - cases));
    }
}

/* ---- limits that no memory reaches: nothing is moved, and only launches count ---- */

struct limit_call {
    kvprim_transfer_desc d; /* from or to an index of any side */
    kvprim_format dst, src;
    bool link, store; /* store: not a transfer but a store by dst_index, without layers */
    void *arrays[2][500];
};

struct limit_case {
    const char *name, *launches;
    void (*last)(); /* NULL: any kernel */
    void (*change)(limit_call &);
};

template <class Kernel> static void (*kernel_of(Kernel *kernel))()
{
    return reinterpret_cast<void (*)()>(kernel);
}

static const int64_t two_31 = int64_t(1) << 31;

/* A store of tiles of 64 elements, in rows of 128. */
static void limit_tiles(limit_call &c)
{
    c.store = true;
    c.dst = format_of(KVPRIM_F8E4M3), c.src = format_of(KVPRIM_BF16);
    c.dst.scale = KVPRIM_SCALE_TILE, c.dst.tile = 64, c.dst.scales = reinterpret_cast<void *>(uintptr_t(1) << 47);
    c.d.dst.format = &c.dst, c.d.src.format = &c.src;
    c.d.row_bytes = 256, c.d.dst.stride = 128, c.d.src.stride = 256;
}

/* Layers far apart, of one side in pairs of which the rows follow each other. */
static void limit_arrays(limit_call &c, int32_t layers)
{
    for (int32_t l = 0; l < layers; l++)
        for (int k = 0; k < 2; k++)
            c.arrays[k][l] = reinterpret_cast<void *>((uintptr_t(1) << (45 + k)) +
                                                      (k ? uintptr_t(l / 2) << 30 : uintptr_t(l) << 30) +
                                                      (k ? uintptr_t(l % 2) * 48 : 0));
    c.d.dst_layers = c.arrays[0], c.d.src_layers = c.arrays[1];
}

/* Blocks of one row each, of which CUDA takes 65,535 in one dimension. */
static void limit_blocks(limit_call &c)
{
    limit_tiles(c);
    c.dst.tile = 0;
    c.d.row_bytes = c.d.src.stride = 4096, c.d.dst.stride = 2048;
    c.d.count = c.d.src.rows = c.d.dst.rows = 66000;
}

/* Of rows of 64 KB over the link. */
static void limit_copy(limit_call &c, int64_t stride)
{
    c.link = true;
    c.d.src_index = nullptr, c.d.row_bytes = c.d.src.stride = 65536, c.d.dst.stride = stride;
}

/* Runs of two layers on one side, of more layers than fit, or as many as do. */
static void limit_lines(limit_call &c, int32_t layers)
{
    c.link = true;
    c.d.row_bytes = 48, c.d.count = 4000, c.d.layers = layers;
    c.d.dst.stride = 48, c.d.src.stride = 96;
    limit_arrays(c, layers);
}

/* Rows that the host names, of a table of more than 2^31. */
static void limit_list(limit_call &c, int64_t count)
{
    static int64_t index[9000];
    c.d.src.rows = two_31 + 1000;
    c.d.src_index = index, c.d.index_type = KVPRIM_I64, c.d.host_index = 1, c.d.count = c.d.dst.rows = count;
}

/* The same of conversions, on both sides, of few rows or many. `layers`: as many arrays of each side. */
static void limit_lists(limit_call &c, int64_t count, int64_t rows, int32_t layers)
{
    limit_tiles(c), limit_list(c, count);
    c.store = false, c.d.dst.rows = c.d.src.rows = rows, c.d.layers = layers;
    if (layers > 1) {
        limit_arrays(c, layers);
        c.d.dst.stride = 128, c.d.src.stride = 256;
    }
}

static void limit_layers(limit_call &c, int64_t count)
{
    c.d.row_bytes = 16, c.d.layers = 64, c.d.count = c.d.dst.rows = count, c.d.src_device_layers = c.arrays[0];
}

/* What a launch holds beside its other parameters. */
static const int64_t few_words = kvpc_listed<kvpc_few_params>::room - kvpc_first_word;
static const int64_t few_converted = kvpc_converted_rows::room - kvpc_first_word;

static const auto narrow_rows = kernel_of(kvpc_move_kernel<true, kvpc_batch<1>>);
static const auto many_rows = kernel_of(kvpc_move_any_kernel<uint64_t, kvpc_listed<kvpc_few_params>>);
static const auto wide_numbers = kernel_of(kvpc_convert_kernel<uint64_t, kvpc_convert_wide_threads, false>);

static const limit_case limit_cases[] = {
    {"2^31 - 1 rows", "B", narrow_rows, [](limit_call &c) { c.d.src.rows = two_31 - 1; }},
    {"2^31 rows", "L", many_rows, [](limit_call &c) { c.d.src.rows = two_31; }},
    {"2^31 - 1 rows to", "B", narrow_rows,
     [](limit_call &c) { c.d.dst_index = c.d.src_index, c.d.dst.rows = two_31 - 1; }},
    {"2^31 rows to", "L", many_rows, [](limit_call &c) { c.d.dst_index = c.d.src_index, c.d.dst.rows = two_31; }},
    {"2^30 chunks", "B", narrow_rows, [](limit_call &c) { c.d.layers = 64, c.d.count = c.d.dst.rows = two_31 / 128; }},
    {"2^31 chunks", "L", many_rows, [](limit_call &c) { c.d.layers = 64, c.d.count = c.d.dst.rows = two_31 / 64; }},
    {"count 2^31", "L", many_rows, [](limit_call &c) { c.d.count = c.d.dst.rows = two_31; }},
    {"a list of more rows", "L", many_rows, [](limit_call &c) { limit_list(c, few_words / 2); }},
    {"a list of more rows, of two launches", "LL", many_rows, [](limit_call &c) { limit_list(c, few_words / 2 + 1); }},
    {"a list of fewer", "L", nullptr, [](limit_call &c) { limit_list(c, 4000), c.d.src.rows = two_31 - 1; }},
    {"a list of rows of less than 1 GB", "L", nullptr,
     [](limit_call &c) {
         limit_list(c, 1);
         c.d.row_bytes = c.d.src.stride = c.d.dst.stride = two_31 / 2 - 16, c.d.src.rows = 9, c.d.count = 1;
     }},
    {"a list of rows of 1 GB", "L", many_rows,
     [](limit_call &c) {
         limit_list(c, 1);
         c.d.row_bytes = c.d.src.stride = c.d.dst.stride = two_31 / 2, c.d.src.rows = 9, c.d.count = 1;
     }},
    {"fewer than 2^31 chunks of layers", "L", nullptr, [](limit_call &c) { limit_layers(c, two_31 / 64 - 1); }},
    {"2^31 chunks of layers", "L", many_rows, [](limit_call &c) { limit_layers(c, two_31 / 64); }},
    {"scales of tiles less than 4 GiB apart", "T", nullptr,
     [](limit_call &c) { limit_tiles(c), c.dst.scale_stride = 8, c.dst.scale_tile_stride = 2 * two_31 - 4; }},
    {"scales of tiles 4 GiB apart", "G", nullptr,
     [](limit_call &c) { limit_tiles(c), c.dst.scale_stride = 8, c.dst.scale_tile_stride = 2 * two_31; }},
    {"scales of rows less than 4 GiB apart", "T", nullptr,
     [](limit_call &c) { limit_tiles(c), c.dst.scale_stride = 2 * two_31 - 4; }},
    {"scales of rows 4 GiB apart", "G", nullptr,
     [](limit_call &c) { limit_tiles(c), c.dst.scale_stride = 2 * two_31; }},
    {"scales of pages less than 4 GiB apart", "T", nullptr,
     [](limit_call &c) { limit_tiles(c), c.d.dst.page_rows = 4, c.dst.scale_page_stride = 2 * two_31 + 28; }},
    {"scales of pages 4 GiB apart", "G", nullptr,
     [](limit_call &c) { limit_tiles(c), c.d.dst.page_rows = 4, c.dst.scale_page_stride = 2 * two_31 + 32; }},
    {"scales of rows in pages less than 2 GiB apart", "T", nullptr,
     [](limit_call &c) {
         limit_tiles(c), c.d.dst.page_rows = 1, c.d.dst.page_stride = 256, c.dst.scale_stride = two_31 - 4;
     }},
    {"conversions of fewer than 2^31 rows", "G", nullptr,
     [](limit_call &c) { limit_tiles(c), c.store = false, c.d.dst.rows = two_31 - 1; }},
    {"conversions of 2^31 rows", "G", wide_numbers,
     [](limit_call &c) { limit_tiles(c), c.store = false, c.d.dst.rows = two_31; }},
    {"conversions of layers, 2^31 parts", "G", wide_numbers,
     [](limit_call &c) {
         limit_tiles(c), c.store = false, c.d.layers = 16, c.d.count = c.d.src.rows = two_31 / 16 / 65 + 1;
     }},
    {"conversions of layers, fewer parts", "G", nullptr,
     [](limit_call &c) {
         limit_tiles(c), c.store = false, c.d.layers = 16, c.d.count = c.d.src.rows = two_31 / 16 / 65 - 1;
     }},
    {"converted lists", "G", nullptr, [](limit_call &c) { limit_lists(c, few_converted / 2, 9000, 1); }},
    {"converted lists of two launches", "GG", nullptr,
     [](limit_call &c) { limit_lists(c, few_converted / 2 + 1, 9000, 1); }},
    {"converted lists of many rows", "G", wide_numbers,
     [](limit_call &c) { limit_lists(c, few_converted / 4, two_31, 1); }},
    {"converted lists of many rows, of two launches", "GG", wide_numbers,
     [](limit_call &c) { limit_lists(c, few_converted / 4 + 1, two_31, 1); }},
    {"converted lists beside layers", "G", nullptr,
     [](limit_call &c) { limit_lists(c, (few_converted - 400) / 2, 9000, 100); }},
    {"converted lists beside layers, of two launches", "GG", nullptr,
     [](limit_call &c) { limit_lists(c, (few_converted - 400) / 2 + 1, 9000, 100); }},
    {"converted lists of many rows beside layers, of two launches", "GG", wide_numbers,
     [](limit_call &c) { limit_lists(c, 2, two_31, int32_t(few_converted / 8 + 1)); }},
    {"converted layers", "G", nullptr,
     [](limit_call &c) { limit_lists(c, 4, 9000, int32_t(few_converted / 4)), c.d.host_index = 0; }},
    {"converted layers of two launches", "GG", nullptr,
     [](limit_call &c) { limit_lists(c, 4, 9000, int32_t(few_converted / 4) + 1), c.d.host_index = 0; }},
    {"runs of 400 layers", "R", nullptr, [](limit_call &c) { limit_lines(c, 400); }},
    {"runs of 401 layers", "BB", nullptr, [](limit_call &c) { limit_lines(c, 401); }},
    {"runs of 2^31 rows to", "R", nullptr,
     [](limit_call &c) { limit_lines(c, 2), c.d.dst_index = c.d.src_index, c.d.dst.rows = two_31; }},
    {"runs of more rows to", "L", many_rows,
     [](limit_call &c) { limit_lines(c, 2), c.d.dst_index = c.d.src_index, c.d.dst.rows = two_31 + 1; }},
    {"fewer than 2^31 runs", "R", nullptr,
     [](limit_call &c) { limit_lines(c, 4), c.d.count = c.d.dst.rows = two_31 / 2 - 1; }},
    {"2^31 runs", "L", many_rows, [](limit_call &c) { limit_lines(c, 4), c.d.count = c.d.dst.rows = two_31 / 2; }},
    {"a copy of rows of less than 2 GiB", "", nullptr, [](limit_call &c) { limit_copy(c, two_31 - 1); }},
    {"a copy of rows 2 GiB apart", "B", nullptr, [](limit_call &c) { limit_copy(c, two_31); }},
    {"tiles in more blocks than one number counts", "T", nullptr,
     [](limit_call &c) { limit_blocks(c), c.dst.scale = KVPRIM_SCALE_TILE, c.dst.tile = 64; }},
    {"conversions in more blocks than one number counts", "H", nullptr,
     [](limit_call &c) { limit_blocks(c), c.dst.scale = KVPRIM_SCALE_TENSOR; }},
    {"runs of 2^31 rows", "R", nullptr, [](limit_call &c) { limit_lines(c, 2), c.d.src.rows = two_31; }},
    {"runs of more rows", "L", many_rows, [](limit_call &c) { limit_lines(c, 2), c.d.src.rows = two_31 + 1; }},
};

static void one_limit(const limit_case *which)
{
    static limit_call c;
    c = limit_call{};
    kvprim_transfer_desc &d = c.d;
    d.dst = table_of(reinterpret_cast<void *>(uintptr_t(1) << 44), 4000, 32);
    d.src = table_of(reinterpret_cast<void *>(uintptr_t(1) << 45), 4000, 32);
    d.row_bytes = 32, d.count = 4;
    d.src_index = reinterpret_cast<void *>(uintptr_t(1) << 43), d.index_type = KVPRIM_I32;
    which->change(c);
    if (d.dst_layers || d.src_device_layers)
        d.src.data = nullptr;
    if (d.dst_layers)
        d.dst.data = nullptr;
    if (c.dst.dtype)
        d.dst_index = d.src_index;
    snprintf(current, sizeof current, "%s", which->name);
    const kvprim_store_desc store = store_of(d.dst, d.src, d.row_bytes, d.dst_index, KVPRIM_I32, d.count, nullptr);
    letters.clear();
    kvprim_emulate_idle = true, kvprim_emulate_link = c.link, kvprim_emulate_last = nullptr;
    const auto call = [&] { return c.store ? kvprim_cuda_store(&store, nullptr) : kvprim_cuda_transfer(&d, nullptr); };
    const kvprim_status status = call();
    kvprim_emulate_fails = true;
    CHECK(letters.empty() || call() == KVPRIM_ERROR_CUDA);
    kvprim_emulate_fails = kvprim_emulate_idle = kvprim_emulate_link = false;
    if (status != KVPRIM_OK)
        fail("%s: %s", current, kvprim_last_error());
    check_launches(which->launches);
    const bool is_wide = kvprim_emulate_last == many_rows || kvprim_emulate_last == wide_numbers;
    if (which->last ? kvprim_emulate_last != which->last : is_wide)
        fail("%s: another kernel", current);
}

static void test_limits()
{
    for (const limit_case &c : limit_cases)
        one_limit(&c);
}

/* The tests before this one launch every kernel of plain rows, and those of pieces. */
static void test_all_kernels()
{
    for (int tables = 0; tables < 3; tables++)
        for (int way = 0; way < 3; way++)
            for (const kvpc_fit fit : {kvpc_exact, kvpc_words, kvpc_tails, kvpc_paged})
                if (!ran(kvpc_plain_kernels[tables][way][fit]))
                    fail("%d tables, way %d, fit %d: never launched", tables, way, fit);
    CHECK(triggers[kvpc_alone] && triggers[kvpc_trigger_first] && triggers[kvpc_trigger_late]);
    CHECK(ran(kvpc_bytes_kernel) && ran(kvpc_lines_kernel));
    typedef kvpc_batch<1> one;
    typedef kvpc_batch<kvpc_most_tasks> several;
    CHECK(ran(kvpc_move_kernel<true, one>) && ran(kvpc_move_kernel<true, several>));
    CHECK(ran(kvpc_move_few_kernel<true, 8, one>) && ran(kvpc_move_few_kernel<true, 4, several>));
    CHECK(ran(kvpc_move_any_kernel<uint32_t, one>) && ran(kvpc_move_any_kernel<uint32_t, several>));
    typedef kvpc_listed<kvpc_bare_params> bare;
    typedef kvpc_listed<kvpc_few_params> few;
    typedef kvpc_listed<kvpc_more_params> more;
    typedef kvpc_listed<kvpc_most_params> most;
    CHECK(ran(kvpc_move_kernel<false, bare>) && ran(kvpc_move_kernel<false, few>));
    CHECK(ran(kvpc_move_kernel<false, more>) && ran(kvpc_move_kernel<false, most>));
    CHECK(ran(kvpc_move_few_kernel<false, 8, bare>) && ran(kvpc_move_few_kernel<false, 8, few>));
    CHECK(ran(kvpc_move_few_kernel<false, 8, more>) && ran(kvpc_move_few_kernel<false, 8, most>));
    CHECK(ran(kvpc_move_any_kernel<uint64_t, few>));
}

/* Division by a multiplication is exact up to 2^31. */
static void test_divisors()
{
    std::vector<uint32_t> all = {1u << 31};
    for (uint32_t by = 1; by < 1000; by++)
        all.push_back(by);
    for (int n = 0; n < 3000; n++)
        all.push_back(1 + uint32_t(below(1u << (1 + n % 31))));
    for (const uint32_t by : all) {
        const kvpc_divisor d = kvpc_divisor_of(by);
        for (int n = 0; n < 40; n++) {
            const uint32_t most = (1u << 31) - 1, times = most / by;
            const uint32_t multiple = by * (n < 2 ? times : uint32_t(below(uint64_t(times) + 1)));
            const uint32_t number = n % 2 && multiple ? multiple - 1 : n == 2 ? most : multiple;
            if (number <= most &&
                (kvpc_divide(number, d) != number / by || kvpc_divide(uint64_t(number), d) != number / by))
                fail("%u / %u", number, by);
        }
    }
}

/* ---- two moves that differ in one thing ---- */

struct two_moves {
    alignas(16) unsigned char dst[2][4096], src[2][4096];
    int32_t index[2][32];
    uint32_t rejected[2];
};

enum { differ_least, differ_most = 12 }; /* 0: only in memory */

/* Makes move `which`. Gathers have operation 0; transfers have the bits 1 if dst, 2 if src is indexed. */
static kvprim_move one_of_two(two_moves *m, int which, int operation, int form, int change)
{
    const int is = which ? change : 0;
    kvprim_transfer_desc d = {};
    kvprim_move move;
    d.dst = table_of(m->dst[which], 12, 96);
    d.src = table_of(m->src[which], 12, 96);
    for (int side = 0; side < 2; side++) {
        kvprim_table *const t = side ? &d.src : &d.dst;
        const int in_side = form / 4 % 2 == side ? is : 0;
        t->rows = is == 1 ? 11 : 12;
        t->stride = in_side == 2 ? 112 : 96;
        const bool alone = form / 8 == 0 || form / 4 % 2 == side;
        t->page_rows = form % 2 && alone ? in_side == 3 ? 2 : 4 : 0;
        t->page_stride = form % 2 && alone ? in_side == 4 ? 544 : 512 : 0;
        t->heads = (form / 2 % 2 && alone) || in_side == 5 ? 2 : 0;
        t->head_stride = (in_side == 6 ? 48 : 40) + form / 8 * 8 * (1 + (in_side == 6)); /* only with heads */
    }
    d.row_bytes = is != 7 ? 64 : form / 8 ? 32 : 48;
    d.count = is == 8 ? 7 : 9;
    d.index_type = is == 9 ? KVPRIM_I64 : KVPRIM_I32;
    d.dst_index = operation & 1 ? m->index[is == 10] : nullptr;
    d.src_index = operation & 2 ? m->index[is == 10] : nullptr;
    d.dst_index_base = d.src_index_base = is == 11;
    d.dst_index_stride = d.src_index_stride = 1 + (is == 12);
    d.rejected = which ? nullptr : &m->rejected[0];
    kvprim_gather_desc gather =
        gather_of(d.dst, d.src, d.row_bytes, m->index[is == 10], d.index_type, d.src_index_base, d.count, d.rejected);
    gather.index_stride = d.src_index_stride;
    const kvprim_status status = operation ? kvprim_transfer_moves(&d, &move) : kvprim_gather_moves(&gather, &move);
    if (status != KVPRIM_OK)
        fail("operation %d, form %d, change %d: %s", operation, form, change, kvprim_last_error());
    return move;
}

/* In one launch they do what they do one after the other. */
static void both_at_once(const int *operations, int form, int change, bool counted)
{
    static two_moves got, want;
    fill(reinterpret_cast<unsigned char *>(&got), sizeof got);
    for (int32_t i = 0; i < 64; i++) /* distinct; the first is 11, half are past 12 rows */
        got.index[i / 32][i % 32] = (i % 32 * 7 + i / 32 * 3 + 11) % 25 + i % 32 / 25 * 25;
    memset(got.rejected, 0, sizeof got.rejected);
    want = got;
    for (int k = 0; k < 2; k++) {
        kvprim_move move = one_of_two(&want, k, operations[k], form, change);
        if (k && counted)
            move.rejected = &want.rejected[1];
        CHECK(kvprim_cpu_move(&move, 1) == KVPRIM_OK);
    }
    kvprim_move moves[2] = {one_of_two(&got, 0, operations[0], form, change),
                            one_of_two(&got, 1, operations[1], form, change)};
    if (counted)
        moves[1].rejected = &got.rejected[1];
    const unsigned launches = kvprim_emulate_launches;
    CHECK(kvprim_cuda_move(moves, 2, nullptr) == KVPRIM_OK);
    CHECK(kvprim_emulate_launches - launches == 1);
    if (memcmp(&got, &want, sizeof got) != 0)
        fail("operations %d and %d, form %d, change %d, counted %d: not as one by one", operations[0], operations[1],
             form, change, counted);
}

static void test_unlike_moves()
{
    static const int operations[][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {0, 2}, {2, 0}};
    for (const int(&both)[2] : operations)
        for (int form = 0; form < 16; form++) /* pages, heads, which side differs, and whether it alone has them */
            for (int change = differ_least; change <= differ_most; change++)
                for (const bool counted : {false, true})
                    both_at_once(both, form, change, counted);
}

/* Every kernel of slots has run by now. */
static void test_slots_kernels()
{
    CHECK(ran(kvpc_slots_kernel<true, int32_t, uint32_t>) && ran(kvpc_slots_kernel<false, int32_t, uint32_t>));
    CHECK(ran(kvpc_slots_kernel<true, int64_t, uint32_t>) && ran(kvpc_slots_kernel<false, int64_t, uint32_t>));
    CHECK(ran(kvpc_slots_kernel<true, int64_t, uint64_t>) && ran(kvpc_slots_kernel<false, int64_t, uint64_t>));
    CHECK(ran(kvpc_slots_kernel<true, int64_t, uint64_t, true>));
    CHECK(ran(kvpc_slots_kernel<false, int64_t, uint64_t, true>));
    CHECK(ran(kvpc_slots_kernel<true, int32_t, uint32_t, true>));
    CHECK(ran(kvpc_slots_kernel<false, int32_t, uint32_t, true>));
}

static void test_slots_round_trips()
{
    for (int form = 0; form < n_slots_forms; form++)
        for (const int64_t count : {1, 32, 300}) {
            const slots_round_trip t = make_round_trip(&memory, form, unsigned(below(8)), count, 96);
            memcpy(memory.got, memory.expected, memory.used);
            round_trip_on_host(&t);
            snprintf(current, sizeof current, "slots, store, gather of %lld tokens, form %d", print_i64(count), form);
            enqueue_round_trip(&memory, &t);
            compare(&memory);
        }
}

/* All short lengths, then some longer ones. */
static size_t next_length(size_t bytes)
{
    return bytes + (bytes < 34 ? 1 : quick ? 251 : bytes < 300 ? 1 : 61);
}

static void test_unpack_lengths()
{
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes = next_length(bytes))
        one_length(&memory, bytes, bytes % 2 != 0);
}

static void test_unpack_counts()
{
    static const size_t counts[] = {243, 244, 1023, 2100};
    large_batches(&memory, counts, sizeof counts / sizeof *counts);
    uneven_batches(&memory);
    empty_fragments(&memory);
    last_fragments(&memory);
}

/* An empty fragment further away than any memory, where the caller does not know where a buffer ends. */
static void test_unpack_far()
{
    unsigned char src[64], dst[64] = {}, expected[64] = {};
    const uint64_t far = uint64_t(1) << 63;
    const kvprim_fragment f[] = {{0, 0, 11}, {20, 20, 5}, {far, 13, 0}, {31, 40, 1}, {45, 44, 17}};
    const kvprim_unpack_desc d = {src, far + 1, dst, sizeof dst, f, sizeof f / sizeof *f, 0};
    fill(src, sizeof src);
    kvprim_unpack_desc on_host = d;
    on_host.dst = expected;
    CHECK(kvprim_unpack(&on_host) == KVPRIM_OK && kvprim_cuda_unpack(&d, memory.launch) == KVPRIM_OK);
    CHECK(memcmp(dst, expected, sizeof dst) == 0);
}

/* Whether a list's memory lies apart from itself and from the fragments, as KVPRIM_DEBUG has no use for it. */
static void test_surveys()
{
    const uint64_t src = uint64_t(1) << 40, dst = uint64_t(1) << 41, bytes = 64;
    const kvprim_fragment f[3] = {{0, 0, 16}, {16, 32, 16}, {32, 16, 16}};
    const uint64_t at = reinterpret_cast<uintptr_t>(f), end = at + sizeof f;
    const struct {
        uint64_t src, dst;
        bool apart;
    } cases[] = {{src, dst, true},
                 {dst, src, true},
                 {src, src + bytes, true},
                 {src + bytes, src, true},
                 {src, src + bytes - 1, false},
                 {src + bytes - 1, src, false},
                 {src, end, true},
                 {src, end - 1, false},
                 {src, at - bytes, true},
                 {src, at - bytes + 1, false},
                 {at, dst, true}};
    for (const auto &c : cases) {
        kvpc_unpack_job job = {};
        job.list = kvpc_list{reinterpret_cast<const kvpc_fragment *>(f), 3, c.src, bytes, c.dst, bytes, false};
        kvpc_survey(&job, false);
        if (!job.fit || job.apart != c.apart)
            fail("case %d: fit %d, apart %d", int(&c - cases), job.fit, job.apart);
    }
    /* of a copy, what the bits of all addresses leave room for: 128 bytes here */
    for (const uint64_t distance : {0x40, 0x7f, 0x80, 0xff, 0x100})
        for (const bool behind : {false, true}) {
            kvprim_copy_item items[2];
            for (uint64_t i = 0; i < 2; i++)
                items[i] = {reinterpret_cast<void *>(dst + (behind ? distance : 0) + 64 * i),
                            reinterpret_cast<void *>(dst + (behind ? 0 : distance) + 64 * i), 64};
            const kvprim_copy_desc d = {items, 2, 0};
            kvpc_unpack_job job = {};
            job.list = kvpc_list_of(&d);
            kvpc_survey(&job, false);
            CHECK(job.fit && (!job.apart || distance >= 0x80) && (job.apart || distance < 0x100));
        }
}

static void test_unpack_launches()
{
    for (const launches_case &c : launches_cases) {
        const unsigned first = kvprim_emulate_launches, wanted = c.launches;
        one_batch(&memory, &c.batch);
        if (kvprim_emulate_launches - first != wanted)
            fail("%s: %u launches, not %u", current, kvprim_emulate_launches - first, wanted);
    }
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
    for (size_t bytes = 0; bytes <= longest_warp_copy; bytes = next_length(bytes)) {
        one_warp_length(src, memory.got, memory.expected, bytes, false);
        one_warp_length(src, memory.got, memory.expected, bytes, true);
    }
}

/* The launches of one unpack may overlap. One that lets the next begin early must have a next, which ends after it. */
static std::vector<kvpc_unpack> noted;

template <uint32_t bytes> static void kvprim_emulate_note(const kvpc_unpack_params<bytes> &p)
{
    noted.push_back(p.head);
}

static void one_chain(size_t count, bool empty, int32_t pdl, int32_t max_sms)
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
    launch.max_sms = max_sms;
    d.dst = want.data();
    CHECK(kvprim_unpack(&d) == KVPRIM_OK);
    d.dst = got.data();
    noted.clear();
    CHECK(kvprim_cuda_unpack(&d, &launch) == KVPRIM_OK);
    CHECK(got == want);
    CHECK(noted.size() > 1);
    const bool overlap = kvprim_emulate_pdl && max_sms == 0, waits = kvprim_emulate_pdl && pdl;
    for (size_t k = 0; k < noted.size(); k++) {
        const bool last = k + 1 == noted.size();
        CHECK(noted[k].wait == (k == 0 && waits));
        CHECK(noted[k].wait_last == (k > 0 && overlap));
        CHECK(noted[k].trigger == (last ? waits : overlap));
    }
}

static void test_chains_of_launches()
{
    for (const bool has_pdl : {false, true})
        for (int32_t pdl = 0; pdl < 2; pdl++)
            for (int32_t max_sms = 0; max_sms < 5; max_sms += 4) {
                kvprim_emulate_pdl = has_pdl;
                one_chain(5000, false, pdl, max_sms);
                one_chain(5000, true, pdl, max_sms); /* a whole launch of empty fragments */
            }
    kvprim_emulate_pdl = false;
}

/* As many fragments as parameters of each size hold, and one more: the sanitizer sees what lies beyond. */
static void test_full_launches()
{
    static const batch_case cases[] = {{300, 16, EVEN, IN_ORDER, SHUFFLED, 16, 0, 0, 1},
                                       {300, 400, EVEN, SHUFFLED, SHUFFLED, 1, 3, 0, 1},
                                       {300, 900, LOGARITHMIC, SHUFFLED, SHUFFLED, 1, 0, 0, 1},
                                       {300, 2000, LOGARITHMIC, SHUFFLED, SHUFFLED, 1, 0, 0, 1}};
    for (batch_case c : cases)
        for (const uint32_t bytes : {kvpc_few_params, kvpc_more_params, kvpc_most_params}) {
            for (int again = 0; again < 3; again++) { /* with more of them a number may take more bytes */
                noted.clear();
                one_batch(&memory, &c);
                c.count = kvpc_fragments_in(&noted[0], bytes);
            }
            for (const bool more : {false, true}) {
                noted.clear();
                one_batch(&memory, &c);
                CHECK(noted.size() == (more && bytes == kvpc_most_params ? 2 : 1));
                CHECK(noted[0].count == c.count - (noted.size() - 1));
                c.count++;
            }
        }
}

/* Long fragments are cut, and what is handed out follows on without a gap. No memory is touched. */
static void long_fragments(uint64_t first)
{
    const uint64_t large = uint64_t(5) << 30;
    const kvprim_fragment f[] = {
        {first, 9, large + 3}, {large + 3 + first, large + 12, 10}, {0, 0, 0}, {2 * large, 3 * large, 1}};
    kvprim_unpack_desc d = {};
    kvpc_unpack_job job = {};
    d.fragments = f, d.count = 4;
    job.list = kvpc_list_of(&d);
    kvpc_survey(&job, true);
    CHECK(job.left == (large + 13 + kvpc_most_bytes - 1) / kvpc_most_bytes + 1 && job.last_bytes == 1);
    uint64_t at = 0, pieces = 0, count = 2;
    for (const kvpc_fragment *one = kvpc_take(&job, &count); count > 0; count = 2, one = kvpc_take(&job, &count))
        for (uint64_t i = 0; i < count; i++, pieces++) {
            CHECK(one[i].bytes > 0 && one[i].bytes <= kvpc_most_bytes);
            if (at < large + 13)
                CHECK(one[i].src == at + first && one[i].dst == at + 9);
            at += one[i].bytes;
        }
    CHECK(at == large + 14 && pieces == job.left);
}

static void test_long_fragments()
{
    long_fragments(7);
    long_fragments(0); /* of a copy, this would be zeros */
}

/* The first multiple of 16 after the first byte: a vector's room is 32 bytes more. */
static unsigned char *aligned_in(std::vector<unsigned char> &bytes)
{
    return bytes.data() + 16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16;
}

/* From 16 MB on CUDA copies what joins to one fragment, unless max_sms limits it. If CUDA refuses, a kernel does. */
static void test_copies_by_cuda()
{
    const uint64_t bytes = (16 << 20) + 5, piece = 1 << 20;
    for (const uint64_t less : {0, 6})
        for (int kind = 0; kind < 3; kind++) {
            const int32_t max_sms = kind == 1;
            std::vector<unsigned char> src(bytes + 32), dst(bytes + 32);
            unsigned char *const from = aligned_in(src), *const to = aligned_in(dst);
            std::vector<kvprim_fragment> f;
            for (uint64_t at = 0; at < bytes - less; at += piece)
                f.push_back({at, at, std::min(piece, bytes - less - at)});
            kvprim_unpack_desc d = {};
            kvprim_cuda_launch launch = {};
            launch.max_sms = max_sms;
            d.src = from, d.dst = to, d.src_bytes = d.dst_bytes = bytes;
            d.fragments = f.data(), d.count = f.size();
            fill(from, bytes);
            const unsigned copies = kvprim_emulate_copies;
            kvprim_emulate_refuse = kind == 2;
            CHECK(kvprim_cuda_unpack(&d, &launch) == KVPRIM_OK);
            kvprim_emulate_refuse = false;
            CHECK(memcmp(from, to, bytes - less) == 0 && (less == 0 || to[bytes - less] == 0));
            CHECK(kvprim_emulate_copies - copies == (less == 0 && kind == 0));
        }
}

/* `count` fragments of equal size, a byte apart. */
struct inside_case {
    uint64_t bytes, src_at, dst_at, count;
    int32_t pdl, max_sms;
    bool inside, refuse, by_cuda;
};

static void one_inside(const inside_case &c)
{
    const uint64_t room = c.count * (c.bytes + 1) + 64;
    std::vector<unsigned char> src(room), dst(room, 0xee), want(room, 0xee);
    unsigned char *const from = aligned_in(src) + c.src_at, *const to = aligned_in(dst) + c.dst_at;
    std::vector<kvprim_copy_item> items;
    fill(src.data(), room);
    for (uint64_t i = 0; i < c.count; i++) {
        const uint64_t at = i * (c.bytes + 1);
        items.push_back({from + at, to + at, c.bytes});
        memcpy(want.data() + (to - dst.data()) + at, from + at, c.bytes);
    }
    const kvprim_copy_desc d = {items.data(), items.size(), 0};
    const kvprim_cuda_launch launch = {nullptr, c.pdl, c.max_sms, 0};
    const unsigned copies = kvprim_emulate_copies;
    kvprim_emulate_pdl = c.pdl, kvprim_emulate_inside = c.inside, kvprim_emulate_refuse = c.refuse;
    CHECK(kvprim_cuda_copy(&d, &launch) == KVPRIM_OK);
    kvprim_emulate_pdl = kvprim_emulate_inside = kvprim_emulate_refuse = false;
    CHECK(dst == want && kvprim_emulate_copies - copies == c.by_cuda);
}

/* One that does not lie at multiples of 16 inside a GPU, up to 384 KB; in graphs, too. */
static void test_one_by_cuda()
{
    const uint64_t most = 384 << 10;
    for (const bool captured : {false, true}) {
        kvprim_emulate_captured = captured;
        for (const uint64_t bytes : {uint64_t(1), uint64_t(4096), most})
            for (const uint64_t at : {0, 1, 3, 8, 15})
                one_inside({bytes, at, at % 3, 1, 0, 0, true, false, at > 0});
        one_inside({most + 1, 3, 0, 1, 0, 0, true, false, false});
        one_inside({4096, 0, 3, 1, 0, 0, true, false, true});
        one_inside({4096, 8, 8, 1, 0, 0, true, false, true});
        one_inside({4096, 3, 0, 2, 0, 0, true, false, false});
        one_inside({4096, 3, 0, 1, 1, 0, true, false, false});
        one_inside({4096, 3, 0, 1, 0, 2, true, false, false});
        one_inside({4096, 3, 0, 1, 0, 0, false, false, false});
        one_inside({4096, 3, 0, 1, 0, 0, true, true, false});
    }
    kvprim_emulate_captured = false;
    /* Zeros stay a kernel's; of unpack, bases count as offsets do. */
    alignas(16) static unsigned char buffer[2][32];
    const kvprim_copy_item zeros = {nullptr, buffer[0] + 3, 8};
    const kvprim_copy_desc copy = {&zeros, 1, 0};
    const unsigned copies = kvprim_emulate_copies;
    kvprim_emulate_inside = true;
    CHECK(kvprim_cuda_copy(&copy, nullptr) == KVPRIM_OK && kvprim_emulate_copies == copies);
    for (const uint64_t off : {0u, 1u, 2u}) {
        const kvprim_fragment one = {0, off == 2, 8};
        kvprim_unpack_desc d = {};
        d.src = buffer[0], d.dst = buffer[1] + (off == 1), d.src_bytes = d.dst_bytes = 16;
        d.fragments = &one, d.count = 1;
        const unsigned before = kvprim_emulate_copies;
        CHECK(kvprim_cuda_unpack(&d, nullptr) == KVPRIM_OK && kvprim_emulate_copies - before == (off > 0));
    }
    kvprim_emulate_inside = false;
}

/* Zeros, of which all pieces join: CUDA writes them from 64 KB on, or from 16 MB on with pdl. */
static void zeros_by_cuda(uint64_t bytes, uint64_t piece, bool pdl, int32_t max_sms, bool refuse, bool by_cuda)
{
    std::vector<unsigned char> dst(bytes + 32, 0xee);
    unsigned char *const to = aligned_in(dst);
    copy_items items;
    for (uint64_t at = 0; at < bytes; at += piece)
        items.push_back({nullptr, to + at, std::min(piece, bytes - at)});
    const kvprim_copy_desc d = {items.data(), items.size(), 0};
    const kvprim_cuda_launch launch = {nullptr, pdl, max_sms, 0};
    const unsigned copies = kvprim_emulate_copies, launches = kvprim_emulate_launches;
    kvprim_emulate_pdl = pdl;
    kvprim_emulate_refuse = refuse;
    CHECK(kvprim_cuda_copy(&d, &launch) == KVPRIM_OK);
    kvprim_emulate_refuse = kvprim_emulate_pdl = false;
    CHECK(uint64_t(std::count(to, to + bytes, 0)) == bytes && to[-1] == 0xee && to[bytes] == 0xee);
    CHECK(kvprim_emulate_copies - copies == by_cuda && kvprim_emulate_launches - launches == !by_cuda);
}

static void test_zeros_by_cuda()
{
    const uint64_t least = 64 << 10, large = 16 << 20;
    for (const uint64_t pieces : {1u, 16u}) {
        zeros_by_cuda(least - 16, least / pieces, false, 0, false, false);
        zeros_by_cuda(least + 5, least / pieces, false, 0, false, true);
        zeros_by_cuda(least + 5, least / pieces, false, 0, true, false);
        zeros_by_cuda(least + 5, least / pieces, false, 1, false, false);
        zeros_by_cuda(least + 5, least / pieces, true, 0, false, false);
        zeros_by_cuda(large - 1, large / pieces, true, 0, false, false);
        zeros_by_cuda(large, large / pieces, true, 0, false, true);
    }
    zeros_by_cuda(kvpc_most_bytes + 16, kvpc_most_bytes + 16, false, 0, false, true); /* is cut, and still one */
}

/* Zeros of any length and then a source at the address that is their length: these do not join. Long zeros are cut. */
static void zeros_beside_copy(uint64_t large)
{
    char *const at = reinterpret_cast<char *>(uintptr_t(1) << 40);
    const copy_items items = {{nullptr, at, large}, {reinterpret_cast<char *>(large), at + large, 10}};
    const kvprim_copy_desc d = {items.data(), items.size(), 0};
    kvpc_unpack_job job = {};
    job.list = kvpc_list_of(&d);
    kvpc_survey(&job, false);
    CHECK(job.zeros && job.fit);
    kvpc_survey(&job, true);
    CHECK(job.zeros && job.left == (large + kvpc_most_bytes - 1) / kvpc_most_bytes + 1 && job.last_bytes == 10);
    uint64_t sum = 0, count = 2;
    for (const kvpc_fragment *one = kvpc_take(&job, &count); count > 0; count = 2, one = kvpc_take(&job, &count))
        for (uint64_t i = 0; i < count; sum += one[i++].bytes) {
            CHECK(one[i].src == (sum < large ? 0 : large));
            CHECK(one[i].dst == (uint64_t(1) << 40) + sum);
        }
    CHECK(sum == large + 10);
}

/* The same with the copy cut, and zeros after it. */
static void copy_beside_zeros()
{
    const uint64_t large = uint64_t(5) << 30, at = uint64_t(1) << 40, from = uint64_t(1) << 41;
    const copy_items items = {{reinterpret_cast<char *>(from), reinterpret_cast<char *>(at), large},
                              {nullptr, reinterpret_cast<char *>(at + large), 10}};
    const kvprim_copy_desc d = {items.data(), items.size(), 0};
    kvpc_unpack_job job = {};
    job.list = kvpc_list_of(&d);
    kvpc_survey(&job, false);
    kvpc_survey(&job, true);
    uint64_t sum = 0, count = 2;
    for (const kvpc_fragment *one = kvpc_take(&job, &count); count > 0; count = 2, one = kvpc_take(&job, &count))
        for (uint64_t i = 0; i < count; sum += one[i++].bytes)
            CHECK(one[i].src == (sum < large ? from + sum : 0) && one[i].dst == at + sum);
    CHECK(job.zeros && sum == large + 10);
}

static void test_zeros_beside_copies()
{
    zeros_beside_copy(uint64_t(5) << 30);
    zeros_beside_copy(1 << 26);
    copy_beside_zeros();
}

static void test_copy_lengths()
{
    for (size_t bytes = 0; bytes <= 300; bytes = quick ? next_length(bytes) : bytes + 1)
        one_copy_length(&memory, bytes, bytes % 2 != 0);
}

/* Addresses take the bits in which they differ: what all of them share, about half, is not stored. */
static void test_copy_launches()
{
    const uintptr_t low = reinterpret_cast<uintptr_t>(memory.device), high = low + memory.capacity;
    const batch_case c = {4000, 700, EVEN, SHUFFLED, SHUFFLED, 1, 3, 0, 1};
    noted.clear();
    one_copy_batch(&memory, &c, NO_ZEROS);
    if ((low ^ high) >> 32 == 0)
        CHECK(noted.size() == 1 && noted[0].record_bytes <= 8 && !noted[0].apart);
}

/* Fragments of so many strips each, and the table of them, in as much memory as kvpc_fragments_in gives it. */
static void one_table(const std::vector<uint32_t> &tiles)
{
    const uint32_t count = uint32_t(tiles.size());
    const size_t room = count + count / kvpc_table_share + 2;
    uint32_t *const data = static_cast<uint32_t *>(malloc(room * sizeof *data));
    kvpc_unpack h = {};
    h.count = h.table = count;
    for (uint32_t i = 0; data && i < count; h.strips += tiles[i++])
        data[i] = h.strips;
    kvpc_store_table(&h, data);
    const uint32_t places = uint32_t((h.strips + (uint64_t(1) << h.table_shift) - 1) >> h.table_shift);
    CHECK(h.table + places < room && data[h.table + places] == count - 1);
    for (uint32_t k = 0, i = 0; k < places; k++) {
        while (i + 1 < count && data[i + 1] <= k << h.table_shift)
            i++;
        if (data[h.table + k] != i)
            fail("table of %u fragments, %u strips: number %u is %u, not %u", count, h.strips, k, data[h.table + k], i);
    }
    free(data);
}

/* Empty fragments at every place, and as many tiles as there may be. */
static void test_unpack_tables()
{
    const uint32_t most = (1u << 30) - 1;
    for (uint32_t bits = 0; bits < 1 << 17; bits++) {
        std::vector<uint32_t> tiles(1 + bits % 17);
        for (size_t i = 0; i < tiles.size(); i++)
            tiles[i] = (bits >> i & 1) * (1 + bits % 3 * 40);
        one_table(tiles);
    }
    for (unsigned n = 0; n < 2000; n++) {
        std::vector<uint32_t> tiles(1 + below(n % 20 ? 60 : 5000));
        for (uint32_t &t : tiles)
            t = n % 4 == 0 ? most / uint32_t(tiles.size()) : chance(3) ? 0 : uint32_t(below(200));
        tiles[below(tiles.size())] += n % 8 == 0 ? 1u << 23 : 0;
        one_table(tiles);
    }
}

#if !defined(_WIN32)
/* Returns memory that is reserved but hardly touched, or NULL, which skips the test. */
static unsigned char *reserve_addresses(uint64_t bytes)
{
    void *const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED)
        return static_cast<unsigned char *>(p);
    skip("%llu bytes of addresses cannot be reserved", print_u64(bytes));
    return nullptr;
}

/* The same until the block's end. */
struct addresses {
    unsigned char *const p;
    const uint64_t bytes;

    explicit addresses(uint64_t n) : p(reserve_addresses(n)), bytes(n)
    {
    }
    addresses(const addresses &) = delete;
    ~addresses()
    {
        if (p)
            munmap(p, bytes);
    }
};

static void one_large_table(int64_t row_bytes, void (*move)(const large_move *, int64_t))
{
    const addresses table(uint64_t(large_rows * row_bytes));
    if (!table.p)
        return;
    alignas(16) unsigned char input[large_count * large_row_most], output[large_count * large_row_most];
    int64_t slots[large_count];
    uint32_t rejected = 0;
    fill(input, sizeof input);
    memset(output, 0, sizeof output);
    memcpy(slots, large_slots, sizeof slots);
    const large_move m = {table.p, input, output, slots, &rejected};
    move(&m, row_bytes);
    CHECK(rejected == 2 * large_past);
    for (int i = 0; i < large_count; i++)
        check_large_row(i, row_bytes, input, output,
                        in_large_table(i) ? m.table + large_slots[i] * row_bytes : nullptr);
}

static void test_large_table()
{
    for (const int64_t row_bytes : {3, 16}) {
        one_large_table(row_bytes, large_store_and_gather);
        one_large_table(row_bytes, large_transfers);
    }
}

/* Takes more than 2^32 threads, of which only the last block runs. All indices are 0. */
static void one_long_gather(int64_t row_bytes)
{
    const int64_t count = (int64_t(1) << 29) + 1;
    const addresses dst(uint64_t(count * row_bytes)), index(uint64_t(count) * 4);
    if (!dst.p || !index.p)
        return;
    alignas(16) unsigned char row[16];
    fill(row, sizeof row);
    const kvprim_gather_desc d =
        gather_of(table_of(dst.p, count), table_of(row, 1), row_bytes, index.p, KVPRIM_I32, 0, count, nullptr);
    kvprim_emulate_last_only = true;
    CHECK(kvprim_cuda_gather(&d, nullptr) == KVPRIM_OK);
    kvprim_emulate_last_only = false;
    CHECK(memcmp(dst.p + (count - 1) * row_bytes, row, size_t(row_bytes)) == 0);
}

static void test_long_gathers()
{
    one_long_gather(4);
    one_long_gather(16);
}

/* More blocks of rows than CUDA takes in one dimension, of which only the last one runs: half of the last row. All
   indices are 0. */
static void test_many_blocks()
{
    const int64_t row_bytes = 8192, half = row_bytes / 2, count = 65 * kvpc_grid_rows;
    const addresses dst(uint64_t(count * row_bytes)), index(uint64_t(count) * 4);
    alignas(16) static unsigned char row[row_bytes];
    if (!dst.p || !index.p)
        return;
    unsigned char *const last = dst.p + (count - 1) * row_bytes;
    fill(row, sizeof row);
    const kvprim_gather_desc d =
        gather_of(table_of(dst.p, count), table_of(row, 1), row_bytes, index.p, KVPRIM_I32, 0, count, nullptr);
    kvprim_emulate_last_only = true;
    CHECK(kvprim_cuda_gather(&d, nullptr) == KVPRIM_OK && gridDim.y == kvpc_grid_rows && gridDim.z == 65);
    kvprim_emulate_last_only = false;
    CHECK(memcmp(last + half, row + half, size_t(half)) == 0);
    CHECK(std::count(last, last + half, 0) == half);
}

/* More tokens than int32 counts can count: the last ones have no request. Only the last block runs, whose tokens lie all
   over the array. */
static void test_many_tokens()
{
    const int64_t threads = int64_t(kvpc_slots_most_blocks) * 2 * kvpc_slots_threads;
    const int64_t count = (int64_t(1) << 31) + threads;
    const addresses slot(uint64_t(count) * 8);
    const int32_t page = 1, lengths[] = {INT32_MIN, INT32_MAX};
    uint32_t rejected = 0, want_rejected = 0;
    kvprim_slots_desc d = {};
    if (!slot.p)
        return;
    d.pages = &page, d.pages_type = KVPRIM_I32, d.cu_seqlens = lengths, d.token_type = KVPRIM_I32;
    d.requests = d.max_pages = 1, d.page_rows = int64_t(1) << 40, d.rows = int64_t(1) << 42;
    d.slot = slot.p, d.slot_type = KVPRIM_I64, d.count = count, d.rejected = &rejected;
    kvprim_emulate_last_only = true;
    CHECK(kvprim_cuda_slots(&d, nullptr) == KVPRIM_OK && gridDim.x == kvpc_slots_most_blocks);
    kvprim_emulate_last_only = false;
    for (int64_t end = threads; end <= count; end += threads)
        for (int64_t i = end - 2 * kvpc_slots_threads; i < end; i++) {
            const int64_t want = i < INT32_MAX ? d.page_rows + i - INT32_MIN : -1;
            want_rejected += want < 0;
            if (reinterpret_cast<const int64_t *>(slot.p)[i] != want)
                fail("token %lld has slot %lld", print_i64(i), print_i64(reinterpret_cast<const int64_t *>(slot.p)[i]));
        }
    CHECK(rejected == want_rejected && rejected == 1 + 2 * kvpc_slots_threads);
}

/* Four moves of 2^30 chunks each, which 31 bits count, but not the chunks of two: each takes a launch. Only the last
   block of each runs. */
static void test_long_moves()
{
    enum { moves = 4, layers = 32 };
    const int64_t count = 1 << 25;
    const uint64_t each = uint64_t(count * layers);
    const addresses index(uint64_t(count) * 4), all_dst(10 * each); /* 1 + 2 + 3 + 4 bytes a row */
    alignas(16) unsigned char row[16];
    unsigned char *dst = all_dst.p;
    void *same[layers]; /* of all sources */
    kvprim_move all[moves];
    if (!index.p || !dst)
        return;
    fill(row, sizeof row);
    for (void *&layer : same)
        layer = row;
    for (int64_t n = 0; n < moves; dst += uint64_t(++n) * each) {
        kvprim_transfer_desc d = transfer_of(table_of(dst, count), table_of(nullptr, 1), n + 1, count);
        d.src_layers = same, d.layers = layers, d.src_index = index.p;
        CHECK(kvprim_transfer_moves(&d, &all[n]) == KVPRIM_OK);
    }
    kvprim_emulate_last_only = true;
    const unsigned launches = kvprim_emulate_launches;
    CHECK(kvprim_cuda_move(all, moves, nullptr) == KVPRIM_OK && kvprim_emulate_launches - launches == moves);
    kvprim_emulate_last_only = false;
    CHECK(memcmp(dst - moves, row, moves) == 0);
}

/* A table of more than 2^31 rows, whose numbers take two words; and more than 2^31 chunks, of which the last block's
   move. */
static void test_long_lists()
{
    enum { layers = 64 };
    const int64_t rows = (int64_t(1) << 31) + 1000, count = 1 << 25;
    const int64_t index[] = {rows - 1, int64_t(1) << 31, 4, rows, -1, INT64_MAX, INT64_MIN};
    const addresses table(static_cast<uint64_t>(rows)), zeros(uint64_t(count) * 4);
    alignas(16) unsigned char input[16];
    uint32_t rejected = 0;
    void *to[layers], *from[layers];
    if (!table.p || !zeros.p)
        return;
    fill(input, sizeof input);
    kvprim_transfer_desc d = transfer_of(table_of(table.p, rows), table_of(input, 7), 1, 7);
    d.dst_index = index, d.index_type = KVPRIM_I64, d.host_index = 1, d.rejected = &rejected;
    CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK && rejected == 2);
    for (int i = 0; i < 3; i++)
        CHECK(table.p[index[i]] == input[i]);
    for (int l = 0; l < layers; l++)
        to[l] = table.p + l * count, from[l] = input;
    d.dst = table_of(nullptr, count), d.src = table_of(nullptr, 7);
    d.dst_device_layers = to, d.src_device_layers = from, d.layers = layers, d.count = count;
    d.dst_index = nullptr, d.src_index = zeros.p, d.index_type = KVPRIM_I32, d.host_index = 0;
    table.p[count * layers - 1] = static_cast<unsigned char>(~input[0]);
    kvprim_emulate_last_only = true;
    CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK);
    kvprim_emulate_last_only = false;
    CHECK(table.p[count * layers - 1] == input[0]);
}

/* More than 2^31 rows in pages: rows are divided in 64 bits. */
static void test_many_pages()
{
    const int64_t rows = (int64_t(1) << 31) + 1000, index[] = {rows - 1, int64_t(1) << 31, 4, rows};
    const addresses table(uint64_t(rows) * 4 / 3 + 8);
    unsigned char input[4], output[4];
    if (!table.p)
        return;
    fill(input, sizeof input);
    kvprim_table cache = paged_table(table.p, rows, 3, 4);
    cache.stride = 1;
    const kvprim_store_desc store = store_of(cache, table_of(input, 4), 1, index, KVPRIM_I64, 4, nullptr);
    const kvprim_gather_desc gather = gather_of(table_of(output, 4), cache, 1, index, KVPRIM_I64, 0, 4, nullptr);
    CHECK(kvprim_cuda_store(&store, nullptr) == KVPRIM_OK);
    for (int i = 0; i < 3; i++)
        CHECK(*static_cast<unsigned char *>(kvprim_table_row(&cache, index[i])) == input[i]);
    CHECK(kvprim_cuda_gather(&gather, nullptr) == KVPRIM_OK);
    CHECK(memcmp(input, output, 3) == 0 && output[3] == 0);
}

/* The bytes around a fragment are zero before and after. */
static void one_far_batch(const far_case *c)
{
    const std::vector<kvprim_fragment> f = far_fragments(c);
    const addresses src(far_bytes), dst(far_bytes);
    if (!src.p || !dst.p)
        return;
    for (const kvprim_fragment &one : f)
        fill(src.p + one.src_offset, one.bytes);
    unpack_far(c, f, dst.p, src.p, nullptr);
    for (const kvprim_fragment &one : f)
        if (memcmp(dst.p + one.dst_offset, src.p + one.src_offset, one.bytes) != 0 ||
            dst.p[one.dst_offset + one.bytes] || (one.dst_offset && dst.p[one.dst_offset - 1]))
            fail("%s: fragment %zu is wrong", current, size_t(&one - f.data()));
}

static void test_far_fragments()
{
    for (const far_case &c : far_cases)
        if (c.bytes < 1 << 20) /* longer ones are for a GPU */
            one_far_batch(&c);
}
#include "test_edges.h"
#endif

/* ---- descriptors that the kernel reads ---- */

/* Descriptors of the host: more ranges, of 128. No thread waits, as no launch is a dependent one. */
static void test_host_metas()
{
    const unsigned waits = kvprim_emulate_waits;
    kvprim_emulate_link = kvprim_emulate_pdl = true;
    small_metas(&memory);
    kvprim_emulate_link = kvprim_emulate_pdl = false;
    CHECK(kvprim_emulate_waits == waits);
}

/* However large max_sms is, and the buffers are said to be, the warps of all blocks have numbers of 32 bits. */
static void test_meta_blocks()
{
    kvprim_unpack_meta_desc d = {};
    kvpc_call call = {};
    d.max_count = 1, d.src_bytes = d.dst_bytes = UINT64_MAX / 2;
    for (call.launch.max_sms = INT32_MAX; call.launch.max_sms; call.launch.max_sms /= 2) {
        const uint32_t blocks = kvpc_meta_grid(&call, &d, kvpc_meta_threads, false);
        CHECK(blocks > 0 && blocks <= uint32_t(call.launch.max_sms) && blocks <= UINT32_MAX / kvpc_meta_threads);
    }
}

/* The message names what is out of reach. */
static void test_meta_reach()
{
    alignas(16) kvprim_unpack_meta_item meta = {0, 0, 0};
    uint64_t count = 0;
    kvprim_unpack_meta_desc d = {};
    d.meta = &meta, d.count = &count, d.max_count = 1;
    CHECK(kvprim_cuda_unpack_meta(&d, nullptr) == KVPRIM_OK);
    kvprim_emulate_pageable = &count;
    CHECK_ERROR(kvprim_cuda_unpack_meta(&d, nullptr), KVPRIM_ERROR_ARGUMENT, "kvprim_cuda_unpack_meta: count (");
    kvprim_emulate_pageable = &meta;
    CHECK_ERROR(kvprim_cuda_unpack_meta(&d, nullptr), KVPRIM_ERROR_ARGUMENT, "is ordinary host memory");
    kvprim_emulate_pageable = nullptr;
}

/* ---- fetch ---- */

static unsigned char *fetch_memory(size_t bytes)
{
    return allocate_aligned(bytes);
}

static void fetch_release(unsigned char *p)
{
    free(p);
}

static void fetch_wait()
{
}

/* A plan alone, and a reset. */
static void test_fetch_reach()
{
    alignas(16) static char set_memory[2048];
    static int32_t wanted, rows, plan[2];
    static const int32_t state = 0;
    kvprim_fetch_desc d = {};
    d.set.memory = set_memory, d.set.bytes = sizeof set_memory;
    d.set.states = 1, d.set.hot_rows = 3, d.set.tokens = 8, d.set.entries = 1;
    d.count = 1, d.state = &state, d.state_type = d.wanted_type = KVPRIM_I32, d.wanted = &wanted, d.top_k = 1;
    d.rows = &rows, d.host_rows = 8, d.plan_src = &plan[0], d.plan_dst = &plan[1];
    CHECK(kvprim_cuda_fetch_reset(&d.set, -1, nullptr) == KVPRIM_OK && kvprim_cuda_fetch(&d, nullptr) == KVPRIM_OK);
    kvprim_emulate_pageable = set_memory;
    CHECK_ERROR(kvprim_cuda_fetch(&d, nullptr), KVPRIM_ERROR_ARGUMENT, "kvprim_cuda_fetch: set.memory (");
    CHECK_ERROR(kvprim_cuda_fetch_reset(&d.set, -1, nullptr), KVPRIM_ERROR_ARGUMENT, "is ordinary host memory");
    kvprim_emulate_pageable = nullptr;
}

/* ---- moves that convert ---- */

static void test_convert()
{
    static const int64_t counts[] = {1, 33, 1000, 9000};
    convert_several(&memory);
    convert_counts(&memory, counts, quick ? 3 : 4);
    for (const uint32_t multiprocessors : {1, 7, 132}) { /* with more, blocks of tiles are smaller, with idle threads */
        kvprim_emulate_multiprocessors = multiprocessors;
        convert_choices(&memory);
    }
    kvprim_emulate_multiprocessors = 1;
}

/* Everything here runs nine times (quick: three times), so with fewer cases each time than in the tests before. */
static void test_convert_options()
{
    kvprim_cuda_launch launch = {};
    const auto usual = thin;
    thin *= 4;
    memory.launch = &launch;
    for (launch.max_sms = 0; launch.max_sms <= 3; launch.max_sms += quick ? 3 : 1)
        for (launch.pdl = quick && launch.max_sms; launch.pdl < 2; launch.pdl += quick ? 2 : 1) {
            const unsigned early = kvprim_emulate_early;
            kvprim_emulate_pdl = true;
            convert_matrix(&memory);
            convert_moves(&memory);
            convert_presets(&memory);
            CHECK(kvprim_emulate_early == early);
        }
    launch = {};
    kvprim_emulate_link = true;
    convert_matrix(&memory);
    convert_transfers(&memory);
    kvprim_emulate_pdl = kvprim_emulate_link = false;
    memory.launch = nullptr;
    thin = usual;
}

#if !defined(_WIN32)
/* More than 2^31 rows: all numbers have 64 bits. */
static void test_long_converts()
{
    const int64_t rows = (int64_t(1) << 31) + 1000, index[] = {rows - 1, int64_t(1) << 31, 4, rows};
    const addresses table(uint64_t(rows) * 4 / 3 + 8);
    const float input[] = {3, -120.4f, 77.5f, 5};
    static const int8_t stored[] = {3, -120, 78};
    float output[4];
    uint32_t rejected = 0;
    if (!table.p)
        return;
    kvprim_table cache = paged_table(table.p, rows, 3, 4), rows_in = table_of(const_cast<float *>(input), 4);
    kvprim_table rows_out = table_of(output, 4);
    const kvprim_format int8 = format_of(KVPRIM_INT8), f32 = format_of(KVPRIM_F32);
    cache.stride = 1, cache.format = &int8, rows_in.format = rows_out.format = &f32;
    const kvprim_store_desc store = store_of(cache, rows_in, 4, index, KVPRIM_I64, 4, &rejected);
    const kvprim_gather_desc gather = gather_of(rows_out, cache, 1, index, KVPRIM_I64, 0, 4, &rejected);
    CHECK(kvprim_cuda_store(&store, nullptr) == KVPRIM_OK && rejected == 1);
    for (int i = 0; i < 3; i++)
        CHECK(*static_cast<int8_t *>(kvprim_table_row(&cache, index[i])) == stored[i]);
    CHECK(kvprim_cuda_gather(&gather, nullptr) == KVPRIM_OK && rejected == 2);
    for (int i = 0; i < 4; i++)
        CHECK(output[i] == float(i < 3 ? stored[i] : 0));
}
#endif

/* The tests before this one launch every kernel of moves that convert but are no plain rows. */
static void test_convert_kernels()
{
    CHECK(ran(kvpc_convert_kernel<uint32_t, kvpc_convert_threads, false>));
    CHECK(ran(kvpc_convert_kernel<uint64_t, kvpc_convert_wide_threads, true>));
    CHECK(moved_apart && ran(kvpc_convert_few_kernel<KVPRIM_BF16>) && ran(kvpc_convert_few_kernel<KVPRIM_F16>));
    CHECK(ran(kvpc_convert_tiles_kernel<KVPRIM_BF16, kvpc_4_bits, 2>));
    CHECK(ran(kvpc_convert_tiles_kernel<KVPRIM_F16, kvpc_4_bits, 2>));
    CHECK(ran(kvpc_convert_gather_kernel<KVPRIM_BF16, kvpc_4_bits, 2>));
    CHECK(ran(kvpc_convert_gather_kernel<KVPRIM_F16, kvpc_4_bits, 2>));
#if !defined(_WIN32)
    CHECK(ran(kvpc_convert_kernel<uint64_t, kvpc_convert_wide_threads, false>));
#endif
}

int main(int argc, char **argv)
{
#ifdef WITH_ASAN
    __sanitizer_set_death_callback(say_where);
#else
    printf("built without AddressSanitizer: accesses out of bounds that change nothing go unseen\n");
#endif
    const bool all = argc == 2 && strcmp(argv[1], "all") == 0;
    quick = argc == 2 && strcmp(argv[1], "quick") == 0;
    if (argc > 2 || (argc == 2 && !all && !quick)) {
        fprintf(stderr, "usage: %s [quick|all]\n", argv[0]);
        return 2;
    }
    thin = all ? 1 : quick ? 31 : 3;
    small_bytes = quick ? 1 << 16 : 1 << 20;
    fuzz_rounds = quick ? 1000 : 6000;
    most.counts = quick ? 1 << 17 : 4 << 20, most.moves = quick ? 30 : 200;
    most.batches = quick ? 100000 : 700000, most.copies = quick ? 30000 : 300000,
    most.metas = quick ? 1 << 16 : 1 << 20;
    most.meta_step = quick ? 400 : 30, most.random_metas = fuzz_rounds / 20;
    memory.capacity = 24 << 20;
    memory.expected = allocate_aligned(memory.capacity);
    memory.got = memory.device = allocate_aligned(memory.capacity);
#define emulated(name, ...) run("emulated: " name, __VA_ARGS__)
#define both emulated
#define both_long emulated
#define sampled emulated
#define on_gpu(name, ...)
#define on_gpu_sampled(name, ...)
#define on_gpu_long(name, ...)
#define only_sampled(name, ...)
#include "test_list.h"
    return finish();
}

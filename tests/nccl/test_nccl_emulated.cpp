/* SPDX-License-Identifier: MIT */
/* Runs the kernels of kvprim_nccl.h on the CPU. Each rank has a thread, which runs the GPU threads of a call one after
   the other. Calls have random kinds, sizes and alignments, and ranks run ahead of each other as they like.
   ThreadSanitizer sees whether ranks share anything except the words of slots.

       c++ -std=c++17 -O1 -g -fsanitize=thread -I. tests/nccl/test_nccl_emulated.cpp && ./a.out [quick] */
#include "nccl_emulated.h"
#include <algorithm>
#include "reductions.h"

enum { blocks = 3, block_slots = 48, most_bytes = blocks * block_slots * 16, most_pipeline_bytes = 4 * most_bytes };
const uint32_t slots_of_sender = blocks * block_slots;
const bool stores_aside = false;

enum kind {
    one_shot,
    two_shot,
    scatter,
    gather,
    parts,
    parts_many,
    parts_most,
    gather_many, /* these two only among more than two ranks, which take parts_many and parts_most */
    gather_most,
    pipeline, /* these only between two ranks; among more, two shots and scatter */
    pipeline_scatter,
    kinds
};

/* Which parts an exchange has: the same of all; the same of all from one place, as all_gather has them; the same from
   a rank to all others, as all_gatherv has them; different ones, half of them whole packs; none from and none to one
   rank; none except those that stay. */
enum shape { equal, gathered, to_all, different, whole_packs, one_silent, only_own, shapes };

/* A call. Every rank derives it from its number alone; only places differ by rank. */
struct call {
    kind what;
    uint64_t number;
    size_t element, count, pitch; /* pitch: bytes from a rank's part to the next one's */
    uint32_t threads, roles, block_packs, used_blocks;
    shape parts_shape; /* of an exchange, whose count is the most bytes of a part */
    kvprim_dtype type; /* of a reduction, as op is */
    kvprim_op op;
};

static bool is_pipeline(kind what)
{
    return what == pipeline || what == pipeline_scatter;
}

static bool scatters(kind what)
{
    return what == scatter || what == pipeline_scatter;
}

/* Every part of a rank is what it passes to the call. */
static bool gathers(shape parts)
{
    return parts == gathered || parts == to_all;
}

static bool exchanges(kind what)
{
    return what >= gather && what <= gather_most;
}

/* 8 bytes go to a slot. */
static bool is_few(kind what)
{
    return what == gather || what == parts;
}

/* How many bytes rank `from` sends to rank `to`. With groups, a part that stays may be larger than the slots. */
static size_t part_of(const call &c, uint32_t from, uint32_t to)
{
    const uint64_t h = hash_u64(c.number * 97 + from * 8 + (c.parts_shape == to_all ? 0 : to));
    const uint32_t silent = c.number % 3;
    if (c.parts_shape == equal || c.parts_shape == gathered)
        return c.count;
    if (c.parts_shape == only_own && from != to)
        return 0;
    if (c.parts_shape == one_silent && (from == silent || to == silent))
        return 0;
    const bool own = from == to && c.parts_shape != to_all && !is_few(c.what);
    const size_t most = own && h >> 60 == 0 ? 3 * most_bytes : c.count;
    const size_t bytes = h % 4 == 0 ? 0 : h % 4 == 1 ? most : h / 4 % (most + 1);
    return c.parts_shape == whole_packs ? bytes / 16 * 16 : bytes;
}

static call exchange_of(call c, uint64_t h, uint32_t world)
{
    const size_t unit = is_few(c.what) ? 8 : 16, most = is_few(c.what) ? most_bytes / 2 : most_bytes;
    size_t largest = 0;
    c.element = 1, c.parts_shape = static_cast<shape>(h / 16 % shapes);
    if (c.what == gather || c.what >= gather_many)
        c.parts_shape = c.what == gather || h / 16 % 2 ? gathered : to_all;
    c.count = 1 + (h >> 8) % (h >> 40 & 1 ? most : 40);
    if (h >> 41 & 1)
        c.count = std::min(most, c.count + 15) / 16 * 16;
    for (uint32_t from = 0; from < world; from++)
        for (uint32_t to = 0; to < world; to++)
            largest = std::max(largest, from == to && !is_few(c.what) ? 0 : part_of(c, from, to));
    uint32_t slice = std::max(1u, static_cast<uint32_t>((largest + unit - 1) / unit));
    slice += h >> 42 & 1 && c.what != gather ? static_cast<uint32_t>(h >> 43) % (slots_of_sender - slice + 1)
                                             : 0; /* a large part that stays */
    const uint32_t least = (slice + blocks - 1) / blocks;
    c.block_packs = least + static_cast<uint32_t>(h >> 48) % (block_slots - least + 1);
    c.used_blocks = (slice + c.block_packs - 1) / c.block_packs;
    c.threads = 1 + static_cast<uint32_t>(h >> 56) % (is_few(c.what) ? 8 : 4);
    c.roles = c.what == gather ? 1 : c.what == parts ? world - 1 : c.what >= gather_many ? world : 2 * (world - 1);
    c.pitch = slice;
    return c;
}

static call call_of(uint64_t number, uint32_t world)
{
    call c = {};
    const uint64_t h = hash_u64(number);
    c.number = number;
    c.what = static_cast<kind>(h % kinds);
    if (is_pipeline(c.what) && world != 2)
        c.what = c.what == pipeline ? two_shot : scatter;
    if (world == 2 && (c.what == gather_many || c.what == gather_most))
        c.what = c.what == gather_many ? parts_many : parts_most;
    if (exchanges(c.what))
        return exchange_of(c, h, world);
    static const kvprim_dtype types[] = {KVPRIM_F32, KVPRIM_BF16, KVPRIM_F8E4M3, KVPRIM_F8E5M2};
    static const kvprim_op ops[] = {KVPRIM_SUM, KVPRIM_SUM, KVPRIM_AVG, KVPRIM_MAX, KVPRIM_MIN};
    c.type = types[hash_u64(h) % 4], c.op = ops[hash_u64(h) / 4 % 5];
    c.element = static_cast<size_t>(format_of(c.type).bytes);
    const size_t most = static_cast<size_t>(c.what == two_shot    ? most_bytes * static_cast<int>(world)
                                            : is_pipeline(c.what) ? static_cast<int>(most_pipeline_bytes)
                                                                  : static_cast<int>(most_bytes)) /
                        c.element;
    c.count = 1 + (h >> 8) % (h >> 40 & 1 ? most : 40);
    if (h >> 41 & 1) /* only whole packs */
        c.count = std::min(most, c.count + 15) / (16 / c.element) * (16 / c.element);
    c.pitch = c.count * c.element + (h >> 42) % 3 * 4;
    const uint32_t words = static_cast<uint32_t>((c.count * c.element + 15) / 16);
    const uint32_t slice = c.what == two_shot ? (words + world - 1) / world : words;
    const uint32_t least =
        std::min((slice + blocks - 1) / blocks, static_cast<uint32_t>(block_slots)); /* a pipeline's is more */
    c.block_packs = least + static_cast<uint32_t>(h >> 48) % (block_slots - least + 1);
    c.used_blocks = (slice + c.block_packs - 1) / c.block_packs;
    c.threads = 1 + static_cast<uint32_t>(h >> 56) % 8;
    if (is_pipeline(c.what)) { /* blocks take packs in turn, and there are slots for 6 threads, or twice for 3 */
        c.threads = 1 + static_cast<uint32_t>(h >> 56) % 6;
        c.used_blocks = std::min(1 + static_cast<uint32_t>(h >> 48) % blocks, (slice + c.threads - 1) / c.threads);
        c.block_packs = c.used_blocks * c.threads;
    }
    c.roles = 1;
    return c;
}

/* Byte b of what a rank passes to a call. Many words are all ones, zeros of either sign, or subnormal. */
static unsigned char input_byte(const call &c, uint32_t rank, size_t b)
{
    const uint64_t h = hash_u64(c.number * 1000003 + (b / 4) * 17 + rank);
    const unsigned char any = static_cast<unsigned char>(hash_u64(h + b));
    const bool last = b % c.element == c.element - 1; /* the sign and, except in fp8, seven bits of the exponent */
    switch (h % 16) {
    case 0:
    case 1:
        return 0xff;
    case 2:
    case 3:
        return last ? any & 0x80 : 0;
    case 4:
        return last ? any & 0x80 : any;
    default:
        return any;
    }
}

/* Where a rank's part for, or from, each rank begins; [world]: where the last one ends. */
static std::vector<size_t> begins_of(const call &c, uint32_t world, uint32_t rank, bool sends)
{
    std::vector<size_t> begins(world + 1);
    for (uint32_t r = 0; r < world; r++)
        begins[r + 1] = begins[r] + (sends ? part_of(c, rank, r) : part_of(c, r, rank));
    if (sends && gathers(c.parts_shape))
        begins.assign(world, 0), begins.push_back(part_of(c, rank, 0));
    return begins;
}

static bool has_all_parts(const call &c, uint32_t world, uint32_t rank, const unsigned char *got)
{
    const std::vector<size_t> at = begins_of(c, world, rank, false);
    for (uint32_t from = 0; from < world; from++) {
        const size_t first = begins_of(c, world, from, true)[rank];
        for (size_t b = 0; b < at[from + 1] - at[from]; b++)
            if (got[at[from] + b] != input_byte(c, from, first + b))
                return false;
    }
    return true;
}

static bool is_right(const call &c, uint32_t world, uint32_t rank, const unsigned char *got)
{
    if (exchanges(c.what))
        return has_all_parts(c, world, rank, got);
    const float_format f = format_of(c.type);
    for (size_t e = 0; e < c.count; e++) {
        uint32_t in[8] = {}, is = 0;
        const size_t at = e * c.element, first = (scatters(c.what) ? rank * c.pitch : 0) + at;
        for (uint32_t r = 0; r < world; r++)
            for (size_t b = 0; b < c.element; b++)
                in[r] |= static_cast<uint32_t>(input_byte(c, r, first + b)) << 8 * b;
        memcpy(&is, got + at, c.element);
        const uint32_t expected = reduced_bits(f, c.op, in, static_cast<int>(world));
        if (is != expected && !(float_is_nan(f, is) && float_is_nan(f, expected)))
            return false;
    }
    return true;
}

/* A thread's turn before it takes the block's turn: with it, slots are out of reach. */
static const uint32_t no_turn = 1 << 20;

static void end_turns(const kvpn_params &p, const std::vector<kvpn_thread> &threads)
{
    for (const kvpn_thread &me : threads)
        if (me.thread == 0 && me.role == 0) {
            CHECK(me.turn <= 1);
            p.turn[me.block] = me.turn ^ 1;
        }
}

template <class Way, class Params> static void run_kernel(const Params &p, const call &c)
{
    std::vector<kvpn_thread> threads;
    for (uint32_t b = 0; b < c.used_blocks; b++)
        for (uint32_t t = 0; t < c.threads * c.roles; t++)
            threads.push_back({b, t / c.threads, t % c.threads, c.threads, no_turn, 0, 0, 0, 0});
    for (running = 0; running < threads.size(); running++)
        Way::begin(p, threads[running]);
    if (!Way::turn_last)
        end_turns(p, threads);
    for (running = 0; running < threads.size(); running++)
        Way::complete(p, threads[running]);
    for (const kvpn_thread &me : threads)
        if (me.stop_reason != 0)
            kvpn_stop_rank(p, me);
    if (Way::turn_last)
        end_turns(p, threads);
    end_kernel();
}

template <class T, int max_ranks> static void run_reduction(const kvpn_params &p, const call &c)
{
    if constexpr (max_ranks == 2) {
        if (is_pipeline(c.what))
            return run_kernel<kvpn_pipeline<T, 2>>(p, c);
    }
    if (c.what == two_shot || kvpn_reduction<T, max_ranks>::is_any)
        run_kernel<kvpn_two_shot<T, max_ranks>>(p, c);
    else if (c.what == one_shot)
        run_kernel<kvpn_one_shot<T, max_ranks>>(p, c);
    else
        run_kernel<kvpn_scatter<T, max_ranks>>(p, c);
}

template <int max_ranks> static void run_call(const kvpn_params &p, const call &c, bool whole)
{
    if (whole && c.type == KVPRIM_F32 && c.op == KVPRIM_SUM)
        run_reduction<kvpn_f32, max_ranks>(p, c);
    else if (whole && c.type == KVPRIM_BF16 && c.op == KVPRIM_SUM)
        run_reduction<kvpn_bf16, max_ranks>(p, c);
    else
        whole ? run_reduction<kvpn_any<true>, max_ranks>(p, c) : run_reduction<kvpn_any<false>, max_ranks>(p, c);
}

template <bool whole> static void run_exchange(const kvpn_parts_params &p, const call &c)
{
    if (c.what == parts && p.world == 2)
        run_kernel<kvpn_parts_slots<true, whole>>(p, c);
    else if (c.what == parts)
        run_kernel<kvpn_parts_slots<false, whole>>(p, c);
    else if (c.what == parts_many)
        run_kernel<kvpn_parts_groups<kvpn_group, false, whole>>(p, c);
    else if (c.what == parts_most)
        run_kernel<kvpn_parts_groups<kvpn_large_group, false, whole>>(p, c);
    else if (c.what == gather_many)
        run_kernel<kvpn_parts_groups<kvpn_group, true, whole>>(p, c);
    else
        run_kernel<kvpn_parts_groups<kvpn_large_group, true, whole>>(p, c);
}

/* Where a rank's send and recv lie: in place or apart, aligned or not. */
struct places {
    unsigned char *send, *recv;
    size_t send_bytes, recv_bytes; /* up to the end of the last part */
};

static places places_of(const call &c, uint32_t world, uint32_t rank, unsigned char *a, unsigned char *b)
{
    const uint64_t h = hash_u64(c.number * 31 + rank);
    if (exchanges(c.what)) {
        const std::vector<size_t> sent = begins_of(c, world, rank, true), received = begins_of(c, world, rank, false);
        places p = {a + (h & 2 ? h / 8 % 16 : 0), b + (h & 4 ? h / 128 % 16 : 0), sent[world], received[world]};
        if (h & 1 && gathers(c.parts_shape))
            p.send = p.recv + received[rank];
        return p;
    }
    const size_t bytes = c.count * c.element, parts = (world - 1) * c.pitch + bytes;
    places p = {a + (h & 2 ? h / 8 % 8 * c.element : 0), b + (h & 4 ? h / 64 % 8 * c.element : 0),
                scatters(c.what) ? parts : bytes, bytes};
    if (h & 1)
        p.recv = p.send + (scatters(c.what) ? rank * c.pitch : 0);
    return p;
}

/* all_gather of few bytes takes places and a pitch, not parts. */
template <int max_ranks> static void run_gather(const kvpn_params &shared, const call &c, const places &at)
{
    kvpn_params p = shared;
    p.send = at.send, p.recv = at.recv, p.count = p.pitch = c.count;
    p.packs = p.slice_packs = static_cast<uint32_t>(c.pitch);
    if ((reinterpret_cast<uintptr_t>(at.send) | reinterpret_cast<uintptr_t>(at.recv) | c.count) % 8 == 0)
        run_kernel<kvpn_gather_all<kvpn_any<true>, max_ranks>>(p, c);
    else
        run_kernel<kvpn_gather_all<kvpn_any<false>, max_ranks>>(p, c);
}

static void run_parts(job &j, uint32_t rank, const call &c, const places &at, const kvpn_params &shared)
{
    const std::vector<size_t> to = begins_of(c, j.world, rank, true), from = begins_of(c, j.world, rank, false);
    kvpn_parts_params p = {};
    static_cast<kvpn_params &>(p) = shared;
    p.slice_packs = static_cast<uint32_t>(c.pitch), p.blocks = c.used_blocks;
    const size_t unit = is_few(c.what) ? 8 : 16;
    bool whole = true;
    for (uint32_t k = 0; k < j.world; k++) {
        const uint32_t peer = (rank + k) % j.world;
        p.parts[k].to = {reinterpret_cast<char *>(at.send) + to[peer], static_cast<uint32_t>(part_of(c, rank, peer))};
        p.parts[k].from = {reinterpret_cast<char *>(at.recv) + from[peer],
                           static_cast<uint32_t>(part_of(c, peer, rank))};
        for (const kvpn_part &part : {p.parts[k].to, p.parts[k].from})
            whole = whole && (part.bytes == 0 || (reinterpret_cast<uintptr_t>(part.at) | part.bytes) % unit == 0);
    }
    if (whole)
        run_exchange<true>(p, c);
    else
        run_exchange<false>(p, c);
}

/* The host's part of a call, with this rank's places. Returns whether the result is right. */
template <int max_ranks> static bool one_call(job &j, uint32_t rank, const call &c)
{
    /* room: for parts of 8 ranks, or 2 of most_pipeline_bytes */
    enum { room = (most_bytes + 32) * 12 + 96, guard_bytes = 16 };
    alignas(16) static thread_local unsigned char memory[2][room], before[room];
    const size_t bytes = c.count * c.element;
    const places at = places_of(c, j.world, rank, memory[0], memory[1]);
    kvpn_params p = {};
    memset(at.recv, 0xa5, at.recv_bytes + guard_bytes);
    memset(at.send + at.send_bytes, 0xa5, guard_bytes);
    for (size_t b = 0; b < at.send_bytes; b++)
        at.send[b] = input_byte(c, rank, b);
    memcpy(before, at.recv, at.recv_bytes + guard_bytes);
    set_ranks(p, j, rank, block_slots);
    p.send = at.send, p.recv = at.recv, p.count = bytes, p.pitch = scatters(c.what) ? c.pitch : 0;
    p.packs = static_cast<uint32_t>((bytes + 15) / 16);
    p.what = c.op == KVPRIM_SUM   ? kvpn_sums
             : c.op == KVPRIM_AVG ? kvpn_averages
             : c.op == KVPRIM_MAX ? kvpn_takes_largest
                                  : kvpn_takes_least;
    p.what |= c.type == KVPRIM_F32      ? kvpn_is_f32
              : c.type == KVPRIM_BF16   ? kvpn_is_bf16
              : c.type == KVPRIM_F8E4M3 ? kvpn_is_e4m3
                                        : kvpn_is_e5m2;
    p.what |= c.what == two_shot ? kvpn_shares : 0;
    p.per_rank = 1.0 / j.world;
    p.signs = c.element == 1 ? 0x80808080 : c.element == 2 ? 0x80008000 : 0x80000000;
    p.slice_packs = c.what == two_shot ? (p.packs + j.world - 1) / j.world : p.packs;
    p.block_packs = c.block_packs;
    if (c.what == gather)
        run_gather<max_ranks>(p, c, at);
    else if (exchanges(c.what))
        run_parts(j, rank, c, at, p);
    else
        run_call<max_ranks>(
            p, c,
            (reinterpret_cast<uintptr_t>(at.send) | reinterpret_cast<uintptr_t>(at.recv) | p.pitch | bytes) % 16 == 0);
    for (size_t b = 0; b < at.recv_bytes + guard_bytes; b++)
        if (b >= at.recv_bytes && at.recv[b] != before[b])
            return false;
    return is_right(c, j.world, rank, at.recv);
}

static bool run_one(job &j, uint32_t rank, uint64_t number)
{
    const call c = call_of(number, j.world);
    return j.world == 2 ? one_call<2>(j, rank, c) : j.world <= 4 ? one_call<4>(j, rank, c) : one_call<8>(j, rank, c);
}

static std::string name_of(uint64_t number, uint32_t world)
{
    const call c = call_of(number, world);
    return "kind " + std::to_string(c.what) + " of " + std::to_string(c.count) + " elements, type " +
           std::to_string(c.type) + ", op " + std::to_string(c.op);
}

static std::vector<uint64_t> queue_of(uint32_t, uint64_t first)
{
    return {first, first + 1, first + 2, first + 3, first + 4, first + 5};
}

/* The first large call of a kind. */
static uint64_t number_of(int what, uint32_t world)
{
    uint64_t number = 5;
    while (call_of(number, world).what != what || call_of(number, world).count < 200)
        number++;
    return number;
}

/* Rank 1 of 2 does not take part in a pipeline. */
static void test_missing_from_pipeline()
{
    for (int what = pipeline; what <= pipeline_scatter; what++) {
        job j = job_of(2, 5000000);
        run_rank(j, 0, number_of(what, 2), 1);
        CHECK(j.stop[0] == (kvpn_stop_timeout | 1 << 16));
        CHECK(page_of(j, 1)[kvpn_stop_reason_word] == j.stop[0]);
    }
}

/* From a call of any kind. */
static void test_missing()
{
    for (int what = 0; what < pipeline; what++)
        expect_missing_named(number_of(what, 3));
}

/* If the host says stop, the rank stops and tells the others. */
static void test_stop()
{
    job j = job_of(2, 10000000000ull);
    j.stop[0] = kvpn_stop_aborted;
    run_rank(j, 0, 5, 1);
    CHECK(j.stop[0] == kvpn_stop_aborted && page_of(j, 1)[kvpn_stop_reason_word] == kvpn_stop_aborted);
}

/* While others may still come, a wait must not read the host's memory. A thousand warps that read it take longer than
   all ordinary waits, which would make this rank the next one that others wait for. */
static void test_short_waits()
{
    job j = job_of(2, 1000000000000ull);
    uint32_t &stop = j.stop[0];
    kvpn_params p = {};
    kvpn_thread waiting = {0, 0, 0, 128, 0, 0, 0, 0, 0}, late = waiting;
    p.turn = page_of(j, 0), p.stop = &stop, p.timeout_ns = j.timeout_ns, p.world = 2;
    p.peer[1] = reinterpret_cast<char *>(page_of(j, 1)) + kvpn_page;
    counted = &stop, reads = 0;
    for (uint32_t n = 1; n < kvpn_polls_per_stop_check; n++)
        CHECK(kvpn_keep_waiting(p, waiting, 1));
    CHECK(reads == 0);
    CHECK(kvpn_keep_waiting(p, waiting, 1) && reads == 1);
    stop = kvpn_stop_aborted;
    for (uint32_t n = 1; n < kvpn_polls_per_stop_check; n++)
        CHECK(kvpn_keep_waiting(p, waiting, 1));
    CHECK(!kvpn_keep_waiting(p, waiting, 1) && reads == 2 && waiting.stopped_first);
    kvpn_stop_rank(p, waiting);
    for (uint32_t n = 1; n < kvpn_polls_per_page_check; n++) /* a thread that waits after that learns of it at once */
        CHECK(kvpn_keep_waiting(p, late, 1));
    CHECK(!kvpn_keep_waiting(p, late, 1) && reads == 2 && !late.stopped_first);
    CHECK(page_of(j, 1)[kvpn_stop_reason_word] == kvpn_stop_aborted);
    counted = nullptr;
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    for (uint32_t world = 2; world <= 8; world++)
        test_world("nccl", world, (quick ? 20 : 300) * (world == 2 ? 5 : 1)); /* more kinds of calls */
    run("nccl emulated: a rank that stays away is named", test_missing);
    run("nccl emulated: a rank that stays away from a pipeline is named", test_missing_from_pipeline);
    run("nccl emulated: a rank that comes after the others have stopped", test_late_after_the_end);
    run("nccl emulated: a wait that is stopped ends", test_stop);
    run("nccl emulated: short waits do not read the host's memory", test_short_waits);
    return finish();
}

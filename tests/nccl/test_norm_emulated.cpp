/* SPDX-License-Identifier: MIT */
/* Runs the norm's kernels of kvprim_nccl.h on the CPU. Each rank has a thread, which runs the GPU threads of a call one
   after the other, from one meeting of a row's threads to the next. Calls have random kernels and sizes;
   norm_cases.h draws the tensors of each rank, and norm_oracle.h says what they must hold afterwards.

       c++ -std=c++17 -O1 -g -fsanitize=thread -I. tests/nccl/test_norm_emulated.cpp && ./a.out [quick] */
#include "nccl_emulated.h"
#include <algorithm>
#include <memory>
#include "norm_cases.h"

enum { blocks = 4, block_slots = 520, most_hidden = 16384 };
const uint32_t slots_of_sender = blocks * block_slots;
const bool stores_aside = true;
enum way { few, alone };

/* What all ranks derive from a call's number. */
struct call {
    way what;
    uint64_t number;
    uint32_t tokens, hidden, threads, rows, block_rows;
    uint32_t share_bits; /* so many blocks share a token, as a power of two */
};

/* How many tokens, and how many of them a block, or a cluster of blocks, has. */
static void choose_tokens(call &c, uint64_t h, uint32_t used, uint32_t most_rows)
{
    c.tokens = std::min(1 + static_cast<uint32_t>(h >> 8) % (used * most_rows), 1 + 2400 / c.hidden);
    const uint32_t fewest = (c.tokens + used - 1) / used;
    c.block_rows = fewest + (h >> 40 & 1 ? 0 : static_cast<uint32_t>(h >> 24) % (most_rows - fewest + 1));
}

/* Returns false if the blocks have too few slots. */
static bool choose_few(call &c, uint64_t h)
{
    const uint32_t row_packs = c.hidden / 8;
    for (c.share_bits = h & 3 ? h >> 2 & 1 : 2;; c.share_bits--) {
        c.threads = ((row_packs + (32u << c.share_bits) - 1) >> c.share_bits) / 32 * 32;
        if ((c.threads << c.share_bits) - c.threads < row_packs) /* each block has a pack */
            break;
    }
    if (c.threads > block_slots)
        return false;
    choose_tokens(c, h, blocks >> c.share_bits, std::min<uint32_t>(block_slots / c.threads, 5));
    c.rows = c.share_bits ? 1 : 1 + static_cast<uint32_t>(h >> 32) % c.block_rows;
    return true;
}

static call call_of(uint64_t number)
{
    call c = {};
    const uint64_t h = hash_u64(number);
    c.number = number;
    c.hidden = 8 * (1 + static_cast<uint32_t>(h >> 4) % (h >> 40 & 15 ? 70 << (h >> 53 & 1) : most_hidden / 8));
    if (h >> 52 & 1)
        c.hidden = (c.hidden + 255) / 256 * 256; /* whole warps */
    if (h % 4 && choose_few(c, hash_u64(h + 1)))
        return c;
    c.what = alone, c.rows = c.block_rows = 1, c.share_bits = 0;
    c.threads = (c.hidden / 8 + 63) / 64 * 32; /* two packs for each */
    choose_tokens(c, hash_u64(h), 20, 1);
    return c;
}

/* A rank's tensors. Of few tokens, half of the calls have the usual ones, for which there are kernels of their own. */
static norm_case case_of(const call &c, uint32_t rank)
{
    const uint64_t h = hash_u64(c.number * 31 + 7), own = hash_u64(c.number * 8 + rank);
    norm_case n = (c.what == few && h & 1 ? norm_draw_usual : norm_draw)(KVPRIM_BF16, c.tokens, c.hidden, 0, h, own);
    n.ones = h >> 1 & 1;
    return n;
}

/* ---- a call ---- */

/* The sum of `count` numbers, a power of two, as shuffles add them: neighbours first. */
static float tree_of(const float *numbers, size_t count)
{
    return count == 1 ? *numbers : tree_of(numbers, count / 2) + tree_of(numbers + count / 2, count / 2);
}

/* The GPU threads of a row, and each one's part of a token. */
template <class norm> struct row_of {
    std::vector<kvpn_thread> threads;
    std::vector<typename norm::token> tokens;
    std::vector<typename norm::later> later;

    explicit row_of(size_t all) : tokens(all), later(all)
    {
    }
};

/* The sum of a token's squares: packs in groups of 32, then the groups. */
template <class norm> static float total_of(const row_of<norm> &row)
{
    float groups[64] = {};
    for (uint32_t k = 0; k < norm::packs; k++)
        for (size_t first = 0; first < row.tokens.size(); first += 32) {
            float lanes[32];
            for (size_t i = 0; i < 32; i++)
                lanes[i] = row.tokens[first + i].squares[k];
            const uint32_t group = norm::pack(row.threads[first], k) / 32;
            CHECK(group < norm::is::groups);
            groups[group] = tree_of(lanes, 32);
        }
    return tree_of(groups, norm::is::groups);
}

/* Quantises a token, the bits of whose largest |y| are `largest`, or the packs of 16 threads each by their own. */
template <class norm> static void quantise(const kvpn_norm_params &p, row_of<norm> &row, uint32_t largest)
{
    for (size_t first = 0; first < row.tokens.size(); first += 16) {
        uint32_t most[norm::packs] = {};
        for (size_t t = first; t < first + 16; t++)
            for (uint32_t k = 0; k < norm::packs; k++)
                most[k] = p.scales < kvpn_of_groups ? largest : std::max(most[k], norm::most_of(row.tokens[t], k));
        for (size_t t = first; t < first + 16; t++) {
            for (uint32_t k = 0; k < norm::packs && p.scales != kvpn_of_tensor; k++)
                row.tokens[t].scale[k] = norm::scale_of(p, most[k]);
            norm::quantise(p, row.threads[t], row.tokens[t]);
        }
    }
}

/* The sums of each token's squares that the rank's call has made, or -1. Results would hide how they were added. */
static thread_local std::vector<float> totals;

/* What follows s, for the threads of a row. */
template <class norm> static void finish_token(const kvpn_norm_params &p, row_of<norm> &row)
{
    uint32_t largest = 0;
    for (size_t t = 0; t < row.tokens.size(); t++)
        norm::add(p, row.threads[t], row.tokens[t]);
    const float total = total_of(row);
    totals[row.tokens[0].token] = total;
    for (size_t t = 0; t < row.tokens.size(); t++) {
        norm::multiply(p, row.threads[t], total, row.tokens[t]);
        for (uint32_t k = 0; k < norm::packs; k++)
            largest = std::max(largest, norm::most_of(row.tokens[t], k));
    }
    if (p.quantised)
        quantise(p, row, largest);
}

/* The norm alone: a block has a token. */
static void run_alone(const kvpn_norm_params &p, const call &c)
{
    using norm = kvpn_norm<kvpn_bf16, 1, kvpn_norm_alone>;
    for (uint32_t b = 0; b < c.tokens; b++) {
        row_of<norm> row(c.threads);
        for (uint32_t t = 0; t < c.threads; t++) {
            row.threads.push_back({b, 0, t, c.threads, 0, 0, 0, 0, 0});
            norm::begin_alone(p, row.threads[t], row.tokens[t]);
        }
        finish_token(p, row);
    }
    end_kernel();
}

/* A token in the kernel of few tokens. */
template <class norm> static void finish_few(const kvpn_norm_params &p, row_of<norm> &row)
{
    for (size_t t = 0; t < row.tokens.size(); t++) {
        typename norm::awaited awaited;
        norm::look_ahead(p, row.threads[t], row.tokens[t], row.later[t]);
        if (norm::poll(p, row.threads[t], row.tokens[t], awaited) || norm::wait(p, row.threads[t], awaited))
            row.tokens[t].r[0] = norm::sum(p, awaited);
        else
            kvpn_stop_rank(p, row.threads[t]);
        norm::send_next(p, row.threads[t], row.tokens[t], row.later[t]);
    }
    finish_token(p, row);
}

/* The kernel of few tokens. A row here has the threads of all blocks that share its tokens. */
template <int max_ranks, kvpn_norm_form form> static void run_few(const kvpn_norm_params &p, const call &c)
{
    using norm = kvpn_norm<kvpn_bf16, max_ranks, form>;
    const uint32_t used = (c.tokens + c.block_rows - 1) / c.block_rows, all = c.threads << c.share_bits;
    std::vector<row_of<norm>> rows;
    for (uint32_t b = 0; b < used; b++)
        for (uint32_t r = 0; r < c.rows; r++) {
            rows.emplace_back(all);
            size_t has = 0;
            for (uint32_t t = 0; t < all; t++) {
                rows.back().threads.push_back({(b << c.share_bits) + t / c.threads, r, t, c.threads, 0, 0, 0, 0, 0});
                has += norm::begin(p, rows.back().threads[t], rows.back().tokens[t]);
            }
            CHECK(has == (b * c.block_rows + r < c.tokens ? all : 0));
            if (has == 0)
                rows.pop_back();
        }
    for (const row_of<norm> &row : rows)
        for (const kvpn_thread &me : row.threads)
            if (me.role == 0 && me.thread % c.threads == 0)
                p.turn[me.block] = me.turn ^ 1;
    for (bool more = true; more;) { /* a turn of each row, as a row may wait for what another rank's sends in that */
        more = false;
        for (row_of<norm> &row : rows) {
            size_t go_on = 0;
            if (row.threads.empty())
                continue;
            finish_few(p, row);
            for (uint32_t t = 0; t < all; t++)
                go_on += norm::next(p, row.threads[t], row.tokens[t], row.later[t]);
            CHECK(go_on == 0 || go_on == all);
            more = more || go_on;
            if (!go_on)
                row.threads.clear();
        }
    }
    end_kernel();
}

template <int max_ranks> static void run_way(const kvpn_norm_params &p, const call &c)
{
    const kvpn_norm_form form =
        c.number % 2 || p.rank % 2 ? kvpn_few_form_of(&p) : kvpn_norm_all; /* ranks may differ */
    if (c.what == alone)
        run_alone(p, c);
    else if (form == kvpn_norm_plain)
        run_few<max_ranks, kvpn_norm_plain>(p, c);
    else if (form == kvpn_norm_shared)
        run_few<max_ranks, kvpn_norm_shared>(p, c);
    else if (form == kvpn_norm_rows)
        run_few<max_ranks, kvpn_norm_rows>(p, c);
    else
        run_few<max_ranks, kvpn_norm_all>(p, c);
}

static kvpn_norm_params params_of(job &j, uint32_t rank, const call &c, const norm_case &n, char *image)
{
    const kvprim_norm_desc d = norm_desc_at(&n, image);
    kvpn_norm_params p = {};
    set_ranks(p, j, rank, block_slots);
    p.tokens = c.tokens, p.row_packs = c.hidden / 8, p.rows = c.rows, p.block_packs = c.block_rows;
    p.share_bits = c.share_bits;
    p.send = d.send, p.send_stride = 2 * norm_stride(&n, d.send_stride);
    p.residual = static_cast<const char *>(d.residual), p.residual_stride = 2 * norm_stride(&n, d.residual_stride);
    p.weight = static_cast<const char *>(d.weight);
    p.sum = static_cast<char *>(d.sum), p.sum_stride = 2 * norm_stride(&n, d.sum_stride);
    p.residual_out = static_cast<char *>(d.residual_out);
    p.residual_out_stride = 2 * norm_stride(&n, d.residual_out_stride);
    p.out = static_cast<char *>(d.out), p.out_stride = 2 * norm_stride(&n, d.out_stride);
    p.quantised = static_cast<char *>(d.quantised), p.quantised_stride = norm_stride(&n, d.quantised_stride);
    p.scale = d.scale;
    p.scales = d.scale_per_token                ? kvpn_of_token
               : !d.scale_group                 ? kvpn_of_tensor
               : d.scale_dtype == KVPRIM_F8E8M0 ? kvpn_of_exponents
               : d.scale_power_of_two           ? kvpn_of_powers
                                                : kvpn_of_groups;
    p.scale_stride = 4 * norm_scale_step(&d);
    p.scale_group_stride = 4 * (d.scale_group_stride ? d.scale_group_stride : 1);
    p.scale_min = d.scale_min > 0 ? d.scale_min : FLT_MIN;
    p.part_of_hidden = 1.0f / static_cast<float>(c.hidden), p.eps = d.eps;
    p.weight_plus_one = static_cast<uint32_t>(d.weight_plus_one);
    return p;
}

/* Whether the call has written what it must, and nothing else. Changes `before`. */
static bool is_right(const call &c, const norm_case &n, uint32_t rank, uint32_t world, char *before, char *after)
{
    static thread_local const std::unique_ptr<oracle_row> row(new oracle_row);
    const kvprim_norm_desc was = norm_desc_at(&n, before), d = norm_desc_at(&n, after);
    const uint32_t ranks = c.what == alone ? 1 : world;
    std::vector<std::vector<uint4>> addends(ranks);
    std::vector<const void *> sends;
    int wrong = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        addends[r].resize(n.bytes / sizeof(uint4));
        norm_fill_tensor(&n, static_cast<int>(r), reinterpret_cast<char *>(addends[r].data()), n.d.send_stride);
        sends.push_back(c.what == alone || r == rank ? was.send : addends[r].data());
    }
    for (uint32_t t = 0; t < c.tokens; t++) {
        oracle_token(&was, sends.data(), static_cast<int>(ranks), t, row.get());
        wrong += oracle_wrong(&d, t, row.get()) +
                 !oracle_same(static_cast<double>(totals[t]), static_cast<double>(row->total));
    }
    norm_copy_outputs(&n, before, after, 0, 0);
    return wrong == 0 && memcmp(before, after, n.bytes) == 0;
}

static bool run_one(job &j, uint32_t rank, uint64_t number)
{
    const call c = call_of(number);
    const norm_case n = case_of(c, rank);
    std::vector<uint4> before(n.bytes / sizeof(uint4)), after;
    char *const image = reinterpret_cast<char *>(before.data());
    norm_fill(&n, static_cast<int>(rank), image);
    after = before;
    totals.assign(c.tokens, -1);
    const kvpn_norm_params p = params_of(j, rank, c, n, reinterpret_cast<char *>(after.data()));
    if (j.world == 2)
        run_way<2>(p, c);
    else if (j.world <= 4)
        run_way<4>(p, c);
    else
        run_way<8>(p, c);
    return is_right(c, n, rank, j.world, image, reinterpret_cast<char *>(after.data()));
}

static std::string name_of(uint64_t number, uint32_t)
{
    const call c = call_of(number);
    return std::string(c.what == few ? "few" : "alone") + ", " + std::to_string(c.tokens) + " tokens of " +
           std::to_string(c.hidden);
}

static void test_missing()
{
    uint64_t number = 5;
    while (call_of(number).what != few || call_of(number).tokens < 3)
        number++;
    expect_missing_named(number);
}

/* The first one waits for other ranks. */
static std::vector<uint64_t> queue_of(uint32_t, uint64_t first)
{
    std::vector<uint64_t> queue;
    for (uint64_t n = 100 * first; queue.size() < 5; n++)
        if (!queue.empty() || call_of(n).what == few)
            queue.push_back(n);
    return queue;
}

/* 0: there is none; 1: it lies apart; 2 and 3: in the place of send, of residual. */
static unsigned place_of(const norm_case &n, int tensor)
{
    return n.at[tensor] == norm_absent           ? 0
           : n.at[tensor] == n.at[norm_send]     ? 2
           : n.at[tensor] == n.at[norm_residual] ? 3
                                                 : 1;
}

/* The calls above have every kernel, place and output. */
static void test_variety()
{
    unsigned seen = 0;
    for (uint64_t i = 0; i < 800; i++) {
        const call c = call_of(2000000 + i);
        const norm_case n = case_of(c, 0);
        const bool residual = place_of(n, norm_residual) != 0, quantised = place_of(n, norm_quantised) != 0;
        if (c.what == alone)
            seen |= 1u << (c.hidden > 512) | quantised << 2 | (c.hidden / 8 % 32 != 0) << 3;
        else
            seen |= 1u << 4 | 1u << (5 + place_of(n, norm_sum)) | 1u << (9 + place_of(n, norm_residual_out)) |
                    1u << (13 + place_of(n, norm_out)) | (quantised && n.d.scale_per_token) << 17 |
                    (quantised && !n.d.scale_per_token) << 18 | residual << 19 | !residual << 20 | !quantised << 21 |
                    (c.rows > 1) << 22 | (c.share_bits == 1) << 23 | (c.share_bits > 1) << 24 |
                    (c.tokens > c.rows && c.block_rows > c.rows) << 25 | (c.share_bits && c.block_rows > 1) << 26 |
                    (c.hidden % 256 != 0) << 27 | (c.rows > 1 && quantised) << 28 | (c.rows > 1 && !quantised) << 29;
        if (c.what == few && c.share_bits && c.hidden % 256 == 0 && c.block_rows == 1 && residual &&
            !place_of(n, norm_sum))
            seen |= 1u << (c.hidden / 8 == c.threads << c.share_bits ? 30 : 31); /* the last warps have no packs */
    }
    CHECK((seen | 1u << (5 + 3)) == ~0u); /* the sum is never in the place of the residual */
}

/* All bf16, divided by scales of every kind. */
static void test_divide()
{
    static const float scales[] = {0,       -0.0f,           INFINITY, -INFINITY, NAN,    1e-45f,  -1e-45f,
                                   FLT_MIN, 0x1.fffffep-65f, 0x1p-64f, -0x1p-64f, 0.003f, -0.4f,   -0.5f,
                                   -700,    0x1.fffffep83f,  0x1p84f,  -0x1p84f,  -1e20f, FLT_MAX, -FLT_MAX};
    unsigned wrong = 0;
    for (const float scale : scales)
        for (uint32_t x = 0; x < 65536; x += 8) {
            float f[8];
            for (uint32_t e = 0; e < 8; e++)
                f[e] = kvpi_float_of((x + e) << 16);
            kvpn_norm_divide(f, scale);
            for (uint32_t e = 0; e < 8; e++)
                wrong += kvpi_to_e4m3(f[e]) != kvpi_to_e4m3(kvpi_float_of((x + e) << 16) / scale);
        }
    CHECK(wrong == 0);
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    run("norm emulated: calls have every kernel, place and output", test_variety);
    run("norm emulated: all bf16 by scales of every kind", test_divide);
    for (uint32_t world = 2; world <= 8; world++)
        test_world("norm", world, quick ? 20 : 120);
    run("norm emulated: a rank that stays away is named", test_missing);
    run("norm emulated: a rank that comes after the others have stopped", test_late_after_the_end);
    return finish();
}

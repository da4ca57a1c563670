/* SPDX-License-Identifier: MIT */
/* Runs the norm's kernels of kvprim_nccl.h on the CPU. Each rank has a thread, which runs the GPU threads of a call one
   after the other, from one meeting of a row's threads to the next. Calls have random ways, sizes, strides, places and
   outputs. The results are compared with a computation of its own.

       c++ -std=c++17 -O1 -g -fsanitize=thread -I. tests/nccl/test_norm_emulated.cpp && ./a.out [quick] */
#include "nccl_emulated.h"
#include <algorithm>
#include <vector>
#include "../harness.h"

static bool quick;

enum { blocks = 4, block_slots = 520, most_hidden = 16384 };
enum way { one_shot, two_shot, alone, ways };

/* Where an output goes: nowhere, to memory of its own, to the addends, to the residual. */
enum place { nowhere, apart, at_send, at_residual };

/* A call, which every rank derives from its number. Strides are elements. */
struct call {
    way what;
    uint64_t number;
    uint32_t tokens, hidden, packs, threads, rows, block_rows, parts, slice_rows;
    place sum, residual_out, out;
    bool residual, plus_one, quantised, per_token, special;
    bool few;            /* kvpn_few_kernel instead of one shot */
    uint32_t share_bits; /* of it: so many blocks share a token, as a power of two */
    uint32_t send_stride, residual_stride, strides[3], quantised_stride; /* strides: of sum, residual_out and out */
    float eps, scale_min, scale;
};

/* How many tokens, and how many of them a block, or a cluster of blocks, has. */
static void choose_tokens(call &c, uint64_t h, uint32_t used, uint32_t most_rows, uint32_t slices)
{
    c.tokens = std::min(1 + static_cast<uint32_t>(h >> 8) % (used * most_rows * slices), 1 + 2400 / c.hidden);
    c.slice_rows = (c.tokens + slices - 1) / slices;
    const uint32_t fewest = (c.slice_rows + used - 1) / used;
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
    c.few = true, c.parts = 1, c.packs = 1;
    choose_tokens(c, h, blocks >> c.share_bits, std::min<uint32_t>(block_slots / c.threads, 5), 1);
    c.rows = c.share_bits ? 1 : 1 + static_cast<uint32_t>(h >> 32) % c.block_rows;
    return true;
}

static void choose_shape(call &c, uint64_t h, uint32_t world)
{
    const uint32_t row_packs = c.hidden / 8, least = (row_packs + 31) / 32 * 32;
    if (c.what == one_shot && h & 12 && choose_few(c, hash_u64(h)))
        return;
    c.parts = (row_packs + block_slots - 1) / block_slots;
    c.what = c.what == one_shot && c.parts > 1 ? two_shot : c.what; /* as the launch does */
    c.packs = c.what == one_shot ? (world <= 4 ? 2 : 4) : !(h & 1) && row_packs <= 1024 ? 1 : 4;
    c.threads = (least / 32 + c.packs - 1) / c.packs * 32;
    c.threads += h & 2 && 32 + c.threads <= (c.packs == 1 ? 1024 : 2048 / c.packs) ? 32 : 0;
    choose_tokens(c, h, blocks / c.parts, c.parts > 1 ? 1 : std::min(block_slots / row_packs, 5u),
                  c.what == two_shot ? world : 1);
    c.rows = c.what == one_shot ? c.block_rows : 1 + static_cast<uint32_t>(h >> 32) % 3;
}

/* Outputs do not share a place. One in place has its place's stride. */
static void choose_places(call &c, uint64_t h)
{
    place *const outputs[] = {&c.sum, &c.residual_out, &c.out};
    uint32_t taken = 0;
    for (int k = 0; k < 3; k++) {
        const place at = static_cast<place>(h >> 8 * k & 3);
        const bool may = at <= apart || (!(taken >> at & 1) && (at != at_residual || (c.residual && k > 0)));
        *outputs[k] = may ? at : apart;
        taken |= 1u << *outputs[k];
    }
    c.quantised = h >> 24 & 1, c.per_token = h >> 25 & 1;
    if (!c.quantised && c.out == nowhere)
        c.out = apart;
    if (c.few && h >> 32 & 1) /* the usual outputs, for which there are kernels of their own */
        c.residual = true, c.plus_one = c.quantised = false, c.sum = nowhere,
        c.residual_out = c.residual_out == nowhere ? apart : c.residual_out, c.out = c.out == nowhere ? apart : c.out;
    c.send_stride = c.hidden + 8 * static_cast<uint32_t>(h >> 26 & 1);
    c.residual_stride = c.hidden + 16 * static_cast<uint32_t>(h >> 27 & 1);
    c.quantised_stride = c.hidden + 8 * static_cast<uint32_t>(h >> 28 & 1);
    for (int k = 0; k < 3; k++)
        c.strides[k] = *outputs[k] == at_send       ? c.send_stride
                       : *outputs[k] == at_residual ? c.residual_stride
                                                    : c.hidden + 8 * static_cast<uint32_t>(h >> (29 + k) & 1);
}

static call call_of(uint64_t number, uint32_t world)
{
    call c = {};
    const uint64_t h = hash_u64(number);
    c.number = number;
    c.what = h % 8 == 0 ? alone : h % 2 ? one_shot : two_shot;
    c.hidden = 8 * (1 + static_cast<uint32_t>(h >> 4) % (h >> 40 & 15 ? 70 << (h >> 53 & 1) : most_hidden / 8));
    if (h >> 52 & 1)
        c.hidden = (c.hidden + 255) / 256 * 256; /* whole warps */
    c.residual = h >> 44 & 1, c.plus_one = h >> 45 & 1, c.special = (h >> 46 & 7) == 0;
    c.eps = h >> 49 & 1 ? 1e-5f : 0;
    c.scale_min = h >> 50 & 1 ? 0.01f : 0x1p-126f;
    c.scale = h >> 51 & 1 ? 0.37f : 0x1p-3f;
    choose_shape(c, hash_u64(h), world);
    choose_places(c, hash_u64(h + 1));
    return c;
}

static float of_bf16(uint16_t bits)
{
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
}

static uint16_t to_bf16(float f)
{
    return static_cast<uint16_t>(kvprim_emulate_bf16(f));
}

/* Element e of a token: of what rank `who` adds, of the residual (8), of the weight (9). In calls with special values
   some are NaN (all ones too), infinite, -0, denormal or huge. */
static uint16_t input(const call &c, uint32_t who, uint32_t token, uint32_t e)
{
    static const uint16_t specials[] = {0xffff, 0x7f80, 0x8000, 0x0001, 0x7f00, 0x7fc0, 0xff80, 0x2000};
    const uint64_t h = hash_u64(c.number * 1000003 + token * 20011 + e + (static_cast<uint64_t>(who) << 40));
    if (c.special && who != 9 && token % 4 == 0 && hash_u64(c.number + token * 65537 + e / 2 * 8 + who) % 64 == 0)
        return 0xffff; /* a word of ones */
    if (c.special && who != 9 && h % 64 == 0 && (token % 4 == 0 || h % 128 == 0))
        return specials[h >> 8 & (token % 4 == 0 ? 7 : 3) & (token % 2 ? 2 : 7)];
    const int tiny = c.number % 16 == 3 ? -70 : 0; /* squares are denormal */
    return to_bf16(
        std::ldexp(static_cast<float>(static_cast<int>(h >> 16 & 0xffff) - 32768), tiny - 12 - (h >> 32) % 12));
}

/* ---- the result, computed here ---- */

/* Neighbours are added until one is left; what is missing to a power of two is 0. */
static float add_neighbours(std::vector<float> x)
{
    for (size_t n = 2048; n > 1; n /= 2) {
        x.resize(n);
        for (size_t i = 0; i < n / 2; i++)
            x[i] = x[2 * i] + x[2 * i + 1];
    }
    return x[0];
}

static float value_of_e4m3(unsigned code)
{
    const int exponent = static_cast<int>(code >> 3), mantissa = static_cast<int>(code & 7);
    return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                         : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

/* The nearest of the 127 values; of two equally near ones, the even one. */
static unsigned char to_e4m3(float x)
{
    if (x != x)
        return 0x7f;
    const double wanted = std::fabs(static_cast<double>(x));
    unsigned low = 0, high = 0x7e;
    while (high - low > 1) {
        const unsigned mid = (low + high) / 2;
        (static_cast<double>(value_of_e4m3(mid)) <= wanted ? low : high) = mid;
    }
    const double below = wanted - static_cast<double>(value_of_e4m3(low)),
                 above = static_cast<double>(value_of_e4m3(high)) - wanted;
    const unsigned nearest = below < above || (below == above && low % 2 == 0) ? low : high;
    return static_cast<unsigned char>(nearest | (std::signbit(x) ? 0x80 : 0));
}

struct result {
    std::vector<uint16_t> s, r, y;
    std::vector<unsigned char> q;
    float total, scale;
};

static result result_of(const call &c, uint32_t world, uint32_t token)
{
    result x;
    std::vector<float> squares;
    for (uint32_t e = 0; e < c.hidden; e++) {
        float sum = of_bf16(input(c, 0, token, e));
        for (uint32_t rank = 1; rank < (c.what == alone ? 1 : world); rank++)
            sum += of_bf16(input(c, rank, token, e));
        x.s.push_back(c.what == alone ? input(c, 0, token, e) : to_bf16(sum));
        x.r.push_back(c.residual ? to_bf16(of_bf16(x.s[e]) + of_bf16(input(c, 8, token, e))) : x.s[e]);
        const float r = of_bf16(x.r[e]);
        if (e % 8 == 0)
            squares.push_back(0);
        squares.back() = std::fma(r, r, squares.back());
    }
    x.total = add_neighbours(squares);
    const float mean = x.total * (1.0f / static_cast<float>(c.hidden)), squared = mean + c.eps;
    const float by = static_cast<float>(1 / std::sqrt(static_cast<double>(squared)));
    float largest = 0;
    for (uint32_t e = 0; e < c.hidden; e++) {
        const float scaled = of_bf16(x.r[e]) * by;
        const float weight = of_bf16(input(c, 9, 0, e)) + (c.plus_one ? 1.0f : 0.0f);
        x.y.push_back(to_bf16(scaled * weight));
        const float y = std::fabs(of_bf16(x.y[e]));
        if (y == y)
            largest = std::max(largest, std::min(y, 0x1.fffffep127f));
    }
    x.scale = c.per_token ? std::max(largest / 448.0f, c.scale_min) : c.scale;
    for (uint32_t e = 0; e < c.hidden; e++)
        x.q.push_back(to_e4m3(of_bf16(x.y[e]) / x.scale));
    return x;
}

/* ---- a rank's memory ---- */

struct tensors {
    std::vector<uint4> send, residual, weight, outputs[3]; /* outputs: sum, residual_out and out, where apart */
    std::vector<uint64_t> quantised;
    std::vector<float> scale;
};

static std::vector<uint4> tensor_of(uint32_t tokens, uint32_t stride)
{
    const uint4 fill = {0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5};
    return std::vector<uint4>(static_cast<size_t>(tokens) * stride / 8 + 1, fill);
}

static uint16_t *elements(std::vector<uint4> &tensor)
{
    return reinterpret_cast<uint16_t *>(tensor.data());
}

static tensors tensors_of(const call &c, uint32_t rank)
{
    tensors x;
    x.send = tensor_of(c.tokens, c.send_stride), x.residual = tensor_of(c.tokens, c.residual_stride);
    x.weight = tensor_of(1, c.hidden);
    for (int k = 0; k < 3; k++)
        x.outputs[k] = tensor_of(c.tokens, c.strides[k]);
    x.quantised.assign(static_cast<size_t>(c.tokens) * c.quantised_stride / 8 + 1, 0xa5a5a5a5a5a5a5a5);
    x.scale.assign(c.tokens + 1, c.scale);
    for (uint32_t e = 0; e < c.hidden; e++) {
        elements(x.weight)[e] = input(c, 9, 0, e);
        for (uint32_t t = 0; t < c.tokens; t++) {
            elements(x.send)[t * c.send_stride + e] = input(c, c.what == alone ? 0 : rank, t, e);
            elements(x.residual)[t * c.residual_stride + e] = input(c, 8, t, e);
        }
    }
    return x;
}

static std::vector<uint4> *output_at(tensors &x, const call &c, int k)
{
    const place at = k == 0 ? c.sum : k == 1 ? c.residual_out : c.out;
    return at == nowhere ? nullptr : at == apart ? &x.outputs[k] : at == at_send ? &x.send : &x.residual;
}

/* What the tensors hold after the call. */
static tensors expected_of(const call &c, const std::vector<result> &results, uint32_t rank)
{
    tensors x = tensors_of(c, rank);
    for (uint32_t t = 0; t < c.tokens; t++) {
        const result &r = results[t];
        const std::vector<uint16_t> *const from[] = {&r.s, &r.r, &r.y};
        for (int k = 0; k < 3; k++)
            if (std::vector<uint4> *const to = output_at(x, c, k))
                memcpy(elements(*to) + t * c.strides[k], from[k]->data(), 2 * c.hidden);
        if (c.quantised)
            memcpy(reinterpret_cast<char *>(x.quantised.data()) + t * c.quantised_stride, r.q.data(), c.hidden);
        if (c.quantised && c.per_token)
            x.scale[t] = r.scale;
    }
    return x;
}

/* NaNs are equal. */
static bool is_same(std::vector<uint4> &a, std::vector<uint4> &b)
{
    for (size_t i = 0; i < 8 * a.size(); i++) {
        const float x = of_bf16(elements(a)[i]), y = of_bf16(elements(b)[i]);
        if (elements(a)[i] != elements(b)[i] && (x == x || y == y))
            return false;
    }
    return true;
}

/* ---- a call ---- */

/* The sum of a token's squares: its threads' are added as a GPU's shuffles add them. */
template <int packs>
static float total_of(const std::vector<kvpn_thread> &row, const std::vector<kvpn_norm_token<packs>> &tokens)
{
    alignas(16) float groups[kvpn_norm_max_groups] = {};
    for (uint32_t k = 0; k < packs; k++)
        for (size_t first = 0; first < row.size(); first += 32) {
            float lanes[32], next[32];
            for (size_t i = 0; i < 32; i++)
                lanes[i] = tokens[first + i].squares[k];
            for (size_t distance = 1; distance < 32; distance *= 2) {
                for (size_t i = 0; i < 32; i++)
                    next[i] = lanes[i] + lanes[i ^ distance];
                memcpy(lanes, next, sizeof lanes);
            }
            groups[kvpn_norm_pack(row[first], k) / 32] = lanes[0];
        }
    float lanes[16];
    const size_t four = (packs * row.size() / 32 + 3) / 4;
    for (uint32_t i = 0; i < 16; i++)
        lanes[i] = kvpn_norm_four_groups(groups, packs * static_cast<uint32_t>(row.size()) / 32, i);
    for (size_t distance = 1; distance < 16; distance *= 2)
        for (size_t i = 0; i < 16; i += 2 * distance)
            lanes[i] = lanes[i] + lanes[i + distance];
    CHECK(four <= 16);
    return lanes[0];
}

/* What the rank's call must give. Its squares are compared where they are added: results hide how they were. */
static thread_local std::vector<result> results;

static void check_total(float total, uint32_t token)
{
    const float expected = results[token].total;
    CHECK(total == expected || (total != total && expected != expected) || !all_take_part);
}

/* A visit of a row's threads. Either all have a token, or none. */
template <class Way, int packs>
static void visit_token(const kvpn_norm_params &p, std::vector<kvpn_thread> &row, uint32_t at, uint32_t visit)
{
    std::vector<kvpn_norm_token<packs>> tokens(row.size());
    std::vector<uint32_t> largest;
    size_t taken = 0;
    for (size_t i = 0; i < row.size(); i++) {
        taken += Way::take(p, row[i], at, visit, tokens[i]);
        if (row[i].stop_reason != 0)
            kvpn_stop_rank(p, row[i]);
    }
    CHECK(taken == 0 || taken == row.size());
    if (taken == 0)
        return;
    for (size_t i = 0; i < row.size(); i++)
        kvpn_norm_add<kvpn_bf16>(p, row[i], tokens[i]);
    const float total = total_of<packs>(row, tokens);
    check_total(total, tokens[0].token);
    for (size_t i = 0; i < row.size(); i++)
        kvpn_norm_multiply<kvpn_bf16>(p, row[i], total, tokens[i]);
    for (size_t i = 0; i < row.size(); i++)
        largest.push_back(kvpn_norm_most<kvpn_bf16>(p, row[i], tokens[i]));
    for (size_t i = 0; i < row.size() && p.quantised; i++)
        kvpn_norm_quantise<kvpn_bf16>(p, row[i], *std::max_element(largest.begin(), largest.end()), tokens[i]);
}

template <class Way, int packs> static void run_kernel(const kvpn_norm_params &p, const call &c)
{
    const uint32_t used = (c.slice_rows + c.block_rows - 1) / c.block_rows;
    std::vector<std::vector<kvpn_thread>> rows;
    for (uint32_t b = 0; b < used; b++)
        for (uint32_t r = 0; r < c.rows; r++) {
            rows.emplace_back();
            for (uint32_t t = 0; t < c.threads; t++) /* the turn: a wrong one, until it is taken */
                rows.back().push_back({b, r, t, c.threads, 0xffffffff, 0, 0, 0, 0});
        }
    for (std::vector<kvpn_thread> &row : rows)
        for (kvpn_thread &me : row)
            Way::begin(p, me);
    for (std::vector<kvpn_thread> &row : rows)
        for (kvpn_thread &me : row)
            if (Way::exchanges)
                kvpn_norm_end_turns<packs, Way::one_token>(p, me);
    for (uint32_t at = 0; at < 2 * (c.block_rows + c.rows); at += c.rows)
        for (uint32_t visit = 0; visit < Way::visits(p); visit++)
            for (std::vector<kvpn_thread> &row : rows)
                if (at + row[0].role < Way::end(p, row[0]))
                    visit_token<Way, packs>(p, row, at + row[0].role, visit);
    end_kernel();
}

/* A token in the kernel of few tokens. */
template <int max_ranks, kvpn_few_form form>
static void finish_few(const kvpn_norm_params &p, std::vector<kvpn_thread> &row,
                       std::vector<kvpn_norm_token<1>> &tokens, std::vector<kvpn_few_later<max_ranks>> &later)
{
    uint32_t largest = 0;
    for (size_t t = 0; t < row.size(); t++) {
        kvpn_few_awaited<max_ranks> awaited;
        kvpn_few_look_ahead<max_ranks, form>(p, row[t], tokens[t], later[t]);
        if (kvpn_few_poll<kvpn_bf16, max_ranks, form>(p, row[t], tokens[t], awaited) ||
            kvpn_few_wait<max_ranks>(p, row[t], awaited))
            kvpn_few_sum<kvpn_bf16, max_ranks>(p, awaited, tokens[t]);
        else
            kvpn_stop_rank(p, row[t]);
        kvpn_few_send_next<max_ranks, form>(p, row[t], tokens[t], later[t]);
        kvpn_few_add<kvpn_bf16, form>(p, row[t], tokens[t]);
    }
    const float total = total_of<1>(row, tokens);
    check_total(total, tokens[0].token);
    for (size_t t = 0; t < row.size(); t++) {
        kvpn_few_multiply<kvpn_bf16, form>(p, row[t], total, tokens[t]);
        largest = std::max(largest, kvpn_norm_most<kvpn_bf16>(p, row[t], tokens[t]));
    }
    for (size_t t = 0; t < row.size() && p.quantised; t++)
        kvpn_norm_quantise<kvpn_bf16>(p, row[t], largest, tokens[t]);
}

/* The kernel of few tokens. A row here has the threads of all blocks that share its tokens. */
template <int max_ranks, kvpn_few_form form> static void run_few(const kvpn_norm_params &p, const call &c)
{
    const uint32_t used = (c.tokens + c.block_rows - 1) / c.block_rows, all = c.threads << c.share_bits;
    std::vector<std::vector<kvpn_thread>> rows;
    std::vector<std::vector<kvpn_norm_token<1>>> tokens;
    for (uint32_t b = 0; b < used; b++)
        for (uint32_t r = 0; r < c.rows; r++) {
            rows.emplace_back(), tokens.emplace_back(all);
            size_t has = 0;
            for (uint32_t t = 0; t < all; t++) {
                rows.back().push_back({(b << c.share_bits) + t / c.threads, r, t, c.threads, 0, 0, 0, 0, 0});
                has += kvpn_few_begin<max_ranks, form>(p, rows.back()[t], tokens.back()[t]);
            }
            CHECK(has == (b * c.block_rows + r < c.tokens ? all : 0));
            if (has == 0)
                rows.pop_back(), tokens.pop_back();
        }
    for (std::vector<kvpn_thread> &row : rows)
        for (kvpn_thread &me : row)
            if (me.role == 0 && me.thread % c.threads == 0)
                p.turn[me.block] = me.turn ^ 1;
    std::vector<std::vector<kvpn_few_later<max_ranks>>> later(rows.size(), std::vector<kvpn_few_later<max_ranks>>(all));
    for (bool more = true; more;) { /* a turn of each row, as a row may wait for what another rank's sends in that */
        more = false;
        for (size_t k = 0; k < rows.size(); k++) {
            size_t go_on = 0;
            if (rows[k].empty())
                continue;
            finish_few<max_ranks, form>(p, rows[k], tokens[k], later[k]);
            for (uint32_t t = 0; t < all; t++)
                go_on += kvpn_few_next<max_ranks, form>(p, rows[k][t], tokens[k][t], later[k][t]);
            CHECK(go_on == 0 || go_on == all);
            more = more || go_on;
            if (!go_on)
                rows[k].clear();
        }
    }
    end_kernel();
}

template <int max_ranks> static void run_way(const kvpn_norm_params &p, const call &c)
{
    enum { few = max_ranks <= 4 ? 2 : 4 };
    const kvpn_few_form form = c.number % 2 || p.rank % 2 ? kvpn_few_form_of(&p) : kvpn_few_all; /* ranks may differ */
    if (c.few && form == kvpn_few_plain)
        run_few<max_ranks, kvpn_few_plain>(p, c);
    else if (c.few && form == kvpn_few_shared)
        run_few<max_ranks, kvpn_few_shared>(p, c);
    else if (c.few && form == kvpn_few_quantised)
        run_few<max_ranks, kvpn_few_quantised>(p, c);
    else if (c.few && form == kvpn_few_any)
        run_few<max_ranks, kvpn_few_any>(p, c);
    else if (c.few)
        run_few<max_ranks, kvpn_few_all>(p, c);
    else if (c.what == one_shot)
        run_kernel<kvpn_norm_one_shot<kvpn_bf16, max_ranks, few>, few>(p, c);
    else if (c.what == two_shot && c.packs == 1)
        run_kernel<kvpn_norm_two_shot<kvpn_bf16, max_ranks, 1>, 1>(p, c);
    else if (c.what == two_shot)
        run_kernel<kvpn_norm_two_shot<kvpn_bf16, max_ranks, 4>, 4>(p, c);
    else if (c.packs == 1)
        run_kernel<kvpn_norm_of_memory<kvpn_bf16, 1>, 1>(p, c);
    else
        run_kernel<kvpn_norm_of_memory<kvpn_bf16, 4>, 4>(p, c);
}

/* Each rank's memory: a page, the slots, and 16 bytes that no rank reads. */
enum { page_words = kvpn_page / sizeof(uint4) };

struct job {
    uint32_t world;
    uint64_t timeout_ns;
    std::vector<std::vector<uint4>> memory;
    std::vector<uint32_t> stop;
};

static job job_of(uint32_t world, uint64_t timeout_ns)
{
    const uint4 empty = {kvpn_empty_word, kvpn_empty_word, kvpn_empty_word, kvpn_empty_word};
    std::vector<uint4> memory(page_words + 4 * world * blocks * block_slots + 1, empty);
    memset(memory.data(), 0, kvpn_page);
    return {world, timeout_ns, std::vector<std::vector<uint4>>(world, memory), std::vector<uint32_t>(world)};
}

static uint32_t *page_of(job &j, uint32_t rank)
{
    return reinterpret_cast<uint32_t *>(j.memory[rank].data());
}

static kvpn_norm_params params_of(job &j, uint32_t rank, const call &c, tensors &x)
{
    kvpn_norm_params p = {};
    char *to[3];
    for (int k = 0; k < 3; k++) {
        std::vector<uint4> *const output = output_at(x, c, k);
        to[k] = output ? reinterpret_cast<char *>(output->data()) : nullptr;
    }
    for (uint32_t r = 0; r < j.world; r++)
        p.peer[r] = reinterpret_cast<char *>(page_of(j, (rank + r) % j.world)) + kvpn_page;
    p.turn = page_of(j, rank), p.stop = &j.stop[rank], p.timeout_ns = j.timeout_ns, p.rank = rank, p.world = j.world;
    p.block_bytes = 16 * block_slots * c.parts, p.sender_bytes = 16 * blocks * block_slots;
    p.area_bytes = j.world * p.sender_bytes, p.turn_bytes = 2 * p.area_bytes;
    p.tokens = c.tokens, p.row_packs = c.hidden / 8, p.rows = c.rows, p.block_packs = c.block_rows;
    p.slice_packs = c.slice_rows, p.parts = c.parts, p.part_packs = block_slots, p.share_bits = c.share_bits;
    p.send = x.send.data(), p.send_stride = 2 * c.send_stride;
    p.residual = c.residual ? reinterpret_cast<char *>(x.residual.data()) : nullptr;
    p.residual_stride = 2 * c.residual_stride, p.weight = reinterpret_cast<char *>(x.weight.data());
    p.sum = to[0], p.residual_out = to[1], p.out = to[2];
    p.sum_stride = 2 * c.strides[0], p.residual_out_stride = 2 * c.strides[1], p.out_stride = 2 * c.strides[2];
    p.quantised = c.quantised ? reinterpret_cast<char *>(x.quantised.data()) : nullptr;
    p.quantised_stride = c.quantised_stride, p.scale = c.quantised ? x.scale.data() : nullptr;
    p.part_of_hidden = 1.0f / static_cast<float>(c.hidden), p.eps = c.eps, p.scale_min = c.scale_min;
    p.weight_plus_one = c.plus_one, p.scale_per_token = c.per_token;
    return p;
}

/* Returns whether all memory is as expected after the call. */
static bool run_one(job &j, uint32_t rank, uint64_t number)
{
    const call c = call_of(number, j.world);
    results.clear();
    for (uint32_t t = 0; t < c.tokens; t++)
        results.push_back(result_of(c, j.world, t));
    tensors x = tensors_of(c, rank), expected = expected_of(c, results, rank);
    const kvpn_norm_params p = params_of(j, rank, c, x);
    if (j.world == 2)
        run_way<2>(p, c);
    else if (j.world <= 4)
        run_way<4>(p, c);
    else
        run_way<8>(p, c);
    bool same = is_same(x.send, expected.send) && is_same(x.residual, expected.residual) &&
                x.quantised == expected.quantised && x.scale == expected.scale;
    for (int k = 0; k < 3; k++)
        same = same && is_same(x.outputs[k], expected.outputs[k]);
    return same;
}

static void run_rank(job &j, uint32_t rank, uint64_t first, uint64_t calls)
{
    for (uint64_t n = first; n < first + calls; n++) {
        const bool right = run_one(j, rank, n);
        if (!right)
            may_sleep.store(false, std::memory_order_relaxed);
        if (!right && all_take_part) {
            const call c = call_of(n, j.world);
            fail("world %u, rank %u: call %llu, way %d, %u tokens of %u: wrong result, or wrong bytes beside it",
                 j.world, rank, static_cast<unsigned long long>(n), c.what, c.tokens, c.hidden);
        }
        if (all_take_part && j.stop[rank] != 0) /* a wait took all its time, and no later call is right */
            return;
        if (hash_u64(n * 7 + rank) % 32 == 0)
            std::this_thread::yield();
    }
}

static void test_world(uint32_t world, uint64_t calls)
{
    char name[64];
    snprintf(name, sizeof name, "norm emulated: %u ranks, %d calls in turn", world, static_cast<int>(calls));
    if (!begin_test(name))
        return;
    job j = job_of(world, 60000000000ull);
    std::vector<std::thread> threads;
    all_take_part = may_sleep = true;
    for (uint32_t r = 0; r < world; r++)
        threads.emplace_back([&j, r, calls, world] { run_rank(j, r, world * 1000000, calls); });
    for (std::thread &t : threads)
        t.join();
    all_take_part = may_sleep = false;
    for (const std::vector<uint4> &memory : j.memory)
        for (size_t k = page_words; k + 1 < memory.size(); k++)
            CHECK(memory[k].x == kvpn_empty_word && memory[k].y == kvpn_empty_word && memory[k].z == kvpn_empty_word &&
                  memory[k].w == kvpn_empty_word);
    finish_test(name);
}

/* Rank 1 of 3 does not take part. The others stop, and say which rank was missing: see test_nccl_emulated.cpp. */
static bool names_missing(uint64_t number, uint64_t timeout_ns)
{
    job j = job_of(3, timeout_ns);
    std::thread zero([&j, number] { run_rank(j, 0, number, 1); });
    run_rank(j, 2, number, 1);
    zero.join();
    const uint32_t named = kvpn_stop_timeout | 2 << 8 | 1 << 16; /* by a rank, or because the other one said so */
    return (j.stop[0] | 2 << 8) == named && (j.stop[2] | 2 << 8) == named && page_of(j, 1)[kvpn_stop_reason_word] != 0;
}

static void test_missing()
{
    for (way what : {one_shot, two_shot}) {
        uint64_t number = 5, timeout_ns = 5000000;
        while (call_of(number, 3).what != what || call_of(number, 3).tokens < 3)
            number++;
        while (!names_missing(number, timeout_ns) && timeout_ns < 5000000000)
            timeout_ns *= 4;
        CHECK(timeout_ns < 5000000000);
    }
}

/* Ranks stop in a wait, run what is queued after it, and then the late rank comes: see test_nccl_emulated.cpp. `few`:
   all calls are for kvpn_few_kernel. */
static void come_late(uint32_t world, uint64_t first, bool told, bool few)
{
    job j = job_of(world, 2000000);
    std::vector<std::thread> others;
    std::vector<uint64_t> queued;
    for (uint64_t n = first; queued.size() < 5; n++)
        if (few ? call_of(n, world).few : !queued.empty() || call_of(n, world).what != alone)
            queued.push_back(n);
    for (uint32_t r = 1; r < world; r++)
        others.emplace_back([&j, r, &queued] {
            for (uint64_t n : queued)
                run_rank(j, r, n, 1);
        });
    for (std::thread &t : others)
        t.join();
    j.timeout_ns = 10000000;
    if (!told)
        page_of(j, 0)[kvpn_stop_reason_word] = 0;
    for (uint64_t n : queued)
        CHECK(run_one(j, 0, n) || j.stop[0] != 0);
    for (uint32_t r = 0; r < world; r++)
        CHECK(j.stop[r] != 0);
}

static void test_late_after_the_end()
{
    for (uint32_t world = 2; world <= 8; world++)
        for (uint64_t first = 0; first < (quick || under_threads ? 2 : 6); first++)
            come_late(world, 100 * first, first % 2 == 0, first % 3 == 1);
}

/* The calls above have every way, place and output. */
static void test_variety()
{
    unsigned seen = 0;
    for (uint64_t n = 0; n < 800; n++) {
        const call c = call_of(2000000 + n, 2);
        seen |= 1u << c.what | (c.parts > 1) << 3 | (c.packs > 1) << 4 | 1u << (5 + c.sum) |
                1u << (9 + c.residual_out) | 1u << (13 + c.out) | (c.quantised && c.per_token) << 17 |
                (c.quantised && !c.per_token) << 18 | (c.block_rows > c.rows && c.slice_rows > c.rows) << 19 |
                c.residual << 20 | !c.residual << 21 | (c.few && !c.quantised) << 22 | (c.few && c.quantised) << 23 |
                (c.few && c.rows > 1) << 24 | (c.few && c.share_bits == 1) << 25 | (c.few && c.share_bits > 1) << 26 |
                (c.few && c.slice_rows > c.rows && c.block_rows > c.rows) << 27 |
                (c.few && c.share_bits && c.block_rows > 1) << 28 | (c.few && c.hidden % 256) << 29;
        if (c.few && c.share_bits && c.hidden % 256 == 0 && c.block_rows == 1 && c.residual && c.sum == nowhere)
            seen |= 1u << (c.hidden / 8 == c.threads << c.share_bits ? 30 : 31); /* the last warps have no packs */
    }
    CHECK((seen | 1u << (5 + at_residual)) == ~0u);
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    run("norm emulated: calls have every way, place and output", test_variety);
    for (uint32_t world = 2; world <= 8; world++)
        test_world(world, quick ? 20 : 120);
    run("norm emulated: a rank that stays away is named", test_missing);
    run("norm emulated: a rank that comes after the others have stopped", test_late_after_the_end);
    return finish();
}

/* SPDX-License-Identifier: MIT */
/* Every way of each collective at every size, and the limits between the ways (kvprim_nccl.h >>impl_choose) that the
   times suggest, beside the header's. For bench_nccl.cu, which implements the header. */
#ifndef BENCH_WAYS_H
#define BENCH_WAYS_H

#include "bench_ranks.h"
#include <cmath>

/* In the order of kvpn_way. */
static const char *const way_names[] = {"NCCL",  "one shot", "two shots", "scatter",     "pipeline",   "gather",
                                        "parts", "many",     "most",      "gather many", "gather most"};
static_assert(sizeof way_names / sizeof *way_names == kvpn_by_gather_most + 1, "a name for each way");

/* ---- collectives ---- */

/* A call of any rank. counts: of all_to_allv. */
struct way_call {
    kvpn_kind kind;
    size_t count; /* elements of bf16 */
    std::vector<size_t> counts;
};

static kvpn_call make_call(rank_state &r, const way_call &w, const char *from, char *to)
{
    kvpn_call c = kvpn_make_call(w.kind, "ways", &r.comm, r.stream);
    c.recv = to, c.send = from, c.count = w.count, c.counts = w.counts.data(), c.dtype = KVPRIM_BF16, c.element = 2;
    return c;
}

/* window: from one half of NCCL's window to the other, by NCCL. */
static void enqueue_by(rank_state &r, const way_call &w, kvpn_way way, bool window)
{
    kvpn_call c = make_call(r, w, window ? r.window : r.x, window ? r.window + most_bytes : r.y);
    check_kvprim(kvpn_check_call(&c));
    if (window)
        NCCL(kvpn_enqueue_nccl(&c));
    else
        check_kvprim(way == kvpn_by_nccl    ? kvpn_run_nccl(&c)
                     : way > kvpn_by_gather ? kvpn_launch_parts(&c, way)
                                            : kvpn_launch_packs(&c, way));
}

static void verify_parts(rank_state &r, const kvpn_call &c, const char *at, const char *name)
{
    for (int from = 0; from < world; from++) {
        size_t first = 0;
        for (int to = 0; to < r.rank && c.kind != kvpn_all_gather; to++)
            first += kvpn_part_count(&c, from, to);
        check_result<__nv_bfloat16>(r, at + 2 * kvpn_part_begin(&c, from, false), {copy_of, from, from + 1, first},
                                    kvpn_part_count(&c, from, r.rank), name);
    }
}

static rank_way measured_way(const way_call &w, kvpn_way way, bool window)
{
    const auto at = [window](rank_state &r) { return window ? r.window + most_bytes : r.y; };
    return {[=](rank_state &r, int) { enqueue_by(r, w, way, window); },
            [=](rank_state &r) { CUDA(cudaMemsetAsync(at(r), 0xee, most_bytes, r.stream)); },
            [=](rank_state &r) {
                const kvpn_call c = make_call(r, w, nullptr, nullptr);
                const uint64_t first = w.kind == kvpn_reduce_scatter ? uint64_t(r.rank) * w.count : 0;
                if (w.kind > kvpn_reduce_scatter)
                    return verify_parts(r, c, at(r), way_names[way]);
                check_result<__nv_bfloat16>(r, at(r), {sum_of, 0, world, first}, w.count, way_names[way]);
            }};
}

/* Of the largest part that ranks send to each other, `part` bytes, as elements. Equal; in proportion 1 : 2 : ... to the
   ranks from itself on; from all to the last rank alone. */
enum spread { equal, proportional, to_one };

static way_call exchange_of(size_t part, spread how)
{
    const size_t ranks_count = size_t(world);
    way_call w = {how == equal ? kvpn_all_to_all : kvpn_all_to_allv, part / 2, {}};
    for (size_t k = 0; k < ranks_count * ranks_count && how != equal; k++) {
        const size_t from = k / ranks_count, to = k % ranks_count, distance = (to + ranks_count - from) % ranks_count;
        w.counts.push_back(how == proportional     ? part * (distance + 1) / ranks_count / 16 * 8
                           : to == ranks_count - 1 ? part / 2
                                                   : 0);
    }
    return w;
}

/* ---- which way is best ---- */

/* Times of a size: of each way (0: none), and of NCCL from its window (0: none). */
struct way_times {
    size_t bytes;
    std::vector<double> us;
    double window_us;
};

static double best_us(const way_times &t)
{
    double best = 1e9;
    for (const double us : t.us)
        best = us > 0 ? std::min(best, us) : best;
    return best;
}

/* How many times longer way k takes than the fastest one. */
static double loss_of(const way_times &t, size_t k)
{
    return t.us[k] > 0 ? t.us[k] / best_us(t) : 1e6;
}

/* A loss of one percent is noise. Among equals the header's way wins. */
static double cost_of(const way_times &t, size_t k, size_t headers)
{
    return std::max(0.0, std::log(loss_of(t, k)) - 0.01) + (k == headers ? 0 : 1e-6);
}

/* Returns a way for each size: never one before that of a smaller size, and all together with the least cost. headers:
   the header's ways. */
static std::vector<size_t> split(const std::vector<way_times> &rows, const std::vector<size_t> &headers)
{
    const size_t ways_count = rows[0].us.size();
    std::vector<double> cost(ways_count, 0); /* of the sizes so far, if the last one takes this way */
    std::vector<std::vector<size_t>> path(ways_count);
    for (size_t n = 0; n < rows.size(); n++)
        for (size_t k = ways_count; k-- > 0;) { /* down, so that the ways before k have not seen this size */
            const size_t last = size_t(std::min_element(cost.begin(), cost.begin() + long(k) + 1) - cost.begin());
            path[k] = path[last];
            path[k].push_back(k);
            cost[k] = cost[last] + cost_of(rows[n], k, headers[n]);
        }
    return path[size_t(std::min_element(cost.begin(), cost.end()) - cost.begin())];
}

/* The largest size that takes way k or one before it. */
static size_t limit_of(const std::vector<way_times> &rows, const std::vector<size_t> &taken, size_t k)
{
    size_t limit = 0;
    for (size_t n = 0; n < rows.size(); n++)
        limit = taken[n] <= k ? rows[n].bytes : limit;
    return limit;
}

/* As the header writes it. */
static std::string limit_text(size_t bytes)
{
    const int shift = bytes % (1 << 20) == 0 ? 20 : 10;
    return bytes ? std::to_string(bytes >> shift) + " << " + std::to_string(shift) : "0";
}

/* ---- tables ---- */

typedef size_t kvpn_limits::*limit_field;

/* A collective, and its ways from the one for few bytes to the one for many. limits: which of the header's limits
   bounds each way except the last; NULL: none of them does. */
struct way_table {
    const char *title;
    std::vector<kvpn_way> ways;
    std::vector<limit_field> limits;
    bool window; /* also measures NCCL from its window */
    /* what a size takes; whether a way's slots hold it; which way the header chooses; a way to measure it */
    std::function<bool(size_t bytes, kvpn_way)> fits;
    std::function<kvpn_way(size_t bytes)> chosen;
    std::function<rank_way(size_t bytes, kvpn_way, bool window)> way;
};

static bool any_fits(const way_table &t, size_t bytes)
{
    return std::any_of(t.ways.begin(), t.ways.end(), [&](kvpn_way way) { return t.fits(bytes, way); });
}

static way_times measure_ways(const way_table &t, size_t bytes)
{
    way_times row = {bytes, std::vector<double>(t.ways.size(), 0), 0};
    std::vector<rank_way> all;
    for (const kvpn_way way : t.ways)
        if (t.fits(bytes, way))
            all.push_back(t.way(bytes, way, false));
    if (t.window)
        all.push_back(t.way(bytes, kvpn_by_nccl, true));
    measure(all, calls_in_graph(bytes));
    for (size_t k = 0, next = 0; k < t.ways.size(); k++)
        if (t.fits(bytes, t.ways[k]))
            row.us[k] = all[next++].us;
    row.window_us = t.window ? all.back().us : 0;
    return row;
}

static void print_us(double us)
{
    if (us > 0)
        printf(" %9.2f", us);
    else
        printf(" %9s", "-");
}

/* Which way each size takes, as a number of the table's, and what that loses on average. */
struct choice {
    std::vector<size_t> taken;
    double mean_loss;
};

static choice choice_of(const std::vector<way_times> &rows, const std::vector<size_t> &taken)
{
    double sum = 0;
    for (size_t n = 0; n < rows.size(); n++)
        sum += std::log(loss_of(rows[n], taken[n]));
    return {taken, std::exp(sum / double(rows.size()))};
}

static choice choice_of_header(const way_table &t, const std::vector<way_times> &rows)
{
    std::vector<size_t> taken;
    for (const way_times &row : rows)
        taken.push_back(size_t(std::find(t.ways.begin(), t.ways.end(), t.chosen(row.bytes)) - t.ways.begin()));
    return choice_of(rows, taken);
}

static void print_ways(const way_table &t, const std::vector<way_times> &rows, const choice &header,
                       const choice &suggested)
{
    printf("\n%s\n%8s", t.title, "");
    for (const kvpn_way way : t.ways)
        printf(" %9s", way_names[way]);
    printf(" %9s   %-9s %8s   %-9s %8s\n", "window", "header", "loss", "suggested", "loss");
    for (size_t n = 0; n < rows.size(); n++) {
        printf("%5zu %s", rows[n].bytes >> (rows[n].bytes % MiB ? 10 : 20), rows[n].bytes % MiB ? "KB" : "MB");
        for (const double us : rows[n].us)
            print_us(us);
        print_us(rows[n].window_us);
        for (const choice *const c : {&header, &suggested})
            printf("   %-9s %6.1f %%", way_names[t.ways[c->taken[n]]], 100 * (loss_of(rows[n], c->taken[n]) - 1));
        printf("\n");
    }
    printf("mean loss of the header's limits %.2f %%, of those suggested %.2f %%\n", 100 * (header.mean_loss - 1),
           100 * (suggested.mean_loss - 1));
    fflush(stdout);
}

/* Measures a table, and lowers the suggested limits to what it says. Adds to `others` what no limit of the header
   bounds. */
static void run_table(const way_table &t, kvpn_limits *suggested, std::string *others)
{
    std::vector<way_times> rows;
    for (size_t bytes = 4 << 10; bytes <= most_bytes; bytes *= 2)
        for (const size_t size : {bytes, bytes + bytes / 2})
            if (size <= most_bytes && (size == bytes || !quick) && any_fits(t, size))
                rows.push_back(measure_ways(t, size));
    const choice header = choice_of_header(t, rows), best = choice_of(rows, split(rows, header.taken));
    print_ways(t, rows, header, best);
    for (size_t k = 0; k + 1 < t.ways.size(); k++) {
        const size_t limit = limit_of(rows, best.taken, k);
        if (t.limits[k])
            suggested->*t.limits[k] = std::min(suggested->*t.limits[k], limit);
        else
            *others += std::string(others->empty() ? "" : "; ") + t.title + ", " + way_names[t.ways[k]] + " up to " +
                       limit_text(limit) + " (header: " + limit_text(limit_of(rows, header.taken, k)) + ")";
    }
}

/* make: the call of so many bytes, as limits count them. */
static way_table table_of(const char *title, std::vector<kvpn_way> ways, std::vector<limit_field> limits, bool window,
                          const std::function<way_call(size_t bytes)> &make)
{
    const auto fits = [](size_t bytes, kvpn_way way) {
        const kvprim_comm *const comm = &ranks[0].comm;
        const size_t in_slots = way == kvpn_by_one_shot ? bytes : bytes / size_t(world);
        return (way != kvpn_by_one_shot && way != kvpn_by_gather && way != kvpn_by_parts) ||
               in_slots <= kvpn_capacity_bytes(comm, way);
    };
    const auto chosen = [=](size_t bytes) {
        const way_call w = make(bytes);
        const kvpn_call c = make_call(ranks[0], w, nullptr, nullptr);
        return kvpn_way_of(&c);
    };
    const auto way = [=](size_t bytes, kvpn_way how, bool in_window) {
        return measured_way(make(bytes), how, in_window);
    };
    ways.push_back(kvpn_by_nccl);
    return {title, ways, limits, window, fits, chosen, way};
}

/* Whole packs of a rank, in a tensor of `bytes`. */
static size_t even_part(size_t bytes)
{
    return bytes / 16 / size_t(world) * 16;
}

static std::vector<way_table> tables_of_limits()
{
    typedef kvpn_limits l;
    const auto sum = [](size_t bytes) { return way_call{kvpn_all_reduce, bytes / 2, {}}; };
    const auto scatter = [](size_t bytes) { return way_call{kvpn_reduce_scatter, even_part(bytes) / 2, {}}; };
    const auto gather = [](size_t bytes) { return way_call{kvpn_all_gather, even_part(bytes) / 2, {}}; };
    const auto gather_odd = [](size_t bytes) { return way_call{kvpn_all_gather, even_part(bytes) / 2 - 1, {}}; };
    const auto exchange = [](spread how) { return [how](size_t bytes) { return exchange_of(even_part(bytes), how); }; };
    const std::vector<kvpn_way> parts = {kvpn_by_parts, kvpn_by_parts_many, kvpn_by_parts_most},
                                gathers = {kvpn_by_gather, world == 2 ? kvpn_by_parts_many : kvpn_by_gather_many,
                                           world == 2 ? kvpn_by_parts_most : kvpn_by_gather_most};
    std::vector<kvpn_way> sums = {kvpn_by_one_shot, kvpn_by_two_shot}, scatters = {kvpn_by_scatter};
    std::vector<limit_field> sum_limits = {&l::one_shot, &l::two_shot}, scatter_limits = {&l::scatter};
    if (world == 2) { /* only two ranks have pipelines */
        sums.push_back(kvpn_by_pipeline), scatters.push_back(kvpn_by_pipeline);
        sum_limits = {&l::one_shot, nullptr, &l::two_shot}, scatter_limits = {nullptr, &l::scatter};
    }
    return {table_of("all_reduce", sums, sum_limits, true, sum),
            table_of("reduce_scatter", scatters, scatter_limits, true, scatter),
            table_of("all_gather", gathers, {nullptr, nullptr, &l::gather}, true, gather),
            table_of("all_gather, odd", gathers, {nullptr, nullptr, &l::gather_odd}, true, gather_odd),
            table_of("all_to_all", parts, {&l::parts, &l::parts_many, &l::parts_even}, false, exchange(equal)),
            table_of("all_to_allv", parts, {nullptr, nullptr, &l::parts_uneven}, false, exchange(proportional)),
            table_of("all_to_allv to one", parts, {nullptr, nullptr, &l::parts_uneven}, false, exchange(to_one))};
}

/* ---- the norm: its ways are called one shot (kvpn_launch_few) and two shots (a sum, then the norm) ---- */

enum { norm_hidden = 4096, norm_token_bytes = 2 * norm_hidden };

static void enqueue_norm_by(rank_state &r, size_t bytes, kvpn_way way)
{
    const kvpn_call c = make_call(r, {kvpn_all_reduce, 0, {}}, nullptr, nullptr);
    kvprim_norm_desc d = {};
    d.dtype = KVPRIM_BF16, d.tokens = int64_t(bytes / norm_token_bytes), d.hidden = norm_hidden, d.eps = 1e-6f;
    d.send_stride = d.residual_stride = d.residual_out_stride = d.out_stride = norm_hidden;
    d.send = r.x, d.residual = d.weight = r.window, d.residual_out = r.y, d.out = r.window + most_bytes;
    if (way == kvpn_by_one_shot)
        check_kvprim(kvpn_launch_norm_by(&c, &d, kvpn_launch_few, kvpn_few_most_tokens(c.comm, norm_hidden / 8)));
    else
        check_kvprim(kvpn_launch_norm_by(&c, &d, kvpn_sum_then_norm, int64_t(kvpn_sums_bytes / norm_token_bytes)));
}

/* Whole tokens. Their results are not verified here: the function that launches them is the one that tests run. */
static way_table table_of_norm()
{
    const auto fits = [](size_t bytes, kvpn_way) { return bytes % norm_token_bytes == 0; };
    const auto chosen = [](size_t bytes) {
        kvprim_norm_desc d = {};
        int64_t most;
        d.tokens = int64_t(bytes / norm_token_bytes), d.hidden = norm_hidden;
        return kvpn_norm_way_of(&ranks[0].comm, &d, &most) == kvpn_launch_few ? kvpn_by_one_shot : kvpn_by_two_shot;
    };
    const auto way = [](size_t bytes, kvpn_way how, bool) {
        return rank_way{[=](rank_state &r, int) { enqueue_norm_by(r, bytes, how); }};
    };
    const std::vector<kvpn_way> ways = {kvpn_by_one_shot, kvpn_by_two_shot};
    return {"all_reduce_norm", ways, {&kvpn_limits::norm_one_shot}, false, fits, chosen, way};
}

/* ---- the section ---- */

static const limit_field limits_in_order[] = {
    &kvpn_limits::one_shot, &kvpn_limits::two_shot,   &kvpn_limits::norm_one_shot, &kvpn_limits::scatter,
    &kvpn_limits::parts,    &kvpn_limits::parts_many, &kvpn_limits::parts_even,    &kvpn_limits::parts_uneven,
    &kvpn_limits::gather,   &kvpn_limits::gather_odd};
static_assert(sizeof limits_in_order / sizeof *limits_in_order == sizeof(kvpn_limits) / sizeof(size_t), "all of them");

static void print_limits(const char *whose, const kvpn_limits &limits)
{
    printf("limits of %d ranks, %-10s {", world, whose);
    for (const limit_field limit : limits_in_order)
        printf("%s%s", limit == &kvpn_limits::one_shot ? "" : ", ", limit_text(limits.*limit).c_str());
    printf("}\n");
}

static void bench_ways()
{
    kvpn_limits suggested;
    std::string others;
    if (!ranks[0].comm.peer[0]) {
        printf("no limits: own kernels are off\n");
        return;
    }
    for (const limit_field limit : limits_in_order)
        suggested.*limit = SIZE_MAX;
    printf("\ncollectives of bf16 by their ways, us, by bytes as the limits count them; loss: to the fastest way, NCCL "
           "on ordinary memory being one; header: what its limits take\n");
    for (const way_table &t : tables_of_limits())
        run_table(t, &suggested, &others);
    run_table(table_of_norm(), &suggested, &others);
    printf("\nkvpn_limits, its fields in order\n");
    print_limits("header:", kvpn_limits_of(&ranks[0].comm));
    print_limits("suggested:", suggested);
    printf("limits of %d ranks, others:    %s\n", world, others.c_str());
}

#endif /* BENCH_WAYS_H */

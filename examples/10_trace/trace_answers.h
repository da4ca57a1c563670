/* SPDX-License-Identifier: MIT */
/* Answers what one looks for in a trace (trace_events.h), and compares two traces. Times are sums over all GPUs. */
#ifndef TRACE_ANSWERS_H
#define TRACE_ANSWERS_H

#include "trace_events.h"
#include <regex.h>

enum { trace_shares_most = 20 };

typedef struct trace_questions {
    const char *family; /* answer 5 is for kernels whose names contain this */
    uint64_t top;       /* lines of a table */
    uint64_t longer_us; /* answer 2 is for events that take longer; UINT64_MAX: for the `top` longest operations */
    uint64_t more_than; /* answer 3 is for operations that are small and launched more often */
    size_t shares_count;
    const char *shares[trace_shares_most][2]; /* categories: name, and extended regular expression of either case */
} trace_questions;

static const trace_questions trace_usual_questions = {"",
                                                      50,
                                                      UINT64_MAX,
                                                      100,
                                                      4,
                                                      {{"attention", "attend|attention|flash|fmha|sdpa"},
                                                       {"matrix product", "gemm|gemv|matmul|cutlass|cublas|xmma|nvjet"},
                                                       {"memory", "memcpy|memset|direct_copy_kernel"},
                                                       {"concatenation", "concat|CatArray"}}};

/* ---- tables ---- */

static void trace_merge(trace_entry *into, const trace_entry *more)
{
    into->count += more->count, into->ns += more->ns, into->bytes += more->bytes;
    into->shortest = more->shortest < into->shortest ? more->shortest : into->shortest;
    into->longest = more->longest > into->longest ? more->longest : into->longest;
}

static void trace_count(trace_entries *table, const char *text, uint64_t ns, uint64_t bytes)
{
    const trace_entry one = {TRACE_KERNEL, NULL, NULL, 1, ns, bytes, ns, ns, NULL};
    trace_merge(trace_entry_of(table, TRACE_KERNEL, text), &one);
}

/* Counts the phase's events of kinds `first` to `last` that take less than `below` ns by name, spans also by stream. */
static trace_entries trace_counted(const trace *t, int phase, trace_kind first, trace_kind last, uint64_t below)
{
    trace_entries table = {NULL, NULL, 0};
    char text[5000];
    for (size_t i = 0; i < t->count; i++) {
        const trace_event *const e = t->events + i;
        if (e->phase != phase || e->name->kind < first || e->name->kind > last || e->end - e->begin >= below)
            continue;
        if (e->name->kind == TRACE_SPAN)
            snprintf(text, sizeof text, "GPU %u stream %u   %s", e->device, e->track, e->name->shown);
        trace_count(&table, e->name->kind == TRACE_SPAN ? text : e->name->shown, e->end - e->begin, e->bytes);
    }
    return table;
}

/* Adds up the entries whose texts contain `family`. */
static trace_entry trace_total(const trace_entries *table, const char *family)
{
    trace_entry all = {TRACE_KERNEL, NULL, NULL, 0, 0, 0, UINT64_MAX, 0, NULL};
    for (const trace_entry *entry = table->first; entry; entry = entry->next)
        if (strstr(entry->full, family))
            trace_merge(&all, entry);
    all.shortest = all.count ? all.shortest : 0;
    return all;
}

/* Adds up the phase's events whose names contain `family`. */
static trace_entry trace_family(const trace *t, int phase, trace_kind kind, const char *family)
{
    trace_entries table = trace_counted(t, phase, kind, kind, UINT64_MAX);
    const trace_entry all = trace_total(&table, family);
    trace_entries_free(&table);
    return all;
}

/* A line of a table, and what it was in the old trace of two. */
typedef struct trace_line {
    const trace_entry *now, *old;
} trace_line;

static int64_t trace_slower(const trace_line *line)
{
    return (int64_t)(line->now->ns - line->old->ns); /* sums of a spoilt file's times may not fit */
}

static int trace_by_time(const void *a, const void *b)
{
    const trace_line *const x = (const trace_line *)a, *const y = (const trace_line *)b;
    const int64_t p = trace_slower(x), q = trace_slower(y);
    return p != q ? (p < q) - (p > q) : strcmp(x->now->full, y->now->full);
}

static void trace_print_line(const trace_line *line, const char *unit, uint64_t whole, bool compares)
{
    const trace_entry *const e = line->now;
    const double ns = (double)e->ns, bytes = (double)e->bytes, count = (double)(e->count ? e->count : 1);
    printf("%10llu%13.3f%12.2f%12.2f%12.2f%9.1f", (unsigned long long)e->count, 1e-6 * ns, 1e-3 * ns / count,
           e->count ? 1e-3 * (double)e->shortest : 0, 1e-3 * (double)e->longest,
           100 * ns / (double)(whole ? whole : 1));
    if (compares)
        printf("%11llu%13.3f%+13.3f", (unsigned long long)line->old->count, 1e-6 * (double)line->old->ns,
               1e-6 * (double)trace_slower(line));
    else if (unit[0] == 'M')
        printf("%12.3f%10.2f", 1e-6 * bytes, bytes / (ns > 0 ? ns : 1));
    else if (unit[0])
        printf("%12llu", (unsigned long long)e->bytes);
    printf("   %s\n", e->full);
}

/* Prints the `top` entries that took longest. Shares are of `whole` ns; `unit` says what the bytes are: "MB",
   "operations", or "" if there are none. With an old table, to which the entries are added, prints those that became
   slower, the most first, and those that became faster, the most last, `top` each. */
static void trace_print(const trace_entries *table, trace_entries *old, const char *title, uint64_t whole,
                        const char *unit, uint64_t top)
{
    static const trace_entry nothing = {TRACE_KERNEL, NULL, NULL, 0, 0, 0, 0, 0, NULL};
    trace_line *const lines = (trace_line *)trace_room(NULL, (table->count + 1) * sizeof *lines);
    size_t count = 0;
    for (const trace_entry *entry = table->first; entry; entry = entry->next) {
        const trace_line line = {entry, old ? trace_entry_of(old, TRACE_KERNEL, entry->full) : &nothing};
        if (!old || trace_slower(&line) != 0)
            lines[count++] = line;
    }
    qsort(lines, count, sizeof *lines, trace_by_time);
    if (count)
        printf("%10s%13s%12s%12s%12s%9s%s   %s\n", "count", "total ms", "each us", "shortest", "longest", "share %",
               old              ? "  old count       old ms    change ms"
               : unit[0] == 'M' ? "          MB      GB/s"
               : unit[0]        ? "  operations"
                                : "",
               title);
    for (size_t i = 0; i < count; i++) {
        if (old && i == top && count > 2 * top)
            printf("    ... %zu others between\n", count - 2 * (size_t)top);
        if (i < top || (old && i + top >= count))
            trace_print_line(&lines[i], unit, whole, old != NULL);
    }
    free(lines);
}

/* ---- when operations run, and the gaps between them ---- */

typedef struct trace_figures {
    trace_entries operations;          /* by name */
    trace_entries waits;               /* gaps, by the operation after them */
    trace_entries parts;               /* of the time, from the first operation to the last, and of the host's */
    trace_entry runs, idles, launches; /* sums of parts */
} trace_figures;

static uint64_t trace_clamp(uint64_t time, uint64_t from, uint64_t to)
{
    return time < from ? from : time > to ? to : time;
}

static void trace_count_part(trace_figures *g, const char *text, uint64_t ns)
{
    if (ns)
        trace_count(&g->parts, text, ns, 0);
}

/* Counts a gap, which ends where the operation begins. */
static void trace_count_gap(trace_figures *g, uint64_t begin, const trace_event *e, trace_event **call)
{
    const uint64_t from = call ? trace_clamp((*call)->begin, begin, e->begin) : begin;
    const uint64_t to = call ? trace_clamp((*call)->end, begin, e->begin) : begin;
    trace_count(&g->waits, e->name->shown, e->begin - begin, 0);
    trace_count_part(g, "idle: before the next operation's call", from - begin);
    trace_count_part(g, "idle: in that call", to - from);
    trace_count_part(g, call ? "idle: after that call" : "idle: its call is unknown", e->begin - to);
}

/* Counts the launch row: calls that start work, and on each thread what is between them. */
static void trace_count_launches(const trace *t, int phase, trace_figures *g)
{
    const trace_list calls = trace_sorted(t, phase, TRACE_CALL, TRACE_CALL, "tb");
    const trace_list started = trace_sorted(t, trace_any_phase, TRACE_KERNEL, TRACE_COPY, "c");
    const trace_event *last = NULL;
    for (size_t i = 0; i < calls.count; i++) {
        const trace_event *const e = calls.at[i];
        if (trace_partners(&started, e) == NULL)
            continue;
        if (last && last->track == e->track && e->begin > last->end)
            trace_count_part(g, "host: between those calls", e->begin - last->end);
        trace_count(&g->parts, "host: in calls that start work", e->end - e->begin, 0);
        last = e;
    }
    free(calls.at), free(started.at);
}

/* End with trace_figures_free. */
static trace_figures trace_figures_of(const trace *t, int phase)
{
    const trace_list calls = trace_sorted(t, trace_any_phase, TRACE_CALL, TRACE_CALL, "c");
    const trace_list operations = trace_sorted(t, phase, TRACE_KERNEL, TRACE_COPY, "pb");
    trace_figures g;
    uint64_t until = 0;
    memset(&g, 0, sizeof g);
    g.operations = trace_counted(t, phase, TRACE_KERNEL, TRACE_COPY, UINT64_MAX);
    for (size_t i = 0; i < operations.count; i++) {
        const trace_event *const e = operations.at[i];
        if (i == 0 || e->device != operations.at[i - 1]->device)
            until = e->begin;
        else if (e->begin > until)
            trace_count_gap(&g, until, e, trace_partners(&calls, e));
        trace_count_part(&g, "busy: an operation runs", e->end - trace_clamp(until, e->begin, e->end));
        until = e->end > until ? e->end : until;
    }
    trace_count_launches(t, phase, &g);
    g.runs = trace_total(&g.parts, "busy: "), g.idles = trace_total(&g.waits, "");
    g.launches = trace_total(&g.parts, "host: in ");
    trace_count_part(&g, "all: from the first operation to the last", g.runs.ns + g.idles.ns);
    free(calls.at), free(operations.at);
    return g;
}

static void trace_figures_free(trace_figures *g)
{
    trace_entries_free(&g->operations), trace_entries_free(&g->waits), trace_entries_free(&g->parts);
}

/* ---- one answer each ---- */

/* Prints the longest operations, or all events that take longer than asked for, in order of time. */
static void trace_print_long(const trace *t, int phase, const trace_questions *q)
{
    const bool all = q->longer_us != UINT64_MAX;
    const trace_list list = trace_sorted(t, phase, TRACE_KERNEL, all ? TRACE_RANGE : TRACE_COPY, all ? "b" : "Lb");
    const size_t count = all || q->top > list.count ? list.count : (size_t)q->top;
    uint64_t zero = UINT64_MAX;
    for (size_t i = 0; i < list.count; i++)
        zero = list.at[i]->begin < zero ? list.at[i]->begin : zero;
    trace_keys = "b";
    qsort(list.at, count, sizeof *list.at, trace_order);
    printf(all ? "2   events of more than %llu us, in order of time\n"
               : "2   the longest operations, in order of time\n",
           (unsigned long long)q->longer_us);
    for (size_t i = 0; i < count; i++) {
        const trace_event *const e = list.at[i];
        if (!all || e->end - e->begin > 1000 * q->longer_us)
            printf("    at%13.3f ms%12.2f us   %s %u   %s\n", 1e-6 * (double)(e->begin - zero),
                   1e-3 * (double)(e->end - e->begin), trace_process(e) == 1 ? "thread" : "stream", e->track,
                   e->name->shown);
    }
    free(list.at);
}

/* Counts the phase's operations by category: of the first pattern that matches the name in the file, because namespaces
   and template arguments say more than the function. */
static trace_entries trace_shares(const trace *t, int phase, const trace_questions *q)
{
    trace_entries table = {NULL, NULL, 0}, by_name = {NULL, NULL, 0};
    regex_t patterns[trace_shares_most];
    for (size_t i = 0; i < q->shares_count; i++)
        (void)regcomp(&patterns[i], q->shares[i][1], REG_EXTENDED | REG_ICASE | REG_NOSUB);
    for (size_t i = 0; i < t->count; i++)
        if (t->events[i].phase == phase && t->events[i].name->kind <= TRACE_COPY)
            trace_count(&by_name, t->events[i].name->full, t->events[i].end - t->events[i].begin, 0);
    for (const trace_entry *name = by_name.first; name; name = name->next) {
        size_t i = 0;
        while (i < q->shares_count && regexec(&patterns[i], name->full, 0, NULL, 0) != 0)
            i++;
        trace_merge(trace_entry_of(&table, TRACE_KERNEL, i < q->shares_count ? q->shares[i][0] : "other"), name);
    }
    for (size_t i = 0; i < q->shares_count; i++)
        regfree(&patterns[i]);
    trace_entries_free(&by_name);
    return table;
}

/* Prints an experiment for each finding that applies: small launches, copies of a cache, gaps. */
static void trace_print_advice(const trace_figures *g, const trace_questions *q, uint64_t small, uint64_t copied)
{
    const trace_entry all = trace_total(&g->operations, "");
    const double shares[3] = {100 * (double)small / (double)all.count, 100 * (double)copied / (double)all.ns,
                              100 * (double)g->idles.ns / (double)(g->idles.ns + g->runs.ns)};
    const bool applies[3] = {small > q->more_than && shares[0] > 50 && 2 * g->launches.count > all.count,
                             shares[1] > 10, shares[2] > 20};
    static const char *const advice[3] = {
        "of the operations are small, most with a call of their own: launch them as a CUDA graph, or fuse them",
        "of the GPU's time is concatenation and copies on it: allocate a static cache, store new rows into slots",
        "of the time no operation runs: look at what the host does before and in the calls of answer 6"};
    for (int i = 0, printed = 0; i < 3; i++)
        if (applies[i])
            printf("%s    %.1f %% %s\n", printed++ ? "" : "what to try\n", shares[i], advice[i]);
}

/* Counts and prints events of a kind. Shares are of their sum, or, as ranges contain each other, of the longest. */
static void trace_print_kind(const trace *t, int phase, trace_kind kind, const char *title, const char *unit,
                             uint64_t top)
{
    trace_entries table = trace_counted(t, phase, kind, kind, UINT64_MAX);
    uint64_t longest = 0;
    for (const trace_entry *entry = table.first; entry; entry = entry->next)
        longest = entry->ns > longest ? entry->ns : longest;
    trace_print(&table, NULL, title, kind < TRACE_RANGE ? trace_total(&table, "").ns : longest, unit, top);
    trace_entries_free(&table);
}

/* Prints the answers for one phase. */
static inline void trace_report(const trace *t, int phase, const trace_questions *q)
{
    trace_figures g = trace_figures_of(t, phase);
    trace_entries shares = trace_shares(t, phase, q), frequent = {NULL, NULL, 0};
    trace_entries small = trace_counted(t, phase, TRACE_KERNEL, TRACE_COPY, 5000);
    const trace_entry all = trace_total(&g.operations, ""), smalls = trace_total(&small, "");
    const trace_entry family = trace_family(t, phase, TRACE_KERNEL, q->family);
    const uint64_t span = g.runs.ns + g.idles.ns;
    for (const trace_entry *entry = small.first; entry; entry = entry->next)
        if (entry->count > q->more_than)
            trace_merge(trace_entry_of(&frequent, TRACE_KERNEL, entry->full), entry);
    printf("1   top operations by total time\n");
    trace_print(&g.operations, NULL, "operation", all.ns, "", q->top);
    trace_print_long(t, phase, q);
    printf("3   small and frequent: %llu of %llu operations take less than 5 us each, about the time of a launch; %.3f "
           "ms\n"
           "    in total. Those with more than %llu launches, and the host's time in calls and ranges\n",
           (unsigned long long)smalls.count, (unsigned long long)all.count, 1e-6 * (double)smalls.ns,
           (unsigned long long)q->more_than);
    trace_print(&frequent, NULL, "small operation", all.ns, "", q->top);
    trace_print_kind(t, phase, TRACE_CALL, "call", "", q->top);
    trace_print_kind(t, phase, TRACE_RANGE, "range", "", q->top);
    printf("4   memory operations by direction\n");
    trace_print_kind(t, phase, TRACE_COPY, "memory operation", "MB", q->top);
    printf("5   kernels named *%s*: %llu, %.3f ms, %.2f us each (%.2f to %.2f)\n", q->family,
           (unsigned long long)family.count, 1e-6 * (double)family.ns,
           1e-3 * (double)family.ns / (double)(family.count ? family.count : 1), 1e-3 * (double)family.shortest,
           1e-3 * (double)family.longest);
    printf("6   gaps: no operation runs for %.3f of %.3f ms from the first to the last, %llu times\n",
           1e-6 * (double)g.idles.ns, 1e-6 * (double)span, (unsigned long long)g.idles.count);
    trace_print(&g.waits, NULL, "gap before", g.idles.ns, "", q->top);
    trace_print(&g.parts, NULL, "part of the time", span, "", q->top);
    printf("7   ranges on streams, from the first operation to the last\n");
    trace_print_kind(t, phase, TRACE_SPAN, "range on a stream", "operations", q->top);
    printf("8   operations by category\n");
    trace_print(&shares, NULL, "category", all.ns, "", q->top);
    trace_print_advice(&g, q, smalls.count,
                       trace_total(&g.operations, "Memcpy DtoD").ns + trace_total(&shares, "concatenation").ns);
    trace_figures_free(&g);
    trace_entries_free(&shares), trace_entries_free(&frequent), trace_entries_free(&small);
}

/* Prints what became slower and what faster, by operation and by what the GPU waited for. */
static inline void trace_compare(const trace *old, const trace *now, int phase, uint64_t top)
{
    static const char *const titles[] = {"operation", "gap before", "part of the time"};
    trace_figures a = trace_figures_of(old, phase), b = trace_figures_of(now, phase);
    trace_entries *const before[] = {&a.operations, &a.waits, &a.parts};
    trace_entries *const after[] = {&b.operations, &b.waits, &b.parts};
    const uint64_t whole[] = {trace_total(&b.operations, "").ns, b.idles.ns, b.runs.ns + b.idles.ns};
    for (int i = 0; i < 3; i++) {
        for (const trace_entry *entry = before[i]->first; entry; entry = entry->next)
            (void)trace_entry_of(after[i], TRACE_KERNEL, entry->full); /* what is gone, too */
        trace_print(after[i], before[i], titles[i], whole[i], "", top);
    }
    trace_figures_free(&a), trace_figures_free(&b);
}
#endif

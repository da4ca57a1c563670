/* SPDX-License-Identifier: MIT */
/* Answers what one looks for in a trace (trace_events.h), and compares two traces.

       trace_report(&t, t.phase, "store");         // operations, gaps, copies, ranges; kernels named *store*
       trace_compare(&old_trace, &new_trace, phase);

   All times are sums over GPUs if there are several. */
#ifndef TRACE_ANSWERS_H
#define TRACE_ANSWERS_H

#include "trace_events.h"

typedef struct trace_sum {
    int name;
    uint64_t count, ns, bytes, shortest, longest;
} trace_sum;

static int trace_by_time(const void *a, const void *b)
{
    const uint64_t x = ((const trace_sum *)a)->ns, y = ((const trace_sum *)b)->ns;
    return (x < y) - (x > y);
}

/* Returns one sum per name, the longest total time first, over events of this phase and of kinds `first` to `last` that
   are shorter than `below` ns. */
static trace_sum *trace_sums(const trace *t, int phase, trace_kind first, trace_kind last, uint64_t below)
{
    const size_t bytes = ((size_t)t->names_count + 1) * sizeof(trace_sum); /* at least one */
    trace_sum *const sums = (trace_sum *)memset(trace_room(NULL, bytes), 0, bytes);
    for (int n = 0; n < t->names_count; n++)
        sums[n].name = n;
    for (size_t i = 0; i < t->count; i++) {
        const trace_event *const e = t->events + i;
        const trace_kind kind = t->names[e->name].kind;
        const uint64_t ns = e->end - e->begin;
        trace_sum *const s = sums + e->name;
        if (e->phase != phase || kind < first || kind > last || ns >= below)
            continue;
        s->shortest = s->count == 0 || ns < s->shortest ? ns : s->shortest;
        s->longest = ns > s->longest ? ns : s->longest;
        s->count++;
        s->ns += ns;
        s->bytes += e->bytes;
    }
    qsort(sums, (size_t)t->names_count, sizeof *sums, trace_by_time);
    return sums;
}

static trace_sum trace_total(const trace_sum *sums, int count)
{
    trace_sum all = {0, 0, 0, 0, 0, 0};
    for (int n = 0; n < count; n++) {
        all.count += sums[n].count;
        all.ns += sums[n].ns;
        all.bytes += sums[n].bytes;
    }
    return all;
}

/* Sums the events of a phase whose names contain `family`. */
static trace_sum trace_family(const trace *t, int phase, trace_kind kind, const char *family)
{
    trace_sum *const sums = trace_sums(t, phase, kind, kind, UINT64_MAX);
    trace_sum all = {0, 0, 0, 0, UINT64_MAX, 0};
    for (int n = 0; n < t->names_count; n++) {
        const trace_sum *const s = sums + n;
        if (s->count == 0 || strstr(t->names[s->name].text, family) == NULL)
            continue;
        all.count += s->count;
        all.ns += s->ns;
        all.bytes += s->bytes;
        all.shortest = s->shortest < all.shortest ? s->shortest : all.shortest;
        all.longest = s->longest > all.longest ? s->longest : all.longest;
    }
    free(sums);
    all.shortest = all.count ? all.shortest : 0;
    return all;
}

typedef struct trace_shown {
    char text[4096];
} trace_shown;

/* Returns at most `most` bytes of a name as they may be printed: whole characters, no control characters. */
static trace_shown trace_shown_of(const char *name, size_t most)
{
    trace_shown shown;
    size_t bytes = strlen(name);
    most = most < sizeof shown.text ? most : sizeof shown.text - 1;
    if (bytes > most)
        for (bytes = most; bytes && most - bytes < 3 && ((unsigned char)name[bytes] & 0xc0) == 0x80;)
            bytes--;
    memcpy(shown.text, name, bytes);
    shown.text[bytes] = 0;
    (void)trace_show(shown.text);
    return shown;
}

/* Prints the first `most` sums, each with its share of `whole` ns. */
static void trace_print_sums(const trace *t, const trace_sum *sums, uint64_t whole, int most)
{
    for (int n = 0; n < t->names_count && n < most && sums[n].count; n++)
        printf("    %-34s %8llu %11.3f ms %10.2f us %6.1f %%\n", trace_shown_of(t->names[sums[n].name].text, 34).text,
               (unsigned long long)sums[n].count, 1e-6 * (double)sums[n].ns,
               1e-3 * (double)sums[n].ns / (double)sums[n].count,
               100 * (double)sums[n].ns / (double)(whole ? whole : 1));
}

static int trace_by_begin(const void *a, const void *b)
{
    const uint64_t x = ((const trace_event *)a)->begin, y = ((const trace_event *)b)->begin;
    return (x > y) - (x < y);
}

static int trace_by_device(const void *a, const void *b)
{
    const uint32_t x = ((const trace_event *)a)->device, y = ((const trace_event *)b)->device;
    return x != y ? (x > y) - (x < y) : trace_by_begin(a, b);
}

/* ---- gaps: when no operation runs ---- */

/* Before one operation, or before all of a name. The parts are times before the operation's call began, during the
   call, and after it returned; `unknown` if its call is not in the trace. */
typedef struct trace_gap {
    uint64_t count, ns, before_call, in_call, after_call, unknown, longest;
} trace_gap;

typedef struct trace_busy {
    trace_list operations; /* of the phase, by device, then by begin */
    trace_gap *gaps;       /* one per name, before operations of that name */
    trace_gap all;
    uint64_t busy, span; /* at least one operation runs; from the first to the last; both added over GPUs */
    int devices;
} trace_busy;

static trace_gap trace_split(uint64_t begin, uint64_t end, const trace_event *call)
{
    trace_gap g = {1, end - begin, 0, 0, 0, 0, end - begin};
    if (call == NULL) {
        g.unknown = g.ns;
        return g;
    }
    const uint64_t from = call->begin < begin ? begin : call->begin > end ? end : call->begin;
    const uint64_t to = call->end < begin ? begin : call->end > end ? end : call->end;
    g.before_call = from - begin;
    g.in_call = to - from;
    g.after_call = end - to;
    return g;
}

static void trace_add_gap(trace_gap *sum, const trace_gap *g)
{
    sum->count += g->count;
    sum->ns += g->ns;
    sum->before_call += g->before_call;
    sum->in_call += g->in_call;
    sum->after_call += g->after_call;
    sum->unknown += g->unknown;
    sum->longest = g->longest > sum->longest ? g->longest : sum->longest;
}

/* Returns the call that started the operation, or NULL. */
static const trace_event *trace_call_of(const trace_list *calls, const trace_event *operation)
{
    const trace_event *const call = trace_find(calls, operation, trace_by_correlation);
    const int found =
        operation->correlation && call < calls->events + calls->count && call->correlation == operation->correlation;
    return found ? call : NULL;
}

/* Returns when the phase's operations ran and what was between them. End with trace_busy_free. */
static trace_busy trace_busy_of(const trace *t, int phase)
{
    const size_t bytes = ((size_t)t->names_count + 1) * sizeof(trace_gap);
    trace_busy b = {trace_sorted(t, TRACE_KERNEL, TRACE_COPY, trace_by_device), NULL, {0, 0, 0, 0, 0, 0, 0}, 0, 0, 0};
    const trace_list calls = trace_sorted(t, TRACE_CALL, TRACE_CALL, trace_by_correlation);
    uint64_t until = 0;
    size_t count = 0;
    b.gaps = (trace_gap *)memset(trace_room(NULL, bytes), 0, bytes);
    for (size_t i = 0; i < b.operations.count; i++)
        if (b.operations.events[i].phase == phase)
            b.operations.events[count++] = b.operations.events[i];
    b.operations.count = count;
    for (size_t i = 0; i < count; i++) {
        const trace_event *const e = b.operations.events + i;
        if (i == 0 || e->device != e[-1].device) {
            b.devices++;
            until = e->begin;
        } else if (e->begin > until) {
            const trace_gap gap = trace_split(until, e->begin, trace_call_of(&calls, e));
            trace_add_gap(b.gaps + e->name, &gap), trace_add_gap(&b.all, &gap);
        }
        b.busy += e->end <= until ? 0 : e->end - (e->begin > until ? e->begin : until);
        until = e->end > until ? e->end : until;
    }
    b.span = b.busy + b.all.ns;
    free(calls.events);
    return b;
}

static void trace_busy_free(trace_busy *b)
{
    free(b->operations.events), free(b->gaps);
}

/* Returns the gaps in the launch row: on each thread, from the end of a call that started work to the begin of the
   next. *launches is the number of those calls, *inside the time in them. */
static trace_gap trace_launch_row(const trace *t, int phase, uint64_t *launches, uint64_t *inside)
{
    const trace_list calls = trace_sorted(t, TRACE_CALL, TRACE_CALL, trace_by_track);
    const trace_list operations = trace_sorted(t, TRACE_KERNEL, TRACE_COPY, trace_by_correlation);
    const trace_event *last = NULL;
    trace_gap all = {0, 0, 0, 0, 0, 0, 0};
    *launches = 0, *inside = 0;
    for (size_t i = 0; i < calls.count; i++) {
        const trace_event *const e = calls.events + i;
        if (e->phase != phase || trace_call_of(&operations, e) == NULL)
            continue;
        ++*launches;
        *inside += e->end - e->begin;
        if (last && last->track == e->track && e->begin > last->end) {
            const trace_gap gap = trace_split(last->end, e->begin, NULL);
            trace_add_gap(&all, &gap);
        }
        last = e;
    }
    free(calls.events), free(operations.events);
    return all;
}

/* ---- one answer each ---- */

static int trace_by_length(const void *a, const void *b)
{
    const trace_event *const e = (const trace_event *)a, *const f = (const trace_event *)b;
    const uint64_t x = e->end - e->begin, y = f->end - f->begin;
    return x != y ? (x < y) - (x > y) : trace_by_begin(a, b);
}

/* Prints the `most` longest events in order of time. Reorders the events. */
static void trace_print_longest(const trace *t, trace_event *on_gpu, size_t count, size_t most)
{
    const uint64_t zero = count ? on_gpu[0].begin : 0;
    most = most < count ? most : count;
    qsort(on_gpu, count, sizeof *on_gpu, trace_by_length);
    qsort(on_gpu, most, sizeof *on_gpu, trace_by_begin);
    for (size_t i = 0; i < most; i++)
        printf("    at %11.3f ms %10.2f us   %s\n", 1e-6 * (double)(on_gpu[i].begin - zero),
               1e-3 * (double)(on_gpu[i].end - on_gpu[i].begin),
               trace_shown_of(t->names[on_gpu[i].name].text, 4095).text);
}

static void trace_print_copies(const trace *t, const trace_sum *sums)
{
    for (int n = 0; n < t->names_count && sums[n].count; n++)
        printf("    %-34s %8llu %11.3f ms %13.3f MB %9.2f GB/s\n",
               trace_shown_of(t->names[sums[n].name].text, 4095).text, (unsigned long long)sums[n].count,
               1e-6 * (double)sums[n].ns, 1e-6 * (double)sums[n].bytes,
               (double)sums[n].bytes / (double)(sums[n].ns ? sums[n].ns : 1));
}

/* Shows whether the GPU waits for the host: counts operations so short that a launch takes as long. */
static void trace_print_small(const trace *t, int phase, const trace_busy *b)
{
    enum { small_ns = 5000 }; /* about the time of a launch */
    trace_sum *const small = trace_sums(t, phase, TRACE_KERNEL, TRACE_COPY, small_ns);
    const trace_sum smalls = trace_total(small, t->names_count);
    printf("3   small and frequent: %llu of %zu operations take less than %d us each, %.3f ms in total; the GPU is "
           "busy\n    for %.3f of %.3f ms from the first operation to the last. The host's time in calls and in NVTX "
           "ranges:\n",
           (unsigned long long)smalls.count, b->operations.count, small_ns / 1000, 1e-6 * (double)smalls.ns,
           1e-6 * (double)b->busy, 1e-6 * (double)b->span);
    free(small);
}

/* Prints the operations that most time was lost before. Uses and clears b->gaps. */
static void trace_print_waits(const trace *t, trace_busy *b, int most)
{
    for (int line = 0; line < most; line++) {
        int longest = 0;
        for (int n = 1; n < t->names_count; n++)
            longest = b->gaps[n].ns > b->gaps[longest].ns ? n : longest;
        const trace_gap g = t->names_count ? b->gaps[longest] : b->all;
        if (t->names_count == 0 || g.count == 0)
            return;
        printf("    before %-27s %8llu %11.3f ms %10.2f us %6.1f %%   longest %.2f us\n",
               trace_shown_of(t->names[longest].text, 27).text, (unsigned long long)g.count, 1e-6 * (double)g.ns,
               1e-3 * (double)g.ns / (double)g.count, 100 * (double)g.ns / (double)b->all.ns, 1e-3 * (double)g.longest);
        b->gaps[longest].ns = b->gaps[longest].count = 0;
    }
}

static void trace_print_gaps(const trace *t, int phase, trace_busy *b)
{
    uint64_t launches, inside;
    const trace_gap row = trace_launch_row(t, phase, &launches, &inside);
    printf("6   gaps: no operation runs for %.3f ms, %llu times; %.3f ms of it pass before the call of the next one\n"
           "    begins, %.3f ms in that call, %.3f ms after it; the calls of %.3f ms are unknown\n",
           1e-6 * (double)b->all.ns, (unsigned long long)b->all.count, 1e-6 * (double)b->all.before_call,
           1e-6 * (double)b->all.in_call, 1e-6 * (double)b->all.after_call, 1e-6 * (double)b->all.unknown);
    trace_print_waits(t, b, 3);
    printf("    launch row: %llu calls that start work, %.3f ms in them, %.3f ms between them; longest gap %.2f us\n",
           (unsigned long long)launches, 1e-6 * (double)inside, 1e-6 * (double)row.ns, 1e-3 * (double)row.longest);
}

static int trace_by_stream(const void *a, const void *b)
{
    const trace_event *const e = (const trace_event *)a, *const f = (const trace_event *)b;
    TRACE_ORDER(e->name, f->name);
    TRACE_ORDER(e->device, f->device);
    TRACE_ORDER(e->track, f->track);
    return trace_by_begin(a, b);
}

/* The spans of one range on one stream. */
typedef struct trace_span_sum {
    const char *text;
    uint32_t device, track;
    uint64_t count, operations, ns;
} trace_span_sum;

static int trace_by_span_time(const void *a, const void *b)
{
    const trace_span_sum *const x = (const trace_span_sum *)a, *const y = (const trace_span_sum *)b;
    TRACE_ORDER(y->ns, x->ns);
    TRACE_ORDER(strcmp(x->text, y->text), 0);
    TRACE_ORDER(x->device, y->device);
    TRACE_ORDER(x->track, y->track);
    return 0;
}

static void trace_begin_span_sum(trace_span_sum *sum, const char *text, const trace_event *span)
{
    memset(sum, 0, sizeof *sum);
    sum->text = text;
    sum->device = span->device;
    sum->track = span->track;
}

/* Prints the ranges as the streams have seen them, `most` lines. */
static void trace_print_spans(const trace *t, int phase, size_t most)
{
    const trace_list spans = trace_sorted(t, TRACE_SPAN, TRACE_SPAN, trace_by_stream);
    trace_span_sum *const sums = (trace_span_sum *)trace_room(NULL, (spans.count + 1) * sizeof *sums);
    const trace_event *last = NULL;
    size_t count = 0;
    for (size_t i = 0; i < spans.count; i++) {
        const trace_event *const e = spans.events + i;
        if (e->phase != phase)
            continue;
        if (!last || e->name != last->name || e->device != last->device || e->track != last->track)
            trace_begin_span_sum(sums + count++, t->names[e->name].text, e);
        last = e;
        sums[count - 1].count++;
        sums[count - 1].operations += e->bytes;
        sums[count - 1].ns += e->end - e->begin;
    }
    qsort(sums, count, sizeof *sums, trace_by_span_time);
    printf("7   ranges on streams, from the first operation to the last: count, operations, total, each\n");
    for (size_t i = 0; i < count && i < most; i++)
        printf("    GPU %u stream %-5u %-24s %6llu %8llu %11.3f ms %10.2f us\n", sums[i].device, sums[i].track,
               trace_shown_of(sums[i].text, 24).text, (unsigned long long)sums[i].count,
               (unsigned long long)sums[i].operations, 1e-6 * (double)sums[i].ns,
               1e-3 * (double)sums[i].ns / (double)sums[i].count);
    free(spans.events), free(sums);
}

/* Prints the answers for one phase, the fifth for the kernels whose names contain `family`. */
static inline void trace_report(const trace *t, int phase, const char *family)
{
    enum { few = 6 };
    trace_busy busy = trace_busy_of(t, phase);
    trace_sum *const all = trace_sums(t, phase, TRACE_KERNEL, TRACE_COPY, UINT64_MAX);
    trace_sum *const calls = trace_sums(t, phase, TRACE_CALL, TRACE_CALL, UINT64_MAX);
    trace_sum *const ranges = trace_sums(t, phase, TRACE_RANGE, TRACE_RANGE, UINT64_MAX);
    trace_sum *const copies = trace_sums(t, phase, TRACE_COPY, TRACE_COPY, UINT64_MAX);
    const trace_sum one = trace_family(t, phase, TRACE_KERNEL, family);
    printf("1   top operations by total time: count, total, each, share\n");
    trace_print_sums(t, all, trace_total(all, t->names_count).ns, few);
    printf("2   the longest operations, in order of time\n");
    trace_print_longest(t, busy.operations.events, busy.operations.count, few);
    trace_print_small(t, phase, &busy);
    trace_print_sums(t, calls, trace_total(calls, t->names_count).ns, few);
    trace_print_sums(t, ranges, ranges[0].ns, few); /* shares of the longest range */
    printf("4   memory operations by direction: count, total, bytes, speed\n");
    trace_print_copies(t, copies);
    printf("5   kernels named *%s*: %llu, %.3f ms, %.2f us each (%.2f to %.2f)\n", family,
           (unsigned long long)one.count, 1e-6 * (double)one.ns,
           1e-3 * (double)one.ns / (double)(one.count ? one.count : 1), 1e-3 * (double)one.shortest,
           1e-3 * (double)one.longest);
    trace_print_gaps(t, phase, &busy);
    trace_print_spans(t, phase, few);
    trace_busy_free(&busy);
    free(all), free(calls), free(ranges), free(copies);
}

/* ---- two traces ---- */

/* What one name, or what was before operations of that name, took in the old and in the new trace. */
typedef struct trace_change {
    const char *text;
    uint64_t count[2], ns[2];
} trace_change;

static int64_t trace_slower(const trace_change *c)
{
    return (int64_t)(c->ns[1] - c->ns[0]); /* sums of a spoilt file's times may not fit */
}

/* What became slower comes first, the most first. */
static int trace_by_change(const void *a, const void *b)
{
    const int64_t x = trace_slower((const trace_change *)a), y = trace_slower((const trace_change *)b);
    return (x < y) - (x > y);
}

static void trace_print_change(const trace_change *c)
{
    char each[2][24] = {"-", "-"};
    for (int side = 0; side < 2; side++)
        if (c->count[side])
            snprintf(each[side], sizeof each[side], "%.2f", 1e-3 * (double)c->ns[side] / (double)c->count[side]);
    printf("    %-27s %8llu %8llu %11.3f %11.3f %+11.3f ms %9s %9s us\n", trace_shown_of(c->text, 27).text,
           (unsigned long long)c->count[0], (unsigned long long)c->count[1], 1e-6 * (double)c->ns[0],
           1e-6 * (double)c->ns[1], 1e-6 * (double)trace_slower(c), each[0], each[1]);
}

/* Prints the `most` changes to the worse, then as many to the better. */
static void trace_print_changes(const char *title, trace_change *changes, size_t count, size_t most)
{
    printf("%-31s %8s %8s %11s %11s %14s %9s %9s\n", title, "old", "new", "old ms", "new ms", "change", "old each",
           "new each");
    qsort(changes, count, sizeof *changes, trace_by_change);
    for (size_t i = 0; i < count; i++)
        if ((i < most || i + most >= count) && trace_slower(&changes[i]) != 0)
            trace_print_change(&changes[i]);
        else if (i == most && count > 2 * most)
            printf("    ... %zu others between\n", count - 2 * most);
}

/* Lists both traces' operations (or, with `gaps`, what is before them) by name. */
static trace_change *trace_changes(const trace *const both[2], const trace_busy *busy, int phase, int gaps,
                                   size_t *count)
{
    const size_t old_names = (size_t)both[0]->names_count, most = old_names + (size_t)both[1]->names_count + 1;
    trace_change *const changes =
        (trace_change *)memset(trace_room(NULL, most * sizeof *changes), 0, most * sizeof *changes);
    size_t *const place = (size_t *)memset(trace_room(NULL, most * sizeof *place), 0, most * sizeof *place);
    *count = 0;
    for (int side = 0; side < 2; side++) {
        const trace *const t = both[side];
        trace_sum *const sums = trace_sums(t, phase, TRACE_KERNEL, TRACE_COPY, UINT64_MAX);
        for (int n = 0; n < t->names_count; n++) {
            const trace_kind_name *const name = t->names + sums[n].name;
            const trace_gap *const gap = busy[side].gaps + sums[n].name;
            if ((gaps ? gap->count : sums[n].count) == 0)
                continue;
            const int old = side == 0   ? sums[n].name
                            : old_names ? both[0]->slots[trace_slot(both[0], name->kind, name->text)] - 1
                                        : -1;
            size_t at = old < 0 ? 0 : place[old]; /* plus 1; 0: not in the old trace */
            if (at == 0)
                at = ++*count;
            if (old >= 0)
                place[old] = at;
            changes[at - 1].text = name->text;
            changes[at - 1].count[side] = gaps ? gap->count : sums[n].count;
            changes[at - 1].ns[side] = gaps ? gap->ns : sums[n].ns;
        }
        free(sums);
    }
    free(place);
    return changes;
}

static void trace_print_sides(const char *what, uint64_t old, uint64_t now)
{
    printf("    %-45s %11.3f %11.3f %+11.3f ms", what, 1e-6 * (double)old, 1e-6 * (double)now,
           1e-6 * ((double)now - (double)old));
    if (old)
        printf(" %9.2f times", (double)now / (double)old);
    printf("\n");
}

/* Prints what became slower and what faster, by operation and by what the GPU waited for. */
static inline void trace_compare(const trace *old, const trace *now, int phase)
{
    enum { few = 6 };
    const trace *const both[2] = {old, now};
    trace_busy busy[2] = {trace_busy_of(old, phase), trace_busy_of(now, phase)};
    uint64_t launches[2], inside[2], between[2];
    for (int side = 0; side < 2; side++)
        between[side] = trace_launch_row(both[side], phase, &launches[side], &inside[side]).ns;
    for (int gaps = 0; gaps < 2; gaps++) {
        size_t count;
        trace_change *const changes = trace_changes(both, busy, phase, gaps, &count);
        trace_print_changes(gaps ? "gaps before" : "operations", changes, count, few);
        free(changes);
    }
    printf("%-49s %11s %11s %14s\n", "in all", "old ms", "new ms", "change");
    trace_print_sides("an operation runs", busy[0].busy, busy[1].busy);
    trace_print_sides("none runs: before its call", busy[0].all.before_call, busy[1].all.before_call);
    trace_print_sides("none runs: in its call", busy[0].all.in_call, busy[1].all.in_call);
    trace_print_sides("none runs: after its call, or no call known", busy[0].all.after_call + busy[0].all.unknown,
                      busy[1].all.after_call + busy[1].all.unknown);
    trace_print_sides("from the first operation to the last", busy[0].span, busy[1].span);
    trace_print_sides("the host in calls that start work", inside[0], inside[1]);
    trace_print_sides("the host between those", between[0], between[1]);
    printf("    %-45s %11llu %11llu\n", "calls that start work", (unsigned long long)launches[0],
           (unsigned long long)launches[1]);
    trace_busy_free(&busy[0]), trace_busy_free(&busy[1]);
}
#endif

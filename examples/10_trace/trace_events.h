/* SPDX-License-Identifier: MIT */
/* A trace holds events with a name, a begin and an end in nanoseconds. trace_write() writes a file that ui.perfetto.dev
   and chrome://tracing open; trace_report() prints the five answers that one looks for in such a file. Plain C without
   CUDA: events may come from anywhere (cupti_trace.h records those of a program).

       trace t = {0};
       trace_add(&t, trace_name(&t, TRACE_KERNEL, "store"), (trace_event){.begin = 1000, .end = 3500, .track = 7});
       trace_write(&t, "trace.json");
       trace_report(&t, t.phase, "store");

   The caller must lock if several threads use one trace, as cupti_trace.h does. */
#ifndef TRACE_EVENTS_H
#define TRACE_EVENTS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Kernels and copies run on the GPU's streams, calls and ranges on the host's threads. */
typedef enum { TRACE_KERNEL, TRACE_COPY, TRACE_CALL, TRACE_RANGE } trace_kind;

typedef struct trace_event {
    int name, phase;      /* from trace_name(); part of the program, see trace.phase */
    uint64_t begin, end;  /* ns, of one clock for all events */
    uint64_t bytes;       /* of copies and memsets */
    uint32_t track;       /* stream or thread */
    uint32_t correlation; /* equal for a call and the work that it started; 0: none */
} trace_event;

typedef struct trace_kind_name {
    trace_kind kind;
    char *text;
} trace_kind_name;

typedef struct trace {
    trace_event *events;
    size_t count, room;
    trace_kind_name *names; /* one per operation */
    int names_count;
    int phase; /* of the events that are added next; answers are for one phase */
} trace;

static void *trace_room(void *old, size_t bytes)
{
    void *const p = realloc(old, bytes);
    if (p == NULL) {
        fprintf(stderr, "out of memory for %zu bytes of a trace\n", bytes);
        exit(1);
    }
    return p;
}

/* Returns the number of a name of this kind; the same text has the same number. */
static int trace_name(trace *t, trace_kind kind, const char *text)
{
    for (int n = 0; n < t->names_count; n++)
        if (t->names[n].kind == kind && strcmp(t->names[n].text, text) == 0)
            return n;
    t->names = (trace_kind_name *)trace_room(t->names, ((size_t)t->names_count + 1) * sizeof *t->names);
    t->names[t->names_count].kind = kind;
    t->names[t->names_count].text = strcpy((char *)trace_room(NULL, strlen(text) + 1), text);
    return t->names_count++;
}

static void trace_add(trace *t, int name, trace_event event)
{
    if (t->count == t->room) {
        t->room = t->room ? 2 * t->room : 4096;
        t->events = (trace_event *)trace_room(t->events, t->room * sizeof *t->events);
    }
    event.name = name;
    event.phase = t->phase;
    t->events[t->count++] = event;
}

/* ---- the file: https://ui.perfetto.dev reads Chrome's JSON ---- */

/* Escapes each byte that is not printable ASCII, so that any name makes valid JSON. */
static void trace_write_string(FILE *f, const char *text)
{
    fputc('"', f);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(f, "\\%c", c);
        else if (c < 32 || c > 126)
            fprintf(f, "\\u%04x", c);
        else
            fputc(c, f);
    }
    fputc('"', f);
}

/* In the viewer, process 1 is the host and process 2 the GPU. Each stream has a track for kernels, then one for
   copies; each host thread has one for ranges, then one for calls. */
static int trace_process(trace_kind kind)
{
    return kind == TRACE_KERNEL || kind == TRACE_COPY ? 2 : 1;
}

static uint64_t trace_thread(trace_kind kind, uint32_t track)
{
    return 2 * (uint64_t)track + (kind == TRACE_COPY || kind == TRACE_CALL);
}

static void trace_write_track(FILE *f, trace_kind kind, uint32_t track)
{
    static const char *const titles[] = {"stream %u kernels", "stream %u copies", "thread %u CUDA calls",
                                         "thread %u ranges"};
    char title[64];
    snprintf(title, sizeof title, titles[kind], track);
    fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%llu,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}",
            trace_process(kind), (unsigned long long)trace_thread(kind, track), title);
}

/* Writes the name of each track once. */
static void trace_write_tracks(FILE *f, const trace *t)
{
    trace_event *seen = NULL;
    size_t count = 0;
    for (size_t i = 0; i < t->count; i++) {
        const trace_event *const e = t->events + i;
        const trace_kind kind = t->names[e->name].kind;
        size_t s = 0;
        while (s < count && (t->names[seen[s].name].kind != kind || seen[s].track != e->track))
            s++;
        if (s < count)
            continue;
        seen = (trace_event *)trace_room(seen, (count + 1) * sizeof *seen);
        seen[count++] = *e;
        trace_write_track(f, kind, e->track);
    }
    free(seen);
}

/* Times are microseconds with three decimals: whole nanoseconds, not rounded. */
static void trace_write_event(FILE *f, const trace *t, const trace_event *e, uint64_t zero)
{
    const trace_kind kind = t->names[e->name].kind;
    const unsigned long long at = e->begin - zero, ns = e->end - e->begin;
    fprintf(f, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%llu,\"ts\":%llu.%03llu,\"dur\":%llu.%03llu,\"name\":",
            trace_process(kind), (unsigned long long)trace_thread(kind, e->track), at / 1000, at % 1000, ns / 1000,
            ns % 1000);
    trace_write_string(f, t->names[e->name].text);
    if (kind == TRACE_COPY)
        fprintf(f, ",\"args\":{\"correlation\":%u,\"bytes\":%llu}", e->correlation, (unsigned long long)e->bytes);
    else if (kind != TRACE_RANGE)
        fprintf(f, ",\"args\":{\"correlation\":%u}", e->correlation);
    fputc('}', f);
}

/* Returns 0, or -1 if the file cannot be written; errno says why. */
static int trace_write(const trace *t, const char *path)
{
    FILE *const f = fopen(path, "w");
    uint64_t zero = UINT64_MAX;
    if (f == NULL)
        return -1;
    for (size_t i = 0; i < t->count; i++)
        zero = t->events[i].begin < zero ? t->events[i].begin : zero;
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
          "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"host\"}},\n"
          "{\"ph\":\"M\",\"pid\":2,\"name\":\"process_name\",\"args\":{\"name\":\"GPU\"}}",
          f);
    trace_write_tracks(f, t);
    for (size_t i = 0; i < t->count; i++)
        trace_write_event(f, t, t->events + i, zero);
    fputs("\n]}\n", f);
    const int failed = ferror(f);
    return fclose(f) != 0 || failed ? -1 : 0;
}

/* ---- the answers ---- */

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

/* Prints the first `most` sums, each with its share of `whole` ns. */
static void trace_print_sums(const trace *t, const trace_sum *sums, uint64_t whole, int most)
{
    for (int n = 0; n < t->names_count && n < most && sums[n].count; n++)
        printf("    %-34.34s %8llu %11.3f ms %10.2f us %6.1f %%\n", t->names[sums[n].name].text,
               (unsigned long long)sums[n].count, 1e-6 * (double)sums[n].ns,
               1e-3 * (double)sums[n].ns / (double)sums[n].count,
               100 * (double)sums[n].ns / (double)(whole ? whole : 1));
}

static int trace_by_begin(const void *a, const void *b)
{
    const uint64_t x = ((const trace_event *)a)->begin, y = ((const trace_event *)b)->begin;
    return (x > y) - (x < y);
}

/* Returns the phase's events on the GPU in order of time. *busy is the time during which at least one of them ran,
   *span the time from the first begin to the last end. */
static trace_event *trace_on_gpu(const trace *t, int phase, size_t *count, uint64_t *busy, uint64_t *span)
{
    trace_event *const on_gpu = (trace_event *)trace_room(NULL, (t->count + 1) * sizeof *on_gpu);
    uint64_t until = 0;
    *count = 0, *busy = 0;
    for (size_t i = 0; i < t->count; i++)
        if (t->events[i].phase == phase && t->names[t->events[i].name].kind <= TRACE_COPY)
            on_gpu[(*count)++] = t->events[i];
    qsort(on_gpu, *count, sizeof *on_gpu, trace_by_begin);
    for (size_t i = 0; i < *count; i++) {
        const uint64_t begin = on_gpu[i].begin > until ? on_gpu[i].begin : until;
        if (on_gpu[i].end > begin) {
            *busy += on_gpu[i].end - begin;
            until = on_gpu[i].end;
        }
    }
    *span = *count ? until - on_gpu[0].begin : 0;
    return on_gpu;
}

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
               1e-3 * (double)(on_gpu[i].end - on_gpu[i].begin), t->names[on_gpu[i].name].text);
}

static void trace_print_copies(const trace *t, const trace_sum *sums)
{
    for (int n = 0; n < t->names_count && sums[n].count; n++)
        printf("    %-34s %8llu %11.3f ms %13.3f MB %9.2f GB/s\n", t->names[sums[n].name].text,
               (unsigned long long)sums[n].count, 1e-6 * (double)sums[n].ns, 1e-6 * (double)sums[n].bytes,
               (double)sums[n].bytes / (double)(sums[n].ns ? sums[n].ns : 1));
}

/* Shows whether the GPU waits for the host: counts operations so short that a launch takes as long. */
static void trace_print_small(const trace *t, int phase, size_t count, uint64_t busy, uint64_t span)
{
    enum { small_ns = 5000 }; /* about the time of a launch */
    trace_sum *const small = trace_sums(t, phase, TRACE_KERNEL, TRACE_COPY, small_ns);
    const trace_sum smalls = trace_total(small, t->names_count);
    printf(
        "3   small and frequent: %llu of %zu operations take less than %d us each, %.3f ms in total; the GPU is busy\n"
        "    for %.3f of %.3f ms from the first operation to the last. The host's time in calls and in NVTX ranges:\n",
        (unsigned long long)smalls.count, count, small_ns / 1000, 1e-6 * (double)smalls.ns, 1e-6 * (double)busy,
        1e-6 * (double)span);
    free(small);
}

/* Prints the five answers for one phase, the last for the kernels whose names contain `family`. */
static void trace_report(const trace *t, int phase, const char *family)
{
    enum { few = 6 };
    size_t count;
    uint64_t busy, span;
    trace_event *const on_gpu = trace_on_gpu(t, phase, &count, &busy, &span);
    trace_sum *const all = trace_sums(t, phase, TRACE_KERNEL, TRACE_COPY, UINT64_MAX);
    trace_sum *const calls = trace_sums(t, phase, TRACE_CALL, TRACE_CALL, UINT64_MAX);
    trace_sum *const ranges = trace_sums(t, phase, TRACE_RANGE, TRACE_RANGE, UINT64_MAX);
    trace_sum *const copies = trace_sums(t, phase, TRACE_COPY, TRACE_COPY, UINT64_MAX);
    const trace_sum one = trace_family(t, phase, TRACE_KERNEL, family);
    printf("1   top operations by total time: count, total, each, share\n");
    trace_print_sums(t, all, trace_total(all, t->names_count).ns, few);
    printf("2   the longest operations, in order of time\n");
    trace_print_longest(t, on_gpu, count, few);
    trace_print_small(t, phase, count, busy, span);
    trace_print_sums(t, calls, trace_total(calls, t->names_count).ns, few);
    trace_print_sums(t, ranges, ranges[0].ns, few); /* shares of the longest range */
    printf("4   memory operations by direction: count, total, bytes, speed\n");
    trace_print_copies(t, copies);
    printf("5   kernels named *%s*: %llu, %.3f ms, %.2f us each (%.2f to %.2f)\n", family,
           (unsigned long long)one.count, 1e-6 * (double)one.ns,
           1e-3 * (double)one.ns / (double)(one.count ? one.count : 1), 1e-3 * (double)one.shortest,
           1e-3 * (double)one.longest);
    free(on_gpu), free(all), free(calls), free(ranges), free(copies);
}
#endif

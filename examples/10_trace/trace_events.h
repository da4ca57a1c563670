/* SPDX-License-Identifier: MIT */
/* A trace holds events with a name, a begin and an end in nanoseconds. trace_write() writes a file that ui.perfetto.dev
   and chrome://tracing open; trace_answers.h prints what one looks for in such a file. Plain C without CUDA: events may
   come from anywhere (cupti_trace.h records those of a program, trace_read.h reads files).

       trace t = {0};
       trace_add(&t, trace_name(&t, TRACE_KERNEL, "store"), (trace_event){.begin = 1000, .end = 3500, .track = 7});
       trace_project(&t);
       trace_write(&t, "trace.json");

   The caller must lock if several threads use one trace, as cupti_trace.h does. */
#ifndef TRACE_EVENTS_H
#define TRACE_EVENTS_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Kernels and copies run on the GPU's streams, calls and ranges on the host's threads. A span is a range projected onto
   a stream, see trace_project(). */
typedef enum { TRACE_KERNEL, TRACE_COPY, TRACE_CALL, TRACE_RANGE, TRACE_SPAN } trace_kind;

typedef struct trace_event {
    int name, phase;      /* from trace_name(); part of the program, see trace.phase */
    uint64_t begin, end;  /* ns, of one clock for all events */
    uint64_t bytes;       /* of copies and memsets; the number of operations of a span */
    uint32_t device;      /* the GPU's number; 0 on the host */
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
    int *slots; /* a hash table of numbers of names plus 1; 0: free */
    uint32_t slots_count;
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

/* Returns where the name is in the hash table, or where it belongs. */
static uint32_t trace_slot(const trace *t, trace_kind kind, const char *text)
{
    uint32_t hash = 2166136261u ^ (uint32_t)kind; /* FNV-1a */
    for (const char *c = text; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    for (uint32_t at = hash;; at++) {
        const int n = t->slots[at % t->slots_count] - 1;
        if (n < 0 || (t->names[n].kind == kind && strcmp(t->names[n].text, text) == 0))
            return at % t->slots_count;
    }
}

static void trace_grow_slots(trace *t)
{
    const uint32_t count = t->slots_count ? 2 * t->slots_count : 256;
    t->slots = (int *)trace_room(t->slots, count * sizeof *t->slots);
    memset(t->slots, 0, count * sizeof *t->slots);
    t->slots_count = count;
    for (int n = 0; n < t->names_count; n++)
        t->slots[trace_slot(t, t->names[n].kind, t->names[n].text)] = n + 1;
}

/* Returns the number of a name of this kind; the same text has the same number. */
static int trace_name(trace *t, trace_kind kind, const char *text)
{
    if (2 * (uint32_t)t->names_count >= t->slots_count)
        trace_grow_slots(t);
    int *const slot = t->slots + trace_slot(t, kind, text);
    if (*slot)
        return *slot - 1;
    if ((t->names_count & (t->names_count - 1)) == 0) /* at powers of two, room for twice as many */
        t->names = (trace_kind_name *)trace_room(t->names, (2 * (size_t)t->names_count + (t->names_count == 0)) *
                                                               sizeof *t->names);
    t->names[t->names_count].kind = kind;
    t->names[t->names_count].text = strcpy((char *)trace_room(NULL, strlen(text) + 1), text);
    *slot = ++t->names_count;
    return t->names_count - 1;
}

/* Writes the function's name alone, without namespaces, template arguments and parameters: "kvpc_store_kernel". */
static void trace_short_name(const char *full, char *text, size_t room)
{
    static const char anonymous[] = "(anonymous namespace)";
    const char *begin = full, *end = NULL, *c = full;
    for (int depth = 0; *c; c++) {
        if (strncmp(c, anonymous, sizeof anonymous - 1) == 0)
            c += sizeof anonymous - 2;
        else if (*c == '<') {
            end = depth == 0 ? c : end;
            depth++;
        } else if (*c == '>')
            depth -= depth > 0;
        else if (depth == 0 && *c == '(')
            break;
        else if (depth == 0 && (*c == ':' || *c == ' ')) {
            begin = c + 1;
            end = NULL;
        }
    }
    end = end ? end : c;
    if (end == begin)
        begin = full, end = full + strlen(full);
    snprintf(text, room, "%.*s", (int)(end - begin), begin);
}

/* Writes "copy DtoD" and the like, into 16 bytes. H: host, D: device, A: array, P: peer, as CUPTI and nsys number them. */
static void trace_copy_name(uint64_t direction, char *text)
{
    static const char directions[] = "?to?HtoDDtoHHtoAAtoHAtoAAtoDDtoADtoDHtoHPtoP";
    snprintf(text, 16, "copy %.4s", directions + 4 * (direction < sizeof directions / 4 ? direction : 0));
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

static trace_kind trace_kind_of(const trace *t, const trace_event *e)
{
    return t->names[e->name].kind;
}

static void trace_free(trace *t)
{
    for (int n = 0; n < t->names_count; n++)
        free(t->names[n].text);
    free(t->names), free(t->slots), free(t->events);
    memset(t, 0, sizeof *t);
}

/* ---- ranges projected onto streams ---- */

/* Events of some kinds, in the order of a comparison. */
typedef struct trace_list {
    trace_event *events;
    size_t count;
} trace_list;

static int trace_by_correlation(const void *a, const void *b)
{
    const uint32_t x = ((const trace_event *)a)->correlation, y = ((const trace_event *)b)->correlation;
    return (x > y) - (x < y);
}

static int trace_by_track(const void *a, const void *b)
{
    const trace_event *const e = (const trace_event *)a, *const f = (const trace_event *)b;
    return e->track != f->track ? (e->track > f->track) - (e->track < f->track)
                                : (e->begin > f->begin) - (e->begin < f->begin);
}

/* Copies the events of kinds `first` to `last`, sorted. The caller frees `events`. */
static trace_list trace_sorted(const trace *t, trace_kind first, trace_kind last,
                               int (*order)(const void *, const void *))
{
    trace_list list = {(trace_event *)trace_room(NULL, (t->count + 1) * sizeof *list.events), 0};
    for (size_t i = 0; i < t->count; i++)
        if (trace_kind_of(t, t->events + i) >= first && trace_kind_of(t, t->events + i) <= last)
            list.events[list.count++] = t->events[i];
    qsort(list.events, list.count, sizeof *list.events, order);
    return list;
}

/* Returns the first event that is not less than `key`. */
static const trace_event *trace_find(const trace_list *list, const trace_event *key,
                                     int (*order)(const void *, const void *))
{
    size_t from = 0, to = list->count;
    while (from < to) {
        const size_t middle = from + (to - from) / 2;
        if (order(list->events + middle, key) < 0)
            from = middle + 1;
        else
            to = middle;
    }
    return list->events + from;
}

enum { trace_most_streams = 64 }; /* that one range is projected onto; more are left out */

/* Extends the spans of one range by an operation. Returns the number of spans. */
static size_t trace_extend(trace_event *spans, size_t count, const trace_event *operation)
{
    size_t s = 0;
    while (s < count && (spans[s].device != operation->device || spans[s].track != operation->track))
        s++;
    if (s == trace_most_streams)
        return count;
    if (s == count) {
        spans[s] = *operation;
        spans[s].bytes = 0;
    }
    spans[s].begin = operation->begin < spans[s].begin ? operation->begin : spans[s].begin;
    spans[s].end = operation->end > spans[s].end ? operation->end : spans[s].end;
    spans[s].bytes++;
    return s < count ? count : count + 1;
}

/* Finds the operations that were started by calls inside the range, on its thread, by their correlation. Writes one
   span per stream, from the begin of the first operation to the end of the last, and returns how many. */
static size_t trace_spans(const trace_event *range, const trace_list *calls, const trace_list *operations,
                          trace_event *spans)
{
    size_t count = 0;
    for (const trace_event *call = trace_find(calls, range, trace_by_track);
         call < calls->events + calls->count && call->track == range->track && call->begin <= range->end; call++) {
        if (call->correlation == 0)
            continue;
        for (const trace_event *o = trace_find(operations, call, trace_by_correlation);
             o < operations->events + operations->count && o->correlation == call->correlation; o++)
            count = trace_extend(spans, count, o);
    }
    return count;
}

/* Adds the spans of all ranges that launched something. */
static inline void trace_project(trace *t)
{
    trace_event spans[trace_most_streams];
    const size_t before = t->count;
    const int phase = t->phase;
    const trace_list calls = trace_sorted(t, TRACE_CALL, TRACE_CALL, trace_by_track);
    const trace_list operations = trace_sorted(t, TRACE_KERNEL, TRACE_COPY, trace_by_correlation);
    for (size_t i = 0; i < before; i++) {
        const trace_event range = t->events[i];
        if (trace_kind_of(t, &range) != TRACE_RANGE)
            continue;
        const size_t count = trace_spans(&range, &calls, &operations, spans);
        const int name = count ? trace_name(t, TRACE_SPAN, t->names[range.name].text) : 0;
        t->phase = range.phase;
        for (size_t s = 0; s < count; s++) {
            spans[s].correlation = 0;
            trace_add(t, name, spans[s]);
        }
    }
    t->phase = phase;
    free(calls.events), free(operations.events);
}

/* Returns 1 if one of the ranges on this thread contains the time. Ranges are sorted by thread, then by begin; of
   several that contain each other, the outermost counts, so `until` is the latest end so far. */
static int trace_within(const trace_list *ranges, const uint64_t *until, uint32_t track, uint64_t time)
{
    trace_event key = {0, 0, time + 1, 0, 0, 0, track, 0};
    const size_t after = (size_t)(trace_find(ranges, &key, trace_by_track) - ranges->events);
    return after > 0 && ranges->events[after - 1].track == track && until[after - 1] >= time;
}

/* Makes phase 1 of the ranges with this name, what lies in them on their threads, and the operations that were started
   there; the rest becomes phase 0. Call it before trace_project(). Returns the number of ranges. */
static inline size_t trace_select(trace *t, const char *range)
{
    trace_list ranges = trace_sorted(t, TRACE_RANGE, TRACE_RANGE, trace_by_track);
    size_t count = 0;
    for (size_t i = 0; i < ranges.count; i++)
        if (strcmp(t->names[ranges.events[i].name].text, range) == 0)
            ranges.events[count++] = ranges.events[i];
    ranges.count = count;
    uint64_t *const until = (uint64_t *)trace_room(NULL, (count + 1) * sizeof *until);
    for (size_t i = 0; i < count; i++) {
        const trace_event *const e = ranges.events + i;
        until[i] = i && e->track == e[-1].track && until[i - 1] > e->end ? until[i - 1] : e->end;
    }
    const trace_list calls = trace_sorted(t, TRACE_CALL, TRACE_CALL, trace_by_correlation);
    for (size_t i = 0; i < t->count; i++) {
        trace_event *const e = t->events + i;
        const trace_kind kind = trace_kind_of(t, e);
        const trace_event *const call = trace_find(&calls, e, trace_by_correlation);
        const int called = e->correlation && call < calls.events + calls.count && call->correlation == e->correlation;
        if (kind == TRACE_CALL || kind == TRACE_RANGE)
            e->phase = trace_within(&ranges, until, e->track, e->begin);
        else
            e->phase = called && trace_within(&ranges, until, call->track, call->begin);
    }
    free(ranges.events), free(calls.events), free(until);
    return count;
}

/* ---- the file: https://ui.perfetto.dev reads Chrome's JSON ---- */

/* Returns the length of the UTF-8 character of two or more bytes that the text begins with; 0: there is none. */
static int trace_utf8(const unsigned char *text)
{
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    const int length = text[0] < 0xc0 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf8 ? 4 : 0;
    uint32_t code = text[0] & (0x7fu >> length);
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (text[i] & 63);
    }
    return length && code >= least[length] && code < 0x110000 && code >> 11 != 0xd800 >> 11 ? length : 0;
}

/* Replaces control characters, which a terminal would obey, and what is not UTF-8, by '?'. Returns the text. */
static char *trace_show(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c;) {
        const int utf8 = trace_utf8(c);
        const int control = utf8 ? c[0] == 0xc2 && c[1] < 0xa0 : c[0] < 32 || c[0] > 126;
        if (control)
            memset(c, '?', utf8 ? 2 : 1);
        c += utf8 ? utf8 : 1;
    }
    return text;
}

/* Escapes what is neither printable ASCII nor UTF-8, so that any name makes valid JSON. */
static void trace_write_string(FILE *f, const char *text)
{
    fputc('"', f);
    while (*text) {
        const unsigned char c = (unsigned char)*text;
        const int utf8 = trace_utf8((const unsigned char *)text);
        if (utf8)
            fwrite(text, 1, (size_t)utf8, f);
        else if (c == '"' || c == '\\')
            fprintf(f, "\\%c", c);
        else if (c < 32 || c > 126)
            fprintf(f, "\\u%04x", c);
        else
            fputc(c, f);
        text += utf8 ? utf8 : 1;
    }
    fputc('"', f);
}

/* In the viewer, process 1 is the host, and the next ones are the GPUs. Each stream has a row of spans, then one of
   kernels, then one of copies; each host thread has one of ranges with the calls in them. */
static uint32_t trace_process(const trace *t, const trace_event *e)
{
    const trace_kind kind = trace_kind_of(t, e);
    return kind == TRACE_CALL || kind == TRACE_RANGE ? 1 : 2 + e->device;
}

static int trace_row(trace_kind kind)
{
    return kind == TRACE_KERNEL ? 1 : kind == TRACE_COPY ? 2 : 0;
}

/* An event as it is written: where, and at which place among its row's. */
typedef struct trace_placed {
    uint64_t begin, end;
    uint32_t process, track;
    int row;
    uint32_t thread; /* the number of its row in the file */
    size_t event;
} trace_placed;

#define TRACE_ORDER(x, y)                                                                                              \
    if ((x) != (y))                                                                                                    \
    return (x) < (y) ? -1 : 1

/* An event that contains another comes first. */
static int trace_by_place(const void *a, const void *b)
{
    const trace_placed *const p = (const trace_placed *)a, *const q = (const trace_placed *)b;
    TRACE_ORDER(p->process, q->process);
    TRACE_ORDER(p->track, q->track);
    TRACE_ORDER(p->row, q->row);
    TRACE_ORDER(p->begin, q->begin);
    TRACE_ORDER(q->end, p->end);
    TRACE_ORDER(p->event, q->event);
    return 0;
}

/* The viewer drops an event that begins inside another one of its row and ends after it. Such events, as of kernels
   that start while the one before still runs (PDL), go to another lane: a row with the same title. */
enum { trace_lanes = 8, trace_lane_depth = 64 };
typedef struct trace_lane {
    uint64_t end[trace_lane_depth]; /* of the events that contain each other */
    int depth;
    uint32_t thread;
} trace_lane;

/* Returns 1 and puts the event there if it fits into the lane. */
static int trace_fits(trace_lane *lane, const trace_placed *p)
{
    while (lane->depth && lane->end[lane->depth - 1] <= p->begin)
        lane->depth--;
    if (lane->depth == trace_lane_depth || (lane->depth && lane->end[lane->depth - 1] < p->end))
        return 0;
    lane->end[lane->depth++] = p->end;
    return 1;
}

static void trace_write_thread(FILE *f, const trace_placed *p, int lane)
{
    static const char *const titles[] = {"stream %u ranges", "stream %u kernels", "stream %u copies"};
    char title[64];
    snprintf(title, sizeof title, p->process == 1 ? "thread %u" : titles[p->row], p->track);
    fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,\"name\":\"thread_name\",\"args\":{\"name\":\"%s%s\"}}",
            p->process, p->thread, title, lane ? ", overlapping" : "");
    fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
            p->process, p->thread, p->thread);
}

/* Times are microseconds with three decimals: whole nanoseconds, not rounded. */
static void trace_write_time(FILE *f, const char *key, uint64_t ns)
{
    fprintf(f, ",\"%s\":%llu.%03llu", key, (unsigned long long)ns / 1000, (unsigned long long)ns % 1000);
}

/* The categories and arguments are those of torch's profiler, so that tools for its traces read these, too. */
static void trace_write_event(FILE *f, const trace *t, const trace_placed *p, uint64_t zero)
{
    static const char *const categories[] = {"kernel", "gpu_memcpy", "cuda_runtime", "user_annotation",
                                             "gpu_user_annotation"};
    const trace_event *const e = t->events + p->event;
    const trace_kind kind = trace_kind_of(t, e);
    const char *const name = t->names[e->name].text;
    fprintf(f, ",\n{\"ph\":\"X\",\"cat\":\"%s\",\"pid\":%u,\"tid\":%u",
            kind == TRACE_COPY && strncmp(name, "memset", 6) == 0 ? "gpu_memset" : categories[kind], p->process,
            p->thread);
    trace_write_time(f, "ts", e->begin - zero);
    trace_write_time(f, "dur", e->end - e->begin);
    fputs(",\"name\":", f);
    trace_write_string(f, name);
    if (p->process > 1)
        fprintf(f, ",\"args\":{\"device\":%u,\"stream\":%u", e->device, e->track);
    else
        fprintf(f, ",\"args\":{\"thread\":%u", e->track);
    if (e->correlation)
        fprintf(f, ",\"correlation\":%u", e->correlation);
    if (kind == TRACE_COPY || kind == TRACE_SPAN)
        fprintf(f, ",\"%s\":%llu", kind == TRACE_COPY ? "bytes" : "operations", (unsigned long long)e->bytes);
    fputs("}}", f);
}

/* An arrow leads from the call to each operation that it started. `bp` binds its end to the operation that contains the
   time, not to the next one. */
static void trace_write_arrow(FILE *f, const trace_placed *call, const trace_placed *operation, size_t id,
                              uint64_t zero)
{
    for (int end = 0; end < 2; end++) {
        const trace_placed *const p = end ? operation : call;
        fprintf(f, ",\n{\"ph\":\"%c\",\"cat\":\"ac2g\",\"name\":\"ac2g\",\"id\":%zu,\"pid\":%u,\"tid\":%u%s", "sf"[end],
                id, p -> process, p -> thread, end ? ",\"bp\":\"e\"" : "");
        trace_write_time(f, "ts", p->begin - zero);
        fputc('}', f);
    }
}

/* Gives every event its row, and writes the rows' titles. */
static void trace_place(FILE *f, trace_placed *placed, size_t count)
{
    trace_lane lanes[trace_lanes] = {{{0}, 0, 0}};
    uint32_t threads = 0;
    for (size_t i = 0; i < count; i++) {
        trace_placed *const p = placed + i;
        int lane = 0;
        if (i == 0 || p->process != p[-1].process || p->track != p[-1].track || p->row != p[-1].row)
            memset(lanes, 0, sizeof lanes);
        while (!trace_fits(&lanes[lane], p) && lane + 1 < trace_lanes)
            lane++;
        p->thread = lanes[lane].thread;
        if (p->thread)
            continue;
        p->thread = lanes[lane].thread = ++threads;
        trace_write_thread(f, p, lane);
        if (i == 0 || p->process != p[-1].process) {
            fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%u}}",
                    p->process, p->process);
            fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_name\",\"args\":{\"name\":", p->process);
            p->process == 1 ? fprintf(f, "\"host\"}}") : fprintf(f, "\"GPU %u\"}}", p->process - 2);
        }
    }
}

static int trace_by_call(const void *a, const void *b)
{
    const uint64_t *const x = (const uint64_t *)a, *const y = (const uint64_t *)b;
    TRACE_ORDER(x[0], y[0]);
    return 0;
}

/* Writes an arrow for each operation whose call is in the trace. */
static void trace_write_arrows(FILE *f, const trace *t, const trace_placed *placed, size_t count, uint64_t zero)
{
    uint64_t(*const calls)[2] = (uint64_t(*)[2])trace_room(NULL, (count + 1) * sizeof *calls);
    size_t calls_count = 0;
    for (size_t i = 0; i < count; i++) {
        const trace_event *const e = t->events + placed[i].event;
        if (trace_kind_of(t, e) == TRACE_CALL && e->correlation)
            calls[calls_count][0] = e->correlation, calls[calls_count++][1] = i;
    }
    qsort(calls, calls_count, sizeof *calls, trace_by_call);
    for (size_t i = 0; i < count; i++) {
        const trace_event *const e = t->events + placed[i].event;
        const uint64_t key[2] = {e->correlation, 0};
        const uint64_t *const call =
            trace_kind_of(t, e) > TRACE_COPY || e->correlation == 0
                ? NULL
                : (const uint64_t *)bsearch(key, calls, calls_count, sizeof *calls, trace_by_call);
        if (call)
            trace_write_arrow(f, placed + call[1], placed + i, i + 1, zero);
    }
    free(calls);
}

static void trace_write_all(FILE *f, const trace *t)
{
    trace_placed *const placed = (trace_placed *)trace_room(NULL, (t->count + 1) * sizeof *placed);
    uint64_t zero = UINT64_MAX;
    for (size_t i = 0; i < t->count; i++) {
        const trace_event *const e = t->events + i;
        placed[i].begin = e->begin, placed[i].end = e->end, placed[i].event = i;
        placed[i].process = trace_process(t, e), placed[i].track = e->track;
        placed[i].row = trace_row(trace_kind_of(t, e)), placed[i].thread = 0;
        zero = e->begin < zero ? e->begin : zero;
    }
    qsort(placed, t->count, sizeof *placed, trace_by_place);
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
          "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_labels\",\"args\":{\"labels\":\"kvprim\"}}",
          f);
    trace_place(f, placed, t->count);
    for (size_t i = 0; i < t->count; i++)
        trace_write_event(f, t, placed + i, zero);
    trace_write_arrows(f, t, placed, t->count, zero);
    fputs("\n]}\n", f);
    free(placed);
}

/* While a trace is written, signals that end the program remove what is there of it. */
static char *trace_unfinished;
static const int trace_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGXFSZ};
enum { trace_signals_count = sizeof trace_signals / sizeof *trace_signals };

static void trace_interrupted(int number)
{
    unlink(trace_unfinished);
    signal(number, SIG_DFL);
    raise(number);
}

/* Replaces the signals' actions, except where they are ignored, as under nohup. A limit to the size of files is then an
   error, as a full disk is. */
static void trace_catch(struct sigaction *before)
{
    for (int i = 0; i < trace_signals_count; i++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = trace_signals[i] == SIGXFSZ ? SIG_IGN : trace_interrupted;
        sigaction(trace_signals[i], NULL, &before[i]);
        if (before[i].sa_handler == SIG_DFL)
            sigaction(trace_signals[i], &action, NULL);
    }
}

/* Returns 0, or -1 if the file cannot be written; errno says why. The trace is written under another name first, so
   that an error leaves neither half a trace nor the loss of an old one. Devices and pipes are written directly. */
static inline int trace_write(const trace *t, const char *path)
{
    struct stat there;
    struct sigaction before[trace_signals_count];
    const int direct = stat(path, &there) == 0 && !S_ISREG(there.st_mode);
    char *const other = strcpy((char *)trace_room(NULL, strlen(path) + sizeof ".part"), path);
    if (!direct) {
        trace_unfinished = strcat(other, ".part");
        trace_catch(before);
    }
    FILE *const f = fopen(other, "w");
    int error = f ? 0 : errno;
    if (f) {
        trace_write_all(f, t);
        error = fflush(f) != 0 ? errno : ferror(f) ? EIO : 0;
        error = fclose(f) != 0 && !error ? errno : error;
        error = !error && !direct && rename(other, path) != 0 ? errno : error;
        if (error && !direct)
            remove(other);
    }
    for (int i = 0; i < trace_signals_count && !direct; i++)
        sigaction(trace_signals[i], &before[i], NULL);
    free(other);
    errno = error;
    return error ? -1 : 0;
}
#endif

/* SPDX-License-Identifier: MIT */
/* A trace holds events with a name, a begin and an end in nanoseconds. cupti_trace.h records them, trace_read.h reads
   them from files; trace_write() writes a file for ui.perfetto.dev. Callers lock if threads share a trace. Linux. */
#ifndef TRACE_EVENTS_H
#define TRACE_EVENTS_H

#include <errno.h>
#include <search.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Kernels and copies run on the GPU's streams, calls and ranges on the host's threads. A span is a range projected onto
   a stream, see trace_project(). */
typedef enum { TRACE_KERNEL, TRACE_COPY, TRACE_CALL, TRACE_RANGE, TRACE_SPAN } trace_kind;

/* A text, and in tables of answers what was counted of it. */
typedef struct trace_entry {
    trace_kind kind;
    char *full, *shown; /* as it was given, and as it is printed and written */
    uint64_t count, ns, bytes, shortest, longest;
    struct trace_entry *next;
} trace_entry;

/* Entries with different texts or kinds. */
typedef struct trace_entries {
    void *tree;
    trace_entry *first;
    size_t count;
} trace_entries;

typedef struct trace_event {
    const trace_entry *name; /* from trace_name() */
    uint64_t begin, end;     /* ns, of one clock for all events */
    uint64_t bytes;          /* of copies and memsets; the number of operations of a span */
    uint32_t device;         /* the GPU's number; 0 on the host */
    uint32_t track;          /* stream or thread */
    uint32_t correlation;    /* equal for a call and the work that it started; 0: none */
    int phase;               /* part of the program, see trace.phase */
} trace_event;

typedef struct trace {
    trace_event *events;
    size_t count;
    trace_entries names;
    bool full_names; /* kernels are shown with namespaces, template arguments and parameters */
    int phase;       /* of the events that are added next; answers are for one phase */
} trace;

/* ---- memory and names ---- */

static void *trace_room(void *old, size_t bytes)
{
    void *const p = realloc(old, bytes);
    if (p == NULL) {
        fprintf(stderr, "out of memory for %zu bytes of a trace\n", bytes);
        exit(1);
    }
    return p;
}

/* Returns the array with room for one element more. The room doubles at powers of two. */
static void *trace_one_more(void *array, size_t count, size_t bytes)
{
    return count & (count - 1) ? array : trace_room(array, (count ? 2 * count : 1) * bytes);
}

static char *trace_copy_text(const char *text, size_t size)
{
    char *const copy = (char *)memcpy(trace_room(NULL, size + 1), text, size);
    copy[size] = 0;
    return copy;
}

static int trace_by_text(const void *a, const void *b)
{
    const trace_entry *const x = (const trace_entry *)a, *const y = (const trace_entry *)b;
    return x->kind != y->kind ? (x->kind > y->kind) - (x->kind < y->kind) : strcmp(x->full, y->full);
}

/* Returns the entry with this text, and makes it if there is none. */
static trace_entry *trace_entry_of(trace_entries *entries, trace_kind kind, const char *full)
{
    trace_entry key = {kind, (char *)(void *)full, NULL, 0, 0, 0, UINT64_MAX, 0, entries->first};
    trace_entry **const node = (trace_entry **)tsearch(&key, &entries->tree, trace_by_text);
    if (*node == &key) {
        key.full = trace_copy_text(full, strlen(full));
        *node = entries->first = (trace_entry *)memcpy(trace_room(NULL, sizeof key), &key, sizeof key);
        entries->count++;
    }
    return *node;
}

static void trace_entries_free(trace_entries *entries)
{
    while (entries->first) {
        trace_entry *const entry = entries->first;
        tdelete(entry, &entries->tree, trace_by_text);
        entries->first = entry->next;
        free(entry->full), free(entry->shown), free(entry);
    }
}

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
        if (utf8 ? c[0] == 0xc2 && c[1] < 0xa0 : c[0] < 32 || c[0] > 126)
            memset(c, '?', utf8 ? 2 : 1);
        c += utf8 ? utf8 : 1;
    }
    return text;
}

/* Finds the function's name alone, without namespaces, template arguments and parameters: "kvpc_store_kernel". */
static const char *trace_function(const char *full, size_t *size)
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
        else if (depth == 0 && (*c == ':' || *c == ' '))
            begin = c + 1, end = NULL;
    }
    end = end ? end : c;
    *size = end == begin ? strlen(full) : (size_t)(end - begin);
    return end == begin ? full : begin;
}

/* Returns the name, which is shown without what varies: of kernels the function, "Memcpy HtoD (Pageable -> Device)" as
   "Memcpy HtoD", "Memset (Device)" as "Memset", and "cudaMalloc_v3020" as "cudaMalloc". */
static const trace_entry *trace_name(trace *t, trace_kind kind, const char *full)
{
    trace_entry *const name = trace_entry_of(&t->names, kind, full);
    if (name->shown)
        return name;
    const char *begin = full, *const version = strstr(full, "_v");
    size_t size = strlen(full);
    if (kind == TRACE_KERNEL && !t->full_names)
        begin = trace_function(full, &size);
    else if (kind == TRACE_COPY && strncmp(full, "Mem", 3) == 0 && strstr(full, " ("))
        size = (size_t)(strstr(full, " (") - full);
    else if (kind == TRACE_CALL && version && version[2 + strspn(version + 2, "0123456789")] == 0)
        size = (size_t)(version - full);
    name->shown = trace_show(trace_copy_text(begin, size));
    return name;
}

/* Returns the name of copies in this direction, as torch and Perfetto's guides have it. H: host, D: device, A: array,
   P: peer, numbered as CUPTI and nsys do. */
static const char *trace_copy_name(uint64_t direction)
{
    static const char names[][12] = {"Memcpy ?to?", "Memcpy HtoD", "Memcpy DtoH", "Memcpy HtoA",
                                     "Memcpy AtoH", "Memcpy AtoA", "Memcpy AtoD", "Memcpy DtoA",
                                     "Memcpy DtoD", "Memcpy HtoH", "Memcpy PtoP"};
    return names[direction < sizeof names / sizeof *names ? direction : 0];
}

static void trace_add(trace *t, trace_event event)
{
    t->events = (trace_event *)trace_one_more(t->events, t->count, sizeof event);
    event.phase = t->phase;
    t->events[t->count++] = event;
}

static void trace_free(trace *t)
{
    trace_entries_free(&t->names);
    free(t->events);
    memset(t, 0, sizeof *t);
}

/* ---- lists of events ---- */

typedef struct trace_list {
    trace_event **at;
    size_t count;
} trace_list;

/* In the viewer, process 1 is the host, and the next ones are the GPUs. Each stream has a row of spans, then one of
   kernels, then one of copies; each host thread has one of ranges with the calls in them. */
static uint32_t trace_process(const trace_event *e)
{
    return e->name->kind == TRACE_CALL || e->name->kind == TRACE_RANGE ? 1 : 2 + e->device;
}

static uint32_t trace_row(const trace_event *e)
{
    return e->name->kind == TRACE_KERNEL ? 1 : e->name->kind == TRACE_COPY ? 2 : 0;
}

static const char *trace_keys; /* what events are sorted by: letters of trace_key(); of capitals the largest first */

static uint64_t trace_key(const trace_event *e, char key)
{
    return key == 'b'   ? e->begin
           : key == 'E' ? UINT64_MAX - e->end
           : key == 'L' ? UINT64_MAX - (e->end - e->begin) /* length */
           : key == 'c' ? e->correlation
           : key == 't' ? e->track
           : key == 'p' ? trace_process(e)
                        : trace_row(e);
}

static int trace_order(const void *a, const void *b)
{
    const trace_event *const e = *(trace_event *const *)a, *const f = *(trace_event *const *)b;
    for (const char *k = trace_keys; *k; k++)
        if (trace_key(e, *k) != trace_key(f, *k))
            return trace_key(e, *k) < trace_key(f, *k) ? -1 : 1;
    return 0;
}

enum { trace_any_phase = -1 };

/* Lists the phase's events of kinds `first` to `last`, sorted. The caller frees `at`. */
static trace_list trace_sorted(const trace *t, int phase, trace_kind first, trace_kind last, const char *keys)
{
    trace_list list = {(trace_event **)trace_room(NULL, (t->count + 1) * sizeof *list.at), 0};
    for (size_t i = 0; i < t->count; i++) {
        trace_event *const e = t->events + i;
        if ((phase == trace_any_phase || e->phase == phase) && e->name->kind >= first && e->name->kind <= last)
            list.at[list.count++] = e;
    }
    trace_keys = keys;
    qsort(list.at, list.count, sizeof *list.at, trace_order);
    return list;
}

/* Returns the first event with the correlation of `e` in a list that is sorted by correlation ("c"), such as its call,
   or the operations that it started. They end where another correlation or NULL follows. NULL: there is none. */
static trace_event **trace_partners(const trace_list *list, const trace_event *e)
{
    size_t from = 0, to = list->count;
    while (from < to) {
        const size_t middle = from + (to - from) / 2;
        if (list->at[middle]->correlation < e->correlation)
            from = middle + 1;
        else
            to = middle;
    }
    list->at[list->count] = NULL;
    return e->correlation && from < list->count && list->at[from]->correlation == e->correlation ? list->at + from
                                                                                                 : NULL;
}

/* ---- ranges projected onto streams ---- */

/* Spans of ranges; those of one range begin with `first`. */
typedef struct trace_spans {
    trace_event *at;
    size_t first, count;
} trace_spans;

/* Extends the range's span on the operation's stream by the operation. */
static void trace_extend(trace_spans *spans, const trace_event *range, const trace_event *operation)
{
    size_t i = spans->first;
    while (i < spans->count && (spans->at[i].device != operation->device || spans->at[i].track != operation->track))
        i++;
    if (i == spans->count) {
        spans->at = (trace_event *)trace_one_more(spans->at, spans->count++, sizeof *spans->at);
        spans->at[i] = *operation;
        spans->at[i].bytes = spans->at[i].correlation = 0;
        spans->at[i].name = range->name, spans->at[i].phase = range->phase;
    }
    trace_event *const span = spans->at + i;
    span->begin = operation->begin < span->begin ? operation->begin : span->begin;
    span->end = operation->end > span->end ? operation->end : span->end;
    span->bytes++;
}

/* Adds one span per stream for each range whose calls, on its thread, started operations there: from the begin of the
   first operation to the end of the last. With `only`, makes what lies in ranges of this name, and what was started
   there, phase 1, and the rest phase 0. Returns the number of ranges of this name. */
static inline size_t trace_project(trace *t, const char *only)
{
    const trace_list host = trace_sorted(t, trace_any_phase, TRACE_CALL, TRACE_RANGE, "tbE");
    const trace_list operations = trace_sorted(t, trace_any_phase, TRACE_KERNEL, TRACE_COPY, "c");
    trace_spans spans = {NULL, 0, 0};
    size_t named = 0;
    for (size_t i = 0; only && i < t->count; i++)
        t->events[i].phase = 0;
    for (size_t i = 0; i < host.count; i++) {
        const trace_event *const range = host.at[i];
        const bool selects = only && range->name->kind == TRACE_RANGE && strcmp(range->name->shown, only) == 0;
        named += selects;
        spans.first = spans.count;
        for (size_t j = i; range->name->kind == TRACE_RANGE && j < host.count; j++) {
            trace_event *const e = host.at[j];
            if (e->track != range->track || e->begin > range->end)
                break;
            e->phase |= selects;
            for (trace_event **o = trace_partners(&operations, e); o && *o && (*o)->correlation == e->correlation;
                 o++) {
                (*o)->phase |= selects;
                trace_extend(&spans, range, *o);
            }
        }
    }
    const int phase = t->phase;
    for (size_t i = 0; i < spans.count; i++) {
        t->phase = spans.at[i].phase;
        spans.at[i].name = trace_name(t, TRACE_SPAN, spans.at[i].name->full);
        trace_add(t, spans.at[i]);
    }
    t->phase = phase;
    free(host.at), free(operations.at), free(spans.at);
    return named;
}

/* ---- the file: https://ui.perfetto.dev reads Chrome's JSON ---- */

typedef struct trace_writer {
    FILE *f;
    const trace *t;
    uint64_t zero;     /* the first event's begin */
    uint32_t *threads; /* of each event: the number of its row in the file */
} trace_writer;

/* The viewer drops an event that begins inside another one of its row and ends after it. Such events, as of kernels
   that start while the one before still runs (PDL), go to another lane: a row with the same title. */
enum { trace_lanes = 8, trace_lane_depth = 64 };
typedef struct trace_lane {
    uint64_t end[trace_lane_depth]; /* of the events that contain each other */
    int depth;
    uint32_t thread;
} trace_lane;

/* Returns true and puts the event there if it fits into the lane. */
static bool trace_fits(trace_lane *lane, const trace_event *e)
{
    while (lane->depth && lane->end[lane->depth - 1] <= e->begin)
        lane->depth--;
    if (lane->depth == trace_lane_depth || (lane->depth && lane->end[lane->depth - 1] < e->end))
        return false;
    lane->end[lane->depth++] = e->end;
    return true;
}

/* Writes the titles of a row and its process, and their places among the others. */
static void trace_write_titles(FILE *f, const trace_event *e, uint32_t thread, const char *more)
{
    static const char *const rows[] = {"stream %u ranges", "stream %u kernels", "stream %u copies"};
    const uint32_t process = trace_process(e);
    char titles[2][64];
    snprintf(titles[0], sizeof *titles, process == 1 ? "host" : "GPU %u", e->device);
    snprintf(titles[1], sizeof *titles, process == 1 ? "thread %u" : rows[trace_row(e)], e->track);
    for (int i = 0; i < 2; i++) {
        const char *const what = i ? "thread" : "process";
        fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,\"name\":\"%s_sort_index\",\"args\":{\"sort_index\":%u}}",
                process, thread, what, i ? thread : process);
        fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,\"name\":\"%s_name\",\"args\":{\"name\":\"%s%s\"}}", process,
                thread, what, titles[i], i ? more : "");
    }
}

/* Gives every event its row, and writes the rows' titles. */
static void trace_write_rows(trace_writer *w, const trace_list *all)
{
    trace_lane lanes[trace_lanes] = {{{0}, 0, 0}};
    uint32_t threads = 0;
    trace_keys = "ptr";
    for (size_t i = 0; i < all->count; i++) {
        int lane = 0;
        if (i == 0 || trace_order(all->at + i - 1, all->at + i) != 0)
            memset(lanes, 0, sizeof lanes);
        while (!trace_fits(&lanes[lane], all->at[i]) && lane + 1 < trace_lanes)
            lane++;
        if (lanes[lane].thread == 0) {
            lanes[lane].thread = ++threads;
            trace_write_titles(w->f, all->at[i], threads, lane ? ", overlapping" : "");
        }
        w->threads[all->at[i] - w->t->events] = lanes[lane].thread;
    }
}

/* Writes what all events have. Times are microseconds with three decimals: whole nanoseconds, not rounded. */
static void trace_write_begin(const trace_writer *w, const char *phase, const char *category, const trace_event *e)
{
    const unsigned long long ns = e->begin - w->zero;
    fprintf(w->f, ",\n{\"ph\":\"%s\",\"cat\":\"%s\",\"pid\":%u,\"tid\":%u,\"ts\":%llu.%03llu", phase, category,
            trace_process(e), w->threads[e - w->t->events], ns / 1000, ns % 1000);
}

/* The categories and arguments are those of torch's profiler, so that tools for its traces read these, too. */
static void trace_write_event(const trace_writer *w, const trace_event *e)
{
    static const char *const categories[] = {"kernel", "gpu_memcpy", "cuda_runtime", "user_annotation",
                                             "gpu_user_annotation"};
    const char *const name = e->name->shown;
    const bool is_memset = e->name->kind == TRACE_COPY && strncmp(name, "Memset", 6) == 0,
               on_gpu = trace_process(e) > 1;
    const unsigned long long ns = e->end - e->begin;
    trace_write_begin(w, "X", is_memset ? "gpu_memset" : categories[e->name->kind], e);
    fprintf(w->f, ",\"dur\":%llu.%03llu,\"name\":\"", ns / 1000, ns % 1000);
    for (const char *c = name; *c; c++)
        fprintf(w->f, "%s%c", *c == '"' || *c == '\\' ? "\\" : "", *c);
    fprintf(w->f, "\",\"args\":{\"%s\":%u", on_gpu ? "stream" : "thread", e->track);
    if (on_gpu)
        fprintf(w->f, ",\"device\":%u", e->device);
    if (e->correlation)
        fprintf(w->f, ",\"correlation\":%u", e->correlation);
    if (e->name->kind == TRACE_COPY || e->name->kind == TRACE_SPAN)
        fprintf(w->f, ",\"%s\":%llu", e->name->kind == TRACE_COPY ? "bytes" : "operations",
                (unsigned long long)e->bytes);
    fputs("}}", w->f);
}

static void trace_write_all(FILE *f, const trace *t)
{
    const trace_list all = trace_sorted(t, trace_any_phase, TRACE_KERNEL, TRACE_SPAN, "ptrbE");
    const trace_list calls = trace_sorted(t, trace_any_phase, TRACE_CALL, TRACE_CALL, "c");
    trace_writer w = {f, t, UINT64_MAX, (uint32_t *)trace_room(NULL, (t->count + 1) * sizeof *w.threads)};
    for (size_t i = 0; i < t->count; i++)
        w.zero = t->events[i].begin < w.zero ? t->events[i].begin : w.zero;
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
          "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_labels\",\"args\":{\"labels\":\"kvprim\"}}",
          f);
    trace_write_rows(&w, &all);
    for (size_t i = 0; i < all.count; i++) {
        trace_event **const call = all.at[i]->name->kind <= TRACE_COPY ? trace_partners(&calls, all.at[i]) : NULL;
        trace_write_event(&w, all.at[i]);
        if (call == NULL)
            continue;
        /* An arrow from the call. `bp` binds its end to the operation that contains the time, not to the next one. */
        trace_write_begin(&w, "s", "ac2g", *call);
        fprintf(f, ",\"name\":\"ac2g\",\"id\":%zu}", i);
        trace_write_begin(&w, "f", "ac2g", all.at[i]);
        fprintf(f, ",\"name\":\"ac2g\",\"id\":%zu,\"bp\":\"e\"}", i);
    }
    fputs("\n]}\n", f);
    free(all.at), free(calls.at), free(w.threads);
}

/* Returns 0, or -1 if the file cannot be written; errno says why. The trace is written as FILE.part first, so that an
   error leaves neither half a trace nor the loss of an old one. Devices, pipes and links are written directly. */
static inline int trace_write(const trace *t, const char *path)
{
    struct stat there;
    const bool direct = lstat(path, &there) == 0 && !S_ISREG(there.st_mode);
    char *const other = strcpy((char *)trace_room(NULL, strlen(path) + sizeof ".part"), path);
    FILE *const f = fopen(direct ? other : strcat(other, ".part"), "w");
    int error = f ? 0 : errno;
    if (f) {
        trace_write_all(f, t);
        error = fflush(f) != 0 ? errno : ferror(f) ? EIO : 0;
        error = fclose(f) != 0 && !error ? errno : error;
        error = !error && !direct && rename(other, path) != 0 ? errno : error;
        if (error && !direct)
            remove(other);
    }
    free(other);
    errno = error;
    return error ? -1 : 0;
}
#endif

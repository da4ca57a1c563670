/* SPDX-License-Identifier: MIT */
/* What was recorded: events with a name, a begin and an end in nanoseconds; and its file, as Chrome's JSON with the
   categories and arguments of torch's profiler. answers.py reads it, and gives it rows with titles, arrows and ranges
   on streams for ui.perfetto.dev. Callers lock if threads share a trace. C++11. */
#ifndef TRACE_H
#define TRACE_H

#include <set>
#include <stdint.h>
#include <stdio.h>
#include <string>
#include <vector>

/* Kernels and copies run on the GPU's streams, calls and ranges on the host's threads. */
typedef enum { TRACE_KERNEL, TRACE_COPY, TRACE_MEMSET, TRACE_CALL, TRACE_RANGE } trace_kind;

typedef struct trace_event {
    trace_kind kind;
    const std::string *name; /* from trace_name() */
    uint64_t begin, end;     /* ns, of one clock for all events */
    uint64_t bytes;          /* of copies and memsets */
    uint32_t device;         /* the GPU's number; 0 on the host */
    uint32_t track;          /* stream or thread */
    uint32_t correlation;    /* equal for a call and the work that it started; 0: none */
    int phase;               /* part of the program, see trace.phase */
} trace_event;

typedef struct trace {
    std::vector<trace_event> events;
    std::set<std::string> names;
    int phase; /* of the events that are added next */
} trace;

static const std::string *trace_name(trace *t, const char *text)
{
    return &*t->names.insert(text).first;
}

/* What the phase's events of a kind add up to whose names contain `family`. */
typedef struct trace_sum {
    uint64_t count, ns, bytes;
} trace_sum;

static trace_sum trace_family(const trace *t, int phase, trace_kind kind, const char *family)
{
    trace_sum sum = {0, 0, 0};
    for (const trace_event &e : t->events)
        if (e.phase == phase && e.kind == kind && e.name->find(family) != std::string::npos)
            sum.count++, sum.ns += e.end - e.begin, sum.bytes += e.bytes;
    return sum;
}

/* Times are microseconds since the first event, with three decimals: whole nanoseconds, which a double of a reader can
   hold. Kernels of a stream are a row, its copies another. */
static void trace_write_event(FILE *f, const trace_event &e, uint64_t zero, const char *separator)
{
    static const char *const categories[] = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation"};
    const unsigned long long begin = e.begin - zero, ns = e.end - e.begin;
    const bool on_gpu = e.kind < TRACE_CALL;
    fprintf(f,
            "%s\n{\"ph\":\"X\",\"cat\":\"%s\",\"pid\":%u,\"tid\":%u,\"ts\":%llu.%03llu,\"dur\":%llu.%03llu,\"name\":\"",
            separator, categories[e.kind], on_gpu ? 2 + e.device : 1,
            on_gpu ? 2 * e.track + (e.kind > TRACE_KERNEL) : e.track, begin / 1000, begin % 1000, ns / 1000, ns % 1000);
    for (const char c : *e.name)
        fprintf(f, "%s%c", c == '"' || c == '\\' ? "\\" : "", c >= 0 && c < 32 ? '?' : c);
    fprintf(f, "\",\"args\":{\"correlation\":%u", e.correlation);
    if (on_gpu)
        fprintf(f, ",\"stream\":%u,\"device\":%u,\"bytes\":%llu", e.track, e.device, (unsigned long long)e.bytes);
    fputs("}}", f);
}

/* Returns 0, or -1 if the file cannot be written; errno says why. */
static int trace_write(const trace *t, const char *path)
{
    FILE *const f = fopen(path, "w");
    const char *separator = "";
    uint64_t zero = UINT64_MAX;
    if (!f)
        return -1;
    for (const trace_event &e : t->events)
        zero = e.begin < zero ? e.begin : zero;
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", f);
    for (const trace_event &e : t->events) {
        trace_write_event(f, e, zero, separator);
        separator = ",";
    }
    fputs("\n]}\n", f);
    const int failed = ferror(f);
    return fclose(f) != 0 || failed ? -1 : 0;
}
#endif

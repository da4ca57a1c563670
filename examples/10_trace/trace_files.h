/* SPDX-License-Identifier: MIT */
/* The command line of what reads traces: answers for one file, or a comparison of two. */
#ifndef TRACE_FILES_H
#define TRACE_FILES_H

#include "trace_answers.h"
#include "trace_read.h"

static const char trace_files_usage[] =
    "[--range NAME] [--family TEXT] [--category NAME] [--full-names] [--cut] [--most N]\n"
    "       [--out FILE] TRACE, or --compare OLD NEW";

static const char trace_files_help[] =
    "\nAnswers for a trace: top operations, long ones, small ones and the host's time in calls, memory operations, "
    "one\n"
    "family of kernels, gaps between operations, and ranges projected onto streams. TRACE is Chrome's JSON (of "
    "torch's\n"
    "profiler, kvprim, converters) or of `nsys export --type jsonlines`, plain or compressed by gzip; - is standard "
    "input.\n"
    "\n"
    "  --compare OLD NEW  say what became slower and what faster, by operation and by what the GPU waited for\n"
    "  --range NAME       only what was launched inside ranges of this name; a second one is that of NEW\n"
    "  --family TEXT      of kernels whose names contain this, answer 5; default: all\n"
    "  --category NAME    read events of this category as ranges, too, such as cpu_op\n"
    "  --full-names       keep namespaces, template arguments and parameters of kernels\n"
    "  --cut              of a cut file, answer from the events before the cut\n"
    "  --most N           refuse traces with more events of a GPU and its calls; default: 16777216, 48 bytes each\n"
    "  --out FILE         write what was read, with the ranges on streams, for ui.perfetto.dev\n"
    "\n"
    "Exit codes: 0: done; 1: a file cannot be read or written, or holds no such range; 2: wrong arguments.\n";

typedef struct trace_options {
    const char *paths[2], *ranges[2], *family, *category, *out;
    bool compare, full_names, cut;
    size_t paths_count, ranges_count, most;
} trace_options;

static int trace_usage(const char *program, const char *what, const char *argument)
{
    fprintf(stderr, "%s: %s%s%s\nusage: %s %s\n", program, what, argument[0] ? ": " : "", argument, program,
            trace_files_usage);
    return 2;
}

/* Returns the option's value, if `argument` is this option: after '=', or the next argument. */
static const char *trace_option(const char *option, char **arguments, int *i)
{
    const size_t n = strlen(option);
    if (strncmp(arguments[*i], option, n) != 0 || (arguments[*i][n] != '=' && arguments[*i][n] != 0))
        return NULL;
    return arguments[*i][n] ? arguments[*i] + n + 1 : arguments[++*i];
}

/* Returns the exit code if the program is not to go on, else -1. */
static int trace_parse(const char *program, int argc, char **argv, trace_options *o)
{
    static const char *const named[] = {"--range", "--family", "--category", "--out", "--most"};
    for (int i = 1; i < argc; i++) {
        const char *value = NULL, *end = argv[i];
        size_t n = 0;
        for (; n < sizeof named / sizeof *named && argv[i] == end; n++) {
            const int before = i;
            value = trace_option(named[n], argv, &i);
            if (i != before && value == NULL)
                return trace_usage(program, "no value after", named[n]);
            if (value)
                break;
        }
        if (value == NULL && strcmp(argv[i], "--compare") == 0)
            o->compare = true;
        else if (value == NULL && strcmp(argv[i], "--full-names") == 0)
            o->full_names = true;
        else if (value == NULL && strcmp(argv[i], "--cut") == 0)
            o->cut = true;
        else if (value == NULL && argv[i][0] == '-' && argv[i][1])
            return trace_usage(program, "unknown argument", argv[i]);
        else if (value == NULL && o->paths_count == 2)
            return trace_usage(program, "more than two files", argv[i]);
        else if (value == NULL)
            o->paths[o->paths_count++] = argv[i];
        else if (n == 0 && o->ranges_count == 2)
            return trace_usage(program, "more than two ranges", value);
        else if (n == 0)
            o->ranges[o->ranges_count++] = value;
        else if (n == 4) {
            o->most = (size_t)strtoull(value, (char **)(void *)&end, 10);
            if (value[0] < '1' || value[0] > '9' || *end || strlen(value) > 15)
                return trace_usage(program, "--most needs a number from 1 on", value);
        } else
            *(n == 1 ? &o->family : n == 2 ? &o->category : &o->out) = value;
    }
    if (o->paths_count != (o->compare ? 2u : 1u))
        return trace_usage(program, o->compare ? "--compare needs two files" : "one file, or --compare and two", "");
    if (o->ranges_count == 2 && !o->compare)
        return trace_usage(program, "more than one range", o->ranges[1]);
    if (o->out && o->compare)
        return trace_usage(program, "--out is for one file, not for --compare", "");
    return -1;
}

/* Reads a file, and projects its ranges. Returns 0, or 1 after a message. */
static int trace_load(const char *program, const trace_options *o, int side, trace *t)
{
    trace_reading *const r = trace_reading_new(o->paths[side]);
    r->category = o->category;
    r->full_names = o->full_names;
    r->keep_cut = o->cut;
    r->most = o->most ? o->most : r->most;
    const int failed = trace_read(r, t) != 0;
    if (failed)
        fprintf(stderr, "%s: %s\n", program, r->error);
    else
        printf("%s: %zu of %zu events read%s%s\n", r->path, t->count, r->seen, r->cut[0] ? "; CUT: " : "", r->cut);
    free(r);
    if (failed)
        return 1;
    const char *const range = o->ranges[side < (int)o->ranges_count ? side : 0];
    if (range && trace_select(t, range) == 0) {
        fprintf(stderr, "%s: %s: no range is named '%s'\n", program, o->paths[side], range);
        return 1;
    }
    trace_project(t);
    return 0;
}

static int trace_finish(const char *program, const trace *t, const char *out)
{
    if (out && trace_write(t, out) != 0) {
        fprintf(stderr, "%s: %s: %s\n", program, out, strerror(errno));
        return 1;
    }
    if (out)
        printf("%zu events in %s, for ui.perfetto.dev\n", t->count, out);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: standard output: %s\n", program, strerror(errno));
        return 1;
    }
    return 0;
}

/* The main of a program that reads traces. */
static int trace_files(const char *program, int argc, char **argv)
{
    trace_options o;
    trace both[2];
    int code = 0;
    memset(&o, 0, sizeof o), memset(both, 0, sizeof both);
    if (argc == 2 && (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0)) {
        printf("usage: %s %s\n%s", program, trace_files_usage, trace_files_help);
        return 0;
    }
    code = trace_parse(program, argc, argv, &o);
    if (code >= 0)
        return code;
    code = trace_load(program, &o, 0, &both[0]);
    if (!code && o.compare)
        code = trace_load(program, &o, 1, &both[1]);
    const int phase = o.ranges_count != 0;
    if (!code && o.compare)
        trace_compare(&both[0], &both[1], phase);
    else if (!code)
        trace_report(&both[0], phase, o.family ? o.family : "");
    code = code ? code : trace_finish(program, &both[0], o.out);
    trace_free(&both[0]), trace_free(&both[1]);
    return code;
}
#endif

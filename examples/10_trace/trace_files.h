/* SPDX-License-Identifier: MIT */
/* The command line of what reads traces: answers for one file, or a comparison of two. */
#ifndef TRACE_FILES_H
#define TRACE_FILES_H

#include "trace_answers.h"
#include "trace_read.h"
#include <getopt.h>

static const char trace_files_help[] =
    "Answers for a trace: top operations, long ones, small ones and the host's time in calls, memory operations, one\n"
    "family of kernels, gaps between operations, ranges projected onto streams, shares by category, and what to try.\n"
    "TRACE is Chrome's JSON (of torch's profiler, kvprim, converters) or of `nsys export --type jsonlines`, plain or\n"
    "compressed by gzip; - is standard input.\n"
    "\n"
    "  --compare OLD NEW         say what became slower and what faster, by operation and by what the GPU waited for\n"
    "  --range NAME              only what was launched inside ranges of this name; a second one is that of NEW\n"
    "  --top N                   lines of a table; default: 50\n"
    "  --longer-than US          answer 2: all events, on the GPU and the host, that take longer\n"
    "  --more-than N             answer 3: small operations that are launched more often; default: 100\n"
    "  --family TEXT             answer 5: kernels whose names contain this; default: all\n"
    "  --category NAME=PATTERN   answer 8: operations whose full names match this extended regular expression; may be\n"
    "                            repeated; comes before attention, matrix product, memory and concatenation, or "
    "replaces\n"
    "                            one of them; what matches none is other\n"
    "  --as-ranges CATEGORY      read events of this category of the file as ranges, too, such as cpu_op\n"
    "  --full-names              keep namespaces, template arguments and parameters of kernels\n"
    "  --cut                     of a cut file, answer from the events before the cut\n"
    "  --most N                  refuse traces with more events of a GPU and its calls; default: 16777216, 48 bytes "
    "each\n"
    "  --out FILE                write what was read, with the ranges on streams, for ui.perfetto.dev\n"
    "\n"
    "Exit codes: 0: done; 1: a file cannot be read or written, or holds no such range; 2: wrong arguments.\n";

typedef struct trace_options {
    const char *ranges[2], *as_range, *out;
    int ranges_count, compare, full_names, cut;
    uint64_t most;
    trace_questions questions;
} trace_options;

/* Returns the exit code for wrong arguments. */
static int trace_usage(const char *program, const char *what, const char *argument)
{
    if (what)
        fprintf(stderr, "%s: %s%s%s\n", program, what, argument ? ": " : "", argument ? argument : "");
    fprintf(stderr, "usage: %s [OPTION]... TRACE, or --compare OLD NEW; see --help\n", program);
    return 2;
}

/* Adds a category before the usual ones, or replaces the one with its name. Returns what is wrong, or NULL. */
static const char *trace_add_category(trace_questions *q, char *name)
{
    char *const equals = strchr(name, '=');
    const char *const pattern = equals ? equals + 1 : "";
    regex_t compiled;
    size_t i = 0;
    if (pattern[0] == 0 || regcomp(&compiled, pattern, REG_EXTENDED | REG_ICASE | REG_NOSUB) != 0)
        return "--category needs NAME=PATTERN, an extended regular expression";
    regfree(&compiled);
    *equals = 0;
    while (i < q->shares_count && strcmp(q->shares[i][0], name) != 0)
        i++;
    if (i == trace_shares_most)
        return "more than 20 categories";
    if (i == q->shares_count) {
        memmove(q->shares + 1, q->shares, i * sizeof *q->shares);
        q->shares_count++, i = 0;
    }
    q->shares[i][0] = name, q->shares[i][1] = pattern;
    return NULL;
}

/* Reads the options. Returns the exit code if the program is not to go on, else -1. */
static int trace_parse(const char *program, int argc, char **argv, trace_options *o)
{
    trace_questions *const q = &o->questions;
    const char **const texts[] = {&q->family, &o->as_range, &o->out};
    uint64_t *const numbers[] = {&q->top, &q->longer_us, &q->more_than, &o->most};
    enum { text = 1, number = 10 };
    const struct option options[] = {{"compare", 0, &o->compare, 1},
                                     {"full-names", 0, &o->full_names, 1},
                                     {"cut", 0, &o->cut, 1},
                                     {"range", 1, NULL, 'r'},
                                     {"category", 1, NULL, 'c'},
                                     {"help", 0, NULL, 'h'},
                                     {"family", 1, NULL, text},
                                     {"as-ranges", 1, NULL, text + 1},
                                     {"out", 1, NULL, text + 2},
                                     {"top", 1, NULL, number},
                                     {"longer-than", 1, NULL, number + 1},
                                     {"more-than", 1, NULL, number + 2},
                                     {"most", 1, NULL, number + 3},
                                     {NULL, 0, NULL, 0}};
    argv[0] = (char *)(void *)program; /* begins getopt's messages */
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        const char *wrong = NULL;
        if (option == 'h') {
            printf("usage: %s [OPTION]... TRACE, or --compare OLD NEW\n\n%s", program, trace_files_help);
            return 0;
        }
        if (option == 'c')
            wrong = trace_add_category(q, optarg);
        else if (option == 'r' && o->ranges_count == 2)
            wrong = "more than two ranges";
        else if (option == 'r')
            o->ranges[o->ranges_count++] = optarg;
        else if (option >= number && option < number + 4) {
            char *end;
            *numbers[option - number] = strtoull(optarg, &end, 10);
            wrong = optarg[0] < '0' || optarg[0] > '9' || *end || strlen(optarg) > 15 ? "no number" : NULL;
        } else if (option >= text && option < text + 3)
            *texts[option - text] = optarg;
        if (option == '?' || wrong)
            return trace_usage(program, wrong, optarg);
    }
    if (argc - optind != (o->compare ? 2 : 1))
        return trace_usage(program, o->compare ? "--compare needs two files" : "one file, or --compare and two", NULL);
    if (o->ranges_count == 2 && !o->compare)
        return trace_usage(program, "more than one range", o->ranges[1]);
    if (o->out && o->compare)
        return trace_usage(program, "--out is for one file, not for --compare", NULL);
    return -1;
}

/* Reads a file, and projects its ranges. Returns 0, or 1 after a message. */
static int trace_load(const char *program, const trace_options *o, const char *path, const char *range, trace *t)
{
    trace_reading *const r = trace_reading_new(path);
    r->as_range = o->as_range;
    r->keep_cut = o->cut;
    r->most = (size_t)o->most;
    t->full_names = o->full_names;
    const int failed = trace_read(r, t) != 0;
    if (failed)
        fprintf(stderr, "%s: %s\n", program, r->error);
    else
        printf("%s: %zu of %zu events read%s%s\n", path, t->count, r->seen, r->cut[0] ? "; CUT: " : "", r->cut);
    free(r);
    if (failed || trace_project(t, range) > 0 || !range)
        return failed;
    fprintf(stderr, "%s: %s: no range is named '%s'\n", program, path, range);
    return 1;
}

/* The main of a program that reads traces. */
static int trace_files(const char *program, int argc, char **argv)
{
    trace_options o;
    trace both[2];
    memset(&o, 0, sizeof o), memset(both, 0, sizeof both);
    o.questions = trace_usual_questions;
    o.most = trace_most_default;
    const int wrong = trace_parse(program, argc, argv, &o), phase = o.ranges_count != 0;
    if (wrong >= 0)
        return wrong;
    int code = trace_load(program, &o, argv[optind], o.ranges[0], &both[0]);
    if (!code && o.compare)
        code = trace_load(program, &o, argv[optind + 1], o.ranges[o.ranges_count == 2], &both[1]);
    if (!code && o.compare)
        trace_compare(&both[0], &both[1], phase, o.questions.top);
    else if (!code)
        trace_report(&both[0], phase, &o.questions);
    const char *failed = NULL;
    if (!code && o.out && trace_write(&both[0], o.out) != 0)
        failed = o.out;
    else if (!code && o.out)
        printf("%zu events in %s, for ui.perfetto.dev\n", both[0].count, o.out);
    if (!failed && (fflush(stdout) != 0 || ferror(stdout)))
        failed = "standard output";
    if (failed)
        fprintf(stderr, "%s: %s: %s\n", program, failed, strerror(errno));
    trace_free(&both[0]), trace_free(&both[1]);
    return code || failed;
}
#endif

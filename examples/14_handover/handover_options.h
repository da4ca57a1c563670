/* SPDX-License-Identifier: MIT */
/* handover_options.h: the command line of 14_handover. C11 and C++17. */
#ifndef HANDOVER_OPTIONS_H
#define HANDOVER_OPTIONS_H

#include <stdbool.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* most_pages: of a request whose page table goes in one message. most_arguments: a process hands them to its own. */
enum {
    handover_most_tp = 16,
    handover_most_layers = 1024,
    handover_most_chunks = 16,
    handover_most_lanes = 4,
    handover_most_rounds = 99,
    handover_most_requests = 1 << 24,
    handover_most_pages = 1 << 20,
    handover_most_arguments = 100
};

/* The shape of one side's caches. */
typedef struct handover_shape {
    int32_t tp, page_rows, head_major;
} handover_shape;

typedef struct handover_options {
    /* what both sides must know: the prefill side tells the decode side */
    int32_t layers, heads, head_bytes;
    handover_shape from, to;
    int64_t tokens; /* of the largest request */
    int64_t seed;
    int32_t slots, lanes, max_sms, timeout_ms, verify, opponents;
    int64_t chunk_bytes[handover_most_chunks]; /* the first is used for requests, all for the throughput table */
    int32_t chunk_count;
    /* what the prefill side alone needs */
    bool ring, straight;
    int64_t requests, rounds, cancel_every;
    const char *svg;
    /* what the processes need */
    bool sockets;
    int device[2]; /* of the prefill and of the decode side; -1: its first one */
    int64_t kill_at;
    int kill_side; /* 0: prefill, 1: decode */
    bool stops;    /* the process stops, and says nothing more, instead of dying */
    const char *listen, *connect;
    int listener, side; /* inherited by the processes of the two sides; side -1: neither */
    bool again;         /* this process replaces one that died */
} handover_options;

static const char handover_help[] =
    "usage: 14_handover [OPTION...]\n"
    "A prefill side sends the KV pages of requests to a decode side: another process on another GPU, or machine.\n"
    "\n"
    "  --mode ring|straight|all   through a bounded ring over NCCL; straight into the peer's pages; both (default "
    "ring)\n"
    "  --layers N --heads N --head-bytes N     the model (64, 8, 256)\n"
    "  --from-tp N --to-tp N      ranks of each side, all on its one GPU (1, 1); must divide the heads\n"
    "  --from-layout nhd|hnd --to-layout nhd|hnd   the order inside a page (nhd, nhd); --layout sets both\n"
    "  --page-rows N, --to-page-rows N             tokens of a page on both sides (16); of the decode side\n"
    "  --tokens N                 of the largest request (8192)\n"
    "  --requests N               requests of random lengths, verified (20); --seed N (1)\n"
    "  --rounds N                 then the throughput of the largest one, the median of N rounds (5); 0: none\n"
    "  --no-opponents             without the throughput of other ways, and their memory\n"
    "  --chunk-bytes N[,N...]     of a slot, with K or M (64M; 8M with --sockets, --listen and --connect);\n"
    "                             several: throughput of each\n"
    "  --slots N --lanes N        slots of a ring (4); communicators, each with a ring (2)\n"
    "  --max-sms N                multiprocessors for packing and unpacking (32); 0: all\n"
    "  --cancel-every K           each K-th request is cancelled in the middle, by either side, then sent again\n"
    "  --kill-at N [--kill-side decode|prefill] [--stop]   at its N-th chunk the process of a side dies, or only\n"
    "                             stops, and is started again; the other side goes on with the same ring\n"
    "  --timeout-ms N             how long a side waits for the other (5000)\n"
    "  --sockets                  as if the two GPUs were two machines: NCCL uses sockets only\n"
    "  --no-verify                do not look at the bytes\n"
    "  --svg FILE                 draws throughput by chunk size\n"
    "  --from-device N --to-device N               GPUs (0, 1)\n"
    "  --listen HOST:PORT | --connect HOST:PORT    only the prefill side, or only the decode side, across machines\n";

/* A number with K, M or G, from least to most. False: it is none, and the error is printed. */
static inline bool handover_number(const char *name, const char *text, int64_t least, int64_t most, int64_t *out)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    const int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    end += shift != 0;
    if (end == text || *end || errno != 0 || n < least || n > (most >> shift)) {
        fprintf(stderr, "14_handover: %s %s: must be a number from %lld to %lld\n", name, text, (long long)least,
                (long long)most);
        return false;
    }
    *out = (int64_t)n << shift;
    if (*out < least)
        fprintf(stderr, "14_handover: %s %s: is less than %lld\n", name, text, (long long)least);
    return *out >= least;
}

/* One of two words. */
static inline bool handover_word(const char *name, const char *text, const char *zero, const char *one, int32_t *out)
{
    *out = strcmp(text, one) == 0;
    if (*out || strcmp(text, zero) == 0)
        return true;
    fprintf(stderr, "14_handover: %s %s: must be %s or %s\n", name, text, zero, one);
    return false;
}

static inline bool handover_chunk_list(handover_options *o, const char *text)
{
    char one[32];
    for (o->chunk_count = 0;;) {
        const size_t n = strcspn(text, ",");
        if (o->chunk_count == handover_most_chunks || n == 0 || n >= sizeof one) {
            fprintf(stderr, "14_handover: --chunk-bytes %s: must be 1 to %d numbers\n", text,
                    (int)handover_most_chunks);
            return false;
        }
        memcpy(one, text, n);
        one[n] = 0;
        if (!handover_number("--chunk-bytes", one, 1, (int64_t)1 << 34, &o->chunk_bytes[o->chunk_count++]))
            return false;
        if (!text[n])
            return true;
        text += n + 1;
    }
}

/* Options with a number. */
static inline bool handover_number_option(handover_options *o, const char *name, const char *text, bool *known)
{
    int64_t devices[2] = {o->device[0], o->device[1]}, listener = o->listener, side = o->side;
    const struct {
        const char *name;
        int64_t least, most;
        int32_t *narrow;
        int64_t *wide;
    } options[] = {{"--layers", 1, handover_most_layers, &o->layers, NULL},
                   {"--heads", 1, 65536, &o->heads, NULL},
                   {"--head-bytes", 1, 1 << 20, &o->head_bytes, NULL},
                   {"--from-tp", 1, handover_most_tp, &o->from.tp, NULL},
                   {"--to-tp", 1, handover_most_tp, &o->to.tp, NULL},
                   {"--page-rows", 1, 1 << 20, &o->from.page_rows, NULL},
                   {"--to-page-rows", 1, 1 << 20, &o->to.page_rows, NULL},
                   {"--tokens", 1, 1 << 24, NULL, &o->tokens},
                   {"--requests", 0, handover_most_requests, NULL, &o->requests},
                   {"--rounds", 0, handover_most_rounds, NULL, &o->rounds},
                   {"--seed", 0, INT64_MAX, NULL, &o->seed},
                   {"--slots", 1, 32, &o->slots, NULL},
                   {"--lanes", 1, handover_most_lanes, &o->lanes, NULL},
                   {"--max-sms", 0, 1024, &o->max_sms, NULL},
                   {"--cancel-every", 0, 1 << 24, NULL, &o->cancel_every},
                   {"--kill-at", 0, INT32_MAX, NULL, &o->kill_at},
                   {"--timeout-ms", 100, 3600000, &o->timeout_ms, NULL},
                   {"--from-device", 0, 1023, NULL, &devices[0]},
                   {"--to-device", 0, 1023, NULL, &devices[1]},
                   {"--listener-fd", 0, 1 << 20, NULL, &listener},
                   {"--side", 0, 1, NULL, &side}};
    for (size_t k = 0; k < sizeof options / sizeof *options; k++) {
        int64_t n = 0;
        if (strcmp(name, options[k].name) != 0)
            continue;
        *known = true;
        if (!handover_number(name, text, options[k].least, options[k].most, &n))
            return false;
        if (options[k].narrow)
            *options[k].narrow = (int32_t)n;
        else
            *options[k].wide = n;
        o->device[0] = (int)devices[0], o->device[1] = (int)devices[1], o->listener = (int)listener;
        o->side = (int)side;
    }
    return true;
}

/* Options with a word. */
static inline bool handover_word_option(handover_options *o, const char *name, const char *text, bool *known)
{
    int32_t one = 0;
    *known = true;
    if (strcmp(name, "--chunk-bytes") == 0)
        return handover_chunk_list(o, text);
    if (strcmp(name, "--from-layout") == 0)
        return handover_word(name, text, "nhd", "hnd", &o->from.head_major);
    if (strcmp(name, "--to-layout") == 0)
        return handover_word(name, text, "nhd", "hnd", &o->to.head_major);
    if (strcmp(name, "--layout") == 0)
        return handover_word(name, text, "nhd", "hnd", &o->from.head_major) &&
               handover_word(name, text, "nhd", "hnd", &o->to.head_major);
    if (strcmp(name, "--kill-side") == 0) {
        const bool right = handover_word(name, text, "prefill", "decode", &one);
        o->kill_side = one;
        return right;
    }
    if (strcmp(name, "--mode") == 0 && strcmp(text, "all") != 0) {
        const bool right = handover_word(name, text, "ring", "straight", &one);
        o->ring = !one, o->straight = one;
        return right;
    }
    if (strcmp(name, "--mode") == 0)
        o->ring = o->straight = true;
    else if (strcmp(name, "--svg") == 0)
        o->svg = text;
    else if (strcmp(name, "--listen") == 0)
        o->listen = text, o->side = 0;
    else if (strcmp(name, "--connect") == 0)
        o->connect = text, o->side = 1;
    else
        *known = false;
    return true;
}

/* Options without an argument. */
static inline bool handover_flag(handover_options *o, const char *name)
{
    if (strcmp(name, "--sockets") == 0)
        o->sockets = true;
    else if (strcmp(name, "--verify") == 0)
        o->verify = 1;
    else if (strcmp(name, "--no-verify") == 0)
        o->verify = 0;
    else if (strcmp(name, "--no-opponents") == 0)
        o->opponents = 0;
    else if (strcmp(name, "--stop") == 0)
        o->stops = true;
    else if (strcmp(name, "--again") == 0)
        o->again = true;
    else
        return false;
    return true;
}

/* Which processes there are, and what they can tell each other. */
static inline bool handover_check_processes(const handover_options *o)
{
    const int64_t pages = (o->tokens + o->to.page_rows - 1) / o->to.page_rows;
    if (o->listen && o->connect) {
        fprintf(stderr, "14_handover: --listen is the prefill side, --connect the decode side: give one of them\n");
        return false;
    }
    if ((o->side == 0 && !o->listen && o->listener < 0) || (o->side == 1 && !o->connect)) {
        fprintf(stderr, "14_handover: --side %d is what the program tells its own processes: give --%s HOST:PORT\n",
                o->side, o->side ? "connect" : "listen");
        return false;
    }
    if (o->straight && pages > handover_most_pages) {
        fprintf(stderr,
                "14_handover: --tokens %lld in pages of %d are %lld pages, at most %d are allowed with --mode "
                "straight\n",
                (long long)o->tokens, (int)o->to.page_rows, (long long)pages, (int)handover_most_pages);
        return false;
    }
    if (!o->ring && (o->cancel_every || o->kill_at >= 0)) {
        fprintf(stderr, "14_handover: --%s counts chunks, which --mode straight has not\n",
                o->cancel_every ? "cancel-every" : "kill-at");
        return false;
    }
    if (o->stops && o->kill_at < 0) {
        fprintf(stderr, "14_handover: --stop needs --kill-at\n");
        return false;
    }
    if (o->svg && (!*o->svg || o->rounds == 0)) {
        fprintf(stderr, "14_handover: --svg %s: %s\n", o->svg,
                *o->svg ? "draws throughput, and --rounds 0 measures none" : "must name a file");
        return false;
    }
    return true;
}

/* Whether this is the one side that runs here, rather than a process of a program that runs both. */
static inline bool handover_is_alone(const handover_options *o)
{
    return o->side >= 0 && o->listener < 0;
}

/* What one option alone does not show. */
static inline bool handover_check_options(handover_options *o)
{
    const int64_t token = (int64_t)2 * o->heads * o->head_bytes;
    o->to.page_rows = o->to.page_rows ? o->to.page_rows : o->from.page_rows;
    if (o->chunk_count == 0)
        o->chunk_bytes[o->chunk_count++] = o->sockets || handover_is_alone(o) ? 8 << 20 : 64 << 20;
    if (o->heads % o->from.tp != 0 || o->heads % o->to.tp != 0) {
        fprintf(stderr, "14_handover: --heads %d is not a multiple of --from-tp %d and --to-tp %d\n", (int)o->heads,
                (int)o->from.tp, (int)o->to.tp);
        return false;
    }
    for (int k = 0; k < o->chunk_count; k++)
        if (o->chunk_bytes[k] < token) {
            fprintf(stderr, "14_handover: --chunk-bytes %lld is less than a token of one layer, %lld bytes\n",
                    (long long)o->chunk_bytes[k], (long long)token);
            return false;
        }
    if (token * o->layers > ((int64_t)1 << 46) / o->tokens) {
        fprintf(stderr, "14_handover: --tokens %lld of %lld bytes each: a request has 64 TB or more\n",
                (long long)o->tokens, (long long)(token * o->layers));
        return false;
    }
    if (o->sockets && o->straight) {
        fprintf(stderr,
                "14_handover: --sockets keeps the sides from each other's memory, which --mode straight needs\n");
        return false;
    }
    return handover_check_processes(o);
}

/* Returns -1 to go on, or the exit code.
   The defaults, on two H200s: on one lane a request takes its bytes at the 365 GB/s of one ncclSend, 10 us for each
   chunk, during which no chunk is under way, and 1.8 us for each MB of a chunk, which are packed before the first send
   and unpacked after the last. So chunks of 64, 128 and 256 MB reach 0.89, 0.92 and 0.92 of one ncclSend. A second lane
   sends while the first one is between two chunks: 0.97 with 64 MB, 0.92 with 32; four lanes of 32 MB reach 0.98.
   A chunk's deadline counts from its call, when the chunks before it are still under way: 8 slots of 64 MB would take
   4.6 of their 5 s on Gigabit Ethernet.
   Over sockets 1 MB to 16 MB are all the same: 1.0 of one ncclSend on one lane, 1.5 to 1.6 on two, which have twice the
   sockets. */
static inline int handover_parse(handover_options *o, int argc, char **argv)
{
    memset(o, 0, sizeof *o);
    o->layers = 64, o->heads = 8, o->head_bytes = 256, o->from.tp = o->to.tp = 1, o->from.page_rows = 16;
    o->tokens = 8192, o->seed = 1, o->slots = 4, o->lanes = 2, o->max_sms = 32, o->timeout_ms = 5000;
    o->verify = o->opponents = 1, o->ring = true, o->requests = 20, o->rounds = 5;
    o->device[1] = 1, o->kill_at = -1, o->kill_side = 1, o->listener = o->side = -1;
    if (argc > handover_most_arguments) {
        fprintf(stderr, "14_handover: %d arguments, at most %d are allowed\n", argc, (int)handover_most_arguments);
        return 2;
    }
    for (int k = 1; k < argc; k++) {
        bool known = false, right = true;
        if (strcmp(argv[k], "-h") == 0 || strcmp(argv[k], "--help") == 0) {
            fputs(handover_help, stdout);
            return 0;
        }
        if (handover_flag(o, argv[k]))
            continue;
        const char *const text = k + 1 < argc ? argv[k + 1] : "";
        right = handover_number_option(o, argv[k], text, &known);
        if (right && !known)
            right = handover_word_option(o, argv[k], text, &known);
        if (right && known && k + 1 == argc) {
            fprintf(stderr, "14_handover: %s needs a value\n", argv[k]);
            return 2;
        }
        if (right && !known)
            fprintf(stderr, "14_handover: unknown option %s; --help lists them\n", argv[k]);
        if (!right || !known)
            return 2;
        k++;
    }
    return handover_check_options(o) ? -1 : 2;
}

#endif

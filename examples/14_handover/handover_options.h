/* SPDX-License-Identifier: MIT */
/* handover_options.h: the command line of 14_handover. C11 and C++17. */
#ifndef HANDOVER_OPTIONS_H
#define HANDOVER_OPTIONS_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* handover_most_pages: of a request, because its page table goes in one message. */
enum { handover_most_tp = 16, handover_most_layers = 1024, handover_most_lanes = 4, handover_most_pages = 1 << 20 };

enum { mode_ring, mode_straight, mode_all }; /* --mode */

/* The shape of one side's caches. */
typedef struct handover_shape {
    long long tp, page_rows, head_major;
} handover_shape;

typedef struct handover_options {
    long long layers, heads, head_bytes;
    handover_shape from, to; /* the prefill side, the decode side */
    long long tokens, requests, mode, chunk_bytes, slots, lanes, max_sms, timeout_ms;
    long long cancel_every, kill_at, kill_side, stop, sockets;
    const char *listen, *connect; /* NULL: this program runs both sides */
} handover_options;

/* An option with a number from least to most, with a word of `words` (the first is 0), with an address if words is
   handover_address, or, if words is "", a flag. */
typedef struct handover_option {
    const char *name, *words;
    size_t field;
    long long least, most, initial;
    bool agreed; /* the same on both sides */
    const char *help;
} handover_option;

static const char handover_address[] = "HOST:PORT";

#define HANDOVER_AT(field) offsetof(handover_options, field)

/* Measured on two H200s: on one lane a request takes its bytes at the 365 GB/s of one ncclSend, 10 us for each chunk,
   during which no chunk is under way, and 1.8 us for each MB of a chunk, which are packed before the first send and
   unpacked after the last. So chunks of 64, 128 and 256 MB reach 0.89, 0.92 and 0.92 of one ncclSend. A second lane
   sends while the first one is between two chunks: 0.97 with 64 MB, 0.92 with 32; four lanes of 32 MB reach 0.98.
   An ncclSend for each 4 MB takes 22 us, for each 8 MB 34, whatever lanes there are. So chunks of up to 8 MB join where
   there are slots enough (see handover_ways.cuh): on two lanes those of 4 and of 8 MB take 18 and 26 us, 0.63 and 0.91
   of one ncclSend; one lane of 4 slots joins none, and 4 MB reach 0.34.
   A chunk's deadline counts from its call, when the chunks before it are still under way: 8 slots of 64 MB would take
   4.6 of their 5 s on Gigabit Ethernet. Over sockets 1 MB to 16 MB are all the same: 1.0 of one ncclSend on one lane,
   1.5 to 1.6 on two, which have twice the sockets. */
static const handover_option handover_table[] = {
    {"--mode", "ring|straight|all", HANDOVER_AT(mode), 0, 0, 0, true,
     "through a bounded ring over NCCL; straight into the peer's pages; both in turn"},
    {"--layers", NULL, HANDOVER_AT(layers), 1, handover_most_layers, 64, true, "the model's"},
    {"--heads", NULL, HANDOVER_AT(heads), 1, 65536, 8, true, "the model's K/V heads"},
    {"--head-bytes", NULL, HANDOVER_AT(head_bytes), 8, 1 << 20, 256, true, "of K, and of V; a multiple of 8"},
    {"--from-tp", NULL, HANDOVER_AT(from.tp), 1, handover_most_tp, 1, true, "ranks of prefill, all on its one GPU"},
    {"--to-tp", NULL, HANDOVER_AT(to.tp), 1, handover_most_tp, 1, true, "ranks of decode"},
    {"--from-layout", "nhd|hnd", HANDOVER_AT(from.head_major), 0, 0, 0, true, "the order inside a page"},
    {"--to-layout", "nhd|hnd", HANDOVER_AT(to.head_major), 0, 0, 0, true, ""},
    {"--page-rows", NULL, HANDOVER_AT(from.page_rows), 1, 1 << 20, 16, true, "tokens of a page of prefill"},
    {"--to-page-rows", NULL, HANDOVER_AT(to.page_rows), 0, 1 << 20, 0, true, "of decode; 0: the same"},
    {"--tokens", NULL, HANDOVER_AT(tokens), 1, 1 << 24, 8192, true, "of the largest request"},
    {"--requests", NULL, HANDOVER_AT(requests), 0, 1 << 24, 20, false, "of random lengths, each verified"},
    {"--chunk-bytes", NULL, HANDOVER_AT(chunk_bytes), 0, 1LL << 34, 0, true, "of a slot; 0: 64M, over sockets 8M"},
    {"--slots", NULL, HANDOVER_AT(slots), 1, 32, 4, true, "of a ring"},
    {"--lanes", NULL, HANDOVER_AT(lanes), 1, handover_most_lanes, 2, true, "communicators, each with a ring"},
    {"--max-sms", NULL, HANDOVER_AT(max_sms), 0, 1024, 32, true, "multiprocessors that pack and unpack; 0: all"},
    {"--timeout-ms", NULL, HANDOVER_AT(timeout_ms), 100, 3600000, 5000, true, "how long a side waits for the other"},
    {"--cancel-every", NULL, HANDOVER_AT(cancel_every), 0, 1 << 24, 0, false,
     "each N-th request is cancelled in the middle, by either side, then sent again; 0: none"},
    {"--kill-at", NULL, HANDOVER_AT(kill_at), -1, INT32_MAX, -1, false,
     "at its N-th chunk a side's process dies, and is started again; -1: none"},
    {"--kill-side", "decode|prefill", HANDOVER_AT(kill_side), 0, 0, 0, false, "which process"},
    {"--stop", "", HANDOVER_AT(stop), 0, 0, 0, false, "it does not die at once, but stops and says nothing more"},
    {"--sockets", "", HANDOVER_AT(sockets), 0, 0, 0, false, "as if the GPUs were in two machines: only by sockets"},
    {"--listen", handover_address, HANDOVER_AT(listen), 0, 0, 0, false, "only the prefill side"},
    {"--connect", handover_address, HANDOVER_AT(connect), 0, 0, 0, false, "only the decode side"}};

enum { handover_table_rows = sizeof handover_table / sizeof *handover_table };

static inline long long *handover_field(handover_options *o, const handover_option *row)
{
    return (long long *)(void *)((char *)o + row->field);
}

static inline void handover_print_help(void)
{
    printf("usage: 14_handover [OPTION...]\n"
           "A prefill side sends the KV pages of requests to a decode side: another process on another GPU, or\n"
           "machine. Numbers may end in K, M or G. The first word, or the number in parentheses, is the default.\n\n");
    for (int k = 0; k < handover_table_rows; k++) {
        const handover_option *const row = &handover_table[k];
        printf("  %-15s %-18s %s", row->name, row->words ? row->words : "N", row->help);
        row->words ? printf("\n") : printf(" (%lld)\n", row->initial);
    }
}

/* Returns which of the words `text` is, or -1. */
static inline long long handover_word(const char *words, const char *text)
{
    for (long long n = 0;; n++) {
        const size_t length = strcspn(words, "|");
        if (strlen(text) == length && strncmp(words, text, length) == 0)
            return n;
        if (!words[length])
            return -1;
        words += length + 1;
    }
}

/* Reads a number with K, M or G. */
static inline bool handover_number(const char *text, long long least, long long most, long long *out)
{
    char *end;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    const int shift = end == text ? 0 : *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    end += shift != 0;
    if (end == text || *end || errno != 0 || n > (most >> shift) || n < least / (1LL << shift))
        return false;
    *out = n * (1LL << shift);
    return *out >= least;
}

/* False: the text is no value of this option, and the error is printed. */
static inline bool handover_value(handover_options *o, const handover_option *row, const char *text)
{
    if (row->words == handover_address) {
        memcpy((char *)o + row->field, &text, sizeof text);
        return true;
    }
    long long *const out = handover_field(o, row);
    if (row->words ? (*out = handover_word(row->words, text)) >= 0 : handover_number(text, row->least, row->most, out))
        return true;
    if (row->words)
        fprintf(stderr, "14_handover: %s %s: must be %s\n", row->name, text, row->words);
    else
        fprintf(stderr, "14_handover: %s %s: must be a number from %lld to %lld\n", row->name, text, row->least,
                row->most);
    return false;
}

/* Checks what one option alone does not show, and sets what depends on others. */
static inline bool handover_check(handover_options *o)
{
    const long long token = 2 * o->heads * o->head_bytes;
    o->to.page_rows = o->to.page_rows ? o->to.page_rows : o->from.page_rows;
    o->chunk_bytes = o->chunk_bytes ? o->chunk_bytes : o->sockets || o->listen || o->connect ? 8 << 20 : 64 << 20;
    const struct {
        bool wrong;
        const char *why;
    } rules[] = {
        {o->head_bytes % 8 != 0, "--head-bytes must be a multiple of 8"},
        {o->heads % o->from.tp || o->heads % o->to.tp, "--heads must be a multiple of --from-tp and of --to-tp"},
        {o->chunk_bytes < token, "--chunk-bytes is less than a token of one layer"},
        {token * o->layers > (1LL << 46) / o->tokens, "a request of so many --tokens has 64 TB or more"},
        {o->listen && o->connect, "--listen is the prefill side, --connect the decode side: give one of them"},
        {o->sockets && o->mode, "--sockets keeps the sides from each other's memory, which --mode straight needs"},
        {o->mode && (o->tokens - 1) / o->to.page_rows >= handover_most_pages,
         "--mode straight allows at most 1048576 pages of a request"},
        {o->mode == mode_straight && (o->cancel_every || o->kill_at >= 0),
         "--cancel-every and --kill-at count chunks, which --mode straight has not"},
        {o->stop && o->kill_at < 0, "--stop needs --kill-at"}};
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++)
        if (rules[k].wrong) {
            fprintf(stderr, "14_handover: %s\n", rules[k].why);
            return false;
        }
    return true;
}

/* Returns -1 to go on, or the exit code. */
static inline int handover_parse(handover_options *o, int argc, char **argv)
{
    memset(o, 0, sizeof *o);
    for (int row = 0; row < handover_table_rows; row++)
        if (handover_table[row].words != handover_address)
            *handover_field(o, &handover_table[row]) = handover_table[row].initial;
    for (int k = 1; k < argc; k++) {
        int row = 0;
        if (strcmp(argv[k], "-h") == 0 || strcmp(argv[k], "--help") == 0) {
            handover_print_help();
            return 0;
        }
        while (row < handover_table_rows && strcmp(argv[k], handover_table[row].name) != 0)
            row++;
        const bool known = row < handover_table_rows;
        if (known && handover_table[row].words && !*handover_table[row].words) {
            *handover_field(o, &handover_table[row]) = 1;
        } else if (!known || k + 1 == argc) {
            fprintf(stderr, "14_handover: %s %s\n", argv[k], known ? "needs a value" : "is unknown; see --help");
            return 2;
        } else if (!handover_value(o, &handover_table[row], argv[++k])) {
            return 2;
        }
    }
    return handover_check(o) ? -1 : 2;
}

#endif

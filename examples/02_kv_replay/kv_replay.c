/* SPDX-License-Identifier: MIT */
/* Replays a trace of requests against a KV cache, as an inference engine would, and checks every byte it reads back.

       cc -O2 -I. examples/02_kv_replay/kv_replay.c -o 02_kv_replay
       ./02_kv_replay examples/02_kv_replay/trace_small.jsonl

   With the cache on a GPU ($CUDA is the folder that CUDA is installed in):

       echo '#include "kvprim_cuda.cuh"' >cuda.cu
       nvcc -O3 -arch=native -I. -DKVPRIM_CUDA_IMPLEMENTATION -c cuda.cu
       cc -O2 -I. -I$CUDA/include -DKV_REPLAY_CUDA -c examples/02_kv_replay/kv_replay.c
       nvcc kv_replay.o cuda.o -o 02_kv_replay

   For each request, the program finds the longest cached prefix of the tokens in a radix tree, takes cache slots for
   the rest (evicting the least recently used pages), and stores the K and V rows of those tokens. Then it gathers the
   rows of all tokens back from the cache, compares each with the row that was stored, and leaves the whole pages in the
   tree for later requests. It replays only prompts, because the format does not say what was generated.

   A trace says which blocks are equal, not what they hold. So the program draws a block's tokens from its id, and a
   token's K and V rows from a hash of all tokens up to it. As in a model, a row depends on its whole history: a wrong
   slot, a stale page or a match that is one token too long gives other bytes.

   With --host-slots and --disk-slots, pages that the cache has no room for go to host memory and then to a file, and
   come back when a prompt matches them. Their rows are compared as all others are.

   The headers beside this file read the trace (kv_trace.h), keep the prefix tree (kv_radix.h), hold the cache on the
   CPU or a GPU (kv_device.h), and keep pages in host memory (kv_tiers.h) and a file (kv_disk.h). This file, from top to
   bottom, has

       options       what the command line may say
       state         prompt, cache, active (a running request), totals, replay (all of them)
       requests      reads prompts; makes tokens, and rows that stand for a model's
       memory        how many slots the requests need, whether they fit, and what is allocated
       rows          stores, gathers and compares the rows of one request, a batch at a time: the calls of kvprim
       admitting     admit starts a request, finish_oldest ends it: read these two first. fetch_pages brings pages back
       the table     what is printed, and main */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* O_DIRECT */
#endif
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* clock_gettime, fileno, getrusage, preadv, sysconf under -std=c11 */
#endif
#define KVPRIM_CORE_IMPLEMENTATION /* kvprim.h alone; nvcc compiles kvprim_cuda.cuh */
#include "kvprim.h"
#include "kv_device.h"
#include "kv_radix.h"
#include "kv_tiers.h"
#include "kv_trace.h"
#include <inttypes.h>
#include <stdarg.h>

#if defined(_WIN32)
#include <io.h>
#else
#include <sys/resource.h>
#include <unistd.h>
#endif

enum { EXIT_MISMATCH = 1, EXIT_REFUSED = 2 };

#define SLOTS_MAX INT32_MAX
#define SHOWN_MAX 5 /* mismatches described one by one */

/* ---- options ----------------------------------------------------------------------------------------------------- */

typedef struct options {
    uint64_t kv_bytes, page, slots, host_slots, disk_slots, layers, verify, seed, requests, running, recompute_last;
    const char *device;    /* NULL: a GPU if there is one, else the CPU */
    const char *disk_file; /* NULL: in $TMPDIR or /tmp */
    const char *trace;
    const char **texts;
    size_t text_count;
    bool kv_bytes_given;
} options;

typedef struct option_number {
    const char *name;
    size_t offset; /* of the uint64_t in options */
    uint64_t preset, min, max;
    const char *help;
} option_number;

static const option_number option_numbers[] = {
    {"--kv-bytes", offsetof(options, kv_bytes), 256, 2, 1 << 24,
     "bytes of a token in one layer, K and V together; unless given, halved until it fits"},
    {"--page", offsetof(options, page), 16, 1, 1 << 20, "tokens in a page"},
    {"--slots", offsetof(options, slots), 0, 0, SLOTS_MAX, "tokens that the cache holds; 0: room for all"},
    {"--host-slots", offsetof(options, host_slots), 0, 0, SLOTS_MAX,
     "tokens that go to host memory when the cache is full"},
    {"--disk-slots", offsetof(options, disk_slots), 0, 0, SLOTS_MAX, "tokens that go to a file after that"},
    {"--layers", offsetof(options, layers), 1, 1, 1024, "layers"},
    {"--running", offsetof(options, running), 1, 1, 1024, "requests that run at the same time; the oldest ends first"},
    {"--recompute-last", offsetof(options, recompute_last), 0, 0, 1,
     "1: computes the last token of every prompt, cached or not, as vLLM and SGLang do for its logits"},
    {"--requests", offsetof(options, requests), 0, 0, UINT64_MAX, "replay only the first N; 0: all"},
    {"--verify", offsetof(options, verify), 1, 0, 1, "0: gather the rows but do not compare them"},
    {"--seed", offsetof(options, seed), 1, 0, UINT64_MAX, "seed of the tokens and rows"},
};
enum { OPTION_NUMBERS = sizeof option_numbers / sizeof option_numbers[0] };

static void print_help(void)
{
    printf(
        "usage: 02_kv_replay [options] [TRACE]\n\n"
        "Replays the requests of TRACE (Mooncake JSON lines; -: standard input), then those of --text, against a KV\n"
        "cache.\n\n");
    for (int i = 0; i < OPTION_NUMBERS; i++)
        printf("  %-16s N %s (%" PRIu64 ")\n", option_numbers[i].name, option_numbers[i].help,
               option_numbers[i].preset);
    printf(
        "  --device D         cpu or cuda: holds the cache and moves its rows (default: cuda if there is a GPU)\n"
        "  --disk-file FILE   for --disk-slots; must not exist, and is gone afterwards (default: in $TMPDIR or /tmp)\n"
        "  --text FILE        adds a request whose tokens are the file's bytes; may be repeated\n"
        "  --help             this text\n\n"
        "Exit status: 0 all rows are right, 1 some rows are wrong, 2 bad input, no such device or out of memory.\n");
}

static int refuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("02_kv_replay: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return EXIT_REFUSED;
}

static int parse_number(options *o, const option_number *number, const char *text)
{
    uint64_t value = 0;
    bool ok = *text != '\0';
    for (const char *digit = text; *digit && ok; digit++) {
        const uint64_t d = (uint64_t)(unsigned char)*digit - '0';
        ok = d <= 9 && value <= (UINT64_MAX - d) / 10;
        value = value * 10 + d;
    }
    if (!ok || value < number->min || value > number->max)
        return refuse("%s is '%s', not a number from %" PRIu64 " to %" PRIu64, number->name, text, number->min,
                      number->max);
    memcpy((char *)o + number->offset, &value, sizeof value);
    o->kv_bytes_given = o->kv_bytes_given || number->offset == offsetof(options, kv_bytes);
    return 0;
}

static int parse_device(options *o, const char *text)
{
    if (strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0)
        return refuse("--device is '%s', neither cpu nor cuda", text);
    o->device = text;
    return 0;
}

static int parse_disk_file(options *o, const char *text)
{
    if (!*text)
        return refuse("--disk-file is empty");
    o->disk_file = text;
    return 0;
}

static int parse_text(options *o, const char *text)
{
    o->texts[o->text_count++] = text;
    return 0;
}

typedef struct option_text {
    const char *name;
    int (*parse)(options *o, const char *text);
} option_text;

static const option_text option_texts[] = {
    {"--device", parse_device}, {"--disk-file", parse_disk_file}, {"--text", parse_text}};
enum { OPTION_TEXTS = sizeof option_texts / sizeof option_texts[0] };

/* Parses the option at argv[*i] and its value, which is "=value" or the next argument. */
static int parse_option(options *o, int argc, char **argv, int *i)
{
    const char *const name = argv[*i], *const equals = strchr(name, '=');
    const size_t size = equals ? (size_t)(equals - name) : strlen(name);
    const option_number *number = NULL;
    const option_text *text = NULL;
    for (int k = 0; k < OPTION_NUMBERS && !number; k++)
        if (strlen(option_numbers[k].name) == size && memcmp(option_numbers[k].name, name, size) == 0)
            number = &option_numbers[k];
    for (int k = 0; k < OPTION_TEXTS && !text; k++)
        if (strlen(option_texts[k].name) == size && memcmp(option_texts[k].name, name, size) == 0)
            text = &option_texts[k];
    if (!number && !text)
        return refuse("unknown option %s (see --help)", name);
    if (!equals && *i + 1 == argc)
        return refuse("%s needs a value", name);
    const char *const value = equals ? equals + 1 : argv[++*i];
    return number ? parse_number(o, number, value) : text->parse(o, value);
}

static int check_tiers(const options *o)
{
    const struct {
        const char *name;
        uint64_t slots;
    } tiers[] = {{"--host-slots", o->host_slots}, {"--disk-slots", o->disk_slots}};
    for (int i = 0; i < 2; i++) {
        const uint64_t slots = tiers[i].slots;
        if (slots && slots < o->page)
            return refuse("%s %" PRIu64 " holds no page of %" PRIu64 " tokens", tiers[i].name, slots, o->page);
        if (slots && !o->slots)
            return refuse("%s %" PRIu64 " without --slots: a cache with room for all sends nothing there",
                          tiers[i].name, slots);
    }
    if (o->disk_file && !o->disk_slots)
        return refuse("--disk-file %s without --disk-slots", o->disk_file);
    return 0;
}

static int parse_options(options *o, int argc, char **argv)
{
    for (int k = 0; k < OPTION_NUMBERS; k++)
        memcpy((char *)o + option_numbers[k].offset, &option_numbers[k].preset, sizeof option_numbers[k].preset);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' && argv[i][1] != '\0') {
            const int status = parse_option(o, argc, argv, &i);
            if (status)
                return status;
        } else if (o->trace) {
            return refuse("more than one trace: %s and %s", o->trace, argv[i]);
        } else {
            o->trace = argv[i];
        }
    }
    if (!o->trace && !o->text_count)
        return refuse("no TRACE and no --text to replay (see --help)");
    if (o->kv_bytes % 2)
        return refuse("--kv-bytes is %" PRIu64 ", which K and V cannot share equally", o->kv_bytes);
    if (o->slots && o->slots < o->page)
        return refuse("--slots %" PRIu64 " holds no page of %" PRIu64 " tokens", o->slots, o->page);
    return check_tiers(o);
}

/* ---- state ------------------------------------------------------------------------------------------------------- */

typedef struct prompt {
    const char *file;
    size_t line; /* in a trace; 0: a text file */
    size_t tokens;
    const int64_t *ids;  /* of a trace: the block ids */
    unsigned char *text; /* of a text file: the tokens; else NULL */
} prompt;

/* The cache in the device's memory: [layer][K or V][slot][row] */
typedef struct cache {
    size_t slots, row_bytes, page_count, bytes;
} cache;

/* A request between its admission and its end. Later requests reuse the arrays. */
typedef struct active {
    const prompt *prompt;
    int32_t *tokens;
    uint64_t *chain; /* chain[i]: hash of tokens[0 .. i] */
    int32_t *pages;  /* of all tokens; the last page may be partial */
    size_t capacity; /* in tokens */
    size_t matched_pages;
    kv_radix_node *node; /* where the match ended; locked */
} active;

typedef struct totals {
    uint64_t requests, tokens, matched, evicted_pages, evictions;
    uint64_t matched_in[KV_RADIX_TIERS]; /* tokens */
    uint64_t stored_bytes, gathered_bytes, verified_rows, mismatched_rows;
    double prefix, tree, all; /* seconds; kv_device has those of the device */
} totals;

typedef struct replay {
    options o;
    kv_trace trace;
    prompt *prompts;
    size_t prompt_count;
    cache cache;
    kv_device device;
    kv_radix tree;
    kv_tiers tiers;
    active *running; /* a ring of o.running */
    size_t oldest, running_count;
    unsigned char *expected; /* K rows, or V rows, of one batch */
    uint32_t rejected;       /* slots outside the cache: 0 unless there is a bug */
    totals t;
    double next_progress; /* time of the next progress line; 0: stderr is no terminal */
} replay;

/* ---- requests ---------------------------------------------------------------------------------------------------- */

static uint64_t mix64(uint64_t x) /* splitmix64's finalizer */
{
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* Tokens have 31 bits. With a model's vocabulary of 10^5, different blocks begin with the same token by chance. */
static void make_tokens(const prompt *p, uint64_t seed, int32_t *tokens)
{
    for (size_t i = 0; p->text && i < p->tokens; i++)
        tokens[i] = p->text[i];
    for (size_t i = 0; !p->text && i < p->tokens; i += KV_TRACE_BLOCK) {
        const size_t count = p->tokens - i < KV_TRACE_BLOCK ? p->tokens - i : KV_TRACE_BLOCK;
        uint64_t x = mix64(seed + mix64((uint64_t)p->ids[i / KV_TRACE_BLOCK] + 1));
        for (size_t j = 0; j < count; j++, x += UINT64_C(0x9E3779B97F4A7C15))
            tokens[i + j] = (int32_t)(mix64(x) >> 33);
    }
}

static void make_chain(const int32_t *tokens, size_t count, uint64_t seed, uint64_t *chain)
{
    uint64_t h = mix64(~seed);
    for (size_t i = 0; i < count; i++) {
        h = (h ^ (uint64_t)tokens[i]) * UINT64_C(0xD6E8FEB86659FD93);
        h ^= h >> 32;
        chain[i] = h;
    }
}

/* Makes rows that stand for a model's: each depends on the layer, on K or V, and on every token so far. The words of a
   row differ too. */
static void make_rows(unsigned char *rows, size_t row_bytes, const uint64_t *chain, size_t count, size_t layer, bool v)
{
    const uint64_t stream = (2 * (uint64_t)layer + v + 1) * UINT64_C(0xA0761D6478BD642F);
    for (size_t i = 0; i < count; i++, rows += row_bytes) {
        uint64_t x = mix64(chain[i] + stream);
        size_t byte = 0;
        for (; byte + sizeof x <= row_bytes; byte += sizeof x, x += UINT64_C(0x9E3779B97F4A7C15))
            memcpy(rows + byte, &x, sizeof x);
        memcpy(rows + byte, &x, row_bytes - byte);
    }
}

static void print_place(const char *file, size_t line)
{
    fprintf(stderr, "%s:", file);
    if (line)
        fprintf(stderr, "%zu:", line);
    fputc(' ', stderr);
}

static int read_trace(kv_trace *trace, const char *path)
{
    if (kv_trace_read(trace, path))
        return 0;
    print_place(path, trace->error_line);
    fprintf(stderr, "%s\n", trace->error);
    return EXIT_REFUSED;
}

static int refuse_text(const char *path, const char *what)
{
    fprintf(stderr, "%s: %s\n", path, what);
    return EXIT_REFUSED;
}

static int read_text(prompt *p, const char *path)
{
    size_t capacity = 0, got = 0;
    FILE *const file = fopen(path, "rb");
    p->file = path;
    if (!file)
        return refuse_text(path, strerror(errno));
    do {
        unsigned char *const bigger = (unsigned char *)realloc(p->text, capacity = capacity * 2 + 4096);
        if (!bigger) {
            fclose(file);
            return refuse_text(path, "out of memory");
        }
        p->text = bigger;
        got = fread(p->text + p->tokens, 1, capacity - p->tokens, file);
        p->tokens += got;
    } while (p->tokens == capacity);
    const int error = ferror(file) ? errno : 0;
    fclose(file);
    if (error)
        return refuse_text(path, strerror(error));
    return p->tokens ? 0 : refuse_text(path, "empty: a request has at least one token");
}

static int read_prompts(replay *r)
{
    const int status = r->o.trace ? read_trace(&r->trace, r->o.trace) : 0;
    if (status)
        return status;
    r->prompts = (prompt *)calloc(r->trace.count + r->o.text_count, sizeof *r->prompts);
    if (!r->prompts)
        return refuse("out of memory");
    for (size_t i = 0; i < r->trace.count; i++) {
        const kv_trace_request *const from = &r->trace.requests[i];
        prompt *const p = &r->prompts[r->prompt_count++];
        p->file = r->o.trace;
        p->line = from->line;
        p->tokens = (size_t)from->input_length;
        p->ids = r->trace.ids + from->first_id;
    }
    for (size_t i = 0; i < r->o.text_count; i++) {
        const int text_status = read_text(&r->prompts[r->prompt_count++], r->o.texts[i]);
        if (text_status)
            return text_status;
    }
    return 0;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The last page may be partial. */
static size_t pages_of(const replay *r, const prompt *p)
{
    return (p->tokens - 1) / r->o.page + 1;
}

static size_t replayed(const replay *r)
{
    return r->o.requests && r->o.requests < r->prompt_count ? (size_t)r->o.requests : r->prompt_count;
}

typedef struct block { /* of a trace; blocks with different histories are different */
    uint64_t history;  /* hash of all ids up to this one; 0: the entry is free */
    size_t tokens;     /* the most tokens that any request has in the block */
} block;

/* Counts the pages that the requests leave in the tree if none is ever evicted: those that end in each distinct block.
   `blocks` is a hash table of mask + 1 entries. */
static uint64_t count_tree_pages(const replay *r, block *blocks, size_t mask)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < replayed(r); i++) {
        const prompt *const p = &r->prompts[i];
        uint64_t history = 0;
        pages += p->text ? p->tokens / r->o.page : 0;
        for (size_t begin = 0; !p->text && begin < p->tokens; begin += KV_TRACE_BLOCK) {
            const size_t tokens = p->tokens - begin < KV_TRACE_BLOCK ? p->tokens - begin : KV_TRACE_BLOCK;
            history = mix64(history + (uint64_t)p->ids[begin / KV_TRACE_BLOCK] + 1) | 1;
            size_t at = (size_t)history & mask;
            while (blocks[at].history && blocks[at].history != history)
                at = (at + 1) & mask;
            blocks[at].history = history;
            if (blocks[at].tokens < tokens) {
                pages += (begin + tokens) / r->o.page - (begin + blocks[at].tokens) / r->o.page;
                blocks[at].tokens = tokens;
            }
        }
    }
    return pages;
}

/* Counts the pages of a cache that never evicts: those of the tree, a partial page for each running request, and the
   pages that requests that run at the same time hold twice. */
static int count_pages(const replay *r, uint64_t *pages)
{
    size_t mask = 1023;
    uint64_t longest = 0, all = 0;
    while (mask / 2 < r->trace.id_count)
        mask = mask * 2 + 1;
    for (size_t i = 0; i < replayed(r); i++) {
        const uint64_t own = pages_of(r, &r->prompts[i]);
        longest = own > longest ? own : longest;
        all += own;
    }
    block *const blocks = (block *)calloc(mask + 1, sizeof *blocks);
    if (!blocks)
        return refuse("out of memory");
    *pages = count_tree_pages(r, blocks, mask) + r->o.running + (r->o.running - 1) * longest;
    *pages = *pages < all ? *pages : all;
    free(blocks);
    return 0;
}

static int check_fits(const replay *r, uint64_t page_count)
{
    for (size_t i = 0; i < replayed(r); i++) {
        const prompt *const p = &r->prompts[i];
        if (pages_of(r, p) <= page_count)
            continue;
        print_place(p->file, p->line);
        fprintf(stderr,
                "the request needs %" PRIu64 " slots (%zu tokens in pages of %" PRIu64 "), the cache has %" PRIu64 "\n",
                pages_of(r, p) * r->o.page, p->tokens, r->o.page, page_count * r->o.page);
        return EXIT_REFUSED;
    }
    return 0;
}

/* malloc cannot tell: systems promise more memory than they have, and kill the program that uses it. Leaves an eighth
   for others. */
static bool slots_fit(const replay *r, uint64_t slots)
{
    const uint64_t token_bytes = r->o.layers * r->o.kv_bytes, all = r->device.memory;
    const uint64_t most = all ? all - all / 8 : UINT64_MAX;
    return slots <= (most < SIZE_MAX >> 1 ? most : SIZE_MAX >> 1) / token_bytes;
}

/* Halves the default row size until the cache fits, so that a first replay does not fail for lack of memory. */
static void fit_rows(replay *r, uint64_t slots)
{
    options *const o = &r->o;
    const uint64_t usual = o->kv_bytes;
    while (!o->kv_bytes_given && o->kv_bytes > 2 && !slots_fit(r, slots))
        o->kv_bytes /= 2;
    if (o->kv_bytes != usual && slots_fit(r, slots))
        fprintf(stderr,
                "02_kv_replay: %" PRIu64 " slots of %" PRIu64 " bytes in each layer are more than this %s's memory: "
                "replaying with %" PRIu64 "\n",
                slots, usual, r->device.kind->gpu ? "GPU" : "machine", o->kv_bytes);
}

static int make_cache(replay *r)
{
    cache *const c = &r->cache;
    uint64_t pages = r->o.slots / r->o.page;
    int status = pages ? 0 : count_pages(r, &pages);
    if (status || (status = check_fits(r, pages)) != 0)
        return status;
    if (pages > SLOTS_MAX / r->o.page)
        return refuse("all tokens need %" PRIu64 " pages, more slots than an int32 can number: set --slots", pages);
    const uint64_t slots = pages * r->o.page;
    fit_rows(r, slots);
    const uint64_t token_bytes = r->o.layers * r->o.kv_bytes;
    if (!slots_fit(r, slots))
        return refuse("%" PRIu64 " slots of %" PRIu64 " bytes are more than this %s's memory: set --slots or a smaller "
                      "--kv-bytes",
                      slots, token_bytes, r->device.kind->gpu ? "GPU" : "machine");
    c->slots = (size_t)slots;
    c->page_count = (size_t)pages;
    c->row_bytes = (size_t)r->o.kv_bytes / 2;
    c->bytes = (size_t)(slots * token_bytes);
    if (!kv_device_allocate(&r->device, c->bytes, c->row_bytes))
        return refuse("no memory for %" PRIu64 " slots of %" PRIu64 " bytes (%s): set --slots or a smaller --kv-bytes",
                      slots, token_bytes, r->device.error);
    return 0;
}

static int make_tiers(replay *r)
{
    kv_tiers *const t = &r->tiers;
    const size_t page = (size_t)r->o.page;
    const kv_tiers_desc desc = {
        .device = &r->device,
        .tree = &r->tree,
        .cache_pages = r->cache.page_count,
        .host_pages = (size_t)r->o.host_slots / page,
        .disk_pages = (size_t)r->o.disk_slots / page,
        .tables = 2 * (size_t)r->o.layers,
        .piece_bytes = page * r->cache.row_bytes,
        .disk_path = r->o.disk_file,
    };
    if (!kv_tiers_open(t, &desc))
        return refuse("%s", t->error);
    const size_t pages = t->tier[KV_HOST].pool.page_count;
    const uint64_t all = kv_cpu_memory(), beside = r->device.kind->gpu ? 0 : r->cache.bytes;
    if (pages > INT32_MAX)
        return refuse("--host-slots %" PRIu64 " are %zu pages, more than an int32 can number", r->o.host_slots, pages);
    if (all && (double)pages * (double)t->page_stride > (double)(all - all / 8) - (double)beside)
        return refuse("--host-slots %" PRIu64 " need %.3f GB, and this machine has %.3f GB%s", r->o.host_slots,
                      1e-9 * (double)pages * (double)t->page_stride, 1e-9 * (double)all,
                      beside ? ", cache included" : "");
    if (pages && !kv_device_allocate_host(&r->device, kv_tiers_host_bytes(t)))
        return refuse("no host memory for --host-slots %" PRIu64 " (%s)", r->o.host_slots, r->device.error);
    return 0;
}

static int make_replay(replay *r)
{
    if (!kv_device_open(&r->device, r->o.device))
        return refuse("--device %s: %s", r->o.device, r->device.error);
    int status = read_prompts(r);
    if (status || (status = make_cache(r)) != 0)
        return status;
    r->expected = (unsigned char *)malloc(r->device.batch_rows * r->cache.row_bytes);
    r->running = (active *)calloc((size_t)r->o.running, sizeof *r->running);
    if (!r->expected || !r->running || !kv_radix_init(&r->tree, (size_t)r->o.page))
        return refuse("out of memory");
    return make_tiers(r);
}

static void free_replay(replay *r)
{
    for (size_t i = 0; r->running && i < r->o.running; i++) {
        free(r->running[i].tokens);
        free(r->running[i].chain);
        free(r->running[i].pages);
    }
    for (size_t i = 0; i < r->prompt_count; i++)
        free(r->prompts[i].text);
    free(r->running);
    free(r->expected);
    kv_tiers_close(&r->tiers);
    kv_device_close(&r->device);
    free(r->prompts);
    kv_radix_free(&r->tree);
    kv_trace_free(&r->trace);
}

/* ---- rows: store, gather, compare -------------------------------------------------------------------------------- */

static kvprim_table cache_table(const replay *r, size_t layer, bool v)
{
    const cache *const c = &r->cache;
    const kvprim_table table = {.data = r->device.cache + (2 * layer + v) * c->slots * c->row_bytes,
                                .rows = (int64_t)c->slots};
    return table;
}

/* Stores a batch's rows into its slots. */
static int store_rows(replay *r, kv_batch *b, size_t layer)
{
    const int64_t row_bytes = (int64_t)r->cache.row_bytes, count = (int64_t)b->count;
    const kvprim_store_desc desc = {
        .k_cache = cache_table(r, layer, false),
        .v_cache = cache_table(r, layer, true),
        .k = {.data = b->device.k, .rows = count},
        .v = {.data = b->device.v, .rows = count},
        .k_bytes = row_bytes,
        .v_bytes = row_bytes,
        .slot = b->device.slots,
        .slot_type = KVPRIM_I32,
        .count = count,
        .rejected = r->device.rejected,
    };
#if defined(KV_REPLAY_CORRUPT) /* for the test that a wrong byte is found */
    if (r->t.stored_bytes == 0)
        b->host.v[(b->count - 1) * r->cache.row_bytes] ^= 1;
#endif
    r->t.stored_bytes += 2 * b->count * r->cache.row_bytes;
    return kv_device_store(&r->device, b, &desc) ? 0 : refuse("%s", r->device.error);
}

static kvprim_gather_desc gather_desc(const replay *r, const kv_batch *b, size_t layer, bool v)
{
    const kvprim_gather_desc desc = {
        .dst = {.data = v ? b->device.v : b->device.k, .rows = (int64_t)b->count},
        .src = cache_table(r, layer, v),
        .row_bytes = (int64_t)r->cache.row_bytes,
        .index = b->device.slots,
        .index_type = KVPRIM_I32,
        .count = (int64_t)b->count,
        .rejected = r->device.rejected,
    };
    return desc;
}

/* Gathers the rows in a batch's slots into the batch. */
static int gather_rows(replay *r, kv_batch *b, size_t layer)
{
    const kvprim_gather_desc k = gather_desc(r, b, layer, false), v = gather_desc(r, b, layer, true);
    r->t.gathered_bytes += 2 * b->count * r->cache.row_bytes;
    return kv_device_gather(&r->device, b, &k, &v) ? 0 : refuse("%s", r->device.error);
}

static void show_mismatch(replay *r, const active *run, size_t token, size_t layer, bool v, int32_t slot,
                          const unsigned char *got, const unsigned char *expected)
{
    size_t byte = 0;
    if (++r->t.mismatched_rows > SHOWN_MAX)
        return;
    while (got[byte] == expected[byte])
        byte++;
    print_place(run->prompt->file, run->prompt->line);
    fprintf(stderr, "token %zu, layer %zu, %c row in slot %" PRId32 ": byte %zu is 0x%02x, expected 0x%02x\n", token,
            layer, v ? 'V' : 'K', slot, byte, got[byte], expected[byte]);
}

/* Compares a batch's K rows, or V rows, with those in r->expected. */
static void compare_rows(replay *r, const active *run, const kv_batch *b, bool v)
{
    const size_t row_bytes = r->cache.row_bytes;
    const unsigned char *got = v ? b->host.v : b->host.k, *expected = r->expected;
    r->t.verified_rows += b->count;
    if (memcmp(got, expected, b->count * row_bytes) == 0)
        return;
    for (size_t i = 0; i < b->count; i++, got += row_bytes, expected += row_bytes)
        if (memcmp(got, expected, row_bytes) != 0)
            show_mismatch(r, run, b->first + i, b->layer, v, b->host.slots[i], got, expected);
}

/* Waits for a batch of this run, and compares its rows if it gathered any. */
static int finish_batch(replay *r, const active *run, kv_batch *b)
{
    const size_t row_bytes = r->cache.row_bytes;
    const bool compare = b->gathered && r->o.verify;
    for (int v = 0; v < 2 && compare; v++) {
        make_rows(r->expected, row_bytes, run->chain + b->first, b->count, b->layer, v);
        if (v == 0 && !kv_device_wait(&r->device, b)) /* as late as possible: the device works meanwhile */
            return refuse("%s", r->device.error);
        compare_rows(r, run, b, v);
    }
    if (!kv_device_wait(&r->device, b))
        return refuse("%s", r->device.error);
    b->gathered = false;
    return 0;
}

/* Writes the slots of the run's tokens first to first + count - 1. */
static void make_slots(const active *run, size_t page, size_t first, size_t count, int32_t *slots)
{
    for (size_t i = 0, n; i < count; i += n) {
        const size_t token = first + i, offset = token % page;
        const size_t slot = (size_t)run->pages[token / page] * page + offset;
        n = page - offset < count - i ? page - offset : count - i;
        for (size_t j = 0; j < n; j++)
            slots[i + j] = (int32_t)(slot + j);
    }
}

/* Takes the next batch, finishes its last use, and writes the slots of tokens first to first + count - 1 into it. */
static int start_batch(replay *r, const active *run, size_t first, size_t count, size_t layer, kv_batch **batch)
{
    kv_batch *const b = kv_device_next(&r->device);
    const int status = finish_batch(r, run, b);
    if (status)
        return status;
    kv_device_layout(&r->device, b, count);
    b->first = first;
    b->layer = layer;
    make_slots(run, (size_t)r->o.page, first, count, b->host.slots);
    *batch = b;
    return 0;
}

static int store_prompt(replay *r, const active *run)
{
    const size_t tokens = run->prompt->tokens, most = r->device.batch_rows, row_bytes = r->cache.row_bytes;
    for (size_t first = run->matched_pages * (size_t)r->o.page, count; first < tokens; first += count) {
        count = tokens - first < most ? tokens - first : most;
        for (size_t layer = 0; layer < r->o.layers; layer++) {
            kv_batch *b;
            int status = start_batch(r, run, first, count, layer, &b);
            if (status)
                return status;
            make_rows(b->host.k, row_bytes, run->chain + first, count, layer, false);
            make_rows(b->host.v, row_bytes, run->chain + first, count, layer, true);
            if ((status = store_rows(r, b, layer)) != 0)
                return status;
        }
    }
    return 0;
}

static int gather_prompt(replay *r, const active *run)
{
    const size_t tokens = run->prompt->tokens, most = r->device.batch_rows;
    int status = 0;
    for (size_t first = 0, count; first < tokens; first += count) {
        count = tokens - first < most ? tokens - first : most;
        for (size_t layer = 0; layer < r->o.layers; layer++) {
            kv_batch *b;
            if ((status = start_batch(r, run, first, count, layer, &b)) != 0 ||
                (status = gather_rows(r, b, layer)) != 0)
                return status;
        }
    }
    for (size_t i = 0; i < r->device.kind->batches && !status; i++)
        status = finish_batch(r, run, kv_device_next(&r->device));
    return status;
}

/* ---- admitting and finishing requests ---------------------------------------------------------------------------- */

/* Ends the oldest running request, after gathering its rows, which later requests must not have changed. */
static int finish_oldest(replay *r)
{
    active *const run = &r->running[r->oldest];
    const size_t page = (size_t)r->o.page, matched = run->matched_pages, whole = run->prompt->tokens / page;
    const int status = gather_prompt(r, run);
    if (status)
        return status;
    r->oldest = (r->oldest + 1) % (size_t)r->o.running;
    r->running_count--;

    size_t known[KV_RADIX_TIERS];
    int32_t *pages = run->pages + matched;
    const double start = kv_seconds();
    if (!kv_radix_insert(&r->tree, run->node, run->tokens + matched * page, pages, whole - matched, known))
        return refuse("out of memory");
    kv_radix_unlock(&r->tree, run->node);
    r->t.tree += kv_seconds() - start;
    for (int tier = 0; tier < KV_RADIX_TIERS; pages += known[tier++])
        kv_pool_return(&r->tiers.tier[tier].pool, pages, known[tier]);
    kv_pool_return(&r->tiers.tier[KV_CACHE].pool, run->pages + whole, pages_of(r, run->prompt) - whole);
#if defined(KV_REPLAY_CHECK) /* for the tests; slow */
    const char *const broken = kv_radix_check(&r->tree);
    if (broken)
        return refuse("%s", broken);
#endif
    return 0;
}

/* Takes pages of the cache. To make room, others go down a tier or away. If that is not enough, requests end. */
static int take_pages(replay *r, int32_t *pages, size_t want)
{
    for (size_t room; (room = kv_tiers_room(&r->tiers, KV_CACHE)) < want;) {
        if (!kv_tiers_make_room(&r->tiers, KV_CACHE, want))
            return refuse("%s", r->tiers.error);
        const size_t got = kv_tiers_room(&r->tiers, KV_CACHE) - room;
        r->t.evicted_pages += got;
        r->t.evictions += got > 0;
        if (got == want - room)
            continue;
        if (r->running_count == 0) /* cannot happen after check_fits */
            return refuse("%zu pages are missing, and no running request could return any", want - room - got);
        const int status = finish_oldest(r);
        if (status)
            return status;
    }
    kv_pool_take(&r->tiers.tier[KV_CACHE].pool, pages, want);
    return 0;
}

/* Brings the matched pages that are not in the cache back to it, a few at a time: up from where they lie, then room in
   the cache, then into it. */
static int fetch_pages(replay *r, active *run, const size_t in_tier[KV_RADIX_TIERS])
{
    kv_tiers *const t = &r->tiers;
    int32_t host[KV_CHUNK_PAGES], *pages = run->pages + in_tier[KV_CACHE], *const first = pages;
    for (uint32_t tier = KV_HOST; tier < KV_RADIX_TIERS; tier++) {
        for (size_t left = in_tier[tier], count; left > 0; left -= count, pages += count) {
            count = left < t->chunk ? left : t->chunk;
            if (!kv_tiers_lift(t, tier, pages, count, host))
                return refuse("%s", t->error);
            const int status = take_pages(r, pages, count);
            if (status)
                return status;
            if (!kv_tiers_land(t, host, pages, count))
                return refuse("%s", t->error);
        }
    }
    kv_radix_promote(&r->tree, run->node, first, (size_t)(pages - first), NULL);
    return 0;
}

static int reserve_run(active *run, size_t tokens)
{
    if (tokens <= run->capacity)
        return 0;
    free(run->tokens);
    free(run->chain);
    free(run->pages);
    run->tokens = (int32_t *)malloc(tokens * sizeof *run->tokens);
    run->chain = (uint64_t *)malloc(tokens * sizeof *run->chain);
    run->pages = (int32_t *)malloc(tokens * sizeof *run->pages);
    run->capacity = run->tokens && run->chain && run->pages ? tokens : 0;
    return run->capacity ? 0 : refuse("out of memory");
}

/* Starts a request: gives the tokens that are not cached slots, and stores their rows. */
static int admit(replay *r, const prompt *p)
{
    if (r->running_count == r->o.running) {
        const int status = finish_oldest(r);
        if (status)
            return status;
    }
    active *const run = &r->running[(r->oldest + r->running_count) % (size_t)r->o.running];
    int status = reserve_run(run, p->tokens);
    if (status)
        return status;
    run->prompt = p;
    make_tokens(p, r->o.seed, run->tokens);
    make_chain(run->tokens, p->tokens, r->o.seed, run->chain);

    size_t in_tier[KV_RADIX_TIERS];
    const double start = kv_seconds();
    const size_t most = p->tokens - (size_t)r->o.recompute_last;
    if (!kv_radix_match(&r->tree, run->tokens, most, run->pages, in_tier, &run->node))
        return refuse("out of memory");
    r->t.prefix += kv_seconds() - start;
    kv_radix_lock(run->node);
    r->t.requests++;
    r->t.tokens += p->tokens;
    run->matched_pages = 0;
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++) {
        run->matched_pages += in_tier[tier];
        r->t.matched_in[tier] += in_tier[tier] * r->o.page;
    }
    r->t.matched += run->matched_pages * r->o.page;

    if ((status = fetch_pages(r, run, in_tier)) != 0)
        return status;
    status = take_pages(r, run->pages + run->matched_pages, pages_of(r, p) - run->matched_pages);
    if (!status)
        status = store_prompt(r, run);
    r->running_count++;
    return status;
}

static void show_progress(replay *r, size_t done)
{
    const double now = kv_seconds();
    if (r->next_progress <= 0 || now < r->next_progress)
        return;
    r->next_progress = now + 0.25;
    fprintf(stderr, "\r%zu of %zu requests, %.1f M tokens, %.1f %% matched ", done, replayed(r),
            (double)r->t.tokens / 1e6, 100.0 * (double)r->t.matched / (double)(r->t.tokens ? r->t.tokens : 1));
    fflush(stderr);
}

static int replay_all(replay *r)
{
#if defined(_WIN32)
    const bool terminal = _isatty(_fileno(stderr)) != 0;
#else
    const bool terminal = isatty(fileno(stderr)) != 0;
#endif
    const double start = kv_seconds();
    int status = 0;
    r->next_progress = terminal ? start : 0;
    for (size_t i = 0; i < replayed(r) && !status; i++) {
        status = admit(r, &r->prompts[i]);
        show_progress(r, i);
    }
    while (r->running_count && !status)
        status = finish_oldest(r);
    if (!status && !kv_device_rejected(&r->device, &r->rejected))
        status = refuse("%s", r->device.error);
    r->t.all = kv_seconds() - start;
    if (terminal)
        fprintf(stderr, "\r%79s\r", "");
    return status;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static void print_count(const char *label, uint64_t count)
{
    char digits[32], grouped[48];
    const int size = snprintf(digits, sizeof digits, "%" PRIu64, count);
    int at = 0;
    for (int i = 0; i < size; i++) {
        if (i && (size - i) % 3 == 0)
            grouped[at++] = ',';
        grouped[at++] = digits[i];
    }
    grouped[at] = '\0';
    printf("%-18s %18s", label, grouped);
}

static void print_bytes(const char *label, uint64_t bytes, double time)
{
    print_count(label, bytes);
    printf("   %.2f GB/s\n", time > 0 ? 1e-9 * (double)bytes / time : 0);
}

static void print_time(const char *label, double time, const char *what)
{
    printf("%-18s %18.3f s%s\n", label, time, what);
}

static void print_traffic(const char *label, kv_traffic traffic)
{
    print_count(label, traffic.bytes);
    printf("   %.2f GB/s in %.3f s\n", traffic.seconds > 0 ? 1e-9 * (double)traffic.bytes / traffic.seconds : 0,
           traffic.seconds);
}

/* What the tiers hold, what of the prompts was in each, and what went down and came up. */
static void print_tiers(const replay *r)
{
    static const char *const hits[KV_RADIX_TIERS] = {"hits in the cache", "hits in host", "hits on disk"};
    const kv_tiers *const t = &r->tiers;
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++) {
        print_count(hits[tier], r->t.matched_in[tier]);
        printf("   %.2f %% hit rate, room for %zu tokens\n",
               100.0 * (double)r->t.matched_in[tier] / (double)r->t.tokens, t->tier[tier].capacity * (size_t)r->o.page);
    }
    print_traffic("bytes to host", t->to_host);
    print_traffic("bytes from host", t->from_host);
    print_traffic("bytes to disk", t->to_disk);
    print_traffic("bytes from disk", t->from_disk);
    print_count("pages dropped", t->dropped);
    printf("   %s\n", t->disk.path[0] ? "from disk" : "from host");
    if (!t->disk.path[0])
        return;
    printf("%-18s %18s   %s, pages of %zu bytes take %zu\n", "disk file", t->disk.direct ? "O_DIRECT" : "page cache",
           t->disk.path, t->tables * t->piece_bytes, t->page_stride);
}

static void print_peak_memory(void)
{
#if !defined(_WIN32)
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0)
        return;
#if defined(__APPLE__)
    const double bytes = (double)usage.ru_maxrss;
#else
    const double bytes = 1024.0 * (double)usage.ru_maxrss;
#endif
    printf("%-18s %18.3f GB resident\n", "peak memory", 1e-9 * bytes);
#endif
}

/* On a GPU the times of store, gather and copies are those between its events. They are no part of the total, because
   the host works meanwhile. */
static void print_times(const replay *r)
{
    const totals *const t = &r->t;
    const kv_device *const d = &r->device;
    const bool gpu = d->kind->gpu;
    print_time("time in prefix", t->prefix, "");
    print_time("time in store", d->store, gpu ? "   on the GPU, launches included" : "");
    print_time("time in gather", d->gather, gpu ? "   on the GPU, launches included" : "");
    if (gpu) {
        print_time("time in copies", d->copies, "   on the GPU: slots and rows in, rows out");
        print_time("time in waiting", d->waiting, "   of the host for the GPU");
    }
    const kv_tiers *const s = &r->tiers;
    const double tree = t->tree + s->tree_seconds, disk = s->to_disk.seconds + s->from_disk.seconds;
    const double tiers = s->to_host.seconds + s->from_host.seconds + disk;
    print_time("time in tree", tree, "   insert, evict");
    if (kv_tiers_lower(s))
        print_time("time in tiers", tiers,
                   gpu ? "   to and from the GPU and the disk" : "   to and from host and disk");
    print_time("time in the rest", t->all - t->prefix - tree - (gpu ? d->waiting + disk : d->store + d->gather + tiers),
               gpu ? "   making tokens and rows, launches, comparing" : "   making tokens and rows, comparing");
}

static void print_table(const replay *r)
{
    const totals *const t = &r->t;
    printf("%-18s %18s%s%s\n", "device", r->device.kind->name, *r->device.name ? "   " : "", r->device.name);
    print_count("requests", t->requests);
    printf("   in %.3f s\n", t->all);
    print_count("tokens", t->tokens);
    printf("   %.1f M/s\n", t->all > 0 ? 1e-6 * (double)t->tokens / t->all : 0);
    print_count("tokens matched", t->matched);
    printf("   %.2f %% hit rate\n", 100.0 * (double)t->matched / (double)t->tokens);
    print_count("cache slots", r->cache.slots);
    printf("   %s\n", r->o.slots ? "" : "room for all");
    print_count("cache bytes", r->cache.bytes);
    printf("   first touched in %.3f s\n", r->device.touch_seconds);
    print_count("pages evicted", t->evicted_pages);
    printf("   in %" PRIu64 " evictions\n", t->evictions);
    if (kv_tiers_lower(&r->tiers))
        print_tiers(r);
    print_bytes("bytes stored", t->stored_bytes, r->device.store);
    print_bytes("bytes gathered", t->gathered_bytes, r->device.gather);
    print_times(r);
    print_count("rows verified", t->verified_rows);
    printf("   %s\n", r->o.verify ? "" : "--verify 0");
    print_count("rows rejected", r->rejected);
    printf("\n");
    print_count("mismatches", t->mismatched_rows);
    printf("\n");
    print_peak_memory();
    printf("%-18s %18s\n", "prefix compare", kvprim_isa());
}

int main(int argc, char **argv)
{
    replay r = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return 0;
        }
    }
    r.o.texts = (const char **)calloc((size_t)argc + 1, sizeof *r.o.texts);
    int status = r.o.texts ? parse_options(&r.o, argc, argv) : refuse("out of memory");
    if (!status && (status = make_replay(&r)) == 0 && (status = replay_all(&r)) == 0) {
        print_table(&r);
        status = r.t.mismatched_rows || r.rejected ? EXIT_MISMATCH : 0;
        if (fflush(stdout) != 0 || ferror(stdout))
            status = refuse("the table could not be written");
    }
    free(r.o.texts);
    free_replay(&r);
    return status;
}

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
   CPU or a GPU (kv_device.h), and keep pages in host memory (kv_tiers.h) and a file (kv_disk.h). To see what an engine
   does, read admit and finish_oldest first. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* O_DIRECT */
#endif
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* clock_gettime, preadv, sysconf under -std=c11 */
#endif
#if defined(__has_include)
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h> /* for keys of XXH3 */
#endif
#endif
#define KVPRIM_CORE_IMPLEMENTATION /* kvprim.h alone; nvcc compiles kvprim_cuda.cuh */
#include "kvprim.h"
#include "kv_device.h"
#include <inttypes.h>
#include "kv_keys.h"
#include "kv_radix.h"
#include "kv_tiers.h"
#include "kv_trace.h"

enum { EXIT_MISMATCH = 1 };

#define SLOTS_MAX INT32_MAX
#define SHOWN_MAX 5 /* mismatches described one by one */

/* ---- options ----------------------------------------------------------------------------------------------------- */

typedef struct options {
    uint64_t kv_bytes, page, slots, host_slots, disk_slots, layers, verify, seed, requests, running, recompute_last;
    const char *device;    /* NULL: a GPU if there is one, else the CPU */
    const char *disk_file; /* NULL: in $TMPDIR or /tmp */
    const char *keys;      /* NULL: none */
    const char *trace;
    const char **texts;
    size_t text_count;
    bool kv_bytes_given;
} options;

/* With a number from min to max, or, if max is 0, with a text. */
typedef struct option {
    const char *name;
    size_t offset; /* of the uint64_t, or const char *, in options */
    uint64_t preset, min, max;
    const char *help;
} option;

static const option option_table[] = {
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
    {"--device", offsetof(options, device), 0, 0, 0,
     "cpu or cuda: holds the cache and moves its rows (default: cuda if there is a GPU)"},
    {"--disk-file", offsetof(options, disk_file), 0, 0, 0,
     "for --disk-slots; must not exist, and is gone afterwards (default: in $TMPDIR or /tmp)"},
    {"--keys", offsetof(options, keys), 0, 0, 0,
     "vllm_sha256, sglang, trtllm, lmcache ...: finds prefixes by keys, too, and uses those"},
    {"--text", offsetof(options, texts), 0, 0, 0, "a file: adds a request whose tokens are its bytes; may be repeated"},
};
static const option *const option_end = option_table + sizeof option_table / sizeof *option_table;

static void print_help(void)
{
    printf(
        "usage: 02_kv_replay [options] [TRACE]\n\n"
        "Replays the requests of TRACE (Mooncake JSON lines; -: standard input), then those of --text, against a KV\n"
        "cache.\n\n");
    for (const option *row = option_table; row < option_end; row++)
        if (row->max)
            printf("  %-16s N %s (%" PRIu64 ")\n", row->name, row->help, row->preset);
        else
            printf("  %-16s   %s\n", row->name, row->help);
    printf("  --help             this text\n\n"
           "Exit status: 0 all rows are right, 1 some rows are wrong, 2 bad input, no such device or out of memory.\n");
}

static void set_number(options *o, const option *row, const char *text)
{
    uint64_t value = 0;
    bool ok = *text != '\0';
    for (const char *digit = text; *digit && ok; digit++) {
        const uint64_t d = (uint64_t)(unsigned char)*digit - '0';
        ok = d <= 9 && value <= (UINT64_MAX - d) / 10;
        value = value * 10 + d;
    }
    if (!ok || value < row->min || value > row->max)
        kv_die("%s is '%s', not a number from %" PRIu64 " to %" PRIu64, row->name, text, row->min, row->max);
    memcpy((char *)o + row->offset, &value, sizeof value);
    o->kv_bytes_given = o->kv_bytes_given || row->offset == offsetof(options, kv_bytes);
}

/* Sets the option at argv[*i] to its value, which is "=value" or the next argument. */
static void set_option(options *o, char **argv, int *i)
{
    char *const name = argv[*i], *const equals = strchr(name, '=');
    const option *row = option_table;
    if (equals)
        *equals = '\0';
    while (row < option_end && strcmp(row->name, name) != 0)
        row++;
    if (row == option_end)
        kv_die("unknown option %s (see --help)", name);
    const char *const value = equals ? equals + 1 : argv[++*i];
    if (!value)
        kv_die("%s needs a value", name);
    if (row->max)
        set_number(o, row, value);
    else if (row->offset == offsetof(options, texts))
        o->texts[o->text_count++] = value;
    else
        memcpy((char *)o + row->offset, &value, sizeof value);
}

static void check_options(const options *o)
{
    const struct {
        const char *name;
        uint64_t slots;
    } tiers[] = {{"--slots", o->slots}, {"--host-slots", o->host_slots}, {"--disk-slots", o->disk_slots}};
    if (!o->trace && !o->text_count)
        kv_die("no TRACE and no --text to replay (see --help)");
    if (o->kv_bytes % 2)
        kv_die("--kv-bytes is %" PRIu64 ", which K and V cannot share equally", o->kv_bytes);
    for (int i = 0; i < 3; i++) {
        const uint64_t slots = tiers[i].slots;
        if (slots && slots < o->page)
            kv_die("%s %" PRIu64 " holds no page of %" PRIu64 " tokens", tiers[i].name, slots, o->page);
        if (slots && !o->slots)
            kv_die("%s %" PRIu64 " without --slots: a cache with room for all sends nothing there", tiers[i].name,
                   slots);
    }
    if (o->device && strcmp(o->device, "cpu") != 0 && strcmp(o->device, "cuda") != 0)
        kv_die("--device is '%s', neither cpu nor cuda", o->device);
    if (o->keys && !kv_keys_rule(o->keys))
        kv_die("--keys is '%s', not vllm_sha256, vllm_sha256_cbor, vllm_xxhash, vllm_xxhash_cbor, sglang, trtllm, "
               "lmcache, "
               "dynamo or xxh3",
               o->keys);
    if (o->keys && (o->host_slots || o->disk_slots))
        kv_die("--keys with --host-slots or --disk-slots: keys lead only to pages of the cache");
    if (o->disk_file && !*o->disk_file)
        kv_die("--disk-file is empty");
    if (o->disk_file && !o->disk_slots)
        kv_die("--disk-file %s without --disk-slots", o->disk_file);
}

static void parse_options(options *o, int argc, char **argv)
{
    o->texts = (const char **)kv_allocate((size_t)argc, sizeof *o->texts);
    for (const option *row = option_table; row < option_end; row++)
        if (row->max)
            memcpy((char *)o + row->offset, &row->preset, sizeof row->preset);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' && argv[i][1] != '\0')
            set_option(o, argv, &i);
        else if (o->trace)
            kv_die("more than one trace: %s and %s", o->trace, argv[i]);
        else
            o->trace = argv[i];
    }
    check_options(o);
}

/* ---- state ------------------------------------------------------------------------------------------------------- */

typedef struct prompt {
    const char *file;
    size_t line; /* in a trace; 0: a text file */
    size_t tokens;
    const int64_t *ids;  /* of a trace: the block ids */
    unsigned char *text; /* of a text file: the tokens; else NULL */
} prompt;

/* A request between its admission and its end. Later requests reuse the arrays. */
typedef struct active {
    const prompt *prompt;
    int32_t *tokens;
    uint64_t *chain; /* chain[i]: hash of tokens[0 .. i] */
    int32_t *pages;  /* of all tokens; the last page may be partial */
    size_t capacity; /* in tokens */
    size_t matched_pages;
    unsigned char *keys; /* with --keys: of the whole pages */
    int64_t *values;     /* what the table of keys says of them */
    kv_radix_node *node; /* where the match ended; locked */
} active;

typedef struct totals {
    uint64_t requests, tokens, matched, evicted_pages, evictions;
    uint64_t matched_in[KV_RADIX_TIERS]; /* tokens */
    uint64_t stored_bytes, gathered_bytes, verified_rows, mismatched_rows;
    uint32_t rejected;        /* slots outside the cache: 0 unless there is a bug */
    double prefix, tree, all; /* seconds; kv_device has those of the device */
} totals;

typedef struct replay {
    options o;
    kv_trace trace;
    prompt *prompts;
    size_t prompt_count, replayed; /* all; the first ones, which are replayed */
    size_t page, slots, row_bytes; /* of the cache: [layer][K or V][slot][row] */
    uint64_t cache_bytes;
    kv_device device;
    kv_radix tree;
    kv_tiers tiers;
    kv_keys keys;
    active *running; /* a ring of o.running */
    size_t oldest, running_count;
    unsigned char *expected; /* K rows, or V rows, of one batch */
    totals t;
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
    fprintf(stderr, line ? "%s:%zu: " : "%s: ", file, line);
}

static void refuse_file(const char *file, size_t line, const char *why)
{
    print_place(file, line);
    fprintf(stderr, "%s\n", why);
    exit(KV_EXIT_REFUSED);
}

static void read_prompts(replay *r)
{
    if (r->o.trace && !kv_trace_read(&r->trace, r->o.trace))
        refuse_file(r->o.trace, r->trace.error_line, r->trace.error);
    r->prompts = (prompt *)kv_allocate(r->trace.count + r->o.text_count, sizeof *r->prompts);
    for (size_t i = 0; i < r->trace.count; i++) {
        const kv_trace_request *const from = &r->trace.requests[i];
        r->prompts[r->prompt_count++] = (prompt){.file = r->o.trace,
                                                 .line = from->line,
                                                 .tokens = (size_t)from->input_length,
                                                 .ids = r->trace.ids + from->first_id};
    }
    for (size_t i = 0; i < r->o.text_count; i++) {
        prompt p = {.file = r->o.texts[i]};
        p.text = (unsigned char *)kv_trace_load(&r->trace, p.file, &p.tokens);
        if (!p.text || !p.tokens)
            refuse_file(p.file, 0, p.text ? "empty: a request has at least one token" : r->trace.error);
        r->prompts[r->prompt_count++] = p;
    }
    r->replayed = r->o.requests && r->o.requests < r->prompt_count ? (size_t)r->o.requests : r->prompt_count;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The last page may be partial. */
static size_t pages_of(const replay *r, const prompt *p)
{
    return (p->tokens - 1) / r->page + 1;
}

static void free_run(active *run)
{
    free(run->tokens);
    free(run->chain);
    free(run->pages);
    free(run->keys);
    free(run->values);
}

/* Room for tokens, and keys of so many bytes. */
static void reserve_run(active *run, size_t tokens, size_t page, size_t key_bytes)
{
    if (tokens <= run->capacity)
        return;
    free_run(run);
    run->keys = key_bytes ? (unsigned char *)kv_allocate(tokens / page + 1, key_bytes) : NULL;
    run->values = key_bytes ? (int64_t *)kv_allocate(tokens / page + 1, sizeof *run->values) : NULL;
    run->tokens = (int32_t *)kv_allocate(tokens, sizeof *run->tokens);
    run->chain = (uint64_t *)kv_allocate(tokens, sizeof *run->chain);
    run->pages = (int32_t *)kv_allocate(tokens, sizeof *run->pages);
    run->capacity = tokens;
}

/* Counts the pages of a cache that never evicts: those that the requests leave in the tree, a partial page for each
   running request, and the pages that requests that run at the same time hold twice. */
static uint64_t count_pages(const replay *r)
{
    uint64_t pages = 0, longest = 0, all = 0;
    active run = {0};
    kv_radix tree;
    kv_radix_init(&tree, r->page, 2 * r->replayed);
    for (const prompt *p = r->prompts; p < r->prompts + r->replayed; p++) {
        const size_t own = pages_of(r, p), whole = p->tokens / r->page;
        size_t in_tier[KV_RADIX_TIERS];
        reserve_run(&run, p->tokens, r->page, 0);
        make_tokens(p, r->o.seed, run.tokens);
        memset(run.pages, 0, own * sizeof *run.pages); /* the tree copies these numbers */
        kv_radix_node *const node = kv_radix_match(&tree, run.tokens, p->tokens, run.pages, in_tier);
        pages += whole - in_tier[0];
        kv_radix_lock(node);
        kv_radix_insert(&tree, node, run.tokens + in_tier[0] * r->page, run.pages, whole - in_tier[0], in_tier);
        kv_radix_unlock(&tree, node);
        longest = own > longest ? own : longest;
        all += own;
    }
    kv_radix_free(&tree);
    free_run(&run);
    pages += r->o.running + (r->o.running - 1) * longest;
    return pages < all ? pages : all;
}

static void check_fits(const replay *r, uint64_t page_count)
{
    for (const prompt *p = r->prompts; p < r->prompts + r->replayed; p++) {
        if (pages_of(r, p) <= page_count)
            continue;
        print_place(p->file, p->line);
        fprintf(stderr, "the request needs %zu slots (%zu tokens in pages of %zu), the cache has %" PRIu64 "\n",
                pages_of(r, p) * r->page, p->tokens, r->page, page_count * r->page);
        exit(KV_EXIT_REFUSED);
    }
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
    const char *const memory = r->device.gpu ? "GPU" : "machine";
    while (!o->kv_bytes_given && o->kv_bytes > 2 && !slots_fit(r, slots))
        o->kv_bytes /= 2;
    if (!slots_fit(r, slots))
        kv_die("%" PRIu64 " slots of %" PRIu64 " bytes are more than this %s's memory: set --slots or a smaller "
               "--kv-bytes",
               slots, o->layers * o->kv_bytes, memory);
    if (o->kv_bytes != usual)
        fprintf(stderr,
                "02_kv_replay: %" PRIu64 " slots of %" PRIu64 " bytes in each layer are more than this %s's memory: "
                "replaying with %" PRIu64 "\n",
                slots, usual, memory, o->kv_bytes);
}

static void make_cache(replay *r)
{
    const uint64_t pages = r->o.slots ? r->o.slots / r->page : count_pages(r);
    check_fits(r, pages);
    if (pages > SLOTS_MAX / r->page)
        kv_die("all tokens need %" PRIu64 " pages, more slots than an int32 can number: set --slots", pages);
    fit_rows(r, pages * r->page);
    r->slots = (size_t)pages * r->page;
    r->row_bytes = (size_t)r->o.kv_bytes / 2;
    r->cache_bytes = r->slots * r->o.layers * r->o.kv_bytes;
    kv_device_allocate(&r->device, (size_t)r->cache_bytes, r->row_bytes);
}

static void make_tiers(replay *r)
{
    kv_tiers *const t = &r->tiers;
    const size_t all = (size_t)kv_cpu_memory();
    t->device = &r->device;
    t->tree = &r->tree;
    t->capacity[KV_CACHE] = r->slots / r->page;
    t->capacity[KV_HOST] = (size_t)r->o.host_slots / r->page;
    t->capacity[KV_DISK] = (size_t)r->o.disk_slots / r->page;
    t->tables = 2 * (size_t)r->o.layers;
    t->piece_bytes = r->page * r->row_bytes;
    kv_tiers_open(t, r->o.disk_file);

    const size_t pages = t->pool[KV_HOST].page_count;
    const double bytes = (double)pages * (double)t->page_stride, beside = r->device.gpu ? 0 : (double)r->cache_bytes;
    if (pages > INT32_MAX)
        kv_die("--host-slots %" PRIu64 " are %zu pages, more than an int32 can number", r->o.host_slots, pages);
    if (all && bytes > (double)(all - all / 8) - beside)
        kv_die("--host-slots %" PRIu64 " need %.3f GB, and this machine has %.3f GB%s", r->o.host_slots, 1e-9 * bytes,
               1e-9 * (double)all, beside > 0 ? ", cache included" : "");
    if (pages)
        r->device.host = (unsigned char *)kv_device_memory(&r->device, pages * t->page_stride, true);
}

static void make_replay(replay *r)
{
    if (!kv_device_open(&r->device, r->o.device))
        kv_die("--device %s: %s", r->o.device, r->device.name);
    r->page = (size_t)r->o.page;
    read_prompts(r);
    make_cache(r);
    r->expected = (unsigned char *)kv_allocate(r->device.batch_rows, r->row_bytes);
    r->running = (active *)kv_allocate((size_t)r->o.running, sizeof *r->running);
    memset(r->running, 0, (size_t)r->o.running * sizeof *r->running);
    kv_radix_init(&r->tree, r->page, 2 * r->replayed);
    make_tiers(r);
    if (r->o.keys)
        kv_keys_init(&r->keys, kv_keys_rule(r->o.keys), r->page, r->slots / r->page);
}

/* ---- rows: store, gather, compare -------------------------------------------------------------------------------- */

static kvprim_table cache_table(const replay *r, size_t layer, bool v)
{
    return (kvprim_table){.data = r->device.cache + (2 * layer + v) * r->slots * r->row_bytes,
                          .rows = (int64_t)r->slots};
}

/* Stores a batch's rows into its slots. */
static void store_rows(replay *r, kv_batch *b)
{
    const int64_t row_bytes = (int64_t)r->row_bytes, count = (int64_t)b->count;
    const kvprim_store_desc desc = {
        .k_cache = cache_table(r, b->layer, false),
        .v_cache = cache_table(r, b->layer, true),
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
        b->host.v[(b->count - 1) * r->row_bytes] ^= 1;
#endif
    r->t.stored_bytes += 2 * b->count * r->row_bytes;
    kv_device_move(&r->device, b, &desc, NULL);
}

/* Gathers the rows in a batch's slots into the batch. */
static void gather_rows(replay *r, kv_batch *b)
{
    kvprim_gather_desc desc[2];
    for (int v = 0; v < 2; v++)
        desc[v] = (kvprim_gather_desc){
            .dst = {.data = v ? b->device.v : b->device.k, .rows = (int64_t)b->count},
            .src = cache_table(r, b->layer, v),
            .row_bytes = (int64_t)r->row_bytes,
            .index = b->device.slots,
            .index_type = KVPRIM_I32,
            .count = (int64_t)b->count,
            .rejected = r->device.rejected,
        };
    r->t.gathered_bytes += 2 * b->count * r->row_bytes;
    kv_device_move(&r->device, b, NULL, desc);
}

static void show_mismatch(const active *run, const kv_batch *b, size_t row, bool v, const unsigned char *got,
                          const unsigned char *expected)
{
    size_t byte = 0;
    while (got[byte] == expected[byte])
        byte++;
    print_place(run->prompt->file, run->prompt->line);
    fprintf(stderr, "token %zu, layer %zu, %c row in slot %" PRId32 ": byte %zu is 0x%02x, expected 0x%02x\n",
            b->first + row, b->layer, v ? 'V' : 'K', b->host.slots[row], byte, got[byte], expected[byte]);
}

/* Compares a batch's K rows, or V rows, with those in r->expected. */
static void compare_rows(replay *r, const active *run, const kv_batch *b, bool v)
{
    const unsigned char *got = v ? b->host.v : b->host.k, *expected = r->expected;
    r->t.verified_rows += b->count;
    if (memcmp(got, expected, b->count * r->row_bytes) == 0)
        return;
    for (size_t i = 0; i < b->count; i++, got += r->row_bytes, expected += r->row_bytes)
        if (memcmp(got, expected, r->row_bytes) != 0 && ++r->t.mismatched_rows <= SHOWN_MAX)
            show_mismatch(run, b, i, v, got, expected);
}

/* Waits for a batch of this run, and compares its rows if it gathered any. */
static void finish_batch(replay *r, const active *run, kv_batch *b)
{
    for (int v = 0; v < 2 && b->gathered && r->o.verify; v++) {
        make_rows(r->expected, r->row_bytes, run->chain + b->first, b->count, b->layer, v);
        kv_device_wait(&r->device, b); /* as late as possible: the device works meanwhile */
        compare_rows(r, run, b, v);
    }
    kv_device_wait(&r->device, b);
    b->gathered = false;
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

/* Stores the rows of the prompt's tokens from `first` on, or gathers them, a batch at a time. */
static void move_prompt(replay *r, const active *run, size_t first, bool store)
{
    const size_t tokens = run->prompt->tokens, most = r->device.batch_rows;
    for (size_t count; first < tokens; first += count) {
        count = tokens - first < most ? tokens - first : most;
        for (size_t layer = 0; layer < r->o.layers; layer++) {
            kv_batch *const b = kv_device_next(&r->device);
            finish_batch(r, run, b); /* its last use */
            kv_device_layout(&r->device, b, count);
            b->first = first;
            b->layer = layer;
            make_slots(run, r->page, first, count, b->host.slots);
            if (store) {
                make_rows(b->host.k, r->row_bytes, run->chain + first, count, layer, false);
                make_rows(b->host.v, r->row_bytes, run->chain + first, count, layer, true);
                store_rows(r, b);
            } else {
                gather_rows(r, b);
            }
        }
    }
    for (size_t i = 0; i < r->device.kind->batches && !store; i++)
        finish_batch(r, run, kv_device_next(&r->device));
}

/* ---- admitting and finishing requests ---------------------------------------------------------------------------- */

/* Ends the oldest running request, after gathering its rows, which later requests must not have changed. */
static void finish_oldest(replay *r)
{
    active *const run = &r->running[r->oldest];
    const size_t matched = run->matched_pages, whole = run->prompt->tokens / r->page;
    move_prompt(r, run, 0, false);
    r->oldest = (r->oldest + 1) % (size_t)r->o.running;
    r->running_count--;

    size_t known[KV_RADIX_TIERS];
    int32_t *pages = run->pages + matched;
    const double start = kv_seconds();
    kv_radix_insert(&r->tree, run->node, run->tokens + matched * r->page, pages, whole - matched, known);
    kv_radix_unlock(&r->tree, run->node);
    r->t.tree += kv_seconds() - start;
    for (int tier = 0; tier < KV_RADIX_TIERS; pages += known[tier++])
        kv_pool_return(&r->tiers.pool[tier], pages, known[tier]);
    if (r->o.keys) {
        const size_t added = (size_t)(pages - run->pages);
        kv_keys_add(&r->keys, run->keys + added * (size_t)r->keys.bytes, pages, whole - added);
    }
    kv_pool_return(&r->tiers.pool[KV_CACHE], run->pages + whole, pages_of(r, run->prompt) - whole);
#if defined(KV_REPLAY_CHECK) /* for the tests; slow */
    const char *const broken = kv_radix_check(&r->tree);
    if (broken)
        kv_die("%s", broken);
#endif
}

/* Takes pages of the cache. To make room, others go down a tier or away. If that is not enough, requests end. */
static void take_pages(replay *r, int32_t *pages, size_t want)
{
    for (size_t room; (room = kv_tiers_room(&r->tiers, KV_CACHE)) < want;) {
        const kv_pool *const pool = &r->tiers.pool[KV_CACHE];
        const size_t before = pool->free_count;
        kv_tiers_make_room(&r->tiers, KV_CACHE, want);
        const size_t got = kv_tiers_room(&r->tiers, KV_CACHE) - room;
        if (r->o.keys)
            kv_keys_forget(&r->keys, pool->free_pages + before, got);
        r->t.evicted_pages += got;
        r->t.evictions += got > 0;
        if (got == want - room)
            continue;
        if (r->running_count == 0) /* cannot happen after check_fits */
            kv_die("%zu pages are missing, and no running request could return any", want - room - got);
        finish_oldest(r);
    }
    kv_pool_take(&r->tiers.pool[KV_CACHE], pages, want);
}

/* Brings the matched pages that are not in the cache back to it, a few at a time: up from where they lie, then room in
   the cache, then into it. */
static void fetch_pages(replay *r, active *run, const size_t in_tier[KV_RADIX_TIERS])
{
    kv_tiers *const t = &r->tiers;
    int32_t host[KV_CHUNK_PAGES], *pages = run->pages + in_tier[KV_CACHE], *const first = pages;
    for (uint32_t tier = KV_HOST; tier < KV_RADIX_TIERS; tier++) {
        for (size_t left = in_tier[tier], count; left > 0; left -= count, pages += count) {
            count = left < t->chunk ? left : t->chunk;
            kv_tiers_lift(t, tier, pages, count, host);
            take_pages(r, pages, count);
            kv_tiers_land(t, host, pages, count);
        }
    }
    kv_radix_promote(&r->tree, run->node, first, (size_t)(pages - first), NULL);
}

/* Finds the pages again, by keys. They must be those of the tree, and take their place. */
static void match_by_keys(replay *r, active *run, size_t most)
{
    int32_t *const tree = (int32_t *)kv_allocate(run->matched_pages + 1, sizeof *tree);
    memcpy(tree, run->pages, run->matched_pages * sizeof *tree);
    const size_t known =
        kv_keys_match(&r->keys, run->tokens, run->prompt->tokens, most, run->keys, run->values, run->pages);
    if (known != run->matched_pages || memcmp(tree, run->pages, known * sizeof *tree) != 0)
        kv_die("--keys %s finds %zu pages, the tree %zu, or others", r->o.keys, known, run->matched_pages);
    free(tree);
}

/* Starts a request: gives the tokens that are not cached slots, and stores their rows. */
static void admit(replay *r, const prompt *p)
{
    if (r->running_count == r->o.running)
        finish_oldest(r);
    active *const run = &r->running[(r->oldest + r->running_count) % (size_t)r->o.running];
    reserve_run(run, p->tokens, r->page, (size_t)r->keys.bytes);
    run->prompt = p;
    make_tokens(p, r->o.seed, run->tokens);
    make_chain(run->tokens, p->tokens, r->o.seed, run->chain);

    size_t in_tier[KV_RADIX_TIERS];
    const double start = kv_seconds();
    const size_t most = p->tokens - (size_t)r->o.recompute_last;
    run->node = kv_radix_match(&r->tree, run->tokens, most, run->pages, in_tier);
    r->t.prefix += kv_seconds() - start;
    kv_radix_lock(run->node);
    r->t.requests++;
    r->t.tokens += p->tokens;
    run->matched_pages = 0;
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++) {
        run->matched_pages += in_tier[tier];
        r->t.matched_in[tier] += in_tier[tier] * r->page;
    }
    r->t.matched += run->matched_pages * r->page;

    if (r->o.keys)
        match_by_keys(r, run, most);
    fetch_pages(r, run, in_tier);
    take_pages(r, run->pages + run->matched_pages, pages_of(r, p) - run->matched_pages);
    move_prompt(r, run, run->matched_pages * r->page, true);
    r->running_count++;
}

static void replay_all(replay *r)
{
    const double start = kv_seconds();
    for (size_t i = 0; i < r->replayed; i++)
        admit(r, &r->prompts[i]);
    while (r->running_count)
        finish_oldest(r);
    r->t.rejected = kv_device_rejected(&r->device);
    r->t.all = kv_seconds() - start;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* Prints a line of the table: a count with commas, and after it what the format says. */
static void print_count(const char *label, uint64_t count, const char *format, ...)
{
    char digits[32];
    const int size = snprintf(digits, sizeof digits, "%" PRIu64, count);
    va_list arguments;
    printf("%-18s %*s", label, 18 - size - (size - 1) / 3, "");
    for (int i = 0; i < size; i++)
        printf(i && (size - i) % 3 == 0 ? ",%c" : "%c", digits[i]);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

static double percent(uint64_t part, uint64_t all)
{
    return 100.0 * (double)part / (double)all;
}

static double gbs(uint64_t bytes, double seconds)
{
    return seconds > 0 ? 1e-9 * (double)bytes / seconds : 0;
}

static void print_traffic(const char *label, kv_traffic traffic)
{
    print_count(label, traffic.bytes, "   %.2f GB/s in %.3f s", gbs(traffic.bytes, traffic.seconds), traffic.seconds);
}

static void print_time(const char *label, double time, const char *what)
{
    printf("%-18s %18.3f s%s\n", label, time, what);
}

/* What the tiers hold, what of the prompts was in each, and what went down and came up. */
static void print_tiers(const replay *r)
{
    static const char *const hits[KV_RADIX_TIERS] = {"hits in the cache", "hits in host", "hits on disk"};
    const kv_tiers *const t = &r->tiers;
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++)
        print_count(hits[tier], r->t.matched_in[tier], "   %.2f %% hit rate, room for %zu tokens",
                    percent(r->t.matched_in[tier], r->t.tokens), t->capacity[tier] * r->page);
    print_traffic("bytes to host", t->to_host);
    print_traffic("bytes from host", t->from_host);
    print_traffic("bytes to disk", t->to_disk);
    print_traffic("bytes from disk", t->from_disk);
    print_count("pages dropped", t->dropped, "   %s", t->disk.path[0] ? "from disk" : "from host");
    if (t->disk.path[0])
        printf("%-18s %18s   %s, pages of %zu bytes take %zu\n", "disk file",
               t->disk.direct ? "O_DIRECT" : "page cache", t->disk.path, t->tables * t->piece_bytes, t->page_stride);
}

/* On a GPU the times of store, gather and copies are those between its events. They are no part of the total, because
   the host works meanwhile. */
static void print_times(const replay *r)
{
    const totals *const t = &r->t;
    const kv_device *const d = &r->device;
    const kv_tiers *const s = &r->tiers;
    const bool gpu = d->gpu;
    const double tree = t->tree + s->tree_seconds, disk = s->to_disk.seconds + s->from_disk.seconds;
    const double tiers = s->to_host.seconds + s->from_host.seconds + disk;
    print_time("time in prefix", t->prefix, "");
    if (r->o.keys) {
        print_time("time in keys", r->keys.seconds, "   what time in prefix takes, by keys");
        print_time("time in key table", r->keys.other_seconds, "   put, erase");
    }
    print_time("time in store", d->store, gpu ? "   on the GPU, launches included" : "");
    print_time("time in gather", d->gather, gpu ? "   on the GPU, launches included" : "");
    if (gpu) {
        print_time("time in copies", d->copies, "   on the GPU: slots and rows in, rows out");
        print_time("time in waiting", d->waiting, "   of the host for the GPU");
    }
    print_time("time in tree", tree, "   insert, evict");
    if (kv_tiers_lower(s))
        print_time("time in tiers", tiers,
                   gpu ? "   to and from the GPU and the disk" : "   to and from host and disk");
    print_time("time in the rest",
               t->all - t->prefix - r->keys.seconds - r->keys.other_seconds - tree -
                   (gpu ? d->waiting + disk : d->store + d->gather + tiers),
               gpu ? "   making tokens and rows, launches, comparing" : "   making tokens and rows, comparing");
}

static void print_table(const replay *r)
{
    const totals *const t = &r->t;
    const kv_device *const d = &r->device;
    printf("%-18s %18s%s%s\n", "device", d->kind->name, *d->name ? "   " : "", d->name);
    print_count("requests", t->requests, "   in %.3f s", t->all);
    print_count("tokens", t->tokens, "   %.1f M/s", t->all > 0 ? 1e-6 * (double)t->tokens / t->all : 0);
    print_count("tokens matched", t->matched, "   %.2f %% hit rate", percent(t->matched, t->tokens));
    print_count("cache slots", r->slots, "   %s", r->o.slots ? "" : "room for all");
    print_count("cache bytes", r->cache_bytes, "   first touched in %.3f s", d->touch_seconds);
    print_count("pages evicted", t->evicted_pages, "   in %" PRIu64 " evictions", t->evictions);
    if (kv_tiers_lower(&r->tiers))
        print_tiers(r);
    print_count("bytes stored", t->stored_bytes, "   %.2f GB/s", gbs(t->stored_bytes, d->store));
    print_count("bytes gathered", t->gathered_bytes, "   %.2f GB/s", gbs(t->gathered_bytes, d->gather));
    print_times(r);
    print_count("rows verified", t->verified_rows, "   %s", r->o.verify ? "" : "--verify 0");
    print_count("rows rejected", t->rejected, "");
    print_count("mismatches", t->mismatched_rows, "");
    printf("%-18s %18s\n", "prefix compare", kvprim_isa());
}

int main(int argc, char **argv)
{
    static replay r; /* what it holds is not freed: it is needed to the end */
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return 0;
        }
    }
    parse_options(&r.o, argc, argv);
    make_replay(&r);
    replay_all(&r);
    print_table(&r);
    if (fflush(stdout) != 0 || ferror(stdout))
        kv_die("the table could not be written");
    return r.t.mismatched_rows || r.t.rejected ? EXIT_MISMATCH : 0;
}

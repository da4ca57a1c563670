/* SPDX-License-Identifier: MIT */
/* A tiny engine that vendors kvprim. It runs decode steps of a batch of sequences on 1 to 4 GPUs, with a thread for
   each, and includes no CUDA header. A step

       gathers the tokens' rows from this rank's shard of the vocabulary: zeros for ids of other shards
       sums them over the ranks, so that each rank has all rows of the batch, as packed Q, K and V
       stores K and V of this rank's heads into the slots of a paged cache
       gathers K and V of every token of every sequence so far, as attention would

   The last rows of the batch are padding, and so are positions that a sequence has not reached yet: -1, as in an engine
   that replays a graph of one size. The host functions do the same with the same descriptors, and every byte is
   compared. The Makefile or CMakeLists.txt builds it.

   To start an engine of your own from this, keep the sections "descriptors" and "a step", and what they use. The rest
   makes up tokens and checks the results. */
#include "engine_device.h"
#include "kvprim.h"
#include "kvprim_cuda.cuh"
#include "kvprim_nccl.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    max_gpus = 4,
    vocabulary = 4099, /* a prime, so that shards differ in size */
    sequences = 13,    /* the rest of the batch is padding */
    batch = 16,
    heads = 12,                  /* divided among 1, 2, 3 or 4 ranks */
    part_bytes = heads * 32 * 2, /* Q, K or V of a token: bf16, 32 elements per head */
    row_bytes = 3 * part_bytes,  /* an embedding row, used as packed Q, K and V */
    page_rows = 16,              /* tokens */
    context = 4 * page_rows,     /* tokens of a sequence; then it starts over */
    pages = batch * (context / page_rows),
    slots = pages * page_rows,
    history = batch * context /* rows that a step reads back */
};

/* What a rank has on the GPU, and again on the host to check it: one block of memory each. With several ranks, each
   uses a part of cache and shard. */
typedef struct input {
    int32_t id[batch], slot[batch], past[history]; /* past: slots of sequence s from s * context on */
} input;

typedef struct output {
    uint16_t x[batch * row_bytes / 2];
    char k[history * part_bytes], v[history * part_bytes];
    uint32_t rejected;
} output;

typedef struct memory {
    char cache[2 * slots * part_bytes]; /* [page][K or V][row], of this rank's heads */
    char shard[vocabulary * row_bytes];
    output out;
    input in;
} memory;

typedef struct rank {
    pthread_t thread;
    int number;
    kvprim_comm comm; /* unused with one rank */
    struct CUstream_st *stream;
    memory *gpu, *host, *got; /* got: what was copied back from the GPU */
    long wrong;
} rank;

static int world;
static long gpus_wanted, steps = 200; /* gpus_wanted 0: all there are */
static kvprim_comm_id id;
static uint16_t embedding[vocabulary][row_bytes / 2]; /* a real engine would not keep all of it in one place */

/* Does not call exit(), because other threads are inside CUDA, waiting for this one. */
static void check(const char *error, int line)
{
    if (!error)
        return;
    fprintf(stderr, "engine.c:%d: %s\n", line, error);
    _Exit(1);
}

#define DEVICE(call) check(call, __LINE__)
#define KVPRIM(call) check((call) == KVPRIM_OK ? NULL : kvprim_last_error(), __LINE__)

/* A single rank has nothing to sum, calls none of these and needs no NCCL. */
#ifdef ENGINE_NCCL
enum { with_nccl = 1 };
#else
enum { with_nccl = 0 };
#define kvprim_comm_new_id(id) ((void)(id), KVPRIM_ERROR_UNSUPPORTED)
#define kvprim_comm_init(comm, desc) ((void)(desc), KVPRIM_ERROR_UNSUPPORTED)
#define kvprim_comm_describe(comm) ""
#define kvprim_comm_check(comm) KVPRIM_ERROR_UNSUPPORTED
#define kvprim_comm_destroy(comm) KVPRIM_ERROR_UNSUPPORTED
#define kvprim_all_reduce(comm, to, from, count, dtype, op, stream) KVPRIM_ERROR_UNSUPPORTED
#endif

/* ---- descriptors: the same for the GPU and for the host, except the memory --------------------------------------- */

static int32_t first_id(int number)
{
    return number * vocabulary / world;
}

static kvprim_gather_desc embed(memory *m, void *shard, int number, void *x)
{
    return (kvprim_gather_desc){.dst = {.data = x, .rows = batch},
                                .src = {.data = shard, .rows = first_id(number + 1) - first_id(number)},
                                .row_bytes = row_bytes,
                                .index = m->in.id,
                                .index_type = KVPRIM_I32,
                                .index_base = first_id(number),
                                .count = batch};
}

static kvprim_table cache_of(memory *m, bool v)
{
    const int64_t share = part_bytes / world, half = page_rows * share;
    return (kvprim_table){
        .data = m->cache + (v ? half : 0), .rows = slots, .page_rows = page_rows, .page_stride = 2 * half};
}

/* K and V of this rank's heads lie inside each row of x. */
static kvprim_store_desc append(memory *m, int number)
{
    const int64_t share = part_bytes / world;
    char *const k = (char *)m->out.x + part_bytes + number * share;
    return (kvprim_store_desc){.k_cache = cache_of(m, false),
                               .v_cache = cache_of(m, true),
                               .k = {.data = k, .rows = batch, .stride = row_bytes},
                               .v = {.data = k + part_bytes, .rows = batch, .stride = row_bytes},
                               .k_bytes = share,
                               .v_bytes = share,
                               .slot = m->in.slot,
                               .slot_type = KVPRIM_I32,
                               .count = batch,
                               .rejected = &m->out.rejected};
}

static kvprim_gather_desc recall(memory *m, bool v)
{
    return (kvprim_gather_desc){.dst = {.data = v ? m->out.v : m->out.k, .rows = history},
                                .src = cache_of(m, v),
                                .row_bytes = part_bytes / world,
                                .index = m->in.past,
                                .index_type = KVPRIM_I32,
                                .count = history,
                                .rejected = &m->out.rejected};
}

/* ---- input of a step --------------------------------------------------------------------------------------------- */

/* Stands in for the sampler. */
static int32_t token(long step, int sequence)
{
    return (int32_t)(((uint32_t)step * 2654435761u ^ (uint32_t)sequence * 40503u) % vocabulary);
}

/* Stands in for the block table. 5 is prime to the number of pages, so no two sequences share one. */
static int32_t slot_of(int sequence, int position)
{
    const int page = 5 * (sequence * (context / page_rows) + position / page_rows) % pages;
    return page * page_rows + position % page_rows;
}

static void prepare(input *in, long step)
{
    const int position = (int)(step % context);
    for (int s = 0; s < batch; s++) {
        in->id[s] = s < sequences ? token(step, s) : -1;
        in->slot[s] = s < sequences ? slot_of(s, position) : -1;
        for (int p = 0; p < context; p++)
            in->past[s * context + p] = s < sequences && p <= position ? slot_of(s, p) : -1;
    }
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static void enqueue_step(rank *r, bool with_sum)
{
    memory *const m = r->gpu;
    const kvprim_cuda_launch launch = {.stream = r->stream};
    const kvprim_gather_desc rows = embed(m, m->shard, r->number, m->out.x);
    const kvprim_store_desc new_kv = append(m, r->number);
    const kvprim_gather_desc k = recall(m, false), v = recall(m, true);
    DEVICE(device_copy(&m->in, &r->host->in, sizeof(input), r->stream));
    KVPRIM(kvprim_cuda_gather(&rows, &launch));
    if (with_sum)
        KVPRIM(
            kvprim_all_reduce(&r->comm, m->out.x, m->out.x, batch * row_bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r->stream));
    KVPRIM(kvprim_cuda_store(&new_kv, &launch));
    KVPRIM(kvprim_cuda_gather(&k, &launch));
    KVPRIM(kvprim_cuda_gather(&v, &launch));
    DEVICE(device_copy(&r->got->out, &m->out, sizeof(output), r->stream));
}

/* Polls instead of waiting in CUDA, which would not notice that another rank is gone. */
static void wait_for(rank *r)
{
    int done = 0;
    while (!done) {
        DEVICE(device_poll(r->stream, &done));
        if (r->comm.self) /* from init to destroy */
            KVPRIM(kvprim_comm_check(&r->comm));
    }
}

/* ---- the same on the host, and the comparison -------------------------------------------------------------------- */

static void host_step(rank *r)
{
    static _Thread_local uint16_t part[batch * row_bytes / 2];
    memory *const m = r->host;
    const kvprim_store_desc new_kv = append(m, r->number);
    const kvprim_gather_desc k = recall(m, false), v = recall(m, true);
    memset(m->out.x, 0, sizeof m->out.x);
    for (int n = 0; n < world; n++) {
        const kvprim_gather_desc rows = embed(m, embedding[first_id(n)], n, part);
        KVPRIM(kvprim_gather(&rows));
        for (int i = 0; i < batch * row_bytes / 2; i++)
            m->out.x[i] |= part[i]; /* the sum: all ranks except one have zeros here */
    }
    KVPRIM(kvprim_store(&new_kv));
    KVPRIM(kvprim_gather(&k));
    KVPRIM(kvprim_gather(&v));
}

static void check_equal(rank *r, long step, const char *what, const void *got, const void *expected, size_t bytes)
{
    const unsigned char *const a = (const unsigned char *)got, *const b = (const unsigned char *)expected;
    size_t i = 0;
    while (i < bytes && a[i] == b[i])
        i++;
    if (i < bytes && r->wrong++ < 3)
        fprintf(stderr, "FAIL rank %d, step %ld, %s: byte %zu is 0x%02x, expected 0x%02x\n", r->number, step, what, i,
                a[i], b[i]);
}

/* Compares the GPU with the host's functions, and both with the rows of the tokens that the cache must hold. The latter
   finds a descriptor that is wrong for both. */
static void compare(rank *r, long step)
{
    const output *const got = &r->got->out, *const expected = &r->host->out;
    const size_t share = (size_t)(part_bytes / world);
    const long start = step - step % context;
    check_equal(r, step, "embedding rows", got->x, expected->x, sizeof got->x);
    check_equal(r, step, "K rows", got->k, expected->k, sizeof got->k);
    check_equal(r, step, "V rows", got->v, expected->v, sizeof got->v);
    check_equal(r, step, "rejected", &got->rejected, &(const uint32_t){0}, sizeof got->rejected);
    for (int s = 0; s < sequences; s++)
        for (long p = 0; start + p <= step; p++) {
            const size_t row = (size_t)(s * context + p) * share;
            const char *const k = (const char *)embedding[token(start + p, s)] + part_bytes + (size_t)r->number * share;
            check_equal(r, step, "a token's K", got->k + row, k, share);
            check_equal(r, step, "a token's V", got->v + row, k + part_bytes, share);
        }
}

/* ---- a rank's life ----------------------------------------------------------------------------------------------- */

static void open_rank(rank *r)
{
    const int first = first_id(r->number), ids = first_id(r->number + 1) - first;
    const kvprim_comm_desc desc = {.rank = r->number, .world = world, .id = id};
    void *gpu, *host, *got;
    DEVICE(device_use(r->number));
    DEVICE(device_open_stream(&r->stream));
    DEVICE(device_alloc(&gpu, sizeof(memory)));
    DEVICE(device_alloc_pinned(&host, sizeof(memory)));
    DEVICE(device_alloc_pinned(&got, sizeof(memory)));
    r->gpu = (memory *)gpu, r->host = (memory *)host, r->got = (memory *)got;
    memset(r->host, 0, sizeof(memory));
    memset(r->host->cache, 0xEE, sizeof r->host->cache);
    memset(&r->host->in, 0xFF, sizeof(input));
    memcpy(r->host->shard, embedding[first], (size_t)ids * row_bytes);
    DEVICE(device_copy(r->gpu, r->host, sizeof(memory), r->stream));

    /* A step of padding. CUDA loads a kernel's code at its first launch, and may wait for running kernels then. So each
       kernel is launched once before any of them can wait for another rank. */
    enqueue_step(r, false);
    wait_for(r);
    if (world == 1)
        return;
    KVPRIM(kvprim_comm_init(&r->comm, &desc));
    if (r->number == 0)
        printf("%s\n", kvprim_comm_describe(&r->comm));
}

/* Destroys the communicator first: that waits until no rank needs this one's memory any more. */
static void close_rank(rank *r)
{
    if (world > 1)
        KVPRIM(kvprim_comm_destroy(&r->comm));
    DEVICE(device_free_pinned(r->got));
    DEVICE(device_free_pinned(r->host));
    DEVICE(device_free(r->gpu));
    DEVICE(device_close_stream(r->stream));
}

static void *run_rank(void *argument)
{
    rank *const r = (rank *)argument;
    open_rank(r);
    for (long step = 0; step < steps; step++) {
        prepare(&r->host->in, step);
        enqueue_step(r, world > 1);
        host_step(r);
        wait_for(r);
        compare(r, step);
    }
    DEVICE(device_copy(r->got->cache, r->gpu->cache, sizeof r->got->cache, r->stream));
    wait_for(r);
    check_equal(r, steps, "the whole cache", r->got->cache, r->host->cache, sizeof r->got->cache);
    close_rank(r);
    return NULL;
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

/* bf16 of 1 to 2, of either sign. The sum with the zeros of other ranks is exact, and no row has zeros of its own. */
static void make_embedding(void)
{
    uint32_t state = 1;
    for (int t = 0; t < vocabulary; t++)
        for (int i = 0; i < row_bytes / 2; i++) {
            state = state * 1664525u + 1013904223u;
            embedding[t][i] = (uint16_t)(0x3F80u | (state >> 16 & 0x807Fu));
        }
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const bool gpus = strcmp(argv[i], "--gpus") == 0;
        const long most = gpus ? max_gpus : 1000000;
        char *end = NULL;
        const long number = argv[i + 1] ? strtol(argv[i + 1], &end, 10) : 0;
        if ((!gpus && strcmp(argv[i], "--steps") != 0) || number < 1 || number > most || *end) {
            fprintf(stderr,
                    "usage: engine [--gpus N] [--steps N]\n\n"
                    "    --gpus N    1 to %d; default: all there are, up to %d\n"
                    "    --steps N   tokens that each sequence gets, up to 1000000 (%ld)\n",
                    max_gpus, max_gpus, steps);
            exit(2);
        }
        *(gpus ? &gpus_wanted : &steps) = number;
    }
}

/* Sets world, and says so if it is 1. */
static void choose_gpus(void)
{
    int found = 0;
    const char *const error = device_count(&found);
    const int most = !with_nccl && found ? 1 : found < max_gpus ? found : max_gpus;
    if (error || found == 0) {
        fprintf(stderr, "engine: needs a CUDA device: %s\n", error ? error : "none found");
        exit(1);
    }
    if (gpus_wanted > most) {
        fprintf(stderr, "engine: --gpus %ld, but %s %d\n", gpus_wanted,
                with_nccl ? "this machine has" : "this was built without NCCL: at most", most);
        exit(2);
    }
    world = gpus_wanted ? (int)gpus_wanted : most;
    if (world == 1)
        printf("one GPU: nothing to sum%s\n", with_nccl ? "" : "; built without NCCL");
}

int main(int argc, char **argv)
{
    static rank ranks[max_gpus];
    long wrong = 0;
    parse(argc, argv);
    choose_gpus();
    make_embedding();
    if (world > 1)
        KVPRIM(kvprim_comm_new_id(&id));
    for (int n = 0; n < world; n++) {
        ranks[n].number = n;
        check(pthread_create(&ranks[n].thread, NULL, run_rank, &ranks[n]) ? "cannot start or join a thread" : NULL,
              __LINE__);
    }
    for (int n = 0; n < world; n++) {
        check(pthread_join(ranks[n].thread, NULL) ? "cannot start or join a thread" : NULL, __LINE__);
        wrong += ranks[n].wrong;
    }
    printf("%d ranks, %ld steps of %d sequences, %d of K and V rows read back in each: %ld differences\n", world, steps,
           sequences, history, wrong);
    return wrong != 0;
}

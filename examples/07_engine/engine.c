/* A tiny engine that vendors kvprim: decode steps of a batch of sequences on 1 to 4 GPUs, a thread for each, and no
   CUDA header in sight. A step

       gathers the rows of the tokens from this rank's shard of the vocabulary: zeros for ids of other shards
       sums them over the ranks, so that each has all rows of the batch, as packed Q, K and V
       stores K and V of this rank's heads into the slots of a paged cache
       gathers K and V of every token of every sequence so far, as attention would

   The last rows of the batch are padding, and so is what a sequence has not reached yet: -1, as in an engine that
   replays a graph of one size. The host functions make the same of the same descriptors and a plain loop sums; every
   byte is compared. To build it: Makefile or CMakeLists.txt. */
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
    most_gpus = 4,
    vocabulary = 4099,           /* a prime: shards differ in size */
    sequences = 13,              /* and padding ... */
    batch = 16,                  /* ... up to this */
    heads = 12,                  /* divided among 1, 2, 3 or 4 ranks */
    part_bytes = heads * 32 * 2, /* Q, K or V of a token: bf16, 32 to a head */
    row_bytes = 3 * part_bytes,  /* an embedding row, taken as packed Q, K and V */
    page_rows = 16,              /* tokens */
    context = 4 * page_rows,     /* tokens of a sequence; then it starts over */
    pages = batch * (context / page_rows),
    slots = pages * page_rows,
    history = batch * context /* rows that a step reads back */
};

/* What a step is told, and what it makes: each one copy. */
typedef struct input {
    int32_t id[batch], slot[batch], past[history]; /* past: slots of sequence s from s * context on */
} input;

typedef struct output {
    char x[batch * row_bytes], k[history * part_bytes], v[history * part_bytes];
    uint32_t rejected;
} output;

/* Where a step happens: the GPU, or the host, which checks it. */
typedef struct place {
    char *cache; /* [page][K or V][row] */
    input *in;
    output *out;
} place;

typedef struct rank {
    pthread_t thread;
    int number;
    kvprim_comm comm; /* not used by one rank alone */
    struct CUstream_st *stream;
    char *shard; /* on the GPU */
    place gpu, host;
    output *got; /* pinned: the GPU's output */
    long wrong;
} rank;

static int world;
static long steps = 200;
static char *embedding; /* the whole vocabulary's, which a real engine would not have in one place */

/* Not exit(): other threads are inside CUDA, waiting for this one. */
static void check_device(const char *error, int line)
{
    if (!error)
        return;
    fprintf(stderr, "engine.c:%d: %s\n", line, error);
    _Exit(1);
}

static void check_kvprim(kvprim_status status, int line)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "engine.c:%d: %s: %s\n", line, kvprim_status_name(status), kvprim_last_error());
    _Exit(1);
}

static void *memory_of(size_t bytes, const char *(*alloc)(void **, size_t), int line)
{
    void *memory = NULL;
    check_device(alloc(&memory, bytes), line);
    return memory;
}

static const char *alloc_host(void **memory, size_t bytes)
{
    *memory = calloc(1, bytes);
    return *memory ? NULL : "out of memory";
}

/* ---- the sum over the ranks; one rank has nothing to sum, and needs no NCCL -------------------------------------- */

#ifdef ENGINE_NCCL
static const bool with_nccl = true;
static kvprim_comm_id id;

static void comm_prepare(void)
{
    if (world > 1)
        check_kvprim(kvprim_comm_new_id(&id), __LINE__);
}

static void comm_open(rank *r)
{
    const kvprim_comm_desc desc = {.rank = r->number, .world = world, .id = id};
    if (world == 1)
        return;
    check_kvprim(kvprim_comm_init(&r->comm, &desc), __LINE__);
    if (r->number == 0)
        printf("%s\n", kvprim_comm_describe(&r->comm));
}

static void comm_sum(rank *r)
{
    char *const x = r->gpu.out->x;
    if (world > 1)
        check_kvprim(kvprim_all_reduce(&r->comm, x, x, batch * row_bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r->stream),
                     __LINE__);
}

static void comm_check(rank *r)
{
    if (r->comm.self) /* from init to destroy */
        check_kvprim(kvprim_comm_check(&r->comm), __LINE__);
}

static void comm_close(rank *r)
{
    if (world > 1)
        check_kvprim(kvprim_comm_destroy(&r->comm), __LINE__);
}
#else
static const bool with_nccl = false;

static void comm_prepare(void)
{
}

static void comm_nothing(rank *r)
{
    (void)r;
}
#define comm_open comm_nothing
#define comm_sum comm_nothing
#define comm_check comm_nothing
#define comm_close comm_nothing
#endif

/* ---- what is moved: the same descriptors for the GPU and for the host -------------------------------------------- */

static int32_t first_id(int number)
{
    return number * vocabulary / world;
}

static kvprim_gather_desc embed(const place *p, char *shard, int number, char *x)
{
    return (kvprim_gather_desc){.dst = {.data = x, .rows = batch},
                                .src = {.data = shard, .rows = first_id(number + 1) - first_id(number)},
                                .row_bytes = row_bytes,
                                .index = p->in->id,
                                .index_base = first_id(number),
                                .count = batch};
}

static kvprim_table cache_of(const place *p, bool v)
{
    const int64_t share = part_bytes / world, half = page_rows * share;
    return (kvprim_table){
        .data = p->cache + (v ? half : 0), .rows = slots, .page_rows = page_rows, .page_stride = 2 * half};
}

/* K and V of this rank's heads lie inside each row of x. */
static kvprim_store_desc append(const place *p, int number)
{
    const int64_t share = part_bytes / world;
    char *const k = p->out->x + part_bytes + number * share;
    return (kvprim_store_desc){.k_cache = cache_of(p, false),
                               .v_cache = cache_of(p, true),
                               .k = {.data = k, .rows = batch, .stride = row_bytes},
                               .v = {.data = k + part_bytes, .rows = batch, .stride = row_bytes},
                               .k_bytes = share,
                               .v_bytes = share,
                               .slot = p->in->slot,
                               .count = batch,
                               .rejected = &p->out->rejected};
}

static kvprim_gather_desc recall(const place *p, bool v)
{
    return (kvprim_gather_desc){.dst = {.data = v ? p->out->v : p->out->k, .rows = history},
                                .src = cache_of(p, v),
                                .row_bytes = part_bytes / world,
                                .index = p->in->past,
                                .count = history,
                                .rejected = &p->out->rejected};
}

/* ---- the engine -------------------------------------------------------------------------------------------------- */

/* Stands for the sampler. */
static int32_t token(long step, int sequence)
{
    return (int32_t)(((uint32_t)step * 2654435761u ^ (uint32_t)sequence * 40503u) % vocabulary);
}

/* Stands for the block table: 5 is prime to the number of pages, so that no two sequences share one. */
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

static void enqueue_step(rank *r, bool with_sum)
{
    const kvprim_cuda_launch launch = {.stream = r->stream};
    const kvprim_gather_desc rows = embed(&r->gpu, r->shard, r->number, r->gpu.out->x);
    const kvprim_store_desc new_kv = append(&r->gpu, r->number);
    const kvprim_gather_desc k = recall(&r->gpu, false), v = recall(&r->gpu, true);
    check_device(device_copy(r->gpu.in, r->host.in, sizeof(input), r->stream), __LINE__);
    check_kvprim(kvprim_cuda_gather(&rows, &launch), __LINE__);
    if (with_sum)
        comm_sum(r);
    check_kvprim(kvprim_cuda_store(&new_kv, &launch), __LINE__);
    check_kvprim(kvprim_cuda_gather(&k, &launch), __LINE__);
    check_kvprim(kvprim_cuda_gather(&v, &launch), __LINE__);
    check_device(device_copy(r->got, r->gpu.out, sizeof(output), r->stream), __LINE__);
}

/* Asks again and again, rather than to wait in CUDA, which would not notice that another rank is gone. */
static void wait_for(rank *r)
{
    int done = 0;
    while (!done) {
        check_device(device_poll(r->stream, &done), __LINE__);
        comm_check(r);
    }
}

/* ---- the same on the host, and the comparison -------------------------------------------------------------------- */

static float from_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) /* that is one: nothing to round */
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    return (uint16_t)(wide >> 16);
}

static void host_embedding(rank *r, char *x)
{
    static _Thread_local uint16_t part[batch * row_bytes / 2], sum[batch * row_bytes / 2];
    memset(sum, 0, sizeof sum);
    for (int n = 0; n < world; n++) {
        const kvprim_gather_desc rows = embed(&r->host, embedding + (size_t)first_id(n) * row_bytes, n, (char *)part);
        check_kvprim(kvprim_gather(&rows), __LINE__);
        for (size_t i = 0; i < batch * row_bytes / 2; i++)
            sum[i] = to_bf16(from_bf16(sum[i]) + from_bf16(part[i]));
    }
    memcpy(x, sum, sizeof sum);
}

static void host_step(rank *r)
{
    const kvprim_store_desc new_kv = append(&r->host, r->number);
    const kvprim_gather_desc k = recall(&r->host, false), v = recall(&r->host, true);
    host_embedding(r, r->host.out->x);
    check_kvprim(kvprim_store(&new_kv), __LINE__);
    check_kvprim(kvprim_gather(&k), __LINE__);
    check_kvprim(kvprim_gather(&v), __LINE__);
}

static void differ(rank *r, long step, const char *what, const void *got, const void *expected, size_t bytes)
{
    const unsigned char *const a = (const unsigned char *)got, *const b = (const unsigned char *)expected;
    size_t i = 0;
    while (i < bytes && a[i] == b[i])
        i++;
    if (i < bytes && r->wrong++ < 3)
        fprintf(stderr, "FAIL rank %d, step %ld, %s: byte %zu is 0x%02x, expected 0x%02x\n", r->number, step, what, i,
                a[i], b[i]);
}

/* The GPU against the host's functions, and both against what the cache is for: the rows of the tokens that were put
   there, which finds a descriptor that is wrong for both. */
static void compare(rank *r, long step)
{
    const output *const got = r->got, *const expected = r->host.out;
    const size_t share = (size_t)(part_bytes / world);
    const long start = step - step % context;
    differ(r, step, "embedding rows", got->x, expected->x, sizeof got->x);
    differ(r, step, "K rows", got->k, expected->k, sizeof got->k);
    differ(r, step, "V rows", got->v, expected->v, sizeof got->v);
    differ(r, step, "rejected", &got->rejected, &(const uint32_t){0}, sizeof got->rejected);
    for (int s = 0; s < sequences; s++)
        for (long p = 0; start + p <= step; p++) {
            const size_t row = (size_t)(s * context + p) * share;
            const char *const k =
                embedding + (size_t)token(start + p, s) * row_bytes + part_bytes + (size_t)r->number * share;
            differ(r, step, "a token's K", got->k + row, k, share);
            differ(r, step, "a token's V", got->v + row, k + part_bytes, share);
        }
}

/* ---- a rank's life ----------------------------------------------------------------------------------------------- */

static size_t cache_bytes(void)
{
    return 2 * (size_t)slots * (size_t)(part_bytes / world);
}

static void open_rank(rank *r)
{
    const size_t first = (size_t)first_id(r->number), ids = (size_t)first_id(r->number + 1) - first;
    check_device(device_use(r->number), __LINE__);
    check_device(device_open_stream(&r->stream), __LINE__);
    r->host.in = memory_of(sizeof(input), device_alloc_pinned, __LINE__);
    r->got = memory_of(sizeof(output), device_alloc_pinned, __LINE__);
    r->host.out = memory_of(sizeof(output), alloc_host, __LINE__);
    r->host.cache = memory_of(cache_bytes(), alloc_host, __LINE__);
    r->gpu.in = memory_of(sizeof(input), device_alloc, __LINE__);
    r->gpu.out = memory_of(sizeof(output), device_alloc, __LINE__);
    r->gpu.cache = memory_of(cache_bytes(), device_alloc, __LINE__);
    r->shard = memory_of(ids * row_bytes, device_alloc, __LINE__);
    memset(r->host.cache, 0xEE, cache_bytes());
    check_device(device_copy(r->shard, embedding + first * row_bytes, ids * row_bytes, r->stream), __LINE__);
    check_device(device_copy(r->gpu.cache, r->host.cache, cache_bytes(), r->stream), __LINE__);
    check_device(device_copy(r->gpu.out, r->host.out, sizeof(output), r->stream), __LINE__);

    /* A step of padding. CUDA loads a kernel's code when it is first launched, and may wait for running kernels then:
       so before any of them waits for another rank. */
    memset(r->host.in, 0xFF, sizeof(input));
    enqueue_step(r, false);
    wait_for(r);
    comm_open(r);
}

/* The communicator first: it waits until no rank needs this one's memory any more. */
static void close_rank(rank *r)
{
    comm_close(r);
    check_device(device_free(r->shard), __LINE__);
    check_device(device_free(r->gpu.cache), __LINE__);
    check_device(device_free(r->gpu.out), __LINE__);
    check_device(device_free(r->gpu.in), __LINE__);
    check_device(device_free_pinned(r->got), __LINE__);
    check_device(device_free_pinned(r->host.in), __LINE__);
    check_device(device_close_stream(r->stream), __LINE__);
    free(r->host.cache);
    free(r->host.out);
}

static void *run_rank(void *argument)
{
    rank *const r = (rank *)argument;
    char *cache;
    open_rank(r);
    for (long step = 0; step < steps; step++) {
        prepare(r->host.in, step);
        enqueue_step(r, true);
        host_step(r);
        wait_for(r);
        compare(r, step);
    }
    cache = memory_of(cache_bytes(), alloc_host, __LINE__);
    check_device(device_copy(cache, r->gpu.cache, cache_bytes(), r->stream), __LINE__);
    wait_for(r);
    differ(r, steps, "the whole cache", cache, r->host.cache, cache_bytes());
    free(cache);
    close_rank(r);
    return NULL;
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

/* bf16 of 1 to 2, of either sign: the sum with the zeros of other ranks is exact, and no row has zeros of its own. */
static void make_embedding(void)
{
    const size_t count = (size_t)vocabulary * row_bytes / 2;
    uint32_t state = 1;
    embedding = memory_of(count * 2, alloc_host, __LINE__);
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        const uint16_t bits = (uint16_t)(0x3F80u | (state >> 16 & 0x807Fu));
        memcpy(embedding + 2 * i, &bits, sizeof bits);
    }
}

static long number_after(const char *option, const char *text, long most)
{
    char *end = NULL;
    const long number = text ? strtol(text, &end, 10) : 0;
    if (number >= 1 && number <= most && *end == '\0')
        return number;
    fprintf(stderr, "engine: %s takes a number from 1 to %ld\n", option, most);
    exit(2);
}

static void usage(void)
{
    printf("usage: engine [--gpus N] [--steps N]\n\n"
           "    --gpus N    1 to %d; without it all there are, up to %d\n"
           "    --steps N   tokens that each sequence gets (%ld)\n"
           "    --help      this\n",
           most_gpus, most_gpus, steps);
    exit(0);
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0)
            usage();
        else if (strcmp(argv[i], "--gpus") == 0)
            world = (int)number_after("--gpus", argv[++i], most_gpus);
        else if (strcmp(argv[i], "--steps") == 0)
            steps = number_after("--steps", argv[++i], 1000000);
        else {
            fprintf(stderr, "engine: no option %s: see --help\n", argv[i]);
            exit(2);
        }
    }
}

/* Sets world, and says so where it is 1. */
static void choose_gpus(void)
{
    int found = 0;
    const char *const error = device_count(&found);
    if (error || found == 0) {
        fprintf(stderr, "engine: needs a CUDA device: %s\n", error ? error : "there is none");
        exit(1);
    }
    if (world > found) {
        fprintf(stderr, "engine: --gpus %d, but there are %d\n", world, found);
        exit(2);
    }
    if (world > 1 && !with_nccl) {
        fprintf(stderr, "engine: --gpus %d, but this was built without NCCL\n", world);
        exit(2);
    }
    if (world == 0)
        world = !with_nccl ? 1 : found < most_gpus ? found : most_gpus;
    if (world == 1)
        printf("one GPU: nothing to sum%s\n", with_nccl ? "" : ", and built without NCCL");
}

int main(int argc, char **argv)
{
    static rank ranks[most_gpus];
    long wrong = 0;
    parse(argc, argv);
    choose_gpus();
    make_embedding();
    comm_prepare();
    for (int n = 0; n < world; n++) {
        ranks[n].number = n;
        check_device(pthread_create(&ranks[n].thread, NULL, run_rank, &ranks[n]) ? "no thread" : NULL, __LINE__);
    }
    for (int n = 0; n < world; n++) {
        check_device(pthread_join(ranks[n].thread, NULL) ? "no thread" : NULL, __LINE__);
        wrong += ranks[n].wrong;
    }
    free(embedding);
    printf("%d ranks, %ld steps of %d sequences, %d of K and V rows read back in each: %ld differences\n", world, steps,
           sequences, history, wrong);
    return wrong != 0;
}

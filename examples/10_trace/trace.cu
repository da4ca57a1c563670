/* SPDX-License-Identifier: MIT */
/* Shows in a trace where the time goes, and why KV caches are preallocated. A decode loop runs twice: over a cache that
   concatenates (each token takes a new buffer and copies the old rows), and over a cache that stores rows into slots.
   The program records through CUPTI what the GPU does, and compares both; answers.py says what one looks for in such a
   trace.

       nvcc -arch=native -I. examples/10_trace/trace.cu -lcupti -o 10_trace && ./10_trace --out trace.json
       python3 examples/10_trace/answers.py trace.json --range 'storing cache' --out for_perfetto.json

   Without --out it writes no file. answers.py reads traces of torch and nsys, too, compares two, and takes thresholds
   and categories (--help). sql/ asks the same in SQL: `trace_processor_shell -q sql/6_gaps.sql for_perfetto.json`. If
   cupti.h is not found, add -I and -L for include and lib64 under $CUDA_HOME/extras/CUPTI, or call `make examples`. The
   program checks that both caches hold the same rows in the end, and that the trace has every launch and byte once. The
   two caches take half a GB of the GPU's memory. */
#define KVPRIM_NVTX
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "../gpu.cuh"
#include "cupti_trace.h"

/* Each layer has rows of 2 KB for K and V. A run has a prompt, a few tokens that load the kernels, and the tokens that
   are recorded. */
enum { layers = 24, batch = 4, row_bytes = 2048, row_words = row_bytes / 4, vocabulary = 1000 };
enum { prompt = 512, unrecorded = 2, steps = 64, most = prompt + unrecorded + steps, slots = most * batch };
enum { attention_words = 128, attention_splits = 16 };
static const char *const kvprim_kernels = "kvpc_"; /* begins the names of kernels of kvprim_cuda.cuh */

/* ---- the model ----

   Integers replace the network, so that results are exact. Each row depends on all rows before it. */

static __host__ __device__ uint32_t mixed(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    return (x ^ x >> 15) * 0x846ca68bu;
}

/* A word of V, from the word of K and the row's number, so that a row in the wrong slot is found. */
static __host__ __device__ uint32_t v_word(uint32_t k, int layer, int row, int word)
{
    return mixed(k ^ (uint32_t)((layer * slots + row) * row_words + word));
}

/* Makes `rows` rows of K and V, from row first_row on. Each thread makes one word of both. */
static __global__ void project(uint32_t *k, uint32_t *v, const uint32_t *hidden, int layer, int first_row, int rows)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), row = i / row_words, word = i % row_words;
    if (row >= rows)
        return;
    k[i] = mixed(hidden[row % batch * row_words + word] + (uint32_t)(layer * slots + first_row + row));
    v[i] = v_word(k[i], layer, first_row + row, word);
}

/* Reads all rows of the sequences.
   Each block reads a part of the row (blockIdx.x) of one sequence (blockIdx.y), for every gridDim.z-th token.
   Each thread adds one word of those rows; integer sums are the same in any order. */
static __global__ void attend(uint32_t *hidden, const uint32_t *k, const uint32_t *v, const int32_t *slot, int tokens)
{
    const int word = (int)(blockIdx.x * blockDim.x + threadIdx.x), sequence = (int)blockIdx.y;
    uint32_t sum = 0;
    for (int t = (int)blockIdx.z; t < tokens; t += (int)gridDim.z) {
        const int64_t at = (int64_t)slot[t * batch + sequence] * row_words + word;
        sum += mixed(k[at]) ^ v[at];
    }
    atomicAdd(hidden + sequence * row_words + word, sum);
}

static __global__ void sample(int32_t *token, const uint32_t *hidden)
{
    token[threadIdx.x] = (int32_t)(hidden[threadIdx.x * row_words] % vocabulary);
}

/* ---- the two caches ----

   Row t * batch + b is token t of sequence b; slot[] says where it lies. */

typedef struct kv_cache {
    const char *title;
    int stores;       /* 1: into slots; 0: concatenates */
    int tokens;       /* of each sequence */
    int32_t *planned; /* the slots of all rows, in pinned host memory */
    int32_t *slot;    /* the slots of the rows so far, on the device */
    uint32_t *k[layers], *v[layers], *history;
    int32_t *sampled; /* the tokens of every step, in pinned host memory */
} kv_cache;

static struct {
    uint32_t *embedding, *hidden, *k_new, *v_new;
    int32_t *token;
    cudaStream_t stream;
    trace recorded;
} s;

static void copy(void *to, const void *from, size_t bytes, cudaMemcpyKind direction)
{
    CU(cudaMemcpyAsync(to, from, bytes, direction, s.stream));
}

/* A dynamic cache allocates memory for more tokens, and copies the old rows and the new ones into it. */
static void concatenate(uint32_t **rows, int old_tokens, const uint32_t *new_rows, int new_tokens)
{
    const size_t old_bytes = (size_t)old_tokens * batch * row_bytes, new_bytes = (size_t)new_tokens * batch * row_bytes;
    void *bigger;
    CU(cudaMallocAsync(&bigger, old_bytes + new_bytes, s.stream));
    if (old_tokens) {
        copy(bigger, *rows, old_bytes, cudaMemcpyDeviceToDevice);
        CU(cudaFreeAsync(*rows, s.stream));
    }
    copy((char *)bigger + old_bytes, new_rows, new_bytes, cudaMemcpyDeviceToDevice);
    *rows = (uint32_t *)bigger;
}

static void store(const kv_cache *c, int layer, int new_tokens)
{
    kvprim_store_desc store = {};
    store.k_cache.data = c->k[layer];
    store.v_cache.data = c->v[layer];
    store.k_cache.rows = store.v_cache.rows = slots;
    store.k.data = s.k_new;
    store.v.data = s.v_new;
    store.k.rows = store.v.rows = store.count = new_tokens * batch;
    store.k_bytes = store.v_bytes = row_bytes;
    store.slot = c->slot + c->tokens * batch;
    store.slot_type = KVPRIM_I32;
    kvprim_cuda_launch launch = {};
    launch.stream = s.stream;
    kvprim(kvprim_cuda_store(&store, &launch));
}

static void embed(void)
{
    kvprim_gather_desc gather = {};
    gather.src.data = s.embedding;
    gather.src.rows = vocabulary;
    gather.dst.data = s.hidden;
    gather.dst.rows = gather.count = batch;
    gather.row_bytes = row_bytes;
    gather.index = s.token;
    gather.index_type = KVPRIM_I32;
    kvprim_cuda_launch launch = {};
    launch.stream = s.stream;
    kvprim(kvprim_cuda_gather(&gather, &launch));
}

/* Passes through the layers with `tokens` new tokens of each sequence: the prompt, or one. */
static void forward(kv_cache *c, int tokens)
{
    const int rows = tokens * batch, first = c->tokens * batch;
    copy(c->slot + first, c->planned + first, (size_t)rows * sizeof *c->slot, cudaMemcpyHostToDevice);
    embed();
    for (int l = 0; l < layers; l++) {
        project<<<rows * row_words / 256, 256, 0, s.stream>>>(s.k_new, s.v_new, s.hidden, l, first, rows);
        if (c->stores)
            store(c, l, tokens);
        else {
            concatenate(&c->k[l], c->tokens, s.k_new, tokens);
            concatenate(&c->v[l], c->tokens, s.v_new, tokens);
        }
        attend<<<dim3(row_words / attention_words, batch, attention_splits), attention_words, 0, s.stream>>>(
            s.hidden, c->k[l], c->v[l], c->slot, c->tokens + tokens);
    }
    sample<<<1, batch, 0, s.stream>>>(s.token, s.hidden);
    CU(cudaGetLastError());
    copy(c->history + first * row_words, s.hidden, batch * row_bytes, cudaMemcpyDeviceToDevice);
    copy(c->sampled + first, s.token, batch * sizeof *s.token, cudaMemcpyDeviceToHost);
    c->tokens += tokens;
}

/* Runs the prompt and the first steps, which load the kernels. */
static void begin(kv_cache *c)
{
    CU(cudaMemsetAsync(s.token, 0, batch * sizeof *s.token, s.stream));
    c->tokens = 0;
    forward(c, prompt);
    for (int i = 0; i < unrecorded; i++)
        forward(c, 1);
    CU(cudaDeviceSynchronize());
}

/* Runs prompt and steps, and records the last `steps` steps as the next phase of the trace. Returns the number of
   missing records. */
static size_t decode(kv_cache *c)
{
    begin(c);
    cupti_trace_start(&s.recorded);
    nvtxRangePushA(c->title);
    for (int i = 0; i < steps; i++) {
        nvtxRangePushA("step");
        forward(c, 1);
        nvtxRangePop();
    }
    CU(cudaDeviceSynchronize());
    nvtxRangePop();
    return cupti_trace_stop();
}

/* ---- the checks ---- */

/* Counts rows that differ between the caches or are not the row that belongs there, plus 1 each if the sampled tokens
   or the histories differ. */
static int wrong_rows(const kv_cache *concatenating, const kv_cache *storing)
{
    static uint32_t k[2][slots][row_words], v[2][slots][row_words];
    const kv_cache *const both[2] = {concatenating, storing};
    int wrong = memcmp(concatenating->sampled, storing->sampled, slots * sizeof *storing->sampled) != 0;
    for (int l = 0; l < layers; l++) {
        for (int c = 0; c < 2; c++) {
            CU(cudaMemcpy(k[c], both[c]->k[l], sizeof k[c], cudaMemcpyDeviceToHost));
            CU(cudaMemcpy(v[c], both[c]->v[l], sizeof v[c], cudaMemcpyDeviceToHost));
        }
        for (int row = 0; row < slots; row++) {
            const int at = storing->planned[row];
            int same = !memcmp(k[0][row], k[1][at], row_bytes) && !memcmp(v[0][row], v[1][at], row_bytes);
            for (int w = 0; w < row_words; w++)
                same &= v[1][at][w] == v_word(k[1][at][w], l, row, w);
            wrong += !same;
        }
    }
    for (int c = 0; c < 2; c++)
        CU(cudaMemcpy(k[c], both[c]->history, sizeof k[c], cudaMemcpyDeviceToHost));
    return wrong + (memcmp(k[0], k[1], sizeof k[0]) != 0);
}

/* Returns 1 unless the trace has exactly this many events of the family, with this many bytes in total. */
static int miscounted(int phase, trace_kind kind, const char *family, int64_t count, int64_t bytes)
{
    const trace_sum got = trace_family(&s.recorded, phase, kind, family);
    if ((int64_t)got.count == count && (int64_t)got.bytes == bytes)
        return 0;
    printf("phase %d, %s: %lld launched, %lld bytes; recorded: %llu, %llu bytes\n", phase, family, (long long)count,
           (long long)bytes, (unsigned long long)got.count, (unsigned long long)got.bytes);
    return 1;
}

static int miscounts(const kv_cache *c, int phase)
{
    const int64_t all = (int64_t)layers * steps, new_bytes = batch * row_bytes, index_bytes = batch * 4;
    int64_t copies = steps, bytes = steps * new_bytes; /* of the history */
    for (int t = most - steps; t < most && !c->stores; t++) {
        copies += 4 * layers;
        bytes += 2 * layers * (t + 1) * new_bytes;
    }
    int wrong = miscounted(phase, TRACE_KERNEL, kvprim_kernels, steps + (c->stores ? all : 0), 0); /* gathers, stores */
    wrong += miscounted(phase, TRACE_KERNEL, "project", all, 0);
    wrong += miscounted(phase, TRACE_KERNEL, "attend", all, 0);
    wrong += miscounted(phase, TRACE_KERNEL, "sample", steps, 0);
    wrong += miscounted(phase, TRACE_COPY, "Memcpy DtoD", copies, bytes);
    wrong += miscounted(phase, TRACE_COPY, "Memcpy HtoD", steps, steps * index_bytes);
    wrong += miscounted(phase, TRACE_COPY, "Memcpy DtoH", steps, steps * index_bytes);
    if (getenv("NVTX_INJECTION64_PATH"))
        printf("NVTX ranges went to another tool, because NVTX_INJECTION64_PATH is set\n");
    else
        wrong += miscounted(phase, TRACE_RANGE, "step", steps, 0);
    return wrong;
}

/* ---- main ---- */

static kv_cache new_cache(const char *title, int stores)
{
    kv_cache c = {title, stores, 0, NULL, NULL, {}, {}, NULL, NULL};
    CU(cudaMallocHost(&c.planned, slots * sizeof *c.planned));
    CU(cudaMallocHost(&c.sampled, slots * sizeof *c.sampled));
    CU(cudaMalloc(&c.slot, slots * sizeof *c.slot));
    CU(cudaMalloc(&c.history, slots * row_bytes));
    CU(cudaMemset(c.history, 0, slots * row_bytes));
    memset(c.sampled, 0, slots * sizeof *c.sampled);
    for (int row = 0; row < slots; row++) /* scattered slots, or consecutive ones */
        c.planned[row] = stores ? row * 1607 % slots : row;
    for (int l = 0; l < layers && stores; l++) {
        CU(cudaMalloc(&c.k[l], (size_t)slots * row_bytes));
        CU(cudaMalloc(&c.v[l], (size_t)slots * row_bytes));
    }
    return c;
}

/* Allocates device memory, and lets the pool keep freed memory, which is the best case for the concatenating cache. */
static void set_up(void)
{
    static uint32_t embedding[vocabulary * row_words];
    int device, pools;
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    CU(cudaGetDevice(&device));
    CU(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device));
    if (!pools) {
        printf("this program needs cudaMallocAsync, which this device or driver lacks\n");
        exit(1);
    }
    CU(cudaDeviceGetDefaultMemPool(&pool, device));
    CU(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    for (uint32_t i = 0; i < vocabulary * row_words; i++)
        embedding[i] = mixed(i);
    s.embedding = on_device(vocabulary * row_words, embedding);
    s.hidden = on_device<uint32_t>(batch * row_words), s.token = on_device<int32_t>(batch);
    s.k_new = on_device<uint32_t>(prompt * batch * row_words);
    s.v_new = on_device<uint32_t>(prompt * batch * row_words);
    CU(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
}

static void print_row(const char *what, int digits, double concatenating, double storing)
{
    printf("%-40s%20.*f  %12.*f  %6.1f\n", what, digits, concatenating, digits, storing, concatenating / storing);
}

/* Compares phase 1, which concatenated, with phase 2, which stored. Both copy the history and gather embeddings; the
   phase that does only that with copies, or with kvprim's kernels, is subtracted from the other. */
static void print_lesson(void)
{
    const trace_sum old_copies = trace_family(&s.recorded, 1, TRACE_COPY, "Memcpy DtoD");
    const trace_sum history = trace_family(&s.recorded, 2, TRACE_COPY, "Memcpy DtoD");
    const trace_sum gathers = trace_family(&s.recorded, 1, TRACE_KERNEL, kvprim_kernels);
    const trace_sum moves = trace_family(&s.recorded, 2, TRACE_KERNEL, kvprim_kernels);
    const double stores = (double)moves.count - (double)gathers.count;
    const double attended_ms[2] = {1e-6 * (double)trace_family(&s.recorded, 1, TRACE_KERNEL, "attend").ns,
                                   1e-6 * (double)trace_family(&s.recorded, 2, TRACE_KERNEL, "attend").ns};
    const double copied_ms = 1e-6 * ((double)old_copies.ns - (double)history.ns);
    const double stored_ms = 1e-6 * ((double)moves.ns - (double)gathers.ns);
    printf("\n%d tokens more in %d sequences and %d layers     concatenating       storing   times\n", steps, batch,
           layers);
    print_row("launches for the cache", 0, (double)(old_copies.count - history.count), stores);
    print_row("bytes written, MB", 1, 1e-6 * (double)(old_copies.bytes - history.bytes),
              1e-6 * stores * 2 * batch * row_bytes);
    print_row("time on the GPU, ms", 3, copied_ms, stored_ms);
    print_row("attention's time, ms", 3, attended_ms[0], attended_ms[1]);
    print_row("both, ms", 3, copied_ms + attended_ms[0], stored_ms + attended_ms[1]);
    printf("Both use the same attention kernel, which reads the same number of rows by a list of slots. Concatenated\n"
           "rows follow each other and were copied just before, into L2 as far as they fit; stored rows are scattered\n"
           "over the cache, and all except the newest were last touched a step ago.\n\n");
}

/* Records both caches, and writes the trace if `out` is not NULL. Returns the exit code. */
static int record_caches(const char *out)
{
    int wrong = 0;
    set_up();
    kv_cache caches[2] = {new_cache("concatenating cache", 0), new_cache("storing cache", 1)};
    CU(cudaDeviceSynchronize()); /* s.stream does not wait for it */
    for (int c = 0; c < 2; c++) {
        const size_t missing = decode(&caches[c]);
        if (missing)
            printf("%zu records are missing: CUPTI dropped them, or they are not readable or have no times\n", missing);
        wrong += (missing != 0) + miscounts(&caches[c], c + 1);
    }
    print_lesson();
    const int rows = wrong_rows(&caches[0], &caches[1]);
    printf("%d rows of the two caches compared, %d wrong; %severy launch and byte is in the trace, once\n",
           2 * layers * slots, rows, wrong ? "NOT " : "");
    if (out && trace_write(&s.recorded, out) != 0) {
        perror(out);
        return 1;
    }
    if (out)
        printf("%zu events in %s; python3 examples/10_trace/answers.py answers questions about them\n",
               s.recorded.events.size(), out);
    return wrong || rows;
}

int main(int argc, char **argv)
{
    if (argc != 1 && (argc != 3 || strcmp(argv[1], "--out") != 0)) {
        fprintf(stderr,
                "usage: 10_trace [--out FILE]\n\nRecords two ways to keep a KV cache, prints what they take, and "
                "writes the trace.\n");
        return 2;
    }
    need_gpu();
    return record_caches(argc == 3 ? argv[2] : NULL);
}

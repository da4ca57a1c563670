/* SPDX-License-Identifier: MIT */
/* What follows attention and the MLP in a tensor-parallel layer, in one call: the ranks' partial results are summed,
   the residual is added, and RMSNorm makes the next layer's input, here as FP8 with a scale for each token. A thread per
   GPU of this machine; one GPU works too. Compares every bit with the same function on the host.

       nvcc -std=c++17 -O2 -arch=native -I. examples/17_all_reduce_norm.cu -lnccl -o norm && ./norm */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_nccl.h"
#include "gpu.cuh"
#include <pthread.h>

enum { tokens = 6, hidden = 4096, count = tokens * hidden, layers = 3, max_gpus = 8 };

/* A rank's tensors, on the device and on the host alike. All numbers are bf16, except quantised (e4m3) and scale. */
typedef struct tensors {
    uint16_t partial[count];  /* what this rank adds */
    uint16_t residual[count]; /* the same on all ranks; gets the sum of all layers so far */
    uint16_t weight[hidden];
    unsigned char quantised[count];
    float scale[tokens];
} tensors;

typedef struct job {
    pthread_t thread;
    int rank, wrong;
} job;

static int world;
static kvprim_comm_id id;
static tensors expected;                   /* of all ranks, by the host */
static uint16_t partials[max_gpus][count]; /* what each rank adds in each layer */

/* A multiple of 1/8 that depends on the element and the rank. bf16 holds sums of a few of them, so that NCCL, which may
   add in another order, gives the same bits. */
static uint16_t value(int rank, int i)
{
    const float x = (float)((i * 7 + i / 11 + rank * 5) % 15 - 7) / 8;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static kvprim_norm_desc norm_of(tensors *t)
{
    kvprim_norm_desc norm = {};
    norm.dtype = KVPRIM_BF16;
    norm.eps = 1e-6f;
    norm.tokens = tokens;
    norm.hidden = hidden;
    norm.send = t->partial;
    norm.residual = norm.residual_out = t->residual; /* in place */
    norm.weight = t->weight;
    norm.quantised = t->quantised; /* set norm.out for bf16, or both */
    norm.scale = t->scale;
    norm.scale_per_token = 1;
    return norm;
}

static void fill(tensors *t, int rank)
{
    memset(t, 0, sizeof *t);
    memcpy(t->partial, partials[rank], sizeof t->partial);
    for (int i = 0; i < hidden; i++)
        t->weight[i] = 0x3f80; /* 1 */
}

/* The same on the host, for all ranks at once. */
static void run_on_host(void)
{
    const void *sends[max_gpus];
    for (int r = 0; r < world; r++) {
        for (int i = 0; i < count; i++)
            partials[r][i] = value(r, i);
        sends[r] = partials[r];
    }
    fill(&expected, 0);
    const kvprim_norm_desc norm = norm_of(&expected);
    for (int layer = 0; layer < layers; layer++)
        kvprim(kvprim_all_reduce_norm_host(&norm, sends, world));
}

static void *run(void *argument)
{
    job *const mine = (job *)argument;
    tensors *const host = (tensors *)malloc(sizeof *host), *device;
    kvprim_comm comm = {};
    kvprim_comm_desc desc = {};
    desc.rank = mine->rank;
    desc.world = world;
    desc.id = id;
    CU(cudaSetDevice(mine->rank));
    const cudaStream_t stream = new_stream();
    CU(cudaMalloc(&device, sizeof *device));
    kvprim(kvprim_comm_init(&comm, &desc));
    printf("%s\n", kvprim_comm_describe(&comm));

    fill(host, mine->rank);
    CU(cudaMemcpyAsync(device, host, sizeof *host, cudaMemcpyHostToDevice, stream));
    const kvprim_norm_desc norm = norm_of(device);
    for (int layer = 0; layer < layers; layer++) /* a model would run its layer before each; all ranks call alike */
        kvprim(kvprim_all_reduce_norm(&comm, &norm, stream));
    CU(cudaMemcpyAsync(host, device, sizeof *host, cudaMemcpyDeviceToHost, stream));
    CU(cudaStreamSynchronize(stream));
    kvprim(kvprim_comm_check(&comm));

    for (int i = 0; i < count; i++)
        mine->wrong += host->residual[i] != expected.residual[i] || host->quantised[i] != expected.quantised[i];
    for (int token = 0; token < tokens; token++)
        mine->wrong += host->scale[token] != expected.scale[token];
    kvprim(kvprim_comm_destroy(&comm));
    CU(cudaFree(device));
    CU(cudaStreamDestroy(stream));
    free(host);
    return NULL;
}

int main(void)
{
    static job jobs[max_gpus];
    int wrong = 0;
    need_gpu();
    CU(cudaGetDeviceCount(&world));
    world = world > max_gpus ? max_gpus : world;
    run_on_host();
    kvprim(kvprim_comm_new_id(&id));
    for (int r = 0; r < world; r++) {
        jobs[r].rank = r;
        if (pthread_create(&jobs[r].thread, NULL, run, &jobs[r]) != 0)
            return 1;
    }
    for (int r = 0; r < world; r++) {
        pthread_join(jobs[r].thread, NULL);
        wrong += jobs[r].wrong;
    }
    printf("%d GPUs, %d layers of %d tokens x %d: %d elements wrong\n", world, layers, tokens, hidden, wrong);
    return wrong != 0;
}

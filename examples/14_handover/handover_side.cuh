/* SPDX-License-Identifier: MIT */
/* handover_side.cuh: what one side of a hand-over holds on its GPU: a paged cache for each of its ranks, and for the
   request that is under way its pages and slots. All of it is allocated once. Kernels fill a cache with the pattern of
   handover_pattern.h and verify every byte of it, those of nobody's slots included. CUDA, C++17. */
#ifndef HANDOVER_SIDE_CUH
#define HANDOVER_SIDE_CUH

#include "handover_options.h"
#include "handover_pattern.h"
#include "kvprim_cuda.cuh"
#include <cuda_runtime.h>

static void cuda_or_exit(cudaError_t error, const char *call)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "14_handover: %s: %s\n", call, cudaGetErrorString(error));
    exit(1);
}
#define CU(call) cuda_or_exit(call, #call)

/* For what can only fail by a mistake in this program. */
static void kvprim_or_exit(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "14_handover: %s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

/* ---- filling and verifying ---- */

/* What a verification found, in device memory. */
typedef struct handover_faults {
    unsigned long long bytes; /* that are wrong */
    unsigned long long first; /* the first of them, from the beginning of the cache on */
} handover_faults;

static __global__ void handover_own_kernel(int64_t *owner, int64_t slots, const int64_t *slot, int64_t request,
                                           int64_t tokens)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < tokens; i += step)
        if (slot[i] >= 0 && slot[i] < slots)
            owner[slot[i]] = request < 0 ? -1 : handover_owner(request, i);
}

static __global__ void handover_reset_kernel(handover_faults *faults)
{
    faults->bytes = 0;
    faults->first = ~0ull;
}

/* Each thread writes, or compares, 8 bytes of the cache at a time. */
template <bool verify>
static __global__ void handover_pattern_kernel(handover_cache c, const int64_t *owner, uint64_t background,
                                               handover_faults *faults)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x * 8, bytes = handover_cache_bytes(&c);
    for (uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < bytes; at += step) {
        const handover_place p = handover_place_of(&c, at);
        const uint64_t want = handover_expected(&p, owner[p.slot], background, at);
        uint64_t *const word = (uint64_t *)(c.data + at);
        uint32_t first = 0;
        if (!verify) {
            *word = want;
            continue;
        }
        const uint32_t wrong = handover_differing(*word, want, &first);
        if (wrong) {
            atomicAdd(&faults->bytes, (unsigned long long)wrong);
            atomicMin(&faults->first, (unsigned long long)(at + first));
        }
    }
}

enum { pattern_blocks = 1056, pattern_threads = 256 }; /* 8 blocks on each of an H200's 132 multiprocessors */

/* ---- a side ---- */

typedef struct handover_side {
    handover_shape shape;
    handover_cache caches[handover_most_tp];
    int32_t salt;   /* the two sides take different pages for a request */
    int64_t rows;   /* slots of a cache */
    int32_t *pages; /* in pinned memory: all of them, the request's first */
    int32_t *pages_on_gpu;
    int64_t *tokens; /* in pinned memory: 0 and the number of tokens */
    int64_t *slots;  /* of the request's tokens */
    int64_t *owner;  /* of every slot: see handover_pattern.h */
    uint32_t *rejected;
    handover_faults *faults;
    cudaStream_t stream;
} handover_side;

static handover_cache side_cache(const handover_options *o, const handover_shape *shape, int rank)
{
    const int64_t used = (o->tokens + shape->page_rows - 1) / shape->page_rows;
    handover_cache c;
    memset(&c, 0, sizeof c);
    c.layers = (int32_t)o->layers, c.page_rows = (int32_t)shape->page_rows, c.head_bytes = (int32_t)o->head_bytes;
    c.heads = (int32_t)(o->heads / shape->tp), c.first_head = rank * c.heads;
    c.head_major = (int32_t)shape->head_major;
    c.pages = used + used / 8 + 2; /* an eighth of them, and two, are never a request's */
    return c;
}

/* On the current device. */
static void side_open(handover_side *s, const handover_options *o, const handover_shape *shape, int32_t salt)
{
    const int64_t pages = side_cache(o, shape, 0).pages;
    memset(s, 0, sizeof *s);
    s->shape = *shape, s->salt = salt, s->rows = pages * shape->page_rows;
    CU(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    for (int r = 0; r < shape->tp; r++) {
        s->caches[r] = side_cache(o, shape, r);
        CU(cudaMalloc((void **)&s->caches[r].data, handover_cache_bytes(&s->caches[r])));
    }
    CU(cudaHostAlloc((void **)&s->pages, (size_t)pages * sizeof *s->pages, cudaHostAllocDefault));
    CU(cudaHostAlloc((void **)&s->tokens, 2 * sizeof *s->tokens, cudaHostAllocDefault));
    CU(cudaMalloc((void **)&s->pages_on_gpu, (size_t)pages * sizeof *s->pages));
    CU(cudaMalloc((void **)&s->slots, (size_t)o->tokens * sizeof *s->slots));
    CU(cudaMalloc((void **)&s->owner, (size_t)s->rows * sizeof *s->owner));
    CU(cudaMalloc((void **)&s->rejected, sizeof *s->rejected));
    CU(cudaMalloc((void **)&s->faults, sizeof *s->faults));
    CU(cudaMemset(s->owner, 0xff, (size_t)s->rows * sizeof *s->owner));
    CU(cudaMemset(s->rejected, 0, sizeof *s->rejected));
    for (int64_t p = 0; p < pages; p++)
        s->pages[p] = (int32_t)p;
    CU(cudaDeviceSynchronize());
}

/* Makes slots of the pages that lie in `pages`, for a cache of `rows` slots in pages of page_rows. */
static void side_slots(const handover_side *s, const int32_t *pages, int64_t page_count, int64_t page_rows,
                       int64_t rows, int64_t tokens, int64_t *slots)
{
    kvprim_slots_desc d;
    kvprim_cuda_launch launch;
    memset(&d, 0, sizeof d), memset(&launch, 0, sizeof launch);
    s->tokens[0] = 0, s->tokens[1] = tokens;
    d.pages = pages, d.pages_type = KVPRIM_I32, d.requests = 1, d.max_pages = page_count;
    d.page_rows = page_rows, d.rows = rows;
    d.cu_seqlens = s->tokens, d.token_type = KVPRIM_I64;
    d.slot = slots, d.slot_type = KVPRIM_I64, d.count = tokens, d.rejected = s->rejected;
    launch.stream = s->stream;
    kvprim_or_exit(kvprim_cuda_slots(&d, &launch));
}

/* Takes random pages for the request's tokens and makes its slots. Returns how many pages. */
static int64_t side_take_pages(handover_side *s, int64_t request, int64_t tokens)
{
    const int64_t pages = s->caches[0].pages, used = (tokens + s->shape.page_rows - 1) / s->shape.page_rows;
    const uint64_t seed = 1 ^ handover_mix((uint64_t)(request * 2 + s->salt));
    CU(cudaStreamSynchronize(s->stream)); /* the last request's pages have been read */
    for (int64_t p = 0; p < used; p++) {
        const int64_t other = p + (int64_t)(handover_mix(seed ^ (uint64_t)p) % (uint64_t)(pages - p));
        const int32_t page = s->pages[p];
        s->pages[p] = s->pages[other], s->pages[other] = page;
    }
    CU(cudaMemcpyAsync(s->pages_on_gpu, s->pages, (size_t)used * sizeof *s->pages, cudaMemcpyHostToDevice, s->stream));
    side_slots(s, s->pages_on_gpu, used, s->shape.page_rows, s->rows, tokens, s->slots);
    return used;
}

/* Says that the request's slots are its, or that they are nobody's if request is -1. */
static void side_own(handover_side *s, int64_t request, int64_t tokens)
{
    if (tokens > 0)
        handover_own_kernel<<<64, 256, 0, s->stream>>>(s->owner, s->rows, s->slots, request, tokens);
    CU(cudaGetLastError());
}

/* Fills the caches: with the request's bytes in its slots, and nobody's elsewhere; 0 tokens: nobody's everywhere. */
static void side_fill(handover_side *s, int64_t request, int64_t tokens)
{
    side_own(s, request, tokens);
    for (int r = 0; r < s->shape.tp; r++) {
        handover_pattern_kernel<false>
            <<<pattern_blocks, pattern_threads, 0, s->stream>>>(s->caches[r], s->owner, (uint64_t)s->salt, NULL);
        CU(cudaGetLastError());
    }
    side_own(s, -1, tokens);
    CU(cudaStreamSynchronize(s->stream));
}

/* Describes the first wrong byte of a cache. */
static void side_describe(const handover_side *s, const handover_cache *c, uint64_t at, char *text, size_t size)
{
    unsigned char got = 0;
    int64_t whose = -1;
    CU(cudaMemcpy(&got, c->data + at, 1, cudaMemcpyDeviceToHost));
    CU(cudaMemcpy(&whose, s->owner + handover_place_of(c, at).slot, sizeof whose, cudaMemcpyDeviceToHost));
    handover_describe_byte(c, whose, (uint64_t)s->salt, at, got, text, size);
}

/* Verifies every byte of every cache: the request's tokens in its slots, nobody's elsewhere. Returns how many bytes are
   wrong, or of how many tokens slots were refused; `text` describes the first. */
static int64_t side_verify(handover_side *s, int64_t request, int64_t tokens, char *text, size_t size)
{
    int64_t wrong = 0;
    uint32_t rejected = 0;
    side_own(s, request, tokens);
    for (int r = 0; r < s->shape.tp; r++) {
        handover_faults found;
        handover_reset_kernel<<<1, 1, 0, s->stream>>>(s->faults);
        handover_pattern_kernel<true>
            <<<pattern_blocks, pattern_threads, 0, s->stream>>>(s->caches[r], s->owner, (uint64_t)s->salt, s->faults);
        CU(cudaGetLastError());
        CU(cudaMemcpyAsync(&found, s->faults, sizeof found, cudaMemcpyDeviceToHost, s->stream));
        CU(cudaStreamSynchronize(s->stream));
        if (found.bytes && !wrong)
            side_describe(s, &s->caches[r], found.first, text, size);
        wrong += (int64_t)found.bytes;
    }
    side_own(s, -1, tokens);
    CU(cudaMemcpyAsync(&rejected, s->rejected, sizeof rejected, cudaMemcpyDeviceToHost, s->stream));
    CU(cudaMemsetAsync(s->rejected, 0, sizeof rejected, s->stream));
    CU(cudaStreamSynchronize(s->stream));
    if (rejected && !wrong)
        (void)snprintf(text, size, "%u slots were refused", (unsigned)rejected);
    return wrong + rejected;
}

#endif

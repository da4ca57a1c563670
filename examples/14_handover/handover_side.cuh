/* SPDX-License-Identifier: MIT */
/* handover_side.cuh: what one side of a hand-over holds on its GPU: a paged cache for each of its ranks, and for the
   request that is under way its pages and slots. All of it is allocated once. CUDA, C++17. */
#ifndef HANDOVER_SIDE_CUH
#define HANDOVER_SIDE_CUH

#include "handover_device.cuh"
#include "handover_options.h"
#include "kvprim_cuda.cuh"

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

typedef struct handover_side_memory {
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
} handover_side_memory;

/* An eighth of the pages, and two, are never a request's. */
static int64_t side_pages(const handover_options *o, const handover_shape *shape)
{
    const int64_t used = (o->tokens + shape->page_rows - 1) / shape->page_rows;
    return used + used / 8 + 2;
}

static handover_cache side_cache(const handover_options *o, const handover_shape *shape, int rank)
{
    handover_cache c;
    memset(&c, 0, sizeof c);
    c.layers = o->layers, c.page_rows = shape->page_rows, c.head_bytes = o->head_bytes;
    c.heads = o->heads / shape->tp, c.first_head = rank * c.heads;
    c.head_major = shape->head_major, c.pages = side_pages(o, shape);
    return c;
}

/* On the current device. */
static void side_open(handover_side_memory *s, const handover_options *o, const handover_shape *shape, int32_t salt)
{
    const int64_t pages = side_pages(o, shape);
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

/* Makes slots of the pages that lie in `pages`, for a cache of this shape. */
static void side_slots(const handover_side_memory *s, const int32_t *pages, int64_t page_count, int64_t page_rows,
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
static int64_t side_take_pages(handover_side_memory *s, int64_t seed, int64_t request, int64_t tokens)
{
    const int64_t pages = s->caches[0].pages, used = (tokens + s->shape.page_rows - 1) / s->shape.page_rows;
    CU(cudaStreamSynchronize(s->stream)); /* the last request's pages have been read */
    for (int64_t p = 0; p < used; p++) {
        const uint64_t h = handover_mix((uint64_t)seed ^ handover_mix((uint64_t)(request * 2 + s->salt)) ^ (uint64_t)p);
        const int64_t other = p + (int64_t)(h % (uint64_t)(pages - p));
        const int32_t page = s->pages[p];
        s->pages[p] = s->pages[other], s->pages[other] = page;
    }
    CU(cudaMemcpyAsync(s->pages_on_gpu, s->pages, (size_t)used * sizeof *s->pages, cudaMemcpyHostToDevice, s->stream));
    side_slots(s, s->pages_on_gpu, used, s->shape.page_rows, s->rows, tokens, s->slots);
    return used;
}

/* Fills the caches: with the request's bytes in its slots, or with nobody's everywhere. */
static void side_fill(handover_side_memory *s, int64_t request, int64_t tokens, bool with_tokens)
{
    if (with_tokens)
        CU(handover_own(s->owner, s->rows, s->slots, request, 0, tokens, s->stream));
    for (int r = 0; r < s->shape.tp; r++)
        CU(handover_fill(&s->caches[r], s->owner, (uint64_t)s->salt, s->stream));
    if (with_tokens)
        CU(handover_own(s->owner, s->rows, s->slots, -1, 0, tokens, s->stream));
    CU(cudaStreamSynchronize(s->stream));
}

/* Verifies every byte of every cache: the request's tokens in its slots, nobody's elsewhere. Returns how many bytes are
   wrong, or of how many tokens slots were refused; `text` describes the first. */
static int64_t side_verify(handover_side_memory *s, int64_t request, int64_t tokens, char *text, size_t size)
{
    int64_t wrong = 0;
    uint32_t rejected = 0;
    text[0] = 0;
    CU(handover_own(s->owner, s->rows, s->slots, request, 0, tokens, s->stream));
    for (int r = 0; r < s->shape.tp; r++) {
        handover_faults found;
        CU(handover_verify(&s->caches[r], s->owner, (uint64_t)s->salt, s->faults, s->stream));
        CU(cudaMemcpyAsync(&found, s->faults, sizeof found, cudaMemcpyDeviceToHost, s->stream));
        CU(cudaStreamSynchronize(s->stream));
        if (found.bytes && !wrong)
            CU(handover_describe(&s->caches[r], s->owner, (uint64_t)s->salt, &found, text, size));
        wrong += (int64_t)found.bytes;
    }
    CU(handover_own(s->owner, s->rows, s->slots, -1, 0, tokens, s->stream));
    CU(cudaMemcpyAsync(&rejected, s->rejected, sizeof rejected, cudaMemcpyDeviceToHost, s->stream));
    CU(cudaMemsetAsync(s->rejected, 0, sizeof rejected, s->stream));
    CU(cudaStreamSynchronize(s->stream));
    if (rejected && !wrong)
        (void)snprintf(text, size, "%u slots were refused", (unsigned)rejected);
    return wrong + rejected;
}

#endif

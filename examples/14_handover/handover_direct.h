/* SPDX-License-Identifier: MIT */
/* handover_direct.h: the way without a ring. Where one process can map the other's GPU memory (CUDA's IPC: one machine,
   GPUs with peer access), the sender writes a request's tokens straight into the receiver's pages, K and V of all
   layers in one launch. CUDA, C++17.

   Neither function sends or receives anything. Three messages go over the program's control channel:

       receiver, once per cache       handover_direct_offer_of(&cache, &offer), then the bytes of the offer
       sender, once per cache         handover_direct_open(&peer, &offer)
       receiver, for every request    its page table: the pages that it has taken for the tokens
       sender, for every request      to_slots by kvprim_cuda_slots(), handover_direct_push(...), an event behind it;
                                      when that has happened, a message: the tokens are there
       sender, at the end             handover_direct_close(&peer); only then may the receiver free its cache

   A kernel that the receiver launches after that message sees all bytes: the sender's kernel has ended, and its writes
   went through the memory of the receiver's own GPU. Until the message comes the receiver must neither read nor reuse
   the pages, also if the request was cancelled: a push that has begun runs to its end. */
#ifndef HANDOVER_DIRECT_H
#define HANDOVER_DIRECT_H

#include "handover_plan.h"
#include "kvprim_cuda.cuh"
#include <cuda_runtime.h>
#include <stdio.h>

/* What a receiver says about one cache. Plain bytes: both ends are the same program. */
typedef struct handover_direct_offer {
    char magic[8]; /* "handover" */
    uint64_t bytes;
    handover_cache cache; /* data is not used */
    cudaIpcMemHandle_t handle;
    char machine[40]; /* the kernel's boot id: the same in all containers of a machine */
} handover_direct_offer;

/* A receiver's cache as the sender sees it. */
typedef struct handover_direct {
    handover_cache cache; /* data: where this process sees it */
} handover_direct;

static inline kvprim_status handover_direct_cuda(const char *what, cudaError_t error)
{
    (void)cudaGetLastError();
    return error == cudaSuccess ? KVPRIM_OK
                                : kvprim_fail(KVPRIM_ERROR_CUDA, "handover: %s: %s", what, cudaGetErrorString(error));
}

static inline void handover_direct_machine(char id[40])
{
    memset(id, 0, 40);
    FILE *const file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (!file)
        return;
    if (fscanf(file, "%39s", id) != 1)
        id[0] = 0;
    (void)fclose(file);
}

/* cache->data is what cudaMalloc returned (not memory inside an allocation, nor of a pool: CUDA shares allocations).
   Errors: as handover_check_cache; CUDA. */
static inline kvprim_status handover_direct_offer_of(const handover_cache *cache, handover_direct_offer *out)
{
    const kvprim_status status = handover_check_cache("to", cache);
    if (status != KVPRIM_OK)
        return status;
    memset(out, 0, sizeof *out);
    memcpy(out->magic, "handover", sizeof out->magic);
    out->bytes = handover_cache_bytes(cache);
    out->cache = *cache;
    out->cache.data = NULL;
    handover_direct_machine(out->machine);
    return handover_direct_cuda("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&out->handle, cache->data));
}

/* Maps the offered cache for the current device. Errors: ARGUMENT (no offer, or one of another machine), those of
   handover_check_cache, CUDA (no peer access, say). */
static inline kvprim_status handover_direct_open(handover_direct *out, const handover_direct_offer *offer)
{
    char machine[40];
    void *data = NULL;
    if (memcmp(offer->magic, "handover", sizeof offer->magic) != 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "handover: what the peer sent is no offer of a cache");
    kvprim_status status = handover_check_cache("to", &offer->cache);
    if (status != KVPRIM_OK)
        return status;
    if (offer->bytes != handover_cache_bytes(&offer->cache))
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: the peer offers %llu bytes, its cache has %llu",
                           (unsigned long long)offer->bytes, (unsigned long long)handover_cache_bytes(&offer->cache));
    handover_direct_machine(machine);
    if (memcmp(machine, offer->machine, sizeof machine) != 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "handover: the peer's cache is on another machine (boot id %.39s, here %s)", offer->machine,
                           machine);
    status = handover_direct_cuda("cudaIpcOpenMemHandle",
                                  cudaIpcOpenMemHandle(&data, offer->handle, cudaIpcMemLazyEnablePeerAccess));
    out->cache = offer->cache;
    out->cache.data = (char *)data;
    return status;
}

/* Call it when no push runs any more. */
static inline kvprim_status handover_direct_close(handover_direct *peer)
{
    void *const data = peer->cache.data;
    peer->cache.data = NULL;
    return data ? handover_direct_cuda("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(data)) : KVPRIM_OK;
}

/* Enqueues one launch that copies K and V of all layers, for the heads that both ranks hold, into the peer's pages.
   Slots, tokens and rejected are as in handover_straight; slots and rejected are memory of the sender's GPU.
   Errors: those of handover_straight and kvprim_cuda_move. */
static inline kvprim_status handover_direct_push(const handover_direct *peer, const handover_cache *from,
                                                 const int64_t *from_slots, const int64_t *to_slots, int64_t tokens,
                                                 uint32_t *rejected, const kvprim_cuda_launch *launch)
{
    kvprim_move moves[2];
    const kvprim_status status = handover_straight(from, &peer->cache, from_slots, to_slots, tokens, rejected, moves);
    return status == KVPRIM_OK ? kvprim_cuda_move(moves, 2, launch) : status;
}

#endif

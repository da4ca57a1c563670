/* SPDX-License-Identifier: MIT */
/* handover_direct.h: the way without a ring. Where one process can map the other's GPU memory (CUDA's IPC: one machine,
   GPUs with peer access), the sender writes a request's tokens straight into the receiver's pages, K and V of all
   layers in one launch. CUDA, C++17.

   The functions send and receive nothing. Three messages go over the program's control channel:

       receiver, once per cache       handover_direct_offer_of(&cache, &offer), then the bytes of the offer
       sender, once per cache         handover_direct_open(&peer, &offer)
       receiver, for every request    its page table: the pages that it has taken for the tokens
       sender, for every request      to_slots by kvprim_cuda_slots(); for each pair of ranks handover_straight(&from,
                                      &peer.cache, ...); kvprim_cuda_move() of these moves; an event after it; when
                                      that has happened, a message: the tokens are there
       sender, at the end             handover_direct_close(&peer); only then may the receiver free its cache

   A kernel that the receiver launches after that message sees all bytes: the sender's kernel has ended, and its writes
   went through the memory of the receiver's own GPU. Until the message comes the receiver must neither read nor reuse
   the pages, also if the request was cancelled: a launch that has begun runs to its end.

   Leave kvprim_cuda_launch.max_sms at 0: 268 MB of 256-byte to 2 KB pieces then move at 0.936 to 0.940 of the copy
   engine, as fast as any kernel that only pushes contiguous words; on 16, 32 and 64 multiprocessors at 0.77 to 0.87,
   0.87 to 0.89 and 0.90 to 0.92 (two H200s). Each launch takes about 5 us to begin and to end, so several pairs of
   ranks are better enqueued on two streams in turn: 0.919 on one and 0.937 on two for 4 pairs of 67 MB. */
#ifndef HANDOVER_DIRECT_H
#define HANDOVER_DIRECT_H

#include "handover_plan.h"
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

#endif

/* SPDX-License-Identifier: MIT */
/* Pages of a cache go to another GPU in chunks, through a ring of three buffers on each side, and are unpacked from
   there: packing, sending and unpacking overlap, and memory stays bounded. A page has rows and, elsewhere, scales: two
   fragments. Two threads with a GPU each, whose channel is memory; between machines it is a socket.

       nvcc -std=c++17 -O2 -arch=native -I. examples/20_ring_unpack.cu -lnccl -o ring && ./ring */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "kvprim_nccl.h"
#include "gpu.cuh"
#include <atomic>
#include <thread>

enum { pages = 96, row_bytes = 40000, scale_bytes = 160, cache_bytes = pages * (row_bytes + scale_bytes) };
enum { in_chunk = 8, chunks = pages / in_chunk, slots = 3, chunk_bytes = in_chunk * (row_bytes + scale_bytes) };

static kvprim_comm_id id;
static kvprim_fragment packed[chunks][2 * in_chunk], unpacked[chunks][2 * in_chunk]; /* from a cache; into the other */
static unsigned char sent[cache_bytes], received[cache_bytes], expected[cache_bytes];
static std::atomic<int> told, credits; /* the channel: chunks that were sent; buffers that are free again */

/* Page p of the sender becomes page (p * 29 + 5) % pages of the receiver. */
static void plan(void)
{
    for (uint64_t p = 0; p < pages; p++) {
        kvprim_fragment *const out = &packed[p / in_chunk][p % in_chunk * 2];
        kvprim_fragment *const in = &unpacked[p / in_chunk][p % in_chunk * 2];
        const uint64_t to = (p * 29 + 5) % pages, k = p % in_chunk, scales = pages * row_bytes;
        out[0] = {p * row_bytes, k * row_bytes, row_bytes};
        out[1] = {scales + p * scale_bytes, in_chunk * row_bytes + k * scale_bytes, scale_bytes};
        in[0] = {out[0].dst_offset, to * row_bytes, row_bytes};
        in[1] = {out[1].dst_offset, scales + to * scale_bytes, scale_bytes};
        for (int part = 0; part < 2; part++)
            memcpy(expected + in[part].dst_offset, sent + out[part].src_offset, out[part].bytes);
    }
}

static void unpack(void *dst, uint64_t dst_bytes, const void *src, uint64_t src_bytes, const kvprim_fragment *fragments,
                   const kvprim_cuda_launch *launch)
{
    kvprim_unpack_desc desc = {};
    desc.dst = dst, desc.dst_bytes = dst_bytes, desc.src = src, desc.src_bytes = src_bytes;
    desc.fragments = fragments, desc.count = 2 * in_chunk;
    kvprim(kvprim_cuda_unpack(&desc, launch));
}

static void send_chunks(kvprim_ring *ring, const unsigned char *cache, const kvprim_cuda_launch *launch)
{
    for (int chunk = 0; chunk < chunks; chunk++) {
        void *slot = NULL;
        while (!slot) { /* until there is a credit */
            if (const int n = credits.exchange(0))
                kvprim(kvprim_ring_credit(ring, n));
            kvprim(kvprim_ring_claim(ring, launch->stream, &slot));
        }
        unpack(slot, chunk_bytes, cache, cache_bytes, packed[chunk], launch);
        kvprim(kvprim_ring_send(ring, chunk_bytes, launch->stream));
        told = chunk + 1;
    }
}

static void receive_chunks(kvprim_ring *ring, unsigned char *cache, const kvprim_cuda_launch *launch)
{
    for (int chunk = 0; chunk < chunks; chunk++) {
        void *slot;
        for (int32_t n = 0; told <= chunk; credits += n)
            kvprim(kvprim_ring_take(ring, &n)); /* buffers that were unpacked meanwhile */
        kvprim(kvprim_ring_recv(ring, chunk_bytes, launch->stream, &slot));
        unpack(cache, cache_bytes, slot, chunk_bytes, unpacked[chunk], launch);
        kvprim(kvprim_ring_release(ring, launch->stream));
    }
}

static void run(int rank)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = {};
    kvprim_ring ring = {};
    kvprim_ring_desc ring_desc = {};
    kvprim_cuda_launch launch = {};
    desc.rank = rank, desc.world = 2, desc.id = id;
    CU(cudaSetDevice(rank));
    const cudaStream_t nccl = new_stream();
    launch.stream = new_stream();
    unsigned char *const cache = on_device<unsigned char>(cache_bytes, sent);
    unsigned char *const memory = on_device<unsigned char>(slots * chunk_bytes);
    kvprim(kvprim_comm_init(&comm, &desc));
    kvprim(kvprim_group_start(&comm)); /* connects the ranks: no later call waits for the other side */
    kvprim(kvprim_send(&comm, memory, 1, KVPRIM_U8, 1 - rank, nccl));
    kvprim(kvprim_recv(&comm, memory + 1, 1, KVPRIM_U8, 1 - rank, nccl));
    kvprim(kvprim_group_end(&comm));
    ring_desc.comm = &comm, ring_desc.peer = 1 - rank, ring_desc.slots = slots;
    ring_desc.memory = memory, ring_desc.slot_bytes = chunk_bytes, ring_desc.stream = nccl;
    kvprim(kvprim_ring_init(&ring, &ring_desc));
    rank == 0 ? send_chunks(&ring, cache, &launch) : receive_chunks(&ring, cache, &launch);
    CU(cudaDeviceSynchronize());
    kvprim(kvprim_comm_check(&comm));
    if (rank == 1)
        CU(cudaMemcpy(received, cache, cache_bytes, cudaMemcpyDeviceToHost));
    kvprim(kvprim_ring_destroy(&ring));
    kvprim(kvprim_comm_destroy(&comm));
}

int main(void)
{
    int gpus = 0;
    CU(cudaGetDeviceCount(&gpus));
    if (gpus < 2)
        return printf("this program needs two GPUs, and there is %d\n", gpus) < 0;
    for (int i = 0; i < cache_bytes; i++)
        sent[i] = (unsigned char)(i * 7 + i / 251 + i / 65521);
    plan();
    kvprim(kvprim_comm_new_id(&id));
    std::thread receiver(run, 1);
    run(0);
    receiver.join();
    const bool right = memcmp(received, expected, cache_bytes) == 0;
    printf("%d pages in %d chunks through %d buffers: %s\n", pages, chunks, slots, right ? "right" : "wrong");
    return !right;
}

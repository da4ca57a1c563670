/* SPDX-License-Identifier: MIT */
/* Unpacks a receive buffer of 8 chunks of 512 KB, each with 128 fragments of 4 KB out of order, in six ways: from a
   stream and an allocation per chunk to all chunks in one launch. The program checks every byte.

       nvcc -arch=native -O3 -I. examples/04_unpack.cu -o 04_unpack && ./04_unpack

   The columns "the report" are the figures of a report on a slow unpack kernel, which this example retraces. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include <chrono>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { chunks = 8, in_chunk = 128, fragment_bytes = 4096, chunk_bytes = in_chunk * fragment_bytes };
enum { all_fragments = chunks * in_chunk, all_bytes = chunks * chunk_bytes, rounds = 20 };

static kvprim_fragment fragments[all_fragments]; /* offsets from the start of both buffers */
static char *src, *dst;
static cudaStream_t stream;
static void *descriptors; /* device memory, for the report's first kernel */

static void cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

/* Each block copies a fragment. Each thread copies every 256th of its 16-byte words. */
__global__ static void unpack_kernel(char *to, const char *from, const kvprim_fragment *f)
{
    const kvprim_fragment one = f[blockIdx.x];
    for (uint64_t at = 16 * threadIdx.x; at < one.bytes; at += 16 * blockDim.x)
        *(uint4 *)(to + one.dst_offset + at) = *(const uint4 *)(from + one.src_offset + at);
}

static void launch_chunk(int chunk, void *place, cudaStream_t on)
{
    const size_t bytes = in_chunk * sizeof *fragments;
    cuda(cudaMemcpyAsync(place, fragments + chunk * in_chunk, bytes, cudaMemcpyHostToDevice, on),
         "copying descriptors");
    unpack_kernel<<<in_chunk, 256, 0, on>>>(dst, src, (const kvprim_fragment *)place);
    cuda(cudaGetLastError(), "launch");
}

static void synchronise(void)
{
    cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

static void as_found(void)
{
    for (int c = 0; c < chunks; c++) {
        cudaStream_t own;
        void *place;
        cuda(cudaStreamCreate(&own), "cudaStreamCreate");
        cuda(cudaMalloc(&place, in_chunk * sizeof *fragments), "cudaMalloc");
        launch_chunk(c, place, own);
        cuda(cudaStreamSynchronize(own), "cudaStreamSynchronize");
        cuda(cudaFree(place), "cudaFree");
        cuda(cudaStreamDestroy(own), "cudaStreamDestroy");
    }
}

static void long_lived_stream(void)
{
    for (int c = 0; c < chunks; c++) {
        void *place;
        cuda(cudaMalloc(&place, in_chunk * sizeof *fragments), "cudaMalloc");
        launch_chunk(c, place, stream);
        synchronise();
        cuda(cudaFree(place), "cudaFree");
    }
}

static void one_synchronise(void)
{
    void *place[chunks];
    for (int c = 0; c < chunks; c++) {
        cuda(cudaMalloc(&place[c], in_chunk * sizeof *fragments), "cudaMalloc");
        launch_chunk(c, place[c], stream);
    }
    synchronise();
    for (int c = 0; c < chunks; c++)
        cuda(cudaFree(place[c]), "cudaFree");
}

static void allocated_beforehand(void)
{
    for (int c = 0; c < chunks; c++)
        launch_chunk(c, (kvprim_fragment *)descriptors + c * in_chunk, stream);
    synchronise();
}

static void one_launch(void)
{
    kvprim_unpack_desc unpack = {};
    unpack.src = src;
    unpack.dst = dst;
    unpack.src_bytes = unpack.dst_bytes = all_bytes;
    unpack.fragments = fragments;
    unpack.count = all_fragments;
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    kvprim(kvprim_cuda_unpack(&unpack, &launch));
    synchronise();
}

static void copy_per_fragment(void)
{
    for (const kvprim_fragment &f : fragments)
        cuda(cudaMemcpyAsync(dst + f.dst_offset, src + f.src_offset, f.bytes, cudaMemcpyDeviceToDevice, stream),
             "cudaMemcpyAsync");
    synchronise();
}

static double now_ms(void)
{
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* Reports the fastest of some rounds. The first round is not timed; its result is checked. */
static int run(const char *stage, const char *change, double reported_ms, void (*unpack)(void),
               const unsigned char *received)
{
    static unsigned char got[all_bytes];
    double best = 1e9;
    int wrong = 0;
    cuda(cudaMemset(dst, 0xfe, all_bytes), "cudaMemset");
    for (int r = 0; r < rounds; r++) {
        const double begin = now_ms();
        unpack();
        const double ms = now_ms() - begin;
        if (r == 0) {
            cuda(cudaMemcpy(got, dst, all_bytes, cudaMemcpyDeviceToHost), "reading back");
            for (const kvprim_fragment &f : fragments)
                wrong += memcmp(got + f.dst_offset, received + f.src_offset, f.bytes) != 0;
        } else if (ms < best)
            best = ms;
    }
    printf("%-9s  %-46s %8.2f %7.2f   %8.4f %7.2f  %s\n", stage, change, reported_ms / chunks,
           all_bytes / reported_ms * 1e-6, best / chunks, all_bytes / best * 1e-6, wrong ? "WRONG" : "ok");
    return wrong;
}

/* Returns the exit code if there are arguments, else -1. */
static int refuse_arguments(int argc, char **argv)
{
    if (argc < 2)
        return -1;
    if (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0) {
        printf("usage: 04_unpack\n\nUnpacks a receive buffer on the GPU in six ways, prints how long each takes, and "
               "checks every byte.\n");
        return 0;
    }
    fprintf(stderr, "04_unpack: unknown argument %s: it takes none (-h: what it does)\n", argv[1]);
    return 2;
}

int main(int argc, char **argv)
{
    static unsigned char received[all_bytes];
    int devices = 0;
    const int code = refuse_arguments(argc, argv);
    if (code >= 0)
        return code;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("this program needs a CUDA device, and there is none\n");
        return 1;
    }
    for (size_t i = 0; i < all_bytes; i++)
        received[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < all_fragments; i++) /* fragment i arrived as number i * 37 of its chunk */
        fragments[i] = {(i / in_chunk * in_chunk + i * 37 % in_chunk) * fragment_bytes, i * fragment_bytes,
                        fragment_bytes};
    cuda(cudaMalloc(&src, all_bytes), "cudaMalloc");
    cuda(cudaMalloc(&dst, all_bytes), "cudaMalloc");
    cuda(cudaMalloc(&descriptors, sizeof fragments), "cudaMalloc");
    cuda(cudaMemcpy(src, received, all_bytes, cudaMemcpyHostToDevice), "filling the receive buffer");
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");

    printf("%-56s   %16s   %16s\n%-9s  %-46s %8s %7s   %8s %7s\n", "", "the report", "here", "stage", "", "ms/chunk",
           "GB/s", "ms/chunk", "GB/s");
    int wrong = run("as found", "per chunk: stream, allocation, synchronise", 424, as_found, received);
    wrong += run("1", "one stream for all", 360, long_lived_stream, received);
    wrong += run("2", "one synchronise at the end", 8, one_synchronise, received);
    wrong += run("3", "memory allocated beforehand", 4, allocated_beforehand, received);
    wrong += run("4", "all chunks in one launch: kvprim_cuda_unpack", 0.8, one_launch, received);
    wrong += run("reference", "cudaMemcpyAsync per fragment", 4.27, copy_per_fragment, received);
    printf("%d fragments unpacked in 6 ways, %d of them wrong\n", all_fragments, wrong);
    return wrong != 0;
}

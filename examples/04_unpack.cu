/* SPDX-License-Identifier: MIT */
/* Unpacks a receive buffer of 8 chunks of 512 KB, each with 128 fragments of 4 KB out of order, in nine ways: from a
   stream and an allocation per chunk to all chunks in one launch, to descriptors that are written after the launch, and
   to a buffer of its own for each fragment. The program checks every byte.

   The first way is 12 times as slow as one launch where nothing else runs. The report that these ways are from saw 530
   times, 53 ms a chunk. Other kernels on the GPU explain such times: beside kernels of 2 ms on another stream the first
   way takes 1,000 times as long (H200), as the last rows show. Descriptors that come late cost their waits: see the two
   rows that take them apart.

       nvcc -arch=native -O3 -I. examples/04_unpack.cu -o 04_unpack && ./04_unpack */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"
#include <atomic>
#include <chrono>
#include <cuda.h>
#include <thread>

enum { chunks = 8, in_chunk = 128, fragment_bytes = 4096, chunk_bytes = in_chunk * fragment_bytes };
enum { all_fragments = chunks * in_chunk, all_bytes = chunks * chunk_bytes, rounds = 20 };

static kvprim_fragment fragments[all_fragments]; /* offsets from the start of both buffers */
static unsigned char received[all_bytes];
static char *src, *dst;
static char *buffers[all_fragments]; /* each an allocation of its own */
static cudaStream_t stream;
static cudaMemPool_t pool;
static kvprim_fragment *descriptors; /* device memory, for unpack_kernel */

/* What a network plugin writes for each chunk, as NCCL lays it out: pinned host memory, which the GPU reads. */
struct ring {
    kvprim_unpack_meta_item meta[chunks][in_chunk];
    uint64_t count[chunks];
    std::atomic<uint32_t> described; /* so many chunks are */
};
static ring *late;

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
    CU(cudaMemcpyAsync(place, fragments + chunk * in_chunk, bytes, cudaMemcpyHostToDevice, on));
    unpack_kernel<<<in_chunk, 256, 0, on>>>(dst, src, (const kvprim_fragment *)place);
    CU(cudaGetLastError());
}

static void synchronise(void)
{
    CU(cudaStreamSynchronize(stream));
}

/* Allocates memory for each chunk's descriptors, and frees it when the chunk is unpacked, or when all are. */
static void chunk_by_chunk(bool own_streams, bool wait)
{
    cudaStream_t on[chunks];
    void *place[chunks];
    for (int c = 0; c < chunks; c++) {
        on[c] = stream;
        if (own_streams)
            CU(cudaStreamCreate(&on[c]));
        CU(cudaMalloc(&place[c], in_chunk * sizeof *fragments));
        launch_chunk(c, place[c], on[c]);
        if (wait) {
            CU(cudaStreamSynchronize(on[c]));
            CU(cudaFree(place[c]));
        }
        if (own_streams)
            CU(cudaStreamDestroy(on[c]));
    }
    if (wait)
        return;
    synchronise();
    for (int c = 0; c < chunks; c++)
        CU(cudaFree(place[c]));
}

static void allocated_beforehand(void)
{
    for (int c = 0; c < chunks; c++)
        launch_chunk(c, descriptors + c * in_chunk, stream);
    synchronise();
}

/* The pool keeps what is freed (see open_gpu), so the GPU's memory is not mapped anew for each chunk. Allocating and
   freeing take their turn in the stream: nothing waits. */
static void allocated_from_pool(void)
{
    for (int c = 0; c < chunks; c++) {
        void *place;
        CU(cudaMallocFromPoolAsync(&place, in_chunk * sizeof *fragments, pool, stream));
        launch_chunk(c, place, stream);
        CU(cudaFreeAsync(place, stream));
    }
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

/* Lets the stream wait until that many chunks are described. The function is the driver's, which this program is not
   linked with. */
static void wait_for_chunks(uint32_t described)
{
    static decltype(&cuStreamWaitValue32) wait;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    if (!wait)
        CU(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait, 12000, cudaEnableDefault, &found));
#else
    if (!wait)
        CU(cudaGetDriverEntryPoint("cuStreamWaitValue32", (void **)&wait, cudaEnableDefault, &found));
#endif
    if (wait && wait(stream, (CUdeviceptr)&late->described, described, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS)
        return;
    printf("cuStreamWaitValue32: this driver has none, or refuses\n");
    exit(1);
}

/* Stands for the network: writes a chunk's descriptors, then how many there are, then that they are there. */
static void describe_chunk(uint32_t c)
{
    for (uint32_t i = 0; i < in_chunk; i++) {
        const kvprim_fragment f = fragments[c * in_chunk + i];
        late->meta[c][i] = {(uint32_t)f.src_offset, (uint32_t)f.bytes, f.dst_offset};
    }
    late->count[c] = in_chunk;
    late->described.store(c + 1, std::memory_order_release);
}

/* With both, all work is enqueued before any descriptor exists. A stream that waits for them takes no multiprocessor.
   With one of both, only that: chunks are then described beforehand, or not unpacked. */
static void late_descriptors(bool waits, bool unpacks)
{
    kvprim_unpack_meta_desc unpack = {};
    unpack.src = src;
    unpack.dst = dst;
    unpack.src_bytes = unpack.dst_bytes = all_bytes;
    unpack.max_count = in_chunk;
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    late->described = 0;
    memset(late->meta, 0, sizeof late->meta);
    memset(late->count, 0, sizeof late->count);
    for (uint32_t c = 0; c < chunks && !waits; c++)
        describe_chunk(c);
    for (uint32_t c = 0; c < chunks; c++) {
        if (waits)
            wait_for_chunks(c + 1);
        unpack.meta = late->meta[c];
        unpack.count = &late->count[c];
        if (unpacks)
            kvprim(kvprim_cuda_unpack_meta(&unpack, &launch));
    }
    for (uint32_t c = 0; c < chunks && waits; c++)
        describe_chunk(c);
    synchronise();
}

/* Reorders by pointers, which need not be consecutive. */
static void to_own_buffers(void)
{
    static kvprim_copy_item items[all_fragments];
    for (int i = 0; i < all_fragments; i++)
        items[i] = {src + fragments[i].src_offset, buffers[i], fragments[i].bytes};
    const kvprim_copy_desc copy = {items, all_fragments, 0};
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    kvprim(kvprim_cuda_copy(&copy, &launch));
    synchronise();
}

static void copy_per_fragment(void)
{
    for (const kvprim_fragment &f : fragments)
        CU(cudaMemcpyAsync(dst + f.dst_offset, src + f.src_offset, f.bytes, cudaMemcpyDeviceToDevice, stream));
    synchronise();
}

static double now_ms(void)
{
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* Overwrites what a way is to write: dst, or the buffers. */
static void clear(bool own_buffers)
{
    CU(cudaMemset(dst, 0xfe, all_bytes));
    for (int i = 0; i < all_fragments && own_buffers; i++)
        CU(cudaMemset(buffers[i], 0xfe, fragment_bytes));
    CU(cudaDeviceSynchronize());
}

/* Returns how many fragments are wrong. */
static int count_wrong(bool own_buffers)
{
    static unsigned char got[all_bytes];
    int wrong = 0;
    if (!own_buffers)
        CU(cudaMemcpy(got, dst, all_bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < all_fragments; i++) {
        const kvprim_fragment f = fragments[i];
        if (own_buffers)
            CU(cudaMemcpy(got + f.dst_offset, buffers[i], f.bytes, cudaMemcpyDeviceToHost));
        wrong += memcmp(got + f.dst_offset, received + f.src_offset, f.bytes) != 0;
    }
    return wrong;
}

/* Prints the fastest of some rounds, and checks the bytes of the first, which is not timed, and of the last. */
static int run(const char *way, void (*unpack)(void), bool unpacks = true)
{
    const bool own_buffers = unpack == to_own_buffers;
    double best = 1e9;
    int wrong = 0;
    for (int r = 0; r < rounds; r++) {
        if (r == 0 || r == rounds - 1)
            clear(own_buffers);
        const double begin = now_ms();
        unpack();
        const double ms = now_ms() - begin;
        if (unpacks && (r == 0 || r == rounds - 1))
            wrong += count_wrong(own_buffers);
        if (r > 0 && ms < best)
            best = ms;
    }
    printf("%-52s %8.4f %7.2f  %s\n", way, best / chunks, all_bytes / best * 1e-6,
           wrong     ? "WRONG"
           : unpacks ? "ok"
                     : "");
    return wrong;
}

/* By default a pool gives its memory back to the system whenever a stream is synchronised; the next allocation then
   takes as long as cudaMalloc. A threshold above what is used keeps it. Those who use the device's default pool set it
   there. */
static void open_gpu(void)
{
    cudaMemPoolProps props = {};
    uint64_t keep = UINT64_MAX;
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    CU(cudaMemPoolCreate(&pool, &props));
    CU(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    src = (char *)on_device(all_bytes, received);
    dst = on_device<char>(all_bytes);
    descriptors = on_device<kvprim_fragment>(all_fragments);
    for (char *&buffer : buffers)
        buffer = on_device<char>(fragment_bytes);
    CU(cudaMallocHost(&late, sizeof *late));
    stream = new_stream();
}

/* What else a GPU may do: one kernel after another, of 2 ms each. */
static std::atomic<bool> busy;
__global__ static void spin(long long cycles)
{
    for (const long long end = clock64() + cycles; clock64() < end;)
        continue;
}

static void keep_busy(void)
{
    int khz = 0;
    CU(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    for (const cudaStream_t other = new_stream(); busy;) {
        spin<<<1, 1, 0, other>>>(2LL * khz);
        CU(cudaStreamSynchronize(other));
    }
}

int main(void)
{
    need_gpu();
    for (size_t i = 0; i < all_bytes; i++)
        received[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < all_fragments; i++) /* fragment i arrived as number i * 37 of its chunk */
        fragments[i] = {(i / in_chunk * in_chunk + i * 37 % in_chunk) * fragment_bytes, i * fragment_bytes,
                        fragment_bytes};
    open_gpu();

    printf("%-52s %8s %7s\n", "", "ms/chunk", "GB/s");
    int wrong = run("per chunk: stream, allocation, synchronise", [] { chunk_by_chunk(true, true); });
    wrong += run("one stream for all", [] { chunk_by_chunk(false, true); });
    wrong += run("one synchronise at the end", [] { chunk_by_chunk(false, false); });
    wrong += run("memory allocated beforehand", allocated_beforehand);
    wrong += run("or from a stream-ordered pool: cudaFreeAsync", allocated_from_pool);
    wrong += run("all chunks in one launch: kvprim_cuda_unpack", one_launch);
    wrong += run("descriptors written later: kvprim_cuda_unpack_meta", [] { late_descriptors(true, true); });
    wrong += run("  of these, the unpacks: described beforehand", [] { late_descriptors(false, true); });
    wrong += run(
        "  of these, the waits: nothing is unpacked", [] { late_descriptors(true, false); }, false);
    wrong += run("each to its own buffer, one launch: kvprim_cuda_copy", to_own_buffers);
    wrong += run("cudaMemcpyAsync per fragment", copy_per_fragment);
    busy = true;
    std::thread others(keep_busy);
    wrong += run("the first way, beside other kernels", [] { chunk_by_chunk(true, true); });
    wrong += run("one launch, beside other kernels", one_launch);
    busy = false;
    others.join();
    printf("%d fragments unpacked in 9 ways, each compared twice: %d wrong\n", all_fragments, wrong);
    return wrong != 0;
}

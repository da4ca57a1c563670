/* SPDX-License-Identifier: MIT */
/* kvprim_cuda_unpack_meta enqueued before its descriptors and their count exist, on a GPU. Part of test_cuda.cu. */
#ifndef TEST_LATE_H
#define TEST_LATE_H

#include <atomic>

/* How the stream waits until the host has written the descriptors. */
enum late_gate { WAIT_VALUE, HOST_FUNCTION };

enum { late_most = 600, late_bytes = 1 << 20, late_list = (1 + late_most) * 16 };

/* Pinned host memory, which the GPU reads and writes: what the host writes late, and what comes of it. The counter comes
   after the bytes of `got` and `want`. */
struct late_memory {
    std::atomic<uint32_t> open; /* 1: the stream may go on */
    alignas(16) uint64_t count[2];
    kvprim_unpack_meta_item meta[late_most];
    unsigned char src[late_bytes], want[late_bytes + 4], got[late_bytes + 4];
};
static late_memory *late;

/* cuStreamWaitValue32, or NULL: of the driver, which this program is not linked with. */
typedef int (*wait_value_function)(cudaStream_t, unsigned long long, uint32_t, unsigned);
static wait_value_function find_wait_value()
{
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuStreamWaitValue32", &function, cudaEnableDefault, &found);
#endif
    (void)cudaGetLastError();
    return error == cudaSuccess ? reinterpret_cast<wait_value_function>(function) : nullptr;
}

static void CUDART_CB wait_until_open(void *open)
{
    while (static_cast<std::atomic<uint32_t> *>(open)->load() != 1)
        std::this_thread::yield();
}

/* Writes descriptors of fragments in random order, of which some reach outside, a count that may be too large, and what
   must come of them. */
static void write_late(uint64_t round)
{
    const uint64_t n = below(late_most + 1), slot = late_bytes / late_most;
    const std::vector<int64_t> turn = shuffled(late_most);
    uint32_t rejected = 0;
    for (size_t i = 0; i < late_most; i++) {
        const uint64_t bytes = below(slot - 8);
        late->meta[i] = {uint32_t(below(late_bytes - bytes)), uint32_t(bytes), uint64_t(turn[i]) * slot + below(8)};
        if (chance(20))
            late->meta[i].dst_offset += late_bytes;
    }
    late->count[0] = round % 4 == 3 ? late_most + n : n;
    kvprim_unpack_meta_desc d = {};
    d.src = late->src, d.dst = late->want, d.src_bytes = d.dst_bytes = late_bytes;
    d.meta = late->meta, d.count = late->count, d.max_count = late_most, d.rejected = &rejected;
    memset(late->want, 0x5a, late_bytes);
    CHECK(kvprim_unpack_meta(&d) == KVPRIM_OK);
    memcpy(late->want + late_bytes, &rejected, 4);
}

/* mapped: the GPU reads the descriptors in the host's memory; otherwise they are copied to it, in stream order. */
static void enqueue_late(unsigned char *src, unsigned char *dst, unsigned char *list, bool mapped, late_gate gate,
                         wait_value_function wait)
{
    const cudaStream_t stream = main_launch.stream;
    CUDA(cudaMemsetAsync(dst, 0x5a, late_bytes, stream));
    CUDA(cudaMemsetAsync(dst + late_bytes, 0, 4, stream));
    if (gate == WAIT_VALUE)
        CHECK(wait(stream, reinterpret_cast<uintptr_t>(&late->open), 1, 1 /* equal */) == 0);
    else
        CUDA(cudaLaunchHostFunc(stream, wait_until_open, &late->open));
    if (!mapped)
        CUDA(cudaMemcpyAsync(list, late->count, late_list, cudaMemcpyHostToDevice, stream));
    kvprim_unpack_meta_desc d = {};
    d.src = src, d.dst = dst, d.src_bytes = d.dst_bytes = late_bytes;
    d.meta = mapped ? late->meta : reinterpret_cast<kvprim_unpack_meta_item *>(list + 16);
    d.count = mapped ? late->count : reinterpret_cast<uint64_t *>(list);
    d.max_count = late_most, d.rejected = reinterpret_cast<uint32_t *>(dst + late_bytes);
    if (kvprim_cuda_unpack_meta(&d, &main_launch) != KVPRIM_OK)
        fail("%s: %s", current, kvprim_last_error());
    memset(&d, 0xff, sizeof d);
    CUDA(cudaMemcpyAsync(late->got, dst, late_bytes + 4, cudaMemcpyDeviceToHost, stream));
}

/* Lets the stream go on once the descriptors are there, and compares. `enqueue` is given the work of a round. */
static void late_rounds(uint64_t rounds, const std::function<void()> &enqueue)
{
    for (uint64_t round = 0; round < rounds; round++) {
        late->open = 0;
        memset(late->meta, 0xff, sizeof late->meta); /* nothing that may be moved */
        late->count[0] = UINT64_MAX;
        enqueue();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        CHECK(cudaStreamQuery(main_launch.stream) == cudaErrorNotReady);
        (void)cudaGetLastError();
        write_late(round);
        late->open = 1;
        CUDA(cudaStreamSynchronize(main_launch.stream));
        if (memcmp(late->got, late->want, late_bytes + 4) != 0)
            fail("%s, round %llu: bytes or the counter are wrong", current, print_u64(round));
    }
}

static void one_late(unsigned char *src, unsigned char *dst, unsigned char *list, bool mapped, late_gate gate,
                     wait_value_function wait)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const auto enqueue = [&] { enqueue_late(src, dst, list, mapped, gate, wait); };
    snprintf(current, sizeof current, "late descriptors, %s, after %s, pdl %d", mapped ? "mapped" : "on the GPU",
             gate == WAIT_VALUE ? "cuStreamWaitValue32" : "a host function", main_launch.pdl);
    late_rounds(quick ? 2 : 8, enqueue);
    begin_capture();
    enqueue();
    CUDA(cudaStreamEndCapture(main_launch.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    late_rounds(quick ? 2 : 8, [&] { CUDA(cudaGraphLaunch(exec, main_launch.stream)); });
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

static void test_late()
{
    const wait_value_function wait = find_wait_value();
    const gpu_array<unsigned char> dst(late_bytes + 16, 0), list(late_list, 0xff);
    CUDA(cudaMallocHost(reinterpret_cast<void **>(&late), sizeof *late));
    fill(late->src, late_bytes);
    const gpu_array<unsigned char> src(late->src, late_bytes);
    CHECK(wait != nullptr);
    for (main_launch.pdl = 0; main_launch.pdl < 2; main_launch.pdl++)
        for (const bool mapped : {true, false})
            for (const late_gate gate : {WAIT_VALUE, HOST_FUNCTION})
                if (gate == HOST_FUNCTION || wait)
                    one_late(src.p, dst.p, list.p, mapped, gate, wait);
    main_launch.pdl = 0;
    CUDA(cudaFreeHost(late));
}

#endif /* TEST_LATE_H */

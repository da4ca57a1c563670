/* SPDX-License-Identifier: MIT */
/* Several GPUs at once: what the benchmarks of collectives have in common. A rank is a thread with a GPU; all GPUs of
   the machine take part. A program includes kvprim_nccl.h first. */
#ifndef BENCH_RANKS_H
#define BENCH_RANKS_H

#include "bench_gpu.h"
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <nccl.h>

#define NCCL(call) check_nccl(call, #call, __LINE__)

inline void check_nccl(ncclResult_t result, const char *call, int line)
{
    if (result == ncclSuccess)
        return;
    fprintf(stderr, "line %d: %s: %s\n", line, call, ncclGetErrorString(result));
    give_up(2);
}

static int world;
static const size_t most_bytes = 64 * MiB;

struct rank_state {
    int rank;
    kvprim_comm comm;
    ncclComm_t nccl; /* separate: what is registered with comm does not help it */
    cudaStream_t stream;
    cudaEvent_t start, end;
    char *x, *y, *window;      /* most_bytes each, the window twice that */
    unsigned long long *wrong; /* elements that a check has found */
};
static std::vector<rank_state> ranks;

inline void meet()
{
    static std::mutex mutex;
    static std::condition_variable changed;
    static int here;
    static uint64_t times;
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t now = times;
    if (++here == world) {
        here = 0, times++;
        changed.notify_all();
    } else {
        changed.wait(lock, [now] { return times != now; });
    }
}

inline void on_all(const std::function<void(rank_state &)> &body)
{
    std::vector<std::thread> threads;
    for (int r = 0; r < world; r++)
        threads.emplace_back([&body, r] {
            CUDA(cudaSetDevice(r));
            body(ranks[size_t(r)]);
        });
    for (std::thread &t : threads)
        t.join();
}

/* Lets all GPUs write to each other's memory. Returns false if not every GPU can write to the next one's. */
inline bool open_links()
{
    for (int r = 0; r < world; r++) {
        int can = 0;
        CUDA(cudaDeviceCanAccessPeer(&can, r, (r + 1) % world));
        if (!can)
            return false;
    }
    for (int r = 0; r < world * world; r++)
        if (r / world != r % world) {
            CUDA(cudaSetDevice(r / world));
            const cudaError_t error = cudaDeviceEnablePeerAccess(r % world, 0);
            if (error != cudaErrorPeerAccessAlreadyEnabled)
                CUDA(error);
            (void)cudaGetLastError();
        }
    return true;
}

/* Ends the program if the check that is enqueued has found wrong elements. */
inline void check_none_wrong(rank_state &r, const std::string &what)
{
    unsigned long long wrong;
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(&wrong, r.wrong, sizeof wrong, cudaMemcpyDeviceToHost, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    if (wrong == 0)
        return;
    fprintf(stderr, "FAIL %s: %llu elements of rank %d are wrong\n", what.c_str(), wrong, r.rank);
    give_up(1);
}

/* ---- what tensors hold ---- */

/* Element i of rank r's x: a small integer, so that sums of bf16 are exact. */
__host__ __device__ inline int sample(int rank, uint64_t i)
{
    return int((i * 2654435761u >> 13) % 61) + rank * 3 - 40;
}

/* The same in tensors of type T. e4m3: -1, 0 or 1, because it counts to 16. uint32_t: two of bf16. */
template <class T> __device__ T sample_as(int rank, uint64_t i)
{
    return T(float(sample(rank, i)));
}
template <> __device__ inline __nv_fp8_e4m3 sample_as<__nv_fp8_e4m3>(int rank, uint64_t i)
{
    return __nv_fp8_e4m3(float(sample(rank, i) % 2));
}
template <> __device__ inline uint32_t sample_as<uint32_t>(int rank, uint64_t i)
{
    const uint32_t low = __bfloat16_as_ushort(sample_as<__nv_bfloat16>(rank, 2 * i)),
                   high = __bfloat16_as_ushort(sample_as<__nv_bfloat16>(rank, 2 * i + 1));
    return low | high << 16;
}

template <class T> __global__ void write_samples(T *x, int rank, uint64_t count)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        x[i] = sample_as<T>(rank, i);
}

/* Writes most_bytes. */
template <class T> void enqueue_samples(rank_state &r, char *x)
{
    write_samples<<<1024, 256, 0, r.stream>>>(reinterpret_cast<T *>(x), r.rank, most_bytes / sizeof(T));
    CUDA(cudaGetLastError());
}

enum reduction { copy_of, sum_of, mean_of, most_of };

/* What a result must be: element i is made of elements first + i of the x of ranks from to to - 1. */
struct expectation {
    reduction by;
    int from, to;
    uint64_t first;
};

template <class T> __device__ T expected_as(const expectation &e, uint64_t i)
{
    float sum = 0, most = -INFINITY;
    for (int r = e.from; r < e.to; r++) {
        const float one = float(sample_as<T>(r, e.first + i));
        sum += one, most = fmaxf(most, one);
    }
    return T(e.by == most_of ? most : e.by == mean_of ? sum / float(e.to - e.from) : sum);
}
template <> __device__ inline uint32_t expected_as<uint32_t>(const expectation &e, uint64_t i)
{
    uint32_t sum = 0;
    for (int r = e.from; r < e.to; r++)
        sum += sample_as<uint32_t>(r, e.first + i);
    return sum;
}

template <class T> __device__ bool same(T a, T b)
{
    return float(a) == float(b);
}
template <> __device__ inline bool same<uint32_t>(uint32_t a, uint32_t b)
{
    return a == b;
}

template <class T> __global__ void count_others(const T *x, expectation e, uint64_t count, unsigned long long *wrong)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        if (!same(x[i], expected_as<T>(e, i)))
            atomicAdd(wrong, 1ull);
}

/* Ends the program if elements of x are not as expected. */
template <class T>
void check_result(rank_state &r, const char *x, const expectation &e, uint64_t count, const std::string &what)
{
    CUDA(cudaMemsetAsync(r.wrong, 0, sizeof *r.wrong, r.stream));
    count_others<<<1024, 256, 0, r.stream>>>(reinterpret_cast<const T *>(x), e, count, r.wrong);
    check_none_wrong(r, what);
}

/* ---- ranks ---- */

/* Makes one more communicator of all ranks; collective. */
inline void open_comm(rank_state &r, kvprim_comm *comm, kvprim_comm_desc desc)
{
    static kvprim_comm_id id;
    meet();
    if (r.rank == 0)
        check_kvprim(kvprim_comm_new_id(&id));
    meet();
    desc.rank = r.rank, desc.world = world, desc.id = id;
    check_kvprim(kvprim_comm_init(comm, &desc));
}

inline void open_rank(rank_state &r)
{
    static ncclUniqueId nccl_id;
    kvprim_comm_desc desc = {};
    desc.buffer_bytes = 2 * most_bytes;
    desc.nccl_window = 1; /* for NCCL's way with a window */
    open_comm(r, &r.comm, desc);
    if (r.rank == 0)
        NCCL(ncclGetUniqueId(&nccl_id));
    meet();
    NCCL(ncclCommInitRank(&r.nccl, world, nccl_id, r.rank));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&r.start));
    CUDA(cudaEventCreate(&r.end));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.x), most_bytes));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.y), most_bytes));
    r.window = static_cast<char *>(kvprim_comm_buffer(&r.comm, nullptr));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.wrong), sizeof *r.wrong));
    enqueue_samples<__nv_bfloat16>(r, r.x);
    enqueue_samples<__nv_bfloat16>(r, r.window);
    CUDA(cudaStreamSynchronize(r.stream));
    if (r.rank == 0)
        printf("%s\n", kvprim_comm_describe(&r.comm));
}

inline void close_rank(rank_state &r)
{
    CUDA(cudaFree(r.x));
    CUDA(cudaFree(r.y));
    CUDA(cudaFree(r.wrong));
    NCCL(ncclCommDestroy(r.nccl));
    check_kvprim(kvprim_comm_destroy(&r.comm));
}

/* Opens a rank on each GPU. Ends the program, and says so, if there are too few. */
inline void open_ranks()
{
    if (cudaGetDeviceCount(&world) != cudaSuccess || world < 2) {
        printf("skip: the benchmark of collectives takes two GPUs, there are %d\n", world);
        exit(0);
    }
    world = std::min(world, 8);
    ranks.resize(size_t(world));
    for (int r = 0; r < world; r++)
        ranks[size_t(r)].rank = r;
    on_all(open_rank);
}

/* ---- timing ----

   As in bench_gpu.h, on all GPUs at once. A small NCCL call first makes them begin together. The slowest one counts. */

/* A way to do a job. */
struct rank_way {
    std::function<void(rank_state &, int)> enqueue; /* call i of a graph, which has an even number of them */
    std::function<void(rank_state &)> clear = {};   /* what the calls write; may be empty */
    std::function<void(rank_state &)> verify = {};  /* ends the program if they wrote something else; may be empty */
    double us = 0;                                  /* the result: of a call */
};

/* Returns the milliseconds of what `body` enqueues. */
template <class function> double time_ms(rank_state &r, cudaStream_t on, function body)
{
    float ms;
    CUDA(cudaEventRecord(r.start, on));
    body();
    CUDA(cudaEventRecord(r.end, on));
    CUDA(cudaStreamSynchronize(on));
    CUDA(cudaEventElapsedTime(&ms, r.start, r.end));
    return double(ms);
}

inline cudaGraphExec_t capture(rank_state &r, const rank_way &way, int calls)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; i++)
        way.enqueue(r, i);
    CUDA(cudaStreamEndCapture(r.stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return executable;
}

/* Returns a graph of so many calls, after it has checked what a replay writes. */
inline cudaGraphExec_t prepare(rank_state &r, const rank_way &way, int calls)
{
    way.enqueue(r, 0); /* kernels are loaded and NCCL connects at the first call, which should not be captured */
    CUDA(cudaStreamSynchronize(r.stream));
    const cudaGraphExec_t graph = capture(r, way, calls);
    meet();
    if (way.clear)
        way.clear(r);
    CUDA(cudaStreamSynchronize(r.stream));
    meet(); /* a rank may write to memory that another one has just cleared */
    CUDA(cudaGraphLaunch(graph, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    if (way.verify)
        way.verify(r);
    meet();
    return graph;
}

/* Returns the milliseconds of the graph on the slowest GPU. */
inline double time_once(rank_state &r, cudaGraphExec_t graph)
{
    static double ms[8];
    meet();
    spin<<<1, 1, 0, r.stream>>>(300000);
    NCCL(ncclAllReduce(r.x, r.y, 1, ncclBfloat16, ncclSum, r.nccl, r.stream));
    ms[r.rank] = time_ms(r, r.stream, [&] { CUDA(cudaGraphLaunch(graph, r.stream)); });
    meet();
    const double slowest = *std::max_element(ms, ms + world);
    meet();
    return slowest;
}

/* Sets .us of every way: the median of graphs of so many calls. */
inline void measure(std::vector<rank_way> &all, int calls)
{
    on_all([&](rank_state &r) {
        std::vector<cudaGraphExec_t> graphs;
        std::vector<std::vector<double>> us(all.size());
        for (const rank_way &way : all)
            graphs.push_back(prepare(r, way, calls));
        for (int k = 0; k < (quick ? 3 : 9); k++)
            for (size_t j = 0; j < all.size(); j++) { /* back and forth */
                const size_t who = k % 2 ? all.size() - 1 - j : j;
                us[who].push_back(1000 * time_once(r, graphs[who]) / calls);
            }
        for (size_t j = 0; j < all.size(); j++) {
            if (r.rank == 0)
                all[j].us = median(us[j]);
            CUDA(cudaGraphExecDestroy(graphs[j]));
        }
    });
}

inline int calls_in_graph(size_t bytes)
{
    return bytes <= 1 << 20 ? 50 : 10;
}

#endif /* BENCH_RANKS_H */

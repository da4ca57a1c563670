/* SPDX-License-Identifier: MIT */
/* What the tests of kvprim_nccl.h on GPUs share: ranks, which are threads of one process or a process each; checks;
   sums that are made and verified on the GPU. The headers may be implemented by another object.

       program [OPTION...]                a thread per GPU
       program processes [OPTION...]      a process per GPU; with one GPU, two processes that share it
       program_one [OPTION...]            linked with nccl_none.cpp: two threads that share one GPU

   quick: fewer cases; on, off: whether own kernels must be on; only=TEXT: only tests whose names hold it, or one of
   several texts, with | between them; ranks=N, not for a thread per GPU: so many ranks, which share the GPUs if these
   are fewer. program_one takes several of these, and runs one after another.

   Processes that share a GPU take turns. The kernels of threads that share one run at the same time, also under
   compute-sanitizer. For these threads:
   - A communicator gets its memory and its exchange from the test (desc.peers, desc.exchange), and own kernels serve
     every size that they can. What is NCCL's fails, so tests skip it.
   - CUDA may wait for all running kernels, which may wait for the rank that makes this call: when it frees memory, ends
     a communicator, makes or ends a graph, copies from or to the host, or does something the first time: uses a stream,
     runs a kernel, also one of its own for a memset. So ranks meet after such calls, and before copies to the host, and
     all is used once before the tests begin. counted.cu does that with the kernels of kvprim_nccl.h, which need it only
     under compute-sanitizer: there they have a stack.
   - The first work on a stream after communicators came and went may wait for all running kernels, too (H200, driver
     580: the kernels of 6 or 7 of 8 ranks ran, those of the others did not begin; why is not known). So each test, and
     the use of a new communicator, begins with an empty kernel on each stream.
   - seconds=N is how long own kernels wait for a rank, unless a test says otherwise; default 8. When the ranks' own
     communicator has failed, no further test runs. */
#ifndef NCCL_RANKS_H
#define NCCL_RANKS_H

#include "../../kvprim_nccl.h"
#include "../harness.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* State of all ranks, in memory that processes share. */
struct shared_state {
    harness counts;
    std::atomic<int> here;
    std::atomic<uint64_t> meetings;
    kvprim_comm_id id;
    unsigned long long scratch[8]; /* for a test's own use */
    char bytes[8][512];
};
static shared_state *shared;
static bool quick, processes, one_gpu; /* one_gpu: ranks are threads that share it, and NCCL is nccl_none.cpp */
static int one_gpu_seconds = 8;        /* how long own kernels wait then */
static int world, gpus, only_rank;     /* only_rank: the rank of this process, if each rank is one */
static const char *expected = "", *only = "";

/* Ends the program, because the other ranks would wait for ever. */
[[noreturn]] static void die(const char *what, int line, const char *why)
{
    printf("FAIL line %d: %s: %s\n", line, what, why);
    fflush(stdout);
    _exit(2);
}

static void check_cuda(cudaError_t error, const char *call, int line)
{
    if (error != cudaSuccess)
        die(call, line, cudaGetErrorString(error));
}
#define CUDA(call) check_cuda(call, #call, __LINE__)

#define IS(call, wanted) CHECK_ERROR(call, wanted, "")
#define OK(call) IS(call, KVPRIM_OK)

static double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void sleep_ms(int ms)
{
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

/* ---- ranks ---- */

static void meet()
{
    const uint64_t now = shared->meetings;
    const double begun = seconds();
    if (++shared->here == world) {
        shared->here = 0;
        shared->meetings++;
        return;
    }
    while (shared->meetings == now) {
        if (seconds() - begun > 90)
            die("a rank waits for another", __LINE__, "90 s");
        std::this_thread::yield();
    }
}

/* After a call in which CUDA may wait for the kernels of all ranks: see above. */
static void meet_on_gpu()
{
    if (one_gpu)
        meet();
}

struct rank_state {
    int rank;
    kvprim_comm comm;
    cudaStream_t stream, other_stream;
    char *device[3];     /* room_bytes each */
    uint32_t *wrong;     /* on the device; verify counts into it */
    uint64_t *iteration; /* on the device; advance counts it up */
};
static const size_t room_bytes = size_t(80) << 20, buffer_bytes = size_t(176) << 20;
static std::vector<rank_state> ranks;
static void warm_up_others(rank_state &r); /* launches each of the program's own kernels, with nothing to do */

/* With one_gpu: what communicators exchange through, by turns, and all ranks' pointers to it. The first one is for
   rank_state's, which lives all the time. */
enum { peer_sets = 4 };
static const size_t peer_bytes = size_t(33) << 20;
static void *peers_of[peer_sets][8];
static int descs_made[8]; /* by each rank */

/* Which GPU a rank has. NCCL accepts two ranks on one GPU if it believes them to be on two machines. */
static int device_of(int rank)
{
    return rank % gpus;
}

static void take_device(int rank)
{
    if (gpus < world && processes)
        setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    CUDA(cudaSetDevice(device_of(rank)));
}

static void on_all(const std::function<void(rank_state &)> &body)
{
    std::vector<std::thread> threads;
    if (processes) {
        body(ranks[size_t(only_rank)]);
        return meet();
    }
    for (int r = 0; r < world; r++)
        threads.emplace_back([&body, r] {
            take_device(r);
            body(ranks[size_t(r)]);
        });
    for (std::thread &t : threads)
        t.join();
}

static bool speaks()
{
    return !processes || only_rank == 0;
}

static bool is_wanted(const char *name)
{
    for (const char *text = only;; text++) {
        const size_t length = strcspn(text, "|");
        if (strstr(name, std::string(text, length).c_str()))
            return true;
        text += length;
        if (!*text)
            return false;
    }
}

/* A test that hangs ends the program. */
static const char *running = "";
static void end_hung_test(int)
{
    static const char said[] = "FAIL, not done in 200 s: ";
    (void)!write(1, said, sizeof said - 1);
    (void)!write(1, running, strlen(running));
    (void)!write(1, "\n", 1);
    _exit(2);
}

/* With one_gpu, says that a test cannot run, or not all of it, and why. Returns one_gpu. */
static std::atomic<const char *> left_out;
static bool lacks_nccl(const char *what)
{
    if (one_gpu)
        skip("%s, and NCCL runs no two ranks on one GPU", what);
    return one_gpu;
}

static bool leaves_out(const char *what)
{
    if (one_gpu)
        left_out = what;
    return one_gpu;
}

/* With one_gpu: the ranks' communicator has failed. */
static bool is_over()
{
    bool over = false;
    for (const rank_state &r : ranks)
        over = over || (one_gpu && r.comm.stop && *r.comm.stop);
    return over;
}

static void wake_streams(rank_state &r);

static void run(const char *name, const std::function<void(rank_state &)> &body)
{
    if (!is_wanted(name) && strcmp(name, "open") != 0 && strcmp(name, "close") != 0)
        return;
    if (is_over())
        return (void)printf("  not run: %s\n", name);
    const double begun = seconds();
    running = name;
    signal(SIGALRM, end_hung_test);
    alarm(200);
    on_all([&body](rank_state &r) {
        wake_streams(r);
        body(r);
    });
    alarm(0);
    if (speaks()) {
        char text[120];
        snprintf(text, sizeof text, "nccl: %s (%.1f s)", name, seconds() - begun);
        finish_test(text);
        if (const char *const what = left_out.exchange(nullptr)) {
            skip("%s", what);
            snprintf(text, sizeof text, "nccl: the rest of that");
            finish_test(text);
        }
    }
    if (processes) /* nobody fails the next test before this one is counted */
        meet();
}

/* The id of a communicator that all ranks open together. */
static kvprim_comm_id shared_id(const rank_state &r)
{
    meet();
    if (r.rank == 0)
        OK(kvprim_comm_new_id(&shared->id));
    meet();
    const kvprim_comm_id mine = shared->id;
    meet();
    return mine;
}

/* desc.exchange for ranks that can meet. */
static int exchange_by_meeting(void *context, const void *mine, void *all, size_t bytes)
{
    const rank_state &r = *static_cast<rank_state *>(context);
    if (bytes > sizeof shared->bytes[0])
        return 1;
    memcpy(shared->bytes[r.rank], mine, bytes);
    meet();
    for (int other = 0; other < world; other++)
        memcpy(static_cast<char *>(all) + size_t(other) * bytes, shared->bytes[other], bytes);
    meet();
    return 0;
}

/* desc.max_sms, or 0 for the default: with one_gpu at most so many that kernels of two communicators and all ranks fit
   on it at once. */
static int fitting_sms(int wanted)
{
    int sms = 0;
    if (!one_gpu)
        return wanted;
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const int most = std::max(1, sms / (2 * world));
    return wanted && wanted < most ? wanted : most;
}

static kvprim_comm_desc desc_of(const rank_state &r, size_t bytes, int timeout_ms = 0, int deterministic = 0)
{
    kvprim_comm_desc desc = {};
    desc.rank = r.rank;
    desc.world = world;
    desc.id = shared_id(r);
    desc.buffer_bytes = bytes;
    desc.timeout_ms = timeout_ms ? timeout_ms : one_gpu ? one_gpu_seconds * 1000 : 0;
    desc.deterministic = deterministic;
    desc.max_sms = fitting_sms(0);
    if (one_gpu) {
        const int made = descs_made[r.rank]++;
        desc.exchange = exchange_by_meeting, desc.exchange_context = &ranks[size_t(r.rank)];
        desc.peers = peers_of[made ? 1 + made % (peer_sets - 1) : 0], desc.peer_bytes = peer_bytes;
        desc.all_reduce_limit = desc.reduce_scatter_limit = desc.all_gather_limit = SIZE_MAX;
    }
    return desc;
}

/* ---- sums of fp16, bf16 and fp32, made and verified on the GPU ----

   Where own kernels sum, the bits must be those of a sum in fp32 in the order of the ranks. Elsewhere the result must
   be near it. */

template <class T> __host__ __device__ T from_float(float f);
template <> __host__ __device__ float from_float<float>(float f)
{
    return f;
}
template <> __host__ __device__ __half from_float<__half>(float f)
{
    return __float2half_rn(f);
}
template <> __host__ __device__ __nv_bfloat16 from_float<__nv_bfloat16>(float f)
{
    return __float2bfloat16_rn(f);
}

static __device__ uint64_t mixed(uint64_t seed, uint64_t i, int rank)
{
    uint64_t h =
        (seed * 0x9e3779b97f4a7c15ull + i * 0xbf58476d1ce4e5b9ull) ^ (uint64_t(rank) + 1) * 0x94d049bb133111ebull;
    h ^= h >> 29, h *= 0xff51afd7ed558ccdull, h ^= h >> 32;
    return h;
}

/* exact: one of many values, whose sums round; one in 64 is -0, huge, or a NaN of all ones. Otherwise small integers,
   whose sums are the same in any order. */
template <class T> __device__ T value_at(uint64_t seed, uint64_t i, int rank, bool exact)
{
    const uint64_t h = mixed(seed, i, rank);
    if (!exact)
        return from_float<T>(float(h >> 40 & 15));
    if (h % 64 == 0) {
        const uint32_t kind = uint32_t(h >> 8) % 3;
        if (kind == 0) {
            T nan;
            memset(&nan, 0xff, sizeof nan);
            return nan;
        }
        return from_float<T>(kind == 1 ? -0.0f : 60000.0f);
    }
    return from_float<T>(__fmul_rn(float(int32_t(h >> 40) - (1 << 23)), 0.0003f)); /* not fused with a sum */
}

template <class T> __device__ uint32_t bits_of(T v)
{
    uint32_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}

template <class T>
__global__ void fill_values(T *out, size_t count, const uint64_t *iteration, uint64_t seed, int rank, bool exact)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        out[i] = value_at<T>(seed + *iteration, i, rank, exact);
}

template <class T>
__global__ void verify(const T *got, size_t count, const uint64_t *iteration, uint64_t seed, int ranks_count,
                       uint32_t *wrong, bool exact, size_t first = 0)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        float sum = float(value_at<T>(seed + *iteration, first + i, 0, exact));
        for (int r = 1; r < ranks_count; r++)
            sum += float(value_at<T>(seed + *iteration, first + i, r, exact));
        const T wanted = from_float<T>(sum);
        const bool both_nan = isnan(float(wanted)) && isnan(float(got[i]));
        if (!both_nan && bits_of(wanted) != bits_of(got[i]))
            atomicAdd(wrong, 1);
    }
}

/* Lets its successors start, waits for so many nanoseconds, and then writes. */
template <class T> __global__ void fill_late(T *out, size_t count, float value, uint64_t ns)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    uint64_t begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begun < ns);
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        out[i] = T(value);
}

template <class T> __global__ void count_unlike(const T *got, size_t count, float value, uint32_t *wrong)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        if (float(got[i]) != value)
            atomicAdd(wrong, 1);
}

static __global__ void advance(uint64_t *iteration)
{
    ++*iteration;
}

/* Calls f with a value of a type that own kernels sum. */
template <class F> static void with_sum_type(kvprim_dtype t, const F &f)
{
    if (t == KVPRIM_F16)
        f(__half());
    else if (t == KVPRIM_BF16)
        f(__nv_bfloat16());
    else
        f(float());
}

/* Up to how many bytes own kernels sum, as the communicator describes it: of all_reduce, or of what each rank sends to
   reduce_scatter. 0: they are off. */
static size_t own_limit_of(const kvprim_comm *comm, bool scatters)
{
    const char *const text = kvprim_comm_describe(comm), *const limits =
                                                             strstr(text, "all_reduce and reduce_scatter up to ");
    unsigned long long reduce = 0, scatter = 0;
    if (strstr(text, "reductions of any size"))
        return SIZE_MAX;
    if (comm->peer[0])
        CHECK(limits &&
              sscanf(limits, "all_reduce and reduce_scatter up to %llu and %llu sent", &reduce, &scatter) == 2);
    return size_t(scatters ? scatter : reduce);
}

template <class T>
static void enqueue_sum(rank_state &r, kvprim_comm *comm, cudaStream_t stream, void *send, void *recv, size_t count,
                        kvprim_dtype dtype, uint64_t seed)
{
    const unsigned blocks = unsigned(std::min<size_t>(256, count / 256 + 1));
    const bool exact = count * sizeof(T) <= own_limit_of(comm, false);
    fill_values<T><<<blocks, 256, 0, stream>>>(static_cast<T *>(send), count, r.iteration, seed, r.rank, exact);
    OK(kvprim_all_reduce(comm, recv, send, count, dtype, KVPRIM_SUM, stream));
    verify<T>
        <<<blocks, 256, 0, stream>>>(static_cast<const T *>(recv), count, r.iteration, seed, world, r.wrong, exact);
    CUDA(cudaGetLastError());
}

static void enqueue_sum(rank_state &r, kvprim_comm *comm, cudaStream_t stream, void *send, void *recv, size_t count,
                        kvprim_dtype dtype, uint64_t seed)
{
    with_sum_type(dtype, [&](auto x) { enqueue_sum<decltype(x)>(r, comm, stream, send, recv, count, dtype, seed); });
}

/* A graph of what `work` enqueues on the rank's stream. */
static cudaGraphExec_t captured(rank_state &r, const std::function<void()> &work,
                                cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(r.stream, mode));
    work();
    CUDA(cudaStreamEndCapture(r.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    if (one_gpu) {
        CUDA(cudaGraphUpload(exec, r.stream));
        CUDA(cudaStreamSynchronize(r.stream));
        meet();
    }
    return exec;
}

static void destroy_graph(cudaGraphExec_t exec)
{
    CUDA(cudaGraphExecDestroy(exec));
    meet_on_gpu();
}

/* Both end before they return. */
static void upload(rank_state &r, void *to, const void *from, size_t bytes)
{
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet_on_gpu();
}

static void download(void *to, const void *from, size_t bytes, cudaStream_t stream)
{
    if (one_gpu)
        CUDA(cudaStreamSynchronize(stream));
    meet_on_gpu();
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    meet_on_gpu();
}

/* How many elements verify has found wrong since the last call of this. */
static uint32_t wrong_so_far(rank_state &r)
{
    uint32_t wrong = 0;
    CUDA(cudaMemcpyAsync(&wrong, r.wrong, sizeof wrong, cudaMemcpyDeviceToHost, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    CUDA(cudaMemsetAsync(r.wrong, 0, sizeof wrong, r.stream));
    return wrong;
}

static void expect_none_wrong(rank_state &r, const char *what, size_t n)
{
    if (one_gpu)
        CUDA(cudaStreamSynchronize(r.stream));
    meet_on_gpu();
    const uint32_t wrong = wrong_so_far(r);
    meet_on_gpu();
    if (wrong)
        fail("rank %d: %s %zu: %u elements are wrong; check: %s", r.rank, what, n, wrong,
             kvprim_comm_check(&r.comm) == KVPRIM_OK ? "ok" : kvprim_last_error());
}

/* Replays a graph of what `work` enqueues. It must leave nothing wrong. */
static void replay(rank_state &r, int times, const char *what, const std::function<void()> &work)
{
    const cudaGraphExec_t exec = captured(r, work);
    for (int n = 0; n < times; n++)
        CUDA(cudaGraphLaunch(exec, r.stream));
    expect_none_wrong(r, what, 0);
    destroy_graph(exec);
}

/* With one_gpu: uses the rank's streams, if it has them, while no kernel waits: see the top. */
static void wake_streams(rank_state &r)
{
    if (!one_gpu || !r.stream)
        return;
    for (const cudaStream_t stream : {r.stream, r.other_stream}) {
        count_unlike<float><<<1, 32, 0, stream>>>(nullptr, 0, 0, r.wrong);
        CUDA(cudaStreamSynchronize(stream));
    }
    meet();
}

/* A communicator of all ranks, whose descriptions are right. */
static void open_comm(rank_state &r, kvprim_comm *comm, const kvprim_comm_desc &desc)
{
    OK(kvprim_comm_init(comm, &desc));
    wake_streams(r);
}

/* ---- the program ---- */

template <class T> static void warm_up_sums(rank_state &r)
{
    fill_values<T><<<1, 32, 0, r.stream>>>(nullptr, 0, r.iteration, 0, 0, true);
    verify<T><<<1, 32, 0, r.stream>>>(nullptr, 0, r.iteration, 0, 2, r.wrong, true);
    fill_late<T><<<1, 32, 0, r.stream>>>(nullptr, 0, 0, 0);
    count_unlike<T><<<1, 32, 0, r.stream>>>(nullptr, 0, 0, r.wrong);
}

/* Uses all that the tests use of CUDA: see the top. memsets and copies of any size and place have kernels of their
   own. */
static void warm_up(rank_state &r)
{
    std::vector<char> host(room_bytes);
    for (const cudaStream_t stream : {r.stream, r.other_stream}) {
        for (size_t bytes = 1; bytes < room_bytes; bytes *= 4)
            for (const size_t size : {bytes, bytes + 1, bytes + 2, bytes + 4, bytes + 8})
                for (const size_t place : {0, 1, 2, 4, 8, 16}) {
                    CUDA(cudaMemsetAsync(r.device[1] + place, 0xa5, size, stream));
                    CUDA(cudaMemcpyAsync(r.device[0] + place, r.device[1], size, cudaMemcpyDeviceToDevice, stream));
                    if (bytes > size_t(1) << 20)
                        continue;
                    CUDA(cudaMemcpyAsync(r.device[0] + place, host.data(), size, cudaMemcpyHostToDevice, stream));
                    CUDA(cudaMemcpyAsync(host.data(), r.device[0] + place, size, cudaMemcpyDeviceToHost, stream));
                }
        for (char *d : r.device)
            CUDA(cudaMemsetAsync(d, 0, room_bytes, stream));
        advance<<<1, 1, 0, stream>>>(r.iteration);
        CUDA(cudaStreamSynchronize(stream));
    }
    warm_up_sums<__half>(r), warm_up_sums<__nv_bfloat16>(r), warm_up_sums<float>(r);
    warm_up_others(r);
    CUDA(cudaMemsetAsync(r.iteration, 0, sizeof *r.iteration, r.stream));
    CUDA(cudaMemsetAsync(r.wrong, 0, sizeof *r.wrong, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
}

static void open_ranks(rank_state &r)
{
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&r.other_stream, cudaStreamNonBlocking));
    for (char *&d : r.device)
        CUDA(cudaMalloc(reinterpret_cast<void **>(&d), room_bytes));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.wrong), sizeof *r.wrong));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.iteration), sizeof *r.iteration));
    CUDA(cudaMemset(r.wrong, 0, sizeof *r.wrong));
    CUDA(cudaMemset(r.iteration, 0, sizeof *r.iteration));
    for (int set = 0; set < (one_gpu ? int(peer_sets) : 0); set++)
        CUDA(cudaMalloc(&peers_of[set][r.rank], peer_bytes));
    descs_made[r.rank] = 0;
    if (one_gpu)
        warm_up(r);
    CUDA(cudaDeviceSynchronize());
    open_comm(r, &r.comm, desc_of(r, buffer_bytes));
    if (r.rank == 0)
        printf("  %s\n", kvprim_comm_describe(&r.comm));
    if (*expected)
        CHECK((strcmp(expected, "on") == 0) == (r.comm.peer[0] != nullptr));
}

static void close_ranks(rank_state &r)
{
    OK(kvprim_comm_check(&r.comm));
    OK(kvprim_comm_destroy(&r.comm));
    for (char *d : r.device)
        CUDA(cudaFree(d));
    meet_on_gpu(); /* nobody's communicator is left */
    for (int set = 0; set < (one_gpu ? int(peer_sets) : 0); set++)
        CUDA(cudaFree(peers_of[set][r.rank]));
    CUDA(cudaFree(r.wrong));
    CUDA(cudaFree(r.iteration));
    CUDA(cudaStreamDestroy(r.stream));
    CUDA(cudaStreamDestroy(r.other_stream));
}

/* The memory that processes share, behind a file that has no name. They inherit its descriptor. */
static int open_shared()
{
    const int fd = memfd_create("ranks", 0);
    if (fd < 0 || ftruncate(fd, sizeof(shared_state)) != 0)
        die("memfd_create", __LINE__, strerror(errno));
    return fd;
}

static void map_shared(int fd)
{
    void *const at = mmap(nullptr, sizeof(shared_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        die("mmap", __LINE__, strerror(errno));
    shared = static_cast<shared_state *>(at);
    counts = &shared->counts;
    setvbuf(stdout, nullptr, _IOLBF, 0); /* a process that is killed has said what it found */
}

/* Counts them in a process of its own, because CUDA's state does not survive a fork. */
static int count_gpus()
{
    int status = 0, count = 0;
    const pid_t pid = fork();
    if (pid == 0)
        _exit(cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, 8) : 0);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/* Starts this program again with other arguments. */
static pid_t start(std::vector<std::string> arguments)
{
    std::vector<char *> argv = {const_cast<char *>("/proc/self/exe")};
    for (std::string &a : arguments)
        argv.push_back(&a[0]);
    argv.push_back(nullptr);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        execv(argv[0], argv.data());
        _exit(127);
    }
    return pid;
}

/* If a rank's process ends early, it kills the others. */
static int run_processes(int fd, int argc, char **argv)
{
    std::vector<pid_t> pids;
    bool killed = false;
    for (int r = 0; r < world; r++) {
        std::vector<std::string> arguments = {"rank", std::to_string(r), std::to_string(world), std::to_string(fd)};
        arguments.insert(arguments.end(), argv + 2, argv + argc);
        pids.push_back(start(arguments));
    }
    for (int r = 0; r < world; r++) {
        int status = 0;
        const pid_t pid = wait(&status);
        if (killed || (WIFEXITED(status) && WEXITSTATUS(status) <= 1))
            continue;
        printf("FAIL process %d ended with status %x\n", int(pid), unsigned(status));
        killed = true;
        __atomic_add_fetch(&counts->failed, 1, __ATOMIC_RELAXED);
        for (const pid_t other : pids)
            kill(other, SIGKILL);
    }
    return finish();
}

/* tests: calls run() for each test. before_gpus: runs in the parent of processes, which holds no GPU; may be empty. */
static int run_program(int argc, char **argv, const std::function<void()> &before_gpus,
                       const std::function<void()> &tests)
{
    static shared_state own;
    std::vector<int> worlds;
    int next = 1, asked = 0, version = 0;
    shared = &own, counts = &own.counts;
    one_gpu = ncclGetVersion(&version) == ncclSuccess && version == 0;
    if (one_gpu) { /* before CUDA starts: no kernel is loaded later, and streams share no queue */
        setvbuf(stdout, nullptr, _IOLBF, 0);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    }
    if (argc >= 5 && strcmp(argv[1], "rank") == 0) {
        processes = true;
        only_rank = atoi(argv[2]), world = atoi(argv[3]), gpus = count_gpus();
        map_shared(atoi(argv[4]));
        next = 5;
    }
    const bool parent = next == 1 && argc > 1 && strcmp(argv[1], "processes") == 0 && !one_gpu;
    for (int i = next + parent; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "on") == 0 || strcmp(argv[i], "off") == 0)
            expected = argv[i];
        else if (strncmp(argv[i], "only=", 5) == 0)
            only = argv[i] + 5;
        else if (one_gpu && sscanf(argv[i], "seconds=%d", &one_gpu_seconds) == 1 && one_gpu_seconds > 0)
            continue;
        else if ((processes || parent || one_gpu) && sscanf(argv[i], "ranks=%d", &asked) == 1 && asked >= 2 &&
                 asked <= 8)
            worlds.push_back(asked);
        else {
            fprintf(stderr, "usage: %s [processes] [ranks=2..8] [seconds=N] [quick] [on | off] [only=TEXT]\n", argv[0]);
            return 2;
        }
    }
    if (!processes)
        world = gpus = count_gpus();
    if ((parent || one_gpu) && gpus > 0)
        world = asked ? asked : gpus == 1 || one_gpu ? 2 : gpus;
    if (one_gpu)
        gpus = std::min(gpus, 1);
    if (world < 2) {
        skip("%d GPUs, it takes two, or one and the argument processes", gpus);
        finish_test("nccl");
        (void)finish();
        return 0;
    }
    if (parent) {
        const int fd = open_shared();
        map_shared(fd);
        if (!quick)
            before_gpus();
        return run_processes(fd, argc, argv);
    }
    if (processes)
        take_device(only_rank);
    if (!one_gpu || worlds.empty())
        worlds.assign(1, world);
    for (const int n : worlds) {
        world = n;
        ranks.assign(size_t(world), {});
        for (int r = 0; r < world; r++)
            ranks[size_t(r)].rank = r;
        const int failed = counts->failed;
        run("open", open_ranks);
        if (counts->failed != failed)
            break;
        tests();
        if (is_over())
            break;
        run("close", close_ranks);
    }
    return processes ? counts->failed != 0 : finish();
}

#endif /* NCCL_RANKS_H */

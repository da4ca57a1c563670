/* SPDX-License-Identifier: MIT */
/* What the tests of kvprim_nccl.h on GPUs share: ranks, which are threads of one process or a process each; checks;
   sums that are made and verified on the GPU. Each rank has a GPU. The test includes the implementation of the headers
   first.

       program [quick] [on | off]                a thread per GPU
       program processes [quick] [on | off]      a process per GPU; with one GPU, two processes that share it

   quick: fewer cases; on, off: whether own kernels must be on. */
#ifndef NCCL_RANKS_H
#define NCCL_RANKS_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* State of all ranks, in memory that processes share. */
struct shared_state {
    std::atomic<int> here, passed, failed, skipped, faults; /* faults: of the running test */
    std::atomic<uint64_t> meetings;
    kvprim_comm_id id;
    unsigned long long scratch[8]; /* for a test's own use */
    char bytes[8][512];
};
static shared_state *shared;
static bool quick, processes;
static int world, gpus, only_rank; /* only_rank: the rank of this process, if each rank is one */
static const char *expected = "";

__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
    if (shared->faults++ > 4)
        return;
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("  %s\n", text);
    fflush(stdout);
}

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

static void check_status(kvprim_status got, kvprim_status wanted, const char *call, int line)
{
    if (got != wanted)
        fail("line %d: %s: %s instead of %s, last error: %s", line, call, kvprim_status_name(got),
             kvprim_status_name(wanted), kvprim_last_error());
}
#define IS(call, wanted) check_status(call, wanted, #call, __LINE__)
#define OK(call) IS(call, KVPRIM_OK)
#define CHECK(condition)                                                                                               \
    do                                                                                                                 \
        if (!(condition))                                                                                              \
            fail("line %d: false: %s", __LINE__, #condition);                                                          \
    while (0)
#define SAYS(word)                                                                                                     \
    do                                                                                                                 \
        if (!strstr(kvprim_last_error(), word))                                                                        \
            fail("line %d: \"%s\" does not say \"%s\"", __LINE__, kvprim_last_error(), word);                          \
    while (0)

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

struct rank_state {
    int rank;
    kvprim_comm comm;
    cudaStream_t stream;
    char *device[3];     /* room_bytes each */
    uint32_t *wrong;     /* on the device; verify counts into it */
    uint64_t *iteration; /* on the device; advance counts it up */
};
static const size_t room_bytes = size_t(80) << 20, buffer_bytes = size_t(176) << 20;
static std::vector<rank_state> ranks;

/* Which GPU a rank has. NCCL accepts two ranks on one GPU if it believes them to be on two machines. */
static int device_of(int rank)
{
    return rank % gpus;
}

static void take_device(int rank)
{
    if (gpus < world)
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

static void run(const char *name, const std::function<void(rank_state &)> &body)
{
    if (processes)
        meet();
    if (speaks())
        shared->faults = 0;
    if (processes)
        meet();
    const double begun = seconds();
    on_all(body);
    if (!speaks())
        return;
    shared->faults ? shared->failed++ : shared->passed++;
    printf("%s nccl: %s (%.1f s)\n", shared->faults ? "FAIL" : "ok", name, seconds() - begun);
    fflush(stdout);
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

static kvprim_comm_desc desc_of(const rank_state &r, size_t bytes, int timeout_ms = 0, int deterministic = 0)
{
    kvprim_comm_desc desc = {};
    desc.rank = r.rank;
    desc.world = world;
    desc.id = shared_id(r);
    desc.buffer_bytes = bytes;
    desc.timeout_ms = timeout_ms;
    desc.deterministic = deterministic;
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
__global__ void fill(T *out, size_t count, const uint64_t *iteration, uint64_t seed, int rank, bool exact)
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

template <class T>
static void enqueue_sum(rank_state &r, kvprim_comm *comm, cudaStream_t stream, void *send, void *recv, size_t count,
                        kvprim_dtype dtype, uint64_t seed)
{
    const unsigned blocks = unsigned(std::min<size_t>(256, count / 256 + 1));
    const bool exact = kvpn_choose(comm, count * sizeof(T), dtype, KVPRIM_SUM) != kvpn_by_nccl;
    fill<T><<<blocks, 256, 0, stream>>>(static_cast<T *>(send), count, r.iteration, seed, r.rank, exact);
    OK(kvprim_all_reduce(comm, recv, send, count, dtype, KVPRIM_SUM, stream));
    verify<T>
        <<<blocks, 256, 0, stream>>>(static_cast<const T *>(recv), count, r.iteration, seed, world, r.wrong, exact);
    CUDA(cudaGetLastError());
}

static void enqueue_sum(rank_state &r, kvprim_comm *comm, cudaStream_t stream, void *send, void *recv, size_t count,
                        kvprim_dtype dtype, uint64_t seed)
{
    if (dtype == KVPRIM_F16)
        enqueue_sum<__half>(r, comm, stream, send, recv, count, dtype, seed);
    else if (dtype == KVPRIM_BF16)
        enqueue_sum<__nv_bfloat16>(r, comm, stream, send, recv, count, dtype, seed);
    else
        enqueue_sum<float>(r, comm, stream, send, recv, count, dtype, seed);
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
    const uint32_t wrong = wrong_so_far(r);
    if (wrong)
        fail("rank %d: %s %zu: %u elements are wrong; check: %s", r.rank, what, n, wrong,
             kvprim_comm_check(&r.comm) == KVPRIM_OK ? "ok" : kvprim_last_error());
}

/* ---- the program ---- */

static void open_ranks(rank_state &r)
{
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    for (char *&d : r.device)
        CUDA(cudaMalloc(reinterpret_cast<void **>(&d), room_bytes));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.wrong), sizeof *r.wrong));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&r.iteration), sizeof *r.iteration));
    CUDA(cudaMemset(r.wrong, 0, sizeof *r.wrong));
    CUDA(cudaMemset(r.iteration, 0, sizeof *r.iteration));
    CUDA(cudaDeviceSynchronize());
    const kvprim_comm_desc desc = desc_of(r, buffer_bytes);
    OK(kvprim_comm_init(&r.comm, &desc));
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
    CUDA(cudaFree(r.wrong));
    CUDA(cudaFree(r.iteration));
    CUDA(cudaStreamDestroy(r.stream));
}

static shared_state *map_shared(const char *file)
{
    const int fd = open(file, O_RDWR);
    void *const at = fd < 0 || ftruncate(fd, sizeof(shared_state)) != 0
                         ? MAP_FAILED
                         : mmap(nullptr, sizeof(shared_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        die("mmap", __LINE__, file);
    return static_cast<shared_state *>(at);
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

static int finish()
{
    printf("%d passed, %d failed, %d skipped\n", int(shared->passed), int(shared->failed), int(shared->skipped));
    return shared->failed ? 1 : 0;
}

/* If a rank's process ends early, it kills the others. */
static int run_processes(const char *file, int argc, char **argv)
{
    std::vector<pid_t> pids;
    bool killed = false;
    for (int r = 0; r < world; r++) {
        std::vector<std::string> arguments = {"rank", std::to_string(r), std::to_string(world), file};
        arguments.insert(arguments.end(), argv + 2, argv + argc);
        pids.push_back(start(arguments));
    }
    for (int r = 0; r < world; r++) {
        int status = 0;
        const pid_t pid = wait(&status);
        if (killed || (WIFEXITED(status) && WEXITSTATUS(status) <= 1))
            continue;
        printf("FAIL process %d ended with status %x\n", int(pid), unsigned(status));
        killed = true, shared->failed++;
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
    char file[] = "/tmp/kvprim_ranks_XXXXXX";
    int next = 1;
    shared = &own;
    if (argc >= 5 && strcmp(argv[1], "rank") == 0) {
        processes = true;
        only_rank = atoi(argv[2]), world = atoi(argv[3]), gpus = count_gpus();
        shared = map_shared(argv[4]);
        next = 5;
    }
    const bool parent = next == 1 && argc > 1 && strcmp(argv[1], "processes") == 0;
    for (int i = next + parent; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "on") == 0 || strcmp(argv[i], "off") == 0)
            expected = argv[i];
        else {
            fprintf(stderr, "usage: %s [processes] [quick] [on | off]\n", argv[0]);
            return 2;
        }
    }
    if (!processes)
        world = gpus = count_gpus();
    if (parent && gpus == 1)
        world = 2;
    if (world < 2) {
        printf("skip nccl: %d GPUs, it takes two, or one and the argument processes\n", gpus);
        shared->skipped++;
        return finish();
    }
    if (parent) {
        const int fd = mkstemp(file);
        if (fd < 0)
            die("mkstemp", __LINE__, file);
        close(fd);
        shared = map_shared(file);
        if (!quick)
            before_gpus();
        const int code = run_processes(file, argc, argv);
        unlink(file);
        return code;
    }
    ranks.resize(size_t(world));
    for (int r = 0; r < world; r++)
        ranks[size_t(r)].rank = r;
    if (processes)
        take_device(only_rank);
    run("open", open_ranks);
    if (shared->faults == 0) {
        tests();
        run("close", close_ranks);
    }
    return processes ? shared->failed != 0 : finish();
}

#endif /* NCCL_RANKS_H */

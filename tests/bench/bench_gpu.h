/* SPDX-License-Identifier: MIT */
/* Timing on a GPU, and figures against targets: what the bench_*.cu have in common. Each is one translation unit, which
   includes a header of kvprim first.

   A contender is a way to do a job. Its time is the time of one launch inside a replayed CUDA graph of several
   launches: 64, or 24 if one moves more than 64 MB, or as many as a program says. The GPU spins until the replay is
   enqueued, so that the host's time does not show. Contenders take turns in each repetition, and the median counts.
   Before a contender is timed, everything that its last launch moved is compared with its source. */
#ifndef BENCH_GPU_H
#define BENCH_GPU_H

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>
#include <cuda_runtime.h>
#include "../harness.h"

constexpr int64_t KiB = 1 << 10, MiB = 1 << 20, GiB = 1 << 30;

static cudaStream_t stream; /* all work runs on it: see open_gpu */
static cudaEvent_t start_event, end_event;
static bool quick; /* few repetitions */

/* Ends the program. Threads of several GPUs may do so at once, which exit() does not allow. */
[[noreturn]] inline void give_up(int code)
{
    fflush(stdout);
    _Exit(code);
}

#define CUDA(call) check_cuda(call, #call, __FILE__, __LINE__)

inline void check_cuda(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    give_up(2);
}

inline void check_kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    give_up(2);
}

#ifdef KVPRIM_CUDA_CUH
inline kvprim_cuda_launch on_stream(bool pdl = false, int32_t max_sms = 0)
{
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    launch.pdl = pdl;
    launch.max_sms = max_sms;
    return launch;
}

inline kvprim_table table_at(char *data, int64_t rows, int64_t stride = 0)
{
    kvprim_table t = {};
    t.data = data, t.rows = rows, t.stride = stride;
    return t;
}

template <class T> constexpr kvprim_index_type index_type = sizeof(T) == 8 ? KVPRIM_I64 : KVPRIM_I32;

template <class T>
kvprim_gather_desc gather_of(const kvprim_table &dst, const kvprim_table &src, int64_t row_bytes, const T *index,
                             int64_t count)
{
    kvprim_gather_desc d = {};
    d.dst = dst, d.src = src, d.row_bytes = row_bytes;
    d.index = index, d.index_type = index_type<T>, d.count = count;
    return d;
}

/* Of K; callers add V. */
template <class T>
kvprim_store_desc store_of(const kvprim_table &k_cache, const kvprim_table &k, int64_t k_bytes, const T *slot,
                           int64_t count)
{
    kvprim_store_desc d = {};
    d.k_cache = k_cache, d.k = k, d.k_bytes = k_bytes;
    d.slot = slot, d.slot_type = index_type<T>, d.count = count;
    return d;
}

template <class T>
kvprim_transfer_desc transfer_of(const kvprim_table &dst, const kvprim_table &src, int64_t row_bytes, int32_t layers,
                                 const T *to, const T *from, int64_t count)
{
    kvprim_transfer_desc d = {};
    d.dst = dst, d.src = src, d.row_bytes = row_bytes, d.layers = layers;
    d.dst_index = to, d.src_index = from, d.index_type = index_type<T>, d.count = count;
    return d;
}

/* Enqueues what a descriptor says. */
template <class desc>
void call_kvprim(kvprim_status (*function)(const desc *, const kvprim_cuda_launch *), const desc &d, bool pdl = false,
                 int32_t max_sms = 0)
{
    const kvprim_cuda_launch launch = on_stream(pdl, max_sms);
    check_kvprim(function(&d, &launch));
}
#endif

/* Prints which GPU it is. Ends the program if it has too little memory or no PDL. */
inline void open_gpu(int64_t needed_bytes)
{
    int driver, runtime;
    size_t free_bytes, total_bytes;
    cudaDeviceProp device;
    CUDA(cudaDriverGetVersion(&driver));
    CUDA(cudaRuntimeGetVersion(&runtime));
    CUDA(cudaGetDeviceProperties(&device, 0));
    CUDA(cudaSetDevice(0));
    printf("%s, %d SMs, compute capability %d.%d; CUDA driver %d.%d, runtime %d.%d\n", device.name,
           device.multiProcessorCount, device.major, device.minor, driver / 1000, driver % 1000 / 10, runtime / 1000,
           runtime % 1000 / 10);
    CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (device.major < 9 || free_bytes < size_t(needed_bytes)) {
        fprintf(stderr, "needs compute capability 9.0 (for PDL) and %lld MiB of free GPU memory, found %zu\n",
                (long long)(needed_bytes >> 20), free_bytes >> 20);
        exit(2);
    }
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&start_event));
    CUDA(cudaEventCreate(&end_event));
}

/* ---- memory ---- */

__global__ static void hash_words(uint64_t *words, uint64_t count)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = hash_u64(i);
}

/* Returns device memory, of which no two 8 bytes are equal. It lasts as long as the program. */
inline char *allocate_hashed(int64_t bytes)
{
    char *memory;
    CUDA(cudaMalloc(&memory, size_t(bytes)));
    hash_words<<<4096, 256, 0, stream>>>(reinterpret_cast<uint64_t *>(memory), uint64_t(bytes) / 8);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
    return memory;
}

struct cuda_free {
    void operator()(void *p) const
    {
        CUDA(cudaFree(p));
    }
};
template <class T> using on_device = std::unique_ptr<T[], cuda_free>;

template <class T> on_device<T> upload(const std::vector<T> &host)
{
    T *p;
    CUDA(cudaMalloc(&p, host.size() * sizeof(T)));
    CUDA(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize()); /* that copy may still be under way, and `stream` does not wait for it */
    return on_device<T>(p);
}

/* Maps the numbers of `bits` bits one to one: every step can be undone. */
inline uint64_t shuffled(uint64_t x, uint64_t key, int bits)
{
    const uint64_t mask = (uint64_t(1) << bits) - 1;
    for (int round = 0; round < 3; round++) {
        x = (x + (key >> 16 * round)) & mask;
        x = x * 0x94d049bb133111ebu & mask;
        x ^= x >> (bits + 1) / 2;
    }
    return x;
}

constexpr int sets_count = 8;

/* Lists of `count` values, on the host and on the GPU. Launches take them in turn. */
template <class T> struct value_sets {
    int64_t count = 0;
    int sets = 0;
    std::vector<T> host;
    on_device<T> device;

    value_sets() = default;
    value_sets(int64_t in_set, std::vector<T> values)
        : count(in_set), sets(int(int64_t(values.size()) / in_set)), host(std::move(values)), device(upload(host))
    {
    }
    value_sets(int64_t in_set, const std::function<int64_t(int set, int64_t i)> &value)
        : count(in_set), sets(sets_count)
    {
        for (int set = 0; set < sets; set++)
            for (int64_t i = 0; i < count; i++)
                host.push_back(T(value(set, i)));
        device = upload(host);
    }
    const T *set(int i) const
    {
        return device.get() + i % sets * count;
    }
    const T *host_set(int i) const
    {
        return host.data() + i % sets * count;
    }
};

/* Distinct random rows out of `rows`. */
struct index_sets : value_sets<int32_t> {
    int64_t rows;

    index_sets(int64_t out_of, int64_t in_set, int how_many = sets_count, uint64_t seed = 0) : rows(out_of)
    {
        int bits = 1;
        count = in_set, sets = how_many;
        while (int64_t(1) << bits < rows)
            bits++;
        for (int set = 0; set < sets; set++)
            for (int64_t i = 0; i < count; i++) {
                uint64_t row = uint64_t(i);
                do
                    row = shuffled(row, hash_u64(seed << 8 | uint64_t(set)), bits);
                while (row >= uint64_t(rows)); /* still one to one: walks the permutation's cycle */
                host.push_back(int32_t(row));
            }
        device = upload(host);
    }
};

/* Requests of `length` tokens each in random pages. `table`: the pages of the requests in turn. */
struct page_sets {
    int64_t pages, page_rows, tokens, length;
    value_sets<int32_t> table, slots;
    on_device<int32_t> starts, request; /* where each request's tokens start; the request of each token */

    page_sets(int64_t pages_, int64_t page_rows_, int64_t tokens_, int64_t length_, uint64_t seed)
        : pages(pages_), page_rows(page_rows_), tokens(tokens_), length(length_)
    {
        const index_sets random(pages, tokens / page_rows, sets_count, seed);
        std::vector<int32_t> start, owner;
        for (int64_t i = 0; i < tokens; i++)
            owner.push_back(int32_t(i / length));
        for (int64_t i = 0; i <= tokens; i += length)
            start.push_back(int32_t(i));
        table = {random.count, random.host};
        slots = {tokens,
                 [&](int set, int64_t i) { return random.host_set(set)[i / page_rows] * page_rows + i % page_rows; }};
        starts = upload(start), request = upload(owner);
    }
    int64_t requests() const
    {
        return tokens / length;
    }
    const int32_t *index(bool by_pages, int i) const
    {
        return (by_pages ? table : slots).set(i);
    }
};

/* Where launch i reads or writes its `bytes` in a buffer of `room` bytes. */
inline int64_t rotated(int i, int64_t bytes, int64_t room)
{
    const int64_t region = (bytes + 255) / 256 * 256;
    return i % (room / region) * region;
}

/* ---- timing ---- */

struct contender {
    const char *name;
    std::function<void(int)> enqueue;     /* enqueues launch i */
    double bytes_moved = 0;               /* by a launch, read plus written; 0 if it does not matter */
    int launches = 64;                    /* in a replay */
    bool plain = false;                   /* launched one by one, not from a graph */
    double us = 0;                        /* the result: of one launch */
    std::function<void(int)> poison = {}; /* clears what that launch writes; may be empty */
    std::function<void(int)> verify = {}; /* checks that it wrote it; ends the program if not */
    double spin_us = 50;                  /* how long the GPU is kept busy while the host enqueues a replay */
    cudaGraphExec_t graph = nullptr;
    bool host_shows = false; /* the host needed too long to enqueue: the time contains some of that */
};

inline double gb_per_s(const contender &c)
{
    return 1e-3 * c.bytes_moved / c.us;
}

/* In a replay. */
inline int launches_for(double bytes_moved)
{
    return bytes_moved > 64e6 ? 24 : 64;
}

inline std::string rows_name(int64_t row_bytes, int64_t rows)
{
    return std::to_string(row_bytes) + " B x " + std::to_string(rows);
}

inline double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

inline void enqueue_all(const contender &c)
{
    for (int i = 0; i < c.launches; i++)
        c.enqueue(i);
}

inline void replay(const contender &c)
{
    if (c.plain)
        enqueue_all(c);
    else
        CUDA(cudaGraphLaunch(c.graph, stream));
}

inline void prepare(contender &c)
{
    c.enqueue(0); /* kernels are loaded at their first launch, which should not be captured */
    CUDA(cudaStreamSynchronize(stream));
    if (!c.plain) {
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        enqueue_all(c);
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&c.graph, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    if (c.poison)
        c.poison(c.launches - 1);
    replay(c);
    if (c.verify)
        c.verify(c.launches - 1);
    CUDA(cudaStreamSynchronize(stream));
}

__global__ static void spin(uint64_t ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}

/* Returns the microseconds of a launch in one replay. The GPU spins until all is enqueued, to hide the host's time. */
inline double time_replay(contender &c)
{
    for (;; c.spin_us *= 2) {
        spin<<<1, 1, 0, stream>>>(uint64_t(1000 * c.spin_us));
        CUDA(cudaGetLastError());
        CUDA(cudaEventRecord(start_event, stream));
        replay(c);
        CUDA(cudaEventRecord(end_event, stream));
        const cudaError_t started = cudaEventQuery(start_event);
        if (started == cudaErrorNotReady)
            (void)cudaGetLastError(); /* clears the error */
        else
            CUDA(started);
        CUDA(cudaEventSynchronize(end_event));
        if (started == cudaErrorNotReady || c.spin_us > 50000) {
            float ms;
            c.host_shows = started != cudaErrorNotReady;
            CUDA(cudaEventElapsedTime(&ms, start_event, end_event));
            return 1000.0 * double(ms) / c.launches;
        }
    }
}

/* Sets .us of every contender. */
inline void measure(std::vector<contender> &all)
{
    const int n = int(all.size()), repetitions = quick ? 5 : all[0].launches == 64 ? 15 : 9;
    std::vector<std::vector<double>> us(all.size());
    for (contender &c : all)
        prepare(c);
    for (int r = 0; r < repetitions; r++)
        for (int k = 0; k < n; k++) { /* back and forth, so that none always runs after the same other one */
            const size_t who = size_t(r % 2 ? n - 1 - k : k);
            us[who].push_back(time_replay(all[who]));
        }
    for (size_t k = 0; k < all.size(); k++) {
        all[k].us = median(us[k]);
        if (all[k].host_shows)
            printf("(%s: the host's time to enqueue is part of the next line's)\n", all[k].name);
        if (all[k].graph)
            CUDA(cudaGraphExecDestroy(all[k].graph));
        all[k].graph = nullptr;
    }
}

/* The times of some contenders. */
inline void print_us(const std::vector<contender> &c, int width, int digits, size_t first = 0, size_t end = SIZE_MAX)
{
    for (size_t k = first; k < std::min(end, c.size()); k++)
        printf(" %*.*f", width, digits, c[k].us);
}

/* Numbers, and "-" where there is none. */
inline void print_numbers(const std::vector<double> &all, int width, int digits)
{
    for (const double x : all)
        std::isnan(x) ? printf(" %*s", width, "-") : printf(" %*.*f", width, digits, x);
}

inline double now_us()
{
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

__global__ static void empty_kernel()
{
}

/* ---- comparing with the source ---- */

/* What is copied for one row or fragment. */
struct piece {
    char *dst;
    const char *src;
    int64_t bytes;
};

/* Writes to every byte of the pieces what must not be there. */
template <class pieces> __global__ static void poison_pieces(const pieces p, int64_t count)
{
    for (int64_t n = blockIdx.x; n < count; n += gridDim.x) {
        const piece one = p(n);
        for (int64_t b = blockIdx.y * blockDim.x + threadIdx.x; b < one.bytes; b += gridDim.y * blockDim.x)
            one.dst[b] = char(~one.src[b]);
    }
}

template <class pieces> __global__ static void compare_pieces(const pieces p, int64_t count, unsigned long long *wrong)
{
    for (int64_t n = blockIdx.x; n < count; n += gridDim.x) {
        const piece one = p(n);
        for (int64_t b = blockIdx.y * blockDim.x + threadIdx.x; b < one.bytes; b += gridDim.y * blockDim.x)
            if (one.dst[b] != one.src[b])
                atomicAdd(wrong, 1ull);
    }
}

/* Returns how many bytes of the pieces differ from their source. */
template <class pieces> unsigned long long count_wrong(const pieces &p, int64_t count)
{
    const on_device<unsigned long long> sum = upload<unsigned long long>({0});
    unsigned long long wrong;
    compare_pieces<<<dim3(528, 16), 256, 0, stream>>>(p, count, sum.get());
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(&wrong, sum.get(), sizeof wrong, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return wrong;
}

/* Lets the contender's last launch i be checked: it moves the pieces pieces_of(i)(0) to (count - 1), and no two of them
   to the same place. */
template <class function> void check_pieces(contender &c, const std::string &job, int64_t count, function pieces_of)
{
    c.poison = [=](int i) {
        poison_pieces<<<dim3(528, 16), 256, 0, stream>>>(pieces_of(i), count);
        CUDA(cudaGetLastError());
    };
    c.verify = [=, name = c.name](int i) {
        const unsigned long long wrong = count_wrong(pieces_of(i), count);
        if (wrong == 0)
            return;
        printf("FAIL %s, %s: %llu bytes are wrong\n", name, job.c_str(), wrong);
        exit(1);
    };
}

/* ---- copies of the runtime ---- */

constexpr int64_t copy_bytes = 256 * MiB; /* of the copy that others are compared with */

/* Copies from `src` to `dst`, which have room for several: in a graph, and on a stream. */
inline std::vector<contender> copy_contenders(char *dst, const char *src, int64_t room)
{
    const auto copy = [=](int i) {
        const int64_t at = i % (room / copy_bytes) * copy_bytes;
        CUDA(cudaMemcpyAsync(dst + at, src + at, size_t(copy_bytes), cudaMemcpyDeviceToDevice, stream));
    };
    return {{"copy", copy, 2.0 * double(copy_bytes), 24}, {"copy", copy, 2.0 * double(copy_bytes), 24, true}};
}

inline void measure_copy(char *dst, const char *src, int64_t room)
{
    std::vector<contender> copy = copy_contenders(dst, src, room);
    measure(copy);
    printf("cudaMemcpyAsync device to device of 256 MiB: %.0f GB/s in a graph, %.0f on a stream\n", gb_per_s(copy[0]),
           gb_per_s(copy[1]));
}

/* Copies in one call of cudaMemcpyBatchAsync (one by one where CUDA has none), or one by one. */
struct copy_list {
    std::vector<const void *> src;
    std::vector<void *> dst;
    std::vector<size_t> sizes;

    void clear()
    {
        src.clear(), dst.clear(), sizes.clear();
    }
    void add(void *to, const void *from, size_t bytes)
    {
        dst.push_back(to), src.push_back(from), sizes.push_back(bytes);
    }
    void enqueue()
    {
#if CUDART_VERSION >= 12080
        size_t first = 0;
        cudaMemcpyAttributes attributes = {};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
#if CUDART_VERSION >= 13000
        CUDA(cudaMemcpyBatchAsync(dst.data(), src.data(), sizes.data(), sizes.size(), &attributes, &first, 1, stream));
#else
        size_t failed;
        CUDA(cudaMemcpyBatchAsync(dst.data(), const_cast<void **>(src.data()), sizes.data(), sizes.size(), &attributes,
                                  &first, 1, &failed, stream));
#endif
#else
        enqueue_each();
#endif
    }
    void enqueue_each() const
    {
        for (size_t k = 0; k < sizes.size(); k++)
            CUDA(cudaMemcpyAsync(dst[k], src[k], sizes[k], cudaMemcpyDefault, stream));
    }
};

/* ---- time on the host ---- */

struct host_call {
    const char *name;
    std::function<void()> call;
    double us = 0;
};

/* Sets .us of every call, and prints it. A batch of calls is small enough for the launch queue, which is empty when it
   begins. */
inline void measure_host(const char *title, std::vector<host_call> &all, int batches)
{
    constexpr int calls = 50;
    std::vector<std::vector<double>> us(all.size());
    for (int b = -1; b < (quick ? 51 : batches); b++) /* the first one warms up */
        for (size_t k = 0; k < all.size(); k++) {
            CUDA(cudaStreamSynchronize(stream));
            const double begin = now_us();
            for (int i = 0; i < calls; i++)
                all[k].call();
            if (b >= 0)
                us[k].push_back((now_us() - begin) / calls);
        }
    CUDA(cudaStreamSynchronize(stream));
    printf("\n%s, us\n", title);
    for (size_t k = 0; k < all.size(); k++)
        printf("%28s %7.3f\n", all[k].name, all[k].us = median(us[k]));
}

/* ---- figures and targets ---- */

struct figure {
    double value;
    std::string where;
};

static int met, missed;
static std::string verdicts; /* lines about targets that are not printed yet */

inline void judge(const std::string &what, double got, char relation, double limit, const std::string &note = "")
{
    const bool ok = relation == '>' ? got >= limit : got <= limit;
    char line[200];
    snprintf(line, sizeof line, "  %-6s  %-58s %7.3f, target %c= %-5g ", ok ? "ok" : "MISSED", what.c_str(), got,
             relation, limit);
    met += ok;
    missed += !ok;
    verdicts += line + note + "\n";
}

inline void print_verdicts()
{
    printf("%s", verdicts.c_str());
    fflush(stdout);
    verdicts.clear();
}

/* Of points that exist. */
inline void add_figure(std::vector<figure> *f, double value, const std::string &where)
{
    if (!std::isnan(value))
        f->push_back({value, where});
}

/* Judges the worst figure, and says where the three worst are. */
inline void judge_worst(const std::string &what, std::vector<figure> f, char relation, double limit)
{
    if (f.empty())
        return;
    const auto worse = [relation](double a, double b) { return relation == '>' ? a < b : a > b; };
    std::sort(f.begin(), f.end(), [worse](const figure &a, const figure &b) { return worse(a.value, b.value); });
    const auto misses =
        std::count_if(f.begin(), f.end(), [worse, limit](const figure &a) { return worse(a.value, limit); });
    std::string note = std::to_string(misses) + " of " + std::to_string(f.size()) + " miss; worst";
    for (size_t k = 0; k < f.size() && k < 3; k++) {
        char value[32];
        snprintf(value, sizeof value, " %.3f", f[k].value);
        note += (k ? ", " : " ") + f[k].where + value;
    }
    judge(what, f[0].value, relation, limit, note);
}

inline void judge_mean(const std::string &what, const std::vector<figure> &f, double limit)
{
    if (f.empty())
        return;
    double sum = 0;
    for (const figure &a : f)
        sum += std::log(a.value);
    judge(what, std::exp(sum / double(f.size())), '<', limit,
          "geometric mean of " + std::to_string(f.size()) + " points");
}

inline void judge_both(const std::string &what, const std::vector<figure> &f, double mean, double worst)
{
    judge_mean(what, f, mean);
    judge_worst(what, f, '<', worst);
}

inline std::string size_name(int64_t bytes)
{
    return bytes >= MiB  ? std::to_string(bytes / MiB) + " MB"
           : bytes % KiB ? std::to_string(bytes) + " B"
                         : std::to_string(bytes / KiB) + " KB";
}

/* ---- a program of sections ---- */

struct section {
    const char *name;
    std::function<void()> run; /* measures, prints a table, and judges */
};

/* `open` prints the machine, and prepares every section. */
inline int run_program(int argc, char **argv, void (*open)(), const std::vector<section> &sections)
{
    std::string only, names;
    bool usage = false;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
        else
            usage = true;
    for (const section &s : sections)
        names += (names.empty() ? "" : "|") + std::string(s.name);
    const auto chosen = [only](const section &s) { return only.empty() || only == s.name; };
    if (usage || std::none_of(sections.begin(), sections.end(), chosen)) {
        fprintf(stderr, "usage: %s [--quick] [--only %s]\n", argv[0], names.c_str());
        return 2;
    }
    const double begin = now_us();
    open();
    for (const section &s : sections)
        if (chosen(s)) {
            s.run();
            fflush(stdout);
        }
    printf("\ntargets%s\n", quick ? ", on a part of the points, with few repetitions" : "");
    print_verdicts();
    printf("\n%d targets met, %d missed\n", met, missed);
    printf("%.0f s\n", (now_us() - begin) * 1e-6);
    return 0;
}

#endif /* BENCH_GPU_H */

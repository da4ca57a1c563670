/* SPDX-License-Identifier: MIT */
/* Timing on a GPU, and figures against targets: what the bench_*.cu have in common. Each is one translation unit.

   A contender is a way to do a job. Its time is the time of one launch inside a replayed CUDA graph of several
   launches. The GPU spins until the replay is enqueued, so that the host's time does not show. Contenders take turns in
   each repetition, and the median counts. */
#ifndef BENCH_GPU_H
#define BENCH_GPU_H

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include <cuda_runtime.h>

static cudaStream_t stream; /* all work runs on it: see open_gpu */
static cudaEvent_t start_event, end_event;
static bool quick; /* few repetitions */

#define CUDA(call) check_cuda(call, #call, __FILE__, __LINE__)

static void check_cuda(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    exit(2);
}

static void check_kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(2);
}

/* Prints which GPU it is. Ends the program if it has too little memory or no PDL. */
[[maybe_unused]] static void open_gpu(int64_t needed_bytes)
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

[[maybe_unused]] static void close_gpu()
{
    CUDA(cudaEventDestroy(end_event));
    CUDA(cudaEventDestroy(start_event));
    CUDA(cudaStreamDestroy(stream));
}

/* ---- timing ---- */

struct contender {
    const char *name;
    double bytes_moved;               /* by a launch, read plus written; 0 if it does not matter */
    std::function<void(int)> enqueue; /* enqueues launch i */
    std::function<void(int)> poison;  /* clears what that launch writes; may be empty */
    std::function<void(int)> verify;  /* checks that it wrote it; ends the program if not */
    int launches = 64;                /* in a replay */
    bool plain = false;               /* launched one by one, not from a graph */
    double us = 0;                    /* the result: of one launch */
    double spin_us = 50;              /* how long the GPU is kept busy while the host enqueues a replay */
    cudaGraphExec_t graph = nullptr;
    bool host_shows = false; /* the host needed too long to enqueue: the time contains some of that */
};

[[maybe_unused]] static double gb_per_s(const contender &c)
{
    return 1e-3 * c.bytes_moved / c.us;
}

static double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

static void enqueue_all(const contender &c)
{
    for (int i = 0; i < c.launches; i++)
        c.enqueue(i);
}

static void replay(const contender &c)
{
    if (c.plain)
        enqueue_all(c);
    else
        CUDA(cudaGraphLaunch(c.graph, stream));
}

static void prepare(contender &c)
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
static double time_replay(contender &c)
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
[[maybe_unused]] static void measure(std::vector<contender> &all)
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

static double now_us()
{
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

__global__ static void empty_kernel()
{
}

/* ---- figures and targets ---- */

struct figure {
    double value;
    std::string where;
};

static int met, missed;

static void judge(const std::string &what, double got, char relation, double limit, const std::string &note)
{
    const bool ok = relation == '>' ? got >= limit : got <= limit;
    met += ok;
    missed += !ok;
    printf("  %-6s  %-58s %7.3f, target %c= %-5g %s\n", ok ? "ok" : "MISSED", what.c_str(), got, relation, limit,
           note.c_str());
}

/* Keeps the worst figure, and where the three worst are. */
static void judge_worst(const std::string &what, std::vector<figure> f, char relation, double limit)
{
    if (f.empty())
        return;
    std::sort(f.begin(), f.end(), [relation](const figure &a, const figure &b) {
        return relation == '>' ? a.value < b.value : a.value > b.value;
    });
    const auto misses = std::count_if(f.begin(), f.end(), [relation, limit](const figure &a) {
        return !(relation == '>' ? a.value >= limit : a.value <= limit);
    });
    std::string note = std::to_string(misses) + " of " + std::to_string(f.size()) + " miss; worst";
    for (size_t k = 0; k < f.size() && k < 3; k++) {
        char value[32];
        snprintf(value, sizeof value, " %.3f", f[k].value);
        note += (k ? ", " : " ") + f[k].where + value;
    }
    judge(what, f[0].value, relation, limit, note);
}

[[maybe_unused]] static void judge_mean(const std::string &what, const std::vector<figure> &f, double limit)
{
    if (f.empty())
        return;
    double sum = 0;
    for (const figure &a : f)
        sum += std::log(a.value);
    judge(what, std::exp(sum / double(f.size())), '<', limit,
          "geometric mean of " + std::to_string(f.size()) + " points");
}

/* ---- a program of sections ---- */

struct section {
    const char *name;
    void (*run)();
};

struct program {
    std::vector<section> sections;
    void (*open)();    /* the machine, and setup for every section */
    void (*summary)(); /* judges */
    void (*close)();
};

[[maybe_unused]] static int usage(const char *name, const program &p)
{
    fprintf(stderr, "usage: %s [--quick] [--only", name);
    for (const section &s : p.sections)
        fprintf(stderr, "%s%s", &s == &p.sections[0] ? " " : "|", s.name);
    fprintf(stderr, "]\n");
    return 2;
}

[[maybe_unused]] static int run_program(int argc, char **argv, const program &p)
{
    const char *only = "";
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
        else
            return usage(argv[0], p);
    const auto chosen = [only](const section &s) { return !*only || strcmp(s.name, only) == 0; };
    if (std::none_of(p.sections.begin(), p.sections.end(), chosen))
        return usage(argv[0], p);
    const double begin = now_us();
    p.open();
    for (const section &s : p.sections)
        if (chosen(s)) {
            s.run();
            fflush(stdout);
        }
    printf("\ntargets%s\n", quick ? ", on a part of the points, with few repetitions" : "");
    p.summary();
    printf("\n%d targets met, %d missed\n", met, missed);
    p.close();
    printf("%.0f s\n", (now_us() - begin) * 1e-6);
    return 0;
}

#endif /* BENCH_GPU_H */

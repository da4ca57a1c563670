/* How fast does memory move, and what does it take? HBM to shared memory and HBM to HBM against the datasheet, by
   16-byte loads, by cp.async (sm_80 and newer) and by cp.async.bulk (sm_90 and newer), for many numbers and sizes of
   blocks and bytes in flight, from HBM (cold) and from L2 (warm). Everything read is summed and everything copied is
   compared; the plot goes to 09_bandwidth.svg.

       nvcc -arch=native -O3 examples/09_bandwidth.cu -o 09_bandwidth && ./09_bandwidth
*/
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { to_shared, to_hbm, destinations };
enum { cold, warm, temperatures };
enum { loads, cp_async, bulk, methods, copy = methods }; /* copy: cudaMemcpyAsync */

/* The sweep: blocks of 64 to 1024 threads, 1 to 16 of them on an SM, 16 to 256 bytes in flight per thread. Their
   product is how many bytes are in flight per SM. */
enum { sizes = 5, threads_min = 64, numbers = 5, depths = 5, points = sizes + numbers + depths - 2 };
enum { bytes_min = 16 * threads_min, bulk_stages = 4, regions = 4, rounds_max = 3, quick_threads = 256 };

static const char *const method_names[] = {"16-byte loads", "cp.async", "cp.async.bulk", "cudaMemcpyAsync"};
static const char *const destination_names[] = {"HBM to shared memory", "HBM to HBM"};

/* ---- kernels -------------------------------------------------------------------------------------------------------

   Every kernel reads words (of 16 bytes) tile by tile, block b the tiles b, b + blocks, b + 2 blocks, ... A word
   lies at its number modulo the set's size: the set is as large as what is read (cold), or read many times (warm). No
   kernel reads by way of L1, which would be another cache to keep out. */
typedef struct job {
    const uint4 *src;
    uint4 *dst;     /* HBM to HBM only */
    uint64_t words; /* to read */
    uint64_t mask;  /* the set's words, a power of two, less one */
    uint32_t stage; /* words that one bulk copy moves */
    uint32_t *sums; /* HBM to shared memory only: every warp adds what it found there */
} job;

typedef void (*kernel)(job);

/* PTX by name. Where the GPU compiled for has no such instruction these trap; main launches no kernel that would. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define SM80(...) asm volatile(__VA_ARGS__)
#else
#define SM80(...) __trap()
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SM90(...) asm volatile(__VA_ARGS__)
#else
#define SM90(...) __trap()
#endif

/* What PTX calls an address in shared memory. */
[[maybe_unused]] static __device__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes on their way to shared memory, past the registers and (.cg) past L1. */
static __device__ void cp_async_16(void *shared, const void *global)
{
    SM80("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

/* What this thread has started since the last commit is one group. */
static __device__ void cp_async_commit(void)
{
    SM80("cp.async.commit_group;" ::: "memory");
}

/* Until at most `pending` of this thread's youngest groups have not landed. */
template <int pending> static __device__ void cp_async_wait(void)
{
    SM80("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* A barrier that one arrival completes, once the bytes that it announced have landed too. */
static __device__ void mbarrier_init(uint64_t *barrier)
{
    SM90("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

/* The bulk copies' hardware sees the barriers initialised before. */
static __device__ void mbarrier_init_done(void)
{
    SM90("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The arrival, which announces the bytes. */
static __device__ void mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    SM90("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

/* Whether the phase of this parity is complete; waits a little by itself. */
static __device__ uint32_t mbarrier_try_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    SM90("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
         : "=r"(done)
         : "r"(shared_address(barrier)), "r"(parity)
         : "memory");
    return done;
}

static __device__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    for (unsigned tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
        if (tries == 1u << 26) /* seconds: a wait without end would hang the GPU */
            __trap();
}

/* One thread moves any multiple of 16 bytes; the barrier hears of every byte that has landed. */
static __device__ void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
             shared_address(shared)),
         "l"(global), "r"(bytes), "r"(shared_address(barrier))
         : "memory");
}

/* The other way, a group of its own. */
static __device__ void bulk_store(void *global, const void *shared, uint32_t bytes)
{
    SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
         "r"(bytes)
         : "memory");
    SM90("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until all but `pending` of this thread's stores have read their shared memory. */
template <int pending> static __device__ void bulk_wait_read(void)
{
    SM90("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

static __device__ uint32_t sum_of(uint4 word)
{
    return word.x + word.y + word.z + word.w;
}

static __device__ void add_to_sums(uint32_t *sums, uint32_t sum)
{
    for (int lanes = 16; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&sums[(blockIdx.x * blockDim.x + threadIdx.x) / 32], sum);
}

/* A thread's `depth` loads are all on their way before the first is used, and all used before the next are started. In
   shared memory a lane reads its neighbour's words: the compiler cannot leave them in registers. */
template <int depth, int to> static __global__ void loads_kernel(job j)
{
    extern __shared__ uint4 ring[];
    const uint32_t threads = blockDim.x, me = threadIdx.x, tile_words = depth * threads;
    const uint64_t tiles = j.words / tile_words;
    uint32_t sum = 0;
#pragma unroll 1
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint64_t at = (tile * tile_words & j.mask) + me;
        uint4 word[depth];
#pragma unroll
        for (int i = 0; i < depth; i++)
            word[i] = __ldcg(j.src + at + i * threads);
        if (to == to_shared)
            __syncwarp(); /* or the compiler would store the first words before it loads the last */
#pragma unroll
        for (int i = 0; i < depth; i++)
            (to == to_shared ? ring[i * threads + me] : j.dst[at + i * threads]) = word[i];
        if (to == to_shared) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < depth; i++)
                sum += sum_of(ring[i * threads + (me ^ 1)]);
            __syncwarp();
        }
    }
    if (to == to_shared)
        add_to_sums(j.sums, sum);
}

/* A ring of `depth` stages, a word per thread in each. A thread waits for its own oldest word, uses it and starts the
   next into its place: no thread waits for another, and `depth` words are always on their way. */
template <int depth, int to> static __global__ void cp_async_kernel(job j)
{
    extern __shared__ uint4 ring[];
    const uint32_t threads = blockDim.x, me = threadIdx.x;
    const uint64_t tiles = j.words / threads;
    uint64_t next = blockIdx.x;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < depth; i++, next += gridDim.x) {
        if (next < tiles)
            cp_async_16(&ring[i * threads + me], j.src + (next * threads & j.mask) + me);
        cp_async_commit(); /* of nothing, if need be: groups are counted */
    }
#pragma unroll 1
    for (uint64_t tile = blockIdx.x; tile < tiles;) {
#pragma unroll
        for (int i = 0; i < depth; i++, tile += gridDim.x, next += gridDim.x) {
            cp_async_wait<depth - 1>();
            if (tile < tiles) {
                const uint4 word = ring[i * threads + me];
                if (to == to_shared)
                    sum += sum_of(word);
                else
                    j.dst[(tile * threads & j.mask) + me] = word;
            }
            if (next < tiles)
                cp_async_16(&ring[i * threads + me], j.src + (next * threads & j.mask) + me);
            cp_async_commit();
        }
    }
    if (to == to_shared)
        add_to_sums(j.sums, sum);
}

/* Bulk copies: one thread of a block keeps a ring of stages filled; each has a barrier that says when it has landed. */
static __device__ void bulk_start(const job *j, uint4 *ring, uint64_t *landed, uint64_t n)
{
    const uint64_t tile = blockIdx.x + n * gridDim.x;
    const uint32_t stage = n % bulk_stages, bytes = 16 * j->stage;
    mbarrier_expect(&landed[stage], bytes);
    bulk_load(ring + stage * j->stage, j->src + (tile * j->stage & j->mask), bytes, &landed[stage]);
}

static __device__ uint64_t bulk_begin(const job *j, uint4 *ring, uint64_t *landed) /* returns how many tiles are its */
{
    const uint64_t tiles = j->words / j->stage;
    const uint64_t mine = blockIdx.x < tiles ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < bulk_stages; i++)
            mbarrier_init(&landed[i]);
        mbarrier_init_done();
        for (uint64_t n = 0; n < bulk_stages && n < mine; n++)
            bulk_start(j, ring, landed, n);
    }
    __syncthreads();
    return mine;
}

/* All threads sum what has landed, then one starts the next copy into its place. */
static __global__ void bulk_to_shared_kernel(job j)
{
    extern __shared__ __align__(128) uint4 ring[];
    __shared__ uint64_t landed[bulk_stages];
    const uint64_t mine = bulk_begin(&j, ring, landed);
    uint32_t sum = 0;
#pragma unroll 1
    for (uint64_t n = 0; n < mine; n++) {
        const uint32_t stage = n % bulk_stages;
        mbarrier_wait(&landed[stage], n / bulk_stages & 1);
        for (uint32_t i = threadIdx.x; i < j.stage; i += blockDim.x)
            sum += sum_of(ring[stage * j.stage + i]);
        __syncthreads();
        if (threadIdx.x == 0 && n + bulk_stages < mine)
            bulk_start(&j, ring, landed, n + bulk_stages);
    }
    add_to_sums(j.sums, sum);
}

/* One thread does it all: what has landed goes out by a bulk store, and the stage before, whose store has had time to
   read it, is filled anew. */
static __global__ void bulk_to_hbm_kernel(job j)
{
    extern __shared__ __align__(128) uint4 ring[];
    __shared__ uint64_t landed[bulk_stages];
    const uint64_t mine = bulk_begin(&j, ring, landed);
    if (threadIdx.x != 0)
        return;
#pragma unroll 1
    for (uint64_t n = 0; n < mine; n++) {
        const uint64_t tile = blockIdx.x + n * gridDim.x;
        const uint32_t stage = n % bulk_stages;
        mbarrier_wait(&landed[stage], n / bulk_stages & 1);
        bulk_store(j.dst + (tile * j.stage & j.mask), ring + stage * j.stage, 16 * j.stage);
        if (n > 0 && n - 1 + bulk_stages < mine) {
            bulk_wait_read<1>();
            bulk_start(&j, ring, landed, n - 1 + bulk_stages);
        }
    }
    bulk_wait_read<0>(); /* shared memory lasts no longer than the block */
}

#define DEPTHS(name, to)                                                                                               \
    {                                                                                                                  \
        name<1, to>, name<2, to>, name<4, to>, name<8, to>, name<16, to>                                               \
    }
#define EVERY_DEPTH(name)                                                                                              \
    {                                                                                                                  \
        name, name, name, name, name                                                                                   \
    }
static const kernel kernels[methods][destinations][depths] = {
    {DEPTHS(loads_kernel, to_shared), DEPTHS(loads_kernel, to_hbm)},
    {DEPTHS(cp_async_kernel, to_shared), DEPTHS(cp_async_kernel, to_hbm)},
    {EVERY_DEPTH(bulk_to_shared_kernel), EVERY_DEPTH(bulk_to_hbm_kernel)},
};

static __host__ __device__ uint32_t word_at(uint64_t i) /* what memory holds, in words of 4 bytes */
{
    return (uint32_t)i * 2654435761u;
}

static __global__ void fill(uint32_t *words, uint64_t count)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (uint64_t)blockDim.x)
        words[i] = word_at(i);
}

static __global__ void find_wrong(const uint32_t *words, uint64_t first, uint64_t count, unsigned long long *wrong)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (uint64_t)blockDim.x)
        if (words[first + i] != word_at(first + i))
            atomicMin(wrong, (unsigned long long)(first + i));
}

/* One load at a time: the next address waits for what this one brings. zero is 0, which the compiler does not know. */
static __global__ void chase(const uint32_t *words, uint32_t step, int count, uint32_t zero, uint32_t *sink)
{
    uint32_t at = 0;
    for (int i = 0; i < count; i++)
        at += step + (__ldcg(words + at) & zero);
    *sink = at;
}

/* ---- measuring -------------------------------------------------------------------------------------------------- */

typedef struct shape {
    int method, to, threads, depth; /* depth: 16 << depth bytes in flight per thread */
    int blocks;                     /* on an SM; 0: as many in all as sms says */
    int sms;
} shape;

typedef struct result {
    shape s;
    int temperature;
    double gbs; /* 1e9 bytes per second: read, and written for HBM to HBM */
} result;

static result results[methods * destinations * temperatures * sizes * numbers * depths];
static int results_count;

static struct {
    cudaDeviceProp device;
    double peak, copied; /* GB/s: by memory clock and bus width, 0 if unknown; of cudaMemcpyAsync */
    double latency_ns[temperatures];
    int has[methods], rounds, quick;
    uint64_t l2, region, warm_set; /* bytes */
    char *src, *dst;               /* `regions` of them each */
    uint32_t *sums;
    unsigned long long *wrong;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} g;

static void cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static uint64_t in_flight(const shape *s) /* per SM */
{
    return (uint64_t)s->blocks * (uint64_t)s->threads * (16u << s->depth);
}

static void describe(const shape *s, char *text, size_t size)
{
    snprintf(text, size, "%2d x %4d x %3d", s->blocks, s->threads, 16 << s->depth);
}

static size_t shared_bytes(const shape *s)
{
    return s->method == loads && s->to == to_hbm ? 0 : (size_t)s->threads * (16u << s->depth);
}

static int fits(const shape *s) /* all its blocks run at once */
{
    int blocks = 0;
    if (shared_bytes(s) + bulk_stages * sizeof(uint64_t) > g.device.sharedMemPerBlockOptin)
        return 0;
    cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernels[s->method][s->to][s->depth], s->threads,
                                                       shared_bytes(s)),
         "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks >= s->blocks;
}

/* Reads as many bytes as a region has: the region, or a smaller set from the start of memory as often as it takes. */
static void launch(const shape *s, uint64_t set, int region)
{
    const uint64_t offset = set == g.region ? (uint64_t)region * g.region : 0;
    job j = {};
    if (s->method == copy) {
        cuda(cudaMemcpyAsync(g.dst + offset, g.src + offset, g.region, cudaMemcpyDeviceToDevice, g.stream), "copy");
        return;
    }
    j.src = (const uint4 *)(g.src + offset);
    j.dst = (uint4 *)(g.dst + offset);
    j.words = g.region / 16;
    j.mask = set / 16 - 1;
    j.stage = (uint32_t)((s->threads << s->depth) / bulk_stages);
    j.sums = g.sums;
    const unsigned grid = (unsigned)(s->blocks ? s->blocks * g.device.multiProcessorCount : s->sms);
    kernels[s->method][s->to][s->depth]<<<grid, (unsigned)s->threads, shared_bytes(s), g.stream>>>(j);
    cuda(cudaGetLastError(), method_names[s->method]);
}

static size_t sums_count(void) /* as many as an SM has warps, everywhere */
{
    return (size_t)g.device.multiProcessorCount * (size_t)g.device.maxThreadsPerMultiProcessor / 32;
}

static uint32_t sum_of_words(uint64_t count) /* of the first so many, of 4 bytes: word_at is a product */
{
    return word_at(count * (count - 1) / 2);
}

/* Sums, where something was read; the copy of one region, where something was copied. Ends the program if wrong. */
static void verify(const shape *s, uint64_t set, int rounds)
{
    const uint64_t first = set == g.region ? (regions - 1) * g.region / 4 : 0, all = regions * g.region;
    uint32_t *const sums = (uint32_t *)malloc(sums_count() * sizeof *sums), expected, sum = 0;
    unsigned long long wrong;
    char text[64];
    find_wrong<<<1024, 256, 0, g.stream>>>((const uint32_t *)g.dst, first, s->to == to_hbm ? set / 4 : 0, g.wrong);
    cuda(cudaGetLastError(), "find_wrong");
    cuda(cudaMemcpyAsync(&wrong, g.wrong, sizeof wrong, cudaMemcpyDeviceToHost, g.stream), "cudaMemcpyAsync");
    cuda(cudaMemcpyAsync(sums, g.sums, sums_count() * sizeof *sums, cudaMemcpyDeviceToHost, g.stream),
         "cudaMemcpyAsync");
    cuda(cudaStreamSynchronize(g.stream), method_names[s->method]);
    for (size_t i = 0; i < sums_count(); i++)
        sum += sums[i];
    free(sums);
    expected = set == g.region ? sum_of_words(all / 4) : (uint32_t)(all / set) * sum_of_words(set / 4);
    expected *= s->to == to_shared ? (uint32_t)rounds : 0;
    if (wrong == ~0ull && sum == expected)
        return;
    describe(s, text, sizeof text);
    printf("WRONG: %s, %s, %s, set of %llu bytes: ", destination_names[s->to], method_names[s->method], text,
           (unsigned long long)set);
    if (wrong != ~0ull) {
        uint32_t got;
        cuda(cudaMemcpy(&got, g.dst + 4 * wrong, sizeof got, cudaMemcpyDeviceToHost), "reading back");
        printf("word %llu of the copy is %08x, expected %08x\n", wrong, got, word_at(wrong));
    } else
        printf("the words' sum is %08x, expected %08x\n", sum, expected);
    exit(1);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* GB/s: the median of some rounds. In each, launches take all regions in turn; the first is not timed, so that the GPU
   is at work when the host enqueues the rest. */
static double measure(const shape *s, uint64_t set)
{
    const uint64_t poisoned = set == g.region ? (regions - 1) * g.region : 0;
    double ms[rounds_max], all_ms = 0;
    int n = 0;
    cuda(cudaMemsetAsync(g.sums, 0, sums_count() * sizeof *g.sums, g.stream), "cudaMemsetAsync");
    cuda(cudaMemsetAsync(g.wrong, 0xff, sizeof *g.wrong, g.stream), "cudaMemsetAsync");
    if (s->to == to_hbm)
        cuda(cudaMemsetAsync(g.dst + poisoned, 0xee, set, g.stream), "cudaMemsetAsync");
    while (n < g.rounds && all_ms < 10) { /* what takes long is not measured again */
        float elapsed;
        launch(s, set, regions - 1);
        cuda(cudaEventRecord(g.begin, g.stream), "cudaEventRecord");
        for (int r = 0; r < regions - 1; r++)
            launch(s, set, r);
        cuda(cudaEventRecord(g.end, g.stream), "cudaEventRecord");
        cuda(cudaEventSynchronize(g.end), method_names[s->method]);
        cuda(cudaEventElapsedTime(&elapsed, g.begin, g.end), "cudaEventElapsedTime");
        all_ms += ms[n++] = elapsed;
    }
    verify(s, set, n);
    qsort(ms, (size_t)n, sizeof *ms, ascending);
    return 1e-6 * (s->to == to_hbm ? 2 : 1) * (double)((regions - 1) * g.region) / ms[n / 2];
}

static void sweep(void)
{
    for (int i = 0; i < methods * destinations * temperatures * sizes * numbers * depths; i++) {
        const int threads = threads_min << i % sizes, number = i / sizes % numbers,
                  depth = i / sizes / numbers % depths;
        const int rest = i / sizes / numbers / depths, method = rest / temperatures / destinations;
        const shape s = {method, rest / temperatures % destinations, threads, depth, 1 << number, 0};
        const int temperature = rest % temperatures;
        if (!g.has[method] || (g.quick && threads != quick_threads) || !fits(&s))
            continue;
        result *const r = &results[results_count++];
        r->s = s;
        r->temperature = temperature;
        r->gbs = measure(&s, temperature == cold ? g.region : g.warm_set);
    }
}

/* The fastest of a method (or of all: -1) with so many bytes in flight per SM (0: with any), NULL if none was measured;
   the slowest for sign -1. */
static const result *extreme(int sign, int to, int temperature, int method, uint64_t bytes)
{
    const result *found = NULL;
    for (const result *r = results; r < results + results_count; r++)
        if (r->s.to == to && r->temperature == temperature && (method < 0 || r->s.method == method) &&
            (bytes == 0 || in_flight(&r->s) == bytes) && (!found || sign * r->gbs > sign * found->gbs))
            found = r;
    return found;
}

static const result *best(int to, int temperature, int method, uint64_t bytes)
{
    return extreme(1, to, temperature, method, bytes);
}

/* Nanoseconds of a load, cold and warm. Far enough apart that each is of a line of its own, near enough that no page is
   new: the first pass, over other lines, has met them all. */
static void measure_latency(void)
{
    enum { step_bytes = 33 * 128, aside_bytes = 16 * 128, loads_max = 4096 };
    const uint64_t most = regions * g.region / step_bytes - 1;
    const int count = most < loads_max ? (int)most : loads_max;
    const uint32_t *const words = (const uint32_t *)g.src;
    float ms[temperatures];
    cuda(cudaMemsetAsync(g.dst, 0, g.region, g.stream), "cudaMemsetAsync"); /* nothing else stays in L2 */
    chase<<<1, 1, 0, g.stream>>>(words + aside_bytes / 4, step_bytes / 4, count, 0, g.sums);
    for (int t = cold; t <= warm; t++) {
        cuda(cudaEventRecord(g.begin, g.stream), "cudaEventRecord");
        chase<<<1, 1, 0, g.stream>>>(words, step_bytes / 4, count, 0, g.sums);
        cuda(cudaGetLastError(), "chase");
        cuda(cudaEventRecord(g.end, g.stream), "cudaEventRecord");
        cuda(cudaEventSynchronize(g.end), "chase");
        cuda(cudaEventElapsedTime(&ms[t], g.begin, g.end), "cudaEventElapsedTime");
        g.latency_ns[t] = 1e6 * (double)ms[t] / count;
    }
}

/* ---- what is printed -------------------------------------------------------------------------------------------- */

static double of_peak(double gbs) /* per cent */
{
    return g.peak > 0 ? 100 * gbs / g.peak : 0;
}

static void print_best(int to)
{
    char text[64];
    printf("\n%s, GB/s %s: the best number and size of blocks with so many bytes in flight per SM\n%8s",
           destination_names[to], to == to_hbm ? "read and written" : "read", "");
    printf("   %-41s   %s\n%8s", "cold", "L2-warm", "per SM");
    for (int t = cold; t <= warm; t++)
        printf("  %14s%14s%14s", method_names[loads], method_names[cp_async], method_names[bulk]);
    for (int p = 0; p < points; p++) {
        const uint64_t bytes = (uint64_t)bytes_min << p;
        if (!best(to, cold, -1, bytes))
            continue;
        printf("\n%5llu KB", (unsigned long long)bytes >> 10);
        for (int k = 0; k < temperatures * methods; k++) {
            const result *const r = best(to, k / methods, k % methods, bytes);
            snprintf(text, sizeof text, "%.0f", r ? r->gbs : 0);
            printf("%*s", k % methods ? 14 : 16, r ? text : "-");
        }
    }
    printf("\n");
    for (int k = 0; k < temperatures * methods; k++) {
        const result *const r = best(to, k / methods, k % methods, 0);
        if (!r)
            continue;
        describe(&r->s, text, sizeof text);
        printf("  best %-7s %-13s  %s  %6.0f GB/s", k / methods == cold ? "cold" : "warm", method_names[k % methods],
               text, r->gbs);
        if (g.peak > 0)
            printf(", %5.1f %% of the datasheet", of_peak(r->gbs));
        printf(", %.2f of cudaMemcpyAsync\n", r->gbs / g.copied);
    }
    printf("  (blocks on an SM x threads of a block x bytes in flight per thread)\n");
}

/* Milliseconds of one launch alone, after one that read the same region or another. */
static double after(const shape *s, int same)
{
    double all[5];
    for (int i = 0; i < 5; i++) {
        float ms;
        launch(s, g.region, (same ? i : i + 2) % regions);
        cuda(cudaEventRecord(g.begin, g.stream), "cudaEventRecord");
        launch(s, g.region, i % regions);
        cuda(cudaEventRecord(g.end, g.stream), "cudaEventRecord");
        cuda(cudaEventSynchronize(g.end), "after");
        cuda(cudaEventElapsedTime(&ms, g.begin, g.end), "cudaEventElapsedTime");
        all[i] = ms;
    }
    qsort(all, 5, sizeof *all, ascending);
    return all[2];
}

static void print_cache(void)
{
    const result *const r = best(to_shared, cold, -1, 0);
    const double other = after(&r->s, 0), same = after(&r->s, 1);
    printf("\nHow is the cache's effect kept out?\n"
           "  Every byte is read once per launch, and each launch reads another of %d regions of %llu MiB: %.1f times "
           "the\n"
           "  L2 (%.4g MiB) goes by before a byte is read again. L1 is passed by. What it would be otherwise, for the\n"
           "  fastest kernel (%s): one set read again and again,\n    MiB       ",
           regions, (unsigned long long)g.region >> 20, (double)(regions - 1) * (double)g.region / (double)g.l2,
           (double)g.l2 / 1048576, method_names[r->s.method]);
    for (uint64_t set = g.warm_set; set < g.region; set *= 2)
        printf("%8.4g", (double)set / 1048576);
    printf("    cold\n    GB/s      ");
    for (uint64_t set = g.warm_set; set < g.region; set *= 2)
        printf("%8.0f", measure(&r->s, set));
    printf("%8.0f\n", r->gbs);
    printf("  and one region read twice in a row: the second time takes %.3f of the time that another region takes.\n",
           same / other);
    if (g.peak > 0)
        printf("  Cold, it has %.1f %% of the datasheet's bandwidth%s.\n", of_peak(r->gbs),
               r->gbs > g.peak ? ": MORE THAN THERE IS, some of it is a cache's" : ", which only a cache could exceed");
}

static void print_blocks_of(int method)
{
    enum { depth = 2 };
    printf("  %-14s", method_names[method]);
    for (int n = 0; n < numbers; n++)
        printf("%5d per SM", 1 << n);
    for (int i = 0; i < sizes; i++) {
        if (g.quick && threads_min << i != quick_threads)
            continue;
        printf("\n%8d threads", threads_min << i);
        for (int n = 0; n < numbers; n++) {
            const result *found = NULL;
            for (const result *r = results; r < results + results_count; r++)
                if (r->s.method == method && r->s.to == to_shared && r->temperature == cold && r->s.depth == depth &&
                    r->s.threads == threads_min << i && r->s.blocks == 1 << n)
                    found = r;
            found ? printf("%12.0f", found->gbs) : printf("%12s", "-");
        }
    }
    printf("\n");
}

/* How many bytes in flight per SM so many GB/s take, cold: on the line between the measured points around them; 0 if
   they are never reached. */
static double bytes_for(int to, int method, double gbs)
{
    const result *below = NULL;
    for (int p = 0; p < points; p++) {
        const result *const r = best(to, cold, method, (uint64_t)bytes_min << p);
        if (r && r->gbs >= gbs && below)
            return (double)in_flight(&below->s) +
                   (double)(in_flight(&r->s) - in_flight(&below->s)) * (gbs - below->gbs) / (r->gbs - below->gbs);
        if (r && r->gbs >= gbs)
            return (double)in_flight(&r->s);
        below = r ? r : below;
    }
    return 0;
}

static void print_same_bytes(int method, uint64_t bytes)
{
    const result *const fast = best(to_shared, cold, method, bytes),
                        *slow = extreme(-1, to_shared, cold, method, bytes);
    char fast_text[64], slow_text[64];
    if (!fast)
        return;
    describe(&fast->s, fast_text, sizeof fast_text);
    describe(&slow->s, slow_text, sizeof slow_text);
    printf("    %-13s  %s  %6.0f GB/s at best, %s  %6.0f at worst: %.2f\n", method_names[method], fast_text, fast->gbs,
           slow_text, slow->gbs, slow->gbs / fast->gbs);
}

static void print_few_blocks(int method)
{
    const result *alone = NULL; /* the fastest with one block on an SM */
    for (const result *r = results; r < results + results_count; r++)
        if (r->s.method == method && r->s.to == to_shared && r->temperature == cold && r->s.blocks == 1 &&
            (!alone || r->gbs > alone->gbs))
            alone = r;
    if (!alone)
        return;
    printf("    %-13s", method_names[method]);
    for (int part = 8; part > 1; part /= 2) {
        shape s = alone->s;
        s.blocks = 0;
        s.sms = g.device.multiProcessorCount / part > 0 ? g.device.multiProcessorCount / part : 1;
        printf("  %4d: %5.0f", s.sms, measure(&s, g.region));
    }
    printf("  %4d: %5.0f\n", g.device.multiProcessorCount, alone->gbs);
}

static void print_blocks(void)
{
    const double enough = bytes_for(to_shared, -1, 0.9 * best(to_shared, cold, -1, 0)->gbs);
    uint64_t bytes = bytes_min;
    while ((double)bytes < enough)
        bytes *= 2;
    printf("\nHow do the number of blocks and their size change it?\n"
           "  HBM to shared memory, cold, 64 bytes in flight per thread, GB/s:\n");
    for (int m = 0; m < methods; m++)
        if (g.has[m])
            print_blocks_of(m);
    printf("  The same %llu KB in flight per SM in different numbers, sizes and depths:\n",
           (unsigned long long)bytes >> 10);
    for (int m = 0; m < methods; m++)
        print_same_bytes(m, bytes);
    printf("  So far as these ratios are near 1, only the product counts: bytes in flight per SM.\n"
           "  Fewer blocks than SMs, the fastest that a method has with one on an SM (blocks: GB/s):\n");
    for (int m = 0; m < methods; m++)
        print_few_blocks(m);
}

static void print_little(void)
{
    const double sms = g.device.multiProcessorCount, fastest = best(to_shared, cold, -1, 0)->gbs;
    printf(
        "\nLittle's law: bytes in flight = latency x bandwidth\n"
        "  One load at a time takes %.0f ns from HBM and %.0f ns from L2. For the best %.0f GB/s the former asks for\n"
        "  %.1f KB in flight on each of %.0f SMs, and more since memory under load takes longer to answer.\n"
        "  90 %% of the best cold bandwidth is reached with\n",
        g.latency_ns[cold], g.latency_ns[warm], fastest, g.latency_ns[cold] * fastest / sms / 1024, sms);
    for (int k = 0; k < destinations * methods; k++) {
        const int to = k / methods, method = k % methods;
        const double gbs = 0.9 * best(to, cold, -1, 0)->gbs, bytes = bytes_for(to, method, gbs);
        if (bytes > 0)
            printf("    %5.1f KB in flight per SM, %s by %s: %.0f ns under way\n", bytes / 1024, destination_names[to],
                   method_names[method], bytes * sms / (to == to_hbm ? gbs / 2 : gbs));
        else if (g.has[method])
            printf("    never: %s by %s\n", destination_names[to], method_names[method]);
    }
    printf("  (in flight: as many as may be, by the kernel's form. Plain loads are fewer on average: a thread uses all "
           "of\n"
           "  them before it starts the next.)\n");
    if (g.peak > 0)
        printf(
            "  43 %% of the datasheet, as the notes that ask these questions have it of an H100 (1.3 of 3.0 TB/s), is\n"
            "  what %.1f KB in flight per SM give here, by 16-byte loads to shared memory.\n",
            bytes_for(to_shared, loads, 0.43 * g.peak) / 1024);
}

/* ---- the plot: two panels of cold and warm for each destination ------------------------------------------------- */

enum { panel_width = 400, panel_height = 220, left = 70, top = 148, between_x = 30, between_y = 90 };
static const char *const peak_dashes = "8 4", *const copy_dashes = "2 3";
static const char *const colours[methods] = {"#2878c8", "#d97706", "#2a9d5c"};

/* Text and background follow the reader's preference; without one they are dark on white. */
static void svg_head(FILE *f, int width, int height)
{
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n<style>\n"
            "  .back { fill: #ffffff } text { fill: #222222 } .grid { stroke: #dddddd } .axis { stroke: #555555 }\n"
            "  .limit { stroke: #555555; fill: none }\n"
            "  @media (prefers-color-scheme: dark) {\n"
            "    .back { fill: #16181d } text { fill: #e4e4e4 } .grid { stroke: #3a3d44 } .axis { stroke: #b0b0b0 }\n"
            "    .limit { stroke: #b0b0b0 }\n  }\n</style>\n"
            "<rect class=\"back\" width=\"%d\" height=\"%d\"/>\n",
            width, height, width, height, width, height);
}

/* A circle, a square, a triangle: to be told apart without colours too. */
static void svg_mark(FILE *f, int method, double x, double y)
{
    if (method == loads)
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n", x, y, colours[method]);
    else if (method == cp_async)
        fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"8\" fill=\"%s\"/>\n", x - 4, y - 4,
                colours[method]);
    else
        fprintf(f, "<path d=\"M%.1f %.1f l5 9 h-10 z\" fill=\"%s\"/>\n", x, y - 6, colours[method]);
}

static void svg_limit(FILE *f, int x, const char *dashes, const char *name, double gbs)
{
    fprintf(f, "<path class=\"limit\" d=\"M%d 96 h30\" stroke-dasharray=\"%s\"/>\n", x, dashes);
    fprintf(f, "<text x=\"%d\" y=\"101\">%s, %.0f GB/s</text>\n", x + 38, name, gbs);
}

static void svg_legend(FILE *f)
{
    int x = left;
    for (int m = 0; m < methods; m++) {
        if (!g.has[m])
            continue;
        fprintf(f, "<path d=\"M%d 74 h30\" stroke=\"%s\" stroke-width=\"2\"/>\n", x, colours[m]);
        svg_mark(f, m, x + 15, 74);
        fprintf(f, "<text x=\"%d\" y=\"79\">%s</text>\n", x + 38, method_names[m]);
        x += 170;
    }
    svg_limit(f, left, copy_dashes, method_names[copy], g.copied);
    if (g.peak > 0)
        svg_limit(f, left + 340, peak_dashes, "datasheet", g.peak);
}

static double svg_y(double gbs, double gbs_max)
{
    return panel_height * (1 - gbs / gbs_max);
}

static double svg_x(int point, int points_used)
{
    return panel_width * (0.5 + point) / points_used;
}

static void svg_axes(FILE *f, int temperature, double step, double gbs_max, int points_used)
{
    for (double v = 0; v <= gbs_max; v += step) {
        const double y = svg_y(v, gbs_max);
        fprintf(f, "<path class=\"%s\" d=\"M0 %.1f h%d\"/>\n", v > 0 ? "grid" : "axis", y, panel_width);
        if (temperature == cold)
            fprintf(f, "<text x=\"-8\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n", y + 4, v);
    }
    for (int p = 0; p < points_used; p++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", svg_x(p, points_used),
                panel_height + 18, (bytes_min << p) >> 10);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">KB in flight per SM</text>\n", panel_width / 2,
            panel_height + 38);
}

static void svg_line(FILE *f, int to, int temperature, int method, double gbs_max, int points_used)
{
    int any = 0;
    for (int p = 0; p < points_used; p++) {
        const result *const r = best(to, temperature, method, (uint64_t)bytes_min << p);
        if (r)
            fprintf(f, "%s%.1f %.1f", any++ ? " L" : "<path fill=\"none\" d=\"M", svg_x(p, points_used),
                    svg_y(r->gbs, gbs_max));
    }
    if (any)
        fprintf(f, "\" stroke=\"%s\" stroke-width=\"2\"/>\n", colours[method]);
    for (int p = 0; p < points_used; p++) {
        const result *const r = best(to, temperature, method, (uint64_t)bytes_min << p);
        if (r)
            svg_mark(f, method, svg_x(p, points_used), svg_y(r->gbs, gbs_max));
    }
}

static void svg_panel(FILE *f, int to, int temperature, double step, double gbs_max, int points_used)
{
    fprintf(f, "<g transform=\"translate(%d %d)\">\n<text y=\"-12\" font-weight=\"bold\">%s, %s (GB/s %s)</text>\n",
            left + temperature * (panel_width + between_x), top + to * (panel_height + between_y),
            destination_names[to], temperature == cold ? "cold" : "L2-warm",
            to == to_hbm ? "read and written" : "read");
    svg_axes(f, temperature, step, gbs_max, points_used);
    for (int k = 0; k < 2; k++)
        if (k == 0 || g.peak > 0)
            fprintf(f, "<path class=\"limit\" d=\"M0 %.1f h%d\" stroke-dasharray=\"%s\"/>\n",
                    svg_y(k ? g.peak : g.copied, gbs_max), panel_width, k ? peak_dashes : copy_dashes);
    for (int m = 0; m < methods; m++)
        svg_line(f, to, temperature, m, gbs_max, points_used);
    fprintf(f, "</g>\n");
}

static void write_svg(const char *path)
{
    const int width = left + 2 * panel_width + between_x + 20, height = top + 2 * panel_height + between_y + 60;
    FILE *const f = fopen(path, "w");
    double gbs_max = g.peak > g.copied ? g.peak : g.copied, step = 1;
    int points_used = 1;
    if (!f) {
        printf("%s: cannot be written\n", path);
        exit(1);
    }
    for (const result *r = results; r < results + results_count; r++)
        gbs_max = r->gbs > gbs_max ? r->gbs : gbs_max;
    for (int p = 0; p < points; p++)
        if (best(to_shared, cold, -1, (uint64_t)bytes_min << p) || best(to_hbm, cold, -1, (uint64_t)bytes_min << p))
            points_used = p + 1;
    for (int i = 0; gbs_max / step > 8; i++) /* 1, 2, 5, 10, 20, 50, ... */
        step *= i % 3 == 1 ? 2.5 : 2;
    gbs_max = step * (double)(int)(gbs_max / step + 1);
    svg_head(f, width, height);
    fprintf(f, "<text x=\"%d\" y=\"32\" font-size=\"18\" font-weight=\"bold\">Memory bandwidth of %s</text>\n", left,
            g.device.name);
    fprintf(f,
            "<text x=\"%d\" y=\"52\">the best number and size of blocks for every number of bytes in flight</text>\n",
            left);
    svg_legend(f);
    for (int k = 0; k < destinations * temperatures; k++)
        svg_panel(f, k / temperatures, k % temperatures, step, gbs_max, points_used);
    fprintf(f, "</svg>\n");
    if (ferror(f) | fclose(f)) {
        printf("%s: cannot be written\n", path);
        exit(1);
    }
    printf("\nplot in %s\n", path);
}

/* ---- setting up ------------------------------------------------------------------------------------------------- */

static int attribute(cudaDeviceAttr which)
{
    int value = 0;
    cuda(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
    return value;
}

/* Which GPU, and the peak by its datasheet: memory clock, twice (double data rate), times the bus's width. */
static void open_gpu(void)
{
    int devices = 0, driver, runtime;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("this program needs a CUDA device, and there is none\n");
        exit(1);
    }
    cuda(cudaSetDevice(0), "cudaSetDevice");
    cuda(cudaGetDeviceProperties(&g.device, 0), "cudaGetDeviceProperties");
    cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    printf("%s, %d SMs, compute capability %d.%d, %.4g MiB of L2; CUDA driver %d.%d, runtime %d.%d\n", g.device.name,
           g.device.multiProcessorCount, g.device.major, g.device.minor, g.device.l2CacheSize / 1048576.0,
           driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    const int khz = attribute(cudaDevAttrMemoryClockRate), bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
    g.peak = 1e-6 * khz * 2 * bits / 8;
    if (g.peak > 0)
        printf("datasheet: %.0f MHz x 2 (double data rate) x %d bits = %.0f GB/s\n", 1e-3 * khz, bits, g.peak);
    else
        printf("datasheet: the driver does not tell the memory's clock or width, so none is compared with\n");
    cuda(cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    cuda(cudaEventCreate(&g.begin), "cudaEventCreate");
    cuda(cudaEventCreate(&g.end), "cudaEventCreate");
}

/* A method needs a GPU that has it and a program compiled for one that has it. */
static void open_methods(void)
{
    static const int needed[methods] = {0, 80, 90};
    for (int k = 0; k < methods * destinations * depths; k++) {
        const int m = k / destinations / depths, capability = 10 * g.device.major + g.device.minor;
        const void *const code = (const void *)kernels[m][k / depths % destinations][k % depths];
        cudaFuncAttributes a;
        cuda(cudaFuncGetAttributes(&a, code), "cudaFuncGetAttributes");
        g.has[m] = capability >= needed[m] && a.ptxVersion >= needed[m];
        if (!g.has[m] && k % (destinations * depths) == 0)
            printf("skipped: %s, which needs compute capability %.1f (the GPU has %.1f, this program is for %.1f)\n",
                   method_names[m], needed[m] / 10.0, capability / 10.0, a.ptxVersion / 10.0);
        cuda(cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)(g.device.sharedMemPerBlockOptin - a.sharedSizeBytes)),
             "cudaFuncSetAttribute");
        cuda(cudaFuncSetAttribute(code, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute");
    }
}

/* A region: 8 times the L2, at least 128 MiB, a power of two; halved until 4 to read and 4 to write take at most half
   of the free memory. The warm set: a quarter of the L2, a power of two, but no less than the largest tile. */
static void open_memory(void)
{
    enum { tile_max = 16 * 16 * 1024 };
    size_t free_bytes, total_bytes;
    g.l2 = g.device.l2CacheSize > 0 ? (uint64_t)g.device.l2CacheSize : 1 << 20;
    for (g.region = 128 << 20; g.region < 8 * g.l2;)
        g.region *= 2;
    cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    while (2 * regions * g.region > free_bytes / 2 && g.region > tile_max)
        g.region /= 2;
    for (g.warm_set = tile_max; 2 * g.warm_set <= g.l2 / 4 && 2 * g.warm_set < g.region;)
        g.warm_set *= 2;
    if (g.region < 2 * g.l2 || g.region <= g.warm_set) {
        printf("%zu MiB of GPU memory are free: too little, the cache would be measured\n", free_bytes >> 20);
        exit(1);
    }
    printf(
        "cold: %d regions of %llu MiB in turn (8 times the L2, 128 MiB at least, a power of two; less where memory is "
        "scarce)\nwarm: %.4g MiB, again and again (a quarter of the L2, a power of two)\n",
        regions, (unsigned long long)g.region >> 20, (double)g.warm_set / 1048576);
    cuda(cudaMalloc(&g.src, regions * g.region), "cudaMalloc");
    cuda(cudaMalloc(&g.dst, regions * g.region), "cudaMalloc");
    cuda(cudaMalloc(&g.sums, sums_count() * sizeof *g.sums), "cudaMalloc");
    cuda(cudaMalloc(&g.wrong, sizeof *g.wrong), "cudaMalloc");
    fill<<<1024, 256, 0, g.stream>>>((uint32_t *)g.src, regions * g.region / 4);
    cuda(cudaGetLastError(), "fill");
    cuda(cudaStreamSynchronize(g.stream), "fill");
}

static void usage(FILE *to, const char *program)
{
    fprintf(to,
            "usage: %s [--svg FILE] [--quick]\n"
            "  --svg FILE  where the plot goes (09_bandwidth.svg)\n"
            "  --quick     blocks of %d threads alone, each measured once\n"
            "  --help      this\n",
            program, quick_threads);
}

int main(int argc, char **argv)
{
    const char *svg = "09_bandwidth.svg";
    const shape copying = {copy, to_hbm, 0, 0, 0, 0};
    g.rounds = rounds_max;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--svg") == 0 && i + 1 < argc)
            svg = argv[++i];
        else if (strcmp(argv[i], "--quick") == 0)
            g.quick = g.rounds = 1;
        else if (strcmp(argv[i], "--help") == 0) {
            usage(stdout, argv[0]);
            return 0;
        } else {
            fprintf(stderr, "%s: %s\n", argv[i], strcmp(argv[i], "--svg") ? "no such option" : "without a file's name");
            usage(stderr, argv[0]);
            return 2;
        }
    }
    open_gpu();
    open_methods();
    open_memory();
    g.copied = measure(&copying, g.region);
    printf("cudaMemcpyAsync, device to device, of %llu MiB: %.0f GB/s read and written",
           (unsigned long long)g.region >> 20, g.copied);
    g.peak > 0 ? printf(", %.1f %% of the datasheet\n", of_peak(g.copied)) : printf("\n");
    sweep();
    measure_latency();
    print_best(to_shared);
    print_best(to_hbm);
    print_cache();
    print_blocks();
    print_little();
    write_svg(svg);
    return 0;
}

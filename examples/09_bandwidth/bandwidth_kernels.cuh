/* SPDX-License-Identifier: MIT */
/* The kernels of 09_bandwidth: three ways to read memory into shared memory, or to copy it to other memory.

   Each kernel reads words of 16 bytes in tiles. Block b reads tiles b, b + blocks, b + 2 blocks, and so on. Word i lies
   at i modulo the size of the set: the set is as large as what is read (cold), or smaller and read many times (warm).
   No kernel reads through L1, which would be one more cache to exclude.

       loads       16-byte loads into registers, then stores
       cp_async    cp.async to shared memory, which bypasses registers (sm_80 and newer)
       bulk        cp.async.bulk: one thread starts copies of whole stages (sm_90 and newer)

   kernels[method][to][depth] keeps 16 << depth bytes per thread in flight. */
#ifndef BANDWIDTH_KERNELS_CUH
#define BANDWIDTH_KERNELS_CUH

#include <cuda_pipeline_primitives.h> /* cp.async */
#include <cuda_runtime.h>
#include <stdint.h>

enum { to_shared, to_hbm, destinations };
enum { loads, cp_async, bulk, methods };
enum { depths = 5, bulk_stages = 4 };

typedef struct job {
    const uint4 *src;
    uint4 *dst;     /* HBM to HBM only */
    uint64_t words; /* to read */
    uint64_t mask;  /* words of the set, a power of two, minus 1 */
    uint32_t stage; /* words that one bulk copy moves */
    uint32_t *sums; /* HBM to shared memory only: each warp adds the sum of what it read */
} job;

typedef void (*kernel)(job);

/* PTX of sm_90. On an older GPU it traps: the program must not launch such a kernel there. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SM90(...) asm volatile(__VA_ARGS__)
#else
#define SM90(...) __trap()
#endif

/* Returns the 32-bit shared-memory address that PTX takes. */
[[maybe_unused]] static __device__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Initialises barriers whose phase completes after one arrival and the bytes that it announced. The fence makes them
   visible to the hardware that does the bulk copies. */
static __device__ void mbarriers_init(uint64_t *barriers, int count)
{
    for (int i = 0; i < count; i++)
        SM90("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    SM90("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Waits until the phase of this parity is complete. */
static __device__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    for (unsigned tries = 0; !done; tries++) {
        if (tries == 1u << 26) /* traps after seconds (each try waits a little) instead of hanging the GPU */
            __trap();
        SM90("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
             : "=r"(done)
             : "r"(shared_address(barrier)), "r"(parity)
             : "memory");
    }
}

/* One thread loads any multiple of 16 bytes. It announces the bytes at the barrier, and the copy counts them there. */
static __device__ void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    const uint32_t to = shared_address(shared), at = shared_address(barrier);
    SM90("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
         "l"(global), "r"(bytes), "r"(at)
         : "memory");
}

/* One thread stores any multiple of 16 bytes, as a group of its own. */
static __device__ void bulk_store(void *global, const void *shared, uint32_t bytes)
{
    SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
         "r"(bytes)
         : "memory");
    SM90("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until all except the last `pending` stores of this thread have read their shared memory. */
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

/* Each thread starts `depth` loads, then uses all of them, then starts the next ones. In shared memory each lane reads
   its neighbour's words, so that the compiler cannot leave them in registers. */
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
            __syncwarp(); /* keeps the compiler from storing the first words before it loads the last */
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

/* A ring has `depth` stages of one word per thread. Each thread waits for its own oldest word, uses it, and starts the
   next load into its place. No thread waits for another, and `depth` words are always in flight. */
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
            __pipeline_memcpy_async(&ring[i * threads + me], j.src + (next * threads & j.mask) + me, 16);
        __pipeline_commit(); /* even an empty group: the wait below counts groups */
    }
#pragma unroll 1
    for (uint64_t tile = blockIdx.x; tile < tiles;) {
#pragma unroll
        for (int i = 0; i < depth; i++, tile += gridDim.x, next += gridDim.x) {
            __pipeline_wait_prior(depth - 1);
            if (tile < tiles) {
                const uint4 word = ring[i * threads + me];
                if (to == to_shared)
                    sum += sum_of(word);
                else
                    j.dst[(tile * threads & j.mask) + me] = word;
            }
            if (next < tiles)
                __pipeline_memcpy_async(&ring[i * threads + me], j.src + (next * threads & j.mask) + me, 16);
            __pipeline_commit();
        }
    }
    if (to == to_shared)
        add_to_sums(j.sums, sum);
}

/* Starts the bulk copy of the block's tile n into stage n % bulk_stages. One thread of each block keeps this ring of
   stages full; each stage has a barrier that tells when its copy has landed. */
static __device__ void bulk_start(const job *j, uint4 *ring, uint64_t *landed, uint64_t n)
{
    const uint64_t tile = blockIdx.x + n * gridDim.x;
    const uint32_t stage = n % bulk_stages;
    bulk_load(ring + stage * j->stage, j->src + (tile * j->stage & j->mask), 16 * j->stage, &landed[stage]);
}

/* Fills the ring for the first time. Returns the number of tiles of this block. */
static __device__ uint64_t bulk_begin(const job *j, uint4 *ring, uint64_t *landed)
{
    const uint64_t tiles = j->words / j->stage;
    const uint64_t mine = blockIdx.x < tiles ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    if (threadIdx.x == 0) {
        mbarriers_init(landed, bulk_stages);
        for (uint64_t n = 0; n < bulk_stages && n < mine; n++)
            bulk_start(j, ring, landed, n);
    }
    __syncthreads();
    return mine;
}

/* All threads sum the stage that has landed; then one thread starts the next copy into it. */
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

/* One thread does everything: it stores the stage that has landed with a bulk copy, and refills the stage before it,
   whose store has had time to read it. */
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
    bulk_wait_read<0>(); /* shared memory ends with the block */
}

/* clang-format off */
#define EVERY_DEPTH(name, to) {name<1, to>, name<2, to>, name<4, to>, name<8, to>, name<16, to>}
#define ONE_FOR_ALL(name) {name, name, name, name, name}
/* clang-format on */
static const kernel kernels[methods][destinations][depths] = {
    {EVERY_DEPTH(loads_kernel, to_shared), EVERY_DEPTH(loads_kernel, to_hbm)},
    {EVERY_DEPTH(cp_async_kernel, to_shared), EVERY_DEPTH(cp_async_kernel, to_hbm)},
    {ONE_FOR_ALL(bulk_to_shared_kernel), ONE_FOR_ALL(bulk_to_hbm_kernel)},
};

/* Returns 4-byte word i of the test data. */
static __host__ __device__ uint32_t word_at(uint64_t i)
{
    return (uint32_t)i * 2654435761u;
}

/* Returns the sum of the first `count` words. */
static inline uint32_t sum_of_words(uint64_t count)
{
    return word_at(count * (count - 1) / 2); /* because word_at is linear */
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
#endif

/* The kernels of 09_bandwidth.cu: three ways to read memory into shared memory, or to copy it there and on.

   Each reads words of 16 bytes tile by tile, block b the tiles b, b + blocks, b + 2 blocks, ... A word lies at its
   number modulo the set's size: the set is as large as what is read (cold), or smaller and read many times (warm). None
   reads by way of L1, which would be one more cache to keep out.

       loads       16-byte loads into registers, then stores
       cp_async    to shared memory past the registers (sm_80 and newer)
       bulk        cp.async.bulk: one thread starts copies of whole stages (sm_90 and newer)

   kernels[method][to][depth] is the one that keeps 16 << depth bytes per thread in flight. */
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
    uint64_t mask;  /* the set's words, a power of two, less one */
    uint32_t stage; /* words that one bulk copy moves */
    uint32_t *sums; /* HBM to shared memory only: every warp adds what it found there */
} job;

typedef void (*kernel)(job);

/* PTX by name. Compiled for a GPU without the instruction these trap: the program must not launch such a kernel. */
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

/* Barriers that one arrival completes, once the bytes that it announced have landed too. The fence shows them to the
   hardware that does the bulk copies. */
static __device__ void mbarriers_init(uint64_t *barriers, int count)
{
    for (int i = 0; i < count; i++)
        SM90("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    SM90("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Until the phase of this parity is complete. */
static __device__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    for (unsigned tries = 0; !done; tries++) {
        if (tries == 1u << 26) /* seconds, as each try waits a little: a wait without end would hang the GPU */
            __trap();
        SM90("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
             : "=r"(done)
             : "r"(shared_address(barrier)), "r"(parity)
             : "memory");
    }
}

/* One thread moves any multiple of 16 bytes: it arrives at the barrier, which hears of every byte that has landed. */
static __device__ void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    const uint32_t to = shared_address(shared), at = shared_address(barrier);
    SM90("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
         "l"(global), "r"(bytes), "r"(at)
         : "memory");
}

/* The other way; each is a group. */
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
            __pipeline_memcpy_async(&ring[i * threads + me], j.src + (next * threads & j.mask) + me, 16);
        __pipeline_commit(); /* of nothing, if need be: groups are counted */
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

/* Bulk copies: one thread of a block keeps a ring of stages filled; each has a barrier that says when it has landed.
   The block's tile n goes to stage n % bulk_stages. */
static __device__ void bulk_start(const job *j, uint4 *ring, uint64_t *landed, uint64_t n)
{
    const uint64_t tile = blockIdx.x + n * gridDim.x;
    const uint32_t stage = n % bulk_stages;
    bulk_load(ring + stage * j->stage, j->src + (tile * j->stage & j->mask), 16 * j->stage, &landed[stage]);
}

/* Fills the ring for the first time. Returns how many tiles are this block's. */
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

/* clang-format off */
#define EVERY_DEPTH(name, to) {name<1, to>, name<2, to>, name<4, to>, name<8, to>, name<16, to>}
#define ONE_FOR_ALL(name) {name, name, name, name, name}
/* clang-format on */
static const kernel kernels[methods][destinations][depths] = {
    {EVERY_DEPTH(loads_kernel, to_shared), EVERY_DEPTH(loads_kernel, to_hbm)},
    {EVERY_DEPTH(cp_async_kernel, to_shared), EVERY_DEPTH(cp_async_kernel, to_hbm)},
    {ONE_FOR_ALL(bulk_to_shared_kernel), ONE_FOR_ALL(bulk_to_hbm_kernel)},
};

static __host__ __device__ uint32_t word_at(uint64_t i) /* what memory holds, in words of 4 bytes */
{
    return (uint32_t)i * 2654435761u;
}

static inline uint32_t sum_of_words(uint64_t count) /* of the first so many */
{
    return word_at(count * (count - 1) / 2); /* as word_at is a product */
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

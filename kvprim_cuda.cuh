/* SPDX-License-Identifier: MIT */
/* kvprim_cuda.cuh: kvprim's gather, store, transfer and unpack on the GPU, callable from C. CUDA 12 and newer, sm_75
   and newer.

   Do this, in a .cu file (and call it from C files that include this header and no CUDA header):

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim_cuda.cuh"

       kvprim_status keep(void *cache, int64_t slots, void *rows, const int32_t *slot, int64_t count,
                          cudaStream_t stream)
       {
           kvprim_store_desc store = {};
           store.k_cache.data = cache, store.k_cache.rows = slots;
           store.k.data = rows, store.k.rows = count, store.k_bytes = 1024;
           store.slot = slot, store.slot_type = KVPRIM_I32, store.count = count;
           kvprim_cuda_launch launch = {};
           launch.stream = stream;
           return kvprim_cuda_store(&store, &launch);
       }

   What it does: moves rows in the memory of the current device. It takes the descriptors of kvprim.h, and its results
   are those of the functions there byte for byte. Its callers need neither CUDA's headers nor nvcc: a cudaStream_t is a
   struct CUstream_st *.

   What it does NOT do: allocate, synchronise, create streams or events, or print.

   Contents (search for the tag):
       >>config      macros that you may define
       >>launch      stream, overlap with the kernel before, share of the GPU
       >>gpu_move    gather, store, transfer, unpack, and checked moves
       >>device      device functions for your own kernels, with the funnel shift
       >>impl        the implementation:
           >>impl_device          loads, stores and dependent launch in PTX; divisors
           >>impl_row_kernels     gather and store of plain rows: index rule, zero fill, tails
           >>impl_move_kernels    pages, heads, layers, several moves, few multiprocessors
           >>impl_unpack_kernels
           >>impl_launch          starting a kernel, its errors, dependent launch
           >>impl_debug           KVPRIM_DEBUG: can the GPU reach the memory?
           >>impl_row_plan        which kernel of plain rows, and its parameters
           >>impl_move_plan       the same for all other moves
           >>impl_unpack_host
           >>impl_calls           the public functions

   Rules that hold for every function here
       Errors     A function checks its descriptor as kvprim.h does before it enqueues anything, with the same status and
                  text. KVPRIM_ERROR_CUDA: CUDA refused the launch; kvprim_last_error() says why, and whether work that
                  was enqueued earlier has failed. CUDA reports an error that happens on the GPU later (a host pointer
                  in a table, for instance); KVPRIM_DEBUG finds wrong pointers at the call. If a call takes several
                  launches, those before a refused one are enqueued.
       Stream     Calls only enqueue, on the given stream of the current device. A graph may capture them. CUDA may load
                  a kernel's code at its first launch (CUDA_MODULE_LOADING=EAGER: before).
       Threads    Any number of threads may call every function at once.
       Memory     The GPU reads and writes tables, indices and `rejected`: device memory, managed memory, pinned host
                  memory that the device can address, or another GPU's memory to which it has peer access or a mapped
                  window. They must stay valid until the work is done. Descriptors are host memory, free to reuse on
                  return.
       Alignment  Any. Multiples of 16 bytes (bases, strides, row sizes) are the fastest. Of the bytes around a row, the
                  GPU only reads those in the same aligned 16 bytes, and writes none.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_CUDA_IMPLEMENTATION  one translation unit: implements this header only; another unit must implement kvprim.h.
                               Like KVPRIM_IMPLEMENTATION it needs nvcc.
   KVPRIM_STATIC               every translation unit, as in kvprim.h
   KVPRIM_DEBUG                the implementing unit: every call asks CUDA whether the device can reach the memory that
                               the descriptor names (some microseconds); KVPRIM_ERROR_ARGUMENT if it cannot
   KVPRIM_NVTX                 the implementing unit, as in kvprim.h
*/
#ifndef KVPRIM_CUDA_CUH
#define KVPRIM_CUDA_CUH

#include "kvprim.h"

#if KVPRIM_VERSION != 200
#error "kvprim_cuda.cuh 0.2.0 meets a kvprim.h of another version"
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */

/* >>launch --------------------------------------------------------------------------------------------------------- */

/* Zero-initialise, then set what differs. A NULL launch is one of zeros. */
typedef struct kvprim_cuda_launch {
    struct CUstream_st *stream; /* NULL: the legacy default stream, however the file is compiled */
    int32_t pdl;                /* 1: programmatic dependent launch, on sm_90 and newer if this file is compiled for it
                                   (no effect elsewhere). The kernel may start before the one ahead of it in the stream
                                   has ended, and waits for that one's memory before its first access. Do not put it
                                   right before a kernel that is launched that way and does not wait, as some of NCCL's
                                   are */
    int32_t max_sms;            /* leave the GPU's other multiprocessors alone; 0: no limit */
    int64_t reserved;           /* 0 */
} kvprim_cuda_launch;

/* >>gpu_move -------------------------------------------------------------------------------------------------------

   Each does what the function of kvprim.h without _cuda in its name does: same descriptor, rules, aliasing and errors,
   whose text begins with the function's own name. launch may be NULL. A negative max_sms, a pdl other than 0 and 1, or
   a reserved field that is not 0 is KVPRIM_ERROR_ARGUMENT. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc,
                                                           const kvprim_cuda_launch *launch);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc,
                                                          const kvprim_cuda_launch *launch);

/* Moves up to 231 layers in one launch, more in several. Each side lies in any of the memories above, and so do the
   indices. The arrays of layers are host memory, free to reuse on return. The host may touch pinned rows and indices
   again when the work is done. Between GPUs either one may run it, writing to the other's memory or reading it. max_sms
   limits the blocks: from or to pinned memory 8 of them reach the link's speed with rows of 2 KB and more, to or from
   another GPU 16 to 32 do with rows of 4 KB (both measured on H200s). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc,
                                                             const kvprim_cuda_launch *launch);

/* Runs n moves that kvprim_gather_moves(), kvprim_store_moves() or kvprim_transfer_moves() made, and checks none of them
   again. Up to 4 moves with up to 180 layers in sum take one launch, whatever their row sizes, counts, indices and
   layers: K and V of different width, values and their scales. More take several. The moves of a call run in no
   particular order, so none may touch what another writes. Costs the host less than the calls above: see
   tests/results/gpu_bench.txt.
   Errors: NULL (moves, with n > 0), ARGUMENT (launch), CUDA. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n,
                                                         const kvprim_cuda_launch *launch);

/* Fragments: what the GPU needs of them is copied into the launch's parameters before the call returns. Of one size
   (the last may be shorter) a fragment takes 2 or 4 bytes there for each side, and none for a side on which all lie
   equally far apart; of several sizes about 16 bytes, or 24 if a buffer has 4 GiB or more. Adjacent fragments move as
   one. A batch that needs more than about 32 KB, which is what CUDA takes (4,000 bytes where this is compiled by CUDA
   before 12.1; by a newer one it needs a driver as new), goes out in several launches. These overlap where all of the
   implementing file's architectures are sm_90 or newer and max_sms is 0; what follows in the stream follows them all.
   The call takes as much of the caller's stack.
   Workspace: optional pinned host memory that the GPU addresses as the host does, kvprim_unpack_workspace_bytes(count)
   bytes or more, one for each call that is not done;
   one that is too small is not used. Its contents do not matter. With it a large batch of small fragments (of one size
   up to 4 KiB, or of sizes below about 1 KiB) takes one launch, whose kernel reads the workspace: that spares the host
   some microseconds for each launch, and the GPU none. It is the call's own until the work is done; of a captured call,
   as long as the graph is in use.
   Aliasing: the workspace must not overlap src, dst or the fragments: not checked. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc,
                                                           const kvprim_cuda_launch *launch);

#ifdef __cplusplus
}
#endif

/* >>device ---------------------------------------------------------------------------------------------------------

   For one's own kernels, destination first: kvprim_warp_copy and kvprim_warp_zero. All 32 threads of a warp call them
   with the same arguments. Any size and any alignment of either side, which must not overlap. No barrier inside: what
   was written is visible to the calling thread only, until the kernel synchronises as it needs. Thread t of the warp
   has lane threadIdx.x % 32: a block's first dimension must be a multiple of 32. */
#if defined(__CUDACC__) || defined(KVPRIM_CUDA_EMULATE)
#define KVPRIM_DEVICE static __device__ __forceinline__
#ifdef __CUDACC__
#define KVPRIM_UNROLL _Pragma("unroll")
#else
#define KVPRIM_UNROLL
#endif

/* Bytes shift to shift + 15 of the 32 bytes low, high. */
KVPRIM_DEVICE uint4 kvpc_window(uint4 low, uint4 high, uint32_t shift)
{
    const uint32_t bits = shift % 4 * 8;
    uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (shift & 8)
        for (int k = 0; k < 6; k++)
            w[k] = w[k + 2];
    if (shift & 4)
        for (int k = 0; k < 5; k++)
            w[k] = w[k + 1];
    return uint4{__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                 __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)};
}

/* `lanes` threads copy together, as lane 0 to lanes - 1. Thread t writes, of the bytes up to the first 16-byte
   boundary of dst, the t-th; of the 16-byte words from there every lanes-th from the t-th on; of the bytes behind the
   last word the t-th. A word whose source is not aligned is read as the two aligned words that it lies in. */
template <uint32_t lanes> KVPRIM_DEVICE void kvpc_copy(char *dst, const char *src, size_t bytes, uint32_t lane)
{
    const size_t to_boundary = (16 - (uintptr_t)dst % 16) % 16, head = bytes < to_boundary ? bytes : to_boundary;
    for (size_t b = lane; b < head; b += lanes)
        dst[b] = src[b];
    dst += head, src += head, bytes -= head;
    const size_t words = bytes / 16;
    const uint32_t shift = (uint32_t)((uintptr_t)src % 16);
    const uint4 *const from = (const uint4 *)(src - shift);
    uint4 *const to = (uint4 *)dst;
    size_t w = lane;
    if (shift == 0)
        for (; w + 3 * lanes < words; w += 4 * lanes) {
            const uint4 a = from[w], b = from[w + lanes], c = from[w + 2 * lanes], d = from[w + 3 * lanes];
            to[w] = a, to[w + lanes] = b, to[w + 2 * lanes] = c, to[w + 3 * lanes] = d;
        }
    else
        for (; w + lanes < words; w += 2 * lanes) {
            const uint4 a = from[w], b = from[w + 1], c = from[w + lanes], d = from[w + lanes + 1];
            to[w] = kvpc_window(a, b, shift), to[w + lanes] = kvpc_window(c, d, shift);
        }
    for (; w < words; w += lanes)
        to[w] = shift == 0 ? from[w] : kvpc_window(from[w], from[w + 1], shift);
    for (size_t b = words * 16 + lane; b < bytes; b += lanes)
        dst[b] = src[b];
}

template <uint32_t lanes> KVPRIM_DEVICE void kvpc_zero(char *dst, size_t bytes, uint32_t lane)
{
    const size_t to_boundary = (16 - (uintptr_t)dst % 16) % 16, head = bytes < to_boundary ? bytes : to_boundary;
    const size_t words = (bytes - head) / 16;
    for (size_t b = lane; b < head; b += lanes)
        dst[b] = 0;
    for (size_t w = lane; w < words; w += lanes)
        ((uint4 *)(dst + head))[w] = uint4{0, 0, 0, 0};
    for (size_t b = head + words * 16 + lane; b < bytes; b += lanes)
        dst[b] = 0;
}

static __device__ inline void kvprim_warp_copy(void *dst, const void *src, size_t bytes)
{
    kvpc_copy<32>((char *)dst, (const char *)src, bytes, threadIdx.x % 32);
}

static __device__ inline void kvprim_warp_zero(void *dst, size_t bytes)
{
    kvpc_zero<32>((char *)dst, bytes, threadIdx.x % 32);
}
#endif

#endif /* KVPRIM_CUDA_CUH */

/* Stop here if you only use the library. */

/* >>impl ----------------------------------------------------------------------------------------------------------- */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_CUDA_IMPLEMENTATION)) && !defined(KVPRIM_CUDA_IMPLEMENTED)
#define KVPRIM_CUDA_IMPLEMENTED

#if !defined(__CUDACC__) && !defined(KVPRIM_CUDA_EMULATE)
#error                                                                                                                 \
    "kvprim_cuda.cuh is implemented by nvcc: ask for it in a .cu file. Where no GPU is meant, include kvprim.h instead"
#endif

#include <string.h>
#ifndef KVPRIM_CUDA_EMULATE /* the emulation runs the kernels below thread by thread on the CPU, for the tests */
#include <atomic>
#include <cuda_runtime.h>
#endif

/* Names that begin with kvpc_ are internal: static, and free to change. */

/* >>impl_device ---------------------------------------------------------------------------------------------------- */

/* Measured on an H200; the functions that use them say what follows. */
enum {
    kvpc_threads = 128,                 /* per block, of the kernels of plain rows and of moves on the whole GPU */
    kvpc_few_sms_threads = 1024,        /* at most, of moves on few multiprocessors */
    kvpc_unaligned_threads = 512,       /* at most, of moves of any alignment */
    kvpc_unpack_threads = 256,          /* of unpack */
    kvpc_unpack_most_threads = 512,     /* ... with max_sms */
    kvpc_bytes_lanes = 8,               /* of kvpc_bytes_kernel */
    kvpc_bytes_loads = 3,               /* one more than aligned rows take: they start and end inside a word */
    kvpc_bytes_blocks = 12,             /* per multiprocessor; with 11 dependent launches are 10 % slower */
    kvpc_granule_bytes = 64,            /* that memory is written in: see kvpc_fetch_edges */
    kvpc_small_store_bytes = 128 << 10, /* see kvpc_store_by_size */
    kvpc_small_gather_bytes = 1 << 20,  /* see kvpc_gather_by_size */
    kvpc_many_rows = 16384              /* see kvpc_gather_by_size */
};

/* Programmatic dependent launch came with Hopper: see kvpc_has_pdl. */
KVPRIM_DEVICE void kvpc_pdl_wait(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

KVPRIM_DEVICE void kvpc_pdl_trigger(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Global memory by address: an asm volatile keeps its place among the others. Left to itself the compiler puts the loads
   of a store after the test of its slot, and waits twice where it could wait once. */
KVPRIM_DEVICE uint4 kvpc_load16(uint64_t address)
{
#ifdef __CUDA_ARCH__
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
#else
    return *(const uint4 *)(uintptr_t)address;
#endif
}

KVPRIM_DEVICE void kvpc_store16(uint64_t address, uint4 v)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(address)
                 : "memory");
#else
    *(uint4 *)(uintptr_t)address = v;
#endif
}

KVPRIM_DEVICE int32_t kvpc_load_i32(uint64_t address)
{
#ifdef __CUDA_ARCH__
    int32_t v;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
#else
    return *(const int32_t *)(uintptr_t)address;
#endif
}

/* A pointer of which the compiler knows that it points to global memory: others are slower. */
KVPRIM_DEVICE char *kvpc_global(uint64_t address)
{
#ifdef __CUDA_ARCH__
    return (char *)__cvta_global_to_generic((size_t)address);
#else
    return (char *)(uintptr_t)address;
#endif
}

/* base + row * stride. In PTX, because otherwise the compiler takes base from constant memory after the row's test. */
KVPRIM_DEVICE uint64_t kvpc_row_at(uint64_t base, uint32_t row, uint32_t stride)
{
#ifdef __CUDA_ARCH__
    uint64_t address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(base));
    return address;
#else
    return base + (uint64_t)row * stride;
#endif
}

/* Reads the first and the last granule of a row if the row fills only part of them. Memory is written in whole granules:
   the rest of such a granule is read first, and a read that starts only when the cache runs full costs as much as some
   hundred bytes. */
KVPRIM_DEVICE void kvpc_fetch_edges(uint64_t row, uint32_t bytes)
{
#ifdef __CUDA_ARCH__
    if (row % kvpc_granule_bytes)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
    if ((row + bytes) % kvpc_granule_bytes)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + bytes - 1));
#else
    (void)row, (void)bytes;
#endif
}

/* Divides 32-bit numbers below 2^31 with one multiplication, 64-bit ones as the compiler does. Anything by 0 is 0. */
typedef struct kvpc_divisor {
    uint64_t by;
    uint32_t magic, shift;
} kvpc_divisor;

KVPRIM_DEVICE uint32_t kvpc_divide(uint32_t n, const kvpc_divisor &d)
{
    return __umulhi(2 * n, d.magic) >> d.shift;
}

KVPRIM_DEVICE uint64_t kvpc_divide(uint64_t n, const kvpc_divisor &d)
{
    return d.by ? n / d.by : 0;
}

/* Loads the 16-byte words of a thread: word k lies k * step bytes after `from`. `exact`: all of them; otherwise those
   that begin before byte `end`, if `at` is the first one's place in the row. The others keep their value, and all of
   them do if !reads. */
template <uint32_t loads, bool exact>
KVPRIM_DEVICE void kvpc_load_words(uint4 *v, bool reads, uint64_t from, uint32_t step, uint32_t at, uint32_t end)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (reads && (exact || at + k * step < end))
            v[k] = kvpc_load16(from + k * step);
}

template <uint32_t words> KVPRIM_DEVICE void kvpc_clear_words(uint4 *v)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < words; k++)
        v[k] = uint4{0, 0, 0, 0};
}

/* >>impl_row_kernels ------------------------------------------------------------------------------------------------

   Plain rows lie without pages or heads and are small enough for 32-bit arithmetic: see kvpc_is_plain. */

/* One table and the rows beside it: K, or V. */
typedef struct kvpc_pair {
    uint64_t src;
    uint32_t src_stride, dst_stride;
    uint64_t dst;
} kvpc_pair;

/* What is needed up to the second load of a gather comes first, in one line of the constant cache: with few rows, the
   time is that of these instructions. Parameters begin 48 bytes before the end of a line. */
typedef struct kvpc_plain {
    uint64_t index;
    uint32_t count, parts_shift; /* see kvpc_row_of */
    uint32_t rows, base;
    uint32_t index_step, index_is_i64; /* index_step: bytes from one index to the next */
    kvpc_pair pair[2];
    uint32_t *rejected;
    uint32_t row_bytes[2];
    uint32_t parts, parts_magic; /* groups of threads that share a row */
    uint32_t fetch;              /* 1: rows end inside a granule: see kvpc_fetch_edges */
    uint32_t k_parts;            /* for kvpc_bytes_kernel: parts of K */
    uint32_t gather, pdl;        /* for kvpc_bytes_kernel, which has no template for them */
} kvpc_plain;

/* The row that a group of threads works on, and which part of it. `exact`: `parts` is a power of two. */
template <bool exact> KVPRIM_DEVICE uint32_t kvpc_row_of(const kvpc_plain &p, uint32_t group, uint32_t *part)
{
    const uint32_t row = exact ? group >> p.parts_shift : __umulhi(2 * group, p.parts_magic) >> p.parts_shift;
    *part = exact ? group & ((1u << p.parts_shift) - 1) : group - row * p.parts;
    return row;
}

/* An index on its way through the index rule. */
typedef struct kvpc_index {
    int32_t low, high; /* words of an int64; high is 0 for an int32 */
    uint32_t row;      /* right if `inside` */
    bool inside;
} kvpc_index;

/* The two words of an int64 are two loads that do not wait for each other, so one kernel serves both types. Rows end
   below 2^31: see kvpc_is_plain. */
KVPRIM_DEVICE kvpc_index kvpc_find_row(const kvpc_plain &p, uint32_t i, bool is_i64)
{
    const uint64_t at = kvpc_row_at(p.index, i, p.index_step);
    kvpc_index x;
    x.low = kvpc_load_i32(at);
    x.high = 0;
    if (is_i64)
        x.high = kvpc_load_i32(at + 4);
    x.row = (uint32_t)x.low - p.base;
    x.inside = x.row < p.rows && x.high == 0;
    return x;
}

/* Counts an index that is past the table; one before it is padding. */
KVPRIM_DEVICE void kvpc_count_rejected(const kvpc_plain &p, const kvpc_index &x)
{
    const bool above = p.index_is_i64 ? (uint32_t)x.low >= p.base : x.low >= (int32_t)p.base;
    if (p.rejected && (x.high > 0 || (x.high == 0 && above)))
        atomicAdd(p.rejected, 1u);
}

/* Of the 16 bytes in v the ones from `from` to before `end`, to the aligned 16 bytes at dst. */
KVPRIM_DEVICE void kvpc_store_some(uint64_t address, uint4 v, int32_t from, int32_t end)
{
    char *const dst = kvpc_global(address);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    KVPRIM_UNROLL
    for (int32_t w = 0; w < 4; w++) {
        if (from <= 4 * w && 4 * w + 4 <= end) {
            *(uint32_t *)(dst + 4 * w) = words[w];
            continue;
        }
        KVPRIM_UNROLL
        for (int32_t b = 0; b < 4; b++)
            if (from <= 4 * w + b && 4 * w + b < end)
                dst[4 * w + b] = (char)(words[w] >> 8 * b);
    }
}

/* The first 1 to 15 of the 16 bytes in v. */
KVPRIM_DEVICE void kvpc_store_tail(uint64_t address, uint4 v, uint32_t bytes)
{
    char *dst = kvpc_global(address);
    if (bytes & 8) {
        *(uint2 *)dst = uint2{v.x, v.y};
        v.x = v.z, v.y = v.w, dst += 8;
    }
    if (bytes & 4) {
        *(uint32_t *)dst = v.x;
        v.x = v.y, dst += 4;
    }
    if (bytes & 2) {
        *(uint16_t *)dst = (uint16_t)v.x;
        v.x >>= 16, dst += 2;
    }
    if (bytes & 1)
        *dst = (char)v.x;
}

/* Stores what kvpc_load_words loads; of a last word that the row ends in, a part. */
template <uint32_t loads, bool exact>
KVPRIM_DEVICE void kvpc_store_words(uint64_t to, const uint4 *v, uint32_t step, uint32_t at, uint32_t end)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (exact || at + k * step + 16 <= end)
            kvpc_store16(to + k * step, v[k]);
        else if (at + k * step < end)
            kvpc_store_tail(to + k * step, v[k], end - (at + k * step));
}

/* The two kernels below, for rows that begin at multiples of 16 bytes:
   - Each group of `lanes` threads moves one part of a row, lanes * loads words of 16 bytes.
   - Each thread moves the word that its lane names, and for each further load the word `lanes` after it.
   - `exact`: the parts are a power of two and fill the row. Otherwise the last part ends with the row; if that is
     inside a word, its thread reads the whole word and writes only the row's bytes.
   - All addresses come before the loads, and all loads before the stores. */

template <uint32_t lanes, uint32_t loads, bool exact, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads) kvpc_gather_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x, step = 16 * lanes;
    uint32_t part;
    const uint32_t i = kvpc_row_of<exact>(p, t / lanes, &part);
    if (pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return;
    if (pdl)
        kvpc_pdl_wait();
    const kvpc_index x = kvpc_find_row(p, i, p.index_is_i64);
    const uint32_t at = 16 * (t % lanes + lanes * loads * part);
    const uint64_t src = kvpc_row_at(p.pair[0].src + at, x.row, p.pair[0].src_stride);
    const uint64_t dst = kvpc_row_at(p.pair[0].dst + at, i, p.pair[0].dst_stride);
    uint4 v[loads];
    if (!exact && p.fetch && at == 0)
        kvpc_fetch_edges(dst, p.row_bytes[0]);
    kvpc_clear_words<loads>(v); /* the zero fill */
    kvpc_load_words<loads, exact>(v, x.inside, src, step, at, p.row_bytes[0]);
    kvpc_store_words<loads, exact>(dst, v, step, at, p.row_bytes[0]);
    if (!x.inside && at == 0)
        kvpc_count_rejected(p, x);
}

/* tables: 1, or 2 for K and V. */
template <uint32_t lanes, uint32_t loads, uint32_t tables, bool exact, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads) kvpc_store_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x, step = 16 * lanes;
    uint32_t part;
    const uint32_t i = kvpc_row_of<exact>(p, t / lanes, &part);
    if (pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return;
    if (pdl)
        kvpc_pdl_wait();
    const uint32_t at = 16 * (t % lanes + lanes * loads * part);
    uint4 v[tables][loads];
    uint64_t dst[tables];
    KVPRIM_UNROLL
    for (uint32_t m = 0; m < tables; m++) {
        const uint64_t src = kvpc_row_at(p.pair[m].src + at, i, p.pair[m].src_stride);
        if (!exact)
            kvpc_clear_words<loads>(v[m]);
        kvpc_load_words<loads, exact>(v[m], true, src, step, at, p.row_bytes[m]);
    }
    const kvpc_index x = kvpc_find_row(p, i, p.index_is_i64);
    KVPRIM_UNROLL
    for (uint32_t m = 0; m < tables; m++) {
        dst[m] = kvpc_row_at(p.pair[m].dst + at, x.row, p.pair[m].dst_stride);
        if (!exact && p.fetch && x.inside && at == 0)
            kvpc_fetch_edges(dst[m], p.row_bytes[m]);
    }
    if (x.inside) {
        KVPRIM_UNROLL
        for (uint32_t m = 0; m < tables; m++)
            kvpc_store_words<loads, exact>(dst[m], v[m], step, at, p.row_bytes[m]);
    } else if (at == 0)
        kvpc_count_rejected(p, x);
}

/* Copies `bytes` bytes from any alignment to any. A destination that begins `lead` bytes after a 16-byte boundary has in
   its word w the bytes 16 w - lead to 16 w - lead + 15.
   - Each thread writes kvpc_bytes_loads words, `step` apart, from word `first` on.
   - It makes each from the two aligned words of the source in which it lies, by a funnel shift, and reads neither of
     them if it has no byte to copy.
   - Where the source may not be read (!reads), it writes zeros.
   - `fetch`: see kvpc_fetch_edges. It comes once the loads are on their way, as it may wait for the place to write to. */
KVPRIM_DEVICE void kvpc_copy_words(uint64_t dst, uint64_t src, int32_t lead, int32_t bytes, uint32_t first,
                                   uint32_t step, bool reads, bool writes, bool fetch)
{
    const int32_t shift = (int32_t)((src - (uint64_t)lead) % 16);
    uint4 low[kvpc_bytes_loads], high[kvpc_bytes_loads];
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_bytes_loads; k++) {
        const int32_t at = (int32_t)(16 * (first + step * k)) - lead - shift; /* of the aligned word */
        low[k] = high[k] = uint4{0, 0, 0, 0};
        if (reads && at + 16 > 0 && at < bytes)
            low[k] = kvpc_load16(src + (uint64_t)(int64_t)at);
        if (reads && shift && at + 16 < bytes)
            high[k] = kvpc_load16(src + (uint64_t)(int64_t)(at + 16));
    }
    if (fetch && first == 0 && writes)
        kvpc_fetch_edges(dst, (uint32_t)bytes);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_bytes_loads; k++) {
        const int32_t from = (int32_t)(16 * (first + step * k)) - lead;
        const uint4 v = shift ? kvpc_window(low[k], high[k], (uint32_t)shift) : low[k];
        if (!writes)
            continue;
        if (from >= 0 && from + 16 <= bytes)
            kvpc_store16(dst + (uint64_t)from, v);
        else if (from < bytes)
            kvpc_store_some(dst + (uint64_t)(int64_t)from, v, from < 0 ? -from : 0, bytes - from);
    }
}

/* Gather and store for plain rows of any size and alignment. Each group of kvpc_bytes_lanes threads moves one part of a
   row, of K or of V. */
static __global__ void __launch_bounds__(kvpc_threads, kvpc_bytes_blocks)
    kvpc_bytes_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t lanes = kvpc_bytes_lanes, t = blockIdx.x * kvpc_threads + threadIdx.x;
    uint32_t part;
    const uint32_t i = kvpc_row_of<false>(p, t / lanes, &part);
    if (p.pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return;
    if (p.pdl)
        kvpc_pdl_wait();
    const uint32_t v_side = part >= p.k_parts;
    const kvpc_pair &pair = p.pair[v_side];
    const uint32_t first = t % lanes + lanes * kvpc_bytes_loads * (part - (v_side ? p.k_parts : 0));
    const kvpc_index x = p.index_is_i64 ? kvpc_find_row(p, i, true) : kvpc_find_row(p, i, false);
    const uint64_t src = kvpc_row_at(pair.src, p.gather ? x.row : i, pair.src_stride);
    const uint64_t dst = kvpc_row_at(pair.dst, p.gather ? i : x.row, pair.dst_stride);
    int32_t lead = (int32_t)(pair.dst % 16);
    if (pair.dst_stride % 16) /* only then must a store know its slot before it can load */
        lead = (int32_t)(dst % 16);
    kvpc_copy_words(dst, src, lead, (int32_t)p.row_bytes[v_side], first, lanes, !p.gather || x.inside,
                    p.gather || x.inside, p.fetch);
    if (!x.inside && part == 0 && t % lanes == 0)
        kvpc_count_rejected(p, x);
}

/* >>impl_move_kernels -----------------------------------------------------------------------------------------------

   Moves with pages, heads, layers or 64-bit sizes, several moves in a launch, and moves on few multiprocessors. A unit
   is what is contiguous on both sides: a row, or as much of it as lies in one head of either. A chunk is what a group of
   threads moves at once: a unit, or a part of a long one. */

/* What names the rows of one side. */
typedef struct kvpc_naming {
    uint64_t index; /* 0: row i */
    int64_t base;
    uint64_t rows;
    uint32_t index_step, index_is_i64; /* index_step: bytes from one index to the next */
} kvpc_naming;

/* Where the rows of one side lie. Unit u of row r starts at r * stride + page of r * page_step + head of u * head_step,
   plus u * unit_bytes. */
typedef struct kvpc_layout {
    int64_t stride, page_step, head_step;
    kvpc_divisor page, head; /* rows of a page, 0: no pages; units of a head, 0: one head */
} kvpc_layout;

/* One move of a launch. Its chunks are numbered from `first_chunk` on: of each layer every row, of each row every unit,
   of each unit every part. What is needed up to the loads of the indices comes first: see kvpc_plain. */
typedef struct kvpc_task {
    kvpc_divisor chunks, count; /* chunks of a row; rows */
    kvpc_naming dst_rows, src_rows;
    uint64_t unit_bytes;
    uint32_t zero, layers; /* zero: rows without a source become zeros */
    uint64_t units;        /* of a row */
    kvpc_divisor parts;    /* of a unit */
    kvpc_layout dst, src;
    uint64_t first_chunk;
    uint64_t first_layer;
    uint32_t *rejected;
} kvpc_task;

typedef struct kvpc_layer {
    uint64_t dst, src;
} kvpc_layer;

enum { kvpc_params_bytes = 4000, kvpc_most_tasks = 4 }; /* larger parameters cost time: 0.3 us at 8 KB on an H200 */

template <uint32_t most_tasks> struct kvpc_batch {
    static const uint32_t most_layers = (kvpc_params_bytes - 24 - most_tasks * sizeof(kvpc_task)) / sizeof(kvpc_layer);
    uint64_t total; /* chunks */
    uint32_t part_bytes, tasks;
    uint32_t pdl, reserved;
    kvpc_task task[most_tasks];
    kvpc_layer layer[most_layers];
};

static_assert(sizeof(kvpc_batch<1>) <= kvpc_params_bytes && kvpc_batch<1>::most_layers == 231, "said in >>gpu_move");
static_assert(sizeof(kvpc_batch<kvpc_most_tasks>) <= kvpc_params_bytes &&
                  kvpc_batch<kvpc_most_tasks>::most_layers == 180,
              "said in >>gpu_move");

typedef struct kvpc_chunk {
    uint64_t dst, src;
    uint32_t bytes; /* 0: nothing to do */
    bool zero;
} kvpc_chunk;

/* The index of row i on both sides: one load after the other, and no wait between them. */
template <class number>
KVPRIM_DEVICE void kvpc_load_indices(const kvpc_task &task, number i, int64_t *to, int64_t *from)
{
    const kvpc_naming &dst = task.dst_rows, &src = task.src_rows;
    const uint64_t dst_at = dst.index + (uint64_t)i * dst.index_step, src_at = src.index + (uint64_t)i * src.index_step;
    int32_t to_low = 0, to_high = 0, from_low = 0, from_high = 0;
    if (dst.index)
        to_low = kvpc_load_i32(dst_at);
    if (src.index)
        from_low = kvpc_load_i32(src_at);
    if (dst.index_is_i64)
        to_high = kvpc_load_i32(dst_at + 4);
    if (src.index_is_i64)
        from_high = kvpc_load_i32(src_at + 4);
    to_high = dst.index_is_i64 ? to_high : to_low >> 31;
    from_high = src.index_is_i64 ? from_high : from_low >> 31;
    *to = dst.index ? (int64_t)((uint64_t)(uint32_t)to_high << 32 | (uint32_t)to_low) : (int64_t)i;
    *from = src.index ? (int64_t)((uint64_t)(uint32_t)from_high << 32 | (uint32_t)from_low) : (int64_t)i;
}

/* The page arithmetic. */
template <class number> KVPRIM_DEVICE uint64_t kvpc_place(const kvpc_layout &side, number row)
{
    return row * (uint64_t)side.stride + kvpc_divide(row, side.page) * (uint64_t)side.page_step;
}

template <uint32_t most_tasks>
KVPRIM_DEVICE const kvpc_task &kvpc_task_of(const kvpc_batch<most_tasks> &p, uint64_t chunk)
{
    uint32_t t = 0;
    if (most_tasks > 1)
        while (t + 1 < p.tasks && chunk >= p.task[t + 1].first_chunk)
            t++;
    return p.task[t];
}

/* Chunk `work` of all, with the index rule. Parts begin at 16-byte boundaries of dst; `aligned`: so do units. */
template <bool aligned, uint32_t most_tasks, class number>
KVPRIM_DEVICE kvpc_chunk kvpc_find_chunk(const kvpc_batch<most_tasks> &p, number work, bool first_lane)
{
    const kvpc_task &s = kvpc_task_of(p, work);
    const number chunk = most_tasks > 1 ? work - (number)s.first_chunk : work;
    const number layer_row = kvpc_divide(chunk, s.chunks), in_row = chunk - layer_row * (number)s.chunks.by;
    const number layer = kvpc_divide(layer_row, s.count), i = layer_row - layer * (number)s.count.by;
    const kvpc_layer &base = p.layer[most_tasks > 1 ? (number)s.first_layer + layer : layer];
    int64_t to, from;
    kvpc_load_indices(s, i, &to, &from);
    number part = in_row;
    uint64_t dst_unit = 0, src_unit = 0;
    if (s.units > 1) {
        const number unit = kvpc_divide(in_row, s.parts);
        part = in_row - unit * (number)s.parts.by;
        dst_unit = unit * s.unit_bytes + kvpc_divide(unit, s.dst.head) * (uint64_t)s.dst.head_step;
        src_unit = unit * s.unit_bytes + kvpc_divide(unit, s.src.head) * (uint64_t)s.src.head_step;
    }
    const uint64_t dst_row = (uint64_t)to - (uint64_t)s.dst_rows.base,
                   src_row = (uint64_t)from - (uint64_t)s.src_rows.base;
    const bool dst_inside = to >= s.dst_rows.base && dst_row < s.dst_rows.rows;
    const bool src_inside = from >= s.src_rows.base && src_row < s.src_rows.rows;
    kvpc_chunk c;
    c.dst = base.dst + kvpc_place(s.dst, (number)dst_row) + dst_unit;
    c.src = base.src + kvpc_place(s.src, (number)src_row) + src_unit;
    c.zero = !src_inside;
    const uint64_t lead = aligned ? 0 : c.dst % 16, begin = (uint64_t)part * p.part_bytes;
    const uint64_t at = part ? begin - lead : 0, end = begin + p.part_bytes - lead;
    const uint64_t before = end < s.unit_bytes ? end : s.unit_bytes;
    c.dst += at, c.src += at;
    c.bytes = dst_inside && (src_inside || s.zero) && at < before ? (uint32_t)(before - at) : 0;
    if (!dst_inside || !src_inside) {
        const bool past = (!dst_inside && to >= s.dst_rows.base) || (!src_inside && from >= s.src_rows.base);
        if (past && layer == 0 && in_row == 0 && first_lane && s.rejected)
            atomicAdd(s.rejected, 1u);
    }
    return c;
}

/* A group of `lanes` threads moves a chunk of up to lanes * loads words of 16 bytes. Each thread moves the word that its
   lane names, and for each further load the word `lanes` after it. */
template <uint32_t lanes, uint32_t loads> KVPRIM_DEVICE void kvpc_load_chunk(uint4 *v, const kvpc_chunk &c, uint32_t at)
{
    kvpc_clear_words<loads>(v);
    kvpc_load_words<loads, false>(v, !c.zero, c.src + at, 16 * lanes, at, c.bytes);
}

template <uint32_t lanes, uint32_t loads>
KVPRIM_DEVICE void kvpc_store_chunk(const uint4 *v, const kvpc_chunk &c, uint32_t at)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (at + 16 * lanes * k < c.bytes)
            kvpc_store16(c.dst + at + 16 * lanes * k, v[k]);
}

/* On the whole GPU: each group of threads moves one chunk. */
template <uint32_t lanes, uint32_t loads, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_move_kernel(const __grid_constant__ kvpc_batch<most_tasks> p)
{
    const uint32_t work = blockIdx.x * (kvpc_threads / lanes) + threadIdx.x / lanes, at = 16 * (threadIdx.x % lanes);
    if (work >= (uint32_t)p.total)
        return;
    if (p.pdl)
        kvpc_pdl_wait();
    const kvpc_chunk c = kvpc_find_chunk<true>(p, work, at == 0);
    uint4 v[loads];
    kvpc_load_chunk<lanes, loads>(v, c, at);
    kvpc_store_chunk<lanes, loads>(v, c, at);
}

/* On few multiprocessors: each group moves one chunk after the other. While one is on its way it finds the next. */
template <uint32_t lanes, uint32_t loads, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_few_sms_threads)
    kvpc_move_few_kernel(const __grid_constant__ kvpc_batch<most_tasks> p)
{
    const uint32_t at = 16 * (threadIdx.x % lanes), groups = gridDim.x * (blockDim.x / lanes);
    uint4 v[loads];
    kvpc_chunk c = {0, 0, 0, false};
    if (p.pdl)
        kvpc_pdl_wait();
    for (uint32_t work = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes; work < (uint32_t)p.total;
         work += groups) {
        const kvpc_chunk next = kvpc_find_chunk<true>(p, work, at == 0);
        kvpc_store_chunk<lanes, loads>(v, c, at);
        c = next;
        kvpc_load_chunk<lanes, loads>(v, c, at);
    }
    kvpc_store_chunk<lanes, loads>(v, c, at);
}

/* The same for chunks of any alignment and, with 64-bit numbers, for any number of them. */
template <uint32_t lanes, class number, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_unaligned_threads)
    kvpc_move_bytes_kernel(const __grid_constant__ kvpc_batch<most_tasks> p)
{
    const uint32_t lane = threadIdx.x % lanes;
    const number groups = (number)gridDim.x * (blockDim.x / lanes);
    if (p.pdl)
        kvpc_pdl_wait();
    for (number work = (number)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes; work < (number)p.total;
         work += groups) {
        const kvpc_chunk c = kvpc_find_chunk<false>(p, work, lane == 0);
        if (c.bytes > 0 && c.zero)
            kvpc_zero<lanes>(kvpc_global(c.dst), c.bytes, lane);
        else if (c.bytes > 0)
            kvpc_copy<lanes>(kvpc_global(c.dst), kvpc_global(c.src), c.bytes, lane);
    }
}

/* ---- unpack: kernels ---- */

enum {
    kvpc_lent = 2,           /* "capacity" of parameters whose words lie in the caller's workspace */
    kvpc_small_fragments = 2 /* at once; with more a processor holds fewer threads: slower */
};

/* A batch of fragments, or a slice of one. Even: all have `bytes` bytes, but for the last. Fragment i lies at i
   times the step on a side where all are that far apart, and elsewhere at a number from the words times the step. */
typedef struct kvpc_unpack {
    uint64_t dst, src;
    uint64_t dst_step, src_step;
    uint64_t words;                      /* of a workspace */
    uint32_t count, pieces, parts, span; /* span: pieces, or small fragments, that a block copies before it goes on */
    uint32_t bytes, last_bytes;
    uint32_t dst_words, src_words, halves;             /* a side's numbers: 0 or 1 for a fragment; two to a word */
    uint32_t lanes_shift, distant, table, table_shift; /* distant, table: see kvpc_copy_uneven */
    int32_t wait, trigger, wait_last;                  /* programmatic dependent launch */
} kvpc_unpack;

template <uint32_t capacity> struct kvpc_unpack_params {
    kvpc_unpack head;
    uint32_t words[capacity];
};

/* Word `at`. Those of a workspace come over the bus, which wants whole lines: a warp first reads all of the line
   that its word lies in. */
template <uint32_t capacity> KVPRIM_DEVICE uint32_t kvpc_word(const kvpc_unpack_params<capacity> &p, uint32_t at)
{
    if (capacity != kvpc_lent)
        return p.words[at];
    const uint32_t near = at / 32 * 32 + threadIdx.x % 32;
    const uint32_t word = (uint32_t)kvpc_load_i32(p.head.words + (uint64_t)near * 4);
    return near == at ? word : (uint32_t)kvpc_load_i32(p.head.words + (uint64_t)at * 4);
}

/* 16-byte words that a thread takes of a piece. */
template <bool aligned> struct kvpc_piece {
    static const uint32_t loads = aligned ? 4u : (uint32_t)kvpc_bytes_loads;
};

/* A group of `step` threads copies a piece of a fragment: each thread the first-th of the destination's 16-byte words
   and those that are a multiple of `step` further. */
template <bool aligned>
KVPRIM_DEVICE void kvpc_copy_piece(uint64_t dst, uint64_t src, int32_t bytes, uint32_t first, uint32_t step)
{
    if (!aligned) {
        kvpc_copy_words(dst, src, (int32_t)(dst % 16), bytes, first, step, true, true, false);
        return;
    }
    const uint32_t loads = kvpc_piece<true>::loads, from = 16 * first;
    uint4 v[loads];
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (from + 16 * step * k < (uint32_t)bytes)
            v[k] = kvpc_load16(src + from + 16 * step * k);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (from + 16 * step * k < (uint32_t)bytes)
            kvpc_store16(dst + from + 16 * step * k, v[k]);
}

template <uint32_t capacity> KVPRIM_DEVICE uint32_t kvpc_number(const kvpc_unpack_params<capacity> &p, uint32_t at)
{
    return p.head.halves ? kvpc_word(p, at / 2) >> at % 2 * 16 & 0xffff : kvpc_word(p, at);
}

/* What the steps of source and destination are multiplied by for fragment i of an even batch. */
template <uint32_t capacity> KVPRIM_DEVICE uint2 kvpc_even_fragment(const kvpc_unpack_params<capacity> &p, uint32_t i)
{
    const kvpc_unpack &h = p.head;
    const uint32_t at = i * (h.src_words + h.dst_words);
    return uint2{h.src_words ? kvpc_number(p, at) : i, h.dst_words ? kvpc_number(p, at + h.src_words) : i};
}

/* Pieces are numbered through the fragments: fragment i has the `parts` pieces from i * parts on. */
template <bool aligned, uint32_t capacity>
KVPRIM_DEVICE void kvpc_copy_even(const kvpc_unpack_params<capacity> &p, uint32_t piece)
{
    const kvpc_unpack &h = p.head;
    const uint32_t step = 1u << h.lanes_shift, loads = kvpc_piece<aligned>::loads;
    const uint32_t i = h.parts == 1 ? piece : piece / h.parts, part = piece - i * h.parts;
    const uint2 place = kvpc_even_fragment(p, i);
    kvpc_copy_piece<aligned>(h.dst + place.y * h.dst_step, h.src + place.x * h.src_step,
                             (int32_t)(i == h.count - 1 ? h.last_bytes : h.bytes),
                             (part * loads << h.lanes_shift) + threadIdx.x % step, step);
}

/* Aligned fragments of so few bytes that each thread of a group has one word of each: several at once, `apart`
   apart. */
template <uint32_t capacity>
KVPRIM_DEVICE void kvpc_copy_small(const kvpc_unpack_params<capacity> &p, uint32_t i, uint32_t apart)
{
    const kvpc_unpack &h = p.head;
    const uint32_t at = 16 * (threadIdx.x % (1u << h.lanes_shift));
    uint2 place[kvpc_small_fragments];
    uint4 v[kvpc_small_fragments];
    bool mine[kvpc_small_fragments];
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++) {
        const uint32_t one = i + k * apart;
        mine[k] = one < h.count && at < (one == h.count - 1 ? h.last_bytes : h.bytes);
        if (one < h.count)
            place[k] = kvpc_even_fragment(p, one);
    }
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            v[k] = kvpc_load16(h.src + place[k].x * h.src_step + at);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            kvpc_store16(h.dst + place[k].y * h.dst_step + at, v[k]);
}

/* The fragment of a piece of an uneven batch: word table + k is that of piece k << table_shift, the last word of the
   table the last fragment. */
template <uint32_t capacity>
KVPRIM_DEVICE uint32_t kvpc_fragment_of(const kvpc_unpack_params<capacity> &p, uint32_t piece, uint32_t each)
{
    const uint32_t near = p.head.table + (piece >> p.head.table_shift);
    uint32_t i = kvpc_word(p, near), last = kvpc_word(p, near + 1);
    while (i < last) {
        const uint32_t middle = (i + last + 1) / 2;
        if (kvpc_word(p, middle * each + 3) <= piece)
            i = middle;
        else
            last = middle - 1;
    }
    return i;
}

/* Fragments of any size, described by four words each: source and destination offset, bytes, number of the first piece;
   distant ones by two more, the offsets' upper halves. Without a table each fragment is one piece. */
template <bool aligned, uint32_t capacity>
KVPRIM_DEVICE void kvpc_copy_uneven(const kvpc_unpack_params<capacity> &p, uint32_t piece)
{
    const kvpc_unpack &h = p.head;
    const uint32_t step = 1u << h.lanes_shift, loads = kvpc_piece<aligned>::loads, each = h.distant ? 6 : 4;
    const uint32_t i = h.table ? kvpc_fragment_of(p, piece, each) : piece, at = i * each;
    const uint64_t src_high = h.distant ? kvpc_word(p, at + 4) : 0, dst_high = h.distant ? kvpc_word(p, at + 5) : 0;
    const uint64_t from = src_high << 32 | kvpc_word(p, at), to = dst_high << 32 | kvpc_word(p, at + 1);
    const uint32_t bytes = kvpc_word(p, at + 2), part = piece - kvpc_word(p, at + 3);
    if (bytes)
        kvpc_copy_piece<aligned>(h.dst + to, h.src + from, (int32_t)bytes,
                                 (part * loads << h.lanes_shift) + threadIdx.x % step, step);
}

enum kvpc_unpack_kind { kvpc_even, kvpc_small, kvpc_uneven };

/* Each block copies one span after the other, `span` pieces that follow each other. */
template <kvpc_unpack_kind kind, bool aligned, uint32_t capacity>
static __global__ void __launch_bounds__(kvpc_unpack_most_threads)
    kvpc_unpack_kernel(const __grid_constant__ kvpc_unpack_params<capacity> p)
{
    const kvpc_unpack &h = p.head;
    const uint32_t groups = blockDim.x >> h.lanes_shift, all = kind == kvpc_small ? h.count : h.pieces;
    if (h.wait)
        kvpc_pdl_wait();
    if (h.trigger)
        kvpc_pdl_trigger();
    for (uint32_t span = blockIdx.x * h.span; span < all; span += gridDim.x * h.span) {
        const uint32_t end = all - span < h.span ? all : span + h.span;
        for (uint32_t piece = span + (threadIdx.x >> h.lanes_shift); piece < end;
             piece += kind == kvpc_small ? kvpc_small_fragments * groups : groups)
            if (kind == kvpc_small)
                kvpc_copy_small(p, piece, groups);
            else if (kind == kvpc_even)
                kvpc_copy_even<aligned>(p, piece);
            else
                kvpc_copy_uneven<aligned>(p, piece);
    }
    if (h.wait_last)
        kvpc_pdl_wait();
}

/* >>impl_launch ---------------------------------------------------------------------------------------------------- */

/* Returns the status unless it is KVPRIM_OK. */
#define KVPRIM_TRY(call)                                                                                               \
    do {                                                                                                               \
        const kvprim_status try_status = (call);                                                                       \
        if (try_status != KVPRIM_OK)                                                                                   \
            return try_status;                                                                                         \
    } while (0)

static kvprim_status kvpc_check_launch(const char *function, const kvprim_cuda_launch *launch)
{
    if (!launch)
        return KVPRIM_OK;
    if (launch->pdl != 0 && launch->pdl != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: pdl is %d, neither 0 nor 1", function, (int)launch->pdl);
    if (launch->max_sms < 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: max_sms is %d, less than 0", function, (int)launch->max_sms);
    if (launch->reserved)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: launch.reserved is not 0: zero-initialise the structure",
                           function);
    return KVPRIM_OK;
}

/* kvprim.h's checks name its own function: "kvprim_gather: ..." becomes "kvprim_cuda_gather: ...". */
static kvprim_status kvpc_fail_check(kvprim_status status)
{
    return kvprim_fail(status, "kvprim_cuda_%s", kvprim_last_error() + sizeof "kvprim_" - 1);
}

#ifndef KVPRIM_CUDA_EMULATE
enum kvpc_answer { kvpc_unknown, kvpc_no, kvpc_yes, kvpc_depends };

/* Whether the code that the driver loads on the current device is compiled for sm_90 or newer. It loads all kernels of
   a file for one architecture, so any of them can be asked. */
static kvpc_answer kvpc_ask_device(void)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, (const void *)kvpc_bytes_kernel) == cudaSuccess)
        return a.ptxVersion >= 90 && a.binaryVersion >= 90 ? kvpc_yes : kvpc_no;
    (void)cudaGetLastError(); /* the launch meets it again */
    return kvpc_unknown;
}

/* The same for all devices: an answer that one of them gives holds where their compute capabilities are the same.
   The driver must also be able to capture dependent launches (12.3). */
static kvpc_answer kvpc_ask_devices(void)
{
    int driver = 0, count = 0, first = 0, major = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver < 12030 || cudaGetDeviceCount(&count) != cudaSuccess)
        return kvpc_no;
    for (int device = 0; device < count; device++) {
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
            return kvpc_no;
        first = device == 0 ? major : first;
        if (major != first)
            return kvpc_depends;
    }
    return kvpc_ask_device();
}
#endif

/* Whether kernels of this file wait when they are asked to. Asked once, as cudaGetDevice alone takes 0.1 us. */
static bool kvpc_has_pdl(void)
{
#ifdef KVPRIM_CUDA_EMULATE
    return kvprim_emulate_pdl;
#else
    static std::atomic<kvpc_answer> known;
    kvpc_answer answer = known.load(std::memory_order_relaxed);
    if (answer == kvpc_unknown) {
        answer = kvpc_ask_devices();
        known.store(answer, std::memory_order_relaxed);
    }
    return (answer == kvpc_depends ? kvpc_ask_device() : answer) == kvpc_yes;
#endif
}

#ifndef KVPRIM_CUDA_EMULATE
/* Whether it is an error of execution, which no launch can have of its own: it only enqueues. */
static bool kvpc_is_earlier(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
        return true;
    default:
        return false;
    }
}

static kvprim_status kvpc_fail_cuda(const char *function, const char *what, cudaError_t error)
{
    (void)cudaGetLastError(); /* it is reported here */
    return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s%s: %s", function, what, cudaGetErrorName(error),
                       cudaGetErrorString(error));
}
#endif

/* Enqueues a kernel. launch->pdl asks for a dependent launch, which kvpc_has_pdl() must have allowed. */
template <class Params>
static kvprim_status kvpc_start(const char *function, void (*kernel)(Params), uint32_t blocks, uint32_t threads,
                                const Params &params, const kvprim_cuda_launch *launch)
{
#ifdef KVPRIM_CUDA_EMULATE
    (void)function, (void)launch;
    kvprim_emulate_launch(kernel, dim3{blocks, 1, 1}, threads, params);
    return KVPRIM_OK;
#else
    cudaLaunchAttribute pdl;
    cudaLaunchConfig_t config = {};
    void *args[] = {(void *)&params};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = launch->stream ? launch->stream : cudaStreamLegacy; /* whatever nvcc makes of NULL */
    config.attrs = &pdl;
    config.numAttrs = launch->pdl != 0;
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    const cudaError_t error = cudaLaunchKernelExC(&config, (const void *)kernel, args);
    if (error == cudaSuccess)
        return KVPRIM_OK;
    return kvpc_fail_cuda(function, kvpc_is_earlier(error) ? "not enqueued, as work before it failed: " : "", error);
#endif
}

/* >>impl_debug -----------------------------------------------------------------------------------------------------

   KVPRIM_DEBUG: the device can reach the first and the last byte of what a call may touch. */
#if defined(KVPRIM_DEBUG) && !defined(KVPRIM_CUDA_EMULATE)
static kvprim_status kvpc_check_byte(const char *function, const char *name, const char *p)
{
    int device = 0, pageable = 0;
    cudaPointerAttributes a;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device);
    if (error == cudaSuccess)
        error = cudaPointerGetAttributes(&a, p);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s (%p): %s: %s", function, name, (const void *)p,
                           cudaGetErrorName(error), cudaGetErrorString(error));
    }
    if (a.type == cudaMemoryTypeUnregistered && !pageable)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "%s: %s reaches %p, which the GPU cannot: ordinary host memory, or past an allocation",
                           function, name, (const void *)p);
    if (a.type == cudaMemoryTypeDevice && a.device != device && !a.devicePointer)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "%s: %s (%p) is memory of device %d, which device %d has no access to", function, name,
                           (const void *)p, a.device, device);
    return KVPRIM_OK;
}

static kvprim_status kvpc_check_bytes(const char *function, const char *name, const void *p, uint64_t bytes)
{
    if (!p || bytes < 1)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_check_byte(function, name, (const char *)p));
    return kvpc_check_byte(function, name, (const char *)p + bytes - 1);
}

static kvprim_status kvpc_check_side(const char *function, const char *name, const char *index_name,
                                     const kvprim_side *side, const kvprim_move *m)
{
    const uint64_t size = side->index_type == KVPRIM_I64 ? 8 : 4;
    for (int32_t l = 0; l < m->layers; l++)
        KVPRIM_TRY(kvpc_check_bytes(function, name, kvprim_side_layer(side, l), side->bytes));
    return kvpc_check_bytes(function, index_name, side->index,
                            size * ((uint64_t)(m->count - 1) * (uint64_t)side->index_stride + 1));
}

static kvprim_status kvpc_check_memory(const char *function, const kvprim_move *moves, size_t n)
{
    for (const kvprim_move *m = moves; m != moves + n; m++) {
        if (m->count == 0)
            continue;
        KVPRIM_TRY(kvpc_check_side(function, m->names->dst, m->names->dst_index, &m->dst, m));
        KVPRIM_TRY(kvpc_check_side(function, m->names->src, m->names->src_index, &m->src, m));
        KVPRIM_TRY(kvpc_check_bytes(function, "rejected", m->rejected, 4));
    }
    return KVPRIM_OK;
}
#else
static kvprim_status kvpc_check_memory(const char *, const kvprim_move *, size_t)
{
    return KVPRIM_OK;
}
#endif

/* >>impl_row_plan -------------------------------------------------------------------------------------------------- */

/* A call on its way to the GPU. */
typedef struct kvpc_call {
    const char *function;
    kvprim_cuda_launch launch; /* pdl only where it has an effect */
} kvpc_call;

/* Where the only layer of a side starts. The caller may have changed the array that names it since the check. */
static uint64_t kvpc_only_layer(const kvprim_side *side)
{
    return (uint64_t)(uintptr_t)(side->layers ? side->layers[0] : side->table.data);
}

/* Whether the kernels of plain rows can take a side. *bits collects what must be a multiple of the word. */
static bool kvpc_is_plain_side(const kvprim_side *side, uint64_t *bits)
{
    const kvprim_table *const t = &side->table;
    *bits |= kvpc_only_layer(side) | (uint64_t)t->stride;
    return t->heads == 1 && t->page_rows == 0 && t->stride <= UINT32_MAX;
}

/* And the whole move, a gather or a store: the number of threads fits 31 bits, and an index less the base cannot wrap
   into the table. */
static bool kvpc_is_plain(const kvprim_move *m, uint64_t *bits)
{
    const int64_t int32_rows = (int64_t)1 << 31;
    const kvprim_side *const indexed = m->zero ? &m->src : &m->dst, *const other = m->zero ? &m->dst : &m->src;
    const int64_t base = indexed->index_base, rows = indexed->table.rows;
    return indexed->index && !other->index && m->layers == 1 && kvpc_is_plain_side(&m->dst, bits) &&
           kvpc_is_plain_side(&m->src, bits) && m->row_bytes <= 1 << 20 && m->count <= 1 << 24 &&
           m->count * (1 + m->row_bytes / 512) <= 1 << 24 && base >= 0 && base <= INT32_MAX && rows <= int32_rows &&
           base <= int32_rows - rows;
}

/* Whether two moves are K and V of a store: the same slots, each counted once. */
static bool kvpc_is_pair(const kvprim_move *k, const kvprim_move *v)
{
    const kvprim_side *const a = &k->dst, *const b = &v->dst;
    return !k->zero && !v->zero && !v->rejected && a->index == b->index && a->index_type == b->index_type &&
           a->index_base == b->index_base && a->index_stride == b->index_stride && a->table.rows == b->table.rows &&
           k->count == v->count;
}

static kvpc_divisor kvpc_divisor_of(int64_t by)
{
    const int64_t most = (int64_t)1 << 31;
    kvpc_divisor d = {(uint64_t)by, 0, 0};
    if (by < 1 || by > most) /* whatever is below 2^31 is less */
        return d;
    while ((int64_t)1 << d.shift < by)
        d.shift++;
    const uint64_t one = (uint64_t)1 << 31;
    d.magic = (uint32_t)((int64_t)1 << d.shift == by ? one : ((one << d.shift) + d.by - 1) / d.by);
    return d;
}

/* `parts` groups of threads share a row. Returns the number of blocks. */
static uint32_t kvpc_share(kvpc_plain *p, uint32_t parts, uint32_t lanes)
{
    const kvpc_divisor divisor = kvpc_divisor_of(parts);
    p->parts = parts;
    p->parts_magic = divisor.magic;
    p->parts_shift = divisor.shift;
    const uint64_t threads = (uint64_t)p->count * parts * lanes;
    return (uint32_t)((threads + kvpc_threads - 1) / kvpc_threads);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_gather(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t part = 16 * lanes * loads, blocks = kvpc_share(p, (p->row_bytes[0] + part - 1) / part, lanes);
    return kvpc_start(call->function,
                      p->pdl ? kvpc_gather_kernel<lanes, loads, exact, true>
                             : kvpc_gather_kernel<lanes, loads, exact, false>,
                      blocks, kvpc_threads, *p, &call->launch);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_store(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t most = p->row_bytes[0] > p->row_bytes[1] ? p->row_bytes[0] : p->row_bytes[1];
    const uint32_t part = 16 * lanes * loads, blocks = kvpc_share(p, (most + part - 1) / part, lanes);
    static void (*const kernels[])(kvpc_plain) = {
        kvpc_store_kernel<lanes, loads, 1, exact, false>, kvpc_store_kernel<lanes, loads, 1, exact, true>,
        kvpc_store_kernel<lanes, loads, 2, exact, false>, kvpc_store_kernel<lanes, loads, 2, exact, true>};
    return kvpc_start(call->function, kernels[2 * (p->row_bytes[1] != 0) + p->pdl], blocks, kvpc_threads, *p,
                      &call->launch);
}

static kvprim_status kvpc_start_bytes(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t part = 16 * kvpc_bytes_lanes * kvpc_bytes_loads;
    p->k_parts = (p->row_bytes[0] + 15 + part - 1) / part; /* a row may lie in one word more than it fills */
    const uint32_t v_parts = p->row_bytes[1] ? (p->row_bytes[1] + 15 + part - 1) / part : 0;
    const uint32_t blocks = kvpc_share(p, p->k_parts + v_parts, kvpc_bytes_lanes);
    return kvpc_start(call->function, kvpc_bytes_kernel, blocks, kvpc_threads, *p, &call->launch);
}

/* Whether parts of `part` bytes fill rows of row_bytes and are a power of two. */
static bool kvpc_fills(int64_t row_bytes, int64_t part)
{
    const int64_t parts = row_bytes / part;
    return parts > 0 && parts * part == row_bytes && (parts & (parts - 1)) == 0;
}

/* Two loads per thread, and a whole warp where a row has that much: more in flight gains nothing. Short rows take one
   load per thread until there are enough of them to fill the GPU. With dependent launch a GPU starts less than one block
   per nanosecond, so many blocks must not be small. */
static kvprim_status kvpc_gather_by_size(const kvpc_call *call, kvpc_plain *p)
{
    const int64_t row_bytes = p->row_bytes[0];
    const bool few = p->count * row_bytes <= kvpc_small_gather_bytes;
    if (!p->fetch) {
        if (kvpc_fills(row_bytes, 1024))
            return kvpc_start_gather<32, 2, true>(call, p);
        if (row_bytes == 512)
            return few ? kvpc_start_gather<32, 1, true>(call, p) : kvpc_start_gather<16, 2, true>(call, p);
        if (row_bytes == 256)
            return few ? kvpc_start_gather<16, 1, true>(call, p) : kvpc_start_gather<8, 2, true>(call, p);
        if (row_bytes == 128 && p->count > kvpc_many_rows)
            return kvpc_start_gather<4, 2, true>(call, p);
        if (row_bytes == 128)
            return kvpc_start_gather<8, 1, true>(call, p);
    }
    if (row_bytes <= 64)
        return kvpc_start_gather<4, 1, false>(call, p);
    if (row_bytes <= 128)
        return kvpc_start_gather<8, 1, false>(call, p);
    return kvpc_start_gather<8, 2, false>(call, p);
}

/* One load per thread and table, two where the rows are neither few nor short. */
static kvprim_status kvpc_store_by_size(const kvpc_call *call, kvpc_plain *p)
{
    const int64_t row_bytes = p->row_bytes[0], v_bytes = p->row_bytes[1];
    if (!p->fetch && (v_bytes == 0 || v_bytes == row_bytes)) {
        if (kvpc_fills(row_bytes, 1024) && p->count * row_bytes > kvpc_small_store_bytes)
            return kvpc_start_store<32, 2, true>(call, p);
        if (kvpc_fills(row_bytes, 512))
            return kvpc_start_store<32, 1, true>(call, p);
        if (row_bytes == 256)
            return kvpc_start_store<16, 1, true>(call, p);
        if (row_bytes == 128)
            return kvpc_start_store<8, 1, true>(call, p);
    }
    if (row_bytes <= 128 && v_bytes <= 128)
        return kvpc_start_store<8, 1, false>(call, p);
    return kvpc_start_store<16, 1, false>(call, p);
}

/* One plain move, or K and V. `bits`: see kvpc_is_plain_side. */
static kvprim_status kvpc_run_plain(const kvpc_call *call, const kvprim_move *moves, int n, uint64_t bits)
{
    const kvprim_side *const indexed = moves->zero ? &moves->src : &moves->dst;
    kvpc_plain p = {};
    uint64_t edges = 0; /* of rows that no other row of the same call completes to a granule */
    for (int k = 0; k < n; k++) {
        const kvprim_move *const m = &moves[k];
        p.pair[k].dst = kvpc_only_layer(&m->dst);
        p.pair[k].src = kvpc_only_layer(&m->src);
        p.pair[k].dst_stride = (uint32_t)m->dst.table.stride;
        p.pair[k].src_stride = (uint32_t)m->src.table.stride;
        p.row_bytes[k] = (uint32_t)m->row_bytes;
        if (!m->zero || m->dst.table.stride != m->row_bytes)
            edges |= p.pair[k].dst | p.pair[k].dst_stride | p.row_bytes[k];
    }
    p.index = (uint64_t)(uintptr_t)indexed->index;
    p.index_is_i64 = indexed->index_type == KVPRIM_I64;
    p.index_step = (uint32_t)indexed->index_stride * (p.index_is_i64 ? 8 : 4);
    p.rejected = moves->rejected;
    p.rows = (uint32_t)indexed->table.rows;
    p.base = (uint32_t)indexed->index_base;
    p.count = (uint32_t)moves->count;
    p.pdl = call->launch.pdl != 0;
    p.gather = moves->zero != 0;
    p.fetch = edges % kvpc_granule_bytes != 0;
    if (bits % 16 != 0)
        return kvpc_start_bytes(call, &p);
    return p.gather ? kvpc_gather_by_size(call, &p) : kvpc_store_by_size(call, &p);
}

/* >>impl_move_plan ------------------------------------------------------------------------------------------------- */

static int64_t kvpc_gcd(int64_t a, int64_t b)
{
    return b ? kvpc_gcd(b, a % b) : a;
}

static kvpc_naming kvpc_naming_of(const kvprim_side *side, int64_t count)
{
    const uint32_t is_i64 = side->index_type == KVPRIM_I64;
    kvpc_naming n = {0, 0, (uint64_t)count, 0, 0};
    if (side->index)
        n = kvpc_naming{(uint64_t)(uintptr_t)side->index, side->index_base, (uint64_t)side->table.rows,
                        (uint32_t)side->index_stride * (is_i64 ? 8 : 4), is_i64};
    return n;
}

/* *bits collects what must be a multiple of 16 for the kernels of aligned chunks. */
static kvpc_layout kvpc_layout_of(const kvprim_side *side, int64_t unit, uint64_t *bits)
{
    const kvprim_table *const t = &side->table;
    kvpc_layout s = {t->stride, 0, 0, kvpc_divisor_of(t->page_rows), kvpc_divisor_of(0)};
    if (t->page_rows > 0)
        s.page_step = (int64_t)((uint64_t)t->page_stride - (uint64_t)t->page_rows * (uint64_t)t->stride);
    if (t->heads > 1) {
        s.head = kvpc_divisor_of(side->piece_bytes / unit);
        s.head_step = t->head_stride - side->piece_bytes;
    }
    *bits |= (uint64_t)s.stride | (uint64_t)s.page_step | (uint64_t)s.head_step | (uint64_t)unit;
    return s;
}

/* Everything of a task except its layers and how its rows are cut into chunks. */
static void kvpc_set_task(kvpc_task *t, const kvprim_move *m, uint64_t *bits)
{
    const int64_t unit = kvpc_gcd(m->dst.piece_bytes, m->src.piece_bytes);
    t->dst_rows = kvpc_naming_of(&m->dst, m->count);
    t->src_rows = kvpc_naming_of(&m->src, m->count);
    t->dst = kvpc_layout_of(&m->dst, unit, bits);
    t->src = kvpc_layout_of(&m->src, unit, bits);
    t->unit_bytes = (uint64_t)unit;
    t->units = (uint64_t)(m->row_bytes / unit);
    t->count = kvpc_divisor_of(m->count);
    t->zero = m->zero != 0;
}

/* Cuts rows into chunks. `aligned`: nothing begins or ends inside 16 bytes; otherwise a part is that much longer. */
template <uint32_t most_tasks> static void kvpc_cut(kvpc_batch<most_tasks> *p, uint32_t part_bytes, bool aligned)
{
    p->part_bytes = aligned ? part_bytes : part_bytes + 16;
    p->total = 0;
    for (uint32_t k = 0; k < p->tasks; k++) {
        kvpc_task *const t = &p->task[k];
        const uint64_t touched = aligned ? t->unit_bytes : t->unit_bytes + 15;
        t->parts = kvpc_divisor_of((int64_t)((touched + p->part_bytes - 1) / p->part_bytes));
        t->chunks = kvpc_divisor_of((int64_t)(t->units * t->parts.by));
        t->first_chunk = p->total;
        p->total += t->chunks.by * t->count.by * t->layers;
    }
}

/* Blocks for all chunks; with max_sms no more than that many, of as many threads as there is work for. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_groups(const kvpc_call *call, void (*kernel)(kvpc_batch<most_tasks>),
                                       uint32_t most_threads, uint32_t lanes, const kvpc_batch<most_tasks> *p)
{
    const uint64_t limit = (uint64_t)call->launch.max_sms;
    uint32_t threads = limit ? most_threads : (uint32_t)kvpc_threads;
    while (threads > kvpc_threads && p->total / (threads / lanes) < limit)
        threads /= 2;
    const uint64_t wanted = (p->total + threads / lanes - 1) / (threads / lanes), most = limit ? limit : INT32_MAX;
    return kvpc_start(call->function, kernel, (uint32_t)(wanted < most ? wanted : most), threads, *p, &call->launch);
}

/* Rows that begin and end at multiples of 16 bytes. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_aligned(const kvpc_call *call, kvpc_batch<most_tasks> *p, uint64_t unit)
{
    typedef void kernel_type(kvpc_batch<most_tasks>);
    const bool few = call->launch.max_sms > 0;
    const uint32_t loads = few ? 4 : 2, lanes = unit <= 128 * loads ? 8 : unit <= 256 * loads ? 16 : 32;
    kernel_type *const few_kernel = lanes == 8    ? kvpc_move_few_kernel<8, 4, most_tasks>
                                    : lanes == 16 ? kvpc_move_few_kernel<16, 4, most_tasks>
                                                  : kvpc_move_few_kernel<32, 4, most_tasks>;
    kernel_type *const kernel = lanes == 8    ? kvpc_move_kernel<8, 2, most_tasks>
                                : lanes == 16 ? kvpc_move_kernel<16, 2, most_tasks>
                                              : kvpc_move_kernel<32, 2, most_tasks>;
    kvpc_cut(p, 16 * lanes * loads, true);
    return kvpc_start_groups(call, few ? few_kernel : kernel, kvpc_few_sms_threads, lanes, p);
}

/* Any rows. large: more rows or chunks than the other kernels count. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_unaligned(const kvpc_call *call, kvpc_batch<most_tasks> *p, uint64_t unit, bool large)
{
    const uint32_t lanes = large || unit > 256 ? 32 : 8;
    kvpc_cut(p, lanes == 8 ? 256 : 2048, false);
    return kvpc_start_groups(call,
                             large        ? kvpc_move_bytes_kernel<32, uint64_t, most_tasks>
                             : lanes == 8 ? kvpc_move_bytes_kernel<8, uint32_t, most_tasks>
                                          : kvpc_move_bytes_kernel<32, uint32_t, most_tasks>,
                             kvpc_unaligned_threads, lanes, p);
}

/* `bits`: see kvpc_layout_of; the layers' addresses count as well. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_batch(const kvpc_call *call, kvpc_batch<most_tasks> *p, uint64_t bits)
{
    const uint64_t most = (uint64_t)1 << 31;
    uint64_t unit = 0, chunks = 0;
    bool large = false;
    for (uint32_t k = 0; k < p->tasks; k++) {
        const kvpc_task *const t = &p->task[k];
        const uint64_t in_row = t->units * (t->unit_bytes / 256 + 1);
        const uint64_t rows = t->count.by < most ? t->count.by * t->layers : most;
        unit = t->unit_bytes > unit ? t->unit_bytes : unit;
        large |= t->dst_rows.rows > most || t->src_rows.rows > most || in_row >= most / rows;
        chunks += large ? 0 : in_row * rows;
        for (uint64_t l = t->first_layer; l < t->first_layer + t->layers; l++)
            bits |= p->layer[l].dst | p->layer[l].src;
    }
    large |= chunks >= most;
    p->pdl = call->launch.pdl != 0;
    p->reserved = 0;
    return large || bits % 16 != 0 ? kvpc_start_unaligned(call, p, unit, large) : kvpc_start_aligned(call, p, unit);
}

/* Where neither side has an index, rows that follow each other without a gap on both sides become one. */
static void kvpc_join_rows(kvprim_move *m)
{
    kvprim_table *const dst = &m->dst.table, *const src = &m->src.table;
    if (m->dst.index || m->src.index || dst->heads > 1 || src->heads > 1 || dst->stride != m->row_bytes ||
        src->stride != m->row_bytes)
        return;
    const int64_t rows = kvpc_gcd(kvpc_gcd(dst->page_rows, src->page_rows), m->count);
    dst->stride = src->stride = m->dst.piece_bytes = m->src.piece_bytes = m->row_bytes *= rows;
    dst->page_rows /= rows, src->page_rows /= rows;
    m->count /= rows;
}

static bool kvpc_is_alike_side(const kvprim_side *a, const kvprim_side *b)
{
    const kvprim_table *const x = &a->table, *const y = &b->table;
    return a->index == b->index && a->index_type == b->index_type && a->index_base == b->index_base &&
           a->index_stride == b->index_stride && (!a->index || x->rows == y->rows) && x->stride == y->stride &&
           x->page_rows == y->page_rows && x->page_stride == y->page_stride && x->heads == y->heads &&
           x->head_stride == y->head_stride;
}

/* Whether a move differs from the one before it only in its memory, as V often does from K: then it is one more layer,
   and spares a task. */
static bool kvpc_is_alike(const kvprim_move *a, const kvprim_move *b)
{
    return a->row_bytes == b->row_bytes && a->count == b->count && a->zero == b->zero && !b->rejected &&
           kvpc_is_alike_side(&a->dst, &b->dst) && kvpc_is_alike_side(&a->src, &b->src);
}

/* Adds layers of a move to a batch, from layer `first` on, and returns how many: none if the batch is full. `before`:
   the move that the batch's last task stands for, or NULL. */
template <uint32_t most_tasks>
static int32_t kvpc_add_layers(kvpc_batch<most_tasks> *p, uint32_t *used, const kvprim_move *before,
                               const kvprim_move *m, int32_t first, uint64_t *bits)
{
    const uint32_t room = kvpc_batch<most_tasks>::most_layers - *used, left = (uint32_t)(m->layers - first);
    const uint32_t layers = left < room ? left : room;
    const bool alike = before && kvpc_is_alike(before, m);
    if (layers == 0 || (!alike && p->tasks == most_tasks))
        return 0;
    if (!alike) {
        kvpc_task *const task = &p->task[p->tasks++];
        kvpc_set_task(task, m, bits);
        task->first_layer = *used;
        task->layers = 0;
        task->rejected = first == 0 ? m->rejected : NULL; /* counted in layer 0 */
    }
    p->task[p->tasks - 1].layers += layers;
    for (uint32_t l = 0; l < layers; l++) {
        p->layer[*used + l].dst = (uint64_t)(uintptr_t)kvprim_side_layer(&m->dst, first + (int32_t)l);
        p->layer[*used + l].src = (uint64_t)(uintptr_t)kvprim_side_layer(&m->src, first + (int32_t)l);
    }
    *used += layers;
    return (int32_t)layers;
}

/* As many moves and layers at a time as a launch's parameters hold. */
template <uint32_t most_tasks>
static kvprim_status kvpc_run_batches(const kvpc_call *call, const kvprim_move *moves, size_t n)
{
    int32_t first = 0; /* the first layer of moves[k] that is not launched yet */
    for (size_t k = 0; k < n;) {
        kvpc_batch<most_tasks> p;
        kvprim_move joined;
        const kvprim_move *before = NULL;
        uint32_t used = 0;
        uint64_t bits = 0;
        p.tasks = 0;
        for (; k < n; k++, first = 0) {
            if (moves[k].count == 0)
                continue;
            joined = moves[k];
            kvpc_join_rows(&joined);
            first += kvpc_add_layers(&p, &used, before, &joined, first, &bits);
            if (first < joined.layers)
                break;
            before = &moves[k];
        }
        if (p.tasks)
            KVPRIM_TRY(kvpc_start_batch(call, &p, bits));
    }
    return KVPRIM_OK;
}

/* Runs checked moves; `moves` is not empty where a function checked them. */
static kvprim_status kvpc_run(const char *function, const kvprim_move *moves, size_t n,
                              const kvprim_cuda_launch *launch)
{
    uint64_t bits = 0;
    while (n > 0 && moves[n - 1].count == 0) /* K only, say */
        n--;
    if (n == 0)
        return KVPRIM_OK;
    kvpc_call call = {function, {}};
    KVPRIM_TRY(kvpc_check_launch(function, launch));
    KVPRIM_TRY(kvpc_check_memory(function, moves, n));
    if (launch)
        call.launch = *launch;
    call.launch.pdl = call.launch.pdl && kvpc_has_pdl();
    if (call.launch.max_sms == 0 && n <= 2 && kvpc_is_plain(&moves[0], &bits) &&
        (n == 1 || (kvpc_is_plain(&moves[1], &bits) && kvpc_is_pair(&moves[0], &moves[1]))))
        return kvpc_run_plain(&call, moves, (int)n, bits);
    if (n == 1 || (n == 2 && kvpc_is_alike(&moves[0], &moves[1])))
        return kvpc_run_batches<1>(&call, moves, n);
    return kvpc_run_batches<kvpc_most_tasks>(&call, moves, n);
}

/* ---- unpack: host side ---- */

static const uint64_t kvpc_most_run = (uint64_t)1 << 30; /* bytes that move as one fragment: fits 32 bits */

/* Goes through a batch's fragments. Merging, it puts adjacent ones together, leaves out empty ones and cuts long
   ones. */
typedef struct kvpc_cursor {
    const kvprim_fragment *next, *end;
    kvprim_fragment rest; /* what was cut off */
} kvpc_cursor;

template <bool merge> static inline bool kvpc_next(kvpc_cursor *c, kvprim_fragment *run)
{
    if (!merge) {
        if (c->next == c->end)
            return false;
        *run = *c->next++;
        return true;
    }
    kvprim_fragment r = c->rest;
    for (; c->next != c->end && r.bytes < kvpc_most_run; c->next++) {
        const kvprim_fragment f = *c->next;
        if (r.bytes == 0)
            r = f;
        else if (f.bytes == 0 || (f.src_offset - r.src_offset == r.bytes && f.dst_offset - r.dst_offset == r.bytes))
            r.bytes += f.bytes;
        else
            break;
    }
    *run = r;
    run->bytes = r.bytes < kvpc_most_run ? r.bytes : kvpc_most_run;
    c->rest.src_offset = r.src_offset + run->bytes;
    c->rest.dst_offset = r.dst_offset + run->bytes;
    c->rest.bytes = r.bytes - run->bytes;
    return run->bytes != 0;
}

/* How the fragments' offsets on one side go on from one to the next. */
typedef struct kvpc_offsets {
    uint64_t first, any; /* any: bits that are set in any of the steps; so if all are the same, the step */
    bool regular;        /* all steps are the same */
} kvpc_offsets;

typedef struct kvpc_survey {
    kvpc_offsets src, dst;
    uint64_t count, bytes, last_bytes;
    uint64_t any_bytes; /* bits that are set in any size */
    uint64_t joins;     /* steps that are the same on both sides: no more fragments follow the one before at once */
    bool same_bytes;    /* all have `bytes` bytes, or the last fewer */
} kvpc_survey;

/* Two sums more than a processor has registers for, and it takes half as long again: a bit is set in any size if it
   is in the first, or where one differs from the first. */
template <bool merge> static kvpc_survey kvpc_look(const kvprim_unpack_desc *d)
{
    kvpc_cursor cursor = {d->fragments, d->fragments + d->count, {0, 0, 0}};
    kvprim_fragment first, last, next;
    kvpc_survey s = {};
    if (!kvpc_next<merge>(&cursor, &first))
        return s;
    kvpc_cursor ahead = cursor;
    next = first;
    (void)kvpc_next<merge>(&ahead, &next);
    const uint64_t src_step = next.src_offset - first.src_offset, dst_step = next.dst_offset - first.dst_offset;
    uint64_t src_differ = 0, dst_differ = 0, bytes_differ = 0, joins = 0, count = 1;
    for (last = first; kvpc_next<merge>(&cursor, &next); last = next) {
        const uint64_t from_src = next.src_offset - last.src_offset, from_dst = next.dst_offset - last.dst_offset;
        src_differ |= from_src ^ src_step;
        dst_differ |= from_dst ^ dst_step;
        bytes_differ |= last.bytes ^ first.bytes;
        joins += from_src == from_dst;
        if (merge)
            count++;
    }
    s.src = kvpc_offsets{first.src_offset, src_step | src_differ, src_differ == 0};
    s.dst = kvpc_offsets{first.dst_offset, dst_step | dst_differ, dst_differ == 0};
    s.count = merge ? count : d->count;
    s.bytes = first.bytes;
    s.last_bytes = last.bytes;
    s.any_bytes = first.bytes | bytes_differ | last.bytes;
    s.joins = joins;
    s.same_bytes = bytes_differ == 0 && last.bytes > 0 && last.bytes <= first.bytes;
    return s;
}

/* How far numbers for the offsets may be shifted right without loss. */
static uint32_t kvpc_common_shift(const kvpc_offsets *o)
{
    uint32_t shift = 0;
    while (shift < 31 && (o->any >> shift & 1) == 0)
        shift++;
    return shift;
}

/* Whether numbers for offsets in a buffer are at most `most`. */
static bool kvpc_fits(const kvpc_offsets *o, uint64_t buffer_bytes, uint64_t most)
{
    return (buffer_bytes - 1) >> kvpc_common_shift(o) <= most;
}

/* A batch on its way: what is not launched yet, and where its words may go. */
typedef struct kvpc_unpack_job {
    const kvprim_unpack_desc *desc;
    const kvprim_cuda_launch *launch;
    kvpc_survey survey;
    kvpc_cursor cursor;
    kvpc_unpack head;
    uint64_t left;                 /* fragments */
    uint32_t dst_shift, src_shift; /* from an offset to its word */
    uint32_t *space;
    uint64_t space_words;
    bool merge, even, small, aligned;
    bool direct;           /* no fragment has more than one piece */
    bool started, overlap; /* a launch is under way; the next ones may run beside it */
} kvpc_unpack_job;

/* Whether the fragments may be taken as an even batch. */
static bool kvpc_is_even(const kvpc_unpack_job *job)
{
    const kvpc_survey *const s = &job->survey;
    return s->same_bytes && s->bytes <= kvpc_most_run &&
           (s->src.regular || kvpc_fits(&s->src, job->desc->src_bytes, UINT32_MAX)) &&
           (s->dst.regular || kvpc_fits(&s->dst, job->desc->dst_bytes, UINT32_MAX));
}

enum { kvpc_most_pieces = 1 << 30, kvpc_table_share = 16 }; /* a word of the table for so many fragments */

/* 16-byte words of a piece. */
static uint64_t kvpc_piece_words(const kvpc_unpack_job *job)
{
    return (uint64_t)(job->aligned ? kvpc_piece<true>::loads : kvpc_piece<false>::loads) << job->head.lanes_shift;
}

/* Pieces of so many bytes, from a 16-byte boundary on. */
static inline uint32_t kvpc_pieces_of(uint32_t bytes, uint32_t lanes_shift, bool aligned)
{
    const uint32_t words = (bytes - 1) >> (4 + lanes_shift); /* before the last, for each thread */
    return (aligned ? words / kvpc_piece<true>::loads : words / kvpc_piece<false>::loads) + 1; /* constants */
}

/* Halves of words that describe one fragment. */
static uint64_t kvpc_fragment_halves(const kvpc_unpack_job *job)
{
    if (job->even)
        return (uint64_t)(job->head.src_words + job->head.dst_words) << (job->head.halves ? 0 : 1);
    return job->head.distant ? 12 : 8;
}

/* Words that describe `count` fragments. */
static uint64_t kvpc_words_for(const kvpc_unpack_job *job, uint64_t count)
{
    const uint64_t table = job->even || job->direct ? 0 : count / kvpc_table_share + 2;
    return (count * kvpc_fragment_halves(job) + 1) / 2 + table;
}

/* How many fragments so many words describe. */
static uint64_t kvpc_fragments_in(const kvpc_unpack_job *job, uint64_t words)
{
    const uint64_t each = kvpc_fragment_halves(job), share = kvpc_table_share;
    if (each == 0)
        return job->left;
    return job->even || job->direct ? 2 * words / each : (words - 2) * share / (each / 2 * share + 1);
}

/* Sets what an even batch's numbers on one side are multiplied by, and returns what is added to the side's address. */
static uint64_t kvpc_plan_side(const kvpc_offsets *o, uint32_t *words, uint32_t *shift, uint64_t *step)
{
    *words = !o->regular;
    *shift = *words ? kvpc_common_shift(o) : 0;
    *step = *words ? (uint64_t)1 << *shift : o->any;
    return *words ? o->first % *step : o->first;
}

static void kvpc_plan_offsets(kvpc_unpack_job *job)
{
    const kvprim_unpack_desc *const d = job->desc;
    const kvpc_survey *const s = &job->survey;
    kvpc_unpack *const h = &job->head;
    h->dst = (uint64_t)(uintptr_t)d->dst;
    h->src = (uint64_t)(uintptr_t)d->src;
    h->distant = d->dst_bytes > UINT32_MAX || d->src_bytes > UINT32_MAX;
    if (!job->even)
        return;
    h->dst += kvpc_plan_side(&s->dst, &h->dst_words, &job->dst_shift, &h->dst_step);
    h->src += kvpc_plan_side(&s->src, &h->src_words, &job->src_shift, &h->src_step);
    h->halves = (!h->dst_words || kvpc_fits(&s->dst, d->dst_bytes, UINT16_MAX)) &&
                (!h->src_words || kvpc_fits(&s->src, d->src_bytes, UINT16_MAX));
    h->bytes = (uint32_t)s->bytes;
}

/* The fewest threads that can copy a fragment at once, or a warp. */
static void kvpc_plan_pieces(kvpc_unpack_job *job)
{
    const kvpc_survey *const s = &job->survey;
    kvpc_unpack *const h = &job->head;
    const uint64_t dst_lead = ((uint64_t)(uintptr_t)job->desc->dst + s->dst.first) % 16;
    const uint64_t src_lead = ((uint64_t)(uintptr_t)job->desc->src + s->src.first) % 16;
    job->aligned = (dst_lead | src_lead | s->dst.any | s->src.any | s->any_bytes) % 16 == 0;
    const uint64_t lead = s->dst.any % 16 ? 15 : dst_lead; /* the most that a fragment begins behind a word */
    const uint64_t most = (lead + (job->even ? s->bytes : s->any_bytes) + 15) / 16;
    job->small = job->even && job->aligned && most <= 32;
    for (h->lanes_shift = 3; h->lanes_shift < 5 && kvpc_piece_words(job) < (job->small ? 4 * most : most);)
        h->lanes_shift++;
    job->direct = most <= kvpc_piece_words(job);
    h->parts = kvpc_pieces_of((uint32_t)(16 * most), h->lanes_shift, job->aligned);
}

/* Numbers of one side, two to a word. */
template <bool merge>
static void kvpc_encode_halves(kvpc_cursor *from, uint32_t *words, uint64_t count, uint64_t kvprim_fragment::*offset,
                               uint32_t shift)
{
    kvpc_cursor cursor = *from;
    kvprim_fragment a, b;
    for (uint32_t *const end = words + count / 2;
         words != end && kvpc_next<merge>(&cursor, &a) && kvpc_next<merge>(&cursor, &b); words++)
        *words = (uint32_t)(a.*offset >> shift) | (uint32_t)(b.*offset >> shift) << 16;
    if (count % 2 && kvpc_next<merge>(&cursor, &a))
        *words = (uint32_t)(a.*offset >> shift);
    *from = cursor;
}

template <bool merge> static void kvpc_encode_even(kvpc_unpack_job *job, uint32_t *words, uint64_t count)
{
    kvpc_unpack *const h = &job->head;
    const uint32_t src_shift = job->src_shift, dst_shift = job->dst_shift, halves = h->halves;
    const uint64_t most = kvpc_most_pieces / h->parts;
    kvprim_fragment run;
    count = count < most ? count : most;
    if (h->src_words && h->dst_words)
        for (uint64_t i = 0; i < count && kvpc_next<merge>(&job->cursor, &run); i++) {
            const uint32_t src = (uint32_t)(run.src_offset >> src_shift), dst = (uint32_t)(run.dst_offset >> dst_shift);
            *words++ = halves ? src | dst << 16 : src;
            if (!halves)
                *words++ = dst;
        }
    else if (halves && h->src_words)
        kvpc_encode_halves<merge>(&job->cursor, words, count, &kvprim_fragment::src_offset, src_shift);
    else if (halves && h->dst_words)
        kvpc_encode_halves<merge>(&job->cursor, words, count, &kvprim_fragment::dst_offset, dst_shift);
    else if (h->src_words)
        for (uint64_t i = 0; i < count && kvpc_next<merge>(&job->cursor, &run); i++)
            words[i] = (uint32_t)(run.src_offset >> src_shift);
    else if (h->dst_words)
        for (uint64_t i = 0; i < count && kvpc_next<merge>(&job->cursor, &run); i++)
            words[i] = (uint32_t)(run.dst_offset >> dst_shift);
    h->count = (uint32_t)count;
    h->pieces = (uint32_t)count * h->parts;
    job->left -= count;
    h->last_bytes = (uint32_t)(job->left ? job->survey.bytes : job->survey.last_bytes);
}

/* Behind the words of an uneven batch its table. Without a branch on the data, whose sizes nobody foretells: each
   fragment takes the first word that its pieces reach, then words that none took are filled. */
static void kvpc_encode_table(kvpc_unpack *h, uint32_t *words, uint32_t each)
{
    const uint32_t count = h->count;
    uint32_t *const table = words + count * each;
    h->table = count * each;
    h->table_shift = 0;
    while (h->pieces >> h->table_shift > count / kvpc_table_share)
        h->table_shift++;
    const uint32_t shift = h->table_shift, up = (1u << shift) - 1, places = (h->pieces + up) >> shift;
    memset(table, 0, places * sizeof *table);
    for (uint32_t i = 0; i < count; i++)
        table[(words[i * each + 3] + up) >> shift] = i;
    for (uint32_t k = 1; k < places; k++)
        table[k] = table[k] > table[k - 1] ? table[k] : table[k - 1];
    table[places] = count - 1;
}

template <bool merge> static void kvpc_encode_uneven(kvpc_unpack_job *job, uint32_t *words, uint64_t count)
{
    kvpc_unpack *const h = &job->head;
    const uint32_t each = h->distant ? 6 : 4, dst = (uint32_t)(uintptr_t)job->desc->dst;
    const uint32_t lanes_shift = 5; /* a warp: what is not direct is long, see kvpc_plan_pieces */
    const bool direct = job->direct, aligned = job->aligned;
    kvpc_cursor cursor = job->cursor;
    kvprim_fragment run;
    uint32_t *w = words, pieces = 0;
    for (uint64_t i = 0; i < count && pieces < kvpc_most_pieces && kvpc_next<merge>(&cursor, &run); i++, w += each) {
        w[0] = (uint32_t)run.src_offset;
        w[1] = (uint32_t)run.dst_offset;
        w[2] = (uint32_t)run.bytes;
        w[3] = pieces;
        if (each == 6) {
            w[4] = (uint32_t)(run.src_offset >> 32);
            w[5] = (uint32_t)(run.dst_offset >> 32);
        }
        if (direct)
            pieces++;
        else if (run.bytes)
            pieces += kvpc_pieces_of((dst + (uint32_t)run.dst_offset) % 16 + (uint32_t)run.bytes, lanes_shift, aligned);
    }
    job->cursor = cursor;
    h->count = (uint32_t)((w - words) / each);
    h->pieces = pieces;
    job->left -= h->count;
    if (!job->direct)
        kvpc_encode_table(h, words, each);
}

template <bool merge> static void kvpc_encode(kvpc_unpack_job *job, uint32_t *words, uint64_t room)
{
    const uint64_t most = kvpc_fragments_in(job, room), count = most < job->left ? most : job->left;
    if (job->even)
        kvpc_encode_even<merge>(job, words, count);
    else
        kvpc_encode_uneven<merge>(job, words, count);
}

template <uint32_t capacity> static void (*kvpc_pick_kernel(const kvpc_unpack_job *job))(kvpc_unpack_params<capacity>)
{
    if (job->small)
        return kvpc_unpack_kernel<kvpc_small, true, capacity>;
    if (job->even)
        return job->aligned ? kvpc_unpack_kernel<kvpc_even, true, capacity>
                            : kvpc_unpack_kernel<kvpc_even, false, capacity>;
    return job->aligned ? kvpc_unpack_kernel<kvpc_uneven, true, capacity>
                        : kvpc_unpack_kernel<kvpc_uneven, false, capacity>;
}

/* Sets how many pieces a block copies before it goes on, and returns how many blocks that makes. Of a workspace's words
   a block takes a line: it waits for the bus once. */
static uint32_t kvpc_plan_blocks(kvpc_unpack_job *job, uint32_t threads, bool lent, int32_t max_sms)
{
    enum { many_blocks = 768, line_halves = 64 };
    kvpc_unpack *const h = &job->head;
    const uint32_t groups = threads >> h->lanes_shift, all = job->small ? h->count : h->pieces;
    const uint64_t halves = kvpc_fragment_halves(job);
    uint64_t span = job->small ? kvpc_small_fragments * groups : groups;
    if (lent && line_halves / halves * h->parts > span)
        span = line_halves / halves * h->parts;
    h->span = (uint32_t)span;
    const uint32_t blocks = all ? (uint32_t)((all + span - 1) / span) : 1; /* empty fragments: see kvpc_unpack_some */
    if (max_sms > 0)
        return blocks < (uint32_t)max_sms ? blocks : (uint32_t)max_sms;
    return lent || job->small || blocks < many_blocks ? blocks : (blocks + 1) / 2; /* fewer starts of blocks */
}

/* Launches as many fragments as `capacity` words describe. The launches of a batch do not depend on each other: from
   the second on each starts when the one before it has, and ends after it. So what follows in the stream follows
   all. One that lets the next begin early must have a next: a slice of empty fragments is launched too. */
template <uint32_t capacity> static kvprim_status kvpc_unpack_some(kvpc_unpack_job *job)
{
    kvpc_unpack_params<capacity> p;
    kvpc_unpack *const h = &job->head;
    const bool lent = capacity == kvpc_lent;
    if (job->merge)
        kvpc_encode<true>(job, lent ? job->space : p.words, lent ? job->space_words : capacity);
    else
        kvpc_encode<false>(job, lent ? job->space : p.words, lent ? job->space_words : capacity);
    kvprim_cuda_launch launch = {};
    if (job->launch)
        launch = *job->launch;
    h->wait = !job->started && launch.pdl;
    h->wait_last = job->started && job->overlap;
    h->trigger = job->left ? job->overlap : launch.pdl;
    h->words = (uint64_t)(uintptr_t)job->space;
    const uint32_t threads = launch.max_sms > 0 ? kvpc_unpack_most_threads : kvpc_unpack_threads;
    const uint32_t blocks = kvpc_plan_blocks(job, threads, lent, launch.max_sms);
    launch.pdl = job->started ? job->overlap : launch.pdl;
    p.head = *h;
    if (job->even) { /* a step goes on from fragment to fragment */
        h->dst += h->dst_words ? 0 : h->count * h->dst_step;
        h->src += h->src_words ? 0 : h->count * h->src_step;
    }
    job->started = true;
    return kvpc_start("kvprim_cuda_unpack", kvpc_pick_kernel<capacity>(job), blocks, threads, p, &launch);
}

enum { /* words of parameters that cost nothing, that cost little, and that CUDA takes (before 12.1: 4,096 bytes) */
       kvpc_few_words = (4000 - (int)sizeof(kvpc_unpack)) / 4,
#if defined(KVPRIM_CUDA_EMULATE) || CUDART_VERSION >= 12010
       kvpc_more_words = (16800 - (int)sizeof(kvpc_unpack)) / 4,
       kvpc_most_words = (32760 - (int)sizeof(kvpc_unpack)) / 4,
#else
       kvpc_more_words = kvpc_few_words,
       kvpc_most_words = kvpc_few_words,
#endif
       kvpc_lent_bytes = 4096
};

/* A workspace is for batches that need several launches otherwise, and whose words are read about once: the bus is
   slow, and no cache of the GPU keeps what comes from there. */
static bool kvpc_is_lent(const kvpc_unpack_job *job)
{
    const uint64_t words = kvpc_words_for(job, job->left);
    return words > kvpc_most_words && words <= job->space_words && words <= kvpc_most_pieces &&
           (job->even ? job->survey.bytes <= kvpc_lent_bytes : job->direct);
}

static kvprim_status kvpc_unpack_all(kvpc_unpack_job *job)
{
    kvprim_status status = KVPRIM_OK;
    job->overlap = kvpc_has_pdl() && !(job->launch && job->launch->max_sms > 0);
    if (kvpc_is_lent(job))
        status = kvpc_unpack_some<kvpc_lent>(job);
    while (status == KVPRIM_OK && job->left > 0) {
        const uint64_t words = kvpc_words_for(job, job->left);
        status = words <= kvpc_few_words    ? kvpc_unpack_some<kvpc_few_words>(job)
                 : words <= kvpc_more_words ? kvpc_unpack_some<kvpc_more_words>(job)
                                            : kvpc_unpack_some<kvpc_most_words>(job);
    }
    return status;
}

/* The workspace's whole lines. */
static void kvpc_borrow(kvpc_unpack_job *job)
{
    const uint64_t line = 128, address = (uint64_t)(uintptr_t)job->desc->workspace,
                   skip = (line - address % line) % line;
    if (!job->desc->workspace || job->desc->workspace_bytes < skip)
        return;
    job->space = (uint32_t *)((char *)job->desc->workspace + skip);
    job->space_words = (job->desc->workspace_bytes - skip) / line * (line / 4);
}

static kvprim_status kvpc_unpack_checked(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch)
{
    kvpc_unpack_job job = {};
    job.desc = desc;
    job.launch = launch;
    job.survey = kvpc_look<false>(desc);
    if (job.survey.any_bytes == 0)
        return KVPRIM_OK;
    job.even = kvpc_is_even(&job);
    if (job.survey.any_bytes > kvpc_most_run || job.survey.joins > (job.even ? job.survey.count / 2 : 0)) {
        const kvpc_survey merged = kvpc_look<true>(desc);
        job.merge = !job.even || merged.count <= job.survey.count / 2; /* fewer joins could make even ones uneven */
        job.survey = job.merge ? merged : job.survey;
        job.even = kvpc_is_even(&job);
    }
    job.left = job.survey.count;
    job.cursor.next = desc->fragments;
    job.cursor.end = desc->fragments + desc->count;
    kvpc_borrow(&job);
    kvpc_plan_offsets(&job);
    kvpc_plan_pieces(&job);
    return kvpc_unpack_all(&job);
}

/* >>impl_calls ----------------------------------------------------------------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

KVPRIM_API kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_gather");
    kvprim_move move;
    const kvprim_status status = kvprim_gather_moves(desc, &move);
    return status == KVPRIM_OK ? kvpc_run("kvprim_cuda_gather", &move, 1, launch) : kvpc_fail_check(status);
}

KVPRIM_API kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_store");
    kvprim_move moves[2];
    const kvprim_status status = kvprim_store_moves(desc, moves);
    return status == KVPRIM_OK ? kvpc_run("kvprim_cuda_store", moves, 2, launch) : kvpc_fail_check(status);
}

KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_transfer");
    kvprim_move move;
    const kvprim_status status = kvprim_transfer_moves(desc, &move);
    return status == KVPRIM_OK ? kvpc_run("kvprim_cuda_transfer", &move, 1, launch) : kvpc_fail_check(status);
}

KVPRIM_API kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_move");
    if (!moves && n)
        return kvprim_fail(KVPRIM_ERROR_NULL, "kvprim_cuda_move: moves is NULL");
    return kvpc_run("kvprim_cuda_move", moves, n, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_unpack");
    kvprim_status status = kvprim_unpack_check(desc);
    if (status == KVPRIM_OK)
        status = kvpc_check_launch("kvprim_cuda_unpack", launch);
    return status != KVPRIM_OK || desc->count == 0 ? status : kvpc_unpack_checked(desc, launch);
}

#ifdef __cplusplus
}
#endif
#undef KVPRIM_TRY
#endif /* implementation */

/* MIT License

   Copyright (c) 2026 the kvprim authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
   documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
   rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
   permit persons to whom the Software is furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
   Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
   WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
   COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
   OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */

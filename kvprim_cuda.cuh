/* SPDX-License-Identifier: MIT */
/* kvprim_cuda.cuh: gather, store, transfer and unpack on the GPU, callable from C. CUDA 12 and sm_75, or newer.

   Do this, in a .cu file (and call it from C files that include this header and no CUDA header):

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim_cuda.cuh"

       kvprim_status keep(void *cache, int64_t slots, void *rows, const int32_t *slot, int64_t n, cudaStream_t stream)
       {
           kvprim_store_desc store = {};
           store.k_cache.data = cache, store.k_cache.rows = slots;
           store.k.data = rows, store.k.rows = n, store.k_bytes = 1024;
           store.slot = slot, store.slot_type = KVPRIM_I32, store.count = n;
           kvprim_cuda_launch launch = {};
           launch.stream = stream;
           return kvprim_cuda_store(&store, &launch);
       }

   What it does: moves rows in the memory of the current device, by the descriptors of kvprim.h, with the same results
   byte for byte. Its callers need neither CUDA's headers nor nvcc: a cudaStream_t is a struct CUstream_st *.

   What it does NOT do: allocate, synchronise, create streams or events, or print.

   Contents (search for the tag):
       >>config      macros that you may define
       >>launch      stream, overlap with the kernel before, share of the GPU
       >>gpu_move    gather, store, transfer, unpack, and checked moves
       >>device      device functions for your own kernels, with the funnel shift
       >>impl        the implementation:
           >>impl_device          loads, stores and dependent launch in PTX; divisors
           >>impl_row_kernels     gather and store of plain rows: index rule, `rejected`, zero fill, tails
           >>impl_move_kernels    pages, heads, layers, several moves: index rule, page arithmetic, zero fill
           >>impl_unpack_kernels  what a launch holds of the fragments, and the kernel that copies them
           >>impl_launch          starting a kernel, its errors, dependent launch
           >>impl_debug           KVPRIM_DEBUG: can the GPU reach the memory?
           >>impl_row_plan        which kernel of plain rows, and its parameters
           >>impl_move_plan       the same for all other moves, and which of the two plans a call takes
           >>impl_unpack_host     planning and encoding the fragments
           >>impl_calls           the public functions

   Rules that hold for every function here
       Errors     A function checks its descriptor as kvprim.h does before it enqueues anything, with the same status.
                  KVPRIM_ERROR_CUDA: CUDA refused the launch; kvprim_last_error() says why, and whether earlier work has
                  failed, and CUDA's own last error is cleared. CUDA reports an error that happens on the GPU later (a
                  host pointer in a table, for instance); KVPRIM_DEBUG finds wrong pointers at the call. If a call takes
                  several launches, those before a refused one are enqueued. Each text begins with the function's name.
       Stream     Calls only enqueue, on the given stream of the current device. A graph may capture them. CUDA may load
                  a kernel's code at its first launch (CUDA_MODULE_LOADING=EAGER: before).
       Threads    Any number of threads may call every function at once.
       Memory     The GPU reads and writes tables, indices and `rejected`: device memory, managed memory, pinned host
                  memory that the device can address, or another GPU's memory to which it has peer access or a mapped
                  window, valid until the work is done. Descriptors are host memory, free to reuse on return.
       Alignment  Any. Multiples of 16 bytes (bases, strides, row sizes) are the fastest. Of the bytes around a row, the
                  GPU only reads those in the same aligned 16 bytes, and writes none.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_CUDA_IMPLEMENTATION  one translation unit: implements this header only; another unit must implement kvprim.h.
                               Like KVPRIM_IMPLEMENTATION it needs nvcc, or clang for CUDA.
   KVPRIM_STATIC, KVPRIM_API   every translation unit, as in kvprim.h
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
                                   and the driver supports CUDA 12.3 (no effect elsewhere). The kernel may start before
                                   its predecessor in the stream ends; it waits for it before its first access. Do not
                                   put it right before a kernel that is launched that way and does not wait, as some of
                                   NCCL's are */
    int32_t max_sms;            /* leave the GPU's other multiprocessors alone; 0: no limit, except where a transfer
                                   needs few: see there */
    int64_t reserved;           /* 0 */
} kvprim_cuda_launch;

/* >>gpu_move -------------------------------------------------------------------------------------------------------

   Gather, store, transfer and unpack do what the functions of kvprim.h without _cuda in their names do: same
   descriptor, rules, aliasing and errors. launch may be NULL. A negative max_sms, a pdl other than 0 and 1, or a
   reserved field that is not 0 is KVPRIM_ERROR_ARGUMENT. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc,
                                                           const kvprim_cuda_launch *launch);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc,
                                                          const kvprim_cuda_launch *launch);

/* Moves up to 231 layers in one launch, more in several. Each side lies in any of the memories above, and so do the
   indices. The arrays of layers are host memory, free to reuse on return. The host may touch pinned rows and indices
   again when the work is done. Between GPUs either one may run it, writing to the other's memory or reading it; 16 to 32
   multiprocessors (max_sms) reach 0.88 to 0.94 of the copy engine with rows of 4 KB (H200).
   Between pinned host memory and a GPU, PCIe is the limit. Of 64 KB and more, the copy engine moves what has no index on
   either side, nor gaps between pages or heads, in one layer or in 2 MB and more of each (in a graph: 2 MB and more).
   The rest takes 2 multiprocessors if max_sms is 0: they reach 0.92 to 0.95 of the copy engine with rows of 4 KB, and a
   kernel limited by memory takes 1.01 to 1.07 times as long beside them, on 8 up to 1.9. Where other kernels leave a
   transfer too little, say more: max_sms = 4 to 8 keeps the link filled. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc,
                                                             const kvprim_cuda_launch *launch);

/* Runs n moves that kvprim_gather_moves(), kvprim_store_moves() or kvprim_transfer_moves() made, and checks none of
   them again. Up to 4 moves with up to 180 layers in sum take one launch, whatever their row sizes, counts, indices and
   layers: K and V of different width, values and their scales. More take several. The moves of a call run in no
   particular order, so none may touch what another writes; they may share one `rejected`. `moves` and layer arrays are
   host memory, read before the call returns. Errors: NULL (moves, with n > 0), ARGUMENT (launch), CUDA. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n,
                                                         const kvprim_cuda_launch *launch);

/* The launch's parameters hold what the GPU needs of the fragments, copied before the call returns. For fragments of
   one size (the last may be shorter) that is 2, 4 or 8 bytes each for each side, and nothing for a side on which all
   lie equally far apart; for several sizes it is up to 24 bytes each, and 4 for every 16. If many are adjacent,
   adjacent ones move as one. A launch takes 32,760 bytes of parameters (4,000 where this file is compiled by CUDA
   before 12.1; a newer one needs a driver of at least 12.1). Larger batches go out in several launches, which overlap
   where pdl works and max_sms is 0; what follows in the stream follows them all. The call takes 36 KB of stack. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc,
                                                           const kvprim_cuda_launch *launch);

#ifdef __cplusplus
}
#endif

/* >>device ---------------------------------------------------------------------------------------------------------

   For one's own kernels, destination first: kvprim_warp_copy and kvprim_warp_zero. All 32 threads of a warp call them
   with the same arguments. Any size and any alignment of either side, which must not overlap. Of src they
   also read, but never write, the other bytes of the first and last aligned 16 bytes. No barrier inside: what
   was written is visible to the calling thread only, until the kernel synchronises as it needs. Thread t of the warp
   has lane threadIdx.x % 32: a block's first dimension must be a multiple of 32. */
#if defined(__CUDACC__) || defined(KVPRIM_CUDA_EMULATE)
#define KVPRIM_DEVICE static __device__ __forceinline__
/* Returns bytes [shift, shift + 16) of the 32 bytes low, high; shift < 16. This is the funnel shift. */
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

/* `lanes` threads copy together. Thread t writes: byte t before the first 16-byte boundary of dst; then every
   `lanes`-th 16-byte word, starting with word t; then byte t after the last word. An unaligned source word is read as
   the two aligned words that it lies in. */
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
#error "kvprim_cuda.cuh is implemented by nvcc: ask for it in a .cu file. Without a GPU, include kvprim.h instead"
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
    kvpc_link_sms = 2,                  /* see kvpc_crosses_link */
    kvpc_unaligned_threads = 512,       /* at most, of moves of any alignment */
    kvpc_unpack_threads = 256,          /* of unpack */
    kvpc_unpack_most_threads = 512,     /* ... with max_sms */
    kvpc_bytes_lanes = 8,               /* of kvpc_bytes_kernel */
    kvpc_bytes_loads = 3,               /* one more than aligned rows take: they start and end inside a word */
    kvpc_granule_bytes = 64,            /* that memory is written in: see kvpc_fetch_edges */
    kvpc_small_store_bytes = 128 << 10, /* see kvpc_store_by_size */
    kvpc_small_gather_bytes = 1 << 20,  /* see kvpc_gather_by_size */
    kvpc_many_rows = 16384              /* see kvpc_gather_by_size */
};

#ifndef KVPRIM_CUDA_EMULATE             /* see tests/gpu/cuda_shim.h */
#define KVPRIM_UNROLL _Pragma("unroll") /* in kvpc_copy_words, which spills otherwise; other loops unroll unasked */
#define KVPRIM_IN_PLACE                 /* a kernel's parameters; the emulation passes a reference */

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

/* Global memory by address: an asm volatile keeps its place among the others (loads have no clobber, as no row that is
   read is written). Left to itself the compiler puts the loads of a store after the test of its slot, and waits twice
   where it could wait once. */
KVPRIM_DEVICE uint4 kvpc_load16(uint64_t address)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

KVPRIM_DEVICE void kvpc_store16(uint64_t address, uint4 v)
{
    asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(address)
                 : "memory");
}

/* The same, past the first cache: to and from the host one multiprocessor then moves 26 to 29 GB/s, not 21 to 23. */
KVPRIM_DEVICE uint4 kvpc_load16_once(uint64_t address)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

KVPRIM_DEVICE void kvpc_store16_once(uint64_t address, uint4 v)
{
    asm volatile("st.global.L1::no_allocate.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                 "l"(address)
                 : "memory");
}

KVPRIM_DEVICE int32_t kvpc_load_i32(uint64_t address)
{
    int32_t v;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

/* Tells the compiler that a pointer is to global memory, which gives faster instructions. */
KVPRIM_DEVICE char *kvpc_global(uint64_t address)
{
    return (char *)__cvta_global_to_generic((size_t)address);
}

/* base + row * stride. In PTX, because the compiler would load base from constant memory after the row's test. */
KVPRIM_DEVICE uint64_t kvpc_row_at(uint64_t base, uint32_t row, uint32_t stride)
{
    uint64_t address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(base));
    return address;
}

/* Reads the first and the last granule of a row if the row fills only part of them. Memory writes whole granules:
   of one that a row covers in part the rest is read first. Starting that read now, not when the cache evicts the line,
   saves the time of some hundred bytes. */
KVPRIM_DEVICE void kvpc_fetch_edges(uint64_t row, uint32_t bytes)
{
    if (row % kvpc_granule_bytes)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
    if ((row + bytes) % kvpc_granule_bytes)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + bytes - 1));
}
#endif

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
   that begin before byte `end`, if `at` is the first one's place in the row. The others become zeros, and all of them
   do if !reads. */
template <uint32_t loads, bool exact>
KVPRIM_DEVICE void kvpc_load_words(uint4 *v, bool reads, uint64_t from, uint32_t step, uint32_t at, uint32_t end)
{
    for (uint32_t k = 0; k < loads; k++)
        v[k] = uint4{0, 0, 0, 0};
    for (uint32_t k = 0; k < loads; k++)
        if (reads && (exact || at + k * step < end))
            v[k] = kvpc_load16(from + k * step);
}

/* Stores the first `bytes` (1 to 15) bytes of v. */
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

/* Stores what kvpc_load_words loads. `tails`: of a word that `end` lies in, the bytes before it; else all of it. */
template <uint32_t loads, bool exact, bool tails>
KVPRIM_DEVICE void kvpc_store_words(uint64_t to, const uint4 *v, uint32_t step, uint32_t at, uint32_t end)
{
    for (uint32_t k = 0; k < loads; k++)
        if (exact || (tails ? at + k * step + 16 <= end : at + k * step < end))
            kvpc_store16(to + k * step, v[k]);
        else if (tails && at + k * step < end)
            kvpc_store_tail(to + k * step, v[k], end - (at + k * step));
}

/* >>impl_row_kernels ------------------------------------------------------------------------------------------------

   Plain rows lie without pages or heads and are small enough for 32-bit arithmetic: see kvpc_is_plain. */

/* One table and the rows beside it: K, or V. */
typedef struct kvpc_ends {
    uint64_t src;
    uint32_t src_stride, dst_stride;
    uint64_t dst;
} kvpc_ends;

/* What is needed up to the second load of a gather comes first, in one line of the constant cache: with few rows, the
   time is that of these instructions. On sm_90 parameters begin
   48 bytes before the end of a line. */
typedef struct kvpc_plain {
    uint64_t index;
    uint32_t count, parts_shift; /* see kvpc_begin_row */
    uint32_t rows, base;
    uint32_t index_step, index_is_i64; /* index_step: bytes from one index to the next */
    kvpc_ends pair[2];
    uint32_t *rejected;
    uint32_t row_bytes[2];
    uint32_t parts, parts_magic; /* groups of threads that share a row */
    uint32_t fetch;              /* 1: rows end inside a granule: see kvpc_fetch_edges */
    uint32_t k_parts;            /* for kvpc_bytes_kernel: parts of K */
    uint32_t gather, pdl;        /* for kvpc_bytes_kernel, which has no template for them */
} kvpc_plain;

/* The row that a group of threads works on, and which part of it. Returns false if there is none; waits before it
   returns true. `exact`: `parts` is a power of two. */
template <bool exact>
KVPRIM_DEVICE bool kvpc_begin_row(const kvpc_plain &p, bool pdl, uint32_t group, uint32_t *row, uint32_t *part)
{
    const uint32_t i = exact ? group >> p.parts_shift : __umulhi(2 * group, p.parts_magic) >> p.parts_shift;
    *part = exact ? group & ((1u << p.parts_shift) - 1) : group - i * p.parts;
    if (pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return false;
    if (pdl)
        kvpc_pdl_wait();
    *row = i;
    return true;
}

/* An index, and what the index rule makes of it. */
typedef struct kvpc_index {
    int32_t low, high; /* words of an int64; high is 0 for an int32 */
    uint32_t row;      /* right if `inside` */
    bool inside;
} kvpc_index;

/* The two words of an int64 are two loads that do not wait for each other, so one kernel serves both types. Rows end
   at 2^31 or below: see kvpc_is_plain. */
KVPRIM_DEVICE kvpc_index kvpc_find_row(const kvpc_plain &p, uint32_t i, bool is_i64)
{
    const uint64_t at = kvpc_row_at(p.index, i, p.index_step);
    kvpc_index x = {kvpc_load_i32(at), 0, 0, false};
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

/* Stores bytes [from, end) of v to the aligned 16 bytes at `address`. */
KVPRIM_DEVICE void kvpc_store_some(uint64_t address, uint4 v, int32_t from, int32_t end)
{
    char *const dst = kvpc_global(address);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    for (int32_t w = 0; w < 4; w++)
        if (from <= 4 * w && 4 * w + 4 <= end)
            *(uint32_t *)(dst + 4 * w) = words[w];
        else
            for (int32_t b = 0; b < 4; b++)
                if (from <= 4 * w + b && 4 * w + b < end)
                    dst[4 * w + b] = (char)(words[w] >> 8 * b);
}

/* The two kernels below, for rows that begin at multiples of 16 bytes:
   - Each group of `lanes` threads moves one part of a row, lanes * loads words of 16 bytes.
   - Each thread moves the word that its lane names, and for each further load the word `lanes` after it.
   - `exact`: the parts are a power of two and fill the row. Otherwise the last part ends with the row; if that is
     inside a word, its thread reads the whole word and writes only the row's bytes.
   - All addresses come before the loads, and all loads before the stores. */

template <uint32_t lanes, uint32_t loads, bool exact, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_gather_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x, step = 16 * lanes;
    uint32_t i, part;
    if (!kvpc_begin_row<exact>(p, pdl, t / lanes, &i, &part))
        return;
    const kvpc_index x = kvpc_find_row(p, i, p.index_is_i64);
    const uint32_t at = 16 * (t % lanes + lanes * loads * part);
    const uint64_t src = kvpc_row_at(p.pair[0].src + at, x.row, p.pair[0].src_stride);
    const uint64_t dst = kvpc_row_at(p.pair[0].dst + at, i, p.pair[0].dst_stride);
    uint4 v[loads];
    if (!exact && p.fetch && at == 0)
        kvpc_fetch_edges(dst, p.row_bytes[0]);
    kvpc_load_words<loads, exact>(v, x.inside, src, step, at, p.row_bytes[0]); /* with the zero fill */
    kvpc_store_words<loads, exact, true>(dst, v, step, at, p.row_bytes[0]);
    if (!x.inside && at == 0)
        kvpc_count_rejected(p, x);
}

/* tables: 1, or 2 for K and V. */
template <uint32_t lanes, uint32_t loads, uint32_t tables, bool exact, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_store_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x, step = 16 * lanes;
    uint32_t i, part;
    if (!kvpc_begin_row<exact>(p, pdl, t / lanes, &i, &part))
        return;
    const uint32_t at = 16 * (t % lanes + lanes * loads * part);
    uint4 v[tables][loads];
    uint64_t dst[tables];
    for (uint32_t m = 0; m < tables; m++) {
        const uint64_t src = kvpc_row_at(p.pair[m].src + at, i, p.pair[m].src_stride);
        kvpc_load_words<loads, exact>(v[m], true, src, step, at, p.row_bytes[m]);
    }
    const kvpc_index x = kvpc_find_row(p, i, p.index_is_i64);
    for (uint32_t m = 0; m < tables; m++) {
        dst[m] = kvpc_row_at(p.pair[m].dst + at, x.row, p.pair[m].dst_stride);
        if (!exact && p.fetch && x.inside && at == 0)
            kvpc_fetch_edges(dst[m], p.row_bytes[m]);
    }
    if (x.inside) {
        for (uint32_t m = 0; m < tables; m++)
            kvpc_store_words<loads, exact, true>(dst[m], v[m], step, at, p.row_bytes[m]);
    } else if (at == 0)
        kvpc_count_rejected(p, x);
}

/* Copies `bytes` bytes from any alignment to any. A destination that begins `lead` bytes after a 16-byte boundary has
   in its word w the bytes 16 w - lead to 16 w - lead + 15.
   - Each thread writes kvpc_bytes_loads words, `step` apart, from word `first` on.
   - It makes each from the two aligned words of the source in which it lies, by a funnel shift, and reads neither of
     them if it has no byte to copy.
   - Where the source may not be read (!reads), it writes zeros.
   - `fetch`: see kvpc_fetch_edges. It comes once the loads are on their way, as it may wait for its place. */
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
   row, of K or of V. An index is counted before the copy, so that it takes no registers there: with 44 instead of 40,
   dependent launches are 10 % slower. */
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_bytes_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = kvpc_bytes_lanes, t = blockIdx.x * kvpc_threads + threadIdx.x;
    uint32_t i, part;
    if (!kvpc_begin_row<false>(p, p.pdl, t / lanes, &i, &part))
        return;
    const uint32_t v_side = part >= p.k_parts;
    const kvpc_ends &pair = p.pair[v_side];
    const uint32_t first = t % lanes + lanes * kvpc_bytes_loads * (part - (v_side ? p.k_parts : 0));
    const kvpc_index x = p.index_is_i64 ? kvpc_find_row(p, i, true) : kvpc_find_row(p, i, false);
    if (!x.inside && part == 0 && t % lanes == 0)
        kvpc_count_rejected(p, x);
    const uint64_t src = kvpc_row_at(pair.src, p.gather ? x.row : i, pair.src_stride);
    const uint64_t dst = kvpc_row_at(pair.dst, p.gather ? i : x.row, pair.dst_stride);
    int32_t lead = (int32_t)(pair.dst % 16);
    if (pair.dst_stride % 16) /* only then must a store know its slot before it can load */
        lead = (int32_t)(dst % 16);
    kvpc_copy_words(dst, src, lead, (int32_t)p.row_bytes[v_side], first, lanes, !p.gather || x.inside,
                    p.gather || x.inside, p.fetch);
}

/* >>impl_move_kernels -----------------------------------------------------------------------------------------------

   Moves with pages, heads, layers or 64-bit sizes, several moves in a launch, and moves on few multiprocessors. A unit
   is what is contiguous on both sides: a row, or as much of it as lies in one head of either. A chunk is what a group
   of threads moves at once: a unit, or a part of a long one. */

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
    uint32_t pdl, layers;
    kvpc_task task[most_tasks];
    kvpc_layer layer[most_layers];
};

static_assert(kvpc_batch<1>::most_layers == 231 && kvpc_batch<4>::most_layers == 180, "said in >>gpu_move");
static_assert(sizeof(kvpc_batch<1>) <= kvpc_params_bytes && sizeof(kvpc_batch<4>) <= kvpc_params_bytes, "no room");

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

/* On the whole GPU: each group of threads moves one chunk. */
template <uint32_t lanes, uint32_t loads, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_move_kernel(const KVPRIM_GRID_CONSTANT kvpc_batch<most_tasks> KVPRIM_IN_PLACE p)
{
    const uint32_t work = blockIdx.x * (kvpc_threads / lanes) + threadIdx.x / lanes, at = 16 * (threadIdx.x % lanes);
    if (work >= (uint32_t)p.total)
        return;
    if (p.pdl)
        kvpc_pdl_wait();
    const kvpc_chunk c = kvpc_find_chunk<true>(p, work, at == 0);
    uint4 v[loads];
    kvpc_load_words<loads, false>(v, !c.zero, c.src + at, 16 * lanes, at, c.bytes);
    kvpc_store_words<loads, false, false>(c.dst + at, v, 16 * lanes, at, c.bytes);
}

/* The words of a chunk from byte `at` on, 16 * lanes bytes apart. */
template <uint32_t lanes, uint32_t loads> KVPRIM_DEVICE void kvpc_load_once(const kvpc_chunk &c, uint32_t at, uint4 *v)
{
    for (uint32_t k = 0; k < loads; k++) {
        v[k] = uint4{0, 0, 0, 0};
        if (!c.zero && at + 16 * lanes * k < c.bytes)
            v[k] = kvpc_load16_once(c.src + at + 16 * lanes * k);
    }
}

template <uint32_t lanes, uint32_t loads>
KVPRIM_DEVICE void kvpc_store_once(const kvpc_chunk &c, uint32_t at, const uint4 *v)
{
    for (uint32_t k = 0; k < loads; k++)
        if (at + 16 * lanes * k < c.bytes)
            kvpc_store16_once(c.dst + at + 16 * lanes * k, v[k]);
}

/* On few multiprocessors: each group moves one chunk after the other. While one is on its way it finds the next. */
template <uint32_t lanes, uint32_t loads, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_few_sms_threads)
    kvpc_move_few_kernel(const KVPRIM_GRID_CONSTANT kvpc_batch<most_tasks> KVPRIM_IN_PLACE p)
{
    const uint32_t at = 16 * (threadIdx.x % lanes), in_block = blockDim.x / lanes, groups = gridDim.x * in_block;
    uint4 v[loads];
    kvpc_chunk c = {0, 0, 0, false};
    if (p.pdl)
        kvpc_pdl_wait();
    for (uint32_t work = blockIdx.x * in_block + threadIdx.x / lanes; work < (uint32_t)p.total; work += groups) {
        const kvpc_chunk next = kvpc_find_chunk<true>(p, work, at == 0);
        kvpc_store_once<lanes, loads>(c, at, v);
        c = next;
        kvpc_load_once<lanes, loads>(c, at, v);
    }
    kvpc_store_once<lanes, loads>(c, at, v);
}

/* The same for chunks of any alignment and, with 64-bit numbers, for any number of them. */
template <uint32_t lanes, class number, uint32_t most_tasks>
static __global__ void __launch_bounds__(kvpc_unaligned_threads)
    kvpc_move_bytes_kernel(const KVPRIM_GRID_CONSTANT kvpc_batch<most_tasks> KVPRIM_IN_PLACE p)
{
    const uint32_t lane = threadIdx.x % lanes;
    const number in_block = blockDim.x / lanes, groups = gridDim.x * in_block;
    if (p.pdl)
        kvpc_pdl_wait();
    for (number work = blockIdx.x * in_block + threadIdx.x / lanes; work < (number)p.total; work += groups) {
        const kvpc_chunk c = kvpc_find_chunk<false>(p, work, lane == 0);
        if (c.bytes > 0 && c.zero)
            kvpc_zero<lanes>(kvpc_global(c.dst), c.bytes, lane);
        else if (c.bytes > 0)
            kvpc_copy<lanes>(kvpc_global(c.dst), kvpc_global(c.src), c.bytes, lane);
    }
}

/* >>impl_unpack_kernels -------------------------------------------------------------------------------------------- */

enum {
    kvpc_aligned_loads = 4,   /* 16-byte words of an aligned tile that a thread copies; otherwise kvpc_bytes_loads */
    kvpc_small_fragments = 2, /* that a thread copies at once; with more, fewer threads fit a multiprocessor: slower */
    kvpc_small_bytes = 512    /* of a small fragment, at most: a word for each thread of a warp */
};

/* Blocks of kvpc_unpack_most_threads that must fit a multiprocessor, where it holds 2,048 threads (0: no demand). This
   keeps aligned kernels to 32 registers, others to 40; with 40 and 48, as on sm_90 otherwise, fewer threads fit. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
enum { kvpc_aligned_blocks = 4, kvpc_unaligned_blocks = __CUDA_ARCH__ == 1000 ? 0 : 3 }; /* sm_100 would spill */
#else
enum { kvpc_aligned_blocks = 0, kvpc_unaligned_blocks = 0 };
#endif

/* Bytes of parameters. Measured on an H200: up to 4,000 cost nothing, 8 KB 0.3 us a launch, 16 KB 0.7, 32 KB 1.8. */
enum {
    kvpc_few_params = kvpc_params_bytes,
#if defined(KVPRIM_CUDA_EMULATE) || CUDART_VERSION >= 12010
    kvpc_more_params = 16800, /* 1,024 fragments of 16 bytes, and the rest */
    kvpc_most_params = 32760  /* CUDA takes 32,764 */
#else
    kvpc_more_params = kvpc_few_params, /* CUDA takes 4,096 */
    kvpc_most_params = kvpc_few_params
#endif
};

/* A column: the addresses of all fragments in dst or in src, their sizes, or the first tile of each. Number i is
   base + step * (stored number i), or base + step * i where none are stored. */
typedef struct kvpc_numbers {
    uint64_t base, step;
    uint32_t width, at; /* bytes of a stored number: 2, 4, 8, or 0 if none are stored. Index of the first */
} kvpc_numbers;

/* What a launch copies. Fragments are cut into tiles, which are numbered from the first fragment to the last. */
typedef struct kvpc_unpack {
    kvpc_numbers dst, src, bytes, first_tile;
    uint32_t count, tiles, last_bytes; /* last_bytes: of the last fragment */
    uint32_t lanes_shift;              /* 1 << lanes_shift threads copy a tile, or a small fragment */
    uint32_t table, table_shift;       /* entry table + k of n32 is the fragment of tile k << table_shift */
    int32_t wait, trigger, wait_last;  /* programmatic dependent launch: wait first, let the next start, wait last */
} kvpc_unpack;

/* Numbers of 2 bytes: without them 65,536 even fragments take 9 launches instead of 5, and 1,024 take more than
   kvpc_few_params. */
template <uint32_t bytes> struct kvpc_unpack_params {
    kvpc_unpack head;
    union {
        uint16_t n16[(bytes - sizeof(kvpc_unpack)) / 2];
        uint32_t n32[(bytes - sizeof(kvpc_unpack)) / 4];
        uint64_t n64[(bytes - sizeof(kvpc_unpack)) / 8]; /* 8 bytes are aligned */
    };
};

/* number: uint32_t for sizes, which 64-bit arithmetic would cost registers for. */
template <class number, class params>
KVPRIM_DEVICE number kvpc_number(const params &p, const kvpc_numbers &numbers, uint32_t i)
{
    if (sizeof(number) == 8 && numbers.width == 8)
        return (number)(numbers.base + numbers.step * p.n64[numbers.at + i]);
    const uint32_t n = numbers.width == 0   ? i
                       : numbers.width == 2 ? (uint32_t)p.n16[numbers.at + i]
                                            : p.n32[numbers.at + i];
    return (number)numbers.base + (number)numbers.step * n;
}

/* Returns the fragment of a tile: the last one whose first tile is not past it. *part: which of its tiles that is. */
template <class params> KVPRIM_DEVICE uint32_t kvpc_fragment_of(const params &p, uint32_t tile, uint32_t *part)
{
    const kvpc_numbers &first = p.head.first_tile;
    if (first.width == 0) {
        const uint32_t each = (uint32_t)first.step, i = each == 1 ? tile : tile / each;
        *part = tile - i * each;
        return i;
    }
    const uint32_t near = p.head.table + (tile >> p.head.table_shift);
    uint32_t i = p.n32[near], last = p.n32[near + 1];
    while (i < last) {
        const uint32_t middle = (i + last + 1) / 2;
        if (p.n32[first.at + middle] <= tile)
            i = middle;
        else
            last = middle - 1;
    }
    *part = tile - p.n32[first.at + i];
    return i;
}

/* A group of `step` threads copies a tile. Each thread copies 16-byte word `first` of the fragment in dst and those a
   multiple of `step` further: all loads, then all stores. Past the fragment's end it copies nothing. */
template <bool aligned>
KVPRIM_DEVICE void kvpc_copy_tile(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t first, uint32_t step)
{
    if (!aligned) {
        kvpc_copy_words(dst, src, (int32_t)(dst % 16), (int32_t)bytes, first, step, bytes > 0, bytes > 0, false);
        return;
    }
    const int32_t left = (int32_t)(bytes - 16 * first);
    uint4 v[kvpc_aligned_loads];
    dst += 16 * first, src += 16 * first;
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        if ((int32_t)(16 * step * k) < left)
            v[k] = kvpc_load16(src + 16 * step * k);
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        if ((int32_t)(16 * step * k) < left)
            kvpc_store16(dst + 16 * step * k, v[k]);
}

/* A group of threads copies small fragments i, i + apart ... at once. Each thread copies one 16-byte word of each. Past
   a fragment's end it copies nothing. */
template <class params> KVPRIM_DEVICE void kvpc_copy_small(const params &p, uint32_t i, uint32_t apart)
{
    const kvpc_unpack &h = p.head;
    const uint32_t at = 16 * (threadIdx.x % (1u << h.lanes_shift));
    uint64_t src[kvpc_small_fragments], dst[kvpc_small_fragments];
    uint4 v[kvpc_small_fragments];
    bool mine[kvpc_small_fragments];
    for (uint32_t k = 0; k < kvpc_small_fragments; k++) {
        const uint32_t one = i + k * apart;
        mine[k] = one < h.count && at < (one == h.count - 1 ? h.last_bytes : (uint32_t)h.bytes.base);
        if (one < h.count) {
            src[k] = kvpc_number<uint64_t>(p, h.src, one);
            dst[k] = kvpc_number<uint64_t>(p, h.dst, one);
        }
    }
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            v[k] = kvpc_load16(src[k] + at);
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            kvpc_store16(dst[k] + at, v[k]);
}

/* Each group of 1 << lanes_shift threads copies a tile, or kvpc_small_fragments small fragments.
   Each thread copies kvpc_aligned_loads or kvpc_bytes_loads words of a tile, one of a small fragment.
   If there are fewer groups than tiles, group g copies tiles g, g + groups, g + 2 * groups and so on.
   If the launch overlaps the one before, it ends after that one: wait_last. */
template <bool small, bool aligned, uint32_t bytes>
static __global__ void __launch_bounds__(kvpc_unpack_most_threads,
                                         aligned ? kvpc_aligned_blocks : kvpc_unaligned_blocks)
    kvpc_unpack_kernel(const KVPRIM_GRID_CONSTANT kvpc_unpack_params<bytes> KVPRIM_IN_PLACE p)
{
    const kvpc_unpack &h = p.head;
    const uint32_t lanes = 1u << h.lanes_shift;
    const uint32_t groups = blockDim.x >> h.lanes_shift, group = threadIdx.x >> h.lanes_shift;
    if (h.wait)
        kvpc_pdl_wait();
    if (h.trigger)
        kvpc_pdl_trigger();
    if (small) {
        const uint32_t each = kvpc_small_fragments * groups;
        for (uint32_t i = blockIdx.x * each + group; i < h.count; i += gridDim.x * each)
            kvpc_copy_small(p, i, groups);
    } else {
        const uint32_t loads = aligned ? (uint32_t)kvpc_aligned_loads : (uint32_t)kvpc_bytes_loads;
        for (uint32_t tile = blockIdx.x * groups + group; tile < h.tiles; tile += gridDim.x * groups) {
            uint32_t part;
            const uint32_t i = kvpc_fragment_of(p, tile, &part);
            const uint64_t src = kvpc_number<uint64_t>(p, h.src, i), dst = kvpc_number<uint64_t>(p, h.dst, i);
            const uint32_t length = i == h.count - 1 ? h.last_bytes : kvpc_number<uint32_t>(p, h.bytes, i);
            kvpc_copy_tile<aligned>(dst, src, length, (part * loads << h.lanes_shift) + threadIdx.x % lanes, lanes);
        }
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

/* Every error of kvprim.h begins with "kvprim_": "kvprim_gather: ..." becomes "kvprim_cuda_gather: ...". */
static kvprim_status kvpc_fail_check(kvprim_status status)
{
    return kvprim_fail(status, "kvprim_cuda_%s", kvprim_last_error() + sizeof "kvprim_" - 1);
}

/* A call on its way to the GPU. */
typedef struct kvpc_call {
    const char *function;
    kvprim_cuda_launch launch; /* pdl only where it has an effect */
    bool link;                 /* a transfer between pinned host memory and a GPU: see kvpc_crosses_link */
} kvpc_call;

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
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error == cudaSuccess)
        error = cudaGetDeviceCount(&count);
    for (int device = 0; device < count && error == cudaSuccess; device++) {
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        first = device == 0 ? major : first;
        if (major != first)
            return driver >= 12030 ? kvpc_depends : kvpc_no;
    }
    if (error == cudaSuccess)
        return driver >= 12030 ? kvpc_ask_device() : kvpc_no;
    (void)cudaGetLastError(); /* the launch meets it again */
    return kvpc_unknown;
}

/* Whether kernels of this file wait when they are asked to. The answer is kept: cudaGetDevice alone takes 0.1 us. */
static bool kvpc_has_pdl(void)
{
    static std::atomic<kvpc_answer> known;
    kvpc_answer answer = known.load(std::memory_order_relaxed);
    if (answer == kvpc_unknown) {
        answer = kvpc_ask_devices();
        known.store(answer, std::memory_order_relaxed);
    }
    return (answer == kvpc_depends ? kvpc_ask_device() : answer) == kvpc_yes;
}

/* Whether the error comes from earlier work. A launch only enqueues, so it cannot cause one of these. */
static bool kvpc_is_earlier(cudaError_t error)
{
    const cudaError_t earlier[] = {
        cudaErrorIllegalAddress, cudaErrorMisalignedAddress,  cudaErrorInvalidAddressSpace, cudaErrorIllegalInstruction,
        cudaErrorInvalidPc,      cudaErrorHardwareStackError, cudaErrorLaunchFailure,       cudaErrorLaunchTimeout,
        cudaErrorAssert,         cudaErrorECCUncorrectable,   cudaErrorNvlinkUncorrectable};
    for (const cudaError_t one : earlier)
        if (one == error)
            return true;
    return false;
}

static cudaStream_t kvpc_stream(const kvpc_call *call)
{
    return call->launch.stream ? call->launch.stream : cudaStreamLegacy; /* whatever nvcc makes of NULL */
}

template <class Params>
static kvprim_status kvpc_start(const kvpc_call *call, void (*kernel)(Params), uint32_t blocks, uint32_t threads,
                                const Params &params)
{
    cudaLaunchAttribute pdl;
    cudaLaunchConfig_t config = {};
    void *args[] = {(void *)&params};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = kvpc_stream(call);
    config.attrs = &pdl;
    config.numAttrs = call->launch.pdl != 0;
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    const cudaError_t error = cudaLaunchKernelExC(&config, (const void *)kernel, args);
    if (error == cudaSuccess)
        return KVPRIM_OK;
    (void)cudaGetLastError(); /* it is reported here */
    return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s%s: %s", call->function,
                       kvpc_is_earlier(error) ? "not enqueued, as work before it failed: " : "",
                       cudaGetErrorName(error), cudaGetErrorString(error));
}

/* Whether one side is pinned host memory, the other memory of a GPU, and the link between them PCIe: few
   multiprocessors do not fill NVLink to the host, where atomics reach the host's memory. Of other kinds of memory, and
   of what CUDA does not know, nothing is said. */
static bool kvpc_is_link(const void *dst, const void *src)
{
    const cudaMemoryType host = cudaMemoryTypeHost, gpu = cudaMemoryTypeDevice;
    cudaPointerAttributes a = {}, b = {};
    int nvlink = 0;
    cudaError_t error = cudaPointerGetAttributes(&a, dst);
    if (error == cudaSuccess)
        error = cudaPointerGetAttributes(&b, src);
    if (error == cudaSuccess && !(a.type == host && b.type == gpu) && !(a.type == gpu && b.type == host))
        return false;
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&nvlink, cudaDevAttrHostNativeAtomicSupported, a.device);
    if (error == cudaSuccess)
        return !nvlink;
    (void)cudaGetLastError(); /* the launch meets it again */
    return false;
}

static bool kvpc_is_captured(const kvpc_call *call)
{
    cudaStreamCaptureStatus status;
    if (cudaStreamIsCapturing(kvpc_stream(call), &status) == cudaSuccess)
        return status != cudaStreamCaptureStatusNone;
    (void)cudaGetLastError(); /* the launch meets it again */
    return true;
}

/* Lets the copy engine copy rows, and returns whether it will. It refuses ranges of several allocations, which kernels
   take. */
static bool kvpc_copy_rows(const kvpc_call *call, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                           int64_t row_bytes, int64_t rows)
{
    const cudaError_t error =
        rows == 1 ? cudaMemcpyAsync(dst, src, (size_t)row_bytes, cudaMemcpyDefault, kvpc_stream(call))
                  : cudaMemcpy2DAsync(dst, (size_t)dst_stride, src, (size_t)src_stride, (size_t)row_bytes, (size_t)rows,
                                      cudaMemcpyDefault, kvpc_stream(call));
    if (error != cudaSuccess)
        (void)cudaGetLastError(); /* the launch meets it again, if it is of earlier work */
    return error == cudaSuccess;
}
#endif

/* Checks the options of a launch, too. */
static kvprim_status kvpc_begin_call(kvpc_call *call, const char *function, const kvprim_cuda_launch *launch)
{
    const kvprim_cuda_launch none = {}, l = launch ? *launch : none;
    if (l.pdl != 0 && l.pdl != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: pdl is %d, neither 0 nor 1", function, (int)l.pdl);
    if (l.max_sms < 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: max_sms is %d, less than 0", function, (int)l.max_sms);
    if (l.reserved)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: launch.reserved is not 0: zero-initialise the structure",
                           function);
    *call = kvpc_call{function, l, false};
    call->launch.pdl = l.pdl && kvpc_has_pdl();
    return KVPRIM_OK;
}

/* >>impl_debug -----------------------------------------------------------------------------------------------------

   KVPRIM_DEBUG: the device can reach the first and the last byte of what a call may touch. */
#if defined(KVPRIM_DEBUG) && !defined(KVPRIM_CUDA_EMULATE)
static kvprim_status kvpc_check_bytes(const char *function, const char *name, const void *data, uint64_t bytes)
{
    for (int last = 0; data && bytes > 0 && last < 2; last++) {
        const void *const p = (const char *)data + (last ? bytes - 1 : 0);
        int device = 0, pageable = 0;
        cudaPointerAttributes a;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device);
        if (error == cudaSuccess)
            error = cudaPointerGetAttributes(&a, p);
        if (error != cudaSuccess) {
            (void)cudaGetLastError();
            return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s (%p): %s: %s", function, name, p, cudaGetErrorName(error),
                               cudaGetErrorString(error));
        }
        if (a.type == cudaMemoryTypeUnregistered && !pageable)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                               "%s: %s reaches %p, which the GPU cannot: ordinary host memory, or past an allocation",
                               function, name, p);
        if (a.type == cudaMemoryTypeDevice && a.device != device && !a.devicePointer)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                               "%s: %s (%p) is memory of device %d, which device %d has no access to", function, name,
                               p, a.device, device);
    }
    return KVPRIM_OK;
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
static kvprim_status kvpc_check_bytes(const char *, const char *, const void *, uint64_t)
{
    return KVPRIM_OK;
}

static kvprim_status kvpc_check_memory(const char *, const kvprim_move *, size_t)
{
    return KVPRIM_OK;
}
#endif

/* >>impl_row_plan -------------------------------------------------------------------------------------------------- */

/* Whether the kernels of plain rows can take a side. *bits collects what must be a multiple of the word. */
static bool kvpc_is_plain_side(const kvprim_side *side, uint64_t *bits)
{
    const kvprim_table *const t = &side->table;
    *bits |= (uintptr_t)kvprim_side_layer(side, 0) | (uint64_t)t->stride;
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

static bool kvpc_is_same_naming(const kvprim_side *a, const kvprim_side *b)
{
    return a->index == b->index && a->index_type == b->index_type && a->index_base == b->index_base &&
           a->index_stride == b->index_stride && (!a->index || a->table.rows == b->table.rows);
}

/* Whether two moves are K and V of a store: the same slots, each counted once. */
static bool kvpc_is_k_and_v(const kvprim_move *k, const kvprim_move *v)
{
    return !k->zero && !v->zero && !v->rejected && k->count == v->count && kvpc_is_same_naming(&k->dst, &v->dst);
}

static kvpc_divisor kvpc_divisor_of(int64_t by)
{
    const uint64_t one = (uint64_t)1 << 31;
    kvpc_divisor d = {(uint64_t)by, 0, 0};
    if (by < 1 || d.by > one) /* every 32-bit dividend is less: magic 0 gives 0 */
        return d;
    while ((uint64_t)1 << d.shift < d.by)
        d.shift++;
    d.magic = (uint32_t)((uint64_t)1 << d.shift == d.by ? one : ((one << d.shift) + d.by - 1) / d.by);
    return d;
}

static uint32_t kvpc_parts_of(uint32_t bytes, uint32_t part)
{
    return (bytes + part - 1) / part;
}

/* `parts` groups of threads share a row. */
static kvprim_status kvpc_start_rows(const kvpc_call *call, kvpc_plain *p,
                                     void (*kernel)(const kvpc_plain KVPRIM_IN_PLACE), uint32_t parts, uint32_t lanes)
{
    const kvpc_divisor divisor = kvpc_divisor_of(parts);
    p->parts = parts;
    p->parts_magic = divisor.magic;
    p->parts_shift = divisor.shift;
    const uint64_t threads = (uint64_t)p->count * parts * lanes;
    return kvpc_start(call, kernel, (uint32_t)((threads + kvpc_threads - 1) / kvpc_threads), kvpc_threads, *p);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_gather(const kvpc_call *call, kvpc_plain *p)
{
    static void (*const kernels[])(const kvpc_plain KVPRIM_IN_PLACE) = {kvpc_gather_kernel<lanes, loads, exact, false>,
                                                                        kvpc_gather_kernel<lanes, loads, exact, true>};
    return kvpc_start_rows(call, p, kernels[p->pdl], kvpc_parts_of(p->row_bytes[0], 16 * lanes * loads), lanes);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_store(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t most = p->row_bytes[0] > p->row_bytes[1] ? p->row_bytes[0] : p->row_bytes[1];
    static void (*const kernels[])(const kvpc_plain KVPRIM_IN_PLACE) = {
        kvpc_store_kernel<lanes, loads, 1, exact, false>, kvpc_store_kernel<lanes, loads, 1, exact, true>,
        kvpc_store_kernel<lanes, loads, 2, exact, false>, kvpc_store_kernel<lanes, loads, 2, exact, true>};
    return kvpc_start_rows(call, p, kernels[2 * (p->row_bytes[1] != 0) + p->pdl],
                           kvpc_parts_of(most, 16 * lanes * loads), lanes);
}

static kvprim_status kvpc_start_bytes(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t part = 16 * kvpc_bytes_lanes * kvpc_bytes_loads;
    p->k_parts = kvpc_parts_of(p->row_bytes[0] + 15, part); /* a row may lie in one word more than it fills */
    const uint32_t v_parts = p->row_bytes[1] ? kvpc_parts_of(p->row_bytes[1] + 15, part) : 0;
    return kvpc_start_rows(call, p, kvpc_bytes_kernel, p->k_parts + v_parts, kvpc_bytes_lanes);
}

/* Whether parts of `part` bytes fill rows of row_bytes and are a power of two. */
static bool kvpc_fills(int64_t row_bytes, int64_t part)
{
    const int64_t parts = row_bytes / part;
    return parts > 0 && parts * part == row_bytes && (parts & (parts - 1)) == 0;
}

/* Two loads per thread, and a whole warp where a row has that much: more in flight gains nothing. Short rows take one
   load per thread until there are enough of them to fill the GPU. With dependent launch a GPU starts less than one
   block per nanosecond, so a large launch needs large blocks. */
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
        p.pair[k].dst = (uintptr_t)kvprim_side_layer(&m->dst, 0);
        p.pair[k].src = (uintptr_t)kvprim_side_layer(&m->src, 0);
        p.pair[k].dst_stride = (uint32_t)m->dst.table.stride;
        p.pair[k].src_stride = (uint32_t)m->src.table.stride;
        p.row_bytes[k] = (uint32_t)m->row_bytes;
        if (!m->zero || m->dst.table.stride != m->row_bytes)
            edges |= p.pair[k].dst | p.pair[k].dst_stride | p.row_bytes[k];
    }
    p.index = (uintptr_t)indexed->index;
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
    if (!side->index)
        return kvpc_naming{0, 0, (uint64_t)count, 0, 0};
    return kvpc_naming{(uintptr_t)side->index, side->index_base, (uint64_t)side->table.rows,
                       (uint32_t)side->index_stride * (is_i64 ? 8 : 4), is_i64};
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
static kvprim_status kvpc_start_groups(const kvpc_call *call,
                                       void (*kernel)(const kvpc_batch<most_tasks> KVPRIM_IN_PLACE),
                                       uint32_t most_threads, uint32_t lanes, const kvpc_batch<most_tasks> *p)
{
    const uint64_t limit = (uint64_t)call->launch.max_sms;
    uint32_t threads = limit ? most_threads : (uint32_t)kvpc_threads;
    while (threads > kvpc_threads && p->total / (threads / lanes) < limit)
        threads /= 2;
    const uint64_t wanted = (p->total + threads / lanes - 1) / (threads / lanes), most = limit ? limit : INT32_MAX;
    return kvpc_start(call, kernel, (uint32_t)(wanted < most ? wanted : most), threads, *p);
}

/* Rows that begin and end at multiples of 16 bytes. On few multiprocessors a thread loads 8 words before it stores, of
   rows of 513 to 1,024 bytes only 4, which is faster except over the link; and 4 where several moves take registers. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_aligned(const kvpc_call *call, kvpc_batch<most_tasks> *p, uint64_t unit)
{
    const uint32_t few_loads = most_tasks > 1 ? 4 : 8;
    static void (*const kernels[2][3])(const kvpc_batch<most_tasks> KVPRIM_IN_PLACE) = {
        {kvpc_move_kernel<8, 2, most_tasks>, kvpc_move_kernel<16, 2, most_tasks>, kvpc_move_kernel<32, 2, most_tasks>},
        {kvpc_move_few_kernel<8, few_loads, most_tasks>, kvpc_move_few_kernel<16, few_loads, most_tasks>, NULL}};
    const bool few = call->launch.max_sms > 0;
    const uint32_t few_lanes = unit <= (call->link ? 1024 : 512) ? 8 : 16;
    const uint32_t lanes = few ? few_lanes : unit <= 256 ? 8 : unit <= 512 ? 16 : 32;
    kvpc_cut(p, 16 * lanes * (few ? few_loads : 2), true);
    return kvpc_start_groups(call, kernels[few][lanes / 16], kvpc_few_sms_threads, lanes, p);
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

/* Whether a move is a transfer between pinned host memory and a GPU that takes some time. By itself it runs on
   kvpc_link_sms multiprocessors:
   - Two fill the link. With more, stores to the host queue up in front of all other memory accesses: on 8 a kernel
     beside them takes 1.5 to 2.4 times as long, on 2 1.02 to 1.04 (H200).
   - Their threads take all registers. Blocks of another kernel beside fewer of them are slowed with them.
   Shorter ones take about 1 us, and to ask CUDA where their memory is takes 0.3. */
static bool kvpc_crosses_link(const kvprim_move *m)
{
    const uint64_t least_bytes = 64 << 10;
    return m->names->dst_index && m->names->src_index && m->count > 0 &&
           (uint64_t)m->count * (uint64_t)m->row_bytes >= least_bytes / (uint64_t)m->layers &&
           kvpc_is_link(kvprim_side_layer(&m->dst, 0), kvprim_side_layer(&m->src, 0));
}

/* Whether a side's rows can be one copy of two dimensions: rows of 512 bytes are copied as fast as one run is. */
static bool kvpc_is_copied_side(const kvprim_side *side, const kvprim_move *m)
{
    const kvprim_table *const t = &side->table;
    return !side->index && t->heads == 1 && t->page_rows == 0 &&
           (m->count == 1 || (m->row_bytes >= 512 && t->stride >= m->row_bytes && t->stride <= INT32_MAX));
}

/* Lets the copy engine move the layers of a transfer without an index, and returns whether it does. It fills the link to
   1.00 where kernels reach 0.95, and other kernels hardly notice it. One copy is enqueued and over 3 us sooner than a
   kernel; but each further one, and each in a graph, begins 1 to 2 us after what is before it, which 2 MB make up for. */
static bool kvpc_copy_layers(const kvpc_call *call, const kvprim_move *m)
{
    const uint64_t bytes = (uint64_t)m->count * (uint64_t)m->row_bytes, much = 2 << 20;
    if (!call->link || !kvpc_is_copied_side(&m->dst, m) || !kvpc_is_copied_side(&m->src, m) ||
        (bytes < much && (m->layers > 1 || kvpc_is_captured(call))))
        return false;
    for (int32_t l = 0; l < m->layers; l++)
        if (!kvpc_copy_rows(call, kvprim_side_layer(&m->dst, l), m->dst.table.stride, kvprim_side_layer(&m->src, l),
                            m->src.table.stride, m->row_bytes, m->count))
            return false;
    return true;
}

static bool kvpc_is_alike_side(const kvprim_side *a, const kvprim_side *b)
{
    const kvprim_table *const x = &a->table, *const y = &b->table;
    return kvpc_is_same_naming(a, b) && x->stride == y->stride && x->page_rows == y->page_rows &&
           x->page_stride == y->page_stride && x->heads == y->heads && x->head_stride == y->head_stride;
}

/* Whether a move differs from the one before it only in its memory, as V often does from K: then its layers join
   the task of the one before. */
static bool kvpc_is_alike(const kvprim_move *a, const kvprim_move *b)
{
    return a->row_bytes == b->row_bytes && a->count == b->count && a->zero == b->zero && !b->rejected &&
           kvpc_is_alike_side(&a->dst, &b->dst) && kvpc_is_alike_side(&a->src, &b->src);
}

/* Adds layers of a move to a batch, from layer `first` on, and returns how many: none if the batch is full. `alike`:
   the batch's last task does for them, too. */
template <uint32_t most_tasks>
static int32_t kvpc_add_layers(kvpc_batch<most_tasks> *p, bool alike, const kvprim_move *m, int32_t first,
                               uint64_t *bits)
{
    const uint32_t room = kvpc_batch<most_tasks>::most_layers - p->layers, left = (uint32_t)(m->layers - first);
    const uint32_t layers = left < room ? left : room;
    if (layers == 0 || (!alike && p->tasks == most_tasks))
        return 0;
    if (!alike) {
        kvpc_task *const task = &p->task[p->tasks++];
        kvpc_set_task(task, m, bits);
        task->first_layer = p->layers;
        task->layers = 0;
        task->rejected = first == 0 ? m->rejected : NULL; /* counted in layer 0 */
    }
    p->task[p->tasks - 1].layers += layers;
    for (const int32_t end = first + (int32_t)layers; first < end; first++)
        p->layer[p->layers++] =
            kvpc_layer{(uintptr_t)kvprim_side_layer(&m->dst, first), (uintptr_t)kvprim_side_layer(&m->src, first)};
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
        uint64_t bits = 0;
        p.tasks = p.layers = 0;
        for (; k < n; k++, first = 0) {
            if (moves[k].count == 0)
                continue;
            joined = moves[k];
            kvpc_join_rows(&joined);
            if (first == 0 && kvpc_copy_layers(call, &joined))
                continue;
            first += kvpc_add_layers(&p, before && kvpc_is_alike(before, &moves[k]), &joined, first, &bits);
            if (first < joined.layers)
                break;
            before = &moves[k];
        }
        if (p.tasks)
            KVPRIM_TRY(kvpc_start_batch(call, &p, bits));
    }
    return KVPRIM_OK;
}

/* Runs moves if `checked`, the status of their checks, is KVPRIM_OK. */
static kvprim_status kvpc_run(const char *function, kvprim_status checked, const kvprim_move *moves, size_t n,
                              const kvprim_cuda_launch *launch)
{
    if (checked != KVPRIM_OK)
        return kvpc_fail_check(checked);
    uint64_t bits = 0;
    while (n > 0 && moves[n - 1].count == 0) /* K only, say */
        n--;
    if (n == 0)
        return KVPRIM_OK;
    kvpc_call call;
    KVPRIM_TRY(kvpc_begin_call(&call, function, launch));
    KVPRIM_TRY(kvpc_check_memory(function, moves, n));
    call.link = kvpc_crosses_link(moves);
    if (call.link && call.launch.max_sms == 0)
        call.launch.max_sms = kvpc_link_sms;
    if (call.launch.max_sms == 0 && n <= 2 && kvpc_is_plain(&moves[0], &bits) &&
        (n == 1 || (kvpc_is_plain(&moves[1], &bits) && kvpc_is_k_and_v(&moves[0], &moves[1]))))
        return kvpc_run_plain(&call, moves, (int)n, bits);
    if (n == 1 || (n == 2 && kvpc_is_alike(&moves[0], &moves[1])))
        return kvpc_run_batches<1>(&call, moves, n);
    return kvpc_run_batches<kvpc_most_tasks>(&call, moves, n);
}

/* >>impl_unpack_host ----------------------------------------------------------------------------------------------- */

enum {
    kvpc_host_chunk = 128,   /* fragments that are handed out at a time: they stay in the processor's first cache */
    kvpc_sample_count = 256, /* fragments: see kvpc_is_mergeable */
    kvpc_table_share = 16,   /* fragments for each entry of the table */
    kvpc_direct_bytes = 16 * 32 * kvpc_bytes_loads - 15, /* a warp copies so many as one tile, however aligned */
    kvpc_most_bytes = 1 << 27 /* that move as one fragment: the tiles of any launch can be counted in 31 bits */
};

/* One of the three numbers that make a fragment. Fragment i has first + i * step; where it has another number, the two
   differ in bits of `differ`. */
typedef struct kvpc_column {
    uint64_t first, step, differ, base; /* base: the buffer's address */
    uint32_t shift;                     /* the number is stored shifted right by so many bits */
} kvpc_column;

typedef struct kvpc_unpack_job {
    const kvpc_call *call;
    const kvprim_unpack_desc *desc;
    const kvprim_fragment *next; /* to hand out */
    kvprim_fragment rest;        /* what was cut off, to hand out before *next */
    uint64_t left, last_bytes;   /* fragments that are not launched yet, and bytes of the last of them */
    uint64_t long_bit;           /* bit 63 is set if a fragment has more than kvpc_direct_bytes */
    kvpc_column src, dst, bytes; /* step of bytes is 0, and its differ leaves the last fragment out */
    kvpc_unpack head;            /* what all launches have in common */
    uint32_t lead;               /* bytes, at most, between a 16-byte boundary of dst and a fragment's first byte */
    bool merge, small, aligned, started, overlap;
    kvprim_fragment merged[kvpc_host_chunk];
} kvpc_unpack_job;

/* Joins adjacent fragments, leaves out empty ones and cuts long ones. Returns how many that makes, at most `most`. */
static uint64_t kvpc_merge(kvpc_unpack_job *job, uint64_t most)
{
    const kvprim_fragment *const end = job->desc->fragments + job->desc->count, *next = job->next;
    kvprim_fragment run = job->rest;
    uint64_t n = 0;
    for (; n < most; n++) {
        for (; next != end && run.bytes < kvpc_most_bytes; next++)
            if (run.bytes == 0)
                run = *next;
            else if (next->bytes == 0 ||
                     (next->src_offset - run.src_offset == run.bytes && next->dst_offset - run.dst_offset == run.bytes))
                run.bytes += next->bytes;
            else
                break;
        if (run.bytes == 0)
            break;
        const uint64_t bytes = run.bytes < kvpc_most_bytes ? run.bytes : (uint64_t)kvpc_most_bytes;
        job->merged[n] = kvprim_fragment{run.src_offset, run.dst_offset, bytes};
        run = kvprim_fragment{run.src_offset + bytes, run.dst_offset + bytes, run.bytes - bytes};
    }
    job->next = next, job->rest = run;
    return n;
}

/* Hands out the next fragments, at most *count of them, and sets *count to their number: 0 at the end. */
static const kvprim_fragment *kvpc_take(kvpc_unpack_job *job, uint64_t *count)
{
    const uint64_t left = (uint64_t)(job->desc->fragments + job->desc->count - job->next);
    if (job->merge) {
        *count = kvpc_merge(job, *count < kvpc_host_chunk ? *count : (uint64_t)kvpc_host_chunk);
        return job->merged;
    }
    *count = *count < left ? *count : left;
    job->next += *count;
    return job->next - *count;
}

/* Goes through all fragments and counts them. No branch and no comparison depends on the data: a comparison takes as
   long as three of the other operations here. */
static void kvpc_survey(kvpc_unpack_job *job, bool merge)
{
    kvpc_column src = {0, 0, 0, 0, 0}, dst = src, bytes = src;
    uint64_t src_next = 0, dst_next = 0, last_bytes = 0, long_bit = 0, count = UINT64_MAX;
    job->next = job->desc->fragments, job->rest = kvprim_fragment{0, 0, 0}, job->left = 0, job->merge = merge;
    for (const kvprim_fragment *f = kvpc_take(job, &count); count > 0; f = kvpc_take(job, &count)) {
        if (job->left == 0) {
            src_next = src.first = f->src_offset, src.step = f[count > 1].src_offset - f->src_offset;
            dst_next = dst.first = f->dst_offset, dst.step = f[count > 1].dst_offset - f->dst_offset;
            last_bytes = bytes.first = f->bytes;
        }
        for (const kvprim_fragment *const end = f + count; f != end; f++) {
            src.differ |= f->src_offset ^ src_next, src_next += src.step;
            dst.differ |= f->dst_offset ^ dst_next, dst_next += dst.step;
            bytes.differ |= last_bytes ^ bytes.first, last_bytes = f->bytes;
            long_bit |= kvpc_direct_bytes - last_bytes;
        }
        job->left += count, count = UINT64_MAX;
    }
    job->src = src, job->dst = dst, job->bytes = bytes, job->last_bytes = last_bytes, job->long_bit = long_bit;
    job->next = job->desc->fragments, job->rest.bytes = 0; /* for kvpc_encode */
}

/* Returns whether all fragments have the same size, except that the last may be shorter. */
static bool kvpc_is_even(const kvpc_unpack_job *job)
{
    return job->bytes.differ == 0 && job->last_bytes - 1 < job->bytes.first;
}

/* Returns whether enough of the first fragments begin where the one before ends; counting all of them would double the
   time of the survey. Even fragments must halve in number: fewer joins could make them uneven. */
static bool kvpc_is_mergeable(const kvpc_unpack_job *job)
{
    const kvprim_fragment *const f = job->desc->fragments;
    const uint64_t count = job->left < kvpc_sample_count ? job->left : (uint64_t)kvpc_sample_count;
    uint64_t joins = 0;
    for (uint64_t i = 1; i < count; i++)
        joins += f[i].src_offset - f[i - 1].src_offset == f[i - 1].bytes &&
                 f[i].dst_offset - f[i - 1].dst_offset == f[i - 1].bytes;
    return joins > (kvpc_is_even(job) ? (count - 1) / 2 : count / 16);
}

/* Plans how to store a column whose numbers are not above `most`. A regular one is not stored: see kvpc_encode. */
static kvpc_numbers kvpc_plan_numbers(kvpc_column *c, uint64_t most)
{
    if (c->differ == 0)
        return kvpc_numbers{0, c->step, 0, 0};
    while (((c->step | c->differ) >> c->shift & 1) == 0)
        c->shift++;
    const uint64_t step = (uint64_t)1 << c->shift, last = most >> c->shift;
    return kvpc_numbers{c->base + c->first % step, step, last <= UINT16_MAX ? 2u : last <= UINT32_MAX ? 4u : 8u, 0};
}

static uint32_t kvpc_tile_bytes(const kvpc_unpack_job *job)
{
    return (16u * (job->aligned ? (uint32_t)kvpc_aligned_loads : (uint32_t)kvpc_bytes_loads)) << job->head.lanes_shift;
}

/* As few threads copy a tile as can copy a fragment at once, at most a warp. */
static void kvpc_plan_unpack(kvpc_unpack_job *job)
{
    const bool even = kvpc_is_even(job);
    const uint64_t any_bytes = job->bytes.first | job->bytes.differ | job->last_bytes, direct = kvpc_direct_bytes;
    const uint64_t most = even ? job->bytes.first : job->long_bit >> 63 || any_bytes < direct ? any_bytes : direct;
    kvpc_unpack *const h = &job->head;
    *h = kvpc_unpack{};
    job->src.base = (uintptr_t)job->desc->src;
    job->dst.base = (uintptr_t)job->desc->dst;
    job->bytes.differ |= even ? 0 : job->last_bytes ^ job->bytes.first;
    const uint64_t src = job->src.base + job->src.first, src_steps = job->src.step | job->src.differ;
    const uint64_t dst = job->dst.base + job->dst.first, dst_steps = job->dst.step | job->dst.differ;
    job->aligned = (src | src_steps | dst | dst_steps | any_bytes) % 16 == 0;
    job->lead = dst_steps % 16 ? 15 : (uint32_t)(dst % 16);
    job->small = even && job->aligned && most <= kvpc_small_bytes;
    /* Threads for a whole tile take kvpc_aligned_loads words each, those of a small fragment one. */
    const uint64_t wanted = job->small ? kvpc_aligned_loads * most : job->lead + most;
    for (h->lanes_shift = 3; h->lanes_shift < 5 && kvpc_tile_bytes(job) < wanted;)
        h->lanes_shift++;
    const uint64_t tiles = (job->lead + most + kvpc_tile_bytes(job) - 1) / kvpc_tile_bytes(job);
    h->first_tile = kvpc_numbers{0, even ? tiles : 1, even || tiles == 1 ? 0u : 4u, 0};
    h->src = kvpc_plan_numbers(&job->src, job->desc->src_bytes - 1);
    h->dst = kvpc_plan_numbers(&job->dst, job->desc->dst_bytes - 1);
    h->bytes = kvpc_plan_numbers(&job->bytes, any_bytes);
}

/* Returns how many fragments fit parameters of params_bytes. */
static uint64_t kvpc_fragments_in(const kvpc_unpack *h, uint64_t params_bytes)
{
    const uint64_t room = params_bytes - sizeof *h - 32; /* 22 of padding, 8 of the table's last two entries */
    const uint64_t stored = h->src.width + h->dst.width + h->bytes.width + h->first_tile.width;
    const uint64_t most = ((uint64_t)1 << 30) / h->first_tile.step;
    const uint64_t fit = stored ? kvpc_table_share * room / (kvpc_table_share * stored + h->first_tile.width) : most;
    return fit < most ? fit : most;
}

template <class number>
static void kvpc_store_numbers(number *to, uint32_t shift, const kvprim_fragment *f, uint64_t count,
                               uint64_t kvprim_fragment::*member)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = (number)(f[i].*member >> shift);
}

/* Stores one column of `count` fragments, as numbers `at`, at + 1 ... */
static void kvpc_store_column(const kvpc_column *c, kvpc_numbers *numbers, void *data, uint64_t at,
                              const kvprim_fragment *f, uint64_t count, uint64_t kvprim_fragment::*member)
{
    const uint64_t to = numbers->at + at;
    if (numbers->width == 0 && at == 0)
        numbers->base = c->base + f->*member;
    if (numbers->width == 2)
        kvpc_store_numbers((uint16_t *)data + to, c->shift, f, count, member);
    if (numbers->width == 4)
        kvpc_store_numbers((uint32_t *)data + to, c->shift, f, count, member);
    if (numbers->width == 8)
        kvpc_store_numbers((uint64_t *)data + to, c->shift, f, count, member);
}

/* Returns the first tile of the next fragment. tile_bytes is a template parameter because a division takes long. */
template <uint32_t tile_bytes>
static uint32_t kvpc_store_tiles(uint32_t *to, const kvprim_fragment *f, uint64_t count, uint32_t tile, uint32_t lead)
{
    for (uint64_t i = 0; i < count; i++) {
        to[i] = tile;
        tile += ((uint32_t)f[i].bytes + lead + tile_bytes - 1) / tile_bytes;
    }
    return tile;
}

/* Each fragment takes the first entry that its tiles reach, then the entries that none took are filled: a branch on the
   sizes would be mispredicted. */
static void kvpc_store_table(kvpc_unpack *h, uint32_t *data)
{
    const uint32_t *const first_tile = data + h->first_tile.at;
    uint32_t *const table = data + h->table;
    h->table_shift = 0;
    while (h->tiles >> h->table_shift > h->count / kvpc_table_share)
        h->table_shift++;
    const uint32_t shift = h->table_shift, up = (1u << shift) - 1, entries = (h->tiles + up) >> shift;
    memset(table, 0, entries * sizeof *table);
    for (uint32_t i = 0; i < h->count; i++)
        table[(first_tile[i] + up) >> shift] = i;
    for (uint32_t k = 1; k < entries; k++)
        table[k] = table[k] > table[k - 1] ? table[k] : table[k - 1];
    table[entries] = h->count - 1;
}

/* Stores the next h->count fragments. */
static void kvpc_encode(kvpc_unpack_job *job, kvpc_unpack *h, void *data)
{
    uint32_t bytes = 0, tiles = h->first_tile.width ? 0 : h->count * (uint32_t)h->first_tile.step;
    kvpc_numbers *const all[] = {&h->src, &h->dst, &h->bytes, &h->first_tile};
    for (kvpc_numbers *const numbers : all)
        if (numbers->width) {
            numbers->at = bytes / numbers->width;
            bytes = (bytes + h->count * numbers->width + 7) / 8 * 8;
        }
    h->table = bytes / 4;
    for (uint64_t at = 0, count; at < h->count; at += count) {
        count = h->count - at < kvpc_host_chunk ? h->count - at : (uint64_t)kvpc_host_chunk;
        const kvprim_fragment *const f = kvpc_take(job, &count);
        uint32_t *const first_tile = (uint32_t *)data + h->first_tile.at + at;
        kvpc_store_column(&job->src, &h->src, data, at, f, count, &kvprim_fragment::src_offset);
        kvpc_store_column(&job->dst, &h->dst, data, at, f, count, &kvprim_fragment::dst_offset);
        kvpc_store_column(&job->bytes, &h->bytes, data, at, f, count, &kvprim_fragment::bytes);
        if (h->first_tile.width) /* then lanes_shift is 5 */
            tiles = job->aligned ? kvpc_store_tiles<512 * kvpc_aligned_loads>(first_tile, f, count, tiles, job->lead)
                                 : kvpc_store_tiles<512 * kvpc_bytes_loads>(first_tile, f, count, tiles, job->lead);
        h->last_bytes = (uint32_t)f[count - 1].bytes;
    }
    h->tiles = tiles;
    if (h->first_tile.width)
        kvpc_store_table(h, (uint32_t *)data);
}

/* One tile for each group of threads. If there are many, two: half as many blocks are started sooner. */
static uint32_t kvpc_unpack_blocks(const kvpc_unpack_job *job, const kvpc_unpack *h, uint32_t threads, uint32_t max_sms)
{
    enum { many_blocks = 768 };
    const uint32_t groups = threads >> h->lanes_shift, each = job->small ? kvpc_small_fragments * groups : groups;
    const uint32_t all = job->small ? h->count : h->tiles, blocks = all / each + (all % each != 0);
    if (max_sms > 0)
        return blocks < max_sms ? blocks : max_sms;
    return job->small || blocks < many_blocks ? blocks : (blocks + 1) / 2;
}

/* Launches as many fragments as fit the parameters. With `overlap` the launches of a batch run side by side (65,536
   fragments of 256 bytes then take 11.1 us, not 19.8): (1) the first waits, if pdl asks for it, before it lets the next
   one start, so all see the memory of what came before; (2) each later one waits for the one before it at its end, so
   what follows in the stream follows all; (3) the last lets that start early only if pdl asks for it. */
template <uint32_t params_bytes> static kvprim_status kvpc_unpack_some(kvpc_unpack_job *job)
{
    kvpc_unpack_params<params_bytes> p;
    kvpc_unpack *const h = &p.head;
    kvpc_call call = *job->call;
    kvprim_cuda_launch &launch = call.launch;
    const uint64_t fit = kvpc_fragments_in(&job->head, params_bytes);
    *h = job->head;
    h->count = (uint32_t)(job->left < fit ? job->left : fit);
    kvpc_encode(job, h, p.n16);
    job->left -= h->count;
    h->wait = !job->started && launch.pdl;
    h->wait_last = job->started && job->overlap;
    h->trigger = job->left ? job->overlap : launch.pdl;
    launch.pdl = job->started ? job->overlap : launch.pdl;
    job->started = true;
    const uint32_t threads = launch.max_sms > 0 ? kvpc_unpack_most_threads : kvpc_unpack_threads;
    return kvpc_start(&call,
                      job->small     ? kvpc_unpack_kernel<true, true, params_bytes>
                      : job->aligned ? kvpc_unpack_kernel<false, true, params_bytes>
                                     : kvpc_unpack_kernel<false, false, params_bytes>,
                      kvpc_unpack_blocks(job, h, threads, (uint32_t)launch.max_sms), threads, p);
}

static kvprim_status kvpc_unpack_fragments(const kvpc_call *call, const kvprim_unpack_desc *d)
{
    kvpc_unpack_job job; /* not all zeros: `merged` is 3 KB */
    job.call = call;
    job.desc = d;
    job.started = false;
    job.overlap = call->launch.max_sms == 0 && kvpc_has_pdl();
    kvpc_survey(&job, false);
    const uint64_t any_bytes = job.bytes.first | job.bytes.differ | job.last_bytes;
    if (any_bytes == 0)
        return KVPRIM_OK;
    if (any_bytes > kvpc_most_bytes || kvpc_is_mergeable(&job))
        kvpc_survey(&job, true);
    kvpc_plan_unpack(&job);
    while (job.left > 0)
        if (job.left <= kvpc_fragments_in(&job.head, kvpc_few_params))
            KVPRIM_TRY(kvpc_unpack_some<kvpc_few_params>(&job));
        else if (job.left <= kvpc_fragments_in(&job.head, kvpc_more_params))
            KVPRIM_TRY(kvpc_unpack_some<kvpc_more_params>(&job));
        else
            KVPRIM_TRY(kvpc_unpack_some<kvpc_most_params>(&job));
    return KVPRIM_OK;
}

/* >>impl_calls ----------------------------------------------------------------------------------------------------- */

KVPRIM_API kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_gather");
    kvprim_move move;
    return kvpc_run("kvprim_cuda_gather", kvprim_gather_moves(desc, &move), &move, 1, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_store");
    kvprim_move moves[2];
    return kvpc_run("kvprim_cuda_store", kvprim_store_moves(desc, moves), moves, 2, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_transfer");
    kvprim_move move;
    return kvpc_run("kvprim_cuda_transfer", kvprim_transfer_moves(desc, &move), &move, 1, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_move");
    if (!moves && n)
        return kvprim_fail(KVPRIM_ERROR_NULL, "kvprim_cuda_move: moves is NULL");
    return kvpc_run("kvprim_cuda_move", KVPRIM_OK, moves, n, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_unpack");
    const kvprim_status status = kvprim_unpack_check(desc);
    if (status != KVPRIM_OK)
        return kvpc_fail_check(status);
    const kvprim_unpack_desc d = *desc;
    kvpc_call call;
    if (d.count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_begin_call(&call, "kvprim_cuda_unpack", launch));
    KVPRIM_TRY(kvpc_check_bytes(call.function, "dst", d.dst, d.dst_bytes));
    KVPRIM_TRY(kvpc_check_bytes(call.function, "src", d.src, d.src_bytes));
    return kvpc_unpack_fragments(&call, &d);
}

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

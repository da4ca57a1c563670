/* kvprim_cuda.cuh: kvprim's gather, store, transfer and unpack on the GPU, callable from C. CUDA 12,
   sm_75, and newer.

   Do this, in a .cu file (and call it from C files that include this header and no CUDA header):

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim_cuda.cuh"

       kvprim_status keep(void *cache, int64_t slots, void *rows, const int32_t *slot, int64_t count,
                          cudaStream_t stream)
       {
           kvprim_store_desc store = {};
           store.k_cache.data = cache, store.k_cache.rows = slots;
           store.k.data = rows, store.k.rows = count;
           store.k_bytes = 1024, store.slot = slot, store.count = count;
           kvprim_cuda_launch launch = {};
           launch.stream = stream;
           return kvprim_cuda_store(&store, &launch);
       }

   What it does: moves rows in the memory of the current device, by the descriptors of kvprim.h, with the results of the
   functions there byte for byte. Neither CUDA's headers nor nvcc are needed to call it: a cudaStream_t is a
   struct CUstream_st *.

   What it does NOT do: allocate, synchronise, create streams or events, print.

   Contents, search for the tag:
       >>config      macros you may define
       >>launch      stream, overlap with the kernel before, share of the GPU
       >>move        gather, store, transfer and unpack
       >>device      device functions, for one's own kernels
       >>impl        the implementation

   Rules that hold for every function here
       Errors     A descriptor is checked as in kvprim.h before anything is enqueued, with the same status and text.
                  KVPRIM_ERROR_CUDA: CUDA refused the launch; kvprim_last_error() says with what, and whether it was
                  work enqueued earlier that failed. An error that happens on the GPU (a host pointer in a table, say)
                  is reported by CUDA, later; KVPRIM_DEBUG finds wrong pointers at the call. Where a call takes several
                  launches (transfer, unpack), those before a refused one are enqueued.
       Stream     Only enqueues, on the given stream of the current device. May be captured into a graph. CUDA may load
                  a kernel's code at its first launch (CUDA_MODULE_LOADING=EAGER: before).
       Threads    Every function may be called from any number of threads at once.
       Memory     Tables, indices and `rejected` are read and written by the GPU: device memory, managed memory,
                  pinned host memory that the device can address, or another GPU's memory that it has peer access to or
                  a mapped window of. They must stay valid until the work is done.
                  Descriptors are host memory, free to reuse on return.
       Alignment  Any. Fast where bases, strides and row sizes are multiples of 16 bytes. Beside a row's own bytes only
                  others of the same aligned 16 bytes are ever read, and none are written.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_CUDA_IMPLEMENTATION  in one translation unit: implements this header alone; kvprim.h must be implemented in
                               another. Like KVPRIM_IMPLEMENTATION it asks for nvcc.
   KVPRIM_STATIC               in every translation unit, as in kvprim.h
   KVPRIM_DEBUG                in the implementing one: every call asks CUDA whether the device can reach the memory
                               that its descriptor names (some microseconds); KVPRIM_ERROR_ARGUMENT if it cannot
   KVPRIM_NVTX                 in the implementing one, as in kvprim.h
*/
#ifndef KVPRIM_CUDA_CUH
#define KVPRIM_CUDA_CUH

#include "kvprim.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */

/* >>launch --------------------------------------------------------------------------------------------------------- */

/* Zero-initialise, then set what differs. A NULL launch is one of zeros. */
typedef struct kvprim_cuda_launch {
    struct CUstream_st *stream; /* NULL: the legacy default stream, however the file is compiled */
    int32_t pdl;                /* 1: programmatic dependent launch, where all of the implementing file's architectures
                                   are sm_90 or newer (elsewhere no difference). May start before the kernel ahead of
                                   it in the stream has ended, and waits for that one's memory before its first
                                   access. Do not put it right before a kernel that is launched that way and does not
                                   wait, as some of NCCL's are */
    int32_t max_sms;            /* leave the rest of the GPU's multiprocessors to others; 0: no limit */
} kvprim_cuda_launch;

/* >>move -----------------------------------------------------------------------------------------------------------

   Each as the function of kvprim.h without _cuda in its name: same descriptor, rules, aliasing and errors. launch may
   be NULL; a negative max_sms or a pdl other than 0 and 1 is KVPRIM_ERROR_ARGUMENT. */
KVPRIM_API kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch);
KVPRIM_API kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch);

/* All layers in one launch, up to 216 of them; more in several. Each side lies in any of the memories above, the
   indices too; the arrays of layers are host memory, free to reuse on return. The host may touch what it lends (pinned
   rows and indices) again when the work is done. Between GPUs either one may do it, writing to the other's memory or
   reading it. With max_sms there are at most that many blocks. From or to pinned memory 8 of them reach the link's
   speed with rows of 2 KB and more, to or from another GPU 16 to 32 do (of 4 KB; both measured on H200s). */
KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch);

/* The launch's parameters hold what the GPU needs of the fragments, copied before the call returns. For fragments of
   one size (the last may be shorter) that is 2, 4 or 8 bytes each for each side, and nothing for a side on which all
   lie equally far apart; for several sizes it is 6 to 24 bytes. If many are adjacent, adjacent ones move as one. CUDA
   allows about 32 KB of parameters per launch (4,000 bytes before CUDA 12.1; a later one needs a driver as new as
   12.1). Larger batches go out in several launches. They overlap where pdl works and max_sms is 0; what follows in the
   stream follows them all. The call takes about 36 KB of the caller's stack. */
KVPRIM_API kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch);

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
#include <cuda_runtime.h>
#endif

/* Names that begin with kvpc_ are internal: static, and free to change. */

/* ---- kernels ---- */

/* Measured on an H200; what follows from them is described where they are used. */
enum {
    kvpc_threads = 128,             /* in a block of the kernels for plain rows, and of moves on the whole GPU */
    kvpc_few_threads = 1024,        /* at most, of moves on few multiprocessors */
    kvpc_bytes_threads = 512,       /* at most, of moves of any alignment */
    kvpc_unpack_threads = 256,      /* of unpack */
    kvpc_unpack_most_threads = 512, /* ... with max_sms */
    kvpc_bytes_lanes = 8,           /* of kvpc_bytes_kernel: see there what lanes and loads are */
    kvpc_bytes_loads = 3,           /* as aligned rows, plus one: rows of a power of two begin and end inside a word */
    kvpc_granule = 64,              /* bytes that memory is written in: see kvpc_fetch_edges */
    kvpc_few_bytes = 128 << 10,     /* of a table: see kvpc_store_by_size */
    kvpc_many_rows = 16384,         /* both: see kvpc_gather_by_size */
    kvpc_few_gathered = 1 << 20     /* bytes */
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

/* Accesses of global memory by number: an asm volatile keeps its place among the others. Left to itself the compiler
   puts the loads of a store behind the test of its slot, and waits twice where it could wait once. */
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

/* A pointer of which the compiler knows that it points to global memory: others are slower. */
KVPRIM_DEVICE char *kvpc_global(uint64_t address)
{
#ifdef __CUDA_ARCH__
    return (char *)__cvta_global_to_generic((size_t)address);
#else
    return (char *)(uintptr_t)address;
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

KVPRIM_DEVICE int64_t kvpc_load_i64(uint64_t address)
{
#ifdef __CUDA_ARCH__
    int64_t v;
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(address));
    return v;
#else
    return *(const int64_t *)(uintptr_t)address;
#endif
}

/* base + row * stride. In PTX, as otherwise the compiler takes base from constant memory after the test of the row. */
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

/* Memory is written in whole granules: of one that is written in part the rest is read first, and a read that begins
   only when the cache runs full costs as much as some hundred bytes. Hence the first and the last granule of a row. */
KVPRIM_DEVICE void kvpc_fetch_edges(uint64_t row, uint32_t bytes)
{
#ifdef __CUDA_ARCH__
    if (row % kvpc_granule)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
    if ((row + bytes) % kvpc_granule)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + bytes - 1));
#else
    (void)row, (void)bytes;
#endif
}

/* Divides what is below 2^31 by one multiplication, the rest as it comes. Anything by 0 is 0. */
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

/* One table and the rows beside it: K, or V. */
typedef struct kvpc_pair {
    uint64_t dst, src;
    uint32_t dst_stride, src_stride;
} kvpc_pair;

/* Rows without pages or heads, small enough for 32-bit arithmetic: see kvpc_is_plain. What a gather needs comes first,
   in one line of the constant cache: with few rows the time is that of the instructions up to the second load. */
typedef struct kvpc_plain {
    uint64_t index;
    uint32_t count, parts_shift; /* 1 << parts_shift groups of threads share a row, where that is exact */
    uint32_t rows, base;
    kvpc_pair pair[2];
    uint32_t *rejected;
    uint32_t row_bytes[2];
    kvpc_divisor parts;                 /* otherwise so many do */
    uint32_t parts_of_k;                /* for kvpc_bytes_kernel, of parts */
    uint32_t fetch;                     /* 1: rows end inside a granule: see kvpc_fetch_edges */
    uint32_t pdl, wide, gather, tables; /* for kvpc_bytes_kernel, which has no template for them */
} kvpc_plain;

/* The row that a group of threads works on, and which part of it. */
template <bool exact> KVPRIM_DEVICE uint32_t kvpc_row_of(const kvpc_plain &p, uint32_t group, uint32_t *part)
{
    if (exact) {
        *part = group & ((1u << p.parts_shift) - 1);
        return group >> p.parts_shift;
    }
    const uint32_t row = kvpc_divide(group, p.parts);
    *part = group - row * (uint32_t)p.parts.by;
    return row;
}

/* The index rule. `row` is right if the result is true; otherwise *past tells an index past the end from padding. */
template <bool wide> KVPRIM_DEVICE bool kvpc_find(const kvpc_plain &p, uint32_t i, uint32_t *row, bool *past)
{
    if (wide) {
        const int64_t index = kvpc_load_i64(kvpc_row_at(p.index, i, 8));
        const uint64_t offset = (uint64_t)index - p.base;
        *row = (uint32_t)offset;
        *past = index >= (int64_t)p.base;
        return offset < p.rows;
    }
    const int32_t index = kvpc_load_i32(kvpc_row_at(p.index, i, 4));
    *row = (uint32_t)index - p.base;
    *past = index >= (int32_t)p.base;
    return *row < p.rows;
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

/* The 16 bytes of a row from `at` on, or as many as are left of it. */
template <bool exact> KVPRIM_DEVICE void kvpc_put(uint64_t dst, uint4 v, uint32_t at, uint32_t row_bytes)
{
    if (exact || at + 16 <= row_bytes)
        kvpc_store16(dst, v);
    else if (at < row_bytes)
        kvpc_store_tail(dst, v, row_bytes - at);
}

/* A group of `lanes` threads moves lanes * loads times 16 bytes of one row, its part: thread t of the group those at
   16 t and, per load, a group further. `exact`: the parts are a power of two and fill the row; otherwise the last part
   ends with the row, perhaps inside 16 bytes, of which the rest is read but not written. All loads stand before all
   stores, all addresses before the loads. */

template <uint32_t lanes, uint32_t loads, bool exact, bool wide, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads) kvpc_gather_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x;
    uint32_t part, row;
    bool past;
    const uint32_t i = kvpc_row_of<exact>(p, t / lanes, &part);
    if (pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return;
    if (pdl)
        kvpc_pdl_wait();
    const bool inside = kvpc_find<wide>(p, i, &row, &past);
    const uint32_t at = 16 * (t % lanes + lanes * loads * part);
    const uint64_t src = kvpc_row_at(p.pair[0].src + at, row, p.pair[0].src_stride);
    const uint64_t dst = kvpc_row_at(p.pair[0].dst + at, i, p.pair[0].dst_stride);
    uint4 v[loads];
    if (!exact && p.fetch && at == 0)
        kvpc_fetch_edges(dst, p.row_bytes[0]);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        v[k] = uint4{0, 0, 0, 0};
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (inside && (exact || at + 16 * lanes * k < p.row_bytes[0]))
            v[k] = kvpc_load16(src + 16 * lanes * k);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        kvpc_put<exact>(dst + 16 * lanes * k, v[k], at + 16 * lanes * k, p.row_bytes[0]);
    if (!inside && past && at == 0 && p.rejected)
        atomicAdd(p.rejected, 1u);
}

template <uint32_t lanes, uint32_t loads, uint32_t tables, bool exact, bool wide, bool pdl>
static __global__ void __launch_bounds__(kvpc_threads) kvpc_store_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t t = blockIdx.x * kvpc_threads + threadIdx.x;
    uint32_t part, row;
    bool past;
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
        KVPRIM_UNROLL
        for (uint32_t k = 0; k < loads; k++) {
            if (!exact)
                v[m][k] = uint4{0, 0, 0, 0};
            if (exact || at + 16 * lanes * k < p.row_bytes[m])
                v[m][k] = kvpc_load16(src + 16 * lanes * k);
        }
    }
    const bool inside = kvpc_find<wide>(p, i, &row, &past);
    KVPRIM_UNROLL
    for (uint32_t m = 0; m < tables; m++) {
        dst[m] = kvpc_row_at(p.pair[m].dst + at, row, p.pair[m].dst_stride);
        if (!exact && p.fetch && inside && at == 0)
            kvpc_fetch_edges(dst[m], p.row_bytes[m]);
    }
    KVPRIM_UNROLL
    for (uint32_t m = 0; m < tables; m++) {
        KVPRIM_UNROLL
        for (uint32_t k = 0; k < loads; k++)
            if (inside)
                kvpc_put<exact>(dst[m] + 16 * lanes * k, v[m][k], at + 16 * lanes * k, p.row_bytes[m]);
    }
    if (!inside && past && at == 0 && p.rejected)
        atomicAdd(p.rejected, 1u);
}

/* `bytes` bytes from any alignment to any: a thread takes kvpc_bytes_loads words of 16 bytes of the destination, from
   the first-th on, `step` apart. Word w of a destination that begins `lead` bytes behind a 16-byte boundary holds its
   bytes 16 w - lead to 16 w - lead + 15. Each comes from the two aligned words of the source in which it lies, of which
   one without a byte to copy is not read. Zeros where the source may not be read. `fetch`: see kvpc_fetch_edges; once
   the loads are on their way, as it may have to wait for the place to write to. */
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

/* As the two above, for rows of any size and alignment. */
static __global__ void __launch_bounds__(kvpc_threads) kvpc_bytes_kernel(const __grid_constant__ kvpc_plain p)
{
    const uint32_t lanes = kvpc_bytes_lanes, t = blockIdx.x * kvpc_threads + threadIdx.x;
    uint32_t part, row;
    bool past;
    const uint32_t i = kvpc_row_of<false>(p, t / lanes, &part);
    if (p.pdl)
        kvpc_pdl_trigger();
    if (i >= p.count)
        return;
    if (p.pdl)
        kvpc_pdl_wait();
    const uint32_t v_side = part >= p.parts_of_k; /* a group moves a part of K's row or of V's */
    const kvpc_pair &pair = p.pair[v_side];
    const uint32_t first = t % lanes + lanes * kvpc_bytes_loads * (part - (v_side ? p.parts_of_k : 0));
    const bool inside = p.wide ? kvpc_find<true>(p, i, &row, &past) : kvpc_find<false>(p, i, &row, &past);
    const uint64_t src = kvpc_row_at(pair.src, p.gather ? row : i, pair.src_stride);
    const uint64_t dst = kvpc_row_at(pair.dst, p.gather ? i : row, pair.dst_stride);
    int32_t lead = (int32_t)(pair.dst % 16);
    if (pair.dst_stride % 16) /* only then must a store know its slot before it can load */
        lead = (int32_t)(dst % 16);
    kvpc_copy_words(dst, src, lead, (int32_t)p.row_bytes[v_side], first, lanes, !p.gather || inside, p.gather || inside,
                    p.fetch);
    if (!inside && past && part == 0 && t % lanes == 0 && p.rejected)
        atomicAdd(p.rejected, 1u);
}

/* ---- moves with pages, heads, layers or few multiprocessors ---- */

/* The start of unit u of row r: r * stride + page of r * page_step + head of u * head_step, and u * unit_bytes. */
typedef struct kvpc_side {
    int64_t stride, page_step, head_step;
    kvpc_divisor page, head; /* rows of a page, 0: not paged; units of a head, 0: one head */
} kvpc_side;

/* A unit is what is contiguous on both sides: a row, or as much of it as lies in one head of either. */
typedef struct kvpc_shape {
    kvpc_side dst, src;
    uint64_t unit_bytes, units, chunks; /* units and chunks of a row */
    kvpc_divisor parts;                 /* chunks of a unit */
} kvpc_shape;

typedef struct kvpc_layer {
    uint64_t dst, src;
} kvpc_layer;

enum { kvpc_layers = 216 }; /* of a launch: parameters up to 4,000 bytes cost nothing, measured on an H200 */

typedef struct kvpc_batch {
    uint64_t dst_index, src_index;      /* 0: row i */
    int64_t dst_base, src_base;         /* 0 where there is no index */
    uint64_t dst_rows, src_rows, total; /* total: of chunks */
    uint32_t *rejected;
    kvpc_divisor chunks, count; /* chunks of a row, where shapes differ of the longer one */
    uint32_t part_bytes;
    int32_t wide, zero, wait, shapes; /* zero: rows without a source; shapes: 2 if layer 1 has one of its own */
    kvpc_shape shape[2];
    kvpc_layer layer[kvpc_layers];
} kvpc_batch;

static_assert(sizeof(kvpc_batch) <= 4000, "parameters that cost nothing");

/* What a group of threads moves at once. */
typedef struct kvpc_chunk {
    uint64_t dst, src;
    uint32_t bytes; /* 0: nothing to do */
    bool zero;
} kvpc_chunk;

/* The rows of both sides that i stands for: one load after the other, and no wait between them. */
template <class number> KVPRIM_DEVICE void kvpc_load_indices(const kvpc_batch &p, number i, int64_t *to, int64_t *from)
{
    *to = *from = (int64_t)i;
    if (p.wide) {
        if (p.dst_index)
            *to = kvpc_load_i64(p.dst_index + 8 * (uint64_t)i);
        if (p.src_index)
            *from = kvpc_load_i64(p.src_index + 8 * (uint64_t)i);
        return;
    }
    int32_t to32 = 0, from32 = 0;
    if (p.dst_index)
        to32 = kvpc_load_i32(p.dst_index + 4 * (uint64_t)i);
    if (p.src_index)
        from32 = kvpc_load_i32(p.src_index + 4 * (uint64_t)i);
    *to = p.dst_index ? to32 : *to;
    *from = p.src_index ? from32 : *from;
}

template <class number> KVPRIM_DEVICE uint64_t kvpc_place(const kvpc_side &s, number row)
{
    return row * (uint64_t)s.stride + kvpc_divide(row, s.page) * (uint64_t)s.page_step;
}

/* Chunk `work` of all: of each layer every row, of each row every unit, of each unit every part. Parts begin at 16-byte
   boundaries of dst; `aligned`: as units do. */
template <bool aligned, bool one_shape, class number>
KVPRIM_DEVICE kvpc_chunk kvpc_find_chunk(const kvpc_batch &p, number work, bool first_lane)
{
    const number layer_row = kvpc_divide(work, p.chunks), chunk = work - layer_row * (number)p.chunks.by;
    const number layer = kvpc_divide(layer_row, p.count), i = layer_row - layer * (number)p.count.by;
    const kvpc_shape &s = p.shape[one_shape ? 0 : layer];
    int64_t to, from;
    kvpc_load_indices(p, i, &to, &from);
    number part = chunk;
    uint64_t dst_unit = 0, src_unit = 0;
    if (s.units > 1) {
        const number unit = kvpc_divide(chunk, s.parts);
        part = chunk - unit * (number)s.parts.by;
        dst_unit = unit * s.unit_bytes + kvpc_divide(unit, s.dst.head) * (uint64_t)s.dst.head_step;
        src_unit = unit * s.unit_bytes + kvpc_divide(unit, s.src.head) * (uint64_t)s.src.head_step;
    }
    const uint64_t dst_row = (uint64_t)to - (uint64_t)p.dst_base, src_row = (uint64_t)from - (uint64_t)p.src_base;
    const bool dst_inside = to >= p.dst_base && dst_row < p.dst_rows;
    const bool src_inside = from >= p.src_base && src_row < p.src_rows;
    kvpc_chunk c;
    c.dst = p.layer[layer].dst + kvpc_place(s.dst, (number)dst_row) + dst_unit;
    c.src = p.layer[layer].src + kvpc_place(s.src, (number)src_row) + src_unit;
    c.zero = !src_inside;
    const uint64_t lead = aligned ? 0 : c.dst % 16, begin = (uint64_t)part * p.part_bytes;
    const uint64_t at = part ? begin - lead : 0, end = begin + p.part_bytes - lead;
    const uint64_t before = end < s.unit_bytes ? end : s.unit_bytes;
    const bool moves = dst_inside && (src_inside || p.zero) && at < before && (one_shape || chunk < s.chunks);
    c.dst += at, c.src += at;
    c.bytes = moves ? (uint32_t)(before - at) : 0;
    if (!dst_inside || !src_inside) {
        const bool past = (!dst_inside && to >= p.dst_base) || (!src_inside && from >= p.src_base);
        if (past && layer == 0 && chunk == 0 && first_lane && p.rejected)
            atomicAdd(p.rejected, 1u);
    }
    return c;
}

/* A group of `lanes` threads moves a chunk of up to lanes * loads times 16 bytes: thread t of the group those at 16 t
   and, per load, a group further. */
template <uint32_t lanes, uint32_t loads> KVPRIM_DEVICE void kvpc_load_chunk(uint4 *v, const kvpc_chunk &c, uint32_t at)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++) {
        v[k] = uint4{0, 0, 0, 0};
        if (!c.zero && at + 16 * lanes * k < c.bytes)
            v[k] = kvpc_load16(c.src + at + 16 * lanes * k);
    }
}

template <uint32_t lanes, uint32_t loads>
KVPRIM_DEVICE void kvpc_store_chunk(const uint4 *v, const kvpc_chunk &c, uint32_t at)
{
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (at + 16 * lanes * k < c.bytes)
            kvpc_store16(c.dst + at + 16 * lanes * k, v[k]);
}

/* On the whole GPU: a group for each chunk. */
template <uint32_t lanes, uint32_t loads, bool one_shape>
static __global__ void __launch_bounds__(kvpc_threads) kvpc_move_kernel(const __grid_constant__ kvpc_batch p)
{
    const uint32_t work = blockIdx.x * (kvpc_threads / lanes) + threadIdx.x / lanes, at = 16 * (threadIdx.x % lanes);
    if (work >= (uint32_t)p.total)
        return;
    if (p.wait)
        kvpc_pdl_wait();
    const kvpc_chunk c = kvpc_find_chunk<true, one_shape>(p, work, at == 0);
    uint4 v[loads];
    kvpc_load_chunk<lanes, loads>(v, c, at);
    kvpc_store_chunk<lanes, loads>(v, c, at);
}

/* On few multiprocessors: one chunk after the other. While one is on its way the next is found. */
template <uint32_t lanes, uint32_t loads, bool one_shape>
static __global__ void __launch_bounds__(kvpc_few_threads) kvpc_move_few_kernel(const __grid_constant__ kvpc_batch p)
{
    const uint32_t at = 16 * (threadIdx.x % lanes), groups = gridDim.x * (blockDim.x / lanes);
    uint4 v[loads];
    kvpc_chunk c = {0, 0, 0, false};
    if (p.wait)
        kvpc_pdl_wait();
    for (uint32_t work = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes; work < (uint32_t)p.total;
         work += groups) {
        const kvpc_chunk next = kvpc_find_chunk<true, one_shape>(p, work, at == 0);
        kvpc_store_chunk<lanes, loads>(v, c, at);
        c = next;
        kvpc_load_chunk<lanes, loads>(v, c, at);
    }
    kvpc_store_chunk<lanes, loads>(v, c, at);
}

/* The same for chunks of any alignment and, with 64-bit numbers, for any number of them. */
template <uint32_t lanes, class number>
static __global__ void __launch_bounds__(kvpc_bytes_threads)
    kvpc_move_bytes_kernel(const __grid_constant__ kvpc_batch p)
{
    const uint32_t lane = threadIdx.x % lanes;
    const number groups = (number)gridDim.x * (blockDim.x / lanes);
    if (p.wait)
        kvpc_pdl_wait();
    for (number work = (number)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes; work < (number)p.total;
         work += groups) {
        const kvpc_chunk c = p.shapes == 1 ? kvpc_find_chunk<false, true>(p, work, lane == 0)
                                           : kvpc_find_chunk<false, false>(p, work, lane == 0);
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
   keeps aligned kernels to 32 registers; with the 40 that they take on sm_90 otherwise, 1,536 threads would fit. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
enum { kvpc_unpack_sm_blocks = 4 };
#else
enum { kvpc_unpack_sm_blocks = 0 };
#endif

/* Bytes of parameters. Measured on an H200: up to 4,000 cost nothing, 8 KB 0.3 us a launch, 16 KB 0.7, 32 KB 1.8. */
enum {
    kvpc_few_params = 4000,
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
        uint64_t n64[(bytes - sizeof(kvpc_unpack)) / 8];
    };
};

template <class params> KVPRIM_DEVICE uint64_t kvpc_number(const params &p, const kvpc_numbers &numbers, uint32_t i)
{
    if (numbers.width == 8)
        return numbers.base + numbers.step * p.n64[numbers.at + i];
    const uint32_t n = numbers.width == 0   ? i
                       : numbers.width == 2 ? (uint32_t)p.n16[numbers.at + i]
                                            : p.n32[numbers.at + i];
    return numbers.base + numbers.step * n;
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
        kvpc_copy_words(dst, src, (int32_t)(dst % 16), (int32_t)bytes, first, step, true, true, false);
        return;
    }
    const int32_t left = (int32_t)(bytes - 16 * first);
    uint4 v[kvpc_aligned_loads];
    dst += 16 * first, src += 16 * first;
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        if ((int32_t)(16 * step * k) < left)
            v[k] = kvpc_load16(src + 16 * step * k);
    KVPRIM_UNROLL
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
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++) {
        const uint32_t one = i + k * apart;
        mine[k] = one < h.count && at < (one == h.count - 1 ? h.last_bytes : (uint32_t)h.bytes.base);
        if (one < h.count) {
            src[k] = kvpc_number(p, h.src, one);
            dst[k] = kvpc_number(p, h.dst, one);
        }
    }
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            v[k] = kvpc_load16(src[k] + at);
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            kvpc_store16(dst[k] + at, v[k]);
}

/* Each group of 1 << lanes_shift threads copies a tile, or kvpc_small_fragments small fragments.
   Each thread copies kvpc_aligned_loads or kvpc_bytes_loads words of a tile, one of a small fragment.
   If there are fewer groups than tiles, each group goes on with the tile as many further as there are groups.
   If the launch overlaps the one before, it ends after that one: wait_last. */
template <bool small, bool aligned, uint32_t bytes>
static __global__ void __launch_bounds__(kvpc_unpack_most_threads, aligned ? kvpc_unpack_sm_blocks : 0)
    kvpc_unpack_kernel(const __grid_constant__ kvpc_unpack_params<bytes> p)
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
            const uint32_t length = i == h.count - 1 ? h.last_bytes : (uint32_t)kvpc_number(p, h.bytes, i);
            if (length)
                kvpc_copy_tile<aligned>(kvpc_number(p, h.dst, i), kvpc_number(p, h.src, i), length,
                                        (part * loads << h.lanes_shift) + threadIdx.x % lanes, lanes);
        }
    }
    if (h.wait_last)
        kvpc_pdl_wait();
}

/* ---- launching ---- */

static kvprim_status kvpc_check_launch(const char *function, const kvprim_cuda_launch *launch)
{
    if (launch && launch->pdl != 0 && launch->pdl != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: pdl is %d, neither 0 nor 1", function, (int)launch->pdl);
    if (launch && launch->max_sms < 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: max_sms is %d, less than 0", function, (int)launch->max_sms);
    return KVPRIM_OK;
}

/* Whether every kernel here waits when it is asked to, whichever of this file's architectures the driver picks. */
static bool kvpc_has_pdl(void)
{
#ifdef KVPRIM_CUDA_EMULATE
    return kvprim_emulate_pdl;
#else
    const int architectures[] = {__CUDA_ARCH_LIST__};
    for (int architecture : architectures)
        if (architecture < 900)
            return false;
    return true;
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
#endif

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
    config.stream = launch && launch->stream ? launch->stream : cudaStreamLegacy; /* whatever nvcc makes of NULL */
    config.attrs = &pdl;
    config.numAttrs = launch && launch->pdl && kvpc_has_pdl();
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    const cudaError_t error = cudaLaunchKernelExC(&config, (const void *)kernel, args);
    if (error == cudaSuccess)
        return KVPRIM_OK;
    (void)cudaGetLastError(); /* it is reported here */
    return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s%s: %s", function,
                       kvpc_is_earlier(error) ? "not enqueued, as work before it failed: " : "",
                       cudaGetErrorName(error), cudaGetErrorString(error));
#endif
}

#if defined(KVPRIM_DEBUG) && !defined(KVPRIM_CUDA_EMULATE)
/* ---- KVPRIM_DEBUG: the first and the last byte of what a call may touch is memory that the device can reach ---- */

static kvprim_status kvpc_check_byte(const char *function, const char *name, const char *p)
{
    int device = 0, pageable = 0, peer = 1;
    cudaPointerAttributes a;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device);
    if (error == cudaSuccess)
        error = cudaPointerGetAttributes(&a, p);
    if (error == cudaSuccess && a.type == cudaMemoryTypeDevice && a.device != device)
        error = cudaDeviceCanAccessPeer(&peer, device, a.device);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s (%p): %s: %s", function, name, (const void *)p,
                           cudaGetErrorName(error), cudaGetErrorString(error));
    }
    if (a.type == cudaMemoryTypeUnregistered && !pageable)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "%s: %s reaches %p, which the GPU cannot: ordinary host memory, or past an allocation",
                           function, name, (const void *)p);
    if (!peer)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "%s: %s (%p) is memory of device %d, which device %d has no access to", function, name,
                           (const void *)p, a.device, device);
    return KVPRIM_OK;
}

static kvprim_status kvpc_check_bytes(const char *function, const char *name, const void *p, int64_t bytes)
{
    if (!p || bytes < 1)
        return KVPRIM_OK;
    const kvprim_status status = kvpc_check_byte(function, name, (const char *)p);
    return status == KVPRIM_OK ? kvpc_check_byte(function, name, (const char *)p + bytes - 1) : status;
}

/* used: rows that can be touched. */
static kvprim_status kvpc_check_table(const char *function, const char *name, const kvprim_table *t, int64_t row_bytes,
                                      int64_t used)
{
    if (!t->data || used < 1)
        return KVPRIM_OK;
    const char *const last = (const char *)kvprim_table_row(t, used - 1);
    return kvpc_check_bytes(function, name, t->data,
                            last - (const char *)t->data + (t->heads - 1) * t->head_stride + row_bytes / t->heads);
}

static kvprim_status kvpc_check_indices(const char *function, const char *name, const void *index,
                                        kvprim_index_type type, int64_t count)
{
    return kvpc_check_bytes(function, name, index, count * (type == KVPRIM_I64 ? 8 : 4));
}

static kvprim_status kvpc_check_memory(const kvprim_gather_desc *d)
{
    const char *const function = "kvprim_cuda_gather";
    kvprim_status status = kvpc_check_table(function, "dst", &d->dst, d->row_bytes, d->count);
    if (status == KVPRIM_OK)
        status = kvpc_check_table(function, "src", &d->src, d->row_bytes, d->src.rows);
    if (status == KVPRIM_OK)
        status = kvpc_check_indices(function, "index", d->index, d->index_type, d->count);
    return status == KVPRIM_OK ? kvpc_check_bytes(function, "rejected", d->rejected, 4) : status;
}

static kvprim_status kvpc_check_memory(const kvprim_store_desc *d)
{
    const char *const function = "kvprim_cuda_store";
    const kvprim_table none = {};
    kvprim_status status = kvpc_check_table(function, "k_cache", &d->k_cache, d->k_bytes, d->k_cache.rows);
    if (status == KVPRIM_OK)
        status = kvpc_check_table(function, "v_cache", &d->v_cache, d->v_bytes, d->v_cache.rows);
    if (status == KVPRIM_OK)
        status = kvpc_check_table(function, "k", &d->k, d->k_bytes, d->count);
    if (status == KVPRIM_OK)
        status = kvpc_check_table(function, "v", d->v_cache.data ? &d->v : &none, d->v_bytes, d->count);
    if (status == KVPRIM_OK)
        status = kvpc_check_indices(function, "slot", d->slot, d->slot_type, d->count);
    return status == KVPRIM_OK ? kvpc_check_bytes(function, "rejected", d->rejected, 4) : status;
}

static kvprim_status kvpc_check_memory(const kvprim_transfer_desc *d)
{
    const char *const function = "kvprim_cuda_transfer";
    kvprim_status status = KVPRIM_OK;
    for (int32_t l = 0; l < d->layers && status == KVPRIM_OK; l++) {
        kvprim_table dst = d->dst, src = d->src;
        dst.data = d->dst_layers ? d->dst_layers[l] : (char *)d->dst.data + l * d->dst_layer_stride;
        src.data = d->src_layers ? d->src_layers[l] : (char *)d->src.data + l * d->src_layer_stride;
        status = kvpc_check_table(function, "dst", &dst, d->row_bytes, d->dst_index ? d->dst.rows : d->count);
        if (status == KVPRIM_OK)
            status = kvpc_check_table(function, "src", &src, d->row_bytes, d->src_index ? d->src.rows : d->count);
    }
    if (status == KVPRIM_OK)
        status = kvpc_check_indices(function, "dst_index", d->dst_index, d->index_type, d->count);
    if (status == KVPRIM_OK)
        status = kvpc_check_indices(function, "src_index", d->src_index, d->index_type, d->count);
    return status == KVPRIM_OK ? kvpc_check_bytes(function, "rejected", d->rejected, 4) : status;
}

static kvprim_status kvpc_check_memory(const kvprim_unpack_desc *d)
{
    const char *const function = "kvprim_cuda_unpack";
    const kvprim_status status = kvpc_check_bytes(function, "dst", d->dst, (int64_t)d->dst_bytes);
    return status == KVPRIM_OK ? kvpc_check_bytes(function, "src", d->src, (int64_t)d->src_bytes) : status;
}
#else
static kvprim_status kvpc_check_memory(const void *)
{
    return KVPRIM_OK;
}
#endif

/* What a gather and a store have in common, resolved. dst and src as the rows go; the second table is V's. */
typedef struct kvpc_job {
    const char *function;
    const kvprim_table *dst[2], *src[2];
    int64_t row_bytes[2];
    int tables, gather;
    const void *index;
    kvprim_index_type type;
    int64_t base, count, rows;
    uint32_t *rejected;
    const kvprim_cuda_launch *launch;
} kvpc_job;

/* Pages that follow each other without a gap are no pages, and heads that do so are one. */
static kvprim_table kvpc_simplify(const kvprim_table *table, int64_t row_bytes)
{
    kvprim_table t = *table;
    if (t.heads > 1 && t.head_stride == row_bytes / t.heads)
        t.heads = 1;
    if (t.page_rows > 0 && t.page_stride / t.page_rows == t.stride && t.page_stride % t.page_rows == 0)
        t.page_rows = 0;
    return t;
}

/* Whether the kernels without pages and heads can take a side. *bits collects what must be a multiple of the word. */
static bool kvpc_is_plain_side(const kvprim_table *table, int64_t row_bytes, uint64_t *bits)
{
    const kvprim_table t = kvpc_simplify(table, row_bytes);
    *bits |= (uint64_t)(uintptr_t)t.data | (uint64_t)t.stride;
    return t.heads == 1 && t.page_rows == 0 && t.stride <= UINT32_MAX && row_bytes <= 1 << 20;
}

/* And the whole job: the number of threads fits 31 bits, and an index less the base cannot wrap into the table. */
static bool kvpc_is_plain(const kvpc_job *job, uint64_t *bits)
{
    const int64_t int32_rows = (int64_t)1 << 31;
    *bits = 0;
    if (job->launch && job->launch->max_sms > 0)
        return false;
    for (int m = 0; m < job->tables; m++)
        if (!kvpc_is_plain_side(job->dst[m], job->row_bytes[m], bits) ||
            !kvpc_is_plain_side(job->src[m], job->row_bytes[m], bits) || job->count > 1 << 24 ||
            job->count * (1 + job->row_bytes[m] / 512) > 1 << 24)
            return false;
    return job->base >= 0 && job->base <= INT32_MAX && job->rows <= int32_rows && job->base <= int32_rows - job->rows;
}

static kvpc_divisor kvpc_divisor_of(int64_t by)
{
    const int64_t most = (int64_t)1 << 31;
    kvpc_divisor d = {(uint64_t)by, 0, 0};
    if (by < 1 || by > most) /* then whatever is below 2^31 is less */
        return d;
    while ((int64_t)1 << d.shift < by)
        d.shift++;
    const uint64_t one = (uint64_t)1 << 31;
    d.magic = (uint32_t)((int64_t)1 << d.shift == by ? one : ((one << d.shift) + d.by - 1) / d.by); /* mostly so */
    return d;
}

/* `parts` groups of threads share a row. Returns the number of blocks. */
static uint32_t kvpc_share(kvpc_plain *p, uint32_t parts, uint32_t lanes)
{
    p->parts = kvpc_divisor_of(parts);
    p->parts_shift = p->parts.shift;
    const uint64_t threads = (uint64_t)p->count * parts * lanes;
    return (uint32_t)((threads + kvpc_threads - 1) / kvpc_threads);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_gather(const kvpc_job *job, kvpc_plain *p)
{
    const uint32_t unit = 16 * lanes * loads, blocks = kvpc_share(p, (p->row_bytes[0] + unit - 1) / unit, lanes);
    static void (*const kernels[])(kvpc_plain) = {
        kvpc_gather_kernel<lanes, loads, exact, false, false>, kvpc_gather_kernel<lanes, loads, exact, false, true>,
        kvpc_gather_kernel<lanes, loads, exact, true, false>, kvpc_gather_kernel<lanes, loads, exact, true, true>};
    return kvpc_start(job->function, kernels[2 * p->wide + p->pdl], blocks, kvpc_threads, *p, job->launch);
}

template <uint32_t lanes, uint32_t loads, bool exact>
static kvprim_status kvpc_start_store(const kvpc_job *job, kvpc_plain *p)
{
    const uint32_t most = p->row_bytes[0] > p->row_bytes[1] ? p->row_bytes[0] : p->row_bytes[1];
    const uint32_t unit = 16 * lanes * loads, blocks = kvpc_share(p, (most + unit - 1) / unit, lanes);
    static void (*const kernels[])(kvpc_plain) = {
        kvpc_store_kernel<lanes, loads, 1, exact, false, false>, kvpc_store_kernel<lanes, loads, 1, exact, false, true>,
        kvpc_store_kernel<lanes, loads, 1, exact, true, false>,  kvpc_store_kernel<lanes, loads, 1, exact, true, true>,
        kvpc_store_kernel<lanes, loads, 2, exact, false, false>, kvpc_store_kernel<lanes, loads, 2, exact, false, true>,
        kvpc_store_kernel<lanes, loads, 2, exact, true, false>,  kvpc_store_kernel<lanes, loads, 2, exact, true, true>};
    return kvpc_start(job->function, kernels[4 * (p->tables - 1) + 2 * p->wide + p->pdl], blocks, kvpc_threads, *p,
                      job->launch);
}

static kvprim_status kvpc_start_bytes(const kvpc_job *job, kvpc_plain *p)
{
    const uint32_t unit = 16 * kvpc_bytes_lanes * kvpc_bytes_loads;
    p->parts_of_k = (p->row_bytes[0] + 15 + unit - 1) / unit; /* a row may lie in one word more than it fills */
    const uint32_t of_v = p->tables == 2 ? (p->row_bytes[1] + 15 + unit - 1) / unit : 0;
    const uint32_t blocks = kvpc_share(p, p->parts_of_k + of_v, kvpc_bytes_lanes);
    return kvpc_start(job->function, kvpc_bytes_kernel, blocks, kvpc_threads, *p, job->launch);
}

/* Whether rows are written that begin or end inside a granule which no other row of the same call completes. */
static uint32_t kvpc_has_ragged_rows(const kvpc_job *job)
{
    uint64_t bits = 0;
    for (int m = 0; m < job->tables; m++)
        if (!job->gather || job->dst[m]->stride != job->row_bytes[m])
            bits |=
                (uint64_t)(uintptr_t)job->dst[m]->data | (uint64_t)job->dst[m]->stride | (uint64_t)job->row_bytes[m];
    return bits % kvpc_granule != 0;
}

/* Whether parts of `unit` bytes fill rows of row_bytes and are a power of two. */
static bool kvpc_fills(int64_t row_bytes, int64_t unit)
{
    const int64_t parts = row_bytes / unit;
    return parts > 0 && parts * unit == row_bytes && (parts & (parts - 1)) == 0;
}

/* Two loads per thread, a whole warp where a row has that much: more in flight gains nothing. Short rows take one load
   per thread until there are enough of them to fill the GPU. With programmatic dependent launch a GPU starts less than
   one block per nanosecond: blocks must not be small where there are many. */
static kvprim_status kvpc_gather_by_size(const kvpc_job *job, kvpc_plain *p)
{
    const int64_t row_bytes = job->row_bytes[0];
    const bool few = job->count * row_bytes <= kvpc_few_gathered;
    if (!p->fetch) {
        if (kvpc_fills(row_bytes, 1024))
            return kvpc_start_gather<32, 2, true>(job, p);
        if (row_bytes == 512)
            return few ? kvpc_start_gather<32, 1, true>(job, p) : kvpc_start_gather<16, 2, true>(job, p);
        if (row_bytes == 256)
            return few ? kvpc_start_gather<16, 1, true>(job, p) : kvpc_start_gather<8, 2, true>(job, p);
        if (row_bytes == 128 && job->count > kvpc_many_rows)
            return kvpc_start_gather<4, 2, true>(job, p);
        if (row_bytes == 128)
            return kvpc_start_gather<8, 1, true>(job, p);
    }
    if (row_bytes <= 64)
        return kvpc_start_gather<4, 1, false>(job, p);
    if (row_bytes <= 128)
        return kvpc_start_gather<8, 1, false>(job, p);
    return kvpc_start_gather<8, 2, false>(job, p);
}

/* One load per thread and table, two where the rows are neither few nor short. */
static kvprim_status kvpc_store_by_size(const kvpc_job *job, kvpc_plain *p)
{
    const int64_t row_bytes = job->row_bytes[0];
    if (!p->fetch && (job->tables == 1 || job->row_bytes[1] == row_bytes)) {
        if (kvpc_fills(row_bytes, 1024) && job->count * row_bytes > kvpc_few_bytes)
            return kvpc_start_store<32, 2, true>(job, p);
        if (kvpc_fills(row_bytes, 512))
            return kvpc_start_store<32, 1, true>(job, p);
        if (row_bytes == 256)
            return kvpc_start_store<16, 1, true>(job, p);
        if (row_bytes == 128)
            return kvpc_start_store<8, 1, true>(job, p);
    }
    if (row_bytes <= 128 && (job->tables == 1 || job->row_bytes[1] <= 128))
        return kvpc_start_store<8, 1, false>(job, p);
    return kvpc_start_store<16, 1, false>(job, p);
}

static kvprim_status kvpc_move_plain(const kvpc_job *job, uint64_t bits)
{
    kvpc_plain p = {};
    for (int m = 0; m < job->tables; m++) {
        p.pair[m].dst = (uint64_t)(uintptr_t)job->dst[m]->data;
        p.pair[m].src = (uint64_t)(uintptr_t)job->src[m]->data;
        p.pair[m].dst_stride = (uint32_t)job->dst[m]->stride;
        p.pair[m].src_stride = (uint32_t)job->src[m]->stride;
        p.row_bytes[m] = (uint32_t)job->row_bytes[m];
    }
    p.index = (uint64_t)(uintptr_t)job->index;
    p.rejected = job->rejected;
    p.rows = (uint32_t)job->rows;
    p.base = (uint32_t)job->base;
    p.count = (uint32_t)job->count;
    p.pdl = job->launch && job->launch->pdl;
    p.wide = job->type == KVPRIM_I64;
    p.gather = job->gather != 0;
    p.tables = (uint32_t)job->tables;
    p.fetch = kvpc_has_ragged_rows(job);
    if (bits % 16 != 0)
        return kvpc_start_bytes(job, &p);
    return job->gather ? kvpc_gather_by_size(job, &p) : kvpc_store_by_size(job, &p);
}

static int64_t kvpc_gcd(int64_t a, int64_t b)
{
    return b ? kvpc_gcd(b, a % b) : a;
}

/* *bits collects what must be a multiple of 16 for the kernel of aligned chunks. */
static kvpc_side kvpc_side_of(const kvprim_table *t, int64_t row_bytes, int64_t unit, uint64_t *bits)
{
    kvpc_side s = {t->stride, 0, 0, kvpc_divisor_of(t->page_rows), kvpc_divisor_of(0)};
    if (t->page_rows > 0)
        s.page_step = (int64_t)((uint64_t)t->page_stride - (uint64_t)t->page_rows * (uint64_t)t->stride);
    if (t->heads > 1) {
        const int64_t piece = row_bytes / t->heads;
        s.head = kvpc_divisor_of(piece / unit);
        s.head_step = t->head_stride - piece;
    }
    *bits |= (uint64_t)s.stride | (uint64_t)s.page_step | (uint64_t)s.head_step | (uint64_t)unit;
    return s;
}

static void kvpc_set_shape(kvpc_shape *s, const kvprim_table *dst, const kvprim_table *src, int64_t row_bytes,
                           uint64_t *bits)
{
    const kvprim_table to = kvpc_simplify(dst, row_bytes), from = kvpc_simplify(src, row_bytes);
    const int64_t unit = kvpc_gcd(row_bytes / to.heads, row_bytes / from.heads);
    s->dst = kvpc_side_of(&to, row_bytes, unit, bits);
    s->src = kvpc_side_of(&from, row_bytes, unit, bits);
    s->unit_bytes = (uint64_t)unit;
    s->units = (uint64_t)(row_bytes / unit);
}

/* Cuts rows into chunks. `aligned`: nothing begins or ends inside 16 bytes; otherwise a part is by as much longer. */
static void kvpc_cut(kvpc_batch *p, uint32_t part_bytes, bool aligned, int32_t layers)
{
    uint64_t most = 0;
    p->part_bytes = aligned ? part_bytes : part_bytes + 16;
    for (int m = 0; m < p->shapes; m++) {
        kvpc_shape *const s = &p->shape[m];
        const uint64_t touched = aligned ? s->unit_bytes : s->unit_bytes + 15;
        s->parts = kvpc_divisor_of((int64_t)((touched + p->part_bytes - 1) / p->part_bytes));
        s->chunks = s->units * s->parts.by;
        most = s->chunks > most ? s->chunks : most;
    }
    p->chunks = kvpc_divisor_of((int64_t)most);
    p->total = most * p->count.by * (uint64_t)layers;
}

typedef void kvpc_kernel(kvpc_batch);

/* Blocks for all chunks; with max_sms no more than that many, of as many threads as there is work for. */
static kvprim_status kvpc_start_groups(const char *function, kvpc_kernel *kernel, uint32_t most_threads, uint32_t lanes,
                                       const kvpc_batch *p, const kvprim_cuda_launch *launch)
{
    const uint64_t limit = launch && launch->max_sms > 0 ? (uint64_t)launch->max_sms : 0;
    uint32_t threads = limit ? most_threads : (uint32_t)kvpc_threads;
    while (threads > kvpc_threads && p->total / (threads / lanes) < limit)
        threads /= 2;
    const uint64_t wanted = (p->total + threads / lanes - 1) / (threads / lanes), most = limit ? limit : INT32_MAX;
    return kvpc_start(function, kernel, (uint32_t)(wanted < most ? wanted : most), threads, *p, launch);
}

/* Rows that begin and end at multiples of 16 bytes. */
template <bool one_shape>
static kvprim_status kvpc_start_aligned(const char *function, kvpc_batch *p, int32_t layers, uint64_t unit,
                                        const kvprim_cuda_launch *launch)
{
    const bool few = launch && launch->max_sms > 0;
    const uint32_t loads = few ? 4 : 2, lanes = unit <= 128 * loads ? 8 : unit <= 256 * loads ? 16 : 32;
    kvpc_kernel *const few_kernel = lanes == 8    ? kvpc_move_few_kernel<8, 4, one_shape>
                                    : lanes == 16 ? kvpc_move_few_kernel<16, 4, one_shape>
                                                  : kvpc_move_few_kernel<32, 4, one_shape>;
    kvpc_kernel *const kernel = lanes == 8    ? kvpc_move_kernel<8, 2, one_shape>
                                : lanes == 16 ? kvpc_move_kernel<16, 2, one_shape>
                                              : kvpc_move_kernel<32, 2, one_shape>;
    kvpc_cut(p, 16 * lanes * loads, true, layers);
    return kvpc_start_groups(function, few ? few_kernel : kernel, kvpc_few_threads, lanes, p, launch);
}

/* Any rows. large: more rows or chunks than the other kernels count. */
static kvprim_status kvpc_start_unaligned(const char *function, kvpc_batch *p, int32_t layers, uint64_t unit,
                                          bool large, const kvprim_cuda_launch *launch)
{
    const uint32_t lanes = large || unit > 256 ? 32 : 8;
    kvpc_kernel *const kernel = large        ? kvpc_move_bytes_kernel<32, uint64_t>
                                : lanes == 8 ? kvpc_move_bytes_kernel<8, uint32_t>
                                             : kvpc_move_bytes_kernel<32, uint32_t>;
    kvpc_cut(p, lanes == 8 ? 256 : 2048, false, layers);
    return kvpc_start_groups(function, kernel, kvpc_bytes_threads, lanes, p, launch);
}

/* Starts a move of some layers; the rows' shapes are not cut yet. */
static kvprim_status kvpc_start_move(const char *function, kvpc_batch *p, int32_t layers, uint64_t bits,
                                     const kvprim_cuda_launch *launch)
{
    const uint64_t most = (uint64_t)1 << 31;
    uint64_t unit = 0, chunks = 0;
    for (int m = 0; m < p->shapes; m++) {
        const uint64_t upper = p->shape[m].units * (p->shape[m].unit_bytes / 256 + 1);
        unit = p->shape[m].unit_bytes > unit ? p->shape[m].unit_bytes : unit;
        chunks = upper > chunks ? upper : chunks;
    }
    for (int l = 0; l < layers; l++)
        bits |= p->layer[l].dst | p->layer[l].src;
    p->wait = launch ? launch->pdl : 0;
    const bool large = p->dst_rows > most || p->src_rows > most || chunks >= most / p->count.by / (uint64_t)layers;
    if (large || bits % 16 != 0)
        return kvpc_start_unaligned(function, p, layers, unit, large, launch);
    return p->shapes == 1 ? kvpc_start_aligned<true>(function, p, layers, unit, launch)
                          : kvpc_start_aligned<false>(function, p, layers, unit, launch);
}

static kvprim_status kvpc_move_any(const kvpc_job *job)
{
    kvpc_batch p;
    uint64_t bits = 0;
    for (int m = 0; m < job->tables; m++) {
        kvpc_set_shape(&p.shape[m], job->dst[m], job->src[m], job->row_bytes[m], &bits);
        p.layer[m].dst = (uint64_t)(uintptr_t)job->dst[m]->data;
        p.layer[m].src = (uint64_t)(uintptr_t)job->src[m]->data;
    }
    p.dst_index = job->gather ? 0 : (uint64_t)(uintptr_t)job->index;
    p.src_index = job->gather ? (uint64_t)(uintptr_t)job->index : 0;
    p.dst_rows = (uint64_t)(job->gather ? job->count : job->rows);
    p.src_rows = (uint64_t)(job->gather ? job->rows : job->count);
    p.dst_base = job->gather ? 0 : job->base;
    p.src_base = job->gather ? job->base : 0;
    p.count = kvpc_divisor_of(job->count);
    p.rejected = job->rejected;
    p.wide = job->type == KVPRIM_I64;
    p.zero = job->gather;
    p.shapes = job->tables == 2 && memcmp(&p.shape[0], &p.shape[1], offsetof(kvpc_shape, chunks)) != 0 ? 2 : 1;
    return kvpc_start_move(job->function, &p, job->tables, bits, job->launch);
}

static kvprim_status kvpc_move(const kvpc_job *job)
{
    uint64_t bits;
    return kvpc_is_plain(job, &bits) ? kvpc_move_plain(job, bits) : kvpc_move_any(job);
}

/* Where neither side is indexed, rows that follow each other without a gap on both sides become one. */
static void kvpc_join_rows(kvprim_transfer_desc *d)
{
    const kvprim_table dst = kvpc_simplify(&d->dst, d->row_bytes), src = kvpc_simplify(&d->src, d->row_bytes);
    const int64_t rows = kvpc_gcd(kvpc_gcd(dst.page_rows, src.page_rows), d->count);
    if (d->dst_index || d->src_index || dst.heads > 1 || src.heads > 1 || dst.stride != d->row_bytes ||
        src.stride != d->row_bytes)
        return;
    d->dst = dst, d->src = src;
    d->dst.stride = d->src.stride = d->row_bytes *= rows;
    d->dst.page_rows /= rows, d->src.page_rows /= rows;
    d->count /= rows;
}

static uint64_t kvpc_layer_of(const kvprim_table *table, void *const *layers, int64_t layer_stride, int64_t l)
{
    if (layers)
        return (uint64_t)(uintptr_t)layers[l];
    return (uint64_t)(uintptr_t)table->data + (uint64_t)l * (uint64_t)layer_stride;
}

/* As many layers at a time as a launch's parameters hold. */
static kvprim_status kvpc_transfer(kvprim_transfer_desc *d, const kvprim_cuda_launch *launch)
{
    kvprim_status status = KVPRIM_OK;
    kvpc_join_rows(d);
    for (int64_t first = 0; first < d->layers && status == KVPRIM_OK; first += kvpc_layers) {
        const int32_t left = (int32_t)(d->layers - first), layers = left < kvpc_layers ? left : kvpc_layers;
        uint64_t bits = 0;
        kvpc_batch p;
        kvpc_set_shape(&p.shape[0], &d->dst, &d->src, d->row_bytes, &bits);
        for (int32_t l = 0; l < layers; l++) {
            p.layer[l].dst = kvpc_layer_of(&d->dst, d->dst_layers, d->dst_layer_stride, first + l);
            p.layer[l].src = kvpc_layer_of(&d->src, d->src_layers, d->src_layer_stride, first + l);
        }
        p.dst_index = (uint64_t)(uintptr_t)d->dst_index;
        p.src_index = (uint64_t)(uintptr_t)d->src_index;
        p.dst_rows = (uint64_t)(d->dst_index ? d->dst.rows : d->count);
        p.src_rows = (uint64_t)(d->src_index ? d->src.rows : d->count);
        p.dst_base = p.src_base = 0;
        p.count = kvpc_divisor_of(d->count);
        p.rejected = first == 0 ? d->rejected : NULL;
        p.wide = d->index_type == KVPRIM_I64;
        p.zero = 0;
        p.shapes = 1;
        status = kvpc_start_move("kvprim_cuda_transfer", &p, layers, bits, launch);
    }
    return status;
}

/* >>impl_unpack_host ----------------------------------------------------------------------------------------------- */

enum {
    kvpc_chunk_count = 128,  /* fragments that are handed out at a time: they stay in the processor's first cache */
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
    const kvprim_unpack_desc *desc;
    const kvprim_cuda_launch *launch;
    const kvprim_fragment *next; /* to hand out */
    kvprim_fragment rest;        /* what was cut off, to hand out before *next */
    uint64_t left, last_bytes;   /* fragments that are not launched yet, and bytes of the last of them */
    uint64_t long_bit;           /* bit 63 is set if a fragment has more than kvpc_direct_bytes */
    kvpc_column src, dst, bytes; /* step of bytes is 0, and its differ leaves the last fragment out */
    kvpc_unpack head;            /* what all launches have in common */
    uint32_t lead;               /* bytes, at most, between a 16-byte boundary of dst and a fragment's first byte */
    bool merge, small, aligned, started, overlap;
    kvprim_fragment merged[kvpc_chunk_count];
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
        *count = kvpc_merge(job, *count < kvpc_chunk_count ? *count : (uint64_t)kvpc_chunk_count);
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
    job->src.base = (uint64_t)(uintptr_t)job->desc->src;
    job->dst.base = (uint64_t)(uintptr_t)job->desc->dst;
    job->bytes.differ |= even ? 0 : job->last_bytes ^ job->bytes.first;
    const uint64_t src = job->src.base + job->src.first, src_steps = job->src.step | job->src.differ;
    const uint64_t dst = job->dst.base + job->dst.first, dst_steps = job->dst.step | job->dst.differ;
    job->aligned = (src | src_steps | dst | dst_steps | any_bytes) % 16 == 0;
    job->lead = dst_steps % 16 ? 15 : (uint32_t)(dst % 16);
    job->small = even && job->aligned && most <= kvpc_small_bytes;
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
    const uint64_t room = params_bytes - sizeof *h - 32; /* 32: padding, and the table's last two entries */
    const uint64_t stored = h->src.width + h->dst.width + h->bytes.width + h->first_tile.width;
    const uint64_t most = ((uint64_t)1 << 30) / h->first_tile.step;
    const uint64_t fit = stored ? kvpc_table_share * room / (kvpc_table_share * stored + h->first_tile.width) : most;
    return fit < most ? fit : most;
}

template <class number>
static void kvpc_store_numbers(void *data, const kvpc_numbers *numbers, uint64_t at, const kvprim_fragment *f,
                               uint64_t count, uint64_t kvprim_fragment::*member, uint32_t shift)
{
    number *const to = (number *)data + numbers->at + at;
    for (uint64_t i = 0; i < count; i++)
        to[i] = (number)(f[i].*member >> shift);
}

/* Stores one column of `count` fragments, as numbers `at`, at + 1 ... */
static void kvpc_store_column(const kvpc_column *c, kvpc_numbers *numbers, void *data, uint64_t at,
                              const kvprim_fragment *f, uint64_t count, uint64_t kvprim_fragment::*member)
{
    if (numbers->width == 0 && at == 0)
        numbers->base = c->base + f->*member;
    if (numbers->width == 2)
        kvpc_store_numbers<uint16_t>(data, numbers, at, f, count, member, c->shift);
    if (numbers->width == 4)
        kvpc_store_numbers<uint32_t>(data, numbers, at, f, count, member, c->shift);
    if (numbers->width == 8)
        kvpc_store_numbers<uint64_t>(data, numbers, at, f, count, member, c->shift);
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
    uint32_t bytes = 0, tiles = h->count * (uint32_t)h->first_tile.step;
    kvpc_numbers *const all[] = {&h->src, &h->dst, &h->bytes, &h->first_tile};
    for (kvpc_numbers *const numbers : all)
        if (numbers->width) {
            numbers->at = bytes / numbers->width;
            bytes = (bytes + h->count * numbers->width + 7) / 8 * 8;
        }
    h->table = bytes / 4;
    if (h->first_tile.width)
        tiles = 0;
    for (uint64_t at = 0, count; at < h->count; at += count) {
        count = h->count - at < kvpc_chunk_count ? h->count - at : (uint64_t)kvpc_chunk_count;
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

/* Launches as many fragments as fit the parameters. The launches of a batch do not depend on each other: with `overlap`
   each starts as soon as the one before has started, and ends after it, so what follows in the stream follows all. */
template <uint32_t params_bytes> static kvprim_status kvpc_unpack_some(kvpc_unpack_job *job)
{
    kvpc_unpack_params<params_bytes> p;
    kvpc_unpack *const h = &p.head;
    kvprim_cuda_launch launch = {};
    if (job->launch)
        launch = *job->launch;
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
    return kvpc_start("kvprim_cuda_unpack",
                      job->small     ? kvpc_unpack_kernel<true, true, params_bytes>
                      : job->aligned ? kvpc_unpack_kernel<false, true, params_bytes>
                                     : kvpc_unpack_kernel<false, false, params_bytes>,
                      kvpc_unpack_blocks(job, h, threads, (uint32_t)launch.max_sms), threads, p, &launch);
}

static kvprim_status kvpc_unpack_fragments(const kvprim_unpack_desc *d, const kvprim_cuda_launch *launch)
{
    kvprim_status status = KVPRIM_OK;
    kvpc_unpack_job job; /* not all zeros: `merged` is 3 KB */
    job.desc = d;
    job.launch = launch;
    job.started = false;
    job.overlap = kvpc_has_pdl() && !(launch && launch->max_sms > 0);
    kvpc_survey(&job, false);
    const uint64_t any_bytes = job.bytes.first | job.bytes.differ | job.last_bytes;
    if (any_bytes == 0)
        return KVPRIM_OK;
    if (any_bytes > kvpc_most_bytes || kvpc_is_mergeable(&job))
        kvpc_survey(&job, true);
    kvpc_plan_unpack(&job);
    while (status == KVPRIM_OK && job.left > 0)
        if (job.left <= kvpc_fragments_in(&job.head, kvpc_few_params))
            status = kvpc_unpack_some<kvpc_few_params>(&job);
        else if (job.left <= kvpc_fragments_in(&job.head, kvpc_more_params))
            status = kvpc_unpack_some<kvpc_more_params>(&job);
        else
            status = kvpc_unpack_some<kvpc_most_params>(&job);
    return status;
}

#ifdef __cplusplus
extern "C" {
#endif

KVPRIM_API kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_gather");
    kvprim_gather_desc d;
    kvprim_status status = kvprim_gather_check(desc, &d);
    if (status == KVPRIM_OK)
        status = kvpc_check_launch("kvprim_cuda_gather", launch);
    if (status == KVPRIM_OK && d.count > 0)
        status = kvpc_check_memory(&d);
    if (status != KVPRIM_OK || d.count == 0)
        return status;
    const kvpc_job job = {
        "kvprim_cuda_gather", {&d.dst, NULL}, {&d.src, NULL}, {d.row_bytes, 0}, 1,          1,     d.index,
        d.index_type,         d.index_base,   d.count,        d.src.rows,       d.rejected, launch};
    return kvpc_move(&job);
}

KVPRIM_API kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_store");
    kvprim_store_desc d;
    kvprim_status status = kvprim_store_check(desc, &d);
    if (status == KVPRIM_OK)
        status = kvpc_check_launch("kvprim_cuda_store", launch);
    if (status == KVPRIM_OK && d.count > 0)
        status = kvpc_check_memory(&d);
    if (status != KVPRIM_OK || d.count == 0)
        return status;
    const kvpc_job job = {"kvprim_cuda_store",
                          {&d.k_cache, &d.v_cache},
                          {&d.k, &d.v},
                          {d.k_bytes, d.v_bytes},
                          d.v_cache.data ? 2 : 1,
                          0,
                          d.slot,
                          d.slot_type,
                          d.slot_base,
                          d.count,
                          d.k_cache.rows,
                          d.rejected,
                          launch};
    return kvpc_move(&job);
}

KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_transfer");
    kvprim_transfer_desc d;
    kvprim_status status = kvprim_transfer_check(desc, &d);
    if (status == KVPRIM_OK)
        status = kvpc_check_launch("kvprim_cuda_transfer", launch);
    if (status == KVPRIM_OK && d.count > 0)
        status = kvpc_check_memory(&d);
    return status != KVPRIM_OK || d.count == 0 ? status : kvpc_transfer(&d, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_unpack");
    kvprim_status status = kvprim_unpack_check(desc);
    if (status != KVPRIM_OK || desc->count == 0)
        return status;
    const kvprim_unpack_desc d = *desc;
    status = kvpc_check_launch("kvprim_cuda_unpack", launch);
    if (status == KVPRIM_OK)
        status = kvpc_check_memory(&d);
    return status == KVPRIM_OK ? kvpc_unpack_fragments(&d, launch) : status;
}

#ifdef __cplusplus
}
#endif
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

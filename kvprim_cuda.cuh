/* SPDX-License-Identifier: MIT */
/* kvprim_cuda.cuh: the calls of kvprim.h that move rows, on the GPU, callable from C. CUDA 12 and sm_75, or newer.

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
       >>gpu_move    gather, store, slots, transfer, unpack, unpack_meta, copy, fetch, and checked moves
       >>device      device functions for your own kernels: where rows lie, copies by a warp
       >>impl        the implementation; of each kind of call first its kernels, then which of them it takes:
           what all use    >>impl_device (loads, stores, divisors)   >>impl_launch (errors, kinds of memory)
                           >>impl_debug   >>impl_run (the table: which plan and which kernel a call takes)
           plain rows      >>impl_row_kernels   >>impl_row_plan
           all other moves >>impl_move_find   >>impl_move_kernels   >>impl_move_plan (also the copy engine)
                           >>impl_move_lists (device layers, host's indices)   >>impl_move_batches (several moves)
                           >>impl_move_lines (short units over the link)
           conversions     >>impl_convert_elements (in registers)
           ... plain rows  >>impl_convert_rows   >>impl_convert_kernels   >>impl_convert_tiles (scales are computed)
                           >>impl_convert_plan   >>impl_convert_shape
           ... other moves >>impl_convert_moves   >>impl_convert_spans   >>impl_convert_move_plan
           fragments       >>impl_unpack_kernels   >>impl_unpack_survey   >>impl_unpack_host   >>impl_unpack_run
           ... that the GPU reads   >>impl_meta_kernel   >>impl_meta_host
           slots, fetch    >>impl_slots   >>impl_fetch (entries)   >>impl_fetch_slots   >>impl_fetch_kernel
           the functions   >>impl_calls

   In kvprim.h: all checks of descriptors (>>impl_check), the index rule and the page arithmetic (>>impl_rows), and what
   a new element type touches (>>impl_elements).

   Rules that hold for every function here
       Errors     A function checks its descriptor as kvprim.h does before it enqueues anything, with the same status.
                  KVPRIM_ERROR_CUDA: CUDA refused the launch; kvprim_last_error() says why, and whether earlier work has
                  failed, and CUDA's own last error is cleared. CUDA reports an error that happens on the GPU later (a
                  host pointer in a table, for instance). KVPRIM_DEBUG finds wrong pointers at the call;
                  kvprim_cuda_transfer finds some of them without it. If a call takes several launches, those before a
                  refused one are enqueued. Each text begins with the function's name.
       Stream     Calls only enqueue, on the given stream of the current device. A graph may capture them. CUDA may load
                  a kernel's code at its first launch (CUDA_MODULE_LOADING=EAGER: before).
       Threads    Any number of threads may call every function at once.
       Memory     The GPU reads and writes tables, indices, scales and counters: device memory, managed memory, pinned
                  host memory that the device can address, or another GPU's memory to which it has peer access or a
                  mapped window, valid until the work is done. Descriptors are host memory, free to reuse on return.
       Alignment  Any, except that elements that convert are aligned as their type, and so are scales. Multiples of 16
                  bytes (bases, strides, row sizes) are the fastest. Of the bytes around a row, the GPU only reads those
                  in the same aligned 16 bytes, and writes none.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_CUDA_IMPLEMENTATION  one translation unit: implements this header only; another unit must implement kvprim.h.
                               Like KVPRIM_IMPLEMENTATION it needs nvcc, or clang for CUDA.
   KVPRIM_EXPORT, KVPRIM_STATIC, KVPRIM_API   every translation unit, as in kvprim.h
   KVPRIM_DEBUG                the implementing unit: every call asks CUDA whether the device can reach the memory that
                               the descriptor names (some microseconds); KVPRIM_ERROR_ARGUMENT if it cannot
   KVPRIM_NO_CONVERT           the implementing unit: leaves out the kernels that convert elements (2 s of nvcc 13.0 and
                               0.4 MB for each architecture). Calls that need one return KVPRIM_ERROR_UNSUPPORTED
   KVPRIM_NO_FOUR_BIT          the same for those that convert elements of 4 bits (0.1 MB)
   KVPRIM_NO_UNPACK            the same for unpack, unpack_meta and copy (1 s, 0.3 MB), which then return it
   KVPRIM_NO_FETCH             every translation unit or none, as in kvprim.h
   KVPRIM_NVTX                 the implementing unit, as in kvprim.h
*/
#include "kvprim.h"

#if KVPRIM_VERSION != 300
#error "kvprim_cuda.cuh 0.3.0 meets a kvprim.h of another version"
#endif
#ifndef KVPRIM_CUDA_CUH
#define KVPRIM_CUDA_CUH

#ifdef __cplusplus
extern "C" {
#endif

/* >>gpu_move -------------------------------------------------------------------------------------------------------

   These do what kvprim.h's functions without _cuda in the name do: same descriptor, rules, aliasing and errors. launch
   may be NULL. A negative max_sms, a pdl other than 0 and 1, or a nonzero reserved field is KVPRIM_ERROR_ARGUMENT.

   Formats (>>format in kvprim.h): gather, store, transfer and checked moves convert elements in every layout, with the
   bits that the CPU gives, whatever nvcc's options for fast arithmetic are. Formats are host memory and are read during
   the call. The GPU reads and writes scales, and adds to `nans` atomically, when the work runs. So in a graph,
   SCALE_TENSOR and SCALE_HEAD have at each replay the scales that memory holds then. Scales of a tensor or head, and
   source rows, may be read even if no row moves.
   The fastest kernels take one launch for a gather, or for a store of K and V together: fp16 or bf16 into a quantised
   type or out of it, of one layer, without max_sms, if rows, pieces of rows and tiles are made of groups of 8 elements
   that are aligned to their size, or the quantised ones to 4 bytes. Where scales are computed, source rows have at most
   4,096 bytes, and no tile reaches into a second piece; INT8's tiles are 16 to 512 elements, a power of two. V may have
   K's types and kind of scale, or, beside K with computed scales, consist of bytes in words of 16; so may the second
   move of a kvprim_cuda_move whose first is a gather that converts, from the same rows, with no more bytes than the
   first writes, both less than 4,096, and without `rejected`. Other conversions take one launch each and, if groups of
   8 elements are aligned, 1.1 to 2 times as long; element by element 5 to 15 times. If a side of a transfer is pinned
   host memory and max_sms is 0, it runs on 8 multiprocessors, at PCIe's speed. No conversion uses the copy engine. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc,
                                                           const kvprim_cuda_launch *launch);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc,
                                                          const kvprim_cuda_launch *launch);

/* One launch reads the arrays and writes slot in stream order. The next store or gather may use slot, also with pdl. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_slots(const kvprim_slots_desc *desc,
                                                          const kvprim_cuda_launch *launch);

/* Moves up to 231 layers in one launch, more in several; 2^31 rows or pieces (counted by 256 bytes) or more, too, take
   launches of their own. Each side lies in any of the memories above, and so do the indices. The arrays of layers are
   host memory, free to reuse on return. The host may touch pinned rows and indices again when the work is done.
   Device layers: the GPU reads dst_device_layers and src_device_layers when the work runs; in a graph, at each replay.
   One launch moves any number of layers, unless the other side has a host array of them, and any number takes the host
   equally long. Bases need not be multiples of 16 bytes. Launches take up to 0.2 us more than with host arrays (H200).
   host_index = 1: the indices are host memory, free to reuse on return; a graph keeps their values. They travel in the
   launch's parameters, 4 bytes each (8 if a table has 2^31 rows or more). A launch holds about 8,000 of them (900 if it
   converts, or if compiled by CUDA before 12.1) and takes 0.1 to 0.2 us longer than with indices in the GPU's memory.
   More take several launches, one after the other, of about 2 us each (H200). The call takes up to 38 KB of stack.
   Pinned or not: if the first row of a side, its array of device layers or its index is ordinary host memory that the
   GPU cannot reach, the call fails with KVPRIM_ERROR_ARGUMENT. So it does if the index is memory of a GPU and
   host_index is 1. Answers of CUDA are remembered by address, so memory that was freed and allocated anew as another
   kind may pass. All else that a transfer touches is checked only with KVPRIM_DEBUG.
   Between GPUs, either one may run it, writing to the other's memory or reading it. 16 to 32 multiprocessors (max_sms)
   reach 0.88 to 0.94 of the copy engine with rows of 4 KB (H200).
   Between pinned host memory and a GPU, PCIe is the limit. What follows holds from 64 KB on. Rows behind device layers
   are taken for the GPU's if the other side is pinned host memory. If both sides have device layers, or the rows behind
   them lie in host memory, set max_sms instead.
   - The copy engine moves transfers without an index, with gaps only between rows of 512 bytes or more, if they have
     one layer or 2 MB or more in each; in a graph, only with 2 MB or more. It takes no multiprocessor.
   - If max_sms is 0, others run with 128 to 512 threads on each of 4 to 8 multiprocessors, and with more threads on 8
     if their rows or pieces do not begin and end at multiples of 16 bytes or have only 16. With rows of 1, 4, 16 and 64
     KB they reach 0.93 to 0.95 of the copy engine; rows or pieces of less than 2 KB that are no multiple of 128 bytes
     about half, except where they follow each other on one side: those of all layers (a page of all layers in host
     memory, say) or of one row. 61 layers of 656 bytes reach 0.94. Both directions at once move 72 to 81 GB/s in sum.
   - Beside such a transfer a kernel of arithmetic takes 1.07 to 1.15 times as long. One limited by memory takes 1.01 to
     1.02 times as long if rows of 4 KB go to the host, which get 20 GB/s, and 1.15 if they come from there, at 38 GB/s.
     max_sms = 8 takes all threads of 8 multiprocessors: 50 GB/s, and 1.5 to 1.8 times as long (H200). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc,
                                                             const kvprim_cuda_launch *launch);

/* Runs n moves that kvprim_gather_moves(), kvprim_store_moves() or kvprim_transfer_moves() made, without checking them
   again. Up to 4 moves, of any row sizes, counts, indices and layers, take one launch if they have in sum up to 180
   layers and less than 2^31 rows and pieces (see kvprim_cuda_transfer): K and V of different width, values and their
   scales. More take several. A move with device layers or host_index takes a launch of its own. So does every move if
   only some of them begin and end at multiples of 16 bytes, one of these has 4 MB or more, and max_sms is 0. Moves run
   in no particular order, so none may touch what another writes; they may share one `rejected`. `moves`, formats, layer
   arrays, and indices with host_index are host memory, read before the call returns. Only KVPRIM_DEBUG checks what
   memory rows, indices and scales are. Errors: NULL (moves, with n > 0), ARGUMENT (launch), CUDA. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n,
                                                         const kvprim_cuda_launch *launch);

/* The launch's parameters hold what the GPU needs of the fragments, copied before the call returns: the bits in which
   their offsets and sizes differ, mostly 2 to 8 bytes each, and nothing for a side on which all lie equally far apart.
   Where sizes differ much, each takes 4 bytes more, and every 16 another 4. Adjacent ones move as one if they are many.
   If max_sms is 0, a call enqueues a cudaMemcpyAsync (in graphs a memcpy node) for what then is one of 16 MB or more at
   a multiple of 16 on both sides; without pdl also for a lone one elsewhere, of up to 384 KB inside one GPU, and,
   except in graphs, for up to 3 over PCIe (2 from the host). A launch takes up to 32,760 bytes of parameters (4,000 if
   compiled by CUDA before 12.1; later ones need a driver of at least 12.1). Larger batches take several, which overlap
   where pdl works and max_sms is 0; what follows in the stream follows all. The call takes up to 42 KB of stack. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc,
                                                           const kvprim_cuda_launch *launch);

/* One launch, however many fragments there are. The GPU reads *count and the descriptors when the work runs: after
   everything that was enqueued before it, and in a graph at each replay. So a caller may enqueue it before they are
   written, after an event, a cuStreamWaitValue64 or a host function that waits for them; a stream that waits takes no
   multiprocessor. They may be written again when the work is done.
   They lie in device memory or in pinned host memory. If they are ordinary host memory that the GPU cannot reach, the
   call fails with KVPRIM_ERROR_ARGUMENT (see kvprim_cuda_transfer: answers are remembered).
   In device memory a few take 0.6 us more than kvprim_cuda_unpack, and many at most a tenth longer (H200). Each is seen
   by some blocks only, so one fragment with most of the bytes takes 1.5 to 2.5 times as long.
   Reading them over PCIe takes 4 to 13 us more for up to 2,048, and 25 us for 65,536. max_count and the smaller of
   src_bytes and dst_bytes decide how the work is divided: they should not be much more than what is expected. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_unpack_meta(const kvprim_unpack_meta_desc *desc,
                                                                const kvprim_cuda_launch *launch);

/* All that kvprim_cuda_unpack says holds here, with addresses in place of offsets: a launch holds the bits in which
   they differ. Items lie in any of the memories above, below address 2^62 (else SIZE). If they make one block of zeros
   of 64 KB or more (16 MB with pdl) at a multiple of 16, and max_sms is 0, the call enqueues a cudaMemsetAsync. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_copy(const kvprim_copy_desc *desc,
                                                         const kvprim_cuda_launch *launch);

#ifndef KVPRIM_NO_FETCH
/* One launch looks up what is wanted and copies the missing rows, from pinned host memory or memory of a GPU; ordinary
   host memory as k, v or set.memory is ARGUMENT (see kvprim_cuda_transfer). One block looks up a request, 2,048 entries
   at a time; up to 32 more blocks copy the rows of all requests. Fast if rows and strides are multiples of 16 bytes.
   All calls with a set follow each other in stream order. Errors also: SIZE (rows in 2^31 pieces or more). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_fetch(const kvprim_fetch_desc *desc,
                                                          const kvprim_cuda_launch *launch);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cuda_fetch_reset(const kvprim_fetch_set *set, int64_t state,
                                                                const kvprim_cuda_launch *launch);
#endif

#ifdef __cplusplus
}
#endif

/* >>device ---------------------------------------------------------------------------------------------------------

   For your own kernels, in C++.

   Where rows lie: check a descriptor once (>>move in kvprim.h), and pass the sides of the move, whose count must not be
   0, to the kernel by value. The GPU must be able to read the index, so host_index is 0. The host may call these three
   functions, too, if it can read the index and the array of device layers.

       kvprim_device_row(side, i, rejected)       the row that index i names (without an index: row i), or -1
                                                  if it must be skipped by the index rule; 0 <= i < count. If `rejected`
                                                  is not NULL, each call for a row past the table's end adds one to it.
                                                  Of several threads that share a row, let only one pass it.
       kvprim_device_byte(side, layer, row, byte) the address of byte `byte` of a row's elements. From there on, they
                                                  follow each other to the end of the head (of the row, if it has none):
                                                  side.piece_bytes - byte % side.piece_bytes of them.
       kvprim_device_byte_in(side, base, row, byte)
                                                  the same, in the layer that starts at `base`. Use it if
                                                  side.layers is set: the GPU cannot read that array of the host, and
                                                  kvprim_device_byte returns NULL. On the host, kvprim_side_layer()
                                                  returns the base to pass.

   The caller makes sure that 0 <= row < side.table.rows (as kvprim_device_row returns it), 0 <= layer < layers of the
   move, and 0 <= byte < side.piece_bytes * side.table.heads, which is row_bytes unless the move converts. Any thread
   may call them for any row, and none waits for another. They divide only by heads and by page sizes that are no power
   of two, with 64 bits only where a row or byte needs them.

   Copies: kvprim_warp_copy and kvprim_warp_zero, destination first. All 32 threads of a warp call them with the same
   arguments. Any size and any alignment of either side, which must not overlap. Of src they also read, but never write,
   the other bytes of the first and last aligned 16 bytes. No barrier inside: what was written is visible to the calling
   thread only, until the kernel synchronises as it needs. Thread t of the warp has lane threadIdx.x % 32: a block's
   first dimension must be a multiple of 32. */
#if defined(__CUDACC__) || defined(KVPRIM_CUDA_EMULATE)
#define KVPRIM_DEVICE static __device__ __forceinline__
#define KVPRIM_DEVICE_SELDOM static __device__ __noinline__ /* not fetched with the code around its call */

KVPRIM_ANYWHERE void kvpc_count(uint32_t *counter)
{
#if defined(__CUDA_ARCH__) || defined(KVPRIM_CUDA_EMULATE)
    atomicAdd(counter, 1u);
#else
    ++*counter;
#endif
}

KVPRIM_ANYWHERE int64_t kvprim_device_row(const kvprim_side &side, int64_t i, uint32_t *rejected)
{
    int past = !side.index && i >= side.table.rows;
    const int64_t row =
        side.index || kvpi_is_inside(i, 0, (uint64_t)side.table.rows) ? kvpi_find_number(&side, i, &past) : -1;
    if (past && rejected)
        kvpc_count(rejected);
    return row;
}

KVPRIM_ANYWHERE char *kvprim_device_byte_in(const kvprim_side &side, void *base, int64_t row, int64_t byte)
{
    const kvprim_table &t = side.table;
    const int64_t head = t.heads > 1 ? kvpi_divided(byte, side.piece_bytes) : 0;
    return (char *)base + kvpi_row_offset(&side, row) + byte + head * (t.head_stride - side.piece_bytes);
}

KVPRIM_ANYWHERE char *kvprim_device_byte(const kvprim_side &side, int64_t layer, int64_t row, int64_t byte)
{
    if (side.layers && !side.device_layers)
        return NULL; /* only the host can tell where a layer starts */
    void *const base =
        side.device_layers ? side.device_layers[layer] : (char *)side.table.data + layer * side.layer_stride;
    return kvprim_device_byte_in(side, base, row, byte);
}

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

/* Thread t writes: byte t before the first 16-byte boundary of dst; then every 32nd 16-byte word, starting with word t;
   then byte t after the last word. An unaligned source word is read as the two aligned words that it lies in. */
static __device__ inline void kvprim_warp_copy(void *to, const void *from, size_t bytes)
{
    const uint32_t lanes = 32, lane = threadIdx.x % lanes;
    char *dst = (char *)to;
    const char *src = (const char *)from;
    const size_t to_boundary = (16 - (uintptr_t)dst % 16) % 16, head = bytes < to_boundary ? bytes : to_boundary;
    for (size_t b = lane; b < head; b += lanes)
        dst[b] = src[b];
    dst += head, src += head, bytes -= head;
    const size_t words = bytes / 16;
    const uint32_t shift = (uint32_t)((uintptr_t)src % 16);
    const uint4 *const in = (const uint4 *)(src - shift);
    uint4 *const out = (uint4 *)dst;
    size_t w = lane;
    if (shift == 0)
        for (; w + 3 * lanes < words; w += 4 * lanes) {
            const uint4 a = in[w], b = in[w + lanes], c = in[w + 2 * lanes], d = in[w + 3 * lanes];
            out[w] = a, out[w + lanes] = b, out[w + 2 * lanes] = c, out[w + 3 * lanes] = d;
        }
    else
        for (; w + lanes < words; w += 2 * lanes) {
            const uint4 a = in[w], b = in[w + 1], c = in[w + lanes], d = in[w + lanes + 1];
            out[w] = kvpc_window(a, b, shift), out[w + lanes] = kvpc_window(c, d, shift);
        }
    for (; w < words; w += lanes)
        out[w] = shift == 0 ? in[w] : kvpc_window(in[w], in[w + 1], shift);
    for (size_t b = words * 16 + lane; b < bytes; b += lanes)
        dst[b] = src[b];
}

static __device__ inline void kvprim_warp_zero(void *to, size_t bytes)
{
    const uint32_t lanes = 32, lane = threadIdx.x % lanes;
    char *const dst = (char *)to;
    const size_t to_boundary = (16 - (uintptr_t)dst % 16) % 16, head = bytes < to_boundary ? bytes : to_boundary;
    const size_t end = head + (bytes - head) / 16 * 16;
    for (size_t b = lane; b < head; b += lanes)
        dst[b] = 0;
    for (size_t b = head + 16 * lane; b < end; b += 16 * lanes)
        *(uint4 *)(dst + b) = uint4{0, 0, 0, 0};
    for (size_t b = end + lane; b < bytes; b += lanes)
        dst[b] = 0;
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

#define KVPRIM_ELEMENTS /* kvprim.h's >>impl_elements, once for each unit */
#include "kvprim.h"
#undef KVPRIM_ELEMENTS
#include <string.h>
#ifndef KVPRIM_CUDA_EMULATE /* the emulation runs the kernels below thread by thread on the CPU, for the tests */
#include <stdio.h>
#include <atomic>
#include <cuda_runtime.h>
#endif

/* Names that begin with kvpc_ are internal: static, and free to change. */

/* >>impl_device ---------------------------------------------------------------------------------------------------- */

/* Measured on an H200; the functions that use them say why. */
enum {
    kvpc_threads = 128,             /* per block, of moves on the whole GPU */
    kvpc_most_threads = 256,        /* at most, of plain rows */
    kvpc_grid_rows = 1024,          /* blocks of gridDim.y if gridDim.z > 1; CUDA takes 65,535 of each */
    kvpc_few_sms_threads = 1024,    /* at most, of moves on few multiprocessors */
    kvpc_link_sms = 8,              /* of what begins or ends inside 16 bytes; for the rest see kvpc_on_link */
    kvpc_unaligned_threads = 512,   /* at most, of moves of any alignment */
    kvpc_unpack_threads = 256,      /* of unpack */
    kvpc_unpack_most_threads = 512, /* ... with max_sms */
    kvpc_bytes_lanes = 8,           /* of kvpc_bytes_kernel */
    kvpc_bytes_loads = 3,           /* one more than aligned rows take: they start and end inside a word */
    kvpc_granule_bytes = 32,        /* that memory is written in: see kvpc_fetch_edges */
    kvpc_few_bytes = 1 << 20,       /* of a table, at most: see kvpc_loads_of and kvpc_run_plain */
    kvpc_first_bytes = 256 << 10,   /* of all tables, at most: see kvpc_dependence */
    kvpc_some_threads = 64 << 10,   /* of a launch: with more, see kvpc_shape_rows */
    kvpc_many_threads = 128 << 10,  /* of a launch: with more, see kvpc_shape_rows */
    kvpc_many_blocks = 8192         /* of a dependent launch, at most: see kvpc_start_words */
};

/* What this pass of nvcc compiles for: 900 is sm_90, 0 the host. */
#ifdef __CUDA_ARCH__
enum { kvpc_arch = __CUDA_ARCH__ };
#else
enum { kvpc_arch = 0 };
#endif

#ifndef KVPRIM_CUDA_EMULATE               /* see tests/gpu/cuda_shim.h */
#define KVPRIM_UNROLL _Pragma("unroll")   /* in kvpc_copy_words, which spills otherwise; other loops unroll unasked */
#define KVPRIM_ROLLED _Pragma("unroll 1") /* before a loop whose copies would only take time to fetch */
#define KVPRIM_IN_PLACE                   /* a kernel's parameters; the emulation passes a reference */

/* Programmatic dependent launch came with Hopper: see kvpc_has_pdl. Waits for the kernel before, if `waits`. */
KVPRIM_DEVICE void kvpc_pdl_wait(bool waits = true)
{
    if (kvpc_arch >= 900 && waits)
        asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Lets the next kernel start, if `now`. */
KVPRIM_DEVICE void kvpc_pdl_trigger(bool now = true)
{
    if (kvpc_arch >= 900 && now)
        asm volatile("griddepcontrol.launch_dependents;");
}

/* Global memory by address: an asm volatile keeps its place among the others (loads have no clobber, as no row that is
   read is written). Otherwise the compiler puts the loads of a store after the test of its slot, and waits twice. */
#define KVPRIM_LOAD(name, type, ptx, to)                                                                               \
    KVPRIM_DEVICE type name(uint64_t address)                                                                          \
    {                                                                                                                  \
        type v;                                                                                                        \
        asm volatile("ld.global." ptx " %0, [%1];" : to(v) : "l"(address));                                            \
        return v;                                                                                                      \
    }
KVPRIM_LOAD(kvpc_load_u8, uint32_t, "u8", "=r")
KVPRIM_LOAD(kvpc_load_i32, int32_t, "s32", "=r")
KVPRIM_LOAD(kvpc_load_i64, int64_t, "s64", "=l")
KVPRIM_LOAD(kvpc_load_f32, float, "f32", "=f")
KVPRIM_LOAD(kvpc_load_new, int32_t, "cg.s32", "=r") /* past the first cache: what atomics and other threads wrote */
#undef KVPRIM_LOAD

KVPRIM_DEVICE uint2 kvpc_load8(uint64_t address)
{
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

KVPRIM_DEVICE void kvpc_store8(uint64_t address, uint2 v)
{
    asm volatile("st.global.v2.u32 [%2], {%0, %1};" ::"r"(v.x), "r"(v.y), "l"(address) : "memory");
}

/* _once: past the first cache. To and from the host one multiprocessor then moves 26 to 29 GB/s, not 21 to 23. */
#define KVPRIM_WORDS(load, store, cache)                                                                               \
    KVPRIM_DEVICE uint4 load(uint64_t address)                                                                         \
    {                                                                                                                  \
        uint4 v;                                                                                                       \
        asm volatile("ld.global" cache ".v4.u32 {%0, %1, %2, %3}, [%4];"                                               \
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                                      \
                     : "l"(address));                                                                                  \
        return v;                                                                                                      \
    }                                                                                                                  \
    KVPRIM_DEVICE void store(uint64_t address, uint4 v)                                                                \
    {                                                                                                                  \
        asm volatile("st.global" cache ".v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),     \
                     "l"(address)                                                                                      \
                     : "memory");                                                                                      \
    }
KVPRIM_WORDS(kvpc_load16, kvpc_store16, "")
KVPRIM_WORDS(kvpc_load16_once, kvpc_store16_once, ".L1::no_allocate")
#undef KVPRIM_WORDS

/* Returns the value of the thread `distance` before this one in the warp, or this one's if there is none. */
KVPRIM_DEVICE uint32_t kvpc_shuffle_up(uint32_t value, uint32_t distance)
{
    uint32_t v;
    asm volatile("shfl.sync.up.b32 %0, %1, %2, 0, 0xffffffff;" : "=r"(v) : "r"(value), "r"(distance));
    return v;
}

/* Returns the value of the thread whose number in the warp differs from this one's in the bits of `mask`. The threads
   of the warp whose bits are set in `members` call it together. */
KVPRIM_DEVICE uint32_t kvpc_shuffle_xor(uint32_t value, uint32_t mask, uint32_t members = UINT32_MAX)
{
    uint32_t v;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, %3;" : "=r"(v) : "r"(value), "r"(mask), "r"(members));
    return v;
}

/* Tells the compiler that a pointer is to global memory, which gives faster instructions. */
KVPRIM_DEVICE char *kvpc_global(uint64_t address)
{
    return (char *)__cvta_global_to_generic((size_t)address);
}

/* Returns what was there before. */
KVPRIM_DEVICE uint64_t kvpc_add64(uint64_t address, uint64_t value)
{
    uint64_t before;
    asm volatile("atom.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

/* What another block tells, 8 bytes at once: a number, and above it the launch. */
KVPRIM_DEVICE uint64_t kvpc_load_told(uint64_t address)
{
    return *(const volatile uint64_t *)kvpc_global(address);
}

KVPRIM_DEVICE void kvpc_tell(uint64_t address, uint32_t number, uint32_t launch)
{
    *(volatile uint64_t *)kvpc_global(address) = (uint64_t)launch << 32 | number;
}

/* An address is ready from here on. Left to itself the compiler makes it when it is used: after the wait for the kernel
   before, which takes a dependent launch 0.2 us longer (H200). */
KVPRIM_DEVICE void kvpc_settle(uint64_t address)
{
    asm volatile("" ::"l"(address));
}

/* base + row * stride. In PTX, because the compiler would load base from constant memory after the row's test. */
KVPRIM_DEVICE uint64_t kvpc_row_at(uint64_t base, uint32_t row, uint32_t stride)
{
    uint64_t address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(base));
    return address;
}

/* Reads the line of an address into L2, if `fetches`, without a branch. */
KVPRIM_DEVICE void kvpc_fetch_line(uint64_t address, bool fetches)
{
    asm volatile("{.reg .pred fetches; setp.ne.u32 fetches, %1, 0; @fetches prefetch.global.L2 [%0];}" ::"l"(address),
                 "r"((uint32_t)fetches));
}

/* Reads the first and last granule of a row if it fills only part of them. Memory writes whole granules, and reads the
   rest of one first: doing so now, not when the cache evicts the line, saves the time of some hundred bytes. */
KVPRIM_DEVICE void kvpc_fetch_edges(uint64_t row, uint32_t bytes, bool fetches = true)
{
    kvpc_fetch_line(row, fetches && row % kvpc_granule_bytes);
    kvpc_fetch_line(row + bytes - 1, fetches && (row + bytes) % kvpc_granule_bytes);
}
#endif

/* Divides 32-bit numbers below 2^31 with one multiplication. Anything by 0 is 0. */
typedef struct kvpc_divisor32 {
    uint32_t magic, shift;
} kvpc_divisor32;

/* The same, and 64-bit numbers as the compiler does. */
typedef struct kvpc_divisor {
    uint64_t by;
    kvpc_divisor32 narrow;
} kvpc_divisor;

KVPRIM_DEVICE uint32_t kvpc_divide(uint32_t n, const kvpc_divisor32 &d)
{
    return __umulhi(2 * n, d.magic) >> d.shift;
}

KVPRIM_DEVICE uint32_t kvpc_divide(uint32_t n, const kvpc_divisor &d)
{
    return kvpc_divide(n, d.narrow);
}

KVPRIM_DEVICE uint64_t kvpc_divide(uint64_t n, const kvpc_divisor &d)
{
    return d.by ? n / d.by : 0;
}

/* Loads the 16-byte words of a thread, word k from from[k]. `exact`: all of them; otherwise those that begin before
   byte `end` of the row, where word k begins at byte at + k * step. The others, and all if !reads, become zeros. */
template <uint32_t loads, bool exact>
KVPRIM_DEVICE void kvpc_load_words(uint4 *v, bool reads, const uint64_t *from, uint32_t step, uint32_t at, uint32_t end)
{
    for (uint32_t k = 0; k < loads; k++)
        v[k] = uint4{0, 0, 0, 0};
    for (uint32_t k = 0; k < loads; k++)
        if (reads && (exact || at + k * step < end))
            v[k] = kvpc_load16(from[k]);
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

/* Stores the words that kvpc_load_words loads. With `tails`, only the row's bytes of the last word. */
template <uint32_t loads, bool exact, bool tails>
KVPRIM_DEVICE void kvpc_store_words(const uint64_t *to, const uint4 *v, uint32_t step, uint32_t at, uint32_t end)
{
    for (uint32_t k = 0; k < loads; k++)
        if (exact || (tails ? at + k * step + 16 <= end : at + k * step < end))
            kvpc_store16(to[k], v[k]);
        else if (tails && at + k * step < end)
            kvpc_store_tail(to[k], v[k], end - (at + k * step));
}

/* Returns the sum of this thread's number and those of the block's threads before it. sums: a word for each warp. */
KVPRIM_DEVICE uint32_t kvpc_sum_up(uint32_t *sums, uint32_t number, uint32_t *all)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t before = kvpc_shuffle_up(number, distance);
        number += lane >= distance ? before : 0;
    }
    if (lane == 31)
        sums[warp] = number;
    __syncthreads();
    uint32_t sum = lane < blockDim.x / 32 ? sums[lane] : 0, before = lane < warp ? sum : 0;
    for (uint32_t mask = 1; mask < 32; mask *= 2)
        sum += kvpc_shuffle_xor(sum, mask), before += kvpc_shuffle_xor(before, mask);
    *all = sum;
    return number + before;
}

/* The addresses of words that lie `step` bytes apart. */
template <uint32_t loads> KVPRIM_DEVICE void kvpc_place_words(uint64_t *words, uint64_t first, uint32_t step)
{
    for (uint32_t k = 0; k < loads; k++)
        words[k] = first + k * step;
}

/* >>impl_row_kernels ------------------------------------------------------------------------------------------------

   Plain rows (kvpc_is_plain) fit 32-bit arithmetic; only the table that the index names may have pages and heads. */

/* One table and the rows beside it: K, or V. */
typedef struct kvpc_ends {
    uint64_t src;
    uint32_t src_stride, dst_stride;
    uint64_t dst;
} kvpc_ends;

/* Page n of the indexed table is n * page bytes further than its rows' stride says, head n of a row n * head bytes. */
typedef struct kvpc_steps {
    uint32_t page, head;
} kvpc_steps;

/* Each block moves block_rows rows, row_threads threads each, or a part of a long row.
   With few rows, the time is that of the instructions up to the second load, and of fetching them and the parameters
   that they name: those come first. Threads have one dimension, because a second one costs 0.02 us (H200), and dividing
   the thread's number is one multiplication. */
typedef struct kvpc_plain {
    /* In the order of use, and no longer than this: stores took 1.03 to 1.10 of their time with `pair` in two lines of
       the constant cache, which are 64 bytes. */
    uint64_t index;
    uint32_t count, row_magic; /* row_magic: threadIdx.x * row_magic >> 16 is threadIdx.x / row_threads */
    uint32_t block_rows, row_threads;
    uint32_t rows, base;
    uint32_t index_step, index_is_i64; /* index_step: bytes from one index to the next */
    uint32_t row_bytes[2];
    kvpc_ends pair[2];
    kvpc_divisor32 page, head; /* rows of a page, bytes of a head; 0: there are none */
    kvpc_steps step[2];        /* of pair[0] and pair[1] */
    uint32_t *rejected;
    uint32_t fetch;          /* 1: rows begin or end inside a granule: see kvpc_fetch_edges */
    uint32_t parts, k_parts; /* of a row, as kvpc_bytes_kernel counts them, and of K */
    kvpc_divisor32 by_parts;
    uint32_t gather; /* for kvpc_bytes_kernel, which does both */
    uint32_t pdl;    /* a kvpc_dependence */
} kvpc_plain;

/* The row that a thread works on, and the byte of it where the thread begins. Returns false if there is none. If rows
   may have `parts`, blockIdx.x is the part, and up to kvpc_grid_rows blocks of rows have one blockIdx.z. If `apart` is
   1, the part is blockIdx.x without its lowest bit, which tells K from V. */
template <class params>
KVPRIM_DEVICE bool kvpc_find_thread(const params &p, bool parts, uint32_t loads, uint32_t *row, uint32_t *at,
                                    uint32_t apart = 0)
{
    const uint32_t in_block = threadIdx.x * p.row_magic >> 16, lane = threadIdx.x - in_block * p.row_threads;
    const uint32_t block = parts ? blockIdx.z * kvpc_grid_rows + blockIdx.y : blockIdx.x;
    *row = block * p.block_rows + in_block;
    *at = 16 * (parts ? (blockIdx.x >> apart) * loads * p.row_threads + lane : lane);
    return *row < p.count;
}

/* An index, and what the index rule makes of it. */
typedef struct kvpc_index {
    int32_t low, high; /* words of an int64; high is 0 for an int32 */
    uint32_t row;      /* valid if `inside` */
    bool inside;
} kvpc_index;

/* The index rule for plain rows, of the index at address `at`. The two words of an int64 are two loads that do not wait
   for each other, so one kernel serves both types. Rows end at 2^31 or below: see kvpc_is_plain. */
KVPRIM_DEVICE kvpc_index kvpc_load_index(uint64_t at, bool is_i64)
{
    kvpc_index x = {kvpc_load_i32(at), 0, 0, false};
    if (is_i64)
        x.high = kvpc_load_i32(at + 4);
    return x;
}

/* An index is on its way from here on: see kvpc_settle. */
KVPRIM_DEVICE void kvpc_settle_index(const kvpc_index &x)
{
    kvpc_settle((uint64_t)(uint32_t)x.high << 32 | (uint32_t)x.low);
}

template <class params> KVPRIM_DEVICE void kvpc_apply_index_rule(const params &p, kvpc_index *x)
{
    x->row = (uint32_t)x->low - p.base;
    x->inside = x->row < p.rows && x->high == 0;
}

template <class params> KVPRIM_DEVICE kvpc_index kvpc_find_row(const params &p, uint64_t at, bool is_i64)
{
    kvpc_index x = kvpc_load_index(at, is_i64);
    kvpc_apply_index_rule(p, &x);
    return x;
}

template <class params> KVPRIM_DEVICE uint64_t kvpc_index_at(const params &p, uint32_t i)
{
    return kvpc_row_at(p.index, i, p.index_step);
}

/* Counts an index that is past the table; one before it is padding. */
template <class params> KVPRIM_DEVICE void kvpc_count_rejected(const params &p, const kvpc_index &x)
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

/* How the words of the threads fit the rows:
   kvpc_exact        each thread's words lie in the row, and rows are not cut into parts
   kvpc_words        rows are whole words, cut into parts or not; threads may have words past the row's end
   kvpc_tails        the same, and a row may end inside a word, or its edges are fetched first: see kvpc_fetch_edges
   kvpc_paged        as kvpc_words, and the indexed table has pages or heads, of whole words */
enum kvpc_fit { kvpc_exact, kvpc_words, kvpc_tails, kvpc_paged };

/* When a kernel lets the next one start, which waits for its end. kvpc_alone: never, as the launch is not dependent. At
   once is best up to kvpc_first_bytes (H200). With more, blocks that only wait take the room of blocks that work: a
   late trigger makes stores 2 % faster on average on an H200, 8 % on an H100. */
enum kvpc_dependence { kvpc_alone, kvpc_trigger_first, kvpc_trigger_late };

/* Where the words of a thread lie in row `row` of the indexed table, whose base is `base`. m: 0, or 1 for V. */
template <uint32_t loads, bool paged>
KVPRIM_DEVICE void kvpc_place_indexed(const kvpc_plain &p, uint64_t *words, uint64_t base, uint32_t stride, uint32_t m,
                                      uint32_t row, uint32_t at, uint32_t step)
{
    kvpc_place_words<loads>(words, kvpc_row_at(base + at, row, stride), step);
    for (uint32_t k = 0; paged && k < loads; k++) {
        const uint32_t page = kvpc_divide(row, p.page), head = kvpc_divide(at + k * step, p.head);
        words[k] = kvpc_row_at(kvpc_row_at(words[k], head, p.step[m].head), page, p.step[m].page);
    }
}

/* The two kernels below, for rows that begin at multiples of 16 bytes. Gathers wait in any launch: where there is
   nothing to wait for, that returns at once. Stores that asked took 2 % longer (H100).
   - row_threads threads move a row, or a part of it: each the word at `at`, and `loads` - 1 more, row_threads apart.
   - In the last word of a row with kvpc_tails, only the row's bytes are written, but all 16 are read.
   - All addresses come before the loads, and all loads before the stores. */

template <uint32_t loads, kvpc_fit fit>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_gather_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const bool exact = fit == kvpc_exact;
    uint32_t i, at;
    const bool any = kvpc_find_thread(p, fit != kvpc_exact, loads, &i, &at);
    const uint64_t index_at = kvpc_index_at(p, any ? i : 0);
    kvpc_settle(index_at);
    kvpc_pdl_wait();
    kvpc_index x = kvpc_load_index(index_at, p.index_is_i64);
    kvpc_settle_index(x);
    if (!any) /* not before the index is on its way, which would take few rows 0.02 us longer (H200) */
        return;
    kvpc_apply_index_rule(p, &x);
    const uint32_t step = 16 * p.row_threads, end = p.row_bytes[0];
    uint64_t src[loads], dst[loads];
    uint4 v[loads];
    kvpc_place_indexed<loads, fit == kvpc_paged>(p, src, p.pair[0].src, p.pair[0].src_stride, 0, x.row, at, step);
    kvpc_place_words<loads>(dst, kvpc_row_at(p.pair[0].dst + at, i, p.pair[0].dst_stride), step);
    if (fit == kvpc_tails && p.fetch && at == 0)
        kvpc_fetch_edges(dst[0], end);
    kvpc_load_words<loads, exact>(v, x.inside, src, step, at, end); /* with the zero fill */
    kvpc_pdl_trigger(p.pdl && loads == 1);
    kvpc_store_words<loads, exact, fit == kvpc_tails>(dst, v, step, at, end);
    kvpc_pdl_trigger(p.pdl && loads > 1); /* 5 to 10 % sooner for 1 to 2 MB than before the stores */
    if (!x.inside && at == 0)
        kvpc_count_rejected(p, x);
}

/* tables: 1, or 2 for K and V. */
template <uint32_t loads, uint32_t tables, bool dependent, kvpc_fit fit>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_store_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const bool exact = fit == kvpc_exact;
    const bool early =
        loads > 1 || !(exact || fit == kvpc_tails); /* without this branch the compiler uses the slot before it loads */
    uint32_t i, at;
    if (!kvpc_find_thread(p, fit != kvpc_exact, loads, &i, &at))
        return;
    kvpc_pdl_trigger(dependent && p.pdl == kvpc_trigger_first);
    kvpc_pdl_wait(dependent);
    const uint32_t step = 16 * p.row_threads;
    uint4 v[tables][loads];
    uint64_t src[loads], dst[tables][loads];
    for (uint32_t m = 0; m < tables; m++) {
        kvpc_place_words<loads>(src, kvpc_row_at(p.pair[m].src + at, i, p.pair[m].src_stride), step);
        kvpc_load_words<loads, exact>(v[m], true, src, step, at, p.row_bytes[m]);
    }
    /* After the slot's load it would be compiled to wait for the slot. */
    kvpc_pdl_trigger(dependent && p.pdl == kvpc_trigger_late);
    const kvpc_index x = kvpc_find_row(p, kvpc_index_at(p, i), p.index_is_i64);
    if (early && !x.inside && at == 0)
        kvpc_count_rejected(p, x);
    for (uint32_t m = 0; m < tables; m++) {
        kvpc_place_indexed<loads, fit == kvpc_paged>(p, dst[m], p.pair[m].dst, p.pair[m].dst_stride, m, x.row, at,
                                                     step);
        if (fit == kvpc_tails && p.fetch && x.inside && at == 0)
            kvpc_fetch_edges(dst[m][0], p.row_bytes[m]);
    }
    for (uint32_t m = 0; x.inside && m < tables; m++)
        kvpc_store_words<loads, exact, fit == kvpc_tails>(dst[m], v[m], step, at, p.row_bytes[m]);
    if (!early && !x.inside && at == 0)
        kvpc_count_rejected(p, x);
}

/* Copies `bytes` bytes from any alignment to any. A destination that begins `lead` bytes after a 16-byte boundary has
   in its word w the bytes 16 w - lead to 16 w - lead + 15.
   - Each thread writes `loads` words, `step` apart, from word `first` on.
   - It funnel-shifts each out of the two aligned source words that it lies in, read only if it has a byte to copy.
   - Where the source may not be read (!reads), it writes zeros.
   - `fetch`: see kvpc_fetch_edges. It comes once the loads are on their way, as it may wait for its place. */
template <uint32_t loads = kvpc_bytes_loads>
KVPRIM_DEVICE void kvpc_copy_words(uint64_t dst, uint64_t src, int32_t lead, int32_t bytes, uint32_t first,
                                   uint32_t step, bool reads, bool writes, bool fetch)
{
    const int32_t shift = (int32_t)((src - (uint64_t)lead) % 16);
    uint4 low[loads], high[loads];
    KVPRIM_UNROLL
    for (uint32_t k = 0; k < loads; k++) {
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
    for (uint32_t k = 0; k < loads; k++) {
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

/* Gathers and stores plain rows of any size and alignment. kvpc_bytes_lanes threads move a part of a K or V row. An
   index is counted before the copy, to take no registers there: with 44, not 40, dependent launches are 10 % slower. */
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_bytes_kernel(const KVPRIM_GRID_CONSTANT kvpc_plain KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = kvpc_bytes_lanes, t = blockIdx.x * kvpc_threads + threadIdx.x;
    const uint32_t i = kvpc_divide(t / lanes, p.by_parts), part = t / lanes - i * p.parts;
    if (i >= p.count)
        return;
    kvpc_pdl_wait(p.pdl);
    const uint32_t v_side = part >= p.k_parts;
    const kvpc_ends &pair = p.pair[v_side];
    const uint32_t first = t % lanes + lanes * kvpc_bytes_loads * (part - (v_side ? p.k_parts : 0));
    const kvpc_index x =
        p.index_is_i64 ? kvpc_find_row(p, kvpc_index_at(p, i), true) : kvpc_find_row(p, kvpc_index_at(p, i), false);
    kvpc_pdl_trigger(p.pdl);
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

/* >>impl_move_find --------------------------------------------------------------------------------------------------

   All other moves (see kvpc_is_plain): transfers, layers, pages and heads that are not of whole words, 64-bit sizes,
   several moves in a launch, few multiprocessors. A unit is what is contiguous on both sides: a row, or as much of it
   as lies in one head of either. A chunk is what a group of threads moves at once: a unit, or a part of a long one. */

/* What names the rows of one side. */
typedef struct kvpc_naming {
    uint64_t index; /* 0: row i */
    int64_t base;
    uint64_t rows;
    uint32_t index_step, index_is_i64; /* index_step: bytes from one index to the next */
} kvpc_naming;

/* Unit u of a side's row r starts at r * stride + page of r * page_step + head of u * head_step + u * unit_bytes. */
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
    uint64_t first_chunk, first_layer;
    uint32_t *rejected;
} kvpc_task;

typedef struct kvpc_layer {
    uint64_t dst, src;
} kvpc_layer;

enum { kvpc_params_bytes = 4000, kvpc_most_tasks = 4 }; /* larger parameters cost time: 0.3 us at 8 KB on an H200 */

/* Several moves, or one whose layers the host names. */
template <uint32_t tasks_room> struct kvpc_batch {
    static const uint32_t most_tasks = tasks_room;
    static const bool fills = true; /* rows without a source may become zeros */
    static const uint32_t most_layers = (kvpc_params_bytes - 24 - most_tasks * sizeof(kvpc_task)) / sizeof(kvpc_layer);
    uint64_t total;                   /* chunks */
    uint32_t part_bytes, lanes_shift; /* 1 << lanes_shift threads move a chunk */
    uint32_t tasks, pdl;
    kvpc_task task[most_tasks];
    kvpc_layer layer[most_layers];
};

static_assert(kvpc_batch<1>::most_layers == 231 && kvpc_batch<4>::most_layers == 180, "said in >>gpu_move");
static_assert(sizeof(kvpc_batch<1>) <= kvpc_params_bytes && sizeof(kvpc_batch<4>) <= kvpc_params_bytes, "no room");

/* One move whose layers only the GPU knows, or whose rows the host names, or of any size. As the tables may begin
   anywhere, the kernel looks at each chunk's alignment.

   A kvpc_stack says where the layers of one side begin: at the addresses in `array` (device memory), or at those that
   n32 holds from word `words` on, or `step` bytes apart from `base` on. If the host names the side's rows, n32 holds
   them from word `list` on. 0 in array, words or list: it is not used. */
typedef struct kvpc_stack {
    uint64_t array, base, step;
    uint32_t words, list;
} kvpc_stack;

/* Words of n32 are counted from kvpc_first_word on, as 0 says that there are none. kvpc_bare_params have room for none,
   which spares the kernels the tests for them, and the host the time to copy the parameters. */
enum { kvpc_first_word = 2, kvpc_bare_params = 384 };

template <uint32_t bytes> struct kvpc_listed {
    static const uint32_t most_tasks = 1;
    static const bool bare = bytes == kvpc_bare_params, fills = false;
    static const uint32_t room = (bytes - 24 - sizeof(kvpc_task) - 2 * sizeof(kvpc_stack)) / 4;
    uint64_t total;
    uint32_t part_bytes, pdl;
    uint32_t lanes_shift, row_words; /* row_words: of a list */
    kvpc_stack dst, src;             /* before what is needed after the loads: see kvpc_plain */
    kvpc_task task;
    uint32_t n32[room];
};

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

KVPRIM_DEVICE uint64_t kvpc_row_of(const kvpc_naming &rows, int64_t index)
{
    return (uint64_t)index - (uint64_t)rows.base;
}

KVPRIM_DEVICE bool kvpc_is_inside(const kvpc_naming &rows, int64_t index)
{
    return kvpi_is_inside(index, rows.base, rows.rows);
}

KVPRIM_DEVICE bool kvpc_is_past(const kvpc_naming &rows, int64_t index)
{
    return !kvpc_is_inside(rows, index) && index >= rows.base;
}

/* Counts a row whose index is past the table, on either side. */
KVPRIM_DEVICE void kvpc_count_past(const kvpc_task &t, int64_t to, int64_t from)
{
    if (t.rejected && (kvpc_is_past(t.dst_rows, to) || kvpc_is_past(t.src_rows, from)))
        atomicAdd(t.rejected, 1u);
}

/* What chunk `work` of a task is of: where the layer begins on both sides, and the indices that name the row. */
template <class number> struct kvpc_spot {
    number layer, in_row; /* in_row: the chunk's number in its row */
    uint64_t dst, src;
    int64_t to, from;
};

typedef struct kvpc_chunk {
    uint64_t dst, src;
    uint32_t bytes; /* 0: nothing to do */
    bool zero;
} kvpc_chunk;

/* Row i and its layer, in a batch and in a list. All loads come first, and no wait between them. */
template <class number, uint32_t most_tasks>
KVPRIM_DEVICE void kvpc_load_spot(const kvpc_batch<most_tasks> &p, const kvpc_task &t, number i, kvpc_spot<number> *s)
{
    const kvpc_layer &base = p.layer[most_tasks > 1 ? (number)t.first_layer + s->layer : s->layer];
    kvpc_load_indices(t, i, &s->to, &s->from);
    s->dst = base.dst, s->src = base.src;
}

template <uint32_t bytes>
KVPRIM_DEVICE uint64_t kvpc_layer_in(const kvpc_listed<bytes> &p, const kvpc_stack &s, uint32_t layer)
{
    if (kvpc_listed<bytes>::bare || s.words == 0)
        return s.base + layer * s.step;
    return (uint64_t)p.n32[s.words + 2 * layer + 1] << 32 | p.n32[s.words + 2 * layer];
}

/* Row i of a list, as the index rule leaves it. Only where numbers have 64 bits it may take two words. */
template <class number, uint32_t bytes>
KVPRIM_DEVICE int64_t kvpc_row_in(const kvpc_listed<bytes> &p, const kvpc_stack &s, uint32_t i)
{
    if (sizeof(number) == 4 || p.row_words == 1)
        return (int32_t)p.n32[s.list + i];
    return (int64_t)((uint64_t)p.n32[s.list + 2 * i + 1] << 32 | p.n32[s.list + 2 * i]);
}

template <class number, uint32_t bytes>
KVPRIM_DEVICE void kvpc_load_spot(const kvpc_listed<bytes> &p, const kvpc_task &t, number i, kvpc_spot<number> *s)
{
    s->dst = s->src = 0;
    if (p.dst.array)
        s->dst = (uint64_t)kvpc_load_i64(p.dst.array + 8 * (uint64_t)s->layer);
    if (p.src.array)
        s->src = (uint64_t)kvpc_load_i64(p.src.array + 8 * (uint64_t)s->layer);
    kvpc_load_indices(t, i, &s->to, &s->from);
    if (!kvpc_listed<bytes>::bare && p.dst.list)
        s->to = kvpc_row_in<number>(p, p.dst, (uint32_t)i);
    if (!kvpc_listed<bytes>::bare && p.src.list)
        s->from = kvpc_row_in<number>(p, p.src, (uint32_t)i);
    if (!p.dst.array)
        s->dst = kvpc_layer_in(p, p.dst, (uint32_t)s->layer);
    if (!p.src.array)
        s->src = kvpc_layer_in(p, p.src, (uint32_t)s->layer);
}

template <class params, class number>
KVPRIM_DEVICE kvpc_spot<number> kvpc_find_spot(const params &p, const kvpc_task &t, number work)
{
    kvpc_spot<number> s;
    const number layer_row = kvpc_divide(work, t.chunks);
    s.in_row = work - layer_row * (number)t.chunks.by;
    s.layer = kvpc_divide(layer_row, t.count);
    kvpc_load_spot(p, t, (number)(layer_row - s.layer * (number)t.count.by), &s);
    return s;
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

template <uint32_t bytes> KVPRIM_DEVICE const kvpc_task &kvpc_task_of(const kvpc_listed<bytes> &p, uint64_t)
{
    return p.task;
}

/* The chunk at a spot. Parts begin at 16-byte boundaries of dst, and the last one takes what a unit that begins inside
   16 bytes has more than its parts. `words`: all are whole words. */
template <bool words, class params, class number>
KVPRIM_DEVICE kvpc_chunk kvpc_chunk_at(const params &p, const kvpc_task &t, kvpc_spot<number> s, bool first_lane)
{
    number part = s.in_row;
    if (t.units > 1) {
        const number unit = kvpc_divide(s.in_row, t.parts);
        part = s.in_row - unit * (number)t.parts.by;
        s.dst += unit * t.unit_bytes + kvpc_divide(unit, t.dst.head) * (uint64_t)t.dst.head_step;
        s.src += unit * t.unit_bytes + kvpc_divide(unit, t.src.head) * (uint64_t)t.src.head_step;
    }
    const bool dst_inside = kvpc_is_inside(t.dst_rows, s.to), src_inside = kvpc_is_inside(t.src_rows, s.from);
    const bool fills = params::fills || sizeof(number) == 8;
    kvpc_chunk c;
    c.dst = s.dst + kvpc_place(t.dst, (number)kvpc_row_of(t.dst_rows, s.to));
    c.src = s.src + kvpc_place(t.src, (number)kvpc_row_of(t.src_rows, s.from));
    c.zero = fills && !src_inside;
    const number lead = words ? 0 : (number)(c.dst % 16), at = part ? part * p.part_bytes - lead : 0;
    number end = (part + 1) * p.part_bytes - lead;
    if (words ? end > (number)t.unit_bytes : part + 1 == (number)t.parts.by)
        end = (number)t.unit_bytes;
    c.dst += at, c.src += at;
    c.bytes = dst_inside && (src_inside || (fills && t.zero)) ? (uint32_t)(end - at) : 0;
    if ((fills ? !dst_inside || !src_inside : c.bytes == 0) && s.layer == 0 && s.in_row == 0 && first_lane)
        kvpc_count_past(t, s.to, s.from);
    return c;
}

/* Chunk `work` of all. */
template <bool words, class params, class number>
KVPRIM_DEVICE kvpc_chunk kvpc_find_chunk(const params &p, number work, bool first_lane)
{
    const kvpc_task &t = kvpc_task_of(p, work);
    const number of_task = params::most_tasks > 1 ? work - (number)t.first_chunk : work;
    return kvpc_chunk_at<words>(p, t, kvpc_find_spot(p, t, of_task), first_lane);
}

/* >>impl_move_kernels ---------------------------------------------------------------------------------------------- */

/* Whether a chunk is whole aligned words on both sides. */
KVPRIM_DEVICE bool kvpc_is_words(const kvpc_chunk &c)
{
    return (c.dst | c.src | c.bytes) % 16 == 0;
}

/* Of 1, 2, 4 or 8 bytes, at a multiple of them: such rows in pieces are one of vLLM's layouts. */
template <class piece> KVPRIM_DEVICE bool kvpc_copy_piece(const kvpc_chunk &c)
{
    if (c.bytes != sizeof(piece) || (c.dst | c.src) % sizeof(piece))
        return false;
    *(piece *)kvpc_global(c.dst) = c.zero ? piece{} : *(const piece *)kvpc_global(c.src);
    return true;
}

/* Words of a chunk that a thread moves: on the whole GPU, on few multiprocessors (of several moves, whose parameters
   take registers, half as many), and of any alignment. */
static const uint32_t kvpc_once_loads = 2, kvpc_few_loads = 8, kvpc_any_loads = 4;

/* A chunk of any alignment, by `lanes` threads, of which each has `loads` words on their way. */
template <uint32_t loads> KVPRIM_DEVICE void kvpc_copy_chunk(const kvpc_chunk &c, uint32_t lane, uint32_t lanes)
{
    const uint32_t lead = (uint32_t)(c.dst % 16), end = c.bytes ? lead + c.bytes : 0;
    if (loads == kvpc_any_loads && lanes == 1 &&
        (kvpc_copy_piece<uint2>(c) || kvpc_copy_piece<uint32_t>(c) || kvpc_copy_piece<uint16_t>(c) ||
         kvpc_copy_piece<char>(c)))
        return;
    for (uint32_t w = lane; 16 * w < end; w += loads * lanes)
        kvpc_copy_words<loads>(c.dst, c.src, (int32_t)lead, (int32_t)c.bytes, w, lanes, !c.zero, true, false);
}

/* Chunk `work`, of `loads` words a thread. A copy of another alignment has copy_loads of a thread on their way. */
template <bool words, uint32_t loads, uint32_t copy_loads, class params, class number>
KVPRIM_DEVICE void kvpc_move_chunk(const params &p, number work, uint32_t lane, uint32_t lanes)
{
    const uint32_t at = 16 * lane, step = 16 * lanes;
    const kvpc_chunk c = kvpc_find_chunk<words>(p, work, lane == 0);
    if (words || kvpc_is_words(c)) {
        uint64_t src[loads], dst[loads];
        uint4 v[loads];
        kvpc_place_words<loads>(src, c.src + at, step);
        kvpc_place_words<loads>(dst, c.dst + at, step);
        kvpc_load_words<loads, false>(v, !c.zero, src, step, at, c.bytes);
        kvpc_store_words<loads, false, false>(dst, v, step, at, c.bytes);
    } else
        kvpc_copy_chunk<copy_loads>(c, lane, lanes);
}

/* On the whole GPU: each group of threads moves one chunk. A copy of another alignment has one word on its way, so that
   it takes no registers from the rest. */
template <bool words, class params>
static __global__ void __launch_bounds__(kvpc_threads)
    kvpc_move_kernel(const KVPRIM_GRID_CONSTANT params KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = 1u << p.lanes_shift, in_block = kvpc_threads >> p.lanes_shift;
    const uint32_t work = blockIdx.x * in_block + (threadIdx.x >> p.lanes_shift);
    if (work >= (uint32_t)p.total)
        return;
    kvpc_pdl_wait(p.pdl);
    kvpc_move_chunk<words, kvpc_once_loads, 1>(p, work, threadIdx.x & (lanes - 1), lanes);
}

/* On as many multiprocessors as there are: each group moves one chunk after the other. */
template <class number, class params>
static __global__ void __launch_bounds__(kvpc_unaligned_threads)
    kvpc_move_any_kernel(const KVPRIM_GRID_CONSTANT params KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = 1u << p.lanes_shift, lane = threadIdx.x & (lanes - 1);
    const number in_block = blockDim.x >> p.lanes_shift, groups = gridDim.x * in_block;
    kvpc_pdl_wait(p.pdl);
    for (number work = blockIdx.x * in_block + (threadIdx.x >> p.lanes_shift); work < (number)p.total; work += groups)
        kvpc_move_chunk<false, kvpc_any_loads, kvpc_any_loads>(p, work, lane, lanes);
}

/* The words of a chunk from byte `at` on, `step` bytes apart. */
template <uint32_t loads> KVPRIM_DEVICE void kvpc_load_once(const kvpc_chunk &c, uint32_t at, uint32_t step, uint4 *v)
{
    for (uint32_t k = 0; k < loads; k++) {
        v[k] = uint4{0, 0, 0, 0};
        if (!c.zero && at + step * k < c.bytes)
            v[k] = kvpc_load16_once(c.src + at + step * k);
    }
}

template <uint32_t loads>
KVPRIM_DEVICE void kvpc_store_once(const kvpc_chunk &c, uint32_t at, uint32_t step, const uint4 *v)
{
    for (uint32_t k = 0; k < loads; k++)
        if (at + step * k < c.bytes)
            kvpc_store16_once(c.dst + at + step * k, v[k]);
}

/* On sm_75 and sm_120 the kernel below would spill if it found the next chunk before it stored the last one. */
enum { kvpc_stores_first = kvpc_arch != 0 && (kvpc_arch < 800 || kvpc_arch >= 1200) };

/* On few multiprocessors. While one chunk is on its way, a group finds the next. */
template <bool words, uint32_t loads, class params>
static __global__ void __launch_bounds__(kvpc_few_sms_threads)
    kvpc_move_few_kernel(const KVPRIM_GRID_CONSTANT params KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = 1u << p.lanes_shift, lane = threadIdx.x & (lanes - 1), at = 16 * lane;
    const uint32_t in_block = blockDim.x >> p.lanes_shift, groups = gridDim.x * in_block;
    uint4 v[loads];
    kvpc_chunk c = {0, 0, 0, false};
    kvpc_pdl_wait(p.pdl);
    for (uint32_t work = blockIdx.x * in_block + (threadIdx.x >> p.lanes_shift); work < (uint32_t)p.total;
         work += groups) {
        if (kvpc_stores_first)
            kvpc_store_once<loads>(c, at, 16 * lanes, v);
        const kvpc_chunk next = kvpc_find_chunk<words>(p, work, lane == 0);
        if (!kvpc_stores_first)
            kvpc_store_once<loads>(c, at, 16 * lanes, v);
        c = next;
        if (!words && !kvpc_is_words(c)) {
            kvpc_copy_chunk<kvpc_bytes_loads>(c, lane, lanes);
            c.bytes = 0;
        }
        kvpc_load_once<loads>(c, at, 16 * lanes, v);
    }
    kvpc_store_once<loads>(c, at, 16 * lanes, v);
}

/* A transfer over the link whose units are no whole lines of 128 bytes. On one side, called near, units follow each
   other in a run; on the other, called far, they lie apart. Near may be the host's page that holds all layers of a
   token, far the layers on the GPU. Either side may be dst. */
typedef struct kvpc_lines {
    uint64_t total;                    /* shares */
    kvpc_divisor shares;               /* of a run */
    kvpc_divisor words;                /* of a unit, of 16 bytes */
    uint32_t run_words, units, groups; /* units of a run; runs of a row, near_step apart */
    uint32_t near_is_dst, pdl;
    kvpc_task task; /* what names the rows, and where they lie */
    uint64_t near_base, near_step;
    uint64_t unit[400]; /* of all groups: where it lies in row 0 of the far side */
} kvpc_lines;

enum { kvpc_line_words = 8, kvpc_share_loads = 4, kvpc_share_words = 32 * kvpc_share_loads };

static_assert(sizeof(kvpc_lines) <= kvpc_params_bytes, "no room");

/* Each warp moves a share of a run: whole, aligned lines of 128 bytes, of which the first and the last may be less.
   PCIe's packets are then as long as they can be: rows of 656 bytes move 52 GB/s on 8 multiprocessors of an H200, and
   30 if each row is stored by itself, on however many. */
static __global__ void __launch_bounds__(kvpc_few_sms_threads)
    kvpc_lines_kernel(const KVPRIM_GRID_CONSTANT kvpc_lines KVPRIM_IN_PLACE p)
{
    const uint32_t in_block = blockDim.x / 32, lane = threadIdx.x % 32;
    const kvpc_task &t = p.task;
    kvpc_pdl_wait(p.pdl);
    for (uint32_t work = blockIdx.x * in_block + threadIdx.x / 32; work < (uint32_t)p.total;
         work += gridDim.x * in_block) {
        const uint32_t run = kvpc_divide(work, p.shares), share = work - run * (uint32_t)p.shares.by;
        const uint32_t group = kvpc_divide(run, t.count), i = run - group * (uint32_t)t.count.by;
        int64_t to, from;
        kvpc_load_indices(t, i, &to, &from);
        if (!kvpc_is_inside(t.dst_rows, to) || !kvpc_is_inside(t.src_rows, from)) {
            if (group == 0 && share == 0 && lane == 0)
                kvpc_count_past(t, to, from);
            continue;
        }
        const uint64_t dst = kvpc_place(t.dst, (uint32_t)kvpc_row_of(t.dst_rows, to)),
                       src = kvpc_place(t.src, (uint32_t)kvpc_row_of(t.src_rows, from));
        const uint64_t near_row = p.near_base + group * p.near_step + (p.near_is_dst ? dst : src);
        const uint64_t far_row = p.near_is_dst ? src : dst;
        const uint32_t first = share * kvpc_share_words + lane - (uint32_t)(near_row / 16 % kvpc_line_words);
        uint64_t far_word[kvpc_share_loads];
        uint4 v[kvpc_share_loads];
        for (uint32_t k = 0; k < kvpc_share_loads; k++) {
            const uint32_t w = first + 32 * k; /* more than run_words before the first one, too */
            const uint32_t u = w < p.run_words ? kvpc_divide(w, p.words) : 0;
            far_word[k] = p.unit[group * p.units + u] + far_row + 16 * (uint64_t)(w - u * (uint32_t)p.words.by);
            v[k] = uint4{0, 0, 0, 0};
            if (w < p.run_words)
                v[k] = kvpc_load16_once(p.near_is_dst ? far_word[k] : near_row + 16 * (uint64_t)w);
        }
        for (uint32_t k = 0; k < kvpc_share_loads; k++) {
            const uint32_t w = first + 32 * k;
            if (w < p.run_words)
                kvpc_store16_once(p.near_is_dst ? near_row + 16 * (uint64_t)w : far_word[k], v[k]);
        }
    }
}

/* >>impl_convert_elements --------------------------------------------------------------------------------------------

   Elements in registers, several at a time, with the bits of kvprim.h's >>impl_elements. Inline PTX, because compiler
   options (--use_fast_math) change what C's operators do. What has no instruction takes the functions of kvprim.h. */
#ifndef KVPRIM_NO_CONVERT

/* Keeps code that seldom runs out of the way. */
#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_UNLIKELY(condition) __builtin_expect(condition, 0)
#else
#define KVPRIM_UNLIKELY(condition) (condition)
#endif

/* An operation on fp32: in PTX, and elsewhere as kvprim.h has it. */
#ifdef __CUDA_ARCH__
#define KVPRIM_OPERATION(ptx, a, b, on_host)                                                                           \
    float r;                                                                                                           \
    asm(ptx : "=f"(r) : "f"(a), "f"(b));                                                                               \
    return r
#else
#define KVPRIM_OPERATION(ptx, a, b, on_host) return on_host
#endif

KVPRIM_DEVICE float kvpc_mul(float a, float b)
{
    KVPRIM_OPERATION("mul.rn.f32 %0, %1, %2;", a, b, kvpi_product(a, b));
}

KVPRIM_DEVICE float kvpc_divide_exactly(float a, float b)
{
    KVPRIM_OPERATION("div.rn.f32 %0, %1, %2;", a, b, kvpi_quotient(a, b));
}

/* 1 / a, within a unit of the last place; of 0 infinity, and of infinity 0. */
KVPRIM_DEVICE float kvpc_near_reciprocal(float a)
{
    KVPRIM_OPERATION("rcp.approx.ftz.f32 %0, %1;", a, a, kvpi_quotient(1, a));
}

/* The larger of a and |b|; a if b is NaN. */
KVPRIM_DEVICE float kvpc_max_magnitude(float a, float b)
{
    KVPRIM_OPERATION("{.reg .f32 m; abs.f32 m, %2; max.f32 %0, %1, m;}", a, b,
                     kvpi_float_of(kvpi_tile_most(kvpi_bits_of(a), b)));
}

#ifdef __CUDA_ARCH__
/* The smaller of a and |b|. */
KVPRIM_DEVICE float kvpc_min_magnitude(float a, float b)
{
    KVPRIM_OPERATION("{.reg .f32 m; abs.f32 m, %2; min.f32 %0, %1, m;}", a, b, );
}

/* a * b + c, rounded once. */
KVPRIM_DEVICE float kvpc_fma(float a, float b, float c)
{
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
#endif

/* 1 for scales that are not from 2^-64 to 2^84: those that rely on it are kvpc_apply_reciprocal, kvpc_usual_reciprocal
   and the estimate of kvpc_compute_packed_scale. */
KVPRIM_DEVICE uint32_t kvpc_is_unusual(float scale)
{
    return kvpi_bits_of(scale) - 0x1f800000 >= 0x69800000 - 0x1f800000;
}

KVPRIM_DEVICE float kvpc_reciprocal(float a)
{
    KVPRIM_OPERATION("rcp.rn.f32 %0, %1;", a, a, kvpi_quotient(1, a));
}

/* The same of a usual number, in the compiler's steps without its test for others. */
KVPRIM_DEVICE float kvpc_usual_reciprocal(float a)
{
#ifdef __CUDA_ARCH__
    const float r = kvpc_near_reciprocal(a);
    return kvpc_fma(kvpc_fma(-a, r, 1), r, r);
#else /* as kvpc_apply_reciprocal */
    return kvpc_is_unusual(a) ? a : kvpi_quotient(1, a);
#endif
}

/* What divides elements by a scale that many of them share, or multiplies them by it. */
typedef struct kvpc_factor {
    float high, low; /* the factor, in two parts if it is a reciprocal */
    float scale;     /* what it is of */
    bool divides;
    bool exactly; /* by the division itself, as kvpc_apply_reciprocal cannot */
} kvpc_factor;

KVPRIM_DEVICE kvpc_factor kvpc_times(float factor)
{
    return kvpc_factor{factor, 0, factor, false, false};
}

/* x / scale takes two instructions with `high` below 1 / scale and `low` above the rest:
       q = x * high + x * low
   rounded once, of a number that is larger than x / scale by a factor of 1 + 2^-43 to 1 + 2^-40.5. So q is correctly
   rounded except if a midpoint of two fp32 numbers lies that close above x / scale. Such a q may be one unit
   of the last place too large.
   That does not matter for x of 11 bits (fp16, bf16), because the type that q is rounded to next does not see it. It
   could only see it if M, a boundary between two numbers of that type, were one of those two fp32 numbers. Let
   M = m 2^b with m odd of n <= 8 bits (E4M3 5, E5M2 4, INT8 8, E2M1 3), and scale = S 2^a with S of 24 bits. Then
   M scale = m S 2^(a+b), and half a unit of q's last place is S 2^(n-25) times 2^(a+b) in x. x is a multiple of
   2^(a+b+11+n), so x - M scale is k 2^(a+b) with an integer k. For x / scale to be that close to the midpoint, S must
   be k 2^(25-n) + j with 1 <= |k| <= 2^(n-1) and |j| < 2^-40.5 2^49 < 363. Then m S +- k is x / 2^(a+b), a multiple
   of 2^(11+n), so m j +- k is a multiple of 2^min(25-n, 11+n); it is less, hence 0. As |k| <= 2^(n-1) <= m, this leaves
   |j| = 1 and m = k = 1: S = 2^24 - 1 and x a power of two. There x / scale lies above the midpoint, as q's operand
   does, and both are rounded up. (Below a power of two the unit is half as large; S 2^(n-26) < 1/2 is close to no k.)
   `low` is never 0, and has the sign of `high`: so zeros keep their sign, and infinity stays what it is.
   Scales from 2^-64 to 2^84 keep all this clear of underflow, where it matters: quotients below 2^-17 are 0, above 2^17
   the largest value. Other scales are brought there by a power of two, which multiplies x, too. */
KVPRIM_DEVICE kvpc_factor kvpc_over(float scale)
{
    kvpc_factor f = {scale, 0, scale, true, false};
#ifdef __CUDA_ARCH__
    f.high = kvpi_float_of(kvpi_bits_of(kvpc_near_reciprocal(scale)) - 2);
    f.low = kvpc_fma(kvpc_fma(-scale, f.high, 1), f.high, kvpc_mul(f.high, 4.547473508864641e-13f)); /* 2^-41 */
#endif
    return f;
}

/* Divides n numbers of 11 bits by a scale that is usual (see kvpc_is_unusual). */
template <uint32_t n> KVPRIM_DEVICE void kvpc_apply_reciprocal(float *x, const kvpc_factor &f)
{
    for (uint32_t k = 0; k < n; k++)
#ifdef __CUDA_ARCH__
        x[k] = kvpc_fma(x[k], f.high, kvpc_mul(x[k], f.low));
#else /* another scale spoils the number, so that tests without a GPU see it */
        x[k] = kvpc_is_unusual(f.scale) ? f.scale : kvpi_quotient(x[k], f.scale);
#endif
}

typedef struct kvpc_octet {
    float e[8];
} kvpc_octet;

/* Divides numbers of 11 bits by a scale of any kind, with less code than divisions take. */
KVPRIM_DEVICE kvpc_octet kvpc_divide_by_any(kvpc_octet x, float scale)
{
#ifdef __CUDA_ARCH__
    const uint32_t bits = kvpi_bits_of(scale), magnitude = bits & 0x7fffffff;
    const uint32_t power = magnitude < 0x1f800000 ? 0x6f800000 : magnitude >= 0x69800000 ? 0x1f800000 : 0x3f800000;
    const float before = kvpi_float_of(power | (bits & 0x80000000)); /* 2^96, 2^-64, 1 */
    kvpc_factor f = kvpc_over(kvpc_mul(scale, before));
    if (magnitude == 0 || magnitude >= 0x7f800000)
        f.high = f.low = kvpc_near_reciprocal(f.scale); /* infinity, 0, or NaN */
    for (uint32_t k = 0; k < 8; k++)
        x.e[k] = kvpc_mul(x.e[k], before);
    kvpc_apply_reciprocal<8>(x.e, f);
#else
    for (uint32_t k = 0; k < 8; k++)
        x.e[k] = kvpi_quotient(x.e[k], scale);
#endif
    return x;
}

/* Scales n numbers. */
template <uint32_t n> KVPRIM_DEVICE void kvpc_apply(float *x, const kvpc_factor &f)
{
    if (!f.divides)
        for (uint32_t k = 0; k < n; k++)
            x[k] = kvpc_mul(x[k], f.high);
    else if (f.exactly)
        for (uint32_t k = 0; k < n; k++)
            x[k] = kvpc_divide_exactly(x[k], f.scale);
    else
        kvpc_apply_reciprocal<n>(x, f);
}

/* The scale of a tile whose largest magnitude is `largest`: see >>format. The type's largest value, `by`, is 3, 7 or
   127 times a power of two. Quotients by it lie at least 1/127 of half a unit from the midpoints of fp32 numbers, so
   one step of correction rounds them correctly. Those below 2^-126 may be wrong: `least` is at least that. */
KVPRIM_DEVICE float kvpc_tile_scale(float largest, float by, float inverse, float least, bool power_of_two)
{
    const float finite = kvpi_tile_largest(kvpi_bits_of(largest));
#ifdef __CUDA_ARCH__
    const float q = kvpc_mul(finite, inverse), quotient = kvpc_fma(kvpc_fma(-q, by, finite), inverse, q);
#else
    const float quotient = kvpi_quotient(finite, by);
    (void)inverse;
#endif
    return kvpi_tile_scale(quotient, least, power_of_two);
}

/* How many elements fill a word. */
KVPRIM_DEVICE uint32_t kvpc_in_word(kvprim_dtype type)
{
    return kvpi_is_four_bit(type) ? 8 : 4 / (uint32_t)kvpi_dtype_bytes(type);
}

/* The elements in the low and in the third half byte of a word: *x and x[4]. */
template <kvprim_dtype type> KVPRIM_DEVICE void kvpc_decode_four_bits(float *x, uint32_t word)
{
#ifdef __CUDA_ARCH__ /* a code in the middle of an fp16 is that 2^-14 times; 2^23 + 8 + the value, less 2^23 + 8 */
    if (type == KVPRIM_F4E2M1) {
        const uint32_t tiny = (word << 9 & 0x0e000e00) | (word << 12 & 0x80008000);
        float pair[2];
        uint32_t halves;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(tiny), "r"(0x74007400)); /* 2^14 */
        kvpi_of_f16x2(pair, halves);
        x[0] = pair[0], x[4] = pair[1];
    } else {
        for (uint32_t k = 0; k < 8; k += 4)
            x[k] = kvpi_float_of(((word >> 4 * k & 15) ^ 0x4b000008)) - 8388616.0f;
    }
#else
    for (uint32_t k = 0; k < 8; k += 4)
        x[k] = type == KVPRIM_F4E2M1 ? kvpi_of_e2m1(word >> 4 * k) : kvpi_of_int4(word >> 4 * k);
#endif
}

/* The numbers of one word: 1 of fp32, 2 of fp16 and bf16, 4 of the 8-bit types, 8 of those of 4 bits. */
template <kvprim_dtype type> KVPRIM_DEVICE void kvpc_decode_word(float *x, uint32_t word)
{
    if (type == KVPRIM_F32)
        x[0] = kvpi_float_of(word);
    else if (type == KVPRIM_BF16)
        x[0] = kvpi_float_of(word << 16), x[1] = kvpi_float_of(word & 0xffff0000);
    else if (type == KVPRIM_F16)
        kvpi_of_f16x2(x, word);
    else if (kvpi_is_four_bit(type))
        for (uint32_t k = 0; k < 4; k++)
            kvpc_decode_four_bits<type>(x + k, word >> 4 * k);
    else if (type != KVPRIM_INT8)
        kvpi_of_f8x4(type, x, word);
    else
        for (uint32_t k = 0; k < 4; k++)
#ifdef __CUDA_ARCH__ /* 2^23 + 128 + the value, less 2^23 + 128 */
            x[k] = kvpi_float_of(__byte_perm(word ^ 0x80808080, 0x4b000000, 0x7440 + k)) - 8388736.0f;
#else
            x[k] = kvpi_of_int8(word >> 8 * k & 0xff);
#endif
}

/* Eight elements of 4 bits. */
template <kvprim_dtype type> KVPRIM_DEVICE uint32_t kvpc_encode_four_bits(const float *x)
{
    uint32_t word = 0, signs = 0;
    for (uint32_t k = 0; k < 8; k++)
#ifdef __CUDA_ARCH__ /* a magnitude's code is min(2 a, a + 2, a / 2 + 4), rounded; sums with 2^23 round once */
        if (type == KVPRIM_F4E2M1) {
            const float a = kvpc_min_magnitude(6, x[k]);
            const uint32_t low = kvpi_bits_of(kvpc_fma(a, 2, 8388608)), middle = kvpi_bits_of(kvpc_fma(a, 1, 8388610)),
                           high = kvpi_bits_of(kvpc_fma(a, 0.5f, 8388612)), least = low < middle ? low : middle;
            word += ((least < high ? least : high) - 0x4b000000) << 4 * k;
            signs = __funnelshift_l(kvpi_bits_of(x[7 - k]), signs, 4); /* the highest bit of each 4 */
        } else
#endif
            word |= (type == KVPRIM_F4E2M1 ? kvpi_to_e2m1(x[k]) : kvpi_to_int4(x[k])) << 4 * k;
    return word | (signs & 0x88888888);
}

/* The reverse, rounded to the nearest and saturated as >>format says; E2M1 without NaN. */
template <kvprim_dtype type> KVPRIM_DEVICE uint32_t kvpc_encode_word(const float *x)
{
    uint32_t word = 0;
    if (type == KVPRIM_F8E4M3 || type == KVPRIM_F8E5M2)
        word = kvpi_to_f8x4(type, x);
    else if (kvpi_is_four_bit(type))
        word = kvpc_encode_four_bits<type>(x);
    else
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        if (type == KVPRIM_F16)
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(x[0]), "f"(x[1]));
    else if (type == KVPRIM_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(x[0]), "f"(x[1]));
    else
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 720
        if (type == KVPRIM_INT8) { /* NaN becomes 0, and -128 is no value */
        int32_t i[4];
        for (uint32_t k = 0; k < 4; k++)
            asm("{.reg .s32 a; cvt.rni.s32.f32 a, %1; max.s32 %0, a, -127;}" : "=r"(i[k]) : "f"(x[k]));
        asm("{.reg .b32 h; cvt.pack.sat.s8.s32.b32 h, %4, %3, 0; cvt.pack.sat.s8.s32.b32 %0, %2, %1, h;}"
            : "=r"(word)
            : "r"(i[0]), "r"(i[1]), "r"(i[2]), "r"(i[3]));
    } else
#endif
        for (uint32_t k = 0, n = kvpc_in_word(type); k < n; k++)
            word |= kvpi_to_element(type, x[k]) << 32 / n * k;
    return word;
}

/* Makes 0 of each NaN, as INT8 does, and returns how many. The test by one sum is also true for sums of infinities. */
template <uint32_t n> KVPRIM_DEVICE uint32_t kvpc_clear_nans(float *x)
{
    uint32_t nans = 0;
    float sum = x[0];
    for (uint32_t k = 1; k < n; k++)
        sum += x[k];
    if (kvpi_is_nan(sum))
        for (uint32_t k = 0; k < n; k++)
            if (kvpi_is_nan(x[k]))
                x[k] = 0, nans++;
    return nans;
}

/* n elements in consecutive words, which they fill; or one or two, the first of a word: then x has room for all. */
template <kvprim_dtype type, uint32_t n> KVPRIM_DEVICE void kvpc_decode(float *x, const uint32_t *words)
{
    const uint32_t in_word = kvpc_in_word(type);
    for (uint32_t w = 0; w < (n + in_word - 1) / in_word; w++)
        kvpc_decode_word<type>(x + w * in_word, words[w]);
}

template <kvprim_dtype type, uint32_t n> KVPRIM_DEVICE void kvpc_encode(uint32_t *words, const float *x)
{
    const uint32_t in_word = kvpc_in_word(type);
    for (uint32_t w = 0; w < (n + in_word - 1) / in_word; w++)
        words[w] = kvpc_encode_word<type>(x + w * in_word);
}

/* The tensor's scale, if there is one. */
KVPRIM_DEVICE float kvpc_load_tensor(uint64_t address)
{
    return address ? kvpc_load_f32(address) : 1;
}

/* Scales of 4-bit elements, of any type in >>format: the bytes of one, its bits (0 of 0 bytes), and what they mean. */
KVPRIM_DEVICE uint32_t kvpc_bytes_of_scale(kvprim_dtype type)
{
    return type == KVPRIM_F32 ? 4 : type == KVPRIM_F16 ? 2 : 1;
}

KVPRIM_DEVICE uint32_t kvpc_load_any_scale(uint64_t address, uint32_t bytes)
{
#ifdef __CUDA_ARCH__ /* without branches, which loads after it would wait for */
    uint32_t code;
    asm volatile("{.reg .pred word, half, byte; setp.eq.u32 word, %2, 4; setp.eq.u32 half, %2, 2; "
                 "setp.eq.u32 byte, %2, 1; mov.u32 %0, 0; @word ld.global.u32 %0, [%1]; @half ld.global.u16 %0, [%1]; "
                 "@byte ld.global.u8 %0, [%1];}"
                 : "=&r"(code)
                 : "l"(address), "r"(bytes));
    return code;
#else
    return bytes == 4   ? *(const uint32_t *)kvpc_global(address)
           : bytes == 2 ? *(const uint16_t *)kvpc_global(address)
           : bytes      ? *(const uint8_t *)kvpc_global(address)
                        : 0;
#endif
}

KVPRIM_DEVICE float kvpc_any_scale_of(uint32_t code, kvprim_dtype type)
{
    return type == KVPRIM_F32 ? kvpi_float_of(code) : kvpi_of_short_scale(type, code);
}

KVPRIM_DEVICE void kvpc_store_any_scale(uint64_t address, uint32_t code, kvprim_dtype type)
{
    char *const at = kvpc_global(address);
    if (type == KVPRIM_F32)
        *(uint32_t *)at = code;
    else if (type == KVPRIM_F16)
        *(uint16_t *)at = (uint16_t)code;
    else
        *(uint8_t *)at = (uint8_t)code;
}

typedef struct kvpc_any_scale {
    float divisor;
    uint32_t code;
} kvpc_any_scale;

/* As kvpc_tile_scale. `outer`: the tensor's scale; 1, which changes nothing, if there is none. */
KVPRIM_DEVICE kvpc_any_scale kvpc_compute_any_scale(float largest, float by, float inverse, float least,
                                                    bool power_of_two, kvprim_dtype type, float outer)
{
    kvpc_any_scale s;
    float scale = kvpc_tile_scale(largest, by, inverse, outer == 1 ? least : FLT_MIN, outer == 1 && power_of_two);
    if (outer != 1) {
        const float quotient = KVPRIM_UNLIKELY(largest < 1e-36f) ? kvpc_divide_exactly(largest, by) : scale;
        scale = kvpi_tile_scale(kvpi_tile_quotient(kvpc_divide_exactly(quotient, outer)), least, power_of_two);
    }
    s.code = kvpi_bits_of(scale), s.divisor = scale;
    if (type == KVPRIM_F8E4M3)
        s.code = kvpi_to_short_scale(KVPRIM_F8E4M3, scale), s.divisor = kvpi_of_short_scale(KVPRIM_F8E4M3, s.code);
    else if (type != KVPRIM_F32)
        s.code = kvpi_to_short_scale(type, scale), s.divisor = kvpi_of_short_scale(type, s.code);
    s.divisor = kvpi_tile_divisor(kvpc_mul(s.divisor, outer));
    return s;
}

/* The larger magnitudes of two words of fp16 or bf16, element by element, with any signs. Beside a number NaN does not
   count, or with `nans` is the larger one. */
template <kvprim_dtype type, bool nans = false> KVPRIM_DEVICE uint32_t kvpc_most(uint32_t a, uint32_t b)
{
    uint32_t most = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    if (type == KVPRIM_BF16 && nans)
        asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else if (type == KVPRIM_F16 && nans)
        asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else if (type == KVPRIM_BF16)
        asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else if (type == KVPRIM_F16)
        asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else
#endif
        for (uint32_t shift = 0; shift < 32; shift += 16) {
            const uint32_t infinity = type == KVPRIM_F16 ? 0x7c00 : 0x7f80;
            const uint32_t x = a >> shift & 0x7fff, y = b >> shift & 0x7fff;
            const uint32_t left = x > infinity && !nans ? 0 : x, right = y > infinity && !nans ? 0 : y;
            most |= (left > right ? left : right) << shift;
        }
    return most;
}

/* The same of all elements of octets. */
template <kvprim_dtype type, uint32_t n, bool nans> KVPRIM_DEVICE uint32_t kvpc_most_in(const uint4 *v)
{
    uint32_t most = 0;
    for (uint32_t k = 0; k < n; k++) {
        const uint32_t x = kvpc_most<type, nans>(v[k].x, v[k].y), z = kvpc_most<type, nans>(v[k].z, v[k].w);
        const uint32_t of_octet = kvpc_most<type, nans>(x, z);
        most = k ? kvpc_most<type, nans>(most, of_octet) : of_octet;
    }
    return most;
}

/* Whether there are NaNs, by what kvpc_most with `nans` gives. */
template <kvprim_dtype type> KVPRIM_DEVICE bool kvpc_has_nans(uint32_t most)
{
    return (((most & 0x7fff7fff) + (type == KVPRIM_F16 ? 0x03ff03ff : 0x007f007f)) & 0x80008000) != 0; /* > infinity */
}

/* The largest of them. */
template <kvprim_dtype type> KVPRIM_DEVICE float kvpc_most_of(uint32_t most)
{
    float x[2] = {0, 0};
    kvpc_decode_word<type>(x, most);
    return kvpc_max_magnitude(kvpc_max_magnitude(0, x[0]), x[1]);
}
#endif

/* >>impl_convert_rows ------------------------------------------------------------------------------------------------

   Stores and gathers that convert plain rows (see kvpc_is_plain), where the indexed side is quantised and the other one
   fp16 or bf16. An octet is 8 elements: a word of 16 bytes there, 8 bytes on the quantised side, or 4 of F4E2M1. */
#ifndef KVPRIM_NO_CONVERT

/* K, V, or a half of the octets of K's rows: a line of the constant cache (see kvpc_convert). */
typedef struct kvpc_route {
    uint64_t dst;
    uint64_t scales; /* of the first octet's tile; 0: there are none, all are 1 */
    uint64_t tensor; /* of 4 bits: where the tensor's scale lies, or 0 */
    uint32_t dst_stride;
    uint32_t page, head;            /* see kvpc_steps */
    uint32_t tile;                  /* bytes from one tile's or head's scale to the next */
    uint32_t scale_row, scale_page; /* as dst_stride and `page`; 0: rows share their scales */
    union {             /* the second one of each from kvpc_set_tile_format on: stores that compute scales */
        uint32_t octet; /* the number of the first octet in the row */
        float least;    /* the smallest scale */
    };
    union {
        uint32_t octets;
        float largest; /* the type's largest value */
    };
    union {
        uint32_t edges; /* bytes of a row whose edges are fetched, or 0 */
        float inverse;  /* of `largest` */
    };
} kvpc_route;

/* How plain rows convert. The lowest bits are a kvpc_dependence: what is in a register since the kernel's begin does
   not wait for the constant cache where it is used. */
enum {
    kvpc_dependences = 3,
    kvpc_divides = 4,   /* otherwise elements are multiplied by their scale, or by its reciprocal */
    kvpc_e5m2 = 8,      /* not E4M3 */
    kvpc_e8m0 = 16,     /* scales; not fp32 */
    kvpc_by_fours = 32, /* octets of the quantised side are at multiples of 4, not 8 */
    kvpc_power_of_two = 64,
    kvpc_wide_index = 128,
    kvpc_has_heads = 256,   /* scales have heads: see kvpc_order_scale */
    kvpc_has_edges = 512,   /* see kvpc_convert_tiles */
    kvpc_scales_shift = 10, /* these 6 bits: the type of the scales, beside F4E2M1 */
    kvpc_rounds_shift = 16  /* from this bit on: tiles of a row that a thread takes part in; of 4 bits more than 1 */
};

KVPRIM_DEVICE kvprim_dtype kvpc_scales_of(uint32_t how)
{
    return (kvprim_dtype)(how >> kvpc_scales_shift & 63);
}

/* What the kernels convert to and from. */
enum { kvpc_8_bits, kvpc_int8, kvpc_4_bits };
static_assert((int)kvpc_trigger_late <= kvpc_dependences, "the lowest bits of kvpc_convert.how");

/* In the order of use, as few rows take as long as their parameters take to come: see kvpc_plain. The first 48 bytes
   and each 64 after them are a line of the constant cache. */
typedef struct kvpc_convert {
    uint64_t index;
    uint32_t index_step, how;
    uint32_t count, row_magic;
    uint32_t block_rows, row_threads;
    uint32_t octets;    /* of the longest route */
    uint32_t k_threads; /* of kvpc_convert_tiles, as are lanes_shift, tile_octets and v_magic */
    union {
        uint32_t lanes_shift;
        uint32_t apart; /* of stores whose scales are given: 1 if blocks move K or V, by the lowest bit of blockIdx.x */
    };
    uint32_t tile_octets;

    uint64_t src[2]; /* of each route */
    uint32_t src_stride[2];
    uint32_t rows, base;
    uint32_t v_magic, v_words;       /* v_magic: as row_magic */
    kvpc_divisor32 page, head, tile; /* rows of a page, octets of a head and of a tile; 0: it is all, the row */

    kvpc_route route[2];
    uint32_t *nans, *rejected;
    uint32_t index_is_i64;
    /* With kvpc_has_heads: octets of a head; bytes that each adds, and each four rows that are swizzled, by route. */
    kvpc_divisor32 scale_heads;
    uint32_t scale_head[2], scale_rows[2];
} kvpc_convert;
static_assert(sizeof(kvpc_route) == 64 && offsetof(kvpc_convert, route) % 64 == 48, "a route is one line");

/* Stores that compute scales. Each block_rows rows take k_threads threads for K, 1 << lanes_shift (up to 32) for each
   tile, and, where V's words are only copied, as many more as these. Other blocks move V if it has tiles, too.
   Of few tiles each thread has one octet: of a row's row_threads, those before k_threads move K, and those from there
   to v_words V; src[1] and src_stride[1] are then V's less K's. 1 to 64 rows so take 0.87 of the time (H200). */
typedef struct kvpc_convert_tiles : kvpc_convert {
    uint32_t edges, scale_edges; /* bytes of a row and of its scales whose edges are fetched first, or 0 */
    uint32_t edge_lanes;         /* a mask: the threads of a row that do so; `edges` are then those of a head */
    uint32_t round_tiles, round_heads, round_dst; /* of 4 bits, from one round to the next; bytes in dst */
} kvpc_convert_tiles;

/* Where a scale lies that is at `at` without what its head and its group of rows add. */
KVPRIM_DEVICE uint64_t kvpc_order_scale(const kvpc_convert &p, uint32_t route, uint64_t at, uint32_t octet,
                                        uint32_t row)
{
    if (!(p.how & kvpc_has_heads))
        return at;
    return kvpc_row_at(kvpc_row_at(at, kvpc_divide(octet, p.scale_heads), p.scale_head[route]), row / 4,
                       p.scale_rows[route]);
}

/* Bytes from a row's start to the head that an octet lies in, beyond what its number says. */
KVPRIM_DEVICE uint64_t kvpc_head_at(const kvpc_convert &p, const kvpc_route &s, uint64_t at, uint32_t octet)
{
    return kvpc_row_at(at, kvpc_divide(octet + s.octet, p.head), s.head);
}

/* The scale of a tile of E2M1. A function, so that its code is not fetched with what surrounds the call. */
KVPRIM_DEVICE_SELDOM kvpc_any_scale kvpc_compute_scale_seldom(float largest, float least, bool power_of_two,
                                                              kvprim_dtype type, float outer)
{
    return kvpc_compute_any_scale(largest, 6, 1.0f / 6, least, power_of_two, type, outer);
}

/* The same in the kernels of plain rows, for `largest` of 11 bits, and quickly where the scales are
   - E4M3. estimate: about 1 / (6 outer), or 0 if it cannot be used. `largest` times it is within 2^-20 of what the two
     divisions give, except of quotients so small that E4M3 has 0 for them. So it decides where both its sides, 2^-19 of
     it away, are rounded to the same code.
   - E8M0 alone. A power of two times up to 1.5 gets a quarter of that power, as its sixth is no larger. */
KVPRIM_DEVICE kvpc_any_scale kvpc_compute_packed_scale(float largest, uint32_t how, float least, float outer,
                                                       float estimate)
{
    kvpc_any_scale s;
    if (estimate > 0) {
        const float quotient = kvpc_mul(largest, estimate), q = quotient > least ? quotient : least;
        const float sides[4] = {kvpc_mul(q, 1 - 1.9073486e-6f), kvpc_mul(q, 1 + 1.9073486e-6f), 0, 0};
        const uint32_t codes = kvpi_to_f8x4(KVPRIM_F8E4M3, sides);
        s.code = codes & 0xff;
        s.divisor = kvpi_tile_divisor(kvpc_mul(kvpi_of_short_scale(KVPRIM_F8E4M3, s.code), outer));
        if (!KVPRIM_UNLIKELY(codes >> 8 != s.code))
            return s;
    } else if (how & kvpc_e8m0 && outer == 1) {
        const uint32_t bits = kvpi_bits_of(kvpi_tile_largest(kvpi_bits_of(largest)));
        const uint32_t up = (bits + 0x3fffff) & 0x7f800000, quarter = up > 0x1000000 ? up - 0x1000000 : 0;
        s.divisor = kvpi_tile_scale(kvpi_float_of(quarter), least, 1);
        s.code = kvpi_bits_of(s.divisor) >> 23;
        return s;
    }
    return kvpc_compute_scale_seldom(largest, least, (how & kvpc_power_of_two) != 0, kvpc_scales_of(how), outer);
}

/* The address of the scale of an octet's tile, in a row whose scales begin at `row`. */
KVPRIM_DEVICE uint64_t kvpc_tile_at(const kvpc_convert &p, const kvpc_route &s, uint64_t row, uint32_t octet)
{
    return kvpc_row_at(row, kvpc_divide(octet + s.octet, p.tile), s.tile);
}

KVPRIM_DEVICE float kvpc_load_scale(uint64_t address, bool e8m0)
{
    return e8m0 ? kvpi_of_e8m0(kvpc_load_u8(address)) : kvpc_load_f32(address);
}

/* Stores a scale, or nothing. */
KVPRIM_DEVICE void kvpc_store_scale(bool stores, uint64_t address, float scale, bool e8m0)
{
    const uint32_t code = e8m0 ? kvpi_to_e8m0(scale) : kvpi_bits_of(scale), bytes = !stores ? 0 : e8m0 ? 1 : 4;
#ifdef __CUDA_ARCH__ /* without branches, which few rows would wait for */
    asm volatile("{.reg .pred byte, word; setp.eq.u32 byte, %2, 1; setp.eq.u32 word, %2, 4; "
                 "@byte st.global.u8 [%0], %1; @word st.global.u32 [%0], %1;}" ::"l"(address),
                 "r"(code), "r"(bytes)
                 : "memory");
#else
    if (bytes)
        kvpc_store_any_scale(address, code, e8m0 ? KVPRIM_F8E8M0 : KVPRIM_F32);
#endif
}

/* Stores the 8 bytes of an octet, one word or two of 4 bytes, or nothing. */
KVPRIM_DEVICE void kvpc_store_octet(bool stores, uint32_t how, uint64_t address, uint2 v)
{
    const uint32_t fours = how & kvpc_by_fours;
#ifdef __CUDA_ARCH__ /* without branches, which few rows would wait for */
    asm volatile("{.reg .pred stores, twice, once; setp.ne.u32 stores, %3, 0; setp.ne.and.u32 twice, %4, 0, stores; "
                 "setp.eq.and.u32 once, %4, 0, stores; @once st.global.v2.u32 [%0], {%1, %2}; "
                 "@twice st.global.u32 [%0], %1; @twice st.global.u32 [%0+4], %2;}" ::"l"(address),
                 "r"(v.x), "r"(v.y), "r"((uint32_t)stores), "r"(fours)
                 : "memory");
#else
    if (stores && fours) {
        ((uint32_t *)kvpc_global(address))[0] = v.x;
        ((uint32_t *)kvpc_global(address))[1] = v.y;
    } else if (stores) {
        kvpc_store8(address, v);
    }
#endif
}

/* Multiplies or divides octets by a scale each, or all by one or its reciprocal; the octets' steps interleave. */
template <uint32_t octets, bool own_scale>
KVPRIM_DEVICE void kvpc_scale_octets(uint32_t how, kvpc_octet *x, const float *scale)
{
    const bool multiplies = !(how & kvpc_divides);
    uint32_t unusual = own_scale && multiplies;
    for (uint32_t m = 0; m < (own_scale ? octets : 1); m++)
        unusual |= kvpc_is_unusual(scale[m]);
    if (!own_scale && multiplies) {
        const float times = kvpc_reciprocal(scale[0]);
        for (uint32_t m = 0; m < octets; m++)
            kvpc_apply<8>(x[m].e, kvpc_times(times));
    } else if (KVPRIM_UNLIKELY(unusual != 0))
        for (uint32_t m = 0; m < octets; m++)
            if (multiplies)
                kvpc_apply<8>(x[m].e, kvpc_times(scale[m]));
            else
                x[m] = kvpc_divide_by_any(x[m], scale[own_scale ? m : 0]);
    else
        for (uint32_t m = 0; m < octets; m++)
            kvpc_apply_reciprocal<8>(x[m].e, kvpc_over(scale[own_scale ? m : 0]));
}

/* Scales, rounds and stores octets. */
template <kvprim_dtype from, int kind, uint32_t octets, bool own_scale>
KVPRIM_DEVICE void kvpc_store_octets(uint32_t how, uint32_t *nans_at, const uint64_t *dst, const uint4 *v,
                                     const float *scale, const bool *stores)
{
    kvpc_octet x[octets];
    uint32_t out[octets][2];
    for (uint32_t m = 0; m < octets; m++) {
        const uint32_t in[4] = {v[m].x, v[m].y, v[m].z, v[m].w};
        kvpc_decode<from, 8>(x[m].e, in);
    }
    kvpc_scale_octets<octets, own_scale>(how, x, scale);
    if (kind == kvpc_int8 && nans_at) {
        uint32_t nans = 0;
        for (uint32_t m = 0; m < octets; m++)
            if (stores[m])
                nans += kvpc_clear_nans<8>(x[m].e);
        if (nans && nans_at)
            atomicAdd(nans_at, nans);
    }
    if (kind == kvpc_int8)
        for (uint32_t m = 0; m < octets; m++)
            kvpc_encode<KVPRIM_INT8, 8>(out[m], x[m].e);
    else if (KVPRIM_UNLIKELY((how & kvpc_e5m2) != 0))
        for (uint32_t m = 0; m < octets; m++)
            kvpc_encode<KVPRIM_F8E5M2, 8>(out[m], x[m].e);
    else
        for (uint32_t m = 0; m < octets; m++)
            kvpc_encode<KVPRIM_F8E4M3, 8>(out[m], x[m].e);
    for (uint32_t m = 0; m < octets; m++)
        kvpc_store_octet(stores[m], how, dst[m], uint2{out[m][0], out[m][1]});
}

/* Two octets of E2M1 with one scale, in any way. A function for the same reason as kvpc_compute_scale_seldom: formats
   without scale_inverse, except of powers of two alone, call it for each tile, and take 1.2 times as long (H200). */
template <kvprim_dtype from>
KVPRIM_DEVICE_SELDOM uint2 kvpc_pack_seldom(uint32_t how, uint4 a, uint4 b, float scale, uint32_t *nans_at)
{
    const uint32_t in[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    kvpc_octet x[2];
    kvpc_decode<from, 8>(x[0].e, in);
    kvpc_decode<from, 8>(x[1].e, in + 4);
    kvpc_scale_octets<2, false>(how, x, &scale);
    const uint32_t nans = kvpc_clear_nans<8>(x[0].e) + kvpc_clear_nans<8>(x[1].e);
    if (nans && nans_at)
        atomicAdd(nans_at, nans);
    return uint2{kvpc_encode_word<KVPRIM_F4E2M1>(x[0].e), kvpc_encode_word<KVPRIM_F4E2M1>(x[1].e)};
}

/* The same of numbers that a usual scale multiplies, one octet after the other, which takes few registers. */
template <kvprim_dtype from> KVPRIM_DEVICE uint2 kvpc_pack_octets(const uint4 *v, float scale)
{
    const kvpc_factor factor = kvpc_times(kvpc_usual_reciprocal(scale));
    uint32_t out[2];
    for (uint32_t m = 0; m < 2; m++) {
        const uint32_t in[4] = {v[m].x, v[m].y, v[m].z, v[m].w};
        float x[8];
        kvpc_decode<from, 8>(x, in);
        kvpc_apply<8>(x, factor);
        out[m] = kvpc_encode_word<KVPRIM_F4E2M1>(x);
    }
    return uint2{out[0], out[1]};
}

/* An octet of E4M3 or E5M2, the latter by a selection, which is faster than a branch (H200). */
KVPRIM_DEVICE uint2 kvpc_encode_octet(uint32_t how, const float *x)
{
    uint32_t e4m3[2], e5m2[2];
    kvpc_encode<KVPRIM_F8E4M3, 8>(e4m3, x);
    kvpc_encode<KVPRIM_F8E5M2, 8>(e5m2, x);
    return uint2{how & kvpc_e5m2 ? e5m2[0] : e4m3[0], how & kvpc_e5m2 ? e5m2[1] : e4m3[1]};
}

/* An octet of fp16 or bf16 by a scale that is usual: see kvpc_is_unusual. A scale that is `given` divides it. */
template <kvprim_dtype from, bool given> KVPRIM_DEVICE uint2 kvpc_scale_octet(uint32_t how, uint4 v, float scale)
{
    const uint32_t in[4] = {v.x, v.y, v.z, v.w};
    float x[8];
    kvpc_decode<from, 8>(x, in);
    if (given || how & kvpc_divides)
        kvpc_apply_reciprocal<8>(x, kvpc_over(scale));
    else
        kvpc_apply<8>(x, kvpc_times(kvpc_usual_reciprocal(scale)));
    return kvpc_encode_octet(how, x);
}

/* The same by any scale, which is rare. Without kvpc_divides times a given scale, or a computed one's reciprocal. */
template <kvprim_dtype from, bool given>
KVPRIM_DEVICE_SELDOM uint2 kvpc_scale_octet_seldom(uint32_t how, uint4 v, float scale)
{
    const uint32_t in[4] = {v.x, v.y, v.z, v.w};
    kvpc_octet x;
    kvpc_decode<from, 8>(x.e, in);
    if (how & kvpc_divides)
        x = kvpc_divide_by_any(x, scale);
    else
        kvpc_apply<8>(x.e, kvpc_times(given ? scale : kvpc_reciprocal(scale)));
    return kvpc_encode_octet(how, x.e);
}

/* >>impl_convert_kernels ------------------------------------------------------------------------------------------- */

/* Stores rows whose scales are given, or none. Each thread moves an octet of each of `routes` routes; of one, V's if
   the block is one of V's (see kvpc_convert.apart). */
template <kvprim_dtype from, int kind, uint32_t routes>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_convert_store_kernel(const KVPRIM_GRID_CONSTANT kvpc_convert KVPRIM_IN_PLACE p)
{
    static_assert(kind == kvpc_8_bits || routes == 2, "of one route there are only 8-bit floats");
    uint32_t i, at;
    const uint32_t how = p.how, dependence = how & kvpc_dependences;
    kvpc_pdl_trigger(dependence == kvpc_trigger_first);
    if (!kvpc_find_thread(p, true, 1, &i, &at, routes == 1 ? p.apart : 0) || at >= 16 * p.octets)
        return;
    const uint32_t second = routes == 1 ? blockIdx.x & p.apart : 0;
    const uint64_t index_at = kvpc_index_at(p, i);
    uint64_t src[routes], scale_at[routes];
    kvpc_settle(index_at);
    for (uint32_t m = 0; m < routes; m++) {
        src[m] = kvpc_row_at((second ? p.src[1] : p.src[m]) + at, i, second ? p.src_stride[1] : p.src_stride[m]);
        scale_at[m] = kvpc_tile_at(p, p.route[m + second], p.route[m + second].scales, at / 16);
        kvpc_settle(src[m]), kvpc_settle(scale_at[m]);
    }
    kvpc_pdl_wait(dependence != kvpc_alone);
    kvpc_pdl_trigger(dependence == kvpc_trigger_late); /* after the loads it would be compiled to wait for them */
    const kvpc_index x = kvpc_find_row(p, index_at, (how & kvpc_wide_index) != 0);
    uint4 v[routes];
    float scale[routes];
    bool stores[routes];
    for (uint32_t m = 0; m < routes; m++) {
        stores[m] = routes == 1 || at < 16 * p.route[m + second].octets;
        v[m] = uint4{0, 0, 0, 0};
        if (stores[m])
            v[m] = kvpc_load16(src[m]);
    }
    for (uint32_t m = 0; m < routes; m++) {
        scale[m] = 1;
        if (p.route[m + second].scales && stores[m])
            scale[m] = kvpc_load_f32(scale_at[m]);
    }
    const uint32_t page = kvpc_divide(x.row, p.page);
    uint64_t dst[routes];
    for (uint32_t m = 0; m < routes; m++) {
        const kvpc_route &s = p.route[m + second];
        const uint64_t row = kvpc_row_at(kvpc_row_at(s.dst, x.row, s.dst_stride), page, s.page);
        if (routes > 1 && s.edges && x.inside && at == 0)
            kvpc_fetch_edges(row, s.edges);
        dst[m] = kvpc_head_at(p, s, row + at / 16 * 8, at / 16);
        stores[m] = stores[m] && x.inside;
    }
    if (routes > 1) {
        kvpc_store_octets<from, kind, routes, true>(how, p.nans, dst, v, scale, stores);
    } else { /* no branch before the usual store: few rows would wait for it (H200) */
        const bool seldom = !(how & kvpc_divides) || kvpc_is_unusual(scale[0]);
        kvpc_fetch_edges(dst[0], p.route[second].edges, p.route[second].edges && x.inside && at == 0);
        kvpc_store_octet(stores[0] && !seldom, how, dst[0], kvpc_scale_octet<from, true>(how, v[0], scale[0]));
        if (KVPRIM_UNLIKELY(seldom))
            kvpc_store_octet(stores[0], how, dst[0], kvpc_scale_octet_seldom<from, true>(how, v[0], scale[0]));
    }
    if (!x.inside && at == 0 && second == 0)
        kvpc_count_rejected(p, x);
}

/* Gathers rows. Each thread moves an octet, and with `loads` 2 one more, row_threads further; where the octets end,
   that is a word that is only copied: V's words follow K's octets. */
template <kvprim_dtype to, int kind, uint32_t loads>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_convert_gather_kernel(const KVPRIM_GRID_CONSTANT kvpc_convert KVPRIM_IN_PLACE p)
{
    const uint32_t octet_bytes = kind == kvpc_4_bits ? 4 : 8;
    const kvpc_route &s = p.route[0];
    const uint32_t how = p.how, dependence = how & kvpc_dependences;
    uint32_t i, at;
    const bool any = kvpc_find_thread(p, true, loads, &i, &at);
    if (loads > 1 && !any) /* many rows would take up to 1.03 of the time if they left later */
        return;
    const uint32_t first = at / 16, step = p.row_threads;
    const bool by_fours = loads > 1 && (how & kvpc_by_fours); /* few rows by eights would take 1.05 times as long */
    const uint64_t index_at = kvpc_index_at(p, any ? i : 0);
    kvpc_settle(index_at);
    kvpc_pdl_wait(dependence != kvpc_alone);
    kvpc_index x = kvpc_load_index(index_at, (how & kvpc_wide_index) != 0);
    kvpc_settle_index(x);
    if (!any) /* few rows: as kvpc_gather_kernel */
        return;
    kvpc_apply_index_rule(p, &x);
    float scale[loads];
    uint2 v[loads];
    uint32_t code[loads]; /* of scales beside F4E2M1 */
    for (uint32_t k = 0; k < loads; k++)
        scale[k] = 1, code[k] = 0;
    const kvprim_dtype scales = kvpc_scales_of(how);
    const uint32_t scale_bytes = kvpc_bytes_of_scale(scales);
    const float outer = kind == kvpc_4_bits ? kvpc_load_tensor(s.tensor) : 1;
    if (kind != kvpc_4_bits && s.scales && !s.scale_row)
        for (uint32_t k = 0; k < loads; k++)
            if (first + k * step < p.octets)
                scale[k] = kvpc_load_f32(kvpc_tile_at(p, s, s.scales, first + k * step));
    const uint32_t page = kvpc_divide(x.row, p.page);
    const uint64_t src = kvpc_row_at(kvpc_row_at(p.src[0], x.row, p.src_stride[0]), page, s.page);
    for (uint32_t k = 0; k < loads; k++) {
        const uint32_t octet = first + k * step;
        const uint64_t from = kvpc_head_at(p, s, src + octet_bytes * octet, octet);
        const bool has = x.inside && octet < p.octets;
        v[k] = uint2{0, 0};
        if (kind == kvpc_4_bits) {
            if (has)
                v[k].x = (uint32_t)kvpc_load_i32(from);
            continue;
        }
        if (has && !by_fours) /* two conditions, which are compiled without a branch */
            v[k] = kvpc_load8(from);
        if (has && by_fours)
            v[k] = uint2{(uint32_t)kvpc_load_i32(from), (uint32_t)kvpc_load_i32(from + 4)};
    }
    const uint32_t word = first + step - p.octets;
    const bool copies = loads > 1 && word < p.v_words;
    uint4 copied = {0, 0, 0, 0};
    if (copies && x.inside)
        copied =
            kvpc_load16(kvpc_row_at(kvpc_row_at(p.src[1] + 16 * word, x.row, p.src_stride[1]), page, p.route[1].page));
    if (kind == kvpc_4_bits || (s.scale_row && x.inside)) {
        const uint64_t row = kvpc_row_at(kvpc_row_at(s.scales, x.row, s.scale_row), page, s.scale_page);
        for (uint32_t k = 0; k < loads; k++) {
            const uint32_t octet = first + k * step;
            const bool has = octet < p.octets;
            if (kind == kvpc_4_bits)
                code[k] = kvpc_load_any_scale(kvpc_order_scale(p, 0, kvpc_tile_at(p, s, row, octet), octet, x.row),
                                              has && x.inside ? scale_bytes : 0);
            else if (has)
                scale[k] = kvpc_load_scale(kvpc_tile_at(p, s, row, octet), (how & kvpc_e8m0) != 0);
        }
    }
    kvpc_pdl_trigger(dependence != kvpc_alone && (loads == 1 || dependence == kvpc_trigger_first));
    const uint64_t dst = kvpc_row_at(s.dst + at, i, s.dst_stride);
    for (uint32_t k = 0; k < loads; k++) {
        const uint32_t in[2] = {v[k].x, v[k].y};
        float e[8];
        uint32_t out[4];
        if (kind == kvpc_4_bits)
            kvpc_decode<KVPRIM_F4E2M1, 8>(e, in), scale[k] = kvpc_mul(kvpc_any_scale_of(code[k], scales), outer);
        else if (kind == kvpc_int8)
            kvpc_decode<KVPRIM_INT8, 8>(e, in);
        else if (how & kvpc_e5m2)
            kvpc_decode<KVPRIM_F8E5M2, 8>(e, in);
        else
            kvpc_decode<KVPRIM_F8E4M3, 8>(e, in);
        for (uint32_t j = 0; j < 8; j++)
            e[j] = kvpc_mul(e[j], x.inside ? scale[k] : 1);
        kvpc_encode<to, 8>(out, e);
        if (first + k * step < p.octets)
            kvpc_store16(dst + 16 * k * step, uint4{out[0], out[1], out[2], out[3]});
    }
    if (copies)
        kvpc_store16(kvpc_row_at(p.route[1].dst + 16 * word, i, p.route[1].dst_stride), copied);
    kvpc_pdl_trigger(dependence == kvpc_trigger_late && loads > 1);
    if (!x.inside && at == 0)
        kvpc_count_rejected(p, x);
}

/* >>impl_convert_tiles --------------------------------------------------------------------------------------------- */

/* The largest magnitudes of the `lanes` threads of a tile, a power of two. With `one_or_two` there are mostly so few,
   and a loop suits them. Otherwise 8 or 16 are usual, and a loop takes longer than a few needless shuffles. */
template <kvprim_dtype from, bool one_or_two> KVPRIM_DEVICE uint32_t kvpc_most_of_tile(uint32_t most, uint32_t lanes)
{
    if (one_or_two) {
        for (; lanes > 1; lanes /= 2)
            most = kvpc_most<from>(most, kvpc_shuffle_xor(most, lanes / 2));
        return most;
    }
    if (lanes > 16)
        most = kvpc_most<from>(most, kvpc_shuffle_xor(most, 16));
    if (lanes > 8)
        most = kvpc_most<from>(most, kvpc_shuffle_xor(most, 8));
    for (uint32_t k = 4; k > 0; k /= 2)
        most = kvpc_most<from>(most, kvpc_shuffle_xor(most, k & (lanes - 1)));
    return most;
}

/* Scales a thread's octets of a tile by what its largest magnitudes, `most`, say, and stores them `step` octets from
   each other. The thread that `begins` the tile stores the scale. */
template <kvprim_dtype from, int kind, uint32_t loads>
KVPRIM_DEVICE void kvpc_store_tile(const kvpc_convert &p, const kvpc_route &s, const uint4 *v, uint32_t most,
                                   uint64_t dst, uint32_t step, const bool *has, uint64_t scale_at, bool inside,
                                   bool begins)
{
    const uint32_t how = p.how;
    const float scale =
        kvpc_tile_scale(kvpc_most_of<from>(most), s.largest, s.inverse, s.least, (how & kvpc_power_of_two) != 0);
    uint64_t to[loads];
    bool stores[loads];
    for (uint32_t k = 0; k < loads; k++) {
        to[k] = dst + 8 * k * step;
        stores[k] = has[k] && inside;
    }
    kvpc_store_octets<from, kind, loads, false>(how, p.nans, to, v, &scale, stores);
    if (!inside || !begins)
        return;
    if (how & kvpc_e8m0) /* a branch: with kvpc_store_scale, many rows take 1.03 of the time with PDL (H200) */
        *(uint8_t *)kvpc_global(scale_at) = (uint8_t)kvpi_to_e8m0(scale);
    else
        *(float *)kvpc_global(scale_at) = scale;
}

/* Stores a tile of 4 bits, of which this thread has two octets. */
template <kvprim_dtype from>
KVPRIM_DEVICE void kvpc_store_packed(const kvpc_convert &p, const kvpc_route &s, const uint4 *v, float outer,
                                     float estimate, uint32_t lanes, uint64_t dst, uint64_t scale_at, bool inside,
                                     bool begins)
{
    const uint32_t how = p.how;
    uint32_t most = kvpc_most_in<from, 2, true>(v);
    const bool nans = kvpc_has_nans<from>(most);
    if (KVPRIM_UNLIKELY(nans))
        most = kvpc_most_in<from, 2, false>(v);
    most = kvpc_most_of_tile<from, true>(most, lanes);
    const kvpc_any_scale scale = kvpc_compute_packed_scale(kvpc_most_of<from>(most), how, s.least, outer, estimate);
    const uint2 out = KVPRIM_UNLIKELY(nans || how & kvpc_divides || kvpc_is_unusual(scale.divisor))
                          ? kvpc_pack_seldom<from>(how, v[0], v[1], scale.divisor, inside ? p.nans : NULL)
                          : kvpc_pack_octets<from>(v, scale.divisor);
    if (inside)
        kvpc_store_octet(true, how, dst, out);
    if (inside && begins)
        kvpc_store_any_scale(scale_at, scale.code, kvpc_scales_of(how));
}

/* Stores the tiles of a thread, one in each round. v: the first, from src, which has 4 bytes for each of dst. One round
   has code of its own, which does not wait for the parameters of the others: 64 tokens take 0.94 of the time (H200). */
template <kvprim_dtype from>
KVPRIM_DEVICE void kvpc_store_rounds(const kvpc_convert_tiles &p, uint32_t route, uint4 *v, float outer, uint32_t lanes,
                                     uint64_t src, uint64_t dst, uint64_t scale_at, bool inside, bool begins)
{
    const kvpc_route &s = p.route[route];
    const uint32_t how = p.how, rounds = how >> kvpc_rounds_shift;
    const bool estimates =
        kvpc_scales_of(how) == KVPRIM_F8E4M3 && !(how & kvpc_power_of_two) && !kvpc_is_unusual(outer);
    const float estimate = estimates ? kvpc_mul(1.0f / 6, kvpc_near_reciprocal(outer)) : 0;
    if (rounds == 1) {
        kvpc_store_packed<from>(p, s, v, outer, estimate, lanes, dst, scale_at, inside, begins);
        return;
    }
    const uint64_t dst_step = kvpc_row_at(p.round_dst, p.round_heads, s.head);
    const uint32_t scale_head = how & kvpc_has_heads ? p.scale_head[route] : 0;
    const uint64_t scale_step = kvpc_row_at(kvpc_row_at(0, p.round_tiles, s.tile), p.round_heads, scale_head);
    KVPRIM_ROLLED
    for (uint32_t left = rounds;; left--) {
        uint4 next[2];
        src += 4 * p.round_dst;
        for (uint32_t k = 0; k < 2; k++) /* on their way while this tile is converted */
            if (left > 1)
                next[k] = kvpc_load16(src + 16 * k);
        kvpc_store_packed<from>(p, s, v, outer, estimate, lanes, dst, scale_at, inside, begins);
        if (left == 1)
            return;
        v[0] = next[0], v[1] = next[1];
        dst += dst_step, scale_at += scale_step;
    }
}

/* Fetches the edges of a row, and of its scales, if this thread is one that does so. */
KVPRIM_DEVICE void kvpc_fetch_tile_edges(const kvpc_convert_tiles &p, uint32_t lane, uint64_t row, uint64_t scales)
{
    if (!KVPRIM_UNLIKELY(p.how & kvpc_has_edges && (lane & p.edge_lanes) == 0))
        return;
    if (p.edges)
        kvpc_fetch_edges(row, p.edges);
    if (p.scale_edges)
        kvpc_fetch_edges(scales, p.scale_edges);
}

/* What a thread of the kernel below moves. first: its first octet or word. !any: past the last row; it reads row 0. */
typedef struct kvpc_tile_thread {
    uint32_t row, lane, tile, lanes, in_tile, first;
    bool any, copies;
} kvpc_tile_thread;

template <int kind, uint32_t loads> KVPRIM_DEVICE kvpc_tile_thread kvpc_find_tile_thread(const kvpc_convert &p)
{
    const bool copies = threadIdx.x >= p.k_threads;
    const uint32_t thread = copies ? threadIdx.x - p.k_threads : threadIdx.x;
    const uint32_t in_group = thread * (copies ? p.v_magic : p.row_magic) >> 16;
    const uint32_t lane = thread - in_group * (copies ? p.v_words : p.row_threads);
    const uint32_t i = (blockIdx.z * kvpc_grid_rows + blockIdx.y) * p.block_rows + in_group;
    const uint32_t tile = lane >> p.lanes_shift, lanes = 1u << p.lanes_shift, in_tile = lane & (lanes - 1);
    const bool any = i < p.count && in_group < p.block_rows;
    const uint32_t first = copies ? lane : tile * p.tile_octets + in_tile * (kind == kvpc_4_bits ? loads : 1);
    return kvpc_tile_thread{i, lane, tile, lanes, in_tile, first, any, copies};
}

/* Stores rows, and the scales that it computes. Thread g of a tile takes its octets g, g + tile_lanes, ... Threads of V
   that copy take a word each. No thread leaves before the shuffles, where all of a warp meet. */
template <kvprim_dtype from, int kind, uint32_t loads>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_convert_tiles_kernel(const KVPRIM_GRID_CONSTANT kvpc_convert_tiles KVPRIM_IN_PLACE p)
{
    const uint32_t octet_bytes = kind == kvpc_4_bits ? 4 : 8, how = p.how, dependence = how & kvpc_dependences;
    const bool exact = loads < 8;          /* a tile is tile_lanes * loads octets */
    const bool late = kind == kvpc_4_bits; /* the trigger: parameters would wait for `how`, 0.08 us */
    kvpc_pdl_trigger(!late && dependence == kvpc_trigger_first);
    const kvpc_tile_thread t = kvpc_find_tile_thread<kind, loads>(p);
    const uint32_t i = t.row, lane = t.lane, tile = t.tile, lanes = t.lanes, in_tile = t.in_tile, first = t.first;
    const bool any = t.any, copies = t.copies, second = copies || blockIdx.x;
    const uint32_t step = kind == kvpc_4_bits ? 1 : lanes; /* two octets of 4 bits make one store */
    const kvpc_route &s = p.route[second];
    const uint64_t index_at = kvpc_index_at(p, any ? i : 0);
    const uint64_t src = kvpc_row_at((second ? p.src[1] : p.src[0]) + 16 * first, any ? i : 0,
                                     second ? p.src_stride[1] : p.src_stride[0]);
    kvpc_settle(index_at), kvpc_settle(src);
    kvpc_pdl_trigger(late && dependence == kvpc_trigger_first);
    kvpc_pdl_wait(dependence != kvpc_alone);
    kvpc_pdl_trigger(dependence == kvpc_trigger_late);
    kvpc_index x = kvpc_load_index(index_at, (how & kvpc_wide_index) != 0);
    uint4 v[loads];
    bool has[loads];
    for (uint32_t k = 0; k < loads; k++) { /* without a condition, which would keep the first load waiting */
        has[k] = any && (exact || in_tile + k * lanes < p.tile_octets);
        v[k] = uint4{0, 0, 0, 0};
        if (exact || has[k])
            v[k] = kvpc_load16(src + (copies ? 0 : 16 * k * step));
    }
    const float outer = kind == kvpc_4_bits ? kvpc_load_tensor(s.tensor) : 1;
    /* All that the index and the words are not needed for, while they are on their way. */
    uint64_t dst =
        copies ? s.dst + 16 * first : kvpc_row_at(s.dst + octet_bytes * first, kvpc_divide(first, p.head), s.head);
    uint64_t scale_at = kvpc_row_at(s.scales, tile, s.tile);
    kvpc_settle(dst), kvpc_settle(scale_at);
    kvpc_apply_index_rule(p, &x);
    x.inside = x.inside && any;
    const uint32_t page = kvpc_divide(x.row, p.page);
    dst = kvpc_row_at(kvpc_row_at(dst, x.row, s.dst_stride), page, s.page);
    scale_at = kvpc_row_at(kvpc_row_at(scale_at, x.row, s.scale_row), page, s.scale_page);
    if (kind == kvpc_4_bits)
        scale_at = kvpc_order_scale(p, second, scale_at, first, x.row);
    uint32_t most = 0;
    if (kind != kvpc_4_bits) { /* there, threads that copy have warps of their own, and may end before the shuffles */
        most = kvpc_most_of_tile<from, false>(kvpc_most_in<from, loads, false>(v), lanes);
        kvpc_settle(dst), kvpc_settle(scale_at);
    }
    if (copies) {
        if (x.inside)
            kvpc_store16(dst, v[0]);
        return;
    }
    if (x.inside)
        kvpc_fetch_tile_edges(p, lane, dst, scale_at);
    if (kind == kvpc_4_bits)
        kvpc_store_rounds<from>(p, second, v, outer, lanes, src, dst, scale_at, x.inside, in_tile == 0);
    else
        kvpc_store_tile<from, kind, loads>(p, s, v, most, dst, step, has, scale_at, x.inside, in_tile == 0);
    if (any && !x.inside && lane == 0 && blockIdx.x == 0)
        kvpc_count_rejected(p, x);
}

static_assert(kvpc_few_bytes / 32 <= UINT16_MAX, "few tiles' rows, of 32 bytes or more, are counted by blockIdx.y");

/* Stores few tiles of 8 bits: see kvpc_convert_tiles. Each instruction takes 1 to 2 ns, as most wait for another, and
   each line of parameters about 40 (H200): there are few of both, and what is rare lies in functions or at the end. */
template <kvprim_dtype from>
static __global__ void __launch_bounds__(kvpc_most_threads)
    kvpc_convert_few_kernel(const KVPRIM_GRID_CONSTANT kvpc_convert_tiles KVPRIM_IN_PLACE p)
{
    const uint32_t how = p.how, dependence = how & kvpc_dependences;
    const uint32_t in_block = threadIdx.x * p.row_magic >> 16, lane = threadIdx.x - in_block * p.row_threads;
    const uint32_t i = blockIdx.y * p.block_rows + in_block;
    const uint32_t last = p.v_words - 1, last_row = p.count - 1; /* threads past these load them, too, and shuffle */
    const uint32_t first = lane < last ? lane : last, row = i < last_row ? i : last_row;
    const bool any = first == lane && row == i, copies = first >= p.k_threads, second = copies || blockIdx.x;
    const uint64_t index_at = kvpc_index_at(p, row);
    const uint64_t src =
        kvpc_row_at(p.src[0] + 16 * first + second * p.src[1], row, p.src_stride[0] + second * p.src_stride[1]);
    kvpc_settle(index_at), kvpc_settle(src);
    kvpc_pdl_trigger(dependence == kvpc_trigger_first);
    kvpc_pdl_wait(dependence != kvpc_alone);
    kvpc_pdl_trigger(dependence == kvpc_trigger_late);
    kvpc_index x = kvpc_load_index(index_at, (how & kvpc_wide_index) != 0);
    const uint4 v = kvpc_load16(src);
    const kvpc_route &s = p.route[second];
    const uint32_t lanes = 1u << p.lanes_shift;
    uint64_t dst = copies ? s.dst + 16 * first : kvpc_row_at(s.dst + 8 * first, kvpc_divide(first, p.head), s.head);
    uint64_t scale_at = kvpc_row_at(s.scales, lane >> p.lanes_shift, s.tile);
    kvpc_settle(dst), kvpc_settle(scale_at);
    kvpc_apply_index_rule(p, &x);
    const bool stores = x.inside && any;
    const uint32_t page = kvpc_divide(x.row, p.page);
    dst = kvpc_row_at(kvpc_row_at(dst, x.row, s.dst_stride), page, s.page);
    scale_at = kvpc_row_at(kvpc_row_at(scale_at, x.row, s.scale_row), page, s.scale_page);
    const uint32_t most = kvpc_most_of_tile<from, false>(kvpc_most_in<from, 1, false>(&v), lanes);
    kvpc_settle(dst), kvpc_settle(scale_at);
    if (copies) {
        if (stores)
            kvpc_store16(dst, v);
        return;
    }
    const float scale =
        kvpc_tile_scale(kvpc_most_of<from>(most), s.largest, s.inverse, s.least, (how & kvpc_power_of_two) != 0);
    kvpc_store_scale(stores && (lane & (lanes - 1)) == 0, scale_at, scale, (how & kvpc_e8m0) != 0);
    const bool seldom = kvpc_is_unusual(scale); /* such are stored last: see kvpc_convert_store_kernel */
    kvpc_store_octet(stores && !seldom, how, dst, kvpc_scale_octet<from, false>(how, v, scale));
    if (KVPRIM_UNLIKELY(seldom))
        kvpc_store_octet(stores, how, dst, kvpc_scale_octet_seldom<from, false>(how, v, scale));
    if (any && !x.inside && lane == 0 && blockIdx.x == 0)
        kvpc_count_rejected(p, x);
}
#endif

/* >>impl_unpack_kernels -------------------------------------------------------------------------------------------- */

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

#ifndef KVPRIM_NO_UNPACK

enum {
    kvpc_aligned_loads = 4,   /* 16-byte words of an aligned strip that a thread copies; otherwise kvpc_bytes_loads */
    kvpc_small_fragments = 2, /* that a thread copies at once; with more, fewer threads fit a multiprocessor: slower */
    kvpc_small_bytes = 512    /* of a small fragment, at most: a word for each thread of a warp */
};

/* Blocks of kvpc_unpack_most_threads that must fit a multiprocessor, where it holds 2,048 threads (0: no demand). This
   keeps aligned kernels to 32 registers, others to 40; with 40 and 48, as on sm_90 otherwise, fewer threads fit. */
enum {
    kvpc_aligned_blocks = kvpc_arch == 800 || kvpc_arch == 900 || kvpc_arch == 1000 ? 4 : 0,
    kvpc_unaligned_blocks = kvpc_arch == 800 || kvpc_arch == 900 ? 3 : 0 /* sm_100 would spill */
};

/* A column: addresses of all fragments in dst or src, or their sizes. Number i is base + step * n. If mask is 0, none
   is stored and n is i. Otherwise n is what `mask` leaves of record i, from byte `at` on, shifted right by `shift`. */
typedef struct kvpc_numbers {
    uint64_t base, step, mask;
    uint32_t shift, at;
} kvpc_numbers;

/* What a launch copies. Fragments are cut into strips, which are numbered from the first fragment to the last. */
typedef struct kvpc_unpack {
    kvpc_numbers dst, src, bytes;
    uint32_t count, strips, last_bytes; /* last_bytes: of the last fragment */
    uint32_t lanes_shift;               /* 1 << lanes_shift threads copy a strip, or a small fragment */
    uint32_t record_bytes, apart;       /* of a fragment; apart: its three numbers do not fit one 64-bit window */
    uint32_t each;                    /* strips of a fragment, of which the last may be empty; 0: as many as it takes */
    uint32_t first_strip;             /* if they differ, number first_strip + i of n32 is the first one of fragment i */
    uint32_t table, table_shift;      /* ... and entry table + k the fragment of strip k << table_shift */
    int32_t wait, trigger, wait_last; /* programmatic dependent launch: wait first, let the next start, wait last */
    int32_t goes_on;                  /* the next launch is of the same batch */
} kvpc_unpack;

/* Records come first, in as few bytes as hold their bits: parameters take most time of a batch of small fragments. */
template <uint32_t bytes> struct kvpc_unpack_params {
    kvpc_unpack head;
    uint32_t n32[(bytes - sizeof(kvpc_unpack)) / 4];
};

typedef struct kvpc_piece {
    uint64_t dst, src;
    uint32_t bytes;
} kvpc_piece;

/* Returns 8 bytes of the records, from byte `at` on. */
template <class params> KVPRIM_DEVICE uint64_t kvpc_record(const params &p, uint32_t at)
{
    const uint32_t w = at / 4, bits = at % 4 * 8, low = p.n32[w], middle = p.n32[w + 1], high = p.n32[w + 2];
    return (uint64_t)__funnelshift_r(middle, high, bits) << 32 | __funnelshift_r(low, middle, bits);
}

KVPRIM_DEVICE uint64_t kvpc_number(const kvpc_numbers &numbers, uint64_t record, uint32_t i)
{
    return numbers.base + numbers.step * (numbers.mask ? record >> numbers.shift & numbers.mask : i);
}

template <class params> KVPRIM_DEVICE kvpc_piece kvpc_piece_of(const params &p, uint32_t i)
{
    const kvpc_unpack &h = p.head;
    const uint32_t at = i * h.record_bytes;
    uint64_t src = 0, dst, bytes;
    if (h.record_bytes)
        src = kvpc_record(p, at);
    dst = bytes = src;
    if (h.apart)
        dst = kvpc_record(p, at + h.dst.at), bytes = kvpc_record(p, at + h.bytes.at);
    kvpc_piece piece;
    piece.src = kvpc_number(h.src, src, i), piece.dst = kvpc_number(h.dst, dst, i);
    piece.bytes = i == h.count - 1 ? h.last_bytes : (uint32_t)kvpc_number(h.bytes, bytes, i);
    return piece;
}

/* Returns the fragment of a strip: the last one whose first strip is not past it. *part: which of its strips it is. */
template <class params> KVPRIM_DEVICE uint32_t kvpc_fragment_of(const params &p, uint32_t strip, uint32_t *part)
{
    const kvpc_unpack &h = p.head;
    if (h.each) {
        const uint32_t i = h.each == 1 ? strip : strip / h.each;
        *part = strip - i * h.each;
        return i;
    }
    const uint32_t near = h.table + (strip >> h.table_shift);
    uint32_t i = p.n32[near], last = p.n32[near + 1];
    while (i < last) {
        const uint32_t middle = (i + last + 1) / 2;
        if (p.n32[h.first_strip + middle] <= strip)
            i = middle;
        else
            last = middle - 1;
    }
    *part = strip - p.n32[h.first_strip + i];
    return i;
}

/* A group of `step` threads copies a strip of aligned words. Each thread copies 16-byte word `first` of the fragment in
   dst and those a multiple of `step` further: all loads, then all stores. Past the fragment's end it copies nothing.
   Where src is NULL it loads nothing, and stores zeros. */
KVPRIM_DEVICE void kvpc_copy_strip(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t first, uint32_t step)
{
    const int32_t left = (int32_t)(bytes - 16 * first);
    const bool reads = src;
    uint4 v[kvpc_aligned_loads];
    dst += 16 * first, src += 16 * first;
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        v[k] = uint4{0, 0, 0, 0};
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        if (reads && (int32_t)(16 * step * k) < left)
            v[k] = kvpc_load16(src + 16 * step * k);
    for (uint32_t k = 0; k < kvpc_aligned_loads; k++)
        if ((int32_t)(16 * step * k) < left)
            kvpc_store16(dst + 16 * step * k, v[k]);
}

/* A group of threads copies small fragments i, i + apart ... at once, each thread a 16-byte word of each, or none. */
template <class params> KVPRIM_DEVICE void kvpc_copy_small(const params &p, uint32_t i, uint32_t apart)
{
    const kvpc_unpack &h = p.head;
    const uint32_t at = 16 * (threadIdx.x % (1u << h.lanes_shift));
    uint64_t src[kvpc_small_fragments], dst[kvpc_small_fragments];
    uint4 v[kvpc_small_fragments];
    bool mine[kvpc_small_fragments];
    for (uint32_t k = 0; k < kvpc_small_fragments; k++) {
        const uint32_t one = i + k * apart;
        mine[k] = false;
        if (one < h.count) {
            const kvpc_piece piece = kvpc_piece_of(p, one);
            src[k] = piece.src + at, dst[k] = piece.dst + at, mine[k] = at < piece.bytes;
        }
    }
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            v[k] = kvpc_load16(src[k]);
    for (uint32_t k = 0; k < kvpc_small_fragments; k++)
        if (mine[k])
            kvpc_store16(dst[k], v[k]);
}

/* One fragment, from one multiple of 16 to another. */
typedef struct kvpc_one {
    uint64_t dst, src;
    uint32_t bytes;
    int32_t pdl;
} kvpc_one;

#ifndef KVPRIM_CUDA_EMULATE
/* Whether the next launch may begin while this one runs; half: threads that a multiprocessor holds, halved. If this one
   fills between half of the GPU and all of it, blocks of the next start wherever one of this ends, which leaves the
   multiprocessors unevenly loaded: 9 MB then take 7.7 us for 6.4 (H200). Both may be smaller, or larger. */
KVPRIM_DEVICE bool kvpc_leaves_room(uint32_t half)
{
    uint32_t multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    const uint32_t threads = gridDim.x * blockDim.x, room = multiprocessors * half;
    return threads <= room || threads > 2 * room;
}
#endif

/* Each group of 1 << lanes_shift threads copies a strip, or kvpc_small_fragments small fragments; each thread
   kvpc_aligned_loads or kvpc_bytes_loads words of a strip, one of a small fragment. If there are fewer groups than
   strips, group g copies strips g, g + groups, g + 2 * groups and so on. If the launch overlaps the one before, it ends
   after that one: wait_last. zeros: some fragments have no source. Where none is NULL, unaligned ones take 1.1 to 1.2
   times as long with the test, and aligned ones no longer than without. */
template <bool is_small, bool aligned, bool zeros, uint32_t bytes>
static __global__ void __launch_bounds__(kvpc_unpack_most_threads,
                                         aligned ? kvpc_aligned_blocks : kvpc_unaligned_blocks)
    kvpc_unpack_kernel(const KVPRIM_GRID_CONSTANT kvpc_unpack_params<bytes> KVPRIM_IN_PLACE p)
{
    const kvpc_unpack &h = p.head;
    kvpc_pdl_wait(h.wait);
    kvpc_pdl_trigger(h.trigger && (h.goes_on || kvpc_leaves_room(aligned ? 1024 : 768)));
    const uint32_t lanes = 1u << h.lanes_shift; /* computed only now: a register less */
    const uint32_t groups = blockDim.x >> h.lanes_shift, group = threadIdx.x >> h.lanes_shift;
    if (is_small) {
        const uint32_t each = kvpc_small_fragments * groups;
        for (uint32_t i = blockIdx.x * each + group; i < h.count; i += gridDim.x * each)
            kvpc_copy_small(p, i, groups);
    } else {
        const uint32_t loads = aligned ? (uint32_t)kvpc_aligned_loads : (uint32_t)kvpc_bytes_loads;
        for (uint32_t strip = blockIdx.x * groups + group; strip < h.strips; strip += gridDim.x * groups) {
            uint32_t part;
            const kvpc_piece c = kvpc_piece_of(p, kvpc_fragment_of(p, strip, &part));
            const uint32_t first = (part * loads << h.lanes_shift) + threadIdx.x % lanes;
            if (aligned)
                kvpc_copy_strip(c.dst, c.src, c.bytes, first, lanes);
            else
                kvpc_copy_words(c.dst, c.src, (int32_t)(c.dst % 16), (int32_t)c.bytes, first, lanes,
                                c.bytes > 0 && (!zeros || c.src), c.bytes > 0, false);
        }
    }
    kvpc_pdl_wait(h.wait_last);
}

/* Most of the time of a small launch is what its first instructions wait for: these are few. Then many small blocks use
   more multiprocessors; later fewer are started sooner. */
template <uint32_t loads>
static __global__ void __launch_bounds__(kvpc_unpack_threads)
    kvpc_unpack_one_kernel(const KVPRIM_GRID_CONSTANT kvpc_one KVPRIM_IN_PLACE p)
{
    const uint32_t step = 16 * kvpc_unpack_threads, at = 16 * threadIdx.x + step * loads * blockIdx.x;
    uint64_t src[loads], dst[loads];
    uint4 v[loads];
    kvpc_pdl_wait(p.pdl);
    kvpc_pdl_trigger(p.pdl && kvpc_leaves_room(1024));
    kvpc_place_words<loads>(src, p.src + at, step);
    kvpc_place_words<loads>(dst, p.dst + at, step);
    kvpc_load_words<loads, false>(v, true, src, step, at, p.bytes);
    kvpc_store_words<loads, false, true>(dst, v, step, at, p.bytes);
}

/* >>impl_meta_kernel -----------------------------------------------------------------------------------------------

   Fragments that the GPU reads itself. Neither their number nor their sizes are known at the launch. 32 descriptors at
   a time, 512 contiguous bytes, are dealt to ranges. The blocks that share a range read all its descriptors, each
   thread one, at the same time as the count. Then they know all its strips, and take them in turn. So a long fragment
   is copied by all blocks of its range, and uneven ones make a range no longer than another if it has many. */

enum {
    kvpc_meta_threads = 512,     /* of a block */
    kvpc_meta_few_threads = 256, /* of few descriptors: twice as many multiprocessors begin */
    kvpc_meta_few = 1024,        /* descriptors */
    kvpc_meta_sm_threads = 1024, /* that run at once on a multiprocessor; of few descriptors 768 */
    kvpc_meta_link_shift = 7,    /* log2 of the descriptors of a range, at most, if they lie in the host's memory ... */
    kvpc_meta_link_each = 32,    /* ... and for how many, or how many bytes, there is a block */
    kvpc_meta_link_bytes = 512 << 10,
    kvpc_meta_link_least = 16, /* ... blocks, at least */
    kvpc_meta_most = 1 << 20,  /* blocks; 32 bits number their warps and strips */
    kvpc_meta_lanes = 8,       /* threads that copy a fragment if all of a range are small */
    kvpc_meta_numbered = 3     /* see kvpc_copy_range */
};

/* Blocks that must fit a multiprocessor. Two of 512 threads keep the kernel to 64 registers, which is faster with many
   descriptors. With few it waits for loads one after the other then, and on other GPUs it would spill. */
enum { kvpc_meta_blocks = kvpc_arch == 900 ? kvpc_meta_sm_threads / kvpc_meta_threads : 1 };

typedef struct kvpc_meta {
    uint64_t dst, src, dst_bytes, src_bytes, meta, count;
    uint32_t *rejected;
    uint32_t max_count, range_shift; /* 1 << range_shift: the most descriptors of a range, and threads that read them */
    kvpc_divisor ranges;
    uint32_t shares, more; /* blocks of a range; the first `more` ranges have one more */
    int32_t pdl;
} kvpc_meta;

/* What the threads of a block tell each other. */
typedef struct kvpc_range {
    uint4 meta[kvpc_meta_threads]; /* without bytes if there is nothing to copy */
    uint32_t sums[kvpc_meta_threads / 32];
    uint32_t first[kvpc_meta_threads + 1]; /* number of a fragment's first strip: see kvpc_sum_strips */
} kvpc_range;

/* Returns descriptor i, without bytes if there is none or if it reaches outside. */
KVPRIM_DEVICE uint4 kvpc_read_meta(const kvpc_meta &p, uint32_t i, uint64_t count, bool counts)
{
    const uint4 m = kvpc_load16(p.meta + 16 * (uint64_t)i), none = {0, 0, 0, 0};
    const uint64_t dst_offset = (uint64_t)m.w << 32 | m.z, excess = count - p.max_count;
    if (counts && i == 0 && count > p.max_count && p.rejected)
        atomicAdd(p.rejected, excess < INT32_MAX ? (uint32_t)excess : (uint32_t)INT32_MAX);
    if (i >= count)
        return none;
    if (m.x <= p.src_bytes && m.y <= p.src_bytes - m.x && dst_offset <= p.dst_bytes && m.y <= p.dst_bytes - dst_offset)
        return m;
    if (counts && p.rejected)
        atomicAdd(p.rejected, 1u);
    return none;
}

/* How a warp cuts a fragment. */
typedef struct kvpc_placed {
    uint64_t dst, src;
    uint32_t lead, strip; /* bytes of a strip; the first one has `lead` less */
} kvpc_placed;

KVPRIM_DEVICE kvpc_placed kvpc_place_of(const kvpc_meta &p, uint4 m)
{
    kvpc_placed c = {p.dst + ((uint64_t)m.w << 32 | m.z), p.src + m.x, 0, 512 * kvpc_aligned_loads};
    if ((c.dst | c.src | m.y) % 16)
        c.lead = (uint32_t)(c.dst % 16), c.strip = 512 * kvpc_bytes_loads;
    return c;
}

/* Returns how many strips a fragment makes; the sum of its lead and bytes may take 33 bits. */
KVPRIM_DEVICE uint32_t kvpc_strips_of(const kvpc_meta &p, uint4 m)
{
    const uint32_t aligned = 512 * kvpc_aligned_loads, other = 512 * kvpc_bytes_loads;
    const kvpc_placed c = kvpc_place_of(p, m);
    if (c.strip == aligned)
        return m.y / aligned + (m.y % aligned != 0);
    return m.y ? m.y / other + (m.y % other + c.lead + other - 1) / other : 0;
}

/* A group of `lanes` threads copies strip `part` of a fragment: a warp, or fewer threads all of a small one. */
template <uint32_t lanes> KVPRIM_DEVICE void kvpc_copy_part(const kvpc_meta &p, uint4 m, uint32_t part)
{
    const kvpc_placed c = kvpc_place_of(p, m);
    const uint32_t at = part ? part * c.strip - c.lead : 0, most = part ? c.strip : c.strip - c.lead;
    if (at >= m.y)
        return;
    const uint32_t bytes = m.y - at < most ? m.y - at : most, lane = threadIdx.x % lanes;
    const uint64_t dst = c.dst + at, src = c.src + at;
    if ((dst | src | bytes) % 16 == 0)
        kvpc_copy_strip(dst, src, bytes, lane, lanes);
    else
        kvpc_copy_words(dst, src, (int32_t)(dst % 16), (int32_t)bytes, lane, lanes, true, true, false);
}

/* Whether kvpc_meta_lanes threads copy a fragment as one strip. */
KVPRIM_DEVICE bool kvpc_is_small(const kvpc_meta &p, uint4 m)
{
    const kvpc_placed c = kvpc_place_of(p, m);
    return m.y <= c.strip / 32 * kvpc_meta_lanes - c.lead;
}

/* Numbers the strips of a range from its first fragment to its last. `strips` are those of this thread's. */
KVPRIM_DEVICE void kvpc_sum_strips(kvpc_range *r, uint32_t strips)
{
    uint32_t all;
    r->first[threadIdx.x + 1] = kvpc_sum_up(r->sums, strips, &all);
    if (threadIdx.x == 0)
        r->first[0] = 0;
    __syncthreads();
}

/* Returns the fragment that a strip is part of. */
KVPRIM_DEVICE uint32_t kvpc_fragment_in(const kvpc_range &r, uint32_t strip, uint32_t range_shift)
{
    uint32_t i = 0;
    for (uint32_t step = 1u << range_shift >> 1; step; step /= 2)
        i += r.first[i + step] <= strip ? step : 0;
    return i;
}

/* The warps of a range's `shares` blocks copy its strips. If no fragment has many, strip t of fragment i is number t *
   2^range_shift + i, and none is searched for. (If warps are so many, or fragments so few, that a warp has one strip or
   none, `many` is larger.) Otherwise only as many of each fragment as all warps copy at once, or one, are taken so;
   then the rest is numbered from the first fragment to the last. */
KVPRIM_DEVICE void kvpc_copy_range(const kvpc_meta &p, kvpc_range *r, uint32_t share, uint32_t shares)
{
    const uint32_t own = kvpc_strips_of(p, r->meta[threadIdx.x]), warps = shares * (blockDim.x / 32);
    const uint32_t even = warps >> p.range_shift, many = even + kvpc_meta_numbered;
    const bool one = !__syncthreads_or(own > 1), few = !__syncthreads_or(own > many);
    const uint32_t numbered = one ? 1 : few ? many : even > 1 ? even : 1;
    uint32_t strips = numbered << p.range_shift;
    for (bool search = false;; search = true) {
        KVPRIM_ROLLED
        for (uint32_t strip = share * (blockDim.x / 32) + threadIdx.x / 32; strip < strips; strip += warps) {
            const uint32_t i = search ? kvpc_fragment_in(*r, strip, p.range_shift) : strip % (1u << p.range_shift);
            kvpc_copy_part<32>(p, r->meta[i], search ? numbered + strip - r->first[i] : strip >> p.range_shift);
        }
        if (few || search)
            return;
        kvpc_sum_strips(r, own > numbered ? own - numbered : 0);
        strips = r->first[1u << p.range_shift];
    }
}

KVPRIM_DEVICE void kvpc_copy_small_range(const kvpc_meta &p, const kvpc_range &r, uint32_t share, uint32_t shares)
{
    const uint32_t groups = blockDim.x / kvpc_meta_lanes, step = shares * groups;
    KVPRIM_ROLLED
    for (uint32_t i = share * groups + threadIdx.x / kvpc_meta_lanes; i < 1u << p.range_shift; i += step)
        kvpc_copy_part<kvpc_meta_lanes>(p, r.meta[i], 0);
}

/* The loads are plain: volatile ones of mapped memory take 10 to 30 times as long (H200).
   Nothing that was read decides alone whether a thread comes to a barrier: despite its promise the caller may write. */
template <uint32_t most_threads>
static __global__ void __launch_bounds__(most_threads, most_threads == kvpc_meta_threads ? kvpc_meta_blocks : 1)
    kvpc_meta_kernel(const KVPRIM_GRID_CONSTANT kvpc_meta KVPRIM_IN_PLACE p)
{
    __shared__ kvpc_range r;
    const uint32_t t = threadIdx.x, ranges = (uint32_t)p.ranges.by, share = kvpc_divide(blockIdx.x, p.ranges);
    kvpc_pdl_wait(p.pdl);
    kvpc_pdl_trigger(p.pdl && kvpc_leaves_room(kvpc_meta_sm_threads / 2));
    const uint64_t count = t >> p.range_shift == 0 ? (uint64_t)kvpc_load_i64(p.count) : 0;
    for (uint32_t range = blockIdx.x - share * ranges; range < ranges; range += gridDim.x) {
        const uint32_t i = 32 * (t / 32 * ranges + range) + t % 32, shares = p.shares + (range < p.more);
        uint4 m = {0, 0, 0, 0};
        if (t >> p.range_shift == 0 && i < p.max_count)
            m = kvpc_read_meta(p, i, count, share == 0);
        r.meta[t] = m;
        if (__syncthreads_or(!kvpc_is_small(p, m)))
            kvpc_copy_range(p, &r, share, shares);
        else
            kvpc_copy_small_range(p, r, share, shares);
        if (gridDim.x < ranges)
            __syncthreads(); /* before the next range overwrites this one */
    }
}

#endif

/* >>impl_launch ---------------------------------------------------------------------------------------------------- */

/* The status of a check in kvprim.h; its error "kvprim_gather: ..." becomes "kvprim_cuda_gather: ...". */
static kvprim_status kvpc_checked(kvprim_status status)
{
    return status == KVPRIM_OK ? status
                               : kvprim_fail(status, "kvprim_cuda_%s", kvprim_last_error() + sizeof "kvprim_" - 1);
}

/* A call on its way to the GPU. */
typedef struct kvpc_call {
    const char *function;
    kvprim_cuda_launch launch; /* pdl only where it has an effect */
    bool link, to_host;        /* all moves are transfers over PCIe: see kvpc_crosses_link; the last one to the host */
    bool chosen;               /* max_sms is kvpc_link_sms, not the caller's */
} kvpc_call;

#ifndef KVPRIM_CUDA_EMULATE
enum kvpc_answer { kvpc_unknown, kvpc_no, kvpc_yes, kvpc_depends };

/* Whether CUDA did it. If not, the kernel that is launched next meets an error of earlier work again. */
static bool kvpc_succeeds(cudaError_t error)
{
    if (error != cudaSuccess)
        (void)cudaGetLastError();
    return error == cudaSuccess;
}

/* Whether the code that the driver loads on the current device is compiled for sm_90 or newer. It loads all kernels of
   a file for one architecture, so any of them can be asked. */
static kvpc_answer kvpc_ask_device(void)
{
    cudaFuncAttributes a;
    if (!kvpc_succeeds(cudaFuncGetAttributes(&a, (const void *)kvpc_bytes_kernel)))
        return kvpc_unknown;
    return a.ptxVersion >= 90 && a.binaryVersion >= 90 ? kvpc_yes : kvpc_no;
}

/* The same for all devices: an answer that one of them gives holds where their compute capabilities are the same.
   The driver must also be able to capture dependent launches (12.3). */
static kvpc_answer kvpc_ask_devices(void)
{
    int driver = 0, count = 0, first = 0, major = 0, minor = 0;
    if (!kvpc_succeeds(cudaDriverGetVersion(&driver)) || !kvpc_succeeds(cudaGetDeviceCount(&count)))
        return kvpc_unknown;
    for (int device = 0; device < count; device++) {
        if (!kvpc_succeeds(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) ||
            !kvpc_succeeds(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)))
            return kvpc_unknown;
        first = device == 0 ? 100 * major + minor : first;
        if (100 * major + minor != first)
            return driver >= 12030 ? kvpc_depends : kvpc_no;
    }
    return driver >= 12030 ? kvpc_ask_device() : kvpc_no;
}

/* Whether kernels of this file wait when they are asked to. The answer is kept: cudaGetDevice alone takes 0.1 us. */
static bool kvpc_has_pdl(void)
{
    static std::atomic<kvpc_answer> known;
    kvpc_answer answer = known.load(std::memory_order_relaxed);
    if (answer == kvpc_unknown)
        known.store(answer = kvpc_ask_devices(), std::memory_order_relaxed);
    return (answer == kvpc_depends ? kvpc_ask_device() : answer) == kvpc_yes;
}

/* Of the first device that is asked for, as those of one machine seldom differ: it only decides what is fast. */
static uint32_t kvpc_multiprocessors(void)
{
    static std::atomic<int> known;
    int device = 0, count = known.load(std::memory_order_relaxed);
    if (count == 0 && kvpc_succeeds(cudaGetDevice(&device)) &&
        kvpc_succeeds(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)))
        known.store(count, std::memory_order_relaxed);
    return count > 0 ? (uint32_t)count : 1;
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
static kvprim_status kvpc_start(const kvpc_call *call, void (*kernel)(Params), dim3 blocks, uint32_t threads,
                                const Params &params)
{
    cudaLaunchAttribute pdl;
    cudaLaunchConfig_t config = {};
    void *args[] = {(void *)&params};
    config.gridDim = blocks, config.blockDim = dim3(threads), config.stream = kvpc_stream(call);
    config.attrs = &pdl, config.numAttrs = call->launch.pdl != 0;
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

/* Whether one side is pinned host memory (*to_host then: dst), the other memory of a GPU, and the link between them
   PCIe. A host whose memory the GPU's atomics reach is linked by NVLink, which few multiprocessors do not fill. NULL:
   memory that only a GPU knows. *inside: whether both are of one GPU, neither NULL. None if CUDA does not know. */
static bool kvpc_is_link(const void *dst, const void *src, bool *to_host, bool *inside)
{
    const cudaMemoryType host = cudaMemoryTypeHost, gpu = cudaMemoryTypeDevice;
    cudaPointerAttributes a = {}, b = {};
    a.type = b.type = gpu;
    if ((dst && !kvpc_succeeds(cudaPointerGetAttributes(&a, dst))) ||
        (src && !kvpc_succeeds(cudaPointerGetAttributes(&b, src))))
        a.type = cudaMemoryTypeUnregistered; /* so none */
    *to_host = a.type == host && b.type == gpu, *inside = a.type == gpu && b.type == gpu && a.device == b.device;
    int nvlink = 1, device = dst ? a.device : b.device;
    return (*to_host || (a.type == gpu && b.type == host)) &&
           kvpc_succeeds(cudaDeviceGetAttribute(&nvlink, cudaDevAttrHostNativeAtomicSupported, device)) && !nvlink;
}

/* Whether its reader cannot reach p: the GPU, if p is ordinary host memory; or with host_reads the host, if p is
   memory of a GPU. False if CUDA does not know. cudaPointerGetAttributes takes 0.11 us. So a hash table remembers
   addresses that are within reach, and, as a GPU's memory comes in blocks of 2 MB, such blocks. An entry outlives the
   memory: what is allocated there later passes unseen. */
static bool kvpc_is_out_of_reach(const void *p, bool host_reads)
{
    enum { table_bits = 10 };
    static std::atomic<uint64_t> known[1 << table_bits];
    const uint64_t address = (uintptr_t)p, one = address << 2 | host_reads, block = address >> 21 << 2 | 2;
    const auto entry = [](uint64_t key) { return key * 0x9e3779b97f4a7c15u >> (64 - table_bits); };
    int device = 0, pageable = 1;
    cudaPointerAttributes a = {};
    if (known[entry(one)].load(std::memory_order_relaxed) == one ||
        (!host_reads && known[entry(block)].load(std::memory_order_relaxed) == block))
        return false;
    if (!kvpc_succeeds(cudaPointerGetAttributes(&a, p)))
        return false;
    if (a.type == cudaMemoryTypeUnregistered && !host_reads &&
        (!kvpc_succeeds(cudaGetDevice(&device)) ||
         !kvpc_succeeds(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device))))
        return false;
    if (host_reads ? a.type == cudaMemoryTypeDevice : !pageable)
        return true;
    const uint64_t key = a.type == cudaMemoryTypeDevice ? block : one;
    known[entry(key)].store(key, std::memory_order_relaxed);
    return false;
}

/* True if CUDA does not know. */
static bool kvpc_is_captured(const kvpc_call *call)
{
    cudaStreamCaptureStatus status;
    return !kvpc_succeeds(cudaStreamIsCapturing(kvpc_stream(call), &status)) || status != cudaStreamCaptureStatusNone;
}

/* Enqueues CUDA's own copy of rows (without src one row of zeros), and returns whether it did. CUDA refuses ranges of
   several allocations, which kernels take. */
static bool kvpc_copy_rows(const kvpc_call *call, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                           int64_t row_bytes, int64_t rows)
{
    return kvpc_succeeds(!src ? cudaMemsetAsync(dst, 0, (size_t)row_bytes, kvpc_stream(call))
                         : rows == 1
                             ? cudaMemcpyAsync(dst, src, (size_t)row_bytes, cudaMemcpyDefault, kvpc_stream(call))
                             : cudaMemcpy2DAsync(dst, (size_t)dst_stride, src, (size_t)src_stride, (size_t)row_bytes,
                                                 (size_t)rows, cudaMemcpyDefault, kvpc_stream(call)));
}
#endif

/* Checks the options of a launch, too. */
static kvprim_status kvpc_begin_call(kvpc_call *call, const char *function, const kvprim_cuda_launch *launch)
{
    const kvprim_cuda_launch none = {}, l = launch ? *launch : none;
    KVPRIM_REFUSE(l.pdl != 0 && l.pdl != 1, ARGUMENT, "%s: pdl is %d, neither 0 nor 1", function, (int)l.pdl);
    KVPRIM_REFUSE(l.max_sms < 0, ARGUMENT, "%s: max_sms is %d, less than 0", function, (int)l.max_sms);
    KVPRIM_REFUSE(l.reserved, ARGUMENT, "%s: launch.reserved is not 0: zero-initialise the structure", function);
    *call = kvpc_call{function, l, false, false, false};
    call->launch.pdl = l.pdl && kvpc_has_pdl();
    return KVPRIM_OK;
}

static bool kvpc_has_host_index(const kvprim_side *side)
{
    return side->index && side->host_index;
}

/* Checks the memory of what a transfer touches first on one side, and of its index. */
static kvprim_status kvpc_check_side_reach(const char *function, const char *name, const char *index_name,
                                           const kvprim_side *side)
{
    const char *const advice = "is ordinary host memory, which the GPU cannot reach: pin it (cudaMallocHost, "
                               "cudaHostRegister; pin_memory() in PyTorch)";
    const void *const rows = side->device_layers ? (const void *)side->device_layers : kvprim_side_layer(side, 0);
    KVPRIM_REFUSE(rows && kvpc_is_out_of_reach(rows, false), ARGUMENT, "%s: %s%s (%p) %s", function, name,
                  side->device_layers ? "_device_layers" : "", rows, advice);
    if (!side->index || !kvpc_is_out_of_reach(side->index, side->host_index))
        return KVPRIM_OK;
    KVPRIM_REFUSE(side->host_index, ARGUMENT, "%s: %s (%p) is memory of a GPU, but host_index is 1", function,
                  index_name, side->index);
    return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s (%p) %s, or set host_index = 1", function, index_name,
                       side->index, advice);
}

static kvprim_status kvpc_check_reach(const char *function, const kvprim_move *m)
{
    if (m->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_check_side_reach(function, m->names->dst, m->names->dst_index, &m->dst));
    return kvpc_check_side_reach(function, m->names->src, m->names->src_index, &m->src);
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
        error = error ? error : cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device);
        error = error ? error : cudaPointerGetAttributes(&a, p);
        KVPRIM_REFUSE(!kvpc_succeeds(error), CUDA, "%s: %s (%p): %s: %s", function, name, p, cudaGetErrorName(error),
                      cudaGetErrorString(error));
        KVPRIM_REFUSE(a.type == cudaMemoryTypeUnregistered && !pageable, ARGUMENT,
                      "%s: %s reaches %p, which the GPU cannot: past an allocation, or ordinary host memory: "
                      "pin it (cudaMallocHost, cudaHostRegister; pin_memory() in PyTorch)",
                      function, name, p);
        KVPRIM_REFUSE(a.type == cudaMemoryTypeDevice && a.device != device && !a.devicePointer, ARGUMENT,
                      "%s: %s (%p) is memory of device %d, which device %d has no access to", function, name, p,
                      a.device, device);
    }
    return KVPRIM_OK;
}

/* Bytes from a layer's first scale to the end of the last one that rows 0 to `rows` - 1 have. A whole page may end
   after a last one that is not full. */
static uint64_t kvpc_scales_reach(const kvprim_side *side, int64_t rows)
{
    const kvprim_format *const f = &side->format;
    const int64_t elements = kvpi_elements_in(f->dtype, side->piece_bytes * side->table.heads);
    const int64_t in_page = side->table.page_rows, own = f->scale_heads, bytes = kvpi_dtype_bytes(f->scale_dtype);
    const int64_t scales = f->scale == KVPRIM_SCALE_TENSOR ? 1 : own ? own : elements / f->tile;
    const int64_t of_row = (scales - 1) * f->scale_tile_stride + (own ? f->scale_stride : bytes);
    kvprim_side of_scales = *side;
    of_scales.table.stride = f->scale_stride, of_scales.table.page_stride = f->scale_page_stride;
    if (f->scale != KVPRIM_SCALE_TILE)
        return (uint64_t)of_row;
    const int64_t last = kvpi_row_offset(&of_scales, rows - 1);
    const int64_t whole = in_page && rows >= in_page ? kvpi_row_offset(&of_scales, rows / in_page * in_page - 1) : 0;
    return (uint64_t)((whole > last ? whole : last) + of_row);
}

static kvprim_status kvpc_check_side(const char *function, const char *name, const char *index_name,
                                     const kvprim_side *side, const kvprim_move *m)
{
    const kvprim_format &f = side->format;
    const uint64_t size = side->index_type == KVPRIM_I64 ? 8 : 4, count = (uint64_t)m->count;
    const int64_t rows = side->index || f.scale_order || m->count > side->table.rows ? side->table.rows : m->count;
    const bool scales = f.scale && rows > 0 && (f.scales || !side->device_layers);
    char scales_name[80], nans_name[80];
    snprintf(scales_name, sizeof scales_name, "%s.format.scales", name);
    snprintf(nans_name, sizeof nans_name, "%s.format.nans", name);
    KVPRIM_TRY(kvpc_check_bytes(function, name, side->device_layers, 8 * (uint64_t)m->layers));
    for (int32_t l = 0; l < m->layers; l++) {
        char *const layer = side->device_layers ? NULL : kvprim_side_layer(side, l);
        KVPRIM_TRY(kvpc_check_bytes(function, name, layer, side->bytes));
        if (scales)
            KVPRIM_TRY(
                kvpc_check_bytes(function, scales_name,
                                 f.scales ? (const char *)f.scales + l * f.scale_layer_stride : layer + f.scale_offset,
                                 kvpc_scales_reach(side, rows)));
    }
    KVPRIM_TRY(kvpc_check_bytes(function, nans_name, f.dtype ? f.nans : NULL, 4));
    KVPRIM_TRY(kvpc_check_bytes(function, "format.tensor_scale", f.scale ? f.tensor_scale : NULL, 4));
    if (kvpc_has_host_index(side))
        return kvpc_check_side_reach(function, name, index_name, side);
    return kvpc_check_bytes(function, index_name, side->index, size * ((count - 1) * (uint64_t)side->index_stride + 1));
}

static kvprim_status kvpc_check_memory(const char *function, const kvprim_move *moves, size_t n)
{
    for (const kvprim_move *m = moves; m != moves + n; m++)
        if (m->count > 0) {
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

/* Ordinary host memory is found without KVPRIM_DEBUG, too. */
static kvprim_status kvpc_check_reachable(const char *function, const char *name, const void *p, uint64_t bytes)
{
    KVPRIM_REFUSE(kvpc_is_out_of_reach(p, false), ARGUMENT,
                  "%s: %s (%p) is ordinary host memory, which the GPU cannot reach: pin it (cudaHostRegister)",
                  function, name, p);
    return kvpc_check_bytes(function, name, p, bytes);
}

/* >>impl_row_plan -------------------------------------------------------------------------------------------------- */

/* What each page adds to a row's place beyond the rows' stride, and each head to that of a byte, modulo 2^64, or 0. */
static uint64_t kvpc_page_step(const kvprim_table *t)
{
    return t->page_rows > 0 ? (uint64_t)t->page_stride - (uint64_t)t->page_rows * (uint64_t)t->stride : 0;
}

static uint64_t kvpc_head_step(const kvprim_side *side)
{
    return side->table.heads > 1 ? (uint64_t)(side->table.head_stride - side->piece_bytes) : 0;
}

/* Whether a move takes the kernels of kvpc_listed: the GPU reads its layers, or the host names its rows. */
static bool kvpc_is_listed(const kvprim_move *m)
{
    return m->dst.device_layers || m->src.device_layers || kvpc_has_host_index(&m->dst) || kvpc_has_host_index(&m->src);
}

/* Whether the kernels of plain rows can take a side. *bits collects what must be a multiple of the word. */
static bool kvpc_is_plain_side(const kvprim_side *side, uint64_t *bits)
{
    const uint64_t steps = kvpc_page_step(&side->table) | kvpc_head_step(side);
    *bits |= (uintptr_t)kvprim_side_layer(side, 0) | (uint64_t)side->table.stride | steps;
    return side->table.stride <= UINT32_MAX && steps <= UINT32_MAX;
}

static bool kvpc_is_paged(const kvprim_side *side)
{
    return side->table.heads > 1 || side->table.page_rows > 0;
}

/* Whether a move has the size and the sides of plain rows: the number of threads fits 31 bits, and an index less the
   base cannot wrap into the table. Only the indexed side may have pages and heads. */
static bool kvpc_has_plain_sides(const kvprim_move *m, uint64_t *bits)
{
    if (kvpc_is_listed(m))
        return false;
    const int64_t int32_rows = (int64_t)1 << 31;
    const kvprim_side *const indexed = m->zero ? &m->src : &m->dst, *const other = m->zero ? &m->dst : &m->src;
    const int64_t base = indexed->index_base, rows = indexed->table.rows;
    return indexed->index && !other->index && m->layers == 1 && kvpc_is_plain_side(indexed, bits) &&
           kvpc_is_plain_side(other, bits) && m->row_bytes <= 1 << 20 && m->count <= 1 << 24 &&
           m->count * (1 + m->row_bytes / 512) <= 1 << 24 && base >= 0 && base <= INT32_MAX && rows <= int32_rows &&
           base <= int32_rows - rows && !kvpc_is_paged(other);
}

/* Whether the kernels of plain rows can take a gather or store: with pages and heads only if all is whole words. */
static bool kvpc_is_plain(const kvprim_move *m, uint64_t *bits)
{
    const kvprim_side *const indexed = m->zero ? &m->src : &m->dst;
    return kvpc_has_plain_sides(m, bits) &&
           (!kvpc_is_paged(indexed) || (*bits | (uint64_t)indexed->piece_bytes) % 16 == 0);
}

static bool kvpc_is_same_naming(const kvprim_side *a, const kvprim_side *b)
{
    return a->index == b->index && a->index_type == b->index_type && a->index_base == b->index_base &&
           a->index_stride == b->index_stride && (!a->index || a->table.rows == b->table.rows);
}

/* Whether two moves are K and V of a store: the same slots, each counted once. */
static bool kvpc_is_k_and_v(const kvprim_move *k, const kvprim_move *v)
{
    const kvprim_side *const a = &k->dst, *const b = &v->dst;
    return !k->zero && !v->zero && !v->rejected && k->count == v->count && kvpc_is_same_naming(a, b) &&
           a->table.page_rows == b->table.page_rows && a->table.heads == b->table.heads &&
           (a->table.heads == 1 || a->piece_bytes == b->piece_bytes);
}

static kvpc_divisor kvpc_divisor_of(int64_t by)
{
    const uint64_t one = (uint64_t)1 << 31;
    kvpc_divisor d = {(uint64_t)by, {0, 0}};
    kvpc_divisor32 *const narrow = &d.narrow;
    if (by < 1 || d.by > one) /* every 32-bit dividend is less: magic 0 gives 0 */
        return d;
    while ((uint64_t)1 << narrow->shift < d.by)
        narrow->shift++;
    narrow->magic = (uint32_t)((uint64_t)1 << narrow->shift == d.by ? one : ((one << narrow->shift) + d.by - 1) / d.by);
    return d;
}

static uint32_t kvpc_parts_of(uint32_t bytes, uint32_t part)
{
    return (bytes + part - 1) / part;
}

/* Plans how threads share rows of up to `bytes`, where each moves `loads` words of each of `tables` tables. Returns
   into how many parts a row is cut. Parts of 128 threads are the fastest, if the row is a whole number of them. Where a
   thread has one word, a block takes 1, 2, 4, ... rows: 333 and 1,024 rows of 576 to 656 B are gathered in 0.94 to 0.98
   of the time of three a block (H200). Above kvpc_some_threads it takes the rows that leave the smallest share of idle
   lanes, and above kvpc_many_threads 4 KB or more: a GPU starts less than one dependent block per nanosecond. */
template <class params> static uint32_t kvpc_shape_rows(params *p, uint32_t bytes, uint32_t loads, uint32_t tables)
{
    const uint32_t threads = kvpc_parts_of(bytes, 16 * loads);
    const uint64_t all = (uint64_t)p->count * threads;
    const uint32_t block = loads * tables == 1 && all > kvpc_many_threads ? 256 : 128;
    uint32_t parts = threads % block == 0 && loads * tables > 1 ? threads / block : kvpc_parts_of(threads, 256);
    while (threads % parts != 0 && kvpc_parts_of(threads, parts) > 64)
        parts++;
    const uint32_t x = kvpc_parts_of(threads, parts);
    uint32_t rows = parts > 1 || x > block ? 1 : block / x;
    if (loads * tables == 1 && block == 128 && parts == 1)
        for (rows = 1; 2 * rows * x <= 176;) /* 4 rows of 704 B */
            rows *= 2;
    for (uint32_t y = rows + 1; all > kvpc_some_threads && parts == 1 && y * x <= kvpc_most_threads; y++)
        if (-(y * x) % 32 * rows < -(rows * x) % 32 * y)
            rows = y;
    p->row_threads = x, p->row_magic = (65536 + x - 1) / x, p->block_rows = rows;
    return parts;
}

typedef void (*kvpc_plain_kernel)(const kvpc_plain KVPRIM_IN_PLACE);

/* The kernels of plain rows: by tables that are stored (0: a gather); 1 or 2 loads, or 1 in a dependent launch; fit. */
#define KVPRIM_EACH_FIT(kernel, ...)                                                                                   \
    {                                                                                                                  \
        kernel<__VA_ARGS__, kvpc_exact>, kernel<__VA_ARGS__, kvpc_words>, kernel<__VA_ARGS__, kvpc_tails>,             \
            kernel<__VA_ARGS__, kvpc_paged>                                                                            \
    }
static const kvpc_plain_kernel kvpc_plain_kernels[3][3][4] = {
    {KVPRIM_EACH_FIT(kvpc_gather_kernel, 1), KVPRIM_EACH_FIT(kvpc_gather_kernel, 2),
     KVPRIM_EACH_FIT(kvpc_gather_kernel, 1)},
    {KVPRIM_EACH_FIT(kvpc_store_kernel, 1, 1, false), KVPRIM_EACH_FIT(kvpc_store_kernel, 2, 1, false),
     KVPRIM_EACH_FIT(kvpc_store_kernel, 1, 1, true)},
    {KVPRIM_EACH_FIT(kvpc_store_kernel, 1, 2, false), KVPRIM_EACH_FIT(kvpc_store_kernel, 2, 2, false),
     KVPRIM_EACH_FIT(kvpc_store_kernel, 1, 2, true)}};
#undef KVPRIM_EACH_FIT

/* One load per thread and table until there are enough threads to fill the GPU. Then two, of a gather: more in flight
   gains nothing. Of a store only if all threads fit the GPU at once with two and not with one: that is 5 to 8 % faster.
   Not in a dependent launch, which then spreads badly over the multiprocessors. */
static uint32_t kvpc_loads_of(const kvpc_call *call, uint64_t bytes, uint32_t tables)
{
    if (tables == 0)
        return bytes > kvpc_few_bytes ? 2 : 1;
    const uint64_t room = 2048 * (uint64_t)kvpc_multiprocessors() * 16 * tables; /* bytes of all threads at once */
    return !call->launch.pdl && bytes > room && bytes <= 2 * room ? 2 : 1;
}

/* Rows of whole words, or with kvpc_tails. A launch is dependent only up to kvpc_many_blocks: a GPU starts less than
   one dependent block per nanosecond, and so much work gains nothing from an early start. With more rows than gridDim.y
   counts, gridDim.z counts them by kvpc_grid_rows. */
static kvprim_status kvpc_start_words(const kvpc_call *call, kvpc_plain *p, uint32_t tables, bool paged, bool tails)
{
    const uint64_t bytes = (uint64_t)p->count * (p->row_bytes[0] + p->row_bytes[1]);
    const uint32_t longest = p->row_bytes[0] > p->row_bytes[1] ? p->row_bytes[0] : p->row_bytes[1];
    const uint32_t loads = kvpc_loads_of(call, bytes, tables);
    const uint32_t parts = kvpc_shape_rows(p, longest, loads, tables ? tables : 1);
    const bool even = p->row_bytes[1] == 0 || p->row_bytes[1] == p->row_bytes[0];
    const bool exact = even && parts == 1 && p->row_threads * loads * 16 == p->row_bytes[0];
    const kvpc_fit fit = paged ? kvpc_paged : tails ? kvpc_tails : exact ? kvpc_exact : kvpc_words;
    const uint32_t rows = kvpc_parts_of(p->count, p->block_rows);
    const uint32_t z = rows > UINT16_MAX ? kvpc_parts_of(rows, kvpc_grid_rows) : 1;
    const dim3 blocks = fit == kvpc_exact ? dim3(rows) : dim3(parts, z > 1 ? (uint32_t)kvpc_grid_rows : rows, z);
    kvpc_call started = *call;
    started.launch.pdl = call->launch.pdl && (uint64_t)rows * parts <= kvpc_many_blocks;
    p->pdl = !started.launch.pdl                       ? kvpc_alone
             : tables == 0 || bytes > kvpc_first_bytes ? kvpc_trigger_late
                                                       : kvpc_trigger_first;
    return kvpc_start(&started, kvpc_plain_kernels[tables][started.launch.pdl && loads == 1 ? 2 : loads - 1][fit],
                      blocks, p->block_rows * p->row_threads, *p);
}

static kvprim_status kvpc_start_bytes(const kvpc_call *call, kvpc_plain *p)
{
    const uint32_t part = 16 * kvpc_bytes_lanes * kvpc_bytes_loads, groups = kvpc_threads / kvpc_bytes_lanes;
    p->k_parts = kvpc_parts_of(p->row_bytes[0] + 15, part); /* a row may lie in one word more than it fills */
    const uint32_t parts = p->k_parts + (p->row_bytes[1] ? kvpc_parts_of(p->row_bytes[1] + 15, part) : 0);
    p->parts = parts, p->by_parts = kvpc_divisor_of(parts).narrow;
    return kvpc_start(call, kvpc_bytes_kernel, kvpc_parts_of(p->count * parts, groups), kvpc_threads, *p);
}

template <class params> static void kvpc_set_index(params *p, const kvprim_side *indexed, const kvprim_move *m)
{
    p->index = (uintptr_t)indexed->index;
    p->index_is_i64 = indexed->index_type == KVPRIM_I64;
    p->index_step = (uint32_t)indexed->index_stride * (p->index_is_i64 ? 8 : 4);
    p->rejected = m->rejected;
    p->rows = (uint32_t)indexed->table.rows, p->base = (uint32_t)indexed->index_base, p->count = (uint32_t)m->count;
}

/* One plain move, or K and V. `bits`: see kvpc_is_plain_side. */
static kvprim_status kvpc_run_plain(const kvpc_call *call, const kvprim_move *moves, int n, uint64_t bits)
{
    const kvprim_side *const indexed = moves->zero ? &moves->src : &moves->dst;
    const kvprim_table *const t = &indexed->table;
    kvpc_plain p = {};
    uint64_t edges = 0; /* address bits of rows' ends; not of rows without gaps, whose granules are written whole */
    for (int k = 0; k < n; k++) {
        const kvprim_move *const m = &moves[k];
        const kvprim_side *const side = m->zero ? &m->src : &m->dst;
        p.pair[k].dst = (uintptr_t)kvprim_side_layer(&m->dst, 0);
        p.pair[k].src = (uintptr_t)kvprim_side_layer(&m->src, 0);
        p.pair[k].dst_stride = (uint32_t)m->dst.table.stride, p.pair[k].src_stride = (uint32_t)m->src.table.stride;
        p.step[k] = kvpc_steps{(uint32_t)kvpc_page_step(&side->table), (uint32_t)kvpc_head_step(side)};
        p.row_bytes[k] = (uint32_t)m->row_bytes;
        if (!m->zero || m->dst.table.stride != m->row_bytes)
            edges |= p.pair[k].dst | p.pair[k].dst_stride | p.row_bytes[k];
    }
    kvpc_set_index(&p, indexed, moves);
    p.page = kvpc_divisor_of(t->page_rows).narrow;
    p.head = kvpc_divisor_of(t->heads > 1 ? indexed->piece_bytes : 0).narrow;
    p.pdl = call->launch.pdl ? kvpc_trigger_late : kvpc_alone;
    p.gather = moves->zero != 0, p.fetch = edges % kvpc_granule_bytes != 0;
    if (bits % 16 != 0)
        return kvpc_start_bytes(call, &p);
    /* Only kvpc_tails fetches edges; rows of whole words take it from kvpc_few_bytes on. */
    const bool many = (uint64_t)p.count * p.row_bytes[0] > kvpc_few_bytes;
    const bool tails = (p.row_bytes[0] | p.row_bytes[1]) % 16 != 0 || (p.fetch && many);
    return kvpc_start_words(call, &p, p.gather ? 0 : (uint32_t)n, kvpc_is_paged(indexed), tails);
}

/* >>impl_convert_plan ---------------------------------------------------------------------------------------------- */
#ifndef KVPRIM_NO_CONVERT

typedef void (*kvpc_plain_convert)(const kvpc_convert KVPRIM_IN_PLACE);
typedef void (*kvpc_tiles_convert)(const kvpc_convert_tiles KVPRIM_IN_PLACE);

/* A kernel for each of these types, by the other side's. */
#define KVPRIM_CONVERT_KERNEL(type, kernel, ...)                                                                       \
    ((type) == KVPRIM_BF16 ? kernel<KVPRIM_BF16, __VA_ARGS__> : kernel<KVPRIM_F16, __VA_ARGS__>)

/* Whether the places of a side's rows and heads are multiples of `word`, and heads of `unit` bytes. */
static bool kvpc_is_made_of(const kvprim_side *side, uint64_t word, int64_t unit)
{
    uint64_t bits = 0;
    return kvpc_is_plain_side(side, &bits) && bits % word == 0 && side->piece_bytes % unit == 0;
}

/* Pages of scales are so many bytes further than their rows' stride says; -1: not in 32 bits. */
static int64_t kvpc_scale_page_step(const kvprim_table *t, const kvprim_format *f)
{
    if (t->page_rows == 0)
        return 0;
    const int64_t rows =
        t->page_rows <= INT32_MAX && f->scale_stride <= INT32_MAX ? t->page_rows * f->scale_stride : INT64_MAX;
    return f->scale_page_stride >= rows && f->scale_page_stride - rows <= UINT32_MAX ? f->scale_page_stride - rows : -1;
}

/* Octets of a tile that a thread takes to compute its scale: two if they are a power of two (with few bytes one),
   otherwise up to eight. 0: no kernel does. INT8 and F4E2M1 have only the one for two, as engines' tiles are. */
static uint32_t kvpc_octets_each(const kvprim_format *f, bool few)
{
    const int64_t octets = f->tile / 8;
    const bool int8 = f->dtype == KVPRIM_INT8, packed = f->dtype == KVPRIM_F4E2M1;
    if (octets >= 2 && octets <= 64 && (octets & (octets - 1)) == 0)
        return few && octets <= 32 && !int8 && !packed ? 1 : 2;
    return octets <= 32 * 8 && !int8 && !packed ? 8 : 0;
}

/* Whether the kernels of plain rows can convert a move: a store to quantised rows, or a gather from them. */
static bool kvpc_is_plain_conversion(const kvprim_move *m)
{
    uint64_t bits = 0;
    if (m->count == 0 || !m->dst.format.dtype || !kvpc_has_plain_sides(m, &bits))
        return false;
    const kvprim_side *const quantised = m->zero ? &m->src : &m->dst, *const other = m->zero ? &m->dst : &m->src;
    const kvprim_format &f = quantised->format;
    const bool tiles = f.scale == KVPRIM_SCALE_TILE, packed = f.dtype == KVPRIM_F4E2M1;
#ifdef KVPRIM_NO_FOUR_BIT
    const bool other_type = kvpi_is_four_bit(f.dtype);
#else
    const bool other_type = f.dtype == KVPRIM_INT4 || (packed && !tiles);
#endif
    if (!kvpi_is_quantised(f.dtype) || other_type ||
        (other->format.dtype != KVPRIM_BF16 && other->format.dtype != KVPRIM_F16) || !kvpc_is_made_of(other, 16, 16) ||
        !kvpc_is_made_of(quantised, 4, packed ? 4 : 8))
        return false;
    if ((!tiles && f.scale_dtype == KVPRIM_F8E8M0) || /* scales that rows share are read as fp32 */
        ((tiles || f.scale == KVPRIM_SCALE_HEAD) && (f.tile % 8 != 0 || f.scale_tile_stride > UINT32_MAX)) ||
        (tiles && (f.scale_stride > UINT32_MAX || kvpc_scale_page_step(&quantised->table, &f) < 0)) ||
        (f.scale_heads > 1 && quantised->table.heads > 1 && f.scale_heads != quantised->table.heads))
        return false;
    return !tiles || m->zero ||
           (kvpi_elements_in(f.dtype, quantised->piece_bytes) % f.tile == 0 && /* a tile lies in one head, */
            m->row_bytes <= 16 * kvpc_most_threads &&                          /* a row's threads fit a block, */
            f.scale_min <= 8.507059e37f && /* 2^126: a scale's reciprocal is a normal number, */
            kvpc_octets_each(&f, false) > 0);
}

/* Whether one launch takes both moves: the same slots, conversion and kind of scales; or V is copied beside tiles. */
static bool kvpc_is_converted_k_and_v(const kvprim_move *k, const kvprim_move *v)
{
    const kvprim_side *const a = &k->dst, *const b = &v->dst;
    const int64_t k_page = a->table.page_rows, v_page = b->table.page_rows, most_words = kvpc_most_threads - 64;
    uint64_t bits = 0;
    if (k->zero || v->zero || v->rejected || k->count != v->count || !kvpc_is_same_naming(a, b) ||
        (k_page && v_page && k_page != v_page) || a->table.heads != b->table.heads)
        return false;
    const kvprim_format &f = a->format;
    if (!b->format.dtype)
        return f.scale == KVPRIM_SCALE_TILE && a->table.heads == 1 && kvpc_is_plain(v, &bits) &&
               (bits | (uint64_t)v->row_bytes) % 16 == 0 && k->row_bytes + v->row_bytes <= 16 * most_words;
    const kvprim_format &g = b->format;
    const bool tiles = f.scale == KVPRIM_SCALE_TILE, heads = f.scale == KVPRIM_SCALE_HEAD;
    return kvpc_is_plain_conversion(v) && ((!tiles && a->table.heads == 1) || k->row_bytes == v->row_bytes) &&
           f.dtype == g.dtype && k->src.format.dtype == v->src.format.dtype && f.scale == g.scale &&
           (!(tiles || heads) || f.tile == g.tile) && f.scale_dtype == g.scale_dtype &&
           f.scale_heads == g.scale_heads && f.scale_inverse == g.scale_inverse && f.nans == g.nans &&
           f.scale_power_of_two == g.scale_power_of_two && kvpi_bits_of(f.scale_min) == kvpi_bits_of(g.scale_min);
}

/* Whether a gather of K's octets takes V, too: of the same rows, in words that are only copied. There are no more words
   than octets, and all are in one part, so that only the second load of a thread may be a word's. */
static bool kvpc_is_gathered_beside(const kvprim_move *k, const kvprim_move *v)
{
    const kvprim_side *const a = &k->src, *const b = &v->src;
    const int64_t octets = 2 * kvpi_elements_in(a->format.dtype, k->row_bytes); /* bytes as dst has them */
    uint64_t bits = 0;
    return k->zero && v->zero && !v->rejected && !v->dst.format.dtype && k->count == v->count &&
           kvpc_is_same_naming(a, b) && a->table.page_rows == b->table.page_rows && b->table.heads == 1 &&
           kvpc_is_plain(v, &bits) && (bits | (uint64_t)v->row_bytes) % 16 == 0 && v->row_bytes <= octets &&
           octets + v->row_bytes < 16 * 256;
}

/* What K or V is moved by. Sets the page's divisor, too. */
static kvpc_route kvpc_route_of(const kvprim_move *m, kvpc_convert *p)
{
    const kvprim_side *const indexed = m->zero ? &m->src : &m->dst, *const other = m->zero ? &m->dst : &m->src;
    const kvprim_table *const t = &indexed->table;
    kvpc_route s = {};
    s.dst = (uintptr_t)kvprim_side_layer(&m->dst, 0), s.dst_stride = (uint32_t)m->dst.table.stride;
    s.page = (uint32_t)kvpc_page_step(t), s.head = (uint32_t)kvpc_head_step(indexed);
    s.octets = (uint32_t)(other->piece_bytes * other->table.heads / 16);
    if (t->page_rows > 0)
        p->page = kvpc_divisor_of(t->page_rows).narrow;
    if (!indexed->format.dtype)
        return s;
    const kvprim_format &f = indexed->format;
    if (f.scale)
        s.scales = f.scales ? (uintptr_t)f.scales : (uintptr_t)kvprim_side_layer(indexed, 0) + (uint64_t)f.scale_offset;
    s.tensor = (uintptr_t)f.tensor_scale, s.tile = (uint32_t)f.scale_tile_stride;
    if (f.scale == KVPRIM_SCALE_TILE)
        s.scale_row = (uint32_t)f.scale_stride, s.scale_page = (uint32_t)kvpc_scale_page_step(t, &f);
    return s;
}

/* Where scales with heads lie. Swizzled ones take every fourth byte, those of the next row the bytes after them. */
static void kvpc_set_scale_heads(kvpc_convert *p, size_t route, const kvprim_format &f)
{
    const uint32_t tiles = (uint32_t)f.scale_stride, step = f.scale_order ? 4 : 1; /* tiles of a head */
    p->how |= kvpc_has_heads;
    p->scale_heads = kvpc_divisor_of(p->route[route].octets / (uint32_t)f.scale_heads).narrow;
    /* steps go by heads of the table where scales have one */
    p->scale_head[route] = f.scale_heads > 1 ? (uint32_t)f.scale_tile_stride - step * tiles : 0;
    p->scale_rows[route] = f.scale_order ? 4 * tiles - 4 : 0;
    p->route[route].tile = step, p->route[route].scale_row = f.scale_order ? 1 : tiles;
}

/* Everything that K and V share, except how threads share the rows. */
static void kvpc_set_convert(kvpc_convert *p, const kvprim_move *m)
{
    const kvprim_side *const indexed = m->zero ? &m->src : &m->dst;
    const kvprim_table *const t = &indexed->table;
    const kvprim_format &f = indexed->format;
    const bool tiles = f.scale == KVPRIM_SCALE_TILE || f.scale == KVPRIM_SCALE_HEAD;
    kvpc_set_index(p, indexed, m);
    p->head = kvpc_divisor_of(t->heads > 1 ? kvpi_elements_in(f.dtype, indexed->piece_bytes) / 8 : 0).narrow;
    p->tile = kvpc_divisor_of(tiles ? f.tile / 8 : 0).narrow;
    p->how |= (f.scale && !m->zero && !f.scale_inverse ? kvpc_divides : 0) |
              (f.dtype == KVPRIM_F8E5M2 ? kvpc_e5m2 : 0) | (f.scale_dtype == KVPRIM_F8E8M0 ? kvpc_e8m0 : 0) |
              (kvpc_is_made_of(indexed, 8, 8) ? 0 : kvpc_by_fours) | (p->index_is_i64 ? kvpc_wide_index : 0) |
              (f.dtype == KVPRIM_F4E2M1 ? (uint32_t)f.scale_dtype << kvpc_scales_shift : 0);
    p->nans = m->zero ? NULL : f.nans;
}

/* >>impl_convert_shape --------------------------------------------------------------------------------------------- */

/* Blocks of `parts` parts of each group of rows; as kvpc_start_words. */
template <class params>
static kvprim_status kvpc_start_convert(const kvpc_call *call, void (*kernel)(const params KVPRIM_IN_PLACE),
                                        uint32_t parts, uint32_t threads, uint64_t bytes, params *p)
{
    const uint32_t groups = kvpc_parts_of(p->count, p->block_rows);
    const uint32_t z = groups > UINT16_MAX ? kvpc_parts_of(groups, kvpc_grid_rows) : 1;
    kvpc_call started = *call;
    started.launch.pdl = call->launch.pdl && (uint64_t)groups * parts <= kvpc_many_blocks;
    p->how |= !started.launch.pdl ? kvpc_alone : bytes <= kvpc_first_bytes ? kvpc_trigger_first : kvpc_trigger_late;
    return kvpc_start(&started, kernel, dim3(parts, z > 1 ? (uint32_t)kvpc_grid_rows : groups, z), threads, *p);
}

static uint32_t kvpc_whole_warps(uint32_t threads)
{
    return (threads + 31) / 32 * 32;
}

/* Bytes from a row's first scale to the end of its last. */
static uint32_t kvpc_scale_bytes(const kvprim_side *side)
{
    const kvprim_format &f = side->format;
    const int64_t tiles = kvpi_elements_in(f.dtype, side->piece_bytes * side->table.heads) / f.tile;
    return (uint32_t)((tiles - 1) * f.scale_tile_stride + kvpi_dtype_bytes(f.scale_dtype));
}

/* Of many rows whose tiles do not fill granules, edges are fetched first, and scales' unless each is at its head. */
static void kvpc_set_tile_edges(kvpc_convert_tiles *p, const kvprim_side *dst, const kvprim_move *v)
{
    const kvprim_format &f = dst->format;
    const int64_t head = dst->piece_bytes + kvpi_dtype_bytes(f.scale_dtype);
    const int64_t row_bytes = dst->piece_bytes * dst->table.heads;
    const bool inside = !f.scales && f.scale_offset == row_bytes;
    const uint32_t scales = kvpc_scale_bytes(dst), row = (uint32_t)row_bytes + (inside ? scales : 0);
    const bool follow_heads = !f.scales && dst->table.heads > 1 && f.scale_offset == dst->piece_bytes &&
                              f.scale_tile_stride == dst->table.head_stride &&
                              f.tile == kvpi_elements_in(f.dtype, dst->piece_bytes);
    const bool whole = (dst->table.stride | f.scale_offset) % kvpc_granule_bytes == 0, tiles = v && v->dst.format.dtype;
    const kvpc_route &a = p->route[0], &b = p->route[1];
    const bool follows = v && !tiles && b.dst == a.dst + row && b.dst_stride == a.dst_stride && b.page == a.page;
    if (tiles && (a.tile != b.tile || a.head != b.head || v->dst.format.scale_offset != f.scale_offset))
        return;
    p->edge_lanes = UINT32_MAX;
    if (follow_heads && dst->table.head_stride == head && dst->table.heads * head <= dst->table.stride)
        p->edges = (uint32_t)(dst->table.heads * head);
    else if (follow_heads)
        p->edges = (uint32_t)head, p->edge_lanes = (1u << p->lanes_shift) - 1;
    if (dst->table.heads == 1 && (!whole || inside))
        p->edges = row + (follows ? (uint32_t)v->row_bytes : 0);
    if (!inside && !follow_heads)
        p->scale_edges = scales;
}

/* What scales are computed by. Where these are powers of two, elements may be multiplied or divided, with the same
   result: `few` tiles are multiplied, others of 8 bits divided. */
static void kvpc_set_tile_format(kvpc_convert_tiles *p, const kvprim_format &f, bool few)
{
    const bool packed = f.dtype == KVPRIM_F4E2M1, tensor = p->route[0].tensor || p->route[1].tensor;
    if (f.scale_power_of_two || p->how & kvpc_e8m0) { /* a reciprocal gives the same; so does that of a largest scale */
        p->how |= kvpc_power_of_two | (packed ? 0 : kvpc_divides);
        p->how &= few || (packed && !tensor) ? ~(uint32_t)kvpc_divides : UINT32_MAX;
    }
    for (size_t m = 0; m < 2; m++) {
        kvpc_route *const s = &p->route[m];
        s->least = f.scale_min, s->largest = kvpi_largest(f.dtype), s->inverse = 1.0f / s->largest;
    }
}

/* Sets how many tiles a thread takes part in, one after the other, at most `most`. Returns the threads of a row.
   More rounds share what finding a row takes, while there are enough threads: of 65,536 rows of 1,024 elements 2, 4
   and 8 took 0.87, 0.81 and 0.78 of the time with 380 instructions a tile, now 265. Beside V, whose threads end early,
   2 are best: 1 and 4 took 1.15 and 1.07 of their time (H200). */
static uint32_t kvpc_set_rounds(kvpc_convert_tiles *p, uint32_t heads, uint32_t tables, uint32_t most)
{
    const uint64_t enough = 1024 * (uint64_t)kvpc_multiprocessors(); /* threads */
    const uint32_t tiles = p->octets / p->tile_octets, head_tiles = heads > 1 ? tiles / heads : 0;
    uint32_t lanes = tiles << p->lanes_shift, rounds = 1;
    p->round_tiles = tiles;
    while (rounds < most && p->round_tiles % (head_tiles ? 2 * head_tiles : 2) == 0 &&
           (uint64_t)p->count * tables * lanes / 2 >= enough)
        rounds *= 2, p->round_tiles /= 2, lanes /= 2;
    p->how |= rounds << kvpc_rounds_shift;
    p->round_heads = head_tiles ? p->round_tiles / head_tiles : 0;
    p->round_dst = 4 * p->round_tiles * p->tile_octets;
    return lanes;
}

/* Plans how threads share rows, of which K takes `lanes`. Returns the threads of a block: up to `most`, or a row's.
   Rows share a block if each multiprocessor still has one. Where tiles are few, every fourth has one, or every eighth
   if blocks have up to 64 threads (H200), and V's source becomes a difference: see kvpc_convert_tiles. */
static uint32_t kvpc_shape_tiles(kvpc_convert *p, uint32_t lanes, uint32_t tables, uint32_t most, bool few)
{
    const uint32_t tile = 1u << p->lanes_shift, v_lanes = few ? 0 : p->v_words;
    uint32_t rows = 1, row = few ? kvpc_parts_of(lanes + p->v_words, tile) * tile : lanes; /* tiles lie in one warp */
    const uint32_t enough = few ? kvpc_multiprocessors() / 4 : kvpc_multiprocessors();     /* blocks */
    while (kvpc_whole_warps(2 * rows * row) + kvpc_whole_warps(2 * rows * v_lanes) <= most &&
           kvpc_parts_of(p->count, 2 * rows) * tables >= enough >> (few && rows * row <= 32))
        rows *= 2;
    const uint32_t threads = kvpc_whole_warps(rows * row);
    row = few ? threads / rows : row;
    p->row_threads = row, p->block_rows = rows, p->row_magic = (65536 + row - 1) / row;
    p->k_threads = few ? lanes : threads;
    if (v_lanes)
        p->v_magic = (65536 + v_lanes - 1) / v_lanes;
    if (few && p->v_words) /* V's first word is that of thread k_threads */
        p->src[1] -= 16 * lanes, p->route[1].dst -= 16 * lanes;
    if (few)
        p->v_words += lanes, p->src[1] -= p->src[0], p->src_stride[1] -= p->src_stride[0];
    return threads + kvpc_whole_warps(rows * v_lanes);
}

/* Stores that compute scales; v may be NULL. tables: 2 if V has tiles, too. */
static kvprim_status kvpc_run_tiles(const kvpc_call *call, const kvprim_move *k, const kvprim_move *v,
                                    kvpc_convert_tiles *p)
{
    const kvprim_format &f = k->dst.format;
    const kvprim_dtype from = k->src.format.dtype;
    const bool int8 = f.dtype == KVPRIM_INT8, packed = f.dtype == KVPRIM_F4E2M1, copies = v && !v->dst.format.dtype;
    const uint32_t tables = v && !copies ? 2 : 1;
    const uint64_t bytes = (uint64_t)p->count * (p->octets * tables + p->v_words) * 16;
    const uint32_t loads = kvpc_octets_each(&f, bytes <= kvpc_few_bytes);
    const uint32_t block = copies && !packed ? kvpc_most_threads : kvpc_threads;
    p->tile_octets = (uint32_t)(f.tile / 8);
    kvpc_set_tile_format(p, f, loads == 1);
    while (p->lanes_shift < 5 && loads << p->lanes_shift < p->tile_octets)
        p->lanes_shift++;
    if (bytes > kvpc_few_bytes && !f.scale_heads)
        kvpc_set_tile_edges(p, &k->dst, v);
    p->how |= p->edges || p->scale_edges ? kvpc_has_edges : 0;
    const uint32_t heads = (uint32_t)(f.scale_heads > 1 ? f.scale_heads : k->dst.table.heads);
    const uint32_t lanes = kvpc_set_rounds(p, heads, tables, !packed ? 1 : copies ? 2 : 8);
    const uint32_t threads = kvpc_shape_tiles(p, lanes, tables, block, loads == 1);
    kvpc_tiles_convert kernel =
        int8         ? KVPRIM_CONVERT_KERNEL(from, kvpc_convert_tiles_kernel, kvpc_int8, 2)
        : loads == 1 ? from == KVPRIM_BF16 ? kvpc_convert_few_kernel<KVPRIM_BF16> : kvpc_convert_few_kernel<KVPRIM_F16>
        : loads == 2 ? KVPRIM_CONVERT_KERNEL(from, kvpc_convert_tiles_kernel, kvpc_8_bits, 2)
                     : KVPRIM_CONVERT_KERNEL(from, kvpc_convert_tiles_kernel, kvpc_8_bits, 8);
#ifndef KVPRIM_NO_FOUR_BIT
    if (packed)
        kernel = KVPRIM_CONVERT_KERNEL(from, kvpc_convert_tiles_kernel, kvpc_4_bits, 2);
#endif
    return kvpc_start_convert(call, kernel, tables, threads, bytes, p);
}

/* Gathers, and stores whose scales are given. Many rows stored alone are two halves, INT8 otherwise K and nothing. K
   and V that are equally long and up to 2 MB together have blocks `apart`, except of INT8. */
static kvprim_status kvpc_run_scaled(const kvpc_call *call, const kvprim_move *m, bool alone, kvpc_convert *p)
{
    const bool packed = m->zero && m->src.format.dtype == KVPRIM_F4E2M1;
    const bool int8 = (m->zero ? m->src : m->dst).format.dtype == KVPRIM_INT8;
    const kvprim_dtype other = (m->zero ? m->dst : m->src).format.dtype;
    const uint64_t bytes = (uint64_t)p->count * (p->route[0].octets + p->route[1].octets) * 16;
    const bool many = bytes > kvpc_few_bytes, halves = !m->zero && alone && many && p->octets % 2 == 0;
    const bool apart = !m->zero && !alone && !int8 && bytes <= 2 * kvpc_few_bytes &&
                       p->route[0].octets == p->route[1].octets; /* 0.93 to 1.00 of both's time (H200) */
    const uint32_t routes = m->zero || apart || (alone && !halves && !int8) ? 1 : 2;
    const uint32_t loads = m->zero && (many || int8 || packed || p->how & kvpc_by_fours || p->v_words) ? 2 : 1;
    for (size_t k = 0; !m->zero && many && k < (alone ? 1 : 2); k++)
        if (m->dst.table.heads == 1 && (p->route[k].dst_stride | 8 * p->route[k].octets) % kvpc_granule_bytes)
            p->route[k].edges = 8 * p->route[k].octets;
    if (halves) {
        p->octets /= 2, p->route[0].octets = p->octets;
        p->route[1] = p->route[0], p->route[1].edges = 0;
        p->src[1] = p->src[0] + 16 * (uint64_t)p->octets, p->src_stride[1] = p->src_stride[0];
        p->route[1].dst += 8 * (uint64_t)p->octets, p->route[1].octet = p->octets;
    }
    if (!m->zero && routes == 1 && !m->dst.format.scale)
        p->how |= kvpc_divides; /* by 1, as kvpc_convert_store_kernel multiplies late */
    const uint32_t parts = kvpc_shape_rows(p, 16 * (p->octets + p->v_words), loads, routes) << apart;
    const uint32_t threads = p->block_rows * p->row_threads;
    p->apart = apart;
    kvpc_plain_convert kernel = m->zero ? int8 ? KVPRIM_CONVERT_KERNEL(other, kvpc_convert_gather_kernel, kvpc_int8, 2)
                                          : loads == 1
                                              ? KVPRIM_CONVERT_KERNEL(other, kvpc_convert_gather_kernel, kvpc_8_bits, 1)
                                              : KVPRIM_CONVERT_KERNEL(other, kvpc_convert_gather_kernel, kvpc_8_bits, 2)
                                : int8 ? KVPRIM_CONVERT_KERNEL(other, kvpc_convert_store_kernel, kvpc_int8, 2)
                                : routes == 1 ? KVPRIM_CONVERT_KERNEL(other, kvpc_convert_store_kernel, kvpc_8_bits, 1)
                                              : KVPRIM_CONVERT_KERNEL(other, kvpc_convert_store_kernel, kvpc_8_bits, 2);
#ifndef KVPRIM_NO_FOUR_BIT
    if (packed)
        kernel = KVPRIM_CONVERT_KERNEL(other, kvpc_convert_gather_kernel, kvpc_4_bits, 2);
#endif
    return kvpc_start_convert(call, kernel, parts, threads, bytes, p);
}

/* Runs K, or K and V, if the kernels of plain rows can convert them; returns whether. */
static bool kvpc_run_plain_convert(const kvpc_call *call, const kvprim_move *moves, size_t n, kvprim_status *status)
{
    if (call->launch.max_sms != 0 || n > 2 || !kvpc_is_plain_conversion(&moves[0]) ||
        (n == 2 && !kvpc_is_converted_k_and_v(&moves[0], &moves[1]) && !kvpc_is_gathered_beside(&moves[0], &moves[1])))
        return false;
    kvpc_convert_tiles p = {};
    for (size_t k = 0; k < n; k++) {
        const kvprim_side &indexed = moves[k].zero ? moves[k].src : moves[k].dst;
        p.src[k] = (uintptr_t)kvprim_side_layer(&moves[k].src, 0);
        p.src_stride[k] = (uint32_t)moves[k].src.table.stride;
        p.route[k] = kvpc_route_of(&moves[k], &p);
        if (indexed.format.dtype && indexed.format.scale_heads) /* which is not set beside bytes */
            kvpc_set_scale_heads(&p, k, indexed.format);
    }
    kvpc_set_convert(&p, &moves[0]);
    if (n == 2 && moves[1].dst.format.dtype && !kvpc_is_made_of(&moves[1].dst, 8, 8))
        p.how |= kvpc_by_fours;
    const bool copies = n == 2 && !moves[1].dst.format.dtype;
    p.v_words = copies ? (uint32_t)(moves[1].row_bytes / 16) : 0;
    p.octets = copies || p.route[0].octets > p.route[1].octets ? p.route[0].octets : p.route[1].octets;
    *status = moves->dst.format.scale == KVPRIM_SCALE_TILE ? kvpc_run_tiles(call, moves, n == 2 ? &moves[1] : NULL, &p)
                                                           : kvpc_run_scaled(call, moves, n == 1, &p);
    return true;
}
#endif

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
    const kvpc_layout s = {t->stride, (int64_t)kvpc_page_step(t), (int64_t)kvpc_head_step(side),
                           kvpc_divisor_of(t->page_rows), kvpc_divisor_of(t->heads > 1 ? side->piece_bytes / unit : 0)};
    *bits |= (uint64_t)s.stride | (uint64_t)s.page_step | (uint64_t)s.head_step | (uint64_t)unit;
    return s;
}

/* Everything of a task except its layers and how its rows are cut into chunks. */
static void kvpc_set_task(kvpc_task *t, const kvprim_move *m, uint64_t *bits)
{
    const int64_t unit = kvpc_gcd(m->dst.piece_bytes, m->src.piece_bytes);
    t->dst_rows = kvpc_naming_of(&m->dst, m->count), t->src_rows = kvpc_naming_of(&m->src, m->count);
    t->dst = kvpc_layout_of(&m->dst, unit, bits), t->src = kvpc_layout_of(&m->src, unit, bits);
    t->unit_bytes = (uint64_t)unit, t->units = (uint64_t)(m->row_bytes / unit);
    t->count = kvpc_divisor_of(m->count), t->zero = m->zero != 0;
}

/* Into log2 of how many threads' share a unit is cut, by the largest unit of a launch. */
static uint32_t kvpc_lanes_shift(const kvpc_call *call, uint64_t unit, bool aligned)
{
    const bool few = call->launch.max_sms > 0;
    const uint64_t eight = few ? call->link ? 1024 : 512 : 256, sixteen = few ? UINT64_MAX : 512; /* bytes, at most */
    return unit <= 16 ? 0 : unit <= (aligned ? eight : 256) ? 3 : aligned && unit <= sixteen ? 4 : 5;
}

/* Cuts the units of all tasks into chunks of `loads` words a thread. */
template <class params> static void kvpc_cut(params *p, kvpc_task *tasks, uint32_t n, uint32_t shift, uint32_t loads)
{
    p->lanes_shift = shift, p->part_bytes = 16 * loads << shift, p->total = 0;
    for (kvpc_task *t = tasks; t != tasks + n; t++) {
        t->parts = kvpc_divisor_of((int64_t)((t->unit_bytes + p->part_bytes - 1) / p->part_bytes));
        t->chunks = kvpc_divisor_of((int64_t)(t->units * t->parts.by));
        t->first_chunk = p->total;
        p->total += t->chunks.by * t->count.by * t->layers;
    }
}

/* Blocks for all chunks; with max_sms no more than that many, of as many threads as there is work for. */
template <class batch>
static kvprim_status kvpc_start_groups(const kvpc_call *call, void (*kernel)(const batch KVPRIM_IN_PLACE),
                                       uint32_t most_threads, const batch *p)
{
    const uint64_t limit = (uint64_t)call->launch.max_sms;
    const uint32_t lanes = 1u << p->lanes_shift;
    uint32_t threads = limit ? most_threads : (uint32_t)kvpc_threads;
    while (threads > kvpc_threads && p->total / (threads / lanes) < limit)
        threads /= 2;
    const uint64_t wanted = (p->total + threads / lanes - 1) / (threads / lanes), most = limit ? limit : INT32_MAX;
    return kvpc_start(call, kernel, (uint32_t)(wanted < most ? wanted : most), threads, *p);
}

/* The call on as many multiprocessors as such units need over the link, unless the caller has chosen them, and the
   most threads on each. Few threads on several leave room for blocks of other kernels: a kernel of arithmetic takes
   1.09 times as long beside them, and 2 times beside 1,024 threads on two. Stores to the host that the link cannot take
   queue up in front of all other memory accesses, reads of the host too. So no more threads store than fill the link:
   with 5 multiprocessors 4 KB rows move 79 GB/s in sum in both directions at once, with 6 of them 69 (H200). */
static kvpc_call kvpc_on_link(const kvpc_call *call, uint64_t unit, bool aligned, uint32_t *most_threads)
{
    static const struct {
        uint64_t below; /* bytes of a unit */
        int32_t to_host, to_gpu;
        uint32_t to_host_threads, to_gpu_threads;
    } fill[] = {{2048, 8, 8, 128, 256}, {16384, 5, 8, 128, 256}, {UINT64_MAX, 4, 4, 128, 512}};
    kvpc_call start = *call;
    uint32_t k = 0;
    *most_threads = kvpc_few_sms_threads;
    if (!call->chosen || !aligned || unit <= 16)
        return start;
    while (unit >= fill[k].below)
        k++;
    start.launch.max_sms = call->to_host ? fill[k].to_host : fill[k].to_gpu;
    *most_threads = call->to_host ? fill[k].to_host_threads : fill[k].to_gpu_threads;
    return start;
}

/* `bits`: see kvpc_layout_of; the layers' addresses count, too. On few multiprocessors a thread loads 8 words before it
   stores; 4 of rows of 513 to 1,024 bytes, faster except over the link, and 4 where several moves take registers. */
template <uint32_t most_tasks>
static kvprim_status kvpc_start_batch(const kvpc_call *call, kvpc_batch<most_tasks> *p, uint64_t bits)
{
    typedef kvpc_batch<most_tasks> params;
    const uint32_t few_loads = most_tasks > 1 ? kvpc_few_loads / 2 : kvpc_few_loads;
    uint64_t unit = 0;
    for (uint32_t k = 0; k < p->tasks; k++) {
        const kvpc_task *const t = &p->task[k];
        unit = t->unit_bytes > unit ? t->unit_bytes : unit;
        for (uint64_t l = t->first_layer; l < t->first_layer + t->layers; l++)
            bits |= p->layer[l].dst | p->layer[l].src;
    }
    const bool aligned = bits % 16 == 0, few = call->launch.max_sms > 0;
    const uint32_t shift = kvpc_lanes_shift(call, unit, aligned);
    uint32_t most_threads;
    const kvpc_call start = kvpc_on_link(call, unit, aligned, &most_threads);
    p->pdl = call->launch.pdl != 0;
    kvpc_cut(p, p->task, p->tasks, shift, !aligned ? kvpc_any_loads : few ? few_loads : kvpc_once_loads);
    if (!aligned)
        return kvpc_start_groups(&start, kvpc_move_any_kernel<uint32_t, params>, kvpc_unaligned_threads, p);
    return few ? kvpc_start_groups(&start, kvpc_move_few_kernel<true, few_loads, params>, most_threads, p)
               : kvpc_start_groups(&start, kvpc_move_kernel<true, params>, kvpc_threads, p);
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
    dst->page_rows /= rows, src->page_rows /= rows, m->count /= rows;
}

/* Whether a move is a transfer between pinned host memory and a GPU of 64 KB or more. A shorter one takes about 1 us,
   and asking CUDA where its memory is takes 0.3 us. */
static bool kvpc_crosses_link(const kvprim_move *m, bool *to_host)
{
    const uint64_t least_bytes = 64 << 10, bytes = (uint64_t)m->count * (uint64_t)m->row_bytes;
    const void *const dst = kvprim_side_layer(&m->dst, 0), *const src = kvprim_side_layer(&m->src, 0);
    bool inside;
    return m->names->dst_index && m->names->src_index && m->count > 0 && bytes >= least_bytes / (uint64_t)m->layers &&
           (dst || src) && kvpc_is_link(dst, src, to_host, &inside);
}

/* Whether a side's rows can be one copy of two dimensions, which is as fast as one of a single run if rows have 512
   bytes or more. CUDA takes a pitch below 2 GB. */
static bool kvpc_is_copied_side(const kvprim_side *side, const kvprim_move *m)
{
    const kvprim_table *const t = &side->table;
    return !side->index && t->heads == 1 && t->page_rows == 0 &&
           (m->count == 1 || (m->row_bytes >= 512 && t->stride >= m->row_bytes && t->stride <= INT32_MAX));
}

/* Lets the copy engine move the layers of a transfer without an index, and returns whether it does. If it refuses a
   layer, a kernel moves all of them, again those that are copied. The copy engine fills the link to 1.00 where kernels
   reach 0.95, and hardly slows other kernels. A single copy ends 3 us sooner than a kernel. But each further copy, and
   each copy in a graph, begins 1 to 2 us after the work before it; from 2 MB on that is made up for. */
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

/* Whether a move differs from the one before only in memory, as V often does from K: then its layers join that task. */
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
    const kvpc_task *const last = p->tasks ? &p->task[p->tasks - 1] : NULL;
    const uint32_t used = last ? (uint32_t)last->first_layer + last->layers : 0;
    const uint32_t room = kvpc_batch<most_tasks>::most_layers - used, left = (uint32_t)(m->layers - first);
    const uint32_t layers = left < room ? left : room;
    if (layers == 0 || (!alike && p->tasks == most_tasks))
        return 0;
    if (!alike) {
        kvpc_task *const task = &p->task[p->tasks++];
        kvpc_set_task(task, m, bits);
        task->first_layer = used, task->layers = 0;
        task->rejected = first == 0 ? m->rejected : NULL; /* counted in layer 0 */
    }
    p->task[p->tasks - 1].layers += layers;
    const kvprim_side dst = m->dst, src = m->src;
    for (uint32_t l = 0; l < layers; l++)
        p->layer[used + l] = kvpc_layer{(uintptr_t)kvprim_side_layer(&dst, first + (int32_t)l),
                                        (uintptr_t)kvprim_side_layer(&src, first + (int32_t)l)};
    return (int32_t)layers;
}

/* >>impl_move_lists ------------------------------------------------------------------------------------------------ */

/* Stores what a launch needs of the layers of a side, from layer `first` on, and returns where they lie. */
static kvpc_stack kvpc_stack_of(const kvprim_side *side, int32_t first, int32_t layers, uint32_t *n32, uint32_t *used,
                                uint64_t *bits)
{
    kvpc_stack s = {0, (uintptr_t)side->table.data, (uint64_t)side->layer_stride, 0, 0};
    if (side->device_layers)
        s.array = (uintptr_t)(side->device_layers + first);
    else if (side->layers) {
        s.words = *used;
        *used += 2 * (uint32_t)layers;
        for (int32_t l = 0; l < layers; l++) {
            const uint64_t layer = (uintptr_t)side->layers[first + l];
            n32[s.words + 2 * (uint32_t)l] = (uint32_t)layer;
            n32[s.words + 2 * (uint32_t)l + 1] = (uint32_t)(layer >> 32);
            *bits |= layer;
        }
    } else {
        s.base += (uint64_t)first * s.step;
        *bits |= s.base | s.step;
    }
    return s;
}

/* Words that a row's number takes in a list: one, also for int64 indices, unless a table has 2^31 rows or more. */
static uint32_t kvpc_row_words(const kvprim_move *m)
{
    return m->dst.table.rows > INT32_MAX || m->src.table.rows > INT32_MAX ? 2 : 1;
}

/* Stores the host's int64 indices as the index rule leaves them: rows, -1 for padding, `rows` for what is past. */
template <class word> static void kvpc_store_rows(const kvprim_side *side, int64_t first, int64_t count, uint32_t *to)
{
    const int64_t base = side->index_base, stride = side->index_stride;
    const int64_t *const from = (const int64_t *)side->index + first * stride;
    const int32_t *const from32 = (const int32_t *)side->index + first * stride;
    const uint64_t rows = (uint64_t)side->table.rows;
    const bool is_i64 = side->index_type == KVPRIM_I64;
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = is_i64 ? from[i * stride] : from32[i * stride];
        const uint64_t row = (uint64_t)index - (uint64_t)base;
        const word value = (word)(index < base ? UINT64_MAX : row < rows ? row : rows);
        memcpy((char *)to + (size_t)i * sizeof value, &value, sizeof value);
    }
}

/* What names the rows `first` to first + count - 1 of a launch, on one side. int32 indices meet the rule on the GPU. */
static kvpc_naming kvpc_list_rows(const kvprim_side *side, int64_t first, int64_t count, uint32_t words, uint32_t *n32,
                                  uint32_t *used, kvpc_stack *s)
{
    kvpc_naming naming = kvpc_naming_of(side, first + count);
    if (!side->index)
        naming.base = -first;
    if (!kvpc_has_host_index(side))
        return naming;
    s->list = *used;
    *used += words * (uint32_t)count;
    if (words == 1 && side->index_type == KVPRIM_I32 && side->index_stride == 1) {
        memcpy(n32 + s->list, (const int32_t *)side->index + first, 4 * (size_t)count);
        return kvpc_naming{0, side->index_base, (uint64_t)side->table.rows, 0, 0};
    }
    if (words == 1)
        kvpc_store_rows<uint32_t>(side, first, count, n32 + s->list);
    else
        kvpc_store_rows<uint64_t>(side, first, count, n32 + s->list);
    return kvpc_naming{0, 0, (uint64_t)side->table.rows, 0, 0};
}

/* Rows and layers of a move in one launch. */
typedef struct kvpc_slice {
    int32_t layer, layers;
    int64_t row, rows;
} kvpc_slice;

/* Fills in all parameters except how rows are cut. Returns whether all that the host knows is made of whole words. */
template <uint32_t bytes>
static bool kvpc_fill_listed(const kvpc_call *call, const kvprim_move *m, const kvpc_slice *slice,
                             kvpc_listed<bytes> *p)
{
    kvpc_task *const t = &p->task;
    uint64_t bits = 0;
    uint32_t used = kvpc_first_word;
    p->row_words = kvpc_row_words(m), p->pdl = call->launch.pdl != 0;
    kvpc_set_task(t, m, &bits);
    p->dst = kvpc_stack_of(&m->dst, slice->layer, slice->layers, p->n32, &used, &bits);
    p->src = kvpc_stack_of(&m->src, slice->layer, slice->layers, p->n32, &used, &bits);
    t->dst_rows = kvpc_list_rows(&m->dst, slice->row, slice->rows, p->row_words, p->n32, &used, &p->dst);
    t->src_rows = kvpc_list_rows(&m->src, slice->row, slice->rows, p->row_words, p->n32, &used, &p->src);
    t->count = kvpc_divisor_of(slice->rows);
    t->first_layer = 0, t->layers = (uint32_t)slice->layers;
    t->rejected = slice->layer == 0 ? m->rejected : NULL; /* counted in layer 0 */
    return bits % 16 == 0;
}

template <uint32_t bytes>
static kvprim_status kvpc_start_listed(const kvpc_call *call, const kvprim_move *m, const kvpc_slice *slice)
{
    typedef kvpc_listed<bytes> params;
    params p;
    const bool few = call->launch.max_sms > 0, aligned = kvpc_fill_listed(call, m, slice, &p);
    kvpc_cut(&p, &p.task, 1, kvpc_lanes_shift(call, p.task.unit_bytes, aligned),
             few ? kvpc_few_loads : kvpc_once_loads);
    uint32_t most_threads;
    const kvpc_call start = kvpc_on_link(call, p.task.unit_bytes, aligned, &most_threads);
    return few ? kvpc_start_groups(&start, kvpc_move_few_kernel<false, kvpc_few_loads, params>, most_threads, &p)
               : kvpc_start_groups(&start, kvpc_move_kernel<false, params>, kvpc_threads, &p);
}

/* For more rows or chunks than 31 bits count. */
static kvprim_status kvpc_start_wide(const kvpc_call *call, const kvprim_move *m, const kvpc_slice *slice)
{
    typedef kvpc_listed<kvpc_few_params> params;
    params p;
    const bool aligned = kvpc_fill_listed(call, m, slice, &p);
    kvpc_cut(&p, &p.task, 1, kvpc_lanes_shift(call, p.task.unit_bytes, aligned), kvpc_any_loads);
    return kvpc_start_groups(call, kvpc_move_any_kernel<uint64_t, params>, kvpc_unaligned_threads, &p);
}

/* Chunks of so many rows, or somewhat more: a part has 256 bytes or more, or is a unit. 2^31 if 31 bits do not count
   them, or the rows and bytes of a table. */
static uint64_t kvpc_most_chunks(const kvprim_move *m, int64_t rows)
{
    const uint64_t most = (uint64_t)1 << 31, unit = (uint64_t)kvpc_gcd(m->dst.piece_bytes, m->src.piece_bytes);
    const uint64_t row_bytes = (uint64_t)m->row_bytes, in_row = row_bytes / unit * (unit / 256 + 1);
    if (kvpc_row_words(m) > 1 || row_bytes >= most / 2 || (uint64_t)rows >= most || in_row * (uint64_t)rows >= most)
        return most;
    const uint64_t all = in_row * (uint64_t)rows * (uint64_t)m->layers;
    return all < most ? all : most;
}

/* Starts as many rows and layers at a time as a launch's parameters hold: few_room words of n32, and with rows up to
   most_room, of which layers take half. is_narrow: whether 31 bits count all of so many rows. */
template <class Start>
static kvprim_status kvpc_run_slices(const kvprim_move *m, int64_t few_room, int64_t most_room,
                                     bool (*is_narrow)(const kvprim_move *, int64_t), Start start)
{
    const int64_t of_row = kvpc_row_words(m) * (kvpc_has_host_index(&m->dst) + kvpc_has_host_index(&m->src));
    const int64_t of_layer = 2 * (m->dst.layers != NULL) + 2 * (m->src.layers != NULL);
    const int64_t most_in = most_room / (of_row ? of_row : 1);
    const bool narrow = is_narrow(m, of_row && m->count > most_in ? most_in : m->count);
    const int64_t room = narrow && of_row ? most_room : few_room;
    const int64_t most_layers = of_layer ? room / (of_row ? 2 : 1) / of_layer : m->layers;
    kvpc_slice s = {0, 0, 0, 0};
    for (; s.layer < m->layers; s.layer += s.layers) {
        s.layers = m->layers - s.layer < most_layers ? m->layers - s.layer : (int32_t)most_layers;
        const int64_t in_layers = of_layer * s.layers, most_rows = of_row ? (room - in_layers) / of_row : m->count;
        for (s.row = 0; s.row < m->count; s.row += s.rows) {
            s.rows = m->count - s.row < most_rows ? m->count - s.row : most_rows;
            KVPRIM_TRY(start(&s, narrow, in_layers + of_row * s.rows));
        }
    }
    return KVPRIM_OK;
}

static kvprim_status kvpc_run_listed(const kvpc_call *call, const kvprim_move *m)
{
    const int64_t few_room = kvpc_listed<kvpc_few_params>::room - kvpc_first_word;
    const int64_t more_room = kvpc_listed<kvpc_more_params>::room - kvpc_first_word;
    const int64_t most_room = kvpc_listed<kvpc_most_params>::room - kvpc_first_word;
    const auto is_narrow = [](const kvprim_move *of, int64_t n) { return kvpc_most_chunks(of, n) < (uint64_t)1 << 31; };
    return kvpc_run_slices(m, few_room, most_room, is_narrow, [=](const kvpc_slice *s, bool narrow, int64_t words) {
        return !narrow              ? kvpc_start_wide(call, m, s)
               : words == 0         ? kvpc_start_listed<kvpc_bare_params>(call, m, s)
               : words <= few_room  ? kvpc_start_listed<kvpc_few_params>(call, m, s)
               : words <= more_room ? kvpc_start_listed<kvpc_more_params>(call, m, s)
                                    : kvpc_start_listed<kvpc_most_params>(call, m, s);
    });
}

/* >>impl_move_batches ---------------------------------------------------------------------------------------------- */

/* As many moves and layers at a time as a launch's parameters hold. */
template <uint32_t most_tasks>
static kvprim_status kvpc_run_batches(const kvpc_call *call, const kvprim_move *moves, size_t n)
{
    const uint64_t most = (uint64_t)1 << 31; /* chunks of a launch */
    int32_t first = 0;                       /* the first layer of moves[k] that is not launched yet */
    for (size_t k = 0; k < n;) {
        kvpc_batch<most_tasks> p;
        kvprim_move joined;
        const kvprim_move *before = NULL;
        uint64_t bits = 0, chunks = 0;
        p.tasks = 0;
        for (; k < n; k++, first = 0) {
            if (moves[k].count == 0)
                continue;
            joined = moves[k];
            kvpc_join_rows(&joined);
            const bool listed = kvpc_is_listed(&joined);
            if (!listed && first == 0 && kvpc_copy_layers(call, &joined))
                continue;
            const uint64_t more = listed ? most : kvpc_most_chunks(&joined, joined.count);
            if (more == most) {
                KVPRIM_TRY(kvpc_run_listed(call, &joined));
                continue;
            }
            chunks += more;
            if (p.tasks && chunks >= most)
                break;
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

/* >>impl_move_lines ------------------------------------------------------------------------------------------------ */

static uint64_t kvpc_layer_at(const kvprim_side *side, int32_t layer)
{
    return (uintptr_t)kvprim_side_layer(side, layer);
}

/* Returns how many layers' rows follow each other: those of layers 0 to n - 1, n to 2 n - 1, and so on, *step apart. */
static int32_t kvpc_layers_in_run(const kvprim_side *side, const kvprim_move *m, uint64_t *step)
{
    const uint64_t first = kvpc_layer_at(side, 0), row_bytes = (uint64_t)m->row_bytes;
    int32_t n = 1;
    while (n < m->layers && kvpc_layer_at(side, n) == first + (uint64_t)n * row_bytes)
        n++;
    *step = n < m->layers ? kvpc_layer_at(side, n) - first : 0;
    for (int32_t l = 0; l < m->layers; l++)
        if (m->layers % n ||
            kvpc_layer_at(side, l) != first + (uint64_t)(l / n) * *step + (uint64_t)(l % n) * row_bytes)
            return 1;
    return n;
}

/* Finds the near side's runs: a row's layers, or a row in heads on the far side. False if a run is one unit. */
static bool kvpc_set_runs(kvpc_lines *p, const kvprim_move *m, bool near_is_dst)
{
    const kvprim_side *const near_side = near_is_dst ? &m->dst : &m->src;
    const kvprim_side *const far_side = near_is_dst ? &m->src : &m->dst;
    const int32_t heads = far_side->table.heads, most = sizeof p->unit / sizeof *p->unit;
    if (near_side->table.heads > 1 || (heads > 1 && m->layers > 1) || heads > most || m->layers > most)
        return false;
    p->near_step = 0;
    p->units = (uint32_t)(heads > 1 ? heads : kvpc_layers_in_run(near_side, m, &p->near_step));
    p->groups = heads > 1 ? 1 : (uint32_t)m->layers / p->units;
    for (uint32_t u = 0; u < p->groups * p->units; u++)
        p->unit[u] = heads > 1 ? kvpc_layer_at(far_side, 0) + u * (uint64_t)far_side->table.head_stride
                               : kvpc_layer_at(far_side, (int32_t)u);
    p->near_is_dst = near_is_dst, p->near_base = kvpc_layer_at(near_side, 0);
    return p->units > 1;
}

/* Whether kvpc_lines_kernel can take a transfer, and is faster than the others: units are short and no whole lines. */
static bool kvpc_plan_lines(const kvpc_call *call, const kvprim_move *m, kvpc_lines *p)
{
    const int64_t unit = m->dst.piece_bytes < m->src.piece_bytes ? m->dst.piece_bytes : m->src.piece_bytes;
    const uint64_t most = (uint64_t)1 << 31;
    uint64_t bits = 0;
    if (!call->link || kvpc_is_listed(m) || (!m->dst.index && !m->src.index) || unit >= 2048 ||
        unit % (16 * kvpc_line_words) == 0 || (uint64_t)m->dst.table.rows > most ||
        (uint64_t)m->src.table.rows > most || (!kvpc_set_runs(p, m, true) && !kvpc_set_runs(p, m, false)))
        return false;
    kvpc_set_task(&p->task, m, &bits);
    p->task.rejected = m->rejected;
    p->words = kvpc_divisor_of(unit / 16), p->run_words = p->units * (uint32_t)p->words.by;
    p->shares = kvpc_divisor_of((int64_t)kvpc_parts_of(p->run_words + kvpc_line_words - 1, kvpc_share_words));
    p->total = p->groups * p->shares.by;
    if ((uint64_t)m->count >= most / p->total)
        return false;
    p->total *= (uint64_t)m->count;
    p->pdl = call->launch.pdl != 0;
    for (uint32_t u = 0; u < p->groups * p->units; u++)
        bits |= p->unit[u];
    return (bits | p->near_base | p->near_step) % 16 == 0;
}

/* Returns whether kvpc_lines_kernel takes the move. */
static bool kvpc_run_lines(const kvpc_call *call, const kvprim_move *m, kvprim_status *status)
{
    uint32_t threads;
    kvpc_lines p;
    if (!kvpc_plan_lines(call, m, &p))
        return false;
    const kvpc_call start = kvpc_on_link(call, p.task.unit_bytes, true, &threads);
    const uint64_t limit = (uint64_t)start.launch.max_sms, warps = threads / 32, wanted = (p.total + warps - 1) / warps;
    *status = kvpc_start(&start, kvpc_lines_kernel, (uint32_t)(wanted < limit ? wanted : limit), threads, p);
    return true;
}

static kvprim_status kvpc_run(const char *function, kvprim_status checked, const kvprim_move *moves, size_t n,
                              const kvprim_cuda_launch *launch);

/* >>impl_convert_moves ----------------------------------------------------------------------------------------------

   Moves that convert, where the kernels of plain rows do not take them: layers, indices on both sides or of the host,
   64-bit sizes, tiles of any size, elements of any alignment, few multiprocessors. The types are chosen inside the
   kernel. A span is what a group of threads converts at once: a tile whose scale is computed, otherwise a part of a
   row. Its elements go in octets, or one by one where eight are not aligned or have no scale in common. */
#ifndef KVPRIM_NO_CONVERT

/* What is done with a number: nothing, or with its scale, its scale's inverse, a division. */
enum { kvpc_unscaled, kvpc_multiplied, kvpc_inverted, kvpc_divided };

/* How a launch converts. Element sizes are powers of two: 1 << dst_shift bytes; half of that in kernels for 4 bits. */
typedef struct kvpc_change {
    uint32_t dst_type, src_type, dst_shift, src_shift;
    uint32_t dst_mask, src_mask; /* address bits that are 0 where eight elements are aligned */
    uint32_t wide;               /* 1: eight elements have one scale, and lie together if the layers are aligned */
    uint32_t scaling;            /* kvpc_multiplied ... */
    uint32_t quantises, computes, several; /* several: a span may have more than one scale, which it reads */
    uint32_t is_e8m0, power_of_two;        /* is_e8m0: the scales' type beside 4 bits */
    float least, largest, inverse;         /* as in kvpc_convert_tiles */
    uint64_t scales, scales_step; /* of layer 0, layer to layer. 0: the table's layer, which `offset` is added to */
    int64_t offset;
    kvpc_layout scale;             /* `head` divides by the elements of a tile, and head_step leads to the next scale */
    kvpc_divisor scale_heads;      /* tiles of a head of scales; 0: there are none */
    int64_t scale_head, scale_row; /* what each head adds and, of each four rows, each after the first */
    uint64_t elements, span, tile; /* of a row, a span, a tile whose scale is computed */
    uint64_t step;                 /* elements of a round of kvpc_convert_octets; 0: kvpc_convert_any takes all. Beside
                                      4 bits, which it always takes: where the tensor's scale lies, or 0 */
    uint32_t *nans;
} kvpc_change;

enum {
    kvpc_convert_threads = 1024,
    kvpc_convert_wide_threads = 512, /* with numbers of 64 bits, which take more registers */
    kvpc_convert_rounds = 4          /* of a group of threads, at most. 2 take 1.3 times as long, 8 as long (H200) */
};

typedef kvpc_listed<kvpc_few_params - sizeof(kvpc_change)> kvpc_converted_rows;
typedef struct kvpc_conversion : kvpc_converted_rows {
    kvpc_change how;
} kvpc_conversion;

/* The span of a row that a group of threads converts: kvpc_find_span begins it before dst's index is here. */
template <class number> struct kvpc_stretch {
    uint64_t dst, src;   /* where the rows begin; dst: at first, its layer */
    uint64_t scales;     /* of the row; of dst's tiles: at first, of the layer */
    int64_t to;          /* the index of dst */
    number begin, end;   /* elements */
    bool zero, wide;     /* zero: src has no such row. wide: octets are aligned */
    bool counted, moves; /* counted: in `rejected`. moves: at first, whether the span may be counted */
};

/* Loads n elements: eight that are aligned, or one. */
template <uint32_t n> KVPRIM_DEVICE void kvpc_load_elements(uint32_t *w, uint64_t address, uint32_t shift)
{
    if (n == 1) {
        const char *const from = kvpc_global(address);
        w[0] = shift == 0 ? *(const uint8_t *)from : shift == 1 ? *(const uint16_t *)from : *(const uint32_t *)from;
        return;
    }
    if (shift == 0) {
        const uint2 v = *(const uint2 *)kvpc_global(address);
        w[0] = v.x, w[1] = v.y;
        return;
    }
    const uint4 v = kvpc_load16(address);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    if (shift == 2) {
        const uint4 u = kvpc_load16(address + 16);
        w[4] = u.x, w[5] = u.y, w[6] = u.z, w[7] = u.w;
    }
}

template <uint32_t n> KVPRIM_DEVICE void kvpc_store_elements(uint64_t address, const uint32_t *w, uint32_t shift)
{
    if (n == 1) {
        char *const to = kvpc_global(address);
        if (shift == 0)
            *(uint8_t *)to = (uint8_t)w[0];
        else if (shift == 1)
            *(uint16_t *)to = (uint16_t)w[0];
        else
            *(uint32_t *)to = w[0];
        return;
    }
    if (shift == 0) {
        *(uint2 *)kvpc_global(address) = uint2{w[0], w[1]};
        return;
    }
    kvpc_store16(address, uint4{w[0], w[1], w[2], w[3]});
    if (shift == 2)
        kvpc_store16(address + 16, uint4{w[4], w[5], w[6], w[7]});
}

/* The same beside elements of 4 bits: eight that are aligned, or two. */
template <uint32_t n> KVPRIM_DEVICE void kvpc_load_packed(uint32_t *w, uint64_t address, uint32_t shift)
{
    const char *const from = kvpc_global(address);
    if (n == 2 && shift == 0) {
        w[0] = *(const uint8_t *)from;
    } else if (n == 2 && shift == 2) {
        w[0] = ((const uint16_t *)from)[0] | (uint32_t)((const uint16_t *)from)[1] << 16;
    } else if (shift == 0 || n == 2) {
        for (uint32_t k = 0; k <= (shift == 0 ? 0 : 1); k++)
            w[k] = ((const uint32_t *)from)[k];
    } else {
        kvpc_load_elements<n>(w, address, shift - 1);
    }
}

template <uint32_t n> KVPRIM_DEVICE void kvpc_store_packed(uint64_t address, const uint32_t *w, uint32_t shift)
{
    char *const to = kvpc_global(address);
    if (n == 2 && shift == 0) {
        *(uint8_t *)to = (uint8_t)w[0];
    } else if (n == 2 && shift == 2) {
        ((uint16_t *)to)[0] = (uint16_t)w[0], ((uint16_t *)to)[1] = (uint16_t)(w[0] >> 16);
    } else if (shift == 0 || n == 2) {
        for (uint32_t k = 0; k <= (shift == 0 ? 0 : 1); k++)
            ((uint32_t *)to)[k] = w[k];
    } else {
        kvpc_store_elements<n>(address, w, shift - 1);
    }
}

/* kvpc_decode or kvpc_encode of n elements of a type. */
#define KVPRIM_BY_TYPE(type, function, n, to, from)                                                                    \
    ((type) == KVPRIM_BF16     ? function<KVPRIM_BF16, n>(to, from)                                                    \
     : (type) == KVPRIM_F16    ? function<KVPRIM_F16, n>(to, from)                                                     \
     : (type) == KVPRIM_F32    ? function<KVPRIM_F32, n>(to, from)                                                     \
     : (type) == KVPRIM_F8E4M3 ? function<KVPRIM_F8E4M3, n>(to, from)                                                  \
     : (type) == KVPRIM_F8E5M2 ? function<KVPRIM_F8E5M2, n>(to, from)                                                  \
                               : function<KVPRIM_INT8, n>(to, from))
#define KVPRIM_BY_PACKED_TYPE(type, function, n, to, from)                                                             \
    ((type) == KVPRIM_BF16     ? function<KVPRIM_BF16, n>(to, from)                                                    \
     : (type) == KVPRIM_F16    ? function<KVPRIM_F16, n>(to, from)                                                     \
     : (type) == KVPRIM_F32    ? function<KVPRIM_F32, n>(to, from)                                                     \
     : (type) == KVPRIM_F4E2M1 ? function<KVPRIM_F4E2M1, n>(to, from)                                                  \
                               : function<KVPRIM_INT4, n>(to, from))

/* What a scale does to numbers. */
KVPRIM_DEVICE kvpc_factor kvpc_factor_of(const kvpc_change &how, float scale)
{
    if (how.scaling != kvpc_divided)
        return kvpc_times(how.scaling == kvpc_inverted ? kvpc_reciprocal(scale) : scale);
    kvpc_factor f = kvpc_over(scale);
    f.exactly = how.src_type == KVPRIM_F32 || kvpc_is_unusual(scale);
    return f;
}

/* Where element e of a row lies. */
template <bool four = false, class number>
KVPRIM_DEVICE uint64_t kvpc_element_at(const kvpc_layout &side, uint64_t row, number e, uint32_t shift)
{
    const uint64_t at = row + (((uint64_t)e << shift) >> (four ? 1 : 0));
    return side.head_step ? at + kvpc_divide(e, side.head) * (uint64_t)side.head_step : at;
}

/* The scale of element e of a row whose scales begin at s.scales. */
template <bool four = false, class number>
KVPRIM_DEVICE uint64_t kvpc_scale_at(const kvpc_change &how, const kvpc_stretch<number> &s, number e)
{
    const number tile = kvpc_divide(e, how.scale.head);
    const uint64_t in_head = four ? kvpc_divide(tile, how.scale_heads) * (uint64_t)how.scale_head : 0;
    return s.scales + tile * (uint64_t)how.scale.head_step + in_head;
}

/* The factor of elements whose scale at `address` is read. */
template <bool four> KVPRIM_DEVICE kvpc_factor kvpc_read_factor(const kvpc_change &how, uint64_t address)
{
    if (!four)
        return kvpc_factor_of(how, kvpc_load_scale(address, how.is_e8m0));
    const kvprim_dtype type = (kvprim_dtype)how.is_e8m0;
    const float scale = kvpc_any_scale_of(kvpc_load_any_scale(address, kvpc_bytes_of_scale(type)), type);
    return kvpc_factor_of(how, kvpc_mul(scale, kvpc_load_tensor(how.step)));
}

/* Scales, encodes and stores the numbers of elements e to e + n - 1. Returns how many NaNs were lost. */
template <uint32_t n, bool four = false, class number>
KVPRIM_DEVICE uint32_t kvpc_store_scaled(const kvpc_conversion &p, const kvpc_stretch<number> &s, number e, float *x,
                                         const kvpc_factor &factor)
{
    const kvpc_change &how = p.how;
    uint32_t w[n] = {};
    kvpc_apply<n>(x, factor);
    const uint32_t nans = (four ? how.quantises != 0 : how.dst_type == KVPRIM_INT8) ? kvpc_clear_nans<n>(x) : 0;
    if (four) {
        KVPRIM_BY_PACKED_TYPE(how.dst_type, kvpc_encode, n, w, x);
        kvpc_store_packed<n>(kvpc_element_at<true>(p.task.dst, s.dst, e, how.dst_shift), w, how.dst_shift);
        return nans;
    }
    KVPRIM_BY_TYPE(how.dst_type, kvpc_encode, n, w, x);
    kvpc_store_elements<n>(kvpc_element_at(p.task.dst, s.dst, e, how.dst_shift), w, how.dst_shift);
    return nans;
}

/* Computes and stores the scale of the tile that begins at element e, from the largest magnitudes that the `lanes`
   threads of a group have found. They call it together. */
template <bool four = false, class number>
KVPRIM_DEVICE kvpc_factor kvpc_compute_scale(const kvpc_change &how, const kvpc_stretch<number> &s, number e,
                                             float largest, uint32_t lane, uint32_t lanes)
{
    const uint32_t group = (UINT32_MAX >> (32 - lanes)) << (threadIdx.x % 32 & ~(lanes - 1));
    for (uint32_t distance = lanes / 2; distance; distance /= 2)
        largest = kvpc_max_magnitude(largest, kvpi_float_of(kvpc_shuffle_xor(kvpi_bits_of(largest), distance, group)));
    if (four) {
        const kvpc_any_scale any =
            kvpc_compute_any_scale(largest, how.largest, how.inverse, how.least, how.power_of_two != 0,
                                   (kvprim_dtype)how.is_e8m0, kvpc_load_tensor(how.step));
        if (lane == 0)
            kvpc_store_any_scale(kvpc_scale_at<true>(how, s, e), any.code, (kvprim_dtype)how.is_e8m0);
        return kvpc_factor_of(how, any.divisor);
    }
    const float scale = kvpc_tile_scale(largest, how.largest, how.inverse, how.least, how.power_of_two != 0);
    if (lane == 0)
        kvpc_store_scale(true, kvpc_scale_at(how, s, e), scale, how.is_e8m0 != 0);
    return kvpc_factor_of(how, scale);
}

/* A thread's 32 bytes: 1, 2 or 4 octets, by element size. Octet g begins at element e + g * step; absent ones are 0. */
template <class number>
KVPRIM_DEVICE void kvpc_load_octets(const kvpc_conversion &p, const kvpc_stretch<number> &s, number e, number step,
                                    bool busy, uint32_t *w)
{
    const uint32_t shift = p.how.src_shift;
    const kvpc_layout &side = p.task.src;
    for (uint32_t k = 0; k < 8; k++)
        w[k] = 0;
    if (!busy || s.zero)
        return;
    if (shift == 0)
        for (uint32_t g = 0; g < 4; g++)
            if (e + g * step < s.end)
                kvpc_load_elements<8>(w + 2 * g, kvpc_element_at(side, s.src, (number)(e + g * step), 0), 0);
    if (shift == 1)
        for (uint32_t g = 0; g < 2; g++)
            if (e + g * step < s.end)
                kvpc_load_elements<8>(w + 4 * g, kvpc_element_at(side, s.src, (number)(e + g * step), 1), 1);
    if (shift == 2 && e < s.end)
        kvpc_load_elements<8>(w, kvpc_element_at(side, s.src, e, 2), 2);
}

/* >>impl_convert_spans --------------------------------------------------------------------------------------------- */

/* Span `work` of all, with the index rule. All loads come first, and no wait between them. */
template <bool four, class number>
KVPRIM_DEVICE kvpc_stretch<number> kvpc_find_span(const kvpc_conversion &p, number work)
{
    const kvpc_task &t = p.task;
    const kvpc_change &how = p.how;
    kvpc_stretch<number> s;
    const kvpc_spot<number> at = kvpc_find_spot(p, t, work);
    const uint64_t src_row = kvpc_row_of(t.src_rows, at.from);
    const uint64_t in_table = (how.quantises ? at.dst : at.src) + (uint64_t)how.offset;
    const bool src_inside = kvpc_is_inside(t.src_rows, at.from);
    s.dst = at.dst, s.to = at.to;
    s.src = at.src + kvpc_place(t.src, (number)src_row);
    s.scales = how.scales ? how.scales + at.layer * how.scales_step : in_table;
    if (how.scale.stride && !how.quantises) /* of tiles */
        s.scales += kvpc_place(how.scale, (number)src_row) + (four ? src_row % 4 * (uint64_t)how.scale_row : 0);
    const number end = (at.in_row + 1) * (number)how.span;
    s.begin = at.in_row * (number)how.span;
    s.end = end < (number)how.elements ? end : (number)how.elements;
    s.zero = !src_inside;
    s.wide = how.wide && (((uint32_t)at.dst & how.dst_mask) | ((uint32_t)at.src & how.src_mask)) == 0;
    s.counted = kvpc_is_past(t.src_rows, at.from);
    s.moves = at.layer == 0 && at.in_row == 0;
    return s;
}

template <bool four, class number>
KVPRIM_DEVICE void kvpc_finish_span(const kvpc_conversion &p, kvpc_stretch<number> *s)
{
    const kvpc_task &t = p.task;
    const uint64_t row = kvpc_row_of(t.dst_rows, s->to);
    const bool inside = kvpc_is_inside(t.dst_rows, s->to);
    s->counted = s->moves && (s->counted || kvpc_is_past(t.dst_rows, s->to));
    s->moves = inside && (!s->zero || t.zero);
    s->dst += kvpc_place(t.dst, (number)row);
    if (p.how.computes)
        s->scales += kvpc_place(p.how.scale, (number)row) + (four ? row % 4 * (uint64_t)p.how.scale_row : 0);
}

/* Spans of aligned octets. src is read before it is known whether dst has the row. If scales are computed, a round
   takes a tile, of no more elements than a group takes at once. While 32 bytes are converted, the next come. */
template <class number>
KVPRIM_DEVICE void kvpc_convert_octets(const kvpc_conversion &p, kvpc_stretch<number> &s, uint32_t lane, uint32_t lanes)
{
    const kvpc_change &how = p.how;
    const number step = (number)how.step;
    const bool busy = 8 * lane < step;
    const uint32_t words = 2u << how.src_shift;
    uint32_t w[8], next[8], nans = 0;
    float scale = 1.0f;
    number base = s.begin;
    kvpc_load_octets(p, s, (number)(base + 8 * lane), step, busy, w);
    const bool reads = how.scaling != kvpc_unscaled && !how.computes && !s.zero && base + 8 * lane < s.end;
    if (reads)
        scale = kvpc_load_scale(how.several ? kvpc_scale_at(how, s, (number)(base + 8 * lane)) : s.scales, how.is_e8m0);
    kvpc_finish_span<false>(p, &s);
    if (!s.moves)
        return;
    kvpc_factor factor = kvpc_times(1.0f);
    if (reads)
        factor = kvpc_factor_of(how, scale);
    KVPRIM_ROLLED
    while (base < s.end) {
        const number after = base + (step << 2 >> how.src_shift);
        kvpc_load_octets(p, s, (number)(after + 8 * lane), step, busy, next);
        KVPRIM_ROLLED
        for (; base < s.end && base < after; base += step) {
            const number e = base + 8 * lane;
            const bool active = busy && e < s.end;
            float x[8];
            if (reads && how.several && e + step < s.end)
                scale = kvpc_load_scale(kvpc_scale_at(how, s, (number)(e + step)), how.is_e8m0);
            KVPRIM_BY_TYPE(how.src_type, kvpc_decode, 8, x, w);
            if (how.computes) {
                float largest = 0;
                for (uint32_t i = 0; i < 8; i++)
                    largest = kvpc_max_magnitude(largest, x[i]);
                factor = kvpc_compute_scale(how, s, base, largest, lane, lanes);
            }
            if (active)
                nans += kvpc_store_scaled<8>(p, s, e, x, factor);
            if (reads && how.several)
                factor = kvpc_factor_of(how, scale);
            for (uint32_t k = 0; k < 6; k++)
                w[k] = words == 2 ? w[k + 2] : k < 4 ? w[k + 4] : 0;
        }
        for (uint32_t k = 0; k < 8; k++)
            w[k] = next[k];
    }
    if (nans && how.nans)
        atomicAdd(how.nans, nans);
}

/* Spans of any alignment, n elements of a thread at a time. Tiles whose scales are computed may have any size, and take
   two passes: one finds the largest magnitude, the other converts. */
template <uint32_t n, bool four = false, class number>
KVPRIM_DEVICE void kvpc_convert_any(const kvpc_conversion &p, kvpc_stretch<number> &s, uint32_t lane, uint32_t lanes)
{
    const kvpc_change &how = p.how;
    const number tile = how.computes ? (number)how.tile : s.end - s.begin, step = n * lanes;
    uint32_t nans = 0;
    kvpc_finish_span<four>(p, &s);
    if (!s.moves)
        return;
    KVPRIM_ROLLED
    for (number begin = s.begin; begin < s.end; begin += tile) {
        const number end = begin + tile;
        kvpc_factor factor = kvpc_times(1.0f);
        if (how.scaling != kvpc_unscaled && !how.computes && !how.several && !s.zero)
            factor = kvpc_read_factor<four>(how, s.scales);
        for (uint32_t pass = how.computes ? 0 : 1; pass < 2; pass++) {
            float largest = 0;
            KVPRIM_ROLLED
            for (number e = begin + n * lane; e < end; e += step) {
                float x[n == 1 ? 4 : 8] = {};
                uint32_t w[n] = {};
                if (!s.zero && four)
                    kvpc_load_packed<n>(w, kvpc_element_at<true>(p.task.src, s.src, e, how.src_shift), how.src_shift);
                else if (!s.zero)
                    kvpc_load_elements<n>(w, kvpc_element_at(p.task.src, s.src, e, how.src_shift), how.src_shift);
                if (how.several && !s.zero)
                    factor = kvpc_read_factor<four>(how, kvpc_scale_at<four>(how, s, e));
                if (four)
                    KVPRIM_BY_PACKED_TYPE(how.src_type, kvpc_decode, n, x, w);
                else
                    KVPRIM_BY_TYPE(how.src_type, kvpc_decode, n, x, w);
                if (pass > 0)
                    nans += kvpc_store_scaled<n, four>(p, s, e, x, factor);
                else
                    for (uint32_t i = 0; i < n; i++)
                        largest = kvpc_max_magnitude(largest, x[i]);
            }
            if (pass > 0)
                break;
            const kvpc_factor computed = kvpc_compute_scale<four>(how, s, begin, largest, lane, lanes);
            factor = s.zero ? factor : computed; /* padding stays 0, whatever the tensor's scale is */
        }
    }
    if (nans && how.nans)
        atomicAdd(how.nans, nans);
}

template <class number, uint32_t threads, bool four>
static __global__ void __launch_bounds__(threads, 1)
    kvpc_convert_kernel(const KVPRIM_GRID_CONSTANT kvpc_conversion KVPRIM_IN_PLACE p)
{
    const uint32_t lanes = 1u << p.lanes_shift, lane = threadIdx.x & (lanes - 1);
    const number in_block = blockDim.x >> p.lanes_shift;
    kvpc_pdl_wait(p.pdl);
    for (number work = blockIdx.x * in_block + (threadIdx.x >> p.lanes_shift); work < (number)p.total;
         work += gridDim.x * in_block) {
        kvpc_stretch<number> s = kvpc_find_span<four>(p, work);
        if (!four && sizeof(number) == 4 && s.wide && p.how.step) /* wide numbers are rare */
            kvpc_convert_octets(p, s, lane, lanes);
        else if (s.wide)
            kvpc_convert_any<8, four>(p, s, lane, lanes);
        else
            kvpc_convert_any<four ? 2 : 1, four>(p, s, lane, lanes);
        if (s.counted && lane == 0 && p.task.rejected)
            atomicAdd(p.task.rejected, 1u);
    }
}

/* >>impl_convert_move_plan ----------------------------------------------------------------------------------------- */

/* Where the scales of a side lie. */
static void kvpc_set_scales(kvpc_change *c, const kvprim_table *t, const kvprim_format *f, int32_t first_layer)
{
    const bool rows = f->scale == KVPRIM_SCALE_TILE;
    const int64_t stride = rows ? f->scale_stride : 0;
    c->is_e8m0 = kvpi_is_four_bit(f->dtype) ? (uint32_t)f->scale_dtype : f->scale_dtype == KVPRIM_F8E8M0;
    c->scales_step = (uint64_t)f->scale_layer_stride;
    c->scales = f->scales ? (uintptr_t)f->scales + (uint64_t)first_layer * c->scales_step : 0;
    c->offset = f->scales ? 0 : f->scale_offset;
    c->scale.stride = stride;
    if (rows && t->page_rows > 0) {
        c->scale.page = kvpc_divisor_of(t->page_rows);
        c->scale.page_step = (int64_t)((uint64_t)f->scale_page_stride - (uint64_t)t->page_rows * (uint64_t)stride);
    }
    if (f->scale != KVPRIM_SCALE_TENSOR)
        c->scale.head = kvpc_divisor_of(f->tile), c->scale.head_step = f->scale_tile_stride;
    if (f->scale_heads) {
        c->scale_heads = kvpc_divisor_of(stride), c->scale_row = f->scale_order ? 1 - stride : 0;
        c->scale.head_step = f->scale_order ? 4 : 1;
        c->scale_head = f->scale_tile_stride - c->scale.head_step * stride;
    }
}

/* The layout of a side in elements. *wide becomes false unless eight of them are aligned wherever a layer is. */
static kvpc_layout kvpc_elements_of(const kvprim_side *side, uint32_t mask, bool *wide)
{
    uint64_t bits = 0;
    kvpc_layout s = kvpc_layout_of(side, 1, &bits);
    const uint64_t steps = (uint64_t)s.stride | (uint64_t)s.page_step | (uint64_t)s.head_step;
    const int64_t piece = kvpi_elements_in(side->format.dtype, side->piece_bytes);
    s.head = kvpc_divisor_of(side->table.heads > 1 ? piece : 0);
    *wide = *wide && (steps & mask) == 0 && piece % 8 == 0;
    return s;
}

/* log2 of an element's bytes, or, beside elements of 4 bits, of twice that; and kvpc_change's mask. */
static uint32_t kvpc_element_shift(kvprim_dtype type, bool packed)
{
    return kvpi_is_four_bit(type) ? 0 : (uint32_t)kvpi_dtype_bytes(type) / 2 + (packed ? 1 : 0);
}

static uint32_t kvpc_octet_mask(kvprim_dtype type)
{
    return (uint32_t)(kvpi_bytes_of(type, 8) < 16 ? kvpi_bytes_of(type, 8) : 16) - 1;
}

/* Whether one side has elements of 4 bits. */
static bool kvpc_is_packed(const kvprim_move *m)
{
    return kvpi_is_four_bit(m->dst.format.dtype) || kvpi_is_four_bit(m->src.format.dtype);
}

/* How a move converts. The layers start with number `first_layer` of the move. */
static kvpc_change kvpc_change_of(const kvprim_move *m, int32_t first_layer, kvpc_layout *dst, kvpc_layout *src)
{
    const kvprim_format &to = m->dst.format, &from = m->src.format;
    kvpc_change c = {};
    c.quantises = kvpi_is_quantised(to.dtype) != 0;
    const kvprim_format *const f = c.quantises ? &to : &from;
    const bool packed = kvpc_is_packed(m);
    c.dst_type = (uint32_t)to.dtype, c.dst_shift = kvpc_element_shift(to.dtype, packed);
    c.src_type = (uint32_t)from.dtype, c.src_shift = kvpc_element_shift(from.dtype, packed);
    c.dst_mask = kvpc_octet_mask(to.dtype), c.src_mask = kvpc_octet_mask(from.dtype);
    c.elements = (uint64_t)kvpi_elements_in(from.dtype, m->row_bytes);
    bool wide = true;
    *dst = kvpc_elements_of(&m->dst, c.dst_mask, &wide);
    *src = kvpc_elements_of(&m->src, c.src_mask, &wide);
    if (f->scale) {
        kvpc_set_scales(&c, c.quantises ? &m->dst.table : &m->src.table, f, first_layer);
        wide = wide && (f->scale == KVPRIM_SCALE_TENSOR || f->tile % 8 == 0);
        c.computes = c.quantises && f->scale == KVPRIM_SCALE_TILE;
        c.tile = c.computes ? (uint64_t)f->tile : 0;
        c.power_of_two = f->scale_power_of_two || f->scale_dtype == KVPRIM_F8E8M0;
        c.least = f->scale_min, c.largest = kvpi_largest(f->dtype), c.inverse = 1.0f / c.largest;
        c.several = f->scale != KVPRIM_SCALE_TENSOR && !c.computes;
        /* The inverse of a power of two is exact. */
        c.scaling = !c.quantises                                                      ? kvpc_multiplied
                    : c.computes && (f->scale_inverse || (c.power_of_two && !packed)) ? kvpc_inverted
                    : f->scale_inverse                                                ? kvpc_multiplied
                                                                                      : kvpc_divided;
    }
    if (c.quantises)
        c.nans = to.nans;
    c.wide = wide;
    return c;
}

/* Into how many spans of at most `most` rounds a row of `rounds` is cut. */
static uint64_t kvpc_spans_of(uint64_t rounds, uint64_t most)
{
    return (rounds + most - 1) / most;
}

/* Cuts rows into spans, of tiles if their scales are computed. A group of threads takes up to kvpc_convert_rounds
   rounds in turn if there is enough work for all multiprocessors, and is chosen so that few of its threads idle. */
static void kvpc_cut_conversion(const kvpc_call *call, bool packed, kvpc_conversion *p)
{
    kvpc_change *const c = &p->how;
    const uint64_t each = c->wide ? 8 : packed ? 2 : 1, all = (c->computes ? c->tile : c->elements) / each;
    const uint64_t rows = p->task.count.by * p->task.layers;
    const bool many = call->launch.max_sms > 0 || rows * (c->elements / each) > kvpc_some_threads;
    const uint64_t most = many ? kvpc_convert_rounds : 1;
    p->lanes_shift = 0;
    while (p->lanes_shift < 5 && (uint64_t)1 << p->lanes_shift < all)
        p->lanes_shift++;
    if (c->computes) {
        const uint64_t tiles = c->elements / c->tile, spans = kvpc_spans_of(tiles, most);
        c->step = c->wide && all <= (uint64_t)1 << p->lanes_shift ? c->tile : 0;
        c->span = (tiles + spans - 1) / spans * c->tile;
    } else {
        uint64_t least = UINT64_MAX, spans = 1;                           /* threads that idle in a round */
        while (p->lanes_shift > 3 && all <= most << (p->lanes_shift - 1)) /* finding a row takes most of the time */
            p->lanes_shift--;
        for (uint32_t shift = p->lanes_shift + 1; shift-- > 2 && least > all / 8;) {
            const uint64_t lanes = (uint64_t)1 << shift, cut = kvpc_spans_of((all + lanes - 1) / lanes, most);
            const uint64_t idle = ((all + cut - 1) / cut + lanes - 1) / lanes * lanes * cut - all;
            if (idle < least)
                least = idle, spans = cut, p->lanes_shift = shift;
        }
        c->step = c->wide ? each << p->lanes_shift : 0;
        c->span = (all + spans - 1) / spans * each;
    }
    p->task.chunks = kvpc_divisor_of((int64_t)((c->elements + c->span - 1) / c->span));
    p->total = p->task.chunks.by * rows;
}

/* Whether all numbers of a launch of so many rows fit 31 bits. Each span has an element or more. */
static bool kvpc_converts_narrow(const kvprim_move *m, int64_t rows)
{
    const uint64_t most = (uint64_t)1 << 31, elements = (uint64_t)m->row_bytes;
    return kvpc_row_words(m) == 1 && elements < most / 8 && (uint64_t)rows < most &&
           (elements / 4 + 1) * (uint64_t)rows < most / (uint64_t)m->layers;
}

static kvprim_status kvpc_start_conversion(const kvpc_call *call, const kvprim_move *m, const kvpc_slice *slice,
                                           bool narrow)
{
    enum { many = kvpc_convert_threads, few = kvpc_convert_wide_threads };
    kvpc_conversion p;
    (void)kvpc_fill_listed(call, m, slice, &p);
    p.how = kvpc_change_of(m, slice->layer, &p.task.dst, &p.task.src);
    kvpc_cut_conversion(call, kvpc_is_packed(m), &p);
    if (kvpc_is_packed(m)) {
#ifdef KVPRIM_NO_FOUR_BIT
        return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "%s: compiled with KVPRIM_NO_FOUR_BIT, and elements have 4 bits",
                           call->function);
#else
        p.how.step = (uintptr_t)(p.how.quantises ? m->dst : m->src).format.tensor_scale;
        /* one kernel for all sizes: it takes 50 KB */
        return kvpc_start_groups(call, kvpc_convert_kernel<uint64_t, few, true>, few, &p);
#endif
    }
    return narrow ? kvpc_start_groups(call, kvpc_convert_kernel<uint32_t, many, false>, many, &p)
                  : kvpc_start_groups(call, kvpc_convert_kernel<uint64_t, few, false>, few, &p);
}

/* Its parameters have one size: a host's index names few rows to convert, or rows of many layers, which take long. */
static kvprim_status kvpc_run_conversion(const kvpc_call *call, const kvprim_move *m)
{
    const int64_t room = kvpc_converted_rows::room - kvpc_first_word;
    return kvpc_run_slices(m, room, room, kvpc_converts_narrow, [=](const kvpc_slice *s, bool narrow, int64_t) {
        return kvpc_start_conversion(call, m, s, narrow);
    });
}

/* Each move by itself: those that convert by the kernels of plain rows, if these can, or as above; others as ever. */
static kvprim_status kvpc_run_convert(const kvpc_call *call, const kvprim_move *moves, size_t n,
                                      const kvprim_cuda_launch *launch)
{
    kvprim_status status = KVPRIM_OK;
    if (kvpc_run_plain_convert(call, moves, n, &status))
        return status;
    for (size_t k = 0; k < n; k++)
        if (n > 1 && kvpc_run_plain_convert(call, &moves[k], 1, &status))
            KVPRIM_TRY(status);
        else if (moves[k].count > 0)
            KVPRIM_TRY(moves[k].dst.format.dtype ? kvpc_run_conversion(call, &moves[k])
                                                 : kvpc_run(call->function, KVPRIM_OK, &moves[k], 1, launch));
    return KVPRIM_OK;
}
#else
static kvprim_status kvpc_run_convert(const kvpc_call *call, const kvprim_move *, size_t, const kvprim_cuda_launch *)
{
    return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "%s: compiled with KVPRIM_NO_CONVERT, and a format needs a conversion",
                       call->function);
}
#endif

/* >>impl_run --------------------------------------------------------------------------------------------------------

   Which kernels take a call. The first line that fits decides, in kvpc_run and what it calls. A transfer over PCIe has
   a max_sms, the caller's or that of kvpc_crosses_link.

       an element type changes                             kvpc_run_convert
           plain rows, K and V as one, no max_sms              kvpc_run_plain_convert: >>impl_convert_plan
           else, move by move                                  the same, or kvpc_convert_kernel: >>impl_convert_spans
       plain rows (kvpc_is_plain), K and V as one,         kvpc_run_plain: >>impl_row_plan
       no max_sms
           rows begin at multiples of 16 bytes                 kvpc_gather_kernel, kvpc_store_kernel
           else                                                kvpc_bytes_kernel
       several moves, no max_sms: some begin and end at    kvpc_run for each: kvpc_splits_launch
       multiples of 16 bytes, and one of these is large
       one move over PCIe, short units in runs             kvpc_lines_kernel: >>impl_move_lines
       else, up to 4 moves in a launch                     kvpc_run_batches: >>impl_move_batches
           device layers or host_index                         kvpc_run_listed: >>impl_move_lists
           over PCIe, without index or gap                     CUDA's copy: kvpc_copy_layers
           2^31 rows, pieces or bytes of a row                 kvpc_run_listed
           all begin and end at multiples of 16 bytes          kvpc_move_kernel<true>, kvpc_move_few_kernel<true>
           else                                                kvpc_move_any_kernel<uint32_t>
       kvpc_run_listed: 2^31 rows, pieces or bytes         kvpc_move_any_kernel<uint64_t>
           else                                                kvpc_move_kernel<false>, kvpc_move_few_kernel<false>
       unpack, copy                                        kvpc_unpack_fragments: >>impl_unpack_run
       unpack_meta, slots                                  kvpc_meta_kernel, kvpc_slots_kernel

   kvpc_move_few_kernel is for launches with max_sms. */

/* Whether each move takes a launch of its own: only some of them begin and end at multiples of 16 bytes, and in one
   launch all would take the slower kernels of any alignment. A store of 65,536 rows of 576 and of 8 bytes (DeepSeek-V4)
   takes 28 us in two launches and 66 in one; a store of 64 such rows 2.5 and 2.0 (H200). */
static bool kvpc_splits_launch(const kvpc_call *call, const kvprim_move *moves, size_t n)
{
    const int64_t least_bytes = 4 << 20;
    bool others = false;
    int64_t most = 0; /* bytes of the largest plain move of whole words */
    for (size_t k = 0; k < n; k++) {
        uint64_t bits = 0;
        if (moves[k].count == 0)
            continue;
        const bool plain = kvpc_is_plain(&moves[k], &bits), words = (bits | (uint64_t)moves[k].row_bytes) % 16 == 0;
        const int64_t bytes = plain && words ? moves[k].count * moves[k].row_bytes : 0;
        most = bytes > most ? bytes : most, others |= !words;
    }
    return others && most >= least_bytes && call->launch.max_sms == 0;
}

/* Runs moves if `checked`, the status of their checks, is KVPRIM_OK. */
static kvprim_status kvpc_run(const char *function, kvprim_status checked, const kvprim_move *moves, size_t n,
                              const kvprim_cuda_launch *launch)
{
    uint64_t bits = 0;
    KVPRIM_TRY(kvpc_checked(checked));
    while (n > 0 && moves[n - 1].count == 0) /* K only, say */
        n--;
    if (n == 0)
        return KVPRIM_OK;
    kvpc_call call;
    KVPRIM_TRY(kvpc_begin_call(&call, function, launch));
    KVPRIM_TRY(kvpc_check_memory(function, moves, n));
    call.link = true;
    for (size_t k = 0; k < n && call.link; k++)
        call.link = kvpc_crosses_link(&moves[k], &call.to_host);
    call.chosen = call.link && call.launch.max_sms == 0;
    if (call.chosen)
        call.launch.max_sms = kvpc_link_sms;
    for (size_t k = 0; k < n; k++)
        if (moves[k].count > 0 && moves[k].dst.format.dtype)
            return kvpc_run_convert(&call, moves, n, launch);
    if (call.launch.max_sms == 0 && n <= 2 && kvpc_is_plain(&moves[0], &bits) &&
        (n == 1 || (kvpc_is_plain(&moves[1], &bits) && kvpc_is_k_and_v(&moves[0], &moves[1]))))
        return kvpc_run_plain(&call, moves, (int)n, bits);
    if (n > 1 && kvpc_splits_launch(&call, moves, n)) {
        for (size_t k = 0; k < n; k++)
            KVPRIM_TRY(kvpc_run(function, KVPRIM_OK, &moves[k], 1, launch));
        return KVPRIM_OK;
    }
    if (call.link && n == 1 && kvpc_run_lines(&call, &moves[0], &checked))
        return checked;
    if (n == 1 || (n == 2 && kvpc_is_alike(&moves[0], &moves[1])))
        return kvpc_run_batches<1>(&call, moves, n);
    return kvpc_run_batches<kvpc_most_tasks>(&call, moves, n);
}

/* >>impl_unpack_survey ---------------------------------------------------------------------------------------------

   What fragments have in common, before they are encoded. */
#ifndef KVPRIM_NO_UNPACK

enum {
    kvpc_host_chunk = 128,      /* fragments that are handed out at a time: they stay in the processor's first cache */
    kvpc_first_chunk = 32,      /* that show whether there is any rule in them */
    kvpc_sample_count = 256,    /* see kvpc_is_mergeable */
    kvpc_table_share = 16,      /* fragments for each entry of the table */
    kvpc_many_fragments = 2048, /* see kvpc_is_alike_enough */
    kvpc_direct_bytes = 16 * 32 * kvpc_bytes_loads - 15, /* a warp copies so many as one strip, however aligned */
    kvpc_most_bytes = 1 << 27 /* that move as one fragment: the strips of any launch can be counted in 31 bits */
};

/* A fragment of unpack, or an item of copy, whose offsets are addresses. Both are read through it, so it may alias. */
#if defined(__GNUC__)
#define KVPRIM_MAY_ALIAS __attribute__((may_alias))
#else
#define KVPRIM_MAY_ALIAS
#endif
typedef struct KVPRIM_MAY_ALIAS kvpc_fragment {
    uint64_t src, dst, bytes;
} kvpc_fragment;
#undef KVPRIM_MAY_ALIAS
static_assert(sizeof(kvpc_fragment) == sizeof(kvprim_fragment) && sizeof(kvpc_fragment) == sizeof(kvprim_copy_item) &&
                  offsetof(kvprim_fragment, dst_offset) == 8 && offsetof(kvprim_copy_item, dst) == 8 &&
                  offsetof(kvprim_fragment, bytes) == 16 && offsetof(kvprim_copy_item, bytes) == 16,
              "one layout, of 64-bit addresses");

/* What all fragments count from, and how far they may reach. */
typedef struct kvpc_list {
    const kvpc_fragment *fragments;
    uint64_t count, src, src_bytes, dst, dst_bytes;
    bool addresses; /* a copy: src and dst are 0, and so is the fragment's src of zeros */
} kvpc_list;

/* One of the three numbers that make a fragment. If differ is 0, fragment i has first + i * step. */
typedef struct kvpc_column {
    uint64_t first, step, any, differ, base; /* bits that are set in any; that differ. base: the buffer's address */
    uint64_t common;                         /* bits above those that differ; they are not stored */
    uint32_t shift;                          /* the number is stored shifted right by so many bits */
} kvpc_column;

typedef struct kvpc_unpack_job {
    const kvpc_call *call;
    kvpc_list list;
    const kvpc_fragment *next;   /* to hand out */
    kvpc_fragment rest;          /* what was cut off, to hand out before *next */
    uint64_t left, last_bytes;   /* fragments that are not launched yet, and bytes of the last of them */
    kvpc_column src, dst, bytes; /* step of bytes is 0 */
    kvpc_unpack head;            /* what all launches have in common */
    uint32_t lead;               /* bytes, at most, between a 16-byte boundary of dst and a fragment's first byte */
    bool fit;                    /* the fragments lie in their buffers; false says nothing */
    bool apart;                  /* all destinations lie apart from all sources; false says nothing */
    bool zeros;                  /* some items have no source */
    bool even;                   /* all fragments have the same size, except that the last may be shorter */
    bool longer;                 /* a fragment has more than kvpc_direct_bytes */
    bool merge, is_small, aligned, started, overlap;
    kvpc_fragment merged[kvpc_host_chunk];
} kvpc_unpack_job;

/* Whether one fragment begins where another one ends, on both sides. Zeros follow zeros. */
static bool kvpc_joins(const kvpc_unpack_job *job, const kvpc_fragment &a, const kvpc_fragment &b)
{
    const bool sources = job->zeros && (!a.src || !b.src) ? a.src == b.src : b.src - a.src == a.bytes;
    return sources && b.dst - a.dst == a.bytes;
}

/* Joins adjacent fragments, leaves out empty ones and cuts long ones. Returns how many that makes, at most `most`. */
static uint64_t kvpc_merge(kvpc_unpack_job *job, uint64_t most)
{
    const kvpc_fragment *const end = job->list.fragments + job->list.count, *next = job->next;
    kvpc_fragment run = job->rest;
    uint64_t n = 0;
    for (; n < most; n++) {
        for (; next != end && run.bytes < kvpc_most_bytes; next++)
            if (run.bytes == 0)
                run = *next;
            else if (next->bytes == 0 || kvpc_joins(job, run, *next))
                run.bytes += next->bytes;
            else
                break;
        if (run.bytes == 0)
            break;
        const uint64_t bytes = run.bytes < kvpc_most_bytes ? run.bytes : (uint64_t)kvpc_most_bytes;
        job->merged[n] = kvpc_fragment{run.src, run.dst, bytes};
        run.src += job->zeros && !run.src ? 0 : bytes, run.dst += bytes, run.bytes -= bytes;
    }
    job->next = next, job->rest = run;
    return n;
}

/* Hands out the next fragments, at most *count of them, and sets *count to their number: 0 at the end. */
static const kvpc_fragment *kvpc_take(kvpc_unpack_job *job, uint64_t *count)
{
    const uint64_t left = (uint64_t)(job->list.fragments + job->list.count - job->next);
    if (job->merge) {
        *count = kvpc_merge(job, *count < kvpc_host_chunk ? *count : (uint64_t)kvpc_host_chunk);
        return job->merged;
    }
    *count = *count < left ? *count : left;
    job->next += *count;
    return job->next - *count;
}

/* What some fragments have in common. Bit 63 of `past` is set if one is past the end of its buffers, of `longer` if one
   has more than kvpc_direct_bytes. Of addresses also: of `past` if dst is NULL, of `zeros` if src is. */
typedef struct kvpc_seen {
    kvpc_fragment any, all; /* bits that are set in any, in all */
    uint64_t past, longer, zeros;
} kvpc_seen;

/* No branch and no comparison depends on the data: a comparison takes as long as three of the other operations. */
template <bool addresses>
static kvpc_seen kvpc_see(kvpc_seen s, const kvpc_list *l, const kvpc_fragment *f, uint64_t count)
{
    const uint64_t src_bytes = l->src_bytes, dst_bytes = l->dst_bytes;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t src = f[i].src, dst = f[i].dst, bytes = f[i].bytes;
        s.any.src |= src, s.any.dst |= dst, s.any.bytes |= bytes;
        s.all.src &= src, s.all.dst &= dst, s.all.bytes &= bytes;
        s.past |= (src_bytes - (src + bytes)) | (dst_bytes - (dst + bytes));
        s.longer |= kvpc_direct_bytes - bytes;
        if (addresses)
            s.past |= dst - 1, s.zeros |= src - 1;
    }
    return s;
}

/* Returns 0 if offset i of the fragments, in src or in dst, is first + i * step. */
template <bool in_src>
static uint64_t kvpc_off_line(const kvpc_fragment *f, uint64_t count, uint64_t first, uint64_t step)
{
    uint64_t off = 0;
    for (uint64_t i = 0; i < count; i++, first += step)
        off |= (in_src ? f[i].src : f[i].dst) ^ first;
    return off;
}

static kvpc_column kvpc_column_of(uint64_t first, uint64_t step, uint64_t any, uint64_t all, bool regular)
{
    return kvpc_column{first, regular ? step : 0, any, regular ? 0 : any & ~all, 0, 0, 0};
}

/* Whether the buffers lie apart; of a copy, whether what the bits of all addresses leave room for does. */
static bool kvpc_is_apart(const kvpc_list *l, const kvpc_seen &s)
{
    const uint64_t src = l->addresses ? s.all.src : l->src, dst = l->addresses ? s.all.dst : l->dst;
    const uint64_t src_bytes = l->addresses ? s.any.src - src + s.any.bytes : l->src_bytes;
    const uint64_t dst_bytes = l->addresses ? s.any.dst - dst + s.any.bytes : l->dst_bytes;
    const uint64_t to_list = dst - (uintptr_t)l->fragments, to_src = dst - src;
    return to_list >= l->count * sizeof *l->fragments && 0 - to_list >= dst_bytes && to_src >= src_bytes &&
           0 - to_src >= dst_bytes;
}

/* Goes through all fragments and counts them. */
template <bool addresses> static void kvpc_survey_all(kvpc_unpack_job *job)
{
    const kvpc_seen none = {{0, 0, 0}, {UINT64_MAX, UINT64_MAX, UINT64_MAX}, 0, 0, 0};
    kvpc_seen before = none, seen = none;                       /* before: of all except the last */
    kvpc_fragment first = {0, 0, 0}, step = first, off = first; /* off: 0 as long as offsets lie on a line */
    uint64_t count = kvpc_first_chunk;
    job->next = job->list.fragments, job->rest = first, job->left = job->last_bytes = 0;
    for (const kvpc_fragment *f = kvpc_take(job, &count); count > 0; f = kvpc_take(job, &count)) {
        if (job->left == 0) {
            first = f[0];
            step.src = f[count > 1].src - first.src, step.dst = f[count > 1].dst - first.dst;
        }
        if (!off.src)
            off.src = kvpc_off_line<true>(f, count, first.src + job->left * step.src, step.src);
        if (!off.dst)
            off.dst = kvpc_off_line<false>(f, count, first.dst + job->left * step.dst, step.dst);
        before = kvpc_see<addresses>(seen, &job->list, f, count - 1);
        seen = kvpc_see<addresses>(before, &job->list, f + count - 1, 1);
        job->left += count, job->last_bytes = f[count - 1].bytes;
        count = off.src && off.dst ? UINT64_MAX : (uint64_t)kvpc_host_chunk;
    }
    job->next = job->list.fragments, job->rest.bytes = 0; /* for kvpc_write_records */
    const uint64_t any = seen.any.src | seen.any.dst | seen.any.bytes;
    job->fit = seen.past >> 63 == 0 && (any | job->list.src_bytes | job->list.dst_bytes) >> 62 == 0;
    job->apart = kvpc_is_apart(&job->list, seen);
    job->zeros = addresses && seen.zeros >> 63, job->longer = seen.longer >> 63;
    job->even = (job->left == 1 || before.any.bytes == before.all.bytes) && job->last_bytes - 1 < first.bytes;
    job->src = kvpc_column_of(first.src, step.src, seen.any.src, seen.all.src, !off.src);
    job->dst = kvpc_column_of(first.dst, step.dst, seen.any.dst, seen.all.dst, !off.dst);
    job->bytes = kvpc_column_of(first.bytes, 0, seen.any.bytes, seen.all.bytes, job->even);
}

static void kvpc_survey(kvpc_unpack_job *job, bool merge)
{
    job->merge = merge; /* by a survey that found whether there are zeros */
    job->list.addresses ? kvpc_survey_all<true>(job) : kvpc_survey_all<false>(job);
}

/* Returns whether enough of the first fragments begin where the one before ends; counting all of them would double the
   time of the survey. Even fragments must halve in number: fewer joins could make them uneven. */
static bool kvpc_is_mergeable(const kvpc_unpack_job *job)
{
    const kvpc_fragment *const f = job->list.fragments;
    const uint64_t count = job->left < kvpc_sample_count ? job->left : (uint64_t)kvpc_sample_count;
    uint64_t joins = 0;
    for (uint64_t i = 1; i < count; i++)
        joins += kvpc_joins(job, f[i - 1], f[i]);
    return joins > (job->even ? (count - 1) / 2 : count / 16);
}

/* >>impl_unpack_host ----------------------------------------------------------------------------------------------- */

/* Plans how to store a column, and returns its bits: 0 for a regular one, which is not stored. */
static uint32_t kvpc_plan_numbers(kvpc_column *c, kvpc_numbers *numbers)
{
    uint32_t bits = 0;
    *numbers = kvpc_numbers{0, c->step, 0, 0, 0};
    c->shift = 63; /* no number has that bit */
    if (c->differ == 0)
        return 0;
    for (c->shift = 0; (c->differ >> c->shift & 1) == 0;)
        c->shift++;
    while (c->differ >> c->shift >> bits)
        bits++;
    numbers->step = (uint64_t)1 << c->shift, numbers->mask = UINT64_MAX >> (64 - bits);
    numbers->base = c->base + (c->first & ~(numbers->mask << c->shift));
    c->common = c->any >> c->shift >> bits << bits << c->shift;
    return bits;
}

/* Lays out the records: three numbers in 64 bits, or each in bytes of its own. */
static void kvpc_plan_records(kvpc_unpack_job *job)
{
    kvpc_unpack *const h = &job->head;
    const uint32_t src = kvpc_plan_numbers(&job->src, &h->src), dst = kvpc_plan_numbers(&job->dst, &h->dst);
    const uint32_t bytes = kvpc_plan_numbers(&job->bytes, &h->bytes);
    h->apart = src + dst + bytes > 64, h->record_bytes = (src + dst + bytes + 7) / 8;
    if (h->apart) {
        h->dst.at = (src + 7) / 8, h->bytes.at = h->dst.at + (dst + 7) / 8;
        h->record_bytes = h->bytes.at + (bytes + 7) / 8;
    } else
        h->dst.shift = src % 64, h->bytes.shift = (src + dst) % 64;
}

static uint32_t kvpc_strip_bytes(const kvpc_unpack_job *job)
{
    return (16u * (job->aligned ? (uint32_t)kvpc_aligned_loads : (uint32_t)kvpc_bytes_loads)) << job->head.lanes_shift;
}

/* Whether many uneven fragments take as many strips each as the longest: then the host need not make tables, which take
   it longer than all else. At most half of the strips, about, may be empty: they cost a GPU little. */
static bool kvpc_is_alike_enough(const kvpc_unpack_job *job, uint64_t *strips)
{
    const uint32_t strip_bytes = kvpc_strip_bytes(job);
    const kvpc_fragment *const f = job->list.fragments;
    uint32_t longest = 0;
    uint64_t sum = 0;
    if (job->merge || job->left < kvpc_many_fragments)
        return false;
    for (uint64_t i = 0; i < job->left; i++) {
        const uint32_t bytes = (uint32_t)f[i].bytes;
        longest = bytes > longest ? bytes : longest, sum += bytes;
    }
    *strips = (job->lead + longest + strip_bytes - 1) / strip_bytes;
    return job->left * (*strips - 1) <= 2 * sum / strip_bytes;
}

/* As few threads copy a strip as can copy a fragment at once, at most a warp. */
static void kvpc_plan_unpack(kvpc_unpack_job *job)
{
    const uint64_t any_bytes = job->bytes.any, direct = kvpc_direct_bytes;
    const uint64_t most = job->even ? job->bytes.first : job->longer || any_bytes < direct ? any_bytes : direct;
    kvpc_unpack *const h = &job->head;
    *h = kvpc_unpack{};
    job->src.base = job->list.src, job->dst.base = job->list.dst;
    const uint64_t src = job->src.base + job->src.first, src_steps = job->src.step | job->src.differ;
    const uint64_t dst = job->dst.base + job->dst.first, dst_steps = job->dst.step | job->dst.differ;
    job->aligned = (src | src_steps | dst | dst_steps | any_bytes) % 16 == 0;
    job->lead = dst_steps % 16 ? 15 : (uint32_t)(dst % 16);
    job->is_small = job->even && job->aligned && most <= kvpc_small_bytes && !job->zeros;
    /* Threads for a whole strip take kvpc_aligned_loads words each, those of a small fragment one. */
    const uint64_t wanted = job->is_small ? kvpc_aligned_loads * most : job->lead + most;
    for (h->lanes_shift = 3; h->lanes_shift < 5 && kvpc_strip_bytes(job) < wanted;)
        h->lanes_shift++;
    uint64_t strips = (job->lead + most + kvpc_strip_bytes(job) - 1) / kvpc_strip_bytes(job);
    h->each = job->even || strips == 1 || kvpc_is_alike_enough(job, &strips) ? (uint32_t)strips : 0;
    kvpc_plan_records(job);
}

/* Returns how many fragments fit parameters of params_bytes. */
static uint64_t kvpc_fragments_in(const kvpc_unpack *h, uint64_t params_bytes)
{
    const uint64_t room = params_bytes - sizeof *h - 32; /* 15 before the first strips, 8 at the table's end */
    const uint64_t strip = h->each ? 0 : sizeof(uint32_t), stored = h->record_bytes + strip;
    const uint64_t most = ((uint64_t)1 << 30) / (h->each ? h->each : 1);
    const uint64_t fit = stored ? kvpc_table_share * room / (kvpc_table_share * stored + strip) : most;
    return fit < most ? fit : most;
}

/* How far a fragment's numbers are shifted, down and then up, in its record, and which of their bits are left out. */
typedef struct kvpc_shifts {
    uint32_t src, dst, bytes, dst_up, bytes_up;
    uint64_t src_common, dst_common;
} kvpc_shifts;

/* Each store writes 8 bytes. The next one, or what follows the records, overwrites those that are too many. `by` and
   `bytes` are values, which no store can change. Offsets mostly have no common bits, addresses do. */
template <bool common>
static void kvpc_store_records(char *to, uint32_t bytes, kvpc_shifts by, const kvpc_fragment *f, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++, to += bytes) {
        const uint64_t src = common ? f[i].src ^ by.src_common : f[i].src;
        const uint64_t dst = common ? f[i].dst ^ by.dst_common : f[i].dst;
        const uint64_t record = src >> by.src | dst >> by.dst << by.dst_up | f[i].bytes >> by.bytes << by.bytes_up;
        memcpy(to, &record, 8);
    }
}

static void kvpc_store_apart(char *to, const kvpc_unpack *h, kvpc_shifts by, const kvpc_fragment *f, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++, to += h->record_bytes) {
        const uint64_t src = f[i].src >> by.src, dst = f[i].dst >> by.dst, bytes = f[i].bytes >> by.bytes;
        memcpy(to, &src, 8);
        memcpy(to + h->dst.at, &dst, 8);
        memcpy(to + h->bytes.at, &bytes, 8);
    }
}

/* Returns the first strip of the next fragment. strip_bytes is a template parameter because a division takes long. */
template <uint32_t strip_bytes>
static uint32_t kvpc_store_strips(uint32_t *to, const kvpc_fragment *f, uint64_t count, uint32_t strip, uint32_t lead)
{
    for (uint64_t i = 0; i < count; i++) {
        to[i] = strip;
        strip += ((uint32_t)f[i].bytes + lead + strip_bytes - 1) / strip_bytes;
    }
    return strip;
}

/* Each fragment takes the first entry its strips reach; the others are filled later: branches on sizes mispredict. */
static void kvpc_store_table(kvpc_unpack *h, uint32_t *data)
{
    const uint32_t *const first_strip = data + h->first_strip;
    uint32_t *const table = data + h->table;
    h->table_shift = 0;
    while (h->strips >> h->table_shift > h->count / kvpc_table_share)
        h->table_shift++;
    const uint32_t shift = h->table_shift, up = (1u << shift) - 1, entries = (h->strips + up) >> shift;
    memset(table, 0, entries * sizeof *table);
    for (uint32_t i = 0; i < h->count; i++)
        table[(first_strip[i] + up) >> shift] = i;
    for (uint32_t k = 1; k < entries; k++)
        table[k] = table[k] > table[k - 1] ? table[k] : table[k - 1];
    table[entries] = h->count - 1;
}

static void kvpc_set_base(kvpc_numbers *numbers, uint64_t first)
{
    if (!numbers->mask)
        numbers->base = first;
}

/* Stores the next h->count fragments. */
static void kvpc_write_records(kvpc_unpack_job *job, kvpc_unpack *h, uint32_t *data)
{
    const kvpc_shifts by = {job->src.shift, job->dst.shift,  job->bytes.shift, h->dst.shift,
                            h->bytes.shift, job->src.common, job->dst.common};
    const uint32_t bytes = h->record_bytes;
    uint32_t strips = h->count * h->each;
    h->first_strip = (h->count * bytes + 15) / 4; /* up to 12 bytes are read from a record's first one on */
    h->table = h->first_strip + h->count;
    for (uint64_t at = 0, count; at < h->count; at += count) {
        count = h->count - at < kvpc_host_chunk ? h->count - at : (uint64_t)kvpc_host_chunk;
        const kvpc_fragment *const f = kvpc_take(job, &count);
        uint32_t *const first_strip = data + h->first_strip + at;
        if (at == 0) {
            kvpc_set_base(&h->src, job->src.base + f->src);
            kvpc_set_base(&h->dst, job->dst.base + f->dst);
            kvpc_set_base(&h->bytes, f->bytes);
        }
        char *const to = (char *)data + at * bytes;
        if (h->apart)
            kvpc_store_apart(to, h, by, f, count);
        else if (bytes == 2 && h->src.mask && !h->dst.mask && !h->bytes.mask) /* src alone, in vectors */
            for (uint64_t i = 0; i < count; i++)
                ((uint16_t *)(void *)to)[i] = (uint16_t)(f[i].src >> by.src);
        else if (bytes && (by.src_common | by.dst_common))
            kvpc_store_records<true>(to, bytes, by, f, count);
        else if (bytes)
            kvpc_store_records<false>(to, bytes, by, f, count);
        if (!h->each) /* then lanes_shift is 5 */
            strips = job->aligned
                         ? kvpc_store_strips<512 * kvpc_aligned_loads>(first_strip, f, count, strips, job->lead)
                         : kvpc_store_strips<512 * kvpc_bytes_loads>(first_strip, f, count, strips, job->lead);
        h->last_bytes = (uint32_t)f[count - 1].bytes;
    }
    h->strips = strips;
    if (!h->each)
        kvpc_store_table(h, data);
}

/* >>impl_unpack_run ------------------------------------------------------------------------------------------------ */

/* A strip for each group of threads; of many, two: half as many blocks start sooner. Empty ones alone take a block. */
static uint32_t kvpc_unpack_blocks(const kvpc_unpack_job *job, const kvpc_unpack *h, uint32_t threads, uint32_t max_sms)
{
    enum { many_blocks = 768 };
    const uint32_t groups = threads >> h->lanes_shift, each = job->is_small ? kvpc_small_fragments * groups : groups;
    const uint32_t all = job->is_small ? h->count : h->strips, blocks = all / each + (all % each != 0 || all == 0);
    if (max_sms > 0)
        return blocks < max_sms ? blocks : max_sms;
    return job->is_small || blocks < many_blocks ? blocks : (blocks + 1) / 2;
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
    kvpc_write_records(job, h, p.n32);
    job->left -= h->count;
    h->wait = !job->started && launch.pdl, h->wait_last = job->started && job->overlap;
    h->trigger = job->left ? job->overlap : launch.pdl;
    h->goes_on = job->left > 0;
    launch.pdl = job->started ? job->overlap : launch.pdl;
    job->started = true;
    const uint32_t threads = launch.max_sms > 0 ? kvpc_unpack_most_threads : kvpc_unpack_threads;
    return kvpc_start(&call,
                      job->is_small  ? kvpc_unpack_kernel<true, true, true, params_bytes>
                      : job->aligned ? kvpc_unpack_kernel<false, true, true, params_bytes>
                      : job->zeros   ? kvpc_unpack_kernel<false, false, true, params_bytes>
                                     : kvpc_unpack_kernel<false, false, false, params_bytes>,
                      kvpc_unpack_blocks(job, h, threads, (uint32_t)launch.max_sms), threads, p);
}

/* One fragment below 16 MB, or fragments that join to one. */
static kvprim_status kvpc_unpack_one(const kvpc_unpack_job *job, uint64_t bytes)
{
    const kvpc_one one = {job->list.dst + job->dst.first, job->list.src + job->src.first, (uint32_t)bytes,
                          job->call->launch.pdl};
    const uint32_t few_bytes = 1 << 20, loads = bytes <= few_bytes ? 1 : 4, in_block = 16 * kvpc_unpack_threads * loads;
    return kvpc_start(job->call, loads == 1 ? kvpc_unpack_one_kernel<1> : kvpc_unpack_one_kernel<4>,
                      (one.bytes + in_block - 1) / in_block, kvpc_unpack_threads, one);
}

/* Whether all fragments make one (a long one was cut again) that kvpc_unpack_one or CUDA's own copy moves: those take
   no max_sms, and CUDA's takes longer if so many bytes do not begin at multiples of 16 (fewer: kvpc_copy_few). */
static bool kvpc_is_one(const kvpc_unpack_job *job)
{
    const kvpc_column *const src = &job->src, *const dst = &job->dst;
    const uint64_t src_at = job->list.src + src->first, dst_at = job->list.dst + dst->first;
    const uint64_t step = job->bytes.first, src_step = job->zeros && !src->first ? 0 : step;
    return job->even && src->differ == 0 && dst->differ == 0 && (src_at | dst_at) % 16 == 0 &&
           job->call->launch.max_sms == 0 && (job->left == 1 || (src->step == src_step && dst->step == step));
}

/* Lets CUDA copy few fragments, and returns whether it does. Over PCIe up to 3 (from the host 2): from the call to the
   end of its work each takes 1 to 4 us less than a kernel, and of 4 MB 0.92 to 0.96 of its time; but as in
   kvpc_copy_layers what follows begins 1 to 2 us later, so graphs keep the kernel. Inside a GPU, in graphs too, one
   that does not lie at multiples of 16: of 64 KB 1.02 us, not 1.72, of 384 KB 2.22, not 2.32, but of 512 KB 2.57, not
   2.37 (H200). With pdl a kernel starts, and lets start, early. If CUDA refuses one, a kernel copies all. */
static bool kvpc_copy_few(const kvpc_call *call, const kvpc_unpack_job *job)
{
    const uint64_t most_bytes = 384 << 10;
    const kvpc_list *const l = &job->list;
    const kvpc_fragment *const f = l->fragments;
    void *const dst = (void *)(uintptr_t)(l->dst + f->dst), *const src = (void *)(uintptr_t)(l->src + f->src);
    bool to_host, inside;
    if (l->count > 3 || job->zeros || call->launch.pdl || call->launch.max_sms > 0)
        return false;
    const bool few = kvpc_is_link(dst, src, &to_host, &inside) && (l->count < 3 || to_host) && !kvpc_is_captured(call);
    const bool one = inside && l->count == 1 && ((uintptr_t)dst | (uintptr_t)src) % 16 != 0 && f->bytes <= most_bytes;
    if (!few && !one)
        return false;
    for (uint64_t i = 0; i < l->count; i++)
        if (f[i].bytes && !kvpc_copy_rows(call, (void *)(uintptr_t)(l->dst + f[i].dst), 0,
                                          (void *)(uintptr_t)(l->src + f[i].src), 0, (int64_t)f[i].bytes, 1))
            return false;
    return true;
}

static kvprim_status kvpc_unpack_fragments(const kvpc_call *call, kvpc_unpack_job *job)
{
    /* From here on CUDA is faster: 64 MB 32.9 us, not 34.7, zeros of 64 KB 0.96, not 1.45, but without PDL (H200). */
    const uint64_t copy_bytes = 16 << 20, by_cuda = job->zeros && !call->launch.pdl ? 64 << 10 : copy_bytes;
    job->call = call, job->started = false;
    job->overlap = call->launch.max_sms == 0 && kvpc_has_pdl();
    if (job->bytes.any == 0 || kvpc_copy_few(call, job))
        return KVPRIM_OK;
    if (job->bytes.any > kvpc_most_bytes || (job->src.any | job->dst.any) >> 62 || kvpc_is_mergeable(job))
        kvpc_survey(job, true);
    if (kvpc_is_one(job)) {
        const uint64_t bytes = (job->left - 1) * job->bytes.first + job->last_bytes;
        void *const dst = (void *)(uintptr_t)(job->list.dst + job->dst.first);
        const void *const src = (const void *)(uintptr_t)(job->list.src + job->src.first);
        if (bytes < by_cuda && !job->zeros)
            return kvpc_unpack_one(job, bytes);
        if (bytes >= by_cuda && kvpc_copy_rows(call, dst, 0, src, 0, (int64_t)bytes, 1))
            return KVPRIM_OK;
    }
    kvpc_plan_unpack(job);
    while (job->left > 0)
        if (job->left <= kvpc_fragments_in(&job->head, kvpc_few_params))
            KVPRIM_TRY(kvpc_unpack_some<kvpc_few_params>(job));
        else if (job->left <= kvpc_fragments_in(&job->head, kvpc_more_params))
            KVPRIM_TRY(kvpc_unpack_some<kvpc_more_params>(job));
        else
            KVPRIM_TRY(kvpc_unpack_some<kvpc_most_params>(job));
    return KVPRIM_OK;
}

static kvpc_list kvpc_list_of(const kvprim_unpack_desc *d)
{
    const kvpc_fragment *const f = (const kvpc_fragment *)(const void *)d->fragments;
    const uint64_t src = (uintptr_t)d->src, dst = (uintptr_t)d->dst;
    return kvpc_list{f, d->count, src, d->src_bytes, dst, d->dst_bytes, false};
}

static kvpc_list kvpc_list_of(const kvprim_copy_desc *d)
{
    const uint64_t most = ((uint64_t)1 << 62) - 1;
    return kvpc_list{(const kvpc_fragment *)(const void *)d->items, d->count, 0, most, 0, most, true};
}

/* Does what `check` (kvprim_unpack_check or kvprim_copy_check) does, and the survey. Where it finds that fragments lie
   in their buffers, and apart, only the rest is checked: the pass over many fragments is a good part of what a call
   costs the host. KVPRIM_DEBUG checks more; if kvprim.h is implemented in another unit, it is not known here. */
template <class Desc>
static kvprim_status kvpc_check_and_survey(kvpc_unpack_job *job, const kvpc_list &list, const Desc *desc,
                                           kvprim_status (*check)(const Desc *))
{
    Desc one = *desc;
    job->list = list, job->zeros = false;
    one.count = 1;
    if (check(&one) == KVPRIM_OK && desc->count <= (list.addresses ? (uint64_t)KVPRIM_MAX_COPIES : UINT64_MAX >> 6)) {
        kvpc_survey(job, false);
#if defined(KVPRIM_CORE_IMPLEMENTED) && !defined(KVPRIM_DEBUG)
        if (job->fit && job->apart)
            return KVPRIM_OK;
#endif
    }
    return check(desc);
}

/* KVPRIM_DEBUG: see kvpc_check_bytes. */
static kvprim_status kvpc_check_ends(const char *function, kvpc_unpack_job *, const kvprim_unpack_desc *d)
{
    KVPRIM_TRY(kvpc_check_bytes(function, "dst", d->dst, d->dst_bytes));
    return kvpc_check_bytes(function, "src", d->src, d->src_bytes);
}

/* No GPU has an address of 2^62 or more, and bit 63 of one would not be stored. Empty items may have any: a survey that
   joins items leaves them out. KVPRIM_DEBUG: the GPU can reach both ends of each item. */
static kvprim_status kvpc_check_ends(const char *function, kvpc_unpack_job *job, const kvprim_copy_desc *d)
{
    const bool high = (job->src.any | job->dst.any | job->bytes.any) >> 62 != 0;
    for (size_t i = 0; high && i < d->count; i++)
        KVPRIM_REFUSE(
            d->items[i].bytes && ((uintptr_t)d->items[i].src | (uintptr_t)d->items[i].dst | d->items[i].bytes) >> 62,
            SIZE, "%s: items[%llu] (src %p, dst %p, %llu bytes) lies past 2^62, where no GPU has memory", function,
            (unsigned long long)i, d->items[i].src, d->items[i].dst, (unsigned long long)d->items[i].bytes);
    if (high)
        kvpc_survey(job, true);
#if defined(KVPRIM_DEBUG) && !defined(KVPRIM_CUDA_EMULATE)
    for (size_t i = 0; i < 2 * d->count; i++) {
        const kvprim_copy_item &item = d->items[i / 2];
        char name[40];
        snprintf(name, sizeof name, "items[%llu].%s", (unsigned long long)(i / 2), i % 2 ? "src" : "dst");
        KVPRIM_TRY(kvpc_check_bytes(function, name, i % 2 ? item.src : item.dst, item.bytes));
    }
#endif
    return KVPRIM_OK;
}

/* Unpacks or copies: `check` is the function of kvprim.h that checks the descriptor. */
template <class Desc>
static kvprim_status kvpc_run_unpack(const char *function, const Desc *desc, kvprim_status (*check)(const Desc *),
                                     const kvprim_cuda_launch *launch)
{
    if (!desc)
        return kvpc_checked(check(desc));
    const Desc d = *desc;
    kvpc_unpack_job job; /* not all zeros: `merged` is 3 KB */
    if (d.count == 0)
        return KVPRIM_OK;
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(kvpc_check_and_survey(&job, kvpc_list_of(&d), &d, check)));
    KVPRIM_TRY(kvpc_begin_call(&call, function, launch));
    KVPRIM_TRY(kvpc_check_ends(function, &job, &d));
    return kvpc_unpack_fragments(&call, &job);
}

/* >>impl_meta_host ------------------------------------------------------------------------------------------------- */

/* As many blocks as full buffers keep busy, and so few that all run at once. They have to read all descriptors of their
   range. In the host's memory this is slow, and the slower, the more multiprocessors read: 1,024 take 12.5 us by 32
   blocks and 23 us by 264 (H200, 4 KB each). If the buffers are large, more blocks copy: fragments may be long. */
static uint32_t kvpc_meta_grid(const kvpc_call *call, const kvprim_unpack_meta_desc *d, uint32_t threads, bool link)
{
    const uint64_t bytes = d->src_bytes < d->dst_bytes ? d->src_bytes : d->dst_bytes;
    const uint64_t wanted = (d->max_count + bytes / (512 * kvpc_aligned_loads)) / (threads / 32) + 1;
    const uint64_t on_sm = threads == kvpc_meta_threads ? kvpc_meta_sm_threads / kvpc_meta_threads : 3;
    const uint64_t given = (uint64_t)(call->launch.max_sms < kvpc_meta_most ? call->launch.max_sms : kvpc_meta_most);
    const uint64_t sms = given ? given : kvpc_multiprocessors() * on_sm;
    const uint64_t each = d->max_count / kvpc_meta_link_each + bytes / kvpc_meta_link_bytes;
    const uint64_t few = each > kvpc_meta_link_least ? each : (uint64_t)kvpc_meta_link_least;
    const uint64_t most = link && few < sms ? few : sms;
    return (uint32_t)(wanted < most ? wanted : most);
}

/* As many ranges as make the shares equal. */
static kvprim_status kvpc_run_meta(const kvpc_call *call, const kvprim_unpack_meta_desc *d)
{
    bool to_host, inside;
    const bool link = kvpc_is_link(NULL, d->meta, &to_host, &inside),
               few = d->max_count <= kvpc_meta_few && !call->launch.max_sms && !link;
    const uint32_t threads = few ? kvpc_meta_few_threads : kvpc_meta_threads, max_count = (uint32_t)d->max_count;
    const uint32_t blocks = kvpc_meta_grid(call, d, threads, link), most = link ? 1u << kvpc_meta_link_shift : threads;
    kvpc_meta p = {};
    p.dst = (uintptr_t)d->dst, p.src = (uintptr_t)d->src, p.dst_bytes = d->dst_bytes, p.src_bytes = d->src_bytes;
    p.meta = (uintptr_t)d->meta, p.count = (uintptr_t)d->count, p.rejected = d->rejected;
    p.max_count = max_count, p.pdl = call->launch.pdl;
    for (p.range_shift = 5; 1u << p.range_shift < most && 1u << p.range_shift < max_count;)
        p.range_shift++;
    const uint32_t least = (max_count + (1u << p.range_shift) - 1) >> p.range_shift;
    p.shares = blocks > least ? blocks / least : 1;
    const uint32_t ranges = blocks > least ? blocks / p.shares : least;
    p.more = blocks > least ? blocks - ranges * p.shares : 0;
    p.ranges = kvpc_divisor_of(ranges);
    return kvpc_start(call, few ? kvpc_meta_kernel<kvpc_meta_few_threads> : kvpc_meta_kernel<kvpc_meta_threads>, blocks,
                      threads, p);
}

#else
static kvprim_status kvpc_run_meta(const kvpc_call *call, const kvprim_unpack_meta_desc *)
{
    return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "%s: compiled with KVPRIM_NO_UNPACK", call->function);
}

template <class Desc>
static kvprim_status kvpc_run_unpack(const char *function, const Desc *desc, kvprim_status (*check)(const Desc *),
                                     const kvprim_cuda_launch *launch)
{
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(check(desc)));
    KVPRIM_TRY(desc->count ? kvpc_begin_call(&call, function, launch) : KVPRIM_OK);
    return desc->count ? kvpc_run_meta(&call, NULL) : KVPRIM_OK;
}
#endif

static kvprim_status kvpc_check_meta_memory(const char *function, const kvprim_unpack_meta_desc *d)
{
    KVPRIM_TRY(kvpc_check_reachable(function, "meta", d->meta, d->max_count * sizeof *d->meta));
    KVPRIM_TRY(kvpc_check_reachable(function, "count", d->count, sizeof *d->count));
    KVPRIM_TRY(kvpc_check_bytes(function, "dst", d->dst, d->dst_bytes));
    KVPRIM_TRY(kvpc_check_bytes(function, "src", d->src, d->src_bytes));
    return kvpc_check_bytes(function, "rejected", d->rejected, 4);
}

/* >>impl_slots -----------------------------------------------------------------------------------------------------

   A thread for each token. With few tokens, the time is that of loads that wait for each other (0.16 us each, H200) and
   of fetching instructions anew (2 ns each): so they are few, and most come before a dependent launch's wait. */

typedef struct kvpc_slots {
    uint64_t request, position; /* or cu_seqlens and starts; 0: all starts are 0 */
    uint64_t count, requests;
    uint64_t positions;              /* that a request's pages have, at most 2^63 */
    kvpc_divisor page;               /* its rows */
    uint64_t pages, pages_step;      /* pages_step: bytes from one request to the next */
    uint64_t last_page, rows, slot;  /* last_page: the largest that may have a slot below `rows` */
    uint32_t page_bytes, slot_bytes; /* of one number: 4 or 8 */
    uint32_t *rejected;
    uint32_t pdl;      /* a kvpc_dependence */
    kvpc_divisor each; /* tokens of each request, as kvpc_find_request first guesses; 0: no such guess */
    uint32_t token_bytes;
    uint64_t page_starts, max_pages; /* page_starts: 0 if each request has as many pages */
} kvpc_slots;

enum {
    kvpc_slots_threads = 128, /* with more than kvpc_slots_few tokens, twice as many */
    kvpc_slots_few = 4096,
    kvpc_slots_most_threads = 512, /* with max_sms */
    kvpc_slots_most_blocks = 4096, /* more take several tokens a thread */
    kvpc_slots_first = 16384,      /* tokens by length, at most, with kvpc_trigger_first */
    kvpc_slots_each = 8,           /* tokens of a request, at most, in a guess */
    kvpc_pivots = 7                /* of a search, loaded at once */
};

/* In 32 bits where the sizes allow it: see kvpc_slots_are_small. Kernels of 64 bits take tokens of either type. */
template <class number> KVPRIM_DEVICE uint64_t kvpc_number_at(uint64_t base, number i, number step)
{
    return sizeof(number) == 4 ? kvpc_row_at(base, (uint32_t)i, (uint32_t)step) : base + i * step;
}

template <class token, class number> KVPRIM_DEVICE uint64_t kvpc_token_at(const kvpc_slots &p, uint64_t base, number i)
{
    return kvpc_number_at(base, i, sizeof(number) == 4 ? (number)sizeof(token) : (number)p.token_bytes);
}

template <class token, class number> KVPRIM_DEVICE token kvpc_load_token(const kvpc_slots &p, uint64_t at)
{
    const uint32_t bytes = sizeof(number) == 4 ? (uint32_t)sizeof(token) : p.token_bytes;
    return bytes == 8 ? (token)kvpc_load_i64(at) : (token)kvpc_load_i32(at);
}

/* 0 <= x < n, which is at most 2^31 if it is a number of 32 bits. */
template <class token, class number> KVPRIM_DEVICE bool kvpc_is_below(token x, number n)
{
    return sizeof(token) == 4 ? (uint32_t)x < (uint32_t)n : (uint64_t)(int64_t)x < (uint64_t)n;
}

/* A search for the last of cu_seqlens[low .. low + left] not above i. Pivots: every step-th; past the end, the last. */
template <class number> struct kvpc_search {
    number low, left, step;
    uint64_t at[kvpc_pivots];
};

template <class token, class number> KVPRIM_DEVICE void kvpc_place_pivots(const kvpc_slots &p, kvpc_search<number> *s)
{
    const uint64_t first = kvpc_token_at<token>(p, p.request, s->low);
    s->step = s->left / (kvpc_pivots + 1) + 1;
    for (uint32_t k = 0; k < kvpc_pivots; k++) {
        const number n = (k + 1) * s->step;
        s->at[k] = kvpc_token_at<token>(p, first, n < s->left ? n : s->left);
    }
}

/* What tells whether a token is one of a request, and its position. */
template <class token> struct kvpc_request {
    token first, next, start;
};

template <class token, class number>
KVPRIM_DEVICE kvpc_request<token> kvpc_load_request(const kvpc_slots &p, number request)
{
    const uint64_t at = kvpc_token_at<token>(p, p.request, request), next = kvpc_token_at<token>(p, at, (number)1);
    kvpc_request<token> s = {kvpc_load_token<token, number>(p, at), kvpc_load_token<token, number>(p, next), 0};
    if (p.position)
        s.start = kvpc_load_token<token, number>(p, kvpc_token_at<token>(p, p.position, request));
    return s;
}

template <class token> KVPRIM_DEVICE bool kvpc_is_of_request(const kvpc_request<token> &s, token i)
{
    return s.first <= i && i < s.next;
}

/* The request of token i by cumulative counts, or one that it is not in. First a guess:
   - Where tokens are a few times the requests, as in a decode, each request has as many.
   - Elsewhere token i is that of request i, as decodes come first.
   - If there is no request i, the threads of a block guess requests 32 bytes apart. That brings all of cu_seqlens and
     starts into the first cache (1,024 requests of int32), which the search then reads: 8,192 tokens of 256 requests
     take 1.3 us where prefill follows decodes, not 1.6 (H200). */
template <class token, class number>
KVPRIM_DEVICE number kvpc_find_request(const kvpc_slots &p, number i, kvpc_request<token> *of)
{
    const number last = (number)p.requests - 1, other = threadIdx.x * (32 / (number)sizeof(token));
    const number near = p.each.by ? kvpc_divide(i, p.each) : i <= last ? i : other, guess = near < last ? near : last;
    kvpc_search<number> s;
    s.low = 0, s.left = last;
    kvpc_place_pivots<token>(p, &s);
    kvpc_pdl_wait(p.pdl);
    *of = kvpc_load_request<token>(p, guess);
    for (;;) {
        token pivot[kvpc_pivots];
        number passed = 0;
        for (uint32_t k = 0; k < kvpc_pivots; k++)
            pivot[k] = kvpc_load_token<token, number>(p, s.at[k]);
        if (kvpc_is_of_request(*of, (token)i))
            return guess;
        for (uint32_t k = 0; k < kvpc_pivots; k++)
            passed += pivot[k] <= (token)i;
        passed = passed * s.step < s.left ? passed * s.step : s.left;
        s.low += passed;
        s.left = s.left - passed < s.step - 1 ? s.left - passed : s.step - 1;
        if (s.left == 0)
            break;
        kvpc_place_pivots<token>(p, &s);
    }
    *of = kvpc_load_request<token>(p, s.low);
    return s.low;
}

/* A number of 4 or 8 bytes. The words of a wide one are two loads, without a branch. */
KVPRIM_DEVICE int64_t kvpc_load_number(uint64_t at, bool wide)
{
    const int32_t low = kvpc_load_i32(at), high = wide ? kvpc_load_i32(at + 4) : low >> 31;
    return (int64_t)((uint64_t)(uint32_t)high << 32 | (uint32_t)low);
}

/* Whether the request has page `in_request`; if so, *pages becomes where its page numbers begin. */
KVPRIM_DEVICE bool kvpc_find_pages(const kvpc_slots &p, uint64_t request, uint64_t in_request, uint64_t *pages)
{
    const uint64_t at = p.page_starts + request * p.page_bytes;
    const bool wide = p.page_bytes == 8;
    const int64_t begin = kvpc_load_number(at, wide), end = kvpc_load_number(at + p.page_bytes, wide);
    *pages = p.pages + (uint64_t)begin * p.page_bytes;
    return begin >= 0 && end >= begin && (uint64_t)end <= p.max_pages && in_request < (uint64_t)(end - begin);
}

/* Stores the slot of a token, or -1, and counts what is past. */
template <bool by_starts, class token, class number>
KVPRIM_DEVICE void kvpc_store_slot(const kvpc_slots &p, number i, token request, token position, bool past)
{
    bool found = !past && kvpc_is_below(request, (number)p.requests) && kvpc_is_below(position, (number)p.positions);
    const number by = (number)p.page.by, in_request = kvpc_divide((number)position, p.page);
    uint64_t pages = kvpc_number_at(p.pages, (number)request, (number)p.pages_step);
    if (by_starts)
        found = found && kvpc_find_pages(p, (uint64_t)request, in_request, &pages);
    const uint64_t at = kvpc_number_at(pages, in_request, (number)p.page_bytes);
    const uint64_t to = kvpc_number_at(p.slot, i, (number)p.slot_bytes);
    int32_t low = -1, high = -1; /* two words: one load for each, without a branch */
    if (found)
        low = kvpc_load_i32(at);
    if (found && p.page_bytes == 8)
        high = kvpc_load_i32(at + 4);
    else
        high = low >> 31;
    const int64_t page = (int64_t)((uint64_t)(uint32_t)high << 32 | (uint32_t)low);
    kvpc_pdl_trigger(p.pdl == kvpc_trigger_late);
    const number slot = (number)page * by + ((number)position - in_request * by);
    const bool inside = (uint64_t)page <= p.last_page && slot < (number)p.rows; /* a larger page may overflow */
    if (p.slot_bytes == 8)
        *(int64_t *)kvpc_global(to) = inside ? (int64_t)slot : -1;
    else
        *(int32_t *)kvpc_global(to) = inside ? (int32_t)slot : -1;
    const bool padding = !past && (request < 0 || position < 0 || (found && page < 0));
    if (!inside && !padding && p.rejected)
        atomicAdd(p.rejected, 1u);
}

/* by_length: by cumulative counts. by_starts: with page_starts. */
template <bool by_length, class token, class number, bool by_starts = false>
static __global__ void __launch_bounds__(kvpc_slots_most_threads)
    kvpc_slots_kernel(const KVPRIM_GRID_CONSTANT kvpc_slots KVPRIM_IN_PLACE p)
{
    kvpc_pdl_trigger(p.pdl == kvpc_trigger_first);
    const number threads = (number)gridDim.x * blockDim.x;
    for (number i = (number)blockIdx.x * blockDim.x + threadIdx.x; i < (number)p.count; i += threads)
        if (by_length) {
            kvpc_request<token> s;
            const number request = kvpc_find_request(p, i, &s);
            const uint64_t start = (uint64_t)(int64_t)s.start, further = (uint64_t)i - (uint64_t)(int64_t)s.first;
            bool past = !kvpc_is_of_request(s, (token)i); /* it has no request, or its position takes over 63 bits */
            if (sizeof(token) == 8)
                past = past || further > (uint64_t)INT64_MAX - start;
            kvpc_store_slot<by_starts>(p, i, (int64_t)request, (int64_t)(start + further), past);
        } else {
            const uint64_t request_at = kvpc_token_at<token>(p, p.request, i);
            const uint64_t position_at = kvpc_token_at<token>(p, p.position, i);
            kvpc_pdl_wait(p.pdl);
            const token request = kvpc_load_token<token, number>(p, request_at),
                        position = kvpc_load_token<token, number>(p, position_at);
            kvpc_store_slot<by_starts>(p, i, request, position, false);
        }
}

/* Positions and slots fit 31 bits, and all other numbers 32. */
static bool kvpc_slots_are_small(const kvpc_slots *p)
{
    const uint64_t most = (uint64_t)1 << 31;
    return p->positions <= most && p->rows <= most && p->requests < most && p->pages_step <= UINT32_MAX &&
           p->count <= most / 2;
}

template <class token, class number, bool by_starts = false>
static kvprim_status kvpc_start_slots(const kvpc_call *call, const kvpc_slots *p, bool by_length)
{
    const uint32_t wanted = p->count > kvpc_slots_few ? 2 * kvpc_slots_threads : kvpc_slots_threads;
    const uint32_t threads = call->launch.max_sms > 0 ? (uint32_t)kvpc_slots_most_threads : wanted;
    const uint64_t most = call->launch.max_sms > 0 ? (uint64_t)call->launch.max_sms : (uint64_t)kvpc_slots_most_blocks;
    const uint64_t blocks = (p->count + threads - 1) / threads;
    return kvpc_start(call,
                      by_length ? kvpc_slots_kernel<true, token, number, by_starts>
                                : kvpc_slots_kernel<false, token, number, by_starts>,
                      (uint32_t)(blocks < most ? blocks : most), threads, *p);
}

static uint32_t kvpc_index_size(kvprim_index_type type)
{
    return type == KVPRIM_I64 ? 8 : 4;
}

/* d is resolved. */
static kvprim_status kvpc_run_slots(const kvpc_call *call, const kvprim_slots_desc *d)
{
    const uint64_t most_positions = (uint64_t)1 << 63;
    const uint64_t page_rows = (uint64_t)d->page_rows, max_pages = (uint64_t)d->max_pages;
    kvpc_slots p = {};
    p.request = (uintptr_t)(d->cu_seqlens ? d->cu_seqlens : d->request);
    p.position = (uintptr_t)(d->cu_seqlens ? d->starts : d->position);
    p.count = (uint64_t)d->count, p.requests = (uint64_t)d->requests;
    p.positions = max_pages > most_positions / page_rows ? most_positions : max_pages * page_rows;
    p.page = kvpc_divisor_of(d->page_rows), p.pages = (uintptr_t)d->pages;
    p.pages_step = (uint64_t)d->pages_stride * kvpc_index_size(d->pages_type);
    p.last_page = (uint64_t)(d->rows / d->page_rows);
    p.rows = (uint64_t)d->rows, p.slot = (uintptr_t)d->slot;
    p.page_bytes = kvpc_index_size(d->pages_type), p.slot_bytes = kvpc_index_size(d->slot_type);
    p.token_bytes = kvpc_index_size(d->token_type), p.rejected = d->rejected;
    p.page_starts = (uintptr_t)d->page_starts, p.max_pages = max_pages;
    const bool by_length = d->cu_seqlens != NULL, is_small = kvpc_slots_are_small(&p);
    const bool late = by_length && p.count > kvpc_slots_first; /* blocks that wait would take the room of blocks */
    p.pdl = !call->launch.pdl ? kvpc_alone : late ? kvpc_trigger_late : kvpc_trigger_first;
    p.each = kvpc_divisor_of(
        d->count % d->requests == 0 && d->count / d->requests <= kvpc_slots_each ? d->count / d->requests : 0);
    if (d->page_starts)
        return is_small && d->token_type == KVPRIM_I32 ? kvpc_start_slots<int32_t, uint32_t, true>(call, &p, by_length)
                                                       : kvpc_start_slots<int64_t, uint64_t, true>(call, &p, by_length);
    return !is_small                     ? kvpc_start_slots<int64_t, uint64_t>(call, &p, by_length)
           : d->token_type == KVPRIM_I32 ? kvpc_start_slots<int32_t, uint32_t>(call, &p, by_length)
                                         : kvpc_start_slots<int64_t, uint32_t>(call, &p, by_length);
}

/* KVPRIM_DEBUG: see kvpc_check_bytes. */
static kvprim_status kvpc_check_slots_memory(const char *function, const kvprim_slots_desc *d)
{
    const uint64_t size = kvpc_index_size(d->token_type), n = (uint64_t)d->count, requests = (uint64_t)d->requests;
    const uint64_t pages = (requests - 1) * (uint64_t)d->pages_stride + (uint64_t)d->max_pages;
    KVPRIM_TRY(kvpc_check_bytes(function, "pages", d->pages, pages * kvpc_index_size(d->pages_type)));
    KVPRIM_TRY(
        kvpc_check_bytes(function, "page_starts", d->page_starts, (requests + 1) * kvpc_index_size(d->pages_type)));
    KVPRIM_TRY(kvpc_check_bytes(function, "request", d->request, n * size));
    KVPRIM_TRY(kvpc_check_bytes(function, "position", d->position, n * size));
    KVPRIM_TRY(kvpc_check_bytes(function, "cu_seqlens", d->cu_seqlens, (requests + 1) * size));
    KVPRIM_TRY(kvpc_check_bytes(function, "starts", d->starts, requests * size));
    KVPRIM_TRY(kvpc_check_bytes(function, "slot", d->slot, n * kvpc_index_size(d->slot_type)));
    return kvpc_check_bytes(function, "rejected", d->rejected, 4);
}

/* >>impl_fetch ------------------------------------------------------------------------------------------------------

   One launch. Its blocks draw numbers. Each number below `count` is a request to look up. Who draws a larger one knows
   that all lookups have begun, and copies its share of their rows. So nobody waits for one not begun, however few run.

   With few requests the time is that of the loads that wait for each other (0.6 us each on an H200) and of the
   instructions, which are fetched anew: so a thread has at most two entries, in registers. An entry of the list is two
   words of 8 bytes, source and destination: a row, and above it the launch's number, stored together. Who copies waits
   for the source, loads the row, and then waits for the destination: slots are found while rows come over the link. A
   lone request need not count what it lacks: entry e of its list is its own entry e, or has source -1. */
#ifndef KVPRIM_NO_FETCH

enum {
    kvpc_fetch_threads = 1024,
    kvpc_fetch_least_threads = 256, /* of a block; as many as there are entries, from here on */
    kvpc_fetch_each = 2,            /* entries of a thread; a block looks up 2,048 at a time */
    kvpc_fetch_copiers = 32,        /* blocks that copy beside those that look up: they fill the link */
    kvpc_fetch_loads = 4,           /* words of a thread that copies */
    kvpc_fetch_end = -2,            /* as a source: the list has no more entries */
    kvpc_fetch_marks =
        (4 * KVPRIM_MAX_HOT_ROWS + 2 * KVPRIM_MAX_FETCH_ENTRIES) / 32 /* words; a bit for each of a log */
};

typedef kvpc_listed<kvpc_bare_params> kvpc_fetch_part;

/* In the order of their use: each cache line of parameters is waited for. A number's `wide`: int64. */
typedef struct kvpc_fetch {
    uint64_t memory, state, wanted, fresh;                    /* wanted: where entry 0 would be if none were fresh */
    uint64_t wanted_step, fresh_step;                         /* bytes from one request to the next */
    uint32_t count, draws, entries, first_wanted, each, span; /* span: entries that a block looks up at a time */
    uint32_t pdl, state_wide, wide, tokens;
    uint64_t step_gap; /* bytes from a step's last token to the next one's first */
    kvpc_divisor32 by_top_k;
    uint64_t first_state, state_bytes, states;
    uint32_t logged, longest, hot_rows; /* longest: where a log may end */
    uint32_t shared;                    /* the list: by requests, or by the spans of one */
    uint64_t list;
    uint32_t groups, host_rows; /* groups: of threads that copy */
    uint64_t pages, pages_step; /* pages_step: bytes */
    kvpc_divisor by_page;       /* rows of a page; 0: no pages */
    uint64_t max_pages;
    uint32_t pages_wide, pages_by_state;
    int32_t *rows, *fresh_rows, *plan_src, *plan_dst;
    uint32_t *counters[3];   /* hits, misses, rejected */
    uint32_t parts, aligned; /* parts: 1 with K, 2 with V; aligned: a bit for each whose rows are whole words */
    kvpc_fetch_part part[2];
} kvpc_fetch;

static_assert(sizeof(kvpc_fetch) <= kvpc_params_bytes, "no room");

/* What the threads of a block tell each other. */
typedef struct kvpc_fetch_block {
    uint32_t sums[2][32]; /* [0]: of kvpc_read_log and kvpc_make_room; [1]: of kvpc_take_slots */
    union {
        int32_t slots[kvpc_fetch_threads * kvpc_fetch_each]; /* that are free, in the order of their last use */
        uint32_t marks[kvpc_fetch_marks];
    };
    uint32_t before[kvpc_fetch_threads]; /* for each thread: the marks in words of threads with lower numbers */
    uint64_t drawn, first;
    int32_t head;
    uint32_t served;
} kvpc_fetch_block;

/* A request under way: addresses, and the ends of its state's log when the call began. */
typedef struct kvpc_fetch_state {
    uint64_t number, log, stamp, map; /* the ends lie before the log, the tags before the map */
    uint32_t request, head, base;
} kvpc_fetch_state;

/* What a thread knows of its entries. token: -1 is padding, -2 is no token of a state. */
typedef struct kvpc_entries {
    uint32_t first; /* entry k is `first` + k */
    int32_t token[kvpc_fetch_each], slot[kvpc_fetch_each];
    bool owns[kvpc_fetch_each];
} kvpc_entries;

KVPRIM_DEVICE uint64_t kvpc_word_of(const kvpc_fetch &p, uint32_t word)
{
    return p.memory + 8 * word;
}

/* Element i of int32 in memory that this launch writes. */
KVPRIM_DEVICE int32_t *kvpc_at(uint64_t address, int32_t i)
{
    return (int32_t *)kvpc_global(address + 4 * (uint64_t)(uint32_t)i);
}

/* Word 0 holds the numbers drawn, and above them the launches so far. Who draws the first number empties what the next
   launch counts in: word 1 (even launches) or 2, where requests looked up stand above the rows that they listed. Who
   draws the last number ends the launch. Launch 2^32 - 1 is followed by launch 2: 0 is what a reset leaves in the list,
   and the next one counts in word 1, too. */
KVPRIM_DEVICE uint64_t kvpc_draw(const kvpc_fetch &p)
{
    const uint64_t launch = (uint64_t)1 << 32, drawn = kvpc_add64(kvpc_word_of(p, 0), 1) + launch;
    if ((uint32_t)drawn == 0)
        kvpc_store8(kvpc_word_of(p, 1 + ((uint32_t)(drawn >> 32) + 1) % 2), uint2{0, 0});
    if ((uint32_t)drawn == p.draws - 1)
        (void)kvpc_add64(kvpc_word_of(p, 0), launch * ((uint32_t)(drawn >> 32) == UINT32_MAX ? 3 : 1) - p.draws);
    return drawn;
}

/* Whether `number` is a state that no other request of this launch has taken. */
KVPRIM_DEVICE bool kvpc_is_first(const kvpc_fetch &p, uint64_t number, uint32_t launch)
{
    uint32_t *const busy = (uint32_t *)kvpc_at(kvpc_word_of(p, kvpi_fetch_words), (int32_t)number);
    return number < p.states && (p.count == 1 || atomicExch(busy, launch) != launch);
}

/* Ends the list: writes as many end entries as there are groups that copy, so that each group reads one. */
KVPRIM_DEVICE void kvpc_end_list(const kvpc_fetch &p, uint32_t listed, uint32_t launch)
{
    const uint32_t most = p.count * p.entries, end = most - listed < p.groups ? most : listed + p.groups;
    for (uint32_t e = listed + threadIdx.x; e < end; e += blockDim.x)
        kvpc_tell(p.list + 16 * (uint64_t)e, (uint32_t)kvpc_fetch_end, launch);
}

/* A request, or a span of one, makes room in the list for n rows; `last`: it has no more. Returns the requests that
   were done before, and below them the rows. */
KVPRIM_DEVICE uint64_t kvpc_reserve(const kvpc_fetch &p, uint32_t launch, uint32_t n, bool last)
{
    return kvpc_add64(kvpc_word_of(p, 1 + launch % 2), ((uint64_t)(last ? 1 : 0) << 32) + n);
}

KVPRIM_DEVICE void kvpc_load_tokens(const kvpc_fetch &p, uint32_t request, kvpc_entries *x)
{
    const bool wide = p.wide;
    const uint32_t size = wide ? 8 : 4;
    const uint64_t fresh = p.fresh + request * p.fresh_step, wanted = p.wanted + request * p.wanted_step;
    int32_t low[kvpc_fetch_each], high[kvpc_fetch_each];
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        const uint32_t e = x->first + k;
        const uint64_t gaps = p.step_gap ? kvpc_divide(e - p.first_wanted, p.by_top_k) * p.step_gap : 0;
        const uint64_t at = (e < p.first_wanted ? fresh : wanted + gaps) + e * size;
        low[k] = high[k] = -1;
        if (k < p.each && e < p.entries)
            low[k] = kvpc_load_i32(at), high[k] = wide ? kvpc_load_i32(at + 4) : 0;
    }
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        high[k] = wide ? high[k] : low[k] >> 31;
        x->token[k] = high[k] < 0 ? -1 : high[k] == 0 && (uint32_t)low[k] < p.tokens ? low[k] : -2;
    }
}

/* What the map holds for tokens: a slot or another number. */
KVPRIM_DEVICE void kvpc_load_slots(const kvpc_fetch_state &s, kvpc_entries *x)
{
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        x->slot[k] = x->token[k] >= 0 ? kvpc_load_new((uintptr_t)kvpc_at(s.map, x->token[k])) : -1;
}

KVPRIM_DEVICE void kvpc_check_slots(const kvpc_fetch &p, kvpc_entries *x)
{
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        x->slot[k] = (uint32_t)x->slot[k] < p.hot_rows ? x->slot[k] : -1;
}

KVPRIM_DEVICE void kvpc_find_slots(const kvpc_fetch &p, const kvpc_fetch_state &s, kvpc_entries *x)
{
    kvpc_load_slots(s, x);
    kvpc_check_slots(p, x);
}

/* Marks entries that have a slot as used last. */
KVPRIM_DEVICE void kvpc_use_slots(const kvpc_fetch_state &s, const kvpc_entries &x)
{
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        if (x.slot[k] >= 0)
            (void)atomicMax(kvpc_at(s.stamp, x.slot[k]), (int32_t)(s.base + x.first + k));
}

/* This thread's entries of the log, from `at` on. */
KVPRIM_DEVICE void kvpc_load_log(const kvpc_fetch &p, const kvpc_fetch_state &s, uint32_t at, int32_t *slot)
{
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        slot[k] = k < p.each && at + k < s.base ? kvpc_load_new((uintptr_t)kvpc_at(s.log, (int32_t)(at + k))) : -1;
}

/* >>impl_fetch_slots

   Writes the first `wanted` slots of the log that are alive to b->slots, from its head on, and moves the head past
   them. Returns how many there are. `slot` holds the thread's first entries of the log. */
KVPRIM_DEVICE uint32_t kvpc_read_log(const kvpc_fetch &p, kvpc_fetch_block *b, kvpc_fetch_state *s, int32_t *slot,
                                     uint32_t wanted)
{
    uint32_t found = 0, all;
    for (uint32_t at = s->head + threadIdx.x * p.each;; at += p.span) {
        int32_t stamp[kvpc_fetch_each], next[kvpc_fetch_each];
        uint32_t own = 0;
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            stamp[k] = (uint32_t)slot[k] < p.hot_rows ? kvpc_load_new((uintptr_t)kvpc_at(s->stamp, slot[k])) : -1;
        kvpc_load_log(p, *s, at + p.span, next);
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            own += stamp[k] == (int32_t)(at + k);
        uint32_t to = found + kvpc_sum_up(b->sums[0], own, &all) - own;
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            if (stamp[k] == (int32_t)(at + k) && to < wanted) {
                b->slots[to] = slot[k];
                if (++to == wanted)
                    b->head = (int32_t)(at + k + 1);
            }
        found += all;
        __syncthreads();
        if (found >= wanted || at - threadIdx.x * p.each + p.span >= s->base)
            break;
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            slot[k] = next[k];
    }
    s->head = found < wanted ? s->base : (uint32_t)b->head;
    return found < wanted ? found : wanted;
}

/* Moves what is alive to the log's start, see kvpi_make_room: marks where in the log the slots lie, and counts. */
KVPRIM_DEVICE void kvpc_make_room(const kvpc_fetch &p, kvpc_fetch_block *b, kvpc_fetch_state *s)
{
    const uint32_t words = (p.logged + 31) / 32, each = (words + blockDim.x - 1) / blockDim.x;
    uint32_t own = 0, all;
    __syncthreads();
    for (uint32_t w = threadIdx.x; w < words; w += blockDim.x)
        b->marks[w] = 0;
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < p.hot_rows; slot += blockDim.x) {
        const uint32_t at = (uint32_t)kvpc_load_new((uintptr_t)kvpc_at(s->stamp, (int32_t)slot));
        if (at >= s->head && at < s->base)
            atomicOr(&b->marks[at / 32], 1u << at % 32);
    }
    __syncthreads();
    for (uint32_t w = threadIdx.x * each; w < (threadIdx.x + 1) * each && w < words; w++)
        own += (uint32_t)__popc((int)b->marks[w]);
    b->before[threadIdx.x] = kvpc_sum_up(b->sums[0], own, &all) - own;
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < p.hot_rows; slot += blockDim.x) {
        const uint32_t at = (uint32_t)kvpc_load_new((uintptr_t)kvpc_at(s->stamp, (int32_t)slot)), word = at / 32;
        if (at < s->head || at >= s->base)
            continue;
        uint32_t to = b->before[word / each] + (uint32_t)__popc((int)(b->marks[word] & ((1u << at % 32) - 1)));
        for (uint32_t w = word / each * each; w < word; w++)
            to += (uint32_t)__popc((int)b->marks[w]);
        *kvpc_at(s->log, (int32_t)to) = (int32_t)slot, *kvpc_at(s->stamp, (int32_t)slot) = (int32_t)to;
    }
    s->head = 0, s->base = all;
}

/* Where the rows of owned tokens lie; -1: nowhere. Of fresh ones, nowhere, too. */
KVPRIM_DEVICE void kvpc_find_hosts(const kvpc_fetch &p, const kvpc_fetch_state &s, const kvpc_entries &x, int32_t *host)
{
    int64_t page[kvpc_fetch_each];
    const uint64_t pages = p.pages + (p.pages_by_state ? s.number : s.request) * p.pages_step;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        const uint32_t in_pages = kvpc_divide((uint32_t)x.token[k], p.by_page);
        page[k] = !x.owns[k] || x.first + k < p.first_wanted || (p.by_page.by && in_pages >= p.max_pages) ? -1
                  : p.by_page.by ? kvpc_load_number(pages + (p.pages_wide ? 8 : 4) * (uint64_t)in_pages, p.pages_wide)
                                 : 0;
    }
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        const uint32_t in_page =
            (uint32_t)x.token[k] - kvpc_divide((uint32_t)x.token[k], p.by_page) * (uint32_t)p.by_page.by;
        const uint64_t row = (uint64_t)(uint32_t)page[k] * p.by_page.by + in_page;
        host[k] = page[k] >= 0 && page[k] <= INT32_MAX && row < p.host_rows ? (int32_t)row : -1;
    }
}

/* Which of this thread's entries own their token: they lack a slot, and are the first that does. While slots are taken,
   the map holds numbers above all slots for such tokens, the largest for the first entry. Returns whether any token
   repeats: if none does, nobody has to look again. host: see kvpc_find_hosts, whose loads are under way meanwhile. */
KVPRIM_DEVICE bool kvpc_claim(const kvpc_fetch &p, const kvpc_fetch_state &s, kvpc_entries *x, int32_t *host)
{
    int32_t claim[kvpc_fetch_each];
    bool repeat = false;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        x->owns[k] = x->token[k] >= 0 && x->slot[k] < 0;
        claim[k] = x->owns[k] ? atomicMax(kvpc_at(s.map, x->token[k]), INT32_MAX - (int32_t)(x->first + k)) : -1;
    }
    kvpc_find_hosts(p, s, *x, host);
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        repeat = repeat || claim[k] >= 0;
    if (!__syncthreads_or(repeat))
        return false;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        x->owns[k] =
            x->owns[k] && kvpc_load_new((uintptr_t)kvpc_at(s.map, x->token[k])) == INT32_MAX - (int32_t)(x->first + k);
    return true;
}

/* Gives slots to the tokens of this thread's entries that lack one, and lists the rows to copy: *listed so far. */
KVPRIM_DEVICE void kvpc_take_slots(const kvpc_fetch &p, kvpc_fetch_block *b, kvpc_fetch_state *s, kvpc_entries *x,
                                   uint32_t *listed, uint32_t launch)
{
    int32_t freed[kvpc_fetch_each], host[kvpc_fetch_each];
    bool takes[kvpc_fetch_each];
    uint32_t own = 0, wanted;
    kvpc_load_log(p, *s, s->head + threadIdx.x * p.each, freed);
    const bool repeat = kvpc_claim(p, *s, x, host);
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        takes[k] = x->owns[k] && (host[k] >= 0 || x->first + k < p.first_wanted), own += takes[k];
    uint64_t list = p.list + 16 * (uint64_t)x->first;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        if (!p.shared && k < p.each && x->first + k < p.entries)
            kvpc_tell(list + 16 * k, (uint32_t)(takes[k] ? host[k] : -1), launch);
    uint32_t rank = kvpc_sum_up(b->sums[1], own, &wanted) - own;
    if (p.shared) {
        const bool last = x->first - threadIdx.x * p.each + p.span >= p.entries;
        if (threadIdx.x == 0)
            b->first = kvpc_reserve(p, launch, wanted, last);
        __syncthreads();
        list = p.list + 16 * (uint64_t)((uint32_t)b->first + rank);
        for (uint32_t k = 0, to = 0; k < kvpc_fetch_each; k++)
            if (takes[k])
                kvpc_tell(list + 16 * to++, (uint32_t)host[k], launch);
        if (last && b->first >> 32 == p.count - 1)
            kvpc_end_list(p, (uint32_t)b->first + wanted, launch);
    }
    const uint32_t n = wanted ? kvpc_read_log(p, b, s, freed, wanted) : 0;
    for (uint32_t k = 0, to = 0; k < kvpc_fetch_each; k++) {
        if (!takes[k])
            continue;
        x->slot[k] = rank < n ? b->slots[rank] : -1;
        const uint32_t row = rank < n ? (uint32_t)s->number * p.hot_rows + (uint32_t)x->slot[k] : UINT32_MAX;
        kvpc_tell(list + 16 * (p.shared ? to++ : k) + 8, row, launch);
        if (p.plan_src && rank < n) {
            const uint64_t at = 4 * ((uint64_t)s->request * p.entries + *listed + rank);
            *kvpc_at((uintptr_t)p.plan_src + at, 0) = host[k];
            *kvpc_at((uintptr_t)p.plan_dst + at, 0) = (int32_t)row;
        }
        rank++;
    }
    *listed += n;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++)
        if (x->owns[k]) {
            uint32_t old = UINT32_MAX;
            if (x->slot[k] >= 0)
                old = atomicExch((uint32_t *)kvpc_at(s->map - 4 * (uint64_t)p.hot_rows, x->slot[k]),
                                 (uint32_t)x->token[k]);
            if (old < p.tokens)
                *kvpc_at(s->map, (int32_t)old) = -1;
            *kvpc_at(s->map, x->token[k]) = x->slot[k];
        }
    if (repeat) {
        __syncthreads();
        kvpc_find_slots(p, *s, x);
    }
    kvpc_use_slots(*s, *x);
}

/* Tells the rows of this thread's entries, and counts them. Of a request that is not served all are -1. */
KVPRIM_DEVICE void kvpc_tell_rows(const kvpc_fetch &p, const kvpc_fetch_state &s, const kvpc_entries &x, bool served)
{
    const uint32_t wanted = p.entries - p.first_wanted;
    int32_t *const rows = p.rows + (uint64_t)s.request * wanted;
    int32_t *const fresh = p.fresh_rows + (uint64_t)s.request * p.first_wanted;
    uint32_t n = 0;
    for (uint32_t k = 0; k < kvpc_fetch_each; k++) {
        const uint32_t e = x.first + k;
        if (k >= p.each || e >= p.entries)
            break;
        const int32_t row = x.slot[k] < 0 ? -1 : (int32_t)((uint32_t)s.number * p.hot_rows) + x.slot[k];
        *kvpc_at((uintptr_t)(e < p.first_wanted ? fresh + e : rows + (e - p.first_wanted)), 0) = row;
        if (served)
            *kvpc_at(s.log, (int32_t)(s.base + e)) = x.slot[k];
        n += row < 0              ? (uint32_t)(x.token[k] != -1 && (int64_t)s.number >= 0) << 20
             : e < p.first_wanted ? 0
             : x.owns[k]          ? 1u << 10
                                  : 1;
    }
    if (!p.counters[0] && !p.counters[1] && !p.counters[2])
        return;
    for (uint32_t mask = 1; mask < 32; mask *= 2)
        n += kvpc_shuffle_xor(n, mask);
    for (uint32_t k = 0; k < 3; k++)
        if (threadIdx.x % 32 == 0 && p.counters[k] && (n >> 10 * k & 1023))
            atomicAdd(p.counters[k], n >> 10 * k & 1023);
}

/* >>impl_fetch_kernel

   Loads a request's state and its first entries. Nothing is written, as another block may look it up, and nobody waits
   for the last loads: a number is drawn meanwhile. */
KVPRIM_DEVICE void kvpc_load_state(const kvpc_fetch &p, kvpc_fetch_state *s, kvpc_entries *x)
{
    s->number = (uint64_t)kvpc_load_number(p.state + (p.state_wide ? 8 : 4) * (uint64_t)s->request, p.state_wide);
    kvpc_load_tokens(p, s->request, x);
    const uint64_t ends = p.first_state + p.state_bytes * (s->number < p.states ? s->number : 0);
    s->log = ends + 4 * kvpi_fetch_ends, s->stamp = s->log + 4 * (uint64_t)p.logged;
    s->map = s->stamp + 8 * (uint64_t)p.hot_rows;
    s->head = (uint32_t)kvpc_load_new(ends), s->base = (uint32_t)kvpc_load_new(ends + 4);
    kvpc_load_slots(*s, x);
}

/* See kvpi_fetch_request. */
KVPRIM_DEVICE void kvpc_fetch_request(const kvpc_fetch &p, kvpc_fetch_block *b, kvpc_fetch_state *s, kvpc_entries *x,
                                      uint32_t launch)
{
    const uint32_t own = x->first, room = p.logged - p.entries;
    const bool served = b->served, parts = p.span < p.entries;
    bool lacks = false;
    uint32_t listed = 0;
    uint64_t first = 0;
    s->base = s->base < room ? s->base : room, s->head = s->head < s->base ? s->head : s->base;
    kvpc_check_slots(p, x);
    for (; served && x->first - own < p.entries; x->first += p.span) { /* what is there stays there */
        if (x->first != own) {
            kvpc_load_tokens(p, s->request, x);
            kvpc_find_slots(p, *s, x);
        }
        kvpc_use_slots(*s, *x);
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            lacks = lacks || (x->token[k] >= 0 && x->slot[k] < 0);
    }
    const bool missing = __syncthreads_or(lacks);
    if (!missing && !p.shared)
        kvpc_end_list(p, 0, launch);
    else if (!missing && threadIdx.x == 0)
        first = kvpc_reserve(p, launch, 0, true);
    for (x->first = own; x->first - own < p.entries; x->first += p.span) {
        if (parts) {
            kvpc_load_tokens(p, s->request, x);
            kvpc_find_slots(p, *s, x);
        }
        for (uint32_t k = 0; k < kvpc_fetch_each; k++)
            x->owns[k] = false, x->slot[k] = served ? x->slot[k] : -1;
        if (missing)
            kvpc_take_slots(p, b, s, x, &listed, launch);
        kvpc_tell_rows(p, *s, *x, served);
        if (parts)
            __syncthreads(); /* the next tokens may be the same */
    }
    if (!missing && p.shared) {
        if (threadIdx.x == 0)
            b->first = first;
        __syncthreads();
        if (b->first >> 32 == p.count - 1)
            kvpc_end_list(p, (uint32_t)b->first, launch);
    }
    for (uint32_t k = listed + threadIdx.x; p.plan_src && k < p.entries; k += blockDim.x) {
        const uint64_t at = 4 * ((uint64_t)s->request * p.entries + k);
        *kvpc_at((uintptr_t)p.plan_src + at, 0) = *kvpc_at((uintptr_t)p.plan_dst + at, 0) = -1;
    }
    s->base += p.entries;
    if (served && s->base > p.longest)
        kvpc_make_room(p, b, s);
    if (served && threadIdx.x == 0)
        *kvpc_at(s->log - 4 * kvpi_fetch_ends, 0) = (int32_t)s->head,
                                               *kvpc_at(s->log - 4 * kvpi_fetch_ends, 1) = (int32_t)s->base;
}

/* Copies the share of one of `copiers` blocks of the rows that are listed. `words`: rows are whole aligned
   words, so they are loaded before their destination is known. */
KVPRIM_DEVICE void kvpc_copy_listed(const kvpc_fetch &p, const kvpc_fetch_part &part, bool words, uint32_t launch,
                                    uint32_t copier)
{
    const kvpc_task &t = part.task;
    const uint32_t lanes = 1u << part.lanes_shift, lane = threadIdx.x & (lanes - 1), at = 16 * lane;
    const uint32_t copiers = p.draws - p.count, groups = copiers * (blockDim.x >> part.lanes_shift);
    for (uint32_t work = copier + copiers * (threadIdx.x >> part.lanes_shift); work < part.total; work += groups) {
        const uint32_t e = kvpc_divide(work, t.chunks);
        const uint64_t at_src = p.list + 16 * (uint64_t)e, at_dst = at_src + 8;
        uint64_t src, dst;
        uint4 v[kvpc_fetch_loads];
        do
            src = kvpc_load_told(at_src), dst = kvpc_load_told(at_dst);
        while (src >> 32 != launch);
        if ((int32_t)src == kvpc_fetch_end)
            break;
        if ((int32_t)src < 0)
            continue;
        while (!words && dst >> 32 != launch)
            dst = kvpc_load_told(at_dst);
        const kvpc_spot<uint32_t> s = {
            0, work - e * (uint32_t)t.chunks.by, part.dst.base, part.src.base, words ? 0 : (int32_t)dst, (int32_t)src};
        kvpc_chunk c = kvpc_chunk_at<false>(part, t, s, false); /* of whole words: in row 0 of dst, so far */
        if (!words) {
            kvpc_copy_chunk<1>(c, lane, lanes);
            continue;
        }
        kvpc_load_once<kvpc_fetch_loads>(c, at, 16 * lanes, v);
        while (dst >> 32 != launch)
            dst = kvpc_load_told(at_dst);
        if (kvpc_is_inside(t.dst_rows, (int32_t)dst)) {
            c.dst += kvpc_place(t.dst, (uint32_t)dst);
            kvpc_store_once<kvpc_fetch_loads>(c, at, 16 * lanes, v);
        }
    }
}

/* A block first guesses that it draws its own number: its state is then there when it has drawn. If there are blocks
   enough, each draws once: those that look up do not copy. */
static __global__ void __launch_bounds__(kvpc_fetch_threads)
    kvpc_fetch_kernel(const KVPRIM_GRID_CONSTANT kvpc_fetch KVPRIM_IN_PLACE p)
{
    __shared__ kvpc_fetch_block b;
    kvpc_fetch_state s = {};
    kvpc_entries x = {};
    bool draws = true;
    s.request = blockIdx.x;
    kvpc_pdl_wait(p.pdl);
    for (;;) {
        x.first = threadIdx.x * p.each;
        s.number = UINT64_MAX;
        if (s.request < p.count)
            kvpc_load_state(p, &s, &x);
        if (threadIdx.x == 0) {
            b.drawn = draws ? kvpc_draw(p) : b.drawn;
            b.served = (uint32_t)b.drawn == s.request && kvpc_is_first(p, s.number, (uint32_t)(b.drawn >> 32));
        }
        __syncthreads();
        if ((uint32_t)b.drawn >= p.count)
            break;
        draws = (uint32_t)b.drawn == s.request;
        s.request = (uint32_t)b.drawn;
        if (draws) {
            kvpc_fetch_request(p, &b, &s, &x, (uint32_t)(b.drawn >> 32));
            if (p.draws == gridDim.x)
                return;
            s.request += gridDim.x;
        }
        __syncthreads();
    }
    KVPRIM_ROLLED
    for (uint32_t k = 0; k < p.parts; k++)
        kvpc_copy_listed(p, p.part[k], p.aligned >> k & 1, (uint32_t)(b.drawn >> 32), (uint32_t)b.drawn - p.count);
}

typedef struct kvpc_fetch_reset {
    uint64_t memory, words, states, total; /* words that become zeros at `memory`; of the states */
    kvpi_fetch_layout layout;
    uint32_t pdl;
} kvpc_fetch_reset;

static __global__ void __launch_bounds__(kvpc_fetch_threads)
    kvpc_fetch_reset_kernel(const KVPRIM_GRID_CONSTANT kvpc_fetch_reset KVPRIM_IN_PLACE p)
{
    const uint64_t threads = (uint64_t)gridDim.x * blockDim.x, first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    kvpc_pdl_wait(p.pdl);
    for (uint64_t w = first; w < p.words; w += threads)
        *(int32_t *)kvpc_global(p.memory + 4 * w) = 0;
    for (uint64_t w = first; w < p.total; w += threads)
        *(int32_t *)kvpc_global(p.states + 4 * w) =
            kvpi_fetch_empty(&p.layout, (int64_t)w - kvpi_divided((int64_t)w, p.layout.each) * p.layout.each);
}

/* Everything but what is copied, and by which blocks. d is resolved. */
static kvpc_fetch kvpc_fetch_of(const kvpc_call *call, const kvprim_fetch_desc *d, uint32_t threads)
{
    const kvpi_fetch_layout l = kvpi_fetch_layout_of(&d->set);
    const uint64_t size = kvpc_index_size(d->wanted_type), page_size = kvpc_index_size(d->pages_type);
    const int64_t gap = d->steps > 1 ? d->wanted_stride - d->top_k : 0;
    kvpc_fetch p = {};
    p.memory = (uintptr_t)d->set.memory, p.list = p.memory + (uint64_t)l.list;
    p.first_state = p.memory + (uint64_t)l.states, p.state_bytes = 4 * (uint64_t)l.each;
    p.state = (uintptr_t)d->state, p.fresh = (uintptr_t)d->fresh, p.first_wanted = (uint32_t)d->fresh_count;
    p.wanted = (uintptr_t)d->wanted - size * p.first_wanted, p.fresh_step = size * (uint64_t)d->fresh_stride;
    p.wanted_step = size * (uint64_t)d->steps * (uint64_t)d->wanted_stride, p.step_gap = size * (uint64_t)gap;
    p.by_top_k = kvpc_divisor_of(d->top_k).narrow, p.pdl = call->launch.pdl != 0;
    p.pages = (uintptr_t)d->pages, p.pages_step = page_size * (uint64_t)d->pages_stride;
    p.by_page = kvpc_divisor_of(d->page_rows), p.max_pages = (uint64_t)d->max_pages;
    p.state_wide = d->state_type == KVPRIM_I64, p.wide = size == 8, p.pages_wide = d->pages_type == KVPRIM_I64;
    p.pages_by_state = d->pages_by_state != 0, p.host_rows = (uint32_t)d->host_rows, p.count = (uint32_t)d->count;
    p.entries = p.first_wanted + (uint32_t)(d->steps * d->top_k);
    p.each = p.entries <= threads ? 1 : (uint32_t)kvpc_fetch_each, p.span = threads * p.each;
    p.shared = p.count > 1 || p.span < p.entries, p.states = (uint64_t)d->set.states;
    p.tokens = (uint32_t)d->set.tokens, p.hot_rows = (uint32_t)d->set.hot_rows;
    p.logged = (uint32_t)l.logged, p.longest = p.logged - (uint32_t)d->set.entries;
    p.rows = d->rows, p.fresh_rows = d->fresh_rows, p.plan_src = d->plan_src, p.plan_dst = d->plan_dst;
    p.counters[0] = d->hits, p.counters[1] = d->misses, p.counters[2] = d->rejected;
    return p;
}

static kvprim_status kvpc_run_fetch(const kvpc_call *call, const kvprim_fetch_desc *d, const kvprim_move *moves)
{
    const int64_t entries = d->fresh_count + d->steps * d->top_k;
    const kvpc_slice slice = {0, 1, 0, d->count * entries};
    uint32_t threads = kvpc_fetch_least_threads;
    KVPRIM_REFUSE((uint64_t)d->count * (uint64_t)entries >> 31, SIZE,
                  "%s: count is %lld, with %lld entries each: together 2^31 or more", call->function,
                  (long long)d->count, (long long)entries);
    while (threads < kvpc_fetch_threads && threads < entries)
        threads *= 2;
    kvpc_fetch p = kvpc_fetch_of(call, d, threads);
    for (const kvprim_move *m = moves; m < moves + 2 && m->count; m++) {
        kvpc_fetch_part *const part = &p.part[p.parts++];
        p.aligned |= (uint32_t)kvpc_fill_listed(call, m, &slice, part) << (part - p.part);
        const uint64_t unit = part->task.unit_bytes;
        kvpc_cut(part, &part->task, 1, unit <= 16 ? 0 : unit <= 256 ? 3 : unit <= 512 ? 4 : 5, kvpc_fetch_loads);
        KVPRIM_REFUSE(part->total >= (uint64_t)1 << 31, SIZE,
                      "%s: count is %lld, with %lld entries each, and %s %lld: together 2^31 pieces or more",
                      call->function, (long long)d->count, (long long)entries, m->names->row_bytes,
                      (long long)m->row_bytes);
    }
    const uint64_t wanted = p.count + (p.parts ? (uint64_t)kvpc_fetch_copiers : 0);
    const uint64_t most = call->launch.max_sms ? (uint64_t)call->launch.max_sms : kvpc_multiprocessors();
    const uint32_t blocks = (uint32_t)(wanted < most ? wanted : most);
    p.draws = blocks + (blocks < wanted ? p.count : 0);
    for (uint32_t k = 0; k < p.parts; k++) {
        const uint32_t groups = (p.draws - p.count) * (threads >> p.part[k].lanes_shift);
        p.groups = groups > p.groups ? groups : p.groups;
    }
    return kvpc_start(call, kvpc_fetch_kernel, blocks, threads, p);
}

/* KVPRIM_DEBUG: see kvpc_check_bytes. */
static kvprim_status kvpc_check_fetch_memory(const char *function, const kvprim_fetch_desc *d)
{
    const uint64_t n = (uint64_t)d->count, of_pages = (uint64_t)(d->pages_by_state ? d->set.states : d->count);
    const uint64_t rows = n * (uint64_t)d->steps, top_k = (uint64_t)d->top_k, fresh = (uint64_t)d->fresh_count;
    const uint64_t in_wanted = (rows - 1) * (uint64_t)d->wanted_stride + top_k, plan = 4 * (n * fresh + rows * top_k);
    const uint64_t in_fresh = fresh ? (n - 1) * (uint64_t)d->fresh_stride + fresh : 0;
    const uint64_t in_pages = (of_pages - 1) * (uint64_t)d->pages_stride + (uint64_t)d->max_pages;
    KVPRIM_TRY(kvpc_check_bytes(function, "state", d->state, n * kvpc_index_size(d->state_type)));
    KVPRIM_TRY(kvpc_check_bytes(function, "wanted", d->wanted, in_wanted * kvpc_index_size(d->wanted_type)));
    KVPRIM_TRY(kvpc_check_bytes(function, "fresh", d->fresh, in_fresh * kvpc_index_size(d->wanted_type)));
    KVPRIM_TRY(kvpc_check_bytes(function, "pages", d->pages, in_pages * kvpc_index_size(d->pages_type)));
    KVPRIM_TRY(kvpc_check_bytes(function, "rows", d->rows, 4 * rows * top_k));
    KVPRIM_TRY(kvpc_check_bytes(function, "fresh_rows", d->fresh_rows, 4 * n * fresh));
    KVPRIM_TRY(kvpc_check_bytes(function, "plan_src", d->plan_src, plan));
    KVPRIM_TRY(kvpc_check_bytes(function, "plan_dst", d->plan_dst, plan));
    KVPRIM_TRY(kvpc_check_bytes(function, "hits", d->hits, 4));
    KVPRIM_TRY(kvpc_check_bytes(function, "misses", d->misses, 4));
    return kvpc_check_bytes(function, "rejected", d->rejected, 4);
}

static kvprim_status kvpc_run_fetch_reset(const kvpc_call *call, const kvprim_fetch_set *set, int64_t state)
{
    kvpc_fetch_reset p;
    p.layout = kvpi_fetch_layout_of(set), p.pdl = call->launch.pdl != 0;
    p.memory = (uintptr_t)set->memory, p.words = state < 0 ? (uint64_t)p.layout.states / 4 : 0;
    p.states = p.memory + (uint64_t)(p.layout.states + 4 * p.layout.each * (state < 0 ? 0 : state));
    p.total = (uint64_t)(p.layout.each * (state < 0 ? set->states : 1));
    const uint64_t wanted = (p.words + p.total) / (4 * kvpc_fetch_threads) + 1;
    const uint64_t most = call->launch.max_sms ? (uint64_t)call->launch.max_sms : 2 * (uint64_t)kvpc_multiprocessors();
    return kvpc_start(call, kvpc_fetch_reset_kernel, (uint32_t)(wanted < most ? wanted : most), kvpc_fetch_threads, p);
}
#endif

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

KVPRIM_API kvprim_status kvprim_cuda_slots(const kvprim_slots_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_slots");
    kvprim_slots_desc d;
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(kvprim_slots_check(desc, &d)));
    if (d.count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_begin_call(&call, "kvprim_cuda_slots", launch));
    KVPRIM_TRY(kvpc_check_slots_memory(call.function, &d));
    return kvpc_run_slots(&call, &d);
}

KVPRIM_API kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_transfer");
    kvprim_move move;
    const kvprim_status checked = kvprim_transfer_moves(desc, &move);
    if (checked == KVPRIM_OK)
        KVPRIM_TRY(kvpc_check_reach("kvprim_cuda_transfer", &move));
    return kvpc_run("kvprim_cuda_transfer", checked, &move, 1, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_move(const kvprim_move *moves, size_t n, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_move");
    KVPRIM_REFUSE(!moves && n, NULL, "kvprim_cuda_move: moves is NULL");
    return kvpc_run("kvprim_cuda_move", KVPRIM_OK, moves, n, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_unpack");
    return kvpc_run_unpack("kvprim_cuda_unpack", desc, kvprim_unpack_check, launch);
}

KVPRIM_API kvprim_status kvprim_cuda_unpack_meta(const kvprim_unpack_meta_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_unpack_meta");
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(kvprim_unpack_meta_check(desc)));
    if (desc->max_count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_begin_call(&call, "kvprim_cuda_unpack_meta", launch));
    KVPRIM_TRY(kvpc_check_meta_memory(call.function, desc));
    return kvpc_run_meta(&call, desc);
}

KVPRIM_API kvprim_status kvprim_cuda_copy(const kvprim_copy_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_copy");
    return kvpc_run_unpack("kvprim_cuda_copy", desc, kvprim_copy_check, launch);
}

#ifndef KVPRIM_NO_FETCH
KVPRIM_API kvprim_status kvprim_cuda_fetch(const kvprim_fetch_desc *desc, const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_fetch");
    kvprim_fetch_desc d;
    kvprim_move moves[2];
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(kvprim_fetch_check(desc, &d, moves)));
    if (d.count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpc_begin_call(&call, "kvprim_cuda_fetch", launch));
    KVPRIM_TRY(kvpc_check_reachable(call.function, "set.memory", d.set.memory, (uint64_t)d.set.bytes));
    for (int part = 0; part < 2; part++)
        KVPRIM_TRY(kvpc_check_reach(call.function, &moves[part]));
    KVPRIM_TRY(kvpc_check_memory(call.function, moves, 2));
    KVPRIM_TRY(kvpc_check_fetch_memory(call.function, &d));
    return kvpc_run_fetch(&call, &d, moves);
}

KVPRIM_API kvprim_status kvprim_cuda_fetch_reset(const kvprim_fetch_set *set, int64_t state,
                                                 const kvprim_cuda_launch *launch)
{
    KVPRIM_RANGE("kvprim_cuda_fetch_reset");
    kvpc_call call;
    KVPRIM_TRY(kvpc_checked(kvprim_fetch_reset_check(set, state)));
    KVPRIM_TRY(kvpc_begin_call(&call, "kvprim_cuda_fetch_reset", launch));
    KVPRIM_TRY(kvpc_check_reachable(call.function, "set.memory", set->memory, (uint64_t)set->bytes));
    return kvpc_run_fetch_reset(&call, set, state);
}
#endif

#endif /* implementation */

/* Copyright (c) 2026 the kvprim authors, under the MIT License: its text ends kvprim.h, which this header needs. */

/* kvprim_cuda.cuh: kvprim's gather, store, transfer and unpack on the GPU, callable from C. CUDA.

   This version DECLARES these functions and does not implement them yet. Code may be written and compiled against the
   declarations; it does not link. What is implemented: the same operations on the CPU, in kvprim.h.

       #include "kvprim_cuda.cuh"

       kvprim_status fetch(const kvprim_gather_desc *rows, struct CUstream_st *stream)
       {
           kvprim_cuda_launch launch = {0};
           launch.stream = stream;
           return kvprim_cuda_gather(rows, &launch);
       }

   What it does: moves rows in the memory of the current device, by the descriptors of kvprim.h, with the results of the
   functions there byte for byte. Neither CUDA's headers nor nvcc are needed to call it: cudaStream_t is a
   struct CUstream_st *.

   What it does NOT do: allocate, synchronise, create streams or events, print.

   Contents, search for the tag:
       >>config      macros you may define
       >>launch      stream, overlap with the kernel before, share of the GPU
       >>move        the four operations
       >>device      device functions, for one's own kernels

   Rules that hold for every function here
       Errors     A descriptor is checked as in kvprim.h before anything is enqueued. KVPRIM_ERROR_CUDA: CUDA refused
                  the launch; kvprim_last_error() says with what. An error that happens on the GPU is reported by CUDA.
       Stream     Only enqueues, on the given stream of the current device. May be captured into a graph.
       Threads    Every function may be called from any number of threads at once.
       Memory     Tables, indices and `rejected` are read and written by the GPU: device memory, managed memory, or
                  pinned host memory that the device can address. They must stay valid until the work is done.
                  Descriptors, fragments and the arrays of layer pointers are host memory, free to reuse on return.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_CUDA_IMPLEMENTATION  in one translation unit: implements this header alone. An error in this version.
   KVPRIM_IMPLEMENTATION, KVPRIM_STATIC  as in kvprim.h. In this version there is nothing here that they apply to.
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
    struct CUstream_st *stream; /* NULL: the legacy default stream */
    int32_t pdl;                /* 1: programmatic dependent launch. May start before the kernel ahead of it in the
                                   stream has ended, and waits for that one's memory before its first access */
    int32_t max_sms;            /* leave the rest of the GPU's multiprocessors to others; 0: no limit */
} kvprim_cuda_launch;

/* >>move -----------------------------------------------------------------------------------------------------------

   Each as the function of kvprim.h without _cuda in its name: same descriptor, rules, aliasing and errors. launch may
   be NULL; a negative max_sms or a pdl other than 0 and 1 is KVPRIM_ERROR_ARGUMENT. */
extern kvprim_status kvprim_cuda_gather(const kvprim_gather_desc *desc, const kvprim_cuda_launch *launch);
extern kvprim_status kvprim_cuda_store(const kvprim_store_desc *desc, const kvprim_cuda_launch *launch);
extern kvprim_status kvprim_cuda_transfer(const kvprim_transfer_desc *desc, const kvprim_cuda_launch *launch);

/* desc->workspace: pinned host memory for batches that exceed a kernel's parameters, at least
   kvprim_unpack_workspace_bytes(count) of it, not to be touched until the work is done. NULL: such a batch takes
   several launches. */
extern kvprim_status kvprim_cuda_unpack(const kvprim_unpack_desc *desc, const kvprim_cuda_launch *launch);

#ifdef __cplusplus
}
#endif

/* >>device ---------------------------------------------------------------------------------------------------------

   For one's own kernels, destination first. All 32 threads of a warp call it with the same arguments. Any size and any
   alignment of either side, which must not overlap. No barrier inside: what was written is visible to the calling
   thread only, until the kernel synchronises as it needs. */
#ifdef __CUDACC__
extern __device__ void kvprim_warp_copy(void *dst, const void *src, size_t bytes);
extern __device__ void kvprim_warp_zero(void *dst, size_t bytes);
#endif

#endif /* KVPRIM_CUDA_CUH */

#ifdef KVPRIM_CUDA_IMPLEMENTATION
#error "kvprim_cuda.cuh only declares its functions in this version: leave KVPRIM_CUDA_IMPLEMENTATION undefined"
#endif

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

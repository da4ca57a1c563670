/* kvprim_nccl.h: one communicator per GPU and the collectives that an inference engine needs, on NCCL, callable from C.

   This version DECLARES these functions and does not implement them yet. Code may be written and compiled against the
   declarations; it does not link.

       #include "kvprim_nccl.h"

       kvprim_status sum(kvprim_comm *comm, void *hidden, size_t count, struct CUstream_st *stream)
       {
           return kvprim_all_reduce(comm, hidden, hidden, count, KVPRIM_BF16, KVPRIM_SUM, stream);
       }

   What it does: reduces and gathers tensors across the GPUs of one job, and sends them from one to another. Neither
   CUDA's nor NCCL's headers are needed to call it: cudaStream_t is a struct CUstream_st *, ncclComm_t a
   struct ncclComm *.

   What it does NOT do: start processes or threads, carry the id from rank 0 to the others, choose the device.

   Contents, search for the tag:
       >>config      macros you may define
       >>types       element types and reductions
       >>comm        a communicator: create, look after, end
       >>collective  reduce, gather, scatter, broadcast, send, receive

   Rules that hold for every function here
       Errors     KVPRIM_ERROR_NCCL, _CUDA: the call below failed; kvprim_last_error() says which and with what.
                  KVPRIM_ERROR_TIMEOUT: says which rank waited for which.
       Stream     A collective only enqueues, on the given stream of the communicator's device; NULL: the legacy default
                  stream. Every rank calls the same collectives in the same order.
       Threads    One communicator is used by one thread at a time; different ones by different threads at once.
                  kvprim_comm_abort may be called from any thread.
       Alignment  Any that the element type allows.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_NCCL_IMPLEMENTATION  in one translation unit: implements this header alone. An error in this version.
   KVPRIM_IMPLEMENTATION, KVPRIM_STATIC  as in kvprim.h. In this version there is nothing here that they apply to.
*/
#ifndef KVPRIM_NCCL_H
#define KVPRIM_NCCL_H

#include "kvprim.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */
struct ncclComm;    /* what an ncclComm_t points to */

/* >>types ---------------------------------------------------------------------------------------------------------- */

typedef enum kvprim_dtype {
    KVPRIM_U8 = 0, /* bytes: moved, not reduced */
    KVPRIM_F16 = 1,
    KVPRIM_BF16 = 2,
    KVPRIM_F32 = 3
} kvprim_dtype;

typedef enum kvprim_op { KVPRIM_SUM = 0, KVPRIM_MAX = 1 } kvprim_op;

/* >>comm ----------------------------------------------------------------------------------------------------------- */

/* Made by one rank, carried to all others by the caller. */
typedef struct kvprim_comm_id {
    char bytes[128];
} kvprim_comm_id;

/* Zero-initialise, then set what differs. */
typedef struct kvprim_comm_desc {
    int32_t rank, world;   /* 0 <= rank < world */
    kvprim_comm_id id;     /* the same on every rank */
    size_t buffer_bytes;   /* symmetric buffer, the same on every rank; 0: none */
    int32_t timeout_ms;    /* for waits on other ranks; 0: 30 s */
    int32_t deterministic; /* 1: sums in fp32 and in the order of the ranks at every size: the same bits always */
} kvprim_comm_desc;

/* In the caller's memory and not to be moved while in use. The fields are the implementation's: read, don't write. */
typedef struct kvprim_comm {
    struct ncclComm *nccl;
    int32_t rank, world, device;
    int32_t timeout_ms, deterministic;
    void *buffer;
    size_t buffer_bytes;
} kvprim_comm;

extern kvprim_status kvprim_comm_new_id(kvprim_comm_id *out);

/* Collective, on the current device: returns when all `world` ranks have called it, or with KVPRIM_ERROR_TIMEOUT. */
extern kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc);

/* Collective: waits for the work enqueued before, then frees what kvprim_comm_init made. */
extern kvprim_status kvprim_comm_destroy(kvprim_comm *comm);

/* Not collective: gives up the work that is under way and frees. For a rank whose peers are gone. */
extern kvprim_status kvprim_comm_abort(kvprim_comm *comm);

/* What went wrong since the last call without a call to report it: a dead rank, a timeout. Does not wait. */
extern kvprim_status kvprim_comm_check(kvprim_comm *comm);

/* The symmetric buffer; *bytes, if bytes is not NULL, receives its size. Tensors placed in it need no staging. */
extern void *kvprim_comm_buffer(kvprim_comm *comm, size_t *bytes);

/* Versions, links, which fast paths are on, and of the others why not. Valid as long as comm. */
extern const char *kvprim_comm_describe(const kvprim_comm *comm);

/* >>collective -----------------------------------------------------------------------------------------------------

   Counts are elements. count == 0 is KVPRIM_OK and enqueues nothing. Where both are given, recv and send are the same
   pointer (in place) or do not overlap. all_gather in place: send = recv + rank * send_count elements; reduce_scatter
   in place: recv = send + rank * recv_count elements.
   Errors: NULL, SIZE (bytes beyond size_t), ARGUMENT (dtype, op, rank), CUDA, NCCL. */
extern kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count,
                                       kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream);

/* recv: world * send_count elements, those of rank r at r * send_count. */
extern kvprim_status kvprim_all_gather(kvprim_comm *comm, void *recv, const void *send, size_t send_count,
                                       kvprim_dtype dtype, struct CUstream_st *stream);

/* send: world * recv_count elements; rank r receives the reduction of those at r * recv_count. */
extern kvprim_status kvprim_reduce_scatter(kvprim_comm *comm, void *recv, const void *send, size_t recv_count,
                                           kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream);

/* buf of rank `root` to buf of every other. */
extern kvprim_status kvprim_broadcast(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t root,
                                      struct CUstream_st *stream);

/* A send and the peer's recv of the same count and dtype meet; both sides' kernels wait for the other. */
extern kvprim_status kvprim_send(kvprim_comm *comm, const void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                 struct CUstream_st *stream);
extern kvprim_status kvprim_recv(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                 struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif /* KVPRIM_NCCL_H */

#ifdef KVPRIM_NCCL_IMPLEMENTATION
#error "kvprim_nccl.h only declares its functions in this version: leave KVPRIM_NCCL_IMPLEMENTATION undefined"
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

/* SPDX-License-Identifier: MIT */
/* kvprim_nccl.h: one communicator per GPU, and the collectives that an inference engine needs. On NCCL, callable in C.

   Do this, in a .cu file (a .c file works too, without the fast kernels):

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim_nccl.h"

       kvprim_comm comm = {0};
       kvprim_comm_desc desc = {0};
       desc.rank = rank, desc.world = world, desc.id = id;
       kvprim_status s = kvprim_comm_init(&comm, &desc);
       s = kvprim_all_reduce(&comm, hidden, hidden, count, KVPRIM_BF16, KVPRIM_SUM, stream);

   What it does: it reduces, gathers and exchanges tensors across the GPUs of one job, on one machine or many, and sends
   them from one GPU to another. Everything goes through NCCL 2.19 or newer, except what NCCL is slow at: reductions of
   floats (not of fp64, and no products), gathers and all-to-alls between GPUs of one machine that write to each other's
   memory. A caller needs neither CUDA's nor NCCL's headers: cudaStream_t is a struct CUstream_st *, and ncclComm_t a
   struct ncclComm *.

   What it does NOT do: it does not start processes, carry the id from rank 0 to the others, choose the device, or keep
   threads. (init, abort and destroy run NCCL's part, which may hang, on a thread that ends with it.)

   Contents, search for the tag:
       >>config           macros you may define
       >>op               reductions (element types are kvprim_dtype, in kvprim.h)
       >>comm             a communicator: create, watch, end
       >>collective       reduce, gather, scatter, all-to-all, broadcast, send, receive
       >>norm             an all-reduce with the residual and the RMSNorm that follow it
       >>group            sends and receives that meet
       >>ring             chunks from one rank to another, through a few buffers, with credits
       >>impl             the implementation, and its terms:
           exchange       >>impl_protocol   >>impl_device   >>impl_turn   >>impl_wait
           kernels        >>impl_pack   >>impl_sum   >>impl_ways   >>impl_pipeline   >>impl_parts   >>impl_kernel
           ... of norms   >>impl_norm   >>impl_norm_few   >>impl_norm_exchange   >>impl_norm_kernel
           host           >>impl_host   >>impl_state   >>impl_slots   >>impl_teardown
           init           >>impl_check   >>impl_exchange   >>impl_peers   >>impl_choose   >>impl_load
                          >>impl_describe   >>impl_init
           afterwards     >>impl_end   >>impl_watch
           collectives    >>impl_call   >>impl_launch   >>impl_launch_norm   >>impl_nccl   >>impl_group
                          >>impl_collective
           norms          >>impl_norm_call   >>impl_norm_check   >>impl_norm_host
           rings          >>impl_ring
       What a new element type touches: kvprim.h's >>impl_elements.

   Rules that hold for every function here
       Errors     Arguments are checked before anything is enqueued. After KVPRIM_ERROR_NCCL and _CUDA,
                  kvprim_last_error() says which call of theirs failed, and why.
       Stream     A collective only enqueues, on a stream of the communicator's device, which is the current device.
                  NULL is the legacy default stream. Every rank calls the same collectives, with the same counts, types
                  and operations, and they must run in the same order: on one stream, or on several that wait for each
                  other. They may be captured into a graph, on all ranks or on none.
       Threads    One thread at a time uses a communicator. Only kvprim_comm_check and kvprim_comm_abort may be called
                  from any thread at any time, from the start of init to the call of destroy, also while another thread
                  is inside init or a collective, and while streams are captured in any mode.
       Processes  Only the process that called init uses the communicator. In a child that fork() made later, check,
                  abort and destroy return KVPRIM_ERROR_ARGUMENT and touch nothing; the other calls must not be made.
       Failure    A rank that gives up or is aborted sends nothing more and tells the others. Each call that an own
                  kernel serves then either has the right result or is followed by an error on its rank.
       Alignment  Pointers are aligned to the element type. Multiples of 16 bytes are fastest. */

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_NCCL_IMPLEMENTATION  in one translation unit: implements this header alone; another unit must implement
                               kvprim.h. Needs the headers of CUDA and NCCL, and -pthread with an older C library. If
                               nvcc, or clang for CUDA, compiles it, it has the kernels too; they run with every NCCL
                               from 2.19 on, whichever version it was compiled with.
   KVPRIM_NO_KERNELS           in that unit: leaves them out, as a compiler for C does
   KVPRIM_NO_NORM              the same for the kernels of kvprim_all_reduce_norm, which then returns
                               KVPRIM_ERROR_UNSUPPORTED; init takes no memory for it. On all ranks or on none
   KVPRIM_NO_EXCHANGE          the same for those of all_gather, all_gatherv, all_to_all and all_to_allv, which NCCL
                               then serves. On all ranks or on none
   KVPRIM_EXPORT, KVPRIM_STATIC, KVPRIM_API, KVPRIM_NVTX   as in kvprim.h; init, destroy and abort have ranges too */
#include "kvprim.h"

#if KVPRIM_VERSION != 300
#error "kvprim_nccl.h 0.3.0 meets a kvprim.h of another version"
#endif
#ifndef KVPRIM_NCCL_H
#define KVPRIM_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

struct ncclComm; /* what an ncclComm_t points to */

/* >>op ------------------------------------------------------------------------------------------------------------- */

/* Own kernels do all of these except PROD, on fp16, bf16, fp32, e4m3 and e5m2: in fp32, in the order of the ranks, then
   rounded to the type. e4m3 and e5m2 saturate as in kvprim_format: an infinity, too, becomes the largest finite value.
   NCCL does the rest. MAX and MIN of own kernels: NaN if any element is, and +0 is larger than -0; NCCL takes a number
   before a NaN. AVG of own kernels: the sum in fp32, which may overflow, divided by world; NCCL divides integers by
   world after the sum, and multiplies other types by 1/world before it. */
typedef enum kvprim_op { KVPRIM_SUM = 0, KVPRIM_MAX = 1, KVPRIM_PROD = 2, KVPRIM_MIN = 3, KVPRIM_AVG = 4 } kvprim_op;

/* >>comm ----------------------------------------------------------------------------------------------------------- */

/* One rank makes it, and the caller carries it to all others. One id makes one communicator. */
typedef struct kvprim_comm_id {
    char bytes[128];
} kvprim_comm_id;

/* An all-gather of the caller's: on every rank it copies what rank r passes as `mine` to (char *)all + r * bytes, and
   returns 0 for success. init calls it up to four times, on the thread that called init, first with fewer bytes. It
   must end by itself: neither init_timeout_ms nor kvprim_comm_abort interrupts it. */
typedef int (*kvprim_exchange)(void *context, const void *mine, void *all, size_t bytes);

/* Zero-initialise, then set what differs. "The same" means the same on every rank; otherwise init fails on all of them.
   "Own kernels" are this library's, not NCCL's. KB and MB are 2^10 and 2^20 bytes. */
typedef struct kvprim_comm_desc {
    int32_t rank, world; /* 0 <= rank < world */
    kvprim_comm_id id;   /* the same; ignored if `nccl` is set */
    size_t buffer_bytes; /* size of the communicator's buffer, the same; 0: no buffer */
    int32_t timeout_ms;  /* how long a collective waits for other ranks, and some tens of ms more; 0: 30 s */
    /* 1, the same: own kernels reduce what they can (>>op) at every size, to the same bits; UNSUPPORTED if NCCL must */
    int32_t deterministic;
    /* 1: launches own kernels without programmatic dependent launch. With it, a kernel may start before its predecessor
       ends, and then waits for that one's memory. A predecessor that is launched that way too, and is not this
       library's, must itself have waited for what was before it. In a captured graph such a launch is a programmatic
       edge, which cudaGraphGetEdges returns only with edge data */
    int32_t no_pdl;
    /* 1: everything through NCCL, except what kvprim_all_reduce_norm does after a sum. One rank is enough */
    int32_t no_kernels;
    /* the most multiprocessors that an own kernel holds while it runs and waits for other ranks; 0: half of them. The
       smallest value of all ranks counts. Communicators whose kernels may run at the same time must fit on the GPU
       together: three of them need a third each. The kernel of a norm after a sum waits for nobody, and may take more.
       Below 57, norms of large tokens are slower: they use no clusters of blocks */
    int32_t max_sms;
    /* 1, the same: NCCL 2.27 and newer may use its symmetric kernels for tensors in the buffer. They are faster for
       some calls that NCCL serves, but no abort ends them, and an abort while any of NCCL's work is stuck leaves the
       buffer's memory to NCCL. Tensors must then lie in the buffer at the same offset on every rank, or outside it on
       every rank, and calls must not stand between ncclGroupStart and ncclGroupEnd. NCCL 2.28.0 to 2.30.6 starts these
       kernels too early; a memset of 4 bytes before each, which takes 5 us, prevents that. With `nccl` set, the buffer
       is not registered. Set nccl_window then if the tensors may lie in windows of the caller's, so that the memset is
       enqueued; these tensors must be aligned to 16 bytes on every rank or on none */
    int32_t nccl_window;
    int32_t init_timeout_ms; /* how long init waits for other ranks, all its waits together; 0: ten minutes */
    /* 1: own kernels let the kernel after them start early, if that is launched with programmatic dependent launch. The
       caller promises that each such kernel waits (griddepcontrol.wait, cudaGridDependencySynchronize) before it
       touches memory, as kvprim's own do. NCCL's may not: see nccl_window. What starts early holds multiprocessors
       while it waits, so ranks must not share a GPU. On sm_90 and newer, without no_pdl */
    int32_t launch_dependents;
    /* an NCCL communicator of the caller's with these ranks, which kvprim_comm_destroy and _abort do not end, nor its
       collectives. It must live until destroy is called or abort has returned. NULL: init makes one */
    struct ncclComm *nccl;
    /* own kernels serve up to so many bytes. The same on every rank; 0: see kvprim_comm_describe. The defaults are
       measured on H200s for 2 to 4 ranks (all_to_all: for 2), and estimated for more and for PCIe */
    size_t all_reduce_limit;     /* of the tensor; ignored if deterministic, and by kvprim_all_reduce_norm */
    size_t reduce_scatter_limit; /* that each rank sends; ignored if deterministic */
    /* that each rank receives. Of all_gatherv, all_to_all and all_to_allv, `world` times the largest part counts that
       one rank sends to another; by default less if parts differ */
    size_t all_gather_limit;
    /* init exchanges its data with this, so that NCCL need not run before the first collective; on all ranks or none */
    kvprim_exchange exchange;
    void *exchange_context;
    /* host array of `world` pointers: memory of every rank, as this GPU addresses it (a framework's symmetric memory,
       say), which own kernels use for their slots instead of memory that init allocates and exchanges. On every rank or
       on none. Aligned to 16; the caller must not read or write it until destroy has returned on all ranks */
    void *const *peers;
    size_t peer_bytes; /* size of each, at least 16 MB; the least of all ranks counts, up to 32 MB and 8,192 bytes */
    int64_t reserved;  /* must be 0 */
} kvprim_comm_desc;

/* Lives in the caller's memory, and must not move while in use. Its fields are the implementation's: read only. */
typedef struct kvprim_comm {
    struct ncclComm *nccl;
    int32_t rank, world, device;
    int32_t timeout_ms, deterministic, pdl, nccl_version;
    int32_t nccl_borrowed;           /* 1: nccl is the caller's */
    int32_t nccl_window, in_windows; /* as asked for; 1: tensors may lie in windows, on all ranks or on none */
    void *buffer;
    size_t buffer_bytes, all_reduce_limit, reduce_scatter_limit, all_gather_limit;

    uint32_t *stop; /* in pinned host memory: why own kernels must stop; 0: they must not */
    uint32_t *stop_on_gpu;
    void *peer[8]; /* every rank's page and slots, as this GPU addresses them; [0] NULL: no kernels */
    uint32_t blocks, block_slots;
    struct kvpn_slots *slots[8]; /* of this rank and of other ranks in this process; NULL: mapped, or the caller's */
    void *mapped[8];             /* by CUDA's IPC, of ranks in other processes */
    void *window;                /* NCCL's, around the buffer */
    void *scratch;               /* device memory for init's exchanges, and for kvpn_run_nccl */
    struct CUstream_st *stream;  /* for init's exchanges, and for abort */
    int64_t watch_start_us[2];   /* when each event of the teardown was recorded; 0: it is done */
    int32_t watch_index;
    int32_t after_nccl;                 /* bits: see kvpn_after_nccl_bit */
    int32_t nccl_starts_early;          /* see kvpn_run_nccl */
    int32_t nccl_reduces_f8;            /* 1: NCCL can reduce fp8, on all ranks */
    void *sums;                         /* for kvpn_sum_then_norm: kvpn_sums_bytes of device memory, or NULL */
    struct kvpn_teardown *teardown;     /* of nccl */
    struct CUstream_st *checked_stream; /* the last one that was found to be on the right device */
    char description[1016];             /* with the next two fields 1,024 bytes */
    int32_t clusters;                   /* 1: blocks of own kernels can form clusters, on all ranks */
    int32_t trigger;                    /* 1: own kernels let what follows them start early */
    int32_t link;                       /* the slowest between two ranks: kvpn_link */

    const struct kvprim_comm *self; /* itself from init to destroy; init's copy ends before this field */
    int32_t state, active_calls;    /* active_calls: of other threads; abort and destroy wait for them */
    int32_t notifying;              /* 1: kvpn_notify_ranks runs */
    int32_t process;                /* which called init */
} kvprim_comm;

/* Errors: NULL, NCCL. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_comm_new_id(kvprim_comm_id *out);

/* Collective, on the current device: returns when all `world` ranks have called it. Allocates and registers everything;
   nothing later does. Ranks may be processes or threads of one process.
   Own kernels are on if all ranks have them and can write to each other's memory on one machine (init tests it by
   writing), for 2 to 8 ranks, unless the environment has NCCL_P2P_DISABLE=1 or NCCL_P2P_LEVEL=LOC. Over PCIe they are
   on for two ranks only, and off if NCCL_P2P_LEVEL is set to less than SYS; a GPU that CUDA_VISIBLE_DEVICES hides from
   another rank's process counts as connected by NVLink. They take 32 MB of device memory; where they are compiled, on
   or off, kvprim_all_reduce_norm takes 8 MB for sums. kvprim_comm_describe says whether they are on, and if not, why.
   Errors, on every rank if ranks differ, or if another rank failed after NCCL's communicator was made: NULL, ARGUMENT
   (rank, world, timeouts, flags, peers, exchange, reserved; or flags and limits that differ), SIZE (peer_bytes;
   buffer_bytes, also if they differ), UNSUPPORTED (deterministic; or differing versions of kvprim, or what they
   leave out), TIMEOUT (after init_timeout_ms, or kvprim_comm_abort was called), CUDA, NCCL. After an error everything
   is freed, as destroy does after an abort; after a TIMEOUT with `nccl` set, once the caller ends it. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc);

/* Collective: first waits, without a timeout, for all work of the device, then frees what kvprim_comm_init made. If a
   collective may hang, call kvprim_comm_abort first: destroy is then not collective, and frees what is left. Ranks
   write to each other's memory, so destroy waits until the others have let go of this rank's: up to a second for ranks
   of this process (if one is later, a thread frees the memory then); for ranks of other processes up to timeout_ms or a
   second, whichever is longer, and a second after an abort or a TIMEOUT (if one is later, 32 MB stay allocated until
   the process ends). Graphs that hold own kernels of the communicator must not be launched any more; those that hold
   collectives of NCCL's must be destroyed before.
   Errors: NULL, ARGUMENT (not initialised, already destroyed, moved, another process), TIMEOUT (NCCL has not ended
   after timeout_ms because graphs with its collectives exist, or another call has not returned: only another destroy
   may follow, which goes on), CUDA, NCCL. */
KVPRIM_API kvprim_status kvprim_comm_destroy(kvprim_comm *comm);

/* For a rank whose peers are gone; not collective, from any thread. Ends the collectives that wait, whose results are
   lost, and tells the other ranks. Returns within a second. All memory, the buffer and what captured graphs touch,
   stays until kvprim_comm_destroy, which must follow; replays of such graphs end at once. During init it makes init
   fail. A call that is blocked inside NCCL returns with an error, as ncclCommAbort makes it.
   Errors: NULL, ARGUMENT (not initialised, already aborted, moved, another process). */
KVPRIM_API kvprim_status kvprim_comm_abort(kvprim_comm *comm);

/* Reports what went wrong since init if no call has reported it; does not wait. KVPRIM_OK while init runs.
   Errors: NULL, ARGUMENT (not initialised, aborted, moved, another process), NCCL (an error of a peer or of the
   network), CUDA (the device's context is dead), TIMEOUT, after which kvprim_comm_abort should be called: another
   thread may do so while this one sits in cudaStreamSynchronize, which then returns. Either an own kernel waited
   timeout_ms for a rank, here or on another rank, or another rank was aborted: the text says which; this and all later
   collectives ended without a result. Or a collective of NCCL's had not ended timeout_ms after the call: NCCL does not
   say which rank it waits for, and calls captured into graphs or between NCCL's own ncclGroupStart and ncclGroupEnd are
   not watched. A watchdog's thread should call cudaSetDevice once, or CUDA may make a context on device 0 for it. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_comm_check(kvprim_comm *comm);

/* The buffer, or NULL if there is none or comm is not alive; *bytes, unless bytes is NULL: its size. It is device
   memory for nccl_window (own kernels are as fast on any), aligned to 256, uninitialised, and lives until destroy. */
KVPRIM_API void *kvprim_comm_buffer(kvprim_comm *comm, size_t *bytes);

/* Versions, the slowest link between ranks, multiprocessors, limits, timeouts, which fast paths are on, and why the
   others are off. Valid as long as comm. */
KVPRIM_API const char *kvprim_comm_describe(const kvprim_comm *comm);

/* >>collective -----------------------------------------------------------------------------------------------------

   Counts are elements. count == 0 returns KVPRIM_OK and enqueues nothing. recv and send must be the same pointer (in
   place) or must not overlap. all_gather in place: send = recv + rank * send_count elements; reduce_scatter in place:
   recv = send + rank * recv_count elements.
   Errors: NULL, SIZE (bytes beyond size_t), ARGUMENT (comm not alive, dtype, op, rank, alignment, another device's
   stream, another current device), OVERLAP, UNSUPPORTED (where NCCL reduces KVPRIM_F8E4M3 and _F8E5M2, it must be 2.24
   or newer, on GPUs of compute capability 9.0 or newer), TIMEOUT (an earlier call's), CUDA, NCCL.

   all_reduce and reduce_scatter: where own kernels reduce (>>op), the bits are the same on all ranks and in both
   collectives. kvprim_comm_describe says up to which size. A NaN stays a NaN, but its other bits are not kept. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count,
                                                          kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream);

/* recv: world * send_count elements; those of rank r begin at r * send_count. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_gather(kvprim_comm *comm, void *recv, const void *send,
                                                          size_t send_count, kvprim_dtype dtype,
                                                          struct CUstream_st *stream);

/* send: world * recv_count elements; rank r receives the reduction of those that begin at r * recv_count. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_reduce_scatter(kvprim_comm *comm, void *recv, const void *send,
                                                              size_t recv_count, kvprim_dtype dtype, kvprim_op op,
                                                              struct CUstream_st *stream);

/* all_gather of parts of different sizes: rank r sends counts[r] elements, and its part begins where that of rank r - 1
   ends. counts: host array of `world` numbers, the same on every rank, free to reuse when the call returns. send may be
   NULL if this rank's count is 0. In place: send is this rank's part of recv. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_gatherv(kvprim_comm *comm, void *recv, const void *send,
                                                           const size_t *counts, kvprim_dtype dtype,
                                                           struct CUstream_st *stream);

/* Part r of send goes to rank r, and part r of recv comes from rank r. Both have `world` parts of part_count elements,
   and must not overlap: NCCL cannot exchange in place. Where NCCL serves an exchange or an all_gatherv, the first call
   returns when every rank has made its own, as a group of sends and receives does. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_to_all(kvprim_comm *comm, void *recv, const void *send,
                                                          size_t part_count, kvprim_dtype dtype,
                                                          struct CUstream_st *stream);

/* The same with parts of different sizes: rank a sends counts[a * world + b] elements to rank b. Parts follow each
   other in the order of the other side's ranks. counts: as in kvprim_all_gatherv. A side of no elements may be NULL. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_to_allv(kvprim_comm *comm, void *recv, const void *send,
                                                           const size_t *counts, kvprim_dtype dtype,
                                                           struct CUstream_st *stream);

/* Copies buf of rank `root` to buf of every other rank. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_broadcast(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype,
                                                         int32_t root, struct CUstream_st *stream);

/* A send meets the peer's recv of the same count and dtype; each side's kernel waits for the other. The first call to a
   peer in each direction returns when the peer has made its own: NCCL connects them. Ranks that send to each other at
   once wait for ever, unless one receives first, or both use a group (>>group). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_send(kvprim_comm *comm, const void *buf, size_t count,
                                                    kvprim_dtype dtype, int32_t peer, struct CUstream_st *stream);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_recv(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype,
                                                    int32_t peer, struct CUstream_st *stream);

/* >>norm -----------------------------------------------------------------------------------------------------------

   What follows the all-reduce of a tensor-parallel layer, for few tokens in the same kernel. For each token:

       s = send of rank 0 + send of rank 1 + ...    in fp32, in the order of the ranks, rounded to dtype
       r = s + residual                             in fp32, rounded to dtype; without a residual, r = s
       y = r * (1 / sqrt(mean(r * r) + eps)) * weight    in fp32, from left to right, rounded to dtype
       q = y / scale                                as a conversion of kvprim.h's kvprim_format makes it; the scale
                                                    is of the tensor, of the token, or of 128 elements of it

   1 / sqrt is rounded once, to nearest. The squares are added in an order that depends on `hidden` alone (see
   kvprim_all_reduce_norm_host), so the bits are the same on every rank, in every call, and for every number of tokens.
   A unit compiled with --use_fast_math flushes subnormal values, and may differ there and in scales below 2^-111.
   FlashInfer and TensorRT-LLM multiply in this order; vLLM's norm kernel also rounds before the weight. Call it after
   attention and the MLP, in place of the all-reduce, the addition and the norm: examples/17_all_reduce_norm.cu. */

/* Zero-initialise, then set what differs. Device memory, aligned to 16 bytes except as said; strides are elements from
   token to token, multiples of 8, at least hidden; 0: hidden. Outputs may be NULL, but not both out and quantised. */
typedef struct kvprim_norm_desc {
    kvprim_dtype dtype;     /* KVPRIM_F16 or KVPRIM_BF16: of all tensors except quantised and scale */
    float eps;              /* at least 0 */
    int64_t tokens, hidden; /* the same on every rank; hidden: a multiple of 8, at most 16,384 */
    const void *send;       /* tokens x hidden: what this rank adds */
    int64_t send_stride;
    const void *residual; /* tokens x hidden, the same on every rank; NULL: none */
    int64_t residual_stride;
    const void *weight; /* hidden elements, the same on every rank */
    void *sum;          /* s: tokens x hidden; may be send */
    int64_t sum_stride;
    void *residual_out; /* r: tokens x hidden; may be residual or send */
    int64_t residual_out_stride;
    void *out; /* y: tokens x hidden; may be send or residual */
    int64_t out_stride;
    void *quantised; /* q: tokens x hidden of KVPRIM_F8E4M3, aligned to 8 bytes */
    int64_t quantised_stride;
    float *scale;            /* with quantised: one, read; or one per token or group, written; aligned to 4 bytes */
    int32_t scale_per_token; /* 1: scale[token] = max(the largest |y| of the token / 448, scale_min); NaN does not
                                count, infinity counts as the largest finite fp32 */
    float scale_min;         /* with scale_per_token or scale_group: 2^-126 to 2^127; 0: 2^-126 */
    int32_t weight_plus_one; /* 1: multiplies by weight + 1, rounded to fp32, not to dtype (Gemma) */
    int32_t scale_group; /* 128: a scale of each 128 elements, made as scale_per_token's; hidden: a multiple. 0: none */
    /* Group g of token t has scale[t * scale_stride + g * scale_group_stride], both in elements. 0: a token's groups
       are 1 apart, and tokens follow each other. So scale_stride 1 and scale_group_stride = tokens, or more, lay out
       columns, as DeepGEMM reads them */
    int64_t scale_stride, scale_group_stride;
    int32_t scale_power_of_two; /* with scale_group, 1: scales are rounded up to powers of two */
    kvprim_dtype scale_dtype;   /* of groups: 0 or KVPRIM_F32; or KVPRIM_F8E8M0: exponents of such powers, 4 groups in a
                                   word of 32 bits, the first in the lowest byte. The strides then count words, from 4
                                   groups to the next. Bytes past the last group stay as they are */
    int64_t reserved;           /* must be 0 */
} kvprim_norm_desc;

/* A collective. Outputs must not overlap each other, the weight or the inputs, except as said above, and then with the
   same stride. Rows of one tensor may lie between those of another with the same stride. tokens == 0 returns KVPRIM_OK
   and enqueues nothing; pointers may then be NULL. Own kernels serve any number of tokens: few in one kernel, more by
   a sum and a kernel that follows, in parts of 8 MB. Where they are off (kvprim_comm_describe), NCCL sums: the same,
   except for the order of the sum and its rounding.
   Errors: those of kvprim_all_reduce, and NULL (desc), SIZE (tokens, hidden, strides), ARGUMENT (dtype, eps,
   scale_min, flags, groups, reserved, a scale without quantised, an open group), UNSUPPORTED (the implementation has
   no kernels for it: it was compiled without nvcc, or with KVPRIM_NO_KERNELS or KVPRIM_NO_NORM). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_reduce_norm(kvprim_comm *comm, const kvprim_norm_desc *desc,
                                                               struct CUstream_st *stream);

/* The same on the host, from the addends of `world` ranks, at least 1: all pointers are to host memory and aligned to
   their elements, sends[r] is what rank r passes as send, and desc->send is ignored. Gives the bits that
   kvprim_all_reduce_norm gives with own kernels. Errors: NULL, SIZE, ARGUMENT (also world), OVERLAP.
   Both add the squares of a token in this order: those of 8 elements one after another, from the first on, each as
   fmaf(r, r, sum); then these sums in a balanced binary tree (0 and 1, 2 and 3, ..., then neighbouring results, and so
   on up to one), in which what `hidden` lacks to a power of two counts as 0. The mean is the result times
   1.0f / hidden. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_all_reduce_norm_host(const kvprim_norm_desc *desc,
                                                                    const void *const *sends, int32_t world);

/* >>group ----------------------------------------------------------------------------------------------------------

   Sends and receives between kvprim_group_start and kvprim_group_end run together, as one kernel, so none of them waits
   for another: two ranks exchange tensors, all ranks send to all, a rank sends to itself.

       kvprim_group_start(comm);
       kvprim_send(comm, mine, count, KVPRIM_BF16, peer, stream);
       kvprim_recv(comm, theirs, count, KVPRIM_BF16, peer, stream);
       kvprim_group_end(comm);

   Calls inside only check their arguments and are kept; kvprim_group_end enqueues them all, on their stream, or none.
   A group takes up to 1,024 calls (twice `world`, if that is more), all on one stream, and only kvprim_send and
   kvprim_recv: other collectives are KVPRIM_ERROR_ARGUMENT, because own kernels cannot be part of NCCL's. Sends to one
   peer meet its receives in the order of the calls. A group is its communicator's alone, so other communicators may be
   used meanwhile, and it may be captured. kvprim_comm_check watches it from kvprim_group_end on, as one collective.
   Errors of start: NULL, ARGUMENT (comm not alive, a group is open: groups do not nest). Of end: NULL, ARGUMENT (comm
   not alive, no group is open), TIMEOUT, CUDA, NCCL, or the error of the first call inside that failed; nothing of the
   group is then enqueued. After either, the group is closed. Abort and destroy drop an open group. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_group_start(kvprim_comm *comm);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_group_end(kvprim_comm *comm);

/* >>ring -----------------------------------------------------------------------------------------------------------

   Chunks go to another rank through a few buffers (slots) on each side, so that packing, sending and unpacking overlap
   and memory stays bounded. What the sides tell each other goes through a channel of the caller's.

       sender, while it has chunks:                          receiver, when told of a chunk of so many bytes:
           kvprim_ring_claim(ring, pack, &slot)                  kvprim_ring_recv(ring, bytes, unpack, &slot)
           if slot is not NULL (there is a credit):              unpack from slot, on the stream `unpack`
               pack into slot, on the stream `pack`              kvprim_ring_release(ring, unpack)
               kvprim_ring_send(ring, bytes, pack)           ... and again and again:
               tell the receiver: a chunk, its bytes             kvprim_ring_take(ring, &n)
           when told of n credits:                               if n > 0, tell the sender: n credits
               kvprim_ring_credit(ring, n)

   First connect the ranks: both send and receive a byte in a group. Otherwise the first kvprim_ring_send waits for ever
   for a receiver that has not been told yet (see kvprim_send). After that nothing waits: events order the caller's work
   and NCCL's. Slots are used in turn, several may be in use at once, and calls of each kind are in the order of chunks.
   A ring goes one way, as its first call says, and while it is in use no other collective of its communicator runs.
   desc->stream must not be NULL; elsewhere NULL is the legacy stream. Streams are not captured, and no group is open.
   One thread at a time uses a ring. After an error of CUDA or NCCL, or when the peer is gone: abort and destroy the
   communicator, then init the ring again.
   Errors: NULL, SIZE (slots, bytes, n), ARGUMENT (fields, ring not initialised or moved, a call out of turn, comm not
   alive, an open group), and those of kvprim_send and kvprim_recv. */
enum { KVPRIM_MAX_RING_SLOTS = 32 };

typedef struct kvprim_ring_desc {
    kvprim_comm *comm;
    int32_t peer, slots; /* the other side's rank; 1 to 32 slots, as many on both sides: the sender's first credits */
    void *memory;        /* of this side's slots: slots * slot_bytes bytes of device memory, the caller's */
    size_t slot_bytes;   /* the largest chunk of one slot; multiples of 16 are fastest */
    struct CUstream_st *stream; /* for NCCL's work; one of its own, so that the caller's work overlaps with it */
    int64_t reserved;           /* must be 0 */
} kvprim_ring_desc;

/* Lives in the caller's memory, and must not move. Its fields are the implementation's. */
typedef struct kvprim_ring {
    kvprim_ring_desc desc;
    struct CUevent_st *filled[KVPRIM_MAX_RING_SLOTS], *finished[KVPRIM_MAX_RING_SLOTS]; /* of slots */
    uint64_t begun, ended, freed; /* slots: claimed or received; sent or released; credited or taken */
    const struct kvprim_ring *self;
} kvprim_ring;

/* Makes two events per slot on the current device, which is the communicator's, and nothing else. Zero-initialise the
   ring before. Called again, it keeps the events, and all slots are free: its earlier work has ended, desc->comm may be
   a new communicator, and desc->slots is the same. destroy frees the events, and does not wait for work. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_init(kvprim_ring *ring, const kvprim_ring_desc *desc);
KVPRIM_API kvprim_status kvprim_ring_destroy(kvprim_ring *ring);

/* *slot: where later work on `stream` may put the next chunk; NULL, which is no error: there is no credit. send: sends
   the oldest claimed slot when the work on `stream` so far is done; a claim cannot be taken back. A larger chunk
   also takes the slots after it, which must be claimed (or ARGUMENT), up to the last one in memory (or SIZE): several
   small chunks in one call of NCCL's, which takes each side's host 13 us (H200). The receiver needs as many free slots
   and releases each; credits count slots. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_claim(kvprim_ring *ring, struct CUstream_st *stream, void **slot);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_send(kvprim_ring *ring, size_t bytes, struct CUstream_st *stream);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_credit(kvprim_ring *ring, int32_t n);

/* *slot: where later work on `stream` finds the next chunk, of as many bytes as were sent. release: the oldest received
   slot is free when the work on `stream` so far is done. *n: slots freed since the last call; also during capture. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_recv(kvprim_ring *ring, size_t bytes, struct CUstream_st *stream,
                                                         void **slot);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_release(kvprim_ring *ring, struct CUstream_st *stream);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_ring_take(kvprim_ring *ring, int32_t *n);

#ifdef __cplusplus
}
#endif
#endif /* KVPRIM_NCCL_H */

/* Stop here if you only use the library. */

/* >>impl ----------------------------------------------------------------------------------------------------------- */

/* Names that begin with kvpn_ are internal: static, and free to change. Terms:

       word    32 bits
       pack    what one slot carries: 16 bytes of a tensor (8 in kvpn_gather_all and kvpn_parts_slots)
       slot    16 bytes of a rank's memory, which one other rank writes and this rank reads
       turn    which of its two sets of slots a block uses in this call: 0 or 1
       area    half of a set: one for tensors, one for sums (two shots); groups alternate between the two
       page    4,096 bytes before the slots: turns, why the rank stopped, nonces
       part    the piece of a tensor that one rank sends or receives
       slice   what one rank sums: of the tensor, in two shots; otherwise all of it
       way     how a kernel does a collective: one shot, two shots, ... */

/* >>impl_protocol --------------------------------------------------------------------------------------------------

   Ranks exchange packs through slots. The data is its own flag, as in TensorRT-LLM's one-shot all-reduce. An empty slot
   is all ones. A word of a tensor never is: all ones are a NaN in fp16, bf16 and fp32, and NaNs in e4m3 and e5m2, and
   are sent as another NaN. So a slot that is not empty holds its pack, without a flag, a fence or a barrier (only
   kvpn_pipeline has fences). The only hardware guarantee it needs is that an aligned 4-byte store becomes visible as a
   whole. Bytes of any value (gathers, >>impl_parts) go 8 to a slot, each 4 of them beside 4 that are zero, as in
   NCCL's LL protocol: there 8-byte stores must become visible as a whole. Many bytes go 16 to a slot, and after every
   group of slots one more says which words of the group were all ones.

   The reader of a slot empties it. There are two sets of slots, and a block takes them in turns. Device memory says
   which set is next, so that a launch can be replayed. Two sets suffice: a rank writes to a set again in its call k+2,
   after its call k+1 has ended. That call needed a word of my call k+1, from me or from a rank that needed one from me
   (two shots: at least one of the first slice, which is never empty), and my call k+1 began after my call k had emptied
   that set. So sizes may change from call to call, and no call waits for more than the words that it needs. (A
   pipeline writes to the slots of a set several times in one call; see kvpn_pipeline.)

   Where parts have different sizes (>>impl_parts), a rank may have nothing for another one, whose call would then need
   no word of its call. So every rank launches as often, and uses the same blocks, as the largest of all parts takes.
   In each of its blocks it sends every other rank a slot, and waits for one, whether it carries bytes or not: that of
   the first thread's first pack, or group. The argument above then holds for each block. All ranks know all sizes, so
   no slot is awaited that is not sent, and none stays full.

   A thread sends its pack j before it waits for pack j of another rank, and block b waits only for blocks b of the
   other ranks. So calls end if all their blocks are resident at once. They are: kvpn_compare_ranks allows at most half
   as many as the smallest of the GPUs has multiprocessors, or max_sms.

   In a norm (>>impl_norm) the threads of a row also meet, which cannot block: all of them send a token's packs before
   any of them waits for that token, and they begin a token after they met in the one before. Blocks that share a token
   have their own slots and turns, and also wait for each other: as a cluster they are resident at once. Clusters begin
   in order (on all GPUs so far; CUDA does not promise it), and each waits only for those of its number, so calls end if
   one at a time fits beside what else may wait (kvpn_can_cluster). Were one not to fit, they would end by timeout_ms.

   A rank stops after a timeout of its own, after an abort, or when another rank tells it to. It then sends no more
   words, because in its call k+2 they could overwrite those of its call k that a late rank has not read yet. It
   writes why it stopped to its own page, which each call reads before it sends, and to the pages of all other ranks, so
   that they stop too. */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_NCCL_IMPLEMENTATION) || defined(KVPRIM_NCCL_EMULATE)) &&         \
    !defined(KVPRIM_NCCL_LAYOUT)
#define KVPRIM_NCCL_LAYOUT
enum { kvpn_max_world = 8 }; /* of a communicator with kernels */
/* Whether there are kernels of >>impl_parts, and of >>impl_norm. */
#ifdef KVPRIM_NO_EXCHANGE
enum { kvpn_exchanges = 0 };
#else
enum { kvpn_exchanges = 1 };
#endif
#ifdef KVPRIM_NO_NORM
enum { kvpn_norms = 0 };
#else
enum { kvpn_norms = 1 };
#endif

/* A rank's memory: a page of words, the slots, and 4,096 bytes of which 16 are written and never read. The page holds
   the turn of each block, then, from kvpn_stop_reason_word on, why the rank stopped (0: it did not), then, from
   kvpn_nonces_word on, 64 bits from each rank, which show that it can write here. */
enum { kvpn_page = 4096, kvpn_stop_reason_word = 512, kvpn_nonces_word = 768 };

/* Why a rank stopped: the kind, the rank that stopped first << 8, and the rank that one waited for << 16. */
enum { kvpn_stop_aborted = 1, kvpn_stop_timeout = 2 };

/* What a kernel of kvpn_any does, and with which type: a bit each, because a switch would load a table of addresses. */
enum {
    kvpn_sums,
    kvpn_averages,
    kvpn_takes_largest,
    kvpn_takes_least,
    kvpn_op_mask = 3,
    kvpn_is_f32 = 4,
    kvpn_is_bf16 = 8,
    kvpn_is_f16 = 16,
    kvpn_is_e4m3 = 32,
    kvpn_is_e5m2 = 64,
    kvpn_shares = 128 /* sums go to all ranks: two shots */
};

/* Elements of a scale_group, and the packs that they are. */
enum { kvpn_norm_group = 128, kvpn_norm_group_packs = 16 };

#define KVPRIM_ELEMENTS /* kvprim.h's >>impl_elements, once for each unit */
#include "kvprim.h"
#undef KVPRIM_ELEMENTS
#endif

#if ((defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_NCCL_IMPLEMENTATION)) && defined(__CUDACC__) &&                 \
     !defined(KVPRIM_NO_KERNELS)) ||                                                                                   \
    defined(KVPRIM_NCCL_EMULATE)
#ifndef KVPRIM_NCCL_KERNELS
#define KVPRIM_NCCL_KERNELS

/* >>impl_device -- parameters of a kernel; loads and stores of slots */

#ifndef KVPRIM_NCCL_EMULATE /* the emulation runs the kernels on the CPU, a thread per rank, for the tests */
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVPRIM_NCCL_PRAGMA(text) _Pragma(#text)
#define KVPRIM_NCCL_UNROLL _Pragma("unroll") /* other loops unroll unasked */
#define KVPRIM_NCCL_UNROLL_BY(n) KVPRIM_NCCL_PRAGMA(unroll n)
#endif
#define KVPRIM_NCCL_DEVICE static __device__ __forceinline__

enum {
    /* per block: as fast as twice the blocks of half the size, and a wait leaves half of the GPU to others */
    kvpn_max_threads = 1024,
    kvpn_max_threads_of_8 = 512,       /* the same for sums of more than 4 ranks, which need up to 128 registers */
    kvpn_polls_per_page_check = 256,   /* some tens of microseconds; from then on a wait sleeps between polls */
    kvpn_polls_per_stop_check = 16384, /* some ten milliseconds */
    kvpn_poll_interval_ns = 500        /* between polls: without it, 65,536 polling threads saturate the L2 cache */
};
static const uint32_t kvpn_empty_word = 0xffffffffu;

/* The kernels' parameters. A slot's address is turn * turn_bytes + area * area_bytes + sender * sender_bytes + block *
   block_bytes + 16 * j. Fields are in the order of use: one line of the constant cache brings the first ones. */
typedef struct kvpn_params {
    const void *send;
    uint32_t *turn;                    /* this rank's page; word b: block b's turn */
    uint32_t slice_packs, block_packs; /* packs that this rank sums, and of these a block's; see kvpn_pipeline */
    uint32_t rank, world;
    uint32_t turn_bytes, area_bytes, sender_bytes, block_bytes;
    char *peer[kvpn_max_world]; /* [k]: the slots of the rank k further on, around the ring; [0]: this rank's */
    void *recv;
    uint64_t count;       /* bytes of the tensor; of a rank's part, where there are parts */
    uint64_t pitch;       /* of reduce_scatter: bytes from one rank's part to the next one's, in send */
    uint32_t packs;       /* of the tensor */
    uint32_t what, signs; /* with kvpn_any: the op, the type and the way, see above; a word of -0.0 */
    uint32_t trigger;     /* 1: the kernel that follows may start */
    uint32_t *stop;       /* in host memory: why all waits end; 0: they do not */
    uint64_t timeout_ns;
    double per_rank; /* with kvpn_any: 1 / world */
} kvpn_params;

/* One thread: what a kernel takes from CUDA, and the emulation sets. A block's threads form roles of equal size,
   which do different things at the same time; thread and threads count within a role. */
typedef struct kvpn_thread {
    uint32_t block, role, thread, threads, turn;
    uint32_t stop_reason, stopped_first; /* of the rank, as far as the thread knows; 1: it stopped before all others */
    uint32_t polls;
    uint64_t wait_start_ns;
} kvpn_thread;

#ifndef KVPRIM_NCCL_EMULATE
/* Other ranks hold or write a slot: `sys` goes past the caches that other GPUs do not see. */
KVPRIM_NCCL_DEVICE uint4 kvpn_load_slot(const char *slot)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(slot))
                 : "memory");
    return v;
}

KVPRIM_NCCL_DEVICE void kvpn_store_slot(char *slot, uint4 v)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                 "l"(__cvta_generic_to_global(slot))
                 : "memory");
}

/* Words that others write, in a GPU's memory or the host's. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_load_word(uint32_t *at)
{
    return *(volatile uint32_t *)at;
}

KVPRIM_NCCL_DEVICE void kvpn_store_word(uint32_t *at, uint32_t value)
{
    *(volatile uint32_t *)at = value;
}

/* A load that the compiler does not move: see kvpn_take_turn. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_load_turn(const uint32_t *at)
{
    uint32_t turn;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(turn) : "l"(__cvta_generic_to_global(at)) : "memory");
    return turn;
}

/* All that this thread has loaded and stored so far comes before what it stores later, as every rank sees it. */
KVPRIM_NCCL_DEVICE void kvpn_fence(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

KVPRIM_NCCL_DEVICE uint64_t kvpn_globaltimer_ns(void)
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* Near 1 / a, within a unit of the last place; near 1 / sqrt(a), for kvpn_root_reciprocal. */
KVPRIM_NCCL_DEVICE float kvpn_near_reciprocal(float a)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

KVPRIM_NCCL_DEVICE float kvpn_near_root_reciprocal(float a)
{
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

/* Whether there are clusters of blocks and programmatic dependent launch. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
enum { kvpn_is_sm_90 = 0 };
#else
enum { kvpn_is_sm_90 = 1 };
#endif
#endif

/* >>impl_turn -- which slots a block uses in this call (why two sets do: >>impl_protocol) */

/* Loads the block's turn when j is the thread's first pack. The load of that pack is already under way, so the two
   loads overlap: in the other order a small sum takes 10 % longer. */
KVPRIM_NCCL_DEVICE void kvpn_take_turn(const kvpn_params &p, kvpn_thread &me, uint32_t j)
{
    if (j != me.thread)
        return;
    me.turn = kvpn_load_turn(p.turn + me.block);
    me.stop_reason = kvpn_load_word(p.turn + kvpn_stop_reason_word);
}

/* Where this rank finds pack j of this block from rank `from`, in area 0 or 1: an offset into its slots. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_slot_offset(const kvpn_params &p, const kvpn_thread &me, uint32_t area, uint32_t from,
                                             uint32_t j)
{
    const uint32_t offset = area * p.area_bytes + from * p.sender_bytes + me.block * p.block_bytes + j * 16;
    return offset + me.turn * p.turn_bytes; /* known last */
}

/* Where this rank sends its pack j, in area 0. After it stopped, that is past the last set, where no rank reads: a
   branch would make the compiler load the turn before the pack. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_send_offset(const kvpn_params &p, const kvpn_thread &me, uint32_t j)
{
    return me.stop_reason ? 2 * p.turn_bytes : kvpn_slot_offset(p, me, 0, p.rank, j);
}

/* >>impl_wait -- where a kernel's wait ends: polls, the deadline, stop reasons */

/* Says why this rank stopped: to its host, its later calls and, if it was the first to stop, the other ranks. */
KVPRIM_NCCL_DEVICE void kvpn_stop_rank(const kvpn_params &p, const kvpn_thread &me)
{
    kvpn_store_word(p.stop, me.stop_reason);
    kvpn_store_word(p.turn + kvpn_stop_reason_word, me.stop_reason);
    KVPRIM_NCCL_UNROLL_BY(1)
    for (uint32_t k = 1; me.stopped_first && k < p.world; k++)
        kvpn_store_word((uint32_t *)(p.peer[k] - kvpn_page) + kvpn_stop_reason_word, me.stop_reason);
}

/* Called after each poll of a slot of `rank` that is still empty. Returns false when the wait must end: the deadline is
   over, the host says stop, or another rank stopped. The first polls are cheap. To read the clock and the host's memory
   takes half a microsecond a warp, one warp after the other: a millisecond for a full GPU. Done earlier, that would
   make this rank late in the next call, which would delay the others in the one after it, and so on. */
KVPRIM_NCCL_DEVICE bool kvpn_keep_waiting(const kvpn_params &p, kvpn_thread &me, uint32_t rank)
{
    if (me.polls >= kvpn_polls_per_page_check)
        __nanosleep(kvpn_poll_interval_ns);
    if (++me.polls % kvpn_polls_per_page_check)
        return true;
    me.stop_reason = kvpn_load_word(p.turn + kvpn_stop_reason_word);
    if (me.stop_reason)
        return false;
    if (me.polls % kvpn_polls_per_stop_check)
        return true;
    const uint64_t now = kvpn_globaltimer_ns();
    if (me.polls == kvpn_polls_per_stop_check)
        me.wait_start_ns = now;
    me.polls = kvpn_polls_per_stop_check; /* so that it never wraps */
    me.stop_reason = kvpn_load_word(p.stop);
    if (me.stop_reason == 0 && now - me.wait_start_ns >= p.timeout_ns)
        me.stop_reason = kvpn_stop_timeout | p.rank << 8 | rank << 16;
    me.stopped_first = me.stop_reason != 0;
    return me.stop_reason == 0;
}

KVPRIM_NCCL_DEVICE uint32_t kvpn_max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* The largest word of a slot: kvpn_empty_word if any word that is expected has not arrived. `flagged`: y and w tell for
   all four, as x and z may have any value. */
template <bool flagged> KVPRIM_NCCL_DEVICE uint32_t kvpn_largest_word(uint4 v)
{
    const uint32_t flags = kvpn_max_u32(v.y, v.w);
    return flagged ? flags : kvpn_max_u32(flags, kvpn_max_u32(v.x, v.z));
}

/* Of max_slots slots that lie `step` bytes apart, loads those whose bit is set in `which`, all together, as one load
   takes longer than 100 instructions. Elsewhere leaves v, which must not be empty. Returns whether all have come. */
template <int max_slots, bool flagged>
KVPRIM_NCCL_DEVICE bool kvpn_poll_slots(const char *first, uint32_t step, uint32_t which, uint4 *v)
{
    uint32_t largest = 0;
    for (uint32_t r = 0; r < max_slots; r++)
        if (which >> r & 1)
            v[r] = kvpn_load_slot(first + (size_t)r * step);
    for (uint32_t r = 0; r < max_slots; r++)
        largest = kvpn_max_u32(largest, kvpn_largest_word<flagged>(v[r]));
    return largest != kvpn_empty_word;
}

/* Polls until all are here. sender: the rank that fills the slots; -1: rank r fills slot r. False: the rank stopped. */
template <int max_slots, bool flagged>
KVPRIM_NCCL_DEVICE bool kvpn_wait_for_slots(const kvpn_params &p, kvpn_thread &me, const char *first, uint32_t step,
                                            uint32_t which, int32_t sender, uint4 *v)
{
    for (;;) {
        uint32_t late = 0;
        if (kvpn_poll_slots<max_slots, flagged>(first, step, which, v)) {
            me.polls = 0;
            return true;
        }
        for (uint32_t r = 0; r < max_slots; r++)
            late = kvpn_largest_word<flagged>(v[r]) == kvpn_empty_word ? r : late;
        if (!kvpn_keep_waiting(p, me, sender < 0 ? late : (uint32_t)sender))
            return false;
    }
}

/* Resets the slots to empty. Done last, because no rank waits for it. */
template <int max_slots> KVPRIM_NCCL_DEVICE void kvpn_clear_slots(char *first, uint32_t step, uint32_t which)
{
    enum { at_once = max_slots == 7 ? 2 : max_slots }; /* 7, of a large group: otherwise sm_120 spills registers */
    KVPRIM_NCCL_UNROLL_BY(at_once)
    for (uint32_t r = 0; r < max_slots; r++)
        if (which >> r & 1)
            kvpn_store_slot(first + (size_t)r * step,
                            uint4{kvpn_empty_word, kvpn_empty_word, kvpn_empty_word, kvpn_empty_word});
}

/* >>impl_pack -- element types; packs loaded and stored, at unaligned ends too */

/* Sends all ones as 0x7fffffff, NaNs too: 0x7fff and 0xffff of 16 bits, 0x7f and three times 0xff of fp8. */
KVPRIM_NCCL_DEVICE uint4 kvpn_replace_empty(uint4 v)
{
    v.x = v.x == kvpn_empty_word ? kvpn_empty_word >> 1 : v.x;
    v.y = v.y == kvpn_empty_word ? kvpn_empty_word >> 1 : v.y;
    v.z = v.z == kvpn_empty_word ? kvpn_empty_word >> 1 : v.z;
    v.w = v.w == kvpn_empty_word ? kvpn_empty_word >> 1 : v.w;
    return v;
}

/* Element types of reductions: split a word into fp32 elements, and join them again. add: in the type itself, which
   gives the bits of a sum in fp32 that is rounded, as fp32 has more than twice the digits. whole: kernels of the type
   are for tensors that are aligned to packs and end with one. */
struct kvpn_f32 {
    enum { per_word = 1, whole = 1 };
    KVPRIM_NCCL_DEVICE void split(uint32_t word, float *f)
    {
        f[0] = kvpi_float_of(word);
    }
    KVPRIM_NCCL_DEVICE uint32_t join(const float *f)
    {
        return kvpi_bits_of(f[0]);
    }
    KVPRIM_NCCL_DEVICE uint32_t add(uint32_t a, uint32_t b)
    {
        return kvpi_bits_of(kvpi_float_of(a) + kvpi_float_of(b));
    }
};

template <class Pair, bool is_bf16> struct kvpn_pair {
    enum { per_word = 2, whole = 1 };
    KVPRIM_NCCL_DEVICE uint32_t word_of(Pair pair)
    {
        uint32_t word;
        memcpy(&word, &pair, 4);
        return word;
    }
    KVPRIM_NCCL_DEVICE uint32_t add(uint32_t a, uint32_t b)
    {
        Pair x, y;
        memcpy(&x, &a, 4);
        memcpy(&y, &b, 4);
        return word_of(__hadd2(x, y));
    }
    /* Of each two elements the larger in magnitude, NaN only if both are. It may have any sign. */
    KVPRIM_NCCL_DEVICE uint32_t larger(uint32_t a, uint32_t b)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
        if (is_bf16)
            asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        else
            asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
#else
        Pair x, y;
        memcpy(&x, &a, 4);
        memcpy(&y, &b, 4);
        return word_of(__hmax2(__habs2(x), __habs2(y)));
#endif
    }
};

struct kvpn_bf16 : kvpn_pair<__nv_bfloat162, true> {
    KVPRIM_NCCL_DEVICE void split(uint32_t word, float *f)
    {
        f[0] = kvpi_float_of(word << 16), f[1] = kvpi_float_of(word & 0xffff0000u);
    }
    KVPRIM_NCCL_DEVICE uint32_t join(const float *f)
    {
        return word_of(__floats2bfloat162_rn(f[0], f[1]));
    }
};

#ifndef KVPRIM_NCCL_EMULATE
struct kvpn_f16 : kvpn_pair<__half2, false> {
    KVPRIM_NCCL_DEVICE void split(uint32_t word, float *f)
    {
        kvpi_of_f16x2(f, word);
    }
    KVPRIM_NCCL_DEVICE uint32_t join(const float *f)
    {
        return word_of(__floats2half2_rn(f[0], f[1]));
    }
};
#endif

/* fp8 joins as kvprim_format converts: what is larger, e5m2's infinity too, becomes the largest finite value. */
#ifdef KVPRIM_PTX_F8
enum { kvpn_f8_at_once = 4 };
#else
enum { kvpn_f8_at_once = 1 };
#endif
template <kvprim_dtype dtype> struct kvpn_f8 {
    enum { per_word = 4 };
    KVPRIM_NCCL_DEVICE void split(uint32_t word, float *f)
    {
        kvpi_of_f8x4(dtype, f, word);
    }
    KVPRIM_NCCL_DEVICE uint32_t join(const float *f)
    {
        return kvpi_to_f8x4(dtype, f);
    }
};
typedef kvpn_f8<KVPRIM_F8E4M3> kvpn_e4m3;
typedef kvpn_f8<KVPRIM_F8E5M2> kvpn_e5m2;

/* The kernel's parameters say which of these types it is, and what to do with it. */
template <bool aligned> struct kvpn_any {
    enum { per_word = 4, whole = aligned };
};

/* Loads the first `left` units at `from` as `words` words, with zeros after them. */
template <class U, int words> KVPRIM_NCCL_DEVICE void kvpn_load_units(const void *from, uint64_t left, uint32_t *w)
{
    enum { per_word = 4 / sizeof(U) };
    for (int e = 0; e < words * per_word; e++) {
        const uint32_t unit = (uint64_t)e < left ? (uint32_t)((const U *)from)[e] : 0;
        w[e / per_word] = (e % per_word ? w[e / per_word] : 0) | unit << e % per_word * (32 / per_word);
    }
}

template <class U, int words> KVPRIM_NCCL_DEVICE void kvpn_store_units(void *to, uint64_t left, const uint32_t *w)
{
    enum { per_word = 4 / sizeof(U) };
    for (int e = 0; e < words * per_word; e++)
        if ((uint64_t)e < left)
            ((U *)to)[e] = (U)(w[e / per_word] >> e % per_word * (32 / per_word));
}

/* The four bytes that begin `bits` bits after the begin of `low`; bits < 32. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_shift_words(uint32_t low, uint32_t high, uint32_t bits)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> bits);
}

/* Pack i, a uint2 or uint4, of `bytes` bytes, with zeros after the last one. `whole`: aligned, and ending with a pack.
   Otherwise reads the words around it if all their bytes are the tensor's: single bytes take three times as long. */
template <class V, bool whole, class Bytes>
KVPRIM_NCCL_DEVICE V kvpn_load_pack(const void *from, Bytes bytes, uint32_t i)
{
    enum { size = sizeof(V), words = size / 4 };
    const char *const at = (const char *)from + (size_t)i * size;
    const Bytes left = bytes - (Bytes)i * size;
    const uint32_t past = (uint32_t)((uintptr_t)at % 4);
    uint32_t w[words + 1];
    V v;
    if (whole)
        return ((const V *)from)[i];
    if (left >= size && (uintptr_t)at % size == 0)
        return *(const V *)at;
    if (left >= size && past == 0) {
        kvpn_load_units<uint32_t, words>(at, words, w);
    } else if (left >= size + 4 && i > 0) {
        kvpn_load_units<uint32_t, words + 1>(at - past, words + 1, w);
        for (int k = 0; k < words; k++)
            w[k] = kvpn_shift_words(w[k], w[k + 1], 8 * past);
    } else {
        kvpn_load_units<unsigned char, words>(at, left, w);
    }
    memcpy(&v, w, size);
    return v;
}

/* If not at a word, writes the words inside the pack and, before and after them, four bytes. */
template <class V, bool whole, class Bytes>
KVPRIM_NCCL_DEVICE void kvpn_store_pack(void *to, Bytes bytes, uint32_t i, V v)
{
    enum { size = sizeof(V), words = size / 4 };
    char *const at = (char *)to + (size_t)i * size;
    const Bytes left = bytes - (Bytes)i * size;
    const uint32_t past = (uint32_t)((uintptr_t)at % 4);
    uint32_t w[words];
    memcpy(w, &v, size);
    if (whole) {
        ((V *)to)[i] = v;
    } else if (left >= size && (uintptr_t)at % size == 0) {
        *(V *)at = v;
    } else if (left >= size && past == 0) {
        kvpn_store_units<uint32_t, words>(at, words, w);
    } else if (left >= size) {
        for (int k = 0; k + 1 < words; k++)
            ((uint32_t *)(at + 4 - past))[k] = kvpn_shift_words(w[k], w[k + 1], 32 - 8 * past);
        for (uint32_t e = 0; e < 4; e++)
            at[e + (e < 4 - past ? 0 : size - 4)] = (char)((e < 4 - past ? w[0] : w[words - 1]) >> 8 * e);
    } else {
        kvpn_store_units<unsigned char, words>(at, left, w);
    }
}

/* >>impl_sum -- sums and other reductions, and which packs and ranks they take */

/* The sign bits of a word; also a word of -0.0. */
template <class T> KVPRIM_NCCL_DEVICE uint32_t kvpn_signs(void)
{
    return T::per_word == 1 ? 0x80000000u : T::per_word == 2 ? 0x80008000u : 0x80808080u;
}

template <class T> KVPRIM_NCCL_DEVICE void kvpn_split_pack(uint4 v, float *f)
{
    T::split(v.x, f), T::split(v.y, f + T::per_word);
    T::split(v.z, f + 2 * T::per_word), T::split(v.w, f + 3 * T::per_word);
}

template <class T> KVPRIM_NCCL_DEVICE uint4 kvpn_join_pack(const float *f)
{
    return uint4{T::join(f), T::join(f + T::per_word), T::join(f + 2 * T::per_word), T::join(f + 3 * T::per_word)};
}

template <class T> KVPRIM_NCCL_DEVICE uint4 kvpn_add_packs(uint4 a, uint4 b)
{
    return uint4{T::add(a.x, b.x), T::add(a.y, b.y), T::add(a.z, b.z), T::add(a.w, b.w)};
}

/* Adds in the order of the ranks, for the same bits on all. A NaN of 16 bits becomes 0x7fff: only fp32 may be empty. */
template <class T, int max_ranks> KVPRIM_NCCL_DEVICE uint4 kvpn_sum_packs(const uint4 (&v)[max_ranks])
{
    float sum[4 * T::per_word];
    uint4 all;
    if (max_ranks == 2) {
        all = kvpn_add_packs<T>(v[0], v[1]);
    } else {
        for (int r = 0; r < max_ranks; r++) {
            const uint32_t w[4] = {v[r].x, v[r].y, v[r].z, v[r].w};
            for (int k = 0; k < 4; k++) {
                float f[T::per_word];
                T::split(w[k], f);
                for (int e = 0; e < T::per_word; e++)
                    sum[k * T::per_word + e] = r == 0 ? f[e] : sum[k * T::per_word + e] + f[e];
            }
        }
        all = kvpn_join_pack<T>(sum);
    }
    return T::per_word == 2 ? all : kvpn_replace_empty(all);
}

/* The larger one, as IEEE 754-2019's maximum: a NaN wins, and +0 is larger than -0. */
KVPRIM_NCCL_DEVICE float kvpn_maximum(float a, float b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else /* negative floats order as their bits do if all but the sign is inverted */
    const int32_t x = (int32_t)kvpi_bits_of(a), y = (int32_t)kvpi_bits_of(b);
    const bool larger = (x ^ (x >> 31 & 0x7fffffff)) > (y ^ (y >> 31 & 0x7fffffff));
    return kvpi_is_nan(a) || (larger && !kvpi_is_nan(b)) ? a : b;
#endif
}

/* Reduces a word of each rank, in the order of the ranks. MIN is MAX between two changes of sign. For both, a rank
   beyond `world` stands for rank 0. */
template <class T, int max_ranks>
KVPRIM_NCCL_DEVICE uint32_t kvpn_reduce_words(const kvpn_params &p, uint32_t op, const uint32_t (&w)[max_ranks])
{
    const bool selects = op >= kvpn_takes_largest;
    const uint32_t flip = op == kvpn_takes_least ? kvpn_signs<T>() : 0;
    float x[T::per_word], next[T::per_word];
    T::split(w[0] ^ flip, x);
    for (int r = 1; r < max_ranks; r++) {
        T::split((selects && r > 1 && (uint32_t)r >= p.world ? w[0] : w[r]) ^ flip, next);
        for (int e = 0; e < T::per_word; e++)
            x[e] = selects ? kvpn_maximum(x[e], next[e]) : x[e] + next[e];
    }
    /* x / world, correctly rounded: the fp64 product was compared with the quotient for all x and worlds of 3 to 8. */
    for (int e = 0; e < T::per_word && op == kvpn_averages; e++)
        x[e] = max_ranks == 2 ? x[e] * 0.5f : (float)((double)x[e] * p.per_rank);
    return T::join(x) ^ flip;
}

/* Reduces a pack of each rank, at_once words at a time. */
template <class T, int max_ranks, int at_once>
KVPRIM_NCCL_DEVICE uint4 kvpn_reduce_packs(const kvpn_params &p, uint32_t op, uint4 (&v)[max_ranks])
{
    uint4 all = {0, 0, 0, 0};
    KVPRIM_NCCL_UNROLL_BY(at_once)
    for (int k = 0; k < 4; k++) {
        uint32_t w[max_ranks];
        for (int r = 0; r < max_ranks; r++) {
            w[r] = v[r].x;
            v[r] = uint4{v[r].y, v[r].z, v[r].w, v[r].x};
        }
        all = uint4{all.y, all.z, all.w, kvpn_reduce_words<T, max_ranks>(p, op, w)};
    }
    return kvpn_replace_empty(all);
}

/* Sums of fp16, bf16 and fp32, aligned, have kernels of their own: if they take the op from their parameters, a small
   sum takes 2 % longer. The other reductions share the kernels of kvpn_any. */
template <class T, int max_ranks> struct kvpn_reduction {
    enum { is_any = 0 };

    KVPRIM_NCCL_DEVICE uint32_t none(const kvpn_params &)
    {
        return kvpn_signs<T>();
    }
    KVPRIM_NCCL_DEVICE uint32_t before_wait(const kvpn_params &, const kvpn_thread &)
    {
        return kvpn_sums;
    }
    KVPRIM_NCCL_DEVICE uint4 of(const kvpn_params &, uint32_t, const uint4 (&v)[max_ranks])
    {
        return kvpn_sum_packs<T, max_ranks>(v);
    }
};

template <bool aligned, int max_ranks> struct kvpn_reduction<kvpn_any<aligned>, max_ranks> {
    /* Rolled, where unrolled words would need too many registers (fp8 without conversions in PTX) or instructions. */
    enum { at_once = max_ranks == 2 ? 4 : 1, at_once_f8 = max_ranks == 2 ? (int)kvpn_f8_at_once : 1 };
    enum { is_any = aligned || max_ranks < 8 }; /* all ways as one would need too many, too */

    KVPRIM_NCCL_DEVICE uint32_t none(const kvpn_params &p)
    {
        return p.signs;
    }

    /* What to do. The compiler would load it after the wait, in 50 ns more, so it seems to need the turn (0 or 1). */
    KVPRIM_NCCL_DEVICE uint32_t before_wait(const kvpn_params &p, const kvpn_thread &me)
    {
        uint32_t what = p.what | (me.turn & 0x80000000u);
        asm volatile("" : "+r"(what));
        return what;
    }

    KVPRIM_NCCL_DEVICE uint4 of(const kvpn_params &p, uint32_t what, uint4 (&v)[max_ranks])
    {
        const uint32_t op = what & kvpn_op_mask;
        if (what & kvpn_is_bf16)
            return kvpn_reduce_packs<kvpn_bf16, max_ranks, at_once>(p, op, v);
#ifndef KVPRIM_NCCL_EMULATE
        if (what & kvpn_is_f16)
            return kvpn_reduce_packs<kvpn_f16, max_ranks, at_once>(p, op, v);
#endif
        if (what & kvpn_is_e4m3)
            return kvpn_reduce_packs<kvpn_e4m3, max_ranks, at_once_f8>(p, op, v);
        if (what & kvpn_is_e5m2)
            return kvpn_reduce_packs<kvpn_e5m2, max_ranks, at_once_f8>(p, op, v);
        return kvpn_reduce_packs<kvpn_f32, max_ranks, at_once>(p, op, v);
    }
};

/* Initial operands: this rank's pack, and -0.0 for ranks beyond `world`, which leaves any sum unchanged. */
template <class T, int max_ranks>
KVPRIM_NCCL_DEVICE void kvpn_init_sum(const kvpn_params &p, uint4 own, uint4 (&v)[max_ranks])
{
    const uint32_t none = kvpn_reduction<T, max_ranks>::none(p);
    own = kvpn_replace_empty(own);
    for (uint32_t r = 0; r < max_ranks; r++)
        v[r] = r == p.rank ? own : uint4{none, none, none, none};
}

KVPRIM_NCCL_DEVICE uint32_t kvpn_other_ranks(const kvpn_params &p)
{
    return ((1u << p.world) - 1) & ~(1u << p.rank);
}

KVPRIM_NCCL_DEVICE uint32_t kvpn_packs_of_block(const kvpn_params &p, const kvpn_thread &me)
{
    const uint32_t left = p.slice_packs - me.block * p.block_packs;
    return left < p.block_packs ? left : p.block_packs;
}

/* The rank k further on around the ring, whose slots are peer[k]. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_peer_rank(const kvpn_params &p, uint32_t k)
{
    const uint32_t r = p.rank + k;
    return r < p.world ? r : r - p.world;
}

template <int max_ranks> KVPRIM_NCCL_DEVICE void kvpn_store_to_peers(const kvpn_params &p, uint32_t offset, uint4 v)
{
    for (uint32_t k = 1; k < max_ranks; k++)
        if (k < p.world)
            kvpn_store_slot(p.peer[k] + offset, v);
}

/* >>impl_ways ------------------------------------------------------------------------------------------------------

   A way is a struct of T, the element type of sums, and max_ranks, the largest world (2, 4 or 8). A kernel calls its
   begin, which sends, and complete, which waits for packs and writes results. In between, all threads take their turn.

   Most ways go pack by pack. Thread t has packs t, t + threads, ... of its block, and the same ones when it sends, sums
   and writes, so that send may be recv. It sends its next pack before it waits for one: that keeps the links busy, and
   no rank waits for a pack whose sender waits. */
template <class Way> struct kvpn_pack_by_pack {
    enum { threads = kvpn_max_threads }; /* at most; half with a max_ranks of 8 */
    enum { turn_last = 0 }; /* 1: the turn ends after complete, with a barrier for those who receive, and not before */
    enum { two_waits = 0 }; /* 1: receive_sums waits a second time for each pack, if the way's shares says so */

    KVPRIM_NCCL_DEVICE void begin(const kvpn_params &p, kvpn_thread &me)
    {
        if (me.thread < kvpn_packs_of_block(p, me))
            Way::send(p, me, me.thread);
    }

    KVPRIM_NCCL_DEVICE void complete(const kvpn_params &p, kvpn_thread &me)
    {
        const uint32_t packs = kvpn_packs_of_block(p, me), step = me.threads;
        for (uint32_t j = me.thread; me.stop_reason == 0 && j < packs + Way::two_waits * (Way::shares(p) ? step : 0);
             j += step) {
            if (j + step < packs)
                Way::send(p, me, j + step);
            if (j < packs && !Way::receive(p, me, j))
                return;
            if (Way::two_waits && Way::shares(p) && j >= step && !Way::receive_sums(p, me, j - step))
                return;
        }
    }

    KVPRIM_NCCL_DEVICE bool shares(const kvpn_params &)
    {
        return false;
    }

    KVPRIM_NCCL_DEVICE bool receive_sums(const kvpn_params &, kvpn_thread &, uint32_t)
    {
        return true;
    }
};

/* Whether pack `at` of each rank's part is 16 bytes at a multiple of 16. Parts begin part_packs packs and `pitch` bytes
   apart. If they are not, loops over ranks are rolled: single bytes, once for each rank, are much code. */
template <class T>
KVPRIM_NCCL_DEVICE bool kvpn_are_whole(const kvpn_params &p, const void *tensor, uint32_t at, uint32_t part_packs,
                                       uint64_t pitch)
{
    return T::whole ||
           (((uintptr_t)tensor | pitch) % 16 == 0 && ((p.world - 1ull) * part_packs + at + 1) * 16 <= p.count);
}

/* Sends pack j of their parts to the ranks skip + 1 to skip + end - 1 further on. */
template <int end>
KVPRIM_NCCL_DEVICE void kvpn_send_whole(const kvpn_params &p, kvpn_thread &me, uint32_t j, uint32_t skip,
                                        uint32_t part_packs, uint64_t pitch)
{
    const uint32_t at = me.block * p.block_packs + j;
    uint4 v[end];
    for (uint32_t k = 1; k < end; k++) {
        const uint32_t to = kvpn_peer_rank(p, skip + k);
        if (skip + k < p.world && to * part_packs + at < p.packs)
            v[k] = kvpn_load_pack<uint4, true>((const char *)p.send + to * pitch, p.count, to * part_packs + at);
    }
    if (skip == 0)
        kvpn_take_turn(p, me, j);
    for (uint32_t k = 1; k < end; k++)
        if (skip + k < p.world && kvpn_peer_rank(p, skip + k) * part_packs + at < p.packs)
            kvpn_store_slot(p.peer[skip + k] + kvpn_send_offset(p, me, j), kvpn_replace_empty(v[k]));
}

/* Sends every other rank pack j of its part. Rank r's part begins r * part_packs packs and r * pitch bytes on. */
template <class T, int max_ranks>
KVPRIM_NCCL_DEVICE void kvpn_send_parts(const kvpn_params &p, kvpn_thread &me, uint32_t j, uint32_t part_packs,
                                        uint64_t pitch)
{
    const bool at_once = T::whole || max_ranks <= 4; /* otherwise there are too few registers for all packs */
    const uint32_t at = me.block * p.block_packs + j;
    if (kvpn_are_whole<T>(p, p.send, at, part_packs, pitch)) {
        if (at_once)
            kvpn_send_whole<max_ranks>(p, me, j, 0, part_packs, pitch);
        KVPRIM_NCCL_UNROLL_BY(1)
        for (uint32_t skip = 0; !at_once && skip + 1 < p.world; skip += 4)
            kvpn_send_whole<5>(p, me, j, skip, part_packs, pitch);
        return;
    }
    kvpn_take_turn(p, me, j);
    KVPRIM_NCCL_UNROLL_BY(1)
    for (uint32_t k = 1; k < p.world; k++) {
        const uint32_t to = kvpn_peer_rank(p, k), i = to * part_packs + at;
        if (i < p.packs)
            kvpn_store_slot(
                p.peer[k] + kvpn_send_offset(p, me, j),
                kvpn_replace_empty(kvpn_load_pack<uint4, false>((const char *)p.send + to * pitch, p.count, i)));
    }
}

/* Waits for pack j of this rank's part from all others, sums and writes it. `shares`: also sends the sum to all. */
template <class T, int max_ranks>
KVPRIM_NCCL_DEVICE bool kvpn_sum_part(const kvpn_params &p, kvpn_thread &me, uint32_t j, uint32_t part_packs,
                                      uint64_t pitch, bool shares)
{
    const uint32_t at = p.rank * part_packs + me.block * p.block_packs + j, others = kvpn_other_ranks(p);
    uint4 v[max_ranks];
    char *const slots = p.peer[0] + kvpn_slot_offset(p, me, 0, 0, j);
    if (shares && at >= p.packs)
        return true;
    kvpn_init_sum<T, max_ranks>(p, kvpn_load_pack<uint4, T::whole>((const char *)p.send + p.rank * pitch, p.count, at),
                                v);
    const uint32_t what = kvpn_reduction<T, max_ranks>::before_wait(p, me);
    if (!kvpn_wait_for_slots<max_ranks, false>(p, me, slots, p.sender_bytes, others, -1, v))
        return false;
    const uint4 sum = kvpn_reduction<T, max_ranks>::of(p, what, v);
    if (shares)
        kvpn_store_to_peers<max_ranks>(p, kvpn_slot_offset(p, me, 1, p.rank, j), sum);
    kvpn_store_pack<uint4, T::whole>(p.recv, p.count, at, sum);
    kvpn_clear_slots<max_ranks>(slots, p.sender_bytes, others);
    return true;
}

/* One shot. Every rank sends the whole tensor to every other rank, and sums by itself. */
template <class T, int max_ranks> struct kvpn_one_shot : kvpn_pack_by_pack<kvpn_one_shot<T, max_ranks>> {
    KVPRIM_NCCL_DEVICE void send(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        const uint4 v = kvpn_load_pack<uint4, T::whole>(p.send, p.count, me.block * p.block_packs + j);
        kvpn_take_turn(p, me, j);
        kvpn_store_to_peers<max_ranks>(p, kvpn_send_offset(p, me, j), kvpn_replace_empty(v));
    }

    KVPRIM_NCCL_DEVICE bool receive(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        return kvpn_sum_part<T, max_ranks>(p, me, j, 0, 0, false);
    }
};

/* Two shots. Each rank receives its slice from every other rank, sums it, and sends the sum to all. Pack j of a block
   is at the same place of every slice. With kvpn_any it is one shot and reduce_scatter, too: so long code, once. */
template <class T, int max_ranks> struct kvpn_two_shot : kvpn_pack_by_pack<kvpn_two_shot<T, max_ranks>> {
    enum { two_waits = 1, is_any = kvpn_reduction<T, max_ranks>::is_any };

    KVPRIM_NCCL_DEVICE bool shares(const kvpn_params &p)
    {
        return !is_any || (p.what & kvpn_shares);
    }

    KVPRIM_NCCL_DEVICE uint32_t part_packs(const kvpn_params &p)
    {
        return shares(p) ? p.slice_packs : 0;
    }

    KVPRIM_NCCL_DEVICE uint64_t pitch(const kvpn_params &p)
    {
        return is_any ? p.pitch : 0;
    }

    KVPRIM_NCCL_DEVICE void send(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        if (is_any && (part_packs(p) | pitch(p)) == 0)
            kvpn_one_shot<T, max_ranks>::send(p, me, j);
        else
            kvpn_send_parts<T, max_ranks>(p, me, j, part_packs(p), pitch(p));
    }

    KVPRIM_NCCL_DEVICE bool receive(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        return kvpn_sum_part<T, max_ranks>(p, me, j, part_packs(p), pitch(p), shares(p));
    }

    KVPRIM_NCCL_DEVICE bool receive_sums(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        const uint32_t at = me.block * p.block_packs + j;
        uint4 v[max_ranks] = {};
        char *const slots = p.peer[0] + kvpn_slot_offset(p, me, 1, 0, j);
        uint32_t ranks = 0; /* whose slice has such a pack */
        for (uint32_t r = 0; r < max_ranks; r++)
            ranks |= (uint32_t)(r < p.world && r != p.rank && r * p.slice_packs + at < p.packs) << r;
        if (!kvpn_wait_for_slots<max_ranks, false>(p, me, slots, p.sender_bytes, ranks, -1, v))
            return false;
        const bool whole = kvpn_are_whole<T>(p, p.recv, at, p.slice_packs, 0);
        for (uint32_t r = 0; r < max_ranks; r++)
            if (whole && ranks >> r & 1)
                kvpn_store_pack<uint4, true>(p.recv, p.count, r * p.slice_packs + at, v[r]);
        KVPRIM_NCCL_UNROLL_BY(1)
        for (uint32_t r = 0; !whole && r < p.world; r++)
            if (ranks >> r & 1) /* arrived, and in this thread's slot: a register cannot be had by number */
                kvpn_store_pack<uint4, false>(p.recv, p.count, r * p.slice_packs + at,
                                              kvpn_load_slot(slots + (size_t)r * p.sender_bytes));
        kvpn_clear_slots<max_ranks>(slots, p.sender_bytes, ranks);
        return true;
    }
};

/* reduce_scatter, the first of two shots. Every rank sends every other rank that rank's part, and sums its own. */
template <class T, int max_ranks> struct kvpn_scatter : kvpn_pack_by_pack<kvpn_scatter<T, max_ranks>> {
    KVPRIM_NCCL_DEVICE void send(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        kvpn_send_parts<T, max_ranks>(p, me, j, 0, p.pitch);
    }

    KVPRIM_NCCL_DEVICE bool receive(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        return kvpn_sum_part<T, max_ranks>(p, me, j, 0, p.pitch, false);
    }
};

/* all_gather of few bytes. Every rank sends `count` bytes to all others, 8 to a slot. T: whether tensors are whole. */
template <class T, int max_ranks> struct kvpn_gather_all : kvpn_pack_by_pack<kvpn_gather_all<T, max_ranks>> {
    KVPRIM_NCCL_DEVICE void send(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        const uint2 v = kvpn_load_pack<uint2, T::whole>(p.send, p.count, me.block * p.block_packs + j);
        kvpn_take_turn(p, me, j);
        kvpn_store_to_peers<max_ranks>(p, kvpn_send_offset(p, me, j), uint4{v.x, 0, v.y, 0});
    }

    KVPRIM_NCCL_DEVICE bool receive(const kvpn_params &p, kvpn_thread &me, uint32_t j)
    {
        const uint32_t at = me.block * p.block_packs + j, others = kvpn_other_ranks(p);
        char *const to = (char *)p.recv, *const slots = p.peer[0] + kvpn_slot_offset(p, me, 0, 0, j);
        uint4 v[max_ranks] = {};
        kvpn_store_pack<uint2, T::whole>(to + p.rank * p.pitch, p.count, at,
                                         kvpn_load_pack<uint2, T::whole>(p.send, p.count, at));
        if (!kvpn_wait_for_slots<max_ranks, true>(p, me, slots, p.sender_bytes, others, -1, v))
            return false;
        KVPRIM_NCCL_UNROLL
        for (uint32_t r = 0; r < max_ranks; r++)
            if (others >> r & 1)
                kvpn_store_pack<uint2, T::whole>(to + r * p.pitch, p.count, at, uint2{v[r].x, v[r].z});
        kvpn_clear_slots<max_ranks>(slots, p.sender_bytes, others);
        return true;
    }
};

/* >>impl_pipeline --------------------------------------------------------------------------------------------------

   One shot of many packs between two ranks, in one launch of any size. (Between two ranks it sends no more
   than two shots do, and no second half waits for the first.) So is reduce_scatter; of an all_reduce p.pitch is 0.

   Each thread has kvpn_pipeline_packs packs in each step. In round k it sends its packs of step k, and reduces those of
   step k - 1: all at once, or one piece of both after another. The thread that writes a result is the one that has sent
   what it may overwrite. The slots of this launch's set, those of both areas and of both senders, are 4 or 8 places for
   steps, which are reused. Where they are must not depend on T, which may differ between ranks.

   Why step k finds its place empty: a thread has a fence before each round if there are 4 places, and before every
   third one if there are 8. Its last fence was before round g, which is k, or is at least k - 2. Before that fence it
   had received step g - 2. The other rank sent that after a fence before round g - 2, or g - 3. Before its fence, the
   other rank had emptied the places of all steps up to g - 4, or g - 5: up to k - 4, or k - 7 at least. */
enum { kvpn_pipeline_packs = 8, kvpn_pipeline_threads = 512 };
template <class T, int max_ranks> struct kvpn_pipeline {
    enum { threads = kvpn_pipeline_threads, turn_last = 0 };
    /* Packs of a piece, and pieces of a step. Two packs keep as much under way as two shots do; what kvpn_any does with
       8 of them would be 70 KB of code. */
    enum {
        packs = !T::whole          ? 2
                : T::per_word == 4 ? 4
                                   : (int)kvpn_pipeline_packs,
        pieces = kvpn_pipeline_packs / packs
    };

    /* Places in each row of slots: of an area, from a sender. */
    KVPRIM_NCCL_DEVICE uint32_t places_of_row(const kvpn_params &p, const kvpn_thread &me)
    {
        return p.block_bytes >= 2 * 16 * kvpn_pipeline_packs * me.threads ? 2 : 1;
    }

    /* The thread's first pack of a piece. Packs of a thread lie p.block_packs apart, which is a pack of each thread. */
    KVPRIM_NCCL_DEVICE uint32_t first_pack(const kvpn_params &p, const kvpn_thread &me, uint32_t piece)
    {
        return piece * packs * p.block_packs + me.block * me.threads + me.thread;
    }

    /* A bit for each pack of the piece that the thread has. */
    KVPRIM_NCCL_DEVICE uint32_t packs_of(const kvpn_params &p, const kvpn_thread &me, uint32_t piece)
    {
        const uint32_t first = first_pack(p, me, piece);
        uint32_t which = 0;
        for (uint32_t u = 0; u < packs; u++)
            which |= (uint32_t)(first + u * p.block_packs < p.packs) << u;
        return which;
    }

    /* Of the thread's first slot; the next ones are me.threads further on. */
    KVPRIM_NCCL_DEVICE uint32_t offset(const kvpn_params &p, const kvpn_thread &me, uint32_t piece)
    {
        const uint32_t of_row = places_of_row(p, me), step = piece / pieces, row = step / of_row % 4;
        return kvpn_slot_offset(p, me, row / 2, row % 2,
                                (step % of_row * kvpn_pipeline_packs + piece % pieces * packs) * me.threads +
                                    me.thread);
    }

    /* Of the part for rank `part`, if there are parts: those packs from pack `first` on whose bits are set. */
    template <int count>
    KVPRIM_NCCL_DEVICE void load(const kvpn_params &p, uint32_t part, uint32_t first, uint32_t which, uint4 (&v)[count])
    {
        const char *const from = (const char *)p.send + part * p.pitch;
        for (uint32_t u = 0; u < count; u++)
            if (which >> u & 1)
                v[u] = kvpn_load_pack<uint4, T::whole>(from, p.count, first + u * p.block_packs);
    }

    KVPRIM_NCCL_DEVICE void send(const kvpn_params &p, const kvpn_thread &me, uint32_t piece, const uint4 (&v)[packs])
    {
        const uint32_t which = packs_of(p, me, piece);
        char *const to = p.peer[1] + offset(p, me, piece);
        for (uint32_t u = 0; u < packs; u++)
            if (which >> u & 1)
                kvpn_store_slot(to + 16 * u * me.threads, kvpn_replace_empty(v[u]));
    }

    KVPRIM_NCCL_DEVICE bool receive(const kvpn_params &p, kvpn_thread &me, uint32_t piece, uint32_t what)
    {
        const uint32_t which = packs_of(p, me, piece), first = first_pack(p, me, piece);
        char *const slots = p.peer[0] + offset(p, me, piece);
        uint4 v[packs] = {};
        if (!kvpn_wait_for_slots<packs, false>(p, me, slots, 16 * me.threads, which, (int32_t)(p.rank ^ 1), v))
            return false;
        KVPRIM_NCCL_UNROLL
        for (uint32_t half = 0; half < packs; half += packs / 2) { /* all together would need too many registers */
            uint4 own[packs / 2] = {};
            load(p, p.rank, first + half * p.block_packs, which >> half, own);
            KVPRIM_NCCL_UNROLL
            for (uint32_t u = 0; u < packs / 2; u++) {
                const uint4 mine = kvpn_replace_empty(own[u]), other = v[half + u];
                uint4 both[2] = {p.rank ? other : mine, p.rank ? mine : other};
                if (which >> (half + u) & 1)
                    kvpn_store_pack<uint4, T::whole>(p.recv, p.count, first + (half + u) * p.block_packs,
                                                     kvpn_reduction<T, 2>::of(p, what, both));
            }
        }
        kvpn_clear_slots<packs>(slots, 16 * me.threads, which);
        return true;
    }

    KVPRIM_NCCL_DEVICE void begin(const kvpn_params &p, kvpn_thread &me)
    {
        kvpn_take_turn(p, me, me.thread);
    }

    KVPRIM_NCCL_DEVICE void complete(const kvpn_params &p, kvpn_thread &me)
    {
        const uint32_t of_step = kvpn_pipeline_packs * p.block_packs, steps = (p.packs + of_step - 1) / of_step;
        const uint32_t what = kvpn_reduction<T, 2>::before_wait(p, me), period = places_of_row(p, me) == 2 ? 3 : 1;
        uint4 v[packs] = {};
        load(p, p.rank ^ 1, first_pack(p, me, 0), packs_of(p, me, 0), v);
        for (uint32_t n = 0; n < (steps + 1) * pieces && me.stop_reason == 0; n++) {
            const uint32_t k = n / pieces;
            if (n % pieces == 0 && k != 0 && k < steps && k % period == 0)
                kvpn_fence();
            send(p, me, n, v);
            load(p, p.rank ^ 1, first_pack(p, me, n + 1), packs_of(p, me, n + 1), v); /* before the wait */
            if (k != 0 && !receive(p, me, n - pieces, what))
                return;
        }
    }
};

/* >>impl_parts -----------------------------------------------------------------------------------------------------

   Ways of all_gather, all_gatherv, all_to_all and all_to_allv: a part from each rank to each other one, of any size and
   place. Gathers send the same part to all. Every pair of ranks has roles of its own in each block, so a thread needs
   only one peer. Thread 0 of a block sends and awaits a slot even where the part has no bytes: see >>impl_protocol. */
enum { kvpn_group = 4, kvpn_large_group = 6 }; /* packs; see kvpn_parts_groups */
#ifndef KVPRIM_NO_EXCHANGE
typedef struct kvpn_part {
    char *at;
    uint32_t bytes;
} kvpn_part;

/* [k]: this rank's part for the rank k further on, and that rank's part for this one. [0]: the part that stays. */
typedef struct kvpn_both_parts {
    kvpn_part to, from;
} kvpn_both_parts;

struct kvpn_parts_params : kvpn_params {
    uint32_t blocks;
    kvpn_both_parts parts[kvpn_max_world];
};

/* Whether pack `at` of a part, of 8 bytes, has a slot. It is pack j of its block. */
KVPRIM_NCCL_DEVICE bool kvpn_has_slot(const kvpn_part &part, uint32_t at, uint32_t j)
{
    return j == 0 || at * 8 < part.bytes;
}

/* Copies the part that stays on this rank. All threads of all blocks share it: this is number `index` of `step`. */
template <bool whole>
KVPRIM_NCCL_DEVICE void kvpn_copy_own_part(const kvpn_parts_params &p, uint32_t index, uint32_t step)
{
    enum { at_once = whole ? 4 : 1 };
    const uint32_t bytes = p.parts[0].to.bytes, packs = p.parts[0].from.at == p.parts[0].to.at ? 0 : (bytes + 15) / 16;
    for (uint32_t i = index; i < packs; i += at_once * step) {
        uint4 v[at_once];
        for (uint32_t k = 0; k < at_once; k++)
            if (i + k * step < packs)
                v[k] = kvpn_load_pack<uint4, whole>(p.parts[0].to.at, bytes, i + k * step);
        for (uint32_t k = 0; k < at_once; k++)
            if (i + k * step < packs)
                kvpn_store_pack<uint4, whole>(p.parts[0].from.at, bytes, i + k * step, v[k]);
    }
}

/* Few bytes, 8 to a slot. Role k sends to and receives from the rank k + 1 further on. `pair`: there are two ranks, and
   the compiler knows the role. A thread sends all its packs before it waits: send and recv do not overlap. */
template <bool pair, bool whole> struct kvpn_parts_slots {
    enum { turn_last = 0 };

    KVPRIM_NCCL_DEVICE void begin(const kvpn_parts_params &p, kvpn_thread &me)
    {
        const uint32_t packs = kvpn_packs_of_block(p, me), k = pair ? 1 : me.role + 1;
        const kvpn_part &part = p.parts[k].to;
        for (uint32_t j = me.thread; j < packs; j += me.threads) {
            const uint32_t at = me.block * p.block_packs + j;
            uint2 v = {0, 0};
            if (at * 8 < part.bytes)
                v = kvpn_load_pack<uint2, whole>(part.at, part.bytes, at);
            kvpn_take_turn(p, me, j);
            if (kvpn_has_slot(part, at, j))
                kvpn_store_slot(p.peer[k] + kvpn_send_offset(p, me, j), uint4{v.x, 0, v.y, 0});
        }
    }

    /* The first role copies the part that stays. */
    KVPRIM_NCCL_DEVICE void complete(const kvpn_parts_params &p, kvpn_thread &me)
    {
        const uint32_t packs = kvpn_packs_of_block(p, me), k = pair ? 1 : me.role + 1, from = kvpn_peer_rank(p, k);
        const kvpn_part &part = p.parts[k].from, &own = p.parts[0].to;
        for (uint32_t j = me.thread; me.stop_reason == 0 && j < packs; j += me.threads) {
            const uint32_t at = me.block * p.block_packs + j;
            char *const slot = p.peer[0] + kvpn_slot_offset(p, me, 0, from, j);
            uint4 v[1];
            if (k == 1 && at * 8 < own.bytes) {
                const uint2 pack = kvpn_load_pack<uint2, whole>(own.at, own.bytes, at);
                kvpn_store_pack<uint2, whole>(p.parts[0].from.at, own.bytes, at, pack);
            }
            if (!kvpn_has_slot(part, at, j))
                continue;
            if (!kvpn_wait_for_slots<1, true>(p, me, slot, 0, 1, (int32_t)from, v))
                return;
            if (at * 8 < part.bytes)
                kvpn_store_pack<uint2, whole>(part.at, part.bytes, at, uint2{v[0].x, v[0].z});
            kvpn_clear_slots<1>(slot, 0, 1);
        }
    }
};

KVPRIM_NCCL_DEVICE uint32_t kvpn_ones_of(uint4 v)
{
    return (uint32_t)(v.x == kvpn_empty_word) | (uint32_t)(v.y == kvpn_empty_word) << 1 |
           (uint32_t)(v.z == kvpn_empty_word) << 2 | (uint32_t)(v.w == kvpn_empty_word) << 3;
}

KVPRIM_NCCL_DEVICE uint4 kvpn_with_ones(uint4 v, uint32_t ones)
{
    return uint4{ones & 1 ? kvpn_empty_word : v.x, ones & 2 ? kvpn_empty_word : v.y, ones & 4 ? kvpn_empty_word : v.z,
                 ones & 8 ? kvpn_empty_word : v.w};
}

/* Many bytes, 16 to a slot, as in sums. One more slot after each group of a thread's slots says which words of the
   group were all ones. Role 2k sends to the rank k + 1 further on, and role 2k + 1 receives from it. In a gather of
   more than two ranks role 0 sends to all, and role k receives from the rank k further on: roles have more threads.
   Each thread's slots lie as far apart as a role has threads, and its groups alternate between the areas. A larger
   group spends less on that slot, but writes later: 6 take 14 % longer than 4 for 512 KB, 8 % less for 64 MB. */
template <int group, bool gathers, bool whole> struct kvpn_parts_groups {
    enum { turn_last = 1, slots = group + 1 };

    /* How many ranks further on the one is that a thread's role sends to or receives from; 0: it sends to all. */
    KVPRIM_NCCL_DEVICE uint32_t peer_of(const kvpn_thread &me)
    {
        return gathers ? me.role : me.role / 2 + 1;
    }

    KVPRIM_NCCL_DEVICE bool sends(const kvpn_thread &me)
    {
        return gathers ? me.role == 0 : me.role % 2 == 0;
    }

    /* Where slot k of the thread's group number `round` lies that rank `from` fills. */
    KVPRIM_NCCL_DEVICE uint32_t offset(const kvpn_params &p, const kvpn_thread &me, uint32_t from, uint32_t round,
                                       uint32_t k)
    {
        return kvpn_slot_offset(p, me, round & 1, from, (round / 2 * slots + k) * me.threads + me.thread);
    }

    /* The packs of a part from `first` on that are this block's. */
    KVPRIM_NCCL_DEVICE uint32_t packs_of(const kvpn_part &part, uint32_t first, uint32_t most)
    {
        const uint32_t all = (part.bytes + 15) / 16;
        return all <= first ? 0 : all - first < most ? all - first : most;
    }

    KVPRIM_NCCL_DEVICE void store(const kvpn_parts_params &p, const kvpn_thread &me, uint32_t round, uint32_t k,
                                  uint4 v)
    {
        const uint32_t at =
            me.stop_reason ? 2 * p.turn_bytes : offset(p, me, p.rank, round, k); /* as kvpn_send_offset */
        if (gathers)
            kvpn_store_to_peers<kvpn_max_world>(p, at, v);
        else
            kvpn_store_slot(p.peer[peer_of(me)] + at, v);
    }

    KVPRIM_NCCL_DEVICE void send(const kvpn_parts_params &p, kvpn_thread &me)
    {
        const kvpn_part &part = p.parts[gathers ? 1 : peer_of(me)].to; /* a gather's are all the same */
        const uint32_t first = me.block * p.block_packs, packs = packs_of(part, first, kvpn_packs_of_block(p, me));
        for (uint32_t j = me.thread, round = 0; j < packs || j == 0; j += group * me.threads, round++) {
            uint4 v[group];
            uint32_t ones = 0;
            for (uint32_t k = 0; k < group; k++)
                if (j + k * me.threads < packs)
                    v[k] = kvpn_load_pack<uint4, whole>(part.at, part.bytes, first + j + k * me.threads);
            kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 0; k < group; k++)
                if (j + k * me.threads < packs) {
                    store(p, me, round, k, kvpn_replace_empty(v[k]));
                    ones |= kvpn_ones_of(v[k]) << 4 * k;
                }
            store(p, me, round, group, uint4{ones, 0, 0, 0});
        }
    }

    KVPRIM_NCCL_DEVICE void begin(const kvpn_parts_params &p, kvpn_thread &me)
    {
        const uint32_t others = p.world - 1, k = peer_of(me) - 1;
        if (sends(me))
            return send(p, me);
        kvpn_take_turn(p, me, me.thread);
        kvpn_copy_own_part<whole>(p, (me.block * others + k) * me.threads + me.thread, p.blocks * others * me.threads);
    }

    KVPRIM_NCCL_DEVICE void complete(const kvpn_parts_params &p, kvpn_thread &me)
    {
        const kvpn_part &part = p.parts[peer_of(me)].from;
        const uint32_t first = me.block * p.block_packs, packs = packs_of(part, first, kvpn_packs_of_block(p, me));
        const uint32_t from = kvpn_peer_rank(p, peer_of(me));
        for (uint32_t j = me.thread, round = 0; !sends(me) && me.stop_reason == 0 && (j < packs || j == 0);
             j += group * me.threads, round++) {
            uint4 v[slots] = {};
            uint32_t which = 1u << group;
            char *const at = p.peer[0] + offset(p, me, from, round, 0);
            for (uint32_t i = 0; i < group; i++)
                which |= (uint32_t)(j + i * me.threads < packs) << i;
            if (!kvpn_wait_for_slots<slots, false>(p, me, at, 16 * me.threads, which, (int32_t)from, v))
                return;
            const uint32_t ones = v[group].x;
            KVPRIM_NCCL_UNROLL
            for (uint32_t i = 0; i < group; i++)
                if (which >> i & 1)
                    kvpn_store_pack<uint4, whole>(part.at, part.bytes, first + j + i * me.threads,
                                                  kvpn_with_ones(v[i], ones >> 4 * i));
            kvpn_clear_slots<slots>(at, 16 * me.threads, which);
        }
    }
};
#endif

#ifndef KVPRIM_NCCL_EMULATE
/* >>impl_kernel -- the kernel, and programmatic dependent launch */

/* Called before the first access of memory. A successor may start early only if the caller has promised that it waits:
   some of NCCL's (2.28 to 2.30.6) read what precedes them in the stream without waiting for it. */
KVPRIM_NCCL_DEVICE void kvpn_wait_for_predecessor(const kvpn_params &p)
{
    if (kvpn_is_sm_90)
        asm volatile("griddepcontrol.wait;" ::: "memory");
    if (kvpn_is_sm_90 && p.trigger)
        asm volatile("griddepcontrol.launch_dependents;");
}

/* Passes the turn on after all threads have taken it. Thread 0 always has a pack. */
KVPRIM_NCCL_DEVICE void kvpn_end_turn(const kvpn_params &p, const kvpn_thread &me)
{
    __syncthreads();
    if (threadIdx.x == 0 && me.role == 0)
        p.turn[me.block] = me.turn ^ 1;
}

/* Each block exchanges packs with the blocks of its number on the other ranks. */
template <class way, class Params> KVPRIM_NCCL_DEVICE void kvpn_run_way(const Params &p)
{
    kvpn_thread me = {blockIdx.x, threadIdx.y, threadIdx.x, blockDim.x, 0, 0, 0, 0, 0};
    kvpn_wait_for_predecessor(p);
    way::begin(p, me);
    if (!way::turn_last)
        kvpn_end_turn(p, me);
    way::complete(p, me);
    if (me.stop_reason != 0)
        kvpn_stop_rank(p, me);
    if (way::turn_last)
        kvpn_end_turn(p, me);
}

template <template <class, int> class Way, class T, int max_ranks>
static __global__ __launch_bounds__(max_ranks <= 4 ? (int)Way<T, max_ranks>::threads : (int)kvpn_max_threads_of_8,
                                    1) void kvpn_kernel(const KVPRIM_GRID_CONSTANT kvpn_params p)
{
    kvpn_run_way<Way<T, max_ranks>>(p);
}

#ifndef KVPRIM_NO_EXCHANGE
template <class Way>
static __global__ __launch_bounds__(kvpn_max_threads,
                                    1) void kvpn_parts_kernel(const KVPRIM_GRID_CONSTANT kvpn_parts_params p)
{
    kvpn_run_way<Way>(p);
}
#endif
#endif

#ifndef KVPRIM_NO_NORM
/* >>impl_norm ------------------------------------------------------------------------------------------------------

   What follows a sum: see >>norm. Two kernels share kvpn_norm. kvpn_few_kernel also sums, in one shot, for the few
   tokens of decoding (>>impl_norm_few). kvpn_norm_kernel finds s in memory, after a sum of >>impl_ways or of NCCL.
   kvpn_norm_way_of says which one a call takes.

   A token has a row of threads. Thread t of a row has the token's packs t, t + threads, ... when it sends, sums,
   multiplies and writes, so outputs may be inputs. Its threads meet once for each token, and once more for the scale of
   a token. Threads that have stopped meet too, because the others would wait for them. */
struct kvpn_norm_params : kvpn_params { /* block_packs: tokens of a block */
    uint32_t row_packs, rows, tokens;
    int64_t send_stride; /* bytes from one token to the next, as all strides here */
    const char *residual, *weight;
    int64_t residual_stride;
    float *scale;
    char *sum, *residual_out, *out, *quantised;
    int64_t sum_stride, residual_out_stride, out_stride, quantised_stride;
    float part_of_hidden, eps, scale_min; /* part_of_hidden: 1 / hidden */
    uint32_t weight_plus_one, scales;     /* scales: a kvpn_norm_scales */
    uint32_t share_bits; /* 2^share_bits blocks share a token, and block_packs are the tokens of all of them */
    int64_t scale_stride, scale_group_stride;
};

/* What has a scale: the tensor, each token, or each group, in three kinds: fp32, powers of two in fp32, exponents. */
enum kvpn_norm_scales { kvpn_of_tensor, kvpn_of_token, kvpn_of_groups, kvpn_of_powers, kvpn_of_exponents };

enum { kvpn_norm_max_rows = 8 /* side by side */, kvpn_norm_lanes = 32, kvpn_few_max_share_bits = 3 };

/* What a kernel leaves out. The first four are of kvpn_few_kernel.
   plain: a token in each block, whole warps of packs, a residual, residual_out and out, nothing quantised, no sum, and
   no 1 is added to the weight.
   shared: the same, of a token in each cluster of 2^share_bits blocks, which all have as many packs.
   rows: whole warps of packs, at most a token in each row, any outputs.
   all: leaves nothing out; tokens in turn too.
   alone: s is in memory; a token in each block, up to two packs for a thread, any outputs. */
enum kvpn_norm_form { kvpn_norm_plain, kvpn_norm_shared, kvpn_norm_rows, kvpn_norm_all, kvpn_norm_alone };

template <kvpn_norm_form form> struct kvpn_norm_is {
    enum {
        usual = form == kvpn_norm_plain || form == kvpn_norm_shared,
        in_clusters = form == kvpn_norm_shared || form == kvpn_norm_all,
        in_turn = form == kvpn_norm_all,
        partial = form == kvpn_norm_all || form == kvpn_norm_alone, /* some threads may have no pack */
        packs = form == kvpn_norm_alone ? 2 : 1,                    /* of a thread, at most */
        rows = form == kvpn_norm_rows || form == kvpn_norm_all ? (int)kvpn_norm_max_rows : 1,
        two_groups = in_clusters || packs == 2, /* a lane adds two groups of 32 packs: 64 are 16,384 elements */
        groups = two_groups ? 2 * (int)kvpn_norm_lanes : (int)kvpn_norm_lanes
    };
};

/* >>impl_norm_few --------------------------------------------------------------------------------------------------

   One shot, fastest for the few tokens of decoding: a pack for each thread of a row, and no other threads except those
   that complete a warp. Every instruction counts, because a multiprocessor has a whole token. 1 x 4,096 takes 2.5 us
   (H200), a sum of as many bytes 2.0. What helps:
   - weight and residual are loaded, and the turn ends, after the addend is sent: the exchange is under way (0.1 us);
   - a slot is emptied as soon as its pack is there: the store overlaps with the barrier (0.1 us);
   - squares are added by shuffles: if every thread adds what all warps found, it takes 0.1 us longer;
   - the usual call has no conditions (0.2 us), and what a warp does that has polled in vain lies apart (0.2 to 0.5 us).

   A token of more packs than a block has threads is shared by a cluster of blocks, up to 8, which write what their
   warps have found to each other's shared memory. A cluster takes 0.5 us longer than a block (nvcc makes a fence of the
   whole GPU of its barrier's release), and a block's time grows by 0.2 us per 1,024 elements: 1 x 16,384 takes 3.1 us
   with 8 blocks, 3.3 with 4, 3.9 with 2. Up to 8,192 elements, a block alone is as fast (of 5 to 8 ranks it has half as
   many threads: clusters begin above 4,096).

   More tokens than rows take turns. A row sends its next token as soon as one has come, before it finishes that. What a
   multiprocessor loads comes after what it has sent through the link: if a row has sent two tokens when it waits, 512 x
   4,096 takes 18.2 us instead of 17.1, and 19.6 if it has sent all. */

/* Ranks may take different forms: slots, blocks and turns are the same. */
static inline kvpn_norm_form kvpn_few_form_of(const kvpn_norm_params *p)
{
    const uint32_t unit = (uint32_t)kvpn_norm_lanes << p->share_bits; /* otherwise some threads have no pack */
    const bool usual = p->residual && p->residual_out && p->out && !p->quantised && !p->sum && !p->weight_plus_one,
               whole = p->row_packs % unit == 0 && p->block_packs <= p->rows;
    return !whole || (p->share_bits && !usual) ? kvpn_norm_all
           : p->share_bits                     ? kvpn_norm_shared
           : usual && p->block_packs == 1      ? kvpn_norm_plain
                                               : kvpn_norm_rows;
}

/* 1 / sqrt(a), rounded to nearest. These are the compiler's steps (sm_75 to sm_120) without those that bring a between
   1/2 and 2, which usual numbers do not need. A test compares all numbers: it must run on a GPU of a new kind. */
KVPRIM_NCCL_DEVICE float kvpn_root_reciprocal(float a)
{
    const float r = kvpn_near_root_reciprocal(a), square = __fmul_rn(r, r), rest = __fmaf_rn(r, r, -square),
                error = __fmaf_rn(-a, rest, __fmaf_rn(-a, square, 1.0f));
    const bool usual = kvpi_bits_of(a) - 0x00800000 < 0x5f800000 - 0x00800000; /* 2^-126 to 2^64 */
    return usual ? __fmaf_rn(__fmaf_rn(error, 0.375f, 0.5f), __fmul_rn(r, error), r) : __frsqrt_rn(a);
}

/* largest / 448, rounded to nearest, or any number below 2^-126: kvpc_tile_scale in kvprim_cuda.cuh says why. */
KVPRIM_NCCL_DEVICE float kvpn_norm_quotient(float largest)
{
    const float q = __fmul_rn(largest, 1 / 448.0f);
    return __fmaf_rn(__fmaf_rn(-q, 448.0f, largest), 1 / 448.0f, q);
}

/* Divides numbers of 11 bits by the scale, before they become e4m3: kvpc_over in kvprim_cuda.cuh has the proof for
   scales from 2^-64 to 2^84. Others, and those below 0, are brought there by a power of two, which multiplies the
   numbers, too: 2^85 up to 1/2, as the smallest is 2^-149. The exact reciprocals of 0, infinity and NaN multiply. */
KVPRIM_NCCL_DEVICE void kvpn_norm_divide(float (&f)[8], float scale)
{
    float near = kvpn_near_reciprocal(scale);
    if (kvpi_bits_of(scale) - 0x1f800000 >= 0x69800000 - 0x1f800000) {
        const uint32_t magnitude = kvpi_bits_of(scale) & 0x7fffffff;
        const bool exact = magnitude == 0 || magnitude >= 0x7f800000;
        const float by = exact ? near : magnitude < 0x3f000000 ? 0x1p85f : 0x1p-63f;
        scale = exact ? 1.0f : __fmul_rn(scale, by), near = kvpn_near_reciprocal(scale);
        for (int e = 0; e < 8; e++)
            f[e] = __fmul_rn(f[e], by);
    }
    const float high = kvpi_float_of(kvpi_bits_of(near) - 2);
    const float low = __fmaf_rn(__fmaf_rn(-scale, high, 1.0f), high, __fmul_rn(high, 0x1p-41f));
    for (int e = 0; e < 8; e++)
        f[e] = __fmaf_rn(f[e], high, __fmul_rn(f[e], low));
}

#ifndef KVPRIM_NCCL_EMULATE
/* A barrier for all threads of a cluster: they arrive, and wait for the others. at_start: orders no memory. */
KVPRIM_NCCL_DEVICE void kvpn_cluster_arrive(bool at_start)
{
    if (kvpn_is_sm_90 && at_start)
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    else if (kvpn_is_sm_90)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

KVPRIM_NCCL_DEVICE void kvpn_cluster_wait(void)
{
    if (kvpn_is_sm_90)
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* at: in this block's shared memory; stores to the same place in that of a block of the cluster, which must run. */
KVPRIM_NCCL_DEVICE void kvpn_cluster_store(float *at, uint32_t block, float value)
{
    if (kvpn_is_sm_90)
        asm volatile(
            "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" ::"r"(
                (uint32_t)__cvta_generic_to_shared(at)),
            "r"(block), "f"(value)
            : "memory");
}
#endif

/* What a thread does with a token of its row. T: the element type; max_ranks: of kvpn_few_kernel, or any. me.thread
   counts on from block to block of a cluster. */
template <class T, int max_ranks, kvpn_norm_form form> struct kvpn_norm {
    typedef kvpn_norm_is<form> is;
    typedef kvpn_norm_params params;
    typedef const kvpn_thread thread;
    enum { packs = is::packs, usual = is::usual, once = form == kvpn_norm_rows }; /* once: a token, a pack */

    /* A thread's part of one token. r is the addend, s, r and y, one after another. */
    struct token {
        uint32_t token;
        uint4 r[packs], residual[packs], weight[packs];
        float factor[packs][8];             /* the weight, or that plus 1 */
        float squares[packs], scale[packs]; /* of each pack: added; the tensor's, until finish() sets others */
        int64_t scale_at;                   /* if `once`: scale_offset() */
    };

    KVPRIM_NCCL_DEVICE bool quantises(const params &p)
    {
        return !usual && p.quantised;
    }

    KVPRIM_NCCL_DEVICE uint32_t pack(thread &me, uint32_t k)
    {
        return k * me.threads + me.thread;
    }

    /* Whether the thread has a pack k. */
    KVPRIM_NCCL_DEVICE bool has(const params &p, thread &me, uint32_t k)
    {
        return !is::partial || pack(me, k) < p.row_packs;
    }

    KVPRIM_NCCL_DEVICE uint4 load(const params &p, thread &me, const void *from, uint32_t row, int64_t stride,
                                  uint32_t k)
    {
        const char *const at = (const char *)from + (int64_t)row * stride;
        return has(p, me, k) ? ((const uint4 *)at)[pack(me, k)] : uint4{0, 0, 0, 0};
    }

    KVPRIM_NCCL_DEVICE void store(const params &p, thread &me, void *to, const token &t, int64_t stride, uint32_t k)
    {
        if (has(p, me, k))
            ((uint4 *)((char *)to + (int64_t)t.token * stride))[pack(me, k)] = t.r[k];
    }

    /* Where in p.scale, in bytes, the scale goes that the thread writes for its pack k; -1: it writes none. */
    KVPRIM_NCCL_DEVICE int64_t scale_offset(const params &p, thread &me, const token &t, uint32_t k)
    {
        const uint32_t number = pack(me, k), group = number / kvpn_norm_group_packs;
        if (p.scales == kvpn_of_tensor || number % kvpn_norm_group_packs || (p.scales == kvpn_of_token && number))
            return -1;
        return t.token * p.scale_stride + (p.scales == kvpn_of_exponents ? group / 4 * p.scale_group_stride + group % 4
                                                                         : group * p.scale_group_stride);
    }

    /* What a token needs besides s. */
    KVPRIM_NCCL_DEVICE void prepare(const params &p, thread &me, token &t)
    {
        for (uint32_t k = 0; k < packs; k++) {
            t.weight[k] = load(p, me, p.weight, 0, 0, k);
            t.residual[k] =
                usual || p.residual ? load(p, me, p.residual, t.token, p.residual_stride, k) : uint4{0, 0, 0, 0};
            t.scale[k] = quantises(p) && p.scales == kvpn_of_tensor ? *p.scale : 0;
        }
        if (once && quantises(p)) {
            t.scale_at = scale_offset(p, me, t, 0);
#ifndef KVPRIM_NCCL_EMULATE
            asm volatile("" : "+l"(t.scale_at)); /* the compiler would move it after the wait: 0.1 us */
#endif
        }
    }

    /* s from memory, and what else a token needs. */
    KVPRIM_NCCL_DEVICE void begin_alone(const params &p, thread &me, token &t)
    {
        t.token = me.block;
        for (uint32_t k = 0; k < packs; k++)
            t.r[k] = load(p, me, p.send, t.token, p.send_stride, k);
        prepare(p, me, t);
    }

    KVPRIM_NCCL_DEVICE void set_factor(const params &p, token &t, uint32_t k)
    {
        kvpn_split_pack<T>(t.weight[k], t.factor[k]);
        for (int e = 0; e < 8 && !usual && p.weight_plus_one; e++)
            t.factor[k][e] = __fadd_rn(t.factor[k][e], 1.0f);
    }

    /* r from s, and the squares. One pack's factor, too: later it costs 0.02 to 0.08 us (H200); two, 7 registers. */
    KVPRIM_NCCL_DEVICE void add(const params &p, thread &me, token &t)
    {
        for (uint32_t k = 0; k < packs; k++) {
            float f[8];
            if (!usual && p.sum)
                store(p, me, p.sum, t, p.sum_stride, k);
            if (usual || p.residual)
                t.r[k] = kvpn_add_packs<T>(t.r[k], t.residual[k]);
            if (usual || p.residual_out)
                store(p, me, p.residual_out, t, p.residual_out_stride, k);
            kvpn_split_pack<T>(t.r[k], f);
            t.squares[k] = 0;
            for (int e = 0; e < 8; e++)
                t.squares[k] = __fmaf_rn(f[e], f[e], t.squares[k]);
            if (packs == 1)
                set_factor(p, t, k);
        }
    }

    /* y from r. total: of all squares. */
    KVPRIM_NCCL_DEVICE void multiply(const params &p, thread &me, float total, token &t)
    {
        const float by = kvpn_root_reciprocal(__fadd_rn(__fmul_rn(total, p.part_of_hidden), p.eps));
        for (uint32_t k = 0; k < packs; k++) {
            float f[8];
            if (packs > 1)
                set_factor(p, t, k);
            kvpn_split_pack<T>(t.r[k], f);
            for (int e = 0; e < 8; e++)
                f[e] = __fmul_rn(__fmul_rn(f[e], by), t.factor[k][e]);
            t.r[k] = kvpn_join_pack<T>(f);
            if (usual || p.out)
                store(p, me, p.out, t, p.out_stride, k);
        }
    }

    /* The bits of the largest |y| of pack k. A thread without it has 0 or NaN there: neither counts. */
    KVPRIM_NCCL_DEVICE uint32_t most_of(const token &t, uint32_t k)
    {
        const uint4 y = t.r[k];
        float f[2];
        T::split(T::larger(T::larger(y.x, y.y), T::larger(y.z, y.w)), f);
        return kvpi_bits_of(fmaxf(fmaxf(fabsf(f[0]), fabsf(f[1])), 0));
    }

    /* The scale of a token or group. most: the bits of its largest |y|. */
    KVPRIM_NCCL_DEVICE float scale_of(const params &p, uint32_t most)
    {
        return kvpi_tile_scale(kvpn_norm_quotient(kvpi_tile_largest(most)), p.scale_min, p.scales >= kvpn_of_powers);
    }

    /* q from y, and the scales. */
    KVPRIM_NCCL_DEVICE void quantise(const params &p, thread &me, const token &t)
    {
        for (uint32_t k = 0; k < packs; k++) {
            float f[8];
            if (!has(p, me, k))
                continue;
            kvpn_split_pack<T>(t.r[k], f);
            kvpn_norm_divide(f, t.scale[k]);
            ((uint2 *)(p.quantised + (int64_t)t.token * p.quantised_stride))[pack(me, k)] =
                uint2{kvpn_e4m3::join(f), kvpn_e4m3::join(f + 4)};
            const int64_t at = once ? t.scale_at : scale_offset(p, me, t, k);
            if (at < 0)
                continue;
            if (p.scales == kvpn_of_exponents)
                ((char *)p.scale)[at] = (char)(kvpi_bits_of(t.scale[k]) >> 23);
            else
                *(float *)((char *)p.scale + at) = t.scale[k];
        }
    }

    /* >>impl_norm_exchange -- how addends come from other ranks, in kvpn_few_kernel; then how threads meet */

    struct awaited { /* of two ranks only one */
        enum { slots = max_ranks == 2 ? 1 : max_ranks };
        char *first;
        uint32_t which;
        uint4 v[max_ranks]; /* v[max_ranks - 1] of two ranks: the own one */
    };

    /* What a thread loads of its next token before it waits. Four ranks leave no registers for it: it comes later. */
    struct later {
        enum { early = max_ranks != 4 };
        uint4 own, residual;
    };

    KVPRIM_NCCL_DEVICE uint32_t first_token(const params &p, thread &me)
    {
        const uint32_t number = is::in_clusters ? me.block >> p.share_bits : me.block;
        return usual ? number : number * p.block_packs;
    }

    /* The end of the tokens of a block, or of its cluster, where they take turns. */
    KVPRIM_NCCL_DEVICE uint32_t end_of_tokens(const params &p, thread &me)
    {
        const uint32_t end = first_token(p, me) + p.block_packs;
        return end < p.tokens ? end : p.tokens;
    }

    /* Where the thread's slot for a token lies that rank `from` fills. me.thread counts from the first block of a
       cluster, slots from this block's: hence minus part, which may wrap around on the way. */
    KVPRIM_NCCL_DEVICE uint32_t offset(const params &p, thread &me, uint32_t from, uint32_t token)
    {
        const uint32_t part = is::in_clusters ? me.block & ((1u << p.share_bits) - 1) : 0,
                       row = usual         ? 0
                             : is::in_turn ? token - first_token(p, me)
                                           : me.role;
        return kvpn_slot_offset(p, me, 0, from, me.thread + (row - part) * me.threads);
    }

    KVPRIM_NCCL_DEVICE void send(const params &p, uint32_t offset, uint4 v)
    {
        kvpn_store_slot(p.peer[1] + offset, kvpn_replace_empty(v));
        for (uint32_t k = 2; k < max_ranks; k++)
            if (k < p.world)
                kvpn_store_slot(p.peer[k] + offset, kvpn_replace_empty(v));
    }

    /* Sends this rank's addend, which t.r becomes, and loads what comes later. False: the row has no token. */
    KVPRIM_NCCL_DEVICE bool begin(const params &p, kvpn_thread &me, token &t)
    {
        t.token = first_token(p, me) + (usual ? 0 : me.role);
        if (!usual && t.token >= (is::in_turn ? end_of_tokens(p, me) : p.tokens))
            return false;
        /* The offset for turn 0 is computed before the turn is loaded. More work after that would become a branch, and
           the pack would be loaded only after it. A thread without a pack sends where those do that stopped. */
        const uint32_t at = offset(p, me, p.rank, t.token);
        t.r[0] = load(p, me, p.send, t.token, p.send_stride, 0);
        kvpn_take_turn(p, me, me.thread);
        const bool stays = me.stop_reason || !has(p, me, 0);
        send(p, stays ? 2 * p.turn_bytes : at + me.turn * p.turn_bytes, t.r[0]);
        prepare(p, me, t);
        return true;
    }

    KVPRIM_NCCL_DEVICE bool goes_on(const params &p, thread &me, const token &t)
    {
        return is::in_turn && t.token + p.rows < end_of_tokens(p, me);
    }

    KVPRIM_NCCL_DEVICE void look_ahead(const params &p, thread &me, const token &t, later &l)
    {
        if (!later::early || !goes_on(p, me, t))
            return;
        l.own = load(p, me, p.send, t.token + p.rows, p.send_stride, 0);
        if (p.residual)
            l.residual = load(p, me, p.residual, t.token + p.rows, p.residual_stride, 0);
    }

    KVPRIM_NCCL_DEVICE void send_next(const params &p, thread &me, const token &t, const later &l)
    {
        const uint32_t next = t.token + p.rows;
        if (!goes_on(p, me, t))
            return;
        const bool stays = me.stop_reason || !has(p, me, 0);
        send(p, stays ? 2 * p.turn_bytes : offset(p, me, p.rank, next),
             l.early ? l.own : load(p, me, p.send, next, p.send_stride, 0));
    }

    KVPRIM_NCCL_DEVICE bool next(const params &p, thread &me, token &t, const later &l)
    {
        if (!goes_on(p, me, t))
            return false;
        t.token += p.rows;
        t.r[0] = l.early ? l.own : load(p, me, p.send, t.token, p.send_stride, 0);
        if (p.residual)
            t.residual[0] = later::early ? l.residual : load(p, me, p.residual, t.token, p.residual_stride, 0);
        return true;
    }

    /* Returns false if not all addends are here soon. */
    KVPRIM_NCCL_DEVICE bool poll(const params &p, thread &me, const token &t, awaited &a)
    {
        const uint32_t from = max_ranks == 2 ? p.rank ^ 1 : 0;
        a.first = p.peer[0] + offset(p, me, from, t.token);
        a.which = !has(p, me, 0) ? 0 : max_ranks == 2 ? 1 : kvpn_other_ranks(p);
        if (max_ranks > 2)
            kvpn_init_sum<T, max_ranks>(p, t.r[0], a.v);
        else
            a.v[0] = uint4{0, 0, 0, 0}, a.v[1] = t.r[0]; /* the first: for a thread without a pack */
        KVPRIM_NCCL_UNROLL_BY(1)
        for (uint32_t polls = 0; polls < kvpn_polls_per_page_check && me.stop_reason == 0; polls++) {
            if (kvpn_poll_slots<awaited::slots, false>(a.first, p.sender_bytes, a.which, a.v))
                return true;
        }
        return false;
    }

    /* For those that have polled in vain. Returns false if this rank stopped. */
    KVPRIM_NCCL_DEVICE bool wait(const params &p, kvpn_thread &me, awaited &a)
    {
        return me.stop_reason == 0 &&
               kvpn_wait_for_slots<awaited::slots, false>(p, me, a.first, p.sender_bytes, a.which,
                                                          max_ranks == 2 ? (int32_t)(p.rank ^ 1) : -1, a.v);
    }

    KVPRIM_NCCL_DEVICE uint4 sum(const params &p, const awaited &a)
    {
        kvpn_clear_slots<awaited::slots>(a.first, p.sender_bytes, a.which);
        return kvpn_sum_packs<T, max_ranks>(a.v);
    }

#ifndef KVPRIM_NCCL_EMULATE
    /* Where a row's threads meet: what each warp has found. There are two arrays, used by turns: a thread that writes
       to one again has met all others after they read it. */
    struct alignas(16) meeting {
        float found[2][is::groups];
    };

    KVPRIM_NCCL_DEVICE bool in_cluster(const params &p)
    {
        return form == kvpn_norm_shared || (form == kvpn_norm_all && p.share_bits);
    }

    /* A row's threads meet; `groups` then has what each warp found. A form of one row needs no barrier of its own. */
    KVPRIM_NCCL_DEVICE void meet(const params &p, thread &me, float *groups, const float (&found)[packs])
    {
        const uint32_t lane = me.thread % kvpn_norm_lanes;
        if (in_cluster(p)) {
            if (lane >> p.share_bits == 0)
                kvpn_cluster_store(groups + me.thread / kvpn_norm_lanes, lane, found[0]);
            kvpn_cluster_arrive(false);
            kvpn_cluster_wait();
            return;
        }
        if (lane == 0)
            for (uint32_t k = 0; k < packs; k++)
                groups[pack(me, k) / kvpn_norm_lanes] = found[k];
        if ((int)is::rows == 1 || blockDim.y == 1)
            __syncthreads();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + me.role), "r"(me.threads) : "memory");
    }

    /* The sum of a token's squares: packs in groups of 32, by neighbours first, then the groups. */
    KVPRIM_NCCL_DEVICE float total(const params &p, thread &me, float *groups, const token &t)
    {
        const uint32_t at = me.thread % kvpn_norm_lanes;
        float found[packs];
        for (uint32_t k = 0; k < packs; k++) {
            found[k] = t.squares[k];
            for (int lane = 1; lane < kvpn_norm_lanes; lane *= 2)
                found[k] = __fadd_rn(found[k], __shfl_xor_sync(0xffffffff, found[k], lane));
        }
        meet(p, me, groups, found);
        float all = is::two_groups ? __fadd_rn(groups[2 * at], groups[2 * at + 1]) : groups[at];
        for (int lane = 1; lane < kvpn_norm_lanes; lane *= 2)
            all = __fadd_rn(all, __shfl_xor_sync(0xffffffff, all, lane));
        return all;
    }

    template <int lanes> KVPRIM_NCCL_DEVICE uint32_t largest_of(uint32_t most)
    {
        int distance = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        if (lanes == kvpn_norm_lanes) { /* __reduce_max_sync(): clang 14 lacks it, and 20.1.0 has it wrong */
            asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(most));
            distance = lanes;
        }
#endif
        for (; distance < lanes; distance *= 2)
            most = kvpn_max_u32(most, __shfl_xor_sync(0xffffffff, most, distance));
        return most;
    }

    /* The bits of the largest |y| of the token. */
    KVPRIM_NCCL_DEVICE uint32_t largest(const params &p, thread &me, float *groups, const token &t)
    {
        const uint32_t at = me.thread % kvpn_norm_lanes;
        float found[packs];
        for (uint32_t k = 0; k < packs; k++)
            found[k] = __uint_as_float(largest_of<kvpn_norm_lanes>(most_of(t, k)));
        meet(p, me, groups, found);
        return largest_of<kvpn_norm_lanes>(
            is::two_groups ? kvpn_max_u32(__float_as_uint(groups[2 * at]), __float_as_uint(groups[2 * at + 1]))
                           : __float_as_uint(groups[at]));
    }

    /* Empties what no warp will write: total() reads of all. In a cluster, another block may have written the rest. */
    KVPRIM_NCCL_DEVICE void clear(const params &p, thread &me, meeting &m)
    {
        const uint32_t written = me.threads / kvpn_norm_lanes * packs << p.share_bits;
        KVPRIM_NCCL_UNROLL
        for (uint32_t k = threadIdx.x; k < is::groups && threadIdx.x < kvpn_norm_lanes; k += kvpn_norm_lanes)
            if (!is::two_groups || k >= written) {
                m.found[0][k] = 0;
                if (form != kvpn_norm_plain) /* which meets once */
                    m.found[1][k] = 0;
            }
    }

    /* What follows s in t.r. A warp has whole groups. */
    KVPRIM_NCCL_DEVICE void finish(const params &p, thread &me, meeting &m, uint32_t &meetings, token &t)
    {
        add(p, me, t);
        multiply(p, me, total(p, me, m.found[meetings++ % 2], t), t);
        if (!quantises(p))
            return;
        if (p.scales >= kvpn_of_groups)
            for (uint32_t k = 0; k < packs; k++)
                t.scale[k] = scale_of(p, largest_of<kvpn_norm_group_packs>(most_of(t, k)));
        else if (p.scales == kvpn_of_token)
            t.scale[0] = t.scale[packs - 1] = scale_of(p, largest(p, me, m.found[meetings++ % 2], t));
        quantise(p, me, t);
    }
#endif
};

#ifndef KVPRIM_NCCL_EMULATE
/* >>impl_norm_kernel -- the norm's kernels, and which form of them a launch takes */

/* The norm alone. The block's threads meet before they read what clear() writes. */
template <class T>
static __global__ __launch_bounds__(kvpn_max_threads,
                                    1) void kvpn_norm_kernel(const KVPRIM_GRID_CONSTANT kvpn_norm_params p)
{
    typedef kvpn_norm<T, 1, kvpn_norm_alone> norm;
    __shared__ typename norm::meeting meeting;
    const kvpn_thread me = {blockIdx.x, 0, threadIdx.x, blockDim.x, 0, 0, 0, 0, 0};
    typename norm::token t;
    uint32_t meetings = 0;
    kvpn_wait_for_predecessor(p);
    norm::begin_alone(p, me, t);
    norm::clear(p, me, meeting);
    norm::finish(p, me, meeting, meetings, t);
}

/* See >>impl_norm_few. In a cluster, each block has its own turn, and the barrier that ends it costs nothing: the row
   waits for the other ranks anyway. A warp that has polled in vain waits and sums in code of its own, so that the
   others' sum has no branches. What follows has barriers, so it must be the same code for all warps of a block. */
template <class T, int max_ranks, kvpn_norm_form form>
static __global__ __launch_bounds__(max_ranks <= 4 ? (int)kvpn_max_threads : (int)kvpn_max_threads_of_8,
                                    1) void kvpn_few_kernel(const KVPRIM_GRID_CONSTANT kvpn_norm_params p)
{
    typedef kvpn_norm<T, max_ranks, form> norm;
    __shared__ typename norm::meeting meetings_of[norm::is::rows];
    kvpn_thread me = {blockIdx.x, norm::usual ? 0 : threadIdx.y, threadIdx.x, blockDim.x, 0, 0, 0, 0, 0};
    typename norm::token t;
    typename norm::awaited a;
    typename norm::later later;
    uint32_t meetings = 0;
    const bool in_cluster = norm::in_cluster(p);
    kvpn_wait_for_predecessor(p);
    if (in_cluster) {
        kvpn_cluster_arrive(true);
        me.thread += (me.block & ((1u << p.share_bits) - 1)) * me.threads;
    }
    const bool has = norm::begin(p, me, t);
    norm::clear(p, me, meetings_of[me.role]);
    kvpn_end_turn(p, me);
    if (in_cluster)
        kvpn_cluster_wait();
    if (!has)
        return;
    do {
        norm::look_ahead(p, me, t, later);
        const bool here = norm::poll(p, me, t, a);
        if (KVPRIM_LIKELY(__all_sync(0xffffffff, here))) {
            t.r[0] = norm::sum(p, a);
        } else {
            if (here || norm::wait(p, me, a))
                t.r[0] = norm::sum(p, a);
            else /* at once: the row's other threads may wait for long */
                kvpn_stop_rank(p, me);
            __syncwarp();
        }
        norm::send_next(p, me, t, later);
        norm::finish(p, me, meetings_of[me.role], meetings, t);
    } while (norm::next(p, me, t, later));
}

/* Which kernel a launch takes: see kvpn_few_form_of. Of more than 4 ranks there are two forms: plain and all. */
template <class T, int max_ranks> static const void *kvpn_pick_few(kvpn_norm_form form)
{
    return form == kvpn_norm_plain    ? (const void *)kvpn_few_kernel<T, max_ranks, kvpn_norm_plain>
           : form == kvpn_norm_shared ? (const void *)kvpn_few_kernel<T, max_ranks, kvpn_norm_shared>
           : form == kvpn_norm_rows   ? (const void *)kvpn_few_kernel<T, max_ranks, kvpn_norm_rows>
                                      : (const void *)kvpn_few_kernel<T, max_ranks, kvpn_norm_all>;
}

template <class T> static const void *kvpn_pick_norm(int world, kvpn_norm_form form)
{
    return form == kvpn_norm_alone   ? (const void *)kvpn_norm_kernel<T>
           : world == 2              ? kvpn_pick_few<T, 2>(form)
           : world <= 4              ? kvpn_pick_few<T, 4>(form)
           : form == kvpn_norm_plain ? (const void *)kvpn_few_kernel<T, 8, kvpn_norm_plain>
                                     : (const void *)kvpn_few_kernel<T, 8, kvpn_norm_all>;
}

static const void *kvpn_pick_norm(kvprim_dtype dtype, int world, kvpn_norm_form form)
{
    return dtype == KVPRIM_BF16 ? kvpn_pick_norm<kvpn_bf16>(world, form) : kvpn_pick_norm<kvpn_f16>(world, form);
}
#endif
#endif /* KVPRIM_NO_NORM */

#endif /* KVPRIM_NCCL_KERNELS */
#endif

/* >>impl_host -- errors, time, threads; where a host's wait ends */

#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_NCCL_IMPLEMENTATION)) && !defined(KVPRIM_NCCL_IMPLEMENTED)
#define KVPRIM_NCCL_IMPLEMENTED

#if defined(__has_include)
#if !__has_include(<nccl.h>) || !__has_include(<cuda_runtime_api.h>)
#error "kvprim_nccl.h is implemented with <nccl.h> and <cuda_runtime_api.h>: give the compiler their folders with -I"
#endif
#endif
#include <assert.h>
#include <cuda_runtime_api.h>
#include <float.h>
#include <nccl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "kvprim_nccl.h needs NCCL 2.19 or newer"
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
#define KVPRIM_NCCL_WINDOWS 1 /* weak: the NCCL that is found at run time may be older */
#pragma weak ncclCommWindowRegister
#pragma weak ncclCommWindowDeregister
#endif
enum {
    kvpn_alive = 0x6b76706e,        /* values of comm->state that memory does not hold by chance */
    kvpn_initialising = 0x6b767069, /* init runs */
    kvpn_aborted = 0x6b767061,
    kvpn_destroying = 0x6b76706c, /* destroy runs */
    kvpn_max_blocks = 128,        /* of a launch: half of an H200's multiprocessors are 64 */
    kvpn_default_timeout_ms = 30 * 1000,
    kvpn_default_init_timeout_ms = 10 * 60 * 1000,
    /* raised by 4 when ranks of two builds would choose other ways, or place packs elsewhere */
    kvpn_protocol = 28 + kvpn_exchanges + 2 * kvpn_norms,
    kvpn_group_calls = 1024,   /* of a group: 32 KB of host memory */
    kvpn_slots_mb = 8,         /* of a tensor that is summed in one launch; the slots take four times as much */
    kvpn_sums_bytes = 8 << 20, /* of a part of kvpn_sum_then_norm: 1,024 tokens x 4,096 of bf16 */
    kvpn_max_hidden = 16384    /* of kvprim_all_reduce_norm */
};

/* Bindings to 0.3 know these sizes. */
#if UINTPTR_MAX == UINT64_MAX
static_assert(sizeof(kvprim_comm_id) == 128, "kvprim_comm_id");
static_assert(sizeof(kvprim_comm_desc) == 248, "kvprim_comm_desc");
static_assert(sizeof(kvprim_comm) == 1440, "kvprim_comm");
static_assert(sizeof(kvprim_norm_desc) == 184, "kvprim_norm_desc");
static_assert(sizeof(kvprim_ring_desc) == 48, "kvprim_ring_desc");
static_assert(sizeof(kvprim_ring) == 592, "kvprim_ring");
#endif

static kvprim_status kvpn_cuda_status(const char *function, const char *call, cudaError_t error)
{
    if (error == cudaSuccess)
        return KVPRIM_OK;
    (void)cudaGetLastError(); /* it is reported here */
    return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s: %s: %s", function, call, cudaGetErrorName(error),
                       cudaGetErrorString(error));
}

static kvprim_status kvpn_nccl_status(const char *function, const char *call, ncclResult_t result)
{
    if (result == ncclSuccess)
        return KVPRIM_OK;
    const char *const detail = ncclGetLastError(NULL);
    return kvprim_fail(KVPRIM_ERROR_NCCL, "%s: %s: %s: %s", function, call, ncclGetErrorString(result),
                       detail ? detail : "");
}

/* Leave the function with the status unless all is well. `f` is the name of the public function. */
#define KVPRIM_NCCL_TRY_CUDA(call) KVPRIM_TRY(kvpn_cuda_status(f, #call, call))
#define KVPRIM_NCCL_TRY_NCCL(call) KVPRIM_TRY(kvpn_nccl_status(f, #call, call))

static int64_t kvpn_now_us(void)
{
    struct timespec t;
#ifdef CLOCK_MONOTONIC
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
#else /* strict C11 */
    (void)timespec_get(&t, TIME_UTC);
#endif
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

#define KVPRIM_NCCL_LOAD(word) __atomic_load_n(word, __ATOMIC_SEQ_CST)
#define KVPRIM_NCCL_STORE(word, value) __atomic_store_n(word, value, __ATOMIC_SEQ_CST)

static int32_t kvpn_add(int32_t *word, int32_t n)
{
    return __atomic_add_fetch(word, n, __ATOMIC_SEQ_CST);
}

/* Of several threads that change *word from `from`, one succeeds. */
static bool kvpn_change(int32_t *word, int32_t from, int32_t to)
{
    return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Waits until *word is `wanted`. False: timeout_ms is over. */
static bool kvpn_wait_until(const int32_t *word, int32_t wanted, int64_t timeout_ms)
{
    const int64_t start_us = kvpn_now_us();
    while (KVPRIM_NCCL_LOAD(word) != wanted) {
        if (kvpn_now_us() - start_us >= timeout_ms * 1000)
            return false;
        (void)poll(NULL, 0, 1);
    }
    return true;
}

/* A call that does not block may return ncclInProgress: waits until it is done, or *word is no longer `wanted`. */
static ncclResult_t kvpn_wait_for_nccl(ncclComm_t nccl, ncclResult_t result, const int32_t *word, int32_t wanted)
{
    while (result == ncclInProgress && KVPRIM_NCCL_LOAD(word) == wanted) {
        const ncclResult_t asked = ncclCommGetAsyncError(nccl, &result);
        result = asked == ncclSuccess ? result : asked;
    }
    return result;
}

/* In the relaxed mode a thread may query, allocate and synchronise while any stream is captured. Nothing here touches a
   captured stream. Returns the mode before. */
static enum cudaStreamCaptureMode kvpn_set_capture_mode(enum cudaStreamCaptureMode mode)
{
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

/* Runs it on a new thread, which ends by itself. False: no thread can be made. */
static bool kvpn_start_thread(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, argument) != 0)
        return false;
    (void)pthread_detach(thread);
    return true;
}

/* The same if `apart`; otherwise, or if no thread can be made, on this one, which may then wait as long as NCCL does.
   `run` may change the device and the capture mode. */
static void kvpn_run_job(void *(*run)(void *), void *argument, bool apart)
{
    int device = 0;
    if (apart && kvpn_start_thread(run, argument))
        return;
    const enum cudaStreamCaptureMode mode = kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    (void)cudaGetDevice(&device);
    (void)run(argument);
    (void)cudaSetDevice(device);
    (void)kvpn_set_capture_mode(mode);
}

KVPRIM_API kvprim_status kvprim_comm_new_id(kvprim_comm_id *out)
{
    ncclUniqueId id;
    KVPRIM_REFUSE(!out, NULL, "%s: out is NULL", __func__);
    KVPRIM_TRY(kvpn_nccl_status(__func__, "ncclGetUniqueId", ncclGetUniqueId(&id)));
    memcpy(out->bytes, id.internal, sizeof out->bytes);
    return KVPRIM_OK;
}

/* >>impl_state -----------------------------------------------------------------------------------------------------

   state         becomes                   by
   anything      initialising              init, which counts as an active call
   initialising  alive or 0                init: published, or failed
   initialising  aborted, then 0           abort, which waits for init to notice
   alive         aborted                   abort
   alive         destroying, then 0        destroy, which waits for active calls
   aborted       destroying, then 0        the same
   destroying    aborted                   destroy after a TIMEOUT: only destroy may follow

   Until destroy, calls of other threads may read all fields. What changes meanwhile (*stop, watch_start_us, watch_index
   and the fields from `self` on) is read and written atomically. */

static bool kvpn_has_state(const kvprim_comm *comm, int32_t state)
{
    return comm && KVPRIM_NCCL_LOAD(&comm->self) == comm && KVPRIM_NCCL_LOAD(&comm->state) == state;
}

static kvprim_status kvpn_fail_not_alive(const char *function, const kvprim_comm *comm)
{
    KVPRIM_REFUSE(!comm, NULL, "%s: comm is NULL", function);
    KVPRIM_REFUSE(kvpn_has_state(comm, kvpn_aborted), ARGUMENT, "%s: comm was aborted: destroy it", function);
    return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: comm was not initialised, was moved, or has ended", function);
}

/* After fork(), memory that CUDA pinned is still the parent's: a child that aborts would stop the parent's kernels. */
static kvprim_status kvpn_check_process(const char *function, const kvprim_comm *comm)
{
    KVPRIM_REFUSE(comm && KVPRIM_NCCL_LOAD(&comm->self) == comm && comm->process != (int32_t)getpid(), ARGUMENT,
                  "%s: comm belongs to process %d, which called init, and this is process %d", function, comm->process,
                  (int)getpid());
    return KVPRIM_OK;
}

static void kvpn_leave(kvprim_comm *comm)
{
    (void)kvpn_add(&comm->active_calls, -1);
}

/* Changes the state and counts an active call until kvpn_leave. False: it is not `from`, or another was faster. */
static bool kvpn_enter(kvprim_comm *comm, int32_t from, int32_t to)
{
    if (!kvpn_has_state(comm, from))
        return false;
    (void)kvpn_add(&comm->active_calls, 1);
    const bool changed = kvpn_change(&comm->state, from, to);
    if (!changed)
        kvpn_leave(comm);
    return changed;
}

static kvprim_status kvpn_enter_alive(const char *function, kvprim_comm *comm)
{
    return kvpn_enter(comm, kvpn_alive, kvpn_alive) ? KVPRIM_OK : kvpn_fail_not_alive(function, comm);
}

/* >>impl_slots -- slots that ranks of one process share */

/* A rank's page and slots. A rank of the same process that writes there has a reference, one of another process a
   mapping: see kvpn_free_slots. If the owner dies, a mapping keeps the memory (seen on H200s, undefined in CUDA). */
typedef struct kvpn_slots {
    int32_t refs, device;
    uint64_t nonce; /* the rank's random number from init */
    void *memory;
    struct kvpn_slots *next;
} kvpn_slots;

/* The slots of all ranks in this process. The lock guards the list and the references. */
static kvpn_slots *kvpn_local_slots;
static pthread_mutex_t kvpn_slots_lock = PTHREAD_MUTEX_INITIALIZER;

static void kvpn_publish_slots(kvpn_slots *slots)
{
    (void)pthread_mutex_lock(&kvpn_slots_lock);
    slots->next = kvpn_local_slots;
    kvpn_local_slots = slots;
    (void)pthread_mutex_unlock(&kvpn_slots_lock);
}

/* Returns NULL if the rank is in another process, or has ended. */
static kvpn_slots *kvpn_retain_slots(uint64_t nonce)
{
    (void)pthread_mutex_lock(&kvpn_slots_lock);
    kvpn_slots *slots = kvpn_local_slots;
    while (slots && slots->nonce != nonce)
        slots = slots->next;
    if (slots)
        (void)kvpn_add(&slots->refs, 1);
    (void)pthread_mutex_unlock(&kvpn_slots_lock);
    return slots;
}

static void *kvpn_free_slots_memory(void *argument)
{
    kvpn_slots *const slots = (kvpn_slots *)argument;
    (void)kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    (void)cudaSetDevice(slots->device);
    (void)cudaFree(slots->memory);
    free(slots);
    return NULL;
}

/* Another rank's memory is freed on a thread of its own: cudaFree waits for what runs on the memory's device, and there
   a collective of another communicator may wait for this rank. */
static void kvpn_release_slots(kvpn_slots *slots, bool own)
{
    if (!slots)
        return;
    (void)pthread_mutex_lock(&kvpn_slots_lock);
    const bool last = kvpn_add(&slots->refs, -1) == 0;
    kvpn_slots **link = &kvpn_local_slots;
    while (last && *link != slots)
        link = &(*link)->next;
    if (last)
        *link = slots->next;
    (void)pthread_mutex_unlock(&kvpn_slots_lock);
    if (last)
        kvpn_run_job(kvpn_free_slots_memory, slots, !own);
}

/* >>impl_teardown -- the end of NCCL's communicator, on a thread of its own */

typedef struct kvpn_group_call {
    void *memory;
    size_t count;
    ncclDataType_t type;
    int32_t peer, receives;
} kvpn_group_call;

/* See >>impl_group. calls: memory for calls_max of them. */
typedef struct kvpn_open_group {
    int32_t open, calls_count, calls_max;
    kvprim_status failed; /* of the first call that failed */
    cudaStream_t stream;
    kvpn_group_call *calls;
} kvpn_open_group;

/* What ends NCCL's communicator, and the events that watch its work. It cannot end while a graph has its collectives,
   or another communicator's work is stuck on the GPU: a thread of its own ends it. The last reference frees this. */
typedef struct kvpn_teardown {
    int32_t refs, started, done, aborts, device;
    ncclComm_t nccl;
    void *window;
    cudaEvent_t watch[2]; /* see kvpn_record_watch_event */
    int32_t in_graphs;    /* 1: graphs hold collectives of NCCL's, which no event watches */
    ncclResult_t result;
    kvpn_open_group group; /* of the thread that uses the communicator */
} kvpn_teardown;

static void kvpn_release_teardown(kvpn_teardown *teardown)
{
    if (!teardown || kvpn_add(&teardown->refs, -1) != 0)
        return;
    for (int k = 0; k < 2; k++)
        if (teardown->watch[k])
            (void)cudaEventDestroy(teardown->watch[k]);
    free(teardown);
}

/* NCCL keeps a window's memory for ever unless the window is deregistered. That waits for work that is stuck, so an
   abort skips it unless all work is done. */
static void *kvpn_run_teardown(void *argument)
{
    kvpn_teardown *const teardown = (kvpn_teardown *)argument;
    (void)kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
#ifdef KVPRIM_NCCL_WINDOWS
    if (teardown->window) {
        (void)cudaSetDevice(teardown->device);
        const bool idle = !KVPRIM_NCCL_LOAD(&teardown->in_graphs) &&
                          cudaEventQuery(teardown->watch[0]) == cudaSuccess &&
                          cudaEventQuery(teardown->watch[1]) == cudaSuccess;
        if (idle || !teardown->aborts)
            (void)ncclCommWindowDeregister(teardown->nccl, (ncclWindow_t)teardown->window);
        (void)cudaGetLastError();
    }
#endif
    teardown->result = teardown->aborts ? ncclCommAbort(teardown->nccl) : ncclCommDestroy(teardown->nccl);
    if (teardown->result == ncclInProgress) /* a communicator that does not block: it cannot be asked any more */
        teardown->result = ncclSuccess;
    KVPRIM_NCCL_STORE(&teardown->done, 1);
    kvpn_release_teardown(teardown);
    return NULL;
}

/* Ends NCCL's communicator, unless it is the caller's. Of several threads that call this, one does it. */
static void kvpn_start_teardown(kvprim_comm *comm, bool aborts)
{
    kvpn_teardown *const teardown = comm->teardown;
    const ncclComm_t nccl = KVPRIM_NCCL_LOAD(&comm->nccl);
    if (!nccl || comm->nccl_borrowed || !kvpn_change(&teardown->started, 0, 1))
        return;
    (void)kvpn_add(&teardown->refs, 1);
    teardown->nccl = nccl, teardown->aborts = aborts;
    teardown->window = KVPRIM_NCCL_LOAD(&comm->window); /* init may still wait for it */
    kvpn_run_job(kvpn_run_teardown, teardown, true);
}

/* False: it has not ended after timeout_ms. True also if it was never started. */
static bool kvpn_wait_for_teardown(kvprim_comm *comm, int64_t timeout_ms)
{
    return !KVPRIM_NCCL_LOAD(&comm->teardown->started) || kvpn_wait_until(&comm->teardown->done, 1, timeout_ms);
}

static uint64_t *kvpn_nonce_at(const kvprim_comm *comm, int owner, int writer)
{
    return (uint64_t *)((uint32_t *)comm->peer[owner] + kvpn_nonces_word) + writer;
}

/* Lets go of other ranks' memory: takes this rank's nonce away from each page, and closes mappings. Then waits for
   other processes to do the same with this rank's memory. True: they have, or the context is dead. */
static bool kvpn_part_from_ranks(kvprim_comm *comm, int64_t timeout_ms)
{
    enum { closing_ms = 10 }; /* a nonce goes before its mapping does, by some 100 us */
    const uint64_t none = 0;
    uint64_t nonces[kvpn_max_world];
    const int64_t start_us = kvpn_now_us();
    bool here = false;
    for (int r = 0; r < comm->world; r++) {
        here = here || !comm->slots[r];
        if (comm->peer[r] && r != comm->rank)
            (void)cudaMemcpyAsync(kvpn_nonce_at(comm, r, comm->rank), &none, sizeof none, cudaMemcpyDefault,
                                  comm->stream);
    }
    (void)cudaStreamSynchronize(comm->stream);
    for (int r = 0; r < kvpn_max_world; r++)
        if (comm->mapped[r])
            (void)cudaIpcCloseMemHandle(comm->mapped[r]);
    while (here && kvpn_now_us() - start_us <= timeout_ms * 1000) {
        if (cudaMemcpyAsync(nonces, kvpn_nonce_at(comm, comm->rank, 0), sizeof nonces, cudaMemcpyDefault,
                            comm->stream) != cudaSuccess ||
            cudaStreamSynchronize(comm->stream) != cudaSuccess)
            return true; /* most likely the context is dead */
        here = false;
        for (int r = 0; r < comm->world; r++)
            here = here || (!comm->slots[r] && nonces[r]);
        (void)poll(NULL, 0, here ? 1 : closing_ms);
    }
    return !here;
}

/* Turns own kernels off. Errors of what frees are not reported: nobody could act on them.
   Each rank frees its own memory once the other ranks have let go of it, which they do soon. If one in this process
   does so after others_ms, that one frees it. Other processes are waited for as kvprim_comm_destroy says, and others_ms
   after a failed init. If one is later, the memory stays: CUDA does not define what becomes of its mapping. */
static void kvpn_free_slots(kvprim_comm *comm)
{
    enum { others_ms = 1000 };
    kvpn_slots *const own = comm->world <= kvpn_max_world ? comm->slots[comm->rank] : NULL;
    const bool patient = own && kvpn_has_state(comm, kvpn_destroying) && KVPRIM_NCCL_LOAD(comm->stop) == 0;
    if (own && own->memory && comm->stop && /* which init sets before another rank can map the memory */
        !kvpn_part_from_ranks(comm, patient && comm->timeout_ms > others_ms ? comm->timeout_ms : others_ms))
        own->memory = NULL;
    for (int r = 0; r < kvpn_max_world; r++) {
        if (r != comm->rank)
            kvpn_release_slots(comm->slots[r], false);
        comm->mapped[r] = comm->peer[r] = NULL;
        comm->slots[r] = NULL;
    }
    if (own)
        (void)kvpn_wait_until(&own->refs, 1, others_ms);
    kvpn_release_slots(own, true);
    if (comm->stop)
        (void)cudaFreeHost(comm->stop);
    comm->stop = comm->stop_on_gpu = NULL;
}

/* Calls nothing of CUDA's for what was not made: init leaves an empty copy, and another thread may capture a stream. */
static void kvpn_free_comm(kvprim_comm *comm)
{
    void *const memory[] = {comm->nccl_window ? NULL : comm->buffer, comm->scratch, comm->sums};
    kvpn_free_slots(comm);
    if (comm->buffer && comm->nccl_window)
        (void)ncclMemFree(comm->buffer);
    for (int k = 0; k < 3; k++)
        if (memory[k])
            (void)cudaFree(memory[k]);
    if (comm->stream)
        (void)cudaStreamDestroy(comm->stream);
    kvpn_release_teardown(comm->teardown);
    (void)cudaGetLastError();
}

/* >>impl_check -- init: arguments, and why kernels are off */

/* The smallest peer memory has seven slots (kvpn_large_group) for each thread of a warp, in each of two turns and two
   areas, from each of 8 ranks, in 128 blocks, and the pages. */
enum { kvpn_min_peer_bytes = 16 << 20, kvpn_max_peer_bytes = 4 * (kvpn_slots_mb << 20) + 2 * kvpn_page };

static kvprim_status kvpn_check_comm_desc(const kvprim_comm *comm, const kvprim_comm_desc *desc)
{
    const char *const f = "kvprim_comm_init";
    KVPRIM_REFUSE(!comm || !desc, NULL, "%s: %s is NULL", f, comm ? "desc" : "comm");
    KVPRIM_REFUSE(comm->self == comm &&
                      (comm->state == kvpn_alive || comm->state == kvpn_initialising || comm->state == kvpn_aborted),
                  ARGUMENT, "%s: comm is in use: destroy it first", f);
    KVPRIM_REFUSE(desc->buffer_bytes > SIZE_MAX / 2, SIZE, "%s: desc->buffer_bytes is %zu, must be at most %zu", f,
                  desc->buffer_bytes, SIZE_MAX / 2);
    const struct {
        const char *name;
        int64_t value, least, most;
    } fields[] = {{"world", desc->world, 1, INT32_MAX},
                  {"rank", desc->rank, 0, (int64_t)desc->world - 1},
                  {"timeout_ms", desc->timeout_ms, 0, INT32_MAX},
                  {"init_timeout_ms", desc->init_timeout_ms, 0, INT32_MAX},
                  {"max_sms", desc->max_sms, 0, INT32_MAX},
                  {"deterministic", desc->deterministic, 0, 1},
                  {"no_pdl", desc->no_pdl, 0, 1},
                  {"launch_dependents", desc->launch_dependents, 0, 1},
                  {"no_kernels", desc->no_kernels, 0, 1},
                  {"nccl_window", desc->nccl_window, 0, 1},
                  {"reserved", desc->reserved, 0, 0}};
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++)
        KVPRIM_REFUSE(fields[k].value < fields[k].least || fields[k].value > fields[k].most, ARGUMENT,
                      "%s: desc->%s is %lld, must be %lld to %lld", f, fields[k].name, (long long)fields[k].value,
                      (long long)fields[k].least, (long long)fields[k].most);
    if (!desc->peers)
        return KVPRIM_OK;
    KVPRIM_REFUSE(desc->world > kvpn_max_world, ARGUMENT, "%s: desc->world is %d, must be at most %d with desc->peers",
                  f, (int)desc->world, (int)kvpn_max_world);
    KVPRIM_REFUSE(desc->peer_bytes < kvpn_min_peer_bytes, SIZE, "%s: desc->peer_bytes is %zu, must be at least %d", f,
                  desc->peer_bytes, (int)kvpn_min_peer_bytes);
    for (int r = 0; r < desc->world; r++)
        KVPRIM_REFUSE(!desc->peers[r] || (uintptr_t)desc->peers[r] % 16, ARGUMENT,
                      "%s: desc->peers[%d] is %p, must be aligned to 16 bytes", f, r, desc->peers[r]);
    return KVPRIM_OK;
}

/* Why kernels are off, as far as this rank alone can say; NULL: no reason so far. */
static const char *kvpn_kernels_off_reason(const kvprim_comm_desc *desc)
{
#ifdef KVPRIM_NCCL_KERNELS
    const char *const p2p = getenv("NCCL_P2P_DISABLE"), *const level = getenv("NCCL_P2P_LEVEL");
    return desc->no_kernels                                                  ? "desc->no_kernels is 1"
           : desc->world == 1                                                ? "one rank"
           : desc->world > kvpn_max_world                                    ? "more than 8 ranks"
           : p2p && strtol(p2p, NULL, 0) != 0                                ? "NCCL_P2P_DISABLE is set"
           : level && (strcmp(level, "LOC") == 0 || strcmp(level, "0") == 0) ? "NCCL_P2P_LEVEL is LOC"
                                                                             : NULL;
#else
    (void)desc;
    return "compiled without nvcc, or with KVPRIM_NO_KERNELS";
#endif
}

/* >>impl_exchange -- init: what ranks tell each other */

/* FNV-1a of the file's first line; 0: the file cannot be read, or is empty. */
static uint64_t kvpn_hash_first_line(const char *path)
{
    char line[128] = "";
    uint64_t hash = 0xcbf29ce484222325u;
    FILE *const file = fopen(path, "r");
    if (!file || !fgets(line, sizeof line, file))
        hash = 0;
    for (const char *c = line; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    if (file)
        (void)fclose(file);
    return hash;
}

/* These must be the same on every rank. */
enum { kvpn_setting_count = 6 };
static const char *const kvpn_setting_names[kvpn_setting_count] = {
    "buffer_bytes", "deterministic", "nccl_window", "all_reduce_limit", "reduce_scatter_limit", "all_gather_limit"};

/* What ranks tell each other before anything else, so that other versions understand it: it never changes. */
typedef struct kvpn_hello {
    char magic[8];
    uint32_t version, protocol, info_bytes; /* info_bytes: of kvpn_rank_info */
    int32_t ok;                             /* 1: the rank's last step succeeded */
    uint64_t reserved;
} kvpn_hello;
static_assert(sizeof(kvpn_hello) == 32, "the same in all versions");

typedef struct kvpn_rank_info {
    kvpn_hello hello;
    uint64_t settings[kvpn_setting_count], machine, nonce, peer_bytes;
    int32_t has_kernels, max_sms, device, mappable, window, reduces_f8, clusters, link;
    char bus[16];              /* of its GPU, as CUDA writes it */
    cudaIpcMemHandle_t handle; /* if mappable */
} kvpn_rank_info;

/* init works on this in a thread of its own, while the caller's thread waits. The last reference frees it. */
typedef struct kvpn_init_task {
    kvprim_comm comm; /* becomes the caller's when init has succeeded */
    kvprim_comm_desc desc;
    kvpn_rank_info mine, *all; /* all: of every rank */
    size_t exchange_bytes;     /* how many of `mine` are exchanged; `all` is packed */
    const char *off_reason;    /* why kernels are off; NULL: so far they are not */
    int32_t refs, done, cancelled;
    int32_t exchange_requested, exchange_result; /* 1: the caller's thread is to call desc.exchange; its result */
    bool can_exchange;
    bool kernels_wait; /* own kernels wait for their predecessors: compiled for compute capability 9.0 or newer */
    kvprim_status status;
    char error[512];
} kvpn_init_task;

/* The caller has left, so nothing of NCCL's may be used any more. */
static bool kvpn_is_cancelled(const kvpn_init_task *task)
{
    return KVPRIM_NCCL_LOAD(&task->cancelled) != 0;
}

static kvprim_status kvpn_copy_and_wait(const kvprim_comm *comm, void *dst, const void *src, size_t bytes)
{
    const char *const f = "kvprim_comm_init";
    KVPRIM_NCCL_TRY_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, comm->stream));
    KVPRIM_NCCL_TRY_CUDA(cudaStreamSynchronize(comm->stream));
    return KVPRIM_OK;
}

static kvprim_status kvpn_exchange_by_nccl(kvpn_init_task *task)
{
    const char *const f = "kvprim_comm_init";
    const kvprim_comm *const comm = &task->comm;
    const size_t one = task->exchange_bytes, all = one * (size_t)comm->world;
    char *const scratch = (char *)comm->scratch;
    KVPRIM_TRY(kvpn_copy_and_wait(comm, scratch + all, &task->mine, one));
    if (kvpn_is_cancelled(task)) /* while it copied; kvpn_exchange_infos reports it */
        return KVPRIM_OK;
    const ncclResult_t result = ncclAllGather(scratch + all, scratch, one, ncclChar, comm->nccl, comm->stream);
    KVPRIM_TRY(kvpn_nccl_status(f, "ncclAllGather", kvpn_wait_for_nccl(comm->nccl, result, &task->cancelled, 0)));
    if (comm->window) /* see kvpn_run_teardown */
        KVPRIM_NCCL_TRY_CUDA(cudaEventRecord(comm->teardown->watch[0], comm->stream));
    return kvpn_copy_and_wait(comm, task->all, scratch, all);
}

static kvprim_status kvpn_exchange_by_caller(kvpn_init_task *task)
{
    KVPRIM_NCCL_STORE(&task->exchange_requested, 1);
    while (!kvpn_wait_until(&task->exchange_requested, 0, 100) && !kvpn_is_cancelled(task))
        continue;
    KVPRIM_REFUSE(task->exchange_result != 0, ARGUMENT, "kvprim_comm_init: desc->exchange returned %d",
                  task->exchange_result);
    return KVPRIM_OK;
}

static kvprim_status kvpn_check_hello(const kvpn_hello *mine, const kvpn_hello *theirs, int r)
{
    KVPRIM_REFUSE(memcmp(theirs->magic, mine->magic, sizeof mine->magic) != 0, ARGUMENT,
                  "kvprim_comm_init: what came from rank %d is not kvprim's", r);
    KVPRIM_REFUSE(theirs->version / 100 != mine->version / 100 || theirs->protocol != mine->protocol ||
                      theirs->info_bytes != mine->info_bytes,
                  UNSUPPORTED,
                  "kvprim_comm_init: rank %d runs kvprim %u.%u.%u (protocol %u), but this rank %d.%d.%d (%u)", r,
                  theirs->version / 10000, theirs->version / 100 % 100, theirs->version % 100, theirs->protocol,
                  KVPRIM_VERSION_MAJOR, KVPRIM_VERSION_MINOR, KVPRIM_VERSION_PATCH, mine->protocol);
    KVPRIM_REFUSE(!theirs->ok, CUDA, "kvprim_comm_init: rank %d failed, its own message says why", r);
    return KVPRIM_OK;
}

/* Every rank gets the first `bytes` of every rank's kvpn_rank_info, with the status of the step before. If that step
   failed on one rank, all ranks give up together; one alone would leave the others waiting. */
static kvprim_status kvpn_exchange_infos(kvpn_init_task *task, kvprim_status status, size_t bytes)
{
    kvprim_status s = status;
    task->mine.hello.ok = status == KVPRIM_OK, task->exchange_bytes = bytes;
    task->mine.has_kernels = !task->off_reason;
    if (task->can_exchange && !kvpn_is_cancelled(task))
        s = task->desc.exchange ? kvpn_exchange_by_caller(task) : kvpn_exchange_by_nccl(task);
    KVPRIM_TRY(status);
    KVPRIM_TRY(s);
    /* the infos may be old: NCCL was ended, and did not say so */
    KVPRIM_REFUSE(kvpn_is_cancelled(task), TIMEOUT, "kvprim_comm_init: cancelled");
    for (int r = 0; r < task->comm.world; r++) {
        KVPRIM_TRY(
            kvpn_check_hello(&task->mine.hello, (const kvpn_hello *)((const char *)task->all + bytes * (size_t)r), r));
        if (bytes == sizeof task->mine && !task->off_reason && !task->all[r].has_kernels)
            task->off_reason = "another rank's kernels are off";
    }
    return KVPRIM_OK;
}

/* Allocates this rank's page and slots, unless the caller did, and finds out whether other processes can map them. */
static kvprim_status kvpn_init_slots(kvpn_init_task *task)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = &task->comm;
    const size_t most = kvpn_max_peer_bytes,
                 bytes = task->desc.peers && task->desc.peer_bytes < most ? task->desc.peer_bytes : most;
    task->mine.peer_bytes = bytes;
    if (!task->desc.peers) {
        kvpn_slots *const slots = (kvpn_slots *)calloc(1, sizeof *slots);
        KVPRIM_REFUSE(!slots, CUDA, "%s: no host memory", f);
        slots->refs = 1, slots->device = comm->device, slots->nonce = task->mine.nonce;
        kvpn_publish_slots(slots);
        comm->slots[comm->rank] = slots;
        KVPRIM_NCCL_TRY_CUDA(cudaMalloc(&slots->memory, bytes));
        comm->peer[comm->rank] = slots->memory;
        task->mine.mappable = cudaIpcGetMemHandle(&task->mine.handle, slots->memory) == cudaSuccess;
        (void)cudaGetLastError();
    }
    char *const page = (char *)comm->peer[comm->rank];
    KVPRIM_NCCL_TRY_CUDA(cudaMemsetAsync(page, 0, kvpn_page, comm->stream));
    KVPRIM_NCCL_TRY_CUDA(cudaMemsetAsync(page + kvpn_page, 0xff, bytes - kvpn_page, comm->stream)); /* empty */
    KVPRIM_NCCL_TRY_CUDA(cudaStreamSynchronize(comm->stream));
    KVPRIM_NCCL_TRY_CUDA(
        cudaHostAlloc((void **)&comm->stop, sizeof *comm->stop, cudaHostAllocMapped | cudaHostAllocPortable));
    KVPRIM_NCCL_TRY_CUDA(cudaHostGetDevicePointer((void **)&comm->stop_on_gpu, comm->stop, 0));
    *comm->stop = 0;
    return KVPRIM_OK;
}

/* What this rank does by itself, before the second exchange. */
static kvprim_status kvpn_prepare_rank(kvpn_init_task *task)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = &task->comm;
    const kvprim_comm_desc *const d = &task->desc;
    const uint64_t settings[kvpn_setting_count] = {d->buffer_bytes,          (uint64_t)d->deterministic,
                                                   (uint64_t)d->nccl_window, d->all_reduce_limit,
                                                   d->reduce_scatter_limit,  d->all_gather_limit};
    int sms = 0, capability = 0;
    memcpy(task->mine.settings, settings, sizeof settings);
    task->mine.machine = kvpn_hash_first_line("/proc/sys/kernel/random/boot_id"); /* the same in all containers */
    task->mine.nonce = kvpn_hash_first_line("/proc/sys/kernel/random/uuid"), task->mine.device = comm->device;
    KVPRIM_NCCL_TRY_CUDA(cudaDeviceGetPCIBusId(task->mine.bus, (int)sizeof task->mine.bus, comm->device));
    KVPRIM_NCCL_TRY_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, comm->device));
    KVPRIM_NCCL_TRY_CUDA(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, comm->device));
    task->mine.reduces_f8 = comm->nccl_version >= NCCL_VERSION(2, 24, 0) && capability >= 9;
    /* Half of them, as a multiple of 8 (64 of 132). Beside a sum that waits, a matrix product of 4096^3 takes twice as
       long; beside one on three quarters of them 3.3 times, and beside one on all 25 times. */
    task->mine.max_sms = d->max_sms ? d->max_sms : sms < 32 ? sms : sms / 16 * 8;
    task->mine.max_sms = task->mine.max_sms < sms ? task->mine.max_sms : sms;
    for (int k = 0; k < 2; k++)
        KVPRIM_NCCL_TRY_CUDA(cudaEventCreateWithFlags(&comm->teardown->watch[k], cudaEventDisableTiming));
    if (d->buffer_bytes && d->nccl_window)
        KVPRIM_NCCL_TRY_NCCL(ncclMemAlloc(&comm->buffer, d->buffer_bytes));
    else if (d->buffer_bytes)
        KVPRIM_NCCL_TRY_CUDA(cudaMalloc(&comm->buffer, d->buffer_bytes));
    task->off_reason = task->mine.nonce ? kvpn_kernels_off_reason(d) : "/proc/sys/kernel/random/uuid cannot be read";
    return task->off_reason ? KVPRIM_OK : kvpn_init_slots(task);
}

/* Slots per block in a rank's memory of so many bytes, as a multiple of 8 (128 bytes). */
static void kvpn_set_block_slots(kvprim_comm *comm, size_t bytes)
{
    comm->block_slots = (uint32_t)((bytes - 2 * kvpn_page) / (4 * 16 * 8 * (size_t)comm->world * comm->blocks) * 8);
}

/* After the second exchange: compares what must be the same everywhere, and takes the least of what may differ. */
static kvprim_status kvpn_compare_ranks(kvpn_init_task *task)
{
    int32_t blocks = kvpn_max_blocks;
    uint64_t bytes = kvpn_max_peer_bytes;
    task->comm.nccl_reduces_f8 = 1;
    for (int r = 0; r < task->comm.world; r++) {
        const kvpn_rank_info *const info = &task->all[r];
        for (int k = 0; k < kvpn_setting_count; k++)
            if (info->settings[k] != task->mine.settings[k])
                return kvprim_fail(k == 0 ? KVPRIM_ERROR_SIZE : KVPRIM_ERROR_ARGUMENT,
                                   "kvprim_comm_init: desc->%s is %llu, but %llu on rank %d: must be the same",
                                   kvpn_setting_names[k], (unsigned long long)task->mine.settings[k],
                                   (unsigned long long)info->settings[k], r);
        blocks = info->max_sms < blocks ? info->max_sms : blocks;
        task->comm.nccl_reduces_f8 = task->comm.nccl_reduces_f8 && info->reduces_f8;
        bytes = info->has_kernels && info->peer_bytes < bytes ? info->peer_bytes : bytes;
    }
    task->comm.blocks = (uint32_t)blocks;
    kvpn_set_block_slots(&task->comm, (size_t)bytes);
    return KVPRIM_OK;
}

/* >>impl_peers -- init: each other's memory */

/* What connects two ranks, the slowest last. hidden: CUDA_VISIBLE_DEVICES leaves out the other's GPU. */
typedef enum kvpn_link { kvpn_same_gpu, kvpn_nvlink, kvpn_hidden_link, kvpn_pcie, kvpn_network } kvpn_link;

/* CUDA does not name links, but atomics reach a peer's memory over NVLink only: cudaDevP2PAttrNativeAtomicSupported is
   1 between B300s, and 0 between RTX 4090s, as others have published; not seen here. */
static kvpn_link kvpn_link_to(const kvpn_init_task *task, int r)
{
    const kvpn_rank_info *const info = &task->all[r];
    int device, native = 0;
    if (info->machine != task->mine.machine || info->machine == 0)
        return kvpn_network;
    if (cudaDeviceGetByPCIBusId(&device, info->bus) != cudaSuccess)
        return kvpn_hidden_link;
    if (device == task->comm.device)
        return kvpn_same_gpu;
    (void)cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, task->comm.device, device);
    return native ? kvpn_nvlink : kvpn_pcie;
}

/* Finds the slowest link. Turns kernels off across machines, and over PCIe above two ranks, which nobody has measured,
   or where NCCL might not use it: how many switches and bridges are on the way (PIX, PXB, PHB) is not known here. */
static void kvpn_find_links(kvpn_init_task *task)
{
    const char *const level = getenv("NCCL_P2P_LEVEL");
    const bool allowed = !level || strcmp(level, "SYS") == 0 || strtol(level, NULL, 0) >= 4;
    for (int r = 0; r < task->comm.world; r++) {
        const kvpn_link link = kvpn_link_to(task, r);
        task->mine.link = (int)link > task->mine.link ? (int)link : task->mine.link;
        if (task->off_reason)
            continue;
        if (link == kvpn_network && !task->comm.peer[r]) /* the caller's memory may reach further */
            task->off_reason = "ranks on several machines";
        else if (link == kvpn_pcie && (task->comm.world > 2 || !allowed))
            task->off_reason = allowed ? "more than two ranks, and not all of them connected by NVLink"
                                       : "ranks connected by PCIe, and NCCL_P2P_LEVEL is not SYS";
    }
    (void)cudaGetLastError();
}

/* Rank r's memory, which another process shares through CUDA's IPC. NULL: out of reach. */
static void *kvpn_map_peer(kvpn_init_task *task, int r)
{
    kvprim_comm *const comm = &task->comm;
    const kvpn_rank_info *const info = &task->all[r];
    int can = 0;
    comm->slots[r] = kvpn_retain_slots(info->nonce);
    if (!comm->slots[r]) {
        if (!info->mappable || cudaIpcOpenMemHandle(&comm->mapped[r], info->handle, cudaIpcMemLazyEnablePeerAccess))
            comm->mapped[r] = NULL;
        return comm->mapped[r];
    }
    if (cudaDeviceCanAccessPeer(&can, comm->device, info->device) != cudaSuccess || !can)
        return NULL;
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(info->device, 0);
    return enabled == cudaSuccess || enabled == cudaErrorPeerAccessAlreadyEnabled ? comm->slots[r]->memory : NULL;
}

/* Maps every other rank's memory and writes this rank's nonce there. If that fails it is no error, but own kernels are
   off. Until here they are on for all ranks or for none. */
static void kvpn_connect_peers(kvpn_init_task *task)
{
    kvprim_comm *const comm = &task->comm;
    for (int r = 0; r < comm->world && !task->off_reason; r++) {
        if (!comm->peer[r])
            comm->peer[r] = kvpn_map_peer(task, r);
        if (!comm->peer[r])
            task->off_reason = "not all ranks can write to each other's memory";
        else if (kvpn_copy_and_wait(comm, kvpn_nonce_at(comm, r, comm->rank), &task->mine.nonce,
                                    sizeof task->mine.nonce) != KVPRIM_OK)
            task->off_reason = "a copy to another rank's memory failed";
    }
    (void)cudaGetLastError();
}

/* No window is no error: collectives work without it. NCCL may fill it in after the call. */
static void kvpn_register_window(kvpn_init_task *task)
{
#ifdef KVPRIM_NCCL_WINDOWS
    kvprim_comm *const comm = &task->comm;
    if (!comm->nccl_window || comm->nccl_borrowed || !comm->buffer || !ncclCommWindowRegister ||
        kvpn_is_cancelled(task))
        return;
    (void)ncclCommWindowRegister(comm->nccl, comm->buffer, comm->buffer_bytes, (ncclWindow_t *)&comm->window,
                                 NCCL_WIN_COLL_SYMMETRIC);
    (void)kvpn_wait_for_nccl(comm->nccl, ncclInProgress, &task->cancelled, 0);
    task->mine.window = comm->window != NULL;
#else
    (void)task;
#endif
}

/* >>impl_choose ----------------------------------------------------------------------------------------------------

   Which way a collective takes, and which kernel that is. The first row that fits decides. Sizes are compared with
   kvpn_limits; every rank has the same. How a tensor is aligned may differ between ranks, so it decides about the
   kernel alone: T is the type of a sum of fp16, bf16 or fp32 if tensors are aligned to 16 bytes and end with a pack.
   Other reductions and other tensors take kvpn_any, with which kvpn_two_shot is also kvpn_one_shot and kvpn_scatter,
   except for unaligned tensors of more than 4 ranks. ranks: the world, rounded up to 2, 4 or 8.

       own kernels are off, or there is none for the type or the op     NCCL
       more bytes than the limit (a reduction: and not deterministic)   NCCL
       all_reduce      of few bytes                                     kvpn_kernel<kvpn_one_shot, T, ranks>
                       of many, between two ranks                       kvpn_kernel<kvpn_pipeline, T, 2>
                                                                        kvpn_kernel<kvpn_two_shot, T, ranks>
       reduce_scatter  of many bytes, between two ranks                 kvpn_kernel<kvpn_pipeline, T, 2>
                                                                        kvpn_kernel<kvpn_scatter, T, ranks>
       all_gather, all_gatherv, all_to_all, all_to_allv
                       gathers of few bytes, as many from all           kvpn_kernel<kvpn_gather_all, ..., ranks>
                       of few bytes                                     kvpn_parts_kernel<kvpn_parts_slots<...>>
                       of many                                          kvpn_parts_kernel<kvpn_parts_groups<4, ...>>
                       of more                                          kvpn_parts_kernel<kvpn_parts_groups<6, ...>>
       all_reduce_norm                                                  kvpn_norm_way_of: >>impl_norm_call
       all else                                                         NCCL */

/* Name, bytes, the ncclDataType_t, which older headers may lack, and own kernels' name: 0 if they do not reduce it. */
typedef struct kvpn_type {
    const char *name;
    size_t bytes;
    int nccl;
    uint32_t own;
} kvpn_type;

static kvpn_type kvpn_type_of(kvprim_dtype dtype)
{
    enum { bf16 = 9, e4m3 = 10, e5m2 = 11 };
    const kvpn_type types[] = {{"U8", 1, ncclUint8, 0},           {"F16", 2, ncclFloat16, kvpn_is_f16},
                               {"BF16", 2, bf16, kvpn_is_bf16},   {"F32", 4, ncclFloat32, kvpn_is_f32},
                               {"F64", 8, ncclFloat64, 0},        {"INT8", 1, ncclInt8, 0},
                               {"INT32", 4, ncclInt32, 0},        {"INT64", 8, ncclInt64, 0},
                               {"F8E4M3", 1, e4m3, kvpn_is_e4m3}, {"F8E5M2", 1, e5m2, kvpn_is_e5m2}};
    const kvpn_type none = {NULL, 0, -1, 0};
    return dtype >= KVPRIM_U8 && dtype <= KVPRIM_F8E5M2 ? types[dtype - KVPRIM_U8] : none;
}

#ifdef KVPRIM_NCCL_KERNELS
typedef enum kvpn_way {
    kvpn_by_nccl,
    kvpn_by_one_shot,
    kvpn_by_two_shot,
    kvpn_by_scatter,
    kvpn_by_pipeline,
    kvpn_by_gather, /* from here on bytes are moved, not reduced */
    kvpn_by_parts,
    kvpn_by_parts_many,
    kvpn_by_parts_most,
    kvpn_by_gather_many,
    kvpn_by_gather_most
} kvpn_way;

/* Packs in a group of this way; 0: it has no groups. */
static uint32_t kvpn_group_of(kvpn_way way)
{
    return way == kvpn_by_parts_many || way == kvpn_by_gather_many   ? kvpn_group
           : way == kvpn_by_parts_most || way == kvpn_by_gather_most ? kvpn_large_group
                                                                     : 0;
}

static uint32_t kvpn_roles_of(kvpn_way way, int world)
{
    const uint32_t others = (uint32_t)world - 1;
    return way < kvpn_by_parts ? 1 : way == kvpn_by_parts ? others : way > kvpn_by_parts_most ? others + 1 : 2 * others;
}

/* Per role of a block, which has slots in each area for all of a group's packs. */
static uint32_t kvpn_max_threads_of_role(const kvprim_comm *comm, kvpn_way way)
{
    const uint32_t in_block = (uint32_t)kvpn_max_threads / kvpn_roles_of(way, comm->world) / 32 * 32,
                   with_slots = comm->block_slots / (kvpn_group_of(way) + 1) / 32 * 32;
    return with_slots < in_block && kvpn_group_of(way) ? with_slots : in_block;
}

/* How many bytes of a tensor the slots hold in this way, whether or not it is the fastest for them. */
static size_t kvpn_capacity_bytes(const kvprim_comm *comm, kvpn_way way)
{
    const size_t slots = (size_t)16 * comm->blocks * comm->block_slots;
    const uint32_t in_group = kvpn_group_of(way) * kvpn_max_threads_of_role(comm, way),
                   of_group = in_group + kvpn_max_threads_of_role(comm, way);
    if (in_group) /* 2: both areas */
        return (size_t)16 * comm->blocks * 2 * (comm->block_slots / of_group) * in_group;
    return way == kvpn_by_two_shot   ? slots * (size_t)comm->world
           : way == kvpn_by_pipeline ? (size_t)1 << 34 /* so that packs have numbers of 32 bits */
           : way >= kvpn_by_gather   ? slots / 2
                                     : slots;
}

/* Up to how many bytes each way is the fastest. Measured on 2 and 4 H200s (`make nccl-limits`), estimated for more; two
   ranks over PCIe, not measured, take the smallest. Other numbers need another kvpn_protocol. */
typedef struct kvpn_limits {
    size_t one_shot, two_shot;
    size_t norm_one_shot; /* of kvprim_all_reduce_norm, a rank's addend */
    size_t scatter;       /* what each rank sends */
    /* world times the largest part that one rank sends to another */
    size_t parts, parts_many;        /* by kvpn_parts_slots; by groups of 4 packs */
    size_t parts_even, parts_uneven; /* by own kernels at all: of equal parts; of others, in a gather too */
    size_t gather, gather_odd;       /* ... in a gather of equal parts: of multiples of 16 bytes; of others */
} kvpn_limits;

enum { kvpn_few_gathered = 256 << 10 }; /* bytes that a rank receives by kvpn_gather_all, at most */

static kvpn_limits kvpn_limits_of(const kvprim_comm *comm)
{
    const kvpn_limits two = {2 << 20, 64 << 20, 4 << 20,  64 << 20, 384 << 10,
                             8 << 20, 32 << 20, 16 << 20, 64 << 20, 4 << 20},
                      four = {128 << 10, 32 << 20, 256 << 10, 64 << 20, 256 << 10,
                              8 << 20,   8 << 20,  8 << 20,   8 << 20,  1 << 20},
                      eight = {32 << 10, 8 << 20, 64 << 10, 16 << 20, 256 << 10,
                               4 << 20,  4 << 20, 4 << 20,  4 << 20,  512 << 10};
    kvpn_limits l = comm->link == kvpn_pcie ? eight : comm->world == 2 ? two : comm->world <= 4 ? four : eight;
    l.two_shot = comm->all_reduce_limit ? comm->all_reduce_limit : l.two_shot;
    l.scatter = comm->reduce_scatter_limit ? comm->reduce_scatter_limit : l.scatter;
    if (comm->all_gather_limit || !kvpn_exchanges)
        l.gather = l.gather_odd = l.parts_uneven = l.parts_even = kvpn_exchanges ? comm->all_gather_limit : 0;
    return l;
}

/* What each rank gives: between two ranks, more than this goes through a pipeline. Measured on 2 H200s with 32, 64 and
   128 blocks: at the limit a pipeline takes about as long as the other way; of 64 MB it takes 2 to 27 % less. */
static size_t kvpn_pipeline_limit(const kvprim_comm *comm, bool scatters)
{
    const size_t few = scatters ? 16 << 20 : 8 << 20, half = 16 << 20, many = scatters ? 24 << 20 : 48 << 20;
    return comm->world > 2 ? SIZE_MAX : comm->blocks <= 40 ? few : comm->blocks <= 64 ? half : many;
}

/* bytes: of the result. The same on every rank: nothing here may differ between ranks. */
static kvpn_way kvpn_choose_sum(const kvprim_comm *comm, bool scatters, size_t bytes, kvprim_dtype dtype, int op)
{
    const kvpn_limits limits = kvpn_limits_of(comm);
    const size_t given = scatters ? bytes * (size_t)comm->world : bytes;
    if (!comm->peer[0] || op == KVPRIM_PROD || !kvpn_type_of(dtype).own ||
        (given > (scatters ? limits.scatter : limits.two_shot) && !comm->deterministic))
        return kvpn_by_nccl;
    if (!scatters && bytes <= limits.one_shot && bytes <= kvpn_capacity_bytes(comm, kvpn_by_one_shot))
        return kvpn_by_one_shot;
    return given > kvpn_pipeline_limit(comm, scatters) ? kvpn_by_pipeline
           : scatters                                  ? kvpn_by_scatter
                                                       : kvpn_by_two_shot;
}

/* Bytes of the largest and smallest part that ranks send, and of the largest that stays. The same on every rank. */
typedef struct kvpn_extent {
    size_t largest, smallest, own;
} kvpn_extent;

static kvpn_way kvpn_choose_parts(const kvprim_comm *comm, bool gathers, kvpn_extent e)
{
    const kvpn_limits limits = kvpn_limits_of(comm);
    const size_t world = (size_t)comm->world, few = e.own > e.largest ? e.own : e.largest;
    const bool takes_slots = few <= kvpn_capacity_bytes(comm, kvpn_by_parts);
    const size_t most = e.largest != e.smallest ? limits.parts_uneven
                        : !gathers              ? limits.parts_even
                        : e.largest % 16 == 0   ? limits.gather
                                                : limits.gather_odd;
    if (!comm->peer[0] || !kvpn_exchanges || e.largest > most / world)
        return kvpn_by_nccl;
    if (gathers && takes_slots && few == e.smallest && few <= kvpn_few_gathered / world)
        return kvpn_by_gather;
    if (takes_slots && few <= limits.parts / world)
        return kvpn_by_parts;
    if (gathers && world > 2)
        return e.largest <= limits.parts_many / world ? kvpn_by_gather_many : kvpn_by_gather_most;
    return e.largest <= limits.parts_many / world ? kvpn_by_parts_many : kvpn_by_parts_most;
}

/* KVPRIM_U8 stands for all that kvpn_any does. Any: the way of its kernels; Odd: of those for unaligned tensors. */
template <template <class, int> class Way, int max_ranks, template <class, int> class Any = kvpn_two_shot,
          template <class, int> class Odd = Any>
static const void *kvpn_pick(kvprim_dtype dtype, bool whole)
{
    return !whole                 ? (const void *)kvpn_kernel<Odd, kvpn_any<false>, max_ranks>
           : dtype == KVPRIM_F32  ? (const void *)kvpn_kernel<Way, kvpn_f32, max_ranks>
           : dtype == KVPRIM_BF16 ? (const void *)kvpn_kernel<Way, kvpn_bf16, max_ranks>
           : dtype == KVPRIM_F16  ? (const void *)kvpn_kernel<Way, kvpn_f16, max_ranks>
                                  : (const void *)kvpn_kernel<Any, kvpn_any<true>, max_ranks>;
}

template <template <class, int> class Way> static const void *kvpn_pick(kvprim_dtype dtype, int world, bool whole)
{
    return world == 2   ? kvpn_pick<Way, 2>(dtype, whole)
           : world <= 4 ? kvpn_pick<Way, 4>(dtype, whole)
                        : kvpn_pick<Way, 8, kvpn_two_shot, Way>(dtype, whole);
}

#ifndef KVPRIM_NO_EXCHANGE
template <bool whole> static const void *kvpn_pick_parts(kvpn_way way, int world)
{
    enum { many = kvpn_group, most = kvpn_large_group };
    if (way == kvpn_by_gather)
        return world == 2   ? (const void *)kvpn_kernel<kvpn_gather_all, kvpn_any<whole>, 2>
               : world <= 4 ? (const void *)kvpn_kernel<kvpn_gather_all, kvpn_any<whole>, 4>
                            : (const void *)kvpn_kernel<kvpn_gather_all, kvpn_any<whole>, 8>;
    if (way == kvpn_by_parts)
        return world == 2 ? (const void *)kvpn_parts_kernel<kvpn_parts_slots<true, whole>>
                          : (const void *)kvpn_parts_kernel<kvpn_parts_slots<false, whole>>;
    return way == kvpn_by_parts_many    ? (const void *)kvpn_parts_kernel<kvpn_parts_groups<many, false, whole>>
           : way == kvpn_by_parts_most  ? (const void *)kvpn_parts_kernel<kvpn_parts_groups<most, false, whole>>
           : way == kvpn_by_gather_many ? (const void *)kvpn_parts_kernel<kvpn_parts_groups<many, true, whole>>
                                        : (const void *)kvpn_parts_kernel<kvpn_parts_groups<most, true, whole>>;
}
#endif

/* whole: tensors are aligned to the way's packs, and end with one. */
static const void *kvpn_kernel_of(kvpn_way way, kvprim_dtype dtype, int world, bool whole)
{
#ifndef KVPRIM_NO_EXCHANGE
    if (way >= kvpn_by_gather)
        return whole ? kvpn_pick_parts<true>(way, world) : kvpn_pick_parts<false>(way, world);
#endif
    return way == kvpn_by_pipeline   ? kvpn_pick<kvpn_pipeline, 2, kvpn_pipeline>(dtype, whole)
           : way == kvpn_by_scatter  ? kvpn_pick<kvpn_scatter>(dtype, world, whole)
           : way == kvpn_by_one_shot ? kvpn_pick<kvpn_one_shot>(dtype, world, whole)
                                     : kvpn_pick<kvpn_two_shot>(dtype, world, whole);
}

/* >>impl_load -- kernels loaded when a communicator begins; clusters */

static uint32_t kvpn_max_threads_for(int world)
{
    return world <= 4 ? (uint32_t)kvpn_max_threads : (uint32_t)kvpn_max_threads_of_8;
}

static void kvpn_set_cluster(cudaLaunchAttribute *attribute, uint32_t blocks)
{
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = blocks, attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
}

static void kvpn_load_kernel(kvpn_init_task *task, const void *kernel)
{
    cudaFuncAttributes attributes;
    if (task->off_reason)
        return;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess)
        task->off_reason = "compiled for other GPUs than this one";
    else
        task->kernels_wait = task->kernels_wait && attributes.ptxVersion >= 90;
}

#ifndef KVPRIM_NO_NORM
/* Whether as many blocks as a launch may have fit in clusters of each size: the multiprocessors of a cluster lie close
   to each other, so the last ones of each part of a GPU (a GPC) may be too few for one. Beside other communicators,
   which leave as many multiprocessors as this one may have, in any places (desc->max_sms), fewer clusters may fit, but
   one must: among more than 8 * 7 of them, in at most 8 parts, one part has 8. (Compute capability 12.0: 12 parts.) */
static bool kvpn_can_cluster(const kvprim_comm *comm)
{
    enum { largest = 1 << kvpn_few_max_share_bits };
    const void *const kernel = kvpn_pick_norm(KVPRIM_BF16, comm->world, kvpn_norm_all);
    int major;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, comm->device) != cudaSuccess ||
        comm->blocks <= (major < 12 ? 8u : 12u) * (largest - 1))
        return false;
    for (uint32_t bits = 1; bits <= kvpn_few_max_share_bits; bits++) {
        cudaLaunchAttribute cluster;
        cudaLaunchConfig_t config = {};
        int clusters = 0;
        config.gridDim = dim3(comm->blocks >> bits << bits);
        config.blockDim = dim3(kvpn_max_threads_for(comm->world));
        config.attrs = &cluster, config.numAttrs = 1;
        kvpn_set_cluster(&cluster, 1u << bits);
        if (config.gridDim.x && (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess ||
                                 (uint32_t)clusters < comm->blocks >> bits))
            return false;
    }
    return true;
}
#endif

/* CUDA loads a kernel at first launch, maybe after a running one that waits for another rank: all are loaded here. */
static void kvpn_load_kernels(kvpn_init_task *task)
{
    static const kvprim_dtype types[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32, KVPRIM_U8};
    const int world = task->comm.world;
    task->kernels_wait = true;
    for (int way = kvpn_by_one_shot; way <= kvpn_by_gather_most; way++)
        for (int k = 0; k < 8; k++)
            kvpn_load_kernel(task, kvpn_kernel_of((kvpn_way)way, types[k / 2], world, k % 2 == 1));
#ifndef KVPRIM_NO_NORM
    for (int k = 0; k < 2; k++)
        for (int form = kvpn_norm_plain; form <= kvpn_norm_alone; form++)
            kvpn_load_kernel(task, kvpn_pick_norm(types[k], world, (kvpn_norm_form)form));
    /* kernels_wait: compiled for 9.0 or newer, without which a cluster has no instructions */
    task->mine.clusters = !task->off_reason && task->kernels_wait && kvpn_can_cluster(&task->comm);
#endif
    (void)cudaGetLastError();
}
#endif

/* Whether NCCL's symmetric kernels of this version may start before the kernel before them has ended. */
static bool kvpn_nccl_starts_early(int running)
{
    return running >= NCCL_VERSION(2, 28, 0) && running < NCCL_VERSION(2, 30, 7);
}

/* >>impl_describe -- the text of kvprim_comm_describe */

static void kvpn_describe(kvpn_init_task *task)
{
    static const char *const links[] = {"one GPU", "NVLink", "hidden by CUDA_VISIBLE_DEVICES", "PCIe", "a network"};
    kvprim_comm *const comm = &task->comm;
    const int running = comm->nccl_version;
    struct cudaDeviceProp device;
    char *const text = comm->description;
    const size_t size = sizeof comm->description;
    if (cudaGetDeviceProperties(&device, comm->device) != cudaSuccess)
        memcpy(device.name, "?", 2);
    size_t used = (size_t)snprintf(
        text, size,
        "rank %d of %d on device %d, %s; slowest link: %s; NCCL %d.%d.%d, compiled with %d.%d.%d, %s communicator; "
        "buffer of %zu bytes, %s%s; timeout %d ms; own kernels ",
        comm->rank, comm->world, comm->device, device.name, links[comm->link], running / 10000, running / 100 % 100,
        running % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, comm->nccl_borrowed ? "the caller's" : "own",
        comm->buffer_bytes, comm->in_windows && comm->window ? "in a window of NCCL's" : "no window",
        comm->nccl_starts_early ? ", a memset before NCCL's symmetric kernels" : "", comm->timeout_ms);
#ifdef KVPRIM_NCCL_KERNELS
    const kvpn_limits limits = kvpn_limits_of(comm);
    if (comm->peer[0]) {
        used +=
            (size_t)snprintf(text + used, size - used,
                             "on, %s, at most %u multiprocessors, %s%s, all_to_all up to %zu bytes received "
                             "(%zu if parts differ), all_gather up to %zu bytes received, ",
                             task->desc.peers                ? "in the caller's memory"
                             : comm->mapped[comm->rank == 0] ? "memory mapped between processes"
                                                             : "memory of one process",
                             comm->blocks,
                             comm->trigger ? "dependent launch, also of what follows"
                             : comm->pdl   ? "dependent launch"
                                           : "no dependent launch",
                             comm->clusters ? ", clusters" : "", limits.parts_even, limits.parts_uneven, limits.gather);
        if (comm->deterministic)
            (void)snprintf(text + used, size - used, "reductions of any size");
        else
            (void)snprintf(text + used, size - used, "all_reduce and reduce_scatter up to %zu and %zu sent",
                           limits.two_shot, limits.scatter);
        return;
    }
#endif
    (void)snprintf(text + used, size - used, "off: %s%s", task->off_reason,
                   comm->sums ? "; 8 MB for sums that a norm follows" : "");
}

/* >>impl_init -- init: its steps, its thread, kvprim_comm_init */

/* Makes NCCL's communicator, and what exchanges need. A rank that fails before that cannot tell the others. */
static kvprim_status kvpn_make_nccl(kvpn_init_task *task)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = &task->comm;
    ncclUniqueId id;
    int rank = comm->rank, world = comm->world, device = comm->device;
    memcpy(id.internal, task->desc.id.bytes, sizeof id.internal);
    task->can_exchange = comm->nccl_borrowed && task->desc.exchange;
    (void)ncclGetVersion(&comm->nccl_version);
    KVPRIM_NCCL_TRY_CUDA(cudaSetDevice(comm->device));
    KVPRIM_NCCL_TRY_CUDA(cudaStreamCreateWithFlags(&comm->stream, cudaStreamNonBlocking));
    KVPRIM_NCCL_TRY_CUDA(cudaMalloc(&comm->scratch, sizeof task->mine * ((size_t)world + 1)));
    if (comm->nccl_borrowed) {
        KVPRIM_NCCL_TRY_NCCL(ncclCommUserRank(comm->nccl, &rank));
        KVPRIM_NCCL_TRY_NCCL(ncclCommCount(comm->nccl, &world));
        KVPRIM_NCCL_TRY_NCCL(ncclCommCuDevice(comm->nccl, &device));
    } else if (!kvpn_is_cancelled(task)) { /* kvpn_start_teardown ends it if it waits: NCCL has no other way */
        const ncclResult_t result = ncclCommInitRank(&comm->nccl, world, id, rank);
        KVPRIM_TRY(
            kvpn_nccl_status(f, "ncclCommInitRank", kvpn_wait_for_nccl(comm->nccl, result, &task->cancelled, 0)));
    }
    task->can_exchange = comm->nccl && (task->can_exchange || world == comm->world);
    KVPRIM_REFUSE(
        rank != comm->rank || world != comm->world || device != comm->device, ARGUMENT,
        "%s: desc->nccl is rank %d of %d on device %d, but desc says rank %d of %d, and the current device is %d", f,
        rank, world, device, comm->rank, comm->world, comm->device);
    return KVPRIM_OK;
}

/* After the last exchange, all ranks know the same. */
static kvprim_status kvpn_decide(kvpn_init_task *task)
{
    kvprim_comm *const comm = &task->comm;
    if (task->off_reason)
        kvpn_free_slots(comm);
#ifdef KVPRIM_NCCL_KERNELS
    int driver = 0; /* older ones cannot capture launches with programmatic dependent launch */
    comm->pdl = comm->peer[0] && !task->desc.no_pdl && task->kernels_wait &&
                cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
    comm->trigger = comm->pdl && task->desc.launch_dependents;
#endif
    KVPRIM_REFUSE(comm->deterministic && comm->world > 1 && !comm->peer[0], UNSUPPORTED,
                  "kvprim_comm_init: desc->deterministic is 1, and kernels for it are off: %s", task->off_reason);
    comm->in_windows = comm->nccl_window, comm->clusters = 1;
    for (int r = 0; r < comm->world; r++) {
        comm->in_windows = comm->in_windows && (comm->nccl_borrowed || task->all[r].window);
        comm->clusters = comm->clusters && task->all[r].clusters;
        comm->link = task->all[r].link > comm->link ? task->all[r].link : comm->link;
    }
    comm->nccl_starts_early = comm->in_windows && kvpn_nccl_starts_early(comm->nccl_version);
    kvpn_describe(task);
    return KVPRIM_OK;
}

/* Before the last exchange: the nonces of all ranks must have arrived, and what launches need is loaded. A norm's own
   kernel, and memory for sums, are needed whether or not own kernels sum. */
static kvprim_status kvpn_finish_rank(kvpn_init_task *task)
{
    kvprim_comm *const comm = &task->comm;
    uint64_t nonces[kvpn_max_world];
    if (!task->off_reason)
        KVPRIM_TRY(kvpn_copy_and_wait(comm, nonces, kvpn_nonce_at(comm, comm->rank, 0), sizeof nonces));
    for (int r = 0; r < comm->world && !task->off_reason; r++)
        if (nonces[r] != task->all[r].nonce)
            task->off_reason = "another rank's copy to this rank's memory did not arrive";
#ifdef KVPRIM_NCCL_KERNELS
    if (!task->off_reason)
        kvpn_load_kernels(task);
#ifndef KVPRIM_NO_NORM
    const char *const f = "kvprim_comm_init";
    cudaFuncAttributes attributes;
    (void)cudaFuncGetAttributes(&attributes, kvpn_pick_norm(KVPRIM_F16, 1, kvpn_norm_alone));
    (void)cudaFuncGetAttributes(&attributes, kvpn_pick_norm(KVPRIM_BF16, 1, kvpn_norm_alone));
    (void)cudaGetLastError(); /* its launch reports it */
    if (comm->world > 1)
        KVPRIM_NCCL_TRY_CUDA(cudaMalloc(&comm->sums, kvpn_sums_bytes));
#endif
#endif
    return KVPRIM_OK;
}

/* Each step fails on all ranks or on none: the exchange after it tells all of them. */
static kvprim_status kvpn_run_init_steps(kvpn_init_task *task)
{
    const size_t all = sizeof task->mine;
    KVPRIM_TRY(kvpn_exchange_infos(task, kvpn_make_nccl(task), sizeof task->mine.hello));
    KVPRIM_TRY(kvpn_exchange_infos(task, kvpn_prepare_rank(task), all));
    KVPRIM_TRY(kvpn_compare_ranks(task));
    kvpn_find_links(task);
    kvpn_connect_peers(task);
    KVPRIM_TRY(kvpn_exchange_infos(task, KVPRIM_OK, all));
    const kvprim_status s = kvpn_finish_rank(task);
    kvpn_register_window(task); /* on all ranks or none: it waits for the others */
    KVPRIM_TRY(kvpn_exchange_infos(task, s, all));
    return kvpn_decide(task);
}

static kvpn_init_task *kvpn_new_init_task(const kvprim_comm_desc *desc, int device)
{
    const size_t world = (size_t)desc->world, fewest = kvpn_group_calls,
                 grouped = 2 * world > fewest ? 2 * world : fewest;
    kvpn_init_task *const task = (kvpn_init_task *)calloc(1, sizeof *task + world * sizeof *task->all);
    kvpn_teardown *const teardown =
        (kvpn_teardown *)calloc(1, sizeof *teardown + grouped * sizeof *teardown->group.calls);
    if (!task || !teardown) {
        free(task);
        free(teardown);
        return NULL;
    }
    const kvpn_hello hello = {"kvprim", KVPRIM_VERSION, kvpn_protocol, sizeof task->mine, 0, 0};
    kvprim_comm *const comm = &task->comm;
    task->desc = *desc, task->mine.hello = hello, task->all = (kvpn_rank_info *)(task + 1), task->refs = 2;
    comm->teardown = teardown, teardown->refs = 1, teardown->device = device;
    teardown->group.calls = (kvpn_group_call *)(teardown + 1), teardown->group.calls_max = (int32_t)grouped;
    comm->nccl = desc->nccl, comm->nccl_borrowed = desc->nccl != NULL;
    comm->rank = desc->rank, comm->world = desc->world, comm->device = device;
    comm->timeout_ms = desc->timeout_ms ? desc->timeout_ms : kvpn_default_timeout_ms;
    comm->deterministic = desc->deterministic, comm->nccl_window = desc->nccl_window;
    comm->buffer_bytes = desc->buffer_bytes, comm->all_reduce_limit = desc->all_reduce_limit;
    comm->reduce_scatter_limit = desc->reduce_scatter_limit, comm->all_gather_limit = desc->all_gather_limit;
    for (int r = 0; desc->peers && r < desc->world; r++)
        comm->peer[r] = desc->peers[r];
    return task;
}

/* Frees what was not published. */
static void kvpn_release_init_task(kvpn_init_task *task)
{
    if (kvpn_add(&task->refs, -1) != 0)
        return;
    kvpn_free_comm(&task->comm);
    free(task);
}

static void kvpn_finish_init_task(kvpn_init_task *task, kvprim_status status)
{
    task->status = status;
    (void)snprintf(task->error, sizeof task->error, "%s", kvprim_last_error());
    KVPRIM_NCCL_STORE(&task->done, 1);
    kvpn_release_init_task(task);
}

static void *kvpn_run_init_task(void *argument)
{
    kvpn_init_task *const task = (kvpn_init_task *)argument;
    (void)kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    const kvprim_status s = kvpn_run_init_steps(task);
    if (kvpn_is_cancelled(task))
        kvpn_start_teardown(&task->comm, true); /* the caller may have left before NCCL made a communicator */
    kvpn_finish_init_task(task, s);
    return NULL;
}

/* abort waits for init to notice, active calls to return, NCCL to end, other ranks to be told: together less than the
   second that it promises. destroy waits for calls, an abort among them, and for the telling. */
enum { kvpn_cancel_ms = 50, kvpn_calls_ms = 100, kvpn_nccl_ms = 700, kvpn_notify_ms = 100 };
enum { kvpn_destroy_calls_ms = 2000, kvpn_destroy_notify_ms = 1000 };

/* Waits until init is done. False: after a timeout or an abort, init was left running. */
static bool kvpn_wait_for_init_task(const kvprim_comm *comm, kvpn_init_task *task, int64_t timeout_ms)
{
    const int64_t start_us = kvpn_now_us();
    int64_t cancelled_us = 0; /* 0: it was not cancelled */
    while (!kvpn_wait_until(&task->done, 1, 1)) {
        const int64_t now_us = kvpn_now_us();
        const bool aborted = KVPRIM_NCCL_LOAD(&comm->state) != kvpn_initialising;
        if (!cancelled_us && (aborted || now_us - start_us > timeout_ms * 1000)) {
            cancelled_us = now_us;
            KVPRIM_NCCL_STORE(&task->cancelled, 1);
        }
        if (!cancelled_us && KVPRIM_NCCL_LOAD(&task->exchange_requested)) {
            int device = 0; /* the current one: the exchange may change it */
            (void)cudaGetDevice(&device);
            task->exchange_result =
                task->desc.exchange(task->desc.exchange_context, &task->mine, task->all, task->exchange_bytes);
            (void)cudaSetDevice(device);
            KVPRIM_NCCL_STORE(&task->exchange_requested, 0);
        }
        if (cancelled_us && now_us - cancelled_us > kvpn_cancel_ms * 1000)
            kvpn_start_teardown(&task->comm, true); /* init waits inside NCCL, which this ends */
        if (cancelled_us && now_us - cancelled_us > (kvpn_cancel_ms + kvpn_nccl_ms) * 1000)
            return false;
    }
    return true;
}

/* Gives the communicator to the caller, unless init failed or was aborted. Then says why there is none. */
static kvprim_status kvpn_end_init(kvprim_comm *comm, kvpn_init_task *task, bool done, int timeout_ms)
{
    const char *const f = "kvprim_comm_init";
    const int rank = task->desc.rank;
    kvprim_status s;
    if (done && !task->cancelled && task->status == KVPRIM_OK) {
        memcpy(comm, &task->comm, offsetof(kvprim_comm, self));
        if (kvpn_change(&comm->state, kvpn_initialising, kvpn_alive)) {
            memset(&task->comm, 0, sizeof task->comm);
            return KVPRIM_OK;
        }
    }
    if (KVPRIM_NCCL_LOAD(&comm->state) == kvpn_aborted)
        s = kvprim_fail(KVPRIM_ERROR_TIMEOUT, "%s: rank %d: kvprim_comm_abort was called", f, rank);
    else if (task->cancelled)
        s = kvprim_fail(KVPRIM_ERROR_TIMEOUT, "%s: rank %d of %d waited %d ms for the others", f, rank,
                        task->desc.world, timeout_ms);
    else
        s = kvprim_fail(task->status, "%s", task->error);
    kvpn_start_teardown(&task->comm, true);
    (void)kvpn_wait_for_teardown(&task->comm, done ? kvpn_nccl_ms : 0);
    memset(comm, 0, offsetof(kvprim_comm, self));
    KVPRIM_NCCL_STORE(&comm->self, NULL);
    KVPRIM_NCCL_STORE(&comm->state, 0);
    (void)kvpn_wait_until(&comm->active_calls, 1, kvpn_destroy_notify_ms); /* an abort has noticed */
    return s;
}

KVPRIM_API kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc)
{
    const char *const f = "kvprim_comm_init";
    KVPRIM_RANGE(f);
    int device;
    KVPRIM_TRY(kvpn_check_comm_desc(comm, desc));
    KVPRIM_NCCL_TRY_CUDA(cudaGetDevice(&device));
    const int timeout_ms = desc->init_timeout_ms ? desc->init_timeout_ms : kvpn_default_init_timeout_ms;
    kvpn_init_task *const task = kvpn_new_init_task(desc, device);
    KVPRIM_REFUSE(!task, CUDA, "%s: no host memory", f);
    memset(comm, 0, sizeof *comm);
    comm->active_calls = 1, comm->process = (int32_t)getpid();
    KVPRIM_NCCL_STORE(&comm->state, (int32_t)kvpn_initialising);
    KVPRIM_NCCL_STORE(&comm->self, comm); /* before the thread: others may check as soon as it runs */
    if (!kvpn_start_thread(kvpn_run_init_task, task))
        kvpn_finish_init_task(task, kvprim_fail(KVPRIM_ERROR_CUDA, "%s: no thread could be started", f));
    const bool done = kvpn_wait_for_init_task(comm, task, timeout_ms);
    const kvprim_status s = kvpn_end_init(comm, task, done, timeout_ms);
    kvpn_release_init_task(task);
    kvpn_leave(comm);
    return s;
}

/* >>impl_end -- abort and destroy */

/* Kernels that wait see comm->stop. Later ones, and other ranks', see the stop reason in their page, which this writes,
   on a thread of its own: CUDA may not return while NCCL's work is stuck. */
static void *kvpn_notify_ranks(void *argument)
{
    kvprim_comm *const comm = (kvprim_comm *)argument;
    (void)kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    (void)cudaSetDevice(comm->device);
    for (int r = 0; r < comm->world; r++)
        (void)cudaMemcpyAsync((uint32_t *)comm->peer[r] + kvpn_stop_reason_word, comm->stop, sizeof *comm->stop,
                              cudaMemcpyDefault, comm->stream);
    KVPRIM_NCCL_STORE(&comm->notifying, 0);
    return NULL;
}

/* Calls nothing of CUDA's itself. */
KVPRIM_API kvprim_status kvprim_comm_abort(kvprim_comm *comm)
{
    KVPRIM_RANGE(__func__);
    KVPRIM_TRY(kvpn_check_process(__func__, comm));
    if (kvpn_enter(comm, kvpn_initialising, kvpn_aborted)) {
        (void)kvpn_wait_until(&comm->state, 0, kvpn_cancel_ms + kvpn_nccl_ms + kvpn_calls_ms);
        kvpn_leave(comm);
        return KVPRIM_OK;
    }
    if (!kvpn_enter(comm, kvpn_alive, kvpn_aborted))
        return kvpn_fail_not_alive(__func__, comm);
    if (comm->stop) {
        comm->notifying = 1;
        KVPRIM_NCCL_STORE(comm->stop, (uint32_t)kvpn_stop_aborted | (uint32_t)comm->rank << 8);
        kvpn_run_job(kvpn_notify_ranks, comm, true);
    }
    (void)kvpn_wait_until(&comm->active_calls, 1, kvpn_calls_ms);
    kvpn_start_teardown(comm, true); /* also ends a call that is still blocked inside NCCL */
    (void)kvpn_wait_for_teardown(comm, kvpn_nccl_ms);
    (void)kvpn_wait_until(&comm->notifying, 0, kvpn_notify_ms);
    kvpn_leave(comm);
    return KVPRIM_OK;
}

/* Ends NCCL's part and everything that may still use what destroy frees. The state is kvpn_destroying. */
static kvprim_status kvpn_leave_nccl(kvprim_comm *comm)
{
    const char *const f = "kvprim_comm_destroy";
    KVPRIM_REFUSE(!kvpn_wait_until(&comm->active_calls, 1, kvpn_destroy_calls_ms) ||
                      !kvpn_wait_until(&comm->notifying, 0, kvpn_destroy_notify_ms),
                  TIMEOUT, "%s: a call in another thread has not returned; call again when it has", f);
    if (!KVPRIM_NCCL_LOAD(&comm->teardown->started)) {
        (void)cudaDeviceSynchronize(); /* destroy's own synchronise reports the error */
        kvpn_start_teardown(comm, false);
    }
    KVPRIM_REFUSE(!kvpn_wait_for_teardown(comm, comm->timeout_ms), TIMEOUT,
                  "%s: NCCL has not ended: destroy the graphs that hold its collectives, abort other "
                  "communicators whose work is stuck, then call again",
                  f);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_comm_destroy(kvprim_comm *comm)
{
    KVPRIM_RANGE(__func__);
    int device = 0;
    KVPRIM_TRY(kvpn_check_process(__func__, comm));
    if (!kvpn_enter(comm, kvpn_alive, kvpn_destroying) && !kvpn_enter(comm, kvpn_aborted, kvpn_destroying))
        return kvpn_fail_not_alive(__func__, comm);
    (void)cudaGetDevice(&device);
    (void)cudaSetDevice(comm->device);
    kvprim_status s = kvpn_leave_nccl(comm);
    if (s != KVPRIM_OK) {
        KVPRIM_NCCL_STORE(&comm->state, (int32_t)kvpn_aborted);
        kvpn_leave(comm);
    } else {
        s = kvpn_cuda_status(__func__, "cudaDeviceSynchronize", cudaDeviceSynchronize());
        if (s == KVPRIM_OK)
            s = kvpn_nccl_status(__func__, comm->teardown->aborts ? "ncclCommAbort" : "ncclCommDestroy",
                                 comm->teardown->result);
        kvpn_free_comm(comm);
        memset(comm, 0, sizeof *comm);
    }
    (void)cudaSetDevice(device);
    return s;
}

/* >>impl_watch -- kvprim_comm_check, and where a wait for NCCL's collectives ends */

static kvprim_status kvpn_check_stop(const char *function, const kvprim_comm *comm)
{
    const uint32_t reason = comm->stop ? KVPRIM_NCCL_LOAD(comm->stop) : 0;
    const int by = (int)(reason >> 8 & 0xff), awaited = (int)(reason >> 16 & 0xff);
    if (reason == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE((reason & 0xff) == kvpn_stop_aborted, TIMEOUT, "%s: rank %d: rank %d was aborted", function,
                  comm->rank, by);
    KVPRIM_REFUSE(by == comm->rank, TIMEOUT, "%s: rank %d waited %d ms for rank %d", function, by, comm->timeout_ms,
                  awaited);
    return kvprim_fail(KVPRIM_ERROR_TIMEOUT, "%s: rank %d: rank %d timed out waiting for rank %d", function, comm->rank,
                       by, awaited);
}

/* NCCL's kernels wait without end and say nothing, so two events give its collectives a deadline. Each call records
   event watch_index. The other one is not recorded again until kvprim_comm_check finds it done, and its age counts;
   then the two change places, so that later hangs are seen too. The thread that enqueues sets the time of the event
   that it records. A thread that checks clears that time when it finds the event done, unless it has changed since. */
static void kvpn_record_watch_event(kvprim_comm *comm, cudaStream_t stream)
{
    const int32_t index = KVPRIM_NCCL_LOAD(&comm->watch_index);
    const int64_t now_us = kvpn_now_us();
    /* before the record, as no old time may count, and after it, as a check may have cleared the time meanwhile */
    KVPRIM_NCCL_STORE(&comm->watch_start_us[index], now_us);
    if (cudaEventRecord(comm->teardown->watch[index], stream) == cudaSuccess)
        KVPRIM_NCCL_STORE(&comm->watch_start_us[index], now_us);
    else
        (void)cudaGetLastError();
}

/* Also while a stream is captured. That an event is not done leaves no error behind for the caller. */
static cudaError_t kvpn_query_event(cudaEvent_t event)
{
    const enum cudaStreamCaptureMode mode = kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    const cudaError_t before = cudaPeekAtLastError(), done = cudaEventQuery(event);
    if (before == cudaSuccess)
        (void)cudaGetLastError();
    (void)kvpn_set_capture_mode(mode);
    return done;
}

/* When event k was recorded, if it is not done; 0: it is done. *error: the device's context is dead. */
static int64_t kvpn_pending_since_us(kvprim_comm *comm, int k, cudaError_t *error)
{
    int64_t start_us = KVPRIM_NCCL_LOAD(&comm->watch_start_us[k]);
    const cudaError_t done = kvpn_query_event(comm->teardown->watch[k]);
    if (done == cudaErrorNotReady)
        return start_us;
    *error = done == cudaSuccess ? *error : done;
    (void)__atomic_compare_exchange_n(&comm->watch_start_us[k], &start_us, 0, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST);
    return 0;
}

static kvprim_status kvpn_check_nccl(const char *function, kvprim_comm *comm)
{
    const int32_t index = KVPRIM_NCCL_LOAD(&comm->watch_index);
    cudaError_t error = cudaSuccess;
    ncclResult_t result = ncclSuccess;
    KVPRIM_TRY(kvpn_nccl_status(function, "ncclCommGetAsyncError", ncclCommGetAsyncError(comm->nccl, &result)));
    if (result != ncclInProgress)
        KVPRIM_TRY(kvpn_nccl_status(function, "an earlier collective", result));
    int64_t oldest_us = kvpn_pending_since_us(comm, !index, &error);
    const int64_t latest_us = kvpn_pending_since_us(comm, index, &error);
    if (error != cudaSuccess)
        return kvpn_cuda_status(function, "an earlier kernel or copy on this device", error);
    if (oldest_us == 0 && latest_us != 0) {
        oldest_us = latest_us;
        KVPRIM_NCCL_STORE(&comm->watch_index, !index);
    }
    const int64_t age_ms = (kvpn_now_us() - oldest_us) / 1000;
    KVPRIM_REFUSE(oldest_us != 0 && age_ms > comm->timeout_ms, TIMEOUT,
                  "%s: rank %d: a collective of NCCL's was not done %lld ms after its call; "
                  "NCCL does not say which other rank it waits for",
                  function, comm->rank, (long long)age_ms);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_comm_check(kvprim_comm *comm)
{
    KVPRIM_TRY(kvpn_check_process(__func__, comm));
    if (kvpn_has_state(comm, kvpn_initialising))
        return KVPRIM_OK;
    KVPRIM_TRY(kvpn_enter_alive(__func__, comm));
    const kvprim_status stopped = kvpn_check_stop(__func__, comm),
                        s = stopped != KVPRIM_OK ? stopped : kvpn_check_nccl(__func__, comm);
    kvpn_leave(comm);
    return s;
}

KVPRIM_API void *kvprim_comm_buffer(kvprim_comm *comm, size_t *bytes)
{
    const bool alive = kvpn_has_state(comm, kvpn_alive);
    if (bytes)
        *bytes = alive ? comm->buffer_bytes : 0;
    if (!alive)
        (void)kvpn_fail_not_alive(__func__, comm);
    return alive ? comm->buffer : NULL;
}

KVPRIM_API const char *kvprim_comm_describe(const kvprim_comm *comm)
{
    return kvpn_has_state(comm, kvpn_alive) ? comm->description
                                            : "not alive: not initialised, moved, aborted, or ended";
}

/* >>impl_call -- a collective's arguments */

static const ncclRedOp_t kvpn_ops[] = {ncclSum, ncclMax, ncclProd, ncclMin, ncclAvg};

/* In this order: reductions, those of parts (the gather first), then those with a root or a peer. */
typedef enum kvpn_kind {
    kvpn_all_reduce,
    kvpn_reduce_scatter,
    kvpn_all_gather,
    kvpn_all_gatherv,
    kvpn_all_to_all,
    kvpn_all_to_allv,
    kvpn_broadcast,
    kvpn_send,
    kvpn_recv
} kvpn_kind;

/* A collective call: what is checked, and what NCCL and the kernels take. Counts are elements. */
typedef struct kvpn_call {
    kvpn_kind kind;
    const char *function;
    kvprim_comm *comm;
    void *recv;
    const void *send;
    size_t count, recv_count, send_count; /* recv_count or send_count 0: there is no such side */
    const size_t *counts;                 /* of all_gatherv and all_to_allv; count is then the largest of them */
    const kvprim_norm_desc *norm;         /* of all_reduce_norm */
    kvprim_dtype dtype;
    int op_or_peer;
    cudaStream_t stream;
    int captured;
    ncclDataType_t type;
    size_t element;
} kvpn_call;

/* NULL is the legacy stream, even if the file is compiled with another default. */
static cudaStream_t kvpn_stream(cudaStream_t stream)
{
    return stream ? stream : cudaStreamLegacy;
}

static kvpn_call kvpn_make_call(kvpn_kind kind, const char *function, kvprim_comm *comm, cudaStream_t stream)
{
    kvpn_call c;
    memset(&c, 0, sizeof c);
    c.kind = kind, c.function = function, c.comm = comm, c.stream = kvpn_stream(stream);
    return c;
}

static bool kvpn_gathers(kvpn_kind kind)
{
    return kind == kvpn_all_gather || kind == kvpn_all_gatherv;
}

/* A part from each rank to each other one. NCCL has a call for all_gather alone. */
static bool kvpn_has_parts(kvpn_kind kind)
{
    return kind >= kvpn_all_gather && kind <= kvpn_all_to_allv;
}

/* The byte of a tensor, which may be NULL if it has none. */
static char *kvpn_byte_at(const void *tensor, size_t at)
{
    return (char *)((uintptr_t)tensor + at);
}

static size_t kvpn_part_count(const kvpn_call *c, int from, int to)
{
    return c->kind == kvpn_all_to_allv   ? c->counts[(size_t)from * (size_t)c->comm->world + (size_t)to]
           : c->kind == kvpn_all_gatherv ? c->counts[from]
                                         : c->count;
}

/* Where the part begins in this rank's send for rank r, or in its recv from rank r. r = world: the last one's end. */
static size_t kvpn_part_begin(const kvpn_call *c, int r, bool sends)
{
    size_t begin = 0;
    if (sends && kvpn_gathers(c->kind))
        return r < c->comm->world ? 0 : kvpn_part_count(c, c->comm->rank, 0);
    if (!c->counts)
        return (size_t)r * c->count;
    for (int k = 0; k < r; k++)
        begin += sends ? kvpn_part_count(c, c->comm->rank, k) : kvpn_part_count(c, k, c->comm->rank);
    return begin;
}

/* Sets the count to the largest of counts. Their sum must be a number of bytes, so that no later sum overflows. An
   all_gatherv of equal parts becomes an all_gather. */
static kvprim_status kvpn_check_counts(kvpn_call *c)
{
    const size_t world = (size_t)c->comm->world, many = c->kind == kvpn_all_to_allv ? world * world : world;
    const size_t most = SIZE_MAX / sizeof(double);
    size_t sum = 0, least = SIZE_MAX;
    KVPRIM_REFUSE(!c->counts, NULL, "%s: counts is NULL", c->function);
    for (size_t k = 0; k < many; k++) {
        KVPRIM_REFUSE(c->counts[k] > most - sum, SIZE, "%s: counts[%zu] is %zu: all together are too many bytes",
                      c->function, k, c->counts[k]);
        sum += c->counts[k];
        c->count = c->counts[k] > c->count ? c->counts[k] : c->count;
        least = c->counts[k] < least ? c->counts[k] : least;
    }
    if (c->kind == kvpn_all_gatherv && least == c->count)
        c->kind = kvpn_all_gather, c->counts = NULL;
    return KVPRIM_OK;
}

/* In comm->after_nccl: 1 if the last call was NCCL's; 2 if the last one that was captured was. A kernel of NCCL's may
   not have waited for what was before it, so no own kernel may start early after it. */
static int32_t kvpn_after_nccl_bit(const kvpn_call *c)
{
    return c->captured ? 2 : 1;
}

/* CUDA cannot be asked for the device of a stream that is captured; it then refuses by itself what does not fit. */
static kvprim_status kvpn_check_device(kvpn_call *c)
{
    const char *const f = c->function;
    int device = -1;
    enum cudaStreamCaptureStatus capture;
    KVPRIM_NCCL_TRY_CUDA(cudaGetDevice(&device));
    KVPRIM_REFUSE(device != c->comm->device, ARGUMENT, "%s: the current device is %d, the communicator is on device %d",
                  f, device, c->comm->device);
    KVPRIM_TRY(kvpn_cuda_status(f, "stream: cudaStreamIsCapturing", cudaStreamIsCapturing(c->stream, &capture)));
    c->captured = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (c->stream != cudaStreamLegacy && c->stream != c->comm->checked_stream && !c->captured) {
        KVPRIM_TRY(kvpn_cuda_status(f, "stream: cudaStreamGetDevice", cudaStreamGetDevice(c->stream, &device)));
        KVPRIM_REFUSE(device != c->comm->device, ARGUMENT,
                      "%s: stream belongs to device %d, the communicator is on device %d", f, device, c->comm->device);
        c->comm->checked_stream = c->stream;
    }
#endif
    return KVPRIM_OK;
}

static kvprim_status kvpn_check_pointer(const kvpn_call *c, const char *name, const void *pointer, size_t count)
{
    if (count == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE(!pointer, NULL, "%s: %s is NULL, but the count is %zu", c->function, name, c->count);
    KVPRIM_REFUSE((uintptr_t)pointer % c->element, ARGUMENT, "%s: %s is %p, not aligned to its elements of %d bytes",
                  c->function, name, (void *)(uintptr_t)pointer, (int)c->element);
    KVPRIM_REFUSE(count * c->element > UINTPTR_MAX - (uintptr_t)pointer, SIZE,
                  "%s: %s is %p and has %zu elements: past the end of memory", c->function, name,
                  (void *)(uintptr_t)pointer, count);
    return KVPRIM_OK;
}

/* recv and send must be apart, or in place: this rank's part of one is the other. */
static kvprim_status kvpn_check_aliasing(const kvpn_call *c)
{
    const uintptr_t recv = (uintptr_t)c->recv, send = (uintptr_t)c->send;
    const size_t recv_bytes = c->recv_count * c->element, send_bytes = c->send_count * c->element;
    const size_t part = kvpn_part_begin(c, c->comm->rank, false) * c->element;
    const uintptr_t recv_part = recv + (kvpn_gathers(c->kind) ? part : 0),
                    send_part = send + (c->kind == kvpn_reduce_scatter ? part : 0);
    const bool exchanges = c->kind == kvpn_all_to_all || c->kind == kvpn_all_to_allv;
    if (recv + recv_bytes <= send || send + send_bytes <= recv || (recv_part == send_part && !exchanges))
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: recv %p, %zu bytes, and send %p, %zu bytes, overlap%s", c->function,
                       c->recv, recv_bytes, (void *)send, send_bytes, exchanges ? "" : " and are not in place");
}

/* Fills in what follows from the arguments: both sides' counts, type, element, captured. */
static kvprim_status kvpn_check_call(kvpn_call *c)
{
    const kvpn_type type = kvpn_type_of(c->dtype);
    const size_t world = (size_t)c->comm->world;
    KVPRIM_REFUSE(!type.name, ARGUMENT,
                  "%s: dtype is %d, which is not an element type; 0 is \"not set\", KVPRIM_I32 and KVPRIM_I64 "
                  "are index types",
                  c->function, (int)c->dtype);
    KVPRIM_REFUSE(c->kind <= kvpn_reduce_scatter && (c->op_or_peer < KVPRIM_SUM || c->op_or_peer > KVPRIM_AVG),
                  ARGUMENT, "%s: op is %d, which is not a kvprim_op", c->function, c->op_or_peer);
    KVPRIM_REFUSE(c->kind >= kvpn_broadcast && (c->op_or_peer < 0 || c->op_or_peer >= c->comm->world), ARGUMENT,
                  "%s: %s is %d, must be 0 to %d", c->function, c->kind == kvpn_broadcast ? "root" : "peer",
                  c->op_or_peer, (int)c->comm->world - 1);
    KVPRIM_REFUSE(c->count > SIZE_MAX / type.bytes / world, SIZE, "%s: the count is %zu, which is too many bytes",
                  c->function, c->count);
    if (kvpn_has_parts(c->kind)) {
        c->recv_count = kvpn_part_begin(c, c->comm->world, false);
        c->send_count = kvpn_part_begin(c, c->comm->world, true);
    } else {
        c->recv_count = c->kind == kvpn_send ? 0 : c->count;
        c->send_count = c->kind == kvpn_reduce_scatter                      ? world * c->count
                        : c->kind == kvpn_broadcast || c->kind == kvpn_recv ? 0
                                                                            : c->count;
    }
    c->type = c->kind > kvpn_reduce_scatter && type.bytes == 1 ? ncclUint8 : (ncclDataType_t)type.nccl;
    c->element = type.bytes;
    KVPRIM_TRY(kvpn_check_device(c));
    KVPRIM_TRY(kvpn_check_pointer(c, c->kind >= kvpn_broadcast ? "buf" : "recv", c->recv, c->recv_count));
    KVPRIM_TRY(kvpn_check_pointer(c, c->kind >= kvpn_broadcast ? "buf" : "send", c->send, c->send_count));
    if (c->recv_count && c->send_count)
        KVPRIM_TRY(kvpn_check_aliasing(c));
    return kvpn_check_stop(c->function, c->comm);
}

#ifdef KVPRIM_NCCL_KERNELS
/* >>impl_launch -- collectives by own kernels: which way, which grid */

static_assert(kvpn_stop_reason_word >= (int)kvpn_max_blocks && kvpn_nonces_word > kvpn_stop_reason_word &&
                  4 * (kvpn_nonces_word + 2 * kvpn_max_world) <= kvpn_page,
              "the page has room for turns, the stop reason and nonces");
enum {
    kvpn_min_block_slots =
        (kvpn_min_peer_bytes - 2 * kvpn_page) / (4 * 16 * 8 * (int)kvpn_max_world * kvpn_max_blocks) * 8
};
static_assert((int)kvpn_min_block_slots >= 32 * ((int)kvpn_large_group + 1), "a block has slots for a warp");
static_assert(4 * (int)kvpn_min_block_slots >= 32 * (int)kvpn_pipeline_packs, "of two ranks, for a step of a warp");

static kvpn_extent kvpn_extent_of(const kvpn_call *c)
{
    const size_t equal = c->count * c->element;
    kvpn_extent e = {0, SIZE_MAX, 0};
    if (!c->counts)
        e.largest = e.smallest = e.own = equal;
    for (int from = 0; c->counts && from < c->comm->world; from++)
        for (int to = 0; to < c->comm->world; to++) {
            const size_t bytes = kvpn_part_count(c, from, to) * c->element;
            size_t *const most = from == to ? &e.own : &e.largest;
            *most = bytes > *most ? bytes : *most;
            e.smallest = from != to && bytes < e.smallest ? bytes : e.smallest;
        }
    return e;
}

/* See >>impl_choose. */
static kvpn_way kvpn_way_of(const kvpn_call *c)
{
    if (kvpn_has_parts(c->kind))
        return c->comm->peer[0] ? kvpn_choose_parts(c->comm, kvpn_gathers(c->kind), kvpn_extent_of(c)) : kvpn_by_nccl;
    if (c->kind > kvpn_reduce_scatter)
        return kvpn_by_nccl;
    return kvpn_choose_sum(c->comm, c->kind == kvpn_reduce_scatter, c->count * c->element, c->dtype, c->op_or_peer);
}

/* Chooses the grid. Few packs take small blocks on many multiprocessors. Many packs take all blocks, or as few as have
   the slots. With groups, a block has threads for one group of packs each. A block's packs begin at a multiple of 8,
   which is 128 bytes; in a pipeline, which has slots for 4 or 8 steps, with a pack of each of its threads in turn. */
static void kvpn_set_grid(const kvprim_comm *comm, kvpn_params *p, kvpn_way way, uint32_t *blocks, uint32_t *threads)
{
    const uint32_t least = (p->slice_packs + comm->block_slots - 1) / comm->block_slots, group = kvpn_group_of(way);
    const uint32_t most =
        way == kvpn_by_parts ? kvpn_max_threads_of_role(comm, way) : kvpn_max_threads_for(comm->world);
    if (way == kvpn_by_pipeline) {
        const uint32_t with_slots = comm->block_slots / kvpn_pipeline_packs / 32 * 32;
        *threads = with_slots < (uint32_t)kvpn_pipeline_threads ? with_slots : (uint32_t)kvpn_pipeline_threads;
        *blocks = (p->slice_packs + *threads - 1) / *threads;
        *blocks = *blocks < comm->blocks ? *blocks : comm->blocks;
        p->block_packs = *blocks * *threads;
        return;
    }
    for (*threads = 128; 2 * *threads <= most && p->slice_packs > comm->blocks * *threads;)
        *threads *= 2;
    *blocks = (p->slice_packs + *threads - 1) / *threads;
    *blocks = group || *blocks > comm->blocks ? comm->blocks : *blocks < least ? least : *blocks;
    p->block_packs = ((p->slice_packs + *blocks - 1) / *blocks + 7) / 8 * 8;
    *blocks = (p->slice_packs + p->block_packs - 1) / p->block_packs;
    if (group)
        for (*threads = 32; *threads < kvpn_max_threads_of_role(comm, way) && group * *threads < p->block_packs;)
            *threads += 32;
}

static kvprim_status kvpn_launch_kernel(const kvpn_call *c, const void *kernel, uint32_t blocks, uint32_t cluster,
                                        dim3 threads, void *params)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    void *args[] = {params};
    config.gridDim = dim3(blocks), config.blockDim = threads, config.stream = c->stream, config.attrs = attributes;
    if (c->comm->pdl && (c->comm->after_nccl & kvpn_after_nccl_bit(c)) == 0) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1)
        kvpn_set_cluster(&attributes[config.numAttrs++], cluster);
    KVPRIM_TRY(kvpn_cuda_status(c->function, "kernel launch", cudaLaunchKernelExC(&config, kernel, args)));
    c->comm->after_nccl &= ~kvpn_after_nccl_bit(c);
    return KVPRIM_OK;
}

/* What depends on the communicator alone: where its ranks and their slots are, and how long to wait for them. */
static void kvpn_set_ranks(const kvprim_comm *comm, kvpn_params *p)
{
    for (int r = 0; r < comm->world; r++) /* from this rank on, so that ranks do not all send to the same one first */
        p->peer[r] = (char *)comm->peer[(comm->rank + r) % comm->world] + kvpn_page;
    p->turn = (uint32_t *)comm->peer[comm->rank], p->stop = comm->stop_on_gpu;
    p->timeout_ns = (uint64_t)comm->timeout_ms * 1000000;
    p->rank = (uint32_t)comm->rank, p->world = (uint32_t)comm->world, p->trigger = (uint32_t)comm->trigger;
    p->block_bytes = 16 * comm->block_slots, p->sender_bytes = comm->blocks * p->block_bytes;
    p->area_bytes = p->world * p->sender_bytes, p->turn_bytes = 2 * p->area_bytes;
}

/* Reduces in one launch, or in several if it is larger than the slots; or gathers few bytes (kvpn_by_gather). */
static kvprim_status kvpn_launch_packs(const kvpn_call *c, kvpn_way way)
{
    static const uint32_t ops[] = {kvpn_sums, kvpn_takes_largest, 0, kvpn_takes_least, kvpn_averages};
    const kvprim_comm *const comm = c->comm;
    const size_t all = c->count * c->element, most = kvpn_capacity_bytes(comm, way);
    const size_t pack = way == kvpn_by_gather ? 8 : 16;
    const kvprim_dtype type = c->op_or_peer == KVPRIM_SUM ? c->dtype : KVPRIM_U8; /* see kvpn_pick */
    kvpn_params p = {};
    kvpn_set_ranks(comm, &p);
    p.what = ops[c->op_or_peer] | kvpn_type_of(c->dtype).own | (way == kvpn_by_two_shot ? kvpn_shares : 0);
    p.signs = c->element == 1 ? 0x80808080u : c->element == 2 ? 0x80008000u : 0x80000000u;
    p.per_rank = 1.0 / comm->world;
    p.pitch = c->kind == kvpn_reduce_scatter || way == kvpn_by_gather ? all : 0;
    for (size_t at = 0; at < all; at += most) {
        uint32_t blocks, threads;
        p.send = (const char *)c->send + at, p.recv = (char *)c->recv + at;
        p.count = all - at < most ? all - at : most;
        p.packs = (uint32_t)((p.count + pack - 1) / pack);
        p.slice_packs = way == kvpn_by_two_shot ? (p.packs + p.world - 1) / p.world : p.packs;
        kvpn_set_grid(comm, &p, way, &blocks, &threads);
        const bool whole = ((uintptr_t)p.send | (uintptr_t)p.recv | p.pitch | p.count) % pack == 0;
        KVPRIM_TRY(kvpn_launch_kernel(c, kvpn_kernel_of(way, type, comm->world, whole), blocks, 1, dim3(threads), &p));
    }
    return KVPRIM_OK;
}

#ifndef KVPRIM_NO_EXCHANGE
/* At most `most` bytes, from byte `at` on, of a part of `bytes` that begins at `begin` of a tensor. */
static kvpn_part kvpn_piece_of(const void *tensor, size_t begin, size_t bytes, size_t at, size_t most)
{
    kvpn_part piece;
    piece.at = kvpn_byte_at(tensor, begin + (at < bytes ? at : bytes));
    piece.bytes = (uint32_t)(at >= bytes ? 0 : bytes - at < most ? bytes - at : most);
    return piece;
}

/* The pieces of all parts from byte `at` on, of so many bytes; of the part that stays on the rank, from own_at on.
   Returns whether they take whole packs of so many bytes. */
static bool kvpn_set_parts(const kvpn_call *c, size_t at, size_t most, size_t own_at, size_t own_most, size_t pack,
                           kvpn_parts_params *p)
{
    const int world = c->comm->world, rank = c->comm->rank;
    const size_t element = c->element;
    uint64_t all = 0;
    for (int k = 0; k < world; k++) {
        const int peer = (rank + k) % world;
        const size_t first = k ? at : own_at, up_to = k ? most : own_most;
        const kvpn_part to = kvpn_piece_of(c->send, kvpn_part_begin(c, peer, true) * element,
                                           kvpn_part_count(c, rank, peer) * element, first, up_to),
                        from = kvpn_piece_of(c->recv, kvpn_part_begin(c, peer, false) * element,
                                             kvpn_part_count(c, peer, rank) * element, first, up_to);
        p->parts[k].to = to, p->parts[k].from = from;
        all |= to.bytes | from.bytes | (to.bytes ? (uintptr_t)to.at : 0) | (from.bytes ? (uintptr_t)from.at : 0);
    }
    return all % pack == 0;
}

enum { kvpn_most_of_own = 1 << 30 }; /* bytes that stay on a rank, in a launch: a part's bytes are 32 bits */

/* In as many chunks as the largest part takes, also where this rank's parts are smaller. What stays on the rank is
   copied by all chunks alike; kvpn_by_parts copies it pack by pack, in its only chunk (see kvpn_choose_parts). */
static kvprim_status kvpn_launch_parts(const kvpn_call *c, kvpn_way way)
{
    const kvprim_comm *const comm = c->comm;
    const size_t unit = way == kvpn_by_parts ? 8 : 16, capacity = kvpn_capacity_bytes(comm, way);
    const kvpn_extent e = kvpn_extent_of(c);
    const size_t of_slots = e.largest <= capacity ? 1 : (e.largest + capacity - 1) / capacity,
                 of_own = e.own / kvpn_most_of_own + 1;
    const size_t chunks = of_slots > of_own ? of_slots : of_own,
                 own_step = (e.own + 128 * chunks - 1) / (128 * chunks) * 128,
                 own = own_step < e.own ? own_step : e.own;
    kvpn_parts_params p = {};
    kvpn_set_ranks(comm, &p);
    for (size_t n = 0; n < chunks; n++) {
        const bool whole = kvpn_set_parts(c, n * capacity, capacity, n * own_step, own_step, unit, &p);
        const size_t left = n < of_slots ? e.largest - n * capacity : 0, most = left > own ? left : own;
        uint32_t threads;
        p.slice_packs = (uint32_t)(((most < capacity ? most : capacity) + unit - 1) / unit);
        kvpn_set_grid(comm, &p, way, &p.blocks, &threads);
        KVPRIM_TRY(kvpn_launch_kernel(c, kvpn_kernel_of(way, c->dtype, comm->world, whole), p.blocks, 1,
                                      dim3(threads, kvpn_roles_of(way, comm->world)), &p));
    }
    return KVPRIM_OK;
}
#endif

#ifndef KVPRIM_NO_NORM
/* >>impl_launch_norm -- the same of the norm's kernels */

/* All take a checked description with its defaults, and at least one token. c: function, comm, stream. */
static kvpn_norm_params kvpn_make_norm_params(const kvprim_norm_desc *d)
{
    kvpn_norm_params p = {};
    p.tokens = (uint32_t)d->tokens, p.row_packs = (uint32_t)(d->hidden / 8);
    p.send = d->send, p.send_stride = 2 * d->send_stride;
    p.residual = (const char *)d->residual, p.residual_stride = 2 * d->residual_stride;
    p.weight = (const char *)d->weight;
    p.sum = (char *)d->sum, p.sum_stride = 2 * d->sum_stride;
    p.residual_out = (char *)d->residual_out, p.residual_out_stride = 2 * d->residual_out_stride;
    p.out = (char *)d->out, p.out_stride = 2 * d->out_stride;
    p.quantised = (char *)d->quantised, p.quantised_stride = d->quantised_stride;
    p.scale = d->scale, p.scale_min = d->scale_min;
    p.part_of_hidden = 1.0f / (float)d->hidden, p.eps = d->eps, p.weight_plus_one = (uint32_t)d->weight_plus_one;
    p.scales = d->scale_per_token                ? kvpn_of_token
               : !d->scale_group                 ? kvpn_of_tensor
               : d->scale_dtype == KVPRIM_F8E8M0 ? kvpn_of_exponents
               : d->scale_power_of_two           ? kvpn_of_powers
                                                 : kvpn_of_groups;
    p.scale_stride = 4 * d->scale_stride, p.scale_group_stride = 4 * d->scale_group_stride;
    return p;
}

/* Threads of each block, if 2^share_bits of them share a token. */
static uint32_t kvpn_few_threads(uint32_t row_packs, uint32_t share_bits)
{
    const uint32_t per_warp = (uint32_t)kvpn_norm_lanes << share_bits;
    return (row_packs + per_warp - 1) / per_warp * kvpn_norm_lanes;
}

/* How many blocks share a token (a power of two): one with enough threads, or as many as there are. Each has a pack. */
static uint32_t kvpn_few_share_bits(const kvprim_comm *comm, uint32_t row_packs, int64_t tokens)
{
    uint32_t bits = 0;
    if (!comm->clusters || row_packs <= kvpn_max_threads_for(comm->world))
        return 0;
    while (bits < (uint32_t)kvpn_few_max_share_bits && 2u << bits <= comm->blocks &&
           ((2u << bits) - 1) * kvpn_few_threads(row_packs, bits + 1) < row_packs &&
           (kvpn_few_threads(row_packs, bits) > kvpn_max_threads_for(comm->world) ||
            tokens <= (int64_t)(comm->blocks >> (bits + 1))))
        bits++;
    return bits;
}

/* Up to how many tokens kvpn_few_kernel takes in one launch: as many as have slots; 0: a token needs more threads. */
static int64_t kvpn_few_most_tokens(const kvprim_comm *comm, uint32_t row_packs)
{
    const uint32_t bits = kvpn_few_share_bits(comm, row_packs, comm->blocks),
                   threads = kvpn_few_threads(row_packs, bits);
    return threads > kvpn_max_threads_for(comm->world)
               ? 0
               : (int64_t)(comm->blocks >> bits) * (comm->block_slots / threads);
}

/* What kvpn_few_kernel does for at most kvpn_few_most_tokens, by so many blocks whose rows have so many threads. */
static kvpn_norm_params kvpn_make_few_params(const kvprim_comm *comm, const kvprim_norm_desc *d, uint32_t *blocks,
                                             uint32_t *threads)
{
    kvpn_norm_params p = kvpn_make_norm_params(d);
    p.share_bits = kvpn_few_share_bits(comm, p.row_packs, d->tokens);
    *threads = kvpn_few_threads(p.row_packs, p.share_bits);
    const uint32_t clusters = comm->blocks >> p.share_bits,
                   fit = p.share_bits ? 1 : kvpn_max_threads_for(comm->world) / *threads,
                   rows = fit < kvpn_norm_max_rows ? fit : (uint32_t)kvpn_norm_max_rows;
    p.block_packs = (p.tokens + clusters - 1) / clusters;
    p.rows = p.block_packs < rows ? p.block_packs : rows;
    *blocks = (p.tokens + p.block_packs - 1) / p.block_packs << p.share_bits;
    return p;
}

static kvprim_status kvpn_launch_few(const kvpn_call *c, const kvprim_norm_desc *d)
{
    uint32_t blocks, threads;
    kvpn_norm_params p = kvpn_make_few_params(c->comm, d, &blocks, &threads);
    kvpn_set_ranks(c->comm, &p);
    return kvpn_launch_kernel(c, kvpn_pick_norm(d->dtype, c->comm->world, kvpn_few_form_of(&p)), blocks,
                              1u << p.share_bits, dim3(threads, p.rows), &p);
}

/* All that follows the sum, which is d->send. */
static kvprim_status kvpn_launch_norm_alone(const kvpn_call *c, const kvprim_norm_desc *d)
{
    const uint32_t row_packs = (uint32_t)(d->hidden / 8), most = kvpn_norm_is<kvpn_norm_alone>::packs;
    kvpn_norm_params p = kvpn_make_norm_params(d);
    p.trigger = (uint32_t)c->comm->trigger;
    return kvpn_launch_kernel(c, kvpn_pick_norm(d->dtype, c->comm->world, kvpn_norm_alone), p.tokens, 1,
                              dim3(kvpn_few_threads((row_packs + most - 1) / most, 0)), &p);
}
#endif
#endif

/* >>impl_nccl -- collectives by NCCL */

/* Whether NCCL may take its symmetric kernels: both tensors lie in this library's window, or may lie in a caller's. */
static bool kvpn_may_use_window(const kvpn_call *c)
{
    const uintptr_t buffer = (uintptr_t)c->comm->buffer, bytes = c->comm->buffer_bytes;
    return c->comm->in_windows && c->kind <= kvpn_all_gather &&
           (c->comm->nccl_borrowed || ((uintptr_t)c->send - buffer < bytes && (uintptr_t)c->recv - buffer < bytes));
}

static const char kvpn_in_group[] = "ncclSend and ncclRecv in a group";

/* Closes a group of NCCL's, also after a call in it failed. */
static ncclResult_t kvpn_end_nccl_group(const kvpn_call *c, ncclResult_t result)
{
    const ncclResult_t ended = kvpn_wait_for_nccl(c->comm->nccl, ncclGroupEnd(), &c->comm->state, kvpn_alive);
    return result == ncclSuccess ? ended : result;
}

/* Inside a window, NCCL 2.28.9 sums tensors wrongly that are not aligned to 16 bytes (reduce_scatter of 7 bf16, where
   rank 1's part begins at byte 14; all_reduce of fp8 from byte 1). ncclReduce has no symmetric kernels, so it reduces
   every part by itself, or everything to rank 0, and a broadcast follows. */
static ncclResult_t kvpn_reduce_misaligned(const kvpn_call *c)
{
    const ncclRedOp_t op = kvpn_ops[c->op_or_peer];
    const ncclComm_t nccl = c->comm->nccl;
    const size_t part = c->kind == kvpn_reduce_scatter ? c->count * c->element : 0;
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < (part ? c->comm->world : 1) && result == ncclSuccess; r++)
        result =
            ncclReduce((const char *)c->send + (size_t)r * part, c->recv, c->count, c->type, op, r, nccl, c->stream);
    result = kvpn_end_nccl_group(c, result);
    if (result == ncclSuccess && !part)
        result = ncclBroadcast(c->recv, c->recv, c->count, c->type, 0, nccl, c->stream);
    return result;
}

/* As bytes, so that a type needs no version of NCCL's. all_gatherv, too: from 256 KB on a broadcast of each part takes
   1.2 to 1.7 times as long (2 H200s). */
static ncclResult_t kvpn_exchange_parts(const kvpn_call *c)
{
    const ncclComm_t nccl = c->comm->nccl;
    char *send = (char *)(uintptr_t)c->send, *recv = (char *)c->recv;
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < c->comm->world && result == ncclSuccess; r++) {
        const size_t sent = kvpn_part_count(c, c->comm->rank, r) * c->element,
                     received = kvpn_part_count(c, r, c->comm->rank) * c->element;
        const bool stays = r == c->comm->rank && send == recv; /* an all_gatherv in place */
        if (sent > 0 && !stays)
            result = ncclSend(send, sent, ncclUint8, r, nccl, c->stream);
        if (received > 0 && !stays && result == ncclSuccess)
            result = ncclRecv(recv, received, ncclUint8, r, nccl, c->stream);
        send = kvpn_byte_at(send, c->kind == kvpn_all_gatherv ? 0 : sent), recv = kvpn_byte_at(recv, received);
    }
    return kvpn_end_nccl_group(c, result);
}

/* Enqueues the calls of the communicator's open group. Of c, only comm and stream are used. */
static ncclResult_t kvpn_enqueue_group(const kvpn_call *c)
{
    const kvpn_open_group *const group = &c->comm->teardown->group;
    const ncclComm_t nccl = c->comm->nccl;
    ncclResult_t result = ncclGroupStart();
    for (int k = 0; k < group->calls_count && result == ncclSuccess; k++) {
        const kvpn_group_call g = group->calls[k];
        result = g.receives ? ncclRecv(g.memory, g.count, g.type, g.peer, nccl, c->stream)
                            : ncclSend(g.memory, g.count, g.type, g.peer, nccl, c->stream);
    }
    return kvpn_end_nccl_group(c, result);
}

static ncclResult_t kvpn_enqueue_nccl(const kvpn_call *c)
{
    const ncclComm_t nccl = c->comm->nccl;
    const uintptr_t places = (uintptr_t)c->send | (uintptr_t)c->recv,
                    parts = c->kind == kvpn_reduce_scatter ? c->count * c->element : 0;
    if (c->kind <= kvpn_reduce_scatter && (places | parts) % 16 != 0 && kvpn_may_use_window(c))
        return kvpn_reduce_misaligned(c);
    if (kvpn_has_parts(c->kind) && c->kind != kvpn_all_gather)
        return kvpn_exchange_parts(c);
    switch (c->kind) {
    case kvpn_all_reduce:
        return ncclAllReduce(c->send, c->recv, c->count, c->type, kvpn_ops[c->op_or_peer], nccl, c->stream);
    case kvpn_reduce_scatter:
        return ncclReduceScatter(c->send, c->recv, c->count, c->type, kvpn_ops[c->op_or_peer], nccl, c->stream);
    case kvpn_all_gather:
        return ncclAllGather(c->send, c->recv, c->count, c->type, nccl, c->stream);
    case kvpn_broadcast:
        return ncclBroadcast(c->recv, c->recv, c->count, c->type, c->op_or_peer, nccl, c->stream);
    case kvpn_send:
        return ncclSend(c->send, c->count, c->type, c->op_or_peer, nccl, c->stream);
    default:
        return ncclRecv(c->recv, c->count, c->type, c->op_or_peer, nccl, c->stream);
    }
}

/* What it enqueues gets a deadline, unless a graph runs it later. NCCL connects ranks at the first call that needs
   them. CUDA forbids that while this thread captures, or another one in the global mode, except in the relaxed mode. */
static kvprim_status kvpn_enqueue_watched(const kvpn_call *c, const char *name,
                                          ncclResult_t (*enqueue)(const kvpn_call *))
{
    kvprim_comm *const comm = c->comm;
    comm->after_nccl |= kvpn_after_nccl_bit(c);
    const enum cudaStreamCaptureMode mode = kvpn_set_capture_mode(cudaStreamCaptureModeRelaxed);
    const ncclResult_t result = kvpn_wait_for_nccl(comm->nccl, enqueue(c), &comm->state, kvpn_alive);
    (void)kvpn_set_capture_mode(mode); /* to change it twice takes 80 ns */
    KVPRIM_TRY(kvpn_nccl_status(c->function, name, result));
    if (!c->captured)
        kvpn_record_watch_event(comm, c->stream);
    else
        KVPRIM_NCCL_STORE(&comm->teardown->in_graphs, 1);
    return KVPRIM_OK;
}

/* After a memset NCCL's symmetric kernel cannot start early: only a kernel lets its successor do so. */
static kvprim_status kvpn_run_nccl(const kvpn_call *c)
{
    static const char *const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                        kvpn_in_group,   kvpn_in_group,       kvpn_in_group,
                                        "ncclBroadcast", "ncclSend",          "ncclRecv"};
    const char *const f = c->function;
    kvprim_comm *const comm = c->comm;
    KVPRIM_REFUSE(c->dtype >= KVPRIM_F8E4M3 && c->kind <= kvpn_reduce_scatter && !comm->nccl_reduces_f8, UNSUPPORTED,
                  "%s: dtype is %s, which NCCL reduces from 2.24 on, if all GPUs have compute capability 9.0; "
                  "this is %d",
                  f, kvpn_type_of(c->dtype).name, comm->nccl_version);
    if (comm->nccl_starts_early && kvpn_may_use_window(c))
        KVPRIM_NCCL_TRY_CUDA(cudaMemsetAsync(comm->scratch, 0, 4, c->stream));
    return kvpn_enqueue_watched(c, names[c->kind], kvpn_enqueue_nccl);
}

/* >>impl_group -----------------------------------------------------------------------------------------------------

   Calls are kept here, not in a group of NCCL's that is open meanwhile. NCCL's groups belong to the thread, cannot be
   dropped, and may not see their communicator end: an abort would leave one that crashes when it is closed. */

static kvprim_status kvpn_add_to_group(kvpn_open_group *group, kvpn_call *c)
{
    KVPRIM_REFUSE(c->kind < kvpn_send, ARGUMENT, "%s: a group is open, which takes only kvprim_send and kvprim_recv",
                  c->function);
    if (c->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpn_check_call(c));
    KVPRIM_REFUSE(group->calls_count > 0 && c->stream != group->stream, ARGUMENT,
                  "%s: stream is %p, but the group's earlier calls are on %p", c->function, (void *)c->stream,
                  (void *)group->stream);
    KVPRIM_REFUSE(group->calls_count == group->calls_max, SIZE, "%s: the group has %d calls already, and takes no more",
                  c->function, group->calls_count);
    const bool receives = c->kind == kvpn_recv;
    const kvpn_group_call kept = {receives ? c->recv : (void *)(uintptr_t)c->send, c->count, c->type, c->op_or_peer,
                                  receives};
    group->calls[group->calls_count++] = kept, group->stream = c->stream;
    return KVPRIM_OK;
}

/* The stream, the device and the state may have changed since the calls were made. */
static kvprim_status kvpn_run_group(const char *f, kvprim_comm *comm)
{
    const kvpn_open_group *const group = &comm->teardown->group;
    kvpn_call c = kvpn_make_call(kvpn_send, f, comm, group->stream);
    KVPRIM_REFUSE(!group->open, ARGUMENT, "%s: no group is open", f);
    if (group->failed != KVPRIM_OK)
        return kvprim_fail(group->failed, "%s: a call of the group failed, so nothing of it was enqueued", f);
    if (group->calls_count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpn_check_device(&c));
    KVPRIM_TRY(kvpn_check_stop(f, comm));
    return kvpn_enqueue_watched(&c, kvpn_in_group, kvpn_enqueue_group);
}

KVPRIM_API kvprim_status kvprim_group_start(kvprim_comm *comm)
{
    KVPRIM_TRY(kvpn_enter_alive(__func__, comm));
    kvpn_open_group *const group = &comm->teardown->group;
    const bool nested = group->open != 0;
    if (!nested)
        group->open = 1, group->calls_count = 0, group->failed = KVPRIM_OK;
    kvpn_leave(comm);
    return nested ? kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: a group is open already: groups do not nest", __func__)
                  : KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_group_end(kvprim_comm *comm)
{
    KVPRIM_RANGE(__func__);
    KVPRIM_TRY(kvpn_enter_alive(__func__, comm));
    const kvprim_status s = kvpn_run_group(__func__, comm);
    comm->teardown->group.open = 0;
    kvpn_leave(comm);
    return s;
}

/* >>impl_collective -- the public collectives */

static kvprim_status kvpn_run_call(kvpn_call *c)
{
    if (c->kind == kvpn_all_gatherv || c->kind == kvpn_all_to_allv)
        KVPRIM_TRY(kvpn_check_counts(c));
    if (c->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpn_check_call(c));
#ifdef KVPRIM_NCCL_KERNELS
    const kvpn_way way = kvpn_way_of(c);
#ifndef KVPRIM_NO_EXCHANGE
    if (way > kvpn_by_gather)
        return kvpn_launch_parts(c, way);
#endif
    if (way != kvpn_by_nccl)
        return kvpn_launch_packs(c, way);
#endif
    return kvpn_run_nccl(c);
}

static kvprim_status kvpn_run_or_keep(kvpn_call *c, kvprim_status (*run)(kvpn_call *))
{
    KVPRIM_TRY(kvpn_enter_alive(c->function, c->comm));
    kvpn_open_group *const group = &c->comm->teardown->group;
    const kvprim_status s = group->open ? kvpn_add_to_group(group, c) : run(c);
    group->failed = group->open && group->failed == KVPRIM_OK ? s : group->failed;
    kvpn_leave(c->comm);
    return s;
}

static kvprim_status kvpn_collective(kvpn_kind kind, const char *function, kvprim_comm *comm, void *recv,
                                     const void *send, size_t count, const size_t *counts, kvprim_dtype dtype,
                                     int op_or_peer, cudaStream_t stream)
{
    KVPRIM_RANGE(function);
    kvpn_call c = kvpn_make_call(kind, function, comm, stream);
    c.recv = recv, c.send = send, c.count = count, c.counts = counts, c.dtype = dtype, c.op_or_peer = op_or_peer;
    return kvpn_run_or_keep(&c, kvpn_run_call);
}

KVPRIM_API kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count,
                                           kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_all_reduce, __func__, comm, recv, send, count, NULL, dtype, (int)op, stream);
}

KVPRIM_API kvprim_status kvprim_all_gather(kvprim_comm *comm, void *recv, const void *send, size_t send_count,
                                           kvprim_dtype dtype, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_all_gather, __func__, comm, recv, send, send_count, NULL, dtype, 0, stream);
}

KVPRIM_API kvprim_status kvprim_all_gatherv(kvprim_comm *comm, void *recv, const void *send, const size_t *counts,
                                            kvprim_dtype dtype, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_all_gatherv, __func__, comm, recv, send, 0, counts, dtype, 0, stream);
}

KVPRIM_API kvprim_status kvprim_all_to_all(kvprim_comm *comm, void *recv, const void *send, size_t part_count,
                                           kvprim_dtype dtype, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_all_to_all, __func__, comm, recv, send, part_count, NULL, dtype, 0, stream);
}

KVPRIM_API kvprim_status kvprim_all_to_allv(kvprim_comm *comm, void *recv, const void *send, const size_t *counts,
                                            kvprim_dtype dtype, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_all_to_allv, __func__, comm, recv, send, 0, counts, dtype, 0, stream);
}

KVPRIM_API kvprim_status kvprim_reduce_scatter(kvprim_comm *comm, void *recv, const void *send, size_t recv_count,
                                               kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_reduce_scatter, __func__, comm, recv, send, recv_count, NULL, dtype, (int)op, stream);
}

KVPRIM_API kvprim_status kvprim_broadcast(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t root,
                                          struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_broadcast, __func__, comm, buf, NULL, count, NULL, dtype, root, stream);
}

KVPRIM_API kvprim_status kvprim_send(kvprim_comm *comm, const void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_send, __func__, comm, NULL, buf, count, NULL, dtype, peer, stream);
}

KVPRIM_API kvprim_status kvprim_recv(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream)
{
    return kvpn_collective(kvpn_recv, __func__, comm, buf, NULL, count, NULL, dtype, peer, stream);
}

/* >>impl_norm_call -------------------------------------------------------------------------------------------------

   Arguments of kvprim_all_reduce_norm and of its twin on the host, whose addends are several tensors. */

/* Rows of `columns` elements; stride: the description's. is: what kind of tensor, of those below; may_be: the kinds of
   inputs whose place this output may take. */
typedef struct kvpn_norm_tensor {
    const char *name;
    const void *data; /* NULL: there is none */
    int64_t stride, rows, columns;
    uint32_t element, alignment, is, may_be;
} kvpn_norm_tensor;

enum { kvpn_norm_input = 0, kvpn_norm_send = 1, kvpn_norm_residual = 2, kvpn_norm_output = 4 };
enum { kvpn_norm_tensors = 7 }; /* without the addends */

/* Words of scales that lie one after another in a token: of a group, or of four. */
static int64_t kvpn_norm_words(const kvprim_norm_desc *d)
{
    const int64_t groups = d->hidden / (d->scale_group ? d->scale_group : d->hidden);
    return d->scale_dtype == KVPRIM_F8E8M0 ? (groups + 3) / 4 : groups;
}

static int64_t kvpn_norm_group_stride(const kvprim_norm_desc *d)
{
    return d->scale_group_stride ? d->scale_group_stride : 1;
}

static int64_t kvpn_norm_scale_stride(const kvprim_norm_desc *d)
{
    return d->scale_stride ? d->scale_stride : kvpn_norm_words(d) * kvpn_norm_group_stride(d);
}

static kvprim_status kvpn_check_norm_fields(const char *f, const kvprim_norm_desc *d)
{
    const uint32_t least = kvpi_bits_of(d->scale_min);
    KVPRIM_REFUSE(d->dtype != KVPRIM_F16 && d->dtype != KVPRIM_BF16, ARGUMENT,
                  "%s: desc->dtype is %d, must be KVPRIM_F16 or KVPRIM_BF16", f, (int)d->dtype);
    KVPRIM_REFUSE((kvpi_bits_of(d->eps) & 0x7fffffff) >= 0x7f800000 || d->eps < 0, ARGUMENT,
                  "%s: desc->eps is %g, must be finite and at least 0", f, (double)d->eps);
    KVPRIM_REFUSE(d->tokens < 0, SIZE, "%s: desc->tokens is %lld, must be at least 0", f, (long long)d->tokens);
    KVPRIM_REFUSE(d->hidden < 8 || d->hidden > kvpn_max_hidden || d->hidden % 8, SIZE,
                  "%s: desc->hidden is %lld, must be a multiple of 8, from 8 to %d", f, (long long)d->hidden,
                  (int)kvpn_max_hidden);
    KVPRIM_REFUSE(least != 0 && (least < 0x00800000 || least > 0x7f000000), ARGUMENT,
                  "%s: desc->scale_min is %g, neither 0 nor from 2^-126 to 2^127", f, (double)d->scale_min);
    const struct {
        const char *name;
        int64_t value, max;
    } fields[] = {{"scale_per_token", d->scale_per_token, 1},
                  {"weight_plus_one", d->weight_plus_one, 1},
                  {"scale_power_of_two", d->scale_power_of_two, 1},
                  {"reserved", d->reserved, 0}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        KVPRIM_REFUSE(fields[i].value < 0 || fields[i].value > fields[i].max, ARGUMENT,
                      "%s: desc->%s is %lld, must be %s", f, fields[i].name, (long long)fields[i].value,
                      fields[i].max ? "0 or 1" : "0");
    return KVPRIM_OK;
}

/* Scales of groups lie in rows of tokens, or in columns. */
static kvprim_status kvpn_check_norm_groups(const char *f, const kvprim_norm_desc *d)
{
    KVPRIM_REFUSE(d->scale_group != 0 && d->scale_group != kvpn_norm_group, ARGUMENT,
                  "%s: desc->scale_group is %d, must be 0 or 128", f, d->scale_group);
    KVPRIM_REFUSE(d->scale_group && d->scale_per_token, ARGUMENT,
                  "%s: desc->scale_group and scale_per_token are both set", f);
    if (!d->scale_group && (d->scale_stride || d->scale_group_stride || d->scale_power_of_two || d->scale_dtype))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->%s is set, but desc->scale_group is 0", f,
                           d->scale_stride         ? "scale_stride"
                           : d->scale_group_stride ? "scale_group_stride"
                           : d->scale_power_of_two ? "scale_power_of_two"
                                                   : "scale_dtype");
    if (!d->scale_group)
        return KVPRIM_OK;
    KVPRIM_REFUSE(d->scale_dtype != 0 && d->scale_dtype != KVPRIM_F32 && d->scale_dtype != KVPRIM_F8E8M0, ARGUMENT,
                  "%s: desc->scale_dtype is %d, must be KVPRIM_F32 or KVPRIM_F8E8M0", f, (int)d->scale_dtype);
    KVPRIM_REFUSE(d->hidden % d->scale_group, SIZE, "%s: desc->hidden is %lld, must be a multiple of scale_group, %d",
                  f, (long long)d->hidden, d->scale_group);
    const int64_t most = (int64_t)1 << 46; /* so that sums of products with tokens and groups stay below 2^63 */
    const int64_t words = kvpn_norm_words(d), tokens = d->tokens > 0 ? d->tokens : 1, step = d->scale_group_stride;
    KVPRIM_REFUSE(step < 0 || step > most / words || d->scale_stride < 0 || kvpn_norm_scale_stride(d) > most / tokens,
                  SIZE,
                  "%s: desc->scale_stride is %lld and scale_group_stride %lld, less than 0 or too large for "
                  "%lld tokens",
                  f, (long long)d->scale_stride, (long long)step, (long long)d->tokens);
    const int64_t s = kvpn_norm_scale_stride(d), g = kvpn_norm_group_stride(d);
    KVPRIM_REFUSE(tokens > 1 && words > 1 && s <= (words - 1) * g && g <= (tokens - 1) * s, SIZE,
                  "%s: scales of %lld tokens, %lld words each, lie in each other: scale_stride is %lld and "
                  "scale_group_stride %lld",
                  f, (long long)tokens, (long long)words, (long long)s, (long long)g);
    return KVPRIM_OK;
}

/* >>impl_norm_check -- which tensors there must be, if there are tokens. */
static kvprim_status kvpn_check_norm_outputs(const char *f, const kvprim_norm_desc *d)
{
    KVPRIM_REFUSE(!d->weight, NULL, "%s: desc->weight is NULL", f);
    KVPRIM_REFUSE(!d->out && !d->quantised, NULL, "%s: desc->out and desc->quantised are NULL", f);
    KVPRIM_REFUSE(d->quantised && !d->scale, NULL, "%s: desc->scale is NULL, but desc->quantised is set", f);
    KVPRIM_REFUSE(!d->quantised && (d->scale || d->scale_per_token || d->scale_group || d->scale_min > 0), ARGUMENT,
                  "%s: desc->%s is set, but desc->quantised is NULL", f,
                  d->scale             ? "scale"
                  : d->scale_per_token ? "scale_per_token"
                  : d->scale_group     ? "scale_group"
                                       : "scale_min");
    return KVPRIM_OK;
}

static uint64_t kvpn_norm_step(const kvpn_norm_tensor *t)
{
    return (uint64_t)(t->stride ? t->stride : t->columns) * t->element;
}

/* Device memory is read and written 16 bytes at a time, the host's by elements. */
static kvprim_status kvpn_check_norm_tensor(const char *f, const kvpn_norm_tensor *t, bool on_host)
{
    const uint32_t alignment = on_host ? t->element : t->alignment;
    if (!t->data)
        return KVPRIM_OK;
    KVPRIM_REFUSE(t->stride && (t->stride < t->columns || t->stride % 8), SIZE,
                  "%s: the stride of %s is %lld, must be a multiple of 8 and at least desc->hidden, %lld", f, t->name,
                  (long long)t->stride, (long long)t->columns);
    KVPRIM_REFUSE((uintptr_t)t->data % alignment, ARGUMENT, "%s: %s is %p, not aligned to %u bytes", f, t->name,
                  (void *)(uintptr_t)t->data, (unsigned)alignment);
    const uint64_t row = (uint64_t)t->columns * t->element, left = UINTPTR_MAX - (uintptr_t)t->data;
    KVPRIM_REFUSE(row > left || (uint64_t)(t->rows - 1) > (left - row) / kvpn_norm_step(t), SIZE,
                  "%s: %s is %p and has %lld rows of %llu bytes: past the end of memory", f, t->name,
                  (void *)(uintptr_t)t->data, (long long)t->rows, (unsigned long long)row);
    return KVPRIM_OK;
}

/* An output and another tensor must be apart, or at the same place where that is allowed. They are apart also if the
   rows of each lie in the gaps of the other, with the same stride. */
static kvprim_status kvpn_check_norm_overlap(const char *f, const kvpn_norm_tensor *output, const kvpn_norm_tensor *t)
{
    const uintptr_t a = (uintptr_t)output->data, b = (uintptr_t)t->data;
    const uint64_t step = kvpn_norm_step(output), other_step = kvpn_norm_step(t); /* 0, perhaps, if data is NULL */
    const uint64_t row_a = (uint64_t)output->columns * output->element, row_b = (uint64_t)t->columns * t->element;
    const uint64_t end_a = a + (uint64_t)(output->rows - 1) * step + row_a,
                   end_b = b + (uint64_t)(t->rows - 1) * other_step + row_b;
    const bool same_step = step == other_step || t->rows == 1, in_place = a == b && (output->may_be & t->is) != 0;
    if (a == 0 || b == 0 || end_a <= b || end_b <= a)
        return KVPRIM_OK;
    const uint64_t gap = (a > b ? a - b : b - a) % step;
    if (same_step && (in_place || (gap >= (a > b ? row_b : row_a) && step - gap >= (a > b ? row_a : row_b))))
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: %s, %p, and %s, %p, overlap%s", f, output->name, (void *)a, t->name,
                       (void *)b, in_place ? ": in place, their strides are the same" : "");
}

/* sends: of one rank, or, on the host, of all. */
static kvprim_status kvpn_check_norm(const char *f, const kvprim_norm_desc *d, const void *const *sends, int32_t world,
                                     bool on_host)
{
    KVPRIM_TRY(kvpn_check_norm_fields(f, d));
    KVPRIM_TRY(kvpn_check_norm_groups(f, d));
    if (d->tokens == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpn_check_norm_outputs(f, d));
    const bool writes_scales = d->scale_group || d->scale_per_token;
    const int64_t n = d->tokens, m = d->hidden, last_token = (writes_scales ? n - 1 : 0) * kvpn_norm_scale_stride(d);
    /* scales: words from the first one to the last */
    const int64_t scales = last_token + (kvpn_norm_words(d) - 1) * kvpn_norm_group_stride(d) + 1;
    const uint32_t in = kvpn_norm_input, out = kvpn_norm_output, any = kvpn_norm_send | kvpn_norm_residual;
    const kvpn_norm_tensor list[kvpn_norm_tensors] = {
        {"desc->residual", d->residual, d->residual_stride, n, m, 2, 16, kvpn_norm_residual, 0},
        {"desc->weight", d->weight, 0, 1, m, 2, 16, in, 0},
        {"desc->sum", d->sum, d->sum_stride, n, m, 2, 16, out, kvpn_norm_send},
        {"desc->residual_out", d->residual_out, d->residual_out_stride, n, m, 2, 16, out, any},
        {"desc->out", d->out, d->out_stride, n, m, 2, 16, out, any},
        {"desc->quantised", d->quantised, d->quantised_stride, n, m, 1, 8, out, 0},
        {"desc->scale", d->scale, 0, 1, scales, 4, 4, writes_scales ? out : in, 0}};
    for (int k = 0; k < kvpn_norm_tensors; k++)
        KVPRIM_TRY(kvpn_check_norm_tensor(f, &list[k], on_host));
    for (int k = 0; k < kvpn_norm_tensors; k++)
        for (int other = 0; other < kvpn_norm_tensors && list[k].is == out; other++)
            if (other > k || list[other].is != out)
                KVPRIM_TRY(kvpn_check_norm_overlap(f, &list[k], &list[other]));
    for (int32_t r = 0; r < world; r++) {
        char name[24];
        (void)snprintf(name, sizeof name, on_host ? "sends[%d]" : "desc->send", (int)r);
        const kvpn_norm_tensor addend = {name, sends[r], d->send_stride, n, m, 2, 16, kvpn_norm_send, 0};
        KVPRIM_REFUSE(!sends[r], NULL, "%s: %s is NULL", f, name);
        KVPRIM_TRY(kvpn_check_norm_tensor(f, &addend, on_host));
        for (int k = 0; k < kvpn_norm_tensors; k++)
            if (list[k].is == out)
                KVPRIM_TRY(kvpn_check_norm_overlap(f, &list[k], &addend));
    }
    return KVPRIM_OK;
}

static kvprim_norm_desc kvpn_complete_norm(const kvprim_norm_desc *desc)
{
    kvprim_norm_desc d = *desc;
    /* &d: send always counts, as on the host it stands for all ranks' */
    const void *const tensors[] = {&d, d.residual, d.sum, d.residual_out, d.out, d.quantised};
    int64_t *const strides[] = {&d.send_stride,         &d.residual_stride, &d.sum_stride,
                                &d.residual_out_stride, &d.out_stride,      &d.quantised_stride};
    for (int k = 0; k < 6; k++) /* one that is never used may be too large to multiply */
        *strides[k] = tensors[k] && d.tokens > 1 && *strides[k] ? *strides[k] : d.hidden;
    d.scale_min = d.scale_min > 0 ? d.scale_min : FLT_MIN;
    d.scale_stride = kvpn_norm_scale_stride(&d), d.scale_group_stride = kvpn_norm_group_stride(&d);
    return d;
}

#if defined(KVPRIM_NCCL_KERNELS) && !defined(KVPRIM_NO_NORM)
static void *kvpn_norm_row(const void *tensor, int64_t stride, int64_t token, size_t element)
{
    return tensor ? (char *)(uintptr_t)tensor + (size_t)(token * stride) * element : NULL;
}

static kvprim_norm_desc kvpn_norm_part(const kvprim_norm_desc *d, int64_t first, int64_t tokens)
{
    kvprim_norm_desc part = *d;
    part.tokens = tokens, part.send = kvpn_norm_row(d->send, d->send_stride, first, 2);
    part.residual = kvpn_norm_row(d->residual, d->residual_stride, first, 2);
    part.sum = kvpn_norm_row(d->sum, d->sum_stride, first, 2);
    part.residual_out = kvpn_norm_row(d->residual_out, d->residual_out_stride, first, 2);
    part.out = kvpn_norm_row(d->out, d->out_stride, first, 2);
    part.quantised = kvpn_norm_row(d->quantised, d->quantised_stride, first, 1);
    if (d->scale_per_token || d->scale_group)
        part.scale = (float *)kvpn_norm_row(d->scale, d->scale_stride, first, 4);
    return part;
}

/* The sum into memory of the communicator's, contiguous as sums are, then the norm. Outputs could not hold s on every
   rank: there may be none but `quantised`, and `out` may be the residual. */
static kvprim_status kvpn_sum_then_norm(const kvpn_call *c, const kvprim_norm_desc *d)
{
    const char *const f = c->function;
    const size_t row = (size_t)d->hidden * c->element, bytes = (size_t)d->tokens * row;
    kvpn_call sum = *c;
    kvprim_norm_desc rest = *d;
    sum.recv = c->comm->sums, sum.send = d->send, sum.count = bytes / c->element;
    rest.send = sum.recv, rest.send_stride = d->hidden;
    KVPRIM_REFUSE(!sum.recv, CUDA, "%s: kvprim_comm_init found no device memory for sums", f);
    if (d->send_stride != d->hidden) { /* CUDA takes a pitch below 2 GB */
        const size_t n = (size_t)d->tokens, step = (size_t)d->send_stride * c->element,
                     most = step <= INT32_MAX ? n : 1;
        for (size_t t = 0; t < n; t += most)
            KVPRIM_NCCL_TRY_CUDA(cudaMemcpy2DAsync((char *)sum.recv + t * row, row, (const char *)d->send + t * step,
                                                   most > 1 ? step : row, row, most, cudaMemcpyDeviceToDevice,
                                                   c->stream));
        sum.send = sum.recv;
    }
    if (c->comm->peer[0]) { /* whatever all_reduce_limit is */
        const kvpn_way way = kvpn_choose_sum(c->comm, false, bytes, d->dtype, KVPRIM_SUM);
        KVPRIM_TRY(kvpn_launch_packs(&sum, way == kvpn_by_nccl ? kvpn_by_two_shot : way));
    } else {
        KVPRIM_TRY(kvpn_run_nccl(&sum));
    }
    return kvpn_launch_norm_alone(c, &rest);
}

/* How a call goes, and up to how many tokens at a time. The same on every rank, whose outputs and strides may differ.

       one rank                                                              kvpn_launch_norm_alone
       own kernels are on, tokens are few                                    kvpn_launch_few
       the same, two ranks, a token fits a block: some after others          kvpn_launch_few
       otherwise                                                             kvpn_sum_then_norm

   Of two ranks, one shot sends no more than two shots do: 512 x 4,096 take 16.7 us by kvpn_launch_few, and 18.5 by a
   sum and a norm. Where clusters share a token, 128 x 16,384 take 20.2 us and 19.5 (H200). */
typedef kvprim_status (*kvpn_norm_way)(const kvpn_call *, const kvprim_norm_desc *);

static kvpn_norm_way kvpn_norm_way_of(const kvprim_comm *comm, const kvprim_norm_desc *d, int64_t *most)
{
    const uint32_t row_packs = (uint32_t)(d->hidden / 8);
    const int64_t in_limit = (int64_t)(kvpn_limits_of(comm).norm_one_shot / 16 / row_packs),
                  in_slots = comm->peer[0] ? kvpn_few_most_tokens(comm, row_packs) : 0;
    const bool of_any_size = comm->world == 2 && row_packs <= kvpn_max_threads_for(2);
    if (comm->world == 1)
        return *most = 1 << 20, kvpn_launch_norm_alone;
    if (in_slots > 0 && (of_any_size || (d->tokens <= in_slots && d->tokens <= in_limit)))
        return *most = in_slots, kvpn_launch_few;
    return *most = (int64_t)(kvpn_sums_bytes / 16 / row_packs), kvpn_sum_then_norm;
}

static kvprim_status kvpn_launch_norm_by(const kvpn_call *c, const kvprim_norm_desc *d, kvpn_norm_way way, int64_t most)
{
    for (int64_t first = 0; first < d->tokens; first += most) {
        const kvprim_norm_desc part = kvpn_norm_part(d, first, d->tokens - first < most ? d->tokens - first : most);
        KVPRIM_TRY(way(c, &part));
    }
    return KVPRIM_OK;
}
#endif

static kvprim_status kvpn_run_norm(kvpn_call *c)
{
    const char *const f = c->function;
    const kvprim_norm_desc *const desc = c->norm;
    KVPRIM_REFUSE(!desc, NULL, "%s: desc is NULL", f);
    KVPRIM_TRY(kvpn_check_norm(f, desc, &desc->send, 1, false));
    if (desc->tokens == 0)
        return KVPRIM_OK;
    const kvprim_norm_desc d = kvpn_complete_norm(desc);
    c->send = d.send, c->dtype = d.dtype, c->element = kvpn_type_of(d.dtype).bytes;
    c->type = (ncclDataType_t)kvpn_type_of(d.dtype).nccl, c->count = (size_t)(d.tokens * d.hidden);
    KVPRIM_TRY(kvpn_check_device(c));
    KVPRIM_TRY(kvpn_check_stop(f, c->comm));
#if defined(KVPRIM_NCCL_KERNELS) && !defined(KVPRIM_NO_NORM)
    int64_t most;
    const kvpn_norm_way way = kvpn_norm_way_of(c->comm, &d, &most);
    return kvpn_launch_norm_by(c, &d, way, most);
#else
    return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED,
                       "%s: there is no kernel for it: compile the implementation of kvprim_nccl.h with nvcc, without "
                       "KVPRIM_NO_NORM",
                       f);
#endif
}

KVPRIM_API kvprim_status kvprim_all_reduce_norm(kvprim_comm *comm, const kvprim_norm_desc *desc,
                                                struct CUstream_st *stream)
{
    kvpn_call c = kvpn_make_call(kvpn_all_reduce, "kvprim_all_reduce_norm", comm, stream); /* KVPRIM_SUM */
    KVPRIM_RANGE(c.function);
    c.norm = desc;
    return kvpn_run_or_keep(&c, kvpn_run_norm);
}

/* >>impl_norm_host -------------------------------------------------------------------------------------------------

   The host's twin. It reads addends and residual up to three times instead of keeping a row. An element's outputs are
   written after all reads of that element, so they may lie in its place. */

typedef struct kvpn_host_token {
    const kvprim_norm_desc *d;
    const void *const *sends;
    int32_t world;
    int64_t token;
    float factor; /* 1 / sqrt(mean(r * r) + eps) */
} kvpn_host_token;

static float kvpn_host_element(const kvprim_norm_desc *d, const void *tensor, int64_t at)
{
    uint16_t bits;
    memcpy(&bits, (const char *)tensor + (size_t)at * sizeof bits, sizeof bits);
    return kvpi_of_element(d->dtype, bits);
}

static void kvpn_set_host_element(const kvprim_norm_desc *d, void *tensor, int64_t at, float x)
{
    const uint16_t bits = (uint16_t)kvpi_to_element(d->dtype, x);
    if (tensor)
        memcpy((char *)tensor + (size_t)at * sizeof bits, &bits, sizeof bits);
}

static float kvpn_host_rounded(const kvprim_norm_desc *d, float x)
{
    return kvpi_of_element(d->dtype, kvpi_to_element(d->dtype, x));
}

/* r of element i, and *s. */
static float kvpn_host_residual(const kvpn_host_token *t, int64_t i, float *s)
{
    const kvprim_norm_desc *const d = t->d;
    float sum = kvpn_host_element(d, t->sends[0], t->token * d->send_stride + i);
    for (int32_t r = 1; r < t->world; r++)
        sum = kvpi_rounded(sum + kvpn_host_element(d, t->sends[r], t->token * d->send_stride + i));
    *s = kvpn_host_rounded(d, sum);
    if (!d->residual)
        return *s;
    sum = kvpi_rounded(*s + kvpn_host_element(d, d->residual, t->token * d->residual_stride + i));
    return kvpn_host_rounded(d, sum);
}

/* y, from r. */
static float kvpn_host_scaled(const kvpn_host_token *t, float r, int64_t i)
{
    const float weight = kvpn_host_element(t->d, t->d->weight, i);
    const float by = t->d->weight_plus_one ? kvpi_rounded(weight + 1) : weight;
    return kvpn_host_rounded(t->d, kvpi_product(kvpi_product(r, t->factor), by));
}

/* Whether a * a * x > 1, exactly. a has 25 bits and x has 24, so a * a fits into the 53 bits of an fp64. So do the
   products of x with the highest 27 bits of a * a, and with the other 23. */
static bool kvpn_host_exceeds_one(double a, double x)
{
    const double square = a * a;
    double high;
    uint64_t bits;
    memcpy(&bits, &square, sizeof bits);
    bits &= ~(((uint64_t)1 << 26) - 1);
    memcpy(&high, &bits, sizeof high);
    return (high * x - 1) + (square - high) * x > 0;
}

/* 1 / sqrt(x), rounded to nearest, without a library that the caller would have to link: the least float of which the
   middle between it and the next one is more than that. */
static float kvpn_host_rsqrt(float x)
{
    uint32_t low = 0, high = 0x7f800000;
    if (!(x > 0) || kvpi_bits_of(x) >= high) /* 0, infinity, NaN */
        return kvpi_quotient(1, x);
    while (low < high) {
        const uint32_t at = low + (high - low) / 2;
        const double middle = ((double)kvpi_float_of(at) + (double)kvpi_float_of(at + 1)) / 2;
        if (kvpn_host_exceeds_one(middle, (double)x))
            high = at;
        else
            low = at + 1;
    }
    return kvpi_float_of(low);
}

static float kvpn_host_factor(const kvpn_host_token *t)
{
    const int64_t packs = t->d->hidden / 8;
    float parts[12], sum = 0, s; /* 2,048 packs */
    for (int64_t pack = 0; pack < packs; pack++) {
        sum = 0;
        for (int64_t i = 8 * pack; i < 8 * pack + 8; i++) {
            const double r = (double)kvpn_host_residual(t, i, &s);
            sum = kvpi_rounded((float)((double)sum + r * r)); /* fmaf: fp64 holds the square of 8 or 11 bits */
        }
        int k = 0;
        for (; pack >> k & 1; k++) /* a tree: parts[k] is the sum of 2^k packs, where bit k of `pack` is set */
            sum = kvpi_rounded(parts[k] + sum);
        parts[k] = sum;
    }
    sum = 0;
    for (int k = 0; k < 12; k++)
        if (packs >> k & 1)
            sum = kvpi_rounded(parts[k] + sum);
    volatile float mean = kvpi_product(sum, kvpi_quotient(1, (float)t->d->hidden)); /* not fused with what follows */
    return kvpn_host_rsqrt(kvpi_rounded(mean + t->d->eps));
}

/* The scale of the elements from `first` on, up to `end`: computed and written, unless the whole tensor has one. */
static float kvpn_host_scale(const kvpn_host_token *t, int64_t first, int64_t end)
{
    const kvprim_norm_desc *const d = t->d;
    const bool exponents = d->scale_dtype == KVPRIM_F8E8M0;
    const int64_t group = first / (end - first);
    uint32_t most = 0;
    float s;
    if (!d->scale_per_token && !d->scale_group)
        return d->scale ? *d->scale : 1;
    for (int64_t i = first; i < end; i++)
        most = kvpi_tile_most(most, kvpn_host_scaled(t, kvpn_host_residual(t, i, &s), i));
    const float scale =
        kvpi_tile_scale(kvpi_quotient(kvpi_tile_largest(most), 448), d->scale_min, d->scale_power_of_two || exponents);
    float *const at = d->scale + t->token * d->scale_stride + (exponents ? group / 4 : group) * d->scale_group_stride;
    if (exponents)
        ((unsigned char *)at)[group % 4] = (unsigned char)kvpi_to_e8m0(scale);
    else
        *at = scale;
    return scale;
}

KVPRIM_API kvprim_status kvprim_all_reduce_norm_host(const kvprim_norm_desc *desc, const void *const *sends,
                                                     int32_t world)
{
    KVPRIM_RANGE(__func__);
    KVPRIM_REFUSE(!desc || !sends, NULL, "%s: %s is NULL", __func__, desc ? "sends" : "desc");
    KVPRIM_REFUSE(world < 1, ARGUMENT, "%s: world is %d, must be at least 1", __func__, (int)world);
    KVPRIM_TRY(kvpn_check_norm(__func__, desc, sends, world, true));
    const kvprim_norm_desc d = kvpn_complete_norm(desc);
    const int64_t each = d.scale_group ? d.scale_group : d.hidden; /* elements of a scale */
    kvpn_host_token t = {&d, sends, world, 0, 0};
    for (; t.token < d.tokens; t.token++) {
        float s, scale = 1;
        t.factor = kvpn_host_factor(&t);
        for (int64_t i = 0; i < d.hidden; i++) {
            const float r = kvpn_host_residual(&t, i, &s), y = kvpn_host_scaled(&t, r, i);
            if (i % each == 0) /* before outputs of its elements, which may be inputs */
                scale = kvpn_host_scale(&t, i, i + each);
            kvpn_set_host_element(&d, d.sum, t.token * d.sum_stride + i, s);
            kvpn_set_host_element(&d, d.residual_out, t.token * d.residual_out_stride + i, r);
            kvpn_set_host_element(&d, d.out, t.token * d.out_stride + i, y);
            if (d.quantised)
                ((unsigned char *)d.quantised)[t.token * d.quantised_stride + i] =
                    (unsigned char)kvpi_to_e4m3(kvpi_quotient(y, scale));
        }
    }
    return KVPRIM_OK;
}

/* >>impl_ring ------------------------------------------------------------------------------------------------------

   begun >= ended >= freed >= begun - slots. Number k is slot k % slots. filled: a slot may be sent, or unpacked;
   finished: it may be filled again. */

static kvprim_status kvpn_check_ring_desc(const char *f, const kvprim_ring *ring, const kvprim_ring_desc *d)
{
    KVPRIM_REFUSE(!ring || !d || !d->memory || !d->stream, NULL, "%s: ring, desc, desc->memory or desc->stream is NULL",
                  f);
    if (!kvpn_has_state(d->comm, kvpn_alive))
        return kvpn_fail_not_alive(f, d->comm);
    KVPRIM_REFUSE(d->peer < 0 || d->peer >= d->comm->world || d->peer == d->comm->rank || d->reserved != 0, ARGUMENT,
                  "%s: desc->peer is %d, must be another rank; desc->reserved is %lld", f, d->peer,
                  (long long)d->reserved);
    const bool again = ring->self == ring;
    const int32_t least = again ? ring->desc.slots : 1, most = again ? least : KVPRIM_MAX_RING_SLOTS;
    const size_t most_bytes = (UINTPTR_MAX - (uintptr_t)d->memory) / KVPRIM_MAX_RING_SLOTS;
    KVPRIM_REFUSE(d->slots < least || d->slots > most || d->slot_bytes < 1 || d->slot_bytes > most_bytes, SIZE,
                  "%s: desc->slots is %d, must be %d to %d; desc->slot_bytes is %zu, must be 1 to %zu", f, d->slots,
                  least, most, d->slot_bytes, most_bytes);
    return KVPRIM_OK;
}

/* Which way a ring goes: its first call says so. In desc.reserved, which is not the caller's there. */
enum { kvpn_ring_sends = 1, kvpn_ring_receives };

/* out: a pointer that must not be NULL; bytes: of a chunk, or 1. */
static kvprim_status kvpn_check_ring(const char *f, kvprim_ring *ring, const void *out, size_t bytes, int way)
{
    KVPRIM_REFUSE(!ring || !out, NULL, "%s: %s is NULL", f, ring ? "the place for the result" : "ring");
    KVPRIM_REFUSE(ring->self != ring, ARGUMENT, "%s: ring was not initialised, was moved, or has ended", f);
    if (!kvpn_has_state(ring->desc.comm, kvpn_alive))
        return kvpn_fail_not_alive(f, ring->desc.comm);
    KVPRIM_REFUSE(ring->desc.comm->teardown->group.open, ARGUMENT,
                  "%s: a group is open, whose work is later than the ring's events", f);
    const uint64_t slots = (uint64_t)ring->desc.slots, first = way == kvpn_ring_sends ? ring->ended : ring->begun;
    const size_t most = ring->desc.slot_bytes * (size_t)(slots - first % slots);
    KVPRIM_REFUSE(bytes < 1 || bytes > most, SIZE, "%s: bytes is %zu, must be 1 to %zu", f, bytes, most);
    KVPRIM_REFUSE(ring->desc.reserved != 0 && ring->desc.reserved != way, ARGUMENT, "%s: this ring only %s", f,
                  way == kvpn_ring_sends ? "receives" : "sends");
    ring->desc.reserved = way;
    return KVPRIM_OK;
}

static uint64_t kvpn_slots_of(const kvprim_ring *ring, size_t bytes)
{
    return (bytes - 1) / ring->desc.slot_bytes + 1;
}

KVPRIM_API kvprim_status kvprim_ring_destroy(kvprim_ring *ring)
{
    if (!ring || ring->self != ring)
        return kvpn_check_ring("kvprim_ring_destroy", ring, ring, 1, 0);
    for (int k = 0; k < ring->desc.slots; k++) {
        (void)(ring->filled[k] && cudaEventDestroy(ring->filled[k]));
        (void)(ring->finished[k] && cudaEventDestroy(ring->finished[k]));
    }
    memset(ring, 0, sizeof *ring);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_init(kvprim_ring *ring, const kvprim_ring_desc *desc)
{
    const char *const f = "kvprim_ring_init";
    cudaError_t error = cudaSuccess;
    KVPRIM_TRY(kvpn_check_ring_desc(f, ring, desc));
    kvpn_call c = kvpn_make_call(kvpn_send, f, desc->comm, desc->stream);
    KVPRIM_TRY(kvpn_check_device(&c)); /* events of another device would fail later */
    if (ring->self != ring)
        memset(ring, 0, sizeof *ring);
    ring->desc = *desc, ring->begun = ring->ended = ring->freed = 0;
    for (int k = 0; k < 2 * desc->slots && ring->self != ring && error == cudaSuccess; k++)
        error = cudaEventCreateWithFlags(k % 2 ? &ring->filled[k / 2] : &ring->finished[k / 2], cudaEventDisableTiming);
    ring->self = ring;
    if (error != cudaSuccess)
        (void)kvprim_ring_destroy(ring);
    return kvpn_cuda_status(f, "cudaEventCreateWithFlags", error);
}

KVPRIM_API kvprim_status kvprim_ring_claim(kvprim_ring *ring, struct CUstream_st *stream, void **slot)
{
    const char *const f = "kvprim_ring_claim";
    KVPRIM_TRY(kvpn_check_ring(f, ring, slot, 1, kvpn_ring_sends));
    const uint64_t k = ring->begun % (uint64_t)ring->desc.slots;
    *slot = NULL;
    if (ring->begun - ring->freed == (uint64_t)ring->desc.slots)
        return KVPRIM_OK;
    /* a credit says that the last chunk has arrived, not that this rank's kernel has ended */
    KVPRIM_NCCL_TRY_CUDA(cudaStreamWaitEvent(kvpn_stream(stream), ring->finished[k], 0));
    ring->begun++, *slot = (char *)ring->desc.memory + k * ring->desc.slot_bytes;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_send(kvprim_ring *ring, size_t bytes, struct CUstream_st *stream)
{
    const char *const f = "kvprim_ring_send";
    KVPRIM_TRY(kvpn_check_ring(f, ring, ring, bytes, kvpn_ring_sends));
    const uint64_t k = ring->ended % (uint64_t)ring->desc.slots, n = kvpn_slots_of(ring, bytes);
    KVPRIM_REFUSE(ring->ended + n > ring->begun, ARGUMENT, "%s: no slot is claimed for all of %zu bytes", f, bytes);
    KVPRIM_NCCL_TRY_CUDA(cudaEventRecord(ring->filled[k], kvpn_stream(stream)));
    KVPRIM_NCCL_TRY_CUDA(cudaStreamWaitEvent(ring->desc.stream, ring->filled[k], 0));
    KVPRIM_TRY(kvprim_send(ring->desc.comm, (char *)ring->desc.memory + k * ring->desc.slot_bytes, bytes, KVPRIM_U8,
                           ring->desc.peer, ring->desc.stream));
    for (uint64_t i = 0; i < n; i++)
        KVPRIM_NCCL_TRY_CUDA(cudaEventRecord(ring->finished[k + i], ring->desc.stream));
    ring->ended += n;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_credit(kvprim_ring *ring, int32_t n)
{
    KVPRIM_TRY(kvpn_check_ring(__func__, ring, ring, 1, kvpn_ring_sends));
    KVPRIM_REFUSE(n < 0 || (uint64_t)n > ring->ended - ring->freed, SIZE, "%s: n is %d, but %d slots lack their credit",
                  __func__, n, (int)(ring->ended - ring->freed));
    ring->freed += (uint64_t)n;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_recv(kvprim_ring *ring, size_t bytes, struct CUstream_st *stream, void **slot)
{
    const char *const f = "kvprim_ring_recv";
    KVPRIM_TRY(kvpn_check_ring(f, ring, slot, bytes, kvpn_ring_receives));
    const uint64_t slots = (uint64_t)ring->desc.slots, k = ring->begun % slots, n = kvpn_slots_of(ring, bytes);
    char *const at = (char *)ring->desc.memory + k * ring->desc.slot_bytes;
    KVPRIM_REFUSE(ring->begun + n > ring->freed + slots, ARGUMENT,
                  "%s: too few slots are free: the sender had no credit", f);
    KVPRIM_TRY(kvprim_recv(ring->desc.comm, at, bytes, KVPRIM_U8, ring->desc.peer, ring->desc.stream));
    KVPRIM_NCCL_TRY_CUDA(cudaEventRecord(ring->filled[k], ring->desc.stream));
    KVPRIM_NCCL_TRY_CUDA(cudaStreamWaitEvent(kvpn_stream(stream), ring->filled[k], 0));
    ring->begun += n, *slot = at;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_release(kvprim_ring *ring, struct CUstream_st *stream)
{
    const char *const f = "kvprim_ring_release";
    KVPRIM_TRY(kvpn_check_ring(f, ring, ring, 1, kvpn_ring_receives));
    KVPRIM_REFUSE(ring->ended == ring->begun, ARGUMENT, "%s: no slot is received", f);
    KVPRIM_NCCL_TRY_CUDA(
        cudaEventRecord(ring->finished[ring->ended % (uint64_t)ring->desc.slots], kvpn_stream(stream)));
    ring->ended++;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_ring_take(kvprim_ring *ring, int32_t *n)
{
    KVPRIM_TRY(kvpn_check_ring(__func__, ring, n, 1, kvpn_ring_receives));
    for (*n = 0; ring->freed < ring->ended; ring->freed++, ++*n) {
        const cudaError_t done = kvpn_query_event(ring->finished[ring->freed % (uint64_t)ring->desc.slots]);
        if (done != cudaSuccess)
            return done == cudaErrorNotReady ? KVPRIM_OK : kvpn_cuda_status(__func__, "cudaEventQuery", done);
    }
    return KVPRIM_OK;
}

#undef KVPRIM_NCCL_TRY_CUDA
#undef KVPRIM_NCCL_TRY_NCCL
#undef KVPRIM_NCCL_LOAD
#undef KVPRIM_NCCL_STORE
#endif /* implementation */

/* Copyright (c) 2026 the kvprim authors, under the MIT License: its text ends kvprim.h, which this header needs. */

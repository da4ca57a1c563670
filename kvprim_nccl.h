/* kvprim_nccl.h: one communicator per GPU and the collectives that an inference engine needs, on NCCL, callable from C.

   Do this, in a .cu file (a .c file works too, without the fast kernels):

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim_nccl.h"

       kvprim_status open(kvprim_comm *comm, int rank, int world, kvprim_comm_id id)
       {
           kvprim_comm_desc desc = {0};
           desc.rank = rank, desc.world = world, desc.id = id;
           return kvprim_comm_init(comm, &desc);
       }
       kvprim_status sum(kvprim_comm *comm, void *hidden, size_t count, cudaStream_t stream)
       {
           return kvprim_all_reduce(comm, hidden, hidden, count, KVPRIM_BF16, KVPRIM_SUM, stream);
       }

   What it does: reduces and gathers tensors across the GPUs of one job, on one machine or many, and sends them from one
   to another. Everything goes through NCCL 2.19 or newer, except what NCCL is slow at: sums of fp16, bf16 and fp32, and
   gathers, between GPUs that write to each other's memory. Neither CUDA's nor NCCL's headers are needed to
   call it: cudaStream_t is a struct CUstream_st *, ncclComm_t a struct ncclComm *.

   What it does NOT do: start processes or threads, carry the id from rank 0 to the others, choose the device.

   Contents, search for the tag:
       >>config      macros you may define
       >>types       element types and reductions
       >>comm        a communicator: create, look after, end
       >>collective  reduce, gather, scatter, broadcast, send, receive
       >>impl        the implementation

   Rules that hold for every function here
       Errors     Arguments are checked before anything is enqueued. KVPRIM_ERROR_NCCL, _CUDA: the call below failed;
                  kvprim_last_error() says which and with what.
       Stream     A collective only enqueues, on the given stream of the communicator's device, which is the current
                  one; NULL: the legacy default stream. Every rank calls the same collectives, with the same counts,
                  types and operations, in the same order, and they must run in that order: on one stream, or on several
                  that wait for each other. May be captured into a graph, on all ranks or on none.
       Threads    One communicator is used by one thread at a time; different ones by different threads at once.
                  kvprim_comm_abort may be called from any thread at any time.
       Alignment  That of the element type. Fastest at multiples of 16 bytes.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_NCCL_IMPLEMENTATION  in one translation unit: implements this header alone; kvprim.h must be implemented in
                               another. Needs the headers of CUDA and NCCL. Compiled by nvcc as C++17 or newer with NCCL
                               2.28.9 or newer it has the kernels too, which run with that same version of NCCL.
   KVPRIM_STATIC               in every translation unit, as in kvprim.h
   KVPRIM_NVTX                 in the implementing one, as in kvprim.h; init, destroy and abort have ranges too
*/
#ifndef KVPRIM_NCCL_H
#define KVPRIM_NCCL_H

#include "kvprim.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */
struct CUevent_st;  /* what a cudaEvent_t points to */
struct ncclComm;    /* what an ncclComm_t points to */

/* >>types ---------------------------------------------------------------------------------------------------------- */

typedef enum kvprim_dtype {
    KVPRIM_U8 = 0,
    KVPRIM_F16 = 1,
    KVPRIM_BF16 = 2,
    KVPRIM_F32 = 3,
    KVPRIM_F64 = 4,
    KVPRIM_INT8 = 5,
    KVPRIM_INT32 = 6,
    KVPRIM_INT64 = 7,
    KVPRIM_F8E4M3 = 8, /* both: NCCL 2.24 and newer; reduced on compute capability 9.0 and newer */
    KVPRIM_F8E5M2 = 9
} kvprim_dtype;

typedef enum kvprim_op {
    KVPRIM_SUM = 0,
    KVPRIM_MAX = 1,
    KVPRIM_PROD = 2,
    KVPRIM_MIN = 3,
    KVPRIM_AVG = 4 /* as NCCL rounds: sums of integers are divided by world, others multiplied by 1 / world before */
} kvprim_op;

/* >>comm ----------------------------------------------------------------------------------------------------------- */

/* Made by one rank, carried to all others by the caller. One id makes one communicator. */
typedef struct kvprim_comm_id {
    char bytes[128];
} kvprim_comm_id;

/* Zero-initialise, then set what differs. */
typedef struct kvprim_comm_desc {
    int32_t rank, world;   /* 0 <= rank < world */
    kvprim_comm_id id;     /* the same on every rank */
    size_t buffer_bytes;   /* symmetric buffer, the same on every rank; 0: none */
    int32_t timeout_ms;    /* for waits on other ranks, noticed some tens of milliseconds later; 0: 30 s */
    int32_t deterministic; /* 1, on every rank: sums of fp16, bf16 and fp32 in fp32 and in the order of the ranks at
                              every size, the same bits always. UNSUPPORTED where only NCCL can sum */
    int32_t no_pdl; /* 1: own kernels are launched without programmatic dependent launch. With it they start sooner,
                       and wait for the end and the memory of the kernel ahead of them. So that one, if it is launched
                       that way too and is not this library's, must have waited for what was ahead of it. In captured
                       graphs it is a programmatic edge, which cudaGraphGetEdges returns only with edge data */
} kvprim_comm_desc;

/* In the caller's memory and not to be moved while in use. The fields are the implementation's: read, don't write. */
typedef struct kvprim_comm {
    struct ncclComm *nccl;
    int32_t rank, world, device;
    int32_t timeout_ms, deterministic, pdl;
    void *buffer;
    size_t buffer_bytes;

    const struct kvprim_comm *self; /* itself from init to destroy */
    int32_t state, busy;            /* calls inside: abort waits for them */
    void *memory, *window;          /* slots and buffer; the window that they are registered as */
    struct kvpn_control *control;   /* pinned host memory, and where the GPU sees it */
    struct kvpn_control *control_on_gpu;
    void *peer[8]; /* every rank's slots, as this GPU addresses them; peer[0] NULL: no kernels of one's own */
    uint32_t blocks, block_slots;
    struct CUevent_st *watch[2]; /* behind collectives of NCCL's: see kvpn_watch */
    double watched_since[2];     /* 0: no event there */
    int32_t watch_next;
    int32_t behind_nccl;                /* the last call was NCCL's: see kvpn_start */
    struct CUstream_st *checked_stream; /* the last one that was found to be of the right device */
    char description[1024];
} kvprim_comm;

/* Errors: NULL, NCCL. */
KVPRIM_API kvprim_status kvprim_comm_new_id(kvprim_comm_id *out);

/* Collective, on the current device: returns when all `world` ranks have called it, and waits for them without end, as
   NCCL does. Allocates, and registers what there is to register: nothing later does. Fast kernels are on where all
   ranks have them and write to each other's memory (NVLink, one machine or one NVLink domain), for up to 8 ranks; they
   take 32 MB of device memory. kvprim_comm_describe says whether, and why not.
   Errors, on every rank where it is something that ranks compare: NULL, ARGUMENT (rank, world, timeout_ms,
   deterministic, no_pdl), SIZE (buffer_bytes, or they differ), UNSUPPORTED (deterministic), CUDA, NCCL (two ranks on
   one device: those two hear of it, others may go on waiting for them). What it began with is freed again. */
KVPRIM_API kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc);

/* Collective: waits for all work of the device, then frees what kvprim_comm_init made. Graphs that hold collectives of
   the communicator must not be launched any more. Errors: NULL, ARGUMENT (not initialised, already destroyed, moved),
   CUDA, NCCL. */
KVPRIM_API kvprim_status kvprim_comm_destroy(kvprim_comm *comm);

/* Not collective, from any thread: ends the work that is under way, whose results are lost, and frees. For a rank whose
   peers are gone. A call that is inside a collective is waited for, up to a second. Errors: as destroy. */
KVPRIM_API kvprim_status kvprim_comm_abort(kvprim_comm *comm);

/* Whether something went wrong since init without a call to report it; does not wait. NCCL: an error of a peer or of
   the network. TIMEOUT: a kernel of ours waited timeout_ms for a rank (the text says for which, and this and every
   later collective has ended without result), or a collective of NCCL's was not done timeout_ms after the call, not
   counting those captured into graphs (NCCL does not say for whom it waits). Then call kvprim_comm_abort. */
KVPRIM_API kvprim_status kvprim_comm_check(kvprim_comm *comm);

/* The symmetric buffer, or NULL if there is none or comm is not alive; *bytes, if bytes is not NULL, receives its size.
   NCCL 2.27 and newer reduce and gather tensors that lie in it without staging; then they must lie in it on every rank,
   at the same offset. Aligned to 4096. Uninitialised. */
KVPRIM_API void *kvprim_comm_buffer(kvprim_comm *comm, size_t *bytes);

/* Versions, links, which fast paths are on, and of the others why not. Valid as long as comm. */
KVPRIM_API const char *kvprim_comm_describe(const kvprim_comm *comm);

/* >>collective -----------------------------------------------------------------------------------------------------

   Counts are elements. count == 0 is KVPRIM_OK and enqueues nothing. Where both are given, recv and send are the same
   pointer (in place) or do not overlap. all_gather in place: send = recv + rank * send_count elements; reduce_scatter
   in place: recv = send + rank * recv_count elements.
   Errors: NULL, SIZE (bytes beyond size_t), ARGUMENT (comm not alive, dtype, op, rank, alignment, another device's
   stream, another current device), OVERLAP, UNSUPPORTED (dtype), TIMEOUT (an earlier call's), CUDA, NCCL.

   all_reduce, reduce_scatter: sums of fp16, bf16 and fp32 are made in fp32 in the order of the ranks, rounded once, and
   have the same bits on all ranks and in both, wherever the library's own kernels make them: kvprim_comm_describe says
   up to which size. A NaN stays a NaN, its other bits are not kept. */
KVPRIM_API kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count,
                                           kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream);

/* recv: world * send_count elements, those of rank r at r * send_count. */
KVPRIM_API kvprim_status kvprim_all_gather(kvprim_comm *comm, void *recv, const void *send, size_t send_count,
                                           kvprim_dtype dtype, struct CUstream_st *stream);

/* send: world * recv_count elements; rank r receives the reduction of those at r * recv_count. */
KVPRIM_API kvprim_status kvprim_reduce_scatter(kvprim_comm *comm, void *recv, const void *send, size_t recv_count,
                                               kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream);

/* buf of rank `root` to buf of every other. */
KVPRIM_API kvprim_status kvprim_broadcast(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t root,
                                          struct CUstream_st *stream);

/* A send and the peer's recv of the same count and dtype meet; both sides' kernels wait for the other. Ranks that send
   to each other at once wait for ever, unless one of them receives first or both put their calls between NCCL's
   ncclGroupStart and ncclGroupEnd. */
KVPRIM_API kvprim_status kvprim_send(kvprim_comm *comm, const void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream);
KVPRIM_API kvprim_status kvprim_recv(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif /* KVPRIM_NCCL_H */

/* Stop here if you only use the library. */

/* >>impl ----------------------------------------------------------------------------------------------------------- */

/* Names that begin with kvpn_ are internal: static, and free to change. */

/* ---- kernels ----

   Ranks exchange words of 16 bytes through slots: memory of each rank that all others write to. An empty slot is all
   ones. A word of a tensor never is: all ones are a NaN in fp16, bf16 and fp32, and are sent as another NaN. So a slot
   that is not empty holds its word, with no flag beside it, no fence and no barrier, and of the hardware nothing is
   asked but that 4 bytes arrive at once. Bytes of any value (all_gather) go 8 to a slot, each 4 beside 4 that are zero:
   there it takes that 8 bytes arrive at once. Many go 16 to a slot, and every fifth slot says which 4 bytes of the four
   slots before it were all ones.

   Whoever has read a slot empties it. There are two sets of slots, and a block takes them in turns; which one is next
   is in device memory, so that a launch may be replayed. That two are enough: a rank writes in its call k + 2 what I
   emptied in my call k only when its call k + 1 is over. That call waited for words of my call k + 1, which began
   when my call k was over, from me or from a rank that had waited for mine (two shots: at least of the first slice,
   which is never empty). So sizes may change from call to call, and no call waits for more than the words that it
   needs.

   A thread sends all its words before it waits for the first, and block b waits for nothing but blocks b of the other
   ranks: it is enough that all blocks of a call are resident at once. They are: there are no more of them than the
   smallest of the GPUs has multiprocessors (kvpn_compare). */
#if ((defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_NCCL_IMPLEMENTATION)) && defined(__CUDACC__)) ||                \
    defined(KVPRIM_NCCL_EMULATE)
#ifndef KVPRIM_NCCL_KERNELS
#define KVPRIM_NCCL_KERNELS

#ifndef KVPRIM_NCCL_EMULATE /* the emulation runs them on the CPU, a thread per rank, for the tests */
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVPRIM_NCCL_UNROLL _Pragma("unroll")
#else
#define KVPRIM_NCCL_UNROLL
#endif
#define KVPRIM_NCCL_DEVICE static __device__ __forceinline__

enum {
    kvpn_max_world = 8,
    kvpn_max_threads = 512,  /* in a block; two blocks fit on a multiprocessor */
    kvpn_less_threads = 256, /* in one whose threads hold more: they may have twice as many registers */
    kvpn_patience = 256,     /* looks at a slot, tens of microseconds, before one at whether all is over */
    kvpn_endurance = 65536,  /* looks, some ten milliseconds, before one at the clock and at what the host says */
    kvpn_ended = 512         /* word of the page where the turns are, behind the last: see kvpn_wait */
};
static const uint32_t kvpn_empty = 0xffffffffu;

/* Pinned host memory. stop: every wait ends; from kvpn_late on because one was too long, for rank stop - kvpn_late. */
enum { kvpn_stopped = 1, kvpn_late = 2 };
typedef struct kvpn_control {
    uint32_t stop;
} kvpn_control;

/* Slots lie by turn, area, sender and block, and a block's one behind the other: from one to the next are turn_bytes,
   area_bytes and so on. In the order of use: what is needed first comes with one line of the constant cache. */
typedef struct kvpn_params {
    const void *send;
    uint32_t *turn;            /* of each block: which set of slots is next */
    uint32_t slice, per_block; /* words: one rank's to sum, and a block's of them */
    uint32_t rank, world;
    uint32_t turn_bytes, area_bytes, sender_bytes, block_bytes;
    char *peer[kvpn_max_world]; /* slots: of this rank, of the next one, and so on around */
    void *recv;
    uint64_t count; /* elements; all_gather: bytes */
    uint64_t pitch; /* all_gather: bytes from a rank's part to the next one's in recv; reduce_scatter: in send */
    uint32_t words; /* of the tensor */
    uint32_t send_aligned, recv_aligned;
    kvpn_control *control;
    uint64_t timeout_ns;
} kvpn_params;

/* Who runs: what the kernels take from CUDA, and the emulation sets. A block's threads are equal parts, which do
   different things at the same time; thread and threads are those of the part. */
typedef struct kvpn_self {
    uint32_t block, part, thread, threads, turn;
    uint32_t looks;
    uint64_t since;
} kvpn_self;

/* In the memory of another rank or written by one: past the caches that other GPUs do not see. */
KVPRIM_NCCL_DEVICE uint4 kvpn_look(const char *slot)
{
    uint4 v;
#ifndef KVPRIM_NCCL_EMULATE
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(slot))
                 : "memory");
#else /* 4 bytes at a time, and y and w, which may be flags, never before what lies beside them */
    const uint32_t *const w = (const uint32_t *)slot;
    v.y = __atomic_load_n(w + 1, __ATOMIC_ACQUIRE), v.w = __atomic_load_n(w + 3, __ATOMIC_ACQUIRE);
    v.x = __atomic_load_n(w, __ATOMIC_RELAXED), v.z = __atomic_load_n(w + 2, __ATOMIC_RELAXED);
#endif
    return v;
}

KVPRIM_NCCL_DEVICE void kvpn_put(char *slot, uint4 v)
{
#ifndef KVPRIM_NCCL_EMULATE
    asm volatile("st.relaxed.sys.global.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                 "l"(__cvta_generic_to_global(slot))
                 : "memory");
#else
    uint32_t *const w = (uint32_t *)slot;
    __atomic_store_n(w, v.x, __ATOMIC_RELAXED), __atomic_store_n(w + 2, v.z, __ATOMIC_RELAXED);
    __atomic_store_n(w + 1, v.y, __ATOMIC_RELEASE), __atomic_store_n(w + 3, v.w, __ATOMIC_RELEASE);
#endif
}

KVPRIM_NCCL_DEVICE uint64_t kvpn_ns(void)
{
#ifndef KVPRIM_NCCL_EMULATE
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
#else
    return kvprim_emulate_ns();
#endif
}

/* Memory that others write, in the GPU's or the host's. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_read(uint32_t *at)
{
#ifndef KVPRIM_NCCL_EMULATE
    return *(volatile uint32_t *)at;
#else
    return kvprim_emulate_read(at);
#endif
}

KVPRIM_NCCL_DEVICE void kvpn_write(uint32_t *at, uint32_t value)
{
#ifndef KVPRIM_NCCL_EMULATE
    *(volatile uint32_t *)at = value;
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
}

/* Before the first word, j == me.thread, is sent. The turn comes from memory as the word does: asked for behind it, it
   is here at the same time. The other way round the compiler waits for it first, a tenth of a small sum. */
KVPRIM_NCCL_DEVICE void kvpn_take_turn(const kvpn_params &p, kvpn_self &me, uint32_t j)
{
    if (j == me.thread)
#ifndef KVPRIM_NCCL_EMULATE
        asm volatile("ld.global.u32 %0, [%1];"
                     : "=r"(me.turn)
                     : "l"(__cvta_generic_to_global(p.turn + me.block))
                     : "memory");
#else
        me.turn = p.turn[me.block];
#endif
}

/* Where a rank finds, in area 0 or 1 of its slots, word j of this block that rank `from` sent. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_slot(const kvpn_params &p, const kvpn_self &me, uint32_t area, uint32_t from,
                                      uint32_t j)
{
    const uint32_t place = area * p.area_bytes + from * p.sender_bytes + me.block * p.block_bytes + j * 16;
    return place + me.turn * p.turn_bytes; /* known last */
}

/* False: the wait for `rank` is over without result. All threads of a GPU may wait at once, and the clock and the
   host's memory together take half a microsecond a warp, one after the other: a millisecond for all, in each wait of
   a call. If they were asked earlier, a rank that has waited once would be late by as much in the next call, the
   others would wait for it and be late in the one after it, and so on for ever. Whoever sees that all is over says
   so in the GPU's memory, so that what is queued behind this call need not find out by itself. */
KVPRIM_NCCL_DEVICE bool kvpn_wait(const kvpn_params &p, kvpn_self &me, uint32_t rank)
{
    if (++me.looks % kvpn_patience)
        return true;
    if (kvpn_read(p.turn + kvpn_ended))
        return false;
    if (me.looks % kvpn_endurance)
        return true;
    const uint64_t now = kvpn_ns();
    if (me.since == 0)
        me.since = now;
    if (!kvpn_read(&p.control->stop)) {
        if (now - me.since < p.timeout_ns)
            return true;
        kvpn_write(&p.control->stop, kvpn_late + rank);
    }
    kvpn_write(p.turn + kvpn_ended, 1);
    return false;
}

KVPRIM_NCCL_DEVICE uint32_t kvpn_max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* What is kvpn_empty, the largest there is, if a word that was waited for has not come. `flagged`: two of them say so
   for all, which may have any value. */
template <bool flagged> KVPRIM_NCCL_DEVICE uint32_t kvpn_fullness(uint4 v)
{
    const uint32_t flags = kvpn_max(v.y, v.w);
    return flagged ? flags : kvpn_max(flags, kvpn_max(v.x, v.z));
}

/* From `most` slots that lie `step` bytes apart those whose bit is set in `which`; v of the others stays, and is not
   kvpn_empty. Looks at all together and again until all are there: a look takes longer than some hundred
   instructions, and little is done between one and the next. sender: who fills them, -1: rank r slot r. False:
   something did not come. */
template <int most, bool flagged>
KVPRIM_NCCL_DEVICE bool kvpn_receive(const kvpn_params &p, kvpn_self &me, const char *first, uint32_t step,
                                     uint32_t which, int32_t sender, uint4 (&v)[most])
{
    for (;;) {
        uint32_t fullness = 0, late = 0;
        KVPRIM_NCCL_UNROLL
        for (uint32_t r = 0; r < most; r++)
            if (which >> r & 1)
                v[r] = kvpn_look(first + (size_t)r * step);
        KVPRIM_NCCL_UNROLL
        for (uint32_t r = 0; r < most; r++)
            fullness = kvpn_max(fullness, kvpn_fullness<flagged>(v[r]));
        if (fullness != kvpn_empty)
            return true;
        KVPRIM_NCCL_UNROLL
        for (uint32_t r = 0; r < most; r++)
            late = kvpn_fullness<flagged>(v[r]) == kvpn_empty ? r : late;
        if (!kvpn_wait(p, me, sender < 0 ? late : (uint32_t)sender))
            return false;
    }
}

/* When all else is done: nobody waits for it. */
template <int most> KVPRIM_NCCL_DEVICE void kvpn_empty_slots(char *first, uint32_t step, uint32_t which)
{
    KVPRIM_NCCL_UNROLL
    for (uint32_t r = 0; r < most; r++)
        if (which >> r & 1)
            kvpn_put(first + (size_t)r * step, uint4{kvpn_empty, kvpn_empty, kvpn_empty, kvpn_empty});
}

/* All ones as the NaN 0x7fffffff, of which no half is all ones but the lower. */
KVPRIM_NCCL_DEVICE uint4 kvpn_sendable(uint4 v)
{
    v.x = v.x == kvpn_empty ? kvpn_empty >> 1 : v.x;
    v.y = v.y == kvpn_empty ? kvpn_empty >> 1 : v.y;
    v.z = v.z == kvpn_empty ? kvpn_empty >> 1 : v.z;
    v.w = v.w == kvpn_empty ? kvpn_empty >> 1 : v.w;
    return v;
}

/* Element types: the sums of a 32-bit word's elements, from and to fp32. */
struct kvpn_f32 {
    enum { per_word = 1 };
    typedef uint32_t bits;
    static __device__ __forceinline__ void split(uint32_t word, float *f)
    {
        memcpy(f, &word, 4);
    }
    static __device__ __forceinline__ uint32_t join(const float *f)
    {
        uint32_t word;
        memcpy(&word, f, 4);
        return word;
    }
};

struct kvpn_bf16 {
    enum { per_word = 2 };
    typedef uint16_t bits;
    static __device__ __forceinline__ void split(uint32_t word, float *f)
    {
        const uint32_t low = word << 16, high = word & 0xffff0000u;
        memcpy(f, &low, 4);
        memcpy(f + 1, &high, 4);
    }
    static __device__ __forceinline__ uint32_t join(const float *f)
    {
#ifndef KVPRIM_NCCL_EMULATE
        const __nv_bfloat162 pair = __floats2bfloat162_rn(f[0], f[1]);
        uint32_t word;
        memcpy(&word, &pair, 4);
        return word;
#else
        return kvprim_emulate_bf16(f[0]) | kvprim_emulate_bf16(f[1]) << 16;
#endif
    }
};

#ifndef KVPRIM_NCCL_EMULATE
struct kvpn_f16 {
    enum { per_word = 2 };
    typedef uint16_t bits;
    static __device__ __forceinline__ void split(uint32_t word, float *f)
    {
        __half2 pair;
        memcpy(&pair, &word, 4);
        const float2 both = __half22float2(pair);
        f[0] = both.x, f[1] = both.y;
    }
    static __device__ __forceinline__ uint32_t join(const float *f)
    {
        const __half2 pair = __floats2half2_rn(f[0], f[1]);
        uint32_t word;
        memcpy(&word, &pair, 4);
        return word;
    }
};
#endif

/* Word i of a tensor, zeros behind its end. `whole`: it is aligned, and ends with a word. */
template <class T, bool whole> KVPRIM_NCCL_DEVICE uint4 kvpn_fetch(const kvpn_params &p, const void *send, uint32_t i)
{
    enum { elements = 4 * T::per_word };
    if (whole || (p.send_aligned && (i + 1ull) * elements <= p.count))
        return ((const uint4 *)send)[i];
    const typename T::bits *const from = (const typename T::bits *)send + (size_t)i * elements;
    const uint64_t left = p.count - (uint64_t)i * elements;
    uint32_t w[4] = {0, 0, 0, 0};
    KVPRIM_NCCL_UNROLL
    for (int e = 0; e < elements; e++)
        if ((uint64_t)e < left)
            w[e / T::per_word] |= (uint32_t)from[e] << e % T::per_word * 16;
    return uint4{w[0], w[1], w[2], w[3]};
}

template <class T, bool whole> KVPRIM_NCCL_DEVICE void kvpn_keep(const kvpn_params &p, uint32_t i, uint4 v)
{
    enum { elements = 4 * T::per_word };
    if (whole || (p.recv_aligned && (i + 1ull) * elements <= p.count)) {
        ((uint4 *)p.recv)[i] = v;
        return;
    }
    typename T::bits *const to = (typename T::bits *)p.recv + (size_t)i * elements;
    const uint64_t left = p.count - (uint64_t)i * elements;
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    KVPRIM_NCCL_UNROLL
    for (int e = 0; e < elements; e++)
        if ((uint64_t)e < left)
            to[e] = (typename T::bits)(w[e / T::per_word] >> e % T::per_word * 16);
}

/* What a sum begins with: the own word, and of ranks that there are not -0, which changes no sum. */
template <class T, int most> KVPRIM_NCCL_DEVICE void kvpn_begin_sum(const kvpn_params &p, uint4 own, uint4 (&v)[most])
{
    const uint32_t none = T::per_word == 1 ? 0x80000000u : 0x80008000u;
    own = kvpn_sendable(own);
    KVPRIM_NCCL_UNROLL
    for (uint32_t r = 0; r < most; r++)
        v[r] = r == p.rank ? own : uint4{none, none, none, none};
}

/* Rank 0's first: the same bits on every rank. */
template <class T, int most> KVPRIM_NCCL_DEVICE uint4 kvpn_sum(const uint4 (&v)[most])
{
    float sum[4 * T::per_word];
    KVPRIM_NCCL_UNROLL
    for (int r = 0; r < most; r++) {
        const uint32_t w[4] = {v[r].x, v[r].y, v[r].z, v[r].w};
        KVPRIM_NCCL_UNROLL
        for (int k = 0; k < 4; k++) {
            float f[T::per_word];
            T::split(w[k], f);
            KVPRIM_NCCL_UNROLL
            for (int e = 0; e < T::per_word; e++)
                sum[k * T::per_word + e] = r == 0 ? f[e] : sum[k * T::per_word + e] + f[e];
        }
    }
    return kvpn_sendable(uint4{T::join(sum), T::join(sum + T::per_word), T::join(sum + 2 * T::per_word),
                               T::join(sum + 3 * T::per_word)});
}

/* The ranks that I hear from. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_others(const kvpn_params &p)
{
    return ((1u << p.world) - 1) & ~(1u << p.rank);
}

/* The words of a slice that a block has. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_block_words(const kvpn_params &p, const kvpn_self &me)
{
    const uint32_t left = p.slice - me.block * p.per_block;
    return left < p.per_block ? left : p.per_block;
}

/* The rank k further on, to whom peer[k] belongs. */
KVPRIM_NCCL_DEVICE uint32_t kvpn_next(const kvpn_params &p, uint32_t k)
{
    const uint32_t r = p.rank + k;
    return r < p.world ? r : r - p.world;
}

/* To every other rank's slot at the same place. */
template <int most> KVPRIM_NCCL_DEVICE void kvpn_put_all(const kvpn_params &p, uint32_t slot, uint4 v)
{
    KVPRIM_NCCL_UNROLL
    for (uint32_t k = 1; k < most; k++)
        if (k < p.world)
            kvpn_put(p.peer[k] + slot, v);
}

/* The ways. A thread runs send, sum and finish in this order; T is the type of what is summed, `most` the ranks that
   there may be (2, 4 or 8), and `whole` says that all is aligned and ends with a word. threads: the most in a block,
   threads_of_8: if `most` is 8. turn_last: the turn ends behind finish and not behind send, whose barrier would let
   those that receive wait for those that send. */

/* One shot: every rank sends the whole tensor to every other and sums by itself. Thread t of a block has every
   threads-th word of the block from the t-th on, here as below: the same ones when it sends, sums and writes, so that
   send may be recv. */
struct kvpn_one_shot {
    enum { threads = kvpn_max_threads, threads_of_8 = kvpn_less_threads, turn_last = 0 };

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void send(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            const uint4 v = kvpn_fetch<T, whole>(p, p.send, first + j);
            kvpn_take_turn(p, me, j);
            kvpn_put_all<most>(p, kvpn_slot(p, me, 0, p.rank, j), kvpn_sendable(v));
        }
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ bool sum(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me), others = kvpn_others(p);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most];
            char *const slots = p.peer[0] + kvpn_slot(p, me, 0, 0, j);
            kvpn_begin_sum<T, most>(p, kvpn_fetch<T, whole>(p, p.send, first + j), v);
            if (!kvpn_receive<most, false>(p, me, slots, p.sender_bytes, others, -1, v))
                return false;
            kvpn_keep<T, whole>(p, first + j, kvpn_sum<T, most>(v));
            kvpn_empty_slots<most>(slots, p.sender_bytes, others);
        }
        return true;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void finish(const kvpn_params &, kvpn_self &)
    {
    }
};

/* Two shots: of world slices every rank sums one, which the others sent it, and sends the sum to all. Word j of a block
   is the same place of every slice. */
struct kvpn_two_shot {
    enum { threads = kvpn_max_threads, threads_of_8 = kvpn_less_threads, turn_last = 0 };

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void send(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most];
            if (!whole)
                kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 1; k < most; k++)
                if (k < p.world && kvpn_next(p, k) * p.slice + first + j < p.words) {
                    v[k] = kvpn_fetch<T, whole>(p, p.send, kvpn_next(p, k) * p.slice + first + j);
                    if (!whole) /* fewer registers */
                        kvpn_put(p.peer[k] + kvpn_slot(p, me, 0, p.rank, j), kvpn_sendable(v[k]));
                }
            if (!whole)
                continue;
            kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 1; k < most; k++)
                if (k < p.world && kvpn_next(p, k) * p.slice + first + j < p.words)
                    kvpn_put(p.peer[k] + kvpn_slot(p, me, 0, p.rank, j), kvpn_sendable(v[k]));
        }
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ bool sum(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = p.rank * p.slice + me.block * p.per_block, words = kvpn_block_words(p, me);
        const uint32_t others = kvpn_others(p);
        for (uint32_t j = me.thread; j < words && first + j < p.words; j += me.threads) {
            uint4 v[most];
            char *const slots = p.peer[0] + kvpn_slot(p, me, 0, 0, j);
            kvpn_begin_sum<T, most>(p, kvpn_fetch<T, whole>(p, p.send, first + j), v);
            if (!kvpn_receive<most, false>(p, me, slots, p.sender_bytes, others, -1, v))
                return false;
            const uint4 all = kvpn_sum<T, most>(v);
            kvpn_put_all<most>(p, kvpn_slot(p, me, 1, p.rank, j), all);
            kvpn_keep<T, whole>(p, first + j, all);
            kvpn_empty_slots<most>(slots, p.sender_bytes, others);
        }
        return true;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void finish(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most] = {};
            char *const slots = p.peer[0] + kvpn_slot(p, me, 1, 0, j);
            uint32_t ranks = 0; /* whose slice has such a word */
            KVPRIM_NCCL_UNROLL
            for (uint32_t r = 0; r < most; r++)
                ranks |= (uint32_t)(r < p.world && r != p.rank && r * p.slice + first + j < p.words) << r;
            if (!kvpn_receive<most, false>(p, me, slots, p.sender_bytes, ranks, -1, v))
                return;
            KVPRIM_NCCL_UNROLL
            for (uint32_t r = 0; r < most; r++)
                if (ranks >> r & 1)
                    kvpn_keep<T, whole>(p, r * p.slice + first + j, v[r]);
            kvpn_empty_slots<most>(slots, p.sender_bytes, ranks);
        }
    }
};

/* Every rank sends to every other the part that is the other's, and sums its own: the first of two shots. */
struct kvpn_scatter {
    enum { threads = kvpn_max_threads, threads_of_8 = kvpn_less_threads, turn_last = 0 };

    static __device__ __forceinline__ const char *part_of(const kvpn_params &p, uint32_t rank)
    {
        return (const char *)p.send + rank * p.pitch;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void send(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most];
            if (!whole)
                kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 1; k < most; k++)
                if (k < p.world) {
                    v[k] = kvpn_fetch<T, whole>(p, part_of(p, kvpn_next(p, k)), first + j);
                    if (!whole) /* fewer registers */
                        kvpn_put(p.peer[k] + kvpn_slot(p, me, 0, p.rank, j), kvpn_sendable(v[k]));
                }
            if (!whole)
                continue;
            kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 1; k < most; k++)
                if (k < p.world)
                    kvpn_put(p.peer[k] + kvpn_slot(p, me, 0, p.rank, j), kvpn_sendable(v[k]));
        }
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ bool sum(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me), others = kvpn_others(p);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most];
            char *const slots = p.peer[0] + kvpn_slot(p, me, 0, 0, j);
            kvpn_begin_sum<T, most>(p, kvpn_fetch<T, whole>(p, part_of(p, p.rank), first + j), v);
            if (!kvpn_receive<most, false>(p, me, slots, p.sender_bytes, others, -1, v))
                return false;
            kvpn_keep<T, whole>(p, first + j, kvpn_sum<T, most>(v));
            kvpn_empty_slots<most>(slots, p.sender_bytes, others);
        }
        return true;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void finish(const kvpn_params &, kvpn_self &)
    {
    }
};

/* 8 bytes at place i, or those before the end of `bytes`. */
template <bool whole> KVPRIM_NCCL_DEVICE uint2 kvpn_fetch8(const void *from, uint64_t bytes, uint32_t i)
{
    if (whole)
        return ((const uint2 *)from)[i];
    const unsigned char *const b = (const unsigned char *)from + (size_t)i * 8;
    const uint64_t left = bytes - (uint64_t)i * 8;
    uint32_t w[2] = {0, 0};
    KVPRIM_NCCL_UNROLL
    for (int e = 0; e < 8; e++)
        if ((uint64_t)e < left)
            w[e / 4] |= (uint32_t)b[e] << e % 4 * 8;
    return uint2{w[0], w[1]};
}

template <bool whole> KVPRIM_NCCL_DEVICE void kvpn_keep8(void *to, uint64_t bytes, uint32_t i, uint2 v)
{
    if (whole) {
        ((uint2 *)to)[i] = v;
        return;
    }
    unsigned char *const b = (unsigned char *)to + (size_t)i * 8;
    const uint64_t left = bytes - (uint64_t)i * 8;
    const uint32_t w[2] = {v.x, v.y};
    KVPRIM_NCCL_UNROLL
    for (int e = 0; e < 8; e++)
        if ((uint64_t)e < left)
            b[e] = (unsigned char)(w[e / 4] >> e % 4 * 8);
}

/* Every rank sends its `count` bytes to every other, 8 to a slot. */
struct kvpn_gather_all {
    enum { threads = kvpn_max_threads, threads_of_8 = kvpn_less_threads, turn_last = 0 };

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void send(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            const uint2 v = kvpn_fetch8<whole>(p.send, p.count, first + j);
            kvpn_take_turn(p, me, j);
            kvpn_put_all<most>(p, kvpn_slot(p, me, 0, p.rank, j), uint4{v.x, 0, v.y, 0});
        }
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ bool sum(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me), others = kvpn_others(p);
        char *const to = (char *)p.recv;
        for (uint32_t j = me.thread; j < words; j += me.threads) {
            uint4 v[most] = {};
            char *const slots = p.peer[0] + kvpn_slot(p, me, 0, 0, j);
            const uint2 own = kvpn_fetch8<whole>(p.send, p.count, first + j);
            kvpn_keep8<whole>(to + p.rank * p.pitch, p.count, first + j, own);
            if (!kvpn_receive<most, true>(p, me, slots, p.sender_bytes, others, -1, v))
                return false;
            KVPRIM_NCCL_UNROLL
            for (uint32_t r = 0; r < most; r++)
                if (others >> r & 1)
                    kvpn_keep8<whole>(to + r * p.pitch, p.count, first + j, uint2{v[r].x, v[r].z});
            kvpn_empty_slots<most>(slots, p.sender_bytes, others);
        }
        return true;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void finish(const kvpn_params &, kvpn_self &)
    {
    }
};

/* 16 bytes at place i, `whole`: of aligned ones. */
template <bool whole> KVPRIM_NCCL_DEVICE uint4 kvpn_fetch16(const void *from, uint32_t i)
{
    if (whole)
        return ((const uint4 *)from)[i];
    const unsigned char *const b = (const unsigned char *)from + (size_t)i * 16;
    const bool by_word = (uintptr_t)b % 4 == 0;
    uint32_t w[4] = {0, 0, 0, 0};
    KVPRIM_NCCL_UNROLL
    for (int k = 0; k < 4; k++)
        w[k] = by_word ? ((const uint32_t *)b)[k]
                       : (uint32_t)b[4 * k] | (uint32_t)b[4 * k + 1] << 8 | (uint32_t)b[4 * k + 2] << 16 |
                             (uint32_t)b[4 * k + 3] << 24;
    return uint4{w[0], w[1], w[2], w[3]};
}

template <bool whole> KVPRIM_NCCL_DEVICE void kvpn_keep16(void *to, uint32_t i, uint4 v)
{
    if (whole) {
        ((uint4 *)to)[i] = v;
        return;
    }
    unsigned char *const b = (unsigned char *)to + (size_t)i * 16;
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    const bool by_word = (uintptr_t)b % 4 == 0;
    KVPRIM_NCCL_UNROLL
    for (int k = 0; k < 4; k++)
        if (by_word)
            ((uint32_t *)b)[k] = w[k];
    KVPRIM_NCCL_UNROLL
    for (int e = 0; e < 16; e++)
        if (!by_word)
            b[e] = (unsigned char)(w[e / 4] >> e % 4 * 8);
}

/* Of many bytes, a multiple of 16, 16 go to a slot, as in sums. Behind four slots of a thread a fifth says which of
   their 32-bit words were all ones. A block's threads are `world` equal parts: the first sends, each other one receives
   from one rank, at the same time. A thread's slots lie a part's threads apart, those of its next four words in the
   other area. */
struct kvpn_gather_many {
    enum { threads = kvpn_max_threads, threads_of_8 = kvpn_max_threads, group = 4, slots = group + 1, turn_last = 1 };

    static __device__ __forceinline__ uint32_t slot_of(const kvpn_params &p, const kvpn_self &me, uint32_t from,
                                                       uint32_t round, uint32_t k)
    {
        return kvpn_slot(p, me, round & 1, from, (round / 2 * slots + k) * me.threads + me.thread);
    }

    static __device__ __forceinline__ uint32_t ones_of(uint4 v)
    {
        return (uint32_t)(v.x == kvpn_empty) | (uint32_t)(v.y == kvpn_empty) << 1 | (uint32_t)(v.z == kvpn_empty) << 2 |
               (uint32_t)(v.w == kvpn_empty) << 3;
    }

    static __device__ __forceinline__ uint4 with_ones(uint4 v, uint32_t ones)
    {
        return uint4{ones & 1 ? kvpn_empty : v.x, ones & 2 ? kvpn_empty : v.y, ones & 4 ? kvpn_empty : v.z,
                     ones & 8 ? kvpn_empty : v.w};
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void send(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        char *const own = (char *)p.recv + p.rank * p.pitch;
        if (me.part != 0)
            kvpn_take_turn(p, me, me.thread);
        for (uint32_t j = me.thread, round = 0; me.part == 0 && j < words; j += group * me.threads, round++) {
            uint4 v[group];
            uint32_t ones = 0;
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 0; k < group; k++)
                if (j + k * me.threads < words)
                    v[k] = kvpn_fetch16<whole>(p.send, first + j + k * me.threads);
            kvpn_take_turn(p, me, j);
            KVPRIM_NCCL_UNROLL
            for (uint32_t k = 0; k < group; k++)
                if (j + k * me.threads < words) {
                    kvpn_put_all<most>(p, slot_of(p, me, p.rank, round, k), kvpn_sendable(v[k]));
                    kvpn_keep16<whole>(own, first + j + k * me.threads, v[k]);
                    ones |= ones_of(v[k]) << 4 * k;
                }
            kvpn_put_all<most>(p, slot_of(p, me, p.rank, round, group), uint4{ones, 0, 0, 0});
        }
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ bool sum(const kvpn_params &p, kvpn_self &me)
    {
        const uint32_t first = me.block * p.per_block, words = kvpn_block_words(p, me);
        const uint32_t from = kvpn_next(p, me.part);
        char *const to = (char *)p.recv + from * p.pitch;
        for (uint32_t j = me.thread, round = 0; me.part != 0 && j < words; j += group * me.threads, round++) {
            uint4 v[slots] = {};
            uint32_t which = 1u << group;
            char *const at = p.peer[0] + slot_of(p, me, from, round, 0);
            KVPRIM_NCCL_UNROLL
            for (uint32_t i = 0; i < group; i++)
                which |= (uint32_t)(j + i * me.threads < words) << i;
            if (!kvpn_receive<slots, false>(p, me, at, 16 * me.threads, which, (int32_t)from, v))
                return false;
            const uint32_t ones = v[group].x;
            KVPRIM_NCCL_UNROLL
            for (uint32_t i = 0; i < group; i++)
                if (which >> i & 1)
                    kvpn_keep16<whole>(to, first + j + i * me.threads, with_ones(v[i], ones >> 4 * i));
            kvpn_empty_slots<slots>(at, 16 * me.threads, which);
        }
        return true;
    }

    template <class T, int most, bool whole>
    static __device__ __forceinline__ void finish(const kvpn_params &, kvpn_self &)
    {
    }
};

#ifndef KVPRIM_NCCL_EMULATE
/* Before the first access of memory. Nothing here lets the next kernel start early: it may be one of NCCL's, some of
   which (2.28 to 2.30.6) read what is before them in the stream without waiting for it. */
KVPRIM_NCCL_DEVICE void kvpn_wait_for_predecessor(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* When all have taken their turn: thread 0 always has a word. */
KVPRIM_NCCL_DEVICE void kvpn_end_turn(const kvpn_params &p, const kvpn_self &me)
{
    __syncthreads();
    if (me.thread == 0 && me.part == 0)
        p.turn[me.block] = me.turn ^ 1;
}

template <class Way, class T, int most, bool whole>
static __global__ __launch_bounds__(most <= 4 ? (int)Way::threads : (int)Way::threads_of_8,
                                    2) void kvpn_kernel(const __grid_constant__ kvpn_params p)
{
    kvpn_self me = {blockIdx.x, threadIdx.y, threadIdx.x, blockDim.x, 0, 0, 0};
    kvpn_wait_for_predecessor();
    Way::template send<T, most, whole>(p, me);
    if (!Way::turn_last)
        kvpn_end_turn(p, me);
    if (Way::template sum<T, most, whole>(p, me))
        Way::template finish<T, most, whole>(p, me);
    if (Way::turn_last)
        kvpn_end_turn(p, me);
}
#endif

#endif /* KVPRIM_NCCL_KERNELS */
#endif

/* ---- communicator ---- */

#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_NCCL_IMPLEMENTATION)) && !defined(KVPRIM_NCCL_IMPLEMENTED)
#define KVPRIM_NCCL_IMPLEMENTED

#if defined(__has_include)
#if !__has_include(<nccl.h>) || !__has_include(<cuda_runtime_api.h>)
#error "kvprim_nccl.h is implemented with <nccl.h> and <cuda_runtime_api.h>: give the compiler their folders with -I"
#endif
#endif
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "kvprim_nccl.h needs NCCL 2.19 or newer"
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
#define KVPRIM_NCCL_WINDOWS 1
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9) && defined(__CUDACC__) && __cplusplus >= 201703L
#define KVPRIM_NCCL_FAST 1
#include <nccl_device.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    kvpn_alive = 0x6b76706e, /* comm->state: no value that is found in memory by chance */
    kvpn_aborted = 2,
    kvpn_max_ranks = 8, /* of a communicator with kernels */
    kvpn_max_blocks = 128,
    kvpn_protocol = 2,       /* raised when ranks of two builds would choose other ways, or place words elsewhere */
    kvpn_slot_megabytes = 8, /* of a tensor that is summed in one launch; of slots there are four times as much */
    kvpn_page = 4096         /* what windows and buffers are aligned to */
};

#ifndef KVPRIM_NCCL_KERNELS
enum { kvpn_stopped = 1, kvpn_late = 2 };
typedef struct kvpn_control {
    uint32_t stop;
} kvpn_control;
#endif

static kvprim_status kvpn_cuda(const char *function, const char *call, cudaError_t error)
{
    if (error == cudaSuccess)
        return KVPRIM_OK;
    (void)cudaGetLastError(); /* it is reported here */
    return kvprim_fail(KVPRIM_ERROR_CUDA, "%s: %s: %s: %s", function, call, cudaGetErrorName(error),
                       cudaGetErrorString(error));
}

static kvprim_status kvpn_nccl(const char *function, const char *call, ncclResult_t result)
{
    if (result == ncclSuccess)
        return KVPRIM_OK;
    const char *const detail = ncclGetLastError(NULL);
    return kvprim_fail(KVPRIM_ERROR_NCCL, "%s: %s: %s: %s", function, call, ncclGetErrorString(result),
                       detail ? detail : "");
}

/* Seconds, from some time on. */
static double kvpn_now(void)
{
    struct timespec t;
#ifdef CLOCK_MONOTONIC
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
#else /* strict C11 */
    (void)timespec_get(&t, TIME_UTC);
#endif
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

KVPRIM_API kvprim_status kvprim_comm_new_id(kvprim_comm_id *out)
{
    ncclUniqueId id;
    if (!out)
        return kvprim_fail(KVPRIM_ERROR_NULL, "kvprim_comm_new_id: out is NULL");
    const kvprim_status status = kvpn_nccl("kvprim_comm_new_id", "ncclGetUniqueId", ncclGetUniqueId(&id));
    if (status == KVPRIM_OK)
        memcpy(out->bytes, id.internal, sizeof out->bytes);
    return status;
}

static kvprim_status kvpn_check_desc(const kvprim_comm *comm, const kvprim_comm_desc *desc)
{
    const char *const f = "kvprim_comm_init";
    if (!comm || !desc)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s is NULL", f, comm ? "desc" : "comm");
    if (comm->self == comm && comm->state == kvpn_alive)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: comm is in use: destroy it first", f);
    if (desc->world < 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->world is %d, must be at least 1", f, (int)desc->world);
    if (desc->rank < 0 || desc->rank >= desc->world)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->rank is %d, must be 0 to %d as desc->world is %d", f,
                           (int)desc->rank, (int)desc->world - 1, (int)desc->world);
    if (desc->timeout_ms < 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->timeout_ms is %d, must not be negative", f,
                           (int)desc->timeout_ms);
    if (desc->deterministic != 0 && desc->deterministic != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->deterministic is %d, must be 0 or 1", f,
                           (int)desc->deterministic);
    if (desc->no_pdl != 0 && desc->no_pdl != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: desc->no_pdl is %d, must be 0 or 1", f, (int)desc->no_pdl);
    if (desc->buffer_bytes > SIZE_MAX / 2)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: desc->buffer_bytes is %llu, must be at most %llu", f,
                           (unsigned long long)desc->buffer_bytes, (unsigned long long)(SIZE_MAX / 2));
    return KVPRIM_OK;
}

/* Why kernels are off as far as this rank alone can say; NULL: nothing speaks against them. `compiled`: for which
   version of NCCL, 0 without kernels. */
static const char *kvpn_objection(int compiled, int running, int world)
{
    if (compiled == 0)
        return "compiled without them, which takes nvcc, C++17 and NCCL 2.28.9";
    if (compiled != running)
        return "compiled with another version of NCCL";
    if (world == 1)
        return "one rank";
    if (world > kvpn_max_ranks)
        return "more than 8 ranks";
    return NULL;
}

/* What every rank tells every other while they open a communicator. */
typedef struct kvpn_card {
    uint64_t buffer_bytes;
    int32_t deterministic, fast, multiprocessors, version;
    int32_t ok, layout;
    char reserved[32];
} kvpn_card;

/* What init holds while it runs. */
typedef struct kvpn_opening {
    kvprim_comm *comm;
    cudaStream_t stream;
    kvpn_card mine, *all; /* all: of every rank */
    char *on_gpu;         /* all, then mine */
    const char *why_not;  /* kernels are off; NULL: so far they are not */
} kvpn_opening;

static kvprim_status kvpn_exchange(kvpn_opening *o)
{
    const char *const f = "kvprim_comm_init";
    const size_t one = sizeof o->mine, all = one * (size_t)o->comm->world;
    kvprim_status s = kvpn_cuda(f, "cudaMemcpyAsync",
                                cudaMemcpyAsync(o->on_gpu + all, &o->mine, one, cudaMemcpyHostToDevice, o->stream));
    if (s == KVPRIM_OK)
        s = kvpn_nccl(f, "ncclAllGather",
                      ncclAllGather(o->on_gpu + all, o->on_gpu, one, ncclChar, o->comm->nccl, o->stream));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaMemcpyAsync", cudaMemcpyAsync(o->all, o->on_gpu, all, cudaMemcpyDeviceToHost, o->stream));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaStreamSynchronize", cudaStreamSynchronize(o->stream));
    return s;
}

/* Whether a step went well on every rank: they give up together, where one alone would leave the others waiting. */
static kvprim_status kvpn_together(kvpn_opening *o, kvprim_status mine)
{
    o->mine.ok = mine == KVPRIM_OK;
    const kvprim_status s = kvpn_exchange(o);
    if (mine != KVPRIM_OK || s != KVPRIM_OK)
        return mine != KVPRIM_OK ? mine : s;
    for (int r = 0; r < o->comm->world; r++)
        if (!o->all[r].ok)
            return kvprim_fail(KVPRIM_ERROR_CUDA, "kvprim_comm_init: rank %d failed, its own message says why", r);
    return KVPRIM_OK;
}

/* A block's words begin at a multiple of 8, that is 128 bytes: so many slots it has. */
static void kvpn_share_slots(kvprim_comm *comm)
{
    comm->block_slots = ((uint32_t)kvpn_slot_megabytes << 20) / (16 * 8 * (uint32_t)comm->world * comm->blocks) * 8;
}

/* The first exchange: what must be the same everywhere, and what all can do. */
static kvprim_status kvpn_compare(kvpn_opening *o)
{
    const kvprim_status s = kvpn_exchange(o);
    if (s != KVPRIM_OK)
        return s;
    int least = o->mine.multiprocessors;
    for (int r = 0; r < o->comm->world; r++) {
        const kvpn_card *const card = &o->all[r];
        if (card->layout != o->mine.layout)
            return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "kvprim_comm_init: rank %d runs another version of kvprim", r);
        if (card->buffer_bytes != o->mine.buffer_bytes)
            return kvprim_fail(KVPRIM_ERROR_SIZE,
                               "kvprim_comm_init: desc->buffer_bytes is %llu, but %llu on rank %d: must be the same",
                               (unsigned long long)o->mine.buffer_bytes, (unsigned long long)card->buffer_bytes, r);
        if (card->deterministic != o->mine.deterministic)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                               "kvprim_comm_init: desc->deterministic is %d, but %d on rank %d: must be the same",
                               (int)o->mine.deterministic, (int)card->deterministic, r);
        if (!o->why_not && !card->fast)
            o->why_not = "another rank has none";
        if (!o->why_not && card->version != o->mine.version)
            o->why_not = "ranks run different versions of NCCL";
        if (card->multiprocessors < least)
            least = card->multiprocessors;
    }
    o->comm->blocks = (uint32_t)(least < kvpn_max_blocks ? least : kvpn_max_blocks);
    kvpn_share_slots(o->comm);
    return KVPRIM_OK;
}

static size_t kvpn_slots_bytes(const kvprim_comm *comm)
{
    return (size_t)4 * 16 * (size_t)comm->world * comm->blocks * comm->block_slots;
}

#ifdef KVPRIM_NCCL_WINDOWS
/* Registers what was allocated. A window that NCCL does not give is no error: collectives work without. */
static kvprim_status kvpn_register(kvpn_opening *o, size_t bytes)
{
    ncclWindow_t window = NULL;
    const ncclResult_t result =
        ncclCommWindowRegister(o->comm->nccl, o->comm->memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
    o->mine.fast = result == ncclSuccess && window != NULL;
    o->comm->window = window;
    const kvprim_status s = kvpn_exchange(o);
    if (s != KVPRIM_OK)
        return s;
    for (int r = 0; r < o->comm->world; r++)
        if (!o->all[r].fast && !o->why_not)
            o->why_not = "NCCL gives no symmetric window";
    return KVPRIM_OK;
}
#endif

/* One allocation: a page of the blocks' turns and of kvpn_ended, slots, the caller's buffer. */
static kvprim_status kvpn_allocate(kvpn_opening *o)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = o->comm;
    const size_t own = o->why_not ? 0 : kvpn_page + kvpn_slots_bytes(comm);
    const size_t bytes = own + (comm->buffer_bytes + kvpn_page - 1) / kvpn_page * kvpn_page;
    kvprim_status s = KVPRIM_OK;
    if (bytes == 0)
        return KVPRIM_OK;
#ifdef KVPRIM_NCCL_WINDOWS
    s = kvpn_nccl(f, "ncclMemAlloc", ncclMemAlloc(&comm->memory, bytes));
#else
    s = kvpn_cuda(f, "cudaMalloc", cudaMalloc(&comm->memory, bytes));
#endif
    if (s == KVPRIM_OK && own > 0) {
        s = kvpn_cuda(f, "cudaMemsetAsync", cudaMemsetAsync(comm->memory, 0, kvpn_page, o->stream));
        if (s == KVPRIM_OK) /* empty slots */
            s = kvpn_cuda(f, "cudaMemsetAsync",
                          cudaMemsetAsync((char *)comm->memory + kvpn_page, 0xff, own - kvpn_page, o->stream));
    }
    s = kvpn_together(o, s);
    if (s != KVPRIM_OK)
        return s;
    comm->buffer = comm->buffer_bytes ? (char *)comm->memory + own : NULL;
#ifdef KVPRIM_NCCL_WINDOWS
    int running;
    (void)ncclGetVersion(&running);
    if (running >= NCCL_VERSION(2, 27, 0))
        s = kvpn_register(o, bytes);
#endif
    return s;
}

#ifdef KVPRIM_NCCL_FAST
extern "C++" {
typedef enum kvpn_way {
    kvpn_by_nccl,
    kvpn_by_one_shot,
    kvpn_by_two_shot,
    kvpn_by_scatter,
    kvpn_by_gather,
    kvpn_by_gather_many
} kvpn_way;

typedef void (*kvpn_kernel_of)(kvpn_params);

template <class Way, class T, int most> static kvpn_kernel_of kvpn_pick(bool whole)
{
    return whole ? kvpn_kernel<Way, T, most, true> : kvpn_kernel<Way, T, most, false>;
}

template <class Way, class T> static kvpn_kernel_of kvpn_pick(int world, bool whole)
{
    return world == 2   ? kvpn_pick<Way, T, 2>(whole)
           : world <= 4 ? kvpn_pick<Way, T, 4>(whole)
                        : kvpn_pick<Way, T, 8>(whole);
}

template <class Way> static kvpn_kernel_of kvpn_pick(kvprim_dtype dtype, int world, bool whole)
{
    return dtype == KVPRIM_F32    ? kvpn_pick<Way, kvpn_f32>(world, whole)
           : dtype == KVPRIM_BF16 ? kvpn_pick<Way, kvpn_bf16>(world, whole)
                                  : kvpn_pick<Way, kvpn_f16>(world, whole);
}

static kvpn_kernel_of kvpn_pick(kvpn_way way, kvprim_dtype dtype, int world, bool whole)
{
    return way == kvpn_by_gather        ? kvpn_pick<kvpn_gather_all, kvpn_f32>(world, whole)
           : way == kvpn_by_gather_many ? kvpn_pick<kvpn_gather_many, kvpn_f32>(world, whole)
           : way == kvpn_by_scatter     ? kvpn_pick<kvpn_scatter>(dtype, world, whole)
           : way == kvpn_by_one_shot    ? kvpn_pick<kvpn_one_shot>(dtype, world, whole)
                                        : kvpn_pick<kvpn_two_shot>(dtype, world, whole);
}

/* CUDA loads a kernel at its first launch, which then may wait for a kernel that waits for another rank. */
static kvprim_status kvpn_load_kernels(int world)
{
    static const kvprim_dtype types[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32};
    kvprim_status s = KVPRIM_OK;
    for (int way = kvpn_by_one_shot; way <= kvpn_by_gather_many; way++)
        for (int k = 0; k < 6 && s == KVPRIM_OK; k++) {
            cudaFuncAttributes attributes;
            s = kvpn_cuda("kvprim_comm_init", "cudaFuncGetAttributes",
                          cudaFuncGetAttributes(
                              &attributes, (const void *)kvpn_pick((kvpn_way)way, types[k / 2], world, k % 2 == 1)));
        }
    return s;
}

/* Whether every kernel here waits for its predecessor, whichever of this file's architectures the driver picks, and
   such launches can be captured. */
static bool kvpn_has_pdl(void)
{
    const int architectures[] = {__CUDA_ARCH_LIST__};
    int driver;
    for (int architecture : architectures)
        if (architecture < 900)
            return false;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
}

/* Every rank's slots, as this GPU sees them. */
static __global__ void kvpn_find_peers(ncclWindow_t window, uint32_t world, void **peer)
{
    if (threadIdx.x < world)
        peer[threadIdx.x] = ncclGetLsaPointer(window, kvpn_page, (int)threadIdx.x);
}
}

static kvprim_status kvpn_connect(kvpn_opening *o)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = o->comm;
    void *on_gpu, *const *const peers = (void *const *)o->on_gpu;
    if (!o->why_not && ncclTeamLsa(comm->nccl).nRanks != comm->world)
        o->why_not = "not all ranks write to each other's memory";
    if (o->why_not) /* the same on all ranks */
        return KVPRIM_OK;
    kvprim_status s = kvpn_cuda(
        f, "cudaHostAlloc",
        cudaHostAlloc((void **)&comm->control, sizeof *comm->control, cudaHostAllocMapped | cudaHostAllocPortable));
    if (s == KVPRIM_OK) {
        memset(comm->control, 0, sizeof *comm->control);
        s = kvpn_cuda(f, "cudaHostGetDevicePointer", cudaHostGetDevicePointer(&on_gpu, comm->control, 0));
        comm->control_on_gpu = (kvpn_control *)on_gpu;
    }
    if (s == KVPRIM_OK) {
        kvpn_find_peers<<<1, kvpn_max_ranks, 0, o->stream>>>((ncclWindow_t)comm->window, (uint32_t)comm->world,
                                                             (void **)o->on_gpu);
        s = kvpn_cuda(f, "kernel launch", cudaGetLastError());
    }
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaMemcpyAsync",
                      cudaMemcpyAsync(comm->peer, peers, sizeof(void *) * (size_t)comm->world, cudaMemcpyDeviceToHost,
                                      o->stream));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaStreamSynchronize", cudaStreamSynchronize(o->stream));
    if (s == KVPRIM_OK)
        s = kvpn_load_kernels(comm->world);
    return kvpn_together(o, s);
}
#endif

#ifdef KVPRIM_NCCL_FAST
/* The largest tensor in bytes that one shot is the fastest for, and two; of reduce_scatter what each rank gives, of
   gathers the result, odd where a rank's part is no multiple of 16. Measured on 2 and 4 H200s, of more ranks estimated.
   Another number here: another kvpn_protocol. */
typedef struct kvpn_limits {
    size_t one_shot, two_shot, scatter, gather, gather_odd, gather_many;
} kvpn_limits;

static kvpn_limits kvpn_limits_of(int world)
{
    const kvpn_limits two = {2 << 20, 64 << 20, 64 << 20, 256 << 10, 4 << 20, 64 << 20},
                      four = {128 << 10, 32 << 20, 64 << 20, 256 << 10, 1 << 20, 8 << 20},
                      eight = {32 << 10, 8 << 20, 16 << 20, 256 << 10, 512 << 10, 4 << 20};
    return world == 2 ? two : world <= 4 ? four : eight;
}

static void kvpn_describe_kernels(const kvprim_comm *comm, char *text, size_t bytes)
{
    const kvpn_limits limits = kvpn_limits_of(comm->world);
    const unsigned long long all_reduce = limits.two_shot, scatter = limits.scatter, gather = limits.gather_many;
    const int used = snprintf(text, bytes, "on, %s, all_gather up to %llu bytes received",
                              comm->pdl ? "dependent launch" : "no dependent launch", gather);
    if (comm->deterministic)
        (void)snprintf(text + used, bytes - (size_t)used, ", sums of any size");
    else
        (void)snprintf(text + used, bytes - (size_t)used, ", all_reduce and reduce_scatter up to %llu and %llu sent",
                       all_reduce, scatter);
}
#endif

static void kvpn_describe(kvpn_opening *o, int running)
{
    char kernels[256];
    kvprim_comm *const comm = o->comm;
    struct cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, comm->device) != cudaSuccess)
        memcpy(device.name, "?", 2);
    (void)snprintf(kernels, sizeof kernels, "off: %s", o->why_not ? o->why_not : "compiled without them");
#ifdef KVPRIM_NCCL_FAST
    if (comm->peer[0])
        kvpn_describe_kernels(comm, kernels, sizeof kernels);
#endif
    (void)snprintf(comm->description, sizeof comm->description,
                   "rank %d of %d on device %d, %s; NCCL %d.%d.%d, compiled with %d.%d.%d; buffer of %llu bytes, %s; "
                   "own kernels %s",
                   (int)comm->rank, (int)comm->world, (int)comm->device, device.name, running / 10000,
                   running / 100 % 100, running % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH,
                   (unsigned long long)comm->buffer_bytes,
                   comm->window ? "in a symmetric window" : "no symmetric window", kernels);
}

/* After ncclCommInitRank. */
static kvprim_status kvpn_open(kvpn_opening *o, const kvprim_comm_desc *desc)
{
    const char *const f = "kvprim_comm_init";
    kvprim_comm *const comm = o->comm;
    const size_t cards = sizeof *o->all * (size_t)comm->world;
    int running = 0, compiled = 0;
    kvprim_status s = kvpn_nccl(f, "ncclGetVersion", ncclGetVersion(&running));
#ifdef KVPRIM_NCCL_FAST
    compiled = NCCL_VERSION_CODE;
#endif
    o->why_not = kvpn_objection(compiled, running, comm->world);
    o->mine.buffer_bytes = desc->buffer_bytes;
    o->mine.deterministic = desc->deterministic;
    o->mine.fast = !o->why_not;
    o->mine.version = running;
    o->mine.layout = KVPRIM_VERSION_MAJOR << 16 | KVPRIM_VERSION_MINOR << 8 | kvpn_protocol;
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaDeviceGetAttribute",
                      cudaDeviceGetAttribute(&o->mine.multiprocessors, cudaDevAttrMultiProcessorCount, comm->device));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&o->stream, cudaStreamNonBlocking));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaHostAlloc", cudaHostAlloc((void **)&o->all, cards, cudaHostAllocDefault));
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaMalloc", cudaMalloc((void **)&o->on_gpu, cards + sizeof o->mine));
    for (int k = 0; k < 2 && s == KVPRIM_OK; k++)
        s = kvpn_cuda(f, "cudaEventCreateWithFlags", cudaEventCreateWithFlags(&comm->watch[k], cudaEventDisableTiming));
    if (s == KVPRIM_OK)
        s = kvpn_compare(o);
    if (s == KVPRIM_OK)
        s = kvpn_allocate(o);
#ifdef KVPRIM_NCCL_FAST
    if (s == KVPRIM_OK)
        s = kvpn_connect(o);
    comm->pdl = comm->peer[0] && !desc->no_pdl && kvpn_has_pdl();
#endif
    if (s == KVPRIM_OK && comm->deterministic && comm->world > 1 && !comm->peer[0])
        s = kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "%s: desc->deterministic is 1, and kernels for it are off: %s", f,
                        o->why_not);
    if (s == KVPRIM_OK)
        kvpn_describe(o, running);
    return s;
}

/* What is left when NCCL's communicator is gone. Errors are not reported: there is nothing to be done about them. */
static void kvpn_free_memory(kvprim_comm *comm)
{
#ifdef KVPRIM_NCCL_WINDOWS
    if (comm->memory)
        (void)ncclMemFree(comm->memory);
#else
    if (comm->memory)
        (void)cudaFree(comm->memory);
#endif
    comm->memory = NULL;
}

static void kvpn_free_rest(kvprim_comm *comm)
{
    if (comm->control)
        (void)cudaFreeHost(comm->control);
    for (int k = 0; k < 2; k++)
        if (comm->watch[k])
            (void)cudaEventDestroy(comm->watch[k]);
    memset(comm, 0, sizeof *comm);
}

KVPRIM_API kvprim_status kvprim_comm_init(kvprim_comm *comm, const kvprim_comm_desc *desc)
{
    const char *const f = "kvprim_comm_init";
    KVPRIM_RANGE(f);
    kvpn_opening o;
    ncclUniqueId id;
    int device;
    kvprim_status s = kvpn_check_desc(comm, desc);
    if (s == KVPRIM_OK)
        s = kvpn_cuda(f, "cudaGetDevice", cudaGetDevice(&device));
    if (s != KVPRIM_OK)
        return s;
    memset(&o, 0, sizeof o);
    memset(comm, 0, sizeof *comm);
    o.comm = comm;
    comm->rank = desc->rank, comm->world = desc->world, comm->device = device;
    comm->timeout_ms = desc->timeout_ms ? desc->timeout_ms : 30000;
    comm->deterministic = desc->deterministic;
    comm->buffer_bytes = desc->buffer_bytes;
    memcpy(id.internal, desc->id.bytes, sizeof id.internal);
    s = kvpn_nccl(f, "ncclCommInitRank", ncclCommInitRank(&comm->nccl, comm->world, id, comm->rank));
    if (s == KVPRIM_OK)
        s = kvpn_open(&o, desc);
    if (o.on_gpu)
        (void)cudaFree(o.on_gpu);
    if (o.all)
        (void)cudaFreeHost(o.all);
    if (o.stream)
        (void)cudaStreamDestroy(o.stream);
    if (s != KVPRIM_OK) {
        if (comm->nccl)
            (void)ncclCommAbort(comm->nccl);
        kvpn_free_memory(comm);
        kvpn_free_rest(comm);
        return s;
    }
    comm->self = comm;
    __atomic_store_n(&comm->state, kvpn_alive, __ATOMIC_SEQ_CST);
    return KVPRIM_OK;
}

static kvprim_status kvpn_not_alive(const char *function, const kvprim_comm *comm)
{
    if (!comm)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: comm is NULL", function);
    return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: comm was not initialised, was moved, or has ended", function);
}

static bool kvpn_is_alive(const kvprim_comm *comm)
{
    return comm && comm->self == comm && __atomic_load_n(&comm->state, __ATOMIC_SEQ_CST) == kvpn_alive;
}

/* Of several threads that end a communicator one succeeds. */
static bool kvpn_end(kvprim_comm *comm)
{
    int32_t alive = kvpn_alive;
    return kvpn_is_alive(comm) &&
           __atomic_compare_exchange_n(&comm->state, &alive, kvpn_aborted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void kvpn_stop(kvprim_comm *comm)
{
    if (comm->control)
        __atomic_store_n(&comm->control->stop, (uint32_t)kvpn_stopped, __ATOMIC_SEQ_CST);
}

/* Kernels of ours write to other ranks' memory until they are over, and ncclCommAbort takes it from under them. They
   may be queued behind kernels of NCCL's, which have to be stopped first. */
static kvprim_status kvpn_quieten(kvprim_comm *comm)
{
#ifdef KVPRIM_NCCL_FAST
    if (comm->peer[0]) {
        const kvprim_status s =
            kvpn_nccl("kvprim_comm_abort", "ncclCommRevoke", ncclCommRevoke(comm->nccl, NCCL_REVOKE_DEFAULT));
        return s == KVPRIM_OK ? kvpn_cuda("kvprim_comm_abort", "cudaDeviceSynchronize", cudaDeviceSynchronize()) : s;
    }
#endif
    (void)comm;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_comm_abort(kvprim_comm *comm)
{
    const char *const f = "kvprim_comm_abort";
    KVPRIM_RANGE(f);
    int device;
    if (!kvpn_end(comm))
        return kvpn_not_alive(f, comm);
    kvpn_stop(comm);
    const double begun = kvpn_now();
    while (__atomic_load_n(&comm->busy, __ATOMIC_SEQ_CST) && kvpn_now() - begun < 1) {
    }
    kvprim_status s = kvpn_cuda(f, "cudaGetDevice", cudaGetDevice(&device));
    (void)cudaSetDevice(comm->device);
    const kvprim_status quiet = kvpn_quieten(comm);
    s = s == KVPRIM_OK ? quiet : s;
    const kvprim_status aborted = kvpn_nccl(f, "ncclCommAbort", ncclCommAbort(comm->nccl));
    s = s == KVPRIM_OK ? aborted : s;
    kvpn_free_memory(comm);
    kvpn_free_rest(comm);
    (void)cudaSetDevice(device);
    return s;
}

KVPRIM_API kvprim_status kvprim_comm_destroy(kvprim_comm *comm)
{
    const char *const f = "kvprim_comm_destroy";
    KVPRIM_RANGE(f);
    int device;
    if (!kvpn_end(comm))
        return kvpn_not_alive(f, comm);
    kvprim_status s = kvpn_cuda(f, "cudaGetDevice", cudaGetDevice(&device));
    (void)cudaSetDevice(comm->device);
    const kvprim_status idle = kvpn_cuda(f, "cudaDeviceSynchronize", cudaDeviceSynchronize());
    s = s == KVPRIM_OK ? idle : s;
#ifdef KVPRIM_NCCL_WINDOWS
    if (comm->window) {
        const kvprim_status gone =
            kvpn_nccl(f, "ncclCommWindowDeregister", ncclCommWindowDeregister(comm->nccl, (ncclWindow_t)comm->window));
        s = s == KVPRIM_OK ? gone : s;
    }
#endif
    kvpn_free_memory(comm);
    const kvprim_status destroyed = kvpn_nccl(f, "ncclCommDestroy", ncclCommDestroy(comm->nccl));
    s = s == KVPRIM_OK ? destroyed : s;
    kvpn_free_rest(comm);
    (void)cudaSetDevice(device);
    return s;
}

/* ---- watching ---- */

/* A wait of ours that was given up. */
static kvprim_status kvpn_check_waits(const char *function, const kvprim_comm *comm)
{
    const uint32_t stop = comm->control ? __atomic_load_n(&comm->control->stop, __ATOMIC_SEQ_CST) : 0;
    if (stop < kvpn_late)
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_TIMEOUT, "%s: rank %d waited %d ms for rank %d", function, (int)comm->rank,
                       (int)comm->timeout_ms, (int)(stop - kvpn_late));
}

/* NCCL's kernels wait without end and say nothing. An event is recorded behind each of its collectives, in turns with
   another that stays where it is until kvprim_comm_check finds it done: that one's age counts. */
static void kvpn_watch(kvprim_comm *comm, cudaStream_t stream)
{
    if (cudaEventRecord(comm->watch[comm->watch_next], stream) == cudaSuccess)
        comm->watched_since[comm->watch_next] = kvpn_now();
}

static kvprim_status kvpn_check_watch(const char *function, kvprim_comm *comm)
{
    const cudaError_t before = cudaPeekAtLastError();
    for (int k = 0; k < 2; k++)
        if (comm->watched_since[k] > 0 && cudaEventQuery(comm->watch[k]) != cudaErrorNotReady)
            comm->watched_since[k] = 0;
    if (before == cudaSuccess)
        (void)cudaGetLastError(); /* that an event is not ready is no error of anyone's */
    int kept = !comm->watch_next;
    if (!(comm->watched_since[kept] > 0) && comm->watched_since[comm->watch_next] > 0) {
        kept = comm->watch_next;
        comm->watch_next = !kept;
    }
    const double age = kvpn_now() - comm->watched_since[kept];
    if (comm->watched_since[kept] > 0 && age > 1e-3 * comm->timeout_ms)
        return kvprim_fail(KVPRIM_ERROR_TIMEOUT,
                           "%s: rank %d: a collective of NCCL's was not done %.0f ms after its call; "
                           "NCCL does not say which other rank it waits for",
                           function, (int)comm->rank, 1e3 * age);
    return KVPRIM_OK;
}

static void kvpn_leave(kvprim_comm *comm)
{
    (void)__atomic_sub_fetch(&comm->busy, 1, __ATOMIC_SEQ_CST);
}

/* Before kvpn_leave: comm is alive, and abort waits. */
static kvprim_status kvpn_enter(const char *function, kvprim_comm *comm)
{
    if (!kvpn_is_alive(comm))
        return kvpn_not_alive(function, comm);
    (void)__atomic_add_fetch(&comm->busy, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&comm->state, __ATOMIC_SEQ_CST) == kvpn_alive)
        return KVPRIM_OK;
    kvpn_leave(comm);
    return kvpn_not_alive(function, comm);
}

KVPRIM_API kvprim_status kvprim_comm_check(kvprim_comm *comm)
{
    const char *const f = "kvprim_comm_check";
    kvprim_status s = kvpn_enter(f, comm);
    if (s != KVPRIM_OK)
        return s;
    s = kvpn_check_waits(f, comm);
    if (s == KVPRIM_OK) {
        ncclResult_t result = ncclSuccess;
        s = kvpn_nccl(f, "ncclCommGetAsyncError", ncclCommGetAsyncError(comm->nccl, &result));
        if (s == KVPRIM_OK && result != ncclInProgress)
            s = kvpn_nccl(f, "an earlier collective", result);
    }
    if (s == KVPRIM_OK)
        s = kvpn_check_watch(f, comm);
    kvpn_leave(comm);
    return s;
}

KVPRIM_API void *kvprim_comm_buffer(kvprim_comm *comm, size_t *bytes)
{
    const bool alive = kvpn_is_alive(comm);
    if (bytes)
        *bytes = alive ? comm->buffer_bytes : 0;
    if (!alive)
        (void)kvpn_not_alive("kvprim_comm_buffer", comm);
    return alive ? comm->buffer : NULL;
}

KVPRIM_API const char *kvprim_comm_describe(const kvprim_comm *comm)
{
    return kvpn_is_alive(comm) ? comm->description : "not alive: not initialised, moved, or ended";
}

/* ---- collectives ---- */

/* Name, bytes, and what NCCL calls them; -1: not this version of NCCL. */
typedef struct kvpn_type {
    const char *name;
    size_t bytes;
    int nccl;
} kvpn_type;

static kvpn_type kvpn_type_of(kvprim_dtype dtype)
{
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
    const int e4m3 = ncclFloat8e4m3, e5m2 = ncclFloat8e5m2;
#else
    const int e4m3 = -1, e5m2 = -1;
#endif
    const int bf16 = 9; /* ncclBfloat16, which the headers of NCCL 2.19 keep from C */
    const kvpn_type types[] = {{"U8", 1, ncclUint8},    {"F16", 2, ncclFloat16}, {"BF16", 2, bf16},
                               {"F32", 4, ncclFloat32}, {"F64", 8, ncclFloat64}, {"INT8", 1, ncclInt8},
                               {"INT32", 4, ncclInt32}, {"INT64", 8, ncclInt64}, {"F8E4M3", 1, e4m3},
                               {"F8E5M2", 1, e5m2}};
    const kvpn_type none = {NULL, 0, -1};
    return dtype >= KVPRIM_U8 && dtype <= KVPRIM_F8E5M2 ? types[dtype] : none;
}

/* A collective call: what is checked, and what NCCL and the kernels are called with. Counts in elements. */
typedef struct kvpn_call {
    const char *function;
    kvprim_comm *comm;
    void *recv;
    const void *send;
    size_t recv_count, send_count, count; /* recv_count or send_count 0: there is no such side */
    kvprim_dtype dtype;
    int op, has_op;
    int peer, has_peer;
    cudaStream_t stream;
    int captured;
    ncclDataType_t type;
    size_t element;
} kvpn_call;

/* The stream's device cannot be asked for while the stream is captured; CUDA then refuses what does not fit. */
/* NULL: the legacy default stream, however the file is compiled. */
static cudaStream_t kvpn_stream_of(const kvpn_call *c)
{
    return c->stream ? c->stream : cudaStreamLegacy;
}

static kvprim_status kvpn_check_device(kvpn_call *c)
{
    int device = -1;
    enum cudaStreamCaptureStatus capture;
    kvprim_status s = kvpn_cuda(c->function, "cudaGetDevice", cudaGetDevice(&device));
    if (s == KVPRIM_OK && device != c->comm->device)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: the current device is %d, the communicator's %d", c->function,
                           device, (int)c->comm->device);
    if (s == KVPRIM_OK)
        s = kvpn_cuda(c->function, "stream: cudaStreamIsCapturing", cudaStreamIsCapturing(kvpn_stream_of(c), &capture));
    c->captured = s != KVPRIM_OK || capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (s == KVPRIM_OK && c->stream && c->stream != c->comm->checked_stream && !c->captured) {
        s = kvpn_cuda(c->function, "stream: cudaStreamGetDevice", cudaStreamGetDevice(c->stream, &device));
        if (s == KVPRIM_OK && device != c->comm->device)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: stream is one of device %d, the communicator is on %d",
                               c->function, device, (int)c->comm->device);
        if (s == KVPRIM_OK)
            c->comm->checked_stream = c->stream;
    }
#endif
    return s;
}

static kvprim_status kvpn_check_pointer(const kvpn_call *c, const char *name, const void *pointer, size_t count)
{
    if (!pointer)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s is NULL and the count %llu", c->function, name,
                           (unsigned long long)c->count);
    if ((uintptr_t)pointer % c->element)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s is %p, not aligned to its elements of %d bytes", c->function,
                           name, (void *)(uintptr_t)pointer, (int)c->element);
    if (count * c->element > UINTPTR_MAX - (uintptr_t)pointer)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: %s is %p and has %llu elements: past the end of memory", c->function,
                           name, (void *)(uintptr_t)pointer, (unsigned long long)count);
    return KVPRIM_OK;
}

/* recv and send apart, or in place: recv's byte recv_at is send's byte send_at. */
static kvprim_status kvpn_check_aliasing(const kvpn_call *c, size_t recv_at, size_t send_at)
{
    const uintptr_t recv = (uintptr_t)c->recv, send = (uintptr_t)c->send;
    const size_t recv_bytes = c->recv_count * c->element, send_bytes = c->send_count * c->element;
    if (recv + recv_bytes <= send || send + send_bytes <= recv || recv + recv_at == send + send_at)
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP,
                       "%s: recv %p, %llu bytes, and send %p, %llu bytes, overlap and are not in place", c->function,
                       c->recv, (unsigned long long)recv_bytes, (void *)send, (unsigned long long)send_bytes);
}

/* All but aliasing. Fills in type and element. `times`: of count, on the larger side. */
static kvprim_status kvpn_check_call(kvpn_call *c, size_t times)
{
    const kvpn_type type = kvpn_type_of(c->dtype);
    kvprim_status s;
    if (!type.name)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: dtype is %d, which is none", c->function, (int)c->dtype);
    if (type.nccl < 0)
        return kvprim_fail(KVPRIM_ERROR_UNSUPPORTED, "%s: dtype is %s, for which NCCL %d.%d is too old", c->function,
                           type.name, NCCL_MAJOR, NCCL_MINOR);
    if (c->has_op && (c->op < KVPRIM_SUM || c->op > KVPRIM_AVG))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: op is %d, which is none", c->function, c->op);
    if (c->has_peer && (c->peer < 0 || c->peer >= c->comm->world))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: the other rank is %d, must be 0 to %d", c->function, c->peer,
                           (int)c->comm->world - 1);
    c->type = (ncclDataType_t)type.nccl;
    c->element = type.bytes;
    if (c->count > SIZE_MAX / type.bytes / times)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: the count is %llu: too many bytes", c->function,
                           (unsigned long long)c->count);
    s = kvpn_check_device(c);
    if (s == KVPRIM_OK && c->recv_count)
        s = kvpn_check_pointer(c, "recv", c->recv, c->recv_count);
    if (s == KVPRIM_OK && c->send_count)
        s = kvpn_check_pointer(c, "send", c->send, c->send_count);
    if (s == KVPRIM_OK)
        s = kvpn_check_waits(c->function, c->comm);
    return s;
}

static ncclRedOp_t kvpn_op_of(int op)
{
    static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclProd, ncclMin, ncclAvg};
    return ops[op];
}

static kvprim_status kvpn_done(const kvpn_call *c, const char *call, ncclResult_t result)
{
    const kvprim_status s = kvpn_nccl(c->function, call, result);
    c->comm->behind_nccl = 1;
    if (s == KVPRIM_OK && !c->captured)
        kvpn_watch(c->comm, kvpn_stream_of(c));
    return s;
}

#ifdef KVPRIM_NCCL_FAST
extern "C++" {

/* ---- which kernel, and in what shape ---- */

static_assert(kvpn_ended >= (int)kvpn_max_blocks && 4 * (kvpn_ended + 1) <= kvpn_page,
              "behind the turns, in their page");
static_assert((kvpn_slot_megabytes << 20) / (16 * 8 * (int)kvpn_max_world * kvpn_max_blocks) * 8 >=
                  32 * (int)kvpn_gather_many::slots,
              "a block has slots for a warp");

static uint32_t kvpn_most_threads(int world)
{
    return world <= 4 ? kvpn_max_threads : kvpn_less_threads;
}

/* Of a part of a block of gather_many, which has slots in each area for all of them. */
static uint32_t kvpn_most_threads_of_many(const kvprim_comm *comm)
{
    const uint32_t held = comm->block_slots / kvpn_gather_many::slots / 32 * 32,
                   run = (uint32_t)kvpn_gather_many::threads / (uint32_t)comm->world / 32 * 32;
    return held < run ? held : run;
}

/* What the slots hold of a tensor, in bytes: by the way and not by what pays. */
static size_t kvpn_room(const kvprim_comm *comm, kvpn_way way)
{
    const size_t slots = (size_t)16 * comm->blocks * comm->block_slots;
    const uint32_t threads = kvpn_most_threads_of_many(comm);
    switch (way) {
    case kvpn_by_two_shot:
        return slots * (size_t)comm->world;
    case kvpn_by_gather:
        return slots / 2;
    case kvpn_by_gather_many: /* 2: the areas */
        return (size_t)16 * comm->blocks * 2 * (comm->block_slots / (kvpn_gather_many::slots * threads)) *
               (kvpn_gather_many::group * threads);
    default:
        return slots;
    }
}

/* The same on every rank: it depends on nothing that may differ. */
static bool kvpn_has_kernels(const kvprim_comm *comm, kvprim_dtype dtype, int op)
{
    return comm->peer[0] && op == KVPRIM_SUM && (dtype == KVPRIM_F16 || dtype == KVPRIM_BF16 || dtype == KVPRIM_F32);
}

static kvpn_way kvpn_choose(const kvprim_comm *comm, size_t bytes, kvprim_dtype dtype, int op)
{
    const kvpn_limits limits = kvpn_limits_of(comm->world);
    if (!kvpn_has_kernels(comm, dtype, op))
        return kvpn_by_nccl;
    if (bytes <= limits.one_shot && bytes <= kvpn_room(comm, kvpn_by_one_shot))
        return kvpn_by_one_shot;
    return bytes <= limits.two_shot || comm->deterministic ? kvpn_by_two_shot : kvpn_by_nccl;
}

/* `bytes`: of the result. */
static kvpn_way kvpn_choose_scatter(const kvprim_comm *comm, size_t bytes, kvprim_dtype dtype, int op)
{
    if (!kvpn_has_kernels(comm, dtype, op))
        return kvpn_by_nccl;
    return bytes <= kvpn_limits_of(comm->world).scatter / (size_t)comm->world || comm->deterministic ? kvpn_by_scatter
                                                                                                     : kvpn_by_nccl;
}

/* `bytes`: of each rank. */
static kvpn_way kvpn_choose_gather(const kvprim_comm *comm, size_t bytes)
{
    const kvpn_limits limits = kvpn_limits_of(comm->world);
    const size_t all = bytes * (size_t)comm->world;
    if (!comm->peer[0])
        return kvpn_by_nccl;
    const bool odd = bytes % 16 != 0;
    if (all <= (odd ? limits.gather_odd : limits.gather) && bytes <= kvpn_room(comm, kvpn_by_gather))
        return kvpn_by_gather;
    return !odd && all <= limits.gather_many ? kvpn_by_gather_many : kvpn_by_nccl;
}

/* Few words: small blocks on many multiprocessors. Many: as many blocks as there are slots for. A block's words begin
   at a multiple of 8, that is 128 bytes. */
static void kvpn_shape(const kvprim_comm *comm, kvpn_params *p, uint32_t *blocks, uint32_t *threads)
{
    for (*threads = 128; *threads < kvpn_most_threads(comm->world) && p->slice > comm->blocks * *threads;)
        *threads *= 2;
    *blocks = (p->slice + *threads - 1) / *threads;
    if (*blocks > comm->blocks)
        *blocks = comm->blocks;
    p->per_block = ((p->slice + *blocks - 1) / *blocks + 7) / 8 * 8;
    *blocks = (p->slice + p->per_block - 1) / p->per_block;
}

/* Of gather_many: all multiprocessors, and threads for a group of words each. */
static void kvpn_shape_many(const kvprim_comm *comm, kvpn_params *p, uint32_t *blocks, uint32_t *threads)
{
    const uint32_t most = kvpn_most_threads_of_many(comm);
    p->per_block = ((p->slice + comm->blocks - 1) / comm->blocks + 7) / 8 * 8;
    for (*threads = 32; *threads < most && kvpn_gather_many::group * *threads < p->per_block;)
        *threads += 32;
    *blocks = (p->slice + p->per_block - 1) / p->per_block;
}

/* Behind a kernel of NCCL's without dependent launch: it may not have waited for what is ahead of it. */
static kvprim_status kvpn_start(const kvpn_call *c, kvpn_kernel_of kernel, uint32_t blocks, dim3 threads,
                                kvpn_params *p)
{
    cudaLaunchAttribute pdl;
    cudaLaunchConfig_t config = {};
    void *args[] = {p};
    config.gridDim = dim3(blocks);
    config.blockDim = threads;
    config.stream = kvpn_stream_of(c);
    config.attrs = &pdl;
    config.numAttrs = c->comm->pdl && !c->comm->behind_nccl;
    c->comm->behind_nccl = 0;
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    return kvpn_cuda(c->function, "kernel launch", cudaLaunchKernelExC(&config, (const void *)kernel, args));
}

/* `pitch`: of gathers and scatters, the elements from one rank's part to the next one's. */
static kvprim_status kvpn_launch(const kvpn_call *c, kvpn_way way, size_t pitch)
{
    const kvprim_comm *const comm = c->comm;
    const bool gathers = way == kvpn_by_gather || way == kvpn_by_gather_many;
    const uint32_t parts = way == kvpn_by_gather_many ? (uint32_t)comm->world : 1;
    const size_t bytes = c->count * c->element, unit = way == kvpn_by_gather ? 8 : 16;
    kvpn_params p = {};
    uint32_t blocks, threads;
    p.send = c->send, p.recv = c->recv;
    for (int r = 0; r < comm->world; r++)
        p.peer[r] = (char *)comm->peer[(comm->rank + r) % comm->world]; /* not all write to the same one first */
    p.turn = (uint32_t *)comm->memory;
    p.control = comm->control_on_gpu;
    p.timeout_ns = (uint64_t)comm->timeout_ms * 1000000;
    p.count = gathers ? bytes : c->count;
    p.pitch = pitch * c->element;
    p.rank = (uint32_t)comm->rank, p.world = (uint32_t)comm->world;
    p.words = (uint32_t)((bytes + unit - 1) / unit);
    p.slice = way == kvpn_by_two_shot ? (p.words + p.world - 1) / p.world : p.words;
    p.block_bytes = 16 * comm->block_slots;
    p.sender_bytes = comm->blocks * p.block_bytes;
    p.area_bytes = p.world * p.sender_bytes;
    p.turn_bytes = 2 * p.area_bytes;
    p.send_aligned = (uintptr_t)c->send % unit == 0 && (way != kvpn_by_scatter || p.pitch % unit == 0);
    p.recv_aligned = (uintptr_t)c->recv % unit == 0 && (!gathers || p.pitch % unit == 0);
    if (way == kvpn_by_gather_many)
        kvpn_shape_many(comm, &p, &blocks, &threads);
    else
        kvpn_shape(comm, &p, &blocks, &threads);
    const bool whole = p.send_aligned && p.recv_aligned && bytes % unit == 0;
    return kvpn_start(c, kvpn_pick(way, c->dtype, comm->world, whole), blocks, dim3(threads, parts), &p);
}

/* A tensor larger than the slots in pieces of as much as they hold. */
static kvprim_status kvpn_launch_all(const kvpn_call *c, kvpn_way way)
{
    const size_t most = kvpn_room(c->comm, way) / c->element;
    kvprim_status s = KVPRIM_OK;
    for (size_t at = 0; at < c->count && s == KVPRIM_OK; at += most) {
        kvpn_call piece = *c;
        piece.recv = (char *)c->recv + at * c->element;
        piece.send = (const char *)c->send + at * c->element;
        piece.count = c->count - at < most ? c->count - at : most;
        s = kvpn_launch(&piece, way, c->count);
    }
    return s;
}
}
#endif

/* NCCL 2.28.9 sums wrongly inside a window what is not aligned to 16 bytes (reduce_scatter of 7 bf16, where rank 1's
   part begins at byte 14; all_reduce of fp8 from byte 1): the window's kernels, which ncclReduce has none of, are
   avoided. */
static bool kvpn_is_inside(const kvpn_call *c)
{
    const uintptr_t buffer = (uintptr_t)c->comm->buffer, bytes = c->comm->window && buffer ? c->comm->buffer_bytes : 0;
    return (uintptr_t)c->send - buffer < bytes && (uintptr_t)c->recv - buffer < bytes;
}

static ncclResult_t kvpn_reduce_then_broadcast(const kvpn_call *c)
{
    const ncclResult_t result =
        ncclReduce(c->send, c->recv, c->count, c->type, kvpn_op_of(c->op), 0, c->comm->nccl, c->stream);
    if (result != ncclSuccess)
        return result;
    return ncclBroadcast(c->recv, c->recv, c->count, c->type, 0, c->comm->nccl, c->stream);
}

static kvprim_status kvpn_run_all_reduce(kvpn_call *c)
{
    kvprim_status s = kvpn_check_call(c, 1);
    if (s == KVPRIM_OK)
        s = kvpn_check_aliasing(c, 0, 0);
    if (s != KVPRIM_OK)
        return s;
#ifdef KVPRIM_NCCL_FAST
    const kvpn_way way = kvpn_choose(c->comm, c->count * c->element, c->dtype, c->op);
    if (way != kvpn_by_nccl)
        return kvpn_launch_all(c, way);
#endif
    if (((uintptr_t)c->send | (uintptr_t)c->recv) % 16 != 0 && kvpn_is_inside(c))
        return kvpn_done(c, "ncclReduce, ncclBroadcast", kvpn_reduce_then_broadcast(c));
    return kvpn_done(c, "ncclAllReduce",
                     ncclAllReduce(c->send, c->recv, c->count, c->type, kvpn_op_of(c->op), c->comm->nccl, c->stream));
}

static kvprim_status kvpn_run_all_gather(kvpn_call *c)
{
    c->recv_count = c->count * (size_t)c->comm->world;
    kvprim_status s = kvpn_check_call(c, (size_t)c->comm->world);
    const size_t bytes = c->count * c->element;
    if (s == KVPRIM_OK)
        s = kvpn_check_aliasing(c, (size_t)c->comm->rank * bytes, 0);
    if (s != KVPRIM_OK)
        return s;
#ifdef KVPRIM_NCCL_FAST
    const kvpn_way way = kvpn_choose_gather(c->comm, bytes);
    if (way != kvpn_by_nccl)
        return kvpn_launch_all(c, way);
#endif
    return kvpn_done(c, "ncclAllGather", ncclAllGather(c->send, c->recv, c->count, c->type, c->comm->nccl, c->stream));
}

/* Every rank's part by itself. */
static ncclResult_t kvpn_reduce_each(const kvpn_call *c)
{
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < c->comm->world && result == ncclSuccess; r++)
        result = ncclReduce((const char *)c->send + (size_t)r * c->count * c->element, c->recv, c->count, c->type,
                            kvpn_op_of(c->op), r, c->comm->nccl, c->stream);
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
}

static kvprim_status kvpn_run_reduce_scatter(kvpn_call *c)
{
    c->send_count = c->count * (size_t)c->comm->world;
    kvprim_status s = kvpn_check_call(c, (size_t)c->comm->world);
    if (s == KVPRIM_OK)
        s = kvpn_check_aliasing(c, 0, (size_t)c->comm->rank * c->count * c->element);
    if (s != KVPRIM_OK)
        return s;
#ifdef KVPRIM_NCCL_FAST
    const kvpn_way way = kvpn_choose_scatter(c->comm, c->count * c->element, c->dtype, c->op);
    if (way != kvpn_by_nccl)
        return kvpn_launch_all(c, way);
#endif
    if (((uintptr_t)c->send | (uintptr_t)c->recv | (c->count * c->element)) % 16 != 0 && kvpn_is_inside(c))
        return kvpn_done(c, "ncclReduce", kvpn_reduce_each(c));
    return kvpn_done(
        c, "ncclReduceScatter",
        ncclReduceScatter(c->send, c->recv, c->count, c->type, kvpn_op_of(c->op), c->comm->nccl, c->stream));
}

static kvprim_status kvpn_run_broadcast(kvpn_call *c)
{
    c->send_count = 0;
    const kvprim_status s = kvpn_check_call(c, 1);
    if (s != KVPRIM_OK)
        return s;
    return kvpn_done(c, "ncclBroadcast",
                     ncclBroadcast(c->recv, c->recv, c->count, c->type, c->peer, c->comm->nccl, c->stream));
}

static kvprim_status kvpn_run_send(kvpn_call *c)
{
    c->recv_count = 0;
    const kvprim_status s = kvpn_check_call(c, 1);
    if (s != KVPRIM_OK)
        return s;
    return kvpn_done(c, "ncclSend", ncclSend(c->send, c->count, c->type, c->peer, c->comm->nccl, c->stream));
}

static kvprim_status kvpn_run_recv(kvpn_call *c)
{
    c->send_count = 0;
    const kvprim_status s = kvpn_check_call(c, 1);
    if (s != KVPRIM_OK)
        return s;
    return kvpn_done(c, "ncclRecv", ncclRecv(c->recv, c->count, c->type, c->peer, c->comm->nccl, c->stream));
}

/* What every collective does around its own part. */
static kvprim_status kvpn_collective(kvpn_call *c, kvprim_status (*run)(kvpn_call *))
{
    KVPRIM_RANGE(c->function);
    kvprim_status s = kvpn_enter(c->function, c->comm);
    if (s != KVPRIM_OK)
        return s;
    if (c->count != 0)
        s = run(c);
    kvpn_leave(c->comm);
    return s;
}

static kvpn_call kvpn_call_of(const char *function, kvprim_comm *comm, void *recv, const void *send, size_t count,
                              kvprim_dtype dtype, int op, int has_op, cudaStream_t stream)
{
    kvpn_call c;
    memset(&c, 0, sizeof c);
    c.function = function, c.comm = comm, c.recv = recv, c.send = send;
    c.count = c.recv_count = c.send_count = count;
    c.dtype = dtype, c.op = op, c.has_op = has_op, c.stream = stream;
    return c;
}

KVPRIM_API kvprim_status kvprim_all_reduce(kvprim_comm *comm, void *recv, const void *send, size_t count,
                                           kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_all_reduce", comm, recv, send, count, dtype, (int)op, 1, stream);
    return kvpn_collective(&c, kvpn_run_all_reduce);
}

KVPRIM_API kvprim_status kvprim_all_gather(kvprim_comm *comm, void *recv, const void *send, size_t send_count,
                                           kvprim_dtype dtype, struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_all_gather", comm, recv, send, send_count, dtype, 0, 0, stream);
    return kvpn_collective(&c, kvpn_run_all_gather);
}

KVPRIM_API kvprim_status kvprim_reduce_scatter(kvprim_comm *comm, void *recv, const void *send, size_t recv_count,
                                               kvprim_dtype dtype, kvprim_op op, struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_reduce_scatter", comm, recv, send, recv_count, dtype, (int)op, 1, stream);
    return kvpn_collective(&c, kvpn_run_reduce_scatter);
}

KVPRIM_API kvprim_status kvprim_broadcast(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t root,
                                          struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_broadcast", comm, buf, NULL, count, dtype, 0, 0, stream);
    c.peer = root, c.has_peer = 1;
    return kvpn_collective(&c, kvpn_run_broadcast);
}

KVPRIM_API kvprim_status kvprim_send(kvprim_comm *comm, const void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_send", comm, NULL, buf, count, dtype, 0, 0, stream);
    c.peer = peer, c.has_peer = 1;
    return kvpn_collective(&c, kvpn_run_send);
}

KVPRIM_API kvprim_status kvprim_recv(kvprim_comm *comm, void *buf, size_t count, kvprim_dtype dtype, int32_t peer,
                                     struct CUstream_st *stream)
{
    kvpn_call c = kvpn_call_of("kvprim_recv", comm, buf, NULL, count, dtype, 0, 0, stream);
    c.peer = peer, c.has_peer = 1;
    return kvpn_collective(&c, kvpn_run_recv);
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

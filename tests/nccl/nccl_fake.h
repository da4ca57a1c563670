/* SPDX-License-Identifier: MIT */
/* Fakes of CUDA and NCCL for test_nccl_life.c. They live in the program's own memory, and their communicators can hang,
   end late, or not block. `fake` says what happens; calls, fake_alloc and fake_free record what was asked for.
   kvprim_nccl.h is implemented here, so that make_thread makes its threads. */
#include <errno.h>
#include <pthread.h>

static int make_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
#define pthread_create make_thread /* the header's threads: making one can fail, and tests wait for them */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#undef pthread_create

/* ---- what the fakes do, and what they saw ---- */

/* Two devices; a timeout that expires, but not before threads on a busy machine have come to where they hang; how long
   tests wait before they fail. */
enum { home = 2, elsewhere = 7, short_timeout_ms = 250, test_timeout_ms = 60000 };

/* Where the other rank of two says another word than this one. */
typedef enum exchanged { nowhere, in_hello, in_info } exchanged;

static struct {
    int version;                 /* of NCCL */
    int no_threads, no_blocking; /* 1: no thread can be made; 1: communicators do not block */
    /* 1: hangs until ncclCommAbort; hang_gather and hang_copy: the n-th one, from 1 on */
    int hang_init, hang_gather, hang_copy;
    int late_memory, late_init, late_end; /* 1: hangs until `gate` is 1, whatever happens */
    int abort_ms;                         /* how long ncclCommAbort takes */
    int captures;                         /* 1: every stream is captured */
    int captures_elsewhere;               /* 1: another thread captures, in the global mode */
    int no_event;                         /* the n-th event from now on cannot be made; 0: all can */
    int refuses;                          /* NCCL refuses the n-th call from now on, from 1 on; 0: none */
    int dead;                             /* 1: the device's context is dead */
    exchanged other_says;                 /* and which word, from byte other_at on */
    size_t other_at;
    uint32_t other_word;
    /* where this process sees the GPU with a bus's number; whether atomics reach it; how many mappings were closed */
    int bus_device[4], native[4], closed;
    uint64_t *let_go; /* another rank's nonce, which it clears at let_go_us; NULL: none does */
    int64_t let_go_us;
    kvprim_comm *checked;                   /* if set, cudaEventRecord checks it half way */
    kvprim_status check;                    /* what that returned */
    int gathers, copies;                    /* how many so far */
    ncclDataType_t type;                    /* of the last all-reduce or broadcast */
    enum cudaStreamCaptureMode mode_at_end; /* the mode in which ncclCommAbort or ncclCommDestroy was called */
    void *slots;                            /* cudaFree of this hangs until `gate` is 1, and notes what follows */
    int device_at_free;
    enum cudaStreamCaptureMode mode_at_free;
    /* atomic; hanging: a call hangs; stuck: copies hang; work_hangs: events do not finish */
    int32_t gate, hanging, stuck, work_hangs;
} fake;

/* Atomic: what the fakes allocated and have not freed; the header's threads that run. */
static int32_t live_allocations, threads;
static const char *calls[64];
static int32_t call_count;
static _Thread_local int current_device;
static _Thread_local enum cudaStreamCaptureMode current_mode;

static int32_t load(const int32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void store(int32_t *word, int32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static void wait_ms(int ms)
{
    (void)poll(NULL, 0, ms);
}

/* Relaxed, because notes must not order what the header does not order. */
static void record_call(const char *function)
{
    const int32_t at = __atomic_fetch_add(&call_count, 1, __ATOMIC_RELAXED);
    if (at < 64)
        __atomic_store_n(&calls[at], function + strlen("nccl"), __ATOMIC_RELAXED);
}

/* What the last calls of ncclSend and ncclRecv were given. A test that looks at them sets part_count to 0 before. */
static struct {
    const void *memory;
    size_t count;
    ncclDataType_t type;
    int peer;
} given_parts[16];
static int32_t part_count;

static void record_part(const void *memory, size_t count, ncclDataType_t type, int peer)
{
    const int32_t at = __atomic_fetch_add(&part_count, 1, __ATOMIC_RELAXED);
    if (at < 0 || at >= 16)
        return;
    __atomic_store_n(&given_parts[at].memory, memory, __ATOMIC_RELAXED);
    __atomic_store_n(&given_parts[at].count, count, __ATOMIC_RELAXED);
    __atomic_store_n(&given_parts[at].type, type, __ATOMIC_RELAXED);
    __atomic_store_n(&given_parts[at].peer, peer, __ATOMIC_RELAXED);
}

/* Whether these were the calls since the last call of this, by their names without nccl and cuda. */
static bool called(const char *expected)
{
    char text[2048] = "";
    size_t used = 0;
    const int32_t count = __atomic_exchange_n(&call_count, 0, __ATOMIC_RELAXED);
    for (int k = 0; k < count && k < 64; k++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", k ? " " : "",
                                 __atomic_load_n(&calls[k], __ATOMIC_RELAXED));
    if (strcmp(text, expected) == 0)
        return true;
    printf("  called: %s\n", text);
    return false;
}

static void *fake_alloc(size_t bytes)
{
    (void)__atomic_add_fetch(&live_allocations, 1, __ATOMIC_RELAXED);
    return calloc(1, bytes);
}

static cudaError_t fake_free(void *memory)
{
    (void)__atomic_sub_fetch(&live_allocations, memory != NULL, __ATOMIC_RELAXED);
    free(memory);
    return cudaSuccess;
}

typedef struct thread_job {
    void *(*run)(void *);
    void *argument;
} thread_job;

static void *run_job(void *argument)
{
    const thread_job job = *(thread_job *)argument;
    free(argument);
    void *const result = job.run(job.argument);
    (void)__atomic_sub_fetch(&threads, 1, __ATOMIC_SEQ_CST);
    return result;
}

static int make_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    thread_job *const job = fake.no_threads ? NULL : (thread_job *)malloc(sizeof *job);
    if (!job)
        return EAGAIN;
    job->run = run, job->argument = argument;
    (void)__atomic_add_fetch(&threads, 1, __ATOMIC_SEQ_CST);
    return pthread_create(thread, attributes, run_job, job);
}

/* ---- the fake CUDA ---- */

struct CUstream_st {
    int32_t uses;
};
/* Where and when it was recorded last, and which stream waited for it last; times count both. */
struct CUevent_st {
    int32_t recording, blocked; /* atomic; blocked: it waits for work that hangs */
    cudaStream_t recorded_on, waited_by;
    int32_t recorded_at, waited_at;
};
static int32_t event_times;

static cudaError_t fake_alloc_to(void *to, size_t bytes)
{
    void *const memory = fake_alloc(bytes);
    memcpy(to, &memory, sizeof memory);
    return memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* Functions that need one expression. */
#define CUDA(name, parameters, result)                                                                                 \
    cudaError_t name parameters                                                                                        \
    {                                                                                                                  \
        return (result);                                                                                               \
    }
// clang-format off
CUDA(cudaGetLastError, (void), cudaSuccess)
CUDA(cudaPeekAtLastError, (void), cudaSuccess)
CUDA(cudaGetDevice, (int *to), (*to = current_device, cudaSuccess))
CUDA(cudaSetDevice, (int device), (current_device = device, cudaSuccess))
CUDA(cudaDeviceSynchronize, (void), cudaSuccess)
CUDA(cudaDeviceGetAttribute, (int *to, enum cudaDeviceAttr which, int device), (*to = 132, cudaSuccess))
CUDA(cudaGetDeviceProperties, (struct cudaDeviceProp *to, int device), (memcpy(to->name, "a", 2), cudaSuccess))
CUDA(cudaDeviceGetPCIBusId, (char *to, int bytes, int device), (snprintf(to, (size_t)bytes, "0"), cudaSuccess))
CUDA(cudaDeviceGetByPCIBusId, (int *to, const char *bus),
     (*to = fake.bus_device[atoi(bus)], *to < 0 ? cudaErrorInvalidDevice : cudaSuccess))
CUDA(cudaDeviceGetP2PAttribute, (int *to, enum cudaDeviceP2PAttr which, int device, int peer),
     (*to = which == cudaDevP2PAttrNativeAtomicSupported && fake.native[peer % 4], cudaSuccess))
CUDA(cudaDeviceCanAccessPeer, (int *to, int device, int peer), (*to = 0, cudaSuccess))
CUDA(cudaDeviceEnablePeerAccess, (int peer, unsigned flags), cudaErrorUnknown)
CUDA(cudaIpcGetMemHandle, (cudaIpcMemHandle_t *to, void *memory), cudaErrorUnknown)
CUDA(cudaIpcOpenMemHandle, (void **to, cudaIpcMemHandle_t handle, unsigned flags), cudaErrorUnknown)
CUDA(cudaIpcCloseMemHandle, (void *memory), (__atomic_add_fetch(&fake.closed, 1, __ATOMIC_SEQ_CST), cudaSuccess))
CUDA(cudaHostAlloc, (void **to, size_t bytes, unsigned flags), fake_alloc_to(to, bytes))
CUDA(cudaHostGetDevicePointer, (void **to, void *host, unsigned flags), (*to = host, cudaSuccess))
CUDA(cudaFreeHost, (void *memory), fake_free(memory))
CUDA(cudaStreamCreateWithFlags, (cudaStream_t *to, unsigned flags), fake_alloc_to(to, sizeof **to))
CUDA(cudaStreamDestroy, (cudaStream_t stream), fake_free(stream))
CUDA(cudaStreamGetDevice, (cudaStream_t stream, int *to), (*to = home, cudaSuccess))
CUDA(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *to),
     (*to = fake.captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess))
CUDA(cudaEventCreateWithFlags, (cudaEvent_t *to, unsigned flags),
     fake.no_event && --fake.no_event == 0 ? cudaErrorMemoryAllocation : fake_alloc_to(to, sizeof **to))
CUDA(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
     (event->waited_by = stream, event->waited_at = __atomic_add_fetch(&event_times, 1, __ATOMIC_RELAXED), cudaSuccess))
CUDA(cudaEventDestroy, (cudaEvent_t event), fake_free(event))
// clang-format on

/* Can take long: the real one waits for the device's work. */
cudaError_t cudaMalloc(void **to, size_t bytes)
{
    if (fake.late_memory)
        (void)kvpn_wait_until(&fake.gate, 1, test_timeout_ms);
    return fake_alloc_to(to, bytes);
}

/* Likewise. What was not made is not freed, except in the relaxed mode: another thread may capture a stream, and CUDA
   would refuse. */
cudaError_t cudaFree(void *memory)
{
    if (!memory && current_mode != cudaStreamCaptureModeRelaxed)
        record_call("cudaFree of NULL");
    if (memory && memory == fake.slots) {
        (void)kvpn_wait_until(&fake.gate, 1, test_timeout_ms);
        fake.device_at_free = current_device, fake.mode_at_free = current_mode;
    }
    return fake_free(memory);
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "another";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    const enum cudaStreamCaptureMode before = current_mode;
    current_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)__atomic_add_fetch(&stream->uses, 1, __ATOMIC_RELAXED);
    if (fake.let_go && kvpn_now_us() >= fake.let_go_us)
        *fake.let_go = 0;
    if (++fake.copies == fake.hang_copy)
        store(&fake.stuck, 1);
    memcpy(dst, src, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    record_call("cudaMemsetAsync");
    memset(dst, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    while (load(&fake.stuck))
        wait_ms(1);
    (void)__atomic_add_fetch(&stream->uses, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

static bool is_stuck(void)
{
    return load(&fake.stuck) || load(&fake.work_hangs);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    store(&event->recording, 1);
    if (fake.checked)
        fake.check = kvprim_comm_check(fake.checked);
    event->recorded_on = stream, event->recorded_at = __atomic_add_fetch(&event_times, 1, __ATOMIC_RELAXED);
    store(&event->recording, 0);
    store(&event->blocked, is_stuck());
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (fake.dead)
        return cudaErrorIllegalAddress;
    if (fake.captures && current_mode != cudaStreamCaptureModeRelaxed)
        return cudaErrorStreamCaptureUnsupported; /* the real one also ends the capture */
    return load(&event->recording) || (load(&event->blocked) && is_stuck()) ? cudaErrorNotReady : cudaSuccess;
}

/* ---- the fake NCCL ---- */

struct ncclComm {
    int32_t rank, world, device;
    int32_t uses, inside, aborted; /* atomic */
    int32_t pending;               /* atomic: how often ncclCommGetAsyncError still says that work is in progress */
    void *window, **window_to;     /* its window, or NULL; where a window is filled in once nothing is in progress */
};
static _Thread_local int in_group;
static _Thread_local ncclComm_t grouped;

/* Every call ends with this, so that a sanitizer sees a call on a communicator that has ended. */
static ncclResult_t touch(ncclComm_t comm, ncclResult_t result)
{
    (void)__atomic_add_fetch(&comm->uses, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* A communicator that does not block refuses a call while an earlier one is in progress, as NCCL's does. */
static ncclResult_t enqueue(ncclComm_t comm, const char *function)
{
    record_call(function);
    if (fake.refuses && --fake.refuses == 0)
        return touch(comm, ncclInvalidArgument);
    if ((fake.captures || fake.captures_elsewhere) && current_mode != cudaStreamCaptureModeRelaxed)
        return touch(comm, ncclInternalError); /* the real one fails where it connects ranks */
    if (in_group)
        grouped = comm;
    if (in_group || (!fake.no_blocking && !load(&comm->pending)))
        return touch(comm, ncclSuccess);
    if (load(&comm->pending))
        return touch(comm, ncclInvalidUsage);
    store(&comm->pending, 3);
    return touch(comm, ncclInProgress);
}

static void make_window(ncclComm_t comm, void **to)
{
    comm->window = fake_alloc(1), comm->window_to = NULL;
    __atomic_store_n(to, comm->window, __ATOMIC_SEQ_CST);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *to)
{
    const int32_t pending = load(&comm->pending);
    if (pending == 1 && comm->window_to) /* filled in late */
        make_window(comm, comm->window_to);
    if (pending > 0)
        store(&comm->pending, pending - 1);
    *to = pending > 0 ? ncclInProgress : ncclSuccess;
    return touch(comm, ncclSuccess);
}

/* Hangs until ncclCommAbort. With late_init there is no communicator that could be aborted until the gate is open. */
ncclResult_t ncclCommInitRank(ncclComm_t *to, int world, ncclUniqueId id, int rank)
{
    record_call(__func__);
    if (fake.late_init) {
        store(&fake.hanging, 1);
        (void)kvpn_wait_until(&fake.gate, 1, test_timeout_ms);
    }
    ncclComm_t comm = (ncclComm_t)fake_alloc(sizeof *comm);
    comm->rank = rank, comm->world = world, comm->device = current_device, comm->inside = 1;
    __atomic_store_n(to, comm, __ATOMIC_SEQ_CST);
    store(&fake.hanging, fake.hang_init || fake.late_init);
    while (fake.hang_init && !load(&comm->aborted))
        wait_ms(1);
    const bool aborted = load(&comm->aborted);
    store(&comm->pending, aborted || !fake.no_blocking ? 0 : 3);
    store(&comm->inside, 0); /* may be freed from here on */
    return aborted ? ncclInternalError : fake.no_blocking ? ncclInProgress : ncclSuccess;
}

/* Ends the communicator, and leaves the calling thread on another device. */
static void end_comm(ncclComm_t comm)
{
    fake.mode_at_end = current_mode;
    current_device = elsewhere;
    if (fake.late_end)
        (void)kvpn_wait_until(&fake.gate, 1, test_timeout_ms);
    (void)kvpn_wait_until(&comm->inside, 0, test_timeout_ms);
    (void)load(&comm->uses);
    (void)fake_free(comm->window);
    (void)fake_free(comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    record_call(__func__);
    store(&comm->aborted, 1);
    store(&fake.stuck, 0);
    store(&fake.work_hangs, 0);
    wait_ms(fake.abort_ms);
    end_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    record_call(__func__);
    end_comm(comm);
    return fake.no_blocking ? ncclInProgress : ncclSuccess;
}

/* Functions that need one expression, or only record their name. */
#define NCCL(name, parameters, result)                                                                                 \
    ncclResult_t name parameters                                                                                       \
    {                                                                                                                  \
        return (result);                                                                                               \
    }
#define SENDS const void *send, size_t count, ncclDataType_t type
#define MOVES const void *send, void *recv, size_t count, ncclDataType_t type
#define BY ncclComm_t comm, cudaStream_t stream
// clang-format off
NCCL(ncclGetUniqueId, (ncclUniqueId *to), (memset(to, 0, sizeof *to), ncclSuccess))
NCCL(ncclGetVersion, (int *to), (*to = fake.version, ncclSuccess))
NCCL(ncclCommUserRank, (const ncclComm_t comm, int *to), (*to = comm->rank, touch(comm, ncclSuccess)))
NCCL(ncclCommCount, (const ncclComm_t comm, int *to), (*to = comm->world, touch(comm, ncclSuccess)))
NCCL(ncclCommCuDevice, (const ncclComm_t comm, int *to), (*to = comm->device, touch(comm, ncclSuccess)))
NCCL(ncclMemAlloc, (void **to, size_t bytes), (record_call(__func__), *to = fake_alloc(bytes), ncclSuccess))
NCCL(ncclMemFree, (void *memory), (record_call(__func__), fake_free(memory), ncclSuccess))
NCCL(ncclAllReduce, (MOVES, ncclRedOp_t op, BY), (fake.type = type, enqueue(comm, __func__)))
NCCL(ncclReduce, (MOVES, ncclRedOp_t op, int root, BY), enqueue(comm, __func__))
NCCL(ncclReduceScatter, (MOVES, ncclRedOp_t op, BY), enqueue(comm, __func__))
NCCL(ncclBroadcast, (MOVES, int root, BY), (fake.type = type, enqueue(comm, __func__)))
NCCL(ncclSend, (SENDS, int peer, BY), (record_part(send, count, type, peer), enqueue(comm, __func__)))
NCCL(ncclRecv, (void *recv, size_t count, ncclDataType_t type, int peer, BY),
     (record_part(recv, count, type, peer), enqueue(comm, __func__)))
NCCL(ncclGroupStart, (void), (record_call(__func__), in_group++, ncclSuccess))
// clang-format on

/* What was called in the group is in progress from here on. */
ncclResult_t ncclGroupEnd(void)
{
    record_call(__func__);
    in_group--;
    if (grouped && fake.no_blocking)
        store(&grouped->pending, 3);
    grouped = NULL;
    return fake.no_blocking ? ncclInProgress : ncclSuccess;
}

/* Copies data only in init's exchanges, of hellos first. Every rank says what this rank says, except for other_word. */
ncclResult_t ncclAllGather(MOVES, BY)
{
    const int world = comm->world, rank = comm->rank;
    const ncclResult_t result = enqueue(comm, __func__);
    const bool greets = count == sizeof(kvpn_hello);
    if (type != ncclChar || (!greets && count != sizeof(kvpn_rank_info)) ||
        (result != ncclSuccess && result != ncclInProgress))
        return result;
    if (++fake.gathers == fake.hang_gather) {
        store(&fake.stuck, 1);
        return result;
    }
    for (int r = 0; r < world; r++)
        memcpy((char *)recv + (size_t)r * count, send, count);
    if (world > 1 && fake.other_says == (greets ? in_hello : in_info))
        memcpy((char *)recv + (rank == 0 ? count : 0) + fake.other_at, &fake.other_word, sizeof fake.other_word);
    return result;
}

#ifdef KVPRIM_NCCL_WINDOWS
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *to, int flags)
{
    if (fake.no_blocking)
        comm->window_to = (void **)to;
    else
        make_window(comm, (void **)to);
    return enqueue(comm, __func__);
}

/* Waits for the device's work, as NCCL's does. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    record_call(__func__);
    for (const int64_t begun = kvpn_now_us(); is_stuck() && kvpn_now_us() - begun < test_timeout_ms * 1000;)
        wait_ms(1);
    (void)fake_free(window);
    comm->window = NULL;
    return touch(comm, ncclSuccess);
}
#endif
#pragma GCC diagnostic pop

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclInvalidUsage ? "invalid usage" : "another";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return comm ? "of a communicator" : NULL;
}

/* SPDX-License-Identifier: MIT */
/* handover_session.cuh: two sides that are connected: what they agree on, their communicators, rings and mapped memory.
   When the peer dies, a session ends; memory, streams, events and rings stay, and the next session uses them with new
   communicators. CUDA, C++17. */
#ifndef HANDOVER_SESSION_CUH
#define HANDOVER_SESSION_CUH

#include "handover_guard.h"
#include "handover_side.cuh"
#include "kvprim_nccl.h"

static_assert(4 * handover_most_pages <= handover_link_most_payload, "a page table fits a message");

enum { handover_most_pairs = handover_most_tp * handover_most_tp };

/* How long a side may take to start: CUDA, NCCL, memory. A connection that ends is noticed at once nevertheless.
   answer_ms: to answer the setup, for which a decode side does nothing else. */
enum { connect_ms = 60000, answer_ms = 5000 };

/* Messages. The prefill side asks, and the decode side answers, except for chunks and credits. */
enum {
    say_setup = 1, /* payload: setup */
    say_welcome,   /* a: the first request that the decode side still needs */
    say_offer,     /* a: rank; payload: offer */
    say_request,   /* payload: ask */
    say_ready,     /* payload: the request's pages, for way_straight */
    say_chunks,    /* a: number of the first, b: bytes, c: how many of its lane */
    say_credit,    /* a: lane, b: how many */
    say_cancel,    /* the decode side wants no more chunks */
    say_end,       /* a: how many chunks were sent */
    say_pushed,    /* the bytes are there */
    say_ack,       /* a, b: when the first and the last layer were ready, us after say_ready; c: chunks unpacked */
    say_verify,
    say_verified, /* a: bytes that are wrong; payload: text of wrong_text bytes */
    say_bye
};
enum { wrong_text = 200 };

enum { way_ring, way_straight, ways };

typedef struct setup {
    handover_options options;
    kvprim_comm_id ids[handover_most_lanes];
} setup;

typedef struct ask {
    int64_t request, tokens, chunk_bytes, cancel_at; /* cancel_at: the decode side cancels after so many chunks; -1 */
    int32_t way;
    int32_t fill, again; /* 1: first fill the decode side's caches with nobody's bytes; use the last request's pages */
} ask;

/* A cache of the decode side that the prefill side may map. */
typedef struct offer {
    cudaIpcMemHandle_t handle;
    char machine[40]; /* the kernel's boot id: the same in all containers of a machine */
} offer;

/* Ranks that share heads. */
typedef struct pair {
    int from, to;
} pair;

struct session;

/* What a program adds that has other ways (tests/bench/bench_handover.cu). All return false if the peer is gone. */
typedef struct other_ways {
    int32_t end;                            /* they are numbered from `ways` to end - 1 */
    bool (*open)(session *s);               /* when a session has begun */
    bool (*move)(session *s, const ask *a); /* on both sides */
    bool (*run)(session *s);                /* on the prefill side, after the requests */
} other_ways;

typedef struct session {
    const handover_options *o;
    const other_ways *others;
    int side; /* 0: prefill, 1: decode */
    bool opened;
    handover_side mine;
    handover_cache from[handover_most_tp], to[handover_most_tp]; /* memory: this side's own, and mapped ones */
    pair pairs[handover_most_pairs];
    int pair_count;
    handover_link link;
    kvprim_comm_id ids[handover_most_lanes];
    kvprim_comm comms[handover_most_lanes];
    kvprim_ring rings[handover_most_lanes];
    cudaStream_t nccl[handover_most_lanes], work[handover_most_lanes];
    char *ring_memory;
    int64_t *peer_slots;
    int32_t *peer_pages, *peer_pages_on_gpu; /* peer_pages: pinned */
    cudaEvent_t pushed;
    int64_t served;  /* requests that are done; the next session goes on after them */
    int64_t wrong;   /* verifications that found wrong bytes */
    int64_t dies_at; /* chunks until this process dies; -1: never */
    int64_t checked_us;
    char why[400];
} session;

/* ---- errors and messages ---- */

/* Ends the session. Returns false. */
static bool lose(session *s, const char *why)
{
    if (!s->why[0])
        (void)snprintf(s->why, sizeof s->why, "%s", why);
    return false;
}

static bool linked(session *s, bool right)
{
    return right || lose(s, s->link.error);
}

static bool tell(session *s, uint32_t kind, int64_t a, int64_t b, int64_t c)
{
    return linked(s, handover_link_say(&s->link, kind, a, b, c, NULL, 0));
}

static bool tell_bytes(session *s, uint32_t kind, int64_t a, const void *payload, size_t bytes)
{
    return linked(s, handover_link_say(&s->link, kind, a, 0, 0, payload, bytes));
}

static bool expect(session *s, uint32_t kind, handover_message *m, size_t bytes)
{
    return linked(s, handover_link_expect(&s->link, kind, m, bytes));
}

/* ---- a peer that is gone ---- */

/* Aborts the communicators when a call waits for a peer that is gone. */
static handover_guard guard;

/* Errors of NCCL and deadlines mean that the peer is gone, as any error does of a communicator that was aborted because
   of that. Others are this program's, or the GPU's. */
static bool reached(session *s, kvprim_status status)
{
    if (status != KVPRIM_OK && status != KVPRIM_ERROR_TIMEOUT && status != KVPRIM_ERROR_NCCL &&
        !handover_guard_fired(&guard))
        kvprim_or_exit(status);
    return status == KVPRIM_OK || lose(s, kvprim_last_error());
}

static void *abort_comm(void *comm)
{
    (void)kvprim_comm_abort((kvprim_comm *)comm);
    return NULL;
}

/* All at once: NCCL takes half a second for each whose kernels wait. */
static void abort_comms(void *context)
{
    session *const s = (session *)context;
    pthread_t threads[handover_most_lanes];
    bool started[handover_most_lanes];
    for (int k = 0; k < handover_most_lanes; k++)
        started[k] = pthread_create(&threads[k], NULL, abort_comm, &s->comms[k]) == 0;
    for (int k = 0; k < handover_most_lanes; k++)
        if (started[k])
            (void)pthread_join(threads[k], NULL);
        else
            (void)abort_comm(&s->comms[k]);
}

static bool guard_end(session *s)
{
    return handover_guard_end(&guard) || lose(s, "the peer is gone, or silent inside NCCL");
}

/* Asks NCCL, about twenty times a second. */
static bool check_comms(session *s)
{
    const int64_t now_us = handover_now_us();
    if (now_us - s->checked_us < 50000)
        return true;
    s->checked_us = now_us;
    for (int k = 0; k < s->o->lanes; k++)
        if (!reached(s, kvprim_comm_check(&s->comms[k])))
            return false;
    return true;
}

/* ---- beginning ---- */

/* The prefill side proposes, the decode side compares. */
static bool same_options(session *s, handover_options *theirs)
{
    handover_options mine = *s->o;
    for (int k = 0; k < handover_table_rows; k++) {
        const handover_option *const row = &handover_table[k];
        const long long there = *handover_field(theirs, row), here = *handover_field(&mine, row);
        if (row->agreed && there != here) {
            (void)snprintf(s->why, sizeof s->why, "the prefill side has other options: %s is %lld there, %lld here",
                           row->name, there, here);
            return false;
        }
    }
    return true;
}

/* Sessions begin with it: both sides have the same options and ids, and know which request is next. */
static bool agree(session *s, int fd, int timeout_ms)
{
    handover_message m;
    setup a;
    s->why[0] = 0;
    if (!linked(s, handover_link_open(&s->link, fd, timeout_ms)))
        return false;
    if (s->side == 0) {
        memset(&a, 0, sizeof a);
        a.options = *s->o;
        for (int k = 0; k < s->o->lanes; k++)
            kvprim_or_exit(kvprim_comm_new_id(&a.ids[k]));
        memcpy(s->ids, a.ids, sizeof a.ids);
        if (!tell_bytes(s, say_setup, 0, &a, sizeof a) || !expect(s, say_welcome, &m, 0))
            return false;
        s->served = m.a > s->served ? m.a : s->served;
        return true;
    }
    if (!expect(s, say_setup, &m, sizeof a))
        return false;
    memcpy(&a, s->link.payload, sizeof a);
    memcpy(s->ids, a.ids, sizeof a.ids);
    return same_options(s, &a.options) && tell(s, say_welcome, s->served, 0, 0);
}

static size_t slot_bytes(int64_t chunk_bytes)
{
    return (size_t)(chunk_bytes + 127) / 128 * 128;
}

/* For all sessions of a process. */
static void open_once(session *s)
{
    const handover_options *const o = s->o;
    int32_t first, heads;
    for (int r = 0; r < o->from.tp; r++)
        s->from[r] = side_cache(o, &o->from, r);
    for (int r = 0; r < o->to.tp; r++)
        s->to[r] = side_cache(o, &o->to, r);
    side_open(&s->mine, o, s->side == 0 ? &o->from : &o->to, s->side);
    for (int r = 0; r < s->mine.shape.tp; r++)
        (s->side == 0 ? s->from : s->to)[r].data = s->mine.caches[r].data;
    for (int f = 0; f < o->from.tp; f++)
        for (int t = 0; t < o->to.tp; t++)
            if (handover_shared_heads(&s->from[f], &s->to[t], &first, &heads))
                s->pairs[s->pair_count++] = {f, t};
    for (int k = 0; k < o->lanes; k++) {
        CU(cudaStreamCreateWithFlags(&s->nccl[k], cudaStreamNonBlocking));
        CU(cudaStreamCreateWithFlags(&s->work[k], cudaStreamNonBlocking));
    }
    CU(cudaMalloc((void **)&s->ring_memory, (size_t)(o->lanes * o->slots) * slot_bytes(o->chunk_bytes)));
    CU(cudaMalloc((void **)&s->peer_slots, (size_t)o->tokens * sizeof *s->peer_slots));
    CU(cudaMalloc((void **)&s->peer_pages_on_gpu, (size_t)s->to[0].pages * sizeof *s->peer_pages_on_gpu));
    CU(cudaHostAlloc((void **)&s->peer_pages, (size_t)s->to[0].pages * sizeof *s->peer_pages, cudaHostAllocDefault));
    CU(cudaEventCreateWithFlags(&s->pushed, cudaEventDisableTiming));
    s->opened = true;
}

/* The first call to a peer connects, which waits for it: here, and not in a request. */
static bool connect_comm(session *s, int k)
{
    kvprim_comm_desc d;
    memset(&d, 0, sizeof d);
    d.rank = s->side, d.world = 2, d.id = s->ids[k];
    d.timeout_ms = (int32_t)s->o->timeout_ms, d.init_timeout_ms = connect_ms, d.no_kernels = 1;
    if (!reached(s, kvprim_comm_init(&s->comms[k], &d)))
        return false;
    char *const at = s->ring_memory; /* of a slot, which has no chunk yet */
    if (!reached(s, kvprim_group_start(&s->comms[k])) ||
        !reached(s, kvprim_send(&s->comms[k], at, 1, KVPRIM_U8, !s->side, s->nccl[k])) ||
        !reached(s, kvprim_recv(&s->comms[k], at + 1, 1, KVPRIM_U8, !s->side, s->nccl[k])) ||
        !reached(s, kvprim_group_end(&s->comms[k])))
        return false;
    CU(cudaStreamSynchronize(s->nccl[k]));
    return !handover_guard_fired(&guard);
}

static bool connect_comms(session *s)
{
    bool right = true;
    handover_guard_begin(&guard, s->link.fd, connect_ms);
    for (int k = 0; k < s->o->lanes && right; k++)
        right = connect_comm(s, k);
    return guard_end(s) && right;
}

/* Slots for chunks of a request, of at most chunk_bytes. The last request's, which lie elsewhere, are free when NCCL's
   kernels have ended: that the peer has all bytes says less. */
static bool open_rings(session *s, int64_t chunk_bytes)
{
    handover_guard_begin(&guard, s->link.fd, s->o->timeout_ms);
    for (int k = 0; k < s->o->lanes; k++)
        CU(cudaStreamSynchronize(s->nccl[k]));
    bool right = guard_end(s);
    for (int k = 0; k < s->o->lanes && right; k++) {
        kvprim_ring_desc d;
        memset(&d, 0, sizeof d);
        d.comm = &s->comms[k], d.peer = !s->side, d.slots = (int32_t)s->o->slots,
        d.slot_bytes = slot_bytes(chunk_bytes);
        d.memory = s->ring_memory + (size_t)(k * d.slots) * d.slot_bytes, d.stream = s->nccl[k];
        right = reached(s, kvprim_ring_init(&s->rings[k], &d));
    }
    return right;
}

static void read_boot_id(char id[40])
{
    memset(id, 0, 40);
    FILE *const file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file && fscanf(file, "%39s", id) != 1)
        id[0] = 0;
    if (file)
        (void)fclose(file);
}

/* The decode side offers memory, which is what cudaMalloc returned; the prefill side maps it. */
static bool share(session *s, int rank, char **memory)
{
    handover_message m;
    offer mine, theirs;
    memset(&mine, 0, sizeof mine);
    read_boot_id(mine.machine);
    if (s->side == 1) {
        CU(cudaIpcGetMemHandle(&mine.handle, *memory));
        return tell_bytes(s, say_offer, rank, &mine, sizeof mine);
    }
    if (!expect(s, say_offer, &m, sizeof theirs))
        return false;
    memcpy(&theirs, s->link.payload, sizeof theirs);
    if (m.a != rank || memcmp(mine.machine, theirs.machine, sizeof mine.machine) != 0)
        return lose(s, "the peer's cache is on another machine, where --mode straight cannot write");
    CU(cudaIpcOpenMemHandle((void **)memory, theirs.handle, cudaIpcMemLazyEnablePeerAccess));
    return true;
}

static bool connect_session(session *s)
{
    s->link.timeout_ms = connect_ms;
    if (!s->opened)
        open_once(s);
    bool right = connect_comms(s);
    for (int r = 0; r < s->o->to.tp && s->o->mode != mode_ring && right; r++)
        right = share(s, r, &s->to[r].data);
    right = right && (!s->others || s->others->open(s));
    s->link.timeout_ms = (int)s->o->timeout_ms, s->link.heard_us = handover_now_us();
    return right;
}

/* ---- ending ---- */

/* Returns false while NCCL still uses it: after a timeout only another destroy may follow. */
static bool destroy_comm(kvprim_comm *comm, int64_t until_us)
{
    kvprim_status status = kvprim_comm_destroy(comm);
    while (status == KVPRIM_ERROR_TIMEOUT && handover_now_us() < until_us)
        status = kvprim_comm_destroy(comm);
    if (status != KVPRIM_OK && status != KVPRIM_ERROR_ARGUMENT) /* which is one that was never made */
        fprintf(stderr, "14_handover: %s: %s\n", kvprim_status_name(status), kvprim_last_error());
    return status != KVPRIM_ERROR_TIMEOUT;
}

/* The decode side may free its memory only after this. */
static void unmap(char **memory)
{
    if (*memory)
        (void)cudaIpcCloseMemHandle(*memory);
    *memory = NULL;
    (void)cudaGetLastError();
}

/* Leaves what the next session needs. False: there can be none, because a communicator could not be ended. */
static bool close_session(session *s, bool orderly)
{
    const int64_t until_us = handover_now_us() + (int64_t)connect_ms * 1000;
    bool ended = true;
    if (!orderly)
        abort_comms(s);
    for (int k = 0; k < s->o->lanes; k++)
        ended = destroy_comm(&s->comms[k], until_us) && ended;
    if (!ended)
        return false;
    CU(cudaDeviceSynchronize());
    for (int r = 0; r < s->o->to.tp && s->side == 0; r++)
        unmap(&s->to[r].data);
    handover_link_close(&s->link);
    return true;
}

#endif

/* SPDX-License-Identifier: MIT */
/* handover_session.cuh: two sides that are connected: their messages, communicators, rings and mapped memory. What
   fails ends the program, and with its connection the peer. An engine that survives its peers ends their communicators
   by kvprim_comm_abort, makes new ones, and rings in the same memory. CUDA, C++17. */
#ifndef HANDOVER_SESSION_CUH
#define HANDOVER_SESSION_CUH

#include "handover_link.h"
#include "handover_side.cuh"
#include "kvprim_nccl.h"
#include <signal.h>

static_assert(4 * handover_most_pages <= handover_link_most_payload, "a page table fits a message");

enum { handover_most_pairs = handover_most_tp * handover_most_tp };

/* How long a side may take to start: CUDA, NCCL, memory. */
enum { connect_ms = 60000 };

/* Messages. The prefill side asks, and the decode side answers, except for chunks and credits. */
enum {
    say_setup = 1, /* payload: setup */
    say_offer,     /* payload: a cudaIpcMemHandle_t, of memory that the prefill side may map */
    say_request,   /* payload: ask */
    say_ready,     /* payload: the request's pages, for way_straight */
    say_chunk,     /* a: number, b: bytes */
    say_credit,    /* a: lane, b: how many */
    say_cancel,    /* the decode side wants no more chunks */
    say_end,       /* a: how many chunks were sent */
    say_pushed,    /* the bytes are there */
    say_ack,       /* a, b: when the first and the last layer were ready, us after say_ready; c: chunks unpacked */
    say_verify,
    say_verified, /* payload: side_faults */
    say_bye
};

enum { way_ring, way_straight, ways };

typedef struct setup {
    handover_options options; /* both sides take them */
    kvprim_comm_id ids[handover_most_lanes];
} setup;

typedef struct ask {
    int64_t request, tokens, chunk_bytes, cancel_at; /* cancel_at: the decode side cancels after so many chunks; -1 */
    int32_t way, fill;                               /* fill: 1: first fill the caches, decode's with nobody's bytes */
} ask;

/* Ranks that share heads. */
typedef struct pair {
    int from, to;
} pair;

struct session;

/* What a program adds that also has other ways (tests/bench/bench_handover.cu). */
typedef struct other_ways {
    void (*open)(session *s);               /* when the session has begun */
    void (*move)(session *s, const ask *a); /* on both sides */
    void (*run)(session *s);                /* on the prefill side, after the requests */
} other_ways;

typedef struct session {
    handover_options *o;
    const other_ways *others;
    int side; /* 0: prefill, 1: decode */
    handover_side mine;
    handover_cache from[handover_most_tp], to[handover_most_tp]; /* memory: this side's own, and mapped ones */
    pair pairs[handover_most_pairs];
    int pair_count;
    handover_link link;
    kvprim_comm comms[handover_most_lanes];
    kvprim_ring rings[handover_most_lanes];
    cudaStream_t nccl[handover_most_lanes], work[handover_most_lanes];
    int64_t *peer_slots;
    int32_t *peer_pages, *peer_pages_on_gpu; /* peer_pages: pinned */
    cudaEvent_t pushed;
    int64_t wrong; /* verifications that found wrong bytes */
    int64_t checked_us;
} session;

/* ---- messages ---- */

static void tell(session *s, uint32_t kind, int64_t a, int64_t b, int64_t c)
{
    handover_link_say(&s->link, kind, a, b, c, NULL, 0);
}

static void tell_bytes(session *s, uint32_t kind, const void *payload, size_t bytes)
{
    handover_link_say(&s->link, kind, 0, 0, 0, payload, bytes);
}

static void expect(session *s, uint32_t kind, handover_message *m, size_t bytes)
{
    handover_link_expect(&s->link, kind, m, bytes);
}

__attribute__((noreturn)) static void not_due(void)
{
    handover_die("the peer sent a message that is not due");
}

/* ---- a peer that is gone ---- */

static void too_late(int)
{
    static const char text[] = "14_handover: the peer is gone, or silent inside NCCL or CUDA\n";
    (void)!write(2, text, sizeof text - 1);
    _exit(1);
}

/* Ends the program if the calls up to guard_end wait for the peer for longer: they have no deadline of their own. */
static void guard_begin(int64_t ms)
{
    (void)signal(SIGALRM, too_late);
    (void)alarm((unsigned)(ms / 1000 + 1));
}

static void guard_end(void)
{
    (void)alarm(0);
}

/* Asks NCCL, about twenty times a second. */
static void check_comms(session *s)
{
    const int64_t now_us = handover_now_us();
    if (now_us - s->checked_us < 50000)
        return;
    s->checked_us = now_us;
    for (int k = 0; k < s->o->lanes; k++)
        kvprim_or_exit(kvprim_comm_check(&s->comms[k]));
}

/* ---- beginning and ending ---- */

static size_t slot_bytes(const session *s)
{
    return (size_t)(s->o->chunk_bytes + 127) / 128 * 128;
}

static void open_memory(session *s)
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
    CU(cudaMalloc((void **)&s->peer_slots, (size_t)o->tokens * sizeof *s->peer_slots));
    CU(cudaMalloc((void **)&s->peer_pages_on_gpu, (size_t)s->to[0].pages * sizeof *s->peer_pages_on_gpu));
    CU(cudaHostAlloc((void **)&s->peer_pages, (size_t)s->to[0].pages * sizeof *s->peer_pages, cudaHostAllocDefault));
    CU(cudaEventCreateWithFlags(&s->pushed, cudaEventDisableTiming));
}

/* A lane's communicator and ring. The first call to a peer connects, which waits for it: here, and not in a request. */
static void open_lane(session *s, int k, const kvprim_comm_id *id)
{
    kvprim_comm_desc d;
    kvprim_ring_desc r;
    void *memory;
    memset(&d, 0, sizeof d), memset(&r, 0, sizeof r);
    d.rank = s->side, d.world = 2, d.id = *id;
    d.timeout_ms = (int32_t)s->o->timeout_ms, d.init_timeout_ms = connect_ms, d.no_kernels = 1;
    kvprim_or_exit(kvprim_comm_init(&s->comms[k], &d));
    CU(cudaStreamCreateWithFlags(&s->nccl[k], cudaStreamNonBlocking));
    CU(cudaStreamCreateWithFlags(&s->work[k], cudaStreamNonBlocking));
    CU(cudaMalloc(&memory, (size_t)s->o->slots * slot_bytes(s)));
    kvprim_or_exit(kvprim_group_start(&s->comms[k]));
    kvprim_or_exit(kvprim_send(&s->comms[k], memory, 1, KVPRIM_U8, !s->side, s->nccl[k]));
    kvprim_or_exit(kvprim_recv(&s->comms[k], (char *)memory + 1, 1, KVPRIM_U8, !s->side, s->nccl[k]));
    kvprim_or_exit(kvprim_group_end(&s->comms[k]));
    CU(cudaStreamSynchronize(s->nccl[k]));
    r.comm = &s->comms[k], r.peer = !s->side, r.slots = (int32_t)s->o->slots, r.slot_bytes = slot_bytes(s);
    r.memory = memory, r.stream = s->nccl[k];
    kvprim_or_exit(kvprim_ring_init(&s->rings[k], &r));
}

/* The decode side offers memory, which is what cudaMalloc returned; the prefill side maps it. */
static void share(session *s, char **memory)
{
    cudaIpcMemHandle_t handle;
    handover_message m;
    if (s->side == 1) {
        CU(cudaIpcGetMemHandle(&handle, *memory));
        tell_bytes(s, say_offer, &handle, sizeof handle);
        return;
    }
    expect(s, say_offer, &m, sizeof handle);
    memcpy(&handle, s->link.payload, sizeof handle);
    CU(cudaIpcOpenMemHandle((void **)memory, handle, cudaIpcMemLazyEnablePeerAccess));
}

/* The prefill side says what both do. As between machines: NCCL then uses only sockets. */
static void agree(session *s, setup *a)
{
    handover_message m;
    if (s->side == 1) {
        expect(s, say_setup, &m, sizeof *a);
        memcpy(a, s->link.payload, sizeof *a);
        *s->o = a->options;
        s->o->listen = s->o->connect = NULL; /* addresses in the other process */
    }
    if (s->o->sockets) {
        setenv("NCCL_HOSTID", s->side == 0 ? "prefill" : "decode", 1);
        setenv("NCCL_P2P_DISABLE", "1", 1);
        setenv("NCCL_SHM_DISABLE", "1", 1);
        setenv("NCCL_NET", "Socket", 1);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (s->side == 1)
        return;
    a->options = *s->o;
    for (int k = 0; k < s->o->lanes; k++)
        kvprim_or_exit(kvprim_comm_new_id(&a->ids[k]));
    tell_bytes(s, say_setup, a, sizeof *a);
}

static void open_session(session *s, int fd)
{
    static setup a;
    handover_link_open(&s->link, fd, connect_ms);
    agree(s, &a);
    open_memory(s);
    guard_begin(connect_ms);
    for (int k = 0; k < s->o->lanes; k++)
        open_lane(s, k, &a.ids[k]);
    guard_end();
    for (int r = 0; r < s->o->to.tp && s->o->mode != mode_ring; r++)
        share(s, &s->to[r].data);
    if (s->others)
        s->others->open(s);
    s->link.timeout_ms = (int)s->o->timeout_ms, s->link.heard_us = handover_now_us();
}

/* The decode side may free its memory only after the prefill side has unmapped it. */
static void close_session(session *s)
{
    for (int r = 0; r < s->o->to.tp && s->side == 0 && s->o->mode != mode_ring; r++)
        CU(cudaIpcCloseMemHandle(s->to[r].data));
    if (s->side == 0)
        tell(s, say_bye, 0, 0, 0);
    guard_begin(connect_ms);
    for (int k = 0; k < s->o->lanes; k++) {
        kvprim_status status;
        while ((status = kvprim_comm_destroy(&s->comms[k])) == KVPRIM_ERROR_TIMEOUT)
            continue; /* NCCL still uses it */
        kvprim_or_exit(status);
    }
    guard_end();
}

#endif

/* SPDX-License-Identifier: MIT */
/* handover_session.cuh: two sides that are connected: communicators, rings, mapped memory, and the ways in which a
   request goes from one to the other. When the peer dies, a session ends; memory, streams, events and rings stay, and
   the next session uses them with new communicators. CUDA, C++17. */
#ifndef HANDOVER_SESSION_CUH
#define HANDOVER_SESSION_CUH

#include "handover_direct.h"
#include "handover_guard.h"
#include "handover_side.cuh"
#include "kvprim_nccl.h"
#include <signal.h>

static_assert(4 * handover_most_pages <= handover_link_most_payload, "a page table fits a message");

enum { handover_most_pairs = handover_most_tp * handover_most_tp };

/* Messages. The prefill side asks, and the decode side answers, except for chunks and credits. */
typedef enum say {
    say_setup = 1, /* payload: setup */
    say_welcome,   /* a: the first request that the decode side still needs */
    say_offer,     /* a: rank, or -1 for the plain buffer; payload: handover_direct_offer */
    say_request,   /* payload: ask */
    say_ready,     /* payload: pages, for ways that write straight */
    say_chunk,     /* a: number, b: bytes */
    say_credit,    /* a: lane, b: how many */
    say_cancel,    /* the decode side wants no more chunks */
    say_end,       /* a: how many chunks were sent */
    say_pushed,    /* the bytes are there */
    say_ack,       /* a, b: when the first and the last layer were ready, us after say_ready; c: chunks unpacked */
    say_verify,
    say_verified, /* a: bytes that are wrong; payload: text */
    say_bye
} say;

typedef enum way { way_ring, way_straight, way_send, way_packed, way_pieces, way_copy, ways } way;

typedef struct setup {
    int32_t layers, heads, head_bytes;
    handover_shape from, to;
    int64_t tokens, seed;
    int32_t slots, lanes, max_sms, timeout_ms, verify, opponents, offers;
    int64_t slot_bytes;
    kvprim_comm_id ids[handover_most_lanes];
} setup;

/* A request, or a measurement. */
typedef struct ask {
    int64_t request, tokens, chunk_bytes, cancel_at; /* cancel_at: the decode side cancels after so many chunks; -1 */
    int32_t way;
    int32_t fill, again; /* 1: first fill the decode side's caches with nobody's bytes; use the last request's pages */
    int64_t copies;      /* bytes, of way_send and way_copy */
} ask;

/* Ranks that share heads. */
typedef struct pair {
    int from, to;
} pair;

/* The chunks of a request, in the order in which they go: chunk 0 of each pair, chunk 1 of each pair, ... */
typedef struct chunk_walk {
    int64_t count[handover_most_pairs], total;
    int64_t i;
    int pair;
} chunk_walk;

typedef struct session {
    const handover_options *o;
    int side; /* 0: prefill, 1: decode */
    bool opened;
    setup agreed;
    handover_side_memory mine;
    handover_cache from[handover_most_tp], to[handover_most_tp]; /* this side's have memory */
    pair pairs[handover_most_pairs];
    int pair_count;
    handover_link link;
    kvprim_comm comms[handover_most_lanes];
    kvprim_ring rings[handover_most_lanes];
    cudaStream_t nccl[handover_most_lanes], work[handover_most_lanes];
    char *ring_memory, *plain; /* plain: of the largest request, for other ways; NULL: none */
    handover_direct peers[handover_most_tp];
    char *peer_plain; /* mapped */
    int64_t *peer_slots;
    int32_t *peer_pages; /* pinned, and on the GPU */
    int32_t *peer_pages_on_gpu;
    cudaEvent_t pushed;
    int64_t served;  /* requests that are done; the next session goes on after them */
    int64_t wrong;   /* verifications that found wrong bytes, on the decode side */
    int64_t dies_at; /* chunks until this process dies; -1: never */
    int64_t checked_us;
    char why[400];
} session;

/* ---- errors, and the guard ---- */

static bool lose(session *s, const char *why)
{
    if (!s->why[0])
        (void)snprintf(s->why, sizeof s->why, "%s", why);
    return false;
}

static bool linked(session *s, bool right)
{
    return right || lose(s, handover_link_error(&s->link));
}

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
static void abort_comms(session *s)
{
    pthread_t threads[handover_most_lanes];
    bool started[handover_most_lanes];
    for (int k = 0; k < handover_most_lanes; k++)
        started[k] = pthread_create(&threads[k], NULL, abort_comm, &s->comms[k]) == 0;
    for (int k = 0; k < handover_most_lanes; k++) {
        if (started[k])
            (void)pthread_join(threads[k], NULL);
        else
            (void)abort_comm(&s->comms[k]);
    }
}

static void end_calls(void *of)
{
    abort_comms((session *)of);
}

static bool guard_end(session *s)
{
    return handover_guard_end(&guard) || lose(s, "the peer is gone, or silent inside NCCL");
}

/* Waits for a stream whose work may wait for the peer. */
static bool guarded_wait(session *s, cudaStream_t stream)
{
    handover_guard_begin(&guard, s->link.fd, s->o->timeout_ms);
    CU(cudaStreamSynchronize(stream));
    return guard_end(s);
}

/* Asks NCCL, about twenty times a second. */
static bool check_comms(session *s)
{
    const int64_t now_us = handover_now_us();
    if (now_us - s->checked_us < 50000)
        return true;
    s->checked_us = now_us;
    for (int k = 0; k < s->agreed.lanes; k++)
        if (!reached(s, kvprim_comm_check(&s->comms[k])))
            return false;
    return true;
}

static int64_t bytes_of(const session *s, int64_t tokens)
{
    return 2 * tokens * s->agreed.layers * s->agreed.heads * s->agreed.head_bytes;
}

/* ---- chunks ---- */

static void find_pairs(session *s)
{
    int32_t first, heads;
    s->pair_count = 0;
    for (int f = 0; f < s->agreed.from.tp; f++)
        for (int t = 0; t < s->agreed.to.tp; t++)
            if (handover_shared_heads(&s->from[f], &s->to[t], &first, &heads))
                s->pairs[s->pair_count++] = {f, t};
}

static void walk_begin(const session *s, const ask *a, chunk_walk *w)
{
    memset(w, 0, sizeof *w);
    for (int p = 0; p < s->pair_count; p++) {
        w->count[p] =
            handover_chunks(&s->from[s->pairs[p].from], &s->to[s->pairs[p].to], a->tokens, (size_t)a->chunk_bytes);
        if (w->count[p] < 0)
            kvprim_or_exit(KVPRIM_ERROR_SIZE);
        w->total += w->count[p];
    }
}

/* To the next pair, and from the last one to the first one's next chunk. */
static void walk_step(const session *s, chunk_walk *w)
{
    if (++w->pair < s->pair_count)
        return;
    w->pair = 0;
    w->i++;
}

/* The next chunk and its pair. */
static pair walk_next(const session *s, const ask *a, chunk_walk *w, handover_chunk *chunk)
{
    while (w->i >= w->count[w->pair])
        walk_step(s, w);
    const pair p = s->pairs[w->pair];
    handover_chunk_at(&s->from[p.from], &s->to[p.to], a->tokens, (size_t)a->chunk_bytes, w->i, chunk);
    walk_step(s, w);
    return p;
}

static kvprim_cuda_launch launch_on(const session *s, cudaStream_t stream)
{
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.stream = stream, launch.max_sms = s->agreed.max_sms;
    return launch;
}

static void pack(session *s, pair p, const handover_chunk *chunk, void *to, cudaStream_t stream)
{
    kvprim_move moves[2];
    const kvprim_cuda_launch launch = launch_on(s, stream);
    kvprim_or_exit(handover_pack(&s->from[p.from], chunk, to, s->mine.slots, s->mine.rejected, moves));
    kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
}

static void unpack(session *s, pair p, const handover_chunk *chunk, const void *from, cudaStream_t stream)
{
    kvprim_move moves[2];
    const kvprim_cuda_launch launch = launch_on(s, stream);
    kvprim_or_exit(handover_unpack(&s->to[p.to], chunk, from, s->mine.slots, s->mine.rejected, moves));
    kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
}

static void die_if_due(session *s)
{
    if (s->dies_at < 0 || s->dies_at-- > 0)
        return;
    (void)raise(s->o->stops ? SIGSTOP : SIGKILL);
}

/* ---- the ring: the prefill side ---- */

/* More credits than a ring has slots, or than chunks were sent, are the peer's mistake. */
static bool take_credits(session *s, const handover_message *m)
{
    kvprim_status status = KVPRIM_ERROR_SIZE;
    if (m->a >= 0 && m->a < s->agreed.lanes && m->b >= 1 && m->b <= s->agreed.slots)
        status = kvprim_ring_credit(&s->rings[m->a], (int32_t)m->b);
    return status == KVPRIM_ERROR_SIZE ? lose(s, "the peer gives credits for chunks that it did not get")
                                       : reached(s, status);
}

/* Takes what the decode side says while chunks go out. */
static bool hear_credits(session *s, bool *cancelled, int wait_ms)
{
    handover_message m;
    int n;
    while ((n = handover_link_hear(&s->link, &m, wait_ms)) > 0) {
        wait_ms = 0;
        if (m.kind == say_credit) {
            if (!take_credits(s, &m))
                return false;
        } else if (m.kind == say_cancel) {
            *cancelled = true;
        } else {
            return lose(s, "the peer sent a message that is not due");
        }
    }
    return linked(s, n == 0);
}

/* Packs, sends and announces one chunk, if its lane has a credit. */
static bool send_chunk(session *s, const ask *a, chunk_walk *walk, int64_t number, bool *sent)
{
    const int lane = (int)(number % s->agreed.lanes);
    handover_chunk chunk;
    void *slot;
    *sent = false;
    if (!reached(s, kvprim_ring_claim(&s->rings[lane], s->work[lane], &slot)))
        return false;
    if (!slot)
        return true;
    const pair p = walk_next(s, a, walk, &chunk);
    pack(s, p, &chunk, slot, s->work[lane]);
    *sent = true;
    return reached(s, kvprim_ring_send(&s->rings[lane], chunk.bytes, s->work[lane])) &&
           linked(s, handover_link_say(&s->link, say_chunk, number, (int64_t)chunk.bytes, 0, NULL, 0));
}

/* cancel_at: this side cancels after so many chunks; -1: it does not. Returns after the last chunk was announced. */
static bool send_by_ring(session *s, const ask *a, int64_t cancel_at, int64_t *sent)
{
    chunk_walk walk;
    bool cancelled = false;
    walk_begin(s, a, &walk);
    for (*sent = 0; *sent < walk.total && !cancelled && *sent != cancel_at;) {
        bool one;
        if (!send_chunk(s, a, &walk, *sent, &one))
            return false;
        if (one)
            die_if_due(s);
        *sent += one;
        if (!hear_credits(s, &cancelled, one ? 0 : 20) || !check_comms(s))
            return false;
    }
    return linked(s, handover_link_say(&s->link, say_end, *sent, 0, 0, NULL, 0));
}

/* After the end: credits still come, then the decode side's word. */
static bool await_ack(session *s, handover_message *ack)
{
    for (;;) {
        const int n = handover_link_hear(&s->link, ack, 20);
        if (n < 0)
            return linked(s, false);
        if (n > 0 && ack->kind == say_ack)
            return true;
        if (n > 0 && ack->kind == say_credit) {
            if (!take_credits(s, ack))
                return false;
        } else if (n > 0 && ack->kind != say_cancel) {
            return lose(s, "the peer sent a message that is not due");
        }
        if (!check_comms(s))
            return false;
    }
}

/* ---- the ring: the decode side ---- */

/* A request that is coming in. Chunk n is in lane n % lanes. */
typedef struct incoming {
    chunk_walk walk;
    handover_chunk recent[handover_most_lanes * KVPRIM_MAX_RING_SLOTS]; /* chunk n at n % (lanes * slots) */
    int32_t left[handover_most_layers];                                 /* chunks that a layer still lacks */
    int64_t received, taken[handover_most_lanes], announced_end, unpacked;
    bool cancelled;
    int64_t begun_us, first_us, last_us;
    int32_t layers_ready;
} incoming;

/* Counts the chunks of each layer, before the clock starts. */
static void incoming_begin(session *s, const ask *a, incoming *in)
{
    handover_chunk chunk;
    memset(in, 0, sizeof *in);
    in->announced_end = -1;
    walk_begin(s, a, &in->walk);
    for (int64_t n = 0; n < in->walk.total; n++) {
        (void)walk_next(s, a, &in->walk, &chunk);
        for (int32_t l = 0; l < chunk.layers; l++)
            in->left[chunk.first_layer + l]++;
    }
    walk_begin(s, a, &in->walk);
}

/* Receives an announced chunk. One that comes after this side has cancelled is dropped. */
static bool receive_chunk(session *s, const ask *a, incoming *in, int64_t number, int64_t bytes)
{
    void *slot;
    if (number != in->received || number >= in->walk.total)
        return lose(s, "the peer announced a chunk out of turn");
    const int lane = (int)(number % s->agreed.lanes);
    handover_chunk *const chunk = &in->recent[number % (s->agreed.lanes * s->agreed.slots)];
    const pair p = walk_next(s, a, &in->walk, chunk);
    if (bytes != (int64_t)chunk->bytes)
        return lose(s, "the peer announced a chunk of another size");
    if (!reached(s, kvprim_ring_recv(&s->rings[lane], chunk->bytes, s->work[lane], &slot)))
        return false;
    if (in->cancelled)
        chunk->layers = 0;
    else
        unpack(s, p, chunk, slot, s->work[lane]);
    in->received++;
    die_if_due(s);
    if (in->received == a->cancel_at && !in->cancelled) {
        in->cancelled = true;
        if (!linked(s, handover_link_say(&s->link, say_cancel, 0, 0, 0, NULL, 0)))
            return false;
    }
    return reached(s, kvprim_ring_release(&s->rings[lane], s->work[lane]));
}

/* Takes the slots that are free again, gives credits for them, and notes which layers are complete. */
static bool give_credits(session *s, incoming *in)
{
    for (int lane = 0; lane < s->agreed.lanes; lane++) {
        int32_t n = 0;
        if (!reached(s, kvprim_ring_take(&s->rings[lane], &n)))
            return false;
        if (n && !linked(s, handover_link_say(&s->link, say_credit, lane, n, 0, NULL, 0)))
            return false;
        for (; n > 0; n--) {
            const int64_t number = in->taken[lane]++ * s->agreed.lanes + lane;
            const handover_chunk *const chunk = &in->recent[number % (s->agreed.lanes * s->agreed.slots)];
            in->unpacked += chunk->layers > 0;
            for (int32_t l = 0; l < chunk->layers; l++)
                if (--in->left[chunk->first_layer + l] == 0) {
                    in->last_us = handover_now_us() - in->begun_us;
                    in->first_us = in->layers_ready++ == 0 ? in->last_us : in->first_us;
                }
        }
    }
    return true;
}

static int64_t chunks_taken(const session *s, const incoming *in)
{
    int64_t sum = 0;
    for (int lane = 0; lane < s->agreed.lanes; lane++)
        sum += in->taken[lane];
    return sum;
}

/* While chunks are under way it does not sleep: a credit that comes late leaves the link idle. */
static bool receive_by_ring(session *s, const ask *a)
{
    static incoming state;
    incoming *const in = &state;
    handover_message m;
    incoming_begin(s, a, in);
    if (!linked(s, handover_link_say(&s->link, say_ready, 0, 0, 0, NULL, 0)))
        return false;
    in->begun_us = handover_now_us();
    while (in->announced_end < 0 || chunks_taken(s, in) < in->announced_end) {
        const bool busy = chunks_taken(s, in) < in->received;
        const int n = handover_link_hear(&s->link, &m, busy ? 0 : 20);
        if (n < 0)
            return linked(s, false);
        if (n > 0 && m.kind == say_end && m.a == in->received)
            in->announced_end = m.a;
        else if (n > 0 && m.kind != say_chunk)
            return lose(s, "the peer sent a message that is not due");
        else if (n > 0 && !receive_chunk(s, a, in, m.a, m.b))
            return false;
        if (busy || in->announced_end >= 0)
            s->link.heard_us = handover_now_us(); /* it owes bytes, for which NCCL's deadline counts, or nothing */
        if (!give_credits(s, in) || !check_comms(s))
            return false;
    }
    return linked(s, handover_link_say(&s->link, say_ack, in->first_us, in->last_us, in->unpacked, NULL, 0));
}

/* ---- other ways ---- */

/* All chunks of a request, in one buffer: packed, sent at once, unpacked. */
static bool move_packed(session *s, const ask *a)
{
    chunk_walk walk;
    handover_chunk chunk;
    size_t bytes = 0;
    ask whole = *a;
    whole.chunk_bytes = INT64_MAX;
    walk_begin(s, &whole, &walk);
    for (int64_t n = 0; s->side == 0 && n < walk.total; n++) {
        const pair p = walk_next(s, &whole, &walk, &chunk);
        pack(s, p, &chunk, s->plain + bytes, s->nccl[0]);
        bytes += chunk.bytes;
    }
    bytes = (size_t)bytes_of(s, a->tokens);
    if (!reached(s, s->side == 0 ? kvprim_send(&s->comms[0], s->plain, bytes, KVPRIM_U8, 1, s->nccl[0])
                                 : kvprim_recv(&s->comms[0], s->plain, bytes, KVPRIM_U8, 0, s->nccl[0])))
        return false;
    bytes = 0;
    for (int64_t n = 0; s->side == 1 && n < walk.total; n++) {
        const pair p = walk_next(s, &whole, &walk, &chunk);
        unpack(s, p, &chunk, s->plain + bytes, s->nccl[0]);
        bytes += chunk.bytes;
    }
    return true;
}

/* Where a head of a token lies in a cache. */
static char *piece_at(const handover_cache *c, int32_t layer, int part, int64_t slot, int32_t head)
{
    const int64_t page = slot / c->page_rows, row = slot % c->page_rows, h = head - c->first_head;
    const int64_t piece = c->head_major ? h * c->page_rows + row : row * c->heads + h;
    return c->data + (2 * (int64_t)layer + part) * handover_part_bytes(c) + page * handover_page_bytes(c) +
           piece * c->head_bytes;
}

/* One ncclSend for each token's row of K or V in a layer, or for each of its heads where a side is HND, in groups. */
static bool move_pieces(session *s, const ask *a)
{
    const handover_side_memory *const mine = &s->mine;
    kvprim_comm *const comm = &s->comms[0];
    int64_t calls = 0;
    for (int k = 0; k < s->pair_count; k++) {
        const pair p = s->pairs[k];
        const handover_cache *const c = s->side == 0 ? &s->from[p.from] : &s->to[p.to];
        int32_t first, heads;
        (void)handover_shared_heads(&s->from[p.from], &s->to[p.to], &first, &heads);
        const int32_t at_once = s->agreed.from.head_major || s->agreed.to.head_major ? 1 : heads;
        const int64_t pieces = a->tokens * s->agreed.layers * 2 * (heads / at_once);
        const size_t bytes = (size_t)at_once * (size_t)s->agreed.head_bytes;
        for (int64_t i = 0; i < pieces; i++, calls++) {
            const int32_t head = first + (int32_t)(i % (heads / at_once)) * at_once;
            const int64_t token = i / (heads / at_once) % a->tokens, part = i / (heads / at_once) / a->tokens;
            const int64_t slot = (int64_t)mine->pages[token / c->page_rows] * c->page_rows + token % c->page_rows;
            char *const piece = piece_at(c, (int32_t)(part / 2), (int)(part % 2), slot, head);
            if (calls % 1024 == 0 && calls > 0 && !reached(s, kvprim_group_end(comm)))
                return false;
            if (calls % 1024 == 0 && !reached(s, kvprim_group_start(comm)))
                return false;
            if (!reached(s, s->side == 0 ? kvprim_send(comm, piece, bytes, KVPRIM_U8, 1, s->nccl[0])
                                         : kvprim_recv(comm, piece, bytes, KVPRIM_U8, 0, s->nccl[0])))
                return false;
        }
    }
    return calls == 0 || reached(s, kvprim_group_end(comm));
}

static bool move_plain(session *s, const ask *a)
{
    const size_t bytes = (size_t)a->copies;
    return reached(s, s->side == 0 ? kvprim_send(&s->comms[0], s->plain, bytes, KVPRIM_U8, 1, s->nccl[0])
                                   : kvprim_recv(&s->comms[0], s->plain, bytes, KVPRIM_U8, 0, s->nccl[0]));
}

/* All bytes of a request are under way at once, so that their deadline is later on a slow network: Gigabit Ethernet
   carries 117 MB/s. */
enum { slowest_bytes_per_ms = 100 * 1000 };

/* Ways in which both sides make the same calls, to their end. */
static bool move_together(session *s, const ask *a)
{
    /* guarded from the first call on: NCCL takes only so many that have not run */
    handover_guard_begin(&guard, s->link.fd, s->o->timeout_ms + bytes_of(s, a->tokens) / slowest_bytes_per_ms);
    const bool moved = a->way == way_send     ? move_plain(s, a)
                       : a->way == way_packed ? move_packed(s, a)
                                              : move_pieces(s, a);
    if (moved)
        CU(cudaStreamSynchronize(s->nccl[0]));
    return guard_end(s) && moved;
}

/* The prefill side writes into the decode side's pages: a launch for each pair, on two streams in turn, so that the end
   of one overlaps with the beginning of the next. */
static void push_straight(session *s, const ask *a, const int32_t *pages, int64_t page_count)
{
    kvprim_move moves[2];
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    memcpy(s->peer_pages, pages, (size_t)page_count * sizeof *pages);
    CU(cudaMemcpyAsync(s->peer_pages_on_gpu, s->peer_pages, (size_t)page_count * sizeof *pages, cudaMemcpyHostToDevice,
                       s->mine.stream));
    side_slots(&s->mine, s->peer_pages_on_gpu, page_count, s->agreed.to.page_rows,
               s->to[0].pages * s->agreed.to.page_rows, a->tokens, s->peer_slots);
    CU(cudaEventRecord(s->pushed, s->mine.stream));
    CU(cudaStreamWaitEvent(s->work[0], s->pushed, 0));
    for (int k = 0; k < s->pair_count; k++) {
        const pair p = s->pairs[k];
        launch.stream = k % 2 ? s->work[0] : s->mine.stream;
        kvprim_or_exit(handover_straight(&s->from[p.from], &s->peers[p.to].cache, s->mine.slots, s->peer_slots,
                                         a->tokens, s->mine.rejected, moves));
        kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
    }
    CU(cudaEventRecord(s->pushed, s->work[0]));
    CU(cudaStreamWaitEvent(s->mine.stream, s->pushed, 0));
}

#endif

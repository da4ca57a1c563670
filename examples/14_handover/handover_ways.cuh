/* SPDX-License-Identifier: MIT */
/* handover_ways.cuh: how a request goes from one side to the other: in chunks through rings, or straight into the
   peer's pages. CUDA, C++17.

   By a ring: chunk n goes through lane n % lanes. The prefill side packs it into a slot, sends it and announces it; the
   decode side receives it into a slot, unpacks it into pages, and gives a credit back when the slot is free again.

   Straight: where one process can map the other's GPU memory (CUDA's IPC: one machine, GPUs with peer access), the
   prefill side writes a request's tokens into the decode side's pages, K and V of all layers in one launch. A kernel
   that the decode side launches after say_pushed sees all bytes: the writing kernel has ended, and its writes went
   through the memory of the decode side's own GPU. Until then the decode side must neither read nor reuse the pages,
   also if the request was cancelled: a launch that has begun runs to its end. */
#ifndef HANDOVER_WAYS_CUH
#define HANDOVER_WAYS_CUH

#include "handover_session.cuh"
#include <signal.h>

/* What a transfer brought: see say_ack. */
typedef struct outcome {
    int64_t first_us, last_us, chunks;
    double seconds;
} outcome;

static int64_t bytes_of(const session *s, int64_t tokens)
{
    return 2 * tokens * s->o->layers * s->o->heads * s->o->head_bytes;
}

/* ---- chunks ---- */

/* The chunks of a request, in the order in which they go: chunk 0 of each pair, chunk 1 of each pair, ... */
typedef struct chunk_walk {
    int64_t count[handover_most_pairs], total;
    int64_t next; /* chunk next / pair_count of pair next % pair_count, if it has so many */
} chunk_walk;

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

/* The next chunk and its pair. */
static pair walk_next(const session *s, const ask *a, chunk_walk *w, handover_chunk *chunk)
{
    while (w->next / s->pair_count >= w->count[w->next % s->pair_count])
        w->next++;
    const pair p = s->pairs[w->next % s->pair_count];
    handover_chunk_at(&s->from[p.from], &s->to[p.to], a->tokens, (size_t)a->chunk_bytes, w->next / s->pair_count,
                      chunk);
    w->next++;
    return p;
}

/* The prefill side packs the chunk into `memory`, the decode side unpacks it. */
static void move_chunk(session *s, pair p, const handover_chunk *chunk, void *memory, cudaStream_t stream)
{
    const handover_side *const mine = &s->mine;
    kvprim_move moves[2];
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.stream = stream, launch.max_sms = (int32_t)s->o->max_sms;
    kvprim_or_exit(handover_chunk_moves(s->side == 0 ? &s->from[p.from] : &s->to[p.to], chunk, memory, mine->slots,
                                        mine->rejected, s->side == 0 ? handover_pack : handover_unpack, moves));
    kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
}

static void die_if_due(session *s)
{
    if (s->dies_at < 0 || s->dies_at-- > 0)
        return;
    (void)raise(s->o->stop ? SIGSTOP : SIGKILL);
}

/* ---- the ring: the prefill side ---- */

/* What the decode side has said about a request that goes out. */
typedef struct outgoing {
    int64_t sent;
    bool cancelled, ended, acknowledged;
    handover_message ack;
} outgoing;

/* More credits than a ring has slots, or than chunks were sent, are the peer's mistake. */
static bool take_credits(session *s, const handover_message *m)
{
    kvprim_status status = KVPRIM_ERROR_SIZE;
    if (m->a >= 0 && m->a < s->o->lanes && m->b >= 1 && m->b <= s->o->slots)
        status = kvprim_ring_credit(&s->rings[m->a], (int32_t)m->b);
    return status == KVPRIM_ERROR_SIZE ? lose(s, "the peer gives credits for chunks that it did not get")
                                       : reached(s, status);
}

/* Takes what the decode side says while chunks go out, and after the last one. */
static bool hear_decode_side(session *s, outgoing *out, int wait_ms)
{
    handover_message m;
    int n = 0;
    while (!out->acknowledged && (n = handover_link_hear(&s->link, &m, wait_ms)) > 0) {
        wait_ms = 0;
        if (m.kind == say_credit) {
            if (!take_credits(s, &m))
                return false;
        } else if (m.kind == say_cancel) {
            out->cancelled = true;
        } else if (m.kind == say_ack && out->ended) {
            out->acknowledged = true, out->ack = m;
        } else {
            return lose(s, "the peer sent a message that is not due");
        }
    }
    return linked(s, n >= 0) && (out->acknowledged || check_comms(s));
}

/* Packs, sends and announces one chunk, if its lane has a credit. */
static bool send_chunk(session *s, const ask *a, chunk_walk *walk, int64_t number, bool *sent)
{
    const int lane = (int)(number % s->o->lanes);
    handover_chunk chunk;
    void *slot;
    *sent = false;
    if (!reached(s, kvprim_ring_claim(&s->rings[lane], s->work[lane], &slot)))
        return false;
    if (!slot)
        return true;
    const pair p = walk_next(s, a, walk, &chunk);
    move_chunk(s, p, &chunk, slot, s->work[lane]);
    *sent = true;
    return reached(s, kvprim_ring_send(&s->rings[lane], chunk.bytes, s->work[lane])) &&
           tell(s, say_chunk, number, (int64_t)chunk.bytes, 0);
}

/* cancel_at: this side cancels after so many chunks; -1: it does not. */
static bool send_by_ring(session *s, const ask *a, int64_t cancel_at, handover_message *ack)
{
    chunk_walk walk;
    outgoing out;
    memset(&out, 0, sizeof out);
    walk_begin(s, a, &walk);
    while (out.sent < walk.total && !out.cancelled && out.sent != cancel_at) {
        bool one;
        if (!send_chunk(s, a, &walk, out.sent, &one))
            return false;
        if (one)
            die_if_due(s);
        out.sent += one;
        if (!hear_decode_side(s, &out, one ? 0 : 20))
            return false;
    }
    out.ended = true;
    if (!tell(s, say_end, out.sent, 0, 0))
        return false;
    while (!out.acknowledged)
        if (!hear_decode_side(s, &out, 20))
            return false;
    *ack = out.ack;
    return true;
}

/* ---- the ring: the decode side ---- */

/* A request that is coming in. */
typedef struct incoming {
    chunk_walk walk;
    handover_chunk recent[handover_most_lanes * KVPRIM_MAX_RING_SLOTS]; /* chunk n at n % (lanes * slots) */
    int32_t left[handover_most_layers];                                 /* chunks that a layer still lacks */
    int64_t received, taken[handover_most_lanes], all_taken, announced_end;
    bool cancelled;
    int64_t begun_us;
    int32_t layers_ready;
    outcome out;
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

static handover_chunk *recent(const session *s, incoming *in, int64_t number)
{
    return &in->recent[number % (s->o->lanes * s->o->slots)];
}

/* Receives an announced chunk. One that comes after this side has cancelled is dropped. */
static bool receive_chunk(session *s, const ask *a, incoming *in, int64_t number, int64_t bytes)
{
    void *slot;
    if (number != in->received || number >= in->walk.total)
        return lose(s, "the peer announced a chunk out of turn");
    const int lane = (int)(number % s->o->lanes);
    handover_chunk *const chunk = recent(s, in, number);
    const pair p = walk_next(s, a, &in->walk, chunk);
    if (bytes != (int64_t)chunk->bytes)
        return lose(s, "the peer announced a chunk of another size");
    if (!reached(s, kvprim_ring_recv(&s->rings[lane], chunk->bytes, s->work[lane], &slot)))
        return false;
    if (in->cancelled)
        chunk->layers = 0;
    else
        move_chunk(s, p, chunk, slot, s->work[lane]);
    in->received++;
    die_if_due(s);
    if (in->received == a->cancel_at && !in->cancelled) {
        in->cancelled = true;
        if (!tell(s, say_cancel, 0, 0, 0))
            return false;
    }
    return reached(s, kvprim_ring_release(&s->rings[lane], s->work[lane]));
}

/* Notes which layers are complete with a chunk that was unpacked. */
static void note_unpacked(incoming *in, const handover_chunk *chunk)
{
    in->all_taken++;
    in->out.chunks += chunk->layers > 0;
    for (int32_t l = 0; l < chunk->layers; l++)
        if (--in->left[chunk->first_layer + l] == 0) {
            in->out.last_us = handover_now_us() - in->begun_us;
            in->out.first_us = in->layers_ready++ == 0 ? in->out.last_us : in->out.first_us;
        }
}

/* Takes the slots that are free again and gives credits for them. */
static bool give_credits(session *s, incoming *in)
{
    for (int lane = 0; lane < s->o->lanes; lane++) {
        int32_t n = 0;
        if (!reached(s, kvprim_ring_take(&s->rings[lane], &n)))
            return false;
        if (n && !tell(s, say_credit, lane, n, 0))
            return false;
        for (; n > 0; n--)
            note_unpacked(in, recent(s, in, in->taken[lane]++ * s->o->lanes + lane));
    }
    return true;
}

/* While chunks are under way it does not sleep: a credit that comes late leaves the link idle. */
static bool receive_by_ring(session *s, const ask *a)
{
    static incoming state;
    incoming *const in = &state;
    handover_message m;
    incoming_begin(s, a, in);
    if (!tell(s, say_ready, 0, 0, 0))
        return false;
    in->begun_us = handover_now_us();
    while (in->announced_end < 0 || in->all_taken < in->announced_end) {
        const bool busy = in->all_taken < in->received;
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
    return tell(s, say_ack, in->out.first_us, in->out.last_us, in->out.chunks);
}

/* ---- straight ---- */

/* A launch for each pair, on two streams in turn, so that the end of one overlaps with the beginning of the next: 0.937
   of the copy engine for 4 pairs of 67 MB, and 0.919 on one stream. The launches use all multiprocessors: 0.936 to
   0.940 for pieces of 256 bytes to 2 KB, but 0.90 to 0.92 on 64 of them, and 0.77 to 0.87 on 16 (two H200s). */
static void push_straight(session *s, const ask *a, const int32_t *pages, int64_t page_count)
{
    const handover_side *const mine = &s->mine;
    kvprim_move moves[2];
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    memcpy(s->peer_pages, pages, (size_t)page_count * sizeof *pages);
    CU(cudaMemcpyAsync(s->peer_pages_on_gpu, s->peer_pages, (size_t)page_count * sizeof *pages, cudaMemcpyHostToDevice,
                       mine->stream));
    side_slots(mine, s->peer_pages_on_gpu, page_count, s->to[0].page_rows, s->to[0].pages * s->to[0].page_rows,
               a->tokens, s->peer_slots);
    CU(cudaEventRecord(s->pushed, mine->stream));
    CU(cudaStreamWaitEvent(s->work[0], s->pushed, 0));
    for (int k = 0; k < s->pair_count; k++) {
        const pair p = s->pairs[k];
        launch.stream = k % 2 ? s->work[0] : mine->stream;
        kvprim_or_exit(handover_straight(&s->from[p.from], &s->to[p.to], mine->slots, s->peer_slots, a->tokens,
                                         mine->rejected, moves));
        kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
    }
    CU(cudaEventRecord(s->pushed, s->work[0]));
    CU(cudaStreamWaitEvent(mine->stream, s->pushed, 0));
}

/* Waits for what the prefill side has written into the peer's memory, and says that it is there. */
static bool end_push(session *s)
{
    handover_guard_begin(&guard, s->link.fd, s->o->timeout_ms);
    CU(cudaStreamSynchronize(s->mine.stream));
    return guard_end(s) && tell(s, say_pushed, 0, 0, 0);
}

/* ---- either way ---- */

/* The prefill side sends what was asked for, up to the decode side's word that it is there. */
static bool transfer(session *s, const ask *a, int64_t cancel_at, outcome *out)
{
    handover_message m;
    const int64_t pages = a->way == way_straight ? (a->tokens - 1) / s->to[0].page_rows + 1 : 0;
    if (!tell_bytes(s, say_request, 0, a, sizeof *a) ||
        !expect(s, say_ready, &m, (size_t)pages * sizeof *s->peer_pages))
        return false;
    const int64_t begun_us = handover_now_us();
    if (a->way == way_ring) {
        if (!send_by_ring(s, a, cancel_at, &m))
            return false;
    } else {
        if (a->way == way_straight)
            push_straight(s, a, (const int32_t *)(const void *)s->link.payload, pages);
        if (!(a->way == way_straight ? end_push(s) : s->others->move(s, a)) || !expect(s, say_ack, &m, 0))
            return false;
    }
    *out = {m.a, m.b, m.c, (double)(handover_now_us() - begun_us) / 1e6};
    return true;
}

/* The decode side's part of it. */
static bool serve_transfer(session *s, const ask *a, int64_t pages)
{
    handover_message m;
    if (a->way == way_ring)
        return receive_by_ring(s, a);
    const size_t bytes = a->way == way_straight ? (size_t)pages * sizeof *s->mine.pages : 0;
    return tell_bytes(s, say_ready, 0, s->mine.pages, bytes) &&
           (a->way == way_straight ? expect(s, say_pushed, &m, 0) : s->others->move(s, a)) && tell(s, say_ack, 0, 0, 0);
}

#endif

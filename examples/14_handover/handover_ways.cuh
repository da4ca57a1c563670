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
#include <vector>

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

typedef struct planned {
    pair ranks;
    handover_chunk chunk;
} planned;

/* The chunks of a request, in the order in which they go: chunk 0 of each pair of ranks, chunk 1 of each pair, ... */
static std::vector<planned> plan_of(const session *s, const ask *a)
{
    std::vector<planned> plan;
    size_t before = 0;
    for (int64_t i = 0; i == 0 || plan.size() > before; i++) {
        before = plan.size();
        for (int k = 0; k < s->pair_count; k++) {
            planned next = {s->pairs[k], {}};
            handover_chunk_at(&s->from[next.ranks.from], &s->to[next.ranks.to], a->tokens, (size_t)a->chunk_bytes, i,
                              &next.chunk);
            if (next.chunk.bytes > 0) /* otherwise the pair has no more */
                plan.push_back(next);
        }
    }
    if (plan.empty())
        handover_die("a request of no chunks: %s", kvprim_last_error());
    return plan;
}

/* The prefill side packs the chunk into `memory`, the decode side unpacks it. */
static void move_chunk(session *s, const planned *p, void *memory, cudaStream_t stream)
{
    const handover_side *const mine = &s->mine;
    kvprim_move moves[2];
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.stream = stream, launch.max_sms = (int32_t)s->o->max_sms;
    const handover_cache *const cache = s->side == 0 ? &s->from[p->ranks.from] : &s->to[p->ranks.to];
    kvprim_or_exit(handover_chunk_moves(cache, &p->chunk, memory, mine->slots, mine->rejected,
                                        s->side == 0 ? handover_pack : handover_unpack, moves));
    kvprim_or_exit(kvprim_cuda_move(moves, 2, &launch));
}

/* ---- the ring: the prefill side ---- */

/* A request that goes out. */
typedef struct outgoing {
    int64_t sent;
    bool cancelled, ended, acknowledged;
    handover_message ack;
} outgoing;

/* Takes what the decode side says while chunks go out, and after the last one. */
static void hear_decode_side(session *s, outgoing *out, int wait_ms)
{
    handover_message m;
    for (; !out->acknowledged && handover_link_hear(&s->link, &m, wait_ms); wait_ms = 0)
        if (m.kind == say_credit && m.a >= 0 && m.a < s->o->lanes)
            kvprim_or_exit(kvprim_ring_credit(&s->rings[m.a], (int32_t)m.b));
        else if (m.kind == say_cancel)
            out->cancelled = true;
        else if (m.kind == say_ack && out->ended)
            out->acknowledged = true, out->ack = m;
        else
            not_due();
    if (!out->acknowledged)
        check_comms(s);
}

/* Packs, sends and announces one chunk. False: its lane has no credit. */
static bool send_chunk(session *s, const planned *p, outgoing *out)
{
    const int lane = (int)(out->sent % s->o->lanes);
    void *slot;
    kvprim_or_exit(kvprim_ring_claim(&s->rings[lane], s->work[lane], &slot));
    if (!slot)
        return false;
    move_chunk(s, p, slot, s->work[lane]);
    kvprim_or_exit(kvprim_ring_send(&s->rings[lane], p->chunk.bytes, s->work[lane]));
    tell(s, say_chunk, out->sent++, (int64_t)p->chunk.bytes, 0);
    return true;
}

/* Returns the decode side's say_ack. cancel_at: this side cancels after so many chunks; -1: it does not. */
static handover_message send_by_ring(session *s, const std::vector<planned> &plan, int64_t cancel_at)
{
    outgoing out;
    memset(&out, 0, sizeof out);
    while (out.sent < (int64_t)plan.size() && !out.cancelled && out.sent != cancel_at) {
        const bool sent = send_chunk(s, &plan[(size_t)out.sent], &out);
        hear_decode_side(s, &out, sent ? 0 : 20);
    }
    out.ended = true;
    tell(s, say_end, out.sent, 0, 0);
    while (!out.acknowledged)
        hear_decode_side(s, &out, 20);
    return out.ack;
}

/* ---- the ring: the decode side ---- */

/* A request that is coming in. */
typedef struct incoming {
    int32_t left[handover_most_layers]; /* chunks that a layer still lacks */
    int64_t received, taken[handover_most_lanes], all_taken, announced_end;
    bool cancelled;
    int64_t begun_us;
    int32_t layers_ready;
    outcome out;
} incoming;

/* Receives an announced chunk. One that comes after this side has cancelled is dropped. */
static void receive_chunk(session *s, planned *p, incoming *in, int64_t cancel_at)
{
    const int lane = (int)(in->received % s->o->lanes);
    void *slot;
    kvprim_or_exit(kvprim_ring_recv(&s->rings[lane], p->chunk.bytes, s->work[lane], &slot));
    if (in->cancelled)
        p->chunk.layers = 0;
    else
        move_chunk(s, p, slot, s->work[lane]);
    kvprim_or_exit(kvprim_ring_release(&s->rings[lane], s->work[lane]));
    if (++in->received == cancel_at) {
        in->cancelled = true;
        tell(s, say_cancel, 0, 0, 0);
    }
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
static void give_credits(session *s, const std::vector<planned> &plan, incoming *in)
{
    for (int lane = 0; lane < s->o->lanes; lane++) {
        int32_t n = 0;
        kvprim_or_exit(kvprim_ring_take(&s->rings[lane], &n));
        if (n)
            tell(s, say_credit, lane, n, 0);
        for (; n > 0; n--)
            note_unpacked(in, &plan[(size_t)(in->taken[lane]++ * s->o->lanes + lane)].chunk);
    }
}

/* While chunks are under way it does not sleep: a credit that comes late leaves the link idle. */
static void receive_by_ring(session *s, const ask *a)
{
    std::vector<planned> plan = plan_of(s, a);
    static incoming state;
    incoming *const in = &state;
    handover_message m;
    memset(in, 0, sizeof *in);
    in->announced_end = -1;
    for (const planned &p : plan)
        for (int32_t l = 0; l < p.chunk.layers; l++)
            in->left[p.chunk.first_layer + l]++;
    tell(s, say_ready, 0, 0, 0);
    in->begun_us = handover_now_us();
    while (in->announced_end < 0 || in->all_taken < in->announced_end) {
        const bool busy = in->all_taken < in->received, heard = handover_link_hear(&s->link, &m, busy ? 0 : 20);
        if (heard && m.kind == say_chunk && m.a == in->received && m.a < (int64_t)plan.size() &&
            m.b == (int64_t)plan[(size_t)m.a].chunk.bytes)
            receive_chunk(s, &plan[(size_t)m.a], in, a->cancel_at);
        else if (heard && m.kind == say_end && m.a == in->received)
            in->announced_end = m.a;
        else if (heard)
            not_due();
        if (busy || in->announced_end >= 0)
            s->link.heard_us = handover_now_us(); /* it owes bytes, for which NCCL's deadline counts, or nothing */
        give_credits(s, plan, in);
        check_comms(s);
    }
    tell(s, say_ack, in->out.first_us, in->out.last_us, in->out.chunks);
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
static void end_push(session *s)
{
    guard_begin(s->o->timeout_ms);
    CU(cudaStreamSynchronize(s->mine.stream));
    guard_end();
    tell(s, say_pushed, 0, 0, 0);
}

/* ---- either way ---- */

/* The prefill side sends what was asked for, up to the decode side's word that it is there. */
static outcome transfer(session *s, const ask *a, int64_t cancel_at)
{
    handover_message m;
    const int64_t pages = a->way == way_straight ? (a->tokens - 1) / s->to[0].page_rows + 1 : 0;
    const std::vector<planned> plan = plan_of(s, a); /* before the clock starts */
    tell_bytes(s, say_request, a, sizeof *a);
    expect(s, say_ready, &m, (size_t)pages * sizeof *s->peer_pages);
    const int64_t begun_us = handover_now_us();
    if (a->way == way_ring) {
        m = send_by_ring(s, plan, cancel_at);
    } else {
        if (a->way == way_straight) {
            push_straight(s, a, (const int32_t *)(const void *)s->link.payload, pages);
            end_push(s);
        } else {
            s->others->move(s, a);
        }
        expect(s, say_ack, &m, 0);
    }
    return {m.a, m.b, m.c, (double)(handover_now_us() - begun_us) / 1e6};
}

/* The decode side's part of it. */
static void serve_transfer(session *s, const ask *a, int64_t pages)
{
    handover_message m;
    if (a->way == way_ring) {
        receive_by_ring(s, a);
        return;
    }
    tell_bytes(s, say_ready, s->mine.pages, a->way == way_straight ? (size_t)pages * sizeof *s->mine.pages : 0);
    if (a->way == way_straight)
        expect(s, say_pushed, &m, 0);
    else
        s->others->move(s, a);
    tell(s, say_ack, 0, 0, 0);
}

#endif

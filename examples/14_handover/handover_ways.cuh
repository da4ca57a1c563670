/* SPDX-License-Identifier: MIT */
/* handover_ways.cuh: how a request goes from one side to the other: in chunks through rings, or straight into the
   peer's pages. CUDA, C++17.

   By a ring: chunk n goes through lane n % lanes. The prefill side packs it into a slot, sends it and announces it; the
   decode side receives it into a slot, unpacks it into pages, and gives a credit back when the slot is free again.
   Small chunks of a lane join: those in slots that follow each other are packed, sent, announced, received and unpacked
   together, as each of that takes the host microseconds, NCCL's calls 13 (two H200s).

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
    int64_t number; /* of the next chunk */
    int64_t next;   /* it is chunk next / pair_count of pair next % pair_count, if that has so many */
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

/* The next chunk and its pair. Goes on to the chunk that is `steps` after it. */
static pair walk_next(const session *s, const ask *a, chunk_walk *w, int64_t steps, handover_chunk *chunk)
{
    pair p = {0, 0};
    for (int64_t k = 0; k < steps && w->number < w->total; k++, w->number++, w->next++) {
        while (w->next / s->pair_count >= w->count[w->next % s->pair_count])
            w->next++;
        if (k > 0)
            continue;
        p = s->pairs[w->next % s->pair_count];
        handover_chunk_at(&s->from[p.from], &s->to[p.to], a->tokens, (size_t)a->chunk_bytes, w->next / s->pair_count,
                          chunk);
    }
    return p;
}

/* The bytes of a request's largest chunk. Slots have no more: what joins is sent with what chunks leave of their slots,
   and chunks may be half as long as they were allowed to be. */
static int64_t largest_chunk(const session *s, const ask *a)
{
    handover_chunk chunk;
    chunk_walk walk;
    size_t most = 0;
    walk_begin(s, a, &walk);
    while (walk.number < walk.total) {
        (void)walk_next(s, a, &walk, 1, &chunk);
        most = chunk.bytes > most ? chunk.bytes : most;
    }
    return (int64_t)most;
}

/* A walk along the chunks of each lane. */
static void walk_lanes(const session *s, const ask *a, chunk_walk *walks)
{
    handover_chunk skipped;
    for (int lane = 0; lane < s->o->lanes; lane++) {
        walk_begin(s, a, &walks[lane]);
        if (lane > 0)
            (void)walk_next(s, a, &walks[lane], lane, &skipped);
    }
}

/* On the prefill side packing a chunk into `memory`, on the decode side unpacking it. */
static void chunk_moves(session *s, pair p, const handover_chunk *chunk, void *memory, kvprim_move moves[2])
{
    const handover_side *const mine = &s->mine;
    kvprim_or_exit(handover_chunk_moves(s->side == 0 ? &s->from[p.from] : &s->to[p.to], chunk, memory, mine->slots,
                                        mine->rejected, s->side == 0 ? handover_pack : handover_unpack, moves));
}

static void run_moves(session *s, const kvprim_move *moves, size_t n, cudaStream_t stream)
{
    kvprim_cuda_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.stream = stream, launch.max_sms = (int32_t)s->o->max_sms;
    kvprim_or_exit(kvprim_cuda_move(moves, n, &launch));
}

static void die_if_due(session *s)
{
    if (s->dies_at < 0 || s->dies_at-- > 0)
        return;
    (void)raise(s->o->stop ? SIGSTOP : SIGKILL);
}

/* ---- the ring: the prefill side ---- */

/* Chunks that join have joined_bytes at most, and a quarter of all slots: so four messages may be under way, and the
   link and both sides always have one. With two at once, chunks of 8 MB took 1.2 times as long on one lane (H200). */
enum { joined_bytes = 16 << 20, most_joined = 4 };

static int64_t joined_chunks(const session *s)
{
    const int64_t fit = joined_bytes / (int64_t)s->rings[0].desc.slot_bytes, quarter = s->o->slots * s->o->lanes / 4;
    const int64_t n = fit < quarter ? fit : quarter,
                  most = s->o->slots < most_joined ? s->o->slots : int64_t(most_joined);
    return n < 1 ? 1 : n > most ? most : n;
}

/* A request that goes out, and what the decode side has said about it. */
typedef struct outgoing {
    chunk_walk walk[handover_most_lanes];
    int64_t sent, claimed[handover_most_lanes];
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

/* Packs, sends and announces up to `most` chunks of a lane in one message, as many as there are credits for. */
static bool send_chunks(session *s, const ask *a, outgoing *out, int lane, int64_t most)
{
    chunk_walk *const walk = &out->walk[lane];
    const int64_t number = walk->number;
    kvprim_move moves[2 * most_joined];
    size_t bytes = 0, n = 0;
    for (; (int64_t)n < most && walk->number < walk->total; n++) {
        handover_chunk chunk;
        void *slot;
        if (n > 0 && out->claimed[lane] % s->o->slots == 0) /* the first slot does not follow the last one */
            break;
        if (!reached(s, kvprim_ring_claim(&s->rings[lane], s->work[lane], &slot)))
            return false;
        if (!slot)
            break;
        out->claimed[lane]++, out->sent++;
        const pair p = walk_next(s, a, walk, s->o->lanes, &chunk);
        chunk_moves(s, p, &chunk, slot, moves + 2 * n);
        bytes = n * s->rings[lane].desc.slot_bytes + chunk.bytes;
    }
    if (n == 0)
        return true;
    run_moves(s, moves, 2 * n, s->work[lane]);
    if (!reached(s, kvprim_ring_send(&s->rings[lane], bytes, s->work[lane])) ||
        !tell(s, say_chunks, number, (int64_t)bytes, (int64_t)n))
        return false;
    for (; n > 0; n--)
        die_if_due(s);
    return true;
}

/* cancel_at: this side cancels after so many chunks; -1: it does not. */
static bool send_by_ring(session *s, const ask *a, int64_t cancel_at, handover_message *ack)
{
    outgoing out;
    memset(&out, 0, sizeof out);
    walk_lanes(s, a, out.walk);
    const int64_t total = cancel_at < 0 || cancel_at > out.walk[0].total ? out.walk[0].total : cancel_at;
    while (out.sent < total && !out.cancelled) {
        const int64_t before = out.sent;
        for (int lane = 0; lane < s->o->lanes; lane++) {
            const int64_t most = joined_chunks(s), left = total - out.sent;
            if (!send_chunks(s, a, &out, lane, left < most ? left : most))
                return false;
        }
        if (!hear_decode_side(s, &out, out.sent > before ? 0 : 20))
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
    chunk_walk walk[handover_most_lanes];
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
    walk_begin(s, a, &in->walk[0]);
    while (in->walk[0].number < in->walk[0].total) {
        (void)walk_next(s, a, &in->walk[0], 1, &chunk);
        for (int32_t l = 0; l < chunk.layers; l++)
            in->left[chunk.first_layer + l]++;
    }
    walk_lanes(s, a, in->walk);
}

static handover_chunk *recent(const session *s, incoming *in, int64_t number)
{
    return &in->recent[number % (s->o->lanes * s->o->slots)];
}

/* Receives n announced chunks of a lane, from chunk `number` on. Those that come after this side has cancelled are
   dropped. */
static bool receive_chunks(session *s, const ask *a, incoming *in, int64_t number, int64_t bytes, int64_t n)
{
    const int lane = number < 0 ? 0 : (int)(number % s->o->lanes);
    chunk_walk *const walk = &in->walk[lane];
    const size_t slot_bytes = s->rings[lane].desc.slot_bytes;
    kvprim_move moves[2 * most_joined];
    pair pairs[most_joined];
    void *slot;
    if (number != walk->number || n < 1 || n > most_joined || number + (n - 1) * s->o->lanes >= walk->total)
        return lose(s, "the peer announced chunks out of turn");
    const int64_t before = number / s->o->lanes; /* of this lane */
    if (before + n > in->taken[lane] + s->o->slots || before % s->o->slots + n > s->o->slots)
        return lose(s, "the peer announced chunks for slots that are not free, or do not follow each other");
    for (int64_t k = 0; k < n; k++)
        pairs[k] = walk_next(s, a, walk, s->o->lanes, recent(s, in, number + k * s->o->lanes));
    const handover_chunk *const last = recent(s, in, number + (n - 1) * s->o->lanes);
    if (bytes != (n - 1) * (int64_t)slot_bytes + (int64_t)last->bytes)
        return lose(s, "the peer announced chunks of another size");
    if (!reached(s, kvprim_ring_recv(&s->rings[lane], (size_t)bytes, s->work[lane], &slot)))
        return false;
    for (int64_t k = 0; k < n; k++) {
        handover_chunk *const chunk = recent(s, in, number + k * s->o->lanes);
        chunk_moves(s, pairs[k], chunk, (char *)slot + (size_t)k * slot_bytes, moves + 2 * k);
        chunk->layers = in->cancelled ? 0 : chunk->layers;
        in->received++;
        die_if_due(s);
    }
    if (!in->cancelled)
        run_moves(s, moves, 2 * (size_t)n, s->work[lane]);
    if (a->cancel_at > 0 && in->received >= a->cancel_at && !in->cancelled) {
        in->cancelled = true;
        if (!tell(s, say_cancel, 0, 0, 0))
            return false;
    }
    for (int64_t k = 0; k < n; k++)
        if (!reached(s, kvprim_ring_release(&s->rings[lane], s->work[lane])))
            return false;
    return true;
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
    if (!open_rings(s, largest_chunk(s, a)) || !tell(s, say_ready, 0, 0, 0))
        return false;
    in->begun_us = handover_now_us();
    while (in->announced_end < 0 || in->all_taken < in->announced_end) {
        const bool busy = in->all_taken < in->received;
        const int n = handover_link_hear(&s->link, &m, busy ? 0 : 20);
        if (n < 0)
            return linked(s, false);
        if (n > 0 && m.kind == say_end && m.a == in->received)
            in->announced_end = m.a;
        else if (n > 0 && m.kind != say_chunks)
            return lose(s, "the peer sent a message that is not due");
        else if (n > 0 && !receive_chunks(s, a, in, m.a, m.b, m.c))
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
    if ((a->way == way_ring && !open_rings(s, largest_chunk(s, a))) || !tell_bytes(s, say_request, 0, a, sizeof *a) ||
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

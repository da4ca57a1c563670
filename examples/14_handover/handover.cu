/* SPDX-License-Identifier: MIT */
/* Hands the KV pages of requests over from a prefill rank to a decode rank: another process, on another GPU or machine.
   The two may differ in page layout, page size and tensor-parallel size. A chunk of layers is packed into a slot of a
   ring, sent by NCCL, received into a slot of the other side's ring and unpacked into pages; then its credit goes back.
   Chunks overlap and come layer by layer; the program prints when the first layer is ready. Where the GPUs reach each
   other's memory, one kernel can write straight into the peer's pages instead. The program verifies every byte of every
   page, also after a cancelled request and after either process has died, and compares the throughput with other
   ways.

       nvcc -arch=native -std=c++17 -O3 -I. examples/14_handover/handover.cu -lnccl -o 14_handover && ./14_handover

   `14_handover --help` lists options. Across machines: `14_handover --listen 0.0.0.0:5555` on one, and `14_handover
   --connect first:5555` on the other.

   handover_plan.h says what goes where, handover_link.h is the control channel, handover_session.cuh has the ways. */
#define KVPRIM_IMPLEMENTATION
#include "handover_session.cuh"
#include "handover_plot.h"
#include <sys/prctl.h>
#include <sys/wait.h>

/* How long a side may take to start: CUDA, NCCL, memory. A connection that ends is noticed at once nevertheless.
   answer_ms: to answer the setup, for which a decode side does nothing else. */
enum { connect_ms = 60000, answer_ms = 5000 };

/* Tokens that are sent piece by piece. A piece takes microseconds whatever its size: all of a request, many seconds. */
enum { pieces_tokens = 64 };

/* ---- sessions ---- */

/* The same on both sides, and for all sessions of a process. */
static void open_once(session *s)
{
    const handover_options *const o = s->o;
    const setup *const a = &s->agreed;
    const size_t ring_bytes = (size_t)a->lanes * (size_t)a->slots * (size_t)a->slot_bytes;
    for (int r = 0; r < a->from.tp; r++)
        s->from[r] = side_cache(o, &a->from, r);
    for (int r = 0; r < a->to.tp; r++)
        s->to[r] = side_cache(o, &a->to, r);
    side_open(&s->mine, o, s->side == 0 ? &a->from : &a->to, s->side);
    for (int r = 0; r < s->mine.shape.tp; r++)
        (s->side == 0 ? s->from : s->to)[r].data = s->mine.caches[r].data;
    find_pairs(s);
    for (int k = 0; k < a->lanes; k++) {
        CU(cudaStreamCreateWithFlags(&s->nccl[k], cudaStreamNonBlocking));
        CU(cudaStreamCreateWithFlags(&s->work[k], cudaStreamNonBlocking));
    }
    CU(cudaMalloc((void **)&s->ring_memory, ring_bytes));
    if (a->opponents)
        CU(cudaMalloc((void **)&s->plain, (size_t)(2 * a->tokens * a->layers * a->heads * a->head_bytes)));
    CU(cudaMalloc((void **)&s->peer_slots, (size_t)a->tokens * sizeof *s->peer_slots));
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
    d.rank = s->side, d.world = 2, d.id = s->agreed.ids[k];
    d.timeout_ms = s->agreed.timeout_ms, d.init_timeout_ms = connect_ms, d.no_kernels = 1;
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
    for (int k = 0; k < s->agreed.lanes && right; k++)
        right = connect_comm(s, k);
    right = guard_end(s) && right;
    for (int k = 0; k < s->agreed.lanes && right; k++) {
        kvprim_ring_desc d;
        memset(&d, 0, sizeof d);
        d.comm = &s->comms[k], d.peer = !s->side, d.slots = s->agreed.slots,
        d.slot_bytes = (size_t)s->agreed.slot_bytes;
        d.memory = s->ring_memory + (size_t)k * (size_t)d.slots * d.slot_bytes, d.stream = s->nccl[k];
        kvprim_or_exit(kvprim_ring_init(&s->rings[k], &d));
    }
    return right;
}

/* The decode side offers its caches, and the buffer that the copy engine fills, to a prefill side that asked. */
static bool exchange_offers(session *s)
{
    handover_direct_offer offer;
    handover_message m;
    for (int r = s->agreed.opponents ? -1 : 0; r < s->agreed.to.tp && s->agreed.offers; r++) {
        if (s->side == 1) {
            kvprim_or_exit(handover_direct_offer_of(&s->to[r < 0 ? 0 : r], &offer));
            if (r < 0)
                CU(cudaIpcGetMemHandle(&offer.handle, s->plain));
            if (!linked(s, handover_link_say(&s->link, say_offer, r, 0, 0, &offer, sizeof offer)))
                return false;
            continue;
        }
        handover_direct peer;
        memset(&peer, 0, sizeof peer);
        if (!linked(s, handover_link_expect_bytes(&s->link, say_offer, &m, sizeof offer)))
            return false;
        memcpy(&offer, s->link.payload, sizeof offer);
        offer.cache.data = NULL;
        if (m.a != r || memcmp(&offer.cache, &s->to[r < 0 ? 0 : r], sizeof offer.cache) != 0)
            return lose(s, "the peer offers another cache than was agreed on");
        kvprim_or_exit(handover_direct_open(&peer, &offer));
        if (r < 0)
            s->peer_plain = peer.cache.data;
        else
            s->peers[r] = peer;
    }
    return true;
}

static setup setup_of(const handover_options *o)
{
    setup a;
    memset(&a, 0, sizeof a);
    a.layers = o->layers, a.heads = o->heads, a.head_bytes = o->head_bytes, a.from = o->from, a.to = o->to;
    a.tokens = o->tokens, a.seed = o->seed, a.slots = o->slots, a.lanes = o->lanes, a.max_sms = o->max_sms;
    a.timeout_ms = o->timeout_ms, a.verify = o->verify, a.opponents = o->opponents && o->rounds > 0;
    a.offers = o->straight;
    for (int k = 0; k < o->chunk_count; k++)
        a.slot_bytes = o->chunk_bytes[k] > a.slot_bytes ? o->chunk_bytes[k] : a.slot_bytes;
    a.slot_bytes = (a.slot_bytes + 127) / 128 * 128;
    return a;
}

/* Names the first option that differs. How many requests and rounds there are is the prefill side's alone. */
static bool same_options(session *s, const setup *theirs, const setup *mine)
{
    const struct {
        const char *option;
        int64_t theirs, mine;
    } all[] = {{"--layers", theirs->layers, mine->layers},
               {"--heads", theirs->heads, mine->heads},
               {"--head-bytes", theirs->head_bytes, mine->head_bytes},
               {"--from-tp", theirs->from.tp, mine->from.tp},
               {"--to-tp", theirs->to.tp, mine->to.tp},
               {"--page-rows", theirs->from.page_rows, mine->from.page_rows},
               {"--to-page-rows", theirs->to.page_rows, mine->to.page_rows},
               {"--from-layout (1: hnd)", theirs->from.head_major, mine->from.head_major},
               {"--to-layout (1: hnd)", theirs->to.head_major, mine->to.head_major},
               {"--tokens", theirs->tokens, mine->tokens},
               {"--seed", theirs->seed, mine->seed},
               {"--slots", theirs->slots, mine->slots},
               {"--lanes", theirs->lanes, mine->lanes},
               {"--max-sms", theirs->max_sms, mine->max_sms},
               {"--timeout-ms", theirs->timeout_ms, mine->timeout_ms},
               {"--verify (1: yes)", theirs->verify, mine->verify},
               {"opponents and --rounds (1: both)", theirs->opponents, mine->opponents},
               {"--mode (1: not ring alone)", theirs->offers, mine->offers},
               {"the largest of --chunk-bytes, in 128s,", theirs->slot_bytes, mine->slot_bytes}};
    for (size_t k = 0; k < sizeof all / sizeof *all && !s->why[0]; k++)
        if (all[k].theirs != all[k].mine)
            (void)snprintf(s->why, sizeof s->why, "the prefill side has other options: %s is %lld there, %lld here",
                           all[k].option, (long long)all[k].theirs, (long long)all[k].mine);
    return !s->why[0];
}

static bool agree(session *s)
{
    handover_message m;
    setup a = setup_of(s->o), theirs;
    if (s->side == 0) {
        for (int k = 0; k < a.lanes; k++)
            kvprim_or_exit(kvprim_comm_new_id(&a.ids[k]));
        s->agreed = a;
        if (!linked(s, handover_link_say(&s->link, say_setup, 0, 0, 0, &a, sizeof a)) ||
            !linked(s, handover_link_expect(&s->link, say_welcome, &m)))
            return false;
        s->served = m.a > s->served ? m.a : s->served;
        return true;
    }
    if (!linked(s, handover_link_expect_bytes(&s->link, say_setup, &m, sizeof a)))
        return false;
    memcpy(&theirs, s->link.payload, sizeof theirs);
    if (!same_options(s, &theirs, &a))
        return false;
    s->agreed = theirs;
    return linked(s, handover_link_say(&s->link, say_welcome, s->served, 0, 0, NULL, 0));
}

static bool agree_on(session *s, int fd, int timeout_ms)
{
    s->why[0] = 0;
    return linked(s, handover_link_open(&s->link, fd, timeout_ms)) && agree(s);
}

static bool connect_session(session *s)
{
    s->link.timeout_ms = connect_ms;
    if (!s->opened)
        open_once(s);
    const bool right = connect_comms(s) && exchange_offers(s);
    s->link.timeout_ms = s->o->timeout_ms, s->link.heard_us = handover_now_us();
    return right;
}

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

/* Leaves what the next session needs. False: there can be none, because a communicator could not be ended. */
static bool close_session(session *s, bool orderly)
{
    const int64_t until_us = handover_now_us() + (int64_t)connect_ms * 1000;
    bool ended = true;
    if (!orderly)
        abort_comms(s);
    for (int k = 0; k < s->agreed.lanes; k++)
        ended = destroy_comm(&s->comms[k], until_us) && ended;
    if (!ended)
        return false;
    CU(cudaDeviceSynchronize());
    for (int r = 0; r < s->agreed.to.tp; r++)
        (void)handover_direct_close(&s->peers[r]);
    if (s->peer_plain)
        (void)cudaIpcCloseMemHandle(s->peer_plain);
    s->peer_plain = NULL;
    (void)cudaGetLastError();
    handover_link_close(&s->link);
    return true;
}

/* ---- the decode side ---- */

static bool serve_transfer(session *s, const ask *a, int64_t page_count)
{
    handover_message m;
    if (a->way == way_ring)
        return receive_by_ring(s, a);
    const bool together = a->way == way_send || a->way == way_packed || a->way == way_pieces;
    if (!linked(s, handover_link_say(&s->link, say_ready, 0, 0, 0, s->mine.pages,
                                     together ? 0 : (size_t)page_count * sizeof *s->mine.pages)))
        return false;
    if (together ? !move_together(s, a) : !linked(s, handover_link_expect(&s->link, say_pushed, &m)))
        return false;
    return linked(s, handover_link_say(&s->link, say_ack, 0, 0, 0, NULL, 0));
}

/* Whether the peer's setup allows what it asks for: what follows relies on these bounds. last: the ask before. */
static bool agreed_on(session *s, const ask *a, const ask *last)
{
    const setup *const g = &s->agreed;
    const struct {
        const char *what;
        int64_t value, least, most;
    } all[] = {{"the request's number", a->request, 0, handover_most_requests},
               {"the tokens", a->tokens, 1, g->tokens},
               {"the way", a->way, 0, ways - 1},
               {"the bytes of a chunk", a->chunk_bytes, (int64_t)2 * g->heads * g->head_bytes, g->slot_bytes},
               {"the contiguous bytes", a->copies, a->way == way_send, bytes_of(s, g->tokens)}};
    for (size_t k = 0; k < sizeof all / sizeof *all && !s->why[0]; k++)
        if (all[k].value < all[k].least || all[k].value > all[k].most)
            (void)snprintf(s->why, sizeof s->why, "the prefill side's ask: %s must be from %lld to %lld, not %lld",
                           all[k].what, (long long)all[k].least, (long long)all[k].most, (long long)all[k].value);
    const bool mapped = a->way == way_straight || a->way == way_copy;
    const bool opponent = a->way != way_straight && a->way != way_ring;
    if ((mapped && !g->offers) || (opponent && !g->opponents))
        return lose(s, "the prefill side asks for a way that was not agreed on");
    if (a->again && (a->way != way_ring || a->request != last->request || a->tokens != last->tokens))
        return lose(s, "the prefill side asks again for what it has not asked for before");
    return !s->why[0];
}

static bool serve_request(session *s, const ask *a, const ask *last)
{
    if (!agreed_on(s, a, last))
        return false;
    const int64_t pages = a->again ? 0 : side_take_pages(&s->mine, s->agreed.seed, a->request, a->tokens);
    if (a->fill)
        side_fill(&s->mine, 0, 0, false);
    CU(cudaStreamSynchronize(s->mine.stream));
    return serve_transfer(s, a, pages);
}

/* Does what the prefill side asks for until it says goodbye. */
static bool serve(session *s)
{
    handover_message m;
    ask next, last;
    memset(&last, 0, sizeof last);
    for (;;) {
        const int n = handover_link_hear(&s->link, &m, 100);
        if (n < 0)
            return linked(s, false);
        if (n == 0)
            continue;
        if (m.kind == say_request && m.payload_bytes == sizeof last) {
            memcpy(&next, s->link.payload, sizeof next);
            if (!serve_request(s, &next, &last))
                return false;
            last = next;
        } else if (m.kind == say_verify && last.tokens > 0) {
            char text[200];
            const int64_t wrong = side_verify(&s->mine, last.request, last.tokens, text, sizeof text);
            s->wrong += wrong != 0;
            s->served = wrong == 0 && m.a ? last.request + 1 : s->served;
            if (!linked(s, handover_link_say(&s->link, say_verified, wrong, 0, 0, text, strlen(text) + 1)))
                return false;
        } else {
            return m.kind == say_bye || lose(s, "the peer sent a message that is not due");
        }
        s->link.heard_us = handover_now_us(); /* while this side worked, the peer had nothing to say */
    }
}

/* ---- the prefill side ---- */

/* What a run found, and what it measured: GB/s of each round, by way and, for the ring, chunk size. */
typedef struct report {
    int64_t requests, tokens, cancelled, wrong, bytes, chunks;
    double gbs[ways][handover_most_chunks][handover_most_rounds];
    double first_ms[handover_most_chunks][handover_most_rounds], last_ms[handover_most_chunks][handover_most_rounds];
} report;

/* Sends what was asked for by the way that was asked for, up to the decode side's word that it is there. */
static bool transfer(session *s, const ask *a, int64_t cancel_at, handover_message *ack, double *seconds)
{
    handover_message m;
    int64_t sent = 0;
    const bool mapped = a->way == way_straight || a->way == way_copy;
    const int64_t pages = mapped ? (a->tokens + s->agreed.to.page_rows - 1) / s->agreed.to.page_rows : 0;
    if (!linked(s, handover_link_say(&s->link, say_request, 0, 0, 0, a, sizeof *a)) ||
        !linked(s, handover_link_expect_bytes(&s->link, say_ready, &m, (size_t)pages * sizeof *s->peer_pages)))
        return false;
    const int64_t begun_us = handover_now_us();
    if (a->way == way_ring) {
        if (!send_by_ring(s, a, cancel_at, &sent) || !await_ack(s, ack))
            return false;
    } else if (mapped) {
        if (a->way == way_straight)
            push_straight(s, a, (const int32_t *)(const void *)s->link.payload, pages);
        else
            CU(cudaMemcpyAsync(s->peer_plain, s->plain, (size_t)a->copies, cudaMemcpyDefault, s->mine.stream));
        if (!guarded_wait(s, s->mine.stream) || !linked(s, handover_link_say(&s->link, say_pushed, 0, 0, 0, NULL, 0)) ||
            !linked(s, handover_link_expect(&s->link, say_ack, ack)))
            return false;
    } else if (!move_together(s, a) || !linked(s, handover_link_expect(&s->link, say_ack, ack))) {
        return false;
    }
    *seconds = (double)(handover_now_us() - begun_us) / 1e6;
    return true;
}

/* last: this request is done after it. */
static bool verify(session *s, report *r, const ask *a, bool last)
{
    handover_message m;
    if (!linked(s, handover_link_say(&s->link, say_verify, last, 0, 0, NULL, 0)) ||
        !linked(s, handover_link_expect(&s->link, say_verified, &m)))
        return false;
    if (m.a != 0)
        printf("WRONG: request %lld of %lld tokens: %lld bytes; %.180s\n", (long long)a->request, (long long)a->tokens,
               (long long)m.a, m.payload_bytes ? s->link.payload : "");
    r->wrong += m.a != 0;
    return true;
}

static void begin_request(session *s, const ask *a)
{
    (void)side_take_pages(&s->mine, s->agreed.seed, a->request, a->tokens);
    if (s->agreed.verify)
        side_fill(&s->mine, a->request, a->tokens, true);
    CU(cudaStreamSynchronize(s->mine.stream));
}

/* A request of random length; one that is cancelled comes again, into the same pages. */
static bool run_request(session *s, report *r, int64_t request, int32_t by)
{
    const handover_options *const o = s->o;
    const uint64_t h = handover_mix(handover_mix((uint64_t)o->seed + 77) ^ (uint64_t)request);
    handover_message ack;
    double seconds;
    ask a;
    memset(&a, 0, sizeof a);
    a.request = request, a.tokens = 1 + (int64_t)(h % (uint64_t)o->tokens), a.way = by, a.fill = s->agreed.verify;
    a.chunk_bytes = o->chunk_bytes[0], a.cancel_at = -1;
    begin_request(s, &a);
    if (o->cancel_every && by == way_ring && request % o->cancel_every == o->cancel_every - 1) {
        chunk_walk walk;
        walk_begin(s, &a, &walk);
        const int64_t at = 1 + (int64_t)(handover_mix(h) % (uint64_t)walk.total);
        const bool here = request / o->cancel_every % 2 == 0;
        a.cancel_at = here ? -1 : at;
        if (!transfer(s, &a, here ? at - 1 : -1, &ack, &seconds))
            return false;
        r->cancelled++, a.cancel_at = -1, a.fill = 0, a.again = 1;
    }
    if (!transfer(s, &a, -1, &ack, &seconds))
        return false;
    r->requests++, r->tokens += a.tokens, r->bytes += bytes_of(s, a.tokens), r->chunks += ack.c;
    return !s->agreed.verify || verify(s, r, &a, true);
}

static void progress(const char *format, long long a, long long b)
{
    static int64_t said_us;
    const int64_t now_us = handover_now_us();
    if (!isatty(1) || (now_us - said_us < 300000 && a != b))
        return;
    said_us = now_us;
    printf(format, a, b);
    printf(a == b ? "\r\033[K" : "\r");
    fflush(stdout);
}

static bool run_requests(session *s, report *r)
{
    const int64_t all = s->o->requests;
    while (s->served < all) {
        const int32_t by = s->o->ring && (!s->o->straight || s->served % 2 == 0) ? way_ring : way_straight;
        if (!run_request(s, r, s->served, by))
            return false;
        s->served++;
        progress("request %lld of %lld", s->served, all);
    }
    return true;
}

/* ---- throughput ---- */

static bool measure(session *s, report *r, int32_t by, int chunk, int round)
{
    handover_message ack;
    double seconds;
    ask a;
    memset(&a, 0, sizeof a);
    a.request = s->o->requests, a.tokens = s->o->tokens, a.way = by, a.cancel_at = -1;
    if (by == way_pieces && a.tokens > pieces_tokens)
        a.tokens = pieces_tokens;
    a.chunk_bytes = s->o->chunk_bytes[chunk], a.copies = bytes_of(s, a.tokens);
    a.fill = round < 0 && s->agreed.verify;
    if (round < 0)
        begin_request(s, &a);
    else
        (void)side_take_pages(&s->mine, s->agreed.seed, a.request, a.tokens);
    if (!transfer(s, &a, -1, &ack, &seconds))
        return false;
    if (round >= 0) {
        r->gbs[by][chunk][round] = (double)bytes_of(s, a.tokens) / seconds / 1e9;
        r->first_ms[chunk][round] = by == way_ring ? (double)ack.a / 1e3 : r->first_ms[chunk][round];
        r->last_ms[chunk][round] = by == way_ring ? (double)ack.b / 1e3 : r->last_ms[chunk][round];
    }
    const bool checks = round < 0 && s->agreed.verify && by != way_send && by != way_copy;
    return !checks || verify(s, r, &a, false);
}

/* Round -1 warms up and is verified. Ways take turns, so that all see the same clocks. */
static bool run_throughput(session *s, report *r)
{
    const handover_options *const o = s->o;
    for (int round = -1; round < o->rounds && o->rounds > 0; round++) {
        for (int k = 0; k < o->chunk_count && o->ring; k++)
            if (!measure(s, r, way_ring, k, round))
                return false;
        for (int w = way_straight; w < ways; w++) {
            const bool mapped = w == way_straight || w == way_copy;
            if ((mapped && !o->straight) || (!mapped && !o->ring) || (w != way_straight && !s->agreed.opponents))
                continue;
            if (!measure(s, r, w, 0, round))
                return false;
        }
        progress("round %lld of %lld", round + 1, o->rounds);
    }
    return true;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const session *s, const double *rounds)
{
    double sorted[handover_most_rounds];
    const size_t n = (size_t)s->o->rounds;
    memcpy(sorted, rounds, n * sizeof *rounds);
    qsort(sorted, n, sizeof *sorted, ascending);
    return n ? sorted[n / 2] : 0;
}

static void print_row(const session *s, const report *r, const char *name, int w, int k)
{
    const double gbs = median(s, r->gbs[w][k]), one = median(s, r->gbs[way_send][0]),
                 engine = median(s, r->gbs[way_copy][0]);
    if (gbs == 0)
        return;
    printf("%-42s %9.2f", name, gbs);
    one > 0 ? printf(" %9.3f", gbs / one) : printf(" %9s", "-");
    engine > 0 ? printf(" %9.3f", gbs / engine) : printf(" %9s", "-");
    if (w == way_ring)
        printf(" %11.2f %10.2f", median(s, r->first_ms[k]), median(s, r->last_ms[k]));
    printf("\n");
}

static void print_throughput(const session *s, const report *r)
{
    char name[80];
    if (s->o->rounds == 0)
        return;
    printf("\n%lld tokens, %.1f MB; medians of %lld rounds\n", (long long)s->o->tokens,
           (double)bytes_of(s, s->o->tokens) / 1e6, (long long)s->o->rounds);
    printf("%-42s %9s %9s %9s %11s %10s\n", "way", "GB/s", "/ 1 send", "/ engine", "1st layer", "last, ms");
    for (int k = 0; k < s->o->chunk_count; k++) {
        (void)snprintf(name, sizeof name, "ring of %d x %.3g MB on %d lane%s", (int)s->agreed.slots,
                       (double)s->o->chunk_bytes[k] / 1048576, (int)s->agreed.lanes, s->agreed.lanes > 1 ? "s" : "");
        print_row(s, r, name, way_ring, k);
    }
    print_row(s, r, "straight into the peer's pages", way_straight, 0);
    print_row(s, r, "one ncclSend of contiguous bytes", way_send, 0);
    print_row(s, r, "pack, one ncclSend, unpack, no overlap", way_packed, 0);
    (void)snprintf(name, sizeof name, "one ncclSend per piece of %lld tokens",
                   s->o->tokens < pieces_tokens ? (long long)s->o->tokens : (long long)pieces_tokens);
    print_row(s, r, name, way_pieces, 0);
    print_row(s, r, "copy engine, contiguous bytes", way_copy, 0);
}

static bool draw(const session *s, const report *r)
{
    handover_plot p;
    memset(&p, 0, sizeof p);
    (void)snprintf(p.title, sizeof p.title, "KV hand-over of %.2f GB, %s%s", (double)bytes_of(s, s->o->tokens) / 1e9,
                   s->o->sockets ? "NCCL over sockets" : "two GPUs",
                   s->agreed.lanes > 1 ? ", several communicators" : "");
    for (int k = 0; k < s->o->chunk_count && s->o->ring; k++) { /* in the order of sizes */
        int at = p.points++;
        for (; at > 0 && p.chunk_bytes[at - 1] > (double)s->o->chunk_bytes[k]; at--)
            p.chunk_bytes[at] = p.chunk_bytes[at - 1], p.gbs[at] = p.gbs[at - 1];
        p.chunk_bytes[at] = (double)s->o->chunk_bytes[k], p.gbs[at] = median(s, r->gbs[way_ring][k]);
    }
    p.lines[0] = median(s, r->gbs[way_send][0]), p.names[0] = "one ncclSend";
    p.lines[1] = median(s, r->gbs[way_packed][0]), p.names[1] = "pack, one ncclSend, unpack";
    p.lines[2] = median(s, r->gbs[way_straight][0]), p.names[2] = "straight into the peer's pages";
    p.lines[3] = median(s, r->gbs[way_copy][0]), p.names[3] = "copy engine";
    if (handover_plot_write(&p, s->o->svg))
        return true;
    fprintf(stderr, "14_handover: %s: %s\n", s->o->svg, strerror(errno));
    return false;
}

static void print_shape(const session *s)
{
    const setup *const a = &s->agreed;
    printf("%d layers, %d heads of %d bytes; prefill: %d ranks, %s, pages of %d; decode: %d ranks, %s, pages of %d\n",
           (int)a->layers, (int)a->heads, (int)a->head_bytes, (int)a->from.tp, a->from.head_major ? "HND" : "NHD",
           (int)a->from.page_rows, (int)a->to.tp, a->to.head_major ? "HND" : "NHD", (int)a->to.page_rows);
    printf("rings: %d lanes of %d slots of %.4g MB; %s; %s\n", (int)a->lanes, (int)a->slots,
           (double)a->slot_bytes / 1048576,
           s->o->sockets ? "NCCL over sockets, as between machines" : "NCCL as it likes",
           kvprim_comm_describe(&s->comms[0]));
    fflush(stdout);
}

static bool print_report(const session *s, const report *r, int64_t first)
{
    const setup *const a = &s->agreed;
    printf("%lld requests from number %lld on, %lld tokens, %.2f GB, %lld chunks; %lld cancelled and sent again; %s\n",
           (long long)r->requests, (long long)first + 1, (long long)r->tokens, (double)r->bytes / 1e9,
           (long long)r->chunks, (long long)r->cancelled,
           !a->verify    ? "bytes not verified"
           : r->wrong    ? "WRONG"
           : r->requests ? "every byte of every page is right, unused ones too"
                         : "none to verify");
    print_throughput(s, r);
    return r->wrong == 0 && (!s->o->svg || draw(s, r));
}

/* ---- processes ---- */

/* Reports a peer that is gone, and says whether to wait for another. */
static bool survive(session *s, int64_t heard_us, bool may)
{
    const int64_t noticed_us = handover_now_us();
    may = close_session(s, false) && may;
    printf("%s side: %s; noticed %.1f ms after its last message, ended %.1f ms later%s\n",
           s->side == 0 ? "prefill" : "decode", s->why, (double)(noticed_us - heard_us) / 1e3,
           (double)(handover_now_us() - noticed_us) / 1e3, may ? "; goes on with the same ring" : "");
    fflush(stdout);
    return may;
}

static void open_side(session *s, const handover_options *o)
{
    int gpus = 0;
    memset(s, 0, sizeof *s);
    s->o = o, s->side = o->side, s->link.fd = -1;
    s->dies_at = o->kill_at >= 0 && o->kill_side == o->side && !o->again ? o->kill_at : -1;
    if (o->sockets) {
        setenv("NCCL_HOSTID", o->side == 0 ? "prefill" : "decode", 1);
        setenv("NCCL_P2P_DISABLE", "1", 1);
        setenv("NCCL_SHM_DISABLE", "1", 1);
        setenv("NCCL_NET", "Socket", 1);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    CU(cudaGetDeviceCount(&gpus));
    const int device = handover_is_alone(o) && o->device[o->side] >= gpus ? 0 : o->device[o->side];
    if (device >= gpus) {
        fprintf(stderr, "14_handover: GPU %d is wanted, %d are here\n", device, gpus);
        exit(1);
    }
    CU(cudaSetDevice(device));
    if (!handover_guard_start(&guard, end_calls, s)) {
        fprintf(stderr, "14_handover: no thread could be started\n");
        exit(1);
    }
}

/* Accepts until a decode side has answered the setup: anything may connect to a port. */
static bool accept_decode_side(session *s)
{
    const int64_t until_us = handover_now_us() + ((int64_t)s->o->timeout_ms + connect_ms) * 1000;
    int64_t left_ms;
    while ((left_ms = (until_us - handover_now_us()) / 1000) > 0) {
        const int fd = handover_accept(s->o->listener, (int)left_ms);
        if (fd < 0)
            break;
        if (agree_on(s, fd, answer_ms))
            return true;
        fprintf(stderr, "14_handover: a connection was dropped: %s\n", s->why);
        handover_link_close(&s->link);
    }
    fprintf(stderr, "14_handover: no decode side has connected\n");
    return false;
}

static int prefill_main(session *s)
{
    static report r;
    const handover_options *const o = s->o;
    int restarts = o->kill_at >= 0 && o->kill_side == 1;
    int64_t first = -1;
    for (;;) {
        if (!accept_decode_side(s))
            return 1;
        bool done = connect_session(s);
        if (done && first < 0)
            print_shape(s);
        first = first < 0 ? s->served : first;
        done = done && run_requests(s, &r) && run_throughput(s, &r) &&
               linked(s, handover_link_say(&s->link, say_bye, 0, 0, 0, NULL, 0));
        if (done) {
            const bool right = print_report(s, &r, first);
            return !close_session(s, true) || !right;
        }
        if (!survive(s, s->link.heard_us, restarts > 0))
            return 1;
        restarts--;
    }
}

static int decode_main(session *s)
{
    const handover_options *const o = s->o;
    int restarts = o->kill_at >= 0 && o->kill_side == 0;
    for (;;) {
        char why[160];
        const int fd = handover_connect(o->connect, o->timeout_ms + connect_ms, why);
        if (fd < 0) {
            fprintf(stderr, "14_handover: %s\n", why);
            return 1;
        }
        if (agree_on(s, fd, connect_ms) && connect_session(s) && serve(s)) {
            if (s->wrong && handover_is_alone(o))
                fprintf(stderr, "14_handover: WRONG bytes in %lld of the verified requests\n", (long long)s->wrong);
            return !close_session(s, true) || s->wrong;
        }
        if (!survive(s, s->link.heard_us, restarts > 0))
            return 1;
        restarts--;
    }
}

/* Starts this program again as one side. */
static pid_t start_side(int argc, char **argv, int side, int listener, const char *address, bool again)
{
    char number[2][16];
    const char *arguments[handover_most_arguments + 8];
    int n = 0;
    (void)snprintf(number[0], sizeof number[0], "%d", side);
    (void)snprintf(number[1], sizeof number[1], "%d", listener);
    for (; n < argc; n++)
        arguments[n] = argv[n];
    arguments[n++] = "--listener-fd", arguments[n++] = number[1];
    if (side == 1)
        arguments[n++] = "--connect", arguments[n++] = address;
    arguments[n++] = "--side", arguments[n++] = number[0];
    if (again)
        arguments[n++] = "--again";
    arguments[n] = NULL;
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* no side outlives the program */
        (void)execv("/proc/self/exe", (char **)(uintptr_t)arguments);
        _exit(127);
    }
    return pid;
}

/* Runs both sides, starts the one that dies by --kill-at again, and ends both if one fails. It holds no GPU. */
static int supervise(const handover_options *o, int argc, char **argv, int listener, const char *address)
{
    pid_t pids[2];
    int left = 2, code = 0;
    bool replaced = o->kill_at < 0;
    for (int side = 0; side < 2; side++)
        pids[side] = start_side(argc, argv, side, listener, address, false);
    while (left > 0) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, WUNTRACED);
        const int side = pid == pids[1];
        if (pid < 0)
            return 1;
        if (WIFSTOPPED(status)) {
            if (!o->stops || replaced || side != o->kill_side) /* a terminal or a debugger stopped it */
                continue;
            /* the other side must notice by its deadline alone */
            (void)poll(NULL, 0, o->timeout_ms + 1000);
            (void)kill(pid, SIGKILL);
            continue;
        }
        if (!replaced && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && side == o->kill_side) {
            replaced = true;
            pids[side] = start_side(argc, argv, side, listener, address, true);
            continue;
        }
        left--;
        pids[side] = -1;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        fprintf(stderr, "14_handover: the %s side ended with %s %d\n", side ? "decode" : "prefill",
                WIFEXITED(status) ? "code" : "signal", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
        code = 1;
        (void)poll(NULL, 0, left ? 2000 : 0); /* the other side says what it saw */
        if (left && pids[!side] > 0)
            (void)kill(pids[!side], SIGKILL);
    }
    if (!replaced) {
        fprintf(stderr, "14_handover: --kill-at %lld: there were not so many chunks\n", (long long)o->kill_at);
        code = 1;
    }
    return code;
}

static int run_both(const handover_options *o, int argc, char **argv)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    char why[160], address[32];
    const int listener = handover_socket("127.0.0.1:0", true, why);
    if (listener < 0 || getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) != 0) {
        fprintf(stderr, "14_handover: %s\n", listener < 0 ? why : strerror(errno));
        return 1;
    }
    (void)snprintf(address, sizeof address, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    return supervise(o, argc, argv, listener, address);
}

int main(int argc, char **argv)
{
    static handover_options o;
    static session s;
    char why[160];
    const int code = handover_parse(&o, argc, argv);
    if (code >= 0)
        return code;
    if (o.side < 0)
        return run_both(&o, argc, argv);
    if (o.side == 0 && o.listener < 0 && (o.listener = handover_socket(o.listen ? o.listen : "", true, why)) < 0) {
        fprintf(stderr, "14_handover: %s\n", why);
        return 1;
    }
    if (o.side == 0 && o.svg && !handover_plot_possible(o.svg)) { /* before minutes of measuring */
        fprintf(stderr, "14_handover: --svg %s: %s\n", o.svg, strerror(errno));
        return 1;
    }
    open_side(&s, &o);
    return o.side == 0 ? prefill_main(&s) : decode_main(&s);
}

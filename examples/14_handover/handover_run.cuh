/* SPDX-License-Identifier: MIT */
/* handover_run.cuh: what each side does, and the processes that do it. CUDA, C++17. */
#ifndef HANDOVER_RUN_CUH
#define HANDOVER_RUN_CUH

#include "handover_ways.cuh"
#include <sys/prctl.h>
#include <sys/wait.h>

/* ---- the decode side ---- */

static void serve_request(session *s, const ask *a)
{
    if (a->tokens < 1 || a->tokens > s->o->tokens || a->chunk_bytes > s->o->chunk_bytes ||
        (a->way >= ways && !s->others))
        not_due();
    const int64_t pages = side_take_pages(&s->mine, a->request, a->tokens);
    if (a->fill)
        side_fill(&s->mine, 0, 0);
    CU(cudaStreamSynchronize(s->mine.stream));
    serve_transfer(s, a, pages);
}

/* Does what the prefill side asks for until it says goodbye. */
static void serve(session *s)
{
    handover_message m;
    ask a;
    memset(&a, 0, sizeof a);
    for (;;) {
        if (!handover_link_hear(&s->link, &m, 100))
            continue;
        if (m.kind == say_bye)
            return;
        if (m.kind == say_request && m.payload_bytes == sizeof a) {
            memcpy(&a, s->link.payload, sizeof a);
            serve_request(s, &a);
        } else if (m.kind == say_verify) {
            const side_faults found = side_verify(&s->mine, a.request, a.tokens);
            s->wrong += found.bytes || found.rejected;
            tell_bytes(s, say_verified, &found, sizeof found);
        } else {
            not_due();
        }
        s->link.heard_us = handover_now_us(); /* while this side worked, the peer had nothing to say */
    }
}

/* ---- the prefill side ---- */

/* What a run brought; first_us and last_us: sums over the requests by ring. */
typedef struct report {
    int64_t requests, tokens, bytes, chunks, cancelled, by_ring, first_us, last_us;
} report;

static void verify(session *s, const ask *a)
{
    handover_message m;
    side_faults found;
    tell(s, say_verify, 0, 0, 0);
    expect(s, say_verified, &m, sizeof found);
    memcpy(&found, s->link.payload, sizeof found);
    if (!found.bytes && !found.rejected)
        return;
    const handover_place p = handover_place_of(&s->to[found.rank], (uint64_t)found.first);
    printf(
        "WRONG: request %lld of %lld tokens: %lld slots refused, %lld bytes wrong, the first: rank %lld, layer %d, %s, "
        "slot %lld, head %d, byte %d\n",
        (long long)a->request, (long long)a->tokens, (long long)found.rejected, (long long)found.bytes,
        (long long)found.rank, (int)p.layer, p.part ? "V" : "K", (long long)p.slot, (int)p.head, (int)p.byte);
    s->wrong++;
}

static void begin_request(session *s, const ask *a)
{
    (void)side_take_pages(&s->mine, a->request, a->tokens);
    if (a->fill)
        side_fill(&s->mine, a->request, a->tokens);
    CU(cudaStreamSynchronize(s->mine.stream));
}

/* Sends a part of the request, until one of the sides cancels it. When both know, every slot of the rings is free. */
static void cancel_request(session *s, ask a, uint64_t random)
{
    const int64_t at = 1 + (int64_t)(random % plan_of(s, &a).size());
    const bool here = a.request / s->o->cancel_every % 2 == 0;
    a.cancel_at = here ? -1 : at;
    (void)transfer(s, &a, here ? at - 1 : -1);
}

/* A request of random length. One that is cancelled comes again: into other pages, all others nobody's again, so that
   bytes of the cancelled chunks that came later would be found. */
static void run_request(session *s, report *r, int64_t request, int32_t way)
{
    const handover_options *const o = s->o;
    const uint64_t random = handover_mix(handover_mix(78) ^ (uint64_t)request);
    const int64_t tokens = 1 + (int64_t)(random % (uint64_t)o->tokens);
    const ask a = {request, tokens, o->chunk_bytes, -1, way, 1};
    begin_request(s, &a);
    if (o->cancel_every && way == way_ring && request % o->cancel_every == o->cancel_every - 1) {
        cancel_request(s, a, handover_mix(random));
        r->cancelled++;
    }
    const outcome out = transfer(s, &a, -1);
    r->requests++, r->tokens += tokens, r->bytes += bytes_of(s, tokens), r->chunks += out.chunks;
    r->by_ring += way == way_ring, r->first_us += out.first_us, r->last_us += out.last_us;
    verify(s, &a);
}

static void print_shape(const session *s)
{
    const handover_options *const o = s->o;
    printf("%lld layers, %lld heads of %lld bytes; prefill: %lld ranks, %s, pages of %lld; decode: %lld ranks, %s, "
           "pages of %lld\n",
           o->layers, o->heads, o->head_bytes, o->from.tp, o->from.head_major ? "HND" : "NHD", o->from.page_rows,
           o->to.tp, o->to.head_major ? "HND" : "NHD", o->to.page_rows);
    printf("rings: %lld lanes of %lld slots of %.4g MB; %s; %s\n", o->lanes, o->slots, (double)slot_bytes(s) / 1048576,
           o->sockets ? "NCCL over sockets, as between machines" : "NCCL as it likes",
           kvprim_comm_describe(&s->comms[0]));
    fflush(stdout);
}

static void print_report(const session *s, const report *r)
{
    printf("%lld requests, %lld tokens, %.2f GB, %lld chunks; %lld cancelled and sent again; %s\n",
           (long long)r->requests, (long long)r->tokens, (double)r->bytes / 1e9, (long long)r->chunks,
           (long long)r->cancelled,
           s->wrong      ? "WRONG"
           : r->requests ? "every byte of every page is right, unused ones too"
                         : "none to verify");
    if (r->by_ring)
        printf("by ring, the first layer was ready after %.2f ms, the last after %.2f ms, on average\n",
               (double)r->first_us / 1e3 / (double)r->by_ring, (double)r->last_us / 1e3 / (double)r->by_ring);
}

static void prefill(session *s)
{
    report r;
    memset(&r, 0, sizeof r);
    print_shape(s);
    for (int64_t request = 0; request < s->o->requests; request++) {
        const bool straight = s->o->mode == mode_straight || (s->o->mode == mode_all && request % 2);
        run_request(s, &r, request, straight ? way_straight : way_ring);
    }
    print_report(s, &r);
    if (s->others)
        s->others->run(s);
}

/* ---- processes ---- */

/* The prefill side listens, the decode side connects to the address. Returns the exit code. */
static int run_side(handover_options *o, const other_ways *others, int side, int listener, const char *address)
{
    static session s;
    int gpus = 0;
    s.o = o, s.others = others, s.side = side;
    CU(cudaGetDeviceCount(&gpus));
    if (gpus < 2 && !o->listen && !o->connect)
        handover_die("two GPUs are needed, %d are here", gpus);
    CU(cudaSetDevice(gpus < 2 ? 0 : side));
    const int wait_ms = (int)o->timeout_ms + connect_ms;
    open_session(&s, side == 0 ? handover_accept(listener, wait_ms) : handover_connect(address, wait_ms));
    side == 0 ? prefill(&s) : serve(&s);
    close_session(&s);
    return s.wrong != 0;
}

/* Runs each side in a process of its own: CUDA's state does not survive a fork, and this process has none. When one
   fails, the other one ends with this process. */
static int run_both(handover_options *o, const other_ways *others, int listener, const char *address)
{
    fflush(stdout);
    for (int side = 0; side < 2; side++)
        if (fork() == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
            exit(run_side(o, others, side, listener, address));
        }
    for (int side = 0; side < 2; side++) {
        int status = 0;
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "14_handover: a side ended with %s %d\n", WIFEXITED(status) ? "code" : "signal",
                    WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
            (void)poll(NULL, 0, 2000); /* the other side says what it saw */
            return 1;
        }
    }
    return 0;
}

/* What the command line says: both sides, or one of them. */
static int handover_run(handover_options *o, const other_ways *others)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    char address[32];
    if (o->connect)
        return run_side(o, others, 1, -1, o->connect);
    const int listener = handover_socket(o->listen ? o->listen : "127.0.0.1:0", true);
    if (listener < 0 || getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) != 0)
        handover_die("%s: %s", o->listen ? o->listen : "a port", strerror(errno));
    if (o->listen)
        return run_side(o, others, 0, listener, NULL);
    (void)snprintf(address, sizeof address, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    return run_both(o, others, listener, address);
}

#endif

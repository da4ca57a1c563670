/* SPDX-License-Identifier: MIT */
/* handover_run.cuh: what each side does, and the processes that do it. CUDA, C++17. */
#ifndef HANDOVER_RUN_CUH
#define HANDOVER_RUN_CUH

#include "handover_ways.cuh"
#include <sys/prctl.h>
#include <sys/wait.h>

/* ---- the decode side ---- */

/* Whether what the prefill side asks for is what was agreed on: what follows relies on these bounds. last: the ask
   before. */
static bool agreed_on(const session *s, const ask *a, const ask *last)
{
    const handover_options *const o = s->o;
    return a->request >= 0 && a->request <= INT32_MAX && a->tokens >= 1 && a->tokens <= o->tokens && a->way >= 0 &&
           a->way < (s->others ? s->others->end : (int32_t)ways) && a->chunk_bytes >= 2 * o->heads * o->head_bytes &&
           a->chunk_bytes <= o->chunk_bytes && (a->way != way_straight || o->mode != mode_ring) &&
           (!a->again || (a->way == way_ring && a->request == last->request && a->tokens == last->tokens));
}

static bool serve_request(session *s, const ask *a, const ask *last)
{
    if (!agreed_on(s, a, last))
        return lose(s, "the prefill side asks for what was not agreed on");
    const int64_t pages = a->again ? 0 : side_take_pages(&s->mine, a->request, a->tokens);
    if (a->fill)
        side_fill(&s->mine, 0, 0);
    CU(cudaStreamSynchronize(s->mine.stream));
    return serve_transfer(s, a, pages);
}

static bool serve_verification(session *s, const ask *last)
{
    char text[wrong_text] = "";
    const int64_t wrong = side_verify(&s->mine, last->request, last->tokens, text, sizeof text);
    s->wrong += wrong != 0;
    s->served = wrong == 0 ? last->request + 1 : s->served;
    return tell_bytes(s, say_verified, wrong, text, sizeof text);
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
        if (m.kind == say_request && m.payload_bytes == sizeof next) {
            memcpy(&next, s->link.payload, sizeof next);
            if (!serve_request(s, &next, &last))
                return false;
            last = next;
        } else if (m.kind == say_verify && last.tokens > 0) {
            if (!serve_verification(s, &last))
                return false;
        } else {
            return m.kind == say_bye || lose(s, "the peer sent a message that is not due");
        }
        s->link.heard_us = handover_now_us(); /* while this side worked, the peer had nothing to say */
    }
}

/* ---- the prefill side ---- */

/* What a run brought; first_us and last_us: sums over the requests by ring. */
typedef struct report {
    int64_t requests, tokens, bytes, chunks, cancelled, by_ring, first_us, last_us;
} report;

static bool verify(session *s, const ask *a)
{
    handover_message m;
    if (!tell(s, say_verify, 0, 0, 0) || !expect(s, say_verified, &m, wrong_text))
        return false;
    if (m.a != 0)
        printf("WRONG: request %lld of %lld tokens: %lld bytes; %.180s\n", (long long)a->request, (long long)a->tokens,
               (long long)m.a, s->link.payload);
    s->wrong += m.a != 0;
    return true;
}

static void begin_request(session *s, const ask *a)
{
    (void)side_take_pages(&s->mine, a->request, a->tokens);
    if (a->fill)
        side_fill(&s->mine, a->request, a->tokens);
    CU(cudaStreamSynchronize(s->mine.stream));
}

/* Sends a part of the request, until one of the sides cancels it. */
static bool cancel_request(session *s, ask a, uint64_t random)
{
    chunk_walk walk;
    outcome out;
    walk_begin(s, &a, &walk);
    const int64_t at = 1 + (int64_t)(random % (uint64_t)walk.total);
    const bool here = a.request / s->o->cancel_every % 2 == 0;
    a.cancel_at = here ? -1 : at;
    return transfer(s, &a, here ? at - 1 : -1, &out);
}

/* A request of random length; one that is cancelled comes again, into the same pages. */
static bool run_request(session *s, report *r, int64_t request, int32_t way)
{
    const handover_options *const o = s->o;
    const uint64_t random = handover_mix(handover_mix(78) ^ (uint64_t)request);
    const int64_t tokens = 1 + (int64_t)(random % (uint64_t)o->tokens);
    ask a = {request, tokens, o->chunk_bytes, -1, way, 1, 0};
    outcome out;
    begin_request(s, &a);
    if (o->cancel_every && way == way_ring && request % o->cancel_every == o->cancel_every - 1) {
        if (!cancel_request(s, a, handover_mix(random)))
            return false;
        r->cancelled++, a.fill = 0, a.again = 1;
    }
    if (!transfer(s, &a, -1, &out))
        return false;
    r->requests++, r->tokens += tokens, r->bytes += bytes_of(s, tokens), r->chunks += out.chunks;
    r->by_ring += way == way_ring, r->first_us += out.first_us, r->last_us += out.last_us;
    return verify(s, &a);
}

static bool run_requests(session *s, report *r)
{
    for (; s->served < s->o->requests; s->served++) {
        const bool straight = s->o->mode == mode_straight || (s->o->mode == mode_all && s->served % 2);
        if (!run_request(s, r, s->served, straight ? way_straight : way_ring))
            return false;
    }
    return true;
}

static void print_shape(const session *s)
{
    const handover_options *const o = s->o;
    printf("%lld layers, %lld heads of %lld bytes; prefill: %lld ranks, %s, pages of %lld; decode: %lld ranks, %s, "
           "pages of %lld\n",
           o->layers, o->heads, o->head_bytes, o->from.tp, o->from.head_major ? "HND" : "NHD", o->from.page_rows,
           o->to.tp, o->to.head_major ? "HND" : "NHD", o->to.page_rows);
    printf("rings: %lld lanes of %lld slots of %.4g MB; %s; %s\n", o->lanes, o->slots,
           (double)slot_bytes(o->chunk_bytes) / 1048576,
           o->sockets ? "NCCL over sockets, as between machines" : "NCCL as it likes",
           kvprim_comm_describe(&s->comms[0]));
    fflush(stdout);
}

static void print_report(const session *s, const report *r, int64_t first)
{
    printf("%lld requests from number %lld on, %lld tokens, %.2f GB, %lld chunks; %lld cancelled and sent again; %s\n",
           (long long)r->requests, (long long)first + 1, (long long)r->tokens, (double)r->bytes / 1e9,
           (long long)r->chunks, (long long)r->cancelled,
           s->wrong      ? "WRONG"
           : r->requests ? "every byte of every page is right, unused ones too"
                         : "none to verify");
    if (r->by_ring)
        printf("by ring, the first layer was ready after %.2f ms, the last after %.2f ms, on average\n",
               (double)r->first_us / 1e3 / (double)r->by_ring, (double)r->last_us / 1e3 / (double)r->by_ring);
}

/* ---- sessions, one after another ---- */

/* Reports a peer that is gone, and says whether to wait for another. */
static bool survive(session *s, bool may)
{
    const int64_t noticed_us = handover_now_us(), heard_us = s->link.heard_us;
    may = close_session(s, false) && may;
    printf("%s side: %s; noticed %.1f ms after its last message, ended %.1f ms later%s\n",
           s->side == 0 ? "prefill" : "decode", s->why, (double)(noticed_us - heard_us) / 1e3,
           (double)(handover_now_us() - noticed_us) / 1e3, may ? "; goes on with the same ring" : "");
    fflush(stdout);
    return may;
}

/* Accepts until a decode side has answered the setup: anything may connect to a port. */
static bool accept_decode_side(session *s, int listener)
{
    const int64_t until_us = handover_now_us() + (s->o->timeout_ms + connect_ms) * 1000;
    int64_t left_ms;
    while ((left_ms = (until_us - handover_now_us()) / 1000) > 0) {
        const int fd = handover_accept(listener, (int)left_ms);
        if (fd < 0)
            break;
        if (agree(s, fd, answer_ms))
            return true;
        fprintf(stderr, "14_handover: a connection was dropped: %s\n", s->why);
        handover_link_close(&s->link);
    }
    fprintf(stderr, "14_handover: no decode side has connected\n");
    return false;
}

static int prefill_main(session *s, int listener)
{
    report r;
    int restarts = s->o->kill_at >= 0 && s->o->kill_side == 0;
    int64_t first = -1;
    memset(&r, 0, sizeof r);
    for (;; restarts--) {
        if (!accept_decode_side(s, listener))
            return 1;
        const bool connected = connect_session(s);
        if (connected && first < 0)
            print_shape(s);
        first = first < 0 ? s->served : first;
        if (connected && run_requests(s, &r)) {
            print_report(s, &r, first);
            if ((!s->others || s->others->run(s)) && tell(s, say_bye, 0, 0, 0))
                return !close_session(s, true) || s->wrong;
        }
        if (!survive(s, restarts > 0))
            return 1;
    }
}

static int decode_main(session *s, const char *address)
{
    int restarts = s->o->kill_at >= 0 && s->o->kill_side == 1;
    for (;; restarts--) {
        char why[160];
        const int fd = handover_connect(address, (int)s->o->timeout_ms + connect_ms, why);
        if (fd < 0) {
            fprintf(stderr, "14_handover: %s\n", why);
            return 1;
        }
        if (agree(s, fd, connect_ms) && connect_session(s) && serve(s)) {
            if (s->wrong && s->o->connect)
                fprintf(stderr, "14_handover: WRONG bytes in %lld of the verified requests\n", (long long)s->wrong);
            return !close_session(s, true) || s->wrong;
        }
        if (!survive(s, restarts > 0))
            return 1;
    }
}

/* ---- processes ---- */

/* address: where the prefill side listens, which is `listener` in its own process. dies: at --kill-at. */
static int run_side(const handover_options *o, const other_ways *others, int side, int listener, const char *address,
                    bool dies)
{
    static session s;
    int gpus = 0;
    s.o = o, s.others = others, s.side = side, s.link.fd = -1;
    s.dies_at = dies ? o->kill_at : -1;
    if (o->sockets) {
        setenv("NCCL_HOSTID", side == 0 ? "prefill" : "decode", 1);
        setenv("NCCL_P2P_DISABLE", "1", 1);
        setenv("NCCL_SHM_DISABLE", "1", 1);
        setenv("NCCL_NET", "Socket", 1);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    CU(cudaGetDeviceCount(&gpus));
    if (gpus < 2 && !o->listen && !o->connect) {
        fprintf(stderr, "14_handover: two GPUs are needed, %d are here\n", gpus);
        return 1;
    }
    CU(cudaSetDevice(gpus < 2 ? 0 : side));
    if (!handover_guard_start(&guard, abort_comms, &s)) {
        fprintf(stderr, "14_handover: no thread could be started\n");
        return 1;
    }
    return side == 0 ? prefill_main(&s, listener) : decode_main(&s, address);
}

/* CUDA's state does not survive a fork: this process has none. */
static pid_t start_side(const handover_options *o, const other_ways *others, int side, int listener,
                        const char *address, bool dies)
{
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* no side outlives the program */
        exit(run_side(o, others, side, listener, address, dies));
    }
    return pid;
}

/* Runs both sides, and starts the one that dies by --kill-at again. One that --stop stops is killed when the other side
   must have noticed, which it can by its deadline alone. It holds no GPU, and its sides die with it. */
static int supervise(const handover_options *o, const other_ways *others, int listener, const char *address)
{
    int mortal = o->kill_at < 0 ? -1 : o->kill_side == 0; /* the side that dies; --kill-side decode is 0 */
    pid_t pids[2];
    for (int side = 0; side < 2; side++)
        pids[side] = start_side(o, others, side, listener, address, side == mortal);
    for (int left = 2; left > 0;) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, WUNTRACED);
        const int side = pid == pids[1];
        const bool dies = side == mortal;
        if (pid < 0)
            return 1;
        if (WIFSTOPPED(status)) {
            if (dies && o->stop) { /* otherwise a terminal or a debugger stopped it */
                (void)poll(NULL, 0, (int)o->timeout_ms + 1000);
                (void)kill(pids[side], SIGKILL);
            }
        } else if (dies && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
            mortal = -1;
            pids[side] = start_side(o, others, side, listener, address, false);
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "14_handover: the %s side ended with %s %d\n", side ? "decode" : "prefill",
                    WIFEXITED(status) ? "code" : "signal", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
            (void)poll(NULL, 0, left == 2 ? 2000 : 0); /* the other side says what it saw */
            return 1;
        } else {
            left--;
        }
    }
    if (mortal >= 0)
        fprintf(stderr, "14_handover: --kill-at %lld: there were not so many chunks\n", o->kill_at);
    return mortal >= 0;
}

/* What the command line says: both sides, or one of them. */
static int handover_run(const handover_options *o, const other_ways *others)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    char why[160], address[32];
    if (o->connect)
        return run_side(o, others, 1, -1, o->connect, o->kill_at >= 0 && o->kill_side == 0);
    const int listener = handover_socket(o->listen ? o->listen : "127.0.0.1:0", true, why);
    if (listener < 0 || getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) != 0) {
        fprintf(stderr, "14_handover: %s\n", listener < 0 ? why : strerror(errno));
        return 1;
    }
    if (o->listen)
        return run_side(o, others, 0, listener, NULL, o->kill_at >= 0 && o->kill_side == 1);
    (void)snprintf(address, sizeof address, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    return supervise(o, others, listener, address);
}

#endif

/* SPDX-License-Identifier: MIT */
/* Measures the ways of examples/14_handover, and others that one might take instead, between two GPUs or as between two
   machines. The largest request goes by each of them, in turn, so that all see the same clocks.

       bench_handover ROUNDS CHUNK_BYTES[,CHUNK_BYTES...] [OPTION of 14_handover...]

   tests/nccl/nccl.sh handover builds and runs it. */
#define KVPRIM_IMPLEMENTATION
#include "examples/14_handover/handover_run.cuh"

enum { most_chunks = 16, most_rounds = 99 };

/* way_send: contiguous bytes; way_sends: the same, a call for each chunk's; way_packed: the request's, without overlap;
   way_pieces: a call for each row, or head; way_copy: contiguous bytes by the copy engine. */
enum { way_send = ways, way_sends, way_packed, way_pieces, way_copy, all_ways };

/* Tokens that are sent piece by piece. A piece takes microseconds whatever its size: all of a request, many seconds. */
static const long long pieces_tokens = 64;

/* All bytes of a request are under way at once, so that their deadline is later on a slow network: Gigabit Ethernet
   carries 117 MB/s. */
enum { slowest_bytes_per_ms = 100 * 1000 };

static int64_t chunk_bytes[most_chunks];
static int chunk_count, rounds;
static char *plain, *peer_plain; /* of the largest request, in memory of this GPU and of the decode side's */

/* GB/s and ms of each round, by way and, for the ring, chunk size. */
static double gbs[all_ways][most_chunks][most_rounds], first_ms[most_chunks][most_rounds],
    last_ms[most_chunks][most_rounds];

static bool is_mapped(int way)
{
    return way == way_straight || way == way_copy;
}

static bool open_others(session *s)
{
    if (!plain)
        CU(cudaMalloc((void **)&plain, (size_t)bytes_of(s, s->o->tokens)));
    unmap(&peer_plain);
    return s->o->mode == mode_ring || share(s, -1, s->side == 0 ? &peer_plain : &plain);
}

/* ---- other ways ---- */

/* Whether a way has a row for each size of chunks. */
static bool is_in_chunks(int way)
{
    return way == way_ring || way == way_sends;
}

static bool send_or_receive(session *s, void *at, size_t bytes)
{
    return reached(s, s->side == 0 ? kvprim_send(&s->comms[0], at, bytes, KVPRIM_U8, 1, s->nccl[0])
                                   : kvprim_recv(&s->comms[0], at, bytes, KVPRIM_U8, 0, s->nccl[0]));
}

/* Packs or unpacks all chunks of a request, in one buffer. */
static void move_all(session *s, const ask *a)
{
    chunk_walk walk;
    handover_chunk chunk;
    size_t at = 0;
    ask whole = *a;
    whole.chunk_bytes = INT64_MAX;
    walk_begin(s, &whole, &walk);
    for (int64_t n = 0; n < walk.total; n++, at += chunk.bytes) {
        kvprim_move moves[2];
        const pair p = walk_next(s, &whole, &walk, 1, &chunk);
        chunk_moves(s, p, &chunk, plain + at, moves);
        run_moves(s, moves, 2, s->nccl[0]);
    }
}

/* What NCCL alone takes for a request in chunks: nothing is packed, and no slot is waited for. */
static bool move_sends(session *s, const ask *a)
{
    const int64_t bytes = bytes_of(s, a->tokens);
    for (int64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < a->chunk_bytes ? bytes - at : a->chunk_bytes;
        if (!send_or_receive(s, plain + at, (size_t)n))
            return false;
    }
    return true;
}

static bool move_packed(session *s, const ask *a)
{
    if (s->side == 0)
        move_all(s, a);
    if (!send_or_receive(s, plain, (size_t)bytes_of(s, a->tokens)))
        return false;
    if (s->side == 1)
        move_all(s, a);
    return true;
}

/* Where a head of a token lies in a cache. */
static char *piece_at(const handover_cache *c, int64_t layer_part, int64_t slot, int32_t head)
{
    const int64_t page = slot / c->page_rows, row = slot % c->page_rows, h = head - c->first_head;
    const int64_t piece = c->head_major ? h * c->page_rows + row : row * c->heads + h;
    return c->data + layer_part * handover_part_bytes(c) + page * handover_page_bytes(c) + piece * c->head_bytes;
}

/* One ncclSend for each token's row of K or V in a layer, or for each of its heads where a side is HND, in groups. */
static bool move_pieces(session *s, const ask *a)
{
    kvprim_comm *const comm = &s->comms[0];
    int64_t calls = 0;
    for (int k = 0; k < s->pair_count; k++) {
        const handover_cache *const from = &s->from[s->pairs[k].from], *const to = &s->to[s->pairs[k].to];
        const handover_cache *const c = s->side == 0 ? from : to;
        int32_t first, heads;
        (void)handover_shared_heads(from, to, &first, &heads);
        const int32_t at_once = from->head_major || to->head_major ? 1 : heads, parts = heads / at_once;
        for (int64_t i = 0; i < a->tokens * c->layers * 2 * parts; i++, calls++) {
            const int64_t token = i / parts % a->tokens, layer_part = i / parts / a->tokens;
            const int64_t slot = (int64_t)s->mine.pages[token / c->page_rows] * c->page_rows + token % c->page_rows;
            char *const piece = piece_at(c, layer_part, slot, first + (int32_t)(i % parts) * at_once);
            if (calls % 1024 == 0 && calls > 0 && !reached(s, kvprim_group_end(comm)))
                return false;
            if (calls % 1024 == 0 && !reached(s, kvprim_group_start(comm)))
                return false;
            if (!send_or_receive(s, piece, (size_t)at_once * (size_t)c->head_bytes))
                return false;
        }
    }
    return calls == 0 || reached(s, kvprim_group_end(comm));
}

static bool copy_plain(session *s, const ask *a)
{
    handover_message m;
    if (s->side == 1)
        return expect(s, say_pushed, &m, 0);
    CU(cudaMemcpyAsync(peer_plain, plain, (size_t)bytes_of(s, a->tokens), cudaMemcpyDefault, s->mine.stream));
    return end_push(s);
}

static bool move_by_other(session *s, const ask *a)
{
    const int64_t bytes = bytes_of(s, a->tokens);
    if (a->way == way_copy)
        return copy_plain(s, a);
    /* guarded from the first call on: NCCL takes only so many that have not run */
    handover_guard_begin(&guard, s->link.fd, s->o->timeout_ms + bytes / slowest_bytes_per_ms);
    const bool moved = a->way == way_send     ? send_or_receive(s, plain, (size_t)bytes)
                       : a->way == way_sends  ? move_sends(s, a)
                       : a->way == way_packed ? move_packed(s, a)
                                              : move_pieces(s, a);
    if (moved)
        CU(cudaStreamSynchronize(s->nccl[0]));
    return guard_end(s) && moved;
}

/* ---- measuring ---- */

static bool measure(session *s, int32_t way, int chunk, int round)
{
    const int64_t tokens = way == way_pieces && s->o->tokens > pieces_tokens ? pieces_tokens : s->o->tokens;
    const ask a = {s->o->requests, tokens, chunk_bytes[chunk], -1, way, round < 0, 0};
    outcome out;
    if (round < 0)
        begin_request(s, &a);
    else
        (void)side_take_pages(&s->mine, a.request, a.tokens);
    if (!transfer(s, &a, -1, &out))
        return false;
    if (round < 0)
        return way == way_send || way == way_sends || way == way_copy || verify(s, &a);
    gbs[way][chunk][round] = (double)bytes_of(s, tokens) / out.seconds / 1e9;
    if (way == way_ring)
        first_ms[chunk][round] = (double)out.first_us / 1e3, last_ms[chunk][round] = (double)out.last_us / 1e3;
    return true;
}

static double median(const double *values)
{
    double sorted[most_rounds];
    for (int k = 0; k < rounds; k++) {
        int at = k;
        for (; at > 0 && sorted[at - 1] > values[k]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = values[k];
    }
    return sorted[rounds / 2];
}

/* Of the time of a request, the share of a chunk. */
static double chunk_us(int way, int chunk)
{
    return (double)chunk_bytes[chunk] / median(gbs[way][chunk]) / 1e3;
}

static void print_row(const char *name, int way, int chunk)
{
    const double mine = median(gbs[way][chunk]);
    if (mine == 0)
        return;
    printf("%-42s %9.2f", name, mine);
    for (int k = 0; k < 2; k++) {
        const double theirs = median(gbs[k == 0 ? way_send : way_copy][0]);
        theirs > 0 ? printf(" %9.3f", mine / theirs) : printf(" %9s", "-");
    }
    if (way == way_ring)
        printf(" %11.2f %10.2f", median(first_ms[chunk]), median(last_ms[chunk]));
    if (is_in_chunks(way))
        printf(" %*.1f", way == way_ring ? 9 : 32, chunk_us(way, chunk));
    printf("\n");
}

static void print_table(const session *s)
{
    const handover_options *const o = s->o;
    char name[80];
    printf("\n%lld tokens, %.1f MB; medians of %d rounds\n", o->tokens, (double)bytes_of(s, o->tokens) / 1e6, rounds);
    printf("%-42s %9s %9s %9s %11s %10s %9s\n", "way", "GB/s", "/ 1 send", "/ engine", "1st layer", "last, ms",
           "us/chunk");
    for (int k = 0; k < 2 * chunk_count; k++) {
        const int way = k < chunk_count ? int(way_ring) : int(way_sends);
        const double mb = (double)chunk_bytes[k % chunk_count] / 1048576;
        if (way == way_ring)
            (void)snprintf(name, sizeof name, "ring of %lld x %.3g MB on %lld lane%s", o->slots, mb, o->lanes,
                           o->lanes > 1 ? "s" : "");
        else
            (void)snprintf(name, sizeof name, "contiguous bytes, an ncclSend per %.3g MB", mb);
        print_row(name, way, k % chunk_count);
    }
    print_row("straight into the peer's pages", way_straight, 0);
    print_row("one ncclSend of contiguous bytes", way_send, 0);
    print_row("pack, one ncclSend, unpack, no overlap", way_packed, 0);
    (void)snprintf(name, sizeof name, "one ncclSend per piece of %lld tokens",
                   o->tokens < pieces_tokens ? o->tokens : pieces_tokens);
    print_row(name, way_pieces, 0);
    print_row("copy engine, contiguous bytes", way_copy, 0);
}

/* Round -1 warms up and is verified. */
static bool run_rounds(session *s)
{
    for (int round = -1; round < rounds; round++)
        for (int way = 0; way < all_ways; way++) {
            if (is_mapped(way) ? s->o->mode == mode_ring : s->o->mode == mode_straight)
                continue;
            for (int k = 0; k < (is_in_chunks(way) ? chunk_count : 1); k++)
                if (!measure(s, way, k, round))
                    return false;
        }
    print_table(s);
    return true;
}

/* Reads ROUNDS and the list of chunks; the slots hold the largest. */
static bool parse(handover_options *o, char **argv)
{
    long long n = 0, largest = 0;
    bool right = handover_number(argv[1], 1, most_rounds, &n);
    rounds = (int)n;
    for (char *one = strtok(argv[2], ","); one && right; one = strtok(NULL, ",")) {
        right = chunk_count < most_chunks && handover_number(one, 1, 1LL << 34, &n);
        right = right && n >= 2 * o->heads * o->head_bytes;
        chunk_bytes[right ? chunk_count++ : 0] = n;
        largest = n > largest ? n : largest;
    }
    o->chunk_bytes = largest;
    return right && chunk_count > 0;
}

int main(int argc, char **argv)
{
    static const other_ways others = {all_ways, open_others, move_by_other, run_rounds};
    static handover_options o;
    if (argc < 3) {
        fprintf(stderr, "usage: bench_handover ROUNDS CHUNK_BYTES[,CHUNK_BYTES...] [OPTION of 14_handover...]\n");
        return 2;
    }
    const int code = handover_parse(&o, argc - 2, argv + 2); /* argv[2] stands for the program's name */
    if (code >= 0)
        return code;
    if (!parse(&o, argv)) {
        fprintf(stderr, "bench_handover: %s %s: must be 1 to 99 rounds, and up to 16 sizes of a token at least\n",
                argv[1], argv[2]);
        return 2;
    }
    return handover_run(&o, &others);
}

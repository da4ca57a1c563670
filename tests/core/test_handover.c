/* SPDX-License-Identifier: MIT */
/* Tests of the plan of examples/14_handover on the CPU: which chunks there are, what lies where in them, and that every
   byte of every page ends where array subscripts alone say it does.

       cc -O2 -I. tests/core/test_handover.c && ./a.out
*/
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"

#include "../harness.h"
#include "../../examples/14_handover/handover_pattern.h"

enum { most_ranks = 4, most_tokens = 64 };

/* One side: its virtual ranks, and a page table of each. */
typedef struct test_side {
    int ranks;
    handover_cache cache[most_ranks];
    int64_t slots[most_ranks][most_tokens];
    unsigned char *want[most_ranks]; /* what the cache must hold in the end */
} test_side;

typedef struct test_case {
    int from_ranks, to_ranks;
    int32_t heads, head_bytes, from_head_major, to_head_major, from_page_rows, to_page_rows;
    int64_t tokens;
} test_case;

enum { test_layers = 3 };

/* ---- by subscripts ---- */

/* Byte `byte` of the model's head `head`, of the token in `slot`. */
static size_t place(const handover_cache *c, int layer, int part, int64_t slot, int head, int byte)
{
    const size_t page = (size_t)(slot / c->page_rows), row = (size_t)(slot % c->page_rows);
    const size_t pages = (size_t)c->pages, rows = (size_t)c->page_rows, heads = (size_t)c->heads;
    const size_t h = (size_t)(head - c->first_head), at = ((size_t)(2 * layer + part) * pages + page);
    const size_t piece = c->head_major ? (at * heads + h) * rows + row : (at * rows + row) * heads + h;
    return piece * (size_t)c->head_bytes + (size_t)byte;
}

static int holds(const handover_cache *c, int head)
{
    return head >= c->first_head && head < c->first_head + c->heads;
}

/* Writes to to->want what a hand-over must make of to's caches: all of the request, and nothing else. */
static void expect(const test_side *from, test_side *to, const test_case *t)
{
    for (int r = 0; r < to->ranks; r++) {
        const handover_cache *const dst = &to->cache[r];
        memcpy(to->want[r], dst->data, handover_cache_bytes(dst));
        for (int s = 0; s < from->ranks; s++) {
            const handover_cache *const src = &from->cache[s];
            for (int head = 0; head < t->heads; head++)
                for (int lp = 0; lp < 2 * test_layers && holds(src, head) && holds(dst, head); lp++)
                    for (int64_t token = 0; token < t->tokens; token++)
                        for (int b = 0; b < t->head_bytes; b++)
                            to->want[r][place(dst, lp / 2, lp % 2, to->slots[r][token], head, b)] =
                                (unsigned char)src->data[place(src, lp / 2, lp % 2, from->slots[s][token], head, b)];
        }
    }
}

/* ---- sides ---- */

/* A rank's heads: as equal as may be, the first ranks get more. Its pages come in a random order; five are nobody's. */
static void open_side(test_side *side, int ranks, const test_case *t, int32_t head_major, int32_t page_rows)
{
    int32_t first = 0;
    memset(side, 0, sizeof *side);
    side->ranks = ranks;
    for (int r = 0; r < ranks; r++) {
        const int32_t heads = t->heads / ranks + (r < t->heads % ranks);
        const int64_t pages = (t->tokens + page_rows - 1) / page_rows + 5;
        const handover_cache c = {NULL, test_layers, page_rows, first, heads, t->head_bytes, head_major, pages};
        int64_t page[most_tokens + 5];
        side->cache[r] = c;
        side->cache[r].data = (char *)allocate(handover_cache_bytes(&c));
        side->want[r] = (unsigned char *)allocate(handover_cache_bytes(&c));
        fill(side->cache[r].data, handover_cache_bytes(&c));
        for (int64_t i = 0; i < pages; i++) {
            const int64_t other = (int64_t)below((uint64_t)i + 1);
            page[i] = page[other], page[other] = i;
        }
        for (int64_t i = 0; i < t->tokens; i++)
            side->slots[r][i] = page[i / page_rows] * page_rows + i % page_rows;
        first += heads;
    }
}

static void close_side(test_side *side)
{
    for (int r = 0; r < side->ranks; r++) {
        free(side->cache[r].data);
        free(side->want[r]);
    }
}

static void compare(const test_side *side, const char *what, const test_case *t)
{
    for (int r = 0; r < side->ranks; r++) {
        const handover_cache *const c = &side->cache[r];
        const size_t bytes = handover_cache_bytes(c);
        size_t at = 0;
        if (memcmp(c->data, side->want[r], bytes) == 0)
            continue;
        while ((unsigned char)c->data[at] == side->want[r][at])
            at++;
        const handover_place p = handover_place_of(c, at);
        fail("%s, %d to %d ranks, %d heads of %d, %s to %s: rank %d, layer %d, part %d, slot %lld, head %d, byte %d: "
             "got "
             "%u, expected %u",
             what, t->from_ranks, t->to_ranks, (int)t->heads, (int)t->head_bytes, t->from_head_major ? "HND" : "NHD",
             t->to_head_major ? "HND" : "NHD", r, (int)p.layer, (int)p.part, (long long)p.slot, (int)p.head,
             (int)p.byte, (unsigned char)c->data[at], side->want[r][at]);
    }
}

/* ---- moves ---- */

/* The chunk's bytes are those that its comment promises. */
static void check_packed(const handover_cache *c, const handover_chunk *chunk, const unsigned char *data,
                         const int64_t *slots)
{
    size_t at = 0, wrong = 0;
    for (int lp = 2 * chunk->first_layer; lp < 2 * (chunk->first_layer + chunk->layers); lp++)
        for (int64_t token = chunk->first_token; token < chunk->first_token + chunk->tokens; token++)
            for (int head = chunk->first_head; head < chunk->first_head + chunk->heads; head++)
                for (int b = 0; b < c->head_bytes; b++)
                    wrong += data[at++] != (unsigned char)c->data[place(c, lp / 2, lp % 2, slots[token], head, b)];
    CHECK(at == chunk->bytes && wrong == 0);
}

/* Every token of every layer once, in the order of layers, and no chunk larger than allowed. */
typedef struct coverage {
    int64_t next_token;
    int32_t next_layer;
} coverage;

static void check_order(coverage *seen, const handover_chunk *chunk, int64_t tokens, size_t chunk_bytes)
{
    CHECK(chunk->bytes > 0 && chunk->bytes <= chunk_bytes);
    CHECK(chunk->first_layer == seen->next_layer && chunk->first_token == seen->next_token);
    CHECK(chunk->layers == 1 || chunk->tokens == tokens);
    seen->next_token = (seen->next_token + chunk->tokens) % tokens;
    seen->next_layer += seen->next_token == 0 ? chunk->layers : 0;
}

/* All chunks of one pair of ranks. */
static void hand_over_pair(const test_side *from, int s, test_side *to, int r, int64_t tokens, size_t chunk_bytes)
{
    const handover_cache *const src = &from->cache[s], *const dst = &to->cache[r];
    const int64_t n = handover_chunks(src, dst, tokens, chunk_bytes);
    coverage seen = {0, 0};
    CHECK(n >= 0);
    for (int64_t i = 0; i < n; i++) {
        kvprim_move moves[2];
        handover_chunk chunk;
        handover_chunk_at(src, dst, tokens, chunk_bytes, i, &chunk);
        check_order(&seen, &chunk, tokens, chunk_bytes);
        unsigned char *const data = (unsigned char *)allocate(chunk.bytes);
        CHECK(handover_chunk_moves(src, &chunk, data, from->slots[s], NULL, handover_pack, moves) == KVPRIM_OK &&
              kvprim_cpu_move(moves, 2) == KVPRIM_OK);
        check_packed(src, &chunk, data, from->slots[s]);
        CHECK(handover_chunk_moves(dst, &chunk, data, to->slots[r], NULL, handover_unpack, moves) == KVPRIM_OK &&
              kvprim_cpu_move(moves, 2) == KVPRIM_OK);
        free(data);
    }
    CHECK(seen.next_token == 0 && seen.next_layer == (n > 0 ? test_layers : 0));
}

static void straight_pair(const test_side *from, int s, test_side *to, int r, int64_t tokens)
{
    kvprim_move moves[2];
    int32_t first, heads;
    if (!handover_shared_heads(&from->cache[s], &to->cache[r], &first, &heads))
        return;
    CHECK(handover_straight(&from->cache[s], &to->cache[r], from->slots[s], to->slots[r], tokens, NULL, moves) ==
              KVPRIM_OK &&
          kvprim_cpu_move(moves, 2) == KVPRIM_OK);
}

/* chunk_bytes 0: straight. */
static void hand_over(const test_case *t, size_t chunk_bytes)
{
    test_side from, to;
    open_side(&from, t->from_ranks, t, t->from_head_major, t->from_page_rows);
    open_side(&to, t->to_ranks, t, t->to_head_major, t->to_page_rows);
    for (int s = 0; s < from.ranks; s++)
        memcpy(from.want[s], from.cache[s].data, handover_cache_bytes(&from.cache[s]));
    expect(&from, &to, t);
    for (int s = 0; s < from.ranks; s++)
        for (int r = 0; r < to.ranks; r++)
            if (chunk_bytes)
                hand_over_pair(&from, s, &to, r, t->tokens, chunk_bytes);
            else
                straight_pair(&from, s, &to, r, t->tokens);
    compare(&to, chunk_bytes ? "in chunks" : "straight", t);
    compare(&from, "the sender's own cache", t);
    close_side(&from);
    close_side(&to);
}

static const test_case cases[] = {
    /* ranks, heads of bytes, layouts, rows of pages, tokens: the last page is partial on one side at least */
    {1, 1, 8, 256, 0, 0, 16, 16, 21}, {1, 1, 1, 512, 0, 0, 16, 4, 30},  {1, 1, 8, 128, 1, 1, 16, 16, 17},
    {4, 2, 8, 256, 0, 1, 16, 8, 21},  {4, 2, 8, 64, 1, 0, 4, 16, 19},   {4, 2, 4, 256, 1, 1, 16, 5, 9},
    {2, 4, 8, 256, 1, 0, 16, 16, 20}, {2, 4, 16, 128, 0, 0, 8, 16, 23}, {2, 4, 8, 100, 0, 1, 7, 16, 13},
    {3, 2, 7, 256, 0, 0, 16, 16, 18}, {3, 2, 7, 256, 1, 0, 16, 8, 17},  {3, 2, 8, 33, 0, 1, 16, 3, 16},
    {2, 3, 5, 72, 1, 1, 6, 16, 40},   {1, 1, 1, 1, 0, 1, 1, 1, 1}};

static void test_chunks(void)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const test_case *const t = &cases[i];
        /* Of the largest share that two ranks have: a token, three, a layer less a byte, a layer, two and a half. */
        const size_t token = (size_t)2 * (size_t)t->heads * (size_t)t->head_bytes, layer = token * (size_t)t->tokens;
        const size_t sizes[] = {token,   3 * token,     layer - 1 < token ? token : layer - 1,
                                layer,   layer * 5 / 2, test_layers * layer,
                                SIZE_MAX};
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            hand_over(t, sizes[k]);
    }
}

static void test_straight(void)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        hand_over(&cases[i], 0);
}

/* Pages that are not there, and slots past the cache. */
static void test_missing_slots(void)
{
    const test_case t = {1, 1, 2, 16, 0, 1, 4, 4, 12};
    test_side from, to;
    kvprim_move moves[2];
    uint32_t rejected = 0;
    open_side(&from, 1, &t, 0, 4);
    open_side(&to, 1, &t, 1, 4);
    expect(&from, &to, &t);
    const int64_t past = to.cache[0].pages * 4, skipped[] = {2, 7, 11};
    for (int k = 0; k < 3; k++) { /* what the receiver had there must stay */
        for (int lp = 0; lp < 2 * test_layers; lp++)
            for (int b = 0; b < 2 * t.head_bytes; b++) {
                const size_t at = place(&to.cache[0], lp / 2, lp % 2, to.slots[0][skipped[k]], b / 16, b % 16);
                to.want[0][at] = (unsigned char)to.cache[0].data[at];
            }
    }
    to.slots[0][2] = -1, to.slots[0][7] = past, from.slots[0][11] = past;
    CHECK(handover_straight(&from.cache[0], &to.cache[0], from.slots[0], to.slots[0], t.tokens, &rejected, moves) ==
              KVPRIM_OK &&
          kvprim_cpu_move(moves, 2) == KVPRIM_OK);
    CHECK(rejected == 2); /* not 4: K's move counts, V's does not */
    compare(&to, "with slots that are not there", &t);
    close_side(&from);
    close_side(&to);
}

/* ---- how it is cut ---- */

static void check_cut(int64_t tokens, size_t chunk_bytes, int64_t chunks, int32_t layers, int64_t of_tokens)
{
    const handover_cache c = {NULL, 64, 16, 0, 8, 128, 0, 1 << 20};
    handover_chunk first;
    CHECK(handover_chunks(&c, &c, tokens, chunk_bytes) == chunks);
    handover_chunk_at(&c, &c, tokens, chunk_bytes, 0, &first);
    CHECK(first.layers == layers && first.tokens == of_tokens && first.heads == (chunks ? 8 : 0));
}

/* 64 layers; a token has 2 KB in a layer. Chunks of a request are about equally large. */
static void test_cuts(void)
{
    check_cut(1000, 2048, 64000, 1, 1);
    check_cut(1000, 4095, 64000, 1, 1);
    check_cut(1000, 1 << 20, 128, 1, 500);         /* 512 tokens fit; 512 and 488 would be less even */
    check_cut(1000, 2048000, 64, 1, 1000);         /* a layer exactly */
    check_cut(1000, 2 * 2048000, 32, 2, 1000);     /* two */
    check_cut(1000, 7 * 2048000 + 1, 10, 7, 1000); /* seven fit: 4 groups of 7, 6 of 6 */
    check_cut(1000, SIZE_MAX, 1, 64, 1000);
    check_cut(0, 2048, 0, 0, 0);
    handover_chunk none;
    const handover_cache a = {NULL, 64, 16, 0, 4, 128, 0, 100}, b = {NULL, 64, 16, 4, 4, 128, 0, 100};
    CHECK(handover_chunks(&a, &b, 1000, 1 << 20) == 0); /* no head is on both */
    for (int64_t i = -1; i < 2; i++) {
        handover_chunk_at(&a, &b, 1000, 1 << 20, i, &none);
        CHECK(none.bytes == 0 && none.layers == 0);
    }
}

/* ---- the pattern ---- */

/* Where a byte lies, by subscripts and by the pattern; any byte that moves or changes is seen. */
static void test_pattern(void)
{
    for (int hnd = 0; hnd < 2; hnd++) {
        const handover_cache c = {NULL, 3, 4, 5, 3, 24, hnd, 6};
        size_t seen = 0;
        for (int lp = 0; lp < 6; lp++)
            for (int64_t slot = 0; slot < 24; slot++)
                for (int head = 5; head < 8; head++)
                    for (int b = 0; b < 24; b++, seen++) {
                        const handover_place p = handover_place_of(&c, place(&c, lp / 2, lp % 2, slot, head, b));
                        CHECK(p.layer == lp / 2 && p.part == lp % 2 && p.slot == slot && p.head == head && p.byte == b);
                    }
        CHECK(seen == handover_cache_bytes(&c));
    }
    const handover_place p = {2, 1, 7, 8, 20};
    const uint64_t word = handover_expected(&p, handover_owner(9, 77), 1, 640);
    const handover_place others[] = {{1, 1, 7, 8, 20}, {2, 0, 7, 8, 20}, {2, 1, 6, 8, 20}, {2, 1, 7, 16, 20}};
    for (int k = 0; k < 4; k++)
        CHECK(handover_expected(&others[k], handover_owner(9, 77), 1, 640) != word);
    CHECK(handover_expected(&p, handover_owner(8, 77), 1, 640) != word);
    CHECK(handover_expected(&p, handover_owner(9, 76), 1, 640) != word);
    CHECK(handover_expected(&p, -1, 1, 640) != handover_expected(&p, -1, 1, 648));
    CHECK(handover_expected(&p, -1, 1, 640) != handover_expected(&p, -1, 2, 640));
}

static void test_differing(void)
{
    uint32_t first = 99;
    CHECK(handover_differing(5, 5, &first) == 0 && first == 99);
    CHECK(handover_differing(5, 5 ^ 0x0100000000010000u, &first) == 2 && first == 2);
    const handover_cache c = {NULL, 2, 16, 4, 2, 64, 0, 8};
    char text[200], nobody[200];
    const size_t at = place(&c, 1, 1, 3 * 16 + 5, 5, 9);
    const handover_place p = handover_place_of(&c, at);
    const unsigned want = (unsigned)(handover_expected(&p, handover_owner(6, 100), 0, at / 8 * 8) >> at % 8 * 8 & 255);
    char end[32];
    (void)snprintf(end, sizeof end, "got %u, not %u", (want + 1) % 256, want);
    handover_describe_byte(&c, handover_owner(6, 100), 0, at, (want + 1) % 256, text, sizeof text);
    CHECK(strstr(text, "layer 1, V, page 3, row 5, head 5, byte 9 of request 6, token 100") && strstr(text, end));
    handover_describe_byte(&c, -1, 0, at, 0, nobody, sizeof nobody);
    CHECK(strstr(nobody, "byte 9 of nobody"));
}

/* ---- bad input ---- */

static kvprim_status chunks_status(const handover_cache *from, const handover_cache *to, int64_t tokens, size_t bytes)
{
    handover_chunk chunk;
    const kvprim_status got = handover_chunks(from, to, tokens, bytes) < 0 ? KVPRIM_ERROR_SIZE : KVPRIM_OK;
    handover_chunk_at(from, to, tokens, bytes, 0, &chunk);
    CHECK(chunk.bytes == 0);
    return got;
}

static void test_bad_caches(void)
{
    const handover_cache good = {NULL, 4, 16, 0, 8, 64, 0, 10};
    handover_cache c = good;
    CHECK(handover_cache_bytes(&good) == 4 * 2 * 10 * 16 * 8 * 64);
    c.layers = 5;
    CHECK_ERROR(chunks_status(&good, &c, 9, 4096), KVPRIM_ERROR_SIZE, "4 layers and heads of 64 bytes do not fit 5");
    c = good, c.head_bytes = 128;
    CHECK_ERROR(chunks_status(&good, &c, 9, 4096), KVPRIM_ERROR_SIZE, "do not fit 4 and 128");
    CHECK_ERROR(chunks_status(&good, &good, 9, 1023), KVPRIM_ERROR_SIZE,
                "chunk_bytes is 1023, less than a token of one");
    CHECK_ERROR(chunks_status(&good, &good, 9, 0), KVPRIM_ERROR_SIZE, "one layer: 1024");
    CHECK(chunks_status(&good, &good, -1, 4096) == KVPRIM_OK);
}

/* Chunks that are not the cache's, and what else kvprim_transfer_moves refuses. */
static void test_bad_moves(void)
{
    char memory[2][2048], data[1024];
    const int64_t slots[2] = {0, 1};
    handover_cache c = {memory[0], 1, 2, 0, 2, 64, 0, 1}, other = c;
    const handover_chunk good = {0, 1, 0, 2, 0, 2, 512};
    handover_chunk k = good;
    kvprim_move moves[2];
    other.data = memory[1];
    for (int d = 0; d < 2; d++) {
        const handover_direction way = d ? handover_unpack : handover_pack;
        CHECK(handover_chunk_moves(&c, &good, data, slots, NULL, way, moves) == KVPRIM_OK);
        CHECK_ERROR(handover_chunk_moves(&c, &good, memory[0] + 100, slots, NULL, way, moves), KVPRIM_ERROR_OVERLAP,
                    "overlaps");
        CHECK_ERROR(handover_chunk_moves(&c, &good, NULL, slots, NULL, way, moves), KVPRIM_ERROR_NULL, "NULL");
        CHECK_ERROR(handover_chunk_moves(&c, &good, data, NULL, NULL, way, moves), KVPRIM_ERROR_NULL, "slots is NULL");
        k = good, k.first_layer = 1;
        CHECK_ERROR(handover_chunk_moves(&c, &k, data, slots, NULL, way, moves), KVPRIM_ERROR_SIZE, "bytes");
        k = good, k.layers = 2;
        CHECK_ERROR(handover_chunk_moves(&c, &k, data, slots, NULL, way, moves), KVPRIM_ERROR_SIZE, "bytes");
        k = good, k.heads = 3;
        CHECK_ERROR(handover_chunk_moves(&c, &k, data, slots, NULL, way, moves), KVPRIM_ERROR_SIZE, "heads 3");
        k = good, k.tokens = -1;
        CHECK_ERROR(handover_chunk_moves(&c, &k, data, slots, NULL, way, moves), KVPRIM_ERROR_SIZE, "-1");
        k = good, k.bytes = 511;
        CHECK_ERROR(handover_chunk_moves(&c, &k, data, slots, NULL, way, moves), KVPRIM_ERROR_SIZE, "bytes");
    }
    CHECK(handover_straight(&c, &other, slots, slots, 2, NULL, moves) == KVPRIM_OK);
    CHECK_ERROR(handover_straight(&c, &c, slots, slots, 2, NULL, moves), KVPRIM_ERROR_OVERLAP, "overlap");
    CHECK_ERROR(handover_straight(&c, &other, NULL, slots, 2, NULL, moves), KVPRIM_ERROR_NULL, "from_slots");
    CHECK_ERROR(handover_straight(&c, &other, slots, slots, -2, NULL, moves), KVPRIM_ERROR_SIZE, "count");
    other.first_head = 2;
    CHECK_ERROR(handover_straight(&c, &other, slots, slots, 2, NULL, moves), KVPRIM_ERROR_ARGUMENT,
                "none of the heads");
    other.first_head = 0, other.data = NULL;
    CHECK_ERROR(handover_straight(&c, &other, slots, slots, 2, NULL, moves), KVPRIM_ERROR_NULL, "data is NULL");
}

int main(void)
{
    run("hand-over: in chunks, every byte", test_chunks);
    run("hand-over: straight, every byte", test_straight);
    run("hand-over: slots that are not there", test_missing_slots);
    run("hand-over: how requests are cut", test_cuts);
    run("hand-over: the pattern", test_pattern);
    run("hand-over: what is wrong, described", test_differing);
    run("hand-over: bad caches", test_bad_caches);
    run("hand-over: bad moves", test_bad_moves);
    return finish();
}

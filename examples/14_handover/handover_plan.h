/* SPDX-License-Identifier: MIT */
/* handover_plan.h: which bytes of a request go from one rank's cache to another's, in which chunks, and the moves that
   copy them. C11 and C++17; it allocates nothing and runs nothing.

   A rank holds some of the model's heads in a paged cache. The cache of a sender and that of a receiver may differ in
   the heads that they hold (another tensor-parallel size), in the order inside a page (NHD or HND), in the tokens of a
   page and in the number of pages. They must agree on the layers and on the bytes of a head.

       for each pair of ranks
           n = handover_chunks(from, to, tokens, chunk_bytes)
           for i = 0 to n - 1
               handover_chunk_at(from, to, tokens, chunk_bytes, i, &chunk)
               handover_pack(from, &chunk, staging, slots, rejected, moves)       the sender runs both moves, ...
               handover_unpack(to, &chunk, staging, slots, rejected, moves)       ... the receiver these
       or, where the sender can write the receiver's cache,
           handover_straight(from, to, from_slots, to_slots, tokens, rejected, moves)

   Slots: kvprim_slots() or kvprim_cuda_slots() makes them from the request's page table. They are int64, one for each
   token of the request, in memory that the executing side reads when the moves run. A slot of -1 (a page that is not
   there) is skipped, and its token's bytes stay as they are; a slot past the cache's end is skipped too, and adds one
   to *rejected, which may be NULL. */
#ifndef HANDOVER_PLAN_H
#define HANDOVER_PLAN_H

#include "kvprim.h"
#include <stdint.h>
#include <string.h>

/* What one rank holds: [layer][K, V][page], where a page is [page_rows][head][head_bytes], or, if head_major is 1,
   [head][page_rows][head_bytes]. */
typedef struct handover_cache {
    char *data;
    int32_t layers, page_rows; /* page_rows: tokens of a page */
    int32_t first_head, heads; /* this rank's, of the model's */
    int32_t head_bytes;
    int32_t head_major; /* 0: NHD, 1: HND */
    int64_t pages;      /* of one layer's K, and of its V */
} handover_cache;

/* Bytes that lie as [layer][K, V][token][head][head_bytes], without gaps. */
typedef struct handover_chunk {
    int32_t first_layer, layers;
    int32_t first_head, heads; /* of the model's */
    int64_t first_token, tokens;
    size_t bytes;
} handover_chunk;

/* ---- sizes ---- */

/* The most bytes of a cache or of a request: sums and products of a few sizes below it fit int64_t. */
#define HANDOVER_MOST_BYTES ((int64_t)1 << 60)

/* Returns a * b, or HANDOVER_MOST_BYTES if it is as much or more. Neither is negative. */
static inline int64_t handover_product(int64_t a, int64_t b)
{
    return a && b >= (HANDOVER_MOST_BYTES + a - 1) / a ? HANDOVER_MOST_BYTES : a * b;
}

/* Bytes of a page of K, or of V, of one layer. */
static inline int64_t handover_page_bytes(const handover_cache *c)
{
    return handover_product(handover_product(c->page_rows, c->heads), c->head_bytes);
}

/* Bytes of all pages of K, or of V, of one layer. */
static inline int64_t handover_part_bytes(const handover_cache *c)
{
    return handover_product(handover_page_bytes(c), c->pages);
}

/* Bytes of the whole cache; 0 if it is none (see handover_check_cache) or has HANDOVER_MOST_BYTES or more. */
static inline size_t handover_cache_bytes(const handover_cache *c)
{
    if (!c || c->layers < 1 || c->page_rows < 1 || c->heads < 1 || c->head_bytes < 1 || c->pages < 1)
        return 0;
    const int64_t bytes = handover_product(handover_part_bytes(c), (int64_t)2 * c->layers);
    return bytes < HANDOVER_MOST_BYTES ? (size_t)bytes : 0;
}

/* ---- checks ---- */

/* `side` names the cache in the error: "from" or "to". */
static inline kvprim_status handover_check_cache(const char *side, const handover_cache *c)
{
    if (!c)
        return kvprim_fail(KVPRIM_ERROR_NULL, "handover: the cache `%s` is NULL", side);
    const struct {
        const char *field;
        int64_t value, least;
    } fields[] = {{"layers", c->layers, 1}, {"page_rows", c->page_rows, 1},   {"first_head", c->first_head, 0},
                  {"heads", c->heads, 1},   {"head_bytes", c->head_bytes, 1}, {"pages", c->pages, 1}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < fields[i].least)
            return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: %s.%s is %lld, less than %lld", side, fields[i].field,
                               (long long)fields[i].value, (long long)fields[i].least);
    if (c->head_major != 0 && c->head_major != 1)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "handover: %s.head_major is %d, neither 0 nor 1", side,
                           (int)c->head_major);
    if (c->first_head > INT32_MAX - c->heads)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: %s.first_head %d plus %d heads is too much", side,
                           (int)c->first_head, (int)c->heads);
    if (handover_cache_bytes(c) == 0)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: the cache `%s` has 2^60 bytes or more", side);
    return KVPRIM_OK;
}

/* Whether tokens can go from one to the other. `data` may be NULL: a plan needs no memory yet. */
static inline kvprim_status handover_check_pair(const handover_cache *from, const handover_cache *to)
{
    kvprim_status status = handover_check_cache("from", from);
    if (status == KVPRIM_OK)
        status = handover_check_cache("to", to);
    if (status != KVPRIM_OK)
        return status;
    if (from->layers != to->layers)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: from.layers is %d, but to.layers is %d", (int)from->layers,
                           (int)to->layers);
    if (from->head_bytes != to->head_bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: from.head_bytes is %d, but to.head_bytes is %d",
                           (int)from->head_bytes, (int)to->head_bytes);
    return KVPRIM_OK;
}

/* ---- what goes where ---- */

/* Returns 1 and sets the model's heads that both ranks hold, or returns 0 if there are none. */
static inline int handover_shared_heads(const handover_cache *from, const handover_cache *to, int32_t *first,
                                        int32_t *heads)
{
    const int64_t from_end = (int64_t)from->first_head + from->heads, to_end = (int64_t)to->first_head + to->heads;
    const int64_t end = from_end < to_end ? from_end : to_end;
    *first = from->first_head > to->first_head ? from->first_head : to->first_head;
    *heads = end > *first ? (int32_t)(end - *first) : 0;
    return *heads > 0;
}

/* How a request is cut: every layer into `per_layer` parts (then layer_groups is the layers), or the layers into
   `layer_groups` groups of whole layers. Parts differ by at most one token, groups by at most one layer: no chunk is
   much smaller than the others, and takes as long nevertheless. */
typedef struct handover_cut {
    int32_t first_head, heads, layer_groups;
    int64_t per_layer;
    int64_t token_bytes; /* of one token in one layer, K and V */
} handover_cut;

static inline kvprim_status handover_cut_of(const handover_cache *from, const handover_cache *to, int64_t tokens,
                                            size_t chunk_bytes, handover_cut *cut)
{
    memset(cut, 0, sizeof *cut);
    const kvprim_status status = handover_check_pair(from, to);
    if (status != KVPRIM_OK)
        return status;
    if (tokens < 0)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: tokens is %lld, less than 0", (long long)tokens);
    if (!handover_shared_heads(from, to, &cut->first_head, &cut->heads) || tokens == 0)
        return KVPRIM_OK;
    cut->token_bytes = handover_product((int64_t)2 * cut->heads, from->head_bytes);
    const int64_t layer_bytes = handover_product(cut->token_bytes, tokens);
    if (handover_product(layer_bytes, from->layers) >= HANDOVER_MOST_BYTES)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: %lld tokens have 2^60 bytes or more", (long long)tokens);
    const int64_t chunk = chunk_bytes < (size_t)HANDOVER_MOST_BYTES ? (int64_t)chunk_bytes : HANDOVER_MOST_BYTES;
    if (chunk < cut->token_bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: chunk_bytes is %lld, less than a token of one layer: %lld",
                           (long long)chunk, (long long)cut->token_bytes);
    const int64_t at_once = chunk / cut->token_bytes, layers_at_once = chunk / layer_bytes;
    cut->per_layer = layers_at_once > 0 ? 1 : (tokens + at_once - 1) / at_once;
    cut->layer_groups = layers_at_once < 2 ? from->layers
                        : layers_at_once >= from->layers
                            ? 1
                            : (int32_t)((from->layers + layers_at_once - 1) / layers_at_once);
    return KVPRIM_OK;
}

/* Returns how many chunks of at most chunk_bytes carry `tokens` tokens of a request: 0 if there are no tokens or no
   shared heads, -1 after an error (see kvprim_last_error). */
static inline int64_t handover_chunks(const handover_cache *from, const handover_cache *to, int64_t tokens,
                                      size_t chunk_bytes)
{
    handover_cut cut;
    if (handover_cut_of(from, to, tokens, chunk_bytes, &cut) != KVPRIM_OK)
        return -1;
    return cut.per_layer * cut.layer_groups;
}

/* The first of `all` things that part `i` of `parts` gets; part `parts` would begin at `all`. */
static inline int64_t handover_part_begin(int64_t all, int64_t parts, int64_t i)
{
    const int64_t least = all / parts, more = all % parts;
    return i * least + (i < more ? i : more);
}

/* Writes chunk i of handover_chunks(...) with the same arguments, in the order of layers. Any other i, or arguments
   that are an error there, makes a chunk of 0 bytes. */
static inline void handover_chunk_at(const handover_cache *from, const handover_cache *to, int64_t tokens,
                                     size_t chunk_bytes, int64_t i, handover_chunk *out)
{
    handover_cut cut;
    memset(out, 0, sizeof *out);
    if (handover_cut_of(from, to, tokens, chunk_bytes, &cut) != KVPRIM_OK || i < 0 ||
        i >= cut.per_layer * cut.layer_groups)
        return;
    const int64_t group = i / cut.per_layer, part = i % cut.per_layer;
    out->first_layer = (int32_t)handover_part_begin(from->layers, cut.layer_groups, group);
    out->layers = (int32_t)handover_part_begin(from->layers, cut.layer_groups, group + 1) - out->first_layer;
    out->first_head = cut.first_head, out->heads = cut.heads;
    out->first_token = handover_part_begin(tokens, cut.per_layer, part);
    out->tokens = handover_part_begin(tokens, cut.per_layer, part + 1) - out->first_token;
    out->bytes = (size_t)(cut.token_bytes * out->tokens * out->layers);
}

/* ---- moves ---- */

/* A side of a transfer: K (part 0) or V (part 1). */
typedef struct handover_side {
    kvprim_table table;
    int64_t layer_stride;
    const int64_t *slots;
} handover_side;

/* Heads [first_head, first_head + heads) of the model in a cache that holds them, from first_layer on. */
static inline handover_side handover_cache_side(const handover_cache *c, int32_t first_layer, int32_t first_head,
                                                int32_t heads, int part, const int64_t *slots)
{
    const int64_t part_bytes = handover_part_bytes(c), head_step = c->head_major ? c->page_rows : 1;
    const int64_t at =
        (2 * (int64_t)first_layer + part) * part_bytes + (first_head - c->first_head) * head_step * c->head_bytes;
    handover_side side;
    memset(&side, 0, sizeof side);
    side.table.data = c->data + at;
    side.table.bytes = (int64_t)handover_cache_bytes(c) - at;
    side.table.rows = c->pages * c->page_rows;
    side.table.page_rows = c->page_rows;
    side.table.page_stride = handover_page_bytes(c);
    side.table.stride = c->head_major ? c->head_bytes : (int64_t)c->heads * c->head_bytes;
    side.table.heads = c->head_major ? heads : 1;
    side.table.head_stride = c->head_major ? head_step * c->head_bytes : 0;
    side.layer_stride = 2 * part_bytes;
    side.slots = slots;
    return side;
}

static inline handover_side handover_chunk_side(const handover_chunk *chunk, void *data, int64_t row_bytes, int part)
{
    const int64_t part_bytes = chunk->tokens * row_bytes;
    handover_side side;
    memset(&side, 0, sizeof side);
    side.table.data = (char *)data + part * part_bytes;
    side.table.bytes = (int64_t)chunk->bytes - part * part_bytes;
    side.table.rows = chunk->tokens;
    side.layer_stride = 2 * part_bytes;
    return side;
}

/* One move of all layers. */
static inline kvprim_status handover_move(const handover_side *to, const handover_side *from, int32_t layers,
                                          int64_t row_bytes, int64_t tokens, uint32_t *rejected, kvprim_move *move)
{
    kvprim_transfer_desc d;
    memset(&d, 0, sizeof d);
    d.dst = to->table, d.src = from->table;
    d.dst_layer_stride = to->layer_stride, d.src_layer_stride = from->layer_stride;
    d.layers = layers;
    d.row_bytes = row_bytes;
    d.dst_index = to->slots, d.src_index = from->slots;
    d.index_type = KVPRIM_I64;
    d.count = tokens;
    d.rejected = rejected;
    return kvprim_transfer_moves(&d, move);
}

/* `c` holds the chunk's layers and heads, and the chunk's fields agree with each other: a peer may have sent it. */
static inline kvprim_status handover_check_chunk(const char *side, const handover_cache *c, const handover_chunk *chunk,
                                                 const void *data, const int64_t *slots)
{
    const kvprim_status status = handover_check_cache(side, c);
    if (status != KVPRIM_OK)
        return status;
    if (!c->data || !chunk || !data || !slots)
        return kvprim_fail(KVPRIM_ERROR_NULL, "handover: %s is NULL",
                           !c->data ? "the data of a cache"
                           : !chunk ? "chunk"
                           : !data  ? "the chunk's memory"
                                    : "slots");
    if (chunk->first_layer < 0 || chunk->layers < 1 || chunk->first_layer > c->layers - chunk->layers)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: a chunk has %d layers from %d on, but %s.layers is %d",
                           (int)chunk->layers, (int)chunk->first_layer, side, (int)c->layers);
    if (chunk->first_head < c->first_head || chunk->heads < 1 || chunk->heads > c->heads ||
        chunk->first_head - c->first_head > c->heads - chunk->heads)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: a chunk has %d heads from %d on, but %s has %d from %d on",
                           (int)chunk->heads, (int)chunk->first_head, side, (int)c->heads, (int)c->first_head);
    if (chunk->first_token < 0 || chunk->tokens < 1 || chunk->tokens > INT64_MAX - chunk->first_token)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: a chunk has %lld tokens from %lld on",
                           (long long)chunk->tokens, (long long)chunk->first_token);
    const int64_t row = handover_product((int64_t)2 * chunk->heads, c->head_bytes);
    const int64_t bytes = handover_product(handover_product(row, chunk->tokens), chunk->layers);
    if (bytes >= HANDOVER_MOST_BYTES || chunk->bytes != (size_t)bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: a chunk of %lld bytes says that it has %llu", (long long)bytes,
                           (unsigned long long)chunk->bytes);
    return KVPRIM_OK;
}

/* Cache to chunk, or chunk to cache. */
static inline kvprim_status handover_chunk_moves(const handover_cache *c, const handover_chunk *chunk, void *data,
                                                 const int64_t *slots, uint32_t *rejected, int unpack,
                                                 kvprim_move moves[2])
{
    kvprim_status status = handover_check_chunk(unpack ? "to" : "from", c, chunk, data, slots);
    for (int part = 0; part < 2 && status == KVPRIM_OK; part++) {
        const int64_t row_bytes = (int64_t)chunk->heads * c->head_bytes;
        const handover_side cache = handover_cache_side(c, chunk->first_layer, chunk->first_head, chunk->heads, part,
                                                        slots + chunk->first_token);
        const handover_side packed = handover_chunk_side(chunk, data, row_bytes, part);
        status = handover_move(unpack ? &cache : &packed, unpack ? &packed : &cache, chunk->layers, row_bytes,
                               chunk->tokens, part ? NULL : rejected, &moves[part]);
    }
    return status;
}

/* Makes the moves of K and V that copy a chunk out of the sender's cache, into memory of chunk->bytes bytes. The token
   of a skipped slot leaves its bytes of the chunk as they were.
   slots: those of the request's first token and of all that follow. Run both moves by one call of kvprim_cpu_move or
   kvprim_cuda_move, in any order. rejected counts a token once, not K and V.
   Aliasing: the chunk must not overlap the cache (checked).
   Errors: NULL, SIZE (names the field and the values), ARGUMENT, OVERLAP. */
static inline kvprim_status handover_pack(const handover_cache *from, const handover_chunk *chunk, void *data,
                                          const int64_t *slots, uint32_t *rejected, kvprim_move moves[2])
{
    return handover_chunk_moves(from, chunk, data, slots, rejected, 0, moves);
}

/* The same out of a chunk, into the receiver's cache, by the receiver's slots. The chunk is only read. */
static inline kvprim_status handover_unpack(const handover_cache *to, const handover_chunk *chunk, const void *data,
                                            const int64_t *slots, uint32_t *rejected, kvprim_move moves[2])
{
    return handover_chunk_moves(to, chunk, (void *)(uintptr_t)data, slots, rejected, 1, moves);
}

/* Makes the moves of K and V of all layers straight from one cache to the other, for the heads that both hold (one at
   least). to->data is where the executing side sees that cache. A token moves if both of its slots are in range.
   Errors: as above. */
static inline kvprim_status handover_straight(const handover_cache *from, const handover_cache *to,
                                              const int64_t *from_slots, const int64_t *to_slots, int64_t tokens,
                                              uint32_t *rejected, kvprim_move moves[2])
{
    int32_t first, heads;
    kvprim_status status = handover_check_pair(from, to);
    if (status != KVPRIM_OK)
        return status;
    if (!from->data || !to->data || !from_slots || !to_slots)
        return kvprim_fail(KVPRIM_ERROR_NULL, "handover: %s is NULL",
                           from_slots && to_slots ? "the data of a cache" : "from_slots or to_slots");
    if (!handover_shared_heads(from, to, &first, &heads))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT,
                           "handover: from has %d heads from %d on, to has %d from %d on: none is shared",
                           (int)from->heads, (int)from->first_head, (int)to->heads, (int)to->first_head);
    for (int part = 0; part < 2 && status == KVPRIM_OK; part++) {
        const handover_side src = handover_cache_side(from, 0, first, heads, part, from_slots);
        const handover_side dst = handover_cache_side(to, 0, first, heads, part, to_slots);
        status = handover_move(&dst, &src, from->layers, (int64_t)heads * from->head_bytes, tokens,
                               part ? NULL : rejected, &moves[part]);
    }
    return status;
}

#endif

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
               handover_chunk_moves(from, &chunk, staging, slots, rejected, handover_pack, moves)     the sender
               handover_chunk_moves(to, &chunk, staging, slots, rejected, handover_unpack, moves)     the receiver
       or, where the sender can write the receiver's cache,
           handover_straight(from, to, from_slots, to_slots, tokens, rejected, moves)

   Slots: kvprim_slots() or kvprim_cuda_slots() makes them from the request's page table. They are int64, one for each
   token of the request, in memory that the executing side reads when the moves run. A slot of -1 (a page that is not
   there) is skipped, and its token's bytes stay as they are; a slot past the cache's end is skipped too, and adds one
   to *rejected, which may be NULL. Run both moves by one call of kvprim_cpu_move or kvprim_cuda_move. */
#ifndef HANDOVER_PLAN_H
#define HANDOVER_PLAN_H

#include "kvprim.h"
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define HANDOVER_ANYWHERE static __host__ __device__ inline
#else
#define HANDOVER_ANYWHERE static inline
#endif

/* What one rank holds: [layer][K, V][page], where a page is [page_rows][head][head_bytes], or, if head_major is 1,
   [head][page_rows][head_bytes]. All sizes are positive, and all bytes together fit int64_t. */
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

/* Bytes of a page of K, or of V, of one layer. */
HANDOVER_ANYWHERE int64_t handover_page_bytes(const handover_cache *c)
{
    return (int64_t)c->page_rows * c->heads * c->head_bytes;
}

/* Bytes of all pages of K, or of V, of one layer. */
HANDOVER_ANYWHERE int64_t handover_part_bytes(const handover_cache *c)
{
    return handover_page_bytes(c) * c->pages;
}

HANDOVER_ANYWHERE size_t handover_cache_bytes(const handover_cache *c)
{
    return (size_t)handover_part_bytes(c) * 2 * (size_t)c->layers;
}

/* ---- what goes where ---- */

/* Sets the model's heads that both ranks hold. Returns whether there are any. */
static inline bool handover_shared_heads(const handover_cache *from, const handover_cache *to, int32_t *first,
                                         int32_t *heads)
{
    const int32_t from_end = from->first_head + from->heads, to_end = to->first_head + to->heads;
    const int32_t end = from_end < to_end ? from_end : to_end;
    *first = from->first_head > to->first_head ? from->first_head : to->first_head;
    *heads = end > *first ? end - *first : 0;
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
    if (from->layers != to->layers || from->head_bytes != to->head_bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: %d layers and heads of %d bytes do not fit %d and %d",
                           (int)from->layers, (int)from->head_bytes, (int)to->layers, (int)to->head_bytes);
    if (!handover_shared_heads(from, to, &cut->first_head, &cut->heads) || tokens <= 0)
        return KVPRIM_OK;
    cut->token_bytes = (int64_t)2 * cut->heads * from->head_bytes;
    if (chunk_bytes < (size_t)cut->token_bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "handover: chunk_bytes is %llu, less than a token of one layer: %lld",
                           (unsigned long long)chunk_bytes, (long long)cut->token_bytes);
    const int64_t chunk = chunk_bytes < INT64_MAX ? (int64_t)chunk_bytes : INT64_MAX;
    const int64_t at_once = chunk / cut->token_bytes, layers_at_once = chunk / (cut->token_bytes * tokens);
    cut->per_layer = layers_at_once > 0 ? 1 : (tokens + at_once - 1) / at_once;
    cut->layer_groups = layers_at_once < 2               ? from->layers
                        : layers_at_once >= from->layers ? 1
                                                         : (int32_t)((from->layers - 1) / layers_at_once + 1);
    return KVPRIM_OK;
}

/* Returns how many chunks of at most chunk_bytes carry `tokens` tokens of a request: 0 if there are no tokens or no
   shared heads, -1 after an error (see kvprim_last_error). */
static inline int64_t handover_chunks(const handover_cache *from, const handover_cache *to, int64_t tokens,
                                      size_t chunk_bytes)
{
    handover_cut cut;
    return handover_cut_of(from, to, tokens, chunk_bytes, &cut) == KVPRIM_OK ? cut.per_layer * cut.layer_groups : -1;
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

/* K (part 0) or V (part 1) of heads [first_head, first_head + heads) of the model, from first_layer on. */
static inline kvprim_table handover_cache_table(const handover_cache *c, int32_t first_layer, int32_t first_head,
                                                int32_t heads, int part)
{
    const int64_t head_step = c->head_major ? c->page_rows : 1; /* in pieces of head_bytes */
    const int64_t at = (2 * (int64_t)first_layer + part) * handover_part_bytes(c) +
                       (first_head - c->first_head) * head_step * c->head_bytes;
    kvprim_table table;
    memset(&table, 0, sizeof table);
    table.data = c->data ? c->data + at : NULL;
    table.bytes = (int64_t)handover_cache_bytes(c) - at;
    table.rows = c->pages * c->page_rows;
    table.page_rows = c->page_rows;
    table.page_stride = handover_page_bytes(c);
    table.stride = c->head_major ? c->head_bytes : (int64_t)c->heads * c->head_bytes;
    table.heads = c->head_major ? heads : 1;
    table.head_stride = c->head_major ? head_step * c->head_bytes : 0;
    return table;
}

typedef enum handover_direction { handover_pack, handover_unpack } handover_direction;

/* Makes the moves of K and V that copy a chunk out of the sender's cache into `data`, memory of chunk->bytes bytes, or
   from there into the receiver's cache. Packing leaves the bytes of a skipped slot's token in the chunk as they were.
   slots: those of the request's first token and of all that follow.
   Aliasing: the chunk must not overlap the cache (checked). Errors: NULL (slots), those of kvprim_transfer_moves. */
static inline kvprim_status handover_chunk_moves(const handover_cache *c, const handover_chunk *chunk, void *data,
                                                 const int64_t *slots, uint32_t *rejected, handover_direction direction,
                                                 kvprim_move moves[2])
{
    kvprim_layout_sizes sizes;
    kvprim_layout cache;
    kvprim_pack_desc pack;
    kvprim_pack plan;
    if (!slots)
        return kvprim_fail(KVPRIM_ERROR_NULL, "handover: slots is NULL");
    memset(&sizes, 0, sizeof sizes), memset(&pack, 0, sizeof pack);
    sizes.data = c->data, sizes.rows = c->pages * c->page_rows, sizes.page_rows = c->page_rows;
    sizes.k_bytes = sizes.v_bytes = (int64_t)c->heads * c->head_bytes, sizes.layers = c->layers, sizes.heads = c->heads;
    kvprim_status status = kvprim_layout_find(c->head_major ? "L2BHNC" : "L2BNHC", &sizes, &cache);
    cache.layers = chunk->layers;
    pack.cache = &cache, pack.head = chunk->first_head - c->first_head, pack.heads = chunk->heads;
    pack.slot = slots + chunk->first_token, pack.slot_type = KVPRIM_I64, pack.count = chunk->tokens;
    pack.staging = data, pack.staging_bytes = (int64_t)chunk->bytes;
    if (status == KVPRIM_OK)
        status = kvprim_pack_plan(&pack, &plan);
    for (int part = 0; part < 2 && status == KVPRIM_OK; part++) {
        kvprim_transfer_desc *const d = direction == handover_unpack ? &plan.unpack[part] : &plan.pack[part];
        kvprim_table *const table = direction == handover_unpack ? &d->dst : &d->src;
        if (table->data) {
            table->data = (char *)table->data + chunk->first_layer * cache.k_layer_stride;
            table->bytes = cache.bytes - ((char *)table->data - c->data);
        }
        d->rejected = part ? NULL : rejected; /* counts a token once, not K and V */
        status = kvprim_transfer_moves(d, &moves[part]);
    }
    return status;
}

/* Makes the moves of K and V of all layers straight from one cache to the other, for the heads that both hold (one at
   least). to->data is where the executing side sees that cache. A token moves if both of its slots are in range.
   Errors: as above, and ARGUMENT (no head is shared). */
static inline kvprim_status handover_straight(const handover_cache *from, const handover_cache *to,
                                              const int64_t *from_slots, const int64_t *to_slots, int64_t tokens,
                                              uint32_t *rejected, kvprim_move moves[2])
{
    int32_t first, heads;
    kvprim_status status = KVPRIM_OK;
    if (!from_slots || !to_slots)
        return kvprim_fail(KVPRIM_ERROR_NULL, "handover: from_slots or to_slots is NULL");
    if (!handover_shared_heads(from, to, &first, &heads))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "handover: none of the heads is shared");
    for (int part = 0; part < 2 && status == KVPRIM_OK; part++) {
        kvprim_transfer_desc d;
        memset(&d, 0, sizeof d);
        d.src = handover_cache_table(from, 0, first, heads, part), d.src_index = from_slots;
        d.dst = handover_cache_table(to, 0, first, heads, part), d.dst_index = to_slots;
        d.src_layer_stride = 2 * handover_part_bytes(from), d.dst_layer_stride = 2 * handover_part_bytes(to);
        d.index_type = KVPRIM_I64, d.layers = from->layers, d.row_bytes = (int64_t)heads * from->head_bytes;
        d.count = tokens, d.rejected = part ? NULL : rejected;
        status = kvprim_transfer_moves(&d, &moves[part]);
    }
    return status;
}

#endif

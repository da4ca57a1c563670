/* SPDX-License-Identifier: MIT */
/* The formats of examples/FORMATS.md, as readme.sh takes them from there: each stores rows, and what it wrote is read
   from where the engine expects it, with an oracle's rounding and scales. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>
#include <stdlib.h>

#include "tests/core/convert_oracle.h"

enum { SLOTS = 128, TOKENS = 40, HEADS = 8, DIM = 128, MOST = HEADS * (DIM + 16) };

/* A row of an engine: pieces of DIM elements, and where their scales lie: beside them, or at `scales`. */
typedef struct engine {
    kvprim_dtype dtype;
    int pieces, row_bytes, piece_bytes, scale_at, scale_step;
    const float *scales;
    int multiplies;  /* 1: stored = x * scale; 2: x * (1 / scale); 0: x / scale */
    float scale_min; /* of scales that the store computes */
    int power_of_two;
} engine;

static unsigned char memory[SLOTS * MOST];
static uint16_t k[TOKENS][HEADS * DIM], rope[TOKENS][64]; /* bf16 */
static int32_t slot[TOKENS];
static int failed;

/* Compares piece p of a token's row, its scale and then its elements. */
static int wrong_in_piece(const engine *e, const uint16_t *row, int s, int p)
{
    float x[DIM], scale;
    for (int i = 0; i < DIM; i++)
        x[i] = (float)oracle_decode(KVPRIM_BF16, row[p * DIM + i]);
    const unsigned char *const at = memory + s * e->row_bytes;
    const void *const stored = at + e->scale_at + p * e->scale_step;
    memcpy(&scale, e->scales ? (const void *)((const char *)e->scales + p * e->scale_step) : stored, sizeof scale);
    const kvprim_format rule = {.dtype = e->dtype, .scale_min = e->scale_min, .scale_power_of_two = e->power_of_two};
    int wrong = !e->scales && scale != oracle_computed(&rule, x, DIM);
    const float factor = e->multiplies == 2 ? oracle_divide(1, scale) : scale;
    for (int i = 0; i < DIM; i++)
        wrong += at[p * e->piece_bytes + i] !=
                 oracle_encode(e->dtype, e->multiplies ? oracle_multiply(x[i], factor) : oracle_divide(x[i], scale));
    return wrong;
}

static void stores(const char *name, kvprim_store_desc store, kvprim_table cache, engine e)
{
    memset(memory, 0xa5, sizeof memory);
    store.k_cache = cache;
    int wrong = kvprim_store(&store) != KVPRIM_OK ? printf("%s\n", kvprim_last_error()) : 0;
    for (int t = 0; t < TOKENS; t++)
        for (int p = 0; p < e.pieces; p++)
            wrong += wrong_in_piece(&e, (const uint16_t *)store.k.data + t * e.pieces * DIM, slot[t], p);
    if (wrong)
        printf("examples/FORMATS.md: %s: %d elements or scales are wrong\n", name, wrong);
    failed += wrong;
}

/* A store of elements of 4 bits, every byte of the memory compared with the oracle's. */
static void stores_packed(const char *name, kvprim_store_desc store, kvprim_table cache)
{
    static unsigned char want[sizeof memory];
    oracle_move m = {.row_bytes = store.k_bytes, .count = store.count, .layers = 1};
    cache.stride = cache.stride ? cache.stride : HEADS * DIM / 2;
    m.dst.table = store.k_cache = cache, m.src.table = store.k, m.src.table.stride = store.k_bytes;
    m.dst.index = store.slot, m.dst.type = store.slot_type;
    memset(memory, 0xa5, sizeof memory);
    oracle_run(&m);
    memcpy(want, memory, sizeof want);
    memset(memory, 0xa5, sizeof memory);
    const int wrong = kvprim_store(&store) != KVPRIM_OK || memcmp(memory, want, sizeof want) != 0;
    if (wrong)
        printf("examples/FORMATS.md: %s: %s\n", name, kvprim_last_error());
    failed += wrong;
}

static kvprim_table formatted(kvprim_table cache, const kvprim_format *format)
{
    cache.format = format;
    return cache;
}

/* What lies in the cache since the last store, as bf16. */
static void gathers(const kvprim_format *format, const kvprim_format *bf16, float scale)
{
    static uint16_t got[TOKENS][HEADS * DIM];
    const kvprim_gather_desc d = {.dst = {.data = got, .rows = TOKENS, .format = bf16},
                                  .src = {.data = memory, .rows = SLOTS, .format = format},
                                  .row_bytes = HEADS * DIM,
                                  .index = slot,
                                  .index_type = KVPRIM_I32,
                                  .count = TOKENS};
    int wrong = kvprim_gather(&d) != KVPRIM_OK ? printf("%s\n", kvprim_last_error()) : 0;
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < HEADS * DIM; i++) {
            const float x = (float)oracle_decode(format->dtype, memory[slot[t] * HEADS * DIM + i]);
            wrong += got[t][i] != oracle_encode(KVPRIM_BF16, oracle_multiply(x, scale));
        }
    if (wrong)
        printf("examples/FORMATS.md: from_trt: %d elements are wrong\n", wrong);
    failed += wrong;
}

/* The scales that the last store wrote, as vLLM's kernel for sm_100 says: swizzled within each head of a page. */
static void swizzles(const kvprim_format *linear, const kvprim_format *swizzled, kvprim_store_desc store,
                     kvprim_table cache, int64_t page_bytes)
{
    static unsigned char plain[sizeof memory];
    enum { T = 16, S = DIM / 16 };
    int wrong = 0;
    store.k_cache = formatted(cache, linear);
    wrong += kvprim_store(&store) != KVPRIM_OK;
    memcpy(plain, memory, sizeof plain);
    store.k_cache = formatted(cache, swizzled);
    wrong += kvprim_store(&store) != KVPRIM_OK;
    for (int i = 0; i < TOKENS; i++)
        for (int h = 0; h < HEADS; h++)
            for (int s = 0; s < S; s++) {
                const int t = slot[i] % T, at = 4 * (t / 4) + s / (S / 4), scale = s % (S / 4) * 4 + t % 4;
                const int64_t first = slot[i] / T * page_bytes + T * HEADS * DIM / 2 + h * T * S;
                wrong += memory[first + at * S + scale] != plain[first + t * S + s];
            }
    if (wrong)
        printf("examples/FORMATS.md: nvfp4_swizzled: %d scales are wrong: %s\n", wrong, kvprim_last_error());
    failed += wrong;
}

static void formats(void *cache, int64_t slots, int64_t dim, float *k_scale, float *v_scale, float *kv_scale_orig_quant,
                    float *kv_scale_quant_orig, void *kv_c, void *k_pe, int64_t tokens, int64_t page_bytes,
                    void *mx_scales)
{
#include "formats.h"
    const kvprim_table flat = store.k_cache;
    const engine one = {KVPRIM_F8E4M3, HEADS, HEADS * DIM, DIM, 0, 0, k_scale, 0, 0, 0};
    engine e = one;
    stores("tensor", store, flat, e);
    e.scale_step = sizeof(float);
    stores("head", store, formatted(flat, &head), e);
    e = one, e.scales = kv_scale_orig_quant, e.multiplies = 1;
    stores("to_trt", store, formatted(flat, &to_trt), e);
    gathers(&from_trt, &bf16, *kv_scale_quant_orig);

    e = (engine){KVPRIM_F8E4M3, HEADS, HEADS * (DIM + 4), DIM + 4, DIM, DIM + 4, NULL, 2, 1e-6f, 0};
    stores("token_head", store, token_heads, e);
    e.dtype = KVPRIM_INT8;
    stores("token_head_int8", store, formatted(token_heads, &token_head_int8), e);
    e = (engine){KVPRIM_F8E4M3, HEADS, HEADS * (DIM + 16), DIM + 16, DIM, DIM + 16, NULL, 0, 1e-12f, 0};
    stores("token_head_flashinfer", store, flashinfer_heads, e);
    stores_packed("nvfp4", store, nvfp4_pages);
    stores_packed("nvfp4_heads", store, nvfp4_hnd);
    stores_packed("nvfp4_swizzled", store, formatted(nvfp4_hnd, &nvfp4_swizzled));
    nvfp4_swizzled.tensor_scale = k_scale;
    swizzles(&nvfp4_heads, &nvfp4_swizzled, store, nvfp4_hnd, page_bytes);
    stores_packed("mxfp4", store, formatted(flat, &mxfp4));

    e = (engine){KVPRIM_F8E4M3, 4, 656, DIM, 512, sizeof(float), NULL, 0, 1e-4f, 1};
    stores("fp8_ds_mla", latents, mla.k_cache, e);
    int wrong = status != KVPRIM_OK;
    for (int t = 0; t < TOKENS; t++)
        wrong += memcmp(memory + slot[t] * 656 + 528, rope[t], sizeof rope[t]) != 0;
    if (wrong)
        printf("examples/FORMATS.md: k_pe of fp8_ds_mla: %d rows are wrong: %s\n", wrong, kvprim_last_error());
    failed += wrong;
}

int main(void)
{
    float scales[HEADS], orig_quant = 40, quant_orig = 0.025f;
    uint32_t random = 1;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HEADS * DIM; i++) {
            random = random * 1664525 + 1013904223;
            const float x = (float)(random >> 8) / (1 << 20) - 8; /* from -8 to 8 */
            k[t][i] = (uint16_t)oracle_encode(KVPRIM_BF16, t == 3 && i / DIM == 2 ? 0 : x);
        }
        memset(rope[t], t + 1, sizeof rope[t]);
        slot[t] = (t * 37 + 5) % SLOTS;
    }
    for (int h = 0; h < HEADS; h++)
        scales[h] = 0.02f * (float)(h + 1);
    formats(memory, SLOTS, DIM, scales, scales + 1, &orig_quant, &quant_orig, k, rope, TOKENS,
            2 * 16 * HEADS * (DIM / 2 + DIM / 16), memory + SLOTS * HEADS * DIM / 2);
    return failed != 0;
}

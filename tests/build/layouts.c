/* SPDX-License-Identifier: MIT */
/* The tables of examples/LAYOUTS.md, and the store at the top of README.md, as readme.sh takes them from there: each
   table against an array of C with its layout, the store by the slots that it fills. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>

enum {
    PAGES = 12,
    PAGE = 16,
    SLOTS = PAGES * PAGE,
    HEADS = 8,
    PIECE = 256,
    ROW = HEADS * PIECE,
    LAYERS = 61,
    DIM = 128
};

static char memory[SLOTS * LAYERS * 2 * ROW]; /* as much as the largest of these needs */
static char (*const nhd_array)[HEADS][PIECE] = (void *)memory;
static char (*const hnd_array)[HEADS][PAGE][PIECE] = (void *)memory;
static char (*const nhd_kv_array)[2][PAGE][HEADS][PIECE] = (void *)memory;
static char (*const hnd_kv_array)[2][HEADS][PAGE][PIECE] = (void *)memory;
static char (*const qkv_array)[4096 + 2 * ROW] = (void *)memory;
static char (*const latent_array)[1024 + 128] = (void *)memory;
static char (*const page_first_array)[LAYERS][1024] = (void *)memory;
static char (*const page_head_array)[HEADS][PAGE][LAYERS][DIM] = (void *)memory;
static char (*const unified_array)[2][LAYERS][2][PAGE][4][DIM] = (void *)memory;
static char (*const blhnc_array)[LAYERS][HEADS][PAGE][2][PIECE] = (void *)memory;
static char (*const host_array)[HEADS][PAGE][LAYERS][PIECE] = (void *)memory; /* of K; V's is the same after it */

static int failed;

/* Compares where the table, moved by `layer` bytes, has piece h of row r with `place`, which names both. */
#define LAYOUT(table, layer, row_bytes, pieces, place)                                                                 \
    do {                                                                                                               \
        const kvprim_table t = kvprim_table_resolve(table, row_bytes);                                                 \
        const int64_t step = t.heads > 1 ? t.head_stride : (row_bytes) / (pieces);                                     \
        int wrong = t.rows < SLOTS - 1;                                                                                \
        for (int64_t r = 0; r < t.rows; r++)                                                                           \
            for (int64_t h = 0; h < (pieces); h++)                                                                     \
                wrong += (char *)kvprim_table_row(&t, r) + (layer) + h * step != (char *)&place;                       \
        if (wrong)                                                                                                     \
            printf("examples/LAYOUTS.md: %s has %d wrong addresses\n", #table, wrong);                                 \
        failed += wrong;                                                                                               \
    } while (0)

static void layouts(char *cache, int64_t slots, void *const *layers, void *const *device_layers)
{
    char *const host_cache = cache;
#include "layouts.h"
    LAYOUT(nhd, 0, ROW, HEADS, nhd_array[r][h]);
    LAYOUT(hnd, 0, ROW, HEADS, hnd_array[r / PAGE][h][r % PAGE]);
    LAYOUT(half, 0, ROW / 2, HEADS / 2, nhd_array[r][HEADS / 2 + h]);
    LAYOUT(nhd_k, 0, ROW, HEADS, nhd_kv_array[r / PAGE][0][r % PAGE][h]);
    LAYOUT(nhd_v, 0, ROW, HEADS, nhd_kv_array[r / PAGE][1][r % PAGE][h]);
    LAYOUT(hnd_v, 0, ROW, HEADS, hnd_kv_array[r / PAGE][1][h][r % PAGE]);
    LAYOUT(qkv_k, 0, ROW, 1, qkv_array[r][4096]);
    LAYOUT(qkv_v, 0, ROW, 1, qkv_array[r][4096 + ROW]);
    LAYOUT(latent, 0, 1024 + 128, 1, latent_array[r]);
    LAYOUT(kv_c, 0, 1024, 1, latent_array[r]);
    LAYOUT(k_pe, 0, 128, 1, latent_array[r][1024]);
    LAYOUT(page_first, page_first_layer, 1024, 1, page_first_array[r][1]);
    LAYOUT(page_head, page_head_layer, HEADS * DIM, HEADS, page_head_array[r / PAGE][h][r % PAGE][1]);
    LAYOUT(unified, unified_layer, 2 * 4 * DIM, 2, unified_array[r / PAGE][h][0][1][r % PAGE]); /* V of layer 0 */
    failed += of_gpu != KVPRIM_OK || of_host != KVPRIM_OK || k_out.layers != LAYERS || k_out.row_bytes != ROW;
    LAYOUT(gpu.v_cache, gpu.v_layer_stride, ROW, HEADS, blhnc_array[r / PAGE][1][h][r % PAGE][1]);
    LAYOUT(k_out.src, k_out.src_layer_stride, ROW, HEADS, blhnc_array[r / PAGE][1][h][r % PAGE][0]);
    LAYOUT(k_out.dst, k_out.dst_layer_stride, ROW, HEADS, host_array[r / PAGE][h][r % PAGE][1]);
    LAYOUT(host.v_cache, 0, ROW, HEADS, host_array[PAGES + r / PAGE][h][r % PAGE][0]);
    LAYOUT(reserved.k_cache, 0, ROW, HEADS, nhd_array[r + 1][h]);
    LAYOUT(shard.src, 0, ROW, HEADS, nhd_array[r][h]);
    if (one_tensor.src_layers || by_pointers.src_layers != layers || on_the_gpu.src_device_layers != device_layers) {
        printf("examples/LAYOUTS.md: a transfer's layers\n");
        failed++;
    }

    /* Slot 1 is the second row of the memory, as token 50,001 is; tokens below 50,000 are of another rank. */
    static char row[ROW] = "slot 1", got[2][ROW];
    const int64_t slot = 1, tokens[] = {50001, 49999};
    reserved.k = (kvprim_table){.data = row, .rows = 1}, reserved.count = 1;
    reserved.slot = &slot, reserved.slot_type = KVPRIM_I64;
    shard.dst = (kvprim_table){.data = got, .rows = 2}, shard.count = 2;
    shard.index = tokens, shard.index_type = KVPRIM_I64;
    if (kvprim_store(&reserved) != KVPRIM_OK || kvprim_gather(&shard) != KVPRIM_OK || memcmp(got[0], row, ROW) != 0 ||
        got[1][0] != 0) {
        printf("examples/LAYOUTS.md: reserved or shard: %s\n", kvprim_last_error());
        failed++;
    }
}

/* On a GPU as it stands there; here it is the same on the CPU. */
#define kvprim_cuda_store(desc, launch) kvprim_store(desc)

static void first_store(char *k_cache, char *v_cache, void *k, void *v, const int32_t *slot, int64_t slots,
                        int64_t tokens)
{
#include "store.h"
}

int main(void)
{
    void *const layers[1] = {memory}, *const device_layers[1] = {memory};
    layouts(memory, SLOTS, layers, device_layers);

    static char k_cache[SLOTS * ROW], v_cache[SLOTS * ROW], k[3][ROW], v[3][ROW];
    const int32_t slot[] = {17, -1, 4};
    for (int i = 0; i < 3; i++)
        memset(k[i], 'a' + i, ROW), memset(v[i], 'x' + i, ROW);
    first_store(k_cache, v_cache, k, v, slot, SLOTS, 3);
    int wrong = 0;
    for (int s = 0; s < SLOTS; s++)
        for (int b = 0; b < ROW; b++) {
            wrong += k_cache[s * ROW + b] != (s == slot[0] ? 'a' : s == slot[2] ? 'c' : 0);
            wrong += v_cache[s * ROW + b] != (s == slot[0] ? 'x' : s == slot[2] ? 'z' : 0);
        }
    if (wrong)
        printf("README.md's store: %d bytes of the caches are wrong\n", wrong);
    return failed != 0 || wrong != 0;
}

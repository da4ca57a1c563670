/* SPDX-License-Identifier: MIT */
/* FP8 caches on the GPU. Stores the keys and values of four tokens, one of which is padding, from bf16 as e4m3 with a
   scale for K and one for V, and their latent rows in DeepSeek's format fp8_ds_mla, which has a scale for each 128
   elements. Gathers all of it back as bf16, and checks the result.

       nvcc -arch=native -I. examples/16_fp8.cu -o 16_fp8 && ./16_fp8
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"
#include <math.h>

enum { tokens = 4, pages = 8, page_rows = 64, slots = pages * page_rows };
enum { width = 1024, latent = 512, rope = 64 }; /* elements of a row of K, of V; of the parts of a latent row */

static const int32_t slot[tokens] = {37, 5, -1, 500}; /* -1: the third token is padding */

/* Allocates device memory with bytes that are NaN in e4m3 and bf16. */
static void *nans(size_t bytes)
{
    void *const p = on_device<char>(bytes);
    CU(cudaMemset(p, 0xff, bytes));
    return p;
}

static float from_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Fills rows with numbers up to `largest`, most of them much smaller, cut off to bf16. */
static void fill(uint16_t *rows, size_t count, float largest)
{
    static uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        const float x = ldexpf(largest * ((float)(state >> 8) / (1 << 23) - 1), -(int)(state >> 4 & 7));
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        rows[i] = (uint16_t)(bits >> 16);
    }
}

/* How many gathered elements are not what was stored. e4m3 has 3 bits after the leading one, and steps of scale / 512
   near 0, so rounding moves a number by up to 1/16 of it or half a step; bf16 rounds once more. Padding is 0. */
static int wrong_rows(const char *what, const uint16_t *stored, const uint16_t *gathered, int elements, float scale)
{
    int wrong = 0;
    for (int i = 0; i < tokens * elements; i++) {
        const float x = slot[i / elements] < 0 ? 0 : from_bf16(stored[i]);
        const float far = fmaxf(fabsf(x) * (1.0f / 16 + 1.0f / 256), scale / 1024);
        wrong += !(fabsf(from_bf16(gathered[i]) - x) <= (x == 0 ? 0 : far));
    }
    printf("%s: %d of %d elements wrong\n", what, wrong, tokens * elements);
    return wrong;
}

/* A gather of all tokens to `count` bf16 at out. */
static kvprim_gather_desc gather_of(const kvprim_table *cache, int64_t row_bytes, const int32_t *slot_on_device,
                                    uint16_t *out, const kvprim_format *format)
{
    kvprim_gather_desc gather = {};
    gather.src = *cache;
    gather.dst.data = out;
    gather.dst.rows = gather.count = tokens;
    gather.dst.format = format;
    gather.row_bytes = row_bytes;
    gather.index = slot_on_device;
    gather.index_type = KVPRIM_I32;
    return gather;
}

/* K and V with one scale each. A scale lies on the device: a captured graph reads its new value. */
static int scale_of_a_tensor(const int32_t *slot_on_device)
{
    static uint16_t kv[2][tokens][width], back[2][tokens][width];
    const float scales[2] = {0.02f, 0.5f}; /* largest |x| / 448 or more: larger numbers would become 448 * scale */
    for (int v = 0; v < 2; v++)
        fill(kv[v][0], tokens * width, 448 * scales[v]);
    uint16_t *const in = on_device(2 * tokens * width, kv[0][0]), *const out = (uint16_t *)nans(sizeof back);
    float *const scales_on_device = on_device(2, scales);

    kvprim_format bf16 = {}, e4m3[2] = {};
    bf16.dtype = KVPRIM_BF16;
    kvprim_store_desc store = {};
    kvprim_table *const caches[2] = {&store.k_cache, &store.v_cache}, *const rows[2] = {&store.k, &store.v};
    for (int v = 0; v < 2; v++) {
        e4m3[v].dtype = KVPRIM_F8E4M3;
        e4m3[v].scale = KVPRIM_SCALE_TENSOR;
        e4m3[v].scales = scales_on_device + v;
        caches[v]->data = nans(slots * width);
        caches[v]->rows = slots;
        caches[v]->format = &e4m3[v];
        rows[v]->data = in + v * tokens * width;
        rows[v]->rows = tokens;
        rows[v]->format = &bf16;
    }
    store.k_bytes = store.v_bytes = width * 2; /* of the rows as they are before the store: bf16 */
    store.slot = slot_on_device;
    store.slot_type = KVPRIM_I32;
    store.count = tokens;
    kvprim(kvprim_cuda_store(&store, NULL));

    for (int v = 0; v < 2; v++) {
        const kvprim_gather_desc gather = gather_of(caches[v], width, slot_on_device, out + v * tokens * width, &bf16);
        kvprim(kvprim_cuda_gather(&gather, NULL));
    }
    CU(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost));
    return wrong_rows("K as e4m3, one scale", kv[0][0], back[0][0], width, scales[0]) +
           wrong_rows("V as e4m3, one scale", kv[1][0], back[1][0], width, scales[1]);
}

/* Rows of 656 bytes. A layout says where their parts lie: K is what is converted, V what is copied as it is. */
static int latent_rows(const int32_t *slot_on_device)
{
    static uint16_t kv_c[tokens][latent], k_pe[tokens][rope], back[tokens][latent], back_pe[tokens][rope];
    fill(kv_c[0], tokens * latent, 100);
    fill(k_pe[0], tokens * rope, 1e6f);
    uint16_t *const out = (uint16_t *)nans(sizeof back + sizeof back_pe), *const out_pe = out + tokens * latent;
    kvprim_format bf16 = {};
    bf16.dtype = KVPRIM_BF16;
    kvprim_layout_sizes sizes = {};
    kvprim_layout preset;
    sizes.data = nans(slots * 656);
    sizes.rows = slots;
    sizes.page_rows = page_rows;
    kvprim(kvprim_layout_find("fp8_ds_mla", &sizes, &preset));

    kvprim_store_desc store = {};
    store.k_cache = preset.k_cache;
    store.v_cache = preset.v_cache;
    store.k.data = on_device(tokens * latent, kv_c[0]);
    store.v.data = on_device(tokens * rope, k_pe[0]);
    store.k.rows = store.v.rows = store.count = tokens;
    store.k.format = &bf16;
    store.k_bytes = preset.k_elements * 2;
    store.v_bytes = preset.v_elements * 2;
    store.slot = slot_on_device;
    store.slot_type = KVPRIM_I32;
    kvprim(kvprim_cuda_store(&store, NULL));

    kvprim_move moves[2]; /* both parts in one launch */
    const kvprim_gather_desc k = gather_of(&preset.k_cache, preset.k_elements, slot_on_device, out, &bf16);
    const kvprim_gather_desc v = gather_of(&preset.v_cache, preset.v_elements * 2, slot_on_device, out_pe, NULL);
    kvprim(kvprim_gather_moves(&k, &moves[0]));
    kvprim(kvprim_gather_moves(&v, &moves[1]));
    kvprim(kvprim_cuda_move(moves, 2, NULL));
    CU(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost));
    CU(cudaMemcpy(back_pe, out_pe, sizeof back_pe, cudaMemcpyDeviceToHost));

    int wrong = wrong_rows("fp8_ds_mla, latent", kv_c[0], back[0], latent, 100.0f / 448), wrong_pe = 0;
    for (int i = 0; i < tokens; i++)
        for (int e = 0; e < rope; e++)
            wrong_pe += back_pe[i][e] != (slot[i] < 0 ? 0 : k_pe[i][e]);
    printf("fp8_ds_mla, rope: %d of %d elements wrong\n", wrong_pe, tokens * rope);
    return wrong + wrong_pe;
}

int main(void)
{
    need_gpu();
    const int32_t *const slot_on_device = on_device(tokens, slot);
    const int wrong = scale_of_a_tensor(slot_on_device) + latent_rows(slot_on_device);
    return wrong != 0;
}

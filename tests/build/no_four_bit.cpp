// SPDX-License-Identifier: MIT
// Implements the headers without the kernels of elements of 4 bits, on the CPU: a call that needs them says so, and
// changes nothing; others run.
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_NO_FOUR_BIT
#include "../gpu/cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "../harness.h"

static void test_no_four_bit()
{
    alignas(16) static uint8_t cache[4][32];
    alignas(16) static const uint16_t rows[2][16] = {{0x3f80, 0x3f80}, {0x4000}}; // 1, 1; 2
    static const int32_t slot[] = {3, 1};
    kvprim_format bf16 = {}, small = {};
    bf16.dtype = KVPRIM_BF16;
    kvprim_store_desc d = {};
    d.k_cache = table_of(cache, 4), d.k = table_of(const_cast<uint16_t(*)[16]>(rows), 2), d.k_bytes = 32;
    d.slot = slot, d.slot_type = KVPRIM_I32, d.count = 2;
    d.k_cache.stride = 32, d.k_cache.format = &small, d.k.format = &bf16;
    for (const kvprim_dtype type : {KVPRIM_F4E2M1, KVPRIM_INT4})
        for (const kvprim_scale_kind scale : {kvprim_scale_kind(0), KVPRIM_SCALE_TILE}) {
            small.dtype = type, small.scale = scale, small.scale_offset = scale ? 8 : 0;
            CHECK_ERROR(kvprim_cuda_store(&d, nullptr), KVPRIM_ERROR_UNSUPPORTED,
                        "kvprim_cuda_store: compiled with KVPRIM_NO_FOUR_BIT");
            CHECK(cache[3][0] == 0 && kvprim_emulate_launches == 0);
        }
    small.dtype = KVPRIM_F8E4M3, small.scale = kvprim_scale_kind(0), small.scale_offset = 0;
    CHECK(kvprim_cuda_store(&d, nullptr) == KVPRIM_OK && cache[3][0] == 0x38 && cache[1][0] == 0x40);
}

int main()
{
    run("without elements of 4 bits", test_no_four_bit);
    return finish();
}

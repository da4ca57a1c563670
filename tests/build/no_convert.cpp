// SPDX-License-Identifier: MIT
// Implements the headers without the kernels of conversions, on the CPU: a call that needs them says so, and changes
// nothing; others run.
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_NO_CONVERT
#include "../gpu/cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "../harness.h"

static kvprim_format format_of(kvprim_dtype type)
{
    kvprim_format f = {};
    f.dtype = type;
    return f;
}

static void test_no_convert()
{
    alignas(16) static uint16_t cache[4][8];
    alignas(16) static const uint16_t rows[2][8] = {{0x3f80, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}};
    static const int32_t slot[] = {3, 1};
    const kvprim_format bf16 = format_of(KVPRIM_BF16), f16 = format_of(KVPRIM_F16), none = {};
    kvprim_store_desc d = {};
    d.k_cache = table_of(cache, 4), d.k = table_of(const_cast<uint16_t(*)[8]>(rows), 2), d.k_bytes = 16;
    d.slot = slot, d.slot_type = KVPRIM_I32, d.count = 2;
    d.k_cache.format = &f16, d.k.format = &bf16;
    CHECK_ERROR(kvprim_cuda_store(&d, nullptr), KVPRIM_ERROR_UNSUPPORTED, "kvprim_cuda_store: ");
    CHECK(strstr(kvprim_last_error(), "KVPRIM_NO_CONVERT") && cache[3][0] == 0 && kvprim_emulate_launches == 0);
    d.k_cache.format = &bf16; /* the same type on both sides: bytes move */
    CHECK(kvprim_cuda_store(&d, nullptr) == KVPRIM_OK && memcmp(cache[3], rows[0], 16) == 0);
    d.k.format = &none;
    CHECK(kvprim_cuda_store(&d, nullptr) != KVPRIM_OK);
}

int main()
{
    run("without conversions", test_no_convert);
    return finish();
}

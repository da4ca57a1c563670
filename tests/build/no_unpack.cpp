// SPDX-License-Identifier: MIT
// Implements the headers without the kernels of unpack, copy and unpack_meta, on the CPU: these calls check what they
// are given, say what is missing, and change nothing; others run.
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_NO_UNPACK
#include "../gpu/cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "../harness.h"

alignas(16) static char from[64], to[64];

static void test_no_unpack()
{
    static const kvprim_fragment fragment = {0, 16, 32};
    const kvprim_copy_item item = {from, to, 32};
    alignas(16) static const kvprim_unpack_meta_item meta = {};
    static const uint64_t count = 1;
    kvprim_unpack_desc unpack = {};
    unpack.dst = to, unpack.src = from, unpack.dst_bytes = unpack.src_bytes = 64;
    unpack.fragments = &fragment, unpack.count = 1;
    kvprim_copy_desc copy = {};
    copy.items = &item, copy.count = 1;
    kvprim_unpack_meta_desc by_meta = {};
    by_meta.dst = to, by_meta.src = from, by_meta.dst_bytes = by_meta.src_bytes = 64;
    by_meta.meta = &meta, by_meta.count = &count, by_meta.max_count = 1;
    memset(from, 1, sizeof from);
    CHECK_ERROR(kvprim_cuda_unpack(&unpack, nullptr), KVPRIM_ERROR_UNSUPPORTED,
                "kvprim_cuda_unpack: compiled with KVPRIM_NO_UNPACK");
    CHECK_ERROR(kvprim_cuda_copy(&copy, nullptr), KVPRIM_ERROR_UNSUPPORTED,
                "kvprim_cuda_copy: compiled with KVPRIM_NO_UNPACK");
    CHECK_ERROR(kvprim_cuda_unpack_meta(&by_meta, nullptr), KVPRIM_ERROR_UNSUPPORTED,
                "kvprim_cuda_unpack_meta: compiled with KVPRIM_NO_UNPACK");
    CHECK(to[0] == 0 && to[16] == 0 && kvprim_emulate_launches == 0);
    unpack.src_bytes = 31; /* still checked */
    CHECK_ERROR(kvprim_cuda_unpack(&unpack, nullptr), KVPRIM_ERROR_BOUNDS, "kvprim_cuda_unpack: ");
    CHECK_ERROR(kvprim_cuda_copy(nullptr, nullptr), KVPRIM_ERROR_NULL, "kvprim_cuda_copy: ");
    unpack.count = copy.count = 0;
    kvprim_cuda_launch launch = {}; /* not looked at */
    launch.max_sms = -1;
    CHECK(kvprim_cuda_unpack(&unpack, &launch) == KVPRIM_OK && kvprim_cuda_copy(&copy, &launch) == KVPRIM_OK);
}

static void test_transfer()
{
    kvprim_transfer_desc d = {};
    d.src = table_of(from, 2), d.dst = table_of(to, 2), d.row_bytes = 32, d.count = 2;
    CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK && memcmp(from, to, 64) == 0);
}

int main()
{
    run("without unpack", test_no_unpack);
    run("a transfer without unpack", test_transfer);
    return finish();
}

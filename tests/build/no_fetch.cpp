// SPDX-License-Identifier: MIT
// Implements the headers without fetch, on the CPU: it is not declared, and other calls run.
#define KVPRIM_CUDA_EMULATE
#define KVPRIM_NO_FETCH
#include "../gpu/cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "../harness.h"

static int kvprim_fetch, kvprim_cuda_fetch, kvprim_fetch_desc; // these names are free

static void test_no_fetch()
{
    CHECK(kvprim_fetch + kvprim_cuda_fetch + kvprim_fetch_desc == 0);
    CHECK(kvprim_sizeof("kvprim_fetch_desc") == 0 && kvprim_sizeof("kvprim_fetch_set") == 0);
}

static void test_transfer()
{
    alignas(16) char from[64], to[64];
    kvprim_transfer_desc d = {};
    fill(from, sizeof from);
    d.src = table_of(from, 2), d.dst = table_of(to, 2), d.row_bytes = 32, d.count = 2;
    CHECK(kvprim_cuda_transfer(&d, nullptr) == KVPRIM_OK && memcmp(from, to, 64) == 0);
}

int main()
{
    run("without fetch", test_no_fetch);
    run("a transfer without fetch", test_transfer);
    return finish();
}

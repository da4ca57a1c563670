/* SPDX-License-Identifier: MIT */
/* A caller of kvprim.h, valid C and C++, with descriptors as README.md shows them: all zeros, then the fields that
   matter. It returns how many of its results are wrong. CALLER names the function, so that each of several units of one
   program can have its own. */
#include "../../kvprim.h"
#include "../../kvprim_cuda.cuh"
#include "../../kvprim_nccl.h"
#include "../../kvprim.h"
#include <string.h>

#ifndef CALLER
#define CALLER caller
#endif

/* clang-format off */
#ifdef __cplusplus
#define ZEROS {}
extern "C" {
#else
#define ZEROS {0}
#endif
/* clang-format on */

int CALLER(void);

/* The GPU headers' descriptors are plain structs, whatever compiles them. */
static kvprim_cuda_launch launch = ZEROS;
static kvprim_comm_desc comm = ZEROS;

static kvprim_table table_of(void *data, int64_t rows)
{
    kvprim_table table = ZEROS;
    table.data = data;
    table.rows = rows;
    return table;
}

static int wrong_prefix(void)
{
    const int32_t a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 2, 3, 4, 9};
    const int64_t c[] = {1, 2, 3}, d[] = {1, 2, 4};
    const int32_t *const keys[] = {b, a};
    const size_t lens[] = {5, 6};
    return (kvprim_prefix_i32(a, 6, b, 5) != 4) + (kvprim_prefix_i64(c, 3, d, 3) != 2) +
           (kvprim_prefix_pages(7, 4) != 4) + (kvprim_prefix_many_i32(a, 6, keys, lens, 2, NULL) != 1) +
           (kvprim_prefix_i32_scalar(a, 6, b, 5) != 4) + (strlen(kvprim_isa()) == 0);
}

static int wrong_moves(void)
{
    char cache[] = "aabbccdd", v_cache[] = "....", rows[] = "....", v[] = "xy", copy[] = "........";
    const int32_t index[] = {2, -1};
    const int64_t slot[] = {0, 4}, second[] = {1};
    uint32_t rejected = 0;
    int wrong = 0;

    kvprim_gather_desc gather = ZEROS;
    gather.dst = table_of(rows, 2);
    gather.src = table_of(cache, 4);
    gather.row_bytes = 2;
    gather.index = index;
    gather.index_type = KVPRIM_I32;
    gather.count = 2;
    wrong += kvprim_gather(&gather) != KVPRIM_OK || memcmp(rows, "cc\0\0", 4) != 0;

    kvprim_store_desc store = ZEROS;
    store.k_cache = table_of(cache, 4);
    store.v_cache = table_of(v_cache, 4);
    store.k = table_of(rows, 2);
    store.v = table_of(v, 2);
    store.k_bytes = 2;
    store.v_bytes = 1;
    store.slot = slot;
    store.slot_type = KVPRIM_I64;
    store.count = 2;
    store.rejected = &rejected;
    wrong += kvprim_store(&store) != KVPRIM_OK || strcmp(cache, "ccbbccdd") != 0 || strcmp(v_cache, "x...") != 0 ||
             rejected != 1;

    kvprim_transfer_desc transfer = ZEROS;
    transfer.dst = table_of(copy, 2);
    transfer.src = table_of(cache, 2);
    transfer.layers = 2;
    transfer.row_bytes = 2;
    transfer.src_index = second;
    transfer.index_type = KVPRIM_I64;
    transfer.count = 1;
    wrong += kvprim_transfer(&transfer) != KVPRIM_OK || strcmp(copy, "bb..dd..") != 0;

    const kvprim_fragment fragment = {2, 6, 2};
    kvprim_unpack_desc unpack = ZEROS;
    unpack.src = cache;
    unpack.src_bytes = unpack.dst_bytes = 8;
    unpack.dst = copy;
    unpack.fragments = &fragment;
    unpack.count = 1;
    wrong += kvprim_unpack(&unpack) != KVPRIM_OK || strcmp(copy, "bb..ddbb") != 0;

    unpack.src_bytes = 3;
    wrong += kvprim_unpack(&unpack) != KVPRIM_ERROR_BOUNDS || strlen(kvprim_last_error()) == 0;

    kvprim_copy_item items[2] = ZEROS;
    kvprim_copy_desc list = ZEROS;
    items[0].src = cache;
    items[0].dst = copy + 3;
    items[0].bytes = 2;
    items[1].dst = copy + 7; /* zeros */
    items[1].bytes = 1;
    list.items = items;
    list.count = 2;
    wrong += kvprim_copy(&list) != KVPRIM_OK || memcmp(copy, "bb.ccdb", 8) != 0;
    return wrong;
}

int CALLER(void)
{
    return wrong_prefix() + wrong_moves() + (launch.stream != NULL) + (comm.rank != 0) +
           (strcmp(kvprim_status_name(KVPRIM_ERROR_SIZE), "KVPRIM_ERROR_SIZE") != 0);
}

#ifdef __cplusplus
}
#endif

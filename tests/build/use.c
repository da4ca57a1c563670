/* SPDX-License-Identifier: MIT */
/* A caller of kvprim.h that is valid C and C++. It returns how many of its results are wrong. CALLER names the
   function, so that each of several units of one program can have its own. */
#include "../../kvprim.h"
#include "../../kvprim_cuda.cuh"
#include "../../kvprim_nccl.h"
#include "../../kvprim.h"
#include <string.h>

#ifndef CALLER
#define CALLER caller
#endif

#ifdef __cplusplus
extern "C" {
#endif

int CALLER(void);

/* The GPU headers' descriptors are plain structs, whatever compiles them. */
static kvprim_cuda_launch launch;
static kvprim_comm_desc comm;

static kvprim_table table_of(void *data, int64_t rows)
{
    kvprim_table table;
    memset(&table, 0, sizeof table);
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
    char cache[] = "aabbccdd", rows[] = "....", copy[] = "........";
    const int32_t index[] = {2, -1}, slot[] = {0, 4};
    uint32_t rejected = 0;
    int wrong = 0;

    kvprim_gather_desc gather;
    memset(&gather, 0, sizeof gather);
    gather.dst = table_of(rows, 2);
    gather.src = table_of(cache, 4);
    gather.row_bytes = 2;
    gather.index = index;
    gather.index_type = KVPRIM_I32;
    gather.count = 2;
    wrong += kvprim_gather(&gather) != KVPRIM_OK || memcmp(rows, "cc\0\0", 4) != 0;

    kvprim_store_desc store;
    memset(&store, 0, sizeof store);
    store.k_cache = table_of(cache, 4);
    store.k = table_of(rows, 2);
    store.k_bytes = 2;
    store.slot = slot;
    store.slot_type = KVPRIM_I32;
    store.count = 2;
    store.rejected = &rejected;
    wrong += kvprim_store(&store) != KVPRIM_OK || memcmp(cache, "ccbbccdd", 8) != 0 || rejected != 1;

    kvprim_transfer_desc transfer;
    memset(&transfer, 0, sizeof transfer);
    transfer.dst = table_of(copy, 4);
    transfer.src = table_of(cache, 4);
    transfer.row_bytes = 2;
    transfer.src_index = index;
    transfer.index_type = KVPRIM_I32;
    transfer.count = 1;
    wrong += kvprim_transfer(&transfer) != KVPRIM_OK || memcmp(copy, "cc......", 8) != 0;

    const kvprim_fragment fragment = {2, 6, 2};
    kvprim_unpack_desc unpack;
    memset(&unpack, 0, sizeof unpack);
    unpack.src = cache;
    unpack.src_bytes = unpack.dst_bytes = 8;
    unpack.dst = copy;
    unpack.fragments = &fragment;
    unpack.count = 1;
    wrong += kvprim_unpack(&unpack) != KVPRIM_OK || memcmp(copy, "cc....bb", 8) != 0;

    unpack.src_bytes = 3;
    wrong += kvprim_unpack(&unpack) != KVPRIM_ERROR_BOUNDS || strlen(kvprim_last_error()) == 0;

    kvprim_copy_item items[2];
    kvprim_copy_desc list;
    memset(items, 0, sizeof items);
    memset(&list, 0, sizeof list);
    items[0].src = cache;
    items[0].dst = copy + 3;
    items[0].bytes = 2;
    items[1].dst = copy + 7; /* zeros */
    items[1].bytes = 1;
    list.items = items;
    list.count = 2;
    wrong += kvprim_copy(&list) != KVPRIM_OK || memcmp(copy, "cc.cc.b", 8) != 0;
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

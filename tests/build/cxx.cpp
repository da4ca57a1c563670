/* SPDX-License-Identifier: MIT */
/* Descriptors as README.md shows them for C++: `= {}`, then the fields that matter. This must compile without a warning
   from C++11 to C++20. Exits with 1 if a result is wrong. */
#include "../../kvprim.h"
#include "../../kvprim_cuda.cuh"
#include "../../kvprim_nccl.h"
#include <cstring>

static bool store_and_gather()
{
    char k_cache[] = "........", v_cache[] = "....", k[] = "aabb", v[] = "xy", rows[] = "....";
    const int64_t slot[] = {3, 0};
    uint32_t rejected = 0;

    kvprim_store_desc store = {};
    store.k_cache.data = k_cache;
    store.v_cache.data = v_cache;
    store.k_cache.rows = store.v_cache.rows = 4;
    store.k.data = k;
    store.v.data = v;
    store.k.rows = store.v.rows = store.count = 2;
    store.k_bytes = 2;
    store.v_bytes = 1;
    store.slot = slot;
    store.slot_type = KVPRIM_I64;
    store.rejected = &rejected;
    if (kvprim_store(&store) != KVPRIM_OK)
        return false;

    kvprim_gather_desc gather = {};
    gather.dst.data = rows;
    gather.dst.rows = gather.count = 2;
    gather.src = store.k_cache;
    gather.row_bytes = 2;
    gather.index = slot;
    gather.index_type = KVPRIM_I64;
    return kvprim_gather(&gather) == KVPRIM_OK && !rejected && std::strcmp(k_cache, "bb....aa") == 0 &&
           std::strcmp(v_cache, "y..x") == 0 && std::strcmp(rows, "aabb") == 0;
}

static bool transfer_and_unpack()
{
    char from[] = "0123456789", to[] = "..........";

    kvprim_transfer_desc transfer = {};
    transfer.dst.data = to;
    transfer.src.data = from;
    transfer.dst.rows = transfer.src.rows = transfer.count = 2;
    transfer.layers = 2;
    transfer.row_bytes = 2;
    if (kvprim_transfer(&transfer) != KVPRIM_OK)
        return false;

    const kvprim_fragment fragment = {8, 9, 1};
    kvprim_unpack_desc unpack = {};
    unpack.src = from;
    unpack.dst = to;
    unpack.src_bytes = unpack.dst_bytes = 10;
    unpack.fragments = &fragment;
    unpack.count = 1;
    return kvprim_unpack(&unpack) == KVPRIM_OK && std::strcmp(to, "01234567.8") == 0;
}

int main()
{
    kvprim_cuda_launch launch = {};
    kvprim_comm_desc comm = {};
    launch.max_sms = 8;
    comm.world = 1;
    return !(store_and_gather() && transfer_and_unpack() && launch.max_sms == 8 && comm.world == 1);
}

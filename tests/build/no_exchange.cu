// SPDX-License-Identifier: MIT
// Implements kvprim_nccl.h without the kernels of gathers and all-to-alls: NCCL serves these at any size, and own
// kernels the reductions. Needs no GPU.
#define KVPRIM_NO_EXCHANGE
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#include "../harness.h"

/* A communicator as init leaves it, with own kernels. */
static kvprim_comm comm_of(int world, size_t gather_limit)
{
    static char slots[16];
    kvprim_comm comm = {};
    comm.world = world, comm.blocks = 64, comm.all_gather_limit = gather_limit;
    kvpn_set_block_slots(&comm, kvpn_max_peer_bytes);
    for (int r = 0; r < world; r++)
        comm.peer[r] = slots;
    return comm;
}

static kvpn_way way_of(kvprim_comm *comm, kvpn_kind kind, size_t count)
{
    size_t counts[kvpn_max_world * kvpn_max_world] = {count};
    kvpn_call c = kvpn_make_call(kind, "test", comm, nullptr);
    c.count = count, c.dtype = KVPRIM_BF16, c.element = 2;
    c.counts = kind == kvpn_all_gatherv || kind == kvpn_all_to_allv ? counts : nullptr;
    return kvpn_way_of(&c);
}

static void test_no_exchange()
{
    for (int world = 2; world <= kvpn_max_world; world++)
        for (const size_t limit : {size_t(0), size_t(1) << 30}) {
            kvprim_comm comm = comm_of(world, limit);
            for (const size_t count : {size_t(1), size_t(512), size_t(1) << 20}) {
                for (int kind = kvpn_all_gather; kind <= kvpn_all_to_allv; kind++)
                    CHECK(way_of(&comm, kvpn_kind(kind), count) == kvpn_by_nccl);
                CHECK(way_of(&comm, kvpn_all_reduce, count) != kvpn_by_nccl);
                CHECK(way_of(&comm, kvpn_reduce_scatter, count) != kvpn_by_nccl);
            }
            CHECK(kvpn_limits_of(&comm).gather == 0 && kvpn_limits_of(&comm).parts_even == 0);
        }
}

int main()
{
    run("nccl: without kernels that exchange", test_no_exchange);
    return finish();
}

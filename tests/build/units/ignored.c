/* SPDX-License-Identifier: MIT */
/* Every line that begins with kvprim_ ignores a status, and must warn. */
#include "../../../kvprim.h"
#include "../../../kvprim_cuda.cuh"
#include "../../../kvprim_nccl.h"

void ignored(kvprim_move *m);
void ignored(kvprim_move *m)
{
    kvprim_gather(NULL);
    kvprim_store(NULL);
    kvprim_slots(NULL);
    kvprim_transfer(NULL);
    kvprim_unpack(NULL);
    kvprim_unpack_meta(NULL);
    kvprim_copy(NULL);
    kvprim_keys(NULL, 0);
    kvprim_key_table_init(NULL, NULL, 0, 8);
    kvprim_key_table_put(NULL, NULL, 0);
    kvprim_gather_check(NULL, NULL);
    kvprim_store_check(NULL, NULL);
    kvprim_slots_check(NULL, NULL);
    kvprim_transfer_check(NULL, NULL);
    kvprim_unpack_check(NULL);
    kvprim_unpack_meta_check(NULL);
    kvprim_copy_check(NULL);
    kvprim_gather_moves(NULL, m);
    kvprim_store_moves(NULL, m);
    kvprim_transfer_moves(NULL, m);
    kvprim_cpu_move(m, 1);
    kvprim_cuda_gather(NULL, NULL);
    kvprim_cuda_store(NULL, NULL);
    kvprim_cuda_slots(NULL, NULL);
    kvprim_cuda_transfer(NULL, NULL);
    kvprim_cuda_unpack(NULL, NULL);
    kvprim_cuda_unpack_meta(NULL, NULL);
    kvprim_cuda_copy(NULL, NULL);
    kvprim_cuda_move(m, 1, NULL);
    kvprim_comm_init(NULL, NULL);
    kvprim_comm_check(NULL);
    kvprim_send(NULL, NULL, 1, KVPRIM_F32, 0, NULL);
}

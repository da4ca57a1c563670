/* SPDX-License-Identifier: MIT */
/* With KVPRIM_NVTX every call is one range of its name, even if it fails. This program is the profiler too: it sets the
   variable that NVTX looks at before it looks for a library. It is valid C11 and C++17. Compiled by nvcc, and with
   TEST_NCCL, it also makes the other headers' calls, which are refused without a GPU.

       cc -std=c11 -I. -I$CUDA_HOME/include tests/build/test_nvtx.c -ldl -o test && ./test */
#define KVPRIM_NVTX
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#ifdef __CUDACC__
#include "../../kvprim_cuda.cuh"
#endif
#ifdef TEST_NCCL
#include "../../kvprim_nccl.h"
#endif
#include "../harness.h"

static char pushed[64];
static int pushes, depth, deepest;

static int NVTX_API push(const char *name)
{
    (void)snprintf(pushed, sizeof pushed, "%s", name);
    pushes++;
    if (++depth > deepest)
        deepest = depth;
    return depth - 1;
}

static int NVTX_API pop(void)
{
    return --depth;
}

/* NVTX calls this once, at the first range. The table's entries are pointers to NVTX's function pointers. */
static int NVTX_API inject(NvtxGetExportTableFunc_t get_table)
{
    NvtxFunctionTable entries = NULL;
    unsigned count = 0;
    const NvtxExportTableCallbacks *const callbacks = (const NvtxExportTableCallbacks *)get_table(NVTX_ETID_CALLBACKS);
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &entries, &count) ||
        count <= NVTX_CBID_CORE_RangePop)
        return 0;
    *entries[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *entries[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}

/* Checks that the last call was one range, of this name, and that it has ended. */
static void one_range(const char *name)
{
    if (pushes != 1 || depth != 0 || deepest != 1 || strcmp(pushed, name) != 0)
        fail("%d ranges, the last one \"%s\", %d still open", pushes, pushed, depth);
    finish_test(name);
    pushes = depth = deepest = 0;
    pushed[0] = 0;
}

/* Keeps the result: to ignore a status warns, even with a cast to void. */
static size_t answer;
#define CALL(name, ...) (answer = (size_t)name(__VA_ARGS__), one_range(#name))

static void host_calls(void)
{
    const int32_t a[4] = {1, 2, 3, 4}, *const keys[1] = {a};
    const int64_t b[4] = {1, 2, 3, 4};
    const size_t lens[1] = {4};
    const int32_t index[2] = {1, 0};
    int32_t out[2] = {0, 0};
    kvprim_gather_desc gather;
    memset(&gather, 0, sizeof gather);
    gather.dst.data = out, gather.dst.rows = 2, gather.src.data = (void *)(uintptr_t)a, gather.src.rows = 4;
    gather.row_bytes = 4, gather.index = index, gather.index_type = KVPRIM_I32, gather.count = 2;
    CALL(kvprim_prefix_i32, a, 4, a, 4);
    CALL(kvprim_prefix_i64, b, 4, b, 4);
    CALL(kvprim_prefix_many_i32, a, 4, keys, lens, 1, NULL);
    CALL(kvprim_gather, &gather);
    CHECK(out[0] == 2 && out[1] == 1);
    CALL(kvprim_gather, NULL);
    CALL(kvprim_store, NULL);
    CALL(kvprim_slots, NULL);
    CALL(kvprim_transfer, NULL);
    CALL(kvprim_unpack, NULL);
    CALL(kvprim_unpack_meta, NULL);
    CALL(kvprim_copy, NULL);
    CALL(kvprim_keys, NULL, 1);
    CALL(kvprim_cpu_move, NULL, 1);
}

#ifdef __CUDACC__
static void gpu_calls(void)
{
    CALL(kvprim_cuda_gather, NULL, NULL);
    CALL(kvprim_cuda_store, NULL, NULL);
    CALL(kvprim_cuda_slots, NULL, NULL);
    CALL(kvprim_cuda_transfer, NULL, NULL);
    CALL(kvprim_cuda_unpack, NULL, NULL);
    CALL(kvprim_cuda_unpack_meta, NULL, NULL);
    CALL(kvprim_cuda_copy, NULL, NULL);
    CALL(kvprim_cuda_move, NULL, 1, NULL);
}
#endif

#ifdef TEST_NCCL
static void collectives(void)
{
    CALL(kvprim_comm_init, NULL, NULL);
    CALL(kvprim_comm_destroy, NULL);
    CALL(kvprim_comm_abort, NULL);
    CALL(kvprim_all_reduce, NULL, NULL, NULL, 1, KVPRIM_F32, KVPRIM_SUM, NULL);
    CALL(kvprim_all_gather, NULL, NULL, NULL, 1, KVPRIM_F32, NULL);
    CALL(kvprim_all_gatherv, NULL, NULL, NULL, NULL, KVPRIM_F32, NULL);
    CALL(kvprim_all_to_all, NULL, NULL, NULL, 1, KVPRIM_F32, NULL);
    CALL(kvprim_all_to_allv, NULL, NULL, NULL, NULL, KVPRIM_F32, NULL);
    CALL(kvprim_reduce_scatter, NULL, NULL, NULL, 1, KVPRIM_F32, KVPRIM_SUM, NULL);
    CALL(kvprim_broadcast, NULL, NULL, 1, KVPRIM_F32, 0, NULL);
    CALL(kvprim_send, NULL, NULL, 1, KVPRIM_F32, 0, NULL);
    CALL(kvprim_recv, NULL, NULL, 1, KVPRIM_F32, 0, NULL);
    CALL(kvprim_group_end, NULL);
    CALL(kvprim_all_reduce_norm, NULL, NULL, NULL);
    CALL(kvprim_all_reduce_norm_host, NULL, NULL, 0);
}
#endif

int main(void)
{
    InitializeInjectionNvtx2_fnptr = inject;
    host_calls();
#ifdef __CUDACC__
    gpu_calls();
#endif
#ifdef TEST_NCCL
    collectives();
#endif
    return finish();
}

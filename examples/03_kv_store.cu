/* SPDX-License-Identifier: MIT */
/* A paged KV cache on the GPU: stores the keys and values of four tokens, one of which is padding, into slots, gathers
   them back, and checks the result.

       nvcc -arch=native -I. examples/03_kv_store.cu -o 03_kv_store && ./03_kv_store
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { tokens = 4, pages = 8, page_rows = 16, row_bytes = 1024 }; /* a row: 8 heads of 64 fp16 */

static void cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void kvprim(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s: %s\n", kvprim_status_name(status), kvprim_last_error());
    exit(1);
}

/* Allocates device memory, and fills it from `from`, or, if that is NULL, with a byte that no row below has. */
static void *on_device(const void *from, size_t bytes)
{
    void *p;
    cuda(cudaMalloc(&p, bytes), "cudaMalloc");
    cuda(from ? cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) : cudaMemset(p, 0xfe, bytes),
         "filling device memory");
    return p;
}

int main(void)
{
    static unsigned char kv[2][tokens][row_bytes], back[2][tokens][row_bytes], zeros[row_bytes];
    const int32_t slots[tokens] = {37, 5, -1, 100}; /* -1: the third token is padding */
    int devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    if (found != cudaSuccess) {
        printf("this program needs a CUDA device: %s\n", cudaGetErrorString(found));
        return 1;
    }
    for (size_t i = 0; i < sizeof kv; i++)
        ((unsigned char *)kv)[i] = (unsigned char)(1 + i * 2654435761u % 250);
    unsigned char *const in = (unsigned char *)on_device(kv, sizeof kv);
    unsigned char *const out = (unsigned char *)on_device(NULL, sizeof back);
    const int32_t *const slots_on_device = (const int32_t *)on_device(slots, sizeof slots);

    /* One allocation: [page][K or V][row in page]. */
    kvprim_store_desc store = {};
    const int64_t half_page = page_rows * row_bytes;
    store.k_cache.data = on_device(NULL, pages * 2 * half_page);
    store.k_cache.rows = pages * page_rows;
    store.k_cache.page_rows = page_rows;
    store.k_cache.page_stride = 2 * half_page;
    store.v_cache = store.k_cache;
    store.v_cache.data = (char *)store.k_cache.data + half_page;
    store.k.data = in;
    store.v.data = in + sizeof kv[0];
    store.k.rows = store.v.rows = store.count = tokens;
    store.k_bytes = store.v_bytes = row_bytes;
    store.slot = slots_on_device;
    store.slot_type = KVPRIM_I32;
    kvprim(kvprim_cuda_store(&store, NULL));

    for (int v = 0; v < 2; v++) {
        kvprim_gather_desc gather = {};
        gather.src = v ? store.v_cache : store.k_cache;
        gather.dst.data = out + v * sizeof back[0];
        gather.dst.rows = gather.count = tokens;
        gather.row_bytes = row_bytes;
        gather.index = slots_on_device;
        gather.index_type = KVPRIM_I32;
        kvprim(kvprim_cuda_gather(&gather, NULL));
    }
    cuda(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost), "reading back");

    int wrong = 0;
    for (int v = 0; v < 2; v++)
        for (int i = 0; i < tokens; i++)
            wrong += memcmp(back[v][i], slots[i] < 0 ? zeros : kv[v][i], row_bytes) != 0;
    printf("%d tokens stored in %d pages and gathered back: %d of %d rows wrong\n", tokens, pages, wrong, 2 * tokens);
    return wrong != 0;
}

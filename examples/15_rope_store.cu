/* SPDX-License-Identifier: MIT */
/* A kernel of one's own that stores into a paged KV cache in bounds: it rotates K by its position (rotary embedding, the
   halves of a head are the pairs) and stores K and V in one launch. The host checks every byte of the caches, in which
   padding and slots past the end must not have written anything, and the time is compared with two launches: rotate in
   place, then kvprim_cuda_store.

       nvcc -arch=native -std=c++17 -I. examples/15_rope_store.cu -o 15_rope_store && ./15_rope_store
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"
#include <cuda_fp16.h>
#include <math.h>
#include <functional>
#include <vector>

enum {
    tokens = 4096,
    positions = 8192,
    heads = 8,
    dim = 128, /* fp16 elements of a head */
    half_dim = dim / 2,
    row_elements = heads * dim,
    pages = 512,
    page_rows = 16,
    slots = pages * page_rows,
    cache_elements = slots * row_elements, /* [page][head][row in page][dim] */
    token_threads = heads * half_dim / 8,  /* each has 8 elements of the first half of a head, and 8 of the second */
    block_tokens = 4
};

/* ---- the kernels ---- */

struct alignas(16) eight {
    __half x[8];
};

struct rope_params {
    kvprim_side k_cache, v_cache; /* of a checked store */
    __half *k;                    /* [token][head][dim], as v */
    const __half *v;
    const float *cos_sin; /* [position][cosines, sines][half_dim] */
    const int32_t *position;
    uint32_t *rejected;
};

/* Products and sums are rounded as the host's, so the results are the same bit by bit. */
static __device__ void rotate(eight *low, eight *high, const float *cosines)
{
    for (int e = 0; e < 8; e++) {
        const float x = __half2float(low->x[e]), y = __half2float(high->x[e]);
        const float c = cosines[e], s = cosines[half_dim + e];
        low->x[e] = __float2half_rn(__fmaf_rn(-y, s, __fmul_rn(x, c)));
        high->x[e] = __float2half_rn(__fmaf_rn(x, s, __fmul_rn(y, c)));
    }
}

/* Both kernels: thread t of a token has head t / 8. `in_place`: writes K where it was, and nothing else. */
template <bool in_place>
static __global__ void __launch_bounds__(block_tokens *token_threads) rope_store(const __grid_constant__ rope_params p)
{
    const int64_t i =
        blockIdx.x * block_tokens + threadIdx.x / token_threads; /* a multiple of block_tokens is launched */
    const int t = threadIdx.x % token_threads, in_head = t % 8 * 8, low_at = t / 8 * dim + in_head;
    const int high_at = low_at + half_dim;
    const int64_t row = kvprim_device_row(p.k_cache, i, t == 0 && !in_place ? p.rejected : NULL);
    const int32_t position = p.position[i];
    if (row < 0 || position < 0 || position >= positions)
        return;
    __half *const k = p.k + i * row_elements;
    const __half *const v = p.v + i * row_elements;
    eight low = *(const eight *)(k + low_at), high = *(const eight *)(k + high_at);
    rotate(&low, &high, p.cos_sin + (int64_t)position * dim + in_head);
    if (in_place) {
        *(eight *)(k + low_at) = low, *(eight *)(k + high_at) = high;
        return;
    }
    *(eight *)kvprim_device_byte(p.k_cache, 0, row, 2 * low_at) = low;
    *(eight *)kvprim_device_byte(p.k_cache, 0, row, 2 * high_at) = high;
    *(eight *)kvprim_device_byte(p.v_cache, 0, row, 2 * low_at) = *(const eight *)(v + low_at);
    *(eight *)kvprim_device_byte(p.v_cache, 0, row, 2 * high_at) = *(const eight *)(v + high_at);
}

/* ---- the same on the host, by subscripts ---- */

static __half *in_cache(std::vector<__half> *cache, int slot, int head, int element)
{
    return cache->data() + ((slot / page_rows * heads + head) * page_rows + slot % page_rows) * dim + element;
}

static void store_on_host(std::vector<__half> *k_cache, std::vector<__half> *v_cache, const std::vector<__half> &k,
                          const std::vector<__half> &v, const std::vector<float> &cos_sin,
                          const std::vector<int32_t> &position, const std::vector<int32_t> &slot)
{
    for (int i = 0; i < tokens; i++)
        for (int h = 0; h < heads && slot[i] >= 0 && slot[i] < slots; h++)
            for (int e = 0; e < half_dim; e++) {
                const int at = (i * heads + h) * dim + e;
                const float x = __half2float(k[at]), y = __half2float(k[at + half_dim]);
                const float c = cos_sin[position[i] * dim + e], s = cos_sin[position[i] * dim + half_dim + e];
                *in_cache(k_cache, slot[i], h, e) = __float2half_rn(fmaf(-y, s, x * c));
                *in_cache(k_cache, slot[i], h, e + half_dim) = __float2half_rn(fmaf(x, s, y * c));
                *in_cache(v_cache, slot[i], h, e) = v[at];
                *in_cache(v_cache, slot[i], h, e + half_dim) = v[at + half_dim];
            }
}

/* ---- memory and calls ---- */

static cudaStream_t stream;

template <class T> static T *on_device(const std::vector<T> &from)
{
    return on_device(from.size(), from.data());
}

static bool is_on_device(const __half *device, const std::vector<__half> &want)
{
    std::vector<__half> got(want.size());
    CU(cudaMemcpy(got.data(), device, got.size() * sizeof(__half), cudaMemcpyDeviceToHost));
    return memcmp(got.data(), want.data(), got.size() * sizeof(__half)) == 0;
}

static kvprim_table pages_of(__half *cache)
{
    kvprim_table t = {};
    t.data = cache;
    t.rows = slots;
    t.page_rows = page_rows;
    t.heads = heads;
    t.head_stride = page_rows * dim * sizeof(__half);
    return t;
}

static kvprim_table rows_of(__half *rows)
{
    kvprim_table t = {};
    t.data = rows;
    t.rows = tokens;
    return t;
}

/* Returns the microseconds of what `enqueue` enqueues. */
static double time_us(const std::function<void()> &enqueue)
{
    const int times = 50;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    const cudaEvent_t begin = new_event(), end = new_event();
    CU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int n = 0; n < times; n++)
        enqueue();
    CU(cudaStreamEndCapture(stream, &graph));
    CU(cudaGraphInstantiate(&run, graph, 0));
    for (int n = 0; n < 2; n++) { /* the first one warms up */
        CU(cudaEventRecord(begin, stream));
        CU(cudaGraphLaunch(run, stream));
        CU(cudaEventRecord(end, stream));
        CU(cudaEventSynchronize(end));
    }
    return 1000.0 * elapsed_ms(begin, end) / times;
}

/* ---- the program ---- */

int main(void)
{
    need_gpu();
    stream = new_stream();

    std::vector<__half> k(tokens * row_elements), v(k.size()),
        caches[2] = {std::vector<__half>(cache_elements), std::vector<__half>(cache_elements)};
    std::vector<float> cos_sin(positions * dim);
    std::vector<int32_t> position(tokens), slot(tokens);
    uint32_t expected_rejected = 0, rejected;
    for (size_t n = 0; n < k.size(); n++) {
        k[n] = __float2half_rn((float)(n * 2654435761u % 4001) / 1000 - 2);
        v[n] = __float2half_rn((float)(n * 2246822519u % 4001) / 1000 - 2);
    }
    for (int n = 0; n < positions * half_dim; n++) {
        const double angle = n / half_dim * pow(10000, -(double)(n % half_dim) / half_dim);
        cos_sin[n / half_dim * dim + n % half_dim] = (float)cos(angle);
        cos_sin[n / half_dim * dim + half_dim + n % half_dim] = (float)sin(angle);
    }
    for (int i = 0; i < tokens; i++) { /* every ninth is padding, a few are past the end */
        position[i] = i * 31 % positions;
        slot[i] = i % 9 == 4 ? -1 : i % 1000 == 500 ? slots + i - 500 : i * 1237 % slots;
        expected_rejected += slot[i] >= slots;
    }

    /* What the kernel needs of a store is checked once, and passed by value. */
    kvprim_move moves[2];
    kvprim_store_desc store = {};
    const rope_params none = {};
    rope_params p = none;
    p.k = on_device(k), p.v = on_device(v), p.cos_sin = on_device(cos_sin), p.position = on_device(position);
    p.rejected = on_device(std::vector<uint32_t>(1));
    __half *const k_cache = on_device(caches[0]), *const v_cache = on_device(caches[1]);
    store.k_cache = pages_of(k_cache), store.v_cache = pages_of(v_cache);
    store.k = rows_of(p.k), store.v = rows_of((__half *)p.v);
    store.k_bytes = store.v_bytes = row_elements * sizeof(__half);
    store.slot = on_device(slot), store.slot_type = KVPRIM_I32, store.count = tokens, store.rejected = p.rejected;
    kvprim(kvprim_store_moves(&store, moves));
    p.k_cache = moves[0].dst, p.v_cache = moves[1].dst;

    const unsigned blocks = tokens / block_tokens, threads = block_tokens * token_threads;
    rope_store<false><<<blocks, threads, 0, stream>>>(p);
    CU(cudaGetLastError());
    CU(cudaStreamSynchronize(stream));
    CU(cudaMemcpy(&rejected, p.rejected, sizeof rejected, cudaMemcpyDeviceToHost));
    store_on_host(&caches[0], &caches[1], k, v, cos_sin, position, slot);
    bool right = is_on_device(k_cache, caches[0]) && is_on_device(v_cache, caches[1]) && rejected == expected_rejected;
    printf("%d tokens, every ninth without a slot, %u slots past the end: %u counted, the caches are %s\n", (int)tokens,
           expected_rejected, rejected, right ? "ok" : "WRONG");

    const kvprim_cuda_launch launch = {stream, 0, 0, 0};
    const double one = time_us([&] { rope_store<false><<<blocks, threads, 0, stream>>>(p); });
    const double two = time_us([&] {
        rope_store<true><<<blocks, threads, 0, stream>>>(p);
        kvprim(kvprim_cuda_move(moves, 2, &launch));
    });
    printf("one launch %.1f us; rotated in place, then stored by kvprim_cuda_move %.1f us\n", one, two);
    return !right;
}

/* SPDX-License-Identifier: MIT */
/* What a store costs in the end: a decode step of 80 layers. In each a kernel reads 16 MB, as a matrix product of few
   tokens reads its weights, and keys and values of 64 tokens of 8 heads x 128 bf16 are stored before the next one.
   Without stores, with kvprim's and with SGLang's; without dependent launch, and with it in all kernels; as bf16 and as
   e4m3 with a scale of the tensor.

       nvcc -arch=native -std=c++17 -O3 tests/bench/bench_step.cu -o build/bench_step && build/bench_step [--quick]

   All write the same bytes, which is checked in the first and the last layer. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include "opponents.h"
#include "opponents_convert.h"

constexpr int layers = 80, tokens = 64, elements = 8 * 128;
constexpr int64_t slots = 1024, row_bytes = 2 * elements, layer_bytes = slots * row_bytes, weight_bytes = 16 * MiB;
static char *cache[2], *input[2], *weights; /* K, V; of all layers */
static float *one;                          /* the scale: e4m3 then rounds once, whoever divides */
static const int32_t *slot32;               /* both last as long as the program */
static const int64_t *slot64;

/* Reads 16 MB. */
template <bool pdl> static __global__ void __launch_bounds__(256) read_weights(const uint4 *from, uint32_t *to)
{
    pdl_wait<pdl>();
    uint4 v[8];
    uint32_t sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        v[k] = from[blockIdx.x * 2048 + k * 256 + threadIdx.x];
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    pdl_trigger<pdl>();
    if (sum == 1)
        *to = sum;
}

enum writer { NONE, KVPRIM, SGLANG };

static kvprim_store_desc store_in(int layer, const kvprim_format *in, const kvprim_format *out)
{
    const int64_t at = layer * layer_bytes, cache_bytes = out ? elements : row_bytes;
    kvprim_store_desc d =
        store_of(table_at(cache[0] + at, slots), table_at(input[0], tokens), row_bytes, slot32, tokens);
    d.v_cache = table_at(cache[1] + at, slots), d.v = table_at(input[1], tokens), d.v_bytes = row_bytes;
    d.k_cache.stride = d.v_cache.stride = cache_bytes;
    d.k.format = d.v.format = in, d.k_cache.format = d.v_cache.format = out;
    return d;
}

static void store_by_kvprim(int layer, bool e4m3, bool pdl)
{
    kvprim_format in = {}, out = {};
    in.dtype = KVPRIM_BF16, out.dtype = KVPRIM_F8E4M3, out.scale = KVPRIM_SCALE_TENSOR, out.scales = one;
    call_kvprim(kvprim_cuda_store, store_in(layer, e4m3 ? &in : nullptr, e4m3 ? &out : nullptr), pdl);
}

static void store_by_sglang(int layer, bool e4m3, bool pdl)
{
    char *const k = cache[0] + layer * layer_bytes, *const v = cache[1] + layer * layer_bytes;
    const store_params s = {k, v, input[0], input[1], slot32, row_bytes, row_bytes, tokens};
    convert_params c = {};
    c.k = reinterpret_cast<const __nv_bfloat16 *>(input[0]), c.v = reinterpret_cast<const __nv_bfloat16 *>(input[1]);
    c.k_cache = reinterpret_cast<uint8_t *>(k), c.v_cache = reinterpret_cast<uint8_t *>(v);
    c.slot = slot64, c.k_scale = c.v_scale = one, c.tokens = tokens;
    c.row_stride = c.k_stride = c.v_stride = elements;
    if (e4m3)
        CUDA(launch_sglang_quant<elements>(c, pdl, stream));
    else
        CUDA((pdl ? launch_sglang_store<int(row_bytes), 2, true>
                  : launch_sglang_store<int(row_bytes), 2, false>)(s, stream));
}

static void enqueue_step(writer by, bool e4m3, bool pdl)
{
    for (int l = 0; l < layers; l++) {
        const uint4 *const from = reinterpret_cast<const uint4 *>(weights + l * weight_bytes);
        CUDA(launch_opponent(pdl ? read_weights<true> : read_weights<false>, dim3(unsigned(weight_bytes / 32768)),
                             dim3(256), pdl, stream, from, reinterpret_cast<uint32_t *>(weights)));
        if (by == KVPRIM)
            store_by_kvprim(l, e4m3, pdl);
        if (by == SGLANG)
            store_by_sglang(l, e4m3, pdl);
    }
}

/* K and V of the first and the last layer after a step. */
static std::vector<char> written(writer by, bool e4m3, bool pdl)
{
    std::vector<char> all(4 * layer_bytes);
    for (char *const c : cache)
        CUDA(cudaMemsetAsync(c, 0, size_t(layers * layer_bytes), stream));
    enqueue_step(by, e4m3, pdl);
    CUDA(cudaStreamSynchronize(stream));
    for (int k = 0; k < 4; k++)
        CUDA(cudaMemcpy(all.data() + k * layer_bytes, cache[k % 2] + (k < 2 ? 0 : layers - 1) * layer_bytes,
                        size_t(layer_bytes), cudaMemcpyDefault));
    return all;
}

static void steps()
{
    std::vector<figure> to_sglang;
    printf("\ndecode step, 80 layers x 64 tokens of 8 x 128 bf16, us: no stores, kvprim, SGLang; kvprim's stores / "
           "SGLang's\n");
    for (const bool e4m3 : {false, true})
        for (const bool pdl : {false, true}) {
            std::vector<contender> c;
            for (const writer by : {NONE, KVPRIM, SGLANG}) {
                static const char *const names[] = {"no stores", "kvprim", "SGLang"};
                c.push_back({names[by], [=](int) { enqueue_step(by, e4m3, pdl); }});
                c.back().launches = 1;
            }
            if (written(KVPRIM, e4m3, pdl) != written(SGLANG, e4m3, pdl)) {
                printf("FAIL kvprim and SGLang do not store the same bytes\n");
                exit(1);
            }
            measure(c);
            const double ratio = (c[1].us - c[0].us) / (c[2].us - c[0].us);
            printf("%5s %-3s", e4m3 ? "e4m3" : "bf16", pdl ? "PDL" : "");
            print_us(c, 9, 1);
            printf("  %9.3f\n", ratio);
            to_sglang.push_back({c[1].us / c[2].us, std::string(e4m3 ? "e4m3" : "bf16") + (pdl ? ", PDL" : "")});
        }
    judge_worst("decode step with kvprim / with SGLang", to_sglang, '<', 1);
}

static void open_all()
{
    open_gpu(2 * layers * layer_bytes + layers * weight_bytes + GiB);
    for (char *&c : cache)
        CUDA(cudaMalloc(&c, size_t(layers * layer_bytes)));
    for (char *&i : input)
        CUDA(cudaMalloc(&i, size_t(tokens * row_bytes)));
    CUDA(cudaMalloc(&one, sizeof *one));
    weights = allocate_hashed(layers * weight_bytes);
    std::vector<uint16_t> numbers(tokens * elements);
    for (size_t i = 0; i < numbers.size(); i++) /* bf16 from 2^-4 to 2^4, of either sign */
        numbers[i] = uint16_t((i * 40503 % 65536) & 0x83ff) + uint16_t(0x3d80);
    for (char *const i : input)
        CUDA(cudaMemcpy(i, numbers.data(), size_t(tokens * row_bytes), cudaMemcpyDefault));
    const float scale = 1;
    CUDA(cudaMemcpy(one, &scale, sizeof scale, cudaMemcpyDefault));
    std::vector<int32_t> slot(tokens);
    for (int i = 0; i < tokens; i++)
        slot[size_t(i)] = i * 389 % int(slots);
    slot32 = upload(slot).release();
    slot64 = upload(std::vector<int64_t>(slot.begin(), slot.end())).release();
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all, {{"steps", steps}});
}

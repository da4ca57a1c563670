/* SPDX-License-Identifier: MIT */
/* What engines put around a sum, on all GPUs of the machine: kvprim_all_reduce_norm beside the ways of engines, and
   kvprim_all_to_all, kvprim_all_to_allv and kvprim_all_gatherv beside groups of NCCL's calls.

       nvcc -arch=native -std=c++17 -O3 tests/bench/bench_decode.cu build/kvprim_nccl.o -o build/bench_decode -lnccl
       NCCL_NVLS_ENABLE=0 build/bench_decode [--quick] [--only SECTION]

   Every result is compared with what it must be. Needs compute capability 9.0, because of the opponents' clusters. */
#include "../../kvprim_nccl.h"
#include "bench_ranks.h"
#include "opponents_norm.h"

using opponents::norm_output;
using opponents::norm_params;
using opponents::one_shot_params;
using opponents::to_bf16;
using opponents::to_e4m3;
using opponents::to_e4m3_by_token;

/* ---- tensors of the norm ----

   The addends are those of bench_ranks.h. All numbers up to the norm are small integers, so that every order of adding
   gives the same. */

constexpr float eps = 1e-5f, tensor_scale = 1.0f / 64; /* the scale: y stays below 7 */
constexpr uint32_t one_shot_tokens = 128;              /* TensorRT-LLM and FlashInfer take it up to so many */

__host__ __device__ inline int residual_at(uint64_t i)
{
    return int((i * 40503u >> 7) % 25) - 12;
}

__host__ __device__ inline float weight_at(uint64_t j)
{
    return 1 + float(int(j * 7 % 64) - 32) / 64;
}

struct norm_tensors {
    char *residual, *residual_out, *out, *weight;
    uint4 *buffer; /* of the one-shot kernel: three */
    uint32_t *state;
    float *scale, *scales; /* of the tensor; of each token or group */
    std::vector<void *> all;

    template <class T> T *allocate(size_t count)
    {
        void *p;
        CUDA(cudaMalloc(&p, count * sizeof(T)));
        all.push_back(p);
        return static_cast<T *>(p);
    }
};
static norm_tensors tensors[8];
static uint32_t sms;

static __global__ void write_norm_inputs(__nv_bfloat16 *residual, uint64_t count, __nv_bfloat16 *weight)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        residual[i] = __float2bfloat16(float(residual_at(i)));
        if (i < 8 * opponents::most_packs)
            weight[i] = __float2bfloat16(weight_at(i));
    }
}

static __global__ void write_words(uint32_t *words, uint32_t value, uint64_t count)
{
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = value;
}

static const size_t most_scales = 1024 * 7168 / 128; /* of bench_groups */
static const size_t one_shot_packs = one_shot_tokens * opponents::most_packs;

static void open_norm(rank_state &r)
{
    norm_tensors &t = tensors[r.rank];
    const size_t buffer_words = 3 * size_t(world) * one_shot_packs * 4;
    t.residual = t.allocate<char>(most_bytes), t.residual_out = t.allocate<char>(most_bytes);
    t.out = t.allocate<char>(most_bytes), t.weight = t.allocate<char>(16 * opponents::most_packs);
    t.buffer = t.allocate<uint4>(buffer_words / 4), t.state = t.allocate<uint32_t>(4);
    t.scale = t.allocate<float>(1), t.scales = t.allocate<float>(most_scales);
    write_norm_inputs<<<1024, 256, 0, r.stream>>>(reinterpret_cast<__nv_bfloat16 *>(t.residual), most_bytes / 2,
                                                  reinterpret_cast<__nv_bfloat16 *>(t.weight));
    write_words<<<1024, 256, 0, r.stream>>>(reinterpret_cast<uint32_t *>(t.buffer), 0x80000000u, buffer_words);
    CUDA(cudaGetLastError());
    CUDA(cudaMemsetAsync(t.state, 0, 16, r.stream));
    CUDA(cudaMemcpyAsync(t.scale, &tensor_scale, 4, cudaMemcpyHostToDevice, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
}

static void close_norm(rank_state &r)
{
    for (void *p : tensors[r.rank].all)
        CUDA(cudaFree(p));
}

struct norm_case {
    uint32_t tokens, hidden;
    norm_output output;

    size_t bytes() const
    {
        return size_t(tokens) * hidden * 2;
    }
    std::string name() const
    {
        static const char *const ends[] = {"", " e4m3", " e4m3 by token"};
        return std::to_string(tokens) + " x " + std::to_string(hidden) + ends[output];
    }
};

/* ---- checking the norm ---- */

static __device__ double sum_over_block(double v, bool maximum)
{
    __shared__ double room[256];
    __syncthreads();
    room[threadIdx.x] = v;
    __syncthreads();
    double all = 0;
    for (uint32_t k = 0; k < blockDim.x; k++)
        all = maximum ? fmax(all, room[k]) : all + room[k];
    return all;
}

struct norm_results {
    const __nv_bfloat16 *residual_out, *out;
    const __nv_fp8_e4m3 *quantised;
    const float *scales; /* of the tensor, or of each token */
};

static __device__ double residual_sum(int ranks_of, uint64_t i)
{
    double r = residual_at(i);
    for (int k = 0; k < ranks_of; k++)
        r += sample(k, i);
    return r;
}

/* A block for each token; in double precision. bf16 has 8 significant bits and may be rounded twice, e4m3 has 4, below
   which its smallest step is 2^-9. */
static __global__ void check_norm(norm_case c, norm_results got, int ranks_of, unsigned long long *wrong)
{
    const uint64_t row = uint64_t(blockIdx.x) * c.hidden;
    double squares = 0, most = 0;
    for (uint32_t j = threadIdx.x; j < c.hidden; j += blockDim.x)
        squares += residual_sum(ranks_of, row + j) * residual_sum(ranks_of, row + j);
    const double factor = 1 / sqrt(sum_over_block(squares, false) / c.hidden + double(eps));
    for (uint32_t j = threadIdx.x; j < c.hidden; j += blockDim.x)
        most = fmax(most, fabs(residual_sum(ranks_of, row + j) * factor * double(weight_at(j))));
    most = sum_over_block(most, true);
    const double scale = c.output == to_bf16 ? 1 : c.output == to_e4m3 ? got.scales[0] : got.scales[blockIdx.x];
    if (c.output == to_e4m3_by_token && !(fabs(scale * 448 / most - 1) < 0.01))
        atomicAdd(wrong, 1ull);
    for (uint32_t j = threadIdx.x; j < c.hidden; j += blockDim.x) {
        const double r = residual_sum(ranks_of, row + j), y = r * factor * double(weight_at(j)),
                     found = c.output == to_bf16 ? double(__bfloat162float(got.out[row + j]))
                                                 : double(float(got.quantised[row + j])) * scale,
                     allowed = c.output == to_bf16 ? fabs(y) / 128 : fabs(y) * 0.07 + scale / 512;
        if (!(double(__bfloat162float(got.residual_out[row + j])) == r && fabs(found - y) <= allowed))
            atomicAdd(wrong, 1ull);
    }
}

static void clear_norm(rank_state &r, const norm_case &c)
{
    norm_tensors &t = tensors[r.rank];
    CUDA(cudaMemsetAsync(t.residual_out, 0xee, c.bytes(), r.stream));
    CUDA(cudaMemsetAsync(t.out, 0xee, c.bytes(), r.stream));
    CUDA(cudaMemsetAsync(t.scales, 0xee, 4 * 2048, r.stream));
}

static void verify_norm(rank_state &r, const norm_case &c, const std::string &way)
{
    const norm_tensors &t = tensors[r.rank];
    const norm_results got = {reinterpret_cast<const __nv_bfloat16 *>(t.residual_out),
                              reinterpret_cast<const __nv_bfloat16 *>(t.out),
                              reinterpret_cast<const __nv_fp8_e4m3 *>(t.out), c.output == to_e4m3 ? t.scale : t.scales};
    CUDA(cudaMemsetAsync(r.wrong, 0, sizeof *r.wrong, r.stream));
    check_norm<<<c.tokens, 256, 0, r.stream>>>(c, got, world, r.wrong);
    check_none_wrong(r, "norm of " + c.name() + " by " + way);
}

/* ---- ways to sum and normalise ---- */

static norm_params params_of(rank_state &r, const norm_case &c, const char *x)
{
    const norm_tensors &t = tensors[r.rank];
    norm_params p = {};
    p.x = reinterpret_cast<const uint4 *>(x);
    p.residual = reinterpret_cast<const uint4 *>(t.residual);
    p.weight = reinterpret_cast<const uint4 *>(t.weight);
    p.residual_out = reinterpret_cast<uint4 *>(t.residual_out);
    p.out = reinterpret_cast<uint4 *>(t.out);
    p.quantised = reinterpret_cast<uint2 *>(t.out);
    p.scale = c.output == to_e4m3 ? t.scale : t.scales;
    p.eps = eps, p.tokens = c.tokens, p.packs = c.hidden / 8;
    return p;
}

static void enqueue_sum(rank_state &r, const norm_case &c)
{
    check_kvprim(kvprim_all_reduce(&r.comm, r.y, r.x, c.bytes() / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream));
}

static void enqueue_nccl_sum(rank_state &r, const norm_case &c, ncclComm_t comm, const char *from, char *to)
{
    NCCL(ncclAllReduce(from, to, c.bytes() / 2, ncclBfloat16, ncclSum, comm, r.stream));
}

static void enqueue_norm(rank_state &r, const norm_case &c, const char *sum)
{
    CUDA(opponents::launch_add_norm(c.output, params_of(r, c, sum), r.stream));
}

static void enqueue_one_shot(rank_state &r, const norm_case &c)
{
    one_shot_params p = {};
    p.norm = params_of(r, c, r.x);
    for (int k = 0; k < world; k++)
        p.buffers[k] = tensors[k].buffer;
    p.state = tensors[r.rank].state;
    p.rank = uint32_t(r.rank), p.world = uint32_t(world), p.most = uint32_t(one_shot_packs);
    CUDA(opponents::launch_one_shot(c.output, p, sms, r.stream));
}

/* d: what is asked for besides. */
static void enqueue_kvprim_norm(rank_state &r, const norm_case &c, kvprim_norm_desc d = {})
{
    const norm_tensors &t = tensors[r.rank];
    d.dtype = KVPRIM_BF16, d.eps = eps, d.tokens = c.tokens, d.hidden = c.hidden;
    d.send = r.x, d.residual = t.residual, d.weight = t.weight, d.residual_out = t.residual_out;
    if (c.output == to_bf16)
        d.out = t.out;
    else
        d.quantised = t.out, d.scale = c.output == to_e4m3 && !d.scale_group ? t.scale : t.scales;
    d.scale_per_token = c.output == to_e4m3_by_token;
    check_kvprim(kvprim_all_reduce_norm(&r.comm, &d, r.stream));
}

enum norm_way { by_kvprim, sum_and_norm, nccl_and_norm, window_and_norm, by_one_shot, sum_alone, norm_ways };

static void enqueue(rank_state &r, const norm_case &c, norm_way how)
{
    char *const half = r.window + most_bytes;
    switch (how) {
    case by_kvprim:
        return enqueue_kvprim_norm(r, c);
    case sum_and_norm:
        enqueue_sum(r, c);
        return enqueue_norm(r, c, r.y);
    case nccl_and_norm:
        enqueue_nccl_sum(r, c, r.nccl, r.x, r.y);
        return enqueue_norm(r, c, r.y);
    case window_and_norm:
        enqueue_nccl_sum(r, c, static_cast<ncclComm_t>(r.comm.nccl), r.window, half);
        return enqueue_norm(r, c, half);
    case by_one_shot:
        return enqueue_one_shot(r, c);
    default:
        return enqueue_sum(r, c);
    }
}

struct norm_times {
    double us[norm_ways], opponent_us; /* 0: not measured; the fastest opponent's */
};

/* The opponents' kernels take rows of whole warps of packs. */
static norm_times measure_norm(const norm_case &c)
{
    static const char *const names[] = {"kvprim", "sum, norm", "NCCL, norm", "window, norm", "one shot"};
    std::vector<norm_way> list = {by_kvprim, sum_and_norm, nccl_and_norm, window_and_norm, sum_alone};
    std::vector<rank_way> all;
    norm_times t = {};
    if (c.tokens <= one_shot_tokens)
        list.push_back(by_one_shot);
    for (const norm_way how : list) {
        rank_way way = {[=](rank_state &r, int) { enqueue(r, c, how); }};
        if (how != sum_alone) {
            way.clear = [=](rank_state &r) { clear_norm(r, c); };
            way.verify = [=](rank_state &r) { verify_norm(r, c, names[how]); };
        }
        all.push_back(way);
    }
    measure(all, calls_in_graph(c.bytes()));
    t.opponent_us = 1e9;
    for (size_t k = 0; k < list.size(); k++) {
        t.us[list[k]] = all[k].us;
        if (list[k] != by_kvprim && list[k] != sum_alone)
            t.opponent_us = std::min(t.opponent_us, all[k].us);
    }
    return t;
}

/* A row of a table: kvprim's time, and that to the best opponent's. */
struct norm_row {
    double us;
    figure to_best;
};

static norm_row print_norm(const norm_case &c)
{
    const norm_times t = measure_norm(c);
    char one_shot[32] = "-";
    if (t.us[by_one_shot] > 0)
        snprintf(one_shot, sizeof one_shot, "%.2f", t.us[by_one_shot]);
    printf("%5u x %-6u %8.2f %8.2f %8.2f %8.2f %8s %8.2f   %-8.3f %.3f\n", c.tokens, c.hidden, t.us[by_kvprim],
           t.us[sum_and_norm], t.us[nccl_and_norm], t.us[window_and_norm], one_shot, t.us[sum_alone],
           t.us[by_kvprim] / t.us[sum_alone], t.us[by_kvprim] / t.opponent_us);
    fflush(stdout);
    return {t.us[by_kvprim], {t.us[by_kvprim] / t.opponent_us, c.name()}};
}

static void print_head(const char *title)
{
    printf("\n%s\n%5s   %-6s %8s %8s %8s %8s %8s %8s   %-8s %s\n", title, "", "", "kvprim", "+ norm", "NCCL +",
           "window +", "one shot", "the sum", "/ sum", "/ best");
}

/* Absolute targets are those of H200s. */
static void bench_norm_targets()
{
    static const struct {
        norm_case c;
        double target_us;
    } list[] = {{{1, 4096, to_bf16}, 2.6},
                {{8, 4096, to_bf16}, 3.0},
                {{32, 4096, to_bf16}, 3.7},
                {{128, 4096, to_bf16}, 5.9},
                {{6, 6144, to_bf16}, 3.0}};
    std::vector<figure> ratios;
    print_head("all_reduce, residual and RMSNorm of bf16, tokens x hidden, us");
    for (const auto &one : list) {
        const norm_row row = print_norm(one.c);
        ratios.push_back(row.to_best);
        if (world == 2)
            judge("norm of " + one.c.name() + ", us", row.us, '<', one.target_us);
    }
    judge_worst("norm to the best opponent, at these sizes", ratios, '<', 0.8);
}

static void bench_norms()
{
    std::vector<figure> small, all;
    print_head("all_reduce, residual and RMSNorm of bf16, more sizes, us");
    for (const uint32_t hidden : {512u, 1024u, 2048u, 4096u, 5120u, 7168u, 8192u, 16384u})
        for (const uint32_t tokens : {1u, 8u, 32u, 128u, 512u, 2048u}) {
            const norm_case c = {tokens, hidden, to_bf16};
            (c.bytes() <= size_t(MiB) ? small : all).push_back(print_norm(c).to_best);
        }
    judge_worst("norm to the best opponent, up to 1 MB", small, '<', 0.9);
    judge_worst("norm to the best opponent, beyond", all, '<', 1.02);
}

static void bench_quantised()
{
    std::vector<figure> ratios;
    for (const norm_output output : {to_e4m3, to_e4m3_by_token}) {
        print_head(output == to_e4m3 ? "all_reduce, residual, RMSNorm and e4m3, a scale of the tensor, us"
                                     : "all_reduce, residual, RMSNorm and e4m3, a scale for each token, us");
        for (const uint32_t hidden : {4096u, 7168u})
            for (const uint32_t tokens : {1u, 8u, 32u, 128u, 1024u})
                ratios.push_back(print_norm({tokens, hidden, output}).to_best);
    }
    judge_worst("norm with e4m3 to the best opponent", ratios, '<', 1.02);
}

/* Time of scales of groups of 128 elements, to that of one scale. What they write is tested elsewhere. */
static void bench_groups()
{
    std::vector<figure> ratios;
    printf("\nall_reduce, residual, RMSNorm and e4m3, us: a scale of the tensor; of groups of 128; exponents in "
           "columns\n");
    for (const uint32_t hidden : {4096u, 7168u})
        for (const uint32_t tokens : {1u, 8u, 32u, 128u, 1024u}) {
            const norm_case c = {tokens, hidden, to_e4m3};
            kvprim_norm_desc groups = {}, exponents = {};
            groups.scale_group = exponents.scale_group = 128, exponents.scale_dtype = KVPRIM_F8E8M0;
            exponents.scale_stride = 1, exponents.scale_group_stride = tokens;
            std::vector<rank_way> ways;
            for (const kvprim_norm_desc &d : {kvprim_norm_desc{}, groups, exponents})
                ways.push_back({[=](rank_state &r, int) { enqueue_kvprim_norm(r, c, d); }});
            measure(ways, calls_in_graph(c.bytes()));
            printf("%5u x %-6u %8.2f %8.2f %8.2f\n", tokens, hidden, ways[0].us, ways[1].us, ways[2].us);
            for (const int k : {1, 2})
                ratios.push_back({ways[size_t(k)].us / ways[0].us, c.name()});
        }
    judge_worst("norm with scales of groups / of the tensor", ratios, '<', 1.03);
}

/* ---- what follows ---- */

/* As a kernel of an engine that waits before it touches memory. */
static __global__ void __launch_bounds__(256) add_one(__nv_bfloat16 *x, uint64_t count)
{
    const uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x;
    pdl_wait<true>();
    if (i < count)
        x[i] = __float2bfloat16(__bfloat162float(x[i]) + 1);
    pdl_trigger<true>();
}

/* A sum and a kernel that is launched dependent, where sums let it start early and where they do not. */
static void bench_early()
{
    static kvprim_comm early[8];
    std::vector<figure> ratios;
    on_all([](rank_state &r) {
        kvprim_comm_desc desc = {};
        desc.launch_dependents = 1;
        open_comm(r, &early[r.rank], desc);
    });
    printf("\nall_reduce of bf16 and a dependent kernel, us: it starts after the sum; early; the sum alone\n");
    for (const size_t bytes : {size_t(8 << 10), size_t(64 << 10), size_t(512 << 10), size_t(4 << 20)}) {
        const auto call = [=](rank_state &r, kvprim_comm *comm, bool follows) {
            check_kvprim(kvprim_all_reduce(comm, r.y, r.x, bytes / 2, KVPRIM_BF16, KVPRIM_SUM, r.stream));
            if (follows)
                CUDA(launch_opponent(add_one, dim3(unsigned(bytes / 512)), dim3(256), true, r.stream,
                                     reinterpret_cast<__nv_bfloat16 *>(r.y), uint64_t(bytes / 2)));
        };
        std::vector<rank_way> ways = {{[=](rank_state &r, int) { call(r, &r.comm, true); }},
                                      {[=](rank_state &r, int) { call(r, &early[r.rank], true); }},
                                      {[=](rank_state &r, int) { call(r, &r.comm, false); }}};
        measure(ways, calls_in_graph(bytes));
        printf("%8s %8.2f %8.2f %8.2f\n", size_name(int64_t(bytes)).c_str(), ways[0].us, ways[1].us, ways[2].us);
        ratios.push_back({ways[1].us / ways[0].us, size_name(int64_t(bytes))});
    }
    on_all([](rank_state &r) { check_kvprim(kvprim_comm_destroy(&early[r.rank])); });
    judge_worst("a sum and what follows, started early / after it", ratios, '<', 1);
}

/* ---- exchanges ----

   of[a * world + b]: elements of bf16 that rank a sends to rank b. A gather is an exchange in which a rank sends the
   same to all. `bytes`: what a rank sends, or for a gather what it receives. */

struct counts_of_ranks {
    std::vector<size_t> of;
    bool gathers;
};

/* Rows of engines are multiples of 16 bytes. */
static size_t whole_packs(size_t count)
{
    return count / 8 * 8;
}

static size_t add_up(const std::vector<size_t> &counts, size_t first, size_t step, size_t many)
{
    size_t sum = 0;
    for (size_t k = 0; k < many; k++)
        sum += counts[first + k * step];
    return sum;
}

static size_t sent_before(const counts_of_ranks &counts, int from, int to)
{
    return counts.gathers ? 0 : add_up(counts.of, size_t(from * world), 1, size_t(to));
}

static size_t received_before(const counts_of_ranks &counts, int from, int to)
{
    return add_up(counts.of, size_t(to), size_t(world), size_t(from));
}

static void enqueue_grouped(rank_state &r, const counts_of_ranks &counts)
{
    NCCL(ncclGroupStart());
    for (int k = 0; k < world; k++) {
        const size_t out = counts.of[size_t(r.rank * world + k)], in = counts.of[size_t(k * world + r.rank)];
        if (out)
            NCCL(ncclSend(r.x + 2 * sent_before(counts, r.rank, k), out, ncclBfloat16, k, r.nccl, r.stream));
        if (in)
            NCCL(ncclRecv(r.y + 2 * received_before(counts, k, r.rank), in, ncclBfloat16, k, r.nccl, r.stream));
    }
    NCCL(ncclGroupEnd());
}

static rank_way exchange_by(const counts_of_ranks &counts, const char *name,
                            const std::function<void(rank_state &, int)> &enqueue)
{
    const auto received = [=](rank_state &r) { return 2 * received_before(counts, world, r.rank); };
    return {enqueue, [=](rank_state &r) { CUDA(cudaMemsetAsync(r.y, 0xee, received(r), r.stream)); },
            [=](rank_state &r) {
                for (int from = 0; from < world; from++)
                    check_result<__nv_bfloat16>(r, r.y + 2 * received_before(counts, from, r.rank),
                                                {copy_of, from, from + 1, sent_before(counts, from, r.rank)},
                                                counts.of[size_t(from * world + r.rank)], name);
            }};
}

static rank_way exchange_grouped(const counts_of_ranks &counts)
{
    return exchange_by(counts, "grouped", [=](rank_state &r, int) { enqueue_grouped(r, counts); });
}

static void bench_all_to_all()
{
    std::vector<figure> small, all;
    printf("\nall_to_all, us, by bytes that each rank sends\n%8s %8s %8s %8s   %s\n", "", "grouped", "alltoall",
           "kvprim", "/ best of NCCL");
    for (size_t bytes = 2 << 10; bytes <= most_bytes; bytes *= 2) {
        const size_t part = whole_packs(bytes / 2 / size_t(world));
        const counts_of_ranks counts = {std::vector<size_t>(size_t(world) * size_t(world), part), false};
        std::vector<rank_way> ways = {
            exchange_grouped(counts),
            exchange_by(counts, "kvprim_all_to_all",
                        [=](rank_state &r, int) {
                            check_kvprim(kvprim_all_to_all(&r.comm, r.y, r.x, part, KVPRIM_BF16, r.stream));
                        }),
#if NCCL_VERSION_CODE >= 22800
            exchange_by(
                counts, "ncclAlltoAll",
                [=](rank_state &r, int) { NCCL(ncclAlltoAll(r.x, r.y, part, ncclBfloat16, r.nccl, r.stream)); }),
#endif
        };
        measure(ways, calls_in_graph(bytes));
        const double grouped = ways[0].us, ours = ways[1].us, whole = ways.back().us;
        const std::string name = size_name(int64_t(bytes));
        const figure f = {ours / std::min(grouped, ways.size() > 2 ? whole : grouped), name};
        if (ways.size() > 2)
            printf("%8s %8.2f %8.2f %8.2f   %.3f\n", name.c_str(), grouped, whole, ours, f.value);
        else
            printf("%8s %8.2f %8s %8.2f   %.3f\n", name.c_str(), grouped, "-", ours, f.value);
        fflush(stdout);
        if (bytes == 8 << 10 && world == 2)
            judge("all_to_all of 8 KB, us", ours, '<', 2.0);
        if (bytes <= 256 << 10)
            small.push_back({ours / grouped, name});
        all.push_back(f);
    }
    judge_worst("all_to_all to grouped sends, up to 256 KB", small, '<', 0.5);
    judge_worst("all_to_all to the best of NCCL", all, '<', 1.02);
}

/* Sums to `total`, nearly. Rank a sends in proportion 1 : 2 : ... to the ranks from itself on, around the ring; to_one:
   all send a part to the last one, and nothing else. */
static counts_of_ranks uneven_counts(size_t total, bool to_one)
{
    std::vector<size_t> counts(size_t(world) * size_t(world), 0);
    for (int a = 0; a < world; a++)
        for (int k = 0; k < world; k++)
            counts[size_t(a * world + (a + k) % world)] =
                whole_packs(total * size_t(k + 1) * 2 / size_t(world * (world + 1)));
    for (size_t k = 0; to_one && k < counts.size(); k++)
        counts[k] = k % size_t(world) == size_t(world - 1) ? whole_packs(total / size_t(world)) : 0;
    return {counts, false};
}

static void bench_all_to_allv()
{
    std::vector<figure> small, all;
    printf(
        "\nall_to_allv, us, by bytes that each rank sends: most to its predecessor; all to the last rank, a part each\n"
        "%8s %8s %8s %7s | %8s %8s %7s\n",
        "", "grouped", "kvprim", "", "grouped", "kvprim", "");
    for (const size_t bytes : {8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20}) {
        printf("%8s", size_name(int64_t(bytes)).c_str());
        for (const bool to_one : {false, true}) {
            const counts_of_ranks counts = uneven_counts(bytes / 2, to_one);
            std::vector<rank_way> ways = {
                exchange_grouped(counts), exchange_by(counts, "kvprim_all_to_allv", [=](rank_state &r, int) {
                    check_kvprim(kvprim_all_to_allv(&r.comm, r.y, r.x, counts.of.data(), KVPRIM_BF16, r.stream));
                })};
            measure(ways, calls_in_graph(bytes));
            const figure f = {ways[1].us / ways[0].us, size_name(int64_t(bytes)) + (to_one ? " to one" : "")};
            printf(" %8.2f %8.2f %7.3f%s", ways[0].us, ways[1].us, f.value, to_one ? "\n" : " |");
            if (bytes <= 256 << 10)
                small.push_back(f);
            all.push_back(f);
        }
        fflush(stdout);
    }
    judge_worst("all_to_allv to grouped sends, up to 256 KB", small, '<', 0.5);
    judge_worst("all_to_allv to grouped sends", all, '<', 1.02);
}

static void enqueue_broadcasts(rank_state &r, const std::vector<size_t> &counts)
{
    NCCL(ncclGroupStart());
    for (int k = 0; k < world; k++)
        NCCL(ncclBroadcast(r.x, r.y + 2 * add_up(counts, 0, 1, size_t(k)), counts[size_t(k)], ncclBfloat16, k, r.nccl,
                           r.stream));
    NCCL(ncclGroupEnd());
}

/* Rank r gives in proportion r + 1. */
static void bench_all_gatherv()
{
    std::vector<figure> small, all;
    printf("\nall_gatherv, us, by bytes of the result; rank r gives r + 1 parts\n%8s %10s %8s %8s   %s\n", "",
           "broadcasts", "sends", "kvprim", "/ best of NCCL");
    for (const size_t bytes : {8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20}) {
        std::vector<size_t> counts;
        for (int r = 0; r < world; r++)
            counts.push_back(whole_packs(bytes / 2 * size_t(r + 1) * 2 / size_t(world * (world + 1))));
        counts_of_ranks all_counts = {{}, true};
        for (const size_t count : counts)
            all_counts.of.insert(all_counts.of.end(), size_t(world), count);
        std::vector<rank_way> ways = {
            exchange_by(all_counts, "broadcasts", [=](rank_state &r, int) { enqueue_broadcasts(r, counts); }),
            exchange_grouped(all_counts), exchange_by(all_counts, "kvprim_all_gatherv", [=](rank_state &r, int) {
                check_kvprim(kvprim_all_gatherv(&r.comm, r.y, r.x, counts.data(), KVPRIM_BF16, r.stream));
            })};
        measure(ways, calls_in_graph(bytes));
        const double best = std::min(ways[0].us, ways[1].us);
        const figure f = {ways[2].us / best, size_name(int64_t(bytes))};
        printf("%8s %10.2f %8.2f %8.2f   %.3f\n", f.where.c_str(), ways[0].us, ways[1].us, ways[2].us, f.value);
        fflush(stdout);
        if (bytes <= 256 << 10)
            small.push_back(f);
        all.push_back(f);
    }
    judge_worst("all_gatherv to the best of NCCL, up to 256 KB", small, '<', 0.6);
    judge_worst("all_gatherv to the best of NCCL", all, '<', 1.02);
}

static void open_all()
{
    open_ranks();
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    sms = uint32_t(device.multiProcessorCount);
    if (!open_links() || device.major < 9) {
        printf("skip: not every GPU can write to the next one's memory, or compute capability below 9.0\n");
        exit(0);
    }
    on_all(open_norm);
}

int main(int argc, char **argv)
{
    const int code = run_program(argc, argv, open_all,
                                 {{"norm", bench_norm_targets},
                                  {"norms", bench_norms},
                                  {"e4m3", bench_quantised},
                                  {"groups", bench_groups},
                                  {"early", bench_early},
                                  {"all_to_all", bench_all_to_all},
                                  {"all_to_allv", bench_all_to_allv},
                                  {"all_gatherv", bench_all_gatherv}});
    if (!ranks.empty()) {
        on_all(close_norm);
        on_all(close_rank);
    }
    return code;
}

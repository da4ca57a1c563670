/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_slots with other ways to turn page tables into slots on one GPU.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_slots.cu -o build/bench_slots
       build/bench_slots [--quick] [--only slots|store|host]

   Times are microseconds per launch, as bench_gpu.h takes them, over 8 sets of inputs. The slots of a contender's last
   launch are compared with those of kvprim_slots. PDL: with programmatic dependent launch.

       plain  a thread for each token; by cumulative lengths it finds the request by a binary search
       vLLM   its compute_slot_mappings (v1/worker/gpu/block_table.py), a Triton kernel, written anew: a block for each
              request, 1,024 tokens at a time. It takes the positions of all tokens, int64, beside the lengths, and
              writes int64. Here pointers and sizes that it reads from memory are parameters. It has no PDL

   Both have sizes of pages and tables that are known when they are compiled, and check nothing.

   A table has a row per number of tokens and requests: by pairs of request and position, then by cumulative lengths and
   starts. As many requests as tokens is a step of a decode. Mixed: all requests have one token, except the last. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include "opponents_launch.h"

constexpr int64_t page_rows = 16, max_pages = 2048, cache_rows = 1 << 20;

/* ---- jobs ---- */

/* Tokens of requests, as all contenders take them. */
template <class token> struct job {
    int64_t tokens, requests;
    value_sets<token> request, position, cu_seqlens, starts;
    value_sets<int64_t> position64;
    value_sets<int32_t> cu32;
    std::vector<int32_t> host_pages;
    on_device<int32_t> pages;
    on_device<int64_t> slot; /* one after another, for each set */

    /* mixed: the last request has all tokens except one for each of the others. Otherwise all have as many. */
    job(int64_t tokens_, int64_t requests_, bool mixed = false) : tokens(tokens_), requests(requests_)
    {
        std::vector<token> r, p, cu, s;
        for (int set = 0; set < sets_count; set++)
            for (int64_t k = 0, i = 0; k <= requests; k++) {
                cu.push_back(token(i));
                if (k == requests)
                    break;
                const int64_t end = mixed && k + 1 < requests ? k + 1 : tokens * (k + 1) / requests;
                const int64_t start = int64_t(hash_u64(uint64_t(set * requests + k)) % 20000);
                s.push_back(token(start));
                for (int64_t at = start; i < end; i++, at++)
                    r.push_back(token(k)), p.push_back(token(at));
            }
        position64 = {tokens, std::vector<int64_t>(p.begin(), p.end())};
        cu32 = {requests + 1, std::vector<int32_t>(cu.begin(), cu.end())};
        request = {tokens, r}, position = {tokens, p}, cu_seqlens = {requests + 1, cu}, starts = {requests, s};
        for (int64_t n = 0; n < requests * max_pages; n++)
            host_pages.push_back(int32_t(hash_u64(uint64_t(n)) % (cache_rows / page_rows)));
        pages = upload(host_pages);
        slot = upload(std::vector<int64_t>(size_t(tokens * sets_count)));
    }
    void *out(int i) const
    {
        return slot.get() + i % sets_count * tokens;
    }
};

/* By pairs, or by cumulative lengths. */
template <class token> kvprim_slots_desc slots_of(const job<token> &j, bool lengths, kvprim_index_type slot_type, int i)
{
    kvprim_slots_desc d = {};
    d.pages = j.pages.get(), d.pages_type = KVPRIM_I32;
    d.requests = j.requests, d.max_pages = max_pages, d.page_rows = page_rows, d.rows = cache_rows;
    d.request = lengths ? nullptr : j.request.set(i), d.position = lengths ? nullptr : j.position.set(i);
    d.cu_seqlens = lengths ? j.cu_seqlens.set(i) : nullptr, d.starts = lengths ? j.starts.set(i) : nullptr;
    d.token_type = index_type<token>;
    d.slot = j.out(i), d.slot_type = slot_type, d.count = j.tokens;
    return d;
}

/* ---- opponents ---- */

constexpr int opponent_threads = 128; /* Triton's four warps */

template <class T> struct plain_params {
    const T *request, *position, *cu_seqlens, *starts;
    const int32_t *pages;
    T *slot;
    int tokens, requests;
};

template <bool lengths, bool pdl, class T> __global__ static void plain_slots(const plain_params<T> p)
{
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    pdl_trigger<pdl>();
    pdl_wait<pdl>();
    if (i >= p.tokens)
        return;
    T request, position;
    if (lengths) {
        int low = 0, high = p.requests;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (p.cu_seqlens[middle] <= i ? low : high) = middle;
        }
        request = T(low);
        position = p.starts[low] + T(i) - p.cu_seqlens[low];
    } else {
        request = p.request[i];
        position = p.position[i];
    }
    const int32_t page = p.pages[request * max_pages + position / T(page_rows)];
    p.slot[i] = T(page) * T(page_rows) + position % T(page_rows);
}

struct vllm_params {
    const int32_t *cu_seqlens;
    const int64_t *position;
    const int32_t *pages;
    int64_t *slot;
};

__global__ static void __launch_bounds__(opponent_threads) vllm_slots(const vllm_params p)
{
    constexpr int each = 1024 / opponent_threads;
    const int request = int(blockIdx.x), end = p.cu_seqlens[request + 1];
    for (int first = p.cu_seqlens[request]; first < end; first += 1024) {
        int64_t position[each];
        int32_t page[each];
#pragma unroll
        for (int k = 0; k < each; k++) {
            const int i = first + k * opponent_threads + int(threadIdx.x);
            position[k] = i < end ? p.position[i] : 0;
        }
#pragma unroll
        for (int k = 0; k < each; k++)
            page[k] = p.pages[request * max_pages + position[k] / page_rows];
#pragma unroll
        for (int k = 0; k < each; k++) {
            const int i = first + k * opponent_threads + int(threadIdx.x);
            if (i < end)
                p.slot[i] = int64_t(page[k]) * page_rows + position[k] % page_rows;
        }
    }
}

/* ---- contenders ---- */

template <class T> void check_slots(contender &c, const job<T> &j, bool wide)
{
    const size_t bytes = size_t(j.tokens) * (wide ? 8 : 4);
    c.poison = [=, &j](int i) { CUDA(cudaMemsetAsync(j.out(i), 0x55, bytes, stream)); };
    c.verify = [=, &j, name = c.name](int i) {
        std::vector<int64_t> want(size_t(j.tokens)), got(want.size());
        kvprim_slots_desc d = slots_of(j, false, wide ? KVPRIM_I64 : KVPRIM_I32, i);
        d.pages = j.host_pages.data();
        d.request = j.request.host_set(i), d.position = j.position.host_set(i);
        d.slot = want.data();
        check_kvprim(kvprim_slots(&d));
        CUDA(cudaMemcpyAsync(got.data(), j.out(i), bytes, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        if (memcmp(want.data(), got.data(), bytes) == 0)
            return;
        printf("FAIL %s: %lld tokens of %lld requests\n", name, (long long)j.tokens, (long long)j.requests);
        exit(1);
    };
}

template <class T> contender kvprim_slots_of(const job<T> &j, bool lengths, bool pdl)
{
    contender c = {"kvprim",
                   [=, &j](int i) { call_kvprim(kvprim_cuda_slots, slots_of(j, lengths, index_type<T>, i), pdl); }};
    check_slots(c, j, sizeof(T) == 8);
    return c;
}

template <bool pdl, class T> contender plain_of(const job<T> &j, bool lengths)
{
    contender c = {"plain", [=, &j](int i) {
                       const plain_params<T> p = {j.request.set(i), j.position.set(i), j.cu_seqlens.set(i),
                                                  j.starts.set(i),  j.pages.get(),     static_cast<T *>(j.out(i)),
                                                  int(j.tokens),    int(j.requests)};
                       const unsigned blocks = unsigned((j.tokens + opponent_threads - 1) / opponent_threads);
                       CUDA(launch_opponent(lengths ? plain_slots<true, pdl, T> : plain_slots<false, pdl, T>, blocks,
                                            opponent_threads, pdl, stream, p));
                   }};
    check_slots(c, j, sizeof(T) == 8);
    return c;
}

template <class T> contender vllm_of(const job<T> &j)
{
    contender c = {
        "vLLM", [&j](int i) {
            const vllm_params p = {j.cu32.set(i), j.position64.set(i), j.pages.get(), static_cast<int64_t *>(j.out(i))};
            vllm_slots<<<unsigned(j.requests), opponent_threads, 0, stream>>>(p);
            CUDA(cudaGetLastError());
        }};
    check_slots(c, j, true);
    return c;
}

/* ---- tables ---- */

static std::vector<figure> ratios;

template <class T> void one_line(int64_t tokens, int64_t requests, bool mixed = false)
{
    const job<T> j(tokens, requests, mixed);
    for (int lengths = 0; lengths < 2; lengths++) {
        std::vector<contender> c = {kvprim_slots_of(j, lengths, false), kvprim_slots_of(j, lengths, true),
                                    plain_of<false>(j, lengths), plain_of<true>(j, lengths), vllm_of(j)};
        measure(c);
        const char *const form = !lengths ? "pairs" : mixed ? "mixed" : "lengths";
        printf("%6s %7lld %8lld %8s %8.3f %8.3f | %8.3f %8.3f %8.3f | %6.3f\n", sizeof(T) == 8 ? "int64" : "int32",
               (long long)tokens, (long long)requests, form, c[0].us, c[1].us, c[2].us, c[3].us, c[4].us,
               c[1].us / c[3].us);
        fflush(stdout);
        const std::string where =
            std::to_string(tokens) + " tokens of " + std::to_string(requests) + " requests, " + form;
        ratios.push_back({c[1].us / c[3].us, where});
        if (tokens == 32)
            judge(where, c[1].us, '<', 1.0, "us, PDL");
        if (tokens == 8192)
            judge(where, c[1].us, '<', 1.5, "us, PDL");
    }
}

static void slots()
{
    static const struct {
        int64_t tokens, requests;
    } sizes[] = {{1, 1},    {32, 1},    {32, 32},    {256, 256},   {1024, 1024}, {1100, 77},
                 {8192, 1}, {8192, 32}, {8192, 256}, {8192, 1024}, {8192, 4096}, {100000, 64}};
    printf("\nslots of tokens, us: kvprim, with PDL | plain, with PDL, vLLM | kvprim / plain, both with PDL\n");
    for (const auto &s : sizes)
        one_line<int32_t>(s.tokens, s.requests);
    one_line<int32_t>(32, 6, true);
    one_line<int32_t>(8192, 32, true);
    one_line<int32_t>(8192, 256, true);
    one_line<int64_t>(32, 32);
    one_line<int64_t>(8192, 256);
    judge_worst("slots: kvprim / plain, which checks nothing, PDL", ratios, '<', 1.1);
}

/* Slots, then a store of the tokens' rows of 8 heads of 128 bf16, K and V. */
static void slots_and_store()
{
    const int64_t row_bytes = 2048, tokens = 32;
    char *const cache = allocate_hashed(2 * cache_rows * row_bytes);
    char *const input = allocate_hashed(2 * tokens * row_bytes);
    const job<int32_t> j(tokens, tokens);
    const auto store = [=, &j](int i, bool pdl) {
        kvprim_store_desc d = store_of(table_at(cache, cache_rows), table_at(input, tokens), row_bytes,
                                       static_cast<const int32_t *>(j.out(i)), tokens);
        d.v_cache = table_at(cache + cache_rows * row_bytes, cache_rows);
        d.v = table_at(input + tokens * row_bytes, tokens), d.v_bytes = row_bytes;
        call_kvprim(kvprim_cuda_store, d, pdl);
    };
    printf("\nslots and a store of 32 tokens, K and V of 2,048 bytes, us: without PDL, with\n");
    for (int lengths = 0; lengths < 2; lengths++) {
        std::vector<contender> c;
        for (int pdl = 0; pdl < 2; pdl++) {
            const auto make = kvprim_slots_of(j, lengths, pdl).enqueue;
            c.push_back({"kvprim", [=](int i) { make(i), store(i, pdl); }});
        }
        const auto plain = plain_of<true>(j, lengths).enqueue;
        c.push_back({"plain", [=](int i) { plain(i), store(i, true); }});
        c.push_back({"store", [=](int i) { store(i, true); }});
        measure(c);
        printf("%8s %8.3f %8.3f; plain slots with PDL %8.3f; the store alone %8.3f\n", lengths ? "lengths" : "pairs",
               c[0].us, c[1].us, c[2].us, c[3].us);
        judge(std::string("slots by ") + (lengths ? "lengths" : "pairs") + " and store of 32 tokens", c[1].us, '<', 2.2,
              "us, PDL");
    }
    CUDA(cudaFree(cache));
    CUDA(cudaFree(input));
}

static void host()
{
    const job<int32_t> j(32, 32);
    const kvprim_slots_desc pairs = slots_of(j, false, KVPRIM_I32, 0), lengths = slots_of(j, true, KVPRIM_I32, 0);
    const kvprim_cuda_launch launch = on_stream(true);
    std::vector<host_call> calls = {{"pairs", [&] { check_kvprim(kvprim_cuda_slots(&pairs, &launch)); }},
                                    {"lengths", [&] { check_kvprim(kvprim_cuda_slots(&lengths, &launch)); }},
                                    {"an empty kernel", [] { empty_kernel<<<1, 32, 0, stream>>>(); }}};
    measure_host("host time of a call", calls, 201);
}

static void open_all()
{
    open_gpu(6 * GiB);
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all, {{"slots", slots}, {"store", slots_and_store}, {"host", host}});
}

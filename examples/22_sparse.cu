/* SPDX-License-Identifier: MIT */
/* Sparse attention with its cache in host memory. In each step of a decode loop an indexer names the top 2,048 tokens
   of every request, kvprim_cuda_fetch brings those that are not among the hot rows on the GPU, and attention reads them
   there. The token of the step itself is fresh: its row is written on the GPU, and to the host for later. A kernel that
   stands for attention compares every row that it reads. Then the same with all rows on the GPU.

       nvcc -arch=native -I. examples/22_sparse.cu -o 22_sparse && ./22_sparse

   The indexer is made up: from one step to the next a request changes about 5 % of what it wants. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"
#include <vector>

static const int requests = 4, tokens = 16384, prompt = 8192, steps = 64, top_k = 2048, row_bytes = 656;
static const int row_words = row_bytes / 4, threads = 128;

/* What a token's row holds. */
static __device__ uint32_t row_word(int request, int token, int word)
{
    return (uint32_t)((request * tokens + token) * row_words + word) * 2654435761u;
}

static __global__ void fill_rows(uint32_t *rows)
{
    for (int w = (int)threadIdx.x; w < row_words; w += threads)
        rows[(int64_t)blockIdx.x * row_words + w] = row_word((int)blockIdx.x / tokens, (int)blockIdx.x % tokens, w);
}

/* Writes the row of each request's new token to its hot row, and to the host. */
static __global__ void write_fresh(uint32_t *hot, const int32_t *fresh_rows, uint32_t *host, const int32_t *fresh)
{
    const int request = (int)blockIdx.x, token = fresh[request];
    for (int w = (int)threadIdx.x; w < row_words; w += threads) {
        hot[(int64_t)fresh_rows[request] * row_words + w] = row_word(request, token, w);
        host[((int64_t)request * tokens + token) * row_words + w] = row_word(request, token, w);
    }
}

/* Stands for attention: reads the row of each wanted token, and counts those that are wrong. */
static __global__ void attend(const uint32_t *cache, const int32_t *rows, const int32_t *wanted, uint32_t *wrong)
{
    const int request = (int)blockIdx.x / top_k, token = wanted[blockIdx.x], row = rows[blockIdx.x];
    uint32_t differ = row < 0;
    for (int w = (int)threadIdx.x; w < row_words && row >= 0; w += threads)
        differ |= cache[(int64_t)row * row_words + w] ^ row_word(request, token, w);
    if (differ)
        atomicAdd(wrong, 1u);
}

/* The rows of all tokens, for a cache that holds them all. */
static __global__ void all_rows(int32_t *rows, const int32_t *wanted)
{
    rows[blockIdx.x] = (int)blockIdx.x / top_k * tokens + wanted[blockIdx.x];
}

/* What the indexer names: [step][request][k], each token once; among them the newest one. */
static std::vector<int32_t> index_tokens(void)
{
    std::vector<int32_t> wanted((size_t)steps * requests * top_k);
    uint32_t random = 1;
    for (int request = 0; request < requests; request++) {
        std::vector<int32_t> now;
        std::vector<char> has(tokens, 0);
        for (int k = 0; k < top_k; k++)
            now.push_back(4 * k), has[(size_t)now.back()] = 1;
        for (int step = 0; step < steps; step++) {
            for (int change = 0; change <= top_k / 20; change++) {
                random = random * 1664525u + 1013904223u;
                const size_t k = (random >> 8) % top_k;
                random = random * 1664525u + 1013904223u;
                const int token = change == 0 ? prompt + step : (int)((random >> 8) % (uint32_t)(prompt + step));
                if (has[(size_t)token])
                    continue;
                has[(size_t)now[k]] = 0, has[(size_t)token] = 1;
                now[k] = token;
            }
            for (int k = 0; k < top_k; k++)
                wanted[(size_t)((step * requests + request) * top_k + k)] = now[(size_t)k];
        }
    }
    return wanted;
}

/* Runs the loop with so many hot rows a request, or with all rows on the GPU (0). Returns whether all were right. */
static bool decode(int hot_rows, const std::vector<int32_t> &all_wanted, uint32_t *host, const uint32_t *resident)
{
    kvprim_cuda_launch launch = {};
    launch.stream = new_stream();
    std::vector<int32_t> numbers, new_tokens;
    for (int i = 0; i < requests; i++)
        numbers.push_back(i);
    for (int i = 0; i < steps * requests; i++)
        new_tokens.push_back(prompt + i / requests);
    int32_t *const wanted = on_device(all_wanted.size(), all_wanted.data());
    int32_t *const fresh = on_device(new_tokens.size(), new_tokens.data());
    int32_t *const state = on_device(numbers.size(), numbers.data());
    int32_t *const rows = on_device<int32_t>((size_t)requests * top_k), *const fresh_rows =
                                                                            on_device<int32_t>(requests);
    uint32_t *const counters = on_device<uint32_t>(4), *const hot = on_device<uint32_t>(
                                                           (size_t)requests * (size_t)(hot_rows + 1) * row_words);
    CU(cudaMemset(counters, 0, 16));
    kvprim_fetch_desc d = {};
    d.set.states = requests, d.set.hot_rows = hot_rows, d.set.tokens = tokens, d.set.entries = 1 + top_k;
    if (hot_rows) {
        d.set.bytes = (int64_t)kvprim_fetch_state_bytes(&d.set);
        d.set.memory = on_device<char>((size_t)d.set.bytes);
        kvprim(kvprim_cuda_fetch_reset(&d.set, -1, &launch));
    }
    d.count = requests, d.state = state, d.state_type = d.wanted_type = KVPRIM_I32;
    d.top_k = top_k, d.fresh_count = 1, d.rows = rows, d.fresh_rows = fresh_rows;
    /* a row table would name host rows; here request i's begin at i * tokens, one page of `tokens` rows each */
    d.pages = state, d.pages_type = KVPRIM_I32, d.max_pages = 1, d.page_rows = tokens;
    d.k_hot.data = hot, d.k_hot.rows = (int64_t)requests * hot_rows, d.k.data = host, d.k.rows = requests * tokens;
    d.k_bytes = row_bytes, d.hits = counters + 1, d.misses = counters + 2, d.rejected = counters + 3;
    cudaEvent_t begin[steps], fetched[steps], end[steps];
    for (int step = 0; step < steps; step++) {
        begin[step] = new_event(), fetched[step] = new_event(), end[step] = new_event();
        d.wanted = wanted + (int64_t)step * requests * top_k, d.fresh = fresh + step * requests;
        const int32_t *const now = (const int32_t *)d.wanted;
        CU(cudaEventRecord(begin[step], launch.stream));
        if (hot_rows)
            kvprim(kvprim_cuda_fetch(&d, &launch));
        else
            all_rows<<<requests * top_k, 1, 0, launch.stream>>>(rows, now);
        CU(cudaEventRecord(fetched[step], launch.stream));
        if (hot_rows)
            write_fresh<<<requests, threads, 0, launch.stream>>>(hot, fresh_rows, host, (const int32_t *)d.fresh);
        attend<<<requests * top_k, threads, 0, launch.stream>>>(hot_rows ? hot : resident, rows, now, counters);
        CU(cudaEventRecord(end[step], launch.stream));
    }
    CU(cudaStreamSynchronize(launch.stream));
    uint32_t seen[4];
    CU(cudaMemcpy(seen, counters, sizeof seen, cudaMemcpyDeviceToHost));
    double fetch_us = 0, attend_us = 0;
    for (int step = 1; step < steps; step++) {
        fetch_us += 1e3 * elapsed_ms(begin[step], fetched[step]) / (steps - 1);
        attend_us += 1e3 * elapsed_ms(fetched[step], end[step]) / (steps - 1);
    }
    if (hot_rows)
        printf("%5d hot rows: %.1f %% hits, %u rows fetched, %.1f us for a fetch, %.1f us for the rest\n", hot_rows,
               100.0 * seen[1] / (seen[1] + seen[2]), seen[2], fetch_us, attend_us);
    else
        printf("all rows on the GPU: %.1f us for their numbers, %.1f us for the rest\n", fetch_us, attend_us);
    for (void *const p : {(void *)wanted, (void *)fresh, (void *)state, (void *)rows, (void *)fresh_rows,
                          (void *)counters, (void *)hot, d.set.memory})
        CU(cudaFree(p));
    return seen[0] == 0 && seen[3] == 0;
}

int main(void)
{
    need_gpu();
    const size_t all = (size_t)requests * tokens * row_words;
    const std::vector<int32_t> wanted = index_tokens();
    uint32_t *host, *const resident = on_device<uint32_t>(all);
    CU(cudaMallocHost(&host, 4 * all));
    fill_rows<<<requests * tokens, threads>>>(resident);
    CU(cudaMemcpy(host, resident, 4 * all, cudaMemcpyDeviceToHost));
    for (int request = 0; request < requests; request++) /* not yet there */
        memset(host + ((size_t)request * tokens + prompt) * row_words, 0, (size_t)(tokens - prompt) * row_bytes);
    bool good = true;
    for (const int hot_rows : {4096, 8192, 0})
        good = decode(hot_rows, wanted, host, resident) && good;
    printf(good ? "every row is right\n" : "some rows are WRONG\n");
    CU(cudaFree(resident));
    CU(cudaFreeHost(host));
    return good ? 0 : 1;
}

/* SPDX-License-Identifier: MIT */
/* Times kvprim_cuda_fetch from pinned host memory on one GPU.

       nvcc -arch=sm_90 -std=c++17 -O3 -I. tests/bench/bench_fetch.cu -o build/bench_fetch
       build/bench_fetch [--quick] [--only misses|hits|rates|beside|gather] [--pool GB]

   Times are microseconds per launch, as bench_gpu.h takes them. Launches of a replay follow each other on the same
   sets; their tokens go round, so that each finds as many of them hot as the table says. Rows lie at random in the
   pool, by a table of rows. After a replay, every row that the last launch wanted is compared with the pool.

       load   a kernel that only loads the rows that are missing: 16 lanes a row, 16 bytes each, no store

   From about 2 GB on, the number of rows is limited, 30 to 40 million a second, not their bytes: a pool is named with
   every figure. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"

static char *pool;
static int64_t pool_bytes;
static const char *only;

static bool chosen(const char *name)
{
    return !only || strcmp(only, name) == 0;
}

/* ---- the pool ---- */

static void open_pool(int64_t bytes)
{
    if (pool)
        CUDA(cudaFreeHost(pool));
    CUDA(cudaHostAlloc(reinterpret_cast<void **>(&pool), size_t(bytes), cudaHostAllocDefault));
    hash_words<<<256, 512, 0, stream>>>(reinterpret_cast<uint64_t *>(pool), uint64_t(bytes) / 8);
    CUDA(cudaStreamSynchronize(stream));
    pool_bytes = bytes;
}

__global__ static void load_rows(const char *from, int64_t row_bytes, const int32_t *row, int64_t count, uint32_t *sink)
{
    const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 16,
                  groups = int64_t(gridDim.x) * blockDim.x / 16;
    for (int64_t i = group; i < count; i += groups) {
        const uint64_t src = uint64_t(from) + uint64_t(row[i] * row_bytes);
        uint4 v[5];
        for (int k = 0; k < 5; k++) {
            const int64_t at = 16 * (threadIdx.x % 16 + 16 * k);
            v[k] = at < row_bytes ? kvpc_load16_once(src + uint64_t(at)) : uint4{0, 0, 0, 0};
        }
        uint32_t all = 0;
        for (int k = 0; k < 5; k++)
            all |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        if (all == 0x12345678)
            *sink = all;
    }
}

static on_device<char> room(int64_t bytes)
{
    char *p;
    CUDA(cudaMalloc(&p, size_t(bytes)));
    return on_device<char>(p);
}

/* ---- a job ---- */

/* n requests want top_k tokens each, `cold` of them not hot. All others are the same in every launch. */
struct job {
    int64_t n, top_k, cold, hot_rows, row_bytes, tokens;
    int launches;
    kvprim_fetch_desc d = {};
    on_device<char> memory, hot;
    on_device<int32_t> state, wanted, pages, rows, missing;
    on_device<uint32_t> counters;

    job(int64_t n_, int64_t top_k_, int64_t cold_, int64_t hot_rows_, int64_t row_bytes_)
        : n(n_), top_k(top_k_), cold(cold_), hot_rows(hot_rows_), row_bytes(row_bytes_)
    {
        const int64_t fixed = top_k - cold, pool_rows = pool_bytes / row_bytes;
        launches = cold == 0 ? 64 : int(std::max<int64_t>((hot_rows - fixed) / cold + 2, n * cold > 20000 ? 8 : 24));
        tokens = fixed + cold * launches;
        std::vector<int32_t> s, w, p, m;
        for (int64_t i = 0; i < n; i++)
            s.push_back(int32_t(i));
        const index_sets random(pool_rows, std::min(n * tokens, pool_rows), 1);
        for (int64_t i = 0; i < n * tokens; i++)
            p.push_back(random.host[size_t(i % random.count)]);
        for (int64_t launch = 0; launch < launches; launch++)
            for (int64_t i = 0; i < n; i++)
                for (int64_t k = 0; k < top_k; k++) {
                    const int64_t at = shuffled(uint64_t(k), hash_u64(uint64_t(launch)), 1),
                                  slot = top_k % 2 ? k : k / 2 * 2 + at % 2;
                    const int64_t token = slot < cold ? fixed + launch * cold + slot : slot - cold;
                    w.push_back(int32_t(token));
                    if (slot < cold)
                        m.push_back(p[size_t(i * tokens + token)]);
                }
        state = upload(s), wanted = upload(w), pages = upload(p), missing = upload(m.empty() ? s : m);
        d.set.states = n, d.set.hot_rows = hot_rows, d.set.tokens = tokens, d.set.entries = top_k;
        d.set.bytes = int64_t(kvprim_fetch_state_bytes(&d.set));
        memory = room(d.set.bytes), hot = room(n * hot_rows * row_bytes);
        rows = upload(std::vector<int32_t>(size_t(n * top_k)));
        counters = upload(std::vector<uint32_t>(4));
        d.set.memory = memory.get();
        d.count = n, d.state = state.get(), d.top_k = top_k, d.rows = rows.get();
        d.state_type = d.wanted_type = d.pages_type = KVPRIM_I32;
        d.pages = pages.get(), d.max_pages = tokens, d.page_rows = 1;
        d.k_hot = table_at(hot.get(), n * hot_rows), d.k = table_at(pool, pool_rows), d.k_bytes = row_bytes;
        const kvprim_cuda_launch launch = on_stream();
        check_kvprim(kvprim_cuda_fetch_reset(&d.set, -1, &launch));
    }
    kvprim_fetch_desc step(int i) const
    {
        kvprim_fetch_desc one = d;
        one.wanted = wanted.get() + i % launches * n * top_k;
        return one;
    }
};

__global__ static void check_rows(const char *hot, const char *from, int64_t row_bytes, const int32_t *rows,
                                  const int32_t *wanted, const int32_t *pages, int64_t top_k, int64_t tokens,
                                  int64_t hot_rows, uint32_t *wrong)
{
    const int64_t e = blockIdx.x, request = e / top_k, row = rows[e], source = pages[request * tokens + wanted[e]];
    if (row / hot_rows != request || row < 0)
        atomicAdd(wrong, 1u);
    else
        for (int64_t b = threadIdx.x; b < row_bytes; b += blockDim.x)
            if (hot[row * row_bytes + b] != from[source * row_bytes + b])
                atomicAdd(wrong, 1u);
}

static void verify(const job &j, int i)
{
    uint32_t seen[4];
    CUDA(cudaMemsetAsync(j.counters.get(), 0, 16, stream));
    check_rows<<<unsigned(j.n * j.top_k), 128, 0, stream>>>(
        j.hot.get(), pool, j.row_bytes, j.rows.get(), static_cast<const int32_t *>(j.step(i).wanted), j.pages.get(),
        j.top_k, j.tokens, j.hot_rows, j.counters.get());
    kvprim_fetch_desc next = j.step(i + 1); /* and as many are missing as should */
    next.misses = j.counters.get() + 1;
    call_kvprim(kvprim_cuda_fetch, next);
    for (int k = i + 2; k <= i + j.launches; k++) /* to where the replay ended */
        call_kvprim(kvprim_cuda_fetch, j.step(k));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(seen, j.counters.get(), 16, cudaMemcpyDeviceToHost));
    if (seen[0] || seen[1] != j.n * j.cold) {
        printf("%u bytes are wrong, %u rows were missing, not %lld\n", seen[0], seen[1], (long long)(j.n * j.cold));
        give_up(1);
    }
}

/* Times a job beside the kernel that only loads. */
static std::vector<contender> time_job(const job &j)
{
    const int64_t misses = j.n * j.cold;
    std::vector<contender> c(j.cold ? 2 : 1);
    c[0].name = "fetch", c[0].launches = j.launches;
    c[0].enqueue = [&](int i) { call_kvprim(kvprim_cuda_fetch, j.step(i)); };
    c[0].verify = [&](int i) { verify(j, i); };
    if (j.cold) {
        c[1].name = "load", c[1].launches = j.launches;
        c[1].enqueue = [&, misses](int i) {
            const unsigned blocks = unsigned(std::min<int64_t>((misses + 15) / 16, 2 * 132));
            load_rows<<<blocks, 256, 0, stream>>>(pool, j.row_bytes, j.missing.get() + i % j.launches * misses, misses,
                                                  j.counters.get());
        };
    }
    measure(c);
    return c;
}

/* ---- tables ---- */

static void print_misses()
{
    printf("\nmisses of one set, pool of %.2f GB; us, GB/s of both, load / fetch\n", double(pool_bytes) / 1e9);
    for (const int64_t row_bytes : {256, 576, 656, 1152})
        for (const int64_t misses : {256, 2048, 8192, 65536}) {
            const int64_t top_k = std::min<int64_t>(misses, 2048), n = misses / top_k;
            const job j(n, top_k, top_k, 2 * top_k, row_bytes);
            const std::vector<contender> c = time_job(j);
            const double bytes = double(misses * row_bytes) / 1e3;
            printf("%5lld B x %5lld  load %8.2f (%5.1f)  fetch %8.2f (%5.1f)  %.3f\n", (long long)row_bytes,
                   (long long)misses, c[1].us, bytes / c[1].us, c[0].us, bytes / c[0].us, c[1].us / c[0].us);
        }
}

static void print_hits()
{
    printf("\nall hot; us\n");
    for (const int64_t top_k : {512, 2048, 4096})
        for (const int64_t n : {1, 8, 64}) {
            printf("top_k %4lld, batch %2lld:", (long long)top_k, (long long)n);
            for (const int64_t hot_rows : {4096, 8192, 16384, 65536}) {
                const job j(n, top_k, 0, hot_rows, 656);
                printf("  %5lld hot rows %6.2f", (long long)hot_rows, time_job(j)[0].us);
            }
            printf("\n");
        }
}

static void print_rates()
{
    printf("\nhot rows 4,096, top_k 2,048, 656 B, pool of %.2f GB; us by share of hits: fetch (load)\n",
           double(pool_bytes) / 1e9);
    for (const int64_t n : {1, 8, 64}) {
        printf("batch %2lld:", (long long)n);
        for (const int64_t cold : {2048, 1024, 205, 20, 0}) {
            const job j(n, 2048, cold, 4096, 656);
            const std::vector<contender> c = time_job(j);
            printf("  %3.0f %% %8.2f (%.2f)", 100.0 - double(cold) / 20.48, c[0].us, cold ? c[1].us : 0.0);
        }
        printf("\n");
    }
}

/* ---- beside other work ---- */

__global__ static void arithmetic(float *out, int rounds)
{
    float x = float(threadIdx.x), y = 1.0f;
    for (int i = 0; i < rounds; i++)
        x = x * 1.0001f + y, y = y * 0.9999f + x;
    if (x == 1234.5f)
        *out = y;
}

__global__ static void stream_memory(uint4 *out, const uint4 *in, int64_t words)
{
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += int64_t(gridDim.x) * blockDim.x)
        out[i] = in[i];
}

static void print_beside()
{
    constexpr int64_t words = 64 * MiB;
    char *const buffer = allocate_hashed(2 * 16 * words);
    cudaStream_t other;
    cudaEvent_t begin, end;
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&begin)), CUDA(cudaEventCreate(&end));
    printf(
        "\nhow much longer a kernel takes beside fetches of 2,048 misses of 656 B, by max_sms; us of a fetch there\n");
    for (const bool memory : {false, true})
        for (const int32_t max_sms : {0, 16, 8, 4, 2}) {
            const job j(1, 2048, 2048, 4096, 656);
            double us[2] = {}, fetch_us = 0;
            for (int beside = 0; beside < 2; beside++) {
                CUDA(cudaDeviceSynchronize());
                CUDA(cudaEventRecord(start_event, stream));
                for (int i = 0; i < 300 && beside; i++)
                    call_kvprim(kvprim_cuda_fetch, j.step(i), false, max_sms);
                CUDA(cudaEventRecord(end_event, stream));
                CUDA(cudaEventRecord(begin, other));
                for (int i = 0; i < 4; i++)
                    if (memory)
                        stream_memory<<<2 * 132, 1024, 0, other>>>(reinterpret_cast<uint4 *>(buffer) + words,
                                                                   reinterpret_cast<uint4 *>(buffer), words);
                    else
                        arithmetic<<<8 * 132, 1024, 0, other>>>(reinterpret_cast<float *>(buffer), 20000);
                CUDA(cudaEventRecord(end, other));
                CUDA(cudaDeviceSynchronize());
                float ms, fetch_ms;
                CUDA(cudaEventElapsedTime(&ms, begin, end)),
                    CUDA(cudaEventElapsedTime(&fetch_ms, start_event, end_event));
                us[beside] = 1e3 * double(ms), fetch_us = 1e3 * double(fetch_ms) / 300;
            }
            printf("%-10s max_sms %2d: %.2f (%.0f us alone), fetch %.1f us\n", memory ? "memory" : "arithmetic",
                   max_sms, us[1] / us[0], us[0], fetch_us);
        }
    CUDA(cudaFree(buffer));
}

/* ---- gathers that convert ---- */

static void print_gather()
{
    constexpr int64_t elements = 256, stride = 272; /* 4 scales after the elements */
    const int64_t rows = pool_bytes / stride;
    kvprim_format fp8 = {}, bf16 = {};
    fp8.dtype = KVPRIM_F8E4M3, fp8.scale = KVPRIM_SCALE_TILE, fp8.scale_dtype = KVPRIM_F8E8M0, fp8.tile = 64;
    fp8.scale_offset = elements, bf16.dtype = KVPRIM_BF16;
    printf("\nkvprim_cuda_gather of 256 FP8 with F8E8M0 scales to bf16, pool of %.2f GB; us, load / gather\n",
           double(pool_bytes) / 1e9);
    for (const int64_t count : {512, 4096, 32768}) {
        const index_sets index(rows, count);
        const on_device<char> out = upload(std::vector<char>(size_t(2 * elements * count)));
        const on_device<uint32_t> sink = upload(std::vector<uint32_t>(1));
        kvprim_gather_desc d =
            gather_of(table_at(out.get(), count), table_at(pool, rows, stride), elements, index.set(0), count);
        d.src.format = &fp8, d.dst.format = &bf16;
        std::vector<contender> c(2);
        for (contender &one : c)
            one.launches = 24;
        c[0].name = "gather", c[1].name = "load";
        c[0].enqueue = [&](int i) {
            d.index = index.set(i);
            call_kvprim(kvprim_cuda_gather, d);
        };
        c[1].enqueue = [&](int i) {
            load_rows<<<unsigned(std::min<int64_t>((count + 15) / 16, 264)), 256, 0, stream>>>(
                pool, stride, index.set(i), count, sink.get());
        };
        measure(c);
        printf("%5lld rows: load %.2f, gather %.2f: %.3f\n", (long long)count, c[1].us, c[0].us, c[1].us / c[0].us);
    }
}

int main(int argc, char **argv)
{
    double gigabytes = 0;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (i + 1 < argc && strcmp(argv[i], "--only") == 0)
            only = argv[++i];
        else if (i + 1 < argc && strcmp(argv[i], "--pool") == 0)
            gigabytes = atof(argv[++i]);
    open_gpu(12 * GiB);
    for (const double size : {0.268, 6.0, 20.0}) {
        if (gigabytes > 0 && size != gigabytes)
            continue;
        open_pool(int64_t(size * 1e9) / 4096 * 4096);
        if (chosen("misses"))
            print_misses();
        if (chosen("gather"))
            print_gather();
        if (chosen("rates") && size < 1)
            print_rates();
        if (chosen("hits") && size < 1)
            print_hits();
        if (chosen("beside") && size < 1)
            print_beside();
    }
    return 0;
}

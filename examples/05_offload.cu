/* SPDX-License-Identifier: MIT */
/* Offload: moves the KV pages of one sequence, K and V of every layer, to pinned host memory and back to other pages.
   Two launches on 8 SMs do this while a compute kernel runs on the rest of the GPU. The program prints how much each
   slows the other down, and checks every byte.

       nvcc -arch=native -I. examples/05_offload.cu -o 05_offload && ./05_offload
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"

/* A page of one layer has 16 tokens of 2 KB. The sequence has 64 of the 256 pages in each table. */
enum { tables = 2 * 32, pages = 256, moved = 64, page_bytes = 16 * 2048, sms_for_transfer = 8 };
static const int64_t table_bytes = (int64_t)pages * page_bytes, host_table_bytes = (int64_t)moved * page_bytes;
static const double moved_gb = 1e-9 * 2 * tables * (double)host_table_bytes; /* out and back */

/* The word that the cache holds at this place at first. */
static __host__ __device__ uint32_t cache_word(int64_t word)
{
    return (uint32_t)word * 2654435761u ^ (uint32_t)(word >> 20);
}

static __global__ void fill(uint32_t *words, int64_t count)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        words[i] = cache_word(i);
}

/* Stands for the model: only arithmetic. Blocks take jobs until none is left, so any number of SMs can run it. */
static __global__ void compute(unsigned *next, unsigned jobs, float *sink)
{
    __shared__ unsigned job;
    float x = threadIdx.x;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0)
            job = atomicAdd(next, 1);
        __syncthreads();
        if (job >= jobs)
            break;
        for (int i = 0; i < 20000; i++)
            x = x * 1.0001f + 0.5f;
    }
    if (x == 1)
        *sink = x;
}

/* Moves pages of every table from or to host memory. */
static void enqueue_transfer(void *const *dst, int64_t dst_pages, const int32_t *dst_index, void *const *src,
                             int64_t src_pages, const int32_t *src_index, cudaStream_t stream)
{
    kvprim_transfer_desc transfer = {};
    transfer.dst.rows = dst_pages;
    transfer.src.rows = src_pages;
    transfer.dst_layers = dst;
    transfer.src_layers = src;
    transfer.layers = tables;
    transfer.row_bytes = page_bytes;
    transfer.dst_index = dst_index;
    transfer.src_index = src_index;
    transfer.index_type = KVPRIM_I32;
    transfer.count = moved;
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    launch.max_sms = sms_for_transfer;
    kvprim(kvprim_cuda_transfer(&transfer, &launch));
}

/* State that main() sets up and run() uses. */
static struct {
    void *cache[tables], *host[tables]; /* K and V of every layer */
    int32_t *from_pages, *to_pages;     /* on the device */
    unsigned *next_job;
    float *sink;
    int blocks;
    cudaStream_t transfer_stream, compute_stream;
    cudaEvent_t begin, transferred, computed;
} s;

/* Starts the transfers, the compute kernel (jobs > 0), or both at once, and returns how many milliseconds each took. */
static void run(int transfer, unsigned jobs, float *transfer_ms, float *compute_ms)
{
    CU(cudaMemset(s.next_job, 0, sizeof *s.next_job));
    CU(cudaDeviceSynchronize());
    CU(cudaEventRecord(s.begin, s.transfer_stream));
    CU(cudaStreamWaitEvent(s.compute_stream, s.begin, 0));
    if (transfer) {
        enqueue_transfer(s.host, moved, NULL, s.cache, pages, s.from_pages, s.transfer_stream);
        enqueue_transfer(s.cache, pages, s.to_pages, s.host, moved, NULL, s.transfer_stream);
    }
    CU(cudaEventRecord(s.transferred, s.transfer_stream));
    if (jobs)
        compute<<<s.blocks, 256, 0, s.compute_stream>>>(s.next_job, jobs, s.sink);
    CU(cudaEventRecord(s.computed, s.compute_stream));
    CU(cudaDeviceSynchronize());
    *transfer_ms = elapsed_ms(s.begin, s.transferred), *compute_ms = elapsed_ms(s.begin, s.computed);
}

/* Returns the number of wrong bytes: page to[i] must hold what page from[i] held, the other pages are unchanged. */
static int64_t wrong_bytes(const int32_t *from, const int32_t *to)
{
    static uint32_t table[pages * page_bytes / 4];
    int32_t source[pages];
    int64_t wrong = 0;
    for (int p = 0; p < pages; p++)
        source[p] = p;
    for (int i = 0; i < moved; i++)
        source[to[i]] = from[i];
    for (int t = 0; t < tables; t++) {
        CU(cudaMemcpy(table, s.cache[t], table_bytes, cudaMemcpyDeviceToHost));
        for (int64_t w = 0; w < table_bytes / 4; w++) {
            const int64_t page = w / (page_bytes / 4), in_page = w % (page_bytes / 4);
            wrong += table[w] != cache_word((t * (int64_t)pages + source[page]) * (page_bytes / 4) + in_page) ? 4 : 0;
        }
    }
    return wrong;
}

int main(void)
{
    int32_t from[moved], to[moved];
    cudaDeviceProp gpu;
    char *host;
    float alone_ms, copied_ms, beside_ms, computed_ms, unused;
    need_gpu();
    CU(cudaGetDeviceProperties(&gpu, 0));
    char *const cache = on_device<char>(tables * table_bytes);
    CU(cudaMallocHost(&host, tables * host_table_bytes));
    for (int t = 0; t < tables; t++) {
        s.cache[t] = cache + t * table_bytes;
        s.host[t] = host + t * host_table_bytes;
    }
    for (int i = 0; i < moved; i++) {
        from[i] = 3 * i;           /* the sequence's pages */
        to[i] = pages - 2 - 3 * i; /* the pages that it comes back to, none of which is in `from` */
    }
    s.from_pages = on_device(moved, from), s.to_pages = on_device(moved, to);
    s.next_job = on_device<unsigned>(1), s.sink = on_device<float>(1);
    s.transfer_stream = new_stream(), s.compute_stream = new_stream();
    s.begin = new_event(), s.transferred = new_event(), s.computed = new_event();
    fill<<<1024, 256>>>((uint32_t *)cache, tables * table_bytes / 4);
    s.blocks = 4 * gpu.multiProcessorCount;

    const unsigned jobs = 300u * (unsigned)gpu.multiProcessorCount; /* longer than the transfers take */
    run(1, jobs, &unused, &unused);                                 /* not measured: loads the kernels */
    run(0, jobs, &unused, &alone_ms);
    run(1, 0, &copied_ms, &unused);
    memset(host, 0, tables * host_table_bytes); /* so that pages that the last run does not move are wrong */
    fill<<<1024, 256>>>((uint32_t *)cache, tables * table_bytes / 4);
    CU(cudaDeviceSynchronize());
    run(1, jobs, &beside_ms, &computed_ms);

    const int64_t wrong = wrong_bytes(from, to);
    printf("%d pages of %d tables, %.0f MB, out to pinned host memory and back, %lld bytes wrong\n", moved, tables,
           1e3 * moved_gb / 2, (long long)wrong);
    printf("transfer on %d of %d SMs: %.1f GB/s alone, %.1f GB/s beside the compute kernel\n", sms_for_transfer,
           gpu.multiProcessorCount, 1e3 * moved_gb / copied_ms, 1e3 * moved_gb / beside_ms);
    printf("compute kernel: %.2f ms alone, %.2f ms beside the transfer\n", alone_ms, computed_ms);
    return wrong != 0;
}

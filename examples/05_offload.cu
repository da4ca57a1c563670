/* SPDX-License-Identifier: MIT */
/* Offload: moves the KV pages of one sequence, K and V of every layer, to pinned host memory and back to other pages.
   Two launches on 8 SMs do this while a compute kernel runs on the rest of the GPU; then the driver's batch copy does
   it, from the list that kvprim_runs makes of the same descriptors. The program prints how much copies and compute
   kernel slow each other down, and checks every byte.

       nvcc -arch=native -I. examples/05_offload.cu -o 05_offload && ./05_offload
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"

/* A page of one layer has 32 tokens of 2 KB. The sequence has 64 of the 256 pages in each table. */
enum { tables = 2 * 32, pages = 256, moved = 64, page_bytes = 32 * 2048, sms_for_transfer = 8 };
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

/* Pages of every table from or to host memory. */
static kvprim_transfer_desc transfer_of(void *const *dst, int64_t dst_pages, const int32_t *dst_index, void *const *src,
                                        int64_t src_pages, const int32_t *src_index)
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
    return transfer;
}

/* The indices are the GPU's: only the GPU has to know them. */
static void enqueue_kernel(const kvprim_transfer_desc *transfer, cudaStream_t stream)
{
    kvprim_cuda_launch launch = {};
    launch.stream = stream;
    launch.max_sms = sms_for_transfer;
    kvprim(kvprim_cuda_transfer(transfer, &launch));
}

/* The indices are the host's. No multiprocessor works; the host does: runs of 64 KB took 1.6 us each, longer than the
   link takes for them (H200). */
static void enqueue_copies(const kvprim_transfer_desc *transfer, cudaStream_t stream)
{
    static kvprim_copy_item items[tables * moved];
    static void *dst[tables * moved];
    static const void *src[tables * moved];
    static size_t bytes[tables * moved];
    kvprim_move move;
    kvprim(kvprim_transfer_moves(transfer, &move));
    const int64_t runs = kvprim_runs(&move, 1, items, tables * moved);
    if (runs < 0)
        kvprim(KVPRIM_ERROR_UNSUPPORTED);
    for (int64_t i = 0; i < runs; i++)
        dst[i] = items[i].dst, src[i] = items[i].src, bytes[i] = (size_t)items[i].bytes;
#if CUDART_VERSION >= 13000
    size_t first = 0;
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    CU(cudaMemcpyBatchAsync(dst, src, bytes, (size_t)runs, &attributes, &first, 1, stream));
#else /* CUDA 12.8 has that, too, with one argument more */
    for (int64_t i = 0; i < runs; i++)
        CU(cudaMemcpyAsync(dst[i], src[i], bytes[i], cudaMemcpyDefault, stream));
#endif
}

/* State that main() sets up and run() uses. */
static struct {
    void *cache[tables], *host[tables]; /* K and V of every layer */
    int32_t from[moved], to[moved];     /* the sequence's pages, and those that it comes back to */
    int32_t *from_pages, *to_pages;     /* the same on the device */
    unsigned *next_job;
    float *sink;
    int blocks;
    cudaStream_t transfer_stream, compute_stream;
    cudaEvent_t begin, transferred, computed;
} s;

enum way { no_transfer, by_kernel, by_driver };

/* There and back. */
static void enqueue_transfers(way how)
{
    const bool kernel = how == by_kernel;
    const kvprim_transfer_desc out = transfer_of(s.host, moved, NULL, s.cache, pages, kernel ? s.from_pages : s.from);
    const kvprim_transfer_desc back = transfer_of(s.cache, pages, kernel ? s.to_pages : s.to, s.host, moved, NULL);
    for (const kvprim_transfer_desc *const transfer : {&out, &back})
        if (kernel)
            enqueue_kernel(transfer, s.transfer_stream);
        else
            enqueue_copies(transfer, s.transfer_stream);
}

/* Starts the transfers, the compute kernel (jobs > 0), or both at once, and returns how many milliseconds each took.
   The transfers' kernels begin first, to find their multiprocessors free; the driver's copies take the host longer. */
static void run(way how, unsigned jobs, float *transfer_ms, float *compute_ms)
{
    CU(cudaMemset(s.next_job, 0, sizeof *s.next_job));
    CU(cudaDeviceSynchronize());
    CU(cudaEventRecord(s.begin, s.transfer_stream));
    CU(cudaStreamWaitEvent(s.compute_stream, s.begin, 0));
    if (how == by_kernel)
        enqueue_transfers(how);
    if (jobs)
        compute<<<s.blocks, 256, 0, s.compute_stream>>>(s.next_job, jobs, s.sink);
    if (how == by_driver)
        enqueue_transfers(how);
    CU(cudaEventRecord(s.transferred, s.transfer_stream));
    CU(cudaEventRecord(s.computed, s.compute_stream));
    CU(cudaDeviceSynchronize());
    *transfer_ms = elapsed_ms(s.begin, s.transferred), *compute_ms = elapsed_ms(s.begin, s.computed);
}

/* Returns the number of wrong bytes: page to[i] must hold what page from[i] held, the other pages are unchanged. */
static int64_t wrong_bytes(void)
{
    static uint32_t table[pages * page_bytes / 4];
    int32_t source[pages];
    int64_t wrong = 0;
    for (int p = 0; p < pages; p++)
        source[p] = p;
    for (int i = 0; i < moved; i++)
        source[s.to[i]] = s.from[i];
    for (int t = 0; t < tables; t++) {
        CU(cudaMemcpy(table, s.cache[t], table_bytes, cudaMemcpyDeviceToHost));
        for (int64_t w = 0; w < table_bytes / 4; w++) {
            const int64_t page = w / (page_bytes / 4), in_page = w % (page_bytes / 4);
            wrong += table[w] != cache_word((t * (int64_t)pages + source[page]) * (page_bytes / 4) + in_page) ? 4 : 0;
        }
    }
    return wrong;
}

/* Measures a way and prints its line. Returns the number of wrong bytes. */
static int64_t measure(way how, const char *name, void *host, unsigned jobs, float alone_ms)
{
    float copied_ms, beside_ms, computed_ms, unused;
    run(how, jobs, &unused, &unused); /* not measured: loads the kernels */
    run(how, 0, &copied_ms, &unused);
    memset(host, 0, tables * host_table_bytes); /* so that pages that the last run does not move are wrong */
    fill<<<1024, 256>>>((uint32_t *)s.cache[0], tables * table_bytes / 4);
    CU(cudaDeviceSynchronize());
    run(how, jobs, &beside_ms, &computed_ms);
    const int64_t wrong = wrong_bytes();
    printf("%-28s%5.1f GB/s alone, %5.1f beside the compute kernel, which takes %.2f times as long; %lld bytes wrong\n",
           name, 1e3 * moved_gb / copied_ms, 1e3 * moved_gb / beside_ms, computed_ms / alone_ms, (long long)wrong);
    return wrong;
}

int main(void)
{
    cudaDeviceProp gpu;
    char *host;
    float alone_ms, unused;
    need_gpu();
    CU(cudaGetDeviceProperties(&gpu, 0));
    char *const cache = on_device<char>(tables * table_bytes);
    CU(cudaMallocHost(&host, tables * host_table_bytes));
    for (int t = 0; t < tables; t++) {
        s.cache[t] = cache + t * table_bytes;
        s.host[t] = host + t * host_table_bytes;
    }
    for (int i = 0; i < moved; i++) {
        s.from[i] = 3 * i;
        s.to[i] = pages - 2 - 3 * i; /* none of them is in `from` */
    }
    s.from_pages = on_device(moved, s.from), s.to_pages = on_device(moved, s.to);
    s.next_job = on_device<unsigned>(1), s.sink = on_device<float>(1);
    s.transfer_stream = new_stream(), s.compute_stream = new_stream();
    s.begin = new_event(), s.transferred = new_event(), s.computed = new_event();
    s.blocks = 4 * gpu.multiProcessorCount;

    const unsigned jobs = 600u * (unsigned)gpu.multiProcessorCount; /* longer than the transfers take */
    run(no_transfer, jobs, &unused, &unused);
    run(no_transfer, jobs, &unused, &alone_ms);
    printf("%d pages of %d tables, %.0f MB, out to pinned host memory and back; compute kernel alone: %.2f ms\n", moved,
           tables, 1e3 * moved_gb / 2, alone_ms);
    char name[32];
    (void)snprintf(name, sizeof name, "a kernel on %d of %d SMs", sms_for_transfer, gpu.multiProcessorCount);
    const int64_t wrong = measure(by_kernel, name, host, jobs, alone_ms);
    return measure(by_driver, "the driver's batch copy", host, jobs, alone_ms) + wrong != 0;
}

/* SPDX-License-Identifier: MIT */
/* Compares kvprim_cuda_transfer with what engines use instead of it and with the copy engines: alone, in both directions
   at once and beside other work. On one GPU (and, if there are two, to another one). Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_transfer.cu -o build/bench_transfer
       build/bench_transfer [--quick] [--only host|runs|both|beside|few|device|listed|peer]

   Rows are random on both sides. Times are of GPU work, as bench_gpu.h takes them. Copies that a graph cannot hold
   (batches) or that are many go to a stream one by one while the GPU is kept waiting. GB/s of a link counts each byte
   once, GB/s of device memory counts it as read and as written. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"

constexpr int64_t host_bytes = 2 * GiB, device_bytes = 8 * GiB; /* of each of two parts of device memory */
constexpr int turns = 4;                                        /* sets of indices */

static char *host_memory, *device_memory[2], *peer_memory;

/* ---- opponents ---- */

/* What the opponents take: packed rows of one layer, each named by an int32 on both sides. Rows are multiples of 16
   bytes. */
struct row_list {
    char *__restrict__ dst;
    const char *__restrict__ src;
    const int32_t *__restrict__ to, *__restrict__ from;
    uint32_t row_bytes, count;
};

/* SGLang's register kernels, for which it launches 2 blocks of 1,024 threads: sgl-kernel/csrc/kvcacheio/transfer.cu (a
   warp moves a row in 8-byte words, each loaded and stored before the next) and kernels/jit/csrc/kvcacheio/hicache.cuh
   (8, 16 or 32 threads move one, of up to 512 and 1,024 bytes and of more, in words of 16, 8 and 4 bytes). This one is
   at least as fast: 16-byte words, and up to 8 loads of each thread before their stores. */
template <uint32_t lanes, uint32_t loads>
static __global__ void __launch_bounds__(1024, 1) sglang_registers(const row_list rows)
{
    const uint32_t in_block = blockDim.x / lanes, step = 16 * lanes;
    for (uint32_t i = blockIdx.x * in_block + threadIdx.x / lanes; i < rows.count; i += gridDim.x * in_block) {
        const char *const src = rows.src + int64_t(rows.from[i]) * rows.row_bytes;
        char *const dst = rows.dst + int64_t(rows.to[i]) * rows.row_bytes;
        for (uint32_t at = 16 * (threadIdx.x % lanes); at < rows.row_bytes; at += step * loads) {
            uint4 v[loads];
            for (uint32_t k = 0; k < loads; k++)
                if (at + k * step < rows.row_bytes)
                    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                                 : "l"(src + at + k * step));
            for (uint32_t k = 0; k < loads; k++)
                if (at + k * step < rows.row_bytes)
                    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst + at + k * step),
                                 "r"(v[k].x), "r"(v[k].y), "r"(v[k].z), "r"(v[k].w)
                                 : "memory");
        }
    }
}

/* SGLang's ring, kernels/jit/csrc/kvcacheio/hicache_tma.cuh: in each block one warp loads chunks of rows into stages of
   shared memory by bulk copies, one a row, and the other warps store them in 16-byte words. A chunk is as many rows as
   fit a stage, a power of two; one of a single row is stored half by a bulk copy. It is launched in 2 to 4 blocks; a
   stage is at least a row. */
constexpr uint32_t ring_stages = 6, ring_stage_bytes = 32 << 10, ring_rows = 128, ring_store_warps = 8;

struct ring_memory {
    alignas(128) char stage[ring_stages][ring_stage_bytes];
    int32_t to[ring_stages][ring_rows];
    uint64_t full[ring_stages], empty[ring_stages];
};

static __device__ uint32_t in_shared(const void *p)
{
    return uint32_t(__cvta_generic_to_shared(p));
}

static __device__ void wait_for(const uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra wait;\n}" ::"r"(in_shared(barrier)),
                 "r"(parity)
                 : "memory");
}

static __device__ void arrive(const uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(in_shared(barrier)) : "memory");
}

static __device__ void load_chunks(ring_memory &ring, const row_list &rows, uint32_t in_chunk, uint32_t chunks)
{
    const uint32_t lane = threadIdx.x, each = (in_chunk + 31) / 32;
    int32_t to[ring_rows / 32], from[ring_rows / 32];
    const auto fetch = [&](uint32_t chunk) {
        for (uint32_t k = 0; k < ring_rows / 32; k++) {
            const uint32_t r = chunk * in_chunk + 32 * k + lane;
            if (k < each && 32 * k + lane < in_chunk && chunk < chunks && r < rows.count)
                to[k] = rows.to[r], from[k] = rows.from[r];
        }
    };
    fetch(blockIdx.x);
    for (uint32_t chunk = blockIdx.x, turn = 0; chunk < chunks; chunk += gridDim.x, turn++) {
        const uint32_t s = turn % ring_stages, left = rows.count - chunk * in_chunk, n = min(left, in_chunk);
        wait_for(&ring.empty[s], turn / ring_stages % 2 ^ 1);
        for (uint32_t k = 0; k < ring_rows / 32; k++)
            if (32 * k + lane < n)
                ring.to[s][32 * k + lane] = to[k];
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&ring.full[s])),
                         "r"(n * rows.row_bytes)
                         : "memory");
        __syncwarp();
        for (uint32_t k = 0; k < ring_rows / 32; k++)
            if (32 * k + lane < n)
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                        in_shared(ring.stage[s] + (32 * k + lane) * rows.row_bytes)),
                    "l"(rows.src + int64_t(from[k]) * rows.row_bytes), "r"(rows.row_bytes),
                    "r"(in_shared(&ring.full[s]))
                    : "memory");
        fetch(chunk + gridDim.x);
    }
}

/* Chunks of a row each. The first warp that stores frees a stage once its bulk copy has read it: one turn later. */
static __device__ void store_rows(ring_memory &ring, const row_list &rows)
{
    constexpr uint32_t threads = 32 * (ring_store_warps - 1), loads = 4;
    const uint32_t words = rows.row_bytes / 16, half = words / 2;
    for (uint32_t row = blockIdx.x, turn = 0; row < rows.count; row += gridDim.x, turn++) {
        const uint32_t s = turn % ring_stages;
        wait_for(&ring.full[s], turn / ring_stages % 2);
        char *const dst = rows.dst + int64_t(ring.to[s][0]) * rows.row_bytes;
        if (threadIdx.x == 32) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n"
                         "cp.async.bulk.wait_group.read 1;" ::"l"(dst),
                         "r"(in_shared(ring.stage[s])), "r"(16 * half)
                         : "memory");
            if (turn > 0)
                arrive(&ring.empty[(s + ring_stages - 1) % ring_stages]);
        }
        if (threadIdx.x < 64)
            continue;
        for (uint32_t w = half + threadIdx.x - 64; w < words; w += threads * loads) {
            uint4 v[loads];
            for (uint32_t k = 0; k < loads; k++)
                if (w + k * threads < words)
                    v[k] = ((const uint4 *)ring.stage[s])[w + k * threads];
            for (uint32_t k = 0; k < loads; k++)
                if (w + k * threads < words)
                    __stcs((uint4 *)dst + w + k * threads, v[k]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            arrive(&ring.empty[s]);
    }
    if (threadIdx.x == 32)
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

static __device__ void store_chunks(ring_memory &ring, const row_list &rows, uint32_t in_chunk, uint32_t chunks)
{
    constexpr uint32_t threads = 32 * ring_store_warps, loads = 4;
    const uint32_t words = rows.row_bytes / 16, magic = uint32_t(((uint64_t(1) << 32) + words - 1) / words);
    if (in_chunk == 1) {
        store_rows(ring, rows);
        return;
    }
    for (uint32_t chunk = blockIdx.x, turn = 0; chunk < chunks; chunk += gridDim.x, turn++) {
        const uint32_t s = turn % ring_stages, all = min(rows.count - chunk * in_chunk, in_chunk) * words;
        wait_for(&ring.full[s], turn / ring_stages % 2);
        for (uint32_t w = threadIdx.x - 32; w < all; w += threads * loads) {
            uint4 v[loads];
            for (uint32_t k = 0; k < loads; k++)
                if (w + k * threads < all)
                    v[k] = ((const uint4 *)ring.stage[s])[w + k * threads];
            for (uint32_t k = 0; k < loads; k++) {
                const uint32_t word = w + k * threads, row = __umulhi(word, magic);
                if (word < all)
                    __stcs((uint4 *)(rows.dst + int64_t(ring.to[s][row]) * rows.row_bytes) + (word - row * words),
                           v[k]);
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            arrive(&ring.empty[s]);
    }
}

static __global__ void __launch_bounds__(32 + 32 * ring_store_warps, 1)
    sglang_ring(const row_list rows, uint32_t in_chunk, uint32_t chunks)
{
    extern __shared__ __align__(128) char shared[];
    ring_memory &ring = *reinterpret_cast<ring_memory *>(shared);
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < ring_stages; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(&ring.full[s])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(&ring.empty[s])),
                         "r"(ring_store_warps)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 32)
        load_chunks(ring, rows, in_chunk, chunks);
    else
        store_chunks(ring, rows, in_chunk, chunks);
}

static void enqueue_registers(const row_list &rows, unsigned blocks, cudaStream_t on)
{
    (rows.row_bytes <= 512    ? sglang_registers<8, 4>
     : rows.row_bytes <= 1024 ? sglang_registers<16, 4>
     : rows.row_bytes <= 2048 ? sglang_registers<32, 4>
                              : sglang_registers<32, 8>)<<<blocks, 1024, 0, on>>>(rows);
    CUDA(cudaGetLastError());
}

static bool ring_takes(int64_t row_bytes)
{
    return row_bytes % 16 == 0 && row_bytes > 16 && row_bytes <= ring_stage_bytes;
}

static void enqueue_ring(const row_list &rows, unsigned blocks, cudaStream_t on)
{
    static const cudaError_t allowed =
        cudaFuncSetAttribute(sglang_ring, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(ring_memory));
    CUDA(allowed);
    uint32_t in_chunk = 1;
    while (2 * in_chunk <= ring_rows && 2 * in_chunk * rows.row_bytes <= ring_stage_bytes)
        in_chunk *= 2;
    sglang_ring<<<blocks, 32 + 32 * ring_store_warps, sizeof(ring_memory), on>>>(
        rows, in_chunk, (rows.count + in_chunk - 1) / in_chunk);
    CUDA(cudaGetLastError());
}

/* ---- jobs ---- */

/* Packed rows of packed layers, random on both sides. */
struct job {
    char *dst, *src;
    int64_t row_bytes;
    int32_t layers;
    const index_sets *to, *from;
};

static int64_t bytes_of(const job &j)
{
    return j.layers * j.to->count * j.row_bytes;
}

/* Moves the first `rows` of the job's rows. */
static void enqueue_job(const job &j, int64_t rows, int32_t max_sms, int i, cudaStream_t on)
{
    const kvprim_transfer_desc d = transfer_of(table_at(j.dst, j.to->rows), table_at(j.src, j.from->rows), j.row_bytes,
                                               j.layers, j.to->set(i), j.from->set(i), rows);
    kvprim_cuda_launch launch = on_stream(false, max_sms);
    launch.stream = on;
    check_kvprim(kvprim_cuda_transfer(&d, &launch));
}

static row_list list_of(const job &j, int i)
{
    return {j.dst, j.src, j.to->set(i), j.from->set(i), uint32_t(j.row_bytes), uint32_t(j.to->count)};
}

/* Returns the copies of the first rows, for each set of indices. */
static std::vector<copy_list> make_lists(const job &j, int64_t rows)
{
    std::vector<copy_list> lists(turns);
    for (int i = 0; i < turns; i++)
        for (int64_t r = 0; r < rows; r++)
            lists[size_t(i)].add(j.dst + j.to->host_set(i)[r] * j.row_bytes,
                                 j.src + j.from->host_set(i)[r] * j.row_bytes, size_t(j.row_bytes));
    return lists;
}

/* The first `count` rows of every layer. */
struct moved_rows {
    job j;
    int64_t count, to_rows, from_rows;
    const int32_t *to, *from;

    __device__ piece operator()(int64_t n) const
    {
        const int64_t layer = n / count, r = n % count;
        return {j.dst + (layer * to_rows + to[r]) * j.row_bytes, j.src + (layer * from_rows + from[r]) * j.row_bytes,
                j.row_bytes};
    }
};

/* ---- contenders ---- */

/* Moves the first `rows` of the job's rows. `plain`: once, from a stream, as whatever waits for it does. */
static contender contend(const char *name, const job &j, int64_t rows, const std::function<void(int)> &enqueue,
                         bool plain = false)
{
    contender c = {name, enqueue, double(j.layers * rows * j.row_bytes), plain ? 1 : 4, plain};
    check_pieces(c, "rows of " + size_name(j.row_bytes), j.layers * rows, [j, rows](int i) {
        return moved_rows{j, rows, j.to->rows, j.from->rows, j.to->set(i), j.from->set(i)};
    });
    return c;
}

static contender contend_kvprim(const job &j, int32_t max_sms)
{
    return contend("kvprim", j, j.to->count, [j, max_sms](int i) { enqueue_job(j, j.to->count, max_sms, i, stream); });
}

static contender contend_copy(char *dst, const char *src, bool plain)
{
    const auto copy = [=](int) { CUDA(cudaMemcpyAsync(dst, src, size_t(copy_bytes), cudaMemcpyDefault, stream)); };
    return {"copy", copy, double(copy_bytes), 4, plain};
}

/* ---- pinned host memory ---- */

/* Moves all rows of a job of one layer, on a stream. */
struct mover {
    const char *name;
    std::function<void(const job &, int, cudaStream_t)> enqueue;
    bool (*takes)(int64_t row_bytes) = [](int64_t) { return true; };
};

static void copy_all(const job &j, int, cudaStream_t on)
{
    CUDA(cudaMemcpyAsync(j.dst, j.src, size_t(bytes_of(j)), cudaMemcpyDefault, on));
}

static mover move_by_kvprim(const char *name, int32_t max_sms)
{
    return {name, [=](const job &j, int i, cudaStream_t on) { enqueue_job(j, j.to->count, max_sms, i, on); }};
}

static mover move_by_registers(const char *name, unsigned blocks)
{
    return {name, [=](const job &j, int i, cudaStream_t on) { enqueue_registers(list_of(j, i), blocks, on); },
            [](int64_t row_bytes) { return row_bytes % 16 == 0; }};
}

static mover move_by_ring(const char *name, unsigned blocks)
{
    return {name, [=](const job &j, int i, cudaStream_t on) { enqueue_ring(list_of(j, i), blocks, on); }, ring_takes};
}

/* The rows of one layer in pinned memory, and in the GPU's. */
struct host_rows {
    index_sets in_host, in_device;
    job out, in;

    explicit host_rows(int64_t row_bytes, int64_t bytes = copy_bytes)
        : in_host(host_bytes / row_bytes, bytes / row_bytes, turns, 1),
          in_device(host_bytes / row_bytes, bytes / row_bytes, turns, 2)
    {
        out = {host_memory, device_memory[0], row_bytes, 1, &in_host, &in_device};
        in = {device_memory[1], host_memory, row_bytes, 1, &in_device, &in_host};
    }
};

/* Times both from the call to the end of its work, including the host's time. Returns the first's time divided by the
   second's. */
static double called_ratio(const std::function<void(int)> &first, const std::function<void(int)> &second)
{
    std::vector<double> us[2];
    for (int r = 0; r < 18; r++) {
        CUDA(cudaStreamSynchronize(stream));
        const double begin = now_us();
        (r % 2 ? second : first)(r / 2);
        CUDA(cudaStreamSynchronize(stream));
        us[r % 2].push_back(now_us() - begin);
    }
    return median(us[0]) / median(us[1]);
}

static void host_point(const job &j, bool out, std::vector<figure> *kernels, std::vector<figure> *batches)
{
    const int64_t rows = j.to->count, batch_rows = std::min(rows, 64 * MiB / j.row_bytes);
    const int64_t each_rows = std::min<int64_t>(rows, 2000);
    const std::vector<mover> movers = {move_by_kvprim("kvprim", 0), move_by_kvprim("kvprim, 8 SMs", 8),
                                       move_by_registers("registers", 2), move_by_ring("ring", 2),
                                       move_by_ring("ring", 4)};
    std::vector<contender> c;
    for (const mover &m : movers)
        if (m.takes(j.row_bytes))
            c.push_back(contend(m.name, j, rows, [m, j](int i) { m.enqueue(j, i, stream); }));
    c.push_back(contend_copy(j.dst, j.src, false));
    std::vector<copy_list> lists = make_lists(j, batch_rows), few = make_lists(j, each_rows);
    const auto batch_call = [&](int i) { lists[size_t(i % turns)].enqueue(); };
    c.push_back(contend("batch", j, batch_rows, batch_call, true));
    c.push_back(contend(
        "copies", j, each_rows, [&](int i) { few[size_t(i % turns)].enqueue_each(); }, true));
    measure(c);
    const double called = called_ratio(batch_call, [&](int i) { enqueue_job(j, batch_rows, 0, i, stream); });
    printf("%8s %8s", out ? "to host" : "to GPU", size_name(j.row_bytes).c_str());
    size_t at = 0;
    double best = 0;
    for (const mover &m : movers) {
        const bool has = m.takes(j.row_bytes);
        print_numbers({has ? gb_per_s(c[at]) : NAN}, 8, 1);
        if (has && at > 1)
            best = std::max(best, gb_per_s(c[at]));
        at += has;
    }
    for (; at < c.size(); at++)
        print_numbers({gb_per_s(c[at])}, 8, 1);
    const double copy = gb_per_s(c[c.size() - 3]), got = gb_per_s(c[0]);
    printf(" %8.3f %8.2f\n", got / copy, called);
    const std::string where = std::string(out ? "to host " : "to GPU ") + size_name(j.row_bytes);
    if (best > 0)
        kernels->push_back({got / best, where});
    if (j.row_bytes == 4 * KiB)
        batches->push_back({called, where});
}

static void host()
{
    std::vector<figure> kernels, batches;
    printf(
        "\npinned host memory: GB/s of kvprim, also on 8 SMs; of SGLang's register kernel on 2 SMs, and its ring on 2\n"
        "and 4; of a copy of 256 MiB; of cudaMemcpyBatchAsync and of a cudaMemcpyAsync for each row; kvprim against\n"
        "the copy, and against the batch from the call to the end of its work\n"
        "%8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
        "", "row", "kvprim", "8 SMs", "regs 2", "ring 2", "ring 4", "copy", "batch", "each", "/ copy", "called");
    for (const int64_t row_bytes :
         {int64_t(656), int64_t(1000), KiB, int64_t(1152), 2 * KiB, 4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB})
        if (!quick || row_bytes == 4 * KiB || row_bytes == 64 * KiB) {
            const host_rows rows(row_bytes);
            host_point(rows.out, true, &kernels, &batches);
            host_point(rows.in, false, &kernels, &batches);
        }
    judge_worst("pinned host memory / the best of SGLang's kernels", kernels, '>', 0.97);
    judge_worst("host memory / cudaMemcpyBatchAsync, 4 KB, called", batches, '>', 4);
}

/* ---- rows without an index ---- */

/* `rows` rows of every layer, which lie twice their size apart in pinned memory if `apart`. */
struct row_run {
    bool out;
    int64_t row_bytes, rows;
    int32_t layers;
    bool apart;
};

static void enqueue_run(const row_run &r)
{
    const int64_t step = r.apart ? 2 * r.row_bytes : 0;
    const kvprim_table host = table_at(host_memory, r.rows, step), device = table_at(device_memory[!r.out], r.rows);
    kvprim_transfer_desc d = {};
    d.dst = r.out ? host : device, d.src = r.out ? device : host;
    d.row_bytes = r.row_bytes, d.layers = r.layers, d.count = r.rows;
    call_kvprim(kvprim_cuda_transfer, d);
}

/* Copies the same bytes: joined rows as one, others by 2D copies, one a layer. */
static void copy_run(const row_run &r)
{
    const int64_t host_step = (r.apart ? 2 : 1) * r.row_bytes, bytes = r.rows * r.row_bytes;
    for (int32_t l = 0; l < (r.apart ? r.layers : 1); l++) {
        char *const in_host = host_memory + l * r.rows * host_step, *const there = device_memory[!r.out] + l * bytes;
        char *const dst = r.out ? in_host : there, *const src = r.out ? there : in_host;
        if (r.apart)
            CUDA(cudaMemcpy2DAsync(dst, size_t(r.out ? host_step : r.row_bytes), src,
                                   size_t(r.out ? r.row_bytes : host_step), size_t(r.row_bytes), size_t(r.rows),
                                   cudaMemcpyDefault, stream));
        else
            CUDA(cudaMemcpyAsync(dst, src, size_t(r.layers * bytes), cudaMemcpyDefault, stream));
    }
}

static void run_point(const row_run &r, std::vector<figure> *all, std::vector<figure> *calls)
{
    const double bytes = double(r.row_bytes * r.rows * r.layers);
    const auto ours = [r](int) { enqueue_run(r); };
    const auto engine = [r](int) { copy_run(r); };
    std::vector<contender> c = {{"kvprim", ours, bytes, 16, true},
                                {"copy", engine, bytes, 16, true},
                                {"kvprim", ours, bytes, 16},
                                {"copy", engine, bytes, 16}};
    measure(c);
    const double called = called_ratio(ours, engine);
    const char *const way = r.out ? "to host" : "to GPU";
    const std::string row = size_name(r.row_bytes),
                      where = way + (" " + std::to_string(r.rows * r.layers)) + " x " + row;
    printf("%8s %8s %8lld %8d %8s %8.1f %8.1f %8.1f %8.1f %8.3f\n", way, row.c_str(), (long long)r.rows, r.layers,
           r.apart ? "apart" : "joined", gb_per_s(c[0]), gb_per_s(c[1]), gb_per_s(c[2]), gb_per_s(c[3]), called);
    if (bytes >= double(MiB)) /* of shorter ones the host's time to enqueue shows */
        all->push_back({c[1].us / c[0].us, where});
    if (bytes >= double(64 * KiB))
        calls->push_back({called, where});
}

static void runs()
{
    std::vector<figure> all, calls;
    printf("\npinned host memory, rows without an index: GB/s of kvprim and of the copy engine, called one after the\n"
           "other and in a graph; and kvprim's time against the engine's from the call to the end of its work\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "rows", "layers", "", "kvprim", "copy", "graph", "copy", "called");
    for (const bool out : {true, false}) {
        for (const int64_t row_bytes : {16 * KiB, 64 * KiB, 256 * KiB, MiB, 16 * MiB})
            run_point({out, row_bytes, 1, 1, false}, &all, &calls);
        run_point({out, 4 * KiB, 4096, 1, false}, &all, &calls);
        for (const int64_t row_bytes : {16 * KiB, 64 * KiB, 256 * KiB})
            run_point({out, row_bytes, 64, 1, true}, &all, &calls);
        for (const int64_t row_bytes : {64 * KiB, MiB})
            run_point({out, row_bytes, 4, 61, true}, &all, &calls);
    }
    judge_worst("host memory without an index / copy engine, 1 MB and more", all, '>', 0.99);
    judge_worst("the same, called, of its time, 64 KB and more", calls, '<', 1.1);
}

/* ---- both directions at once, and beside other work ---- */

constexpr int neighbours = 40; /* kernels of other work that run one after the other */
static cudaStream_t second_stream;
static cudaEvent_t marks[neighbours + 3];

static double ms_between(cudaEvent_t a, cudaEvent_t b)
{
    float ms;
    CUDA(cudaEventElapsedTime(&ms, a, b));
    return double(ms);
}

/* Returns GB/s in sum, from the common start to the later end. */
static double gb_of_both(const mover &m, const host_rows &rows)
{
    std::vector<double> gb;
    for (int r = 0; r < 6; r++) {
        spin<<<1, 1, 0, stream>>>(200000);
        CUDA(cudaEventRecord(marks[0], stream));
        CUDA(cudaStreamWaitEvent(second_stream, marks[0], 0));
        m.enqueue(rows.out, r, stream);
        m.enqueue(rows.in, r, second_stream);
        CUDA(cudaEventRecord(marks[1], stream));
        CUDA(cudaEventRecord(marks[2], second_stream));
        CUDA(cudaDeviceSynchronize());
        const double ms = std::max(ms_between(marks[0], marks[1]), ms_between(marks[0], marks[2]));
        if (r > 0)
            gb.push_back(1e-6 * double(bytes_of(rows.out) + bytes_of(rows.in)) / ms);
    }
    return median(gb);
}

static void both()
{
    const std::vector<mover> movers = {move_by_kvprim("kvprim", 0),  move_by_kvprim("8 SMs", 8),
                                       move_by_registers("regs", 2), move_by_ring("ring 1", 1),
                                       move_by_ring("ring 2", 2),    {"engine", copy_all}};
    std::vector<figure> all;
    printf("\npinned host memory, both directions at once: GB/s in sum, each opponent on that many SMs per direction\n"
           "%8s",
           "row");
    for (const mover &m : movers)
        printf(" %8s", m.name);
    printf("\n");
    for (const int64_t row_bytes : {KiB, 4 * KiB, 16 * KiB, 64 * KiB}) {
        const host_rows rows(row_bytes);
        double best = 0, got = 0;
        printf("%8s", size_name(row_bytes).c_str());
        for (size_t k = 0; k < movers.size(); k++) {
            const double gb = movers[k].takes(row_bytes) ? gb_of_both(movers[k], rows) : 0;
            got = k == 0 ? gb : got;
            best = k > 1 && k < 5 ? std::max(best, gb) : best;
            printf(" %8.1f", gb);
        }
        printf("\n");
        if (best > 0)
            all.push_back({got / best, size_name(row_bytes)});
    }
    judge_worst("both directions at once / the best of SGLang's kernels", all, '>', 1);
}

/* Copies 512 MiB: every thread 4 words of 16 bytes. */
static __global__ void __launch_bounds__(256) copy_much(uint4 *dst, const uint4 *src)
{
    const size_t at = size_t(blockIdx.x) * 1024 + threadIdx.x;
    uint4 v[4];
    for (int k = 0; k < 4; k++)
        v[k] = src[at + size_t(256 * k)];
    for (int k = 0; k < 4; k++)
        dst[at + size_t(256 * k)] = v[k];
}

/* Reads 1 GiB. */
static __global__ void __launch_bounds__(256) read_much(uint32_t *dst, const uint4 *src)
{
    const size_t at = size_t(blockIdx.x) * 4096 + threadIdx.x;
    uint32_t sum = 0;
    for (int round = 0; round < 2; round++) {
        uint4 v[8];
        for (int k = 0; k < 8; k++)
            v[k] = src[at + size_t(256 * (8 * round + k))];
        for (int k = 0; k < 8; k++)
            sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 1)
        *dst = sum;
}

/* Half of every SM's threads, none of which waits for memory. */
static __global__ void __launch_bounds__(1024) multiply_much(float *dst, int rounds)
{
    float a = float(threadIdx.x), b = a + 1, c = a + 2, d = a + 3;
    for (int i = 0; i < rounds; i++)
        a = a * b + c, b = b * c + d, c = c * d + a, d = d * a + b;
    if (a + b + c + d == 1.5f)
        *dst = a;
}

enum work { COPY, READ, ARITHMETIC };
static const char *const work_names[] = {"copy", "read", "arithmetic"};
static double alone_ms[3];

static void enqueue_work(work w, cudaStream_t on)
{
    static int sms;
    char *const dst = device_memory[1] + device_bytes / 2, *const src = device_memory[0] + device_bytes / 2;
    if (w == COPY)
        copy_much<<<unsigned(512 * MiB / 16384), 256, 0, on>>>((uint4 *)dst, (const uint4 *)src);
    else if (w == READ)
        read_much<<<unsigned(GiB / 65536), 256, 0, on>>>((uint32_t *)dst, (const uint4 *)src);
    else {
        if (sms == 0)
            CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        multiply_much<<<unsigned(sms), 1024, 0, on>>>((float *)dst, 20000);
    }
    CUDA(cudaGetLastError());
}

static void measure_alone()
{
    for (const work w : {COPY, READ, ARITHMETIC}) {
        std::vector<double> ms;
        for (int k = 0; k <= 12; k++) {
            CUDA(cudaEventRecord(marks[k], stream));
            enqueue_work(w, stream);
        }
        CUDA(cudaStreamSynchronize(stream));
        for (int k = 2; k < 12; k++)
            ms.push_back(ms_between(marks[k], marks[k + 1]));
        alone_ms[w] = median(ms);
    }
    printf("\nbeside other work: a copy kernel alone takes %.0f us (%.0f GB/s), a kernel that reads %.0f (%.0f GB/s), "
           "one of "
           "arithmetic %.0f\n",
           1e3 * alone_ms[COPY], 1e-6 * double(GiB) / alone_ms[COPY], 1e3 * alone_ms[READ],
           1e-6 * double(GiB) / alone_ms[READ], 1e3 * alone_ms[ARITHMETIC]);
}

struct side_by_side {
    double slower, gb; /* the other work's time against that alone; GB/s of the transfer */
};

/* The transfer begins first. Of the other kernels those count that begin and end while it runs; they go on until it has
   ended. */
static side_by_side run_beside(work w, const mover &m, const job &j)
{
    std::vector<double> slower, gb;
    for (int r = 0, n = neighbours; r < (quick ? 2 : 4); r++) {
        spin<<<1, 1, 0, stream>>>(400000);
        CUDA(cudaEventRecord(marks[0], stream));
        m.enqueue(j, r, stream);
        CUDA(cudaEventRecord(marks[1], stream));
        CUDA(cudaStreamWaitEvent(second_stream, marks[0], 0));
        for (int k = 0; k < n; k++) {
            CUDA(cudaEventRecord(marks[2 + k], second_stream));
            enqueue_work(w, second_stream);
        }
        CUDA(cudaEventRecord(marks[2 + n], second_stream));
        CUDA(cudaDeviceSynchronize());
        const double ms = ms_between(marks[0], marks[1]);
        if (r == 0)
            continue;
        for (int k = 1; k < n && ms_between(marks[0], marks[3 + k]) < ms; k++)
            slower.push_back(ms_between(marks[2 + k], marks[3 + k]) / alone_ms[w]);
        gb.push_back(1e-6 * double(bytes_of(j)) / ms);
    }
    return {slower.empty() ? 0 : median(slower), median(gb)};
}

static void beside()
{
    const std::vector<mover> movers = {move_by_kvprim("kvprim", 0), move_by_kvprim("4 SMs", 4),
                                       move_by_kvprim("8 SMs", 8),  move_by_registers("regs 2", 2),
                                       move_by_ring("ring 1", 1),   move_by_ring("ring 2", 2),
                                       move_by_ring("ring 4", 4),   {"engine", copy_all}};
    measure_alone();
    printf("their time beside a transfer, against that alone, and GB/s of the transfer\n%8s %8s %11s", "", "row", "");
    for (const mover &m : movers)
        printf(" %11s", m.name);
    printf("\n");
    for (const bool out : {true, false})
        for (const int64_t row_bytes : {KiB, 4 * KiB}) {
            std::vector<figure> slower, gb;
            const host_rows rows(row_bytes);
            for (const work w : {COPY, READ, ARITHMETIC}) {
                printf("%8s %8s %11s", out ? "to host" : "to GPU", size_name(row_bytes).c_str(), work_names[w]);
                for (size_t k = 0; k < movers.size(); k++) {
                    const side_by_side s = run_beside(w, movers[k], out ? rows.out : rows.in);
                    printf(" %5.2f %5.1f", s.slower, s.gb);
                    if (k == 0 && w != ARITHMETIC) {
                        slower.push_back({s.slower, work_names[w]});
                        gb.push_back({s.gb, work_names[w]});
                    }
                }
                printf("\n");
            }
            const std::string what = std::string(out ? "to host" : "to GPU") + ", " + size_name(row_bytes) + ", ";
            judge_worst(what + "memory-bound work beside it takes", slower, '<', out ? 1.05 : 1.08);
            if (row_bytes == 4 * KiB && out)
                judge_worst(what + "GB/s beside memory-bound work", gb, '>', 50);
        }
}

/* ---- few SMs, device memory ---- */

static void few()
{
    std::vector<figure> all;
    printf("\ndevice memory on few SMs: GB/s of kvprim, of SGLang's register kernel and of its ring\n%8s %8s %8s %8s "
           "%8s\n",
           "SMs", "row", "kvprim", "regs", "ring");
    for (const int32_t sms : {8, 16, 32})
        for (const int64_t row_bytes : {KiB, int64_t(1152), 2 * KiB, 4 * KiB, 8 * KiB, 16 * KiB, 32 * KiB}) {
            const index_sets to(device_bytes / row_bytes, copy_bytes / row_bytes, turns, 8),
                from(device_bytes / row_bytes, copy_bytes / row_bytes, turns, 9);
            const job j = {device_memory[1], device_memory[0], row_bytes, 1, &to, &from};
            std::vector<contender> c;
            for (const mover &m : {move_by_kvprim("kvprim", sms), move_by_registers("registers", unsigned(sms)),
                                   move_by_ring("ring", unsigned(sms))})
                c.push_back(contend(m.name, j, to.count, [m, j](int i) { m.enqueue(j, i, stream); }));
            measure(c);
            printf("%8d %8s %8.0f %8.0f %8.0f\n", sms, size_name(row_bytes).c_str(), 2 * gb_per_s(c[0]),
                   2 * gb_per_s(c[1]), 2 * gb_per_s(c[2]));
            all.push_back({std::min(c[1].us, c[2].us) / c[0].us, std::to_string(sms) + " SMs " + size_name(row_bytes)});
        }
    judge_worst("device memory on few SMs / the best of SGLang's kernels", all, '>', 0.95);
}

/* ---- device memory ---- */

static double device_copy; /* GB/s, read plus written */

static void measure_device_copy()
{
    std::vector<contender> c = {contend_copy(device_memory[1], device_memory[0], false),
                                contend_copy(device_memory[1], device_memory[0], true)};
    c[0].launches = c[1].launches = 24;
    measure(c);
    device_copy = 2 * std::max(gb_per_s(c[0]), gb_per_s(c[1]));
    printf("cudaMemcpyAsync device to device of 256 MiB: %.0f GB/s\n", device_copy);
}

/* Per layer of 64, which have room for 2,048 pages of 16 tokens of 2 KB. Returns the part of the copy's speed. */
static double device_point(const char *what, int64_t row_bytes, int64_t pages, int64_t offset)
{
    constexpr int64_t page_bytes = 32 * KiB, table_pages = 2048;
    constexpr int32_t layers = 64;
    const int64_t table_rows = table_pages * page_bytes / row_bytes - (offset > 0),
                  rows = pages * page_bytes / row_bytes;
    const index_sets to(table_rows, rows, turns, 3), from(table_rows, rows, turns, 4);
    const job j = {device_memory[1], device_memory[0] + offset, row_bytes, layers, &to, &from};
    std::vector<contender> c;
    for (const int32_t n : {0, 8, 16, 32, 64}) {
        c.push_back(contend_kvprim(j, n));
        c.back().launches = bytes_of(j) >= 64 * MiB ? 24 : 64;
    }
    measure(c);
    printf("%8s %8s %9.1f %9.2f", what, size_name(row_bytes).c_str(), double(bytes_of(j)) / double(MiB), c[0].us);
    for (const contender &k : c)
        printf(" %8.0f", 2 * gb_per_s(k));
    printf(" %8.3f\n", 2 * gb_per_s(c[0]) / device_copy);
    return 2 * gb_per_s(c[0]) / device_copy;
}

static void device()
{
    std::vector<figure> large;
    printf("\ndevice memory, 64 layers in one launch: GB/s on all and on some SMs, all against the copy\n"
           "%8s %8s %9s %9s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "MiB", "us", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "/ copy");
    for (const int64_t pages : {1, 8, 64, 128, 256, 512}) {
        const double part = device_point("pages", 32 * KiB, pages, 0);
        if (pages >= 128) /* 256 MiB in all layers */
            large.push_back({part, std::to_string(pages) + " pages"});
    }
    for (const int64_t row_bytes : {128, 256, 512, 1024, 2048})
        if (!quick || row_bytes == 2048)
            device_point("tokens", row_bytes, 128, 0);
    for (const int64_t row_bytes : {256, 2048})
        device_point("src + 3", row_bytes, 128, 3);
    judge_worst("device memory / copy, pages of 64 layers, 256 MiB and more", large, '>', 0.93);
}

/* ---- another GPU's memory ---- */

/* Returns the part of the copy's speed. */
static double peer_point(bool from_peer, int64_t row_bytes)
{
    const int64_t rows = copy_bytes / row_bytes;
    const index_sets to(host_bytes / row_bytes, rows, turns, 5), from(host_bytes / row_bytes, rows, turns, 6);
    char *const dst = from_peer ? device_memory[1] : peer_memory;
    char *const src = from_peer ? peer_memory : device_memory[0];
    const job j = {dst, src, row_bytes, 1, &to, &from};
    std::vector<contender> c;
    for (const int32_t n : {0, 8, 16, 32, 64})
        c.push_back(contend_kvprim(j, n));
    c.push_back(contend_copy(dst, src, true));
    c.back().enqueue = [=](int) {
        CUDA(cudaMemcpyPeerAsync(dst, from_peer ? 0 : 1, src, from_peer ? 1 : 0, size_t(copy_bytes), stream));
    };
    measure(c);
    printf("%8s %8s", from_peer ? "from it" : "to it", size_name(row_bytes).c_str());
    for (const contender &k : c)
        printf(" %8.1f", gb_per_s(k));
    printf(" %8.3f\n", gb_per_s(c[0]) / gb_per_s(c.back()));
    return gb_per_s(c[0]) / gb_per_s(c.back());
}

static void peer()
{
    int devices = 0, can = 0;
    CUDA(cudaGetDeviceCount(&devices));
    if (devices > 1)
        CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        printf("\nanother GPU's memory: none can be accessed\n");
        return;
    }
    CUDA(cudaDeviceEnablePeerAccess(1, 0));
    CUDA(cudaSetDevice(1));
    CUDA(cudaMalloc(&peer_memory, size_t(host_bytes)));
    CUDA(cudaSetDevice(0));
    CUDA(cudaMemcpyAsync(peer_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault, stream));
    printf("\nanother GPU's memory: GB/s on all and on some SMs, of cudaMemcpyPeerAsync of 256 MiB, all against that\n"
           "%8s %8s %8s %8s %8s %8s %8s %8s %8s\n",
           "", "row", "all", "8 SMs", "16 SMs", "32 SMs", "64 SMs", "copy", "/ copy");
    for (const bool from_peer : {false, true})
        for (const int64_t row_bytes : {KiB, 4 * KiB, 32 * KiB}) {
            const double part = peer_point(from_peer, row_bytes);
            if (!from_peer && row_bytes == 4 * KiB)
                judge("to another GPU / cudaMemcpyPeerAsync, 4 KB", part, '>', 0.85);
        }
    CUDA(cudaFree(peer_memory));
    CUDA(cudaDeviceDisablePeerAccess(1));
}

/* ---- layers that only the GPU knows, and rows that the host names ---- */

/* The layers of a job from the last to the first, in arrays of the host's and of the GPU's. */
struct layer_arrays {
    std::vector<void *> dst, src;
    on_device<void *> dst_on, src_on;

    explicit layer_arrays(const job &j)
    {
        for (int32_t l = j.layers; l-- > 0;) {
            dst.push_back(j.dst + l * j.to->rows * j.row_bytes);
            src.push_back(j.src + l * j.from->rows * j.row_bytes);
        }
        dst_on = upload(dst), src_on = upload(src);
    }
};

enum listing { HOST_ARRAYS, DEVICE_TABLES, HOST_LISTS };

static void transfer_listed(const job &j, const layer_arrays &layers, listing how, int64_t rows, int i)
{
    const bool tables = how == DEVICE_TABLES, lists = how == HOST_LISTS;
    const auto in_host = [](const char *p) { return p >= host_memory && p < host_memory + host_bytes; };
    kvprim_transfer_desc d =
        transfer_of(table_at(nullptr, j.to->rows), table_at(nullptr, j.from->rows), j.row_bytes, j.layers,
                    lists ? j.to->host_set(i) : j.to->set(i), lists ? j.from->host_set(i) : j.from->set(i), rows);
    (tables && !in_host(j.dst) ? d.dst_device_layers : d.dst_layers) =
        tables && !in_host(j.dst) ? layers.dst_on.get() : layers.dst.data();
    (tables && !in_host(j.src) ? d.src_device_layers : d.src_layers) =
        tables && !in_host(j.src) ? layers.src_on.get() : layers.src.data();
    d.host_index = lists;
    call_kvprim(kvprim_cuda_transfer, d);
}

/* Returns the time of `how` against the same transfer with arrays and indices as engines without them have them. */
static double listed_point(const char *where, char *dst, char *src, int64_t row_bytes, int32_t layers, int64_t rows,
                           listing how)
{
    const int64_t table_rows = std::max<int64_t>(2 * rows, 8192 * KiB / row_bytes);
    const index_sets to(table_rows, rows, turns, 31), from(table_rows, rows, turns, 32);
    const job j = {dst, src, row_bytes, layers, &to, &from};
    const layer_arrays arrays(j);
    std::vector<contender> c;
    for (const listing one : {HOST_ARRAYS, how}) {
        c.push_back(contend(one == HOST_ARRAYS     ? "host array"
                            : how == DEVICE_TABLES ? "device table"
                                                   : "host list",
                            j, rows, [&, one](int i) { transfer_listed(j, arrays, one, rows, i); }));
        c.back().launches = bytes_of(j) >= 32 * MiB ? 8 : 32;
    }
    measure(c);
    printf("%8s %8s %8d %8lld %9.2f %9.2f %8.3f\n", where, size_name(row_bytes).c_str(), layers, (long long)rows,
           c[0].us, c[1].us, c[1].us / c[0].us);
    return c[1].us / c[0].us;
}

static void listed_host_times()
{
    const int64_t row_bytes = KiB, rows = 32;
    const index_sets to(4096, 4096, 1, 33), from(4096, 4096, 1, 34);
    const job one = {device_memory[1], device_memory[0], row_bytes, 1, &to, &from};
    const job many = {device_memory[1], device_memory[0], row_bytes, 64, &to, &from};
    const layer_arrays of_one(one), of_many(many);
    const auto call = [=](const job &j, const layer_arrays &layers, listing how, int64_t n) {
        return [&, how, n] { transfer_listed(j, layers, how, n, 0); };
    };
    std::vector<host_call> calls = {
        {"empty kernel", [] { empty_kernel<<<1, 32, 0, stream>>>(); }},
        {"1 layer", call(one, of_one, HOST_ARRAYS, rows)},
        {"64 layers, host arrays", call(many, of_many, HOST_ARRAYS, rows)},
        {"64 layers, device tables", call(many, of_many, DEVICE_TABLES, rows)},
        {"1 layer, host lists of 32", call(one, of_one, HOST_LISTS, rows)},
        {"1 layer, host lists of 400", call(one, of_one, HOST_LISTS, 400)},
        {"1 layer, host lists of 4,000", call(one, of_one, HOST_LISTS, 4000)},
    };
    measure_host("host time of one call", calls, 201);
    judge("host: us of a call with 64 layers in device tables", calls[3].us, '<', 3.5);
}

static void listed()
{
    std::vector<figure> tables;
    const char *const head = "%8s %8s %8s %8s %9s %9s %8s\n";
    char *const out = device_memory[1], *const in = device_memory[0];
    printf("\nlayers in device tables against host arrays, us\n");
    printf(head, "", "row", "layers", "rows", "array", "table", "/ array");
    const auto table_point = [&](const char *where, char *dst, char *src, int64_t row_bytes, int64_t rows) {
        tables.push_back({listed_point(where, dst, src, row_bytes, 64, rows, DEVICE_TABLES),
                          std::string(where) + " " + size_name(row_bytes) + " x " + std::to_string(rows)});
    };
    for (const int64_t row_bytes : {int64_t(128), int64_t(576), KiB, 2 * KiB, 32 * KiB})
        for (const int64_t bytes : {32 * KiB, MiB, 8 * MiB})
            table_point("device", out, in, row_bytes, std::max<int64_t>(bytes / row_bytes, 1));
    table_point("src + 3", out, in + 3, 2 * KiB, 512);
    for (const int64_t row_bytes : {int64_t(656), KiB, 4 * KiB, 32 * KiB}) {
        table_point("to host", host_memory, in, row_bytes, MiB / row_bytes);
        table_point("to GPU", out, host_memory, row_bytes, MiB / row_bytes);
    }
    judge_worst("GPU time of device tables / host arrays, 64 layers", tables, '<', 1.03);
    printf("\nlists of the host against lists of the GPU, us\n");
    printf(head, "", "row", "layers", "rows", "GPU", "host", "/ GPU");
    for (const int64_t row_bytes : {int64_t(256), 2 * KiB})
        for (const int64_t rows : {8, 400, 1800, 4000, 30000})
            (void)listed_point("device", out, in, row_bytes, 1, rows, HOST_LISTS);
    for (const int64_t rows : {400, 4000}) {
        (void)listed_point("to host", host_memory, in, 4 * KiB, 1, rows, HOST_LISTS);
        (void)listed_point("to GPU", out, host_memory, 4 * KiB, 1, rows, HOST_LISTS);
    }
    listed_host_times();
}

/* ---- the program ---- */

static void open_all()
{
    open_gpu(2 * device_bytes + GiB);
    CUDA(cudaMallocHost(&host_memory, size_t(host_bytes)));
    for (char *&memory : device_memory)
        memory = allocate_hashed(device_bytes);
    CUDA(cudaMemcpy(host_memory, device_memory[0], size_t(host_bytes), cudaMemcpyDefault));
    CUDA(cudaStreamCreateWithFlags(&second_stream, cudaStreamNonBlocking));
    for (cudaEvent_t &mark : marks)
        CUDA(cudaEventCreate(&mark));
    measure_device_copy();
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all,
                       {{"host", host},
                        {"runs", runs},
                        {"both", both},
                        {"beside", beside},
                        {"few", few},
                        {"device", device},
                        {"listed", listed},
                        {"peer", peer}});
}

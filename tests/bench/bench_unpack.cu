/* SPDX-License-Identifier: MIT */
/* kvprim_cuda_unpack and kvprim_cuda_copy against other ways to copy fragments, on one GPU. Ratios compare times of one
   run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_unpack.cu -o build/bench_unpack
       build/bench_unpack [--quick] [--only batches|shifts|meta|single|pdl|case|host|copies]

   Sources lie in random order in slots of a receive buffer; destinations follow each other. GB/s counts bytes read plus
   bytes written. Times are microseconds per call, as bench_gpu.h takes them, over rotating buffers.

   kvprim    kvprim_cuda_unpack
   meta      kvprim_cuda_unpack_meta, which reads descriptors and their count on the GPU; in its cache, not cached, and
             in the host's memory (mapped)
   cub       cub::DeviceMemcpy::Batched
   warp      one warp per descriptor, descriptors in device memory; four loads, then four stores
   each      cudaMemcpyAsync per fragment
   batch     cudaMemcpyBatchAsync; this and `each` from a stream, as a graph would need a node for each fragment */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include <cub/device/device_memcpy.cuh>
#include <random>

constexpr int64_t side_bytes = 6 * GiB; /* of all sources, and of all destinations */
constexpr int rotations = 64;           /* as many as launches: none finds its bytes in the cache */

static char *src_memory, *dst_memory, *cub_memory;
constexpr size_t cub_memory_bytes = 256 * MiB;

/* ---- batches ---- */

struct batch {
    std::string name;
    int shift; /* bytes that sources begin past an aligned address */
    std::vector<kvprim_fragment> fragments;
    std::vector<std::vector<kvprim_copy_item>> items; /* the same by address, one list for each rotation */
    int64_t total = 0, src_bytes = 0, dst_bytes = 0;
    on_device<kvprim_fragment> described; /* a copy of them */
    on_device<const void *> srcs;         /* for CUB, one part for each rotation */
    on_device<void *> dsts;
    on_device<size_t> sizes;

    batch(const char *name_, const std::vector<uint64_t> &bytes, int shift_, bool scattered = false);

    int turns() const
    {
        return int(std::min<int64_t>(rotations, side_bytes / std::max(src_bytes, dst_bytes)));
    }
    char *dst(int i) const
    {
        return dst_memory + i % turns() * ((dst_bytes + 255) / 256 * 256);
    }
    char *src(int i) const
    {
        return src_memory + i % turns() * ((src_bytes + 255) / 256 * 256);
    }
};

/* scattered: destinations lie in random order, too. */
batch::batch(const char *name_, const std::vector<uint64_t> &bytes, int shift_, bool scattered)
    : name(name_), shift(shift_)
{
    const size_t n = bytes.size();
    std::vector<size_t> slot(n);
    std::mt19937 random(5);
    for (size_t i = 0; i < n; i++)
        slot[i] = i;
    std::shuffle(slot.begin(), slot.end(), random);
    fragments.resize(n);
    for (const size_t i : slot) {
        fragments[i].src_offset = uint64_t(src_bytes + shift);
        src_bytes += (int64_t(bytes[i]) + shift + 255) / 256 * 256;
    }
    std::sort(slot.begin(), slot.end());
    if (scattered)
        std::shuffle(slot.begin(), slot.end(), random);
    for (const size_t i : slot) {
        fragments[i].dst_offset = uint64_t(dst_bytes);
        fragments[i].bytes = bytes[i];
        dst_bytes += shift ? int64_t(bytes[i]) : (int64_t(bytes[i]) + 15) / 16 * 16;
        total += int64_t(bytes[i]);
    }
    described = upload(fragments);
    std::vector<const void *> s;
    std::vector<void *> d;
    items.resize(size_t(turns()));
    for (int i = 0; i < turns(); i++)
        for (const kvprim_fragment &f : fragments) {
            s.push_back(src(i) + f.src_offset);
            d.push_back(dst(i) + f.dst_offset);
            items[size_t(i)].push_back({s.back(), d.back(), f.bytes});
        }
    srcs = upload(s);
    dsts = upload(d);
    sizes = upload(std::vector<size_t>(bytes.begin(), bytes.end()));
}

static std::vector<uint64_t> equal(uint64_t bytes, int64_t total)
{
    return std::vector<uint64_t>(size_t(total) / bytes, bytes);
}

/* Sizes from `low` to `high` bytes, multiples of `unit`, whose logarithms are evenly distributed. */
static std::vector<uint64_t> mix(uint64_t low, uint64_t high, int64_t total, uint64_t unit, unsigned seed)
{
    std::mt19937 random(seed);
    const std::uniform_real_distribution<> where(std::log2(double(low)), std::log2(double(high)));
    std::vector<uint64_t> bytes;
    for (int64_t sum = 0; sum < total; sum += int64_t(bytes.back()))
        bytes.push_back(uint64_t(std::exp2(std::uniform_real_distribution<>(where)(random))) / unit * unit);
    return bytes;
}

static std::vector<uint64_t> skewed()
{
    std::vector<uint64_t> bytes(2000, 512);
    bytes.push_back(uint64_t(64 * MiB));
    return bytes;
}

static std::vector<uint64_t> small_mixed()
{
    std::mt19937 random(9);
    std::vector<uint64_t> bytes(65536);
    for (uint64_t &b : bytes)
        b = 64 + random() % 29 * 16;
    return bytes;
}

/* size: bytes of a fragment; 0: mixed. */
struct fragment_case {
    const char *name;
    int64_t size;
    std::vector<uint64_t> bytes;
};

static std::vector<fragment_case> fragment_cases(const std::vector<std::string> &names)
{
    const std::vector<fragment_case> all = {{"128 x 4 KB", 4096, equal(4096, MiB / 2)},
                                            {"1,024 x 4 KB", 4096, equal(4096, 4 * MiB)},
                                            {"2,048 x 4 KB", 4096, equal(4096, 8 * MiB)},
                                            {"65,536 x 256 B", 256, equal(256, 16 * MiB)},
                                            {"65,536 x 1 KB", 1024, equal(1024, 64 * MiB)},
                                            {"32,768 x 4 KB", 4096, equal(4096, 128 * MiB)},
                                            {"2,048 x 64 KB", 65536, equal(65536, 128 * MiB)},
                                            {"128 x 1 MB", MiB, equal(MiB, 128 * MiB)},
                                            {"64 B to 128 KB, 96 MB", 0, mix(64, 128 * KiB, 96 * MiB, 1, 7)},
                                            {"2,000 x 512 B and 64 MB", 0, skewed()},
                                            {"65,536 x 64 B to 512 B", 0, small_mixed()}};
    std::vector<fragment_case> chosen;
    for (const std::string &name : names)
        for (const fragment_case &c : all)
            if (name == c.name)
                chosen.push_back(c);
    return chosen;
}

/* ---- contenders ---- */

static kvprim_unpack_desc describe(const batch &b, int i)
{
    kvprim_unpack_desc d = {};
    d.src = b.src(i), d.src_bytes = uint64_t(b.src_bytes);
    d.dst = b.dst(i), d.dst_bytes = uint64_t(b.dst_bytes);
    d.fragments = b.fragments.data(), d.count = b.fragments.size();
    return d;
}

template <bool pdl> static void unpack(const batch &b, int i)
{
    call_kvprim(kvprim_cuda_unpack, describe(b, i), pdl);
}

/* A compiler that cannot assume that dst and src lie apart stores each word before it loads the next. */
template <class word>
__device__ static void copy_words(word *__restrict__ dst, const word *__restrict__ src, uint64_t count)
{
    uint64_t w = threadIdx.x % 32;
    for (; w + 96 < count; w += 128) {
        const word a = src[w], b = src[w + 32], c = src[w + 64], d = src[w + 96];
        dst[w] = a, dst[w + 32] = b, dst[w + 64] = c, dst[w + 96] = d;
    }
    for (; w < count; w += 32)
        dst[w] = src[w];
}

__device__ static void copy_by_warp(char *dst, const char *src, uint64_t bytes)
{
    const uint64_t words = (uintptr_t(src) | uintptr_t(dst)) % 16 ? 0 : bytes / 16;
    copy_words(reinterpret_cast<uint4 *>(dst), reinterpret_cast<const uint4 *>(src), words);
    copy_words(dst + 16 * words, src + 16 * words, bytes - 16 * words);
}

__global__ static void unpack_by_warps(char *dst, const char *src, const kvprim_fragment *fragments, unsigned count)
{
    for (unsigned w = (blockIdx.x * blockDim.x + threadIdx.x) / 32; w < count; w += gridDim.x * blockDim.x / 32)
        copy_by_warp(dst + fragments[w].dst_offset, src + fragments[w].src_offset, fragments[w].bytes);
}

static void enqueue_warps(const batch &b, int i)
{
    const unsigned count = unsigned(b.fragments.size());
    unpack_by_warps<<<std::min((count + 7) / 8, 132u * 8), 256, 0, stream>>>(b.dst(i), b.src(i), b.described.get(),
                                                                             count);
    CUDA(cudaGetLastError());
}

static void enqueue_cub(const batch &b, int i)
{
    const size_t n = b.fragments.size(), first = size_t(i % b.turns()) * n;
    const void **const srcs = b.srcs.get() + first;
    void **const dsts = b.dsts.get() + first;
    size_t bytes = 0;
    CUDA(cub::DeviceMemcpy::Batched(nullptr, bytes, srcs, dsts, b.sizes.get(), unsigned(n), stream));
    if (bytes > cub_memory_bytes) {
        fprintf(stderr, "CUB wants %zu bytes\n", bytes);
        exit(2);
    }
    CUDA(cub::DeviceMemcpy::Batched(cub_memory, bytes, srcs, dsts, b.sizes.get(), unsigned(n), stream));
}

static void enqueue_each(const batch &b, int i)
{
    for (const kvprim_fragment &f : b.fragments)
        CUDA(cudaMemcpyAsync(b.dst(i) + f.dst_offset, b.src(i) + f.src_offset, f.bytes, cudaMemcpyDeviceToDevice,
                             stream));
}

static void enqueue_batch(const batch &b, int i)
{
    static copy_list list;
    list.clear();
    for (const kvprim_fragment &f : b.fragments)
        list.add(b.dst(i) + f.dst_offset, b.src(i) + f.src_offset, f.bytes);
    list.enqueue();
}

struct described_fragments {
    char *dst;
    const char *src;
    const kvprim_fragment *fragments;

    __device__ piece operator()(int64_t n) const
    {
        const kvprim_fragment f = fragments[n];
        return {dst + f.dst_offset, src + f.src_offset, int64_t(f.bytes)};
    }
};

static contender contend(const char *name, const batch &b, void (*enqueue)(const batch &, int))
{
    contender c = {name, [&b, enqueue](int i) { enqueue(b, i); }, 2 * double(b.total), b.total > 32 * MiB ? 24 : 64};
    check_pieces(c, b.name, int64_t(b.fragments.size()), [&b](int i) {
        return described_fragments{b.dst(i), b.src(i), b.described.get()};
    });
    return c;
}

/* Times calls that take milliseconds: the GPU need not be kept busy until they are enqueued. */
static double time_plainly(const contender &c)
{
    std::vector<double> us;
    for (int r = 0; r < (quick ? 1 : 3); r++) {
        if (r == 0)
            c.poison(0);
        CUDA(cudaEventRecord(start_event, stream));
        c.enqueue(0);
        CUDA(cudaEventRecord(end_event, stream));
        CUDA(cudaEventSynchronize(end_event));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, start_event, end_event));
        us.push_back(1000.0 * double(ms));
    }
    c.verify(0);
    return median(us);
}

/* ---- batches of fragments ---- */

struct result {
    std::string name;
    int64_t size; /* bytes of a fragment; 0: mixed */
    int64_t total;
    int shift;
    double us, cub, warp, each, batch, plain; /* plain: kvprim from a stream */
};
static std::vector<result> results;

static double gb_of(const result &r)
{
    return 2e-3 * double(r.total) / r.us;
}

static void measure_batch(const fragment_case &c, int shift, bool others)
{
    const batch b(c.name, c.bytes, shift);
    std::vector<contender> all = {contend("kvprim", b, unpack<false>)};
    if (others) {
        all.push_back(contend("cub", b, enqueue_cub));
        all.push_back(contend("warp", b, enqueue_warps));
        all[2].launches = std::min(all[2].launches, 1 + int(40 * MiB / int64_t(b.fragments.size()) / 4096));
    }
    measure(all);
    result r = {b.name, c.size, b.total, shift, all[0].us, 0, 0, 0, 0, 0};
    if (others) {
        r.cub = all[1].us;
        r.warp = all[2].us;
        r.plain = time_plainly(all[0]);
        r.each = time_plainly(contend("each", b, enqueue_each));
        r.batch = time_plainly(contend("batch", b, enqueue_batch));
    }
    results.push_back(r);
    printf("%-26s %2d %9.2f %6.0f %9.2f %9.2f %10.0f %10.0f\n", c.name, shift, r.us, gb_of(r), r.cub, r.warp, r.each,
           r.batch);
    fflush(stdout);
}

/* Measures batches at some shifts. */
static void measure_batches(const std::vector<std::string> &names, const std::vector<int> &shifts, bool others)
{
    printf("\n%-26s %2s %9s %6s %9s %9s %10s %10s\n", "fragments", "+", "kvprim us", "GB/s", "cub", "warp", "each",
           "batch");
    for (const int shift : shifts)
        for (const fragment_case &c : fragment_cases(names))
            measure_batch(c, shift, others);
}

/* ---- targets ---- */

static std::string where(const result &r)
{
    return r.name + (r.shift ? " + " + std::to_string(r.shift) : "");
}

static void judge_opponents()
{
    std::vector<figure> small, large, each, batched;
    for (const result &r : results) {
        (r.size <= 4096 ? small : large).push_back({r.us / r.cub, where(r)});
        if (r.size == 4096) { /* both with the host's time */
            each.push_back({r.plain / r.each, where(r)});
            batched.push_back({r.plain / r.batch, where(r)});
        }
    }
    judge_worst("time / CUB's, <= 4 KB and mixed", small, '<', 0.25);
    judge_worst("time / CUB's, larger fragments", large, '<', 0.80);
    judge_worst("time / cudaMemcpyAsync's, 4 KB fragments", each, '<', 0.01);
    judge_worst("time / cudaMemcpyBatchAsync's, 4 KB fragments", batched, '<', 0.01);
}

static void judge_rates()
{
    std::vector<figure> small, large;
    for (const result &r : results)
        if (r.shift == 0 && (r.size == 256 || r.total >= 64 * MiB))
            (r.size == 256 ? small : large).push_back({gb_of(r), where(r)});
    judge_worst("GB/s, 65,536 x 256 B", small, '>', 2800);
    judge_worst("GB/s, >= 1 KB, mixed, skewed; >= 64 MB", large, '>', 3300);
}

static void judge_shifts()
{
    std::vector<figure> shifted;
    for (const result &r : results)
        for (const result &aligned : results)
            if (aligned.shift == 0 && r.shift && r.name == aligned.name && r.total >= 64 * MiB)
                shifted.push_back({aligned.us / r.us, where(r)});
    judge_worst("GB/s / aligned GB/s, misaligned", shifted, '>', 0.8);
}

static void batches()
{
    measure_batches({"65,536 x 256 B", "65,536 x 1 KB", "32,768 x 4 KB", "2,048 x 64 KB", "128 x 1 MB",
                     "64 B to 128 KB, 96 MB", "2,000 x 512 B and 64 MB", "65,536 x 64 B to 512 B", "128 x 4 KB"},
                    {0, 3}, true);
    judge_opponents();
    judge_rates();
}

static void shifts()
{
    measure_batches({"65,536 x 1 KB", "32,768 x 4 KB", "2,048 x 64 KB", "64 B to 128 KB, 96 MB"}, {1, 7, 8, 15}, false);
    judge_shifts();
}

/* ---- descriptors that the GPU reads ---- */

/* A batch's descriptors and their count, anew for each rotation, in device memory or in mapped host memory. */
struct meta_lists {
    const batch &b;
    size_t stride; /* from one rotation's descriptors to the next; their count comes before them */
    std::vector<kvprim_unpack_meta_item> host;
    kvprim_unpack_meta_item *pinned = nullptr;
    on_device<kvprim_unpack_meta_item> device;

    explicit meta_lists(const batch &b_) : b(b_), stride(b_.fragments.size() + 1)
    {
        for (int i = 0; i < b.turns(); i++) {
            host.push_back({uint32_t(b.fragments.size()), 0, 0});
            for (const kvprim_fragment &f : b.fragments)
                host.push_back({uint32_t(f.src_offset), uint32_t(f.bytes), f.dst_offset});
        }
        CUDA(cudaMallocHost(&pinned, host.size() * sizeof *pinned));
        memcpy(pinned, host.data(), host.size() * sizeof *pinned);
        device = upload(host);
    }
    ~meta_lists()
    {
        (void)cudaFreeHost(pinned);
    }
    void enqueue(int i, const kvprim_unpack_meta_item *list, const kvprim_cuda_launch &launch) const
    {
        kvprim_unpack_meta_desc d = {};
        d.src = b.src(i), d.src_bytes = uint64_t(b.src_bytes);
        d.dst = b.dst(i), d.dst_bytes = uint64_t(b.dst_bytes);
        d.meta = list + 1, d.count = reinterpret_cast<const uint64_t *>(list), d.max_count = stride - 1;
        check_kvprim(kvprim_cuda_unpack_meta(&d, &launch));
    }
    /* anew: other descriptors for each launch, which are not in the cache */
    contender contend(const char *name, const kvprim_unpack_meta_item *lists, bool anew, bool pdl = false) const
    {
        const kvprim_cuda_launch launch = on_stream(pdl);
        contender c = ::contend(name, b, unpack<false>);
        c.enqueue = [=](int i) { enqueue(i, anew ? lists + size_t(i % b.turns()) * stride : lists, launch); };
        return c;
    }
};

/* Whatever writes descriptors to the GPU's memory leaves them in its cache; a host's are in none. */
static void measure_meta(const fragment_case &f, int shift, std::vector<figure> *ratios)
{
    const batch b(f.name, f.bytes, shift);
    const meta_lists lists(b);
    std::vector<contender> all = {contend("unpack", b, unpack<false>), lists.contend("meta", lists.device.get(), false),
                                  lists.contend("meta, pdl", lists.device.get(), false, true),
                                  lists.contend("cold", lists.device.get(), true),
                                  lists.contend("mapped", lists.pinned, true)};
    measure(all);
    printf("%-26s %2d", f.name, shift);
    print_us(all, 9, 2);
    printf("   %9.3f\n", all[0].us / all[1].us);
    fflush(stdout);
    ratios->push_back({all[0].us / all[1].us, b.name + (shift ? " + 3" : "")});
}

static void metas()
{
    std::vector<figure> ratios;
    printf("\n%-26s %2s %9s %9s %9s %9s %9s   %9s\n", "descriptors on the GPU", "+", "unpack us", "meta", "pdl",
           "not cached", "mapped", "unpack/meta");
    for (const int shift : {0, 3})
        for (const fragment_case &f :
             fragment_cases({"128 x 4 KB", "1,024 x 4 KB", "2,048 x 4 KB", "65,536 x 256 B", "65,536 x 1 KB",
                             "32,768 x 4 KB", "2,048 x 64 KB", "128 x 1 MB", "64 B to 128 KB, 96 MB",
                             "2,000 x 512 B and 64 MB", "65,536 x 64 B to 512 B"}))
            measure_meta(f, shift, &ratios);
    judge_worst("descriptors on the GPU: unpack's time / meta's", ratios, '>', 0.9);
}

/* ---- one fragment, and few ---- */

static void enqueue_one(const batch &b, int i)
{
    const kvprim_fragment f = b.fragments[0];
    CUDA(cudaMemcpyAsync(b.dst(i) + f.dst_offset, b.src(i) + f.src_offset, f.bytes, cudaMemcpyDeviceToDevice, stream));
}

/* Against a memcpy node in a graph, and a cudaMemcpyAsync in a stream. */
static void single()
{
    std::vector<figure> nodes, calls;
    printf("\n%-10s %2s %9s %9s %9s %9s %9s\n", "one of", "+", "graph us", "pdl", "memcpy", "stream us", "memcpy");
    for (const int shift : {0, 3})
        for (int64_t bytes = 4 * KiB; bytes <= 256 * MiB; bytes *= 4) {
            const batch b(size_name(bytes).c_str(), {uint64_t(bytes)}, shift);
            std::vector<contender> all = {contend("kvprim", b, unpack<false>), contend("pdl", b, unpack<true>),
                                          contend("memcpy", b, enqueue_one), contend("kvprim", b, unpack<false>),
                                          contend("memcpy", b, enqueue_one)};
            all[3].plain = all[4].plain = true;
            measure(all);
            printf("%-10s %2d", b.name.c_str(), shift);
            print_us(all, 9, 2);
            printf("\n");
            nodes.push_back({std::min(all[0].us, all[1].us) / all[2].us, b.name + (shift ? " + 3" : "")});
            calls.push_back({all[3].us / all[4].us, nodes.back().where});
        }
    judge_worst("one fragment: time / a memcpy node's", nodes, '<', 1.05);
    judge_worst("one fragment: time / cudaMemcpyAsync's in a stream", calls, '<', 1.05);
}

/* Dependent launch makes no call slower, however much of the GPU the pieces fill. */
static void dependent()
{
    std::vector<figure> ratios;
    printf("\n%-16s %2s %9s %9s %9s\n", "pieces", "+", "us", "pdl", "ratio");
    for (const int shift : {0, 3})
        for (const int pieces : {1, 16, 64})
            for (const int kb : {256, 1024, 4096, 6144, 8192, 9216, 10240, 12288, 16384, 20480, 24576, 36864, 65536}) {
                const std::string name = std::to_string(pieces) + " in " + size_name(kb * KiB);
                const batch b(name.c_str(), equal(uint64_t(kb * KiB / pieces), kb * KiB), shift);
                std::vector<contender> all = {contend("kvprim", b, unpack<false>), contend("pdl", b, unpack<true>)};
                measure(all);
                printf("%-16s %2d %9.2f %9.2f %9.3f\n", name.c_str(), shift, all[0].us, all[1].us,
                       all[1].us / all[0].us);
                ratios.push_back({all[1].us / all[0].us, where({name, 0, 0, shift, 0, 0, 0, 0, 0, 0})});
            }
    judge_worst("pdl 1 / pdl 0", ratios, '<', 1.02);
}

/* ---- the document's case: 8 chunks of 512 KB in fragments of 4 KB, described anew for each call ---- */

constexpr size_t chunks = 8, chunk_bytes = 512 << 10;

/* Returns microseconds per chunk. */
static double time_case(bool synchronised)
{
    constexpr size_t fragment_bytes = 4096, in_chunk = chunk_bytes / fragment_bytes, bytes = chunks * chunk_bytes;
    constexpr int calls = 100;
    std::vector<size_t> slot(chunks * in_chunk); /* where a fragment comes from; destinations follow each other */
    std::vector<kvprim_fragment> fragments(slot.size());
    std::mt19937 random(3);
    for (size_t i = 0; i < slot.size(); i++)
        slot[i] = i;
    for (size_t c = 0; c < chunks; c++)
        std::shuffle(slot.begin() + long(c * in_chunk), slot.begin() + long((c + 1) * in_chunk), random);
    const kvprim_cuda_launch launch = on_stream();
    kvprim_unpack_desc d = {};
    d.src_bytes = d.dst_bytes = bytes;
    d.fragments = fragments.data(), d.count = fragments.size();
    CUDA(cudaMemset(dst_memory, 0xee, rotations * bytes));
    std::vector<double> us;
    for (int r = 0; r < 15; r++) {
        CUDA(cudaStreamSynchronize(stream));
        const double begin = now_us();
        for (size_t call = 0; call < calls; call++) {
            for (size_t i = 0; i < slot.size(); i++)
                fragments[i] = {slot[i] * fragment_bytes, i * fragment_bytes, fragment_bytes};
            d.src = src_memory + call % rotations * bytes;
            d.dst = dst_memory + call % rotations * bytes;
            check_kvprim(kvprim_cuda_unpack(&d, &launch));
            if (synchronised)
                CUDA(cudaStreamSynchronize(stream));
        }
        CUDA(cudaStreamSynchronize(stream));
        us.push_back((now_us() - begin) / (calls * double(chunks)));
    }
    const on_device<kvprim_fragment> described = upload(fragments);
    const described_fragments last = {static_cast<char *>(d.dst), static_cast<const char *>(d.src), described.get()};
    if (count_wrong(last, int64_t(slot.size())) != 0) {
        printf("FAIL the document's case: bytes are wrong\n");
        exit(1);
    }
    return median(us);
}

static void document_case()
{
    const double pipelined = time_case(false), synchronised = time_case(true);
    printf("\n8 chunks of 512 KB, 4 KB fragments, us per chunk: %.3f pipelined (%.0f GB/s), %.3f with a synchronise "
           "per 8\n",
           pipelined, 2e-3 * double(chunk_bytes) / pipelined, synchronised);
    judge("the document's case, us per chunk, pipelined", pipelined, '<', 1.3);
    judge("the document's case, us per chunk, synchronised", synchronised, '<', 3);
}

/* ---- host time ---- */

/* Sizes from 512 to 1,511 bytes. */
static std::vector<uint64_t> uneven(size_t count)
{
    std::vector<uint64_t> sizes(count);
    for (size_t i = 0; i < count; i++)
        sizes[i] = 512 + i * 7 % 1000;
    return sizes;
}

/* 61 layers of K and of V. `alternate`: in the arrays, while all of K lie before all of V. */
struct layers_case {
    std::vector<void *> dst, src;
    kvprim_transfer_desc d = {};

    explicit layers_case(bool alternate)
    {
        for (int64_t l = 0; l < 122; l++) {
            const int64_t at = (alternate ? l % 2 * 61 + l / 2 : l) * 16 * MiB;
            dst.push_back(dst_memory + at), src.push_back(src_memory + at);
        }
        d.dst = d.src = table_at(nullptr, 64);
        d.dst_layers = dst.data(), d.src_layers = src.data();
        d.row_bytes = 1152, d.count = 8, d.layers = 122;
    }
};

static void host()
{
    const batch even("", equal(1024, MiB), 0), packed("", equal(512, MiB / 2), 3), few("", uneven(1024), 0),
        many("", uneven(8192), 0);
    const layers_case in_order(false), alternate(true);
    const auto transfer = [](const layers_case &c) {
        const kvprim_cuda_launch launch = on_stream();
        check_kvprim(kvprim_cuda_transfer(&c.d, &launch));
    };
    const meta_lists lists(even);
    const void *const empty = reinterpret_cast<const void *>(empty_kernel);
    const kvprim_unpack_desc d = describe(even, 0);
    std::vector<host_call> calls = {
        {"cudaLaunchKernel", [=] { CUDA(cudaLaunchKernel(empty, 1, 128, nullptr, 0, stream)); }},
        {"kvprim_cuda_unpack, even", [&] { unpack<false>(even, 0); }},
        {"misaligned", [&] { unpack<false>(packed, 0); }},
        {"uneven", [&] { unpack<false>(few, 0); }},
        {"8,192 uneven", [&] { unpack<false>(many, 0); }},
        {"kvprim_unpack_check", [&] { check_kvprim(kvprim_unpack_check(&d)); }},
        {"transfer of 122 layers", [&] { transfer(in_order); }},
        {"K and V alternate", [&] { transfer(alternate); }},
        {"kvprim_cuda_unpack_meta", [&] { lists.enqueue(0, lists.device.get(), on_stream()); }},
        {"mapped", [&] { lists.enqueue(0, lists.pinned, on_stream()); }}};
    measure_host("host time of a call with 1,024 fragments", calls, 201);
    for (size_t k = 1; k < 4; k++)
        judge(std::string("host: call with 1,024 / bare launch, ") + calls[k].name, calls[k].us / calls[0].us, '<', 3);
    judge("host: us, 8,192 uneven", calls[4].us, '<', 25);
    for (size_t k = 6; k < 8; k++)
        judge(std::string("host: us, ") + calls[k].name, calls[k].us, '<', 3.5);
    for (size_t k = 8; k < 10; k++)
        judge("host: call / bare launch, " + std::string(k == 8 ? "unpack_meta" : "mapped"), calls[k].us / calls[0].us,
              '<', 1.5);
}

/* ---- copies by address ---- */

template <bool pdl> static void copy(const batch &b, int i)
{
    const std::vector<kvprim_copy_item> &items = b.items[size_t(i % b.turns())];
    call_kvprim(kvprim_cuda_copy, kvprim_copy_desc{items.data(), items.size(), 0}, pdl);
}

/* About as many bytes in one piece, from a multiple of 2 MB to another: the limit. */
static int64_t whole_of(const batch &b)
{
    return b.total / (2 * MiB) * (2 * MiB);
}

static void enqueue_all(const batch &b, int i)
{
    const int64_t at = i % int(side_bytes / whole_of(b)) * whole_of(b);
    CUDA(cudaMemcpyAsync(dst_memory + at, src_memory + at, size_t(whole_of(b)), cudaMemcpyDeviceToDevice, stream));
}

static void copies_in_memory()
{
    std::vector<figure> limits, cubs;
    printf("\n%-30s %9s %9s %6s %9s %9s %9s\n", "copies, scattered on both sides", "us", "pdl", "GB/s", "unpack", "cub",
           "copy GB/s");
    const struct {
        const char *name;
        std::vector<uint64_t> bytes;
        int shift;
    } cases[] = {{"32,768 x 4 KB", equal(4096, 128 * MiB), 0},
                 {"8,192 x 16 KB", equal(16 * KiB, 128 * MiB), 0},
                 {"4,096 x 64 KB", equal(64 * KiB, 256 * MiB), 0},
                 {"4 KB to 64 KB, 256 MB", mix(4 * KiB, 64 * KiB, 256 * MiB, 16, 11), 0},
                 {"4 KB to 4 MB, 512 MB", mix(4 * KiB, 4 * MiB, 512 * MiB, 16, 11), 0},
                 {"4 KB to 4 MB, 512 MB, odd", mix(4 * KiB, 4 * MiB, 512 * MiB, 1, 11), 5}};
    for (const auto &c : cases) {
        const batch b(c.name, c.bytes, c.shift, true);
        contender limit = {"one copy", [&b](int i) { enqueue_all(b, i); }, 2 * double(whole_of(b)), 24};
        std::vector<contender> all = {contend("copy", b, copy<false>), contend("pdl", b, copy<true>),
                                      contend("unpack", b, unpack<false>), contend("cub", b, enqueue_cub), limit};
        for (contender &one : all)
            one.launches = 16;
        measure(all);
        printf("%-30s %9.2f %9.2f %6.0f %9.2f %9.2f %9.2f\n", c.name, all[0].us, all[1].us, gb_per_s(all[0]), all[2].us,
               all[3].us, gb_per_s(all[4]));
        limits.push_back({std::max(gb_per_s(all[0]), gb_per_s(all[1])) / gb_per_s(all[4]), c.name});
        cubs.push_back({std::min(all[0].us, all[1].us) / all[3].us, c.name});
    }
    judge_worst("copies of >= 4 KB: GB/s / one copy's", limits, '>', 0.95);
    judge_worst("copies of >= 4 KB: time / CUB's", cubs, '<', 0.2);
}

/* Milliseconds from the call to the end, median of five. */
template <class function> static double time_to_end(const function &call)
{
    std::vector<double> ms;
    for (int r = 0; r < 6; r++) {
        CUDA(cudaStreamSynchronize(stream));
        const double begin = now_us();
        call();
        CUDA(cudaStreamSynchronize(stream));
        if (r > 0)
            ms.push_back((now_us() - begin) * 1e-3);
    }
    return median(ms);
}

/* `count` pieces at the start of random slots of 64 KB, on each side of twice as many; prints and judges one line. */
static void copies_over_link(char *device, char *pinned, size_t count, size_t bytes, bool to_host)
{
    constexpr size_t slot = 64 * KiB;
    std::vector<kvprim_fragment> f(count);
    std::vector<kvprim_copy_item> items;
    copy_list list;
    const index_sets from(int64_t(2 * count), int64_t(count), 1, 1), to(int64_t(2 * count), int64_t(count), 1, 2);
    char *const src = to_host ? device : pinned, *const dst = to_host ? pinned : device;
    for (size_t i = 0; i < count; i++) {
        f[i] = {uint64_t(from.host[i]) * slot, uint64_t(to.host[i]) * slot, bytes};
        items.push_back({src + f[i].src_offset, dst + f[i].dst_offset, bytes});
        list.add(dst + f[i].dst_offset, src + f[i].src_offset, bytes);
    }
    const kvprim_cuda_launch launch = on_stream();
    const kvprim_copy_desc c = {items.data(), count, 0};
    const kvprim_unpack_desc u = {src, 2 * count * slot, dst, 2 * count * slot, f.data(), count, 0};
    const on_device<kvprim_fragment> described = upload(f);
    const double copied = time_to_end([&] { check_kvprim(kvprim_cuda_copy(&c, &launch)); });
    if (count_wrong(described_fragments{dst, src, described.get()}, int64_t(count)) != 0) {
        printf("FAIL copies over the link: bytes are wrong\n");
        exit(1);
    }
    const double unpacked = time_to_end([&] { check_kvprim(kvprim_cuda_unpack(&u, &launch)); });
    const double batched = time_to_end([&] { list.enqueue(); });
    const std::string name = std::to_string(count) + " x " + size_name(int64_t(bytes)) + (to_host ? " to" : " from");
    printf("%-30s %9.3f %9.3f %9.3f\n", (name + " pinned").c_str(), copied, unpacked, batched);
    judge("copies: time / unpack's, " + name, copied / unpacked, '<', 1.03);
    judge("copies: time / cudaMemcpyBatchAsync's, " + name, copied / batched, '<', bytes == 4096 ? 1.0 / 8 : 1);
}

static void copies_of_zeros()
{
    const size_t count = 4096, bytes = 64 * KiB;
    const index_sets to(int64_t(4 * count), int64_t(count), 1, 3);
    std::vector<kvprim_copy_item> items;
    for (size_t i = 0; i < count; i++)
        items.push_back({nullptr, dst_memory + size_t(to.host[i]) * bytes, bytes});
    const kvprim_cuda_launch launch = on_stream();
    const kvprim_copy_desc d = {items.data(), count, 0};
    const kvprim_copy_item whole = {nullptr, dst_memory, count * bytes};
    const kvprim_copy_desc one = {&whole, 1, 0};
    std::vector<contender> all = {
        {"zeros", [&](int) { check_kvprim(kvprim_cuda_copy(&d, &launch)); }},
        {"one", [&](int) { check_kvprim(kvprim_cuda_copy(&one, &launch)); }},
        {"memset", [=](int) { CUDA(cudaMemsetAsync(dst_memory, 0, count * bytes, stream)); }}};
    for (contender &c : all)
        c.launches = 8;
    measure(all);
    const double each = 1000 * time_to_end([&] {
                            for (const kvprim_copy_item &item : items)
                                CUDA(cudaMemsetAsync(item.dst, 0, bytes, stream));
                        });
    const double call = 1000 * time_to_end([&] { check_kvprim(kvprim_cuda_copy(&d, &launch)); });
    printf(
        "zeros, 4,096 x 64 KB: %.2f us, one block of 256 MB %.2f us, cudaMemsetAsync of 256 MB %.2f us; from the call "
        "to the end %.1f us, 4,096 cudaMemsetAsync %.1f us\n",
        all[0].us, all[1].us, all[2].us, call, each);
    judge("zeros: time / one cudaMemsetAsync's of as many bytes", all[0].us / all[2].us, '<', 1.1);
    judge("zeros: time / cudaMemsetAsync's for each", call / each, '<', 0.2);
}

/* Host time of a call of 4,096 copies, and of the check where sources lie between destinations. */
static void copies_on_host()
{
    const batch b("", equal(4096, 16 * MiB), 0, true);
    std::vector<kvprim_copy_item> mixed;
    const index_sets slots(16384, 8192, 1, 4);
    for (size_t i = 0; i < 4096; i++)
        mixed.push_back(
            {src_memory + int64_t(slots.host[2 * i]) * 4096, src_memory + int64_t(slots.host[2 * i + 1]) * 4096, 4096});
    const kvprim_copy_desc among = {mixed.data(), mixed.size(), 0};
    std::vector<host_call> calls = {{"kvprim_cuda_unpack, 4,096", [&] { unpack<false>(b, 0); }},
                                    {"kvprim_cuda_copy", [&] { copy<false>(b, 0); }},
                                    {"kvprim_copy_check",
                                     [&] {
                                         const kvprim_copy_desc d = {b.items[0].data(), 4096, 0};
                                         check_kvprim(kvprim_copy_check(&d));
                                     }},
                                    {"check inside one block", [&] { check_kvprim(kvprim_copy_check(&among)); }}};
    measure_host("host time of 4,096 copies", calls, 31);
    judge("host: us, 4,096 copies", calls[1].us, '<', 30);
}

static void copies()
{
    char *pinned;
    copies_in_memory();
    CUDA(cudaMallocHost(&pinned, size_t(512 * MiB)));
    printf("\n%-30s %9s %9s %9s\n", "ms from the call to the end", "copy", "unpack", "batch");
    for (const size_t bytes : {size_t(64 * KiB), size_t(4 * KiB)})
        for (const bool to_host : {true, false})
            copies_over_link(src_memory, pinned, 4096, bytes, to_host);
    CUDA(cudaFreeHost(pinned));
    copies_of_zeros();
    copies_on_host();
}

/* ---- the program ---- */

static void open_all()
{
    open_gpu(2 * side_bytes + 2 * GiB);
    src_memory = allocate_hashed(side_bytes + MiB);
    dst_memory = allocate_hashed(side_bytes + MiB);
    CUDA(cudaMalloc(&cub_memory, cub_memory_bytes));
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all,
                       {{"batches", batches},
                        {"shifts", shifts},
                        {"meta", metas},
                        {"single", single},
                        {"pdl", dependent},
                        {"case", document_case},
                        {"host", host},
                        {"copies", copies}});
}

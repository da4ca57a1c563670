/* SPDX-License-Identifier: MIT */
/* Measures how fast memory moves and what that takes: HBM to shared memory and HBM to HBM, against the datasheet. It
   uses 16-byte loads, cp.async (sm_80 and newer) and cp.async.bulk (sm_90 and newer), with many numbers and sizes of
   blocks and bytes in flight, from HBM (cold) and from L2 (warm). Then it measures the way to the lowest tier of a KV
   cache: pinned host memory to a temporary file and back. The program sums everything it reads and compares everything
   it copies. The kernels are in bandwidth_kernels.cuh, the disk is in bandwidth_disk.h.

       nvcc -arch=native -O3 examples/09_bandwidth/bandwidth.cu -o 09_bandwidth && ./09_bandwidth

   --disk FOLDER says where the file is to be ($TMPDIR or /tmp), and --disk-mib N how large (1024; 0: no file). The file
   has no name after it is opened, so it is gone however the program ends. */
#include "../gpu.cuh"
#include "bandwidth_disk.h"
#include "bandwidth_kernels.cuh"

/* The sweep has blocks of 64 to 1024 threads, 1 to 16 blocks per SM, and 16 to 256 bytes in flight per thread. The
   product of the three is the number of bytes in flight per SM. */
enum { sizes = 5, threads_min = 64, numbers = 5, points = sizes + numbers + depths - 2, bytes_min = 16 * threads_min };
enum { cold, warm, temperatures };
enum { copy = methods, regions = 4, rounds = 3 };

static const char *const method_names[] = {"16-byte loads", "cp.async", "cp.async.bulk", "cudaMemcpyAsync"};
static const char *const destination_names[] = {"HBM to shared memory", "HBM to HBM"};
static const char *const unit_names[] = {"read", "read and written"};

typedef struct run {
    int method, to, temperature;
    int threads, depth; /* per block; 16 << depth bytes in flight per thread */
    int blocks, sms;    /* blocks per SM, and number of SMs */
    double gbs;         /* 1e9 bytes per second, read; for HBM to HBM, read and written */
} run;

static run runs[methods * destinations * temperatures * sizes * numbers * depths];
static int runs_count;

static struct {
    cudaDeviceProp device;
    double peak, copied; /* GB/s: by memory clock and bus width (0 if unknown); of cudaMemcpyAsync */
    int has[methods];
    uint64_t l2, region, warm_set; /* bytes */
    char *src, *dst;               /* `regions` regions each */
    size_t sums_count;             /* one per warp that the GPU can run at once */
    uint32_t *sums, *found;        /* the sums, on the device and copied to the host */
    unsigned long long *wrong;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} g;

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static uint64_t in_flight(const run *r) /* per SM */
{
    return (uint64_t)r->blocks * (uint64_t)r->threads * (16u << r->depth);
}

/* Returns one of two static buffers: the text lasts until the second call after this one. */
static const char *described(const run *r)
{
    static char texts[2][32];
    static int n;
    snprintf(texts[n ^= 1], sizeof texts[n], "%2d x %4d x %3d", r->blocks, r->threads, 16 << r->depth);
    return texts[n];
}

static size_t shared_bytes(const run *r)
{
    return r->method == loads && r->to == to_hbm ? 0 : (size_t)r->threads * (16u << r->depth);
}

/* Returns whether all blocks can run at once. */
static int fits(const run *r)
{
    int blocks = 0;
    if (shared_bytes(r) + bulk_stages * sizeof(uint64_t) > g.device.sharedMemPerBlockOptin)
        return 0;
    CU(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernels[r->method][r->to][r->depth], r->threads,
                                                     shared_bytes(r)));
    return blocks >= r->blocks;
}

/* Reads as many bytes as a region has: the region itself, or a smaller set at the start of memory several times. */
static void launch(const run *r, uint64_t set, int region)
{
    const uint64_t offset = set == g.region ? (uint64_t)region * g.region : 0;
    job j = {};
    if (r->method == copy) {
        CU(cudaMemcpyAsync(g.dst + offset, g.src + offset, g.region, cudaMemcpyDeviceToDevice, g.stream));
        return;
    }
    j.src = (const uint4 *)(g.src + offset);
    j.dst = (uint4 *)(g.dst + offset);
    j.words = g.region / 16;
    j.mask = set / 16 - 1;
    j.stage = (uint32_t)((r->threads << r->depth) / bulk_stages);
    j.sums = g.sums;
    kernels[r->method][r->to][r->depth]<<<r->blocks * r->sms, r->threads, shared_bytes(r), g.stream>>>(j);
    CU(cudaGetLastError());
}

/* Checks the sums of what was read, or one region of what was copied. Ends the program if they are wrong. */
static void verify(const run *r, uint64_t set, int rounds_measured)
{
    const uint64_t first = set == g.region ? (regions - 1) * g.region / 4 : 0, all = regions * g.region;
    uint32_t expected = set == g.region ? sum_of_words(all / 4) : (uint32_t)(all / set) * sum_of_words(set / 4),
             sum = 0;
    unsigned long long wrong;
    find_wrong<<<1024, 256, 0, g.stream>>>((const uint32_t *)g.dst, first, r->to == to_hbm ? set / 4 : 0, g.wrong);
    CU(cudaGetLastError());
    CU(cudaMemcpyAsync(&wrong, g.wrong, sizeof wrong, cudaMemcpyDeviceToHost, g.stream));
    CU(cudaMemcpyAsync(g.found, g.sums, g.sums_count * sizeof *g.sums, cudaMemcpyDeviceToHost, g.stream));
    CU(cudaStreamSynchronize(g.stream));
    for (size_t i = 0; i < g.sums_count; i++)
        sum += g.found[i];
    expected *= r->to == to_shared ? (uint32_t)rounds_measured : 0;
    if (wrong == ~0ull && sum == expected)
        return;
    printf("WRONG: %s, %s, %s, set of %llu bytes: sum of the words %08x, expected %08x", destination_names[r->to],
           method_names[r->method], described(r), (unsigned long long)set, sum, expected);
    wrong == ~0ull ? printf("\n") : printf("; the first wrong word of the copy is %llu\n", wrong);
    exit(1);
}

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Returns GB/s, the median of some rounds. Each round launches over all regions in turn. The first launch is not timed,
   so that the GPU is busy while the host enqueues the others. */
static double measure(const run *r, uint64_t set)
{
    const uint64_t poisoned = set == g.region ? (regions - 1) * g.region : 0;
    float ms[rounds], all_ms = 0;
    int n = 0;
    CU(cudaMemsetAsync(g.sums, 0, g.sums_count * sizeof *g.sums, g.stream));
    CU(cudaMemsetAsync(g.wrong, 0xff, sizeof *g.wrong, g.stream));
    if (r->to == to_hbm)
        CU(cudaMemsetAsync(g.dst + poisoned, 0xee, set, g.stream));
    while (n < rounds && all_ms < 10) { /* slow runs take fewer rounds */
        launch(r, set, regions - 1);
        CU(cudaEventRecord(g.begin, g.stream));
        for (int region = 0; region < regions - 1; region++)
            launch(r, set, region);
        CU(cudaEventRecord(g.end, g.stream));
        CU(cudaEventSynchronize(g.end));
        CU(cudaEventElapsedTime(&ms[n], g.begin, g.end));
        all_ms += ms[n++];
    }
    verify(r, set, n);
    qsort(ms, (size_t)n, sizeof *ms, ascending);
    return 1e-6 * (r->to == to_hbm ? 2 : 1) * (double)((regions - 1) * g.region) / ms[n / 2];
}

static void sweep(void)
{
    for (int k = 0; k < methods * destinations * temperatures * sizes * numbers * depths; k++) {
        const int number = k / sizes % numbers, depth = k / sizes / numbers % depths;
        const int rest = k / sizes / numbers / depths, temperature = rest % temperatures;
        const int to = rest / temperatures % destinations, method = rest / temperatures / destinations;
        run r = {method, to, temperature, threads_min << k % sizes, depth, 1 << number, g.device.multiProcessorCount,
                 0};
        if (!g.has[method] || !fits(&r))
            continue;
        r.gbs = measure(&r, temperature == cold ? g.region : g.warm_set);
        runs[runs_count++] = r;
    }
}

/* Returns the fastest run (for sign -1, the slowest) of this method, blocks per SM and bytes in flight per SM. A method
   of -1 and numbers of 0 mean any. Returns NULL if there is no such run. */
static const run *extreme(int sign, int to, int temperature, int method, int blocks, uint64_t bytes)
{
    const run *found = NULL;
    for (const run *r = runs; r < runs + runs_count; r++)
        if (r->to == to && r->temperature == temperature && (method < 0 || r->method == method) &&
            (blocks == 0 || r->blocks == blocks) && (bytes == 0 || in_flight(r) == bytes) &&
            (!found || sign * r->gbs > sign * found->gbs))
            found = r;
    return found;
}

static const run *best(int to, int temperature, int method, uint64_t bytes)
{
    return extreme(1, to, temperature, method, 0, bytes);
}

/* Returns the number of bytes in flight per SM that reaches `gbs` cold, interpolated linearly between measured points;
   0 if no point reaches it. */
static double bytes_for(int to, int method, double gbs)
{
    const run *below = NULL;
    for (int p = 0; p < points; p++) {
        const run *const r = best(to, cold, method, (uint64_t)bytes_min << p);
        if (r && r->gbs >= gbs && below)
            return (double)in_flight(below) +
                   (double)(in_flight(r) - in_flight(below)) * (gbs - below->gbs) / (r->gbs - below->gbs);
        if (r && r->gbs >= gbs)
            return (double)in_flight(r);
        below = r ? r : below;
    }
    return 0;
}

/* ---- the answers ------------------------------------------------------------------------------------------------- */

static void print_best(int to)
{
    printf("\n%s, GB/s %s: the best number and size of blocks by KB in flight per SM\n", destination_names[to],
           unit_names[to]);
    printf("      cold                                        L2-warm\n    KB");
    for (int t = cold; t <= warm; t++)
        printf("  %14s%14s%14s", method_names[loads], method_names[cp_async], method_names[bulk]);
    for (int p = 0; p < points && best(to, cold, -1, (uint64_t)bytes_min << p); p++) {
        printf("\n%6d", 1 << p);
        for (int k = 0; k < temperatures * methods; k++) {
            const run *const r = best(to, k / methods, k % methods, (uint64_t)bytes_min << p);
            r ? printf("%*.0f", k % methods ? 14 : 16, r->gbs) : printf("%*s", k % methods ? 14 : 16, "-");
        }
    }
    printf("\n  best (blocks per SM x threads per block x bytes in flight per thread):\n");
    for (int k = 0; k < temperatures * methods; k++) {
        const run *const r = best(to, k / methods, k % methods, 0);
        if (!r)
            continue;
        printf("  %s %-13s  %s  %6.0f GB/s, %.2f of cudaMemcpyAsync", k / methods == cold ? "cold" : "warm",
               method_names[k % methods], described(r), r->gbs, r->gbs / g.copied);
        g.peak > 0 ? printf(", %5.1f %% of the datasheet\n", 100 * r->gbs / g.peak) : printf("\n");
    }
}

static void print_same_bytes(int method, uint64_t bytes)
{
    const run *const fast = best(to_shared, cold, method, bytes);
    const run *const slow = extreme(-1, to_shared, cold, method, 0, bytes);
    if (fast)
        printf("    %-13s  %s  %6.0f GB/s at best, %s  %6.0f at worst: %.2f\n", method_names[method], described(fast),
               fast->gbs, described(slow), slow->gbs, slow->gbs / fast->gbs);
}

static void print_few_blocks(int method)
{
    const run *const alone = extreme(1, to_shared, cold, method, 1, 0);
    const int sms = g.device.multiProcessorCount;
    if (!alone)
        return;
    printf("    %-13s", method_names[method]);
    for (int part = 8; part > 1; part /= 2) {
        run r = *alone;
        r.sms = sms / part > 0 ? sms / part : 1;
        printf("  %4d: %5.0f", r.sms, measure(&r, g.region));
    }
    printf("  %4d: %5.0f\n", sms, alone->gbs);
}

static void print_blocks(void)
{
    const double enough = bytes_for(to_shared, -1, 0.9 * best(to_shared, cold, -1, 0)->gbs);
    uint64_t bytes = bytes_min;
    while ((double)bytes < enough)
        bytes *= 2;
    printf(
        "\nHow do the number and the size of blocks matter?\n"
        "  HBM to shared memory, cold, the same %llu KB in flight per SM, with different numbers, sizes and depths:\n",
        (unsigned long long)bytes >> 10);
    for (int m = 0; m < methods; m++)
        print_same_bytes(m, bytes);
    printf("  If the ratio is near 1, only the product counts: bytes in flight per SM.\n"
           "  Fewer blocks than SMs, each method's fastest with one block per SM (blocks: GB/s):\n");
    for (int m = 0; m < methods; m++)
        print_few_blocks(m);
}

/* Little's law: bytes in flight = bandwidth x latency. */
static void print_in_flight(void)
{
    printf("\nHow many KB in flight per SM reach 90 %% of the best cold bandwidth, and how long is each in flight?\n");
    for (int k = 0; k < destinations * methods; k++) {
        const int to = k / methods, method = k % methods;
        const double gbs = 0.9 * best(to, cold, -1, 0)->gbs, bytes = bytes_for(to, method, gbs);
        const double ns = bytes * g.device.multiProcessorCount / (to == to_hbm ? gbs / 2 : gbs);
        if (bytes > 0)
            printf("  %-20s  %-13s %6.1f KB %6.0f ns\n", destination_names[to], method_names[method], bytes / 1024, ns);
        else if (g.has[method])
            printf("  %-20s  %-13s  never reached\n", destination_names[to], method_names[method]);
    }
    printf("  (Upper limits for 16-byte loads: a thread uses all of them before it starts the next.)\n");
}

/* ---- setting up -------------------------------------------------------------------------------------------------- */

/* Prints the GPU, and its peak by the datasheet: memory clock x 2 (double data rate) x bus width. */
static void open_gpu(void)
{
    int khz, bits;
    CU(cudaGetDeviceProperties(&g.device, 0));
    CU(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, 0));
    CU(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    printf("%s, %d SMs, compute capability %d.%d, %.4g MiB of L2\n", g.device.name, g.device.multiProcessorCount,
           g.device.major, g.device.minor, g.device.l2CacheSize / 1048576.0);
    g.peak = 1e-6 * khz * 2 * bits / 8;
    if (g.peak > 0)
        printf("datasheet: %.0f MHz x 2 (double data rate) x %d bits = %.0f GB/s\n", 1e-3 * khz, bits, g.peak);
    else
        printf("datasheet: the driver does not report the memory's clock or bus width, so there is no comparison\n");
    g.stream = new_stream(), g.begin = new_event(), g.end = new_event();
}

/* A method needs a GPU that has it, and a program compiled for such a GPU. */
static void open_methods(void)
{
    static const int needed[methods] = {0, 80, 90};
    for (int k = 0; k < methods * destinations * depths; k++) {
        const int m = k / destinations / depths, capability = 10 * g.device.major + g.device.minor;
        const void *const code = (const void *)kernels[m][k / depths % destinations][k % depths];
        cudaFuncAttributes a;
        CU(cudaFuncGetAttributes(&a, code));
        g.has[m] = capability >= needed[m] && a.ptxVersion >= needed[m];
        if (!g.has[m] && k % (destinations * depths) == 0)
            printf("skipped: %s, which needs compute capability %.1f (the GPU has %.1f, the program is for %.1f)\n",
                   method_names[m], needed[m] / 10.0, capability / 10.0, a.ptxVersion / 10.0);
        CU(cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)(g.device.sharedMemPerBlockOptin - a.sharedSizeBytes)));
        CU(cudaFuncSetAttribute(code, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    }
}

/* A region is a power of two, at least 128 MiB and 8 times the L2. If 4 regions to read and 4 to write would take more
   than half of the free memory, the region is halved until they fit. The warm set is the largest power of two up to a
   quarter of the L2, but at least the largest tile. */
static void open_memory(void)
{
    enum { tile_max = 16 * 16 * 1024 };
    size_t free_bytes, total_bytes;
    g.l2 = g.device.l2CacheSize > 0 ? (uint64_t)g.device.l2CacheSize : 1 << 20;
    for (g.region = 128 << 20; g.region < 8 * g.l2;)
        g.region *= 2;
    CU(cudaMemGetInfo(&free_bytes, &total_bytes));
    while (2 * regions * g.region > free_bytes / 2 && g.region > tile_max)
        g.region /= 2;
    for (g.warm_set = tile_max; 2 * g.warm_set <= g.l2 / 4 && 2 * g.warm_set < g.region;)
        g.warm_set *= 2;
    if (g.region < 2 * g.l2 || g.region <= g.warm_set) {
        printf("only %zu MiB of GPU memory are free: the cache would be measured\n", free_bytes >> 20);
        exit(1);
    }
    printf("cold: %d regions of %llu MiB in turn, so %.1f times the L2 is read before a byte is read again; warm: %.4g "
           "MiB, repeatedly\n",
           regions, (unsigned long long)g.region >> 20, (double)(regions - 1) * (double)g.region / (double)g.l2,
           (double)g.warm_set / 1048576);
    CU(cudaMalloc(&g.src, regions * g.region));
    CU(cudaMalloc(&g.dst, regions * g.region));
    g.sums_count = (size_t)g.device.multiProcessorCount * (size_t)g.device.maxThreadsPerMultiProcessor / 32;
    CU(cudaMalloc(&g.sums, g.sums_count * sizeof *g.sums));
    CU(cudaMallocHost(&g.found, g.sums_count * sizeof *g.found));
    CU(cudaMalloc(&g.wrong, sizeof *g.wrong));
    fill<<<1024, 256, 0, g.stream>>>((uint32_t *)g.src, regions * g.region / 4);
    CU(cudaGetLastError());
    CU(cudaStreamSynchronize(g.stream));
}

/* ---- the disk ---------------------------------------------------------------------------------------------------- */

enum { disk_block_mib = 16, disk_mib_max = 1 << 24 };

/* Returns the exit code. A folder that the user has named must do; of the usual one the table says why it does not. */
static int print_disk(const char *folder, uint64_t mib)
{
    bandwidth_disk d = {};
    d.block_bytes = (size_t)disk_block_mib << 20, d.bytes = mib << 20;
    printf("\nPinned host memory and disk, GB/s\n");
    if (mib == 0 || !kv_disk_open(&d.file, NULL, folder, d.bytes)) {
        printf("  skipped: %s\n", mib == 0 ? "--disk-mib 0" : d.file.error);
        return mib && folder ? 2 : 0;
    }
    CU(cudaMallocHost(&d.block, d.block_bytes));
    const bool direct = d.file.direct, ok = bandwidth_disk_measure(&d);
    if (ok)
        printf("  write %6.2f   expected of an SSD: about 0.5\n"
               "  read  %6.2f   expected of an SSD: 2 to 5\n"
               "  %llu MiB in %s, %d MiB a call, one call at a time, %s; all bytes compared\n",
               d.write_gbs, d.read_gbs, (unsigned long long)mib, d.file.path, disk_block_mib,
               d.file.direct ? "past the page cache (O_DIRECT)"
               : direct      ? "through the page cache: the file system refused O_DIRECT"
                             : "through the page cache: the file system has no O_DIRECT");
    else
        printf("  FAILED: %s\n", d.file.error);
    kv_disk_close(&d.file);
    return !ok;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static const char usage[] =
    "usage: 09_bandwidth [--disk FOLDER] [--disk-mib N]\n\n"
    "Measures how fast a GPU's memory moves. Takes seconds. Writes a temporary file of N MiB (1024; 0: none) to\n"
    "FOLDER ($TMPDIR or /tmp), a multiple of 16, and reads it back.\n";

int main(int argc, char **argv)
{
    const run copying = {copy, to_hbm, cold, 0, 0, 0, 0, 0};
    const char *folder = NULL;
    uint64_t disk_mib = 1024;
    for (int i = 1; i < argc; i += 2) {
        char *end = argv[i];
        if (strcmp(argv[i], "--disk") == 0 && i + 1 < argc)
            folder = argv[i + 1];
        else if (strcmp(argv[i], "--disk-mib") == 0 && i + 1 < argc)
            disk_mib = strtoull(argv[i + 1], &end, 10);
        else
            return fputs(usage, stderr), 2;
        if (*end && end != argv[i])
            return fputs(usage, stderr), 2;
    }
    if (disk_mib > disk_mib_max || disk_mib % disk_block_mib)
        return fputs(usage, stderr), 2;
    need_gpu();
    open_gpu();
    open_methods();
    open_memory();
    g.copied = measure(&copying, g.region);
    printf("cudaMemcpyAsync, device to device: %.0f GB/s read and written", g.copied);
    g.peak > 0 ? printf(", %.1f %% of the datasheet\n", 100 * g.copied / g.peak) : printf("\n");
    sweep();
    print_best(to_shared);
    print_best(to_hbm);
    print_blocks();
    print_in_flight();
    return print_disk(folder, disk_mib);
}

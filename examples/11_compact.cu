/* SPDX-License-Identifier: MIT */
/* Compaction: some sequences in a KV cache end, and the rows of the others move to its front, K and V of every layer. A
   few kernels partition the list of slots, kept tokens first, both sides in their old order; then one transfer inside
   the cache moves the rows. The host does not wait in between, and nothing is allocated. The program checks every byte
   of the cache before and after.

       nvcc -arch=native -I. examples/11_compact.cu -o 11_compact && ./11_compact

   The partition is a prefix sum (cub::DeviceScan). A kept entry goes to the place that is the number of kept entries
   before it; the other entries follow all kept ones, each at the number of such entries before it.
   cub::DevicePartition::Flagged would leave those in reverse order. The cache takes 1 GiB of the GPU's memory; the
   plain copy that the transfer is compared with takes half of that. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim_cuda.cuh"
#include "gpu.cuh"
#include <cub/device/device_scan.cuh>

/* A row is one token of one layer. The tokens are scattered over the cache, of which an eighth is free. */
static const int tables = 2 * 32, slots = 8192, tokens = slots / 8 * 7, row_bytes = 2048, row_words = row_bytes / 4;
static const int most_moves = slots / 2; /* a hole at the front for each kept row that moves */
static const int rounds = 6, threads = 256;
static const int64_t table_words = (int64_t)slots * row_words, cache_bytes = 4 * tables * table_words;
static const int64_t most_bytes = (int64_t)most_moves * tables * row_bytes;

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

/* Thread i moves entry i of the list to its new place, and marks its slot in taken[], which was 0, if it is kept.
   before[i] is the number of kept entries before entry i. */
static __global__ void partition(int32_t *list, unsigned char *taken, int32_t *kept, const int32_t *slot,
                                 const int32_t *keep, const int32_t *before)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= tokens)
        return;
    const int32_t all_kept = before[tokens - 1] + keep[tokens - 1];
    list[keep[i] ? before[i] : all_kept + i - before[i]] = slot[i];
    if (keep[i])
        taken[slot[i]] = 1;
    if (i == 0)
        *kept = all_kept;
}

/* Of the first `kept` slots, those without a kept row are holes. The kept rows in later slots must move, and there are
   as many of them. Thread i writes 1 if slot i is a hole, plus 1 << 32 if the row of entry i must move: one prefix sum
   numbers both. */
static __global__ void mark(uint64_t *marks, const int32_t *list, const unsigned char *taken, const int32_t *kept)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= slots)
        return;
    const bool inside = i < *kept;
    marks[i] = (uint64_t)(inside && !taken[i]) | (uint64_t)(inside && list[i] >= *kept) << 32;
}

/* Pairs the n-th row that moves with the n-th hole. Thread i writes slot i if it is a hole, and entry i if it moves. */
static __global__ void pair(int32_t *to, int32_t *from, const uint64_t *marks, const uint64_t *before,
                            const int32_t *list)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= slots)
        return;
    if (marks[i] & 1)
        to[(uint32_t)before[i]] = i;
    if (marks[i] >> 32)
        from[before[i] >> 32] = list[i];
}

/* Thread i gives entry i its new slot, if its row moves. */
static __global__ void update(int32_t *list, const int32_t *to, const uint64_t *marks, const uint64_t *before)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < slots && marks[i] >> 32)
        list[i] = to[before[i] >> 32];
}

/* State, and all device memory, allocated once. */
static struct {
    uint32_t *cache, *copy;
    int32_t *slot, *keep, *before, *list, *kept, *to, *from;
    uint64_t *marks, *marks_before;
    unsigned char *taken;
    uint32_t *rejected;
    void *scan;
    size_t scan_bytes;
    cudaStream_t stream;
    cudaEvent_t begin, partitioned, moved, copied;
} s;

static void allocate(const int32_t *slot, const int32_t *keep)
{
    const uint32_t none = 0;
    size_t bytes = 0;
    s.cache = on_device<uint32_t>(cache_bytes / 4), s.copy = on_device<uint32_t>(most_bytes / 4);
    s.slot = on_device(tokens, slot), s.keep = on_device(tokens, keep);
    s.before = on_device<int32_t>(tokens), s.list = on_device<int32_t>(tokens), s.kept = on_device<int32_t>(1);
    s.to = on_device<int32_t>(most_moves), s.from = on_device<int32_t>(most_moves);
    s.marks = on_device<uint64_t>(slots), s.marks_before = on_device<uint64_t>(slots);
    s.taken = on_device<unsigned char>(slots), s.rejected = on_device(1, &none);
    CU(cub::DeviceScan::ExclusiveSum(NULL, bytes, s.keep, s.before, tokens));
    CU(cub::DeviceScan::ExclusiveSum(NULL, s.scan_bytes, s.marks, s.marks_before, slots));
    s.scan_bytes = bytes > s.scan_bytes ? bytes : s.scan_bytes;
    s.scan = on_device<char>(s.scan_bytes);
    s.stream = new_stream();
    s.begin = new_event(), s.partitioned = new_event(), s.moved = new_event(), s.copied = new_event();
}

/* Reads s.slot and s.keep. Writes s.list, with the new slots of kept tokens, and the moves s.to and s.from, which have
   -1 after the last one. */
static void enqueue_partition(void)
{
    const int token_blocks = (tokens + threads - 1) / threads, slot_blocks = (slots + threads - 1) / threads;
    CU(cudaMemsetAsync(s.taken, 0, slots, s.stream));
    CU(cudaMemsetAsync(s.to, 0xff, most_moves * sizeof *s.to, s.stream));
    CU(cudaMemsetAsync(s.from, 0xff, most_moves * sizeof *s.from, s.stream));
    CU(cub::DeviceScan::ExclusiveSum(s.scan, s.scan_bytes, s.keep, s.before, tokens, s.stream));
    partition<<<token_blocks, threads, 0, s.stream>>>(s.list, s.taken, s.kept, s.slot, s.keep, s.before);
    mark<<<slot_blocks, threads, 0, s.stream>>>(s.marks, s.list, s.taken, s.kept);
    CU(cub::DeviceScan::ExclusiveSum(s.scan, s.scan_bytes, s.marks, s.marks_before, slots, s.stream));
    pair<<<slot_blocks, threads, 0, s.stream>>>(s.to, s.from, s.marks, s.marks_before, s.list);
    update<<<slot_blocks, threads, 0, s.stream>>>(s.list, s.to, s.marks, s.marks_before);
    CU(cudaGetLastError());
}

/* same_cache asks that no row is both read and written: all destinations are among the first *s.kept slots, and no
   source is. The host does not know the number of moves, so it gives the largest; index -1 is skipped. */
static void enqueue_moves(void)
{
    kvprim_transfer_desc transfer = {};
    transfer.dst.data = transfer.src.data = s.cache;
    transfer.dst.rows = transfer.src.rows = slots;
    transfer.layers = tables;
    transfer.row_bytes = row_bytes;
    transfer.dst_index = s.to;
    transfer.src_index = s.from;
    transfer.index_type = KVPRIM_I32;
    transfer.count = most_moves;
    transfer.rejected = s.rejected;
    transfer.same_cache = 1;
    kvprim_cuda_launch launch = {};
    launch.stream = s.stream;
    kvprim(kvprim_cuda_transfer(&transfer, &launch));
}

static void fill_cache(void)
{
    fill<<<1024, threads, 0, s.stream>>>(s.cache, cache_bytes / 4);
    CU(cudaGetLastError());
}

typedef struct best {
    float partition_us, moves_us, plain_us;
} best;

/* Fills the cache, compacts it, and copies as many bytes as that moves, at most most_bytes. Returns the best of some
   rounds. The first does not count, because it loads the kernels. */
static best measure(size_t bytes)
{
    best b = {1e9f, 1e9f, 1e9f};
    for (int r = 0; r < rounds; r++) {
        fill_cache();
        CU(cudaEventRecord(s.begin, s.stream));
        enqueue_partition();
        CU(cudaEventRecord(s.partitioned, s.stream));
        enqueue_moves();
        CU(cudaEventRecord(s.moved, s.stream));
        CU(cudaMemcpyAsync(s.copy, s.cache, bytes, cudaMemcpyDeviceToDevice, s.stream));
        CU(cudaEventRecord(s.copied, s.stream));
        CU(cudaStreamSynchronize(s.stream));
        if (r == 0)
            continue;
        b.partition_us = fminf(b.partition_us, 1e3f * elapsed_ms(s.begin, s.partitioned));
        b.moves_us = fminf(b.moves_us, 1e3f * elapsed_ms(s.partitioned, s.moved));
        b.plain_us = fminf(b.plain_us, 1e3f * elapsed_ms(s.moved, s.copied));
    }
    return b;
}

/* Returns the number of wrong rows: slot i of each table must hold what slot origin[i] held at first. */
static int wrong_rows(const int32_t *origin)
{
    static uint32_t table[slots][row_words];
    int wrong = 0;
    for (int t = 0; t < tables; t++) {
        CU(cudaMemcpy(table, s.cache + t * table_words, sizeof table, cudaMemcpyDeviceToHost));
        for (int64_t slot = 0; slot < slots; slot++) {
            int same = 1;
            for (int64_t w = 0; w < row_words; w++)
                same &= table[slot][w] == cache_word(t * table_words + origin[slot] * (int64_t)row_words + w);
            wrong += !same;
        }
    }
    return wrong;
}

/* Computes the expected result with plain loops: the new list, and for each slot the slot that its row comes from.
   Returns the number of rows that move. */
static int expect(int32_t *list, int32_t *origin, const int32_t *slot, const int32_t *keep)
{
    static int taken[slots];
    int kept = 0, n = 0, hole = 0, moves = 0;
    for (int i = 0; i < tokens; i++)
        kept += keep[i];
    for (int side = 1; side >= 0; side--)
        for (int i = 0; i < tokens; i++)
            if (keep[i] == side)
                list[n++] = slot[i];
    for (int i = 0; i < slots; i++)
        origin[i] = i;
    for (int i = 0; i < kept; i++)
        taken[list[i]] = 1;
    for (int i = 0; i < kept; i++) {
        if (list[i] < kept)
            continue;
        while (taken[hole])
            hole++;
        origin[hole] = list[i];
        list[i] = hole++;
        moves++;
    }
    return moves;
}

/* Makes sequences of 40 to 500 tokens. They follow each other in the list; their slots are scattered over the cache.
   About half of the sequences end. */
static void make_sequences(int32_t *slot, int32_t *keep)
{
    for (int i = 0, number = 0; i < tokens; number++)
        for (int left = 40 + number * 193 % 461; left > 0 && i < tokens; left--, i++) {
            slot[i] = (int32_t)(i * 3571ll % slots);
            keep[i] = number * 5 % 9 < 5;
        }
}

int main(void)
{
    static int32_t slot[tokens], keep[tokens], list[tokens], got[tokens], origin[slots];
    int kept = 0, wrong_entries = 0;
    uint32_t rejected;
    need_gpu();
    make_sequences(slot, keep);
    allocate(slot, keep);
    for (int i = 0; i < slots; i++)
        origin[i] = i;
    fill_cache();
    CU(cudaDeviceSynchronize());
    const int wrong_before = wrong_rows(origin);
    const int moves = expect(list, origin, slot, keep);
    const size_t bytes = (size_t)moves * tables * row_bytes;
    const best b = measure(bytes);
    const int wrong_after = wrong_rows(origin);
    CU(cudaMemcpy(got, s.list, sizeof got, cudaMemcpyDeviceToHost));
    CU(cudaMemcpy(&rejected, s.rejected, sizeof rejected, cudaMemcpyDeviceToHost));
    for (int i = 0; i < tokens; i++) {
        kept += keep[i];
        wrong_entries += got[i] != list[i];
    }
    printf("%d tokens in %d slots, %d of them kept, %d of those moved to the front, in %d tables: %.0f MB\n", tokens,
           slots, kept, moves, tables, 1e-6 * (double)bytes);
    printf("partition of the list and its moves   %8.1f us\n", b.partition_us);
    printf("kvprim_cuda_transfer                  %8.1f us   %6.0f GB/s\n", b.moves_us,
           1e-3 * (double)bytes / b.moves_us);
    printf("cudaMemcpyAsync of as many bytes      %8.1f us   %6.0f GB/s\n", b.plain_us,
           1e-3 * (double)bytes / b.plain_us);
    printf("rows wrong before: %d, after: %d; entries of the list wrong: %d; rows rejected: %u\n", wrong_before,
           wrong_after, wrong_entries, rejected);
    return wrong_before || wrong_after || wrong_entries || rejected || !moves;
}

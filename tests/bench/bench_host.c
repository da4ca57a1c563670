/* SPDX-License-Identifier: MIT */
/* Compares the host's gather and store with the C library's memcpy, on one core, for random rows of a table of 1 GB.
   The opponents are one memcpy of as many bytes (rows that follow each other), and a plain loop of one memcpy per row.
   Memory is in huge pages if the system gives them, or in small ones if KVPRIM_BENCH_SMALL_PAGES is set. */
#define _GNU_SOURCE /* madvise */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include "bench.h"
#include <sys/mman.h>

enum { repetitions = 7, sets = 4 };

static const int64_t table_bytes = (int64_t)1 << 30, moved_bytes = (int64_t)64 << 20;

typedef struct work {
    char *table, *rows;
    const int32_t *index[sets]; /* repetitions take them in turn, so that no row is still in a cache */
    int64_t row_bytes, count;
} work;

static void must(kvprim_status status)
{
    if (status == KVPRIM_OK)
        return;
    printf("%s\n", kvprim_last_error());
    exit(1);
}

static void gather(const work *w, int set)
{
    const kvprim_gather_desc d = {.dst = {.data = w->rows, .rows = w->count},
                                  .src = {.data = w->table, .rows = table_bytes / w->row_bytes},
                                  .row_bytes = w->row_bytes,
                                  .index = w->index[set],
                                  .index_type = KVPRIM_I32,
                                  .count = w->count};
    must(kvprim_gather(&d));
}

static void gather_loop(const work *w, int set)
{
    for (int64_t i = 0; i < w->count; i++)
        memcpy(w->rows + i * w->row_bytes, w->table + w->index[set][i] * w->row_bytes, (size_t)w->row_bytes);
}

static void gather_memcpy(const work *w, int set)
{
    memcpy(w->rows, w->table + set * (table_bytes / sets), (size_t)(w->count * w->row_bytes));
}

static void store(const work *w, int set)
{
    const kvprim_store_desc d = {.k_cache = {.data = w->table, .rows = table_bytes / w->row_bytes},
                                 .k = {.data = w->rows, .rows = w->count},
                                 .k_bytes = w->row_bytes,
                                 .slot = w->index[set],
                                 .slot_type = KVPRIM_I32,
                                 .count = w->count};
    must(kvprim_store(&d));
}

static void store_loop(const work *w, int set)
{
    for (int64_t i = 0; i < w->count; i++)
        memcpy(w->table + w->index[set][i] * w->row_bytes, w->rows + i * w->row_bytes, (size_t)w->row_bytes);
}

static void store_memcpy(const work *w, int set)
{
    memcpy(w->table + set * (table_bytes / sets), w->rows, (size_t)(w->count * w->row_bytes));
}

/* The limit of a gather: loads every line of its rows once and writes nothing. */
static void read_lines(const work *w, int set)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t b = 0; b < w->row_bytes; b += 64)
            sum += *(const uint64_t *)(const void *)(w->table + w->index[set][i] * w->row_bytes + b);
    *(volatile uint64_t *)(void *)w->rows = sum;
}

/* Allocates memory as an engine does for a cache: aligned, and in huge pages if the system gives them. */
static char *allocate_cache(size_t bytes)
{
    const size_t huge = (size_t)2 << 20;
    void *p = NULL;
    if (posix_memalign(&p, huge, (bytes + huge - 1) / huge * huge) != 0) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        exit(2);
    }
#ifdef MADV_HUGEPAGE
    if (getenv("KVPRIM_BENCH_SMALL_PAGES") == NULL)
        (void)madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return (char *)p;
}

enum { contenders = 4 };
typedef void move_fn(const work *, int);

/* Returns GB/s of each, counting the bytes of the rows. Takes medians of interleaved repetitions. */
static void measure(const work *w, move_fn *const *f, double *gb_per_s)
{
    double ns[contenders][repetitions];
    for (int r = 0; r < repetitions; r++)
        for (int k = 0; k < contenders; k++) {
            const double start = bench_ns();
            f[k](w, (r + k) % sets);
            ns[k][r] = bench_ns() - start;
        }
    for (int k = 0; k < contenders; k++)
        gb_per_s[k] = (double)(w->count * w->row_bytes) / bench_median(ns[k], repetitions);
}

static void table(const char *name, char *memory, char *rows, int32_t *const *index, move_fn *const *f, int judge)
{
    static const int64_t sizes[] = {64, 128, 256, 512, 1024, 2048, 4096, 16384};
    printf("\n%s, random rows of 1 GB: GB/s of rows\n row bytes    kvprim  memcpy per row  one memcpy  random read   "
           "x per row  of one memcpy  of reading\n",
           name);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        work w = {memory, rows, {index[0], index[1], index[2], index[3]}, sizes[s], moved_bytes / sizes[s]};
        double g[contenders];
        for (int k = 0; k < sets; k++)
            for (int64_t i = 0; i < w.count; i++)
                index[k][i] = (int32_t)below((uint64_t)(table_bytes / w.row_bytes));
        measure(&w, f, g);
        printf("%10lld %9.2f %15.2f %11.2f %12.2f %11.2f %14.2f %11.2f\n", (long long)w.row_bytes, g[0], g[1], g[2],
               g[3], g[0] / g[1], g[0] / g[2], g[0] / g[3]);
        if (judge && w.row_bytes <= 256)
            bench_target("of a memcpy per row", g[0] / g[1], ">=", 1.3);
        if (judge && w.row_bytes == 1024)
            bench_target("of one memcpy of as many bytes", g[0] / g[2], ">=", 0.8);
    }
}

/* Lists the copies of random pages of all layers, by an index of the rows or of the pages. Nothing lies at the tables'
   addresses: a list needs none of their bytes. */
static void list_runs(int64_t page_rows, int64_t row_bytes)
{
    enum { pages = 65536, layers = 61 };
    const int64_t rows = pages * page_rows, most = (int64_t)pages * layers, layer_stride = rows * row_bytes;
    int32_t *const index = (int32_t *)allocate((size_t)(2 * rows) * sizeof(int32_t));
    kvprim_copy_item *const items = (kvprim_copy_item *)allocate_cache((size_t)most * sizeof *items);
    kvprim_move m;
    double ns[repetitions];
    int64_t runs = 0;
    for (int64_t i = 0; i < 2 * rows; i++)
        index[i] = (int32_t)i % (int32_t)page_rows;
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < pages; i++) { /* a page to each place, in a random order */
            const int32_t other = (int32_t)below((uint64_t)i + 1), odd = (int32_t)(i * 2 + side) % pages;
            int32_t *const at = index + side * rows,
                           page = i == other ? odd : at[other * page_rows] / (int32_t)page_rows;
            for (int32_t r = 0; r < page_rows; r++) {
                at[i * page_rows + r] = page * (int32_t)page_rows + r;
                at[other * page_rows + r] = odd * (int32_t)page_rows + r;
            }
        }
    const kvprim_transfer_desc d = {
        .dst = {.data = (char *)((uintptr_t)1 << 45), .rows = rows, .page_rows = page_rows > 1 ? page_rows : 0},
        .src = {.data = (char *)((uintptr_t)1 << 44), .rows = rows, .page_rows = page_rows > 1 ? page_rows : 0},
        .dst_layer_stride = layer_stride,
        .src_layer_stride = layer_stride,
        .layers = layers,
        .row_bytes = row_bytes,
        .dst_index = index,
        .src_index = index + rows,
        .index_type = KVPRIM_I32,
        .count = rows};
    must(kvprim_transfer_moves(&d, &m));
    for (int r = 0; r < repetitions; r++) {
        const double start = bench_ns();
        runs = kvprim_runs(&m, 1, items, most);
        ns[r] = bench_ns() - start;
    }
    printf("%10lld %9lld %11.2f\n", (long long)page_rows, (long long)runs, bench_median(ns, repetitions) / 1e6);
    bench_target("ms for 65,536 pages x 61 layers", bench_median(ns, repetitions) / 1e6, "<=", 40);
    free(items);
    free(index);
}

int main(void)
{
    move_fn *const gathers[contenders] = {gather, gather_loop, gather_memcpy, read_lines};
    move_fn *const stores[contenders] = {store, store_loop, store_memcpy, read_lines};
    char *const memory = allocate_cache((size_t)table_bytes), *const rows = allocate_cache((size_t)moved_bytes);
    int32_t *index[sets];
    bench_machine();
    bench_pin();
    for (int k = 0; k < sets; k++)
        index[k] = (int32_t *)allocate((size_t)(moved_bytes / 64) * sizeof(int32_t));
    fill(memory, (size_t)table_bytes);
    memset(rows, 1, (size_t)moved_bytes);
    table("gather", memory, rows, index, gathers, 1);
    table("store", memory, rows, index, stores, 0);
    printf("\nruns, 65,536 pages x 61 layers\n index/page     runs   ms\n");
    list_runs(1, 16 * 1152);
    list_runs(16, 1152);
    bench_summary();
    for (int k = 0; k < sets; k++)
        free(index[k]);
    free(rows);
    free(memory);
    return 0;
}

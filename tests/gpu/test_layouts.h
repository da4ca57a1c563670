/* SPDX-License-Identifier: MIT */
/* The layouts of tests/core/test_layouts.h on the GPU, by kvprim_cuda_move and by a kernel of one's own, and the device
   functions that such a kernel calls. test_cuda.cu and test_cuda_emulated.cpp include it after test_rows.h. */
#ifndef TEST_GPU_LAYOUTS_H
#define TEST_GPU_LAYOUTS_H

#include "../core/test_layouts.h"

/* Brings `bytes` bytes of memory.got to memory.device, and back. */
static void to_device(size_t bytes);
static void from_device(size_t bytes);
/* Launches a kernel of `threads` threads or a few more. */
template <class Params> static void launch_threads(void (*kernel)(Params), int64_t threads, const Params &params);

/* Returns a multiple of 256 that is at least n. */
static size_t rounded(size_t n)
{
    return (n + 255) / 256 * 256;
}

/* ---- layouts ---- */

static kvprim_cuda_launch layout_launch;

static void layout_run_on_gpu(const layout_case *which, layout_call *c, uint8_t *)
{
    layout_launch.stream = memory.launch ? memory.launch->stream : nullptr;
    to_device(which->bytes);
    if (kvprim_cuda_move(c->moves, c->n, &layout_launch) != KVPRIM_OK)
        fail("layout %s: %s", which->name, kvprim_last_error());
    from_device(which->bytes);
}

/* As layout_run_on_gpu, where the cache of the host lies in pinned memory. */
static void layout_run_over_link(const layout_case *which, layout_call *c, uint8_t *got);

/* A move by a kernel of one's own: a thread moves a byte of one layer. */
struct own_move {
    kvprim_side dst, src;
    int64_t row_bytes, count, layer;
    char *dst_base, *src_base; /* for sides with an array of layers */
    uint32_t *past;            /* per row; NULL: not counted */
    int32_t zero;
};

static __device__ char *own_byte(const kvprim_side &side, int64_t layer, char *base, int64_t row, int64_t byte)
{
    return side.layers ? kvprim_device_byte_in(side, base, row, byte) : kvprim_device_byte(side, layer, row, byte);
}

static __global__ void move_by_bytes(const own_move m)
{
    const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, i = t / m.row_bytes, byte = t % m.row_bytes;
    if (i >= m.count)
        return;
    uint32_t *const past = byte == 0 && m.past ? m.past + i : nullptr;
    const int64_t to = kvprim_device_row(m.dst, i, past), from = kvprim_device_row(m.src, i, past);
    if (to < 0 || (from < 0 && !m.zero))
        return;
    *own_byte(m.dst, m.layer, m.dst_base, to, byte) =
        from < 0 ? char(0) : *own_byte(m.src, m.layer, m.src_base, from, byte);
}

static void layout_run_own_kernel(const layout_case *which, layout_call *c, uint8_t *got)
{
    const size_t flags = rounded(which->bytes), bytes = flags + LAYOUT_COUNT * sizeof(uint32_t);
    uint32_t *const past = reinterpret_cast<uint32_t *>(got + flags);
    memset(past, 0, LAYOUT_COUNT * sizeof *past);
    to_device(bytes);
    for (size_t k = 0; k < c->n; k++) {
        const kvprim_move &m = c->moves[k];
        CHECK(!m.dst.layers || !kvprim_device_byte(m.dst, 0, 0, 0)); /* the GPU could not tell */
        for (int32_t l = 0; l < m.layers; l++) {
            uint32_t *const flag = reinterpret_cast<uint32_t *>(memory.device + flags);
            const own_move one = {m.dst,
                                  m.src,
                                  m.row_bytes,
                                  m.count,
                                  l,
                                  kvprim_side_layer(&m.dst, l),
                                  kvprim_side_layer(&m.src, l),
                                  l == 0 && m.rejected ? flag : nullptr,
                                  m.zero};
            launch_threads<own_move>(move_by_bytes, m.count * m.row_bytes, one);
        }
    }
    from_device(bytes);
    for (int i = 0; i < LAYOUT_COUNT; i++)
        reinterpret_cast<layout_names *>(got)->rejected += past[i] != 0;
}

static void test_layouts()
{
    for (const layout_case &one : layout_cases) {
        for (layout_launch.max_sms = 0; layout_launch.max_sms < 3; layout_launch.max_sms += 2)
            layout_one(&one, layout_run_on_gpu, memory.device, memory.got, memory.expected);
        layout_one(&one, layout_run_own_kernel, memory.device, memory.got, memory.expected);
        for (layout_launch.max_sms = 0; one.host && layout_launch.max_sms < 6; layout_launch.max_sms += 5)
            layout_one(&one, layout_run_over_link, memory.device, memory.got, memory.expected);
    }
}

/* ---- kvprim_device_row, kvprim_device_byte ---- */

struct row_question {
    kvprim_side side;
    int64_t *row;
    uint32_t *rejected;
    int64_t count;
};

static __global__ void answer_rows(const row_question q)
{
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < q.count)
        q.row[i] = kvprim_device_row(q.side, i, q.rejected);
}

struct index_rule {
    kvprim_index_type type;
    int64_t base, rows, stride;
};

/* Rows by the index rule, on the GPU and on the host. */
static void one_index_rule(const index_rule *rule)
{
    const int64_t least = rule->type == KVPRIM_I32 ? INT32_MIN : INT64_MIN,
                  most = rule->type == KVPRIM_I32 ? INT32_MAX : INT64_MAX;
    const uint64_t end = uint64_t(rule->base) + uint64_t(rule->rows); /* some of these wrap */
    const int64_t under = int64_t(uint64_t(rule->base) - 1), last = int64_t(end - 1), past_it = int64_t(end);
    const int64_t values[] = {least,      least + 1,      -1,   0,       1,        under,
                              rule->base, rule->base + 1, last, past_it, most - 1, most};
    const int64_t count = sizeof values / sizeof *values;
    const size_t rows = 4096, counter = 8192, bytes = 8192 + 256;
    int64_t *const got = reinterpret_cast<int64_t *>(memory.got + rows);
    uint32_t *const rejected = reinterpret_cast<uint32_t *>(memory.got + counter), past_before = 5;
    kvprim_move m;
    for (int64_t i = 0; i < count; i++)
        set_index(memory.got, rule->type, i * rule->stride, values[i]);
    kvprim_gather_desc d = gather_of(table_of(memory.device + (1 << 20), count), table_of(memory.device + (2 << 20), 1),
                                     1, memory.device, rule->type, rule->base, count, nullptr);
    d.index_stride = rule->stride;
    CHECK(kvprim_gather_moves(&d, &m) == KVPRIM_OK);
    m.src.table.rows = rule->rows; /* more than there is memory for */
    *rejected = past_before;
    to_device(bytes);
    launch_threads<row_question>(answer_rows, count,
                                 {m.src, reinterpret_cast<int64_t *>(memory.device + rows),
                                  reinterpret_cast<uint32_t *>(memory.device + counter), count});
    from_device(bytes);
    uint32_t past = past_before, on_host = past_before;
    m.src.index = memory.got;
    for (int64_t i = 0; i < count; i++) {
        const int64_t value = index_at(memory.got, rule->type, i * rule->stride);
        const int64_t row = ruled(value, rule->base, rule->rows);
        past += row == -2;
        if (got[i] != (row < 0 ? -1 : row) || kvprim_device_row(m.src, i, &on_host) != got[i])
            fail("index %lld, base %lld, %lld rows: row %lld, not %lld", print_i64(value), print_i64(rule->base),
                 print_i64(rule->rows), print_i64(got[i]), print_i64(row));
    }
    if (*rejected != past || on_host != past)
        fail("base %lld: %u rejected, %u on the host, not %u", print_i64(rule->base), *rejected, on_host, past);
    m.src.index = nullptr, m.src.table.rows = 3;
    CHECK(kvprim_device_row(m.src, 2, nullptr) == 2 && kvprim_device_row(m.src, 3, nullptr) == -1 &&
          kvprim_device_row(m.src, -1, &on_host) == -1 && on_host == past);
    CHECK(kvprim_device_row(m.src, 3, &on_host) == -1 && on_host == past + 1);
}

static void test_device_rows()
{
    static const index_rule rules[] = {{KVPRIM_I32, 0, 7, 1},
                                       {KVPRIM_I64, 0, 7, 2},
                                       {KVPRIM_I32, -3, 7, 3},
                                       {KVPRIM_I32, INT32_MAX - 3, 7, 1},
                                       {KVPRIM_I32, INT32_MIN, 7, 1},
                                       {KVPRIM_I32, int64_t(1) << 40, 7, 1},
                                       {KVPRIM_I64, INT64_MIN, 7, 1},
                                       {KVPRIM_I64, INT64_MAX - 7, 7, 1},
                                       {KVPRIM_I64, INT64_MAX - 3, 7, 1},
                                       {KVPRIM_I64, 50000, int64_t(1) << 33, 1}};
    for (const index_rule &rule : rules)
        one_index_rule(&rule);
}

struct byte_question {
    kvprim_side side;
    const int64_t *layer, *row, *byte;
    uint64_t *address;
    int64_t count;
};

static __global__ void answer_bytes(const byte_question q)
{
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < q.count)
        q.address[i] = (uint64_t)kvprim_device_byte(q.side, q.layer[i], q.row[i], q.byte[i]);
}

/* A table of any pages and heads; its memory is not touched. */
static kvprim_transfer_desc fake_table(int64_t row_bytes, int32_t heads)
{
    static const int64_t all_rows[] = {1, 7, 100, 1 << 20, (int64_t(1) << 32) + 3, int64_t(1) << 36};
    static const int64_t pages[] = {0, 0, 1, 3, 16, 48, 64, 1000, 1 << 20, (int64_t(1) << 32) + 1};
    kvprim_transfer_desc d = {};
    const bool huge = row_bytes > 4096; /* then fewer rows, so that all stays below 2^56 */
    d.dst = table_of(reinterpret_cast<void *>(uintptr_t(1) << 50), all_rows[below(huge ? 4 : 6)]);
    d.src = table_of(reinterpret_cast<void *>(uintptr_t(1) << 20), 1);
    const int64_t piece = row_bytes / heads, gap = chance(2) ? 0 : int64_t(below(40));
    d.dst.page_rows = pages[below(huge ? 7 : 10)];
    d.dst.heads = heads;
    const int64_t inside = d.dst.page_rows ? d.dst.page_rows : d.dst.rows;
    if (heads > 1 && chance(2)) { /* head-major */
        d.dst.stride = piece + gap, d.dst.head_stride = inside * d.dst.stride + int64_t(below(2)) * 48;
        d.dst.page_stride = d.dst.page_rows ? heads * d.dst.head_stride + gap : 0;
    } else {
        d.dst.head_stride = heads > 1 ? piece + gap : 0;
        d.dst.stride = heads * (piece + gap);
        d.dst.page_stride = d.dst.page_rows ? inside * d.dst.stride + int64_t(below(2)) * 48 : 0;
    }
    d.dst_layer_stride = int64_t(1) << 56;
    d.layers = 4, d.src_layer_stride = row_bytes;
    d.row_bytes = row_bytes, d.count = 1;
    return d;
}

static void one_random_table(int64_t row_bytes, int32_t heads)
{
    enum { asked = 64 };
    const kvprim_transfer_desc d = fake_table(row_bytes, heads);
    int64_t *const layer = reinterpret_cast<int64_t *>(memory.got), *const row = layer + asked,
                   *const byte = row + asked;
    uint64_t *const got = reinterpret_cast<uint64_t *>(byte + asked);
    int64_t *const on = reinterpret_cast<int64_t *>(memory.device);
    const size_t bytes = 4 * asked * sizeof *layer;
    kvprim_move m;
    if (kvprim_transfer_moves(&d, &m) != KVPRIM_OK) {
        fail("%s", kvprim_last_error());
        return;
    }
    for (int i = 0; i < asked; i++) {
        layer[i] = int64_t(below(4));
        row[i] = int64_t(chance(4) ? uint64_t(d.dst.rows) - 1 : below(uint64_t(d.dst.rows)));
        byte[i] = int64_t(below(uint64_t(row_bytes)));
    }
    to_device(bytes);
    launch_threads<byte_question>(
        answer_bytes, asked,
        {m.dst, on, on + asked, on + 2 * asked, reinterpret_cast<uint64_t *>(on + 3 * asked), asked});
    from_device(bytes);
    for (int i = 0; i < asked; i++) {
        const int64_t page = d.dst.page_rows ? row[i] / d.dst.page_rows : 0, in_page = row[i] - page * d.dst.page_rows;
        const int64_t piece = row_bytes / heads, head = byte[i] / piece;
        const uint64_t want =
            (uint64_t(1) << 50) + uint64_t(layer[i] * d.dst_layer_stride + page * d.dst.page_stride +
                                           in_page * d.dst.stride + head * d.dst.head_stride + byte[i] - head * piece);
        const uint64_t on_host = reinterpret_cast<uintptr_t>(kvprim_device_byte(m.dst, layer[i], row[i], byte[i]));
        if (got[i] != want || on_host != want)
            fail("row %lld of pages of %lld, byte %lld of %lld in %d heads: %llx, on the host %llx, not %llx",
                 print_i64(row[i]), print_i64(d.dst.page_rows), print_i64(byte[i]), print_i64(row_bytes), int(heads),
                 print_u64(got[i]), print_u64(on_host), print_u64(want));
    }
}

static void test_device_bytes()
{
    static const int64_t sizes[] = {1, 16, 48, 120, 656, 1152, 4096, int64_t(3) << 31};
    random_state = 0;
    for (int round = 0; round < 400; round++) {
        const int64_t row_bytes = sizes[round % 8];
        const int32_t heads[] = {1, 2, 3, 8};
        const int32_t h = heads[below(4)];
        one_random_table(row_bytes, row_bytes % h ? 1 : h);
    }
}

#endif /* TEST_GPU_LAYOUTS_H */

/* SPDX-License-Identifier: MIT */
/* Compares moves that convert, into FP8, INT8 and FP4 caches and out of them, with the kernels of vLLM and SGLang and
   with plain moves of as many bytes. Ratios are within one run.

       nvcc -arch=sm_90 -std=c++17 -O3 tests/bench/bench_convert.cu -o build/bench_convert
       build/bench_convert [--quick] [--only check|store|layouts|mla|gather|four|transfer|general]

   Times are microseconds per launch, as bench_gpu.h takes them, over 8 sets of slots and rotating dense buffers. GB/s
   counts bytes read plus bytes written, scales included. Values are random bf16 of magnitudes 2^-8 to 2^4, of which
   some saturate. Slots are int64, as both engines pass them; the gathers' page tables are int32.

   Before a contender is timed, every byte that its last launch wrote is compared with what plain arithmetic gives: the
   division (or the multiplication by the inverse, where a project does that) in fp32, and the conversions of
   cuda_fp8.h. Section `check` compares a small call of each with kvprim's functions on the CPU too, and all memory.

   limit: kvprim's plain store or gather of rows with as many bytes, read and written, in the same run
   PDL:   with programmatic dependent launch; vLLM's kernels do not use it, SGLang's do

   opponents_convert.h says what each opponent stands for. tests/bench/plots.py reads the tables. */
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_cuda.cuh"
#include "bench_gpu.h"
#include "opponents_convert.h"
#include <cuda_fp16.h>

static int64_t cache_bytes, dense_bytes;    /* for K, and again for V */
constexpr int64_t scales_bytes = 512 * MiB; /* for K, and again for V, in memory of their own */

/* ---- where things lie ---- */

/* Device memory, or the host's copy of it. */
struct memory {
    char *dense[2], *cache[2], *scales[2]; /* K, V */
    float *numbers;                        /* [0], [1]: scales of K and V; from 64 and 128 on, of their heads */
};
static memory device;

static const float *number(const memory &m, bool v, bool by_head)
{
    return m.numbers + (by_head ? v ? 128 : 64 : v);
}

static float number_at(int i)
{
    return i < 64 ? i == 0 ? 0.0213f : 0.0171f : 0.0137f + 0.0011f * float(i % 64);
}

/* Values whose magnitude is 2^-8 to 2^4, two in a word. A pair is also a number in fp32, and each also one in fp16. */
__host__ __device__ inline uint32_t bf16_pair(uint64_t n)
{
    const uint64_t h = hash_u64(n);
    const uint32_t low = uint32_t(h & 0x807f) | (119 + uint32_t(h >> 8 & 0xff) % 12) << 7;
    const uint32_t high = uint32_t(h >> 32 & 0x807f) | (119 + uint32_t(h >> 40 & 0xff) % 12) << 7;
    return low | high << 16;
}

__global__ static void fill_bf16(uint32_t *words, int64_t count, uint64_t seed)
{
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
        words[i] = bf16_pair(uint64_t(i) + seed);
}

/* Bytes of which none is a NaN in any type of 8 bits. */
__global__ static void fill_bytes(uint32_t *words, int64_t count, uint64_t seed)
{
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
        words[i] = uint32_t(hash_u64(uint64_t(i) + seed)) & 0xf3f3f3f3;
}

/* In each of `count` blocks of `block` bytes, `words` words from byte `first` on become scales (fp32 of 2^-7 to 2^-6,
   or bytes of UE8M0), or pairs of bf16. */
enum special { SCALES, SCALES_E8M0, PAIRS };
__global__ static void fill_part(char *data, int64_t count, int64_t block, int64_t first, int64_t words, special what)
{
    for (int64_t n = blockIdx.x; n < count; n += gridDim.x)
        for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
            const uint64_t h = hash_u64(uint64_t(n * words + i));
            reinterpret_cast<uint32_t *>(data + n * block + first)[i] =
                what == SCALES        ? 120u << 23 | uint32_t(h & 0x7fffff)
                : what == SCALES_E8M0 ? 0x76767676u + (uint32_t(h) & 0x03030303u)
                                      : bf16_pair(h);
        }
}

static void fill_dense()
{
    for (int kv = 0; kv < 2; kv++)
        fill_bf16<<<4096, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(device.dense[kv]), dense_bytes / 4,
                                            uint64_t(kv) << 40);
    CUDA(cudaGetLastError());
}

/* Sets of slots: random rows, or random pages that are filled in order, as by a prompt. */
struct slot_sets : value_sets<int64_t> {
    int64_t rows;

    slot_sets(int64_t rows_, int64_t count_, int64_t page_rows = 1) : rows(rows_)
    {
        const index_sets random(rows / page_rows, (count_ + page_rows - 1) / page_rows, sets_count, 5);
        count = count_, sets = sets_count;
        for (int set = 0; set < sets; set++)
            for (int64_t i = 0; i < count; i++)
                host.push_back(random.host_set(set)[i / page_rows] * page_rows + i % page_rows);
        device = upload(host);
    }
};

static std::string place(int64_t elements, int64_t tokens)
{
    return std::to_string(elements) + " x " + std::to_string(tokens);
}

/* ---- what a move must give ---- */

/* A side of a move, as a kernel reads it. */
struct plain_side {
    kvprim_table table;
    kvprim_format format;
    const void *index;
    int64_t piece_bytes;
    bool wide;
};

struct plain_move {
    plain_side dst, src;
    int64_t elements, count;
};

__host__ __device__ static int64_t size_of(kvprim_dtype type)
{
    return type == KVPRIM_F32 ? 4 : type == KVPRIM_F16 || type == KVPRIM_BF16 ? 2 : 1;
}

/* Bytes before element e of a row. */
__host__ __device__ static int64_t bytes_to(kvprim_dtype type, int64_t e)
{
    return type == KVPRIM_F4E2M1 ? e / 2 : e * size_of(type);
}

static plain_side side_of(const kvprim_side &s)
{
    return {s.table, s.format, s.index, s.piece_bytes, s.index_type == KVPRIM_I64};
}

static plain_move plain_of(const kvprim_move &m)
{
    const plain_side src = side_of(m.src);
    return {side_of(m.dst), src, kvpi_elements_in(src.format.dtype ? src.format.dtype : KVPRIM_U8, m.row_bytes),
            m.count};
}

/* Bytes that a move reads and writes, without indices. */
static double bytes_of(const plain_move &m)
{
    double bytes = 0;
    for (const plain_side *const s : {&m.dst, &m.src}) {
        bytes += double(bytes_to(s->format.dtype, m.elements));
        if (s->format.scale == KVPRIM_SCALE_TILE)
            bytes += double(m.elements / s->format.tile * size_of(s->format.scale_dtype));
    }
    return bytes * double(m.count);
}

__device__ static int64_t row_of(const plain_side &s, int64_t i)
{
    return !s.index ? i : s.wide ? static_cast<const int64_t *>(s.index)[i] : static_cast<const int32_t *>(s.index)[i];
}

__device__ static char *element_of(const plain_side &s, int64_t row, int64_t byte)
{
    const int64_t page = s.table.page_rows > 0 ? row / s.table.page_rows : 0;
    return static_cast<char *>(s.table.data) + page * s.table.page_stride +
           (row - page * s.table.page_rows) * s.table.stride + byte / s.piece_bytes * s.table.head_stride +
           byte % s.piece_bytes;
}

__device__ static char *scale_of(const plain_side &s, int64_t row, int64_t tile)
{
    const kvprim_format &f = s.format;
    char *const base = f.scales ? static_cast<char *>(f.scales) : static_cast<char *>(s.table.data) + f.scale_offset;
    const int64_t page = s.table.page_rows > 0 ? row / s.table.page_rows : 0;
    const bool tiles = f.scale == KVPRIM_SCALE_TILE;
    return base + (tiles ? page * f.scale_page_stride + (row - page * s.table.page_rows) * f.scale_stride : 0) +
           tile * f.scale_tile_stride;
}

/* Element e of a row, at `from`. */
__device__ static float decoded(kvprim_dtype type, const char *from, int64_t e = 0)
{
    const uint8_t byte = uint8_t(*from);
    const uint32_t half = uint32_t(byte) >> e % 2 * 4;
    switch (type) {
    case KVPRIM_F4E2M1:
        return (half & 8 ? -0.5f : 0.5f) * float((0xc8643210u >> (half & 7) * 4) & 15);
    case KVPRIM_F8E8M0:
        return __uint_as_float(uint32_t(byte) << 23);
    case KVPRIM_F32:
        return *reinterpret_cast<const float *>(from);
    case KVPRIM_F16:
        return __half2float(*reinterpret_cast<const __half *>(from));
    case KVPRIM_BF16:
        return __bfloat162float(*reinterpret_cast<const __nv_bfloat16 *>(from));
    case KVPRIM_INT8:
        return float(int8_t(byte));
    default:
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, type == KVPRIM_F8E4M3 ? __NV_E4M3 : __NV_E5M2)));
    }
}

__device__ static uint32_t encoded(kvprim_dtype type, float x)
{
    const float a = fabsf(x);
    switch (type) {
    case KVPRIM_F4E2M1: /* midpoints, which go to the even code */
        return (signbit(x) ? 8 : 0) + (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
               (a >= 3.5f) + (a > 5);
    case KVPRIM_F8E8M0:
        return __float_as_uint(x) >> 23;
    case KVPRIM_F32:
        return __float_as_uint(x);
    case KVPRIM_F16:
        return __half_as_ushort(__float2half_rn(x));
    case KVPRIM_BF16:
        return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    case KVPRIM_INT8:
        return uint8_t(__float2int_rn(fminf(fmaxf(x, -127.f), 127.f)));
    default:
        return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, type == KVPRIM_F8E4M3 ? __NV_E4M3 : __NV_E5M2);
    }
}

/* What a check finds: wrong elements and scales; and, where a project multiplies by the inverse, elements that differ
   from the quotient's, and those that are more than a step from it. */
struct found {
    unsigned long long wrong, elements, differ, far;
};

/* Writes or compares `bytes` bytes. */
__device__ static bool settle(char *at, uint32_t bits, int64_t bytes, bool poison)
{
    bool same = true;
    for (int64_t b = 0; b < bytes; b++) {
        const char want = char(bits >> 8 * b);
        if (poison)
            at[b] = char(~want);
        else
            same &= at[b] == want;
    }
    return same;
}

/* A warp takes the elements of one scale, or 256. `poison` writes what must not be there. */
__global__ static void check_moves(const plain_move m, bool poison, bool inverse, found *sum)
{
    const kvprim_format &to = m.dst.format, &from = m.src.format;
    const int64_t to_size = size_of(to.dtype);
    const bool compute = to.scale == KVPRIM_SCALE_TILE;
    const kvprim_format &scaled = to.scale ? to : from;
    const int64_t unit = scaled.scale == KVPRIM_SCALE_TILE || scaled.scale == KVPRIM_SCALE_HEAD ? scaled.tile
                         : m.elements < 256                                                     ? m.elements
                                                                                                : 256;
    const int64_t units = (m.elements + unit - 1) / unit, lane = threadIdx.x % 32;
    const int64_t step = int64_t(gridDim.x) * blockDim.x / 32;
    const float largest = to.dtype == KVPRIM_INT8     ? 127.f
                          : to.dtype == KVPRIM_F8E5M2 ? 57344.f
                          : to.dtype == KVPRIM_F4E2M1 ? 6.f
                                                      : 448.f;
    const int64_t pair = to.dtype == KVPRIM_F4E2M1 ? 2 : 1; /* of elements in a byte */
    const float outer = scaled.tensor_scale ? *scaled.tensor_scale : 1.f;
    unsigned long long wrong = 0, differ = 0, far = 0;
    for (int64_t n = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; n < m.count * units; n += step) {
        const int64_t i = n / units, t = n % units, first = t * unit, end = min(first + unit, m.elements);
        const int64_t dst = row_of(m.dst, i), src = row_of(m.src, i);
        float scale = 1;
        if (compute) {
            float most = 0;
            for (int64_t e = first + lane; e < end; e += 32)
                most = fmaxf(most, fabsf(decoded(from.dtype, element_of(m.src, src, bytes_to(from.dtype, e)), e)));
            for (int s = 16; s > 0; s /= 2)
                most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
            scale = fmaxf(most / largest / outer, to.scale_min > 0 ? to.scale_min : FLT_MIN);
            if (to.scale_dtype == KVPRIM_F8E8M0 || to.scale_power_of_two)
                scale = __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0xff800000);
            const uint32_t bits = encoded(to.scale_dtype, scale);
            if (lane == 0)
                wrong += !settle(scale_of(m.dst, dst, t), bits, size_of(to.scale_dtype), poison);
            scale = to.scale_dtype == KVPRIM_F8E4M3 ? decoded(to.scale_dtype, reinterpret_cast<const char *>(&bits))
                                                    : scale;
            scale *= outer;
        } else if (scaled.scale) {
            const plain_side &s = to.scale ? m.dst : m.src;
            const char *const at = scale_of(s, to.scale ? dst : src, scaled.scale == KVPRIM_SCALE_TENSOR ? 0 : t);
            scale = decoded(scaled.scale_dtype, at) * outer;
        }
        for (int64_t e = first + lane * pair; e < end; e += 32 * pair) {
            uint32_t all = 0, bits = 0, divided = 0;
            for (int64_t k = 0; k < pair; k++) {
                const char *const at = element_of(m.src, src, bytes_to(from.dtype, e + k));
                bits = uint8_t(*at);
                if (from.dtype) {
                    const float x = decoded(from.dtype, at, e + k);
                    divided = to.scale ? encoded(to.dtype, x / scale) : 0;
                    bits = !to.scale ? encoded(to.dtype, scaled.scale ? x * scale : x)
                           : inverse || (pair == 2 && to.scale_inverse) ? encoded(to.dtype, x * (1.f / scale))
                                                                        : divided;
                }
                all |= bits << 4 * k;
            }
            wrong += !settle(element_of(m.dst, dst, bytes_to(to.dtype, e)), all, to_size, poison);
            if (inverse && bits != divided) {
                const int32_t a = bits & 127, b = divided & 127;
                differ++;
                far += (a > b ? a - b : b - a) > 1 || ((bits ^ divided) & 128 && a + b > 1);
            }
        }
    }
    if (wrong)
        atomicAdd(&sum->wrong, wrong);
    if (differ)
        atomicAdd(&sum->differ, differ);
    if (far)
        atomicAdd(&sum->far, far);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd(&sum->elements, (unsigned long long)(m.count * m.elements));
}

static found *device_found;
static found inverses; /* of all contenders that multiply by the inverse */

static found check_all(const std::vector<plain_move> &moves, bool poison, bool inverse)
{
    found sum = {};
    CUDA(cudaMemsetAsync(device_found, 0, sizeof sum, stream));
    for (const plain_move &m : moves)
        check_moves<<<2112, 256, 0, stream>>>(m, poison, inverse && m.dst.format.scale != 0, device_found);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(&sum, device_found, sizeof sum, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return sum;
}

/* ---- jobs and contenders ---- */

/* A call of kvprim: its descriptor, and the formats that this points to. */
struct call {
    enum { STORE, GATHER, TRANSFER } what;
    kvprim_store_desc store;
    kvprim_gather_desc gather[2]; /* of what is converted, and of what is copied as it is */
    int gathers;
    kvprim_transfer_desc transfer;
    kvprim_format from, to, to_v; /* from: of K and of V */
    kvprim_layout preset;

    std::vector<kvprim_move> moves() const
    {
        kvprim_move m[2] = {};
        if (what == STORE)
            check_kvprim(kvprim_store_moves(&store, m));
        else if (what == TRANSFER)
            check_kvprim(kvprim_transfer_moves(&transfer, m));
        else
            for (int n = 0; n < gathers; n++)
                check_kvprim(kvprim_gather_moves(&gather[n], &m[n]));
        return {m, m + (m[1].count > 0 ? 2 : 1)};
    }
    void enqueue(bool pdl, int32_t max_sms) const
    {
        const kvprim_cuda_launch launch = on_stream(pdl, max_sms);
        if (what == STORE)
            check_kvprim(kvprim_cuda_store(&store, &launch));
        else if (what == TRANSFER)
            check_kvprim(kvprim_cuda_transfer(&transfer, &launch));
        else if (gathers == 1)
            check_kvprim(kvprim_cuda_gather(&gather[0], &launch));
        else
            check_kvprim(kvprim_cuda_move(moves().data(), 2, &launch));
    }
};

/* What launch i moves, whoever does it: the call that `build` fills in, which is zero before. */
struct job {
    std::string name;
    std::function<void(call *, int i)> build;

    std::unique_ptr<call> build_call(int i) const
    {
        auto c = std::make_unique<call>();
        build(c.get(), i);
        return c;
    }
    std::vector<plain_move> moves(int i) const
    {
        std::vector<plain_move> all;
        for (const kvprim_move &m : build_call(i)->moves())
            for (int32_t l = 0; l < m.layers; l++) {
                all.push_back(plain_of(m));
                all.back().dst.table.data = kvprim_side_layer(&m.dst, l);
                all.back().src.table.data = kvprim_side_layer(&m.src, l);
            }
        return all;
    }
};

static contender contend(const char *name, const job &j, const std::function<void(int)> &enqueue, bool inverse = false)
{
    double bytes = 0;
    for (const plain_move &m : j.moves(0))
        bytes += bytes_of(m);
    contender c = {name, enqueue, bytes, launches_for(bytes)};
    c.poison = [=](int i) { check_all(j.moves(i), true, inverse); };
    c.verify = [=](int i) {
        const found f = check_all(j.moves(i), false, inverse);
        if (inverse)
            inverses.elements += f.elements, inverses.differ += f.differ, inverses.far += f.far;
        if (f.wrong == 0 && f.far == 0)
            return;
        printf("FAIL %s, %s: of %llu elements %llu are wrong, %llu more than a step from the quotient\n", name,
               j.name.c_str(), f.elements, f.wrong, f.far);
        exit(1);
    };
    return c;
}

static contender contend_kvprim(const char *name, const job &j, bool pdl = false, bool inverse = false,
                                int32_t max_sms = 0)
{
    return contend(
        name, j, [=](int i) { j.build_call(i)->enqueue(pdl, max_sms); }, inverse);
}

/* Measures, and returns the microseconds by the contenders' names. */
struct times {
    std::vector<contender> all;

    explicit times(std::vector<contender> c) : all(std::move(c))
    {
        measure(all);
    }
    const contender *find(const char *name) const
    {
        for (const contender &c : all)
            if (strcmp(c.name, name) == 0)
                return &c;
        return nullptr;
    }
    double us(const char *name) const
    {
        return find(name) ? find(name)->us : NAN;
    }
    double rate(const char *name) const
    {
        return find(name) ? gb_per_s(*find(name)) : NAN;
    }
    /* kvprim's rate, as a part of that of plain moves. */
    double part(const char *name, const char *limit) const
    {
        return rate(name) / rate(limit);
    }
};

/* ---- stores ---- */

enum kind {
    TENSOR, /* e4m3, a scale for K and one for V */
    HEADS,  /* e4m3, a scale for each head */
    INT8,
    E5M2,
    UNSCALED,
    FROM_F16,
    FROM_F32,
    ROW,             /* e4m3, a scale computed for each row */
    TOKEN_HEAD,      /* e4m3, one for each row and head, after the head, by the inverse */
    TOKEN_HEAD_INT8, /* the same of int8 */
    NVFP4,           /* vLLM's and FlashInfer's pages: of K, of its e4m3 scales, the same of V */
    MXFP4,           /* scales of e8m0 in memory of their own */
    NVFP4_MLA,       /* rows of 432 bytes: 512 elements, 32 scales of e4m3, 16 bytes that stay, 64 bf16 */
    MLA,             /* 512 and 64 elements beside each other, with one scale */
    DS_MLA,
    DS_MLA_V4,
    INDEXER,
    INDEXER_UE8M0
};

struct shape {
    const char *name;
    kind what;
    bool hnd;
    int heads, head_elements;
    int64_t page_rows;
    convert_launch *vllm, *sglang;
    int64_t pad = 0; /* bytes after each head, of which the first 4 are its scale; K and V then share each page */

    bool latent() const
    {
        return what >= NVFP4_MLA;
    }
    bool four() const
    {
        return what >= NVFP4 && what <= NVFP4_MLA;
    }
    const char *preset() const
    {
        return what == DS_MLA          ? "fp8_ds_mla"
               : what == DS_MLA_V4     ? "fp8_ds_mla_v4"
               : what == INDEXER       ? "fp8_indexer"
               : what == INDEXER_UE8M0 ? "fp8_indexer_ue8m0"
                                       : nullptr;
    }
    int64_t elements() const
    {
        return heads * head_elements;
    }
    int64_t row() const /* of K in the cache, and of what lies beside it */
    {
        return what == DS_MLA                     ? 656
               : what == MLA || what == DS_MLA_V4 ? 576
               : what == NVFP4_MLA                ? 432
               : four()                           ? elements() / 2
                                                  : heads * head();
    }
    int64_t head() const
    {
        return head_elements + pad;
    }
    int64_t page() const
    {
        return what == DS_MLA_V4 ? (584 * page_rows + 575) / 576 * 576 /* SGLang's padding */
               : what >= INDEXER ? 132 * page_rows
               : what == NVFP4   ? 2 * (row() + elements() / 16) * page_rows
                                 : row() * page_rows * (pad ? 2 : 1);
    }
    int64_t rows() const
    {
        return cache_bytes / page() * page_rows;
    }
    kvprim_dtype source() const
    {
        return what == FROM_F16 ? KVPRIM_F16 : what == FROM_F32 ? KVPRIM_F32 : KVPRIM_BF16;
    }
    int64_t token_bytes() const /* of K or V in the dense buffers */
    {
        return what == DS_MLA_V4 ? 1024 : elements() * size_of(source());
    }
};

static kvprim_format format_of(const shape &s, const memory &m, bool v)
{
    kvprim_format f = {};
    f.dtype = s.what == INT8 || s.what == TOKEN_HEAD_INT8 ? KVPRIM_INT8
              : s.what == E5M2                            ? KVPRIM_F8E5M2
                                                          : KVPRIM_F8E4M3;
    if (s.four()) {
        f.dtype = KVPRIM_F4E2M1, f.scale = KVPRIM_SCALE_TILE, f.tile = s.what == MXFP4 ? 32 : 16;
        f.scale_dtype = s.what == MXFP4 ? KVPRIM_F8E8M0 : KVPRIM_F8E4M3;
        f.scales = s.what == MXFP4 ? m.scales[v] : nullptr;
        f.scale_offset = s.what == NVFP4 ? s.row() * s.page_rows : s.what == NVFP4_MLA ? 256 : 0;
        f.scale_stride = s.what == NVFP4 ? s.elements() / 16 : 0;
        f.tensor_scale = s.what == MXFP4 ? nullptr : number(m, v, false);
        f.scale_inverse = s.what != MXFP4;
    } else if (s.what == ROW || s.what == TOKEN_HEAD || s.what == TOKEN_HEAD_INT8) {
        f.scale = KVPRIM_SCALE_TILE;
        f.tile = s.what == ROW ? 0 : s.head_elements;
        f.scales = s.pad ? nullptr : m.scales[v];
        f.scale_offset = s.pad ? s.head_elements : 0;
        f.scale_tile_stride = s.pad ? s.head() : 0;
        f.scale_inverse = s.what == TOKEN_HEAD;
        f.scale_min = s.what == TOKEN_HEAD ? 1e-6f : 0;
    } else if (s.what == HEADS) {
        f.scale = KVPRIM_SCALE_HEAD;
        f.tile = s.head_elements;
        f.scales = const_cast<float *>(number(m, v, true));
    } else if (s.what != UNSCALED) {
        f.scale = KVPRIM_SCALE_TENSOR;
        f.scales = const_cast<float *>(number(m, v && s.what != MLA, false));
    }
    return f;
}

static kvprim_table cache_of(const shape &s, const memory &m, bool v, int64_t rows)
{
    kvprim_table t = table_at(m.cache[v && s.what != MLA] + (v && s.what == MLA ? 512 : 0), rows);
    t.page_rows = s.page_rows;
    if (s.what == MLA)
        t.stride = 576, t.page_stride = s.page();
    if (s.pad || s.what == NVFP4) /* K and V share each page */
        t.data = m.cache[0] + (v ? s.page() / 2 : 0), t.page_stride = s.page();
    if (s.what == NVFP4_MLA)
        t.data = m.cache[0] + (v ? 304 : 0), t.stride = s.row();
    if (s.pad) {
        t.heads = s.heads, t.head_stride = s.head();
        t.stride = s.row();
    }
    if (s.hnd) {
        t.heads = s.heads;
        t.head_stride = s.page_rows * s.head_elements;
        t.stride = s.head_elements;
    }
    return t;
}

static kvprim_status find_layout(const char *name, void *data, int64_t rows, int64_t page_rows, int64_t page_stride,
                                 kvprim_layout *layout)
{
    kvprim_layout_sizes sizes = {};
    sizes.data = data, sizes.rows = rows, sizes.page_rows = page_rows, sizes.page_stride = page_stride;
    return kvprim_layout_find(name, &sizes, layout);
}

/* Fills in a call that stores `tokens` tokens from byte `at` of the dense buffers on. */
static void build_store(call *c, const shape &s, const memory &m, const int64_t *slot, int64_t rows, int64_t tokens,
                        int64_t at)
{
    kvprim_store_desc &d = c->store;
    c->what = call::STORE;
    c->from.dtype = s.source();
    d = store_of({}, table_at(m.dense[0] + at, tokens, s.token_bytes()), s.what == DS_MLA_V4 ? 896 : s.token_bytes(),
                 slot, tokens);
    d.k.format = &c->from;
    if (s.preset()) {
        check_kvprim(find_layout(s.preset(), m.cache[0], rows, s.page_rows, s.page(), &c->preset));
        d.k_cache = c->preset.k_cache, d.v_cache = c->preset.v_cache;
        d.v_bytes = c->preset.v_elements * 2;
        if (d.v_bytes)
            d.v = s.what == DS_MLA_V4 ? table_at(m.dense[0] + at + 896, tokens, 1024)
                                      : table_at(m.dense[1] + at, tokens, 128);
    } else {
        c->to = format_of(s, m, false), c->to_v = format_of(s, m, true);
        d.k_cache = cache_of(s, m, false, rows), d.v_cache = cache_of(s, m, true, rows);
        d.k_cache.format = &c->to, d.v_cache.format = &c->to_v;
        d.v_bytes = s.latent() ? 128 : d.k_bytes;
        d.v = table_at(m.dense[1] + at, tokens, d.v_bytes);
        d.v.format = &c->from;
        if (s.what == NVFP4_MLA)
            d.v_cache.format = d.v.format = nullptr;
    }
}

static convert_params params_of(const shape &s, const memory &m, const int64_t *slot, int64_t tokens, int64_t at)
{
    convert_params p = {};
    p.k = reinterpret_cast<const __nv_bfloat16 *>(m.dense[0] + at);
    p.v = reinterpret_cast<const __nv_bfloat16 *>(m.dense[1] + at);
    p.k_cache = reinterpret_cast<uint8_t *>(m.cache[0]);
    p.v_cache = s.pad ? p.k_cache + s.page() / 2 : reinterpret_cast<uint8_t *>(m.cache[1]);
    p.slot = slot;
    p.k_scale = number(m, false, s.what == HEADS), p.v_scale = number(m, true, s.what == HEADS);
    p.page_stride = s.page();
    p.row_stride = s.hnd ? s.head_elements : s.row();
    p.head_stride = s.hnd ? s.page_rows * s.head_elements : s.head();
    p.k_stride = s.elements(), p.v_stride = s.latent() ? 64 : s.elements();
    p.page_rows = int32_t(s.page_rows);
    p.scale_step = s.what == HEADS;
    p.tokens = uint32_t(tokens);
    return p;
}

/* Where launch i reads. */
static int64_t dense_at(int i, int64_t bytes)
{
    return rotated(i, bytes, dense_bytes);
}

static job store_job(const shape &s, const slot_sets &slots, int64_t tokens)
{
    return {s.name + (" " + place(s.elements(), tokens)), [&s, &slots, tokens](call *c, int i) {
                build_store(c, s, device, slots.set(i), slots.rows, tokens, dense_at(i, tokens * s.token_bytes()));
            }};
}

/* Bytes of a row of each of `tensors` tensors, so that a plain move reads and writes `bytes` for each token; but a
   multiple of 128, or of 32 if that is small. */
static int64_t plain_row(double bytes, int tensors)
{
    const int64_t row = int64_t(bytes / 2 / tensors), to = row >= 512 ? 128 : 32;
    return (row + to / 2) / to * to;
}

/* A plain store of as many bytes as j moves, to as many tensors. */
static contender contend_plain(const char *name, const job &j, int64_t tokens, const slot_sets &slots, bool pdl)
{
    const std::vector<plain_move> moves = j.moves(0);
    double bytes = 0;
    for (const plain_move &m : moves)
        bytes += bytes_of(m) / double(tokens);
    const int tensors = moves.size() == 2 && moves[1].elements == moves[0].elements ? 2 : 1;
    const int64_t row = plain_row(bytes, tensors), rows = std::min(slots.rows, cache_bytes / row);
    const job plain = {"plain store of " + place(row, tokens), [=, &slots](call *c, int i) {
                           const int64_t at = dense_at(i, tokens * row);
                           const auto dense = [=](int kv) { return table_at(device.dense[kv] + at, tokens); };
                           c->what = call::STORE;
                           c->store = store_of(table_at(device.cache[0], rows), dense(0), row, slots.set(i), tokens);
                           if (tensors == 2)
                               c->store.v_cache = table_at(device.cache[1], rows), c->store.v = dense(1),
                               c->store.v_bytes = row;
                       }};
    return contend_kvprim(name, plain, pdl);
}

/* Rows of the cache that a store of s, and a plain one of as many bytes, can both have. */
static int64_t common_rows(const shape &s)
{
    const int64_t bytes = std::max(s.row(), (s.token_bytes() + s.row()) / 2 + 256);
    const int64_t rows = std::min(s.rows(), cache_bytes / bytes);
    const int64_t fit = s.what == ROW ? scales_bytes / 4 : rows;
    return std::min(rows, fit) / s.page_rows * s.page_rows;
}

/* The contenders of a store: kvprim, vLLM, SGLang, plain, and "+PDL". */
static times measure_store(const shape &s, const slot_sets &slots, int64_t tokens)
{
    const job j = store_job(s, slots, tokens);
    std::vector<contender> c;
    const bool by_inverse = s.what == TOKEN_HEAD;
    for (const bool pdl : {false, true})
        c.push_back(contend_kvprim(pdl ? "kvprim+PDL" : "kvprim", j, pdl, by_inverse));
    const auto theirs = [&s, &slots, tokens](convert_launch *launch, bool pdl) {
        return [&s, &slots, tokens, launch, pdl](int i) {
            const int64_t at = dense_at(i, tokens * s.token_bytes());
            CUDA(launch(params_of(s, device, slots.set(i), tokens, at), pdl, stream));
        };
    };
    if (s.vllm)
        c.push_back(contend("vLLM", j, theirs(s.vllm, false), by_inverse));
    if (s.sglang)
        for (const bool pdl : {false, true})
            c.push_back(contend(pdl ? "SGLang+PDL" : "SGLang", j, theirs(s.sglang, pdl), true));
    c.push_back(contend_plain("plain", j, tokens, slots, false));
    c.push_back(contend_plain("plain+PDL", j, tokens, slots, true));
    return times(c);
}

/* A line of a table of stores. */
struct store_line {
    std::string where;
    times t;
};

static void print_store_head(const char *title)
{
    printf("\n%s\n%-18s %5s %6s %9s %9s %9s %6s %6s | %9s %9s %6s %6s | %6s %6s\n", title, "", "", "tokens", "kvprim",
           "vLLM", "SGLang", "/ vLLM", "/ SGL", "PDL", "SGLang", "/ vLLM", "/ SGL", "GB/s", "limit");
}

static void store_point(const shape &s, const slot_sets &slots, int64_t tokens, const char *order,
                        std::vector<store_line> *lines)
{
    const times t = measure_store(s, slots, tokens);
    const double ours = t.us("kvprim"), vllm = t.us("vLLM"), sglang = t.us("SGLang");
    const double ours_pdl = t.us("kvprim+PDL"), sglang_pdl = t.us("SGLang+PDL");
    printf("%-18s %5s %6lld", s.name, order, (long long)tokens);
    print_numbers({ours, vllm, sglang}, 9, 3);
    print_numbers({ours / vllm, ours / sglang}, 6, 3);
    printf(" |");
    print_numbers({ours_pdl, sglang_pdl}, 9, 3);
    print_numbers({ours_pdl / vllm, ours_pdl / sglang_pdl}, 6, 3);
    printf(" | %6.0f", t.rate("kvprim"));
    print_numbers({t.part("kvprim", "plain")}, 6, 3);
    printf("\n");
    lines->push_back({s.name + (" x " + std::to_string(tokens)) + (*order ? " in pages" : ""), t});
}

template <int heads, int head_elements> static shape tensor_shape()
{
    convert_launch *const vllm = launch_vllm_store<heads, head_elements>;
    return {"", TENSOR, false, heads, head_elements, 16, vllm, launch_sglang_quant<heads * head_elements>};
}

/* Sizes off the powers of two: 96, 576 (of 192 each), 1,000 (of 200 each). */
static std::vector<shape> tensor_shapes()
{
    return {tensor_shape<1, 96>(),  tensor_shape<1, 128>(), tensor_shape<4, 128>(),  tensor_shape<3, 192>(),
            tensor_shape<5, 200>(), tensor_shape<8, 128>(), tensor_shape<16, 128>(), tensor_shape<32, 128>()};
}

/* vLLM launches without PDL, SGLang with it. */
static void judge_store(const std::string &what, const std::vector<store_line> &lines, double of_vllm)
{
    const auto figures = [&](const char *ours, const char *theirs) {
        std::vector<figure> f;
        for (const store_line &l : lines)
            add_figure(&f, l.t.us(ours) / l.t.us(theirs), l.where);
        return f;
    };
    std::vector<figure> best;
    for (const store_line &l : lines)
        add_figure(&best, std::fmin(l.t.us("kvprim"), l.t.us("kvprim+PDL")) / l.t.us("vLLM"), l.where);
    judge_mean(what + ", best way / vLLM", best, of_vllm);
    judge_worst(what + ", PDL off / vLLM", figures("kvprim", "vLLM"), '<', 1.02);
    judge_both(what + ", PDL on / SGLang", figures("kvprim+PDL", "SGLang+PDL"), 0.9, 1.02);
    judge_both(what + ", PDL off / SGLang without", figures("kvprim", "SGLang"), 0.9, 1.02);
    judge_worst(what + ", PDL on / off", figures("kvprim+PDL", "kvprim"), '<', 1.02);
}

/* The line of a table that judges single points. */
static const times &line_of(const std::vector<store_line> &lines, const std::string &where)
{
    return std::find_if(lines.begin(), lines.end(), [&](const store_line &l) { return l.where == where; })->t;
}

static std::vector<int64_t> token_counts()
{
    if (quick)
        return {1, 64, 65536};
    return {1, 8, 64, 333, 1024, 4096, 16384, 65536};
}

static void store()
{
    std::vector<store_line> lines;
    fill_dense();
    printf("\nstores: us, and kvprim's time / theirs; the same with PDL (vLLM's without); kvprim's GB/s without PDL, "
           "and as a part of\nthe limit's. pages: random pages that are filled in order, not random slots\n");
    print_store_head("store of K and V by elements of a row, bf16 to e4m3, a scale for each tensor");
    for (shape s : tensor_shapes()) {
        const std::string name = std::to_string(s.elements());
        s.name = name.c_str();
        for (const int64_t tokens : token_counts()) {
            const slot_sets slots(common_rows(s), tokens);
            store_point(s, slots, tokens, "", &lines);
        }
    }
    const times &few = line_of(lines, "1024 x 64"), &many = line_of(lines, "1024 x 65536");
    judge("e4m3 store, part of a plain store of as many bytes", many.part("kvprim", "plain"), '>', 0.95,
          "65,536 x 1,024");
    judge("e4m3 store, 64 tokens of 8 heads of 128, PDL, us", few.us("kvprim+PDL"), '<', 1.15);
    judge("e4m3 store, 64 tokens of 8 heads of 128, us", few.us("kvprim"), '<', 1.5);
    judge_store("e4m3 store", lines, 0.5);
}

/* ---- stores in other layouts and formats ---- */

static std::vector<shape> layout_shapes()
{
    convert_launch *const vllm = launch_vllm_store<8, 128>;
    const auto others = [](const char *name, kind what) {
        return shape{name, what, false, 8, 128, 16, nullptr, nullptr};
    };
    return {{"NHD", TENSOR, false, 8, 128, 16, vllm, launch_sglang_quant<1024>},
            {"NHD, heads", HEADS, false, 8, 128, 16, vllm, nullptr},
            {"HND", TENSOR, true, 8, 128, 16, vllm, nullptr},
            {"HND, heads", HEADS, true, 8, 128, 16, vllm, nullptr},
            {"token and head", TOKEN_HEAD, false, 8, 128, 16, launch_vllm_token_head<8, 128>, nullptr, 4},
            {"token/head, 144", TOKEN_HEAD, false, 8, 128, 16, launch_vllm_token_head<8, 128>, nullptr, 16},
            {"token/head, int8", TOKEN_HEAD_INT8, false, 8, 128, 16, nullptr, nullptr, 4},
            others("row", ROW),
            others("int8", INT8),
            others("e5m2", E5M2),
            others("no scale", UNSCALED),
            others("from fp16", FROM_F16),
            others("from fp32", FROM_F32)};
}

/* Random slots; and, for many tokens, pages in order, as a prompt fills them. */
static void all_orders(const shape &s, const std::vector<int64_t> &counts, std::vector<store_line> *lines)
{
    for (const int64_t tokens : counts)
        for (const bool pages : {false, true})
            if (!pages || tokens >= 4096) {
                const slot_sets slots(common_rows(s), tokens, pages ? s.page_rows : 1);
                store_point(s, slots, tokens, pages ? "pages" : "", lines);
            }
}

static void layouts()
{
    std::vector<store_line> lines;
    fill_dense();
    print_store_head("store of K and V of 8 heads of 128 elements in pages of 16");
    for (const shape &s : layout_shapes())
        all_orders(s, quick ? std::vector<int64_t>{64, 65536} : std::vector<int64_t>{1, 64, 1024, 16384, 65536},
                   &lines);
    judge_store("store in other layouts", lines, 0.6);
}

/* ---- stores of latents and of the indexer's keys ---- */

static std::vector<shape> latent_shapes()
{
    return {{"mla", MLA, false, 1, 512, 64, launch_vllm_mla, nullptr},
            {"fp8_ds_mla", DS_MLA, false, 1, 512, 64, launch_vllm_ds_mla, nullptr},
            {"fp8_ds_mla_v4", DS_MLA_V4, false, 1, 448, 64, nullptr, launch_sglang_v4},
            {"fp8_indexer", INDEXER, false, 1, 128, 64, launch_vllm_indexer<false>, launch_sglang_indexer},
            {"fp8_indexer_ue8m0", INDEXER_UE8M0, false, 1, 128, 64, launch_vllm_indexer<true>, nullptr}};
}

static void latents()
{
    fill_dense();
    print_store_head("store of latents and of the indexer's keys, bf16 to e4m3, pages of 64");
    for (const shape &s : latent_shapes()) {
        std::vector<store_line> lines;
        all_orders(s, token_counts(), &lines);
        judge_store(s.name, lines, 0.6);
        if (s.what != DS_MLA)
            continue;
        const times &few = line_of(lines, "fp8_ds_mla x 64");
        judge("fp8_ds_mla store, 64 tokens, PDL, us", few.us("kvprim+PDL"), '<', 1.3);
        judge("fp8_ds_mla store, 64 tokens, us", few.us("kvprim"), '<', 1.3, "without PDL");
        for (const bool pages : {false, true})
            judge("fp8_ds_mla store, part of a plain store of as many bytes",
                  lines[lines.size() - (pages ? 1 : 2)].t.part("kvprim", "plain"), '>', 0.85,
                  pages ? "65,536 tokens, pages in order" : "65,536 tokens, random slots");
    }
}

/* ---- gathers to bf16 ---- */

struct gather_shape {
    shape s;
    gather_convert_launch *page, *token; /* vLLM's newest kernel, and the one before it */

    int64_t out() const /* elements of a row of dst */
    {
        return s.what == DS_MLA || s.what == NVFP4_MLA ? 576 : s.what == DS_MLA_V4 ? 512 : s.elements();
    }
    bool by_pages() const /* a page is a row: it has one scale, and its rows lie as in dst */
    {
        return s.what == TENSOR && !s.hnd;
    }
};

static void build_gather(call *c, const gather_shape &g, const memory &m, const int32_t *index, bool by_pages,
                         int64_t rows, int64_t tokens, int64_t at)
{
    const shape &s = g.s;
    const int64_t in_row = by_pages ? s.page_rows : 1, count = tokens / in_row;
    const kvprim_table dst = table_at(m.dense[0] + at, count, g.out() * 2 * in_row);
    c->what = call::GATHER, c->gathers = 1;
    c->to.dtype = KVPRIM_BF16;
    if (s.preset()) {
        check_kvprim(find_layout(s.preset(), m.cache[0], rows, s.page_rows, s.page(), &c->preset));
        const kvprim_layout &p = c->preset;
        c->gather[0] = gather_of(dst, p.k_cache, p.k_elements, index, count);
        if (p.v_elements) {
            const kvprim_table beside = table_at(m.dense[0] + at + p.k_elements * 2, tokens, g.out() * 2);
            c->gathers = 2;
            c->gather[1] = gather_of(beside, p.v_cache, p.v_elements * 2, index, count);
        }
    } else {
        c->from = format_of(s, m, false);
        c->from.scale_inverse = 0;
        kvprim_table src = by_pages ? table_at(m.cache[0], rows / s.page_rows) : cache_of(s, m, false, rows);
        src.format = &c->from;
        c->gather[0] = gather_of(dst, src, bytes_to(c->from.dtype, s.elements()) * in_row, index, count);
        if (s.what == NVFP4_MLA) {
            const kvprim_table beside = table_at(m.dense[0] + at + 1024, tokens, g.out() * 2);
            c->gathers = 2;
            c->gather[1] = gather_of(beside, cache_of(s, m, true, rows), 128, index, count);
        }
    }
    c->gather[0].dst.format = &c->to;
}

static gather_convert_params gather_params_of(const gather_shape &g, const memory &m, const page_sets &sets, int i,
                                              int64_t at)
{
    gather_convert_params p = {};
    p.cache = reinterpret_cast<const uint8_t *>(m.cache[0]);
    p.dst = reinterpret_cast<__nv_bfloat16 *>(m.dense[0] + at);
    p.table = sets.index(true, i), p.starts = sets.starts.get(), p.request = sets.request.get();
    p.scale = number(m, false, false);
    p.pages_per_request = sets.length / sets.page_rows;
    p.page_stride = g.s.page(), p.row_stride = g.s.row(), p.dst_stride = g.out();
    p.requests = int32_t(sets.requests()), p.tokens = int32_t(sets.tokens);
    p.page_rows = int32_t(sets.page_rows);
    return p;
}

/* Fills the cache with numbers that are finite. */
static void fill_cache(const shape &s, const memory &m, int64_t bytes, int64_t rows)
{
    const int64_t pages = rows / s.page_rows;
    fill_bytes<<<4096, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(m.cache[0]), bytes / 4, 77);
    if (s.what == MXFP4)
        fill_part<<<4096, 32, 0, stream>>>(m.scales[0], rows, s.elements() / 32, 0, s.elements() / 128, SCALES_E8M0);
    if (s.pad)
        fill_part<<<4096, 32, 0, stream>>>(m.cache[0], 2 * rows * s.heads, s.head(), s.head_elements, 1, SCALES);
    if (s.what == DS_MLA) {
        fill_part<<<4096, 32, 0, stream>>>(m.cache[0], rows, 656, 512, 4, SCALES);
        fill_part<<<4096, 32, 0, stream>>>(m.cache[0], rows, 656, 528, 32, PAIRS);
    }
    if (s.what == DS_MLA_V4) {
        fill_part<<<4096, 128, 0, stream>>>(m.cache[0], pages, s.page(), 576 * 64, 128, SCALES_E8M0);
        for (int row = 0; row < 64; row++)
            fill_part<<<4096, 32, 0, stream>>>(m.cache[0] + 576 * row, pages, s.page(), 448, 32, PAIRS);
    }
    if (s.what == INDEXER)
        fill_part<<<4096, 64, 0, stream>>>(m.cache[0], pages, s.page(), 128 * 64, 64, SCALES);
    CUDA(cudaGetLastError());
}

/* Where a launch writes: K's and V's dense buffers follow each other. */
static int64_t gathered_at(int i, int64_t bytes)
{
    return rotated(i, bytes, 2 * dense_bytes);
}

static job gather_job(const gather_shape &g, const page_sets &sets, bool by_pages)
{
    return {g.s.name + (" gather of " + place(g.out(), sets.tokens)), [=, &g, &sets](call *c, int i) {
                build_gather(c, g, device, sets.index(by_pages, i), by_pages, sets.pages * sets.page_rows, sets.tokens,
                             gathered_at(i, sets.tokens * g.out() * 2));
            }};
}

static contender contend_plain_gather(const char *name, double bytes_per_token, const page_sets &sets, bool by_pages)
{
    const int64_t in_row = by_pages ? sets.page_rows : 1, count = sets.tokens / in_row;
    const int64_t row = plain_row(bytes_per_token * double(in_row), 1);
    const int64_t rows = std::min(sets.pages * sets.page_rows / in_row, 2 * cache_bytes / row);
    return contend_kvprim(
        name, {"plain gather of " + place(row, count), [=, &sets](call *c, int i) {
                   const kvprim_table dst = table_at(device.dense[0] + gathered_at(i, row * count), count);
                   c->what = call::GATHER, c->gathers = 1;
                   c->gather[0] = gather_of(dst, table_at(device.cache[0], rows), row, sets.index(by_pages, i), count);
               }});
}

static times measure_gather(const gather_shape &g, const page_sets &sets)
{
    std::vector<contender> c;
    for (const bool by_pages : {true, false})
        for (const bool pdl : {false, true})
            if (!by_pages || g.by_pages())
                c.push_back(contend_kvprim(by_pages ? pdl ? "pages+PDL" : "pages"
                                           : pdl    ? "tokens+PDL"
                                                    : "tokens",
                                           gather_job(g, sets, by_pages), pdl));
    for (const bool newest : {true, false}) {
        gather_convert_launch *const launch = newest ? g.page : g.token;
        if (launch)
            c.push_back(contend(newest ? "vLLM page" : "vLLM token", gather_job(g, sets, false), [=, &g, &sets](int i) {
                const int64_t at = gathered_at(i, sets.tokens * g.out() * 2);
                CUDA(launch(gather_params_of(g, device, sets, i, at), stream));
            }));
    }
    const double bytes = c[0].bytes_moved / double(sets.tokens);
    if (g.by_pages())
        c.push_back(contend_plain_gather("plain pages", bytes, sets, true));
    c.push_back(contend_plain_gather("plain tokens", bytes, sets, false));
    return times(c);
}

static std::vector<gather_shape> gather_shapes()
{
    const auto plain = [](const char *name, kind what, bool hnd, int heads, int head_elements, int64_t page_rows,
                          int64_t pad = 0) {
        return shape{name, what, hnd, heads, head_elements, page_rows, nullptr, nullptr, pad};
    };
    return {{plain("NHD", TENSOR, false, 4, 128, 16), launch_vllm_gather_page<512>, launch_vllm_gather_token<512>},
            {plain("NHD", TENSOR, false, 8, 128, 16), launch_vllm_gather_page<1024>, launch_vllm_gather_token<1024>},
            {plain("NHD", TENSOR, false, 32, 128, 16), launch_vllm_gather_page<4096>, launch_vllm_gather_token<4096>},
            {plain("NHD, heads", HEADS, false, 8, 128, 16), nullptr, nullptr},
            {plain("HND", TENSOR, true, 8, 128, 16), nullptr, nullptr},
            {plain("token and head", TOKEN_HEAD, false, 8, 128, 16, 4), nullptr, nullptr},
            {plain("token/head, 144", TOKEN_HEAD, false, 8, 128, 16, 16), nullptr, nullptr},
            {plain("mla", TENSOR, false, 1, 576, 64), launch_vllm_gather_page<576>, launch_vllm_gather_token<576>},
            {plain("fp8_ds_mla", DS_MLA, false, 1, 512, 64), launch_vllm_upconvert<576>, nullptr},
            {plain("fp8_ds_mla_v4", DS_MLA_V4, false, 1, 448, 64), nullptr, nullptr},
            {plain("fp8_indexer", INDEXER, false, 1, 128, 64), nullptr, nullptr}};
}

struct gather_figures {
    std::vector<figure> best, pages, tokens, latent, latent_best, pdl; /* of vLLM's better kernel; and others */
};

static times gather_point(const gather_shape &g, const page_sets &sets, gather_figures *f)
{
    const times t = measure_gather(g, sets);
    const double theirs = std::fmin(t.us("vLLM page"), t.us("vLLM token"));
    const char *const ours = g.by_pages() ? "pages" : "tokens";
    const char *const plain = g.by_pages() ? "plain pages" : "plain tokens";
    const std::string where = g.s.name + (" " + place(g.out(), sets.tokens));
    printf("%-15s %4lld %6lld", g.s.name, (long long)g.out(), (long long)sets.tokens);
    print_numbers(
        {t.us("pages"), t.us("pages+PDL"), t.us("tokens"), t.us("tokens+PDL"), t.us("vLLM page"), t.us("vLLM token")},
        9, 3);
    print_numbers({t.us("pages") / theirs, t.us("tokens") / theirs}, 6, 3);
    print_numbers({t.rate(ours)}, 6, 0);
    print_numbers({t.part(ours, plain)}, 6, 3);
    printf("\n");
    const bool latent = g.s.what == DS_MLA;
    add_figure(latent ? &f->latent : &f->tokens, t.us("tokens") / theirs, where);
    add_figure(&f->pages, t.us("pages") / theirs, where);
    if (latent)
        add_figure(&f->latent_best, std::fmin(t.us("tokens"), t.us("tokens+PDL")) / theirs, where);
    else
        add_figure(&f->best, std::fmin(t.us("pages"), t.us("pages+PDL")) / theirs, where);
    add_figure(&f->pdl, t.us("tokens+PDL") / t.us("tokens"), where + " tokens");
    add_figure(&f->pdl, t.us("pages+PDL") / t.us("pages"), where + " pages");
    return t;
}

static bool is_h200()
{
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    return strstr(p.name, "H200") != nullptr;
}

static void gather()
{
    gather_figures f;
    printf(
        "\ngathers: us, by page tables and by slots; of vLLM's kernel of 2026 and the one before, or of its kernel for "
        "fp8_ds_mla;\nkvprim's time / the better; GB/s without PDL, by page tables where it can, and as a part of the "
        "limit's\ngather of requests' tokens from random pages, e4m3 to bf16\n%-15s %4s %6s %9s %9s %9s %9s %9s %9s "
        "%6s %6s %6s %6s\n",
        "", "row", "tokens", "pages", "PDL", "slots", "PDL", "vLLM", "before", "pages", "slots", "GB/s", "limit");
    for (const gather_shape &g : gather_shapes()) {
        const int64_t row = std::max(g.s.row(), (g.out() * 2 + g.s.row()) / 2 + 256);
        const int64_t rows = std::min(g.s.rows(), cache_bytes / row) / g.s.page_rows * g.s.page_rows;
        fill_cache(g.s, device, 2 * cache_bytes, rows);
        for (const int64_t tokens :
             quick ? std::vector<int64_t>{64, 65536} : std::vector<int64_t>{64, 1024, 8192, 65536, 262144}) {
            if (tokens * g.out() * 2 > 2 * GiB)
                continue;
            const page_sets sets(rows / g.s.page_rows, g.s.page_rows, tokens, std::min<int64_t>(tokens, 4096), 9);
            const times t = gather_point(g, sets, &f);
            if (g.s.what != TENSOR || g.s.hnd || g.out() != 1024 || tokens != 65536)
                continue;
            if (is_h200())
                judge("gather of pages to bf16, GB/s", std::max(t.rate("pages"), t.rate("pages+PDL")), '>', 3900,
                      "65,536 x 1,024");
            judge("gather of pages to bf16, part of a plain one of as many bytes", t.part("pages", "plain pages"), '>',
                  0.95, "65,536 x 1,024");
        }
    }
    judge_mean("gather by pages, best way / vLLM", f.best, 0.6);
    judge_worst("gather by pages, PDL off / vLLM", f.pages, '<', 1.02);
    judge_worst("gather by slots, PDL off / vLLM", f.tokens, '<', 1.02);
    judge_mean("gather of fp8_ds_mla, best way / vLLM", f.latent_best, 0.6);
    judge_worst("gather of fp8_ds_mla, PDL off / vLLM", f.latent, '<', 1.02);
    judge_worst("gather, PDL on / off", f.pdl, '<', 1.02);
}

/* ---- elements of 4 bits ---- */

static shape named_shape(const char *name, kind what)
{
    return what >= NVFP4_MLA ? shape{name, what, false, 1, 512, 64, nullptr, nullptr}
                             : shape{name, what, false, 8, 128, 16, nullptr, nullptr};
}

static std::vector<shape> four_shapes()
{
    return {named_shape("nvfp4", NVFP4), named_shape("mxfp4", MXFP4), named_shape("nvfp4, 432 B", NVFP4_MLA)};
}

/* The contenders: kvprim, plain, each also "+PDL"; e4m3+PDL: the same elements as e4m3, with a scale of the tensor, or
   with tiles where V is copied. */
static times measure_four(const shape &s, bool store, int64_t tokens)
{
    const shape wide = named_shape("e4m3", s.what == NVFP4_MLA ? DS_MLA : TENSOR);
    const gather_shape g = {s, nullptr, nullptr}, g_wide = {wide, nullptr, nullptr};
    const int64_t rows = std::min(common_rows(s), common_rows(wide)) / s.page_rows * s.page_rows;
    const slot_sets slots(rows, tokens);
    const page_sets pages(rows / s.page_rows, s.page_rows, tokens, std::min<int64_t>(tokens, 4096), 9);
    fill_cache(s, device, 2 * cache_bytes, rows);
    const job j = store ? store_job(s, slots, tokens) : gather_job(g, pages, false),
              e4m3 = store ? store_job(wide, slots, tokens) : gather_job(g_wide, pages, false);
    std::vector<contender> c;
    for (const bool pdl : {false, true}) {
        c.push_back(contend_kvprim(pdl ? "kvprim+PDL" : "kvprim", j, pdl));
        const char *const plain = pdl ? "plain+PDL" : "plain";
        c.push_back(store ? contend_plain(plain, j, tokens, slots, pdl)
                          : contend_plain_gather(plain, c[0].bytes_moved / double(tokens), pages, false));
    }
    c.push_back(contend_kvprim("e4m3+PDL", e4m3, true));
    return times(c);
}

static void four()
{
    std::vector<figure> stores, gathers, few;
    printf("\nelements of 4 bits: us, with PDL, of e4m3 with PDL; GB/s without PDL, and as a part of the limit's\n"
           "%-12s %6s %6s %9s %9s %9s %6s %6s %6s\n",
           "", "", "tokens", "kvprim", "PDL", "e4m3", "/ e4m3", "GB/s", "limit");
    for (const bool store : {true, false})
        for (const shape &s : four_shapes())
            for (const int64_t tokens :
                 quick ? std::vector<int64_t>{64, 65536} : std::vector<int64_t>{64, 1024, 8192, 65536}) {
                fill_dense();
                const times t = measure_four(s, store, tokens);
                const double of_e4m3 = t.us("kvprim+PDL") / t.us("e4m3+PDL"), part = t.part("kvprim", "plain");
                const std::string where = std::string(s.name) + (store ? " store" : " gather");
                printf("%-12s %6s %6lld", s.name, store ? "store" : "gather", (long long)tokens);
                print_numbers({t.us("kvprim"), t.us("kvprim+PDL"), t.us("e4m3+PDL")}, 9, 3);
                print_numbers({of_e4m3}, 6, 3);
                print_numbers({t.rate("kvprim")}, 6, 0);
                print_numbers({part}, 6, 3);
                printf("\n");
                if (tokens == 65536)
                    add_figure(store ? &stores : &gathers, part, where);
                if (tokens == 64)
                    add_figure(&few, of_e4m3, where);
            }
    judge_worst("4 bits: store, part of a plain one of as many bytes", stores, '>', 0.85);
    judge_worst("4 bits: gather, part of a plain one of as many bytes", gathers, '>', 0.9);
    judge_worst("4 bits: 64 tokens, PDL, / e4m3", few, '<', 1.2);
}

/* ---- transfers of layers ---- */

constexpr int32_t layers = 32;

/* Rows of `elements`, bf16 in the dense buffer, e4m3 in the cache; or as many bytes, plain. */
static void build_transfer(call *c, bool store, bool plain, int64_t elements, const slot_sets &sets, int i)
{
    kvprim_format &wide = c->from, &narrow = c->to;
    wide.dtype = KVPRIM_BF16, narrow.dtype = KVPRIM_F8E4M3;
    narrow.scale = KVPRIM_SCALE_TENSOR, narrow.scales = const_cast<float *>(number(device, false, false));
    narrow.scale_layer_stride = KVPRIM_SCALES_SHARED;
    const int64_t dense_row = plain ? elements * 3 / 2 : elements * 2, cache_row = plain ? dense_row : elements;
    kvprim_table dense = table_at(device.dense[0], sets.rows), cache = table_at(device.cache[0], sets.rows);
    dense.format = plain ? nullptr : &wide, cache.format = plain ? nullptr : &narrow;
    const int64_t to = store ? cache_row : dense_row, from = store ? dense_row : cache_row;
    c->what = call::TRANSFER;
    c->transfer = transfer_of(store ? cache : dense, store ? dense : cache, from, layers, sets.set(i), sets.set(i + 1),
                              sets.count);
    c->transfer.dst_layer_stride = sets.rows * to, c->transfer.src_layer_stride = sets.rows * from;
}

static contender contend_transfer(const char *name, bool store, bool plain, int64_t elements, const slot_sets &sets,
                                  int32_t max_sms)
{
    const job j = {"transfer of " + place(elements, sets.count),
                   [=, &sets](call *c, int i) { build_transfer(c, store, plain, elements, sets, i); }};
    return contend_kvprim(name, j, false, false, max_sms);
}

static void transfer()
{
    std::vector<figure> parts;
    fill_dense();
    fill_cache(layout_shapes()[0], device, 2 * cache_bytes, 0);
    printf("\ntransfer of %d layers in device memory, bf16 to e4m3 and back, one scale: us, GB/s, and as a part of a "
           "plain transfer's\nof as many bytes; the same on 16 multiprocessors\n%6s %8s %6s %9s %6s %6s %9s %6s %6s\n",
           layers, "", "elements", "rows", "us", "GB/s", "limit", "us", "GB/s", "limit");
    for (const bool store : {true, false})
        for (const int64_t elements : {16 * 1024, 1024, 512}) {
            const int64_t rows = dense_bytes / layers / (2 * elements), count = std::min(rows / 2, 4 * MiB / elements);
            const slot_sets sets(rows, count);
            const times t({contend_transfer("kvprim", store, false, elements, sets, 0),
                           contend_transfer("plain", store, true, elements, sets, 0),
                           contend_transfer("kvprim 16", store, false, elements, sets, 16),
                           contend_transfer("plain 16", store, true, elements, sets, 16)});
            printf("%6s %8lld %6lld %9.2f %6.0f %6.3f %9.2f %6.0f %6.3f\n", store ? "store" : "gather",
                   (long long)elements, (long long)count, t.us("kvprim"), t.rate("kvprim"), t.part("kvprim", "plain"),
                   t.us("kvprim 16"), t.rate("kvprim 16"), t.part("kvprim 16", "plain 16"));
            add_figure(&parts, t.part("kvprim", "plain"), (store ? "store " : "gather ") + place(elements, count));
        }
    judge_worst("transfer of layers, part of a plain one of as many bytes", parts, '>', 0.7);
}

/* ---- sizes, types and addresses that no kernel is made for ---- */

struct odd_move {
    const char *name;
    bool store;
    int64_t elements;
    kvprim_dtype from, to;
    int64_t tile, src_offset, dst_offset; /* tile of computed scales; 0: one scale if a side has 8 bits */
};

static const odd_move odd_moves[] = {{"e4m3, odd", true, 1001, KVPRIM_BF16, KVPRIM_F8E4M3, 0, 0, 0},
                                     {"e4m3, misaligned", true, 1024, KVPRIM_BF16, KVPRIM_F8E4M3, 0, 2, 1},
                                     {"e4m3, tiles of 100", true, 1000, KVPRIM_BF16, KVPRIM_F8E4M3, 100, 0, 0},
                                     {"bf16, odd", false, 1001, KVPRIM_F8E4M3, KVPRIM_BF16, 0, 0, 0},
                                     {"bf16, misaligned", false, 1024, KVPRIM_F8E4M3, KVPRIM_BF16, 0, 1, 2},
                                     {"int8 to fp16", false, 1024, KVPRIM_INT8, KVPRIM_F16, 0, 0, 0},
                                     {"e5m2 to fp32", false, 1024, KVPRIM_F8E5M2, KVPRIM_F32, 0, 0, 0},
                                     {"bf16 to fp16", false, 1024, KVPRIM_BF16, KVPRIM_F16, 0, 0, 0},
                                     {"fp32 to bf16", false, 1024, KVPRIM_F32, KVPRIM_BF16, 0, 0, 0}};

/* What has 8 bits lies in the cache, the rest in the dense buffers; between wider types, from dense to cache memory. */
static void build_odd(call *c, const odd_move &o, const slot_sets &slots, int i)
{
    const int64_t wide = o.elements * size_of(o.store ? o.from : o.to), at = dense_at(i, slots.count * wide);
    const int64_t row_bytes = o.elements * size_of(o.from);
    c->from.dtype = o.from, c->to.dtype = o.to;
    kvprim_format &narrow = o.store ? c->to : c->from;
    if (o.tile) {
        narrow.scale = KVPRIM_SCALE_TILE, narrow.tile = o.tile, narrow.scales = device.scales[0];
    } else if (size_of(narrow.dtype) == 1) {
        narrow.scale = KVPRIM_SCALE_TENSOR, narrow.scales = const_cast<float *>(number(device, false, false));
    }
    char *const cache = !o.store && size_of(o.from) > 1 ? device.dense[1] : device.cache[0];
    kvprim_table indexed = table_at(cache + (o.store ? o.dst_offset : o.src_offset), slots.rows),
                 dense = table_at(device.dense[0] + at + (o.store ? o.src_offset : o.dst_offset), slots.count);
    indexed.format = o.store ? &c->to : &c->from, dense.format = o.store ? &c->from : &c->to;
    c->what = o.store ? call::STORE : call::GATHER, c->gathers = 1;
    if (o.store)
        c->store = store_of(indexed, dense, row_bytes, slots.set(i), slots.count);
    else
        c->gather[0] = gather_of(dense, indexed, row_bytes, slots.set(i), slots.count);
}

static void general()
{
    std::vector<figure> parts;
    printf("\nsizes, types and addresses that no kernel is made for: us, GB/s, and as a part of a plain store's of as "
           "many bytes,\nof aligned rows\n%-20s %8s %6s %9s %6s %6s\n",
           "", "elements", "tokens", "us", "GB/s", "limit");
    for (const odd_move &o : odd_moves) {
        fill_dense();
        fill_cache(layout_shapes()[0], device, cache_bytes, 0);
        for (const int64_t tokens : quick ? std::vector<int64_t>{65536} : std::vector<int64_t>{64, 4096, 65536}) {
            /* the last row of a misaligned table must not reach past the memory */
            const slot_sets slots(dense_bytes / (o.elements * 4) - 1, tokens);
            const job j = {o.name + (" " + place(o.elements, slots.count)),
                           [&o, &slots](call *c, int i) { build_odd(c, o, slots, i); }};
            const times t({contend_kvprim("kvprim", j), contend_plain("plain", j, tokens, slots, false)});
            printf("%-20s %8lld %6lld %9.3f %6.0f %6.3f\n", o.name, (long long)o.elements, (long long)tokens,
                   t.us("kvprim"), t.rate("kvprim"), t.part("kvprim", "plain"));
            if (tokens == 65536)
                add_figure(&parts, t.part("kvprim", "plain"), o.name);
            fill_dense(); /* the plain store has read it, and gathers write it */
            fill_cache(layout_shapes()[0], device, cache_bytes, 0);
        }
    }
    judge_worst("moves that no kernel is made for, part of a plain store, 65,536 rows", parts, '>', 0.4);
}

/* ---- the CPU ---- */

constexpr int64_t part_bytes = 4 * MiB, small_tokens = 320, small_rows = 1024;

/* K's and V's dense rows, caches and scales, one after the other, then numbers and slots. */
static memory memory_at(char *base)
{
    memory m;
    for (int kv = 0; kv < 2; kv++) {
        m.dense[kv] = base + kv * part_bytes;
        m.cache[kv] = base + (2 + kv) * part_bytes;
        m.scales[kv] = base + (4 + kv) * part_bytes;
    }
    m.numbers = reinterpret_cast<float *>(base + 6 * part_bytes);
    return m;
}

struct twin {
    std::vector<char> host, before;
    char *on_gpu;
    memory cpu, gpu;
    int calls = 0;

    twin() : host(7 * part_bytes), before(7 * part_bytes)
    {
        CUDA(cudaMalloc(&on_gpu, host.size()));
        cpu = memory_at(host.data()), gpu = memory_at(on_gpu);
    }
    ~twin()
    {
        CUDA(cudaFree(on_gpu));
    }
    const int64_t *slots(const memory &m) const
    {
        return reinterpret_cast<const int64_t *>(m.numbers) + 1024;
    }
    const int32_t *tokens(const memory &m) const
    {
        return reinterpret_cast<const int32_t *>(slots(m) + small_tokens);
    }
    /* Dense rows of bf16, and 0x5a everywhere else except in what is read. */
    void reset()
    {
        memset(host.data(), 0x5a, host.size());
        for (int64_t i = 0; i < 2 * part_bytes / 4; i++)
            reinterpret_cast<uint32_t *>(host.data())[i] = bf16_pair(uint64_t(i));
        for (int i = 0; i < 256; i++)
            cpu.numbers[i] = number_at(i);
        const index_sets random(small_rows, small_tokens, 1, 3);
        for (int64_t i = 0; i < small_tokens; i++) {
            const_cast<int64_t *>(slots(cpu))[i] = random.host[size_t(i)];
            const_cast<int32_t *>(tokens(cpu))[i] = random.host[size_t(i)];
        }
    }
    void to_gpu()
    {
        CUDA(cudaMemcpyAsync(on_gpu, host.data(), host.size(), cudaMemcpyHostToDevice, stream));
        CUDA(cudaStreamSynchronize(stream));
        before = host;
    }
    /* `host` holds what the CPU gives; all memory is compared. */
    void compare(const std::string &name)
    {
        std::vector<char> got(host.size());
        CUDA(cudaMemcpyAsync(got.data(), on_gpu, got.size(), cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        size_t wrong = 0, changed = 0, first = 0;
        for (size_t i = 0; i < got.size(); i++) {
            changed += host[i] != before[i];
            if (got[i] != host[i] && wrong++ == 0)
                first = i;
        }
        calls++;
        if (wrong == 0 && changed > 0)
            return;
        printf(
            "FAIL %s: %zu bytes differ from the CPU's, which changed %zu; the first lies at %zu of part %zu: %02x, not "
            "%02x\n",
            name.c_str(), wrong, changed, first % part_bytes, first / part_bytes, uint8_t(got[first]),
            uint8_t(host[first]));
        exit(1);
    }
};

/* The scales by which a project multiplies lie 32 floats after the others. */
static void use_inverses(call *c, const shape &s, const memory &m)
{
    if (s.what == TENSOR) {
        c->to.scale_inverse = c->to_v.scale_inverse = 1;
        c->to.scales = m.numbers + 32, c->to_v.scales = m.numbers + 33;
    } else if (s.what == INDEXER)
        c->preset.k_format.scale_inverse = 1;
}

enum who { KVPRIM, KVPRIM_PDL, VLLM, SGLANG, SGLANG_PDL, EVERYBODY };
static const char *const who_names[] = {"kvprim", "kvprim+PDL", "vLLM", "SGLang", "SGLang+PDL"};

static void check_store(twin *t, const shape &s, who w)
{
    convert_launch *const theirs = w == VLLM ? s.vllm : s.sglang;
    if (w >= VLLM && !theirs)
        return;
    call ours = {}, expected = {};
    t->reset();
    for (int kv = 0; kv < 2; kv++)
        t->cpu.numbers[32 + kv] = 1.f / t->cpu.numbers[kv];
    t->to_gpu();
    if (w < VLLM) {
        build_store(&ours, s, t->gpu, t->slots(t->gpu), small_rows, small_tokens, 0);
        ours.enqueue(w == KVPRIM_PDL, 0);
    } else
        CUDA(theirs(params_of(s, t->gpu, t->slots(t->gpu), small_tokens, 0), w == SGLANG_PDL, stream));
    build_store(&expected, s, t->cpu, t->slots(t->cpu), small_rows, small_tokens, 0);
    if (w >= SGLANG)
        use_inverses(&expected, s, t->cpu);
    check_kvprim(kvprim_store(&expected.store));
    t->compare(std::string(who_names[w]) + ", store of " + s.name + " " + place(s.elements(), small_tokens));
}

static void check_gather(twin *t, const gather_shape &g, bool pdl)
{
    call ours = {}, expected = {};
    t->reset();
    t->to_gpu();
    fill_cache(g.s, t->gpu, part_bytes, small_rows);
    CUDA(cudaMemcpyAsync(t->host.data(), t->on_gpu, t->host.size(), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    build_gather(&ours, g, t->gpu, t->tokens(t->gpu), false, small_rows, small_tokens, 0);
    ours.enqueue(pdl, 0);
    build_gather(&expected, g, t->cpu, t->tokens(t->cpu), false, small_rows, small_tokens, 0);
    const std::vector<kvprim_move> moves = expected.moves();
    check_kvprim(kvprim_cpu_move(moves.data(), moves.size()));
    t->compare((pdl ? "kvprim+PDL, gather of " : "kvprim, gather of ") +
               (g.s.name + (" " + place(g.out(), small_tokens))));
}

static void check()
{
    twin t;
    int stores = 0;
    for (const std::vector<shape> &list : {tensor_shapes(), layout_shapes(), latent_shapes(), four_shapes()})
        for (const shape &s : list)
            for (int w = 0; w < EVERYBODY; w++)
                check_store(&t, s, who(w));
    stores = t.calls;
    std::vector<gather_shape> gathers = gather_shapes();
    for (const shape &s : four_shapes())
        gathers.push_back({s, nullptr, nullptr});
    for (const gather_shape &g : gathers)
        for (const bool pdl : {false, true})
            check_gather(&t, g, pdl);
    printf("\n%d stores and %d gathers of %lld tokens: all memory is as after kvprim's functions on the CPU\n", stores,
           t.calls - stores, (long long)small_tokens);
}

/* ---- the program ---- */

static void open_all()
{
    size_t free_bytes, total_bytes;
    std::vector<float> numbers;
    open_gpu(10 * GiB);
    CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    cache_bytes = dense_bytes = std::min(4 * GiB, (int64_t(free_bytes) - 2 * GiB) / 4 / GiB * GiB);
    printf("caches of %lld GiB for K and for V, and dense buffers of as much\n", (long long)(cache_bytes / GiB));
    char *base;
    CUDA(cudaMalloc(&base, size_t(2 * cache_bytes + 2 * dense_bytes + 2 * scales_bytes) + 4096));
    for (int kv = 0; kv < 2; kv++) { /* K's and V's follow each other */
        device.cache[kv] = base + kv * cache_bytes;
        device.dense[kv] = base + 2 * cache_bytes + kv * dense_bytes;
        device.scales[kv] = base + 2 * cache_bytes + 2 * dense_bytes + kv * scales_bytes;
    }
    for (int i = 0; i < 256; i++)
        numbers.push_back(number_at(i));
    device.numbers = upload(numbers).release();
    CUDA(cudaMalloc(&device_found, sizeof *device_found));
    fill_dense();
    measure_copy(device.cache[0], device.dense[0], cache_bytes);
}

/* How far the projects' multiplication by the inverse is from the division. */
static void report_inverses()
{
    if (inverses.elements)
        printf(
            "\nmultiplying by the inverse of the scale: %.3f %% of %.2e elements differ from the quotient's, none by "
            "more than a step\n",
            100.0 * double(inverses.differ) / double(inverses.elements), double(inverses.elements));
}

int main(int argc, char **argv)
{
    return run_program(argc, argv, open_all,
                       {{"check", check},
                        {"store", store},
                        {"layouts", layouts},
                        {"mla", latents},
                        {"gather", gather},
                        {"four", four},
                        {"transfer", transfer},
                        {"general", [] {
                             general();
                             report_inverses();
                         }}});
}

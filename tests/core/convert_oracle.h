/* SPDX-License-Identifier: MIT */
/* What a move that converts must write, from >>format alone and by other means than kvprim's: every value of a type is
   decoded from its fields in double, and the nearest one is searched for. Include it after kvprim.h. */
#ifndef CONVERT_ORACLE_H
#define CONVERT_ORACLE_H

#include <float.h>
#include <math.h>

/* Programs that include this need not link libm. */
static double oracle_ldexp(double x, int exponent)
{
    for (; exponent > 0; exponent--)
        x *= 2;
    for (; exponent < 0; exponent++)
        x /= 2;
    return x;
}

static double oracle_magnitude_of(double x)
{
    return x < 0 ? -x : x;
}

/* Of a power of two. */
static int oracle_exponent(float x)
{
    int exponent = -149;
    while (oracle_ldexp(1, exponent) < (double)x)
        exponent++;
    return exponent;
}

/* ---- elements ---- */

typedef struct oracle_type {
    kvprim_dtype dtype;
    int bytes, mantissa, bias; /* bytes: of two elements of 4 bits; bits of the mantissa; the exponent's bias */
    uint32_t most;             /* the code of the largest finite value */
    uint32_t nan;
    int infinite; /* overflows to infinity */
} oracle_type;

static const oracle_type oracle_types[] = {
    {KVPRIM_F8E4M3, 1, 3, 7, 0x7e, 0x7f, 0},
    {KVPRIM_F8E5M2, 1, 2, 15, 0x7b, 0x7f, 0},
    {KVPRIM_INT8, 1, 0, 0, 127, 0, 0},
    {KVPRIM_F16, 2, 10, 15, 0x7bff, 0x7fff, 1},
    {KVPRIM_BF16, 2, 7, 127, 0x7f7f, 0x7fff, 1},
    {KVPRIM_F4E2M1, 1, 1, 1, 7, 0, 0},
    {KVPRIM_INT4, 1, 0, 0, 7, 0, 0},
    {KVPRIM_F32, 4, 23, 127, 0x7f7fffff, 0x7fffffff, 1},
};
enum { oracle_searched = 7 }; /* of these types; F32 is what doubles are rounded to */

static const oracle_type *oracle_type_of(kvprim_dtype dtype)
{
    for (size_t k = 0; k < sizeof oracle_types / sizeof *oracle_types; k++)
        if (oracle_types[k].dtype == dtype)
            return &oracle_types[k];
    return NULL;
}

/* Elements that share a byte, and the bytes of n. */
static int oracle_packed(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F4E2M1 || dtype == KVPRIM_INT4 ? 2 : 1;
}

static int64_t oracle_bytes(kvprim_dtype dtype, int64_t n)
{
    return n * oracle_type_of(dtype)->bytes / oracle_packed(dtype);
}

static int oracle_counts_nans(kvprim_dtype dtype)
{
    return dtype == KVPRIM_INT8 || dtype == KVPRIM_INT4 || dtype == KVPRIM_F4E2M1;
}

/* The value of a code without its sign; the one after the largest counts on. */
static double oracle_magnitude(const oracle_type *t, uint32_t code)
{
    const uint32_t mantissa = code & (((uint32_t)1 << t->mantissa) - 1);
    const int exponent = (int)(code >> t->mantissa);
    if (t->dtype == KVPRIM_INT8 || t->dtype == KVPRIM_INT4)
        return code;
    if (exponent == 0)
        return oracle_ldexp(mantissa, 1 - t->bias - t->mantissa);
    return oracle_ldexp((double)mantissa + (double)((uint32_t)1 << t->mantissa), exponent - t->bias - t->mantissa);
}

static double oracle_decode(kvprim_dtype dtype, uint32_t code)
{
    const oracle_type *const t = oracle_type_of(dtype);
    if (dtype == KVPRIM_INT8)
        return code < 128 ? (double)code : (double)code - 256;
    if (dtype == KVPRIM_INT4)
        return code < 8 ? (double)code : (double)code - 16;
    const uint32_t sign = (uint32_t)1 << (8 * t->bytes / oracle_packed(dtype) - 1), a = code & (sign - 1);
    const double value = a <= t->most                                 ? oracle_magnitude(t, a)
                         : dtype != KVPRIM_F8E4M3 && a == t->most + 1 ? (double)INFINITY
                                                                      : (double)NAN;
    return code & sign ? -value : value;
}

static uint32_t oracle_encode(kvprim_dtype dtype, float x)
{
    static double magnitudes[oracle_searched][32768];
    const oracle_type *const t = oracle_type_of(dtype);
    if (isnan(x))
        return t->nan;
    if (dtype == KVPRIM_F32) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        return bits;
    }
    double *const values = magnitudes[t - oracle_types];
    if (values[1] == 0)
        for (uint32_t code = 0; code <= t->most + 1; code++)
            values[code] = oracle_magnitude(t, code);
    const double a = oracle_magnitude_of((double)x), past = values[t->most + 1], most = values[t->most];
    uint32_t low = 0, high = t->most + 1; /* values[low] <= a < values[high], unless a is past all */
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        *(values[middle] <= a ? &low : &high) = middle;
    }
    uint32_t code =
        a - values[low] < values[high] - a || (a - values[low] == values[high] - a && low % 2 == 0) ? low : high;
    if (a >= most)
        code = !t->infinite || a < (most + past) / 2 ? t->most : t->most + 1;
    if (dtype == KVPRIM_INT8)
        return signbit(x) ? (256 - code) % 256 : code;
    if (dtype == KVPRIM_INT4)
        return signbit(x) ? (16 - code) % 16 : code;
    return signbit(x) ? code | (uint32_t)1 << (8 * t->bytes / oracle_packed(dtype) - 1) : code;
}

/* A code and its value in memory. */
static uint32_t oracle_code_at(const unsigned char *at, int bytes)
{
    uint8_t b;
    uint16_t h;
    uint32_t w;
    if (bytes == 1)
        return memcpy(&b, at, 1), b;
    if (bytes == 2)
        return memcpy(&h, at, 2), h;
    return memcpy(&w, at, 4), w;
}

static void oracle_put_code(unsigned char *at, int bytes, uint32_t code)
{
    const uint8_t b = (uint8_t)code;
    const uint16_t h = (uint16_t)code;
    memcpy(at, bytes == 1 ? (const void *)&b : bytes == 2 ? (const void *)&h : (const void *)&code, (size_t)bytes);
}

/* Element i of those that follow each other at `at`. */
static uint32_t oracle_code_of(kvprim_dtype dtype, const unsigned char *at, int64_t i)
{
    const uint32_t code = oracle_code_at(at + oracle_bytes(dtype, i), oracle_type_of(dtype)->bytes);
    return oracle_packed(dtype) == 1 ? code : i % 2 ? code / 16 : code % 16;
}

static void oracle_put(kvprim_dtype dtype, unsigned char *at, int64_t i, uint32_t code)
{
    at += oracle_bytes(dtype, i);
    if (oracle_packed(dtype) == 1)
        oracle_put_code(at, oracle_type_of(dtype)->bytes, code);
    else
        *at = (unsigned char)(i % 2 ? *at % 16 + 16 * code : *at / 16 * 16 + code);
}

/* ---- scales ---- */

/* Quotients and products of two floats in double are rounded to float as they would be at once. */
static float oracle_divide(float x, float y)
{
    return (float)((double)x / (double)y);
}

static float oracle_multiply(float x, float y)
{
    return (float)((double)x * (double)y);
}

static int oracle_scale_bytes(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F8E8M0 || dtype == KVPRIM_F8E4M3 ? 1 : dtype == KVPRIM_F16 ? 2 : 4;
}

static float oracle_scale_at(kvprim_dtype dtype, const unsigned char *at)
{
    float scale;
    if (dtype == KVPRIM_F8E4M3 || dtype == KVPRIM_F16)
        return (float)oracle_decode(dtype, oracle_code_at(at, oracle_scale_bytes(dtype)));
    if (dtype == KVPRIM_F8E8M0)
        return *at == 255 ? NAN : (float)oracle_ldexp(1, *at - 127);
    memcpy(&scale, at, sizeof scale);
    return scale;
}

static float oracle_largest(kvprim_dtype dtype)
{
    return (float)oracle_magnitude(oracle_type_of(dtype), oracle_type_of(dtype)->most);
}

/* The scale of n elements. */
static float oracle_computed(const kvprim_format *f, const float *x, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        if (oracle_magnitude_of((double)x[i]) > most) /* no NaN is */
            most = oracle_magnitude_of((double)x[i]);
    float scale = oracle_divide(most < (double)FLT_MAX ? (float)most : FLT_MAX, oracle_largest(f->dtype));
    const float least = f->scale_min > 0 ? f->scale_min : FLT_MIN;
    if (f->tensor_scale) {
        scale = oracle_divide(scale, *f->tensor_scale);
        scale = !(scale > 0) ? 0 : scale > 1.7014118e38f ? 1.7014118e38f : scale;
    }
    scale = scale > least ? scale : least;
    if (f->scale_power_of_two || f->scale_dtype == KVPRIM_F8E8M0) {
        int k = -126;
        while (oracle_ldexp(1, k) < (double)scale)
            k++;
        scale = (float)oracle_ldexp(1, k);
    }
    return scale;
}

/* Writes a computed scale. */
static void oracle_put_scale(kvprim_dtype dtype, unsigned char *at, float scale)
{
    if (dtype == KVPRIM_F8E8M0)
        *at = (unsigned char)(127 + oracle_exponent(scale));
    else if (dtype == KVPRIM_F8E4M3)
        *at = (unsigned char)oracle_encode(dtype, scale);
    else if (dtype == KVPRIM_F16)
        oracle_put_code(at, 2, oracle_encode(dtype, scale > 65504 ? 65504 : scale));
    else
        memcpy(at, &scale, sizeof scale);
}

/* ---- moves ---- */

/* One part, as a caller gives it. Tables have their strides; layers are an array or layer_stride bytes apart. */
typedef struct oracle_side {
    kvprim_table table;
    const void *index;
    kvprim_index_type type;
    int64_t base, stride;
    void *const *layers;
    int64_t layer_stride;
} oracle_side;

typedef struct oracle_move {
    oracle_side dst, src;
    int64_t row_bytes, count;
    int32_t layers;
    int zero;
    uint32_t *rejected;
} oracle_move;

/* 0: the index rule skips the row. */
static int oracle_row(const oracle_side *part, int64_t i, int64_t *row, int *past)
{
    *row = i;
    if (!part->index)
        return 1;
    const int64_t at = i * (part->stride ? part->stride : 1);
    const int64_t index =
        part->type == KVPRIM_I64 ? ((const int64_t *)part->index)[at] : ((const int32_t *)part->index)[at];
    if (index < part->base)
        return 0;
    *row = index - part->base;
    *past |= *row >= part->table.rows;
    return *row < part->table.rows;
}

static unsigned char *oracle_layer(const oracle_side *part, int32_t layer)
{
    return part->layers ? (unsigned char *)part->layers[layer]
                        : (unsigned char *)part->table.data + layer * part->layer_stride;
}

/* Element e of a row of n. */
static unsigned char *oracle_element(const oracle_side *part, unsigned char *layer, int64_t row, int64_t n, int64_t e)
{
    const kvprim_table *const t = &part->table;
    const int64_t piece = n / (t->heads > 1 ? t->heads : 1);
    const int64_t at =
        t->page_rows ? row / t->page_rows * t->page_stride + row % t->page_rows * t->stride : row * t->stride;
    return layer + at + e / piece * t->head_stride + oracle_bytes(t->format->dtype, e % piece);
}

/* Elements of a scale, and where the scale of element e of a row is. */
static int64_t oracle_tile(const oracle_side *part, int64_t n)
{
    const kvprim_format *const f = part->table.format;
    if (f->scale == KVPRIM_SCALE_TENSOR || (f->scale == KVPRIM_SCALE_TILE && f->tile == 0))
        return n;
    return f->tile ? f->tile : n / part->table.heads;
}

static unsigned char *oracle_scale(const oracle_side *part, int32_t l, int64_t row, int64_t n, int64_t e)
{
    const kvprim_format *const f = part->table.format;
    const kvprim_table *const t = &part->table;
    const int64_t bytes = oracle_scale_bytes(f->scale_dtype), tiles = n / oracle_tile(part, n);
    const int64_t page_rows = t->page_rows ? t->page_rows : t->rows, pages = (t->rows + page_rows - 1) / page_rows;
    const int64_t heads = f->scale_heads ? f->scale_heads : 1, in_head = tiles / heads; /* packed if there are heads */
    const int64_t tile_stride = f->scale_tile_stride ? f->scale_tile_stride : bytes;
    int64_t stride = f->scale_stride, page_stride = f->scale_page_stride, layer_stride = f->scale_layer_stride;
    if (layer_stride == KVPRIM_SCALES_SHARED)
        layer_stride = 0;
    if ((f->scales || f->scale_heads) && stride == 0)
        stride = in_head * tile_stride;
    if (f->scales && page_stride == 0)
        page_stride = heads * page_rows * stride;
    if (f->scales && layer_stride == 0 && f->scale == KVPRIM_SCALE_TILE) {
        layer_stride = heads * page_rows * stride;
        layer_stride = t->page_rows && pages * page_stride > layer_stride ? pages * page_stride : layer_stride;
        layer_stride = in_head * tile_stride > layer_stride ? in_head * tile_stride : layer_stride;
    }
    if (!f->scales && stride == 0)
        stride = t->stride;
    if (!f->scales && page_stride == 0)
        page_stride = t->page_stride;
    unsigned char *at =
        f->scales ? (unsigned char *)f->scales + l * layer_stride : oracle_layer(part, l) + f->scale_offset;
    int64_t token = t->page_rows ? row % page_rows : row, scale = e / oracle_tile(part, n) % in_head;
    if (f->scale_order == KVPRIM_SCALES_SWIZZLED) {
        const int64_t linear = token, quarter = in_head / 4;
        token = 4 * (token / 4) + scale / quarter;
        scale = scale % quarter * 4 + linear % 4;
    }
    if (f->scale == KVPRIM_SCALE_TILE)
        at += (t->page_rows ? row / page_rows * page_stride : 0) + token * stride;
    return at + e / oracle_tile(part, n) / in_head * page_rows * stride + scale * tile_stride;
}

/* With the tensor's scale. */
static float oracle_outer(const kvprim_format *f, float scale)
{
    return f->tensor_scale ? oracle_multiply(scale, *f->tensor_scale) : scale;
}

/* Moves a row. from < 0: zeros. */
static void oracle_move_row(const oracle_move *m, int32_t l, int64_t to, int64_t from)
{
    const kvprim_format *const d = m->dst.table.format, *const s = m->src.table.format;
    const int64_t n = m->row_bytes * oracle_packed(s->dtype) / oracle_type_of(s->dtype)->bytes;
    float *const x = (float *)malloc((size_t)n * sizeof *x);
    for (int64_t e = 0; e < n; e++)
        x[e] = from < 0 ? 0
                        : (float)oracle_decode(
                              s->dtype,
                              oracle_code_of(s->dtype, oracle_element(&m->src, oracle_layer(&m->src, l), from, n, e),
                                             e % oracle_packed(s->dtype)));
    for (int64_t e = 0; e < n; e++) {
        float q = x[e];
        if (s->scale && from >= 0)
            q = oracle_multiply(q,
                                oracle_outer(s, oracle_scale_at(s->scale_dtype, oracle_scale(&m->src, l, from, n, e))));
        if (d->scale) {
            unsigned char *const at = oracle_scale(&m->dst, l, to, n, e);
            const int64_t tile = oracle_tile(&m->dst, n);
            if (d->scale == KVPRIM_SCALE_TILE && e % tile == 0) {
                oracle_put_scale(d->scale_dtype, at, oracle_computed(d, x + e, tile));
            }
            const float scale = oracle_outer(d, oracle_scale_at(d->scale_dtype, at));
            if (from < 0 || (d->scale == KVPRIM_SCALE_TILE && scale == 0))
                q = from < 0 ? 0 : oracle_multiply(q, 0);
            else if (d->scale_inverse)
                q = oracle_multiply(q, d->scale == KVPRIM_SCALE_TILE ? oracle_divide(1, scale) : scale);
            else
                q = oracle_divide(q, scale);
        }
        if (isnan(q) && oracle_counts_nans(d->dtype) && d->nans)
            ++*d->nans;
        oracle_put(d->dtype, oracle_element(&m->dst, oracle_layer(&m->dst, l), to, n, e), e % oracle_packed(d->dtype),
                   oracle_encode(d->dtype, q));
    }
    free(x);
}

/* Does what the move must do, in the memory that it names. */
static void oracle_run(const oracle_move *m)
{
    for (int32_t l = 0; l < m->layers; l++)
        for (int64_t i = 0; i < m->count; i++) {
            int past = 0;
            int64_t to, from;
            const int has_to = oracle_row(&m->dst, i, &to, &past), has_from = oracle_row(&m->src, i, &from, &past);
            if (past && l == 0 && m->rejected)
                ++*m->rejected;
            if (has_to && (has_from || m->zero))
                oracle_move_row(m, l, to, has_from ? from : -1);
        }
}

#endif

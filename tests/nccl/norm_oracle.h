/* SPDX-License-Identifier: MIT */
/* What kvprim_all_reduce_norm must give, computed from its contract in fp64 with the C library's functions: nothing of
   kvprim's is used except the description. C11, C++11 and CUDA. An operation in fp64 on fp32 numbers that is then
   rounded to fp32 gives what one in fp32 gives, because fp64 has more than twice as many bits. */
#ifndef NORM_ORACLE_H
#define NORM_ORACLE_H

#include "floats.h"
#include <float.h>

static inline double oracle_rounded(kvprim_dtype dtype, double x)
{
    return (double)float_from(format_of(dtype), float_to(format_of(dtype), (float)x));
}

static inline double oracle_element(kvprim_dtype dtype, const void *tensor, int64_t at)
{
    uint16_t bits;
    memcpy(&bits, (const char *)tensor + at * 2, 2);
    return (double)float_from(format_of(dtype), bits);
}

/* Whether two numbers are the same: both NaN, or equal with the same sign. */
static inline int oracle_same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && (signbit(a) != 0) == (signbit(b) != 0));
}

enum { oracle_most = 16384 };

/* What a token's elements must be. */
typedef struct oracle_row {
    double s[oracle_most], r[oracle_most], y[oracle_most], q[oracle_most];
    float total, factor;          /* total: of the squares */
    float scale[oracle_most / 8]; /* of the groups, or one */
} oracle_row;

static inline float oracle_tree(const float *sums, int first, int count, int packs)
{
    if (count == 1)
        return first < packs ? sums[first] : 0;
    const double left = oracle_tree(sums, first, count / 2, packs);
    return (float)(left + (double)oracle_tree(sums, first + count / 2, count / 2, packs));
}

/* 1 / sqrt(mean of squares + eps). */
static inline void oracle_set_factor(oracle_row *row, int hidden, float eps)
{
    const double *const r = row->r;
    float sums[oracle_most / 8];
    int width = 1;
    for (int pack = 0; pack < hidden / 8; pack++) {
        sums[pack] = 0;
        for (int i = 8 * pack; i < 8 * pack + 8; i++)
            sums[pack] = fmaf((float)r[i], (float)r[i], sums[pack]);
    }
    while (width < hidden / 8)
        width *= 2;
    row->total = oracle_tree(sums, 0, width, hidden / 8);
    /* volatile: compilers take it for a product in fp32, which some fuse with the sum */
    volatile float mean = (float)((double)row->total * (double)(float)(1.0 / hidden));
    row->factor = (float)(1 / sqrt((double)(float)((double)mean + (double)eps))); /* rounded as once: see test_roots */
}

/* The largest |y| / 448, but NaN does not count, infinity is the largest float, and there is a least. powers: the next
   power of two that is no less. */
static inline float oracle_scale(const double *y, int hidden, float least, int powers)
{
    int exponent;
    double most = 0;
    for (int i = 0; i < hidden; i++)
        if (fabs(y[i]) > most) /* false for NaN */
            most = fabs(y[i]);
    most = most > (double)FLT_MAX ? (double)FLT_MAX : most;
    const float scale = (float)(most / 448), floor = least > 0 ? least : FLT_MIN;
    const float larger = scale > floor ? scale : floor, fraction = frexpf(larger, &exponent);
    return !powers ? larger : ldexpf(1, fraction == 0.5f ? exponent - 1 : exponent);
}

/* Elements of a scale. */
static inline int64_t oracle_group(const kvprim_norm_desc *d)
{
    return d->scale_group ? d->scale_group : d->hidden;
}

/* What the description's scale of a token's group is. */
static inline float oracle_written_scale(const kvprim_norm_desc *d, int64_t token, int64_t group)
{
    const int64_t groups = d->hidden / oracle_group(d), exponents = d->scale_dtype == KVPRIM_F8E8M0;
    const int64_t words = exponents ? (groups + 3) / 4 : groups, word = exponents ? group / 4 : group;
    const float *const at = d->scale + token * (d->scale_stride ? d->scale_stride : words) +
                            word * (d->scale_group_stride ? d->scale_group_stride : 1);
    return exponents ? ldexpf(1, ((const unsigned char *)at)[group % 4] - 127) : *at;
}

/* Of `scale` it is given what it reads: of one for all tokens. Strides are the description's. */
static inline void oracle_token(const kvprim_norm_desc *d, const void *const *sends, int world, int64_t token,
                                oracle_row *row)
{
    const int hidden = (int)d->hidden;
    const int64_t send = token * (d->send_stride ? d->send_stride : hidden);
    const int64_t residual = token * (d->residual_stride ? d->residual_stride : hidden);
    for (int i = 0; i < hidden; i++) {
        float sum = (float)oracle_element(d->dtype, sends[0], send + i);
        for (int r = 1; r < world; r++)
            sum = (float)((double)sum + oracle_element(d->dtype, sends[r], send + i));
        row->s[i] = row->r[i] = oracle_rounded(d->dtype, (double)sum);
        if (d->residual) {
            const double added = row->s[i] + oracle_element(d->dtype, d->residual, residual + i);
            row->r[i] = oracle_rounded(d->dtype, (double)(float)added);
        }
    }
    oracle_set_factor(row, hidden, d->eps);
    for (int i = 0; i < hidden; i++) {
        const double w = oracle_element(d->dtype, d->weight, i);
        const float by = (float)(d->weight_plus_one ? w + 1 : w), x = (float)(row->r[i] * (double)row->factor);
        row->y[i] = oracle_rounded(d->dtype, (double)(float)((double)x * (double)by));
    }
    const int each = (int)oracle_group(d), powers = d->scale_power_of_two || d->scale_dtype == KVPRIM_F8E8M0;
    for (int g = 0; g < hidden / each; g++)
        row->scale[g] = d->scale_per_token || d->scale_group
                            ? oracle_scale(row->y + g * each, each, d->scale_min, powers)
                        : d->scale ? *d->scale
                                   : 1;
    for (int i = 0; i < hidden && d->quantised; i++)
        row->q[i] = oracle_rounded(KVPRIM_F8E4M3, (double)(float)(row->y[i] / (double)row->scale[i / each]));
}

/* How many elements of a token's outputs are not those of `row`. d: its outputs. */
static inline int oracle_wrong(const kvprim_norm_desc *d, int64_t token, const oracle_row *row)
{
    const struct {
        const void *data;
        int64_t stride;
        const double *wanted;
    } of[] = {{d->sum, d->sum_stride, row->s},
              {d->residual_out, d->residual_out_stride, row->r},
              {d->out, d->out_stride, row->y}};
    const unsigned char *const q = (const unsigned char *)d->quantised;
    int wrong = d->quantised && d->scale_per_token && d->scale[token] != row->scale[0];
    for (int64_t g = 0; d->quantised && d->scale_group && g < d->hidden / d->scale_group; g++)
        wrong += oracle_written_scale(d, token, g) != row->scale[g];
    for (int64_t i = 0; i < d->hidden; i++) {
        for (int k = 0; k < 3; k++)
            wrong += of[k].data && !oracle_same(oracle_element(d->dtype, of[k].data,
                                                               token * (of[k].stride ? of[k].stride : d->hidden) + i),
                                                of[k].wanted[i]);
        if (q)
            wrong +=
                !oracle_same((double)float_from(format_of(KVPRIM_F8E4M3),
                                                q[token * (d->quantised_stride ? d->quantised_stride : d->hidden) + i]),
                             row->q[i]);
    }
    return wrong;
}

#endif

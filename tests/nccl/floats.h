/* SPDX-License-Identifier: MIT */
/* Floats by the definition of their formats, and not as kvprim_nccl.h converts them. C11, C++11 and CUDA; include it
   after that header. */
#ifndef FLOATS_H
#define FLOATS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* A float of a sign, exponent bits and mantissa bits. finite: there is no infinity, and only ones in all bits except
   the sign are a NaN (e4m3). saturates: values beyond the largest finite one become that one. */
typedef struct float_format {
    int bytes, exponent_bits, mantissa_bits;
    bool finite, saturates;
} float_format;

static inline float_format format_of(kvprim_dtype t)
{
    static const float_format e4m3 = {1, 4, 3, true, true}, e5m2 = {1, 5, 2, false, true};
    static const float_format f16 = {2, 5, 10, false, false}, bf16 = {2, 8, 7, false, false};
    static const float_format f32 = {4, 8, 23, false, false};
    return t == KVPRIM_F8E4M3   ? e4m3
           : t == KVPRIM_F8E5M2 ? e5m2
           : t == KVPRIM_F16    ? f16
           : t == KVPRIM_BF16   ? bf16
                                : f32;
}

static inline int float_bias(float_format f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

static inline float float_from(float_format f, uint32_t bits)
{
    const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1), ones = (1u << f.exponent_bits) - 1;
    const uint32_t exponent = bits >> f.mantissa_bits & ones;
    const double sign = bits >> (8 * f.bytes - 1) ? -1 : 1;
    if (exponent == ones && (f.finite ? mantissa == (1u << f.mantissa_bits) - 1 : mantissa != 0))
        return (float)NAN;
    if (exponent == ones && !f.finite)
        return (float)(sign * (double)INFINITY);
    const double digits = exponent == 0 ? mantissa : mantissa + (1u << f.mantissa_bits);
    return (float)(sign * ldexp(digits, (exponent == 0 ? 1 : (int)exponent) - float_bias(f) - f.mantissa_bits));
}

/* Rounds to nearest, ties to even. Every NaN becomes the same one. */
static inline uint32_t float_to(float_format f, float x)
{
    const uint32_t ones = (1u << f.exponent_bits) - 1, sign = signbit(x) ? 1u << (8 * f.bytes - 1) : 0;
    const uint32_t infinity = ones << f.mantissa_bits;
    const uint32_t largest = f.finite ? infinity | ((1u << f.mantissa_bits) - 2) : infinity - 1;
    if (isnan(x))
        return infinity | ((1u << f.mantissa_bits) - 1);
    const int least = 1 - float_bias(f); /* exponent of the least normal value */
    int exponent = x == 0 || isinf(x) ? least : ilogb((double)x);
    exponent = exponent < least ? least : exponent;
    const double units = isinf(x) ? (double)INFINITY : nearbyint(ldexp(fabs((double)x), f.mantissa_bits - exponent));
    const double bits =
        units + ldexp((double)(exponent - least), f.mantissa_bits); /* normal values have a digit more */
    return sign | (bits <= (double)largest ? (uint32_t)bits : f.saturates ? largest : infinity);
}

static inline bool float_is_nan(float_format f, uint32_t bits)
{
    return isnan(float_from(f, bits));
}

#endif /* FLOATS_H */

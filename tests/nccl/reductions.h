/* SPDX-License-Identifier: MIT */
/* What reductions of floats must give, computed on the host by the definition of the formats, and not as the kernels of
   kvprim_nccl.h do it. Include it after that header. */
#ifndef REDUCTIONS_H
#define REDUCTIONS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* A float of a sign, exponent bits and mantissa bits. finite: all ones in the exponent are no infinity and, except with
   a mantissa of all ones, no NaN (e4m3). saturates: values beyond the largest finite one become that one. */
struct float_format {
    int bytes, exponent_bits, mantissa_bits;
    bool finite, saturates;
};

static inline float_format format_of(kvprim_dtype t)
{
    return t == KVPRIM_F8E4M3   ? float_format{1, 4, 3, true, true}
           : t == KVPRIM_F8E5M2 ? float_format{1, 5, 2, false, true}
           : t == KVPRIM_F16    ? float_format{2, 5, 10, false, false}
           : t == KVPRIM_BF16   ? float_format{2, 8, 7, false, false}
                                : float_format{4, 8, 23, false, false};
}

static inline int float_bias(const float_format &f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

static inline float float_from(const float_format &f, uint32_t bits)
{
    const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1), ones = (1u << f.exponent_bits) - 1;
    const uint32_t exponent = bits >> f.mantissa_bits & ones;
    const double sign = bits >> (8 * f.bytes - 1) ? -1 : 1;
    if (f.finite ? exponent == ones && mantissa == (1u << f.mantissa_bits) - 1 : exponent == ones && mantissa != 0)
        return NAN;
    if (!f.finite && exponent == ones)
        return float(sign * HUGE_VAL);
    const double digits = exponent == 0 ? mantissa : mantissa + (1u << f.mantissa_bits);
    return float(sign * ldexp(digits, (exponent == 0 ? 1 : int(exponent)) - float_bias(f) - f.mantissa_bits));
}

/* Rounds to nearest, ties to even. Every NaN becomes the same one. */
static inline uint32_t float_to(const float_format &f, float x)
{
    const uint32_t ones = (1u << f.exponent_bits) - 1, sign = signbit(x) ? 1u << (8 * f.bytes - 1) : 0;
    const uint32_t infinity = ones << f.mantissa_bits;
    const uint32_t largest = f.finite ? infinity | ((1u << f.mantissa_bits) - 2) : infinity - 1;
    if (x != x)
        return sign | infinity | ((1u << f.mantissa_bits) - 1);
    const int least = 1 - float_bias(f); /* exponent of the least normal value */
    int exponent = x == 0 || isinf(x) ? least : ilogb(x);
    exponent = exponent < least ? least : exponent;
    const double units = isinf(x) ? HUGE_VAL : nearbyint(ldexp(fabs(double(x)), f.mantissa_bits - exponent));
    const double bits = units + ldexp(double(exponent - least), f.mantissa_bits); /* normal values have a digit more */
    return sign | (bits <= double(largest) ? uint32_t(bits) : f.saturates ? largest : infinity);
}

static inline bool float_is_nan(const float_format &f, uint32_t bits)
{
    return float_from(f, bits) != float_from(f, bits);
}

/* in: an element of each rank. Sums are made in fp32 and in the order of the ranks. */
static inline uint32_t reduced_bits(const float_format &f, kvprim_op op, const uint32_t *in, int world)
{
    float all = float_from(f, in[0]);
    for (int r = 1; r < world; r++) {
        const float x = float_from(f, in[r]);
        const bool larger = x > all || (x == all && signbit(all) && !signbit(x));
        const bool less = x < all || (x == all && !signbit(all) && signbit(x));
        if (op == KVPRIM_SUM || op == KVPRIM_AVG || x != x)
            all += x;
        else if (op == KVPRIM_MAX ? larger : less)
            all = x;
    }
    return float_to(f, op == KVPRIM_AVG ? all / float(world) : all);
}

#endif /* REDUCTIONS_H */

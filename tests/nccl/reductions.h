/* SPDX-License-Identifier: MIT */
/* What reductions of floats must give, computed on the host. Include it after kvprim_nccl.h. */
#ifndef REDUCTIONS_H
#define REDUCTIONS_H

#include "floats.h"

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

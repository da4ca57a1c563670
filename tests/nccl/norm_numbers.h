/* SPDX-License-Identifier: MIT */
/* What the norm makes of a single number, for each there is: test_norm.h calls it. It needs the kernels' functions, so
   it is part of the unit that implements kvprim_nccl.h. */
#ifndef NORM_NUMBERS_H
#define NORM_NUMBERS_H

#include <cfloat>

/* Counts the finite floats from 0 on whose root or scale is another than fp64's, which rounds twice: no result lies so
   near to the middle of two floats that it matters. */
static __global__ void norm_numbers(uint32_t *wrong)
{
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t bits = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; bits < 0x7f800000; bits += threads) {
        const float x = kvpi_float_of(uint32_t(bits)), root = float(1 / sqrt(double(x))),
                    scale = kvpi_tile_scale(float(double(x) / 448), FLT_MIN, 0);
        if (kvpn_root_reciprocal(x) != root || kvpi_tile_scale(kvpn_norm_quotient(x), FLT_MIN, 0) != scale)
            atomicAdd(wrong, 1);
    }
}

void start_norm_numbers(uint32_t *wrong, cudaStream_t stream)
{
    norm_numbers<<<1024, 256, 0, stream>>>(wrong);
}
#endif

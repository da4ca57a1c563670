/* SPDX-License-Identifier: MIT */
#include "../../../kvprim_cuda.cuh"

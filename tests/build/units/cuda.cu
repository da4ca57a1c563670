/* SPDX-License-Identifier: MIT */
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim_cuda.cuh"

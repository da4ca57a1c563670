/* SPDX-License-Identifier: MIT */
#include "../../../kvprim_cuda.cuh"
#define KVPRIM_CUDA_IMPLEMENTATION
#include "../../../kvprim_cuda.cuh"

/* SPDX-License-Identifier: MIT */
/* The host's functions of kvprim_cuda.cuh, in C++, without CUDA. */
#define KVPRIM_CUDA_EMULATE
#include "../../gpu/cuda_shim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim_cuda.cuh"

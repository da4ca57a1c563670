/* SPDX-License-Identifier: MIT */
#define KVPRIM_CORE_IMPLEMENTATION
#include "../../../kvprim.h"
#include "../../../kvprim_cuda.cuh"
#include "../../../kvprim_nccl.h"

/* SPDX-License-Identifier: MIT */
/* Implements kvprim_nccl.h for test_nccl_gpu under compute-sanitizer: says at the end how often each kernel ran. */
#include "../gpu/sampled.h"
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#include "../gpu/sampled.h"

static const bool counted = (sampled_on = true, atexit(sampled_print) == 0);

/* SPDX-License-Identifier: MIT */
#include "../../../kvprim_nccl.h"
#define KVPRIM_NCCL_IMPLEMENTATION
#include "../../../kvprim_nccl.h"

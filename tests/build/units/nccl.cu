/* SPDX-License-Identifier: MIT */
#define KVPRIM_NCCL_IMPLEMENTATION
#include "../../../kvprim_nccl.h"

/* SPDX-License-Identifier: MIT */
#define KVPRIM_NO_SIMD
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim.h"

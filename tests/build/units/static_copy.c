/* SPDX-License-Identifier: MIT */
#define KVPRIM_STATIC
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim.h"

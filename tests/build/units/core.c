/* SPDX-License-Identifier: MIT */
#define KVPRIM_CORE_IMPLEMENTATION
#include "../../../kvprim.h"

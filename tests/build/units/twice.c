/* SPDX-License-Identifier: MIT */
#include "../../../kvprim.h"
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim.h"
#include "../../../kvprim.h"

/* SPDX-License-Identifier: MIT */
#include "../../../kvprim.h"
#include "../../../kvprim.h"

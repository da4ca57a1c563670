/* SPDX-License-Identifier: MIT */
#include "../../../kvprim.h"

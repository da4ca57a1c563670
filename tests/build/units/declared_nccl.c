/* SPDX-License-Identifier: MIT */
#include "../../../kvprim_nccl.h"

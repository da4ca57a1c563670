/* SPDX-License-Identifier: MIT */
/* The implementation follows code that uses the declarations. */
#include "../../../kvprim.h"

const char *late(void);
const char *late(void)
{
    return kvprim_isa();
}

#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim.h"

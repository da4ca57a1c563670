/* SPDX-License-Identifier: MIT */
/* A shared library with a copy of kvprim.h of its own, found with -I: VERSION_OF returns that copy's version. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"

uint32_t VERSION_OF(void);
uint32_t VERSION_OF(void)
{
    return kvprim_version();
}

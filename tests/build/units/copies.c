/* SPDX-License-Identifier: MIT */
/* Two libraries in one process, each with a copy of another version, call each their own. */
#include "kvprim.h"
#include <stdio.h>

uint32_t version_of_ours(void), version_of_other(void);

int main(void)
{
    const uint32_t ours = version_of_ours(), other = version_of_other();
    printf("one calls %u, the other %u\n", (unsigned)ours, (unsigned)other);
    return ours != KVPRIM_VERSION || other != OTHER_VERSION;
}

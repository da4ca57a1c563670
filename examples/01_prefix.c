/* SPDX-License-Identifier: MIT */
/* How much of a prompt is already cached? The program at the top of kvprim.h, which checks its answer.

       cc -O2 -I. examples/01_prefix.c -o 01_prefix && ./01_prefix
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>

int main(void)
{
    const int32_t cached[] = {11, 12, 13, 14, 15, 16, 17, 18}, prompt[] = {11, 12, 13, 14, 15, 99};
    const size_t matched = kvprim_prefix_i32(prompt, 6, cached, 8);
    printf("%zu tokens are cached, %zu of them in whole pages of 4 (compared with %s)\n", matched,
           kvprim_prefix_pages(matched, 4), kvprim_isa());
    return matched == 5 && kvprim_prefix_pages(matched, 4) == 4 ? 0 : 1;
}

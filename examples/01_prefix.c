/* SPDX-License-Identifier: MIT */
/* How much of a prompt is already cached? The program at the top of kvprim.h, which checks its answer.

       cc -O2 -I. examples/01_prefix.c -o 01_prefix && ./01_prefix
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc > 1) {
        const int asked = strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0;
        fprintf(asked ? stdout : stderr, asked ? "usage: 01_prefix\n\nCompares a prompt with cached tokens.\n"
                                               : "01_prefix: it takes no arguments except --help\n");
        return asked ? 0 : 2;
    }
    const int32_t cached[] = {11, 12, 13, 14, 15, 16, 17, 18}, prompt[] = {11, 12, 13, 14, 15, 99};
    const size_t matched = kvprim_prefix_i32(prompt, 6, cached, 8);
    printf("%zu tokens are cached, %zu of them in whole pages of 4 (compared with %s)\n", matched,
           kvprim_prefix_pages(matched, 4), kvprim_isa());
    return matched == 5 && kvprim_prefix_pages(matched, 4) == 4 ? 0 : 1;
}

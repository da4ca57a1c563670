/* SPDX-License-Identifier: MIT */
/* Fragments that overlap. Exits with 0 if they are refused, as with KVPRIM_DEBUG, otherwise with 3. */
#include "../../../kvprim.h"

int main(void)
{
    char src[4] = "abc", dst[4];
    const kvprim_fragment f[2] = {{0, 0, 2}, {1, 1, 2}};
    const kvprim_unpack_desc d = {.src = src, .src_bytes = 4, .dst = dst, .dst_bytes = 4, .fragments = f, .count = 2};
    return kvprim_unpack(&d) == KVPRIM_ERROR_OVERLAP ? 0 : 3;
}

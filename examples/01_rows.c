/* SPDX-License-Identifier: MIT */
/* Stores rows of keys and values into the slots of a cache, and gathers some of them back. The program at the top of
   kvprim.h, and a gather.

       cc -O2 -I. examples/01_rows.c -o 01_rows && ./01_rows
*/
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>

int main(void)
{
    char k_cache[6][8] = {{0}}, v_cache[6][8] = {{0}}; /* 6 slots, a row of 8 bytes in each */
    char k[3][8] = {"key 0", "key 1", "-"}, v[3][8] = {"value 0", "value 1", "-"}; /* the new tokens */
    const int32_t slot[] = {4, 1, -1}; /* token 0 goes to slot 4, token 1 to slot 1; -1 is padding */
    kvprim_store_desc store = {.k_cache = {.data = k_cache, .rows = 6},
                               .v_cache = {.data = v_cache, .rows = 6},
                               .k = {.data = k, .rows = 3},
                               .v = {.data = v, .rows = 3},
                               .k_bytes = 8,
                               .v_bytes = 8,
                               .slot = slot,
                               .slot_type = KVPRIM_I32,
                               .count = 3};

    char got[2][8];
    const int32_t index[] = {1, 4};
    kvprim_gather_desc gather = {.dst = {.data = got, .rows = 2},
                                 .src = {.data = v_cache, .rows = 6},
                                 .row_bytes = 8,
                                 .index = index,
                                 .index_type = KVPRIM_I32,
                                 .count = 2};

    if (kvprim_store(&store) != KVPRIM_OK || kvprim_gather(&gather) != KVPRIM_OK) {
        fprintf(stderr, "%s\n", kvprim_last_error());
        return 1;
    }
    printf("slot 1 holds \"%s\", slot 4 \"%s\"\n", got[0], got[1]);
    return got[0][6] == '1' && got[1][6] == '0' ? 0 : 1;
}

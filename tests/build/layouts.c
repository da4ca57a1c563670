/* SPDX-License-Identifier: MIT */
/* Each layout of README.md's table, with the fields that stand there, against an array of C with that layout. layouts.h,
   which readme.sh takes from README.md, has a line LAYOUT(number, fields) for each row of the table that sets any. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>

enum { PAGES = 3, PAGE = 16, HEADS = 8, PIECE = 256, ROW = HEADS * PIECE };

/* The address of piece h of row r: of V where there are both, so that a wrong start is noticed, too. */
static char hnd[PAGES][HEADS][PAGE][PIECE];
static char nhd_kv[PAGES][2][PAGE][HEADS][PIECE];
static char hnd_kv[PAGES][2][HEADS][PAGE][PIECE];
static char qkv[PAGES * PAGE][4096 + 2 * ROW];

static char *expected(int layout, int r, int h)
{
    switch (layout) {
    case 1:
        return hnd[r / PAGE][h][r % PAGE];
    case 2:
        return nhd_kv[r / PAGE][1][r % PAGE][h];
    case 3:
        return hnd_kv[r / PAGE][1][h][r % PAGE];
    case 4:
        return qkv[r] + 4096 + ROW + h * PIECE;
    default:
        return NULL;
    }
}

static int wrong(int layout, kvprim_table table)
{
    int faults = 0;
    table.data = expected(layout, 0, 0);
    table.rows = PAGES * PAGE;
    const kvprim_table resolved = kvprim_table_resolve(table, ROW);
    const int64_t head_stride = table.heads > 1 ? table.head_stride : PIECE;
    for (int r = 0; r < PAGES * PAGE; r++)
        for (int h = 0; h < HEADS; h++)
            faults += (char *)kvprim_table_row(&resolved, r) + h * head_stride != expected(layout, r, h);
    if (faults)
        printf("README.md's layout %d: %d of its addresses are wrong\n", layout, faults);
    return faults;
}

int main(void)
{
    int faults = 0, layouts = 0;
#define LAYOUT(number, ...) faults += wrong(number, (kvprim_table){__VA_ARGS__}), layouts++;
#include "layouts.h"
    if (layouts != 4)
        printf("README.md has %d layouts with fields, 4 are tested\n", layouts);
    return faults != 0 || layouts != 4;
}

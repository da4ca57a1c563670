/* SPDX-License-Identifier: MIT */
/* Each layout of README.md's table, with the fields that stand there, against an array of C with that layout. layouts.h,
   which readme.sh takes from README.md, has a line LAYOUT(number, fields) for each row of the table that sets any. */
#define KVPRIM_IMPLEMENTATION
#include "kvprim.h"
#include <stdio.h>

enum { PAGES = 12, PAGE = 16, HEADS = 8, PIECE = 256, ROW = HEADS * PIECE, LAYERS = 61, DIM = 128, GROUP = 4 };

/* Where there are K and V, or layers, the addresses are of V or of layer 1, so that a wrong start is noticed, too. */
static char hnd[PAGES][HEADS][PAGE][PIECE];
static char nhd_kv[PAGES][2][PAGE][HEADS][PIECE];
static char hnd_kv[PAGES][2][HEADS][PAGE][PIECE];
static char qkv[PAGES * PAGE][4096 + 2 * ROW];
static char latent[PAGES * PAGE][1024 + 128];
static char page_first[PAGES * PAGE][LAYERS][1024];
static char page_head[PAGES][HEADS][PAGE][LAYERS][DIM];
static char whole[PAGES * PAGE][HEADS][PIECE];
static char unified[PAGES][2][LAYERS][2][PAGE][GROUP][DIM];

/* Bytes of a row and its pieces, in the order of the table. */
static const struct {
    int row_bytes, pieces;
} layouts[] = {{ROW, HEADS}, {ROW, HEADS},  {ROW, HEADS},         {ROW, HEADS},        {128, 1},
               {1024, 1},    {1024, HEADS}, {2 * GROUP * DIM, 2}, {ROW / 2, HEADS / 2}};

enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* The address of piece h of row r. */
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
    case 5:
        return latent[r] + 1024;
    case 6:
        return page_first[r][1];
    case 7:
        return page_head[r / PAGE][h][r % PAGE][1];
    case 8:
        return unified[r / PAGE][h][0][1][r % PAGE][0];
    case 9:
        return whole[r][HEADS / 2 + h];
    default:
        return NULL;
    }
}

static int wrong(int layout, kvprim_table table)
{
    if (layout > LAYOUTS)
        return 1;
    const int row_bytes = layouts[layout - 1].row_bytes, pieces = layouts[layout - 1].pieces;
    int faults = 0;
    table.data = expected(layout, 0, 0);
    table.rows = PAGES * PAGE;
    const kvprim_table resolved = kvprim_table_resolve(table, row_bytes);
    const int64_t step = table.heads > 1 ? table.head_stride : row_bytes / pieces;
    for (int r = 0; r < PAGES * PAGE; r++)
        for (int h = 0; h < pieces; h++)
            faults += (char *)kvprim_table_row(&resolved, r) + h * step != expected(layout, r, h);
    if (faults)
        printf("README.md's layout %d: %d of its addresses are wrong\n", layout, faults);
    return faults;
}

int main(void)
{
    int faults = 0, found = 0;
#define LAYOUT(number, ...) faults += wrong(number, (kvprim_table){__VA_ARGS__}), found++;
#include "layouts.h"
    if (found != LAYOUTS)
        printf("README.md has %d layouts with fields, %d are tested\n", found, (int)LAYOUTS);
    return faults != 0 || found != LAYOUTS;
}

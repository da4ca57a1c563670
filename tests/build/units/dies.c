/* SPDX-License-Identifier: MIT */
/* Tests that end their program, and one after them. */
#include "../../harness.h"

static void aborts(void)
{
    CHECK(counts->passed == 1);
    abort();
}

static void exits(void)
{
    CHECK(counts->passed == 0);
    exit(0);
}

static void passes(void)
{
}

int main(void)
{
    run("first", passes);
    run("aborts", aborts);
    run("exits", exits);
    run("last", passes);
    return finish();
}

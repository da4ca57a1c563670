/* SPDX-License-Identifier: MIT */
/* Runs the callers of use.c that the other units of a program define. */
#include <stdio.h>

#ifndef CALLERS
#define CALLERS(X) X(caller)
#endif

#define DECLARE(name) int name(void);
#define CALL(name) wrong += name();

CALLERS(DECLARE)

int main(void)
{
    int wrong = 0;
    CALLERS(CALL)
    if (wrong)
        printf("%d results are wrong\n", wrong);
    return wrong != 0;
}

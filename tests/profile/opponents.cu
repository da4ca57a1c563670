/* SPDX-License-Identifier: MIT */
/* Compiles every kernel of bench_cuda's opponents, for `make sass`. */
#include "tests/bench/opponents.h"

std::vector<opponent> all_opponents()
{
    return opponents_for(bench_sizes());
}

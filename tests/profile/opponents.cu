/* SPDX-License-Identifier: MIT */
/* Compiles every kernel of bench_cuda's opponents, and those of bench_convert that move vectors, for `make sass`. */
#include "tests/bench/opponents.h"
#include "tests/bench/opponents_convert.h"

std::vector<opponent> all_opponents()
{
    return opponents_for(bench_sizes());
}

std::vector<convert_launch *> all_stores()
{
    return {launch_vllm_store<1, 96>, launch_vllm_store<8, 128>, launch_vllm_store<32, 128>,
            launch_sglang_quant<96>,  launch_sglang_quant<1024>, launch_sglang_quant<4096>};
}

std::vector<gather_convert_launch *> all_gathers()
{
    return {launch_vllm_gather_page<576>, launch_vllm_gather_page<1024>, launch_vllm_gather_token<576>,
            launch_vllm_gather_token<1024>};
}

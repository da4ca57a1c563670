/* SPDX-License-Identifier: MIT */
/* Compiles every kernel of bench_cuda's opponents, and those of bench_convert that move vectors, for `make sass`. */
#include "tests/bench/opponents.h"
#include "tests/bench/opponents_convert.h"

std::vector<opponent> all_opponents()
{
    return opponents_for(bench_sizes());
}

/* Not those of vLLM's that store by heads: they keep 32 bytes of a thread on the stack, so that more blocks fit. */
std::vector<void (*)(convert_params)> all_stores()
{
    return {vllm_quant_store_kernel<1, 96, false>,   vllm_quant_store_kernel<8, 128, false>,
            vllm_quant_store_kernel<32, 128, false>, sglang_quant_kernel<96, false>,
            sglang_quant_kernel<96, true>,           sglang_quant_kernel<1024, false>,
            sglang_quant_kernel<1024, true>,         sglang_quant_kernel<4096, false>,
            sglang_quant_kernel<4096, true>};
}

std::vector<gather_convert_launch *> all_gathers()
{
    return {launch_vllm_gather_page<576>, launch_vllm_gather_page<1024>, launch_vllm_gather_token<576>,
            launch_vllm_gather_token<1024>};
}

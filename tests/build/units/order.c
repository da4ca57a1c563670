/* SPDX-License-Identifier: MIT */
/* The three headers in the order that ORDER says, such as 2,1,3. */
#define KVPRIM_CORE_IMPLEMENTATION
#define HEADER_1 "../../../kvprim.h"
#define HEADER_2 "../../../kvprim_cuda.cuh"
#define HEADER_3 "../../../kvprim_nccl.h"
#define PICK_1(a, b, c) HEADER_##a
#define PICK_2(a, b, c) HEADER_##b
#define PICK_3(a, b, c) HEADER_##c
#define PICK(n, ...) PICK_##n(__VA_ARGS__)
#include PICK(1, ORDER)
#include PICK(2, ORDER)
#include PICK(3, ORDER)

/* SPDX-License-Identifier: MIT */
/* Which variant kvprim picks on this processor, and on others. The argument is the expected one; without it, the
   compiler's own builtin says. */
#define KVPRIM_IMPLEMENTATION
#include "../../../kvprim.h"
#include "../../harness.h"

static const char *expected;

#ifdef KVPRIM_X86
static const char *by_builtin(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi"))
        return "scalar";
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2")
               ? "avx512"
               : "avx2";
}

/* Any one feature or register that is missing takes the variant away, and no others count. */
static void test_other_processors(void)
{
    const uint32_t avx2 = 0x28, avx512 = 0xc0010128, ymm = 0x06, zmm = 0xe6;
    for (uint32_t bit = 1; bit; bit *= 2) {
        kvpi_prefix_fn *const without = avx2 & bit     ? kvprim_prefix_i32_scalar
                                        : avx512 & bit ? kvprim_prefix_i32_avx2
                                                       : kvprim_prefix_i32_avx512;
        CHECK(kvpi_prefix_for(UINT32_MAX & ~bit, zmm) == without);
        CHECK(kvpi_prefix_for(avx512 & ~bit, UINT32_MAX) == without);
        CHECK(kvpi_prefix_for(avx2 | bit, zmm) == kvprim_prefix_i32_avx2);
        kvpi_prefix_fn *const unsaved = ymm & bit   ? kvprim_prefix_i32_scalar
                                        : zmm & bit ? kvprim_prefix_i32_avx2
                                                    : kvprim_prefix_i32_avx512;
        CHECK(kvpi_prefix_for(avx512, UINT32_MAX & ~bit) == unsaved);
        CHECK(kvpi_prefix_for(avx512, zmm & ~bit) == unsaved);
        CHECK(kvpi_prefix_for(bit, UINT32_MAX) == kvprim_prefix_i32_scalar);
    }
    CHECK(kvpi_prefix_for(0, 0) == kvprim_prefix_i32_scalar);
}
#else
static const char *by_builtin(void)
{
    return kvprim_isa();
}

static void test_other_processors(void)
{
    skip("variants are picked by the compiler");
}
#endif

static void test_this_processor(void)
{
    int32_t a[200] = {0}, b[200] = {0};
    b[199] = 1;
    CHECK(kvprim_prefix_i32(a, 200, b, 200) == 199);
    if (strcmp(kvprim_isa(), expected) != 0)
        fail("kvprim_isa() is %s, expected %s", kvprim_isa(), expected);
}

int main(int argc, char **argv)
{
    expected = argc > 1 ? argv[1] : by_builtin();
    run("variants of other processors", test_other_processors);
    run("the variant of this processor", test_this_processor);
    printf("isa %s\n", kvprim_isa());
    return finish();
}

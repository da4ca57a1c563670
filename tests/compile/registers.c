/* A caller compiled for AVX-512 that holds more in registers than a call may leave it. The library's assembly uses some of
   them, and tells only a compiler that knows them: so it must never be inlined here. One call, so that it would be.
   Exit code 0 if all is well, or there is no AVX-512. */
#define KVPRIM_STATIC
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include <stdlib.h>

#ifdef KVPRIM_X86
enum { vectors = 30 };
/* clang-format off */
#define ALL(X)                                                                                                         \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19)       \
    X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29)
/* clang-format on */
#define HOLD(i) const __m512i v##i = _mm512_add_epi32(_mm512_loadu_si512(a + i), _mm512_set1_epi32(i));
#define STORE(i) _mm512_storeu_si512(out + 16 * i, v##i);

__attribute__((target("avx512f,avx512bw,avx512vl"), noinline)) static int keeps(const int32_t *a, size_t n,
                                                                                int32_t *out)
{
    ALL(HOLD)
    const size_t first = kvprim_prefix_i32(a, n, a, n);
    ALL(STORE)
    return first == n;
}

int main(void)
{
    static int32_t a[64 + vectors], out[16 * vectors];
    if (strcmp(kvprim_isa(), "avx512") != 0)
        return 0;
    for (int i = 0; i < 64 + vectors; i++)
        a[i] = rand();
    for (size_t n = 1; n <= 64; n++) {
        if (!keeps(a, n, out))
            return 1;
        for (int i = 0; i < 16 * vectors; i++)
            if (out[i] != (int32_t)((uint32_t)a[i / 16 + i % 16] + (uint32_t)(i / 16))) {
                printf("%zu tokens: lane %d of vector %d is lost\n", n, i % 16, i / 16);
                return 1;
            }
    }
    return 0;
}
#else
int main(void)
{
    return 0;
}
#endif

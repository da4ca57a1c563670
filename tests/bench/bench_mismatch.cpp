// SPDX-License-Identifier: MIT
// The opponent of bench_prefix.c: std::mismatch as g++ -O3 compiles it. Its loop runs at one token per cycle, or at half
// that speed if it crosses a line of the instruction cache. So there are eight copies, each 8 bytes further into a line.
#include <algorithm>
#include <cstddef>
#include <cstdint>

template <class Token>
static inline std::size_t mismatch(const Token *a, std::size_t a_len, const Token *b, std::size_t b_len)
{
    const std::size_t n = std::min(a_len, b_len);
    return static_cast<std::size_t>(std::mismatch(a, a + n, b).first - a);
}

#define COPY(offset)                                                                                                   \
    extern "C" __attribute__((noinline, aligned(64), patchable_function_entry(offset, offset)))                        \
    std::size_t mismatch_i32_##offset(const std::int32_t *a, std::size_t a_len, const std::int32_t *b,                 \
                                      std::size_t b_len)                                                               \
    {                                                                                                                  \
        return mismatch(a, a_len, b, b_len);                                                                           \
    }                                                                                                                  \
    extern "C" __attribute__((noinline, aligned(64), patchable_function_entry(offset, offset)))                        \
    std::size_t mismatch_i64_##offset(const std::int64_t *a, std::size_t a_len, const std::int64_t *b,                 \
                                      std::size_t b_len)                                                               \
    {                                                                                                                  \
        return mismatch(a, a_len, b, b_len);                                                                           \
    }
COPY(0)
COPY(8)
COPY(16)
COPY(24)
COPY(32)
COPY(40)
COPY(48)
COPY(56)

extern "C" {
std::size_t (*mismatch_i32[8])(const std::int32_t *, std::size_t, const std::int32_t *,
                               std::size_t) = {mismatch_i32_0,  mismatch_i32_8,  mismatch_i32_16, mismatch_i32_24,
                                               mismatch_i32_32, mismatch_i32_40, mismatch_i32_48, mismatch_i32_56};
std::size_t (*mismatch_i64[8])(const std::int64_t *, std::size_t, const std::int64_t *,
                               std::size_t) = {mismatch_i64_0,  mismatch_i64_8,  mismatch_i64_16, mismatch_i64_24,
                                               mismatch_i64_32, mismatch_i64_40, mismatch_i64_48, mismatch_i64_56};
}

// SPDX-License-Identifier: MIT
// The opponent of bench_prefix.c: std::mismatch as g++ -O3 compiles it. Its loop runs at one token per cycle, or at
// half that speed if it crosses a line of the instruction cache. So there are eight copies, each 8 bytes further into a
// line.
#include <algorithm>
#include <cstddef>
#include <cstdint>

template <class Token>
static inline std::size_t mismatch(const Token *a, std::size_t a_len, const Token *b, std::size_t b_len)
{
    const std::size_t n = std::min(a_len, b_len);
    return static_cast<std::size_t>(std::mismatch(a, a + n, b).first - a);
}

#define COPY(token, name, offset)                                                                                      \
    extern "C" __attribute__((noinline, aligned(64), patchable_function_entry(offset, offset)))                        \
    std::size_t name##_##offset(const token *a, std::size_t a_len, const token *b, std::size_t b_len)                  \
    {                                                                                                                  \
        return mismatch(a, a_len, b, b_len);                                                                           \
    }
#define COPIES(token, name)                                                                                            \
    COPY(token, name, 0)                                                                                               \
    COPY(token, name, 8)                                                                                               \
    COPY(token, name, 16)                                                                                              \
    COPY(token, name, 24)                                                                                              \
    COPY(token, name, 32)                                                                                              \
    COPY(token, name, 40)                                                                                              \
    COPY(token, name, 48)                                                                                              \
    COPY(token, name, 56)                                                                                              \
    extern "C" {                                                                                                       \
    std::size_t (*name[8])(const token *, std::size_t, const token *, std::size_t) = {                                 \
        name##_0, name##_8, name##_16, name##_24, name##_32, name##_40, name##_48, name##_56};                         \
    }
COPIES(std::int32_t, mismatch_i32)
COPIES(std::int64_t, mismatch_i64)

/* SPDX-License-Identifier: MIT */
/* What the kernels of kvprim_nccl.h take from a GPU, on the CPU, where a rank is a thread. Include it before
   kvprim_nccl.h. */
#ifndef NCCL_EMULATED_H
#define NCCL_EMULATED_H

#include "../gpu/cuda_shim.h"
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <thread>

/* Waits that poll take ten times as long under ThreadSanitizer. */
#if defined(__SANITIZE_THREAD__)
enum { under_threads = 1 };
#elif defined(__has_feature)
enum { under_threads = __has_feature(thread_sanitizer) };
#else
enum { under_threads = 0 };
#endif

/* While every rank takes part, a wait may sleep: polling would take the processor from the rank that it waits for. If a
   rank stays away or a result is wrong, the others poll, as their deadline comes after so many polls. */
static bool all_take_part;
static std::atomic<bool> may_sleep;

/* What a rank's kernel stores to empty slots stays here until the same GPU thread comes to a fence or the kernel ends:
   other ranks need not see it earlier. `running`: the GPU thread that runs. */
static thread_local std::map<const char *, unsigned> emptied; /* slots, and which thread emptied them */
static thread_local unsigned running;

static void store_words(char *slot, uint4 v)
{
    uint32_t *const w = reinterpret_cast<uint32_t *>(slot);
    __atomic_store_n(w, v.x, __ATOMIC_RELAXED), __atomic_store_n(w + 2, v.z, __ATOMIC_RELAXED);
    __atomic_store_n(w + 1, v.y, __ATOMIC_RELEASE), __atomic_store_n(w + 3, v.w, __ATOMIC_RELEASE);
}

/* all: of every thread. */
static void show_emptied(bool all)
{
    for (auto slot = emptied.begin(); slot != emptied.end();)
        if (all || slot->second == running) {
            store_words(const_cast<char *>(slot->first), {~0u, ~0u, ~0u, ~0u});
            slot = emptied.erase(slot);
        } else {
            ++slot;
        }
}

[[maybe_unused]] static void kvpn_fence()
{
    show_emptied(false);
}

static void end_kernel()
{
    show_emptied(true);
}

/* The kernels' memory accesses. Slots are accessed 4 bytes at a time, and y and w, which may be flags, never before the
   words beside them. */
static uint4 kvpn_load_slot(const char *slot)
{
    const uint32_t *const w = reinterpret_cast<const uint32_t *>(slot);
    uint4 v;
    v.y = __atomic_load_n(w + 1, __ATOMIC_ACQUIRE), v.w = __atomic_load_n(w + 3, __ATOMIC_ACQUIRE);
    v.x = __atomic_load_n(w, __ATOMIC_RELAXED), v.z = __atomic_load_n(w + 2, __ATOMIC_RELAXED);
    if (emptied.count(slot))
        v = {~0u, ~0u, ~0u, ~0u};
    static thread_local unsigned empty;
    if (may_sleep.load(std::memory_order_relaxed) && (v.y & v.w) == 0xffffffff && ++empty % 16 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    return v;
}

/* Stores of a pack to a slot that another rank may still have to read or to empty, while all ranks take part. */
static std::atomic<unsigned> overwritten;

static void kvpn_store_slot(char *slot, uint4 v)
{
    const uint32_t *const w = reinterpret_cast<const uint32_t *>(slot);
    if ((v.x & v.y & v.z & v.w) == 0xffffffff) {
        emptied[slot] = running;
        return;
    }
    for (int k = 0; k < 4 && all_take_part; k++)
        overwritten += __atomic_load_n(w + k, __ATOMIC_RELAXED) != 0xffffffff;
    store_words(slot, v);
}

static uint32_t *counted; /* reads of this address are counted in `reads` */
static unsigned reads;

static uint32_t kvpn_load_word(uint32_t *at)
{
    static thread_local unsigned polled; /* beside busy programs each yield takes milliseconds */
    if (!may_sleep.load(std::memory_order_relaxed) && ++polled % 1024 == 0)
        std::this_thread::yield();
    if (at == counted)
        reads++;
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

static void kvpn_store_word(uint32_t *at, uint32_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}

static uint32_t kvpn_load_turn(const uint32_t *at)
{
    return *at;
}

static uint64_t kvpn_globaltimer_ns()
{
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

static void kvpn_sleep()
{
}

/* Rounds to nearest, ties to even. */
static uint32_t kvprim_emulate_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct __nv_bfloat162 {
    uint16_t low, high;
};

static __nv_bfloat162 __floats2bfloat162_rn(float low, float high)
{
    return {static_cast<uint16_t>(kvprim_emulate_bf16(low)), static_cast<uint16_t>(kvprim_emulate_bf16(high))};
}

static float kvprim_emulate_float(uint16_t bf16)
{
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

[[maybe_unused]] static __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return __floats2bfloat162_rn(kvprim_emulate_float(a.low) + kvprim_emulate_float(b.low),
                                 kvprim_emulate_float(a.high) + kvprim_emulate_float(b.high));
}

static float __fadd_rn(float a, float b)
{
    return a + b;
}

static float __fmul_rn(float a, float b)
{
    return a * b;
}

static float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}

static float __fdiv_rn(float a, float b)
{
    return a / b;
}

/* No fp64 result is so near to the middle of two floats that it could be rounded to the wrong one. */
static float __frsqrt_rn(float a)
{
    return static_cast<float>(1 / std::sqrt(static_cast<double>(a)));
}

#define KVPRIM_NCCL_EMULATE
#include "../../kvprim_nccl.h"

#endif

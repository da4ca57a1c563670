/* SPDX-License-Identifier: MIT */
/* What the kernels of kvprim_nccl.h take from a GPU, on the CPU, and the ranks of tests there, which are threads. It
   includes that header. */
#ifndef NCCL_EMULATED_H
#define NCCL_EMULATED_H

#include "../gpu/cuda_shim.h"
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

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

static void __nanosleep(unsigned)
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

static __nv_bfloat162 __habs2(__nv_bfloat162 a)
{
    return {static_cast<uint16_t>(a.low & 0x7fff), static_cast<uint16_t>(a.high & 0x7fff)};
}

/* The larger of two magnitudes, which order as their bits do; a number rather than a NaN. With a sign, as a GPU's. */
static uint16_t kvprim_emulate_max(uint16_t a, uint16_t b)
{
    return (a > 0x7f80 ? b : b > 0x7f80 ? a : std::max(a, b)) | 0x8000;
}

static __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return {kvprim_emulate_max(a.low, b.low), kvprim_emulate_max(a.high, b.high)};
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

/* No fp64 result is so near to the middle of two floats that it could be rounded to the wrong one. */
static float __frsqrt_rn(float a)
{
    return static_cast<float>(1 / std::sqrt(static_cast<double>(a)));
}

/* A GPU's result may be a unit too large or too small; 0, infinity and NaN are exact. */
static float kvprim_emulate_near(float exact, float of)
{
    uint32_t bits;
    memcpy(&bits, &of, 4);
    return std::isfinite(exact) && exact != 0 ? std::nextafter(exact, bits % 2 ? 0.0f : HUGE_VALF) : exact;
}

static float kvprim_emulate_ftz(float a)
{
    return std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0f, a) : a;
}

static float kvpn_near_reciprocal(float a)
{
    return kvprim_emulate_near(kvprim_emulate_ftz(1 / kvprim_emulate_ftz(a)), a);
}

static float kvpn_near_root_reciprocal(float a)
{
    return kvprim_emulate_near(__frsqrt_rn(a), a);
}

#define KVPRIM_NCCL_EMULATE
#define KVPRIM_NCCL_UNROLL
#define KVPRIM_NCCL_UNROLL_BY(n)
#include "../../kvprim_nccl.h"
#include "../harness.h"

/* ---- ranks ---- */

static bool quick;

/* Each rank's memory: a page, the slots, and 16 bytes that no rank reads. */
enum { page_words = kvpn_page / sizeof(uint4) };

struct job {
    uint32_t world;
    uint64_t timeout_ns;
    std::vector<std::vector<uint4>> memory;
    std::vector<uint32_t> stop;
};

/* The test's: how many slots a rank has for each other rank, and whether threads without a pack store to the last 16
   bytes; the rank's part of a call, which all ranks derive from its number, and whether it leaves what it must; what to
   call it; calls that a rank may be late for, from any number on. */
extern const uint32_t slots_of_sender;
extern const bool stores_aside;
static bool run_one(job &j, uint32_t rank, uint64_t number);
static std::string name_of(uint64_t number, uint32_t world);
static std::vector<uint64_t> queue_of(uint32_t world, uint64_t first);

static job job_of(uint32_t world, uint64_t timeout_ns)
{
    const uint4 empty = {kvpn_empty_word, kvpn_empty_word, kvpn_empty_word, kvpn_empty_word};
    std::vector<uint4> memory(page_words + 4 * world * slots_of_sender + 1, empty);
    memset(memory.data(), 0, kvpn_page);
    return {world, timeout_ns, std::vector<std::vector<uint4>>(world, memory), std::vector<uint32_t>(world)};
}

static uint32_t *page_of(job &j, uint32_t rank)
{
    return reinterpret_cast<uint32_t *>(j.memory[rank].data());
}

/* Sets what a call's parameters say of the ranks. slots: of a block. */
static void set_ranks(kvpn_params &p, job &j, uint32_t rank, uint32_t slots)
{
    for (uint32_t r = 0; r < j.world; r++)
        p.peer[r] = reinterpret_cast<char *>(page_of(j, (rank + r) % j.world)) + kvpn_page;
    p.turn = page_of(j, rank), p.stop = &j.stop[rank], p.timeout_ns = j.timeout_ns, p.rank = rank, p.world = j.world;
    p.block_bytes = 16 * slots, p.sender_bytes = 16 * slots_of_sender;
    p.area_bytes = j.world * p.sender_bytes, p.turn_bytes = 2 * p.area_bytes;
}

static void run_rank(job &j, uint32_t rank, uint64_t first, uint64_t calls)
{
    for (uint64_t n = first; n < first + calls; n++) {
        const bool right = run_one(j, rank, n);
        if (!right)
            may_sleep.store(false, std::memory_order_relaxed);
        if (!right && all_take_part)
            fail("world %u, rank %u: call %llu, %s: wrong result, or wrong bytes beside it", j.world, rank,
                 static_cast<unsigned long long>(n), name_of(n, j.world).c_str());
        if (all_take_part && j.stop[rank] != 0) /* a wait took all its time, and no later call is right */
            return;
        if (hash_u64(n * 7 + rank) % 32 == 0)
            std::this_thread::yield();
    }
}

static void test_world(const char *what, uint32_t world, uint64_t calls)
{
    char name[64];
    snprintf(name, sizeof name, "%s emulated: %u ranks, %d calls in turn", what, world, static_cast<int>(calls));
    if (!begin_test(name))
        return;
    job j = job_of(world, 60000000000ull);
    std::vector<std::thread> threads;
    all_take_part = may_sleep = true;
    for (uint32_t r = 0; r < world; r++)
        threads.emplace_back([&j, r, calls, world] { run_rank(j, r, world * 1000000, calls); });
    for (std::thread &t : threads)
        t.join();
    all_take_part = may_sleep = false;
    for (const std::vector<uint4> &memory : j.memory)
        for (size_t k = page_words; k + stores_aside < memory.size(); k++)
            CHECK((memory[k].x & memory[k].y & memory[k].z & memory[k].w) == kvpn_empty_word);
    CHECK(overwritten == 0 || stores_aside);
    finish_test(name);
}

/* Rank 1 of 3 does not take part in a call. The others stop, and say which rank was missing. One that comes
   after the other's timeout is missing as well, so on a busy machine the timeout must be longer. */
static bool names_missing(uint64_t number, uint64_t timeout_ns)
{
    job j = job_of(3, timeout_ns);
    std::thread zero([&j, number] { run_rank(j, 0, number, 1); });
    run_rank(j, 2, number, 1);
    zero.join();
    const uint32_t named = kvpn_stop_timeout | 2 << 8 | 1 << 16; /* by a rank, or because the other one said so */
    return (j.stop[0] | 2 << 8) == named && (j.stop[2] | 2 << 8) == named && page_of(j, 1)[kvpn_stop_reason_word] != 0;
}

static void expect_missing_named(uint64_t number)
{
    bool named = false;
    for (uint64_t timeout_ns = 5000000; !named && timeout_ns < 6000000000; timeout_ns *= 4)
        named = names_missing(number, timeout_ns);
    CHECK(named);
}

/* Ranks stop in a wait, run what is queued after it, and then the late rank comes. Each of its calls has the right
   result or, from the first wrong one on, an error. `told`: its page says that they stopped. If not, what the others
   sent before they stopped must still be there. */
static void come_late(uint32_t world, const std::vector<uint64_t> &queue, bool told)
{
    job j = job_of(world, 2000000);
    std::vector<std::thread> others;
    for (uint32_t r = 1; r < world; r++)
        others.emplace_back([&j, r, &queue] {
            for (const uint64_t n : queue)
                run_rank(j, r, n, 1);
        });
    for (std::thread &t : others)
        t.join();
    j.timeout_ns = 10000000;
    if (!told)
        page_of(j, 0)[kvpn_stop_reason_word] = 0;
    for (const uint64_t n : queue)
        CHECK(run_one(j, 0, n) || j.stop[0] != 0);
    for (uint32_t r = 0; r < world; r++)
        CHECK(j.stop[r] != 0);
}

static void test_late_after_the_end()
{
    for (uint32_t world = 2; world <= 8; world++)
        for (uint64_t first = 0; first < (quick || under_threads ? 2 : 6); first++)
            come_late(world, queue_of(world, first), first % 2 == 0);
}

#endif

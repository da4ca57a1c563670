/* SPDX-License-Identifier: MIT */
/* Barriers, votes and shuffles for cuda_shim.h: each thread of a block has a stack of its own and runs to the next
   barrier; then the next thread does. Needs ucontext. */
#ifndef CUDA_TURNS_H
#define CUDA_TURNS_H

#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_TURNS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_TURNS_ASAN 1
#endif
#endif
#ifdef CUDA_TURNS_ASAN
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(save, bottom, bytes) ((void)(save), (void)(bottom), (void)(bytes))
#define __sanitizer_finish_switch_fiber(save, bottom, bytes) ((void)(save), (void)(bottom), (void)(bytes))
#endif

enum { turns_stack_bytes = 64 << 10 };

struct turns_thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(turns_stack_bytes);
    void *saved = nullptr; /* what AddressSanitizer keeps of a stack while another one is used */
    bool ended = false;
};

static struct {
    std::vector<turns_thread> threads;
    ucontext_t scheduler;
    const void *bottom; /* of the scheduler's stack */
    size_t bytes;
    void (*run)(const void *);
    const void *what;               /* it runs */
    unsigned now;                   /* the thread that runs */
    unsigned turn;                  /* barriers so far */
    bool vote, voted;               /* in this turn, in the last */
    std::vector<uint32_t> given[2]; /* by each thread in this turn, or the last */
} turns;

static void turns_leave(bool ends)
{
    turns_thread &t = turns.threads[turns.now];
    t.ended = ends;
    __sanitizer_start_switch_fiber(ends ? nullptr : &t.saved, turns.bottom, turns.bytes);
    (void)swapcontext(&t.context, &turns.scheduler);
    __sanitizer_finish_switch_fiber(t.saved, nullptr, nullptr);
}

static void turns_begin()
{
    __sanitizer_finish_switch_fiber(nullptr, &turns.bottom, &turns.bytes);
    turns.run(turns.what);
    turns_leave(true);
}

static void turns_enter(unsigned thread)
{
    turns_thread &t = turns.threads[thread];
    void *saved = nullptr;
    turns.now = thread;
    __sanitizer_start_switch_fiber(&saved, t.stack.data(), t.stack.size());
    (void)swapcontext(&turns.scheduler, &t.context);
    __sanitizer_finish_switch_fiber(saved, nullptr, nullptr);
}

/* Runs run(what) as `count` threads. before(thread) and after(thread) set and keep what they see as their own. Returns
   false if some ended while others wait at a barrier: on a GPU they might wait forever. `groups`: barriers are of groups
   of threads. */
template <class Before, class After>
static bool turns_run(unsigned count, bool last_first, bool groups, void (*run)(const void *), const void *what,
                      Before before, After after)
{
    if (turns.threads.size() < count)
        turns.threads = std::vector<turns_thread>(count);
    turns.run = run, turns.what = what, turns.turn = 0, turns.vote = false;
    for (std::vector<uint32_t> &given : turns.given)
        given.assign(count, 0xeeeeeeee);
    for (unsigned i = 0; i < count; i++) {
        turns_thread &t = turns.threads[i];
        (void)getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = t.stack.size();
        makecontext(&t.context, turns_begin, 0);
    }
    for (unsigned i = 0; i < count; i++)
        turns.threads[i].ended = false;
    for (unsigned ended = 0; ended < count; turns.turn++) {
        for (unsigned k = 0; k < count; k++) {
            const unsigned i = last_first ? count - 1 - k : k;
            if (turns.threads[i].ended)
                continue;
            before(i);
            turns_enter(i);
            after(i);
            ended += turns.threads[i].ended;
        }
        if (ended && ended < count && !groups)
            return false;
        turns.voted = turns.vote;
        turns.vote = false;
    }
    return true;
}

static inline void __syncthreads()
{
    turns_leave(false);
}

static inline int __syncthreads_or(int predicate)
{
    turns.vote |= predicate != 0;
    turns_leave(false);
    return turns.voted;
}

/* A barrier, too: whole blocks call it. */
static inline uint32_t kvpc_shuffle_up(uint32_t value, uint32_t distance)
{
    const unsigned thread = turns.now;
    std::vector<uint32_t> &given = turns.given[turns.turn % 2];
    given[thread] = value;
    turns_leave(false);
    return thread % 32 >= distance ? given[thread - distance] : value;
}

static inline uint32_t kvpc_shuffle_xor(uint32_t value, uint32_t mask)
{
    const unsigned thread = turns.now;
    std::vector<uint32_t> &given = turns.given[turns.turn % 2];
    given[thread] = value;
    turns_leave(false);
    return given[thread ^ mask];
}

/* Only the threads of a group call it together. They have passed equally many barriers, as nothing else is one. */
static inline uint32_t kvpc_group_xor(uint32_t value, uint32_t distance, uint32_t)
{
    const unsigned thread = turns.now;
    std::vector<uint32_t> &given = turns.given[turns.turn % 2];
    given[thread] = value;
    turns_leave(false);
    return given[thread ^ distance];
}

#endif

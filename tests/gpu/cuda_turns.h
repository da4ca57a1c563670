/* SPDX-License-Identifier: MIT */
/* Barriers, votes and shuffles for cuda_shim.h: each thread of a block has a stack of its own and runs to the next
   barrier; then the next thread does. Needs ucontext. */
#ifndef CUDA_TURNS_H
#define CUDA_TURNS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

/* Where a stack goes on. turns_begin is where it starts. swapcontext takes two system calls, and under AddressSanitizer
   clears what that knows of a whole stack: half the time of all tests. So x86-64 has a switch of its own. */
static void turns_begin();
#if defined(__x86_64__) && defined(__ELF__)
typedef void *turns_place; /* the stack pointer; what a callee saves lies there, and where it returns to */
extern "C" void turns_switch(turns_place *from, const turns_place *to);
asm(".text\n"
    "turns_switch:\n"
    "    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov (%rsi), %rsp\n"
    "    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp\n"
    "    ret\n");

static void turns_start(turns_place *place, std::vector<char> *stack)
{
    void **const top = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(stack->data() + stack->size()) & ~15ull);
    memset(top - 8, 0, 8 * sizeof *top);
    top[-2] = reinterpret_cast<void *>(turns_begin); /* as if called from nowhere */
    *place = top - 8;
}
#else
typedef ucontext_t turns_place;
static void turns_switch(turns_place *from, const turns_place *to)
{
    (void)swapcontext(from, to);
}

static void turns_start(turns_place *place, std::vector<char> *stack)
{
    (void)getcontext(place);
    place->uc_stack.ss_sp = stack->data();
    place->uc_stack.ss_size = stack->size();
    makecontext(place, turns_begin, 0);
}
#endif

struct turns_thread {
    turns_place place;
    std::vector<char> stack = std::vector<char>(turns_stack_bytes);
    void *saved = nullptr; /* what AddressSanitizer keeps of a stack while another one is used */
    bool ended = false;
};

static struct {
    std::vector<turns_thread> threads;
    turns_place scheduler;
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
    turns_switch(&t.place, &turns.scheduler);
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
    turns_switch(&turns.scheduler, &t.place);
    __sanitizer_finish_switch_fiber(saved, nullptr, nullptr);
}

/* Whether of each `together` threads all have ended, or none. */
static bool turns_meet(unsigned count, unsigned together)
{
    for (unsigned i = 0; i < count; i++)
        if (turns.threads[i].ended != turns.threads[i / together * together].ended)
            return false;
    return true;
}

/* Runs run(what) as `count` threads. before(thread) and after(thread) set and keep what they see as their own. Returns
   false if some ended while others wait at a barrier: on a GPU they might wait forever. together: how many threads meet
   at a barrier, or 0 for all. */
template <class Before, class After>
static bool turns_run(unsigned count, bool last_first, unsigned together, void (*run)(const void *), const void *what,
                      Before before, After after)
{
    if (turns.threads.size() < count)
        turns.threads = std::vector<turns_thread>(count);
    turns.run = run, turns.what = what, turns.turn = 0, turns.vote = false;
    for (std::vector<uint32_t> &given : turns.given)
        given.assign(count, 0xeeeeeeee);
    for (unsigned i = 0; i < count; i++) {
        turns_start(&turns.threads[i].place, &turns.threads[i].stack);
        turns.threads[i].ended = false;
    }
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
        if (!turns_meet(count, together ? together : count))
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

/* If only the threads of a group call it together, they have passed equally many barriers, as nothing else is one. */
static inline uint32_t kvpc_shuffle_xor(uint32_t value, uint32_t mask, uint32_t members = UINT32_MAX)
{
    const unsigned thread = turns.now, other = thread ^ mask;
    std::vector<uint32_t> &given = turns.given[turns.turn % 2];
    if (!(members >> thread % 32 & members >> other % 32 & 1)) {
        printf("FAIL threads %u and %u meet in a shuffle of the members %08x\n", thread, other, members);
        fflush(stdout);
        abort();
    }
    given[thread] = value;
    turns_leave(false);
    return given[other];
}

#endif

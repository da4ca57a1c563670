/* SPDX-License-Identifier: MIT */
/* handover_guard.h: a thread that ends calls which wait for a peer that is gone, inside NCCL or CUDA, and have no
   deadline of their own. C11 and C++17, POSIX.

       handover_guard_start(&guard, end, context)    once; false: no thread
       handover_guard_begin(&guard, fd, ms)          end(context) is called when ms are over, or the connection ends
       ... calls that may wait ...
       handover_guard_end(&guard)                    false: it was called. It does not run any more, and will not run

   It is called again and again until handover_guard_end: of several calls that are made in turn, each may wait. */
#ifndef HANDOVER_GUARD_H
#define HANDOVER_GUARD_H

#include "handover_link.h"
#include <pthread.h>

enum { handover_guard_ms = 20 }; /* between two looks */

typedef struct handover_guard {
    void (*end)(void *context);
    void *context;
    pthread_mutex_t lock; /* held while `end` runs */
    int64_t until_us;     /* 0: nothing is guarded */
    int watched_fd;
    int32_t fired; /* atomic */
} handover_guard;

/* Returns whether the calls since handover_guard_begin were ended. */
static inline bool handover_guard_fired(handover_guard *g)
{
    return __atomic_load_n(&g->fired, __ATOMIC_SEQ_CST) != 0;
}

static inline void *handover_guard_run(void *argument)
{
    handover_guard *const g = (handover_guard *)argument;
    for (;;) {
        (void)poll(NULL, 0, handover_guard_ms);
        (void)pthread_mutex_lock(&g->lock);
        struct pollfd p = {g->watched_fd, POLLRDHUP, 0};
        if (g->until_us && (poll(&p, 1, 0) > 0 || handover_now_us() >= g->until_us)) {
            __atomic_store_n(&g->fired, 1, __ATOMIC_SEQ_CST);
            g->end(g->context);
        }
        (void)pthread_mutex_unlock(&g->lock);
    }
    return NULL;
}

static inline bool handover_guard_start(handover_guard *g, void (*end)(void *context), void *context)
{
    pthread_t thread;
    memset(g, 0, sizeof *g);
    g->end = end, g->context = context;
    if (pthread_mutex_init(&g->lock, NULL) != 0 || pthread_create(&thread, NULL, handover_guard_run, g) != 0)
        return false;
    return pthread_detach(thread) == 0;
}

/* fd: -1 for none. */
static inline void handover_guard_begin(handover_guard *g, int fd, int64_t ms)
{
    (void)pthread_mutex_lock(&g->lock);
    g->watched_fd = fd, g->until_us = handover_now_us() + ms * 1000;
    __atomic_store_n(&g->fired, 0, __ATOMIC_SEQ_CST);
    (void)pthread_mutex_unlock(&g->lock);
}

static inline bool handover_guard_end(handover_guard *g)
{
    (void)pthread_mutex_lock(&g->lock);
    g->until_us = 0;
    (void)pthread_mutex_unlock(&g->lock);
    return !handover_guard_fired(g);
}

#endif

/* SPDX-License-Identifier: MIT */
/* What it costs to measure: the same loop of launches with nothing around it, under CUPTI, and with the usual ways to
   time each call. Included by trace.cu only; Linux, for the clock of a thread's CPU time. */
#ifndef COSTS_H
#define COSTS_H

#include <algorithm>
#include "../gpu.cuh"
#include <nvtx3/nvToolsExt.h>
#include <time.h>
#include <unistd.h>

typedef enum { COST_NOTHING, COST_RANGES, COST_CLOCK, COST_EVENTS, COST_SYNCHRONISE } cost_method;

enum { cost_events = 256, cost_rounds = 7 };

static struct {
    cost_method method; /* what surrounds each call now */
    cudaEvent_t events[cost_events];
    int next_event;
    int64_t began, timed; /* ns */
} cost_now;

static int64_t cost_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Call this before each piece of work that one would time, and cost_end after it. */
static void cost_begin(const char *what)
{
    if (cost_now.method == COST_RANGES)
        nvtxRangePushA(what);
    else if (cost_now.method == COST_EVENTS)
        CU(cudaEventRecord(cost_now.events[cost_now.next_event++ % cost_events], 0));
    else if (cost_now.method == COST_SYNCHRONISE)
        CU(cudaDeviceSynchronize());
    if (cost_now.method == COST_CLOCK || cost_now.method == COST_SYNCHRONISE)
        cost_now.began = cost_clock(CLOCK_MONOTONIC);
}

static void cost_end(void)
{
    if (cost_now.method == COST_RANGES)
        nvtxRangePop();
    else if (cost_now.method == COST_EVENTS)
        CU(cudaEventRecord(cost_now.events[cost_now.next_event++ % cost_events], 0));
    else if (cost_now.method == COST_SYNCHRONISE)
        CU(cudaDeviceSynchronize());
    if (cost_now.method == COST_CLOCK || cost_now.method == COST_SYNCHRONISE)
        cost_now.timed += cost_clock(CLOCK_MONOTONIC) - cost_now.began;
}

typedef struct cost {
    int64_t launching, thread_cpu, until_done; /* ns: of the loop, and until the GPU has finished */
} cost;

/* Runs the loop once. */
static cost cost_of(cost_method method, void (*loop)(void))
{
    cost c;
    cost_now.method = method;
    CU(cudaDeviceSynchronize());
    const int64_t wall = cost_clock(CLOCK_MONOTONIC), cpu = cost_clock(CLOCK_THREAD_CPUTIME_ID);
    loop();
    c.launching = cost_clock(CLOCK_MONOTONIC) - wall;
    c.thread_cpu = cost_clock(CLOCK_THREAD_CPUTIME_ID) - cpu;
    CU(cudaDeviceSynchronize());
    c.until_done = cost_clock(CLOCK_MONOTONIC) - wall;
    cost_now.method = COST_NOTHING;
    return c;
}

/* Returns the median of each column. */
static cost cost_median(const cost *rounds, int count)
{
    int64_t columns[3][cost_rounds];
    for (int i = 0; i < count; i++) {
        columns[0][i] = rounds[i].launching;
        columns[1][i] = rounds[i].thread_cpu;
        columns[2][i] = rounds[i].until_done;
    }
    for (int64_t *column : {columns[0], columns[1], columns[2]})
        std::sort(column, column + count);
    return {columns[0][count / 2], columns[1][count / 2], columns[2][count / 2]};
}

static void cost_print(const char *title, const cost *c, const cost *untraced, int calls)
{
    printf("%-45s %8.3f  %8.3f  %8.3f  %6.2f  %8.2f\n", title, 1e-6 * (double)c->launching,
           1e-6 * (double)c->thread_cpu, 1e-6 * (double)c->until_done,
           (double)c->until_done / (double)untraced->until_done,
           1e-3 * (double)(c->launching - untraced->launching) / calls);
}

/* Prints what each method costs. `calls` is the number of cost_begin in a loop; `traced` is called with 1 before a loop
   that is recorded, and with 0 after it. `first` is what the loop took before CUPTI was used at all. */
static void cost_table(void (*loop)(void), int calls, void (*traced)(int), const cost *first)
{
    static const struct cost_row {
        const char *title;
        cost_method method;
        int traced;
    } rows[] = {{"untraced", COST_NOTHING, 0},
                {"NVTX ranges that nothing records", COST_RANGES, 0},
                {"CUPTI: kernels, copies, calls", COST_NOTHING, 1},
                {"CUPTI and NVTX ranges", COST_RANGES, 1},
                {"host clock around each call", COST_CLOCK, 0},
                {"CUDA events around each call", COST_EVENTS, 0},
                {"synchronise and host clock around each call", COST_SYNCHRONISE, 0}};
    const int count = (int)(sizeof rows / sizeof(cost_row));
    static cost rounds[sizeof rows / sizeof(cost_row)][cost_rounds];
    for (cudaEvent_t &event : cost_now.events)
        CU(cudaEventCreate(&event));
    for (int round = 0; round < cost_rounds; round++) {
        if (isatty(2))
            fprintf(stderr, "\rmeasuring what recording costs, round %d of %d\033[K\r", round + 1, (int)cost_rounds);
        for (int r = 0; r < count; r++) {
            if (rows[r].traced)
                traced(1);
            rounds[r][round] = cost_of(rows[r].method, loop);
            if (rows[r].traced)
                traced(0);
        }
    }
    const cost untraced = cost_median(rounds[0], cost_rounds);
    printf("\n%-45s %8s  %8s  %8s  %6s  %8s\n", "what measuring costs", "launched", "CPU time", "GPU done", "times",
           "a call");
    printf("%-45s %8s  %8s  %8s  %6s  %8s\n", "(medians of 7 runs of the storing loop)", "ms", "ms", "ms", "", "+ us");
    cost_print("untraced, before CUPTI's first use", first, &untraced, calls);
    for (int r = 0; r < count; r++) {
        const cost median = cost_median(rounds[r], cost_rounds);
        cost_print(rows[r].title, &median, &untraced, calls);
    }
    for (cudaEvent_t event : cost_now.events)
        CU(cudaEventDestroy(event));
}
#endif

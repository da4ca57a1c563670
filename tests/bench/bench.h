/* SPDX-License-Identifier: MIT */
/* What the host benchmarks share: one core, a clock in core cycles, and medians of interleaved repetitions. */
#ifndef BENCH_H
#define BENCH_H

#include "../harness.h"
#include <time.h>
#ifdef __linux__
#include <sched.h>
#endif

/* Stays on the last core that this process may use, because the first one serves most interrupts. */
static void bench_pin(void)
{
#ifdef __linux__
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) == 0)
        for (size_t core = CPU_SETSIZE; core-- > 0;)
            if (CPU_ISSET(core, &all)) {
                CPU_SET(core, &one);
                (void)sched_setaffinity(0, sizeof one, &one);
                printf("pinned to core %zu\n", core);
                return;
            }
#endif
    printf("not pinned to a core\n");
}

/* Prints which processor and compiler the figures are from. */
static void bench_machine(void)
{
    char line[256] = "";
    FILE *const f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f) && strncmp(line, "model name", 10) != 0)
        ;
    if (f)
        (void)fclose(f);
    const char *const name = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
#ifdef __VERSION__
    printf("compiler " __VERSION__ ", ");
#endif
    printf("processor%s", name ? name : ": unknown\n");
}

static double bench_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Returns the nanoseconds of a core cycle now, from a chain of additions that each wait for the one before. */
static inline double bench_cycle_ns(void)
{
    enum { steps = 20000 };
    uint64_t x = 1;
    const double start = bench_ns();
    for (int i = 0; i < steps; i++)
#if defined(__x86_64__)
        __asm__ volatile("add $1, %0" : "+r"(x));
#elif defined(__aarch64__)
        __asm__ volatile("add %0, %0, #1" : "+r"(x));
#else
        *(volatile uint64_t *)&x += 1;
#endif
    return (bench_ns() - start) / steps;
}

static int bench_order(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, bench_order);
    return values[n / 2];
}

/* Judges what a benchmark promises. Prints a missed target where it is, and counts all of them for the end. */
static int bench_met, bench_missed;

static void bench_target(const char *what, double got, const char *relation, double want)
{
    const int ok = relation[0] == '>' ? got >= want : got <= want;
    bench_met += ok;
    bench_missed += !ok;
    if (!ok)
        printf("  MISSED %s: %.2f, target %s %g\n", what, got, relation, want);
}

static void bench_summary(void)
{
    printf("\n%d targets met, %d missed\n", bench_met, bench_missed);
}

#endif

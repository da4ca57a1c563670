/* SPDX-License-Identifier: MIT */
/* What every test shares: counting, random numbers, memory. C11 and C++11, gcc, clang and nvcc. Include it after the
   header under test. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__) && !defined(__CUDACC__) /* CUDA does not survive a fork */
#define HARNESS_FORKS
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS 0x20 /* -std=c11 hides it */
#endif
#endif

/* ---- counting ---- */

typedef struct harness {
    int passed, failed, skipped;
    int faults;     /* in the test that runs now; any thread adds to it */
    char skip[200]; /* why the test that runs now cannot run here */
    int begun;      /* tests so far */
    int running, finished;
    char name[100]; /* of the last test that has begun */
} harness;

/* Tests of several processes point this to memory that they share. */
static harness own_counts;
static harness *counts = &own_counts;

#ifdef __MINGW32__
#define HARNESS_PRINTF __attribute__((format(gnu_printf, 1, 2)))
#else
#define HARNESS_PRINTF __attribute__((format(printf, 1, 2)))
#endif

/* Fails the test. Only a test's first few faults are printed. */
HARNESS_PRINTF static inline void fail(const char *format, ...)
{
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (__atomic_fetch_add(&counts->faults, 1, __ATOMIC_RELAXED) < 5)
        printf("  %s\n", text), fflush(stdout); /* the test may crash next */
}
#define CHECK(condition) ((condition) ? (void)0 : fail("line %d: false: %s", __LINE__, #condition))

/* The call returns this status, and its error text contains `words`. The text is cleared first, so that an older one
   cannot pass for this call's. */
#define CHECK_ERROR(call, status, words) ((void)kvprim_fail(KVPRIM_OK, "-"), check_error(__LINE__, call, status, words))
#ifdef KVPRIM_H
static inline void check_error(int line, kvprim_status got, kvprim_status want, const char *words)
{
    if (got != want)
        fail("line %d: status %s, expected %s (%s)", line, kvprim_status_name(got), kvprim_status_name(want),
             kvprim_last_error());
    if (!strstr(kvprim_last_error(), words))
        fail("line %d: the error \"%s\" does not say \"%s\"", line, kvprim_last_error(), words);
}
#endif

/* Says that the test that runs now cannot run here. */
HARNESS_PRINTF static inline void skip(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(counts->skip, sizeof counts->skip, format, args);
    va_end(args);
}

/* Ends the test `name`: prints a line about it, and counts it. */
static inline void finish_test(const char *name)
{
    const int faults = counts->faults;
    if (faults)
        printf("FAIL %s: %d faults\n", name, faults);
    else if (counts->skip[0])
        printf("skip %s: %s\n", name, counts->skip);
    else
        printf("ok %s\n", name);
    fflush(stdout);
    *(faults ? &counts->failed : counts->skip[0] ? &counts->skipped : &counts->passed) += 1;
    counts->faults = 0;
    counts->skip[0] = 0;
    counts->running = 0;
}

/* Returns whether the test `name` is to run in this process. A child process runs the tests. If it dies, the test that
   it was in has failed, and another child runs those after it. (In gdb: set follow-fork-mode child.) */
static inline int begin_test(const char *name)
{
#ifdef HARNESS_FORKS
    static int is_child, seen;
    if (counts == &own_counts) {
        void *const shared = mmap(NULL, sizeof own_counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared != MAP_FAILED)
            counts = (harness *)memcpy(shared, counts, sizeof own_counts);
    }
    if (++seen <= counts->begun)
        return 0; /* it ran in a child that has died */
    fflush(stdout);
    const pid_t child = is_child || counts == &own_counts ? -1 : fork();
    if (child > 0) {
        int status = 0;
        char text[200];
        (void)waitpid(child, &status, 0);
        if (counts->finished)
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
        fail("%s %d ended it", WIFSIGNALED(status) ? "signal" : "exit code",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        snprintf(text, sizeof text, "%s%s", counts->running ? "" : "what follows ", counts->name);
        finish_test(text);
        return 0;
    }
    if (child == 0)
        is_child = 1, (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    counts->begun++, counts->running = 1;
    snprintf(counts->name, sizeof counts->name, "%s", name);
    return 1;
}

static inline void run(const char *name, void (*test)(void))
{
    if (!begin_test(name))
        return;
    test();
    finish_test(name);
}

/* Returns the program's exit code. tests/run.sh reads the line. */
static inline int finish(void)
{
    counts->finished = 1;
    printf("%d passed, %d failed, %d skipped\n", counts->passed, counts->failed, counts->skipped);
    return counts->failed != 0 || counts->passed == 0;
}

/* ---- random numbers ---- */

#ifdef __CUDACC__
#define HARNESS_DEVICE __host__ __device__
#else
#define HARNESS_DEVICE
#endif

/* Returns the n-th of splitmix64's numbers. */
HARNESS_DEVICE static inline uint64_t hash_u64(uint64_t n)
{
    uint64_t z = (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static __thread uint64_t random_state;

static inline uint64_t random_u64(void)
{
    return hash_u64(random_state++);
}

static inline uint64_t below(uint64_t n)
{
    return random_u64() % n;
}

/* A word at a time: under sanitizers, a memcpy of a size that is not constant is a call. */
static inline void fill(void *p, size_t bytes)
{
    unsigned char *to = (unsigned char *)p;
    uint64_t n = random_state, word;
    for (; bytes >= sizeof word; to += sizeof word, bytes -= sizeof word) {
        word = hash_u64(n++);
        memcpy(to, &word, sizeof word);
    }
    if (bytes > 0) {
        word = hash_u64(n++);
        memcpy(to, &word, bytes);
    }
    random_state = n;
}

/* ---- memory ---- */

static inline void *allocate(size_t bytes)
{
    void *const p = malloc(bytes ? bytes : 1);
    if (!p) {
        fail("out of memory: %zu bytes", bytes);
        exit(1);
    }
    return p;
}

/* ---- tables ---- */

#ifdef KVPRIM_H
/* Rows follow each other without a gap. Every other field is zero. */
static inline kvprim_table table_of(void *data, int64_t rows)
{
    kvprim_table t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.rows = rows;
    return t;
}

static inline kvprim_table strided_table(void *data, int64_t rows, int64_t stride)
{
    kvprim_table t = table_of(data, rows);
    t.stride = stride;
    return t;
}

/* kvprim_layout_find for a quantised cache. */
static inline kvprim_status find_quantised(const char *name, void *data, int64_t rows, int64_t page_rows,
                                           int64_t page_stride, kvprim_layout *layout)
{
    kvprim_layout_sizes sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.data = data, sizes.rows = rows, sizes.page_rows = page_rows, sizes.page_stride = page_stride;
    return kvprim_layout_find(name, &sizes, layout);
}

static inline kvprim_table paged_table(void *data, int64_t rows, int64_t page_rows, int64_t page_stride)
{
    kvprim_table t = table_of(data, rows);
    t.page_rows = page_rows;
    t.page_stride = page_stride;
    return t;
}
#endif

#endif

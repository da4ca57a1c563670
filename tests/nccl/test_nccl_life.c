/* SPDX-License-Identifier: MIT */
/* Tests the life of a communicator without a GPU and without NCCL: nccl_fake.h fakes both. Sanitizers see uses after
   its end, leaks, and races. Valid C11.

       cc -std=c11 -pthread -fsanitize=address -I. -isystem $CUDA_HOME/include tests/nccl/test_nccl_life.c && ./a.out

   With -fsanitize=thread, set TSAN_OPTIONS=history_size=7, or a race is not reported if its first access is
   forgotten. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "nccl_fake.h"
#include "../harness.h"
#include <sys/mman.h>
#include <sys/wait.h>

#define OK(call) CHECK_ERROR(call, KVPRIM_OK, "")
#define OK_CALLING(call, names) (OK(call), CHECK(called(names)))

static void begin(void)
{
    memset(&fake, 0, sizeof fake);
    fake.version = 22809;
    call_count = 0;
    current_device = home;
    current_mode = cudaStreamCaptureModeThreadLocal;
}

/* Nothing is left: no thread, no memory, no other device or capture mode. */
static void end(void)
{
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms));
    CHECK(load(&live_allocations) == 0);
    CHECK(current_device == home && current_mode == cudaStreamCaptureModeThreadLocal);
}

static void live(const char *name, void (*test)(void))
{
    if (!begin_test(name))
        return;
    begin();
    test();
    end();
    finish_test(name);
}

/* On the heap, so that a sanitizer sees uses after the caller has freed it. */
static kvprim_comm *new_comm(void)
{
    return (kvprim_comm *)calloc(1, sizeof(kvprim_comm));
}

#define OPENED "CommInitRank AllGather AllGather AllGather AllGather"

/* Opens one with these calls, and closes it with those. */
static kvprim_comm *open_comm(const kvprim_comm_desc *desc, const char *calls_made)
{
    kvprim_comm *const comm = new_comm();
    OK_CALLING(kvprim_comm_init(comm, desc), calls_made);
    return comm;
}

static kvprim_comm *open_world(int world)
{
    const kvprim_comm_desc desc = {.world = world};
    return open_comm(&desc, OPENED);
}

static void close_comm(kvprim_comm *comm, const char *calls_made)
{
    OK_CALLING(kvprim_comm_destroy(comm), calls_made);
    free(comm);
}

static void test_plain(void)
{
    kvprim_comm *const comm = new_comm();
    const kvprim_comm_desc d = {.world = 1, .buffer_bytes = 64};
    OK(kvprim_comm_init(comm, &d));
    CHECK(called(OPENED) && comm->nccl->device == home);
    CHECK(strstr(kvprim_comm_describe(comm), "rank 0 of 1 on device 2") != NULL);
    OK(kvprim_comm_check(comm));
    OK_CALLING(kvprim_comm_destroy(comm), "CommDestroy");
    CHECK_ERROR(kvprim_comm_destroy(comm), KVPRIM_ERROR_ARGUMENT, "not initialised");
    free(comm);
}

/* A thread of the caller's that watches a communicator, and what it found. */
typedef struct watchdog {
    kvprim_comm *comm;
    kvprim_status first, status;
    const int32_t *when; /* it starts when this is 1 */
    int32_t over;
    pthread_t thread;
} watchdog;

static void *abort_when(void *argument)
{
    watchdog *const w = (watchdog *)argument;
    (void)kvpn_wait_until(w->when, 1, test_timeout_ms);
    w->status = kvprim_comm_abort(w->comm);
    return NULL;
}

/* Checks until there is an error. */
static void *check_until_over(void *argument)
{
    watchdog *const w = (watchdog *)argument;
    (void)kvpn_wait_until(w->when, 1, test_timeout_ms);
    w->first = w->status = kvprim_comm_check(w->comm);
    while (w->status == KVPRIM_OK && !load(&w->over))
        w->status = kvprim_comm_check(w->comm);
    return NULL;
}

static void start(watchdog *w, void *(*does)(void *), kvprim_comm *comm, const int32_t *when)
{
    memset(w, 0, sizeof *w);
    w->comm = comm, w->when = when;
    CHECK(pthread_create(&w->thread, NULL, does, w) == 0);
}

static kvprim_status result_of(watchdog *w)
{
    store(&w->over, 1);
    CHECK(pthread_join(w->thread, NULL) == 0);
    return w->status;
}

static void test_late_nccl(void)
{
    kvprim_comm *comm = new_comm();
    kvprim_comm_desc d = {.world = 2, .init_timeout_ms = short_timeout_ms};
    watchdog w;
    fake.hang_init = 1;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "rank 0 of 2 waited 250 ms");
    CHECK(called("CommInitRank CommAbort"));
    CHECK_ERROR(kvprim_comm_destroy(comm), KVPRIM_ERROR_ARGUMENT, "not initialised");
    end(), begin();
    fake.hang_init = 1;
    d.init_timeout_ms = test_timeout_ms;
    start(&w, abort_when, comm, &fake.hanging);
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "kvprim_comm_abort was called");
    free(comm); /* abort no longer uses it */
    comm = new_comm();
    OK_CALLING(result_of(&w), "CommInitRank CommAbort");
    end(), begin();
    fake.late_init = 1;
    d.init_timeout_ms = short_timeout_ms;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
    CHECK(load(&threads) == 1 && load(&call_count) == 1);
    free(comm);
    store(&fake.gate, 1); /* NCCL has a communicator after all */
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms) && called("CommInitRank CommAbort"));
}

/* If CUDA takes longer than the timeout, NCCL is no longer called. */
static void test_late_cuda(void)
{
    kvprim_comm *const comm = new_comm();
    const kvprim_comm_desc d = {.world = 2, .init_timeout_ms = short_timeout_ms};
    fake.late_memory = 1;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
    free(comm);
    store(&fake.gate, 1);
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms) && called(""));
}

/* Another thread checks from the start of init on. */
static void test_checks_during_init(void)
{
    kvprim_comm *const comm = new_comm();
    kvprim_comm_desc d = {.world = 1};
    watchdog w;
    fake.hang_init = 1, d.init_timeout_ms = short_timeout_ms;
    start(&w, check_until_over, comm, &fake.hanging);
    CHECK(kvprim_comm_init(comm, &d) == KVPRIM_ERROR_TIMEOUT);
    CHECK((result_of(&w) == KVPRIM_OK || w.status == KVPRIM_ERROR_ARGUMENT) && w.first == KVPRIM_OK);
    end(), begin();
    fake.late_init = 1, d.init_timeout_ms = 0;
    start(&w, check_until_over, comm, &fake.hanging);
    store(&fake.gate, 1);
    OK(kvprim_comm_init(comm, &d));
    for (int k = 0; k < 200; k++)
        OK(kvprim_all_gather(comm, &w, &w, 1, KVPRIM_INT8, NULL));
    OK(result_of(&w));
    OK(kvprim_comm_destroy(comm));
    free(comm);
}

/* An exchange hangs, or a copy before or after it, until NCCL is aborted. CUDA then says that all went well. */
static void test_late_exchanges(void)
{
    static const char *const ends[] = {"CommInitRank AllGather CommAbort", "CommInitRank AllGather AllGather CommAbort",
                                       "CommInitRank AllGather AllGather AllGather CommAbort", OPENED " CommAbort"};
    kvprim_comm *const comm = new_comm();
    const kvprim_comm_desc d = {.world = 2, .init_timeout_ms = short_timeout_ms};
    for (int k = 0; k < 4; k++) {
        fake.hang_gather = k + 1;
        CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
        end();
        CHECK(called(ends[k]));
        begin();
        fake.hang_copy = 2 * k + 1; /* one copy before each exchange, one after it */
        CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
        end();
        CHECK(called(k == 0 ? "CommInitRank CommAbort" : ends[k - 1]));
        begin();
    }
    free(comm);
}

/* destroy while a watchdog is inside abort, and two aborts at once. */
static void test_aborts(void)
{
    const int32_t now = 1;
    for (int k = 0; k < 40; k++) {
        kvprim_comm *const comm = open_world(1);
        watchdog w, v;
        fake.abort_ms = k == 0 ? 300 : k % 4;
        start(&w, abort_when, comm, &now);
        if (k % 2) {
            start(&v, abort_when, comm, &now);
            (void)result_of(&w), (void)result_of(&v);
            CHECK((w.status == KVPRIM_OK && v.status == KVPRIM_ERROR_ARGUMENT) ||
                  (v.status == KVPRIM_OK && w.status == KVPRIM_ERROR_ARGUMENT));
        }
        CHECK(kvpn_wait_until(&comm->state, kvpn_aborted, test_timeout_ms));
        OK(kvprim_comm_destroy(comm));
        free(comm);
        CHECK(k % 2 || result_of(&w) == KVPRIM_OK);
        CHECK(called("CommAbort"));
    }
}

/* What a child of fork() makes of its parent's communicator: 0: it is told whose it is, and calls nothing. */
static int use_in_child(kvprim_comm *comm)
{
    CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_ARGUMENT, "comm belongs to process");
    CHECK_ERROR(kvprim_comm_abort(comm), KVPRIM_ERROR_ARGUMENT, "comm belongs to process");
    CHECK_ERROR(kvprim_comm_destroy(comm), KVPRIM_ERROR_ARGUMENT, "which called init");
    CHECK(called("") && load(&comm->state) == kvpn_alive);
    (void)fflush(stdout);
    return counts->faults;
}

/* A forked child shares the stop word, as it shares memory that CUDA pinned. */
static void test_fork(void)
{
    kvprim_comm *const comm = open_world(1);
    int code = -1;
    comm->stop = (uint32_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms) && comm->stop != MAP_FAILED);
    const pid_t child = fork();
    if (child == 0)
        _exit(use_in_child(comm));
    CHECK(waitpid(child, &code, 0) == child && code == 0);
    CHECK(*comm->stop == 0 && kvprim_comm_check(comm) == KVPRIM_OK);
    (void)munmap(comm->stop, 4096);
    comm->stop = NULL;
    close_comm(comm, "CommDestroy");
}

/* NCCL does not end, neither after destroy nor after abort. */
static void test_no_end(void)
{
    for (int aborts = 0; aborts < 2; aborts++) {
        const kvprim_comm_desc d = {.world = 1, .timeout_ms = short_timeout_ms};
        char x = 0;
        fake.late_end = 1;
        kvprim_comm *const comm = open_comm(&d, OPENED);
        const int64_t before = kvpn_now_us();
        CHECK(!aborts || kvprim_comm_abort(comm) == KVPRIM_OK);
        CHECK(kvpn_now_us() - before < test_timeout_ms * 500);
        CHECK_ERROR(kvprim_comm_destroy(comm), KVPRIM_ERROR_TIMEOUT, "NCCL has not ended");
        CHECK_ERROR(kvprim_comm_destroy(comm), KVPRIM_ERROR_TIMEOUT, "NCCL has not ended");
        CHECK_ERROR(kvprim_comm_abort(comm), KVPRIM_ERROR_ARGUMENT, "was aborted");
        CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_ARGUMENT, "was aborted");
        CHECK_ERROR(kvprim_broadcast(comm, &x, 1, KVPRIM_F32, 0, NULL), KVPRIM_ERROR_ARGUMENT, "was aborted");
        store(&fake.gate, 1);
        close_comm(comm, aborts ? "CommAbort" : "CommDestroy");
        end(), begin();
    }
}

/* Calls every collective. If the communicator does not block and a call was not waited for, the next one fails. */
static void call_all(kvprim_comm *comm, char *to, const char *from)
{
    for (int k = 0; k < 2; k++) {
        OK(kvprim_all_reduce(comm, to, from, 16, KVPRIM_INT8, KVPRIM_MAX, NULL));
        OK(kvprim_reduce_scatter(comm, to, from, 16, KVPRIM_INT8, KVPRIM_AVG, NULL));
        OK(kvprim_all_gather(comm, to, from, 16, KVPRIM_INT8, NULL));
        OK(kvprim_broadcast(comm, to, 16, KVPRIM_INT8, 0, NULL));
        OK(kvprim_send(comm, from, 16, KVPRIM_INT8, 0, NULL));
        OK(kvprim_recv(comm, to, 16, KVPRIM_INT8, 0, NULL));
    }
}

static void test_collectives(void)
{
    static char outside[64];
    for (fake.no_blocking = 0; fake.no_blocking < 2; fake.no_blocking++) {
        kvprim_comm *const comm = open_world(1);
        call_all(comm, outside, outside + 32);
#define EACH "AllReduce ReduceScatter AllGather Broadcast Send Recv"
        CHECK(called(EACH " " EACH));
        close_comm(comm, "CommDestroy");
        current_device = home;
    }
}

#ifdef KVPRIM_NCCL_WINDOWS
#define IN_WINDOW "CommInitRank AllGather MemAlloc AllGather AllGather CommWindowRegister AllGather"

/* The memset precedes only what NCCL may serve with its symmetric kernels. What these sum wrongly goes through other
   calls. */
static void call_inside(kvprim_comm *comm, bool memset_first)
{
    static char outside[64];
    char *const m = (char *)kvprim_comm_buffer(comm, NULL);
    OK(kvprim_all_reduce(comm, m + 17, m + 1, 8, KVPRIM_INT8, KVPRIM_MAX, NULL));
    CHECK(called(memset_first ? "MemsetAsync GroupStart Reduce GroupEnd Broadcast"
                              : "GroupStart Reduce GroupEnd Broadcast"));
    OK_CALLING(kvprim_reduce_scatter(comm, m, m, 8, KVPRIM_INT8, KVPRIM_MAX, NULL),
               memset_first ? "MemsetAsync GroupStart Reduce GroupEnd" : "GroupStart Reduce GroupEnd");
    call_all(comm, m, m + 32);
#define EACH_INSIDE "MemsetAsync AllReduce MemsetAsync ReduceScatter MemsetAsync AllGather Broadcast Send Recv"
    CHECK(called(memset_first ? EACH_INSIDE " " EACH_INSIDE : EACH " " EACH));
    call_all(comm, outside + 1, outside + 33);
    CHECK(called(EACH " " EACH));
}

static void test_window(void)
{
    for (int k = 0; k < 4; k++) {
        const kvprim_comm_desc d = {.world = 1, .buffer_bytes = 64, .nccl_window = 1};
        fake.version = k < 2 ? 22809 : 22706, fake.no_blocking = k % 2;
        kvprim_comm *const comm = open_comm(&d, IN_WINDOW);
        CHECK(comm->in_windows && comm->window);
        call_inside(comm, k < 2);
        close_comm(comm, "CommWindowDeregister CommDestroy MemFree");
    }
}

/* A call that waits for the device's work must not precede the abort that ends that work. */
static void test_aborts_with_window(void)
{
    kvprim_comm_desc d = {.world = 1, .buffer_bytes = 64, .nccl_window = 1};
    for (int k = 0; k < 3; k++) { /* work that has ended, that hangs, that hangs in a graph's replay */
        kvprim_comm *const comm = open_comm(&d, IN_WINDOW);
        fake.captures = k == 2;
        store(&fake.work_hangs, k > 0);
        OK_CALLING(kvprim_broadcast(comm, comm->buffer, 1, KVPRIM_INT8, 0, NULL), "Broadcast");
        OK(kvprim_comm_abort(comm));
        CHECK(load(&fake.work_hangs) == 0);
        store(&fake.work_hangs, 0);
        close_comm(comm, k > 0 ? "CommAbort MemFree" : "CommWindowDeregister CommAbort MemFree");
        end(), begin();
    }
    kvprim_comm *const comm = new_comm();
    d.init_timeout_ms = short_timeout_ms;
    fake.hang_gather = 4; /* after the window was made */
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms));
    CHECK(called(IN_WINDOW " CommAbort MemFree"));
    free(comm);
}
#else
static void test_window(void)
{
    skip("compiled with NCCL before 2.27");
}

static void test_aborts_with_window(void)
{
    test_window();
}
#endif

static void test_foreign(void)
{
    kvprim_comm *const comm = new_comm();
    kvprim_comm_desc d = {.world = 1};
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    CHECK(ncclCommInitRank(&d.nccl, 1, id, 0) == ncclSuccess && called("CommInitRank"));
    d.world = 2;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_ARGUMENT,
                "desc->nccl is rank 0 of 1 on device 2, but desc says rank 0 of 2");
    CHECK(called(""));
    d.world = 1, d.buffer_bytes = 64, d.nccl_window = 1;
    for (int aborts = 0; aborts < 2; aborts++) {
        OK(kvprim_comm_init(comm, &d));
        CHECK(!aborts || kvprim_comm_abort(comm) == KVPRIM_OK);
        OK_CALLING(kvprim_comm_destroy(comm), "AllGather MemAlloc AllGather AllGather AllGather MemFree");
    }
    d.init_timeout_ms = short_timeout_ms, fake.hang_gather = fake.gathers + 2, d.nccl_window = 0;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_TIMEOUT, "waited 250 ms");
    CHECK(ncclCommAbort(d.nccl) == ncclSuccess); /* which is the caller's task */
    CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms) && called("AllGather AllGather CommAbort"));
    current_device = home;
    free(comm);
}

/* An exchange of one rank, and how the library called it. */
typedef struct exchanges {
    int made, fails_at;
    bool elsewhere;
    pthread_t thread;
} exchanges;

static int exchange(void *context, const void *mine, void *all, size_t bytes)
{
    exchanges *const e = (exchanges *)context;
    e->elsewhere = e->elsewhere || !pthread_equal(pthread_self(), e->thread);
    memcpy(all, mine, bytes);
    current_device = elsewhere;
    return ++e->made == e->fails_at ? 5 : 0;
}

static void test_exchange(void)
{
    kvprim_comm *const comm = new_comm();
    for (int fails_at = 0; fails_at <= 4; fails_at++) {
        kvprim_comm_desc d = {.world = 1};
        exchanges e = {0, fails_at, false, pthread_self()};
        d.exchange = exchange, d.exchange_context = &e;
        if (fails_at)
            CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->exchange returned 5");
        else
            CHECK(kvprim_comm_init(comm, &d) == KVPRIM_OK && kvprim_comm_destroy(comm) == KVPRIM_OK);
        CHECK(e.made == (fails_at ? fails_at : 4) && !e.elsewhere);
        CHECK(called(fails_at ? "CommInitRank CommAbort" : "CommInitRank CommDestroy"));
        end(), begin();
    }
    free(comm);
}

/* init needs a thread. abort and destroy use the caller's if there is no other. */
static void test_no_threads(void)
{
    kvprim_comm *const comm = new_comm();
    const kvprim_comm_desc d = {.world = 1, .timeout_ms = test_timeout_ms};
    fake.no_threads = 1;
    CHECK_ERROR(kvprim_comm_init(comm, &d), KVPRIM_ERROR_CUDA, "no thread");
    CHECK(called(""));
    for (int aborts = 0; aborts < 2; aborts++) {
        fake.no_threads = 0;
        OK_CALLING(kvprim_comm_init(comm, &d), OPENED);
        CHECK(kvpn_wait_until(&threads, 0, test_timeout_ms));
        fake.no_threads = 1;
        if (aborts)
            CHECK(kvprim_comm_abort(comm) == KVPRIM_OK && current_device == home);
        CHECK(current_mode == cudaStreamCaptureModeThreadLocal);
        OK_CALLING(kvprim_comm_destroy(comm), aborts ? "CommAbort" : "CommDestroy");
        CHECK(fake.mode_at_end == cudaStreamCaptureModeRelaxed);
        CHECK(current_device == home && current_mode == cudaStreamCaptureModeThreadLocal);
    }
    free(comm);
}

/* The last one to release another rank's slots does not wait until they are freed, unless no thread can be made. */
static void test_slots_of_others(void)
{
    for (fake.no_threads = 0; fake.no_threads < 2; fake.no_threads++) {
        kvpn_slots *const slots = (kvpn_slots *)calloc(1, sizeof *slots);
        slots->refs = 2, slots->device = elsewhere, slots->nonce = 5;
        CHECK(cudaMalloc(&slots->memory, 1) == cudaSuccess);
        kvpn_publish_slots(slots);
        fake.slots = slots->memory, fake.gate = fake.no_threads;
        kvpn_release_slots(slots, true); /* their own rank is early */
        CHECK(load(&live_allocations) == 1 && kvpn_retain_slots(5) == slots);
        kvpn_release_slots(slots, false);
        kvpn_release_slots(slots, false);
        CHECK(load(&live_allocations) == !fake.no_threads && load(&threads) == !fake.no_threads);
        CHECK(kvpn_retain_slots(5) == NULL);
        store(&fake.gate, 1);
        end();
        CHECK(fake.device_at_free == elsewhere && fake.mode_at_free == cudaStreamCaptureModeRelaxed);
    }
}

static char grouped_bytes[64];

/* Sends and receives 8 bytes on a stream. */
static kvprim_status exchange_on(kvprim_comm *comm, cudaStream_t stream)
{
    const kvprim_status s = kvprim_send(comm, grouped_bytes, 8, KVPRIM_INT8, 0, stream);
    return s == KVPRIM_OK ? kvprim_recv(comm, grouped_bytes + 8, 8, KVPRIM_INT8, 0, stream) : s;
}

#define GROUPED "GroupStart Send Recv GroupEnd"

/* Nothing is enqueued before the end. A communicator that does not block is waited for. */
static void test_groups(void)
{
    for (fake.no_blocking = 0; fake.no_blocking < 2; fake.no_blocking++) {
        kvprim_comm *const comm = open_world(1);
        for (int k = 0; k < 2; k++) {
            OK(kvprim_group_start(comm));
            CHECK(exchange_on(comm, NULL) == KVPRIM_OK && called("") && in_group == 0);
            OK(kvprim_send(comm, NULL, 0, KVPRIM_INT8, 0, NULL));
            CHECK(kvprim_group_end(comm) == KVPRIM_OK && called(GROUPED) && in_group == 0);
            CHECK(comm->after_nccl == 1);
            OK_CALLING(kvprim_broadcast(comm, grouped_bytes, 1, KVPRIM_INT8, 0, NULL), "Broadcast");
        }
        CHECK(kvprim_group_start(comm) == KVPRIM_OK && kvprim_group_end(comm) == KVPRIM_OK && called(""));
        close_comm(comm, "CommDestroy");
        current_device = home;
    }
}

/* A call that fails spoils its group, of which nothing is enqueued, and no other group. */
static void test_groups_that_fail(void)
{
    struct CUstream_st other = {0};
    const kvprim_comm_desc d = {.world = 1};
    const kvprim_status argument = KVPRIM_ERROR_ARGUMENT;
    char *const m = grouped_bytes;
    kvprim_comm *const comm = open_comm(&d, OPENED);
    CHECK_ERROR(kvprim_group_start(NULL), KVPRIM_ERROR_NULL, "comm is NULL");
    CHECK_ERROR(kvprim_group_end(NULL), KVPRIM_ERROR_NULL, "comm is NULL");
    CHECK_ERROR(kvprim_group_end(comm), argument, "no group is open");
    for (int k = 0; k < 6; k++) {
        const kvprim_status wanted = k == 3 ? KVPRIM_ERROR_NULL : k == 5 ? KVPRIM_ERROR_SIZE : argument;
        CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, NULL) == KVPRIM_OK);
        if (k == 0)
            CHECK_ERROR(kvprim_all_gather(comm, m, m, 1, KVPRIM_INT8, NULL), argument, "a group is open, which takes");
        else if (k == 1)
            CHECK_ERROR(kvprim_broadcast(comm, m, 0, KVPRIM_INT8, 0, NULL), argument, "a group is open, which takes");
        else if (k == 2)
            CHECK_ERROR(kvprim_send(comm, m, 1, KVPRIM_INT8, 1, NULL), argument, "peer is 1, must be 0 to 0");
        else if (k == 3)
            CHECK_ERROR(kvprim_recv(comm, NULL, 1, KVPRIM_INT8, 0, NULL), wanted, "buf is NULL");
        else if (k == 4)
            CHECK_ERROR(kvprim_send(comm, m, 1, KVPRIM_INT8, 0, &other), argument, "the group's earlier calls are on");
        else
            CHECK_ERROR(kvprim_send(comm, m, SIZE_MAX, KVPRIM_F32, 0, NULL), wanted, "too many bytes");
        OK(exchange_on(comm, NULL));
        CHECK_ERROR(kvprim_group_end(comm), wanted, "a call of the group failed, so nothing of it was enqueued");
        CHECK_ERROR(kvprim_group_end(comm), argument, "no group is open");
        CHECK(called(""));
        CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, &other) == KVPRIM_OK);
        CHECK_ERROR(kvprim_group_start(comm), argument, "groups do not nest");
        OK_CALLING(kvprim_group_end(comm), GROUPED);
    }
    fake.refuses = 2; /* then NCCL's own group is closed nevertheless */
    CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, NULL) == KVPRIM_OK);
    CHECK_ERROR(kvprim_group_end(comm), KVPRIM_ERROR_NCCL, "ncclSend and ncclRecv in a group");
    CHECK(called(GROUPED) && in_group == 0);
    CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, NULL) == KVPRIM_OK);
    current_device = elsewhere;
    CHECK_ERROR(kvprim_group_end(comm), argument, "the current device is 7");
    current_device = home;
    CHECK(called(""));
    close_comm(comm, "CommDestroy");
}

/* The capture mode is as before, also after a call that NCCL refuses. */
static void test_calls_in_captures(void)
{
    kvprim_comm *const comm = open_world(1);
    char m[8] = {0};
    fake.captures = 1;
    for (int refuses = 0; refuses < 2; refuses++) {
        const kvprim_status wanted = refuses ? KVPRIM_ERROR_NCCL : KVPRIM_OK;
        fake.refuses = refuses;
        CHECK(kvprim_send(comm, m, 1, KVPRIM_INT8, 0, NULL) == wanted);
        CHECK(current_mode == cudaStreamCaptureModeThreadLocal);
        fake.refuses = refuses;
        CHECK(kvprim_all_reduce(comm, m, m, 1, KVPRIM_INT8, KVPRIM_SUM, NULL) == wanted);
        CHECK(current_mode == cudaStreamCaptureModeThreadLocal);
        fake.refuses = refuses;
        CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, NULL) == KVPRIM_OK);
        CHECK(kvprim_group_end(comm) == wanted && current_mode == cudaStreamCaptureModeThreadLocal && in_group == 0);
    }
    CHECK(called("Send AllReduce " GROUPED " Send AllReduce GroupStart Send GroupEnd"));
    fake.captures = 0, fake.captures_elsewhere = 1;
    OK_CALLING(kvprim_send(comm, m, 1, KVPRIM_INT8, 0, NULL), "Send");
    OK_CALLING(kvprim_all_to_all(comm, m + 1, m, 1, KVPRIM_INT8, NULL), GROUPED);
    close_comm(comm, "CommDestroy");
}

/* It takes 1,024 calls, and two for each of many ranks. */
static void test_group_sizes(void)
{
    for (int world = 1; world <= 600; world += 599) {
        kvprim_comm *const comm = open_world(world);
        const int most = world == 1 ? 1024 : 1200;
        OK(kvprim_group_start(comm));
        for (int k = 0; k < most; k++)
            OK(kvprim_send(comm, grouped_bytes, 1, KVPRIM_INT8, 0, NULL));
        CHECK(kvprim_group_end(comm) == KVPRIM_OK && load(&call_count) == most + 2);
        OK(kvprim_group_start(comm));
        for (int k = 0; k < most; k++)
            OK(kvprim_send(comm, grouped_bytes, 1, KVPRIM_INT8, 0, NULL));
        CHECK_ERROR(kvprim_send(comm, grouped_bytes, 1, KVPRIM_INT8, 0, NULL), KVPRIM_ERROR_SIZE, "takes no more");
        CHECK_ERROR(kvprim_group_end(comm), KVPRIM_ERROR_SIZE, "nothing of it was enqueued");
        CHECK(load(&call_count) == most + 2);
        store(&call_count, 0);
        close_comm(comm, "CommDestroy");
        end(), begin();
    }
}

/* An abort, or destroy, between start and end; and the deadline, which begins at the end. */
static void test_life_of_groups(void)
{
    for (int k = 0; k < 3; k++) {
        const kvprim_comm_desc d = {.world = 1, .timeout_ms = short_timeout_ms};
        kvprim_comm *const comm = open_comm(&d, OPENED);
        CHECK(kvprim_group_start(comm) == KVPRIM_OK && exchange_on(comm, NULL) == KVPRIM_OK);
        if (k == 1) {
            OK_CALLING(kvprim_comm_abort(comm), "CommAbort");
            CHECK_ERROR(kvprim_send(comm, grouped_bytes, 1, KVPRIM_INT8, 0, NULL), KVPRIM_ERROR_ARGUMENT, "aborted");
            CHECK_ERROR(kvprim_group_end(comm), KVPRIM_ERROR_ARGUMENT, "was aborted: destroy it");
        } else if (k == 2) {
            store(&fake.work_hangs, 1);
            wait_ms(2 * short_timeout_ms);
            OK(kvprim_comm_check(comm));
            CHECK(kvprim_group_end(comm) == KVPRIM_OK && kvprim_comm_check(comm) == KVPRIM_OK && called(GROUPED));
            wait_ms(2 * short_timeout_ms);
            CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_TIMEOUT, "a collective of NCCL's was not done");
            store(&fake.work_hangs, 0);
            fake.captures = 1; /* a graph's work is not watched */
            CHECK(kvprim_comm_check(comm) == KVPRIM_OK && kvprim_group_start(comm) == KVPRIM_OK);
            store(&fake.work_hangs, 1);
            CHECK(exchange_on(comm, NULL) == KVPRIM_OK && kvprim_group_end(comm) == KVPRIM_OK && called(GROUPED));
            wait_ms(2 * short_timeout_ms);
            CHECK(kvprim_comm_check(comm) == KVPRIM_OK && comm->teardown->in_graphs == 1);
            store(&fake.work_hangs, 0);
        }
        close_comm(comm, k == 1 ? "" : "CommDestroy");
        end(), begin();
    }
}

enum { ring_slots = 3, slot_bytes = 40 };
static char ring_memory[ring_slots * slot_bytes];
static struct CUstream_st ring_stream, work_stream;

static kvprim_ring ring;

static kvprim_ring_desc ring_desc_of(kvprim_comm *comm)
{
    kvprim_ring_desc d;
    memset(&d, 0, sizeof d);
    d.comm = comm, d.peer = 1, d.slots = ring_slots, d.memory = ring_memory, d.slot_bytes = slot_bytes;
    d.stream = &ring_stream;
    return d;
}

static void open_ring(kvprim_comm *comm)
{
    const kvprim_ring_desc r = ring_desc_of(comm);
    memset(&ring, 0, sizeof ring);
    OK(kvprim_ring_init(&ring, &r));
}

/* The event was recorded on one stream, and then another waited for it. */
static bool orders(const struct CUevent_st *event, const struct CUstream_st *before, const struct CUstream_st *after)
{
    return event->recorded_on == before && event->waited_by == after && event->waited_at > event->recorded_at;
}

/* A sender has as many slots at once as it has credits. Each is sent after it was filled, and filled after it was
   sent. */
static void test_ring_sender(void)
{
    kvprim_comm *const comm = open_world(2);
    void *slot;
    int32_t n = 0;
    open_ring(comm);
    CHECK_ERROR(kvprim_ring_send(&ring, 1, &work_stream), KVPRIM_ERROR_ARGUMENT, "no slot is claimed");
    for (int chunk = 0; chunk < 7; chunk++) {
        const int k = chunk % ring_slots;
        CHECK(kvprim_ring_claim(&ring, &work_stream, &slot) == KVPRIM_OK && slot == ring_memory + k * slot_bytes);
        CHECK(ring.finished[k]->waited_by == &work_stream);
        CHECK(chunk < ring_slots || orders(ring.finished[k], &ring_stream, &work_stream));
        CHECK(called("") && kvprim_ring_send(&ring, slot_bytes, &work_stream) == KVPRIM_OK && called("Send"));
        CHECK(orders(ring.filled[k], &work_stream, &ring_stream));
        CHECK(ring.finished[k]->recorded_on == &ring_stream);
        CHECK(ring.finished[k]->recorded_at > ring.filled[k]->waited_at);
        if (chunk < ring_slots - 1)
            continue;
        CHECK(kvprim_ring_claim(&ring, &work_stream, &slot) == KVPRIM_OK && slot == NULL);
        CHECK(kvprim_ring_credit(&ring, 0) == KVPRIM_OK && kvprim_ring_credit(&ring, 1) == KVPRIM_OK);
    }
    CHECK_ERROR(kvprim_ring_credit(&ring, 3), KVPRIM_ERROR_SIZE, "n is 3, but 2 slots lack");
    CHECK_ERROR(kvprim_ring_credit(&ring, -1), KVPRIM_ERROR_SIZE, "n is -1");
    OK(kvprim_ring_credit(&ring, 2));
    for (int k = 0; k < ring_slots; k++) /* several at once, sent later */
        CHECK(kvprim_ring_claim(&ring, &work_stream, &slot) == KVPRIM_OK && slot);
    CHECK(kvprim_ring_claim(&ring, &work_stream, &slot) == KVPRIM_OK && !slot);
    CHECK_ERROR(kvprim_ring_credit(&ring, 1), KVPRIM_ERROR_SIZE, "0 slots lack");
    fake.refuses = 1;
    CHECK_ERROR(kvprim_ring_send(&ring, 1, &work_stream), KVPRIM_ERROR_NCCL, "ncclSend");
    for (int k = 0; k < ring_slots; k++)
        OK(kvprim_ring_send(&ring, 1, &work_stream));
    CHECK_ERROR(kvprim_ring_send(&ring, 1, &work_stream), KVPRIM_ERROR_ARGUMENT, "no slot is claimed");
    CHECK_ERROR(kvprim_ring_take(&ring, &n), KVPRIM_ERROR_ARGUMENT, "this ring only sends");
    CHECK_ERROR(kvprim_ring_recv(&ring, 1, NULL, &slot), KVPRIM_ERROR_ARGUMENT, "this ring only sends");
    OK_CALLING(kvprim_ring_destroy(&ring), "Send Send Send Send");
    close_comm(comm, "CommDestroy");
}

/* A chunk of several slots goes in one call, both ways, up to the last slot in memory. */
static void test_ring_of_wide_chunks(void)
{
    kvprim_comm *const comm = open_world(2);
    const size_t two = slot_bytes + 1;
    void *slot;
    int32_t n = 0;
    open_ring(comm);
    OK(kvprim_ring_claim(&ring, &work_stream, &slot));
    CHECK_ERROR(kvprim_ring_send(&ring, two, &work_stream), KVPRIM_ERROR_ARGUMENT, "no slot is claimed for all of 41");
    OK(kvprim_ring_claim(&ring, &work_stream, &slot));
    OK_CALLING(kvprim_ring_send(&ring, two, &work_stream), "Send");
    CHECK(orders(ring.filled[0], &work_stream, &ring_stream) && !ring.filled[1]->recorded_on);
    CHECK(ring.finished[0]->recorded_on == &ring_stream && ring.finished[1]->recorded_on == &ring_stream);
    OK(kvprim_ring_credit(&ring, 2));
    for (int k = 0; k < ring_slots; k++)
        OK(kvprim_ring_claim(&ring, &work_stream, &slot));
    CHECK_ERROR(kvprim_ring_send(&ring, two, &work_stream), KVPRIM_ERROR_SIZE, "bytes is 41, must be 1 to 40");
    OK_CALLING(kvprim_ring_send(&ring, slot_bytes, &work_stream), "Send");
    OK_CALLING(kvprim_ring_send(&ring, 2 * slot_bytes, &work_stream), "Send");
    CHECK_ERROR(kvprim_ring_credit(&ring, 4), KVPRIM_ERROR_SIZE, "3 slots lack");
    OK(kvprim_ring_destroy(&ring));
    open_ring(comm);
    OK_CALLING(kvprim_ring_recv(&ring, 2 * slot_bytes, &work_stream, &slot), "Recv");
    CHECK(slot == ring_memory && orders(ring.filled[0], &ring_stream, &work_stream));
    CHECK_ERROR(kvprim_ring_recv(&ring, two, &work_stream, &slot), KVPRIM_ERROR_SIZE, "must be 1 to 40");
    OK_CALLING(kvprim_ring_recv(&ring, 1, &work_stream, &slot), "Recv");
    CHECK_ERROR(kvprim_ring_recv(&ring, two, &work_stream, &slot), KVPRIM_ERROR_ARGUMENT, "the sender had no credit");
    for (int k = 0; k < ring_slots; k++)
        CHECK(kvprim_ring_release(&ring, &work_stream) == KVPRIM_OK && ring.finished[k]->recorded_on == &work_stream);
    CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == ring_slots);
    OK_CALLING(kvprim_ring_recv(&ring, 3 * slot_bytes, &work_stream, &slot), "Recv");
    OK(kvprim_ring_destroy(&ring));
    close_comm(comm, "CommDestroy");
}

/* A receiver's slot is free, once, when the work that reads it has ended, and not before. */
static void test_ring_receiver(void)
{
    kvprim_comm *const comm = open_world(2);
    void *slot;
    int32_t n = -1;
    open_ring(comm);
    CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 0);
    CHECK_ERROR(kvprim_ring_release(&ring, &work_stream), KVPRIM_ERROR_ARGUMENT, "no slot is received");
    for (int chunk = 0; chunk < 7; chunk++) {
        const int k = chunk % ring_slots;
        OK_CALLING(kvprim_ring_recv(&ring, 1, &work_stream, &slot), "Recv");
        CHECK(slot == ring_memory + k * slot_bytes && orders(ring.filled[k], &ring_stream, &work_stream));
        CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 0);
        store(&fake.work_hangs, 1);
        CHECK(kvprim_ring_release(&ring, &work_stream) == KVPRIM_OK && ring.finished[k]->recorded_on == &work_stream);
        fake.captures = chunk % 2; /* a stream of another thread's */
        CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 0);
        store(&fake.work_hangs, 0);
        CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 1);
        CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 0);
        CHECK(current_mode == cudaStreamCaptureModeThreadLocal);
        fake.captures = 0;
    }
    for (int k = 0; k < ring_slots; k++)
        OK(kvprim_ring_recv(&ring, slot_bytes, &work_stream, &slot));
    CHECK_ERROR(kvprim_ring_recv(&ring, 1, &work_stream, &slot), KVPRIM_ERROR_ARGUMENT, "the sender had no credit");
    CHECK(kvprim_ring_release(&ring, &work_stream) == KVPRIM_OK &&
          kvprim_ring_release(&ring, &work_stream) == KVPRIM_OK);
    CHECK_ERROR(kvprim_ring_recv(&ring, 1, &work_stream, &slot), KVPRIM_ERROR_ARGUMENT, "the sender had no credit");
    CHECK(kvprim_ring_take(&ring, &n) == KVPRIM_OK && n == 2);
    OK_CALLING(kvprim_ring_recv(&ring, 1, &work_stream, &slot), "Recv Recv Recv Recv");
    CHECK_ERROR(kvprim_ring_claim(&ring, NULL, &slot), KVPRIM_ERROR_ARGUMENT, "this ring only receives");
    CHECK_ERROR(kvprim_ring_credit(&ring, 0), KVPRIM_ERROR_ARGUMENT, "this ring only receives");
    OK(kvprim_ring_release(&ring, &work_stream));
    fake.dead = 1;
    CHECK_ERROR(kvprim_ring_take(&ring, &n), KVPRIM_ERROR_CUDA, "cudaErrorIllegalAddress");
    OK(kvprim_ring_destroy(&ring));
    close_comm(comm, "CommDestroy");
}

static void test_ring_arguments(void)
{
    kvprim_comm *const comm = open_world(2);
    const kvprim_ring_desc good = ring_desc_of(comm);
    kvprim_ring_desc r = good;
    kvprim_ring moved;
    void *slot = NULL;
    int32_t n = 0;
    memset(&ring, 0, sizeof ring);
    CHECK_ERROR(kvprim_ring_init(NULL, &good), KVPRIM_ERROR_NULL, "ring, desc");
    CHECK_ERROR(kvprim_ring_init(&ring, NULL), KVPRIM_ERROR_NULL, "ring, desc");
    r.memory = NULL;
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_NULL, "desc->memory");
    r = good, r.stream = NULL;
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_NULL, "desc->stream");
    r = good, r.comm = NULL;
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_NULL, "comm is NULL");
    for (r = good, r.peer = -1; r.peer < 3; r.peer += r.peer == 0 ? 2 : 1) /* 1 is right */
        CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_ARGUMENT, "must be another rank");
    r = good, r.reserved = 5;
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_ARGUMENT, "desc->reserved is 5");
    for (int k = 0; k < 4; k++) {
        r = good, r.slots = k == 0 ? 0 : k == 1 ? KVPRIM_MAX_RING_SLOTS + 1 : ring_slots;
        r.slot_bytes = k == 2 ? 0 : k == 3 ? SIZE_MAX / 8 : slot_bytes;
        CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_SIZE, "desc->slots is");
    }
    for (int which = 1; which <= 2 * ring_slots; which++) {
        const int32_t before = load(&live_allocations);
        fake.no_event = which;
        CHECK_ERROR(kvprim_ring_init(&ring, &good), KVPRIM_ERROR_CUDA, "cudaEventCreateWithFlags");
        CHECK(load(&live_allocations) == before && fake.no_event == 0);
    }
    CHECK_ERROR(kvprim_ring_claim(&ring, NULL, &slot), KVPRIM_ERROR_ARGUMENT, "ring was not initialised");
    CHECK_ERROR(kvprim_ring_destroy(&ring), KVPRIM_ERROR_ARGUMENT, "ring was not initialised");
    CHECK_ERROR(kvprim_ring_destroy(NULL), KVPRIM_ERROR_NULL, "ring is NULL");
    current_device = elsewhere;
    CHECK_ERROR(kvprim_ring_init(&ring, &good), KVPRIM_ERROR_ARGUMENT, "the current device is 7");
    current_device = home;
    OK(kvprim_ring_init(&ring, &good));
    CHECK_ERROR(kvprim_ring_claim(&ring, NULL, NULL), KVPRIM_ERROR_NULL, "the place for the result is NULL");
    CHECK_ERROR(kvprim_ring_take(&ring, NULL), KVPRIM_ERROR_NULL, "the place for the result is NULL");
    CHECK_ERROR(kvprim_ring_recv(&ring, 3 * slot_bytes + 1, NULL, &slot), KVPRIM_ERROR_SIZE,
                "bytes is 121, must be 1 to 120");
    CHECK_ERROR(kvprim_ring_recv(&ring, 0, NULL, &slot), KVPRIM_ERROR_SIZE, "bytes is 0");
    CHECK_ERROR(kvprim_ring_take(NULL, &n), KVPRIM_ERROR_NULL, "ring is NULL");
    moved = ring;
    CHECK_ERROR(kvprim_ring_take(&moved, &n), KVPRIM_ERROR_ARGUMENT, "was moved");
    OK(kvprim_group_start(comm));
    CHECK_ERROR(kvprim_ring_claim(&ring, NULL, &slot), KVPRIM_ERROR_ARGUMENT, "a group is open");
    CHECK(kvprim_group_end(comm) == KVPRIM_OK && kvprim_ring_claim(&ring, NULL, &slot) == KVPRIM_OK);
    CHECK(ring.finished[0]->waited_by == cudaStreamLegacy && called(""));
    OK(kvprim_ring_destroy(&ring));
    close_comm(comm, "CommDestroy");
}

/* The peer died: the ring goes on with a new communicator, its own memory and its own events. */
static void test_ring_again(void)
{
    kvprim_comm *const comm = open_world(2), *const next = open_world(2);
    kvprim_ring_desc r = ring_desc_of(comm);
    void *slot = NULL;
    int32_t n = 0;
    open_ring(comm);
    for (int k = 0; k < ring_slots; k++)
        CHECK(kvprim_ring_recv(&ring, 1, &work_stream, &slot) == KVPRIM_OK && slot);
    OK(kvprim_comm_abort(comm));
    CHECK_ERROR(kvprim_ring_take(&ring, &n), KVPRIM_ERROR_ARGUMENT, "comm was aborted");
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_ARGUMENT, "comm was aborted");
    CHECK(called("Recv Recv Recv CommAbort"));
    close_comm(comm, "");
    r.comm = next, r.slots = ring_slots - 1;
    CHECK_ERROR(kvprim_ring_init(&ring, &r), KVPRIM_ERROR_SIZE, "desc->slots is 2");
    const int32_t before = load(&live_allocations);
    r.slots = ring_slots;
    CHECK(kvprim_ring_init(&ring, &r) == KVPRIM_OK && load(&live_allocations) == before);
    for (int k = 0; k < ring_slots; k++)
        CHECK(kvprim_ring_recv(&ring, 1, &work_stream, &slot) == KVPRIM_OK && slot == ring_memory + k * slot_bytes);
    OK_CALLING(kvprim_ring_destroy(&ring), "Recv Recv Recv");
    close_comm(next, "CommDestroy");
}

static kvprim_status call_and_check(kvprim_comm *comm)
{
    char x = 0;
    OK(kvprim_all_gather(comm, &x, &x, 1, KVPRIM_INT8, NULL));
    return kvprim_comm_check(comm);
}

static void test_checks(void)
{
    kvprim_comm *const comm = new_comm();
    const kvprim_comm_desc d = {.world = 1, .timeout_ms = short_timeout_ms};
    OK(kvprim_comm_init(comm, &d));
    OK(call_and_check(comm));
    char x = 0;
    OK(kvprim_all_gather(comm, &x, &x, 1, KVPRIM_INT8, NULL)); /* it is done, but not checked */
    wait_ms(2 * short_timeout_ms);
    fake.checked = comm, fake.check = KVPRIM_ERROR_NCCL;
    CHECK(call_and_check(comm) == KVPRIM_OK && fake.check == KVPRIM_OK);
    fake.checked = NULL;
    wait_ms(2 * short_timeout_ms);
    OK(kvprim_comm_check(comm));
    store(&fake.work_hangs, 1); /* while further calls are made and checked */
    const int64_t before = kvpn_now_us();
    kvprim_status s;
    do
        s = call_and_check(comm), wait_ms(1);
    while (s == KVPRIM_OK && kvpn_now_us() - before < test_timeout_ms * 1000);
    CHECK(s == KVPRIM_ERROR_TIMEOUT && kvpn_now_us() - before > short_timeout_ms * 1000);
    CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_TIMEOUT, "a collective of NCCL's was not done");
    store(&fake.work_hangs, 0);
    OK(kvprim_comm_check(comm));
    fake.dead = 1;
    CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_CUDA, "cudaErrorIllegalAddress");
    CHECK(current_mode == cudaStreamCaptureModeThreadLocal);
    OK(kvprim_comm_destroy(comm));
    free(comm);
}

/* NCCL moves fp8 as bytes, in any version, but does not reduce it everywhere. */
static void test_fp8(void)
{
    char x[2] = {0, 0};
    for (int k = 0; k < 3; k++) { /* NCCL is too old; a GPU is too old; neither */
        const kvprim_comm_desc d = {.world = 2};
        fake.version = k == 0 ? 22304 : 22403;
        fake.other_says = k == 1 ? in_info : nowhere, fake.other_at = offsetof(kvpn_rank_info, reduces_f8);
        kvprim_comm *const comm = open_comm(&d, OPENED);
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            const kvprim_dtype dtype = e5m2 ? KVPRIM_F8E5M2 : KVPRIM_F8E4M3;
            const char *const refused = e5m2 ? "dtype is F8E5M2, which NCCL reduces" : "dtype is F8E4M3, which NCCL";
            OK_CALLING(kvprim_broadcast(comm, x, 1, dtype, 0, NULL), "Broadcast");
            CHECK(fake.type == ncclUint8);
            if (k == 2) {
                OK_CALLING(kvprim_all_reduce(comm, x, x, 1, dtype, KVPRIM_MAX, NULL), "AllReduce");
                CHECK((int)fake.type == kvpn_type_of(dtype).nccl);
                continue;
            }
            CHECK_ERROR(kvprim_all_reduce(comm, x, x, 1, dtype, KVPRIM_MAX, NULL), KVPRIM_ERROR_UNSUPPORTED, refused);
            CHECK_ERROR(kvprim_reduce_scatter(comm, x, x, 1, dtype, KVPRIM_SUM, NULL), KVPRIM_ERROR_UNSUPPORTED,
                        refused);
            CHECK(called(""));
        }
        close_comm(comm, "CommDestroy");
    }
}

/* Whether part k of those that NCCL was given is these bytes, for or from this rank. */
static bool given(int k, const void *memory, size_t bytes, int peer)
{
    return k < part_count && given_parts[k].memory == memory && given_parts[k].count == bytes &&
           given_parts[k].type == ncclUint8 && given_parts[k].peer == peer;
}

#define SEND_RECV "Send Recv"
#define IN_GROUP(calls) "GroupStart " calls " GroupEnd"

/* Parts go to NCCL as bytes, at their places, and only those that have any. fp8 needs no version of NCCL's. */
static void test_parts(void)
{
    static char send[64], recv[64];
    static const size_t uneven[] = {1, 3, 2, 0}, row[] = {3, 0}, none[] = {0, 0, 0, 0}, equal_row[] = {2, 2};
    for (fake.no_blocking = 0; fake.no_blocking < 2; fake.no_blocking++) {
        kvprim_comm_desc d = {.world = 2};
        d.rank = 1, fake.version = 22304;
        kvprim_comm *const comm = open_comm(&d, OPENED);
        part_count = 0;
        OK_CALLING(kvprim_all_to_all(comm, recv, send, 3, KVPRIM_F64, NULL), IN_GROUP(SEND_RECV " " SEND_RECV));
        CHECK(given(0, send, 24, 0) && given(1, recv, 24, 0) && given(2, send + 24, 24, 1) &&
              given(3, recv + 24, 24, 1));
        part_count = 0;
        OK_CALLING(kvprim_all_to_allv(comm, recv, send, uneven, KVPRIM_F8E4M3, NULL), IN_GROUP(SEND_RECV));
        CHECK(given(0, send, 2, 0) && given(1, recv, 3, 0) && part_count == 2);
        part_count = 0;
        OK_CALLING(kvprim_all_gatherv(comm, recv, NULL, row, KVPRIM_BF16, NULL), IN_GROUP("Recv"));
        CHECK(given(0, recv, 6, 0) && part_count == 1);
        OK_CALLING(kvprim_all_gatherv(comm, recv, recv + 2, equal_row, KVPRIM_F8E5M2, NULL), "AllGather");
        OK(kvprim_all_gatherv(comm, NULL, NULL, none, KVPRIM_F32, NULL));
        OK(kvprim_all_to_allv(comm, NULL, NULL, none, KVPRIM_F32, NULL));
        OK_CALLING(kvprim_all_to_all(comm, NULL, NULL, 0, KVPRIM_F32, NULL), "");
        fake.refuses = 2;
        CHECK_ERROR(kvprim_all_to_all(comm, recv, send, 1, KVPRIM_U8, NULL), KVPRIM_ERROR_NCCL,
                    "ncclSend and ncclRecv in a group");
        CHECK(called(IN_GROUP(SEND_RECV)) && in_group == 0);
        close_comm(comm, "CommDestroy");
        current_device = home;
    }
}

static void test_parts_arguments(void)
{
    static double m[8];
    static const size_t row[] = {1, 2}, many[] = {1, SIZE_MAX / 8}, two[] = {1, 1, 1, SIZE_MAX / 16 + 1};
    char *const bytes = (char *)m;
    kvprim_comm *const comm = open_world(2);
    CHECK_ERROR(kvprim_all_gatherv(comm, m, m, NULL, KVPRIM_F32, NULL), KVPRIM_ERROR_NULL, "counts is NULL");
    CHECK_ERROR(kvprim_all_to_allv(comm, m, m, NULL, KVPRIM_F32, NULL), KVPRIM_ERROR_NULL, "counts is NULL");
    CHECK_ERROR(kvprim_all_gatherv(comm, m, m, many, KVPRIM_F64, NULL), KVPRIM_ERROR_SIZE, "counts[1] is");
    CHECK_ERROR(kvprim_all_to_allv(comm, m, m, two, KVPRIM_F64, NULL), KVPRIM_ERROR_SIZE, "too many bytes");
    CHECK_ERROR(kvprim_all_to_all(comm, m, m, SIZE_MAX / 8, KVPRIM_F64, NULL), KVPRIM_ERROR_SIZE, "too many bytes");
    CHECK_ERROR(kvprim_all_gatherv(comm, NULL, m, row, KVPRIM_F32, NULL), KVPRIM_ERROR_NULL, "recv is NULL");
    CHECK_ERROR(kvprim_all_gatherv(comm, m, NULL, row, KVPRIM_F32, NULL), KVPRIM_ERROR_NULL, "send is NULL");
    CHECK_ERROR(kvprim_all_to_all(comm, m, bytes + 34, 1, KVPRIM_F32, NULL), KVPRIM_ERROR_ARGUMENT, "not aligned");
    CHECK_ERROR(kvprim_all_to_all(comm, m, m, 1, KVPRIM_F32, NULL), KVPRIM_ERROR_OVERLAP, "overlap");
    CHECK_ERROR(kvprim_all_to_all(comm, m, m + 1, 2, KVPRIM_F32, NULL), KVPRIM_ERROR_OVERLAP, "overlap");
    CHECK_ERROR(kvprim_all_gatherv(comm, m, bytes + 4, row, KVPRIM_F32, NULL), KVPRIM_ERROR_OVERLAP, "not in place");
    CHECK(called(""));
    OK_CALLING(kvprim_all_gatherv(comm, m, m, row, KVPRIM_F32, NULL),
               IN_GROUP(SEND_RECV)); /* the other rank's: this rank's part is in place */
    OK(kvprim_group_start(comm));
    CHECK_ERROR(kvprim_all_to_all(comm, m, m + 4, 1, KVPRIM_U8, NULL), KVPRIM_ERROR_ARGUMENT, "a group is open");
    CHECK_ERROR(kvprim_all_to_allv(comm, m, m + 4, NULL, KVPRIM_U8, NULL), KVPRIM_ERROR_ARGUMENT, "a group is open");
    CHECK_ERROR(kvprim_all_gatherv(comm, m, m, row, KVPRIM_U8, NULL), KVPRIM_ERROR_ARGUMENT, "a group is open");
    CHECK_ERROR(kvprim_group_end(comm), KVPRIM_ERROR_ARGUMENT, "a call of the group failed");
    CHECK(called(""));
    close_comm(comm, "CommDestroy");
}

/* One rank alone exchanges with itself. */
static void test_parts_alone(void)
{
    static char m[8];
    static const size_t one[] = {3};
    kvprim_comm *const comm = open_world(1);
    OK_CALLING(kvprim_all_to_all(comm, m, m + 4, 3, KVPRIM_U8, NULL), IN_GROUP(SEND_RECV));
    OK_CALLING(kvprim_all_to_allv(comm, m, m + 4, one, KVPRIM_U8, NULL), IN_GROUP(SEND_RECV));
    OK_CALLING(kvprim_all_gatherv(comm, m, m, one, KVPRIM_U8, NULL), "AllGather");
    close_comm(comm, "CommDestroy");
}

/* What callers pass as a dtype by mistake: 0, which was never set, and index types. Every collective refuses these
   values. */
static void test_no_dtypes(void)
{
    static char m[64];
    kvprim_comm *const comm = open_world(1);
    for (int k = 0; k < 16; k++) {
        const kvprim_dtype t = (kvprim_dtype)k;
        const kvprim_status status = KVPRIM_ERROR_ARGUMENT;
        CHECK_ERROR(kvprim_all_reduce(comm, m, m, 1, t, KVPRIM_SUM, NULL), status, "KVPRIM_I64 are index types");
        CHECK_ERROR(kvprim_reduce_scatter(comm, m, m, 1, t, KVPRIM_SUM, NULL), status, "which is not an element type");
        CHECK_ERROR(kvprim_all_gather(comm, m, m, 1, t, NULL), status, "which is not an element type");
        CHECK_ERROR(kvprim_all_to_all(comm, m, m, 1, t, NULL), status, "which is not an element type");
        CHECK_ERROR(kvprim_broadcast(comm, m, 1, t, 0, NULL), status, "which is not an element type");
        CHECK_ERROR(kvprim_send(comm, m, 1, t, 0, NULL), status, "which is not an element type");
        CHECK_ERROR(kvprim_recv(comm, m, 1, t, 0, NULL), status, "which is not an element type");
    }
    CHECK(called(""));
    close_comm(comm, "CommDestroy");
}

/* Compiled by a C compiler, there is no kernel for a norm. Nothing of NCCL's is called, whatever the arguments are. */
static void test_norm(void)
{
    static _Alignas(16) float m[4][16];
    kvprim_comm *const comm = open_world(2);
    kvprim_norm_desc n = {.dtype = KVPRIM_BF16, .tokens = 1, .hidden = 8};
    n.send = m[0], n.weight = m[1], n.out = m[2];
    CHECK(comm->sums == NULL && strstr(kvprim_comm_describe(comm), "a norm follows") == NULL);
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_UNSUPPORTED, "with nvcc");
    n.hidden = 7;
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_SIZE, "desc->hidden is 7");
    n.hidden = 8, n.out = (char *)m[2] + 2;
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_ARGUMENT, "desc->out is");
    n.tokens = 0;
    OK(kvprim_all_reduce_norm(comm, &n, NULL));
    CHECK_ERROR(kvprim_all_reduce_norm(comm, NULL, NULL), KVPRIM_ERROR_NULL, "desc is NULL");
    OK(kvprim_group_start(comm));
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_ARGUMENT, "a group is open, which takes");
    CHECK_ERROR(kvprim_group_end(comm), KVPRIM_ERROR_ARGUMENT, "nothing of it was enqueued");
    n.tokens = 1, n.out = m[2];
    current_device = elsewhere;
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_ARGUMENT, "the current device is 7");
    current_device = home;
    CHECK(called(""));
    OK_CALLING(kvprim_comm_abort(comm), "CommAbort");
    CHECK_ERROR(kvprim_all_reduce_norm(comm, &n, NULL), KVPRIM_ERROR_ARGUMENT, "was aborted");
    close_comm(comm, "");
}

#define TEXT(x) #x
#define DOTTED(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)
#define VERSION DOTTED(KVPRIM_VERSION_MAJOR, KVPRIM_VERSION_MINOR, KVPRIM_VERSION_PATCH)

/* If what the other rank says is wrong, this rank takes no further step and ends its communicator. Versions, each named
   on each rank, are compared before any is asked for more than they all know. */
static void test_other_rank(void)
{
    enum { ok = offsetof(kvpn_hello, ok), version = offsetof(kvpn_hello, version) };
    enum { protocol = offsetof(kvpn_hello, protocol), bytes = offsetof(kvpn_hello, info_bytes) };
    const struct {
        exchanged in;
        size_t at;
        uint32_t said;
        kvprim_status status;
        const char *words;
    } cases[] = {
        {in_hello, ok, 0, KVPRIM_ERROR_CUDA, "rank 0 failed, its own message says why"},
        {in_hello, version, 10203, KVPRIM_ERROR_UNSUPPORTED, "rank 0 runs kvprim 1.2.3 (protocol "},
        {in_hello, version, 10203, KVPRIM_ERROR_UNSUPPORTED, "this rank " VERSION " ("},
        {in_hello, protocol, 99, KVPRIM_ERROR_UNSUPPORTED, "(protocol 99)"},
        {in_hello, bytes, sizeof(kvpn_rank_info) + 8, KVPRIM_ERROR_UNSUPPORTED, "rank 0 runs kvprim"},
        {in_hello, offsetof(kvpn_hello, magic), 0, KVPRIM_ERROR_ARGUMENT, "what came from rank 0 is not kvprim's"},
        {in_info, ok, 0, KVPRIM_ERROR_CUDA, "rank 0 failed, its own message says why"},
        {in_info, offsetof(kvpn_rank_info, settings), 128, KVPRIM_ERROR_SIZE,
         "desc->buffer_bytes is 64, but 128 on rank 0"},
    };
    kvprim_comm *const comm = new_comm();
    kvprim_comm_desc d = {.world = 2};
    d.rank = 1, d.buffer_bytes = 64;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        fake.other_says = cases[k].in, fake.other_at = cases[k].at, fake.other_word = cases[k].said;
        CHECK_ERROR(kvprim_comm_init(comm, &d), cases[k].status, cases[k].words);
        CHECK(called(cases[k].in == in_hello ? "CommInitRank AllGather CommAbort"
                                             : "CommInitRank AllGather AllGather CommAbort"));
        end(), begin();
    }
    CHECK(kvprim_comm_init(comm, &d) == KVPRIM_OK && kvprim_comm_destroy(comm) == KVPRIM_OK);
    free(comm);
}

/* A rank beyond those that may have kernels. */
static void test_many_ranks(void)
{
    kvprim_comm_desc d = {.world = 40};
    for (d.rank = 7; d.rank < 40; d.rank += 5)
        close_comm(open_comm(&d, OPENED), "CommDestroy");
}

#define CHECK_WORDS(text, words) check_words(__LINE__, text, words)
static void check_words(int line, const char *text, const char *words)
{
    if (!text || !strstr(text, words))
        fail("line %d: \"%s\" does not say \"%s\"", line, text ? text : "NULL", words);
}

/* Why kernels are off for so many ranks on the GPUs that `fake` has, with this NCCL_P2P_LEVEL; NULL: they are not. `far`:
   the last rank is on another machine; 2: but in memory of the caller's. */
static const char *off_by_far(int world, const char *level, kvpn_link *slowest, int far)
{
    kvpn_init_task task;
    kvpn_rank_info infos[4];
    memset(&task, 0, sizeof task);
    memset(infos, 0, sizeof infos);
    task.comm.world = world, task.comm.device = home, task.all = infos, task.mine.machine = 5;
    for (int r = 0; r < world; r++)
        infos[r].machine = far && r == world - 1 ? 6 : 5, infos[r].bus[0] = (char)('0' + r);
    task.comm.peer[world - 1] = far == 2 ? infos : NULL;
    (void)(level ? setenv("NCCL_P2P_LEVEL", level, 1) : unsetenv("NCCL_P2P_LEVEL"));
    kvpn_find_links(&task);
    (void)unsetenv("NCCL_P2P_LEVEL");
    *slowest = (kvpn_link)task.mine.link;
    return task.off_reason;
}

static const char *off_by(int world, const char *level, kvpn_link *slowest)
{
    return off_by_far(world, level, slowest, 0);
}

/* Kernels are off across machines, above two ranks over PCIe, and where NCCL_P2P_LEVEL may forbid it. */
static void test_links(void)
{
    static const char *const forbid[] = {"NVL", "PIX", "PXB", "PHB", "1", "3"}, *const allow[] = {"SYS", "4", "5"};
    kvpn_link slowest;
    fake.bus_device[0] = home, fake.bus_device[1] = fake.bus_device[2] = fake.bus_device[3] = home;
    CHECK(off_by(4, "NVL", &slowest) == NULL && slowest == kvpn_same_gpu);
    fake.bus_device[1] = 5, fake.native[1] = 1;
    CHECK(off_by(4, "NVL", &slowest) == NULL && slowest == kvpn_nvlink);
    fake.bus_device[2] = -1; /* hidden from this process */
    CHECK(off_by(4, "NVL", &slowest) == NULL && slowest == kvpn_hidden_link);
    fake.bus_device[2] = 7;
    CHECK_WORDS(off_by(3, "SYS", &slowest), "not all of them connected by NVLink");
    CHECK(slowest == kvpn_pcie);
    fake.native[1] = 0;
    CHECK(off_by(2, NULL, &slowest) == NULL && slowest == kvpn_pcie);
    for (int k = 0; k < 6; k++)
        CHECK_WORDS(off_by(2, forbid[k], &slowest), "NCCL_P2P_LEVEL is not SYS");
    for (int k = 0; k < 3; k++)
        CHECK(off_by(2, allow[k], &slowest) == NULL);
    CHECK_WORDS(off_by_far(2, NULL, &slowest, 1), "ranks on several machines");
    CHECK(off_by_far(2, NULL, &slowest, 2) == NULL && slowest == kvpn_network);
    const kvprim_comm_desc d = {.world = 2};
    kvprim_comm *const comm = open_comm(&d, OPENED); /* its ranks say the same GPU */
    CHECK(strstr(kvprim_comm_describe(comm), "slowest link: one GPU") != NULL);
    close_comm(comm, "CommDestroy");
}

/* Rank 0 of three, rank 1 of which is in another process; `pages` are the ranks' memory. Rank 2 is in this one. */
static kvprim_comm *share_memory(kvpn_slots *others, char **pages)
{
    const kvprim_comm_desc d = {.world = 3, .timeout_ms = test_timeout_ms};
    kvprim_comm *const comm = open_comm(&d, OPENED);
    kvpn_slots *const own = (kvpn_slots *)calloc(1, sizeof *own);
    for (int k = 0; k < 3; k++)
        CHECK(cudaMalloc((void **)&pages[k], kvpn_page) == cudaSuccess);
    own->refs = 1, own->device = home, own->memory = pages[0], own->nonce = 6, others->refs = 2;
    kvpn_publish_slots(own);
    CHECK(cudaHostAlloc((void **)&comm->stop, sizeof *comm->stop, 0) == cudaSuccess);
    comm->slots[0] = own, comm->slots[2] = others, comm->mapped[1] = pages[1];
    for (int r = 0; r < 3; r++)
        comm->peer[r] = pages[r];
    for (int r = 0; r < 9; r++)
        *kvpn_nonce_at(comm, r / 3, r % 3) = 9;
    fake.slots = pages[0], fake.gate = 1, fake.device_at_free = -1;
    return comm;
}

/* destroy lets go of other processes' memory, and frees its own once they have let go of that, or not at all. */
static void test_processes(void)
{
    for (int k = 0; k < 3; k++) { /* the other one is late; was late, and this rank aborted; never comes */
        kvpn_slots others;
        char *pages[3];
        memset(&others, 0, sizeof others);
        kvprim_comm *const comm = share_memory(&others, pages);
        const uint64_t *const far = kvpn_nonce_at(comm, 1, 0), *const near = kvpn_nonce_at(comm, 2, 0);
        const int64_t before_us = kvpn_now_us();
        fake.let_go = k == 2 ? NULL : kvpn_nonce_at(comm, 0, 1), fake.let_go_us = before_us + 1200000 / (k + 1);
        *comm->stop = k == 0 ? 0 : kvpn_stop_aborted;
        OK(kvprim_comm_destroy(comm));
        const int64_t ms = (kvpn_now_us() - before_us) / 1000;
        CHECK(fake.closed == 1 && *far == 0 && *near == 0 && others.refs == 1);
        CHECK(ms >= (k == 0 ? 1200 : k == 1 ? 600 : 1000) && ms < test_timeout_ms);
        CHECK(load(&live_allocations) == (k == 2 ? 3 : 2) && fake.device_at_free == (k == 2 ? -1 : home));
        CHECK(k < 2 || cudaFree(pages[0]) == cudaSuccess);
        CHECK(cudaFree(pages[1]) == cudaSuccess && cudaFree(pages[2]) == cudaSuccess && called("CommDestroy"));
        free(comm);
        end(), begin();
    }
}

int main(void)
{
    live("life: init and destroy", test_plain);
    live("life: NCCL makes no communicator", test_late_nccl);
    live("life: CUDA takes too long", test_late_cuda);
    live("life: exchanges that hang", test_late_exchanges);
    live("life: checks during init", test_checks_during_init);
    live("life: abort, and destroy at once", test_aborts);
    live("life: a forked child", test_fork);
    live("life: NCCL does not end", test_no_end);
    live("life: collectives, blocking or not", test_collectives);
    live("life: tensors in a window", test_window);
    live("life: aborts with a window", test_aborts_with_window);
    live("life: the caller's communicator", test_foreign);
    live("life: the caller's exchange", test_exchange);
    live("life: no threads", test_no_threads);
    live("life: checks", test_checks);
    live("life: slots of a rank that has gone", test_slots_of_others);
    live("life: groups", test_groups);
    live("life: groups that fail", test_groups_that_fail);
    live("life: calls in captures", test_calls_in_captures);
    live("life: how many calls a group takes", test_group_sizes);
    live("life: abort, destroy and deadlines of groups", test_life_of_groups);
    live("life: a ring's sender", test_ring_sender);
    live("life: a ring's chunks of several slots", test_ring_of_wide_chunks);
    live("life: a ring's receiver", test_ring_receiver);
    live("life: a ring's arguments", test_ring_arguments);
    live("life: a ring after its peer died", test_ring_again);
    live("life: fp8", test_fp8);
    live("life: parts", test_parts);
    live("life: arguments of parts", test_parts_arguments);
    live("life: parts of one rank", test_parts_alone);
    live("life: index types are not element types", test_no_dtypes);
    live("life: a norm without a kernel", test_norm);
    live("life: the other rank reports an error", test_other_rank);
    live("life: more ranks than may have kernels", test_many_ranks);
    live("life: links", test_links);
    live("life: memory of ranks in other processes", test_processes);
    return finish();
}

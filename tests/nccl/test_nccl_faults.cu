/* SPDX-License-Identifier: MIT */
/* Tests what goes wrong around the collectives of kvprim_nccl.h, on two GPUs or more, in threads or processes
   (nccl_ranks.h says how to call it). Ranks are late, stay away, fail or die. Watchdogs abort beside graphs,
   captures and other communicators. Kernels before a collective let it start early. Every case ends in time, with the
   right result or an error. The GPU's context survives, its memory comes back, and a new communicator works.

       nvcc -arch=native -std=c++17 -O2 -I. -DKVPRIM_IMPLEMENTATION tests/nccl/test_nccl_faults.cu -lnccl && ./a.out */
#include "nccl_ranks.h"
#include <cuda_fp8.h>

/* What the contract promises, in seconds. */
static const double abort_takes = 1.0;

static void abort_in_time(rank_state &r, kvprim_comm *comm)
{
    const double begun = seconds();
    OK(kvprim_comm_abort(comm));
    if (seconds() - begun > abort_takes)
        fail("rank %d: abort took %.2f s", r.rank, seconds() - begun);
    IS(kvprim_comm_abort(comm), KVPRIM_ERROR_ARGUMENT);
    CHECK_ERROR(kvprim_comm_check(comm), KVPRIM_ERROR_ARGUMENT, "was aborted");
}

/* Waits for a stream's work, for at most five seconds. */
static void expect_drained(rank_state &r, cudaStream_t stream, const char *what)
{
    const double begun = seconds();
    cudaError_t error;
    while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady && seconds() - begun < 5)
        sleep_ms(1);
    if (error != cudaSuccess)
        die(what, r.rank, cudaGetErrorString(error));
}

static void expect_works(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0);
    open_comm(r, &comm, desc);
    enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], 70001, KVPRIM_BF16, 5);
    expect_none_wrong(r, "a new communicator", 0);
    OK(kvprim_comm_destroy(&comm));
}

/* Polls as a watchdog does. Returns what check says first; *took: after how many seconds. */
static kvprim_status watch(kvprim_comm *comm, double most, double *took)
{
    const double begun = seconds();
    kvprim_status status = KVPRIM_OK;
    while ((status = kvprim_comm_check(comm)) == KVPRIM_OK && seconds() - begun < most)
        sleep_ms(1);
    *took = seconds() - begun;
    return status;
}

/* ---- late and missing ranks ---- */

/* Numbers that are the same in all elements, with the weight at r.device[2]: then y is the weight. */
static kvprim_status norm_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    kvprim_norm_desc d = {};
    d.dtype = dtype, d.hidden = 4096, d.tokens = int64_t(count / 4096);
    d.send = r.device[0], d.weight = r.device[2], d.out = r.device[1];
    return kvprim_all_reduce_norm(comm, &d, r.stream);
}

/* A norm that is verified. */
static void enqueue_norm(rank_state &r, kvprim_comm *comm, size_t count)
{
    __nv_bfloat16 *const send = reinterpret_cast<__nv_bfloat16 *>(r.device[0]);
    fill_late<<<16, 256, 0, r.stream>>>(send, count, float(r.rank + 1), 0);
    fill_late<<<16, 256, 0, r.stream>>>(reinterpret_cast<__nv_bfloat16 *>(r.device[2]), 4096, 0.5f, 0);
    OK(norm_of_device(r, comm, count, KVPRIM_BF16));
    count_unlike<<<16, 256, 0, r.stream>>>(reinterpret_cast<__nv_bfloat16 *>(r.device[1]), count, 0.5f, r.wrong);
    CUDA(cudaGetLastError());
}

typedef kvprim_status collective(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype);

static kvprim_status sum_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    return kvprim_all_reduce(comm, r.device[1], r.device[0], count, dtype, KVPRIM_SUM, r.stream);
}

static kvprim_status average_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    return kvprim_all_reduce(comm, r.device[1], r.device[0], count, dtype, KVPRIM_AVG, r.stream);
}

static kvprim_status gather_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    return kvprim_all_gather(comm, r.device[1], r.device[0], count, dtype, r.stream);
}

static kvprim_status scatter_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    return kvprim_reduce_scatter(comm, r.device[1], r.device[0], count, dtype, KVPRIM_SUM, r.stream);
}

static kvprim_status to_all_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    return kvprim_all_to_all(comm, r.device[1], r.device[0], count, dtype, r.stream);
}

/* The last rank has nothing to send or receive. The others learn of its absence all the same. */
static kvprim_status parts_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    std::vector<size_t> counts(size_t(world * world), count);
    for (int k = 0; k < world; k++)
        counts[size_t(k * world + world - 1)] = counts[size_t((world - 1) * world + k)] = 0;
    return kvprim_all_to_allv(comm, r.device[1], r.device[0], counts.data(), dtype, r.stream);
}

static kvprim_status gatherv_of_device(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    std::vector<size_t> counts(size_t(world), count);
    counts.back() = 0;
    return kvprim_all_gatherv(comm, r.device[1], r.device[0], counts.data(), dtype, r.stream);
}

static void test_late(rank_state &r)
{
    for (const size_t count : {size_t(4096), size_t(1000000)}) {
        meet();
        if (r.rank == world - 1)
            sleep_ms(1000);
        enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[1], count, KVPRIM_BF16, 3);
        OK(to_all_of_device(r, &r.comm, count, KVPRIM_BF16));
        OK(parts_of_device(r, &r.comm, count, KVPRIM_BF16));
        enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[1], count, KVPRIM_BF16, 4);
        expect_none_wrong(r, "one rank late, count", count);
        OK(kvprim_comm_check(&r.comm));
    }
    for (const size_t tokens : {5, 300}) {
        meet();
        if (r.rank == world - 1)
            sleep_ms(300);
        enqueue_norm(r, &r.comm, tokens << 12);
        expect_none_wrong(r, "one rank late, tokens", tokens);
        OK(kvprim_comm_check(&r.comm));
    }
}

/* In the communicator's buffer, where NCCL would use its symmetric kernels, which no abort ends. */
static kvprim_status sum_in_buffer(rank_state &r, kvprim_comm *comm, size_t count, kvprim_dtype dtype)
{
    void *const buffer = kvprim_comm_buffer(comm, nullptr);
    return kvprim_all_reduce(comm, buffer, buffer, count, dtype, KVPRIM_SUM, r.stream);
}

/* One rank stays away. The others learn of it in time, whoever sums, and abort ends the wait. `named`: own kernels sum,
   and say which rank it is. */
static void one_missing(rank_state &r, collective *call, size_t count, kvprim_dtype dtype, bool named)
{
    kvprim_comm comm = {};
    if (!named && leaves_out("a rank that stays away from NCCL"))
        return;
    kvprim_comm_desc desc = desc_of(r, size_t(4) << 20, 500);
    double took = 0;
    desc.all_reduce_limit = !named;
    open_comm(r, &comm, desc);
    OK(call(r, &comm, count, dtype));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    if (r.rank != world - 1) {
        OK(call(r, &comm, count, dtype));
        const bool own = named && comm.peer[0];
        const std::string name = "for rank " + std::to_string(world - 1);
        CHECK_ERROR(watch(&comm, 5, &took), KVPRIM_ERROR_TIMEOUT, own ? name.c_str() : "");
        if (took < 0.4 || took > 1.5)
            fail("rank %d: the timeout of 0.5 s was reported after %.2f s", r.rank, took);
        if (own) /* every later call says so too */
            IS(call(r, &comm, count, dtype), KVPRIM_ERROR_TIMEOUT);
    }
    meet();
    abort_in_time(r, &comm);
    expect_drained(r, r.stream, "after an abort");
    meet();
    OK(kvprim_comm_destroy(&comm));
}

static void test_missing(rank_state &r)
{
    one_missing(r, sum_of_device, 1024, KVPRIM_BF16, true);
    one_missing(r, sum_of_device, 700000, KVPRIM_F32, true);
    one_missing(r, scatter_of_device, 100000, KVPRIM_F16, true);
    one_missing(r, scatter_of_device, 1000, KVPRIM_F8E4M3, true);
    one_missing(r, average_of_device, 3 << 20, KVPRIM_F8E5M2, true);
    one_missing(r, gather_of_device, 500, KVPRIM_F32, true);
    one_missing(r, gather_of_device, 100000, KVPRIM_F32, true);
    one_missing(r, to_all_of_device, 500, KVPRIM_F32, true);
    one_missing(r, to_all_of_device, 500001, KVPRIM_U8, true);
    one_missing(r, parts_of_device, 300, KVPRIM_F8E5M2, true);
    one_missing(r, parts_of_device, 50000, KVPRIM_F64, true);
    one_missing(r, gatherv_of_device, 50000, KVPRIM_F64, true);
    one_missing(r, to_all_of_device, (size_t(36) << 20) / size_t(world), KVPRIM_U8, false);
    one_missing(r, norm_of_device, 4096, KVPRIM_BF16, true);
    one_missing(r, norm_of_device, 3 << 20, KVPRIM_F16, true);
    one_missing(r, sum_of_device, 1000, KVPRIM_INT32, false);
    one_missing(r, sum_in_buffer, 100000, KVPRIM_F8E4M3, false);
}

/* Every rank sends its number to all, and count_unlike counts what is not that. */
static void enqueue_numbers(rank_state &r, kvprim_comm *comm, size_t count, float seed)
{
    float *const send = reinterpret_cast<float *>(r.device[2]), *const recv = reinterpret_cast<float *>(r.device[1]);
    fill_late<<<16, 256, 0, r.stream>>>(send, count * size_t(world), seed + float(r.rank), 1);
    OK(kvprim_all_to_all(comm, recv, send, count, KVPRIM_F32, r.stream));
    for (int from = 0; from < world; from++)
        count_unlike<<<16, 256, 0, r.stream>>>(recv + size_t(from) * count, count, seed + float(from), r.wrong);
    CUDA(cudaGetLastError());
}

/* The late rank comes after the others have given up and have run what was queued. Each of its results is right, or its
   first wrong call reports an error. `replays`: of a graph. */
static void one_too_late(rank_state &r, bool replays)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 500);
    double took = 0;
    open_comm(r, &comm, desc);
    if (!comm.peer[0])
        return OK(kvprim_comm_destroy(&comm));
    enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], 5000, KVPRIM_BF16, 1);
    expect_none_wrong(r, "before", 0);
    const cudaGraphExec_t exec = captured(r, [&] {
        advance<<<1, 1, 0, r.stream>>>(r.iteration);
        enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], 5000, KVPRIM_BF16, 2);
        enqueue_numbers(r, &comm, 3000, 1);
        enqueue_numbers(r, &comm, 100000, 2);
        enqueue_norm(r, &comm, 3 << 12);
    });
    meet();
    if (r.rank == 0)
        sleep_ms(1200);
    for (int n = 0; n < (replays ? 2000 : 8); n++) {
        if (replays)
            CUDA(cudaGraphLaunch(exec, r.stream));
        else if (kvprim_comm_check(&comm) == KVPRIM_OK && n % 2)
            enqueue_norm(r, &comm, size_t(n) << 12);
        else if (kvprim_comm_check(&comm) == KVPRIM_OK)
            n % 2 ? enqueue_numbers(r, &comm, size_t(10) << 2 * n, float(n))
                  : enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], 1000 + size_t(n) * 999, KVPRIM_BF16,
                                uint64_t(n));
        if (r.rank == 0 && wrong_so_far(r) && kvprim_comm_check(&comm) == KVPRIM_OK) {
            fail("call %d of the late rank is wrong, and it was told nothing", n);
            break;
        }
    }
    CHECK(watch(&comm, 5, &took) == KVPRIM_ERROR_TIMEOUT);
    CUDA(cudaStreamSynchronize(r.stream));
    (void)wrong_so_far(r);
    CUDA(cudaMemsetAsync(r.iteration, 0, sizeof *r.iteration, r.stream));
    abort_in_time(r, &comm);
    meet();
    OK(kvprim_comm_destroy(&comm));
    destroy_graph(exec);
}

static void test_too_late(rank_state &r)
{
    one_too_late(r, false);
    one_too_late(r, true);
    expect_works(r);
}

/* The host sits in cudaStreamSynchronize. A watchdog learns of a collective of NCCL's that hangs, and aborts. The host
   destroys the communicator at once, while the watchdog may still be inside abort. */
static void test_watchdog(rank_state &r)
{
    if (lacks_nccl("the watchdog waits for NCCL's sum"))
        return;
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 500);
    open_comm(r, &comm, desc);
    OK(kvprim_all_reduce(&comm, r.device[1], r.device[0], 1 << 20, KVPRIM_INT32, KVPRIM_SUM, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    if (r.rank != world - 1) {
        double took = 0;
        std::thread watchdog([&] {
            CHECK_ERROR(watch(&comm, 5, &took), KVPRIM_ERROR_TIMEOUT, "a collective of NCCL's");
            const double begun = seconds();
            OK(kvprim_comm_abort(&comm));
            CHECK(seconds() - begun < abort_takes);
        });
        kvprim_status status = KVPRIM_OK;
        for (int n = 0; n < 20 && status == KVPRIM_OK; n++) /* until the abort */
            status = kvprim_all_reduce(&comm, r.device[1], r.device[0], 20 << 20, KVPRIM_INT32, KVPRIM_SUM, r.stream);
        CUDA(cudaStreamSynchronize(r.stream));
        OK(kvprim_comm_destroy(&comm));
        watchdog.join();
        if (took > 1.5)
            fail("rank %d: noticed after %.2f s", r.rank, took);
    }
    meet();
    if (r.rank == world - 1) {
        abort_in_time(r, &comm);
        OK(kvprim_comm_destroy(&comm));
    }
}

/* ---- aborts ---- */

/* One thread aborts two communicators, both stuck in NCCL, the second with a window. */
static void test_two_stuck(rank_state &r)
{
    if (lacks_nccl("two communicators stick in NCCL"))
        return;
    kvprim_comm a = {}, b = {};
    cudaStream_t other;
    kvprim_comm_desc desc = desc_of(r, 0, 500);
    open_comm(r, &a, desc);
    desc = desc_of(r, 1 << 20, 500);
    desc.nccl_window = 1;
    open_comm(r, &b, desc);
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    OK(kvprim_all_reduce(&a, r.device[1], r.device[0], 100, KVPRIM_INT32, KVPRIM_SUM, r.stream));
    OK(kvprim_all_reduce(&b, r.device[1], r.device[0], 100, KVPRIM_INT32, KVPRIM_SUM, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    if (r.rank != world - 1) {
        OK(kvprim_all_reduce(&a, r.device[1], r.device[0], 100, KVPRIM_INT32, KVPRIM_SUM, r.stream));
        OK(kvprim_all_reduce(&b, r.device[2], r.device[2], 100, KVPRIM_INT32, KVPRIM_SUM, other));
        sleep_ms(100);
    }
    abort_in_time(r, &a);
    abort_in_time(r, &b);
    expect_drained(r, r.stream, "two stuck communicators");
    expect_drained(r, other, "two stuck communicators");
    meet();
    OK(kvprim_comm_destroy(&a));
    OK(kvprim_comm_destroy(&b));
    CUDA(cudaStreamDestroy(other));
}

/* A watchdog aborts while another thread replays a graph of own kernels. These replays end at once, and so do later
   ones. */
static void test_abort_beside_replays(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 20000);
    open_comm(r, &comm, desc);
    if (!comm.peer[0])
        return OK(kvprim_comm_destroy(&comm));
    const cudaGraphExec_t exec = captured(r, [&] {
        for (int n = 0; n < 5; n++)
            OK(sum_of_device(r, &comm, size_t(1000) << 2 * n, KVPRIM_BF16));
        OK(gather_of_device(r, &comm, 100000, KVPRIM_F32));
        OK(to_all_of_device(r, &comm, 1000, KVPRIM_F32));
        OK(parts_of_device(r, &comm, 100000, KVPRIM_F32));
        OK(norm_of_device(r, &comm, 32 << 12, KVPRIM_BF16));
        OK(norm_of_device(r, &comm, 600 << 12, KVPRIM_BF16));
    });
    meet();
    std::thread watchdog([&] {
        sleep_ms(30 + 20 * r.rank);
        abort_in_time(r, &comm);
    });
    for (const double begun = seconds(); seconds() - begun < 0.3;)
        CUDA(cudaGraphLaunch(exec, r.stream));
    watchdog.join();
    expect_drained(r, r.stream, "replays during an abort");
    const double begun = seconds();
    for (int n = 0; n < 20; n++)
        CUDA(cudaGraphLaunch(exec, r.stream));
    expect_drained(r, r.stream, "replays after an abort");
    if (seconds() - begun > 0.2)
        fail("rank %d: 20 replays after the abort took %.2f s", r.rank, seconds() - begun);
    meet();
    OK(kvprim_comm_destroy(&comm));
    destroy_graph(exec);
    expect_works(r);
}

/* One rank aborts, in time. The others learn of it from their next call, long before their timeout. */
static void test_one_aborts(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 20000);
    double took = 0;
    open_comm(r, &comm, desc);
    OK(sum_of_device(r, &comm, 1000, KVPRIM_BF16));
    CUDA(cudaStreamSynchronize(r.stream));
    meet();
    if (r.rank == 0)
        abort_in_time(r, &comm);
    meet();
    if (r.rank != 0 && comm.peer[0]) {
        OK(sum_of_device(r, &comm, 1000, KVPRIM_BF16));
        CHECK_ERROR(watch(&comm, 5, &took), KVPRIM_ERROR_TIMEOUT, "rank 0 was aborted");
        CHECK(took < 1);
        expect_drained(r, r.stream, "after another rank's abort");
    }
    if (r.rank == 0) /* the others' memory, and their mappings of it, stay as they are */
        OK(kvprim_comm_destroy(&comm));
    meet();
    if (r.rank != 0 && comm.peer[0])
        CHECK(kvprim_comm_check(&comm) == KVPRIM_ERROR_TIMEOUT);
    if (r.rank != 0)
        abort_in_time(r, &comm);
    meet();
    if (r.rank != 0)
        OK(kvprim_comm_destroy(&comm));
    expect_works(r);
}

static kvprim_status exchange(rank_state &r, kvprim_comm *comm, size_t bytes)
{
    const kvprim_status sent = kvprim_send(comm, r.device[0], bytes, KVPRIM_U8, (r.rank + 1) % world, r.stream);
    return sent != KVPRIM_OK ? sent
                             : kvprim_recv(comm, r.device[1], bytes, KVPRIM_U8, (r.rank + world - 1) % world, r.stream);
}

/* Rank 0 ends a group that the others leave open. It is stuck, and its deadline tells; an abort ends it, and drops
   those that are open. */
static void test_groups(rank_state &r)
{
    if (lacks_nccl("groups are NCCL's"))
        return;
    const size_t bytes = size_t(16) << 20; /* more than NCCL sends ahead */
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 500);
    double took = 0;
    open_comm(r, &comm, desc);
    for (int open = 0; open < 2; open++) {
        OK(kvprim_group_start(&comm));
        OK(exchange(r, &comm, bytes));
        if (!open || r.rank == 0)
            OK(kvprim_group_end(&comm));
        if (!open)
            CUDA(cudaStreamSynchronize(r.stream));
        meet();
    }
    if (r.rank == 0) {
        CHECK_ERROR(watch(&comm, 5, &took), KVPRIM_ERROR_TIMEOUT, "a collective of NCCL's was not done");
        CHECK(took > 0.3 && took < 2);
    } else {
        sleep_ms(1000);
        OK(kvprim_comm_check(&comm));
    }
    meet();
    abort_in_time(r, &comm);
    CHECK_ERROR(kvprim_group_end(&comm), KVPRIM_ERROR_ARGUMENT, "was aborted");
    expect_drained(r, r.stream, "after an abort of a group");
    meet();
    OK(kvprim_comm_destroy(&comm));
    expect_works(r);
}

/* Another thread aborts while this one makes calls. They return errors, and end. */
static void test_call_during_abort(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 2000);
    open_comm(r, &comm, desc);
    meet();
    std::thread other([&] {
        sleep_ms(20);
        abort_in_time(r, &comm);
    });
    kvprim_status status = KVPRIM_OK;
    for (const double begun = seconds(); status == KVPRIM_OK && seconds() - begun < 10;)
        status = sum_of_device(r, &comm, 1000, KVPRIM_BF16);
    CHECK(status != KVPRIM_OK);
    other.join();
    expect_drained(r, r.stream, "calls during an abort");
    meet();
    OK(kvprim_comm_destroy(&comm));
}

/* Memory comes back, also that of a buffer in a window of NCCL's. */
static void test_memory_after_aborts(rank_state &r)
{
    if (lacks_nccl("a sum of integers is NCCL's"))
        return;
    size_t before = 0, after = 0, total;
    for (int n = 0; n < 6; n++) {
        kvprim_comm comm = {};
        kvprim_comm_desc desc = desc_of(r, size_t(64) << 20);
        desc.nccl_window = n % 2;
        open_comm(r, &comm, desc);
        OK(sum_of_device(r, &comm, 1000, KVPRIM_INT32));
        CUDA(cudaStreamSynchronize(r.stream));
        meet();
        abort_in_time(r, &comm);
        const kvprim_comm_desc unused = {};
        IS(kvprim_comm_init(&comm, &unused), KVPRIM_ERROR_ARGUMENT);
        OK(kvprim_comm_destroy(&comm));
        IS(kvprim_comm_destroy(&comm), KVPRIM_ERROR_ARGUMENT);
        meet();
        sleep_ms(200); /* NCCL frees in threads of its own */
        CUDA(cudaMemGetInfo(n == 1 ? &before : &after, &total));
        meet();
    }
    if (before > after + (size_t(32) << 20))
        fail("rank %d: %zu MiB of device memory are gone", r.rank, (before - after) >> 20);
}

/* ---- init ---- */

/* If the others never come, init times out, and a new communicator works. An abort from another thread ends init as
   well. */
static void test_init_alone(rank_state &r)
{
    if (one_gpu)
        return skip("init waits in the exchange, which is the test's");
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.init_timeout_ms = 700;
    double begun = seconds();
    if (r.rank != world - 1) {
        CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_TIMEOUT, "waited 700 ms for the others");
        if (seconds() - begun < 0.6 || seconds() - begun > 1.7)
            fail("rank %d: init's timeout of 0.7 s took %.2f s", r.rank, seconds() - begun);
        IS(kvprim_comm_destroy(&comm), KVPRIM_ERROR_ARGUMENT);
    }
    desc = desc_of(r, 0);
    if (r.rank != world - 1) {
        std::thread other([&] {
            sleep_ms(300);
            OK(kvprim_comm_check(&comm));
            const double now = seconds();
            OK(kvprim_comm_abort(&comm));
            CHECK(seconds() - now < abort_takes);
        });
        begun = seconds();
        CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_TIMEOUT, "kvprim_comm_abort was called");
        CHECK(seconds() - begun < 0.3 + abort_takes);
        other.join();
    }
    meet();
    expect_works(r);
}

/* One rank lacks memory for its part. All ranks fail, and none waits. */
static void test_init_fails_on_one(rank_state &r)
{
    if (gpus < world)
        return skip("ranks of one GPU share its memory");
    kvprim_comm comm = {};
    size_t free_bytes, total;
    std::vector<void *> taken;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.buffer_bytes = free_bytes / 3 / (size_t(1) << 30) << 30;
    meet();
    shared->scratch[0] = desc.buffer_bytes;
    meet();
    if (r.rank == world - 1)
        for (void *part; cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && free_bytes > desc.buffer_bytes;) {
            if (cudaMalloc(&part, size_t(1) << 30) != cudaSuccess)
                break;
            taken.push_back(part);
        }
    (void)cudaGetLastError();
    desc.buffer_bytes = shared->scratch[0];
    const double begun = seconds();
    const std::string failed = "rank " + std::to_string(world - 1) + " failed";
    CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_CUDA, r.rank == world - 1 ? "cudaMalloc" : failed.c_str());
    CHECK(seconds() - begun < 10);
    for (void *part : taken)
        CUDA(cudaFree(part));
    meet();
    expect_works(r);
}

/* ---- captures, graphs, kernels that let their successors start early ---- */

/* check is called from this thread and from another while a stream is captured. */
static void test_check_during_capture(rank_state &r)
{
    if (lacks_nccl("a sum of integers is NCCL's"))
        return;
    static const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                  cudaStreamCaptureModeRelaxed};
    for (const cudaStreamCaptureMode mode : modes)
        for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
            cudaGraph_t graph;
            OK(sum_of_device(r, &r.comm, 1000, KVPRIM_INT32)); /* a collective that is watched */
            meet();
            CUDA(cudaStreamBeginCapture(r.stream, mode));
            OK(sum_of_device(r, &r.comm, 1000, KVPRIM_BF16));
            if (elsewhere)
                std::thread([&] { OK(kvprim_comm_check(&r.comm)); }).join();
            else
                OK(kvprim_comm_check(&r.comm));
            OK(sum_of_device(r, &r.comm, 1000, KVPRIM_BF16));
            CUDA(cudaStreamEndCapture(r.stream, &graph));
            meet(); /* what a capture mode forbids, it forbids all threads of the process */
            CUDA(cudaGraphDestroy(graph));
            CUDA(cudaStreamSynchronize(r.stream));
            meet();
        }
}

/* While graphs with NCCL's collectives exist, destroy says so in time; it succeeds once they are gone. abort does not
   wait. */
static void test_graphs_of_nccl(rank_state &r)
{
    if (lacks_nccl("the graphs hold NCCL's sums"))
        return;
    for (int aborts = 0; aborts < 2; aborts++) {
        kvprim_comm comm = {};
        const kvprim_comm_desc desc = desc_of(r, 0, 600);
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        open_comm(r, &comm, desc);
        OK(sum_of_device(r, &comm, 1000, KVPRIM_INT32));
        CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
        OK(sum_of_device(r, &comm, 1000, KVPRIM_INT32));
        CUDA(cudaStreamEndCapture(r.stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CUDA(cudaGraphLaunch(exec, r.stream));
        CUDA(cudaStreamSynchronize(r.stream));
        meet();
        if (aborts && r.rank != world - 1) /* a replay that waits for a rank */
            CUDA(cudaGraphLaunch(exec, r.stream));
        if (aborts)
            abort_in_time(r, &comm);
        expect_drained(r, r.stream, "a replay of NCCL's");
        meet();
        const double begun = seconds();
        const kvprim_status status = kvprim_comm_destroy(&comm);
        if (status != KVPRIM_OK) /* in one process NCCL leaves the end to the last rank */
            CHECK(status == KVPRIM_ERROR_TIMEOUT && strstr(kvprim_last_error(), "destroy the graphs"));
        if (seconds() - begun > 2.5)
            fail("rank %d: destroy took %.2f s", r.rank, seconds() - begun);
        meet();
        destroy_graph(exec);
        CUDA(cudaGraphDestroy(graph));
        if (status != KVPRIM_OK)
            OK(kvprim_comm_destroy(&comm));
        meet();
    }
    expect_works(r);
}

template <class T>
static void sum_after_early(rank_state &r, kvprim_comm *comm, kvprim_dtype dtype, size_t count, int n)
{
    T *const send = static_cast<T *>(kvprim_comm_buffer(comm, nullptr)), *const recv = send + count;
    fill_late<<<16, 256, 0, r.stream>>>(send, count, float(n % 2 + 1), 200000);
    OK(kvprim_all_reduce(comm, recv, send, count, dtype, KVPRIM_SUM, r.stream));
    count_unlike<<<64, 256, 0, r.stream>>>(recv, count, float((n % 2 + 1) * world), r.wrong);
    expect_none_wrong(r, "a sum after a kernel that triggers early, elements", count);
}

/* Both tensors lie in the buffer, and go through NCCL. */
static void test_early_triggers(rank_state &r)
{
    if (lacks_nccl("the kernels that start early are NCCL's"))
        return;
    for (int window = 0; window < 2; window++) {
        kvprim_comm comm = {};
        kvprim_comm_desc desc = desc_of(r, size_t(160) << 20);
        desc.nccl_window = window;
        desc.all_reduce_limit = 1;
        open_comm(r, &comm, desc);
        if (r.rank == 0 && window)
            printf("  %s\n", kvprim_comm_describe(&comm));
        float *const send = static_cast<float *>(kvprim_comm_buffer(&comm, nullptr));
        const size_t count = (size_t(72) << 20) / 4, part = count / size_t(world);
        for (int n = 0; n < (quick ? 2 : 10); n++) {
            sum_after_early<__nv_fp8_e4m3>(r, &comm, KVPRIM_F8E4M3, 4096, n);
            sum_after_early<__nv_fp8_e4m3>(r, &comm, KVPRIM_F8E4M3, 1 << 20, n);
            sum_after_early<float>(r, &comm, KVPRIM_F32, count, n);
            fill_late<<<16, 256, 0, r.stream>>>(send, part, float(n + r.rank), 200000);
            OK(kvprim_all_gather(&comm, send + count, send, part, KVPRIM_F32, r.stream));
            for (int from = 0; from < world; from++)
                count_unlike<<<64, 256, 0, r.stream>>>(send + count + size_t(from) * part, part, float(n + from),
                                                       r.wrong);
            expect_none_wrong(r, "a gather after a kernel that triggers early, round", size_t(n));
        }
        OK(kvprim_comm_check(&comm));
        OK(kvprim_comm_destroy(&comm));
    }
}

/* ---- processes, of which one dies ---- */

static __global__ void write_nowhere(int *at)
{
    *at = 1;
}

static int role_failed(const char *why)
{
    printf("  rank %d: %s: %s\n", only_rank, why, kvprim_last_error());
    return 1;
}

/* The context of this process's GPU dies. check says so; abort and destroy end. */
static int dead_context(kvprim_comm *comm, cudaStream_t stream)
{
    double took;
    write_nowhere<<<1, 1, 0, stream>>>(reinterpret_cast<int *>(8));
    if (watch(comm, 5, &took) != KVPRIM_ERROR_CUDA || !strstr(kvprim_last_error(), "an earlier kernel"))
        return role_failed("check says nothing of a dead context");
    const double begun = seconds();
    (void)kvprim_comm_abort(comm);
    if (seconds() - begun > abort_takes)
        return role_failed("abort took too long");
    return 0;
}

/* The last rank kills itself during sums, norms that follow sums, or exchanges. `big`: these sums are NCCL's, and the
   host waits for the stream. */
static int killed(kvprim_comm *comm, cudaStream_t stream, char *data, bool big, bool norms, bool exchanges)
{
    const size_t count = big ? 20 << 20 : 1000;
    const kvprim_dtype dtype = big ? KVPRIM_INT32 : KVPRIM_BF16;
    kvprim_norm_desc norm = {};
    norm.dtype = dtype, norm.tokens = 7, norm.hidden = 6144;
    norm.send = norm.out = data, norm.weight = static_cast<char *>(data) + (1 << 20);
    if (only_rank == world - 1)
        raise(SIGKILL);
    double took = 0;
    kvprim_status heard = KVPRIM_OK, aborted = KVPRIM_OK;
    std::string said;
    std::thread watchdog([&] {
        heard = watch(comm, 10, &took);
        said = kvprim_last_error();
        aborted = kvprim_comm_abort(comm);
    });
    kvprim_status called = KVPRIM_OK;
    for (int n = 0; n < 100 && called == KVPRIM_OK; n++)
        called = norms       ? kvprim_all_reduce_norm(comm, &norm, stream)
                 : exchanges ? kvprim_all_to_all(comm, data + (size_t(40) << 20), data, count, dtype, stream)
                             : kvprim_all_reduce(comm, data, data, count, dtype, KVPRIM_SUM, stream);
    const cudaError_t waited = cudaStreamSynchronize(stream);
    watchdog.join();
    printf("  rank %d heard after %.2f s: %s; abort: %s, stream: %s\n", only_rank, took, said.c_str(),
           kvprim_status_name(aborted), cudaGetErrorString(waited));
    const bool named = big || !comm->peer[0] || said.find("for rank " + std::to_string(world - 1)) != std::string::npos;
    /* NCCL's network may notice it */
    const bool told = heard == KVPRIM_ERROR_TIMEOUT || (big && heard == KVPRIM_ERROR_NCCL);
    return !told || took > 2.5 || aborted != KVPRIM_OK || !named || waited != cudaSuccess ||
           kvprim_comm_destroy(comm) != KVPRIM_OK;
}

/* A process that is one rank of a job of its own. */
static int role(const char *what)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = {};
    cudaStream_t stream;
    char *data;
    take_device(only_rank);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(reinterpret_cast<void **>(&data), size_t(80) << 20));
    CUDA(cudaMemsetAsync(data, 0, size_t(80) << 20, stream));
    rank_state r = {};
    r.rank = only_rank;
    desc = desc_of(r, 0, 1000);
    if (kvprim_comm_init(&comm, &desc) != KVPRIM_OK)
        return role_failed("init");
    for (int n = 0; n < 20; n++) {
        OK(kvprim_all_reduce(&comm, data, data, 1000 + size_t(n) * 1000, KVPRIM_BF16, KVPRIM_SUM, stream));
        OK(kvprim_all_reduce(&comm, data, data, 1000, KVPRIM_INT32, KVPRIM_SUM, stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    meet();
    const int code = strcmp(what, "dead") == 0
                         ? dead_context(&comm, stream)
                         : killed(&comm, stream, data, strcmp(what, "killed_big") == 0,
                                  strcmp(what, "killed_norm") == 0, strcmp(what, "killed_exchange") == 0);
    return code || counts->faults;
}

static void run_role(const char *name, const char *what)
{
    if (!strstr(name, only))
        return;
    std::vector<pid_t> pids;
    const int fd = open_shared();
    for (int r = 0; r < world; r++)
        pids.push_back(start({"role", what, std::to_string(r), std::to_string(world), std::to_string(fd)}));
    for (int r = 0; r < world; r++) {
        int status = 0;
        waitpid(pids[size_t(r)], &status, 0);
        const bool kills = strcmp(what, "dead") != 0 && r == world - 1;
        if (kills ? !WIFSIGNALED(status) : !WIFEXITED(status) || WEXITSTATUS(status))
            fail("process of rank %d: status %x", r, unsigned(status));
    }
    close(fd);
    finish_test(name);
}

static void run_roles()
{
    run_role("nccl: a process per GPU, one killed", "killed");
    run_role("nccl: a process per GPU, one killed, norms", "killed_norm");
    run_role("nccl: a process per GPU, one killed, sums of 80 MB", "killed_big");
    run_role("nccl: a process per GPU, one killed, exchanges", "killed_exchange");
    run_role("nccl: a process per GPU, a context dies", "dead");
}

static void warm_up_others(rank_state &)
{
}

int main(int argc, char **argv)
{
    if (argc == 6 && strcmp(argv[1], "role") == 0) {
        only_rank = atoi(argv[3]), world = atoi(argv[4]), gpus = count_gpus();
        map_shared(atoi(argv[5]));
        return role(argv[2]);
    }
    return run_program(argc, argv, run_roles, [] {
        run("kernels that let NCCL's start early", test_early_triggers);
        run("check during captures", test_check_during_capture);
        run("a rank late by a second", test_late);
        run("a rank that stays away", test_missing);
        run("a rank that comes after the others have given up", test_too_late);
        run("a watchdog beside cudaStreamSynchronize", test_watchdog);
        run("two communicators stuck in NCCL", test_two_stuck);
        run("an abort beside replays", test_abort_beside_replays);
        run("one rank aborts", test_one_aborts);
        run("groups that are stuck, or open at an abort", test_groups);
        run("calls during an abort", test_call_during_abort);
        run("memory after aborts", test_memory_after_aborts);
        run("graphs with collectives of NCCL's", test_graphs_of_nccl);
        run("init without the others", test_init_alone);
        run("init that fails on one rank", test_init_fails_on_one);
    });
}

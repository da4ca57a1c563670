/* SPDX-License-Identifier: MIT */
/* Tests the results of kvprim_nccl.h on two GPUs or more: every collective, type, size and place, enqueued and
   captured, in threads or processes (nccl_ranks.h says how to call it). test_nccl_faults.cu tests what goes wrong
   around them.

       nvcc -arch=native -std=c++17 -O2 -I. -DKVPRIM_IMPLEMENTATION tests/nccl/test_nccl_gpu.cu -lnccl && ./a.out */
#include "nccl_ranks.h"
#include <cmath>

__global__ void digest(const uint32_t *words, size_t count, unsigned long long *sum)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        atomicAdd(sum, (unsigned long long)(words[i]) * (2 * i + 1));
}

/* All ranks get the same bits, again and again. `work` adds a digest of what it got to a number on the GPU, which is in
   r.device[2]. */
static void expect_same_bits(rank_state &r, const std::function<void(unsigned long long *)> &work)
{
    unsigned long long *const sums = shared->scratch;
    unsigned long long *const on_gpu = reinterpret_cast<unsigned long long *>(r.device[2]), first = 0;
    for (int n = 0; n < 5; n++) {
        CUDA(cudaMemsetAsync(on_gpu, 0, 8, r.stream));
        work(on_gpu);
        download(&sums[r.rank], on_gpu, 8, r.stream);
        meet();
        CHECK(sums[r.rank] == sums[0]);
        CHECK(n == 0 || first == sums[0]);
        first = sums[0];
        meet();
    }
}

#include "test_norm.h"
#include "test_reductions.h"

/* Each rank receives `count` elements; send holds `world` times as many. */
template <class T>
static void enqueue_scatter(rank_state &r, kvprim_comm *comm, void *send, void *recv, size_t count, kvprim_dtype dtype,
                            uint64_t seed)
{
    const size_t all = count * size_t(world), first = count * size_t(r.rank);
    const unsigned blocks = unsigned(std::min<size_t>(256, all / 256 + 1));
    const bool exact = count * sizeof(T) <= own_limit_of(comm, true) / size_t(world);
    fill_values<T><<<blocks, 256, 0, r.stream>>>(static_cast<T *>(send), all, r.iteration, seed, r.rank, exact);
    if (recv == send)
        recv = static_cast<T *>(send) + first;
    OK(kvprim_reduce_scatter(comm, recv, send, count, dtype, KVPRIM_SUM, r.stream));
    verify<T><<<blocks, 256, 0, r.stream>>>(static_cast<const T *>(recv), count, r.iteration, seed, world, r.wrong,
                                            exact, first);
    CUDA(cudaGetLastError());
}

static void enqueue_scatter(rank_state &r, kvprim_comm *comm, void *send, void *recv, size_t count, kvprim_dtype dtype,
                            uint64_t seed)
{
    with_sum_type(dtype, [&](auto x) { enqueue_scatter<decltype(x)>(r, comm, send, recv, count, dtype, seed); });
}

__global__ void verify_gather(const float *got, size_t count, const uint64_t *iteration, uint64_t seed, int from,
                              uint32_t *wrong)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        if (bits_of(got[i]) != bits_of(value_at<float>(seed + *iteration, i, from, true)))
            atomicAdd(wrong, 1);
}

/* `count` floats per rank, some of all ones. */
static void enqueue_gather(rank_state &r, kvprim_comm *comm, void *send, void *recv, size_t count, uint64_t seed)
{
    const unsigned blocks = unsigned(std::min<size_t>(256, count / 256 + 1));
    float *const out = static_cast<float *>(recv);
    fill_values<float>
        <<<blocks, 256, 0, r.stream>>>(static_cast<float *>(send), count, r.iteration, seed, r.rank, true);
    OK(kvprim_all_gather(comm, out, send, count, KVPRIM_F32, r.stream));
    for (int from = 0; from < world; from++)
        verify_gather<<<blocks, 256, 0, r.stream>>>(out + size_t(from) * count, count, r.iteration, seed, from,
                                                    r.wrong);
    CUDA(cudaGetLastError());
}

static const kvprim_dtype sum_types[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32};

/* Whether it is one of floats.h, which are also those that own kernels reduce. */
static bool is_float(kvprim_dtype t)
{
    return t == KVPRIM_F16 || t == KVPRIM_BF16 || t == KVPRIM_F32 || t >= KVPRIM_F8E4M3;
}

static size_t size_of(kvprim_dtype t)
{
    return is_float(t)                            ? size_t(format_of(t).bytes)
           : t == KVPRIM_F64 || t == KVPRIM_INT64 ? 8
           : t == KVPRIM_INT32                    ? 4
                                                  : 1;
}

#include "test_exchange.h"

struct tensor_pair {
    char *send, *recv;
};

/* In place; apart; shifted by an element; shifted so that only one rank is aligned. */
enum { pairs = 4 };
static tensor_pair pair_of(const rank_state &r, int k, size_t element)
{
    const size_t shift = k == 2 ? element : k == 3 ? size_t(r.rank) * element : 0;
    char *const send = r.device[0] + shift;
    return {send, k == 0 ? send : r.device[1] + (k == 3 ? shift : 0)};
}

/* Own kernels sum up to this size in any world. */
static const size_t own_limit = size_t(8) << 20;

static void test_sums(rank_state &r)
{
    static const size_t counts[] = {1,    2,    7,     8,     9,     63,    64,     1000,   1023,   1024,    4096,
                                    8191, 8192, 16384, 65535, 65536, 70001, 131072, 262144, 524287, 1 << 20, 2000003};
    for (const kvprim_dtype t : sum_types)
        for (const size_t count : counts) {
            if (count * size_of(t) > own_limit || (quick && count > 70001))
                continue;
            for (int k = 0; k < pairs; k++) {
                const tensor_pair at = pair_of(r, k, size_of(t));
                enqueue_sum(r, &r.comm, r.stream, at.send, at.recv, count, t, count + uint64_t(k));
                expect_none_wrong(r, "count", count);
            }
        }
}

/* With and without whole packs; in one chunk and, at the end, in several. */
static void test_scatters(rank_state &r)
{
    const size_t most = std::min(size_t(24) << 20, own_limit_of(&r.comm, true) | own_limit) / size_t(world);
    for (const kvprim_dtype t : sum_types)
        for (size_t n = 1; n * size_of(t) <= (quick ? 6000 : most); n += n / 3 + 1)
            for (const size_t count : {n, n / 8 * 8}) {
                for (int k = 0; k < (count ? pairs : 0); k++) {
                    const tensor_pair at = pair_of(r, k, size_of(t));
                    enqueue_scatter(r, &r.comm, at.send, at.recv, count, t, count + uint64_t(k));
                }
                expect_none_wrong(r, "reduce_scatter, count", count);
            }
}

/* Tensors in the buffer, at an offset, on one rank only, and of sizes beyond own kernels, which go through NCCL; then
   the default stream. */
static void test_placement(rank_state &r)
{
    char *const buffer = static_cast<char *>(kvprim_comm_buffer(&r.comm, nullptr));
    for (const size_t count : {size_t(1000), size_t(50000), size_t(1100000), size_t(1100001)}) {
        enqueue_sum(r, &r.comm, r.stream, buffer + 4096, buffer + 4096, count, KVPRIM_BF16, 1);
        enqueue_sum(r, &r.comm, r.stream, buffer + 2, buffer + (8 << 20), count, KVPRIM_BF16, 2);
        enqueue_sum(r, &r.comm, r.stream, r.rank == 0 ? buffer : r.device[0],
                    r.rank == 1 ? buffer + (16 << 20) : r.device[1], count, KVPRIM_F32, 3);
        enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[1], count, KVPRIM_F16, 5);
        expect_none_wrong(r, "in the buffer, count", count);
        if (leaves_out("all ranks share the default stream: one would wait behind another"))
            continue;
        enqueue_sum(r, &r.comm, nullptr, r.device[0], r.device[1], count, KVPRIM_F16, 4);
        CUDA(cudaStreamSynchronize(cudaStreamLegacy));
        expect_none_wrong(r, "on the default stream, count", count);
    }
}

/* Nothing synchronises in between. Sizes lie on both sides of every change of kernel, and every third call is another
   collective. */
static void test_sizes_in_turn(rank_state &r)
{
    uint64_t random = 7;
    for (int n = 0; n < (quick ? 40 : 1500); n++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        static const size_t fixed[] = {1024, 524288, 1024, 1, 131072, 5, 300000, 2048};
        const size_t count = n < 200 ? fixed[n % 8] : 1 + (random >> 33) % (size_t(1) << (1 + n % 19));
        if (count * 4 > own_limit)
            continue;
        if (n % 6 == 2 && count * 4 * size_t(world) <= room_bytes)
            enqueue_gather(r, &r.comm, r.device[n % 2], r.device[2], count, random);
        if (n % 6 == 5)
            enqueue_scatter(r, &r.comm, r.device[n % 2], r.device[2], (count + 7) / 8, sum_types[n % 3], random);
        enqueue_sum(r, &r.comm, r.stream, r.device[n % 2], r.device[n % 3 == 0 ? n % 2 : 2], count, sum_types[n % 3],
                    random);
        if (n % 100 == 99) {
            if (r.rank == n / 100 % world)
                sleep_ms(3);
            expect_none_wrong(r, "sizes in turn, call", size_t(n));
        }
    }
    expect_none_wrong(r, "sizes in turn", 0);
}

static void test_graph(rank_state &r)
{
    static const size_t counts[] = {1024, 262144, 1024, 7, 40000, 1000000};
    replay(r, quick ? 20 : 1000, "graph", [&] {
        advance<<<1, 1, 0, r.stream>>>(r.iteration);
        for (int k = 0; k < 6; k++)
            if (counts[k] * 2 <= own_limit)
                enqueue_sum(r, &r.comm, r.stream, r.device[0], k % 2 ? r.device[0] : r.device[1], counts[k],
                            KVPRIM_BF16, uint64_t(1000 * k));
        OK(kvprim_all_gather(&r.comm, r.device[2], r.device[1], 333, KVPRIM_BF16, r.stream));
    });
    OK(kvprim_comm_check(&r.comm));
    enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[1], 5000, KVPRIM_F16, 5);
    expect_none_wrong(r, "after the graph", 0);
    CUDA(cudaMemsetAsync(r.iteration, 0, sizeof *r.iteration, r.stream));
    meet();
}

static void test_same_bits(rank_state &r)
{
    for (const size_t count : {size_t(2000), size_t(100000), size_t(1000000)})
        expect_same_bits(r, [&](unsigned long long *sum) {
            fill_values<__nv_bfloat16><<<256, 256, 0, r.stream>>>(reinterpret_cast<__nv_bfloat16 *>(r.device[0]), count,
                                                                  r.iteration, 99, r.rank, true);
            OK(kvprim_all_reduce(&r.comm, r.device[1], r.device[0], count, KVPRIM_BF16, KVPRIM_SUM, r.stream));
            digest<<<256, 256, 0, r.stream>>>(reinterpret_cast<uint32_t *>(r.device[1]), count / 2, sum);
        });
}

static void test_deterministic(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_of(r, 0, 0, 1);
    if (!r.comm.peer[0])
        return IS(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_UNSUPPORTED);
    open_comm(r, &comm, desc);
    const size_t most = (size_t(40) << 20) / 4 - 16;
    for (const size_t count : {size_t(3), size_t(100000), size_t(4 << 20) + 5, most, most + 2})
        for (const kvprim_dtype t : sum_types) {
            enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], count, t, count);
            expect_none_wrong(r, "deterministic, count", count);
            if (count > size_t(world)) {
                enqueue_scatter(r, &comm, r.device[0], r.device[1], count / size_t(world), t, count);
                expect_none_wrong(r, "deterministic, reduce_scatter, count", count);
            }
        }
    OK(kvprim_comm_destroy(&comm));
}

/* Between two ranks, large tensors go in a pipeline, earlier if there are few multiprocessors. Small sums between them
   use the same slots. */
static void test_pipelines(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.max_sms = fitting_sms(24);
    open_comm(r, &comm, desc);
    for (const kvprim_dtype t : sum_types)
        for (const size_t bytes : {(size_t(12) << 20) + 48, size_t(31) << 20}) {
            const size_t count = bytes / size_of(t) + (bytes % 64 ? 1 : 0);
            for (int k = 0; k < pairs; k++) {
                const tensor_pair at = pair_of(r, k, size_of(t));
                enqueue_sum(r, &comm, r.stream, at.send, at.recv, count, t, count + uint64_t(k));
                enqueue_sum(r, &comm, r.stream, r.device[0], r.device[2], 1000 + uint64_t(k), t, uint64_t(k));
                enqueue_scatter(r, &comm, at.send, at.recv, count / size_t(world), t, count + 7 * uint64_t(k));
                expect_none_wrong(r, "stream, place", size_t(k));
            }
        }
    replay(r, quick ? 3 : 30, "graph of pipelines", [&] {
        advance<<<1, 1, 0, r.stream>>>(r.iteration);
        for (int k = 0; k < 3; k++)
            enqueue_sum(r, &comm, r.stream, r.device[0], r.device[k % 2], (size_t(7) << 20) + size_t(k), KVPRIM_BF16,
                        uint64_t(k));
    });
    CUDA(cudaMemsetAsync(r.iteration, 0, sizeof *r.iteration, r.stream));
    OK(kvprim_comm_check(&comm));
    OK(kvprim_comm_destroy(&comm));
    meet();
}

/* ---- every collective, type and operation ---- */

/* Small integers. Every type holds their sums and products exactly. */
static int small_value(kvprim_dtype t, kvprim_op op, size_t i, int rank)
{
    const bool fp8 = t == KVPRIM_F8E4M3 || t == KVPRIM_F8E5M2;
    const size_t mixed = i * 7 + i / 5 + size_t(op == KVPRIM_AVG ? 0 : rank) * 3;
    return 1 + int(mixed % (fp8 || op == KVPRIM_PROD ? 2 : 13));
}

static void put(char *at, kvprim_dtype t, int v)
{
    const uint32_t bits = float_to(format_of(t), float(v));
    const double x = v;
    const int64_t n = v;
    memcpy(at, is_float(t) ? (const void *)&bits : t == KVPRIM_F64 ? (const void *)&x : (const void *)&n, size_of(t));
}

static double get(const char *at, kvprim_dtype t)
{
    uint32_t bits = 0;
    double x = 0;
    memcpy(is_float(t) ? (void *)&bits : (void *)&x, at, size_of(t));
    return is_float(t) ? double(float_from(format_of(t), bits)) : x;
}

/* Within two units in the last place of the larger one. Integers have no near results. */
static bool is_near(const char *a, const char *b, kvprim_dtype t)
{
    if (!is_float(t) && t != KVPRIM_F64)
        return false;
    const int digits = is_float(t) ? format_of(t).mantissa_bits : 52;
    const double x = get(a, t), y = get(b, t);
    return std::fabs(x - y) <= std::ldexp(std::max(std::fabs(x), std::fabs(y)), 1 - digits);
}

/* NCCL multiplies by 1 / world before it sums. */
static bool is_rounded(kvprim_op op)
{
    return op == KVPRIM_AVG && (world & (world - 1)) != 0;
}

static int reduced(kvprim_dtype t, kvprim_op op, size_t i)
{
    int all = small_value(t, op, i, 0);
    for (int r = 1; r < world; r++) {
        const int v = small_value(t, op, i, r);
        all = op == KVPRIM_SUM    ? all + v
              : op == KVPRIM_PROD ? all * v
              : op == KVPRIM_MAX  ? std::max(all, v)
              : op == KVPRIM_MIN  ? std::min(all, v)
                                  : v;
    }
    return all;
}

/* What a call reads, or what it must have written: elements with the values that the function returns. */
struct expectation {
    std::string name;
    kvprim_dtype dtype;
    size_t count;
    std::function<int(size_t)> value;
    bool rounded = false; /* true: the result need only be near */
};

static void put_all(rank_state &r, char *at, const expectation &e)
{
    std::vector<char> host(e.count * size_of(e.dtype));
    for (size_t i = 0; i < e.count; i++)
        put(&host[i * size_of(e.dtype)], e.dtype, e.value(i));
    upload(r, at, host.data(), host.size());
}

/* Bytes after the result that must keep their value, 0xa5. */
static const size_t poisoned = 16;

static void poison(rank_state &r, char *at, const expectation &e)
{
    CUDA(cudaMemsetAsync(at, 0xa5, e.count * size_of(e.dtype) + poisoned, r.stream));
}

static void expect(rank_state &r, const char *at, const expectation &e, size_t guard_bytes = poisoned)
{
    const size_t bytes = e.count * size_of(e.dtype);
    std::vector<char> got(bytes + guard_bytes), expected(bytes + guard_bytes, char(0xa5));
    for (size_t i = 0; i < e.count; i++)
        put(&expected[i * size_of(e.dtype)], e.dtype, e.value(i));
    download(got.data(), at, bytes + guard_bytes, r.stream);
    for (size_t b = 0; b < bytes + guard_bytes; b++)
        if (got[b] != expected[b]) {
            const size_t element = b / size_of(e.dtype) * size_of(e.dtype);
            if (e.rounded && b < bytes && is_near(&got[element], &expected[element], e.dtype))
                continue;
            fail("rank %d: %s of %zu elements of type %d: byte %zu is %02x instead of %02x", r.rank, e.name.c_str(),
                 e.count, int(e.dtype), b, got[b] & 255, expected[b] & 255);
            return;
        }
}

static std::string place_of(const rank_state &r, const char *send)
{
    return send >= r.device[0] && send < r.device[0] + room_bytes ? " outside" : " inside";
}

static void one_all_reduce(rank_state &r, char *send, char *recv, size_t count, kvprim_dtype t, kvprim_op op)
{
    if (send != recv)
        poison(r, recv, {"", t, count, {}});
    else
        poison(r, send, {"", t, count, {}});
    put_all(r, send, {"", t, count, [=, &r](size_t i) { return small_value(t, op, i, r.rank); }});
    OK(kvprim_all_reduce(&r.comm, recv, send, count, t, op, r.stream));
    expect(r, recv,
           {"all_reduce " + std::to_string(op) + place_of(r, send), t, count,
            [=](size_t i) { return reduced(t, op, i); }, is_rounded(op)});
}

static void one_reduce_scatter(rank_state &r, char *send, char *recv, size_t count, kvprim_dtype t, kvprim_op op)
{
    const size_t all = count * size_t(world), mine = count * size_t(r.rank);
    const expectation given = {"", t, all, [=, &r](size_t i) { return small_value(t, op, i, r.rank); }};
    const expectation result = {"reduce_scatter " + std::to_string(op) + place_of(r, send), t, count,
                                [=](size_t i) { return reduced(t, op, mine + i); }, is_rounded(op)};
    const bool in_place = send == recv;
    put_all(r, send, given);
    if (in_place)
        recv = send + mine * size_of(t);
    else
        poison(r, recv, result);
    OK(kvprim_reduce_scatter(&r.comm, recv, send, count, t, op, r.stream));
    expect(r, recv, result, in_place ? 0 : poisoned); /* in place, the input follows it */
}

static void one_all_gather(rank_state &r, char *send, char *recv, size_t count, kvprim_dtype t)
{
    const auto from = [=](int rank, size_t i) { return small_value(t, KVPRIM_SUM, i + 1, rank); };
    poison(r, recv, {"", t, count * size_t(world), {}});
    if (send == recv)
        send = recv + size_t(r.rank) * count * size_of(t);
    put_all(r, send, {"", t, count, [=, &r](size_t i) { return from(r.rank, i); }});
    OK(kvprim_all_gather(&r.comm, recv, send, count, t, r.stream));
    expect(r, recv,
           {"all_gather", t, count * size_t(world), [=](size_t i) { return from(int(i / count), i % count); }});
}

static void one_broadcast(rank_state &r, char *buf, size_t count, kvprim_dtype t, int root)
{
    poison(r, buf, {"", t, count, {}});
    if (r.rank == root)
        put_all(r, buf, {"", t, count, [=](size_t i) { return small_value(t, KVPRIM_SUM, i, root); }});
    OK(kvprim_broadcast(&r.comm, buf, count, t, root, r.stream));
    expect(r, buf, {"broadcast", t, count, [=](size_t i) { return small_value(t, KVPRIM_SUM, i, root); }});
}

/* Sends around a ring; rank 0 receives last. */
static void one_ring(rank_state &r, char *send, char *recv, size_t count, kvprim_dtype t)
{
    const int next = (r.rank + 1) % world, last = (r.rank + world - 1) % world;
    poison(r, recv, {"", t, count, {}});
    put_all(r, send, {"", t, count, [=, &r](size_t i) { return small_value(t, KVPRIM_SUM, i, r.rank); }});
    if (r.rank == 0)
        OK(kvprim_send(&r.comm, send, count, t, next, r.stream));
    OK(kvprim_recv(&r.comm, recv, count, t, last, r.stream));
    if (r.rank != 0)
        OK(kvprim_send(&r.comm, send, count, t, next, r.stream));
    expect(r, recv, {"send, recv", t, count, [=](size_t i) { return small_value(t, KVPRIM_SUM, i, last); }});
}

/* Every rank sends to all, itself too, two tensors of different sizes, and all of them at once. */
static void enqueue_exchange(rank_state &r, size_t count)
{
    const size_t step = 2 * count + 1;
    const float *const send = reinterpret_cast<const float *>(r.device[0]);
    float *const recv = reinterpret_cast<float *>(r.device[1]);
    OK(kvprim_group_start(&r.comm));
    for (int peer = 0; peer < world; peer++) {
        const size_t at = size_t(peer) * step;
        OK(kvprim_send(&r.comm, send + at, count, KVPRIM_F32, peer, r.stream));
        OK(kvprim_send(&r.comm, send + at + count, count + 1, KVPRIM_F32, peer, r.stream));
        OK(kvprim_recv(&r.comm, recv + at, count, KVPRIM_F32, peer, r.stream));
        OK(kvprim_recv(&r.comm, recv + at + count, count + 1, KVPRIM_F32, peer, r.stream));
    }
    OK(kvprim_group_end(&r.comm));
}

/* What rank `from` sends to rank `to` has this at i. */
static double exchanged(int from, int to, size_t i)
{
    return small_value(KVPRIM_F32, KVPRIM_SUM, i + size_t(to) * 3, from);
}

static void test_groups(rank_state &r)
{
    if (lacks_nccl("groups are NCCL's"))
        return;
    static const size_t counts[] = {1, 1023, 65536, 1 << 20};
    for (const size_t count : counts)
        for (int graph = 0; graph < (quick && count > 1023 ? 0 : 2); graph++) {
            const size_t step = 2 * count + 1, all = step * size_t(world);
            cudaGraphExec_t exec = nullptr;
            if (graph)
                exec = captured(r, [&] { enqueue_exchange(r, count); });
            for (int replay = 0; replay <= 2 * graph; replay++) {
                poison(r, r.device[1], {"", KVPRIM_F32, all, {}});
                put_all(r, r.device[0],
                        {"", KVPRIM_F32, all, [&](size_t i) { return exchanged(r.rank, int(i / step), i % step); }});
                if (graph)
                    CUDA(cudaGraphLaunch(exec, r.stream));
                else
                    enqueue_exchange(r, count);
                expect(r, r.device[1], {"group", KVPRIM_F32, all, [&](size_t i) {
                                            return exchanged(int(i / step), r.rank, i % step);
                                        }});
            }
            if (graph)
                destroy_graph(exec);
        }
    OK(kvprim_group_start(&r.comm));
    IS(kvprim_all_reduce(&r.comm, r.device[1], r.device[0], 8, KVPRIM_BF16, KVPRIM_SUM, r.stream),
       KVPRIM_ERROR_ARGUMENT);
    IS(kvprim_group_end(&r.comm), KVPRIM_ERROR_ARGUMENT);
    OK(kvprim_comm_check(&r.comm));
    meet();
}

/* Sends around a ring: rank 0 receives last, or all in groups. */
static void enqueue_ring(rank_state &r, kvprim_comm *comm, size_t count, bool group)
{
    const int next = (r.rank + 1) % world, last = (r.rank + world - 1) % world;
    float *const send = reinterpret_cast<float *>(r.device[0]), *const recv = reinterpret_cast<float *>(r.device[1]);
    fill_values<float><<<64, 256, 0, r.stream>>>(send, count, r.iteration, 5, r.rank, true);
    if (group)
        OK(kvprim_group_start(comm));
    if (r.rank == 0)
        OK(kvprim_send(comm, send, count, KVPRIM_F32, next, r.stream));
    OK(kvprim_recv(comm, recv, count, KVPRIM_F32, last, r.stream));
    if (r.rank != 0)
        OK(kvprim_send(comm, send, count, KVPRIM_F32, next, r.stream));
    if (group)
        OK(kvprim_group_end(comm));
    verify_gather<<<64, 256, 0, r.stream>>>(recv, count, r.iteration, 5, last, r.wrong);
    CUDA(cudaGetLastError());
}

static void enqueue_broadcast(rank_state &r, kvprim_comm *comm, size_t count)
{
    float *const buf = reinterpret_cast<float *>(r.device[0]);
    fill_values<float><<<64, 256, 0, r.stream>>>(buf, count, r.iteration, 5, r.rank, true);
    OK(kvprim_broadcast(comm, buf, count, KVPRIM_F32, world - 1, r.stream));
    verify_gather<<<64, 256, 0, r.stream>>>(buf, count, r.iteration, 5, world - 1, r.wrong);
    CUDA(cudaGetLastError());
}

/* The first call of a communicator, by NCCL, is captured: NCCL connects the ranks meanwhile. Processes capture in the
   strictest mode, which is torch's. */
static void first_in_graph(rank_state &r, const char *what, const std::function<void(kvprim_comm *)> &call)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.no_kernels = 1;
    open_comm(r, &comm, desc);
    const cudaGraphExec_t exec = captured(
        r, [&] { call(&comm); }, processes ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeThreadLocal);
    for (int n = 0; n < 3; n++)
        CUDA(cudaGraphLaunch(exec, r.stream));
    expect_none_wrong(r, what, 0);
    meet();
    destroy_graph(exec);
    OK(kvprim_comm_check(&comm));
    OK(kvprim_comm_destroy(&comm));
}

static void test_first_in_graphs(rank_state &r)
{
    if (lacks_nccl("a first call of NCCL's is captured"))
        return;
    const size_t count = 5000, many = size_t(4) << 20;
    void *const a = r.device[0], *const b = r.device[1];
    first_in_graph(r, "an exchange",
                   [&](kvprim_comm *comm) { enqueue_at(r, comm, exchange_of(to_allv, KVPRIM_F32, count, 0), 0, 77); });
    first_in_graph(r, "sends and receives", [&](kvprim_comm *comm) { enqueue_ring(r, comm, count, false); });
    first_in_graph(r, "a group", [&](kvprim_comm *comm) { enqueue_ring(r, comm, count, true); });
    for (const size_t n : {count, many}) { /* NCCL connects other channels for many */
        first_in_graph(r, "a broadcast", [&](kvprim_comm *comm) { enqueue_broadcast(r, comm, n); });
        first_in_graph(r, "a sum", [&](kvprim_comm *comm) { enqueue_sum(r, comm, r.stream, a, b, n, KVPRIM_F32, 5); });
    }
    first_in_graph(r, "a gather", [&](kvprim_comm *comm) { enqueue_gather(r, comm, a, b, count, 5); });
    first_in_graph(r, "a scatter", [&](kvprim_comm *comm) { enqueue_scatter(r, comm, a, b, count, KVPRIM_F32, 5); });
}

static void test_collectives(rank_state &r)
{
    static const size_t counts[] = {1, 7, 1023, 65536};
    const char *const of_nccl = "integers, F64, PROD, broadcasts, sends and receives are NCCL's";
    char *const buffer = static_cast<char *>(kvprim_comm_buffer(&r.comm, nullptr));
    for (int t = KVPRIM_U8; t <= KVPRIM_F8E5M2; t++)
        for (const size_t count : counts)
            for (int place = 0; place < 4; place++) { /* in place or not, inside the buffer or not */
                if (quick && (count > 7 || t > KVPRIM_F32))
                    continue;
                const kvprim_dtype type = kvprim_dtype(t);
                const size_t shift = count == 1023 ? size_of(type) : 0;
                char *const send = (place & 2 ? buffer : r.device[0]) + shift;
                char *const recv = place & 1 ? send : (place & 2 ? buffer + (16 << 20) : r.device[1]) + shift;
                for (int op = 0; op <= KVPRIM_AVG; op++) {
                    if ((op == KVPRIM_PROD || !is_float(type)) && leaves_out(of_nccl))
                        continue;
                    one_all_reduce(r, send, recv, count, type, kvprim_op(op));
                    one_reduce_scatter(r, send, recv, count, type, kvprim_op(op));
                }
                one_all_gather(r, send, recv, count, type);
                if (leaves_out(of_nccl))
                    continue;
                one_broadcast(r, send, count, type, int(count) % world);
                if (send != recv)
                    one_ring(r, send, recv, count, type);
            }
    OK(kvprim_comm_check(&r.comm));
}

static void one_gather(rank_state &r, size_t count, size_t send_shift, size_t recv_shift)
{
    std::vector<unsigned char> mine(count), got(count * size_t(world) + 16), expected(got.size(), 0xa5);
    const auto byte = [count](size_t i, int rank) {
        return (unsigned char)(i % 11 < 7 ? 0xff : (i * 31 + i / 256 + size_t(rank) * 5 + count));
    };
    for (size_t i = 0; i < count; i++)
        mine[i] = byte(i, r.rank);
    for (int from = 0; from < world; from++)
        for (size_t i = 0; i < count; i++)
            expected[size_t(from) * count + i] = byte(i, from);
    char *const send = r.device[0] + send_shift, *const recv = r.device[1] + recv_shift;
    CUDA(cudaMemsetAsync(recv, 0xa5, expected.size(), r.stream));
    upload(r, send, mine.data(), count);
    OK(kvprim_all_gather(&r.comm, recv, send, count, KVPRIM_U8, r.stream));
    download(got.data(), recv, got.size(), r.stream);
    if (got != expected)
        fail("rank %d: all_gather of %zu bytes shifted by %zu to %zu", r.rank, count, send_shift, recv_shift);
}

/* Bytes of any value, count and place, by own kernels in one chunk and in several, and by NCCL. */
static void test_gathers(rank_state &r)
{
    const size_t most = quick ? 3000 : std::min(size_t(9) << 20, (room_bytes - 64) / size_t(world));
    for (size_t n = 1; n < most; n += n / 3 + 1)
        for (const size_t count : {n, n / 16 * 16})
            for (size_t shift = 0; shift < (count == 0 ? 0u : count < 600000 ? 9u : 1u); shift += 4)
                one_gather(r, count, shift, shift / 4);
    for (const size_t shift : {4, 3}) /* by 4 bytes and by one */
        one_gather(r, quick ? 4096 : 400000, shift, 2 * shift);
    for (const size_t count : {size_t(320) << 10, size_t(5) << 20}) /* the other kernels, in quick tests too */
        for (const size_t shift : {0, 4})
            one_gather(r, count, shift, shift);
}

/* Kernels that are launched dependent on one that ends late read what it wrote, enqueued and captured. */
static void enqueue_dependent(rank_state &r, size_t count, int number)
{
    float *const send = reinterpret_cast<float *>(r.device[0]), *const recv = reinterpret_cast<float *>(r.device[1]);
    fill_late<<<16, 256, 0, r.stream>>>(send, count, float(number + r.rank), 30000);
    OK(kvprim_all_reduce(&r.comm, recv, send, count, KVPRIM_F32, KVPRIM_SUM, r.stream));
    count_unlike<<<16, 256, 0, r.stream>>>(recv, count, float(number * world + world * (world - 1) / 2), r.wrong);
    fill_late<<<16, 256, 0, r.stream>>>(send, count, float(-number - r.rank), 30000);
    OK(kvprim_all_gather(&r.comm, recv, send, count, KVPRIM_F32, r.stream));
    for (int from = 0; from < world; from++)
        count_unlike<<<16, 256, 0, r.stream>>>(recv + size_t(from) * count, count, float(-number - from), r.wrong);
    CUDA(cudaGetLastError());
}

static void test_dependent(rank_state &r)
{
    static const size_t counts[] = {500, 30000, 300000};
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, device_of(r.rank)));
    int driver;
    CUDA(cudaDriverGetVersion(&driver));
    if (r.comm.peer[0] && driver >= 12030 && device.major >= 9) /* older drivers cannot capture such launches */
        CHECK(strstr(kvprim_comm_describe(&r.comm), "multiprocessors, dependent launch") != nullptr);
    for (int n = 1; n < 20; n++)
        enqueue_dependent(r, counts[n % 3], n);
    expect_none_wrong(r, "after a kernel that ends late", 0);
    replay(r, 10, "after a kernel that ends late, in a graph", [&] {
        for (int n = 1; n < 7; n++)
            enqueue_dependent(r, counts[n % 3], n);
    });
}

/* ---- several communicators ---- */

static void with_another(rank_state &r, int no_pdl)
{
    kvprim_comm other = {};
    const cudaStream_t stream = r.other_stream;
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.no_pdl = no_pdl;
    open_comm(r, &other, desc);
    CHECK(!no_pdl || !other.peer[0] || strstr(kvprim_comm_describe(&other), "no dependent launch") != nullptr);
    CUDA(cudaStreamSynchronize(r.stream));
    for (int n = 0; n < (quick ? 20 : 600); n++) {
        static const size_t counts[] = {100, 8192, 200000, 1000000, 3};
        enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[0], counts[n % 5], KVPRIM_BF16, uint64_t(n));
        enqueue_sum(r, &other, stream, r.device[1], r.device[2], counts[n % 4], KVPRIM_F32, uint64_t(n));
    }
    CUDA(cudaStreamSynchronize(stream));
    expect_none_wrong(r, "two communicators", 0);
    OK(kvprim_comm_check(&other));
    OK(kvprim_comm_destroy(&other));
}

static void test_two_communicators(rank_state &r)
{
    with_another(r, 0);
    with_another(r, 1);
}

/* ---- what a descriptor may ask for ---- */

static void use(rank_state &r, const kvprim_comm_desc &desc, const char *says)
{
    kvprim_comm comm = {};
    open_comm(r, &comm, desc);
    if (!strstr(kvprim_comm_describe(&comm), says))
        fail("rank %d: \"%s\" does not say \"%s\"", r.rank, kvprim_comm_describe(&comm), says);
    for (const size_t count : {size_t(3), size_t(5000), size_t(300000), size_t(3000001)})
        for (int n = 0; n < 3; n++) {
            enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], count, sum_types[n], count);
            enqueue_scatter(r, &comm, r.device[2], r.device[1], count / 4 + 1, sum_types[n], count);
        }
    CUDA(cudaStreamSynchronize(r.stream));
    OK(kvprim_comm_check(&comm)); /* names the rank that did not come; expect_none_wrong asks r.comm */
    expect_none_wrong(r, says, 0);
    for (const int64_t tokens : {1, 40, 200}) /* also where a token has more packs than a block has slots */
        norm_once(r, &comm,
                  norm_call_of(r, KVPRIM_BF16, tokens, tokens == 200 ? 4096 : 16384, uint64_t(tokens), !comm.peer[0]),
                  says);
    OK(kvprim_comm_check(&comm));
    OK(kvprim_comm_destroy(&comm));
}

static void test_choices(rank_state &r)
{
    const bool own = r.comm.peer[0] != nullptr;
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.no_kernels = r.rank == 0;
    if (!leaves_out("own kernels off, and limits below the sizes, need NCCL"))
        use(r, desc,
            r.rank == 0 ? "off: desc->no_kernels is 1"
            : own       ? "off: another rank's kernels are off"
                        : "off: ");
    for (const int sms : {1, 16, 1000}) {
        const std::string says = "at most " + std::to_string(fitting_sms(std::min(sms, 100))) + " ";
        desc = desc_of(r, 0);
        desc.max_sms = fitting_sms(r.rank == 0 ? sms : 100);
        use(r, desc, own ? says.c_str() : "off: ");
    }
    desc = desc_of(r, 4096);
    desc.all_reduce_limit = 12345, desc.reduce_scatter_limit = 1, desc.all_gather_limit = 77;
    if (!one_gpu)
        use(r, desc,
            own ? "all_gather up to 77 bytes received, all_reduce and reduce_scatter up to 12345 and 1 sent" : "off");
    desc = desc_of(r, 0);
    desc.all_gather_limit = 100 + size_t(r.rank);
    kvprim_comm comm = {};
    CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_ARGUMENT, "all_gather_limit");
    desc = desc_of(r, size_t(8) << 20);
    desc.nccl_window = 1;
    use(r, desc, "buffer of 8388608 bytes");
    desc = desc_of(r, 0);
    desc.exchange = exchange_by_meeting, desc.exchange_context = &r;
    use(r, desc, own ? "on, " : "off: ");
    desc = desc_of(r, 0);
    desc.launch_dependents = r.rank != 0; /* whether what follows starts early is each rank's own affair */
    const bool early = strstr(kvprim_comm_describe(&r.comm), ", dependent launch") && r.rank != 0;
    if (!leaves_out("what follows starts early, and then holds multiprocessors for which other ranks wait"))
        use(r, desc, early ? "dependent launch, also of what follows" : own ? "on, " : "off: ");
}

/* With a communicator of NCCL's, which the caller ends. */
static kvprim_comm_desc desc_with_nccl(const rank_state &r)
{
    ncclUniqueId id;
    ncclComm_t nccl = nullptr;
    kvprim_comm_desc desc = desc_of(r, 0);
    memcpy(&id, &desc.id, sizeof id);
    CHECK(ncclCommInitRank(&nccl, world, id, r.rank) == ncclSuccess);
    desc.nccl = nccl;
    return desc;
}

static void test_given_communicator(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_with_nccl(r);
    desc.rank = r.rank == world - 1 ? 0 : r.rank; /* the rank that is wrong tells the others */
    CHECK_ERROR(kvprim_comm_init(&comm, &desc), r.rank == world - 1 ? KVPRIM_ERROR_ARGUMENT : KVPRIM_ERROR_CUDA,
                r.rank == world - 1 ? "desc->nccl is rank" : "failed, its own message says why");
    desc.rank = r.rank;
    for (int n = 0; n < 2; n++) { /* the caller's communicator outlives these */
        desc.nccl_window = n;
        use(r, desc, "the caller's communicator");
    }
    CHECK(ncclCommDestroy(desc.nccl) == ncclSuccess);
}

/* One rank ends long after the others, who by then wait for it in their next init, and frees what was theirs. */
static void test_end_late(rank_state &r)
{
    kvprim_comm comm = {};
    const kvprim_comm_desc desc = desc_with_nccl(r);
    for (int late = 0; late < world; late += world - 1) {
        open_comm(r, &comm, desc);
        sleep_ms(r.rank == late ? 1500 : 0);
        OK(kvprim_comm_destroy(&comm));
    }
    open_comm(r, &comm, desc);
    OK(kvprim_comm_destroy(&comm));
    CHECK(ncclCommDestroy(desc.nccl) == ncclSuccess);
}

/* Fills `all` with this rank's pointers to every rank's memory. */
static void map_all(rank_state &r, void *mine, void **all)
{
    cudaIpcMemHandle_t handle;
    if (processes)
        CUDA(cudaIpcGetMemHandle(&handle, mine));
    shared->scratch[r.rank] = uintptr_t(mine);
    memcpy(shared->bytes[r.rank], &handle, sizeof handle);
    meet();
    for (int other = 0; other < world; other++) {
        all[other] = reinterpret_cast<void *>(uintptr_t(shared->scratch[other]));
        memcpy(&handle, shared->bytes[other], sizeof handle);
        if (processes && other != r.rank)
            CUDA(cudaIpcOpenMemHandle(&all[other], handle, cudaIpcMemLazyEnablePeerAccess));
    }
    meet();
}

static void test_given_memory(rank_state &r)
{
    void *mine, *all[8] = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    if (!r.comm.peer[0])
        return;
    desc.peer_bytes = size_t(16) << 20;
    CUDA(cudaMalloc(&mine, desc.peer_bytes + 4096));
    CUDA(cudaMemset(mine, 0xa5, desc.peer_bytes + 4096));
    CUDA(cudaDeviceSynchronize()); /* the kernels' streams do not wait for it */
    map_all(r, mine, all);
    desc.peers = all;
    for (const int sms : {0, 1000}) { /* more blocks have fewer slots each */
        desc.max_sms = fitting_sms(sms), desc.id = desc_of(r, 0).id;
        use(r, desc, "in the caller's memory");
    }
    std::vector<char> end(4096);
    CUDA(cudaMemcpy(end.data(), static_cast<char *>(mine) + desc.peer_bytes, 4096, cudaMemcpyDeviceToHost));
    CHECK(std::count(end.begin(), end.end(), char(0xa5)) == 4096);
    meet();
    for (int other = 0; other < world; other++)
        if (processes && other != r.rank)
            CUDA(cudaIpcCloseMemHandle(all[other]));
    meet();
    CUDA(cudaFree(mine));
}

/* ---- bad input ---- */

/* The tests without a GPU have all arguments that are refused. */
static void test_bad_calls(rank_state &r)
{
    cudaStream_t foreign;
    kvprim_comm moved = r.comm;
    CUDA(cudaSetDevice((device_of(r.rank) + 1) % gpus));
    CUDA(cudaStreamCreateWithFlags(&foreign, cudaStreamNonBlocking));
    const auto sum_on = [&](cudaStream_t stream) {
        return kvprim_all_reduce(&r.comm, r.device[1], r.device[0], 8, KVPRIM_BF16, KVPRIM_SUM, stream);
    };
    if (gpus > 1)
        CHECK_ERROR(sum_on(r.stream), KVPRIM_ERROR_ARGUMENT, "current device");
    CUDA(cudaSetDevice(device_of(r.rank)));
    if (gpus > 1)
        CHECK_ERROR(sum_on(foreign), KVPRIM_ERROR_ARGUMENT, "stream");
    CUDA(cudaStreamDestroy(foreign));
    IS(kvprim_all_reduce(&moved, r.device[1], r.device[0], 8, KVPRIM_BF16, KVPRIM_SUM, r.stream),
       KVPRIM_ERROR_ARGUMENT);
    OK(kvprim_all_reduce(&r.comm, nullptr, nullptr, 0, KVPRIM_BF16, KVPRIM_SUM, r.stream));
    IS(kvprim_all_reduce(&r.comm, r.device[0] + 4, r.device[0], 8, KVPRIM_BF16, KVPRIM_SUM, r.stream),
       KVPRIM_ERROR_OVERLAP);
    std::vector<size_t> counts(size_t(world * world), SIZE_MAX - 7);
    IS(kvprim_all_to_allv(&r.comm, r.device[1], r.device[0], counts.data(), KVPRIM_U8, r.stream), KVPRIM_ERROR_SIZE);
    OK(kvprim_comm_check(&r.comm));
    meet(); /* no stream of another GPU is opened or closed while that GPU waits */
    enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[1], 100, KVPRIM_BF16, 1);
    expect_none_wrong(r, "after bad calls", 0);
}

/* If ranks disagree, init fails on all of them, and nothing stays allocated. */
static void test_disagreement(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, size_t(4096) << (r.rank == world - 1));
    CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_SIZE, "buffer_bytes");
    desc = desc_of(r, 0, 0, r.rank == 0);
    CHECK_ERROR(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_ARGUMENT, "deterministic");
    IS(kvprim_comm_destroy(&comm), KVPRIM_ERROR_ARGUMENT);
    /* NCCL tells only the two ranks that have the same device, and leaves the others waiting */
    if (world > 2 || gpus < world)
        return;
    desc = desc_of(r, 0);
    CUDA(cudaSetDevice(0));
    IS(kvprim_comm_init(&comm, &desc), KVPRIM_ERROR_NCCL);
    CUDA(cudaSetDevice(device_of(r.rank)));
    meet();
}

static void test_lifetimes(rank_state &r)
{
    size_t free_before = 0, free_after, total;
    for (int n = 0; n < (quick ? 3 : world == 2 && !processes ? 102 : 12); n++) {
        kvprim_comm comm = {};
        size_t bytes = 0;
        const kvprim_comm_desc desc = desc_of(r, n % 2 ? size_t(5) << 20 : 0);
        open_comm(r, &comm, desc);
        char *const buffer = static_cast<char *>(kvprim_comm_buffer(&comm, &bytes));
        CHECK((buffer != nullptr) == (bytes != 0) && bytes == desc.buffer_bytes && uintptr_t(buffer) % 256 == 0);
        enqueue_sum(r, &comm, r.stream, r.device[0], r.device[1], 5000, KVPRIM_BF16, uint64_t(n));
        expect_none_wrong(r, "lifetime", size_t(n));
        OK(kvprim_comm_destroy(&comm));
        IS(kvprim_comm_destroy(&comm), KVPRIM_ERROR_ARGUMENT);
        IS(kvprim_all_reduce(&comm, r.device[0], r.device[0], 1, KVPRIM_F32, KVPRIM_SUM, r.stream),
           KVPRIM_ERROR_ARGUMENT);
        CHECK(kvprim_comm_buffer(&comm, &bytes) == nullptr && bytes == 0);
        meet();
        if (n == 1)
            CUDA(cudaMemGetInfo(&free_before, &total));
        meet();
    }
    CUDA(cudaMemGetInfo(&free_after, &total));
    if (free_before > free_after + (size_t(32) << 20))
        fail("rank %d: %zu MiB of device memory are gone", r.rank, (free_before - free_after) >> 20);
    meet();
}

static void warm_up_others(rank_state &r)
{
    unsigned char *const bytes = reinterpret_cast<unsigned char *>(r.device[0]);
    digest<<<1, 32, 0, r.stream>>>(nullptr, 0, nullptr);
    verify_gather<<<1, 32, 0, r.stream>>>(nullptr, 0, r.iteration, 0, 0, r.wrong);
    fill_bytes<<<1, 32, 0, r.stream>>>(nullptr, 0, r.iteration, 0, 0);
    verify_bytes<<<1, 32, 0, r.stream>>>(nullptr, 0, 0, r.iteration, 0, 0, r.wrong);
    verify_guard<<<1, 16, 0, r.stream>>>(bytes, r.wrong);
    norm_compare<<<1, 32, 0, r.stream>>>(nullptr, nullptr, 0, r.wrong);
    CUDA(cudaGetLastError());
}

int main(int argc, char **argv)
{
    return run_program(
        argc, argv, [] {},
        [] {
            run("sums, sizes x types x places", test_sums);
            run("reduce_scatter, sizes x types x places", test_scatters);
            run("sums inside the buffer", test_placement);
            run("sums and scatters in a pipeline", test_pipelines);
            run("sums, sizes in turn without synchronisation", test_sizes_in_turn);
            run("the same bits on all ranks, again and again", test_same_bits);
            run("a graph replayed", test_graph);
            run("gathers of any bytes", test_gathers);
            run("exchanges of parts, kinds x types x sizes x places", test_exchanges);
            run("exchanges in chunks, on few blocks, by NCCL", test_exchanges_elsewhere);
            run("exchanges in turn without synchronisation", test_exchanges_in_turn);
            run("exchanges in a graph", test_exchanges_in_graphs);
            run("exchanges after kernels that end late", test_exchanges_after_late_kernels);
            run("dependent launches", test_dependent);
            run("every collective, type, operation and place", test_collectives);
            run("groups: all ranks send to all at once", test_groups);
            run("reductions, bit by bit: types x ops x sizes x places, in graphs", test_reductions);
            run("each collective first in a graph", test_first_in_graphs);
            run("deterministic at every size", test_deterministic);
            run("reductions, deterministic at every size", test_deterministic_reductions);
            run_norm_tests();
            run("two communicators at once", test_two_communicators);
            run("options of a descriptor", test_choices);
            run("an NCCL communicator of the caller's", test_given_communicator);
            run("a rank that ends late", test_end_late);
            run("slots in the caller's memory", test_given_memory);
            run("bad calls", test_bad_calls);
            run("ranks that disagree", test_disagreement);
            run("init and destroy again and again", test_lifetimes);
        });
}

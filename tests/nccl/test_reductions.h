/* SPDX-License-Identifier: MIT */
/* Tests of the reductions that own kernels make besides sums of fp16, bf16 and fp32, and of those too, for
   test_nccl_gpu.cu: every bit must be what reductions.h computes on the host. */
#ifndef TEST_REDUCTIONS_H
#define TEST_REDUCTIONS_H

#include "nccl_ranks.h"
#include "reductions.h"

/* Inputs repeat after so many elements, so that the host computes only these. With fp8, the first 65,536 are all pairs
   of two ranks' elements. */
static const size_t reduction_period = 70001;

static uint32_t reduction_input(const float_format &f, size_t i, int rank)
{
    const size_t at = i % reduction_period;
    const uint32_t ones = UINT32_MAX >> (32 - 8 * f.bytes), sign = ones ^ ones >> 1;
    const uint32_t mantissa = (1u << f.mantissa_bits) - 1, infinity = (ones ^ sign) & ~mantissa;
    const uint64_t h = hash_u64(at * 8 + uint64_t(rank));
    const uint32_t any = uint32_t(h >> 32) & ones;
    if (f.bytes == 1 && at < 65536 && rank < 2)
        return at >> 8 * rank & 0xff;
    switch (h % 16) {
    case 0:
        return ones; /* a NaN, and with others an empty word */
    case 1:
        return any & sign; /* 0 or -0 */
    case 2:
        return (any & sign) | infinity;
    case 3:
        return (any & sign) | (infinity - 1); /* the largest finite one; near it in e4m3 */
    case 4:
        return any & (sign | mantissa); /* subnormal */
    case 5:
    case 6:
    case 7:
    case 8: /* 1 to 8, so that sums round */
        return (any & (sign | mantissa)) | (uint32_t(float_bias(f)) + uint32_t(h >> 8) % 3) << f.mantissa_bits;
    default:
        return any;
    }
}

struct reduction {
    kvprim_dtype dtype;
    kvprim_op op;
    float_format format;
    std::vector<uint32_t> expected; /* of a period */
};

static reduction reduction_of(kvprim_dtype dtype, kvprim_op op)
{
    reduction d = {dtype, op, format_of(dtype), std::vector<uint32_t>(reduction_period)};
    uint32_t in[8];
    for (size_t i = 0; i < reduction_period; i++) {
        for (int r = 0; r < world; r++)
            in[r] = reduction_input(d.format, i, r);
        d.expected[i] = reduced_bits(d.format, op, in, world);
    }
    return d;
}

static void reduction_upload(rank_state &r, const reduction &d, char *to, size_t count)
{
    const size_t bytes = size_t(d.format.bytes);
    std::vector<char> host(count * bytes);
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = reduction_input(d.format, i, r.rank);
        memcpy(&host[i * bytes], &bits, bytes);
    }
    upload(r, to, host.data(), host.size());
}

/* `first`: the tensor's element where the result begins. The 16 bytes after it are still 0xa5, if there is a guard. */
static void reduction_check(rank_state &r, const reduction &d, const char *what, const char *at, size_t first,
                            size_t count, bool guard)
{
    const size_t bytes = size_t(d.format.bytes), guard_bytes = guard ? 16 : 0;
    std::vector<char> got(count * bytes + guard_bytes);
    download(got.data(), at, got.size(), r.stream);
    for (size_t i = 0; i < count; i++) {
        const uint32_t expected = d.expected[(first + i) % reduction_period];
        uint32_t is = 0;
        memcpy(&is, &got[i * bytes], bytes);
        if (is != expected && !(float_is_nan(d.format, is) && float_is_nan(d.format, expected)))
            return fail("rank %d: %s of %zu elements of type %d, op %d: element %zu is %x instead of %x", r.rank, what,
                        count, int(d.dtype), int(d.op), i, is, expected);
    }
    if (std::count(got.end() - std::ptrdiff_t(guard_bytes), got.end(), char(0xa5)) != std::ptrdiff_t(guard_bytes))
        fail("rank %d: %s of %zu elements of type %d, op %d writes past its end", r.rank, what, count, int(d.dtype),
             int(d.op));
}

/* In place; apart; shifted by an element; shifted so that only one rank is aligned. */
static void one_reduction(rank_state &r, kvprim_comm *comm, const reduction &d, size_t count, int place)
{
    const size_t bytes = size_t(d.format.bytes), mine = size_t(r.rank) * count;
    const size_t shift = place == 2 ? bytes : place == 3 ? size_t(r.rank) * bytes : 0;
    char *const send = r.device[0] + shift, *const recv = place == 0 ? send : r.device[1] + shift;
    CUDA(cudaMemsetAsync(recv, 0xa5, count * bytes + 16, r.stream));
    reduction_upload(r, d, send, count);
    OK(kvprim_all_reduce(comm, recv, send, count, d.dtype, d.op, r.stream));
    reduction_check(r, d, "all_reduce", recv, 0, count, true);

    char *const part = place == 0 ? send + mine * bytes : r.device[1] + shift;
    CUDA(cudaMemsetAsync(recv, 0xa5, count * bytes + 16, r.stream));
    reduction_upload(r, d, send, count * size_t(world));
    OK(kvprim_reduce_scatter(comm, part, send, count, d.dtype, d.op, r.stream));
    reduction_check(r, d, "reduce_scatter", part, mine, count, place != 0);
}

/* A graph of several sizes, in one shot and in two, replayed. */
static void graph_of_reductions(rank_state &r, const reduction &d)
{
    static const size_t counts[] = {5, 4096, 70001, 1100000};
    const size_t bytes = size_t(d.format.bytes);
    size_t places[5] = {};
    for (int k = 0; k < 4; k++)
        places[k + 1] = places[k] + counts[k] * bytes / 16 * 16 + 32;
    reduction_upload(r, d, r.device[0], counts[3]);
    const cudaGraphExec_t exec = captured(r, [&] {
        CUDA(cudaMemsetAsync(r.device[1], 0xa5, places[4], r.stream));
        for (int k = 0; k < 4; k++)
            OK(kvprim_all_reduce(&r.comm, r.device[1] + places[k], r.device[0], counts[k], d.dtype, d.op, r.stream));
    });
    for (int replay = 0; replay < 3; replay++) {
        CUDA(cudaGraphLaunch(exec, r.stream));
        for (int k = 0; k < 4; k++)
            reduction_check(r, d, "all_reduce in a graph", r.device[1] + places[k], 0, counts[k], true);
    }
    destroy_graph(exec);
}

static const kvprim_dtype reduction_types[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32, KVPRIM_F8E4M3, KVPRIM_F8E5M2};
static const kvprim_op reduction_ops[] = {KVPRIM_SUM, KVPRIM_AVG, KVPRIM_MAX, KVPRIM_MIN};

static void test_reductions(rank_state &r)
{
    static const size_t counts[] = {1, 17, 1023, 4096, 65536, 70001, 1500003};
    if (!r.comm.peer[0])
        return skip("own kernels are off");
    for (const kvprim_dtype t : reduction_types)
        for (const kvprim_op op : reduction_ops) {
            const reduction d = reduction_of(t, op);
            for (const size_t count : counts)
                for (int place = 0; place < (count > 100000 ? 1 : 4); place++)
                    if (!quick || count < 4096)
                        one_reduction(r, &r.comm, d, count, place);
            if (!quick)
                graph_of_reductions(r, d);
        }
    if (!quick) /* more than the slots hold, of two ranks */
        one_reduction(r, &r.comm, reduction_of(KVPRIM_F8E4M3, KVPRIM_SUM), (size_t(34) << 20) / size_t(world) + 3, 1);
    OK(kvprim_comm_check(&r.comm));
}

/* Own kernels reduce at every size. NCCL would give another MAX of a number and a NaN. */
static void test_deterministic_reductions(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0, 0, 1);
    desc.all_reduce_limit = desc.reduce_scatter_limit = 100;
    if (!r.comm.peer[0])
        return skip("own kernels are off");
    open_comm(r, &comm, desc);
    for (const kvprim_dtype t : reduction_types)
        for (const kvprim_op op : reduction_ops)
            one_reduction(r, &comm, reduction_of(t, op), 10000, 1 + op % 2);
    const reduction average = reduction_of(KVPRIM_F32, KVPRIM_AVG);
    for (int place = 1; place < 3; place++) {
        one_reduction(r, &comm, average, (3 << 20) / 4, place); /* in two shots */
        if (world == 2)
            one_reduction(r, &comm, average, (17 << 20) / 4, place); /* in a pipeline */
    }
    OK(kvprim_comm_check(&comm));
    OK(kvprim_comm_destroy(&comm));
}

#endif /* TEST_REDUCTIONS_H */

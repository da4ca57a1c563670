/* SPDX-License-Identifier: MIT */
/* Tests of kvprim_all_reduce_norm on GPUs, for test_nccl_gpu.cu. What a call leaves in a rank's whole image must be
   what the host's twin leaves, bit by bit; norm_cases.h checks the twin with an oracle. */
#ifndef TEST_NORM_H
#define TEST_NORM_H

#include "nccl_ranks.h"
#include "norm_cases.h"

/* A rank's case: its image before the call, and as it must be after it. Ranks take turns with the oracle, which takes
   longer than all else. */
struct norm_call {
    norm_case c;
    std::vector<char> before, after;
};

static norm_call norm_call_of(const norm_case &c, int rank, int ranks_count)
{
    norm_call call = {c, std::vector<char>(c.bytes), {}};
    norm_fill(&c, rank, call.before.data());
    call.after = call.before;
    norm_expect(&c, rank, ranks_count, call.after.data(), c.seed % uint64_t(ranks_count) == uint64_t(rank));
    return call;
}

static norm_call norm_call_of(const rank_state &r, kvprim_dtype dtype, int64_t tokens, int64_t hidden, uint64_t seed,
                              bool plain = false)
{
    const norm_case c = norm_draw(dtype, tokens, hidden, plain, seed, seed * 8 + uint64_t(r.rank) + 1);
    return norm_call_of(c, r.rank, world);
}

static norm_call usual_norm_call(const rank_state &r, kvprim_dtype dtype, int64_t tokens, int64_t hidden, uint64_t seed,
                                 bool plain)
{
    const norm_case c = norm_draw_usual(dtype, tokens, hidden, plain, seed, hash_u64(seed + uint64_t(r.rank)));
    return norm_call_of(c, r.rank, world);
}

static void norm_upload(rank_state &r, char *to, const std::vector<char> &image)
{
    upload(r, to, image.data(), image.size());
}

static kvprim_status norm_enqueue(const norm_case &c, kvprim_comm *comm, char *at, cudaStream_t stream)
{
    const kvprim_norm_desc d = norm_desc_at(&c, at);
    return kvprim_all_reduce_norm(comm, &d, stream);
}

/* Counts the bytes that differ. */
__global__ void norm_compare(const char *got, const char *wanted, size_t bytes, uint32_t *wrong)
{
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < bytes; i += size_t(gridDim.x) * blockDim.x)
        if (got[i] != wanted[i])
            atomicAdd(wrong, 1);
}

/* Says where two images first differ. */
static void norm_explain(const rank_state &r, const norm_call &call, const char *got, const char *what)
{
    static const char *const names[] = {"send",         "residual", "weight",    "sum",
                                        "residual_out", "out",      "quantised", "scale"};
    size_t at = 0;
    int tensor = -1;
    while (at < call.after.size() && got[at] == call.after[at])
        at++;
    for (int k = 0; k < norm_tensors; k++)
        if (call.c.at[k] <= at && (tensor < 0 || call.c.at[k] >= call.c.at[tensor]))
            tensor = k;
    fail("rank %d: %s: %lld tokens x %lld, dtype %d, seed %llx: byte %zu after the start of %s is %02x, not %02x",
         r.rank, what, (long long)call.c.d.tokens, (long long)call.c.d.hidden, int(call.c.d.dtype),
         (unsigned long long)call.c.seed, tensor < 0 ? at : at - call.c.at[tensor], tensor < 0 ? "all" : names[tensor],
         got[at] & 255, call.after[at] & 255);
}

static void norm_expect_image(rank_state &r, const norm_call &call, const char *at, cudaStream_t stream,
                              const char *what)
{
    std::vector<char> got(call.after.size());
    download(got.data(), at, got.size(), stream);
    if (got != call.after)
        norm_explain(r, call, got.data(), what);
}

static void norm_once(rank_state &r, kvprim_comm *comm, const norm_call &call, const char *what)
{
    norm_upload(r, r.device[0], call.before);
    OK(norm_enqueue(call.c, comm, r.device[0], r.stream));
    norm_expect_image(r, call, r.device[0], r.stream, what);
}

/* Tokens and sizes: rows are not full, blocks have several tokens, and the sum is apart or not. */
static void test_norms(rank_state &r)
{
    static const int64_t sizes[] = {8,    16,   248,  512,  520,  1000,  2048,  2880,  4096, 4104,
                                    6144, 7168, 8192, 8200, 9000, 12288, 16376, 16384, 5120};
    static const int64_t tokens[] = {1, 2, 3, 5, 6, 8, 16, 17, 32, 33, 64, 65, 128, 129, 333, 2000};
    uint64_t seed = 0;
    for (const int64_t hidden : sizes)
        for (const int64_t count : tokens) {
            seed++;
            if (quick ? count * hidden > (one_gpu ? 8200 : 40000) : count * hidden > 6000000)
                continue;
            for (const kvprim_dtype dtype : {KVPRIM_F16, KVPRIM_BF16})
                if (count < 128 || (seed & 1) == (dtype == KVPRIM_F16))
                    norm_once(r, &r.comm, norm_call_of(r, dtype, count, hidden, seed, !r.comm.peer[0]), "norm");
        }
    /* every kernel, in quick tests too: of two ranks, more than 4 MB take several launches, or a sum */
    static const int64_t shapes[][2] = {{1, 512},    {1, 4096},    {8, 4096},   {33, 4096},  {3, 7168},
                                        {130, 2880}, {1, 16384},   {300, 4096}, {140, 8192}, {70, 8200},
                                        {70, 16384}, {140, 16384}, {600, 4096}};
    for (const auto &shape : shapes)
        for (int n = 0; n < 6; n++)
            norm_once(r, &r.comm,
                      norm_call_of(r, n % 2 ? KVPRIM_BF16 : KVPRIM_F16, shape[0], shape[1], ++seed, !r.comm.peer[0]),
                      "norm");
    for (const int64_t hidden : {512, 4096, 6144, 8192, 9216, 12288, 16384})
        for (const int64_t count : {1, 7, 9, 64})
            for (const kvprim_dtype dtype : {KVPRIM_F16, KVPRIM_BF16})
                norm_once(r, &r.comm, usual_norm_call(r, dtype, count, hidden, ++seed * 100, !r.comm.peer[0]),
                          "usual norm");
    /* every choice of outputs and places */
    for (int n = 0; n < (quick ? 20 : 300); n++)
        norm_once(r, &r.comm,
                  norm_call_of(r, n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 1 + n % 7, 8 * (1 + n * 37 % 1100),
                               1000 + uint64_t(n), !r.comm.peer[0]),
                  "norm, drawn");
    OK(kvprim_comm_check(&r.comm));
    meet();
}

/* Norms of all sizes take turns with sums and gathers of all sizes, and nothing synchronises in between. Now and then a
   rank is late. */
static void test_norms_in_turn(rank_state &r)
{
    static const int64_t shapes[][2] = {{1, 4096},   {130, 4096}, {7, 6144}, {2, 16384},
                                        {40, 16384}, {3, 2880},   {64, 512}, {500, 4096}};
    std::vector<norm_call> calls;
    std::vector<size_t> at;
    size_t end = 0;
    for (int k = 0; k < (quick ? 4 : 8); k++) {
        calls.push_back(norm_call_of(r, k % 2 ? KVPRIM_F16 : KVPRIM_BF16, shapes[k][0], shapes[k][1], 300 + uint64_t(k),
                                     !r.comm.peer[0]));
        at.push_back(end);
        end += (calls.back().c.bytes + 255) / 256 * 256;
        CHECK(end < room_bytes);
        norm_upload(r, r.device[1] + at.back(), calls.back().before);
        norm_upload(r, r.device[2] + at.back(), calls.back().after);
    }
    for (int n = 0; n < (quick ? 30 : 1000); n++) {
        const uint64_t draw = hash_u64(uint64_t(n));
        const size_t k = draw % calls.size(), count = 1 + (draw >> 32) % (size_t(1) << (1 + n % 19));
        char *const work = r.device[0] + at[k], *const wanted = r.device[2] + at[k];
        CUDA(cudaMemcpyAsync(work, r.device[1] + at[k], calls[k].c.bytes, cudaMemcpyDeviceToDevice, r.stream));
        OK(norm_enqueue(calls[k].c, &r.comm, work, r.stream));
        norm_compare<<<16, 256, 0, r.stream>>>(work, wanted, calls[k].c.bytes, r.wrong);
        if (n % 3 == 0)
            enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[0], count, KVPRIM_BF16, draw);
        if (n % 5 == 0)
            OK(kvprim_all_gather(&r.comm, r.device[0] + (32 << 20), r.device[0], count, KVPRIM_U8, r.stream));
        if (n % 100 == 99 && r.rank == n / 100 % world)
            sleep_ms(3);
        if (n % 100 == 99)
            expect_none_wrong(r, "norms in turn, call", size_t(n));
    }
    expect_none_wrong(r, "norms in turn", 0);
    OK(kvprim_comm_check(&r.comm));
    meet();
}

/* Graphs are replayed with other inputs, and with a sum, a gather and another norm beside it. */
static void test_norm_graphs(rank_state &r)
{
    static const struct {
        int64_t tokens, hidden;
    } sizes[] = {{1, 4096}, {6, 6144}, {32, 7168}, {333, 2048}, {128, 16384}};
    for (const auto &size : sizes) {
        if (quick && size.tokens * size.hidden > 40000)
            continue;
        const uint64_t seed = uint64_t(size.hidden);
        norm_call call = norm_call_of(r, KVPRIM_BF16, size.tokens, size.hidden, seed, !r.comm.peer[0]);
        const cudaGraphExec_t exec = captured(r, [&] {
            for (int n = 0; n < 3; n++) {
                CUDA(cudaMemcpyAsync(r.device[0], r.device[1], call.c.bytes, cudaMemcpyDeviceToDevice, r.stream));
                OK(norm_enqueue(call.c, &r.comm, r.device[0], r.stream));
                norm_compare<<<64, 256, 0, r.stream>>>(r.device[0], r.device[2], call.c.bytes, r.wrong);
                enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[0], 1000 + size_t(n) * 30000, KVPRIM_BF16,
                            seed);
            }
        });
        for (int replay = 0; replay < 4; replay++) {
            norm_upload(r, r.device[1], call.before);
            norm_upload(r, r.device[2], call.after);
            for (int n = 0; n < 5; n++)
                CUDA(cudaGraphLaunch(exec, r.stream));
            expect_none_wrong(r, "norm in a graph, tokens", size_t(size.tokens));
            norm_case c = call.c; /* other values in the same places */
            c.seed = hash_u64(c.seed);
            call = norm_call_of(c, r.rank, world);
        }
        destroy_graph(exec);
    }
    OK(kvprim_comm_check(&r.comm));
    meet();
}

/* Of all outputs, NaN too. */
static void test_norm_same_bits(rank_state &r)
{
    for (const int64_t tokens : {int64_t(1), int64_t(40), int64_t(700)}) {
        const norm_case c = norm_draw(KVPRIM_BF16, tokens, 4096, !r.comm.peer[0], 77, 99);
        std::vector<char> image(c.bytes);
        norm_fill(&c, r.rank, image.data());
        kvprim_norm_desc d = norm_desc_at(&c, r.device[0]);
        d.residual_out = r.device[1], d.out = r.device[1] + (8 << 20), d.sum = r.device[1] + (16 << 20);
        d.sum_stride = d.residual_out_stride = d.out_stride = 0;
        expect_same_bits(r, [&](unsigned long long *sum) {
            norm_upload(r, r.device[0], image);
            OK(kvprim_all_reduce_norm(&r.comm, &d, r.stream));
            for (void *const out : {d.sum, d.residual_out, d.out})
                digest<<<256, 256, 0, r.stream>>>(static_cast<uint32_t *>(out), size_t(tokens) * 2048, sum);
        });
    }
}

/* A layer after another, as a model has them: sum and norm, with the residual in place, and sums and gathers between.
   Launched dependent on a kernel that ends late. Nothing synchronises in between. */
static void norm_enqueue_layers(rank_state &r, const norm_call &call, int layers)
{
    char *const work = r.device[0];
    for (int n = 0; n < layers; n++) {
        fill_late<<<8, 256, 0, r.stream>>>(reinterpret_cast<float *>(work + call.c.bytes), 1024, float(n), 20000);
        OK(kvprim_all_reduce(&r.comm, work + call.c.bytes, work + call.c.bytes, 1024, KVPRIM_F32, KVPRIM_SUM,
                             r.stream));
        count_unlike<<<8, 256, 0, r.stream>>>(reinterpret_cast<float *>(work + call.c.bytes), 1024, float(n * world),
                                              r.wrong);
        CUDA(cudaMemcpyAsync(work, r.device[1], call.c.bytes, cudaMemcpyDeviceToDevice, r.stream));
        OK(norm_enqueue(call.c, &r.comm, work, r.stream));
        OK(kvprim_all_gather(&r.comm, r.device[2] + call.c.bytes, work + call.c.bytes, 256, KVPRIM_F32, r.stream));
        norm_compare<<<64, 256, 0, r.stream>>>(work, r.device[2], call.c.bytes, r.wrong);
        CUDA(cudaGetLastError());
    }
}

/* The addends come from a kernel that ends late, and the norm is launched dependent on it. */
static void norm_enqueue_late(rank_state &r, int number, int64_t tokens, int64_t hidden)
{
    const size_t count = size_t(tokens * hidden);
    __nv_bfloat16 *const send = reinterpret_cast<__nv_bfloat16 *>(r.device[0]);
    kvprim_norm_desc d = {};
    d.dtype = KVPRIM_BF16, d.tokens = tokens, d.hidden = hidden, d.eps = 0;
    d.send = send, d.sum = send, d.weight = r.device[1], d.out = r.device[2];
    fill_late<<<16, 256, 0, r.stream>>>(send, count, float(number + r.rank), 30000);
    OK(kvprim_all_reduce_norm(&r.comm, &d, r.stream));
    count_unlike<<<16, 256, 0, r.stream>>>(send, count, float(number * world + world * (world - 1) / 2), r.wrong);
    count_unlike<<<16, 256, 0, r.stream>>>(reinterpret_cast<__nv_bfloat16 *>(r.device[2]), count, 0.5f, r.wrong);
    CUDA(cudaGetLastError());
}

static void test_norm_dependent(rank_state &r)
{
    const norm_call call = norm_call_of(r, KVPRIM_BF16, 20, 4096, 5, !r.comm.peer[0]);
    norm_upload(r, r.device[1], call.before);
    norm_upload(r, r.device[2], call.after);
    norm_enqueue_layers(r, call, quick ? 5 : 100);
    expect_none_wrong(r, "layers", 0);
    replay(r, quick ? 3 : 100, "layers in a graph", [&] { norm_enqueue_layers(r, call, 4); });
    /* constants: y = weight, if all numbers are small enough for their mean to be exact */
    const std::vector<uint16_t> half(16384, 0x3f00);
    upload(r, r.device[1], half.data(), 32768);
    for (int n = 1; n < 8; n++)
        norm_enqueue_late(r, n, 1 << n, n % 2 ? 4096 : 512);
    expect_none_wrong(r, "norm after a kernel that ends late", 0);
    replay(r, 10, "norm after a kernel that ends late, in a graph", [&] {
        for (int n = 1; n < 6; n++)
            norm_enqueue_late(r, n, 1 << n, n % 2 ? 4096 : 512);
    });
}

/* Another communicator's norms at the same time, on another stream, all in clusters. */
static void test_norm_two_communicators(rank_state &r)
{
    kvprim_comm other = {};
    const cudaStream_t stream = r.other_stream;
    const kvprim_comm_desc desc = desc_of(r, 0);
    open_comm(r, &other, desc);
    const norm_call a = norm_call_of(r, KVPRIM_BF16, 7, 12288, 21, !r.comm.peer[0]),
                    b = norm_call_of(r, KVPRIM_F16, 32, 16384, 22, !r.comm.peer[0]);
    const size_t half = room_bytes / 2;
    for (int k = 0; k < 2; k++) {
        norm_upload(r, r.device[1] + size_t(k) * half, k ? b.before : a.before);
        norm_upload(r, r.device[2] + size_t(k) * half, k ? b.after : a.after);
    }
    wake_streams(r); /* the host took its time */
    for (int n = 0; n < (quick ? 10 : 300); n++)
        for (int k = 0; k < 2; k++) {
            const norm_call &call = k ? b : a;
            const cudaStream_t on = k ? stream : r.stream;
            kvprim_comm *const comm = k ? &other : &r.comm;
            char *const work = r.device[0] + size_t(k) * half;
            CUDA(cudaMemcpyAsync(work, r.device[1] + size_t(k) * half, call.c.bytes, cudaMemcpyDeviceToDevice, on));
            OK(norm_enqueue(call.c, comm, work, on));
            norm_compare<<<16, 256, 0, on>>>(work, r.device[2] + size_t(k) * half, call.c.bytes, r.wrong);
            enqueue_sum(r, comm, on, work, work, k ? 300 : 70000, KVPRIM_F32, uint64_t(n));
        }
    CUDA(cudaStreamSynchronize(stream));
    expect_none_wrong(r, "norms of two communicators", 0);
    OK(kvprim_comm_check(&other));
    OK(kvprim_comm_destroy(&other));
}

/* Own kernels are off: NCCL's sum, in one part and in several, from strided addends too. */
static void test_norm_without_kernels(rank_state &r)
{
    if (lacks_nccl("the sum is NCCL's"))
        return;
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.no_kernels = r.rank == 0;
    open_comm(r, &comm, desc);
    CHECK(!comm.peer[0] && strstr(kvprim_comm_describe(&comm), "8 MB for sums that a norm follows") != nullptr);
    for (int n = 0; n < (quick ? 6 : 20); n++)
        norm_once(r, &comm,
                  norm_call_of(r, n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 1 + n * n % 300, 8 * (1 + n * 57 % 1100),
                               uint64_t(n), true),
                  "norm by NCCL");
    for (int n = 0; n < 4; n++)
        norm_once(r, &comm,
                  norm_call_of(r, n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 3, n < 2 ? 4096 : 16384, 60 + uint64_t(n), true),
                  "norm by NCCL");
    for (int n = 0; n < (quick ? 1 : 4); n++) /* in two parts: 8 MB are 512 or 256 tokens */
        norm_once(r, &comm,
                  norm_call_of(r, KVPRIM_BF16, n < 2 ? 513 : 300, n < 2 ? 8192 : 16384, 70 + uint64_t(n), true),
                  "norm by NCCL, in parts");
    const norm_call call = norm_call_of(r, KVPRIM_BF16, 600, 8192, 3, true);
    norm_upload(r, r.device[1], call.before);
    norm_upload(r, r.device[2], call.after);
    replay(r, 5, "norm by NCCL in a graph", [&] {
        for (int n = 0; n < 2; n++) {
            CUDA(cudaMemcpyAsync(r.device[0], r.device[1], call.c.bytes, cudaMemcpyDeviceToDevice, r.stream));
            OK(norm_enqueue(call.c, &comm, r.device[0], r.stream));
            norm_compare<<<64, 256, 0, r.stream>>>(r.device[0], r.device[2], call.c.bytes, r.wrong);
        }
    });
    OK(kvprim_comm_check(&comm));
    meet();
    OK(kvprim_comm_destroy(&comm));
    meet();
}

/* One rank needs no sum. */
static void test_norm_of_one_rank(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = {};
    desc.world = 1;
    OK(kvprim_comm_new_id(&desc.id));
    open_comm(r, &comm, desc);
    for (int n = 0; n < (quick ? 6 : 20); n++) {
        const int64_t hidden = n == 4 || n == 5 ? 16384 : 8 * (1 + n * 57 % 1100);
        const norm_case c =
            norm_draw(n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 1 + n * n % 300, hidden, 1, uint64_t(n), uint64_t(n + r.rank));
        norm_once(r, &comm, norm_call_of(c, 0, 1), "norm of one rank");
    }
    OK(kvprim_comm_destroy(&comm));
    meet();
}

/* Tokens that several blocks share, of a communicator with as few multiprocessors as that takes. Ranks that share a GPU
   have fewer clusters of 8 at once: it has room for 14 or more. */
static void test_norm_clusters(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    cudaDeviceProp device;
    uint64_t seed = 5000;
    desc.max_sms = 57;
    CUDA(cudaGetDeviceProperties(&device, device_of(r.rank)));
    if (!r.comm.peer[0] || device.major < 9 || device.multiProcessorCount < 2 * desc.max_sms)
        return skip("no clusters on this GPU, or own kernels are off");
    open_comm(r, &comm, desc);
    CHECK(strstr(kvprim_comm_describe(&comm), ", clusters") != nullptr);
    for (const int64_t tokens : {1, 3, 7, 40, 130})
        for (const int64_t hidden : {8200, 9216, 12288, 16376, 16384, 8192, 6144}) /* the last: of more than 4 ranks */
            for (const kvprim_dtype dtype : {KVPRIM_F16, KVPRIM_BF16})
                for (int n = 0; n < (one_gpu && world > 2 && tokens > 14 / world ? 0 : quick ? 2 : 6); n++)
                    norm_once(r, &comm,
                              n % 2 ? norm_call_of(r, dtype, tokens, hidden, ++seed)
                                    : usual_norm_call(r, dtype, tokens, hidden, ++seed * 100, false),
                              "norm in clusters");
    OK(kvprim_comm_check(&comm));
    OK(kvprim_comm_destroy(&comm));
}

/* One block has no other to share a large token with. That is then summed first, as on GPUs without clusters. */
static void test_norm_of_one_block(rank_state &r)
{
    kvprim_comm comm = {};
    kvprim_comm_desc desc = desc_of(r, 0);
    desc.max_sms = 1, desc.all_reduce_limit = 1; /* which is not for norms */
    open_comm(r, &comm, desc);
    for (int n = 0; n < (quick ? 12 : 60); n++)
        norm_once(r, &comm,
                  norm_call_of(r, n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 1 + n % 3,
                               n % 5 ? 16384 - 8 * (n * n % 2048) : 4096, 80 + uint64_t(n), !comm.peer[0]),
                  "norm of one block");
    OK(kvprim_comm_check(&comm));
    meet();
    OK(kvprim_comm_destroy(&comm));
    meet();
}

/* In norm_numbers.h. Weak, as the unit that CI links this test with does not have it. */
__attribute__((weak)) void start_norm_numbers(uint32_t *wrong, cudaStream_t stream);

static void test_norm_numbers(rank_state &r)
{
    CHECK(start_norm_numbers);
    if (start_norm_numbers && r.rank == 0)
        start_norm_numbers(r.wrong, r.stream);
    CUDA(cudaGetLastError());
    expect_none_wrong(r, "roots and quotients of all numbers", 0);
}

static void test_norm_bad_calls(rank_state &r)
{
    const norm_case c = norm_draw(KVPRIM_BF16, 4, 64, 0, 3, 4);
    kvprim_norm_desc d = norm_desc_at(&c, r.device[0] + 8), empty = {};
    CHECK_ERROR(kvprim_all_reduce_norm(&r.comm, &d, r.stream), KVPRIM_ERROR_ARGUMENT, "not aligned to 16 bytes");
    d = norm_desc_at(&c, r.device[0]);
    OK(kvprim_group_start(&r.comm));
    CHECK_ERROR(kvprim_all_reduce_norm(&r.comm, &d, r.stream), KVPRIM_ERROR_ARGUMENT, "a group is open");
    IS(kvprim_group_end(&r.comm), KVPRIM_ERROR_ARGUMENT);
    empty.dtype = KVPRIM_F16, empty.hidden = 4096;
    OK(kvprim_all_reduce_norm(&r.comm, &empty, r.stream));
    if (gpus > 1) {
        CUDA(cudaSetDevice((device_of(r.rank) + 1) % gpus));
        CHECK_ERROR(kvprim_all_reduce_norm(&r.comm, &d, r.stream), KVPRIM_ERROR_ARGUMENT, "the current device is");
        CUDA(cudaSetDevice(device_of(r.rank)));
    }
    OK(kvprim_comm_check(&r.comm));
    norm_once(r, &r.comm, norm_call_of(r, KVPRIM_BF16, 4, 64, 3, !r.comm.peer[0]), "norm after bad calls");
    meet();
}

static void run_norm_tests()
{
    run("norm: every number", test_norm_numbers);
    run("norm: tokens x sizes x places", test_norms);
    run("norm: in turn with sums and gathers, without synchronisation", test_norms_in_turn);
    run("norm: graphs replayed with other inputs", test_norm_graphs);
    run("norm: the same bits on all ranks, again and again", test_norm_same_bits);
    run("norm: layers, and dependent launches", test_norm_dependent);
    run("norm: one block", test_norm_of_one_block);
    run("norm: tokens shared by clusters of blocks", test_norm_clusters);
    run("norm: NCCL's sum", test_norm_without_kernels);
    run("norm: one rank", test_norm_of_one_rank);
    run("norm: bad calls", test_norm_bad_calls);
    run("norm: two communicators at once", test_norm_two_communicators);
}

#endif

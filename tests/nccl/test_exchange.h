/* SPDX-License-Identifier: MIT */
/* Tests all_to_all, all_to_allv and all_gatherv on GPUs: parts of any size, type and place, with and without own
   kernels, enqueued and captured, between sums. For test_nccl_gpu.cu. Bytes are made and compared on the GPU, by where
   they lie in the sender's tensor. */
#ifndef TEST_EXCHANGE_H
#define TEST_EXCHANGE_H

/* A call: what is sent from where to where. counts: as kvprim_all_to_allv takes them; of all_gatherv, those of a rank
   are equal. */
enum exchange_kind { to_all, to_allv, gatherv, exchange_kinds };
struct exchange_call {
    exchange_kind kind;
    kvprim_dtype dtype;
    std::vector<size_t> counts;

    size_t bytes(int from, int to) const
    {
        return counts[size_t(from * world + to)] * size_of(dtype);
    }
    /* Where the part begins in the sender's tensor, and in the receiver's; of rank `world`: where the last one ends. */
    size_t send_at(int from, int to) const
    {
        size_t at = kind == gatherv && to == world ? bytes(from, 0) : 0;
        for (int r = 0; r < to && kind != gatherv; r++)
            at += bytes(from, r);
        return at;
    }
    size_t recv_at(int from, int to) const
    {
        size_t at = 0;
        for (int r = 0; r < from; r++)
            at += bytes(r, to);
        return at;
    }
};

/* Every fourth word is all ones. */
static __device__ unsigned char sent_byte(uint64_t seed, size_t b, int rank)
{
    const uint64_t h = mixed(seed, b / 4, rank);
    return h >> 62 == 0 ? 0xff : (unsigned char)(h >> b % 4 * 8);
}

static __global__ void fill_bytes(unsigned char *out, size_t bytes, const uint64_t *iteration, uint64_t seed, int rank)
{
    for (size_t b = blockIdx.x * size_t(blockDim.x) + threadIdx.x; b < bytes; b += size_t(gridDim.x) * blockDim.x)
        out[b] = sent_byte(seed + *iteration, b, rank);
}

/* Compares with the bytes that rank `from` sends from byte `first` on. */
static __global__ void verify_bytes(const unsigned char *got, size_t bytes, size_t first, const uint64_t *iteration,
                                    uint64_t seed, int from, uint32_t *wrong)
{
    for (size_t b = blockIdx.x * size_t(blockDim.x) + threadIdx.x; b < bytes; b += size_t(gridDim.x) * blockDim.x)
        if (got[b] != sent_byte(seed + *iteration, first + b, from))
            atomicAdd(wrong, 1);
}

static __global__ void verify_guard(const unsigned char *got, uint32_t *wrong)
{
    if (got[threadIdx.x] != 0xa5)
        atomicAdd(wrong, 1);
}

static kvprim_status make_call(rank_state &r, kvprim_comm *comm, const exchange_call &c, void *recv, const void *send)
{
    std::vector<size_t> row;
    for (int from = 0; from < world; from++)
        row.push_back(c.counts[size_t(from * world)]);
    return c.kind == to_all    ? kvprim_all_to_all(comm, recv, send, c.counts[0], c.dtype, r.stream)
           : c.kind == to_allv ? kvprim_all_to_allv(comm, recv, send, c.counts.data(), c.dtype, r.stream)
                               : kvprim_all_gatherv(comm, recv, send, row.data(), c.dtype, r.stream);
}

/* Fills send, calls, and compares what arrived, what follows it, and send. An all_gatherv is in place if send is
   NULL. */
static void enqueue_parts(rank_state &r, kvprim_comm *comm, const exchange_call &c, char *send, char *recv,
                          uint64_t seed)
{
    const size_t sent = c.send_at(r.rank, world), received = c.recv_at(world, r.rank);
    unsigned char *const out = reinterpret_cast<unsigned char *>(recv);
    unsigned char *const in = send ? reinterpret_cast<unsigned char *>(send) : out + c.recv_at(r.rank, r.rank);
    CUDA(cudaMemsetAsync(out, 0xa5, received + 16, r.stream));
    fill_bytes<<<64, 256, 0, r.stream>>>(in, sent, r.iteration, seed, r.rank);
    OK(make_call(r, comm, c, received ? out : nullptr, sent ? in : nullptr));
    for (int from = 0; from < world; from++)
        if (c.bytes(from, r.rank))
            verify_bytes<<<64, 256, 0, r.stream>>>(out + c.recv_at(from, r.rank), c.bytes(from, r.rank),
                                                   c.send_at(from, r.rank), r.iteration, seed, from, r.wrong);
    verify_bytes<<<64, 256, 0, r.stream>>>(in, sent, 0, r.iteration, seed, r.rank, r.wrong);
    verify_guard<<<1, 16, 0, r.stream>>>(out + received, r.wrong);
    CUDA(cudaGetLastError());
}

/* Parts of up to `most` elements, the same on every rank. number % 4: any sizes, every third part empty; rank number %
   world has nothing to send or receive; only rank number % world sends; parts that stay are the largest. */
static exchange_call exchange_of(exchange_kind kind, kvprim_dtype dtype, size_t most, uint64_t number)
{
    exchange_call c = {kind, dtype, std::vector<size_t>(size_t(world * world), most)};
    const int one = int(number % uint64_t(world));
    uint64_t random = number * 2862933555777941757ull + most;
    for (int from = 0; from < world; from++)
        for (int to = 0; to < world && kind != to_all; to++) {
            size_t &count = c.counts[size_t(from * world + to)];
            random = random * 6364136223846793005ull + 1442695040888963407ull;
            count = random >> 60 < 5 ? 0 : random >> 60 < 8 ? most : size_t(random >> 20) % (most + 1);
            if (number % 4 == 1 && (from == one || (to == one && kind == to_allv)))
                count = 0;
            if (number % 4 == 2)
                count = from == one ? most : 0;
            if (number % 4 == 3 && kind == to_allv)
                count = from == to ? most : count / 8;
            if (kind == gatherv)
                count = c.counts[size_t(from * world + to / world)];
        }
    for (int k = 0; k < world * world && kind == gatherv; k++)
        c.counts[size_t(k)] = c.counts[size_t(k / world * world)];
    return c;
}

/* Where a call's tensors lie: aligned; both shifted by an element; one rank's shifted; all_gatherv in place. */
static void enqueue_at(rank_state &r, kvprim_comm *comm, const exchange_call &c, int place, uint64_t seed)
{
    const size_t element = size_of(c.dtype), shift = place == 1   ? element
                                                     : place == 2 ? 3 * element * size_t(r.rank)
                                                                  : 0;
    const bool in_place = place == 3 && c.kind == gatherv;
    enqueue_parts(r, comm, c, in_place ? nullptr : r.device[0] + shift, r.device[1] + (place == 1 ? 2 * shift : shift),
                  seed);
}

static void exchange_sizes(rank_state &r, kvprim_comm *comm, size_t most)
{
    static const kvprim_dtype types[] = {KVPRIM_U8, KVPRIM_BF16, KVPRIM_F32, KVPRIM_F64, KVPRIM_F8E4M3};
    uint64_t number = 0;
    for (size_t n = 1; n <= most; n += n / 2 + 1)
        for (const size_t bytes : {n, n / 16 * 16})
            for (int k = 0; k < exchange_kinds * 4; k++) {
                const kvprim_dtype t = types[++number % 5];
                if (bytes >= size_of(t))
                    enqueue_at(r, comm, exchange_of(exchange_kind(k % exchange_kinds), t, bytes / size_of(t), number),
                               k / exchange_kinds, number);
                if (k % exchange_kinds == 2)
                    expect_none_wrong(r, "exchange, bytes", bytes);
            }
}

/* The largest part whose exchange fits a tensor. */
static size_t most_of_part()
{
    return (room_bytes - 4096) / size_t(world);
}

static void test_exchanges(rank_state &r)
{
    exchange_sizes(r, &r.comm, quick ? 3000 : std::min(size_t(12) << 20, most_of_part()));
}

/* In several launches, where they would go to NCCL, and with few blocks; then by NCCL alone. */
static void test_exchanges_elsewhere(rank_state &r)
{
    const size_t most = std::min(size_t(quick ? 10 : 30) << 20, most_of_part());
    for (const size_t limit : {SIZE_MAX, size_t(1)})
        for (const int sms : {0, 5}) {
            kvprim_comm comm = {};
            if (limit == 1 && leaves_out("NCCL's exchanges"))
                continue;
            kvprim_comm_desc desc = desc_of(r, 0);
            desc.all_gather_limit = limit, desc.max_sms = fitting_sms(sms);
            open_comm(r, &comm, desc);
            for (size_t bytes = 5; bytes <= most; bytes = bytes * (quick ? 11 : 5) + 3) {
                for (int k = 0; k < exchange_kinds * 4; k++)
                    enqueue_at(r, &comm,
                               exchange_of(exchange_kind(k % exchange_kinds), KVPRIM_U8,
                                           k % 2 ? bytes : bytes / 16 * 16 + 16, uint64_t(k)),
                               k / exchange_kinds, bytes);
                expect_none_wrong(r, "exchanges with all_gather_limit", limit);
            }
            OK(kvprim_comm_check(&comm));
            OK(kvprim_comm_destroy(&comm));
        }
}

/* Nothing synchronises in between. Sums and gathers use other blocks of the same slots. */
static void test_exchanges_in_turn(rank_state &r)
{
    uint64_t random = 3;
    for (int n = 0; n < (quick ? 40 : 800); n++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        const size_t most = 1 + (random >> 33) % (size_t(1) << (1 + n % 20));
        enqueue_at(r, &r.comm, exchange_of(exchange_kind(n % exchange_kinds), KVPRIM_U8, most, random >> 20), n / 3 % 4,
                   random);
        if (n % 4 == 1)
            enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[2], 1 + most / 4, KVPRIM_BF16, random);
        if (n % 4 == 3 && most * size_t(world) <= room_bytes)
            OK(kvprim_all_gather(&r.comm, r.device[2], r.device[0], most, KVPRIM_U8, r.stream));
        if (n % 40 == 39) {
            if (r.rank == n / 40 % world)
                sleep_ms(3);
            expect_none_wrong(r, "exchanges in turn, call", size_t(n));
        }
    }
    OK(kvprim_comm_check(&r.comm));
}

static void test_exchanges_in_graphs(rank_state &r)
{
    static const size_t most[] = {512, 70001, 40, 1 << 20, 9000, 333333};
    replay(r, quick ? 10 : 200, "a graph of exchanges", [&] {
        advance<<<1, 1, 0, r.stream>>>(r.iteration);
        for (int k = 0; k < 18; k++) {
            enqueue_at(r, &r.comm,
                       exchange_of(exchange_kind(k % exchange_kinds), KVPRIM_BF16, most[k / 3], uint64_t(k)), k % 4,
                       uint64_t(k) * 1000);
            if (k % 5 == 0)
                enqueue_sum(r, &r.comm, r.stream, r.device[0], r.device[2], most[k / 3], KVPRIM_BF16, uint64_t(k));
        }
    });
    OK(kvprim_comm_check(&r.comm));
    CUDA(cudaMemsetAsync(r.iteration, 0, sizeof *r.iteration, r.stream));
    meet();
}

/* A kernel that ends late wrote what is sent. */
static void test_exchanges_after_late_kernels(rank_state &r)
{
    float *const send = reinterpret_cast<float *>(r.device[0]), *const recv = reinterpret_cast<float *>(r.device[1]);
    for (int n = 1; n < 20; n++) {
        const size_t count = n % 3 == 0 ? 100 : n % 3 == 1 ? 20000 : 300000;
        fill_late<<<16, 256, 0, r.stream>>>(send, count * size_t(world), float(n * 8 + r.rank), 30000);
        OK(kvprim_all_to_all(&r.comm, recv, send, count, KVPRIM_F32, r.stream));
        for (int from = 0; from < world; from++)
            count_unlike<<<16, 256, 0, r.stream>>>(recv + size_t(from) * count, count, float(n * 8 + from), r.wrong);
    }
    CUDA(cudaGetLastError());
    expect_none_wrong(r, "exchanges after a kernel that ends late", 0);
}

#endif /* TEST_EXCHANGE_H */

/* SPDX-License-Identifier: MIT */
/* Tests kvprim_nccl.h without a GPU: arguments, versions, sizes, ids. Valid C11, C++ and CUDA; as CUDA it tests
   more.

       cc -std=c11 -I. -I$CUDA_HOME/include tests/nccl/test_nccl.c -L$CUDA_HOME/lib64 -lcudart -lnccl -lm && ./a.out */
#ifdef __CUDACC__ /* a test looks at launches; programs that link with this object make them */
#include <cuda_runtime.h>
static cudaError_t launch(const cudaLaunchConfig_t *config, const void *kernel, void **args);
#define cudaLaunchKernelExC launch
#endif
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim_nccl.h"
#undef cudaLaunchKernelExC
#include "../harness.h"
#include "norm_cases.h"

static kvprim_comm_desc good_desc(void)
{
    kvprim_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank = 1;
    desc.world = 4;
    return desc;
}

/* init refuses rank 1 of 4 with one of these fields, and says so. */
static void test_descriptors(void)
{
    static const struct {
        size_t field;
        int32_t value;
        const char *words;
    } bad[] = {
        {offsetof(kvprim_comm_desc, rank), 4, "desc->rank is 4, must be 0 to 3"},
        {offsetof(kvprim_comm_desc, rank), -1, "desc->rank is -1"},
        {offsetof(kvprim_comm_desc, world), 0, "desc->world is 0"},
        {offsetof(kvprim_comm_desc, timeout_ms), -5, "desc->timeout_ms is -5"},
        {offsetof(kvprim_comm_desc, deterministic), 2, "desc->deterministic is 2"},
        {offsetof(kvprim_comm_desc, no_pdl), -1, "desc->no_pdl is -1"},
        {offsetof(kvprim_comm_desc, init_timeout_ms), -1, "desc->init_timeout_ms is -1, must be 0 to"},
        {offsetof(kvprim_comm_desc, max_sms), -7, "desc->max_sms is -7"},
        {offsetof(kvprim_comm_desc, no_kernels), 3, "desc->no_kernels is 3, must be 0 to 1"},
        {offsetof(kvprim_comm_desc, nccl_window), 2, "desc->nccl_window is 2"},
        {offsetof(kvprim_comm_desc, launch_dependents), 2, "desc->launch_dependents is 2, must be 0 to 1"},
    };
    static const int32_t in_use[] = {kvpn_alive, kvpn_initialising, kvpn_aborted};
    kvprim_comm comm;
    kvprim_comm_desc d = good_desc();
    memset(&comm, 0, sizeof comm);
    CHECK(kvpn_check_comm_desc(&comm, &d) == KVPRIM_OK);
    CHECK_ERROR(kvprim_comm_init(NULL, &d), KVPRIM_ERROR_NULL, "comm is NULL");
    CHECK_ERROR(kvprim_comm_init(&comm, NULL), KVPRIM_ERROR_NULL, "desc is NULL");
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        d = good_desc();
        memcpy((char *)&d + bad[k].field, &bad[k].value, sizeof bad[k].value);
        CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, bad[k].words);
    }
    d = good_desc(), d.reserved = -1;
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->reserved is -1, must be 0");
    d = good_desc(), d.buffer_bytes = SIZE_MAX;
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_SIZE, "desc->buffer_bytes is");
    d = good_desc();
    comm.self = &comm;
    for (int k = 0; k < 3; k++) {
        comm.state = in_use[k];
        CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "in use");
    }
}

static void test_given_memory(void)
{
    static char memory[32];
    kvprim_comm comm;
    kvprim_comm_desc d = good_desc();
    void *peers[9];
    memset(&comm, 0, sizeof comm);
    for (int r = 0; r < 9; r++)
        peers[r] = memory + (16 - (uintptr_t)memory % 16);
    d.peers = peers, d.peer_bytes = kvpn_min_peer_bytes;
    CHECK(kvpn_check_comm_desc(&comm, &d) == KVPRIM_OK);
    d.peer_bytes--;
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_SIZE,
                "desc->peer_bytes is 16777215, must be at least 16777216");
    d.peer_bytes++;
    peers[3] = memory + (15 - (uintptr_t)memory % 16);
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->peers[3]");
    peers[3] = NULL;
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->peers[3]");
    d.world = 9;
    CHECK_ERROR(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "must be at most 8");
}

/* Every function refuses a communicator that is not alive, whatever its other arguments are. */
static void refuses(kvprim_comm *comm, kvprim_status status, const char *word)
{
    float x = 0;
    size_t bytes = 1;
    CHECK_ERROR(kvprim_all_reduce(comm, &x, &x, 1, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    CHECK_ERROR(kvprim_all_reduce(comm, NULL, NULL, 0, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    CHECK_ERROR(kvprim_all_gather(comm, &x, &x, 1, KVPRIM_F32, NULL), status, word);
    CHECK_ERROR(kvprim_all_gatherv(comm, &x, &x, NULL, KVPRIM_F32, NULL), status, word);
    CHECK_ERROR(kvprim_all_to_all(comm, &x, &x, 1, KVPRIM_F32, NULL), status, word);
    CHECK_ERROR(kvprim_all_to_allv(comm, &x, &x, NULL, KVPRIM_F32, NULL), status, word);
    CHECK_ERROR(kvprim_reduce_scatter(comm, &x, &x, 1, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    CHECK_ERROR(kvprim_broadcast(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    CHECK_ERROR(kvprim_send(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    CHECK_ERROR(kvprim_recv(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    CHECK_ERROR(kvprim_all_reduce_norm(comm, NULL, NULL), status, word);
    CHECK_ERROR(kvprim_group_start(comm), status, word);
    CHECK_ERROR(kvprim_group_end(comm), status, word);
    CHECK_ERROR(kvprim_comm_check(comm), status, word);
    CHECK_ERROR(kvprim_comm_abort(comm), status, word);
    CHECK_ERROR(kvprim_comm_destroy(comm), status, word);
    CHECK(kvprim_comm_buffer(comm, &bytes) == NULL && bytes == 0);
    CHECK(kvprim_comm_buffer(comm, NULL) == NULL);
    CHECK(strstr(kvprim_comm_describe(comm), "not alive") != NULL);
}

static void test_not_alive(void)
{
    kvprim_comm comm, moved;
    refuses(NULL, KVPRIM_ERROR_NULL, "comm is NULL");
    memset(&comm, 0, sizeof comm);
    refuses(&comm, KVPRIM_ERROR_ARGUMENT, "not initialised");
    memset(&comm, 0xa5, sizeof comm);
    refuses(&comm, KVPRIM_ERROR_ARGUMENT, "not initialised");
    comm.self = &comm;
    comm.state = kvpn_alive, comm.process = (int32_t)getpid();
    moved = comm;
    refuses(&moved, KVPRIM_ERROR_ARGUMENT, "moved");
    comm.state = kvpn_initialising; /* init runs */
    CHECK(kvprim_comm_check(&comm) == KVPRIM_OK);
    CHECK_ERROR(kvprim_comm_destroy(&comm), KVPRIM_ERROR_ARGUMENT, "not initialised");
    comm.state = kvpn_aborted;
    CHECK_ERROR(kvprim_comm_check(&comm), KVPRIM_ERROR_ARGUMENT, "was aborted: destroy it");
    CHECK_ERROR(kvprim_comm_abort(&comm), KVPRIM_ERROR_ARGUMENT, "was aborted");
    CHECK_ERROR(kvprim_broadcast(&comm, &comm, 1, KVPRIM_F32, 0, NULL), KVPRIM_ERROR_ARGUMENT, "was aborted");
}

/* Why kernels are off, and which versions of NCCL start early. */
static void test_off_reasons(void)
{
    kvprim_comm_desc d = good_desc();
#ifdef KVPRIM_NCCL_KERNELS
    (void)unsetenv("NCCL_P2P_DISABLE");
    (void)unsetenv("NCCL_P2P_LEVEL");
    CHECK(kvpn_kernels_off_reason(&d) == NULL);
    d.world = 8;
    CHECK(kvpn_kernels_off_reason(&d) == NULL);
    d.world = 9;
    CHECK(strstr(kvpn_kernels_off_reason(&d), "more than 8") != NULL);
    d.world = 1;
    CHECK(strstr(kvpn_kernels_off_reason(&d), "one rank") != NULL);
    d.world = 2, d.no_kernels = 1;
    CHECK(strstr(kvpn_kernels_off_reason(&d), "no_kernels") != NULL);
    d.no_kernels = 0;
    (void)setenv("NCCL_P2P_DISABLE", "1", 1);
    CHECK(strstr(kvpn_kernels_off_reason(&d), "NCCL_P2P_DISABLE") != NULL);
    (void)setenv("NCCL_P2P_DISABLE", "0", 1);
    CHECK(kvpn_kernels_off_reason(&d) == NULL);
    (void)setenv("NCCL_P2P_LEVEL", "LOC", 1);
    CHECK(strstr(kvpn_kernels_off_reason(&d), "NCCL_P2P_LEVEL") != NULL);
    (void)setenv("NCCL_P2P_LEVEL", "NVL", 1);
    CHECK(kvpn_kernels_off_reason(&d) == NULL);
    (void)unsetenv("NCCL_P2P_LEVEL");
#else
    CHECK(strstr(kvpn_kernels_off_reason(&d), "nvcc") != NULL);
#endif
    CHECK(!kvpn_nccl_starts_early(22706) && kvpn_nccl_starts_early(22803) && kvpn_nccl_starts_early(23006));
    CHECK(!kvpn_nccl_starts_early(23007) && !kvpn_nccl_starts_early(21903));
}

/* Hashes tell machines and ranks apart. */
static void test_hashes(void)
{
    CHECK(kvpn_hash_first_line("/there/is/no/such/file") == 0 && kvpn_hash_first_line("/dev/null") == 0);
    const uint64_t mark = kvpn_hash_first_line("/proc/sys/kernel/random/uuid");
    CHECK(mark != 0 && mark != kvpn_hash_first_line("/proc/sys/kernel/random/uuid"));
    const uint64_t machine = kvpn_hash_first_line("/proc/sys/kernel/random/boot_id");
    CHECK(machine != 0 && machine == kvpn_hash_first_line("/proc/sys/kernel/random/boot_id"));
}

/* Slots are found as long as someone has a reference to them. */
static void test_shared_slots(void)
{
    kvpn_slots *slots[3];
    for (int k = 0; k < 3; k++) {
        slots[k] = (kvpn_slots *)calloc(1, sizeof(kvpn_slots));
        slots[k]->refs = 1, slots[k]->nonce = (uint64_t)k + 1;
        kvpn_publish_slots(slots[k]);
    }
    CHECK(kvpn_retain_slots(2) == slots[1] && kvpn_retain_slots(4) == NULL);
    kvpn_release_slots(slots[1], true);
    CHECK(kvpn_retain_slots(2) == slots[1]);
    kvpn_release_slots(slots[1], true);
    kvpn_release_slots(slots[1], true);
    CHECK(kvpn_retain_slots(2) == NULL);
    kvpn_release_slots(slots[2], true);
    CHECK(kvpn_retain_slots(3) == NULL && kvpn_retain_slots(1) == slots[0]);
    kvpn_release_slots(slots[0], true);
    kvpn_release_slots(slots[0], true);
    CHECK(kvpn_local_slots == NULL);
}

/* The init task of rank 1 of `world`, whose ranks all say the same. */
static void fill_infos(kvpn_init_task *o, kvpn_rank_info *infos, int world)
{
    memset(o, 0, sizeof *o);
    memset(infos, 0, sizeof *infos * (size_t)world);
    o->comm.world = world, o->comm.rank = 1, o->all = infos;
    for (int r = 0; r < world; r++)
        infos[r].has_kernels = 1, infos[r].max_sms = 64, infos[r].peer_bytes = kvpn_max_peer_bytes;
    o->mine = infos[1];
}

/* All ranks come to the same result from what they tell each other. */
static void test_comparison(void)
{
    kvpn_init_task o;
    kvpn_rank_info infos[3];
    fill_infos(&o, infos, 3);
    CHECK(kvpn_compare_ranks(&o) == KVPRIM_OK && o.comm.blocks == 64);
    infos[2].max_sms = 20, infos[0].peer_bytes = kvpn_min_peer_bytes;
    CHECK(kvpn_compare_ranks(&o) == KVPRIM_OK && o.comm.blocks == 20);
    CHECK((uint64_t)4 * 16 * 3 * 20 * o.comm.block_slots <= kvpn_min_peer_bytes - 2 * kvpn_page);
    for (int k = 0; k < kvpn_setting_count; k++) {
        fill_infos(&o, infos, 3);
        infos[2].settings[k] = 9;
        CHECK_ERROR(kvpn_compare_ranks(&o), k == 0 ? KVPRIM_ERROR_SIZE : KVPRIM_ERROR_ARGUMENT, kvpn_setting_names[k]);
        CHECK(strstr(kvprim_last_error(), "is 0, but 9 on rank 2") != NULL);
    }
}

static void test_types(void)
{
    static const size_t bytes[] = {1, 2, 2, 4, 8, 1, 4, 8, 1, 1};
    for (int t = KVPRIM_U8; t <= KVPRIM_F8E5M2; t++) {
        CHECK(kvpn_type_of((kvprim_dtype)t).bytes == bytes[t - KVPRIM_U8]);
        CHECK(kvpn_type_of((kvprim_dtype)t).name != NULL);
        for (int u = KVPRIM_U8; u < t; u++)
            CHECK(kvpn_type_of((kvprim_dtype)t).nccl != kvpn_type_of((kvprim_dtype)u).nccl);
    }
    CHECK(kvpn_type_of(KVPRIM_BF16).nccl == (int)ncclBfloat16);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
    CHECK(kvpn_type_of(KVPRIM_F8E4M3).nccl == (int)ncclFloat8e4m3);
    CHECK(kvpn_type_of(KVPRIM_F8E5M2).nccl == (int)ncclFloat8e5m2);
#endif
    CHECK(kvpn_type_of((kvprim_dtype)(KVPRIM_F8E5M2 + 1)).name == NULL);
    CHECK(kvpn_type_of((kvprim_dtype)(KVPRIM_U8 - 1)).name == NULL);
    CHECK(kvpn_ops[KVPRIM_SUM] == ncclSum && kvpn_ops[KVPRIM_MAX] == ncclMax && kvpn_ops[KVPRIM_PROD] == ncclProd);
    CHECK(kvpn_ops[KVPRIM_MIN] == ncclMin && kvpn_ops[KVPRIM_AVG] == ncclAvg);
}

/* A call from send to recv with so many elements of 4 bytes each. */
static kvpn_call call_of(kvprim_comm *comm, char *recv, const char *send, size_t recv_count, size_t send_count)
{
    kvpn_call c = kvpn_make_call(kvpn_all_reduce, "test", comm, NULL);
    c.recv = recv, c.send = send, c.count = 1, c.dtype = KVPRIM_F32;
    c.recv_count = recv_count;
    c.send_count = send_count;
    c.element = 4;
    return c;
}

static void test_calls(void)
{
    static char m[64];
    kvprim_comm comm;
    memset(&comm, 0, sizeof comm);
    comm.world = 2;
    kvpn_call c = call_of(&comm, m, m, 4, 4);
    CHECK(kvpn_check_aliasing(&c) == KVPRIM_OK);
    c = call_of(&comm, m, m + 16, 4, 4);
    CHECK(kvpn_check_aliasing(&c) == KVPRIM_OK);
    c = call_of(&comm, m + 16, m, 4, 4);
    CHECK(kvpn_check_aliasing(&c) == KVPRIM_OK);
    c = call_of(&comm, m + 4, m, 4, 4);
    CHECK_ERROR(kvpn_check_aliasing(&c), KVPRIM_ERROR_OVERLAP, "not in place");
    c = call_of(&comm, m, m + 16, 8, 4); /* all_gather of rank 1 is in place, of rank 0 it is not */
    c.kind = kvpn_all_gather, c.count = 4, comm.rank = 1;
    CHECK(kvpn_check_aliasing(&c) == KVPRIM_OK);
    comm.rank = 0;
    CHECK_ERROR(kvpn_check_aliasing(&c), KVPRIM_ERROR_OVERLAP, "not in place");
    c = call_of(&comm, m + 16, m, 4, 8); /* the same for reduce_scatter */
    c.kind = kvpn_reduce_scatter, c.count = 4, comm.rank = 1;
    CHECK(kvpn_check_aliasing(&c) == KVPRIM_OK);
    comm.rank = 0;
    CHECK_ERROR(kvpn_check_aliasing(&c), KVPRIM_ERROR_OVERLAP, "not in place");
    CHECK(kvpn_check_pointer(&c, "send", NULL, 0) == KVPRIM_OK);
    CHECK_ERROR(kvpn_check_pointer(&c, "send", NULL, 4), KVPRIM_ERROR_NULL, "send is NULL");
    CHECK_ERROR(kvpn_check_pointer(&c, "send", m + 2, 4), KVPRIM_ERROR_ARGUMENT, "not aligned");
    CHECK_ERROR(kvpn_check_pointer(&c, "send", m, SIZE_MAX / 4), KVPRIM_ERROR_SIZE, "past the end of memory");
    c.dtype = (kvprim_dtype)77;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "dtype is 77, which is not an element type");
    c.dtype = KVPRIM_F32, c.op_or_peer = 9;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "op is 9");
    c.op_or_peer = -1;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "op is -1");
    c.kind = kvpn_broadcast, c.op_or_peer = 2;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "root is 2, must be 0 to 1");
    c.kind = kvpn_recv;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "peer is 2, must be 0 to 1");
    c.op_or_peer = -1;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_ARGUMENT, "peer is -1, must be 0 to 1");
    c.op_or_peer = 1, c.count = SIZE_MAX / 4;
    CHECK_ERROR(kvpn_check_call(&c), KVPRIM_ERROR_SIZE, "too many bytes");
}

/* Which of NCCL's calls may take its symmetric kernels. */
static void test_inside(void)
{
    static char m[256];
    kvprim_comm comm;
    memset(&comm, 0, sizeof comm);
    comm.buffer = m, comm.buffer_bytes = 128;
    kvpn_call c = call_of(&comm, m + 64, m, 4, 4);
    CHECK(!kvpn_may_use_window(&c));
    comm.in_windows = 1;
    CHECK(kvpn_may_use_window(&c));
    c.recv = m + 128;
    CHECK(!kvpn_may_use_window(&c));
    c.recv = m, c.kind = kvpn_broadcast;
    CHECK(!kvpn_may_use_window(&c));
    /* the caller's communicator may have windows of its own */
    c.recv = m + 128, c.kind = kvpn_all_gather, comm.nccl_borrowed = 1;
    CHECK(kvpn_may_use_window(&c));
}

static void test_ids(void)
{
    kvprim_comm_id a, b;
    CHECK_ERROR(kvprim_comm_new_id(NULL), KVPRIM_ERROR_NULL, "out is NULL");
    const kvprim_status status = kvprim_comm_new_id(&a);
    if (status != KVPRIM_OK) { /* NCCL found no network to listen on */
        CHECK(status == KVPRIM_ERROR_NCCL && strstr(kvprim_last_error(), "ncclGetUniqueId") != NULL);
        skip("%s", kvprim_last_error());
        return;
    }
    CHECK(kvprim_comm_new_id(&b) == KVPRIM_OK && memcmp(&a, &b, sizeof a) != 0);
}

/* After a timeout or an abort, every call reports it and names the rank. */
static void test_stop_reasons(void)
{
    kvprim_comm comm;
    uint32_t stop = 0;
    memset(&comm, 0, sizeof comm);
    comm.rank = 2, comm.timeout_ms = 1500;
    CHECK(kvpn_check_stop("test", &comm) == KVPRIM_OK);
    comm.stop = &stop;
    CHECK(kvpn_check_stop("test", &comm) == KVPRIM_OK);
    stop = kvpn_stop_timeout | 2 << 8 | 3 << 16;
    CHECK_ERROR(kvpn_check_stop("test", &comm), KVPRIM_ERROR_TIMEOUT, "rank 2 waited 1500 ms for rank 3");
    stop = kvpn_stop_timeout | 1 << 8 | 3 << 16;
    CHECK_ERROR(kvpn_check_stop("test", &comm), KVPRIM_ERROR_TIMEOUT, "rank 2: rank 1 timed out waiting for rank 3");
    stop = kvpn_stop_aborted | 7 << 8;
    CHECK_ERROR(kvpn_check_stop("test", &comm), KVPRIM_ERROR_TIMEOUT, "rank 2: rank 7 was aborted");
}

/* The norm of `world` ranks on the host, against the oracle. */
static void norm_on_host(kvprim_dtype dtype, int64_t tokens, int64_t hidden, int world, int plain, uint64_t seed)
{
    const norm_case c = norm_draw(dtype, tokens, hidden, plain, seed, seed * 7 + 1);
    char *const image = (char *)allocate(c.bytes);
    const int rank = (int)(seed % (uint64_t)world);
    norm_fill(&c, rank, image);
    norm_expect(&c, rank, world, image, true);
    free(image);
}

static void test_norm_on_host(void)
{
    static const int64_t sizes[] = {8, 16, 24, 120, 512, 1000, 4096, 16376, 16384};
    for (int world = 1; world <= 9; world++)
        for (int k = 0; k < 9; k++)
            for (int n = 0; n < (sizes[k] < 1000 ? 12 : 1); n++)
                norm_on_host(n % 2 ? KVPRIM_BF16 : KVPRIM_F16, 1 + (sizes[k] < 1000 ? n * 7 % 41 : n), sizes[k], world,
                             n % 8 == 7, (uint64_t)(n * 1000 + k * 10 + world));
}

/* Of numbers from denormals to infinity. */
static void test_roots(void)
{
    for (uint64_t n = 0; n < 20000; n++) {
        const float x = kvpi_float_of((uint32_t)hash_u64(n) & 0x7fffffff);
        if (!isnan(x))
            CHECK(kvpn_host_rsqrt(x) == (float)(1 / sqrt((double)x)));
    }
    CHECK(isinf(kvpn_host_rsqrt(0)) && kvpn_host_rsqrt(INFINITY) == 0 && isnan(kvpn_host_rsqrt(NAN)));
    CHECK(kvpn_host_rsqrt(FLT_MAX) == (float)(1 / sqrt((double)FLT_MAX)));
    CHECK(kvpn_host_rsqrt(kvpi_float_of(1)) == (float)(1 / sqrt((double)kvpi_float_of(1))));
}

/* A description that has every tensor, each in 64 KB of its own: 4 tokens x 64. */
static char norm_memory[9][1 << 16];

static kvprim_norm_desc good_norm(void)
{
    kvprim_norm_desc d;
    char *p[9];
    for (int k = 0; k < 9; k++)
        p[k] = norm_memory[k] + (16 - (uintptr_t)norm_memory[k] % 16) % 16;
    memset(&d, 0, sizeof d);
    d.dtype = KVPRIM_BF16, d.tokens = 4, d.hidden = 64, d.eps = 1e-5f;
    d.send = p[0], d.residual = p[1], d.weight = p[2], d.sum = p[3], d.residual_out = p[4], d.out = p[5];
    d.quantised = p[6], d.scale = (float *)(void *)p[7];
    return d;
}

/* Both functions refuse it: they check alike. */
static void norm_refuses(const kvprim_norm_desc *d, kvprim_status status, const char *words)
{
    CHECK_ERROR(kvpn_check_norm("test", d, &d->send, 1, false), status, words);
    CHECK_ERROR(kvprim_all_reduce_norm_host(d, &d->send, 1), status, words);
}

/* Scales of groups: of 4 tokens and 16 groups, whose places may not lie in each other. */
static void test_norm_groups(void)
{
    static const struct {
        int64_t stride, step;
        kvprim_dtype dtype;
        bool fits;
    } cases[] = {{0, 0, KVPRIM_F32, true},         {16, 1, KVPRIM_F32, true},   {15, 1, KVPRIM_F32, false},
                 {1, 4, KVPRIM_F32, true},         {1, 3, KVPRIM_F32, false},   {2, 7, KVPRIM_F32, true},
                 {2, 6, KVPRIM_F32, false},        {4, 1, KVPRIM_F8E8M0, true}, {3, 1, KVPRIM_F8E8M0, false},
                 {-16, 1, KVPRIM_F32, false},      {16, -1, KVPRIM_F32, false}, {INT64_MAX, 1, KVPRIM_F32, false},
                 {1, INT64_MAX, KVPRIM_F32, false}};
    kvprim_norm_desc d = good_norm();
    d.hidden = 2048, d.scale_group = 128;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        d.scale_stride = cases[k].stride, d.scale_group_stride = cases[k].step, d.scale_dtype = cases[k].dtype;
        if (cases[k].fits)
            CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
        else
            norm_refuses(&d, KVPRIM_ERROR_SIZE,
                         d.scale_stride < 0 || d.scale_group_stride < 0 || d.scale_stride > 1 << 20 ||
                                 d.scale_group_stride > 1 << 20
                             ? "less than 0 or too large"
                             : "lie in each other");
    }
    d.scale_stride = d.scale_group_stride = 0, d.scale_dtype = KVPRIM_F32;
    d.tokens = INT64_MAX;
    norm_refuses(&d, KVPRIM_ERROR_SIZE, "too large for 9223372036854775807 tokens");
    d.tokens = 4, d.scale_group_stride = 2; /* the tokens' stride follows */
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d.scale_group_stride = 0, d.scale_dtype = KVPRIM_F16;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale_dtype is ");
    d.scale_dtype = KVPRIM_F32, d.scale_per_token = 1;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale_group and scale_per_token are both set");
    d.scale_per_token = 0, d.scale = (float *)d.out - 64; /* 64 scales, up to out */
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d.scale++;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->scale, ");
    d = good_norm(), d.quantised = NULL, d.scale = NULL, d.hidden = 128, d.scale_group = 128;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale_group is set, but");
}

static void test_norm_fields(void)
{
    static const struct {
        size_t field;
        int32_t value;
        kvprim_status status;
        const char *words;
    } bad[] = {
        {offsetof(kvprim_norm_desc, dtype), KVPRIM_F32, KVPRIM_ERROR_ARGUMENT, "desc->dtype is 19, must be"},
        {offsetof(kvprim_norm_desc, dtype), 0, KVPRIM_ERROR_ARGUMENT, "desc->dtype is 0"},
        {offsetof(kvprim_norm_desc, hidden), 0, KVPRIM_ERROR_SIZE, "desc->hidden is 0, must be a multiple of 8"},
        {offsetof(kvprim_norm_desc, hidden), 60, KVPRIM_ERROR_SIZE, "desc->hidden is 60"},
        {offsetof(kvprim_norm_desc, hidden), 16392, KVPRIM_ERROR_SIZE, "from 8 to 16384"},
        {offsetof(kvprim_norm_desc, eps), (int32_t)0xb727c5ac, KVPRIM_ERROR_ARGUMENT, "desc->eps is -1e-05"},
        {offsetof(kvprim_norm_desc, eps), 0x7fc00000, KVPRIM_ERROR_ARGUMENT, "must be finite"},
        {offsetof(kvprim_norm_desc, eps), 0x7f800000, KVPRIM_ERROR_ARGUMENT, "desc->eps is inf"},
        {offsetof(kvprim_norm_desc, scale_min), 0x00400000, KVPRIM_ERROR_ARGUMENT, "neither 0 nor from 2^-126"},
        {offsetof(kvprim_norm_desc, scale_min), 0x7f800000, KVPRIM_ERROR_ARGUMENT, "desc->scale_min is inf"},
        {offsetof(kvprim_norm_desc, scale_per_token), 2, KVPRIM_ERROR_ARGUMENT,
         "desc->scale_per_token is 2, must be 0 or"},
        {offsetof(kvprim_norm_desc, weight_plus_one), -1, KVPRIM_ERROR_ARGUMENT, "desc->weight_plus_one is -1"},
        {offsetof(kvprim_norm_desc, scale_group), 64, KVPRIM_ERROR_ARGUMENT, "desc->scale_group is 64"},
        {offsetof(kvprim_norm_desc, scale_group), 128, KVPRIM_ERROR_SIZE, "desc->hidden is 64, must be a multiple of"},
        {offsetof(kvprim_norm_desc, scale_stride), 1, KVPRIM_ERROR_ARGUMENT, "desc->scale_stride is set, but"},
        {offsetof(kvprim_norm_desc, scale_group_stride), 1, KVPRIM_ERROR_ARGUMENT, "desc->scale_group_stride is set"},
        {offsetof(kvprim_norm_desc, scale_power_of_two), 1, KVPRIM_ERROR_ARGUMENT, "desc->scale_power_of_two is set"},
        {offsetof(kvprim_norm_desc, scale_power_of_two), 2, KVPRIM_ERROR_ARGUMENT, "desc->scale_power_of_two is 2"},
        {offsetof(kvprim_norm_desc, scale_dtype), KVPRIM_F32, KVPRIM_ERROR_ARGUMENT, "desc->scale_dtype is set, but"},
        {offsetof(kvprim_norm_desc, reserved), 7, KVPRIM_ERROR_ARGUMENT, "desc->reserved is 7, must be 0"},
        {offsetof(kvprim_norm_desc, send_stride), 56, KVPRIM_ERROR_SIZE,
         "must be a multiple of 8 and at least desc->hidden, 64"},
        {offsetof(kvprim_norm_desc, residual_stride), 68, KVPRIM_ERROR_SIZE, "the stride of desc->residual is 68"},
        {offsetof(kvprim_norm_desc, sum_stride), 8, KVPRIM_ERROR_SIZE, "the stride of desc->sum is 8"},
        {offsetof(kvprim_norm_desc, residual_out_stride), 8, KVPRIM_ERROR_SIZE,
         "the stride of desc->residual_out is 8"},
        {offsetof(kvprim_norm_desc, out_stride), 8, KVPRIM_ERROR_SIZE, "the stride of desc->out is 8"},
        {offsetof(kvprim_norm_desc, quantised_stride), 8, KVPRIM_ERROR_SIZE, "the stride of desc->quantised is 8"},
    };
    kvprim_norm_desc d = good_norm();
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        d = good_norm();
        memcpy((char *)&d + bad[k].field, &bad[k].value, sizeof bad[k].value);
        norm_refuses(&d, bad[k].status, bad[k].words);
    }
    test_norm_groups();
    d = good_norm(), d.tokens = -1;
    norm_refuses(&d, KVPRIM_ERROR_SIZE, "desc->tokens is -1");
    d.tokens = INT64_MAX;
    norm_refuses(&d, KVPRIM_ERROR_SIZE, "past the end of memory");
    d = good_norm(), d.out_stride = INT64_MAX / 8 * 8;
    norm_refuses(&d, KVPRIM_ERROR_SIZE, "past the end of memory");
    d = good_norm(), d.tokens = 0, d.send = d.weight = NULL, d.out = d.quantised = NULL;
    CHECK(kvprim_all_reduce_norm_host(&d, &d.send, 1) == KVPRIM_OK);
    CHECK_ERROR(kvprim_all_reduce_norm_host(NULL, &d.send, 1), KVPRIM_ERROR_NULL, "desc is NULL");
    CHECK_ERROR(kvprim_all_reduce_norm_host(&d, NULL, 1), KVPRIM_ERROR_NULL, "sends is NULL");
    CHECK_ERROR(kvprim_all_reduce_norm_host(&d, &d.send, 0), KVPRIM_ERROR_ARGUMENT, "world is 0");
}

/* Which tensors there must be, and how they are aligned: less strictly on the host. */
static void test_norm_tensors(void)
{
    kvprim_norm_desc d = good_norm();
    d.send = NULL;
    CHECK_ERROR(kvpn_check_norm("test", &d, &d.send, 1, false), KVPRIM_ERROR_NULL, "desc->send is NULL");
    CHECK_ERROR(kvprim_all_reduce_norm_host(&d, &d.send, 1), KVPRIM_ERROR_NULL, "sends[0] is NULL");
    d = good_norm(), d.weight = NULL;
    norm_refuses(&d, KVPRIM_ERROR_NULL, "desc->weight is NULL");
    d = good_norm(), d.sum = NULL, d.sum_stride = INT64_MIN; /* 0 bytes, as 64 bits wrap around */
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d = good_norm(), d.scale = NULL;
    norm_refuses(&d, KVPRIM_ERROR_NULL, "desc->scale is NULL, but desc->quantised is set");
    d = good_norm(), d.quantised = NULL;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale is set, but desc->quantised is NULL");
    d.scale = NULL, d.scale_per_token = 1;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale_per_token is set, but");
    d.scale_per_token = 0, d.scale_min = 1;
    norm_refuses(&d, KVPRIM_ERROR_ARGUMENT, "desc->scale_min is set, but");
    d.scale_min = 0, d.out = NULL;
    norm_refuses(&d, KVPRIM_ERROR_NULL, "desc->out and desc->quantised are NULL");
    for (int k = 0; k < 8; k++) {
        static const char *const words[] = {"desc->residual is",     "desc->weight is", "desc->sum is",
                                            "desc->residual_out is", "desc->out is",    "desc->quantised is",
                                            "desc->scale is",        "desc->send is"};
        d = good_norm();
        const void **const inputs[] = {&d.residual, &d.weight, &d.send};
        void **const outputs[] = {&d.sum, &d.residual_out, &d.out, &d.quantised};
        const size_t shift = k == 5 ? 4 : k == 6 ? 2 : 8;
        if (k < 2 || k == 7)
            *inputs[k < 2 ? k : 2] = (const char *)*inputs[k < 2 ? k : 2] + shift;
        else if (k < 6)
            *outputs[k - 2] = (char *)*outputs[k - 2] + shift;
        else
            d.scale = (float *)(void *)((char *)(void *)d.scale + shift);
        CHECK_ERROR(kvpn_check_norm("test", &d, &d.send, 1, false), KVPRIM_ERROR_ARGUMENT, words[k]);
        CHECK(strstr(kvprim_last_error(), "not aligned to") != NULL);
        CHECK(kvpn_check_norm("test", &d, &d.send, 1, true) == (k == 6 ? KVPRIM_ERROR_ARGUMENT : KVPRIM_OK));
    }
    d = good_norm(), d.out = (char *)d.out + 1;
    CHECK_ERROR(kvprim_all_reduce_norm_host(&d, &d.send, 1), KVPRIM_ERROR_ARGUMENT, "not aligned to 2 bytes");
}

/* Other tensors begin where the rows of desc->out end. */
static void test_norm_gaps(void)
{
    kvprim_norm_desc d = good_norm();
    char *const out = (char *)d.out;
    d.out_stride = 136, d.residual = out + 944;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d = good_norm(), d.out_stride = 136, d.weight = out + 128;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d.weight = out + 112;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    d = good_norm(), d.out_stride = 96, d.quantised_stride = 192, d.quantised = out + 128;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d.quantised = out + 64;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    d = good_norm(), d.scale = (float *)(void *)(out - 4);
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
}

/* Outputs lie in the place of inputs, between their rows, or apart. */
static void test_norm_overlaps(void)
{
    kvprim_norm_desc d = good_norm();
    void *const send = (void *)(uintptr_t)d.send, *const residual = (void *)(uintptr_t)d.residual;
    d.sum = send, d.residual_out = residual;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d = good_norm(), d.residual_out = send, d.out = residual;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d = good_norm(), d.sum = residual;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->sum, ");
    d = good_norm(), d.out = d.sum = send;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    d = good_norm(), d.out = send, d.out_stride = 72;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "in place, their strides are the same");
    d.send_stride = 72;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d = good_norm(), d.out = (char *)send + 16;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    d = good_norm(), d.quantised = send;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->quantised, ");
    d = good_norm(), d.out = (void *)(uintptr_t)d.weight;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->weight, ");
    d = good_norm(), d.out = d.scale;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->scale, ");
    d = good_norm(), d.scale_per_token = 1, d.scale = (float *)send;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->scale, ");
    for (int shift = 48; shift <= 96; shift += 16) { /* of rows of 64 elements, 136 apart: 8 are too many at the end */
        d = good_norm(), d.send_stride = d.out_stride = 136, d.out = (char *)send + 2 * shift;
        if (shift >= 64 && shift <= 72)
            CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
        else
            norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    }
    d = good_norm(), d.send_stride = d.out_stride = 136, d.out = send, d.send = (char *)send + 144;
    CHECK(kvpn_check_norm("test", &d, &d.send, 1, false) == KVPRIM_OK);
    d.out_stride = 144;
    norm_refuses(&d, KVPRIM_ERROR_OVERLAP, "desc->out, ");
    test_norm_gaps();
    /* on the host, an output must not be another rank's addend in part */
    d = good_norm();
    const void *const sends[] = {d.send, norm_memory[8], (char *)d.out + 128};
    CHECK(kvprim_all_reduce_norm_host(&d, sends, 2) == KVPRIM_OK);
    CHECK_ERROR(kvprim_all_reduce_norm_host(&d, sends, 3), KVPRIM_ERROR_OVERLAP, "sends[2], ");
}

#ifdef KVPRIM_NCCL_KERNELS
/* A communicator as init leaves it, with at most so many blocks, and so many bytes for each rank. */
static void open_for_grid(kvprim_comm *comm, int world, int blocks, size_t peer_bytes)
{
    memset(comm, 0, sizeof *comm);
    comm->world = world;
    comm->blocks = (uint32_t)blocks;
    kvpn_set_block_slots(comm, peer_bytes);
    for (int r = 0; r < world; r++)
        comm->peer[r] = comm;
}

static void check_grid(const kvprim_comm *comm, uint32_t words, kvpn_way way)
{
    kvpn_params p;
    uint32_t blocks = 0, threads = 0;
    memset(&p, 0, sizeof p);
    p.slice_packs = way == kvpn_by_two_shot ? (words + (uint32_t)comm->world - 1) / (uint32_t)comm->world : words;
    const uint32_t group = kvpn_group_of(way), roles = kvpn_roles_of(way, comm->world);
    kvpn_set_grid(comm, &p, way, &blocks, &threads);
    CHECK(blocks >= 1 && blocks <= comm->blocks);
    CHECK(threads >= 32 && threads <= kvpn_max_threads && threads % 32 == 0);
    CHECK(comm->world <= 4 || threads <= (uint32_t)(group ? kvpn_max_threads : kvpn_max_threads_of_8));
    CHECK(threads * roles <= kvpn_max_threads);
    CHECK(p.block_packs % 8 == 0);
    if (group) { /* a group has one slot more than packs, and every second group lies in the other area */
        const uint32_t rounds = (p.block_packs + group * threads - 1) / (group * threads);
        CHECK((rounds + 1) / 2 * (group + 1) * threads <= comm->block_slots);
    } else {
        CHECK(p.block_packs <= comm->block_slots);
    }
    CHECK((uint64_t)p.block_packs * blocks >= p.slice_packs && (uint64_t)p.block_packs * (blocks - 1) < p.slice_packs);
}

/* All blocks take part, each with a pack of each thread in turn; and four steps fit into the slots. */
static void check_stream_grid(const kvprim_comm *comm, uint32_t packs)
{
    kvpn_params p;
    uint32_t blocks = 0, threads = 0;
    memset(&p, 0, sizeof p);
    p.slice_packs = packs;
    kvpn_set_grid(comm, &p, kvpn_by_pipeline, &blocks, &threads);
    CHECK(threads >= 32 && threads <= kvpn_pipeline_threads && threads % 32 == 0);
    CHECK(blocks >= 1 && blocks <= comm->blocks && (blocks == comm->blocks || blocks * threads >= packs));
    CHECK((blocks - 1) * threads < packs && p.block_packs == blocks * threads);
    CHECK(kvpn_pipeline_packs * threads <= comm->block_slots);
}

/* Whatever the size is, the launch fits the slots. */
static void check_grids(const kvprim_comm *comm)
{
    static const kvpn_way ways[] = {kvpn_by_one_shot,   kvpn_by_two_shot,    kvpn_by_scatter,
                                    kvpn_by_gather,     kvpn_by_parts,       kvpn_by_parts_many,
                                    kvpn_by_parts_most, kvpn_by_gather_many, kvpn_by_gather_most};
    for (int k = 0; k < 9; k++) {
        const size_t unit = ways[k] == kvpn_by_gather || ways[k] == kvpn_by_parts ? 8 : 16,
                     most = kvpn_capacity_bytes(comm, ways[k]) / unit;
        for (size_t words = 1; words <= most; words += words / 50 + 1)
            check_grid(comm, (uint32_t)words, ways[k]);
        check_grid(comm, (uint32_t)most, ways[k]);
    }
    for (size_t packs = 1; comm->world == 2 && packs <= kvpn_capacity_bytes(comm, kvpn_by_pipeline) / 16; packs *= 3)
        check_stream_grid(comm, (uint32_t)packs);
}

static void test_grids(void)
{
    static const int blocks[] = {1, 8, 20, 64, 66, 72, 108, 128};
    for (int world = 2; world <= 8; world++)
        for (int b = 0; b < 8; b++)
            for (size_t bytes = kvpn_min_peer_bytes;; bytes += (size_t)4 << 20) {
                kvprim_comm comm;
                const size_t used = bytes < kvpn_max_peer_bytes ? bytes : (size_t)kvpn_max_peer_bytes;
                open_for_grid(&comm, world, blocks[b], used);
                const size_t slots = (size_t)4 * 16 * (size_t)world * comm.blocks * comm.block_slots;
                CHECK(slots + 2 * kvpn_page <= used && slots > used - ((size_t)1 << 20));
                check_grids(&comm);
                if (used < bytes)
                    break;
            }
}

/* Each token has a row's threads, and these have slots of their own. Each block of a cluster has a pack. Only the forms
   that ask have threads without one. */
static bool few_is_right(const kvprim_comm *comm, int64_t hidden, int64_t tokens, bool usual)
{
    char memory;
    kvprim_norm_desc d = {};
    uint32_t blocks, threads;
    d.hidden = hidden, d.tokens = tokens, d.residual = usual ? &memory : NULL, d.residual_out = d.out = &memory;
    const kvpn_norm_params p = kvpn_make_few_params(comm, &d, &blocks, &threads);
    const kvpn_norm_form form = kvpn_few_form_of(&p);
    const uint32_t shares = 1u << p.share_bits, groups = blocks >> p.share_bits;
    return blocks <= comm->blocks && blocks % shares == 0 && p.rows >= 1 && threads % kvpn_norm_lanes == 0 &&
           threads * p.rows <= kvpn_max_threads_for(comm->world) && p.block_packs * threads <= comm->block_slots &&
           groups * p.block_packs >= p.tokens && (groups - 1) * p.block_packs < p.tokens &&
           threads * shares >= p.row_packs && threads * (shares - 1) < p.row_packs &&
           (form == kvpn_norm_all || (threads * shares == p.row_packs && p.block_packs <= p.rows)) &&
           (form == kvpn_norm_all || (form == kvpn_norm_shared) == (shares > 1)) &&
           (form != kvpn_norm_plain || (usual && p.block_packs == 1)) && (form != kvpn_norm_shared || usual);
}

static void test_grids_of_few(void)
{
    static const int blocks[] = {1, 8, 44, 57, 64, 132};
    size_t shared_by[kvpn_few_max_share_bits + 1] = {};
    for (int k = 0; k < 7 * 6 * 2; k++) {
        kvprim_comm comm;
        open_for_grid(&comm, 2 + k % 7, blocks[k / 7 % 6], kvpn_max_peer_bytes);
        comm.clusters = k / 42;
        for (int64_t hidden = 8; hidden <= 16384; hidden += 8) {
            const int64_t most = kvpn_few_most_tokens(&comm, (uint32_t)hidden / 8);
            for (int64_t tokens = 1; tokens <= most; tokens += tokens / 5 + 1) {
                shared_by[kvpn_few_share_bits(&comm, (uint32_t)hidden / 8, tokens)]++;
                if (!few_is_right(&comm, hidden, tokens, true) || !few_is_right(&comm, hidden, tokens, false))
                    fail("world %d, %u blocks, clusters %d: %d tokens of %d", comm.world, (unsigned)comm.blocks,
                         comm.clusters, (int)tokens, (int)hidden);
            }
            CHECK(most == 0 || few_is_right(&comm, hidden, most, true));
        }
    }
    for (int bits = 0; bits <= kvpn_few_max_share_bits; bits++)
        CHECK(shared_by[bits] > 0);
}

/* The norm whose parts are taken, and how many of its tokens have been. */
static kvprim_norm_desc norm_whole;
static int64_t norm_taken;

static bool norm_follows(const void *part, const void *whole, int64_t stride, int64_t bytes)
{
    return part == (const char *)whole + norm_taken * stride * bytes;
}

static kvprim_status take_norm_part(const kvpn_call *, const kvprim_norm_desc *d)
{
    const kvprim_norm_desc *const w = &norm_whole;
    CHECK(norm_follows(d->send, w->send, w->send_stride, 2) && d->weight == w->weight);
    CHECK(norm_follows(d->residual, w->residual, w->residual_stride, 2));
    CHECK(norm_follows(d->sum, w->sum, w->sum_stride, 2) && norm_follows(d->out, w->out, w->out_stride, 2));
    CHECK(norm_follows(d->residual_out, w->residual_out, w->residual_out_stride, 2));
    CHECK(norm_follows(d->quantised, w->quantised, w->quantised_stride, 1));
    CHECK(norm_follows(d->scale, w->scale, w->scale_stride, 4));
    CHECK(d->tokens > 0);
    norm_taken += d->tokens;
    return KVPRIM_OK;
}

/* Each token is in one part, in order. */
static void test_norm_parts(void)
{
    kvpn_call c = {};
    for (int k = 0; k < 2 * 12; k++) {
        norm_whole = good_norm(), norm_taken = 0;
        norm_whole.tokens = 1 + k / 2, norm_whole.scale_per_token = k % 2;
        norm_whole.scale_group = k % 3 ? 0 : 128, norm_whole.scale_stride = k % 3 ? k % 2 : 5;
        norm_whole.send_stride = 64, norm_whole.residual_stride = 72, norm_whole.sum_stride = 80;
        norm_whole.residual_out_stride = 88, norm_whole.out_stride = 96, norm_whole.quantised_stride = 104;
        CHECK(kvpn_launch_norm_by(&c, &norm_whole, take_norm_part, 5) == KVPRIM_OK);
        CHECK(norm_taken == norm_whole.tokens);
    }
    norm_whole.sum = NULL;
    CHECK(kvpn_norm_part(&norm_whole, 3, 1).sum == NULL);
}

/* How a norm goes, and that each part of it fits its launch. */
static kvpn_norm_way norm_way(const kvprim_comm *comm, int64_t tokens, int64_t hidden)
{
    kvprim_norm_desc d = {};
    int64_t most = 0;
    d.tokens = tokens, d.hidden = hidden;
    const kvpn_norm_way way = kvpn_norm_way_of(comm, &d, &most);
    CHECK(most > 0 && (way != kvpn_launch_few || most <= kvpn_few_most_tokens(comm, (uint32_t)hidden / 8)));
    CHECK(way != kvpn_sum_then_norm || most * hidden * 2 <= (int64_t)kvpn_sums_bytes);
    return way;
}

static void test_norm_ways(void)
{
    for (int world = 2; world <= 8; world++) {
        kvprim_comm comm;
        open_for_grid(&comm, world, 64, kvpn_max_peer_bytes);
        for (comm.clusters = 0; comm.clusters < 2; comm.clusters++)
            for (int64_t hidden = 8; hidden <= 16384; hidden += 8)
                for (int64_t tokens = 1; tokens < 100000; tokens = 7 * tokens + 1) {
                    const bool fits = kvpn_few_most_tokens(&comm, (uint32_t)hidden / 8) > 0;
                    const kvpn_norm_way way = norm_way(&comm, tokens, hidden);
                    CHECK(way == kvpn_launch_few || way == kvpn_sum_then_norm);
                    CHECK(tokens > 1 || (way == kvpn_launch_few) == fits);
                    CHECK(world > 2 || hidden > 8192 || way == kvpn_launch_few);
                    CHECK(tokens * hidden <= 2 << 20 || (world == 2 && hidden <= 8192) || way == kvpn_sum_then_norm);
                }
        comm.peer[0] = NULL;
        CHECK(norm_way(&comm, 1, 4096) == kvpn_sum_then_norm);
        comm.world = 1;
        CHECK(norm_way(&comm, 1, 4096) == kvpn_launch_norm_alone);
    }
}

/* For parts of so many bytes, equal or not, and one that stays. Equal parts may have a higher limit. */
static kvpn_way choose_parts(const kvprim_comm *comm, size_t bytes, size_t own)
{
    const kvpn_extent even = {bytes, bytes, own}, uneven = {bytes, bytes / 2, own};
    const kvpn_way way = kvpn_choose_parts(comm, false, even), other = kvpn_choose_parts(comm, false, uneven);
    CHECK(way == other || other == kvpn_by_nccl);
    return way;
}

/* The last launch, which is not made while looks is set. */
static bool looks;
static const void *launched;
static kvpn_params launched_with;

static cudaError_t launch(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    if (!looks)
        return cudaLaunchKernelExC(config, kernel, args);
    launched = kernel;
    memcpy(&launched_with, args[0], sizeof launched_with);
    return cudaSuccess;
}

template <template <class, int> class Way, int ranks> static const void *sum_kernel(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F32    ? (const void *)kvpn_kernel<Way, kvpn_f32, ranks>
           : dtype == KVPRIM_BF16 ? (const void *)kvpn_kernel<Way, kvpn_bf16, ranks>
                                  : (const void *)kvpn_kernel<Way, kvpn_f16, ranks>;
}

/* The kernel of a reduction that is not a pipeline, of tensors that are not aligned. */
template <int ranks> static const void *odd_kernel(kvpn_way)
{
    return (const void *)kvpn_kernel<kvpn_two_shot, kvpn_any<false>, ranks>;
}
template <> const void *odd_kernel<8>(kvpn_way way)
{
    return way == kvpn_by_one_shot   ? (const void *)kvpn_kernel<kvpn_one_shot, kvpn_any<false>, 8>
           : way == kvpn_by_two_shot ? (const void *)kvpn_kernel<kvpn_two_shot, kvpn_any<false>, 8>
                                     : (const void *)kvpn_kernel<kvpn_scatter, kvpn_any<false>, 8>;
}

/* The same of any tensors. own: one for this type's sums. */
template <int ranks> static const void *reduction_kernel(kvpn_way way, kvprim_dtype dtype, bool own, bool whole)
{
    return !whole                    ? odd_kernel<ranks>(way)
           : !own                    ? (const void *)kvpn_kernel<kvpn_two_shot, kvpn_any<true>, ranks>
           : way == kvpn_by_one_shot ? sum_kernel<kvpn_one_shot, ranks>(dtype)
           : way == kvpn_by_two_shot ? sum_kernel<kvpn_two_shot, ranks>(dtype)
                                     : sum_kernel<kvpn_scatter, ranks>(dtype);
}

static const void *kernel_for(kvpn_way way, int world, kvprim_dtype dtype, bool own, bool whole)
{
    if (way == kvpn_by_pipeline)
        return !whole ? (const void *)kvpn_kernel<kvpn_pipeline, kvpn_any<false>, 2>
               : !own ? (const void *)kvpn_kernel<kvpn_pipeline, kvpn_any<true>, 2>
                      : sum_kernel<kvpn_pipeline, 2>(dtype);
    return world == 2   ? reduction_kernel<2>(way, dtype, own, whole)
           : world <= 4 ? reduction_kernel<4>(way, dtype, own, whole)
                        : reduction_kernel<8>(way, dtype, own, whole);
}

/* Which kernel each reduction launches, and what its parameters say. */
static void test_launched_reductions(void)
{
    static const struct {
        kvprim_dtype dtype;
        uint32_t bit, signs;
    } types[] = {{KVPRIM_F32, kvpn_is_f32, 0x80000000u},
                 {KVPRIM_BF16, kvpn_is_bf16, 0x80008000u},
                 {KVPRIM_F16, kvpn_is_f16, 0x80008000u},
                 {KVPRIM_F8E4M3, kvpn_is_e4m3, 0x80808080u},
                 {KVPRIM_F8E5M2, kvpn_is_e5m2, 0x80808080u}};
    static const uint32_t ops[][2] = {{KVPRIM_SUM, kvpn_sums},
                                      {KVPRIM_MAX, kvpn_takes_largest},
                                      {KVPRIM_MIN, kvpn_takes_least},
                                      {KVPRIM_AVG, kvpn_averages}};
    alignas(16) static char memory[16];
    looks = true;
    for (int k = 0; k < 7 * 5 * 5 * 4 * 2; k++) {
        const int world = 2 + k % 7, odd = k / 700, way_or_scatters = k / 7 % 5;
        const kvpn_way ways[] = {kvpn_by_one_shot, kvpn_by_two_shot, kvpn_by_scatter, kvpn_by_pipeline,
                                 kvpn_by_pipeline};
        const kvpn_way way = ways[way_or_scatters];
        const bool scatters = way_or_scatters == 2 || way_or_scatters == 4;
        const auto &type = types[k / 35 % 5];
        const uint32_t *const op = ops[k / 175 % 4];
        kvprim_comm comm;
        if (way == kvpn_by_pipeline && world > 2)
            continue;
        open_for_grid(&comm, world, 64, kvpn_max_peer_bytes);
        kvpn_call c = kvpn_make_call(scatters ? kvpn_reduce_scatter : kvpn_all_reduce, "", &comm, NULL);
        c.recv = memory, c.send = memory, c.count = (size_t)(64 + odd), c.dtype = type.dtype, c.op_or_peer = (int)op[0];
        c.element = kvpn_type_of(type.dtype).bytes;
        const kvpn_params &p = launched_with;
        const uint32_t bytes = (uint32_t)(c.count * c.element), packs = (bytes + 15) / 16, n = (uint32_t)world;
        CHECK(kvpn_launch_packs(&c, way) == KVPRIM_OK);
        CHECK(launched == kernel_for(way, world, type.dtype, c.element > 1 && op[0] == KVPRIM_SUM, !odd));
        CHECK(p.what == (op[1] | type.bit | (way == kvpn_by_two_shot ? kvpn_shares : 0)) && p.signs == type.signs);
        CHECK(p.per_rank == 1.0 / world && p.pitch == (scatters ? bytes : 0));
        CHECK(p.count == bytes && p.packs == packs);
        CHECK(p.slice_packs == (way == kvpn_by_two_shot ? (packs + n - 1) / n : packs));
    }
    looks = false;
}

/* Of an all_gather of so many bytes from each rank. */
static kvpn_way choose_gather(const kvprim_comm *comm, size_t bytes)
{
    const kvpn_extent equal = {bytes, bytes, bytes};
    return kvpn_choose_parts(comm, true, equal);
}

/* Which way a call takes: by size and kind, and by the caller's limits. */
static void test_choices(void)
{
    for (int world = 2; world <= 8; world++) {
        kvprim_comm comm;
        const kvpn_way sum_of_many = world == 2 ? kvpn_by_pipeline : kvpn_by_two_shot,
                       part_of_many = world == 2 ? kvpn_by_pipeline : kvpn_by_scatter;
        open_for_grid(&comm, world, 64, kvpn_max_peer_bytes);
        for (size_t bytes = 1; bytes < (size_t)64 << 20; bytes += bytes / 9 + 1) {
            const kvpn_way way = choose_gather(&comm, bytes);
            CHECK((way != kvpn_by_gather && way != kvpn_by_parts) || bytes <= kvpn_capacity_bytes(&comm, way));
            if (kvpn_choose_sum(&comm, false, bytes, KVPRIM_BF16, KVPRIM_SUM) == kvpn_by_one_shot)
                CHECK(bytes <= kvpn_capacity_bytes(&comm, kvpn_by_one_shot));
        }
        for (size_t bytes = 0; bytes < (size_t)64 << 20; bytes += bytes / 9 + 1)
            CHECK(choose_parts(&comm, bytes, bytes / 2) != kvpn_by_parts ||
                  bytes <= kvpn_capacity_bytes(&comm, kvpn_by_parts));
        CHECK(choose_parts(&comm, 0, 0) == kvpn_by_parts && choose_parts(&comm, 1, 0) == kvpn_by_parts);
        CHECK(choose_parts(&comm, 1, (size_t)1 << 18) == kvpn_by_parts_many);
        CHECK(choose_parts(&comm, ((size_t)1 << 18) + 1, 5) == kvpn_by_parts_many);
        CHECK(choose_parts(&comm, 5, (size_t)1 << 40) == kvpn_by_parts_many);
        CHECK(choose_parts(&comm, (size_t)1 << 30, 0) == kvpn_by_nccl);
        CHECK(choose_parts(&comm, SIZE_MAX / 2, 0) == kvpn_by_nccl);
        CHECK(choose_gather(&comm, 1) == kvpn_by_gather);
        CHECK(choose_gather(&comm, (size_t)1 << 19) == (world == 2 ? kvpn_by_parts_many : kvpn_by_gather_many));
        CHECK(choose_gather(&comm, ((size_t)1 << 16) - 1) != kvpn_by_nccl);
        CHECK(choose_gather(&comm, ((size_t)4 << 20) / (size_t)world + 1) == kvpn_by_nccl); /* odd */
        CHECK(choose_gather(&comm, (size_t)1 << 30) == kvpn_by_nccl);
        CHECK(kvpn_choose_sum(&comm, false, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_one_shot);
        for (int t = KVPRIM_U8; t <= KVPRIM_F8E5M2; t++)
            for (int op = KVPRIM_SUM; op <= KVPRIM_AVG; op++) {
                const bool own = op != KVPRIM_PROD && (t == KVPRIM_F16 || t == KVPRIM_BF16 || t == KVPRIM_F32 ||
                                                       t == KVPRIM_F8E4M3 || t == KVPRIM_F8E5M2);
                CHECK((kvpn_choose_sum(&comm, false, 8, (kvprim_dtype)t, op) == kvpn_by_one_shot) == own);
                CHECK((kvpn_choose_sum(&comm, true, 8, (kvprim_dtype)t, op) == kvpn_by_scatter) == own);
            }
        CHECK(kvpn_choose_sum(&comm, true, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_scatter);
        CHECK(kvpn_choose_sum(&comm, true, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
        CHECK(kvpn_choose_sum(&comm, false, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
        for (int link = kvpn_nvlink; world == 2 && link <= kvpn_pcie; link++) { /* what is measured on NVLink */
            comm.link = link;
            CHECK(kvpn_choose_sum(&comm, false, (size_t)8 << 20, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_two_shot);
            CHECK((kvpn_choose_sum(&comm, false, (size_t)9 << 20, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl) ==
                  (link == kvpn_pcie));
            CHECK((choose_gather(&comm, (size_t)3 << 20) == kvpn_by_nccl) == (link == kvpn_pcie));
        }
        comm.link = 0;
        comm.all_reduce_limit = 1024, comm.reduce_scatter_limit = 1024, comm.all_gather_limit = 1024;
        CHECK(kvpn_choose_sum(&comm, false, 1024, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_one_shot);
        CHECK(kvpn_choose_sum(&comm, false, 1028, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
        CHECK(kvpn_choose_sum(&comm, true, 1024 / (size_t)world, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_scatter);
        CHECK(kvpn_choose_sum(&comm, true, 1028, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
        CHECK(choose_gather(&comm, 1024 / (size_t)world) == kvpn_by_gather);
        CHECK(choose_gather(&comm, 1024) == kvpn_by_nccl);
        CHECK(choose_parts(&comm, 1024 / (size_t)world, 5) == kvpn_by_parts);
        CHECK(choose_parts(&comm, 1024, 5) == kvpn_by_nccl);
        comm.all_reduce_limit = comm.reduce_scatter_limit = comm.all_gather_limit = SIZE_MAX;
        CHECK(kvpn_choose_sum(&comm, false, (size_t)1 << 40, KVPRIM_F32, KVPRIM_SUM) == sum_of_many);
        CHECK(kvpn_choose_sum(&comm, true, (size_t)1 << 40, KVPRIM_F32, KVPRIM_SUM) == part_of_many);
        CHECK(choose_gather(&comm, (size_t)1 << 40) == (world == 2 ? kvpn_by_parts_most : kvpn_by_gather_most));
        CHECK(choose_parts(&comm, (size_t)1 << 40, 5) == kvpn_by_parts_most);
        comm.all_reduce_limit = comm.reduce_scatter_limit = 1, comm.deterministic = 1;
        CHECK(kvpn_choose_sum(&comm, false, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == sum_of_many);
        CHECK(kvpn_choose_sum(&comm, true, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == part_of_many);
        comm.peer[0] = NULL;
        CHECK(kvpn_choose_sum(&comm, false, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
    }
}

#else
static void test_grids(void)
{
    skip("not compiled by nvcc");
}

static void test_grids_of_few(void)
{
    test_grids();
}

static void test_norm_parts(void)
{
    test_grids();
}

static void test_norm_ways(void)
{
    test_grids();
}

static void test_choices(void)
{
    test_grids();
}

static void test_launched_reductions(void)
{
    test_grids();
}
#endif

/* Weak, because programs that run on GPUs link with this object, for the implementation, and have a main of their own.
   To compile the kernels for each of them takes long. */
__attribute__((weak)) int main(void)
{
    run("nccl: descriptors", test_descriptors);
    run("nccl: communicators that are not alive", test_not_alive);
    run("nccl: slots in the caller's memory", test_given_memory);
    run("nccl: why kernels are off", test_off_reasons);
    run("nccl: hashes of machines and ranks", test_hashes);
    run("nccl: slots that ranks of a process share", test_shared_slots);
    run("nccl: what ranks compare", test_comparison);
    run("nccl: types and operations", test_types);
    run("nccl: arguments of collectives", test_calls);
    run("nccl: inside a window", test_inside);
    run("nccl: ids", test_ids);
    run("nccl: timeouts and aborts are reported", test_stop_reasons);
    run("nccl: the norm on the host", test_norm_on_host);
    run("nccl: square roots on the host", test_roots);
    run("nccl: fields of a norm", test_norm_fields);
    run("nccl: tensors of a norm", test_norm_tensors);
    run("nccl: tensors of a norm that overlap", test_norm_overlaps);
    run("nccl: grids of launches", test_grids);
    run("nccl: grids of norms of few tokens", test_grids_of_few);
    run("nccl: parts of a norm", test_norm_parts);
    run("nccl: which way a norm takes", test_norm_ways);
    run("nccl: which way a call takes", test_choices);
    run("nccl: which kernel a reduction launches", test_launched_reductions);
    return finish();
}

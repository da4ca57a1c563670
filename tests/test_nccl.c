/* kvprim_nccl.h without a GPU: arguments, versions, sizes, ids. Valid C11, C++ and CUDA, which has more to test.

       cc -std=c11 -I. -I$CUDA_HOME/include tests/test_nccl.c -L$CUDA_HOME/lib64 -lcudart -lnccl -o test && ./test */
#define KVPRIM_IMPLEMENTATION
#include "../kvprim_nccl.h"

static int passed, failed, skipped, faults;

#define CHECK(condition)                                                                                               \
    do                                                                                                                 \
        if (!(condition)) {                                                                                            \
            printf("  line %d: not so: %s (last error: %s)\n", __LINE__, #condition, kvprim_last_error());             \
            faults++;                                                                                                  \
        }                                                                                                              \
    while (0)

/* The status, and a word of the text. */
#define FAILS(call, status, word)                                                                                      \
    do {                                                                                                               \
        CHECK((call) == (status));                                                                                     \
        CHECK(strstr(kvprim_last_error(), word) != NULL);                                                              \
    } while (0)

static void run(const char *name, void (*test)(void))
{
    faults = 0;
    test();
    *(faults ? &failed : &passed) += 1;
    printf("%s %s\n", faults ? "FAIL" : "ok", name);
}

static kvprim_comm_desc good_desc(void)
{
    kvprim_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank = 1;
    desc.world = 4;
    return desc;
}

static void test_descriptors(void)
{
    kvprim_comm comm;
    kvprim_comm_desc d = good_desc();
    memset(&comm, 0, sizeof comm);
    CHECK(kvpn_check_desc(&comm, &d) == KVPRIM_OK);
    FAILS(kvprim_comm_init(NULL, &d), KVPRIM_ERROR_NULL, "comm is NULL");
    FAILS(kvprim_comm_init(&comm, NULL), KVPRIM_ERROR_NULL, "desc is NULL");
    d.rank = 4;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->rank is 4, must be 0 to 3");
    d.rank = -1;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->rank is -1");
    d = good_desc();
    d.world = 0;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->world is 0");
    d = good_desc();
    d.timeout_ms = -5;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->timeout_ms is -5");
    d = good_desc();
    d.deterministic = 2;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->deterministic is 2");
    d.deterministic = 0, d.no_pdl = -1;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "desc->no_pdl is -1");
    d = good_desc();
    d.buffer_bytes = SIZE_MAX;
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_SIZE, "desc->buffer_bytes is");
    comm.self = &comm;
    comm.state = kvpn_alive;
    d = good_desc();
    FAILS(kvprim_comm_init(&comm, &d), KVPRIM_ERROR_ARGUMENT, "in use");
}

/* Every function, with a communicator that is none, whatever else it is given. */
static void refuses(kvprim_comm *comm, kvprim_status status, const char *word)
{
    float x = 0;
    size_t bytes = 1;
    FAILS(kvprim_all_reduce(comm, &x, &x, 1, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    FAILS(kvprim_all_reduce(comm, NULL, NULL, 0, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    FAILS(kvprim_all_gather(comm, &x, &x, 1, KVPRIM_F32, NULL), status, word);
    FAILS(kvprim_reduce_scatter(comm, &x, &x, 1, KVPRIM_F32, KVPRIM_SUM, NULL), status, word);
    FAILS(kvprim_broadcast(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    FAILS(kvprim_send(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    FAILS(kvprim_recv(comm, &x, 1, KVPRIM_F32, 0, NULL), status, word);
    FAILS(kvprim_comm_check(comm), status, word);
    FAILS(kvprim_comm_abort(comm), status, word);
    FAILS(kvprim_comm_destroy(comm), status, word);
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
    comm.state = kvpn_alive;
    moved = comm;
    refuses(&moved, KVPRIM_ERROR_ARGUMENT, "moved");
}

static void test_versions(void)
{
    CHECK(kvpn_objection(22809, 22809, 2) == NULL);
    CHECK(kvpn_objection(22809, 22809, 8) == NULL);
    CHECK(strstr(kvpn_objection(0, 22809, 2), "nvcc") != NULL);
    CHECK(strstr(kvpn_objection(22809, 22803, 2), "another version") != NULL);
    CHECK(strstr(kvpn_objection(22809, 23007, 2), "another version") != NULL);
    CHECK(strstr(kvpn_objection(22809, 22809, 1), "one rank") != NULL);
    CHECK(strstr(kvpn_objection(22809, 22809, 9), "more than 8") != NULL);
}

static void test_types(void)
{
    static const size_t bytes[] = {1, 2, 2, 4, 8, 1, 4, 8, 1, 1};
    for (int t = KVPRIM_U8; t <= KVPRIM_F8E5M2; t++) {
        CHECK(kvpn_type_of((kvprim_dtype)t).bytes == bytes[t]);
        CHECK(kvpn_type_of((kvprim_dtype)t).name != NULL);
        for (int u = KVPRIM_U8; u < t; u++)
            CHECK(kvpn_type_of((kvprim_dtype)t).nccl == -1 ||
                  kvpn_type_of((kvprim_dtype)t).nccl != kvpn_type_of((kvprim_dtype)u).nccl);
    }
    CHECK(kvpn_type_of((kvprim_dtype)(KVPRIM_F8E5M2 + 1)).name == NULL);
    CHECK(kvpn_op_of(KVPRIM_SUM) == ncclSum && kvpn_op_of(KVPRIM_MAX) == ncclMax &&
          kvpn_op_of(KVPRIM_PROD) == ncclProd);
    CHECK(kvpn_op_of(KVPRIM_MIN) == ncclMin && kvpn_op_of(KVPRIM_AVG) == ncclAvg);
}

/* A call of so many elements from send to recv, of 4 bytes each. */
static kvpn_call call_of(kvprim_comm *comm, char *recv, const char *send, size_t recv_count, size_t send_count)
{
    kvpn_call c = kvpn_call_of("test", comm, recv, send, 1, KVPRIM_F32, KVPRIM_SUM, 1, NULL);
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
    CHECK(kvpn_check_aliasing(&c, 0, 0) == KVPRIM_OK);
    c = call_of(&comm, m, m + 16, 4, 4);
    CHECK(kvpn_check_aliasing(&c, 0, 0) == KVPRIM_OK);
    c = call_of(&comm, m + 16, m, 4, 4);
    CHECK(kvpn_check_aliasing(&c, 0, 0) == KVPRIM_OK);
    c = call_of(&comm, m + 4, m, 4, 4);
    FAILS(kvpn_check_aliasing(&c, 0, 0), KVPRIM_ERROR_OVERLAP, "not in place");
    c = call_of(&comm, m, m + 16, 8, 4); /* all_gather of rank 1 in place, and of rank 0 not */
    CHECK(kvpn_check_aliasing(&c, 16, 0) == KVPRIM_OK);
    FAILS(kvpn_check_aliasing(&c, 0, 0), KVPRIM_ERROR_OVERLAP, "not in place");
    c = call_of(&comm, m + 16, m, 4, 8); /* reduce_scatter likewise */
    CHECK(kvpn_check_aliasing(&c, 0, 16) == KVPRIM_OK);
    FAILS(kvpn_check_aliasing(&c, 0, 0), KVPRIM_ERROR_OVERLAP, "not in place");
    FAILS(kvpn_check_pointer(&c, "send", NULL, 4), KVPRIM_ERROR_NULL, "send is NULL");
    FAILS(kvpn_check_pointer(&c, "send", m + 2, 4), KVPRIM_ERROR_ARGUMENT, "not aligned");
    FAILS(kvpn_check_pointer(&c, "send", m, SIZE_MAX / 4), KVPRIM_ERROR_SIZE, "past the end of memory");
    c.dtype = (kvprim_dtype)77;
    FAILS(kvpn_check_call(&c, 1), KVPRIM_ERROR_ARGUMENT, "dtype is 77");
    c.dtype = KVPRIM_F32, c.op = 9;
    FAILS(kvpn_check_call(&c, 1), KVPRIM_ERROR_ARGUMENT, "op is 9");
    c.op = KVPRIM_MAX, c.peer = 2, c.has_peer = 1;
    FAILS(kvpn_check_call(&c, 1), KVPRIM_ERROR_ARGUMENT, "the other rank is 2, must be 0 to 1");
    c.peer = 1, c.count = SIZE_MAX / 4;
    FAILS(kvpn_check_call(&c, 2), KVPRIM_ERROR_SIZE, "too many bytes");
}

static void test_ids(void)
{
    kvprim_comm_id a, b;
    FAILS(kvprim_comm_new_id(NULL), KVPRIM_ERROR_NULL, "out is NULL");
    const kvprim_status status = kvprim_comm_new_id(&a);
    if (status != KVPRIM_OK) { /* NCCL found no network to wait on */
        CHECK(status == KVPRIM_ERROR_NCCL && strstr(kvprim_last_error(), "ncclGetUniqueId") != NULL);
        printf("skip ids: %s\n", kvprim_last_error());
        skipped++;
        return;
    }
    CHECK(kvprim_comm_new_id(&b) == KVPRIM_OK && memcmp(&a, &b, sizeof a) != 0);
}

/* A wait that was given up is reported by every call from then on, and names the rank. */
static void test_late(void)
{
    kvprim_comm comm;
    kvpn_control control;
    memset(&comm, 0, sizeof comm);
    memset(&control, 0, sizeof control);
    comm.rank = 2, comm.timeout_ms = 1500;
    CHECK(kvpn_check_waits("test", &comm) == KVPRIM_OK);
    comm.control = &control;
    CHECK(kvpn_check_waits("test", &comm) == KVPRIM_OK);
    control.stop = kvpn_stopped;
    CHECK(kvpn_check_waits("test", &comm) == KVPRIM_OK);
    control.stop = kvpn_late + 3;
    FAILS(kvpn_check_waits("test", &comm), KVPRIM_ERROR_TIMEOUT, "rank 2 waited 1500 ms for rank 3");
}

#ifdef KVPRIM_NCCL_FAST
/* A communicator as init leaves it, of GPUs of so many multiprocessors. */
static void open_for_shape(kvprim_comm *comm, int world, int multiprocessors)
{
    memset(comm, 0, sizeof *comm);
    comm->world = world;
    comm->blocks = (uint32_t)(multiprocessors < kvpn_max_blocks ? multiprocessors : kvpn_max_blocks);
    kvpn_share_slots(comm);
    for (int r = 0; r < world; r++)
        comm->peer[r] = comm;
}

static void check_shape(const kvprim_comm *comm, uint32_t words, kvpn_way way)
{
    kvpn_params p;
    uint32_t blocks = 0, threads = 0;
    memset(&p, 0, sizeof p);
    p.slice = way == kvpn_by_two_shot ? (words + (uint32_t)comm->world - 1) / (uint32_t)comm->world : words;
    if (way == kvpn_by_gather_many)
        kvpn_shape_many(comm, &p, &blocks, &threads);
    else
        kvpn_shape(comm, &p, &blocks, &threads);
    CHECK(blocks >= 1 && blocks <= comm->blocks);
    CHECK(threads >= 32 && threads <= kvpn_max_threads && threads % 32 == 0);
    CHECK(comm->world <= 4 || threads <= 256);
    CHECK(p.per_block % 8 == 0);
    if (way == kvpn_by_gather_many) { /* five slots for four words, every other four in the other area */
        const uint32_t rounds = (p.per_block + 4 * threads - 1) / (4 * threads);
        CHECK((rounds + 1) / 2 * 5 * threads <= comm->block_slots && threads * (uint32_t)comm->world <= 512);
    } else {
        CHECK(p.per_block <= comm->block_slots);
    }
    CHECK((uint64_t)p.per_block * blocks >= p.slice && (uint64_t)p.per_block * (blocks - 1) < p.slice);
}

/* What is chosen fits the slots, for every size. */
static void test_shapes(void)
{
    static const int multiprocessors[] = {16, 78, 108, 132, 148};
    for (int world = 2; world <= 8; world++)
        for (int m = 0; m < 5; m++) {
            kvprim_comm comm;
            open_for_shape(&comm, world, multiprocessors[m]);
            CHECK(kvpn_slots_bytes(&comm) <= (size_t)32 << 20 && kvpn_slots_bytes(&comm) > (size_t)31 << 20);
            const size_t most[] = {kvpn_room(&comm, kvpn_by_one_shot), kvpn_room(&comm, kvpn_by_two_shot),
                                   kvpn_room(&comm, kvpn_by_scatter), 2 * kvpn_room(&comm, kvpn_by_gather),
                                   kvpn_room(&comm, kvpn_by_gather_many)};
            for (int way = 0; way < 5; way++)
                for (size_t words = 1; words <= most[way] / 16; words += words / 50 + 1)
                    check_shape(&comm, (uint32_t)words, (kvpn_way)(kvpn_by_one_shot + way));
            for (int way = 0; way < 5; way++)
                check_shape(&comm, (uint32_t)(most[way] / 16), (kvpn_way)(kvpn_by_one_shot + way));
            for (size_t bytes = 2; bytes < (size_t)64 << 20; bytes += bytes / 9 + 1)
                if (kvpn_choose(&comm, bytes, KVPRIM_BF16, KVPRIM_SUM) == kvpn_by_one_shot)
                    CHECK(bytes <= most[0]);
            for (size_t bytes = 1; bytes < (size_t)64 << 20; bytes += bytes / 9 + 1) {
                const kvpn_way way = kvpn_choose_gather(&comm, bytes);
                CHECK(way != kvpn_by_gather || bytes <= kvpn_room(&comm, way));
                CHECK(way != kvpn_by_gather_many || bytes % 16 == 0);
            }
            CHECK(kvpn_choose_gather(&comm, 1) == kvpn_by_gather);
            CHECK(kvpn_choose_gather(&comm, (size_t)1 << 19) == kvpn_by_gather_many);
            CHECK(kvpn_choose_gather(&comm, (size_t)1 << 30) == kvpn_by_nccl);
            CHECK(kvpn_choose(&comm, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_one_shot);
            CHECK(kvpn_choose(&comm, 2, KVPRIM_F32, KVPRIM_AVG) == kvpn_by_nccl);
            CHECK(kvpn_choose_scatter(&comm, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_scatter);
            CHECK(kvpn_choose_scatter(&comm, 2, KVPRIM_F32, KVPRIM_MAX) == kvpn_by_nccl);
            CHECK(kvpn_choose_scatter(&comm, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
            CHECK(kvpn_choose(&comm, 2, KVPRIM_F64, KVPRIM_SUM) == kvpn_by_nccl);
            CHECK(kvpn_choose(&comm, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
            comm.deterministic = 1;
            CHECK(kvpn_choose(&comm, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_two_shot);
            CHECK(kvpn_choose_scatter(&comm, (size_t)1 << 30, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_scatter);
            comm.peer[0] = NULL;
            CHECK(kvpn_choose(&comm, 2, KVPRIM_F32, KVPRIM_SUM) == kvpn_by_nccl);
        }
}
#endif

int main(void)
{
    run("nccl: descriptors", test_descriptors);
    run("nccl: communicators that are none", test_not_alive);
    run("nccl: versions", test_versions);
    run("nccl: types and operations", test_types);
    run("nccl: arguments of collectives", test_calls);
    run("nccl: ids", test_ids);
    run("nccl: a late rank", test_late);
#ifdef KVPRIM_NCCL_FAST
    run("nccl: shapes of launches", test_shapes);
#else
    printf("skip nccl, shapes of launches: not compiled by nvcc\n");
    skipped++;
#endif
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

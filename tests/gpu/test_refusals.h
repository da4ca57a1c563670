/* SPDX-License-Identifier: MIT */
/* What the functions of kvprim_cuda.cuh refuse: what those of kvprim.h do (tests/core/bad_descriptors.h), options of a
   launch, and what only they do. test_cuda.cu and test_cuda_emulated.cpp include it after the headers of operations. */
#ifndef TEST_REFUSALS_H
#define TEST_REFUSALS_H

/* Calls the code under test, which must refuse by its own name, and enqueue nothing. */
template <class Desc>
static void expect_refusal(int line, const Desc *d, const kvprim_cuda_launch *launch, kvprim_status status,
                           const char *words)
{
    const std::string function = std::string("kvprim_cuda_") + functions<Desc>::name + ": ";
    const bool named = strncmp(words, "kvprim_", 7) == 0;
    const unsigned before_it = enqueued();
    (void)kvprim_fail(KVPRIM_OK, "-");
    check_error(line, functions<Desc>::gpu(d, launch), status, named ? strchr(words, ' ') : words);
    if (strncmp(kvprim_last_error(), function.c_str(), function.size()) != 0 || enqueued() != before_it)
        fail("line %d: %u were enqueued; %s", line, enqueued() - before_it, kvprim_last_error());
}

#define EXPECTED(operation)                                                                                            \
    static void expect_##operation(int line, const kvprim_##operation##_desc *d, kvprim_status status,                 \
                                   const char *words)                                                                  \
    {                                                                                                                  \
        if (status != KVPRIM_OK)                                                                                       \
            expect_refusal(line, d, nullptr, status, words);                                                           \
    }
EXPECTED(gather)
EXPECTED(store)
EXPECTED(transfer)
EXPECTED(slots)
EXPECTED(unpack)
EXPECTED(unpack_meta)
EXPECTED(copy)
EXPECTED(fetch)

static void bad_descriptors()
{
    for (const bad_list &list : bad_lists)
        list.run();
}

/* Without rows nothing is looked at, not even the options. One that is out of range is refused by name. */
template <class Desc> static void bad_launches(arena *a, const Desc &on)
{
    static const struct {
        int32_t pdl, max_sms;
        int64_t reserved;
        const char *field;
    } cases[] = {{2, 0, 0, "pdl"},
                 {-1, 0, 0, "pdl"},
                 {0, -1, 0, "max_sms"},
                 {1, INT32_MIN, 0, "max_sms"},
                 {0, 0, 1, "launch.reserved"}};
    const Desc none = {};
    for (const auto &c : cases) {
        kvprim_cuda_launch bad = launch_like(a, c.pdl, c.max_sms);
        bad.reserved = c.reserved;
        CHECK(functions<Desc>::gpu(&none, &bad) == KVPRIM_OK);
        expect_refusal(__LINE__, &on, &bad, KVPRIM_ERROR_ARGUMENT, c.field);
    }
}

static void bad_options(arena *a)
{
    bad_launches(a, on_device(a, good_gather(a)));
    bad_launches(a, on_device(a, good_store(a)));
    bad_launches(a, on_gpu<kvprim_transfer_desc>(a, good_transfer(a)).d);
    bad_launches(a, on_device(a, good_slots(a, 0)));
    empty(a);
    unsigned char *const at = on_device(a, reserve<unsigned char>(a, 256, 0));
    const kvprim_fragment fragment = {0, 0, 64};
    const kvprim_copy_item item = {at, at + 64, 64};
    bad_launches(a, kvprim_unpack_desc{at, 64, at + 64, 64, &fragment, 1, 0});
    bad_launches(a, kvprim_copy_desc{&item, 1, 0});
    bad_launches(a, kvprim_unpack_meta_desc{at, 64, at + 64, 64, reinterpret_cast<kvprim_unpack_meta_item *>(at + 128),
                                            reinterpret_cast<uint64_t *>(at + 192), 1, nullptr, 0});
    const kvprim_copy_item high = {at, reinterpret_cast<void *>(uintptr_t(1) << 62), 8};
    const kvprim_copy_desc to_high = {&high, 1, 0};
    expect_refusal(__LINE__, &to_high, a->launch, KVPRIM_ERROR_SIZE, "items[0] (src ");
}

static void bad_moves(arena *a)
{
    const kvprim_gather_desc on = on_device(a, good_gather(a));
    kvprim_gather_desc none = on;
    none.count = 0;
    kvprim_move m[2];
    CHECK(kvprim_gather_moves(&none, &m[0]) == KVPRIM_OK);
    CHECK(kvprim_gather_moves(&on, &m[1]) == KVPRIM_OK);
    const kvprim_cuda_launch bad = launch_like(a, 7, 0);
    kvprim_cuda_launch reserved = launch_like(a, 0, 0);
    reserved.reserved = 1;
    CHECK(kvprim_cuda_move(m, 1, &bad) == KVPRIM_OK);
    CHECK(kvprim_cuda_move(nullptr, 0, &bad) == KVPRIM_OK);
    CHECK_ERROR(kvprim_cuda_move(m, 2, &bad), KVPRIM_ERROR_ARGUMENT, "kvprim_cuda_move: pdl");
    CHECK_ERROR(kvprim_cuda_move(m, 2, &reserved), KVPRIM_ERROR_ARGUMENT, "kvprim_cuda_move: launch.reserved");
    CHECK_ERROR(kvprim_cuda_move(nullptr, 1, a->launch), KVPRIM_ERROR_NULL, "kvprim_cuda_move: moves is NULL");
}

/* Good descriptors beside these: tables as large as their memory, without rows, K alone; whatever is wrong if there is
   nothing to do. */
template <class Desc> static void odd_ones(arena *a, const Desc &good)
{
    Desc none = {};
    CHECK(try_move(a, &good, "good") == RAN);
    CHECK(try_move(a, &none, "count 0") == RAN);
    none.rejected = counter_at(good.rejected, 2), none.reserved = -1;
    CHECK(try_move(a, &none, "count 0, and all else is wrong") == RAN);
}

static void odd_descriptors(arena *a)
{
    kvprim_gather_desc gather = good_gather(a);
    odd_ones(a, gather);
    gather.src.bytes = 8 * 128, gather.dst.bytes = 4 * 128;
    CHECK(try_move(a, &gather, "tables as large as their memory") == RAN);
    gather.src = empty_table();
    CHECK(try_move(a, &gather, "an empty table") == RAN);
    kvprim_store_desc store = good_store(a);
    odd_ones(a, store);
    drop_v(&store);
    CHECK(try_move(a, &store, "K only") == RAN);
    kvprim_transfer_desc transfer = good_transfer(a);
    odd_ones(a, transfer);
    transfer.dst.bytes = 2 * 8 * 128, transfer.src.bytes = 2 * 16 * 128;
    CHECK(try_move(a, &transfer, "tables as large as their memory") == RAN);
    transfer.src = empty_table();
    CHECK(try_move(a, &transfer, "an empty table") == RAN);
    const kvprim_slots_desc slots = good_slots(a, 1);
    CHECK(try_slots(a, &slots, "good") == RAN);
    empty(a);
    const kvprim_fragment f[2] = {{0, 0, 0}, {7, 7, 0}};
    kvprim_unpack_desc unpack = {reserve(a, 16, 0), 16, reserve(a, 16, 0), 16, f, 2, 0};
    CHECK(try_unpack(a, &unpack, "empty fragments") == RAN);
    unpack.count = 0, unpack.fragments = nullptr;
    CHECK(try_unpack(a, &unpack, "no fragments") == RAN);
}

static void refusals(arena *a)
{
    bad_descriptors();
    bad_options(a);
    bad_moves(a);
    odd_descriptors(a);
}

#endif /* TEST_REFUSALS_H */

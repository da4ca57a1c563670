/* SPDX-License-Identifier: MIT */
/* Tests that test_cuda.cu and test_cuda_emulated.cpp share whole, except for how much they run. */
#ifndef TEST_SHARED_H
#define TEST_SHARED_H

/* Bytes of a table, of a batch and the like, at most; rounds. Both programs choose them. */
static struct {
    int64_t counts;
    uint64_t batches, copies, metas;
    size_t meta_step;
    unsigned moves, random_metas;
} most;

/* Runs a test with several limits of multiprocessors, with pdl and without. */
static void with_options(void (*test)(arena *));

static void test_counts()
{
    static const int64_t counts[] = {0,   1,   2,    7,    8,    31,   32,   33,    127,
                                     128, 129, 1000, 2048, 2049, 4096, 4097, 20000, 100000};
    count_matrix(&memory, most.counts, counts, sizeof counts / sizeof *counts);
}

static void small_moves(arena *a)
{
    small_matrix(a);
    small_transfers(a);
}

static void test_options()
{
    with_options(small_moves);
}

static void test_transfer()
{
    transfer_matrix(&memory);
    transfer_heads_apart(&memory);
    transfer_counts(&memory, most.counts);
}

static void listed_options(arena *a)
{
    listed_transfers(a);
    unaligned_bases(a);
    host_lists(a);
    many_device_layers(a);
    listed_moves(a);
}

static void several_moves(arena *a)
{
    usual_moves(a);
    random_moves(a, most.moves);
    repointed_moves(a);
}

static void test_slots()
{
    slots_matrix(&memory);
    slots_counts(&memory);
    slots_limits(&memory);
    slots_unordered(&memory);
    if (!quick)
        slots_rounds(&memory);
}

static void test_slots_options()
{
    with_options(small_slots);
}

static void test_unpack()
{
    batch_matrix(&memory, most.batches);
}

static void test_unpack_options()
{
    with_options(small_batches);
}

static void test_copies()
{
    copy_matrix(&memory, most.copies);
    single_copies(&memory);
    scattered_lists(&memory);
    many_copies(&memory);
}

static void test_copy_options()
{
    with_options(small_copies);
}

static void test_meta()
{
    meta_matrix(&memory, most.metas);
    meta_lengths(&memory, most.meta_step);
    meta_counts(&memory);
}

static void test_meta_options()
{
    with_options(small_metas);
}

static void fuzz_metas(arena *a)
{
    for (unsigned round = 0; round < most.random_metas; round++)
        random_meta(a);
}

static void convert_several(arena *a)
{
    convert_matrix(a);
    convert_moves(a);
    convert_presets(a);
    convert_packed(a);
    convert_scale_heads(a);
    convert_packed_boundaries(a);
    convert_ties(a);
    convert_idle(a);
    convert_past(a);
    convert_heads_apart(a);
    convert_edges(a);
    convert_empty(a);
}

#endif /* TEST_SHARED_H */

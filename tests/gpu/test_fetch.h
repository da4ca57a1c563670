/* SPDX-License-Identifier: MIT */
/* What test_cuda.cu and test_cuda_emulated.cpp share for kvprim_cuda_fetch: random calls in two memories, once by
   kvprim_fetch and once on the GPU, which must end with the same bytes, the sets included. */
#ifndef TEST_FETCH_H
#define TEST_FETCH_H

#include "../core/fetch_cases.h"

/* Memory that both sides reach. fetch_wait: what was enqueued is done. */
static unsigned char *fetch_memory(size_t bytes);
static void fetch_release(unsigned char *p);
static void fetch_wait();

struct fetch_pair {
    fetch_case c;        /* the host's */
    unsigned char *gpu;  /* the GPU's */
    kvprim_fetch_desc d; /* in it */

    explicit fetch_pair(size_t room) : c(fetch_new(room, 1)), gpu(fetch_memory(room)), d()
    {
    }
    fetch_pair(const fetch_pair &) = delete;
    ~fetch_pair()
    {
        fetch_free(&c);
        fetch_release(gpu);
    }
};

template <class T> static void fetch_relocate(const fetch_pair &p, T **at)
{
    if (*at)
        *at = reinterpret_cast<T *>(p.gpu + (reinterpret_cast<const unsigned char *>(*at) - p.c.memory));
}

static bool fetch_place_pair(fetch_pair *p, const fetch_sizes *most)
{
    if (!fetch_place(&p->c, most))
        return false;
    fill(p->c.memory, p->c.used);
    CHECK(kvprim_fetch_reset(&p->c.d.set, -1) == KVPRIM_OK);
    memcpy(p->gpu, p->c.memory, p->c.used);
    kvprim_fetch_desc &d = p->d = p->c.d;
    fetch_relocate(*p, &d.set.memory);
    for (const void **const at : {&d.state, &d.wanted, &d.fresh, &d.pages})
        fetch_relocate(*p, at);
    for (int32_t **const at : {&d.rows, &d.fresh_rows, &d.plan_src, &d.plan_dst})
        fetch_relocate(*p, at);
    for (uint32_t **const at : {&d.hits, &d.misses, &d.rejected})
        fetch_relocate(*p, at);
    for (kvprim_table *const t : {&d.k_hot, &d.v_hot, &d.k, &d.v})
        fetch_relocate(*p, &t->data);
    return true;
}

/* All but the set: where both memories must be the same before a call. */
static void fetch_copy_inputs(fetch_pair *p)
{
    const size_t set = size_t(static_cast<unsigned char *>(p->c.d.set.memory) - p->c.memory);
    const size_t end = set + size_t(p->c.d.set.bytes);
    memcpy(p->gpu, p->c.memory, set);
    memcpy(p->gpu + end, p->c.memory + end, p->c.used - end);
}

static bool fetch_compare_pair(const fetch_pair *p, const char *what)
{
    const size_t set = size_t(static_cast<unsigned char *>(p->c.d.set.memory) - p->c.memory);
    for (size_t b = 0; b < p->c.used; b++)
        if (p->gpu[b] != p->c.memory[b] && (b < set || b >= set + p->c.scratch)) {
            fail("%s: byte %zu (%zd of rows, %zd of the states, %zd of k_hot) is %d, not %d", what, b,
                 p->c.memory + b - reinterpret_cast<unsigned char *>(p->c.d.rows),
                 p->c.memory + b - p->c.memory - ptrdiff_t(set + p->c.scratch),
                 p->c.memory + b - static_cast<unsigned char *>(p->c.d.k_hot.data), p->gpu[b], p->c.memory[b]);
            return false;
        }
    return true;
}

static void fetch_calls(fetch_pair *p, int calls)
{
    for (int call = 0; call < calls; call++) {
        if (below(8) == 0) {
            const int64_t state = int64_t(below(uint64_t(p->c.d.set.states))) - (below(4) == 0);
            CHECK(kvprim_fetch_reset(&p->c.d.set, state) == KVPRIM_OK);
            CHECK(kvprim_cuda_fetch_reset(&p->d.set, state, memory.launch) == KVPRIM_OK);
            fetch_wait();
        }
        fetch_fill(&p->c, 0);
        fetch_copy_inputs(p);
        CHECK(kvprim_fetch(&p->c.d) == KVPRIM_OK);
        if (kvprim_cuda_fetch(&p->d, memory.launch) != KVPRIM_OK)
            fail("%s", kvprim_last_error());
        fetch_wait();
        if (!fetch_compare_pair(p, "fetch"))
            return;
    }
}

static void fetch_rounds(int rounds)
{
    static const fetch_sizes sizes[] = {{3, 20, 60, 12, 90}, {5, 60, 300, 30, 700}, {2, 4, 9, 4, 4000},
                                        {1, 1, 3, 2, 16},    {2, 300, 900, 200, 8}, {40, 9, 40, 8, 200}};
    fetch_pair p(4 << 20);
    for (int round = 0; round < rounds; round++)
        if (fetch_place_pair(&p, &sizes[size_t(round) % (sizeof sizes / sizeof *sizes)])) {
            if (round % 2) /* the number of launches wraps */
                for (void *const set : {p.c.d.set.memory, p.d.set.memory})
                    static_cast<uint32_t *>(set)[1] = UINT32_MAX - 4;
            fetch_calls(&p, 12);
        }
}

static void test_fetch()
{
    fetch_rounds(int(most.moves));
}

static void some_fetches(arena *)
{
    fetch_rounds(12);
}

static void test_fetch_options()
{
    with_options(some_fetches);
}

/* So many entries that a block looks up several parts of them, with the same tokens in each. */
static void test_large_fetches()
{
    static const fetch_sizes sizes[] = {{2, 3000, 9000, 2500, 40}, {1, 9000, 30000, 8000, 20}};
    fetch_pair p(16 << 20);
    for (int round = 0; round < int(most.moves) / 5; round++)
        if (fetch_place_pair(&p, &sizes[round % 2]))
            fetch_calls(&p, 4);
}

/* Requests that share a state, and sets that hold anything: which request is served is unspecified, but all rows are in
   range, and the call ends. */
static void test_wild_fetches()
{
    static const fetch_sizes sizes = {4, 20, 60, 12, 30};
    fetch_pair p(4 << 20);
    for (int round = 0; round < int(most.moves); round++) {
        if (!fetch_place_pair(&p, &sizes))
            continue;
        for (int call = 0; call < 5; call++) {
            const int64_t states = p.d.set.states, hot = p.d.set.hot_rows;
            const size_t words = (size_t(p.d.set.bytes) - p.c.scratch) / 4,
                         word = p.c.scratch + 4 * size_t(below(words));
            const int32_t wild = below(2) ? int32_t(below(70)) : int32_t(random_u64());
            if (round % 2)
                memcpy(static_cast<char *>(p.d.set.memory) + word, &wild, 4);
            fetch_fill(&p.c, 1);
            fetch_copy_inputs(&p);
            CHECK(kvprim_cuda_fetch(&p.d, memory.launch) == KVPRIM_OK);
            fetch_wait();
            std::set<int64_t> served;
            for (int64_t i = 0; i < p.d.count; i++) {
                const int64_t state = element_of(p.d.state, p.d.state_type, i);
                const int64_t n = p.c.entries - p.d.fresh_count;
                bool any = false;
                for (int64_t e = i * n; e < (i + 1) * n; e++) {
                    any = any || p.d.rows[e] >= 0;
                    CHECK(p.d.rows[e] == -1 || (p.d.rows[e] / hot == state && state < states));
                }
                if (any && !served.insert(state).second)
                    fail("two requests have rows of state %lld", static_cast<long long>(state));
            }
        }
    }
}

#endif /* TEST_FETCH_H */

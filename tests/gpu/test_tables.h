/* SPDX-License-Identifier: MIT */
/* Transfers whose layers only the GPU knows, and whose rows the host names, for test_cuda.cu and
   test_cuda_emulated.cpp: see test_rows.h. What is expected comes from the host's function and arrays. */
#ifndef TEST_TABLES_H
#define TEST_TABLES_H

#include <memory>

/* Which parts of a transfer: arrays of layers in device memory, indices in the host's. */
enum { DST_TABLE = 1, SRC_TABLE = 2, HOST_LISTS = 4, LISTED_KINDS = 8 };

/* A transfer for the code under test. Its arrays are in the arena; the host's indices have their own memory, which ends
   with them and is overwritten when the call has returned. */
struct listed_transfer {
    device_transfer on;
    rows_move move; /* as it is expected; its arrays of layers and its indices may change */
    std::unique_ptr<char[]> lists[2];
    void **tables[2]; /* in the arena */

    listed_transfer(arena *a, const kvprim_transfer_desc &d, const kvprim_transfer_desc &resolved, unsigned how)
        : on(a, d), move(rows_of(&resolved)[0]), tables{nullptr, nullptr}
    {
        const bool both = d.same_cache && how & (DST_TABLE | SRC_TABLE);
        if ((how & DST_TABLE || both) && d.dst.rows > 0)
            tables[0] = new_table(a);
        if ((how & SRC_TABLE || both) && d.src.rows > 0)
            tables[1] = both ? tables[0] : new_table(a);
        on.d.dst_device_layers = on_device(a, tables[0]);
        on.d.src_device_layers = on_device(a, tables[1]);
        if (tables[0])
            on.d.dst_layers = nullptr, on.d.dst_layer_stride = 0, on.d.dst.data = nullptr;
        if (tables[1])
            on.d.src_layers = nullptr, on.d.src_layer_stride = 0, on.d.src.data = nullptr;
        on.d.host_index = how & HOST_LISTS ? 1 : 0;
        for (int k = 0; how & HOST_LISTS && k < 2; k++) {
            const side &s = k ? move.src : move.dst;
            lists[k].reset(s.index ? new char[list_bytes(s)] : nullptr);
            (k ? on.d.src_index : on.d.dst_index) = lists[k].get();
        }
        refresh(a);
    }

    void **new_table(arena *a) const
    {
        return reserve<void *>(a, size_t(move.layers) * sizeof(void *), 8 * below(2));
    }

    size_t list_bytes(const side &s) const
    {
        return size_t((move.count - 1) * s.stride + 1) * (s.type == KVPRIM_I64 ? 8 : 4);
    }

    /* Takes the layers and indices as they are now. */
    void refresh(const arena *a)
    {
        for (int k = 0; k < 2; k++) {
            const side &s = k ? move.src : move.dst;
            for (int32_t l = 0; l < move.layers; l++) {
                void *const layer = k ? on_source(a, layer_of(&s, l).data) : on_device(a, layer_of(&s, l).data);
                if (tables[k])
                    tables[k][l] = layer;
                else if (s.layers && l < most_layers)
                    (k ? on.src_layers : on.dst_layers)[l] = layer;
            }
            if (lists[k])
                memcpy(lists[k].get(), s.index, list_bytes(s));
        }
    }

    void forget_lists()
    {
        for (int k = 0; k < 2; k++)
            if (lists[k])
                memset(lists[k].get(), 0x5a, list_bytes(k ? move.src : move.dst));
    }

    void visit_tables(arena *a) const
    {
        a->taken.resize(a->used);
        for (void *const table : tables)
            if (table)
                visit_word(a, table, size_t(move.layers) * sizeof(void *));
    }
};

/* Runs a valid transfer on both sides. */
static outcome try_listed(arena *a, const kvprim_transfer_desc *d, unsigned how, const char *what)
{
    kvprim_transfer_desc resolved = {};
    if (d->count < 1 || kvprim_transfer_check(d, &resolved) != KVPRIM_OK)
        return REFUSED;
    start_visit(a);
    if (!visit_moves(a, rows_of(&resolved)))
        return OUTSIDE;
    listed_transfer listed(a, *d, resolved, how);
    listed.visit_tables(a);
    snprintf(current, sizeof current, "transfer, kind %u: %s", how, what);
    describe(rows_of(&resolved));
    return run_both(
        a, KVPRIM_OK, "-", true, [&] { return kvprim_transfer(d); },
        [&] {
            const kvprim_status status = kvprim_cuda_transfer(&listed.on.d, a->launch);
            if (!is_asked())
                listed.forget_lists();
            return status;
        });
}

/* All transfers of a test in turn as each of these kinds. */
static thread_local bool list_all;
static thread_local unsigned listed_so_far;

static outcome try_transfer(arena *a, const kvprim_transfer_desc *d, const char *what)
{
    return list_all ? try_listed(a, d, 1 + listed_so_far++ % (LISTED_KINDS - 1), what) : try_move(a, d, what);
}

#endif /* TEST_TABLES_H */

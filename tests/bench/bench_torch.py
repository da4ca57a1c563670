# SPDX-License-Identifier: MIT
"""Times torch's ways to move rows on one GPU, and kvprim's: microseconds per launch in replayed CUDA graphs.

    PYTHONPATH=build/python python3 tests/bench/bench_torch.py      or `make torch-bench`

With the package of examples/python, ratios are from one run.

Rows are bf16, tables have 8 GiB. There are 8 sets of distinct random rows, and dense buffers rotate. Times are medians
of interleaved replays of 64 launches (24 if one moves more than 64 MB). index_select, embedding and kvprim get int32
indices; index_put_ and index_copy_ get the int64 ones that they require. embedding writes to memory of torch's
allocator, which is kept, so that it rotates, too.
A store is K and V: two calls of torch, one of kvprim. The last table is of V alone in vLLM's first layout, in which the
elements of a row lie apart: [page, head and element, row of the page]. Before a contender is timed, everything that its
last launch moved is compared with what it should have moved.

Last come 10,000 tensors of 64 B to 64 MB, about 12 GB, mostly small: milliseconds from the call to the end.
"""
import random
import sys
import time

try:
    import torch
except ImportError as error:
    print(f"skip bench_torch: {error}")
    sys.exit(0)

try:
    import kvprim
except ImportError:
    kvprim = None

TABLE_BYTES = 8 << 30
SETS = 8


def random_rows(rows, width_bytes):
    """Rows of random bits, as bf16."""
    return torch.empty((rows, width_bytes // 8), dtype=torch.int64, device="cuda").random_().view(torch.bfloat16)


def same_bits(a, b):
    """Whether the tensors hold the same bits. torch.equal alone would call every NaN a difference."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


class Contender:
    """A graph of `launches` calls of call(i)."""

    def __init__(self, call, launches):
        self.launches, self.us = launches, []
        call(0)  # a first call may set things up, which must not be captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call(i) for i in range(launches)]  # kept: torch's allocator would use the memory again
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(3000000)  # cycles, in which the host enqueues the replay
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.us.append(1000 * start.elapsed_time(end) / self.launches)


def measure(calls, launches, verify, repetitions=9):
    """Microseconds on the GPU by name. `calls` maps a name to a function of the launch's number. verify(name, result)
    gets the result of the last launch."""
    contenders = {}
    for name, call_ in calls.items():
        contenders[name] = Contender(call_, launches)
        verify(name, contenders[name].results[-1])
    for repetition in range(repetitions):
        for name in sorted(contenders, reverse=repetition % 2 == 1):
            contenders[name].time()
    return {name: sorted(c.us)[repetitions // 2] for name, c in contenders.items()}


def random_sets(table_rows, rows):
    """Returns SETS lists of distinct rows, as int32 and as int64."""
    sets = [torch.randperm(table_rows, device="cuda")[:rows].clone() for _ in range(SETS)]
    return [s.to(torch.int32) for s in sets], sets


def print_row(row_bytes, rows, us, columns):
    print(f"{row_bytes:6} {rows:7}" + "".join(f" {us[name]:12.3f}" for name in columns), end="")
    if "kvprim" in us:
        best = min(us[name] for name in columns if not name.startswith("kvprim"))
        print(f" {us['kvprim'] / best:8.3f}", end="")
    print(flush=True)


def launches_for(bytes_moved):
    return 24 if bytes_moved > 64e6 else 64


def dense_buffers(make, rows, row_bytes, launches):
    """Returns enough buffers that a small launch does not find those of the last one in the caches; at most 1 GiB."""
    return [make() for _ in range(max(2, min(launches, (1 << 30) // (rows * row_bytes))))]


def add_kvprim(calls, launch, result=lambda i: None):
    """Adds kvprim's calls to `calls`, if it is there: launch(i, pdl) leaves result(i)."""
    def of_launches(pdl):
        return lambda i: (launch(i, pdl), result(i))[1]

    if kvprim:
        calls.update({"kvprim": of_launches(False), "kvprim+PDL": of_launches(True)})


def gather_point(table, row_bytes, rows, columns):
    launches = launches_for(2 * rows * row_bytes)
    int32, int64 = random_sets(table.shape[0], rows)
    empty = lambda: torch.zeros((rows, row_bytes // 2), dtype=torch.bfloat16, device="cuda")
    outs = dense_buffers(empty, rows, row_bytes, launches)
    out_of = lambda i: outs[i % len(outs)]

    def select(i):
        return torch.index_select(table, 0, int32[i % SETS], out=out_of(i))

    def verify(name, got):
        if not same_bits(got, table[int64[(launches - 1) % SETS]]):
            sys.exit(f"bench_torch: FAIL {name}: wrong rows")
        got.zero_()

    calls = {"index_select": select,
             "embedding": lambda i: torch.nn.functional.embedding(int32[i % SETS], table)}
    add_kvprim(calls, lambda i, pdl: kvprim.gather(out_of(i), table, int32[i % SETS], pdl=pdl), out_of)
    print_row(row_bytes, rows, measure(calls, launches, verify), columns)


def store_point(caches, row_bytes, rows, columns):
    launches = launches_for(4 * rows * row_bytes)
    int32, int64 = random_sets(caches[0].shape[0], rows)
    pair = lambda: (random_rows(rows, row_bytes), random_rows(rows, row_bytes))
    inputs = dense_buffers(pair, rows, 2 * row_bytes, launches)
    inputs_of = lambda i: inputs[i % len(inputs)]

    def put(i):
        for cache, rows_in in zip(caches, inputs_of(i)):
            cache.index_put_((int64[i % SETS],), rows_in)

    def copy(i):
        for cache, rows_in in zip(caches, inputs_of(i)):
            cache.index_copy_(0, int64[i % SETS], rows_in)

    def verify(name, _):
        last = int64[(launches - 1) % SETS]
        for cache, rows_in in zip(caches, inputs_of(launches - 1)):
            if not same_bits(cache[last], rows_in):
                sys.exit(f"bench_torch: FAIL {name}: wrong rows")
            cache.zero_()

    calls = {"index_put_": put, "index_copy_": copy}
    add_kvprim(calls, lambda i, pdl: kvprim.store(*inputs_of(i), *caches, int32[i % SETS], pdl=pdl))
    print_row(row_bytes, rows, measure(calls, launches, verify), columns)


def v0_point(cache, row_bytes, rows, columns):
    """The cache is [pages, elements of a row, rows of a page]."""
    launches = launches_for(2 * rows * row_bytes)
    page_rows = cache.shape[2]
    int32, int64 = random_sets(cache.shape[0] * page_rows, rows)
    inputs = dense_buffers(lambda: random_rows(rows, row_bytes), rows, row_bytes, launches)
    inputs_of = lambda i: inputs[i % len(inputs)]
    places = [(torch.div(s, page_rows, rounding_mode="floor"), s % page_rows) for s in int64]

    def put(i):
        page, row = places[i % SETS]
        cache[page, :, row] = inputs_of(i)  # index_put_

    def verify(name, _):
        page, row = places[(launches - 1) % SETS]
        if not same_bits(cache[page, :, row], inputs_of(launches - 1)):
            sys.exit(f"bench_torch: FAIL {name}: wrong rows")
        cache.zero_()

    calls = {"index_put_": put}
    heads = cache.unsqueeze(3)  # of one element
    add_kvprim(calls, lambda i, pdl: kvprim.store(inputs_of(i)[:, :, None], None, heads, None, int32[i % SETS], "HND",
                                                  pdl=pdl))
    print_row(row_bytes, rows, measure(calls, launches, verify), columns)


def ms_to_end(call):
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


def foreach_copy(count=10000):
    choose = random.Random(3)
    sizes = [64 << int(20.99 * choose.random() ** 4) for _ in range(count)]
    sizes = [2 * choose.randint(size // 4, size // 2) if size > 64 else size for size in sizes]
    make = lambda fill: [torch.full((size // 2,), fill, dtype=torch.bfloat16, device="cuda") for size in sizes]
    srcs, dsts = make(3), make(0)
    for src in srcs:
        src.copy_(torch.arange(src.numel(), device="cuda"))
    calls = {"_foreach_copy_": lambda: torch._foreach_copy_(dsts, srcs),
             "copy_ for each": lambda: [dst.copy_(src) for dst, src in zip(dsts, srcs)]}
    if kvprim:
        items = torch.tensor([(src.data_ptr(), dst.data_ptr(), size) for src, dst, size in zip(srcs, dsts, sizes)])
        calls["kvprim"] = lambda: kvprim.copy_addresses(items)
    print(f"\ncopies of {count:,} tensors, {sum(sizes) / 1e9:.1f} GB: ms from the call to the end")
    for name, call in calls.items():
        ms = ms_to_end(call)
        if not all(same_bits(dst, src) for dst, src in zip(dsts, srcs)):
            sys.exit(f"bench_torch: FAIL {name}: wrong tensors")
        torch._foreach_zero_(dsts)
        print(f"{name:>14} {ms:8.3f}  {2e-6 * sum(sizes) / ms:6.0f} GB/s", flush=True)


def run(title, point, theirs, tables, widths=(128, 256, 1024, 2048), counts=(64, 1024, 65536)):
    columns = theirs + (["kvprim", "kvprim+PDL"] if kvprim else [])
    ratio = "  kvprim / best of torch" if kvprim else ""
    print(f"\n{title}: us per launch\n{'row B':>6} {'rows':>7}" + "".join(f" {name:>12}" for name in columns) + ratio)
    for row_bytes in widths:
        memory = tables(row_bytes)
        for rows in counts:
            point(memory, row_bytes, rows, columns)
        del memory
        torch.cuda.empty_cache()


def main():
    if not torch.cuda.is_available():
        print(f"skip bench_torch: torch {torch.__version__} finds no CUDA device")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    table = lambda row_bytes: random_rows(TABLE_BYTES // row_bytes, row_bytes)
    run("gather", gather_point, ["index_select", "embedding"], table)
    run("store", store_point, ["index_put_", "index_copy_"], lambda b: (table(b), table(b)))
    run("store of V in vLLM's first layout", v0_point, ["index_put_"],
        lambda b: table(b).view(-1, b // 2, 16), widths=(2048,), counts=(1, 64, 1024, 4096))
    foreach_copy()


if __name__ == "__main__":
    with torch.no_grad():
        main()

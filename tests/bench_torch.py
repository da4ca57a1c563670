"""torch's ways of moving rows on one GPU, and kvprim beside them: microseconds per launch in replayed CUDA graphs.

    python3 tests/bench_torch.py [LIBRARY]

LIBRARY is kvprim as a shared object; ratios are then of one run:

    nvcc -arch=native -O3 -shared -Xcompiler -fPIC -DKVPRIM_IMPLEMENTATION -x cu kvprim_cuda.cuh -o build/libkvprim.so

Rows are bf16, tables 8 GiB, 8 sets of distinct random rows, rotating dense buffers, medians of interleaved replays of
64 launches (24 where one moves more than 64 MB). index_select, embedding and kvprim get int32 indices, index_put_ and
index_copy_ the int64 ones that they require. embedding writes where torch's allocator says. A store is K and V: two
calls of torch, one of kvprim. Every contender's last launch is compared with what it should have moved, in full, before
it is timed.
"""
import ctypes
import statistics
import sys

try:
    import torch
except ImportError as error:
    print(f"skip bench_torch: {error}")
    sys.exit(0)

TABLE_BYTES = 8 << 30
SETS = 8
REPETITIONS = 9


class Table(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("stride", ctypes.c_int64),
                ("page_rows", ctypes.c_int64), ("page_stride", ctypes.c_int64), ("heads", ctypes.c_int32),
                ("head_stride", ctypes.c_int64)]


class GatherDesc(ctypes.Structure):
    _fields_ = [("dst", Table), ("src", Table), ("row_bytes", ctypes.c_int64), ("index", ctypes.c_void_p),
                ("index_type", ctypes.c_int), ("index_base", ctypes.c_int64), ("count", ctypes.c_int64),
                ("rejected", ctypes.c_void_p)]


class StoreDesc(ctypes.Structure):
    _fields_ = [("k_cache", Table), ("v_cache", Table), ("k", Table), ("v", Table), ("k_bytes", ctypes.c_int64),
                ("v_bytes", ctypes.c_int64), ("slot", ctypes.c_void_p), ("slot_type", ctypes.c_int),
                ("slot_base", ctypes.c_int64), ("count", ctypes.c_int64), ("rejected", ctypes.c_void_p)]


class Launch(ctypes.Structure):
    _fields_ = [("stream", ctypes.c_void_p), ("pdl", ctypes.c_int32), ("max_sms", ctypes.c_int32)]


def load_kvprim(path):
    kvprim = ctypes.CDLL(path)
    kvprim.kvprim_cuda_gather.argtypes = [ctypes.POINTER(GatherDesc), ctypes.POINTER(Launch)]
    kvprim.kvprim_cuda_store.argtypes = [ctypes.POINTER(StoreDesc), ctypes.POINTER(Launch)]
    kvprim.kvprim_last_error.restype = ctypes.c_char_p
    return kvprim


def check(kvprim, status):
    if status != 0:
        sys.exit(f"bench_torch: kvprim status {status}: {kvprim.kvprim_last_error().decode()}")


def table_of(rows):
    """A 2-dimensional bf16 tensor with packed rows, as kvprim sees it."""
    return Table(data=rows.data_ptr(), rows=rows.shape[0])


def launch_now(pdl):
    return Launch(stream=torch.cuda.current_stream().cuda_stream, pdl=pdl)


def kvprim_gather(kvprim, out, table, index, pdl):
    desc = GatherDesc(dst=table_of(out), src=table_of(table), row_bytes=2 * out.shape[1], index=index.data_ptr(),
                      count=index.numel())
    check(kvprim, kvprim.kvprim_cuda_gather(desc, launch_now(pdl)))


def kvprim_store(kvprim, caches, inputs, slot, pdl):
    row_bytes = 2 * inputs[0].shape[1]
    desc = StoreDesc(k_cache=table_of(caches[0]), v_cache=table_of(caches[1]), k=table_of(inputs[0]),
                     v=table_of(inputs[1]), k_bytes=row_bytes, v_bytes=row_bytes, slot=slot.data_ptr(),
                     count=slot.numel())
    check(kvprim, kvprim.kvprim_cuda_store(desc, launch_now(pdl)))


def random_rows(rows, row_bytes):
    """Random bits, not zeros; as bf16."""
    words = torch.empty((rows, row_bytes // 8), dtype=torch.int64, device="cuda")
    return words.random_().view(torch.bfloat16)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def random_sets(table_rows, rows):
    """SETS lists of distinct rows, as int32 and as int64."""
    sets = [torch.randperm(table_rows, device="cuda")[:rows].clone() for _ in range(SETS)]
    return [s.to(torch.int32) for s in sets], sets


class Contender:
    """A graph of `launches` calls of call(i)."""

    def __init__(self, call, launches):
        self.launches, self.us = launches, []
        call(0)  # what a first call sets up must not be captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(launches):
                self.result = call(i)
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(3000000)  # cycles: the host enqueues the replay meanwhile
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.us.append(1000 * start.elapsed_time(end) / self.launches)


def measure(calls, launches, verify):
    """calls: name -> function of the launch's number. verify(name, what the last call returned)."""
    contenders = {}
    for name, call in calls.items():
        contenders[name] = Contender(call, launches)
        verify(name, contenders[name].result)
    for repetition in range(REPETITIONS):
        for name in sorted(contenders, reverse=repetition % 2 == 1):
            contenders[name].time()
    return {name: statistics.median(c.us) for name, c in contenders.items()}


def print_row(row_bytes, rows, us, columns):
    print(f"{row_bytes:6} {rows:7}" + "".join(f" {us[name]:12.3f}" for name in columns), end="")
    if "kvprim" in us:
        best = min(us[name] for name in columns if not name.startswith("kvprim"))
        print(f" {us['kvprim'] / best:8.3f}", end="")
    print(flush=True)


def launches_for(bytes_moved):
    return 24 if bytes_moved > 64e6 else 64


def dense_buffers(make, rows, row_bytes, launches):
    """Enough that a small launch does not find the last one's in the caches; at most 1 GiB."""
    return [make() for _ in range(max(2, min(launches, (1 << 30) // (rows * row_bytes))))]


def gather_point(kvprim, table, row_bytes, rows, columns):
    launches = launches_for(2 * rows * row_bytes)
    int32, int64 = random_sets(table.shape[0], rows)
    empty = lambda: torch.zeros((rows, row_bytes // 2), dtype=torch.bfloat16, device="cuda")
    outs = dense_buffers(empty, rows, row_bytes, launches)
    out_of = lambda i: outs[i % len(outs)]

    def select(i):
        return torch.index_select(table, 0, int32[i % SETS], out=out_of(i))

    def ours(i, pdl):
        kvprim_gather(kvprim, out_of(i), table, int32[i % SETS], pdl)
        return out_of(i)

    def verify(name, got):
        if not same_bits(got, table[int64[(launches - 1) % SETS]]):
            sys.exit(f"bench_torch: FAIL {name}: wrong rows")
        got.zero_()

    calls = {"index_select": select,
             "embedding": lambda i: torch.nn.functional.embedding(int32[i % SETS], table)}
    if kvprim:
        calls.update({"kvprim": lambda i: ours(i, 0), "kvprim+PDL": lambda i: ours(i, 1)})
    print_row(row_bytes, rows, measure(calls, launches, verify), columns)


def store_point(kvprim, caches, row_bytes, rows, columns):
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
    if kvprim:
        calls.update({"kvprim": lambda i: kvprim_store(kvprim, caches, inputs_of(i), int32[i % SETS], 0),
                      "kvprim+PDL": lambda i: kvprim_store(kvprim, caches, inputs_of(i), int32[i % SETS], 1)})
    print_row(row_bytes, rows, measure(calls, launches, verify), columns)


def run(title, point, kvprim, theirs, tables):
    columns = theirs + (["kvprim", "kvprim+PDL"] if kvprim else [])
    ratio = "  kvprim / best of torch" if kvprim else ""
    print(f"\n{title}: us per launch\n{'row B':>6} {'rows':>7}" + "".join(f" {name:>12}" for name in columns) + ratio)
    for row_bytes in (128, 256, 1024, 2048):
        memory = tables(row_bytes)
        for rows in (64, 1024, 65536):
            point(kvprim, memory, row_bytes, rows, columns)
        del memory
        torch.cuda.empty_cache()


def main():
    if not torch.cuda.is_available():
        print(f"skip bench_torch: torch {torch.__version__} finds no CUDA device")
        return
    kvprim = load_kvprim(sys.argv[1]) if len(sys.argv) > 1 else None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    table = lambda row_bytes: random_rows(TABLE_BYTES // row_bytes, row_bytes)
    run("gather", gather_point, kvprim, ["index_select", "embedding"], table)
    run("store", store_point, kvprim, ["index_put_", "index_copy_"], lambda b: (table(b), table(b)))


if __name__ == "__main__":
    with torch.no_grad():
        main()

# SPDX-License-Identifier: MIT
"""Calls kvprim on torch's tensors through ctypes alone, and checks and times gather and store against torch's own.

    make lib && python3 examples/08_torch.py [LIBRARY]      LIBRARY: build/libkvprim.so
    python3 examples/08_torch.py --layout                   needs neither the library nor torch: see layout()

Tensors of the CPU go to the host functions, tensors of a GPU to the CUDA functions on torch's current stream. An error
of the library becomes a Python exception. Without a GPU, or with a library that lacks the CUDA functions, only the part
on the CPU runs. To use this in a program of your own, copy everything above "the example".

gather() and store() suit an occasional call: making the descriptors in Python takes most of their time. A call that is
repeated with the same tensors, as in each layer of a decode step, is better prepared once:

    append = prepare_store(library, nhd(k_cache), nhd(v_cache), k, v, slot)
    append(stream)      every step, after k, v and slot are written; stream: see current_stream()
"""
import ctypes
import os
import statistics
import sys
import time

try:
    import torch
except ImportError:
    torch = None

VERSION = 200  # the KVPRIM_VERSION whose structures these are: major * 10000 + minor * 100 + patch
I32, I64 = 1, 2  # kvprim_index_type; 0 is "not set", which the library refuses


class Table(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("stride", ctypes.c_int64),
                ("page_rows", ctypes.c_int64), ("page_stride", ctypes.c_int64), ("heads", ctypes.c_int32),
                ("reserved_heads", ctypes.c_int32), ("head_stride", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("reserved", ctypes.c_int64 * 2)]


class GatherDesc(ctypes.Structure):
    _fields_ = [("dst", Table), ("src", Table), ("row_bytes", ctypes.c_int64), ("index", ctypes.c_void_p),
                ("index_type", ctypes.c_int), ("reserved_index", ctypes.c_int32), ("index_base", ctypes.c_int64),
                ("count", ctypes.c_int64), ("rejected", ctypes.c_void_p), ("index_stride", ctypes.c_int64),
                ("reserved", ctypes.c_int64)]


class StoreDesc(ctypes.Structure):
    _fields_ = [("k_cache", Table), ("v_cache", Table), ("k", Table), ("v", Table), ("k_bytes", ctypes.c_int64),
                ("v_bytes", ctypes.c_int64), ("slot", ctypes.c_void_p), ("slot_type", ctypes.c_int),
                ("reserved_slot", ctypes.c_int32), ("slot_base", ctypes.c_int64), ("count", ctypes.c_int64),
                ("rejected", ctypes.c_void_p), ("slot_stride", ctypes.c_int64), ("reserved", ctypes.c_int64)]


class TransferDesc(ctypes.Structure):
    _fields_ = [("dst", Table), ("src", Table), ("dst_layers", ctypes.c_void_p), ("src_layers", ctypes.c_void_p),
                ("dst_layer_stride", ctypes.c_int64), ("src_layer_stride", ctypes.c_int64), ("layers", ctypes.c_int32),
                ("same_cache", ctypes.c_int32), ("row_bytes", ctypes.c_int64), ("dst_index", ctypes.c_void_p),
                ("src_index", ctypes.c_void_p), ("index_type", ctypes.c_int), ("dst_index_type", ctypes.c_int),
                ("src_index_type", ctypes.c_int), ("host_index", ctypes.c_int32), ("count", ctypes.c_int64),
                ("rejected", ctypes.c_void_p), ("dst_index_base", ctypes.c_int64), ("src_index_base", ctypes.c_int64),
                ("dst_index_stride", ctypes.c_int64), ("src_index_stride", ctypes.c_int64),
                ("dst_device_layers", ctypes.c_void_p), ("src_device_layers", ctypes.c_void_p),
                ("reserved", ctypes.c_int64)]


class UnpackDesc(ctypes.Structure):
    _fields_ = [("src", ctypes.c_void_p), ("src_bytes", ctypes.c_uint64), ("dst", ctypes.c_void_p),
                ("dst_bytes", ctypes.c_uint64), ("fragments", ctypes.c_void_p), ("count", ctypes.c_size_t),
                ("reserved", ctypes.c_int64)]


class Launch(ctypes.Structure):
    _fields_ = [("stream", ctypes.c_void_p), ("pdl", ctypes.c_int32), ("max_sms", ctypes.c_int32),
                ("reserved", ctypes.c_int64)]


STRUCTURES = {"kvprim_table": Table, "kvprim_gather_desc": GatherDesc, "kvprim_store_desc": StoreDesc,
              "kvprim_transfer_desc": TransferDesc, "kvprim_unpack_desc": UnpackDesc, "kvprim_cuda_launch": Launch}


def layout():
    """A C file that compiles, warnings as errors, if the structures above match the headers: each field has the same
    place and size, and none is missing, because the initialisers name them all (-Wmissing-field-initializers)."""
    lines = ['#include "kvprim_cuda.cuh"',
             f'_Static_assert(KVPRIM_VERSION / 100 == {VERSION // 100}, "KVPRIM_VERSION");',
             f'_Static_assert(KVPRIM_I32 == {I32} && KVPRIM_I64 == {I64}, "kvprim_index_type");']
    for name, structure in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
        for field, kind in structure._fields_:
            lines.append(f"_Static_assert(offsetof({name}, {field}) == {getattr(structure, field).offset} && "
                         f'sizeof((({name} *)0)->{field}) == {ctypes.sizeof(kind)}, "{name}.{field}");')
        nested = (ctypes.Structure, ctypes.Array)
        values = ", ".join("{0}" if issubclass(kind, nested) else "0" for _, kind in structure._fields_)
        lines.append(f"const {name} all_of_{name} = {{{values}}};")
    return "\n".join(lines)


class KvprimError(RuntimeError):
    pass


def check_version(library, path):
    """Refuses a library whose structures may differ from those above: ctypes would pass it other fields unnoticed. The
    patch number may differ, the sizes may not."""
    if not hasattr(library, "kvprim_version") or not hasattr(library, "kvprim_sizeof"):
        raise KvprimError(f"{path} has no kvprim_version() or kvprim_sizeof(): it is no kvprim, or older than 0.2")
    library.kvprim_version.restype, library.kvprim_version.argtypes = ctypes.c_uint32, []
    library.kvprim_sizeof.restype, library.kvprim_sizeof.argtypes = ctypes.c_size_t, [ctypes.c_char_p]
    version = library.kvprim_version()
    if version // 100 != VERSION // 100:
        raise KvprimError(f"{path} is kvprim {dotted(version)}, but this binding was written for {dotted(VERSION)}")
    for name, structure in STRUCTURES.items():
        there, here = library.kvprim_sizeof(name.encode()), ctypes.sizeof(structure)
        if there == 0 and structure is Launch:  # kvprim.h alone does not know it
            continue
        if there != here:
            raise KvprimError(f"{path}: {name} has {there} bytes, but {here} in this binding")


def dotted(version):
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def load(path):
    """The library at this path. OSError: it cannot be loaded; KvprimError: it does not fit this binding."""
    library = ctypes.CDLL(path)
    check_version(library, path)
    library.kvprim_status_name.restype = library.kvprim_last_error.restype = ctypes.c_char_p
    library.has_cuda = hasattr(library, "kvprim_cuda_gather")
    for name, structure in (("gather", GatherDesc), ("store", StoreDesc), ("transfer", TransferDesc),
                            ("unpack", UnpackDesc)):
        getattr(library, "kvprim_" + name).argtypes = [ctypes.POINTER(structure)]
        if library.has_cuda:
            getattr(library, "kvprim_cuda_" + name).argtypes = [ctypes.POINTER(structure), ctypes.POINTER(Launch)]
    return library


def row_bytes(rows):
    return rows.shape[-1] * rows.element_size()


def table_of(tensor, **fields):
    """A Table of the tensor's memory, which lives as long as the Table. `bytes` ends at the tensor's last element, so
    that the library refuses rows, strides and heads that reach past it."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    table = Table(data=tensor.data_ptr(), bytes=elements * tensor.element_size() if tensor.numel() else 0, **fields)
    table.tensor = tensor
    return table


def rows_of(rows):
    """The Table of a 2-dimensional tensor. Its rows may lie apart, as in a part of a packed tensor."""
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
        raise ValueError(f"rows of shape {tuple(rows.shape)} have strides {rows.stride()}: elements must be packed")
    return table_of(rows, rows=rows.shape[0], stride=rows.stride(0) * rows.element_size())


def nhd(cache):
    """The Table of a token-major paged cache: [pages, page_rows, row]."""
    size = cache.element_size()
    return table_of(cache, rows=cache.shape[0] * cache.shape[1], page_rows=cache.shape[1],
                    stride=cache.stride(1) * size, page_stride=cache.stride(0) * size)


def hnd(cache):
    """The Table of a head-major paged cache: [pages, heads, page_rows, head]."""
    size = cache.element_size()
    return table_of(cache, rows=cache.shape[0] * cache.shape[2], page_rows=cache.shape[2],
                    stride=cache.stride(2) * size, page_stride=cache.stride(0) * size, heads=cache.shape[1],
                    head_stride=cache.stride(1) * size)


def index_type(index):
    """The kvprim_index_type of a packed tensor of int32 or int64."""
    if index.dtype not in (torch.int32, torch.int64) or not index.is_contiguous():
        raise ValueError(f"indices are {index.dtype} with strides {index.stride()}, expected packed int32 or int64")
    return I32 if index.dtype == torch.int32 else I64


def current_stream():
    """The handle of torch's current stream. Call this once per step, not once per call: it is slow."""
    return torch.cuda.current_stream().cuda_stream


class Prepared:
    """A call of kvprim_NAME, or of kvprim_cuda_NAME if the tensor `on` lies on a GPU, which must be the current one. It
    may be repeated: the tensors' contents may change, their addresses may not. The tensors live as long as it does."""

    def __init__(self, library, name, desc, on, tensors, pdl):
        self.library, self.tensors, self.on_gpu = library, tensors, on.is_cuda
        self.launch = Launch(pdl=pdl)
        self.function = getattr(library, ("kvprim_cuda_" if self.on_gpu else "kvprim_") + name)
        pointers = (desc, self.launch) if self.on_gpu else (desc,)
        self.arguments = tuple(ctypes.byref(structure) for structure in pointers)

    def __call__(self, stream=None):
        if self.on_gpu:
            self.launch.stream = current_stream() if stream is None else stream
        status = self.function(*self.arguments)
        if status != 0:
            name, text = self.library.kvprim_status_name(status), self.library.kvprim_last_error()
            raise KvprimError(f"{name.decode()}: {text.decode()}")


def prepare_gather(library, out, table, index, base=0, rejected=None, pdl=0):
    """out[i] = row index[i] - base of the Table `table`; zeros if there is no such row. All on one device."""
    desc = GatherDesc(dst=rows_of(out), src=table, row_bytes=row_bytes(out), index=index.data_ptr(),
                      index_type=index_type(index), index_base=base, count=index.numel(),
                      rejected=None if rejected is None else rejected.data_ptr())
    return Prepared(library, "gather", desc, out, (out, table, index, rejected), pdl)


def prepare_store(library, k_cache, v_cache, k, v, slot, base=0, rejected=None, pdl=0):
    """Rows slot[i] - base of the Tables k_cache and v_cache = k[i] and v[i]; slots outside them are skipped."""
    desc = StoreDesc(k_cache=k_cache, v_cache=v_cache, k=rows_of(k), v=rows_of(v), k_bytes=row_bytes(k),
                     v_bytes=row_bytes(v), slot=slot.data_ptr(), slot_type=index_type(slot), slot_base=base,
                     count=slot.numel(), rejected=None if rejected is None else rejected.data_ptr())
    return Prepared(library, "store", desc, k, (k_cache, v_cache, k, v, slot, rejected), pdl)


def gather(*arguments, **options):
    """Calls what prepare_gather makes, once."""
    prepare_gather(*arguments, **options)()


def store(*arguments, **options):
    """Calls what prepare_store makes, once."""
    prepare_store(*arguments, **options)()


# ---- the example: against torch's index_select, index_put_ and index_copy_ -------------------------------------------

def random_rows(rows, width_bytes, device="cuda"):
    """Rows of random bits, as bf16."""
    words = torch.empty((rows, width_bytes // 8), dtype=torch.int64, device=device)
    return words.random_().view(torch.bfloat16)


def same_bits(a, b):
    """Whether the tensors hold the same bits. torch.equal alone would call every NaN a difference."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


class Checks:
    def __init__(self, device):
        self.device, self.passed, self.failed = device, 0, 0

    def that(self, holds, what):
        self.passed, self.failed = self.passed + bool(holds), self.failed + (not holds)
        if not holds:
            print(f"FAIL {self.device}: {what}")


def check_gather(library, checks):
    device = checks.device
    table = random_rows(1000, 384, device)
    for dtype in (torch.int32, torch.int64):
        index = torch.randint(1000, (77,), device=device).to(dtype)
        out = random_rows(77, 384, device)
        gather(library, out, rows_of(table), index)
        checks.that(same_bits(out, torch.index_select(table, 0, index)), f"gather, {dtype}")

    again = prepare_gather(library, out, rows_of(table), index)
    for _ in range(2):
        index.random_(1000)
        again()
        checks.that(same_bits(out, torch.index_select(table, 0, index)), "gather prepared, then other indices")

    # Ids of a shard of a vocabulary (500 to 1499), padding, and ids past the shard, which give rows of zeros.
    index = torch.tensor([-1, 0, 499, 500, 1499, 1500, -7, 900], dtype=torch.int32, device=device)
    inside = (index >= 500) & (index < 1500)
    expected = torch.index_select(table, 0, torch.where(inside, index - 500, torch.zeros_like(index)))
    expected[~inside] = 0
    out, rejected = random_rows(8, 384, device), torch.zeros(1, dtype=torch.int32, device=device)
    gather(library, out, rows_of(table), index, base=500, rejected=rejected)
    checks.that(same_bits(out, expected), "gather from a shard, with padding")
    checks.that(rejected.item() == 1, f"ids past the shard: counted {rejected.item()}, expected 1")

    part = table.view(torch.int16)[:, 64:128].view(torch.bfloat16)
    out = random_rows(20, 128, device)
    gather(library, out, rows_of(part), index := torch.randperm(1000, device=device)[:20])
    checks.that(same_bits(out, torch.index_select(part, 0, index)), "gather of parts of rows")


def new_rows(count, heads, head, device):
    """K and V of new tokens as parts of a packed QKV tensor, and their slots in 40 pages of 16; some are padding."""
    width = heads * head
    qkv = random_rows(count, 2 * 3 * width, device)
    slot = torch.randperm(640, device=device)[:count]
    slot[::7] = -1
    return qkv[:, width:2 * width], qkv[:, 2 * width:], slot


def check_store(library, checks):
    device, heads, head = checks.device, 8, 64
    k, v, slot = new_rows(100, heads, head, device)
    keep = slot >= 0

    caches = [random_rows(640, 2 * heads * head, device).view(40, 16, heads * head) for _ in "kv"]
    expected = [c.clone() for c in caches]
    for cache, rows in zip(expected, (k, v)):
        cache.view(640, -1).index_put_((slot[keep],), rows[keep])
    store(library, nhd(caches[0]), nhd(caches[1]), k, v, slot.to(torch.int32))
    checks.that(same_bits(caches[0], expected[0]) and same_bits(caches[1], expected[1]), "store, NHD: index_put_")

    # Slot s of a head-major cache is [s // 16, :, s % 16, :].
    page = torch.div(slot[keep], 16, rounding_mode="floor")
    caches = [random_rows(640 * heads, 2 * head, device).view(40, heads, 16, head) for _ in "kv"]
    expected = [c.clone() for c in caches]
    for cache, rows in zip(expected, (k, v)):
        cache[page, :, slot[keep] % 16] = rows[keep].reshape(-1, heads, head)
    rejected = torch.zeros(1, dtype=torch.int32, device=device)
    store(library, hnd(caches[0]), hnd(caches[1]), k, v, slot, rejected=rejected)
    checks.that(same_bits(caches[0], expected[0]) and same_bits(caches[1], expected[1]), "store, HND: index_put_")
    checks.that(rejected.item() == 0, "store counts padding as rejected")

    out, with_zeros = random_rows(100, 2 * heads * head, device), k.clone()
    with_zeros[~keep] = 0
    gather(library, out, hnd(caches[0]), slot)
    checks.that(same_bits(out, with_zeros), "gather from HND: the rows stored, zeros for padding")

    # Slot 0 is reserved: slots count from 1.
    cache, plus_one = torch.zeros_like(caches[0]), torch.where(keep, slot + 1, torch.zeros_like(slot))
    store(library, hnd(cache), hnd(caches[1]), k, v, plus_one, base=1)
    gather(library, out, hnd(cache), slot)
    checks.that(same_bits(out, with_zeros), "store with a reserved slot 0")


def check_errors(library, checks):
    rows, index = random_rows(8, 128, checks.device), torch.arange(8, dtype=torch.int32, device=checks.device)
    out, table, no_rows, too_long = random_rows(8, 128, checks.device), rows_of(rows), rows_of(rows), rows_of(rows)
    no_rows.rows, too_long.rows = 0, 9
    for error_name, what, dst, src in (
            ("KVPRIM_ERROR_OVERLAP", "rows gathered onto themselves", rows, table),
            ("KVPRIM_ERROR_SIZE", "fewer rows of output than indices", random_rows(7, 128, checks.device), table),
            ("KVPRIM_ERROR", "a table whose rows are not set", out, no_rows),
            ("KVPRIM_ERROR_SIZE", "a table that reaches past its tensor", out, too_long)):
        try:
            gather(library, dst, src, index)
            checks.that(False, f"{what}: no {error_name}")
        except KvprimError as error:
            checks.that(error_name in str(error) and "kvprim" in str(error), f"{what}: {error}")
    for what, broken in (("a transposed tensor as rows", lambda: rows_of(rows.t())),
                         ("one row expanded to many", lambda: rows_of(rows[:1].expand(8, -1))),
                         ("int16 indices", lambda: index_type(index.to(torch.int16)))):
        try:
            broken()
            checks.that(False, f"{what}: no exception")
        except ValueError:
            checks.that(True, what)


class Contender:
    """A graph of `launches` calls of call(i, stream)."""

    def __init__(self, call, launches):
        self.launches, self.us = launches, []
        call(0, current_stream())  # a first call may set things up, which must not be captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            stream = current_stream()
            for i in range(launches):
                self.result = call(i, stream)
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
    """Microseconds on the GPU by name. `calls` maps a name to a function of the launch's number and the handle of the
    current stream, which torch's functions ignore. verify(name, result) gets the result of the last launch."""
    contenders = {}
    for name, call_ in calls.items():
        contenders[name] = Contender(call_, launches)
        verify(name, contenders[name].result)
    for repetition in range(repetitions):
        for name in sorted(contenders, reverse=repetition % 2 == 1):
            contenders[name].time()
    return {name: statistics.median(c.us) for name, c in contenders.items()}


def measure_host(calls, launches, repetitions=9):
    """Microseconds that a call from Python takes on the host, which only enqueues."""
    us, stream = {name: [] for name in calls}, current_stream()
    for repetition in range(repetitions):
        for name in sorted(calls, reverse=repetition % 2 == 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(launches):
                calls[name](i, stream)
            us[name].append(1e6 * (time.perf_counter() - start) / launches)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in us.items()}


def print_times(what, calls, launches, verify):
    gpu, host = measure(calls, launches, verify), measure_host(calls, launches)
    for kind, us in (("GPU", gpu), ("host", host)):
        best = min(us[name] for name in us if not name.startswith("kvprim"))
        print(f"{what}  {kind:4}  " + "  ".join(f"{name} {us[name]:7.2f}" for name in us) +
              f"  {best / us['kvprim']:5.2f}", flush=True)


def time_gather(library, checks, table, count, launches):
    """Lists of random rows and outputs rotate, so that a launch does not find the rows of the last one in a cache."""
    sets = [torch.randperm(table.shape[0], device="cuda")[:count].to(torch.int32) for _ in range(8)]
    outs = [torch.zeros((count, table.shape[1]), dtype=table.dtype, device="cuda") for _ in range(8)]

    def select(i, _):
        return torch.index_select(table, 0, sets[i % 8], out=outs[i % 8])

    def ours(pdl):
        prepared = [prepare_gather(library, outs[i], rows_of(table), sets[i], pdl=pdl) for i in range(8)]

        def call(i, stream):
            prepared[i % 8](stream)
            return outs[i % 8]
        return call

    def verify(name, got):
        last = (launches - 1) % 8
        checks.that(same_bits(got, table[sets[last].long()]), f"{name}: wrong rows of {count}")
        got.zero_()

    calls = {"index_select": select, "kvprim": ours(0), "kvprim+PDL": ours(1)}
    print_times(f"gather {count:6} x {row_bytes(table):4} B", calls, launches, verify)


def time_store(library, checks, caches, count, launches):
    """K and V take two calls of torch, one of kvprim."""
    sets = [torch.randperm(caches[0].shape[0], device="cuda")[:count] for _ in range(8)]
    short = [s.to(torch.int32) for s in sets]
    width = row_bytes(caches[0])
    inputs = [(random_rows(count, width), random_rows(count, width)) for _ in range(8)]

    def both(method, i):
        for cache, rows in zip(caches, inputs[i % 8]):
            method(cache, sets[i % 8], rows)

    def ours(pdl):
        tables = [rows_of(cache) for cache in caches]
        prepared = [prepare_store(library, *tables, *inputs[i], short[i], pdl=pdl) for i in range(8)]
        return lambda i, stream: prepared[i % 8](stream)

    def verify(name, _):
        last = (launches - 1) % 8
        for cache, rows in zip(caches, inputs[last]):
            checks.that(same_bits(cache[sets[last]], rows), f"{name}: wrong rows of {count}")
            cache.zero_()

    calls = {"index_put_": lambda i, _: both(lambda cache, slot, rows: cache.index_put_((slot,), rows), i),
             "index_copy_": lambda i, _: both(lambda cache, slot, rows: cache.index_copy_(0, slot, rows), i),
             "kvprim": ours(0), "kvprim+PDL": ours(1)}
    print_times(f"store  {count:6} x {width:4} B", calls, launches, verify)


def check_and_time(library):
    """Returns the number of failed checks."""
    cuda = library.has_cuda and torch.cuda.is_available()
    all_checks = [Checks("cpu")] + ([Checks("cuda")] if cuda else [])
    for checks in all_checks:
        torch.manual_seed(1)
        check_gather(library, checks)
        check_store(library, checks)
        check_errors(library, checks)
    if cuda:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: medians of us per call; GPU: in replayed "
              "graphs; host: the call from Python, which only enqueues (kvprim's is prepared before); last column: "
              "best of torch / kvprim")
        for width in (256, 2048):
            memory = [random_rows((1 << 30) // width, width) for _ in "kv"]
            for count in (64, 1024, 65536):
                time_gather(library, all_checks[1], memory[0], count, 64 if count < 65536 else 24)
                time_store(library, all_checks[1], memory, count, 64 if count < 65536 else 24)
            del memory
    else:
        why = "torch finds no CUDA device" if library.has_cuda else "the library was built without nvcc"
        print(f"skip the part on a GPU: {why}")
    for checks in all_checks:
        print(f"{checks.device}: {checks.passed} checks passed, {checks.failed} failed")
    return sum(checks.failed for checks in all_checks)


def main():
    if sys.argv[1:] == ["--layout"]:
        print(layout())
        return 0
    if torch is None:
        sys.exit("08_torch: python3 has no torch: pip install torch")
    built = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../build/libkvprim.so")
    try:
        library = load(sys.argv[1] if len(sys.argv) > 1 else built)
    except (OSError, KvprimError) as error:
        sys.exit(f"08_torch: {error}: make lib builds it")
    with torch.no_grad():
        return check_and_time(library) != 0


if __name__ == "__main__":
    sys.exit(main())

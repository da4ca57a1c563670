# SPDX-License-Identifier: MIT
"""Calls kvprim on torch's tensors through ctypes alone, and checks every call against torch's own operators.

    make lib && python3 examples/08_torch.py [LIBRARY]      LIBRARY: build/libkvprim.so
    python3 examples/08_torch.py --layout                   needs neither the library nor torch: see layout()

If a tensor of a call lies on a GPU, which must be the current one, the CUDA function runs on torch's current stream;
then tensors of the CPU must be pinned. Otherwise the host function runs. An error of the library becomes a Python
exception. Without a GPU, or with a library that lacks the CUDA functions, only the part on the CPU runs. To use this in
a program of your own, copy everything above "the example". 12_torch_ops.cpp has operators in place of ctypes.

gather(), store() and so on suit an occasional call: making the descriptors in Python takes most of their time. A call
that is repeated with the same tensors, as in each layer of a decode step, is better prepared once:

    append = prepare_store(library, nhd(k_cache), nhd(v_cache), k, v, slot)
    append(stream)      every step, after k, v and slot are written; stream: see current_stream()

torch.compile leaves all of them out of its graphs: a compiled function breaks there, and goes on after the call.
"""
import ctypes
import os
import sys
import threading

try:
    import torch
except ImportError:
    torch = None

VERSION = 200  # the KVPRIM_VERSION whose structures these are: major * 10000 + minor * 100 + patch
I32, I64 = 1, 2  # kvprim_index_type; 0 is "not set", which the library refuses


class Table(ctypes.Structure):
    tensor = None  # whose memory it is, if one's: see table_of()
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


class Fragment(ctypes.Structure):
    _fields_ = [("src_offset", ctypes.c_uint64), ("dst_offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class UnpackDesc(ctypes.Structure):
    _fields_ = [("src", ctypes.c_void_p), ("src_bytes", ctypes.c_uint64), ("dst", ctypes.c_void_p),
                ("dst_bytes", ctypes.c_uint64), ("fragments", ctypes.c_void_p), ("count", ctypes.c_size_t),
                ("reserved", ctypes.c_int64)]


class CopyItem(ctypes.Structure):
    _fields_ = [("src", ctypes.c_void_p), ("dst", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class CopyDesc(ctypes.Structure):
    _fields_ = [("items", ctypes.c_void_p), ("count", ctypes.c_size_t), ("reserved", ctypes.c_int64)]


class Launch(ctypes.Structure):
    _fields_ = [("stream", ctypes.c_void_p), ("pdl", ctypes.c_int32), ("max_sms", ctypes.c_int32),
                ("reserved", ctypes.c_int64)]


STRUCTURES = {"kvprim_table": Table, "kvprim_gather_desc": GatherDesc, "kvprim_store_desc": StoreDesc,
              "kvprim_transfer_desc": TransferDesc, "kvprim_fragment": Fragment, "kvprim_unpack_desc": UnpackDesc,
              "kvprim_copy_item": CopyItem, "kvprim_copy_desc": CopyDesc, "kvprim_cuda_launch": Launch}


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


def eager(function):
    """torch.compile cannot see into the function: it calls it."""
    return torch.compiler.disable(function) if torch else function


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
                            ("unpack", UnpackDesc), ("copy", CopyDesc)):
        getattr(library, "kvprim_" + name).argtypes = [ctypes.POINTER(structure)]
        if library.has_cuda:
            getattr(library, "kvprim_cuda_" + name).argtypes = [ctypes.POINTER(structure), ctypes.POINTER(Launch)]
    return library


def row_bytes(rows):
    return rows.shape[-1] * rows.element_size()


def packed_bytes(tensor):
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: it must be packed")
    return tensor.numel() * tensor.element_size()


def table_of(tensor, **fields):
    """A Table of the tensor's memory, which lives as long as the Table. `bytes` ends at the tensor's last element, so
    that the library refuses rows, strides and heads that reach past it."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    table = Table(data=tensor.data_ptr(), bytes=elements * tensor.element_size() if tensor.numel() else 0, **fields)
    table.tensor = tensor
    return table


@eager
def rows_of(rows):
    """The Table of a 2-dimensional tensor. Its rows may lie apart, as in a part of a packed tensor."""
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
        raise ValueError(f"rows of shape {tuple(rows.shape)} have strides {rows.stride()}: elements must be packed")
    return table_of(rows, rows=rows.shape[0], stride=rows.stride(0) * rows.element_size())


@eager
def nhd(cache):
    """The Table of a token-major paged cache: [pages, page_rows, row]."""
    size = cache.element_size()
    return table_of(cache, rows=cache.shape[0] * cache.shape[1], page_rows=cache.shape[1],
                    stride=cache.stride(1) * size, page_stride=cache.stride(0) * size)


@eager
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


@eager
def current_stream():
    """The handle of torch's current stream. Call this once per step, not once per call: it is slow."""
    return torch.cuda.current_stream().cuda_stream


kept, kept_lock = [], threading.Lock()


def keep(tensors, stream):
    """Keeps pinned tensors until the GPU has read them. torch's allocator of pinned memory does not know of our calls:
    it would hand the memory out again as soon as the caller drops the tensor. (12_torch_ops.cpp tells it.) While a
    graph is captured there is nothing to wait for: the caller keeps what a graph reads as long as the graph."""
    if torch.cuda.is_current_stream_capturing():
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream())
    with kept_lock:
        kept[:] = [(other, theirs) for other, theirs in kept if not other.query()] + [(event, tensors)]


class Prepared:
    """A call of kvprim_NAME, or of kvprim_cuda_NAME if one of the tensors, given by name, lies on a GPU. It may be
    repeated: the tensors' contents may change, their addresses may not. They live as long as it does, and so does
    `host`: what the call reads before it returns."""

    def __init__(self, library, name, desc, tensors, host=None, **launch):
        self.library, self.desc, self.host, self.launch = library, desc, host, Launch(**launch)
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.numel() > 0}
        self.on_gpu = any(tensor.is_cuda for tensor in self.tensors.values())
        self.pinned = [tensor for tensor in self.tensors.values() if self.on_gpu and not tensor.is_cuda]
        for argument, tensor in self.tensors.items():
            if self.on_gpu and not tensor.is_cuda and not tensor.is_pinned():
                raise KvprimError(f"{name}: {argument} is in pageable memory of the CPU, which the GPU does not reach: "
                                  "move it to the GPU, or use pin_memory()")
        self.function = getattr(library, ("kvprim_cuda_" if self.on_gpu else "kvprim_") + name)
        self.arguments = [ctypes.byref(desc)] + [ctypes.byref(self.launch)] * self.on_gpu

    @eager
    def __call__(self, stream=None):
        if self.on_gpu:
            self.launch.stream = current_stream() if stream is None else stream
        status = self.function(*self.arguments)
        if status != 0:
            name, text = self.library.kvprim_status_name(status), self.library.kvprim_last_error()
            raise KvprimError(f"{name.decode()}: {text.decode()}")
        if self.pinned:
            keep(self.pinned, self.launch.stream)


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def counter(rejected):
    """The pointer to a tensor of one int32, or None."""
    if rejected is not None and (rejected.dtype != torch.int32 or rejected.numel() != 1):
        raise ValueError(f"rejected is {rejected.numel()} elements of {rejected.dtype}, expected one int32")
    return pointer(rejected)


@eager
def prepare_gather(library, out, table, index, base=0, rejected=None, pdl=0):
    """out[i] = row index[i] - base of the Table `table`; zeros if there is no such row."""
    desc = GatherDesc(dst=rows_of(out), src=table, row_bytes=row_bytes(out), index=index.data_ptr(),
                      index_type=index_type(index), index_base=base, count=index.numel(), rejected=counter(rejected))
    return Prepared(library, "gather", desc, {"out": out, "table": table.tensor, "index": index, "rejected": rejected},
                    pdl=pdl)


@eager
def prepare_store(library, k_cache, v_cache, k, v, slot, base=0, rejected=None, pdl=0):
    """Rows slot[i] - base of the Tables k_cache and v_cache = k[i] and v[i]; slots outside them are skipped."""
    desc = StoreDesc(k_cache=k_cache, v_cache=v_cache, k=rows_of(k), v=rows_of(v), k_bytes=row_bytes(k),
                     v_bytes=row_bytes(v), slot=slot.data_ptr(), slot_type=index_type(slot), slot_base=base,
                     count=slot.numel(), rejected=counter(rejected))
    return Prepared(library, "store", desc, {"k_cache": k_cache.tensor, "v_cache": v_cache.tensor, "k": k, "v": v,
                                             "slot": slot, "rejected": rejected}, pdl=pdl)


def geometry(table):
    """All fields but the address."""
    return [getattr(table, field) for field, _ in Table._fields_ if field not in ("data", "reserved")]


@eager
def prepare_transfer(library, dst, src, row_bytes, dst_index, src_index, same_cache=0, rejected=None, max_sms=0):
    """In each layer, row dst_index[i] of dst = row src_index[i] of src. dst and src are lists of Tables, one for each
    layer. The indices are both on the GPU, or both on the CPU, pinned or not: then the call reads them."""
    sides = {"dst": dst, "src": src}
    if len(dst) != len(src) or dst_index.numel() != src_index.numel() or dst_index.is_cuda != src_index.is_cuda:
        raise ValueError("dst and src, and their indices, must be as many, and both indices on one side")
    if any(geometry(table) != geometry(side[0]) for side in sides.values() for table in side):
        raise ValueError("the layers of a side must have the same shape and strides")
    tensors = {f"{name}[{i}]": table.tensor for name, side in sides.items() for i, table in enumerate(side)}
    layers = {name: (ctypes.c_void_p * len(side))(*[table.data for table in side]) for name, side in sides.items()}
    host_index = not dst_index.is_cuda
    desc = TransferDesc(dst=dst[0], src=src[0], layers=len(dst), same_cache=same_cache, row_bytes=row_bytes,
                        dst_layers=ctypes.addressof(layers["dst"]), src_layers=ctypes.addressof(layers["src"]),
                        dst_index=dst_index.data_ptr(), src_index=src_index.data_ptr(), host_index=host_index,
                        dst_index_type=index_type(dst_index), src_index_type=index_type(src_index),
                        count=dst_index.numel(), rejected=counter(rejected))
    tensors.update({"rejected": rejected} if host_index else
                   {"rejected": rejected, "dst_index": dst_index, "src_index": src_index})
    return Prepared(library, "transfer", desc, tensors, (layers, dst_index, src_index), max_sms=max_sms)


@eager
def prepare_unpack(library, dst, src, fragments, pdl=0):
    """For each (src_offset, dst_offset, bytes) of `fragments`: those bytes of dst = those of src, both packed."""
    array = (Fragment * len(fragments))(*[Fragment(*fragment) for fragment in fragments])
    desc = UnpackDesc(src=src.data_ptr(), src_bytes=packed_bytes(src), dst=dst.data_ptr(), dst_bytes=packed_bytes(dst),
                      fragments=ctypes.addressof(array), count=len(fragments))
    return Prepared(library, "unpack", desc, {"dst": dst, "src": src}, array, pdl=pdl)


@eager
def prepare_copy(library, dst, src, pdl=0):
    """dst[i] = src[i], packed tensors of as many bytes; where src[i] is None, zeros."""
    if len(dst) != len(src) or any(b is not None and packed_bytes(a) != packed_bytes(b) for a, b in zip(dst, src)):
        raise ValueError("dst and src must be as many tensors, of the same sizes")
    items = (CopyItem * len(dst))(*[CopyItem(pointer(b), a.data_ptr(), packed_bytes(a)) for a, b in zip(dst, src)])
    tensors = {f"{name}[{i}]": tensor for name, side in (("dst", dst), ("src", src)) for i, tensor in enumerate(side)}
    return Prepared(library, "copy", CopyDesc(items=ctypes.addressof(items), count=len(dst)), tensors, items, pdl=pdl)


def once(prepare):
    """Calls what `prepare` makes, once."""
    return eager(lambda *arguments, **options: prepare(*arguments, **options)())


gather, store, transfer = once(prepare_gather), once(prepare_store), once(prepare_transfer)
unpack, copy = once(prepare_unpack), once(prepare_copy)


# ---- the example ----------------------------------------------------------------------------------------------------

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
    byte = torch.zeros(1, dtype=torch.int8, device=checks.device)
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
                         ("a counter of one byte", lambda: gather(library, out, table, index, rejected=byte)),
                         ("layers that differ", lambda: transfer(library, [rows_of(out)] * 2, [table, too_long], 128,
                                                                 index, index)),
                         ("int16 indices", lambda: index_type(index.to(torch.int16)))):
        try:
            broken()
            checks.that(False, f"{what}: no exception")
        except ValueError:
            checks.that(True, what)


def layer_caches(checks, layers, pinned=False):
    """K caches of some layers, head-major, on the device or in pinned memory."""
    caches = [random_rows(640 * 8, 128, checks.device).view(40, 8, 16, 64) for _ in range(layers)]
    return [cache.cpu().pin_memory() for cache in caches] if pinned else caches


def check_transfer(library, checks):
    for pinned in [False] + [True] * (checks.device == "cuda"):
        layers, offloaded = layer_caches(checks, 3), random_rows(640 * 3, 1024, checks.device).view(640, 3, 512)
        offloaded = offloaded.cpu().pin_memory() if pinned else offloaded
        expected, back = offloaded.clone(), [torch.zeros_like(layer) for layer in layers]
        src, dst = (torch.randperm(640)[:100] for _ in "sd")
        for i, layer in enumerate(layers):
            expected[dst, i] = layer[src // 16, :, src % 16].reshape(100, 512).to(expected.device)
        pages = [rows_of(offloaded[:, i]) for i in range(3)]
        transfer(library, pages, [hnd(layer) for layer in layers], 1024, dst.to(torch.int32), src)
        transfer(library, [hnd(layer) for layer in back], pages, 1024, src.to(checks.device), dst.to(checks.device))
        if pinned:
            torch.cuda.synchronize()
        checks.that(same_bits(offloaded, expected), f"transfer, layer first to token first, pinned: {pinned}")
        checks.that(all(same_bits(a[src // 16, :, src % 16], b[src // 16, :, src % 16]) for a, b in zip(back, layers)),
                    f"transfer back, pinned: {pinned}")

    pages = [rows_of(layer.view(40, -1)) for layer in layers]
    expected = [layer[3].clone() for layer in layers]
    one = torch.tensor([3, 7], device=checks.device)
    transfer(library, pages, pages, 16384, one[1:], one[:1], same_cache=1)
    checks.that(all(same_bits(layer[7], page) for layer, page in zip(layers, expected)), "transfer in one cache")


def check_unpack(library, checks):
    src, dst = random_rows(1000, 384, checks.device), random_rows(1000, 384, checks.device)
    expected = dst.clone()
    expected[5:7], expected[100:600] = src[900:902], src[:500]
    unpack(library, dst, src, [(900 * 384, 5 * 384, 768), (0, 100 * 384, 192000), (0, 0, 0)])
    checks.that(same_bits(dst, expected), "unpack")


def check_copy(library, checks):
    src = [random_rows(rows, width, checks.device) for rows, width in ((1, 8), (100, 40), (3000, 1024), (0, 8))]
    dst = [torch.ones_like(tensor) for tensor in src]
    copy(library, dst, src)
    checks.that(all(map(same_bits, dst, src)), "copy of tensors")
    copy(library, dst, [None, src[1], None, None])
    checks.that(not dst[0].any() and not dst[2].any() and same_bits(dst[1], src[1]), "copy of zeros")
    if checks.device == "cuda":
        pinned = [tensor.cpu().pin_memory() for tensor in src]
        copy(library, [torch.zeros_like(src[0])] + pinned[1:], [pinned[0]] + [tensor for tensor in dst[1:]])
        torch.cuda.synchronize()
        checks.that(same_bits(pinned[1], src[1].cpu()) and not pinned[2].any(), "copy to and from pinned memory")


def check_reach(library, checks):
    """On a GPU: what lies in pageable memory of the CPU is refused, whatever it is."""
    rows, index = random_rows(8, 128), torch.arange(8, device="cuda")
    out, there = torch.zeros_like(rows), rows_of(rows)
    for argument, call in (("index", lambda: gather(library, out, there, index.cpu())),
                           ("table", lambda: gather(library, out, rows_of(rows.cpu()), index)),
                           ("out", lambda: gather(library, out.cpu(), there, index)),
                           ("v_cache", lambda: store(library, there, rows_of(rows.cpu()), out, out, index)),
                           ("src[0]", lambda: transfer(library, [rows_of(out)], [rows_of(rows.cpu())], 128, index,
                                                       index)),
                           ("dst", lambda: unpack(library, rows.cpu(), rows, [(0, 0, 8)])),
                           ("src[1]", lambda: copy(library, [out, out], [rows, rows.cpu()]))):
        try:
            call()
            checks.that(False, f"{argument} in pageable memory: not refused")
        except KvprimError as error:
            checks.that(f"{argument} is in pageable memory" in str(error), f"{argument}: {error}")


def check_temporaries(library, checks):
    """Pinned tensors that are dropped while the GPU has yet to read them: torch must not give their memory away."""
    table, out = random_rows(1000, 384), random_rows(77, 384)
    index = torch.randint(1, 1000, (77,))
    gather(library, out, rows_of(table), index.pin_memory())  # the first call loads the kernel, and takes long
    torch.cuda.synchronize()
    out.zero_()
    kept.clear()
    index.pin_memory()  # and drop it: the next tensor of this size gets its memory
    torch.cuda._sleep(50000000)  # cycles
    gather(library, out, rows_of(table), index.pin_memory())
    other = torch.zeros(77, dtype=torch.int64).pin_memory()
    checks.that(same_bits(out, table[index.cuda()]), "gather by a pinned temporary")
    del other
    gather(library, out, rows_of(table), index.cuda())
    torch.cuda.synchronize()
    again = prepare_gather(library, out, rows_of(table), index.pin_memory())
    again()
    checks.that(len(kept) == 1, f"{len(kept)} calls keep their tensors, expected the last one")


def check_compiled(library, checks):
    """A function that torch compiles, where torch.cuda.current_stream() is no longer what it is elsewhere."""
    table, index = random_rows(1000, 384, checks.device), torch.randint(1000, (77,), device=checks.device)
    again = prepare_gather(library, torch.zeros_like(table[:77]), rows_of(table), index)

    def step(index):
        out = torch.zeros_like(table[:77]) + 1
        gather(library, out, rows_of(table), index * 2 // 2)
        again(current_stream() if checks.device == "cuda" else None)
        again()
        return out.view(torch.int16) + 1

    got = torch.compile(step, backend="eager")(index)
    checks.that(torch.equal(got, table[index].view(torch.int16) + 1), "calls in a function compiled by torch")


def check_all(library):
    """Returns the number of failed checks."""
    cuda = library.has_cuda and torch.cuda.is_available()
    all_checks = [Checks("cpu")] + ([Checks("cuda")] if cuda else [])
    for checks in all_checks:
        torch.manual_seed(1)
        check_gather(library, checks)
        check_store(library, checks)
        check_transfer(library, checks)
        check_unpack(library, checks)
        check_copy(library, checks)
        check_errors(library, checks)
        check_compiled(library, checks)
    if cuda:
        check_reach(library, checks)
        check_temporaries(library, checks)
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
        return check_all(library) != 0


if __name__ == "__main__":
    sys.exit(main())

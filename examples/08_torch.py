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

typed() says what a Table's elements are. A store into one of FP8 or INT8 quantises, and a gather from it dequantises:

    store(library, typed(nhd(k_cache), k_scale), typed(nhd(v_cache), v_scale), k, v, slot)
    gather(library, out, typed(nhd(k_cache), k_scale), index)

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

VERSION = 300  # the KVPRIM_VERSION whose structures these are: major * 10000 + minor * 100 + patch
I32, I64 = 1, 2  # kvprim_index_type; 0 is "not set", which the library refuses
SCALE_TENSOR, SCALE_HEAD, SCALE_TILE = 1, 2, 3  # kvprim_scale_kind
SCALES_SHARED = -1  # KVPRIM_SCALES_SHARED
DTYPES = {"uint8": ("KVPRIM_U8", 16), "float16": ("KVPRIM_F16", 17), "bfloat16": ("KVPRIM_BF16", 18),
          "float32": ("KVPRIM_F32", 19), "int8": ("KVPRIM_INT8", 21), "float8_e4m3fn": ("KVPRIM_F8E4M3", 24),
          "float8_e5m2": ("KVPRIM_F8E5M2", 25), "float8_e8m0fnu": ("KVPRIM_F8E8M0", 26)}  # torch's name: kvprim_dtype


class Format(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("scale", ctypes.c_int), ("scale_dtype", ctypes.c_int),
                ("scale_power_of_two", ctypes.c_int32), ("scale_inverse", ctypes.c_int32),
                ("scale_min", ctypes.c_float), ("tile", ctypes.c_int64), ("scales", ctypes.c_void_p),
                ("scale_offset", ctypes.c_int64), ("scale_tile_stride", ctypes.c_int64),
                ("scale_stride", ctypes.c_int64), ("scale_page_stride", ctypes.c_int64),
                ("scale_layer_stride", ctypes.c_int64), ("nans", ctypes.c_void_p), ("scales_bytes", ctypes.c_int64),
                ("reserved", ctypes.c_int64)]


class Table(ctypes.Structure):
    # Whose memory it is, if one's, and of its scales and counter of NaNs; what `format` points to; elements of a row
    # and bytes of one, as far as they are known: see table_of() and typed().
    tensor = scales = nans = kept = elements = element_bytes = None
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("stride", ctypes.c_int64),
                ("page_rows", ctypes.c_int64), ("page_stride", ctypes.c_int64), ("heads", ctypes.c_int32),
                ("reserved_heads", ctypes.c_int32), ("head_stride", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("format", ctypes.c_void_p), ("reserved", ctypes.c_int64)]


class Preset(ctypes.Structure):
    _fields_ = [("k_cache", Table), ("v_cache", Table), ("k_format", Format), ("k_elements", ctypes.c_int64),
                ("v_elements", ctypes.c_int64)]


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


STRUCTURES = {"kvprim_format": Format, "kvprim_table": Table, "kvprim_preset": Preset,
              "kvprim_gather_desc": GatherDesc, "kvprim_store_desc": StoreDesc, "kvprim_transfer_desc": TransferDesc,
              "kvprim_fragment": Fragment, "kvprim_unpack_desc": UnpackDesc, "kvprim_copy_item": CopyItem,
              "kvprim_copy_desc": CopyDesc, "kvprim_cuda_launch": Launch}


def layout():
    """A C file that compiles, warnings as errors, if the structures above match the headers: each field has the same
    place and size, and none is missing, because the initialisers name them all (-Wmissing-field-initializers)."""
    lines = ['#include "kvprim_cuda.cuh"',
             f'_Static_assert(KVPRIM_VERSION / 100 == {VERSION // 100}, "KVPRIM_VERSION");',
             f'_Static_assert(KVPRIM_I32 == {I32} && KVPRIM_I64 == {I64}, "kvprim_index_type");',
             f"_Static_assert(KVPRIM_SCALE_TENSOR == {SCALE_TENSOR} && KVPRIM_SCALE_HEAD == {SCALE_HEAD} && "
             f'KVPRIM_SCALE_TILE == {SCALE_TILE} && KVPRIM_SCALES_SHARED == {SCALES_SHARED}, "kvprim_scale_kind");']
    lines += [f'_Static_assert({name} == {value}, "kvprim_dtype");' for name, value in DTYPES.values()]
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
    library.kvprim_preset_find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
                                           ctypes.c_int64, ctypes.POINTER(Preset)]
    return library


def check(library, status):
    if status != 0:
        name, text = library.kvprim_status_name(status), library.kvprim_last_error()
        raise KvprimError(f"{name.decode()}: {text.decode()}")


def row_bytes(rows):
    return rows.shape[-1] * rows.element_size()


def packed_bytes(tensor):
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: it must be packed")
    return tensor.numel() * tensor.element_size()


def extent(tensor):
    """Bytes from a tensor's first element to the end of its last one."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return elements * tensor.element_size() if tensor.numel() else 0


def table_of(tensor, elements=None, **fields):
    """A Table of the tensor's memory, which lives as long as the Table. `bytes` ends at the tensor's last element, so
    that the library refuses rows, strides and heads that reach past it. `elements`: of a row."""
    table = Table(data=tensor.data_ptr(), bytes=extent(tensor), **fields)
    table.tensor, table.elements, table.element_bytes = tensor, elements, tensor.element_size()
    return table


@eager
def rows_of(rows):
    """The Table of a 2-dimensional tensor. Its rows may lie apart, as in a part of a packed tensor."""
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
        raise ValueError(f"rows of shape {tuple(rows.shape)} have strides {rows.stride()}: elements must be packed")
    return table_of(rows, rows.shape[1], rows=rows.shape[0], stride=rows.stride(0) * rows.element_size())


@eager
def nhd(cache):
    """The Table of a token-major paged cache: [pages, page_rows, row]."""
    size = cache.element_size()
    return table_of(cache, cache.shape[2], rows=cache.shape[0] * cache.shape[1], page_rows=cache.shape[1],
                    stride=cache.stride(1) * size, page_stride=cache.stride(0) * size)


@eager
def hnd(cache):
    """The Table of a head-major paged cache: [pages, heads, page_rows, head]."""
    size = cache.element_size()
    return table_of(cache, cache.shape[1] * cache.shape[3], rows=cache.shape[0] * cache.shape[2],
                    page_rows=cache.shape[2], stride=cache.stride(2) * size, page_stride=cache.stride(0) * size,
                    heads=cache.shape[1], head_stride=cache.stride(1) * size)


def dtype_of(dtype):
    """The kvprim_dtype of a torch.dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{dtype} is no element type of kvprim: it has {', '.join(DTYPES)}")
    return DTYPES[name][1]


@eager
def typed(table, scale=None, nans=None, **fields):
    """The Table with a format, by its tensor's dtype: calls between two such Tables convert. The shape of `scale`, a
    tensor of float32 (computed ones also float8_e8m0fnu), says what it is:

        one element                       the scale of the whole table, read when the call runs
        [heads]                           one for each head, read likewise
        [rows, tiles], or                 one for each tile of each row, for tables without and with pages. A store
        [pages, page_rows, tiles]         computes and writes them, a gather reads them

    nans: a tensor of one int32, which counts NaNs that became 0 in int8. fields: more of kvprim_format's."""
    form = Format(dtype=dtype_of(table.tensor.dtype), nans=counter(nans, "nans"), **fields)
    if scale is not None:
        if scale.dtype != torch.float32 and str(scale.dtype) != "torch.float8_e8m0fnu":
            raise ValueError(f"scale is {scale.dtype}, expected float32 or float8_e8m0fnu")
        if any(size > 1 and stride == 0 for size, stride in zip(scale.shape, scale.stride())):
            raise ValueError(f"scale has strides {scale.stride()}: it is expanded, make it contiguous")
        form.scales, form.scale_dtype = scale.data_ptr(), dtype_of(scale.dtype)
        form.scales_bytes = scale.untyped_storage().nbytes() - scale.storage_offset() * scale.element_size()
        strides = [stride * scale.element_size() for stride in scale.stride()]
        form.scale_layer_stride = SCALES_SHARED if scale.dim() < 2 else 0
        if scale.numel() == 1 and scale.dim() < 2:
            form.scale = SCALE_TENSOR
        elif scale.dim() > 3 or table.elements % scale.shape[-1] != 0:
            raise ValueError(f"scale has shape {tuple(scale.shape)}, which a row of {table.elements} elements does not "
                             "divide into")
        else:
            form.scale = SCALE_HEAD if scale.dim() == 1 else SCALE_TILE
            form.tile, form.scale_tile_stride = table.elements // scale.shape[-1], strides[-1]
            form.scale_stride = strides[-2] if scale.dim() > 1 else 0
            form.scale_page_stride = strides[0] if scale.dim() == 3 else 0
            rows = tuple(scale.shape[:-1])
            if rows not in ((), (table.rows,), (table.rows // max(table.page_rows, 1), table.page_rows)):
                raise ValueError(f"scale has shape {tuple(scale.shape)}, but its table {table.rows} rows")
    copy = Table.from_buffer_copy(table)
    vars(copy).update(vars(table), kept=form, scales=scale, nans=nans)
    copy.format = ctypes.addressof(form)
    return copy


@eager
def preset(library, name, cache):
    """The Tables of K and V in a cache of an engine, by the name of its format, as kvprim_preset_find() lists them.
    The cache is [pages, page_rows, bytes of a token] of uint8. K is converted; V is copied as it is, and None if the
    format has none. Their `elements` say how many each has."""
    found = Preset()
    check(library, library.kvprim_preset_find(name.encode(), cache.data_ptr(), cache.shape[0] * cache.shape[1],
                                              cache.shape[1], cache.stride(0), ctypes.byref(found)))
    k, v = (Table.from_buffer_copy(table) for table in (found.k_cache, found.v_cache))
    k.kept, k.elements, k.element_bytes = Format.from_buffer_copy(found.k_format), found.k_elements, 1
    k.format = ctypes.addressof(k.kept)
    v.elements, v.element_bytes = found.v_elements, 2
    for table in (k, v):
        table.tensor, table.bytes = cache, extent(cache) - ((table.data or cache.data_ptr()) - cache.data_ptr())
    return k, v if found.v_elements else None


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
        check(self.library, self.function(*self.arguments))
        if self.pinned:
            keep(self.pinned, self.launch.stream)


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def counter(count, name="rejected"):
    """The pointer to a tensor of one int32, or None."""
    if count is not None and (count.dtype != torch.int32 or count.numel() != 1):
        raise ValueError(f"{name} is {count.numel()} elements of {count.dtype}, expected one int32")
    return pointer(count)


def tensors_of(**tables):
    """All tensors of these Tables, by name."""
    return {name + part: tensor for name, table in tables.items() if table is not None
            for part, tensor in (("", table.tensor), (" scale", table.scales), (" nans", table.nans))}


def beside(rows, table):
    """The Table of rows that go to or come from `table`: typed if that is."""
    return typed(rows_of(rows)) if table.format else rows_of(rows)


@eager
def prepare_gather(library, out, table, index, base=0, rejected=None, pdl=0):
    """out[i] = row index[i] - base of the Table `table`, converted if that is typed; zeros if there is no such row."""
    dst = beside(out, table)
    desc = GatherDesc(dst=dst, src=table, row_bytes=out.shape[1] * (table if table.format else dst).element_bytes,
                      index=index.data_ptr(), index_type=index_type(index), index_base=base, count=index.numel(),
                      rejected=counter(rejected))
    tensors = {"index": index, "rejected": rejected, **tensors_of(out=dst, table=table)}
    return Prepared(library, "gather", desc, tensors, (dst, table), pdl=pdl)


@eager
def prepare_store(library, k_cache, v_cache, k, v, slot, base=0, rejected=None, pdl=0):
    """Rows slot[i] - base of the Tables k_cache and v_cache = k[i] and v[i], converted if they are typed; slots
    outside them are skipped. v_cache and v may both be None."""
    tables = {"k_cache": k_cache, "k": beside(k, k_cache)}
    if v is not None:
        tables.update(v_cache=v_cache, v=beside(v, v_cache))
    desc = StoreDesc(**tables, k_bytes=row_bytes(k), v_bytes=0 if v is None else row_bytes(v), slot=slot.data_ptr(),
                     slot_type=index_type(slot), slot_base=base, count=slot.numel(), rejected=counter(rejected))
    return Prepared(library, "store", desc, {"slot": slot, "rejected": rejected, **tensors_of(**tables)}, tables,
                    pdl=pdl)


def geometry(table):
    """All fields but addresses, and of the format its bytes."""
    fields = [getattr(table, field) for field, _ in Table._fields_ if field not in ("data", "format", "reserved")]
    return fields + [bytes(table.kept) if table.format else None]


@eager
def prepare_transfer(library, dst, src, row_bytes, dst_index, src_index, same_cache=0, rejected=None, max_sms=0):
    """In each layer, row dst_index[i] of dst = row src_index[i] of src. dst and src are lists of Tables, one for each
    layer, converted if all are typed, with the same scale in all layers; row_bytes: of src's elements. The indices are
    both on the GPU, or both on the CPU, pinned or not: then the call reads them."""
    sides = {"dst": dst, "src": src}
    if len(dst) != len(src) or dst_index.numel() != src_index.numel() or dst_index.is_cuda != src_index.is_cuda:
        raise ValueError("dst and src, and their indices, must be as many, and both indices on one side")
    if any(geometry(table) != geometry(side[0]) for side in sides.values() for table in side):
        raise ValueError("the layers of a side must have the same shape and strides")
    tensors = tensors_of(**{f"{name}[{i}]": table for name, side in sides.items() for i, table in enumerate(side)})
    layers = {name: (ctypes.c_void_p * len(side))(*[table.data for table in side]) for name, side in sides.items()}
    host_index = not dst_index.is_cuda
    desc = TransferDesc(dst=dst[0], src=src[0], layers=len(dst), same_cache=same_cache, row_bytes=row_bytes,
                        dst_layers=ctypes.addressof(layers["dst"]), src_layers=ctypes.addressof(layers["src"]),
                        dst_index=dst_index.data_ptr(), src_index=src_index.data_ptr(), host_index=host_index,
                        dst_index_type=index_type(dst_index), src_index_type=index_type(src_index),
                        count=dst_index.numel(), rejected=counter(rejected))
    tensors.update({"rejected": rejected} if host_index else
                   {"rejected": rejected, "dst_index": dst_index, "src_index": src_index})
    return Prepared(library, "transfer", desc, tensors, (layers, sides, dst_index, src_index), max_sms=max_sms)


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


# Conversions, against torch's own casts. Those do not saturate, so clamp() goes first, which leaves NaN; torch keeps a
# NaN's sign and some of its bits, and kvprim gives every NaN the bits of `nan`.

def quantized(x, dtype, scale=None):
    """x / scale in the quantised dtype, as bytes; scale: a tensor that broadcasts. A division by a number would become
    a multiplication by its inverse on a GPU."""
    x = x.float() if scale is None else x.float() / scale
    nan = x.isnan()
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).masked_fill(nan, 0).to(torch.int8).view(torch.uint8)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).masked_fill(nan, 0).to(dtype).view(torch.uint8).masked_fill(nan, 0x7f)


def canonical(x):
    """The bits of a floating-point tensor, with one NaN."""
    bits, nan = {2: (torch.int16, 0x7fff), 4: (torch.int32, 0x7fffffff)}[x.element_size()]
    return x.contiguous().view(bits).masked_fill(x.isnan(), nan)


def dequantized(stored, dtype, scale=None):
    """stored * scale, as bits of dtype."""
    x = stored.float() if scale is None else stored.float() * scale
    return canonical(x.to(dtype))


def computed_scale(tiles, dtype, least=2.0 ** -126, power_of_two=False):
    """The scale of each tile, which is the last dimension. NaN does not count, infinity is the largest number."""
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    magnitude = tiles.float().abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    scale = (magnitude / torch.full_like(magnitude, largest)).clamp(min=least)
    bits = scale.view(torch.int32)
    return ((bits + 0x7fffff) & ~0x7fffff).view(torch.float32) if power_of_two else scale


def every_value(dtype, device):
    """128 rows of 512: all values of a 16-bit type, or as many random bits of float32."""
    if dtype == torch.float32:
        return torch.empty((128, 256), dtype=torch.int64, device=device).random_().view(torch.float32)
    return torch.arange(65536, device=device).to(torch.int16).view(128, 512).view(dtype)


FLOATS = ("bfloat16", "float16", "float32")
QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALES = (None, 1.0, 0.37, 3.1e-5, 2.0 ** -126, 1e-40, 2.0 ** 127, -2.0, 0.0, float("inf"), float("nan"))


def check_convert(library, checks):
    """Stores that quantise and gathers that dequantise; scales of a tensor and of a head."""
    device = checks.device
    slot = torch.randperm(160, device=device)[:128]
    for name in QUANTIZED:
        dtype = getattr(torch, name)
        for source in FLOATS:
            x, scale, nans = every_value(getattr(torch, source), device), torch.ones(1, device=device), None
            cache = torch.full((10, 16, 512), 0xa5, dtype=torch.uint8, device=device).view(dtype)
            if name == "int8":
                nans = torch.zeros(1, dtype=torch.int32, device=device)
            for value in SCALES:
                expected = cache.view(torch.uint8).view(160, 512).clone()
                given = None if value is None else scale.fill_(value)
                store(library, typed(nhd(cache), given, nans), None, x, None, slot)
                expected[slot] = quantized(x, dtype, given)
                checks.that(torch.equal(cache.view(torch.uint8).view(160, 512), expected),
                            f"store of {source} as {name}, scale {value}")
                if nans is not None:
                    there = (x if given is None else x.float() / scale).isnan().sum()
                    checks.that(nans.item() == there, f"{nans.item()} NaNs counted, scale {value}, not {there}")
                    nans.zero_()

    rejected = torch.zeros(1, dtype=torch.int32, device=device)
    index = torch.cat((torch.randperm(32, device=device), torch.tensor([-1, 32], device=device)))
    stored = torch.arange(256, device=device).to(torch.uint8).repeat(32).view(2, 16, 256)  # 32 rows of all values
    for name in QUANTIZED:
        cache, rows = stored.view(getattr(torch, name)), stored.view(32, 256).view(getattr(torch, name))
        for target in FLOATS:
            dtype = getattr(torch, target)
            for value in SCALES:
                out = torch.full((34, 256), 3, dtype=dtype, device=device)
                given = None if value is None else torch.full((1,), value, device=device)
                gather(library, out, typed(nhd(cache), given), index, rejected=rejected.zero_())
                bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
                checks.that(torch.equal(bits[:32], dequantized(rows, dtype, given)[index[:32]]) and
                            not bits[32:].any() and rejected.item() == 1, f"gather of {name} as {target}, {value}")

    for source in FLOATS:  # and into each other
        rows = every_value(getattr(torch, source), device)
        rows = rows.view(-1, rows.shape[1] // 2)
        index = torch.randperm(rows.shape[0], device=device)
        for target in FLOATS:
            out = torch.zeros(rows.shape, dtype=getattr(torch, target), device=device)
            gather(library, out, typed(rows_of(rows)), index)
            expected = rows[index]
            same = same_bits(out, expected) if source == target else torch.equal(
                out.view(canonical(out).dtype), canonical(expected.to(out.dtype)))
            checks.that(same, f"gather of {source} as {target}")

    # A scale for each of 8 heads, head-major, prepared; then other scales in the same memory.
    x, scale = random_rows(128, 1024, device), torch.rand(8, device=device) + 0.01
    caches = [torch.zeros((10, 8, 16, 64), dtype=torch.float8_e4m3fn, device=device) for _ in "kv"]
    tables = [typed(hnd(caches[0]), scale), typed(hnd(caches[1]))]
    again, out = prepare_store(library, *tables, x, x, slot), torch.zeros_like(x)
    back = prepare_gather(library, out, tables[0], slot)
    for _ in range(2):
        again()
        back()
        rows = [cache[slot // 16, :, slot % 16] for cache in caches]
        expected = quantized(x.view(128, 8, 64), torch.float8_e4m3fn, scale[:, None])
        checks.that(torch.equal(rows[0].view(torch.uint8), expected), "store with a scale for each head")
        checks.that(torch.equal(rows[1].view(torch.uint8), quantized(x.view(128, 8, 64), torch.float8_e4m3fn)),
                    "V beside it, without a scale")
        expected = dequantized(rows[0], torch.bfloat16, scale[:, None]).view(128, 512)
        checks.that(torch.equal(out.view(torch.int16), expected), "gather with a scale for each head")
        scale.mul_(3)


def check_computed(library, checks):
    """Scales that a store computes: a tile of a row, in memory of their own; and DeepSeek's formats, by presets."""
    device = checks.device
    x, slot = random_rows(100, 1024, device), torch.randperm(160, device=device)[:100]
    x[3], x[4, 64:] = 0, float("nan")
    wild = x.view(torch.int16) & 0x7f80 == 0x7f80  # infinities and NaNs: some are left
    wild[::5] = False
    x[wild] = 1
    for name, kind, fields in (("float8_e4m3fn", "float32", {}), ("float8_e5m2", "float32", {"scale_min": 1e-6}),
                               ("int8", "float32", {"scale_power_of_two": 1}), ("float8_e4m3fn", "float8_e8m0fnu", {}),
                               ("int8", "float32", {"scale_inverse": 1, "scale_min": 1e-6})):
        if not hasattr(torch, kind):
            continue  # torch before 2.7
        dtype, power_of_two = getattr(torch, name), kind != "float32" or "scale_power_of_two" in fields
        cache = torch.zeros((10, 16, 512), dtype=dtype, device=device)
        scales = torch.zeros((10, 16, 8), dtype=getattr(torch, kind), device=device)
        table, out = typed(nhd(cache), scales, **fields), torch.zeros_like(x)
        store(library, table, None, x, None, slot)
        expected = computed_scale(x.view(100, 8, 64), dtype, fields.get("scale_min", 2.0 ** -126), power_of_two)
        got, rows = scales.view(160, 8)[slot].float(), cache.view(160, 512)[slot]
        checks.that(torch.equal(got, expected), f"scales that a store computes, {name}, {kind}, {fields}")
        each = expected.repeat_interleave(64, 1)
        values = quantized(x.float() * (1 / each), dtype) if "scale_inverse" in fields else quantized(x, dtype, each)
        checks.that(torch.equal(rows.view(torch.uint8), values), f"values beside them, {name}, {kind}, {fields}")
        gather(library, out, table, slot)
        checks.that(torch.equal(out.view(torch.int16), dequantized(rows, torch.bfloat16, each)), f"gather, {name}")

    tiny = (torch.tensor(1e-4) / 448).item()
    for name, token, k_elements, v_elements, tile, pow2, least, v_offset in (
            ("fp8_ds_mla", 656, 512, 64, 128, True, torch.tensor(1e-4).item(), 528),
            ("fp8_ds_mla_sglang", 656, 512, 64, 128, False, 2.0 ** -126, 528),
            ("fp8_ds_mla_v4", 584, 448, 64, 64, True, tiny, 448),
            ("fp8_indexer", 132, 128, 0, 128, False, tiny, 0), ("fp8_indexer_ue8m0", 132, 128, 0, 128, True, tiny, 0)):
        whole = torch.full((10, 64 * token + 64), 0xa5, dtype=torch.uint8, device=device)  # padded pages
        cache = whole[:, :64 * token].view(10, 64, token)
        k, v = random_rows(100, 2 * k_elements, device), random_rows(100, 128, device) if v_elements else None
        k[k.float().abs() > 1e30] = 0.25
        k[7], k[8] = 0, 1e-6
        slot = torch.randperm(640, device=device)[:100]
        k_table, v_table = preset(library, name, cache)
        checks.that((k_table.elements, v_table.elements if v_table else 0) == (k_elements, v_elements), name)
        expected = whole.clone()
        scale = computed_scale(k.view(100, -1, tile), torch.float8_e4m3fn, least, pow2)
        each = scale.repeat_interleave(tile, 1)
        if name == "fp8_ds_mla_sglang":
            stored = quantized(k.float() * (1 / each), torch.float8_e4m3fn)
        else:
            stored = quantized(k, torch.float8_e4m3fn, each)
        for i, s in enumerate(slot.tolist()):  # what each format is, byte by byte
            page, r = expected[s // 64], s % 64
            row = token if token == 656 else k_elements + 2 * v_elements
            page[r * row:r * row + k_elements] = stored[i]
            if v_elements:
                page[r * row + v_offset:r * row + v_offset + 128] = v[i].view(torch.uint8)
            if token == 656:
                page[r * row + 512:r * row + 528] = scale[i].view(torch.uint8)
            elif name == "fp8_ds_mla_v4":
                page[64 * row + r * 8:64 * row + r * 8 + 7] = ((scale[i].view(torch.int32) >> 23) & 255).to(torch.uint8)
            else:
                page[64 * row + r * 4:64 * row + r * 4 + 4] = scale[i].view(torch.uint8)
        store(library, k_table, v_table, k, v, slot)
        checks.that(torch.equal(whole, expected), f"store, {name}")
        out = torch.zeros_like(k)
        gather(library, out, k_table, slot)
        checks.that(torch.equal(out.view(torch.int16), dequantized(stored.view(torch.float8_e4m3fn), torch.bfloat16,
                                                                   each)), f"gather, {name}")
        if v_elements:
            out = torch.zeros_like(v)
            gather(library, out, v_table, slot)
            checks.that(same_bits(out, v), f"gather of what {name} copies")


def check_convert_transfer(library, checks):
    """Layers of bf16 to layers of FP8 and back."""
    layers = [layer.clamp(-1, 1).nan_to_num() for layer in layer_caches(checks, 3)]
    small = [torch.zeros(layer.shape, dtype=torch.float8_e5m2, device=checks.device) for layer in layers]
    back, scale = [torch.zeros_like(layer) for layer in layers], torch.full((1,), 0.3, device=checks.device)
    index = torch.randperm(640, device=checks.device)[:100]
    transfer(library, [typed(hnd(layer), scale) for layer in small], [typed(hnd(layer)) for layer in layers], 1024,
             index, index)
    transfer(library, [typed(hnd(layer)) for layer in back], [typed(hnd(layer), scale) for layer in small], 512, index,
             index)
    for was, stored, got in zip(layers, small, back):
        rows = [cache[index // 16, :, index % 16] for cache in (was, stored, got)]
        checks.that(torch.equal(rows[1].view(torch.uint8), quantized(rows[0], torch.float8_e5m2, scale)), "transfer")
        checks.that(torch.equal(rows[2].view(torch.int16), dequantized(rows[1], torch.bfloat16, scale)), "and back")


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
    cache = torch.zeros((8, 64), dtype=torch.float8_e4m3fn, device=checks.device)
    scale = torch.ones(1, device=checks.device)
    for error_name, what, dst, src in (
            ("UNSUPPORTED", "FP8 as INT8", cache.view(torch.int8), typed(rows_of(cache), scale)),
            ("SIZE", "a scale for 8 of 60", random_rows(8, 120, checks.device), typed(rows_of(cache), scale.repeat(8))),
            ("ARGUMENT", "an inverse for a gather", out, typed(rows_of(cache), scale, scale_inverse=1)),
            ("ARGUMENT", "an unknown format", out, "fp8_ds")):
        try:
            gather(library, dst, preset(library, src, cache)[0] if src == "fp8_ds" else src, index)
            checks.that(False, f"{what}: no KVPRIM_ERROR_{error_name}")
        except KvprimError as error:
            checks.that("KVPRIM_ERROR_" + error_name in str(error), f"{what}: {error}")
    for what, broken in (("a transposed tensor as rows", lambda: rows_of(rows.t())),
                         ("one row expanded to many", lambda: rows_of(rows[:1].expand(8, -1))),
                         ("a scale of float64", lambda: typed(rows_of(cache), scale.double())),
                         ("an expanded scale", lambda: typed(rows_of(cache), scale.expand(8))),
                         ("three scales for 64 elements", lambda: typed(rows_of(cache), scale.repeat(3))),
                         ("scales of other rows", lambda: typed(rows_of(cache), scale.repeat(9, 2))),
                         ("elements of float64", lambda: typed(rows_of(rows.double()))),
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
                           ("table scale", lambda: gather(library, out, typed(there, torch.ones(1)), index)),
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
        check_convert(library, checks)
        check_computed(library, checks)
        check_transfer(library, checks)
        check_convert_transfer(library, checks)
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

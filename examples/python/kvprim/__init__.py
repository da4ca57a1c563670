# SPDX-License-Identifier: MIT
"""kvprim for Python: operators on torch's tensors, for its current stream, eager, compiled and in CUDA graphs.

    kvprim.store(k, v, k_cache, v_cache, slot, "NHD")
    rows = kvprim.gather_new(k_cache, index, "NHD")
    kvprim.store(k, v, k_cache, v_cache, slot, "NHD", cache_dtype="fp8_e4m3", k_scale=k_scale, v_scale=v_scale)
    kvprim.store(kv_c, k_pe, kv_cache, None, slot, "NHD", cache_dtype="fp8_ds_mla")
    kvprim.store(k, v, kv_cache, None, slot, "NHD", kv_dim=0)       K and V in one tensor, [2, pages, page, heads, dim]
    cached = kvprim.prefix(prompt, tokens)                          tensors, lists, arrays; needs no torch
    keys = kvprim.keys(prompt, 16, "vllm_sha256")                   of blocks, as engines compute them; the same

Rules that hold for every operator here
    Tensors    Tables come from shapes and strides. `layout` says what the first dimensions are:
                   "rows"  [rows, ...]             a row is everything after the first dimension: a token, or a page
                   "NHD"   [pages, page, ...]      row r is [r / page, r % page]
                   "HND"   [pages, heads, page, ...]   row r is [r / page, :, r % page]
               A row may be packed or lie in equal pieces at equal distances, as in a permuted view. Everything else is
               refused, and so are expanded dimensions. Indices are int32 or int64, with any stride.
    Elements   Where dtypes differ, elements are converted, as kvprim.h says: k of bfloat16 into a cache of
               float8_e4m3fn. cache_dtype says what a cache of uint8 holds:
                   "fp8" or "fp8_e4m3", "fp8_e5m2", "int8"
                   "fp4_e2m1", "int4"      two elements in a byte, so that the last dimension is half as long
                   "fp4_e2m1_swizzled"     the same, scales swizzled as kernels for sm_100 read V's: in a store V's
                                           alone, in a gather those of src
                   "fp8_per_token_head", "int8_per_token_head"     with a scale cache; the least scale is 1e-6
                   "fp8_ds_mla", "fp8_ds_mla_sglang" [.., 656], "fp8_ds_mla_v4" [.., 584], "fp8_ds_mla_v41" [.., 528],
                   "fp8_indexer", "fp8_indexer_ue8m0" [.., 132]
               The last are whole formats, caches of "NHD" or "rows" that hold their scales. A row of k is what the
               format quantises, and of v what it copies; or k is both in one row, and v None.
    Scales     A scale is a float32 tensor: of one element, or [heads]. It is read when the kernel runs, so a graph's
               replay takes its new value. A scale cache has a float32 (or float8_e8m0fnu) for each tile of each row:
               [rows, tiles], [pages, page, tiles] or, with "HND", [pages, heads, page]. A store writes it. Beside
               elements of 4 bits it may be of float8_e4m3fn or float16, too, and k_scale, v_scale and tensor_scale
               multiply all of it: NVFP4 is "fp4_e2m1", float8_e4m3fn for each 16 elements, and these. Its scales may
               lie in heads, too: packed [pages, heads, page, tiles of a head], with "NHD" a permuted view of that.
               Swizzled scales must.
    Device     All tensors lie on one GPU, or all on the CPU, where kvprim's host functions do the same. transfer, copy
               and unpack also take pinned tensors beside those of a GPU, and transfer index lists of the CPU.
    Errors     RuntimeError, which names the argument; nothing has been written. What kvprim refuses has
               kvprim_last_error()'s text.
    Stream     An operator only enqueues, and CUDA graphs capture it. Only gather_new and slots_new allocate, by torch's
               allocator. Pinned tensors may be dropped at once. As with torch's own operators, the caller uses
               record_stream() if the stream is not the one that a tensor was allocated on, and keeps what a graph
               reads, pinned tensors too, as long as the graph.
    Gradients  None: autograd passes the operators by.

torch.compile, limits of Inductor (torch 2.11): if one operator writes several views of a tensor, as kv[0] and kv[1],
Inductor may lose what is written to all but the first; and it may write a view whose offset depends on dynamic sizes at
offset 0. Neither is an error there, so tracing refuses both: keep the sizes of caches static, as torch.compile does
unless told otherwise. Safe with K and V in one tensor:
    - store with kv_dim, which takes the tensor whole, in one launch
    - a store of K, with v None, and one of V as if it were K
    - an operator of your own (torch.library.custom_op) that mutates the whole tensor and calls store on its parts;
      scale caches inside their cache need this
    - calls outside of compiled graphs: these take views of one tensor as they are

kvprim.Communicator has collectives across GPUs: kvprim/collectives.py, which is loaded with NCCL when it is first used.

Without torch, but with TVM-FFI, the operators that write to given tensors, and prefix, take those of TVM-FFI.

The package builds with `pip install examples/python` or `make wheel`, which build_backend.py describes.
"""
import array
import ctypes
import os
import pickle
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_BUILT = next((folder for folder in (_HERE, os.path.join(_ROOT, "build/python/kvprim"))
               if os.path.exists(os.path.join(folder, "libkvprim.so"))), None)
if _BUILT is None:
    _sources = os.path.dirname(_HERE)
    raise ImportError(f"kvprim is not built: pip install {_sources}, or python3 {_sources}/build_backend.py")
__path__.append(_BUILT)
library = ctypes.CDLL(os.path.join(_BUILT, "libkvprim.so"))  # the functions of kvprim.h and kvprim_cuda.cuh
library.kvprim_version.restype = ctypes.c_uint32
has_cuda = hasattr(library, "kvprim_cuda_gather")  # False: built without nvcc, for the CPU alone
_version = library.kvprim_version()
__version__ = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"

_SCHEMAS = """
gather(Tensor(a!) out, Tensor src, Tensor index, str layout="rows", *, str cache_dtype="auto", Tensor? scale=None,
    int base=0, bool keep_padding=False, Tensor(b!)? rejected=None, bool pdl=False, Tensor? tensor_scale=None)
store(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot, str layout="rows", *,
    str cache_dtype="auto", int? kv_dim=None, Tensor? k_scale=None, Tensor? v_scale=None,
    Tensor(c!)? k_scale_cache=None, Tensor(d!)? v_scale_cache=None, bool scale_inverse=False,
    bool scale_power_of_two=False, float scale_min=0.0, Tensor(e!)? nans=None, int base=0, Tensor(f!)? rejected=None,
    bool pdl=False)
transfer(Tensor(a!)[] dst, Tensor[] src, Tensor? dst_index=None, Tensor? src_index=None, str dst_layout="rows",
    str src_layout="rows", *, Tensor? dst_layers=None, Tensor? src_layers=None, bool same_cache=False, int max_sms=0,
    Tensor(b!)? rejected=None, str dst_dtype="auto", str src_dtype="auto", Tensor? dst_scale=None,
    Tensor? src_scale=None, bool scale_inverse=False)
copy(Tensor(a!)[] dst, Tensor[] src)
unpack(Tensor(a!) dst, Tensor src, Tensor fragments)
slots(Tensor(a!) slot, Tensor pages, int page_rows, int rows, *, Tensor? request=None, Tensor? position=None,
    Tensor? cu_seqlens=None, Tensor? starts=None, Tensor? page_starts=None, Tensor(b!)? rejected=None,
    bool pdl=False)
fetch(Tensor(a!) memory, int[] sizes, Tensor state, Tensor wanted, Tensor(b!) rows, Tensor(c!)? k_hot=None,
    Tensor? k=None, Tensor(d!)? v_hot=None, Tensor? v=None, str layout="rows", *, Tensor? pages=None, int page_rows=1,
    bool pages_by_state=False, Tensor? fresh=None, Tensor(e!)? fresh_rows=None, Tensor(f!)? plan_src=None,
    Tensor(g!)? plan_dst=None, Tensor(h!)? hits=None, Tensor(i!)? misses=None, Tensor(j!)? rejected=None, int max_sms=0,
    int host_rows=0)
fetch_reset(Tensor(a!) memory, int[] sizes, int state=-1)
all_reduce(int comm, Tensor(a!) recv, Tensor? send=None, str op="sum", *, Tensor(z!) order)
reduce_scatter(int comm, Tensor(a!) recv, Tensor send, str op="sum", *, Tensor(z!) order)
all_gather(int comm, Tensor(a!) recv, Tensor send, *, Tensor(z!) order)
all_gatherv(int comm, Tensor(a!) recv, Tensor send, int[] counts, *, Tensor(z!) order)
all_to_all(int comm, Tensor(a!) recv, Tensor send, *, Tensor(z!) order)
all_to_allv(int comm, Tensor(a!) recv, Tensor send, int[] counts, *, Tensor(z!) order)
broadcast(int comm, Tensor(a!) tensor, int root, *, Tensor(z!) order)
send(int comm, Tensor tensor, int peer, *, Tensor(z!) order)
recv(int comm, Tensor(a!) tensor, int peer, *, Tensor(z!) order)
all_reduce_norm(int comm, Tensor(a!)? out, Tensor send, Tensor weight, *, Tensor? residual=None,
    Tensor(b!)? residual_out=None, Tensor(c!)? sum=None, Tensor(d!)? quantised=None, Tensor(e!)? scale=None,
    float eps=1e-6, bool scale_per_token=False, float scale_min=0.0, bool weight_plus_one=False, int scale_group=0,
    bool scale_power_of_two=False, Tensor(z!) order)
"""
_WHOLE_FORMATS = {"fp8_ds_mla": 576, "fp8_ds_mla_sglang": 576, "fp8_ds_mla_v4": 512, "fp8_ds_mla_v41": 512,
                  "fp8_indexer": 128, "fp8_indexer_ue8m0": 128}  # elements of a row


def include():
    """The folder with kvprim.h, kvprim_cuda.cuh and kvprim_nccl.h."""
    return os.path.join(_BUILT, "include")


def ffi_library():
    """The file that tvm_ffi.load_module() loads: src/ffi_module.cpp says how its functions are called."""
    return os.path.join(_BUILT, "libkvprim_tvm_ffi.so")


# ---- operators ------------------------------------------------------------------------------------------------------
# An eager call goes past torch's dispatcher: _eager's functions return False if they leave it to the operator.

def gather(out, src, index, layout="rows", *, cache_dtype="auto", scale=None, base=0, keep_padding=False,
           rejected=None, pdl=False, tensor_scale=None):
    """out[i] = row index[i] - base of src; zeros if there is none, or with keep_padding what was there. `scale`: a
    scale, or a scale cache, all of whose scales tensor_scale multiplies if elements have 4 bits."""
    if _compiling() or not _eager.gather(out, src, index, layout, cache_dtype, scale, base, keep_padding, rejected,
                                         pdl, tensor_scale):
        ops.gather(out, src, index, layout, cache_dtype=cache_dtype, scale=scale, base=base,
                   keep_padding=keep_padding, rejected=rejected, pdl=pdl, tensor_scale=tensor_scale)


def gather_new(src, index, layout="rows", *, cache_dtype="auto", scale=None, dtype=None, base=0, pdl=False,
               tensor_scale=None):
    """The same, in a new tensor of src's dtype, or of `dtype`, which a gather that converts must name."""
    if dtype is None and (cache_dtype != "auto" or scale is not None):
        raise RuntimeError("dtype must say what a converting gather returns")
    if cache_dtype in _WHOLE_FORMATS:
        row = (_WHOLE_FORMATS[cache_dtype],)
    else:
        row = (*src.shape[1:2], *src.shape[3:]) if layout == "HND" else src.shape[1 if layout == "rows" else 2:]
    if cache_dtype in ("fp4_e2m1", "fp4_e2m1_swizzled", "int4"):
        row = (*row[:-1], 2 * row[-1])
    out = src.new_empty((index.numel(), *row), dtype=dtype)
    gather(out, src, index, layout, cache_dtype=cache_dtype, scale=scale, base=base, pdl=pdl,
           tensor_scale=tensor_scale)
    return out


def store(k, v, k_cache, v_cache, slot, layout="rows", *, cache_dtype="auto", kv_dim=None, k_scale=None, v_scale=None,
          k_scale_cache=None, v_scale_cache=None, scale_inverse=False, scale_power_of_two=False, scale_min=0.0,
          nans=None, base=0, rejected=None, pdl=False):
    """Rows slot[i] - base of the caches, both of one layout, = k[i] and v[i]; slots outside them are skipped. k and v
    are [tokens, ...], of which the first slot.numel() are stored. Quantised rows are divided by k_scale and v_scale
    (with scale_inverse multiplied), or by the scales that the store computes and writes to k_scale_cache and
    v_scale_cache: powers of two if asked for, and at least scale_min (0: 2^-126, or what cache_dtype says). nans, an
    int32, counts NaNs that became 0 in int8. With kv_dim v_cache is None, and k_cache holds K and V:
    k_cache.select(kv_dim, 0) and (kv_dim, 1), as in [2, ...] and [pages, 2, ...]; in the last dimension, K's elements
    and then V's. layout describes each part by itself."""
    if _compiling() or not _eager.store(k, v, k_cache, v_cache, slot, layout, cache_dtype, kv_dim, k_scale, v_scale,
                                        k_scale_cache, v_scale_cache, scale_inverse, scale_power_of_two, scale_min,
                                        nans, base, rejected, pdl):
        ops.store(k, v, k_cache, v_cache, slot, layout, cache_dtype=cache_dtype, kv_dim=kv_dim, k_scale=k_scale,
                  v_scale=v_scale, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache,
                  scale_inverse=scale_inverse, scale_power_of_two=scale_power_of_two, scale_min=scale_min, nans=nans,
                  base=base, rejected=rejected, pdl=pdl)


def transfer(dst, src, dst_index=None, src_index=None, dst_layout="rows", src_layout="rows", *, dst_layers=None,
             src_layers=None, same_cache=False, max_sms=0, rejected=None, dst_dtype="auto", src_dtype="auto",
             dst_scale=None, src_scale=None, scale_inverse=False):
    """In every layer row dst_index[i] of dst = row src_index[i] of src; without an index, row i. dst and src are lists
    of layers of one shape. Instead, dst_layers and src_layers are tensors of pointers on the GPU; dst[0] and src[0]
    then only say the shape of a layer, and what lies at the pointers is not checked. For torch.compile list all layers
    beside the pointers: it must know what is written. If one index is on the CPU and one on the GPU, the first is
    copied there. same_cache: copies rows inside one cache. The dtypes are as cache_dtype, and a whole format has rows
    of k and v on the other side; a scale is for all layers, or [layers], or [layers, heads], and dst_scale divides, or
    multiplies with scale_inverse."""
    if dst_index is not None and src_index is not None and dst_index.device != src_index.device:
        device = src_index.device if dst_index.is_cpu else dst_index.device
        dst_index, src_index = (index.to(device, non_blocking=True) for index in (dst_index, src_index))
    if _compiling() or not _eager.transfer(dst, src, dst_index, src_index, dst_layout, src_layout, dst_layers,
                                           src_layers, same_cache, max_sms, rejected, dst_dtype, src_dtype, dst_scale,
                                           src_scale, scale_inverse):
        ops.transfer(dst, src, dst_index, src_index, dst_layout, src_layout, dst_layers=dst_layers,
                     src_layers=src_layers, same_cache=same_cache, max_sms=max_sms, rejected=rejected,
                     dst_dtype=dst_dtype, src_dtype=src_dtype, dst_scale=dst_scale, src_scale=src_scale,
                     scale_inverse=scale_inverse)


def copy(dst, src):
    """dst[i] = src[i], as torch._foreach_copy_ does, for tensors of the same dtype, shape and order of elements."""
    if _compiling() or not _eager.copy(dst, src):
        ops.copy(dst, src)


def unpack(dst, src, fragments):
    """For each (src_offset, dst_offset, bytes) of `fragments`, a list or a tensor [count, 3] of int64 on the CPU: those
    bytes of dst = those of src, both contiguous."""
    if isinstance(fragments, (list, tuple)):
        fragments = torch.tensor(fragments, dtype=torch.int64).view(-1, 3)
    if _compiling() or not _eager.unpack(dst, src, fragments):
        ops.unpack(dst, src, fragments)


def slots(slot, pages, page_rows, rows, *, request=None, position=None, cu_seqlens=None, starts=None,
          page_starts=None, rejected=None, pdl=False):
    """slot = pages[request][position / page_rows] * page_rows + position % page_rows; -1 if there is none. Tokens are
    (request[i], position[i]), or those that cu_seqlens[r] .. cu_seqlens[r + 1] say, from position starts[r] (0) on.
    pages is [requests, pages], or with page_starts [pages], those of request r at page_starts[r] .. page_starts[r + 1]:
    FlashInfer's kv_indices and kv_indptr, of one dtype. `rows`: of the cache."""
    if _compiling() or not _eager.slots(slot, pages, page_rows, rows, request, position, cu_seqlens, starts,
                                        page_starts, rejected, pdl):
        ops.slots(slot, pages, page_rows, rows, request=request, position=position, cu_seqlens=cu_seqlens,
                  starts=starts, page_starts=page_starts, rejected=rejected, pdl=pdl)


def slots_new(pages, count, page_rows, rows, **options):
    """The same, as a new tensor of int64."""
    slot = pages.new_empty(count, dtype=torch.int64)
    slots(slot, pages, page_rows, rows, **options)
    return slot


class FetchSet:
    """What is hot of requests whose rows lie in pinned memory: state s owns rows s * hot_rows and so on of the hot
    tables, and remembers which of `tokens` tokens each has. A call names `entries` tokens of a request at most."""

    def __init__(self, states, hot_rows, tokens, entries, device="cuda"):
        self.sizes = [states, hot_rows, tokens, entries]
        size = library.kvprim_fetch_state_bytes
        size.restype, size.argtypes = ctypes.c_size_t, [ctypes.POINTER(ctypes.c_int64)]  # memory, bytes, sizes, 0
        count = size((ctypes.c_int64 * 7)(0, 0, *self.sizes, 0))
        if count == 0:
            raise RuntimeError(f"states, hot_rows, tokens and entries are {self.sizes}: one of them is out of range")
        self.memory = torch.empty(count, dtype=torch.uint8, device=device)
        self.reset()

    def reset(self, state=-1):
        """Makes a state empty, or all."""
        if _compiling() or not _eager.fetch_reset(self.memory, self.sizes, state):
            ops.fetch_reset(self.memory, self.sizes, state)

    def fetch(self, state, wanted, rows, k_hot=None, k=None, v_hot=None, v=None, layout="rows", *, pages=None,
              page_rows=1, pages_by_state=False, fresh=None, fresh_rows=None, plan_src=None, plan_dst=None, hits=None,
              misses=None, rejected=None, max_sms=0, host_rows=0):
        """rows = the hot row of each token of wanted, [requests, tokens] or [requests, steps, tokens], or -1 if it gets
        none; those that are not hot are first copied from k and v, tables of `layout`. Token t of request i, which has
        state[i], lies in row pages[i, t / page_rows] * page_rows + t % page_rows (pages_by_state: pages[state[i]]), or
        without pages in row t. Negative states and tokens are padding. fresh [requests, tokens] get hot rows,
        fresh_rows, that the caller writes after the call. plan_src and plan_dst take what was fetched, as indices of a
        transfer(), and hits, misses and rejected are counters. rows, fresh_rows, the plan and the counters are int32.
        Without k it is a plan alone, for tables of host_rows."""
        if _compiling() or not _eager.fetch(
                self.memory, self.sizes, state, wanted, rows, k_hot, k, v_hot, v, layout, pages, page_rows,
                pages_by_state, fresh, fresh_rows, plan_src, plan_dst, hits, misses, rejected, max_sms, host_rows):
            ops.fetch(self.memory, self.sizes, state, wanted, rows, k_hot, k, v_hot, v, layout, pages=pages,
                      page_rows=page_rows, pages_by_state=pages_by_state, fresh=fresh, fresh_rows=fresh_rows,
                      plan_src=plan_src, plan_dst=plan_dst, hits=hits, misses=misses, rejected=rejected,
                      max_sms=max_sms, host_rows=host_rows)


# ---- addresses: eager calls alone, because nobody could tell torch.compile what they write --------------------------

def _on(device, call, *arguments):
    """Calls with the device as the current one."""
    if not call(*arguments):
        with torch.cuda.device(device):
            if not call(*arguments):
                raise RuntimeError("kvprim: a call by addresses takes plain tensors, outside of torch's dispatch modes")


def transfer_addresses(dst_layers, src_layers, dst_index, src_index, row_bytes, *, dst_stride=0, src_stride=0,
                       dst_rows=1 << 31, src_rows=1 << 31, dst_page_rows=0, dst_page_stride=0, dst_heads=0,
                       dst_head_stride=0, max_sms=0, rejected=None):
    """transfer() for layers that are known by pointers alone: tensors of uint64 or int64, on the device that runs the
    call. Strides are bytes from row to row (0: packed), and dst may have pages and heads, as a kvprim_table has. An
    index past the rows, as far as they are given, is skipped; nothing else is checked."""
    _on(dst_layers.device, _eager.transfer_addresses, dst_layers, src_layers, dst_index, src_index, row_bytes,
        dst_stride, src_stride, dst_rows, src_rows, dst_page_rows, dst_page_stride, dst_heads, dst_head_stride, max_sms,
        rejected)


def copy_addresses(items, device="cuda"):
    """For each (src, dst, bytes) of `items`, a list or a tensor [count, 3] of int64 on the CPU: copies so many bytes
    between these addresses; zeros if src is 0."""
    device = torch.device(device)
    if isinstance(items, (list, tuple)):
        items = torch.tensor(items, dtype=torch.int64).view(-1, 3)
    number = -1 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
    _on(device, _eager.copy_addresses, items, number)


# ---- prefixes -------------------------------------------------------------------------------------------------------

def _integers(name, values):
    """Address, count and bytes of an element of an array, or of a list as an array, and what keeps the memory."""
    if hasattr(values, "__array_interface__"):  # numpy's
        about = values.__array_interface__
        native = "<" if sys.byteorder == "little" else ">"
        if len(about["shape"]) != 1 or about["strides"] is not None or about["typestr"] not in (
                native + "i4", native + "i8"):
            raise RuntimeError(f"{name} is {about['typestr']} of shape {about['shape']}, not packed int32 or int64")
        return about["data"][0], about["shape"][0], int(about["typestr"][2:]), values
    if not isinstance(values, array.array):
        try:
            values = array.array("q", values if isinstance(values, (list, tuple)) else list(values))
        except (TypeError, OverflowError) as error:
            raise RuntimeError(f"{name} is {values!r:.80}: {error}") from None
    elif values.typecode not in "ilq":
        raise RuntimeError(f"{name} is an array of '{values.typecode}', not of int32 or int64")
    return *values.buffer_info(), values.itemsize, values


def _bytes(name, value):
    try:
        return bytes(memoryview(value))
    except TypeError:
        raise RuntimeError(f"{name} is {value!r:.80}, not bytes") from None


def prefix(a, b):
    """How many leading elements of a and b are equal: two tensors of the CPU, contiguous and of one dtype, int32 or
    int64; or two lists or arrays (of `array` or numpy)."""
    if (torch is None and not isinstance(_eager, _Missing) and isinstance(a, tvm_ffi.Tensor)
            and isinstance(b, tvm_ffi.Tensor)):
        return _eager.prefix(a, b)
    if torch is not None and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        matched = _eager.prefix(a, b)
        return _eager.prefix(a.detach(), b.detach()) if matched is False else matched
    (one, n, size, _), (other, m, other_size, _) = kept = _integers("a", a), _integers("b", b)
    if size != other_size:
        raise RuntimeError(f"a has elements of {size} bytes, but b of {other_size}")
    compare = library.kvprim_prefix_i32 if size == 4 else library.kvprim_prefix_i64
    compare.restype, compare.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t] * 2
    return compare(one, n, other, m)


def prefix_longest(query, keys):
    """(i, matched): which of `keys` has the longest prefix in common with query, and how long that is; (None, 0) if
    none has one. All are tensors of int32 on the CPU, contiguous."""
    for key in (query, *keys):
        if key.dtype != torch.int32 or not key.is_cpu or not key.is_contiguous():
            raise RuntimeError(f"a key is {key.dtype} on {key.device} with strides {key.stride()}, not contiguous "
                               "int32 on cpu")
    count = len(keys)
    addresses, lengths, matches = (ctypes.c_void_p * count)(*(key.data_ptr() for key in keys)), (
        ctypes.c_size_t * count)(*(key.numel() for key in keys)), (ctypes.c_size_t * count)()
    longest = library.kvprim_prefix_many_i32
    longest.restype, longest.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                                                          ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    best = longest(query.data_ptr(), query.numel(), addresses, lengths, count, matches)
    return (best, matches[best]) if best < count else (None, 0)  # KVPRIM_PREFIX_NONE is larger than any count


# ---- keys of blocks -------------------------------------------------------------------------------------------------

KEY_RULES = ("vllm_sha256", "vllm_sha256_cbor", "vllm_xxhash", "vllm_xxhash_cbor", "sglang", "trtllm", "lmcache",
             "dynamo", "xxh3")  # as in kvprim_key_rule, from 1 on


class _KeyExtra(ctypes.Structure):
    _fields_ = [("block", ctypes.c_int64), ("token", ctypes.c_int64), ("data", ctypes.c_char_p),
                ("bytes", ctypes.c_int64)]


class _KeysDesc(ctypes.Structure):
    _fields_ = [("tokens", ctypes.c_void_p), ("token_type", ctypes.c_int), ("rule", ctypes.c_int),
                ("count", ctypes.c_int64), ("block_tokens", ctypes.c_int64), ("parent", ctypes.c_char_p),
                ("parent_bytes", ctypes.c_int64), ("extra", ctypes.POINTER(_KeyExtra)), ("extra_count", ctypes.c_int64),
                ("keys", ctypes.c_void_p), ("keys_bytes", ctypes.c_int64), ("seed", ctypes.c_uint64),
                ("bigrams", ctypes.c_int32), ("reserved", ctypes.c_int32)]


def keys(tokens, block, rule, parent=None, extra=None, seed=0, bigrams=False, packed=False):
    """The keys of all whole blocks of `block` tokens as an engine computes them, a bytes object each; packed: one
    bytearray. `rule` is one of KEY_RULES, which kvprim.h describes. tokens: a list, an array (of `array` or numpy), or
    a tensor of the CPU, packed int32 or int64. parent: the key before the first block, if any; b"" is none. extra:
    {block: bytes}, and for trtllm {(block, token): digest}; for vllm_sha256 and vllm_xxhash also {block: tuple}."""
    if rule not in KEY_RULES:
        raise RuntimeError(f"rule is {rule!r}, none of {', '.join(KEY_RULES)}")
    if torch is not None and isinstance(tokens, torch.Tensor):
        if (not tokens.is_cpu or tokens.dim() != 1 or not tokens.is_contiguous()
                or tokens.dtype not in (torch.int32, torch.int64)):
            raise RuntimeError(f"tokens is {tokens.dtype} of shape {tuple(tokens.shape)} on {tokens.device}, "
                               "not packed int32 or int64 on cpu")
        address, count, size, _ = tokens.data_ptr(), tokens.numel(), tokens.element_size(), tokens
    else:
        address, count, size, _ = kept = _integers("tokens", tokens)
    if not 0 <= seed < 1 << 64:
        raise RuntimeError(f"seed is {seed}, not 0 to 2^64 - 1")
    parent, pieces = None if parent is None else _bytes("parent", parent), []
    places = [(place if isinstance(place, tuple) else (place, 0), place) for place in extra or {}]
    for at, place in places:
        if len(at) != 2 or not all(hasattr(number, "__index__") and 0 <= number < 1 << 63 for number in at):
            raise RuntimeError(f"extra has a key {place!r}, which is neither a block nor (block, token)")
    for at, place in sorted(places, key=lambda pair: pair[0]):
        data = extra[place]
        if isinstance(data, tuple):  # what pickle makes of it inside (parent, tokens, extra)
            data = pickle.dumps((bytes(32), (0,), data), 5)[50:-3]
        data = _bytes(f"extra[{place}]", data)
        pieces.append(_KeyExtra(*at, data, len(data)))
    desc = _KeysDesc(address, 1 if size == 4 else 2, KEY_RULES.index(rule) + 1, count, block, parent or None,
                     len(parent or b""), (_KeyExtra * max(len(pieces), 1))(*pieces), len(pieces), None, 0, seed,
                     bigrams, 0)
    library.kvprim_key_bytes.restype, library.kvprim_last_error.restype = ctypes.c_int64, ctypes.c_char_p
    width, blocks = library.kvprim_key_bytes(desc.rule), max((count - bool(bigrams)) // max(block, 1), 0)
    made = bytearray(width * blocks)
    room = (ctypes.c_char * len(made)).from_buffer(made)
    desc.keys, desc.keys_bytes = ctypes.addressof(room), len(made)
    if library.kvprim_keys(ctypes.byref(desc), ctypes.c_size_t(1)):
        raise RuntimeError(library.kvprim_last_error().decode())
    return made if packed else [bytes(made[i:i + width]) for i in range(0, len(made), width)]


# ---- layouts of caches ----------------------------------------------------------------------------------------------

class _Table(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("stride", ctypes.c_int64),
                ("page_rows", ctypes.c_int64), ("page_stride", ctypes.c_int64), ("heads", ctypes.c_int32),
                ("reserved_heads", ctypes.c_int32), ("head_stride", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("format", ctypes.c_void_p), ("reserved", ctypes.c_int64)]


class _LayoutSizes(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("page_rows", ctypes.c_int64),
                ("page_stride", ctypes.c_int64), ("k_bytes", ctypes.c_int64), ("v_bytes", ctypes.c_int64),
                ("layers", ctypes.c_int32), ("heads", ctypes.c_int32)]


class _Layout(ctypes.Structure):
    _fields_ = [("k_cache", _Table), ("v_cache", _Table), ("k_format", ctypes.c_int64 * 14),
                ("k_elements", ctypes.c_int64), ("v_elements", ctypes.c_int64), ("k_bytes", ctypes.c_int64),
                ("v_bytes", ctypes.c_int64), ("k_layer_stride", ctypes.c_int64), ("v_layer_stride", ctypes.c_int64),
                ("v_offset", ctypes.c_int64), ("bytes", ctypes.c_int64), ("layers", ctypes.c_int32),
                ("reserved", ctypes.c_int32)]


def layout(name, cache, page_rows, heads, k_dim, v_dim=None, layers=1):
    """[(k, v), ...], for each layer its K and V in `cache`, a contiguous tensor that holds whole pages of the layout
    `name`: an engine's, as kvprim_layout_find has them (examples/LAYOUTS.md), or an order such as "LB2NHC". All are
    views [pages, heads, page_rows, dim], which operators take as "HND". v_dim: None is k_dim; 0: without V, v is None.
    Caches of quantised rows (fp8_ds_mla, ...) need no layout: cache_dtype says all of it."""
    v_dim = k_dim if v_dim is None else v_dim
    if layers < 1:
        raise RuntimeError(f"layers is {layers}, less than 1")
    if not cache.is_contiguous():
        raise RuntimeError(f"cache has shape {tuple(cache.shape)} and strides {cache.stride()}, not contiguous")
    page, size = layers * page_rows * heads * (k_dim + v_dim), cache.element_size()
    pages = cache.numel() // page if page > 0 else 0
    if page > 0 and (pages == 0 or cache.numel() % page):
        raise RuntimeError(f"cache has {cache.numel()} elements, not a multiple of {page}: a page's, in all layers")
    sizes = _LayoutSizes(cache.data_ptr(), max(pages, 1) * max(page_rows, 1), page_rows, 0, heads * k_dim * size,
                         heads * v_dim * size, layers, heads)
    found = _Layout()
    if library.kvprim_layout_find(name.encode(), ctypes.byref(sizes), ctypes.byref(found)):
        library.kvprim_last_error.restype = ctypes.c_char_p
        raise RuntimeError(library.kvprim_last_error().decode())
    flat, base = cache.view(-1), cache.storage_offset()

    def view(table, dim, offset):
        strides = (table.page_stride // size, table.head_stride // size, table.stride // size, 1)
        return flat.as_strided((pages, heads, page_rows, dim), strides, base + offset // size)

    return [(view(found.k_cache, k_dim, layer * found.k_layer_stride),
             view(found.v_cache, v_dim, layer * found.v_layer_stride + found.v_offset) if v_dim else None)
            for layer in range(layers)]


# ---- collectives ----------------------------------------------------------------------------------------------------

def __getattr__(name):
    if name in ("Communicator", "new_id"):
        from . import collectives
        return getattr(collectives, name)
    raise AttributeError(f"module 'kvprim' has no attribute '{name}'")


# ---- registration ---------------------------------------------------------------------------------------------------

def _fake_of(operator):
    """The fake function of an operator. Refuses writes that torch.compile sends elsewhere."""
    parameters = operator._schema.arguments
    written = [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]

    def fake(*arguments, **options):
        given, seen = dict(zip((p.name for p in parameters), arguments), **options), {}
        for name in written:
            value = given.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
                if isinstance(tensor.storage_offset(), torch.SymInt):
                    raise RuntimeError(
                        f"{operator} writes {name}, a view that begins where dynamic sizes say: torch.compile may "
                        "write elsewhere. Keep these sizes static, or write the whole tensor")
                other = seen.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
                if other[1] is not tensor:
                    raise RuntimeError(
                        f"{operator} writes {other[0]} and {name}, parts of one tensor: torch.compile loses what is "
                        "written to one of them. Store with kv_dim, call it once for each tensor, or call it in a "
                        "torch.library.custom_op that mutates the whole tensor")

    return fake


class _Operators:
    """The overloads themselves: torch.ops.kvprim.gather() has one overload, and would first find it, at each call."""

    def __init__(self):
        self.definitions = torch.library.Library("kvprim", "DEF")
        schemas = _SCHEMAS.replace("\n    ", " ").split("\n")[1:-1]
        for schema in schemas:
            self.definitions.define(schema + " -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        torch.ops.load_library(os.path.join(_BUILT, "libkvprim_torch.so"))
        for name in (schema.partition("(")[0] for schema in schemas):
            self.definitions.impl(name, torch.library.fallthrough_kernel, "Autograd")  # there are no gradients
            setattr(self, name, getattr(torch.ops.kvprim, name).default)
            torch.library.register_fake("kvprim::" + name, _fake_of(getattr(self, name)), lib=self.definitions)


class _Missing:
    """In place of the operators, if there are none."""

    def __init__(self, why):
        self.why = why

    def __getattr__(self, name):
        if name.startswith("__"):  # what inspect asks for
            raise AttributeError(name)
        raise RuntimeError(f"kvprim.{name} needs torch or TVM-FFI: {self.why}")


try:
    import torch
except ImportError:  # then without slots_new, gather_new and lists for tensors, and on TVM-FFI's tensors
    torch = None
    _compiling = bool
    try:
        import tvm_ffi
        _eager = tvm_ffi.load_module(ffi_library())
    except (ImportError, OSError, RuntimeError) as error:  # then only prefix(), keys() of lists, include(), library
        _eager = _Missing(error)
else:
    from . import _eager
    _compiling, ops = torch.compiler.is_dynamo_compiling, _Operators()  # other tracers have a dispatch mode
    _tensor, _parameter = torch.empty(0), torch.nn.Parameter(torch.empty(0))
    _setup = (torch.Tensor, torch.nn.Parameter, torch._C._len_torch_dispatch_stack, _tensor, _tensor._cdata, _parameter,
              _parameter._cdata, torch.Tensor.__basicsize__, os.path.join(_BUILT, "libkvprim_torch.so"))
    _eager.setup(*_setup)  # returns whether it found what makes calls faster

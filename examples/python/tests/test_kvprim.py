# SPDX-License-Identifier: MIT
"""Tests the package against torch's indexing and casts, and prints the host's time of a call.

    PYTHONPATH=build/python python3 examples/python/tests/test_kvprim.py      or `make torch`

Each operator is called eagerly and through torch's dispatcher, on the CPU, where kvprim's host functions serve, and on
a GPU if there is one: results, conversions, refusals, opcheck, torch.compile(fullgraph=True), CUDA graphs. Without
torch, prefixes of lists and arrays, and with numpy and TVM-FFI each operator once, on the CPU.
"""
import array
import contextlib
import ctypes
import hashlib
import itertools
import os
import pickle
import statistics
import struct
import subprocess
import sys
import time

import kvprim as ops

try:
    import torch
except ImportError:
    torch = None
try:
    import numpy
except ImportError:
    numpy = None
try:
    import tvm_ffi
    ffi = tvm_ffi.load_module(ops.ffi_library())
except (ImportError, OSError, RuntimeError):
    tvm_ffi = None

WHOLE_FORMATS = (  # name, bytes of a token, elements: quantised, copied, in a tile; whether powers of two; least scale
    ("fp8_ds_mla", 656, 512, 64, 128, True, 1e-4), ("fp8_ds_mla_sglang", 656, 512, 64, 128, False, 2.0 ** -126),
    ("fp8_ds_mla_v4", 584, 448, 64, 64, True, 1e-4 / 448), ("fp8_ds_mla_v41", 528, 512, 0, 32, True, 1e-4 / 448),
    ("fp8_indexer", 132, 128, 0, 128, False, 1e-4 / 448),
    ("fp8_indexer_ue8m0", 132, 128, 0, 128, True, 1e-4 / 448))

# ---- caches of 40 pages of 16 rows, which have 4 heads of 64 elements ----------------------------------------

PAGES, PAGE, HEADS, DIM = 40, 16, 4, 64
SLOTS = PAGES * PAGE


def random_like(*shape, device):
    return torch.randn(shape, device=device).to(torch.bfloat16)


def caches(device, layout, count=2):
    shape = {"rows": (SLOTS, HEADS, DIM), "NHD": (PAGES, PAGE, HEADS, DIM), "HND": (PAGES, HEADS, PAGE, DIM)}[layout]
    return [random_like(*shape, device=device) for _ in range(count)]


def place(slot, layout):
    """What torch indexes a cache with to get or set the rows of these slots."""
    page, row = torch.div(slot, PAGE, rounding_mode="floor"), slot % PAGE
    return {"rows": (slot,), "NHD": (page, row), "HND": (page, slice(None), row)}[layout]


def some_slots(count, device, dtype=None):
    """Distinct slots, of int64 unless dtype says otherwise; every seventh is padding."""
    slot = torch.randperm(SLOTS, device=device)[:count].to(dtype or torch.int64)
    slot[::7] = -1
    return slot


def counter(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def refused(words, call, *arguments, **options):
    """The call must fail, and its text hold all the words."""
    try:
        call(*arguments, **options)
    except RuntimeError as error:
        missing = [word for word in words.split("|") if word not in str(error)]
        assert not missing, f"the error says nothing of {missing}: {error}"
        return
    assert False, f"not refused: {words}"


def gathers(device):
    for layout in ("rows", "NHD", "HND"):
        src, = caches(device, layout, 1)
        for dtype in (torch.int32, torch.int64):
            index = some_slots(100, device, dtype)
            expected = src[place(index.clamp(min=0).long(), layout)]
            expected[index < 0] = 0
            out = torch.ones_like(expected)
            ops.gather(out, src, index, layout)
            assert torch.equal(out, expected), (layout, dtype)
            assert torch.equal(ops.gather_new(src, index, layout), expected), (layout, dtype)
            assert torch.equal(ops.gather_new(src, index[::3], layout), expected[::3]), "indices that lie apart"
    permuted = src.permute(0, 2, 1, 3)  # an HND cache that calls itself NHD, as vLLM's do
    assert torch.equal(ops.gather_new(permuted, index, "NHD"), expected), "permuted view"
    pages = torch.tensor([3, 39, 0], device=device)
    assert torch.equal(ops.gather_new(src, pages), src[pages]), "whole pages"
    ids, rejected = torch.tensor([500, 499, -1, 1139, 1140], device=device), counter(device)
    shard = ops.gather_new(src, ids, "HND", base=500)
    ops.gather(out, src, ids, "HND", base=500, rejected=rejected)
    assert torch.equal(shard, out[:5]), "shard, in place"
    assert torch.equal(shard[3], src[-1, :, -1]) and not shard[[1, 2, 4]].any() and rejected.item() == 1, "shard"
    assert ops.gather_new(src, index[:0], "HND").shape == (0, HEADS, DIM), "no index"
    part, rows = src.view(SLOTS, -1)[:, 64:128], torch.randperm(SLOTS, device=device)[:20]
    assert torch.equal(ops.gather_new(part, rows), part[rows]), "parts of rows"
    rows[::3], kept = -1, torch.ones((20, 64), dtype=src.dtype, device=device)
    ops.gather(kept, part, rows, keep_padding=True)
    assert torch.equal(kept, part[rows.clamp(min=0)].masked_fill(rows[:, None] < 0, 1)), "padded rows left alone"


def stores(device):
    qkv = random_like(100, 3 * HEADS * DIM, device=device)
    q, k, v = qkv.view(100, 3, HEADS, DIM).unbind(1)
    for layout in ("rows", "NHD", "HND"):
        for dtype in (torch.int32, torch.int64):
            slot, cached = some_slots(100, device, dtype), caches(device, layout)
            keep, expected = slot >= 0, [cache.clone() for cache in cached]
            for cache, rows in zip(expected, (k, v)):
                cache[place(slot[keep].long(), layout)] = rows[keep]
            ops.store(k, v, *cached, slot, layout)
            assert all(map(torch.equal, cached, expected)), (layout, dtype)
    both = random_like(PAGES, 2, PAGE, HEADS, DIM, device=device)  # K and V of a page beside each other
    expected, rejected = both.clone(), counter(device)
    slot[1] = SLOTS + 1
    keep = (slot >= 0) & (slot < SLOTS)
    where = place(slot[keep].long(), "NHD")
    expected[:, 0][where], expected[:, 1][where] = k[keep], v[keep]
    ops.store(k, v, both[:, 0], both[:, 1], slot + 1, "NHD", base=1, rejected=rejected)
    assert torch.equal(both, expected) and rejected.item() == 1, "K and V in one tensor, base 1"
    latent, rows = random_like(SLOTS, 576, device=device), random_like(128, 576, device=device)
    expected = latent.clone()
    expected[slot[2:7].long()] = rows[:5]
    ops.store(rows, None, latent, None, slot[2:7])
    assert torch.equal(latent, expected), "K alone, for fewer slots than rows"


def transfers(device):
    pin = device == "cuda"
    layers = caches(device, "HND", 5)
    host = torch.zeros((PAGES * PAGE, 5, HEADS, DIM), dtype=torch.bfloat16, pin_memory=pin)  # page first
    src, dst = some_slots(50, device), some_slots(50, device)
    src[::7] = 5
    keep = dst >= 0
    expected = torch.stack([layer[place(src, "HND")] for layer in layers], 1)[keep].cpu()
    for back in (lambda t: t, lambda t: t.cpu()):  # indices on the GPU and on the CPU
        host.zero_()
        ops.transfer(list(host.unbind(1)), layers, back(dst), back(src), "rows", "HND")
        if pin:
            torch.cuda.synchronize()
        assert torch.equal(host[dst[keep].cpu()], expected), "layer first to page first"
    again = [torch.zeros_like(layer) for layer in layers]
    ops.transfer(again, list(host.unbind(1)), src.int(), dst, "HND", "rows")
    assert all(torch.equal(a[place(src[keep], "HND")], layer[place(src[keep], "HND")])
               for a, layer in zip(again, layers)), "and back, int32 beside int64"

    pointers = [torch.tensor([t.data_ptr() for t in side], device=device) for side in (again, layers)]
    for first in (slice(1), slice(None)):
        again[0].zero_(), again[4].zero_()
        ops.transfer(again[first], layers[first], dst_layers=pointers[0].view(torch.uint64), src_layers=pointers[1])
        assert all(map(torch.equal, again, layers)), "all rows, pointers on the device"

    again[1].zero_()
    ops.transfer(again, layers, torch.arange(PAGES), torch.arange(PAGES, device=device))
    assert all(map(torch.equal, again, layers)), "one index on the CPU, one on the device"
    again[0].zero_(), again[4].zero_()
    size, page = layers[0][0].nbytes, torch.tensor([3, 9, -1], device=device)
    ops.transfer_addresses(*pointers, page, page, size, dst_stride=size, dst_rows=PAGES)
    assert all(torch.equal(again[i][page[:2]], layers[i][page[:2]]) for i in (0, 4)), "by addresses, rows without bound"
    assert not again[4][0].any(), "rows that no index names"

    pages = torch.tensor([[3, 9], [7, 30]], device=device)
    ops.transfer(layers, layers, pages[1], pages[0], same_cache=True)
    assert all(torch.equal(layer[pages[1]], layer[pages[0]]) for layer in layers), "copy-on-write of pages"


def copies(device):
    """Copies of tensors and of addresses, and fragments."""
    received, buffer = random_like(1000, 192, device=device), random_like(1000, 192, device=device)
    expected, fragments = buffer.clone(), [(900 * 384, 5 * 384, 768), (0, 100 * 384, 192000), (0, 0, 0)]
    expected[5:7], expected[100:600] = received[900:902], received[:500]
    ops.unpack(buffer, received, fragments)
    ops.unpack(received[600:700], received[:100], torch.tensor([[0, 384, 384]]))
    assert torch.equal(buffer, expected) and torch.equal(received[601], received[0]), "unpack"
    ops.copy_addresses([(received.data_ptr(), buffer.data_ptr(), 768), (0, buffer[9].data_ptr(), 768)], device)
    expected[:2], expected[9:11] = received[:2], 0
    assert torch.equal(buffer, expected), "addresses, and zeros"
    sizes = [(3,), (1 << 18,), (100, 7), (0,), (1,)]
    src = [random_like(*size, device=device) for size in sizes] + [random_like(60, 8, device=device).t()]
    dst = [torch.zeros_like(tensor) for tensor in src]
    ops.copy(dst, src)
    assert all(map(torch.equal, dst, src)), "tensors of many shapes"
    if device == "cuda":
        pinned = [torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in src[:5]]
        ops.copy(pinned + dst[:2], src[:5] + [tensor.neg() for tensor in src[:2]])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b.cpu()) for a, b in zip(pinned, src)), "to pinned memory"
        assert torch.equal(dst[1], -src[1]), "and between GPU tensors in the same call"


# Conversions, against torch's own  Those do not saturate, so clamp() goes first, which leaves NaN; torch keeps a
# NaN's sign and some of its bits, and kvprim gives every NaN the bits of `nan`.

def quantized(x, dtype, scale=None):
    """x / scale in the quantised dtype, as bytes; scale: a tensor that broad A division by a number would become
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


STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}


def as_bytes(tensor):
    return tensor.view(torch.uint8)


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def scales_like(device, layout, tiles=HEADS, dtype=None):
    shape = {"rows": (SLOTS, tiles), "NHD": (PAGES, PAGE, tiles), "HND": (PAGES, tiles, PAGE)}[layout]
    return torch.zeros(shape, dtype=dtype or torch.float32, device=device)


def with_edges(rows):
    """Puts what rounds, saturates or is not a number into some elements."""
    inf, nan = float("inf"), float("nan")
    edges = torch.tensor([0.0, -0.0, 448, 449, -57344, 6e4, 1e-3, 1e-40, inf, -inf, nan, 127.5])
    rows.view(rows.shape[0], -1)[::3, :len(edges)] = edges.to(rows)
    return rows


FLOATS, QUANTIZED = ("bfloat16", "float16", "float32"), ("float8_e4m3fn", "float8_e5m2", "int8")
SCALES = (None, 1.0, 0.37, 3.1e-5, 2.0 ** -126, 1e-40, 2.0 ** 127, -2.0, 0.0, float("inf"), float("nan"))


def every_conversion(device):
    """All values of each type, into all that it converts to, with all kinds of scales."""
    slot, nans = torch.randperm(160, device=device)[:128], counter(device)
    index = torch.cat((torch.randperm(32, device=device), torch.tensor([-1, 32], device=device)))
    stored = torch.arange(256, device=device).to(torch.uint8).repeat(32).view(2, 16, 256)
    for name in QUANTIZED:
        dtype = getattr(torch, name)
        cache, rows = stored.view(dtype), stored.view(32, 256).view(dtype)
        for kind in FLOATS:
            x = every_value(getattr(torch, kind), device)
            for value in SCALES:
                scale = None if value is None else torch.full((1,), value, device=device)
                into = torch.full((10, 16, 512), 0xa5, dtype=torch.uint8, device=device)
                ops.store(x, None, into.view(dtype), None, slot, "NHD", k_scale=scale, nans=nans.zero_())
                assert torch.equal(into.view(160, 512)[slot], quantized(x, dtype, scale)), (name, kind, value)
                if name == "int8":
                    assert nans.item() == (x if value is None else x.float() / scale).isnan().sum(), (kind, value)
                out, rejected = torch.full((34, 256), 3, dtype=x.dtype, device=device), counter(device)
                ops.gather(out, cache, index, "NHD", scale=scale, rejected=rejected)
                assert torch.equal(canonical(out)[:32], dequantized(rows, x.dtype, scale)[index[:32]]), (name, kind)
                assert not out[32:].any() and rejected.item() == 1, (name, kind, value)
    for kind in FLOATS:  # and into each other
        rows = every_value(getattr(torch, kind), device).view(-1, 256)
        index = torch.randperm(rows.shape[0], device=device)
        for target in (getattr(torch, name) for name in FLOATS):
            got, expected = ops.gather_new(rows, index, dtype=target), rows[index].to(target)
            same = torch.equal(as_bytes(got), as_bytes(expected)) if target == rows.dtype else torch.equal(
                canonical(got), canonical(expected))
            assert same, (kind, target)


def scaled_caches(device):
    """k_scale and v_scale: one element, one for each head, or none; caches by dtype and by name."""
    qkv = with_edges(random_like(100, 3 * HEADS * DIM, device=device) * 100)
    q, k, v = qkv.view(100, 3, HEADS, DIM).unbind(1)
    one, each = torch.full((), 0.37, device=device), torch.rand(HEADS, device=device) + 0.1
    for layout in ("rows", "NHD", "HND"):
        for name, stored in STORED.items():
            dtype = getattr(torch, stored)
            for k_scale, v_scale, cache_dtype in ((one, each, name), (None, None, name), (each, one, "auto"),
                                                  (one.view(1), None, "auto")):
                slot, keep = some_slots(100, device), None
                keep = slot >= 0
                cached = [as_bytes(torch.zeros(c.shape, dtype=dtype, device=device)) for c in caches(device, layout)]
                if cache_dtype == "auto" or stored == "int8":
                    cached = [c.view(dtype) for c in cached]
                expected = [as_bytes(c).clone() for c in cached]
                for cache, rows, scale in zip(expected, (k, v), (k_scale, v_scale)):
                    column = scale if scale is None or scale.numel() == 1 else scale[:, None]
                    cache[place(slot[keep], layout)] = quantized(rows[keep], dtype, column)
                ops.store(k, v, *cached, slot, layout, cache_dtype=cache_dtype, k_scale=k_scale, v_scale=v_scale)
                assert all(torch.equal(as_bytes(a), b) for a, b in zip(cached, expected)), (layout, cache_dtype, stored)
                for cache, want, scale in zip(cached, expected, (k_scale, v_scale)):
                    column = scale if scale is None or scale.numel() == 1 else scale[:, None]
                    want = want.view(dtype)[place(slot.clamp(min=0), layout)]
                    for wide in (torch.bfloat16, torch.float16, torch.float32):
                        got = ops.gather_new(cache, slot, layout, cache_dtype=cache_dtype, scale=scale, dtype=wide)
                        value = dequantized(want, wide, column).masked_fill(~keep[:, None, None], 0)
                        assert torch.equal(got.view(value.dtype), value), (layout, cache_dtype, stored, wide)
    before = [as_bytes(cache).clone() for cache in cached]  # and no token at all
    ops.store(k[:0], v[:0], *cached, slot[:0], layout, cache_dtype=cache_dtype, k_scale=each, v_scale=one)
    none = ops.gather_new(cached[0], slot[:0], layout, cache_dtype=cache_dtype, scale=each, dtype=k.dtype)
    assert none.shape == (0, HEADS, DIM), "no token gathered"
    assert all(torch.equal(a, as_bytes(b)) for a, b in zip(before, cached)), "no token stored"
    inverse = torch.full((1,), 4.0, device=device)
    cache = torch.zeros((SLOTS, HEADS, DIM), dtype=torch.float8_e4m3fn, device=device)
    ops.store(k, None, cache, None, slot, k_scale=inverse, scale_inverse=True)
    assert torch.equal(as_bytes(cache)[slot[keep]], quantized(k[keep].float() * 4, cache.dtype)), "inverse"
    moved, where = torch.zeros_like(cache), torch.where(keep)[0]
    ops.transfer([moved], [k.contiguous()], slot[where], where, dst_scale=inverse, scale_inverse=True)
    assert torch.equal(as_bytes(moved), as_bytes(cache)), "inverse of a transfer"
    ops.gather(q, cache, slot, scale=1 / inverse)
    assert torch.equal(bits(q[keep]), dequantized(cache[slot[keep]], q.dtype, 1 / inverse)), "and back"
    wide = torch.zeros((SLOTS, HEADS, DIM), dtype=torch.float32, device=device)
    ops.store(k, None, wide, None, slot)
    assert torch.equal(canonical(wide[slot[keep]]), canonical(k[keep].float())), "bfloat16 as float32"


def computed_scales(device):
    """Scale caches: a scale for each token and head, in a cache of its own and inside the padded heads of a cache."""
    k, v = (with_edges(random_like(100, HEADS, DIM, device=device)) for _ in "kv")
    k[1], k[2] = 0, 1e-5  # the least scale
    for layout in ("rows", "NHD", "HND"):
        for name, dtype, least, inverse in (("auto", torch.float8_e4m3fn, 2.0 ** -126, False),
                                            ("fp8_per_token_head", torch.float8_e4m3fn, 1e-6, True),
                                            ("int8_per_token_head", torch.int8, 1e-6, True)):
            slot = some_slots(100, device)
            keep = slot >= 0
            rows = [rows[keep] for rows in (k, v)]
            for padding in (0, 16):  # FlashInfer's heads: [DIM of FP8][a scale of 4 bytes][12 bytes]
                whole = [torch.zeros((*cache.shape[:-1], DIM + padding), dtype=torch.uint8, device=device)
                         for cache in caches(device, layout)]
                cached = [cache[..., :DIM].view(dtype) for cache in whole]
                scales = [cache[..., DIM:DIM + 4].view(torch.float32).squeeze(-1) for cache in whole] if padding else [
                    scales_like(device, layout) for _ in "kv"]
                ops.store(k, v, *cached, slot, layout, cache_dtype=name, k_scale_cache=scales[0],
                          v_scale_cache=scales[1])
                for cache, scale, row, base in zip(cached, scales, rows, whole):
                    expected = computed_scale(row, dtype, least)
                    got = scale[place(slot[keep], layout)]
                    assert torch.equal(got, expected), (layout, name, padding)
                    want = quantized(row.float() * (1 / expected)[..., None], dtype) if inverse else \
                        quantized(row, dtype, expected[..., None])
                    cells = place(slot[keep], layout)
                    assert torch.equal(as_bytes(cache[cells].contiguous()), want), (layout, name, padding)
                    assert not base[..., DIM + 4:].any(), "padding written"
                    back = ops.gather_new(cache, slot[keep], layout, cache_dtype=name, scale=scale, dtype=k.dtype)
                    assert torch.equal(bits(back), dequantized(want.view(dtype), k.dtype, expected[..., None]))
    for dtype, least, power_of_two in ((torch.float8_e5m2, 1e-6, False), (torch.int8, 0, True)):
        cache = torch.zeros((PAGES, PAGE, HEADS, DIM), dtype=dtype, device=device)
        scales = scales_like(device, "NHD", 8)
        ops.store(k, None, cache, None, slot, "NHD", k_scale_cache=scales, scale_min=least,
                  scale_power_of_two=power_of_two)
        expected = computed_scale(rows[0].view(-1, 8, DIM // 2), dtype, least or 2.0 ** -126, power_of_two)
        assert torch.equal(scales.view(SLOTS, 8)[slot[keep]], expected), (dtype, "scales of tiles")
        want = quantized(rows[0].view(-1, 8, DIM // 2), dtype, expected[..., None])
        assert torch.equal(as_bytes(cache.view(SLOTS, 8, -1)[slot[keep]]), want), (dtype, "values of tiles")
    power = scales_like(device, "NHD", 8, torch.float8_e8m0fnu)
    cache = torch.zeros((PAGES, PAGE, HEADS, DIM), dtype=torch.float8_e4m3fn, device=device)
    ops.store(k, None, cache, None, slot, "NHD", k_scale_cache=power)
    expected = computed_scale(rows[0].view(-1, 8, DIM // 2), cache.dtype, power_of_two=True)
    assert torch.equal(power.view(SLOTS, 8)[slot[keep]].float(), expected), "float8_e8m0fnu, two for each head"


def halves(x, name):
    """x, divided by its scale, as elements of 4 bits, two to a byte."""
    if name == "int4":
        code = x.nan_to_num().round().clamp(-7, 7).int() & 15
    else:
        between, least = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], device=x.device), x.abs()[..., None]
        up = (least > between) | ((least == between) & (torch.arange(7, device=x.device) % 2 == 1))  # ties to even
        code = up.sum(-1).int() | torch.signbit(x).int() << 3
    code = code.masked_fill(x.isnan(), 0).view(*x.shape[:-1], -1, 2)
    return (code[..., 0] | code[..., 1] << 4).byte()


def wholes(stored, name, scale, dtype):
    """The numbers that such bytes stand for, times their scales."""
    code = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).long()
    table = torch.arange(16) - 16 * (torch.arange(16) > 7) if name == "int4" else torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return (table.float().to(stored.device)[code] * scale).to(dtype)


def four_bits(device):
    """Two elements in a byte: without scales, a scale for all or each head, and NVFP4's scales of 8 bits."""
    k, v = (with_edges(random_like(100, HEADS, DIM, device=device)) for _ in "kv")
    one, each = torch.full((), 0.37, device=device), torch.rand(HEADS, device=device) + 0.1
    slot, rejected = some_slots(100, device), counter(device)
    keep = slot >= 0
    for layout in ("rows", "NHD", "HND"):
        cells = place(slot[keep], layout)
        for name in ("fp4_e2m1", "int4"):
            cached = [torch.zeros((*c.shape[:-1], DIM // 2), dtype=torch.uint8, device=device)
                      for c in caches(device, layout)]
            nans = counter(device)
            for k_scale, v_scale in ((one, each), (None, one.view(1))):
                ops.store(k, v, *cached, slot, layout, cache_dtype=name, k_scale=k_scale, v_scale=v_scale, nans=nans)
                for cache, rows, scale in zip(cached, (k, v), (k_scale, v_scale)):
                    scale = torch.ones((), device=device) if scale is None else scale
                    column = scale[:, None] if scale.numel() > 1 else scale
                    want = halves(rows[keep].float() / column, name)
                    assert torch.equal(cache[cells], want), (layout, name)
                    got = ops.gather_new(cache, slot, layout, cache_dtype=name, scale=scale, dtype=k.dtype)
                    back = torch.zeros_like(k)
                    back[keep] = wholes(want, name, column, k.dtype)
                    assert torch.equal(bits(got), bits(back)), (layout, name)
            assert nans.item() == 2 * sum(rows[keep].isnan().sum().item() for rows in (k, v)), "NaNs that became 0"
        tiles = HEADS if layout == "HND" else HEADS * DIM // 16
        for dtype in (torch.float8_e4m3fn, torch.float16, torch.float32):
            scales, whole = scales_like(device, layout, tiles, dtype), torch.full((1,), 0.02, device=device)
            cached[0].zero_()
            ops.store(k, None, cached[0], None, slot, layout, cache_dtype="fp4_e2m1", k_scale_cache=scales,
                      k_scale=whole, rejected=rejected)
            rows = k[keep].float().view(-1, tiles, HEADS * DIM // tiles)
            largest = rows.nan_to_num(0, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max).abs().amax(-1)
            exact = (largest / torch.full_like(largest, 6) / whole).clamp(2.0 ** -126, 2.0 ** 127)
            want = exact.clamp(max=torch.finfo(dtype).max).to(dtype)
            assert torch.equal(scales[cells].view(want.shape).float(), want.float()), (layout, dtype, "scales")
            column = (want.float() * whole)[..., None]
            stored = halves(torch.where(column == 0, 0, rows / column), "fp4_e2m1")
            clean = ~(rows.isnan() | rows.isinf() | (column == 0)).any(-1).any(-1)
            assert torch.equal(cached[0][cells].view(stored.shape)[clean], stored[clean]), (layout, dtype, "values")
            got = ops.gather_new(cached[0], slot[keep], layout, cache_dtype="fp4_e2m1", scale=scales,
                                 tensor_scale=whole, dtype=k.dtype)
            back = wholes(cached[0][cells].view(stored.shape), "fp4_e2m1", column, k.dtype).view(got.shape)
            assert torch.equal(bits(got)[clean], bits(back)[clean]), (layout, dtype, "back")
    heads_of_scales(device, k, v, slot)
    layers, small = caches(device, "HND", 3), [torch.zeros((PAGES, HEADS, PAGE, DIM // 2), dtype=torch.uint8,
                                                           device=device) for _ in range(3)]
    ops.transfer(small, layers, None, None, "HND", "HND", dst_dtype="int4", dst_scale=one)
    assert torch.equal(torch.stack(small), halves(torch.stack(layers).float() / one, "int4")), "transfer"
    ops.transfer(layers, small, None, None, "HND", "HND", src_dtype="int4", src_scale=one)
    assert torch.equal(torch.stack(layers), wholes(torch.stack(small), "int4", one, k.dtype)), "transfer back"
    fp4 = {"cache_dtype": "fp4_e2m1"}
    refused("a row of k has 256|k_cache 1024", ops.store, k, None, layers[0].view(torch.uint8), None, slot, "HND",
            **fp4)
    refused("k_cache is bfloat16|fp4_e2m1", ops.store, k, None, layers[0][..., ::2].contiguous(), None, slot, "HND",
            **fp4)
    refused("tensor_scale is given", ops.gather, k, small[0], slot, "HND", tensor_scale=whole, **fp4)
    refused("tensor_scale is float32 of 4 elements", ops.gather, k, small[0], slot, "HND", scale=scales,
            tensor_scale=each, **fp4)
    refused("k_scale is float32 of 4 elements", ops.store, k, None, small[0], None, slot, "HND", k_scale=each,
            k_scale_cache=scales, **fp4)
    refused("k_scale_cache is int8|not float32, float8_e4m3fn, float16 or", ops.store, k, None, small[0], None, slot,
            "HND", k_scale_cache=scales_like(device, "HND", HEADS, torch.int8), **fp4)
    refused("k_scale_cache is float16|not float32 or", ops.store, k, None, layers[0].to(torch.float8_e4m3fn), None,
            slot, "HND", k_scale_cache=scales.half())


def heads_of_scales(device, k, v, slot):
    """Scales that lie in heads, linear for K and swizzled for V, hold those that lie in rows."""
    keep, tiles = slot >= 0, DIM // 16
    one, fp4 = torch.full((), 0.02, device=device), {"nans": counter(device)}
    page, offset = slot[keep].long() // PAGE, slot[keep].long() % PAGE
    head, s = torch.arange(HEADS, device=device)[:, None], torch.arange(tiles, device=device)
    at = offset[:, None, None] // 4 * 4 + s // (tiles // 4)
    scale = s % (tiles // 4) * 4 + offset[:, None, None] % 4
    for layout in ("NHD", "HND"):
        cached = [torch.zeros((*c.shape[:-1], DIM // 2), dtype=torch.uint8, device=device)
                  for c in caches(device, layout) * 2]
        linear = torch.zeros((PAGES, PAGE, HEADS * tiles), dtype=torch.float8_e4m3fn, device=device)
        order = (0, 1, 2, 3) if layout == "HND" else (0, 2, 1, 3)
        scales = [torch.zeros((PAGES, HEADS, PAGE, tiles), dtype=torch.float8_e4m3fn, device=device) for _ in "kv"]
        views = [x.permute(order) for x in scales]
        for rows, cache, stored, swizzled in ((k, 0, scales[0], False), (v, 1, scales[1], True)):
            flat = torch.zeros((PAGES, PAGE, HEADS, DIM // 2), dtype=torch.uint8, device=device)
            ops.store(rows, None, flat, None, slot, "NHD", cache_dtype="fp4_e2m1", k_scale_cache=linear, k_scale=one)
            if cache == 0:
                ops.store(k, v, *cached[:2], slot, layout, cache_dtype="fp4_e2m1_swizzled", k_scale_cache=views[0],
                          v_scale_cache=views[1], k_scale=one, v_scale=one, **fp4)
            want = linear.view(PAGES * PAGE, HEADS, tiles)[slot[keep].long()].view(torch.uint8)
            place_of = (page[:, None, None], head, at, scale) if swizzled else (
                page[:, None, None], head, offset[:, None, None], s)
            assert torch.equal(stored.view(torch.uint8)[place_of], want), (layout, swizzled, "scales of heads")
            got = ops.gather_new(cached[cache], slot, layout, scale=views[cache], tensor_scale=one, dtype=k.dtype,
                                 cache_dtype="fp4_e2m1_swizzled" if swizzled else "fp4_e2m1")
            back = ops.gather_new(flat, slot, "NHD", scale=linear, tensor_scale=one, dtype=k.dtype,
                                  cache_dtype="fp4_e2m1")
            assert torch.equal(bits(got), bits(back)), (layout, swizzled, "back")
    refused("but scales of heads are packed", ops.gather, k, flat, slot, "NHD", cache_dtype="fp4_e2m1",
            scale=linear.view(PAGES, PAGE, HEADS, tiles))
    refused("scale_order is 1, but scale_heads is 0", ops.gather, k, cached[0], slot, "HND", scale=one,
            cache_dtype="fp4_e2m1_swizzled")


def fetches(device):
    """Three requests of four states: what is hot afterwards is what they want, and only what was not hot moved."""
    pin = device == "cuda"
    hot_rows, tokens, top_k, rows = 24, 64, 8, 300
    on = lambda *values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=device)
    k, v = (torch.randn(rows, HEADS, DIM).to(torch.bfloat16) for _ in "kv")
    k, v = (t.pin_memory() if pin else t for t in (k, v[..., :DIM // 2].contiguous()))
    k_hot, v_hot = (torch.zeros((4 * hot_rows, *t.shape[1:]), dtype=t.dtype, device=device) for t in (k, v))
    sets = ops.FetchSet(4, hot_rows, tokens, 24, device)
    pages = torch.randperm(rows // 4)[:3 * 16].view(3, 16).to(device)
    state, counters = on(2, 0, 3), [counter(device) for _ in range(3)]
    hits, misses, rejected = counters
    last = [set() for _ in range(3)]  # the tokens of the last call, which are still hot
    for step in range(12):
        wanted = torch.stack([torch.stack([torch.randperm(tokens)[:top_k] for _ in range(2)]) for _ in range(3)])
        wanted[step % 3, 0, 3], wanted[0, 1, 1] = -1, tokens + 5 if step == 4 else 7
        got = torch.full((3, 2, top_k), -2, dtype=torch.int32, device=device)
        plan = [torch.zeros(3 * 2 * top_k, dtype=torch.int32, device=device) for _ in range(2)]
        for one in counters:
            one.zero_()
        sets.fetch(state, wanted.to(device), got, k_hot, k, v_hot, v, pages=pages, page_rows=4, plan_src=plan[0],
                   plan_dst=plan[1], hits=hits, misses=misses, rejected=rejected)
        right = (wanted >= 0) & (wanted < tokens)
        assert torch.equal(got.cpu() >= 0, right), f"rows of step {step}"
        page = pages.cpu()[torch.arange(3)[:, None, None], wanted.clamp(0, tokens - 1) // 4]
        source = page * 4 + wanted.clamp(min=0) % 4
        for hot, whole in ((k_hot, k), (v_hot, v)):
            assert torch.equal(hot.cpu()[got.cpu()[right].long()], whole[source[right]]), f"bytes of step {step}"
        of = got.cpu() // hot_rows
        assert torch.equal(of[right], state.cpu()[:, None, None].expand_as(of)[right]), "rows of each state"
        moved = plan[0][plan[0] >= 0]
        assert moved.numel() == misses.item() and rejected.item() == (step == 4), f"counters of step {step}"
        assert misses.item() + hits.item() == right.sum().item(), "each is a hit or a miss"
        for i in range(3):
            now = {t for t in wanted[i].flatten().tolist() if 0 <= t < tokens}
            again = {s.item() for s in moved} & {source[i].flatten()[j].item() for j, t in enumerate(
                wanted[i].flatten().tolist()) if t in last[i] and t >= 0}
            assert not again, "what was just hot is not fetched"
            last[i] = now
    sets.reset(0)
    alone, fresh_rows = torch.zeros((1, 2), dtype=torch.int32, device=device), torch.zeros((1, 3), dtype=torch.int32,
                                                                                           device=device)
    misses.zero_()
    sets.fetch(on(0), on(5, 9).view(1, 2), alone, k_hot, k, fresh=on(1, 5, 2).view(1, 3), fresh_rows=fresh_rows,
               misses=misses)
    assert fresh_rows.tolist() == [[0, 1, 2]] and alone.tolist() == [[1, 3]] and misses.item() == 1, "fresh rows"
    planned = ops.FetchSet(4, hot_rows, tokens, 24, device)
    planned.fetch(on(0), on(5, 9).view(1, 2), alone, host_rows=rows)
    assert alone.tolist() == [[0, 1]], "a plan alone"
    wide, plan = torch.arange(16, dtype=torch.int32, device=device).view(2, 1, 8), [on(*range(8)) for _ in "sd"]
    planned.fetch(on(2, 3), wide[:, :, :4], torch.zeros_like(wide[:, 0, :4]), host_rows=rows, plan_src=plan[0],
                  plan_dst=plan[1])
    assert plan[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11], "a part of one step's tokens"
    fetch = sets.fetch
    refused("out of range", ops.FetchSet, 4, 0, tokens, 24, device)
    refused("state is 4", sets.reset, 4)
    refused("wanted is float32", fetch, on(0), torch.zeros((1, 2), device=device), alone, k_hot, k)
    refused("wanted has shape [2, 1]|not [1, tokens]", fetch, on(0), on(5, 9).view(2, 1), alone, k_hot, k)
    refused("fresh is int64|wanted is not", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k,
            fresh=on(1, dtype=torch.int64).view(1, 1), fresh_rows=alone[:, :1])
    refused("rows is int32 of shape [1, 3]|not 2 packed", fetch, on(0), on(5, 9).view(1, 2), fresh_rows, k_hot, k)
    refused("rows is int64", fetch, on(0), on(5, 9).view(1, 2), alone.long(), k_hot, k)
    refused("k and k_hot must both", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot)
    refused("a row of v_hot is 512 bytes|one of v 256", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k, k_hot, v)
    refused("page_rows is 4|no pages", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k, page_rows=4)
    refused("pages has shape [3, 16]|state 1 requests", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k, pages=pages,
            page_rows=4)
    refused("plan_src is NULL", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k, plan_dst=alone.view(2))
    refused("misses is int64|one int32", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k, misses=on(0).long())
    refused("top_k is 25", fetch, on(0), torch.zeros((1, 25), dtype=torch.int32, device=device), alone.new_zeros(25),
            k_hot, k)
    if pin:
        refused("k is in pageable memory", fetch, on(0), on(5, 9).view(1, 2), alone, k_hot, k.clone())


def layouts_by_name(device):
    """Views of every order of the dimensions against torch's permutations, and names of engines."""
    sizes = {"L": 2, "B": 5, "H": 4, "N": 8, "2": 2, "C": 16}
    count = 2 * 5 * 4 * 8 * 2 * 16
    orders = ["".join(o) + "C" for letters in ("LBHN", "LBHN2") for o in itertools.permutations(letters)]
    names = {"flashinfer_hnd": "LB2HNC", "sglang_mha": "2LBNHC", "trtllm": "BL2HNC", "KV_MLA_FMT": "BLNH2C",
             "NL_X_NB_TWO_NH_BS_HS": "LB2HNC", **{order: order for order in orders}}
    memory = torch.arange(count + 3, dtype=torch.int32, device=device)[3:]
    for name, order in names.items():
        order = order if "2" in order else order[:-1] + "2C"
        expected = memory.view([sizes[letter] for letter in order]).permute([order.index(x) for x in "L2BHNC"])
        got = torch.stack([torch.stack(pair) for pair in ops.layout(name, memory, 8, 4, 16, layers=2)])
        assert torch.equal(got, expected), name
    cache = torch.zeros(6 * 8 * 4 * 24, dtype=torch.bfloat16, device=device)
    (k, v), = ops.layout("LBHNC", cache, 8, 4, 16, 8)
    assert torch.equal(k, cache.view(6, 4, 8, 24)[..., :16]) and v.data_ptr() == k.data_ptr() + 32, "K beside V"
    rows, other, slot = random_like(7, 4, 16, device=device), random_like(7, 4, 8, device=device), torch.randperm(
        48, device=device)[:7]
    ops.store(rows, other, k, v, slot, "HND")
    place = cache.view(6, 4, 8, 24)[slot // 8, :, slot % 8]
    assert torch.equal(place, torch.cat((rows, other), -1)), "a store by a layout's name"
    (k, v), = ops.layout("LBNHC", cache, 8, 1, 24 * 4, 0)
    assert v is None and k.shape == (6, 1, 8, 96), "without V"
    refused("'LBNHX' is neither a name", ops.layout, "LBNHX", cache, 8, 4, 16, 8)
    refused("cache has 4600 elements|multiple of 768", ops.layout, "LBNHC", cache[:4600], 8, 4, 16, 8)
    refused("cache has 100 elements|multiple of 768", ops.layout, "LBNHC", cache[:100], 8, 4, 16, 8)
    refused("cache has shape (2304,) and strides (2,)", ops.layout, "LBNHC", cache[::2], 8, 4, 16, 8)
    for layers in (-1, 0):
        refused(f"layers is {layers}", ops.layout, "LBNHC", cache, 8, 4, 16, 8, layers)
    refused("page_rows is 0", ops.layout, "LBNHC", cache, 0, 4, 16, 8)
    refused("fp8_ds_mla' has its own", ops.layout, "fp8_ds_mla", cache, 8, 4, 16, 8)


def whole_formats(device):
    """Caches that hold their scales: each byte of the cache, and what a gather and a transfer give."""
    for name, token, quantised, copied, tile, power, least in WHOLE_FORMATS:
        whole = torch.full((10, 64 * token + 64), 0xa5, dtype=torch.uint8, device=device)  # padded pages
        cache = whole[:, :64 * token].view(10, 64, token)
        again, rejected, before = cache.clone(), counter(device), whole.clone()
        rows, slot = with_edges(random_like(100, quantised + copied, device=device)), some_slots(100, device)
        rows[2], rows[3], slot[1] = 0, 1e-6, SLOTS + 1
        k, v = rows[:, :quantised], rows[:, quantised:].contiguous() if copied else None
        ops.store(k, v, cache, None, slot, "NHD", cache_dtype=name, rejected=rejected)
        ops.store(rows, None, again, None, slot, "NHD", cache_dtype=name)
        assert torch.equal(cache, again) and rejected.item() == 1, f"{name}: k and v beside each other"
        keep = (slot >= 0) & (slot < SLOTS)
        scale = computed_scale(k.reshape(100, -1, tile), torch.float8_e4m3fn, torch.tensor(least).item(), power)
        each = scale.repeat_interleave(tile, 1)
        stored = quantized(k.float() * (1 / each), torch.float8_e4m3fn) if name == "fp8_ds_mla_sglang" else quantized(
            k, torch.float8_e4m3fn, each)
        size = token if token == 656 else quantised + 2 * copied
        for i in torch.where(keep)[0].tolist():  # what each format is, byte by byte
            page, r = before[slot[i] // 64], slot[i].item() % 64
            page[r * size:r * size + quantised] = stored[i]
            if copied:
                page[r * size + (528 if token == 656 else quantised):][:2 * copied] = v[i].view(torch.uint8)
            if token == 656:
                page[r * size + 512:r * size + 528] = scale[i].view(torch.uint8)
            elif name.startswith("fp8_ds_mla_v4"):
                begin, scales = 64 * size + r * (8 if copied else 16), quantised // tile
                page[begin:begin + scales] = ((scale[i].view(torch.int32) >> 23) & 255).byte()
            else:
                page[64 * size + r * 4:64 * size + r * 4 + 4] = scale[i].view(torch.uint8)
        assert torch.equal(whole, before), f"{name}: bytes"
        expected = bits(rows).clone()
        expected[:, :quantised] = dequantized(stored.view(torch.float8_e4m3fn), torch.bfloat16, each)
        expected[~keep] = 0
        got, part = ops.gather_new(cache, slot, "NHD", cache_dtype=name, dtype=torch.bfloat16), torch.ones_like(k)
        assert torch.equal(bits(got), expected), name
        ops.gather(part, cache, slot, "NHD", cache_dtype=name)
        assert torch.equal(bits(part), expected[:, :quantised]), f"{name}: what is quantised alone"
        index, moved = torch.where(keep)[0], [torch.zeros_like(rows) for _ in range(2)]
        ops.transfer(moved, [cache, whole.clone()[:, :64 * token].view(cache.shape)], index, slot[index], "rows", "NHD",
                     src_dtype=name)
        assert all(torch.equal(bits(m)[index], expected[index]) for m in moved), f"{name}: transfer"
        moved = [torch.full_like(cache, 0xa5, memory_format=torch.contiguous_format) for _ in range(2)]
        ops.transfer(moved, [rows, rows], slot[index], index, "NHD", "rows", dst_dtype=name)
        assert all(torch.equal(m, cache) for m in moved), f"{name}: transfer into it"
        ops.store(rows[:0], None, again, None, slot[:0], "NHD", cache_dtype=name)
        none = ops.gather_new(again, slot[:0], "NHD", cache_dtype=name, dtype=torch.bfloat16)
        assert none.shape == (0, quantised + copied) and torch.equal(cache, again), f"{name}: no token"
    packed = torch.zeros((SLOTS, 656), dtype=torch.uint8, device=device)  # rows that follow each other, without pages
    ops.store(random_like(100, 576, device=device), None, packed, None, slot, cache_dtype="fp8_ds_mla")
    assert packed[slot[keep]].any(1).all(), "rows of 656 bytes"


def scaled_transfers(device):
    """Layers of bfloat16 to layers of FP8, with a scale for each, and back."""
    layers, index = caches(device, "HND", 5), some_slots(50, device)
    index[::7] = 5
    small = [torch.zeros_like(layer, dtype=torch.float8_e4m3fn) for layer in layers]
    for scale in (torch.rand(5, device=device) + 0.5, torch.rand((5, HEADS), device=device) + 0.5,
                  torch.full((1,), 2.5, device=device), None):
        ops.transfer(small, layers, index, index, "HND", "HND", dst_scale=scale)
        back = [torch.zeros_like(layer) for layer in layers]
        ops.transfer(back, [as_bytes(layer) for layer in small], index, index, "HND", "HND", src_dtype="fp8",
                     src_scale=scale)
        for i, (was, stored, got) in enumerate(zip(layers, small, back)):
            was, stored, got = (layer[place(index, "HND")] for layer in (was, stored, got))
            each = None if scale is None else scale[i if scale.shape[0] == 5 else 0].view(-1, 1)
            assert torch.equal(as_bytes(stored), quantized(was, stored.dtype, each)), "to FP8"
            assert torch.equal(bits(got), dequantized(stored, got.dtype, each)), "and back"
    scale = torch.rand(HEADS, device=device) + 0.5
    for shaped in (scale, scale[None]):
        ops.transfer(small[:1], layers[:1], index, index, "HND", "HND", dst_scale=shaped)
        expected = quantized(layers[0][place(index, "HND")], small[0].dtype, scale[:, None])
        assert torch.equal(as_bytes(small[0][place(index, "HND")]), expected), "one layer"


def slots_of(device):
    pages = torch.randperm(PAGES, device=device)[:32].view(4, 8)
    pages[2, 3] = -1  # not yet given a page
    request = torch.randint(4, (200,), device=device)
    position = torch.randint(8 * PAGE, (200,), device=device)
    position[5], request[6], request[7] = 8 * PAGE, 4, -1

    def expected_of(request, position):
        outside = (request < 0) | (request > 3) | (position < 0) | (position >= 8 * PAGE)
        page = pages[request.clamp(0, 3), (position // PAGE).clamp(0, 7)]
        return torch.where(outside | (page < 0), -1, page * PAGE + position % PAGE)

    for dtype in (torch.int32, torch.int64):
        wide = torch.full((4, 9), 99, dtype=dtype, device=device)
        wide[:, :8], request, position = pages, request.to(dtype), position.to(dtype)
        got = ops.slots_new(wide[:, :8], 200, PAGE, SLOTS, request=request, position=position)
        assert torch.equal(got, expected_of(request.long(), position.long())), dtype
        slot = torch.zeros(200, dtype=dtype, device=device)
        ops.slots(slot, wide[:, :8], PAGE, SLOTS, request=request, position=position)
        assert torch.equal(slot, got.to(dtype)), "in place"

    for dtype in (torch.int32, torch.int64):  # FlashInfer's kv_indices and kv_indptr: 3, 0, 7 and 8 pages of requests
        starts = torch.tensor([0, 3, 3, 10, 18], device=device)
        flat = torch.cat((pages.flatten()[:18], pages.flatten()[:5])).to(dtype)  # and some that nobody has
        request, position = torch.randint(4, (200,), device=device), torch.randint(8 * PAGE, (200,), device=device)
        has = position // PAGE < (starts[1:] - starts[:-1])[request]
        page = flat[torch.where(has, starts[request] + position // PAGE, 0)]
        expected = torch.where(has & (page >= 0), page * PAGE + position % PAGE, -1)
        rejected, slot = counter(device), torch.zeros(200, dtype=dtype, device=device)
        ops.slots(slot, flat, PAGE, SLOTS, request=request.to(dtype), position=position.to(dtype),
                  page_starts=starts.to(dtype), rejected=rejected)
        assert torch.equal(slot, expected.to(dtype)) and rejected.item() == (~has).sum().item(), (dtype, "page_starts")
        got = ops.slots_new(flat, 40, PAGE, SLOTS, cu_seqlens=torch.tensor([0, 9, 9, 40, 40], device=device),
                            page_starts=starts.to(dtype))
        request = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor([9, 0, 31, 0], device=device))
        position = torch.arange(40, device=device) - torch.tensor([0, 0, 9, 0], device=device)[request]
        page = flat[starts[request] + position // PAGE].long()
        assert torch.equal(got, torch.where(page < 0, -1, page * PAGE + position % PAGE)), (dtype, "lengths")

    lengths, starts = torch.tensor([10, 0, 70, 1], device=device), torch.tensor([5, 3, 0, 127], device=device)
    cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    request = torch.repeat_interleave(torch.arange(4, device=device), lengths)
    position = torch.arange(81, device=device) - cumulative[request] + starts[request]
    got = ops.slots_new(pages, 81, PAGE, SLOTS, cu_seqlens=cumulative, starts=starts)
    assert torch.equal(got, expected_of(request, position)), "cumulative lengths"


def refusals(device):
    (cache, other), index = caches(device, "NHD"), some_slots(10, device)
    rows = random_like(10, HEADS, DIM, device=device)
    refused("layout|nhd", ops.gather_new, cache, index, "nhd")
    refused("index is float32", ops.gather_new, cache, index.float(), "NHD")
    refused("index|2 dimensions", ops.gather_new, cache, index.view(2, 5), "NHD")
    refused("index has 0 dimensions", ops.gather_new, cache, index[0], "NHD")
    refused("argument 3 is None", ops.gather, rows, cache, None, "NHD")
    refused("index|expanded", ops.gather_new, cache, index[:1].expand(10), "NHD")
    refused("out is int64|no element type", ops.gather, rows.long(), cache, index, "NHD")
    refused("a row of out|128 elements|256", ops.gather, rows[:, :2].float(), cache, index, "NHD")
    fp8, scale = torch.zeros(cache.shape, dtype=torch.float8_e4m3fn, device=device), torch.ones(1, device=device)
    refused("k_cache is uint8|cache_dtype", ops.store, rows, None, as_bytes(fp8), None, index, "NHD")
    refused("k_cache|\"fp4\"|\"fp8_e5m2\"|\"fp8_ds_mla\"", ops.store, rows, None, fp8, None, index, "NHD",
            cache_dtype="fp4")
    refused("k_cache is bfloat16|\"fp8\"", ops.store, rows, None, cache, None, index, "NHD", cache_dtype="fp8")
    refused("k_cache is float8_e4m3fn|\"fp8_e5m2\"", ops.store, rows, None, fp8, None, index, "NHD",
            cache_dtype="fp8_e5m2")
    refused("KVPRIM_ERROR", ops.store, rows, None, cache, None, index, "NHD", k_scale=scale)
    refused("KVPRIM_ERROR_UNSUPPORTED", ops.gather_new, fp8, index, "NHD", dtype=torch.int8)
    refused("dtype must say", ops.gather_new, fp8, index, "NHD", scale=scale)
    refused("scale is float64", ops.gather, rows, fp8, index, "NHD", scale=scale.double())
    refused("k_scale has 3 elements|256", ops.store, rows, None, fp8, None, index, "NHD", k_scale=scale.expand(3))
    refused("k_scale is expanded", ops.store, rows, None, fp8, None, index, "NHD", k_scale=scale.expand(4))
    refused("k_scale has shape [1, 4]", ops.store, rows, None, fp8, None, index, "NHD", k_scale=scale.expand(1, 4))
    refused("v_scale|v is None", ops.store, rows, None, fp8, None, index, "NHD", v_scale=scale)
    scales = scales_like(device, "NHD")
    refused("k_scale and k_scale_cache", ops.store, rows, None, fp8, None, index, "NHD", k_scale=scale,
            k_scale_cache=scales)
    refused("k_scale_cache has shape|640 rows", ops.store, rows, None, fp8, None, index, "NHD",
            k_scale_cache=scales[1:])
    refused("k_scale_cache has 3 scales|256", ops.store, rows, None, fp8, None, index, "NHD",
            k_scale_cache=scales_like(device, "NHD", 3))
    refused("fp8_per_token_head needs k_scale_cache", ops.store, rows, None, fp8, None, index, "NHD",
            cache_dtype="fp8_per_token_head")
    refused("fp8_per_token_head needs scale", ops.gather, rows, fp8, index, "NHD", cache_dtype="fp8_per_token_head")
    mla, latent = torch.zeros((10, 64, 656), dtype=torch.uint8, device=device), random_like(10, 576, device=device)
    for words, k, v, whole, options in (
            ("k_cache is uint8|656", latent, None, mla[..., :640], {}),
            ("k_cache|\"NHD\"", latent, None, mla[0, 0], {}),
            ("a row of k has 576|512", latent, latent[:, :64], mla, {}),
            ("v is None|512", latent[:, :512], None, mla, {}),
            ("a row of v has 32|64", latent[:, :512], latent[:, :32], mla, {}),
            ("k is float32|16-bit", latent.float(), None, mla, {}),
            ("holds all", latent, None, mla, {"k_scale": scale}),
            ("k_cache|\"rows\"", latent, None, mla.transpose(0, 1), {})):
        refused(words, ops.store, k, v, whole, None, index, "NHD", cache_dtype="fp8_ds_mla", **options)
    refused("fp8_indexer has no v", ops.store, latent[:, :128], latent[:, :64], mla[..., :132].contiguous(), None,
            index, "NHD", cache_dtype="fp8_indexer")
    refused("a row of out has 64|512", ops.gather, latent[:, :64], mla, index, "NHD", cache_dtype="fp8_ds_mla")
    refused("scale is given|fp8_ds_mla", ops.gather, latent, mla, index, "NHD", cache_dtype="fp8_ds_mla", scale=scale)
    refused("dst_scale has shape [3]|[layers]", ops.transfer, [fp8, fp8.clone()], [cache, other], index, index, "NHD",
            "NHD", dst_scale=torch.ones(3, device=device))
    refused("a row of out|512|src|8192", ops.gather, rows, cache, index)
    refused("KVPRIM_ERROR_SIZE|dst.rows", ops.gather, rows[:9], cache, index, "NHD")
    refused("KVPRIM_ERROR_OVERLAP", ops.gather, cache.view(SLOTS, HEADS, DIM)[:10], cache, index, "NHD")
    refused("src|expanded", ops.gather_new, rows[:1].expand(10, HEADS, DIM), index)
    refused("src|neither are packed", ops.gather_new, rows.view(10, 4, 8, 8)[:, :, ::2, ::2], index)
    refused("rejected is float32", ops.gather, rows, cache, index, "NHD", rejected=torch.zeros(1, device=device))
    refused("kv_dim|[40, 16, 4, 64]", ops.store, rows, rows, cache, None, index, "NHD", kv_dim=2)
    refused("kv_dim|v_cache None", ops.store, rows, rows, cache, other, index, "NHD", kv_dim=0)
    refused("v and v_cache", ops.store, rows, rows, cache, None, index, "NHD")
    refused("KVPRIM_ERROR_OVERLAP", ops.store, rows, rows, cache, cache, index, "NHD")
    refused("dst|different shapes", ops.transfer, [cache, cache[1:]], [other, other])
    refused("2 layers|1", ops.transfer, [cache, other], [other])
    refused("dst_index has 10|src_index 9", ops.transfer, [cache], [other], index, index[:9], "NHD", "NHD")
    refused("dst[0]|strides", ops.copy, [torch.zeros(8, 8, device=device)], [torch.zeros(8, 8, device=device).t()])
    refused("dst has 1|src 2", ops.copy, [cache], [cache, other])
    refused("KVPRIM_ERROR_OVERLAP", ops.copy, [cache], [cache])
    table = torch.empty(0, dtype=torch.int64, device=device)
    refused("dst_layers 0 pointers", ops.transfer, [cache], [other], dst_layers=table, src_layers=table)
    empty = torch.zeros_like(cache)
    empty.untyped_storage().resize_(0)
    refused("src[0]|no memory", ops.copy, [cache], [empty])
    refused("pages has shape|strides", ops.slots_new, index[:2].expand(5, 2), 10, PAGE, SLOTS, request=index,
            position=index)
    refused("pages has shape [4, 2]|[pages]", ops.slots_new, index[:8].view(4, 2), 10, PAGE, SLOTS, request=index,
            position=index, page_starts=index)
    refused("page_starts is int32", ops.slots_new, index, 10, PAGE, SLOTS, request=index, position=index,
            page_starts=index.int())
    refused("page_starts|stride 2", ops.slots_new, index, 10, PAGE, SLOTS, request=index, position=index,
            page_starts=index[::2])
    refused("cu_seqlens has 10|5", ops.slots_new, index[:8].view(4, 2), 8, PAGE, SLOTS, cu_seqlens=index)
    refused("KVPRIM_ERROR_NULL", ops.slots_new, index[:8].view(4, 2), 8, PAGE, SLOTS)
    refused("nans is int8", ops.store, rows, None, fp8, None, index, "NHD", nans=index[:1].to(torch.int8))
    refused("at most 8 dimensions, not 9", ops.gather, rows, cache.view(*cache.shape, 1, 1, 1, 1, 1), index, "NHD")
    refused("index is int16", ops.gather, rows, cache, index.short(), "NHD")
    refused("a row of dst has 512|64", ops.transfer, [latent[:, :512]], [mla], None, None, "rows", "NHD",
            src_dtype="fp8_ds_mla")
    refused("one side", ops.transfer, [mla], [mla.clone()], None, None, "NHD", "NHD", src_dtype="fp8_ds_mla",
            dst_dtype="fp8_ds_mla")
    refused("keep_padding", ops.ops.gather, latent, mla, index, "NHD", cache_dtype="fp8_ds_mla", keep_padding=True)
    refused("fragments is int32", ops.unpack, cache, rows, torch.zeros((1, 3), dtype=torch.int32))
    refused("dst|contiguous", ops.unpack, cache[:, 1:], rows, [(0, 0, 2)])
    refused("KVPRIM_ERROR_BOUNDS", ops.unpack, rows, cache, [(0, rows.nbytes, 1)])
    refused("dst_layers is float32", ops.transfer_addresses, scale, index, index, index, 64)
    if device == "cuda":
        refused("index is on cpu", ops.gather_new, cache, index.cpu(), "NHD")
        refused("src is on cpu", ops.gather, rows, cache.cpu().pin_memory(), index, "NHD")
        refused("k_scale is on cpu", ops.store, rows, None, fp8, None, index, "NHD", k_scale=scale.cpu())
        refused("k_scale_cache is on cpu", ops.store, rows, None, fp8, None, index, "NHD", k_scale_cache=scales.cpu())
        refused("slot is on cpu", ops.store, rows, rows, cache, other, index.cpu(), "NHD")
        refused("dst|pageable|pin_memory()", ops.transfer, [cache.cpu()], [other])
        refused("src|pageable|pin_memory()", ops.copy, [cache], [cache.cpu()])
        refused("dst_index is on cuda|src_index on cpu", ops.ops.transfer, [cache], [other], index, index.cpu())
        refused("dst|pageable", ops.unpack, cache.cpu(), cache, [(0, 0, 8)])


def opchecks(device):
    for layout in ("rows", "NHD", "HND"):
        (cache, other), index = caches(device, layout), some_slots(10, device)
        rows, counts = random_like(10, HEADS, DIM, device=device), counter(device)
        check = torch.library.opcheck
        check(ops.ops.gather, (rows, cache, index, layout), {"rejected": counts})
        check(ops.ops.gather, (rows, cache, index, layout), {"base": 1, "keep_padding": True})
        check(ops.ops.store, (rows, rows + 1, cache, other, index, layout), {"rejected": counts})
        check(ops.ops.transfer, ([cache, cache + 1], [other, other + 1], index, index, layout, layout))
        small, scale = [torch.zeros(c.shape, dtype=torch.uint8, device=device) for c in (cache, other)], torch.ones(
            HEADS, device=device)
        check(ops.ops.store, (rows, rows + 1, *small, index, layout), {"cache_dtype": "fp8", "k_scale": scale})
        check(ops.ops.store, (rows, None, small[0], None, index, layout),
              {"cache_dtype": "int8", "k_scale_cache": scales_like(device, layout)})
        check(ops.ops.gather, (rows, small[0], index, layout), {"cache_dtype": "fp8", "scale": scale})
        check(ops.ops.transfer, (small, [cache, other], index, index, layout, layout), {"dst_dtype": "fp8"})
    mla = torch.zeros((10, 64, 656), dtype=torch.uint8, device=device)
    latent = random_like(10, 576, device=device)
    check(ops.ops.store, (latent, None, mla, None, index, "NHD"), {"cache_dtype": "fp8_ds_mla"})
    check(ops.ops.gather, (latent, mla, index, "NHD"), {"cache_dtype": "fp8_ds_mla"})
    check(ops.ops.store, (rows, None, cache, None, index, layout))
    check(ops.ops.store, (rows, rows + 1, torch.stack((cache, cache)), None, index, layout), {"kv_dim": 0})
    check(ops.ops.copy, ([cache, rows], [other, rows + 1]))
    pages, request = index[1:7].view(2, 3), torch.zeros(10, dtype=torch.int64, device=device)
    tokens = {"request": request, "position": request}
    check(ops.ops.slots, (index, pages, PAGE, SLOTS), tokens)
    check(ops.ops.unpack, (cache, rows, torch.tensor([[0, 64, 512]])))
    half, eight = small[0][..., :DIM // 2].contiguous(), scales_like(device, layout, HEADS, torch.float16)
    check(ops.ops.gather, (rows, half, index, layout),
          {"cache_dtype": "fp4_e2m1", "scale": eight, "tensor_scale": scale[:1].clone()})
    sets, wanted = ops.FetchSet(2, 8, 16, 8, device), torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    table = random_like(16, HEADS, DIM, device=device)
    check(ops.ops.fetch, (sets.memory, sets.sizes, wanted[0, :1], wanted, wanted + 1, table + 1, table))


def step_of():
    """A step that uses every operator, and reads what they wrote."""
    def step(k, v, k_cache, v_cache, offloaded, block, small, scale, scales, mla, pages, request, position):
        slot = ops.slots_new(pages, position.shape[0], PAGE, SLOTS, request=request, position=position)
        ops.store(k * 2, v + 1, k_cache, v_cache, slot, "NHD")
        out = torch.empty_like(k)
        ops.gather(out, v_cache, slot, "NHD")
        ops.transfer(offloaded, [k_cache, v_cache], pages[0], pages[1])
        ops.copy(block, [offloaded[0][3] + 1, offloaded[1][4]])
        ops.slots(position, pages, PAGE, SLOTS, request=request, position=request)
        ops.store(k, v + 1, small[0], small[1], slot, "NHD", cache_dtype="fp8_e4m3", k_scale=scale, v_scale=scale)
        ops.store(k, None, small[2], None, slot, "NHD", cache_dtype="int8_per_token_head", k_scale_cache=scales)
        wide = torch.nn.functional.pad(k.flatten(1), (0, 576 - HEADS * DIM))
        ops.store(wide * 2, None, mla, None, slot, "NHD", cache_dtype="fp8_ds_mla")
        ops.gather(out, small[1], slot, "NHD", cache_dtype="fp8_e4m3", scale=scale)
        latent = ops.gather_new(mla, slot, "NHD", cache_dtype="fp8_ds_mla", dtype=torch.bfloat16)
        heads = ops.gather_new(small[2], slot, "NHD", cache_dtype="int8_per_token_head", scale=scales, dtype=k.dtype)
        return (ops.gather_new(k_cache, slot, "NHD") + out, offloaded[1].amax(), block[1] * 2, latent + 1, heads + out,
                scales.amax() + scale)
    return step


def step_inputs(device, tokens, seed=1):
    torch.manual_seed(seed)
    request, position = torch.randint(3, (tokens,), device=device), torch.randperm(8 * PAGE, device=device)[:tokens]
    return [random_like(tokens, HEADS, DIM, device=device), random_like(tokens, HEADS, DIM, device=device),
            *caches(device, "NHD"), caches(device, "NHD"), [random_like(PAGE, HEADS, DIM, device=device) for _ in "ab"],
            [torch.zeros((PAGES, PAGE, HEADS, DIM), dtype=torch.uint8, device=device) for _ in range(3)],
            torch.rand(1, device=device) + 0.5, scales_like(device, "NHD"),
            torch.zeros((PAGES, PAGE, 656), dtype=torch.uint8, device=device),
            torch.randperm(PAGES, device=device)[:24].view(3, 8), request, position]


def flat(values):
    return [tensor for value in values for tensor in (value if isinstance(value, (list, tuple)) else [value])]


def compiles(device):
    step, backend = step_of(), "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for tokens in (32, 50, 51):  # after the second, torch compiles for any number of tokens
        theirs, ours = step_inputs(device, tokens), step_inputs(device, tokens)
        expected, got = step(*theirs), compiled(*ours)
        assert all(map(torch.equal, expected, got)), f"results, {tokens} tokens"
        assert all(map(torch.equal, flat(theirs), flat(ours))), f"what it wrote, {tokens} tokens"


def one_pool(device):
    """K and V of three layers in one tensor, as engines allocate them: compiled, every safe way writes what torch's
    indexing does and nothing else, and what torch.compile would get wrong is refused."""
    @torch.library.custom_op(f"kvprim_test::store_{device}", mutates_args=["kv"])
    def store_inside(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot: torch.Tensor, dim: int) -> None:
        ops.store(k, v, *parts(kv, dim), slot, "NHD")

    def parts(kv, dim):
        return kv.split((DIM, kv.shape[dim] - DIM), dim) if dim < 0 else kv.unbind(dim)

    def step(k, v, layers, k_cache, v_cache, slot, dim, scale):
        ops.store(k * 2, v + 1, layers[0], None, slot, "NHD", kv_dim=dim, k_scale=scale, v_scale=scale)
        ops.store(k * 3, None, k_cache, None, slot, "NHD", k_scale=scale)
        ops.store(v + 2, None, v_cache, None, slot, "NHD", k_scale=scale)
        store_inside(k.to(v_cache.dtype), v.to(v_cache.dtype), layers[2], slot, dim)
        return ops.gather_new(v_cache, slot, "NHD", scale=scale, dtype=v.dtype) * 2

    def stores_both(k, v, k_cache, v_cache, slot):
        ops.store(k * 2, v + 1, k_cache, v_cache, slot, "NHD")

    def slices(k, v, kv, slot, dim):
        ops.store(k * 2, v + 1, *parts(kv, dim), slot, "NHD")

    def layer_1(k, v, kvs, slot, dim):
        ops.store(k * 2, v + 1, kvs[1], None, slot, "NHD", kv_dim=dim)

    scale = torch.full((1,), 0.5, device=device)
    for dim, shape, dtype, s in ((0, (2, PAGES, PAGE, HEADS, DIM), torch.bfloat16, None),
                                 (1, (PAGES, 2, PAGE, HEADS, DIM), torch.float8_e4m3fn, scale),
                                 (-1, (PAGES, PAGE, HEADS, DIM + 32), torch.bfloat16, None)):
        before, divisor = random_like(3, *shape, device=device).to(dtype), 1 if s is None else s
        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True)
        for tokens in (30, 20, 25):  # after the first, torch compiles for any number of tokens
            slot, k = some_slots(tokens, device), random_like(tokens, HEADS, DIM, device=device)
            v, keep = k.flip(0)[..., :32 if dim < 0 else DIM].contiguous(), slot >= 0
            expected = as_bytes(before.clone())
            for layer, rows in enumerate(((k * 2, v + 1), (k * 3, v + 2), (k, v))):
                for cache, row in zip(parts(expected[layer].view(dtype), dim), rows):
                    stored = as_bytes((row if layer == 2 else row / divisor).to(dtype))
                    as_bytes(cache)[place(slot[keep], "NHD")] = stored[keep]
            for call in (step, compiled):
                layers = before.clone()
                call(k, v, list(layers), *parts(layers[1], dim), slot, dim, s)
                assert torch.equal(as_bytes(layers), expected), (dim, dtype, tokens, call is step)
        layers = before.clone().to(k.dtype)
        for call, arguments in ((stores_both, (*parts(layers[0], dim), slot)), (slices, (layers[0], slot, dim))):
            refused("k_cache and v_cache|kv_dim", torch.compile(call, fullgraph=True), k, v, *arguments)
        torch.compiler.reset()
        refused("k_cache|dynamic sizes", torch.compile(layer_1, fullgraph=True, dynamic=True), k, v, before, slot, dim)
    many, pool = caches(device, "NHD"), random_like(2, PAGES, PAGE, HEADS, DIM, device=device)
    scales = torch.zeros((2, PAGES, PAGE, HEADS), device=device)

    def quantises(k, k_cache, v_cache, scales, slot):
        ops.store(k, k, k_cache, v_cache, slot, "NHD", k_scale_cache=scales[0], v_scale_cache=scales[1])

    small = [cache.to(torch.float8_e4m3fn) for cache in many]
    refused("k_scale_cache and v_scale_cache", torch.compile(quantises, fullgraph=True), k, *small, scales, slot)
    for call in (ops.transfer, ops.copy):
        refused("dst and dst", torch.compile(call, fullgraph=True), list(pool), many)


def graphs(device):
    step, inputs = step_of(), step_inputs(device, 32)
    step(*inputs)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(*inputs)
    for seed in (2, 3):
        fresh = step_inputs(device, 32, seed)
        torch._foreach_copy_(flat(inputs), flat(fresh))
        graph.replay()
        expected = step(*fresh)
        assert all(map(torch.equal, expected, got)) and all(map(torch.equal, flat(inputs), flat(fresh))), "replay"


def pinned_temporaries(device):
    """A pinned tensor that is dropped after the call: torch must not hand its memory out before the GPU has read it."""
    to = [torch.zeros(1 << 16, device=device)]
    torch.ones(1 << 16, pin_memory=True)  # its block is free again, and the next such tensor gets it
    for call in (ops.copy, ops.transfer):
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        call(to, [torch.ones(1 << 16, pin_memory=True)])
        other = torch.full((1 << 16,), 2.0, pin_memory=True)
        assert (to[0] == 1).all(), "read after torch gave its memory to another tensor"
        del other
        to[0].zero_()


def streams(device):
    """An operator runs on the current stream, and only there."""
    (cache, _), index, side = caches(device, "NHD"), some_slots(64, device), torch.cuda.Stream()
    expected = ops.gather_new(cache, index, "NHD")
    out = torch.zeros_like(expected)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # keeps the default stream busy
    with torch.cuda.stream(side):
        ops.gather(out, cache, index, "NHD")
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "waited for the default stream"
    assert torch.equal(out.cpu(), expected.cpu())


def devices(device):
    """Tensors of a GPU that is not the current one."""
    if torch.cuda.device_count() > 1:
        cache, index = random_like(SLOTS, DIM, device="cuda:1"), torch.arange(9, device="cuda:1")
        assert torch.equal(ops.gather_new(cache, index), cache[:9]) and torch.cuda.current_device() == 0, "second GPU"
        ops.copy_addresses([(cache.data_ptr(), cache[9].data_ptr(), 2 * DIM)], "cuda:1")
        assert torch.equal(cache[9], cache[0]), "addresses of the second GPU"
        refused("index is on cuda:0", ops.gather, cache[10:19], cache, index.to("cuda:0"))


# ---- host time ------------------------------------------------------------------------------------------------------

def microseconds(call, repetitions=101, calls=50):
    """Median over repetitions of the host's time of a call, which only enqueues."""
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def print_host_times():
    """64 layers, 32 tokens."""
    layers, copied = caches("cuda", "NHD", 64), caches("cuda", "NHD", 64)
    cache, other, slot, ids = layers[0], copied[0], some_slots(32, "cuda"), some_slots(32, "cuda")
    rows, news = ([random_like(32, HEADS, DIM, device="cuda") for _ in range(64)] for _ in "ds")
    pages, token = torch.arange(PAGES, device="cuda").view(4, 10), torch.zeros(32, dtype=torch.int64, device="cuda")
    tokens = {"request": token, "position": token}
    tables = {name: torch.tensor([t.data_ptr() for t in side], device="cuda")
              for name, side in (("dst_layers", copied), ("src_layers", layers))}
    fp8, scale = [torch.zeros(cache.shape, dtype=torch.float8_e4m3fn, device="cuda") for _ in "kv"], torch.ones(
        1, device="cuda")
    both = torch.stack(layers[:2])
    latent, mla = random_like(32, 576, device="cuda"), torch.zeros((PAGES, PAGE, 656), dtype=torch.uint8, device="cuda")
    calls = {
        "gather": lambda: ops.gather(rows[0], cache, slot, "NHD"),
        "gather_new": lambda: ops.gather_new(cache, slot, "NHD"),
        "store": lambda: ops.store(rows[0], rows[1], cache, other, slot, "NHD"),
        "store, K and V in one tensor": lambda: ops.store(rows[0], rows[1], both, None, slot, "NHD", kv_dim=0),
        "transfer, 1 layer": lambda: ops.transfer([other], [cache], ids, slot, "NHD", "NHD"),
        "transfer, 64 layers by pointers": lambda: ops.transfer([other], [cache], ids, slot, "NHD", "NHD", **tables),
        "transfer, 64 layers listed": lambda: ops.transfer(copied, layers, ids, slot, "NHD", "NHD"),
        "copy, 1 tensor": lambda: ops.copy(rows[:1], news[:1]),
        "copy, 64 tensors": lambda: ops.copy(rows, news),
        "slots": lambda: ops.slots(slot, pages, PAGE, SLOTS, **tokens),
        "slots_new": lambda: ops.slots_new(pages, 32, PAGE, SLOTS, **tokens),
        "store, fp8_e4m3": lambda: ops.store(rows[0], rows[1], fp8[0], fp8[1], slot, "NHD", k_scale=scale,
                                             v_scale=scale),
        "store, fp8_ds_mla": lambda: ops.store(latent, None, mla, None, slot, "NHD", cache_dtype="fp8_ds_mla"),
        "gather by torch's dispatcher": lambda: ops.ops.gather(rows[0], cache, slot, "NHD"),
        "store by torch's dispatcher": lambda: ops.ops.store(rows[0], rows[1], cache, other, slot, "NHD"),
        "copy, 64 tensors, by it": lambda: ops.ops.copy(rows, news),
        "torch.index_select": lambda: torch.index_select(cache, 0, token),
        "torch._foreach_copy_, 64 tensors": lambda: torch._foreach_copy_(rows, news)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us of the host per call from Python, medians")
    for name, call in calls.items():
        print(f"  {name:34} {microseconds(call):6.2f}", flush=True)


class Dispatched:
    """Sends all calls through torch's dispatcher."""

    def __enter__(self):
        ops._compiling = lambda: True

    def __exit__(self, *_):
        ops._compiling = torch.compiler.is_dynamo_compiling


class ByDLPack:
    """Describes tensors as with a torch in whose objects nothing is found."""

    def __enter__(self):
        found = list(ops._setup)
        found[4] = found[6] = 1
        assert not ops._eager.setup(*found)

    def __exit__(self, *_):
        ops._eager.setup(*ops._setup)


def prefixes(device):
    """Needs no torch: lists, arrays, and numpy's arrays if there is numpy."""
    a, b = list(range(1000)), list(range(700)) + [-1]
    for kind in ("list", "i", "q", "int32", "int64"):
        if kind == "list":
            make = list
        elif len(kind) == 1:
            make = lambda values: array.array(kind, values)
        elif numpy is None:
            continue
        else:
            make = lambda values: numpy.array(values, dtype=kind)
        assert ops.prefix(make(a), make(b)) == 700 and ops.prefix(make(b), make(b[:9])) == 9, kind
        assert ops.prefix(make(a), make([])) == 0, kind
    assert ops.prefix(array.array("q", a), tuple(b)) == 700, "an array and a tuple"
    refused("4 bytes|8", ops.prefix, array.array("i", a), array.array("q", b))
    refused("a is an array of 'd'", ops.prefix, array.array("d", a), b)
    refused("b is [0, 0.5]: ", ops.prefix, a, [0, 0.5])
    refused("a is [9223372036854775808]: ", ops.prefix, [1 << 63], b)
    assert ops.prefix(bytes(range(16)), a) == 16, "each byte is a token"
    if numpy:
        refused("b is <f8", ops.prefix, numpy.array(a), numpy.array(b, dtype="float64"))
        refused("a is <i8", ops.prefix, numpy.array(a)[::2], numpy.array(b))
        swapped = numpy.array(a).astype(numpy.dtype("int64").newbyteorder())
        refused("a is >i8" if sys.byteorder == "little" else "a is <i8", ops.prefix, swapped, numpy.array(a))
    folder = ops.include()
    assert all(os.path.exists(os.path.join(folder, name)) for name in ("kvprim.h", "kvprim_cuda.cuh", "kvprim_nccl.h"))


def no_tensors(device):
    """Without torch and TVM-FFI an operator says what it needs."""
    code = ("import sys; sys.modules['torch'] = sys.modules['tvm_ffi'] = None; import kvprim; "
            "assert kvprim.prefix([1, 2], [1, 3]) == 1; kvprim.copy([], [])")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "RuntimeError: kvprim.copy needs torch or TVM-FFI: " in shown, shown


def block_keys(device):
    """Needs no torch. The engines' own calls, with what Python has."""
    sha256 = lambda data: hashlib.sha256(data).digest()
    tokens = [7 * i * i for i in range(70)]
    extra = {1: (("lora", "a", "b"), ("mm", "c" * 64, -3)), 3: (("mm", "d", 5),)}

    def vllm(key, tokens, extra={}):
        for i in range(len(tokens) // 16):
            key = sha256(pickle.dumps((key, tuple(tokens[16 * i:16 * i + 16]), extra.get(i)), pickle.HIGHEST_PROTOCOL))
            yield key

    want = list(vllm(sha256(pickle.dumps("vllm-none-hash", pickle.HIGHEST_PROTOCOL)), tokens))
    makes = [list, tuple, lambda values: array.array("i", values), lambda values: array.array("q", values)]
    makes += [lambda values: numpy.array(values, dtype="int32"), numpy.array] if numpy else []
    makes += [lambda values: torch.tensor(values, dtype=torch.int32), torch.tensor] if torch else []
    for make in makes:
        assert ops.keys(make(tokens), 16, "vllm_sha256") == want, make
    assert ops.keys(tokens[32:], 16, "vllm_sha256", parent=want[1]) == want[2:]
    packed = ops.keys(tokens, 16, "vllm_sha256", packed=True)
    assert packed == b"".join(want) and ops.keys(tokens[32:], 16, "vllm_sha256", parent=packed[32:64]) == want[2:]
    negative = [-token for token in tokens]
    assert ops.keys(negative, 16, "vllm_sha256", b"seed", extra) == list(vllm(b"seed", negative, extra))
    pages = [struct.pack("<16I", *tokens[i:i + 16]) for i in (0, 16)]
    pairs = struct.pack("<8I", *(token for pair in zip(tokens[:4], tokens[1:5]) for token in pair))
    assert ops.keys(tokens[:40], 16, "sglang") == [sha256(pages[0]), sha256(sha256(pages[0]) + pages[1])]
    assert ops.keys(tokens[:40], 16, "sglang", parent=b"") == ops.keys(tokens[:40], 16, "sglang")
    assert ops.keys(tokens[:5], 4, "sglang", bigrams=True) == [sha256(pairs)] and ops.keys(tokens, 71, "sglang") == []
    digest = sha256(b"image")
    assert ops.keys(tokens[:16], 16, "trtllm", extra={(0, 2): digest}) == [
        sha256(sha256(b"\0") + pages[0][:8] + digest + pages[0][12:])]
    refused("rule is 'md5', none of vllm_sha256", ops.keys, tokens, 16, "md5")
    refused("block_tokens is 0, less than 1", ops.keys, tokens, 0, "sglang")
    refused("tokens[1] is -7, less than 0", ops.keys, negative, 16, "sglang")
    refused("seed is 18446744073709551616, ", ops.keys, tokens, 16, "dynamo", seed=1 << 64)
    refused("parent is '", ops.keys, tokens, 16, "sglang", parent="ff" * 32)
    refused("extra[0] is 'a', not bytes", ops.keys, tokens, 16, "vllm_sha256", extra={0: "a"})
    refused("extra has a key 18446744073709551616", ops.keys, tokens, 16, "vllm_sha256", extra={1 << 64: b"N"})
    refused("extra has a key 'x'", ops.keys, tokens, 16, "vllm_sha256", extra={1: b"N", "x": b"N"})
    refused("tokens is an array of 'd'", ops.keys, array.array("d", tokens), 16, "sglang")


class OfDLPack:
    """What numpy does not make: several numbers in an element, and data that begins at an offset."""
    def __init__(self, array, code, bits, lanes, elements, offset):
        self.sizes, self.array = (ctypes.c_int64 * 2)(elements, 1), array
        at = ctypes.addressof(self.sizes)
        self.tensor = struct.pack("<QiiiBBHQQQQQ", array.ctypes.data - offset, 1, 0, 1, code, bits, lanes, at, at + 8,
                                  offset, 0, 0)

    def __dlpack__(self, **_):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        return capsule(self.tensor, b"dltensor", None)

    def __dlpack_device__(self):
        return 1, 0


def ffi_elements(device):
    source, out = numpy.arange(1, 65, dtype=numpy.uint8), numpy.zeros(64, dtype=numpy.uint8)
    for code, bits, lanes, elements in ((17, 4, 2, 64), (2, 32, 4, 4), (1, 8, 1, 64)):
        out[:], kept = 0, [OfDLPack(one, code, bits, lanes, elements, at) for one, at in ((out, 0), (source, 48))]
        ffi.copy([tvm_ffi.from_dlpack(kept[0])], [tvm_ffi.from_dlpack(kept[1])])
        assert (out == source).all(), f"{lanes} x {bits} bits"
    for bits, lanes in (4, 1), (8, 0):
        few = OfDLPack(out, 17, bits, lanes, 64, 0)
        refused(f"not {lanes} x {bits} bits", lambda: ffi.copy([tvm_ffi.from_dlpack(few)], [tvm_ffi.from_dlpack(few)]))
    index, cache = OfDLPack(out, 0, 8, 4, 4, 0), tvm_ffi.from_dlpack(source.reshape(16, 1, 4))
    refused("index is opaque32", lambda: ffi.gather(
        tvm_ffi.from_dlpack(out.reshape(16, 1, 4)), cache, tvm_ffi.from_dlpack(index), "rows", "auto", None, 0, False,
        None, False, None))
    for dtype in ("fp8", "fp8_per_token_head"):
        rows, cache, slot, scales = (tvm_ffi.from_dlpack(one) for one in (
            numpy.ones((2, 1, 4), dtype=numpy.float32), numpy.zeros((0, 4, 1, 4), dtype=numpy.uint8),
            numpy.zeros(2, dtype=numpy.int32), numpy.zeros((0, 4, 1), dtype=numpy.float32)))
        ffi.store(rows, None, cache, None, slot, "NHD", dtype, None, None, None, scales, None, False, False, 0.0, None,
                  0, None, False)


def ffi_operators(device):
    """TVM-FFI's module with tensors of numpy, as `ffi` and, if there is no torch, as the functions of kvprim."""
    of = tvm_ffi.from_dlpack
    rng = numpy.random.default_rng(1)
    cache, other = (rng.standard_normal((PAGES, PAGE, HEADS, DIM), dtype=numpy.float32) for _ in "kv")
    k, v = (rng.standard_normal((30, HEADS, DIM), dtype=numpy.float32) for _ in "kv")
    slot, count = rng.permutation(SLOTS)[:30], numpy.zeros(1, dtype=numpy.int32)
    expected = cache.copy(), other.copy()
    for into, rows in zip(expected, (k, v)):
        into.reshape(SLOTS, HEADS, DIM)[slot[:20]] = rows[:20]
    slot[20:] = -1
    slot[29] = SLOTS
    none = (None,) * 4
    ffi.store(of(k), of(v), of(cache), of(other), of(slot), "NHD", "auto", None, *none, False, False, 0.0, None, 0,
              of(count), False)
    assert (cache == expected[0]).all() and (other == expected[1]).all() and count[0] == 1, "store"
    out, half = numpy.ones_like(k), numpy.ones(k.shape, dtype=numpy.float16)
    ffi.gather(of(out), of(cache), of(slot), "NHD", "auto", None, 0, False, None, False, None)
    assert (out[:20] == k[:20]).all() and not out[20:].any(), "gather"
    ffi.gather(of(half), of(cache), of(slot), "NHD", "auto", None, 0, True, None, False, None)
    assert (half[:20] == k[:20].astype(numpy.float16)).all() and (half[20:] == 1).all(), "converts, keeps padding"
    none_of = lambda *shape, dtype=numpy.float32: of(numpy.zeros(shape, dtype=dtype))  # numpy says strides of 0
    ffi.gather(none_of(0, HEADS, DIM), of(cache), none_of(0, dtype=numpy.int32), "NHD", "auto", None, 0, False, None,
               False, None)
    ffi.store(none_of(0, HEADS, DIM), None, of(cache), None, none_of(0, dtype=numpy.int32), "NHD", "auto", None, *none,
              False, False, 0.0, None, 0, None, False)
    moved = [numpy.zeros_like(cache) for _ in "ab"]
    ffi.transfer([of(one) for one in moved], [of(cache), of(other)], None, None, "rows", "rows", None, None, False, 0,
                 None, "auto", "auto", None, None, False)
    assert (moved[0] == cache).all() and (moved[1] == other).all(), "transfer"
    ffi.copy([of(moved[0]), of(out)], [of(other), of(v)])
    assert (moved[0] == other).all() and (out == v).all(), "copy"
    ffi.unpack(of(out), of(k), of(numpy.array([[0, 512, 1024]])))
    assert (out.ravel()[128:384] == k.ravel()[:256]).all(), "unpack"
    pages, request = rng.permutation(PAGES)[:24].reshape(3, 8), rng.integers(3, size=30)
    position = rng.integers(8 * PAGE, size=30)
    ffi.slots(of(slot), of(pages), PAGE, SLOTS, of(request), of(position), None, None, None, None, False)
    assert (slot == pages[request, position // PAGE] * PAGE + position % PAGE).all(), "slots"
    starts, slot[:] = numpy.array([0, 8, 16, 24]), 0
    ffi.slots(of(slot), of(pages.ravel()), PAGE, SLOTS, of(request), of(position), None, None, of(starts), None, False)
    assert (slot == pages[request, position // PAGE] * PAGE + position % PAGE).all(), "slots, page_starts"
    for dtype in (numpy.int32, numpy.int64):
        a = numpy.arange(1000, dtype=dtype)
        b = numpy.where(a == 700, -1, a).astype(dtype)
        assert ffi.prefix(of(a), of(b)) == 700 and ffi.prefix(of(a[5:]), of(b[5:])) == 695, "prefix"
    refused("b is float64", ffi.prefix, of(a), of(a.astype(float)))
    refused("b has stride 2", ffi.prefix, of(a), of(a[::2]))
    refused("a is int32|b int64", ffi.prefix, of(a.astype(numpy.int32)), of(a))
    refused("index is float32", ffi.gather, of(out), of(cache), of(k), "NHD", "auto", None, 0, False, None, False,
            None)
    refused("KVPRIM_ERROR_OVERLAP", ffi.copy, [of(out)], [of(out)])
    refused("argument is missing", ffi.copy, [of(out)])
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_gatherv", "all_to_all", "all_to_allv",
                       "broadcast", "send", "recv", "all_reduce_norm"):
        refused("no kvprim.Communicator in this process", getattr(ffi, collective), 0, of(out), None, "sum")
    if torch is None:
        slot = of(rng.permutation(SLOTS)[:30])
        ops.store(of(k), None, of(cache), None, slot, "NHD")
        ops.gather(of(out), of(cache), slot, "NHD")
        assert (out == k).all(), "kvprim's functions, without torch"
        assert ops.prefix(of(a), of(b)) == 700, "prefix of TVM-FFI's tensors"


def tensor_prefixes(device):
    for dtype in (torch.int32, torch.int64):
        a = torch.arange(1000, dtype=dtype)
        b = a.clone()
        b[700] = -1
        assert ops.prefix(a, b) == 700 and ops.prefix(a[5:], b[5:]) == 695 and ops.prefix(a, a[:0]) == 0, dtype
    refused("a is float32", ops.prefix, a.float(), b)
    refused("a is int32|b int64", ops.prefix, a.int(), b)
    refused("b|stride 2|contiguous", ops.prefix, a, b[::2])
    refused("b has 2 dimensions", ops.prefix, a, b.view(2, 500))
    keys = [a[:5].int(), a[:50].int(), b[:9].int()]
    assert ops.prefix_longest(a.int(), keys) == (1, 50) and ops.prefix_longest(a[3:].int(), keys) == (None, 0)
    refused("int64", ops.prefix_longest, a, keys)
    if device == "cuda":
        refused("a is on cuda:0", ops.prefix, a.cuda(), a)


def imports(device):
    """What `import kvprim` takes beyond torch, and that its library is found from elsewhere."""
    code = ("import time; import torch; t = time.perf_counter(); import kvprim; print(time.perf_counter() - t); "
            "assert torch.ops.kvprim.gather")
    seconds = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/",
                                   env={**os.environ, "PYTHONPATH": os.pathsep.join(
                                       os.path.abspath(path or ".") for path in sys.path)}).stdout)
    print(f"  import kvprim: {seconds:.3f} s beyond torch's")


def run_tests():
    """Returns how many failed."""
    everywhere = (gathers, stores, transfers, copies, every_conversion, scaled_caches, computed_scales, four_bits,
                  whole_formats, scaled_transfers, slots_of, fetches, refusals)
    of_graphs, on_gpu = (opchecks, compiles, one_pool), (graphs, pinned_temporaries, streams, devices)
    runs, skipped = [("lists and arrays", (prefixes, no_tensors, block_keys), None)], 0
    if numpy and tvm_ffi:
        runs += [("TVM-FFI", (ffi_operators, ffi_elements), None)]
    else:
        print("skip TVM-FFI: python3 has no numpy or no tvm_ffi, or kvprim was built without it")
        skipped += 1
    if torch is None:
        print("skip operators: python3 has no torch")
        skipped += 1
    else:
        runs += [("tensors", (imports,), None), ("cpu", (tensor_prefixes, layouts_by_name, *everywhere), None),
                 ("cpu, by DLPack", (gathers, stores, copies), ByDLPack),
                 ("cpu, dispatched", everywhere + of_graphs, Dispatched)]
        if torch.cuda.is_available() and ops.has_cuda:
            runs += [("cuda", (tensor_prefixes, layouts_by_name, *everywhere, *on_gpu), None),
                     ("cuda, by DLPack", (gathers, stores, copies), ByDLPack),
                     ("cuda, dispatched", everywhere + of_graphs + on_gpu, Dispatched)]
        else:
            print("skip operators on a GPU:", "torch finds none" if ops.has_cuda else "kvprim was built without nvcc")
            skipped += 1
    failed = passed = 0
    for where, tests, way in runs:
        for test in tests:
            if torch:
                torch.manual_seed(1)
            try:
                with way() if way else contextlib.nullcontext():
                    test(where.partition(",")[0])
                passed += 1
                print(f"ok {test.__name__}, {where}", flush=True)
            except Exception as error:  # whatever it is, the others run
                failed += 1
                print(f"FAIL {test.__name__}, {where}: {type(error).__name__}: {error}", flush=True)
    if any(where == "cuda" for where, _, _ in runs):
        print_host_times()
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed


if __name__ == "__main__":
    with torch.no_grad() if torch else contextlib.nullcontext():
        sys.exit(run_tests() != 0)

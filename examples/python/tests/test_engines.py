# SPDX-License-Identifier: MIT
"""Tests kvprim.engines against plain torch, with the engines' names, shapes and dtypes.

    PYTHONPATH=build/python python3 examples/python/tests/test_engines.py

On the CPU, where kvprim's host functions serve, and on a GPU if there is one. init_pynccl: test_collectives.py.
"""
import sys
import types

import kvprim
from test_kvprim import bits, computed_scale, dequantized, microseconds, quantized, refused, torch

PAGES, PAGE, HEADS, DIM, LAYERS = 24, 16, 4, 64, 3
TOKENS = PAGES * PAGE


def rows(*shape, device):
    return torch.randn(shape, device=device).to(torch.bfloat16)


def some(count, device, padded=True, dtype=None):
    slot = torch.randperm(TOKENS, device=device)[:count].to(dtype or torch.int64)
    if padded:
        slot[::5] = -1
    return slot


def scattered(cache, slot, new):
    """cache [pages, page, ...] with rows slot = those of new, where slot >= 0."""
    expected, keep = cache.clone(), slot >= 0
    expected.view(-1, *cache.shape[2:])[slot[keep].long()] = new[:slot.shape[0]][keep]
    return expected


def minisgl(device):
    from kvprim.engines.minisgl import fast_compare_key, indexing, store_cache
    k, v, slot = rows(50, HEADS * DIM, device=device), rows(50, HEADS * DIM, device=device), some(50, device, False)
    k_cache, v_cache = (rows(TOKENS, HEADS, DIM, device=device) for _ in "kv")
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache, new in zip(expected, (k, v)):
        cache[slot] = new.view(50, HEADS, DIM)
    store_cache(k_cache, v_cache, slot.int(), k, v)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1]), "store_cache"
    weights, ids = rows(100, 256, device=device), torch.randint(0, 100, (70,), device=device, dtype=torch.int32)
    assert torch.equal(indexing(weights, ids), weights[ids]), "indexing"
    out = torch.ones((70, 256), dtype=weights.dtype, device=device)
    ids = torch.randint(0, 300, (70,), device=device)
    inside = (ids >= 100) & (ids < 180)
    assert indexing(weights, ids, output=out, vocab_range=(100, 80)) is out
    expected = torch.where(inside[:, None], weights[(ids - 100).clamp(0, 99)], torch.zeros_like(out))
    assert torch.equal(out, expected), "vocab_range"
    a = torch.arange(100)
    assert fast_compare_key(a, torch.cat((a[:70], a[:9]))) == 70 and fast_compare_key(a.int(), a[:5].int()) == 5
    refused("a is float32", fast_compare_key, a.float(), a)
    refused("b|stride 2", fast_compare_key, a, a[::2])


def nanovllm(device):
    from kvprim.engines.nanovllm import store_kvcache
    qkv = rows(40, 3, HEADS, DIM, device=device)
    k, v, slot = qkv[:, 1], qkv[:, 2], some(40, device, dtype=torch.int32)
    k_cache, v_cache = (rows(PAGES, PAGE, HEADS, DIM, device=device) for _ in "kv")
    expected = scattered(k_cache, slot, k), scattered(v_cache, slot, v)
    store_kvcache(k, v, k_cache, v_cache, slot)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


def flashinfer(device):
    from kvprim.engines.flashinfer import append_paged_kv_cache, append_paged_mla_kv_cache
    lengths = [33, 0, 5, 64]  # of requests before the call; each gets some tokens
    new = [3, 1, 20, 2]
    pages = [-(-(a + b) // PAGE) for a, b in zip(lengths, new)]
    kv_indptr = torch.tensor([sum(pages[:r]) for r in range(5)], dtype=torch.int32, device=device)
    kv_indices = torch.randperm(PAGES, device=device)[:sum(pages) + 3].int()  # longer, as engines' buffers are
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor(new)).int().to(device)
    positions = torch.cat([torch.arange(a, a + b) for a, b in zip(lengths, new)]).int().to(device)
    last = torch.tensor([(a + b - 1) % PAGE + 1 for a, b in zip(lengths, new)], dtype=torch.int32, device=device)
    page = kv_indices[kv_indptr[batch] + positions // PAGE].long()
    slot = page * PAGE + positions % PAGE
    k, v = (rows(sum(new), HEADS, DIM, device=device) for _ in "kv")
    arguments = (batch, positions), (kv_indices, kv_indptr, last)
    both = rows(PAGES, 2, PAGE, HEADS, DIM, device=device)
    expected = torch.stack((scattered(both[:, 0], slot, k), scattered(both[:, 1], slot, v)), 1)
    pair = both[:, 0].clone(), both[:, 1].clone()
    heads_first = both.transpose(2, 3).contiguous()
    append_paged_kv_cache(k, v, *arguments[0], both, *arguments[1])
    assert torch.equal(both, expected), "NHD, one tensor"
    append_paged_kv_cache(k, v, *arguments[0], pair, *arguments[1], "NHD")
    assert torch.equal(torch.stack(pair, 1), expected), "a pair"
    append_paged_kv_cache(k, v, *arguments[0], heads_first, *arguments[1], kv_layout="HND")
    assert torch.equal(heads_first.transpose(2, 3), expected), "HND"
    ckv, kpe = rows(PAGES, PAGE, 512, device=device), rows(PAGES, PAGE, 64, device=device)
    new_ckv, new_kpe = rows(sum(new), 512, device=device), rows(sum(new), 64, device=device)
    expected = scattered(ckv, slot, new_ckv), scattered(kpe, slot, new_kpe)
    append_paged_mla_kv_cache(new_ckv, new_kpe, *arguments[0], ckv, None, *arguments[1])
    append_paged_mla_kv_cache(new_ckv, new_kpe, *arguments[0], None, kpe, *arguments[1])
    assert torch.equal(ckv, expected[0]) and torch.equal(kpe, expected[1]), "MLA"
    append_paged_mla_kv_cache(new_ckv * 2, new_kpe * 2, *arguments[0], ckv, kpe, *arguments[1])
    assert torch.equal(ckv, scattered(ckv, slot, new_ckv * 2)) and torch.equal(kpe, scattered(kpe, slot, new_kpe * 2))


E4M3 = torch.float8_e4m3fn if torch else None


def vllm_stores(device):
    from kvprim.engines import vllm as ops
    qkv = rows(45, 3, HEADS, DIM, device=device) * 8
    k, v, slot = qkv[:, 1], qkv[:, 2], some(40, device)
    one, each = torch.full((1,), 0.37, device=device), torch.rand(HEADS, device=device) + 0.1
    for kind, scale in (("auto", one), ("fp8", one), ("fp8_e4m3", each), ("fp8_e5m2", one)):
        dtype = torch.uint8 if kind != "auto" else torch.bfloat16
        stored = {"fp8_e5m2": torch.float8_e5m2}.get(kind, E4M3)
        make = (lambda x: x) if kind == "auto" else (
            lambda x: quantized(x, stored, scale if scale.numel() == 1 else scale[:, None]))
        whole = torch.zeros((PAGES, 2, PAGE, HEADS, DIM), dtype=dtype, device=device)
        expected = [scattered(whole[:, 0], slot, make(k)), scattered(whole[:, 0], slot, make(v))]
        ops.reshape_and_cache_flash(k, v, whole[:, 0], whole[:, 1], slot, kind, scale, scale)
        assert torch.equal(whole[:, 0], expected[0]) and torch.equal(whole[:, 1], expected[1]), ("flash", kind)
        head_first = torch.zeros((PAGES, HEADS, PAGE, DIM), dtype=dtype, device=device)
        caches = [head_first.clone().transpose(1, 2) for _ in "kv"]
        ops.reshape_and_cache_flash(k, v, *caches, slot, kind, scale, scale)
        assert all(map(torch.equal, caches, expected)), ("flash, HND", kind)
        if scale.numel() == 1:
            x = 16 // whole.element_size()
            key_cache = torch.zeros((PAGES, HEADS, DIM // x, PAGE, x), dtype=dtype, device=device)
            value_cache = torch.zeros((PAGES, HEADS, DIM, PAGE), dtype=dtype, device=device)
            ops.reshape_and_cache(k, v, key_cache, value_cache, slot, kind, scale, scale)
            assert torch.equal(key_cache.permute(0, 3, 1, 2, 4).reshape(expected[0].shape), expected[0]), ("x", kind)
            assert torch.equal(value_cache.permute(0, 3, 1, 2), expected[1]), ("x", kind)
            apart = value_cache.mT.contiguous().mT  # could only be stored to by way of a copy
            refused("view", ops.reshape_and_cache, k, v, key_cache, apart, slot, kind, scale, scale)
        kv_c, k_pe = rows(45, 512, device=device), rows(45, 64, device=device)
        if scale.numel() == 1:
            mla = torch.zeros((PAGES, PAGE, 576), dtype=dtype, device=device)
            expected = scattered(mla, slot, make(torch.cat((kv_c, k_pe), 1)))
            ops.concat_and_cache_mla(kv_c, k_pe, mla, slot, kind, scale)
            assert torch.equal(mla, expected), ("mla", kind)
    from_blocks = torch.randn(6, PAGE, 32, device=device) * 3
    stored, back = torch.zeros(from_blocks.shape, dtype=torch.uint8, device=device), torch.zeros_like(from_blocks)
    ops.convert_fp8(stored, from_blocks, 0.25, "fp8")
    assert torch.equal(stored, quantized(from_blocks, E4M3, torch.full((), 0.25, device=device))), "convert_fp8"
    ops.convert_fp8(back, stored, 0.25)
    assert torch.equal(back, stored.view(E4M3).float() * 0.25), "and back"


def vllm_mla(device):
    """fp8_ds_mla, the indexer's cache, and their gathers."""
    from kvprim.engines import vllm as ops
    kv_c, k_pe, slot = rows(40, 512, device=device), rows(40, 64, device=device), some(40, device)
    ds, one = torch.zeros((PAGES, PAGE, 656), dtype=torch.uint8, device=device), torch.ones(1, device=device)
    ops.concat_and_cache_mla(kv_c, k_pe, ds, slot, "fp8_ds_mla", one)
    tiles = kv_c.view(40, 4, 128)
    scale = computed_scale(tiles, E4M3, 1e-4, True)
    row = torch.cat((quantized(tiles, E4M3, scale[..., None]).flatten(1), scale.view(torch.uint8), k_pe.view(
        torch.uint8)), 1)
    assert torch.equal(ds, scattered(torch.zeros_like(ds), slot, row)), "fp8_ds_mla"
    lengths = torch.tensor([20, 0, 37], dtype=torch.int32)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    table = torch.randperm(PAGES, device=device)[:12].view(3, 4).int()
    starts = torch.tensor([5, 3, 16], dtype=torch.int32, device=device)
    request = torch.repeat_interleave(torch.arange(3), lengths).to(device)
    for begin in (None, starts):
        position = torch.arange(57, device=device) - cu[request] + (0 if begin is None else begin[request])
        where = table[request, position // PAGE].long(), position % PAGE
        out = torch.full((60, 576), 7, dtype=torch.bfloat16, device=device)
        latent = rows(PAGES, PAGE, 576, device=device)
        ops.cp_gather_cache(latent, out, table, cu, 3, begin)
        assert torch.equal(out[:57], latent[where]) and (out[57:] == 7).all(), "cp_gather_cache"
        small = quantized(latent, E4M3, torch.full((), 0.5, device=device))
        out = torch.full((60, 576), 7, dtype=torch.bfloat16, device=device)
        ops.gather_and_maybe_dequant_cache(small, out, table, cu, request.int(), 57, "fp8", one * 0.5, begin)
        assert torch.equal(bits(out[:57]), dequantized(small[where].view(E4M3), out.dtype, one * 0.5)) and (
            out[57:] == 7).all(), "gather_and_maybe_dequant_cache"
        ops.gather_and_maybe_dequant_cache(latent, out, table, cu, request.int(), 57, "auto", one, begin)
        assert torch.equal(out[:57], latent[where]), "without dequantising"
        slots = table.long().flatten().repeat_interleave(PAGE) * PAGE + torch.arange(PAGE, device=device).repeat(12)
        ops.concat_and_cache_mla(rows(192, 512, device=device), rows(192, 64, device=device), ds, slots, "fp8_ds_mla",
                                 one)
        out = torch.zeros((57, 576), dtype=torch.bfloat16, device=device)
        ops.cp_gather_and_upconvert_fp8_kv_cache(ds, out, table, cu[:3], 3, begin)
        row = ds[where]
        values = row[:, :512].view(E4M3).float().view(57, 4, 128) * row[:, 512:528].view(torch.float32)[..., None]
        expected = torch.cat((values.flatten(1).to(out.dtype), row[:, 528:].view(out.dtype)), 1)
        assert torch.equal(out, expected), "cp_gather_and_upconvert_fp8_kv_cache"
    k, whole = rows(192, 128, device=device), torch.zeros((PAGES, PAGE, 132), dtype=torch.uint8, device=device)
    for kind in ("ue8m0", "auto"):
        ops.indexer_k_quant_and_cache(k, whole, slots, 128, kind)
        scale = computed_scale(k, E4M3, 1e-4 / 448, kind == "ue8m0")
        values, scales = whole.view(PAGES, -1)[:, :128 * PAGE], whole.view(PAGES, -1)[:, 128 * PAGE:]
        assert torch.equal(values.unflatten(1, (PAGE, 128))[slots // PAGE, slots % PAGE], quantized(
            k, E4M3, scale[:, None])), "indexer_k_quant_and_cache"
        dst_k, dst_scale = (torch.zeros((57, n), dtype=torch.uint8, device=device) for n in (128, 4))
        ops.cp_gather_indexer_k_quant_cache(whole, dst_k.view(E4M3), dst_scale, table, cu)
        position = torch.arange(57, device=device) - cu[request]
        page = table[request, position // PAGE].long()
        assert torch.equal(dst_k, values.unflatten(1, (PAGE, 128))[page, position % PAGE]), "values"
        assert torch.equal(dst_scale, scales.unflatten(1, (PAGE, 4))[page, position % PAGE]), "scales"
    refused("quant_block_size is 64", ops.indexer_k_quant_and_cache, k, whole, slots, 64, "ue8m0")


def vllm_others(device):
    from kvprim.engines import vllm as ops
    pin = device == "cuda"
    src, dst = rows(PAGES, PAGE, HEADS, DIM, device=device), torch.zeros(
        (PAGES, PAGE, HEADS, DIM), dtype=torch.bfloat16, pin_memory=pin)
    mapping, size = torch.tensor([[3, 9], [0, 1], [23, 2]]), src[0].nbytes
    ops.swap_blocks(src, dst, size, mapping)
    if pin:
        torch.cuda.synchronize()
    assert torch.equal(dst[mapping[:, 1]], src[mapping[:, 0]].cpu()) and not dst[4].any(), "swap_blocks"
    if device == "cuda":
        pointers = [torch.tensor([t[i].data_ptr() for i in (1, 5)]) for t in (src, dst)]
        ops.swap_blocks_batch(*pointers, torch.tensor([size, size]))
        torch.cuda.synchronize()
        assert torch.equal(dst[[1, 5]], src[[1, 5]].cpu()), "swap_blocks_batch"
    nope, pe = rows(HEADS, 20, 512, device=device).transpose(0, 1), rows(20, HEADS, 64, device=device)
    out = torch.zeros((20, HEADS, 576), dtype=torch.bfloat16, device=device)
    ops.concat_mla_q(nope, pe, out)
    assert torch.equal(out, torch.cat((nope, pe), -1)), "concat_mla_q"
    for neox in (True, False):
        positions, table = torch.randint(0, 100, (20,), device=device), torch.randn(100, 64, device=device)
        k_pe, kv_c, slot = rows(20, 64, device=device), rows(20, 512, device=device), some(20, device)
        cache = torch.zeros((PAGES, PAGE, 576), dtype=torch.bfloat16, device=device)
        expected = []
        for x in (pe, k_pe[:, None]):
            cos, sin = (part[:, None] for part in table[positions].chunk(2, -1))
            a, b = x.float().chunk(2, -1) if neox else (x.float()[..., ::2], x.float()[..., 1::2])
            turned = a * cos - b * sin, b * cos + a * sin
            expected.append((torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)).to(x.dtype))
        ops.concat_and_cache_mla_rope_fused(positions, pe, k_pe, kv_c, table, neox, slot, cache, "auto",
                                            torch.ones(1, device=device))
        assert torch.equal(pe, expected[0]) and torch.equal(k_pe, expected[1][:, 0]), ("rope", neox)
        row = torch.cat((kv_c, k_pe), 1)
        assert torch.equal(cache, scattered(torch.zeros_like(cache), slot, row)), ("rope, store", neox)


def sglang(device):
    from kvprim.engines import sglang as ops
    (k, v), slot = (rows(30, HEADS * DIM, device=device) for _ in "kv"), some(30, device, False)
    caches = [rows(TOKENS, HEADS * DIM, device=device) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    for cache, new in zip(expected, (k, v)):
        cache[slot] = new
    ops.store_cache(k, v, *caches, slot, row_bytes=HEADS * DIM * 2, num_split=2)
    assert all(map(torch.equal, caches, expected)), "store_cache"
    slot[3] = TOKENS - 1
    ops.store_cache(k * 2, v * 2, *caches, slot, size_limit=TOKENS - 1)
    keep = slot < TOKENS - 1
    for cache, new in zip(expected, (k, v)):
        cache[slot[keep]] = 2 * new[keep]
    assert all(map(torch.equal, caches, expected)), "size_limit"
    ops.set_kv_buffer_kernel(*caches, slot, k, v)
    assert torch.equal(caches[0][slot], k) and torch.equal(caches[1][slot], v), "set_kv_buffer_kernel"
    for scales, numbers in (((None, None), {}), ((torch.full((1,), 0.3, device=device),) * 2, {}),
                            ((None, None), {"k_inv_scale": 2.5, "v_inv_scale": 0.5})):
        small = [torch.zeros((TOKENS, HEADS * DIM), dtype=torch.uint8, device=device) for _ in "kv"]
        ops.store_cache_quant(k, v, *(one.view(E4M3) for one in small), slot, *scales, **numbers)
        for cache, new, scale, inverse in zip(small, (k, v), scales, (2.5, 0.5)):
            value = quantized(new, E4M3, scale) if not numbers else quantized(new.float() * inverse, E4M3)
            assert torch.equal(cache[slot], value), "store_cache_quant"
    refused("tensor and as a number", ops.store_cache_quant, k, v, *small, slot, torch.ones(1), v_inv_scale=2.0)
    key = lambda tokens, extra=None: types.SimpleNamespace(token_ids=tokens, extra_key=extra)
    a, b = list(range(100)), list(range(70)) + [-1] * 30
    assert ops._key_match_page_size1(key(a), key(b)) == 70 and ops._key_match_paged(key(a), key(b), 16) == 64
    assert ops._key_match_page_size1(a, b[:5]) == 5 and ops._key_match_paged(key(a, "x"), key(a, "x"), 4) == 100
    try:
        ops._key_match_paged(key(a, "x"), key(a, "y"), 4)
        assert False, "keys of different extra_key"
    except ValueError as error:
        assert "extra_key" in str(error)


def sglang_kvcacheio(device):
    from kvprim.engines import sglang_kvcacheio as ops
    pin, item = device == "cuda", HEADS * DIM * 2
    gpu = lambda: [[rows(TOKENS, HEADS, DIM, device=device) for _ in range(LAYERS)] for _ in "kv"]
    host = lambda *shape: torch.randn(shape).to(torch.bfloat16).pin_memory() if pin else rows(*shape, device="cpu")
    layers, zeros = gpu(), lambda like: [[torch.zeros_like(one) for one in side] for side in like]
    src = torch.cat([torch.arange(PAGE) + PAGE * page for page in (3, 0, 7)])
    dst = torch.cat([torch.arange(PAGE) + PAGE * page for page in (5, 6, 1)])
    on = src.to(device), dst.to(device)
    wait = torch.cuda.synchronize if pin else lambda: None
    same = lambda got, expected: wait() or torch.equal(got.cpu(), expected.cpu())
    addresses = lambda side: torch.tensor([one.data_ptr() for one in side], device=device).view(torch.uint64)

    into = zeros(layers)
    ops.transfer_kv_per_layer(layers[0][1], into[0][1], layers[1][1], into[1][1], *on, item)
    assert all(same(into[s][1][dst], layers[s][1][src]) for s in (0, 1)) and not into[0][1][0].any(), "per_layer"
    ops.transfer_kv_per_layer_mla(layers[0][2], into[0][2], *on, item)
    assert same(into[0][2][dst], layers[0][2][src]), "per_layer_mla"
    into = zeros(layers)
    ops.transfer_kv_all_layer(addresses(layers[0]), addresses(into[0]), addresses(layers[1]), addresses(into[1]), *on,
                              item, LAYERS)
    assert all(same(a[dst], b[src]) for s in (0, 1) for a, b in zip(into[s], layers[s])), "all_layer"
    ops.transfer_kv_all_layer_mla(addresses(layers[1]), addresses(into[0]), *on, item, LAYERS)
    assert same(into[0][2][dst], layers[1][2][src]), "all_layer_mla"

    page_first = [host(TOKENS, LAYERS, HEADS, DIM) for _ in "kv"]
    into = zeros(layers)
    ops.transfer_kv_per_layer_pf_lf(page_first[0], into[0][1], page_first[1], into[1][1], *on, 1, item, LAYERS * item)
    assert all(same(into[s][1][dst], page_first[s][src, 1]) for s in (0, 1)), "per_layer_pf_lf"
    ops.transfer_kv_per_layer_mla_pf_lf(page_first[0], into[0][0], *on, 2, item, LAYERS * item)
    assert same(into[0][0][dst], page_first[0][src, 2]), "per_layer_mla_pf_lf"
    ops.transfer_kv_all_layer_lf_pf(addresses(layers[0]), page_first[0], addresses(layers[1]), page_first[1], *on, item,
                                    LAYERS * item, LAYERS)
    assert all(same(page_first[s][dst, i], layers[s][i][src]) for s in (0, 1) for i in range(LAYERS)), "all_layer_lf_pf"
    ops.transfer_kv_all_layer_mla_lf_pf(addresses(layers[1]), page_first[0], *on, item, LAYERS * item, LAYERS)
    assert same(page_first[0][dst, 1], layers[1][1][src]), "all_layer_mla_lf_pf"

    head = [host(PAGES, HEADS, PAGE, LAYERS, DIM) for _ in "kv"]
    into, before = zeros(layers), [one.clone() for one in head]
    ops.transfer_kv_per_layer_ph_lf(head[0], into[0][1], head[1], into[1][1], *on, 1, item, LAYERS * item, PAGE, HEADS)
    at = lambda pool, index, layer: pool[index // PAGE, :, index % PAGE, layer]
    assert all(same(into[s][1][dst], at(head[s], src, 1)) for s in (0, 1)), "per_layer_ph_lf"
    ops.transfer_kv_all_layer_lf_ph(addresses(layers[0]), head[0], addresses(layers[1]), head[1], *on, item,
                                    LAYERS * item, LAYERS, PAGE, HEADS)
    assert all(same(at(head[s], dst, i), layers[s][i][src]) for s in (0, 1) for i in range(LAYERS)), "all_layer_lf_ph"
    assert torch.equal(head[0][0], before[0][0]) and torch.equal(head[1][2:5], before[1][2:5]), "other pages"

    flat, host_layers = layers[0] + layers[1], [host(TOKENS, HEADS, DIM) for _ in range(2 * LAYERS)]
    ops.transfer_kv_direct(flat, host_layers, src, dst, PAGE)
    assert all(same(a[dst], b[src]) for a, b in zip(host_layers, flat)), "direct"
    pools = [host(PAGES, LAYERS, PAGE, HEADS, DIM) for _ in "kv"]
    ops.transfer_kv_all_layer_direct_lf_pf(flat, pools, src, dst, PAGE)
    got = lambda s, i, index: pools[s][index // PAGE, i, index % PAGE]
    assert all(same(got(s, i, dst), layers[s][i][src]) for s in (0, 1) for i in range(LAYERS)), "direct_lf_pf"
    into = zeros(layers)
    ops.transfer_kv_per_layer_direct_pf_lf(pools, [into[0][2], into[1][2]], dst, src, 2, PAGE)
    assert all(same(into[s][2][src], got(s, 2, dst)) for s in (0, 1)), "per_layer_direct_pf_lf"


def installs(device):
    from kvprim.engines import install, nanovllm as functions
    engine, user = types.SimpleNamespace(store_kvcache=None, other=1), types.SimpleNamespace(store_kvcache=None)
    assert install(functions, engine, user) == ["store_kvcache"] and engine.other == 1
    assert engine.store_kvcache is user.store_kvcache is functions.store_kvcache


def gpu_microseconds(call, calls=50, replays=9):
    """Of one of `calls` calls in a graph."""
    graph, ends, times = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in "ab"], []
    call()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(replays):
        ends[0].record()
        graph.replay()
        ends[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * ends[0].elapsed_time(ends[1]) / calls)
    return sorted(times)[replays // 2]


def print_times():
    """Of 32 tokens, one of each of 32 requests."""
    from kvprim.engines import flashinfer, minisgl, vllm
    device, batch = "cuda", torch.arange(32, dtype=torch.int32, device="cuda")
    k, v = (rows(32, 8, 128, device=device) for _ in "kv")
    cache, slot = rows(512, 2, 16, 8, 128, device=device), torch.randperm(8192, device=device)[:32]
    indptr, indices = torch.arange(33, device=device).int() * 8, torch.randperm(512, device=device).int()
    k_cache, v_cache, one = cache[:, 0], cache[:, 1], torch.ones(1, device=device)
    flat, positions = [rows(8192, 8, 128, device=device) for _ in "kv"], batch * 3
    calls = {
        "flashinfer.append_paged_kv_cache": lambda: flashinfer.append_paged_kv_cache(
            k, v, batch, positions, cache, indices, indptr, batch),
        "  its slots": lambda: kvprim.slots_new(indices, 32, 16, 8192, request=batch, position=batch,
                                                page_starts=indptr),
        "  slots of a table": lambda: kvprim.slots_new(indices[:256].view(32, 8), 32, 16, 8192, request=batch,
                                                       position=batch),
        "vllm.reshape_and_cache_flash": lambda: vllm.reshape_and_cache_flash(k, v, k_cache, v_cache, slot, "auto", one,
                                                                             one),
        "minisgl.store_cache": lambda: minisgl.store_cache(*flat, slot, k, v),
        "minisgl.indexing": lambda: minisgl.indexing(flat[0].view(8192, -1), slot)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us of the host and of the GPU per call, medians")
    for name, call in calls.items():
        print(f"  {name:34} {microseconds(call):6.2f} {gpu_microseconds(call):6.2f}", flush=True)


def main():
    if torch is None:
        print("skip engines: python3 has no torch\n0 passed, 0 failed, 1 skipped")
        return 0
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() and kvprim.has_cuda else [])
    passed = failed = 0
    for device in devices:
        for test in (minisgl, nanovllm, flashinfer, vllm_stores, vllm_mla, vllm_others, sglang, sglang_kvcacheio,
                     installs):
            torch.manual_seed(1)
            try:
                test(device)
                passed += 1
                print(f"ok {test.__name__}, {device}", flush=True)
            except Exception as error:  # whatever it is, the others run
                failed += 1
                print(f"FAIL {test.__name__}, {device}: {type(error).__name__}: {error}", flush=True)
    skipped = 2 - len(devices)
    if not skipped:
        print_times()
    else:
        print("skip engines on a GPU: torch finds none, or kvprim was built without nvcc")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed


if __name__ == "__main__":
    if torch:
        torch.set_grad_enabled(False)
    sys.exit(main() != 0)

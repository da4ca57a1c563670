# SPDX-License-Identifier: MIT
"""vLLM's vllm._custom_ops, as far as its functions are torch.ops._C_cache_ops': 13."""
import torch

import kvprim

__all__ = ["swap_blocks", "swap_blocks_batch", "reshape_and_cache", "reshape_and_cache_flash", "concat_and_cache_mla",
           "concat_and_cache_mla_rope_fused", "convert_fp8", "gather_and_maybe_dequant_cache", "cp_gather_cache",
           "cp_gather_and_upconvert_fp8_kv_cache", "indexer_k_quant_and_cache", "concat_mla_q",
           "cp_gather_indexer_k_quant_cache"]


def _quantised(kv_cache_dtype):
    return kv_cache_dtype.startswith("fp8") or kv_cache_dtype == "int8"


def _scaled(kv_cache_dtype, **scales):
    """What a store of this cache takes beside its tensors."""
    return {"cache_dtype": kv_cache_dtype, **scales} if _quantised(kv_cache_dtype) else {}


def swap_blocks(src, dst, block_size_in_bytes, block_mapping):
    """block_mapping: [blocks, 2] of int64 on the CPU, from and to. Memory of the CPU must be pinned."""
    src, dst = (one.view(-1).view(torch.uint8).view(-1, block_size_in_bytes) for one in (src, dst))
    kvprim.transfer([dst], [src], block_mapping[:, 1], block_mapping[:, 0])


def swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False):
    """Tensors of int64 on the CPU. Copies are in the order of the stream."""
    kvprim.copy_addresses(torch.stack((src_ptrs, dst_ptrs, sizes), 1))


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """key_cache: [blocks, heads, dim / x, block, x], value_cache: [blocks, heads, dim, block]."""
    pages, block, x = key_cache.shape[0], *key_cache.shape[3:]
    key_cache, value_cache = key_cache.view(pages, -1, block, x), value_cache.view(pages, -1, block, 1)  # no copies
    kvprim.store(key, value, key_cache, value_cache, slot_mapping, "HND",
                 **_scaled(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale))


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Caches of [blocks, block, heads, dim], which may be permuted views; scales of [1] or [heads]."""
    kvprim.store(key, value, key_cache, value_cache, slot_mapping, "NHD",
                 **_scaled(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale))


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """kv_cache: [blocks, block, kv_c's + k_pe's], or 656 bytes of "fp8_ds_mla", which takes no scale."""
    if kv_cache_dtype == "fp8_ds_mla":
        return kvprim.store(kv_c, k_pe, kv_cache.view(torch.uint8), None, slot_mapping, "NHD", cache_dtype="fp8_ds_mla")
    kvprim.store(kv_c, k_pe, kv_cache, None, slot_mapping, "NHD", kv_dim=-1,
                 **_scaled(kv_cache_dtype, k_scale=scale, v_scale=scale))


def concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache,
                                    kv_cache_dtype, kv_cache_scale):
    """Rotates q_pe [tokens, heads, dim] and k_pe [tokens, dim] in place, which torch does, and then stores."""
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)
    for x, c, s in ((q_pe, cos[:, None], sin[:, None]), (k_pe, cos, sin)):
        a, b = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
        first, second = a * c - b * s, b * c + a * s
        a.copy_(first), b.copy_(second)
    concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, kv_cache_scale)


def convert_fp8(output, input, scale=1.0, kv_dtype="fp8"):
    """Blocks of floats to bytes, output = input / scale, or back, output = input * scale."""
    side = "dst" if output.element_size() == 1 else "src"
    scales = torch.full((1,), scale, dtype=torch.float32, device=input.device)
    kvprim.transfer([output], [input], **{side + "_dtype": kv_dtype, side + "_scale": scales})


def _gather_slots(src_cache, block_table, cu_seq_lens, count, seq_starts):
    return kvprim.slots_new(block_table, count, src_cache.shape[1], src_cache.shape[0] * src_cache.shape[1],
                            cu_seqlens=cu_seq_lens, starts=seq_starts)


def gather_and_maybe_dequant_cache(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype,
                                   scale, seq_starts=None):
    """dst row i = token i of the requests, whose tokens cu_seq_lens counts, from position seq_starts[request] on."""
    slot = _gather_slots(src_cache, block_table, cu_seq_lens, num_tokens, seq_starts)
    kvprim.gather(dst[:num_tokens], src_cache, slot, "NHD", keep_padding=True, **_scaled(kv_cache_dtype, scale=scale))


def cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None):
    slot = _gather_slots(src_cache, block_table[:batch_size], cu_seq_lens, dst.shape[0], seq_starts)
    kvprim.gather(dst, src_cache, slot, "NHD", keep_padding=True)


def cp_gather_and_upconvert_fp8_kv_cache(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts=None):
    """src_cache: [blocks, block, 656] of "fp8_ds_mla"; dst: [tokens, 576]; the last request's tokens go to its end."""
    ends = torch.nn.functional.pad(workspace_starts[:batch_size], (0, 1), value=dst.shape[0])
    slot = _gather_slots(src_cache, block_table[:batch_size], ends, dst.shape[0], seq_starts)
    kvprim.gather(dst, src_cache.view(torch.uint8), slot, "NHD", cache_dtype="fp8_ds_mla")


def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype):
    """kv_cache: [blocks, block, 132]; quant_block_size: 128, a row of k; kv_cache_dtype "ue8m0": powers of two."""
    if quant_block_size != 128:
        raise RuntimeError(f"quant_block_size is {quant_block_size}, not 128")
    kvprim.store(k, None, kv_cache.view(torch.uint8), None, slot_mapping, "NHD",
                 cache_dtype="fp8_indexer_ue8m0" if kv_cache_dtype == "ue8m0" else "fp8_indexer")


def cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens):
    """As they are: each token's 128 bytes to dst_k, and its scale, which lies after the page's values, to dst_scale."""
    pages, page, _ = kv_cache.shape
    slot = _gather_slots(kv_cache, block_table, cu_seq_lens, dst_k.shape[0], None)
    whole = kv_cache.view(torch.uint8).view(pages, -1)
    for dst, part, size in ((dst_k, whole[:, :128 * page], 128), (dst_scale, whole[:, 128 * page:], 4)):
        kvprim.gather(dst.view(torch.uint8), part.unflatten(1, (page, size)), slot, "NHD", keep_padding=True)


def concat_mla_q(ql_nope, q_pe, q_out):
    """q_out = ql_nope and q_pe beside each other, [tokens, heads, ...]."""
    split = ql_nope.shape[-1]
    for part, of in ((q_out[..., :split], ql_nope), (q_out[..., split:], q_pe)):
        kvprim.transfer([part], [of])

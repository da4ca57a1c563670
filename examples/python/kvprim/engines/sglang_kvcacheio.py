# SPDX-License-Identifier: MIT
"""SGLang's sgl_kernel.kvcacheio: transfers of tokens between the layers of a GPU's cache and pinned host memory.

    lf  layer first   a tensor for each layer, [tokens, ...]; of all layers, their addresses as uint64 on the GPU
    pf  page first    [tokens, layers, ...]; of `direct` functions [pages, layers, page, ...]
    ph  page head     [pages, heads, page, layers, dim of a head]

item_size: bytes of a token in one layer; layout_dim: in all layers. block_quota and num_warps_per_block say nothing
here: max_sms of kvprim.transfer does.
"""

import torch

import kvprim

__all__ = ["transfer_kv_per_layer", "transfer_kv_per_layer_mla", "transfer_kv_per_layer_pf_lf",
           "transfer_kv_per_layer_mla_pf_lf", "transfer_kv_per_layer_ph_lf", "transfer_kv_all_layer",
           "transfer_kv_all_layer_mla", "transfer_kv_all_layer_lf_pf", "transfer_kv_all_layer_mla_lf_pf",
           "transfer_kv_all_layer_lf_ph", "transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf",
           "transfer_kv_all_layer_direct_lf_pf"]


def _rows(tensor, size):
    return tensor.view(-1).view(torch.uint8).view(-1, size)


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, block_quota=2, num_warps_per_block=32):
    kvprim.transfer([_rows(dst, item_size)], [_rows(src, item_size)], dst_indices, src_indices)


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, block_quota=2,
                          num_warps_per_block=32):
    kvprim.transfer([_rows(dst, item_size) for dst in (dst_k, dst_v)],
                    [_rows(src, item_size) for src in (src_k, src_v)], dst_indices, src_indices)


def _layer(tensor, layer_id, item_size, layout_dim):
    return _rows(tensor, layout_dim)[:, layer_id * item_size:][:, :item_size]


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim,
                                    block_quota=2, num_warps_per_block=32):
    kvprim.transfer([_rows(dst, item_size)], [_layer(src, layer_id, item_size, src_layout_dim)], dst_indices,
                    src_indices)


def transfer_kv_per_layer_pf_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size,
                                src_layout_dim, block_quota=2, num_warps_per_block=32):
    kvprim.transfer([_rows(dst, item_size) for dst in (dst_k, dst_v)],
                    [_layer(src, layer_id, item_size, src_layout_dim) for src in (src_k, src_v)], dst_indices,
                    src_indices)


def transfer_kv_per_layer_ph_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size,
                                src_layout_dim, page_size, head_num, block_quota=2, num_warps_per_block=32):
    shape = (-1, head_num, page_size, src_layout_dim // item_size, item_size // head_num)
    layers = [src.view(-1).view(torch.uint8).view(shape)[:, :, :, layer_id] for src in (src_k, src_v)]
    kvprim.transfer([_rows(dst, item_size) for dst in (dst_k, dst_v)], layers, dst_indices, src_indices, "rows", "HND")


def transfer_kv_all_layer_mla(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, block_quota=2,
                              num_warps_per_block=32):
    kvprim.transfer_addresses(dst_layers[:num_layers], src_layers[:num_layers], dst_indices, src_indices, item_size)


def transfer_kv_all_layer(src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size,
                          num_layers, block_quota=2, num_warps_per_block=32):
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def _addresses(first, step, count, device):  # on the stream of the call, and in its graph
    return torch.arange(first, first + step * count, step, device=device)


def transfer_kv_all_layer_mla_lf_pf(src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers,
                                    block_quota=2, num_warps_per_block=32):
    into = _addresses(dst.data_ptr(), item_size, num_layers, src_layers.device)
    kvprim.transfer_addresses(into, src_layers[:num_layers], dst_indices, src_indices, item_size,
                              dst_stride=dst_layout_dim, dst_rows=dst.nbytes // dst_layout_dim)


def transfer_kv_all_layer_lf_pf(src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size,
                                dst_layout_dim, num_layers, block_quota=2, num_warps_per_block=32):
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def transfer_kv_all_layer_lf_ph(src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size,
                                dst_layout_dim, num_layers, page_size, head_num, block_quota=2, num_warps_per_block=32):
    step = dst_layout_dim // head_num  # from one token of a head to the next
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        into = _addresses(dst.data_ptr(), item_size // head_num, num_layers, src.device)
        kvprim.transfer_addresses(into, src[:num_layers], dst_indices, src_indices, item_size, dst_stride=step,
                                  dst_rows=dst.nbytes // dst_layout_dim, dst_page_rows=page_size,
                                  dst_page_stride=page_size * dst_layout_dim, dst_heads=head_num,
                                  dst_head_stride=page_size * step)


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    kvprim.transfer(dst_layers, src_layers, dst_indices, src_indices)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    kvprim.transfer(dst_ptrs, [src[:, layer_id] for src in src_ptrs], dst_indices, src_indices, "rows", "NHD")


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    kvprim.transfer([layer for dst in dst_ptrs for layer in dst.unbind(1)], src_ptrs, dst_indices, src_indices, "NHD",
                    "rows")

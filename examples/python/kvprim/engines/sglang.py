# SPDX-License-Identifier: MIT
"""SGLang's stores (sglang.jit_kernel.kvcache, sgl_kernel.memory) and its comparison of keys (radix_cache)."""
import torch

import kvprim

__all__ = ["store_cache", "store_cache_quant", "set_kv_buffer_kernel", "_key_match_page_size1", "_key_match_paged"]


def store_cache(k, v, k_cache, v_cache, indices, *, row_bytes=0, num_split=0, size_limit=0):
    """Rows of any size. An index outside [0, size_limit) is skipped."""
    limit = size_limit or k_cache.shape[0]
    kvprim.store(k, v, k_cache[:limit], v_cache[:limit], indices)


def store_cache_quant(k, v, k_cache, v_cache, indices, k_scale=None, v_scale=None, *, k_inv_scale=1.0,
                      v_inv_scale=1.0, size_limit=0):
    """Caches of float8: rows divided by k_scale and v_scale, tensors of one element, or multiplied by numbers."""
    limit = size_limit or k_cache.shape[0]
    inverse = (k_scale is None and k_inv_scale != 1) or (v_scale is None and v_inv_scale != 1)
    if inverse:
        if k_scale is not None or v_scale is not None:
            raise RuntimeError("scales are given as a tensor and as a number")
        k_scale, v_scale = (torch.full((1,), x, dtype=torch.float32, device=k.device) for x in (k_inv_scale,
                                                                                             v_inv_scale))
    kvprim.store(k, v, k_cache[:limit], v_cache[:limit], indices, k_scale=k_scale, v_scale=v_scale,
                 scale_inverse=inverse)


def set_kv_buffer_kernel(k_cache, v_cache, loc, k, v, fallback=False):
    kvprim.store(k, v, k_cache, v_cache, loc)


def _tokens(key0, key1):
    for name in ("extra_key", "dp_rank"):
        a, b = (getattr(key, name, None) for key in (key0, key1))
        if a != b:
            raise ValueError(f"keys of different {name}: {a} and {b}")
    return (getattr(key, "token_ids", key) for key in (key0, key1))


def _key_match_page_size1(key0, key1):
    """How many leading tokens two RadixKeys share; token_ids are lists or arrays of int64."""
    return kvprim.prefix(*_tokens(key0, key1))


def _key_match_paged(key0, key1, page_size):
    """The same in whole pages. A last page that is shorter counts as none."""
    return kvprim.prefix(*_tokens(key0, key1)) // page_size * page_size

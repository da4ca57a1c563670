# SPDX-License-Identifier: MIT
"""FlashInfer's flashinfer.page: append_paged_kv_cache, append_paged_mla_kv_cache."""
import kvprim

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache"]


def _slots(cache, page, batch_indices, positions, kv_indices, kv_indptr):
    return kvprim.slots_new(kv_indices, positions.shape[0], page, cache.shape[0] * page, request=batch_indices,
                            position=positions, page_starts=kv_indptr)


def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
                          kv_last_page_len, kv_layout="NHD"):
    """paged_kv_cache: [pages, 2, page, heads, dim] ("NHD"), [pages, 2, heads, page, dim] ("HND"), or a pair of caches
    without the second dimension. Token i becomes that at positions[i] of request batch_indices[i], whose pages are
    kv_indices[kv_indptr[request]] and the next. kv_last_page_len is not needed."""
    pair = isinstance(paged_kv_cache, (tuple, list))
    k_cache, v_cache = paged_kv_cache if pair else (paged_kv_cache, None)
    page = k_cache.shape[(1 if pair else 2) + (kv_layout == "HND")]
    slot = _slots(k_cache, page, batch_indices, positions, kv_indices, kv_indptr)
    kvprim.store(append_key, append_value, k_cache, v_cache, slot, kv_layout, kv_dim=None if pair else 1)


def append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices,
                              kv_indptr, kv_last_page_len):
    """Caches of [pages, page, dim]; both, or one that is None."""
    if ckv_cache is None:
        append_ckv, ckv_cache, append_kpe, kpe_cache = append_kpe, kpe_cache, None, None
    elif kpe_cache is None:
        append_kpe = None
    slot = _slots(ckv_cache, ckv_cache.shape[1], batch_indices, positions, kv_indices, kv_indptr)
    kvprim.store(append_ckv, append_kpe, ckv_cache, kpe_cache, slot, "NHD")

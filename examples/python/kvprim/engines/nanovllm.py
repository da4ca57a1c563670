# SPDX-License-Identifier: MIT
"""nano-vllm's nanovllm.layers.attention: store_kvcache."""
import kvprim

__all__ = ["store_kvcache"]


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    """key and value: [tokens, heads, dim]; caches: [blocks, block, heads, dim]; a slot of -1 is skipped."""
    kvprim.store(key, value, k_cache, v_cache, slot_mapping, "NHD")

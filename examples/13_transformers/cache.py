# SPDX-License-Identifier: MIT
"""A paged key/value cache for Hugging Face transformers: PagedCache is a transformers.Cache over pages of a PagePool.

    pool = PagePool(model.config, pages=1024, host_pages=1024, device="cuda", dtype=torch.bfloat16)
    cache = PagedCache(pool, prompt)        takes the pages of a published prompt that begins alike
    tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=16)
    cache.publish(prompt)                   lets later prompts take these pages
    cache.free()

Requests may be generated in turns: pass their caches again. kvprim moves all bytes: store puts K and V of new tokens
into pages, gather makes the contiguous K and V that transformers' attention takes, and transfer copies pages of all
layers: a shared page before it is written, and pages of idle requests to pinned host memory and back when the pool is
full. Everything happens on torch's current stream: use one stream and one thread for a pool.

cache_dtype=torch.float8_e4m3fn keeps K and V in pages of half the size: store and gather convert them on the way, with
a scale of 1.

transformers' own attention takes contiguous K and V, so each token gathers all of them again in each layer: the cost of
DynamicCache's concatenation. After model.set_attn_implementation("paged"), a Triton kernel attends to a single token
over the pages in place, also of FP8, on a GPU and with a head dimension that is a power of two.

One cache holds one sequence (batch size 1). All layers are full attention with the same heads.
"""
import collections
import dataclasses

import kvprim
import torch
import triton
import triton.language as tl
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SPLITS = 16  # blocks of attend_kernel for each query head
Paged = collections.namedtuple("Paged", "pages slots partial done")  # in place of K and V


@triton.jit(do_not_specialize=["length"])
def attend_kernel(query, pages, slots, partial, done, out, length, scale, GROUP: tl.constexpr, HEADS: tl.constexpr,
                  DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Each block takes a part of the tokens for a query head, and leaves its largest score, the sum of weights and the
    weighted sum of V. The last one to end combines these."""
    head, split, d = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM)
    q = tl.load(query + head * DIM + d).to(tl.float32) * scale
    most, total, sums = -1e30, 0.0, tl.zeros([DIM], tl.float32)
    first = tl.cdiv(length, SPLITS) * split
    end = tl.minimum(first + tl.cdiv(length, SPLITS), length)
    for start in range(first, end, 64):
        token = start + tl.arange(0, 64)
        slot = tl.load(slots + token, mask=token < end, other=0).to(tl.int64)
        row = pages + (slot * 2 * HEADS * DIM)[:, None] + head // GROUP * DIM + d
        k = tl.load(row, mask=(token < end)[:, None], other=0.0).to(tl.float32)
        v = tl.load(row + HEADS * DIM, mask=(token < end)[:, None], other=0.0).to(tl.float32)
        score = tl.where(token < end, tl.sum(k * q, 1), -1e30)
        new = tl.maximum(most, tl.max(score, 0))
        weight, old, most = tl.exp(score - new), tl.exp(most - new), new
        total, sums = total * old + tl.sum(weight, 0), sums * old + tl.sum(weight[:, None] * v, 0)
    part = partial + (head * SPLITS + split) * (DIM + 2)
    tl.store(part, most)
    tl.store(part + 1, total)
    tl.store(part + 2 + d, sums)
    tl.debug_barrier()
    if tl.atomic_add(done + head, 1) == SPLITS - 1:
        parts = partial + (head * SPLITS + tl.arange(0, SPLITS)) * (DIM + 2)
        share = tl.exp(tl.load(parts) - tl.max(tl.load(parts), 0))
        whole = tl.sum(share[:, None] * tl.load(parts[:, None] + 2 + d), 0)
        tl.store(out + head * DIM + d, whole / tl.sum(share * tl.load(parts + 1), 0))
        tl.store(done + head, 0)


def paged_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    if not isinstance(key, Paged):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    heads, dim, out = *key.pages.shape[-2:], torch.empty_like(query.transpose(1, 2))
    attend_kernel[query.shape[1], SPLITS](query.contiguous(), *key, out, key.slots.numel(), scaling,
                                          query.shape[1] // heads, heads, dim, SPLITS)
    return out, None


AttentionInterface.register("paged", paged_attention)
AttentionMaskInterface.register("paged", sdpa_mask)


@dataclasses.dataclass(eq=False)
class Page:
    """A page of all layers."""
    number: int
    on_host: bool = False
    references: int = 1  # how many requests and prefixes have it


@dataclasses.dataclass(eq=False)
class Prefix:
    tokens: torch.Tensor
    pages: list


def tokens_of(tokens):
    return torch.as_tensor(tokens).flatten().to("cpu", torch.int32).contiguous()


class PagePool:
    """Pages of all requests, [layers, pages, page_rows, K or V, heads, dim], on the device and in pinned host memory. A
    row is K and V of one token, so that one gather moves both."""

    def __init__(self, config, pages, host_pages=0, page_rows=16, device="cpu", dtype=torch.float32, cache_dtype=None):
        self.device, self.dtype, self.page_rows = torch.device(device), dtype, page_rows
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (page_rows, 2, self.heads, self.dim)
        self.device_pages = torch.empty((self.layers, pages, *shape), dtype=cache_dtype or dtype, device=device)
        self.host_pages = torch.empty((self.layers, host_pages, *shape), dtype=cache_dtype or dtype,
                                      pin_memory=self.device.type == "cuda")
        self.layer_pages = self.device_pages.unbind(0)
        self.page_bytes = self.device_pages[0, 0].nbytes  # in one layer
        self.pages, self.unused, self.host_unused = pages, list(range(pages)), list(range(host_pages))
        self.prefixes, self.requests = [], []  # the least recently used come first
        self.config, queries = config, config.num_attention_heads
        self.partial = torch.empty((queries, SPLITS, self.dim + 2), device=device)  # of attend_kernel
        self.done = torch.zeros(queries, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(1, dtype=torch.int32, device=device)  # stays 0: no slot lies outside the pool
        self.counts, self.peak, self.host_peak, self.moves = collections.Counter(), 0, 0, 0

    def store(self, layer, keys, values, slots):
        """Stores [heads, tokens, dim] in these slots."""
        kvprim.store(keys.transpose(0, 1), values.transpose(0, 1), self.layer_pages[layer], None, slots, "NHD",
                     kv_dim=2, rejected=self.rejected)

    def gather(self, layer, slots):
        """K and V, [1, heads, tokens, dim] each, with the strides that DynamicCache's have."""
        out = torch.empty((2, 1, self.heads, slots.numel(), self.dim), dtype=self.dtype, device=self.device)
        kvprim.gather(out[:, 0].permute(2, 0, 1, 3), self.layer_pages[layer], slots, "NHD", rejected=self.rejected)
        return out[0], out[1]

    def copy_pages(self, dst, dst_pages, src, src_pages):
        """Copies pages of all layers; dst and src are device_pages or host_pages."""
        kvprim.transfer(dst.unbind(0), src.unbind(0), *torch.tensor([dst_pages, src_pages], dtype=torch.int32),
                        same_cache=dst is src, rejected=self.rejected)

    def find_room(self, count, running):
        """Numbers of `count` unused pages for the request `running`, whose own pages are not offloaded for them."""
        while len(self.unused) < count:
            if not self.make_room(running):
                raise RuntimeError(f"PagePool: {count} pages needed, {len(self.unused)} unused, nothing left to evict "
                                   f"or offload; {len(self.host_unused)} host pages unused")
        numbers = [self.unused.pop() for _ in range(count)]
        self.peak = max(self.peak, self.pages - len(self.unused))
        return numbers

    def make_room(self, running=None):
        """Evicts the least recently used prefix that has a page to itself. If there is none, offloads the least
        recently used idle request. If there is no room for it, evicts any prefix, which may make some."""
        alone = (p for p in self.prefixes if any(page.references == 1 and not page.on_host for page in p.pages))
        prefix = next(alone, None)
        if prefix is None:
            if any(self.offload(request, running) for request in self.requests):
                return True
            if not self.prefixes:
                return False
            prefix = self.prefixes[0]
        self.prefixes.remove(prefix)
        self.give_back(prefix.pages)
        self.counts["prefixes evicted"] += 1
        return True

    def offload(self, request, running):
        """Moves pages of an idle request to host memory, as far as it has room, and returns how many. Those that
        `running` shares stay."""
        kept = {id(page) for page in running.pages} if running else ()
        pages = [page for page in request.pages if not page.on_host and id(page) not in kept]
        pages = pages[:len(self.host_unused)]
        if pages:
            self.move(pages, [self.host_unused.pop() for _ in pages], to_host=True)
            self.counts["pages offloaded"] += len(pages)
            self.host_peak = max(self.host_peak, self.host_pages.shape[1] - len(self.host_unused))
        return len(pages)

    def move(self, pages, numbers, to_host):
        """Moves pages, for all who have them, to these numbers in host memory or on the device."""
        src, dst = (self.device_pages, self.host_pages) if to_host else (self.host_pages, self.device_pages)
        self.copy_pages(dst, numbers, src, [page.number for page in pages])
        (self.unused if to_host else self.host_unused).extend(page.number for page in pages)
        for page, number in zip(pages, numbers):
            page.number, page.on_host = number, to_host
        self.moves += 1

    def share(self, pages):
        for page in pages:
            page.references += 1

    def give_back(self, pages):
        for page in pages:
            page.references -= 1
            if page.references == 0:
                (self.host_unused if page.on_host else self.unused).append(page.number)

    def find_prefix(self, tokens):
        """How many of these tokens are in the pages of a published prefix, and a share of those pages."""
        best, matched = kvprim.prefix_longest(tokens, [prefix.tokens for prefix in self.prefixes])
        if best is None:
            return 0, []
        self.prefixes.append(self.prefixes.pop(best))
        pages = self.prefixes[-1].pages[:-(-matched // self.page_rows)]
        self.share(pages)
        self.counts["tokens reused"] += matched
        self.counts["pages shared"] += len(pages)
        return matched, pages


class PagedLayer(CacheLayerMixin):
    """What transformers asks one layer. The PagedCache does the work, once for all layers where it can."""
    is_sliding, is_croppable = False, True

    def __init__(self, cache, number):
        super().__init__()
        self.cache, self.number, self.length, self.is_initialized = cache, number, 0, True

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        end = self.length + key_states.shape[-2]
        result = self.cache.append(self.number, key_states, value_states, self.length, end)
        self.length = end
        return result

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1


class PagedCache(Cache):
    """One request. `tokens` is its prompt, which may begin as a published prefix does. At least its last token is left
    to compute, because its logits are wanted."""

    def __init__(self, pool, tokens=()):
        super().__init__(layers=[PagedLayer(self, number) for number in range(pool.layers)])
        self.pool = pool
        length, pages = pool.find_prefix(tokens_of(tokens)[:-1])
        self.set_pages(pages, length)
        pool.requests.append(self)

    def set_pages(self, pages, length):
        self.pages, self.prepared, self.slots = pages, None, None
        for layer in self.layers:
            layer.length = length

    def append(self, layer, keys, values, start, end):
        """Stores K and V of the tokens [start, end) and returns those of [0, end)."""
        pool, one = self.pool, (1, self.pool.heads, end - start, self.pool.dim)
        for new in (keys, values):
            if new.shape != one or new.dtype != pool.dtype or new.device != pool.device_pages.device:
                raise ValueError(f"PagedCache holds one sequence: expected {one}, {pool.dtype}, on "
                                 f"{pool.device_pages.device}, not {tuple(new.shape)}, {new.dtype}, on {new.device}")
        keys, values = (new[0] if new.stride(3) == 1 else new[0].contiguous() for new in (keys, values))
        if self.prepared != (start, end):  # the first layer of this forward pass
            self.make_writable(start, end)
            self.prepared = (start, end)
        pool.store(layer, keys, values, self.slots[start:end])
        if pool.config._attn_implementation == "paged" and end - start == 1 and keys.is_cuda:
            return (self.paged(layer, end),) * 2
        return pool.gather(layer, self.slots[:end])

    def paged(self, layer, length):
        return Paged(self.pool.layer_pages[layer], self.slots[:length], self.pool.partial, self.pool.done)

    def make_writable(self, start, end):
        """Before the tokens [start, end) are stored: brings pages back, copies a shared one, adds what is missing."""
        self.to_device()
        pool, first = self.pool, start // self.pool.page_rows
        if first < len(self.pages) and self.pages[first].references > 1:  # earlier tokens are in it, too
            shared, copy = self.pages[first], Page(pool.find_room(1, self)[0])
            pool.copy_pages(pool.device_pages, [copy.number], pool.device_pages, [shared.number])
            pool.give_back([shared])
            self.pages[first], self.slots = copy, None
            pool.counts["pages copied on write"] += 1
        missing = -(-end // pool.page_rows) - len(self.pages)
        if missing > 0:
            self.pages += [Page(number) for number in pool.find_room(missing, self)]
            self.slots = None
        self.find_slots()

    def to_device(self):
        """Brings pages back from host memory. This is then the most recently used request."""
        pool = self.pool
        pool.requests.append(pool.requests.pop(pool.requests.index(self)))
        away = [page for page in self.pages if page.on_host]
        if away:
            pool.move(away, pool.find_room(len(away), self), to_host=False)
            pool.counts["pages brought back"] += len(away)

    def find_slots(self):
        """The slot of each token, anew if pages were moved or added."""
        pool = self.pool
        if self.slots is None or self.moves != pool.moves:
            pages = torch.tensor([page.number for page in self.pages], dtype=torch.int32, device=pool.device)
            rows = torch.arange(pool.page_rows, dtype=torch.int32, device=pool.device)
            self.slots, self.moves = (pages[:, None] * pool.page_rows + rows).flatten(), pool.moves

    def publish(self, tokens):
        """Lets prompts that begin with these tokens take their pages. This cache holds them, or the first of them."""
        tokens = tokens_of(tokens)[:self.get_seq_length()]
        pages = self.pages[:-(-len(tokens) // self.pool.page_rows)]
        self.pool.share(pages)
        self.pool.prefixes.append(Prefix(tokens, pages))

    def read(self, layer):
        """K and V of a layer, [1, heads, tokens, dim] each."""
        self.to_device()
        self.find_slots()
        return self.pool.gather(layer, self.slots[:self.get_seq_length()])

    def crop(self, tokens_to_remove):
        """Removes -tokens_to_remove tokens from the end, as generate() asks for."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected minus the number of tokens to remove")
        length = max(self.get_seq_length() + tokens_to_remove, 0)
        keep = -(-length // self.pool.page_rows)
        self.pool.give_back(self.pages[keep:])
        self.set_pages(self.pages[:keep], length)

    def reset(self):
        self.crop(-self.get_seq_length())

    def free(self):
        """Gives the pages back. What was published stays until it is evicted."""
        self.reset()
        self.pool.requests.remove(self)

# SPDX-License-Identifier: MIT
"""Generates with transformers' DynamicCache and with PagedCache, and compares tokens, K and V, memory and time.

    make transformers       or, with the package of examples/python: python3 examples/13_transformers/run.py

Needs torch and transformers. Downloads nothing: the model is a small Llama with random weights. Runs on the CPU, and on
a GPU if there is one and the package has code for it. 8 requests, which begin alike in 3 groups, are generated
greedily, in turns of a few tokens:

    DynamicCache  each request computes and holds its whole prompt
    PagedCache    requests of a group share the pages of what they have in common
    small pool    the same with so few pages that idle requests are offloaded and published prefixes are evicted
    one by one    each request begins when the one before it is gone, and takes its pages from published prefixes

Then the first and the third again with K and V in FP8. DynamicCache then holds what torch's own casts leave of them.
On a GPU, at last, how long a token takes after 2,048, also with StaticCache and with attention in place over the pages.
"""
import sys
import time

try:
    import torch
    import transformers
    import triton  # noqa: F401: comes with torch, except on some systems
except ImportError as error:
    print(f"skip 13_transformers: {error}: pip install torch transformers")
    sys.exit(0)
sys.dont_write_bytecode = True
from cache import PagedCache, PagePool, kvprim, paged_attention

GROUPS = (0, 1, 2, 0, 1, 2, 0, 1)  # of each request
TURNS, TURN_TOKENS = 4, 8  # each request generates TURN_TOKENS tokens TURNS times
SIZES = {  # of the model, and how many tokens each group has in common, which are not whole pages
    "cpu": {"hidden": 128, "layers": 3, "heads": 4, "dtype": torch.float32, "common": (150, 90, 203)},
    "cuda": {"hidden": 1024, "layers": 8, "heads": 16, "dtype": torch.bfloat16, "common": (2010, 1130, 3003)}}
SHARED = {"pages shared", "pages copied on write"}
OFFLOADED = {"pages offloaded", "pages brought back", "prefixes evicted"}


def make_model(size, device):
    """Its weights are 5 times as large as by default, with which a random model repeats one token whatever the prompt.
    Its attention is "eager", because the bits of "sdpa" in bf16 differ from run to run on an H200, with DynamicCache
    too."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=size["hidden"], intermediate_size=2 * size["hidden"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"], num_key_value_heads=size["heads"] // 2,
        max_position_embeddings=8192, initializer_range=0.1, attn_implementation="eager", bos_token_id=None,
        eos_token_id=None, pad_token_id=0)
    torch.manual_seed(1)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(size["dtype"]).eval()


def make_prompts(size, device):
    """A prompt is what its group has in common, then a question. Each of these begins with a token of its own."""
    common = [torch.randint(100, 1000, (length,)) for length in size["common"]]
    questions = [torch.randint(100, 1000, (5 + 3 * i,)) for i in range(len(GROUPS))]
    for first, tokens in enumerate(common + questions):
        tokens[0] = first
    return [(common[group].to(device), question.to(device)) for group, question in zip(GROUPS, questions)]


def prefill(model, cache, common):
    """Computes what the group has in common, unless the cache has it, in a pass of its own: the bits of K and V depend
    on how many tokens a pass computes, and the bits of both caches are compared."""
    have = cache.get_seq_length()
    if have < len(common):
        model(common[None, have:], past_key_values=cache, use_cache=True, logits_to_keep=1)


def generate(model, cache, tokens):
    return model.generate(tokens, past_key_values=cache, max_new_tokens=TURN_TOKENS, do_sample=False,
                          attention_mask=torch.ones_like(tokens))


def serve(model, prompts, new_cache):
    """Generates all requests in turns. Returns their tokens and caches, and the seconds that took."""
    requests, caches = [torch.cat(prompt)[None] for prompt in prompts], []
    start = now(model)
    for turn in range(TURNS):
        for i, (common, _) in enumerate(prompts):
            prompt = requests[i]
            if turn == 0:
                caches.append(new_cache(prompt))
                prefill(model, caches[i], common)
            requests[i] = generate(model, caches[i], prompt)
            if turn == 0 and isinstance(caches[i], PagedCache):
                caches[i].publish(prompt)
    return requests, caches, now(model) - start


def now(model):
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check(holds, what):
    if not holds:
        sys.exit(f"FAIL 13_transformers: {what}")


def same_bytes(a, b):
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def row(name, device_bytes, host_bytes, computed, seconds):
    print(f"  {name:12}{device_bytes / 1e6:9.2f} MB {host_bytes / 1e6:9.2f} MB {computed:10} {seconds:8.3f} s",
          flush=True)


class RoundedCache(transformers.DynamicCache):
    """K and V as FP8 leaves them."""

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = [x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states)]
        return super().update(*rounded, *args, **kwargs)


class Comparison:
    """What DynamicCache gives on a device, and checks of PagedCache against it."""

    def __init__(self, device, cache_dtype=None):
        self.device, self.size, self.cache_dtype = device, SIZES[device], cache_dtype
        self.model = make_model(self.size, device)
        self.prompts = make_prompts(self.size, device)
        self.total = sum(len(part) for prompt in self.prompts for part in prompt)
        for _ in range(2):  # first calls take longer
            self.tokens, self.caches, seconds = serve(self.model, self.prompts, self.dynamic)
        check(len({tokens[0, -1].item() for tokens in self.tokens}) > 1, "the model ignores its prompts")
        self.bytes = sum(layer.keys.nbytes + layer.values.nbytes for cache in self.caches for layer in cache.layers)
        print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, transformers "
              f"{transformers.__version__}: {len(self.prompts)} requests, {self.total} tokens in their prompts, "
              f"{TURNS * TURN_TOKENS} generated by each; {self.size['layers']} layers, {self.size['dtype']}"
              f"{', K and V cast to FP8' if cache_dtype else ''}")
        print(f"  {'':12}{'K and V':>12} {'on the host':>12} {'computed':>10} {'time':>10}")
        row("DynamicCache", self.bytes, 0, self.total, seconds)

    def dynamic(self, _=None):
        return (RoundedCache if self.cache_dtype else transformers.DynamicCache)(config=self.model.config)

    def pool(self, pages, host_pages=0):
        return PagePool(self.model.config, pages, host_pages, device=self.device, dtype=self.size["dtype"],
                        cache_dtype=self.cache_dtype)

    def check_same(self, name, first, tokens, caches):
        """Tokens, and K and V of all layers, of the requests from `first` on are those of DynamicCache."""
        for i, (got, cache) in enumerate(zip(tokens, caches), first):
            check(torch.equal(got, self.tokens[i]), f"{name}: request {i}: other tokens than DynamicCache's")
            for number, layer in enumerate(self.caches[i].layers):
                keys, values = cache.read(number)
                check(same_bytes(keys, layer.keys) and same_bytes(values, layer.values),
                      f"{name}: request {i}, layer {number}: other K or V than DynamicCache's")

    def report(self, name, pool, seconds, expected):
        """Prints what a pool took and did; that must be what was expected."""
        page, reused = pool.layers * pool.page_bytes, pool.counts["tokens reused"]
        row(name, pool.peak * page, pool.host_peak * page, self.total - reused, seconds)
        print("    " + ", ".join(f"{count} {what}" for what, count in sorted(pool.counts.items())))
        happened = {what for what, count in pool.counts.items() if count > 0}
        check(happened == expected | {"tokens reused"}, f"{name}: expected {sorted(expected)}")

    def check_emptied(self, name, pool):
        """All requests are freed: when all prefixes are evicted, each page is unused."""
        while pool.make_room():
            pass
        check(len(pool.unused) == pool.pages and len(pool.host_unused) == pool.host_pages.shape[1] and
              not pool.prefixes and not pool.requests, f"{name}: pages are lost")
        check(pool.rejected.item() == 0, f"{name}: {pool.rejected.item()} slots were outside the pool")

    def in_turns(self, name, pages, host_pages, expected):
        for _ in range(2):  # first calls take longer
            pool = self.pool(pages, host_pages)
            tokens, caches, seconds = serve(self.model, self.prompts, lambda prompt: PagedCache(pool, prompt))
        self.report(name, pool, seconds, expected)
        self.check_same(name, 0, tokens, caches)
        for cache in caches:
            cache.free()
        self.check_emptied(name, pool)
        return pool.peak

    def one_by_one(self, name, pages):
        pool, total = self.pool(pages), 0
        for i, prompt in enumerate(self.prompts):
            tokens, caches, seconds = serve(self.model, [prompt], lambda prompt: PagedCache(pool, prompt))
            total += seconds
            self.check_same(name, i, tokens, caches)
            caches[0].free()
        self.report(name, pool, total, SHARED)
        self.check_emptied(name, pool)

    def roll_back(self, pages):
        """A request is cropped into a page that it shares, and continues with another question."""
        pool, (common, question) = self.pool(pages), self.prompts[0]
        prompt, other = torch.cat((common, question))[None], torch.cat((common, question + 1))[None]
        owner = PagedCache(pool)
        prefill(self.model, owner, common)
        owner.publish(common)
        results = []
        for cache in (self.dynamic(), owner):
            prefill(self.model, cache, common)
            results.append([generate(self.model, cache, prompt)])
            cache.crop(len(common) - cache.get_seq_length())
            results[-1].append(generate(self.model, cache, other))
        check(all(torch.equal(*pair) for pair in zip(*results)), "crop: other tokens than DynamicCache's")
        taker = PagedCache(pool, prompt)
        check(torch.equal(generate(self.model, taker, prompt), results[0][0]), "crop: a published page was written")
        for cache in (owner, taker):
            cache.free()
        self.check_emptied("crop", pool)

    def refuse(self):
        """What does not fit raises an error, and the pool loses nothing."""
        pool, other = self.pool(4, 1), PagePool(self.model.config, 64, 0, device=self.device, dtype=torch.float64)
        cache, tokens = PagedCache(pool), self.prompts[0][0][None]
        for error, what, batch, into in ((RuntimeError, "more tokens than the pool has rows", 1, cache),
                                         (ValueError, "a batch", 2, cache),
                                         (ValueError, "another dtype", 1, PagedCache(other))):
            try:
                self.model(tokens.expand(batch, -1), past_key_values=into)
                check(False, f"{what}: no {error.__name__}")
            except error:
                pass
        cache.free()
        self.check_emptied("refuse", pool)


def compare(device):
    comparison = Comparison(device)
    enough = 100 + comparison.bytes // (comparison.pool(1).page_bytes * comparison.size["layers"])
    peak = comparison.in_turns("PagedCache", enough, 0, SHARED)
    comparison.in_turns("small pool", peak * 2 // 3, peak, SHARED | OFFLOADED)
    comparison.one_by_one("one by one", enough)
    comparison.roll_back(enough)
    comparison.refuse()
    exact, comparison = comparison.tokens, Comparison(device, torch.float8_e4m3fn)
    check(not all(map(torch.equal, exact, comparison.tokens)), "FP8 changes no token: is it in use?")
    check(comparison.in_turns("PagedCache", enough, 0, SHARED) == peak, "FP8: another number of pages")
    comparison.in_turns("small pool", peak * 2 // 3, peak, SHARED | OFFLOADED)
    print("  all tokens, and K and V of all layers and requests, are the same as DynamicCache's")


def decode(length=2048):
    """Prints how long a token takes, and its kernels alone: what is between them is Python and PyTorch."""
    dtype, profile = torch.bfloat16, torch.profiler
    model = make_model({"hidden": 4096, "layers": 8, "heads": 32, "dtype": dtype}, "cuda")
    query = torch.randn((1, 32, 1, 128), device="cuda", dtype=dtype)
    print(f"  one token after {length}: 8 layers, K and V of 16 heads of 128, bf16")
    for name in ("DynamicCache", "StaticCache", "PagedCache", "in place", "PagedCache, FP8", "in place, FP8"):
        model.set_attn_implementation("paged" if "in place" in name else "sdpa")
        cache = (transformers.DynamicCache(config=model.config) if name == "DynamicCache" else
                 transformers.StaticCache(config=model.config, max_cache_len=length + 64) if name == "StaticCache" else
                 PagedCache(PagePool(model.config, length // 16 + 4, device="cuda", dtype=dtype,
                                     cache_dtype=torch.float8_e4m3fn if "FP8" in name else None)))
        token = torch.randint(100, 1000, (1, length), device="cuda")

        def generate(count):
            nonlocal token
            start = now(model)
            for _ in range(count):
                token = model(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            return (now(model) - start) / count * 1e3

        generate(1)
        best = min(generate(8) for _ in range(4))
        with profile.profile(activities=[profile.ProfilerActivity.CUDA]) as profiler:
            generate(16)
        kernels = sum(event.self_device_time_total for event in profiler.key_averages()) / 16e3
        print(f"    {name:16}{best:8.3f} ms, its kernels {kernels:6.3f} ms")
        if "in place" in name:
            got, want = (paged_attention(model.model.layers[3].self_attn, query, *kv, None, scaling=0.1)[0]
                         for kv in ((cache.paged(3, cache.get_seq_length()),) * 2, cache.read(3)))
            check((got - want).abs().max() < 0.01 * want.abs().max(), f"{name}: attends otherwise than torch")


def main():
    devices = ["cpu"]
    if kvprim.has_cuda and torch.cuda.is_available():
        devices.append("cuda")
    else:
        why = "torch finds no CUDA device" if kvprim.has_cuda else "kvprim was built without nvcc"
        print(f"skip the part on a GPU: {why}")
    torch.set_num_threads(1)  # more only make the CPU's small model slower
    with torch.no_grad():
        for device in devices:
            compare(device)
        if devices[-1] == "cuda":
            decode()
    print(f"13_transformers on {' and '.join(devices)}: ok")


if __name__ == "__main__":
    main()

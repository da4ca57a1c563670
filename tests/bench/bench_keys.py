# SPDX-License-Identifier: MIT
"""Times the engines' own Python for the keys of 10,000 tokens, blocks of 16 and of 64: `make keys-bench` prints it
beside kvprim's. Rules that need cbor2 or xxhash are left out if python3 has none. Minima of 15 runs."""
import hashlib
import pickle
import random
import time

try:
    import cbor2
except ImportError:
    cbor2 = None
try:
    import xxhash
except ImportError:
    xxhash = None

COUNT = 10000
random.seed(1)
TOKENS = [random.randrange(151936) for _ in range(COUNT)]


def sha256(data):
    return hashlib.sha256(data).digest()


def pickled(value):
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def canonical(value):
    return cbor2.dumps(value, canonical=True)


def vllm(form, hash_):
    def chain(block):
        key = bytes(32)
        for i in range(0, COUNT - block + 1, block):
            key = hash_(form((key, tuple(TOKENS[i:i + block]), None)))
    return chain


def sglang(block):
    """As SGLang did before it had an extension in C++."""
    key = None
    for i in range(0, COUNT - block + 1, block):
        hasher = hashlib.sha256()
        if key:
            hasher.update(bytes.fromhex(key))
        for token in TOKENS[i:i + block]:
            hasher.update(token.to_bytes(4, "little", signed=False))
        key = hasher.hexdigest()


def least(chain, block):
    times = []
    for _ in range(15):
        start = time.perf_counter()
        chain(block)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


print('\nthe same in Python: us')
for name, needed, run in [('vllm_sha256', hashlib, vllm(pickled, sha256)),
                          ('vllm_sha256_cbor', cbor2, vllm(canonical, sha256)), ('sglang', hashlib, sglang),
                          ('vllm_xxhash', xxhash, xxhash and vllm(pickled, xxhash.xxh3_128_digest)),
                          ('vllm_xxhash_cbor', xxhash and cbor2, xxhash and vllm(canonical, xxhash.xxh3_128_digest))]:
    print('%-18s %9.0f %9.0f' % (name, least(run, 16), least(run, 64)) if needed else name + ': not here')

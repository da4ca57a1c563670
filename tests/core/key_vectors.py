# SPDX-License-Identifier: MIT
"""Prints key_vectors.h: keys as the engines' Python computes them. Needs cbor2 and xxhash; run by hand.

    python3 tests/core/key_vectors.py >tests/core/key_vectors.h

Each line is a request of which the last key is known: it depends on all tokens, extras and keys before it.
"""
import hashlib
import pickle
import struct

import cbor2
import xxhash

MASK = (1 << 64) - 1
EDGES = [0, 1, 23, 24, 25, -26, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**39 - 1, 2**39, 2**47,
         2**55 - 1, 2**55, 2**63 - 1, -1, -24, -25, -256, -257, -65536, -65537, -2**31, -2**31 - 1, -2**32,
         -2**32 - 1, -2**39, -2**39 - 1, -2**47 - 1, -2**55, -2**55 - 1, -2**63]


def hash_u64(n):
    z = (n + 1) * 0x9e3779b97f4a7c15 & MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return z ^ z >> 31


def tokens_of(kind, count):
    """What key_tokens() of test_keys.h makes."""
    signed = [value - (value >> 63 << 64) for value in map(hash_u64, range(count))]
    return {'vocabulary': [value % 151936 for value in map(hash_u64, range(count))],
            'small': [value % 300 for value in map(hash_u64, range(count))],
            'int32': [value >> 32 for value in signed], 'uint31': [(value & MASK) >> 33 for value in signed],
            'uint32': [(value & MASK) >> 32 for value in signed],
            'wide': [(value & MASK) >> (24 if i % 40 < 3 else 40) for i, value in enumerate(signed)],
            'int64': signed, 'edges': [EDGES[i % len(EDGES)] for i in range(count)]}[kind]


def blocks_of(tokens, block, more=0):
    return [tokens[i:i + block + more] for i in range(0, len(tokens) - block - more + 1, block)]


def sha256(data):
    return hashlib.sha256(data).digest()


def pickled(value):
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def canonical(value):
    return cbor2.dumps(value, canonical=True)


VLLM = {'VLLM_SHA256': (pickled, sha256), 'VLLM_SHA256_CBOR': (canonical, sha256),
        'VLLM_XXHASH': (pickled, xxhash.xxh3_128_digest), 'VLLM_XXHASH_CBOR': (canonical, xxhash.xxh3_128_digest)}


def encoded(rule, extra):
    """The bytes of vLLM's extra keys inside those of (parent, tokens, extra)."""
    return pickled((bytes(32), (0,), extra))[50:-3] if VLLM[rule][0] is pickled else canonical(extra)


def last_key(rule, tokens, block, parent, extra, seed, bigrams):
    """extra: {block: value}; for TRTLLM {block: {token: digest}}."""
    if rule in VLLM:
        form, hash_ = VLLM[rule]
        parent = hash_(form('vllm-none-hash')) if parent is None else parent
        for i, part in enumerate(blocks_of(tokens, block)):
            parent = hash_(form((parent, tuple(part), extra.get(i))))
    elif rule == 'SGLANG':
        for part in blocks_of(tokens, block, bigrams):
            part = [token for pair in zip(part, part[1:]) for token in pair] if bigrams else part
            wide = any(token > 2**32 - 1 for token in part)
            parent = sha256((parent or b'') + b'\xff' * wide + struct.pack('<%d%s' % (len(part), 'IQ'[wide]), *part))
    elif rule == 'TRTLLM':
        parent = sha256(b'\0') if parent is None else parent
        for i, part in enumerate(blocks_of(tokens, block)):
            digests = extra.get(i, {})
            parent = sha256(parent + b''.join(digests.get(k, struct.pack('<I', token)) for k, token in enumerate(part)))
    elif rule == 'LMCACHE':
        parent = parent or bytes(8)
        for part in blocks_of(tokens, block):
            parent = sha256(canonical((int.from_bytes(parent, 'big'), tuple(part), ())))[:8]
    elif rule == 'DYNAMO':
        for i, part in enumerate(blocks_of(tokens, block, bigrams)):
            data = struct.pack('<%dI' % len(part), *part) + extra.get(i, b'')
            own = struct.pack('<Q', xxhash.xxh3_64_intdigest(data, seed=seed or 1337))
            parent = own if parent is None else struct.pack('<Q', xxhash.xxh3_64_intdigest(parent + own, seed=1337))
    else:
        parent = parent or bytes(16)
        for part in blocks_of(tokens, block):
            parent = xxhash.xxh3_128_digest(parent + struct.pack('<%di' % len(part), *part))
    return parent


def line(rule, kind, count, block, parent=None, extra={}, seed=0, bigrams=0):
    key = last_key(rule, tokens_of(kind, count), block, parent, extra, seed, bigrams)
    if rule in VLLM:
        pieces = [(i, 0, encoded(rule, value)) for i, value in extra.items()]
    else:
        pieces = [(i, k, data) for i, value in extra.items()
                  for k, data in (value.items() if rule == 'TRTLLM' else [(0, value)])]
    pieces = ' '.join('%d %d %s' % (i, k, data.hex()) for i, k, data in pieces)
    lines = ['"%s"' % pieces[i:i + 110] for i in range(0, len(pieces), 110)] or ['""']
    print('    {KVPRIM_KEY_%s, key_%s, %d, %d, %du, %d,\n     "%s",\n     %s,\n     "%s"},' % (
        rule, kind, count, block, seed, bigrams, (parent or b'').hex(), '\n     '.join(lines), key.hex()))


print('/* SPDX-License-Identifier: MIT */\n/* Printed by key_vectors.py. */\n/* clang-format off */')
for name in VLLM:
    random_seed = xxhash.xxh3_128_digest(pickled('00'))
    begin = None if 'SHA' in name else random_seed
    lora = ('lora', 'adapter', '/models/adapter')
    for kind_, count_, block_ in [('vocabulary', 100, 16), ('vocabulary', 1000, 64), ('small', 50, 3), ('small', 9, 1),
                                  ('small', 10, 2), ('int32', 500, 23), ('int32', 500, 24), ('int64', 500, 16),
                                  ('edges', 500, 4), ('edges', 600, 300), ('vocabulary', 9000, 2048)]:
        line(name, kind_, count_, block_, begin)
    line(name, 'vocabulary', 64, 16, b'a seed of any length, 38 bytes long ...')
    line(name, 'vocabulary', 64, 16, b'short')
    line(name, 'vocabulary', 80, 16, begin, {
        0: (lora, ('cache_salt', 's' * 300)), 1: (lora,), 3: (lora, ('mm', 'ab' * 32, -3), ('mm', 'cd' * 32, 9)),
        4: (('prompt_embeds', bytes(range(32))),)})
for kind_, count_, block_ in [('vocabulary', 100, 16), ('uint31', 1000, 64), ('small', 9, 1), ('uint31', 9000, 2048)]:
    for name in ('SGLANG', 'TRTLLM'):
        line(name, kind_, count_, block_)
        line(name, kind_, count_, block_, sha256(b'a namespace'))
for kind_ in ('vocabulary', 'uint32', 'wide'):
    line('SGLANG', kind_, 200, 16)
    line('SGLANG', kind_, 200, 16, bigrams=1)
    line('SGLANG', kind_, 193, 16, sha256(b'b'), bigrams=1)
line('TRTLLM', 'vocabulary', 100, 16, None,
     {0: {0: sha256(b'1'), 1: sha256(b'2'), 15: sha256(b'3')}, 4: {7: sha256(b'4')}})
for kind_, count_, block_ in [('vocabulary', 600, 256), ('int64', 100, 16), ('edges', 100, 7), ('small', 9, 1)]:
    line('LMCACHE', kind_, count_, block_)
    line('LMCACHE', kind_, count_, block_, bytes(7) + b'\x17')
for kind_, count_, block_ in [('vocabulary', 100, 16), ('uint32', 1000, 64), ('small', 9, 1)]:
    for bigrams_ in (0, 1):
        line('DYNAMO', kind_, count_, block_, bigrams=bigrams_)
        line('DYNAMO', kind_, count_, block_, b'8 bytes.', {1: struct.pack('<2Q', 5, 2**63 + 9)},
             1337 + xxhash.xxh3_64_intdigest(b'adapter') & MASK, bigrams_)
for kind_, count_, block_ in [('vocabulary', 100, 16), ('int32', 1000, 64), ('small', 9, 1)]:
    line('XXH3', kind_, count_, block_)
    line('XXH3', kind_, count_, block_, b'16 bytes, parent')

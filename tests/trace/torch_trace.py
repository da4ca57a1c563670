#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/trace/samples/torch_*.json.gz: a few decode steps under torch's profiler, on a GPU.

    python3 tests/trace/torch_trace.py FOLDER

Once over a cache that concatenates, once over a static one with a mask.
"""
import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function

LAYERS, HEADS, DIM, PROMPT, STEPS, MOST = 2, 4, 64, 256, 3, 512


class Model:
    def __init__(self, static):
        half = {'device': 'cuda', 'dtype': torch.float16}
        torch.manual_seed(1)
        self.static = static
        self.embedding = torch.randn(1000, HEADS * DIM, **half)
        self.weights = torch.randn(HEADS * DIM, 3 * HEADS * DIM, **half) / 16
        shape = (1, HEADS, MOST if static else PROMPT, DIM)
        self.k = [torch.zeros(shape, **half) for _ in range(LAYERS)]
        self.v = [torch.zeros(shape, **half) for _ in range(LAYERS)]
        self.mask = torch.full((1, 1, 1, MOST), -1e4, **half)
        self.mask[..., :PROMPT] = 0

    def step(self, position, token):
        x = self.embedding.index_select(0, token)
        at = torch.tensor([position], pin_memory=True).to('cuda', non_blocking=True)
        for layer in range(LAYERS):
            q, k, v = (a.view(1, HEADS, 1, DIM) for a in (x @ self.weights).chunk(3, 1))
            with record_function('kv cache'):
                if self.static:
                    self.k[layer].index_copy_(2, at, k)
                    self.v[layer].index_copy_(2, at, v)
                    self.mask.index_fill_(3, at, 0)
                else:
                    self.k[layer] = torch.cat((self.k[layer], k), 2)
                    self.v[layer] = torch.cat((self.v[layer], v), 2)
            x = torch.nn.functional.scaled_dot_product_attention(
                q, self.k[layer], self.v[layer], attn_mask=self.mask if self.static else None).reshape(1, HEADS * DIM)
        return x.float().sum(-1).long().abs() % 1000


def record(static, path):
    model, token = Model(static), torch.zeros(1, dtype=torch.long, device='cuda')
    for i in range(3):
        token = model.step(PROMPT + i, token)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for i in range(STEPS):
            with record_function('step'):
                token = model.step(PROMPT + 3 + i, token)
                token.cpu()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(path)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    record(False, f'{sys.argv[1]}/warm_up.json')  # the first recording starts the profiler
    record(False, f'{sys.argv[1]}/torch_dynamic.json.gz')
    record(True, f'{sys.argv[1]}/torch_static.json.gz')
    return 0


if __name__ == '__main__':
    sys.exit(main())

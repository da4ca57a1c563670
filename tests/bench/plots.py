#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Turns what was measured, tests/results/*.txt, into pictures, tests/results/*.svg, and README.md's tables.

    python3 tests/bench/plots.py            writes them, from the top folder; `make plots` calls it
    python3 tests/bench/plots.py --check    names those that do not match the results and exits with 1; `make check`
                                            calls it

Tables are found by title and column headings, so if a benchmark prints another table, this fails and draws nothing
wrong. The same results give the same bytes, and README.md marks those that are of other headers than the present ones.
Prints of which headers each result is. Needs Python 3.6 and nothing else.
"""
import math
import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import results  # noqa: E402: tests/results.py

README, RESULTS = 'README.md', 'tests/results/'
BEGIN, END = '<!-- figures: written by `make plots` -->\n', '<!-- end of figures -->\n'

# ---- results ---------------------------------------------------------------------------------------------------------


class Results:
    """The lines of a file under tests/results/, or some of them."""

    def __init__(self, name, lines=None):
        self.name = name
        if lines is None:
            try:
                with open(RESULTS + name, encoding='utf-8') as file:
                    lines = file.read().split('\n')
            except OSError as error:
                sys.exit(f'{RESULTS}{name}: {error.strerror}')
        self.lines = lines

    def fail(self, what):
        sys.exit(f'{RESULTS}{self.name}: {what} (what prints it and tests/bench/plots.py must agree)')

    def find(self, pattern):
        """Returns what the first group matches in the first line that contains the pattern."""
        for line in self.lines:
            match = re.search(pattern, line)
            if match:
                return match.group(1)
        return self.fail(f"no line like '{pattern}'")

    def parts(self, pattern):
        """Returns [(what the group matches, Results)] for the parts whose first line begins with == and matches."""
        starts = [i for i, line in enumerate(self.lines) if line.startswith('==')] + [len(self.lines)]
        parts = [(re.fullmatch(pattern, self.lines[a]), self.lines[a:b]) for a, b in zip(starts, starts[1:])]
        return ([(match.group(1), Results(self.name, lines)) for match, lines in parts if match]
                or self.fail(f"no part like '{pattern}'"))

    def table(self, title, columns, key, *counts):
        """Returns {key: numbers} from the table after these two lines, up to an empty line. `key` is a pattern for the
        start of a row. As many numbers follow it as one of `counts`; '-' is none. Verdicts and remarks are skipped."""
        heads = [line.split() for line in self.lines]
        at = [i for i in range(len(heads) - 1) if heads[i] == title.split() and heads[i + 1] == columns.split()]
        if not at:
            self.fail(f"no table '{title}' with columns '{columns}'")
        rows = Table(self, title or columns)
        for line in self.lines[at[0] + 2:]:
            if not line.strip():
                break
            if re.match(r' *(ok |MISSED |zeros, |\()', line):
                continue
            text = line.replace('|', ' ')
            row = [m for m in (re.fullmatch(rf' *({key})((?: +(?:[\d.]+|-)){{{n}}}) *', text) for n in counts) if m]
            if not row:
                self.fail(f"table '{title}', row '{line.strip()}'")
            rows[' '.join(row[0].group(1).split())] = [
                float('nan' if number == '-' else number) for number in row[0].group(2).split()]
        return rows or self.fail(f"table '{title}' is empty")


class Table(dict):
    """Names the file and the table if what is looked up is not there."""

    def __init__(self, results, title):
        dict.__init__(self)
        self.results, self.title = results, title

    def __missing__(self, key):
        self.results.fail(f"table '{self.title}' has no row '{key}'")


def size(text):
    """Returns the bytes of '64 KB', say."""
    number, unit = text.split()
    return int(number) << {'B': 0, 'KB': 10, 'MB': 20}[unit]


def known(table, at, pattern=''):
    """Returns the column's numbers in rows whose key matches, where there is a number."""
    return [values[at] for key, values in table.items() if re.match(pattern, key) and not math.isnan(values[at])]


def mean(numbers):
    numbers = list(numbers)
    return math.exp(sum(math.log(number) for number in numbers) / len(numbers))


gpu, convert, transfer, cpu, nccl, replay, torch, handover = (
    Results(name + '.txt') for name in ('gpu_bench', 'gpu_convert', 'gpu_transfer', 'bench', 'nccl_bench', 'replay',
                                        'gpu_torch', 'handover'))
COPY = float(gpu.find(r'device to device of 256 MiB: (\d+) GB/s in a graph'))  # counts bytes read and bytes written
EMPTY = float(gpu.find(r'empty kernel in a graph: ([\d.]+) us'))
SIZES = r'\d+ +\d+'
GATHER = gpu.table("gather: us per launch, and kvprim's time as a part of the best opponent's",
                   'row B rows kvprim mini ratio | PDL mini ratio | best PDL/off GB/s', SIZES, 9)
STORE = gpu.table("store: us per launch, and kvprim's time as a part of the best opponent's",
                  'row B rows kvprim mini SGLang ratio | PDL mini SGLang ratio | best PDL/off GB/s', SIZES, 11)
OTHERS = gpu.table("gather by other means: us, and times kvprim's", 'row B rows kvprim CUB memcpy each', SIZES, 3, 5)
LARGE = gpu.table('large moves, PDL off, against a device-to-device cudaMemcpyAsync of 256 MiB, the faster of graph '
                  'and stream', 'row B rows us GB/s copy GB/s ratio', r'(?:gather|store) +' + SIZES, 4)
ODD = gpu.table('multiple of 128; ratio of the second to the last', 'row B rows packed 16 128 wide ratio',
                r'(?:gather|store) +' + SIZES, 5)
UNPACK = gpu.table('', 'fragments + kvprim us GB/s cub warp each batch', r'\w.*\w +\d+', 6)
COPIES = gpu.table('', 'copies, scattered on both sides us pdl GB/s unpack cub copy GB/s', r'\d.*\w', 6)
PINNED = gpu.table('', 'ms from the call to the end copy unpack batch', r'4096 x \d+ KB \w+ pinned', 3)
SLOTS = gpu.table('', 'slots of tokens, us: kvprim, with PDL | plain, with PDL, vLLM | kvprim / plain, both with PDL',
                  r'int\d+ +\d+ +\d+ +\w+', 6)
CONVERTED = 'tokens kvprim vLLM SGLang / vLLM / SGL | PDL SGLang / vLLM / SGL | GB/s limit'
FP8_STORE = convert.table('store of K and V by elements of a row, bf16 to e4m3, a scale for each tensor', CONVERTED,
                          SIZES, 11)
LATENTS = convert.table("store of latents and of the indexer's keys, bf16 to e4m3, pages of 64", CONVERTED,
                        r'\w+ +(?:pages +)?\d+', 11)
FP8_GATHER = convert.table("gather of requests' tokens from random pages, e4m3 to bf16",
                           'row tokens pages PDL slots PDL vLLM before pages slots GB/s limit', r'\w.*\w +' + SIZES, 10)
OFFLOAD = transfer.table('the copy, and against the batch from the call to the end of its work',
                         'row kvprim 8 SMs regs 2 ring 2 ring 4 copy batch each / copy called', r'to \w+ +\d+ \w+', 10)
LAYERS = transfer.table('device memory, 64 layers in one launch: GB/s on all and on some SMs, all against the copy',
                        'row MiB us all 8 SMs 16 SMs 32 SMs 64 SMs / copy', r'\w.*B +[\d.]+', 7)
PAGED = [1 / float(gpu.find(rf'{name} / flat, to 64 tokens +([\d.]+), target')) for name in ('gather', 'paged store')]
PREFIX = {name: cpu.table(f'int32, {name}: cycles per call', 'tokens kvprim avx512 avx2 scalar memcmp std fast std '
                          'slow x fast x slow bytes/cycle', r'\d+', 10)
          for name in ('both aligned to 64 bytes', 'mutually misaligned')}
HOST = {name: cpu.table(f'{name}, random rows of 1 GB: GB/s of rows', 'row bytes kvprim memcpy per row one memcpy '
                        'random read x per row of one memcpy of reading', r'\d+', 7) for name in ('gather', 'store')}
NCCL_BY_GPUS = {gpus.count(',') + 1: part for gpus, part in nccl.parts(r'== build/bench_nccl, GPUs ([\d,]+)')}
BY_PARTS = 'NCCL window kvprim in buffer to NCCL to raw'
COLLECTIVES = {  # "to raw" is the sixth number of each
    name: {gpus: part.table(title, columns, r'\d+ [KM]B', count) for gpus, part in NCCL_BY_GPUS.items()}
    for name, title, columns, count in (
        ('all-reduce', 'all_reduce, bf16 sum, us; floors: times a flag to each other rank', 'NCCL window wrapper '
         'kvprim in buffer to raw wrapper GB/s (bus) % of push % of copy floors', 11),
        ('reduce-scatter', 'reduce_scatter, bf16 sum, us, by bytes that each rank gives', BY_PARTS, 6),
        ('all-gather', 'all_gather, us, by bytes of the result', BY_PARTS, 6))}
ALL_REDUCE = COLLECTIVES['all-reduce']
DECODE_BY_GPUS = {gpus.count(',') + 1: part for gpus, part in nccl.parts(r'== build/bench_decode, GPUs ([\d,]+)')}
NORMS = {gpus: part.table('all_reduce, residual and RMSNorm of bf16, tokens x hidden, us', 'kvprim + norm NCCL + '
                          'window + one shot the sum / sum / best', r'\d+ x \d+', 8)
         for gpus, part in DECODE_BY_GPUS.items()}
ALL_TO_ALL = {gpus: part.table('all_to_all, us, by bytes that each rank sends', 'grouped alltoall kvprim / best of '
                               'NCCL', r'\d+ [KM]B', 4) for gpus, part in DECODE_BY_GPUS.items()}


def norm_ratios(gpus, tokens, *columns):
    """Returns the time of the faster one of some opponents to kvprim's, for a row of 4,096 elements a token."""
    values = NORMS[gpus][f'{tokens} x 4096']
    return min(values[at] for at in columns) / values[0]


TORCH = {name: torch.table(f'{name}: us per launch', f'row B rows {theirs} kvprim kvprim+PDL kvprim / best of torch',
                           SIZES, 5)
         for name, theirs in (('gather', 'index_select embedding'), ('store', 'index_put_ index_copy_'))}

# ---- drawing ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, GAP, BOTTOM = 720, 400, 58, 704, 22, 334
# Okabe and Ito's colours, which colour-blind readers can tell apart, each with a dash and a marker for print in grey.
STYLES = {
    'ours': ('#0072b2', 3, '', 'circle'),
    'ours too': ('#56b4e9', 2, '', 'circle'),
    'first': ('#d55e00', 1.8, '', 'square'),
    'second': ('#009e73', 1.8, '6 3', 'triangle'),
    'third': ('#b0578d', 1.8, '2 2', 'diamond'),
    'fourth': ('#a37500', 1.8, '8 3 2 3', 'cross'),
    'limit': ('#57606a', 1.5, '5 4', ''),
}


def text(x, y, what, attributes=''):
    for plain, escaped in (('&', '&amp;'), ('<', '&lt;'), ('>', '&gt;')):
        what = what.replace(plain, escaped)
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{what}</text>'


def marker(shape, x, y, colour):
    paths = {'square': 'm-3-3h6v6h-6z', 'triangle': 'm0-4l4 7h-8z', 'diamond': 'm0-4.2l4.2 4.2l-4.2 4.2l-4.2-4.2z'}
    at = f'M{x:.1f} {y:.1f}'
    if shape == 'circle':
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    if shape == 'cross':
        return f'<path d="{at}m-3-3l6 6m0-6l-6 6" stroke="{colour}" stroke-width="1.8" fill="none"/>'
    return f'<path d="{at}{paths[shape]}" fill="{colour}"/>' if shape else ''


def line(points, style):
    colour, width, dash, shape = STYLES[style]
    path = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
    dash = f' stroke-dasharray="{dash}"' if dash else ''
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
            f'{dash}/>'] + [marker(shape, x, y, colour) for x, y in points if shape]


def legend(series, top):
    """Draws line and name of each series, as many per row as fit, with letters as wide as in a wide font."""
    parts, x, y = [], 16, top
    for name, style in series:
        width = 56 + sum(4 if c in " .,:;'fijlrt" else 9.5 if c.isupper() or c in 'mw' else 7 for c in name)
        if x + width > WIDTH and x > 16:
            x, y = 16, y + 18
        parts += line([(x, y - 4), (x + 26, y - 4)], style)[:1]
        parts += [marker(STYLES[style][3], x + 13, y - 4, STYLES[style][0]), text(x + 32, y, name)]
        x += width
    return parts, y


STEPS = [s * 10 ** p if p >= 0 else s / 10 ** -p for p in range(-3, 8) for s in (1, 2, 5)]


def y_range(values, linear):
    """Returns the axis's smallest and largest value, and the values to mark."""
    if linear:
        step = min(s for s in STEPS if max(values) / s <= 6)
        return 0, step * math.ceil(max(values) / step), [step * i for i in range(math.ceil(max(values) / step) + 1)]
    low, high = max(s for s in STEPS if s <= min(values)), min(s for s in STEPS if s >= max(values))
    return low, high, sorted({low, high, *(s for s in STEPS[::1 if high / low < 300 else 3] if low <= s <= high)})


def panel(heading, series, left, right, top, x_labels, y_axis):
    """`x_labels`: {value: label} from the smallest x to the largest, on a logarithmic axis; `y_axis`: from y_range."""
    low, high, marks = y_axis
    first, last = min(x_labels), max(x_labels)

    def x_of(x):
        return left + 0.05 * (right - left) + 0.9 * (right - left) * math.log(x / first) / math.log(last / first)

    def y_of(y):
        return BOTTOM - (BOTTOM - top) * (math.log(y / low) / math.log(high / low) if low else y / high)

    parts = [text(left, top - 10, heading, ' font-weight="600"')]
    for y in marks:
        parts.append(f'<path d="M{left:.1f} {y_of(y):.1f}H{right:.1f}" stroke="#d8dee4"/>')
        if left == LEFT:
            parts.append(text(left - 7, y_of(y) + 4, f'{y:,g}', ' text-anchor="end" class="s"'))
    parts.append(f'<path d="M{left:.1f} {BOTTOM}H{right:.1f}" stroke="#57606a"/>')
    for x, label in x_labels.items():
        if label:
            parts.append(f'<path d="M{x_of(x):.1f} {BOTTOM}v4" stroke="#57606a"/>')
            parts.append(text(x_of(x), BOTTOM + 17, label, ' text-anchor="middle" class="s"'))
    for _, style, points in series:
        parts += line([(x_of(x), y_of(y)) for x, y in points], style)
    return parts


def frame(width, height, title, subtitle, parts, source):
    """Returns an SVG. It has its own background, so that it is readable on light and on dark pages."""
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" font-size="12" fill="#1f2328" '
        'font-family="system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif">',
        '<style>.s{font-size:11px;fill:#57606a}</style>', f'<title>{title}</title>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="#fff" stroke="#d0d7de"/>',
        text(16, 27, title, ' font-size="16" font-weight="600"'), text(16, 47, subtitle, ' fill="#57606a"'),
        *filter(None, parts), text(16, height - 11, source, ' class="s"'), '</svg>\n'])


def picture(title, subtitle, x_title, x_labels, panels, source, linear=False):
    """Returns an SVG of panels [(heading, [(name, style, [(x, y)])])] side by side with the same axes. A panel's last
    series lies on top."""
    names = {name: style for _, series in panels for name, style, _ in series[::-1]}
    names = sorted(names.items(), key=lambda item: not item[1].startswith('ours'))
    points = [point for _, series in panels for _, _, some in series for point in some]
    ends = {min(x for x, _ in points): '', max(x for x, _ in points): ''}
    labels = {**ends, **{x: label for x, label in x_labels.items() if min(ends) <= x <= max(ends)}}
    parts, top = legend(names, 70)
    width = (RIGHT - LEFT - GAP * (len(panels) - 1)) / len(panels)
    for i, (heading, series) in enumerate(panels):
        left = LEFT + i * (width + GAP)
        parts += panel(heading, series, left, left + width, top + 38, labels, y_range([y for _, y in points], linear))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 35, x_title, ' text-anchor="middle"'))
    return frame(WIDTH, HEIGHT, title, subtitle, parts, source)


def times(factor):
    return format(factor, '.0f' if factor >= 100 else '.1f' if factor >= 1.15 else '.2f')


def bars(title, subtitle, groups, source):
    """Returns an SVG of groups [(heading, [(job, opponent, factor)])]: a bar per row from 1 to its factor on a
    logarithmic axis, or a dot if it is below 1."""
    width, left, right, row, y = 840, 470, 788, 21, 60
    most = max(factor for _, rows in groups for _, _, factor in rows)
    marks = [s for s in STEPS if 1 <= s <= most]

    def x_of(factor):
        return left + (right - left) * math.log(factor) / math.log(most)

    rows_of = []
    for heading, rows in groups:
        rows_of.append(text(16, y + 20, heading, ' font-weight="600"'))
        y += 27
        for job, opponent, factor in rows:
            middle, end = y + row / 2, x_of(factor)
            rows_of += [text(16, middle + 4, job),
                        text(left - 14, middle + 4, opponent, ' text-anchor="end" fill="#57606a"'),
                        f'<rect x="{left}" y="{middle - 7.5}" width="{end - left:.1f}" height="15" fill="#0072b2"/>'
                        if factor >= 1 else f'<circle cx="{end:.1f}" cy="{middle}" r="4.5" fill="#0072b2"/>',
                        text(max(end, left) + 6, middle + 4, times(factor) + '×',
                             ' font-weight="600" stroke="#fff" stroke-width="3" paint-order="stroke"')]
            y += row
    lines = [f'<path d="M{x_of(s):.1f} 62V{y + 6}" stroke="{"#57606a" if s == 1 else "#d8dee4"}"/>' for s in marks]
    labels = [text(x_of(s), y + 20, f'{s}×', ' text-anchor="middle" class="s"') for s in marks]
    return frame(width, y + 52, title, subtitle, lines + rows_of + labels, source)


# ---- the pictures ----------------------------------------------------------------------------------------------------

ISA = cpu.find('runs on (.*)').upper().replace('AVX5', 'AVX-5')
XEON = f"{cpu.find('processor: (.*) Processor').replace('(R)', '')} with {ISA}"
ON_H200 = gpu.find('^(NVIDIA .*)') + '; tests/results/gpu_bench.txt'
BATCHED = 'cub::DeviceMemcpy::Batched'
COMPILED_FOR = "Other engines' kernels are compiled for each row size"
# Of the opponent's time, for one chunk, both from the call to the end of the work. They are in a target's line.
CHUNK = r"time / %s's, 4 KB fragments .*[ ,;]128 x 4 KB ([\d.]+)"
CHUNK_OPPONENTS = ('cudaMemcpyBatchAsync', 'cudaMemcpyAsync')
COUNTS = {10 ** p: ('1', '10', '100', '1k', '10k', '100k', '1M')[p] for p in range(7)}
BYTES = {size(label): label for label in ('256 B', '1 KB', '4 KB', '16 KB', '64 KB', '256 KB', '1 MB')}


def overview():
    aligned = PREFIX['both aligned to 64 bytes']
    torch_ways = {'gather': 'torch.index_select, embedding', 'store': 'torch.index_put_, index_copy_'}
    groups = (
        ('One core of the CPU', [
            ('Compare prefixes of 64 tokens', 'std::mismatch', aligned['64'][7]),
            ('Compare prefixes of 1,024 tokens', 'std::mismatch', aligned['1024'][7])] + [
            (f'{name.capitalize()} random rows of 1 KB', 'memcpy per row', HOST[name]['1024'][4]) for name in HOST]),
        ('One GPU', [
            (f'{name.capitalize()} 64 to 65,536 rows, mean (worst {min(ratios):.2f}×)', torch_ways[name], mean(ratios))
            for name, ratios in ((name, [1 / values[4] for values in table.values()]) for name, table in TORCH.items())
            ] + [
            (f'{name} 1 to 200,000 rows, mean (worst {min(ratios):.2f}×)', engine, mean(ratios))
            for name, engine, ratios in (
                ('Gather', 'mini-sglang', [1 / values[6] for values in GATHER.values()]),
                ('Store', 'SGLang, mini-sglang', [1 / values[8] for values in STORE.values()]))
            ] + [
            (f'{what}, mean (worst {1 / max(ratios):.2f}×)', engine, 1 / mean(ratios)) for what, engine, ratios in (
                ('Store K and V as FP8', 'vLLM', known(FP8_STORE, 3)),
                ('Store K and V as FP8', 'SGLang', known(FP8_STORE, 8)),
                ('Gather pages from FP8 to bf16', 'vLLM', known(FP8_GATHER, 6)))] + [
            (f'Transfer rows of 4 KB {where} the host', 'cudaMemcpyBatchAsync', rates[0] / rates[6])
            for where, rates in (('from', OFFLOAD['to GPU 4 KB']), ('to', OFFLOAD['to host 4 KB']))] + [
            (f'Unpack {what}', BATCHED, UNPACK[key][2] / UNPACK[key][0]) for what, key in (
                ('fragments of 64 B to 128 KB', '64 B to 128 KB, 96 MB 0'),
                ('32,768 fragments of 4 KB', '32,768 x 4 KB 0'))] + [
            ('Unpack 128 fragments of 4 KB', name, 1 / float(gpu.find(CHUNK % name))) for name in CHUNK_OPPONENTS]),
        ('Two GPUs with NVLink', [
            (f'{name.capitalize()} of {size}', 'NCCL, its faster way', 1 / COLLECTIVES[name][2][size][5])
            for name in COLLECTIVES for size in ('8 KB', '1 MB')] + [
            ('All-to-all of 8 KB', 'NCCL, its faster way', 1 / ALL_TO_ALL[2]['8 KB'][3])] + [
            ('Sum, residual and RMSNorm of 8 tokens', opponent, norm_ratios(2, 8, *columns))
            for opponent, columns in (('NCCL, norm kernel', (2, 3)), ('sum, norm kernel', (1,)),
                                      ('one-shot kernel', (4,)))]),
        ('Near the limit: scattered rows against one contiguous copy', [
            ('Gather 2,097,152 rows of 1 KB', 'one cudaMemcpyAsync', LARGE['gather 1024 2097152'][3]),
            ('Transfer 1 GiB of pages of 64 layers', 'one cudaMemcpyAsync', LAYERS['pages 32 KB 1024.0'][6]),
            ('Transfer rows of 4 KB to the host', 'one cudaMemcpyAsync', OFFLOAD['to host 4 KB'][8])]))
    return bars('kvprim against what you would use instead',
                'Times as fast; higher is better. The axis is logarithmic, means are geometric.', groups,
                f"{gpu.find('^(NVIDIA [^,]*),')}, CUDA {gpu.find('runtime (.*)')}, {nccl.find('(NCCL [^,]*)')}; "
                f'{XEON}; tests/results/')


def column(table, row_bytes, at):
    """Returns [(rows, us)] for rows of that many bytes, where the column has a number."""
    rows = [(key.split(), values) for key, values in table.items()]
    return [(int(key[1]), values[at]) for key, values in rows if int(key[0]) == row_bytes and at < len(values)]


def limit(row_bytes, most):
    """Returns [(rows, us)] of an empty kernel, or of a device-to-device copy of as many bytes if that takes longer."""
    us_per_row = 2 * row_bytes / (COPY * 1e3)
    return [(1, EMPTY), (EMPTY / us_per_row, EMPTY), (most, us_per_row * most)]


def over_rows(title, subtitle, of, lines):
    """Draws time over the number of rows, for three row sizes. `of` is how many rows a token has."""
    panels = []
    for row_bytes in (128, 2048, 14336):
        series = [(name, style, column(table, row_bytes, at)) for name, style, table, at in lines]
        bound = limit(of * row_bytes, max(rows for rows, _ in series[-1][2]))
        panels.append((f'{row_bytes:,} bytes', [('limit: empty kernel, copy', 'limit', bound)] + series))
    return picture(title, f'Microseconds per launch; lower is better. {subtitle}', 'rows', COUNTS, panels, ON_H200)


def gather():
    return over_rows('Gather: time by number and size of rows', COMPILED_FOR, 1, (
        ('cudaMemcpyAsync per row', 'third', OTHERS, 3), (BATCHED, 'second', OTHERS, 1),
        ('mini-sglang', 'first', GATHER, 1), ('kvprim, dependent launch', 'ours too', GATHER, 3),
        ('kvprim', 'ours', GATHER, 0)))


def store():
    return over_rows('Store: time by number and size of rows of K, and of V', COMPILED_FOR, 2, (
        ('mini-sglang', 'second', STORE, 1), ('SGLang, dependent launch', 'fourth', STORE, 6),
        ('SGLang', 'first', STORE, 2), ('kvprim, dependent launch', 'ours too', STORE, 4),
        ('kvprim', 'ours', STORE, 0)))


def unpack():
    """Draws batches of equal fragments of at least 16 MB. A row's microseconds times its GB/s give its bytes."""
    panels = []
    for heading, offset in (('aligned to 16 bytes', 0), ('sources 3 bytes off', 3)):
        matches = {key: re.fullmatch(rf'([\d,]+) x (\d+ [KM]?B) {offset}', key) for key in UNPACK}
        rows = sorted((size(m.group(2)), UNPACK[key]) for key, m in matches.items()
                      if m and int(m.group(1).replace(',', '')) * size(m.group(2)) >= 16 << 20)
        panels.append((heading, [('limit: device-to-device copy', 'limit', [(b, COPY) for b, _ in rows])] + [
            (name, style, [(b, v[0] * v[1] / v[at]) for b, v in rows]) for name, style, at in (
                ('cudaMemcpyAsync per fragment', 'third', 4), ('cudaMemcpyBatchAsync', 'fourth', 5),
                ('warp per fragment', 'second', 3), (BATCHED, 'first', 2), ('kvprim', 'ours', 0))]))
    return picture('Unpack: 16 to 128 MB of equal fragments in one call', 'GB/s, read and written; higher is better',
                   'bytes of a fragment', BYTES, panels, ON_H200, linear=True)


def offload():
    panels = []
    for way, heading in (('to GPU', 'from the host to the GPU'), ('to host', 'from the GPU to the host')):
        rows = [(size(key[len(way):]), values) for key, values in OFFLOAD.items() if key.startswith(way)]
        rows = [row for row in rows if row[0] in BYTES]
        panels.append((heading, [(name, style, [(b, v[at]) for b, v in rows]) for name, style, at in (
            ('limit: copy engine, 256 MiB at once', 'limit', 5), ('cudaMemcpyAsync per row', 'third', 7),
            ('cudaMemcpyBatchAsync', 'first', 6), ('kvprim, on 2 multiprocessors', 'ours', 0))]))
    return picture('Offload: rows between pinned host memory and the GPU',
                   'GB/s; higher is better.',
                   'bytes of a row', BYTES, panels, ON_H200.replace('gpu_bench', 'gpu_transfer'), linear=True)


def all_reduce():
    panels = [(f'{gpus} GPUs', [(name, style, [(size(key), values[at]) for key, values in table.items()])
                                for name, style, at in (
                                    ('NCCL in a window, copied in and out', 'third', 2),
                                    ('NCCL in a window', 'second', 1), ('NCCL', 'first', 0),
                                    ('kvprim', 'ours', 3))])
              for gpus, table in sorted(ALL_REDUCE.items())]
    labels = {size(label): label for label in ('2 KB', '32 KB', '512 KB', '8 MB', '64 MB')}
    return picture('All-reduce: sums of bf16', 'Microseconds per call; lower is better', 'bytes of the tensor', labels,
                   panels, nccl.find('on device 0, ([^;]*; NCCL [^,]*)') + '; tests/results/nccl_bench.txt')


def prefix():
    panels = []
    for heading, table in zip(('both arrays aligned to 64 bytes', 'misaligned to each other'), PREFIX.values()):
        rows = [(int(tokens), values) for tokens, values in table.items()]
        panels.append((heading, [('limit of L1: two 64-byte loads per cycle', 'limit', [(n, 128) for n, _ in rows])] + [
            (name, style, [(n, 8 * n / values[at]) for n, values in rows]) for name, style, at in (
                ('std::mismatch', 'first', 5), ('plain loop', 'third', 3), ('memcmp', 'second', 4),
                ('kvprim', 'ours', 0))]))
    return picture('Prefix: equal leading int32 tokens of two arrays', 'Bytes of both arrays per core cycle; higher is '
                   'better', 'tokens', COUNTS, panels, f'One core of an {XEON}; tests/results/bench.txt')


def handed_over(options, lanes):
    """Returns what tests/bench/bench_handover.cu measured on so many communicators."""
    commands = handover.parts(rf'== build/(?:14|bench)_handover (.*{options} --requests 2\b.*), GPUs 0,1')
    return [part for command, part in commands if ('--lanes 1' in command) == (lanes == 1)][0]


TWO_LANES, ONE_LANE, SOCKETS = (handed_over(*way) for way in (('--mode all', 2), ('--mode all', 1), ('--sockets', 1)))


def over_chunks(title, part):
    rows = [re.match(r'(ring|one|pack|straight|copy)\b(.*?)  +([\d.]+) ', row) for row in part.lines]
    rates = {row.group(1) + row.group(2): float(row.group(3)) for row in rows if row}
    ring = sorted((size(re.search(r'x ([\d.]+ MB)', name).group(1)), rate) for name, rate in rates.items()
                  if name.startswith('ring'))
    others = (('copy engine, contiguous bytes', 'limit'), ('one ncclSend of contiguous bytes', 'first'),
              ("straight into the peer's pages", 'ours too'), ('pack, one ncclSend, unpack, no overlap', 'second'))
    series = [(name, style, [(chunk, rates[name]) for chunk, _ in ring]) for name, style in others if name in rates]
    labels = {chunk: f'{chunk >> 20} MB' for chunk, _ in ring}
    return picture(title, 'GB/s; higher is better', 'bytes of a chunk', labels,
                   [(part.find(r'^([\d,]+ tokens, [\d.]+ MB)'), series + [('ring', 'ours', ring)])],
                   part.find('on device 0, ([^;]*; NCCL [^,]*)') + '; tests/results/handover.txt', linear=True)


def handover_nvlink():
    return over_chunks('Hand-over of KV pages to another GPU, two communicators', TWO_LANES)


def handover_sockets():
    return over_chunks('Hand-over of KV pages over sockets, two communicators', handed_over('--sockets', 2))


# ---- the figures -----------------------------------------------------------------------------------------------------


def each(numbers):
    return ' / '.join(times(number) for number in numbers)


def times_as_fast():
    """Rows (job, opponent, opponent's time / kvprim's)."""
    aligned = PREFIX['both aligned to 64 bytes']
    sizes, tokens = ('2 KB', '64 KB', '1 MB', '16 MB', '64 MB'), ('1', '8', '32', '128')
    offload = [OFFLOAD[f'{way} 4 KB'] for way in ('to GPU', 'to host')]

    def mean_and_worst(tables, columns):
        ratios = [[1 / values[at] for values in table.values()] for table, at in zip(tables, columns)]
        return f'{each(mean(some) for some in ratios)}; {each(min(some) for some in ratios)}'

    def of_each(*columns):
        return (f'{each(1 / mean(ratios) for ratios in columns)}; {each(1 / max(ratios) for ratios in columns)}')

    return [
        ('prefix compare, 16 / 64 / 256 / 1,024 / 4,096 int32', '`std::mismatch`, g++ -O3',
         each(aligned[n][7] for n in ('16', '64', '256', '1024', '4096'))),
        ('gather / store on the CPU, random rows of 1,024 bytes', 'a `memcpy` per row',
         each(table['1024'][4] for table in HOST.values())),
        (f"gather / store, {len(TORCH['gather'])} sizes: mean; worst", 'the faster of two ways of torch',
         mean_and_worst(TORCH.values(), (4, 4))),
        (f'gather / store of 96 to 16,384 bytes, {len(GATHER)} / {len(STORE)} sizes: mean; worst; with dependent '
         'launch on both sides', 'mini-sglang / and SGLang',
         f'{mean_and_worst((GATHER, STORE), (2, 3))}; {mean_and_worst((GATHER, STORE), (5, 7))}'),
        ('store in pages of 16 and 64 tokens, NHD, HND, K beside V: mean', 'the best of vLLM and two of FlashInfer',
         each([1 / float(gpu.find(r'paged store / best of three +([\d.]+), target'))])),
        (f'store of K and V from bf16 as e4m3, {len(FP8_STORE)} sizes: mean; worst', "vLLM's kernel / SGLang's, with "
         'dependent launch on both sides', of_each(known(FP8_STORE, 3), known(FP8_STORE, 8))),
        ('store of rows of `fp8_ds_mla` / of the indexer / gather of pages from e4m3 to bf16 / of `fp8_ds_mla`: mean; '
         'worst', "vLLM's kernels",
         of_each(known(LATENTS, 3, 'fp8_ds_mla '), known(LATENTS, 3, 'fp8_indexer '), known(FP8_GATHER, 6),
                 known(FP8_GATHER, 7, 'fp8_ds_mla '))),
        ('unpack of 65,536 x 256 B / 32,768 x 4 KB / 64 B to 128 KB; of 128 x 4 KB, from the call to the end',
         f'`{BATCHED}`; `cudaMemcpyBatchAsync` / `cudaMemcpyAsync` for each',
         each(UNPACK[key][2] / UNPACK[key][0] for key in (
             '65,536 x 256 B 0', '32,768 x 4 KB 0', '64 B to 128 KB, 96 MB 0')) + '; ' +
         each(1 / float(gpu.find(CHUNK % name)) for name in CHUNK_OPPONENTS)),
        ('copies at scattered addresses, 4 KB / 4 to 64 KB; of 4 KB to / from pinned memory, from the call to the end',
         '`cub::DeviceMemcpy::Batched`; `cudaMemcpyBatchAsync`',
         f"{each(COPIES[key][4] / COPIES[key][0] for key in ('32,768 x 4 KB', '4 KB to 64 KB, 256 MB'))}; "
         + each(v[2] / v[0] for v in (PINNED['4096 x 4 KB to pinned'], PINNED['4096 x 4 KB from pinned']))),
        ('slots of 32 tokens of 32 requests / of 8,192 of 1,024, by pairs; by lengths', "vLLM's kernel for slots",
         '; '.join(each(SLOTS[f'int32 {key} {form}'][4] / SLOTS[f'int32 {key} {form}'][0]
                        for key in ('32 32', '8192 1024'))
                   for form in ('pairs', 'lengths'))),
        ('transfer of 4 KB rows, pinned host memory to GPU / back; from the call to the end', '`cudaMemcpyBatchAsync`',
         f"{each(v[0] / v[6] for v in offload)}; {each(v[9] for v in offload)}")] + [
        (f'{"; ".join(COLLECTIVES)} of {" / ".join(sizes)}, {gpus} GPUs', 'the faster of two ways of NCCL',
         '; '.join(each(1 / table[gpus][n][5] for n in sizes) for table in COLLECTIVES.values()))
        for gpus in NCCL_BY_GPUS] + [
        row for gpus in DECODE_BY_GPUS for row in (
            (f'sum, residual and RMSNorm of {" / ".join(tokens)} tokens of 4,096 bf16, {gpus} GPUs',
             "the sum and a norm kernel; NCCL and that kernel; a one-shot kernel like TensorRT-LLM's and FlashInfer's",
             '; '.join(each(norm_ratios(gpus, n, *columns) for n in tokens) for columns in ((1,), (2, 3), (4,)))),
            (f'all-to-all of {" / ".join(sizes)}, {gpus} GPUs', 'the faster of two ways of NCCL',
             each(1 / ALL_TO_ALL[gpus][n][3] for n in sizes)))]


def shares():
    """Rows (job, limit, the limit's time / kvprim's as text)."""
    odd = [min(values[4] for key, values in ODD.items() if key.startswith(name)) for name in ('gather', 'store')]
    off = [float(gpu.find(rf'{name}, misaligned / aligned GB/s +([\d.]+), target')) for name in ('gather', 'store')]
    return [
        ('gather of 2,097,152 / store of 1,048,576 rows of 1,024 bytes', 'one copy on the device',
         each((LARGE['gather 1024 2097152'][3], LARGE['store 1024 1048576'][3]))),
        ('65,536 rows that change type: K and V of 1,024 elements to e4m3 / `fp8_ds_mla` / 1,024 elements from e4m3 to '
         'bf16', 'a plain move of as many bytes',
         each((FP8_STORE['1024 65536'][10], LATENTS['fp8_ds_mla 65536'][10], FP8_GATHER['NHD 1024 65536'][9]))),
        ('transfer of 4 KB rows, pinned host memory to GPU / back, on 2 / 8 SMs', 'one copy of the copy engine',
         each(OFFLOAD[f'{way} 4 KB'][at] / OFFLOAD[f'{way} 4 KB'][5]
              for at in (0, 1) for way in ('to GPU', 'to host'))),
        ('gather / store, the worst: up to 64 rows in pages; rows of odd sizes; misaligned addresses',
         'a plain table; the next multiple of 128 bytes; aligned addresses',
         '; '.join(each(numbers) for numbers in (PAGED, odd, off))),
        ('all-reduce of 8 / 24 / 64 MB, 2 GPUs', 'a kernel that only pushes as many bytes; the copy engine',
         '; '.join(each(ALL_REDUCE[2][n][at] / 100 for n in ('8 MB', '24 MB', '64 MB')) for at in (8, 9))),
        ('KV pages of a request to another GPU: straight; by a ring, 64 MB, two communicators / one; sockets, 4 MB',
         'the copy engine; one `ncclSend` of as many bytes',
         '; '.join((each([float(TWO_LANES.find(r"straight into .* ([\d.]+)$"))]),
                    each(float(part.find(r'ring of \d x 64 MB on \d lanes? +[\d.]+ +([\d.]+)'))
                         for part in (TWO_LANES, ONE_LANE)),
                    each([float(SOCKETS.find(r'ring of \d x 4 MB on \d lane +[\d.]+ +([\d.]+)'))]))))]


def figures():
    """The tables of README.md."""
    sources = (cpu, replay, gpu, convert, transfer, torch, nccl, handover)
    stale = [source.name for source in sources if results.others(source.name)]
    links = ', '.join(f'[`{name}`]({RESULTS}{name})' + '†' * (name in stale) for name in (s.name for s in sources))
    note = '; † of other headers than these, or of unknown ones' if stale else ''
    texts = [f"Measured on one core of an {XEON}, and on {gpu.find('^(NVIDIA [^,]*),')}s: {links}{note}. The "
             f"replay takes {replay.find('^requests +([0-9,]+)')} requests of Mooncake's production trace; "
             f"{replay.find('([0-9.]+) % hit')} % of their tokens are cached. With rows of "
             f"{replay.find('--kv-bytes ([0-9]+)')} bytes one core replays {replay.find('^tokens .* ([0-9.]+) M/s')} "
             'million tokens per second.\n']
    for head, rows in (('opponent | times as fast; higher is better', times_as_fast()),
                       ('limit | part of that limit; 1 is the most',
                        shares())):
        texts.append(f'| operation | {head} |\n|---|---|---|\n' + ''.join(f'| {" | ".join(row)} |\n' for row in rows))
    return '\n'.join(texts)


def read(path):
    try:
        with open(path, encoding='utf-8', newline='') as file:
            return file.read()
    except FileNotFoundError:
        return ''


def main():
    if sys.argv[1:] not in ([], ['--check']):
        sys.exit(__doc__)
    before, begin, rest = read(README).partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f'{README}: no lines {BEGIN}{END}')
    pictures = (overview, gather, store, unpack, offload, all_reduce, prefix, handover_nvlink, handover_sockets)
    files = {RESULTS + draw.__name__ + '.svg': draw() for draw in pictures}
    files[README] = before + BEGIN + figures() + END + after
    stale = [path for path, content in files.items() if read(path) != content]
    if sys.argv[1:]:
        sys.exit(f"{', '.join(stale)}: not what tests/results/ says: make plots" if stale else 0)
    for path in stale:
        with open(path, 'w', encoding='utf-8', newline='') as file:
            file.write(files[path])
        print(path)
    print(*results.table(), sep='\n')


main()

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Turns what was measured, tests/results/*.txt, into pictures, tests/results/*.svg, and tables: README.md's two, and
tests/results/FIGURES.md with every figure.

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
import textwrap

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import results  # noqa: E402: tests/results.py

README, RESULTS = 'README.md', 'tests/results/'
BEGIN, END = '<!-- %s: written by `make plots` -->\n', '<!-- end of %s -->\n'  # of README.md's tables

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
    return int(float(number) * (1 << {'B': 0, 'KB': 10, 'MB': 20}[unit]))


def known(table, at, pattern=''):
    """Returns the column's numbers in rows whose key matches, where there is a number."""
    return [values[at] for key, values in table.items() if re.match(pattern, key) and not math.isnan(values[at])]


def mean(numbers):
    numbers = list(numbers)
    return math.exp(sum(math.log(number) for number in numbers) / len(numbers))


def target(results, name):
    """Returns the number in a target's line."""
    return float(results.find(re.escape(name) + r' +([\d.]+), target'))


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


def width_of(what):
    """Returns the pixels that a text takes in a wide font."""
    return sum(4 if c in " .,:;'fijlrt" else 9.5 if c.isupper() or c in 'mw' else 7 for c in what)


def legend(series, top):
    """Draws line and name of each series, as many per row as fit."""
    parts, x, y = [], 16, top
    for name, style in series:
        width = 56 + width_of(name)
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
    """Returns an SVG of groups [(heading, [(job, opponent, factor)])]: a bar per row from 1 to its factor, to the left
    if it is below 1, on a logarithmic axis."""
    width, left, right, row, y = 900, 520, 848, 21, 60
    factors = [factor for _, rows in groups for _, _, factor in rows]
    least, most = max(s for s in STEPS if s <= min(factors)), max(factors)
    marks = [s for s in STEPS if least <= s <= most]

    def x_of(factor):
        return left + (right - left) * math.log(factor / least) / math.log(most / least)

    rows_of = []
    for heading, rows in groups:
        rows_of.append(text(16, y + 20, heading, ' font-weight="600"'))
        y += 27
        for job, opponent, factor in rows:
            if 16 + width_of(job) + 12 + width_of(opponent) + 14 > left:
                sys.exit(f"overview: '{job}' and '{opponent}' overlap")
            middle, (low, high) = y + row / 2, sorted((x_of(1), x_of(factor)))
            rows_of += [text(16, middle + 4, job),
                        text(left - 14, middle + 4, opponent, ' text-anchor="end" fill="#57606a"'),
                        f'<rect x="{low:.1f}" y="{middle - 7.5}" width="{high - low:.1f}" height="15" '
                        f'fill="{STYLES["ours" if factor >= 1 else "first"][0]}"/>',
                        text(high + 6, middle + 4, times(factor) + '×',
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
                   panels, nccl.find('on device 0, ([^,]*; NCCL [^,]*)') + '; tests/results/nccl_bench.txt')


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
    labels = {chunk: f'{chunk / (1 << 20):g} MB' for chunk, _ in ring}
    return picture(title, 'GB/s; higher is better', 'bytes of a chunk', labels,
                   [(part.find(r'^([\d,]+ tokens, [\d.]+ MB)'), series + [('ring', 'ours', ring)])],
                   part.find('on device 0, ([^,]*; NCCL [^,]*)') + '; tests/results/handover.txt', linear=True)


def handover_nvlink():
    return over_chunks('Hand-over of KV pages to another GPU, two communicators', TWO_LANES)


def handover_sockets():
    return over_chunks('Hand-over of KV pages over sockets, two communicators', handed_over('--sockets', 2))


# ---- the figures -----------------------------------------------------------------------------------------------------


class Figure:
    """How many times as fast a job is with kvprim as instead, by variant, which takes the place of {} in the job:
    {variant: factor}, or {'mean': factor, 'worst': factor}. All of them are in FIGURES.md. `drawn`: variants in
    overview.svg. `row`: the job in README.md's table of figures or, if there is a `call`, what that replaces, in the
    table at its top. `source`: where it was measured, if not on GPUs by `make gpu-bench`."""

    def __init__(self, job, instead, factors, drawn=(), row='', call='', source=None):
        self.job, self.instead, self.factors, self.drawn, self.row, self.call = job, instead, factors, drawn, row, call
        self.source = source

    def factor(self):
        """Returns all of its factors as one text."""
        if 'worst' in self.factors:
            return f"{times(self.factors['mean'])}, worst {times(self.factors['worst'])}"
        ends = [times(some(self.factors.values())) for some in (min, max)]
        return ' to '.join(ends if ends[0] != ends[1] else ends[:1])

    def bars(self):
        """Returns its rows of overview.svg."""
        bars = []
        for variant in self.drawn:
            worst = f" (worst {times(self.factors['worst'])}×)" if 'worst' in self.factors else ''
            job = self.job.format(variant + worst)
            bars.append((job[0].upper() + job[1:], self.instead.replace('`', ''), self.factors[variant]))
        return bars


def spread(ratios):
    """Returns mean and worst of how many times as fast, from kvprim's times as parts of the opponent's."""
    return {'mean': 1 / mean(ratios), 'worst': 1 / max(ratios)}


def at(table, column):
    return [values[column] for values in table.values()]


def few(*numbers):
    """Returns [(number, how to say so many tokens)]."""
    return [(n, n + ' token' + 's' * (n != '1')) for n in numbers]


def on_cpu():
    aligned = PREFIX['both aligned to 64 bytes']
    return [
        Figure('compare prefixes of {} tokens', '`std::mismatch`',
               {f'{n:,}': aligned[str(n)][7] for n in (16, 64, 256, 1024, 4096)}, ['64', '1,024'],
               '`std::mismatch`: prefixes of 16 to 4,096 tokens', 'kvprim_prefix_i32', cpu),
        Figure('{} random rows of 1 KB', 'a `memcpy` per row', {name: HOST[name]['1024'][4] for name in HOST}, HOST)]


def rows():
    return [
        Figure('gather 64 to 65,536 rows, {}', '`torch.index_select`, `embedding`', spread(at(TORCH['gather'], 4)),
               ['mean'], '`torch.index_select`, `embedding`: 64 to 65,536 rows', 'kvprim_cuda_gather'),
        Figure('store 64 to 65,536 rows, {}', '`torch.index_put_`, `index_copy_`', spread(at(TORCH['store'], 4)),
               ['mean'], '`torch.index_put_`, `index_copy_`: 64 to 65,536 rows', 'kvprim_cuda_store'),
        Figure('gather 1 to 200,000 rows, {}', 'mini-sglang', spread(at(GATHER, 2)), ['mean']),
        Figure('gather 1 to 200,000 rows, both with dependent launch, {}', 'mini-sglang', spread(at(GATHER, 5))),
        Figure('store 1 to 200,000 rows, {}', 'SGLang, mini-sglang', spread(at(STORE, 3)), ['mean'],
               'store 1 to 200,000 rows'),
        Figure('store 1 to 200,000 rows, both with dependent launch, {}', 'SGLang, mini-sglang', spread(at(STORE, 7))),
        Figure('store in pages of 16 and 64 tokens, NHD, HND, K beside V, mean{}', 'vLLM, two of FlashInfer',
               {'': 1 / target(gpu, 'paged store / best of three')}),
        Figure('slots of {}', 'vLLM', {
            f'{name} by {form}': SLOTS[f'int32 {key} {form}'][4] / SLOTS[f'int32 {key} {form}'][0]
            for key, name in (('32 32', '32 tokens of 32 requests'), ('8192 1024', '8,192 tokens of 1,024 requests'))
            for form in ('pairs', 'lengths')}),
        Figure('store K and V as FP8, {}', 'vLLM', spread(known(FP8_STORE, 3)), ['mean'],
               "vLLM's kernel: K and V from bf16 to e4m3", 'kvprim_cuda_store'),
        Figure('store K and V as FP8, both with dependent launch, {}', 'SGLang', spread(known(FP8_STORE, 8)), ['mean'],
               'store K and V as e4m3, both with dependent launch'),
        Figure('store rows of `fp8_ds_mla`, {}', 'vLLM', spread(known(LATENTS, 3, 'fp8_ds_mla '))),
        Figure("store keys of DeepSeek's indexer, {}", 'vLLM', spread(known(LATENTS, 3, 'fp8_indexer '))),
        Figure('gather pages from FP8 to bf16, {}', 'vLLM', spread(known(FP8_GATHER, 6)), ['mean']),
        Figure('gather rows of `fp8_ds_mla` to bf16, {}', 'vLLM', spread(known(FP8_GATHER, 7, 'fp8_ds_mla ')))]


def addresses():
    ways = {'from the host': OFFLOAD['to GPU 4 KB'], 'to the host': OFFLOAD['to host 4 KB']}
    return [
        Figure('unpack {}', f'`{BATCHED}`', {name: UNPACK[key][2] / UNPACK[key][0] for key, name in (
            ('65,536 x 256 B 0', '65,536 fragments of 256 B'), ('32,768 x 4 KB 0', '32,768 fragments of 4 KB'),
            ('64 B to 128 KB, 96 MB 0', 'fragments of 64 B to 128 KB'), ('128 x 1 MB 0', '128 fragments of 1 MB'))},
            ['fragments of 64 B to 128 KB', '32,768 fragments of 4 KB'],
            f'`{BATCHED}`: 16 to 128 MB of fragments', 'kvprim_cuda_unpack'),
        *(Figure('unpack 128 fragments of 4 KB{}, call to end', f'`{name}`', {'': 1 / float(gpu.find(CHUNK % name))},
                 ['']) for name in CHUNK_OPPONENTS),
        Figure('copy {} at scattered addresses', f'`{BATCHED}`', {
            name: COPIES[key][4] / COPIES[key][0]
            for key, name in (('32,768 x 4 KB', '4 KB each'), ('4 KB to 64 KB, 256 MB', '4 to 64 KB each'))}),
        Figure('copy 4 KB each {} pinned memory, call to end', '`cudaMemcpyBatchAsync`', {
            way: PINNED[f'4096 x 4 KB {way} pinned'][2] / PINNED[f'4096 x 4 KB {way} pinned'][0]
            for way in ('to', 'from')}),
        Figure('transfer rows of 4 KB {}', '`cudaMemcpyBatchAsync`', {way: ways[way][0] / ways[way][6] for way in ways},
               ways, '`cudaMemcpyBatchAsync`: rows of 4 KB, pinned host memory', 'kvprim_cuda_transfer'),
        Figure('transfer rows of 4 KB {}, call to end', '`cudaMemcpyBatchAsync`', {way: ways[way][9] for way in ways})]


def across(gpus):
    sizes = ('2 KB', '8 KB', '64 KB', '1 MB', '16 MB', '64 MB')
    calls = {'all-reduce': (f"NCCL's all-reduce: 2 KB to 64 MB, {gpus} GPUs", 'kvprim_all_reduce')}
    return [
        *(Figure(f'{name} of {{}}', 'NCCL, its faster way', {n: 1 / table[gpus][n][5] for n in sizes}, ['8 KB', '1 MB'],
                 *calls.get(name, ())) for name, table in COLLECTIVES.items()),
        Figure('all-to-all of {}', 'NCCL, its faster way', {n: 1 / ALL_TO_ALL[gpus][n][3] for n in sizes}, ['8 KB']),
        *(Figure('sum, residual and RMSNorm of {}', instead,
                 {name: norm_ratios(gpus, n, *columns) for n, name in few('1', '8', '32', '128')}, ['8 tokens'], *call)
          for instead, columns, call in (
              ('NCCL, norm kernel', (2, 3),
               (f"NCCL's sum, a norm kernel: 1 to 128 tokens of 4,096, {gpus} GPUs", 'kvprim_all_reduce_norm')),
              ("kvprim's sum, norm kernel", (1,), ()), ("one-shot kernel like TensorRT-LLM's", (4,), ())))]


def limits():
    return [
        Figure('{} of 1 KB', 'one `cudaMemcpyAsync`', {
            'gather 2,097,152 rows': LARGE['gather 1024 2097152'][3],
            'store 1,048,576 rows': LARGE['store 1024 1048576'][3]}, ['gather 2,097,152 rows']),
        Figure('transfer 1 GiB of pages of 64 layers{}', 'one `cudaMemcpyAsync`',
               {'': LAYERS['pages 32 KB 1024.0'][6]}, ['']),
        Figure('transfer rows of 4 KB {} multiprocessors', 'the copy engine', {
            f'{way} the host on {sms}': OFFLOAD[key][column] / OFFLOAD[key][5]
            for sms, column in (('2', 0), ('8', 1)) for way, key in (('from', 'to GPU 4 KB'), ('to', 'to host 4 KB'))},
            ['to the host on 2']),
        Figure('65,536 rows: {}', 'a plain move of as many bytes', {
            'K and V of 1,024 elements to e4m3': FP8_STORE['1024 65536'][10],
            '`fp8_ds_mla`': LATENTS['fp8_ds_mla 65536'][10],
            '1,024 elements from e4m3 to bf16': FP8_GATHER['NHD 1024 65536'][9]}),
        *(Figure('all-reduce of {}', limit,
                 {n: ALL_REDUCE[2][n][column] / 100 for n in ('8 MB', '24 MB', '64 MB')})
          for limit, column in (('a kernel that only pushes as many bytes', 8), ('the copy engine', 9))),
        Figure('KV pages straight to another GPU{}', 'the copy engine',
               {'': float(TWO_LANES.find(r'straight into .* ([\d.]+)$'))})]


def losses():
    odd = {name: min(v[4] for key, v in ODD.items() if key.startswith(name + ' 132 ')) for name in ('gather', 'store')}
    norm = 'norm to the best opponent, '
    return [
        Figure('compare prefixes of {}', '`std::mismatch`',
               {name: PREFIX['both aligned to 64 bytes'][n][7] for n, name in few('1', '2')}),
        Figure('gather up to 1,024 rows, {}', 'mini-sglang',
               spread([v[2] for key, v in GATHER.items() if int(key.split()[1]) <= 1024]), ['mean'],
               'gather up to 1,024 rows'),
        Figure('store K and V as FP8, both without dependent launch, {}', 'SGLang', spread(known(FP8_STORE, 4)),
               row='store K and V as e4m3, both without dependent launch'),
        Figure('store {} with dependent launch', 'SGLang', {
            f'{name} of {what}': 1 / LATENTS[f'{key} {n}'][8]
            for what, key in (('DeepSeek V4', 'fp8_ds_mla_v4'), ("DeepSeek's indexer", 'fp8_indexer'))
            for n, name in few('1', '8', '64')}, ['8 tokens of DeepSeek V4', "8 tokens of DeepSeek's indexer"],
            'store 1 to 64 tokens of DeepSeek V4, or of its indexer, both with dependent launch'),
        Figure("store V in vLLM's first layout, the worst size{}", "a kernel like `torch.index_put_`'s",
               {'': 1 / target(gpu, "V in vLLM's first layout / torch's index_put_")}),
        Figure('both directions over PCIe at once, the worst size{}', 'SGLang',
               {'': target(transfer, "both directions at once / the best of SGLang's kernels")}, [''],
               'both directions over PCIe at once, the worst size'),
        Figure('4 KB rows to the host beside a memory-bound kernel{}', 'the copy engine alone', {'': target(
            transfer, 'to host, 4 KB, GB/s beside memory-bound work') / OFFLOAD['to host 4 KB'][5]}),
        Figure('{} up to 64 rows in pages, the worst layout', 'a table without pages', {
            name.split()[-1]: 1 / target(gpu, name + ' / flat, to 64 tokens') for name in ('gather', 'paged store')}),
        Figure('{} rows of 132 bytes', 'rows of 256 bytes', odd, (), 'gather or store rows of 132 bytes'),
        Figure('{} rows at misaligned addresses, the worst', 'aligned addresses',
               {name: target(gpu, name + ', misaligned / aligned GB/s') for name in odd}),
        Figure('convert rows that have no kernel of their own, the worst{}', 'a plain store',
               {'': target(convert, 'moves that no kernel is made for, part of a plain store, 65,536 rows')}, (),
               'convert rows that have no kernel of their own, the worst'),
        Figure('all-reduce of 8 to 64 MB on 32 multiprocessors, the worst{}', 'a kernel that only pushes the bytes',
               {'': 1 / target(nccl, 'all_reduce on 32 multiprocessors to the push')}, (),
               'all-reduce of 8 to 64 MB on 32 multiprocessors, the worst'),
        Figure('sum, residual and RMSNorm to bf16 of {}, the worst', 'the best other way', {
            'up to 1 MB': 1 / target(nccl, norm + 'up to 1 MB'), 'more than 1 MB': 1 / target(nccl, norm + 'beyond')},
            (), 'sum, residual and RMSNorm to bf16, the worst sizes'),
        Figure('KV pages to another GPU, {}', 'one `ncclSend`', {
            f'a ring of {chunk} {way}': float(part.find(rf'ring of \d x {chunk} on \d lanes? +[\d.]+ +([\d.]+)'))
            for chunk, way, part in (('4 MB', 'on two communicators', TWO_LANES), ('8 MB', 'on two', TWO_LANES),
                                     ('64 MB', 'on two', TWO_LANES), ('64 MB', 'on one', ONE_LANE),
                                     ('4 MB', 'over sockets', SOCKETS))}, ['a ring of 4 MB on two communicators'],
               'KV pages to another GPU, by rings of 4 to 64 MB')]


SECTIONS = [('One core of the CPU', on_cpu()), ('One GPU: rows', rows()),
            ('One GPU: fragments, addresses, host memory', addresses())] + [
    (f'{gpus} GPUs with NVLink', across(gpus)) for gpus in NCCL_BY_GPUS] + [
    ('Near a limit, where 1 is the most', limits()), ('Where kvprim is slower', losses())]


def overview():
    groups = [(heading, [bar for figure in some for bar in figure.bars()]) for heading, some in SECTIONS]
    return bars('kvprim against what you would use instead',
                'Times as fast; higher is better. The axis is logarithmic, means are geometric.', groups,
                f"{gpu.find('^(NVIDIA [^,]*),')}, CUDA {gpu.find('runtime (.*)')}, {nccl.find('(NCCL [^,]*)')}; "
                f'{XEON}; tests/results/')


def table(heads, rows):
    return f"| {' | '.join(heads)} |\n|---|---|---|\n" + ''.join(f"| {' | '.join(row)} |\n" for row in rows)


def paragraph(what):
    return textwrap.fill(what, 104, break_long_words=False, break_on_hyphens=False) + '\n'  # † takes three bytes


SOURCES = cpu, replay, gpu, convert, transfer, torch, nccl, handover


def stale_sources():
    """Returns the names of those that are of other headers than the present ones."""
    return [source.name for source in SOURCES if results.others(source.name)]


def sources(where):
    """Says what was measured where, and marks the results of other headers."""
    stale = stale_sources()
    marked = ', '.join(os.path.splitext(s.name)[0] + '†' * (s.name in stale) for s in SOURCES)
    note = '; † is of other headers than these, or of unknown ones' if stale else ''
    gpus = gpu.find('^(NVIDIA [^,]*),') + 's'
    return (f'Measured on one core of an {XEON}, and on {gpus}. {where}, from files beside it: {marked}{note}. '
            'Averages are geometric.')


def first():
    """The table at the top of README.md. Its head says whether GPUs' results are of older headers."""
    stale = stale_sources()
    on_gpus = any(s.name in stale for s in (gpu, convert, transfer, torch, nccl))
    return table(('instead of', 'call', 'times as fast' + ' (older headers)' * on_gpus), (
        (figure.row, f'`{figure.call}`',
         figure.factor() + ' (older headers)' * bool(figure.source and figure.source.name in stale))
        for _, some in SECTIONS for figure in some if figure.call))


def figures():
    """The table of figures in README.md."""
    heads = 'operation', 'compared with', 'times as fast'
    return paragraph(sources(f'[FIGURES.md]({RESULTS}FIGURES.md) has all figures')) + '\n' + table(heads, (
        (figure.row, figure.instead, figure.factor()) for _, some in SECTIONS for figure in some
        if figure.row and not figure.call))


def page():
    """FIGURES.md."""
    texts = ['<!-- SPDX-License-Identifier: MIT -->\n# Figures\n\n`make plots` writes this page.\n',
             paragraph(sources('This page has all figures') + ' Each ratio comes from one run. The replay takes '
                       f"{replay.find('^requests +([0-9,]+)')} requests of Mooncake's production trace; "
                       f"{replay.find('([0-9.]+) % hit')} % of their tokens are cached. With rows of "
                       f"{replay.find('--kv-bytes ([0-9]+)')} bytes one core replays "
                       f"{replay.find('^tokens .* ([0-9.]+) M/s')} million tokens per second.")]
    for heading, some in SECTIONS:
        texts.append(f'## {heading}\n\n' + table(('operation', 'compared with', 'times as fast'), (
            (figure.job.format(variant), figure.instead, times(factor))
            for figure in some for variant, factor in figure.factors.items())))
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
    pictures = (overview, gather, store, unpack, offload, all_reduce, prefix, handover_nvlink, handover_sockets)
    files = {RESULTS + draw.__name__ + '.svg': draw() for draw in pictures}
    files[RESULTS + 'FIGURES.md'], files[README] = page(), read(README)
    for name, block in ('first figures', first()), ('figures', figures()):
        before, begin, rest = files[README].partition(BEGIN % name)
        _, end, after = rest.partition(END % name)
        if not begin or not end:
            sys.exit(f'{README}: no lines {BEGIN % name}{END % name}')
        files[README] = before + begin + block + end + after
    stale = [path for path, content in files.items() if read(path) != content]
    if sys.argv[1:]:
        sys.exit(f"{', '.join(stale)}: not what tests/results/ says: make plots" if stale else 0)
    for path in stale:
        with open(path, 'w', encoding='utf-8', newline='') as file:
            file.write(files[path])
        print(path)
    print(*results.table(), sep='\n')


main()

# SPDX-License-Identifier: MIT
"""Draws what 09_bandwidth prints: GB/s over the bytes in flight per SM, in four panels with a line for each method. The
SVG's colours follow the reader's light or dark theme.

    09_bandwidth >bandwidth.txt && python3 plot.py bandwidth.txt >bandwidth.svg
"""
import math
import re
import sys

WIDTH, HEIGHT, LEFT, TOP, BETWEEN_X, BETWEEN_Y = 400, 220, 70, 148, 30, 90
METHODS = {'16-byte loads': '#2878c8', 'cp.async': '#d97706', 'cp.async.bulk': '#2a9d5c'}
STYLE = '''<style>
  .back { fill: #ffffff } text { fill: #222222 } .grid { stroke: #dddddd } .axis { stroke: #555555 }
  .limit { stroke: #555555; fill: none }
  @media (prefers-color-scheme: dark) {
    .back { fill: #16181d } text { fill: #e4e4e4 } .grid { stroke: #3a3d44 } .axis { stroke: #b0b0b0 }
    .limit { stroke: #b0b0b0 }
  }
</style>'''


def text(x, y, what, attributes=''):
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{what}</text>'


def marker(method, x, y):
    """Methods have different shapes, so that one can tell them apart without colours."""
    shape = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"', f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
             f'<path d="M{x:.1f} {y - 6:.1f} l5 9 h-10 z"')[list(METHODS).index(method)]
    return f'{shape} fill="{METHODS[method]}"/>'


def legend(limits):
    parts = []
    for i, (method, colour) in enumerate(METHODS.items()):
        x = LEFT + 170 * i
        parts += [f'<path d="M{x} 74 h30" stroke="{colour}" stroke-width="2"/>', marker(method, x + 15, 74),
                  text(x + 38, 79, method)]
    for i, (name, gbs, dashes) in enumerate(limits):
        x = LEFT + 340 * i
        parts += [f'<path class="limit" d="M{x} 96 h30" stroke-dasharray="{dashes}"/>',
                  text(x + 38, 101, f'{name}, {gbs} GB/s')]
    return parts


def panel(title, rows, limits, step, top, numbers):
    """rows: KB in flight, and GB/s of each method, or None. Panels beside each other share their numbers."""
    x_of = {kb: WIDTH * (0.5 + i) / len(rows) for i, (kb, _) in enumerate(rows)}
    parts = [text(0, -12, title, ' font-weight="bold"')]
    for gbs in range(0, top + 1, step):
        y = HEIGHT * (1 - gbs / top)
        parts += [f'<path class="{"grid" if gbs else "axis"}" d="M0 {y:.1f} h{WIDTH}"/>',
                  text(-8, y + 4, gbs, ' text-anchor="end"') if numbers else '']
    parts += [text(x, HEIGHT + 18, kb, ' text-anchor="middle"') for kb, x in x_of.items()]
    parts.append(text(WIDTH / 2, HEIGHT + 38, 'KB in flight per SM', ' text-anchor="middle"'))
    for _, gbs, dashes in limits:
        y = HEIGHT * (1 - gbs / top)
        parts.append(f'<path class="limit" d="M0 {y:.1f} h{WIDTH}" stroke-dasharray="{dashes}"/>')
    for i, (method, colour) in enumerate(METHODS.items()):
        points = [(x_of[kb], HEIGHT * (1 - gbs[i] / top)) for kb, gbs in rows if gbs[i] is not None]
        path = ' L'.join(f'{x:.1f} {y:.1f}' for x, y in points)
        parts.append(f'<path fill="none" d="M{path}" stroke="{colour}" stroke-width="2"/>' if points else '')
        parts += [marker(method, x, y) for x, y in points]
    return parts


def main():
    with open(sys.argv[1], encoding='utf-8') as file:
        printed = file.read()
    found = [(name, re.search(pattern, printed), dashes) for name, pattern, dashes in (
        ('cudaMemcpyAsync', r'device to device: (\d+) GB/s', '2 3'), ('datasheet', r'bits = (\d+) GB/s', '8 4'))]
    limits = [(name, int(match[1]), dashes) for name, match, dashes in found if match]
    tables = [(title, unit, [(int(row[0]), [None if n == '-' else int(n) for n in row[1:]])
                             for row in map(str.split, body.splitlines()) if len(row) == 7 and row[0].isdigit()])
              for title, unit, body in re.findall(
                  r'^(HBM to .*), GB/s (.*): the best.*\n((?:.*\n)+?)  best', printed, re.M)]
    highest = max([gbs for _, gbs, _ in limits] + [n for *_, rows in tables for _, row in rows for n in row if n])
    step = next(m * 10**e for e in range(9) for m in (1, 2, 5) if highest <= 8 * m * 10**e)
    top = step * math.floor(highest / step + 1)
    width, height = LEFT + 2 * WIDTH + BETWEEN_X + 20, TOP + 2 * HEIGHT + BETWEEN_Y + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">', STYLE, f'<rect class="back" width="{width}" height="{height}"/>',
        text(LEFT, 32, f'Memory bandwidth of {printed.split(",")[0]}', ' font-size="18" font-weight="bold"'),
        text(LEFT, 52, 'the best number and size of blocks for each number of bytes in flight'), *legend(limits)]
    for i, (title, unit, rows) in enumerate(tables):
        for k, temperature in enumerate(('cold', 'L2-warm')):
            at = f'translate({LEFT + k * (WIDTH + BETWEEN_X)} {TOP + i * (HEIGHT + BETWEEN_Y)})'
            chosen = [(kb, gbs[3 * k:3 * k + 3]) for kb, gbs in rows]
            heading = f'{title}, {temperature} (GB/s {unit})'
            parts += [f'<g transform="{at}">', *panel(heading, chosen, limits, step, top, k == 0), '</g>']
    print('\n'.join([*filter(None, parts), '</svg>']))


main()

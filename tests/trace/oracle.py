# SPDX-License-Identifier: MIT
"""Answers the questions of examples/10_trace in Python: from a trace file itself, from what the program prints, and
from what the SQL files in examples/10_trace/sql return. Each gives a dictionary of tables by their titles, so that they
can be compared. A line of a table has a name, a count, and times in ns: all, the shortest and the longest; then bytes.
"""
import collections
import re

import check_trace

OPERATIONS = {'kernel', 'cuda', 'gpu_memcpy', 'gpu_memset'}
CALLS = {'cuda_runtime', 'cuda_driver', 'cuda_api'}
RANGES = {'user_annotation', 'nvtx'}
SHARES = [('attention', 'attend|attention|flash|fmha|sdpa'),
          ('matrix product', 'gemm|gemv|matmul|cutlass|cublas|xmma|nvjet'),
          ('memory', 'memcpy|memset|direct_copy_kernel'), ('concatenation', 'concat|catarray')]


def short(name):
    """The name of a kernel's function, without namespaces, template arguments and parameters."""
    name = name.replace('(anonymous namespace)', 'anonymous')
    plain, depth = '', 0
    for letter in name:
        depth += letter == '<'
        plain += letter if depth == 0 else ''
        depth -= letter == '>' and depth > 0
    return re.split(r'[ :]', plain.split('(')[0])[-1]


def usual(event, full_names):
    if event['cat'] in ('gpu_memcpy', 'gpu_memset'):
        return event['name'].split(' (')[0]
    if event['cat'] in CALLS:
        return event['name'].rstrip('0123456789').removesuffix('_v') if '_v' in event['name'] else event['name']
    return event['name'] if full_names or event['cat'] not in ('kernel', 'cuda') else short(event['name'])


def table(named, top):
    """The first lines of a table of pairs or triples: name, ns, and bytes."""
    sums = {}
    for name, ns, *more in named:
        line = sums.setdefault(name, [0, 0, ns, ns, 0])
        sums[name] = [line[0] + 1, line[1] + ns, min(line[2], ns), max(line[3], ns), line[4] + sum(more)]
    return sorted(((name, *line) for name, line in sums.items()), key=lambda line: (-line[2], line[0]))[:top]


def parts_of_gap(begin, end, call):
    if call is None:
        return [('idle: its call is unknown', end - begin)]
    a, b = (min(max(at, begin), end) for at in call)
    return [(f'idle: {name}', ns) for name, ns in (("before the next operation's call", a - begin),
                                                   ('in that call', b - a), ('after that call', end - b)) if ns]


def answers(path, full_names=True, family='', top=50, longer_than=None, more_than=100, categories=()):
    """From the file, as Chrome's JSON has it."""
    slices = [dict(e, begin=check_trace.ns(e['ts']), ns=check_trace.ns(e['dur']), args=e.get('args', {}),
                   end=check_trace.ns(e['ts']) + check_trace.ns(e['dur']))
              for e in check_trace.load(path) if e.get('ph') == 'X']
    operations = sorted((e for e in slices if e.get('cat') in OPERATIONS), key=lambda e: e['begin'])
    calls = [e for e in slices if e.get('cat') in CALLS]
    ranges = [e for e in slices if e.get('cat') in RANGES]
    for e in operations + calls + ranges:
        e['usual'] = usual(e, full_names)
    named = lambda events: table(((e['usual'], e['ns'], e['args'].get('bytes', 0)) for e in events), top)
    small = [e for e in operations if e['ns'] < 5000]
    often = collections.Counter(e['usual'] for e in small)
    kernels = [e['ns'] for e in operations if e['cat'] in ('kernel', 'cuda') and family in e['usual']]
    shares = list(categories) + SHARES
    share = lambda name: next((label for label, words in shares if re.search(words, name, re.I)), 'other')
    listed = operations if longer_than is None else operations + calls + ranges
    first = min((e['begin'] for e in listed), default=0)
    listed = sorted(listed, key=lambda e: (-e['ns'], e['begin']))[:top] if longer_than is None else [
        e for e in listed if e['ns'] > 1000 * longer_than]
    a = {
        'operation': named(operations),
        'long': sorted((e['usual'], e['begin'] - first, e['ns']) for e in listed),
        'small': [('', len(small), sum(e['ns'] for e in small), len(operations))],
        'small operation': named(e for e in small if often[e['usual']] > more_than),
        'call': named(calls),
        'range': named(ranges),
        'memory operation': named(e for e in operations if e['cat'] in ('gpu_memcpy', 'gpu_memset')),
        'family': [('', len(kernels), sum(kernels), min(kernels, default=0), max(kernels, default=0))],
        'category': table(((share(e['name']), e['ns']) for e in operations), top),
    }
    busy, idle, row, on_streams = gaps_and_ranges(operations, calls, ranges)
    span = sum(ns for _, ns in busy) + sum(ns for _, _, parts in idle for _, ns in parts)
    a['gaps'] = [('', len(idle), sum(ns for _, ns, _ in idle), span)]
    a['gap before'] = table(((name, ns) for name, ns, _ in idle), top)
    a['part of the time'] = table([('all: from the first operation to the last', span)] * (span > 0) + busy + row +
                                  [part for _, _, parts in idle for part in parts], top)
    a['range on a stream'] = table(on_streams, top)
    total = sum(e['ns'] for e in operations)
    moved = sum(e['ns'] for e in operations if 'Memcpy DtoD' in e['usual'] or share(e['name']) == 'concatenation')
    launches = sum(name == 'host: in calls that start work' for name, _ in row)
    a['what to try'] = [(name, round(1000 * part / whole)) for name, part, whole, applies in (
        ('small', len(small), len(operations), len(small) > more_than and 2 * launches > len(operations)
         and 2 * len(small) > len(operations)),
        ('concatenation', moved, total, 10 * moved > total),
        ('no operation', a['gaps'][0][2], span, 5 * a['gaps'][0][2] > span)) if applies]
    return a


def gaps_and_ranges(operations, calls, ranges):
    """Parts of the time in which operations run; gaps, as what comes after them, ns and parts; parts of the time in the
    launch row; and ranges on streams."""
    call_of = {e['args']['correlation']: (e['begin'], e['end']) for e in calls if e['args'].get('correlation')}
    until, busy, idle = {}, [], []
    for e in operations:
        device, correlation = e['args'].get('device', 0), e['args'].get('correlation')
        before = until.setdefault(device, e['begin'])
        if e['begin'] > before:
            idle.append((e['usual'], e['begin'] - before, parts_of_gap(before, e['begin'], call_of.get(correlation))))
        until[device] = max(before, e['end'])
        busy += [('busy: an operation runs', e['end'] - max(before, e['begin']))] * (e['end'] > max(before, e['begin']))
    by_correlation = collections.defaultdict(list)
    for e in operations:
        by_correlation[e['args'].get('correlation')].append(e)
    launching = sorted((e for e in calls if e['args'].get('correlation') in by_correlation), key=lambda e: e['begin'])
    row, last = [('host: in calls that start work', e['ns']) for e in launching], {}
    for e in launching:
        gap = e['begin'] - last.get(e['tid'], e['begin'])
        row += [('host: between those calls', gap)] * (gap > 0)
        last[e['tid']] = e['end']
    spans = []
    for r in ranges:
        streams = collections.defaultdict(list)
        for call in launching:
            if call['tid'] == r['tid'] and r['begin'] <= call['begin'] <= r['end']:
                for e in by_correlation[call['args']['correlation']]:
                    streams[e['args'].get('device', 0), e['args'].get('stream')].append(e)
        for (device, stream), inside in streams.items():
            ns = max(e['end'] for e in inside) - min(e['begin'] for e in inside)
            spans.append((f'GPU {device} stream {stream}   {r["name"]}', ns, len(inside)))
    return busy, idle, row, spans


# ---- what the program prints ----

def printed(text):
    """From the program's output."""
    a, lines = collections.defaultdict(list), None
    ms, us = (lambda text, scale=scale: round(float(text) * scale) for scale in (1e6, 1e3))
    for line in text.splitlines():
        head = re.match(r' +count +total ms +each us +shortest +longest +share %(?: +MB +GB/s| +operations)?   (\S.*)$',
                        line)
        cells = re.match(r' *(\d+)' + r' +([\d.]+)' * 5 + r'( +[\d.]+)?( +[\d.]+)?   (\S.*)$', line)
        if head:
            lines = a[head[1]]
        elif cells:
            size = () if not cells[7] else (int(cells[7]),) if not cells[8] else (ms(cells[7]),)
            lines.append((cells[9], int(cells[1]), ms(cells[2]), us(cells[4]), us(cells[5])) + size)
    a['long'] = [(name, ms(at), us(ns)) for at, ns, name in re.findall(
        r'^    at +([\d.]+) ms +([\d.]+) us   \w+ \d+   (.*)$', text, re.M)]
    small = re.search(r'(\d+) of (\d+) operations take .* launch; ([\d.]+) ms', text)
    family = re.search(r'\*: (\d+), ([\d.]+) ms, .* \(([\d.]+) to ([\d.]+)\)', text)
    gaps = re.search(r'for ([\d.]+) of ([\d.]+) ms .*, (\d+) times', text)
    a['small'] = [('', int(small[1]), ms(small[3]), int(small[2]))]
    a['family'] = [('', int(family[1]), ms(family[2]), us(family[3]), us(family[4]))]
    a['gaps'] = [('', int(gaps[3]), ms(gaps[1]), ms(gaps[2]))]
    advice = text.partition('\nwhat to try\n')[2]
    a['what to try'] = [(word, round(10 * float(share))) for share, word in re.findall(
        r'^    ([\d.]+) % .*?(small|concatenation|no operation)', advice, re.M)]
    return a


# ---- what the SQL files return ----

def from_sql(results, got):
    """From the results of the SQL files, by their names. Adds to `got`, which the program has printed, what has other
    forms there."""
    rows = {name: [tuple(row) for row in result['rows']] for name, result in results.items()}
    small, family, row = rows['3_small_operations'][0], rows['5_kernel_family'][0], rows['6_launch_row'][0]
    host = lambda kind: [line[1:4] + line[5:7] for line in rows['3_calls_and_ranges'] if line[0] == kind][:50]
    part = collections.defaultdict(int, {name: ns for name, _, ns, _, _ in got['part of the time']})
    got['parts'] = [('', 0, part[name]) for name in (
        "idle: before the next operation's call", 'idle: in that call', 'idle: after that call',
        'busy: an operation runs', 'host: in calls that start work', 'host: between those calls')]
    got['operations of ranges'] = [('', line[-1]) for line in got['range on a stream']]
    return {
        'operation': [line[:3] + line[4:6] for line in rows['1_top_operations']],
        'long': [(name, at, ns) for at, ns, name in rows['2_long_operations']],
        'longer': [(name, at, ns) for at, ns, name in rows['2_longer_than']],
        'small': [('', small[0], small[2], small[1])],
        'small operation': [line[:3] + line[4:6] for line in rows['3_more_than']],
        'call': host(1),
        'range': host(2),
        'memory operation': [line[:6] for line in rows['4_memory_operations']],
        'family': [('', family[0], family[1] or 0, family[3] or 0, family[4] or 0)],
        'gaps': [('', sum(line[1] for line in rows['6_gaps']), sum(line[2] for line in rows['6_gaps']), small[4])],
        'gap before': [line[:3] for line in rows['6_gaps']][:50],
        'parts': [('', 0, ns) for ns in [sum(line[i] for line in rows['6_gaps']) for i in (3, 4, 5)] +
                  [small[3], *row[1:3]]],
        'range on a stream': sorted(((f'GPU {line[1]} stream {line[2]}   {line[0]}', line[3], line[5], *line[7:9])
                                     for line in rows['7_ranges_on_streams']), key=lambda line: -line[2])[:50],
        'operations of ranges': [('', line[4]) for line in rows['7_ranges_on_streams']],
        'category': [line[:5] for line in rows['8_categories']],
    }


# ---- comparison ----

# How far a cell may be from what is printed, in ns and bytes: totals have three decimals of ms or MB, others two of us.
SLACK = [0, 0, 510, 6, 6, 510]
OTHER = {'long': [0, 510, 6], 'longer': [0, 510, 6], 'small': [0, 0, 510, 0], 'gaps': [0, 0, 510, 510],
         'range on a stream': [0, 0, 510, 6, 6, 0], 'what to try': [0, 1]}


ORDERED = {'long', 'longer', 'operation', 'small operation', 'call', 'range', 'memory operation', 'gap before',
           'part of the time', 'range on a stream', 'category'}


def differences(key, want, got):
    """Returns what differs, as far as both have the cells. Lines of equal times come in any order."""
    if len(want) != len(got):
        return [f'{key}: {len(got)} lines, expected {len(want)}: {got[:3]}, expected {want[:3]}']
    left, faults = list(got), []
    for line in want:
        same = lambda other: all(x == y or (slack and abs(x - y) <= slack)
                                 for x, y, slack in zip(line, other, OTHER.get(key, SLACK)))
        match = next((other for other in left if same(other)), None)
        if match is None:
            faults.append(f'{key}: expected {line}, got {left[:4]}')
        else:
            left.remove(match)
    order = [line[1 if key.startswith('long') else 2] for line in got] if key in ORDERED else []
    if order != sorted(order, reverse=not key.startswith('long')):
        faults.append(f'{key}: lines are not in order')
    return faults

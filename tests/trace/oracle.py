# SPDX-License-Identifier: MIT
"""Answers the questions of examples/10_trace in Python: from a trace file itself, from what the program prints, and
from what the SQL files in examples/10_trace/sql return. Each gives a dictionary of the same shape, so that they can be
compared. Times are in ns where they are exact, and None where the source does not have a figure."""
import collections
import re

import check_trace

OPERATIONS = {'kernel', 'cuda', 'gpu_memcpy', 'gpu_memset'}
CALLS = {'cuda_runtime', 'cuda_driver', 'cuda_api'}
RANGES = {'user_annotation', 'nvtx'}
FEW = 6  # lines of a table


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
    if event['cat'] == 'gpu_memset':
        return 'memset'
    name = event['name']
    if name.startswith('Memcpy '):
        return 'copy ' + name.split()[1]
    return name if full_names or event['cat'] not in ('kernel', 'cuda') else short(name)


def ordered(sums):
    """The first lines of a table: (name, count, ns), by time. Names of equal times may change places."""
    return sorted(((name, *figures) for name, figures in sums.items()), key=lambda line: (-line[2], line[0]))


def count_up(pairs):
    sums = collections.defaultdict(lambda: [0, 0])
    for name, ns in pairs:
        sums[name][0] += 1
        sums[name][1] += ns
    return ordered(sums)


def parts_of_gap(begin, end, call):
    if call is None:
        return 0, 0, 0, end - begin
    a, b = (min(max(at, begin), end) for at in call)
    return a - begin, b - a, end - b, 0


def answers(path, family='', full_names=True):
    """From the file, as Chrome's JSON has it."""
    slices = [dict(e, begin=check_trace.ns(e['ts']), end=check_trace.ns(e['ts']) + check_trace.ns(e['dur']))
              for e in check_trace.load(path) if e.get('ph') == 'X']
    operations = sorted((e for e in slices if e.get('cat') in OPERATIONS), key=lambda e: e['begin'])
    calls = [e for e in slices if e.get('cat') in CALLS]
    ranges = [e for e in slices if e.get('cat') in RANGES]
    copies = [e for e in operations if e['cat'] in ('gpu_memcpy', 'gpu_memset')]
    for e in operations:
        e['usual'], e['ns'] = usual(e, full_names), e['end'] - e['begin']
    named = [e['ns'] for e in operations if e['cat'] in ('kernel', 'cuda') and family in e['usual']]
    bytes_of = collections.Counter()
    for e in copies:
        bytes_of[e['usual']] += e['args'].get('bytes', 0)
    a = {
        'top': count_up((e['usual'], e['ns']) for e in operations)[:FEW],
        'calls': count_up((e['name'], e['end'] - e['begin']) for e in calls)[:FEW],
        'ranges': count_up((e['name'], e['end'] - e['begin']) for e in ranges)[:FEW],
        'copies': [line + (bytes_of[line[0]],) for line in count_up((e['usual'], e['ns']) for e in copies)],
        'family': (len(named), sum(named), min(named, default=0), max(named, default=0)),
        'small': (sum(e['ns'] < 5000 for e in operations), len(operations),
                  sum(e['ns'] for e in operations if e['ns'] < 5000)),
    }
    first = min((e['begin'] for e in operations), default=0)
    longest = sorted(operations, key=lambda e: (-e['ns'], e['begin']))[:FEW]
    a['long'] = sorted((e['begin'] - first, e['ns'], e['usual']) for e in longest)
    gaps_and_ranges(a, operations, calls, ranges)
    return a


def gaps_and_ranges(a, operations, calls, ranges):
    call_of = {e['args']['correlation']: (e['begin'], e['end']) for e in calls if e['args'].get('correlation')}
    until, span, parts, waits = {}, 0, [0, 0, 0, 0], []
    for e in operations:
        device, correlation = e['args'].get('device', 0), e['args'].get('correlation')
        before = until.setdefault(device, e['begin'])
        if e['begin'] > before:
            waits.append((e['usual'], e['begin'] - before))
            for i, ns in enumerate(parts_of_gap(before, e['begin'], call_of.get(correlation))):
                parts[i] += ns
        span += max(0, e['end'] - before)
        until[device] = max(before, e['end'])
    a['busy'] = (span - sum(parts), span)
    a['gaps'] = (len(waits), *parts)
    a['waits'] = count_up(waits)[:3]
    started = {e['args'].get('correlation') for e in operations}
    row, between, last = [e for e in calls if e['args'].get('correlation') in started], [0], {}
    for e in sorted(row, key=lambda e: e['begin']):
        if e['tid'] in last:
            between.append(max(0, e['begin'] - last[e['tid']]))
        last[e['tid']] = e['end']
    a['row'] = (len(row), sum(e['end'] - e['begin'] for e in row), sum(between), max(between))
    by_correlation = collections.defaultdict(list)
    for e in operations:
        by_correlation[e['args'].get('correlation')].append(e)
    spans = collections.defaultdict(lambda: [0, 0, 0])
    for r in ranges:
        for stream, inside in projected(r, row, by_correlation).items():
            line = spans[(r['name'], *stream)]
            line[0] += 1
            line[1] += len(inside)
            line[2] += max(e['end'] for e in inside) - min(e['begin'] for e in inside)
    a['spans'] = sorted((*key, *figures) for key, figures in spans.items())


def projected(r, row, by_correlation):
    """The operations that the range's calls started, by device and stream."""
    streams = collections.defaultdict(list)
    for call in row:
        if call['tid'] == r['tid'] and r['begin'] <= call['begin'] <= r['end']:
            for e in by_correlation[call['args']['correlation']]:
                streams[e['args'].get('device', 0), e['args'].get('stream')].append(e)
    return streams


# ---- what the program prints ----

LINE = r' {4}(\S.*?) +(\d+) +([\d.]+) ms '


def ms(text):
    return round(float(text) * 1e6)


def us(text):
    return round(float(text) * 1e3)


def printed(text):
    """From the program's output. Times of tables are whole microseconds there."""
    parts = dict(zip('0' + ''.join(re.findall(r'^(\d) {3}', text, re.M)), re.split(r'^\d {3}', text, flags=re.M)))
    table = lambda part: [(name, int(count), ms(ns)) for name, count, ns in re.findall('^' + LINE, part, re.M)]
    small = re.search(r'(\d+) of (\d+) operations take .* each, ([\d.]+) ms in total.*\n.*for ([\d.]+) of ([\d.]+) ms',
                      parts['3'])
    gaps = re.search(r'for ([\d.]+) ms, (\d+) times; ([\d.]+) .*\n.*begins, ([\d.]+) .*, ([\d.]+) .*of ([\d.]+) ms',
                     parts['6'])
    row = re.search(r'row: (\d+) calls.*, ([\d.]+) ms in them, ([\d.]+) ms between them; longest gap ([\d.]+)', text)
    family = re.search(r'\*: (\d+), ([\d.]+) ms, .* \(([\d.]+) to ([\d.]+)\)', parts['5'])
    copies = re.findall('^' + LINE + r' +([\d.]+) MB', parts['4'], re.M)
    spans = re.findall(r'^ {4}GPU (\d+) stream (\d+) +(\S.*?) +(\d+) +(\d+) +([\d.]+) ms', parts['7'], re.M)
    return {
        'top': table(parts['1']),
        'long': [(ms(at), us(ns), name) for at, ns, name in
                 re.findall(r'^ {4}at +([\d.]+) ms +([\d.]+) us {3}(.*)$', parts['2'], re.M)],
        'host': table(parts['3']),
        'small': (int(small[1]), int(small[2]), ms(small[3])),
        'busy': (ms(small[4]), ms(small[5])),
        'copies': [(name, int(count), ms(ns), round(float(mb) * 1e6)) for name, count, ns, mb in copies],
        'family': (int(family[1]), ms(family[2]), us(family[3]), us(family[4])),
        'gaps': (int(gaps[2]), ms(gaps[3]), ms(gaps[4]), ms(gaps[5]), ms(gaps[6])),
        'waits': [(name, int(count), ms(ns)) for name, count, ns in
                  re.findall(r'^ {4}before (\S.*?) +(\d+) +([\d.]+) ms', parts['6'], re.M)],
        'row': (int(row[1]), ms(row[2]), ms(row[3]), us(row[4])),
        'spans': [(name, int(device), int(stream), int(count), int(operations), ms(ns))
                  for device, stream, name, count, operations, ns in spans],
    }


# ---- what the SQL files return ----

def from_sql(results):
    """From the results of the SQL files, by their names."""
    rows = {name: result['rows'] for name, result in results.items()}
    small, family = rows['3_small_operations'][0], rows['5_kernel_family'][0]
    host = [(kind, name, count, ns) for kind, name, count, ns, _ in rows['3_calls_and_ranges']]
    waits = [tuple(row) for row in rows['6_gaps']]
    parts = [sum(row[i] for row in waits) for i in (3, 4, 5)]
    return {
        'top': [tuple(row[:3]) for row in rows['1_top_operations']],
        'long': [tuple(row) for row in rows['2_long_operations']],
        'calls': [line[1:] for line in host if line[0] == 1][:FEW],
        'ranges': [line[1:] for line in host if line[0] == 2][:FEW],
        'small': tuple(small[:3]),
        'busy': tuple(small[3:]),
        'copies': [tuple(row[:4]) for row in rows['4_memory_operations']],
        'family': (family[0], family[1] or 0, family[3] or 0, family[4] or 0),
        'gaps': (sum(row[1] for row in waits), *parts, sum(row[2] for row in waits) - sum(parts)),
        'waits': [row[:3] for row in waits][:3],
        'row': tuple(rows['6_launch_row'][0]),
        'spans': [(*row[:3], *row[3:6]) for row in rows['7_ranges_on_streams']],
    }


# ---- comparison ----

# Where lines have times and bytes, which are printed rounded. All else must be equal.
ROUNDED = {'top': {2}, 'long': {0, 1}, 'host': {2}, 'calls': {2}, 'ranges': {2}, 'small': {2}, 'busy': {0, 1},
           'copies': {2, 3}, 'family': {1, 2, 3}, 'gaps': {1, 2, 3, 4}, 'waits': {2}, 'row': {1, 2, 3}, 'spans': {5}}


def same(key, want, got, slack):
    return len(want) == len(got) and all(
        x == y or (i in ROUNDED[key] and abs(x - y) <= slack) for i, (x, y) in enumerate(zip(want, got)))


def differences(key, want, got, width=1000, slack=0):
    """Returns what differs. Names are compared as far as they are printed, times within `slack` ns, and lines of equal
    times in any order."""
    if not isinstance(want, list):
        want, got = [want], [got]
    if len(want) != len(got):
        return [f'{key}: {len(got)} lines, expected {len(want)}: {got[:3]}, expected {want[:3]}']
    cut = lambda line: tuple(cell[:width].strip() if isinstance(cell, str) else cell for cell in line)
    left, faults = [cut(line) for line in got], []
    for line in map(cut, want):
        match = next((other for other in left if same(key, line, other, slack)), None)
        if match is None:
            faults.append(f'{key}: expected {line}, got {left[:4]}')
        else:
            left.remove(match)
    return faults

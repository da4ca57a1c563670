#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks trace files against the Trace Event Format, which the Perfetto UI reads.

    python3 tests/trace/check_trace.py [--own] TRACE...

The format is documented in "Trace Event Format" (Duffield, Google): which fields an event of each phase has, and of
which type; that flows bind to slices; that slices of one thread lie inside each other. --own also asks for what
answers.py of examples/10_trace promises: titles for every row, categories, and no overlapping slices.
"""
import collections
import gzip
import json
import sys

METADATA = {'process_name': ('name', str), 'process_labels': ('labels', str), 'process_sort_index': ('sort_index', int),
            'thread_name': ('name', str), 'thread_sort_index': ('sort_index', int)}
NUMBER = (int, float)
ID = (int, str)
FIELDS = {  # of each phase: required fields and their types
    'X': {'name': str, 'ts': NUMBER, 'dur': NUMBER, 'pid': ID, 'tid': ID},
    'B': {'name': str, 'ts': NUMBER, 'pid': ID, 'tid': ID},
    'E': {'ts': NUMBER, 'pid': ID, 'tid': ID},
    'i': {'name': str, 'ts': NUMBER},
    'I': {'name': str, 'ts': NUMBER},
    'C': {'name': str, 'ts': NUMBER, 'pid': ID, 'args': dict},
    'M': {'name': str, 'pid': ID, 'args': dict},
    's': {'name': str, 'cat': str, 'id': ID, 'ts': NUMBER, 'pid': ID, 'tid': ID},
    't': {'name': str, 'cat': str, 'id': ID, 'ts': NUMBER, 'pid': ID, 'tid': ID},
    'f': {'name': str, 'cat': str, 'id': ID, 'ts': NUMBER, 'pid': ID, 'tid': ID},
}
OWN = {'kernel', 'gpu_memcpy', 'gpu_memset', 'cuda_runtime', 'user_annotation', 'gpu_user_annotation'}


def load(path):
    """Returns the events, with times as exact thousandths of a microsecond where the file has them."""
    with (gzip.open if path.endswith('.gz') else open)(path, 'rt', encoding='utf-8') as file:
        whole = json.load(file)
    events = whole['traceEvents'] if isinstance(whole, dict) else whole
    if not isinstance(events, list):
        raise ValueError('traceEvents is no array')
    return events


def ns(us):
    return round(us * 1000)


class Check:
    def __init__(self, path, own):
        self.path, self.own, self.faults, self.counts = path, own, [], collections.Counter()

    def fault(self, number, what):
        self.faults.append(f'{self.path}: event {number}: {what}')

    def fields(self, number, event):
        """Checks the fields of one event."""
        phase = event.get('ph')
        self.counts[phase] += 1
        if phase not in FIELDS:
            self.fault(number, f'phase {phase!r}')
            return False
        before = len(self.faults)
        for key, kind in FIELDS[phase].items():
            if key not in event or not isinstance(event[key], kind) or isinstance(event[key], bool):
                self.fault(number, f'{phase}: {key} is {event.get(key)!r}')
        if 'args' in event and not isinstance(event['args'], dict):
            self.fault(number, 'args is no object')
        if len(self.faults) > before:
            return False
        if event.get('ts', 0) < 0 or event.get('dur', 0) < 0:
            self.fault(number, f"ts {event.get('ts')}, dur {event.get('dur')}")
        if phase in 'iI' and event.get('s', 't') not in ('g', 'p', 't'):
            self.fault(number, f"scope {event['s']!r}")
        if phase == 'f' and event.get('bp', 'e') != 'e':
            self.fault(number, f"bind point {event['bp']!r}")
        if phase == 'M' and event['name'] in METADATA:
            key, kind = METADATA[event['name']]
            if not isinstance(event['args'].get(key), kind):
                self.fault(number, f"{event['name']} has {key} {event['args'].get(key)!r}")
        if self.own and phase == 'X' and event.get('cat') not in OWN:
            self.fault(number, f"category {event.get('cat')!r}")
        return True

    def nesting(self, slices):
        """Counts slices that overlap without one containing the other; the viewer drops those."""
        for row, events in slices.items():
            open_ends = []
            for begin, minus_end, number in sorted(events):
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
                if open_ends and open_ends[-1] < -minus_end:
                    self.counts['overlapping'] += 1
                    if self.own:
                        self.fault(number, f'overlaps the slice before it in row {row}')
                    continue
                open_ends.append(-minus_end)

    def flows(self, flows, slices):
        """Each flow has a begin and an end in this order, both at the begin of a slice (own) or inside one."""
        begins = collections.defaultdict(set)
        for row, events in slices.items():
            begins[row] = {begin for begin, _, _ in events}
        for key, ends in flows.items():
            phases = [phase for _, phase, _, _ in sorted(ends, key=lambda end: (end[0], end[1] == 'f'))]
            if self.own and (phases[0] != 's' or phases[-1] != 'f'):
                self.fault(ends[0][3], f'flow {key} has the phases {phases}')
            for at, phase, row, number in ends:
                if self.own and at not in begins[row]:
                    self.fault(number, f'flow {key}: {phase} is at no begin of a slice')

    def run(self):
        slices, flows, pairs = collections.defaultdict(list), collections.defaultdict(list), collections.Counter()
        rows, threads, processes = set(), set(), set()
        for number, event in enumerate(load(self.path)):
            if not isinstance(event, dict):
                self.fault(number, 'is no object')
                continue
            if not self.fields(number, event):
                continue
            phase, row = event['ph'], (event.get('pid'), event.get('tid'))
            if phase == 'X':
                slices[row].append((ns(event['ts']), -ns(event['ts']) - ns(event['dur']), number))
                rows.add(row)
            elif phase in 'BE':
                pairs[row] += 1 if phase == 'B' else -1
                if pairs[row] < 0:
                    self.fault(number, 'ends what has not begun')
            elif phase in 'stf':
                flows[event['cat'], event['name'], event['id']].append((ns(event['ts']), phase, row, number))
                if self.own and phase == 'f' and event.get('bp') != 'e':
                    self.fault(number, 'binds to the next slice, not to the one around it')
            elif phase == 'M' and event['name'] == 'thread_name':
                threads.add(row)
            elif phase == 'M' and event['name'] == 'process_name':
                processes.add(event['pid'])
        for row in (row for row, depth in pairs.items() if depth):
            self.fault('-', f'{pairs[row]} events of row {row} do not end')
        if not rows and not pairs:
            self.fault('-', 'no slice')
        for row in rows if self.own else ():
            if row not in threads or row[0] not in processes:
                self.fault('-', f'row {row} has no title')
        self.nesting(slices)
        self.flows(flows, slices)
        return self.faults


def main():
    own = '--own' in sys.argv
    paths = [path for path in sys.argv[1:] if path != '--own']
    if not paths or any(path.startswith('-') for path in paths):
        print(__doc__, file=sys.stderr)
        return 2
    bad = 0
    for path in paths:
        check = Check(path, own)
        try:
            faults = check.run()
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            faults = [f'{path}: {error!r}']
        for fault in faults[:5]:
            print(fault)
        bad += len(faults)
        print(f'{path}: ' + ', '.join(f'{count} {phase}' for phase, count in sorted(check.counts.items(), key=str)) +
              f'; {len(faults)} faults')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())

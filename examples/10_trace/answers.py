#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Answers what one looks for in a trace, or compares two: top operations, long ones, small ones and the host's time in
calls, memory operations, one family of kernels, gaps between operations, ranges projected onto streams, shares by
category, and what to try. Times are sums over all GPUs.

TRACE is Chrome's JSON (of torch's profiler, kvprim's 10_trace, converters) or of `nsys export --type jsonlines`, plain
or compressed by gzip; - is standard input. It is read front to back, and only what concerns a GPU stays in memory. A
trace is of one process: equal correlations in several processes are taken for the same call.

    answers.py torch.json.gz --longer-than 500 --more-than 1000 --category 'cache=index_copy|CatArray'
    answers.py --compare dynamic.json.gz static.json.gz --top 20

Exit codes: 0: done; 1: a file cannot be read or written, or holds no such range; 2: wrong arguments.
"""
import argparse
import collections
import decimal
import gzip
import io
import json
import os
import re
import sys
import zlib

KERNEL, COPY, CALL, RANGE, SPAN = range(5)  # a span is a range projected onto a stream: see project()

# Categories of Chrome's JSON (cuda, cuda_api and nvtx are those of converters), and tables of nsys.
KINDS = {name: kind for kind, names in enumerate((
    'kernel cuda CUPTI_ACTIVITY_KIND_KERNEL',
    'gpu_memcpy gpu_memset CUPTI_ACTIVITY_KIND_MEMCPY CUPTI_ACTIVITY_KIND_MEMSET',
    'cuda_runtime cuda_driver cuda_api CUPTI_ACTIVITY_KIND_RUNTIME', 'user_annotation nvtx NVTX_EVENTS'))
         for name in names.split()}
# By CUPTI's and nsys's numbers; H: host, D: device, A: array, P: peer.
DIRECTIONS = '?to? HtoD DtoH HtoA AtoH AtoA AtoD DtoA DtoD HtoH PtoP'.split()
SHARES = [('attention', 'attend|attention|flash|fmha|sdpa'),
          ('matrix product', 'gemm|gemv|matmul|cutlass|cublas|xmma|nvjet'),
          ('memory', 'memcpy|memset|direct_copy_kernel'), ('concatenation', 'concat|CatArray')]


class Fault(Exception):
    """What is wrong with a file, in one line; and whether it is that it is cut."""


class Event:
    """Times in ns; `bytes` of copies, or the number of operations of a span; `track`: stream or thread; `correlation`:
    equal for a call and the work that it started, 0: none; `full`: its name as it was given."""
    __slots__ = 'kind full name begin end bytes device track correlation inside'.split()

    def __init__(self, kind, full, begin=0, end=0):
        self.kind, self.full, self.begin, self.end = kind, full, begin, end
        self.name, self.bytes, self.device, self.track, self.correlation, self.inside = None, 0, 0, 0, 0, True

    def process(self):
        """In the viewer process 1 is the host, and the next ones are the GPUs."""
        return 1 if self.kind in (CALL, RANGE) else 2 + self.device

    def row(self):
        return {KERNEL: 1, COPY: 2}.get(self.kind, 0)


# ---- names ----

def shown(event, full_names):
    """The name without what varies: of kernels the function, "Memcpy HtoD (Pageable -> Device)" as "Memcpy HtoD", and
    "cudaMalloc_v3020" as "cudaMalloc". Control characters, which a terminal would obey, are question marks."""
    name = event.full
    if event.kind == KERNEL and not full_names:
        name = name.replace('(anonymous namespace)', 'anonymous')
        while (shorter := re.sub(r'<[^<>]*>', '', name)) != name:
            name = shorter
        name = re.split('[ :]', name.split('(')[0])[-1] or event.full
    elif event.kind == COPY and name.startswith('Mem'):
        name = name.split(' (')[0]
    elif event.kind == CALL:
        name = re.sub(r'_v\d+$', '', name)
    return printable(name)


def printable(text):
    return re.sub(r'[\x00-\x1f\x7f-\x9f\ud800-\udfff]', '?', text)


# ---- reading ----

class Values:
    """Reads JSON values one after the other, of a file that may be larger than memory."""
    PIECE, MOST = 1 << 18, 64 << 20                 # characters that are read at once; of a value
    BEGUN = r'[.eE+-]*|[a-z]+|\\?u?[0-9a-fA-F]{0,4}'  # what more text may complete

    def __init__(self, stream):
        self.stream, self.text, self.at, self.before, self.ended = stream, '', 0, 0, False
        self.decode = json.JSONDecoder(parse_float=str).raw_decode  # times have more digits than a float

    def fail(self, what, cut=False):
        raise Fault(f'character {self.before + self.at}: {what}', cut)

    def fill(self):
        piece = self.stream.read(self.PIECE)
        self.before, self.text, self.at, self.ended = self.before + self.at, self.text[self.at:] + piece, 0, not piece

    def peek(self):
        """Returns the next character that is no space; '' at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in ' \n\r\t':
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at:self.at + 1]
            self.fill()

    def take(self, wanted, what):
        """Takes the next character if it is one of these."""
        found = self.peek()
        if not found:
            self.fail(f'the file ends where {what} is expected', cut=True)
        if found not in wanted:
            self.fail(f'expected {what}, found {found!r}')
        self.at += 1
        return found

    def elements(self, close, what):
        """Comes to each element of an array or object, whose bracket has been taken."""
        more = self.peek() != close or self.take(close, what) != close
        while more:
            yield
            more = self.take(f',{close}', f"',' or '{close}' after {what}") == ','

    def value(self, what):
        self.peek()
        while True:
            try:
                value, end = self.decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # otherwise a number may go on
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                rest = self.text[error.pos:].rstrip()
                cut = error.msg.startswith('Unterminated') or len(rest) < 7 and re.fullmatch(self.BEGUN, rest)
                if self.ended or not cut and len(rest) > 9:
                    self.at = len(self.text) if cut else error.pos
                    self.fail(f'the file ends inside {what}' if cut else f'{what}: {error.msg}', bool(cut))
            if len(self.text) - self.at > self.MOST:
                self.fail(f'{what} has more than {self.MOST} characters')
            self.fill()


def ns(event, what):
    """Microseconds as nanoseconds, exactly."""
    try:
        us = decimal.Decimal(event[what])
    except (KeyError, TypeError, ValueError, decimal.InvalidOperation):
        us = decimal.Decimal(-1)
    if isinstance(event.get(what), bool) or us.is_nan() or not 0 <= us < 9 * 10**15:
        raise Fault(f'{what} is {event.get(what)!r}, expected microseconds from 0 to 9e15')
    return int(us * 1000 + decimal.Decimal('0.5'))


def whole(value, what, most):
    """A number that may be a text; if there is none, 0."""
    text = '0' if value in (None, '') else str(value)
    if not re.fullmatch(r'\d{1,20}', text) or int(text) > most:
        raise Fault(f'{what} is {value!r}, expected 0 to {most}')
    return int(text)


def track(text):
    """The number that the text ends with ("stream 7"), or one made of the text."""
    digits = re.search(r'\d+$', str(text))
    return int(digits[0]) if digits and len(digits[0]) < 10 else zlib.crc32(str(text).encode('utf-8', 'replace'))


class Trace:
    def __init__(self, path, as_range=None):
        self.path, self.as_range, self.events, self.seen, self.others, self.cut = path, as_range, [], 0, [], ''
        self.open = collections.defaultdict(list)  # by process and thread: events that have begun ("B"), or None
        self.strings = {}                          # nsys's

    def kind(self, category):
        """Returns the kind of events of this category or table; None: they are not read."""
        category = str(category or '')
        kind = KINDS.get(category, RANGE if self.as_range and category == self.as_range else None)
        if kind is None and category and category not in self.others:
            self.others.append(category)
        return kind

    def keep(self, event):
        if event.end < event.begin:
            raise Fault('an event ends before it begins')
        self.events.append(event)

    def take_event(self, e):
        """Takes an event of Chrome's JSON."""
        self.seen += 1
        phase, row = e.get('ph'), str((e.get('pid'), e.get('tid')))
        if phase is None:
            raise Fault('an event has no "ph"')
        if phase == 'E':
            if not self.open[row]:
                raise Fault('an event ends ("E") that has not begun ("B")')
            event = self.open[row].pop()
            if event:
                event.end = ns(e, 'ts')
                self.keep(event)
            return
        kind = self.kind(e.get('cat')) if phase in ('B', 'X') else None
        event = None
        if kind is not None:
            args = e.get('args') or {}
            if not isinstance(args, dict):
                raise Fault(f'args are {args!r}, expected an object')
            event = Event(kind, str(e.get('name') or 'unnamed'), ns(e, 'ts'))
            event.track = track(args.get('stream', e.get('tid')) if kind <= COPY else e.get('tid'))
            event.correlation = whole(args.get('correlation'), 'the correlation', 2**32 - 1) if kind != RANGE else 0
            if kind <= COPY:  # a converter has a process "Device 0"
                device = args.get('device', track(e.get('pid')) % 1024)
                event.device = whole(device, 'the device', 1023)
            event.bytes = whole(args.get('bytes'), 'the number of bytes', 2**64 - 1) if kind == COPY else 0
        if phase == 'B':
            self.open[row].append(event)
        elif event:
            event.end = event.begin + ns(e, 'dur')
            self.keep(event)

    def take_row(self, row):
        """Takes a row of a table of nsys. Names are numbers of strings, which may come later."""
        table = row.get('table') if isinstance(row, dict) else None
        self.seen += 1
        if table is None:
            raise Fault('a row has no "table"')
        if table == 'StringIds':
            value = str(row.get('value') or '')
            if self.strings.setdefault(str(row.get('id')), value) is not value:
                raise Fault(f'the string {row.get("id")} is there for the second time')
            return
        kind = self.kind(table)
        # NVTX ranges that push and pop have type 59. One without an end was not popped.
        if kind is None or kind == RANGE and (row.get('eventType') != 59 or row.get('end') is None):
            return
        if row.get('start') is None or row.get('end') is None:
            raise Fault(f'a row of {table} has no start or no end')
        event = Event(kind, str(row.get('text') or 'unnamed'), whole(row['start'], 'the start', 2**63 - 1),
                      whole(row['end'], 'the end', 2**63 - 1))
        event.correlation = whole(row.get('correlationId'), 'the correlation', 2**32 - 1)
        if kind <= COPY:
            event.device, event.track = whole(row.get('deviceId'), 'the device', 1023), track(row.get('streamId'))
            event.bytes = whole(row.get('bytes'), 'the number of bytes', 2**64 - 1)
        else:  # the rest of the number says the process
            event.track = whole(row.get('globalTid'), 'globalTid', 2**64 - 1) & 0xffffff
        if table.endswith('MEMSET'):
            event.full = 'Memset'
        elif kind == COPY:
            direction = whole(row.get('copyKind'), 'copyKind', 2**32 - 1)
            event.full = f'Memcpy {DIRECTIONS[direction if direction < len(DIRECTIONS) else 0]}'
        else:
            string = row.get('demangledName', row.get('shortName')) if kind == KERNEL else row.get(
                'nameId', row.get('textId'))
            event.full = event.full if string is None else (str(string),)
        self.keep(event)

    def take_array(self, values):
        values.take('[', "'[' of traceEvents")
        for _ in values.elements(']', 'an event'):
            if values.peek() != '{':
                values.take('{', 'an event')
            self.take_event(values.value('an event'))

    def take_all(self, values):
        first = values.peek()
        if values.text.startswith('SQLite format 3'):
            values.fail("an SQLite file; export nsys's report with --type jsonlines")
        if not first:
            values.fail('the file is empty')
        if first == '[':
            self.take_array(values)
        else:
            values.take('{', "'{' or '[' of a trace in JSON")
            row, found = {}, False
            for _ in values.elements('}', 'a member'):
                key = values.value('a key')
                values.take(':', "':' after a key")
                found = found or key == 'traceEvents'
                if key == 'traceEvents':
                    self.take_array(values)
                else:
                    row[key] = values.value(f'"{key}"')
            if not found and 'table' not in row:
                values.fail('the JSON of an older nsys; export with --type jsonlines' if row.keys() & {
                    'CudaEvent', 'TraceProcessEvent'} else 'neither "traceEvents" nor a "table" of nsys is in the file')
            while not found and row is not None:
                self.take_row(row)
                row = values.value('a row') if values.peek() else None
        if values.peek():
            values.fail(f'expected the end of the file, found {values.peek()!r}')
        if left := sum(map(len, self.open.values())):
            raise Fault(f'{left} events have begun ("B") and not ended ("E")')

    def read(self, keep_cut, full_names):
        """Raises a Fault if the file is not whole, or has nothing to answer questions about."""
        values = None
        try:
            file = sys.stdin.buffer if self.path == '-' else open(self.path, 'rb')
            packed = file.peek(2)[:2] == b'\x1f\x8b'
            values = Values(io.TextIOWrapper(gzip.open(file) if packed else file, 'utf-8', errors='replace'))
            self.take_all(values)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            fault = Fault(f'gzip: {error}', True)
        except OSError as error:
            raise Fault(f'{self.path}: {error.strerror}') from None
        except RecursionError:
            fault = Fault('too many values inside each other')
        except Fault as error:
            what = error.args[0]
            where = '' if what.startswith('character') else f'before character {values.before + values.at}: '
            fault = Fault(f'{where}{what}', *error.args[1:])
        else:
            fault = None
        if fault and not (keep_cut and fault.args[1:] == (True,)):
            raise Fault(printable(f'{self.path}: {fault.args[0]}'))
        self.cut = fault.args[0] if fault else ''
        if not any(event.kind <= COPY for event in self.events):
            raise Fault(printable(f'{self.path}: none of its {self.seen} events is a kernel, copy or memset of a GPU' +
                                  ('; others are of ' + ', '.join(self.others[:9]) if self.others else '')))
        names = {}
        for event in self.events:
            if isinstance(event.full, tuple):
                event.full = self.strings.get(event.full[0]) or 'unnamed'
            key = (event.kind, event.full)
            event.name = names[key] = names.get(key) or shown(event, full_names)


# ---- ranges ----

def project(events, only=None):
    """Returns one span per stream for each range whose calls, on its thread, started operations there: from the begin
    of the first operation to the end of the last. With `only`, what lies in ranges of this name, and what was started
    there, is `inside`, and the rest is not. Returns the number of these ranges, too."""
    host = sorted((e for e in events if e.kind in (CALL, RANGE)), key=lambda e: (e.track, e.begin, -e.end))
    started, spans, named = by_correlation(events, (KERNEL, COPY)), [], 0
    for event in events:
        event.inside = only is None
    for i, outer in enumerate(host):
        if outer.kind != RANGE:
            continue
        selects, on = outer.name == only, {}
        named += selects
        for j in range(i, len(host)):
            e = host[j]
            if e.track != outer.track or e.begin > outer.end:
                break
            e.inside |= selects
            for operation in started.get(e.correlation, ()) if e.kind == CALL else ():
                operation.inside |= selects
                new = Event(SPAN, outer.full, operation.begin, operation.end)
                span = on.setdefault((operation.device, operation.track), new)
                span.begin, span.end = min(span.begin, operation.begin), max(span.end, operation.end)
                span.bytes += 1
        for place, span in on.items():
            (span.device, span.track), span.name, span.inside = place, outer.name, outer.inside
            spans.append(span)
    return spans, named


def by_correlation(events, kinds):
    found = collections.defaultdict(list)
    for event in events:
        if event.correlation and event.kind in kinds:
            found[event.correlation].append(event)
    return found


# ---- counting ----

class Table(dict):
    """Lines by name: count, ns, bytes, the shortest and the longest ns."""

    def count(self, name, time, size=0):
        line = self.get(name)
        if line is None:
            self[name] = [1, time, size, time, time]
        else:
            self[name] = [line[0] + 1, line[1] + time, line[2] + size, min(line[3], time), max(line[4], time)]

    def total(self, text=''):
        """Adds up the lines whose names contain the text."""
        lines = [line for name, line in self.items() if text in name]
        return [*(sum(column) for column in list(zip(*lines))[:3]), min(line[3] for line in lines),
                max(line[4] for line in lines)] if lines else [0] * 5


def counted(events, asked):
    """Goes through the events once and counts each wherever it belongs."""
    tables = collections.defaultdict(Table)
    patterns = [(name, re.compile(pattern, re.I)) for name, pattern in asked.category + SHARES]
    categories = {}  # by full name, because namespaces and template arguments say more than the function
    for e in events:
        if not e.inside:
            continue
        time = e.end - e.begin
        if e.kind > COPY:
            name = f'GPU {e.device} stream {e.track}   {e.name}' if e.kind == SPAN else e.name
            tables[('call', 'range', 'span')[e.kind - CALL]].count(name, time, e.bytes)
            continue
        tables['operation'].count(e.name, time)
        if e.full not in categories:
            categories[e.full] = next((name for name, pattern in patterns if pattern.search(e.full)), 'other')
        tables['category'].count(categories[e.full], time)
        if time < 5000:
            tables['small'].count(e.name, time)
        if e.kind == COPY:
            tables['memory'].count(e.name, time, e.bytes)
        elif asked.family in e.name:
            tables['family'].count('', time)
    count_gaps(events, tables['wait'], tables['part'])
    count_launches(events, tables['part'])
    return tables


def count_gaps(events, waits, parts):
    """Counts the time in which operations run, and the gaps between them, by where the next operation's call lies."""
    calls, until = by_correlation(events, (CALL,)), {}
    for e in sorted((e for e in events if e.kind <= COPY and e.inside), key=lambda e: e.begin):
        begin = until.setdefault(e.device, e.begin)
        if e.begin > begin:
            waits.count(e.name, e.begin - begin)
            call = calls.get(e.correlation, [None])[0]
            edges = [begin, *(min(max(at, begin), e.begin) for at in (call.begin, call.end))] if call else [begin] * 3
            for name, time in (("idle: before the next operation's call", edges[1] - edges[0]),
                               ('idle: in that call', edges[2] - edges[1]),
                               ('idle: after that call' if call else 'idle: its call is unknown', e.begin - edges[2])):
                if time:
                    parts.count(name, time)
        if e.end > max(begin, e.begin):
            parts.count('busy: an operation runs', e.end - max(begin, e.begin))
        until[e.device] = max(begin, e.end)
    if parts:
        parts.count('all: from the first operation to the last', parts.total('busy: ')[1] + waits.total()[1])


def count_launches(events, parts):
    """Counts the launch row: calls that start work, and on each thread what is between them."""
    started, last = by_correlation(events, (KERNEL, COPY)), {}
    for e in sorted((e for e in events if e.kind == CALL and e.inside and e.correlation in started),
                    key=lambda e: e.begin):
        if e.begin > last.get(e.track, e.begin):
            parts.count('host: between those calls', e.begin - last[e.track])
        parts.count('host: in calls that start work', e.end - e.begin)
        last[e.track] = e.end


# ---- printing ----

def print_table(table, title, all_ns, asked, unit='', least=0, old=None):
    """Shares are of all_ns; 0: of the first line, because ranges contain each other. `unit` says what bytes are: MB, or
    operations. With an old table, prints lines that became slower, the most first, and faster, the most last."""
    nothing, compares = [0] * 5, old is not None
    now, before = ((lambda name, of=of: of.get(name, nothing)) for of in (table, old or {}))
    slower = lambda name: now(name)[1] - before(name)[1]
    lines = sorted((name for name in {*table, *(old or ())} if (slower(name) if compares else now(name)[0] > least)),
                   key=lambda name: (-slower(name), name))
    if not lines:
        return
    more = '  old count       old ms    change ms' if compares else {
        'MB': '          MB      GB/s', 'operations': '  operations', '': ''}[unit]
    print(f'{"count":>10}{"total ms":>13}{"each us":>12}{"shortest":>12}{"longest":>12}{"share %":>9}{more}   {title}')
    all_ns = all_ns or now(lines[0])[1]
    for i, name in enumerate(lines):
        if compares and i == asked.top and len(lines) > 2 * asked.top:
            print(f'    ... {len(lines) - 2 * asked.top} others between')
        if i >= asked.top and not (compares and i + asked.top >= len(lines)):
            continue
        count, time, size, shortest, longest = now(name)
        more = f'{before(name)[0]:11}{before(name)[1] / 1e6:13.3f}{slower(name) / 1e6:+13.3f}' if compares else {
            'MB': f'{size / 1e6:12.3f}{size / (time or 1):10.2f}', 'operations': f'{size:12}', '': ''}[unit]
        print(f'{count:10}{time / 1e6:13.3f}{time / 1e3 / (count or 1):12.2f}{shortest / 1e3:12.2f}'
              f'{longest / 1e3:12.2f}{100 * time / (all_ns or 1):9.1f}{more}   {name}')


def print_long(events, asked):
    """Prints the longest operations, or all events that take longer than asked for, in order of time."""
    limit = asked.longer_than
    listed = [e for e in events if e.inside and e.kind <= (COPY if limit is None else RANGE)]
    zero = min((e.begin for e in listed), default=0)
    if limit is None:
        print('2   the longest operations, in order of time')
        listed = sorted(listed, key=lambda e: (e.begin - e.end, e.begin))[:asked.top]
    else:
        print(f'2   events of more than {limit} us, in order of time')
        listed = [e for e in listed if e.end - e.begin > 1000 * limit]
    for e in sorted(listed, key=lambda e: e.begin):
        print(f'    at{(e.begin - zero) / 1e6:13.3f} ms{(e.end - e.begin) / 1e3:12.2f} us   '
              f'{"thread" if e.process() == 1 else "stream"} {e.track}   {e.name}')


def print_advice(tables, asked):
    """Prints an experiment for each finding that applies: small launches, copies of a cache, gaps."""
    operations, small = tables['operation'].total(), tables['small'].total()
    copied = tables['operation'].total('Memcpy DtoD')[1] + tables['category'].total('concatenation')[1]
    idle, span = tables['wait'].total()[1], tables['part'].total('all: ')[1]
    launches = tables['part'].total('host: in ')[0]
    advice = [(share, what) for share, applies, what in (
        (small[0] / (operations[0] or 1), small[0] > asked.more_than and 2 * small[0] > operations[0] < 2 * launches,
         'of the operations are small, most with a call of their own: launch them as a CUDA graph, or fuse them'),
        (copied / (operations[1] or 1), 10 * copied > operations[1],
         "of the GPU's time is concatenation and copies on it: allocate a static cache, store new rows into slots"),
        (idle / (span or 1), 5 * idle > span,
         'of the time no operation runs: look at what the host does before and in the calls of answer 6')) if applies]
    for i, (share, what) in enumerate(advice):
        print(f'{"" if i else "what to try" + chr(10)}    {100 * share:.1f} % {what}')


def report(events, asked):
    tables = counted(events, asked)
    total = {name: tables[name].total() for name in 'operation small call memory family wait'.split()}
    all_ns, span = total['operation'][1], tables['part'].total('all: ')[1]
    print('1   top operations by total time')
    print_table(tables['operation'], 'operation', all_ns, asked)
    print_long(events, asked)
    print(f'3   small and frequent: {total["small"][0]} of {total["operation"][0]} operations take less than 5 us '
          f'each, about the time of a launch; {total["small"][1] / 1e6:.3f} ms\n    in total. Those with more than '
          f"{asked.more_than} launches, and the host's time in calls and ranges")
    print_table(tables['small'], 'small operation', all_ns, asked, least=asked.more_than)
    print_table(tables['call'], 'call', total['call'][1], asked)
    print_table(tables['range'], 'range', 0, asked)
    print('4   memory operations by direction')
    print_table(tables['memory'], 'memory operation', total['memory'][1], asked, 'MB')
    count, time, _, shortest, longest = total['family']
    print(f'5   kernels named *{asked.family}*: {count}, {time / 1e6:.3f} ms, {time / 1e3 / (count or 1):.2f} us each '
          f'({shortest / 1e3:.2f} to {longest / 1e3:.2f})')
    print(f'6   gaps: no operation runs for {total["wait"][1] / 1e6:.3f} of {span / 1e6:.3f} ms from the first to the '
          f'last, {total["wait"][0]} times')
    print_table(tables['wait'], 'gap before', total['wait'][1], asked)
    print_table(tables['part'], 'part of the time', span, asked)
    print('7   ranges on streams, from the first operation to the last')
    print_table(tables['span'], 'range on a stream', 0, asked, 'operations')
    print('8   operations by category')
    print_table(tables['category'], 'category', all_ns, asked)
    print_advice(tables, asked)


def compare(old, now, asked):
    """Prints what became slower and what faster, by operation, by category and by what the GPU waited for."""
    before, after = counted(old, asked), counted(now, asked)
    for table, title in (('operation', 'operation'), ('category', 'category'), ('wait', 'gap before'),
                         ('part', 'part of the time')):
        all_ns = after[table].total('all: ' if table == 'part' else '')[1]
        print_table(after[table], title, all_ns, asked, old=before[table])


# ---- writing ----

WRITTEN = ['kernel', 'gpu_memcpy', 'cuda_runtime', 'user_annotation', 'gpu_user_annotation']
LANES, DEPTH = 8, 64


class Rows:
    """Rows of the viewer: each stream has one of spans, then one of kernels, then one of copies; each host thread has
    one of ranges with the calls in them. The viewer drops an event that begins inside another one of its row and ends
    after it. Such events, as of kernels that start while the one before still runs (PDL), go to another lane: a row
    with the same title."""

    def __init__(self, write):
        self.write, self.count, self.lanes = write, 0, {}

    def of(self, e):
        """Returns the row's number. Events come in order of time, those that contain others first."""
        lanes = self.lanes.setdefault((e.process(), e.track, e.row()), [])
        for lane in lanes:
            while lane[1:] and lane[-1] <= e.begin:
                lane.pop()
            if len(lane) <= DEPTH and (not lane[1:] or lane[-1] >= e.end):
                break
        else:
            if len(lanes) < LANES:
                self.count += 1
                self.title(e, ', overlapping' if lanes else '')
                lanes.append(lane := [self.count])
        lane.append(e.end)  # its number, then the ends of events that contain each other
        return lane[0]

    def title(self, e, more):
        process, host = e.process(), e.process() == 1
        titles = 'host' if host else f'GPU {e.device}', f'thread {e.track}' if host else (
            f'stream {e.track} {("ranges", "kernels", "copies")[e.row()]}')
        for what, index, name in ('process', process, titles[0]), ('thread', self.count, titles[1] + more):
            for key, value in ('sort_index', index), ('name', name):
                self.write({'ph': 'M', 'pid': process, 'tid': self.count, 'name': f'{what}_{key}',
                            'args': {key: value}})


def write(events, path):
    """Writes Chrome's JSON for https://ui.perfetto.dev, with the categories and arguments of torch's profiler."""
    zero = min(e.begin for e in events)
    calls = by_correlation(events, (CALL,))
    us = lambda time: f'{time // 1000}.{time % 1000:03}'  # not rounded
    with open(path, 'w', encoding='utf-8') as file:
        def begin(phase, category, e, name, row, rest):
            file.write(f',\n{{"ph":"{phase}","cat":"{category}","pid":{e.process()},"tid":{row},'
                       f'"ts":{us(e.begin - zero)},"name":{json.dumps(name, ensure_ascii=False)}{rest}}}')

        file.write('{"displayTimeUnit":"ns","traceEvents":[\n'
                   '{"ph":"M","pid":1,"name":"process_labels","args":{"labels":"kvprim"}}')
        rows = Rows(lambda event: file.write(',\n' + json.dumps(event)))
        events = sorted(events, key=lambda e: (e.process(), e.track, e.row(), e.begin, -e.end))
        row_of = {id(e): rows.of(e) for e in events}
        for i, e in enumerate(events):
            on_gpu = e.process() > 1
            args = {'stream': e.track, 'device': e.device} if on_gpu else {'thread': e.track}
            args |= {'correlation': e.correlation} if e.correlation else {}
            args |= {'bytes': e.bytes} if e.kind == COPY else {'operations': e.bytes} if e.kind == SPAN else {}
            category = 'gpu_memset' if e.kind == COPY and e.name.startswith('Memset') else WRITTEN[e.kind]
            begin('X', category, e, e.name, row_of[id(e)], f',"dur":{us(e.end - e.begin)},"args":{json.dumps(args)}')
            call = calls.get(e.correlation) if e.kind <= COPY else None
            if call:  # An arrow. `bp` binds its end to the operation that contains the time, not to the next one.
                begin('s', 'ac2g', call[0], 'ac2g', row_of[id(call[0])], f',"id":{i}')
                begin('f', 'ac2g', e, 'ac2g', row_of[id(e)], f',"id":{i},"bp":"e"')
        file.write('\n]}\n')
    print(f'{len(events)} events in {path}, for ui.perfetto.dev')


# ---- the command line ----

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f'answers.py: {message}; see --help\n')


def category(text):
    name, _, pattern = text.partition('=')
    try:
        re.compile(pattern, re.I)
    except (re.error, OverflowError, RecursionError):  # such as "a(", "a{9999999999}" and thousands of "("
        pattern = ''
    if not (name and pattern):
        raise argparse.ArgumentTypeError(f'{text}: expected NAME=PATTERN, a regular expression')
    return name, pattern


def number(text):
    if not re.fullmatch(r'\d{1,15}', text):
        raise argparse.ArgumentTypeError(f'{text!r}: expected a whole number of at most 15 digits')
    return int(text)


def parsed():
    parser = Parser(prog='answers.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('trace', nargs='+', metavar='TRACE')
    add('--compare', action='store_true', help='of two traces, OLD NEW: what became slower and what faster')
    add('--range', action='append', default=[], metavar='NAME',
        help='only what was launched inside ranges of this name; a second one is that of NEW')
    add('--top', type=number, default=50, metavar='N', help='lines of a table; default: 50')
    add('--longer-than', type=number, metavar='US', help='answer 2: all events that take longer, on GPU and host')
    add('--more-than', type=number, default=100, metavar='N',
        help='answer 3: small operations that are launched more often; default: 100')
    add('--family', default='', metavar='TEXT', help='answer 5: kernels whose names contain this; default: all')
    add('--category', type=category, action='append', default=[], metavar='NAME=PATTERN',
        help='answer 8, and --compare: operations whose full names match this regular expression; may be repeated, the '
             'last one comes first; attention, matrix product, memory and concatenation come after them; what matches '
             'none is other')
    add('--as-ranges', metavar='CATEGORY', help='read events of this category as ranges, too, such as cpu_op')
    add('--full-names', action='store_true', help='keep namespaces, template arguments and parameters of kernels')
    add('--cut', action='store_true', help='of a cut file, answer from the events before the cut')
    add('--out', metavar='FILE', help='write what was read, with the ranges on streams, for ui.perfetto.dev')
    asked = parser.parse_args()
    asked.category.reverse()
    if len(asked.trace) != (2 if asked.compare else 1):
        parser.error('--compare needs two files' if asked.compare else 'one file, or --compare and two')
    if len(asked.range) > len(asked.trace):
        parser.error(f'more than one range of a file: {asked.range[-1]}')
    both = asked.trace[0], asked.out or ''
    if all(map(os.path.exists, both)) and os.path.samefile(*both):
        parser.error(f'--out would overwrite the trace: {asked.out}')
    for option in ('longer_than', 'more_than', 'family', 'out') if asked.compare else ():
        if getattr(asked, option) != parser.get_default(option):
            parser.error(f'--{option.replace("_", "-")} is for one file, not for --compare')
    return asked


def load(path, only, asked):
    trace = Trace(path, asked.as_ranges)
    trace.read(asked.cut, asked.full_names)
    print(f'{path}: {len(trace.events)} of {trace.seen} events read{"; CUT: " if trace.cut else ""}{trace.cut}')
    spans, named = project(trace.events, only)
    if only is not None and not named:
        raise Fault(f"{path}: no range is named '{only}'")
    return trace.events + spans


def main():
    asked = parsed()
    where = 'standard output'
    try:
        os.fstat(1)  # if it is closed, there is no sys.stdout
        sys.stdout.reconfigure(encoding='utf-8')
        both = [load(path, asked.range[min(i, len(asked.range) - 1)] if asked.range else None, asked)
                for i, path in enumerate(asked.trace)]
        compare(*both, asked) if asked.compare else report(*both, asked)
        if asked.out:
            sys.stdout.flush()
            where = asked.out
            write(*both, asked.out)
            where = 'standard output'
        sys.stdout.flush()
    except (Fault, OSError) as error:
        what = error.args[0] if isinstance(error, Fault) else f'{where}: {error.strerror}'
        print(f'answers.py: {what}', file=sys.stderr, flush=True)
        os._exit(1)  # what could not be written is not written again
    return 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tests the part of examples/10_trace that reads traces.

    python3 tests/trace/test_trace.py PROGRAM [TRACE]

Compares what PROGRAM prints with an independent count (oracle.py) from the samples or from TRACE, and with the answers
of the SQL files in Perfetto's trace processor, if there is one: TRACE_PROCESSOR names trace_processor_shell, or a
folder with the Perfetto UI's engine (default: build/perfetto, see fetch_perfetto.py), which node runs. SQLite runs them
always, over tables as Perfetto has them. Then tries bad input.
"""
import collections
import csv
import gzip
import io
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile

import check_trace
import oracle

HERE = pathlib.Path(__file__).parent
SAMPLES = HERE / 'samples'
SQL = sorted((HERE / '../../examples/10_trace/sql').resolve().glob('*.sql'))
counts = {'ok': 0, 'FAIL': 0, 'skip': 0}
program = scratch = None


def report(kind, name, lines=()):
    counts[kind] += 1
    print(kind, name)
    for line in list(lines)[:6]:
        print('   ', line)


def judge(name, faults):
    report('FAIL' if faults else 'ok', name, faults)


def run(*arguments, **options):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False,
                          **options)


def runs(*arguments):
    result = run(*arguments)
    if result.returncode != 0 or result.stderr:
        raise RuntimeError(f'{arguments}: exit code {result.returncode}: {result.stderr}')
    return result.stdout


# ---- answers ----

def answers(name, path, source=None, options=(), **asked):
    """Compares what the program prints with the oracle's answers, `asked` with the same options."""
    try:
        got, want = oracle.printed(runs(path, *options)), oracle.answers(str(source or path), **asked)
        faults = [fault for key in want for fault in oracle.differences(key, want[key], got[key])]
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        faults = [repr(error)]
    judge(f'{name} {" ".join(options)}: the answers are those of an independent count', faults)


def projected_like_torch(name, path):
    """torch projects its annotations, too, as events of their own, which it makes 1 ns longer at both ends. They must
    be ours to the nanosecond, and as many."""
    out = scratch / 'projected.json'
    runs(path, '--out', out)
    spans = lambda events, category: sorted(
        (e['name'], e['args'].get('stream', e['tid']), check_trace.ns(e['ts']), check_trace.ns(e['dur']))
        for e in events if e.get('ph') == 'X' and e.get('cat') == category)
    theirs = check_trace.load(str(path))
    ours = spans(check_trace.load(str(out)), 'gpu_user_annotation')
    first = min(check_trace.ns(e['ts']) for e in theirs if e.get('cat') in oracle.RANGES | oracle.CALLS |
                oracle.OPERATIONS)
    want = [(n, stream, at - first + 1, ns - 2) for n, stream, at, ns in spans(theirs, 'gpu_user_annotation')]
    faults = [f'torch has {line}, we have {ours}' for line in want if line not in ours] + [
        f'we have {line}, torch has {want}' for line in ours if line not in want]
    judge(f'{name}: the ranges on streams are those that torch projects ({len(want)})',
          faults or ([] if want else ['torch has none']))


# ---- SQL ----

def engine():
    """Returns a function from a trace and SQL files to their results, or says why there is none."""
    named = os.environ.get('TRACE_PROCESSOR', '')
    path = pathlib.Path(named or HERE / '../../build/perfetto').resolve()
    if (path / 'engine_bundle.js').is_file():
        node = shutil.which('node') or shutil.which('nodejs')
        return (lambda trace, files: by_node(node, path, trace, files)) if node else 'no node to run its WebAssembly'
    if named and path.is_file():
        return lambda trace, files: by_shell(path, trace, files)
    return f'no trace_processor_shell in TRACE_PROCESSOR, and no {os.path.relpath(path)} (fetch_perfetto.py)'


def by_node(node, folder, trace, files):
    result = subprocess.run([node, HERE / 'perfetto.js', folder, trace, *files], capture_output=True, text=True,
                            timeout=600, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return [json.loads(line) for line in result.stdout.splitlines()]


def by_shell(shell, trace, files):
    """trace_processor_shell prints the results as CSV."""
    results = []
    for file in files:
        query = scratch / 'query.sql'
        query.write_text(file[4:] if str(file).startswith('sql:') else pathlib.Path(file).read_text())
        result = subprocess.run([shell, '-q', query, trace], capture_output=True, text=True, timeout=600, check=False)
        rows = list(csv.reader(io.StringIO(result.stdout)))
        number = lambda cell: None if cell == '[NULL]' else float(cell) if '.' in cell else int(cell)
        results.append({'error': result.stderr} if result.returncode else {
            'columns': rows[0],
            'rows': [[cell if not cell or cell.strip('-.0123456789') and cell != '[NULL]' else number(cell)
                      for cell in row] for row in rows[1:]]})
    return results


def by_sqlite(trace, files):
    """Runs the files over the tables that the trace processor makes of Chrome's JSON, as far as the files need them
    (https://perfetto.dev/docs/analysis/sql-tables)."""
    tables, args, tracks = sqlite3.connect(':memory:'), [], {}
    tables.create_function('EXTRACT_ARG', 2, lambda at, key: args[at].get(key.removeprefix('args.')))
    tables.execute('CREATE TABLE slice (id INTEGER PRIMARY KEY, ts, dur, name, category, track_id, arg_set_id, '
                   'parent_id)')
    tables.execute('CREATE TABLE thread_track (id, utid)')
    tables.execute('CREATE TABLE stats (name, value, severity)')
    slices = sorted((check_trace.ns(e['ts']), -check_trace.ns(e['dur']), i, e)
                    for i, e in enumerate(check_trace.load(str(trace))) if e['ph'] == 'X')
    around = collections.defaultdict(list)  # of each track: the slices that are open, as (end, id)
    for number, (begin, minus_ns, _, event) in enumerate(slices):
        track = tracks.setdefault((event['pid'], event['tid']), len(tracks))
        while around[track] and around[track][-1][0] <= begin:
            around[track].pop()
        parent = around[track][-1][1] if around[track] else None
        around[track].append((begin - minus_ns, number))
        tables.execute('INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?, ?)', (number, begin, -minus_ns, event['name'],
                       event.get('cat'), track, number, parent))
        args.append(event.get('args', {}))
    tables.executemany('INSERT INTO thread_track VALUES (?, ?)', [(track, track + 1) for track in tracks.values()])
    results = []
    for file in files:
        try:
            text = file[4:] if str(file).startswith('sql:') else pathlib.Path(file).read_text(encoding='utf-8')
            results.append({'rows': [list(row) for row in tables.execute(text)]})
        except sqlite3.Error as error:
            results.append({'rows': [], 'error': str(error)})
    return results


# What a guide to Perfetto asks for, and what the trace processor says that it has lost.
GUIDE = "sql:select name, count(*), sum(dur) from slice where name like 'Memcpy%' group by name"
LOST = "sql:select name, value from stats where value > 0 and severity in ('error', 'data_loss')"


def sql(name, path, engine_name, query, whole):
    """Runs the SQL files on what the program has written from this trace, and on the trace itself if no slices of it
    overlap (`whole`), and compares with the program's answers."""
    out = scratch / 'for_sql.json'
    for trace in [out] + ([path] if whole else []):
        faults = []
        try:
            got = oracle.printed(runs(path, '--family', 'kvpc_', '--full-names', '--more-than', 2,
                                      '--out', out))
            got['longer'] = oracle.printed(runs(path, '--longer-than', 10, '--full-names'))['long']
            asked = [f'sql:{file.read_text().replace("> 100", "> 2")}' for file in SQL]  # more than 2 launches
            *results, guide, losses = query(trace, [*asked, GUIDE, LOST])
            faults += [f'{file.name}: {result["error"]}' for file, result in zip(SQL, results) if 'error' in result]
            faults += [f'the trace processor says {loss}' for loss in losses['rows']]
            if not faults:
                want = oracle.from_sql({file.stem: result for file, result in zip(SQL, results)}, got)
                faults += [fault for key in want for fault in oracle.differences(key, want[key], got[key])]
            copies = [line[:3] for line in got['memory operation'] if line[0].startswith('Memcpy')]
            if trace is out:
                faults += oracle.differences("the guide's query", [tuple(row) for row in guide['rows']], copies)
        except (RuntimeError, KeyError, TypeError, ValueError, subprocess.SubprocessError) as error:
            faults = [repr(error)]
        judge(f'{name}: {engine_name} answers the SQL files as the program answers'
              f'{", from what it wrote" if trace is out else ""}', faults)


# ---- bad input ----

def refuses(name, code, words, *arguments, **options):
    result = run(*arguments, **options)
    faults = []
    if result.returncode != code:
        faults.append(f'exit code {result.returncode}, expected {code}')
    if words not in result.stderr:
        faults.append(f'"{words}" is not in: {result.stderr}')
    if result.stderr.count('\n') > (3 if code == 2 else 1):
        faults.append(f'more than one line: {result.stderr}')
    if not result.stderr.startswith('10_trace'):
        faults.append(f'does not begin with the program: {result.stderr}')
    judge(name, faults)


def file_of(content, name='case.json'):
    path = scratch / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def bad_files():
    event = '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.5,"dur":2,"args":{"stream":7}}'
    packed = gzip.compress((SAMPLES / 'chrome.json').read_bytes())
    damaged = packed[:-6] + b'\0\0' + packed[-4:]
    for name, words, content in [
        ('an empty file', 'byte 0: the file is empty', ''),
        ('a file of spaces', 'byte 3: the file is empty', ' \n '),
        ('a binary file', "byte 0: expected '{' or '[' of a trace in JSON, found byte 0x7f", b'\x7fELF\2\1\1\0'),
        ('an SQLite file', 'byte 0: an SQLite file; export', b'SQLite format 3\0' + bytes(84)),
        ('other JSON', 'byte 10: neither "traceEvents" nor a "table"', '{"a": [1]}'),
        ('a number', "byte 0: expected '{' or '['", '17'),
        ('nsys of old', 'the JSON of an older nsys', '{"Type":80,"CudaEvent":{"startNs":"1","kernel":{}}}\n'),
        ('a trace of the CPU alone', 'none of its 1 events is a kernel, copy or memset of a GPU; others are of cpu_op',
         '[' + event.replace('kernel', 'cpu_op') + ']'),
        ('a cut object', 'byte 17: the file ends where', '{"traceEvents": ['),
        ('a cut array', "the file ends where ',' or ']' after an event is expected", '[' + event),
        ('a cut string', 'the file ends where the rest of a string', '[{"ph":"X'),
        ('a cut number', 'the file ends where the rest of a value', '[{"ts":17'),
        ('a cut compressed file', 'of its text: gzip reports damage or an early end', packed[:len(packed) // 2]),
        ('a damaged compressed file', 'gzip reports damage', damaged),
        ('more after the end', "byte 3: expected the end of the file, found '['", '[] []'),
        ('a trailing comma', "expected an event, found ']'", f'[{event},]'),
        ('a control character', 'expected the rest of a string, found byte 0x0a', '[{"ph":"X\n"}]'),
        ('an unknown escape', "after \\, found 'x'", '[{"ph":"\\x41"}]'),
        ('no number', "'01' is no value", '[{"ts":01}]'),
        ('no value', "'nul' is no value", '[{"ts":nul}]'),
        ('a long number', 'a number of more than 63 characters', '[{"ts":' + '1' * 99 + '}]'),
        ('deep arrays', 'more than 64 values inside each other', '[{"a":' + '[' * 100),
        ('no ts', 'an event has no ts', '[' + event.replace('"ts":1.5,', '') + ']'),
        ('no dur', 'an event has no dur', '[' + event.replace('"dur":2,', '') + ']'),
        ('no ph', 'an event has no "ph"', '[' + event.replace('"ph":"X",', '') + ']'),
        ('a negative ts', "ts is '-1.5', expected microseconds", '[' + event.replace('1.5', '-1.5') + ']'),
        ('a ts that is true', "ts is 'true', expected microseconds", '[' + event.replace('1.5', 'true') + ']'),
        ('a ts that is a word', "ts is 'one', expected microseconds", '[' + event.replace('1.5', '"one"') + ']'),
        ('a ts past 64 bits', "ts is '99999999999999999999'", '[' + event.replace('1.5', '9' * 20) + ']'),
        ('a negative stream of bytes', "the number of bytes is '-4'",
         '[' + event.replace('kernel', 'gpu_memcpy').replace('"stream"', '"bytes":-4,"stream"') + ']'),
        ('a correlation past 32 bits', "the correlation is '4294967296'",
         '[' + event.replace('"stream"', '"correlation":4294967296,"stream"') + ']'),
        ('an end without a begin', 'an event ends ("E") that has not begun', '[{"ph":"E","ts":1,"pid":1,"tid":1}]'),
        ('a begin without an end', '1 events have begun ("B") and not ended', '[' + event.replace('"X"', '"B"') + ']'),
        ('a row that ends before it begins', 'ends before it begins',
         '{"table":"CUPTI_ACTIVITY_KIND_KERNEL","start":5,"end":4,"shortName":1}'),
        ('a row without an end', 'has no start or no end', '{"table":"CUPTI_ACTIVITY_KIND_KERNEL","start":5}'),
        ('a row without a table', 'a row has no "table"', '{"table":"X"}\n{"start":5}'),
        ('a string twice', 'the string 4 is there for the second time',
         '{"table":"StringIds","id":4,"value":"a"}\n{"table":"StringIds","id":4,"value":"b"}'),
    ]:
        refuses(name, 1, words, file_of(content))
    gzip_here = scratch / 'bin/gzip'  # whole lines are no whole file if gzip has not come to its end
    gzip_here.parent.mkdir()
    gzip_here.write_text('#!/bin/sh\necho \'{"table":"CUPTI_ACTIVITY_KIND_KERNEL","start":1,"end":2}\'\nkill -9 $$\n')
    gzip_here.chmod(0o755)
    refuses('a file whose decompression is killed', 1, 'gzip reports damage or an early end (exit code 137)',
            file_of(packed), env={**os.environ, 'PATH': f'{gzip_here.parent}:{os.environ["PATH"]}'})
    refuses('a missing file', 1, 'no such: byte 0: cannot be opened: No such file', 'no such')
    refuses('a folder', 1, 'cannot be read: Is a directory', scratch)
    refuses('more events than allowed', 1, 'more than 3 events of a GPU', SAMPLES / 'chrome.json', '--most', 3)
    refuses('a range that is not there', 1, "no range is named 'stop'", SAMPLES / 'chrome.json', '--range', 'stop')
    cut = file_of('[' + event + ',' + event[:30])
    result = run(cut, '--cut')
    judge('--cut answers from what is before the cut', [] if result.returncode == 0 and
          '1 of 1 events read; CUT: ' in result.stdout and 'the file ends where' in result.stdout else [result])


def bad_arguments():
    trace = SAMPLES / 'chrome.json'
    for name, words, arguments in [
        ('no argument', 'one file, or --compare and two', []),
        ('an unknown option', "unrecognized option '--frob'", ['--frob', trace]),
        ('an option without a value', "option '--range' requires an argument", [trace, '--range']),
        ('two files', 'one file, or --compare and two', [trace, trace]),
        ('three files', '--compare needs two files', ['--compare', trace, trace, trace]),
        ('one file to compare', '--compare needs two files', ['--compare', trace]),
        ('two ranges of one file', 'more than one range: b', [trace, '--range', 'a', '--range', 'b']),
        ('three ranges', 'more than two ranges', [trace, '--range=a', '--range=b', '--range=c']),
        *((f'{option} of no number', f'no number: {value}', [trace, option, value]) for option, value in (
            ('--most', '0x'), ('--top', '-1'), ('--longer-than', ''), ('--more-than', '9' * 16))),
        ('a category without a pattern', 'needs NAME=PATTERN', [trace, '--category', 'a=']),
        ('a category of no expression', 'an extended regular expression', [trace, '--category', 'a=(']),
        ('too many categories', 'more than 20', [trace, *(f'--category=a{i}=b' for i in range(17))]),
        ('--out of a comparison', '--out is for one file', ['--compare', trace, trace, '--out', 'x']),
    ]:
        refuses(name, 2, words, *arguments)
    help_text = run('--help')
    judge('--help', [] if help_text.returncode == 0 and '--compare' in help_text.stdout else [help_text])


def outputs():
    trace = SAMPLES / 'chrome.json'
    old = file_of('old', 'out.json')
    refuses('a folder that is not there', 1, 'none/out.json: No such file', trace, '--out', scratch / 'none/out.json')
    refuses('a folder as output', 1, ': Is a directory', trace, '--out', scratch)
    refuses('a file as folder', 1, 'Not a directory', trace, '--out', old / 'out.json')
    device = scratch / 'full'
    device.symlink_to('/dev/full')  # the device itself would be lost if a broken program replaced it
    refuses('a full device', 1, 'full: No space left', trace, '--out', device)
    refuses('a full disk', 1, 'out.json: File too large', trace, '--out', old, preexec_fn=lambda: (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))))
    judge('... leaves the old file and nothing else', [] if old.read_text() == 'old' and
          not list(scratch.glob('*.part')) and device.is_symlink() else os.listdir(scratch))
    full = os.open('/dev/full', os.O_WRONLY)
    result = subprocess.run([program, trace], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    os.close(full)
    judge('full standard output', [] if result.returncode == 1 and 'standard output: No space' in result.stderr
          else [result])


# ---- more than the answers ----

def other_inputs():
    plain = SAMPLES / 'chrome.json'
    want = runs(plain).split('\n', 1)[1]
    packed = file_of(gzip.compress(plain.read_bytes()), "it's $HOME `x`.json.gz")
    judge('a compressed file whose name a shell would take apart',
          [] if runs(packed).split('\n', 1)[1] == want else ['other answers'])
    result = run('-', input=plain.read_text())
    judge('standard input', [] if result.stdout.split('\n', 1)[1] == want else [result])
    result = run(packed, preexec_fn=lambda: os.close(0))
    judge('a compressed file, without standard input', [] if result.stdout.split('\n', 1)[1:] == [want] else [result])
    again = scratch / 'again.json'
    runs(plain, '--out', again)
    for path in SAMPLES / 'pairs.json', SAMPLES / 'nsys.jsonl', again:  # the last is what it wrote
        judge(f'{path.name} has the answers of chrome.json, which is the same run',
              [] if runs(path).split('\n', 1)[1] == want else ['other answers'])
    foreign = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1.5,"dur":2,"args":{"a":[1]}},\n'
    events = plain.read_bytes().partition(b'"traceEvents": [')[2].rpartition(b'\n]')[0]
    huge = b'[' + foreign * 200000 + events + b']'
    few = lambda: resource.setrlimit(resource.RLIMIT_AS, (64 << 20, 64 << 20))
    result = subprocess.run([program, '-'], input=huge, capture_output=True, timeout=600, check=False,
                            preexec_fn=few)
    judge('20 MB of other events, in 64 MB of memory',
          [] if result.stdout.decode().split('\n', 1)[1:] == [want] else [result.stderr])


def comparisons():
    plain = SAMPLES / 'chrome.json'
    same = runs('--compare', plain, plain)
    judge('a trace compared with itself has no change', [] if same.count('\n') == 2 else [same])
    events = check_trace.load(str(plain))
    for event in events:
        if event['name'] == 'attend':
            event['dur'] += 1000 / 1000
        elif event['name'] == 'node':
            event['dur'] -= 250 / 1000
            event['name'] = 'node2'
    changed = file_of(json.dumps(events))
    lines = [' '.join(line.split()) for line in runs('--compare', plain, changed).splitlines()]
    cut = [' '.join(line.split()) for line in runs('--compare', plain, changed, '--top', 1).splitlines()]
    want = ['6 0.071 11.86 3.35 28.90 60.4 6 0.065 +0.006 attend', '6 0.006 1.00 1.00 1.00 5.1 0 0.000 +0.006 node2',
            '0 0.000 0.00 0.00 0.00 0.0 6 0.007 -0.007 node', '2 0.001 0.50 0.50 0.50 0.4 0 0.000 +0.001 node2',
            '1 0.366 366.35 366.35 366.35 100.0 1 0.365 +0.001 all: from the first operation to the last']
    judge('a comparison names what became slower, faster, new and gone, gaps, and all of the time',
          [line for line in want if line not in lines])
    judge('... with --top, at both ends', [] if '... 1 others between' in cut and want[0] in cut and want[2] in cut and
          want[1] not in cut else cut)
    for options, operations, launches in (((), 27, 22), (('--range', 'layer'), 14, 10),
                                          (('--range', 'decode "step" \u00e9'), 23, 19)):
        got = oracle.printed(runs(plain, *options))
        calls = [line[1] for line in got['part of the time'] if line[0] == 'host: in calls that start work']
        judge(f'{options} takes what was launched inside', [] if got['small'][0][3] == operations and
              calls == [launches] else [got['small'], calls])
    both = runs('--compare', plain, plain, '--range', 'layer', '--range', 'decode "step" \u00e9')
    judge('a second --range is that of the second file', [] if 'Memcpy HtoD' in both and
          'attend' not in both.split('gap before')[0] else [both])


def samples():
    for path in sorted(SAMPLES.glob('torch_*.json.gz')):
        answers(path.name, path, full_names=False)
        answers(path.name, path, options=('--family', 'at::native', '--full-names', '--more-than', '9'),
                family='at::native', more_than=9)
        projected_like_torch(path.name, path)
        judge(f'{path.name} keeps to the format', check_trace.Check(str(path), False).run())
    for name in 'chrome.json', 'nsys.jsonl':
        source = SAMPLES / 'chrome.json'
        answers(name, SAMPLES / name, source, ('--family', 'fill'), full_names=False, family='fill')
        answers(name, SAMPLES / name, source, ('--top', '3', '--more-than=4'), full_names=False, top=3, more_than=4)
        answers(name, SAMPLES / name, source, (
            '--longer-than', '3', '--category=GPU=half4|ptop', '--category', 'memory=dtoh'), full_names=False,
                longer_than=3, categories=[('GPU', 'half4|ptop'), ('memory', 'dtoh')])
    shares = oracle.printed(runs(SAMPLES / 'chrome.json', '--category', 'a=att.n', '--category=b=attend|node'))
    judge('of categories, the last given comes first', [] if ('b', 12) in [line[:2] for line in shares['category']]
          else [shares])
    ops = runs(SAMPLES / 'torch_static.json.gz', '--as-ranges', 'cpu_op', '--longer-than', '40')
    judge('--as-ranges takes events of a category as ranges', [] if re.search(
        r'thread \d+   aten::', ops) and re.search(r' GPU 0 stream \d+   aten::index_copy_', ops) else [ops])
    for path in sorted(SAMPLES.glob('*.json*')):
        out = scratch / 'written.json'
        runs(path, '--out', out)
        judge(f'what is written from {path.name} keeps to the format', check_trace.Check(str(out), True).run())


def checker():
    """The checker of the format finds faults."""
    good = {'ph': 'X', 'name': 'a', 'cat': 'kernel', 'pid': 1, 'tid': 1, 'ts': 1.0, 'dur': 2.0}
    titles = [{'ph': 'M', 'name': 'process_name', 'pid': 1, 'args': {'name': 'p'}},
              {'ph': 'M', 'name': 'thread_name', 'pid': 1, 'tid': 1, 'args': {'name': 't'}}]
    flow = [{'ph': p, 'name': 'f', 'cat': 'f', 'id': 1, 'pid': 1, 'tid': 1, 'ts': 1.0} for p in 'sf']
    flow[1]['bp'] = 'e'
    bad = [dict(good, ts='1.0'), dict(good, dur=-1), {k: v for k, v in good.items() if k != 'dur'}, dict(good, ph='Z'),
           dict(good, args=[]), dict(good, cat='else'), dict(good, tid=2), dict(good, ts=2.0), dict(good, name=7)]
    sets = {'an own trace': (titles + [good] + flow, 0), 'a flow that ends nowhere': (titles + [good, flow[0]], 1),
            'a flow past the slice': (titles + [good, flow[0], dict(flow[1], ts=9.0)], 1),
            'a flow to the next slice': (titles + [good, flow[0], dict(flow[1], bp='n')], 1),
            'titles missing': ([good], 1), 'a title without text': (titles[:1] + [good, dict(titles[1], args={})], 1)}
    sets |= {f'{event}': (titles + [good, event], 1) for event in bad}
    for name, (events, faulty) in sets.items():
        found = check_trace.Check(str(file_of(json.dumps(events))), True).run()
        judge(f'the checker of the format, {name}', [] if bool(found) == bool(faulty) else [f'found {found}'])


def main():
    global program, scratch
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    program = os.path.abspath(sys.argv[1])
    query = engine()
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        if len(sys.argv) == 3:
            path = pathlib.Path(sys.argv[2])
            answers(path.name, path, options=('--family', 'kvpc_'), family='kvpc_')
            judge(f'{path.name} keeps to the format', check_trace.Check(str(path), True).run())
            paths = [(path, True)]
        else:
            for test in samples, other_inputs, comparisons, bad_files, bad_arguments, outputs, checker:
                try:
                    test()
                except Exception as error:  # the tests after it run
                    judge(test.__name__, [repr(error)])
            paths = [(path, path.stem.startswith('torch')) for path in sorted(SAMPLES.glob('*.json*'))]
        for path, whole in paths:
            sql(path.name, path, 'SQLite', by_sqlite, whole)
            if path.name in ('pairs.json', 'nsys.jsonl', 'torch_dynamic.json.gz'):
                continue  # Perfetto takes a second for each
            if callable(query):
                sql(path.name, path, 'Perfetto', query, whole)
            else:
                report('skip', f'{path.name}: SQL in Perfetto: {query}')
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts['FAIL'] or not counts['ok'] else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tests the part of examples/10_trace that reads traces.

    python3 tests/trace/test_trace.py [TRACE]

Compares what answers.py prints with an independent count (oracle.py) from the samples or from TRACE, and with the
answers of the SQL files in Perfetto's trace processor, if there is one: TRACE_PROCESSOR names trace_processor_shell, or
a folder with the Perfetto UI's engine (default: build/perfetto, see fetch_perfetto.py), which node runs. SQLite runs
them always, over tables as Perfetto has them. Then tries bad input.
"""
import collections
import csv
import gzip
import io
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile

import check_trace
import oracle

HERE = pathlib.Path(__file__).parent
SAMPLES = HERE / 'samples'
EXAMPLE = (HERE / '../../examples/10_trace').resolve()
SQL = sorted((EXAMPLE / 'sql').glob('*.sql'))
sys.path.insert(0, str(EXAMPLE))
import answers as answers_py
counts = {'ok': 0, 'FAIL': 0, 'skip': 0}
program, scratch = EXAMPLE / 'answers.py', None


def report(kind, name, lines=()):
    counts[kind] += 1
    print(kind, name)
    for line in list(lines)[:6]:
        print('   ', line)


def judge(name, faults):
    report('FAIL' if faults else 'ok', name, faults)


def run(*arguments, **options):
    return subprocess.run([sys.executable, program, *map(str, arguments)], capture_output=True, text=True, timeout=600,
                          check=False, **options)


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
GUIDE = "sql:select name, count(*), sum(dur) from slice where name like 'Mem%' group by name"
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
            copies = [line[:3] for line in got['memory operation']]
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
    if not result.stderr.startswith('answers.py'):
        faults.append(f'does not begin with the program: {result.stderr}')
    judge(name, faults)


def file_of(content, name='case.json'):
    path = scratch / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


EVENT = '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.5,"dur":2,"args":{"stream":7}}'


def bad_files():
    event, packed = EVENT, gzip.compress((SAMPLES / 'chrome.json').read_bytes())
    for name, words, content in [
        ('an empty file', 'character 0: the file is empty', ''),
        ('a file of spaces', 'character 3: the file is empty', ' \n '),
        ('a binary file', "character 0: expected '{' or '[' of a trace in JSON, found '\\x7f'", b'\x7fELF\2\1\1\0'),
        ('an SQLite file', 'character 0: an SQLite file; export', b'SQLite format 3\0' + bytes(84)),
        ('other JSON', 'character 10: neither "traceEvents" nor a "table"', '{"a": [1]}'),
        ('a number', "character 0: expected '{' or '['", '17'),
        ('nsys of old', 'the JSON of an older nsys', '{"Type":80,"CudaEvent":{"startNs":"1","kernel":{}}}\n'),
        ('a trace of the CPU alone', 'none of its 1 events is a kernel, copy or memset of a GPU; others are of cpu_op',
         '[' + event.replace('kernel', 'cpu_op') + ']'),
        ('a cut object', 'character 17: the file ends where', '{"traceEvents": ['),
        ('a cut array', "the file ends where ',' or ']' after an event is expected", '[' + event),
        ('a cut string', 'character 9: the file ends inside an event', '[{"ph":"X'),
        ('a cut escape', 'the file ends inside an event', '[{"ph":"\\u00'),
        ('a cut number', 'the file ends inside an event', '[{"ts":17'),
        ('a cut fraction', 'the file ends inside an event', '[{"ts":17.'),
        ('a cut word', 'the file ends inside an event', '[{"ts":tru'),
        ('a cut compressed file', 'gzip: Compressed file ended', packed[:len(packed) // 2]),
        ('a damaged compressed file', 'gzip: CRC check failed', packed[:-6] + b'\0\0' + packed[-4:]),
        ('more after the end', "character 3: expected the end of the file, found '['", '[] []'),
        ('a trailing comma', "expected an event, found ']'", f'[{event},]'),
        ('no event', "expected an event, found '7'", '[7]'),
        ('a control character', 'Invalid control character', '[{"ph":"X\n"}]' + 20 * ' ' + '[]'),
        ('no value', 'an event: Expecting value', '[{"ts":nul, "name":"something long"}]'),
        ('deep arrays', 'too many values inside each other', '[{"a":' + '[' * 100000),
        ('no ts', 'ts is None, expected microseconds', '[' + event.replace('"ts":1.5,', '') + ']'),
        ('no dur', 'dur is None, expected microseconds', '[' + event.replace('"dur":2,', '') + ']'),
        ('no ph', 'an event has no "ph"', '[' + event.replace('"ph":"X",', '') + ']'),
        ('a negative ts', "ts is '-1.5', expected microseconds", '[' + event.replace('1.5', '-1.5') + ']'),
        ('a ts that is true', 'ts is True, expected microseconds', '[' + event.replace('1.5', 'true') + ']'),
        ('a ts that is a word', "ts is 'one', expected microseconds", '[' + event.replace('1.5', '"one"') + ']'),
        ('a ts that is no number', 'ts is nan, expected microseconds', '[' + event.replace('1.5', 'NaN') + ']'),
        ('args that are a list', 'args are [7], expected an object',
         '[' + event.replace('{"stream":7}', '[7]') + ']'),
        ('a ts past 64 bits', 'ts is 99999999999999999999', '[' + event.replace('1.5', '9' * 20) + ']'),
        ('a negative number of bytes', 'the number of bytes is -4',
         '[' + event.replace('kernel', 'gpu_memcpy').replace('"stream"', '"bytes":-4,"stream"') + ']'),
        ('a correlation past 32 bits', 'the correlation is 4294967296',
         '[' + event.replace('"stream"', '"correlation":4294967296,"stream"') + ']'),
        ('an end without a begin', 'an event ends ("E") that has not begun', '[{"ph":"E","ts":1,"pid":1,"tid":1}]'),
        ('a begin without an end', '1 events have begun ("B") and not ended', '[' + event.replace('"X"', '"B"') + ']'),
        ('a row that ends before it begins', 'ends before it begins',
         '{"table":"CUPTI_ACTIVITY_KIND_KERNEL","start":5,"end":4,"shortName":1}'),
        ('a row without an end', 'has no start or no end', '{"table":"CUPTI_ACTIVITY_KIND_KERNEL","start":5}'),
        ('a row without a table', 'a row has no "table"', '{"table":"X"}\n{"start":5}'),
        ('a string twice', 'the string 4 is there for the second time',
         '{"table":"StringIds","id":4,"value":"a"}\n{"table":"StringIds","id":4,"value":"b"}'),
        ('words that would write to a terminal', "ts is '\\x1b[31mx'",
         '[' + event.replace('1.5', '"\\u001b[31mx"') + ']'),
    ]:
        refuses(name, 1, words, file_of(content))
    refuses('a missing file', 1, 'no such: No such file', 'no such')
    refuses('a folder', 1, ': Is a directory', scratch)
    refuses('a range that is not there', 1, "no range is named 'stop'", SAMPLES / 'chrome.json', '--range', 'stop')
    result = run(file_of('[' + event + ',' + event[:30]), '--cut')
    judge('--cut answers from what is before the cut', [] if result.returncode == 0 and
          '1 of 1 events read; CUT: ' in result.stdout else [result])
    result = run(file_of(gzip.compress((f'{event},\n' * 9999).join('[]').encode())[:-400]), '--cut')
    judge('... of a compressed file', [] if result.returncode == 0 and '; CUT: gzip' in result.stdout else [result])


def cut_anywhere():
    """Every prefix of Chrome's JSON is refused because it ends. Of nsys's lines, those that end after a line are whole
    files. What is read in small pieces is the same as what is read at once."""
    want = None
    for piece in answers_py.Values.PIECE, 1, 7:
        answers_py.Values.PIECE, whole = piece, answers_py.Trace(str(SAMPLES / 'chrome.json'))
        whole.read(False, False)
        events = [[getattr(e, field) for field in e.__slots__] for e in whole.events]
        want = want or events
        judge(f'pieces of {piece} characters', [] if events == want else ['other events'])
    answers_py.Values.PIECE, faults = 1 << 18, []
    for name in 'chrome.json', 'pairs.json', 'nsys.jsonl':
        content = (SAMPLES / name).read_bytes()
        for size in range(1, len(content) - 2, 7):
            if name == 'nsys.jsonl' and b'\n' in content[size - 1:size + 1]:
                continue
            try:
                answers_py.Trace(str(file_of(content[:size]))).read(False, False)
                faults.append(f'{name}: {size} bytes are taken for a whole file')
            except answers_py.Fault as fault:
                faults += [f'{name}: {size} bytes: {fault}'] if 'the file ends' not in str(fault) else []
    judge('files that are cut at any byte', faults)


def spoilt():
    """Changes a few bytes. What is refused is refused in one line; what is accepted can be projected and counted."""
    chance, accepted = random.Random(17), 0
    asked = answers_py.argparse.Namespace(family='', category=[])
    contents = [(SAMPLES / name).read_bytes() for name in ('chrome.json', 'pairs.json', 'nsys.jsonl')]
    for number in range(600):
        content = bytearray(contents[number % 3])
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(b'"\\{}[]:,0179-+eE.u \n\1BEX\xff')
        trace = answers_py.Trace(str(file_of(bytes(content))))
        try:
            trace.read(False, False)
        except answers_py.Fault as fault:
            if '\n' in str(fault):
                raise
            continue
        spans, _ = answers_py.project(trace.events)
        answers_py.counted(trace.events + spans, asked)
        accepted += 1
    judge(f'spoilt bytes: {accepted} of 600 files are still accepted', [] if 60 < accepted < 540 else [accepted])


def odd_types():
    """Gives values other types than theirs, in every event and row. What is refused is refused in one line."""
    chrome = json.loads((SAMPLES / 'chrome.json').read_text())['traceEvents']
    nsys = [json.loads(line) for line in (SAMPLES / 'nsys.jsonl').read_text().splitlines()]
    faults, tried = [], set()
    lines = lambda rows: '\n'.join(map(json.dumps, rows))
    for events, kind, text in ((chrome, 'cat', json.dumps), (nsys, 'table', lines)):
        for i, event in enumerate(events):
            for key, value in ((key, value) for key in event for value in ([], {'a': 1}, 5, math.nan)):
                case = f'{event.get("ph")} {event.get(kind)}: {key} {value}'
                if case in tried:
                    continue
                tried.add(case)
                trace = answers_py.Trace(str(file_of(text([*events[:i], {**event, key: value}, *events[i + 1:]]))))
                try:
                    trace.read(False, False)
                    answers_py.project(trace.events)
                except answers_py.Fault as fault:
                    faults += [f'{case}: {fault}'] if '\n' in str(fault) else []
                except (AttributeError, ArithmeticError, TypeError) as error:
                    faults.append(f'{case}: {error!r}')
    judge(f'values of other types: {len(tried)}', faults)


def times_and_names():
    for us, want in (('0', 0), ('0.001', 1), ('0.0005', 1), ('0.0004', 0), ('1.5', 1500), ('12E-1', 1200),
                     ('4524124798798.264', 4524124798798264), ('1790857026000000.999', 1790857026000000999)):
        got = answers_py.ns({'ts': us}, 'ts')
        judge(f'{us} us are {want} ns', [] if got == want else [got])
    kernel, copy, call = range(3)
    for kind, full, want in (
            (kernel, 'void at::native::(anonymous namespace)::CatArrayBatchedCopy<c10::half, (int)4>(long, int)',
             'CatArrayBatchedCopy'),
            (kernel, 'std::enable_if<!(false), void>::type internal::gemvx::kernel<int, a<(b)1>>(cublasParams<int>)',
             'kernel'),
            (kernel, 'ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)',
             'ncclDevKernel_AllReduce_Sum_f16_RING_LL'),
            (kernel, '<>', '<>'), (kernel, '\xe9\U0001f600\ud83d\n\x00\x9bx', '\xe9\U0001f600????x'),
            (copy, 'Memcpy HtoD (Pageable -> Device)', 'Memcpy HtoD'), (copy, 'Memset (Unknown)', 'Memset'),
            (call, 'cudaMalloc_v3020', 'cudaMalloc'), (call, 'cudaGraph_version', 'cudaGraph_version')):
        got = answers_py.shown(answers_py.Event(kind, full), False)
        judge(f'{full!a} is shown as {want!a}', [] if got == want else [got])
    got = [answers_py.track(text) for text in ('Stream 13', 'default', 'other', 7)]
    judge('streams by number or name', [] if (got[0], got[3]) == (13, 7) and got[1] != got[2] else [got])


def bad_arguments():
    trace = SAMPLES / 'chrome.json'
    for name, words, arguments in [
        ('no argument', 'the following arguments are required: TRACE', []),
        ('an unknown option', 'unrecognized arguments: --frob', ['--frob', trace]),
        ('an option without a value', 'argument --range: expected one argument', [trace, '--range']),
        ('two files', 'one file, or --compare and two', [trace, trace]),
        ('three files', '--compare needs two files', ['--compare', trace, trace, trace]),
        ('one file to compare', '--compare needs two files', ['--compare', trace]),
        ('two ranges of one file', 'more than one range of a file: b', [trace, '--range', 'a', '--range', 'b']),
        ('three ranges', 'more than one range of a file: c',
         ['--compare', trace, trace, '--range=a', '--range=b', '--range=c']),
        *((f'{option} {value}', f"argument {option}: '{value}': expected a whole number", [trace, option, value])
          for option, value in (('--top', '0x'), ('--top', '-1'), ('--longer-than', ''), ('--longer-than', '0.5'),
                                ('--more-than', '9' * 16))),
        *((f'--category {value[:20]}', f'argument --category: {value}: expected NAME=PATTERN',
           [trace, '--category', value]) for value in ('a', 'a=', '=x', 'a=(', 'a=x{99999999999}', 'a=' + '(' * 5000)),
        *((f'{option} of a comparison', f'{option} is for one file', ['--compare', trace, trace, option, '7'])
          for option in ('--longer-than', '--more-than', '--family', '--out')),
        ('the trace as output', 'would overwrite the trace', [file_of(f'[{EVENT}]'), '--out', scratch / 'case.json']),
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
    device.symlink_to('/dev/full')
    refuses('a full device', 1, 'full: No space left', trace, '--out', device)
    full = os.open('/dev/full', os.O_WRONLY)
    result = subprocess.run([sys.executable, program, trace], stdout=full, stderr=subprocess.PIPE, text=True,
                            check=False)
    os.close(full)
    judge('full standard output', [] if result.returncode == 1 and 'standard output: No space' in result.stderr
          else [result])
    result = subprocess.run(['sh', '-c', 'exec "$@" >&-', 'sh', sys.executable, program, trace], capture_output=True,
                            text=True, check=False)
    judge('closed standard output', [] if result.returncode == 1 and result.stderr ==
          'answers.py: standard output: Bad file descriptor\n' else [result])


# ---- more than the answers ----

def other_inputs():
    plain = SAMPLES / 'chrome.json'
    want = runs(plain).split('\n', 1)[1]
    packed = file_of(gzip.compress(plain.read_bytes()), "it's $HOME `x`.json.gz")
    judge('a compressed file whose name a shell would take apart',
          [] if runs(packed).split('\n', 1)[1] == want else ['other answers'])
    result = run('-', input=plain.read_text())
    judge('standard input', [] if result.stdout.split('\n', 1)[1] == want else [result])
    again = scratch / 'again.json'
    runs(plain, '--out', again)
    for path in SAMPLES / 'pairs.json', SAMPLES / 'nsys.jsonl', again:  # the last is what it wrote
        judge(f'{path.name} has the answers of chrome.json, which is the same run',
              [] if runs(path).split('\n', 1)[1] == want else ['other answers'])
    foreign = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1.5,"dur":2,"args":{"a":[1]}},\n'
    events = plain.read_bytes().partition(b'"traceEvents": [')[2].rpartition(b'\n]')[0]
    huge = b'[' + foreign * 200000 + events + b']'
    few = lambda: resource.setrlimit(resource.RLIMIT_AS, (128 << 20, 128 << 20))
    result = subprocess.run([sys.executable, program, '-'], input=huge, capture_output=True, timeout=600,
                            check=False, preexec_fn=few)
    judge('20 MB of other events, in 128 MB of address space',
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
    lines = [' '.join(line.split()) for line in runs('--compare', plain, changed,
                                                          '--category=walk=attend').splitlines()]
    cut = [' '.join(line.split()) for line in runs('--compare', plain, changed, '--top', 1).splitlines()]
    want = [*(f'6 0.071 11.86 3.35 28.90 60.4 6 0.065 +0.006 {name}' for name in ('attend', 'walk')),
            '6 0.006 1.00 1.00 1.00 5.1 0 0.000 +0.006 node2',
            '0 0.000 0.00 0.00 0.00 0.0 6 0.007 -0.007 node', '2 0.001 0.50 0.50 0.50 0.4 0 0.000 +0.001 node2',
            '1 0.366 366.35 366.35 366.35 100.0 1 0.365 +0.001 all: from the first operation to the last']
    judge('a comparison names what became slower, faster, new and gone, gaps, and all of the time',
          [line for line in want if line not in lines])
    judge('... with --top, at both ends', [] if '... 1 others between' in cut and want[0] in cut and want[3] in cut and
          want[2] not in cut else cut)
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
    words = '|'.join(pattern for _, pattern in oracle.SHARES).split('|')
    each = file_of(json.dumps([dict(json.loads(EVENT), name=f'x_{word}_y', ts=9 * i) for i, word in enumerate(words)]))
    answers('every word of a category', each)
    shares = by_sqlite(each, [EXAMPLE / 'sql/8_categories.sql'])[0]['rows']
    judge('... and in SQL', oracle.differences('category', [tuple(line[:3]) for line in shares],
                                               oracle.printed(runs(each))['category']))
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
    global scratch
    if len(sys.argv) > 2 or sys.argv[1:] and sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    query = engine()
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        if len(sys.argv) == 2:
            path = pathlib.Path(sys.argv[1])
            answers(path.name, path, options=('--family', 'kvpc_', '--full-names'), family='kvpc_')
            judge(f'{path.name} keeps to the format', check_trace.Check(str(path), False).run())
            found = [tuple(row) for row in by_sqlite(path, [GUIDE])[0]['rows']]
            judge(f"{path.name}: the guide's query finds all memory operations", oracle.differences(
                'guide', found, [line[:3] for line in oracle.printed(runs(path))['memory operation']]))
            paths = [(path, False)]
        else:
            for test in (samples, times_and_names, other_inputs, comparisons, bad_files, cut_anywhere, spoilt,
                         odd_types, bad_arguments, outputs, checker):
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

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the same made-up run in three forms, in the folder of this file:

    chrome.json   Chrome's JSON with the categories of torch's profiler
    pairs.json    a bare array, in which the host's events are pairs ("B", "E")
    nsys.jsonl    rows of the tables that NVIDIA documents for nsys's exports (SQLite Export Schema Reference): columns,
                  numbers of copyKind (ENUM_CUDA_MEMCPY_OPER), eventType 59 of ranges that push and pop, globalTid

torch_*.json.gz are no fiction: torch 2.11 wrote them on an H200, see torch_trace.py.
"""
import json
import pathlib

HERE = pathlib.Path(__file__).parent
events = []  # (kind, name, begin, end, {device, stream, thread, correlation, bytes})


def add(kind, name, begin, ns, **more):
    events.append((kind, name, begin, begin + ns, more))


def run():
    """Two GPUs and three threads, of which two launch at the same time; kernels that overlap as under PDL; a graph
    whose kernels have one correlation; an operation whose call is missing; ranges inside each other; a copy of each
    direction; arguments that look like events."""
    correlation, now = 100, 1_000_000
    for step in range(2):
        add('range', f'decode "step" \u00e9', now, 95_000, thread=71)
        add('range', 'layer', now + 1_000, 60_000, thread=71)
        for i in range(5):
            device, thread = (1, 72) if i == 4 else (0, 71)
            add('call', 'cudaLaunchKernel', now + (2_000 + 7_000 * i if i < 4 else 25_000), 4_321 + i, thread=thread,
                correlation=correlation)  # ends after the one before it, on the other thread
            add('kernel', 'void fill_rows<(anonymous namespace)::half4, 8>(int const*, long)' if i % 2 else 'attend',
                now + 9_000 + 8_123 * i, 27_900 if i == 2 else 2_345 + i, device=device, stream=7 + i % 2,
                correlation=correlation)
            correlation += 1
        events[-1][4]['inputs'] = [{'ts': 1, 'name': 'no event', 'stream': 3}, [{'ph': 'Z', 'dur': None}]]
        add('call', 'cudaGraphLaunch', now + 40_000, 9_000, thread=71, correlation=correlation)
        for i in range(3):
            add('kernel', 'node', now + 52_000 + 1_500 * i, 1_250, device=0, stream=7, correlation=correlation)
        correlation += 1
        for i, direction in enumerate(('HtoD', 'DtoH', 'DtoD', 'PtoP')):
            if step < 1 or i < 3:
                add('call', 'cudaMemcpyAsync', now + 65_000 + 5_000 * i, 3_000, thread=71, correlation=correlation)
            add('copy', direction, now + 70_000 + 5_500 * i, 2_000 + 700 * i, device=0, stream=9,
                correlation=correlation, bytes=4096 << i)
            correlation += 1
        add('call', 'cudaMemsetAsync', now + 88_000, 2_000, thread=71, correlation=correlation)
        add('memset', 'memset', now + 93_000, 900 + step, device=0, stream=9, correlation=correlation, bytes=777)
        correlation += 1
        add('call', 'cudaStreamSynchronize', now + 96_000, 12_000, thread=71, correlation=correlation)
        correlation += 1
        now += 120_000 + 1_001 * step
    add('call', 'cudaLaunchKernel', now, 4_000, thread=73, correlation=correlation)
    add('kernel', 'last', now + 6_000, 5_000, device=0, stream=7, correlation=correlation)


def chrome(pairs):
    categories = {'kernel': 'kernel', 'copy': 'gpu_memcpy', 'memset': 'gpu_memset', 'call': 'cuda_runtime',
                  'range': 'user_annotation'}
    out = [{'ph': 'M', 'name': 'process_name', 'pid': 70, 'args': {'name': 'python3'}}]
    timed = []
    for kind, name, begin, end, more in events:
        name = {'copy': f'Memcpy {name} (Device -> Pinned)', 'memset': 'Memset (Device)'}.get(kind, name)
        gpu = 'device' in more
        where = {'pid': more['device'] if gpu else 70, 'tid': more['stream'] if gpu else more['thread']}
        event = {'cat': categories[kind], 'name': name, **where, 'ts': begin / 1000,
                 'args': {key: more[key] for key in more if key != 'thread'}}
        if pairs and not gpu:
            timed.append((begin, 1, -end, {'ph': 'B', **event}))
            timed.append((end, 0, -begin, {'ph': 'E', **where, 'ts': end / 1000}))
        else:
            timed.append((begin, 2, -end, {'ph': 'X', **event, 'dur': (end - begin) / 1000}))
    timed.sort(key=lambda e: e[:3])
    out += [event for *_, event in timed]
    out.append({'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::mm', 'pid': 70, 'tid': 71, 'ts': 990, 'dur': 3.5})
    return out


def nsys():
    tables = {'kernel': 'CUPTI_ACTIVITY_KIND_KERNEL', 'copy': 'CUPTI_ACTIVITY_KIND_MEMCPY',
              'memset': 'CUPTI_ACTIVITY_KIND_MEMSET', 'call': 'CUPTI_ACTIVITY_KIND_RUNTIME', 'range': 'NVTX_EVENTS'}
    kinds = {'HtoD': 1, 'DtoH': 2, 'DtoD': 8, 'PtoP': 10}
    strings, rows = [], []
    number = lambda text: strings.index(text) if text in strings else strings.append(text) or len(strings) - 1
    for kind, name, begin, end, more in events:
        row = {'table': tables[kind], 'start': begin, 'end': end}
        if 'device' in more:
            row |= {'deviceId': more['device'], 'contextId': 1, 'streamId': more['stream'],
                    'correlationId': more['correlation'], 'globalPid': 70 << 24, 'inputs': more.get('inputs')}
        else:
            row['globalTid'] = 1 << 56 | 70 << 24 | more['thread']
        if kind == 'kernel':
            row |= {'demangledName': number(name), 'shortName': number('fill_rows' if '<' in name else name)}
        elif kind == 'call':
            row |= {'eventClass': 0, 'correlationId': more['correlation'], 'nameId': number(name + '_v7000'),
                    'returnValue': 0}
        elif kind == 'range':
            row |= {'eventType': 59, 'rangeId': None, 'textId': number(name), 'domainId': 0}
        elif kind == 'copy':
            row |= {'bytes': more['bytes'], 'copyKind': kinds[name], 'srcKind': 2, 'dstKind': 2}
        else:
            row |= {'value': 0, 'bytes': more['bytes'], 'memKind': 2}
        rows.append(row)
    texts = [{'table': 'StringIds', 'id': i, 'value': text} for i, text in enumerate(strings)]
    extra = [{'table': 'TARGET_INFO_GPU', 'vmId': 1, 'id': 0, 'name': 'NVIDIA H200'},
             {'table': 'NVTX_EVENTS', 'start': 5, 'end': None, 'eventType': 34, 'text': 'a mark', 'globalTid': 1}]
    return texts[:2] + extra + rows + texts[2:]


def main():
    run()
    with open(HERE / 'chrome.json', 'w', encoding='utf-8') as file:
        lines = ',\n'.join(json.dumps(event, separators=(',', ':')) for event in chrome(False))
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0}],\n"traceEvents": [\n%s\n],\n'
                   '"traceName": "chrome.json"}\n' % lines)
    with open(HERE / 'pairs.json', 'w', encoding='utf-8') as file:
        lines = ',\n'.join(json.dumps(event, ensure_ascii=False, separators=(',', ':')) for event in chrome(True))
        file.write(f'[\n{lines}\n]\n')
    with open(HERE / 'nsys.jsonl', 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(row, separators=(',', ':')) + '\n' for row in nsys())


if __name__ == '__main__':
    main()

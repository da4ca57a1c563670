# SPDX-License-Identifier: MIT
"""What the headers weigh, and what changed in their kernels.

    python3 tests/profile/weight.py                      `make weight`: measures all rows of WEIGHED; takes minutes
    python3 tests/profile/weight.py check [CUBIN...]     compares lines, and the kernels of cubins, with BUDGETS
    python3 tests/profile/weight.py compare OLD NEW      two cubins, or two listings: build/weight/kernels.txt

Prints lines, kernels, KB of machine code, CPU seconds of `nvcc -c` for one architecture, and MB of the object, for each
header and for each switch that leaves something out (KB of 1,024 bytes, MB of 1,000,000). `make weight` keeps that in
build/results/weight.txt. Leaves in build/weight/kernels.txt a line for each kernel: MD5 and bytes of its code,
registers, and bytes of stack. Exits with 1 if a budget is exceeded. NVCC and NCCL_INCLUDE say what to build with, as
the Makefile found it.
"""
import collections
import hashlib
import os
import re
import resource
import struct
import subprocess
import sys

sys.dont_write_bytecode = True  # no __pycache__ in tests/
import profile  # noqa: E402: of this folder, not Python's own
from profile import need  # noqa: E402

ARCH = 'sm_90'
# Header, and the switches that it is compiled with.
WEIGHED = [('kvprim_cuda.cuh', ''), ('kvprim_cuda.cuh', '-DKVPRIM_NO_CONVERT'),
           ('kvprim_cuda.cuh', '-DKVPRIM_NO_FETCH'), ('kvprim_cuda.cuh', '-DKVPRIM_NO_FOUR_BIT'),
           ('kvprim_cuda.cuh', '-DKVPRIM_NO_UNPACK'),
           ('kvprim_cuda.cuh', '-DKVPRIM_NO_CONVERT -DKVPRIM_NO_UNPACK'),
           ('kvprim_nccl.h', ''), ('kvprim_nccl.h', '-DKVPRIM_NO_NORM'), ('kvprim_nccl.h', '-DKVPRIM_NO_EXCHANGE'),
           ('kvprim_nccl.h', '-DKVPRIM_NO_NORM -DKVPRIM_NO_EXCHANGE'), ('kvprim_nccl.h', '-DKVPRIM_NO_KERNELS')]
MACROS = {'kvprim_cuda.cuh': 'KVPRIM_IMPLEMENTATION', 'kvprim_nccl.h': 'KVPRIM_NCCL_IMPLEMENTATION'}  # kvprim.h once
PREFIX = {'kvprim_cuda.cuh': 'kvpc_', 'kvprim_nccl.h': 'kvpn_'}
# The most that a header may have: lines, kernels and KB of code for sm_90 by nvcc 13.0, which is what it has. A change
# that makes it lighter lowers them; one that needs more raises them, and its commit says what pays for that. Seconds
# depend on the machine, so `make check` cannot hold them.
Budget = collections.namedtuple('Budget', 'lines kernels kb')
BUDGETS = {'kvprim.h': Budget(6146, 0, 0), 'kvprim_cuda.cuh': Budget(6663, 104, 800),
           'kvprim_nccl.h': Budget(5464, 80, 1214)}

Kernel = collections.namedtuple('Kernel', 'md5 bytes registers stack')


def sections_of(data):
    """Yields the name, the bytes and the field sh_info of each section of a 64-bit ELF file."""
    at, = struct.unpack_from('<Q', data, 40)
    size, count, names = struct.unpack_from('<HHH', data, 58)
    headers = [struct.unpack_from('<IIQQQQIIQQ', data, at + size * i) for i in range(count)]
    start = headers[names][4]
    for name, _, _, _, offset, length, _, info, _, _ in headers:
        end = data.index(b'\0', start + name)
        yield data[start + name:end].decode(), data[offset:offset + length], info


def clear(name):
    """A kernel's name without the prefix that nvcc derives from the file's name."""
    return re.sub(r'_INTERNAL_\w+?::|\(anonymous namespace\)::', '', name)


def attribute(info, wanted):
    """Returns the last number of each attribute `wanted` in .nv.info, by the number of its symbol."""
    found, at = {}, 0
    while at + 4 <= len(info):
        kind, code, size = struct.unpack_from('<BBH', info, at)
        if kind == 4 and code == wanted and size >= 8:
            symbol, value = struct.unpack_from('<II', info, at + 4)
            found[symbol] = value
        at += 4 + (size if kind == 4 else 0)
    return found


def kernels_of(path):
    """Returns the kernels of a cubin, by their clear names, or reads a listing."""
    with open(path, 'rb') as file:
        data = file.read()
    if not data.startswith(b'\x7fELF'):
        rows = [line.split(None, 4) for line in data.decode().splitlines() if not line.startswith('#')]
        return {row[4]: Kernel(row[0], *(int(number) for number in row[1:4])) for row in rows}
    sections = list(sections_of(data))
    info = next((bytes_ for name, bytes_, _ in sections if name == '.nv.info'), b'')
    registers, stacks = attribute(info, 0x2f), attribute(info, 0x12)  # EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE
    code = {name[6:]: (bytes_, number & 0xffffff) for name, bytes_, number in sections if name.startswith('.text.')}
    names = profile.short_names(code)
    need(len({clear(name) for name in names.values()}) == len(code), path + ': kernels of the same name')
    return {clear(names[mangled]): Kernel(hashlib.md5(bytes_).hexdigest(), len(bytes_), registers.get(symbol, 0),
                                          stacks.get(symbol, 0)) for mangled, (bytes_, symbol) in code.items()}


def write_listing(path, kernels):
    with open(path, 'w') as file:
        file.write('# MD5 and bytes of the code, registers, bytes of stack, kernel: for %s\n' % ARCH)
        for name, kernel in sorted(kernels.items()):
            file.write('%s %6d %4d %4d %s\n' % (kernel + (name,)))


def compare(old, new):
    """Prints which kernels are the same, differ, went or came. Returns whether all are the same."""
    both = [name for name in old if name in new]
    differ = [name for name in both if old[name].md5 != new[name].md5]
    for name in differ:
        print('differs  %5d -> %5d bytes, %3d -> %3d registers, %d -> %d stack  %s' % (
            old[name].bytes, new[name].bytes, old[name].registers, new[name].registers, old[name].stack,
            new[name].stack, name))
    for sign, names in ('went', sorted(set(old) - set(new))), ('came', sorted(set(new) - set(old))):
        print(''.join('%s     %s\n' % (sign, name) for name in names), end='')
    print('%d kernels before, %d now: %d are the same, %d differ, %d went, %d came' % (
        len(old), len(new), len(both) - len(differ), len(differ), len(old) - len(both), len(new) - len(both)))
    return old.keys() == new.keys() and not differ


def lines_of(header):
    return len(profile.lines_of(header))


def check(cubins):
    """Prints each quantity that exceeds its budget. Returns how many do."""
    wrong = ['%s has %d lines, the budget is %d' % (header, lines_of(header), budget.lines)
             for header, budget in BUDGETS.items() if lines_of(header) > budget.lines]
    for cubin in cubins:
        all_kernels = kernels_of(cubin)
        for header, prefix in PREFIX.items():
            kernels = [kernel for name, kernel in all_kernels.items() if prefix in name]
            kb = sum(kernel.bytes for kernel in kernels) / 1024
            if len(kernels) > BUDGETS[header].kernels or kb > BUDGETS[header].kb:
                wrong.append('%s has %d kernels of %.0f KB, the budget is %d of %d KB' % (
                    header, len(kernels), kb, *BUDGETS[header][1:]))
    print(''.join('FAIL %s: tests/profile/weight.py\n' % line for line in wrong), end='')
    return len(wrong)


def compiled(header, switches):
    """Returns the CPU seconds of `nvcc -c`, the object's bytes, and the kernels."""
    unit = 'build/weight/%s%s' % (header.split('.')[0], re.sub('-DKVPRIM| ', '', switches).lower())
    with open(unit + '.cu', 'w') as source:
        source.write('#define %s\n#include "%s"\n' % (MACROS[header], header))
    command = profile.NVCC.split() + ['-std=c++17', '-O3', '-arch=' + ARCH, '-I.', *switches.split(),
                                      *profile.NCCL_HEADERS, unit + '.cu', '-o']
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    need(subprocess.call(command + [unit + '.o', '-c']) == 0, header + ' does not compile')
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    need(subprocess.call(command + [unit + '.cubin', '-cubin']) == 0, header + ' does not compile')
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, os.path.getsize(unit + '.o'), kernels_of(unit + '.cubin')


def weigh():
    """Measures all rows, and prints the table. Returns how many budgets are exceeded."""
    need(profile.NVCC, profile.NO_NVCC)
    os.makedirs('build/weight', exist_ok=True)
    form = '%-16s %-24s %6s %8s %8s %9s %7s'
    print(profile.output_of(*profile.NVCC.split(), '--version').splitlines()[-1] + ', for ' + ARCH)
    print(form % ('header', 'switch', 'lines', 'kernels', 'code KB', 'CPU s', 'MB'))
    print(form % ('kvprim.h', '', lines_of('kvprim.h'), 0, 0, '-', '-'))
    everything, cubins = {}, []
    sums = [lines_of('kvprim.h'), 0, 0, 0, 0]
    for header, switches in WEIGHED:
        if header not in profile.HEADERS:
            print('without %s: no nccl.h under NCCL_HOME or in the usual places' % header)
            continue
        seconds, size, kernels = compiled(header, switches)
        row = [lines_of(header), len(kernels), sum(k.bytes for k in kernels.values()) / 1024, seconds, size / 1e6]
        print(form % (header, re.sub('-D|KVPRIM_', '', switches), '' if switches else row[0], row[1],
                      '%.0f' % row[2], '%.1f' % row[3], '%.1f' % row[4]))
        if not switches:
            sums = [a + b for a, b in zip(sums, row)]
            everything.update(kernels)
            cubins.append('build/weight/%s.cubin' % header.split('.')[0])
    print(form % ('together', '', sums[0], sums[1], '%.0f' % sums[2], '%.1f' % sums[3], '%.1f' % sums[4]))
    write_listing('build/weight/kernels.txt', everything)
    return check(cubins)


def main(job='', *inputs):
    try:
        if job == 'check':
            return check(inputs) > 0
        if job == 'compare' and len(inputs) == 2 and all(inputs):
            return not compare(*(kernels_of(path) for path in inputs))
        if not job:
            return weigh() > 0
    except (profile.Missing, OSError, ValueError, IndexError, struct.error) as missing:
        print(missing, file=sys.stderr)
        return 1
    print(__doc__.split('\n\n')[1], file=sys.stderr)
    return 2


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))

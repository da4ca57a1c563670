# SPDX-License-Identifier: MIT
"""usage: python3 tests/profile/profile.py sass|cfg [CUBIN...]   from the top folder; `make sass` and so on call it
       python3 tests/profile/profile.py ptx PTX...
       python3 tests/profile/profile.py ncu|sanitize
       python3 tests/profile/profile.py compare A B            two copies of build/ncu.csv, or two of ncu's reports

    sass      prints registers, stack and widths of memory accesses of every kernel; checks main paths for 128 bits,
              that kernels wait for the one before them, that stores load rows before they wait for a slot, and that
              the benchmark's opponents load rows before they store
    ptx       checks only that they wait, in what nvcc -ptx wrote of kvprim_cuda.cuh for sm_90 or newer
    cfg       draws control-flow graphs of the kernels: build/cfg/*.dot, and .svg if there is Graphviz
    ncu       prints counters of one launch of each operation, as a table and a checklist; needs a GPU
    sanitize  runs compute-sanitizer's four tools on a tenth of the tests, build/test_cuda; needs a GPU

CUDA_HOME, NVCC, CUDA_ARCH, NCCL_INCLUDE and NCCL_LIBRARY (a file) say what to build with, as the Makefile found it.
Searches for NVIDIA's tools on PATH, beside nvcc, and where their packages put them. Exits with 1 if something is not as
it should be, or a tool is missing.
"""
import collections
import csv
import glob
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys

NVCC, CUDA_HOME, NCCL_INCLUDE, NCCL_LIBRARY = (
    os.environ.get(name, '') for name in ('NVCC', 'CUDA_HOME', 'NCCL_INCLUDE', 'NCCL_LIBRARY'))
NO_GPU = 'no GPU here (nvidia-smi lists none)'
NO_NVCC = 'no nvcc on PATH, under CUDA_HOME or in the usual places: install CUDA'
HEADERS = ['kvprim.h', 'kvprim_cuda.cuh'] + ['kvprim_nccl.h'] * (NCCL_INCLUDE != '')
# nvcc searches folders given by -I before its own.
NCCL_HEADERS = [] if NCCL_INCLUDE in ('', '/usr/include') else ['-I' + NCCL_INCLUDE]


class Missing(Exception):
    """What this machine lacks."""


def run(*command, **options):
    """Returns the exit code. What is printed here comes first."""
    sys.stdout.flush()
    return subprocess.call([str(word) for word in command], **options)


def output_of(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True)
    need(done.returncode == 0, 'exit code %d of %s' % (done.returncode, ' '.join(command)))
    return done.stdout


def tool(name, package):
    places = [shutil.which(name), CUDA_HOME + '/bin/' + name, os.path.dirname(NVCC.split(' ')[-1]) + '/' + name,
              '/usr/local/cuda/bin/' + name, '/opt/cuda/bin/' + name]
    for folder in sys.path:  # of pip's packages
        places += glob.glob(folder + '/nvidia/*/bin/' + name)
    for place in places + glob.glob('/opt/nvidia/nsight-compute/*/' + name):
        if place and os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    raise Missing('no %s on PATH, under CUDA_HOME or beside nvcc: it is in %s' % (name, package))


def gpus():
    listed = shutil.which('nvidia-smi') and subprocess.run(['nvidia-smi', '-L'], stdout=subprocess.PIPE,
                                                           universal_newlines=True).stdout
    return len(re.findall('^GPU', listed or '', re.M))


def need(something, what):
    if not something:
        raise Missing(what)


def architecture():
    arch = os.environ.get('CUDA_ARCH') or 'native'
    return 'sm_90' if arch == 'native' and not gpus() else arch


def compile_cuda(arch, source, *options):
    need(NVCC, NO_NVCC)
    need(run(*NVCC.split(), '-std=c++17', '-O3', '-arch=' + arch, '-lineinfo', '-I.', source, *options) == 0,
         source + ' does not compile')


def compile_kernels(*more):
    """Returns the cubins of the kernels of both headers and of more sources, for each architecture."""
    cubins = []
    os.makedirs('build/sass', exist_ok=True)
    for arch, name in itertools.product(architecture().split(), HEADERS[1:] + list(more)):
        unit = 'build/sass/' + os.path.basename(name).split('.')[0]
        cubin = unit + ('_' + arch if ' ' in architecture() else '') + '.cubin'
        with open(unit + '.cu', 'w') as source:
            source.write('#define KVPRIM_IMPLEMENTATION\n#include "%s"\n' % name)
        print(name, 'for', arch)
        compile_cuda(arch, unit + '.cu', '-cubin', '-o', cubin, *NCCL_HEADERS)
        cubins.append(cubin)
    if not NCCL_INCLUDE:
        print('without kvprim_nccl.h: no nccl.h under NCCL_HOME or in the usual places')
    return cubins


def short_names(kernels):
    """Returns what to call each, by its mangled name: kvpn_kernel<kvpn_one_shot, kvpn_bf16, 8, true>."""
    names, kernels = {}, list(kernels)
    filt = shutil.which('cu++filt') or shutil.which('c++filt')
    clear = output_of(filt, *kernels).splitlines() if filt and kernels else kernels
    for kernel, name in zip(kernels, clear):
        name = re.sub(r'(?<=\d)u(l|ll)?\b', '', re.sub('^void ', '', name))
        names[kernel] = re.sub(r'\([^()]*\)$', '', name).replace('unsigned long', 'u64').replace('unsigned int', 'u32')
    return names


# ---- sass ----

# The operation whose main path a kernel is, for data in whole 16-byte words.
MAIN_PATHS = [(r'kvpc_gather_kernelI(Lj\d+E)+L8kvpc_fit[0134]E', 'gather'),
              (r'kvpc_store_kernelI(Lj\d+E)+L8kvpc_fit[0134]E', 'store'),
              (r'kvpc_(move(_few)?|lines)_kernel', 'transfer'),
              (r'kvpc_unpack_kernelI[^E]*ELb1E', 'unpack'),
              (r'kvpn_kernelI13kvpn_(one|two)_shot[^E]*ELb1E', 'all_reduce'),
              (r'kvpn_kernelI12kvpn_scatter[^E]*ELb1E', 'scatter'),
              (r'kvpn_kernelI16kvpn_gather_many[^E]*ELb1E', 'gather_many')]
# The benchmark's opponents. Nothing but their order of loads and stores is checked, and that nothing spills.
OPPONENTS = [(r'mini_gather_kernelI', 'mini gather'),
             (r'mini_store_kernelI', 'mini store'),
             (r'sglang_store_kernelI', 'SGLang')]
# More loads need not precede the first store. The 64 of K and V of 16,384 bytes in one warp, 16 bytes each, do not fit
# into a thread's 255 registers; ptxas begins with 28 to 33.
LOADS_AT_ONCE = 28
# Kernels that wait for the kernel before them, whatever their parameters say, and those whose parameters say whether.
WAITS = r'kvpc_(gather|store)_kernelI\w*kvpc_dependence[12]EEv|kvpn_kernelI'
MAY_WAIT = r'kvpc_(bytes|lines|listed\w*|move|move_few|move_bytes|move_pieces|meta|slots|unpack|unpack_one)_kernel'
NEVER_WAITS = r'kvpc_(gather|store)_kernelI\w*kvpc_dependence0EEv'
LEAST_WAITING = 50  # kernels of kvprim_cuda.cuh of the first two kinds; it has 60
GLOBAL = r'(LDG|STG|LD|ST|ATOMG?|REDG?|LDGSTS|CCTL)(\.|$)'
# Narrow stores of a collective's main path: which half of its slots is next and, if it waited in vain, why: to the
# host, to its own GPU and, in a loop, to the other ranks.
COLLECTIVE_NARROW_STORES = 4


class Kernel:
    def __init__(self, name, arch, resources):
        self.name, self.arch = name, arch
        self.resources = resources      # REG, STACK ... or nothing
        self.code = []                  # (predicate, instruction)
        self.operands = []              # of each instruction, as text
        self.path = next((path for pattern, path in MAIN_PATHS + OPPONENTS if re.search(pattern, name)), '')

    def count(self, pattern):
        return sum(1 for _, code in self.code if re.match(pattern + r'(\.|$)', code))

    def widths(self, instruction):
        """How many accesses have 128 bits or more, and how many have less."""
        wide = self.count(instruction + r'\.(.*\.)?(128|256)')
        return wide, self.count(instruction) - wide

    def waits_wrongly(self):
        """Says what is wrong with how the kernel waits for the one before it (on sm_90 and newer). No memory may be
        accessed before. Up to the wait, which ptxas calls ACQBULK, a kernel that always waits may only end."""
        always = re.search(WAITS, self.name)
        if self.arch < 90 or not re.search('kvp[cn]_', self.name):
            return ''
        if re.search(NEVER_WAITS, self.name):
            return 'waits without dependent launch' if self.count('ACQBULK') else ''
        if not always and not re.search(MAY_WAIT, self.name):
            return 'whether it has to wait is unknown'
        for predicate, code in self.code:
            if code == 'ACQBULK' and not (always and predicate):
                return ''
            if code == 'ACQBULK' or re.match(GLOBAL, code) or always and re.match(r'(BR|J|CALL|BREAK)', code):
                break
        return 'memory before the wait'

    def stores_early(self):
        """Says whether an opponent stores before it has loaded its part of a row: nothing to store, or LDG STG LDG
        STG, as from a source in which rows may overlap."""
        moves = [code[:3] for _, code in self.code if re.match('(LDG|STG)', code)]
        return 'STG' not in moves or moves.index('STG') < min(moves.count('LDG'), LOADS_AT_ONCE)

    def loads_late(self):
        """Says whether a store loads a part of a row after it first uses its slot, for which it has to wait, or uses
        none. Where a compiler puts the loads there, stores of few rows take 10 to 20 % longer (H200)."""
        slot, used = [], False
        for (_, code), operands in zip(self.code, self.operands):
            first, _, rest = operands.partition(',')
            used = used or any(re.search(r'\b%s\b' % word, rest if 'LDG' in code else operands) for word in slot)
            if re.match(r'LDG\.(.*\.)?128', code):
                if used:
                    return True
            elif code.startswith('LDG'):
                slot.append(first)
        return not used

    def fault(self):
        """Says what is wrong. Narrower loads of a main path are of indices and descriptors, 32 or 64 bits each."""
        if 'REG' not in self.resources:
            return 'registers unknown'
        if self.resources['STACK'] + self.resources['LOCAL'] + self.count('(LDL|STL)'):
            return 'local memory'
        if self.count('(LD|ST)'):
            return 'generic accesses'
        if self.waits_wrongly():
            return self.waits_wrongly()
        if 'kvpc_store_kernel' in self.name and self.loads_late():
            return 'loads rows after its slot'
        if not self.path:
            return ''
        if any(self.path == path for _, path in OPPONENTS):
            return 'stores before its loads' if self.stores_early() else ''
        stores, narrow_stores = self.widths('STG')
        if not self.widths('LDG')[0] or not stores:
            return 'no 128-bit accesses'
        if narrow_stores > ('kvpn_kernel' in self.name) * COLLECTIVE_NARROW_STORES:
            return 'narrow stores'
        return 'narrow loads' if self.count(r'LDG\.(.*\.)?[US](8|16)') else ''


def read_sass(lines):
    """Reads `cuobjdump --dump-resource-usage`, then `cuobjdump -sass`."""
    resources, kernels, arch, name = {}, [], 0, ''
    for line in lines:
        of = re.match(r'\s*Function\s+([^\s:]+):', line)
        code_of = re.match(r'\s*Function\s*:\s*(\S+)', line)
        code = re.match(r'\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?PT?\d*)\s+)?([A-Z][\w.]*)\s*([^;]*)', line)
        for_arch = re.match(r'\s*code for sm_(\d+)', line)
        if of:
            name = of.group(1)
        elif re.match(r'\s*REG:', line):
            resources[name] = {key: int(value) for key, value in re.findall(r'(\w+):(\d+)', line)}
        elif for_arch:
            arch = int(for_arch.group(1))
        elif code_of:
            kernels.append(Kernel(code_of.group(1), arch, resources.get(code_of.group(1), {})))
        elif code and kernels:
            kernels[-1].code.append(code.groups()[:2])
            kernels[-1].operands.append(code.group(3))
    return kernels


def judge_sass(kernels):
    """Prints a line for each kernel. Returns the number of faults."""
    form, names, faults = '%4s %5s %6s  %5s %5s %5s %5s  %-11s', short_names(k.name for k in kernels), 0
    print('%18s %-11s %-11s\n' % ('', 'loads', 'stores') +
          form % ('regs', 'stack', 'spills', '128', 'less', '128', 'less', 'main path'))
    for k in kernels:
        fault = k.fault()
        faults += fault != ''
        print(form % (k.resources.get('REG', ''), k.resources.get('STACK', ''), k.count('(LDL|STL)'),
                      *k.widths('LDG'), *k.widths('STG'), k.path or '-'),
              'FAIL' if fault else 'ok  ', names[k.name] + (fault and ': ' + fault))
    found = {k.path for k in kernels}
    expected = [path for pattern, path in MAIN_PATHS if any(pattern[:5] in k.name for k in kernels)]
    opponents = {path for _, path in OPPONENTS}
    expected += opponents if found & opponents else []
    for path in sorted(set(expected) - found):
        print('FAIL no kernel is the main path of', path)
        faults += 1
    print('%d kernels, %d of them main paths: %d FAIL' % (len(kernels), sum(k.path != '' for k in kernels), faults))
    return faults or not kernels


def read_ptx(text):
    """Returns kernels with no instructions except waits, accesses that may be of global memory, and branches, by their
    names in SASS. A branch to the end is one there, too."""
    kernels = []
    for name, body in re.findall(r'^(?:\.\w+ )*\.entry (\w+)\((.*?)^\}', text, re.M | re.S):
        kernels.append(Kernel(name, 90, {}))
        ends = re.findall(r'^(\$\w+):\s*ret;', body, re.M)
        for predicate, wait, branch, to in re.findall(
                r'(?:@(!?%\w+)\s+)?(?<![\w.%$])(?:(griddepcontrol\.wait)|(bra|brx|call)\b[.\w]*\s*([$\w]*)|'
                r'(?:ld|st|red|atom|prefetch)\.(?!param|shared)|(?:cp|multimem)\.)', body):
            code = 'ACQBULK' if wait else 'LDG' if not branch else 'EXIT' if to in ends else 'BRA'
            kernels[-1].code.append((predicate, code))
    return kernels


def ptx(files):
    faults = 0
    for name in files:
        kernels = read_ptx(open(name).read())
        waiting = sum(1 for k in kernels if re.search(WAITS + '|' + MAY_WAIT, k.name))
        print('%s: %d kernels, %d of them wait' % (name, len(kernels), waiting))
        wrong = ['%s: %s' % (k.name, k.waits_wrongly()) for k in kernels if k.waits_wrongly()]
        if waiting < LEAST_WAITING:
            wrong.append('fewer than %d kernels wait' % LEAST_WAITING)
        print(''.join('FAIL %s\n' % fault for fault in wrong), end='')
        faults += len(wrong)
    return faults != 0 or not files


def sass(cubins):
    """Dumps each cubin, and leaves the dump beside it."""
    cuobjdump = tool('cuobjdump', "the toolkit's package cuda-cuobjdump-X-Y, or pip's nvidia-cuda-cuobjdump")
    faults = 0
    for cubin in cubins or compile_kernels('tests/profile/opponents.cu'):
        dump = os.path.splitext(cubin)[0] + '.sass'
        print('==', dump)
        text = output_of(cuobjdump, '--dump-resource-usage', cubin) + output_of(cuobjdump, '-sass', cubin)
        with open(dump, 'w') as kept:
            kept.write(text)
        faults += judge_sass(read_sass(text.splitlines()))
    return faults != 0


# ---- cfg ----

def loops_of(edges, entry):
    """Searches depth first. An edge to a block that is still being searched is a back edge; it ends at the head of a
    loop. Returns the number of both."""
    back, heads, done, trail = 0, set(), set(), [(entry, iter(edges[entry]))]
    while trail:
        block, rest = trail[-1]
        searched = [b for b, _ in trail]
        for to in rest:
            if to in searched:
                back += 1
                heads.add(to)
            elif to not in done:
                trail.append((to, iter(edges[to])))
                break
        else:
            done.add(block)
            trail.pop()
    return back, len(heads)


def draw(graphs, folder):
    """Reads `nvdisasm -bbcfg`, writes a .dot file for each kernel and prints a line. Returns how many there were."""
    print('basic       back\nblocks edges  edges loops  graph')
    kernels = re.findall(r'^subgraph "cluster_(.*?)"[^\n]*\n(.*?^\})', graphs, re.M | re.S)
    names = short_names(name for name, _ in kernels)
    for name, body in kernels:
        blocks = re.findall(r'^("[^"]*")$', body, re.M)
        arrows = re.findall(r'^("[^"]*").* -> ("[^"]*")', body, re.M)
        edges = collections.defaultdict(list)
        for one, to in arrows:
            edges[one].append(to)
        dot = folder + '/' + re.sub(r'[^A-Za-z0-9_]+', '_', names[name].replace('>', '')) + '.dot'
        with open(dot, 'w') as graph:
            graph.write('digraph kernel {\n' + body + '\n')
        print('%5d %5d %10d %5d  %s' % (len(blocks), len(arrows), *loops_of(edges, blocks[0]), dot))
    print(len(kernels), 'kernels')
    return len(kernels)


def cfg(cubins):
    nvdisasm = tool('nvdisasm', "the toolkit's package cuda-nvdisasm-X-Y, or pip's nvidia-cuda-nvdisasm")
    cubins, code = cubins or compile_kernels(), 0
    shutil.rmtree('build/cfg', ignore_errors=True)
    os.makedirs('build/cfg')
    for cubin in cubins:
        print('==', cubin)
        code |= draw(output_of(nvdisasm, '-bbcfg', cubin), 'build/cfg') == 0
    if not shutil.which('dot'):
        print('no pictures: no dot, which is in the package graphviz')
        return code
    for graph in sorted(glob.glob('build/cfg/*.dot')):
        if run('timeout', 60, 'dot', '-Tsvg', graph, '-o', graph[:-3] + 'svg'):
            print('no picture of', graph)
    return code


# ---- counters ----

FIGURES = [('time, us', 'gpu__time_duration.sum', 1e6),
           ('DRAM, GB/s', 'dram__bytes.sum.per_second', 1e-9),
           ('DRAM, % of peak', 'dram__throughput.avg.pct_of_peak_sustained_elapsed', 1),
           ("stall's share, %", '', 0),
           ('long scoreboard, %', '', 0),
           ('occupancy, %', 'sm__warps_active.avg.pct_of_peak_sustained_active', 1),
           ('of at most, %', 'sm__maximum_warps_per_active_cycle_pct', 1),
           ('registers', 'launch__registers_per_thread', 1),
           ('local accesses', 'smsp__inst_executed_op_local_ld.sum', 1),
           ('local accesses', 'smsp__inst_executed_op_local_st.sum', 1)]
STALL = 'smsp__average_warps_issue_stalled_%s_per_issue_active.ratio'
STALLS = '''barrier branch_resolve dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle
    membar mio_throttle misc no_instruction not_selected short_scoreboard sleeping tex_throttle wait
    warpgroup_arrive'''.split()
Plan = collections.namedtuple('Plan', 'operation kernel bytes kind')


class Launch:
    """One kernel, as ncu counted it."""

    def __init__(self, plan, kernel, counters):
        self.plan, self.kernel = plan, kernel
        self.name = plan.operation if plan else kernel
        self.figures = {}
        for label, metric, factor in FIGURES:
            if metric in counters:
                self.figures[label] = self.figures.get(label, 0) + counters[metric] * factor
        stalls = {stall: counters[STALL % stall] for stall in STALLS if STALL % stall in counters}
        self.stall = max(stalls, key=stalls.get) if sum(stalls.values()) else ''
        if self.stall:
            for label, stall in ("stall's share, %", self.stall), ('long scoreboard, %', 'long_scoreboard'):
                self.figures[label] = 100 * stalls.get(stall, 0) / sum(stalls.values())

    def shown(self, label, form='%.0f'):
        return form % self.figures[label] if label in self.figures else '-'

    def moved(self):
        """GB/s of all bytes that the kernel is asked to move, read and written."""
        us = self.figures.get('time, us', 0)
        return self.plan.bytes / us * 1e-3 if self.plan and us else 0


def scale(unit):
    """Converts to seconds and bytes."""
    prefix = re.match('([numkKMGT])(s|second|byte)', unit)
    return {'n': 1e-9, 'u': 1e-6, 'm': 1e-3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'T': 1e12}[
        prefix.group(1).replace('k', 'K')] if prefix else 1


def read_counters(lines):
    """Reads tables: the plan that build/ncu/profile prints, then ncu's raw page as CSV. Several may follow each other.
    A plan's line is `# operation|kernel|bytes moved|kind`, in the order in which kernels run. ncu's first row names the
    columns, the second their units; then each kernel has a row."""
    lines = [line for line in lines if not line.startswith('# SPDX')]
    plan = [Plan(name, kernel, int(size), kind) for name, kernel, size, kind in
            (line[2:].strip().split('|') for line in lines if line.startswith('# '))]
    launches, columns, units = [], [], []
    for row in csv.reader(line for line in lines if line.startswith('"')):
        if row[0] == 'ID':
            columns = row
        elif row[0] == '':
            units = [scale(unit) for unit in row]
        else:
            counters = {column: float(text.replace(',', '')) * unit for column, text, unit in zip(columns, row, units)
                        if re.match(r'[-+]?[0-9][0-9,]*([.][0-9]*)?([eE][-+]?[0-9]+)?$', text)}
            kernel = re.sub(r'^void |[<(].*', '', row[columns.index('Kernel Name')])
            launches.append(Launch(plan[len(launches)] if len(launches) < len(plan) else None, kernel, counters))
    return plan, launches


def print_table(launches):
    form = '%-36s %8s %6s %6s %6s  %-15s %4s %5s %5s %5s %5s'
    print(form % ('', '', 'moved', 'DRAM', 'of', 'dominating', '', 'occu-', 'of at', '', 'local'))
    print(form % ('operation', 'us', 'GB/s', 'GB/s', 'peak', 'stall', '', 'pancy', 'most', 'regs', 'ld+st'))
    for r in launches:
        print(form % (r.name, r.shown('time, us', '%.2f'), '%.0f' % r.moved() if r.moved() else '-',
                      r.shown('DRAM, GB/s'), r.shown('DRAM, % of peak', '%.1f%%'), r.stall or '-',
                      r.shown("stall's share, %", '%.0f%%'), r.shown('occupancy, %', '%.0f%%'),
                      r.shown('of at most, %', '%.0f%%'), r.shown('registers'), r.shown('local accesses')))
    print()


def judge_counters(lines):
    """Prints the table, and a checklist: what it asks for, and where that is not so. Returns the number of faults."""
    plan, launches = read_counters(lines)
    print_table(launches)
    large = [r for r in launches if r.plan and r.plan.kind == 'large']
    copy = next((r.moved() for r in launches if r.plan and r.plan.kind == 'copy'), 0)
    none = [] if large else ['no large operation']
    nothing = Plan('nothing', 'nothing', 0, '')
    others = [(r.kernel if r else 'nothing', p or nothing) for p, r in itertools.zip_longest(plan, launches)]
    checks = [('phases: each operation is its one kernel, %d in this order' % len(plan),
               ['%s for %s' % (kernel, p.operation) for kernel, p in others if kernel != p.kernel]
               if plan else ['no plan']),
              ("bandwidth: large ones move at least 0.80 of the copy kernel's %.0f GB/s" % copy,
               none + ['%s %.2f' % (r.name, copy and r.moved() / copy) for r in large
                       if not copy or r.moved() < 0.8 * copy]),
              ('stalls: large ones wait for loads from memory most (long scoreboard)',
               none + ['%s %s' % (r.name, r.stall or '-') for r in large if r.stall != 'long_scoreboard']),
              ('spills: no kernel reads or writes local memory',
               [r.name + ' ' + r.shown('local accesses') for r in launches if r.figures.get('local accesses') != 0]),
              ('occupancy: large ones reach at least 0.60 of what registers and blocks allow',
               none + ['%s %s of %s' % (r.name, r.shown('occupancy, %'), r.shown('of at most, %')) for r in large
                       if r.figures.get('occupancy, %', 0) < 0.6 * r.figures.get('of at most, %', 1e9)])]
    for asked, wrong in checks:
        print('%-4s %s' % ('NOT' if wrong else 'ok', asked) + (wrong and ': ' + ', '.join(wrong) or ''))
    return sum(1 for _, wrong in checks if wrong)


def by_name(launches):
    """Returns launches by operation, or by kernel and number."""
    return {r.name if r.plan else '%s %d' % (r.kernel, n): r for n, r in enumerate(launches, 1)}


def print_changes(name, a, b):
    for label in collections.OrderedDict.fromkeys(label for label, _, _ in FIGURES):
        before, after = a.figures.get(label), b.figures.get(label)
        if before is None and after is None:
            continue
        change = '' if before == after else '-'
        if before and after is not None:
            change = '%+.1f%%' % (100 * (after - before) / before)
        print('%-36s %-20s %12s %12s %9s' % (name, label, a.shown(label, '%.2f'), b.shown(label, '%.2f'), change))
        name = ''
    if a.stall != b.stall:
        print('%-36s %-20s %s, then %s' % ('', 'dominating stall', a.stall, b.stall))


def print_comparison(a_lines, b_lines):
    a, b = by_name(read_counters(a_lines)[1]), by_name(read_counters(b_lines)[1])
    if not a or not b:
        print('no kernel in', 'B' if a else 'A')
        return 1
    print('%-36s %-20s %12s %12s %9s' % ('', '', 'A', 'B', 'change'))
    for name in list(a) + [name for name in b if name not in a]:
        if name in a and name in b:
            print_changes(name, a[name], b[name])
        else:
            print('%-36s in %s only' % (name, 'A' if name in a else 'B'))
    return 0


def find_ncu():
    os.makedirs('build/ncu', exist_ok=True)
    return tool('ncu', "Nsight Compute, the toolkit's package cuda-nsight-compute-X-Y")


def as_csv(ncu, report, table):
    """Writes the report's counters; says whether there are any."""
    with open(table, 'w') as to:
        return run(ncu, '--import', report, '--csv', '--page', 'raw', '--print-units', 'base', stdout=to) == 0 and \
            os.path.getsize(table) > 0


def compare(inputs):
    tables = []
    for n, given in enumerate(inputs):
        need(os.access(given, os.R_OK), "cannot read '%s': make ncu-compare A=before.csv B=after.csv" % given)
        tables.append(given)
        if given.endswith('.ncu-rep'):
            tables[n] = 'build/ncu/compare_%d.csv' % (n + 1)
            need(as_csv(find_ncu(), given, tables[n]), 'ncu finds no counters in ' + given)
    need(len(tables) == 2, 'usage: make ncu-compare A=before.csv B=after.csv')
    return print_comparison(*(open(table).read().splitlines() for table in tables))


# ---- on a GPU ----

def recorded(name, headers, action):
    """Prints the headers' checksums and what the action prints, and keeps both in build/results/NAME, or under another
    name if the action fails."""
    os.makedirs('build/results', exist_ok=True)
    tee = subprocess.Popen(['tee', 'build/results/' + name], stdin=subprocess.PIPE)
    outputs = [os.dup(1), os.dup(2)]
    for fd in 1, 2:
        os.dup2(tee.stdin.fileno(), fd)
    for header in headers:
        with open(header, 'rb') as text:
            print('%s  %s' % (hashlib.sha256(text.read()).hexdigest(), header))
    failed = True
    try:
        failed = action()
        return failed
    finally:
        sys.stdout.flush()
        for fd, output in enumerate(outputs, 1):
            os.dup2(output, fd)
        tee.stdin.close()
        tee.wait()
        if failed:
            os.replace('build/results/' + name, 'build/results/' + name.replace('.txt', '.failed'))


def build_program():
    """Builds build/ncu/profile. Says whether it has the collectives."""
    options = []
    if gpus() > 1 and NCCL_INCLUDE and NCCL_LIBRARY:
        options = ['-DPROFILE_NCCL', *NCCL_HEADERS, '-lpthread']
        for word in NCCL_LIBRARY, '-rpath', os.path.dirname(NCCL_LIBRARY):
            options += ['-Xlinker', word]
    compile_cuda(architecture(), 'tests/profile/profile.cu', '-o', 'build/ncu/profile', *options)
    return options != []


def chosen_metrics(ncu):
    """Returns those of the counters that this GPU has, according to ncu."""
    known = subprocess.run([ncu, '--query-metrics'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           universal_newlines=True).stdout
    names = set(re.findall(r'^ *(\w+) ', known, re.M))
    wanted = [metric for _, metric, _ in FIGURES if '__' in metric and '.' in metric] + [STALL % s for s in STALLS]
    unknown = [m for m in wanted if m.split('.')[0] not in names] if 'gpu__time_duration' in names else []
    if unknown:
        print('not counted on this GPU:', *unknown)
    return ','.join(m for m in wanted if m not in unknown)


def measure(ncu, name, seconds, metrics, *command):
    """Writes build/ncu/NAME.ncu-rep and .csv, and says whether that went well."""
    report, table, log = ('build/ncu/%s.%s' % (name, kind) for kind in ('ncu-rep', 'csv', 'log'))
    for old in report, table:
        if os.path.exists(old):
            os.remove(old)
    with open(log, 'w') as to:
        code = run('timeout', '-k', 10, seconds, ncu, '--clock-control', 'none', '--profile-from-start', 'off',
                   '--target-processes', 'application-only', '--force-overwrite', '--export', report[:-len('.ncu-rep')],
                   '--section', 'LaunchStats', '--section', 'Occupancy', '--metrics', metrics, *command, stdout=to,
                   stderr=to)
    if code == 0 and as_csv(ncu, report, table):
        return True
    said = open(log).read()
    print(*said.splitlines()[-20:], sep='\n')
    if 'ERR_NVGPUCTRPERM' in said:
        print('only root may read the counters, unless the driver is loaded with NVreg_RestrictProfilingToAdminUsers=0')
    print('ncu made no %s: exit code %d (124: not done after %d s; 142: a rank waited too long)' %
          (table, code, seconds))
    return False


def planned(program, plan, seconds):
    """Runs the program without ncu, and prints what it says. Returns its plan, and its exit code."""
    with open(plan, 'w') as to:
        code = run('timeout', '-k', 10, seconds, *program, stdout=to, stderr=to)
    said = open(plan).read().splitlines(True)
    print(*(line for line in said if not line.startswith('# ')), sep='', end='')
    return ''.join(line for line in said if line.startswith('# ')), code


def append(path, *texts):
    with open(path, 'a') as to:
        to.write(''.join(texts))


def measure_all_reduce(ncu, metrics):
    """Kernels of two GPUs wait for each other, but ncu runs the kernels of a process one by one, and each as often as
    its counters need. So each rank is a process, rank 1 runs without ncu, and both processes are run again in place of
    the kernel. Neither lives long without the other: see tests/profile/profile.cu. Returns what went wrong."""
    os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'  # with more GPUs each start takes longer
    meeting, program, wrong = 'build/ncu/id', 'build/ncu/profile', []
    for old in glob.glob(meeting + '*') + glob.glob('build/ncu/all_reduce.*'):
        os.remove(old)
    log = open('build/ncu/rank1.log', 'w+')
    rank1 = subprocess.Popen(['sh', '-c', 'while "$0" all_reduce 1 "$1"; do :; done', program, meeting],
                             stdout=log, stderr=log)
    try:
        rank0 = [program, 'all_reduce', '0', meeting]
        plan, code = planned(rank0, 'build/ncu/all_reduce.plan', 100)
        if code:
            wrong.append('rank 0, without ncu: exit code %d' % code)
        elif plan and measure(ncu, 'all_reduce', 60, metrics, '--replay-mode', 'application', '--cache-control', 'none',
                              *rank0):
            append('build/ncu.csv', plan, open('build/ncu/all_reduce.csv').read())
        elif plan:
            wrong.append('no counters; what stands above is all that was measured of it')
    finally:  # a word where rank 1 waits for the next id ends it
        append(meeting + '.new', 'end\n')
        os.rename(meeting + '.new', meeting)
        rank1.wait()
        os.remove(meeting)
    log.seek(0)
    said = log.read().splitlines()
    if any(line.startswith('rank 1: ') for line in said):
        wrong.append('wrong sums')
    if wrong:
        print('FAIL all-reduce:', '; '.join(wrong))
        print('the end of what rank 1 says:', *said[-5:], sep='\n')
    return wrong


def count_operations(ncu):
    collectives, table = build_program(), 'build/ncu.csv'
    if os.path.exists(table):
        os.remove(table)
    plan, code = planned(['build/ncu/profile'], 'build/ncu/rows.plan', 100)
    metrics = code == 0 and chosen_metrics(ncu)
    if code or not measure(ncu, 'rows', 300, metrics, 'build/ncu/profile'):
        return 1
    append(table, plan, open('build/ncu/rows.csv').read())
    wrong = []
    if collectives:
        wrong = measure_all_reduce(ncu, metrics)
    else:
        print('without all-reduce: it takes two GPUs and NCCL')
    print()
    return judge_counters(open(table).read().splitlines()) + len(wrong) > 0


def ncu():
    need(gpus(), NO_GPU)
    need(NVCC, NO_NVCC)
    found = find_ncu()
    return recorded('gpu_ncu.txt', HEADERS, lambda: count_operations(found))


def each_sanitizer(sanitizer):
    code = 0
    for check, some in ('memcheck', 'quick'), ('initcheck', 'quick'), ('racecheck', 'brief'), ('synccheck', 'brief'):
        print('== %s, %s' % (check, some))
        ended = run('timeout', '-k', 10, 600, sanitizer, '--tool', check, '--error-exitcode', 1, 'build/test_cuda',
                    some)
        if ended:
            print('FAIL %s: exit code %d' % (check, ended))
            code = 1
    return code


def sanitize():
    need(gpus(), NO_GPU)
    sanitizer = tool('compute-sanitizer', "the toolkit's package cuda-sanitizer-X-Y")
    return recorded('gpu_sanitize.txt', HEADERS[:2], lambda: each_sanitizer(sanitizer))  # it tests only these


def main(job='', *inputs):
    jobs = {'sass': sass, 'ptx': ptx, 'cfg': cfg, 'compare': compare, 'ncu': lambda _: ncu(),
            'sanitize': lambda _: sanitize()}
    if job not in jobs:
        print(__doc__.split('\n\n')[0], file=sys.stderr)
        return 2
    os.environ.setdefault('NCCL_NVLS_ENABLE', '0')  # NVLink multicast stays off unless the caller says otherwise
    try:
        return int(jobs[job](inputs))
    except Missing as missing:
        sys.stdout.flush()
        print(missing, file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))

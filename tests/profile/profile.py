# SPDX-License-Identifier: MIT
"""usage: python3 tests/profile/profile.py sass|cfg [CUBIN...]   from the top folder; `make sass` and so on call it
       python3 tests/profile/profile.py nvdisasm KERNEL [CUBIN...]
       python3 tests/profile/profile.py ptx PTX...
       python3 tests/profile/profile.py ncu|sanitize|sanitize-collectives
       python3 tests/profile/profile.py source KERNEL
       python3 tests/profile/profile.py nsys [PROGRAM [ARGUMENT...]]
       python3 tests/profile/profile.py compare A B            two copies of build/ncu.csv, or two of ncu's reports

    sass      prints registers, stack and widths of memory accesses of every kernel; checks main paths for 128 bits,
              that kernels wait for the one before them, that stores load rows before they wait for a slot, and that
              the benchmark's opponents load rows before they store
    ptx       checks only that they wait, in what nvcc -ptx wrote of kvprim_cuda.cuh for sm_90 or newer
    cfg       draws control-flow graphs of the kernels: build/cfg/*.dot, and .svg if there is Graphviz
    nvdisasm  lists the kernels whose name matches KERNEL in build/nvdisasm/: code after its lines of source, live
              registers, control flow
    ncu       prints counters of one launch of each operation, as tables and a checklist; needs a GPU
    source    prints the lines at which the warps of a kernel wait; needs a GPU
    nsys      records a program's timeline, and prints where its time went; without PROGRAM only says whether it can
    sanitize  runs compute-sanitizer's four tools on some cases of every kernel, build/test_cuda; needs a GPU
    sanitize-collectives   the same for build/test_nccl_gpu_one, whose ranks share a GPU

CUDA_HOME, NVCC, CUDA_ARCH, NCCL_INCLUDE and NCCL_LIBRARY (a file) say what to build with, as the Makefile found it.
Searches for NVIDIA's tools on PATH, beside nvcc, and where their packages put them. Exits with 1 if something is not as
it should be, or a tool is missing.
"""
import collections
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import time

sys.dont_write_bytecode = True  # tests/ is not the place for it
import counters  # noqa: E402: of this folder
import listing  # noqa: E402

NVCC, CUDA_HOME, NCCL_INCLUDE, NCCL_LIBRARY = (
    os.environ.get(name, '') for name in ('NVCC', 'CUDA_HOME', 'NCCL_INCLUDE', 'NCCL_LIBRARY'))
NO_GPU = 'no GPU here (nvidia-smi lists none)'
NVDISASM = "the toolkit's package cuda-nvdisasm-X-Y, or pip's nvidia-cuda-nvdisasm"
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


def lines_of(path):
    """Bytes that are no UTF-8 are kept out of the way, for the reader to say what the file is not."""
    with open(path, errors='replace') as file:
        return file.read().splitlines()


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
MAIN_PATHS = [(r'kvpc_gather_kernelI(Lj\d+E)+L8kvpc_fit[013]E', 'gather'),
              (r'kvpc_store_kernelI(L[jb]\d+E)+L8kvpc_fit[013]E', 'store'),
              (r'kvpc_(move(_few)?_kernelILb1E|lines_kernel)', 'transfer'),
              (r'kvpc_unpack_kernelI[^E]*ELb1E', 'unpack'),
              (r'kvpn_kernelI13kvpn_(one_shot|two_shot|pipeline)\d+kvpn_b?f\d', 'all_reduce'),
              (r'kvpn_kernelI12kvpn_scatter\d+kvpn_b?f\d', 'scatter'),
              (r'kvpn_parts_kernelI17kvpn_parts_groupsILi\d+ELb[01]ELb1E', 'parts')]
# The benchmark's opponents. Nothing but their order of loads and stores is checked, and that nothing spills.
OPPONENTS = [(r'mini_gather_kernelI', 'mini gather'),
             (r'mini_store_kernelI', 'mini store'),
             (r'sglang_store_kernelI', 'SGLang'),
             (r'vllm_quant_store_kernelI', 'vLLM quant'),
             (r'sglang_quant_kernelI', 'SGLang quant'),
             (r'vllm_gather_(page|token)_kernelI', 'vLLM gather')]
# More loads need not precede the first store. The 64 of K and V of 16,384 bytes in one warp, 16 bytes each, do not fit
# into a thread's 255 registers; ptxas begins with 28 to 33.
LOADS_AT_ONCE = 28
# Kernels that wait for the kernel before them, whatever their parameters say, and those whose parameters say whether.
WAITS = r'kvpc_gather_kernelI|kvpc_store_kernelI\w*Lb1E|kvpn_((parts|norm|few)_)?kernelI'
MAY_WAIT = r'kvpc_(bytes|convert\w*|fetch|fetch_reset|lines|move\w*|meta|slots|unpack|unpack_one)_kernel'
NEVER_WAITS = r'kvpc_store_kernelI\w*Lb0E'
LEAST_WAITING = 40  # kernels of kvprim_cuda.cuh of these kinds, whatever a switch leaves out
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

    def generic(self):
        """How many accesses may be to any memory. ptxas makes those of st.shared::cluster of what reaches local and
        global memory, too: the upper half of their address comes from SR_SWINHI, where shared memory lies."""
        count, shared = 0, set()  # registers that hold that half
        for (_, code), operands in zip(self.code, self.operands):
            if re.match(r'(LD|ST)(\.|$)', code):
                at = re.search(r'\[R(\d+)', operands)
                count += not at or 'R%d' % (int(at.group(1)) + 1) not in shared
                continue
            first, _, rest = re.sub(r'\.reuse\b', '', operands).strip().partition(', ')
            if rest == 'SR_SWINHI' or code == 'MOV' and rest in shared:
                shared.add(first)
            elif re.match(r'R\d+$', first):
                wide = 4 if '.128' in code else 2 if re.search(r'WIDE|64', code) else 1
                shared -= {'R%d' % (int(first[1:]) + i) for i in range(wide)}
        return count

    def fault(self):
        """Says what is wrong. Narrower loads of a main path are of indices and descriptors, 32 or 64 bits each."""
        if 'REG' not in self.resources:
            return 'registers unknown'
        if self.resources['STACK'] + self.resources['LOCAL'] + self.count('(LDL|STL)'):
            return 'local memory'
        if self.generic():
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
        if narrow_stores > (self.path == 'parts' or 'kvpn_kernel' in self.name) * COLLECTIVE_NARROW_STORES:
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


def judge_sass(units):
    """Takes kernels by the name of their dump. Prints a line for each, those with a fault last, where they are seen,
    and the sums. Returns the number of faults."""
    form = '%4s %5s %6s  %5s %5s %5s %5s  %-12s'
    names = short_names(k.name for kernels in units.values() for k in kernels)
    print('%18s %-11s %-11s\n' % ('', 'loads', 'stores') +
          form % ('regs', 'stack', 'spills', '128', 'less', '128', 'less', 'main path'))
    faults, sums = [], []
    for unit, kernels in units.items():
        before = len(faults)
        for k in kernels:
            fault, line = k.fault(), form % (
                k.resources.get('REG', ''), k.resources.get('STACK', ''), k.count('(LDL|STL)'), *k.widths('LDG'),
                *k.widths('STG'), k.path or '-')
            if fault:
                faults.append('%s FAIL %s: %s' % (line, names[k.name], fault))
            else:
                print(line, 'ok  ', names[k.name])
        found = {k.path for k in kernels}
        expected = [path for pattern, path in MAIN_PATHS if any(pattern[:5] in k.name for k in kernels)]
        opponents = {path for _, path in OPPONENTS}
        expected += opponents if found & opponents else []
        faults += ['FAIL no kernel is the main path of ' + path for path in sorted(set(expected) - found)]
        faults += [] if kernels else ['FAIL no kernels']
        sums.append('%s: %d kernels, %d of them main paths: %d FAIL' % (
            unit, len(kernels), sum(k.path != '' for k in kernels), len(faults) - before))
    print(*faults, *sums, sep='\n')
    return len(faults)


def read_ptx(text):
    """Returns kernels with no instructions except waits, accesses that may be of global memory, and branches, by their
    names in SASS. A branch to the end is one there, too; one past a trigger before the wait is not."""
    kernels = []
    for name, body in re.findall(r'^(?:\.\w+ )*\.entry (\w+)\((.*?)^\}', text, re.M | re.S):
        kernels.append(Kernel(name, 90, {}))
        ends = re.findall(r'^(\$\w+):\s*ret;', body, re.M)
        waits_at = body.find('griddepcontrol.wait')
        for found in re.finditer(
                r'(?:@(!?%\w+)\s+)?(?<![\w.%$])(?:(griddepcontrol\.wait)|(bra|brx|call)\b[.\w]*\s*([$\w]*)|'
                r'(?:ld|st|red|atom|prefetch)\.(?!param|shared)|(?:cp|multimem)\.)', body):
            predicate, wait, branch, to = found.groups(default='')
            if branch == 'bra' and found.end() < body.find('\n%s:' % to, found.end()) < waits_at:
                continue
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
    units = {}
    for cubin in cubins or compile_kernels('tests/profile/opponents.cu'):
        dump = os.path.splitext(cubin)[0] + '.sass'
        text = output_of(cuobjdump, '--dump-resource-usage', cubin) + output_of(cuobjdump, '-sass', cubin)
        with open(dump, 'w') as kept:
            kept.write(text)
        units[dump] = read_sass(text.splitlines())
    return judge_sass(units) != 0


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


def draw(graphs, folder, wanted=None):
    """Reads `nvdisasm -bbcfg`, writes a .dot file for each kernel that is wanted and prints a line. Returns how many
    there were."""
    print('basic       back\nblocks edges  edges loops  graph')
    kernels = [(name, body) for name, body in
               re.findall(r'^subgraph "cluster_(.*?)"[^\n]*\n(.*?^\})', graphs, re.M | re.S)
               if wanted is None or name in wanted]
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
    nvdisasm = tool('nvdisasm', NVDISASM)
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


# ---- nvdisasm ----

def wanted_kernels(pattern, names):
    """Returns those whose name, mangled or short, matches the pattern."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise Missing('KERNEL=%s is no regular expression: %s' % (pattern, error))
    return [kernel for kernel in names if wanted.search(kernel) or wanted.search(names[kernel])]


def list_kernel(kernel, name, texts, sources):
    """Writes the kernel's listings and prints a line about it."""
    base = 'build/nvdisasm/' + re.sub(r'[^A-Za-z0-9_]+', '_', name.replace('>', ''))
    lines, instructions, most, where = listing.interleaved(texts['lines'][kernel], texts['count'][kernel], sources)
    with open(base + '.txt', 'w') as file:
        file.write('%s\n address live  instruction, after its line of source (innermost; "in": inlined there)\n%s\n' %
                   (name, '\n'.join(lines)))
    with open(base + '.life.txt', 'w') as file:
        file.write('\n'.join(line.rstrip() for line in texts['life'][kernel]) + '\n')
    print('%6d %9d  %-14s %s.txt' % (instructions, most, ' '.join(where[:2]) + (' ...' if where[2:] else ''), base))


def disassemble(inputs):
    """Lists kernels: code after its lines of source, with the number of registers in use; their life ranges; and their
    control flow, as `cfg` does."""
    nvdisasm = tool('nvdisasm', NVDISASM)
    pattern = inputs[0] if inputs else ''
    need(pattern, "usage: make nvdisasm KERNEL='a part of its name, or a regular expression'")
    cubins, found, sources = inputs[1:] or compile_kernels(), 0, listing.Sources()
    shutil.rmtree('build/nvdisasm', ignore_errors=True)
    os.makedirs('build/nvdisasm')
    for cubin in cubins:
        texts = {'lines': listing.sections_of(output_of(nvdisasm, '-c', '-gi', cubin))}
        names = short_names(texts['lines'])
        kernels = wanted_kernels(pattern, names)
        if not kernels:
            continue
        texts['count'] = listing.sections_of(output_of(nvdisasm, '-c', '-lrm', 'count', cubin))
        texts['life'] = listing.sections_of(output_of(nvdisasm, '-c', '-lrm', 'narrow', cubin))
        print('instruc-  most in\n  tions registers  at             listing')
        for kernel in sorted(kernels):
            list_kernel(kernel, names[kernel], texts, sources)
        draw(output_of(nvdisasm, '-bbcfg', '-poff', cubin), 'build/nvdisasm', kernels)
        found += len(kernels)
    need(found, 'no kernel matches KERNEL=%s' % pattern)
    return 0


# ---- nsys ----

def find_nsys():
    """Nsight Compute's own copy records, but makes no report."""
    places = [shutil.which('nsys'), CUDA_HOME + '/bin/nsys', '/usr/local/cuda/bin/nsys']
    for place in places + sorted(glob.glob('/opt/nvidia/nsight-systems*/*/bin/nsys'), reverse=True):
        if place and os.access(place, os.X_OK) and subprocess.call(
                [place, '--version'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            return place
    raise Missing('no nsys on PATH, under CUDA_HOME or in /opt/nvidia/nsight-systems: it is in Nsight Systems, package '
                  'nsight-systems-cli or nsight-systems. build/10_trace needs only CUPTI; its answers.py answers '
                  'the same questions')


def nsys(program):
    """Records a program's timeline, and prints where its time went."""
    found = find_nsys()
    need(gpus(), NO_GPU)
    if not program:  # only asks whether it is here
        return 0
    os.makedirs('build/nsys', exist_ok=True)
    report = 'build/nsys/report'
    code = run('timeout', '-k', 10, 300, found, 'profile', '--trace=cuda,nvtx', '--force-overwrite=true',
               '--output=' + report, *program, stdout=sys.stderr)
    need(code == 0, 'nsys, or the program under it, ended with %d' % code)
    rows = 0
    for title, table in (('kernels', 'cuda_gpu_kern_sum'), ('copies and memsets', 'cuda_gpu_mem_time_sum'),
                         ('calls of CUDA, on the host', 'cuda_api_sum'), ('ranges of NVTX', 'nvtx_sum')):
        text = output_of(found, 'stats', '--report', table, '--format', 'csv', '--force-export=true',
                         report + '.nsys-rep')
        rows += listing.print_nsys(title, text.splitlines())
    print('timeline: %s.nsys-rep, for Nsight Systems' % report)
    return rows == 0


# ---- counters ----

def find_ncu():
    os.makedirs('build/ncu', exist_ok=True)
    return tool('ncu', "Nsight Compute, the toolkit's package cuda-nsight-compute-X-Y")


def as_csv(ncu, report, table, *page):
    """Writes a page of the report; says whether there is anything on it."""
    with open(table, 'w') as to:
        return run(ncu, '--import', report, '--csv', *(page or ('--page', 'raw', '--print-units', 'base')),
                   stdout=to) == 0 and os.path.getsize(table) > 0


def compare(inputs):
    tables = []
    for n, given in enumerate(inputs):
        need(os.access(given, os.R_OK), "cannot read '%s': make ncu-compare A=before.csv B=after.csv" % given)
        tables.append(given)
        if given.endswith('.ncu-rep'):
            tables[n] = 'build/ncu/compare_%d.csv' % (n + 1)
            need(as_csv(find_ncu(), given, tables[n]), 'ncu finds no counters in ' + given)
    need(len(tables) == 2, 'usage: make ncu-compare A=before.csv B=after.csv')
    for table in tables:
        try:
            counters.read_counters(lines_of(table))
        except ValueError as error:
            raise Missing('%s: %s' % (table, error))
    return counters.print_comparison(*(lines_of(table) for table in tables))


# ---- on a GPU ----

def build_ranks():
    """Builds build/ncu/ranks: what runs collectives on one GPU, without NCCL but with its header."""
    compile_cuda(architecture(), 'tests/profile/profile.cu', 'tests/nccl/nccl_none.cpp', '-DPROFILE_NCCL',
                 *NCCL_HEADERS, '-lpthread', '-o', 'build/ncu/ranks')


def build_program(with_collectives=True):
    """Builds build/ncu/profile. Says whether it has the collectives."""
    options = []
    if with_collectives and gpus() > 1 and NCCL_INCLUDE and NCCL_LIBRARY:
        options = ['-DPROFILE_NCCL', *NCCL_HEADERS, '-lpthread']
        for word in NCCL_LIBRARY, '-rpath', os.path.dirname(NCCL_LIBRARY):
            options += ['-Xlinker', word]
    compile_cuda(architecture(), 'tests/profile/profile.cu', '-o', 'build/ncu/profile', *options)
    return options != []


def known_metrics(ncu):
    """Returns the base names of this GPU's counters, according to ncu, or nothing if it does not list them."""
    known = subprocess.run([ncu, '--query-metrics'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           universal_newlines=True).stdout
    names = set(re.findall(r'^ *(\w+) ', known, re.M))
    return names if 'gpu__time_duration' in names else set()


def chosen_metrics(known, collective=False):
    """Returns those of the counters that this GPU has."""
    wanted = counters.metrics(collective)
    unknown = [m for m in wanted if m.split('.')[0] not in known] if known else []
    if unknown:
        print('not counted on this GPU:', *unknown)
    return ','.join(m for m in wanted if m not in unknown)


def count_for(metrics):
    """What ncu collects for the tables."""
    return '--section', 'LaunchStats', '--section', 'Occupancy', '--metrics', metrics


def measure(ncu, name, seconds, collect, *command):
    """Writes build/ncu/NAME.ncu-rep, and says whether that went well."""
    report, log = 'build/ncu/%s.ncu-rep' % name, 'build/ncu/%s.log' % name
    if os.path.exists(report):
        os.remove(report)
    with open(log, 'w') as to:
        code = run('timeout', '-k', 10, seconds, ncu, '--clock-control', 'none', '--target-processes',
                   'application-only', '--force-overwrite', '--export', report[:-len('.ncu-rep')],
                   *([] if 'app-range' in collect else ['--profile-from-start', 'off']),  # ranges begin so anyway
                   *collect, *command, stdout=to, stderr=to)
    if code == 0 and os.path.exists(report):
        return True
    said = open(log).read()
    print(*said.splitlines()[-20:], sep='\n')
    if 'ERR_NVGPUCTRPERM' in said:
        print('only root may read the counters, unless the driver is loaded with NVreg_RestrictProfilingToAdminUsers=0')
    print('ncu made no %s: exit code %d (124: not done after %d s; 142: a rank waited too long)' %
          (report, code, seconds))
    return False


def count(ncu, name, seconds, plan, collect, *command):
    """Appends the plan and its counters to build/ncu.csv. Says whether that went well."""
    table = 'build/ncu/%s.csv' % name
    if not measure(ncu, name, seconds, collect, *command):
        return False
    if not as_csv(ncu, 'build/ncu/%s.ncu-rep' % name, table):
        print('ncu finds no counters in build/ncu/%s.ncu-rep' % name)
        return False
    append('build/ncu.csv', plan, open(table).read())
    return True


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
        elif plan and not count(ncu, 'all_reduce', 60, plan, (*count_for(metrics), '--replay-mode', 'application',
                                                              '--cache-control', 'none'), *rank0):
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


def count_shared(ncu, metrics):
    """Collectives of two ranks that share a GPU. Their kernels wait for each other, so ncu counts both as one range,
    and runs the program again for more counters. Such a range has no registers, nor blocks. Says whether it went
    well."""
    build_ranks()
    program = ['build/ncu/ranks', 'ranks']
    plan, code = planned(program, 'build/ncu/ranks.plan', 60)
    return code == 0 and count(ncu, 'ranks', 200, plan, ('--metrics', metrics, '--replay-mode', 'app-range'), *program)


def count_operations(ncu):
    collectives, table = build_program(), 'build/ncu.csv'
    if os.path.exists(table):
        os.remove(table)
    plan, code = planned(['build/ncu/profile'], 'build/ncu/rows.plan', 100)
    known = known_metrics(ncu)
    if code or not count(ncu, 'rows', 300, plan, count_for(chosen_metrics(known)), 'build/ncu/profile'):
        return 1
    wrong = []
    if NCCL_INCLUDE and not count_shared(ncu, chosen_metrics(known, True)):
        wrong.append('collectives on one GPU')
    if collectives:
        wrong += measure_all_reduce(ncu, chosen_metrics(known, True))
    else:
        print('without all-reduce over NVLink: it takes two GPUs and NCCL')
    print()
    return counters.judge_counters(lines_of(table)) + len(wrong) > 0


def source(inputs):
    """Prints the lines of a kernel at which its warps were found most often, in the first launch of it that
    build/ncu/profile makes."""
    need(inputs and inputs[0], "usage: make ncu-source KERNEL='a regular expression for its name, without arguments'")
    need(gpus(), NO_GPU)
    need(NVCC, NO_NVCC)
    ncu, table = find_ncu(), 'build/ncu/source.csv'
    build_program(False)
    if not measure(ncu, 'source', 120, ('--section', 'SourceCounters', '--import-source', 'yes', '--launch-count', '1',
                                        '--kernel-name', 'regex:' + inputs[0]), 'build/ncu/profile'):
        print('build/ncu/profile runs ' + ', '.join(sorted(
            set(re.findall(r'"(\w+_kernel)"', open('tests/profile/profile.cu').read())))))
        return 1
    need(as_csv(ncu, 'build/ncu/source.ncu-rep', table, '--page', 'source', '--print-source', 'cuda,sass'),
         'ncu finds no lines in build/ncu/source.ncu-rep')
    return listing.print_hot(*listing.read_source(lines_of(table)), listing.Sources()) == 0


def ncu():
    need(gpus(), NO_GPU)
    need(NVCC, NO_NVCC)
    return count_operations(find_ncu())


SANITIZERS = 'synccheck', 'racecheck', 'memcheck', 'initcheck'
SANITIZE_SECONDS = 300  # for each


def kernels_in(program, pattern):
    """Returns the names of those kernels in a program that match, or None without cuobjdump."""
    try:
        cuobjdump = tool('cuobjdump', '')
    except Missing:
        return None
    names = re.findall(r'^ *Function (\w+):', output_of(cuobjdump, '--dump-resource-usage', program), re.M)
    return {name for name in names if re.search(pattern, name)}


def judge_sanitizer(check, ended, said, kernels):
    """Prints what a sanitizer said, and whether each kernel ran under it. Returns what went wrong."""
    lines = said.splitlines()
    launched = dict(re.findall(r'^launched (\w+) (\d+)$', said, re.M))
    wrong = ['exit code %d%s' % (ended, ' (124: not done in time)' if ended == 124 else '')] if ended else []
    print(*(line for line in lines if not line.startswith('launched ')), sep='\n')
    if kernels is None:
        print('whether each kernel ran is unknown: no cuobjdump')
    elif not kernels:
        wrong.append('cuobjdump finds none of the kernels in the program')
    elif not launched:
        print('whether each kernel ran is unknown: the program did not get so far, or CUDA is older than 12.3')
    else:
        missing = short_names(kernels - set(launched)).values()
        print('%d of %d kernels ran, %d launches' % (len(kernels) - len(missing), len(kernels),
                                                    sum(map(int, launched.values()))))
        wrong += ['did not run: ' + ', '.join(sorted(missing))] if missing else []
    if not re.search('(ERROR|RACECHECK) SUMMARY: 0 ', said):
        wrong.append('no summary without errors')
    print(''.join('FAIL %s: %s\n' % (check, fault) for fault in wrong), end='', flush=True)
    return wrong


def sanitize_at_once(sanitizer, checks, kernels, command):
    """Runs all of them at once, as the host does most of their work; prints what they say in their order."""
    os.makedirs('build/sanitize', exist_ok=True)
    started, running, wrong = time.time(), [], []
    for check in checks:
        log = open('build/sanitize/%s.log' % check, 'w')
        whole = ['timeout', '-k', '10', str(SANITIZE_SECONDS), sanitizer, '--tool', check, '--error-exitcode', '1',
                 *command]
        running.append((check, log.name, subprocess.Popen(whole, stdout=log, stderr=log)))
    for check, log, process in running:
        ended = process.wait()
        print('== %s, done after %.0f s' % (check, time.time() - started))
        wrong += judge_sanitizer(check, ended, '\n'.join(lines_of(log)), kernels)
    return len(wrong) > 0


def find_sanitizer():
    need(gpus(), NO_GPU)
    return tool('compute-sanitizer', "the toolkit's package cuda-sanitizer-X-Y")


def sanitize():
    program = 'build/test_cuda'
    return sanitize_at_once(find_sanitizer(), SANITIZERS, kernels_in(program, 'kvpc_'), [program, 'sanitize'])


# Tests of test_nccl_gpu that reach every kernel, without graphs.
TWO_AT_A_TIME = 'two communicators'
SANITIZED = ('sums, sizes x', 'inside the buffer', 'gathers of', 'exchanges in chunks', 'deterministic', 'norm: tokens',
             'norm: one ', TWO_AT_A_TIME)


def sanitize_collectives():
    """For tests/nccl/nccl.sh, which builds the program and keeps what is printed. The ranks share a GPU, without NCCL:
    2, 4 and 8 of them have kernels of their own. One tool at a time: beside the others, racecheck stood still (CUDA
    13.0, H200). initcheck waits for a stream at each copy, and holds a lock that other ranks' copies take: for one that
    follows a kernel of another communicator, which waits for these ranks, it would wait for ever."""
    wrong = False
    for check in SANITIZERS:
        tests = [test for test in SANITIZED if check != 'initcheck' or test != TWO_AT_A_TIME]
        wrong |= sanitize_at_once(find_sanitizer(), [check], kernels_in('build/kvprim_nccl_counted.o', 'kvpn_'),
                                  ['build/test_nccl_gpu_one', 'quick', 'on', 'seconds=60', 'ranks=2', 'ranks=4',
                                   'ranks=8', 'only=' + '|'.join(tests)])
    return wrong


def main(job='', *inputs):
    jobs = {'sass': sass, 'ptx': ptx, 'cfg': cfg, 'compare': compare, 'nvdisasm': disassemble, 'nsys': nsys,
            'source': source, 'ncu': lambda _: ncu(), 'sanitize': lambda _: sanitize(),
            'sanitize-collectives': lambda _: sanitize_collectives()}
    if job not in jobs:
        print(__doc__.split('\n\n')[0], file=sys.stderr)
        return 2
    os.environ.setdefault('NCCL_NVLS_ENABLE', '0')  # NVLink multicast stays off unless the caller says otherwise
    try:
        return int(jobs[job](inputs))
    except (Missing, ValueError, OSError) as missing:
        sys.stdout.flush()
        print(missing, file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))

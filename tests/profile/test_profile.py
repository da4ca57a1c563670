# SPDX-License-Identifier: MIT
"""Tests what tests/profile/profile.py makes of the output of NVIDIA's tools: of recorded counters, and made-up code."""
import contextlib
import io
import os
import re
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # before Python's own profile
import counters  # noqa: E402: of this folder
import listing  # noqa: E402
import profile  # noqa: E402
import weight  # noqa: E402

COUNTERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'profile.csv')
passed = failed = 0


def check(name, right, text):
    global passed, failed
    passed, failed = passed + bool(right), failed + (not right)
    print('ok' if right else 'FAIL', name)
    if not right:
        print(text)


def printed(function, *inputs):
    """Returns what the function returns, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        result = function(*inputs)
    return result, text.getvalue()


def altered(pattern, by, where='', count=1):
    """Returns the recorded lines after a substitution in those that contain `where`."""
    lines, done = open(COUNTERS).read().splitlines(), 0
    for i, line in enumerate(lines):
        if where in line and done < count:
            lines[i], n = re.subn(pattern, by, line)
            done += n
    assert done or not pattern, 'nothing to alter'
    return '\n'.join(lines).splitlines()


# What is altered, and the one line of the checklist that is then NOT as it should be.
GATHER, LAST = 'void kvpc_gather', '"0","11"'
JUDGED = [
    ('as it should be', '', altered('', '')),
    ('another kernel', 'phases', altered('kvpc_gather_kernel<', 'kvpc_bytes_kernel<')),
    ('a kernel too few', 'phases', altered('.+', '', LAST)),
    ('a kernel too many', 'phases', altered('.+', r'\g<0>\n\g<0>', LAST)),
    ('slow', 'bandwidth', altered('"55,000.5"', '"65,000"')),
    ('another stall', 'stalls', altered('"10","30"', '"31","30"', GATHER)),
    ('no stall counted', 'stalls', altered('"10","30"', '"n/a","n/a"', GATHER)),
    ('spills', 'spills', altered('"0"$', '"1,024"', LAST)),
    ('spills not counted', 'spills', altered('"0","0"$', '"n/a","n/a"', GATHER)),
    ('few warps', 'occupancy', altered('"80"', '"59"', GATHER)),
]

# What is altered, how many operations are then in one table only, and what the comparison says.
COMPARED = [
    ('half the time', 0, r'gather +time, us +55\.00 +27\.50 +-50\.0%', altered('"55,000.5"', '"27,500.25"')),
    ('the same', 0, r'registers +18\.00 +18\.00 +\+0\.0%', altered('', '')),
    ('another stall', 0, 'long_scoreboard, then lg_throttle', altered('"10","30"', '"31","30"', GATHER)),
    ('only before', 1, 'all-reduce +in A only', altered('', '')[:-4]),
    ('only after', 2, 'all-reduce 2 +in B only', altered('# all-reduce', '# all-reduce 2')),
]

# Tables that are none of ncu's, and what is said of them.
TABLES = [
    ('cut in a row', r'a row of 3 columns in a table of 1\d: the file is cut',
     altered('^("[^"]*",){3}.*', r'"0","9","x"', '"0","9","profile"')),
    ('cut before the units', 'without a row of units', altered('.+', '', '"","",""')),
    ('without headings', 'does not begin with "ID"', altered('.+', '', '"ID"')),
    ('other headings', 'without the column "Kernel Name"', altered('Kernel Name', 'Name', '"ID"')),
    ('of another program', 'does not begin with "ID"', ['"Time (%)","Name"', '"12.0","gather"']),
    ('a short plan', 'a plan has operation', altered(r'\|200000000\|copy$', '', '# copy')),
    ('with a huge field', 'no table of ncu: field larger', ['"ID","%s"' % (200000 * 'x')]),
    ('a plan of words', 'invalid literal', altered('200000000', 'many', '# copy')),
]

# A figure, its range, whether more or less is better, and the verdict.
VERDICTS = [(35, 30, 40, -1, 'in range'), (29.6, 30, 40, -1, 'in range'), (29.4, 30, 40, -1, 'better'),
            (41, 30, 40, -1, 'outside'), (79, 70, 75, 1, 'better'), (60, 70, 75, 1, 'outside'),
            (92, 50, 60, 0, 'outside'), (0, 0, 0, 0, 'in range'), (20, 30, 40, 0, 'outside')]

# Instructions of a collective's main path, and what is wrong with it.
WAIT, WIDE = 'ACQBULK', ['LDG.E.128', 'STG.E.128']
# st.shared::cluster as ptxas writes it: R15 is the upper half of its address.
CLUSTER = ['S2R R17, SR_SWINHI', '@!P1 MOV R15, R17', 'MOV R14, R3', '@!P1 ST.E [R14], R21']
COLLECTIVE = '_Z11kvpn_kernelI%s9kvpn_bf16Li2EEv11kvpn_params'
PARTS = '_Z17kvpn_parts_kernelI17kvpn_parts_groupsILi4ELb0ELb1EEEv17kvpn_parts_params'
COLLECTIVES = [
    ('as it should be', '', [WAIT, 'LDG.E.128.STRONG.SYS', 'STG.E.128'] + 4 * ['STG.E'] + ['LDG.E']),
    ('local memory', 'local memory', [WAIT, *WIDE, 'LDL.LU']),
    ('generic', 'generic accesses', [WAIT, *WIDE, 'LD.E.128']),
    ('a store to shared memory of the cluster', '', [WAIT, *WIDE, *CLUSTER]),
    ('a store to such memory, and to any', 'generic accesses', [WAIT, *WIDE, *CLUSTER, 'ST.E [R8], R21']),
    ('a store after its address has changed', 'generic accesses',
     [WAIT, *WIDE, *CLUSTER[:3], 'LDG.E.64 R14, desc[UR4][R8]', CLUSTER[3]]),
    ('no wide stores', 'no 128-bit accesses', [WAIT, 'LDG.E.128', 'STG.E.64', 'STG.E']),
    ('bytes', 'narrow loads', [WAIT, *WIDE, 'LDG.E.U8']),
    ('many narrow stores', 'narrow stores', [WAIT, *WIDE, 'STG.E', 'STG.E', 'STG.E.64', 'STG.E.U16', 'STG.E']),
    ('no wait', 'memory before the wait', WIDE),
    ('a branch past the wait', 'memory before the wait', ['@P0 BRA', WAIT, *WIDE]),
]

# Kernels of rows: whether one of these codes is a fault. They return early, or wait only if their parameters say so.
STORE = '_Z17kvpc_store_kernelILj1ELj2ELb1EL8kvpc_fit0EEv10kvpc_plain'
TAILS, MOVE = STORE.replace('fit0', 'fit2'), '_Z16kvpc_move_kernelILb1E10kvpc_batchILj1EEEvT0_'
GATHER_ROWS = '_Z18kvpc_gather_kernelILj2EL8kvpc_fit%dEEv10kvpc_plain'
LOAD_K, LOAD_V = 'LDG.E.128 R8, desc[UR4][R12.64]', 'LDG.E.128 R16, desc[UR4][R20.64]'
SLOT, HIGH = 'LDG.E R4, desc[UR4][R4.64]', 'LDG.E R5, desc[UR6][R6.64+0x4]'
USE, USE_HIGH = 'IMAD.IADD R14, R4, 0x1, -R0', '@P0 ISETP.NE.AND P1, PT, R5.reuse, RZ, PT'
TO_K = 'STG.E.128 desc[UR4][R14.64], R8'
ROW = [LOAD_K, SLOT, USE, TO_K]
EARLY, LATE = 'memory before the wait', 'loads rows after its slot'
UNKNOWN = 'whether it has to wait is unknown'
OPPONENT, TURNS = '_Z17mini_store_kernelILi1152ELi2ELb1EEv12store_params', 'stores before its loads'
ROWS = [
    ('store waits', '', STORE, 90, ['PREEXIT', '@P0 EXIT', WAIT, *ROW]),
    ('store does not wait', EARLY, STORE, 90, ['PREEXIT', '@P0 EXIT', *WIDE]),
    ('store waits after a load', EARLY, STORE, 90, ['LDG.E', WAIT, *WIDE]),
    ('store waits after a prefetch', EARLY, STORE, 90, ['CCTL.E.PF2', WAIT, *WIDE]),
    ('store counts before it waits', EARLY, STORE, 90, ['REDG.E.ADD.STRONG.GPU', WAIT, *WIDE]),
    ('store waits only sometimes', EARLY, STORE, 90, ['@!P1 ' + WAIT, *WIDE]),
    ('store branches past the wait', EARLY, STORE, 90, ['@!UP0 BRA.U', WAIT, *WIDE]),
    ('a kernel that no rule knows', UNKNOWN, '_Z9kvpc_swap10kvpc_plain', 90, WIDE),
    ('a kernel of others', '', '_Z9swap_rowsPc', 90, WIDE),
    ('store without dependent launch', '', STORE.replace('Lb1', 'Lb0'), 90, ROW),
    ('store without dependent launch waits', 'waits without dependent launch', STORE.replace('Lb1', 'Lb0'), 90,
     [WAIT, *WIDE]),
    ('store before Hopper', '', STORE, 80, ROW),
    ('gather of tails waits', '', GATHER_ROWS % 2, 90, [WAIT, *WIDE, 'STG.E']),
    ('gather of whole words stores narrowly', 'narrow stores', GATHER_ROWS % 3, 90, [WAIT, *WIDE, 'STG.E']),
    ('store loads K and V, then its slot', '', STORE, 90, [WAIT, LOAD_K, LOAD_V, SLOT, HIGH, USE, USE_HIGH, TO_K]),
    ('store loads V after its slot', '', STORE, 100, [WAIT, LOAD_K, SLOT, HIGH, LOAD_V, USE, USE_HIGH, TO_K]),
    ('store loads V after it uses its slot', LATE, STORE, 80, [LOAD_K, SLOT, USE, LOAD_V, TO_K]),
    ('store of tails loads after it uses its slot', LATE, TAILS, 90, [WAIT, SLOT, USE, LOAD_K, TO_K, 'STG.E R4, R8']),
    ("store loads V after it uses its slot's high word", LATE, STORE, 90,
     [WAIT, LOAD_K, SLOT, HIGH, USE_HIGH, LOAD_V, USE, TO_K]),
    ('store loads V after it stores K', LATE, STORE, 90, [WAIT, LOAD_K, SLOT, USE, TO_K, LOAD_V, TO_K]),
    ('store uses no slot', LATE, STORE, 90, [WAIT, LOAD_K, SLOT, TO_K]),
    ('transfer asks', '', MOVE, 90, ['@P0 EXIT', '@!P0 BRA', WAIT, *WIDE]),
    ('transfer asks on sm_120', '', MOVE, 120, ['@P0 EXIT', '@!UP0 BRA.U', WAIT, *WIDE]),
    ('transfer waits after a load', EARLY, MOVE, 90, ['@P0 BRA', 'LDG.E', WAIT, *WIDE]),
    ('transfer does not wait', EARLY, MOVE, 100, WIDE),
    ('opponent loads, then stores', '', OPPONENT, 90, ['LDG.E', 'LDG.E', 'LDG.E', 'STG.E', 'STG.E']),
    ('opponent loads and stores by turns', TURNS, OPPONENT, 90, ['LDG.E', 'LDG.E', 'STG.E', 'LDG.E', 'STG.E']),
    ('opponent stores before its last load', TURNS, OPPONENT, 80, ['LDG.E', 'LDG.E.128', 'STG.E.128', 'LDG.E.128']),
    ('opponent stores nothing', TURNS, OPPONENT, 90, ['LDG.E', 'LDG.E']),
    ('opponent loads 28 of 65 first', '', OPPONENT, 90, 28 * ['LDG.E.128'] + ['STG.E.128'] + 37 * ['LDG.E.128']),
    ('opponent loads 27 of 65 first', TURNS, OPPONENT, 90, 27 * ['LDG.E.128'] + ['STG.E.128'] + 38 * ['LDG.E.128']),
    ('opponent spills', 'local memory', OPPONENT, 90, ['LDG.E', 'LDG.E', 'STL', 'LDL', 'STG.E']),
]

# The same in PTX. A branch to $L_9 goes to the end.
PTX_WAIT = 'griddepcontrol.wait;'
PTX = [
    ('store waits', '', STORE, PTX_WAIT + ' ld.global.s32 %r1, [%rd1];'),
    ('store ends or waits', '', STORE, '@%p1 bra $L_9; ' + PTX_WAIT + ' ld.global.s32 %r1, [%rd1];'),
    ('store loads, then waits', EARLY, STORE, 'ld.volatile.global.u32 %r1, [%rd1]; ' + PTX_WAIT),
    ('store loads from anywhere, then waits', EARLY, STORE, 'ld.u32 %r1, [%rd1]; ' + PTX_WAIT),
    ('store loads volatile, then waits', EARLY, STORE, 'ld.volatile.u32 %r1, [%rd1]; ' + PTX_WAIT),
    ('store copies, then waits', EARLY, STORE, 'cp.async.ca.shared.global [%r1], [%rd1], 16; ' + PTX_WAIT),
    ('store prefetches, does not wait', EARLY, STORE, 'prefetch.global.L2 [%rd1];'),
    ('store branches past the wait', EARLY, STORE, '@%p1 bra $L_2; ' + PTX_WAIT + ' $L_2: st.u32 [%rd1], %r1;'),
    ('store waits only sometimes', EARLY, STORE, '@!%p1 ' + PTX_WAIT + ' st.global.u32 [%rd1], %r1;'),
    ('transfer asks', '', MOVE, '@%p1 bra $L_2; ' + PTX_WAIT + ' $L_2: st.u32 [%rd1], %r1;'),
    ('transfer adds, then waits', EARLY, MOVE, '@%p1 red.add.u32 [%rd1], 1; ' + PTX_WAIT),
    ('a kernel that no rule knows', UNKNOWN, '_Z9kvpc_swap10kvpc_plain', PTX_WAIT),
]

# As nvdisasm writes it: a loop of two blocks, with a loop of one block inside, and a loop that nothing enters.
EDGES = ['a:b', 'b:c', 'c:c', 'c:b', 'c:d', 'x:x']


def dump_of(kernels, arch, codes):
    yield ' Common:\n'
    for kernel in kernels:
        yield ' Function %s:\n' % kernel
        yield '  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:528\n'
    yield '\tcode for sm_%d\n' % arch
    for kernel in kernels:
        yield '\t\tFunction : %s\n' % kernel
        for n, code in enumerate(codes):
            whole = code if ',' in code else code + ' R2, desc[UR4][R2.64]'
            yield '        /*%04x*/           %s ;   /* 0x0000000402027981 */\n' % (16 * n, whole)
            yield '                                                                 /* 0x000ea2000c1e1b00 */\n'


def judged(*dump):
    return printed(profile.judge_sass, {'a.sass': profile.read_sass(dump_of(*dump))})


def test_sass():
    for name, fault, codes in COLLECTIVES:
        kernels = [COLLECTIVE % way for way in ('13kvpn_one_shot', '12kvpn_scatter')] + [PARTS]
        faults, text = judged(kernels, 90, codes)
        line = r'all_reduce +%s +\S.*kvpn_one_shot.*%s$' % (('FAIL', ': ' + fault) if fault else ('ok', ''))
        check('SASS of a collective: ' + name, bool(faults) == bool(fault) and re.search(line, text, re.M) and
              (fault or ':' not in text.split('kvpn_one_shot')[1].split('\n')[0]), text)
    faults, text = judged([COLLECTIVE % '13kvpn_one_shot'], 90, COLLECTIVES[0][2])
    check('SASS: main paths are missing', faults == 2 and text.count('no kernel is the main path') == 2, text)
    faults, text = judged([OPPONENT], 90, ['LDG.E', 'LDG.E', 'STG.E'])
    check('SASS: opponents are missing', faults == 5 and text.count('no kernel is the main path') == 5, text)
    units = {unit: profile.read_sass(dump_of(40 * [kernel], 90, WIDE)) for unit, kernel in (
        ('a.sass', '_Z9swap_rowsPc'), ('b.sass', MOVE), ('c.sass', '_Z9swap_rowsPc'))}
    faults, text = printed(profile.judge_sass, units)
    last = text.splitlines()[-faults - 3:]
    check('SASS: all failures, then the sums, come last', faults == 43 and all('FAIL' in line for line in last) and
          [line.split(': ')[0] for line in last[-3:]] == list(units) and last[-1].endswith(': 0 FAIL'), text)
    for name, fault, kernel, arch, codes in ROWS:
        found = profile.read_sass(dump_of([kernel], arch, codes))[0].fault()
        check('SASS: ' + name, found == fault, found)


def test_tool():
    """pip puts NVIDIA's tools beside the modules, and not on PATH."""
    with tempfile.TemporaryDirectory() as folder:
        path = folder + '/a folder/nvidia/cu13/bin/made_up_tool'
        os.makedirs(os.path.dirname(path))
        open(path, 'w').close()
        os.chmod(path, 0o755)
        sys.path.append(folder + '/a folder')
        found = profile.tool('made_up_tool', 'no package')
        sys.path.pop()
        check("a tool of pip's, Python", found == path, found)
        shell = subprocess.run(['sh', '-c', '. tests/gpu/environment.sh && tool made_up_tool "no package"'],
                               stdout=subprocess.PIPE, universal_newlines=True,
                               env=dict(os.environ, PYTHONPATH=folder + '/a folder'))
        check("a tool of pip's, sh", shell.stdout == path + '\n', shell.stdout)


def test_ptx():
    entry = '.entry %s(\n.param .u64 p\n)\n{\n\t.reg .pred %%p<2>;\n\tld.param.u64 %%rd1, [p];\n\t%s\n' \
        '$L_9:\n\tret;\n}\n'
    for name, fault, kernel, body in PTX:
        found = [k.waits_wrongly() for k in profile.read_ptx(entry % (kernel, body.replace('; ', ';\n\t')))]
        check('PTX: ' + name, found == [fault], found)
    least = profile.LEAST_WAITING
    for kernels in least, least - 1:
        with tempfile.NamedTemporaryFile('w') as file:
            file.write(kernels * (entry % (MOVE, PTX_WAIT)))
            file.flush()
            faults, text = printed(profile.ptx, [file.name])
        check('PTX: %d kernels wait' % kernels, faults == (kernels < least) and text.count('FAIL') == faults, text)


def test_cfg():
    lines, last = ['digraph f {', 'subgraph "cluster__Z11kvpn_kernelILi8EEvi" {'], ''
    for edge in EDGES:
        one, to = edge.split(':')
        if one != last:
            lines += ['"%s"' % one, '[label="{<entry>%s:}"]' % one]
        lines.append('"%s":exit0:e -> "%s":entry:n [style=solid];' % (one, to))
        last = one
    with tempfile.TemporaryDirectory() as folder:
        count, text = printed(profile.draw, '\n'.join(lines + ['"d"', '}', '}']), folder)
        dot = re.search(r'^ +5 +6 +2 +2  (\S+kvpn_kernel\S*\.dot)$', text, re.M)
        check('control-flow graph: two loops', count == 1 and dot and os.path.getsize(dot.group(1)), text)


def test_tables():
    for name, said, lines in TABLES:
        try:
            counters.read_counters(lines)
            found = 'no error'
        except ValueError as error:
            found = str(error)
        check('counters: a table ' + name, re.search(said, found), found)
    faults, text = printed(counters.judge_counters, [])
    check('counters: an empty table', faults and 'NOT  phases: ' in text and ': no plan' in text, text)
    for figure, low, high, better, said in VERDICTS:
        found = counters.verdict(figure, low, high, better)
        check('verdict: %s of %d to %d' % (figure, low, high), found == said, found)


def test_h200():
    """As an H200 counted. The lines of a table end the same way, whatever is added to it."""
    with open(COUNTERS.replace('.csv', '_h200.csv')) as file:
        lines = file.read().splitlines()
    lines.insert(6, '# all-reduce, 8 MB of bf16|kvpn_kernel|16777216|linked|26.98')
    lines.insert(7, '# 2 ranks: all-reduce|range|16777216|ranks|26.02')
    lines += [re.sub('copy_kernel.*?"', name, lines[10]) for name in ('kvpn_kernel"', 'range"')]
    faults, text = printed(counters.judge_counters, lines)
    check('counters of an H200: nothing is wrong', faults == 0, text)
    check('counters: no line is wider than 160 columns', max(map(len, text.splitlines())) <= 160, text)
    for what, line in (
            ('memory', r'gather, 64 Ki rows +64\.96 +4132 +3776 +78\.5% +134\.5 +110\.8 +88% +51% +29% +1% +11\.0 '
             r'+16\.0 +68\.38'),
            ('stalls', r'gather, 64 Ki rows +11% +11% +0% +long scoreboard 95  drain 2  wait 1  short scoreboard 1'),
            ('instructions', r'gather, 64 Ki rows +7208960 +524288 +262144 +0 +32\.0 +30\.8'),
            ('occupancy', r'gather, 64 Ki rows +32768 +128 +15\.52 +23 +86% +100% +warps: 16'),
            ('roofline', r'gather, 64 Ki rows +0\.000 +0\.513 +14\.0 +78\.5% +0\.00% +11\.4% +memory'),
            ('roofline, far from both', r'slots, 16 Mi tokens .*54\.8% .* latency'),
            ('expected, in range', r'gather.* DRAM, % of peak +70-80 +78  in range'),
            ('expected, better', r' +SM, % +30-40 +11  better: few instructions: .*11 %, DRAM 78 %'),
            ('expected, outside', r' +long scoreboard, % +50-60 +95  outside: little else to wait for: .*'),
            ('expected, random slots', r'store.*random.* 55-65 +81  better: time 1\.052 of that in order for 1\.00.+'),
            ('expected, link', r' +NVLink, % +60-70 +69  in range'),
            ('of ranks, with no time of their own', r'2 ranks: all-reduce +- +- +- +- +134\.2 .* 26\.02'),
            ('expected, us', r'all-reduce, 8 MB.* us, without ncu +20-25 +27  outside: each rank .*: 311 of 450 GB/s')):
        check('counters of an H200: ' + what, re.search('^' + line + '$', text, re.M), text)


# What `nvdisasm -c -gi` and `nvdisasm -c -lrm count` write of one kernel.
WITH_LINES = """\
//--------------------- .text._Z4kernv --------------------------
_Z4kernv:
\t//## File "%(path)s", line 2 inlined at "%(path)s", line 7
\t//## File "%(path)s", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R2, SR_TID.X ;
\t//## File "%(path)s", line 9
.L_x_3:
        /*0020*/              @!P1 LDG.E.128 R4, desc[UR4][R8.64] ;
        /*0030*/                   BRA `(.L_x_3);
//--------------------- .text._Z5otherv --------------------------
        /*0000*/                   EXIT ;
"""
WITH_LIVE = """\
//--------------------- .text._Z4kernv --------------------------
                                                // |  #  |  #  |
_Z4kernv:                                       // |     |     |
        /*0000*/     LDC R1, c[0x0][0x28] ;     // |  1  |     |
        /*0010*/     S2R R2, SR_TID.X ;         // | 12  |     |
.L_x_3:                                         // | 12  |  1  |
        /*0020*/     @!P1 LDG.E.128 R4, d ;     // | 12  |  1  |
        /*0030*/     BRA `(.L_x_3);             // |     |     |
"""


def test_nvdisasm():
    with tempfile.NamedTemporaryFile('w') as source:
        source.write('one\n  two = 2;\n')
        source.flush()
        lines, live = listing.sections_of(WITH_LINES % {'path': source.name}), listing.sections_of(WITH_LIVE)
        found, instructions, most, where = listing.interleaved(lines['_Z4kernv'], live['_Z4kernv'], listing.Sources())
        name = os.path.basename(source.name)
    wanted = ['   %s:2 in 7: two = 2;' % name, '    0000    1  LDC R1, c[0x0][0x28]',
              '    0010   12  S2R R2, SR_TID.X', '.L_x_3', '   %s:9: ' % name,
              '    0020   12  @!P1 LDG.E.128 R4, desc[UR4][R8.64]', '    0030    0  BRA `(.L_x_3)']
    check('nvdisasm: lines of source, code and live registers', found == wanted and instructions == 4 and
          (most, where) == (12, ['0010', '0020']) and list(lines) == ['_Z4kernv', '_Z5otherv'], '\n'.join(found))


NSYS = """\
Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
25.0,1000000,500,2000.0,2000.0,1900,2100,10.0,"void move<8, 2>(batch)"
75.0,3000000,3,1000000.0,1000000.0,1,2,3.0,"gather"
""".splitlines()


def test_nsys():
    rows, text = printed(listing.print_nsys, 'kernels', NSYS)
    check('nsys: the longest first', rows == 2 and re.search(
        r'^ +75\.0% +3\.000 +3 +1000\.00  gather\n +25\.0% +1\.000 +500 +2\.00  void move<8, 2>', text, re.M), text)
    rows, text = printed(listing.print_nsys, 'kernels', NSYS[:2] + ['100.0,5000,0,0,0,0,0,0,"none"'])
    check('nsys: a row that counts nothing', rows == 1 and ' 0       5.00  none' in text, text)
    rows, text = printed(listing.print_nsys, 'copies', ['SKIPPED: report.sqlite does not contain GPU memory data.'])
    check('nsys: nothing recorded', rows == 0 and text == 'copies: none\n', text)
    for name, lines in (('cut', NSYS[:-1] + ['75.0,3000000']), ('foreign', ['Time (%),Bytes,Name', '1,2,x'])):
        try:
            found = printed(listing.print_nsys, 'kernels', lines)
        except ValueError as error:
            found = str(error)
        check('nsys: a %s table' % name, isinstance(found, str), found)


# What `ncu --page source --csv --print-source cuda,sass` writes, which leaves quotes in the text as they are.
SOURCE = """\
"File Path","/x/kernels.cuh"
"Function Name","gather"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_long_sb","stall_wait"
"7","    asm("mad %0","%1");","-","-","30","30","20","10"
"","","0x10","IMAD R2, R3, R4","30","30","20","10"
"8","    store(v);","-","-","1,070","1,070","1,000","70"
"","","0x20","STG.E R2, R4","1,070","1,070","1,000","70"
"","","...","...","-","-","-","-"
"12","    all(v);","-","-","1,070","1,070","1,000","70"
"","","0x20","STG.E R2, R4","1,070","1,070","1,000","70"
"9","}","-","-","0","0","0","0"
""".splitlines()


def test_source():
    rows, text = printed(lambda: listing.print_hot(*listing.read_source(SOURCE), listing.Sources()))
    check('source: hot lines', rows == 3 and re.search(
        r'^ *97\.3%  long scoreboard 93% +kernels\.cuh:8 +store\(v\);\n +97\.3%  long scoreboard 93% .*\n'
        r' +2\.7%  long scoreboard 67% +kernels\.cuh:7 +asm\("mad %0","%1"\);\n1100 samples in 3 lines', text, re.M),
          text)
    for name, said, lines in (('cut', 'the file is cut', SOURCE[:-2] + ['"8","    store(v);","-"']),
                              ('without samples', 'no samples', ['"Line No","Source"', '"1","int i;"']),
                              ('foreign', 'not the source page', ['"ID","Kernel Name"', '"0","gather"']),
                              ('cut in its name', 'not the source page', ['"File Path"']),
                              ('narrow', '([], 0)', ['"Line No","# Samples"', '"7","0"']),
                              ('empty', 'not the source page', [])):
        try:
            found = str(listing.read_source(lines))
        except ValueError as error:
            found = str(error)
        check('source: %s table' % name, said in found, found)


SANITIZED = """\
========= COMPUTE-SANITIZER
ok cuda: gather
launched _Z6kvpc_a 3
launched _Z6kvpc_b 1
2 passed, 0 failed, 0 skipped
========= ERROR SUMMARY: 0 errors
"""


def test_sanitizers():
    both, three = {'_Z6kvpc_a', '_Z6kvpc_b'}, {'_Z6kvpc_a', '_Z6kvpc_b', '_Z6kvpc_c'}
    none = re.sub('launched.*\n', '', SANITIZED)
    for name, ended, said, kernels, wrong in (
            ('every kernel ran', 0, SANITIZED, both, ''),
            ('a kernel did not run', 0, SANITIZED, three, 'did not run: .*kvpc_c'),
            ('errors', 1, SANITIZED.replace('0 errors', '2 errors'), both, 'exit code 1'),
            ('not done in time', 124, SANITIZED[:60], both, 'not done in time'),
            ('no summary', 0, SANITIZED[:-40], both, 'no summary without errors'),
            ('hazards', 1, SANITIZED.replace('ERROR SUMMARY: 0 errors', 'RACECHECK SUMMARY: 1 hazards'), both,
             'no summary without errors'),
            ('names unknown', 0, none, both, ''), ('no cuobjdump', 0, SANITIZED, None, ''),
            ('no kernels', 0, SANITIZED, set(), 'none of the kernels')):
        faults, text = printed(profile.judge_sanitizer, 'memcheck', ended, said, kernels)
        check('sanitizer: ' + name, bool(faults) == bool(wrong) and re.search('^FAIL memcheck: .*' + wrong if wrong else
                                                                            'kernels ran|is unknown', text, re.M) and
              'launched' not in text.replace('launches', ''), text)


def cubin_of(path, kernels):
    """Writes a cubin as nvcc does: the code of each kernel, its registers and its stack."""
    info = b''.join(struct.pack('<BBHII', 4, kind, 8, number, value) for number, kernel in enumerate(kernels)
                    for kind, value in ((0x2f, kernel[2]), (0x12, kernel[3])))
    sections = [('', b'', 0), ('.nv.info', info, 0)]
    sections += [('.text.' + kernel[0], kernel[1], number | 9 << 24) for number, kernel in enumerate(kernels)]
    names = b'\0'.join(name.encode() for name, _, _ in sections) + b'\0.shstrtab\0'
    data, headers = bytearray(64), b''
    for name, code, number in sections + [('.shstrtab', names, 0)]:
        at = names.index(name.encode())
        headers += struct.pack('<IIQQQQIIQQ', at, 1, 0, 0, len(data), len(code), 0, number, 1, 0)
        data += code
    data[:4] = b'\x7fELF'
    struct.pack_into('<Q', data, 40, len(data))
    struct.pack_into('<HHH', data, 58, 64, len(sections) + 1, len(sections))
    with open(path, 'wb') as file:
        file.write(data + headers)


def test_weight():
    a, b, c = ('_Z6kvpc_av', b'a' * 3000, 40, 0), ('_Z6kvpc_bv', b'b' * 100, 22, 8), ('_Z6kvpn_cv', b'c', 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        old, new, listed = (folder + '/' + name for name in ('old', 'new', 'listed'))
        cubin_of(old, [a, b])
        cubin_of(new, [(a[0], b'A' * 2000, 30, 0), c])
        weight.write_listing(listed, weight.kernels_of(old))
        kernels = weight.kernels_of(listed)
        check('weight: kernels of a cubin, and of its listing', kernels == weight.kernels_of(old) and
              {(k.bytes, k.registers, k.stack) for k in kernels.values()} == {(3000, 40, 0), (100, 22, 8)}, kernels)
        same, text = printed(weight.compare, kernels, weight.kernels_of(new))
        check('weight: kernels compared', not same and re.search(
            '^differs +3000 -> +2000 bytes, +40 -> +30 .*kvpc_a.*^went .*kvpc_b.*^came .*kvpn_c.*0 are the same, '
            '1 differ, 1 went, 1 came', text, re.M | re.S), text)
        same, text = printed(weight.compare, kernels, kernels)
        check('weight: the same kernels', same and '2 are the same, 0 differ' in text, text)
        budgets = weight.BUDGETS
        for header, field, by, said in (
                ('kvprim.h', 'lines', weight.lines_of('kvprim.h') - 1, 'kvprim.h has .* lines'),
                ('kvprim_cuda.cuh', 'kernels', 1, 'kvprim_cuda.cuh has 2 kernels'),
                ('kvprim_cuda.cuh', 'kb', 3, 'of 3 KB'), ('kvprim_nccl.h', 'kernels', 0, '')):
            weight.BUDGETS = {**budgets, header: budgets[header]._replace(**{field: by})}
            wrong, text = printed(weight.check, [old])
            check('weight: a budget of %s' % field, wrong == (said != '') and re.search(said, text), text)
        weight.BUDGETS = budgets


def main():
    for name, line, lines in JUDGED:
        faults, text = printed(counters.judge_counters, lines)
        wrong = re.findall(r'^NOT +(\w+):', text, re.M)
        check('counters: ' + name, wrong == line.split() and bool(faults) == bool(line), text)
    for name, lonely, said, lines in COMPARED:
        code, text = printed(counters.print_comparison, altered('', ''), lines)
        check('counters compared: ' + name, code == 0 and re.search('^.*' + said + '$', text, re.M) and
              len(re.findall(' only$', text, re.M)) == lonely, text)
    for test in (test_tables, test_h200, test_sanitizers, test_sass, test_tool, test_ptx, test_cfg, test_nvdisasm,
                 test_nsys, test_source, test_weight):
        try:
            test()
        except Exception as error:  # the tests after it run
            check(test.__name__, False, repr(error))
    print('%d passed, %d failed, 0 skipped' % (passed, failed))
    return failed != 0


if __name__ == '__main__':
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Reads hardware counters as ncu writes them, prints them as tables, and judges them: for tests/profile/profile.py."""
import collections
import csv
import itertools
import re

# What is counted: what it is called here, ncu's name, and what to multiply it with. What ncu has under several names is
# their sum. Collectives are counted without those in the second list, as each of ncu's passes runs the program again.
FIGURES = [('time, us', 'gpu__time_duration.sum', 1e6),
           ('DRAM, GB/s', 'dram__bytes.sum.per_second', 1e-9),
           ('DRAM, % of peak', 'dram__throughput.avg.pct_of_peak_sustained_elapsed', 1),
           ('DRAM read, MB', 'dram__bytes_read.sum', 1e-6),
           ('DRAM written, MB', 'dram__bytes_write.sum', 1e-6),
           ('issue slots, %', 'smsp__issue_active.avg.pct_of_peak_sustained_active', 1),
           ("stall's share, %", '', 0),
           ('long scoreboard, %', '', 0),
           ('not selected, %', '', 0),
           ('occupancy, %', 'sm__warps_active.avg.pct_of_peak_sustained_active', 1),
           ('of at most, %', 'sm__maximum_warps_per_active_cycle_pct', 1),
           ('registers', 'launch__registers_per_thread', 1),
           ('threads of a block', 'launch__block_size', 1),
           ('blocks', 'launch__grid_size', 1),
           ('waves', 'launch__waves_per_multiprocessor', 1),
           ('blocks: registers', 'launch__occupancy_limit_registers', 1),
           ('blocks: blocks', 'launch__occupancy_limit_blocks', 1),
           ('blocks: shared memory', 'launch__occupancy_limit_shared_mem', 1),
           ('blocks: warps', 'launch__occupancy_limit_warps', 1),
           ('local accesses', 'smsp__inst_executed_op_local_ld.sum', 1),
           ('local accesses', 'smsp__inst_executed_op_local_st.sum', 1)]
ROWS_FIGURES = [('L2, % of peak', 'lts__throughput.avg.pct_of_peak_sustained_elapsed', 1),
                ('L2 hits, %', 'lts__t_sector_hit_rate.pct', 1),
                ('L1, % of peak', 'l1tex__throughput.avg.pct_of_peak_sustained_active', 1),
                ('L1 hits, %', 'l1tex__t_sector_hit_rate.pct', 1),
                ('sectors a load', 'l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio', 1),
                ('sectors a store', 'l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio', 1),
                ('SM, %', 'sm__throughput.avg.pct_of_peak_sustained_elapsed', 1),
                ('tensor cores, %', 'sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active', 1),
                ('tensor cores, %', 'sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active', 1),
                ('threads', 'smsp__thread_inst_executed_per_inst_executed.ratio', 1),
                ('threads on', 'smsp__thread_inst_executed_pred_on_per_inst_executed.ratio', 1),
                ('instructions', 'smsp__inst_executed.sum', 1),
                ('global loads', 'smsp__inst_executed_op_global_ld.sum', 1),
                ('global stores', 'smsp__inst_executed_op_global_st.sum', 1),
                ('operations', 'smsp__sass_thread_inst_executed_op_fadd_pred_on.sum', 1),
                ('operations', 'smsp__sass_thread_inst_executed_op_fmul_pred_on.sum', 1),
                ('operations', 'smsp__sass_thread_inst_executed_op_ffma_pred_on.sum', 2),
                ('integer operations', 'smsp__sass_thread_inst_executed_op_integer_pred_on.sum', 1),
                ('FMA a cycle', 'sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained', 1),
                ('clock, GHz', 'sm__cycles_elapsed.avg.per_second', 1e-9)]
STALL = 'smsp__average_warps_issue_stalled_%s_per_issue_active.ratio'
STALLS = '''barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle
    membar mio_throttle misc no_instruction not_selected short_scoreboard sleeping tex_throttle wait'''.split()
Plan = collections.namedtuple('Plan', 'operation kernel bytes kind us')


def metrics(collective):
    """Returns what ncu is asked for. The names of launch__ and sm__maximum come with its sections."""
    figures = FIGURES if collective else FIGURES + ROWS_FIGURES
    return [metric for _, metric, _ in figures if '__' in metric and '.' in metric] + [STALL % s for s in STALLS]


class Launch:
    """One kernel, as ncu counted it."""

    def __init__(self, plan, kernel, counters):
        self.plan, self.kernel = plan, kernel
        self.name = plan.operation if plan else kernel
        self.figures = {}
        for label, metric, factor in FIGURES + ROWS_FIGURES:
            if metric in counters:
                self.figures[label] = self.figures.get(label, 0) + counters[metric] * factor
        if kernel == 'range':  # its time begins and ends on the host
            self.figures = {label: n for label, n in self.figures.items()
                            if label not in ('time, us', 'DRAM, GB/s', 'DRAM, % of peak')}
        stalls = {stall: counters[STALL % stall] for stall in STALLS if STALL % stall in counters}
        all_stalls = sum(stalls.values())
        self.stalls = sorted(((100 * n / all_stalls, stall) for stall, n in stalls.items()),
                             reverse=True) if all_stalls else []
        self.stall = self.stalls[0][1] if self.stalls else ''
        shares = {stall: share for share, stall in self.stalls}
        for label, stall in (("stall's share, %", self.stall), ('long scoreboard, %', 'long_scoreboard'),
                             ('not selected, %', 'not_selected')):
            if stall in shares:
                self.figures[label] = shares[stall]
        self.derive()

    def derive(self):
        """Adds what follows from the counters, and from the plan."""
        f = self.figures
        if f.get('DRAM, % of peak') and 'DRAM, GB/s' in f:
            f['peak, GB/s'] = 100 * f['DRAM, GB/s'] / f['DRAM, % of peak']
        if 'FMA a cycle' in f and 'clock, GHz' in f:
            f['peak, GFLOP/s'] = 2 * f['FMA a cycle'] * f['clock, GHz']
        traffic = f.get('DRAM, GB/s', 0) * f.get('time, us', 0) * 1e3
        for label in 'operations', 'integer operations':
            if label in f and traffic:
                f[label + ' a byte'] = f[label] / traffic
        if 'operations' in f and f.get('peak, GFLOP/s') and f.get('time, us'):
            f['compute, % of peak'] = 0.1 * f['operations'] / f['time, us'] / f['peak, GFLOP/s']
        for label in 'L1 hits, %', 'L2 hits, %':
            if f.get(label, 0) > 100.5:  # of kernels so small that ncu's passes differ
                del f[label]

    def shown(self, label, form='%.0f'):
        return form % self.figures[label] if label in self.figures else '-'

    def moved(self):
        """GB/s of all bytes that the kernel is asked to move, read and written, under ncu."""
        us = self.figures.get('time, us', 0)
        return self.plan.bytes / us * 1e-3 if self.plan and us else 0

    def limits(self):
        """What allows the fewest blocks on a multiprocessor, and how many."""
        limits = {label[8:]: n for label, n in self.figures.items() if label.startswith('blocks: ')}
        least = min(limits.values(), default=0)
        return [name for name, n in limits.items() if n == least], least


# ---- reading ----

def scale(unit):
    """Converts to seconds and bytes."""
    prefix = re.match('([numkKMGT])(s|second|byte|hz|Hz)', unit)
    return {'n': 1e-9, 'u': 1e-6, 'm': 1e-3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'T': 1e12}[
        prefix.group(1).replace('k', 'K')] if prefix else 1


def read_plan(lines):
    """Raises ValueError at a line that is none of a plan."""
    plan = []
    for line in lines:
        fields = line[2:].strip().split('|')
        if len(fields) not in (4, 5):
            raise ValueError('a plan has operation|kernel|bytes|kind|us, not "%s"' % line.strip())
        plan.append(Plan(*fields[:2], int(fields[2]), fields[3], float(fields[4]) if len(fields) == 5 else 0))
    return plan


def rows_of(lines):
    try:
        yield from csv.reader(lines)
    except csv.Error as error:  # as of a field of more than 128 KB, or a byte 0
        raise ValueError('no table of ncu: %s' % error)


def read_counters(lines):
    """Reads tables: the plan that build/ncu/profile prints, then ncu's raw page as CSV. Several may follow each other.
    A plan's line is `# operation|kernel|bytes moved|kind|us`, in the order in which kernels run. ncu's first row names
    the columns, the second their units; then each kernel has a row. Raises ValueError if a row is cut, or there is
    another table than ncu's."""
    lines = [line for line in lines if not line.startswith('# SPDX')]
    plan = read_plan(line for line in lines if line.startswith('# '))
    launches, columns, units = [], [], []
    for row in rows_of(line for line in lines if line.startswith('"')):
        if row[0] == 'ID':
            columns, units = row, []
            if 'Kernel Name' not in columns:
                raise ValueError('a table without the column "Kernel Name": not the raw page of ncu --csv')
            continue
        if not columns:
            raise ValueError('a table that does not begin with "ID": not the raw page of ncu --csv')
        if len(row) != len(columns):
            raise ValueError('a row of %d columns in a table of %d: the file is cut' % (len(row), len(columns)))
        if row[0] == '':
            units = [scale(unit) for unit in row]
            continue
        if not units:
            raise ValueError('a table without a row of units: not the raw page of ncu --csv')
        counters = {column: float(text.replace(',', '')) * unit for column, text, unit in zip(columns, row, units)
                    if re.match(r'[-+]?[0-9][0-9,]*([.][0-9]*)?([eE][-+]?[0-9]+)?$', text)}
        kernel = re.sub(r'^void |[<(].*', '', row[columns.index('Kernel Name')])
        launches.append(Launch(plan[len(launches)] if len(launches) < len(plan) else None, kernel, counters))
    return plan, launches


# ---- tables ----

# Title, and its columns: two lines of heading, and what is printed: a figure's label and format, or a function.
def stalls_of(launch):
    return '  '.join('%s %.0f' % (stall.replace('_', ' '), share) for share, stall in launch.stalls[:4]
                     if share >= 0.5) or '-'


def allowed_by(launch):
    names, least = launch.limits()
    return '%s: %.0f' % (', '.join(names), least) if names else '-'


def bound_of(launch):
    """The roof that a kernel is nearest to, or neither if both are far: then it waits for latencies."""
    memory = launch.figures.get('DRAM, % of peak')
    compute = max(launch.figures.get('compute, % of peak', 0), launch.figures.get('issue slots, %', 0))
    if memory is None:
        return '-'
    return 'latency' if max(memory, compute) < 60 else 'memory' if memory >= compute else 'issue'


TABLES = [
    ('time and memory', [
        ('', 'us', ('time, us', '%.2f')),
        ('moved', 'GB/s', lambda r: '%.0f' % r.moved() if r.moved() else '-'),
        ('DRAM', 'GB/s', ('DRAM, GB/s', '%.0f')),
        ('of', 'peak', ('DRAM, % of peak', '%.1f%%')),
        ('read', 'MB', ('DRAM read, MB', '%.1f')),
        ('written', 'MB', ('DRAM written, MB', '%.1f')),
        ('L2 of', 'peak', ('L2, % of peak', '%.0f%%')),
        ('L2', 'hits', ('L2 hits, %', '%.0f%%')),
        ('L1 of', 'peak', ('L1, % of peak', '%.0f%%')),
        ('L1', 'hits', ('L1 hits, %', '%.0f%%')),
        ('sectors', 'a load', ('sectors a load', '%.1f')),
        ('sectors', 'a store', ('sectors a store', '%.1f')),
        ('unprofiled', 'us', lambda r: '%.2f' % r.plan.us if r.plan and r.plan.us else '-')]),
    ('what warps wait for: the largest shares of all stalls, %', [
        ('', 'SM', ('SM, %', '%.0f%%')),
        ('issue', 'slots', ('issue slots, %', '%.0f%%')),
        ('tensor', 'cores', ('tensor cores, %', '%.0f%%')),
        ('', ' stalls', stalls_of)]),
    ('instructions of warps', [
        ('', 'all', ('instructions', '%.0f')),
        ('global', 'loads', ('global loads', '%.0f')),
        ('global', 'stores', ('global stores', '%.0f')),
        ('local', 'ld+st', ('local accesses', '%.0f')),
        ('threads', 'of 32', ('threads', '%.1f')),
        ('not predi-', 'cated off', ('threads on', '%.1f'))]),
    ('occupancy', [
        ('', 'blocks', ('blocks', '%.0f')),
        ('of', 'threads', ('threads of a block', '%.0f')),
        ('', 'waves', ('waves', '%.2f')),
        ('', 'regs', ('registers', '%.0f')),
        ('warps', 'active', ('occupancy, %', '%.0f%%')),
        ('of at', 'most', ('of at most, %', '%.0f%%')),
        ('', ' blocks a multiprocessor, as allowed by', allowed_by)]),
    ('roofline: floating-point and integer operations for a byte of DRAM, and how near both roofs are', [
        ('FLOP', 'a byte', ('operations a byte', '%.3f')),
        ('integer', 'a byte', ('integer operations a byte', '%.3f')),
        ('ridge,', 'FLOP/B', lambda r: '%.1f' % (r.figures['peak, GFLOP/s'] / r.figures['peak, GB/s'])
         if r.figures.get('peak, GB/s') and 'peak, GFLOP/s' in r.figures else '-'),
        ('memory', 'roof', ('DRAM, % of peak', '%.1f%%')),
        ('compute', 'roof', ('compute, % of peak', '%.2f%%')),
        ('issue', 'slots', ('issue slots, %', '%.1f%%')),
        ('', ' bound by', bound_of)])]


def print_table(title, columns, launches):
    """Columns are as wide as they need; the last one, if it is text, is left-aligned."""
    cells = [[column[2](r) if callable(column[2]) else r.shown(*column[2]) for column in columns] for r in launches]
    widths = [max(len(text) for text in (column[0], column[1], *(row[c] for row in cells)))
              for c, column in enumerate(columns)]

    def line(name, texts):
        aligned = [text.ljust(w) if columns[c][1].startswith(' ') else text.rjust(w)
                   for c, (text, w) in enumerate(zip(texts, widths))]
        print(('%-36s %s' % (name, ' '.join(aligned))).rstrip())

    print('-- ' + title)
    line('', [column[0] for column in columns])
    line('operation', [column[1] for column in columns])
    for r, row in zip(launches, cells):
        line(r.name, [(' ' if columns[c][1].startswith(' ') else '') + text for c, text in enumerate(row)])
    print()


def print_tables(launches):
    for title, columns in TABLES:
        labels = [column[2][0] for column in columns if not callable(column[2])]
        counted = [r for r in launches if any(label in r.figures for label in labels)]
        if counted:
            print_table(title, columns, counted)


# ---- what the documents expect ----

LINK_GBS = 450  # each way, of a GPU with NVLink 4 (H100, H200: 18 links of 25 GB/s)


def link_share(launch):
    return 100 * launch.plan.bytes / 2 / launch.plan.us * 1e-3 / LINK_GBS if launch.plan.us else None


def few_instructions(r, _):
    return 'few instructions: issue slots busy %s, DRAM %s' % (r.shown('issue slots, %', '%.0f %%'),
                                                              r.shown('DRAM, % of peak', '%.0f %%'))


def other_waits(r, _):
    if r.figures.get('long scoreboard, %', 0) > 60:
        return 'little else to wait for: DRAM %s of peak, issue slots busy %s' % (
            r.shown('DRAM, % of peak', '%.0f %%'), r.shown('issue slots, %', '%.0f %%'))
    return 'others: ' + ', '.join('%s %.0f' % (stall.replace('_', ' '), share) for share, stall in r.stalls[1:4])


def blocks_end(r, _):
    """Occupancy is an average over the kernel: its last blocks leave multiprocessors half empty, as do launches."""
    return '%s waves of blocks, and room until the next one begins' % r.shown('waves', '%.1f')


def memory_busy(r, _):
    return 'loads of a row before its stores: %s of %s GB/s' % (r.shown('DRAM, GB/s'), r.shown('peak, GB/s'))


def than_in_order(r, launches):
    """Random slots, against slots in order."""
    other = next((o for o in launches if o.name == 'store, 64 Ki tokens, in order'), None)
    if not other or any(label not in x.figures for x in (r, other)
                        for label in ('time, us', 'DRAM read, MB', 'DRAM written, MB')):
        return memory_busy(r, launches)
    return 'time %.3f of that in order for %.3f of its bytes' % (
        r.figures['time, us'] / other.figures['time, us'],
        (r.figures['DRAM read, MB'] + r.figures['DRAM written, MB']) /
        (other.figures['DRAM read, MB'] + other.figures['DRAM written, MB']))


def link_bytes(r, _):
    return 'each rank sends and receives the size once: %.0f of %d GB/s' % (
        r.plan.bytes / 2 / r.plan.us * 1e-3, LINK_GBS)


# Operation ('': all large ones; the documents name gather), what is expected of it, where it is counted, from, to,
# whether more (1) or less (-1) than that is better or neither (0), and what explains a figure out of range.
EXPECTED = [
    ('gather, 64 rows of 8 KB', 'time, us', None, 10, 10, -1, few_instructions),
    ('store, 64 tokens, random slots', 'time, us', None, 15, 15, -1, few_instructions),
    ('store, 64 Ki tokens, in order', 'DRAM, % of peak', None, 70, 75, 1, memory_busy),
    ('store, 64 Ki tokens, random slots', 'DRAM, % of peak', None, 55, 65, 1, than_in_order),
    ('', 'DRAM, % of peak', None, 70, 80, 1, memory_busy),
    ('', 'SM, %', None, 30, 40, -1, few_instructions),
    ('', 'tensor cores, %', None, 0, 0, 0, few_instructions),
    ('', 'long scoreboard, %', None, 50, 60, 0, other_waits),
    ('', 'not selected, %', None, 20, 30, -1, few_instructions),
    ('', 'of its occupancy, %', lambda r: 100 * r.figures['occupancy, %'] / r.figures['of at most, %']
     if r.figures.get('of at most, %') and 'occupancy, %' in r.figures else None, 90, 100, 0, blocks_end),
    ('all-reduce, 8 MB of bf16', 'us, without ncu', lambda r: r.plan.us or None, 20, 25, -1, link_bytes),
    ('all-reduce, 8 MB of bf16', 'NVLink, %', link_share, 60, 70, 1, link_bytes)]


def verdict(figure, low, high, better):
    """A figure is in range as it is printed, with no decimals."""
    if low <= round(figure) <= high:
        return 'in range'
    return 'better' if better * (figure - high) > 0 and better * (figure - low) > 0 else 'outside'


def expected_of(r, launches):
    """Returns a row for each figure of an operation of which something is expected."""
    rows, seen = [], set()
    for operation, label, count, low, high, better, because in EXPECTED:
        large = operation == '' and r.plan and r.plan.kind == 'large'
        figure = (count(r) if count else r.figures.get(label)) if large or r.name == operation else None
        if figure is None or label in seen:
            continue
        seen.add(label)
        said = verdict(figure, low, high, better)
        rows.append((label, '%d-%d' % (low, high) if high > low else '%d' % low, '%.0f' % figure,
                     said + ('' if said == 'in range' else ': ' + because(r, launches))))
    return rows


def print_expected(launches):
    expected = [(r.name, expected_of(r, launches)) for r in launches]
    if not any(rows for _, rows in expected):
        return
    print('-- against what the documents expect of gather, store and all-reduce; of other operations, as of gather')
    print('%-36s %-20s %8s %5s' % ('operation', '', 'expected', 'here'))
    for name, rows in expected:
        for n, row in enumerate(rows):
            print('%-36s %-20s %8s %5s  %s' % (('' if n else name,) + row))
    print()


# ---- the checklist ----

def checks_of(plan, launches):
    """What the checklist asks for, and where that is not so."""
    large = [r for r in launches if r.plan and r.plan.kind == 'large']
    copy = next((r.moved() for r in launches if r.plan and r.plan.kind == 'copy'), 0)
    none = [] if large else ['no large operation']
    nothing = Plan('nothing', 'nothing', 0, '', 0)
    others = [(r.kernel if r else 'nothing', p or nothing) for p, r in itertools.zip_longest(plan, launches)]
    return [('phases: each operation is its one kernel, %d in this order' % len(plan),
             ['%s for %s' % (kernel, p.operation) for kernel, p in others if kernel != p.kernel]
             if plan else ['no plan']),
            ("bandwidth: large ones move at least 0.80 of the copy kernel's %.0f GB/s" % copy,
             none + ['%s %.2f' % (r.name, copy and r.moved() / copy) for r in large
                     if not copy or r.moved() < 0.8 * copy]),
            ('stalls: large ones wait for loads from memory most (long scoreboard)',
             none + ['%s %s' % (r.name, r.stall or '-') for r in large if r.stall != 'long_scoreboard']),
            ('spills: no kernel reads or writes local memory',
             [r.name + ' ' + r.shown('local accesses') for r in launches if r.figures.get('local accesses') != 0]),
            ('occupancy: large ones reach at least 0.60 of the theoretical limit; below 0.90 the table above says why',
             none + ['%s %s of %s' % (r.name, r.shown('occupancy, %'), r.shown('of at most, %')) for r in large
                     if r.figures.get('occupancy, %', 0) < 0.6 * r.figures.get('of at most, %', 1e9)])]


def judge_counters(lines):
    """Prints the tables, and a checklist: what it asks for, and where that is not so. Returns the number of faults."""
    plan, launches = read_counters(lines)
    print_tables(launches)
    print_expected(launches)
    checks = checks_of(plan, launches)
    for asked, wrong in checks:
        print('%-4s %s' % ('NOT' if wrong else 'ok', asked) + (wrong and ': ' + ', '.join(wrong) or ''))
    return sum(1 for _, wrong in checks if wrong)


# ---- two tables compared ----

def by_name(launches):
    """Returns launches by operation, or by kernel and number."""
    return {r.name if r.plan else '%s %d' % (r.kernel, n): r for n, r in enumerate(launches, 1)}


def print_changes(name, a, b):
    for label in collections.OrderedDict.fromkeys(label for label, _, _ in FIGURES + ROWS_FIGURES):
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

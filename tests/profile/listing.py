# SPDX-License-Identifier: MIT
"""Reads what nvdisasm and ncu say of a kernel's lines, and nsys of a program's time: for tests/profile/profile.py."""
import collections
import csv
import os
import re

# ---- nvdisasm ----

SECTION = re.compile(r'^//-+ \.text\.(\S+) -+$')
CODE = re.compile(r'\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;')
LABEL = re.compile(r'^(\.L_x_\d+):')
LINE = re.compile(r'^\s*//## File "(.*?)", line (\d+)(?: inlined at ".*?", line (\d+))?')
LIVE = re.compile(r'// \|\s*(\d*)')


def sections_of(text):
    """Returns the lines of each kernel of `nvdisasm -c`, by its mangled name."""
    sections, lines = {}, []
    for line in text.splitlines():
        start = SECTION.match(line)
        if start:
            lines = sections.setdefault(start.group(1), [])
        lines.append(line)
    return sections


def live_registers(lines):
    """Reads `nvdisasm -c -lrm count`: how many general registers are in use at each address."""
    live = {}
    for line in lines:
        code, count = CODE.match(line), LIVE.search(line)
        if code and count:
            live[code.group(1)] = int(count.group(1) or 0)
    return live


class Sources:
    """The lines of source files, '' where there is none."""

    def __init__(self):
        self.files = {}

    def line(self, path, number):
        if path not in self.files:
            try:
                with open(path, errors='replace') as file:
                    self.files[path] = file.read().splitlines()
            except OSError:
                self.files[path] = []
        lines = self.files[path]
        return lines[number - 1].strip() if 0 < number <= len(lines) else ''


def interleaved(with_lines, with_live, sources):
    """Merges `nvdisasm -c -gi` with the counts of `nvdisasm -c -lrm count`, which cannot be printed at once. Returns
    the listing's lines, the number of instructions, and the most registers in use, with their addresses."""
    live, listing, place, told, fresh = live_registers(with_live), [], '', '', True
    instructions, most, where = 0, 0, []
    for line in with_lines:
        source, label, code = LINE.match(line), LABEL.match(line), CODE.match(line)
        if source and fresh:  # the first of several is the innermost
            path, number, caller = source.groups()
            place = '%s:%s%s: %s' % (os.path.basename(path), number, ' in %s' % caller if caller else '',
                                     sources.line(path, int(number)))
            fresh = False
        elif label:
            listing.append(label.group(1))
        elif code:
            fresh = True
            if place != told:
                listing.append('   ' + place)
                told = place
            address, count = code.group(1), live.get(code.group(1))
            listing.append('%8s %4s  %s' % (address, '-' if count is None else count, code.group(2)))
            instructions += 1
            if count is not None and count >= most:
                where = where + [address] if count == most else [address]
                most = count
    return listing, instructions, most, where


# ---- nsys ----

def print_nsys(title, lines, most=12):
    """Prints a table of `nsys stats --format csv`, the longest first. Returns how many rows there are."""
    rows = [row for row in csv.reader(lines) if row]
    start = next((n for n, row in enumerate(rows) if row[0] == 'Time (%)'), None)
    if start is None:
        print('%s: none' % title)
        return 0
    heading = rows[start]
    count = next((heading.index(name) for name in ('Instances', 'Count', 'Num Calls') if name in heading), None)
    name = next((heading.index(name) for name in ('Name', 'Operation') if name in heading), None)
    if count is None or name is None or 'Total Time (ns)' not in heading:
        raise ValueError('%s: not a table of nsys stats: %s' % (title, ', '.join(heading)))
    total, table = heading.index('Total Time (ns)'), rows[start + 1:]
    if any(len(row) != len(heading) for row in table):
        raise ValueError('%s: a row is cut' % title)
    print('%s\n%8s %12s %9s %10s  %s' % (title, 'time', 'ms', 'calls', 'us each', ''))
    for row in sorted(table, key=lambda row: -float(row[total]))[:most]:
        print('%7.1f%% %12.3f %9s %10.2f  %s' % (float(row[0]), float(row[total]) * 1e-6, row[count],
                                                1e-3 * float(row[total]) / (float(row[count]) or 1), row[name][:110]))
    if len(table) > most:
        print('%31s  and %d more' % ('', len(table) - most))
    return len(table)


# ---- ncu's source page ----

Hot = collections.namedtuple('Hot', 'path line text samples stalls')
SAMPLES = 'Warp Stall Sampling (All Samples)', '# Samples', 'Samples'


def number_of(text):
    text = text.replace(',', '')
    return float(text) if re.match(r'-?\d+(\.\d*)?$', text) else 0


def fields_of(line, columns):
    """Splits a row. ncu does not escape the quotes in the text of a line, which is the second of the columns."""
    fields = line.strip()[1:-1].split('","')
    more = len(fields) - columns
    return fields if more <= 0 else fields[:1] + ['","'.join(fields[1:2 + more])] + fields[2 + more:]


def read_source(lines):
    """Reads `ncu --page source --csv --print-source cuda,sass`: for each file a row that names it, headings, and for
    each line a row, which is followed by one for each of its instructions. An instruction that was inlined belongs to
    several lines. Returns lines that have samples, and how many samples there are in all. Raises ValueError at another
    table."""
    path, columns, hot, samples, code = '', None, [], None, {}
    for line in lines:
        fields = fields_of(line, len(columns) if columns else 2)
        if len(fields) > 1 and fields[0] in ('File Path', 'File Name'):
            path, columns = fields[1], None
        elif fields[0] == 'Line No':
            columns = line.strip()[1:-1].split('","')
            samples = next((columns.index(name) for name in SAMPLES if name in columns), None)
            if samples is None:
                raise ValueError('no samples in this table: not the source page of ncu --csv')
        elif columns and len(fields) != len(columns) and line.strip():
            raise ValueError('a row of %d columns in a table of %d: the file is cut' % (len(fields), len(columns)))
        elif columns and fields[0].isdigit() and number_of(fields[samples]):
            stalls = {name[6:]: number_of(text) for name, text in zip(columns, fields)
                      if re.match(r'stall_\w+$', name) and not name.endswith('_not_issued')}
            hot.append(Hot(path, int(fields[0]), fields[1].strip(), number_of(fields[samples]), stalls))
        elif columns and len(fields) > 2 and fields[2].startswith('0x'):
            code[fields[2]] = number_of(fields[samples])
    if columns is None:
        raise ValueError('not the source page of ncu --csv')
    return hot, sum(code.values())


def print_hot(hot, total, sources, most=15):
    """Prints the lines at which warps were found most often, and how many."""
    if not total:
        print('no samples')
        return 0
    print('%6s  %-26s %-28s' % ('share', 'dominating stall', 'line'))
    for h in sorted(hot, key=lambda h: -h.samples)[:most]:
        stall = max(h.stalls, key=h.stalls.get) if sum(h.stalls.values()) else ''
        name = re.sub('sb$', 'scoreboard', stall).replace('_', ' ')
        said = '%s %.0f%%' % (name, 100 * h.stalls[stall] / h.samples) if stall else '-'
        place = '%s:%d' % (os.path.basename(h.path), h.line)
        print('%5.1f%%  %-26s %-28s %s' % (100 * h.samples / total, said, place,
                                          (h.text or sources.line(h.path, h.line))[:90]))
    print('%d samples in %d lines; a line has those of what is inlined into it, too' % (total, len(hot)))
    return len(hot)

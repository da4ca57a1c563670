# SPDX-License-Identifier: MIT
"""Says of which headers the results in tests/results/ are: those that depend on headers carry their checksums.

    python3 tests/results.py        prints a table, from the top folder; `make check` and `make plots` call it

"Commits behind" counts those that changed one of a result's headers after the newest commit that has all its checksums;
changes that are not committed count as one more. Exits with 1 if a result of the present headers holds a failure.
tests/results/same_code has pairs of a header's checksums whose kernels are the same, how that was seen, and what of the
host's code is not.
"""
import glob
import hashlib
import os
import re
import subprocess
import sys

RESULTS = 'tests/results/'
HEADERS = ['kvprim.h', 'kvprim_cuda.cuh', 'kvprim_nccl.h']
WITHOUT_HEADERS = ['gpu_bandwidth.txt']  # measures the memory alone
FAILURE = re.compile(
    r'[1-9]\d* failed|^ *FAIL|^NOT |^(Aborted|terminate called)|(ERROR|RACECHECK) SUMMARY: [1-9]', re.M)
FORM = '%-25s%-49s%s'


def read(name):
    with open(RESULTS + name, encoding='utf-8', errors='replace') as file:
        return file.read()


def sums_of(text):
    """Returns the checksums that a result carries, by header."""
    return {header: digest for digest, header in re.findall(r'^([0-9a-f]{64})  (kvprim\w*\.\w+)$', text, re.M)}


def present():
    """Returns the headers' checksums as they stand."""
    sums = {}
    for header in HEADERS:
        with open(header, 'rb') as file:
            sums[header] = hashlib.sha256(file.read()).hexdigest()
    return sums


def same_code():
    """Returns the pairs of checksums (a result's, the present header's) whose kernels are the same."""
    return set(re.findall('^([0-9a-f]{64}) ([0-9a-f]{64})$', read('same_code'), re.M)) if os.path.exists(
        RESULTS + 'same_code') else set()


def others(name):
    """Returns the headers of which a result has others than the present ones, or ['?'] if it does not say."""
    if name in WITHOUT_HEADERS:
        return []
    sums, now, same = sums_of(read(name)), present(), same_code()
    return [header for header in sums
            if sums[header] != now.get(header) and (sums[header], now.get(header)) not in same] if sums else ['?']


def failed(name):
    """Says whether a test failed, or a test's result does not say that none did."""
    text = read(name)
    return bool(FAILURE.search(text)) or bool(
        re.search('_(test|sanitize)[_0-9]*[.]txt$', name)) and ' 0 failed, ' not in text


def git(*command, **options):
    return subprocess.run(('git',) + command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
                          **options).stdout


def digests_of(names):
    """Returns the SHA-256 of each `commit:path`, None where there is no such file."""
    found = git('cat-file', '--batch-check=%(objectname)', input='\n'.join(names).encode()).decode().splitlines()
    blobs = sorted({blob for blob in found if ' ' not in blob})  # otherwise 'NAME missing'
    text, at, digests = git('cat-file', '--batch', input='\n'.join(blobs).encode()), 0, {}
    for blob in blobs:  # a line `NAME blob SIZE`, the bytes, a newline
        end = text.index(b'\n', at)
        at = end + 2 + int(text[at:end].split()[2])
        digests[blob] = hashlib.sha256(text[end + 1:at - 1]).hexdigest()
    return [digests.get(blob) for blob in found]


def behind(sums, known):
    """Returns how many commits the checksums are behind, as text. `known` keeps digests for the next call."""
    try:
        if git('rev-parse', '--is-shallow-repository').strip() != b'false':
            return 'unknown'
        commits = git('log', '--format=%H', '--', *sums).decode().split()
        names = ['%s:%s' % (commit, header) for commit in commits for header in sums]
        fresh = [name for name in names if name not in known]
        known.update(zip(fresh, digests_of(fresh)))
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'
    states = [{header: known['%s:%s' % (commit, header)] for header in sums} for commit in commits]
    now = present()
    uncommitted = states[:1] != [{header: now.get(header) for header in sums}]
    return str(states.index(sums) + uncommitted) if sums in states else 'no commit has them'


def table():
    """Returns its lines."""
    lines, known = [FORM % ('result', 'of these headers, or of others', 'commits behind')], {}
    for path in sorted(glob.glob(RESULTS + '*.txt')):
        name = os.path.basename(path)
        differ = others(name)
        if name in WITHOUT_HEADERS:
            row = 'depends on none', '-'
        elif differ == ['?']:
            row = 'does not say', 'unknown'
        elif differ:
            row = 'other ' + ', '.join(differ), behind(sums_of(read(name)), known)
        else:
            text = any(digest != present().get(header) for header, digest in sums_of(read(name)).items())
            row = 'these' + ' kernels, of other text' * text, '0' + ', FAIL: not all passed' * failed(name)
        lines.append(FORM % ((name,) + row))
    return lines


if __name__ == '__main__':
    printed = '\n'.join(table())
    print(printed)
    sys.exit('FAIL' in printed)

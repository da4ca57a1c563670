# SPDX-License-Identifier: MIT
"""Tests tests/results.py in a repository of its own."""
import hashlib
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
sys.path.insert(0, TOP)
import results  # noqa: E402: tests/results.py

passed = failed = 0


def check(name, right, text=''):
    global passed, failed
    passed, failed = passed + bool(right), failed + (not right)
    print('ok' if right else 'FAIL', name, '' if right else text)


def write(path, text):
    with open(path, 'w') as file:
        file.write(text)


def git(*command):
    subprocess.run(('git', '-c', 'user.name=n', '-c', 'user.email=e') + command, check=True, stdout=subprocess.DEVNULL)


def sums(**texts):
    return ''.join('%s  %s\n' % (hashlib.sha256(text.encode()).hexdigest(), results.HEADERS['hcn'.index(key)])
                   for key, text in texts.items())


def rows():
    """Returns the rows of the table, and the exit code."""
    done = subprocess.run([sys.executable, os.path.join(TOP, 'results.py')], stdout=subprocess.PIPE,
                          universal_newlines=True)
    return {line.split()[0]: ' '.join(line.split()[1:]) for line in done.stdout.splitlines()}, done.returncode


def table():
    """Without git, then with three commits: a change of both headers, one of kvprim.h, and one of neither."""
    os.makedirs('tests/results')
    for header, text in zip(results.HEADERS, ('h1', 'c1', 'n1')):
        write(header, text)
    for name, text in (('first_test.txt', sums(h='h1', c='c1') + '9 passed, 0 failed, 0 skipped\n'),
                       ('second.txt', sums(h='h2', c='c2')), ('now_test.txt', sums(h='h3', c='c2') + ' 0 failed, \n'),
                       ('c.txt', sums(c='c1')), ('lost.txt', sums(h='h0')), ('replay.txt', 'no checksums\n'),
                       ('gpu_bandwidth.txt', '')):
        write('tests/results/' + name, text)
    found, code = rows()
    check('a table outside of git', found['lost.txt'] == 'other kvprim.h unknown' and code == 0 and
          found['first_test.txt'] == 'these 0', found)
    git('init', '-q')
    for h, c in ('h1', 'c1'), ('h2', 'c2'), ('h3', 'c2'):
        write('kvprim.h', h)
        write('kvprim_cuda.cuh', c)
        git('add', '-A')
        git('commit', '-qm', h)
    git('commit', '-qm', 'nothing', '--allow-empty')
    found, code = rows()
    wanted = {'first_test.txt': 'other kvprim.h, kvprim_cuda.cuh 2', 'second.txt': 'other kvprim.h 1',
              'now_test.txt': 'these 0', 'c.txt': 'other kvprim_cuda.cuh 1', 'replay.txt': 'does not say unknown',
              'lost.txt': 'other kvprim.h no commit has them', 'gpu_bandwidth.txt': 'depends on none -'}
    check('a table of three commits', code == 0 and all(found[name] == row for name, row in wanted.items()), found)
    write('kvprim.h', 'h4')
    found, code = rows()
    check('a change that is not committed counts', found['second.txt'] == 'other kvprim.h 2' and
          found['now_test.txt'] == 'other kvprim.h 1', found)
    write('tests/results/same_code', ' '.join(sums(h=h).split()[0] for h in ('h3', 'h4')) + '\n')
    found, code = rows()
    check('a text of the same kernels', found['now_test.txt'] == 'these kernels, of other text 0' and
          found['second.txt'] == 'other kvprim.h 2', found)
    os.remove('tests/results/same_code')
    write('kvprim.h', 'h3')


def failures():
    for name, text, wrong in (
            ('gpu_test.txt', '5 passed, 1 failed, 0 skipped', True), ('gpu_test.txt', '5 passed', True),
            ('nccl_test_3.txt', 'ok', True), ('gpu_ncu.txt', 'NOT  spills', True), ('gpu_ncu.txt', 'ok', False),
            ('gpu_sanitize.txt', ' 0 failed, \n========= ERROR SUMMARY: 2 errors', True),
            ('gpu_sanitize.txt', ' 0 failed, \n========= ERROR SUMMARY: 0 errors', False),
            ('nccl_test.txt', '5 passed, 0 failed, 0 skipped\nAborted', True), ('gpu_bench.txt', '  FAIL a b', True)):
        write('tests/results/' + name, sums(h='h3') + text + '\n')
        found, code = rows()
        check('%s: %s' % (name, text.split('\n')[-1]), code == wrong and ('FAIL' in found[name]) == wrong, found)
        os.remove('tests/results/' + name)
    write('tests/results/gpu_test.txt', sums(h='h2') + '5 passed, 1 failed, 0 skipped\n')
    check('a failure with other headers is none', rows()[1] == 0)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    try:
        table()
        failures()
        print('%d passed, %d failed, 0 skipped' % (passed, failed))
    except OSError:
        print('skip the table of results: no git\n%d passed, %d failed, 1 skipped' % (passed, failed))
    os.chdir('/')
sys.exit(failed != 0)

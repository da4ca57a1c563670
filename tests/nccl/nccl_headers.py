# SPDX-License-Identifier: MIT
"""usage: nccl_headers.py FOLDER VERSION...

Fetches nccl.h of these versions of NCCL (2.19 means the newest 2.19.x) from PyPI's wheels into FOLDER/VERSION/nccl.h,
and prints the folders. It requests only the 30 KB that it needs of a wheel of 300 MB. It does not fetch a version again
that is already there. If one cannot be fetched, it says so on stderr and returns 1.
"""
import io
import json
import os
import sys
import urllib.request
import zipfile

INDEX = 'https://pypi.org/simple/nvidia-nccl-cu12/'


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return answer.read()


class Remote(io.RawIOBase):
    """A file on a server that supports range requests."""

    def __init__(self, url, size):
        self.url, self.size, self.at = url, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer):
        last = min(self.at + len(buffer), self.size) - 1
        data = fetch(self.url, Range=f'bytes={self.at}-{last}') if self.at <= last else b''
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)


def wheels():
    """(2, 27, 5): (url, size) of the wheels for x86-64."""
    found = {}
    for file in json.loads(fetch(INDEX, Accept='application/vnd.pypi.simple.v1+json'))['files']:
        name = file['filename'].split('-')
        if file['filename'].endswith('x86_64.whl') and name[1].replace('.', '').isdigit():
            found[tuple(map(int, name[1].split('.')))] = file['url'], file['size']
    return found


def main(folder, versions):
    index = None
    for version in versions:
        path = os.path.join(folder, version)
        try:
            if not os.path.exists(os.path.join(path, 'nccl.h')):
                index = index or wheels()
                wanted = tuple(map(int, version.split('.')))
                newest = max(v for v in index if v[:len(wanted)] == wanted)
                with zipfile.ZipFile(io.BufferedReader(Remote(*index[newest]), 1 << 16)) as wheel:
                    text = wheel.read('nvidia/nccl/include/nccl.h')
                os.makedirs(path, exist_ok=True)
                with open(os.path.join(path, 'nccl.h.new'), 'wb') as file:
                    file.write(text)
                os.replace(os.path.join(path, 'nccl.h.new'), os.path.join(path, 'nccl.h'))
            print(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            print(f'nccl.h of {version}: {error}', file=sys.stderr)
            return 1 # the next versions would take as long to fail
    return 0


if __name__ == '__main__':
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))

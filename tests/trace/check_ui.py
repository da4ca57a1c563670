#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Opens a trace in the Perfetto UI, in a headless Chromium, and checks that the UI shows its rows.

    python3 tests/trace/fetch_perfetto.py --ui build/perfetto_ui
    python3 tests/trace/check_ui.py build/perfetto_ui TRACE [PICTURE.png]

CHROMIUM names the browser (default: chromium on PATH). The UI is served from the folder; nothing else is fetched. Rows
of processes are opened, so that those of threads appear.
"""
import base64
import functools
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import check_trace

SECONDS = 20


class Handler(http.server.SimpleHTTPRequestHandler):
    trace = None

    def do_GET(self):
        if self.path != '/the_trace':
            super().do_GET()
            return
        content = pathlib.Path(self.trace).read_bytes()
        self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


class Browser:
    """Speaks the DevTools protocol through pipes: messages are JSON, ended by a zero byte."""

    def __init__(self, chromium, profile):
        there, self.out = os.pipe()
        self.into, back = os.pipe()

        def pipes():  # the browser reads from 3 and writes to 4
            os.dup2(there, 1003), os.dup2(back, 1004)
            os.dup2(1003, 3), os.dup2(1004, 4)
            os.set_inheritable(3, True), os.set_inheritable(4, True)

        self.process = subprocess.Popen(
            [chromium, '--headless=new', '--no-sandbox', '--disable-gpu', '--remote-debugging-pipe',
             f'--user-data-dir={profile}', '--window-size=1500,1000', 'about:blank'], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes)
        os.close(there), os.close(back)
        self.number, self.rest, self.session = 0, b'', None

    def call(self, method, **params):
        self.number += 1
        message = {'id': self.number, 'method': method, 'params': params}
        if self.session:
            message['sessionId'] = self.session
        os.write(self.out, json.dumps(message).encode() + b'\0')
        while True:
            text, found, self.rest = self.rest.partition(b'\0')
            if not found:
                more = os.read(self.into, 1 << 20)
                if not more:
                    raise RuntimeError('the browser has ended')
                self.rest = text + more
                continue
            answer = json.loads(text)
            if answer.get('id') == self.number:
                if 'error' in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer['result']

    def open(self, url):
        target = self.call('Target.createTarget', url=url)['targetId']
        self.session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']

    def run(self, script):
        return self.call('Runtime.evaluate', expression=script, returnByValue=True)['result'].get('value')

    def close(self):
        self.process.terminate()
        self.process.wait(20)


# Opens the rows of all processes with the icon above them, and returns what the page shows.
SHOW = """(() => {
    const icon = [...document.querySelectorAll('i')].find(i => i.innerText === 'unfold_more');
    if (icon) icon.closest('button').click();
    return document.body.innerText;
})()"""


def titles(path):
    events = check_trace.load(path)
    return {e['args']['name'] for e in events if e.get('ph') == 'M' and e['name'] == 'thread_name'}


def check(browser, path):
    """Waits until all rows are there and drawn."""
    want, shown, until = titles(path), '', time.monotonic() + SECONDS
    while time.monotonic() < until:
        shown = browser.run(SHOW) or ''
        missing = [title for title in want if title not in shown]
        if not missing and want and 'Loading...' not in shown:
            return []
        time.sleep(0.5)
    missing = missing or ['all drawn']
    return [f'the UI shows no row "{title}"' for title in sorted(missing)] + [' / '.join(shown.split('\n'))[:2000]]


def main():
    chromium = os.environ.get('CHROMIUM') or shutil.which('chromium')
    if len(sys.argv) not in (3, 4) or sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    if not chromium:
        print('check_ui.py: no chromium', file=sys.stderr)
        return 2
    Handler.trace = sys.argv[2]
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=sys.argv[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f'http://127.0.0.1:{server.server_port}'
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(chromium, profile)
        try:
            browser.open(f'{home}/#!/?url={home}/the_trace')
            faults = check(browser, sys.argv[2])
            if len(sys.argv) == 4:
                picture = browser.call('Page.captureScreenshot')['data']
                pathlib.Path(sys.argv[3]).write_bytes(base64.b64decode(picture))
        finally:
            browser.close()
    for fault in faults:
        print(fault)
    print(f'{sys.argv[2]}: {len(titles(sys.argv[2]))} rows, {"FAILED" if faults else "all shown by the Perfetto UI"}')
    return 1 if faults else 0


if __name__ == '__main__':
    sys.exit(main())

"""Ends a run of pytest-xdist in which no test ends any more, with the stacks of all processes.

A test that hangs in a library's own code is reached by no signal, and a worker that hangs between two tests by no
timeout of a test: without this, such a run lasts until somebody ends it, and does not say where it was.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time

import psutil
import pytest

LIMIT_S = 720.0  # longer than any test of `make test` may take
COLLECTION_S = 240.0  # what may pass before the first test starts, besides
STACKS_S = 2.0  # for a process to print its stacks


def listen() -> None:
    """Let this process print the stacks of its threads when `Watch` asks for them; call it before a test runs."""
    stderr = os.dup(2)  # of the process: a test's is captured
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)


class Watch:
    """A plugin of the process that gives tests out to workers.

    Args:
        limit_s: how long nothing may end.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._failed = 0
        self._running: set[str] = set()
        self._last = time.monotonic() + COLLECTION_S
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="stall", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._last = time.monotonic()
        self._failed += report.failed

    def pytest_unconfigure(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(5.0, self._limit_s / 4)):
            if time.monotonic() - self._last > self._limit_s:
                self._end()

    def _end(self) -> None:
        listen()
        workers = psutil.Process().children()
        for process in (*workers, psutil.Process()):
            print(f"\nStacks of process {process.pid}:", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)
        print(f"\nRunning: {', '.join(sorted(self._running)) or 'no test'}")
        print(f"Stalled: no test ended for {self._limit_s:.0f} s; {self._failed} failed before", flush=True)
        for worker in workers:
            for process in (worker, *worker.children(recursive=True)):
                process.kill()
        os._exit(1)

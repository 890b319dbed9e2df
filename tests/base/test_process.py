"""Settings of a process: memory that is used again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FAULTS = """
import resource
import threading
import numpy as np
from llmforge.base import process
process.keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        array = np.zeros(24 << 20, np.uint8)
        array[:] = 1
        del array
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=faults)
faults(), thread.start(), thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again() -> None:
    small = {"NUMPY_MADVISE_HUGEPAGE": "0"}
    once = (24 << 20) // os.sysconf("SC_PAGE_SIZE")
    kept = [int(line) for line in run(FAULTS, **small).split()]
    assert kept[0] < 2 * once
    assert kept[1] < once / 2, "a thread has the memory of another"
    left = [int(line) for line in run(FAULTS, **small, MALLOC_MMAP_THRESHOLD_="1048576").split()]
    assert min(left) > 6 * once, "the user's setting holds"


HEAPS = """
import ctypes
import sys
import threading
from llmforge.base import process
process.share_heaps()
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
allocated = threading.Barrier(9)
def allocate():
    libc.malloc(1 << 16)
    allocated.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
allocated.wait()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[1]).read().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_threads_of_a_server_share_heaps(tmp_path: Path) -> None:
    code = HEAPS.replace("sys.argv[1]", repr(str(tmp_path / "info.xml")))
    assert int(run(code)) <= 2
    assert int(run(code, MALLOC_ARENA_MAX="6")) > 2, "the user's setting holds"

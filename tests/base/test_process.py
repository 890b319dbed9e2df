"""Settings of a process: modules that are imported when they are used, and memory that is used again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from llmforge.base import process


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_deferred_module_is_imported_when_it_is_used() -> None:
    said = run(
        "import sys\n"
        "from llmforge.base import process\n"
        "with process.deferred('sympy'):\n"
        "    import onnx_ir as ir\n"
        "print('sympy' in sys.modules)\n"
        "print((ir.SymbolicDim('max(batch, 2) * 3') + 1).evaluate({'batch': 5}))\n"
        "print('sympy' in sys.modules)\n"
        "import sympy\n"
        "print(ir.SymbolicDim(sympy.Symbol('n') + 1).value, sympy.__file__ is not None)\n"
    )
    assert said.split("\n") == ["False", "16", "True", "n + 1 True"]


def test_a_module_that_is_there_stays_as_it_is() -> None:
    before = sys.modules["json"]
    with process.deferred("json"):
        import json

        assert json is before
    assert sys.modules["json"] is before


def test_a_build_imports_no_sympy() -> None:
    code = "import sys\nfrom llmforge.cli import main\ntry:\n    main()\nfinally:\n    print('sympy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "build", "nowhere.yaml"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


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

"""A run in which a test hangs in C, with the interpreter's lock held, ends by itself and says where it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import stall

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        stall.listen()
    else:
        config.pluginmanager.register(stall.Watch(2.0))
"""
TESTS = """
import ctypes

def test_that_ends():
    pass

def test_that_hangs():
    mutex, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
"""


@pytest.mark.thorough
def test_a_run_that_stalls_ends_with_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(Path(__file__).parents[1])))
    (tmp_path / "test_two.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "1", "--timeout", "1", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Running: test_two.py::test_that_hangs\n" in done.stdout
    assert "\nStalled: no test ended for 2 s; 0 failed before\n" in done.stdout
    assert 'test_two.py", line 10 in test_that_hangs' in done.stderr

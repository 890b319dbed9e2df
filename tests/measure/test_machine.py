"""What a process says of its own memory."""

import subprocess
import sys

import pytest

PARENT_BYTES = 1 << 30
CHILD = """\
import resource
from llmforge.measure import machine
print(machine.peak_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
PARENT = f"""\
import subprocess, sys
held = bytearray(b"x") * {PARENT_BYTES}
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hand the maximum on")
def test_the_largest_memory_of_a_process_is_not_that_of_the_one_that_launched_it() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own, handed_on = map(int, done.stdout.split())
    assert 10 << 20 < own < PARENT_BYTES / 2
    assert handed_on > PARENT_BYTES, "ru_maxrss survives exec: it would be no test"

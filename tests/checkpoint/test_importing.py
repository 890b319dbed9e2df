"""Threads that come to transformers at the same time, as a build and the proof of its trace do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

THREADS = """
import sys, threading, time
from pathlib import Path
from llmforge.checkpoint import Checkpoint
first = threading.Thread(target=lambda: __import__("transformers"))
first.start()
while "transformers" not in sys.modules:
    time.sleep(0.001)
assert first.is_alive()
print(Checkpoint.open(Path(sys.argv[1])).config.model_type)
"""


@pytest.mark.thorough
def test_a_configuration_is_read_while_another_thread_imports_transformers(sample_checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, sample_checkpoint], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "llama\n"

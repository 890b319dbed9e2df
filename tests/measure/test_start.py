"""A start of an engine in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmforge.base.errors import RunFailed
from llmforge.measure import start

from ..samples.small_artifact import publish_small


def test_load_time_and_peak_memory_are_those_of_another_process(tmp_path: Path, sample_checkpoint: Path) -> None:
    made = publish_small(tmp_path, sample_checkpoint)
    ballast = bytearray(b"x" * (300 << 20))  # which a figure of this process would hold
    found = start.measure(made.path, threads=1, batch=2, prompt_tokens=8, output_tokens=4)
    assert 0 < found.load_ms < 60_000
    assert 20 << 20 < found.peak_host_bytes < len(ballast)
    assert found.peak_device_bytes is None


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"a start of the engine ended with 1: .*runtime\.json is missing"):
        start.measure(tmp_path, threads=1, batch=1, prompt_tokens=8, output_tokens=4)

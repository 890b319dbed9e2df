"""benchmarks/soak.py: many short requests, some of which leave, hurry or read slowly; nothing lost or mixed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..samples.small_artifact import publish_small

ROOT = Path(__file__).resolve().parents[2]


def soak(artifact: Path, *options: str, timeout: int) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), str(artifact), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_300_requests(tmp_path: Path, sample_checkpoint: Path) -> None:
    small = publish_small(tmp_path, sample_checkpoint)
    result = soak(small.path, "--requests", "300", timeout=120)
    ends = result["ends"]
    assert result["problems"] == 0
    assert sum(count for end, count in ends.items() if end != "refused") == 300
    assert ends["length"] > 150
    assert ends["left"] > 10
    assert ends["refused"] > 0


def test_a_wrong_answer_is_found(tmp_path: Path, sample_checkpoint: Path) -> None:
    small = publish_small(tmp_path, sample_checkpoint)
    code = (
        "import runpy, sys; from llmforge.serving import engine\n"
        "stream = engine.Engine.stream\n"
        "engine.Engine.stream = lambda self, asked: stream(self, type(asked)((7, *asked.prompt), asked.sampling))\n"
        "sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks" / "soak.py"), str(small.path), "--requests", "40"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] > 20
    assert "; alone: " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_10_000_requests_on_the_sample_checkpoint(tmp_path: Path) -> None:
    code = "from llmforge.cli import main; main()"
    recipe = ROOT / "recipes" / "fp32.yaml"
    command = [sys.executable, "-c", code, "build", str(recipe), "--out", str(tmp_path), "--quiet"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    result = soak(Path(built.stdout.splitlines()[-1]), "--requests", "10000", timeout=900)
    assert result["problems"] == 0
    assert sum(count for end, count in result["ends"].items() if end != "refused") == 10_000
    assert result["growth_mib"] < 16

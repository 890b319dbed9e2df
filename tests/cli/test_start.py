"""What a command imports before it does anything: its time to start, counted in modules and not in seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = str(ROOT / "tests/data/docs-llama-7m")
HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "jinja2"}


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], {*HEAVY, "numpy", "pydantic", "rich", "importlib.metadata", "tomllib"}),
        (["build", "--help"], {*HEAVY, "numpy", "pydantic", "rich"}),
        (["--version"], {*HEAVY, "numpy", "pydantic", "rich"}),
        (["plan", CHECKPOINT, "--target", "l4"], HEAVY),
    ],
)
def test_a_command_imports_nothing_that_it_does_not_need(arguments: list[str], unwanted: set[str]) -> None:
    script = f"""
import sys
from llmforge.cli import cli
try:
    cli({arguments!r})
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert unwanted & set(done.stderr.split()) == set()

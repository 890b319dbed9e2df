"""benchmarks/soak_serve.py: a server as users start it, requests of every kind, attacks, and stops under load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ...models import tool_templates
from ...samples.small_artifact import publish_small

pytest.importorskip("llguidance")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_nothing_is_lost_or_mixed_up_and_nothing_is_left(tmp_path: Path, sample_checkpoint: Path) -> None:
    shutil.copytree(sample_checkpoint, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "chat_template.jinja").write_text(tool_templates.HERMES)
    small = publish_small(tmp_path / "artifacts", tmp_path / "checkpoint", eos=(0,), context=1024)
    command = [sys.executable, str(ROOT / "benchmarks" / "soak_serve.py"), str(small.path)]
    done = subprocess.run(
        [*command, "--requests", "500", "--greedy", "100", "--stops", "2"],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["problems"], result["greedy_that_differ"], result["stops"]) == (0, 0, 2)
    ends = result["ends"]
    assert sum(count for end, count in ends.items() if end.startswith("attack: ")) > 10
    assert min(ends["length"], ends["stop"], ends["tool_calls"], ends["left"]) > 10

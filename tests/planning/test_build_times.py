"""A plan of the sample, and its build: CPU time within a factor of 1.5, whatever the machine (a minute: slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def cpu_seconds(*arguments: object) -> tuple[float, str]:
    """Run the command line: CPU time of it and its children, and what it printed."""
    command = [sys.executable, "-m", "llmforge", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime, printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_build_takes_what_the_plan_says(tmp_path: Path) -> None:
    plan = json.loads(cpu_seconds("plan", QUICKSTART, "--target", "cpu-avx512-vnni", "--json")[1])
    took, _ = cpu_seconds("build", QUICKSTART, "--no-cache", "--quiet", "--out", tmp_path)
    assert 1 / 1.5 < plan["build"]["cpu_s"] / took < 1.5, (plan["build"], took)

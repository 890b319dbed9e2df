"""docs/first-hour.md: from the installed wheel, in an empty folder, what a new user types and sees (minutes: slow)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release import wheels

from .models import smollm2

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")


def transcript() -> list[tuple[str, list[str]]]:
    """List the commands, each with the lines that are shown beneath it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line:
                found[-1][1].append(line)
    return found


def test_the_first_hour_goes_from_a_checkpoint_to_triton() -> None:
    shown = [command.split()[1] for command, _ in transcript() if command.startswith("llmforge ")]
    assert shown == ["doctor", "init", "plan", "build", "run", "gate", "triton"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_transcript_is_what_the_wheel_prints(tmp_path: Path) -> None:
    """Figures differ between machines: a line must be there with other digits."""
    wheels.build(wheels.copy_source(tmp_path / "source"), tmp_path / "dist")
    [wheel] = (tmp_path / "dist").glob("*.whl")
    site, home = tmp_path / "site", tmp_path / "home"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, timeout=120)
    shutil.rmtree(tmp_path / "source")
    shutil.copytree(smollm2.checkpoint(), home / "model")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llmforge"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmforge "$@"\n')
    program.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LLMFORGE")}
    environ |= {"PYTHONPATH": str(site), "PATH": f"{program.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(home)}
    code = "import llmforge; print(llmforge.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=home, env=environ, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(site)
    for line, shown in transcript():
        if not line.startswith("llmforge "):
            continue
        done = subprocess.run(
            line, shell=True, cwd=home, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said = [_less_figures(each) for each in f"{done.stdout}\n{done.stderr}".splitlines()]
        for each in shown:
            assert each == "…" or any(_less_figures(each) in other for other in said), (line, each, done.stdout)
    assert (home / "models" / "model" / "config.pbtxt").is_file()
    assert not list(home.rglob("*.part"))


def _less_figures(line: str) -> str:
    """Reduce a line to its words: figures, hashes, units and the padding between them vary."""
    words = re.sub(r"[0-9a-f]{12}|[\d.,]+", "#", line)
    return re.sub(r"\b(ns|µs|ms|s|min|[kMG]?B)\b", "u", re.sub(r"[\s─━═]+", " ", words)).strip()

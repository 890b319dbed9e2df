"""docs/tutorial.md: its commands, run in their order in an empty folder (minutes: slow)."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .models import smollm2

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def commands() -> list[tuple[list[str], list[str]]]:
    """List the commands, each with the lines that are shown beneath it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ llmforge "):
                found.append((shlex.split(line.removeprefix("$ llmforge ")), []))
            else:
                found[-1][1].append(line)
    return found


def test_the_tutorial_shows_the_way() -> None:
    shown = [words[0] for words, _ in commands()]
    assert shown == [
        "inspect",
        "init",
        "plan",
        "build",
        "ls",
        "run",
        "gate",
        "tag",
        "build",
        "gate",
        "verify",
        "triton",
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_does_what_is_shown(tmp_path: Path) -> None:
    shutil.copytree(smollm2.checkpoint(), tmp_path / "model")
    [gates] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "gates.yaml").write_text(gates)
    for words, shown in commands():
        done = subprocess.run(
            [sys.executable, "-m", "llmforge", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        fails = any(line.startswith("FAIL") for line in shown)
        assert done.returncode == (3 if fails else 0), (words, done.stdout, done.stderr)
        for line in shown:
            if line in ("…", "") or "…" in line or re.search(r"\d", line):
                continue  # figures and versions differ between machines
            assert line.strip() in done.stdout, (words, line)
        if fails:
            assert done.stdout.startswith("FAIL")

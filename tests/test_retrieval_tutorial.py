"""docs/retrieval.md: its way from a question to an answer, run from the root of the checkout (minutes: slow)."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "retrieval.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## From a question to an answer\n")[2].partition("\n## ")[0]


def test_the_section_is_there() -> None:
    assert SECTION.count("```python") == 1
    assert [line.split()[2] for line in SECTION.splitlines() if line.startswith("$ ")] == ["build"] * 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_passages_are_found_and_a_chat_model_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "LLMFORGE_ARTIFACTS": str(tmp_path)}
    for line in SECTION.splitlines():
        if line.startswith("$ llmforge "):
            words = shlex.split(line.removeprefix("$ llmforge "))
            done = subprocess.run(
                [sys.executable, "-m", "llmforge", *words],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
    [code] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *passages, answer = done.stdout.strip().split("\n\n")[:4]
    assert len(passages) == 3
    assert any("checkpoint" in each.lower() for each in passages)
    assert answer

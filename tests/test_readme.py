"""The README shows what is there: the recipe unchanged, commands and files that exist."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from llmforge.base import errors, signals
from llmforge.cli import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_recipe_shown_is_the_one_that_quickstart_builds() -> None:
    assert (ROOT / "recipes/quickstart.yaml").read_text(encoding="utf-8").strip() in README


def test_every_command_is_shown_and_every_one_shown_exists() -> None:
    assert set(re.findall(r"`llmforge ([a-z-]+)", README)) == set(cli.commands)


def test_every_recipe_is_listed() -> None:
    assert set(re.findall(r"\| `(recipes/\S+\.yaml)`", README)) == {
        f"recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")
    }


def test_every_file_named_exists() -> None:
    named = re.findall(r"`((?:docs|benchmarks|recipes|tests)/[\w./-]+)`", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    assert {"quickstart", "test"} <= named
    assert [name for name in named if f"\n{name}:" not in makefile] == []


def test_every_exit_code_is_documented_and_no_other() -> None:
    classes = [errors.ForgeError]
    for each in classes:
        classes += each.__subclasses__()
    ends = {
        0,
        *(each.exit_code for each in classes),
        *(128 + number for number in signals.ENDING),
        128 + signal.SIGPIPE,
    }
    table = (ROOT / "docs/limits.md").read_text(encoding="utf-8").partition("## Exit codes")[2].partition("\n## ")[0]
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert listed == sorted(ends)
    line = next(line for line in README.splitlines() if line.startswith("Exit codes: "))
    assert sorted(map(int, re.findall(r"(?:: |· )(\d+) ", line))) == sorted(ends)

"""The README shows what is there: the recipe as it stands, commands and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

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

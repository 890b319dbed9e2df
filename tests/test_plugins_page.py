"""docs/plugins.md: the code that it quotes is the sample's, and what it says to import is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from llmforge.base import plugins

from .samples.plugin_packages import SAMPLE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
QUOTED = dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
IMPORTED = [
    (module, name.partition(" as ")[0])
    for module, names in re.findall(r"^from (\S+) import (.+)$", PAGE.partition("## What to import")[2], re.MULTILINE)
    for name in names.split(", ")
]


def test_it_quotes_the_sample_as_it_is() -> None:
    for path, text in QUOTED.items():
        assert text == (ROOT / path).read_text(encoding="utf-8"), path
    files = {str(file.relative_to(ROOT)) for file in SAMPLE.rglob("*") if file.suffix in (".py", ".toml", ".yaml")}
    assert all(file.endswith("__init__.py") for file in files - set(QUOTED))


def test_the_sample_imports_what_the_page_lists() -> None:
    lines = [line for file in SAMPLE.rglob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    found = [re.fullmatch(r"from (llmforge\.\S+) import (.+)", line) for line in lines]
    used = {(line[1], name) for line in found if line for name in line[2].split(", ")}
    assert used
    of_tables = {(f"{module}.{name}", "MatMul") for module, name in IMPORTED if module == "llmforge.ir.operators"}
    assert used <= {*IMPORTED, *of_tables}


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_it_names_every_group(kind: str) -> None:
    assert f"`llmforge.v{plugins.INTERFACE}.{kind}`" in PAGE


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_what_it_says_to_import_is_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")

"""Words that the project has retired: identifiers, and phrases of prose that say less than the field's terms do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Identifier → what it is called now.
IDENTIFIERS = {
    "Ahead": "Prequantizer",
    "DoorKeeper": "AuthMiddleware",
    "Doors": "AccessPolicy",
    "Doorway": "ServerState",
    "Heads": "TopLogits",
    "NotHeld": "UnrepresentableCodes",
    "Places": "PositionTracer",
    "Untaken": "SkippedCodes",
    "_behind": "next_rows",
    "_close_gap": "compact_slots",
    "_go_on": "continuing_rows",
    "brought": "plugins_used",
    "foresee": "precompute_reference",
    "give_heads": "add_topk_outputs",
    "heat": "temperatures",
    "judge_tokens": "verified_tokens",
    "keeping": "mixed_precision_recipe",
    "known_as": "catalog_name",
    "lanes": "worker pool",
    "left_out": "unused_modules",
    "makes_keys": "key_projection",
    "renewed": "requantized",
    "stand_in": "fake or proxy, whichever it is",
    "standouts": "outlier_tests",
    "worth_it": "checkpointable",
}
# Phrase of a docstring, a comment or a page → what says it.
PHRASES = {
    r"lets? go of": "release, releases",
    r"\bat hand\b": "available, here",
    r"\bas (?:they|it) stands?\b": "unchanged",
}
_PHRASE = re.compile("|".join(PHRASES))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sources() -> list[Path]:
    rooms = (ROOT / room for room in ("llmforge", "passes", "targets", "tests", "benchmarks", "release"))
    files = (path for room in rooms for path in sorted(room.rglob("*.py")) if path != Path(__file__).resolve())
    return [path for path in files if not any(parent.is_symlink() for parent in path.parents)]


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a file defines, takes, imports and uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (other or "", *name.split("."))
            case ast.ImportFrom(module=str(name)):
                yield from name.split(".")


def retired(text: str) -> list[str]:
    """List the retired words of a Python file, each as often as it occurs."""
    found = [name for name in identifiers(ast.parse(text)) if name in IDENTIFIERS]
    return found + [match[0] for match in _PHRASE.finditer(" ".join(text.split()))]


def test_sources_have_none() -> None:
    found = {str(path.relative_to(ROOT)): words for path in sources() if (words := retired(path.read_text("utf-8")))}
    assert found == {}, {word: IDENTIFIERS.get(word) for words in found.values() for word in words}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_have_none(path: Path) -> None:
    assert _PHRASE.findall(" ".join(path.read_text(encoding="utf-8").split())) == []


def test_what_it_looks_for_is_found() -> None:
    text = "def give_heads(a):\n    '''It lets\n    go of it.'''\n    return heat(a.left_out)\n"
    assert sorted(retired(text)) == ["give_heads", "heat", "left_out", "lets go of"]

"""Names of modules, functions and files in docstrings, comments and pages are of what exists."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from llmforge.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    **{name: name for name in ("llmforge", "tests", "benchmarks", "release")},
    **{name: f"llmforge.{name}" for name in ("passes", "targets", "recipes")},
}
ROOMS = {path.name for path in (ROOT / "llmforge").iterdir() if path.is_dir()}
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
METHOD = re.compile(r"`([A-Z]\w+)\.([a-z_]\w*)(?:\([^`]*\))?`")
OURS = re.compile(r"(?<![\w./:@-])llmforge(?:\.[a-z_]\w*)+")
_END = r"[\w./-]*\.(?:py|c|h|md|yaml|json|jsonl|html|toml|txt)"
_TOP = r"(?:llmforge|passes|targets|recipes|tests|benchmarks)"
FILE = re.compile(rf"`([\w.-]+/{_END})`|(?<![\w/.`-])({_TOP}/{_END})(?!\.?\w)")
SUFFIXES = {"py", "c", "h", "so", "md", "yaml", "json", "jsonl", "html", "toml", "txt", "jinja", "onnx", "sig", "model",
            "pem", "tar", "gguf", "safetensors"}  # fmt: skip
# First words of dotted names that are none of ours: operator domains, events of a profiler, keys of GGUF, parameters.
OTHERS = {"com", "ep", "general", "tokenizer", "a", "onnxruntime_genai"}


def module_of(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(part for part in rest if part != "__init__")])


MODULES: Mapping[str, Path] = {module_of(path): path for path in SOURCES}


@cache
def names(path: Path) -> frozenset[str]:
    """List what a file defines, imports, takes and uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found |= {other or name.split(".")[0], name.split(".")[-1]}
    return frozenset(found)


@cache
def strings() -> frozenset[str]:
    """List the strings in the package that begin as a module of ours does: domains of operators, keys of metadata."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCES if "tests" not in path.parts)
    return frozenset(found for text in texts for found in re.findall(r'"(llmforge\.[\w.]+)"', text))


@cache
def imported() -> frozenset[str]:
    """List the packages of others that sources import, and those of Python."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    found = {name for text in texts for name in re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)}
    return frozenset(found - {"llmforge", "tests", "benchmarks"}) | sys.stdlib_module_names


@cache
def classes() -> Mapping[str, frozenset[Path]]:
    """Map each class to the files that define one called so."""
    found: dict[str, frozenset[Path]] = {}
    for path in SOURCES:
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = found.get(name, frozenset()) | {path}
    return found


def prose(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a source, or the text of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield text
    else:
        yield from re.findall(r'"""(.*?)"""', text, re.DOTALL)
        yield from re.findall(r"(?:^ *|  )# (.*)$", text, re.MULTILINE)


def is_ours(name: str) -> bool:
    """Say if `llmforge.….…` is a module, something in one, or a string of the package."""
    if name in strings() or name.startswith("llmforge.v2."):  # groups of entry points
        return True
    module = name
    while module not in MODULES:
        module = module.rpartition(".")[0]
    return module == name or name.removeprefix(module).split(".")[1] in names(MODULES[module])


def exists(name: str, where: Path) -> bool:
    """Say if a dotted name of lower case begins with a module, with something known in `where`, or with a key."""
    parts = name.split(".")
    known = parts[0] in names(where) | Recipe.model_fields.keys() | OTHERS | imported()
    for count in range(len(parts), 0, -1):
        dotted = "." + ".".join(parts[:count])
        if found := [path for module, path in MODULES.items() if f".{module}".endswith(dotted)]:
            named = count == len(parts) or any(parts[count] in names(path) for path in found)
            return named or (count == 1 and known)
    return known


def unknown(path: Path) -> Iterator[str]:
    """Yield the names in a file that are of nothing."""
    for text in prose(path):
        yield from (name for name in OURS.findall(text) if name.split(".")[-1] not in SUFFIXES and not is_ours(name))
        for file in map("".join, FILE.findall(text)):
            first, top = file.split("/")[0], {*PACKAGES, "docs"}
            there = ROOT / file if first in top else ROOT / "llmforge" / file
            of_artifact = first not in top and there.suffix != ".py"
            if first in {*top, *ROOMS} and not of_artifact and "NAME" not in file and not there.exists():
                yield file
        if path.suffix == ".md":
            continue
        for name in DOTTED.findall(text):
            if re.search(r"[A-Z]{2}|\.\d", name):  # NAME, a key with a number
                continue
            if name.split(".")[-1] not in SUFFIXES and not name.startswith("llmforge.") and not exists(name, path):
                yield name
        for kind, name in METHOD.findall(text):
            if kind in classes() and not any(name in names(file) for file in classes()[kind]):
                yield f"{kind}.{name}"


@pytest.mark.parametrize("folder", [*PACKAGES, "docs"])
def test_names_are_of_what_exists(folder: str) -> None:
    paths = PAGES if folder == "docs" else [path for path in SOURCES if path.relative_to(ROOT).parts[0] == folder]
    assert paths
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := [*unknown(path)])} == {}


@pytest.mark.parametrize(
    "text",
    [
        "`nowhere.complete`", "llmforge.ir.nowhere", "`llmforge.ir.graph.nothing`", "`passes/nothing.py`",
        "`base/nothing.py`", "tests/nothing.py", "`small_file.nothing`", "`Recipe.nothing`",
    ],
)  # fmt: skip
def test_a_name_of_nothing_is_noticed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(f'"""See {text}."""\n')
    assert len([*unknown(file)]) == 1

"""Counts of how the package is built: `python -m benchmarks.house [FOLDER]…`; `house.sh` compares revisions.

Sizes of files, functions and signatures, names that occur twice, circles of files, and words that the project has
retired (`tests/test_words.py`).
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.test_words import retired

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("llmforge", "passes", "targets", "recipes")
LONG = 60  # lines of a function
MANY = 8  # arguments


@dataclass
class House:
    """What was counted of the sources in a folder."""

    lines: int = 0
    files: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    arguments: list[tuple[int, str]] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    widths: list[int] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    circles: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> House:
        """Count the sources below `root`."""
        house, imports = cls(), {}
        trees = {module_of(path, root): (path, ast.parse(path.read_text(encoding="utf-8"))) for path in sources(root)}
        for module, (path, tree) in trees.items():
            house._count(path.relative_to(root), path.read_text(encoding="utf-8"), tree)
            imports[module] = {each for each in imported(tree, trees) if each not in (module, "llmforge")}
        house.circles = [circle for circle in circles(imports) if len(circle) > 1]
        return house

    def _count(self, path: Path, text: str, tree: ast.Module) -> None:
        lines = text.splitlines()
        self.lines += len(lines)
        self.files.append((len(lines), str(path)))
        self.widths += [len(line) for line in lines if line.strip()]
        self.retired += [f"{path}: {word}" for word in retired(text)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                where = f"{path}: {node.name}"
                self.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, where))
                self.arguments.append((len(names) - (names[:1] in (["self"], ["cls"])), where))
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name].append(str(path))

    def row(self) -> list[tuple[str, str]]:
        """Give each figure by its name."""
        twice = [name for name, places in self.classes.items() if len(places) > 1]
        return [
            ("lines", f"{self.lines}"),
            ("files", f"{len(self.files)}"),
            ("largest file", f"{max(self.files)[0]}"),
            (f"functions > {LONG} lines", f"{sum(size > LONG for size, _ in self.functions)}"),
            (f"functions > {MANY} arguments", f"{sum(count > MANY for count, _ in self.arguments)}"),
            ("class names that occur twice", f"{len(twice)}"),
            ("circles of files", f"{len(self.circles)}"),
            ("retired words", f"{len(self.retired)}"),
            (
                "lines of pipeline.py",
                f"{next((size for size, name in self.files if name.endswith('/pipeline.py')), 0)}",
            ),
            ("lines of a function, median", f"{statistics.median(size for size, _ in self.functions):g}"),
            ("width of a line, mean", f"{statistics.mean(self.widths):.1f}"),
        ]

    def details(self) -> Iterator[str]:
        """Name what the counts above count."""
        yield from (f"{size} lines: {name}" for size, name in sorted(self.files, reverse=True)[:5])
        yield from (f"{size} lines: {where}" for size, where in sorted(self.functions, reverse=True) if size > LONG)
        yield from (f"{n} arguments: {where}" for n, where in sorted(self.arguments, reverse=True) if n > MANY)
        yield from (f"class {name}: {', '.join(at)}" for name, at in sorted(self.classes.items()) if len(at) > 1)
        yield from (f"circle: {' → '.join(circle)}" for circle in self.circles)
        yield from self.retired


def sources(root: Path) -> list[Path]:
    """List the Python files of the product; links lead to rooms that are counted themselves."""
    found = []
    for room in ROOMS:
        found += [path for path in sorted((root / room).rglob("*.py")) if not _linked(path, root)]
    return found


def _linked(path: Path, root: Path) -> bool:
    return any(parent.is_symlink() for parent in (path, *path.parents) if root in parent.parents)


def module_of(path: Path, root: Path) -> str:
    """Name the module that a file is."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "llmforge" else ("llmforge", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """Yield those of `modules` that a file imports, anywhere in it, if only for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                name = f"{node.module}.{each.name}"
                if (found := name if name in modules else node.module) in modules:
                    yield found
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Find the strongly connected components (Tarjan 1972) of the import graph."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT], help="checkouts, one column each")
    parser.add_argument("--details", action="store_true", help="name what is counted, of the last one")
    arguments = parser.parse_args()
    houses = [House.of(folder.resolve()) for folder in arguments.folders]
    for figures in zip(*(house.row() for house in houses), strict=True):
        print(f"{figures[0][0]:32}" + "".join(f"{value:>12}" for _, value in figures))
    if arguments.details:
        print(*houses[-1].details(), sep="\n")


if __name__ == "__main__":
    main()

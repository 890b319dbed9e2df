"""Digests of the code in this package that computes something: a module, and what it imports inside the package.

A module that is named in an import counts, and so on from there; imports for type checkers alone do not. The
`__init__.py` of a package that is passed through on the way to a module runs, so that its text counts; what it imports
counts only where a name is taken from it. So a method is part of what quantizes weights, and not of every pass that
knows what a demand on calibration is. Compiled libraries in the folder of a package count with it.

Code of plug-ins counts likewise (llmforge.base.plugins): what a module of one imports, of its own distribution and of
this package. All files beside it that are no Python count, too, since it may read them; and all its modules, where
one looks for others at run time.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from llmforge.base.plugins import Package
from llmforge.cache import distributions

_PACKAGE = Path(__file__).parents[1]
Named = tuple[tuple[str, tuple[str, ...]], ...]  # modules, and what is taken of each: nothing of `import`
_AT_RUNTIME = frozenset({"importlib", "pkgutil", "runpy"})  # import what no statement names
_BLOCKS = "body", "orelse", "finalbody", "handlers", "cases"  # where a statement holds others


@dataclass(frozen=True)
class Code:
    """The modules of the package in folder `root`, which is called as the folder is."""

    root: Path = _PACKAGE
    _imports: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)
    _parsed: dict[str, Named] = field(default_factory=dict, repr=False)  # by SHA-256 of a text
    _digests: dict[Path, str] = field(default_factory=dict, repr=False)
    _found: dict[str, Path | None] = field(default_factory=dict, repr=False)  # files of modules
    _compiled: dict[Path, tuple[Path, ...]] = field(default_factory=dict, repr=False)  # by the folder of a package
    _homes: dict[str, tuple[Path, ...]] = field(default_factory=dict, repr=False)  # of packages of plug-ins

    def digest(self, *modules: str) -> str:
        """Hash the text of `modules` and of everything inside the package that they import, directly or not."""
        reached = self.modules(*modules)
        files = {file for module in reached for file in self._files(module)}
        named = {self._named_file(file): file for file in files}
        tops = sorted({module.partition(".")[0] for module in reached} - {self.root.name})
        for top in tops:
            named |= self._outside(top, everything=any(self._looks_for_modules(each, top) for each in reached))
        lines = [f"{name} {self._hash(named[name])}\n" for name in sorted(named)]
        for package in sorted({package for top in tops if (package := distributions.of_module(top)) is not None}):
            lines.append(f"{package} {sorted(distributions.requirements(package).items())}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def digest_of(self, package: Package) -> str:
        """Hash all files of a distribution with plug-ins."""
        tops = sorted(top for top, whose in distributions.tops().items() if whose == package)
        named = {name: file for top in tops for name, file in self._outside(top, everything=True).items()}
        return hashlib.sha256("".join(f"{n} {self._hash(named[n])}\n" for n in sorted(named)).encode()).hexdigest()

    def _named_file(self, file: Path) -> str:
        """Name a file by the package that it is in, wherever that lies."""
        if file.is_relative_to(self.root):
            return str(file.relative_to(self.root))
        home = next(folder for folders in self._homes.values() for folder in folders if file.is_relative_to(folder))
        return f"{home.name}/{file.relative_to(home).as_posix()}"

    def _outside(self, top: str, *, everything: bool) -> dict[str, Path]:
        """List the files below a top-level package of a plug-in: all, or those that are no Python, by name."""
        found = {}
        for home in self._folders(top):
            for file in sorted(home.rglob("*")) if home.is_dir() else [home]:
                kept = file.suffix != ".pyc" and "__pycache__" not in file.parts and file.is_file()
                if kept and (everything or file.suffix != ".py"):
                    found[self._named_file(file)] = file
        return found

    def _folders(self, top: str) -> tuple[Path, ...]:
        if top not in self._homes:
            self._homes[top] = distributions.folders(top) if distributions.of_module(top) is not None else ()
        return self._homes[top]

    def _looks_for_modules(self, module: str, top: str) -> bool:
        """Say whether a module of package `top` imports others that no statement of it names."""
        if module.partition(".")[0] != top or (file := self._file(module)) is None:
            return False
        self._imported(module)
        found = any(named.partition(".")[0] in _AT_RUNTIME for named, _ in self._parsed[self._hash(file)])
        return found or b"__import__" in file.read_bytes()

    @property
    def parsed(self) -> dict[str, Named]:
        """What the texts that were read import, by the SHA-256 of the text: to parse them again takes 0.4 s."""
        return dict(self._parsed)

    def know(self, parsed: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Take what was `parsed` before, by this code, from texts that may have changed since."""
        self._parsed.update(
            {text: tuple((module, tuple(names)) for module, names in read) for text, read in parsed.items()}
        )

    def texts(self) -> str:
        """Hash the text of all modules, whoever imports them."""
        files = sorted(self.root.rglob("*.py"))
        return hashlib.sha256(
            "".join(f"{file.relative_to(self.root)} {self._hash(file)}\n" for file in files).encode()
        ).hexdigest()

    def has(self, module: str) -> bool:
        """Say whether `module` is in the package, or in that of a plug-in."""
        return self._file(module) is not None

    def modules(self, *modules: str) -> frozenset[str]:
        """Name the modules that `digest` reads, but for packages that are only passed through."""
        found: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += self._imported(module)
        return frozenset(found)

    def _files(self, module: str) -> Iterator[Path]:
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            file = self._file(".".join(parts[:count]))
            if file is None and parts[0] != self.root.name and count < len(parts):
                continue  # a namespace
            assert file is not None, f"no module is called {module}"
            yield file
            if file.name == "__init__.py":
                yield from self._libraries(file.parent)

    def _libraries(self, folder: Path) -> tuple[Path, ...]:
        if folder not in self._compiled:
            self._compiled[folder] = tuple(x for suffix in EXTENSION_SUFFIXES for x in folder.glob(f"*{suffix}"))
        return self._compiled[folder]

    def _file(self, module: str) -> Path | None:
        if module not in self._found:
            self._found[module] = self._look_for(module)
        return self._found[module]

    def _look_for(self, module: str) -> Path | None:
        first, *parts = module.split(".")
        for home in (self.root,) if first == self.root.name else self._folders(first):
            if home.is_file():
                return home if not parts and home.suffix == ".py" else None
            folder = home.joinpath(*parts)
            candidates = [folder / "__init__.py", *([folder.with_name(f"{folder.name}.py")] if parts else [])]
            if found := next((file for file in candidates if file.is_file()), None):
                return found
        return None

    def _hash(self, file: Path) -> str:
        if file not in self._digests:
            self._digests[file] = hashlib.sha256(file.read_bytes()).hexdigest()
        return self._digests[file]

    def _imported(self, module: str) -> frozenset[str]:
        if module not in self._imports:
            file = self._file(module)
            assert file is not None, f"no module is called {module}"
            self._imports[module] = frozenset(self._named(file, module))
        return self._imports[module]

    def _named(self, file: Path, own: str) -> Iterator[str]:
        """Name the modules of the package, and of plug-ins, that `file`, the module `own`, imports."""
        text = self._hash(file)
        if text not in self._parsed:
            self._parsed[text] = _imports(file.read_bytes())
        package = own.split(".") if file.name == "__init__.py" else own.split(".")[:-1]
        for written, names in self._parsed[text]:
            module = written.lstrip(".")
            if (level := len(written) - len(module)) > 0:  # relative to the package
                module = ".".join([*package[: len(package) - level + 1], *filter(None, [module])])
            if self._file(module):
                submodules = [f"{module}.{name}" for name in names]
                found = [name for name in submodules if self._file(name)]
                yield from found
                if not names or len(found) < len(submodules):
                    yield module


@cache  # of the process, which may build more than once: to parse all texts takes 0.4 s
def _imports(source: bytes) -> Named:
    """List the modules that a text imports, in functions too, and what it takes of each: nothing of `import`."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for statement in ast.parse(source).body:
        for node in at_runtime(statement):
            if isinstance(node, ast.Import):
                found += ((alias.name, ()) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.append(("." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)))
    return tuple(found)


def at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over the statements of `node`, but for what stands behind `if TYPE_CHECKING`: nothing else imports."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        for other in node.orelse:
            yield from at_runtime(other)
        return
    yield node
    for block in _BLOCKS:
        for child in getattr(node, block, ()):
            yield from at_runtime(child)

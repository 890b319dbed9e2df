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

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from llmforge.base.plugins import Package
from llmforge.cache import distributions

_PACKAGE = Path(__file__).parents[1]
Named = tuple[tuple[str, tuple[str, ...]], ...]  # modules, and what is taken of each: nothing of `import`
_AT_RUNTIME = frozenset({"importlib", "pkgutil", "runpy"})  # import what no statement names
_STATEMENT = re.compile(  # a statement, or one after another on its line: what it takes names of, names; or modules
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import\b[ \t]*(\([^)]*\)|[^\n;(]+)|import[ \t]+([^\n;]+))", re.M
)
_FOR_TYPES = re.compile(rb"^([ \t]*)if TYPE_CHECKING:.*\n(?:\1[ \t]+.*\n|[ \t]*\n)*", re.M)
_COMMENT = re.compile(rb"#.*")


@dataclass(frozen=True)
class Code:
    """The modules of the package in folder `root`, which is called as the folder is."""

    root: Path = _PACKAGE
    _imports: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)
    _read: dict[Path, Named] = field(default_factory=dict, repr=False)  # what files import
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
        found = any(named.partition(".")[0] in _AT_RUNTIME for named, _ in self._statements(file))
        return found or b"__import__" in file.read_bytes()

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

    def _statements(self, file: Path) -> Named:
        if file not in self._read:
            self._read[file] = imports_of(file.read_bytes())
        return self._read[file]

    def _imported(self, module: str) -> frozenset[str]:
        if module not in self._imports:
            file = self._file(module)
            assert file is not None, f"no module is called {module}"
            self._imports[module] = frozenset(self._named(file, module))
        return self._imports[module]

    def _named(self, file: Path, own: str) -> Iterator[str]:
        """Name the modules of the package, and of plug-ins, that `file`, the module `own`, imports."""
        package = own.split(".") if file.name == "__init__.py" else own.split(".")[:-1]
        for written, names in self._statements(file):
            module = written.lstrip(".")
            if (level := len(written) - len(module)) > 0:  # relative to the package
                module = ".".join([*package[: len(package) - level + 1], *filter(None, [module])])
            if self._file(module):
                submodules = [f"{module}.{name}" for name in names]
                found = [name for name in submodules if self._file(name)]
                yield from found
                if not names or len(found) < len(submodules):
                    yield module


def imports_of(source: bytes) -> Named:
    """List the modules that a text imports, in functions too, and what it takes of each: nothing of `import`.

    Statements are found by how they are written, which takes a fiftieth of the time of parsing. A line of a string
    that is written like one counts as well; what stands under `if TYPE_CHECKING:` does not.
    """
    text = _FOR_TYPES.sub(b"", source.replace(b"\\\n", b" "))
    found: list[tuple[str, tuple[str, ...]]] = []
    for taken, names, modules in _STATEMENT.findall(text):
        parts = _COMMENT.sub(b"", names or modules).replace(b"(", b"").replace(b")", b"").split(b",")
        words = tuple(part.split()[0].decode() for part in parts if part.split())
        found += [(taken.decode(), words)] if taken else ((word, ()) for word in words)
    return tuple(found)

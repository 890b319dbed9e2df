"""The source files that a model repository carries: the runtime that was measured is the one that serves."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import llmforge
from llmforge import native
from llmforge.backends import BACKENDS
from llmforge.cache.code import at_runtime

PACKAGE = "llmforge"
# What Triton loads, and what the runtime imports by name: the session of the provider that an engine is for.
ROOTS = (
    "llmforge.triton.backend.model",
    "llmforge.triton.backend.checks",
    "llmforge.serving.engine_worker",  # which `engine_process` starts
    "llmforge.backends.ranks.worker",  # which `ranks.session` starts
    *(each.session for backend in BACKENDS.values() if backend.export_format is None for each in backend.providers),
)
_FOLDER = Path(llmforge.__file__).parent
_PARSED: dict[str, tuple[str, ...]] = {}


def shipped(*, kernels: bool | None = False) -> dict[str, Path]:
    """List what `ROOTS` import of llmforge, themselves included, directly or not: path in the repository → file.

    Imports anywhere in a file count, those inside functions too. A package comes with its `__init__`. With `kernels`,
    so does the compiled library of llmforge's own operators; None: if there is one here.

    Raises:
        EnvironmentLacks: there is no such library here.
    """
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        file = _file(waiting.pop())
        if file is None or (path := Path(PACKAGE, file.relative_to(_FOLDER)).as_posix()) in found:
            continue
        found[path] = file
        waiting += _imported(file)
        waiting += [".".join((PACKAGE, *parent.parts)) for parent in file.relative_to(_FOLDER).parents]
    library = native.require() if kernels else native.library() if kernels is None else None
    if library is not None:
        found[Path(PACKAGE, library.relative_to(_FOLDER)).as_posix()] = library
    return dict(sorted(found.items()))


def _file(module: str) -> Path | None:
    """Find the file of a module of llmforge; None for a name that is none, such as a function's."""
    base = _FOLDER.joinpath(*module.split(".")[1:])
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


def parsed() -> dict[str, tuple[str, ...]]:
    """Return what the texts that this process read import, by the SHA-256 of the text."""
    return dict(_PARSED)


def know(read: Mapping[str, Sequence[str]]) -> None:
    """Take what another process `parsed`: to parse the texts again takes an eighth of a second."""
    _PARSED.update({text: tuple(names) for text, names in read.items()})


def _imported(file: Path) -> tuple[str, ...]:
    """List the names under llmforge that a file imports: modules, and what might be one."""
    content = file.read_bytes()
    text = hashlib.sha256(content).hexdigest()
    if text not in _PARSED:
        _PARSED[text] = tuple(_walk(file, content.decode()))
    return _PARSED[text]


def _walk(file: Path, text: str) -> Iterator[str]:
    for node in (each for statement in ast.parse(text).body for each in at_runtime(statement)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name == PACKAGE or name.startswith(PACKAGE + "."))

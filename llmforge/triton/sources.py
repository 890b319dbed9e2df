"""The source files that a model repository carries: the runtime that was measured is the one that serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import llmforge
from llmforge import native
from llmforge.backends import BACKENDS
from llmforge.cache.code import imports_of

PACKAGE = "llmforge"
# What Triton loads, and what the runtime imports by name: the session of the provider that an engine is for.
ROOTS = (
    "llmforge.triton.backend.model",
    "llmforge.triton.backend.checks",
    "llmforge.serving.engine_worker",  # which `engine_process` starts
    "llmforge.backends.ranks.worker",  # which `ranks.session` starts
    *(each.session for backend in BACKENDS.values() if backend.export_format is None for each in backend.providers),
)
# The same of an embedder or a reranker.
ENCODER_ROOTS = ("llmforge.triton.backend.encoder_model", "llmforge.triton.backend.checks")
_FOLDER = Path(llmforge.__file__).parent


def shipped(roots: Sequence[str] = ROOTS, *, kernels: bool | None = False) -> dict[str, Path]:
    """List what `roots` import of llmforge, themselves included, directly or not: path in the repository → file.

    Imports anywhere in a file count, those inside functions too. A package comes with its `__init__`. With `kernels`,
    so does the compiled library of llmforge's own operators; None: if there is one here.

    Raises:
        EnvironmentLacks: there is no such library here.
    """
    found: dict[str, Path] = {}
    waiting = list(roots)
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


def _imported(file: Path) -> Iterator[str]:
    """List the names under llmforge that a file imports: modules, and what might be one."""
    for module, taken in imports_of(file.read_bytes()):
        assert not module.startswith("."), f"{file}: a relative import"
        names = [module, *(f"{module}.{name}" for name in taken)]
        yield from (name for name in names if name == PACKAGE or name.startswith(PACKAGE + "."))

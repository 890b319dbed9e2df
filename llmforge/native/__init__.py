"""Compiled CPU kernels: custom operators of ONNX Runtime in the domain `llmforge.cpu` (docs/cpu-kernels.md).

The library is built from the C sources beside this file when llmforge is installed with a C compiler. It holds
the kernels for several instruction sets and picks those of the processor that it runs on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmforge.base.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    import onnxruntime as ort

DOMAIN = "llmforge.cpu"
VERSION = 10  # of the operators and of the layout of their weights; operators.c has it, too
# versions whose engines run: 5 had no minima, 6 no outliers, 7 no encoders, 8 no plain GELU, 9 no trellis of 5 bits
READS = (5, 6, 7, 8, 9, 10)
# From the one that runs everywhere to the fastest; `neon` has dot products and is the only one for ARM.
INSTRUCTION_SETS = ("generic", "avx2", "avx512vnni", "avx512bf16", "neon")
L = TypeVar("L", bound=ctypes.CDLL)


@cache
def library() -> Path | None:
    """Find the compiled library; None where llmforge was installed without one."""
    folder = Path(__file__).parent
    candidates = (folder / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def require() -> Path:
    """Return the compiled library.

    Raises:
        EnvironmentLacks: llmforge was installed without one, or it was compiled from other sources.
    """
    path = library()
    if path is None:
        raise EnvironmentLacks(
            f"the CPU kernels of llmforge ({DOMAIN}) are not compiled in this installation",
            hint="install a C compiler (gcc or clang), then install llmforge again",
        )
    _require_current(path)
    return path


@cache
def _require_current(path: Path) -> None:
    """Refuse a library of other operators than this package builds engines for (EnvironmentLacks)."""
    compiled = getattr(ctypes.CDLL(str(path)), "llmforge_version", int)()
    if compiled != VERSION:
        found = f"version {compiled}" if compiled else "an older version"
        raise EnvironmentLacks(
            f"{path.name} was compiled from other sources: it has {found} of the CPU kernels, llmforge {VERSION}",
            hint="install llmforge again",
        )


def functions(signatures: Mapping[str, tuple[Sequence[Any], Any]], loader: type[L]) -> L | None:
    """Load the library for some of its functions, `llmforge_…`: types of arguments, and of what each gives; None: none.

    Raises:
        EnvironmentLacks: it was compiled from other sources.
    """
    path = library()
    if path is None:
        return None
    try:
        loaded = loader(str(path))
        for name, (taken, given) in signatures.items():
            function = getattr(loaded, f"llmforge_{name}")
            function.argtypes, function.restype = taken, given
    except AttributeError as error:
        hint = "install llmforge again"
        raise EnvironmentLacks(f"{path.name} was compiled from other sources: {error}", hint=hint) from None
    except OSError:  # of another kind of processor: a copy of the runtime was carried there
        return None
    return loaded


def register(options: ort.SessionOptions) -> None:
    """Make the operators known to sessions with `options`, where they are compiled.

    Raises:
        EnvironmentLacks: they were compiled from other sources.
    """
    path = library()
    if path is not None:
        _require_current(path)
        options.register_custom_ops_library(str(path))


def instruction_set(name: str | None = None) -> str:
    """Make every session of this process use the kernels of an instruction set (None: the best); return its name.

    Raises:
        EnvironmentLacks: there is no library.
        UsageError: there is no such instruction set, or this processor lacks it.
    """
    choose = ctypes.CDLL(str(require())).llmforge_kernels
    choose.restype, choose.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    chosen = choose(None if name is None else name.encode())
    if chosen is None:
        raise UsageError(
            f"this processor cannot run the CPU kernels for {name!r}",
            hint=f"choose one it supports: {', '.join(INSTRUCTION_SETS)}",
        )
    return str(chosen.decode())

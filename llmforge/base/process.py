"""Settings of the process that numpy and torch read when they are imported, and never again."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CORE = "Haswell"  # OpenBLAS's kernels for AVX2 and FMA
_NEEDED = {"avx2", "fma"}


def prepare() -> None:
    """Set what a build wants of numpy and torch, where the user has not; call it before either is imported.

    Their threads would spin at barriers, which makes a build whose cores are shared up to ten times slower (512 tokens
    of the sample checkpoint in torch: 1.3 s against 0.16 s). And OpenBLAS would choose its kernels by the processor:
    those for AVX2 run on all of them, and round alike.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")  # numpy: spin for 2**8 cycles, not 2**26
    if _NEEDED.issubset(cpu_flags()):
        os.environ.setdefault("OPENBLAS_CORETYPE", CORE)


@contextmanager
def unwatched() -> Iterator[None]:
    """Import without the garbage collector, which walks over all modules again and again: a fifth of the time.

    What was imported stays, and is not walked over later either.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Do what makes many small objects, and drops few of them, without the garbage collector in between."""
    watched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if watched:
            gc.enable()


def import_whole(module: str) -> None:
    """Import a module that puts another in its place while it is imported, as transformers does, beside other threads.

    `from transformers import …` in a second thread waits for the import in the first, and then takes the names from the
    module that it found before, which lacks them. importlib looks again when it has waited.
    """
    importlib.import_module(module)


def cpu_flags() -> frozenset[str]:
    """List the features of this processor by their names in /proc/cpuinfo; none where there is no such file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())

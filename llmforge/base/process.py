"""Settings of the process that numpy and torch read when they are imported, and never again."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CORE = "Haswell"  # OpenBLAS's kernels for AVX2 and FMA
_NEEDED = {"avx2", "fma"}
# Of glibc's mallopt (malloc.h), and what a build sets them to: arrays up to 256 MB come out of one heap, of whose freed
# end 512 MB are kept.
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_OF_BUILDS = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 1 << 28, _TRIM_THRESHOLD: 1 << 29}
_OF_SERVERS = {_ARENA_MAX: 2}
_YOUNG = 10_000
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
_SET_BY_USER = "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"


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


def collect_rarely() -> None:
    """Look for garbage in cycles after 10,000 new objects, not 700: graphs are many small objects that stay.

    And do not look for any at the end of the process, a third of a second.
    """
    gc.set_threshold(_YOUNG)
    atexit.register(gc.freeze)


def keep_freed_memory() -> None:
    """Let arrays take the memory of earlier ones: the system fills each new page with zeros, a seventh of a build.

    Of itself glibc gives arrays back that are larger than those it saw freed before, and what threads free, each in a
    heap of its own. Nothing is done where the user has set one of these, or the C library is another.
    """
    _set_malloc(_OF_BUILDS)


def share_heaps() -> None:
    """Let the threads of a server share two heaps; call it before they start.

    Of itself glibc gives each its own, and what one has freed no other gets: 10,000 requests of 32 clients left 470 MB
    to a server in place of 165 (`benchmarks/soak_serve.py`). Nothing is done where `keep_freed_memory` does nothing.
    """
    _set_malloc(_OF_SERVERS)


def _set_malloc(options: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _SET_BY_USER):
        for option, value in options.items():
            mallopt(option, value)


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
    """Import a module that puts another in its place meanwhile, as transformers does, while other threads run.

    `from transformers import …` in a second thread waits for the import in the first, and then takes the names from the
    module that it found before, which lacks them. importlib looks again when it has waited.
    """
    importlib.import_module(module)


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends in any way, where it can (Linux: prctl(2)).

    A parent that has ended before is not noticed: compare `os.getppid` afterwards.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_flags() -> frozenset[str]:
    """List the features of this processor by their names in /proc/cpuinfo; none where there is no such file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())

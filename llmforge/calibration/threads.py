"""The threads of every product that decides a code: as many as the recipe says, whatever the machine has.

BLAS splits a product by threads, and another split rounds its last bits differently: Hessians, their factors and the
products that choose codes, the hidden states and the ranges that are measured on them. Rounding to nearest multiplies
nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from numpy._core import _multiarray_umath  # type: ignore[attr-defined]  # private: links numpy's BLAS


@dataclass(frozen=True)
class OpenBlas:
    """The OpenBLAS inside numpy's wheels; threads are a setting of the whole process."""

    library: ctypes.CDLL

    @property
    def threads(self) -> int:
        """How many threads it computes on."""
        return int(self.library.scipy_openblas_get_num_threads64_())

    @property
    def core(self) -> str:
        """The processor whose kernels it runs."""
        name = self.library.scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        return str(name().decode())

    def use(self, threads: int) -> None:
        """Compute on `threads` threads from now on."""
        self.library.scipy_openblas_set_num_threads64_(threads)


@cache
def openblas() -> OpenBlas | None:
    """Find numpy's OpenBLAS; None where numpy was built with another BLAS, whose threads are left alone."""
    library = ctypes.CDLL(_multiarray_umath.__file__)
    return OpenBlas(library) if hasattr(library, "scipy_openblas_set_num_threads64_") else None


@contextmanager
def fixed(threads: int) -> Iterator[None]:
    """Compute on `threads` threads, in torch and in numpy, and give the process its own settings back."""
    from llmforge.trace.hooks.internals import torch_threads  # here, because it imports torch

    blas = openblas()
    before = None if blas is None else blas.threads
    with torch_threads(threads):
        if blas is not None:
            blas.use(threads)
        try:
            yield
        finally:
            if blas is not None and before is not None:
                blas.use(before)

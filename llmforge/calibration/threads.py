"""The threads of every product that decides a code: as many as the recipe says, whatever the machine has.

BLAS splits a product by threads, and another split rounds its last bits differently: Hessians, their factors and the
products that choose codes, the hidden states and the ranges that are measured on them. Rounding to nearest multiplies
nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

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


@cache
def has_bf16() -> bool:
    """Say whether the processor multiplies bf16 faster than fp32, and sums in fp32."""
    import torch

    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("bf16"))


@contextmanager
def fixed(threads: int) -> Iterator[None]:
    """Compute on `threads` threads, in torch and in numpy, and give the process its own settings back.

    Products of fp32 tensors are oneDNN's. Torch's own are MKL's, which on AMD's processors uses half of their vectors:
    [512, 1024]·[1024, 3072] on two cores of an EPYC (Zen 5) runs at 170 GFLOP/s there, at 430 here, and as precisely.
    Only where a processor multiplies tiles of bf16 (AMX) does oneDNN round factors to bf16; sums stay fp32.
    """
    import torch

    from llmforge.trace.hooks.internals import torch_threads  # here, because it imports torch

    blas = openblas()
    before = None if blas is None else blas.threads
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # untyped in torch
    precision = products.fp32_precision
    with torch_threads(threads):
        if blas is not None:
            blas.use(threads)
        products.fp32_precision = "bf16"
        try:
            yield
        finally:
            products.fp32_precision = precision
            if blas is not None and before is not None:
                blas.use(before)


@dataclass(frozen=True, eq=False)
class WindowMap:
    """A `map` over windows, on several threads, results in order; without threads it is the builtin.

    Any thread of `shared` takes the next window; of `own`, each takes always the same ones.
    """

    shared: ThreadPoolExecutor | None = None
    own: Sequence[ThreadPoolExecutor] = ()

    @property
    def threads(self) -> int:
        """How many windows are computed at once."""
        return max(1, len(self.own))

    def __call__(self, compute: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """Compute each window on whichever thread is free."""
        if self.shared is None:
            return map(compute, *arguments)
        return _results([self.shared.submit(compute, *given) for given in zip(*arguments, strict=True)])

    def bound(self, compute: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """Compute the i-th item of all calls on one thread."""
        if not self.own:
            return map(compute, *arguments)
        items = enumerate(zip(*arguments, strict=True))
        return _results([self.own[place % self.threads].submit(compute, *given) for place, given in items])


IN_ORDER = WindowMap()


def _results(futures: list[Future[Any]]) -> Iterator[Any]:
    """Yield results in order, and hold none that was yielded; what still runs where one failed runs to its end."""
    futures.reverse()
    try:
        while futures:
            yield futures.pop().result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


@contextmanager
def over_windows(threads: int) -> Iterator[WindowMap]:
    """Yield a map over windows on as many threads, on each of which torch computes alone.

    What is computed of a window is the same whatever their number. Products of 512 tokens on two threads at once wait
    for each other at their ends, and leave what is between them to one.
    """
    with ExitStack() as stack:
        shared, *own = (
            stack.enter_context(ThreadPoolExecutor(count, initializer=compute_alone))
            for count in [threads] + [1] * threads
        )
        yield WindowMap(shared, own)


def compute_alone() -> None:
    """Let torch compute on the calling thread alone, and make no gradients; other threads go on as they do."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

"""Where the time of a served step goes: ranges of NVTX over steps, sampling and copies, and their times on the host.

`nsys profile --trace=cuda,nvtx python -m benchmarks.verify_gpu --step profile` shows them beside the device's kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any


class Ranges:
    """Times named parts of the program while `watch` is open; each is an NVTX range where the package nvtx is."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        try:
            self._nvtx: Any = importlib.import_module("nvtx")
        except ImportError:
            self._nvtx = None

    @property
    def marked(self) -> bool:
        """Whether ranges are marked for a profiler."""
        return self._nvtx is not None

    @contextlib.contextmanager
    def watch(self, parts: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
        """Time what `parts` name: part → objects or classes, and the method of each."""
        with contextlib.ExitStack() as undo:
            for name, methods in parts.items():
                for owner, method in methods:
                    original = getattr(owner, method)
                    own = method in vars(owner)
                    setattr(owner, method, self._timed(name, original))
                    undo.callback(setattr if own else _restore, owner, method, original)
            yield

    def table(self) -> dict[str, dict[str, float]]:
        """Give calls, their sum in seconds, and the median of one."""
        return {
            name: {"calls": len(times), "total_s": sum(times), "median_s": statistics.median(times)}
            for name, times in self.seconds.items()
        }

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        times = self.seconds[name]

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            marked = contextlib.nullcontext() if self._nvtx is None else self._nvtx.annotate(name)
            start = time.perf_counter()
            with marked:
                try:
                    return work(*args, **kwargs)
                finally:
                    times.append(time.perf_counter() - start)

        return run


def _restore(owner: Any, method: str, _: Any) -> None:
    delattr(owner, method)

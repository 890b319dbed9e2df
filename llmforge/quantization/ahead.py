"""Matrices that are quantized before a pass asks for them: a core that waits for a trace has nothing else to do.

What will be asked for is a guess, and harmless: a result is looked up by the tensor of the checkpoint that it is made
of, the method and the grid, and one that nobody asks for is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmforge.base import mapped
from llmforge.quantization.grids import Grid, QuantizedMatrix, pack
from llmforge.quantization.methods.base import Method

LIMIT_BYTES = 320 << 20  # of results that wait: the codes of 600 million weights of 4 bits
_TILE_BYTES = 1 << 20  # of codes, a byte each: what is made of them is made while they are in the processor's caches

Parts = dict[str, NDArray[np.generic]]  # of a matrix in the layout of MatMulNBits: codes, scales, zero_points


@dataclass(frozen=True, eq=False)
class Task:
    """A matrix [N, K] as it is stored, `read` when its turn comes, and what is expected to be made of it."""

    read: Callable[[], NDArray[Any]]
    method: Method
    grid: Grid

    @property
    def is_by_row(self) -> bool:
        """Whether the rows can be quantized and packed each on its own."""
        return self.method.by_row and self.grid.portable

    def run(self) -> Parts | None:
        """Quantize the matrix; None where the method refuses its numbers, which the pass then says."""
        weight = self.read()
        n, k = weight.shape
        rows = max(1, _TILE_BYTES // max(k, 1))
        made: Parts = {}
        for at in range(0, n, rows):
            try:
                tile = laid_out(self.method.quantize(weight[at : at + rows], self.grid))
            except ValueError:
                return None
            for name, part in tile.items():
                if name not in made:
                    made[name] = np.empty((n, *part.shape[1:]), part.dtype)
                made[name][at : at + rows] = part
        mapped.forget(weight)
        return made


def laid_out(matrix: QuantizedMatrix) -> Parts:
    """Lay out a matrix on a portable grid as its initializers are."""
    packed = pack(matrix)
    scales = packed.scales.astype(np.float16) if matrix.grid.scale == "fp16" else packed.scales
    made: Parts = {"codes": packed.codes, "scales": scales}
    return made if packed.zero_points is None else {**made, "zero_points": packed.zero_points}


class Ahead:
    """Quantizes in a thread of its own, in the order of the tasks; leaving the block drops what is left.

    At most `limit_bytes` of results wait to be taken: tasks whose turn comes then are left to who asks.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pool = ThreadPoolExecutor(1, "rounds-ahead")
        self._tasks: dict[str, tuple[Task, Future[Parts | None]]] = {}
        self._waiting_bytes = 0
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        self._pool.shutdown()

    def begin(self, tasks: Mapping[str, Task], behind: Future[Any] | None = None) -> None:
        """Begin with `tasks`, each under the name of the tensor that it reads, when what is `behind` has ended."""
        if behind is not None:
            self._pool.submit(wait, [behind])
        wanted = {name: task for name, task in tasks.items() if task.is_by_row and name not in self._tasks}
        self._tasks |= {name: (task, self._pool.submit(self._run, task)) for name, task in wanted.items()}

    def drop(self) -> None:
        """Forget what was not asked for, and do not begin with more."""
        for _, future in self._tasks.values():
            future.cancel()
        self._tasks.clear()

    def take(self, names: Sequence[str], method: Method, grid: Grid) -> Parts | None:
        """Give what `method` makes on `grid` of some tensors on top of each other, once; None: it was not expected.

        Of the tensors whose turn has not come, it is made here.
        """
        if any(name not in self._tasks for name in names):
            return None
        if any(self._tasks[name][0].method != method or self._tasks[name][0].grid != grid for name in names):
            return None
        made = [self._take(*self._tasks.pop(name)) for name in names]
        found = [parts for parts in made if parts is not None]
        if len(found) < len(made):
            return None
        if len(found) == 1:
            return found[0]
        return {part: np.concatenate([each[part] for each in found]) for part in found[0]}

    def _take(self, task: Task, future: Future[Parts | None]) -> Parts | None:
        if future.cancel() or (made := future.result()) is None:
            return task.run()
        with self._turn:
            self._waiting_bytes -= _size(made)
        return made

    def _run(self, task: Task) -> Parts | None:
        if self._waiting_bytes >= self._limit_bytes:
            return None
        made = task.run()
        if made is not None:
            with self._turn:
                self._waiting_bytes += _size(made)
        return made


def _size(parts: Parts) -> int:
    return sum(part.nbytes for part in parts.values())

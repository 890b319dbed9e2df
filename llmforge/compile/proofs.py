"""Proofs that run beside what the build does next.

A proof computes outside of the interpreter for most of its time, and nothing of a build depends on what it finds: only
its publication does, which waits for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from llmforge.base import resources
from llmforge.base.progress import Progress

T = TypeVar("T")
FINISH = "Finish proofs"  # the stage in which a build waits for them
_AT_ONCE = 4  # that of the trace, that of the engine, and the graphs before and after a lossy pass


class Proof(Generic[T]):
    """What a proof finds, once it has ended."""

    def __init__(self, found: T | Future[T]) -> None:
        self._found = found

    def result(self) -> T:
        """Wait for the end, and return what was found, or raise what refused it."""
        return self._found.result() if isinstance(self._found, Future) else self._found


class Proofs:
    """Runs proofs in threads of their own; leaving the block waits for those that run, and drops the others."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE, "proofs")
        self._line = ThreadPoolExecutor(1, "proofs-in-turn")
        self._begun: list[Future[Any]] = []
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._line.shutdown()  # what runs there may wait for what runs in the other
        self._pool.shutdown()

    def begin(self, held: AbstractContextManager[object], prove: Callable[[], T], *, in_turn: bool = False) -> Proof[T]:
        """Run `prove` when its turn comes; `held` is left when it has ended, or is dropped.

        Of those that run `in_turn`, each runs when the one before it has ended.
        """

        def run() -> T:
            with held:
                if self._stopped.is_set():
                    raise _Dropped
                return prove()

        future = (self._line if in_turn else self._pool).submit(run)
        self._begun.append(future)
        return Proof(future)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Where what is done inside fails, wait for the proofs: one that fails is the reason, as `finish` raises it.

        A pass, or an engine, that stumbles over a graph which an earlier pass spoiled is not the one to be named.
        """
        try:
            yield
        except Exception as error:
            if resources.explain(error) is None:  # nor is a pass, where a disk is full
                self.finish()
            raise

    def beside(self, compute: Callable[[], object]) -> None:
        """Compute what a proof that is begun later will want; what that raises, the proof will raise again."""

        def run() -> None:
            if not self._stopped.is_set():
                compute()

        self._pool.submit(run)

    def finish(self, progress: Progress | None = None) -> None:
        """Wait for all of them; `progress` is told, where there is something to wait for.

        Raises:
            Exception: what the first one that failed, in the order in which they were begun, raised.
        """
        if progress is not None and not all(future.done() for future in self._begun):
            progress.stage(FINISH)
        for future in self._begun:
            future.result()


class _Dropped(Exception):
    """The build ended before."""

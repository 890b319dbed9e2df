"""The scheduler of a build: what runs concurrently with its stages.

Three things do, and nothing else of a build knows of it. The *frontend* is a process that imports torch and traces,
where the build needs torch for nothing else. The *weights* of the checkpoint are read and hashed in a thread. *Proofs*
run in threads: each computes outside of the interpreter for most of its time, and nothing of a build depends on what it
finds but its publication, which waits for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from llmforge.base import resources
from llmforge.base.progress import Progress, Silent
from llmforge.compile.frontend import Frontend

if TYPE_CHECKING:  # the frontend is started before this process imports anything else
    from llmforge.checkpoint import Checkpoint
    from llmforge.checkpoint.adapters import AdapterSource
    from llmforge.recipe import Recipe
    from llmforge.rewrite.pass_base import Pass

T = TypeVar("T")
FINISH = "Finish proofs"  # the stage in which a build waits for them
_AT_ONCE = 4  # that of the trace, that of the engine, and the graphs before and after a lossy pass


class PendingProof(Generic[T]):
    """What a proof finds, once it has ended."""

    def __init__(self, found: T | Future[T]) -> None:
        self._found = found

    def result(self) -> T:
        """Wait for the end, and return what was found, or raise what refused it."""
        return self._found.result() if isinstance(self._found, Future) else self._found


class ProofPool:
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

    def begin(
        self, held: AbstractContextManager[object], prove: Callable[[], T], *, in_turn: bool = False
    ) -> PendingProof[T]:
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
        return PendingProof(future)

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

    def prepare(self, compute: Callable[[], object]) -> None:
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


class WeightReader:
    """Runs `Checkpoint.verify` in a thread of its own; leaving the block stops it at the next chunk of the file."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "read-weights")
        self._stopped = threading.Event()
        self._running: Future[str] | None = None
        self._shown: Progress = Silent()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def begin(self, folder: Path, adapters: Sequence[AdapterSource] = (), reranker: str | None = None) -> Checkpoint:
        """Open a checkpoint and begin to read it; what is wrong with the weights is said by `finish`.

        Raises:
            CheckpointError: as `Checkpoint.located`.
        """
        from llmforge.checkpoint import Checkpoint

        checkpoint = Checkpoint.located(folder, adapters, reranker)
        self._running = self._pool.submit(checkpoint.verify, self)
        return checkpoint

    def finish(self, progress: Progress) -> None:
        """Wait for the end, which `progress` is told about from now on.

        Raises:
            CheckpointError: as `Checkpoint.verify`.
        """
        assert self._running is not None
        self._shown = progress
        self._running.result()

    def stage(self, title: str) -> None:
        """Ignore: it has no stages."""

    def advance(self, done: int, total: int) -> None:
        """Hand on how far it is, in bytes, once somebody waits for it; end it where nobody does any more."""
        if self._stopped.is_set():
            raise _Dropped
        self._shown.advance(done, total)


class Overlap:
    """All that runs concurrently with the stages of one build; leaving the block, which may be nested, ends it."""

    def __init__(self) -> None:
        self.frontend = Frontend()
        self.weights = WeightReader()
        self.proofs = ProofPool()
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        for each in (self.frontend, self.weights, self.proofs):
            self._entered.enter_context(each)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def start(self) -> None:
        """Start the frontend for a build that finds nothing in a cache, before its recipe is read."""
        self.frontend.start()

    def chosen_frontend(self, recipe: Recipe, steps: Sequence[Pass] = (), *, measure: bool = True) -> Frontend | None:
        """Return the process that traces; None, and it is ended: this one imports torch anyway."""
        if not Frontend.is_loaded() and Frontend.serves(recipe, steps, measure=measure):
            return self.frontend
        self.frontend.end()
        return None


class _Dropped(Exception):
    """The build ended before."""

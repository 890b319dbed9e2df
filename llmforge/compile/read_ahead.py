"""Walk over the weights of a checkpoint while the model is traced, which reads none of them and uses one core."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from llmforge.base.progress import Progress, Silent
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource

if TYPE_CHECKING:  # a walk begins before these are imported
    from llmforge.quantization.ahead import Ahead, Task
    from llmforge.rewrite.pass_base import Pass


class ReadAhead:
    """Runs `Checkpoint.verify` in a thread of its own; leaving the block stops it at the next chunk of the file."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._stopped = threading.Event()
        self._running: Future[str] | None = None
        self._shown: Progress = Silent()
        self._checkpoint: Checkpoint | None = None
        self._others = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._others.close()
        self._pool.shutdown()

    def begin(self, folder: Path, adapters: Sequence[AdapterSource] = ()) -> Checkpoint:
        """Start to read a checkpoint, once; what is wrong with the weights is said by `finish`.

        Raises:
            CheckpointError: as `Checkpoint.located`.
        """
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.located(folder, adapters)
            self._running = self._pool.submit(self._checkpoint.verify, self)
        return self._checkpoint

    @cached_property
    def quantized(self) -> Ahead:
        """What passes are expected to ask for, quantized in another thread."""
        from llmforge.quantization.ahead import Ahead

        return self._others.enter_context(Ahead())

    def quantize(self, checkpoint: Checkpoint, steps: Sequence[Pass]) -> None:
        """Begin with what `steps` are expected to make of the checkpoint, once the walk has ended.

        Whoever traces would have to share a core with one of two.
        """
        self.quantized.begin(dict(_tasks(checkpoint, steps)), behind=self._running)

    def finish(self, progress: Progress) -> None:
        """Wait for the end of the walk, which `progress` is told about from now on.

        Raises:
            CheckpointError: as `Checkpoint.verify`.
        """
        assert self._running is not None
        self._shown = progress
        self._running.result()

    def stage(self, title: str) -> None:
        """Ignore: the walk has no stages."""

    def advance(self, done: int, total: int) -> None:
        """Hand on how far it is, in bytes, once somebody waits for it; end it where nobody does any more."""
        if self._stopped.is_set():
            raise _StoppedEarly
        self._shown.advance(done, total)


def _tasks(checkpoint: Checkpoint, steps: Sequence[Pass]) -> Iterator[tuple[str, Task]]:
    """Make a task of each matrix of the checkpoint, in the order of its bytes, that one of `steps` is to quantize."""
    from llmforge.quantization.ahead import Task

    for entry in sorted(checkpoint.tensors.values(), key=lambda entry: (entry.file, entry.offset)):
        if len(entry.shape) != 2:
            continue
        n, k = entry.shape
        table = n == checkpoint.settings.get("vocab_size")
        expected = next((found for step in steps if (found := step.expects(entry.name, k, table=table))), None)
        if expected is not None:
            yield entry.name, Task(partial(_read, checkpoint, entry.name), *expected)


def _read(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    return checkpoint.tensor(name).numpy()


class _StoppedEarly(Exception):
    """The build ended before the checkpoint was read."""

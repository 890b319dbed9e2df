"""Walk over the weights of a checkpoint while the model is traced, which reads none of them and uses one core."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from llmforge.base.progress import Progress, Silent
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource


class ReadAhead:
    """Runs `Checkpoint.verify` in a thread of its own; leaving the block stops it at the next chunk of the file."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._stopped = threading.Event()
        self._running: Future[str] | None = None
        self._shown: Progress = Silent()
        self._checkpoint: Checkpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
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


class _StoppedEarly(Exception):
    """The build ended before the checkpoint was read."""

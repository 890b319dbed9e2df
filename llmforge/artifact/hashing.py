"""Large files of an artifact, hashed and put on disk while the build goes on with something else."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from llmforge.base import hashed_files

_Status = tuple[int, int, int, int]


class Hashing:
    """Hashes files that are written whole, each in a thread of its own; leaving the block waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(3, "hashes")  # some wait for the disk
        self._begun: dict[Path, tuple[_Status, Future[str]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, file: Path) -> None:
        """Begin to hash `file`, and to put it on disk."""
        self._begun[file] = _status(file), self._pool.submit(hashed_files.sha256, file)
        self._pool.submit(_sync, file)

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 of `file`, once it is there; what was written after `begin`, or never begun, is hashed."""
        if file in self._begun:
            status, digest = self._begun[file]
            found = digest.result()
            if status == _status(file):
                return found
        return hashed_files.sha256(file)


def _status(file: Path) -> _Status:
    status = file.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sync(file: Path) -> None:
    """Put the bytes of `file` on disk; who publishes does so again, and is told then where that fails."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())

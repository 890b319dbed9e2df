"""Files of an artifact, hashed and put on disk as soon as each is whole, while the build goes on with something else.

What is hashed here is what is proven and measured, so that a file that changes after that, or comes after that, is
refused: its seal would tell of something else than its evidence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from llmforge.artifact import sealed
from llmforge.base import hashed_files
from llmforge.base.errors import VerificationError

_Status = tuple[int, int, int, int]
_HINT = "build again; if it happens again, look for what writes there while a build runs"


class Hashing:
    """Hashes the files of `folder` that are whole, each in a thread of its own; leaving the block waits for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(3, "hashes")  # some wait for the disk
        self._begun: dict[Path, tuple[_Status, Future[tuple[str, _Status]]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, file: Path) -> None:
        """Begin to hash `file`, which nothing writes to any more, and to put it on disk; it becomes read-only."""
        file.chmod(sealed.MODE)
        self._begun[file] = _status(file), self._pool.submit(_hash, file)
        self._pool.submit(_sync, file)

    def begin_content(self) -> None:
        """Begin with all content that is there and was not begun; no more of it is written."""
        self._begin(lambda path: not path.startswith("."))  # hidden folders do not stay

    def begin_evidence(self) -> None:
        """Begin with the evidence, of which no more is written but its record."""
        self._begin(lambda path: not path.startswith(".") and not sealed.is_content(path))

    def _begin(self, of: Callable[[str], bool]) -> None:
        for path in filter(of, sorted(sealed.walk(self._folder))):
            if self._folder / path not in self._begun:
                self.begin(self._folder / path)

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 that `file` had when it was begun, once it is known.

        Raises:
            VerificationError: it is another file by now, or came after all were begun.
        """
        if file not in self._begun:
            raise self._refused(file, "was written")
        return self._same(file, file)

    def require_unchanged(self, folder: Path) -> None:
        """Compare the content that was begun with that in `folder`: the one that it was written to, or its new name.

        Evidence is left out: its record lists the hashes that its files had, and it may move when it is published.

        Raises:
            VerificationError: a file is another one, is missing, or came since.
        """
        for file in self._begun:
            if sealed.is_content(path := file.relative_to(self._folder).as_posix()):
                self._same(file, folder / path)
        for path in sealed.walk(folder):
            if sealed.is_content(path) and self._folder / path not in self._begun:
                raise self._refused(self._folder / path, "was written")

    def _same(self, file: Path, place: Path) -> str:
        """Return the SHA-256 of a file that lies at `place` now."""
        begun, hashed = self._begun[file]
        try:
            digest, behind = hashed.result()
            found = _status(place)
        except FileNotFoundError as error:
            raise self._refused(file, "was removed") from error
        # What moves its change time alone may be a link to it, or a change that hides: its bytes tell.
        is_same = found == begun or (found[:-1] == begun[:-1] and hashed_files.sha256(place) == digest)
        if behind != begun or not is_same:
            raise self._refused(file, "was changed")
        return digest

    def _refused(self, file: Path, what: str) -> VerificationError:
        return VerificationError(
            f"{file.relative_to(self._folder)}: {what} after the build had written the artifact: what was proven and "
            "measured is not what would be published",
            hint=_HINT,
        )


def _hash(file: Path) -> tuple[str, _Status]:
    """Hash a file, and say what it was behind that."""
    return hashed_files.sha256(file), _status(file)


def _status(file: Path) -> _Status:
    status = file.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sync(file: Path) -> None:
    """Put the bytes of `file` on disk; who publishes does so again, and is told then where that fails."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())

"""Standard streams that whoever started the command has closed: `llmforge passes >&-`."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class OutputClosed(OSError):
    """Standard output is closed."""


def replace_closed() -> None:
    """Put something in the place of each standard stream that is closed; call it before any file is opened.

    Else the next file that is opened would get its number, and with it what is meant for the stream. Standard input
    has nothing to read, and stays None for Python; a write to standard output raises `OutputClosed`, since its data
    would be lost in silence; what standard error is told nobody wants to know.
    """
    if sys.stdin is None:
        _null(os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = _text(_Closed(_null(os.O_RDONLY), "w", closefd=False))
    if sys.stderr is None:
        sys.stderr = _text(io.FileIO(_null(os.O_WRONLY), "w", closefd=False))


def drop(stream: TextIO) -> None:
    """Send what is left in a stream that cannot be written nowhere; Python would complain of it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Closed(io.FileIO):
    """A file that cannot be written, until `drop`."""

    def write(self, data: Any) -> int:
        """Say that it cannot."""
        try:
            return super().write(data)
        except OSError as error:
            raise OutputClosed(error.errno, error.strerror) from None


def _null(mode: int) -> int:
    """Open the null device under the lowest number that is free, for processes that are started, too."""
    descriptor = os.open(os.devnull, mode)
    os.set_inheritable(descriptor, True)
    return descriptor


def _text(raw: io.FileIO) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)

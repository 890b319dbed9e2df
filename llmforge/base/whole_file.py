"""Writes files that are there whole or not at all: who reads one at that moment sees the one before, or this one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path


def write(file: Path, make: Callable[[Path], object]) -> None:
    """Have `make` write a file under another name, and give it its own; its folder is made where it is not there.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        make(partial)
        partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

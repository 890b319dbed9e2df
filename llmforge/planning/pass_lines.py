"""Passes as lines of a recipe that is written for people."""

from __future__ import annotations

from collections.abc import Iterator

_LINE = 110  # characters of a pass and its reason on one line


def of_pass(line: str, reason: str | None) -> Iterator[str]:
    """Write a pass with its reason behind it, or above it where both are too long for one line."""
    if reason and ("\n" in line or len(line) + len(reason) > _LINE):
        yield f"  # {reason}:"
        yield f"  - {line}"
    else:
        yield f"  - {line}  # {reason}" if reason else f"  - {line}"

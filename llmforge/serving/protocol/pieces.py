"""What reads text that arrives in pieces has in common: what is certain comes out, the rest waits for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

P = TypeVar("P")


class PieceParser(Generic[P]):
    """Hands text to states, one after another.

    A state takes what it can of `_pending`, adds what came of it to a list, and says whether the next one, which is
    `_state` then, may go on. `final` tells it that no more text follows.
    """

    _state: Callable[[list[P], bool], bool]

    def __init__(self, pending: str = "") -> None:
        self._pending = pending  # not looked at, or not decided

    def push(self, text: str) -> list[P]:
        """Take more text; return what is certain now."""
        return self._run(text, final=False)

    def flush(self) -> list[P]:
        """Return what was held back, after the last piece of text."""
        return self._run("", final=True)

    def _run(self, text: str, *, final: bool) -> list[P]:
        self._pending += text
        found: list[P] = []
        while self._state(found, final):
            pass
        return found


def held_back(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text without `marks` that may be the beginning of one."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)

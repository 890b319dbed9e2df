"""Prompts that are read in one step: neighbours in the cache whose next chunks fit into one of a few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """The next chunk of a prompt that may be read together with others."""

    start: int  # its first token's place in the text
    tokens: int
    begins: tuple[int, ...] | None  # what a text must begin with for this one to find it, and more, in the prefix cache


class PromptWindow(NamedTuple):
    """Neighbouring slots whose chunks are rows of one step, padded to `tokens` each."""

    first: int
    rows: int
    tokens: int


def find(
    slot: int,
    chunk_of: Callable[[int], PromptChunk | None],
    shapes: Iterable[tuple[int, int]],
    *,
    slots: int,
    capacity: int,
    most: int,
) -> PromptWindow | None:
    """Find the step that reads `slot` and most of its neighbours; None: it is read alone.

    Chunks of which one would find another's tokens in the prefix cache do not run together.

    Args:
        slot: of the prompt whose turn it is.
        chunk_of: the chunk of each slot; None: it has none to read, or none that is read with others.
        shapes: rows and tokens of each.
        slots: of the cache.
        capacity: of a slot, in tokens; padding must have room.
        most: tokens of the step, padding included.
    """

    def fits(at: int, tokens: int) -> bool:
        chunk = chunk_of(at)
        return chunk is not None and chunk.tokens <= tokens and chunk.start + tokens <= capacity

    for rows, tokens in sorted(shapes, key=lambda shape: (-shape[0], shape[1])):
        if rows * tokens > most or not fits(slot, tokens):
            continue
        for first in range(max(0, slot - rows + 1), min(slot, slots - rows) + 1):
            window = range(first, first + rows)
            if all(fits(at, tokens) for at in window) and not _repeat(map(chunk_of, window)):
                return PromptWindow(first, rows, tokens)
    return None


def _repeat(chunks: Iterable[PromptChunk | None]) -> bool:
    begins = [chunk.begins for chunk in chunks if chunk is not None and chunk.begins is not None]
    return len(set(begins)) < len(begins)

"""Rotary angles that change once with the length of the text (LongRoPE): two halves of one table, and a switch.

transformers takes the long factors for every position of a call whose last position is not within the original
context. The graph does the same for each row by the length of its text: docs/dialect.md, RotaryEmbedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmforge.base.errors import UnsupportedError

PROBED = 8  # positions at which angles are compared
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]  # position ids [1, n] → cos, sin [1, n, width]


def switch(name: str, forward: Forward, positions: int) -> int:
    """Find the length T: texts of up to T tokens have one set of angles, longer ones another.

    Raises:
        UnsupportedError: the angles change more than once (dynamic scaling).
    """
    short, long = _beside(forward, PROBED - 1), _beside(forward, positions - 1)
    low, high = PROBED - 1, positions - 1  # last positions: `low` is short, `high` is long
    while high - low > 1:
        middle = (low + high) // 2
        if _same(_beside(forward, middle), short):
            low = middle
        else:
            high = middle
    for last in {(PROBED - 1 + low) // 2, low, high, (high + positions - 1) // 2, positions - 2}:
        if last >= PROBED - 1 and not _same(_beside(forward, last), short if last <= low else long):
            raise UnsupportedError(
                f"{name}: the angles of a position change with the length of the sequence more than once "
                "(dynamic rope scaling), which a table cannot hold"
            )
    return high


def rows(forward: Forward, positions: int, length: int, chunk: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Compute a table by chunks: positions up to `length` of a short text, if it is not 0, then all of a long one."""
    short = [forward(ids[None]) for ids in torch.split(torch.arange(length), chunk)] if length else []
    if not length:
        return [forward(ids[None]) for ids in torch.split(torch.arange(positions), chunk)]
    last = torch.tensor([positions - 1])
    long = [forward(torch.cat([ids, last])[None]) for ids in torch.split(torch.arange(positions), chunk)]
    return [*short, *((cos[:, :-1], sin[:, :-1]) for cos, sin in long)]


def places(position_ids: Tensor, text_lengths: Tensor, length: int) -> Tensor:
    """Return the rows of the table for positions int64 [B, S] of texts of `text_lengths` tokens, int64 [B]."""
    return position_ids + ((text_lengths - length).clamp(0, 1) * length)[:, None]


def _beside(forward: Forward, last: int) -> tuple[Tensor, ...]:
    """Compute the angles of the first positions in a text whose last position is `last`."""
    cos, sin = forward(torch.cat([torch.arange(PROBED), torch.tensor([last])])[None])
    return cos[:, :PROBED], sin[:, :PROBED]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

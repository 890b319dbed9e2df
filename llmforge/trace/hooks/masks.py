"""The meaning of a transformers mask, found by evaluating it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmforge.base.errors import NotADecoder, UnsupportedError
from llmforge.trace.hooks import internals

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (batch, head, q, k)


@dataclass(frozen=True)
class Mask:
    """A causal mask: a query sees the last `window` positions, itself included; 0: every position up to its own.

    Stands in for the mask tensor that transformers would hand to attention, so that what a layer is given says
    what it does; code that computes with it fails, and is refused by name.
    """

    window: int
    chunk: int = 0  # a query sees nothing before the last position that is a multiple of `chunk`; 0: there are none

    def __getitem__(self, key: object) -> MaskRows:
        """Return what code that takes rows of a mask passes on."""
        return MaskRows(self)


@dataclass(frozen=True)
class MaskRows:
    """Stands in for a part of a mask, which attention does not take; computing with it fails."""

    mask: Mask


def classify(function: MaskFunction, positions: int) -> Mask | MaskRows:
    """Find the `Mask` that `function` computes for queries and keys in [0, positions).

    What hides every key, as a window of 0, is made by models whose layers do not use it: no attention takes it.

    The last query tells the window, or the first from which a key is hidden the length of chunks; a spread of others
    must agree with it.

    Raises:
        NotADecoder: `function` shows the first query what comes after it.
        UnsupportedError: its window is not one block of fixed size.
    """
    refuse_encoders(function, positions)
    with internals.real_tensors():
        last = positions - 1
        window = int(row(function, last, positions).sum())
        if not window:
            return MaskRows(Mask(0))
        first = hides_from(function, positions) or positions
        candidates = [Mask(0 if window == positions else window)]
        if first < positions:
            candidates.append(Mask(0, chunk=first))
        apart = [_differs(function, positions, candidate) for candidate in candidates]
        for candidate, query in zip(candidates, apart, strict=True):
            if query is None:
                return candidate
        raise UnsupportedError(
            f"an attention mask is neither causal nor a causal window: see query {apart[0]}",
            hint="needed: an attribute of llmforge::Attention for this mask (docs/new-architecture.md)",
        )


def _differs(function: MaskFunction, positions: int, mask: Mask) -> int | None:
    """Find a query to which `function` shows other keys than `mask` does; None: none of those that are asked."""
    last, window, chunk = positions - 1, mask.window or positions, mask.chunk or positions
    queries = {0, 1, 2, last // 2, last} | {window - 1, window, window + 1}
    queries |= {count * chunk + by for count in (1, 2, 3, last // chunk) for by in (-1, 0, 1)}
    keys = torch.arange(positions)
    for query in sorted(query for query in queries if 0 <= query < positions):
        expected = (keys <= query) & (keys > query - window) & (keys >= query - query % chunk)
        if not torch.equal(row(function, query, positions), expected):
            return query
    return None


def refuse_encoders(function: MaskFunction, positions: int = 2) -> None:
    """Refuse a model whose mask `function` shows the first of `positions` tokens all the others.

    Raises:
        NotADecoder: it does.
    """
    with internals.real_tensors():
        if positions > 1 and bool(row(function, 0, positions).all()):
            raise NotADecoder(
                "its attention sees later tokens: it is an encoder, not a decoder",
                hint="needed: to embed or score with it, as a recipe of `llmforge init` does (docs/retrieval.md)",
            )


def hides_from(function: MaskFunction, positions: int) -> int | None:
    """Find the first query in [0, positions) from which `function` hides a key before it; None: there is none.

    Windows and chunks hide nothing in short texts, and something from every query beyond some length.
    """

    def hides(query: int) -> bool:
        return not bool(row(function, query, query + 1).all())

    with internals.real_tensors():
        return bisect_left(range(positions), True, key=hides) if hides(positions - 1) else None


def row(function: MaskFunction, query: int, positions: int) -> torch.Tensor:
    """Evaluate `function` for one query against all keys: bool [positions]."""
    zero, keys = torch.tensor(0), torch.arange(positions)
    allowed = function(zero, zero, torch.full_like(keys, query), keys)
    return allowed.to(torch.bool).expand(positions)

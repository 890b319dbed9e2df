"""Positions that a model counts itself: behind the one length that its cache says all rows of a batch have.

Rows have lengths of their own. So what a model counts from the cache, `torch.arange(S) + cache.get_seq_length()`,
becomes the graph's positions [B, S]; functions of each position alone keep them, and where a model gives them a batch
axis of 1, they get that of the batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmforge.base.errors import UnsupportedError

POINTWISE = frozenset({torch.ceil, torch.clamp, torch.floor, torch.log, torch.log1p, torch.log2, torch.pow, torch.sqrt})
SUMS = ("add", "__add__", "__radd__")


class PositionTracer(TorchFunctionMode):
    """Finds, while it lasts, what a model counts from the length of its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.position_ids: Tensor | None = None  # int64 [B, S], of the run under way
        self._lengths: list[object] = []  # that caches said; kept, so that each is known again
        self._counts: dict[int, Tensor] = {}  # by id, and kept alive: 0, 1, 2, …

    def length(self, tokens: Any) -> Any:
        """Return `tokens`, the length of a cache, as something that is known again."""
        tokens = _Length(tokens) if type(tokens) is int else tokens
        self._lengths.append(tokens)
        return tokens

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or find that it counts positions."""
        kwargs = dict(kwargs or {})
        given = self.position_ids
        if given is not None and getattr(func, "__name__", "") in SUMS and len(args) == 2 and not kwargs:
            counts: list[Any] = [x for x in args if self._counts.get(id(x)) is x]
            lengths = [x for x in args if any(x is each for each in self._lengths)]
            if len(counts) == len(lengths) == 1 and counts[0].shape[0] == given.shape[1]:
                return Positions(given)
        result = func(*args, **kwargs)
        if func is torch.arange and (len(args) == 1 or (len(args) == 2 and type(args[0]) is int and args[0] == 0)):
            self._counts[id(result)] = result
        return result


class _Length(int):
    """The length of a cache where it is a plain number."""


class Positions:
    """Stands in for a vector [S] that has a number for each position; each row of the batch has its own, [B, S]."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a function of each position alone.

        Raises:
            UnsupportedError: `func` is something else.
        """
        (given, *others), named = args, dict(kwargs or {})
        numbers = all(isinstance(x, int | float | None) for x in (*others, *named.values()))
        if func not in POINTWISE or not isinstance(given, Positions) or not numbers:
            raise _unknown(getattr(func, "__name__", str(func)))
        return Positions(func(given._rows, *others, **named))

    def _with(self, compute: Callable[[Any, Any], Any], other: object, *, swapped: bool = False) -> Positions:
        if not isinstance(other, int | float):
            raise _unknown(compute.__name__)
        return Positions(compute(other, self._rows) if swapped else compute(self._rows, other))

    def __add__(self, other: object) -> Positions:
        return self._with(operator.add, other)

    def __radd__(self, other: object) -> Positions:
        return self._with(operator.add, other)

    def __sub__(self, other: object) -> Positions:
        return self._with(operator.sub, other)

    def __rsub__(self, other: object) -> Positions:
        return self._with(operator.sub, other, swapped=True)

    def __mul__(self, other: object) -> Positions:
        return self._with(operator.mul, other)

    def __rmul__(self, other: object) -> Positions:
        return self._with(operator.mul, other)

    def __truediv__(self, other: object) -> Positions:
        return self._with(operator.truediv, other)

    def float(self) -> Positions:
        """Compute in fp32."""
        return Positions(self._rows.float())

    def to(self, *args: Any, **kwargs: Any) -> Positions:
        """Compute in another dtype; a trace has one device."""
        return Positions(self._rows.to(*args, **kwargs))

    def unsqueeze(self, axis: int) -> Tensor:
        """Put the batch in front, in the place of an axis of 1."""
        if axis != 0:
            raise _unknown(f"unsqueeze({axis})")
        return self._rows

    def __getitem__(self, key: object) -> Tensor:
        """Put the batch in front, in the place of an axis of 1."""
        if not isinstance(key, tuple):
            key = (key,)
        first, *rest = key
        if first is not None or any(each is not None and each != slice(None) for each in rest):
            raise _unknown("an index")
        return self._rows[(slice(None), *(rest or [slice(None)]))]

    def view(self, *shape: Any) -> Tensor:
        """Put the batch in front, in the place of an axis of 1, and axes of 1 behind."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape
        batch, sequence = self._rows.shape
        if len(sizes) < 2 or sizes[0] != 1 or sizes[1] not in (-1, sequence) or any(size != 1 for size in sizes[2:]):
            raise _unknown("view")
        return self._rows.view(batch, sequence, *sizes[2:])

    reshape = view


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a model computes {what} with positions that it counts from the length of its cache",
        hint="needed: what it computes, for rows of lengths of their own (docs/new-architecture.md)",
    )

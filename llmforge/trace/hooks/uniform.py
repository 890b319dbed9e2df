"""Which tensors of a run hold one number everywhere: padding masks and offsets that a model makes for want of others.

A trace has no numbers. That a tensor is all ones, or all zeros, is known by the way it is made.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmforge.trace.hooks import internals

MAKERS: Mapping[object, float] = {
    torch.ones: 1,
    torch.ones_like: 1,
    Tensor.new_ones: 1,
    torch.zeros: 0,
    torch.zeros_like: 0,
    Tensor.new_zeros: 0,
}
FILLERS: Mapping[object, str] = {torch.full: "fill_value", torch.full_like: "fill_value", Tensor.new_full: "fill_value"}
# What keeps the number, and takes tensors of nothing else.
CARRIERS = frozenset(
    {
        torch.cat,
        Tensor.__getitem__,
        Tensor.bool,
        Tensor.contiguous,
        Tensor.expand,
        Tensor.float,
        Tensor.int,
        Tensor.long,
        Tensor.reshape,
        Tensor.to,
        Tensor.type_as,
        Tensor.unsqueeze,
        Tensor.view,
    }
)
CONVERTS = frozenset({Tensor.bool, Tensor.int, Tensor.long, Tensor.to, Tensor.type_as})  # the number to another kind


class Uniform(TorchFunctionMode):
    """Follows, while it lasts, which tensors hold one number everywhere; numbers of tensors are never read."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, float]] = {}  # by id, and kept alive, so that no id is used twice

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and remember what it made."""
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and _writes(func):
            self._forget(args[0])
        elif isinstance(result, Tensor) and (number := self._made(func, args, kwargs)) is not None:
            self._known[id(result)] = (result, number)
        return result

    def _made(self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        if func in MAKERS:
            return MAKERS[func]
        if func in FILLERS:
            number = kwargs.get(FILLERS[func], args[-1] if args else None)
            return float(number) if type(number) in (bool, int, float) else None
        if func not in CARRIERS:
            return None
        parts = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        numbers = {self.number(part) for part in parts}
        number = numbers.pop() if len(numbers) == 1 else None
        return None if func in CONVERTS and number not in (0, 1) else number

    def number(self, tensor: object) -> float | None:
        """Return the number that `tensor` is known to hold everywhere; None where that is not known."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0] is tensor else None

    def holds(self, tensor: object) -> bool:
        """Say whether `tensor` is known to be all ones."""
        return self.number(tensor) == 1

    def _forget(self, written: Tensor) -> None:
        """Forget a tensor that was written into, and all that share its memory."""
        place = _memory(written)
        self._known = {key: each for key, each in self._known.items() if _memory(each[0]) != place}

    def resolved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Copy `function` with each known tensor that it closes over replaced by its number, whatever the index."""
        with internals.real_tensors():
            made: Callable[..., Any] = resolved(function, self.number)
            return made


def resolved(value: Any, number: Callable[[object], float | None]) -> Any:
    """Copy `value`, a function, with each tensor that it closes over and that has a `number` replaced by that."""
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType(resolved(cell.cell_contents, number)) for cell in value.__closure__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    if isinstance(value, tuple | list):
        return type(value)(resolved(each, number) for each in value)
    found = number(value)
    return value if found is None else Everywhere(value.dtype, found)


def held(value: object) -> float | None:
    """Read the number that a tensor with numbers holds everywhere; None: it holds several, or is no tensor of any."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() == 0 or internals.is_fake(value):
        return None
    first = value.reshape(-1)[0]
    return float(first) if bool((value == first).all()) else None


class Everywhere:
    """What a tensor that holds one number everywhere gives under any index."""

    def __init__(self, dtype: torch.dtype, number: float) -> None:
        self._number = torch.tensor(number, dtype=dtype)

    def __getitem__(self, key: object) -> Tensor:
        """Return the number."""
        return self._number


def _writes(func: Callable[..., Any]) -> bool:
    """Say whether `func` writes into its first argument, as torch names such functions."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_IN_PLACE = frozenset(f"__i{name}__" for name in [
    "add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor",
])  # fmt: skip


def _memory(x: Tensor) -> int:
    return id(x if x._base is None else x._base)

"""Which tensors of a run are all ones: padding masks that a model makes itself because it was given none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAKERS = frozenset({torch.ones, torch.ones_like, Tensor.new_ones})
# What keeps ones ones, and takes tensors of nothing else.
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


class Ones(TorchFunctionMode):
    """Follows, while it lasts, which tensors are all ones by the way they are made; numbers are never read."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}  # by id, and kept alive, so that no id is used twice

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and remember what it made."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (func in MAKERS or (func in CARRIERS and self._carried(args[0]))):
            self._known[id(result)] = result
        return result

    def _carried(self, source: Any) -> bool:
        parts = source if isinstance(source, (list, tuple)) else [source]
        return all(self.holds(part) for part in parts)

    def holds(self, tensor: object) -> bool:
        """Say whether `tensor` is known to be all ones."""
        return id(tensor) in self._known and self._known[id(tensor)] is tensor

"""Masks of ones: some models make one where nobody gives them a mask, and it masks nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = frozenset({Tensor.to, Tensor.bool, Tensor.long, Tensor.int, Tensor.float})


class Ones(TorchFunctionMode):
    """Remembers which tensors `torch.ones` made, through casts, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `function`, and remember its result if it holds nothing but ones."""
        result = function(*args, **(kwargs or {}))
        if function is torch.ones or (function in CASTS and self.holds(args[0])):
            self._made.append(result)
        return result

    def holds(self, tensor: object) -> bool:
        """Say whether `tensor` is one of those."""
        return any(made is tensor for made in self._made)

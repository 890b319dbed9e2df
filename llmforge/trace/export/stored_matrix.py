"""A matrix of a checkpoint as a parameter of a module that costs no memory: read whenever it is used, in fp32.

Multiplying by it, and looking rows up in it, reads it in tiles. Any other operation reads all of it, and forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from llmforge.trace.hooks import internals

TILE_BYTES = 1 << 26  # of fp32


class StoredMatrix(Tensor):
    """The fp32 values of `read()` [N, K], which is in any floating-point dtype and may be mapped from a file."""

    _read: Callable[[], NDArray[Any]]

    @staticmethod
    def of(read: Callable[[], NDArray[Any]], shape: Sequence[int]) -> StoredMatrix:
        """Stand for the matrix that `read` maps."""
        made = internals.without_storage(StoredMatrix, shape, torch.float32)
        made._read = read
        return made

    def tiles(self) -> Iterator[Tensor]:
        """Read its rows, some at a time."""
        array = self._read()
        rows = max(1, TILE_BYTES // (4 * array.shape[1]))
        for at in range(0, len(array), rows):
            yield torch.from_numpy(array[at : at + rows].astype(np.float32))

    def whole(self) -> Tensor:
        """Read all of it."""
        return torch.from_numpy(self._read().astype(np.float32))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is functional.linear:
            return _linear(*args, **given)
        if function is functional.embedding and isinstance(args[1], cls) and given.get("max_norm") is None:
            ids, rows = args[0], args[1]._read()
            return torch.from_numpy(rows[ids.numpy()].astype(np.float32))
        with internals.without_torch_function():
            return function(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method there
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch.inference_mode(False):  # torch numbers the versions of what it takes for a view of this one
            args, kwargs = tree_map_only(StoredMatrix, StoredMatrix.whole, (args, dict(kwargs or {})))
            return function(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, StoredMatrix):  # the input is one, or the bias
        with internals.without_torch_function():
            return functional.linear(input, weight, bias)
    product = torch.cat([functional.linear(input, tile) for tile in weight.tiles()], dim=-1)
    return product if bias is None else product + bias

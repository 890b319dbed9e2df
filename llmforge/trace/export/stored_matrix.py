"""Give a model the numbers of a checkpoint, in fp32: a large matrix costs no memory, and is read whenever it is used.

Multiplying by it, and looking rows up in it, reads it in tiles. Any other operation reads all of it, and forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from llmforge.base import mapped
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import weights
from llmforge.trace.export.weights import ParameterSource
from llmforge.trace.hooks import internals

TILE_BYTES = 1 << 26  # of fp32: a matrix that is larger is read in tiles
_READ_BYTES = 1 << 22  # of a tile: it is multiplied by while it is in the processor's caches


def give_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, ParameterSource],
    *,
    without: Sequence[str],
    in_memory: bool = False,
) -> None:
    """Give parameters and persistent buffers of `model` their numbers, but for those of the modules `without`.

    Matrices of more than `TILE_BYTES` that the checkpoint holds as they are become a `StoredMatrix`, unless all are
    wanted `in_memory`.

    Raises:
        UnsupportedError: a parameter has no source.
    """
    absent = tuple(f"{name}." for name in without)
    read: dict[ParameterSource, Tensor] = {}
    shared: dict[ParameterSource, nn.Parameter] = {}  # what is tied stays so
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        if name.startswith(absent):
            continue
        source = sources[name]
        owner, _, leaf = name.rpartition(".")
        module, is_parameter = model.get_submodule(owner), isinstance(tensor, nn.Parameter)
        is_large = source.converted is None and tensor.dim() == 2 and 4 * tensor.numel() > TILE_BYTES
        if is_parameter and is_large and not in_memory:
            # no nn.Parameter, which would be a copy
            module._parameters[leaf] = _stored(checkpoint, source.tensors[0])  # type: ignore[assignment]
            continue
        if source not in read:
            read[source] = weights.load_fp32(checkpoint, source)
        if is_parameter:
            module._parameters[leaf] = shared.setdefault(source, nn.Parameter(read[source], requires_grad=False))
        else:
            module._buffers[leaf] = read[source].to(tensor.dtype)
    left = [name for name, each in model.named_parameters() if each.is_meta and not name.startswith(absent)]
    if left:
        raise UnsupportedError(f"parameter {left[0]} has no numbers")


def _stored(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    """Map a tensor anew whenever it is read: pages of a file that is mapped for long would all stay resident."""
    return StoredMatrix.of(lambda: checkpoint.tensor(name).numpy(), checkpoint.tensors[name].shape)


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
        """Read its rows, some at a time, each time into the same memory."""
        array = self._read()
        rows = max(1, _READ_BYTES // (4 * array.shape[1]))
        widened = np.empty((min(rows, len(array)), array.shape[1]), np.float32)
        for at in range(0, len(array), rows):
            stored = array[at : at + rows]
            tile = widened[: len(stored)]
            tile[...] = stored
            yield torch.from_numpy(tile)
            mapped.forget(stored)

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
    product, at = input.new_empty((*input.shape[:-1], weight.shape[0])), 0
    for tile in weight.tiles():
        product[..., at : at + len(tile)] = functional.linear(input, tile)
        at += len(tile)
    return product if bias is None else product + bias

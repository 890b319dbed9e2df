"""transformers' own forward pass, eager and in fp32: what a traced graph has to compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import depth, skeleton, weights
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.export.stored_matrix import TILE_BYTES, StoredMatrix
from llmforge.trace.hooks import internals

EAGER = "eager"  # the attention that transformers writes out, without a kernel of its own


@dataclass(frozen=True, eq=False)
class Observation:
    """What one sequence gave: logits of its last rows [rows, V]; hidden states of each layer [S, hidden], if known."""

    logits: NDArray[np.float32]
    hidden: list[NDArray[np.float32]]


class Reference:
    """A checkpoint's model in transformers, whole or its first `layers` layers, with its real weights in fp32.

    The whole model is loaded by transformers. A part takes the weights of its own layers alone, by the names and
    conversions of transformers, and reads large matrices whenever it uses them, so that a model larger than the memory
    can be run in part.
    """

    def __init__(self, checkpoint: Checkpoint, layers: int | None = None) -> None:
        depth_of_all = checkpoint.geometry.layers
        with internals.third_party("loading the model into transformers"):
            self._model = skeleton.load(checkpoint, EAGER) if layers is None else _part(checkpoint, layers)
        try:
            self.stack, modules = depth.stack_of(self._model, depth_of_all if layers is None else layers)
            self.layers: list[nn.Module] = list(modules)
        except Irregular:
            self.stack, self.layers = "", []

    def run(self, ids: NDArray[np.int64], rows: int) -> Observation:
        """Compute one sequence `ids` [S] without a cache; keep the logits of its last `rows` tokens."""
        hidden: list[Tensor] = []
        hooks = [layer.register_forward_hook(_keep(hidden)) for layer in self.layers]
        accepted = inspect.signature(self._model.forward).parameters
        kept: dict[str, Any] = {"logits_to_keep": rows} if "logits_to_keep" in accepted else {}
        try:
            with internals.third_party("running the model in transformers"), torch.inference_mode():
                output = self._model(input_ids=torch.from_numpy(ids[None]), use_cache=False, **kept)
        finally:
            for hook in hooks:
                hook.remove()
        return Observation(output.logits[0, -rows:].numpy(), [state[0].numpy() for state in hidden])


def _keep(hidden: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    return hook


def _part(checkpoint: Checkpoint, layers: int) -> PreTrainedModel:
    """Build the model of all layers without memory, drop the later ones, and read the weights of the rest."""
    model = skeleton.on_meta(checkpoint.config, EAGER)
    sources = weights.plan(model, checkpoint)
    _, stack = depth.stack_of(model, checkpoint.geometry.layers)
    del stack[layers:]
    read: dict[weights.Source, Tensor] = {}
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        source = sources[name]
        owner, _, leaf = name.rpartition(".")
        module, is_parameter = model.get_submodule(owner), isinstance(tensor, nn.Parameter)
        if is_parameter and source.converted is None and tensor.dim() == 2 and 4 * tensor.numel() > TILE_BYTES:
            # no nn.Parameter, which would be a copy
            module._parameters[leaf] = _stored(checkpoint, source.tensors[0])  # type: ignore[assignment]
            continue
        if source not in read:
            read[source] = weights.load_fp32(checkpoint, source)
        if is_parameter:
            module._parameters[leaf] = nn.Parameter(read[source], requires_grad=False)
        else:
            module._buffers[leaf] = read[source].to(tensor.dtype)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise UnsupportedError(f"parameter {left[0]} has no numbers")
    return model


def _stored(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    """Map a tensor anew whenever it is read: pages of a file that is mapped for long would all stay resident."""
    return StoredMatrix.of(lambda: checkpoint.tensor(name).numpy(), checkpoint.tensors[name].shape)

"""A transformers model without weights: its own forward pass says how each decoder layer is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.calibration import experts
from llmforge.calibration.layer import Call, DecoderLayer, copy_with_weights, linears_of
from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import depth
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.export.weights import Source, plan
from llmforge.trace.hooks import internals
from llmforge.trace.hooks.experts import marked


@dataclass(eq=False)
class Skeleton:
    """The structure of a checkpoint's model; its parameters have no memory, its buffers hold their numbers.

    `prefixes` are the names of `layers` in the model, "model.layers.0". `sources` says where the checkpoint holds each
    parameter and persistent buffer.
    """

    checkpoint: Checkpoint
    model: PreTrainedModel
    layers: list[torch.nn.Module]
    prefixes: list[str]
    sources: Mapping[str, Source]

    @classmethod
    def build(cls, checkpoint: Checkpoint) -> Skeleton:
        """Build the model that `checkpoint` configures.

        Raises:
            UnsupportedError: transformers has no causal language model for it, or more or less than one list of layers.
            CheckpointError: the checkpoint lacks a parameter, or holds one of another shape.
        """
        make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config  # untyped in transformers
        try:
            with internals.parameters_on_meta():
                model = make(checkpoint.config, dtype=torch.float32)
            name, layers = depth.stack_of(model, checkpoint.geometry.layers)
        except (ValueError, Irregular) as error:  # ValueError: transformers has no class for the configuration
            raise UnsupportedError(f"{checkpoint.path}: cannot be calibrated: {str(error).splitlines()[0]}") from error
        model.eval()  # type: ignore[no-untyped-call]
        prefixes = [f"{name}.{index}" for index in range(len(layers))]
        return cls(checkpoint, model, list(layers), prefixes, plan(model, checkpoint))

    def enter(
        self, windows: Sequence[NDArray[np.int64]], table: NDArray[np.float32] | None = None
    ) -> tuple[list[list[Call]], list[torch.Tensor]]:
        """Embed every window, ids [tokens]: how each layer is called with each of them, and the first layer's states.

        `table` [V, H] is looked up in place of the embedding, which is a plain one.

        Returns calls [layer][window], which share the tensors of windows of one length (masks, rotary tables), and
        hidden states fp32 [1, tokens, hidden] for each window.

        Raises:
            UnsupportedError: what a layer is called with, besides the hidden states, depends on the text.
        """
        entrance = self._entrance()
        layers, lookup = [entrance.get_submodule(prefix) for prefix in self.prefixes], self._lookup(entrance, table)
        by_length: dict[int, list[Call]] = {}
        calls: list[list[Call]] = [[] for _ in self.layers]
        states = []
        for ids in windows:
            with lookup:
                state, called = _calls_of(entrance, layers, ids)
            first = by_length.setdefault(len(ids), called)
            if not all(map(_same, first, called)):
                raise UnsupportedError(
                    f"{self.checkpoint.path}: cannot be calibrated: layers of {type(self.model).__name__} are called "
                    "with more than the hidden states of the text"
                )
            states.append(state)
            for of_layer, call in zip(calls, first, strict=True):
                of_layer.append(call)
        return calls, states

    def leaving(
        self, windows: Sequence[NDArray[np.int64]]
    ) -> Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        """Return what turns the hidden states after the layers, of one of `windows`, into logits [1, tokens, V].

        With them come the inputs of the head, [1, tokens, H]; None where the head is no linear.
        """
        state = self.model.state_dict(keep_vars=True)
        table, inside = self._table(), tuple(f"{prefix}." for prefix in self.prefixes)
        names = [name for name in state if name != table and not name.startswith(inside)]
        exit_ = copy_with_weights(self.model, "", self.checkpoint, self.sources, names)
        lookup = self._lookup(exit_)
        current: list[torch.Tensor] = []
        read: list[torch.Tensor] = []

        def layer_out(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return current[0]

        for prefix in self.prefixes:
            exit_.get_submodule(prefix).forward = layer_out  # `exit_` is a copy, made for this
        head = exit_.get_output_embeddings()  # type: ignore[no-untyped-call]
        if isinstance(head, torch.nn.Linear):
            head.register_forward_pre_hook(lambda _, given: read.append(given[0]))

        def leave(window: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            current[:] = [hidden]
            read.clear()
            with lookup:
                logits: torch.Tensor = exit_(input_ids=torch.from_numpy(windows[window])[None], use_cache=False).logits
            return logits, read[0] if read else None

        return leave

    def tables(self) -> tuple[str, str]:
        """Name the parameters of the embedding and of the head; the same where they are tied, "" where not plain."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        state, table = self.model.state_dict(keep_vars=True), self._table()
        if not isinstance(head, torch.nn.Linear):
            return table, ""
        if table and state[table] is head.weight:
            return table, table
        return table, next((name for name, held in state.items() if held is head.weight), "")

    def table(self, name: str) -> NDArray[Any]:
        """Return the embedding or head called `name`, [V, H], as the checkpoint holds it."""
        return self.checkpoint.tensor(self.sources[name].tensors[0]).numpy()

    def load(self, index: int, calls: Sequence[Call]) -> DecoderLayer:
        """Read the weights of layer `index`, fp32; `calls` says how it is called with each window."""
        prefix = self.prefixes[index]
        names = list(self.layers[index].state_dict())
        module = copy_with_weights(self.layers[index], prefix, self.checkpoint, self.sources, names)
        return DecoderLayer(module, prefix, calls)

    def matrices(self) -> list[str]:
        """Name the matrices of all layers that can be quantized: weights of linears, and of experts."""
        names: list[str] = []
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            names += linears_of(layer, prefix)
            marks = [(local, module) for local, module in layer.named_modules() if marked(module)]
            names += [f"{prefix}.{local}.{name}" for local, module in marks for name in experts.matrices(module)]
        return names

    def _entrance(self) -> torch.nn.Module:
        """Return the model with the weights of what stands before the layers, but for a table that is looked up."""
        state = self.model.state_dict(keep_vars=True)
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        without = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        without -= {id(parameter) for parameter in self.model.get_input_embeddings().parameters()}
        without.add(id(state.get(self._table())))
        inside = tuple(f"{prefix}." for prefix in self.prefixes)
        names = [name for name, held in state.items() if id(held) not in without and not name.startswith(inside)]
        return copy_with_weights(self.model, "", self.checkpoint, self.sources, names)

    def _table(self) -> str:
        """Name the table of tokens, if it is a plain one that the checkpoint holds as it is; "" where it is not."""
        embedding = self.model.get_input_embeddings()
        if not isinstance(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
            return ""
        state = self.model.state_dict(keep_vars=True)
        name = next((name for name, tensor in state.items() if tensor is embedding.weight), "")
        return name if name and self.sources[name].converted is None else ""

    def _lookup(self, entrance: torch.nn.Module, table: NDArray[Any] | None = None) -> _Lookup:
        """Make what answers lookups in the table of tokens of `entrance`, a copy of the model."""
        if not (name := self._table()):
            return _Lookup(None, np.empty((0, 0)))
        return _Lookup(entrance.get_parameter(name), self.table(name) if table is None else table)


class _LastLayerReached(Exception):
    """Every layer was called."""


def _calls_of(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], ids: NDArray[np.int64]
) -> tuple[torch.Tensor, list[Call]]:
    """Run `model` with its decoder layers left out, up to where the last of them would have run.

    Return the hidden states in front of the first, and how each is called.
    """
    states: list[torch.Tensor] = []
    calls: list[Call] = []

    def layer_out(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        states.append(hidden)
        calls.append(Call(args, kwargs))
        if len(calls) == len(layers):
            raise _LastLayerReached
        return hidden

    for layer in layers:
        layer.forward = layer_out  # `model` is a copy, made for this
    try:
        model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    except _LastLayerReached:
        return states[0], calls
    raise UnsupportedError(f"{type(model).__name__} called {len(calls)} of its {len(layers)} decoder layers")


def _same(one: Any, other: Any) -> bool:
    """Compare what two calls were given, tensors by value."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


class _Lookup(TorchFunctionMode):
    """Answers a lookup in `weight`, which has no memory, with fp32 rows of `table` [V, K], which is mapped."""

    def __init__(self, weight: torch.Tensor | None, table: NDArray[Any]) -> None:
        super().__init__()
        self.weight, self.table = weight, table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding and args[1] is self.weight:
            return torch.from_numpy(self.table[args[0].numpy()].astype(np.float32))
        return func(*args, **(kwargs or {}))

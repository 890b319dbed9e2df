"""A transformers model without weights: its own forward pass says how each decoder layer is called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.calibration import experts
from llmforge.calibration.device import HOST, ExecutionDevice
from llmforge.calibration.layer import DecoderLayer, LayerCall, copy_with_weights, linears_of
from llmforge.calibration.residency import LOGITS, LayerWidths, ModelWidths
from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import depth, stored_matrix
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.export.weights import ParameterSource, plan
from llmforge.trace.hooks import internals
from llmforge.trace.hooks.experts import marked

_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (  # in which transformers' layers return hidden states
    lambda made: made,
    lambda made: (made,),
    lambda made: (made, None),
)
_UNPACKING = (AttributeError, IndexError, TypeError, ValueError)  # what a model does that gets another form


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
    sources: Mapping[str, ParameterSource]
    device: ExecutionDevice = HOST  # that layers and head are loaded to

    @classmethod
    def build(cls, checkpoint: Checkpoint, device: ExecutionDevice = HOST) -> Skeleton:
        """Build the model that `checkpoint` configures, to run on `device`.

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
        return cls(checkpoint, model, list(layers), prefixes, plan(model, checkpoint), device)

    def frame(self) -> Frame:
        """Give the model without its layers what stands around them.

        Raises:
            UnsupportedError: a parameter there has no source.
        """
        model = copy.deepcopy(self.model)
        stored_matrix.give_weights(model, self.checkpoint, self.sources, without=self.prefixes)
        return Frame(f"{self.checkpoint.path}: {type(model).__name__}", model, self.prefixes)

    def enter(
        self, windows: Sequence[NDArray[np.int64]], table: NDArray[np.float32] | None = None
    ) -> tuple[list[list[LayerCall]], list[torch.Tensor]]:
        """Embed every window, ids [tokens]: how each layer is called with each of them, and the first layer's states.

        `table` [V, H] is looked up in place of the embedding, which is a plain one.

        Returns calls [layer][window], which share the tensors of windows of one length (masks, rotary tables), and
        hidden states fp32 [1, tokens, hidden] for each window. Calls are on the device, hidden states on the host.

        Raises:
            UnsupportedError: see `Frame.enter`.
        """
        frame = self.frame()
        with nullcontext() if table is None else self._lookup(frame.model, table):
            entered = [frame.enter(ids) for ids in windows]
        moved: dict[int, torch.Tensor] = {}
        calls = [
            [LayerCall(*self.device.put_all(tuple(call), moved)) for call in of_layer]
            for of_layer in zip(*(called for _, called in entered), strict=True)
        ]
        return calls, [state for state, _ in entered]

    def leaving(
        self,
        windows: Sequence[NDArray[np.int64]],
        weight: NDArray[np.float32] | None = None,
        heads: list[torch.nn.Linear] | None = None,
    ) -> Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        """Return what turns the hidden states after the layers, of one of `windows`, into logits [1, tokens, V].

        With them come the inputs of the head, [1, tokens, H]; None where the head is no linear. States of some tokens
        alone give their logits: what is behind the layers sees one token at a time. `weight` [V, H] is the head's in
        place of its own. The head, where it is a linear, is put to `heads`.
        """
        state = self.model.state_dict(keep_vars=True)
        table, inside = self._table(), tuple(f"{prefix}." for prefix in self.prefixes)
        names = [name for name in state if name != table and not name.startswith(inside)]
        exit_ = copy_with_weights(self.model, "", self.checkpoint, self.sources, names)
        self.device.place(exit_)
        lookup = self._lookup(exit_)
        current: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        forms = list(_FORMS)  # the first is the one that was right last

        def layer_out(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return forms[0](current[0])

        for prefix in self.prefixes:
            exit_.get_submodule(prefix).forward = layer_out  # `exit_` is a copy, made for this
        head = exit_.get_output_embeddings()  # type: ignore[no-untyped-call]
        if isinstance(head, torch.nn.Linear):
            if weight is not None:
                head.weight = torch.nn.Parameter(self.device.put(torch.from_numpy(weight)), requires_grad=False)
            head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
            if heads is not None:
                heads.append(head)

        def leave(window: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            current[:] = [self.device.put(hidden)]
            ids = self.device.put(torch.from_numpy(windows[window][: hidden.shape[1]]))
            for _ in _FORMS:
                read.clear()
                with lookup, suppress(*_UNPACKING):
                    logits: torch.Tensor = exit_(input_ids=ids[None], use_cache=False).logits
                    if logits.shape[:2] == hidden.shape[:2]:
                        return logits, read[0] if read else None
                forms.append(forms.pop(0))
            raise UnsupportedError(f"{self.checkpoint.path}: layers return something else than hidden states")

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

    def load(self, index: int, calls: Sequence[LayerCall]) -> DecoderLayer:
        """Read the weights of layer `index`, fp32; `calls` says how it is called with each window."""
        return self._placed(self._read(index), index, calls)

    def stream(self, indices: Iterable[int], calls: Sequence[Sequence[LayerCall]]) -> Iterator[DecoderLayer]:
        """Load layers one after the other, as `load` does; on a device the next is read while one is worked on.

        Who is given a layer lets it go before asking for the next: then there is one on the device.
        """
        if self.device.is_host:
            for index in indices:
                yield self.load(index, calls[index])
            return
        for index, module in self.device.ahead(lambda index: (index, self._read(index)), indices):
            yield self._placed(module, index, calls[index])
            del module  # the one who asks for the next has no use of it

    def _read(self, index: int) -> torch.nn.Module:
        names = list(self.layers[index].state_dict())
        return copy_with_weights(self.layers[index], self.prefixes[index], self.checkpoint, self.sources, names)

    def _placed(self, module: torch.nn.Module, index: int, calls: Sequence[LayerCall]) -> DecoderLayer:
        self.device.place(module)
        return DecoderLayer(module, self.prefixes[index], calls, device=self.device)

    def widths(self) -> ModelWidths:
        """Say how wide layers and head are, for what memory they take on a device."""
        config = self.model.config.get_text_config()
        heads, hidden, vocabulary = getattr(config, "num_attention_heads", 1), config.hidden_size, config.vocab_size
        layers = []
        for layer in self.layers:
            shapes = [(each.out_features, each.in_features) for each in linears_of(layer, "").values()]
            for module in filter(marked, layer.modules()):
                inner, outer = experts.widths(module)
                shapes += [(2 * outer, inner), (inner, outer)]
            parameters = sum(each.numel() for each in layer.parameters())
            layers.append(LayerWidths(hidden, parameters, tuple(shapes), heads))
        return ModelWidths(tuple(layers), vocabulary, max(1, LOGITS // vocabulary))

    def matrices(self) -> list[str]:
        """Name the matrices of all layers that can be quantized: weights of linears, and of experts."""
        names: list[str] = []
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            names += linears_of(layer, prefix)
            marks = [(local, module) for local, module in layer.named_modules() if marked(module)]
            names += [f"{prefix}.{local}.{name}" for local, module in marks for name in experts.matrices(module)]
        return names

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
        owner, _, leaf = name.rpartition(".")
        weight = entrance.get_submodule(owner)._parameters[leaf]
        return _Lookup(weight, self.table(name) if table is None else table)


class _LastLayerReached(Exception):
    """Every layer was called."""


class Frame:
    """A model whose layers are left out: it leads a text to the first of them, and from behind the last to logits."""

    def __init__(self, name: str, model: torch.nn.Module, prefixes: Sequence[str]) -> None:
        """Take `model`, a copy that is given away; `prefixes` are the names of its layers."""
        self._name, self.model, self._depth = name, model, len(prefixes)
        self._form = _FORMS[0]  # what layers return
        self._by_length: dict[int, list[LayerCall]] = {}
        self._given: list[torch.Tensor] = []  # hidden states that each layer is called with
        self._calls: list[LayerCall] = []
        self._last_hidden: torch.Tensor | None = None  # what the last layer makes; None: the run ends in front of it
        for prefix in prefixes:
            model.get_submodule(prefix).forward = self._layer_out

    def enter(self, ids: NDArray[np.int64]) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embed a text, ids [tokens]: the first layer's states [1, tokens, hidden], and how each layer is called.

        Texts of one length share the tensors of their calls.

        Raises:
            UnsupportedError: more goes from one layer to the next than hidden states.
        """
        for form in (self._form, *(form for form in _FORMS if form is not self._form)):
            self._form = form
            with suppress(*_UNPACKING):
                states, called = self._run(ids)
                if self._handed_on(states):
                    break
        else:
            raise self._changed()
        if not all(_fixed((call.args, *call.kwargs.values())) for call in called):
            raise UnsupportedError(f"{self._name} cannot be run layer by layer: its layers share a state")
        first = self._by_length.setdefault(len(ids), called)
        if not all(map(_same, first, called)):
            raise UnsupportedError(
                f"{self._name} cannot be run layer by layer: layers are called with more than the hidden states of the "
                "text"
            )
        return states, first

    def leave(self, ids: NDArray[np.int64], states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [tokens, V] of a text from the hidden `states` [1, tokens, hidden] behind its last layer.

        Raises:
            UnsupportedError: see `enter`.
        """
        self._given, self._calls, self._last_hidden = [], [], states
        try:
            output = self.model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
        finally:
            self._last_hidden = None
        self._given[0] = states
        self._require_handed_on(states)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _run(self, ids: NDArray[np.int64]) -> tuple[torch.Tensor, list[LayerCall]]:
        """Run the model up to where the last of its layers would have run."""
        self._given, self._calls = [], []
        try:
            self.model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
        except _LastLayerReached:
            return self._given[0], self._calls
        raise UnsupportedError(f"{self._name} called {len(self._calls)} of its {self._depth} decoder layers")

    def _layer_out(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stand for a layer."""
        self._given.append(hidden)
        self._calls.append(LayerCall(args, kwargs))
        if self._last_hidden is None and len(self._calls) == self._depth:
            raise _LastLayerReached
        made = hidden if self._last_hidden is None else self._last_hidden
        return self._form(made)

    def _handed_on(self, states: torch.Tensor) -> bool:
        """Say if every layer was given `states` by the one before it."""
        return len(self._given) == self._depth and all(
            given is states or (isinstance(given, torch.Tensor) and torch.equal(given, states)) for given in self._given
        )

    def _require_handed_on(self, states: torch.Tensor) -> None:
        if not self._handed_on(states):
            raise self._changed()

    def _changed(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._name} cannot be run layer by layer: it changes hidden states between its layers"
        )


def _fixed(value: Any) -> bool:
    """Say if what a layer is called with stays as it is: a cache, or a place for what layers share, may not."""
    if isinstance(value, dict):
        return bool(value) and all(map(_fixed, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_fixed, value))
    return isinstance(value, torch.Tensor | torch.dtype | bool | int | float | str | None)


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
            return torch.from_numpy(self.table[args[0].cpu().numpy()].astype(np.float32)).to(args[0].device)
        return func(*args, **(kwargs or {}))

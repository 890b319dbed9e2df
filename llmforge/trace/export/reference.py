"""transformers' own forward pass, eager and in fp32: what a traced graph has to compute."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask

from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import depth, skeleton, stored_matrix, weights
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.hooks import internals, masks, uniform

NUMBERS = re.compile("layer|idx|index|block")  # in the name of an integer by which a module knows its own place
TEXT = 4  # tokens of a run that shows which parameters a text reads
EAGER = "eager"  # the attention that transformers writes out, without a kernel of its own


@dataclass(frozen=True, eq=False)
class Observation:
    """What one sequence gave: logits of its last rows [rows, V]; hidden states of each layer [S, hidden], if known."""

    logits: NDArray[np.float32]
    hidden: list[NDArray[np.float32]]


@dataclass(eq=False)
class RotaryCall:
    """One call of a module that makes rotary angles: with which arguments besides positions, and what it gave."""

    module: nn.Module
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...]
    outputs: tuple[Tensor, ...]
    axes: tuple[int, ...]  # in front of the positions [B, S] that it was given

    def angles(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute cos and sin [n, width] of `positions` [n], those of one text."""
        ids = torch.from_numpy(positions)[None].expand(*self.axes, 1, -1)
        with internals.third_party("running the model's rotary embedding"), torch.inference_mode():
            made = self.module(torch.zeros(1), ids, *self.arguments, **dict(self.keywords))
        cos, sin = (made.real, made.imag) if isinstance(made, Tensor) else made
        return cos.reshape(-1, cos.shape[-1]).numpy(), sin.reshape(-1, sin.shape[-1]).numpy()


@dataclass(frozen=True)
class OwnMask:
    """What a model's code says that a query sees."""

    function: masks.MaskFunction

    def shows(self, query: int) -> NDArray[np.bool_]:
        """Say which of the tokens up to `query` it sees: bool [query + 1]."""
        zero, keys = torch.tensor(0), torch.arange(query + 1)
        with internals.third_party("evaluating the model's mask"), torch.inference_mode():
            shown = self.function(zero, zero, torch.full_like(keys, query), keys)
            return shown.to(torch.bool).expand(query + 1).numpy()


@dataclass(frozen=True, eq=False)
class OwnNorm:
    """A module of a model that holds one vector, `weight`, and perhaps a bias: a norm."""

    name: str
    module: nn.Module

    @property
    def kind(self) -> str:
        """Name its class."""
        return type(self.module).__name__

    @property
    def in_memory(self) -> bool:
        """Whether it can compute."""
        return not self.module.get_parameter("weight").is_meta

    def compute(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run it on rows x [n, width]."""
        with internals.third_party(f"running {self.kind}"), torch.inference_mode():
            return np.asarray(self.module(torch.from_numpy(x)))


@dataclass(eq=False)
class Given:
    """What one layer works with besides hidden states, as the model's own code hands it over."""

    mask: OwnMask | None = None  # None: it got no mask, or one that no function of transformers made
    rotary: list[RotaryCall] = field(default_factory=list)


class _Reads(TorchFunctionMode):
    """Notes, while it lasts, which of `tensors` torch is called with."""

    def __init__(self, tensors: Mapping[int, str]) -> None:
        super().__init__()
        self._tensors = tensors
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        self.names |= {self._tensors[id(x)] for x in given if id(x) in self._tensors}
        return func(*args, **(kwargs or {}))


class ReferenceModel:
    """A checkpoint's model in transformers, whole or in part, with its real weights in fp32.

    The whole model is loaded by transformers. A part has the first layer, the last, the one halfway, and one of every
    other kind; the others are there, in their places, and hand on what they are given. Its weights are taken by
    the names and conversions of transformers, and large matrices read whenever they are used, so that a model larger
    than the memory can be run in part.
    """

    def __init__(self, checkpoint: Checkpoint, *, part: bool = False) -> None:
        depth_of_all = checkpoint.geometry.layers
        self.sources: weights.WeightPlan | None = None  # of a part
        self.kept = list(range(depth_of_all))  # numbers of the layers that are there
        self.twins = self.kept  # of each layer, one of `kept` that is made like it
        self._passing: Tensor | tuple[object, ...] = ()  # what a layer of the model returns: a tensor, or a tuple
        with internals.third_party("loading the model into transformers"):
            if part:
                self.model, self.sources, self.kept, self.twins = _part(checkpoint)
            else:
                self.model = skeleton.load(checkpoint, EAGER)
        first: dict[object, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            # a part has tensors of its own where a source is read for two names
            first.setdefault(id(tensor) if self.sources is None else (self.sources[name], tuple(tensor.shape)), name)
        self.parameters = frozenset(first.values())  # and persistent buffers; by the first name of what is shared
        try:
            self.stack, modules = depth.stack_of(self.model, depth_of_all)
            self.layers: list[nn.Module] = list(modules)
        except Irregular:
            self.stack, self.layers = "", []
        for index, layer in enumerate(self.layers):
            if index not in self.kept:
                layer.forward = self._hand_on

    def _hand_on(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a layer that is not there."""
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(self._passing, Tensor) else (hidden, *self._passing[1:])

    def read_by_text(self, names: Sequence[str]) -> set[str]:
        """Find which of the parameters `names` the model reads for a text; towers for images or sound it does not.

        A layer that is not there would read what the one reads that is made like it.
        """
        state = self.model.state_dict(keep_vars=True)
        stands_for = {name: self._twin(name) for name in names}
        with _Reads({id(state[twin]): twin for twin in stands_for.values()}) as reads:
            self.run(np.arange(TEXT, dtype=np.int64), 1)
        return {name for name, twin in stands_for.items() if twin in reads.names}

    def _twin(self, name: str) -> str:
        """Name the parameter that a layer which is there has in place of `name`."""
        inside = name.removeprefix(f"{self.stack}.")
        layer, _, rest = inside.partition(".")
        if not self.stack or inside == name or not layer.isdecimal():
            return name
        return f"{self.stack}.{self.twins[int(layer)]}.{rest}"

    def run(self, ids: NDArray[np.int64], rows: int, *, head: bool = True) -> Observation:
        """Compute one sequence `ids` [S] without a cache; keep the logits of its last `rows` tokens.

        Without `head`, logits are of no meaning and cost nothing.
        """
        return self.run_batch(ids[None], rows, head=head)[0]

    def run_batch(self, ids: NDArray[np.int64], rows: int, *, head: bool = True) -> list[Observation]:
        """Compute sequences `ids` [B, S] of one length as `run` does one."""
        hidden: list[Tensor] = []
        accepted = inspect.signature(self.model.forward).parameters
        kept: dict[str, Any] = {"logits_to_keep": rows} if "logits_to_keep" in accepted else {}
        output_embedding: nn.Module | None = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]

        def keep(module: nn.Module, args: object, output: Any) -> None:
            self._passing = output
            hidden.append(output[0] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for index in self.kept if self.layers else ():
                hooks.callback(self.layers[index].register_forward_hook(keep).remove)
            if not head and output_embedding is not None:
                output_embedding.forward = lambda x: x[..., :1]
                hooks.callback(delattr, output_embedding, "forward")
            hooks.enter_context(internals.third_party("running the model in transformers"))
            hooks.enter_context(torch.inference_mode())
            output = self.model(input_ids=torch.from_numpy(ids), use_cache=False, **kept)
        return [
            Observation(logits[-rows:].numpy(), [state[row].numpy() for state in hidden])
            for row, logits in enumerate(output.logits)
        ]

    @contextmanager
    def shallow(self) -> Iterator[None]:
        """Run those layers alone, for a while, that a part of the model would have; `kept` and `twins` say which."""
        before = self.kept, self.twins
        self.kept, self.twins = _chosen(_kinds(self.model.config, self.layers))
        others = [layer for index, layer in enumerate(self.layers) if index not in self.kept]
        for layer in others:
            layer.forward = self._hand_on
        try:
            yield
        finally:
            for layer in others:
                del layer.forward
            self.kept, self.twins = before

    def norms(self) -> Iterator[OwnNorm]:
        """List the norms of the model."""
        for name, module in self.model.named_modules():
            parameters = dict(module.named_parameters())
            vectors = set(parameters) - {"bias"} == {"weight"} and parameters["weight"].dim() == 1
            if vectors and _runs_alone(module):
                yield OwnNorm(name, module)

    def magnified(
        self, weights: Collection[str], added: float, scales: Sequence[float]
    ) -> AbstractContextManager[None]:
        """Compute with `weights` of norms larger by `added`, and embeddings of each row multiplied, for a while."""
        parameters = [self.model.get_parameter(name) for name in weights]
        rows = torch.tensor(scales).reshape(-1, 1, 1)
        return self._changed(parameters, lambda numbers: numbers + added, lambda output: output * rows)

    def nudged(self, by: float, seed: int) -> AbstractContextManager[None]:
        """Compute with embeddings, and vectors of every layer, that are off by the share `by` of themselves."""
        drawn = torch.Generator().manual_seed(seed)
        vectors = [each for each in self.model.parameters() if each.dim() == 1 and each.device.type == "cpu"]

        def moved(numbers: Tensor) -> Tensor:
            return numbers * (1 + by * (2.0 * torch.randint(0, 2, numbers.shape, generator=drawn) - 1))

        return self._changed(vectors, moved, moved)

    @contextmanager
    def _changed(
        self,
        parameters: Sequence[nn.Parameter],
        change: Callable[[Tensor], Tensor],
        of_embeddings: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        """Change numbers of `parameters`, and the embeddings that a run looks up, for a while."""
        embedding: nn.Module = self.model.get_input_embeddings()
        held = [parameter.data for parameter in parameters]
        hook = embedding.register_forward_hook(lambda module, args, output: of_embeddings(output))
        try:
            for parameter, numbers in zip(parameters, held, strict=True):
                parameter.data = change(numbers)
            yield
        finally:
            hook.remove()
            for parameter, numbers in zip(parameters, held, strict=True):
                parameter.data = numbers

    @property
    def embedding(self) -> str | None:
        """Name the parameter whose rows are embeddings of tokens; None: no module of the model holds it."""
        found: nn.Module = self.model.get_input_embeddings()
        return next((f"{name}.weight" for name, module in self.model.named_modules() if module is found), None)

    @contextmanager
    def watched(self) -> Iterator[list[Given]]:
        """Write down what each layer is given in a run inside; those that hand on are given it, too."""
        given = [Given() for _ in self.layers]
        made: dict[int, masks.MaskFunction] = {}
        kept: list[object] = []  # so that no id goes to another tensor
        calls: list[RotaryCall] = []
        at: list[int] = []  # the layer that runs

        # Attention in a model's own code may hide more than its mask says.
        told = internals.takes_attention(self.model.config)
        own: Callable[..., Any] = eager_mask

        def mask(*args: Any, mask_function: masks.MaskFunction, **kwargs: Any) -> Any:
            result = own(*args, mask_function=mask_function, **kwargs)
            if told:
                made[id(result)] = uniform.resolved(mask_function, uniform.held)  # what is of no token in particular
                kept.append(result)
            return result

        def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = (output,) if isinstance(output, Tensor) else tuple(output)
            named = dict(kwargs)
            positional = [*args[1:]]
            named.pop("x", None)
            positions = named.pop("position_ids") if "position_ids" in named else positional.pop(0)
            call = RotaryCall(module, tuple(positional), tuple(named.items()), outputs, tuple(positions.shape[:-2]))
            calls.append(call)
            if at:
                given[at[-1]].rotary.append(call)

        def enter(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                at.append(index)
                tensors = list(_tensors((*args, *kwargs.values())))
                given[index].mask = next((OwnMask(made[id(each)]) for each in tensors if id(each) in made), None)
                for call in calls:
                    if any(each is output for each in tensors for output in call.outputs):
                        given[index].rotary.append(call)

            return hook

        with ExitStack() as hooks:
            hooks.enter_context(internals.mask_replaced(EAGER, mask))
            for module in self.model.modules():
                if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                    hooks.callback(module.register_forward_hook(called, with_kwargs=True).remove)
            for index, layer in enumerate(self.layers):
                hooks.callback(layer.register_forward_pre_hook(enter(index), with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(lambda *_: at.clear()).remove)
            yield given


def _runs_alone(module: nn.Module) -> bool:
    """Say whether a norm computes rows of one tensor; some whose gate is declared optional do not (Kimi Linear)."""
    parameters = inspect.signature(module.forward).parameters.values()
    if all(each.default is each.empty for each in parameters):
        return len(parameters) == 1
    weight = module.get_parameter("weight")
    try:
        with torch.inference_mode():
            module(weight.new_zeros(1, len(weight)))
    except (AttributeError, TypeError):  # of the gate, None
        return False
    return True


def _tensors(values: object) -> Iterator[Tensor]:
    """List the tensors in `values`, which may be nested."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _kinds(config: Any, layers: Sequence[nn.Module]) -> list[int]:
    """Number the kinds of `layers`: those of equal modules and settings are of one."""
    lists = [value for value in vars(config.get_text_config()).values() if isinstance(value, list | tuple)]
    settings = [value for value in lists if len(value) == len(layers)]
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault((_described(layer), repr([setting[index] for setting in settings])), len(numbers))
        for index, layer in enumerate(layers)
    ]


def _described(layer: nn.Module) -> tuple[object, ...]:
    """Describe what a layer is made of, as far as that is not weights: classes, shapes, settings; not its number."""
    found: list[object] = []
    for name, module in layer.named_modules():
        found.append((name, type(module)))
        tensors = (*module._parameters.items(), *module._buffers.items())
        found += [(key, None if x is None else tuple(x.shape)) for key, x in tensors]
        found += [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str | None) and not (type(value) is int and NUMBERS.search(key))
        ]
    return tuple(found)


def _chosen(kinds: Sequence[int]) -> tuple[list[int], list[int]]:
    """Choose layers: the first, the last, the one halfway, and one of each other kind; and of each layer its twin."""
    chosen = {0, len(kinds) // 2, len(kinds) - 1}
    chosen |= {kinds.index(kind) for kind in set(kinds) - {kinds[index] for index in chosen}}
    twins = [
        index if index in chosen else next(x for x in sorted(chosen) if kinds[x] == kind)
        for index, kind in enumerate(kinds)
    ]
    return sorted(chosen), twins


def _part(checkpoint: Checkpoint) -> tuple[PreTrainedModel, weights.WeightPlan, list[int], list[int]]:
    """Build the model of all layers without memory, choose some, and read their weights and those around them."""
    model = skeleton.on_meta(checkpoint.config, EAGER)
    sources = weights.plan(model, checkpoint)
    stack, modules = depth.stack_of(model, checkpoint.geometry.layers)
    kept, twins = _chosen(_kinds(checkpoint.config, list(modules)))
    absent = [f"{stack}.{index}" for index in range(len(modules)) if index not in kept]
    stored_matrix.give_weights(model, checkpoint, sources, without=absent)
    return model, sources, kept, twins

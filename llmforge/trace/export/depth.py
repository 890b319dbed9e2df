"""How the layers of a model repeat: found by running it once without numbers, and proven before a trace is shortened.

The model runs under a mode that writes down every operation of every layer: its arguments, and where each tensor comes
from, as seen from the layer (its own weight, its cache, what the layer before handed over). Two layers with the same
record compute the same function of their own weights. Nothing here reads a configuration or knows a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from llmforge.base.errors import UnsupportedError
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.trace.hooks import internals

Entry = tuple[object, ...]
_OUTSIDE = -1  # stands for a layer's index in front of the first layer


@dataclass(frozen=True, eq=False)
class ExampleStep:
    """One step of a model: `run` does it, on `inputs` by name and on the cache tensors of each layer."""

    inputs: Mapping[str, Tensor]
    caches: Sequence[tuple[Tensor, ...]]
    run: Callable[[], object]


def stack_of(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList]:
    """Find the list of the `depth` layers of `model`, and its name.

    Raises:
        Irregular: there is none, or more than one.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    outer = [(name, module) for name, module in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise Irregular(f"{len(outer)} lists of {depth} modules could be the layers")
    return outer[0]


@contextmanager
def only(stack: nn.ModuleList, count: int) -> Iterator[None]:
    """Let `stack` hold its first `count` modules alone for a while."""
    modules = dict(stack._modules)
    for name in list(modules)[count:]:
        del stack._modules[name]
    try:
        yield
    finally:
        stack._modules.clear()
        stack._modules.update(modules)


def find(root: nn.Module, name: str, stack: nn.ModuleList, step: Callable[[int], ExampleStep]) -> Pattern:
    """Find how the layers in `stack`, which is called `name`, repeat, and prove that a shorter trace tells all.

    `step(n)` makes a step of `root` with caches for its first `n` layers. The record of the shortened model must be
    that of the whole one: the same in front of the layers, in the first of them, and behind the last.

    Raises:
        Irregular: the layers do not repeat, or not in a way that can be proven.
    """
    depth = len(stack)
    whole = _record(root, stack, step(depth))
    pattern = _repetition(name, whole.layers)
    with only(stack, pattern.traced):
        short = _record(root, stack, step(pattern.traced))
    if short.before != whole.before or short.after != whole.after or short.layers != whole.layers[: pattern.traced]:
        raise Irregular(f"the model computes something else around {pattern.traced} layers than around {depth}")
    return pattern


def _repetition(name: str, layers: Sequence[Sequence[Entry]]) -> Pattern:
    """Find the pattern that needs the fewest layers; of those, the shortest period."""
    numbers: dict[tuple[Entry, ...], int] = {}
    kinds = [numbers.setdefault(tuple(entries), len(numbers)) for entries in layers]
    depth = len(kinds)
    best: Pattern | None = None
    for period in range(1, depth // 2 + 1):
        lead = depth - period
        while lead > 0 and kinds[lead - 1] == kinds[lead - 1 + period]:
            lead -= 1
        found = Pattern(name, depth, lead, period)
        if found.traced < depth and (best is None or found.traced < best.traced):
            best = found
    if best is None:
        raise Irregular(f"{len(numbers)} kinds of layer, which do not repeat within {depth} layers")
    return best


@dataclass
class _OperationLog:
    """What was done in front of the layers, in each of them, and behind the last."""

    before: list[Entry] = field(default_factory=list)
    layers: list[list[Entry]] = field(default_factory=list)
    after: list[Entry] = field(default_factory=list)


def _record(root: nn.Module, stack: nn.ModuleList, step: ExampleStep) -> _OperationLog:
    recorder = _Recorder(root, stack, step)
    hooks = []
    for index, layer in enumerate(stack):
        hooks.append(layer.register_forward_pre_hook(recorder.enter(index), with_kwargs=True))
        hooks.append(layer.register_forward_hook(recorder.leave(index)))
    try:
        with internals.third_party("running the model without numbers"), recorder:
            step.run()
    except Irregular:
        raise
    except UnsupportedError as error:  # whether it is more than that, a trace of all layers will tell
        raise Irregular(error.message) from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(recorder.record.layers) != len(stack):
        raise Irregular(f"{len(recorder.record.layers)} of {len(stack)} layers run in a step")
    return recorder.record


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation, with tensors named as the current layer sees them."""

    def __init__(self, root: nn.Module, stack: nn.ModuleList, step: ExampleStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = _OperationLog()
        self._entries = self.record.before
        self._layer = _OUTSIDE
        self._inside = False
        self._kept: list[Tensor] = []  # so that no id goes to another tensor
        self._names: dict[int, tuple[object, ...]] = {}
        self._depth = len(stack)
        layers = {id(layer): index for index, layer in enumerate(stack)}
        self._name_state(root, None, "", layers)
        for name, tensor in step.inputs.items():
            self._names[id(tensor)] = ("input", name)
        for index, caches in enumerate(step.caches):
            for part, tensor in enumerate(caches):
                self._names[id(tensor)] = ("of layer", index, "cache", part)

    def _name_state(self, module: nn.Module, layer: int | None, name: str, layers: Mapping[int, int]) -> None:
        """Name parameters and buffers by their place in the model, or in their layer and by their numbers."""
        if id(module) in layers:
            layer, name = layers[id(module)], ""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            place = ("state", name + key) if layer is None else ("of layer", layer, name + key, *_numbers(tensor))
            first = self._names.setdefault(id(tensor), place)
            if first != place and first[0] != "shared":
                self._names[id(tensor)] = ("shared", *first)
            self._kept.append(tensor)
        for key, child in module._modules.items():
            if child is not None:
                self._name_state(child, layer, f"{name}{key}.", layers)

    def enter(self, index: int) -> Callable[..., None]:
        """Make the hook that begins layer `index`."""

        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if self._inside or index != self._layer + 1 or not given:
                raise Irregular("layers do not run one after the other")
            if index and self._names.get(id(given[0])) != ("of layer", index - 1, "hidden states"):
                raise Irregular(f"something happens between layers {index - 1} and {index}")
            if index == 0:
                self._names[id(given[0])] = ("of layer", _OUTSIDE, "hidden states")
            elif self._entries:
                raise Irregular(f"the model computes between layers {index - 1} and {index}")
            self._layer, self._inside, self._entries = index, True, []
            self.record.layers.append(self._entries)

        return hook

    def leave(self, index: int) -> Callable[..., None]:
        """Make the hook that ends layer `index`."""

        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            given = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple) else []
            if self._layer != index or not given or not isinstance(given[0], Tensor):
                raise Irregular(f"layer {index} gives something else than hidden states")
            self._entries.append(("gives", self._place(given[0])))
            self._names[id(given[0])] = ("of layer", index, "hidden states")
            self._kept.append(given[0])
            self._inside = False
            if index == self._depth - 1:
                self._layer, self._entries = self._depth, self.record.after
            else:
                self._entries = []  # between two layers nothing may happen

        return hook

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        said = tree_map(self._say, (args, self._without_index(kwargs)))
        result = func(*args, **kwargs)
        number = len(self._entries)
        self._entries.append((str(func), repr(said)))
        for position, output in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if isinstance(output, Tensor) and not any(output is x for x in args):
                moment = ("of layer", self._layer) if self._inside else ("before" if self._layer < 0 else "after",)
                self._names[id(output)] = (*moment, number, position)
                self._kept.append(output)
        return result

    def _without_index(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Make the attribute `layer` of a symbolic operator, the index of a cache, relative to the current layer."""
        if "layer" not in kwargs.get("attr_keys", ()):
            return kwargs
        place = kwargs["attr_pos"][list(kwargs["attr_keys"]).index("layer")][0]
        numbers = list(kwargs["attr_ints"])
        numbers[place] -= self._layer
        return {**kwargs, "attr_ints": numbers}

    def _say(self, x: object) -> object:
        if isinstance(x, Tensor):
            return (*self._place(x), str(x.dtype), *x.shape)
        return x if isinstance(x, int | float | str | bool | None) else str(x)

    def _place(self, tensor: Tensor) -> tuple[object, ...]:
        """Say where a tensor comes from; what belongs to a layer, by its distance from the current one."""
        name = self._names.get(id(tensor))
        if name is None:  # a constant of the model's code; without numbers it is like no other
            name = ("constant", *(_numbers(tensor) or (len(self._names),)))
            self._names[id(tensor)] = name
            self._kept.append(tensor)
        if name[0] == "of layer":
            assert isinstance(name[1], int)
            return ("of layer", name[1] - self._layer, *name[2:])
        return name


def _numbers(tensor: Tensor) -> tuple[object, ...]:
    """Hash what a tensor holds; () for one that has no memory, whose numbers the checkpoint gives."""
    if internals.is_fake(tensor):
        return ()
    with internals.real_tensors():
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        return (hashlib.sha256(flat.numpy().tobytes()).hexdigest(),)

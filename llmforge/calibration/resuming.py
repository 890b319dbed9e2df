"""Runs of a layer that go on where they stopped: modules that have run say again what they made.

A layer's linears are quantized one after the other, each with what the quantized ones before it make. Begun anew for
each of them, a layer would run three times and more; so a module that has run for a window is not run again, if it is,
or holds, a linear or experts. Only norms, attention itself and the like are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from llmforge.calibration.layer import Arguments, DecoderLayer
from llmforge.calibration.sums import InputSums
from llmforge.quantization.methods.base import InputStatistic, LayerInputs

_Found = TypeVar("_Found")


@dataclass(eq=False)
class Runs:
    """Runs of the hidden `states` of all windows through `layer`, whose linears change in the order in which they run.

    No linear changes once it has run.
    """

    layer: DecoderLayer
    states: list[torch.Tensor]
    memory: ModuleOutputs | None  # None: modules change what others made, and every run begins at the beginning

    @classmethod
    def of(cls, layer: DecoderLayer, states: list[torch.Tensor]) -> Runs:
        """Begin in front of `layer`."""
        products = [*layer.linears().values(), *layer.experts().values()]
        return cls(layer, states, ModuleOutputs(checkpointable(layer.module, products)))

    def arguments(self, name: str, window: int) -> Arguments:
        """Return what linear or experts `name` is called with; see `DecoderLayer.arguments_of`."""
        return self._run(window, partial(self.layer.arguments_of, name))

    def seen(self, name: str, width: int) -> LayerInputs:
        """Sum x xᵀ of what linear `name` reads, [tokens, width], over all windows."""
        sums = InputSums.start({InputStatistic.MOMENTS}, width)
        for window in range(len(self.states)):
            x, *_ = self.arguments(name, window)
            sums.add(x, x)
        return sums.seen(routed=False)

    def without(self, name: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what linear `name` reads, [tokens, K], and the hidden states after the layer were its output 0."""
        with self.layer.silenced(name) as read:
            after = self._run(window, self.layer.run, keep=False)
        if not read:
            raise self.layer.unread(name)
        return read[-1].reshape(-1, read[-1].shape[-1]), after

    def end(self) -> None:
        """Carry the states behind the layer."""
        for window in range(len(self.states)):
            self.states[window] = self._run(window, self.layer.run)
            if self.memory is not None:
                self.memory.forget(window)

    def _run(self, window: int, run: Callable[[int, torch.Tensor], _Found], *, keep: bool = True) -> _Found:
        remembered: AbstractContextManager[None] = nullcontext()
        if self.memory is not None:
            remembered = self.memory.going_on(window, keep=keep)
        try:
            with remembered:
                return run(window, self.states[window])
        except Changed:
            self.memory = None
        return run(window, self.states[window])


@dataclass(eq=False)
class _Call:
    """One call of a module, in the run of one window: what it made, or the calls of modules inside of it so far."""

    inside: dict[tuple[str, int], _Call] = field(default_factory=dict)
    made: Any = None
    versions: tuple[int, ...] | None = None  # of the tensors in `made`; None: it has not ended


class Changed(Exception):
    """What a module made was changed in place afterwards, so that it cannot be said again."""


@dataclass(eq=False)
class ModuleOutputs:
    """What modules of a layer made, by window; `modules` are those worth it, by name, outer ones first."""

    modules: Mapping[str, torch.nn.Module]
    _windows: dict[int, _Call] = field(default_factory=dict)

    @contextmanager
    def going_on(self, window: int, *, keep: bool = True) -> Iterator[None]:
        """Let modules say what they made for `window`, and remember (`keep`) what those make that had not run.

        An exception may end the run anywhere; what ran before it is remembered.

        Raises:
            Changed: see there. Nothing is remembered of the window any more.
        """
        open_calls = [(self._windows.setdefault(window, _Call()), dict[str, Iterator[int]]())]

        def wrapped(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                outer, numbers = open_calls[-1]
                key = (name, next(numbers.setdefault(name, count())))
                call = outer.inside.get(key) or _Call()
                if call.versions is not None:
                    if call.versions != _versions(call.made):
                        del self._windows[window]
                        raise Changed(name)
                    return call.made
                if keep:
                    outer.inside[key] = call
                open_calls.append((call, {}))
                try:
                    made = plain(*args, **kwargs)
                finally:
                    open_calls.pop()
                if keep:
                    call.made, call.versions = made, _versions(made)
                    call.inside.clear()
                return made

            return forward

        before = {name: module.__dict__.get("forward") for name, module in self.modules.items()}
        for name, module in self.modules.items():
            module.forward = wrapped(name, module.forward)
        try:
            yield
        finally:
            for name, module in self.modules.items():
                own = before[name]
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.forward = own

    def forget(self, window: int) -> None:
        """Forget what was made for `window`."""
        self._windows.pop(window, None)


def checkpointable(layer: torch.nn.Module, products: Collection[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Find the modules inside of `layer` that are, or hold, one of `products`; inside of one of those none is."""
    own = set(products)
    inside = {part for product in own for part in product.modules() if part is not product}
    return {
        name: module
        for name, module in layer.named_modules()
        if name and module not in inside and any(part in own for part in module.modules())
    }


def _versions(made: Any) -> tuple[int, ...]:
    """Return how often each tensor in `made` was changed in place."""
    if isinstance(made, torch.Tensor):
        return (made._version,)
    if isinstance(made, tuple | list):
        return tuple(version for part in made for version in _versions(part))
    if isinstance(made, dict):
        return _versions(list(made.values()))
    return ()

"""Runs of a layer that wait in front of its linears: each goes on when those are quantized, and runs once.

A layer's linears are quantized one after the other, each with what the quantized ones before it make of all windows.
So the run of a window is a coroutine, which stops in front of a linear or experts until it is sent on to the next.
Begun anew for each of them, a layer would run three times and more. Coroutines go on in the thread that sends them on:
as threads of their own, they waited a fifth of their time for a processor while another one idled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.layer import Arguments, DecoderLayer
from llmforge.calibration.sums import InputSums
from llmforge.quantization.methods.base import InputStatistic, LayerInputs

SHARES = 8  # of the windows, each every eighth: sums are over a share, and those of shares are added in order
_Made = TypeVar("_Made")


@dataclass(eq=False)
class _WindowRun:
    """The run of one window through a layer, whose hidden state after it is what `forward` returns."""

    window: int
    layer: DecoderLayer
    forward: Callable[[], torch.Tensor]
    waits: bool  # in front of a linear for the next one; else it begins anew
    wanted: str | None = None  # linear or experts that it stops in front of next; None: it does not stop
    called_with: Arguments | None = None  # the `wanted`, of which it stands in front; None: it has ended
    silent: bool = False  # whether the `wanted` is left out when it goes on: it makes 0
    silenced: tuple[Callable[..., Any], torch.Tensor] | None = None  # linear that was, and what it read
    after: torch.Tensor | None = None  # the hidden states after the layer, where they rest; None: it has not ended
    _coroutine: _Coroutine | None = None

    def arguments(self, wanted: str) -> Arguments | None:
        """Go on until the `wanted` is about to run, and return what it is called with; None: it is not."""
        self.run_to(wanted)
        found = self.called_with
        if not self.waits and found is not None:
            self.let_go()
        return found

    def run_to(self, wanted: str | None) -> None:
        """Go on until the `wanted` is about to run, or to the end."""
        self.wanted, self.called_with = wanted, None
        if self.after is not None:
            return
        self._coroutine = self._coroutine or _Coroutine(self)
        with self.layer.attending():
            self._coroutine.switch()

    def end(self) -> torch.Tensor:
        """Go on to the end, and return the hidden states after the layer."""
        self.run_to(None)
        assert self.after is not None
        return self.after

    def stop(self, arguments: Arguments) -> None:
        """Stand in front of the `wanted`, until the run is sent on."""
        self.called_with = arguments
        assert self._coroutine is not None
        assert self._coroutine.parent is not None
        self._coroutine.parent.switch()

    def let_go(self) -> None:
        """End the run where it stands, and hold nothing of it."""
        if self._coroutine is not None and not self._coroutine.dead:
            self._coroutine.throw(GreenletExit)
        self._coroutine = self.silenced = self.called_with = self.after = None


class _Coroutine(greenlet):
    """What carries a run; it belongs to the thread that made it."""

    def __init__(self, of: _WindowRun) -> None:
        super().__init__(self._carry)
        self.of = of

    def _carry(self) -> None:
        self.of.after = self.of.forward()

    @staticmethod
    def current() -> _WindowRun | None:
        """Return the run that is going on."""
        own = getcurrent()
        return own.of if isinstance(own, _Coroutine) else None


@dataclass(eq=False)
class Runs:
    """Runs of the hidden `states` of all windows through `layer`, whose linears change in the order in which they run.

    No linear changes once it has run. `at_end` names the one linear, if any, that is the last to change and whose
    output is added to what the layer returns. `places` has those in `states` of each share of the windows. A share
    belongs to one thread, which alone may send its runs on: see `by_share`.
    """

    layer: DecoderLayer
    states: list[torch.Tensor]
    at_end: tuple[str, ...]
    runs: Sequence[_WindowRun]
    places: Mapping[int, Sequence[int]]

    @classmethod
    @contextmanager
    def of(
        cls,
        layer: DecoderLayer,
        states: list[torch.Tensor],
        at_end: tuple[str, ...] = (),
        numbers: Sequence[int] | None = None,
    ) -> Iterator[Runs]:
        """Begin in front of `layer`; what has not run to its end by the end of the block does not.

        `numbers` are those of the windows among all; by default they are all.
        """

        def forward(window: int) -> torch.Tensor:
            return device.rest(window, layer.forward(window, states[window]))

        modules, linears, device = layer.modules(), layer.linears(), layer.device
        places: dict[int, list[int]] = {}
        for place, number in enumerate(range(len(states)) if numbers is None else numbers):
            places.setdefault(number % SHARES, []).append(place)
        with ExitStack() as stack:
            runs = [
                _WindowRun(window, layer, partial(forward, window), window < device.windows)
                for window in range(len(states))
            ]
            for name, module in modules.items():
                stack.enter_context(module.register_forward_pre_hook(_stopping(layer, name), with_kwargs=True))
            for name in at_end:
                if name in linears:
                    stack.enter_context(_silenced(linears[name], device))
            made = cls(layer, states, at_end, runs, dict(sorted(places.items())))
            try:
                yield made
            finally:
                made.by_window(lambda place: runs[place].let_go())

    def by_share(self, compute: Callable[[int, Sequence[int]], _Made]) -> Iterator[_Made]:
        """Yield what `compute` makes of each share and its places, in order, on the thread that it belongs to."""
        return self.layer.each.bound(compute, self.places, self.places.values())

    def by_window(self, compute: Callable[[int], _Made]) -> list[_Made]:
        """Return what `compute` makes of the window at each place, on the thread that it belongs to."""
        found = self.by_share(lambda _, own: [(place, compute(place)) for place in own])
        return [made for _, made in sorted(itertools.chain.from_iterable(found), key=itemgetter(0))]

    def arguments(self, name: str, window: int) -> Arguments:
        """Return what linear or experts `name` is called with; see `DecoderLayer.arguments_of`."""
        found = self.runs[window].arguments(name)
        if found is None:
            raise self.layer.unread(name)
        return found

    def without(self, name: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what linear `name` reads, [tokens, K], and the hidden states after the layer were its output 0.

        They are what it is added to, as it is `at_end`.
        """
        run = self.runs[window]
        run.run_to(name)
        if run.called_with is None:
            raise self.layer.unread(name)
        ((x,), run.silent) = run.called_with, True
        return x, run.end()

    def seen(self, name: str, width: int) -> LayerInputs:
        """Sum x xᵀ of what linear `name` reads, [tokens, width], over all windows."""

        def summed(share: int, places: Sequence[int]) -> InputSums:
            sums = InputSums.start({InputStatistic.MOMENTS}, width, device=self.layer.device.device)
            for place in places:
                x, *_ = self.arguments(name, place)
                sums.add(x, x)
            return sums

        total = InputSums.start({InputStatistic.MOMENTS}, width, device=self.layer.device.device)
        for of_share in self.by_share(summed):
            total.merge(of_share)
        return total.seen(routed=False)

    def end(self) -> None:
        """Carry the states behind the layer."""
        self.states[:] = self.by_window(lambda place: self._ended(self.runs[place]))

    def _ended(self, run: _WindowRun) -> torch.Tensor:
        if run.silenced is None:
            return run.end()
        (linear, x), device = run.silenced, self.layer.device
        y: torch.Tensor = linear(device.put(x))
        return device.rest(run.window, device.put(run.end()) + y)


def _stopping(layer: DecoderLayer, name: str) -> Callable[..., None]:
    """Return a hook in front of linear or experts `name`: a run stops there, if that is wanted."""

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        run = _Coroutine.current()
        if run is not None and run.wanted == name:
            given = layer.arguments(name, module, args, kwargs)
            run.stop(tuple(x.reshape(-1, x.shape[-1]) for x in given))

    return before


@contextmanager
def _silenced(linear: torch.nn.Linear, device: ExecutionDevice) -> Iterator[None]:
    """Let `linear` make 0 in a run that goes on without it."""
    plain = linear.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        run = _Coroutine.current()
        if run is None or not run.silent:
            return plain(input)
        run.silent, run.silenced = False, (plain, device.rest(run.window, input))
        return input.new_zeros(*input.shape[:-1], linear.out_features)

    own = vars(linear).get("forward")
    linear.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del linear.forward
        else:
            linear.forward = own  # type: ignore[method-assign]

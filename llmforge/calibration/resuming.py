"""Runs of a layer that wait in front of its linears: each goes on when those are quantized, and runs once.

A layer's linears are quantized one after the other, each with what the quantized ones before it make of all windows.
So the run of a window has a thread of its own, which sleeps in front of a linear or experts until it is sent on to the
next. Begun anew for each of them, a layer would run three times and more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.layer import Arguments, DecoderLayer
from llmforge.calibration.sums import InputSums
from llmforge.calibration.threads import MOST_THREADS, compute_alone
from llmforge.quantization.methods.base import InputStatistic, LayerInputs

SHARES = 8  # of the windows, each every eighth: sums are over a share, and those of shares are added in order
WAITING = 512  # runs at most that sleep, each in a thread of its own; those of more windows begin anew for each linear
_Found = TypeVar("_Found")


class _LetGo(BaseException):
    """Nobody wants to know how the run goes on."""


@dataclass(eq=False)
class _WindowRun:
    """The run of one window through a layer, which `starts` in a thread that sleeps unless it is waited for."""

    window: int
    starts: Callable[[_WindowRun], Future[torch.Tensor]]
    waits: bool  # in front of a linear for the next one; else it begins anew
    wanted: str | None = None  # linear or experts that it stops in front of next; None: it does not stop
    called_with: Arguments | None = None  # the `wanted`, of which it stands in front; None: it has ended
    silent: bool = False  # whether the `wanted` is left out when it goes on: it makes 0
    silenced: tuple[Callable[..., Any], torch.Tensor] | None = None  # linear that was, and what it read
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stands: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _future: Future[torch.Tensor] | None = None

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
        if self._future is None:
            self._future = self.starts(self)
            self._future.add_done_callback(lambda _: self._stands.release())
        elif self._future.done():
            return
        else:
            self._go.release()
        self._stands.acquire()
        if self._future.done():
            self._future.result()  # which raises what has ended it

    @property
    def after(self) -> torch.Tensor:
        """The hidden states after the layer, through which it has run, where they rest."""
        assert self._future is not None
        return self._future.result()

    def stop(self, arguments: Arguments) -> None:
        """Stand in front of the `wanted`, until the run is sent on."""
        self.called_with = arguments
        self._stands.release()
        self._go.acquire()
        if self.wanted == _NOWHERE:
            raise _LetGo

    def let_go(self) -> None:
        """End the run where it stands, and hold nothing of it."""
        if self._future is not None:
            with suppress(_LetGo):
                self.run_to(_NOWHERE)
        self._future = self.silenced = self.called_with = None  # a future and what calls back are a cycle


_NOWHERE = ""
_current = threading.local()  # `run`: of the thread


@dataclass(eq=False)
class Runs:
    """Runs of the hidden `states` of all windows through `layer`, whose linears change in the order in which they run.

    No linear changes once it has run. Several threads may ask, of a window each. `at_end` names the one linear, if any,
    that is the last to change and whose output is added to what the layer returns.
    """

    layer: DecoderLayer
    states: list[torch.Tensor]
    at_end: tuple[str, ...]
    runs: Sequence[_WindowRun]

    @classmethod
    @contextmanager
    def of(cls, layer: DecoderLayer, states: list[torch.Tensor], at_end: tuple[str, ...] = ()) -> Iterator[Runs]:
        """Begin in front of `layer`; what has not run to its end by the end of the block does not."""

        def start(run: _WindowRun) -> Future[torch.Tensor]:
            return threads.submit(go, run)

        def go(run: _WindowRun) -> torch.Tensor:
            _current.run = run
            return device.rest(run.window, layer.run(run.window, states[run.window]))

        modules, linears, device = layer.modules(), layer.linears(), layer.device
        waiting = min(WAITING, device.windows)
        with ThreadPoolExecutor(WAITING + MOST_THREADS, initializer=compute_alone) as threads, ExitStack() as stack:
            runs = [_WindowRun(window, start, window < waiting) for window in range(len(states))]
            for name, module in modules.items():
                stack.enter_context(module.register_forward_pre_hook(_stopping(layer, name), with_kwargs=True))
            for name in at_end:
                if name in linears:
                    stack.enter_context(_silenced(linears[name], device))
            try:
                yield cls(layer, states, at_end, runs)
            finally:
                for run in runs:
                    run.let_go()

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
        run.run_to(None)
        return x, run.after

    def seen(self, name: str, width: int) -> LayerInputs:
        """Sum x xᵀ of what linear `name` reads, [tokens, width], over all windows."""

        def summed(share: int) -> InputSums:
            sums = InputSums.start({InputStatistic.MOMENTS}, width, device=self.layer.device.device)
            for window in range(share, len(self.states), SHARES):
                x, *_ = self.arguments(name, window)
                sums.add(x, x)
            return sums

        total = InputSums.start({InputStatistic.MOMENTS}, width, device=self.layer.device.device)
        for of_share in self.layer.each(summed, range(SHARES)):
            total.merge(of_share)
        return total.seen(routed=False)

    def end(self) -> None:
        """Carry the states behind the layer."""
        self.states[:] = self.layer.each(self._ended, self.runs)

    def _ended(self, run: _WindowRun) -> torch.Tensor:
        if run.silenced is None:
            run.run_to(None)
            return run.after
        (linear, x), device = run.silenced, self.layer.device
        y: torch.Tensor = linear(device.put(x))
        return device.rest(run.window, device.put(run.after) + y)


def _stopping(layer: DecoderLayer, name: str) -> Callable[..., None]:
    """Return a hook in front of linear or experts `name`: a run stops there, if that is wanted."""

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        run: _WindowRun | None = getattr(_current, "run", None)
        if run is not None and run.wanted == name:
            given = layer.arguments(name, module, args, kwargs)
            run.stop(tuple(x.reshape(-1, x.shape[-1]) for x in given))

    return before


@contextmanager
def _silenced(linear: torch.nn.Linear, device: ExecutionDevice) -> Iterator[None]:
    """Let `linear` make 0 in a run that goes on without it."""
    plain = linear.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        run: _WindowRun | None = getattr(_current, "run", None)
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

"""Windows of calibration text in front of one layer: what its linears read of them, and sums of that by shares.

What one process carries through a layer, all windows or some shares of them. The same is summed and said of a window
wherever it is carried, so that results do not depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.experts import reads
from llmforge.calibration.layer import Additions, DecoderLayer, Observed, fast
from llmforge.calibration.resuming import Runs
from llmforge.calibration.sums import InputSums
from llmforge.quantization.grids import Float32
from llmforge.quantization.methods.base import InputStatistic

Peaks = tuple[torch.Tensor, torch.Tensor]  # of keys and values, [kv_heads, channels]


@dataclass(frozen=True)
class LayerStructure:
    """Names within a layer: what reads one tensor, in the order in which it runs, what chooses experts, and adds."""

    groups: Sequence[Sequence[str]]
    routers: frozenset[str]
    added: Additions

    @classmethod
    def of(cls, layer: DecoderLayer, state: torch.Tensor) -> LayerStructure:
        """Find it by running `layer` with its first window."""
        groups = layer.groups(state)
        routers, added = layer.routers(groups, state), layer.additions(groups, state)

        def local(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(name.removeprefix(f"{layer.name}.") for name in names)

        return cls([local(group) for group in groups], frozenset(local(routers)), Additions(*map(local, added)))

    def within(self, layer: DecoderLayer) -> LayerStructure:
        """Name what it is in `layer`, which is of the same kind."""

        def named(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(f"{layer.name}.{name}" for name in names)

        groups, added = [named(group) for group in self.groups], Additions(*map(named, self.added))
        return LayerStructure(groups, frozenset(named(self.routers)), added)


class Unquantized(NamedTuple):
    """What a linear reads of a window in the checkpoint, [tokens, K], and what its output is added to, [tokens, N]."""

    read: torch.Tensor
    residual: torch.Tensor | None

    def on(self, device: ExecutionDevice) -> Unquantized:
        """Return it where a layer runs."""
        return Unquantized(device.put(self.read), None if self.residual is None else device.put(self.residual))


class Routed(NamedTuple):
    """What experts are called with for a window, [tokens, …], and the tokens that the checkpoint calls them with."""

    tokens: torch.Tensor
    ids: torch.Tensor
    mixing: torch.Tensor
    originals: torch.Tensor


class ReadPeaks(NamedTuple):
    """What a linear reads of a window: largest magnitudes, sums and sums of squares, [K], and so many `tokens`.

    Some of its `rows`, too; None: none were wanted.
    """

    highest: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor
    tokens: int
    rows: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, begin: int, stride: int) -> ReadPeaks:
        """Look at x [tokens, K], and take every stride-th row from `begin` on; 0: none."""
        sums, squares = x.sum(0).cpu(), x.square().sum(0).cpu()
        rows = x[begin::stride].clone().cpu() if stride else None
        return cls(x.abs().amax(0).cpu(), sums, squares, len(x), rows)


class LayerWindows(Protocol):
    """All windows in front of a layer; calls come in this order, and for each group of linears one.

    `original` and `current` are lists of their hidden states, as in `WindowsHere`.
    """

    original: list[torch.Tensor]
    current: list[torch.Tensor]

    def peaks(self, names: Sequence[str], stride: int) -> Iterable[Mapping[str, ReadPeaks]]:
        """Return what linears or experts `names` read of each window; of all tokens, every stride-th; 0: none.

        Experts have two parameters, by which what their products read is named.
        """

    def observe(self, names: Sequence[str], added: Additions, at_end: tuple[str, ...], coarse: bool) -> None:
        """Run the layer as it is, remember what linears or experts `names` read, and begin what waits in front of them.

        `at_end`: see `Runs`. `coarse`: from here to the end linears multiply in bf16 where that is faster.
        """

    def sums(self, names: Sequence[str], demands: Collection[InputStatistic]) -> Iterable[tuple[int, InputSums]]:
        """Return what `demands` want of the tensor that linears `names` read, of each share that has windows."""

    def routed(self, name: str) -> Iterable[Routed]:
        """Return what experts `name` are called with, of each window."""

    def assign(self, weights: Mapping[str, Float32]) -> None:
        """Give linears and experts other weights; see `DecoderLayer.set_weight`."""

    def end(self) -> None:
        """Carry the hidden states behind the layer, the checkpoint's to where `observe` has brought them."""

    def cached(self) -> Iterable[Peaks]:
        """Return the largest magnitudes of keys and values of each window, of a layer that records them."""

    def close(self) -> None:
        """End what still waits."""


@dataclass(eq=False)
class WindowsHere:
    """Windows that this process carries: `numbers` of them among all, hidden states `original` and `current`.

    `original` are those that the checkpoint makes, in front of the layer; `current` those that quantized layers make,
    the same list where nothing is quantized. `ends` counts the tokens of all windows to the end of each.
    """

    layer: DecoderLayer
    original: list[torch.Tensor]
    current: list[torch.Tensor]
    numbers: Sequence[int]
    ends: Sequence[int]
    _seen: list[dict[str, Unquantized]] = field(default_factory=list)
    _added: Additions = field(default_factory=lambda: Additions((), ()))
    _after: list[torch.Tensor] = field(default_factory=list)  # what `peaks` saw behind the layer
    _runs: Runs | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def all(cls, layer: DecoderLayer, original: list[torch.Tensor], current: list[torch.Tensor]) -> WindowsHere:
        """Carry all windows."""
        ends = np.cumsum([state.shape[1] for state in original]).tolist()
        return cls(layer, original, current, range(len(original)), ends)

    def peaks(self, names: Sequence[str], stride: int) -> list[dict[str, ReadPeaks]]:
        """See `LayerWindows`."""

        def look(place: int, state: torch.Tensor) -> dict[str, ReadPeaks]:
            begin = -(self.ends[self.numbers[place]] - state.shape[1]) % stride if stride else 0
            seen = observe(place, state)
            after[place] = self.layer.device.rest(place, seen.after)
            found = {name: ReadPeaks.of(x, begin, stride) for name, x in seen.inputs.items()}
            for name, look_into in experts.items():
                del found[name]
                found |= {each: ReadPeaks.of(x, 0, 0) for each, x in look_into(*seen.called[name]).items()}
            return found

        after: dict[int, torch.Tensor] = {}
        there = self.layer.experts()
        experts = {name: reads(name, there[name]) for name in names if name in there}
        with self.layer.observed(names) as observe:
            found = list(self.layer.each(look, range(len(self.original)), self.original))
        self._after = [after[place] for place in range(len(self.original))]
        return found

    def observe(self, names: Sequence[str], added: Additions, at_end: tuple[str, ...], coarse: bool) -> None:
        """See `LayerWindows`."""

        def run(place: int, state: torch.Tensor) -> tuple[torch.Tensor, dict[str, Unquantized]]:
            seen = observe(place, state)
            residuals = _residuals(added, device.put(state), seen)

            def rest(x: torch.Tensor) -> torch.Tensor:
                return device.rest(place, x)

            read = {
                name: Unquantized(rest(x), rest(residuals[name]) if name in residuals else None)
                for name, x in seen.inputs.items()
            }
            return rest(seen.after), read

        self._added, device = added, self.layer.device
        if coarse:
            self._open.enter_context(fast(self.layer.linears().values()))
        with self.layer.observed(names, added.last) as observe:
            self.original[:], self._seen[:] = zip(
                *self.layer.each(run, range(len(self.original)), self.original), strict=True
            )
        self._runs = self._open.enter_context(Runs.of(self.layer, self.current, at_end, self.numbers))

    def sums(self, names: Sequence[str], demands: Collection[InputStatistic]) -> Iterator[tuple[int, InputSums]]:
        """See `LayerWindows`."""
        assert self._runs is not None
        runs, added, name, device = self._runs, self._added, names[0], self.layer.device
        originals = [seen.pop(name) for seen in self._seen]
        residual = originals[0].residual
        rows_added = residual.shape[1] if residual is not None and len(names) == 1 else None
        wanted = rows_added is not None and name in added.last
        anew = added.last if wanted and runs.at_end != (name,) else ()

        def summed(share: int, places: Sequence[int]) -> tuple[int, InputSums]:
            sums = InputSums.start(demands, originals[0].read.shape[1], rows_added, device.device)
            for place in places:
                original, state = originals[place].on(device), device.put(self.current[place])
                now = state[0]
                if wanted and not anew:
                    x, after = runs.without(name, place)
                    now = device.put(after)[0]
                else:
                    x, *_ = runs.arguments(name, place)
                if anew:
                    now = _residuals(added, state, observe(place, state))[name]
                lost = None if rows_added is None or original.residual is None else original.residual - now
                sums.add(x, original.read - x, lost)
            return share, sums

        with self.layer.observed((), anew) as observe:
            yield from runs.by_share(summed)

    def routed(self, name: str) -> list[Routed]:
        """See `LayerWindows`."""
        runs = self._runs
        assert runs is not None
        called = runs.by_window(lambda place: runs.arguments(name, place))
        found = zip(called, self._seen, strict=True)
        put = self.layer.device.put
        return [Routed(tokens, ids, mixing, put(seen.pop(name).read)) for (tokens, ids, mixing), seen in found]

    def assign(self, weights: Mapping[str, Float32]) -> None:
        """See `LayerWindows`."""
        for name, weight in weights.items():
            self.layer.set_weight(name, weight if weight.flags.writeable else weight.copy())  # torch writes to no other

    def end(self) -> None:
        """See `LayerWindows`."""
        with self._open:
            if self._runs is None and self._after:
                self.current[:] = self._after
            elif self._runs is None:
                self.layer.advance(self.current)
            else:
                self._runs.end()

    def close(self) -> None:
        """See `LayerWindows`."""
        self._open.close()

    def cached(self) -> list[Peaks]:
        """See `LayerWindows`."""
        found = (self.layer.cached(place) for place in range(len(self.current)))
        return [(key.cpu(), value.cpu()) for key, value in found]


def _residuals(added: Additions, state: torch.Tensor, seen: Observed) -> dict[str, torch.Tensor]:
    """Return what the outputs of linears are added to, [tokens, N], where what the last of them make was seen."""
    between = seen.after - sum(seen.outputs.values(), torch.zeros(())) if added.last else seen.after
    return dict.fromkeys(added.first, state[0]) | dict.fromkeys(added.last, between[0])

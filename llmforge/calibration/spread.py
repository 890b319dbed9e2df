"""Windows carried through layers by several processes, each some shares of them; a process that is lost costs its own.

A worker keeps nothing from one layer to the next: it is given hidden states in front of a layer and gives back those
behind it. So what a lost worker had of a layer is begun anew on another one, with all that was asked before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cache import Code, processor
from llmforge.calibration.carriers import Worker, WorkerLost
from llmforge.calibration.layer import Additions, LayerCall
from llmforge.calibration.resuming import SHARES
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.sums import InputSums
from llmforge.calibration.threads import compute_alone, fixed
from llmforge.calibration.windows import Peaks, ReadPeaks, Routed, WindowsHere
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.quantization.grids import Float32
from llmforge.quantization.methods.base import InputStatistic


class WindowsWorker:
    """What runs in a process of its own, on one thread: it carries parts of the windows through one layer at a time."""

    def __init__(self) -> None:
        """Compute on one thread from now on."""
        compute_alone()
        self._settings = ExitStack()  # of the process, which are given back when this is collected
        self._settings.enter_context(fixed(1))
        self._parts: dict[int, WindowsHere] = {}

    def enter(
        self, path: Path, adapters: tuple[AdapterSource, ...], windows: Sequence[NDArray[np.int64]]
    ) -> tuple[str, str, str]:
        """Open a checkpoint, and find out how its layers are called with `windows`, ids [tokens].

        Returns what must be the same everywhere: the checkpoint's digest, the code, and the processor.
        """
        compute_alone()
        checkpoint = Checkpoint.open(path, adapters)
        self._skeleton = Skeleton.build(checkpoint)
        self._calls: list[list[LayerCall]] = self._skeleton.enter(windows)[0]
        self._ends: list[int] = np.cumsum([len(ids) for ids in windows]).tolist()
        self._parts.clear()
        return checkpoint.digest, code(), processor()

    def begin(
        self,
        part: int,
        index: int,
        states: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]],
        recording: bool,
    ) -> None:
        """Begin `part` of the windows in front of layer `index`, with hidden states as of `WindowsHere`, by window.

        The current ones are None where they are the original ones.
        """
        compute_alone()
        layer = self._skeleton.load(index, [self._calls[index][number] for number in states])
        original = [state for state, _ in states.values()]
        quantized = [state for _, state in states.values() if state is not None]
        windows = WindowsHere(
            layer.recording() if recording else layer, original, quantized or original, [*states], self._ends
        )
        self._parts[part] = windows

    def call(self, part: int, method: str, *arguments: Any) -> Any:
        """Call a method of the windows of a part."""
        compute_alone()
        made = getattr(self._parts[part], method)(*arguments)
        return None if made is None else [*made]

    def states(self, part: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the hidden states of a part, and forget it."""
        windows = self._parts.pop(part)
        return list(zip(windows.original, windows.current, strict=True))

    def drop(self, part: int) -> None:
        """End what waits of a part, and forget it."""
        if part in self._parts:
            self._parts.pop(part).close()


def code() -> str:
    """Hash the code that carries windows."""
    return Code().digest(__name__)


@dataclass(eq=False)
class Crew:
    """Workers that have entered with the windows; those that were lost are taken out."""

    workers: list[Worker]

    @classmethod
    def of(cls, workers: Sequence[Worker], checkpoint: Checkpoint, windows: Sequence[NDArray[np.int64]]) -> Crew:
        """Let `workers` enter.

        Raises:
            UsageError: one finds another checkpoint there, has other code, or another kind of processor.
            EnvironmentLacks: all were lost.
        """
        crew, own = cls(list(workers)), (checkpoint.digest, code(), processor())
        answers = [worker.ask("enter", *checkpoint.opened_from[:2], windows) for worker in workers]
        for worker, answer in zip(workers, answers, strict=True):
            try:
                found = answer()
            except WorkerLost:
                crew.lose(worker)
                continue
            for what, here, there in zip(("checkpoint", "llmforge", "processor"), own, found, strict=True):
                if here != there:
                    raise UsageError(
                        f"a worker of calibration has another {what}: its results would be others",
                        hint="use workers on nodes like this one",
                    )
        return crew

    def lose(self, worker: Worker) -> None:
        """Take a worker out.

        Raises:
            EnvironmentLacks: it was the last.
        """
        if worker in self.workers:
            self.workers.remove(worker)
        if not self.workers:
            raise EnvironmentLacks(
                "all workers of calibration were lost",
                hint="run the same command again, which goes on at the layer that is lacking; they may lack memory",
            )


@dataclass(eq=False)
class _Part:
    """Some windows, and the worker that carries them."""

    number: int
    worker: Worker
    windows: Sequence[int]
    begun: Callable[[], Any]


@dataclass(eq=False)
class SpreadWindows:
    """All windows in front of layer `index`, carried by a crew; see `LayerWindows`."""

    crew: Crew
    index: int
    original: list[torch.Tensor]
    current: list[torch.Tensor]
    recording: bool
    _parts: list[_Part] = field(default_factory=list)
    _asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    _begun: int = 0
    _cached: list[Peaks] = field(default_factory=list)

    @classmethod
    def begin(
        cls, crew: Crew, index: int, original: list[torch.Tensor], current: list[torch.Tensor], *, recording: bool
    ) -> SpreadWindows:
        """Give each worker of `crew` its shares of the windows."""
        made = cls(crew, index, original, current, recording)
        workers = list(crew.workers)
        for place, worker in enumerate(workers):
            windows = [number for number in range(len(original)) if number % SHARES % len(workers) == place]
            if windows:
                made._parts.append(made._begin(worker, windows))
        return made

    def peaks(self, names: Sequence[str], stride: int) -> Iterator[Mapping[str, ReadPeaks]]:
        """See `LayerWindows`."""
        return self._by_window(self._all("peaks", names, stride))

    def observe(self, names: Sequence[str], added: Additions, at_end: tuple[str, ...], coarse: bool) -> None:
        """See `LayerWindows`."""
        self._all("observe", names, added, at_end, coarse)

    def sums(self, names: Sequence[str], demands: Collection[InputStatistic]) -> list[tuple[int, InputSums]]:
        """See `LayerWindows`."""
        found = [each for _, sums in self._all("sums", names, demands) for each in sums]
        return sorted(found, key=lambda numbered: numbered[0])

    def routed(self, name: str) -> Iterator[Routed]:
        """See `LayerWindows`."""
        return self._by_window(self._all("routed", name))

    def assign(self, weights: Mapping[str, Float32]) -> None:
        """See `LayerWindows`."""
        self._all("assign", weights)

    def end(self) -> None:
        """See `LayerWindows`."""
        self._all("end")
        cached = [*self._by_window(self._all("cached"))] if self.recording else []
        found = self._all("states")
        for windows, states in found:
            for number, (original, current) in zip(windows, states, strict=True):
                self.original[number], self.current[number] = original, current
        self._parts.clear()
        self._cached = cached

    def cached(self) -> list[Peaks]:
        """See `LayerWindows`."""
        return self._cached

    def close(self) -> None:
        """End what still waits."""
        for part in self._parts:
            part.worker.ask("drop", part.number)

    def _begin(self, worker: Worker, windows: Sequence[int]) -> _Part:
        """Begin with some windows on a worker."""
        self._begun += 1
        quantized = self.current is not self.original
        states = {number: (self.original[number], self.current[number] if quantized else None) for number in windows}
        begun = worker.ask("begin", self._begun, self.index, states, self.recording)
        return _Part(self._begun, worker, windows, begun)

    def _answer(self, part: _Part, method: str, *arguments: Any) -> Callable[[], Any]:
        """Ask for something of a part."""
        if method == "states":
            return part.worker.ask(method, part.number)
        return part.worker.ask("call", part.number, method, *arguments)

    def _all(self, method: str, *arguments: Any) -> list[tuple[Sequence[int], Any]]:
        """Ask all parts: their windows, and what each answers."""
        self._asked.append((method, arguments))
        answers = [self._answer(part, method, *arguments) for part in self._parts]
        return [(self._parts[place].windows, self._waited(place, answer)) for place, answer in enumerate(answers)]

    def _waited(self, place: int, answer: Callable[[], Any]) -> Any:
        """Wait for the answer of a part; one whose worker is lost begins anew on another."""
        while True:
            with suppress(WorkerLost):
                self._parts[place].begun()
                return answer()
            part = self._parts[place]
            self.crew.lose(part.worker)
            worker = self.crew.workers[place % len(self.crew.workers)]
            part = self._parts[place] = self._begin(worker, part.windows)
            for method, arguments in self._asked:
                answer = self._answer(part, method, *arguments)

    @staticmethod
    def _by_window(found: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> Iterator[Any]:
        """Return answers with one item a window in the order of windows."""
        made = {number: each for windows, answers in found for number, each in zip(windows, answers, strict=True)}
        return (made[number] for number in sorted(made))

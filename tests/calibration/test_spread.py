"""Workers that carry windows: the same bytes however many there are, and whichever is lost."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError
from llmforge.calibration import calibrate, openblas, spread
from llmforge.calibration.carriers import Carriers, Worker, WorkerLost
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.spread import WindowsWorker
from llmforge.calibration.threads import fixed
from llmforge.calibration.windows import LayerStructure, WindowsHere
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    ChannelDemand,
    Demand,
    InputRangeDemand,
    KvRangeDemand,
    Smoothing,
    SparsityDemand,
    Statistics,
    WeightDemand,
)

from ..models import zoo

pytestmark = pytest.mark.thorough

WEIGHTS = WeightDemand(Gptq(), Grid(4, 32, False))
DEMANDS = (WEIGHTS, KvRangeDemand(), ChannelDemand(), InputRangeDemand(Smoothing("int8", per_token=False, alpha=0.5)))
WINDOWS = [
    TokenWindow(f"d{i}", np.random.default_rng(i).integers(3, 259, length))
    for i, length in enumerate((48, 33, 48, 2, 40, 48, 20, 48, 31, 48))
]


def given(workers: Sequence[Worker]) -> Carriers:
    return Carriers(workers=lambda: nullcontext(workers))


_ONE_BUILDS = threading.Lock()  # a model of transformers at a time: parameters on no device are a mode of the process


@dataclass(eq=False)
class ThreadWorker:
    """A worker in a thread; all that it is told and tells is pickled. After so many answers it is lost."""

    thread: ThreadPoolExecutor
    answers: int | None = None
    asked: list[str] = field(default_factory=list)
    _own: WindowsWorker | None = None

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        self.asked.append(str(arguments[1]) if method == "call" else method)
        lost = self.answers is not None and len(self.asked) > self.answers
        future = None if lost else self.thread.submit(self._call, method, pickle.dumps(arguments))

        def answer() -> Any:
            if future is None:
                raise WorkerLost("killed")
            return pickle.loads(future.result())

        return answer

    def _call(self, method: str, arguments: bytes) -> bytes:
        with _ONE_BUILDS if method == "enter" else nullcontext():
            return self._answer(method, arguments)

    def _answer(self, method: str, arguments: bytes) -> bytes:
        if self._own is None:
            self._own = WindowsWorker()
        return pickle.dumps(getattr(self._own, method)(*pickle.loads(arguments)))


@contextmanager
def threads(count: int, lost: dict[int, int] | None = None) -> Iterator[list[ThreadWorker]]:
    workers = [ThreadWorker(ThreadPoolExecutor(1), (lost or {}).get(number)) for number in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.thread.shutdown()


@pytest.fixture(autouse=True)
def settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process share BLAS's settings, which a worker sets for good."""
    monkeypatch.setattr(spread, "fixed", lambda threads: nullcontext())


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


def same(one: Statistics, other: Statistics) -> bool:
    return (
        list(one.linears) == list(other.linears)
        and all(np.array_equal(one.linears[n].codes, other.linears[n].codes) for n in one.linears)
        and all(np.array_equal(one.linears[n].scales, other.linears[n].scales) for n in one.linears)
        and one.kv.keys() == other.kv.keys()
        and all(np.array_equal(one.kv[i].key, other.kv[i].key) for i in one.kv)
        and all(np.array_equal(one.kv[i].value, other.kv[i].value) for i in one.kv)
        and one.inputs.keys() == other.inputs.keys()
        and all(np.array_equal(one.inputs[n].peaks, other.inputs[n].peaks) for n in one.inputs)
        and [each.smoothed and each.smoothed.loss for each in one.inputs.values()]
        == [each.smoothed and each.smoothed.loss for each in other.inputs.values()]
    )


def test_a_worker_multiplies_as_this_process_does() -> None:
    """Torch has two libraries for products, whose last bits differ."""
    products, blas = torch.backends.mkldnn.matmul, openblas()  # type: ignore[attr-defined]  # untyped in torch
    assert blas is not None
    before, settings = products.fp32_precision, ExitStack()
    with settings, ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "fixed", fixed)
        worker = thread.submit(WindowsWorker).result()
        settings.push(worker._settings.__exit__)
        gc.collect()
        assert (products.fp32_precision, blas.threads) == ("bf16", 1)
    assert products.fp32_precision == before


@pytest.mark.parametrize("demands", [DEMANDS, DEMANDS[1:2]], ids=["weights", "ranges"])
def test_workers_make_what_one_process_makes(demands: Sequence[Demand], checkpoint: Checkpoint) -> None:
    alone = calibrate(checkpoint, WINDOWS, demands)
    for count in (1, 2, 4):
        with threads(count) as workers:
            assert same(alone, calibrate(checkpoint, WINDOWS, demands, carriers=given(workers)))
            assert all(worker.asked.count("begin") == 2 for worker in workers)  # one part of each layer


def test_experts_read_the_same(tmp_path: Path) -> None:
    zoo.write("qwen3-moe", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with threads(3) as workers:
        found = calibrate(checkpoint, WINDOWS, [WEIGHTS], carriers=given(workers))
    assert same(calibrate(checkpoint, WINDOWS, [WEIGHTS]), found)


@pytest.mark.parametrize(
    "answers", [0, pytest.param(2, marks=pytest.mark.thorough), 5, pytest.param(8, marks=pytest.mark.thorough), 15]
)
def test_what_a_lost_worker_carried_another_carries(answers: int, checkpoint: Checkpoint) -> None:
    """Lost when it enters, in front of a layer, between its linears, or in the next layer."""
    alone = calibrate(checkpoint, WINDOWS, DEMANDS)
    with threads(3, {1: answers}) as workers:
        assert same(alone, calibrate(checkpoint, WINDOWS, DEMANDS, carriers=given(workers)))
        begun = [worker.asked.count("begin") for worker in workers]
    assert max(begun[0], begun[2]) == (3 if answers else 2)  # what it carried was begun anew, on one of the others


def test_where_all_are_lost_that_is_said(checkpoint: Checkpoint) -> None:
    with threads(2, {0: 3, 1: 9}) as workers, pytest.raises(EnvironmentLacks, match="all workers of calibration"):
        calibrate(checkpoint, WINDOWS, DEMANDS, carriers=given(workers))


def test_workers_elsewhere_must_be_like_this_process(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(["one processor", "another"])
    monkeypatch.setattr(spread, "processor", lambda: next(found))
    with threads(1) as workers, pytest.raises(UsageError, match="another processor"):
        calibrate(checkpoint, WINDOWS, DEMANDS, carriers=given(workers))


def test_what_they_cannot_carry_is_refused(checkpoint: Checkpoint) -> None:
    with threads(1) as workers, pytest.raises(UnsupportedError, match="--calibration-workers"):
        calibrate(checkpoint, WINDOWS, [SparsityDemand(0.01)], carriers=given(workers))


def test_none_is_started_where_nothing_is_lacking(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from llmforge.cache import Cache
    from llmforge.calibration import Store

    def started() -> Any:
        raise AssertionError

    whole = calibrate(checkpoint, WINDOWS, DEMANDS, store=Store(Cache(tmp_path / "kept")))
    again = calibrate(
        checkpoint, WINDOWS, DEMANDS, store=Store(Cache(tmp_path / "kept")), carriers=Carriers(workers=started)
    )
    assert same(whole, again)


def test_what_a_worker_raises_comes_with_its_reason(checkpoint: Checkpoint) -> None:
    demand = replace(WEIGHTS, exclude=())
    with threads(2) as workers:
        plain = workers[0].ask

        def ask(method: str, *arguments: Any) -> Callable[[], Any]:
            if method != "begin":
                return plain(method, *arguments)
            part, index, states, recording = arguments
            wrong = {number: (state[..., :-1], other) for number, (state, other) in states.items()}
            return plain(method, part, index, wrong, recording)

        workers[0].ask = ask  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="must match"):
            calibrate(checkpoint, WINDOWS, [demand], carriers=given(workers))


def test_sums_of_shares_are_those_of_their_windows(checkpoint: Checkpoint) -> None:
    """Of each eighth window, whatever part of them a process carries."""
    skeleton = Skeleton.build(checkpoint)
    with torch.no_grad():
        calls, states = skeleton.enter([window.ids for window in WINDOWS])
        layer = skeleton.load(0, calls[0])
        whole = WindowsHere.all(layer, list(states), list(states))
        structure = LayerStructure.of(layer, states[0]).within(layer)
        names = list(structure.groups[0])
        whole.observe([names[0]], structure.added, (), coarse=False)
        sums = dict(whole.sums(names, WEIGHTS.method.demands))
        whole.close()
    assert list(sums) == list(range(8))
    assert [each.tokens for each in sums.values()] == [48 + 31, 33 + 48, 48, 2, 40, 48, 20, 48]


_: type[Worker] = ThreadWorker

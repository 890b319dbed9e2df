"""Calibration over Ray: equal bytes with and without workers, and with one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge.base import extras
from llmforge.calibration import calibrate
from llmforge.calibration.carriers import Carriers, Worker
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.farm import calibrating
from llmforge.farm.calibrating import RayWorker
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import KvRangeDemand, Statistics, WeightDemand

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(extras.trouble("ray") is not None, reason="ray is not installed (extra `farm`)"),
    # Ray leaves sockets and processes to the garbage collector, and warns of what it will change.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEMANDS = (WeightDemand(Gptq(), Grid(4, 32, False)), KvRangeDemand())
WINDOWS = [TokenWindow(f"d{i}", np.random.default_rng(i).integers(3, 259, 20 + i)) for i in range(12)]


def bytes_of(found: Statistics) -> list[bytes]:
    arrays = [array for each in found.linears.values() for array in (each.codes, each.scales)]
    return [array.tobytes() for array in [*arrays, *(part for kv in found.kv.values() for part in (kv.key, kv.value))]]


@dataclass(eq=False)
class KilledWorker:
    """Is killed in the middle of the first layer, when it has been asked for sums twice."""

    worker: RayWorker
    asked: int = 0

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = self.worker.ask(method, *arguments)
        self.asked += arguments[1:2] == ("sums",)
        if self.asked == 2:
            pid = self.worker.ray.get(self.worker.actor.__ray_call__.remote(lambda own: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            self.asked = 3
        return answer


def test_two_workers_one_of_them_killed_make_the_same_bytes(tiny_checkpoint: Path) -> None:
    checkpoint, killed = Checkpoint.open(tiny_checkpoint), list[KilledWorker]()

    @contextmanager
    def started(kill: bool) -> Iterator[Sequence[Worker]]:
        with calibrating.started(2) as workers:
            one, other = workers
            assert isinstance(one, RayWorker)
            killed[:] = [KilledWorker(one)] if kill else []
            yield [*(killed or [one]), other]

    alone = bytes_of(calibrate(checkpoint, WINDOWS, DEMANDS))
    for kill in (False, True):
        carriers = Carriers(workers=partial(started, kill=kill))
        assert bytes_of(calibrate(checkpoint, WINDOWS, DEMANDS, carriers=carriers)) == alone
    assert killed[0].asked == 3

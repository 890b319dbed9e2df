"""Verifies that a decode step was captured as a CUDA graph: capture fails in silence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import RunFailed
from llmforge.runtime.config import Capture
from llmforge.runtime.interface import StepInputs

# Two tokens whose logits are compared, and how many steps of each kind are timed.
ONE, OTHER, TIMED = 1, 2, 5
# A replay runs the kernels that an eager step runs: its logits are this much nearer to those of the same token
# than to those of the other one.
NEAR = 0.01


def probe_inputs(token: int, capture: Capture) -> StepInputs:
    """Make a step of `token` in every row: at the end of the longest text, or before it for `OTHER`.

    So a replay that keeps the lengths it was captured with is found out, too.
    """
    ids = np.full((capture.batch, 1), token, np.int64)
    past = np.full(capture.batch, max(0, capture.length - (1 if token == ONE else 2)), np.int32)
    return StepInputs(ids, past)


class CaptureProbe(Protocol):
    """Runs a step of one token in every row (`probe_inputs`); returns logits [B, 1, V]."""

    def __call__(self, token: int, *, graph: bool, moved: bool = False) -> NDArray[np.float32]:
        """Run it through the CUDA graph, or eagerly.

        `moved`: with `token` at another address than the captured one, which holds `ONE`.
        """


@dataclass(frozen=True)
class CaptureResult:
    """What became of one planned capture: `reason` says why there is no graph; None: there is, as was verified.

    The times are medians over steps of the same rows and lengths; `memory_bytes` is what the device has less.
    """

    capture: Capture
    reason: str | None
    eager_ms: float
    replay_ms: float | None
    memory_bytes: int

    @property
    def note(self) -> str:
        """Say what is not captured, and why."""
        rows, length = self.capture.batch, self.capture.length
        return f"decode steps with {rows} rows of up to {length} tokens run without CUDA graph: {self.reason}"


def verify_capture(capture: Capture, probe: CaptureProbe, free_bytes: Callable[[], int]) -> CaptureResult:
    """Capture one step by its first run, and hold its replays against eager steps.

    A replay reads the address that inputs had when it was captured, an eager step what is bound to it. So one call is
    made with a token at the captured address and another token bound: the logits tell which of the two was run.

    Args:
        capture: the step.
        probe: runs it; where it cannot be captured, it raises RunFailed.
        free_bytes: how much memory the device has left.
    """
    before = free_bytes()
    # The other one first: what it writes lies before what `ONE` writes, which reads it from then on.
    other, one = probe(OTHER, graph=False), probe(ONE, graph=False)
    apart = float(np.abs(one - other).max())
    eager_ms = _timed(probe, graph=False)

    def near(logits: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
        return bool(np.abs(logits - wanted).max() <= NEAR * apart)  # False for NaN, too

    def result(reason: str | None, replay_ms: float | None = None) -> CaptureResult:
        return CaptureResult(capture, reason, eager_ms, replay_ms, before - free_bytes())

    if not apart > 0:
        return result("two tokens have the same logits, so that a replay cannot be told from another step")
    try:
        first = probe(ONE, graph=True)
        moved = probe(OTHER, graph=True, moved=True)
        replay = probe(OTHER, graph=True)
    except RunFailed as error:
        return result(error.message)
    if near(moved, other):
        return result("the step ran again instead of being replayed")
    for logits, wanted in ((first, one), (moved, one), (replay, other)):
        if not near(logits, wanted):
            return result("a recorded step gives other logits than an unrecorded one")
    return result(None, _timed(probe, graph=True))


def _timed(probe: CaptureProbe, *, graph: bool) -> float:
    """Give the median time of a step, in ms."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        probe(ONE, graph=graph)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3

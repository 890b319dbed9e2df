"""Proves that a decode step was recorded as a CUDA graph: silence is how recording fails."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.runtime.backends.config import Capture
from llmforge.runtime.backends.signature import Signature
from llmforge.runtime.backends.steps import make_feeds

# Two tokens whose logits are compared, and how many steps of each kind are timed.
ONE, OTHER, TIMED = 1, 2, 5
# A replay runs the kernels that an unrecorded step runs: its logits are this much nearer to those of the same token
# than to those of the other one.
NEAR = 0.01


def probe_feeds(signature: Signature, token: int, capture: Capture) -> dict[str, NDArray[Any]]:
    """Make the feeds of a step of `token` in every row: at the end of the longest text, or before it for `OTHER`.

    So a replay that keeps the lengths it was recorded with is found out, too.
    """
    ids = np.full((capture.batch, 1), token, np.int64)
    past = np.full(capture.batch, max(0, capture.length - (1 if token == ONE else 2)), np.int32)
    return make_feeds(signature, ids, past, np.array([-1], np.int64), None, None)


class Probe(Protocol):
    """Runs a step of one token in every row (`probe_feeds`); returns logits [B, 1, V]."""

    def __call__(self, token: int, *, recorded: bool, elsewhere: bool = False) -> NDArray[np.float32]:
        """Run it through the recording, or unrecorded.

        `elsewhere`: with `token` at another place than the recorded one, which holds `ONE`.
        """


@dataclass(frozen=True)
class Recording:
    """What became of one planned capture: `obstacle` says why it is not recorded; None: it is, as was proved.

    The times are medians over steps of the same rows and lengths; `memory_bytes` is what the device has less.
    """

    capture: Capture
    obstacle: str | None
    unrecorded_ms: float
    replay_ms: float | None
    memory_bytes: int

    @property
    def note(self) -> str:
        """Say what is not recorded, and why."""
        rows, length = self.capture.batch, self.capture.length
        return f"decode steps of {rows} rows of up to {length} tokens are not recorded: {self.obstacle}"

    def require(self) -> None:
        """Return if it is recorded.

        Raises:
            VerificationError: it is not.
        """
        if self.obstacle is not None:
            raise VerificationError(self.note, hint="engine.cuda_graphs: allow runs them unrecorded")


def prove(
    capture: Capture, probe: Probe, free_bytes: Callable[[], int], failures: tuple[type[Exception], ...]
) -> Recording:
    """Record one step by its first recorded run, and hold its replays against unrecorded steps.

    A replay reads the place that inputs had when it was recorded, an unrecorded step what is bound to it. So one call
    is made with a token at the recorded place and another token bound: the logits tell which of the two was run.

    Args:
        capture: the step.
        probe: runs it.
        free_bytes: how much memory the device has left.
        failures: what `probe` raises where a step cannot be recorded.
    """
    before = free_bytes()
    # The other one first: what it writes lies before what `ONE` writes, which reads it from then on.
    other, one = probe(OTHER, recorded=False), probe(ONE, recorded=False)
    apart = float(np.abs(one - other).max())
    unrecorded_ms = _timed(probe, recorded=False)

    def near(logits: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
        return bool(np.abs(logits - wanted).max() <= NEAR * apart)  # False for NaN, too

    def outcome(obstacle: str | None, replay_ms: float | None = None) -> Recording:
        return Recording(capture, obstacle, unrecorded_ms, replay_ms, before - free_bytes())

    if not apart > 0:
        return outcome("two tokens have the same logits, so that a replay cannot be told from another step")
    try:
        first = probe(ONE, recorded=True)
        elsewhere = probe(OTHER, recorded=True, elsewhere=True)
        replay = probe(OTHER, recorded=True)
    except failures as error:
        return outcome(f"{type(error).__name__}: {error}")
    if near(elsewhere, other):
        return outcome("the step ran again where a replay was asked for")
    for logits, wanted in ((first, one), (elsewhere, one), (replay, other)):
        if not near(logits, wanted):
            return outcome("a recorded step gives other logits than an unrecorded one")
    return outcome(None, _timed(probe, recorded=True))


def _timed(probe: Probe, *, recorded: bool) -> float:
    """Give the median time of a step, in ms."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        probe(ONE, recorded=recorded)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3

"""How long a stage of a build, and the whole of it, still take: from what was predicted and what has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Stages = Sequence[tuple[str, float]]  # titles and seconds, in their order
REUSED = ": reused"  # how the title of a stage ends whose result is known already
_LEAST_S = 1.0  # predicted; what is shorter tells nothing of how fast a machine is
_SLOWEST, _FASTEST = 8.0, 0.5  # how far what has passed may change what was predicted
_TRUSTED_S = 20.0  # what predictions weigh against it: modules that come from a cold disk are no measure of a machine


class TimeLeft:
    """Follows the stages of a build.

    `expected` are the stages that are predicted, in their order, and their seconds. A stage of a build is the next one
    whose title it begins with; of those that are none, the time left comes from how much of them is done. How much
    longer than predicted the stages took that have ended is taken to hold for what follows.
    """

    def __init__(self, expected: Stages = (), clock: Callable[[], float] | None = None) -> None:
        self._expected = tuple(expected)
        self._clock = clock or time.monotonic
        self._at = -1  # the predicted stage that goes on, or went on last
        self._began = self._predicted_began = self._clock()
        self._predicted = False  # whether the stage that goes on is
        self._reused = False
        self._first: tuple[float, float] | None = None  # when the stage first told what share of it is done, and which
        self._estimate: tuple[float, float] | None = None  # when it told last, and the seconds that it took from then
        self._took = self._foreseen = 0.0  # of predicted stages that ended

    def stage(self, title: str) -> None:
        """Begin a stage."""
        now, found = self._clock(), self._find(title)
        if self._predicted and found != self._at:
            self._learn(now)
        self._began, self._first, self._estimate = now, None, None
        self._predicted = found is not None
        self._reused = title.endswith(REUSED)
        if found is not None and found != self._at:
            self._at, self._predicted_began = found, now

    def advance(self, done: int, total: int) -> None:
        """Take how much of the stage is done, in its own units."""
        if total <= 0:
            return
        now, share = self._clock(), min(done / total, 1.0)
        self._first = self._first or (now, share)
        left = self._foreseen_after(now, share)
        self._estimate = None if left is None else (now, left)

    def of_stage(self) -> float | None:
        """Give the seconds that the stage still takes; None where nothing tells, or it takes longer than it was to."""
        if self._reused:
            return None
        if self._estimate is not None:
            at, seconds = self._estimate
            return max(seconds - (self._clock() - at), 0.0) or None
        if not self._predicted:
            return None
        whole = self._expected[self._at][1] * self._pace
        return max(whole - (self._clock() - self._predicted_began), 0.0) or None

    def of_all(self) -> float | None:
        """Give the seconds that this stage and all that follow still take; None where nothing is predicted."""
        if not self._expected or self._at < 0:
            return None
        after = sum(seconds for _, seconds in self._expected[self._at + 1 :]) * self._pace
        return (self.of_stage() or 0.0) + after

    def _foreseen_after(self, now: float, share: float) -> float | None:
        """Estimate what the stage takes once `share` of it is done: from its prediction, and from its pace since.

        Pace counts by the share that is done, the prediction by that which is not.
        """
        assert self._first is not None
        began, before = self._first
        pace = (now - began) / (share - before) if share > before else None
        if not self._predicted:
            return None if pace is None else (1 - share) * pace
        whole = self._expected[self._at][1] * self._pace
        predicted = max(whole - (began - self._began), whole / 2)  # less what came before there was anything to tell
        return (1 - share) * (predicted if pace is None else (1 - share) * predicted + share * pace)

    @property
    def _pace(self) -> float:
        """How much longer than predicted stages take."""
        ratio = (self._took + _TRUSTED_S) / (self._foreseen + _TRUSTED_S)
        return min(max(ratio, _FASTEST), _SLOWEST)

    def _find(self, title: str) -> int | None:
        """Find the predicted stage of this title: the one that goes on, or the first after it."""
        places = range(max(self._at, 0), len(self._expected))
        return next((place for place in places if title.startswith(self._expected[place][0])), None)

    def _learn(self, now: float) -> None:
        """Hold what a stage took against what was predicted."""
        predicted = self._expected[self._at][1]
        if predicted >= _LEAST_S and not self._reused:
            self._took += now - self._predicted_began
            self._foreseen += predicted

"""Bounds of a mean that hold at every moment at once, however often one looks: confidence sequences by betting.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B, 2024), theorem 3 and
section 4.3: against each candidate m for the mean of values in [0, 1], a gambler bets that values are above m, another
that they are below; where m is the mean, neither capital grows in expectation, and by Ville's inequality either one
ever reaches 2/α with probability α/2 at most. What has made a gambler so rich is no candidate any more. It holds for
values of any distribution, dependent ones too, as long as each has the same mean given those before.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmforge.metrics.intervals import Estimate

# Candidates: a bound is rounded outward to one of them, by a thousandth of the range at most.
GRID: NDArray[np.float64] = np.linspace(0, 1, 1001)
# The most of its capital that a bet may lose, "1/2 or 3/4" in section 4.3; where all values are equal, which is
# what two equal models give, 3/4 needs a third less of them.
_MOST_AT_STAKE = 0.75


class BettingSequence:
    """A confidence sequence for the mean of values in [`low`, `high`], or of several such streams side by side.

    Args:
        alpha: how often the mean is ever outside, at most.
        low, high: what values are never outside.
        streams: how many; a value of each is added at a time.
        grid: candidates in [0, 1], ascending.
    """

    def __init__(
        self,
        alpha: float,
        low: float = 0.0,
        high: float = 1.0,
        *,
        streams: int = 1,
        grid: NDArray[np.float64] = GRID,
    ) -> None:
        self.alpha, self.samples = alpha, 0
        self._from, self._width, self._grid = low, high - low, grid
        self._needed = math.log(2 / alpha)  # ln of the capital that rejects
        self._sum = np.zeros(streams)
        self._squares = np.zeros(streams)  # of values less the mean of those before and one half
        self._above = np.zeros((streams, len(grid)))  # ln of the capital that bets on more than a candidate
        self._below = np.zeros((streams, len(grid)))
        self._rejected_below = np.zeros(streams, np.intp)  # candidates that the mean is above
        self._rejected_above = np.zeros(streams, np.intp)
        with np.errstate(divide="ignore"):
            self._most_above, self._most_below = _MOST_AT_STAKE / grid, _MOST_AT_STAKE / (1 - grid)

    def add(self, value: ArrayLike) -> None:
        """Take the next value (of each stream: [streams]).

        Raises:
            ValueError: one is outside of the range.
        """
        x = (np.atleast_1d(np.asarray(value, np.float64)) - self._from) / self._width
        if not ((x >= -1e-9) & (x <= 1 + 1e-9)).all():
            raise ValueError(f"{value!r} is outside of {self._from} to {self._from + self._width}")
        x = x.clip(0, 1)
        t = self.samples + 1
        variance = (0.25 + self._squares) / t  # of the values before this one, begun at that of a coin
        bet = np.sqrt(2 * self._needed / (variance * t * math.log1p(t)))[:, None]
        gain = x[:, None] - self._grid
        self._above += np.log1p(np.minimum(bet, self._most_above) * gain)
        self._below += np.log1p(np.minimum(bet, self._most_below) * -gain)
        self.samples = t
        self._sum += x
        mean = (0.5 + self._sum) / (t + 1)
        self._squares += (x - mean) ** 2
        # Capital that bets on more falls with the candidate, the other one grows: what is rejected are both ends.
        rejected = (self._above >= self._needed).sum(1)
        self._rejected_below = np.maximum(self._rejected_below, rejected)
        rejected = (self._below >= self._needed).sum(1)
        self._rejected_above = np.maximum(self._rejected_above, rejected)

    @property
    def low(self) -> NDArray[np.float64]:
        """The mean is not below: [streams]."""
        last = np.maximum(self._rejected_below - 1, 0)
        return self._from + self._width * np.where(self._rejected_below > 0, self._grid[last], 0.0)

    @property
    def high(self) -> NDArray[np.float64]:
        """The mean is not above: [streams]."""
        first = np.minimum(len(self._grid) - self._rejected_above, len(self._grid) - 1)
        return self._from + self._width * np.where(self._rejected_above > 0, self._grid[first], 1.0)

    def estimate(self, of: str) -> Estimate:
        """Give the mean of the first stream and its bounds; `of` says what its values are of.

        Raises:
            ValueError: there is no value yet.
        """
        if not self.samples:
            raise ValueError("a mean of nothing")
        mean = self._from + self._width * float(self._sum[0]) / self.samples
        return Estimate(value=mean, low=float(self.low[0]), high=float(self.high[0]), samples=self.samples, of=of)

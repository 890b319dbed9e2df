"""Which parts of a loss stand out: paired tests over documents, with a bound on false finds.

Parts differ by nature: of the sample checkpoint (tests/data) in 4 bits, rounded to nearest, the first layer costs 45 %
of the loss, and its queries, keys and values 7 times those of the next layer. So a part is not held against others, but
against what its format costs in its own place: it stands out where it loses more than `RATIO` times that, and more than
`SHARE` of the whole loss, both beyond doubt.

Parts form a tree: groups, their parts, and so on. A group is looked into where renewing it gains what a part that
stands out in it would gain at least (`worth`); a group that hides one among many good parts need not stand out itself.
Of k levels each gets α / k, which its parts share evenly, looked at or not: that bounds the probability of any false
find by α, whatever made the choice (Bonferroni). Both conditions must hold, so that each is tested at the level of the
part (intersection-union).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmforge.metrics.tokens import Floats

ALPHA = 0.05  # probability of any false find
RATIO = 3.0  # times what the format costs there: more than calibration and the choice of text make of it
SHARE = 0.05  # of the loss
_POINTS = 4001  # of the quadrature of Student's t


def worth(total: float) -> float:
    """Return what renewing a part has to gain at least, of a loss of `total`, that it may stand out."""
    return SHARE * (1 - 1 / RATIO) * total


@dataclass(frozen=True)
class Finding:
    """How one part did; `lost` and `expected` are sums over all documents, in the unit of the sums."""

    lost: float
    expected: float  # what its format costs in its place
    p_value: float  # the larger one of both tests
    level: float

    @property
    def stands_out(self) -> bool:
        """Whether the part lost more than it should, beyond doubt."""
        return self.p_value < self.level


def judge(lost: Floats, expected: Floats, loss: Floats, *, level: float) -> Finding:
    """Test one part on sums over each document [D]: what it lost, what its format costs there, and the whole loss."""
    # A cost below 0 is one by chance.
    excess = lost - RATIO * expected if expected.sum() > 0 else lost
    worst = max(above_zero(excess), above_zero(lost - SHARE * loss))
    return Finding(float(lost.sum()), float(expected.sum()), worst, level)


def above_zero(values: Floats) -> float:
    """Return the one-sided p-value of Student's t test that independent `values` [D] have a mean above 0."""
    count = len(values)
    if count < 2:
        return 1.0
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if spread == 0:
        return 0.0 if mean > 0 else 1.0
    return upper_tail(mean / spread * math.sqrt(count), count - 1)


def upper_tail(t: float, freedom: int) -> float:
    """Return P(T > t) of Student's t with `freedom` degrees.

    With t = √freedom · tan(x) its density is that of cos(x)^(freedom - 1), which is integrated by Simpson's rule.
    """
    begin = math.atan(t / math.sqrt(freedom))
    x = np.linspace(begin, math.pi / 2, _POINTS)
    heights = np.cos(x).clip(0) ** (freedom - 1)
    weights = np.full(_POINTS, 2.0)
    weights[1::2], weights[[0, -1]] = 4.0, 1.0
    area = float(heights @ weights) * float(x[1] - x[0]) / 3
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    return min(1.0, area * math.exp(log_scale))

"""What a lossy pass costs on text, of a graph that is run whole: KL(before || after), until its budget is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.tokens import mean_kld
from llmforge.runtime.backends.session import Session
from llmforge.verification import comparison, probe

# Runs after which a budget may be decided early, and the one-sided 99.9 % quantile of Student's t for their number
# less one. Only a cost below its budget ends early: what exceeds it is measured on everything, and the worst is named.
LOOKS: Mapping[int, float] = {5: 7.173, 9: 4.501, 17: 3.686}
KEPT_BYTES = 256 << 20  # of logits that the next pass is held against; what does not fit is computed again


@dataclass(frozen=True)
class TextCost:
    """What a pass cost on the runs `names`; `where` is the step that cost most, or whose logits are not finite."""

    kld_mean: float  # nats a token
    tokens: int
    names: tuple[str, ...]
    where: tuple[probe.Run, int]
    worst: float  # mean KLD of that step; infinite where a logit is NaN or infinite
    largest: float = np.inf  # difference of a logit, in standard deviations of all

    @property
    def finite(self) -> bool:
        """Whether all logits are finite."""
        return bool(np.isfinite(self.worst))


@dataclass
class TextLoss:
    """The runs of text that budgets are measured on, and the logits of the graph that was measured last."""

    runs: Sequence[probe.Run]
    _before: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)  # by run, then step: [tokens, V]

    def measure(self, before: Callable[[], Session], after: Session, budget: float) -> TextCost:
        """Measure the divergence of `after` from the graph that `before` opens, run by run.

        Runs end when the mean over all of them is below `budget` with 99.9 % confidence. `before` is not run where the
        last call ran it as its `after`: passes in between that keep what they declare moved it by rounding at most.
        """
        opened: Session | None = None
        kept, size = {}, 0
        sums: list[tuple[float, int]] = []  # of each run: KLD, tokens
        worst = (-1.0, 0, 0)
        moved, moments = 0.0, np.zeros(3)  # of the logits before: their number, sum and sum of squares
        for number, run in enumerate(self.runs):
            expected = self._before.get(number)
            if expected is None:
                opened = opened or before()
                expected = _logits(opened, run)
            made = _logits(after, run)
            total, tokens = 0.0, 0
            for step, (b, a) in enumerate(zip(expected, made, strict=True)):
                if not np.isfinite(a).all():
                    return TextCost(np.nan, tokens, self._names(number + 1), (run, step), np.inf)
                mean = mean_kld(b, a)
                moved = max(moved, comparison.largest(b, a))
                moments += b.size, b.sum(dtype=np.float64), np.square(b).sum(dtype=np.float64)
                total, tokens, worst = total + mean * len(a), tokens + len(a), max(worst, (mean, number, step))
            sums.append((total, tokens))
            size += sum(logits.nbytes for logits in made)
            if size <= KEPT_BYTES:
                kept[number] = made
            if _decided(sums, budget):
                break
        self._before = kept
        tokens = sum(tokens for _, tokens in sums)
        mean, at, step = worst
        count, total, squares = moments
        spread = float(np.sqrt(squares / count - (total / count) ** 2))
        kld_mean = sum(total for total, _ in sums) / tokens
        return TextCost(kld_mean, tokens, self._names(len(sums)), (self.runs[at], step), mean, moved / spread)

    def _names(self, count: int) -> tuple[str, ...]:
        return tuple(run.name for run in self.runs[:count])


def _logits(session: Session, run: probe.Run) -> list[NDArray[np.float32]]:
    return [outcome.logits for outcome in probe.drive(session, run, caches=False)]


def _decided(sums: Sequence[tuple[float, int]], budget: float) -> bool:
    """Say whether the mean of a ratio estimate over runs of (KLD, tokens) is below `budget` beyond doubt."""
    quantile = LOOKS.get(len(sums))
    if quantile is None:
        return False
    totals, tokens = np.array(sums, np.float64).T
    mean = totals.sum() / tokens.sum()
    error = ((totals - mean * tokens) / tokens.mean()).std(ddof=1) / np.sqrt(len(sums))
    return bool(mean + quantile * error <= budget)

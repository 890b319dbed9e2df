"""The loss of a lossy pass on text, of a graph that is run whole: KL(before || after), until its budget is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.onnxruntime.session import Session
from llmforge.metrics.tokens import KLD, Floats, require_finite, score
from llmforge.verification import comparison, probe

# Texts after which a budget may be decided early, and the one-sided 99.9 % quantile of Student's t for their number
# less one. Only a cost below its budget ends early: what exceeds it is measured on everything.
LOOKS: Mapping[int, float] = {5: 7.173, 9: 4.501, 17: 3.686}
KEPT_BYTES = 256 << 20  # of logits that the next pass is held against; what does not fit is computed again


@dataclass(frozen=True)
class TextCost:
    """What a pass cost on the runs `names`."""

    kld_mean: float  # nats a token
    tokens: int
    names: tuple[str, ...]
    largest: float  # difference of a logit, in standard deviations of all
    not_finite: tuple[probe.Run, int] | None = None  # the first step that has a logit which is NaN or infinite


@dataclass
class TextLoss:
    """The runs of text that budgets are measured on, and the logits of the graph that was measured last."""

    runs: Sequence[probe.Run]
    _before: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)  # by run, then step: [tokens, V]

    def measure(self, before: Callable[[], Session], after: Session, budget: float) -> TextCost:
        """Measure the divergence of `after` from the graph that `before` opens, run by run; a row of a run is a text.

        Of a step that is asked for few logits, their mean counts for all its tokens. Runs end when the mean over all
        texts is below `budget` with 99.9 % confidence. `before` is not run where the
        last call ran it as its `after`: passes in between that keep what they declare moved it by rounding at most.
        """
        opened: Session | None = None
        kept, size = {}, 0
        texts: list[tuple[float, int]] = []  # of each: KLD, tokens
        moved, moments = 0.0, np.zeros(3)  # of the logits before: their number, sum and sum of squares
        ran = 0
        for number, run in enumerate(self.runs):
            expected = self._before.get(number)
            if expected is None:
                opened = opened or before()
                expected = _logits(opened, run)
            made, ran = _logits(after, run), number + 1
            lost = np.zeros(run.batch)
            for index, (step, b, a) in enumerate(zip(run.steps, expected, made, strict=True)):
                if not np.isfinite(a).all():
                    return TextCost(np.nan, 0, self._names(ran), np.inf, (run, index))
                lost += _mean_klds(step, b, a) * step.lengths
                moved = max(moved, comparison.largest(b, a))
                moments += b.size, b.sum(dtype=np.float64), np.square(b).sum(dtype=np.float64)
            tokens = sum(step.lengths for step in run.steps)
            texts += zip(lost.tolist(), np.asarray(tokens).tolist(), strict=True)
            size += sum(logits.nbytes for logits in made)
            if size <= KEPT_BYTES:
                kept[number] = made
            if _decided(texts, budget):
                break
        self._before = kept
        count = sum(tokens for _, tokens in texts)
        total, squares = moments[1] / moments[0], moments[2] / moments[0]
        spread = float(np.sqrt(squares - total**2))
        kld_mean = sum(lost for lost, _ in texts) / count
        return TextCost(kld_mean, count, self._names(ran), moved / spread)

    def _names(self, count: int) -> tuple[str, ...]:
        return tuple(run.name for run in self.runs[:count])


def _logits(session: Session, run: probe.Run) -> list[NDArray[np.float32]]:
    return [outcome.logits for outcome in probe.drive(session, run, caches=False)]


def _mean_klds(step: probe.ProbeCall, before: NDArray[np.float32], after: NDArray[np.float32]) -> Floats:
    """Average KL(before || after) over the tokens of each row that were asked for logits, in nats, [B]."""
    require_finite("reference", before)
    row, _ = np.nonzero(step.answered)
    found = score(before, after, np.zeros(len(after), np.int64), (KLD,))[KLD.name]
    counts = np.bincount(row, minlength=len(step.lengths))
    means: Floats = np.bincount(row, found, minlength=len(step.lengths)) / np.maximum(counts, 1)
    return means


def _decided(texts: Sequence[tuple[float, int]], budget: float) -> bool:
    """Say whether the mean of a ratio estimate over texts of (KLD, tokens) is below `budget` beyond doubt."""
    quantile = LOOKS.get(len(texts))
    if quantile is None:
        return False
    totals, tokens = np.array(texts, np.float64).T
    mean = totals.sum() / tokens.sum()
    error = ((totals - mean * tokens) / tokens.mean()).std(ddof=1) / np.sqrt(len(texts))
    return bool(mean + quantile * error <= budget)

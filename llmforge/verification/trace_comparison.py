"""One step of a traced graph compared with transformers, as far as errors of rounding allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import interface
from llmforge.trace.export.limits import LONGEST, TAIL
from llmforge.verification import probe

if TYPE_CHECKING:
    from llmforge.trace.export.reference import Observation


NUDGES = 8.0  # moves of errors of rounding by which results may differ
CHAOTIC = 0.1  # of the deviation of a token: where rounding moves more than that, no comparison can tell
NOTHING = np.zeros((0, 1), np.float32)
HINT = "this is a bug in llmforge's support of this architecture; nothing was built"


@dataclass(frozen=True, eq=False)
class StepComparison:
    """What one step gave one row, and what transformers gave it.

    Logits are fp32 [tokens, V]; hidden states, by layer, fp32 [tokens, hidden], of all tokens of the step; of several
    streams, [tokens, streams, hidden].
    """

    run: probe.Run
    step: int
    row: int
    got: NDArray[np.float32]
    expected: NDArray[np.float32]
    hidden: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]

    @property
    def difference(self) -> float:
        """The largest of a logit."""
        return float(np.abs(self.got - self.expected).max(initial=0.0))

    def diverges(self, allowed: float, tolerance: float) -> bool:
        """Say whether logits differ by more than `allowed`, or hidden states by more than `tolerance`."""
        return not self.difference <= allowed or any(
            not (np.abs(got - expected).max(-1) <= tolerance * expected.std(-1)).all() for got, expected in self.hidden
        )

    def require(
        self, allowed: float, tolerance: float, layers: Sequence[str], noise: RoundingNoise, *, may_be_chaotic: bool
    ) -> int:
        """Return how many tokens are undecided, if all others are equal.

        Logits may differ by `allowed`, hidden states of `layers` by `tolerance` of the deviation of their token; both
        by as much as `noise` moves them. Where that is too much to tell, a token is undecided.

        Raises:
            VerificationError: they are not; names the step and the first layer that differs. Or tokens are undecided,
                and it is not so that the run `may_be_chaotic`.
        """
        at = f"the traced graph does not match the model in {self.run.where(self.step)}, row {self.row}"
        chaotic = np.zeros(len(self.hidden[0][1]) if self.hidden else 1, np.bool_)
        for number, (layer, (got, expected)) in enumerate(zip(layers, self.hidden, strict=False)):
            difference, spread = _streams(np.abs(got - expected).max(-1)), _streams(expected.std(-1))
            moves = NUDGES * _streams(noise.hidden[number]) if noise.hidden else np.zeros_like(spread)
            chaotic |= (moves > CHAOTIC * spread).any(-1)
            wrong = ~(difference <= np.maximum(tolerance * spread, moves))  # `not <=`: NaN differs
            if chaotic.any() and not may_be_chaotic:
                raise _undecided(f"hidden states of {layer}", self.run.where(self.step))
            if len(diverging := np.argwhere(wrong & ~chaotic[:, None])):
                token, stream = (int(place) for place in diverging[0])
                size = spread[token, stream]
                raise VerificationError(
                    f"{at}; first diverging layer: {layer}, whose hidden states of token {token} differ by "
                    f"{difference[token, stream]:.3g}, their standard deviation is {size:.3g} "
                    f"(allowed: {max(tolerance, moves[token, stream] / max(size, 1e-30)):.3g} of it)",
                    hint=HINT,
                )
        moves_logits = NUDGES * noise.logits
        if not self.hidden and moves_logits > CHAOTIC * deviation(self.expected):
            if not may_be_chaotic:
                raise _undecided("logits", self.run.where(self.step))
            chaotic[:] = True
        if not self.difference <= max(allowed, moves_logits) and not chaotic.any():
            agree = f"the hidden states of all {len(self.hidden)} layers agree: it is what follows them"
            raise VerificationError(
                f"{at}: logits differ from transformers' by {self.difference:.3g} "
                f"(allowed: {max(allowed, moves_logits):.3g}); "
                f"{agree if self.hidden else 'no layer can be named'}",
                hint=HINT,
            )
        return int(chaotic.sum())


@dataclass(frozen=True, eq=False)
class RoundingNoise:
    """How far errors of rounding move what transformers computes: a logit, and hidden states by layer and token."""

    logits: float = 0.0
    hidden: tuple[NDArray[np.float32], ...] = ()

    @classmethod
    def between(cls, each: StepComparison, others: Sequence[StepComparison]) -> RoundingNoise:
        """Take what is expected `each` time, and what of numbers that were moved, of which the largest counts."""
        logits = max(float(np.abs(other.expected - each.expected).max(initial=0.0)) for other in others)
        hidden = tuple(
            np.max([np.abs(other.hidden[at][1] - expected).max(-1) for other in others], axis=0)
            for at, (_, expected) in enumerate(each.hidden)
        )
        return cls(logits, hidden)


def _streams(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give what is told of each token, [tokens] or [tokens, streams], its streams: [tokens, streams]."""
    return numbers.reshape(len(numbers), math.prod(numbers.shape[1:]))


def _undecided(what: str, where: str) -> VerificationError:
    return VerificationError(
        f"the traced graph cannot be held against the model: {what} move by more than {CHAOTIC:g} of their deviation "
        f"in transformers itself, in {where}, where its numbers are off by errors of rounding",
        hint="the checkpoint's weights are extreme or damaged: no two computations of it agree in fp32",
    )


def deviation(logits: NDArray[np.float32]) -> float:
    """Compute the standard deviation of logits; 0 where there are none."""
    return float(logits.std()) if logits.size else 0.0


def compare(
    run: probe.Run,
    made: Sequence[Mapping[str, NDArray[Any]]],
    wanted: Sequence[Observation],
    names: Sequence[str],
    few: bool,
    *,
    head: bool,
) -> list[StepComparison]:
    """Pair what each step gave, padding included, with what is `wanted` of each row: logits only with `head`.

    Logits are [B, rows, V] and those of each row's last tokens, [tokens, V].
    """
    compared = []
    for index, (step, outputs) in enumerate(zip(run.steps, made, strict=True)):
        rows = selected(step, few)
        for b, ids in enumerate(rows_of(run)):
            real = rows < step.lengths[b]
            places = step.past[b] + rows[real] - (len(ids) - len(wanted[b].logits))
            count, past = int(step.lengths[b]), int(step.past[b])
            hidden = [
                (outputs[name][b, :count], state[past : past + count])
                for name, state in zip(names, wanted[b].hidden if names else (), strict=True)
            ]
            logits = outputs[interface.LOGITS][b, real], wanted[b].logits[places]
            got, expected = logits if head else (NOTHING, NOTHING)
            compared.append(StepComparison(run, index, b, got, expected, hidden))
    return compared


RAGGED = 5  # tokens by which a context exceeds the shorter row of a ragged batch, at least
FEW = 4  # rows of a step that get logits, where the vocabulary is large
SEED = 20_241_103  # any fixed number
LONG = "a prompt longer than the windows"
CONTINUED = 32  # tokens of the continuation of the longest text
LARGER = "larger numbers"
TO_THE_END = "a text as long as the context"


def make_runs(vocabulary: int, windows: Sequence[int], context: int | None) -> list[probe.Run]:
    """Make the runs: one row in all kinds of step, a ragged batch, and a prompt beyond the windows."""
    rng = np.random.default_rng(SEED)

    def draw(tokens: int) -> NDArray[np.int64]:
        return rng.integers(0, vocabulary, tokens, np.int64)

    most = LONGEST if context is None else context
    counts = _within(most, (12, 1, 1, 1, 5))
    runs = [probe.schedule("one row", [draw(sum(counts))], [(count,) for count in counts])]
    if most > RAGGED:
        short, long = min(9, most - RAGGED), min(12, most - 2)
        rows = [draw(short + 2), draw(long + 2)]
        runs.append(probe.schedule("a ragged batch", rows, [(short, long), (1, 1), (1, 1)]))
    within = [window for window in windows if window <= LONGEST - TAIL]
    if within and most > 2:
        length = min(within[-1] + TAIL, most - 2)
        runs.append(probe.schedule(LONG, [draw(length + 2)], [(length,), (1,), (1,)]))
    return runs


def longest_run(vocabulary: int, context: int | None) -> probe.Run:
    """Make a run to the end of `context`, of up to `LONGEST` tokens: a prompt, a continuation and a token."""
    rng = np.random.default_rng(SEED + 1)
    length = LONGEST if context is None else min(context, LONGEST)
    counts = _within(length, (LONGEST - CONTINUED - 1, CONTINUED, 1))
    return probe.schedule(TO_THE_END, [rng.integers(0, vocabulary, length, np.int64)], [(count,) for count in counts])


def rows_of(run: probe.Run) -> list[NDArray[np.int64]]:
    """Put the tokens of each row of `run` together again."""
    return [np.concatenate([step.ids[b, : step.lengths[b]] for step in run.steps]) for b in range(run.batch)]


def selected(step: probe.ProbeCall, few: bool) -> NDArray[np.int64]:
    """Choose the rows of a step that get logits: all, the tail of a long one, or a `few`."""
    most = FEW if few else 2 * TAIL
    return step.rows if len(step.rows) <= most else step.rows[-(FEW if few else TAIL) :]


def count_kept(run: probe.Run, few: bool) -> int:
    """Count the tokens at the end of a row whose logits are compared."""
    return len(selected(run.steps[0], few)) + sum(int(step.ids.shape[1]) for step in run.steps[1:])


def _within(most: int, counts: Sequence[int]) -> list[int]:
    """Take tokens from the longest of the steps `counts`, until `most` remain; those without tokens are dropped."""
    kept = [*counts]
    while sum(kept) > most:
        kept[kept.index(max(kept))] -= 1
    return [count for count in kept if count]

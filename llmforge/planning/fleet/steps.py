"""How long a step of an engine takes: by the roofline of a device, or by what an artifact's report has timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmforge.base.errors import UsageError
from llmforge.metrics.latency import LatencyPoint
from llmforge.planning.roofline import Placement
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK


class StepTimes(Protocol):
    """Predicts the time of a step."""

    @property
    def basis(self) -> str:
        """What the prediction rests on, as text."""
        ...

    def seconds(self, tokens: Sequence[int], pasts: Sequence[int]) -> float:
        """Time a step that runs `tokens[b]` tokens of text `b` after `pasts[b]` in its cache."""
        ...


@dataclass(frozen=True)
class RooflineSteps:
    """Steps by the roofline (`llmforge.planning.roofline`)."""

    placed: Placement

    @property
    def basis(self) -> str:
        """What the prediction rests on, as text."""
        figures = "measured figures" if self.placed.target.kind == "cpu" else "figures of data sheets, unverified"
        return f"predicted by the roofline of {self.placed.target.name}, with {figures}"

    def seconds(self, tokens: Sequence[int], pasts: Sequence[int]) -> float:
        """Time a step that runs `tokens[b]` tokens of text `b` after `pasts[b]` in its cache."""
        return self.placed.pieces(tokens, pasts).seconds


@dataclass(frozen=True)
class StepCurve:
    """Seconds by a size of steps: linear between the sizes that were timed, and beyond the last two of them."""

    sizes: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, timed: Mapping[float, float]) -> StepCurve:
        """Make a curve that never falls of seconds by size: a larger step that was timed faster was noise."""
        sizes = sorted(timed)
        return cls(tuple(sizes), tuple(np.maximum.accumulate([timed[size] for size in sizes]).tolist()))

    def at(self, size: float) -> float:
        """Read the curve at a size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[-1]:
            return float(np.interp(size, sizes, seconds))
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + slope * (size - sizes[-1])


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps by the times of whole answers in a report.

    A decode step of B rows takes `decode` at B and `cached_s` for each token in their caches; one that reads T tokens
    of prompts takes `prefill` at T, and `pair_s` for each pair of one of them and a token before the step.
    """

    decode: StepCurve  # by rows, at empty caches
    prefill: StepCurve  # by tokens
    cached_s: float
    pair_s: float
    basis: str

    @classmethod
    def of(cls, timed: Sequence[LatencyPoint], whose: str) -> MeasuredSteps:
        """Fit the steps of an artifact, `whose` says which, to what was timed at several loads.

        Raises:
            UsageError: it has none.
        """
        points = [point for point in timed if point.output_tokens > 1]
        if not points:
            raise UsageError(f"{whose}: its report has no times of tokens", hint=_MEASURE)
        rows, cached_s = _fit_decode(points)
        reads, pair_s = _fit_prefill(points, rows[min(rows)] if 1 in rows else None)
        prefill = StepCurve.of(reads)
        most = max(rows)
        basis = f"as timed in {whose}: decode steps of {', '.join(map(str, sorted(rows)))} rows"
        beyond = {float(size): rows[most] + prefill.at(size) - prefill.at(most) for size in reads if size > most}
        if most == 1:
            basis += "; each further row as a token of a prompt costs"
        read = sorted({point.prompt_tokens for point in points})
        return cls(
            decode=StepCurve.of({**{float(size): each for size, each in rows.items()}, **beyond}),
            prefill=prefill,
            cached_s=cached_s,
            pair_s=pair_s,
            basis=f"{basis}; prompts of {', '.join(map(str, read))} tokens",
        )

    def seconds(self, tokens: Sequence[int], pasts: Sequence[int]) -> float:
        """Time a step that runs `tokens[b]` tokens of text `b` after `pasts[b]` in its cache."""
        decoded = sum(past for count, past in zip(tokens, pasts, strict=True) if count == 1)
        cached = self.cached_s * decoded
        if all(count == 1 for count in tokens):
            return self.decode.at(len(tokens)) + cached
        pairs = sum(count * past for count, past in zip(tokens, pasts, strict=True) if count > 1)
        return self.prefill.at(sum(tokens)) + cached + self.pair_s * pairs


_MEASURE = "build with `validation: {latency: {prompt_tokens: [32, 512], output_tokens: 64}}`"


def _fit_decode(points: Sequence[LatencyPoint]) -> tuple[dict[int, float], float]:
    """Fit seconds = a(rows) + b · tokens in all caches, b ≥ 0, to decode steps, by least squares of relative errors.

    Steps are means over repetitions: so is the TPOT of an answer, which waits for the slow ones, too.
    """
    batches = sorted({point.batch for point in points})
    design, seconds = [], []
    for point in points:
        steps = np.mean(point.artifact.generations_ms, axis=0)[1:] / 1e3
        for number, each in enumerate(steps):
            row = np.zeros(len(batches) + 1)
            row[batches.index(point.batch)] = 1.0
            row[-1] = point.batch * (point.prompt_tokens + number)
            design.append(row / each)
            seconds.append(each)
    equations, ones = np.array(design), np.ones(len(design))
    found = np.linalg.lstsq(equations, ones, rcond=None)[0]
    if found[-1] < 0:
        found = np.append(np.linalg.lstsq(equations[:, :-1], ones, rcond=None)[0], 0.0)
    return dict(zip(batches, found[:-1].tolist(), strict=True)), float(found[-1])


def _fit_prefill(points: Sequence[LatencyPoint], one: float | None) -> tuple[dict[float, float], float]:
    """Give the seconds of pieces of prompts by tokens, `one` being that of one token, and those of a pair.

    Prompts of one piece tell the former, longer ones the latter, where there is a piece as long as theirs.
    """
    alone = min(point.batch for point in points)
    found: dict[int, list[float]] = {}
    for point in points:
        if point.batch == alone:  # each prompt of a batch is read by itself
            first = float(np.mean([each[0] for each in point.artifact.generations_ms])) / 1e3 / point.batch
            found.setdefault(point.prompt_tokens, []).append(first)
    timed = {tokens: float(np.mean(each)) for tokens, each in found.items()}
    short = {float(tokens): each for tokens, each in timed.items() if tokens <= PREFILL_CHUNK}
    long = {tokens: each for tokens, each in timed.items() if tokens > PREFILL_CHUNK}
    if one is not None and 1.0 not in short:
        short[1.0] = min(one, *timed.values())
    if long and max(short, default=0.0) < PREFILL_CHUNK / 2:
        short[float(PREFILL_CHUNK)] = min(each * PREFILL_CHUNK / tokens for tokens, each in long.items())
    curve = StepCurve.of(short)
    extra = [
        (each - sum(curve.at(count) for count, _ in pieces), sum(count * past for count, past in pieces))
        for tokens, each in long.items()
        for pieces in [list(chunks(tokens))]
    ]
    weight = sum(pairs * pairs for _, pairs in extra)
    return short, max(0.0, sum(rest * pairs for rest, pairs in extra) / weight) if weight else 0.0


def chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a prompt into what one step reads of it: tokens, and those before them."""
    for past in range(0, tokens, PREFILL_CHUNK):
        yield min(PREFILL_CHUNK, tokens - past), past

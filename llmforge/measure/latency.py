"""Latency of an artifact beside its baseline: both in one process, turn by turn, on the same random prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError, VerificationError
from llmforge.measure.machine import read_bandwidth
from llmforge.metrics import catalog, latency
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import (
    Bandwidth,
    Compute,
    Conditions,
    DataSheet,
    EngineStart,
    Footprint,
    HourlyPrice,
    Latency,
    Noise,
    TimedSide,
)
from llmforge.metrics.tokens import Floats
from llmforge.metrics.workload import MeasuredWorkload, Slo

if TYPE_CHECKING:
    from llmforge.serving import Runner
    from llmforge.serving.encoder_runner import EncoderRunner

_DECIMALS = 5  # of milliseconds: 10 ns
DRAM_PROBE_BYTES = 2**28  # 256 MB: several times the last-level cache of most machines
MOST_REPETITIONS = 1000  # of one load
# Of all loads and sides together: at 11 bytes of JSON a time, a record of evidence stays below 4 MB for them.
MOST_TIMES = 300_000


@dataclass(frozen=True)
class TimedModel:
    """Something that generates: the artifact or the baseline.

    `generate(ids [B, S] int64, tokens)` yields `tokens` times, as soon as each of the B sequences has its next greedy
    token, reusing nothing of earlier calls and ignoring EOS. With `by_its_clock` it yields the seconds since it began:
    it runs in a process of its own, and what it says may lie unread while this one waits for a processor.

    Of an encoder, `generate(ids, 0)` yields once: as soon as all B texts are encoded.
    """

    description: str
    generate: Callable[[NDArray[np.int64], int], Iterator[object]]
    load_seconds: float
    by_its_clock: bool = False

    @classmethod
    def of_runner(cls, runner: Runner, *, description: str, load_seconds: float) -> TimedModel:
        """Time the shipped engine: its tokens, without turning them into text, as on the baseline's side."""
        from llmforge.serving import Sampling  # brings ONNX Runtime, which who only reads reports does not need

        def generate(ids: NDArray[np.int64], tokens: int) -> Iterator[object]:
            sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            for step in runner.generate_batch(ids.tolist(), [sampling] * len(ids)):
                if None not in step.token_ids:
                    yield step.token_ids

        return cls(description, generate, load_seconds)

    @classmethod
    def of_encoder(cls, runner: EncoderRunner, *, description: str, load_seconds: float) -> TimedModel:
        """Time an embedder or a reranker: sequences of token ids, in the batches that the runner makes of them."""
        from llmforge.serving.encoder_runner import EncoderInput  # brings ONNX Runtime, as above

        def generate(ids: NDArray[np.int64], tokens: int) -> Iterator[object]:
            yield runner.run([EncoderInput(row, np.zeros(len(row), np.int64)) for row in ids])

        return cls(description, generate, load_seconds)


def engine_description(runner: Runner, threads: int) -> str:
    """Say what runs an engine."""
    config = runner.config
    if config.plan is not None:
        return f"llmforge runtime, {config.plan.module} {config.plan.version}"
    return f"llmforge runtime, ONNX Runtime {config.onnxruntime}, {threads} threads"


@dataclass(frozen=True)
class TimedLoad:
    """So many prompts of one length at once, so many tokens after each, and how often at least.

    Without output tokens it is texts that are encoded. The baseline takes its turn in the first
    `baseline_repetitions`; None: in all of them.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    repetitions: int
    baseline_repetitions: int | None = None

    def __post_init__(self) -> None:
        wrong = self.output_tokens == 1 or self.output_tokens < 0
        if wrong or min(self.repetitions, self.prompt_tokens, self.batch) < 1:
            raise UsageError(
                f"latency of {self.repetitions} repetitions, {self.batch} prompts of {self.prompt_tokens} tokens, "
                f"{self.output_tokens} output tokens: expected 1 repetition or more, prompts of 1 token or more, and 2 "
                "output tokens or more, or 0 of texts that are encoded"
            )

    @property
    def times(self) -> int:
        """Times that are recorded of a run: one of each output token, or of all texts that are encoded."""
        return self.output_tokens or 1

    def has_turn(self, side: int, repetition: int) -> bool:
        """Say if a side, 0 being the artifact, is timed in a repetition; warm-up is number -1."""
        most = self.baseline_repetitions
        return side == 0 or most is None or (repetition < most and most > 0)


@dataclass(frozen=True)
class Until:
    """Go on until the intervals of the artifact's median TTFT and TPOT are narrow at every load, or time is up.

    Of an encoder, that of the time of a batch.
    """

    precision: float  # half of an interval at most, relative to its median
    budget_s: float  # for all loads, counted from the first warm-up


@dataclass(frozen=True)
class Instruments:
    """What a run reads off the machine beside the clock; each may be absent."""

    bandwidth: Callable[[Footprint, int, int], Bandwidth | None] | None = (
        None  # (footprint, context, threads); None: numpy's
    )
    compute: Callable[[], Compute] | None = None
    energy_j: Callable[[], float] | None = None  # that the device has taken since some moment
    noise: Callable[[], NoiseMeter] | None = None


class NoiseMeter(Protocol):
    """Records what else the machine does from when it was made; see `llmforge.metrics.latency.Noise`."""

    def probe(self) -> None:
        """Time the same small computation once more."""
        ...

    def read(self) -> Noise:
        """Tell what was found."""
        ...


@dataclass(frozen=True)
class Facts:
    """What is known of the target, and what the recipe promises."""

    data_sheet: DataSheet | None = None
    price: HourlyPrice | None = None
    slo: Slo | None = None


@dataclass
class _Timed:
    """What was timed of one side at one load."""

    generations: list[Floats] = field(default_factory=list)
    energy_j: list[float] = field(default_factory=list)

    def side(self, batch: int) -> TimedSide:
        return TimedSide(self.generations, batch, self.energy_j or None)


@dataclass(frozen=True)
class LatencyRun:
    """What both sides are timed on, with which instruments, and what the figures are held against."""

    loads: Sequence[TimedLoad]
    vocabulary: int  # that random prompts are drawn from
    threads: int
    seed: int = 0
    until: Until | None = None
    facts: Facts = Facts()
    instruments: Instruments = Instruments()

    def conditions(self, footprint: Footprint) -> Conditions:
        """Measure the device's ceilings; the working set is that of a decode step at the smallest load."""
        smallest = min(self.loads, key=lambda load: load.batch * (load.prompt_tokens + load.output_tokens))
        context = smallest.batch * (smallest.prompt_tokens + smallest.output_tokens // 2)
        instruments = self.instruments
        return Conditions(
            footprint=footprint,
            bandwidth=(instruments.bandwidth or host_bandwidth)(footprint, context, self.threads),
            compute=None if instruments.compute is None else instruments.compute(),
            data_sheet=self.facts.data_sheet,
            price=self.facts.price,
            slo=self.facts.slo,
        )


def measure(
    artifact: TimedModel,
    baseline: TimedModel | None,
    footprint: Footprint,
    run: LatencyRun,
    *,
    starts: Sequence[EngineStart] = (),
    workloads: Sequence[MeasuredWorkload] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Latency:
    """Time both sides in turn (A B A B …), so that a machine that slows down slows both.

    Every repetition has new random prompts, the same for both sides, so that no prefix can be reused. One generation
    of each side and load runs before the clock counts. Every load gets its `repetitions`; with `run.until`, loads whose
    intervals are not narrow yet go on in turn, up to `MOST_REPETITIONS` of each and `MOST_TIMES` recorded times.
    The baseline of a load may have fewer repetitions, or none.
    `progress` is told generations done and their total, without what `run.until` adds.

    Raises:
        UsageError: no load.
        VerificationError: a side yields another number of tokens than it was asked for.
    """
    if not run.loads:
        raise UsageError("latency of no load: expected 1 or more")
    rounds = _Rounds((artifact,) if baseline is None else (artifact, baseline), run, progress)
    stopped = rounds.go()
    conditions = run.conditions(footprint)
    points = []
    for load, timed in zip(run.loads, rounds.timed, strict=True):
        ours, *others = (side.side(load.batch) for side in timed if side.generations)
        points.append(catalog.point(load.prompt_tokens, ours, others[0] if others else None, conditions))
    return Latency(
        **dict(conditions),
        repetitions=min(load.repetitions for load in run.loads),
        output_tokens=run.loads[0].output_tokens,
        threads=run.threads,
        seed=run.seed,
        artifact=artifact.description,
        baseline=None if baseline is None else baseline.description,
        artifact_load_ms=artifact.load_seconds * 1e3,
        baseline_load_ms=None if baseline is None else baseline.load_seconds * 1e3,
        stopped=stopped,
        noise=None if rounds.meter is None else rounds.meter.read(),
        starts=tuple(starts),
        points=tuple(points),
        workloads=tuple(workloads),
    )


class _Rounds:
    """Times loads in turn."""

    def __init__(self, sides: Sequence[TimedModel], run: LatencyRun, progress: Callable[[int, int], None]) -> None:
        self._sides, self._loads, self._vocabulary, self._until = sides, run.loads, run.vocabulary, run.until
        self._rng = np.random.default_rng(run.seed)
        self._energy_j, self._progress = run.instruments.energy_j, progress
        self.meter = None if run.instruments.noise is None else run.instruments.noise()
        self.timed = [[_Timed() for _ in sides] for _ in run.loads]
        self._done = 0
        self._total = sum(
            load.has_turn(side, repetition)
            for load in run.loads
            for side in range(len(sides))
            for repetition in range(-1, load.repetitions)
        )

    def go(self) -> str:
        """Time all loads; say why it ended, where `Until` decides that."""
        began = time.perf_counter()
        most = max(load.repetitions for load in self._loads)
        for repetition in range(-1, most):  # -1 warms up
            self._round([at for at, load in enumerate(self._loads) if repetition < load.repetitions], repetition)
        self._progress(self._total, self._total)
        if (until := self._until) is None:
            return ""
        for repetition in itertools.count(most):
            wide = [at for at in range(len(self._loads)) if not self._narrow(at, until.precision)]
            if not wide:
                return f"every interval is within ± {until.precision:.1%}"
            wide = [at for at in wide if len(self.timed[at][0].generations) < MOST_REPETITIONS]
            if not wide:
                return f"{MOST_REPETITIONS} repetitions were made"
            if self._times_after(wide, repetition) > MOST_TIMES:
                return f"{MOST_TIMES:,} times are recorded"
            if time.perf_counter() - began >= until.budget_s:
                return f"the budget of {until.budget_s:g} s ended"
            self._round(wide, repetition)
        raise AssertionError("counting ended")

    def _round(self, chosen: Sequence[int], repetition: int) -> None:
        keep = repetition >= 0
        if self.meter is not None and keep:
            self.meter.probe()
        for at in chosen:
            load = self._loads[at]
            ids = self._rng.integers(0, self._vocabulary, (load.batch, load.prompt_tokens), np.int64)
            for side, (model, timed) in enumerate(zip(self._sides, self.timed[at], strict=True)):
                if not load.has_turn(side, repetition):
                    continue
                self._progress(min(self._done, self._total), self._total)
                before = 0.0 if self._energy_j is None else self._energy_j()
                durations = timed_generation(model, ids, load.output_tokens)
                if keep:
                    timed.generations.append(durations)
                    if self._energy_j is not None:
                        timed.energy_j.append(self._energy_j() - before)
                self._done += 1

    def _narrow(self, at: int, precision: float) -> bool:
        generations = self.timed[at][0].generations
        one = len(generations[0]) == 1
        for duration in (latency.whole_ms,) if one else (latency.first_token_ms, latency.later_token_ms):
            median = Estimate.median([duration(each) for each in generations], of="repetitions")
            if median.low is None or median.high is None:
                return False
            if max(median.high - median.value, median.value - median.low) > precision * median.value:
                return False
        return True

    def _times_after(self, chosen: Sequence[int], repetition: int) -> int:
        """Count the times that are recorded after one more round."""
        held = sum(
            len(side.generations) * load.times
            for sides, load in zip(self.timed, self._loads, strict=True)
            for side in sides
        )
        more = sum(
            self._loads[at].times * self._loads[at].has_turn(side, repetition)
            for at in chosen
            for side in range(len(self._sides))
        )
        return held + more


def timed_generation(model: TimedModel, ids: NDArray[np.int64], tokens: int) -> NDArray[np.float64]:
    """Generate once and return the milliseconds that each token took [tokens]; the first is the TTFT.

    With no `tokens` texts are encoded, and it is the one time that this took [1].
    """
    stamps = [time.perf_counter()]
    if model.by_its_clock:
        stamps = [0.0, *cast(Iterator[float], model.generate(ids, tokens))]
    else:
        stamps.extend(time.perf_counter() for _ in model.generate(ids, tokens))
    if len(stamps) != (tokens or 1) + 1:
        raise VerificationError(
            f"{model.description} yielded {len(stamps) - 1} tokens after a prompt of {ids.shape[1]}; expected {tokens}",
            hint="timed generation ignores EOS and stop strings; check that the prompt fits the context",
        )
    # Rounded to what the clock tells, so that figures can be made again of what a report says.
    return np.round(np.diff(stamps) * 1e3, _DECIMALS)


def host_bandwidth(footprint: Footprint, context: int, threads: int) -> Bandwidth:
    """Measure how fast the host reads its memory; `context` tokens of cache are read beside the weights."""
    working_set = footprint.weight_bytes_per_token + context * footprint.kv_bytes_per_token
    return Bandwidth(
        threads=threads,
        dram_bytes_per_second=read_bandwidth(DRAM_PROBE_BYTES, threads),
        working_set_bytes=working_set,
        # Beyond the probe of DRAM a larger working set tells nothing new, and its memory may not be there.
        working_set_bytes_per_second=read_bandwidth(min(working_set, DRAM_PROBE_BYTES), threads),
    )

"""What is measured on an engine as it ships, or why nothing is; and how its gates end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmforge import engines
from llmforge.base import spans
from llmforge.base.progress import Progress
from llmforge.build.latency import Measuring
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.engines import Engine
from llmforge.evaluation import answers, footprint, gates, machine, quality
from llmforge.evaluation.baseline import Baseline
from llmforge.evaluation.footprint import BytesRead
from llmforge.evaluation.latency import Subject
from llmforge.evaluation.quality import Logits
from llmforge.ir import onnx_file
from llmforge.metrics.latency import Latency
from llmforge.metrics.quality import Answer, Quality, Sample
from llmforge.recipe import GateSpec, QualitySpec, ValidationSpec
from llmforge.report import model as records
from llmforge.report import verdict
from llmforge.runtime import Runner, Sampling
from llmforge.runtime import load as load_runner
from llmforge.targets import Target

PENDING = "the engine is not built yet"
NOT_ASKED = "this build was not asked to measure"


@dataclass(frozen=True)
class Evidence:
    """What was measured on the shipped engine."""

    quality: Quality | None
    latency: Latency | None
    baseline: str | None  # what it was held against, in words
    unmeasured: str | None = None  # why the engine could not be run; None: it could
    notes: tuple[str, ...] = ()  # what else was not measured, and why

    def engine_record(self, backend: str, folder: Path, engine: Engine | None) -> records.EngineRecord:
        """Write down what is in the engine's `folder`; `engine` None: what it is built of, later."""
        graphs = [onnx_file.load(file) for file in sorted(folder.glob(f"*{onnx_file.SUFFIX}"))]
        groups = [group for graph in graphs for group in footprint.weights(graph)]
        runs_in_onnxruntime = engine is not None and engine.config.plan is None
        return records.EngineRecord(
            backend=backend,
            files=tuple(
                records.EngineFile(name=file.name, size_bytes=file.stat().st_size) for file in sorted(folder.iterdir())
            ),
            weights=tuple(records.WeightGroup.model_validate(group, from_attributes=True) for group in groups),
            session=dataclasses.asdict(engine.config.session) if engine is not None and runs_in_onnxruntime else {},
            facts={} if engine is None else dict(engine.facts),
            pending=engine is None,
            unmeasured=self.unmeasured,
        )

    def judge(self, specs: Mapping[str, GateSpec], engine: records.EngineRecord) -> tuple[gates.GateResult, ...]:
        """Decide the gates; what could not be measured leaves them undecided."""
        return verdict.judge(specs, self.quality, self.latency, engine)


@dataclass(frozen=True)
class Clock:
    """Counts what a build takes from when it was made, stage by stage, and hands its progress on.

    The peak memory of this process counts anew with every stage, where the system allows it.
    """

    progress: Progress
    began: float = field(default_factory=time.perf_counter)
    cpu_began: float = field(default_factory=time.process_time)
    stages: list[tuple[str, float]] = field(default_factory=list)  # title, and when it began
    peaks: list[int | None] = field(default_factory=list)  # bytes; of the stages that ended; None: cannot be told
    peak_before: int = field(default_factory=machine.peak_resident_bytes)
    by_stage: bool = field(default_factory=machine.reset_peak_resident_bytes)  # the system lets peaks begin anew

    def stage(self, title: str) -> None:
        """Begin a stage; the first one counts from the beginning."""
        if len(self.peaks) < len(self.stages):
            self._end_stage()
        self.stages.append((title, time.perf_counter() if self.stages else self.began))
        self.progress.stage(title)

    def _end_stage(self) -> None:
        """Read the peak memory of the stage, and let that of the next one begin."""
        peak = machine.peak_resident_bytes() if self.by_stage else None
        self.peaks.append(peak)
        if peak is not None:
            spans.annotate(peak_rss_bytes=peak)
            machine.reset_peak_resident_bytes()

    def advance(self, done: int, total: int) -> None:
        """Hand on how much of the stage is done."""
        self.progress.advance(done, total)

    def record(self, reused: records.ReusedRecord) -> records.BuildRecord:
        """Read it; the stages add up to the whole. `reused` says what was not computed."""
        now = time.perf_counter()
        if len(self.peaks) < len(self.stages):
            self._end_stage()
        ends = [*(began for _, began in self.stages[1:]), now]
        return records.BuildRecord(
            seconds=now - self.began,
            cpu_seconds=time.process_time() - self.cpu_began,
            peak_rss_bytes=max(self.peak_before, machine.peak_resident_bytes(), *(peak or 0 for peak in self.peaks)),
            stages=tuple(
                records.StageRecord(title=title, seconds=end - began, peak_rss_bytes=peak)
                for (title, began), end, peak in zip(self.stages, ends, self.peaks, strict=True)
            ),
            reused=reused,
        )


def measure(
    artifact: Path,
    engine: Engine | None,
    read: BytesRead,
    *,
    spec: ValidationSpec,
    target: Target,
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    threads: int,
    progress: Progress,
    ranks: int = 1,
    keep: Callable[[Logits], Logits] = lambda logits: logits,
) -> Evidence:
    """Measure the engine in the folder `artifact`, loaded by the runtime that serves it, beside the checkpoint.

    `read` is what a decode step reads, `windows` the text for its quality. `keep` may take the logits of the baseline
    on them from where they were kept. An engine that is not built yet (None), or that this machine does not run, is not
    measured; `ranks` devices share one.
    """
    reason = PENDING if engine is None else engines.why_not_run(target)
    if engine is None or reason is not None or (spec.quality is None and spec.latency is None):
        return Evidence(None, None, None, reason)
    progress.stage("Load engine and baseline")
    began = time.perf_counter()
    runner = load_runner(artifact, threads=threads)
    load_seconds = time.perf_counter() - began
    baseline = Baseline(checkpoint, threads=threads)
    moved = timed = None
    notes: tuple[str, ...] = ()
    if spec.quality is not None:
        moved = _quality(spec.quality, runner, baseline, windows, progress, keep)
    if spec.latency is not None:
        progress.stage("Measure latency")
        ours = Subject.of_runner(runner, description=_describe(runner, threads), load_seconds=load_seconds)
        theirs = Subject(baseline.description, baseline.generate, baseline.load_seconds)
        measuring = Measuring(artifact, runner, spec.latency, target, read, threads, ranks)
        timed = measuring.run(ours, theirs, engine.size_bytes, progress.advance)
        notes = tuple(measuring.notes)
    return Evidence(moved, timed, baseline.description, notes=notes)


def _quality(
    spec: QualitySpec,
    runner: Runner,
    baseline: Baseline,
    windows: Sequence[Window],
    progress: Progress,
    keep: Callable[[Logits], Logits],
) -> Quality:
    """Compare both on the text and, where `spec` asks for it, through decode steps and by their greedy answers."""
    said: tuple[tuple[Answer, ...], tuple[Sample, ...]] = (), ()
    if spec.samples is not None:
        progress.stage("Compare answers")
        said = answers.compare(
            windows,
            spec.samples,
            artifact=lambda ids, tokens: _greedy(runner, ids.tolist(), tokens),
            baseline=baseline.logits,
            go_on=lambda ids, tokens: (step[0] for step in baseline.generate(ids[None], tokens)),
            ends=runner.config.eos_token_ids,
            decode=lambda ids: runner.tokenizer.decode(list(ids), skip_special_tokens=False),
            progress=progress.advance,
        )
    expected = keep(baseline.logits)
    progress.stage("Measure quality")
    return quality.compare(
        windows,
        expected,
        lambda ids: runner.logits(ids.tolist()),
        half_of=spec.context if spec.scored == "second-half" else None,
        decode=lambda ids: runner.logits(ids.tolist(), step_tokens=1),
        decode_tokens=spec.decode_tokens or 0,
        answers=said[0],
        samples=said[1],
        progress=progress.advance,
    )


def _greedy(runner: Runner, ids: Sequence[int], tokens: int) -> Iterator[int]:
    for chunk in runner.generate(ids, Sampling(max_tokens=tokens, ignore_eos=True)):
        if chunk.token_id is not None:
            yield chunk.token_id


def _describe(runner: Runner, threads: int) -> str:
    config = runner.config
    if config.plan is not None:
        return f"llmforge runtime, {config.plan.module} {config.plan.version}"
    return f"llmforge runtime, ONNX Runtime {config.onnxruntime}, {threads} threads"

"""What is measured on an engine as it ships, or why nothing is; and how its gates end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmforge.backends import BACKENDS, engines, of_provider
from llmforge.backends.engines import BuiltEngine
from llmforge.base import spans
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.checkpoint.text import Window
from llmforge.compile import export_proxy, reference, tasks
from llmforge.compile.latency import Measuring
from llmforge.compile.reuse import Reuse
from llmforge.gates import decision, records, verdict
from llmforge.ir import onnx_file
from llmforge.measure import answers, footprint, machine, quality, runtimes, streamed_baseline
from llmforge.measure.baseline import Baseline, baseline_on, open_baseline, why_not_whole
from llmforge.measure.footprint import BytesRead
from llmforge.measure.latency import Subject
from llmforge.measure.quality import Logits
from llmforge.measure.runtimes import Interpreter
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.metrics import catalog
from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.agreement import RuntimeName, RuntimeRun
from llmforge.metrics.latency import Latency
from llmforge.metrics.quality import Answer, Quality, Sample
from llmforge.metrics.tasks import TaskResult
from llmforge.recipe import GateSpec, QualitySpec, Recipe, ValidationSpec
from llmforge.serving import Runner, Sampling
from llmforge.serving import load as load_runner
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
    runtimes: tuple[RuntimeRun, ...] = ()  # others that ran it
    tasks: tuple[TaskResult, ...] = ()
    adapters: tuple[AdapterQuality, ...] = ()  # those that requests choose

    def engine_record(self, backend: str, folder: Path, engine: BuiltEngine | None) -> records.EngineRecord:
        """Write down what is in the engine's `folder`; `engine` None: what it is built of, later."""
        graphs = [onnx_file.load(file) for file in sorted(folder.glob(f"*{onnx_file.SUFFIX}"))]
        if engine is not None and engine.graph is not None:
            graphs = [engine.graph]
        groups = [group for graph in graphs for group in footprint.weights(graph)]
        runs_in_onnxruntime = engine is not None and engine.config.onnxruntime is not None
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

    def judge(
        self, specs: Mapping[str, GateSpec], engine: records.EngineRecord, checkpoint: records.CheckpointRecord
    ) -> tuple[decision.GateResult, ...]:
        """Decide the gates; what could not be measured leaves them undecided."""
        measured = records.measured(
            self.quality, self.latency, engine, checkpoint, self.runtimes, self.tasks, self.adapters
        )
        return verdict.judge(specs, measured, engine.unmeasured)


@dataclass(frozen=True)
class Clock:
    """Counts what a build takes from when it was made, stage by stage, and hands its progress on.

    The peak memory of this process counts anew with every stage, where the system allows it. CPU time counts processes
    that it started and that have ended; the peaks of those that ran `beside` it are added to its own.
    """

    progress: Progress
    began: float = field(default_factory=time.perf_counter)
    cpu_began: float = field(default_factory=lambda: _cpu_seconds())
    stages: list[tuple[str, float]] = field(default_factory=list)  # title, and when it began
    beside: list[int] = field(default_factory=list)  # peak memory of other processes, bytes
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
            cpu_seconds=_cpu_seconds() - self.cpu_began,
            peak_rss_bytes=sum(self.beside)
            + max(self.peak_before, machine.peak_resident_bytes(), *(peak or 0 for peak in self.peaks)),
            stages=tuple(
                records.StageRecord(title=title, seconds=end - began, peak_rss_bytes=peak)
                for (title, began), end, peak in zip(self.stages, ends, self.peaks, strict=True)
            ),
            reused=reused,
        )


def _cpu_seconds() -> float:
    """CPU time of this process, and of those that it started and that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def interpreters(
    recipe: Recipe, target: Target, pythons: Mapping[RuntimeName, Path], wanted: Sequence[RuntimeName]
) -> tuple[Interpreter, ...]:
    """Find the `wanted` other runtimes, by the Python that `pythons` names for each, else by this one.

    Raises:
        UsageError: `pythons` names one that nothing is to be run in.
        UnsupportedError: the engine of `target` is none that they run.
        EnvironmentLacks: one cannot be imported.
    """
    if extra := sorted(set(pythons) - set(wanted)):
        raise UsageError(
            f"--runtime {extra[0]}: `validation.runtimes` of {recipe.path} does not name it",
            hint=f"add `validation: {{runtimes: [{extra[0]}]}}`, or measure it later with `llmforge validate`",
        )
    if wanted and target.kind != "cpu" and BACKENDS[recipe.engine.backend].export_format is None:
        raise UnsupportedError(
            f"{', '.join(wanted)}: other runtimes run engines for CPUs alone, and {target.name} is none",
            hint="remove `validation.runtimes` from the recipe, or choose another target",
        )
    return runtimes.find(wanted, pythons)


def measure(
    artifact: Path,
    engine: BuiltEngine | None,
    read: BytesRead,
    *,
    spec: ValidationSpec,
    target: Target,
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    threads: int,
    progress: Progress,
    ranks: int = 1,
    keep: Callable[[Checkpoint, Baseline | StreamedBaseline], Logits] | None = None,
    interpreters: Sequence[Interpreter] = (),
    reuse: Reuse | None = None,
    stand_in: Path | None = None,
    adapters: Sequence[AdapterSource] = (),
) -> Evidence:
    """Measure the engine in the folder `artifact`, loaded by the runtime that serves it, beside the checkpoint.

    Where `spec` names a reference, the quality is held against that.
    `read` is what a decode step reads, `windows` the text for its quality. `keep` may give the logits of the baseline
    on them from where they were kept; `reuse` keeps what it answers to tasks. `interpreters` have other runtimes, which
    run the engine as well. An engine that is not built yet (None), or that this machine does not run, is not measured;
    `ranks` devices share one. Of one that servers of others load, there is a `stand_in` that llmforge's own runtime
    loads; its quality is that of the artifact in another runtime, where there is an interpreter. Each of the `adapters`
    that requests choose is held against the checkpoint with it merged, on some of the text.
    """
    reason = PENDING if engine is None else None if stand_in is not None else engines.why_not_run(target)
    if engine is None or reason is not None or spec.is_empty:
        return Evidence(None, None, None, reason)
    baseline, expected = None, None
    notes: tuple[str, ...] = ()
    progress.stage("Load engine and baseline")
    if spec.quality is not None:
        original = reference.of(spec.quality, checkpoint)
        kept = None if keep is None else partial(keep, original)
        baseline = open_baseline(original, threads=threads)
        if original is not checkpoint:
            baseline.description = f"{reference.described(original)}: {baseline.description}"
            notes += (f"quality is measured against {reference.described(original)}",)
        if isinstance(baseline, StreamedBaseline):  # it is done, as far as it can be kept, before the engine is there
            expected = _logits(baseline, windows, kept, progress)
            progress.stage("Load engine")
    began = time.perf_counter()
    runner = load_runner(stand_in or artifact, threads=threads)
    load_seconds = time.perf_counter() - began
    moved = timed = None
    if spec.quality is not None:
        assert baseline is not None
        said = _answers(spec.quality, runner, baseline, windows, progress)
        if said[1] and isinstance(baseline, StreamedBaseline):
            notes += (
                "answers: the baseline runs layer by layer: behind the first difference it is shown for "
                f"{streamed_baseline.GENERATED} tokens at most",
            )
        expected = expected or _logits(baseline, windows, kept, progress)
        with contextlib.ExitStack() as held:
            logits: Callable[..., NDArray[np.float32]] = runner.logits
            if stand_in is not None:
                title = None
                if interpreters:
                    other = held.enter_context(runtimes.opened(artifact, runner.config.vocabulary, interpreters[0]))
                    logits, title = other.logits, other.title
                notes += (export_proxy.note(of_provider(engine.config.provider).name, runner.config, title),)
            moved = _quality(spec.quality, logits, expected, said, windows, progress)
    held_against = None if baseline is None else baseline.description
    if spec.latency is not None:
        theirs = None
        if baseline is None or isinstance(baseline, StreamedBaseline):
            if (why := why_not_whole(checkpoint)) is None:
                progress.stage("Load baseline")
                baseline = Baseline(checkpoint, threads=threads)
            else:
                notes += (f"latency: the checkpoint is not timed beside the artifact: {why}",)
        if baseline is not None and not isinstance(baseline, StreamedBaseline):
            held_against = held_against or baseline.description
            theirs = Subject(baseline.description, baseline.generate, baseline.load_seconds)
        progress.stage("Measure latency")
        ours = Subject.of_runner(runner, description=describe(runner, threads), load_seconds=load_seconds)
        measuring = Measuring(artifact, runner, spec.latency, target, read, threads, ranks)
        timed = measuring.run(ours, theirs, engine.size_bytes, progress.advance)
        notes += tuple(measuring.notes)
    ran: tuple[RuntimeRun, ...] = ()
    if interpreters:
        progress.stage("Run in other runtimes")
        ran = runtimes.run(artifact, runner, windows, interpreters, progress=progress.advance)
        notes += tuple(f"{run.title} failed: {run.failure}" for run in ran if run.failure is not None)
    results: tuple[TaskResult, ...] = ()
    if spec.tasks is not None:
        ran_by = describe(runner, threads)
        results, left_out = tasks.run(
            spec.tasks, runner, checkpoint, progress, engine=ran_by, threads=threads, reuse=reuse
        )
        notes += left_out
    chosen: tuple[AdapterQuality, ...] = ()
    if spec.quality is not None and spec.quality.adapter_tokens and adapters:
        chosen = _adapters(spec.quality, runner, checkpoint, adapters, windows, threads, progress)
    return Evidence(moved, timed, held_against, notes=notes, runtimes=ran, tasks=results, adapters=chosen)


def _adapters(
    spec: QualitySpec,
    runner: Runner,
    checkpoint: Checkpoint,
    adapters: Sequence[AdapterSource],
    windows: Sequence[Window],
    threads: int,
    progress: Progress,
) -> tuple[AdapterQuality, ...]:
    """Compare the artifact with each adapter chosen with the checkpoint that has it merged; one of these at a time."""
    half_of = spec.context if spec.scored == "second-half" else None
    pool = [window for window in windows if len(window.ids) > 1 and (half_of is None or len(window.ids) == half_of)]
    some, found = text.spread(pool, spec.adapter_tokens), []
    for adapter in adapters:
        progress.stage(f"Measure adapter {adapter.name}")
        baseline = open_baseline(reference.with_adapter(spec, checkpoint, adapter), threads=threads)

        def ours(ids: NDArray[np.int64], name: str = adapter.name) -> NDArray[np.float32]:
            return runner.logits(ids.tolist(), adapter=name)

        moved = quality.compare(
            some,
            baseline_on([window.ids for window in some], baseline, progress),
            ours,
            half_of=half_of,
            only=list(catalog.OF_ADAPTERS.values()),
            progress=progress.advance,
        )
        found.append(AdapterQuality(adapter=adapter.name, quality=moved))
    return tuple(found)


def _logits(
    baseline: Baseline | StreamedBaseline,
    windows: Sequence[Window],
    keep: Callable[[Baseline | StreamedBaseline], Logits] | None,
    progress: Progress,
) -> Logits:
    if keep is not None:
        return keep(baseline)
    return baseline_on([window.ids for window in windows if len(window.ids) > 1], baseline, progress)


def _answers(
    spec: QualitySpec,
    runner: Runner,
    baseline: Baseline | StreamedBaseline,
    windows: Sequence[Window],
    progress: Progress,
) -> tuple[tuple[Answer, ...], tuple[Sample, ...]]:
    """Compare greedy answers, where `spec` asks for them."""
    if spec.samples is None:
        return (), ()
    progress.stage("Compare answers")
    return answers.compare(
        windows,
        spec.samples,
        artifact=lambda ids, tokens: _greedy(runner, ids.tolist(), tokens),
        baseline=lambda texts: baseline.of(texts, progress.advance),
        go_on=baseline.greedy,
        ends=runner.config.eos_token_ids,
        decode=lambda ids: runner.tokenizer.decode(list(ids), skip_special_tokens=False),
        progress=progress.advance,
    )


def _quality(
    spec: QualitySpec,
    logits: Callable[..., NDArray[np.float32]],
    expected: Logits,
    said: tuple[tuple[Answer, ...], tuple[Sample, ...]],
    windows: Sequence[Window],
    progress: Progress,
) -> Quality:
    """Compare both on the text and, where `spec` asks for it, through decode steps; `said` are their answers."""
    progress.stage("Measure quality")
    return quality.compare(
        windows,
        expected,
        lambda ids: logits(ids.tolist()),
        half_of=spec.context if spec.scored == "second-half" else None,
        decode=lambda ids: logits(ids.tolist(), step_tokens=1),
        decode_tokens=spec.decode_tokens or 0,
        answers=said[0],
        samples=said[1],
        metrics=spec.metrics,
        progress=progress.advance,
    )


def _greedy(runner: Runner, ids: Sequence[int], tokens: int) -> Iterator[int]:
    for chunk in runner.generate(ids, Sampling(max_tokens=tokens, ignore_eos=True)):
        if chunk.token_id is not None:
            yield chunk.token_id


def describe(runner: Runner, threads: int) -> str:
    """Say what runs an engine."""
    config = runner.config
    if config.plan is not None:
        return f"llmforge runtime, {config.plan.module} {config.plan.version}"
    return f"llmforge runtime, ONNX Runtime {config.onnxruntime}, {threads} threads"

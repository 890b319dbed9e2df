"""The evidence of a build: what is measured on its engine as it ships, or why nothing is; and how its gates end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import llmforge
from llmforge.backends import BACKENDS, engines, of_provider
from llmforge.backends.engines import BuiltEngine
from llmforge.base import spans
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import export_proxy, reference
from llmforge.gates import decision, records, verdict
from llmforge.ir import onnx_file
from llmforge.measure import (
    behaviour,
    encoder_latency,
    footprint,
    machine,
    retrieval,
    runtimes,
    streamed_baseline,
    tasks,
)
from llmforge.measure.answers import Generate
from llmforge.measure.baseline import Baseline, baseline_on, open_baseline, why_not_whole
from llmforge.measure.encoder_baseline import CheckpointEncoder
from llmforge.measure.encoder_latency import TimedEncoder
from llmforge.measure.footprint import BytesRead
from llmforge.measure.latency import TimedModel, engine_description
from llmforge.measure.quality import Logits
from llmforge.measure.recipe_latency import RecipeLatency
from llmforge.measure.recipe_quality import RecipeQuality
from llmforge.measure.runtimes import Interpreter, Opened
from llmforge.measure.scoring import AnswerCache, TaskRequest
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.measure.tasks import TaskEngine
from llmforge.metrics import quality_metrics
from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.agreement import RuntimeName, RuntimeRun
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.latency import Latency
from llmforge.metrics.quality import Quality
from llmforge.metrics.retrieval.results import RetrievalResult
from llmforge.metrics.tasks import TaskResult
from llmforge.recipe import BehaviourSpec, GateSpec, LatencySpec, QualitySpec, Recipe, ValidationSpec
from llmforge.serving import Runner
from llmforge.serving import load as load_runner
from llmforge.serving.encoder_runner import load_encoder
from llmforge.targets import Target

PENDING = "the engine is not built yet"
NOT_ASKED = "this build was not asked to measure"


@dataclass(frozen=True)
class Evidence:
    """What was measured on the shipped engine."""

    quality: Quality | None
    latency: Latency | None
    baseline: str | None  # what it was held against, as text
    unmeasured: str | None = None  # why the engine could not be run; None: it could
    notes: tuple[str, ...] = ()  # what else was not measured, and why
    runtimes: tuple[RuntimeRun, ...] = ()  # others that ran it
    tasks: tuple[TaskResult, ...] = ()
    adapters: tuple[AdapterQuality, ...] = ()  # those that requests choose
    behaviour: BehaviourResult | None = None
    retrieval: RetrievalResult | None = None

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
                records.EngineFile(name=file.relative_to(folder).as_posix(), size_bytes=file.stat().st_size)
                for file in sorted(folder.rglob("*"))  # a draft has a folder of its own
                if file.is_file()
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
            self.quality,
            self.latency,
            engine,
            checkpoint,
            self.runtimes,
            self.tasks,
            self.adapters,
            self.behaviour,
            self.retrieval,
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


@dataclass(frozen=True)
class Measurement:
    """What of an engine is to be measured, and what with.

    Where `spec` names a reference, the quality is held against that. `keep` may give the logits of the baseline on the
    windows from where they were kept; `answers` keeps what was answered to tasks. `interpreters` have other runtimes,
    which run the engine as well. An engine that is not built yet (None), or that this machine does not run, is not
    measured; `ranks` devices share one. Of one that servers of others load, there is a `proxy` that llmforge's own
    runtime loads; its quality is that of the artifact in another runtime, where there is an interpreter. Each of the
    `adapters` that requests choose is held against the checkpoint with it merged, on some of the text.
    """

    artifact: Path  # folder
    engine: BuiltEngine | None
    read: BytesRead  # by a decode step
    spec: ValidationSpec
    target: Target
    checkpoint: Checkpoint
    windows: Sequence[TokenWindow]  # text for the quality
    threads: int
    ranks: int = 1
    keep: Callable[[Checkpoint, Baseline | StreamedBaseline], Logits] | None = None
    interpreters: Sequence[Interpreter] = ()
    answers: AnswerCache | None = None
    proxy: Path | None = None
    adapters: Sequence[AdapterSource] = ()

    @property
    def why_not(self) -> str | None:
        """Say why the engine cannot be run; None: it can."""
        if self.engine is None:
            return PENDING
        return None if self.proxy is not None else engines.why_not_run(self.target)


def measure(asked: Measurement, progress: Progress) -> Evidence:
    """Measure an engine, loaded by the runtime that serves it, beside its checkpoint."""
    why_not = asked.why_not
    if why_not is not None or asked.spec.is_empty:
        return Evidence(None, None, None, why_not)
    if asked.checkpoint.encoding is not None:
        return _of_encoder(asked, progress)
    notes: list[str] = []
    if asked.spec.retrieval is not None:
        notes.append("retrieval: not measured, for the checkpoint predicts tokens")
    progress.stage("Load engine and baseline")
    held_against = None if asked.spec.quality is None else _reference(asked, asked.spec.quality, progress, notes)
    began = time.perf_counter()
    runner = load_runner(asked.proxy or asked.artifact, threads=asked.threads)
    return _Measuring(asked, progress, notes, runner, time.perf_counter() - began).evidence(held_against)


def _of_encoder(asked: Measurement, progress: Progress) -> Evidence:
    """Measure what an embedder finds, or how a reranker orders, and how fast; nothing else is measured of them."""
    spec = asked.spec
    others = {"quality": spec.quality, "tasks": spec.tasks, "behaviour": spec.behaviour}
    notes = tuple(
        f"{name}: not measured, for the checkpoint predicts no tokens" for name, each in others.items() if each
    )
    if spec.retrieval is None and spec.latency is None:
        return Evidence(None, None, None, None, notes)
    progress.stage("Load engine and baseline")
    began = time.perf_counter()
    runner = load_encoder(asked.artifact, asked.threads)
    load_seconds = time.perf_counter() - began
    baseline = CheckpointEncoder(asked.checkpoint, runner.config, threads=asked.threads)
    described = f"llmforge {llmforge.__version__}, onnxruntime, threads: {asked.threads}"
    found = timed = None
    if spec.retrieval is not None:
        given = {"engine": described, "baseline": baseline.description}
        found = retrieval.run(spec.retrieval, runner, baseline, progress, **given)
    if spec.latency is not None:
        assert asked.engine is not None
        progress.stage("Measure latency")
        engine = TimedEncoder(
            *(asked.artifact, runner, described, load_seconds, asked.engine.size_bytes, asked.read, asked.threads)
        )
        timed = encoder_latency.run(spec.latency, engine, baseline, asked.target, progress.advance)
    return Evidence(None, timed, baseline.description, None, notes, retrieval=found)


@dataclass(frozen=True)
class _Reference:
    """What quality is measured against, and what gives its logits on the text."""

    baseline: Baseline | StreamedBaseline
    logits: Callable[[], Logits]


def _reference(asked: Measurement, spec: QualitySpec, progress: Progress, notes: list[str]) -> _Reference:
    """Load what quality is measured against; a baseline that is streamed is run before the engine is there."""
    original = reference.of(spec, asked.checkpoint)
    baseline = open_baseline(original, threads=asked.threads)
    if original is not asked.checkpoint:
        baseline.description = f"{reference.described(original)}: {baseline.description}"
        notes.append(f"quality is measured against {reference.described(original)}")

    def logits() -> Logits:
        if asked.keep is not None:
            return asked.keep(original, baseline)
        return baseline_on([window.ids for window in asked.windows if len(window.ids) > 1], baseline, progress)

    if not isinstance(baseline, StreamedBaseline):
        return _Reference(baseline, logits)
    found = logits()
    progress.stage("Load engine")
    return _Reference(baseline, lambda: found)


@dataclass(frozen=True)
class _Measuring:
    """A measurement whose engine is loaded."""

    asked: Measurement
    progress: Progress
    notes: list[str]
    runner: Runner
    load_seconds: float

    def evidence(self, held_against: _Reference | None) -> Evidence:
        """Measure all that is asked for, one after the other."""
        asked, spec = self.asked, self.asked.spec
        moved = timed = described = None
        ran: tuple[RuntimeRun, ...] = ()
        with contextlib.ExitStack() as held:
            server = None
            if asked.proxy is not None and asked.interpreters and (held_against or spec.latency):
                closest, vocabulary = self._closest_to_servers(), self.runner.config.vocabulary
                server = held.enter_context(runtimes.opened(asked.artifact, vocabulary, closest))
            if held_against is not None:
                moved, described = self._quality(held_against, server), held_against.baseline.description
            if spec.latency is not None:
                whole = self._whole(None if held_against is None else held_against.baseline)
                described = described or (None if whole is None else whole.description)
                timed = self._latency(spec.latency, whole, server)
            if asked.interpreters:
                self.progress.stage("Run in other runtimes")
                ran = runtimes.run(
                    *(asked.artifact, self.runner, asked.windows, asked.interpreters),
                    open_=server,
                    progress=self.progress.advance,
                )
                self.notes.extend(f"{run.title} failed: {run.failure}" for run in ran if run.failure is not None)
        results = () if spec.tasks is None else self._tasks(spec.tasks)
        chosen = self._adapters() if spec.quality is not None and spec.quality.adapter_tokens else ()
        chats = None if spec.behaviour is None else self._behaviour(spec.behaviour)
        return Evidence(moved, timed, described, None, tuple(self.notes), ran, results, chosen, chats)

    @property
    def _recipe_quality(self) -> RecipeQuality:
        assert self.asked.spec.quality is not None
        return RecipeQuality(self.asked.spec.quality, self.runner, self.asked.windows, self.progress)

    def _quality(self, held_against: _Reference, server: Opened | None) -> Quality:
        """Compare the artifact with its reference; one for servers of others in another runtime, where there is one."""
        asked = self.asked
        assert asked.engine is not None
        logits: Callable[..., NDArray[np.float32]] = self.runner.logits
        greedy: Generate | None = None
        if asked.proxy is not None:
            backend, runtime, version = of_provider(asked.engine.config.provider), None, ""
            if server is not None:
                logits, greedy = server.logits, server.answer
                runtime, version = server.interpreter.runtime, server.title
            self.notes.append(export_proxy.note(backend.name, self.runner.config, runtime, version))
        compared = self._recipe_quality.answers(held_against.baseline, greedy)
        if compared[1] and isinstance(held_against.baseline, StreamedBaseline):
            self.notes.append(
                "answers: the baseline runs layer by layer: behind the first difference it is shown for "
                f"{streamed_baseline.GENERATED} tokens at most"
            )
        expected = held_against.logits()
        moved = self._recipe_quality.compare(logits, expected, compared)
        if (apart := quality_metrics.answers_apart(moved)) is not None:
            self.notes.append(f"quality: {apart}")
        return moved

    def _whole(self, baseline: Baseline | StreamedBaseline | None) -> Baseline | None:
        """Take the baseline that takes turns with the artifact; None, with a note: it does not fit into memory."""
        if baseline is not None and not isinstance(baseline, StreamedBaseline):
            return baseline
        if (why := why_not_whole(self.asked.checkpoint)) is not None:
            self.notes.append(f"latency: the checkpoint is not timed beside the artifact: {why}")
            return None
        self.progress.stage("Load baseline")
        return Baseline(self.asked.checkpoint, threads=self.asked.threads)

    def _latency(self, spec: LatencySpec, baseline: Baseline | None, server: Opened | None) -> Latency:
        """Time the artifact, and its baseline where there is one."""
        asked, theirs = self.asked, None
        assert asked.engine is not None
        self.progress.stage("Measure latency")
        if baseline is not None:
            theirs = TimedModel(baseline.description, baseline.generate, baseline.load_seconds)
        runs = RecipeLatency(asked.artifact, self.runner, spec, asked.target, asked.read, asked.threads, asked.ranks)
        if asked.proxy is None:
            described = engine_description(self.runner, asked.threads)
            ours = TimedModel.of_runner(self.runner, description=described, load_seconds=self.load_seconds)
        else:
            assert server is not None, "planning refuses latency of an artifact for servers without one"
            ours = TimedModel(server.title, server.generate, server.loaded_s(), by_its_clock=True)
        timed = runs.run(ours, theirs, asked.engine.size_bytes, self.progress.advance)
        self.notes.extend(runs.notes)
        return timed

    def _closest_to_servers(self) -> Interpreter:
        """Of what runs the artifact for servers here, return the server itself, else what emulates it."""
        assert self.asked.engine is not None
        record = of_provider(self.asked.engine.config.provider).export_format
        assert record is not None
        return min(self.asked.interpreters, key=lambda each: record.runtimes.index(each.runtime))

    def _tasks(self, names: Sequence[str]) -> tuple[TaskResult, ...]:
        asked = self.asked
        engine = TaskEngine(self.runner, engine_description(self.runner, asked.threads), asked.threads)
        request = TaskRequest(tuple(names))
        results, skipped = tasks.run(request, engine, asked.checkpoint, self.progress, cache=asked.answers)
        self.notes.extend(skipped)
        return results

    def _behaviour(self, spec: BehaviourSpec) -> BehaviourResult | None:
        asked = self.asked
        documents = spec.documents()
        engine = TaskEngine(self.runner, engine_description(self.runner, asked.threads), asked.threads)
        result, notes = behaviour.run(documents, engine, asked.checkpoint, self.progress, cache=asked.answers)
        self.notes.extend(notes)
        return result

    def _adapters(self) -> tuple[AdapterQuality, ...]:
        """Compare the artifact with each adapter chosen with the checkpoint that has it merged, one at a time."""
        asked, found = self.asked, []
        assert asked.spec.quality is not None
        for adapter in asked.adapters:
            self.progress.stage(f"Measure adapter {adapter.name}")
            merged = reference.with_adapter(asked.spec.quality, asked.checkpoint, adapter)
            found.append(self._recipe_quality.of_adapter(adapter.name, open_baseline(merged, threads=asked.threads)))
        return tuple(found)

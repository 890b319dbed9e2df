"""Recipe in, published artifact out. `build` is the picture of the whole; each stage lives elsewhere.

This module alone owns verification after each pass, timing, and the record of what happened.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import artifact, calibration, passes, targets
from llmforge.artifact import Hashing
from llmforge.backends import BACKENDS, engines, pending, plugin_of
from llmforge.backends.engines import BuildRequest, BuiltEngine, Prove
from llmforge.backends.onnxruntime import interop
from llmforge.backends.onnxruntime.builder import write_tokenizer
from llmforge.base import plugins, spans
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint, documents
from llmforge.checkpoint.adapters import Merge
from llmforge.compile import (
    attribution,
    dry_run,
    evidence,
    export_proxy,
    lock,
    preflight,
    provenance,
    publishing,
    reuse,
    texts,
)
from llmforge.compile import unused_modules as left_out
from llmforge.compile.evidence import Clock, Evidence, Measurement
from llmforge.compile.frontend import Frontend
from llmforge.compile.lock import Lock, Stages
from llmforge.compile.lossy_parts import LossyStep
from llmforge.compile.proofs import Proof, Proofs
from llmforge.compile.publishing import BuildResult
from llmforge.compile.read_ahead import ReadAhead
from llmforge.compile.reuse import Chain, Reuse, Step
from llmforge.compile.tasks import BuildCacheAnswers
from llmforge.gates import records, release
from llmforge.ir import dialect, graph, interface, longest_text
from llmforge.ir.scratch import Scratch
from llmforge.measure import footprint
from llmforge.measure.footprint import BytesRead
from llmforge.measure.runtimes import Interpreter
from llmforge.metrics.agreement import RuntimeName
from llmforge.parallel.split import split
from llmforge.planning import source
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.recipe import EngineSpec, Recipe
from llmforge.report import render, view
from llmforge.rewrite import options, pass_base, pruning
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass
from llmforge.runtime.config import physical_cores
from llmforge.targets import Target
from llmforge.trace.export import kept_graph
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.triton import repository, sources, vllm
from llmforge.verification import adapter_proof, engine_parts
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot
from llmforge.verification.trace_verifier import verify_trace
from llmforge.verification.verifier import Verifier

T = TypeVar("T")


def build(
    recipe: Recipe,
    out: Path,
    progress: Progress | None = None,
    cache: Callable[[], Cache] | None = None,
    *,
    measure: bool = True,
    pythons: Mapping[RuntimeName, Path] | None = None,
    frontend: Frontend | None = None,
    ahead: ReadAhead | None = None,
) -> BuildResult:
    """Build what `recipe` describes and publish it as `out/<name>/<version>`; without `measure` nothing is measured.

    What an earlier build, or one that was killed, left in the `cache` is not computed again; None: nothing is reused.
    Other runtimes that the recipe names are imported by the Pythons of `pythons`, else by this one.
    A `frontend` that was started already is used where this build needs one, and ended, and a walk `ahead` that was
    begun over the recipe's checkpoint.
    A failed gate does not stop publication: the artifact says so itself, and so does `gates.verdict`.

    Raises:
        ForgeError: anything that keeps the artifact from being built; nothing that looks finished is left behind.
    """
    progress = clock = Clock(progress or Silent())
    progress.stage("Check recipe, target and data")
    steps, target = recipe.instantiate(passes.ALL), targets.find(recipe.target)
    check_host(recipe, target)
    preflight.check(recipe)
    preflight.check_source(recipe, steps)
    preflight.check_room(recipe, out)
    others = evidence.interpreters(recipe, target, pythons or {}, recipe.validation.runtimes) if measure else ()
    # What is calibrated or measured is computed by torch in this process, which then imports it anyway.
    apart = not Frontend.is_loaded() and Frontend.serves(recipe, steps, measure=measure)
    with (
        artifact.staging(out, recipe.name) as staging,
        frontend or Frontend() as frontend,
        Hashing(staging) as hashing,
    ):
        if not apart:
            frontend.end()
        with (
            reuse.opened(cache, staging, progress, frontend if apart else None) as kept,
            ahead or ReadAhead() as ahead,
            Proofs() as proofs,
        ):
            facts, engine, found, locked = make(
                recipe,
                steps,
                target,
                kept,
                ahead,
                proofs,
                hashing,
                staging,
                out,
                progress,
                measure=measure,
                others=others,
            )
            reused = kept.record(facts["passes"])
        frontend.end()
        clock.beside.append(frontend.peak_bytes)
        facts["notes"] += tuple(kept.cache.notes)
        return publishing.publish(
            staging,
            facts,
            engine,
            found,
            target=target,
            lock=locked,
            hashing=hashing,
            clock=clock,
            progress=progress,
            reused=reused,
        )


def make(
    recipe: Recipe,
    steps: Sequence[Pass],
    target: Target,
    kept: Reuse,
    ahead: ReadAhead,
    proofs: Proofs,
    hashing: Hashing,
    staging: Path,
    out: Path,
    progress: Progress,
    *,
    measure: bool,
    others: Sequence[Interpreter] = (),
) -> tuple[dict[str, Any], BuiltEngine | None, Evidence, Lock]:
    """Write the engine into `staging` and measure it.

    Return the facts for its report, the engine, the evidence, and the lock of its inputs.
    """
    if is_starting := kept.frontend is not None and kept.frontend.is_starting:
        prepare(steps, kept)
    checkpoint = ahead.begin(recipe.fetched(), recipe.merged)
    # As if they were merged: what is of another base is refused before anything is read.
    apart = Merge.of(recipe.apart, checkpoint.tensors, checkpoint.path).adapters
    kept.configure(checkpoint, progress)
    threads = recipe.engine.threads or physical_cores()
    model = kept.trace(checkpoint, progress)
    stages = Stages()
    stages.graph(lock.TRACE, model)
    progress.stage("Check passes")
    demands = [pruning.bound(demand, model) for step in steps for demand in step.demands()]
    calibrated = calibration.plan(checkpoint, demands, dialect.caches(model)) if demands else {}
    dry_run.run(
        model,
        steps,
        target=target,
        spec=placed(recipe, target)[0],
        checkpoint=checkpoint,
        calibrated=calibrated,
        adapters=apart,
    )
    notes = [*(checkpoint.merge.notes if checkpoint.merge else ()), *check_context(recipe, checkpoint, model)]
    notes += [*filter(None, [left_out.note(checkpoint, model)]), *source_notes(checkpoint, steps)]
    progress.stage("Read checkpoint")
    if not is_starting:
        prepare(steps, kept)
    ahead.finish(progress)
    traced, multiply_adds = model.clone(), footprint.multiply_adds(model)
    traced.meta.update(model.meta)
    prove = partial(prove_trace, checkpoint, traced, threads, kept.frontend)
    of_trace = kept.trace_proof(checkpoint, traced, progress, proofs, prove)
    if demands:  # torch computes in one thread at a time
        proofs.finish(progress)
    statistics, seen, calibration_key = calibrate(recipe, checkpoint, model, demands, kept, progress)
    stages.statistics(statistics)
    if statistics is not None:
        notes += statistics.notes
    windows = texts.evaluation_windows(recipe, checkpoint)
    lossy = any(step.numerics is Numerics.LOSSY for step in steps)
    chosen = [window.ids for window in texts.budget_windows(windows, recipe, checkpoint)] if lossy else []
    promised = Promises.of(checkpoint, recipe.engine.max_context, recipe.engine.max_batch)
    verification = Verification(out / recipe.name / ".failed", promised, chosen, threads, proofs)
    of_passes = coverage(model)
    chain = kept.chain(checkpoint, calibration_key, promised, chosen, apart)
    of_adapters: list[Proof[str]] = []
    lossy_steps: list[LossyStep] = []
    done: list[tuple[partial[records.PassRecord], Proof[records.VerificationRecord]]] = []
    scratch = Scratch(staging.parent)
    with proofs.blamed():
        for step in steps:
            # A pass sees what it demands: what others measure is not part of its key.
            wanted = statistics if step.demands() else None
            stored = dry_run.stored_codes(checkpoint)
            context = Context(target, wanted, scratch, stored, apart)
            before = model.clone() if recipe.validation.attribution or apart else model
            record, proof, noted = transform(step, model, context, chain, verification, progress)
            done.append((record, proof))
            if _takes_adapters(model) and not _takes_adapters(before):
                after, vocabulary = model.clone(), checkpoint.geometry.vocabulary
                prove_adapters = partial(
                    adapter_proof.prove, before, after, apart, vocabulary=vocabulary, threads=threads
                )
                of_adapters.append(proofs.begin(nullcontext(), prove_adapters, in_turn=True))
            stages.graph(step.name, model)
            of_passes += noted
            if recipe.validation.attribution and record.keywords["rewritten"] and step.numerics is Numerics.LOSSY:
                lossy_steps.append(LossyStep(len(done) - 1, step, before, model.clone(), context))
        read = replace(footprint.count(model), multiply_adds=multiply_adds)
        outside = engines.outside(recipe.engine.backend, target)

        def prove_engine(run: Callable[[], None], about: Mapping[str, str]) -> None:
            """Load and run the engine, whose files are there, beside the rest of the build."""
            files = sorted((staging / "engine").iterdir())
            for file in files:
                hashing.begin(file)

            def proof() -> None:
                kept.engine_proof({file.name: hashing.sha256(file) for file in files}, about, run, outside)

            proofs.begin(nullcontext(), proof)

        engine, said = build_engine(recipe, checkpoint, target, model, traced, read, staging, progress, prove_engine)
        hashing.begin_content()
    proofs.finish(progress)
    notes += of_passes
    found = Evidence(None, None, None, evidence.NOT_ASKED)
    stand_in = None
    if measure and recipe.validation.quality is not None and BACKENDS[recipe.engine.backend].export_format is not None:
        stand_in = staging / "stand-in"
        progress.stage("Build stand-in")
        export_proxy.stand_in(model, recipe.engine, checkpoint, stand_in, progress)
    if measure:
        found = evidence.measure(
            Measurement(
                staging,
                engine,
                read,
                spec=recipe.validation,
                target=target,
                checkpoint=checkpoint,
                windows=windows,
                threads=threads,
                ranks=engines.devices(target, recipe.engine),
                keep=lambda original, baseline: kept.baseline(original, windows, threads, baseline, progress),
                interpreters=others,
                answers=BuildCacheAnswers(kept),
                proxy=stand_in,
                adapters=recipe.apart,
            ),
            progress,
        )
    if stand_in is not None:
        shutil.rmtree(stand_in)
    attributed = None
    if measure and lossy_steps:
        attributed = attribution.measure(
            traced,
            lossy_steps,
            texts.of_documents(recipe, checkpoint, windows),
            progress,
            memory=attribution.memory_of(
                target, found.latency, checkpoint.geometry.layers, engines.devices(target, recipe.engine)
            ),
            context=max(len(window.ids) for window in windows),
            threads=threads,
            vocabulary=checkpoint.geometry.vocabulary,
        )
    if recipe.validation.is_empty:
        said = (*said, "nothing was measured: the recipe asks for no validation")
    if release.is_relative(recipe.gates):
        said = (*said, "limits against an earlier artifact are decided by `llmforge gate`, not by this build")
    resolved, foreign = recipe.resolved(steps), lock.of_plugins(recipe.plugins(steps), kept.code)
    notes += [f"plug-in {each.package} {each.version} took part: {', '.join(each.parts)}" for each in foreign]
    facts = {
        "name": recipe.name,
        "checkpoint": checkpoint_record(checkpoint),
        "target": records.TargetRecord(name=target.name, title=target.title, kind=target.kind),
        "passes": tuple(record(verification=proof.result()) for record, proof in done),
        "calibration": seen,
        "attribution": attributed,
        "proven": (of_trace.result(), *(proof.result() for proof in of_adapters)),
        "notes": (*notes, *said, *found.notes),
        "recipe": resolved,
        "plugins": foreign,
    }
    locked = lock.gather(recipe, resolved, checkpoint, target.known_as, stages, foreign)
    return facts, engine, found, locked


def _takes_adapters(model: ir.Model) -> bool:
    return any(value.name == interface.ADAPTER_IDS for value in model.graph.inputs)


def prepare(steps: Sequence[Pass], kept: Reuse) -> None:
    """Do what a build will want anyway while another process imports torch, or a thread hashes the checkpoint."""
    kept.read_code(steps)
    sources.shipped()
    render.prepare()
    provenance.prepare()


def prove_trace(checkpoint: Checkpoint, traced: ir.Model, threads: int, frontend: Frontend | None) -> str:
    """Hold the graph `traced` to transformers, in the process that has it, and return a note of what was found."""
    if frontend is None:
        return verify_trace(checkpoint, traced, threads=threads).note()
    folder, adapters = checkpoint.opened_from
    return frontend.prove(folder, kept_graph.dump(traced), threads, adapters)


def check_host(recipe: Recipe, target: Target) -> None:
    """Refuse what no engine is built for, and what this machine does not build unless that is deferred."""
    builder = engines.for_target(recipe.engine.backend, target)
    plugin = plugin_of(recipe.engine.backend)
    if plugin is not None and recipe.engine.deferred:
        raise UnsupportedError(
            f"{plugin}: an engine of a plug-in cannot be deferred",
            hint="remove `deferred` from the recipe, and --defer",
        )
    if not recipe.engine.deferred:
        with nullcontext() if plugin is None else plugins.blamed(plugin):
            builder.require_host(target, recipe.engine)
    elif target.kind == "cpu" or BACKENDS[recipe.engine.backend].export_format is not None:
        raise UnsupportedError(
            f"{recipe.engine.backend}: the engine is written here; it cannot be deferred"
            if target.kind != "cpu"
            else f"target {target.name} is a CPU; its engine cannot be deferred",
            hint="remove `deferred` from the recipe, and --defer",
        )


def check_context(recipe: Recipe, checkpoint: Checkpoint, model: ir.Model) -> list[str]:
    """Refuse a longer context than a model is made for whose own attention was traced, and note that it was.

    Nobody knows what its own code does there. Note, too, that a graph is right for texts of the context alone.
    """
    limit = longest_text.recorded(model)
    notes = [] if limit is None else [f"texts of up to {limit.tokens} tokens are compiled: {limit.reason}"]
    reason = model.metadata_props.get(interface.FALLBACK)
    if reason is None:
        return notes
    wanted, made_for = recipe.engine.max_context, checkpoint.geometry.context
    if made_for is not None and wanted > made_for:
        raise UnsupportedError(
            f"engine.max_context is {wanted}; the model is made for {made_for} tokens, and its own attention was "
            f"traced, because: {reason}",
            hint=f"set engine.max_context to at most {made_for}",
        )
    return [*notes, f"attention was traced from the model's own code and is left unchanged by passes: {reason}"]


def source_notes(checkpoint: Checkpoint, steps: Sequence[Pass]) -> list[str]:
    """Note what becomes of a checkpoint that comes quantized, and what of it is not taken."""
    said = source.note(checkpoint.settings, checkpoint.path, steps)
    return [*([] if said is None else [said]), *checkpoint.notes]


@dataclass(eq=False)
class Verification:
    """Proves passes beside the build, one after the other, by a verifier that follows the graph from pass to pass.

    It is made when the first pass comes that is to be proven, and again behind one that is not.
    """

    folder: Path
    promises: Promises
    texts: Sequence[NDArray[np.int64]]
    threads: int
    proofs: Proofs
    _last: GraphSnapshot | None = None  # the graph as it is now; None: behind a pass that was not proven
    _verifier: Callable[[], Verifier] | None = None  # makes it when a proof first asks
    _behind: Proof[Any] | None = None  # what the next proof comes behind
    _is_first: bool = True  # whether the verifier has measured no lossy pass

    def before(self, step: Pass, model: ir.Model) -> GraphSnapshot:
        """Record `model`, on which `step` is to run, and begin with what its proof needs of it."""
        if self._last is None:
            self._last = GraphSnapshot.of(model)
            self._verifier, self._is_first = self._once(self._last), True
        self._run_beside(step, self._last)
        return self._last

    def skip(self) -> None:
        """Forget the graph before a pass whose proof is reused."""
        self._last = None

    def begin(
        self, step: Pass, before: GraphSnapshot, model: ir.Model, changes: Changes, kept: Step, held: ExitStack
    ) -> Proof[records.VerificationRecord]:
        """Begin the proof of a pass that has run on the graph `before`; `held` is left at its end."""
        overwritten, after = before.overwritten(), GraphSnapshot.of(model)
        self._last = after
        self._run_beside(step, after)
        self._is_first &= step.numerics is not Numerics.LOSSY

        def prove(verifier: Verifier) -> records.VerificationRecord:
            found = verifier.prove(step, after, changes, overwritten)
            kept.keep_proof(found, after.model, changes)
            return records.VerificationRecord.model_validate(found, from_attributes=True)

        return self._begin(held, prove)

    def _run_beside(self, step: Pass, snapshot: GraphSnapshot) -> None:
        """Begin to run a graph before or after the first lossy pass; later ones have a graph that was measured."""
        verifier = self._verifier
        assert verifier is not None, "no graph was recorded"
        if step.numerics is Numerics.LOSSY and self._is_first:
            self.proofs.beside(lambda: verifier().prepare(snapshot.model))

    def _begin(self, held: AbstractContextManager[object], prove: Callable[[Verifier], T]) -> Proof[T]:
        """Begin behind the last one; where that failed, this one does not run, and fails alike."""
        behind, verifier = self._behind, self._verifier
        assert verifier is not None, "no graph was recorded"

        def run() -> T:
            if behind is not None:
                behind.result()
            return prove(verifier())

        proof = self.proofs.begin(held, run, in_turn=True)
        self._behind = proof
        return proof

    def _once(self, before: GraphSnapshot) -> Callable[[], Verifier]:
        """Return what makes a verifier the first time, in whatever thread."""
        turn = threading.Lock()

        @cache
        def made() -> Verifier:
            return Verifier(before, promises=self.promises, folder=self.folder, texts=self.texts, threads=self.threads)

        def locked() -> Verifier:
            with turn:
                return made()

        return locked


def calibrate(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model: ir.Model,
    demands: Sequence[Demand],
    kept: Reuse,
    progress: Progress,
) -> tuple[Statistics | None, records.CalibrationRecord | None, str]:
    """Collect what the passes demand, what was read for the report, and the key of it; nothing is where none demands.

    Layers that were kept are done already.
    """
    spec = recipe.calibration
    if not demands or spec is None:  # `Recipe.instantiate` refuses demands without calibration
        return None, None, ""
    progress.stage("Calibrate")
    read, caches = documents.read_documents(spec.data), dialect.caches(model)
    windows = texts.calibration_windows(spec, read, checkpoint)
    store = calibration.Store(kept.cache, kept.layers, kept.installed())
    statistics = calibration.calibrate(
        checkpoint,
        windows,
        demands,
        threads=spec.threads,
        caches=caches,
        store=store,
        progress=progress,
    )
    record = records.CalibrationRecord(
        data=spec.data.name,
        digest=documents.digest(spec.data),
        documents=len(read),
        samples=statistics.samples,
        tokens=statistics.tokens,
    )
    return statistics, record, calibration.key(checkpoint, windows, demands, caches, spec.threads, store.tools)


def coverage(model: ir.Model) -> list[str]:
    """Note what the proofs of a model that is too large to run whole rest on."""
    if graph.weight_bytes(model) <= WHOLE_BYTES:
        return []
    return [
        f"passes: the model is too large to run whole ({graph.weight_bytes(model) / 1e9:.1f} GB of fp32 weights): "
        "budgets of lossy passes are measured layer by layer, on few tokens"
    ]


def transform(
    step: Pass, model: ir.Model, context: Context, chain: Chain, verification: Verification, progress: Progress
) -> tuple[partial[records.PassRecord], Proof[records.VerificationRecord], list[str]]:
    """Run one pass over `model`, and begin to hold it to what it declares.

    Return its record, which lacks the proof, the proof, and what must not be missed. The proof is reused where an
    earlier build made it, for a pass that does the same to the same graph.
    """
    kept = chain.step(step, model)
    with ExitStack() as held:
        entry = held.enter_context(kept.computing())
        # For the verifier; of a pass with a kept proof, should it do something else than it did.
        before = verification.before(step, model) if entry is None else model.clone()
        progress.stage(f"Pass {step.name}" if entry is None else f"Pass {step.name}: reused")
        there = {name: value.const_value for name, value in model.graph.initializers.items()}
        nodes, weight_bytes, began = graph.nodes(model), graph.weight_bytes(model), time.perf_counter()
        with spans.span("rewrite"):
            changes = pass_base.run(step, model, context)
        seconds = time.perf_counter() - began
        found = kept.reused(entry, model, changes)
        kept.keep_tensors(model, there, context.scratch)
        if found is not None:
            verification.skip()
            proof = Proof(found)
        else:
            if not isinstance(before, GraphSnapshot):
                verification.skip()
                before = verification.before(step, before)
                progress.stage(f"Pass {step.name}")
            proof = verification.begin(step, before, model, changes, kept, held.pop_all())
    record = partial(
        records.PassRecord,
        name=step.name,
        options=options.values(step),
        numerics=step.numerics,
        rewritten=tuple(changes.rewritten),
        skipped=tuple(changes.skipped),
        nodes_before=nodes,
        nodes_after=graph.nodes(model),
        weight_bytes_before=weight_bytes,
        weight_bytes_after=graph.weight_bytes(model),
        seconds=seconds,
        reused=found is not None,
    )
    return record, proof, changes.notes


def build_engine(
    recipe: Recipe,
    checkpoint: Checkpoint,
    target: Target,
    model: ir.Model,
    traced: ir.Model,
    read: BytesRead,
    staging: Path,
    progress: Progress,
    prove: Prove,
) -> tuple[BuiltEngine | None, tuple[str, ...]]:
    """Lower `model` and write the engine, the tokenizer and the model repository, and what there is to say of them.

    The engine is None where it is deferred: what a decode step of it reads is written down for the build that ends it.
    """
    progress.stage("Build engine")
    builder, plugin = engines.for_target(recipe.engine.backend, target), plugin_of(recipe.engine.backend)
    spec, notes = placed(recipe, target)
    whole: Mapping[str, str] = {}
    graphs: Sequence[ir.Model] = (model,)
    if recipe.engine.tensor_parallel > 1:
        divided = split(model, recipe.engine.tensor_parallel)
        graphs, whole = divided.ranks, divided.whole
    with nullcontext() if plugin is None else plugins.blamed(plugin):
        lowerings = [builder.lower(each, target, spec) for each in graphs]
    lowered, changes = lowerings[0]  # the graphs of other ranks differ in shapes alone
    grouped = *view.grouped(changes.rewritten).items(), *view.grouped(changes.skipped).items()
    notes += [f"lowering: {_named(nodes)}: {what}" for what, nodes in grouped]
    notes += [f"lowering: {note}" for note in changes.notes]
    if len(graphs) > 1:
        notes.append(f"split: {len(graphs)} ranks, each with a graph and its part of the weights")
    if whole:
        name, reason = next(iter(whole.items()))
        notes.append(f"split: whole on every rank: {_named(list(whole))}; {name}: {reason}")
    write_tokenizer(checkpoint, staging / "tokenizer")
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    others = BACKENDS[recipe.engine.backend].export_format
    exported = None if others is None else export_proxy.exported(lowered, traced, checkpoint)
    request = BuildRequest(
        lowered, staging / "engine", spec, target, *ends, progress, exported, engine_parts.run, prove
    )
    if len(graphs) > 1:
        request = replace(request, ranks=tuple(each for each, _ in lowerings))
    if recipe.engine.deferred:
        pending.write(
            request,
            weight_bytes_per_token=read.weights,
            kv_bytes_per_token=read.kv,
            multiply_adds_per_token=read.multiply_adds,
        )
        return None, tuple(notes)
    with nullcontext() if plugin is None else plugins.blamed(plugin):
        engine = builder.build(request)
    if plugin is not None:
        engines.check_foreign(engine, plugin, target)
    notes += [*engine.notes, *(f"interface: {note}" for note in interop.write(lowered, engine, checkpoint))]
    made_of = {"checkpoint": f"{checkpoint.name} {checkpoint.digest}"}
    served = repository.TritonModel(recipe.name, target.kind, recipe.serving, engine.config, made_of)
    if others is None:
        repository.write(served, staging / repository.FOLDER / recipe.name)
    else:
        vllm.write(served, staging)
    return engine, tuple(notes)


def placed(recipe: Recipe, target: Target) -> tuple[EngineSpec, list[str]]:
    """Return the engine's section, with slots where it might have blocks and serving needs slots; and a note of it."""
    spec, reason = recipe.engine, recipe.slots_reason
    provider = target.require_engine(spec.backend)
    if spec.kv_cache or reason is None or provider.slots_reason(target.sm, spec.tensor_parallel):
        return spec, []
    return spec.model_copy(update={"kv_cache": "slots"}), [f"lowering: KV cache in slots, not in blocks: {reason}"]


def checkpoint_record(checkpoint: Checkpoint) -> records.CheckpointRecord:
    """Say in the report what the checkpoint is."""
    return records.CheckpointRecord(
        name=checkpoint.name,
        digest=checkpoint.digest,
        architecture=checkpoint.architecture,
        dtypes=tuple(sorted({entry.dtype.name for entry in checkpoint.tensors.values()})),
        parameters=checkpoint.parameters,
        size_bytes=checkpoint.size_bytes,
    )


def _named(nodes: Sequence[str]) -> str:
    """Name the first of several nodes and count the others."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"

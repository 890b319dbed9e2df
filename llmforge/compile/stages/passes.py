"""The stage of the passes: calibration, then each pass over the graph, with its record and its proof."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import onnx_ir as ir

from llmforge import calibration
from llmforge.base import spans
from llmforge.base.progress import Progress
from llmforge.checkpoint import documents
from llmforge.compile import dry_run, encoder_calibration, encoder_texts, lock, retreats
from llmforge.compile.answered import answering
from llmforge.compile.cached_passes import PassChain
from llmforge.compile.lossy_parts import LossyStep
from llmforge.compile.overlap import PendingProof
from llmforge.compile.pass_prover import PassProver
from llmforge.compile.reuse import Reuse, hash_of_texts
from llmforge.compile.state import CalibrationResult, CompileState, PassRun
from llmforge.compile.texts import BuildTexts
from llmforge.gates import records
from llmforge.ir import dialect, graph, interface
from llmforge.ir.scratch import Scratch
from llmforge.quantization.statistics import Demand
from llmforge.rewrite import options, pass_base, pruning
from llmforge.rewrite.pass_base import Context, Numerics, Pass
from llmforge.runtime.config import physical_cores
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.verification import adapter_proof
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot

if TYPE_CHECKING:  # it imports torch
    from llmforge.calibration.carriers import Carriers


def run_passes(state: CompileState) -> None:
    """Collect what the passes demand, and run them one after the other over `state.model`; their proofs have begun.

    Where one exceeds its budget that may retreat, all run again, with more bits for its worst layers.
    """
    if state.demands:  # torch computes in one thread at a time
        state.overlap.proofs.finish(state.clock)
    state.texts = BuildTexts(state.recipe, state.checkpoint, state.demands, answering(state.reuse), state.clock)
    state.windows = state.texts.evaluation
    kept_notes, kept_digests = [*state.notes], [*state.digests.done]
    while (changed := _run_all(state)) is not None:
        number = len(state.runs) - 1
        steps = [changed if index == number else step for index, step in enumerate(state.steps)]
        state.checked = replace(state.checked, steps=steps)
        state.demands = [pruning.bound(demand, state.traced) for step in steps for demand in step.demands()]
        state.model = state.traced.clone()
        state.model.meta.update(state.traced.meta)
        state.notes[:], state.digests.done[:] = kept_notes, kept_digests
        state.runs, state.adapter_proofs, state.lossy_steps = [], [], []
    state.plugins = lock.of_plugins(state.recipe.plugins(state.steps), state.reuse.code)
    state.notes += [
        *(line for run in state.runs for line in run.proven().retreat_lines),
        *(f"plug-in {each.package} {each.version} took part: {', '.join(each.parts)}" for each in state.plugins),
    ]


def _run_all(state: CompileState) -> Pass | None:
    """Calibrate and run the passes; return the last one that ran with other options, where it must retreat."""
    recipe, checkpoint, proofs = state.recipe, state.checkpoint, state.overlap.proofs
    state.calibration = calibrate(
        state.texts, state.model, state.demands, state.reuse, state.clock, state.checked.carriers
    )
    statistics = state.calibration.statistics
    state.digests.statistics(statistics)
    state.notes += statistics.notes if statistics is not None else ()
    state.notes += state.texts.notes
    lossy = any(step.numerics is Numerics.LOSSY for step in state.steps)
    encoder = None
    if checkpoint.encoding is not None:
        read, spec = encoder_texts.NONE, recipe.validation.retrieval
        if lossy:
            read = encoder_texts.of_budget(checkpoint, spec, recipe.engine.max_context)
        encoder, chosen = (checkpoint.encoding, read), read.ids
    else:
        chosen = [window.ids for window in state.texts.budget_windows()] if lossy else []
    promised = Promises.of(checkpoint, recipe.engine.max_context, recipe.engine.max_batch)
    threads = recipe.engine.threads or physical_cores()
    prover = PassProver(state.checked.out / recipe.name / ".failed", promised, chosen, threads, proofs, encoder)
    chain = PassChain.of(state.reuse, checkpoint, state.calibration.key, promised, chosen, threads, state.adapters)
    state.notes += _coverage(state.model)
    scratch = Scratch(state.staging.parent)
    with proofs.blamed():
        for step in state.steps:
            # A pass sees what it demands: what others measure is not part of its key.
            wanted = statistics if step.demands() else None
            context = Context(state.target, wanted, scratch, dry_run.stored_codes(checkpoint), state.adapters)
            _run_pass(state, step, context, chain, prover)
            if (changed := _retreated(state, step)) is not None:
                return changed
    return None


def _retreated(state: CompileState, step: Pass) -> Pass | None:
    """Wait for the proof of a pass that may retreat, and return what it becomes; None: it stays as it is."""
    number = len(state.runs) - 1
    if step.may_retreat is None or not state.lossy_steps or state.lossy_steps[-1].number != number:
        return None
    state.overlap.proofs.finish(state.clock)
    return retreats.retreat(state, state.runs[-1].proven(), state.lossy_steps[-1])


def _run_pass(state: CompileState, step: Pass, context: Context, chain: PassChain, prover: PassProver) -> None:
    """Run one pass, and keep what is needed of the graph before it."""
    model, is_lossy, number = state.model, step.numerics is Numerics.LOSSY, len(state.runs)
    before = model.clone() if is_lossy or state.adapters else model
    run, notes = transform(step, model, context, chain, prover, state.clock)
    run = replace(run, record=partial(run.record, retreats=state.retreats.get(number, ())))
    if _takes_adapters(model) and not _takes_adapters(before):
        state.adapter_proofs.append(_begin_adapter_proof(state, before, model.clone()))
    state.digests.graph(step.name, model)
    state.notes += notes
    if is_lossy and run.record.keywords["rewritten"]:
        state.lossy_steps.append(LossyStep(number, step, before, model.clone(), context))
    state.runs.append(run)


def transform(
    step: Pass, model: ir.Model, context: Context, chain: PassChain, prover: PassProver, progress: Progress
) -> tuple[PassRun, list[str]]:
    """Run one pass over `model`, and begin to hold it to what it declares; return what must not be missed, too.

    The proof is reused where an earlier build made it, for a pass that does the same to the same graph.
    """
    kept = chain.step(step, model)
    with ExitStack() as held:
        entry = held.enter_context(kept.computing())
        # For the verifier; of a pass with a kept proof, should it do something else than it did.
        before = prover.before(step, model) if entry is None else model.clone()
        progress.stage(f"Pass {step.name}" if entry is None else f"Pass {step.name}: reused")
        there = {name: value.const_value for name, value in model.graph.initializers.items()}
        nodes, weight_bytes, began = graph.nodes(model), graph.weight_bytes(model), time.perf_counter()
        with spans.span("rewrite"):
            changes = pass_base.run(step, model, context)
        seconds = time.perf_counter() - began
        found = kept.reused(entry, model, changes)
        kept.keep_tensors(model, there, context.scratch)
        if found is not None:
            prover.skip()
            proof = PendingProof(found)
        else:
            if not isinstance(before, GraphSnapshot):
                prover.skip()
                before = prover.before(step, before)
                progress.stage(f"Pass {step.name}")
            proof = prover.begin(step, before, model, changes, kept, held.pop_all())
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
    return PassRun(record, proof), changes.notes


def calibrate(
    texts: BuildTexts,
    model: ir.Model,
    demands: Sequence[Demand],
    kept: Reuse,
    progress: Progress,
    carriers: Carriers | None = None,
) -> CalibrationResult:
    """Collect what the passes demand; layers that were kept are done already."""
    spec, checkpoint = texts.recipe.calibration, texts.checkpoint
    if not demands or spec is None:  # `Recipe.instantiate` refuses demands without calibration
        return CalibrationResult()
    if checkpoint.encoding is not None:
        return _calibrate_encoder(texts, model, demands, kept, progress)
    windows, caches = texts.calibration, dialect.caches(model)
    progress.stage("Calibrate")
    store = calibration.Store(kept.cache, kept.layers, kept.installed())
    statistics = calibration.calibrate(
        checkpoint,
        windows,
        demands,
        threads=spec.threads,
        caches=caches,
        store=store,
        progress=progress,
        carriers=carriers,
    )
    record = records.CalibrationRecord(
        data=", ".join(path.name for path in spec.data),
        digest=documents.digest_all(spec.data),
        documents=sum(map(len, texts.calibration_documents)),
        samples=statistics.samples,
        tokens=statistics.tokens,
    )
    device = "cpu" if carriers is None else carriers.device
    key = calibration.key(checkpoint, windows, demands, caches, spec.threads, store.tools, device)
    return CalibrationResult(statistics, record, key)


def _calibrate_encoder(
    texts: BuildTexts, model: ir.Model, demands: Sequence[Demand], kept: Reuse, progress: Progress
) -> CalibrationResult:
    """Collect what the passes demand of an encoder, on its graph."""
    spec, checkpoint = texts.recipe.calibration, texts.checkpoint
    assert spec is not None
    assert checkpoint.encoding is not None
    read = [document for file in texts.calibration_documents for document in file]
    chosen = encoder_texts.of_calibration(checkpoint, read, spec.samples, spec.length)
    progress.stage("Calibrate")
    statistics = encoder_calibration.calibrate(
        model, checkpoint.encoding, chosen, demands, threads=spec.threads, progress=progress
    )
    record = records.CalibrationRecord(
        data=", ".join(path.name for path in spec.data),
        digest=documents.digest_all(spec.data),
        documents=len(read),
        samples=statistics.samples,
        tokens=statistics.tokens,
    )
    parts = {"checkpoint": checkpoint.digest, "texts": hash_of_texts(chosen.ids), "threads": str(spec.threads)}
    key = kept.key("calibration", [encoder_calibration.__name__], **parts, demands=repr(sorted(map(repr, demands))))
    return CalibrationResult(statistics, record, key.digest)


def _coverage(model: ir.Model) -> list[str]:
    """Note what the proofs of a model that is too large to run whole rest on."""
    if graph.weight_bytes(model) <= WHOLE_BYTES:
        return []
    return [
        f"passes: the model is too large to run whole ({graph.weight_bytes(model) / 1e9:.1f} GB of fp32 weights): "
        "budgets of lossy passes are measured layer by layer, on few tokens"
    ]


def _takes_adapters(model: ir.Model) -> bool:
    return any(value.name == interface.ADAPTER_IDS for value in model.graph.inputs)


def _begin_adapter_proof(state: CompileState, before: ir.Model, after: ir.Model) -> PendingProof[str]:
    """Begin to hold the graph `after`, of which requests choose adapters, to the one `before`."""
    vocabulary, threads = state.checkpoint.geometry.vocabulary, state.recipe.engine.threads or physical_cores()
    prove = partial(adapter_proof.prove, before, after, state.adapters, vocabulary=vocabulary, threads=threads)
    return state.overlap.proofs.begin(nullcontext(), prove, in_turn=True)

"""The stage of the engine: the graph is lowered, and the engine lies there with all that serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from llmforge.backends import BACKENDS, engines, pending, plugin_of
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import interop
from llmforge.backends.onnxruntime.builder import write_tokenizer
from llmforge.base import plugins
from llmforge.compile import drafts, export_proxy, prefixes, written_files
from llmforge.compile.reuse import hash_of
from llmforge.compile.state import CompileState
from llmforge.ir import graph
from llmforge.measure import footprint
from llmforge.parallel.split import split
from llmforge.recipe import EngineSpec, Recipe
from llmforge.report import view
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import physical_cores
from llmforge.targets import Target
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.triton import repository, vllm
from llmforge.verification import streamed_execution, written_encoder, written_engine


def build_engine(state: CompileState) -> None:
    """Lower the graph and write the engine, the tokenizer and the model repository; all content is there at the end.

    Of an engine that is deferred, what a decode step reads is written down for the build that ends it.
    """
    recipe, backend = state.recipe, state.recipe.engine.backend
    with state.overlap.proofs.blamed():
        state.read = replace(
            footprint.count(state.model),
            multiply_adds=footprint.multiply_adds(state.traced),
            head_multiply_adds=footprint.head_multiply_adds(state.traced, state.model),
        )
        state.clock.stage("Build engine")
        lowered = _lower(state)
        state.notes += lowered.notes
        write_tokenizer(state.checkpoint, state.staging / "tokenizer")
        expected = written_files.Expected.of_checkpoint(state.checkpoint, recipe.engine)
        request = _request(state, lowered)
        if recipe.engine.deferred:
            read = state.read
            waiting, written = pending.write(
                request,
                weight_bytes_per_token=read.weights,
                kv_bytes_per_token=read.kv,
                multiply_adds_per_token=read.multiply_adds,
                head_multiply_adds=read.head_multiply_adds,
            )
            state.hashing.begin_content()
            written_files.require_written(state.staging, written, state.hashing)
            written_files.require_pending(state.staging, expected, waiting)
        else:
            builder, plugin = engines.for_target(backend, state.target), plugin_of(backend)
            with plugins.blamed(plugin):
                engine = builder.build(request)
            if plugin is not None:
                engines.check_foreign(engine, plugin, state.target)
            files, notes = interop.write(lowered.graphs[0], engine, state.checkpoint)
            state.notes += [*engine.notes, *(f"interface: {note}" for note in notes)]
            served, for_vllm = _write_repository(state, engine)
            state.engine = engine
            if state.draft is not None:
                state.draft.copy_into(state.staging)
                state.notes.append(state.draft.note)
            state.notes += prefixes.write(state.staging, recipe.serving, state.target)
            state.hashing.begin_content()
            if plugin is None:  # what is compared now is what is hashed
                expected = expected.also({f"engine/{name}": content for name, content in files.items()}).also(for_vllm)
                written_files.require_written(state.staging, engine.written, state.hashing)
                written_files.require_right(state.staging, expected, engine.config, served)
    if state.engine is not None and _runs_whole(state):
        state.engine_proof = state.overlap.proofs.begin(nullcontext(), partial(_hold_engine, state))


def placed(recipe: Recipe, target: Target) -> tuple[EngineSpec, list[str]]:
    """Return the engine's section, with slots where it might have blocks and serving needs slots; and a note of it."""
    spec, reason = recipe.engine, recipe.slots_reason
    provider = target.require_engine(spec.backend)
    if spec.kv_cache or reason is None or provider.slots_reason(target.sm, spec.tensor_parallel):
        return spec, []
    return spec.model_copy(update={"kv_cache": "slots"}), [f"lowering: KV cache in slots, not in blocks: {reason}"]


@dataclass(frozen=True, eq=False)
class _Lowered:
    """The graph of each rank, as the engine takes it, and what is to be said of them."""

    graphs: Sequence[ir.Model]
    spec: EngineSpec
    notes: Sequence[str]


def _lower(state: CompileState) -> _Lowered:
    """Divide the graph among the ranks of the engine, and lower each part."""
    backend, ranks = state.recipe.engine.backend, state.recipe.engine.tensor_parallel
    builder, plugin = engines.for_target(backend, state.target), plugin_of(backend)
    spec, notes = placed(state.recipe, state.target)
    whole: Mapping[str, str] = {}
    graphs: Sequence[ir.Model] = (state.model,)
    if ranks > 1:
        divided = split(state.model, ranks)
        graphs, whole = divided.ranks, divided.whole
    with plugins.blamed(plugin):
        lowerings = [builder.lower(each, state.target, spec) for each in graphs]
    notes += _lowering_notes(lowerings[0][1])  # the graphs of other ranks differ in shapes alone
    if len(graphs) > 1:
        notes.append(f"split: {len(graphs)} ranks, each with a graph and its part of the weights")
    if whole:
        name, reason = next(iter(whole.items()))
        notes.append(f"split: whole on every rank: {_named(list(whole))}; {name}: {reason}")
    return _Lowered([each for each, _ in lowerings], spec, notes)


def _lowering_notes(changes: Changes) -> list[str]:
    grouped = *view.grouped(changes.rewritten).items(), *view.grouped(changes.skipped).items()
    return [
        *(f"lowering: {_named(nodes)}: {what}" for what, nodes in grouped),
        *(f"lowering: {note}" for note in changes.notes),
    ]


def _request(state: CompileState, lowered: _Lowered) -> BuildRequest:
    """Say what the engine is built of; its proof runs concurrently with the rest of the build, where its files lie."""
    checkpoint, first = state.checkpoint, lowered.graphs[0]
    foreign = BACKENDS[state.recipe.engine.backend].export_format
    return BuildRequest(
        first,
        state.staging / "engine",
        lowered.spec,
        state.target,
        checkpoint.eos_token_ids,
        checkpoint.bos_token_id,
        state.clock,
        None if foreign is None else export_proxy.exported(first, state.traced, checkpoint),
        streamed_execution.run_engine,
        _begin_proof(state),
        checkpoint.encoding,
        tuple(lowered.graphs) if len(lowered.graphs) > 1 else (),
        drafts.facts_of(state.recipe.serving),
    )


def _begin_proof(state: CompileState) -> Callable[[Callable[[], None], Mapping[str, str]], None]:
    """Return what begins to load and run the engine, once all its files are there."""
    outside = engines.outside(state.recipe.engine.backend, state.target)

    def begin(run: Callable[[], None], facts: Mapping[str, str]) -> None:
        files = sorted((state.staging / "engine").iterdir())
        for file in files:
            state.hashing.begin(file)

        def prove() -> None:
            hashes = {file.name: state.hashing.sha256(file) for file in files}
            state.reuse.engine_proof(hashes, facts, run, outside)

        state.overlap.proofs.begin(nullcontext(), prove)

    return begin


def _runs_whole(state: CompileState) -> bool:
    """Say whether this machine runs the engine and the graph that was proven last as a whole, next to each other."""
    spec, is_foreign = state.recipe.engine, plugin_of(state.recipe.engine.backend) is not None
    if is_foreign or BACKENDS[spec.backend].export_format is not None or state.target.kind != "cpu":
        return False
    return spec.tensor_parallel == 1 and graph.weight_bytes(state.model) <= WHOLE_BYTES


def _hold_engine(state: CompileState) -> str:
    """Hold the engine that was written to the graph that was proven last."""
    folder = state.staging / "engine"
    files = {file.name: state.hashing.sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    threads = state.recipe.engine.threads or physical_cores()
    if state.checkpoint.encoding is not None:
        digest = hash_of(files)
        return written_encoder.require_same(state.checkpoint, state.model, folder, digest, threads=threads)
    texts = [window.ids for window in state.windows]
    return written_engine.require_same(state.model, folder, hash_of(files), texts, threads=threads)


def _write_repository(
    state: CompileState, engine: BuiltEngine
) -> tuple[repository.TritonModel | None, Mapping[str, bytes]]:
    """Write the files from which a server loads the engine.

    Returns the model that Triton runs, if it is ours, and what was written for Triton's vLLM backend, by path.
    """
    recipe, checkpoint = state.recipe, state.checkpoint
    made_of = {"checkpoint": f"{checkpoint.name} {checkpoint.digest}"}
    if engine.config.encoder is not None and engine.config.encoder.classifies:  # Triton's models embed or score
        return None, {}
    served = repository.TritonModel(recipe.name, state.target.kind, recipe.serving, engine.config, made_of)
    if BACKENDS[recipe.engine.backend].export_format is None:
        repository.write(served, state.staging / repository.FOLDER / recipe.name)
        return served, {}
    return None, vllm.write(served, state.staging)


def _named(nodes: Sequence[str]) -> str:
    """Name the first of several nodes and count the others."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"

"""The engine for TensorRT and TensorRT-RTX: `model.plan`, `runtime.json`, and `plan.json`, what it was built from.

Nothing here loads a plan, which takes a GPU: what is proven without one is that the builder accepted the graph for the
target's compute capability, and what `layers` asserts.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmforge import native
from llmforge.backends import onnx_file, signatures
from llmforge.backends.engines import BuildRequest, BuiltEngine, require_device
from llmforge.backends.tensorrt import compile_plan, layers, library, plan_cache, profiles, refusals
from llmforge.backends.tensorrt import lower as lowering
from llmforge.backends.tensorrt.library import Library
from llmforge.backends.tensorrt.plan_cache import PlanCache, PlanRecord, PlanSource, default_folder
from llmforge.backends.tensorrt.profiles import Profile
from llmforge.base.errors import UnsupportedError
from llmforge.recipe import EngineSpec
from llmforge.rewrite import topk_outputs
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import (
    DATA_FILE,
    FILE,
    MODEL_FILE,
    PLAN_FILE,
    DeviceFacts,
    PlanFacts,
    SessionOptions,
    plan_record,
    rank_plan,
)
from llmforge.runtime.device.cuda import CudaDevice
from llmforge.runtime.signature import ELEMENTS, CacheInput
from llmforge.targets import Target


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if this machine builds such an engine: the library is here, and its GPU where kernels are timed on it.

    Raises:
        EnvironmentLacks: it is not.
        UnsupportedError: the target is a CPU, or the library has no code for it.
    """
    chosen = library.of_backend(spec.backend)
    require_device(target, spec)
    chosen.require()
    if chosen.ahead_of_time:
        chosen.compute_capability(target.require_gpu().sm)


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into the ONNX that TensorRT's parser takes; the given model is left alone.

    Raises:
        UnsupportedError: the graph has what TensorRT does not take, or what it does not build for the target.
    """
    lowered, changes = lowering.lower(model, target, spec)
    refusals.check(lowered, target, library.of_backend(spec.backend).title)
    return lowered, changes


def build(request: BuildRequest) -> BuiltEngine:
    """Build the plan of a lowered model, or that of each rank, or take it from an earlier build of the same.

    The ONNX file that the builder reads lies beside the engine's folder while it does. Where the builder refuses the
    graph with heads of rows and takes it without, the plan has none, and a note says why.

    Raises:
        EnvironmentLacks: the library, or the GPU that it builds on, is not here.
        UnsupportedError: the library builds no such engine for the target.
        VerificationError: what it would build is not what the graph says.
    """
    folder, spec = request.folder, request.spec
    require_host(request.target, spec)
    chosen, sm = library.of_backend(spec.backend), request.target.require_gpu().sm
    models = list(request.ranks or (request.model,))
    for model in models:
        refusals.check(model, request.target, chosen.title)
        signatures.check_context(model, spec.max_context)
    folder.mkdir(parents=True, exist_ok=True)
    notes = []
    try:
        made = _write_plans(chosen, request, models, sm)
    except UnsupportedError as error:
        if not topk_outputs.gives_top_logits(models[0]):
            raise
        made = _write_plans(chosen, request, [topk_outputs.without_topk_outputs(model) for model in models], sm)
        notes.append(f"steps give whole rows of logits and no heads of them: {error.message}")
    records, ranges = [record for record, _, _ in made], made[0][2]
    common = signatures.config(request, SessionOptions(threads=None, optimize=False, entries={}))
    largest = max(records, key=lambda each: each.size_bytes)
    device = DeviceFacts(int(sm), largest.size_bytes + _cache_bytes(common.caches, spec))
    file = rank_plan(0) if request.ranks else PLAN_FILE
    plan = PlanFacts(chosen.backend.module, largest.source.version, file, tuple(each.facts for each in ranges))
    own_kernels = native.VERSION if request.ranks else None
    config = replace(
        common, provider=chosen.provider.name, device=device, plan=plan, ranks=len(models), kernels=own_kernels
    )
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")
    notes += [f"{chosen.title}: {warning}" for record in records for warning in record.warnings]
    notes += ["plan reused from an earlier build with the same key"] if any(reused for _, reused, _ in made) else []
    facts = _facts(chosen, records[0], plan, device)
    if request.ranks:
        facts |= {"ranks": f"{len(models)} processes, one GPU each; all else is said of the plan of the first"}
    names = [rank_plan(rank) for rank in range(len(models))] if request.ranks else [PLAN_FILE]
    hashes = {name: record.sha256 for name, record in zip(names, records, strict=True)}
    hashes |= {plan_record(name): _sha256(record.to_json()) for name, record in zip(names, records, strict=True)}
    return BuiltEngine.built(request, config, facts, tuple(dict.fromkeys(notes)), written=hashes)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_Written = tuple[PlanRecord, bool, Sequence[Profile]]


def _write_plans(chosen: Library, request: BuildRequest, models: Sequence[ir.Model], sm: str) -> list[_Written]:
    """Write the plan of each of `models`, and what it was built from; say whether it was there, and its profiles."""
    written: list[_Written] = []
    for rank, model in enumerate(models):
        name, ranges = rank_plan(rank) if request.ranks else PLAN_FILE, profiles.of(model, request.spec)
        with tempfile.TemporaryDirectory(dir=request.folder.parent, prefix=".onnx-") as scratch:
            onnx_file.write(model, Path(scratch), request.progress)
            record, reused = _plan(chosen, model, Path(scratch), request.folder / name, sm, ranges)
        (request.folder / plan_record(name)).write_text(record.to_json(), encoding="utf-8")
        written.append((record, reused, ranges))
    return written


def _plan(
    chosen: Library, model: ir.Model, onnx: Path, plan: Path, sm: str, ranges: Sequence[Profile]
) -> tuple[PlanRecord, bool]:
    """Build the plan of the ONNX file in the folder `onnx`, or reuse one; say which."""
    source = PlanSource(
        module=chosen.backend.module,
        version=chosen.version,
        sm=sm,
        device="" if chosen.ahead_of_time else CudaDevice().name,  # devices of one SM differ in what is fastest
        flags=(
            *compile_plan.FLAGS,
            "key_value_lengths",
            f"verbosity={compile_plan.VERBOSITY}",
            *compile_plan.added_flags(model),
        ),
        profiles={each.facts.name: each.shapes for each in ranges},
        onnx_sha256=plan_cache.digest(onnx / MODEL_FILE, onnx / DATA_FILE),
    )
    cache = PlanCache(default_folder() / "tensorrt")
    if (kept := cache.take(source.key, plan)) is not None:
        return kept, True
    timings = cache.timings(source)
    built = compile_plan.build(chosen, onnx / MODEL_FILE, model, plan, sm=sm, profiles=ranges, timings=timings)
    record = PlanRecord(
        format=plan_cache.FORMAT,
        key=source.key,
        source=source,
        layers=built.layers,
        warnings=built.warnings,
        sha256=plan_cache.file_digest(plan),
        size_bytes=plan.stat().st_size,
    )
    cache.keep(record, plan)
    if built.timings is not None:
        cache.keep_timings(source, built.timings)
    return record, False


def _facts(chosen: Library, record: PlanRecord, plan: PlanFacts, device: DeviceFacts) -> dict[str, str]:
    """Put a plan into words, for the report."""
    profiles_said = (f"{each.name}: {each.max_batch} x {each.max_sequence} tokens" for each in plan.profiles)
    return {
        "library": f"{chosen.title} {record.source.version}",
        "compute capability": f"SM{record.source.sm}",
        "profiles": "; ".join(profiles_said),
        "attention": f"{record.layers.get(layers.ATTENTION, 0)} in fused kernels, none that the builder took apart; "
        f"{record.layers.get(layers.WITH_LENGTHS, 0)} read the text and not the capacity",
        "layers": ", ".join(f"{count} {kind}" for kind, count in record.layers.items()),
        "memory": f"{device.memory_bytes / 1e9:.3f} GB of weights and KV cache, and activations",
        "plan": f"{record.size_bytes:,} bytes, SHA-256 {record.sha256}",
        "plan key": record.key,
        "ONNX": f"SHA-256 {record.source.onnx_sha256}",
    }


def _cache_bytes(caches: Sequence[CacheInput], spec: EngineSpec) -> int:
    """Count the bytes of the KV cache of `spec.max_batch` sequences of full length."""
    slots = spec.max_batch * spec.max_context
    return sum(slots * each.kv_heads * each.head_dim * ELEMENTS[each.dtype].size_bytes for each in caches)

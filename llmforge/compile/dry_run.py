"""Run a recipe dry on a graph whose weights nobody has read: what cannot become an engine is refused at once.

The passes run on a copy of the traced graph, with made-up results of what calibration would measure, and the result is
lowered. Nothing is proven here: passes are, when they run on the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import engines, signatures
from llmforge.backends.onnxruntime import interop
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter
from llmforge.compile import export_proxy
from llmforge.ir import graph, interface
from llmforge.ir.operators.standard import MatMul
from llmforge.parallel.split import split
from llmforge.quantization import low_rank
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import (
    Demand,
    InputRange,
    KvRange,
    LowRankDemand,
    PruningDemand,
    RecoveryDemand,
    Statistics,
    exclusion,
)
from llmforge.quantization.stored import QuantizedSource
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pass_base, pruning
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass
from llmforge.targets import Target

_READ = InputRange(np.ones((), np.float32))  # of every feature, however many there are


def run(
    model: ir.Model,
    steps: Sequence[Pass],
    *,
    target: Target,
    spec: EngineSpec,
    checkpoint: Checkpoint,
    calibrated: Mapping[str, Grid] = MappingProxyType({}),
    adapters: Sequence[Adapter] = (),
    idle: dict[str, str] | None = None,
) -> None:
    """Run `steps` over a copy of `model`, lower it, and return if an engine can be made of it.

    `calibrated` has the grids of what calibration will quantize, by the parameter; requests choose from `adapters`.
    Passes that have nothing to do are put into `idle`, each with the reason, and refused where there is no such place.

    Raises:
        UnsupportedError: a pass, the engine or the runtime that the interface is for refuses the graph; a lossy pass
            finds nothing to do; a pass needs a fact that an earlier one could not provide on this graph; the model
            cannot be divided as `spec.tensor_parallel` says, or the engine cannot run a part of it.
    """
    copy = model.clone()
    demands = [demand for step in steps for demand in step.demands()]
    context = Context(
        target, _fake_statistics(model, calibrated, demands), stored=stored_codes(checkpoint), adapters=adapters
    )
    facts: set[str] = set()
    lacking: dict[str, str] = {}  # fact → why it does not hold
    for step in steps:
        unmet, changes = sorted(step.requires - facts), None
        if unmet:
            why = f"{step.name} has no effect here: {lacking.get(unmet[0], f'no pass provides {unmet[0]}')}"
        elif changes := pass_base.run(step, copy, context):
            facts |= step.provides
            continue
        else:
            why = f"{step.name} finds nothing to change in this model: {_reason(changes)}"
            lacking |= {fact: f"{step.name} changed no node: {_reason(changes)}" for fact in step.provides}
            if step.numerics is not Numerics.LOSSY or changes.notes:  # those of a fallback
                continue
        if idle is None:
            raise UnsupportedError(why, hint=f"leave {step.name} out of the recipe")
        idle[step.name] = why
    export_proxy.check(spec, target, steps, copy, model, checkpoint)
    builder = engines.for_target(spec.backend, target)
    if spec.tensor_parallel > 1:
        copy = split(copy, spec.tensor_parallel).ranks[0]
        engines.refuse_ranks(spec.backend, spec.tensor_parallel, target)
    engines.refuse_paged(spec, target)
    lowered, _ = builder.lower(copy, target, spec)
    signatures.check_context(lowered, spec.max_context)
    interop.check(lowered, checkpoint)


def stored_codes(checkpoint: Checkpoint) -> QuantizedSource | None:
    """Return what gives passes the codes of a checkpoint; None: it has none."""
    return None if checkpoint.layout is None else checkpoint


def _reason(changes: Changes) -> str:
    """Give the first reason of those that were left alone."""
    if not changes.skipped:
        return "the graph has no node it applies to"
    first = changes.skipped[0]
    return f"{first.node}: {first.reason}"


def _fake_statistics(model: ir.Model, calibrated: Mapping[str, Grid], demands: Sequence[Demand]) -> Statistics:
    """Make up the results of a calibration: the passes ask what there is, and read no matrix before it is written."""
    read = {name: _READ for value in model.graph.initializers.values() for name in graph.sources(value)}
    unread = {
        name: QuantizedMatrix(grid, np.empty((0, 0), np.uint8), np.empty((0, 0), np.float32), None)
        for name, grid in calibrated.items()
    }
    sparse = SparseMatrix(np.empty((0, 0), np.float32), np.empty((0, 0), np.uint8))
    corrections = _corrections(model, calibrated, [each for each in demands if isinstance(each, LowRankDemand)])
    wanted = [each for each in demands if isinstance(each, PruningDemand)]
    kept, outputs = pruning.sample(model, wanted[0]) if wanted else (None, {})
    trained = unread if any(isinstance(each, RecoveryDemand) for each in demands) else {}
    made = Statistics(0, 0, unread, _kv_ranges(model), read, dict.fromkeys(read, sparse), corrections)
    return replace(made, kept=kept, pruned=outputs, recovered=trained)


def _corrections(
    model: ir.Model, calibrated: Mapping[str, Grid], demands: Sequence[LowRankDemand]
) -> dict[str, LowRankCorrection]:
    """Make up corrections of what will be quantized, where the bits that `demands` has allow a rank."""
    groups: dict[ir.Value, list[MatMul]] = {}
    for product in MatMul.all(model):
        names = graph.sources(product.w)
        if len(names) == 1 and names[0] in calibrated and demands and not exclusion(names, demands[0].exclude):
            groups.setdefault(product.x, []).append(product)
    made: dict[str, LowRankCorrection] = {}
    for products in groups.values():
        shapes = [graph.static(product.w) for product in products]
        k = shapes[0][0]
        rank = low_rank.rank_within(demands[0].bits, k, sum(n for _, n in shapes), demands[0].dtype)
        [group] = graph.sources(products[0].w)
        for product, (_, n) in zip(products, shapes, strict=True):
            a, b = (np.broadcast_to(np.float32(0), shape) for shape in ((k, rank), (rank, n)))
            made |= {name: LowRankCorrection(a, b, group, 1.0, 1.0, None) for name in graph.sources(product.w) if rank}
    return made


def _kv_ranges(model: ir.Model) -> dict[int, KvRange]:
    """Make up the ranges of every cache of keys and values."""
    peaks: dict[int, dict[str, NDArray[np.float32]]] = {}
    for value in model.graph.inputs:
        past, dims = interface.PAST.fullmatch(str(value.name)), graph.dims(value)
        if past and past[2] in ("key", "value") and dims and isinstance(dims[1], int) and isinstance(dims[3], int):
            peaks.setdefault(int(past[1]), {})[past[2]] = np.ones((dims[1], dims[3]), np.float32)
    return {layer: KvRange(**parts) for layer, parts in peaks.items() if len(parts) == 2}

"""Quantize the matrices of one decoder layer, each with what it reads behind those that are quantized already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from llmforge.calibration import experts
from llmforge.calibration.gradients import Gradients
from llmforge.calibration.layer import Additions, DecoderLayer
from llmforge.calibration.resuming import Runs
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import LayerResult
from llmforge.calibration.sums import MORE_DAMPING, InputSums, refusals
from llmforge.quantization import low_rank, sparsity
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize, rows
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import InputStatistic, LayerInputs, Method
from llmforge.quantization.methods.gptq import Curvature, target
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import LowRankDemand, SparsityDemand, WeightDemand, exclusion

HELD_OUT = 8  # of so many windows, one is held out of what the others are measured by


@dataclass(frozen=True, eq=False)
class _Unquantized:
    """What a linear reads of a window in the checkpoint, [tokens, K], and what its output is added to, [tokens, N]."""

    read: torch.Tensor
    residual: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class WeightQuantization:
    """How weights are quantized: by `demand`, with `gradients` of their outputs where its method wants them.

    `correction` asks for products of low rank.
    """

    demand: WeightDemand
    gradients: Gradients | None = None
    threads: int = 1
    correction: LowRankDemand | None = None


def quantize_layer(
    layer: DecoderLayer, original: list[torch.Tensor], current: list[torch.Tensor], how: WeightQuantization
) -> LayerResult:
    """Quantize the linears and experts of `layer` in place, in the order in which they run; with what corrects them.

    The hidden states `original`, those of the checkpoint, end after the layer, and so do `current` ones, which what is
    quantized makes; each run through it once.

    Raises:
        DataError: what a matrix reads over the calibration text does not allow the method of `demand`.
    """
    demand, gradients, correction = how.demand, how.gradients, how.correction
    groups = groups_of(layer, current[0], demand)
    wants_residual = InputStatistic.RESIDUAL in demand.method.demands
    added = layer.additions(groups, original[0]) if wants_residual else Additions((), ())
    inputs: list[dict[str, _Unquantized]] = []  # of each window, by the first of each group
    for window, state in enumerate(original):
        first = [group[0] for group in groups]
        after, made, read = layer.run_with_outputs(added.last, window, state, first)
        residuals = _residuals(added, state, after, made)
        inputs.append({name: _Unquantized(x, residuals.get(name)) for name, x in read.items()})
        original[window] = after
    runs = Runs.of(layer, current)
    results: dict[str, QuantizedMatrix] = {}
    corrections: dict[str, LowRankCorrection] = {}
    notes: list[str] = []
    for names in groups:
        unquantized = [read.pop(names[0]) for read in inputs]
        if names[0] in layer.experts():
            reads = [each.read for each in unquantized]
            matrices = _quantize_experts(runs, names[0], reads, demand, notes)
        else:
            outputs = layer.outputs_left(names, gradients.outputs(names)) if gradients is not None else ()
            matrices, seen = _quantize_linears(runs, names, unquantized, added, how, outputs, notes)
            if correction is not None and not exclusion(names, correction.exclude):
                corrections |= correct_linears(layer, matrices, seen, correction)
        for name, matrix in matrices.items():
            layer.set_weight(name, corrected(matrix, corrections.get(name)))
        results |= matrices
    runs.end()
    return LayerResult(results, None, notes=tuple(notes), low_rank=corrections)


def _residuals(
    added: Additions, state: torch.Tensor, after: torch.Tensor, made: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what the outputs of linears are added to, [tokens, N]; `made` is what the last of them make."""
    between = after - sum(made.values(), torch.zeros(())) if added.last else after
    return dict.fromkeys(added.first, state[0]) | dict.fromkeys(added.last, between[0])


def groups_of(layer: DecoderLayer, state: torch.Tensor, demand: WeightDemand) -> list[list[str]]:
    """Name what is to be quantized in the order in which it runs, linears that read the same together."""
    groups = layer.groups(state)
    unquantized = set() if demand.routers else layer.routers(groups, state)
    wanted = [
        [name for name in group if name not in unquantized and not exclusion(_matrices(layer, name), demand.exclude)]
        for group in groups
    ]
    return [group for group in wanted if group]


def _matrices(layer: DecoderLayer, name: str) -> list[str]:
    """Name the parameters that are quantized of a linear, which it names itself, or of experts."""
    module = layer.experts().get(name)
    return [name] if module is None else [f"{name}.{parameter}" for parameter in experts.matrices(module)]


def _quantize_linears(
    runs: Runs,
    names: Sequence[str],
    originals: Sequence[_Unquantized],
    added: Additions,
    how: WeightQuantization,
    outputs: tuple[Float32, ...],
    notes: list[str],
) -> tuple[dict[str, QuantizedMatrix], LayerInputs]:
    """Quantize linears that read one tensor, `originals` in the checkpoint: their rows are one matrix.

    Also return what was seen of that tensor.
    """
    layer, name, residual, demand = runs.layer, names[0], originals[0].residual, how.demand
    rows_added = residual.shape[1] if residual is not None and len(names) == 1 else None
    sums, held = (InputSums.start(demand.method.demands, originals[0].read.shape[1], rows_added) for _ in range(2))
    for window, original in enumerate(originals):
        now = runs.states[window][0]
        if rows_added is None or name not in added.last:
            x, *_ = runs.arguments(name, window)
        elif added.last == (name,):
            x, after = runs.without(name, window)
            now = after[0]
        else:
            state = runs.states[window]
            after, made, read = layer.run_with_outputs(added.last, window, state, [name])
            x, now = read[name], _residuals(added, state, after, made)[name]
        lost = None if rows_added is None or original.residual is None else original.residual - now
        (held if window % HELD_OUT == HELD_OUT - 1 else sums).add(x, original.read - x, lost)
    weights = [layer.weight(name) for name in names]
    with refusals(name, *_remedies(demand.method)):
        seen = sums.seen(routed=False, held=held, outputs=outputs, threads=how.threads)
        matrix = demand.method.quantize(np.concatenate(weights), demand.grid_of(names), seen)
    notes += [f"{name}: {note}" for note in seen.notes]
    bounds = pairwise(np.cumsum([0, *map(len, weights)]))
    return {name: rows(matrix, slice(*own)) for name, own in zip(names, bounds, strict=True)}, seen


def _quantize_experts(
    runs: Runs,
    name: str,
    originals: Sequence[torch.Tensor],
    demand: WeightDemand,
    notes: list[str],
) -> dict[str, QuantizedMatrix]:
    """Quantize the experts `name`; nothing where no kernel has a grid for their widths."""
    layer, module = runs.layer, runs.layer.experts()[name]
    grid = demand.grid_of(_matrices(layer, name)).fitting(*experts.widths(module))
    if grid is None:
        return {}
    called = [runs.arguments(name, window) for window in range(len(runs.states))]
    tokens, ids, mixing = (torch.cat(parts) for parts in zip(*called, strict=True))
    read = experts.RoutedInputs(tokens, ids, mixing, torch.cat(list(originals)))
    with refusals(name, *_remedies(demand.method)):
        matrices = experts.quantize(module, read, grid, demand.method)
    if said := experts.scarcity(module, read):
        notes.append(f"{name}: {said}")
    return dict(zip(_matrices(layer, name), matrices, strict=True))


def _remedies(method: Method) -> list[str]:
    """Say what a method is, and what else may help where it refuses its inputs."""
    return [f"method {method.name}", *filter(None, [method.remedy]), f"or use method: {PLAIN.name}"]


def correct_linears(
    layer: DecoderLayer, matrices: Mapping[str, QuantizedMatrix], seen: LayerInputs, demand: LowRankDemand
) -> dict[str, LowRankCorrection]:
    """Return corrections for `matrices`, linears of `layer` that read the same; {} where the bits allow no rank.

    What they are corrected towards makes up for what the layers before have lost, as in GPTQ.

    Raises:
        DataError: what they read over the calibration text does not allow it.
    """
    names = list(matrices)
    whole = np.concatenate([layer.weight(name) for name in names])
    rank = low_rank.rank_within(demand.bits, whole.shape[1], whole.shape[0], demand.dtype)
    if not rank:
        return {}
    moments = seen.sums[InputStatistic.MOMENTS]
    with refusals(names[0], "a correction", MORE_DAMPING):
        curvature = Curvature.of(moments, demand.damping)
        damped = moments + curvature.damping * moments.diagonal().mean() * np.eye(len(moments), dtype=np.float32)
        codes = np.concatenate([dequantize(matrices[name]) for name in names])
        wanted = target(whole, curvature, seen)
        made = low_rank.compute_correction(wanted, codes, damped, rank, demand.dtype, matrices[names[0]].grid)
    bounds = pairwise(np.cumsum([0, *(matrices[name].shape[0] for name in names)]))
    own = {name: np.ascontiguousarray(made.b[:, slice(*bound)]) for name, bound in zip(names, bounds, strict=True)}
    return {name: replace(made, b=b, group=names[0]) for name, b in own.items()}


def corrected(matrix: QuantizedMatrix, correction: LowRankCorrection | None) -> Float32:
    """Return the weight [N, K] that codes and their correction stand for."""
    weight = dequantize(matrix)
    return weight if correction is None else weight + correction.product()


def quantize_tables(
    skeleton: Skeleton,
    gradients: Gradients | None,
    demand: WeightDemand,
    threads: int,
    notes: list[str],
) -> dict[str, QuantizedMatrix]:
    """Quantize embedding and head, by parameter.

    A table of which no gradients are known, as where a projection stands between it and the layers, is rounded to
    nearest, and `notes` say so; one whose width no block divides is left alone.
    """
    if demand.tables is None:
        return {}
    matrices = {}
    for name, hessian in table_moments(skeleton, gradients, demand).items():
        table = skeleton.table(name)
        grid = demand.table_grid(name, table.shape[1])
        if grid is None:
            continue
        if gradients is None or hessian is None:
            matrices[name] = PLAIN().quantize(table, grid)
            notes.append(f"{name}: rounded to nearest: it has no gradients for method {demand.method.name}")
            continue
        seen = LayerInputs(gradients.tokens, False, {InputStatistic.MOMENTS: hessian}, threads=threads)
        matrices[name] = demand.method.quantize(table.astype(np.float32), grid, seen)
    return matrices


def table_moments(skeleton: Skeleton, gradients: Gradients | None, demand: WeightDemand) -> dict[str, Float32 | None]:
    """Return what rounding embedding and head is weighted with, [H, H], by parameter; None where it is not known.

    A parameter that is both has the sum. Those that `demand` excludes are not here.
    """
    embedding, head = skeleton.tables()
    moments: dict[str, list[Float32 | None]] = {}
    for name, moment in ((embedding, gradients and gradients.embedding), (head, gradients and gradients.head)):
        if name and not exclusion([name], demand.exclude):
            moments.setdefault(name, []).append(moment if isinstance(moment, np.ndarray) else None)
    found: dict[str, Float32 | None] = {}
    for name, parts in moments.items():
        width = skeleton.model.get_parameter(name).shape[1]
        known = [part for part in parts if part is not None and len(part) == width]
        found[name] = np.stack(known).sum(0) if len(known) == len(parts) else None
    return found


def sparsify_layer(layer: DecoderLayer, states: list[torch.Tensor], demand: SparsityDemand) -> LayerResult:
    """Prune the linears of `layer` in place, in the order in which they run; `states` end after the layer.

    Raises:
        DataError: what a linear reads over the calibration text does not allow it.
    """
    groups = layer.groups(states[0])
    routers, experts = layer.routers(groups, states[0]), layer.experts()
    runs = Runs.of(layer, states)
    pruned: dict[str, SparseMatrix] = {}
    notes: list[str] = []
    for group in groups:
        names = [
            name
            for name in group
            if name not in experts and name not in routers and not exclusion([name], demand.exclude)
            if layer.weight(name).shape[1] % sparsity.GROUP == 0
        ]
        if not names:
            continue
        moments = runs.seen(names[0], layer.weight(names[0]).shape[1]).sums[InputStatistic.MOMENTS]
        weights = [layer.weight(name) for name in names]
        whole = np.concatenate(weights)
        with refusals(names[0], "pruning", MORE_DAMPING):
            matrix, damping = sparsity.sparsegpt(whole, moments, demand.damping)
        if damping > demand.damping:
            notes.append(f"{names[0]}: damping rose to {damping:g}: its moments could not be factored")
        lost = sparsity.output_error(whole, matrix.dense(), moments)
        for name, (first, last) in zip(names, pairwise(np.cumsum([0, *map(len, weights)])), strict=True):
            pruned[name] = SparseMatrix(matrix.values[first:last], matrix.places[first:last], lost)
            layer.set_weight(name, pruned[name].dense())
    runs.end()
    return LayerResult({}, None, notes=tuple(notes), sparse=pruned)

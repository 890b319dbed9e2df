"""Quantize the matrices of one decoder layer, each with what it reads behind those that are quantized already."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from llmforge.calibration import experts
from llmforge.calibration.gradients import Gradients
from llmforge.calibration.layer import Additions, DecoderLayer
from llmforge.calibration.resuming import SHARES, Runs
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import LayerResult
from llmforge.calibration.sums import MORE_DAMPING, refusals
from llmforge.calibration.windows import LayerStructure, LayerWindows
from llmforge.quantization import low_rank, sparsity
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize, rows
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import InputStatistic, LayerInputs, Method
from llmforge.quantization.methods.gptq import Curvature, target
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import LowRankDemand, SparsityDemand, WeightDemand, exclusion

# Bits up to which layers run with bf16 products, of linears and attention, while they are quantized. KLD with those of
# linears alone, as a share of that with fp32 products: at 4 bits SmolLM2-135M's first four layers 1.00 (95 %: 0.94 –
# 1.06), the sample 1.01 (0.99 – 1.04), experts 0.99 (0.96 – 1.02); at 8 bits, whose errors have 1/256 of the power, the
# four layers 1.04 (1.01 – 1.07). With attention, all of SmolLM2-135M at 4 bits has 1.002 of that without.
COARSE = 6


@dataclass(frozen=True, eq=False)
class WeightQuantization:
    """How weights are quantized: by `demand`, with `gradients` of their outputs where its method wants them.

    `correction` asks for products of low rank. `structures` has what was found of layers, by their kind.
    """

    demand: WeightDemand
    gradients: Gradients | None = None
    threads: int = 1
    correction: LowRankDemand | None = None
    structures: dict[Hashable, LayerStructure] = field(default_factory=dict)


def quantize_layer(layer: DecoderLayer, windows: LayerWindows, how: WeightQuantization) -> LayerResult:
    """Quantize the linears and experts of `layer` in place, in the order in which they run; with what corrects them.

    The hidden states of `windows` end after the layer, those of the checkpoint and those which what is quantized makes;
    each run through it once.

    Raises:
        DataError: what a matrix reads over the calibration text does not allow the method of `demand`.
    """
    demand, gradients, correction = how.demand, how.gradients, how.correction
    if (kind := layer.kind()) not in how.structures:
        how.structures[kind] = LayerStructure.of(layer, windows.original[0])
    structure = how.structures[kind].within(layer)
    groups = _wanted(layer, structure.groups, structure.routers, demand)
    added = structure.added if InputStatistic.RESIDUAL in demand.method.demands else Additions((), ())
    at_end = added.last if groups and groups[-1][:1] == [*added.last] else ()
    windows.observe([group[0] for group in groups], added, at_end, is_coarse(layer, demand))
    results: dict[str, QuantizedMatrix] = {}
    corrections: dict[str, LowRankCorrection] = {}
    notes: list[str] = []
    for names in groups:
        if names[0] in layer.experts():
            matrices = _quantize_experts(layer, windows, names[0], how, notes)
        else:
            outputs = layer.outputs_left(names, gradients.outputs(names)) if gradients is not None else ()
            matrices, seen = _quantize_linears(layer, windows, names, how, outputs, notes)
            if correction is not None and not exclusion(names, correction.exclude):
                corrections |= correct_linears(layer, matrices, seen, correction)
        windows.assign({name: corrected(matrix, corrections.get(name)) for name, matrix in matrices.items()})
        results |= matrices
    windows.end()
    return LayerResult(results, None, notes=tuple(notes), low_rank=corrections)


def is_coarse(layer: DecoderLayer, demand: WeightDemand) -> bool:
    """Say whether `demand` rounds all weights of `layer` so far that what bf16 products round does not count."""
    names = [name for module in layer.modules() for name in _matrices(layer, module)]
    return all(demand.grid_of([name]).bits <= COARSE for name in names)


def groups_of(layer: DecoderLayer, state: torch.Tensor, demand: WeightDemand) -> list[list[str]]:
    """Name what is to be quantized of a layer that is called with `state` in window 0, as `quantize_layer` has it."""
    groups = layer.groups(state)
    routers = frozenset[str]() if demand.routers else frozenset(layer.routers(groups, state))
    return _wanted(layer, groups, routers, demand)


def _wanted(
    layer: DecoderLayer, groups: Sequence[Sequence[str]], routers: Collection[str], demand: WeightDemand
) -> list[list[str]]:
    """Name what is to be quantized in the order in which it runs, linears that read the same together."""
    unquantized = () if demand.routers else routers
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
    layer: DecoderLayer,
    windows: LayerWindows,
    names: Sequence[str],
    how: WeightQuantization,
    outputs: tuple[Float32, ...],
    notes: list[str],
) -> tuple[dict[str, QuantizedMatrix], LayerInputs]:
    """Quantize linears that read one tensor: their rows are one matrix.

    Also return what was seen of that tensor. The last share of the windows is held out for choices.
    """
    name, demand = names[0], how.demand
    shares = iter(windows.sums(names, demand.method.demands))  # not all at once: of large layers each takes gigabytes
    (_, sums), held = next(shares), None
    for share, other in shares:
        if share == SHARES - 1:
            held = other
        else:
            sums.merge(other)
    weights = [layer.weight(name) for name in names]
    with refusals(name, *_remedies(demand.method)):
        seen = sums.seen(routed=False, held=held, outputs=outputs, threads=how.threads)
        grid = demand.grid_of(names, weights[0].shape[1])
        matrix = demand.method.quantize(np.concatenate(weights), grid, seen)
    notes += [f"{name}: {note}" for note in seen.notes]
    bounds = pairwise(np.cumsum([0, *map(len, weights)]))
    return {name: rows(matrix, slice(*own)) for name, own in zip(names, bounds, strict=True)}, seen


def _quantize_experts(
    layer: DecoderLayer, windows: LayerWindows, name: str, how: WeightQuantization, notes: list[str]
) -> dict[str, QuantizedMatrix]:
    """Quantize the experts `name`; nothing where no kernel has a grid for their widths."""
    module = layer.experts()[name]
    grid = how.demand.grid_of(_matrices(layer, name)).fitting(*experts.widths(module))
    if grid is None:
        return {}
    read = experts.RoutedInputs(*(torch.cat(parts) for parts in zip(*windows.routed(name), strict=True)))
    with refusals(name, *_remedies(how.demand.method)):
        matrices = experts.quantize(module, read, grid, how.demand.method, layer.each, how.threads)
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
        curvature = Curvature.of(moments, demand.damping, seen.threads)
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
    pruned: dict[str, SparseMatrix] = {}
    notes: list[str] = []
    with Runs.of(layer, states) as runs:
        for group in groups:
            names = [
                name
                for name in group
                if name not in experts and name not in routers and not exclusion([name], demand.exclude)
                if layer.weight(name).shape[1] % sparsity.GROUP == 0
            ]
            if names:
                pruned |= _sparsify_linears(runs, names, demand, notes)
        runs.end()
    return LayerResult({}, None, notes=tuple(notes), sparse=pruned)


def _sparsify_linears(
    runs: Runs, names: Sequence[str], demand: SparsityDemand, notes: list[str]
) -> dict[str, SparseMatrix]:
    """Prune linears that read one tensor: their rows are one matrix."""
    layer = runs.layer
    moments = runs.seen(names[0], layer.weight(names[0]).shape[1]).sums[InputStatistic.MOMENTS]
    weights = [layer.weight(name) for name in names]
    whole = np.concatenate(weights)
    with refusals(names[0], "pruning", MORE_DAMPING):
        matrix, damping = sparsity.sparsegpt(whole, moments, demand.damping)
    if damping > demand.damping:
        notes.append(f"{names[0]}: damping rose to {damping:g}: its moments could not be factored")
    lost = sparsity.output_error(whole, matrix.dense(), moments)
    pruned = {}
    for name, (first, last) in zip(names, pairwise(np.cumsum([0, *map(len, weights)])), strict=True):
        pruned[name] = SparseMatrix(matrix.values[first:last], matrix.places[first:last], lost)
        layer.set_weight(name, pruned[name].dense())
    return pruned

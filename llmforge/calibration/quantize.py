"""Quantize the matrices of one decoder layer, each with what it reads behind those that are quantized already."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from llmforge.calibration import experts
from llmforge.calibration.gradients import Gradients
from llmforge.calibration.layer import Additions, DecoderLayer, Observed
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


@dataclass(frozen=True, eq=False)
class _Unquantized:
    """What a linear reads of a window in the checkpoint, [tokens, K], and what its output is added to, [tokens, N]."""

    read: torch.Tensor
    residual: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class WeightQuantization:
    """How weights are quantized: by `demand`, with `gradients` of their outputs where its method wants them.

    `correction` asks for products of low rank. `structures` has what was found of layers, by their kind.
    """

    demand: WeightDemand
    gradients: Gradients | None = None
    threads: int = 1
    correction: LowRankDemand | None = None
    structures: dict[Hashable, _Structure] = field(default_factory=dict)


@dataclass(frozen=True)
class _Structure:
    """Names within a layer: what reads one tensor, in the order in which it runs, what chooses experts, and adds."""

    groups: Sequence[Sequence[str]]
    routers: frozenset[str]
    added: Additions

    @classmethod
    def of(cls, layer: DecoderLayer, state: torch.Tensor) -> _Structure:
        """Find it by running `layer` with its first window."""
        groups = layer.groups(state)
        routers, added = layer.routers(groups, state), layer.additions(groups, state)

        def local(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(name.removeprefix(f"{layer.name}.") for name in names)

        return cls([local(group) for group in groups], frozenset(local(routers)), Additions(*map(local, added)))

    def within(self, layer: DecoderLayer) -> _Structure:
        """Name what it is in `layer`, which is of the same kind."""

        def named(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(f"{layer.name}.{name}" for name in names)

        groups, added = [named(group) for group in self.groups], Additions(*map(named, self.added))
        return _Structure(groups, frozenset(named(self.routers)), added)


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
    if (kind := layer.kind()) not in how.structures:
        how.structures[kind] = _Structure.of(layer, original[0])
    structure = how.structures[kind].within(layer)
    groups = _wanted(layer, structure.groups, structure.routers, demand)
    added = structure.added if InputStatistic.RESIDUAL in demand.method.demands else Additions((), ())
    inputs = _unquantized(layer, [group[0] for group in groups], added, original)
    results: dict[str, QuantizedMatrix] = {}
    corrections: dict[str, LowRankCorrection] = {}
    notes: list[str] = []
    at_end = added.last if groups and groups[-1][:1] == [*added.last] else ()
    with Runs.of(layer, current, at_end) as runs:
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


def _unquantized(
    layer: DecoderLayer, names: Sequence[str], added: Additions, states: list[torch.Tensor]
) -> list[dict[str, _Unquantized]]:
    """Run `layer` as it is, and carry `states` behind it: what linears or experts `names` read of each window."""

    def run(window: int, state: torch.Tensor) -> tuple[torch.Tensor, dict[str, _Unquantized]]:
        seen = observe(window, state)
        residuals = _residuals(added, state, seen)
        return seen.after, {name: _Unquantized(x, residuals.get(name)) for name, x in seen.inputs.items()}

    with layer.observed(names, added.last) as observe:
        states[:], inputs = zip(*layer.each(run, range(len(states)), states), strict=True)
    return list(inputs)


def _residuals(added: Additions, state: torch.Tensor, seen: Observed) -> dict[str, torch.Tensor]:
    """Return what the outputs of linears are added to, [tokens, N], where what the last of them make was seen."""
    between = seen.after - sum(seen.outputs.values(), torch.zeros(())) if added.last else seen.after
    return dict.fromkeys(added.first, state[0]) | dict.fromkeys(added.last, between[0])


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
    layer, name, demand = runs.layer, names[0], how.demand
    sums, held = _sums(runs, names, originals, added, demand.method.demands)
    weights = [layer.weight(name) for name in names]
    with refusals(name, *_remedies(demand.method)):
        seen = sums.seen(routed=False, held=held, outputs=outputs, threads=how.threads)
        matrix = demand.method.quantize(np.concatenate(weights), demand.grid_of(names), seen)
    notes += [f"{name}: {note}" for note in seen.notes]
    bounds = pairwise(np.cumsum([0, *map(len, weights)]))
    return {name: rows(matrix, slice(*own)) for name, own in zip(names, bounds, strict=True)}, seen


def _sums(
    runs: Runs,
    names: Sequence[str],
    originals: Sequence[_Unquantized],
    added: Additions,
    demands: Collection[InputStatistic],
) -> tuple[InputSums, InputSums]:
    """Sum over what linears `names` read, and over what of it is held out: every eighth window, the last share."""
    layer, name, residual = runs.layer, names[0], originals[0].residual
    rows_added = residual.shape[1] if residual is not None and len(names) == 1 else None
    wanted = rows_added is not None and name in added.last
    anew = added.last if wanted and runs.at_end != (name,) else ()

    def summed(windows: range) -> InputSums:
        sums = InputSums.start(demands, originals[0].read.shape[1], rows_added)
        for window in windows:
            original, state = originals[window], runs.states[window]
            now = state[0]
            if wanted and not anew:
                x, after = runs.without(name, window)
                now = after[0]
            else:
                x, *_ = runs.arguments(name, window)
            if anew:
                now = _residuals(added, state, observe(window, state))[name]
            lost = None if rows_added is None or original.residual is None else original.residual - now
            sums.add(x, original.read - x, lost)
        return sums

    with layer.observed((), anew) as observe:
        total, *others, held = runs.shares(summed)
        for other in others:
            total.merge(other)
    return total, held


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
    called = layer.each(lambda window: runs.arguments(name, window), range(len(runs.states)))
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

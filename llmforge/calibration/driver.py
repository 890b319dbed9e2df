"""The walk over the layers: load one, quantize its linears in order, record its keys and values, run it, drop it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.cache import Code, processor
from llmforge.calibration import activations, mixed, prune
from llmforge.calibration.gradients import Gradients, take
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.losses import Losses
from llmforge.calibration.low_rank_correction import corrected
from llmforge.calibration.quantize import quantize_layer
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.sparsify import sparsify_layer
from llmforge.calibration.store import LayerResult, Store, StoredArrays, StoredLowRank, StoredMatrices, StoredSparse
from llmforge.calibration.tables import quantize_tables
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import Float32, Grid, QuantizedMatrix, dequantize
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.statistics import (
    Demand,
    InputRangeDemand,
    KvRange,
    KvRangeDemand,
    LowRankDemand,
    PruningDemand,
    SparsityDemand,
    Statistics,
    WeightDemand,
)
from llmforge.quantization.structure import PrunedStructure

_NOTHING = LayerResult({}, None)  # of embedding and head, where they are left alone


def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    *,
    threads: int = 1,
    caches: Mapping[int, Collection[str]] | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Serve `demands` from a run of `checkpoint` over `windows`, in fp32, on as many `threads`.

    `caches` says what each layer caches (key, value, conv, recurrent); by default keys and values. Ranges are measured
    where it is keys and values.

    Ranges of what linears read are those of the checkpoint's own weights.
    Linears and experts are quantized in the order in which they run, each with the inputs that the quantized ones
    before it make; ranges of keys and values are those that the quantized weights make. Memory: the embedding while the
    windows enter, then the fp32 weights of one layer and the hidden states of all windows; where weights are quantized,
    the hidden states twice, the inputs of the layer's linears and experts, and one Hessian with its factor, K × K in
    fp64. Results of each layer are kept in `store` when it is done, and found there by a later call that asks for the
    same; where all are found, nothing is run. The hidden states in front of the next layer are kept there until all
    are done, so that a call that was killed goes on at the first layer that is lacking.

    Two runs on one machine, with as many `threads`, give identical results, whatever threads the process has.

    Raises:
        DataError: `windows` are empty, or make activations that cannot be calibrated on: NaN, or a key or value channel
            that is always 0.
        UnsupportedError: the architecture cannot be run layer by layer; two demands contradict each other.
    """
    if not windows:
        raise DataError("the calibration data has no text")
    progress, store = progress or Silent(), store or Store()
    demands, pruned = _with_structure(checkpoint, windows, demands, threads, store, progress)
    demands, formats = _with_formats(checkpoint, windows, demands, threads, store, progress)
    notes, pruning = (*pruned, *formats), _pruning_demand(demands)
    own, layers = key(checkpoint, windows, demands, caches, threads, store.tools), checkpoint.geometry.layers
    found = [store.load(own, index) for index in range(layers)]
    if store.reused:  # before those of embedding and head
        progress.stage(f"Calibrate: {numbered(store.reused, layers)} reused")
    weights = _weight_demand(demands)
    tables: LayerResult | None = _NOTHING
    if weights is not None and weights.tables is not None:
        tables = store.load(own, layers)
        store.reused[:] = [index for index in store.reused if index < layers]  # which are told as layers
    if None in found or tables is None:
        with torch.no_grad(), fixed(threads):
            done = _walk(checkpoint, windows, demands, _measured(caches), found, tables, store, own, threads, progress)
    else:
        done = [tables, *(result for result in found if result is not None)]
    linears = StoredMatrices(dict(item for result in done for item in result.linears.items()))
    return Statistics(
        samples=len(windows),
        tokens=sum(len(window.ids) for window in windows),
        linears=linears,
        grids=linears.grids(),
        kv={index: result.kv for index, result in enumerate(done[1:]) if result.kv is not None},
        notes=(*notes, *(note for result in done for note in result.notes)),
        inputs={name: peak for result in done for name, peak in result.inputs.items()},
        sparse=StoredSparse({name: matrix for result in done for name, matrix in result.sparse.items()}),
        low_rank=StoredLowRank({name: each for result in done for name, each in result.low_rank.items()}),
        kept=None if pruning is None else pruning.kept,
        pruned=StoredArrays({name: each for result in done for name, each in result.pruned.items()}),
    )


def _with_structure(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    threads: int,
    store: Store,
    progress: Progress,
) -> tuple[Sequence[Demand], tuple[str, ...]]:
    """Choose what is left of the decoder where a demand prunes it: demands that say it, and notes for the report."""
    demand = _pruning_demand(demands)
    if demand is None or demand.kept is not None:
        return demands, ()

    def compute() -> dict[str, Any]:
        progress.stage("Choose what to prune")
        with torch.no_grad(), fixed(threads):
            kept, note = prune.choose(checkpoint, windows, demand)
        return {**asdict(kept), "note": note}

    found = store.figures("structure", key(checkpoint, windows, [demand], None, threads, store.tools), compute)
    heads, channels = (
        tuple((layer, tuple(units)) for layer, units in found[kind]) for kind in (prune.HEADS, prune.CHANNELS)
    )
    chosen = replace(demand, kept=PrunedStructure(tuple(found["dropped"]), heads, channels))
    return [chosen if each is demand else each for each in demands], (found["note"],)


def _with_formats(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    threads: int,
    store: Store,
    progress: Progress,
) -> tuple[Sequence[Demand], tuple[str, ...]]:
    """Choose formats where a demand limits bytes: demands that say which, and notes for the report."""
    weights = _weight_demand(demands)
    if weights is None or (weights.weight_bits is None and weights.weight_bytes is None):
        return demands, ()

    def compute() -> dict[str, Any]:
        progress.stage("Choose formats of weights")
        with TemporaryDirectory(prefix="llmforge-gradients-") as folder:

            def trial(
                demand: WeightDemand, fitted: Sequence[TokenWindow], losses: Losses | None
            ) -> dict[str, QuantizedMatrix]:
                tables = None if demand.tables is not None else _NOTHING
                found = [None] * checkpoint.geometry.layers
                shared = Path(folder)
                made = _walk(
                    checkpoint, fitted, [demand], (), found, tables, Store(), "", threads, progress, shared, losses
                )
                return {name: matrix for each in made for name, matrix in StoredMatrices(each.linears).items()}

            def keep(kind: str, demand: WeightDemand, compute: Callable[[], Any]) -> Any:
                return store.figures(kind, key(checkpoint, windows, [demand], None, threads, store.tools), compute)

            with torch.no_grad(), fixed(threads):
                chosen, note = mixed.choose(checkpoint, windows, weights, trial, keep)
        grids = {name: asdict(grid) for name, grid in chosen.mixed}
        return {"mixed": grids, "tables": chosen.tables and asdict(chosen.tables), "note": note}

    found = store.figures("formats", key(checkpoint, windows, [weights], None, threads, store.tools), compute)
    chosen = replace(
        weights,
        mixed=tuple((name, Grid(**grid)) for name, grid in found["mixed"].items()),
        tables=found["tables"] and Grid(**found["tables"]),
        weight_bits=None,
        weight_bytes=None,
    )
    return [chosen if demand == weights else demand for demand in demands], (found["note"],)


def _walk(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    measured: Collection[int] | None,
    found: Sequence[LayerResult | None],
    tables: LayerResult | None,
    store: Store,
    own: str,
    threads: int,
    progress: Progress,
    gradients: Path | None = None,
    losses: Losses | None = None,
) -> list[LayerResult]:
    """Carry the windows through the layers, and quantize and measure those that were not `found`, nor the `tables`.

    They begin where `store` has the hidden states of the calibration `own`, in front of what is lacking. Gradients are
    kept in a folder that is given, and found there by the next walk over the same windows; what formats lose is put to
    `losses`. Returns results of the embedding and head, and of each layer.
    """
    weights, wanted, sparsity = _weight_demand(demands), _range_demand(demands), _sparsity_demand(demands)
    correction, pruning = _low_rank_demand(demands), _pruning_demand(demands)
    skeleton = Skeleton.build(checkpoint)
    # Hidden states of every window in front of a layer, as the checkpoint makes them and as quantized layers do.
    calls, original = skeleton.enter([window.ids for window in windows])
    entered = list(original)
    current = list(original) if weights else original
    sides = (original, current) if weights else (original,)
    shapes = [tuple(state.shape) for side in sides for state in side]
    lacking = 0 if tables is None else next((i for i, each in enumerate(found) if each is None), 0)
    begin = _resume(store.states(own, lacking, shapes), sides)
    keeps = store.keeps_states(sum(state.nbytes for side in sides for state in side))
    done = [result for result in found[:begin] if result is not None]
    with ExitStack() as stack:
        taken = None
        if weights is not None and weights.method.demands_outputs:
            ids = [window.ids for window in windows]
            write = partial(take, skeleton, ids, calls, entered)
            if gradients is None:
                gradients = store.gradients(own, write, stack)
            elif not any(gradients.iterdir()):
                write(gradients)
            taken = Gradients.read(gradients)
        if tables is None:
            assert weights is not None
            said: list[str] = []
            matrices = quantize_tables(skeleton, taken, weights, threads, said, losses)
            tables = store.save(own, len(found), LayerResult(matrices, None, notes=tuple(said)))
        embedding = StoredMatrices(tables.linears).get(skeleton.tables()[0])
        if embedding is not None and begin == 0:
            current[:] = skeleton.enter([window.ids for window in windows], dequantize(embedding))[1]
        for index, kept in enumerate(found[begin:], begin):
            progress.advance(index, len(found))
            if pruning is not None and pruning.drops(index):
                done.append(kept or store.save(own, index, _NOTHING))
                continue
            layer, made = skeleton.load(index, calls[index]), dict[str, Float32]()
            if pruning is not None:
                known = None if kept is None else StoredArrays(kept.pruned)
                layer, made = prune.prune_layer(layer, index, original, pruning, known)
            ranges = KvRangeDemand() in demands and (measured is None or index in measured)
            inputs = {} if kept or wanted is None else activations.measure(layer, original, wanted)
            if sparsity is not None:
                result = _prune_layer(layer, current, sparsity, ranges, kept)
            else:
                result = _calibrate_layer(
                    layer, original, current, weights, taken, threads, ranges, kept, losses, correction
                )
            done.append(result if kept else store.save(own, index, replace(result, inputs=inputs, pruned=made)))
            del layer  # before the next one is read
            if keeps and index + 1 < len(found):
                store.keep_states(own, index + 1, (state.numpy() for side in sides for state in side))
    store.drop_states(own, len(found) - 1)
    store.drop_gradients(own)
    progress.advance(len(found), len(found))
    return [tables, *done]


def _resume(found: tuple[int, Iterator[Float32]] | None, sides: Sequence[list[torch.Tensor]]) -> int:
    """Put the hidden states that were `found` into `sides`, and return the layer that they are in front of."""
    if found is None:
        return 0
    index, states = found
    for side in sides:
        for window in range(len(side)):
            side[window] = torch.from_numpy(next(states)).clone()  # where torch's own tensors would lie
    return index


def numbered(reused: Sequence[int], layers: int) -> str:
    """Say which of `layers` layers were found: mostly the first ones."""
    if len(reused) == layers:
        return "all layers"
    first, last = min(reused), max(reused)
    whole = len(reused) == last - first + 1
    return (f"layer {first}" if first == last else f"layers {first}–{last}") if whole else f"{len(reused)} layers"


def plan(checkpoint: Checkpoint, demands: Sequence[Demand], caches: Mapping[int, Collection[str]]) -> dict[str, Grid]:
    """Name the weights that `calibrate` would quantize, with the grids that are asked for, without reading a weight.

    Raises:
        UnsupportedError: as far as that can be known without weights, calibration cannot serve `demands`.
    """
    weights, correction = _weight_demand(demands), _low_rank_demand(demands)
    pruning = _pruning_demand(demands)
    if pruning is not None and pruning.structure is not None:
        prune.require(pruning, checkpoint.geometry.layers)
    if correction is not None and weights is not None and (weights.weight_bits or weights.weight_bytes):
        raise UnsupportedError(
            "correct-low-rank adds to the bytes that method: auto is to keep to",
            hint="leave it out and give `auto` its bits, which they buy more with; or choose another method",
        )
    for layer, parts in caches.items():
        if KvRangeDemand() in demands and "key" in parts and len(parts) > 2:
            others = ", ".join(sorted(set(parts) - {"key", "value"}))
            raise UnsupportedError(
                f"{checkpoint.path}: the ranges of keys and values cannot be calibrated: layer {layer} caches {others} "
                "besides them",
                hint="leave quantize-kv-cache out",
            )
    skeleton = Skeleton.build(checkpoint)
    if weights is None:
        return {}
    grids = {name: weights.grid_of([name]) for name in skeleton.matrices()}
    if weights.tables is not None:
        for name in filter(None, skeleton.tables()):
            if grid := weights.tables.dividing(skeleton.model.get_parameter(name).shape[1]):
                grids[name] = grid
    return {name: grid for name, grid in grids.items() if not exclusion([name], weights.exclude)}


def _weight_demand(demands: Sequence[Demand]) -> WeightDemand | None:
    """Return the one demand for weights; None where there is none."""
    weights = list(dict.fromkeys(demand for demand in demands if isinstance(demand, WeightDemand)))
    if len(weights) > 1:
        raise UnsupportedError(
            f"{len(weights)} passes quantize the same linear layers with different calibration options: "
            + "; ".join(str(demand) for demand in weights),
            hint="keep one of them",
        )
    return weights[0] if weights else None


def _sparsity_demand(demands: Sequence[Demand]) -> SparsityDemand | None:
    """Return the one demand for pruned linears; None where there is none."""
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, SparsityDemand)))
    if len(found) > 1 or (found and _weight_demand(demands) is not None):
        raise UnsupportedError(
            "two passes choose the weights of the same linear layers by calibration: "
            + "; ".join(str(demand) for demand in demands if isinstance(demand, SparsityDemand | WeightDemand)),
            hint="keep one of them; behind sparsify-weights, quantize-channels rounds weights and keeps their zeros",
        )
    return found[0] if found else None


def _pruning_demand(demands: Sequence[Demand]) -> PruningDemand | None:
    """Return the one demand that takes heads, channels and layers out; None where there is none."""
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, PruningDemand)))
    if len(found) > 1:
        raise UnsupportedError(
            "two passes prune the same layers: " + "; ".join(map(str, found)), hint="keep one of them"
        )
    weights = _weight_demand(demands)
    if found and weights is not None and (weights.weight_bits is not None or weights.weight_bytes is not None):
        raise UnsupportedError(
            "prune-structure goes with one format of all weights: method: auto measures those of the whole model",
            hint="choose another method, or leave prune-structure out: auto takes bytes where they cost least",
        )
    return found[0] if found else None


def _low_rank_demand(demands: Sequence[Demand]) -> LowRankDemand | None:
    """Return the one demand for corrections of quantized linears; None where there is none."""
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, LowRankDemand)))
    if not found:
        return None
    if len(found) > 1:
        raise UnsupportedError(
            "two passes correct the same linear layers: " + "; ".join(map(str, found)), hint="keep one of them"
        )
    weights = _weight_demand(demands)
    if weights is None or InputStatistic.MOMENTS not in weights.method.demands:
        raise UnsupportedError(
            "correct-low-rank corrects what quantize-weights chose by calibration text, and no pass does that",
            hint="put quantize-weights with method: gptq in front of it, or leave it out",
        )
    return found[0]


def _range_demand(demands: Sequence[Demand]) -> InputRangeDemand | None:
    """Return the one demand for ranges of inputs; None where there is none."""
    ranges = list(dict.fromkeys(demand for demand in demands if isinstance(demand, InputRangeDemand)))
    if len(ranges) > 1:
        raise UnsupportedError(
            f"{len(ranges)} passes round what linear layers read in different ways: " + "; ".join(map(str, ranges)),
            hint="keep one of them, or give them the same `activations`, `smooth` and `alpha`",
        )
    return ranges[0] if ranges else None


def key(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    caches: Mapping[int, Collection[str]] | None,
    threads: int,
    tools: str,
) -> str:
    """Hash all that results depend on: inputs, demands, code and `tools`, the processor and the threads."""
    measured = _measured(caches)
    digest = hashlib.sha256(checkpoint.digest.encode())
    for window in windows:
        digest.update(np.int64(len(window.ids)).tobytes() + window.ids.tobytes())
    digest.update(repr((sorted(map(repr, demands)), measured and sorted(measured), threads)).encode())
    digest.update(tools.encode())
    methods = {type(demand.method).__module__ for demand in demands if isinstance(demand, WeightDemand)}
    digest.update(repr((_code(methods), processor())).encode())
    return digest.hexdigest()


def _code(methods: Collection[str]) -> list[str]:
    """Hash the code of calibration and of `methods`, of which one may be defined in no package at all."""
    code = Code()
    outside = sorted(method for method in methods if not code.has(method))
    sources = [hashlib.sha256(Path(str(sys.modules[method].__file__)).read_bytes()).hexdigest() for method in outside]
    return [code.digest(__name__, *(method for method in methods if code.has(method))), *sources]


def _measured(caches: Mapping[int, Collection[str]] | None) -> set[int] | None:
    """Name the layers that cache keys and values; None where that is not known."""
    return None if caches is None else {layer for layer, parts in caches.items() if "key" in parts}


def _calibrate_layer(
    layer: DecoderLayer,
    original: list[torch.Tensor],
    current: list[torch.Tensor],
    weights: WeightDemand | None,
    taken: Gradients | None,
    threads: int,
    wants_ranges: bool,
    found: LayerResult | None,
    losses: Losses | None = None,
    correction: LowRankDemand | None = None,
) -> LayerResult:
    """Quantize and measure one layer, or take what was `found`, and carry the hidden states through it."""
    linears: dict[str, QuantizedMatrix] = {}
    low_rank: dict[str, LowRankCorrection] = {}
    notes: list[str] = []
    if wants_ranges and found is None:
        layer = layer.recording()
    if weights is not None and found is None:
        linears, low_rank = quantize_layer(layer, original, current, weights, taken, threads, notes, losses, correction)
    else:
        if weights is not None and found is not None:
            for index, state in enumerate(original):
                original[index] = layer.run(index, state)
            corrections = StoredLowRank(found.low_rank)
            for name, matrix in StoredMatrices(found.linears).items():
                layer.set_weight(name, corrected(matrix, corrections.get(name)))
        for index, state in enumerate(current):
            current[index] = layer.run(index, state)
    if not all(bool(torch.isfinite(state).all()) for state in current):
        raise DataError(
            f"{layer.name}: hidden states are NaN or infinite on the calibration text",
            hint="the checkpoint cannot be run in fp32 on this text; check its configuration",
        )
    if found is not None:
        return found
    kv = _ranges(layer, len(current)) if wants_ranges else None
    return LayerResult(linears, kv, notes=tuple(notes), low_rank=low_rank)


def _prune_layer(
    layer: DecoderLayer,
    states: list[torch.Tensor],
    demand: SparsityDemand,
    wants_ranges: bool,
    found: LayerResult | None,
) -> LayerResult:
    """Prune one layer, or take what was `found`, and carry the hidden states through it."""
    notes: list[str] = []
    if found is not None:
        for name, matrix in StoredSparse(found.sparse).items():
            layer.set_weight(name, matrix.dense())
        for index, state in enumerate(states):
            states[index] = layer.run(index, state)
        return found
    layer = layer.recording() if wants_ranges else layer
    pruned = sparsify_layer(layer, states, demand, notes)
    if not all(bool(torch.isfinite(state).all()) for state in states):
        raise DataError(
            f"{layer.name}: hidden states are NaN or infinite on the calibration text",
            hint="the checkpoint cannot be run in fp32 on this text; check its configuration",
        )
    return LayerResult({}, _ranges(layer, len(states)) if wants_ranges else None, notes=tuple(notes), sparse=pruned)


def _ranges(layer: DecoderLayer, windows: int) -> KvRange:
    """Return the largest magnitude of each channel of the keys and values that `layer` has cached last."""
    cached = [layer.cached(window) for window in range(windows)]
    key, value = (torch.stack(peaks).amax(0) for peaks in zip(*cached, strict=True))
    for what, peak in (("key", key), ("value", value)):
        if not bool(torch.isfinite(peak).all() and (peak > 0).all()):
            head, channel = (peak.isfinite() & (peak > 0)).logical_not().nonzero()[0].tolist()
            raise DataError(
                f"{layer.name}: the {what} channel {channel} of KV head {head} ranges to {peak[head, channel]:g} on "
                "the calibration text, so it has no scale",
                hint="use more calibration text, or leave quantize-kv-cache out",
            )
    return KvRange(key.numpy(), value.numpy())

"""The walk over the layers: load one, quantize its linears in order, record its keys and values, run it, drop it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.cache import Code, processor, settings
from llmforge.calibration import mixed, prune
from llmforge.calibration.asked import DemandsByKind, refuse
from llmforge.calibration.carriers import Carriers, Worker
from llmforge.calibration.device import HOST, ExecutionDevice
from llmforge.calibration.gradients import Gradients, take
from llmforge.calibration.layer import DecoderLayer, fast
from llmforge.calibration.pricing import LinearMoments, Losses
from llmforge.calibration.quantize import (
    WeightQuantization,
    corrected,
    groups_of,
    is_coarse,
    quantize_layer,
    quantize_tables,
    sparsify_layer,
    table_moments,
)
from llmforge.calibration.recovery import Recovery
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.spread import Crew, SpreadWindows
from llmforge.calibration.store import LayerResult, Store, StoredArrays, StoredLowRank, StoredMatrices, StoredSparse
from llmforge.calibration.sums import MORE_DAMPING, refusals
from llmforge.calibration.threads import fixed
from llmforge.calibration.windows import LayerWindows, ReadPeaks, WindowsHere
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization import smoothing
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, dequantize
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    Demand,
    InputRange,
    InputRangeDemand,
    KvRange,
    Smoothed,
    Smoothing,
    Statistics,
    WeightDemand,
    exclusion,
)
from llmforge.quantization.structure import PrunedStructure

_NOTHING = LayerResult({}, None)  # of embedding and head, where they are left alone


@dataclass(frozen=True, eq=False)
class _Calibration:
    """A calibration: a checkpoint, the text and what is demanded; how it is computed, and where results are kept."""

    checkpoint: Checkpoint
    windows: Sequence[TokenWindow]
    demands: Sequence[Demand]
    measured: Collection[int] | None  # layers that cache keys and values; None: that is not known
    threads: int
    store: Store
    progress: Progress
    device: ExecutionDevice = HOST
    workers: Callable[[], Sequence[Worker]] | None = None  # that carry windows; None: this process does
    gradients: Path | None = None  # a folder that has them already

    def carried(
        self,
        layer: DecoderLayer,
        index: int,
        original: list[torch.Tensor],
        current: list[torch.Tensor],
        *,
        recording: bool,
    ) -> LayerWindows:
        """Return what carries the windows through layer `index`, which is `recording` what is cached."""
        if self.crew is None:
            return WindowsHere.all(layer, original, current)
        return SpreadWindows.begin(self.crew, index, original, current, recording=recording)

    @cached_property
    def crew(self) -> Crew | None:
        """The workers, which know the windows."""
        if self.workers is None:
            return None
        refuse(
            self.asked.pruning is not None or self.asked.sparsity is not None,
            "workers of calibration do not carry windows through layers that are pruned",
            "leave --calibration-workers out",
        )
        return Crew.of(self.workers(), self.checkpoint, [window.ids for window in self.windows])

    @cached_property
    def asked(self) -> DemandsByKind:
        """The demands, of each kind one."""
        return DemandsByKind.of(self.demands)

    def figures(self, kind: str, demand: Demand, compute: Callable[[], Any]) -> Any:
        """Return figures of a `kind` for one demand, computed now or by an earlier calibration."""
        tools, device = self.store.tools, str(self.device.device)
        own = key(self.checkpoint, self.windows, [demand], None, self.threads, tools, device)
        return self.store.figures(kind, own, compute)


def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    *,
    threads: int = 1,
    caches: Mapping[int, Collection[str]] | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
    carriers: Carriers | None = None,
) -> Statistics:
    """Serve `demands` from a run of `checkpoint` over `windows`, in fp32, on as many `threads`.

    `caches` says what each layer caches (key, value, conv, recurrent); by default keys and values. Ranges are measured
    where it is keys and values.

    Ranges of what linears read are those of the checkpoint's own weights.
    Linears and experts are quantized in the order in which they run, each with the inputs that the quantized ones
    before it make; ranges of keys and values are those that the quantized weights make. Memory: the embedding while the
    windows enter, then the fp32 weights of one layer and the hidden states of all windows; where weights are quantized,
    the hidden states twice, the inputs of the layer's linears and experts, what its runs hold where they wait, of each
    thread the sums of one share of the windows, K × K in fp32, and one Hessian with its factor, K × K in fp64. Results
    of each layer are kept in `store` when it is done, and found there by a later call that asks for the same; where all
    are found, nothing is run. The hidden states in front of the next layer are kept there until all are done, so that a
    call that was killed goes on at the first layer that is lacking.

    `carriers` say what carries the windows through the layers: a device, or workers that are started where a layer is
    lacking. To workers, hidden states go and come back, and sums come, by share. This process still takes gradients and
    chooses codes, and holds the sums of all shares of one tensor. On a device the layers run, gradients are taken and
    sums made; it chooses no codes. What is resident there: `residency`.

    Two runs on one machine, on the CPU, with as many `threads`, give identical results, whatever threads the process
    has, and however many workers. Another device rounds sums otherwise.

    Raises:
        DataError: `windows` are empty, or make activations that cannot be calibrated on: NaN, or a key or value channel
            that is always 0.
        UnsupportedError: the architecture cannot be run layer by layer; two demands contradict each other.
        EnvironmentLacks: there is no such device, or it has not enough memory.
    """
    if not windows:
        raise DataError("the calibration data has no text")
    carriers = carriers or Carriers()
    device = ExecutionDevice.of(carriers.device)
    store, progress, recovery = store or Store(), progress or Silent(), DemandsByKind.of(demands).recovery
    if recovery is not None:
        own = key(checkpoint, windows, demands, caches, threads, store.tools, str(device.device))
        others = [each for each in demands if each != recovery]
        found = calibrate(
            checkpoint,
            windows,
            others,
            threads=threads,
            caches=caches,
            store=store,
            progress=progress,
            carriers=carriers,
        )
        training = Recovery(checkpoint, windows, found, recovery, replace(store, reused=[]), own)
        with torch.no_grad(), fixed(threads):
            return training.run(progress)
    with ExitStack() as stack:
        workers = carriers.workers
        started = workers and cache(lambda: stack.enter_context(workers()))
        run = _Calibration(checkpoint, windows, demands, _measured(caches), threads, store, progress, device, started)
        run, pruned = _with_structure(run)
        run, formats = _with_formats(run, stack)
        done = _layers(run, key(checkpoint, windows, run.demands, caches, threads, store.tools, str(device.device)))
    notes, pruning = (*pruned, *formats), run.asked.pruning
    linears = StoredMatrices(dict(item for result in done for item in result.linears.items()))
    return Statistics(
        samples=len(windows),
        tokens=sum(len(window.ids) for window in windows),
        linears=linears,
        grids=linears.grids(),
        kv={index: result.kv for index, result in enumerate(done[1:]) if result.kv is not None},
        notes=(*device.notes, *notes, *(note for result in done for note in result.notes)),
        inputs={name: peak for result in done for name, peak in result.inputs.items()},
        sparse=StoredSparse({name: matrix for result in done for name, matrix in result.sparse.items()}),
        low_rank=StoredLowRank({name: each for result in done for name, each in result.low_rank.items()}),
        kept=None if pruning is None else pruning.kept,
        pruned=StoredArrays({name: each for result in done for name, each in result.pruned.items()}),
    )


def _layers(run: _Calibration, own: str) -> list[LayerResult]:
    """Find or make the results of embedding and head, and of each layer, of the calibration `own`."""
    store, layers, weights = run.store, run.checkpoint.geometry.layers, run.asked.weights
    found = [store.load(own, index) for index in range(layers)]
    if store.reused:  # before those of embedding and head
        run.progress.stage(f"Calibrate: {numbered(store.reused, layers)} reused")
    tables: LayerResult | None = _NOTHING
    if run.asked.channels or (weights is not None and weights.tables is not None):
        tables = store.load(own, layers)
        store.reused[:] = [index for index in store.reused if index < layers]  # which are told as layers
    if None in found or tables is None:
        with torch.no_grad(), fixed(run.threads):
            return _walk(run, found, tables, own)
    return [tables, *(result for result in found if result is not None)]


def _with_structure(run: _Calibration) -> tuple[_Calibration, tuple[str, ...]]:
    """Choose what is left of the decoder where a demand prunes it: a run that says it, and notes for the report."""
    demand = run.asked.pruning
    if demand is None or demand.kept is not None:
        return run, ()

    def compute() -> dict[str, Any]:
        run.progress.stage("Choose what to prune")
        with torch.no_grad(), fixed(run.threads):
            kept, note = prune.choose(run.checkpoint, run.windows, demand)
        return {**asdict(kept), "note": note}

    found = run.figures("structure", demand, compute)
    heads, channels = (
        tuple((layer, tuple(units)) for layer, units in found[kind]) for kind in (prune.HEADS, prune.CHANNELS)
    )
    chosen = replace(demand, kept=PrunedStructure(tuple(found["dropped"]), heads, channels))
    return replace(run, demands=[chosen if each == demand else each for each in run.demands]), (found["note"],)


def _with_formats(run: _Calibration, stack: ExitStack) -> tuple[_Calibration, tuple[str, ...]]:
    """Choose formats where a demand limits bytes or loss: a run that says which, and notes for the report.

    Gradients that are taken for it are in the run, and last as long as `stack`.
    """
    weights = run.asked.weights
    if weights is None or not weights.is_limited:
        return run, ()
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="llmforge-gradients-")))

    def compute() -> dict[str, Any]:
        run.progress.stage("Choose formats of weights")
        with torch.no_grad(), fixed(run.threads):
            skeleton = Skeleton.build(run.checkpoint, run.device)
            price = partial(_price, run, skeleton, weights, folder)
            chosen, note = mixed.choose(skeleton, run.windows, weights, price, run.figures, run.threads)
        run.progress.stage("Calibrate")
        grids = {name: asdict(grid) for name, grid in chosen.mixed}
        return {"mixed": grids, "tables": chosen.tables and asdict(chosen.tables), "note": note}

    found = run.figures("formats", weights, compute)
    chosen = replace(
        weights.unlimited,
        mixed=tuple((name, Grid(**grid)) for name, grid in found["mixed"].items()),
        tables=found["tables"] and Grid(**found["tables"]),
    )
    demands = [chosen if each == weights else each for each in run.demands]
    taken = folder if any(folder.iterdir()) else None
    return replace(run, demands=demands, gradients=taken), (found["note"],)


def _price(run: _Calibration, skeleton: Skeleton, demand: WeightDemand, folder: Path, losses: Losses) -> None:
    """Price formats of weights while gradients are taken, which are put to `folder`."""
    assert isinstance(demand.method, Gptq)
    damping = demand.method.damping

    def price(layer: DecoderLayer, state: torch.Tensor, moments: Mapping[str, LinearMoments]) -> None:
        groups = [names for names in groups_of(layer, state, demand) if all(name in moments for name in names)]
        losses.kept.update(set(moments) - {name for names in groups for name in names})
        for names in groups:
            with refusals(names[0], f"method {demand.method.name}", MORE_DAMPING):
                losses.measure(
                    names, [layer.weight(name) for name in names], [moments[name] for name in names], damping
                )

    calls, states = skeleton.enter([window.ids for window in run.windows])
    with run.device.over_windows(run.threads) as each:
        take(skeleton, [window.ids for window in run.windows], calls, states, folder, price, each=each)
    if demand.tables is not None:
        for name, hessian in table_moments(skeleton, Gradients.read(folder), demand).items():
            if hessian is not None:
                losses.measure_table(name, skeleton.table(name), hessian, damping)


def _walk(
    run: _Calibration, found: Sequence[LayerResult | None], tables: LayerResult | None, own: str
) -> list[LayerResult]:
    """Carry the windows through the layers, and quantize and measure those that were not `found`, nor the `tables`.

    They begin where the store has the hidden states of the calibration `own`, in front of what is lacking.
    Returns results of the embedding and head, and of each layer.
    """
    store, weights, pruning = run.store, run.asked.weights, run.asked.pruning
    ids = [window.ids for window in run.windows]
    skeleton = Skeleton.build(run.checkpoint, run.device)
    device = skeleton.device = run.device.fitting(skeleton.widths, list(map(len, ids)))
    # Hidden states of every window in front of a layer, as the checkpoint makes them and as quantized layers do.
    calls, original = skeleton.enter(ids)
    entered = list(original)
    current = list(original) if weights else original
    sides = (original, current) if weights else (original,)
    shapes = [tuple(state.shape) for side in sides for state in side]
    lacking = 0 if tables is None else next((i for i, each in enumerate(found) if each is None), 0)
    begin = _resume(store.states(own, lacking, shapes), sides)
    keeps = store.keeps_states(sum(state.nbytes for side in sides for state in side))
    done = [result for result in found[:begin] if result is not None]
    with ExitStack() as stack:
        each = stack.enter_context(device.over_windows(run.threads))
        how = None
        if weights is not None:
            taken = None
            if weights.method.demands_outputs:
                write = partial(take, skeleton, ids, calls, entered, each=each)
                taken = Gradients.read(run.gradients or store.gradients(own, write, stack))
            how = WeightQuantization(weights, taken, run.threads, run.asked.correction)
        if tables is None:
            tables = _NOTHING
            if how is not None:
                said: list[str] = []
                matrices = quantize_tables(skeleton, how.gradients, how.demand, run.threads, said)
                tables = LayerResult(matrices, None, notes=tuple(said))
            if not run.asked.channels:
                tables = store.save(own, len(found), tables)
        embedding = StoredMatrices(tables.linears).get(skeleton.tables()[0])
        if embedding is not None and begin == 0:
            current[:] = skeleton.enter(ids, dequantize(embedding))[1]
        device.rest_all(sides)
        dropped = {index for index in range(begin, len(found)) if pruning is not None and pruning.drops(index)}
        layers = skeleton.stream((index for index in range(begin, len(found)) if index not in dropped), calls)
        for index, kept in enumerate(found[begin:], begin):
            run.progress.advance(index, len(found))
            if index in dropped:
                done.append(kept or store.save(own, index, _NOTHING))
                continue
            made = _run_layer(run, replace(next(layers), each=each), index, original, current, how, kept)
            done.append(kept or store.save(own, index, made))
            if keeps and index + 1 < len(found):
                store.keep_states(own, index + 1, (state.cpu().numpy() for side in sides for state in side))
    if run.asked.channels and not tables.inputs:
        tables = store.save(own, len(found), replace(tables, inputs=measure_head(skeleton, ids, original)))
    store.drop_states(own, len(found) - 1)
    store.drop_gradients(own)
    run.progress.advance(len(found), len(found))
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
    asked = DemandsByKind.of(demands)
    weights, pruning = asked.weights, asked.pruning
    if pruning is not None and pruning.structure is not None:
        prune.require(pruning, checkpoint.geometry.layers)
    if asked.correction is not None and weights is not None and weights.is_limited:
        raise UnsupportedError(
            "correct-low-rank adds to the bytes that method: auto is to keep to",
            hint="leave it out and give `auto` its bits, which they buy more with; or choose another method",
        )
    for layer, parts in caches.items():
        if asked.kv and "key" in parts and len(parts) > 2:
            others = ", ".join(sorted(set(parts) - {"key", "value"}))
            raise UnsupportedError(
                f"{checkpoint.path}: the ranges of keys and values cannot be calibrated: layer {layer} caches {others} "
                "besides them",
                hint="leave quantize-kv-cache out",
            )
    skeleton = Skeleton.build(checkpoint)
    if weights is None:
        return {}
    grids = {name: weights.grid_of([name], _width(skeleton, name)) for name in skeleton.matrices()}
    if weights.tables is not None:
        for name in filter(None, skeleton.tables()):
            if grid := weights.table_grid(name, skeleton.model.get_parameter(name).shape[1]):
                grids[name] = grid
    return {name: grid for name, grid in grids.items() if not exclusion([name], weights.exclude)}


def _width(skeleton: Skeleton, name: str) -> int:
    """Count the input features of a linear; 0: it is none, but experts."""
    shape = skeleton.model.get_parameter(name).shape
    return int(shape[1]) if len(shape) == 2 else 0


def key(
    checkpoint: Checkpoint,
    windows: Sequence[TokenWindow],
    demands: Sequence[Demand],
    caches: Mapping[int, Collection[str]] | None,
    threads: int,
    tools: str,
    device: str = "cpu",
) -> str:
    """Hash all that results depend on: inputs, demands, code and `tools`, processor, settings and threads.

    `device` names the one that layers run on.
    """
    measured = _measured(caches)
    digest = hashlib.sha256(checkpoint.digest.encode())
    for window in windows:
        digest.update(np.int64(len(window.ids)).tobytes() + window.ids.tobytes())
    digest.update(repr((sorted(map(repr, demands)), measured and sorted(measured), threads)).encode())
    digest.update(tools.encode())
    methods = {type(demand.method).__module__ for demand in demands if isinstance(demand, WeightDemand)}
    other = filter(None, [ExecutionDevice.of(device).identity])
    digest.update(repr((_code(methods), processor(), settings(), *other)).encode())
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


def _run_layer(
    run: _Calibration,
    layer: DecoderLayer,
    index: int,
    original: list[torch.Tensor],
    current: list[torch.Tensor],
    how: WeightQuantization | None,
    found: LayerResult | None,
) -> LayerResult:
    """Prune, quantize and measure layer `index`, or take what was `found`, and carry the hidden states through it."""
    asked, pruned = run.asked, dict[str, Float32]()
    if asked.pruning is not None:
        known = None if found is None else StoredArrays(found.pruned)
        layer, pruned = prune.prune_layer(layer, index, original, asked.pruning, known)
    if found is not None:
        coarse = how is not None and is_coarse(layer, how.demand)
        with fast(layer.linears().values()) if coarse else nullcontext():  # as it ran first
            _repeat_layer(layer, original if how is not None else None, current, found)
        _check(layer, current)
        return found
    made, inputs, kv = _NOTHING, dict[str, InputRange](), None
    wants_ranges = asked.kv and (run.measured is None or index in run.measured)
    layer = layer.recording() if wants_ranges else layer
    with closing(run.carried(layer, index, original, current, recording=wants_ranges)) as windows:
        if asked.ranges is not None:
            inputs = measure_inputs(layer, windows, asked.ranges, experts=asked.experts)
        if asked.sparsity is not None:
            made = sparsify_layer(layer, current, asked.sparsity)
        elif how is not None:
            made = quantize_layer(layer, windows, how)
        else:
            windows.end()
        _check(layer, current)
        if wants_ranges:
            kv = _ranges(layer, windows)
    return replace(made, kv=kv, inputs=inputs, pruned=pruned)


def _check(layer: DecoderLayer, states: Sequence[torch.Tensor]) -> None:
    """Raise DataError unless hidden states after `layer` are finite."""
    if not all(bool(torch.isfinite(state).all()) for state in states):
        raise DataError(
            f"{layer.name}: hidden states are NaN or infinite on the calibration text",
            hint="the checkpoint cannot be run in fp32 on this text; check its configuration",
        )


def _repeat_layer(
    layer: DecoderLayer, original: list[torch.Tensor] | None, current: list[torch.Tensor], found: LayerResult
) -> None:
    """Carry the hidden states through a layer whose weights were `found`; `original` through those it came with."""
    if original is not None:
        layer.advance(original)
    corrections = StoredLowRank(found.low_rank)
    for name, matrix in StoredMatrices(found.linears).items():
        layer.set_weight(name, corrected(matrix, corrections.get(name)))
    for name, sparse in StoredSparse(found.sparse).items():
        layer.set_weight(name, sparse.dense())
    layer.advance(current)


def _ranges(layer: DecoderLayer, windows: LayerWindows) -> KvRange:
    """Return the largest magnitude of each channel of the keys and values that `layer` has cached last."""
    key, value = (torch.stack(peaks).amax(0) for peaks in zip(*windows.cached(), strict=True))
    for what, peak in (("key", key), ("value", value)):
        if not bool(torch.isfinite(peak).all() and (peak > 0).all()):
            head, channel = (peak.isfinite() & (peak > 0)).logical_not().nonzero()[0].tolist()
            raise DataError(
                f"{layer.name}: the {what} channel {channel} of KV head {head} ranges to {peak[head, channel]:g} on "
                "the calibration text, so it has no scale",
                hint="use more calibration text, or leave quantize-kv-cache out",
            )
    return KvRange(key.numpy(), value.numpy())


def measure_inputs(
    layer: DecoderLayer, windows: LayerWindows, demand: InputRangeDemand, *, experts: bool = False
) -> dict[str, InputRange]:
    """Return the ranges of what each linear, and `experts`, of `layer` read, by parameter.

    Linears that read one tensor have one range, and one choice of factors. `windows` stay in front of the layer.
    """
    there, states = layer.experts(), windows.original
    groups = [[name for name in group if name not in there] for group in layer.groups(states[0])]
    groups = [group for group in groups if group]
    seen: dict[str, list[ReadPeaks]] = {group[0]: [] for group in groups}
    stride = -(-sum(state.shape[1] for state in states) // smoothing.TOKENS) if demand.smoothing is not None else 0
    for of_window in windows.peaks([*seen, *(there if experts else ())], stride):
        for name, read in of_window.items():
            seen.setdefault(name, []).append(read)
    found: dict[str, InputRange] = {}
    for group in groups:
        own, smoothed = input_range(seen[group[0]]), None
        if demand.smoothing is not None:
            some = torch.cat([read.rows for read in seen[group[0]] if read.rows is not None]).numpy()
            smoothed = _smoothed(some, own.peaks, [layer.weight(name) for name in group], demand.smoothing)
        found |= dict.fromkeys(group, replace(own, smoothed=smoothed))
    return found | {name: input_range(read) for name, read in seen.items() if name not in found}


def input_range(seen: Sequence[ReadPeaks]) -> InputRange:
    """Join what was seen of each window, in their order."""
    highest = torch.stack([read.highest for read in seen]).amax(0).numpy()
    sums, squares = (
        torch.stack(each).sum(0).numpy() for each in zip(*((r.sums, r.squares) for r in seen), strict=True)
    )
    return InputRange(highest, None, sums, squares, sum(read.tokens for read in seen))


def measure_head(
    skeleton: Skeleton, windows: Sequence[NDArray[np.int64]], states: Sequence[torch.Tensor]
) -> dict[str, InputRange]:
    """Return the range of what the head reads, by its parameter; `states` are those behind the layers, of each window.

    {}: it is no linear.
    """
    _, head = skeleton.tables()
    if not head:
        return {}
    leave = skeleton.leaving(windows, np.zeros((1, skeleton.table(head).shape[1]), np.float32))  # nobody reads logits
    read = [leave(window, state)[1] for window, state in enumerate(states)]
    return {head: input_range([ReadPeaks.of(x[0], 0, 0) for x in read if x is not None])}


def _smoothed(x: Float32, peaks: Float32, weights: Sequence[Float32], wanted: Smoothing) -> Smoothed | None:
    """Choose factors; None where numbers are not finite, which the pass that rounds them says."""
    return smoothing.choose(x, peaks, weights, wanted) if np.isfinite(peaks).all() else None

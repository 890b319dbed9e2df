"""The walk over the layers: load one, quantize its linears in order, record its keys and values, run it, drop it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from llmforge import quantization
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.quantize import quantize_layer
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import LayerResult, Store, StoredMatrices
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import QuantizedMatrix, dequantize
from llmforge.quantization.statistics import Demand, InputRangeDemand, KvRange, KvRangeDemand, Statistics, WeightDemand
from llmforge.trace.export import weights as stored_weights
from llmforge.trace.hooks import experts

_TOOLS = ("numpy", "torch", "transformers")  # whose versions move the last bits of what they compute


def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    demands: Sequence[Demand],
    *,
    threads: int = 1,
    caches: Mapping[int, Collection[str]] | None = None,
    folder: Path | None = None,
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
    fp64. With `folder` the results of each layer are written there when it is done, and found there by a later call
    that asks for the same.

    Two runs on one machine, with as many `threads`, give identical results, whatever threads the process has.

    Raises:
        DataError: `windows` are empty, or make activations that cannot be calibrated on: NaN, or a key or value channel
            that is always 0.
        UnsupportedError: the architecture cannot be run layer by layer; two demands contradict each other.
    """
    with torch.inference_mode(), fixed(threads):
        return _walk(checkpoint, windows, demands, threads, caches, folder, progress or Silent())


def _walk(
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    demands: Sequence[Demand],
    threads: int,
    caches: Mapping[int, Collection[str]] | None,
    folder: Path | None,
    progress: Progress,
) -> Statistics:
    """Carry hidden states through one layer after the other: see `calibrate`."""
    weights = _weight_demand(demands)
    measured = None if caches is None else {layer for layer, parts in caches.items() if "key" in parts}
    if not windows:
        raise DataError("the calibration data has no text")
    skeleton = Skeleton.build(checkpoint)
    # Hidden states of every window in front of a layer, as the checkpoint makes them and as quantized layers do.
    calls, original = skeleton.enter([window.ids for window in windows])
    current = list(original) if weights else original
    store = Store(folder, _key(checkpoint, windows, demands, measured, threads))
    done: list[LayerResult] = []
    for index in range(len(skeleton.layers)):
        progress.advance(index, len(skeleton.layers))
        layer = skeleton.load(index, calls[index])
        found = store.load(index)
        ranges = KvRangeDemand() in demands and (measured is None or index in measured)
        inputs = {} if found or InputRangeDemand() not in demands else _input_ranges(layer, original)
        result = _calibrate_layer(layer, original, current, weights, ranges, found)
        done.append(result if found else store.save(index, replace(result, inputs=inputs)))
    progress.advance(len(skeleton.layers), len(skeleton.layers))
    return Statistics(
        samples=len(windows),
        tokens=sum(len(window.ids) for window in windows),
        linears=StoredMatrices(dict(item for result in done for item in result.linears.items())),
        kv={index: result.kv for index, result in enumerate(done) if result.kv is not None},
        inputs={name: peak for result in done for name, peak in result.inputs.items()},
    )


def plan(checkpoint: Checkpoint, demands: Sequence[Demand], caches: Mapping[int, Collection[str]]) -> frozenset[str]:
    """Name the weights of linears and experts that `calibrate` would quantize, without reading a weight.

    Raises:
        UnsupportedError: as far as that can be known without weights, calibration cannot serve `demands`.
    """
    weights = _weight_demand(demands)
    for layer, parts in caches.items():
        if KvRangeDemand() in demands and "key" in parts and len(parts) > 2:
            others = ", ".join(sorted(set(parts) - {"key", "value"}))
            raise UnsupportedError(
                f"{checkpoint.path}: the ranges of keys and values cannot be calibrated: layer {layer} caches {others} "
                "besides them",
                hint="leave quantize-kv-cache out",
            )
    names = Skeleton.build(checkpoint).matrices()
    if weights is None:
        return frozenset()
    return frozenset(name for name in names if not exclusion([name], weights.exclude))


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


def _key(
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    demands: Sequence[Demand],
    measured: Collection[int] | None,
    threads: int,
) -> str:
    """Hash all that results depend on: inputs, demands, versions of tools, and the source of the arithmetic."""
    digest = hashlib.sha256(checkpoint.digest.encode())
    for window in windows:
        digest.update(np.int64(len(window.ids)).tobytes() + window.ids.tobytes())
    digest.update(repr((sorted(map(repr, demands)), measured and sorted(measured), threads)).encode())
    digest.update(repr([(tool, version(tool)) for tool in _TOOLS]).encode())
    methods = {inspect.getfile(type(demand.method)) for demand in demands if isinstance(demand, WeightDemand)}
    rooms = (Path(__file__).parent, Path(inspect.getfile(quantization)).parent)
    sources = [*sorted(methods), inspect.getfile(experts), inspect.getfile(stored_weights)]
    for source in [*(path for room in rooms for path in sorted(room.rglob("*.py"))), *map(Path, sources)]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _calibrate_layer(
    layer: DecoderLayer,
    original: list[torch.Tensor],
    current: list[torch.Tensor],
    weights: WeightDemand | None,
    wants_ranges: bool,
    found: LayerResult | None,
) -> LayerResult:
    """Quantize and measure one layer, or take what was `found`, and carry the hidden states through it."""
    linears: dict[str, QuantizedMatrix] = {}
    if weights is not None:
        if found is None:
            linears = quantize_layer(layer, original, current, weights)
        else:
            for index, state in enumerate(original):
                original[index] = layer.run(index, state)
            for name, matrix in StoredMatrices(found.linears).items():
                layer.set_weight(name, dequantize(matrix))
    kv = None
    if wants_ranges and found is None:
        kv = _run_with_ranges(layer, current)
    else:
        for index, state in enumerate(current):
            current[index] = layer.run(index, state)
    if not all(bool(torch.isfinite(state).all()) for state in current):
        raise DataError(
            f"{layer.name}: hidden states are NaN or infinite on the calibration text",
            hint="the checkpoint cannot be run in fp32 on this text; check its configuration",
        )
    return found or LayerResult(linears, kv)


def _input_ranges(layer: DecoderLayer, states: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the largest magnitude that each linear of `layer` reads; `states` stay in front of it."""
    experts = layer.experts()
    names = [name for group in layer.groups(states[0]) for name in group if name not in experts]
    ranges = dict.fromkeys(names, 0.0)
    for window, state in enumerate(states):
        for name, x in layer.run_with_inputs(names, window, state)[1].items():
            ranges[name] = max(ranges[name], float(x.abs().max()))
    return ranges


def _run_with_ranges(layer: DecoderLayer, states: list[torch.Tensor]) -> KvRange:
    """Carry `states` through `layer` and return the largest magnitude of each channel of its keys and values."""
    cached: list[tuple[torch.Tensor, torch.Tensor]] = []
    for window, state in enumerate(states):
        states[window], peaks = layer.run_with_ranges(window, state)
        cached.append(peaks)
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

"""The walk over the layers: load one, quantize its linears in order, record its keys and values, run it, drop it."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from llmforge import quantization
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.calibration import experts as of_experts
from llmforge.calibration.layer import Layer
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import LayerResult, Results, Store
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.quantization import gptq
from llmforge.quantization.statistics import Demand, InputRangeDemand, KvRange, KvRangeDemand, Statistics, WeightDemand
from llmforge.trace.export import weights as sources
from llmforge.trace.hooks import experts

_TOOLS = ("numpy", "torch", "transformers")  # whose versions move the last bits of what they compute


@dataclass
class _States:
    """Hidden states of every window, fp32 [1, tokens, hidden], in front of the same layer.

    `original` are those of the checkpoint, `current` those that quantized layers made; the same list where no layer is
    quantized.
    """

    original: list[torch.Tensor]
    current: list[torch.Tensor]


@torch.inference_mode()
def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    demands: Sequence[Demand],
    *,
    caches: Mapping[int, Collection[str]] | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Serve `demands` from a run of `checkpoint` over `windows`, in fp32.

    `caches` says what each layer caches (key, value, conv, recurrent); by default keys and values. Ranges are measured
    where it is keys and values.

    Ranges of what linears read are those of the checkpoint's own weights.
    Linears and experts are quantized in the order in which they run, each with the inputs that the quantized ones
    before it make; ranges of keys and values are those that the quantized weights make. Memory: the embedding while the
    windows enter, then the fp32 weights of one layer and the hidden states of all windows; where weights are quantized,
    the hidden states twice, the inputs of the layer's linears and experts, and one Hessian with its factor, K × K in
    fp64. With `folder` the results of each layer are written there when it is done, and found there by a later call
    that asks for the same.

    Two runs on one machine, with as many threads, give identical results.

    Raises:
        DataError: `windows` are empty, or make activations that cannot be calibrated on: NaN, or a key or value channel
            that is always 0.
        UnsupportedError: the architecture cannot be run layer by layer; two demands contradict each other.
    """
    weights, wants_ranges = _sort(demands)
    wants_inputs = any(isinstance(demand, InputRangeDemand) for demand in demands)
    measured = None if caches is None else {layer for layer, parts in caches.items() if "key" in parts}
    if not windows:
        raise DataError("calibration has no text")
    progress = progress or Silent()
    skeleton = Skeleton.build(checkpoint)
    calls, entering = skeleton.enter([window.ids for window in windows])
    store = Store.open(folder, _key(checkpoint, windows, demands, measured))
    states = _States(entering, list(entering) if weights else entering)
    done: list[LayerResult] = []
    for index in range(len(skeleton.layers)):
        progress.advance(index, len(skeleton.layers))
        layer = skeleton.load(index, calls[index])
        found = store.load(index)
        ranges = wants_ranges and (measured is None or index in measured)
        inputs = found.inputs if found else _peaks_of_inputs(layer, states.original) if wants_inputs else {}
        result = replace(_calibrate_layer(layer, states, weights, ranges, found), inputs=inputs)
        done.append(result if found else store.save(index, result))
    progress.advance(len(skeleton.layers), len(skeleton.layers))
    return Statistics(
        samples=len(windows),
        tokens=sum(len(window.ids) for window in windows),
        linears=Results(done),
        kv={index: result.kv for index, result in enumerate(done) if result.kv is not None},
        inputs={name: peak for result in done for name, peak in result.inputs.items()},
    )


def plan(checkpoint: Checkpoint, demands: Sequence[Demand], caches: Mapping[int, Collection[str]]) -> frozenset[str]:
    """Name the weights of linears and experts that `calibrate` would quantize, without reading a weight.

    Raises:
        UnsupportedError: as far as that can be known without weights, calibration cannot serve `demands`.
    """
    weights, wants_ranges = _sort(demands)
    for layer, parts in caches.items():
        if wants_ranges and "key" in parts and len(parts) > 2:
            others = ", ".join(sorted(set(parts) - {"key", "value"}))
            raise UnsupportedError(
                f"{checkpoint.path}: the ranges of keys and values cannot be calibrated: layer {layer} caches {others} "
                "besides them",
                hint="leave quantize-kv-cache out",
            )
    names = Skeleton.build(checkpoint).matrices()
    if weights is None:
        return frozenset()
    return frozenset(n for n in names if not any(fnmatch.fnmatchcase(n, glob) for glob in weights.exclude))


def _sort(demands: Sequence[Demand]) -> tuple[WeightDemand | None, bool]:
    """Return the one demand for weights, and whether ranges of keys and values are wanted."""
    weights = list(dict.fromkeys(demand for demand in demands if isinstance(demand, WeightDemand)))
    if len(weights) > 1:
        raise UnsupportedError(
            f"{len(weights)} passes quantize the same linears with calibration, each with options of its own: "
            + "; ".join(str(demand) for demand in weights),
            hint="keep one of them",
        )
    return (weights[0] if weights else None), any(isinstance(demand, KvRangeDemand) for demand in demands)


def _key(
    checkpoint: Checkpoint, windows: Sequence[Window], demands: Sequence[Demand], measured: Collection[int] | None
) -> str:
    """Hash all that results depend on: inputs, demands, versions of tools, and the source of the arithmetic."""
    digest = hashlib.sha256(checkpoint.digest.encode())
    for window in windows:
        digest.update(np.int64(len(window.ids)).tobytes() + window.ids.tobytes())
    digest.update(repr((sorted(map(repr, demands)), measured and sorted(measured))).encode())
    digest.update(repr([(tool, version(tool)) for tool in _TOOLS]).encode())
    here = Path(__file__).parent
    others = (gptq, quantization, experts, sources)
    for source in [*sorted(here.glob("*.py")), *(Path(str(module.__file__)) for module in others)]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _calibrate_layer(
    layer: Layer, states: _States, weights: WeightDemand | None, wants_ranges: bool, found: LayerResult | None
) -> LayerResult:
    """Quantize and measure one layer, or take what was `found`, and carry the hidden states through it."""
    linears = {} if found is None else dict(found.linears)
    if weights is not None:
        if found is None:
            linears = _quantize(layer, states, weights)
        else:
            for index, state in enumerate(states.original):
                states.original[index] = layer.run(index, state)
            for name, matrix in linears.items():
                layer.set_weight(name, quantization.dequantize(matrix))
    kv = None if found is None else found.kv
    if wants_ranges and kv is None:
        kv = _run_with_ranges(layer, states.current)
    else:
        for index, state in enumerate(states.current):
            states.current[index] = layer.run(index, state)
    if not all(bool(torch.isfinite(state).all()) for state in states.current):
        raise DataError(
            f"{layer.name}: the calibration text makes NaN or infinite hidden states",
            hint="the checkpoint cannot be run in fp32 on this text; check its configuration",
        )
    return LayerResult(linears, kv)


def _quantize(layer: Layer, states: _States, demand: WeightDemand) -> dict[str, quantization.QuantizedMatrix]:
    """Quantize the linears and experts of `layer` in place, in the order they run.

    The original hidden states end behind the layer; the current ones stay in front of it.
    """
    groups = _wanted(layer, states.current[0], demand)
    originals: list[dict[str, torch.Tensor]] = []
    for index, state in enumerate(states.original):
        states.original[index], inputs = layer.run_noting([group[0] for group in groups], index, state)
        originals.append(inputs)
    results: dict[str, quantization.QuantizedMatrix] = {}
    for names in groups:
        if names[0] in layer.experts():
            results |= _quantize_experts(layer, states.current, [x.pop(names[0]) for x in originals], names[0], demand)
            continue
        hessian, drift = _input_statistics(layer, states.current, [x.pop(names[0]) for x in originals], names[0])
        weights = [layer.weight(name) for name in names]
        try:
            curvature = gptq.Curvature.of(hessian, demand.damping)
            matrix = gptq.gptq(np.concatenate(weights), curvature, demand.grid, drift)
        except (ValueError, np.linalg.LinAlgError) as error:
            raise _no_gptq(names[0], error) from error
        end = 0
        for name, weight in zip(names, weights, strict=True):
            start, end = end, end + len(weight)
            results[name] = quantization.rows(matrix, start, end)
            layer.set_weight(name, quantization.dequantize(results[name]))
    return results


def _wanted(layer: Layer, state: torch.Tensor, demand: WeightDemand) -> list[list[str]]:
    """Name what is to be quantized in the order in which it runs, linears that read the same together."""
    groups = layer.groups(state)
    stays = set() if demand.routers else layer.routers(groups, state)
    for group in groups:
        for name in group:
            parameters = _matrices(layer, name)
            if any(fnmatch.fnmatchcase(parameter, glob) for glob in demand.exclude for parameter in parameters):
                stays.add(name)
    kept = [[name for name in group if name not in stays] for group in groups]
    return [group for group in kept if group]


def _matrices(layer: Layer, name: str) -> list[str]:
    """Name the parameters that are quantized of a linear, which it names itself, or of experts."""
    module = layer.experts().get(name)
    return [name] if module is None else [f"{name}.{parameter}" for parameter in of_experts.matrices(module)]


def _quantize_experts(
    layer: Layer, states: Sequence[torch.Tensor], originals: Sequence[torch.Tensor], name: str, demand: WeightDemand
) -> dict[str, quantization.QuantizedMatrix]:
    """Quantize the experts `name` in place; nothing where no kernel has a grid for their widths."""
    module = layer.experts()[name]
    grid = demand.grid.fitting(*of_experts.widths(module))
    if grid is None:
        return {}
    given = [layer.given_to(name, index, state) for index, state in enumerate(states)]
    tokens, ids, mixing = (torch.cat(parts) for parts in zip(*given, strict=True))
    seen = of_experts.Seen(tokens, ids, mixing, torch.cat(list(originals)))
    try:
        matrices = of_experts.quantize(module, seen, grid, demand.damping)
    except (ValueError, np.linalg.LinAlgError) as error:
        raise _no_gptq(name, error) from error
    results = dict(zip(_matrices(layer, name), matrices, strict=True))
    for parameter, matrix in results.items():
        layer.set_weight(parameter, quantization.dequantize(matrix))
    return results


def _no_gptq(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name}: its inputs over the calibration text do not allow GPTQ: {error}",
        hint="give more, or other, calibration text, more damping, or use method: rtn",
    )


def _input_statistics(
    layer: Layer, states: Sequence[torch.Tensor], originals: Sequence[torch.Tensor], name: str
) -> tuple[quantization.Float32, quantization.Float32]:
    """Sum Σ x xᵀ and Σ (x̃ - x) xᵀ, fp32 [K, K], over the inputs x of linear `name`; x̃ are `originals` [tokens, K]."""
    width = originals[0].shape[1]
    hessian, drift = torch.zeros(width, width), torch.zeros(width, width)
    for index, (state, original) in enumerate(zip(states, originals, strict=True)):
        x = layer.input_of(name, index, state)
        hessian.addmm_(x.T, x)
        drift.addmm_((original - x).T, x)
    return hessian.numpy(), drift.numpy()


def _peaks_of_inputs(layer: Layer, states: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the largest magnitude that each linear of `layer` reads; `states` stay in front of it."""
    experts = layer.experts()
    names = [name for group in layer.groups(states[0]) for name in group if name not in experts]
    peaks = dict.fromkeys(names, 0.0)
    for index, state in enumerate(states):
        for name, x in layer.run_noting(names, index, state)[1].items():
            peaks[name] = max(peaks[name], float(x.abs().max()))
    return peaks


def _run_with_ranges(layer: Layer, states: list[torch.Tensor]) -> KvRange:
    """Carry `states` through `layer` and return the largest magnitude of each channel of its keys and values."""
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    for index, state in enumerate(states):
        states[index], (new_key, new_value) = layer.run_recording(index, state)
        key = new_key if key is None else torch.maximum(key, new_key)
        value = new_value if value is None else torch.maximum(value, new_value)
    assert key is not None
    assert value is not None
    for what, peaks in (("key", key), ("value", value)):
        if not bool(torch.isfinite(peaks).all() and (peaks > 0).all()):
            head, channel = (peaks.isfinite() & (peaks > 0)).logical_not().nonzero()[0].tolist()
            raise DataError(
                f"{layer.name}: the {what} channel {channel} of KV head {head} ranges to {peaks[head, channel]:g} over "
                "the calibration text, so that it has no scale",
                hint="give more calibration text, or leave quantize-kv-cache out",
            )
    return KvRange(key.numpy(), value.numpy())

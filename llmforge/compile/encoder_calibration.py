"""Calibration of an encoder: its traced graph runs on text, and what each linear layer reads is looked at.

What layers read is what the checkpoint makes, in all of them: errors of layers that are quantized already are not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.progress import Progress
from llmforge.calibration.asked import DemandsByKind
from llmforge.checkpoint import Encoding
from llmforge.ir import graph
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization import smoothing
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix, rows
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.statistics import Demand, InputRange, Statistics, WeightDemand, exclusion
from llmforge.verification import encoder_runs, probe
from llmforge.verification.encoder_passes import EncoderTexts

TOKENS = 512  # that run at a time: what all layers read is in memory


@dataclass(eq=False)
class _Read:
    """What is counted of a tensor [tokens, K] that linear layers `names` read, of weights [K, N]."""

    value: ir.Value
    names: list[str]
    weights: list[ir.Value]
    peaks: Float32
    sums: NDArray[np.float64]
    squares: NDArray[np.float64]
    moments: Float32 | None
    tokens: int = 0
    some: list[Float32] = field(default_factory=list)  # tokens that factors are chosen on

    def add(self, x: Float32, stride: int) -> None:
        """Count tokens `x` [tokens, K]."""
        self.peaks = np.maximum(self.peaks, np.abs(x).max(0))
        self.sums += x.sum(0, dtype=np.float64)
        self.squares += np.square(x, dtype=np.float64).sum(0)
        if self.moments is not None:
            self.moments += x.T @ x
        self.some += [x[-self.tokens % stride :: stride].copy()] if stride else []
        self.tokens += len(x)

    def matrices(self) -> list[Float32]:
        """Read the weights, [N, K] each."""
        return [np.ascontiguousarray(graph.tensor(value).numpy().T, np.float32) for value in self.weights]


def plan(model: ir.Model, demands: Sequence[Demand]) -> dict[str, Grid]:
    """Name the weights that `calibrate` would quantize, with their grids.

    Raises:
        UnsupportedError: calibration of encoders does not serve a demand.
    """
    asked = _asked(demands)
    if asked.weights is None:
        return {}
    wanted = asked.weights
    return {
        name: wanted.grid_of([name], graph.static(value)[0])
        for read in _readers(model, moments=False)
        for name, value in zip(read.names, read.weights, strict=True)
        if not exclusion([name], wanted.exclude)
    }


def calibrate(
    model: ir.Model,
    encoding: Encoding,
    texts: EncoderTexts,
    demands: Sequence[Demand],
    *,
    threads: int,
    progress: Progress,
) -> Statistics:
    """Run the traced graph `model` on `texts`, and compute what `demands` ask for.

    Raises:
        UnsupportedError: as `plan`.
        DataError: what a layer reads is not finite, or does not allow the method.
    """
    asked = _asked(demands)
    needs = frozenset[InputStatistic]() if asked.weights is None else asked.weights.method.demands
    reads = _readers(model, moments=InputStatistic.MOMENTS in needs)
    total = sum(map(len, texts.ids))
    smooths = asked.inputs is not None and asked.inputs.smoothing is not None
    _run(model, encoding, texts, reads, threads, -(-total // smoothing.TOKENS) if smooths else 0)
    inputs: dict[str, InputRange] = {}
    linears: dict[str, QuantizedMatrix] = {}
    for at, read in enumerate(reads):
        progress.advance(at, len(reads))
        if not np.isfinite(read.peaks).all():
            raise DataError(f"{read.names[0]}: what it reads is NaN or infinite on the calibration text")
        if asked.ranges is not None:
            inputs |= dict.fromkeys(read.names, _range(read, asked))
        if asked.weights is not None:
            linears |= _quantized(read, asked.weights, threads)
        read.moments, read.some = None, []
    grids = {name: matrix.grid for name, matrix in linears.items()}
    return Statistics(len(texts.ids), total, linears, {}, inputs, grids=grids)


def _asked(demands: Sequence[Demand]) -> DemandsByKind:
    asked = DemandsByKind.of(demands)
    limited = asked.weights is not None and asked.weights.is_limited
    others = {
        "sparse weights": asked.sparsity,
        "corrections of low rank": asked.correction,
        "trained scales": asked.recovery,
        "pruned structure": asked.pruning,
        "a KV cache": asked.kv or None,
        "formats chosen by bytes or loss": asked.weights if limited else None,
    }
    if unserved := [name for name, demand in others.items() if demand is not None]:
        raise UnsupportedError(
            f"calibration of embedders and rerankers does not serve {', '.join(unserved)}",
            hint="leave these passes out, and name one format: see `llmforge docs retrieval`",
        )
    return asked


def _readers(model: ir.Model, *, moments: bool) -> list[_Read]:
    """List what linear layers read, those together that read one tensor."""
    found: dict[ir.Value, _Read] = {}
    for product in MatMul.all(model):
        names = graph.sources(product.w) if product.w.is_initializer() else []
        if len(names) != 1 or len(graph.dims(product.w) or ()) != 2:
            continue
        k = graph.static(product.w)[0]
        if product.x not in found:
            sums = (np.zeros(k), np.zeros(k))
            own = np.zeros((k, k), np.float32) if moments else None
            found[product.x] = _Read(product.x, [], [], np.zeros(k, np.float32), *sums, own)
        if names[0] not in found[product.x].names:
            found[product.x].names.append(names[0])
            found[product.x].weights.append(product.w)
    return list(found.values())


def _run(
    model: ir.Model, encoding: Encoding, texts: EncoderTexts, reads: Sequence[_Read], threads: int, stride: int
) -> None:
    """Count what is read on `texts`; every `stride`-th token is kept, of 0 none."""
    observed = model.clone()
    there = {value.name: value for node in observed.graph for value in node.outputs}
    observed.graph.outputs.extend(there[read.value.name] for read in reads)
    session = encoder_runs.open_graph(observed, encoding, threads, probe.InitializerArrays())
    for some in _batches([len(ids) for ids in texts.ids]):
        types = [texts.types[at] for at in some] if session.config.token_types else None
        _, *made = session.observe([texts.ids[at] for at in some], types)
        for read, x in zip(reads, made, strict=True):
            read.add(np.asarray(x, np.float32).reshape(-1, len(read.peaks)), stride)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    made: list[list[int]] = []
    for at, length in enumerate(lengths):
        if made and sum(lengths[other] for other in made[-1]) + length <= TOKENS:
            made[-1].append(at)
        else:
            made.append([at])
    return made


def _range(read: _Read, asked: DemandsByKind) -> InputRange:
    assert asked.ranges is not None
    smoothed = None
    if asked.ranges.smoothing is not None:
        some = np.concatenate(read.some)
        smoothed = smoothing.choose(some, read.peaks, read.matrices(), asked.ranges.smoothing)
    sums, squares = read.sums.astype(np.float32), read.squares.astype(np.float32)
    return InputRange(read.peaks, smoothed, sums, squares, read.tokens)


def _quantized(read: _Read, demand: WeightDemand, threads: int) -> Mapping[str, QuantizedMatrix]:
    """Quantize what reads one tensor, as one matrix of all their rows."""
    kept = [at for at, name in enumerate(read.names) if not exclusion([name], demand.exclude)]
    if not kept:
        return {}
    whole = read.matrices()
    names, weights = [read.names[at] for at in kept], [whole[at] for at in kept]
    k = weights[0].shape[1]
    sums: dict[InputStatistic, Float32] = {}
    if read.moments is not None:
        sums[InputStatistic.MOMENTS] = read.moments
    if InputStatistic.DRIFT in demand.method.demands:
        sums[InputStatistic.DRIFT] = np.zeros((k, k), np.float32)
    seen = LayerInputs(read.tokens, False, sums, threads=threads)
    try:
        matrix = demand.method.quantize(np.concatenate(weights), demand.grid_of(names, k), seen)
    except (ValueError, np.linalg.LinAlgError) as error:
        raise DataError(
            f"{names[0]}: its inputs over the calibration text do not allow method {demand.method.name}: {error}",
            hint=f"give more, or other, calibration text, or use method: {PLAIN.name}",
        ) from error
    bounds = pairwise(np.cumsum([0, *map(len, weights)]))
    return {name: rows(matrix, slice(*own)) for name, own in zip(names, bounds, strict=True)}

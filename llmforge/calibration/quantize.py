"""Quantize the matrices of one decoder layer, each with what it reads behind those that are quantized already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from llmforge.base.errors import DataError
from llmforge.calibration import experts as of_experts
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.sums import InputSums
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import QuantizedMatrix, dequantize, rows
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import Method
from llmforge.quantization.statistics import WeightDemand


def quantize_layer(
    layer: DecoderLayer, original: list[torch.Tensor], current: Sequence[torch.Tensor], demand: WeightDemand
) -> dict[str, QuantizedMatrix]:
    """Quantize the linears and experts of `layer` in place, in the order in which they run.

    The hidden states `original`, those of the checkpoint, end behind the layer; the `current` ones stay in front of it.

    Raises:
        DataError: what a matrix reads over the calibration text does not allow the method of `demand`.
    """
    groups = _groups(layer, current[0], demand)
    inputs: list[dict[str, torch.Tensor]] = []  # of each window: what the first of each group reads in the checkpoint
    for window, state in enumerate(original):
        original[window], read = layer.run_with_inputs([group[0] for group in groups], window, state)
        inputs.append(read)
    results: dict[str, QuantizedMatrix] = {}
    for names in groups:
        unquantized = [read.pop(names[0]) for read in inputs]
        if names[0] in layer.experts():
            matrices = _quantize_experts(layer, names[0], current, unquantized, demand)
        else:
            matrices = _quantize_linears(layer, names, current, unquantized, demand)
        for name, matrix in matrices.items():
            layer.set_weight(name, dequantize(matrix))
        results |= matrices
    return results


def _groups(layer: DecoderLayer, state: torch.Tensor, demand: WeightDemand) -> list[list[str]]:
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
    return [name] if module is None else [f"{name}.{parameter}" for parameter in of_experts.matrices(module)]


def _quantize_linears(
    layer: DecoderLayer,
    names: Sequence[str],
    states: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    demand: WeightDemand,
) -> dict[str, QuantizedMatrix]:
    """Quantize linears that read one tensor, `originals` [tokens, K] in the checkpoint: their rows are one matrix."""
    sums = InputSums.start(demand.method.demands, originals[0].shape[1])
    for window, (state, original) in enumerate(zip(states, originals, strict=True)):
        x, *_ = layer.arguments_of(names[0], window, state)
        sums.add(x, original - x)
    weights = [layer.weight(name) for name in names]
    with _refusals(names[0], demand.method):
        matrix = demand.method.quantize(np.concatenate(weights), demand.grid, sums.seen(routed=False))
    bounds = pairwise(np.cumsum([0, *map(len, weights)]))
    return {name: rows(matrix, slice(*own)) for name, own in zip(names, bounds, strict=True)}


def _quantize_experts(
    layer: DecoderLayer,
    name: str,
    states: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    demand: WeightDemand,
) -> dict[str, QuantizedMatrix]:
    """Quantize the experts `name`; nothing where no kernel has a grid for their widths."""
    module = layer.experts()[name]
    grid = demand.grid.fitting(*of_experts.widths(module))
    if grid is None:
        return {}
    called = [layer.arguments_of(name, window, state) for window, state in enumerate(states)]
    tokens, ids, mixing = (torch.cat(parts) for parts in zip(*called, strict=True))
    read = of_experts.RoutedInputs(tokens, ids, mixing, torch.cat(list(originals)))
    with _refusals(name, demand.method):
        matrices = of_experts.quantize(module, read, grid, demand.method)
    return dict(zip(_matrices(layer, name), matrices, strict=True))


@contextmanager
def _refusals(name: str, method: Method) -> Iterator[None]:
    """Say of which layer, and what to do, where a method refuses its inputs."""
    try:
        yield
    except (ValueError, np.linalg.LinAlgError) as error:
        remedies = ["give more, or other, calibration text", method.remedy, f"or use method: {PLAIN.name}"]
        raise DataError(
            f"{name}: its inputs over the calibration text do not allow method {method.name}: {error}",
            hint=", ".join(filter(None, remedies)),
        ) from error

"""Prune the linears of one decoder layer to 2:4, each on what it reads behind those that are pruned already."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from llmforge.base.errors import DataError
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.resuming import Runs
from llmforge.calibration.store import LayerResult
from llmforge.calibration.sums import InputSums
from llmforge.quantization import sparsity
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import SparsityDemand


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
        sums = InputSums.start({InputStatistic.MOMENTS}, layer.weight(names[0]).shape[1])
        for window in range(len(states)):
            x, *_ = runs.arguments(names[0], window)
            sums.add(x, x)
        moments = sums.seen(routed=False).sums[InputStatistic.MOMENTS]
        weights = [layer.weight(name) for name in names]
        whole = np.concatenate(weights)
        try:
            matrix, damping = sparsity.sparsegpt(whole, moments, demand.damping)
        except (ValueError, np.linalg.LinAlgError) as error:
            raise DataError(
                f"{names[0]}: its inputs over the calibration text do not allow pruning: {error}",
                hint="give more, or other, calibration text, or more `damping`",
            ) from error
        if damping > demand.damping:
            notes.append(f"{names[0]}: damping rose to {damping:g}: its moments could not be factored")
        lost = sparsity.output_error(whole, matrix.dense(), moments)
        for name, (first, last) in zip(names, pairwise(np.cumsum([0, *map(len, weights)])), strict=True):
            pruned[name] = SparseMatrix(matrix.values[first:last], matrix.places[first:last], lost)
            layer.set_weight(name, pruned[name].dense())
    runs.end()
    return LayerResult({}, None, notes=tuple(notes), sparse=pruned)

"""Correct quantized linears that read one tensor by products of low rank, with what calibration saw of that tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from llmforge.base.errors import DataError
from llmforge.calibration.layer import DecoderLayer
from llmforge.quantization import low_rank
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.methods.gptq import Curvature, target
from llmforge.quantization.statistics import LowRankDemand


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
    try:
        curvature = Curvature.of(moments, demand.damping)
        damped = moments + curvature.damping * moments.diagonal().mean() * np.eye(len(moments), dtype=np.float32)
        codes = np.concatenate([dequantize(matrices[name]) for name in names])
        wanted = target(whole, curvature, seen)
        made = low_rank.compute_correction(wanted, codes, damped, rank, demand.dtype, matrices[names[0]].grid)
    except (ValueError, np.linalg.LinAlgError) as error:
        raise DataError(
            f"{names[0]}: its inputs over the calibration text do not allow a correction: {error}",
            hint="give more, or other, calibration text, or more `damping`",
        ) from error
    bounds = pairwise(np.cumsum([0, *(matrices[name].shape[0] for name in names)]))
    own = {name: np.ascontiguousarray(made.b[:, slice(*bound)]) for name, bound in zip(names, bounds, strict=True)}
    return {name: replace(made, b=b, group=names[0]) for name, b in own.items()}


def corrected(matrix: QuantizedMatrix, correction: LowRankCorrection | None) -> Float32:
    """Return the weight [N, K] that codes and their correction stand for."""
    weight = dequantize(matrix)
    return weight if correction is None else weight + correction.product()

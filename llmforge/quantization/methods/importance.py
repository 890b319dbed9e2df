"""Rounding to nearest that knows of each input how large it is, and what it is on average.

Of the inputs x of a matrix, H = Σ x xᵀ is taken to be D + μ μᵀ: their mean μ, and their variance by channel. Scales are
searched with the squares of the inputs as weights (as llama.cpp's importance matrix weighs them), and codes are chosen
column by column, as optimal brain quantization has it with this H: the error that a row makes of the mean input, the
same for each token, is fed back to the columns that are still to come. One run forwards gives both; figures stand in
docs/quantization-method.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from llmforge.quantization import rounding
from llmforge.quantization.formats import GGUF, NATIVE, TRELLISES, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix, require_finite, round_to_nearest
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method

STEPS = 20  # ranges that are tried for a block
DAMPING = 0.01  # of the mean square, added to each variance


@dataclass(frozen=True)
class Importance(Method):
    """Round to nearest with inputs weighed by their squares, so that the mean output stays."""

    name: ClassVar[str] = "importance"
    summary: ClassVar[str] = "round to nearest, errors weighed by mean and square of each input channel"
    formats: ClassVar[tuple[Format, ...]] = (*NATIVE, *TRELLISES, *GGUF)
    demands: ClassVar[frozenset[InputStatistic]] = frozenset({InputStatistic.SUMS, InputStatistic.SQUARES})

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Choose codes; a weight whose inputs were not seen, or were always 0, is rounded to nearest."""
        if not inputs.tokens or not inputs.sums[InputStatistic.SQUARES].any():
            return round_to_nearest(weight, grid)
        require_finite(weight)
        sums, squares = (inputs.sums[each] for each in (InputStatistic.SUMS, InputStatistic.SQUARES))
        columns = columns_of(sums / np.float32(inputs.tokens), squares / np.float32(inputs.tokens))
        wanted = np.asarray(weight, np.float32)
        matrix, _ = rounding.choose(wanted, columns, grid, steps=STEPS, sweeps=0, threads=inputs.threads)
        return matrix


def columns_of(mean: Float32, square: Float32) -> rounding.ChannelColumns:
    """Order columns by the mean square of their inputs, [K], and say how errors go from one to those behind it.

    Once the columns in front of j have made s = Σ μe, what is left of s² and Σ σ²e² is least with
    eⱼ = -s (μⱼ/σⱼ²) / (1 + Σ μ²/σ²), the sum over j and those behind it.

    Raises:
        ValueError: they are not finite.
    """
    require_finite(np.stack([mean, square]))
    order = np.argsort(-square, kind="stable").astype(np.int32)
    added = DAMPING * float(square.mean(dtype=np.float64))
    mu = mean[order].astype(np.float64)
    variance = np.maximum(square[order] - mu * mu, 0) + added
    pull = mu / variance
    behind = np.cumsum((mu * pull)[::-1])[::-1]
    diagonal = variance + mu * mu
    narrow = (each.astype(np.float32) for each in (diagonal, mu, pull / (1 + behind)))
    return rounding.ChannelColumns(order, *narrow)

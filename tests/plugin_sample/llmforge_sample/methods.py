"""Rounding to nearest, on the range of each block that has the least squared error."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.quantization.formats import BLOCKS, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, assemble, nearest, require_finite, span
from llmforge.quantization.methods.base import NO_INPUTS, LayerInputs, Method
from llmforge_sample.search import shares


@dataclass(frozen=True)
class NarrowRtn(Method):
    """Round each weight to the nearest point of a grid that may be narrower than its block."""

    name: ClassVar[str] = "narrow-rtn"
    summary: ClassVar[str] = "round to nearest on the range with the least squared error"
    formats: ClassVar[tuple[Format, ...]] = BLOCKS

    narrowest: Annotated[float, Field(ge=0.5, le=1, description="share of the range that is tried last")] = 0.8

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Choose codes for a weight [N, K]: of several ranges those with the least squared error of each block."""
        (n, k), matrix = weight.shape, weight.astype(np.float32)
        require_finite(matrix)
        matrix = np.pad(matrix, ((0, 0), (0, -k % grid.block_size)))
        widest, zeros = span(matrix, grid)
        blocks, offsets = matrix.reshape(n, -1, grid.block_size), zeros[..., None]
        codes, scales, least = np.zeros_like(blocks), widest, np.full_like(widest, np.inf)
        for share in shares(self.narrowest):
            tried = widest * share
            found = nearest(blocks, tried[..., None], offsets, grid)
            error = np.square((found - offsets) * tried[..., None] - blocks).sum(-1)
            better = error < least
            codes, scales = np.where(better[..., None], found, codes), np.where(better, tried, scales)
            least = np.minimum(error, least)
        return assemble(grid, codes.reshape(n, -1)[:, :k].astype(np.uint8), scales, zeros)

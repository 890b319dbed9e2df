"""Rounding to nearest."""

from __future__ import annotations

from typing import Any, ClassVar

from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from llmforge.quantization.formats import GGUF, NATIVE, TRELLISES, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, round_to_nearest
from llmforge.quantization.methods.base import NO_INPUTS, LayerInputs, Method


@dataclass(frozen=True)
class Rtn(Method):
    """Round each weight to the nearest point of the grid that spans its block."""

    name: ClassVar[str] = "rtn"
    summary: ClassVar[str] = "round to nearest"
    formats: ClassVar[tuple[Format, ...]] = (*NATIVE, *TRELLISES, *GGUF)

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Choose the nearest codes."""
        return round_to_nearest(weight, grid)

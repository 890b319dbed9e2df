"""Arithmetic of experts in codes: matrices [E, K, N] of E experts, each rounded by itself by `channels` or `nvfp4`.

Codes have their shape. Scales are [E, 1, N], one of each output feature, [E, K / 128, N] of squares, or fp8
[E, K / 16, N] of NVFP4, under one number for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir.derived import Function
from llmforge.ir.fp4 import BLOCK
from llmforge.quantization import channels, nvfp4

FP4 = ir.DataType.FLOAT4E2M1


def _of_each(function: Function, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Apply `function` to each expert's matrix [K, N], and to what the other operands hold of it; scales get 2 axes."""
    made = [function([*each]) for each in zip(*parts, strict=True)]
    return np.stack([each[None] if each.ndim == 1 else each for each in made])


def scales_of_experts(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return the scale of NVFP4 that the matrix of each expert has, fp32 [E]."""
    return np.stack([nvfp4.scale([matrix]) for matrix in parts[0]])


@dataclass(frozen=True)
class ExpertFormat:
    """Codes of experts."""

    dtype: ir.DataType
    group: int  # input features, and features of a token, that share a scale; 0: all do
    codes: Function
    scales: Function

    @property
    def scale_dtype(self) -> ir.DataType:
        """The dtype of scales."""
        return channels.FP8 if self.dtype == FP4 else ir.DataType.FLOAT


def _channel(dtype: ir.DataType) -> ExpertFormat:
    return ExpertFormat(dtype, 0, partial(_of_each, channels.CODES[dtype]), partial(_of_each, channels.SCALES[dtype]))


FormatOfExperts = Literal["int8", "fp8", "fp8-block", "nvfp4"]
FORMATS: Mapping[FormatOfExperts, ExpertFormat] = {
    "int8": _channel(channels.INT8),
    "fp8": _channel(channels.FP8),
    "fp8-block": ExpertFormat(
        channels.FP8,
        channels.SQUARE,
        partial(_of_each, channels.square_codes),
        partial(_of_each, channels.square_scales),
    ),
    "nvfp4": ExpertFormat(FP4, BLOCK, partial(_of_each, nvfp4.codes), partial(_of_each, nvfp4.block_scales)),
}

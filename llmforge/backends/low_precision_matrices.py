"""Matrices of int8, fp8 and fp4 numbers, as files for servers of others hold them, of linear layers and of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.operators.canonical import LowPrecisionMoE


@dataclass(frozen=True, eq=False)
class ChannelMatrix:
    """A matrix [n, k] of codes with one scale for each of its n output features, or for each square of them."""

    parameter: str
    n: int
    k: int
    dtype: str  # int8 or fp8
    codes: ir.Value  # [k, n]
    scales: ir.Value  # fp32 [n]
    inputs: Literal["none", "static", "per_token"]  # how what the layer reads is rounded
    input_scale: ir.Value | None  # fp32 [], where that is static
    square: int | None = None  # features, of either kind, that share a scale; scales are then [k / square, n]
    whole: bool = False  # scales are fp32 [], one for the matrix

    @property
    def by_output(self) -> NDArray[Any]:
        """The codes [n, k]."""
        return np.ascontiguousarray(graph.tensor(self.codes).numpy().T)

    @property
    def scales_by_output(self) -> NDArray[np.float32]:
        """The scales [n, 1], or [ceil(n / square), k / square], or [1]."""
        scales = graph.tensor(self.scales).numpy()
        if self.whole:
            return scales.astype(np.float32).reshape(1)
        if self.square is None:
            return scales.astype(np.float32)[:, None]
        return np.ascontiguousarray(scales[:, :: self.square].T)


@dataclass(frozen=True, eq=False)
class Fp4Matrix:
    """A matrix [n, k] in NVFP4, and the scale of what is multiplied by it."""

    parameter: str
    n: int
    k: int
    codes: ir.Value  # e2m1 [k, n]
    scales: ir.Value  # fp8 [k / 16, n]
    weight_scale: ir.Value  # fp32 [], of the whole
    input_scale: ir.Value  # fp32 []

    @property
    def codes_by_output(self) -> NDArray[Any]:
        """The codes [n, k], a byte each."""
        return np.ascontiguousarray(graph.tensor(self.codes).numpy().T)

    @property
    def scales_by_output(self) -> NDArray[Any]:
        """The scales of blocks [n, k / 16]."""
        return np.ascontiguousarray(graph.tensor(self.scales).numpy().T)

    @property
    def whole_scale(self) -> np.float32:
        """The scale of the whole."""
        return np.float32(graph.tensor(self.weight_scale).numpy())


@dataclass(eq=False)
class SharedTensors:
    """Codes [E, k, n] and scales [E, rows, n] of all experts, computed once until `unread` parts of them were read."""

    codes: ir.Value
    scales: ir.Value
    parts: int  # what matrices of all experts read, of either
    _held: dict[ir.Value, tuple[NDArray[Any], int]] = field(default_factory=dict)

    def take(self, value: ir.Value, expert: int, columns: NDArray[np.intp]) -> NDArray[Any]:
        """Return some columns of one expert's codes or scales as rows."""
        array, unread = self._held.pop(value, (None, self.parts))
        if array is None:
            array = graph.tensor(value).numpy()
        if unread > 1:
            self._held[value] = array, unread - 1
        return np.ascontiguousarray(array[expert][:, columns].T)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertChannels(ChannelMatrix):
    """Some columns of a matrix of one of several experts."""

    shared: SharedTensors
    expert: int
    columns: NDArray[np.intp]

    @property
    def by_output(self) -> NDArray[Any]:
        """The codes [n, k]."""
        return self.shared.take(self.codes, self.expert, self.columns)

    @property
    def scales_by_output(self) -> NDArray[np.float32]:
        """The scales [n, 1], or [n / square, k / square]."""
        return self.shared.take(self.scales, self.expert, self.columns)[:: self.square or 1]


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertFp4(Fp4Matrix):
    """Some columns of a matrix in NVFP4 of one of several experts; `weight_scale` is [E]."""

    shared: SharedTensors
    expert: int
    columns: NDArray[np.intp]

    @property
    def codes_by_output(self) -> NDArray[Any]:
        """The codes [n, k], a byte each."""
        return self.shared.take(self.codes, self.expert, self.columns)

    @property
    def scales_by_output(self) -> NDArray[Any]:
        """The scales of blocks [n, k / 16]."""
        return self.shared.take(self.scales, self.expert, self.columns)

    @property
    def whole_scale(self) -> np.float32:
        """The scale of this expert."""
        return np.float32(graph.tensor(self.weight_scale).numpy()[self.expert])


@dataclass(frozen=True, eq=False)
class MxMatrix:
    """A matrix [n, k] in a microscaling format."""

    parameter: str
    n: int
    k: int
    dtype: str  # fp4 or fp8
    codes: ir.Value  # e2m1 or e4m3 [k, n]
    scales: ir.Value  # e8m0 [k / 32, n]

    @property
    def codes_by_output(self) -> NDArray[Any]:
        """The codes [n, k], a byte each."""
        return np.ascontiguousarray(graph.tensor(self.codes).numpy().T)

    @property
    def scales_by_output(self) -> NDArray[np.uint8]:
        """The exponents of blocks [n, k / 32], from -127 on."""
        return np.ascontiguousarray(graph.tensor(self.scales).numpy().T).view(np.uint8)


@dataclass(frozen=True, eq=False)
class LowPrecisionCodes:
    """The codes of one matrix of each of E experts, as `llmforge::LowPrecisionMoE` has them."""

    parameter: str
    node: LowPrecisionMoE
    is_first: bool

    @property
    def of_gates(self) -> bool:
        """Whether columns are those of a gate and of the rest."""
        return self.is_first and bool(self.node.gated)

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many experts there are, output features, and input features."""
        count, k, n = graph.static(self.node.up if self.is_first else self.node.down)
        return count, n, k

    def matrices(self, k: int) -> Callable[[int, int], LowPrecisionMatrix]:
        """Return what makes, of an expert and a part, columns of k input features."""
        (count, n, _), parts, layer = self.shape, 1 + self.of_gates, self.node
        codes, scales = (layer.up, layer.up_scales) if self.is_first else (layer.down, layer.down_scales)
        whole, step = (
            (layer.up_scale, layer.up_input_scale) if self.is_first else (layer.down_scale, layer.down_input_scale)
        )
        shared = SharedTensors(codes, scales, count * parts)
        dtype = "int8" if codes.dtype == ir.DataType.INT8 else "fp8"

        def made(expert: int, part: int) -> LowPrecisionMatrix:
            width = n // parts
            columns = np.arange(part, n, parts) if layer.interleaved else np.arange(part * width, (part + 1) * width)
            if whole is not None and step is not None:
                return ExpertFp4(
                    self.parameter, width, k, codes, scales, whole, step,
                    shared=shared, expert=expert, columns=columns,
                )  # fmt: skip
            return ExpertChannels(
                self.parameter, width, k, dtype, codes, scales, "per_token", None, layer.group or None,
                shared=shared, expert=expert, columns=columns,
            )  # fmt: skip

        return made


LowPrecisionMatrix = ChannelMatrix | Fp4Matrix | MxMatrix

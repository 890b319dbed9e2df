"""Round keys and values to fp8 as they enter the cache, as servers of others cache them.

    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, …)
    becomes the same over k' = DequantizeLinear(QuantizeLinear(k, s), s) and v', likewise with a scale of its own

`k` is [batch, sequence, kv_heads·head_dim] after rotary embedding, `s` fp32 [], the largest |k| of the layer on the
calibration text / 448; numbers beyond it are clipped. Caches of the graph stay as they are and hold the rounded
numbers: only a checkpoint for servers of others says that they are cached in fp8 (e4m3), where a server reads `s`.

Fires for every Attention of keys and values that are not rounded yet. Attention that flash-attention has lowered stays:
this pass stands in front of it.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, operators
from llmforge.ir.operators import canonical
from llmforge.ir.operators.contrib import GroupQueryAttention
from llmforge.ir.operators.standard import DequantizeLinear
from llmforge.quantization.formats import FP8_CHANNEL
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import Demand, KvRangeDemand
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each
from llmforge.rewrite.traits import Storage

_FP8 = ir.DataType.FLOAT8E4M3FN


@dataclass(frozen=True)
class QuantizeKvFp8(Pass):
    """Round keys and values to fp8, for servers of others that cache them so."""

    name: ClassVar[str] = "quantize-kv-fp8"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    servers_alone: ClassVar[bool] = True

    budget: Annotated[Budget, Field(description="quality budget of the pass")]

    def stores(self, stored: Grid | None) -> Storage:
        """Say how servers store keys and values."""
        return Storage(kv="fp8")

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of keys and values."""
        return (KvRangeDemand(),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every attention of `model`.

        Raises:
            DataError: keys or values of a layer have no range on the calibration text.
        """
        ranges = {} if context.statistics is None else context.statistics.kv
        zero: list[ir.Value] = []

        def quantize(node: ir.Node) -> str | None:
            if operators.is_a(node, GroupQueryAttention):
                raise NotApplicable(
                    "lowered to GroupQueryAttention already; put quantize-kv-fp8 before flash-attention"
                )
            if operators.is_a(node, canonical.LatentAttention):
                raise NotApplicable("it caches latents, not keys and values")
            if (attention := canonical.Attention.of(node)) is None:
                return None
            if DequantizeLinear.made(attention.k) is not None:
                raise NotApplicable("its keys are rounded already")
            if (found := ranges.get(attention.layer)) is None:
                raise NotApplicable(f"calibration has no ranges for layer {attention.layer}")
            if not zero:
                zero.append(graph.initializer(model, "kv_fp8.zero", np.zeros((), _FP8.numpy())))
            attention.k = self._round(model, attention, attention.k, "key", float(found.key.max()), zero[0])
            attention.v = self._round(model, attention, attention.v, "value", float(found.value.max()), zero[0])
            return "keys and values in fp8, a scale each"

        return rewrite_each(list(model.graph), quantize, Changes())

    def _round(
        self, model: ir.Model, attention: canonical.Attention, x: ir.Value, part: str, peak: float, zero: ir.Value
    ) -> ir.Value:
        """Let `attention` read `x` in multiples of a scale."""
        if not 0 < peak < math.inf:
            raise DataError(
                f"{self.name}: layer {attention.layer}: a {part} ranges to {peak:g} on the calibration text, so it has "
                "no scale",
                hint=f"use more calibration text, or leave {self.name} out of the recipe",
            )
        name, step = f"kv_fp8.{attention.layer}.{part}", np.float32(peak) / np.float32(FP8_CHANNEL.largest)
        scale = graph.initializer(model, f"{name}.scale", step)
        [codes] = graph.insert(attention.node, "QuantizeLinear", [x, scale, zero], name=f"{name}/codes")
        [made] = graph.insert(attention.node, "DequantizeLinear", [codes, scale], name=f"{name}/numbers")
        codes.type, codes.shape = ir.TensorType(_FP8), x.shape
        made.type, made.shape = x.type, x.shape
        return made

"""Multiply linear layers in NVFP4: weights and activations of 4 bits in blocks of 16, with a scale in fp8 each.

    y = x·W + b                     becomes  y = llmforge::Fp4Linear(x, codes, scales, weight_scale, input_scale) + b

`x` is [batch, sequence, K], `W` fp32 [K, N]; `codes` are e2m1 [K, N], `scales` float8e4m3fn [K / 16, N], both scales of
tensors fp32 numbers (`llmforge.quantization.nvfp4`). Blocks of `x` get their scales as it is read, in units of
`input_scale`, which is the largest |x| of the calibration text over 6·448: 4.5 bits a weight, and products of 4 bits.

Fires for every MatMul whose second input is an fp32 initializer [K, N], K a multiple of 16, that nothing else reads,
and whose input calibration measured: linear layers of the decoder. Head, embedding, routers and what `exclude` names
stay; a budget may need `exclude: ['*.down_proj.*']`. TensorRT dequantizes such weights into memory where x stays in 16
bits, so that there is no form of weights alone.

Numerics: lossy, within the budget of the recipe. Refused on targets without products in fp4, or no faster ones.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived
from llmforge.ir.fp4 import BLOCK
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.ir.operators.standard import MatMul
from llmforge.lowering.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.quantization import nvfp4
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.statistics import Demand, InputRangeDemand

_FP4, _FP8, _FP32 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT


@dataclass(frozen=True)
class QuantizeFp4(Pass):
    """Multiply linear layers in NVFP4: weights and activations of 4 bits in blocks of 16."""

    name: ClassVar[str] = "quantize-fp4"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of what linears read."""
        return (InputRangeDemand(),)

    def chooses_codes(self) -> bool:
        """Say that it does."""
        return True

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`.

        Raises:
            UnsupportedError: the target does not compute in fp4, or no faster than in 16 bits.
            DataError: what a layer reads has no range on the calibration text.
        """
        context.refuse_cpu(f"{self.name}: no CPU multiplies fp4", "use quantize-weights or quantize-channels")
        context.require_dtype(self.name, "fp4", ", or use quantize-weights or quantize-channels")
        context.require_faster(self.name, "fp4", "use quantize-weights")
        routers, heads = routing.routers(model), logits_rows.readers(model)
        ranges = {} if context.statistics is None else context.statistics.inputs
        changes = Changes()
        for product in MatMul.all(model):
            if not product.w.is_initializer() or len(graph.dims(product.w) or ()) != 2:
                continue
            names = graph.sources(product.w) or [str(product.w.name)]
            measured = [ranges[name] for name in names if name in ranges]
            reason = _reason(product) or exclusion(names, self.exclude)
            if product.node in routers or product.node in heads:
                reason = "output head" if product.node in heads else f"router of {routers[product.node].name}"
            elif reason is None and not measured:
                reason = "calibration did not see what it reads"
            if reason is not None:
                changes.skipped.append(Skipped(product.name, reason))
                continue
            peak = float(np.max([each.peaks.max() for each in measured]))
            if not 0 < peak < math.inf:
                raise DataError(
                    f"{self.name}: what {product.name} reads ranges to {peak:g} on the calibration text, so that it "
                    "has no scale",
                    hint=f"use more calibration text, or exclude {names[0]}",
                )
            _rewrite(model, product, peak)
            changes.rewritten.append(Rewritten(product.name, "NVFP4, blocks of 16, inputs too"))
        if changes:
            graph.drop_unused(model)
        return changes


def _reason(product: MatMul) -> str | None:
    """Say why the weight of `product` stays; None where it can be stored."""
    weight = product.w
    if weight.dtype != _FP32:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or len(weight.uses()) > 1:
        return f"{weight.name} has other readers"
    k = graph.static(weight)[0]
    return f"its {k} input features are not a multiple of {BLOCK}" if k % BLOCK else None


def _rewrite(model: ir.Model, product: MatMul, peak: float) -> None:
    """Put Fp4Linear in the place of `product`, whose input ranges to `peak`."""
    tensor, name, sources = graph.tensor(product.w), f"{product.w.name}.fp4", graph.sources(product.w)
    k, n = graph.static(product.w)
    parts = {
        "codes": Derived(nvfp4.codes, [tensor], _FP4, ir.Shape([k, n]), name),
        "scales": Derived(nvfp4.block_scales, [tensor], _FP8, ir.Shape([k // BLOCK, n]), f"{name}.scales"),
        "weight_scale": Derived(nvfp4.scale, [tensor], _FP32, ir.Shape([]), f"{name}.scale"),
    }
    operands = {
        part: graph.initializer(model, str(each.name), each, sources if part == "codes" else ())
        for part, each in parts.items()
    }
    operands["input_scale"] = graph.initializer(model, f"{product.x.name}.fp4.scale", nvfp4.tensor_scale(peak))
    made = Fp4Linear.insert(product.node, {"x": product.x, **operands}, name=product.name)
    graph.replace_value(product.output, made.output)

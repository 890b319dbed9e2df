"""Quantize the weights of linear layers and output head to int8 or fp8, with one scale per output feature.

    y = x·W + b                     becomes  y = x·DequantizeLinear(codes, scales) + b
    logits = x·Eᵀ  (tied head)      becomes  logits = x·DequantizeLinear(codes, scales), of codes of its own

`W` is fp32 [K, N], `E` [V, K]; `codes` int8 or float8e4m3fn [K, N], `scales` fp32 [N] on axis 1. The operators are
ONNX's own. TensorRT reads such weights as they are stored, in every multiplication, where it would first dequantize
blocks of 8 bits into memory; a table that is stored as [V, K] and transposed would be turned into 16 bits when the
engine is built, so a tied head gets a matrix of its own, [K, V], and the embedding stays.

    with `activations: static`, where calibration measured what the layer reads:
    y = x·W + b                     becomes  y = r·DequantizeLinear(codes, scales) + b,
                                             r = DequantizeLinear(QuantizeLinear(x, s), s)

and `s` is one number, the largest |x| of the calibration text over the largest code; layers that read one tensor share
`r`. So TensorRT may multiply 8 bits by 8 bits. What the head reads is not measured, and stays.

Fires for every MatMul whose second input is an fp32 initializer [K, N] that nothing else reads, and with `head` also
for the head, which is the MatMul that works on the selected rows. Routers stay, unless `routers` says otherwise.

Numerics: lossy, within the budget of the recipe. Refused where the target does not compute in the dtype.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived, swapped
from llmforge.ir.operators.standard import MatMul, Transpose
from llmforge.lowering.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.quantization import channels
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.statistics import Demand, InputRangeDemand, Statistics

_DTYPES = {"int8": channels.INT8, "fp8": channels.FP8}


@dataclass(frozen=True)
class QuantizeChannels(Pass):
    """Quantize the weights of linear layers and output head to int8 or fp8, with one scale per output feature."""

    name: ClassVar[str] = "quantize-channels"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    dtype: Annotated[Literal["int8", "fp8"], Field(description="int8, or fp8 (e4m3)")]
    activations: Annotated[
        Literal["none", "static"],
        Field(description="static: also quantize the inputs of the layers, with calibrated ranges"),
    ] = "none"
    head: Annotated[bool, Field(description="also quantize the output head")] = True
    routers: Annotated[bool, Field(description="also quantize the routers of experts")] = False
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of what linears read."""
        return () if self.activations == "none" else (InputRangeDemand(),)

    def chooses_codes(self) -> bool:
        """Say that it does."""
        return True

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`, and the head.

        Raises:
            UnsupportedError: the target does not compute in the dtype.
        """
        context.require_dtype(self.name, self.dtype, ", or use quantize-weights")
        left_alone = {} if self.routers else routing.routers(model)
        heads = logits_rows.readers(model)
        changes = Changes()
        for product in MatMul.all(model):
            node, weight = product.node, _weight(product)
            if weight is None:
                continue
            transposed = weight is not product.w
            parameters = graph.sources(weight) or [str(weight.name)]
            reason = _reason(weight, transposed) or exclusion(parameters, self.exclude)
            if node in left_alone:
                reason = f"router of {left_alone[node].name}; `routers: true` quantizes it"
            elif node in heads and not self.head:
                reason = "output head, and `head` is false"
            if reason is not None:
                changes.skipped.append(Skipped(str(node.name), reason))
                continue
            rounded = self._round(model, product, weight, context.statistics)
            self._store(model, product, weight, transposed)
            what = f"{self.dtype}, one scale per output feature" + (", inputs quantized too" if rounded else "")
            changes.rewritten.append(Rewritten(str(node.name), what))
        if changes:
            graph.drop_unused(model)
        return changes

    def _round(self, model: ir.Model, product: MatMul, weight: ir.Value, statistics: Statistics | None) -> bool:
        """Let `product` read its input rounded to the dtype, where calibration ranged it; say whether it does."""
        x, node, ranges = product.x, product.node, {} if statistics is None else statistics.inputs
        peaks = [ranges[name] for name in graph.sources(weight) if name in ranges]
        if self.activations == "none" or not peaks:
            return False
        if not 0 < max(peaks) < math.inf:
            raise DataError(
                f"{self.name}: what {node.name} reads ranges to {max(peaks):g} on the calibration text, so that it has "
                "no scale",
                hint="use more calibration text, or set `activations: none`",
            )
        dtype, name = _DTYPES[self.dtype], f"{x.name}.{self.dtype}"
        rounded = next((each.outputs[0] for each in model.graph if each.outputs[0].name == name), None)
        if rounded is None:
            step = np.float32(max(peaks) / channels.LARGEST[dtype])
            scale = graph.initializer(model, f"{name}.scale", step)
            zero = graph.initializer(model, f"{self.name}.zero", np.zeros((), dtype.numpy()))
            [codes] = graph.insert(node, "QuantizeLinear", [x, scale, zero], name=f"{name}/codes")
            codes.name, codes.type, codes.shape = f"{name}.codes", ir.TensorType(dtype), x.shape
            [rounded] = graph.insert(node, "DequantizeLinear", [codes, scale], name=f"{name}/values")
            rounded.name, rounded.type, rounded.shape = name, x.type, x.shape
        product.x = rounded
        return True

    def _store(self, model: ir.Model, product: MatMul, weight: ir.Value, transposed: bool) -> None:
        """Let `product` multiply by dequantized codes of `weight`, [K, N], or [N, K] where `transposed`."""
        dtype, tensor = _DTYPES[self.dtype], graph.tensor(weight)
        name, shape = f"{weight.name}.{self.dtype}", ir.Shape(graph.static(weight)[:: -1 if transposed else 1])
        if transposed:
            tensor = Derived(swapped, [tensor], tensor.dtype, shape, f"{weight.name}.transposed")
        sources = [] if transposed else graph.sources(weight)  # a tied head's are those of the embedding
        rounded = Derived(channels.CODES[dtype], [tensor], dtype, shape, name)
        codes = graph.initializer(model, name, rounded, sources)
        steps = Derived(channels.SCALES[dtype], [tensor], ir.DataType.FLOAT, ir.Shape(shape[1:]), f"{name}.scales")
        scales = graph.initializer(model, f"{name}.scales", steps)
        place = product.node
        [wide] = graph.insert(place, "DequantizeLinear", [codes, scales], {"axis": 1}, name=f"{product.name}/weight")
        wide.name, wide.type, wide.shape = f"{name}.dequantized", ir.TensorType(ir.DataType.FLOAT), codes.shape
        product.w = wide


def _weight(product: MatMul) -> ir.Value | None:
    """Return the matrix of `product`, an initializer or the transpose of one; None where it is neither."""
    turned = Transpose.made(product.w)
    weight = product.w if turned is None else turned.x
    return weight if weight.is_initializer() and len(graph.dims(weight) or ()) == 2 else None


def _reason(weight: ir.Value, transposed: bool) -> str | None:
    """Say why `weight` stays as it is; None where it can be stored."""
    if weight.dtype != ir.DataType.FLOAT:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or (len(weight.uses()) > 1 and not transposed):
        return f"{weight.name} has other readers"
    return None

"""Multiply linear layers in MXFP4 or MXFP8: weights and activations in blocks of 32 under powers of two, for servers.

    y = x·W   becomes   y = llmforge::MxLinear(x, codes, scales)

`x` is [batch, sequence, K], `W` fp32 [K, N], K a multiple of 32; `codes` [K, N] are e2m1 (`dtype: fp4`) or e4m3
(`fp8`), `scales` e8m0 [K / 32, N]: lazy tensors. `x` is rounded in the same format, 32 features at a time; nothing is
calibrated (`llmforge.quantization.mx`).

Only a checkpoint for servers of others says so. Where a server multiplies such weights by 16 bits, as vLLM does below
SM100, it loses less than is measured here.

Fires for every MatMul whose second input is an fp32 initializer [K, N] that nothing else reads. Head and routers stay.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived
from llmforge.ir.mx import BLOCK
from llmforge.ir.operators.canonical import MxLinear
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization import mx
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import exclusion
from llmforge.rewrite.declared import QuantizeMxTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.traits import Storage


@dataclass(frozen=True)
class QuantizeMx(QuantizeMxTraits, Pass):
    """Multiply linear layers in MXFP4 or MXFP8, for servers of others."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY
    servers_alone: ClassVar[bool] = True

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    dtype: Annotated[Literal["fp4", "fp8"], Field(description="of codes; fp4: MXFP4, fp8: MXFP8")] = "fp8"
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    @property
    def server_format(self) -> str | None:
        """Name the format of linear layers."""
        return f"mx{self.dtype}"

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtype of weights and products."""
        return Storage(weights=self.dtype, product=self.dtype, block=BLOCK)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`."""
        routers, heads = routing.routers(model), logits_rows.readers(model)
        dtype = mx.DTYPES[self.dtype]

        def quantize(product: MatMul) -> str | None:
            weight = product.w
            if not weight.is_initializer() or len(graph.dims(weight) or ()) != 2:
                return None
            names = graph.sources(weight) or [str(weight.name)]
            if product.node in heads:
                raise NotApplicable("output head")
            if (experts := routers.get(product.node)) is not None:
                raise NotApplicable(f"router of {experts.name}")
            skip_if(_reason(weight) or exclusion(names, self.exclude))
            k, n = graph.static(weight)
            name, tensor = f"{weight.name}.mx{self.dtype}", graph.tensor(weight)
            codes = Derived(mx.CODES[dtype], [tensor], dtype, ir.Shape([k, n]), name)
            scales = Derived(mx.SCALES[dtype], [tensor], mx.E8M0, ir.Shape([k // BLOCK, n]), f"{name}.scales")
            operands = {
                "codes": graph.initializer(model, name, codes, graph.sources(weight)),
                "scales": graph.initializer(model, f"{name}.scales", scales),
            }
            made = MxLinear.insert(product.node, {"x": product.x, **operands}, name=product.name)
            graph.replace_value(product.output, made.output)
            return f"MX{self.dtype.upper()}, blocks of {BLOCK}, inputs too"

        if changes := rewrite_each(MatMul.all(model), quantize, Changes()):
            graph.drop_unused(model)
        return changes


def _reason(weight: ir.Value) -> str | None:
    """Say why `weight` stays; None where it can be stored."""
    if weight.dtype != ir.DataType.FLOAT:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or len(weight.uses()) > 1:
        return f"{weight.name} has other readers"
    k = graph.static(weight)[0]
    return f"its {k} input features are not a multiple of {BLOCK}" if k % BLOCK else None

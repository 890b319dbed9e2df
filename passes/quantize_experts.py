"""Multiply the experts of a mixture in int8, fp8 or NVFP4, weights and what they read, for servers of others.

    y = llmforge::MoE(x, ids, weights, up, down, …)
        becomes  y = llmforge::LowPrecisionMoE(x, ids, weights, codes, codes, scales, scales, …)

`up` is fp32 [E, H, 2·I or I], `down` [E, I, H]; codes have their shapes
(`llmforge.quantization.low_precision_experts`).

    format: int8, fp8    one scale for each output feature of an expert, and one for each token that it reads
    format: fp8-block    one for each square of 128 × 128 weights, and one for 128 features of a token
    format: nvfp4        one in fp8 for 16 weights of an output feature, under one of the expert; blocks of what is read
                         get theirs as it is read, in units of the largest magnitude of the calibration text over 6·448,
                         of all experts of a layer

Both products read what is rounded, the second one what the first one and the gate made. Weights are rounded to nearest.

Only a checkpoint for servers of others says so. Fires for every `llmforge::MoE` whose matrices are fp32 initializers
that nothing else reads and that blocks divide; with `fp8-block` a gate's columns stand in front of the others, and
squares divide both.

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
from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.operators.canonical import LowPrecisionMoE, MoE
from llmforge.quantization import nvfp4
from llmforge.quantization.grid import Grid
from llmforge.quantization.low_precision_experts import FORMATS, FP4, FormatOfExperts, scales_of_experts
from llmforge.quantization.statistics import Demand, ExpertRangeDemand, exclusion
from llmforge.rewrite.declared import QuantizeExpertsTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.traits import Storage

_FP32 = ir.DataType.FLOAT
_KEPT = ("x", "expert_ids", "expert_weights", "up_bias", "down_bias")
_ATTRIBUTES = ("activation", "gated", "interleaved", "alpha", "beta", "limit")


@dataclass(frozen=True)
class QuantizeExperts(QuantizeExpertsTraits, Pass):
    """Multiply the experts of a mixture in int8, fp8 or NVFP4, for servers of others."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY
    servers_alone: ClassVar[bool] = True

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    format: Annotated[
        FormatOfExperts,
        Field(
            description="of weights and of what they read; int8, fp8: a scale for each output feature and token; "
            "fp8-block: for 128 × 128 weights and 128 features of a token; nvfp4: for 16 of either"
        ),
    ] = "fp8"
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    @property
    def server_format(self) -> str | None:
        """Name the format of experts."""
        return f"{self.format}-per_token" if self.format in {"int8", "fp8"} else self.format

    def stores(self, stored: Grid | None) -> Storage:
        """Say nothing: linear layers stay as they are."""
        return Storage()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration, for NVFP4, for the ranges of what experts read."""
        return (ExpertRangeDemand(),) if self.format == "nvfp4" else ()

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every `llmforge::MoE` of `model`.

        Raises:
            DataError: what experts read has no range on the calibration text.
        """
        ranges = {} if context.statistics is None else context.statistics.inputs
        form = FORMATS[self.format]

        def quantize(layer: MoE) -> str:
            matrices = {"up": layer.up, "down": layer.down}
            for name, value in matrices.items():
                skip_if(_reason(value, form.group) or exclusion(graph.sources(value), self.exclude))
                if form.group and form.dtype != FP4:
                    width = graph.width(value) // (1 + (name == "up" and layer.gated))
                    if layer.interleaved or width % form.group:
                        raise NotApplicable(f"squares of {form.group} do not divide {value.name} by gate and by column")
            operands = {name: value for name in _KEPT if (value := getattr(layer, name)) is not None}
            for name, value in matrices.items():
                operands |= {
                    f"{name}{part}": made for part, made in self._codes(model, value, graph.sources(value)).items()
                }
                if form.dtype == FP4:
                    peak = self._peak(layer, [ranges[each].peaks for each in graph.sources(value) if each in ranges])
                    scale = graph.initializer(model, f"{layer.name}/{name}.input_scale", nvfp4.tensor_scale(peak))
                    operands[f"{name}_input_scale"] = scale
            attributes = {name: getattr(layer, name) for name in _ATTRIBUTES}
            made = LowPrecisionMoE.insert(layer.node, operands, {**attributes, "group": form.group}, name=layer.name)
            graph.replace_value(layer.output, made.output)
            return f"{self.format}, {graph.static(layer.up)[0]} experts, inputs too"

        if changes := rewrite_each(MoE.all(model), quantize, Changes()):
            graph.drop_unused(model)
        return changes

    def _codes(self, model: ir.Model, value: ir.Value, sources: list[str]) -> dict[str, ir.Value]:
        """Make codes and scales of the matrices of all experts, and of NVFP4 the scale of each expert."""
        form, tensor, name = FORMATS[self.format], graph.tensor(value), f"{value.name}.{self.format}"
        count, k, n = graph.static(value)
        rows = k // form.group if form.group else 1
        parts, made = [tensor], {}
        if form.dtype == FP4:
            whole = Derived(scales_of_experts, [tensor], _FP32, ir.Shape([count]), f"{name}.scale")
            made["_scale"] = graph.initializer(model, f"{name}.scale", whole)
            parts.append(whole)
        codes = Derived(form.codes, parts, form.dtype, ir.Shape([count, k, n]), name)
        scales = Derived(form.scales, parts, form.scale_dtype, ir.Shape([count, rows, n]), f"{name}.scales")
        made[""] = graph.initializer(model, name, codes, sources)
        made["_scales"] = graph.initializer(model, f"{name}.scales", scales)
        return made

    def _peak(self, layer: MoE, measured: list[np.ndarray]) -> float:
        """Return the largest magnitude of what a product of experts reads."""
        peak = max((float(each.max()) for each in measured), default=0.0)
        if not 0 < peak < math.inf:
            raise DataError(
                f"{self.name}: what {layer.name} reads ranges to {peak:g} on the calibration text, so that it has no "
                "scale",
                hint="use more calibration text, or set `format: fp8`",
            )
        return peak


def _reason(value: ir.Value, group: int) -> str | None:
    """Say why the matrices of experts stay; None where they can be stored."""
    if value.dtype != _FP32 or not value.is_initializer():
        return f"{value.name} is no fp32 initializer"
    if value.is_graph_output() or len(value.uses()) > 1:
        return f"{value.name} has other readers"
    k = graph.static(value)[1]
    return f"its {k} input features are not a multiple of {group}" if group and k % group else None

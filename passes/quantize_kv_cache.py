"""Store the KV cache in int8, with calibrated scales.

    y, present_key, present_value = com.microsoft::GroupQueryAttention(…, past_key, past_value, …)
    becomes the same with k_scale, v_scale fp32 [1, kv_heads, 1, head_dim] (per_channel) or [1] (per_tensor), attributes
    k_quant_type, v_quant_type and kv_cache_bit_width = 8, and the graph's cache inputs and outputs as int8.

A cached value is round(x / scale), clipped to -128 … 127, with scale = largest |x| on the calibration text / 127. Keys
are those after rotary embedding. On the sample checkpoint (tests/data) a scale a channel moves the mean KLD by 0.0004,
one a tensor by 0.0008.

Fires for every GroupQueryAttention whose caches are fp32 inputs of the graph that nothing else reads, but in the layers
`exclude_layers`.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical
from llmforge.ir.operators.contrib import GroupQueryAttention
from llmforge.lowering.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.quantization.formats import INT8_KV
from llmforge.quantization.statistics import Demand, KvRange, KvRangeDemand


@dataclass(frozen=True)
class QuantizeKvCache(Pass):
    """Store the KV cache in int8, with calibrated scales."""

    name: ClassVar[str] = "quantize-kv-cache"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    bits: Annotated[Literal[8], Field(description="bits per cached value")] = 8
    granularity: Annotated[
        Literal["per_channel", "per_tensor"],
        Field(description="one scale per channel of each head, or one for all keys and one for all values of a layer"),
    ] = "per_channel"
    exclude_layers: Annotated[
        tuple[Annotated[int, Field(ge=0, le=65_535)], ...],
        Field(max_length=65_536, description="layers whose cache stays fp32, from 0"),
    ] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of keys and values."""
        return (KvRangeDemand(),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every GroupQueryAttention of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose caches these are.
            DataError: a channel was 0 on all of the calibration text, so that it has no scale.
        """
        context.require_onnxruntime(self.name, "int8 caches are those of its GroupQueryAttention")
        ranges = {} if context.statistics is None else context.statistics.kv
        layers = {interface.past_part(layer, "key"): layer for layer in ranges}
        changes = Changes()
        for node in model.graph:
            if canonical.Attention.matches(node):
                changes.skipped.append(Skipped(str(node.name), "not lowered to GroupQueryAttention"))
            if (attention := GroupQueryAttention.of(node)) is None:
                continue
            reason = _reason(attention, layers, self.exclude_layers)
            if reason is not None:
                changes.skipped.append(Skipped(attention.name, reason))
                continue
            layer = layers[str(attention.past_key.name)]
            self._rewrite(model, attention, layer, ranges[layer])
            what = f"int8 keys and values, {self.granularity.replace('_', ' ')}"
            changes.rewritten.append(Rewritten(attention.name, what))
        return changes

    def _rewrite(self, model: ir.Model, attention: GroupQueryAttention, layer: int, peaks: KvRange) -> None:
        """Quantize the caches of one attention."""
        keys = self._scales(peaks.key, f"layer {layer}, key")
        values = self._scales(peaks.value, f"layer {layer}, value")
        attention.k_scale = graph.initializer(model, f"{interface.past_part(layer, 'key')}.scale", keys)
        attention.v_scale = graph.initializer(model, f"{interface.past_part(layer, 'value')}.scale", values)
        for cache in (attention.past_key, attention.past_value, attention.present_key, attention.present_value):
            cache.type = ir.TensorType(ir.DataType.INT8)
        attention.k_quant_type = attention.v_quant_type = self.granularity.upper()
        attention.kv_cache_bit_width = self.bits

    def _scales(self, peak: NDArray[np.float32], where: str) -> NDArray[np.float32]:
        """Turn largest magnitudes [kv_heads, head_dim] into scales, [1, kv_heads, 1, head_dim] or [1]."""
        usable = np.isfinite(peak) & (peak > 0)
        if not usable.all():
            head, channel = np.argwhere(~usable)[0].tolist()
            raise DataError(
                f"{self.name}: {where}, channel {channel} of KV head {head} ranges to {peak[head, channel]:g} on the "
                "calibration text, so it has no scale",
                hint=f"use more calibration text, or leave {self.name} out of the recipe",
            )
        scales = peak[None, :, None, :] if self.granularity == "per_channel" else peak.max(keepdims=True).reshape(1)
        return (scales / np.float32(INT8_KV.largest)).astype(np.float32)


def _reason(attention: GroupQueryAttention, layers: dict[str, int], excluded: tuple[int, ...]) -> str | None:
    """Say why the caches of `attention` stay as they are; None where they can be quantized."""
    key, value = attention.past_key, attention.past_value
    for cache in (key, value):
        if cache.dtype != ir.DataType.FLOAT:
            return f"cache {cache.name} is {cache.dtype}, not fp32"
        if not cache.is_graph_input() or len(cache.uses()) > 1:
            return f"cache {cache.name} is not an input of the graph that nothing else reads"
    if key.name not in layers:
        return f"calibration has no ranges for cache {key.name}"
    if value.name != interface.past_part(layers[str(key.name)], "value"):
        return f"caches {key.name} and {value.name} are not of one layer"
    if layers[str(key.name)] in excluded:
        return f"layer {layers[str(key.name)]} is excluded"
    return None

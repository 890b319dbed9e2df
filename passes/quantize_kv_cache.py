"""Keep cached keys and values as int8, with scales that calibration measured.

    y, present_key, present_value = com.microsoft::GroupQueryAttention(…, past_key, past_value, …)
    becomes the same with k_scale, v_scale fp32 [1, kv_heads, 1, head_dim] (per_channel) or [1] (per_tensor), attributes
    k_quant_type, v_quant_type and kv_cache_bit_width = 8, and the graph's cache inputs and outputs as int8.

A cached value is round(x / scale), clipped to -128 … 127, with scale = largest |x| on the calibration text / 127. Keys
are those after rotary embedding. On the sample checkpoint (tests/data) a scale a channel moves the mean KLD by 0.0004,
one a tensor by 0.0008.

Fires for every GroupQueryAttention whose caches are fp32 inputs of the graph that nothing else reads.

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
from llmforge.lowering.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.quantization.formats import INT8_KV
from llmforge.quantization.statistics import Demand, KvRange, KvRangeDemand

_PAST = (3, 4)  # inputs of GroupQueryAttention: past_key, past_value
_PRESENT = (1, 2)  # outputs: present_key, present_value
_SCALES = 12  # inputs from here on: k_scale, v_scale


@dataclass(frozen=True)
class QuantizeKvCache(Pass):
    """Keep cached keys and values as int8, with scales that calibration measured."""

    name: ClassVar[str] = "quantize-kv-cache"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})

    budget: Annotated[Budget, Field(description="what the pass may cost")]
    bits: Annotated[Literal[8], Field(description="bits of a cached number")] = 8
    granularity: Annotated[
        Literal["per_channel", "per_tensor"],
        Field(description="one scale a channel of a head, or one for all keys and one for all values of a layer"),
    ] = "per_channel"

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
        layers = {interface.past_key(layer): layer for layer in ranges}
        changes = Changes()
        for node in model.graph:
            if (node.domain, node.op_type) == ("llmforge", "Attention"):
                changes.skipped.append(Skipped(str(node.name), "it was not lowered to GroupQueryAttention"))
            if (node.domain, node.op_type) != ("com.microsoft", "GroupQueryAttention"):
                continue
            reason = _reason(node, layers)
            if reason is not None:
                changes.skipped.append(Skipped(str(node.name), reason))
                continue
            layer = layers[str(_past(node)[0].name)]
            self._rewrite(model, node, layer, ranges[layer])
            what = f"int8 keys and values, {self.granularity.replace('_', ' ')}"
            changes.rewritten.append(Rewritten(str(node.name), what))
        return changes

    def _rewrite(self, model: ir.Model, node: ir.Node, layer: int, peaks: KvRange) -> None:
        """Quantize the caches of one attention."""
        node.resize_inputs(max(len(node.inputs), _SCALES + 2))
        both = zip(("key", "value"), (peaks.key, peaks.value), _past(node), strict=True)
        for index, (what, peak, cache) in enumerate(both):
            scales = self._scales(peak, f"layer {layer}, {what}")
            value = graph.initializer(model, f"{getattr(interface, f'past_{what}')(layer)}.scale", scales)
            node.replace_input_with(_SCALES + index, value)
            for end in (cache, node.outputs[_PRESENT[index]]):
                end.type = ir.TensorType(ir.DataType.INT8)
        node.attributes["k_quant_type"] = ir.AttrString("k_quant_type", self.granularity.upper())
        node.attributes["v_quant_type"] = ir.AttrString("v_quant_type", self.granularity.upper())
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", self.bits)

    def _scales(self, peak: NDArray[np.float32], where: str) -> NDArray[np.float32]:
        """Turn largest magnitudes [kv_heads, head_dim] into scales, [1, kv_heads, 1, head_dim] or [1]."""
        usable = np.isfinite(peak) & (peak > 0)
        if not usable.all():
            head, channel = np.argwhere(~usable)[0].tolist()
            raise DataError(
                f"{self.name}: {where}, channel {channel} of KV head {head} ranges to {peak[head, channel]:g} on the "
                "calibration text, so that it has no scale",
                hint=f"give more calibration text, or leave {self.name} out of the recipe",
            )
        scales = peak[None, :, None, :] if self.granularity == "per_channel" else peak.max(keepdims=True).reshape(1)
        return (scales / np.float32(INT8_KV.largest)).astype(np.float32)


def _past(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the cache inputs of an attention."""
    key, value = (node.inputs[index] for index in _PAST)
    assert key is not None
    assert value is not None
    return key, value


def _reason(node: ir.Node, layers: dict[str, int]) -> str | None:
    """Say why the caches of `node` stay as they are; None where they can be quantized."""
    if len(node.inputs) <= max(_PAST) or any(node.inputs[index] is None for index in _PAST):
        return "it has no cache"
    for cache in _past(node):
        if cache.dtype != ir.DataType.FLOAT:
            return f"cache {cache.name} is {cache.dtype}, not fp32"
        if not cache.is_graph_input() or len(cache.uses()) > 1:
            return f"cache {cache.name} is not an input of the graph that nothing else reads"
    key, value = _past(node)
    if key.name not in layers:
        return f"calibration has no ranges for cache {key.name}"
    if value.name != interface.past_value(layers[str(key.name)]):
        return f"caches {key.name} and {value.name} are not of one layer"
    return None

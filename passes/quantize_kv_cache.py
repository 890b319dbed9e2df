"""Store the KV cache in 8 or 4 bits.

    y, present_key, present_value = com.microsoft::GroupQueryAttention(…, past_key, past_value, …)
    becomes the same with k_scale, v_scale fp32 [1, kv_heads, 1, head_dim] (per_channel) or [1] (per_tensor), attributes
    k_quant_type, v_quant_type and kv_cache_bit_width = 8, and the graph's cache inputs and outputs as int8,

or, where keys or values have a scale a token (`granularity: per_token`, and always with 4 bits),

    y, present_key, present_value = llmforge.cpu::GroupQueryAttentionSlots(qkv, past_key, past_value, …)
    with caches uint8 [batch, kv_heads, capacity, bytes of a slot], a token's scale in its slot (docs/cpu-kernels.md).

Keys are those after rotary embedding. A static scale is the largest |x| on the calibration text / 127, and a value
round(x / scale), clipped to -128 … 127. A scale of a token is the largest |x| of the token / 127; with 4 bits a slot
has a scale and an offset, those that fit the token best (llmforge/quantization/kv_cache.py has every rounding).
`rotation: hadamard` multiplies with a Hadamard matrix what has a scale a token, queries with keys, so that channels
larger than others do not take the range of all; as many channels at a time as the largest power of two that divides
those of a head.

Fires for every GroupQueryAttention whose caches are fp32 inputs of the graph that nothing else reads, but in the layers
`exclude_layers`; with scales of tokens for those that the CPU kernels compute, with heads of a multiple of 32 channels
for 4 bits.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge import native
from llmforge.base.errors import DataError
from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.contrib import GroupQueryAttention
from llmforge.quantization.formats import INT8_KV, KvFormat, SlotFormat
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import Demand, KvRange, KvRangeDemand
from llmforge.rewrite import cpu_attention
from llmforge.rewrite.declared import QuantizeKvCacheTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.traits import Storage


@dataclass(frozen=True)
class QuantizeKvCache(QuantizeKvCacheTraits, Pass):
    """Store the KV cache in 8 or 4 bits."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    bits: Annotated[
        Literal[4, 8], Field(description="bits per cached value; 4 need llmforge's CPU kernels, and a generous budget")
    ] = 8
    value_bits: Annotated[
        Literal[4, 8] | None, Field(description="bits per number of cached values (V); default: `bits`, as of keys")
    ] = None
    granularity: Annotated[
        Literal["per_channel", "per_tensor", "per_token"],
        Field(
            description="what has a scale of 8 bits: each channel of each head, all keys and all values of a layer, or "
            "each token of each head, which needs llmforge's CPU kernels and no calibration; 4 bits have one per token"
        ),
    ] = "per_channel"
    rotation: Annotated[
        Literal["none", "hadamard"],
        Field(description="hadamard: spread outliers of what has a scale per token over all channels of a head"),
    ] = "none"
    exclude_layers: Annotated[
        tuple[Annotated[int, Field(ge=0, le=65_535)], ...],
        Field(max_length=65_536, description="layers whose cache stays fp32, from 0"),
    ] = ()

    @model_validator(mode="after")
    def _rotates_something(self) -> Self:
        if self.rotation == "hadamard" and self.format.portable:
            raise ValueError("rotation: hadamard is for scales per token: granularity: per_token, or 4 bits")
        return self

    @property
    def format(self) -> KvFormat:
        """How keys and values are stored."""
        return KvFormat(self._slots(self.bits), self._slots(self.bits if self.value_bits is None else self.value_bits))

    def _slots(self, bits: int) -> SlotFormat:
        scale = "token" if bits == 4 else self.granularity.removeprefix("per_")
        return SlotFormat(f"int{bits}", scale, scale == "token" and self.rotation == "hadamard")

    def stores(self, stored: Grid | None) -> Storage:
        """Say how keys and values are stored."""
        return Storage(kv="int8", cache=None if self.format.portable else self.format)

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of keys and values, where a scale is static."""
        form = self.format
        return (KvRangeDemand(),) if form.keys.portable or form.values.portable else ()

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every GroupQueryAttention of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose caches these are; or is no CPU, which the kernels
                for scales of tokens are for.
            EnvironmentLacks: they are not compiled here.
            DataError: a channel was 0 on all of the calibration text, so that it has no scale.
        """
        form = self.format
        if form.portable:
            context.require_onnxruntime(self.name, "int8 caches are those of its GroupQueryAttention")
        else:
            context.require_cpu(f"{self.name} with {form.name}")
            native.require()
        ranges = {} if context.statistics is None else context.statistics.kv

        def quantize(node: ir.Node) -> str | None:
            if canonical.Attention.matches(node):
                raise NotApplicable("not lowered to GroupQueryAttention")
            if operators.is_a(node, canonical.LatentAttention, cpu.CpuLatentAttention):
                raise NotApplicable("it caches latents, which no kernel reads in int8")
            if (attention := GroupQueryAttention.of(node)) is None:
                return None
            layer = _layer(attention, self.exclude_layers)
            if self.demands() and layer not in ranges:
                raise NotApplicable(f"calibration has no ranges for cache {attention.past_key.name}")
            skip_if(None if form.portable else _slots_reason(attention, form))
            self._rewrite(model, attention, layer, ranges.get(layer))
            return self._what(attention)

        if changes := rewrite_each(list(model.graph), quantize, Changes()):
            graph.drop_unused(model)
        return changes

    def _what(self, attention: GroupQueryAttention) -> str:
        if self.format.portable:
            return f"int8 keys and values, {self.granularity.replace('_', ' ')}"
        dim = graph.width(attention.past_key)
        keys, values = (each.bits_per_number(dim) for each in (self.format.keys, self.format.values))
        return f"{self.format.name}: {keys:.4g} bits per number of keys, {values:.4g} of values"

    def _rewrite(self, model: ir.Model, attention: GroupQueryAttention, layer: int, peaks: KvRange | None) -> None:
        """Quantize the caches of one attention."""
        form = self.format
        static: dict[str, ir.Value | None] = {"key": None, "value": None}
        for part, own in (("key", form.keys), ("value", form.values)):
            if own.portable:
                assert peaks is not None
                scales = self._scales(getattr(peaks, part), f"layer {layer}, {part}")
                static[part] = graph.initializer(model, f"{interface.past_part(layer, part)}.scale", scales)
        if not form.portable:
            cpu_attention.lower_to_slots(attention, form, static["key"], static["value"])
            return
        attention.k_scale, attention.v_scale = static["key"], static["value"]
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


def _layer(attention: GroupQueryAttention, excluded: tuple[int, ...]) -> int:
    """Read from the name of its cache which layer `attention` is of."""
    key, value = attention.past_key, attention.past_value
    for cache in (key, value):
        if cache.dtype != ir.DataType.FLOAT:
            raise NotApplicable(f"cache {cache.name} is {cache.dtype}, not fp32")
        if not cache.is_graph_input() or len(cache.uses()) > 1:
            raise NotApplicable(f"cache {cache.name} is not an input of the graph that nothing else reads")
    found = interface.PAST.fullmatch(str(key.name))
    if found is None or found[2] != "key":
        raise NotApplicable(f"cache {key.name} is of no layer")
    layer = int(found[1])
    if value.name != interface.past_part(layer, "value"):
        raise NotApplicable(f"caches {key.name} and {value.name} are not of one layer")
    if layer in excluded:
        raise NotApplicable(f"layer {layer} is excluded")
    return layer


def _slots_reason(attention: GroupQueryAttention, form: KvFormat) -> str | None:
    """Say why the CPU kernels do not compute `attention` over caches of `form`; None where they do."""
    reason = cpu_attention.reason_against(attention)
    if reason is not None:
        return reason
    dim = graph.width(attention.past_key)
    return form.keys.reason_against(dim) or form.values.reason_against(dim)

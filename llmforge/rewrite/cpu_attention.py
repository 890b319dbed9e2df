"""GroupQueryAttention as an operator of `llmforge.cpu`, with the norms of queries and keys inside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, query_key_norms
from llmforge.ir.derived import Derived
from llmforge.ir.operators import canonical, contrib, cpu
from llmforge.ir.operators.standard import Split
from llmforge.ir.query_key_norms import Normed
from llmforge.ir.scratch import Scratch
from llmforge.quantization import channels
from llmforge.quantization.formats import KvFormat, SlotFormat

HEAD_MULTIPLE = 16
LARGEST_HEAD = 1024
_PER_CHANNEL, _PER_TENSOR = "PER_CHANNEL", "PER_TENSOR"
_STATIC, _INT8, _INT4 = 0, 1, 2  # kernels.h, SLOT_*


def reason_against(attention: contrib.GroupQueryAttention) -> str | None:
    """Say why `attention` cannot become one of `llmforge.cpu`; None where it can."""
    past, (*_, head) = attention.past_key, graph.dims(attention.past_key) or (None,)
    if not isinstance(head, int) or head % HEAD_MULTIPLE or head > LARGEST_HEAD:
        return f"heads have {head} channels; the kernel needs a multiple of {HEAD_MULTIPLE}, at most {LARGEST_HEAD}"
    known = contrib.GroupQueryAttention
    for given in (known.position_ids, known.attention_bias, known.q_norm_weight, known.k_norm_weight):
        if attention.operand(given) is not None:
            return f"input {given.name} of GroupQueryAttention is not supported by the kernel"
    for name, value in (
        ("smooth_softmax", attention.smooth_softmax),
        ("sliding_window_cache", attention.sliding_window_cache),
    ):
        if value > 0:
            return f"{name} is not supported by the kernel"
    if not attention.causal:
        return "it is not causal"
    if past.dtype not in (ir.DataType.FLOAT, ir.DataType.INT8):
        return f"caches are {past.dtype}; the kernel reads fp32 and int8"
    if attention.query.dtype != ir.DataType.FLOAT:
        return "it does not compute in fp32"
    types = {attention.k_quant_type, attention.v_quant_type}
    if past.dtype == ir.DataType.INT8 and types not in ({_PER_CHANNEL}, {_PER_TENSOR}):
        return f"scales of keys and values are {' and '.join(sorted(types))}"
    return None


def lower(attention: contrib.GroupQueryAttention) -> str:
    """Put the kernel in the place of an attention, against which there is no reason; return what was done."""
    int8 = attention.past_key.dtype == ir.DataType.INT8
    kernel = cpu.GroupQueryAttentionInt8 if int8 else cpu.CpuGroupQueryAttention
    scales = {"k_scale": attention.k_scale, "v_scale": attention.v_scale} if int8 else {}
    lowered = _lower(attention, kernel, scales, {})
    return kernel.op_type + ", norms of queries and keys" * (lowered.q_norm_weight is not None)


def reason_against_latents(attention: canonical.LatentAttention) -> str | None:
    """Say why `attention` cannot become one of `llmforge.cpu`; None where it can."""
    sizes = {
        "a latent": attention.rank,
        "rotary embedding": attention.rotary,
        "the rest of a key": attention.plain,
        "a value": attention.value_dim,
    }
    for what, size in sizes.items():
        if size % HEAD_MULTIPLE:
            return f"{what} has {size} channels; the kernel needs a multiple of {HEAD_MULTIPLE}"
    if {attention.q.dtype, attention.past.dtype, attention.up.dtype} != {ir.DataType.FLOAT}:
        return "it does not compute in fp32"
    if not attention.up.is_initializer():
        return f"{attention.up.name} is no initializer"
    return None


def lower_latents(model: ir.Model, attention: canonical.LatentAttention, scratch: Scratch | None, *, int8: bool) -> str:
    """Put the kernel in the place of an attention over latents, against which there is no reason; say what was done.

    `int8`: what makes keys and values of latents is rounded to 8 bits, in blocks of each row.
    """
    up, scales, block = attention.up, None, channels.block_of(attention.rank)
    kernel = cpu.LatentAttentionInt8 if int8 else cpu.CpuLatentAttention
    if int8:
        assert block is not None
        tensor, name, shape = graph.tensor(up), f"{up.name}.int8", graph.static(up)
        operands = [tensor, ir.tensor(np.array(block, np.int64))]
        codes = Derived(channels.block_codes, operands, ir.DataType.INT8, ir.Shape(shape), name, scratch=scratch)
        steps = ir.Shape((shape[0], shape[1] // block))
        scale = Derived(channels.block_scales, operands, ir.DataType.FLOAT, steps, f"{name}.scales", scratch=scratch)
        scales = graph.initializer(model, f"{name}.scales", scale)
        up = graph.initializer(model, name, codes, graph.sources(up))
    inputs = {
        "q": attention.q,
        "latent": attention.latent,
        "up": up,
        "up_scale": scales,
        "past": attention.past,
        "past_lengths": attention.past_lengths,
        "sinks": attention.sinks,
    }
    attributes = {
        "num_heads": attention.num_heads,
        "window": attention.window,
        "scale": attention.scale,
        "softcap": attention.softcap,
    }
    name, node = attention.name, attention.node
    node.name = f"{name}.replaced"
    lowered = kernel.insert(node, inputs, attributes, outputs=2, name=name)
    graph.replace_outputs(node, lowered.node.outputs)
    return lowered.op_type + f", up-projection in blocks of {block}" * int8


def lower_encoder(attention: canonical.EncoderAttention) -> None:
    """Put the kernel in the place of an attention of sequences to themselves."""
    inputs = {name: getattr(attention, name) for name in ("q", "k", "v", "sequence_starts")}
    names = ("num_heads", "kv_num_heads", "scale", "softcap", "left", "right")
    name, node = attention.name, attention.node
    node.name = f"{name}.replaced"
    attributes = {each: getattr(attention, each) for each in names}
    if (packed := _packed_qkv(attention)) is not None:
        inputs |= dict.fromkeys(("q", "k", "v"), packed)
        attributes["packed"] = 1
    graph.replace_outputs(node, cpu.CpuEncoderAttention.insert(node, inputs, attributes, name=name).node.outputs)


def _packed_qkv(attention: canonical.EncoderAttention) -> ir.Value | None:
    """Find the tensor of which queries, keys and values of one width a head are the parts; None where there is none."""
    split, parts = Split.made(attention.q), [attention.q, attention.k, attention.v]
    if split is None or list(split.node.outputs) != parts or any(len(part.uses()) > 1 for part in parts):
        return None
    widths = [graph.width(part) for part in parts]
    heads = (attention.num_heads, attention.kv_num_heads, attention.kv_num_heads)
    alike = len({width / count for width, count in zip(widths, heads, strict=True)}) == 1
    return split.x if alike and split.axis in (-1, 2) else None


def lower_to_slots(
    attention: contrib.GroupQueryAttention, form: KvFormat, k_scale: ir.Value | None, v_scale: ir.Value | None
) -> None:
    """Do so with caches of fp32, which become slots of `form`; `k_scale` and `v_scale` are static scales, if any."""
    dim = graph.width(attention.past_key)
    attributes = {
        "head_dim": dim,
        "key_slot": _slot(form.keys),
        "value_slot": _slot(form.values),
        "turn_keys": int(form.keys.hadamard),
        "turn_values": int(form.values.hadamard),
    }
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    lowered = _lower(attention, cpu.GroupQueryAttentionSlots, scales, attributes, per_channel=_per_channel(form))
    keys, values = (lowered.past_key, lowered.present_key), (lowered.past_value, lowered.present_value)
    for caches, own in ((keys, form.keys), (values, form.values)):
        for cache in caches:
            cache.type = ir.TensorType(ir.DataType.UINT8)
            if cache.shape is not None:
                cache.shape = ir.Shape([*cache.shape[:3], own.bytes_per_slot(dim)])


def slots_of(node: ir.Node, cache: str) -> tuple[SlotFormat, ir.Value | None, int] | None:
    """Return how `node` stores the cache of that name, its static scales, and channels; None: not in slots."""
    attention = cpu.GroupQueryAttentionSlots.of(node)
    if attention is None:
        return None
    if attention.past_key.name == cache:
        slot, turned, scale = attention.key_slot, attention.turn_keys, attention.k_scale
    elif attention.past_value.name == cache:
        slot, turned, scale = attention.value_slot, attention.turn_values, attention.v_scale
    else:
        return None
    static = "channel" if attention.per_channel else "tensor"
    dtype = "int4" if slot == _INT4 else "int8"
    return SlotFormat(dtype, static if slot == _STATIC else "token", bool(turned)), scale, attention.head_dim


def _slot(form: SlotFormat) -> int:
    return _STATIC if form.portable else _INT4 if form.dtype == "int4" else _INT8


def _per_channel(form: KvFormat) -> bool:
    return "channel" in (form.keys.scale, form.values.scale)


def _lower(
    attention: contrib.GroupQueryAttention,
    kernel: type[cpu.CpuGroupQueryAttention],
    scales: Mapping[str, ir.Value | None],
    more: Mapping[str, int],
    *,
    per_channel: bool | None = None,
) -> cpu.CpuGroupQueryAttention:
    heads, kv_heads, dim = attention.num_heads, attention.kv_num_heads, graph.width(attention.past_key)
    qkv, query, key = _packed(attention, (heads + 2 * kv_heads) * dim, dim)
    rotates = attention.do_rotary
    if per_channel is None:
        per_channel = bool(scales) and attention.k_quant_type == _PER_CHANNEL
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "local_window_size": max(attention.local_window_size, 0),
        "rotary_interleaved": attention.rotary_interleaved,
        "per_channel": int(per_channel),
        "scale": attention.scale or 1 / math.sqrt(dim),
        "softcap": attention.softcap,
        "qk_norm_epsilon": query.epsilon,
        **more,
    }
    inputs = {
        "qkv": qkv,
        "past_key": attention.past_key,
        "past_value": attention.past_value,
        "seqlens_k": attention.seqlens_k,
        "cos_cache": attention.cos_cache if rotates else None,
        "sin_cache": attention.sin_cache if rotates else None,
        "k_scale": scales.get("k_scale"),
        "v_scale": scales.get("v_scale"),
        "q_norm_weight": query.weight,
        "k_norm_weight": key.weight,
        "head_sink": attention.head_sink,
    }
    name = attention.name
    attention.node.name = f"{name}.replaced"
    lowered = kernel.insert(attention.node, inputs, attributes, outputs=3, name=name)
    graph.replace_outputs(attention.node, lowered.node.outputs)
    return lowered


def _packed(attention: contrib.GroupQueryAttention, width: int, dim: int) -> tuple[ir.Value, Normed, Normed]:
    """Find query, key and value side by side, `width` channels, and the norms of heads that the kernel takes over."""
    query, key, value = attention.query, attention.key, attention.value
    if key is None or value is None:
        return query, Normed(query), Normed(query)
    of_query, of_key = query_key_norms.both_in_front(query, key, dim)
    sources = (of_query.source, of_key.source, value)
    split = Split.made(of_query.source)
    if split is not None and tuple(split.node.outputs) == sources:
        return split.x, of_query, of_key
    [joined] = graph.insert(attention.node, "Concat", sources, {"axis": -1}, name=f"{attention.name}/qkv")
    joined.name, joined.type = f"{attention.name}.qkv", query.type
    joined.shape = ir.Shape([*query.shape[:-1], width]) if query.shape is not None else None
    return joined, of_query, of_key

"""Lower attention to ONNX Runtime's GroupQueryAttention over a KV buffer that past and present share.

    q = RotaryEmbedding(q', cos, sin, position_ids); k = RotaryEmbedding(k', cos, sin, position_ids)
    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths[, sinks])
    becomes
    y, present_key, present_value = com.microsoft::GroupQueryAttention(
        q', k', v, past_key, past_value, seqlens_k, total_sequence_length, cos, sin, , , sinks)

`q` is [batch, sequence, num_heads·D], `k` and `v` are [batch, sequence, kv_num_heads·D], the caches
[batch, kv_num_heads, capacity, D]. Attributes: `num_heads`, `kv_num_heads`, `scale` and `softcap` are the same,
`window` becomes `local_window_size` (0: left out), rotary embedding `do_rotary` and `rotary_interleaved`.
Inputs of the graph: `seqlens_k` and `total_sequence_length` are added; `past_lengths` and `position_ids` go where
nothing reads them any more.

Fires for every `llmforge::Attention` where
- keys and values have one head size, a multiple of 8,
- kv_num_heads divides num_heads,
- sinks, if there are any, are [num_heads],
- there are no ALiBi slopes.

Rotary embedding is folded in where query and key have the same caches, layout and the graph's `position_ids`, the head
size is a multiple of 16 and the caches have a multiple of 8 columns, at most half a head; else it stays in front.
A query, key and value that come, in this order, from one Split of three are passed unsplit, as a packed query.

These conditions are those of the kernel (onnxruntime 1.31, contrib_ops/cpu/bert/group_query_attention_helper.h), which
checks them when it runs.

Numerics: the same sums in another order (the kernel works through the cache block by block).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.ir import graph, interface
from llmforge.lowering.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_HEAD_MULTIPLE = 8
_HEAD_MULTIPLE_WITH_ROTARY = 16
_ROTARY_COLUMNS_MULTIPLE = 8


class _Operands(NamedTuple):
    """Query, key and value of GroupQueryAttention, and its rotary embedding."""

    query: ir.Value
    key: ir.Value | None  # None: packed into the query
    value: ir.Value | None
    cos: ir.Value | None = None  # None: rotary embedding stays in front, or there is none
    sin: ir.Value | None = None
    interleaved: int = 0


@dataclass(frozen=True)
class FlashAttention(Pass):
    """Lower attention to ONNX Runtime's GroupQueryAttention over a shared KV buffer."""

    name: ClassVar[str] = "flash-attention"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    provides: ClassVar[frozenset[str]] = frozenset({"gqa"})

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every attention of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operator this is.
        """
        context.require_onnxruntime(self.name, "GroupQueryAttention is an operator of ONNX Runtime")
        changes = Changes()
        for attention in [n for n in model.graph if (n.domain, n.op_type) == ("llmforge", "Attention")]:
            reason = _obstacle(attention)
            if reason is not None:
                changes.skipped.append(Skipped(str(attention.name), reason))
                continue
            operands = _unsplit(_fold_rotary(attention, changes))
            changes.rewritten.append(Rewritten(str(attention.name), _summary(operands)))
            _lower(model, attention, operands)
        if changes:
            model.opset_imports["com.microsoft"] = 1
            graph.drop_unused(model)
        return changes


def _obstacle(attention: ir.Node) -> str | None:
    """Say why GroupQueryAttention cannot do what `attention` does; None where it can."""
    heads = attention.attributes.get_int("num_heads")
    kv_heads = attention.attributes.get_int("kv_num_heads")
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    key, value = _head_size(attention, 3), _head_size(attention, 4)
    if key is None or value is None:
        return "the head size of a cache is not known"
    if key != value:
        return f"heads of keys have {key} channels and those of values {value}; GroupQueryAttention wants one size"
    if key % _HEAD_MULTIPLE:
        return f"heads have {key} channels; GroupQueryAttention wants a multiple of {_HEAD_MULTIPLE}"
    if len(attention.inputs) > 7 and attention.inputs[7] is not None:
        return "scores have a bias by position (ALiBi); GroupQueryAttention would need it as a tensor of all positions"
    sinks = _sinks(attention)
    if sinks is not None and graph.dims(sinks) != (heads,):
        return f"sinks are {graph.dims(sinks)}; GroupQueryAttention wants ({heads},)"
    return None


def _head_size(attention: ir.Node, cache: int) -> int | None:
    """Read the channels of a head off input `cache` of `attention`, [batch, heads, capacity, channels]."""
    value = attention.inputs[cache]
    shape = None if value is None else graph.dims(value)
    return shape[3] if shape is not None and len(shape) == 4 and isinstance(shape[3], int) else None


def _sinks(attention: ir.Node) -> ir.Value | None:
    return attention.inputs[6] if len(attention.inputs) > 6 else None


def _fold_rotary(attention: ir.Node, changes: Changes) -> _Operands:
    """Return the operands with rotary embedding folded in where the kernel can do it; record it where it cannot."""
    query, key, value = attention.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    outside = _Operands(query, key, value)
    of_query, of_key = query.producer(), key.producer()
    if of_query is None or of_key is None or "RotaryEmbedding" not in (of_query.op_type, of_key.op_type):
        return outside
    reason = _rotary_obstacle(of_query, of_key, _head_size(attention, 3) or 0)
    if reason is not None:
        changes.skipped.extend(
            Skipped(str(node.name), reason) for node in (of_query, of_key) if node.op_type == "RotaryEmbedding"
        )
        return outside
    source, cos, sin = of_query.inputs[:3]
    assert source is not None
    interleaved = of_query.attributes.get_int("interleaved", 0)
    return _Operands(source, of_key.inputs[0], value, cos, sin, interleaved)


def _rotary_obstacle(of_query: ir.Node, of_key: ir.Node, head_size: int) -> str | None:
    """Say why the rotary embeddings of a query and a key stay outside; None where they can be folded in."""
    if of_query.op_type != of_key.op_type:
        return "only one of query and key has rotary embedding"
    if list(of_query.inputs[1:]) != list(of_key.inputs[1:]):
        return "query and key have different rotary caches or positions"
    positions = of_query.inputs[3] if len(of_query.inputs) > 3 else None
    if positions is None or positions.name != interface.POSITION_IDS or not positions.is_graph_input():
        return f"the positions are not the graph's {interface.POSITION_IDS}"
    if of_query.attributes.get_int("interleaved", 0) != of_key.attributes.get_int("interleaved", 0):
        return "one of query and key is interleaved and the other is not"
    if head_size % _HEAD_MULTIPLE_WITH_ROTARY:
        return (
            f"heads have {head_size} channels; with rotary the kernel wants a multiple of {_HEAD_MULTIPLE_WITH_ROTARY}"
        )
    rotary = of_query.attributes.get_int("rotary_embedding_dim", 0)
    if rotary != of_key.attributes.get_int("rotary_embedding_dim", 0):
        return "query and key rotate different numbers of channels"
    for cache in of_query.inputs[1:3]:
        shape = None if cache is None else graph.dims(cache)
        columns = shape[1] if shape is not None and len(shape) == 2 else None
        if not isinstance(columns, int) or columns % _ROTARY_COLUMNS_MULTIPLE or columns > head_size // 2:
            return (
                f"a rotary cache is {shape}; the kernel wants a multiple of {_ROTARY_COLUMNS_MULTIPLE} columns, "
                f"at most {head_size // 2}"
            )
    return None


def _unsplit(operands: _Operands) -> _Operands:
    """Pass query, key and value as one packed query where one Split makes the three of them, in this order."""
    split = operands.query.producer()
    if split is None or split.domain or split.op_type != "Split":
        return operands
    if list(split.outputs) != [operands.query, operands.key, operands.value] or not _splits_last_axis(split):
        return operands
    packed = split.inputs[0]
    assert packed is not None
    return operands._replace(query=packed, key=None, value=None)


def _splits_last_axis(split: ir.Node) -> bool:
    shape = None if split.inputs[0] is None else split.inputs[0].shape
    axis = split.attributes.get_int("axis", 0)  # ONNX operator Split 18: the default
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _summary(operands: _Operands) -> str:
    parts = [
        "packed query, key and value" if operands.key is None else "",
        "rotary embedding inside" if operands.cos is not None else "",
    ]
    return ", ".join(["GroupQueryAttention", *filter(None, parts)])


def _lower(model: ir.Model, attention: ir.Node, operands: _Operands) -> None:
    """Put GroupQueryAttention in the place of `attention`."""
    past_key, past_value, past_lengths = attention.inputs[3:6]
    assert past_lengths is not None
    seqlens_k, total_sequence_length = _length_inputs(model, past_lengths)
    attributes: dict[str, int | float] = {
        "num_heads": attention.attributes.get_int("num_heads"),
        "kv_num_heads": attention.attributes.get_int("kv_num_heads"),
        "scale": attention.attributes.get_float("scale"),
    }
    if softcap := attention.attributes.get_float("softcap", 0.0):
        attributes["softcap"] = softcap
    if window := attention.attributes.get_int("window", 0):
        attributes["local_window_size"] = window
    if operands.cos is not None:
        attributes["do_rotary"] = 1
        attributes["rotary_interleaved"] = operands.interleaved
    query, key, value, cos, sin, _ = operands
    # Inputs 9 and 10, position_ids and attention_bias, stay empty: the positions follow from seqlens_k.
    inputs = [query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos, sin]
    outputs = graph.insert(
        attention,
        "GroupQueryAttention",
        [*inputs, None, None, _sinks(attention)],
        attributes,
        domain="com.microsoft",
        outputs=3,
        name=attention.name,
    )
    for old, new in zip(attention.outputs, outputs, strict=True):
        graph.replace_value(old, new)
    model.graph.remove(attention, safe=True)


def _length_inputs(model: ir.Model, past_lengths: ir.Value) -> Sequence[ir.Value]:
    """Return the graph inputs `seqlens_k` [batch] and `total_sequence_length` (scalar), new ones if there are none."""
    inputs = {value.name: value for value in model.graph.inputs}
    lengths = []
    for name, shape in (
        (interface.SEQLENS_K, past_lengths.shape),
        (interface.TOTAL_SEQUENCE_LENGTH, ir.Shape([])),
    ):
        if name not in inputs:
            value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.INT32))
            model.graph.inputs.append(value)
            inputs[name] = value
        lengths.append(inputs[name])
    return lengths

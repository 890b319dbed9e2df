"""GroupQueryAttention as an operator of `llmforge.cpu`, with the norms of queries and keys inside."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.native import DOMAIN

HEAD_MULTIPLE = 16
LARGEST_HEAD = 1024
# Inputs of com.microsoft::GroupQueryAttention.
_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS = 0, 1, 2, 3, 4, 5
_COS, _SIN, _POSITIONS, _BIAS, _SINK, _KEY_SCALE, _VALUE_SCALE, _QUERY_NORM, _KEY_NORM = 7, 8, 9, 10, 11, 12, 13, 14, 15
_PER_CHANNEL, _PER_TENSOR = "PER_CHANNEL", "PER_TENSOR"


class _Normed(NamedTuple):
    """One of query and key: what it is before norms of its heads, and their weights."""

    source: ir.Value
    weight: ir.Value | None
    epsilon: float


def obstacle(node: ir.Node) -> str | None:
    """Say why `node`, a GroupQueryAttention, cannot become one of `llmforge.cpu`; None where it can."""
    past = graph.operand(node, _PAST_KEY)
    head = graph.dims(past)[3] if past is not None and len(graph.dims(past) or ()) == 4 else None  # type: ignore[index]
    if not isinstance(head, int) or head % HEAD_MULTIPLE or head > LARGEST_HEAD:
        return f"heads have {head} channels; the kernel wants a multiple of {HEAD_MULTIPLE}, at most {LARGEST_HEAD}"
    for index in (_POSITIONS, _BIAS, _QUERY_NORM, _KEY_NORM):
        if graph.operand(node, index) is not None:
            return f"input {index} of GroupQueryAttention is not known to the kernel"
    for name in ("smooth_softmax", "sliding_window_cache"):
        if node.attributes.get_int(name, 0) > 0:
            return f"{name} is not known to the kernel"
    if not node.attributes.get_int("causal", 1):
        return "it is not causal"
    assert past is not None
    if past.dtype not in (ir.DataType.FLOAT, ir.DataType.INT8):
        return f"caches are {past.dtype}; the kernel reads fp32 and int8"
    query = graph.operand(node, _QUERY)
    if query is None or query.dtype != ir.DataType.FLOAT:
        return "it does not compute in fp32"
    types = {node.attributes.get_string(name, "NONE") for name in ("k_quant_type", "v_quant_type")}
    if past.dtype == ir.DataType.INT8 and types not in ({_PER_CHANNEL}, {_PER_TENSOR}):
        return f"scales of keys and values are {' and '.join(sorted(types))}"
    return None


def lower(model: ir.Model, node: ir.Node) -> str:
    """Put the kernel in the place of a GroupQueryAttention without an obstacle; returns what was done."""
    past_key, past_value = node.inputs[_PAST_KEY], node.inputs[_PAST_VALUE]
    assert past_key is not None
    heads, kv_heads = node.attributes.get_int("num_heads"), node.attributes.get_int("kv_num_heads")
    dim = int(str((graph.dims(past_key) or ())[3]))
    qkv, query, key = _packed(node, (heads * dim, kv_heads * dim, kv_heads * dim), dim)
    int8 = past_key.dtype == ir.DataType.INT8
    rotates = node.attributes.get_int("do_rotary", 0)
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "local_window_size": max(node.attributes.get_int("local_window_size", -1), 0),
        "rotary_interleaved": node.attributes.get_int("rotary_interleaved", 0),
        "per_channel": int(int8 and node.attributes.get_string("k_quant_type", "NONE") == _PER_CHANNEL),
        "scale": node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(dim),
        "softcap": node.attributes.get_float("softcap", 0.0),
        "qk_norm_epsilon": query.epsilon,
    }
    inputs = [
        qkv,
        past_key,
        past_value,
        node.inputs[_LENGTHS],
        *(graph.operand(node, index) if rotates else None for index in (_COS, _SIN)),
        *(graph.operand(node, index) if int8 else None for index in (_KEY_SCALE, _VALUE_SCALE)),
        query.weight,
        key.weight,
        graph.operand(node, _SINK),
    ]
    name = str(node.name)
    node.name = f"{name}.replaced"
    operator = "GroupQueryAttentionInt8" if int8 else "GroupQueryAttention"
    outputs = graph.insert(node, operator, inputs, attributes, domain=DOMAIN, outputs=3, name=name)
    for old, new in zip(node.outputs, outputs, strict=True):
        graph.replace_value(old, new)
    normed = ", norms of queries and keys" if query.weight is not None else ""
    return f"{operator}{normed}"


def _packed(node: ir.Node, widths: tuple[int, int, int], dim: int) -> tuple[ir.Value, _Normed, _Normed]:
    """Find query, key and value side by side, and the norms of heads that the kernel takes over."""
    query, key, value = (graph.operand(node, index) for index in (_QUERY, _KEY, _VALUE))
    assert query is not None
    if key is None or value is None:
        return query, _Normed(query, None, 0.0), _Normed(query, None, 0.0)
    of_query, of_key = _before_norm(query, dim), _before_norm(key, dim)
    if (of_query.weight is None) != (of_key.weight is None) or of_query.epsilon != of_key.epsilon:
        of_query, of_key = _Normed(query, None, 0.0), _Normed(key, None, 0.0)
    parts = (of_query.source, of_key.source, value)
    split = parts[0].producer()
    if split is not None and split.op_type == "Split" and tuple(split.outputs) == parts and split.inputs[0] is not None:
        return split.inputs[0], of_query, of_key
    [joined] = graph.insert(node, "Concat", list(parts), {"axis": -1}, name=f"{node.name}/qkv")
    joined.name, joined.type = f"{node.name}.qkv", query.type
    joined.shape = ir.Shape([*query.shape[:-1], sum(widths)]) if query.shape is not None else None
    return joined, of_query, of_key


def _before_norm(value: ir.Value, dim: int) -> _Normed:
    """Recognize Reshape to heads, RMSNormalization of each, Reshape back."""
    plain = _Normed(value, None, 0.0)
    outer = _only(value, "Reshape")
    norm = None if outer is None else _only(outer.inputs[0], "RMSNormalization")
    inner = None if norm is None else _only(norm.inputs[0], "Reshape")
    if norm is None or inner is None or inner.inputs[0] is None:
        return plain
    weight = norm.inputs[1]
    split_heads = graph.dims(inner.outputs[0])
    if weight is None or not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT:
        return plain
    if graph.dims(weight) != (dim,) or split_heads is None or len(split_heads) != 4 or split_heads[3] != dim:
        return plain
    if norm.attributes.get_int("axis", -1) not in (-1, 3):
        return plain
    return _Normed(inner.inputs[0], weight, norm.attributes.get_float("epsilon", 1e-5))


def _only(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of `op_type` that makes `value`, where nothing else reads that."""
    node = None if value is None else value.producer()
    if node is None or value is None or (node.domain, node.op_type) != ("", op_type) or len(value.uses()) != 1:
        return None
    return node

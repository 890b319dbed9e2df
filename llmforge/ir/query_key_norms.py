"""RMS norms of the heads of queries and keys: nodes in front of an attention, or inputs of its operator.

    x [batch, sequence, H·D] → Reshape [.., H, D] → RMSNormalization(weight [D]) → Reshape [.., H·D] → the query

`in_front` recognizes that form, `write_out` brings it back from `q_norm_weight` and `k_norm_weight`: it is the
reference of these inputs, which no CPU kernel of ONNX Runtime takes. Source: the schemas of GroupQueryAttention and
PagedAttention in onnxruntime 1.31 ("a per-head RMS normalization to Q (and K) before any rotary embedding").
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.contrib import GroupQueryAttention, PagedAttention
from llmforge.ir.operators.record import Operator
from llmforge.ir.operators.standard import Reshape, RMSNormalization

_T = TypeVar("_T", bound=Operator)


class Normed(NamedTuple):
    """A query or a key: what it is before norms of its heads, their weight [D] and epsilon; without: itself."""

    source: ir.Value
    weight: ir.Value | None = None
    epsilon: float = 0.0


def in_front(value: ir.Value, head_dim: int) -> Normed:
    """Recognize norms of heads that make `value` [batch, sequence, H·D], and nothing else reads."""
    outer = _unshared(Reshape, value)
    norm = None if outer is None else _unshared(RMSNormalization, outer.x)
    inner = None if norm is None else _unshared(Reshape, norm.x)
    if norm is None or inner is None:
        return Normed(value)
    weight, heads = norm.scale, graph.static(inner.output)
    taken = weight.dtype == value.dtype and graph.dims(weight) == (head_dim,)
    if taken and len(heads) == 4 and heads[3] == head_dim and norm.axis in (-1, 3):
        return Normed(inner.x, weight, norm.epsilon)
    return Normed(value)


def _unshared(operator: type[_T], value: ir.Value) -> _T | None:
    """View the node of `operator` that makes `value`, where one input alone reads that."""
    return operator.made(value) if len(value.uses()) == 1 else None


def both_in_front(query: ir.Value, key: ir.Value, head_dim: int) -> tuple[Normed, Normed]:
    """Recognize norms of query and key that are of one kind; else none of either."""
    of_query, of_key = in_front(query, head_dim), in_front(key, head_dim)
    if (of_query.weight is None) != (of_key.weight is None) or of_query.epsilon != of_key.epsilon:
        return Normed(query), Normed(key)
    return of_query, of_key


def expand(model: ir.Model) -> ir.Model:
    """Clone `model` with the norms inside every GroupQueryAttention written out in front of it; tensors are shared."""
    clone = model.clone()
    for layer in GroupQueryAttention.all(clone):
        write_out(layer, graph.width(layer.past_key))
    return clone


def write_out(layer: GroupQueryAttention | PagedAttention, head_dim: int) -> None:
    """Move the norms inside `layer`, if it has some, to nodes in front of it, in place; a packed query is split."""
    weights = (layer.q_norm_weight, layer.k_norm_weight)
    if weights[0] is None or weights[1] is None:
        return
    node, heads = layer.node, (layer.num_heads, layer.kv_num_heads)
    if layer.key is None or layer.value is None:
        sizes = np.array([heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim], np.int64)
        parts = graph.initializer(graph.owner(node), f"norms.parts_{heads[0]}_{heads[1]}_{head_dim}", sizes)
        query, layer.key, layer.value = graph.insert(node, "Split", [layer.query, parts], {"axis": -1}, outputs=3)
    else:
        query = layer.query
    layer.query = _normed(node, query, weights[0], heads[0], layer.qk_norm_epsilon)
    layer.key = _normed(node, layer.key, weights[1], heads[1], layer.qk_norm_epsilon)
    layer.q_norm_weight = layer.k_norm_weight = None


def _normed(node: ir.Node, x: ir.Value, weight: ir.Value, heads: int, epsilon: float) -> ir.Value:
    """Norm each head of `x` [.., H·D] in front of `node`."""
    place, leading = graph.owner(node), [0] * (1 if PagedAttention.matches(node) else 2)

    def shaped(value: ir.Value, *last: int) -> ir.Value:
        name = "_".join(map(str, ("norms.shape", *leading, *last)))
        wanted = graph.initializer(place, name, np.array([*leading, *last], np.int64))
        return graph.insert(node, "Reshape", [value, wanted])[0]

    head_dim = graph.width(weight)
    [y] = graph.insert(node, "RMSNormalization", [shaped(x, heads, head_dim), weight], {"axis": -1, "epsilon": epsilon})
    return shaped(y, heads * head_dim)

"""Figures of a decoder graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.operators.standard import Sub
from llmforge.ir.routing import share_read


@dataclass(frozen=True)
class GraphFacts:
    """Counts and sizes of a graph."""

    nodes: int
    operators: Mapping[str, int]  # "MatMul", "llmforge::Attention" → nodes, most frequent first
    initializers: int
    parameters: int  # elements of the initializers that come from a checkpoint; shared ones once
    active_parameters: int  # of them, those that a token uses: of experts the chosen ones
    weight_bytes: int  # of all initializers, in the dtype of the graph
    caches: int  # tensors that a step hands to the next
    cache_bytes_per_token: int  # of one sequence, over all layers


def facts(model: ir.Model) -> GraphFacts:
    """Count `model`; no weight is read."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    named = [value for value in model.graph.initializers.values() if graph.sources(value)]
    sizes = [(value.const_value.size, share_read(value)) for value in named if value.const_value is not None]
    caches = [value for value in model.graph.inputs if interface.present_of(value.name or "") != value.name]
    return GraphFacts(
        nodes=graph.nodes(model),
        operators=operators(model),
        initializers=len(tensors),
        parameters=sum(size for size, _ in sizes),
        active_parameters=int(sum(size * share for size, share in sizes)),
        weight_bytes=graph.weight_bytes(model),
        caches=len(caches),
        cache_bytes_per_token=sum(_bytes_per_token(value) for value in caches),
    )


def operators(model: ir.Model) -> dict[str, int]:
    """Count the nodes of each operator, most frequent first."""
    counts = Counter(map(operator_name, model.graph.all_nodes()))
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def operator_name(node: ir.Node) -> str:
    """Name the operator of `node`, with its domain unless that is ONNX's: "MatMul", "llmforge::Attention"."""
    return f"{node.domain}::{node.op_type}".removeprefix("::")


def rotary_switches(model: ir.Model) -> set[int]:
    """Return the lengths of a text beyond which rotary angles are others (docs/dialect.md, RotaryEmbedding)."""
    subtractions = [sub for sub in Sub.all(model) if sub.a.is_graph_input() and sub.a.name == interface.TEXT_LENGTHS]
    tensors = [ir.convenience.get_const_tensor(sub.b) for sub in subtractions]
    return {int(tensor.numpy()) for tensor in tensors if tensor is not None}


def _bytes_per_token(cache: ir.Value) -> int:
    """Return the size of one slot of a cache [batch, kv_heads, capacity, head_dim]."""
    size = 1
    for axis, dim in enumerate(graph.dims(cache) or ()):
        size *= dim if isinstance(dim, int) and axis not in (0, 2) else 1
    bits = 0 if cache.dtype is None else cache.dtype.bitwidth
    return -(-size * bits // 8)

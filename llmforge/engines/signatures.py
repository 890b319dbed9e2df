"""What a runtime must know of a lowered graph, read off its inputs and outputs: no session is needed for it."""

from __future__ import annotations

import onnx_ir as ir

from llmforge import native
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface
from llmforge.runtime.backends.signature import CacheInput


def vocabulary(model: ir.Model) -> int:
    """Read the number of logits off the output [batch, rows, vocabulary]."""
    logits = next(value for value in model.graph.outputs if value.name == interface.LOGITS)
    size = (graph.dims(logits) or (None,))[-1]
    assert isinstance(size, int), f"logits have {size} columns"
    return size


def caches(model: ir.Model) -> tuple[CacheInput, ...]:
    """Read the caches of keys and values, [batch, kv_heads, capacity, head_dim], off the inputs, in their order."""
    found = []
    for value in model.graph.inputs:
        name = str(value.name)
        if interface.present_of(name) == name or interface.is_state(name):
            continue
        _, heads, _, channels = graph.dims(value) or (None,) * 4
        assert value.dtype is not None
        assert isinstance(heads, int)
        assert isinstance(channels, int)
        found.append(CacheInput(name, value.dtype.numpy().name, heads, channels))
    return tuple(found)


def check_context(model: ir.Model, max_context: int) -> None:
    """Refuse a context that the rotary tables [positions, rotary_dim / 2] do not reach: kernels read beyond them.

    Raises:
        UnsupportedError: names the table.
    """
    places = {
        ("com.microsoft", "GroupQueryAttention"): 7,
        (native.DOMAIN, "GroupQueryAttention"): 4,
        (native.DOMAIN, "GroupQueryAttentionInt8"): 4,
        ("", "RotaryEmbedding"): 1,
    }  # index of the cosines
    for node in model.graph.all_nodes():
        index = places.get((node.domain, node.op_type))
        table = node.inputs[index] if index is not None and index < len(node.inputs) else None
        if table is None or not table.is_initializer() or table.shape is None:
            continue
        positions = table.shape[0]
        if isinstance(positions, int) and positions < max_context:
            raise UnsupportedError(
                f"engine.max_context is {max_context}; the rotary table {table.name} of node {node.name} has "
                f"{positions} positions",
                hint=f"set engine.max_context to at most {positions}",
            )

"""What a runtime must know of a lowered graph, read off its inputs and outputs: no session is needed for it."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.runtime.backends.signature import CacheInput


def vocabulary(model: ir.Model) -> int:
    """Read the number of logits off the output [batch, rows, vocabulary]."""
    return graph.width(graph.output_named(model, interface.LOGITS))


def caches(model: ir.Model) -> tuple[CacheInput, ...]:
    """Read the caches of keys and values, [batch, kv_heads, capacity, head_dim], off the inputs, in their order."""
    found = []
    for value in model.graph.inputs:
        name = str(value.name)
        if interface.present_of(name) == name or interface.is_state(name):
            continue
        _, heads, _, channels = graph.static(value)
        found.append(CacheInput(name, graph.dtype(value).numpy().name, heads, channels))
    return tuple(found)

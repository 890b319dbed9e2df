"""Computation from positions, lengths and sizes alone, the same in all layers, moved in front of them all.

A model's own attention makes its masks and angles layer by layer. Once for all is cheaper, and lets each layer be told
apart from the others (`export.replicate_layers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import STANDARD


def hoist(model: ir.Model, weights: Collection[str], scope: str) -> None:
    """Move to the front, in order, every node of `model` that no weight, token or state of a layer has a part in.

    Tables that each layer keeps for itself, all of one content, become one.

    `weights` names what has no numbers yet. What moves loses the module that it comes from: `scope`, a key of the
    nodes' metadata, names none.
    """
    _merge(model, weights)
    free = {value for value in model.graph.inputs if _is_free(value)}
    free |= {value for value in model.graph.initializers.values() if value.name not in weights}
    moved: list[ir.Node] = []
    for node in model.graph:
        shape = standard.OnnxShape.of(node)
        sized = shape is not None and shape.x in model.graph.inputs
        if node.domain == STANDARD and (sized or all(value is None or value in free for value in node.inputs)):
            free.update(node.outputs)
            moved.append(node)
    if not moved:
        return
    for node in moved:
        node.metadata_props[scope] = "['', '']"
    model.graph.remove(moved)
    model.graph.insert_before(model.graph[0], moved)


def _merge(model: ir.Model, weights: Collection[str]) -> None:
    """Keep one of the initializers that hold the same numbers, under a name that is of no layer."""
    alike: dict[tuple[object, ...], list[ir.Value]] = {}
    for name, value in model.graph.initializers.items():
        if name not in weights and value.const_value is not None:
            digest = hashlib.sha256(value.const_value.tobytes()).digest()
            alike.setdefault((value.dtype, graph.dims(value), digest), []).append(value)
    for index, (first, *others) in enumerate(values for values in alike.values() if len(values) > 1):
        for value in (first, *others):
            model.graph.initializers.pop(str(value.name))
        for value in others:
            value.replace_all_uses_with(first)
        first.name = f"shared_{index}"
        model.graph.register_initializer(first)


def _is_free(value: ir.Value) -> bool:
    name = value.name or ""
    return name != interface.INPUT_IDS and interface.present_of(name) == name

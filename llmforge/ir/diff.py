"""Differences between two graphs, as plain data and as text; nodes and initializers are matched by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.record import shown
from llmforge.ir.summary import operator_name, operators

COMPARED_BYTES = 1 << 16  # initializers up to this size are compared by content, larger ones by dtype and shape
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GraphDiff:
    """Everything that differs between graph A and graph B; all empty where nothing does."""

    opsets: Mapping[str, tuple[int | None, int | None]]
    operators: Mapping[str, tuple[int, int]]  # name → nodes in A, in B
    nodes_removed: tuple[str, ...]  # "model.layers.0/Add (Add)": in A alone
    nodes_added: tuple[str, ...]
    nodes_changed: Mapping[str, tuple[str, ...]]  # name → what is different, "epsilon: 1e-05 → 1e-06"
    initializers_removed: tuple[str, ...]
    initializers_added: tuple[str, ...]
    initializers_changed: Mapping[str, str]
    interface: Mapping[str, str]  # graph inputs and outputs, "input input_ids" → what is different

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


def diff(a: ir.Model, b: ir.Model) -> GraphDiff:
    """Compare two graphs.

    Nodes are matched by name; inputs of a node are compared by the names of their values, so that a renamed value
    shows where it is read. Wiring is not followed any further: `graph.fingerprint` tells whether two graphs are equal.
    """
    nodes_a, nodes_b = _nodes(a), _nodes(b)
    tensors_a, tensors_b = a.graph.initializers, b.graph.initializers
    counts_a, counts_b = operators(a), operators(b)
    changed = {name: tuple(_node_changes(nodes_a[name], nodes_b[name])) for name in nodes_a if name in nodes_b}
    contents = {name: _tensor_change(tensors_a[name], tensors_b[name]) for name in tensors_a if name in tensors_b}
    return GraphDiff(
        opsets=_apart(dict(a.opset_imports), dict(b.opset_imports), None),
        operators=_apart(counts_a, counts_b, 0),
        nodes_removed=tuple(_titled(nodes_a[name]) for name in nodes_a if name not in nodes_b),
        nodes_added=tuple(_titled(nodes_b[name]) for name in nodes_b if name not in nodes_a),
        nodes_changed={name: changes for name, changes in changed.items() if changes},
        initializers_removed=tuple(sorted(set(tensors_a) - set(tensors_b))),
        initializers_added=tuple(sorted(set(tensors_b) - set(tensors_a))),
        initializers_changed={name: change for name, change in contents.items() if change},
        interface=dict(_interface_changes(a, b)),
    )


def text(difference: GraphDiff) -> list[str]:
    """Write a difference for people, a line each: `-` only in A, `+` only in B, `~` in both and different."""
    lines = [f"~ opset of {domain or 'ai.onnx'}: {a} → {b}" for domain, (a, b) in difference.opsets.items()]
    lines += [f"~ {what}: {change}" for what, change in difference.interface.items()]
    lines += [f"~ {operator}: {a} → {b} nodes" for operator, (a, b) in difference.operators.items()]
    lines += [f"- node {name}" for name in difference.nodes_removed]
    lines += [f"+ node {name}" for name in difference.nodes_added]
    for name, changes in difference.nodes_changed.items():
        lines += [f"~ node {name}: {change}" for change in changes]
    lines += [f"- initializer {name}" for name in difference.initializers_removed]
    lines += [f"+ initializer {name}" for name in difference.initializers_added]
    lines += [f"~ initializer {name}: {change}" for name, change in difference.initializers_changed.items()]
    return lines or ["no difference"]


def summary(difference: GraphDiff) -> list[str]:
    """Write what differs as a whole, and count the rest: operators, interface, and how many nodes and weights.

    Inputs and outputs that differ alike, and whose names differ by numbers alone (those of layers), are one line.
    """
    counted = {
        "nodes only in A": len(difference.nodes_removed),
        "nodes only in B": len(difference.nodes_added),
        "nodes changed": len(difference.nodes_changed),
        "initializers only in A": len(difference.initializers_removed),
        "initializers only in B": len(difference.initializers_added),
        "initializers changed": len(difference.initializers_changed),
    }
    whole = replace(
        difference, nodes_removed=(), nodes_added=(), nodes_changed={}, initializers_removed=(),
        initializers_added=(), initializers_changed={}, interface=_alike(difference.interface),
    )  # fmt: skip
    counts = "; ".join(f"{what}: {number}" for what, number in counted.items() if number)
    return [*(text(whole) if whole else ()), *([counts] if counts else ())] or text(difference)


def _alike(interface: Mapping[str, str]) -> dict[str, str]:
    """Merge changes of inputs or outputs that are the same but for numbers in the names, and count them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, change in interface.items():
        groups.setdefault((_NUMBER.sub("*", what), change), []).append(what)
    merged: dict[str, str] = {}
    for (pattern, change), names in groups.items():
        kind, _, name = pattern.partition(" ")
        title = names[0] if len(names) == 1 else f"{len(names)} {kind}s {name}"
        merged[title] = f"{merged[title]}; {len(names)} more: {change}" if title in merged else change
    return merged


def _nodes(model: ir.Model) -> dict[str, ir.Node]:
    """Map names to nodes; one without a name of its own is called after what it computes."""
    named: dict[str, ir.Node] = {}
    for node in model.graph.all_nodes():
        name = node.name or f"node of {node.outputs[0].name}"
        named[name if name not in named else f"{name}, of {node.outputs[0].name}"] = node
    return named


def _titled(node: ir.Node) -> str:
    return f"{node.name or node.outputs[0].name} ({operator_name(node)})"


def _node_changes(a: ir.Node, b: ir.Node) -> Iterator[str]:
    if operator_name(a) != operator_name(b):
        yield f"{operator_name(a)} → {operator_name(b)}"
    ours, theirs = ({name: _plain(attribute) for name, attribute in node.attributes.items()} for node in (a, b))
    for name, (before, after) in _apart(ours, theirs, None).items():
        yield f"{name}: {before} → {after}"
    reads, instead = (["" if value is None else str(value.name) for value in node.inputs] for node in (a, b))
    if reads != instead:
        yield f"inputs: {', '.join(reads)} → {', '.join(instead)}"
    if len(a.outputs) != len(b.outputs):
        yield f"outputs: {len(a.outputs)} → {len(b.outputs)}"


def _plain(attribute: ir.Attr) -> object:
    """Return the value of an attribute; floats as ONNX stores them, in fp32."""
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "a subgraph"
    if attribute.type == ir.AttributeType.FLOAT:
        return str(np.float32(attribute.as_float()))
    if attribute.type == ir.AttributeType.FLOATS:
        return [str(np.float32(x)) for x in attribute.as_floats()]
    return list(attribute.value) if isinstance(attribute.value, tuple | list) else attribute.value


def _tensor_change(a: ir.Value, b: ir.Value) -> str:
    if _typed(a) != _typed(b):
        return f"{_typed(a)} → {_typed(b)}"
    x, y = a.const_value, b.const_value
    if x is None or y is None or x.nbytes > COMPARED_BYTES or not (_readable(x) and _readable(y)):
        return ""
    return "" if x.tobytes() == y.tobytes() else "other numbers"


def _readable(tensor: ir.TensorProtocol) -> bool:
    """Say whether the numbers are there: a graph may be written without its weights."""
    return not isinstance(tensor, ir.ExternalTensor) or Path(tensor.path).is_file()


def _interface_changes(a: ir.Model, b: ir.Model) -> Iterator[tuple[str, str]]:
    for kind, ours, theirs in (("input", a.graph.inputs, b.graph.inputs), ("output", a.graph.outputs, b.graph.outputs)):
        before = {str(value.name): _typed(value) for value in ours}
        after = {str(value.name): _typed(value) for value in theirs}
        for name, (x, y) in _apart(before, after, "absent").items():
            yield f"{kind} {name}", f"{x} → {y}"


def _typed(value: ir.Value) -> str:
    return f"{'untyped' if value.dtype is None else value.dtype.name} {shown(graph.dims(value))}"


def _apart(a: Mapping[str, Any], b: Mapping[str, Any], absent: Any) -> dict[str, tuple[Any, Any]]:
    """Pair the entries that differ, in the order of `a`, then of `b`."""
    return {
        name: (a.get(name, absent), b.get(name, absent))
        for name in {**a, **b}
        if a.get(name, absent) != b.get(name, absent)
    }

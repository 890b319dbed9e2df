"""Surgery on `onnx_ir` graphs: the few moves that passes, lowerings and the frontend share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

SOURCES = "llmforge.sources"  # metadata_props key of an initializer: JSON list of parameter names (docs/dialect.md)

_Put = Callable[..., None]
Attribute = int | float | str | Sequence[int] | Sequence[float]


def nodes(model: ir.Model) -> int:
    """Count the nodes of the main graph, subgraphs included."""
    return sum(1 for _ in model.graph.all_nodes())


def weight_bytes(model: ir.Model) -> int:
    """Size of all initializers in the dtype of the graph."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def dims(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Return the shape of `value`: an int, a symbol's name or None a dimension; None where the rank is unknown."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Return input `index` of `node`; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def initializer(owner: ir.Model | ir.Graph, name: str, data: NDArray[np.generic] | ir.TensorProtocol) -> ir.Value:
    """Register `data` under `name` and return its value; the same data under the same name is shared.

    A lazy or external tensor is taken as it is and never read.

    Raises:
        ValueError: another tensor has that name.
    """
    graph = owner.graph if isinstance(owner, ir.Model) else owner
    tensor = data if isinstance(data, ir.TensorProtocol) else ir.Tensor(np.ascontiguousarray(data), name=name)
    existing = graph.initializers.get(name)
    if existing is not None:
        if existing.const_value is None or identity(existing.const_value) != identity(tensor):
            raise ValueError(f"initializer {name!r} exists with other content")
        return existing
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Attribute] | None = None,
    *,
    domain: str = "",
    outputs: int = 1,
    name: str | None = None,
) -> list[ir.Value]:
    """Insert a node in front of `before` and return its outputs, whose types and shapes the caller sets.

    Trailing absent inputs (None) are left out.
    """
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    attrs = ir.convenience.convert_attributes(dict(attributes or {}))
    node = ir.Node(domain, op_type, given, attrs, num_outputs=outputs, name=name)
    graph = before.graph
    if graph is None:
        raise ValueError(f"node {before.name!r} belongs to no graph")
    graph.insert_before(before, node)
    return list(node.outputs)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old` read `new`; a graph output keeps its name, which `new` takes over.

    `new` gets the type and shape of `old` where it has none. The node of `old` stays: see `drop_unused`.

    Raises:
        ValueError: `old` is a graph output, and `new` already is one, or is a graph input or an initializer.
    """
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    if new.is_graph_output() or new.is_graph_input() or new.is_initializer():
        raise ValueError(f"graph output {old.name!r} cannot be renamed onto {new.name!r}, whose name is fixed")
    name = old.name
    old.name = f"{name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name = name


def supersede(old: ir.Value, new: ir.Value) -> None:
    """Let `new`, which holds the same numbers, stand for `old` everywhere: readers, type, shape and name.

    The node of `old` stays: see `drop_unused`. Keeping the name lets verification compare the two graphs there.
    """
    name = old.name
    replace(old, new)
    if new.name != name:
        old.name = f"{name}.superseded"
        new.name = name


def sources(value: ir.Value) -> list[str]:
    """Return the parameter names that `value` comes from, in order of its output features; [] if not recorded."""
    recorded = value.metadata_props.get(SOURCES)
    return [] if recorded is None else [str(name) for name in json.loads(recorded)]


def set_sources(value: ir.Value, names: Sequence[str]) -> None:
    """Record the parameter names that `value` comes from (docs/dialect.md, Provenance)."""
    value.metadata_props[SOURCES] = json.dumps(list(names))


def drop_unused(model: ir.Model) -> None:
    """Remove nodes, initializers, graph inputs and opset imports that no graph output depends on."""
    RemoveUnusedNodesPass()(model)
    graph = model.graph
    for index in reversed(range(len(graph.inputs))):
        value = graph.inputs[index]
        if not value.uses() and not value.is_graph_output():
            del graph.inputs[index]
            if value.name is not None:
                graph.initializers.pop(value.name, None)
    RemoveUnusedOpsetsPass()(model)


def detach(model: ir.Model, location: str, inline_below_bytes: int) -> dict[str, ir.TensorProtocol]:
    """Let the initializers of `model` refer to a file `location` that need not be there; return their tensors.

    Those in memory and below `inline_below_bytes` stay.
    """
    taken = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.shape is None:
            continue
        if tensor.nbytes < inline_below_bytes and not isinstance(tensor, ir.ExternalTensor | ir.LazyTensor):
            continue
        taken[name] = tensor
        value.const_value = ir.ExternalTensor(location, 0, tensor.nbytes, tensor.dtype, shape=value.shape, name=name)
    return taken


def fingerprint(model: ir.Model) -> str:
    """Hash what the graph computes with, as sha256 hex.

    Sensitive to opset imports, operators, attributes, wiring, node order, and the names, types and shapes of graph
    inputs, graph outputs and initializers; of a tensor in memory its bytes count too, of one in a file its place
    in that file, of a lazy one nothing more (it is not read). Insensitive to object identity, node names and the
    names of intermediate values. Equal for a model and its clone.
    """
    graph = model.graph
    digest = hashlib.sha256()

    def put(*parts: object) -> None:
        digest.update(repr(parts).encode() + b"\n")

    places: dict[ir.Value, str] = {}
    put("opsets", sorted(model.opset_imports.items()))
    for value in graph.inputs:
        put("input", *_signature(value))
        places[value] = f"input {value.name}"
    for name in sorted(graph.initializers):
        value = graph.initializers[name]
        tensor = value.const_value
        put("initializer", *_signature(value), None if tensor is None else identity(tensor))
        places.setdefault(value, f"initializer {name}")
    _put_nodes(graph, put, places)
    for value in graph.outputs:
        put("output", *_signature(value), places[value])
    return digest.hexdigest()


def _put_nodes(graph: ir.Graph, put: _Put, places: dict[ir.Value, str]) -> None:
    """Feed the nodes of `graph` to `put`, naming each value by the node that makes it, by position."""
    for node in graph:
        index = len(places)
        wiring = [None if value is None else places[value] for value in node.inputs]
        put("node", node.domain, node.op_type, node.overload, wiring, len(node.outputs))
        for name in sorted(node.attributes):
            attribute = node.attributes[name]
            if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                subgraphs = (
                    attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]
                )
                for position, subgraph in enumerate(subgraphs):
                    put("subgraph", name, position)
                    for value in subgraph.inputs:
                        places[value] = f"value {len(places)}"
                    _put_nodes(subgraph, put, places)
                    put("yields", [places[value] for value in subgraph.outputs])
            elif attribute.type == ir.AttributeType.TENSOR:
                put("attribute", name, identity(attribute.as_tensor()))
            else:
                put("attribute", name, attribute.type.name, attribute.value)
        for position, value in enumerate(node.outputs):
            places[value] = f"value {index}:{position}"


def _signature(value: ir.Value) -> tuple[object, ...]:
    dtype = None if value.dtype is None else value.dtype.name
    return value.name, dtype, dims(value)


def identity(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Say what `tensor` holds without reading a file or computing anything."""
    head = (tensor.dtype.name, tensor.shape.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        return (*head, "file", PurePath(tensor.location).name, tensor.offset, tensor.length)
    if isinstance(tensor, ir.LazyTensor):
        return (*head, "lazy")
    return (*head, "bytes", hashlib.sha256(tensor.tobytes()).hexdigest())

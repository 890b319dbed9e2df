"""Surgery on `onnx_ir` graphs: the few moves that passes, lowerings and the frontend share."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from llmforge.ir.derived import Derived

SOURCES = "llmforge.sources"  # metadata_props key of an initializer: JSON list of parameter names (docs/dialect.md)

SPARSITY = "llmforge.sparsity"  # metadata_props key of a model whose weights are pruned: "2:4"
PRUNED = "llmforge.pruned"  # metadata_props key of a pruned model: JSON of KV heads left, by layer, and layers gone

_Put = Callable[..., None]
Attribute = int | float | str | Sequence[int] | Sequence[float]


def dropped_layers(model: ir.Model) -> list[int]:
    """Number the layers that a pruned model lacks."""
    described = model.metadata_props.get(PRUNED)
    return [] if described is None else list(json.loads(described)["dropped"])


def kept_heads(model: ir.Model) -> dict[int, tuple[int, ...]]:
    """Return the KV heads that are left of layers of a pruned model, by the layer, as they were numbered."""
    described = model.metadata_props.get(PRUNED)
    heads = {} if described is None else json.loads(described)["heads"]
    return {int(layer): tuple(own) for layer, own in heads.items()}


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


def static(value: ir.Value | None) -> tuple[int, ...]:
    """Return the dimensions of `value`, 0 for those that are not fixed; () where the rank is unknown."""
    known = None if value is None else dims(value)
    return tuple(dim if isinstance(dim, int) else 0 for dim in known or ())


def width(value: ir.Value) -> int:
    """Return the size of the last axis of `value`.

    Raises:
        ValueError: it is not fixed, or the rank is unknown.
    """
    if not (known := static(value)) or not known[-1]:
        raise ValueError(f"the last axis of {value.name!r} has no fixed size")
    return known[-1]


def owner(node: ir.Node) -> ir.Graph:
    """Return the graph that `node` is in (ValueError: it is in none)."""
    if node.graph is None:
        raise ValueError(f"node {node.name!r} belongs to no graph")
    return node.graph


def producer(value: ir.Value) -> ir.Node:
    """Return the node that makes `value` (ValueError: none does)."""
    if (node := value.producer()) is None:
        raise ValueError(f"no node makes {value.name!r}")
    return node


def tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return what the initializer `value` holds (ValueError: it has no tensor)."""
    if value.const_value is None:
        raise ValueError(f"{value.name!r} is no initializer with a tensor")
    return value.const_value


def dtype(value: ir.Value) -> ir.DataType:
    """Return the dtype of `value` (ValueError: it is not known)."""
    if value.dtype is None:
        raise ValueError(f"{value.name!r} has no dtype")
    return value.dtype


def input_named(model: ir.Model, name: str) -> ir.Value:
    """Find the graph input `name` (ValueError: there is none)."""
    return _named(model.graph.inputs, name, "input")


def output_named(model: ir.Model, name: str) -> ir.Value:
    """Find the graph output `name` (ValueError: there is none)."""
    return _named(model.graph.outputs, name, "output")


def _named(values: Iterable[ir.Value], name: str, kind: str) -> ir.Value:
    for value in values:
        if value.name == name:
            return value
    raise ValueError(f"the graph has no {kind} {name!r}")


def is_constant(value: ir.Value) -> bool:
    """Say whether `value` is an initializer that no caller can replace."""
    return value.is_initializer() and not value.is_graph_input()


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the node that alone reads `value`, and once; None where others do, or the graph gives it out."""
    uses = tuple(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Return input `index` of `node`; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def initializer(
    place: ir.Model | ir.Graph,
    name: str,
    data: NDArray[np.generic] | np.generic | ir.TensorProtocol,
    sources: Sequence[str] = (),
) -> ir.Value:
    """Register `data` under `name` and return its value; what is known to be the `same` under that name is shared.

    Other data gets a name of its own: `name`_1, `name`_2 and so on. `sources` are the parameters that it comes from. A
    lazy or external tensor is taken as it is and never read.
    """
    graph = place.graph if isinstance(place, ir.Model) else place
    tensor = data if isinstance(data, ir.TensorProtocol) else ir.Tensor(np.asarray(data, order="C"))
    for own in itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1))):
        existing = graph.initializers.get(own)
        if existing is None:
            break
        if existing.const_value is not None and same(existing.const_value, tensor):
            return existing
    tensor.name = own
    value = ir.val(own, const_value=tensor)
    graph.register_initializer(value)
    if sources:
        set_sources(value, sources)
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
    owner(before).insert_before(before, node)
    return list(node.outputs)


def replace_uses(old: ir.Value, new: ir.Value) -> None:
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


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let `new`, which holds the same numbers, stand for `old` everywhere: readers, type, shape and name.

    The node of `old` stays: see `drop_unused`. Keeping the name lets verification compare the two graphs there.
    """
    name = old.name
    replace_uses(old, new)
    if new.name != name:
        old.name = f"{name}.replaced"
        new.name = name


def replace_outputs(node: ir.Node, values: Iterable[ir.Value]) -> None:
    """Let each of `values` stand for an output of `node`, in their order (`replace_value`)."""
    for old, new in zip(node.outputs, values, strict=True):
        replace_value(old, new)


def insert_behind(value: ir.Value, nodes: Sequence[ir.Node], suffix: str) -> ir.Value:
    """Insert `nodes`, of which the first reads `value` and each of the others the one before it, behind its node.

    What the last one makes takes over the other readers of `value`, its place among the outputs of the graph, its name,
    and its type and shape where it has none; `value` is called `name.suffix`. Return it.
    """
    graph, made, name = owner(producer(value)), nodes[-1].outputs[0], value.name
    for reader, index in list(value.uses()):
        if reader is not nodes[0]:
            reader.replace_input_with(index, made)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = made
    graph.insert_after(producer(value), nodes)
    made.type = value.type if made.type is None else made.type
    made.shape = value.shape if made.shape is None else made.shape
    value.name, made.name = f"{name}.{suffix}", name
    return made


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


def same(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Say whether two tensors are known to hold the same, without reading a file or computing anything.

    They are one object, hold the same bytes in memory, stand in one place of one file, or are derived by one function
    from the same operands.
    """
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape.numpy() != other.shape.numpy():
        return False
    if isinstance(one, Derived) and isinstance(other, Derived):
        alike = one.function is other.function and len(one.operands) == len(other.operands)
        return alike and all(map(same, one.operands, other.operands))
    if isinstance(one, ir.ExternalTensor) and isinstance(other, ir.ExternalTensor):
        return (one.path, one.offset, one.length) == (other.path, other.offset, other.length)
    if any(isinstance(tensor, ir.LazyTensor | ir.ExternalTensor) for tensor in (one, other)):
        return False
    return one.tobytes() == other.tobytes()


def identity(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Say what `tensor` holds without reading a file or computing anything."""
    head = (tensor.dtype.name, tensor.shape.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        return (*head, "file", PurePath(tensor.location).name, tensor.offset, tensor.length)
    if isinstance(tensor, ir.LazyTensor):
        return (*head, "lazy")
    return (*head, "bytes", hashlib.sha256(tensor.tobytes()).hexdigest())

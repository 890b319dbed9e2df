"""Subgraphs: the nodes between values of a graph, as a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import interface
from llmforge.ir.graph import is_constant


@dataclass(frozen=True, eq=False)
class Index:
    """A graph and its values by name."""

    model: ir.Model
    values: Mapping[str, ir.Value]  # that nodes make
    constant: frozenset[ir.Value]  # of these, those that follow from initializers alone
    position: Mapping[ir.Node, int]

    @classmethod
    def of(cls, model: ir.Model) -> Index:
        """Walk over `model` once."""
        constant: set[ir.Value] = set()
        for node in model.graph:
            if all(value is None or is_constant(value) or value in constant for value in node.inputs):
                constant.update(node.outputs)
        values = {value.name: value for node in model.graph for value in node.outputs if value.name}
        return cls(model, values, frozenset(constant), {node: index for index, node in enumerate(model.graph)})


def behind(
    outputs: Iterable[ir.Value], is_edge: Callable[[ir.Value], bool]
) -> tuple[list[ir.Node], dict[ir.Value, None]]:
    """Walk up from `outputs`: the nodes on the way, unordered, and the values where the walk ends, in its order.

    Those are the values for which `is_edge` holds, and those that no node makes: inputs and initializers of the graph.
    """
    nodes: dict[ir.Node, None] = {}
    edge: dict[ir.Value, None] = {}
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        node = None if is_edge(value) else value.producer()
        if node is None:
            edge[value] = None
        elif node not in nodes:
            nodes[node] = None
            waiting.extend(read for read in node.inputs if read is not None)
    return list(nodes), edge


def copy_nodes(nodes: Iterable[ir.Node], copies: dict[ir.Value, ir.Value]) -> list[ir.Node]:
    """Copy `nodes`, in their order, to read `copies` of what they read; what the copies make joins `copies`."""
    made = []
    for node in nodes:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else copies[value] for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=node.name,
            version=node.version,
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
            copies[old] = new
        made.append(copy)
    return made


def extract(index: Index, outputs: Sequence[str], boundary: Collection[str]) -> ir.Model:
    """Make a model of what `outputs` need; values named `boundary` become inputs. Tensors are shared.

    An output is never an input of its own subgraph. `input_ids` is always an input, because the expansion of attention
    reads its shape.
    """
    source, stops = index.model.graph, set(boundary) - set(outputs)
    wanted = [index.values[name] for name in outputs]
    nodes, edge = behind(wanted, lambda value: value.name in stops and value.producer() is not None)
    copies = {value: _like(value) for value in edge if value.producer() is not None}
    inputs = list(copies.values())
    initializers = []
    for value in (*source.inputs, *source.initializers.values()):
        if value in copies or (value not in edge and value.name != interface.INPUT_IDS):
            continue
        copies[value] = copy = _like(value)
        if value.is_graph_input():
            inputs.append(copy)
        if value.is_initializer():
            copy.const_value = value.const_value
            initializers.append(copy)
    made = copy_nodes(sorted(nodes, key=index.position.__getitem__), copies)
    body = ir.Graph(
        inputs,
        [copies[value] for value in wanted],
        nodes=made,
        initializers=initializers,
        opset_imports=dict(source.opset_imports),
        name="subgraph",
    )
    return ir.Model(body, ir_version=index.model.ir_version)


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, shape=value.shape, type=value.type)

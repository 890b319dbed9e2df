"""Copy the layers of a short canonical graph up to the depth of its model, and cut a deep one short.

A layer is the run of nodes that carry its name (`model.layers.3.self_attn/Attention`). It takes hidden states from
the layer in front and hands its own to the next one; its weights and caches are numbered; everything else that it
reads, all layers share. Two periods of layers must be the same in every other respect before one is copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g
from llmforge.ir.subgraph import copy_nodes
from llmforge.trace.export.pattern import Irregular, Pattern

INDEX = "layer"  # attribute of an operator that reads a cache: the number of the cache
CACHE_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # in the name of a graph input or output: past_key_values.3.key


def replicate(model: ir.Model, pattern: Pattern) -> None:
    """Grow `model`, whose graph holds the first `pattern.traced` layers, to all `pattern.depth`, in place.

    Weights of a copy get the name of their parameter, and the tensor of the layer that was copied for the time being.

    Raises:
        Irregular: the layers of the graph are not the copies of one another that `pattern` says; it is unchanged.
    """
    layers = _layers(model, pattern, range(pattern.traced))
    steps = [
        _same(layers[index], layers[index + pattern.period], pattern)
        for index in range(pattern.lead, pattern.lead + pattern.period)
    ]
    if len({step for step in steps if step}) > 1:
        raise Irregular("the caches of a period are not numbered one after the other")
    hidden = layers[-1].gives
    readers = [(node, index) for node, index in hidden.uses() if node not in layers[-1].members]
    last, anchor = hidden, layers[-1].nodes[-1]
    for index in range(pattern.traced, pattern.depth):
        kind = pattern.lead + (index - pattern.lead) % pattern.period
        source = layers[pattern.lead + pattern.period + (index - pattern.lead) % pattern.period]
        periods = (index - source.index) // pattern.period
        copy = _Copy(model, pattern, source, index, periods * steps[kind - pattern.lead])
        last, anchor = copy.write(last, anchor)
    for node, position in readers:
        node.replace_input_with(position, last)


def some_layers(model: ir.Model, pattern: Pattern, kept: Collection[int]) -> ir.Model:
    """Clone `model`, canonical and `pattern.depth` layers deep, with its layers `kept` alone.

    Each takes what the one before it in `kept` gives; caches keep their numbers. Tensors are shared.

    Raises:
        Irregular: a layer hands over more than hidden states.
    """
    clone = model.clone()
    layers = _layers(clone, pattern, range(pattern.depth))
    behind = [(node, index) for node, index in layers[-1].gives.uses() if node not in layers[-1].members]
    last = layers[0].takes
    for layer in (layers[index] for index in sorted(kept)):
        for node, index in [use for use in layer.takes.uses() if use.node in layer.members]:
            node.replace_input_with(index, last)
        last = layer.gives
    for node, index in behind:
        node.replace_input_with(index, last)
    dropped = {value for layer in layers if layer.index not in kept for node in layer.nodes for value in node.outputs}
    for index in reversed(range(len(clone.graph.outputs))):
        if clone.graph.outputs[index] in dropped:
            del clone.graph.outputs[index]
    g.drop_unused(clone)
    return clone


def require_alike(model: ir.Model, pattern: Pattern, twins: Sequence[int]) -> None:
    """Prove that each layer of `model` is the same as layer `twins[index]`, but for its weights and caches.

    Raises:
        Irregular: one is not, or caches are shared; the message names it.
    """
    layers = _layers(model, pattern, range(pattern.depth))
    owners: dict[ir.Value, int] = {}
    for layer, twin in zip(layers, twins, strict=True):
        if layer.index != twin:
            try:
                _same(layers[twin], layer, pattern)
                _same_numbers(layers[twin], layer)
            except Irregular as error:
                names = f"{pattern.stack}.{layer.index} is not what {pattern.stack}.{twin} is"
                raise Irregular(f"{names}: {error.message}") from error
        for value in {value for node in layer.nodes for value in node.inputs if value is not None}:
            cached = value.is_graph_input() and CACHE_NUMBER.search(value.name or "") is not None
            if cached and owners.setdefault(value, layer.index) != layer.index:
                raise Irregular(f"layers {owners[value]} and {layer.index} both read {value.name}")


def _same_numbers(first: _GraphLayer, second: _GraphLayer) -> None:
    """Hold the numbers against each other that two layers read and no checkpoint has."""
    for a, b in zip(first.nodes, second.nodes, strict=True):
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if x is None or y is None or x is y or not x.is_initializer() or g.sources(x):
                continue
            if g.sources(y) or not np.array_equal(g.tensor(x).numpy(), g.tensor(y).numpy()):
                raise Irregular(
                    f"layers {first.index} and {second.index} differ: {x.name} and {y.name} hold other numbers"
                )


@dataclass(frozen=True, eq=False)
class _GraphLayer:
    """One layer of a graph."""

    index: int
    nodes: Sequence[ir.Node]  # in order
    members: frozenset[ir.Node]
    takes: ir.Value  # hidden states, of the layer in front or of the embedding
    gives: ir.Value  # hidden states that the next layer, or the head, reads


def hidden_states(model: ir.Model, pattern: Pattern, kept: Sequence[int]) -> list[str]:
    """Name the hidden states that each of the layers `kept` of canonical `model`, which has no others, gives."""
    return [str(layer.gives.name) for layer in _layers(model, pattern, kept)]


def _layers(model: ir.Model, pattern: Pattern, numbers: Sequence[int]) -> list[_GraphLayer]:
    """Find the layers of `model`, which are called `numbers`."""
    named = re.compile(rf"{re.escape(pattern.stack)}\.(\d+)[./]")
    count = len(numbers)
    places = {number: place for place, number in enumerate(numbers)}
    groups: list[list[ir.Node]] = [[] for _ in numbers]
    owner: dict[ir.Node, int] = {}
    at = -1  # the current layer; `count` behind the last
    for node in model.graph:
        match = named.match(node.name or "")
        index = places.get(int(match[1]), count) if match else (count if at >= 0 else -1)
        if index not in (at, at + 1):
            raise Irregular(f"node {node.name} stands behind layer {numbers[min(at, count - 1)]}")
        at = index
        owner[node] = index
        if 0 <= index < count:
            groups[index].append(node)
    if not all(groups):
        raise Irregular(f"layer {numbers[groups.index([])]} has no nodes of its name")
    layers: list[_GraphLayer] = []
    for index, (number, nodes) in enumerate(zip(numbers, groups, strict=True)):
        read = {value: None for node in nodes for value in node.inputs if value is not None}
        foreign = [value for value in read if (made := value.producer()) is not None and owner[made] == index - 1]
        given = [value for node in nodes for value in node.outputs]
        given = [value for value in given if any(owner[reader] != index for reader, _ in value.uses())]
        if index == 0:  # what stands in front of the layers may be shared by them all
            foreign = [value for value in foreign if all(owner[reader] <= 0 for reader, _ in value.uses())]
        far = [value for value in given for reader, _ in value.uses() if owner[reader] not in (index, index + 1)]
        if len(foreign) != 1 or len(given) != 1 or far or (index and foreign[0] is not layers[-1].gives):
            raise Irregular(f"layer {number} exchanges more than hidden states with the others")
        layers.append(_GraphLayer(number, nodes, frozenset(nodes), foreign[0], given[0]))
    return layers


def _same(first: _GraphLayer, second: _GraphLayer, pattern: Pattern) -> int:
    """Prove that two layers are the same but for numbers; return by how much their caches are apart (0: none)."""
    where = f"layers {first.index} and {second.index}"
    if len(first.nodes) != len(second.nodes):
        raise Irregular(f"{where} have {len(first.nodes)} and {len(second.nodes)} nodes")
    same: dict[ir.Value, ir.Value] = {first.takes: second.takes}
    steps: set[int] = set()
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if (a.domain, a.op_type, a.overload, len(a.outputs)) != (b.domain, b.op_type, b.overload, len(b.outputs)):
            raise Irregular(f"{where} differ: {a.name} is {a.op_type}, {b.name} {b.op_type}")
        if _renumbered(a.name, pattern.stack, first.index, second.index) != b.name:
            raise Irregular(f"{where} differ: {a.name} corresponds to {b.name}")
        steps |= _attributes_apart(a, b, where)
        if len(a.inputs) != len(b.inputs):
            raise Irregular(f"{where} differ: {a.name} has {len(a.inputs)} inputs, {b.name} {len(b.inputs)}")
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if x is y and (x is None or not (x in same or _numbered(x, pattern.stack, first.index))):
                continue  # what all layers share
            if x is None or y is None:
                raise Irregular(f"{where} differ: an input of {a.name} is optional")
            if x in same:
                if same[x] is not y:
                    raise Irregular(f"{where} differ: {a.name} reads {x.name}, {b.name} reads {y.name}")
            else:
                steps |= _inputs_apart(x, y, first.index, second.index, pattern, where)
                same[x] = y
        for x, y in zip(a.outputs, b.outputs, strict=True):
            if (x.dtype, g.dims(x), x.is_graph_output()) != (y.dtype, g.dims(y), y.is_graph_output()):
                raise Irregular(f"{where} differ: {x.name} and {y.name} have other types or shapes")
            if x.is_graph_output():
                steps.add(_cache_step(x, y, where))
            same[x] = y
    if same[first.gives] is not second.gives:
        raise Irregular(f"{where} hand over {first.gives.name} and {second.gives.name}")
    if len(steps) > 1:
        raise Irregular(f"the caches of {where} are numbered {sorted(steps)} apart")
    return steps.pop() if steps else 0


def _attributes_apart(a: ir.Node, b: ir.Node, where: str) -> set[int]:
    """Compare attributes; return by how much the indices of caches are apart."""
    if a.attributes.keys() != b.attributes.keys():
        raise Irregular(f"{where} differ in the attributes of {a.name}")
    steps = set()
    for name, attribute in a.attributes.items():
        other = b.attributes[name]
        if name == INDEX:
            steps.add(other.as_int() - attribute.as_int())
        elif attribute.type != other.type or attribute.value != other.value:
            raise Irregular(f"{where} differ: {name} of {a.name} is {attribute.value}, of {b.name} {other.value}")
    return steps


def _inputs_apart(x: ir.Value, y: ir.Value, i: int, j: int, pattern: Pattern, where: str) -> set[int]:
    """Hold two values that come from elsewhere against each other: weights by name, caches by number."""
    if (x.dtype, g.dims(x)) != (y.dtype, g.dims(y)):
        raise Irregular(f"{where} differ: {x.name} and {y.name} have other types or shapes")
    if x.is_graph_input() and y.is_graph_input() and not x.is_initializer():
        return {_cache_step(x, y, where)}
    if not x.is_initializer() or not y.is_initializer() or _renumbered(x.name, pattern.stack, i, j) != y.name:
        raise Irregular(f"{where} differ: one reads {x.name}, the other {y.name}")
    return set()


def _numbered(value: ir.Value, stack: str, index: int) -> bool:
    """Say whether `value` comes from elsewhere and belongs to layer `index`, or is a cache."""
    if value.is_initializer():
        return _renumbered(value.name, stack, index, index + 1) != value.name
    return value.is_graph_input() and CACHE_NUMBER.search(value.name or "") is not None


def _cache_step(x: ir.Value, y: ir.Value, where: str) -> int:
    """Return by how much the numbers in the names of two caches are apart."""
    before, after = str(x.name), str(y.name)
    numbers = [int(found[0]) for name in (before, after) if (found := CACHE_NUMBER.search(name))]
    if len(numbers) != 2 or _cache_name(before, numbers[1] - numbers[0]) != after:
        raise Irregular(f"{where} differ: one has {before}, the other {after}")
    return numbers[1] - numbers[0]


def _cache_name(name: str, step: int) -> str:
    return CACHE_NUMBER.sub(lambda number: str(int(number[0]) + step), name, count=1)


def _renumbered(name: str | None, stack: str, i: int, j: int) -> str:
    """Name in layer `j` what is called `name` in layer `i`: `model.layers.3.mlp/Mul`; raw weights have a prefix."""
    return re.sub(rf"^((?:\w+\.)?{re.escape(stack)}\.){i}(?=[./])", rf"\g<1>{j}", name or "")


@dataclass
class _Copy:
    """One copy of a layer, to stand at `index`; its caches are `cache_step` behind those of `source`."""

    model: ir.Model
    pattern: Pattern
    source: _GraphLayer
    index: int
    cache_step: int

    def write(self, hidden: ir.Value, anchor: ir.Node) -> tuple[ir.Value, ir.Node]:
        """Insert the copy, which takes `hidden`, behind `anchor`; return what it gives and its last node."""
        graph, source = self.model.graph, self.source
        read = dict.fromkeys(value for node in source.nodes for value in node.inputs if value is not None)
        copies = {value: value for value in read if value.producer() not in source.members}  # what all layers share
        caches = [value for value in graph.inputs if value in read and source.members.issuperset(value.consumers())]
        copies |= {value: ir.Value(name=self._cache(value), shape=value.shape, type=value.type) for value in caches}
        graph.inputs.extend(copies[value] for value in caches)
        for value in read:
            if value.is_initializer() and (name := self._name(value.name)) != value.name:
                own = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
                graph.register_initializer(own)
                copies[value] = own
        copies[source.takes] = hidden
        nodes = copy_nodes(source.nodes, copies)
        for node in nodes:
            node.name = self._name(node.name)
            if INDEX in node.attributes:
                node.attributes.add(ir.AttrInt64(INDEX, node.attributes.get_int(INDEX) + self.cache_step))
            for value in node.outputs:
                value.name = self._name(value.name)
        outputs = [value for value in graph.outputs if value.producer() in source.members]
        for value in outputs:
            copies[value].name = self._cache(value)
        graph.insert_after(anchor, nodes)
        graph.outputs.extend(copies[value] for value in outputs)
        return copies[source.gives], nodes[-1]

    def _name(self, name: str | None) -> str:
        return _renumbered(name, self.pattern.stack, self.source.index, self.index)

    def _cache(self, value: ir.Value) -> str:
        return _cache_name(str(value.name), self.cache_step)

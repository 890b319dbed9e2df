"""Where two graphs differ, as small subgraphs that can be proven one by one, whatever the size of the model.

Both graphs name values. A value that both name, with one type and shape, is a place where both can be divided: if every
such value and every output follows in both graphs in the same way from the values in front of it, the graphs are
equal, by induction along the order of the nodes. A value whose node is the same in both graphs, down to its tensors,
needs no proof; the others bound the changed subgraphs. The boundary is at floating-point values only: any number may be
fed there, where an index or a mask could be out of range.

Subgraphs of one `kind` are the same pair of functions of their weights: equal nodes, attributes and constants in both
graphs, and weights that correspond, of which the graph after the pass reads those that the graph before it reads, as
they are or derived by the same function. One proof holds for all of them. A subgraph that reads a tensor of its own (a
pass made a new one) is of no kind but its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.derived import Derived
from llmforge.ir.graph import is_constant
from llmforge.ir.subgraph import Index, behind, extract

# Names of dimensions whose size is that of a step: what is fed at a boundary can then be made.
DIMENSIONS = frozenset({"batch", "sequence", "rows", "capacity"})
_INLINE_BYTES = 1024  # constants up to this size are compared by content: shapes, axes, scalars
_LAYER = "layer"  # attribute of an operator: the number of its cache


@dataclass(frozen=True, eq=False)
class ChangedSubgraph:
    """A place where two graphs differ: both make the values `outputs` from the values `inputs`."""

    before: Index
    after: Index
    outputs: tuple[str, ...]
    boundary: frozenset[str]

    @cached_property
    def inputs(self) -> dict[str, ir.Value]:
        """What either graph reads at the boundary, by name."""
        return {str(value.name): value for side in self._sides for value in side.inputs}

    @cached_property
    def kind(self) -> str | None:
        """Hash what the subgraph computes, as a function of its weights; None where it is like no other."""
        return _Description(tuple(self.inputs)).hash(*self._sides)

    @property
    def size_bytes(self) -> int:
        """Size of the weights that both graphs read here."""
        tensors = {id(tensor): tensor for side in self._sides for tensor in side.tensors()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def extract(self) -> tuple[ir.Model, ir.Model]:
        """Make models of the subgraph, before and after."""
        before, after = (extract(index, self.outputs, self.boundary) for index in (self.before, self.after))
        return before, after

    def widened(self) -> ChangedSubgraph:
        """Let the subgraph begin further up: what it takes now, it makes itself."""
        return replace(self, boundary=self.boundary - self.inputs.keys())

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        return _Side.of(self.before, self), _Side.of(self.after, self)


def differences(before: Index, after: Index) -> list[ChangedSubgraph]:
    """List the subgraphs that prove `after` to be `before`; none where the graphs are the same.

    Every output of `after` must be one of `before`.
    """
    boundary = frozenset(
        name for name, value in after.values.items() if name in before.values and _divides(value, before, after)
    )
    same = _unchanged(before, after, boundary)
    targets = boundary | {str(value.name) for value in after.model.graph.outputs}
    found = []
    for node in after.model.graph:
        outputs = tuple(str(value.name) for value in node.outputs if value.name in targets)
        if outputs and node not in same:
            found.append(ChangedSubgraph(before, after, outputs, boundary))
    return found


def _divides(value: ir.Value, before: Index, after: Index) -> bool:
    """Say whether both graphs can be divided at `value` of the graph after."""
    other = before.values[str(value.name)]
    dims = graph.dims(value)
    if dims is None or dims != graph.dims(other) or value.dtype is None or value.dtype != other.dtype:
        return False
    if not value.dtype.is_floating_point() or value in after.constant or other in before.constant:
        return False
    return all(isinstance(dim, int) or dim in DIMENSIONS for dim in dims)


def _unchanged(before: Index, after: Index, boundary: Collection[str]) -> set[ir.Node]:
    """Return the nodes of `after` that make what the nodes of the same outputs make in `before`."""
    same: set[ir.Node] = set()
    inputs = {value.name: value for value in before.model.graph.inputs}

    def alike(a: ir.Value | None, b: ir.Value | None) -> bool:
        if a is None or b is None:
            return a is b
        if is_constant(a) or is_constant(b):
            return is_constant(a) and is_constant(b) and _same_tensor(a.const_value, b.const_value)
        maker = a.producer()
        if maker is None or b.producer() is None:
            return a.is_graph_input() and inputs.get(a.name) is b and _typed(a) == _typed(b)
        return a.name == b.name and (a.name in boundary or maker in same)

    for node in after.model.graph:
        names = [value.name for value in node.outputs]
        first = next((before.values[name] for name in names if name and name in before.values), None)
        other = None if first is None else first.producer()
        if other is None or [value.name for value in other.outputs] != names or len(node.inputs) != len(other.inputs):
            continue
        operator = node.op_identifier() == other.op_identifier() and _attributes(node) == _attributes(other)
        if operator and all(map(alike, node.inputs, other.inputs)):
            same.add(node)
    return same


def _typed(value: ir.Value) -> tuple[object, object]:
    return value.dtype, graph.dims(value)


def _attributes(node: ir.Node) -> list[tuple[str, object, object]]:
    return [(name, attribute.type, attribute.value) for name, attribute in sorted(node.attributes.items())]


def _same_tensor(a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return _is_small(a) and _is_small(b) and _content(a) == _content(b)


def _is_small(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes <= _INLINE_BYTES and not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor)


def _content(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape.numpy(), tensor.tobytes()


@dataclass(frozen=True, eq=False)
class _Side:
    """A changed subgraph in one graph: its nodes in order, its inputs and outputs there."""

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]  # in the order in which nodes read them
    outputs: tuple[ir.Value, ...]

    @classmethod
    def of(cls, index: Index, changed: ChangedSubgraph) -> _Side:
        outputs = tuple(index.values[name] for name in changed.outputs)
        stops = changed.boundary - set(changed.outputs)
        found, edge = behind(outputs, lambda value: value.name in stops and value.producer() is not None)
        nodes = tuple(sorted(found, key=index.position.__getitem__))
        read = (value for node in nodes for value in node.inputs if value is not None and value in edge)
        return cls(nodes, tuple(dict.fromkeys(value for value in read if value.producer() is not None)), outputs)

    def tensors(self) -> Iterator[ir.TensorProtocol]:
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and is_constant(value) and value.const_value is not None:
                    yield value.const_value


@dataclass
class _Description:
    """Writes a changed subgraph down with numbers in the place of names."""

    inputs: Sequence[str]
    _tensors: dict[int, int] = field(default_factory=dict)  # id of a tensor → its number
    _layers: dict[int, int] = field(default_factory=dict)  # number of a cache → its number in the subgraph
    _read: set[int] = field(default_factory=set)  # tensors that the side at hand comes down to
    _opaque: bool = False

    def hash(self, before: _Side, after: _Side) -> str | None:
        written, read = [], []
        for side in (before, after):
            self._read = set()
            written.append(self._side(side))
            read.append(self._read)
        if self._opaque or read[0] != read[1]:
            return None
        return hashlib.sha256(repr(written).encode()).hexdigest()

    def _side(self, side: _Side) -> list[object]:
        places: dict[ir.Value, str] = {}
        written: list[object] = []
        for number, node in enumerate(side.nodes):
            reads = [None if value is None else self._place(value, places) for value in node.inputs]
            written.append((node.op_identifier(), reads, list(self._numbers(node))))
            places |= {value: f"value {number}:{i}" for i, value in enumerate(node.outputs)}
        return [written, [(places[value], self._type(value)) for value in side.outputs]]

    def _place(self, value: ir.Value, places: dict[ir.Value, str]) -> object:
        if value in places:
            return places[value]
        if is_constant(value):
            return self._tensor(graph.tensor(value))
        if value.name in self.inputs:
            return "take", self.inputs.index(str(value.name)), self._type(value)
        cache = interface.PAST.fullmatch(str(value.name))
        name = f"cache {self._layer(int(cache[1]))} {cache[2]}" if cache else str(value.name)
        return "input", name, self._type(value)

    def _type(self, value: ir.Value) -> object:
        return None if value.dtype is None else value.dtype.name, graph.dims(value)

    def _tensor(self, tensor: ir.TensorProtocol) -> object:
        if _is_small(tensor):
            return "constant", _content(tensor)
        kind = (tensor.dtype.name, tensor.shape.numpy())
        if isinstance(tensor, Derived):
            return "derived", id(tensor.function), kind, [self._tensor(each) for each in tensor.operands]
        self._read.add(id(tensor))
        return "tensor", self._tensors.setdefault(id(tensor), len(self._tensors)), kind

    def _numbers(self, node: ir.Node) -> Iterator[object]:
        for name, kind, value in _attributes(node):
            if isinstance(value, ir.Graph | ir.TensorProtocol):
                self._opaque = True
            yield name, str(kind), self._layer(value) if name == _LAYER and isinstance(value, int) else value

    def _layer(self, number: int) -> int:
        return self._layers.setdefault(number, len(self._layers))

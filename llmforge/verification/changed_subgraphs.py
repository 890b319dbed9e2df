"""Where two graphs differ, as small regions that can be proven one by one, whatever the size of the model.

Both graphs name values. A value that both name, with one type and shape, is a place where both can be cut: if every
such value and every output follows in both graphs in the same way from the values in front of it, the graphs are
equal, by induction along the order of the nodes. A value whose node is the same in both graphs, down to its tensors,
needs no proof; the others are the edges of regions. Cuts are at floating-point values only: any number may be fed
there, where an index or a mask could be out of range.

Regions of one `kind` are the same pair of functions of their weights: equal nodes, attributes and constants in both
graphs, and weights that correspond, of which the graph after the pass reads those that the graph before it reads, as
they are or derived by the same function. One proof holds for all of them. A region that reads a tensor of its own (a
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
from llmforge.verification.subgraph import Index, behind, cut_out, is_fixed

# Names of dimensions whose size is that of a step: what is fed at a cut can then be made.
DIMENSIONS = frozenset({"batch", "sequence", "rows", "capacity"})
_INLINE_BYTES = 1024  # constants up to this size are compared by content: shapes, axes, scalars
_LAYER = "layer"  # attribute of an operator: the number of its cache


@dataclass(frozen=True, eq=False)
class Region:
    """A place where two graphs differ: both make the values `gives` from the values `takes`."""

    before: Index
    after: Index
    gives: tuple[str, ...]
    stops: frozenset[str]

    @cached_property
    def takes(self) -> dict[str, ir.Value]:
        """What either graph reads at the edge, by name."""
        return {str(value.name): value for side in self._sides for value in side.takes}

    @cached_property
    def kind(self) -> str | None:
        """Hash what the region computes, as a function of its weights; None where it is like no other."""
        return _Description(tuple(self.takes)).hash(*self._sides)

    @property
    def size_bytes(self) -> int:
        """Size of the weights that both graphs read here."""
        tensors = {id(tensor): tensor for side in self._sides for tensor in side.tensors()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def cut(self) -> tuple[ir.Model, ir.Model]:
        """Make models of the region, before and after."""
        return cut_out(self.before, self.gives, self.stops), cut_out(self.after, self.gives, self.stops)

    def widened(self) -> Region:
        """Let the region begin further up: what it takes now, it makes itself."""
        return replace(self, stops=self.stops - self.takes.keys())

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        return _Side.of(self.before, self), _Side.of(self.after, self)


def differences(before: Index, after: Index) -> list[Region]:
    """List the regions that prove `after` to be `before`; none where the graphs are the same.

    Every output of `after` must be one of `before`.
    """
    stops = frozenset(
        name for name, value in after.values.items() if name in before.values and _cuts(value, before, after)
    )
    same = _unchanged(before, after, stops)
    outputs = {str(value.name) for value in after.model.graph.outputs}
    targets = stops | outputs
    regions = []
    for node in after.model.graph:
        gives = tuple(str(value.name) for value in node.outputs if value.name in targets)
        if gives and node not in same:
            regions.append(Region(before, after, gives, stops))
    return regions


def _cuts(value: ir.Value, before: Index, after: Index) -> bool:
    """Say whether both graphs can be cut at `value` of the graph after."""
    other = before.values[str(value.name)]
    dims = graph.dims(value)
    if dims is None or dims != graph.dims(other) or value.dtype is None or value.dtype != other.dtype:
        return False
    if not value.dtype.is_floating_point() or value in after.constant or other in before.constant:
        return False
    return all(isinstance(dim, int) or dim in DIMENSIONS for dim in dims)


def _unchanged(before: Index, after: Index, stops: Collection[str]) -> set[ir.Node]:
    """Return the nodes of `after` that make what the nodes of the same outputs make in `before`."""
    same: set[ir.Node] = set()
    inputs = {value.name: value for value in before.model.graph.inputs}

    def alike(a: ir.Value | None, b: ir.Value | None) -> bool:
        if a is None or b is None:
            return a is b
        if is_fixed(a) or is_fixed(b):
            return is_fixed(a) and is_fixed(b) and _same_tensor(a.const_value, b.const_value)
        maker = a.producer()
        if maker is None or b.producer() is None:
            return a.is_graph_input() and inputs.get(a.name) is b and _typed(a) == _typed(b)
        return a.name == b.name and (a.name in stops or maker in same)

    for node in after.model.graph:
        names = [value.name for value in node.outputs]
        first = next((before.values[name] for name in names if name and name in before.values), None)
        other = None if first is None else first.producer()
        if other is None or [value.name for value in other.outputs] != names or not _same_operator(node, other):
            continue
        if len(node.inputs) == len(other.inputs) and all(map(alike, node.inputs, other.inputs)):
            same.add(node)
    return same


def _typed(value: ir.Value) -> tuple[object, object]:
    return value.dtype, graph.dims(value)


def _same_operator(a: ir.Node, b: ir.Node) -> bool:
    if (a.domain, a.op_type, a.overload) != (b.domain, b.op_type, b.overload):
        return False
    return _attributes(a) == _attributes(b)


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
    """A region in one graph: its nodes in order, and what it takes and gives there."""

    nodes: tuple[ir.Node, ...]
    takes: tuple[ir.Value, ...]  # in the order in which nodes read them
    gives: tuple[ir.Value, ...]

    @classmethod
    def of(cls, index: Index, region: Region) -> _Side:
        gives = tuple(index.values[name] for name in region.gives)
        found, taken = behind(gives, region.stops - set(region.gives))
        nodes = tuple(sorted(found, key=index.position.__getitem__))
        edge = set(taken)
        takes = dict.fromkeys(value for node in nodes for value in node.inputs if value in edge and value is not None)
        return cls(nodes, tuple(takes), gives)

    def tensors(self) -> Iterator[ir.TensorProtocol]:
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and is_fixed(value) and value.const_value is not None:
                    yield value.const_value


@dataclass
class _Description:
    """Writes a region down with numbers in the place of names."""

    takes: Sequence[str]
    _tensors: dict[int, int] = field(default_factory=dict)  # id of a tensor → its number
    _layers: dict[int, int] = field(default_factory=dict)  # number of a cache → its number in the region
    _read: set[int] = field(default_factory=set)  # tensors that the side at hand comes down to
    _opaque: bool = False

    def hash(self, before: _Side, after: _Side) -> str | None:
        parts, read = [], []
        for side in (before, after):
            self._read = set()
            parts.append(self._side(side))
            read.append(self._read)
        if self._opaque or read[0] != read[1]:
            return None
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _side(self, side: _Side) -> list[object]:
        places: dict[ir.Value, str] = {}
        written: list[object] = []
        for number, node in enumerate(side.nodes):
            reads = [None if value is None else self._place(value, places) for value in node.inputs]
            written.append((node.domain, node.op_type, node.overload, reads, list(self._numbers(node))))
            places |= {value: f"value {number}:{i}" for i, value in enumerate(node.outputs)}
        return [written, [(places[value], self._type(value)) for value in side.gives]]

    def _place(self, value: ir.Value, places: dict[ir.Value, str]) -> object:
        if value in places:
            return places[value]
        if is_fixed(value):
            assert value.const_value is not None
            return self._tensor(value.const_value)
        if value.name in self.takes:
            return "take", self.takes.index(str(value.name)), self._type(value)
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
            return "derived", id(tensor.function), kind, [self._tensor(part) for part in tensor.parts]
        self._read.add(id(tensor))
        return "tensor", self._tensors.setdefault(id(tensor), len(self._tensors)), kind

    def _numbers(self, node: ir.Node) -> Iterator[object]:
        for name, kind, value in _attributes(node):
            if isinstance(value, ir.Graph | ir.TensorProtocol):
                self._opaque = True
            yield name, str(kind), self._layer(value) if name == _LAYER and isinstance(value, int) else value

    def _layer(self, number: int) -> int:
        return self._layers.setdefault(number, len(self._layers))

"""Where two graphs differ, as small subgraphs that can be proven one by one, whatever the size of the model.

Both graphs name values. A value that both name, with one type and shape, is a place where both can be divided: if every
such value and every output follows in both graphs in the same way from the values in front of it, the graphs are
equal, by induction along the order of the nodes. A value whose node is the same in both graphs, down to its tensors,
needs no proof; the others bound the changed subgraphs. The boundary is at floating-point values only: any number may be
fed there, where an index or a mask could be out of range.

Subgraphs of one `kind` are the same pair of functions of their weights: equal nodes, attributes, constants and tables
of positions in both graphs, and weights in the same places. What lengths and places do to them is proven once for all
of a kind; the weights of each are its own, and are run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface, operators, routing
from llmforge.ir.graph import is_constant
from llmforge.ir.subgraph import Index, behind, extract
from llmforge.verification import token_wise

# Names of dimensions whose size is that of a step: what is fed at a boundary can then be made.
DIMENSIONS = frozenset({"batch", "sequence", "rows", "capacity"})
_INLINE_BYTES = 1024  # constants up to this size are compared by content: shapes, axes, scalars
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_TABLE_BYTES = 1 << 28  # tables of positions up to this size are compared by content: 2^20 positions of 64 angles
_SIZES = frozenset({"K", "N"})  # attributes of products
_LAYER = "layer"  # attribute of an operator: the number of its cache


@dataclass(frozen=True, eq=False)
class ChangedSubgraph:
    """A place where two graphs differ: both make the values `outputs` from the values `inputs`."""

    before: Index
    after: Index
    outputs: tuple[str, ...]
    boundary: frozenset[str]
    digests: dict[int, str] = field(default_factory=dict)  # of tables, by the id of their tensor: each is read once

    @cached_property
    def inputs(self) -> dict[str, ir.Value]:
        """What either graph reads at the boundary, by name."""
        return {str(value.name): value for side in self._sides for value in side.inputs}

    @cached_property
    def kind(self) -> str | None:
        """Hash what the subgraph computes, as a function of its weights; None where it is like no other."""
        return _Description(tuple(self.inputs), self.digests).hash(*self._sides)

    @cached_property
    def form(self) -> str | None:
        """Hash what the subgraph computes, as a function of weights of any size, and of floating-point constants."""
        return _Description(tuple(self.inputs), self.digests, sizes=False).hash(*self._sides)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Name the inputs of either graph that its nodes read."""
        read = (value for side in self._sides for node in side.nodes for value in node.inputs if value is not None)
        return frozenset(str(value.name) for value in read if value.is_graph_input())

    def never_negative(self, name: str) -> bool:
        """Say whether the input `name` is certain to hold no negative number, as the graph before makes it."""
        return routing.never_negative(self.before.values[name])

    @property
    def other_numbers(self) -> str | None:
        """Name the one attribute, or the tensor's bits, in which both sides differ; None where more differs.

        Such a change may be too small to move any bit of what a step makes, and is one all the same; two of them could
        make up for each other.
        """
        before, after = (side.nodes for side in self._sides)
        if len(before) != len(after):
            return None
        same: dict[ir.Value, ir.Value] = {}
        found: list[str] = []
        for one, other in zip(before, after, strict=True):
            if one.op_identifier() != other.op_identifier() or len(one.inputs) != len(other.inputs):
                return None
            for name in one.attributes.keys() & other.attributes.keys():
                was, now = one.attributes[name], other.attributes[name]
                if was.type == now.type == ir.AttributeType.FLOAT and was.value != now.value:
                    found.append(f"attribute {name} of {other.name}")
            for old, new in zip(one.inputs, other.inputs, strict=True):
                if old is None or new is None:
                    if old is not new:
                        return None
                elif is_constant(old) and is_constant(new):
                    if _other_bits(graph.tensor(old), graph.tensor(new)):
                        found.append(str(new.name))
                elif same.get(old) is not new and old.name != new.name:
                    return None
            same |= dict(zip(one.outputs, other.outputs, strict=True))
        return found[0] if len(found) == 1 else None

    @property
    def has_new_tables(self) -> bool:
        """Say whether the graph after reads a table of positions whose numbers the graph before does not read here."""
        before, after = ({_digest(table, self.digests) for table in side.tables()} for side in self._sides)
        return not after <= before

    @property
    def has_new_weights(self) -> bool:
        """Say whether the graph after reads a weight that the graph before does not: no constant, and no table."""
        before, after = (
            {id(tensor) for tensor in side.tensors() if not _is_small(tensor)} - {id(table) for table in side.tables()}
            for side in self._sides
        )
        return not after <= before

    @property
    def tokens_per_expert(self) -> tuple[int, float]:
        """Return how many experts there are, and how many tokens choose one of them on average; (0, 0): none are."""
        found = (0, 0.0)
        for value in {value for node in self.after_nodes for value in node.inputs if value is not None}:
            if is_constant(value) and (share := routing.share_read(value)) < 1:
                found = max(found, (graph.static(value)[0], float(1 / share)))
        return found

    @property
    def after_nodes(self) -> tuple[ir.Node, ...]:
        """Return the nodes that stand here in the graph after."""
        return self._sides[1].nodes

    @property
    def after_tensors(self) -> Iterator[ir.TensorProtocol]:
        """Give the tensors that the graph after reads here."""
        return self._sides[1].tensors()

    @property
    def size_bytes(self) -> int:
        """Size of the weights that both graphs read here."""
        tensors = {id(tensor): tensor for side in self._sides for tensor in side.tensors()}
        return sum(tensor.nbytes for tensor in tensors.values())

    @property
    def is_token_wise(self) -> bool:
        """Say whether both graphs make of each token here what follows from its own numbers and id alone."""
        edges = all((graph.dims(value) or ())[:2] in token_wise.AXES for value in self.inputs.values())
        indexes = (self.before, self.after)
        return edges and all(
            token_wise.holds(side.nodes, index.constant) for side, index in zip(self._sides, indexes, strict=True)
        )

    def extract(self) -> tuple[ir.Model, ir.Model]:
        """Make models of the subgraph, before and after."""
        before, after = (extract(index, self.outputs, self.boundary) for index in (self.before, self.after))
        return before, after

    def widened(self) -> ChangedSubgraph:
        """Let the subgraph begin further up: what it takes now, it makes itself."""
        return replace(self, boundary=self.boundary - self.inputs.keys()).closed()

    def closed(self) -> ChangedSubgraph:
        """Begin further up where a side takes what a node of the other side makes besides: both would not agree.

        So it is where one node makes a sum and its norm, and in the other graph a norm reads the sum.
        """
        made = {value.name for side in self._sides for node in side.nodes for value in node.outputs}
        shared = made & self.inputs.keys()
        return replace(self, boundary=self.boundary - shared).closed() if shared else self

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        return _Side.of(self.before, self), _Side.of(self.after, self)


def differences(before: Index, after: Index, *, precision: bool = True) -> list[ChangedSubgraph]:
    """List the subgraphs that prove `after` to be `before`; none where the graphs are the same.

    Every output of `after` must be one of `before`. Without `precision`, graphs are also divided where one computes in
    half precision and the other does not.
    """
    boundary = frozenset(
        name
        for name, value in after.values.items()
        if name in before.values and _divides(value, before, after, precision)
    )
    same = _unchanged(before, after, boundary)
    targets = boundary | {str(value.name) for value in after.model.graph.outputs}
    found: list[ChangedSubgraph] = []
    digests: dict[int, str] = {}
    for node in after.model.graph:
        outputs = tuple(str(value.name) for value in node.outputs if value.name in targets)
        if outputs and node not in same:
            found.append(ChangedSubgraph(before, after, outputs, boundary, digests).closed())
    return found


def _divides(value: ir.Value, before: Index, after: Index, precision: bool) -> bool:
    """Say whether both graphs can be divided at `value` of the graph after."""
    other = before.values[str(value.name)]
    dims = graph.dims(value)
    if dims is None or dims != graph.dims(other) or value.dtype is None or other.dtype is None:
        return False
    if value.dtype != other.dtype and (precision or not {value.dtype, other.dtype} <= FLOATS):
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


def _other_bits(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    """Say whether two tensors of one shape hold other bits, reading them where they are not one object."""
    if a is b or a.dtype != b.dtype or a.shape.numpy() != b.shape.numpy():
        return False
    return a.numpy().tobytes() != b.numpy().tobytes()


def _is_small(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes <= _INLINE_BYTES and not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor)


def _content(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape.numpy(), tensor.tobytes()


def _is_table(node: ir.Node, number: int) -> bool:
    """Say whether input `number` of `node` is a table whose rows are chosen by position."""
    operand, value = operators.operand(node, number), node.inputs[number]
    if operand is None or value is None or not operand.table or not is_constant(value):
        return False
    chosen = [other for other in node.inputs if other is not None and other is not value]
    by_token = any(other.name == interface.INPUT_IDS for other in chosen)
    return not by_token and graph.tensor(value).nbytes <= _TABLE_BYTES


def _digest(tensor: ir.TensorProtocol, known: dict[int, str]) -> str:
    """Hash what `tensor` holds, reading it unless it is `known`."""
    if id(tensor) not in known:
        array = np.ascontiguousarray(tensor.numpy())
        known[id(tensor)] = f"{tensor.dtype.name} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    return known[id(tensor)]


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

    @cached_property
    def by_place(self) -> frozenset[ir.Node]:
        """Name the nodes whose results follow from places and tensors alone: what such a one reads is a table, too."""
        told = {
            value
            for node in self.nodes
            for value in node.inputs
            if value is not None and value.name in interface.PLACES
        }
        found: set[ir.Node] = set()
        for node in self.nodes:
            reads = [value for value in node.inputs if value is not None and not is_constant(value)]
            if reads and told.issuperset(reads):
                found.add(node)
                told.update(node.outputs)
        return frozenset(found)

    def is_table(self, node: ir.Node, number: int) -> bool:
        """Say whether input `number` of `node` is a tensor that is read by position."""
        value = node.inputs[number]
        if value is None or not is_constant(value) or value.const_value is None:
            return False
        by_place = node in self.by_place and not _is_small(value.const_value)
        return _is_table(node, number) or (by_place and value.const_value.nbytes <= _TABLE_BYTES)

    def tables(self) -> Iterator[ir.TensorProtocol]:
        for node in self.nodes:
            for number, value in enumerate(node.inputs):
                if value is not None and self.is_table(node, number):
                    yield graph.tensor(value)

    def tensors(self) -> Iterator[ir.TensorProtocol]:
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and is_constant(value) and value.const_value is not None:
                    yield value.const_value


@dataclass
class _Description:
    """Writes a changed subgraph down with numbers in the place of names."""

    inputs: Sequence[str]
    digests: dict[int, str]
    sizes: bool = True  # whether those of weights, and floating-point constants, count
    _tensors: dict[int, int] = field(default_factory=dict)  # id of a tensor → its number
    _layers: dict[int, int] = field(default_factory=dict)  # number of a cache → its number in the subgraph
    _opaque: bool = False

    def hash(self, before: _Side, after: _Side) -> str | None:
        written = [self._side(side) for side in (before, after)]
        return None if self._opaque else hashlib.sha256(repr(written).encode()).hexdigest()

    def _side(self, side: _Side) -> list[object]:
        places: dict[ir.Value, str] = {}
        written: list[object] = []
        for number, node in enumerate(side.nodes):
            reads = [
                None if value is None else self._place(value, places, side.is_table(node, place))
                for place, value in enumerate(node.inputs)
            ]
            written.append((node.op_identifier(), reads, list(self._numbers(node))))
            places |= {value: f"value {number}:{i}" for i, value in enumerate(node.outputs)}
        return [written, [(places[value], self._type(value)) for value in side.outputs]]

    def _place(self, value: ir.Value, places: dict[ir.Value, str], is_table: bool) -> object:
        if value in places:
            return places[value]
        if is_constant(value):
            tensor = graph.tensor(value)
            return ("table", _digest(tensor, self.digests)) if is_table else self._tensor(tensor)
        if value.name in self.inputs:
            return "take", self.inputs.index(str(value.name)), self._type(value)
        cache = interface.PAST.fullmatch(str(value.name))
        name = f"cache {self._layer(int(cache[1]))} {cache[2]}" if cache else str(value.name)
        return "input", name, self._type(value)

    def _type(self, value: ir.Value) -> object:
        dims = graph.dims(value)
        return None if value.dtype is None else value.dtype.name, dims if self.sizes or dims is None else len(dims)

    def _tensor(self, tensor: ir.TensorProtocol) -> object:
        if not self.sizes and (tensor.dtype.is_floating_point() or not _is_small(tensor)):
            return "tensor", self._tensors.setdefault(id(tensor), len(self._tensors)), tensor.dtype.name
        if _is_small(tensor):
            return "constant", _content(tensor)
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        return "tensor", number, tensor.dtype.name, tensor.shape.numpy()

    def _numbers(self, node: ir.Node) -> Iterator[object]:
        for name, kind, value in _attributes(node):
            if isinstance(value, ir.Graph | ir.TensorProtocol):
                self._opaque = True
            if name in _SIZES and not self.sizes:
                continue
            yield name, str(kind), self._layer(value) if name == _LAYER and isinstance(value, int) else value

    def _layer(self, number: int) -> int:
        return self._layers.setdefault(number, len(self._layers))

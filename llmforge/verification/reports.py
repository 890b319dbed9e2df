"""Hold what a pass reports, and what it leaves in the graph beside its nodes, against what it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.ir import graph
from llmforge.ir.derived import Derived, Stored, side_by_side
from llmforge.rewrite.pass_base import Changes


@dataclass(frozen=True, eq=False)
class GraphSnapshot:
    """A graph at one moment: a clone that shares its tensors, and what tells whether it has changed since."""

    model: ir.Model
    fingerprint: str
    tensors: Mapping[str, ir.TensorProtocol | None]
    held: Mapping[str, object]  # hashes of the tensors in memory, and how the lazy ones come about
    attributes: Mapping[str, object]  # of the nodes; clones share them

    @classmethod
    def of(cls, model: ir.Model) -> GraphSnapshot:
        """Record `model`, which may change afterwards."""
        tensors = _tensors(model)
        clone = model.clone()
        return cls(clone, graph.fingerprint(model), tensors, _held(tensors), _attributes_of(clone))

    def overwritten(self) -> str | None:
        """Say what was changed in place, so that this snapshot is none any more: a tensor's numbers, an attribute."""
        now = _held(self.tensors)
        name = next((name for name, then in self.held.items() if now[name] != then), None)
        if name is not None:
            return f"the numbers of initializer {name}"
        attributes = _attributes_of(self.model)
        changed = next((node for node, given in self.attributes.items() if attributes[node] != given), None)
        return None if changed is None else f"an attribute of node {changed}"

    def differs(self, model: ir.Model) -> str | None:
        """Say what of `model` is not as it was; None where all is."""
        if graph.fingerprint(model) != self.fingerprint:
            return "the structure of the graph"
        for name, tensor in _tensors(model).items():
            before = self.tensors[name]
            # A fingerprint reads no lazy tensor and knows no folder: another object may hold other numbers.
            if tensor is not None and before is not None and not graph.same(tensor, before):
                return f"initializer {name}"
        return None


def check(name: str, before: GraphSnapshot, model: ir.Model, changes: Changes, overwritten: str | None) -> None:
    """Hold what the pass `name` reports, and the notes that it leaves in the graph, against what it did.

    `overwritten` is what of the graph before was changed in place, when the pass had run.

    Raises:
        VerificationError: something else stands there.
    """
    if overwritten is not None:
        raise VerificationError(f"pass {name} changed {overwritten} in place")
    check_changes(name, before, model, changes)
    for found in (_unknown_place(before.model, model, changes), *_leftovers(before.model, model)):
        if found is not None:
            raise VerificationError(f"pass {name} {found}")


def check_changes(name: str, before: GraphSnapshot, model: ir.Model, changes: Changes) -> None:
    """Hold what the pass `name` reports against whether it changed the graph.

    Raises:
        VerificationError: it reports changes and made none, or made changes and reports none.
    """
    difference = before.differs(model)
    if changes and difference is None:
        first = changes.rewritten[0]
        raise VerificationError(
            f"pass {name} reports {len(changes.rewritten)} changes, the first at {first.node} ({first.what}), "
            "but did not change the graph"
        )
    if not changes and difference is not None:
        raise VerificationError(f"pass {name} reports no changes, but changed {difference}")


def _unknown_place(before: ir.Model, after: ir.Model, changes: Changes) -> str | None:
    """Say which place of a report is in neither graph."""
    known = {node.name for model in (before, after) for node in model.graph.all_nodes()}
    for model in (before, after):
        known |= {value.name for value in (*model.graph.initializers.values(), *model.graph.inputs)}
        known |= {value.name for value in model.graph.outputs}
    places = [place.node for place in changes.rewritten] + [place.node for place in changes.skipped]
    unknown = next((place for place in places if place not in known), None)
    return None if unknown is None else f"reports {unknown}, which is in neither graph"


def _leftovers(before: ir.Model, after: ir.Model) -> Iterator[str]:
    """Say what is wrong with the initializers of the graph after, beside their numbers."""
    known, sources = before.graph.initializers, {}
    for value in known.values():
        if value.const_value is not None:
            sources[id(value.const_value)] = graph.sources(value)
    there = {name for names in sources.values() for name in names}
    for name, value in after.graph.initializers.items():
        old, tensor = known.get(name), value.const_value
        unread = not value.uses() and not value.is_graph_input() and not value.is_graph_output()
        if unread and (old is None or old.uses()):
            yield f"leaves initializer {name} behind, which no node reads"
        if tensor is None:
            continue
        if value.is_graph_input():
            if old is not None and old.const_value is not None and not graph.same(tensor, old.const_value):
                yield f"changes the default of input {name}"
            continue
        given, expected = graph.sources(value), _expected(tensor, sources)
        says = bool(given) or id(tensor) in sources  # what a pass makes need not say where from
        if says and expected is not None and given != expected:
            yield f"says that initializer {name} comes from {given}; it comes from {expected}"
        if foreign := [source for source in given if source not in there]:
            yield f"says that initializer {name} comes from {foreign[0]}, which the graph before does not have"


def _expected(tensor: ir.TensorProtocol, sources: Mapping[int, list[str]]) -> list[str] | None:
    """Name the parameters that `tensor` comes from; None where that does not follow from what it is made of."""
    if id(tensor) in sources:
        return sources[id(tensor)]
    if not isinstance(tensor, Derived):
        return None
    found = [_expected(each, sources) for each in tensor.operands]
    if tensor.function is not side_by_side and sum(bool(names) for names in found) != 1:
        return None
    return None if any(names is None for names in found) else [name for names in found for name in names or ()]


def _tensors(model: ir.Model) -> dict[str, ir.TensorProtocol | None]:
    return {name: value.const_value for name, value in model.graph.initializers.items()}


def _attributes_of(model: ir.Model) -> dict[str, object]:
    """List what the attributes of each node hold, by its place and name; of graphs and tensors which object."""
    opaque = (ir.Graph, ir.TensorProtocol)
    return {
        f"{number} {node.name}": [
            (name, str(each.type), id(each.value) if isinstance(each.value, opaque) else repr(each.value))
            for name, each in sorted(node.attributes.items())
        ]
        for number, node in enumerate(model.graph.all_nodes())
    }


def _held(tensors: Mapping[str, ir.TensorProtocol | None]) -> dict[str, object]:
    """Hash each tensor that is in memory, and say of the others how they come about, by name."""
    return {
        name: _origin(tensor) if isinstance(tensor, ir.LazyTensor | ir.ExternalTensor) else graph.identity(tensor)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _origin(tensor: ir.TensorProtocol) -> object:
    head = (id(tensor), tensor.dtype, tensor.shape.numpy())
    if isinstance(tensor, Derived):
        return *head, tensor.function, tensor._func, [_origin(each) for each in tensor.operands]
    if isinstance(tensor, Stored):
        return *head, tensor.pieces, tensor._func, tensor.transposed
    if isinstance(tensor, ir.LazyTensor):
        return *head, tensor._func
    if isinstance(tensor, ir.ExternalTensor):
        return *head, str(tensor.path), tensor.offset, tensor.length
    return head

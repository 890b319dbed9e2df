"""What expansions of operators share: constants by name, nodes beside a node, nodes that every layer may read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph as g

PREFIX = "expand"  # of the names of constants made here
Arguments = TypeVarTuple("Arguments")
B = TypeVar("B", bound="Builder")


@dataclass
class Builder:
    """Adds nodes to `model`."""

    model: ir.Model
    made: dict[tuple[object, ...], ir.Value] = field(default_factory=dict, init=False)  # of methods that are `shared`

    def _constant(self, name: str, value: int | list[int] | np.generic | NDArray[np.generic]) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, int | list) else np.asarray(value)
        return g.initializer(self.model, f"{PREFIX}.{name}", array)

    def _add(
        self, node: ir.Node, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, g.Attribute] | None = None
    ) -> ir.Value:
        return g.insert(node, op_type, list(inputs), attributes)[0]

    def _first(
        self, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, g.Attribute] | None = None
    ) -> ir.Value:
        """Add a node that every layer may read: behind the last of its inputs, else at the head of the graph."""
        producers = [producer for value in inputs if (producer := value.producer()) is not None]
        node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(dict(attributes or {})))
        if producers:
            order = {member: index for index, member in enumerate(self.model.graph)}
            self.model.graph.insert_after(max(producers, key=order.__getitem__), node)
        else:
            self.model.graph.insert_before(self.model.graph[0], node)
        return node.outputs[0]

    def _extent(self, x: ir.Value, axis: int) -> ir.Value:
        """Read the size of `axis` as a scalar."""
        return self._first("Squeeze", [self._first("Shape", [x], {"start": axis, "end": axis + 1})])

    def _count_along(self, x: ir.Value, axis: int) -> ir.Value:
        """0, 1, … up to the size of `axis`: int64."""
        extent = self._extent(x, axis)
        return self._first("Range", [self._constant("zero", 0), extent, self._constant("one", 1)])


def shared(method: Callable[[B, *Arguments], ir.Value]) -> Callable[[B, *Arguments], ir.Value]:
    """Let `method` of a builder make a value that every layer reads: once for the same arguments."""

    @functools.wraps(method)
    def once(builder: B, /, *args: *Arguments) -> ir.Value:
        key = (method, *args)
        if key not in builder.made:
            builder.made[key] = method(builder, *args)
        return builder.made[key]

    return once

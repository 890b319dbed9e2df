"""The builder that expansions of operators share: constants by name, nodes beside a node, nodes that layers share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived, Function, key_projection, value_projection
from llmforge.ir.operators import canonical

PREFIX = "expand"  # of the names of constants made here
Arguments = TypeVarTuple("Arguments")
B = TypeVar("B", bound="GraphBuilder")


@dataclass
class GraphBuilder:
    """Adds nodes to `model`."""

    model: ir.Model
    made: dict[tuple[object, ...], ir.Value] = field(default_factory=dict, init=False)  # of methods that are `shared`

    def _constant(self, name: str, value: int | list[int] | np.generic | NDArray[np.generic]) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, int | list) else np.asarray(value)
        return graph.initializer(self.model, f"{PREFIX}.{name}", array)

    def _add(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        attributes: Mapping[str, graph.Attribute] | None = None,
    ) -> ir.Value:
        return graph.insert(node, op_type, list(inputs), attributes)[0]

    def _first(
        self, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, graph.Attribute] | None = None
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

    def _up_by_head(self, layer: canonical.LatentAttention) -> tuple[ir.Value, ir.Value]:
        """Divide `up` of a layer: what makes keys of latents, [H, N, L], and what makes values, [H, L, Dv]."""
        up, heads, plain, rank, values = layer.up, layer.num_heads, layer.plain, layer.rank, layer.value_dim
        if not up.is_initializer():
            wanted = self._constant(f"up_by_head_{heads}_{rank}", [heads, -1, rank])
            by_head, sizes = self._add(layer.node, "Reshape", [up, wanted]), [plain, values]
            rows = self._constant(f"rows_{plain}_{values}", sizes)
            of_keys, of_values = graph.insert(layer.node, "Split", [by_head, rows], {"axis": 1}, outputs=2)
            return of_keys, self._add(layer.node, "Transpose", [of_values], {"perm": [0, 2, 1]})
        operands, sources = [graph.tensor(up), ir.tensor(np.array([heads, plain], np.int64))], graph.sources(up)

        def part(function: Function, shape: tuple[int, int, int], name: str) -> ir.Value:
            tensor = Derived(function, operands, operands[0].dtype, ir.Shape(shape), name)
            return graph.initializer(self.model, name, tensor, sources)

        keys = part(key_projection, (heads, plain, rank), f"{up.name}.keys")
        return keys, part(value_projection, (heads, rank, values), f"{up.name}.values")


def shared(method: Callable[[B, *Arguments], ir.Value]) -> Callable[[B, *Arguments], ir.Value]:
    """Let `method` of a builder make a value that every layer reads: once for the same arguments."""

    @functools.wraps(method)
    def once(builder: B, /, *args: *Arguments) -> ir.Value:
        key = (method, *args)
        if key not in builder.made:
            builder.made[key] = method(builder, *args)
        return builder.made[key]

    return once

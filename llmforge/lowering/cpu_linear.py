"""Quantized linear layers and embeddings as operators of `llmforge.cpu`, with what stands before and behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived, Function
from llmforge.native import DOMAIN, layout
from llmforge.quantization import Grid, unpack_bits

MICROSOFT = "com.microsoft"
INT8_ACTIVATIONS: Final = 4  # accuracy_level of MatMulNBits and QMoE: activations are rounded to int8
NO_ACTIVATION, SILU, GELU_TANH = 0, 1, 2  # attribute `activation` of Linear
_NORMS = {("", "RMSNormalization"), ("", "SimplifiedLayerNormalization")}


class Norm(NamedTuple):
    """RMSNormalization over the last axis: its input, its weights and its epsilon."""

    input: ir.Value
    weight: ir.Value
    epsilon: float


def obstacle(node: ir.Node) -> str | None:
    """Say why `node`, a MatMulNBits, cannot become a Linear; None where it can."""
    k, block = node.attributes.get_int("K"), node.attributes.get_int("block_size")
    if node.attributes.get_int("accuracy_level", 0) != INT8_ACTIVATIONS:
        return "its activations stay fp32 (accuracy_level), and the kernel rounds them to int8"
    if node.attributes.get_int("bits") not in (4, 8):
        return f"weights of {node.attributes.get_int('bits')} bits; the kernel reads 4 or 8"
    return _grid_obstacle(k, block) or _operand_obstacle(node)


def _grid_obstacle(k: int, block: int) -> str | None:
    if block < layout.SMALLEST_BLOCK:
        return f"blocks of {block}; the kernel wants {layout.SMALLEST_BLOCK} or more"
    if k % block:
        return f"blocks of {block} do not divide {k} columns"
    return None


def _operand_obstacle(node: ir.Node) -> str | None:
    inputs = _inputs(node, 6)
    if inputs[4] is not None:
        return "its columns are in another order (g_idx)"
    if any(value is not None and not value.is_initializer() for value in inputs[1:]):
        return "its weights are computed"
    if inputs[3] is not None and inputs[3].dtype != ir.DataType.UINT8:
        return f"its zero points are {inputs[3].dtype}"
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in (inputs[0], inputs[2], inputs[5])):
        return "it does not compute in fp32"
    return None


@dataclass(eq=False)
class Rewriting:
    """Rewrites of one graph; `ready` are the MatMulNBits nodes without an obstacle."""

    model: ir.Model
    ready: frozenset[ir.Node]
    _arranged: dict[tuple[ir.Value, bool | None], ir.Value] = field(default_factory=dict)

    def separate_norms(self) -> None:
        """Write SkipSimplifiedLayerNormalization in front of linear layers as Add and RMSNormalization.

        Both then go into the layers: the Add into the one before, the norm into those behind.
        """
        for node in list(self.model.graph):
            operator = (node.domain, node.op_type)
            if operator != (MICROSOFT, "SkipSimplifiedLayerNormalization") or graph.operand(node, 3) is not None:
                continue
            if not self._only_layers_read(node.outputs[0]) or any(value.uses() for value in node.outputs[1:3]):
                continue
            name = str(node.name)
            [total] = graph.insert(node, "Add", [node.inputs[0], node.inputs[1]], name=f"{name}/Add")
            if len(node.outputs) > 3 and node.outputs[3].name:
                graph.supersede(node.outputs[3], total)
            else:
                total.name, total.type, total.shape = f"{name}/sum", node.outputs[0].type, node.outputs[0].shape
            epsilon = node.attributes.get_float("epsilon")
            attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon}
            [normed] = graph.insert(node, "RMSNormalization", [total, node.inputs[2]], attributes, name=f"{name}/norm")
            graph.supersede(node.outputs[0], normed)
            self.model.graph.remove(node, safe=True)

    def linear(self, node: ir.Node) -> str:
        """Put Linear in the place of a MatMulNBits and of what it takes over; returns what was done."""
        codes, scales, zero_points = _inputs(node, 4)[1:]
        bias = graph.operand(node, 5)
        assert codes is not None
        assert scales is not None
        n, k = node.attributes.get_int("N"), node.attributes.get_int("K")
        grid = Grid(node.attributes.get_int("bits"), node.attributes.get_int("block_size"), zero_points is None)
        source, norm = self._source(node)
        gate = _gate(node.outputs[0], n) if bias is None else None
        last, residual = (gate.output, None) if gate else _residual(node.outputs[0])
        weights = self._weights(codes, scales, zero_points, n, k, grid, gate.first if gate else None)
        attributes: dict[str, Any] = {
            **_grid_attributes(n, k, grid),
            "activation": gate.activation if gate else NO_ACTIVATION,
            "epsilon": norm.epsilon if norm else 0.0,
        }
        place = last.producer()
        assert place is not None
        inputs = [source, weights, bias, norm.weight if norm else None, residual]
        name = str(node.name)
        node.name = f"{name}.replaced"
        [output] = graph.insert(place, "Linear", inputs, attributes, domain=DOMAIN, name=name)
        graph.supersede(last, output)
        taken = {"RMSNormalization": norm, "gated activation": gate, "residual Add": residual, "bias": bias}
        parts = [what for what, value in taken.items() if value is not None]
        return ", ".join([f"Linear of {grid.bits} bits, [{n}, {k}]", *parts])

    def embedding(self, node: ir.Node) -> str | None:
        """Put Embedding in the place of a GatherBlockQuantized of `input_ids`' kind; None where that cannot be."""
        codes, ids, scales = node.inputs[:3]
        bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 128)
        scales = _through(scales, "Reshape")
        if codes is None or ids is None or scales is None or not (codes.is_initializer() and scales.is_initializer()):
            return None
        shape = graph.dims(codes)
        if graph.operand(node, 3) is not None or node.attributes.get_int("gather_axis", 0) != 0 or shape is None:
            return None
        n, k = int(str(shape[0])), int(np.prod([int(str(dim)) for dim in shape[1:]])) * 8 // bits
        if codes.dtype != ir.DataType.UINT8 or ids.dtype != ir.DataType.INT64 or _grid_obstacle(k, block):
            return None
        grid = Grid(bits, block, True)
        rows = node.outputs[0]
        reader = _only_reader(rows)
        if reader is not None and reader.op_type == "Reshape":  # of a tied table: blocks become a row
            rows = reader.outputs[0]
        elif len(shape) != 2:
            return None
        weights = self._weights(codes, scales, None, n, k, grid, None)
        name = str(node.name)
        node.name = f"{name}.replaced"
        [output] = graph.insert(
            node, "Embedding", [ids, weights], _grid_attributes(n, k, grid), domain=DOMAIN, name=name
        )
        graph.supersede(rows, output)
        return f"Embedding of {bits} bits, [{n}, {k}]"

    def _weights(
        self,
        codes: ir.Value,
        scales: ir.Value,
        zero_points: ir.Value | None,
        n: int,
        k: int,
        grid: Grid,
        gate_first: bool | None,
    ) -> ir.Value:
        """Register the matrix as the kernels read it; `gate_first`: its halves alternate, the gates in front."""
        key = (codes, gate_first)
        if key not in self._arranged:
            parts = [v.const_value for v in (codes, scales, zero_points) if v is not None and v.const_value is not None]
            shape = ir.Shape([layout.groups(n), layout.group_bytes(k, grid)])
            name = str(codes.name).removesuffix(".codes") + ".groups"
            tensor = Derived(_arrangement(n, k, grid, gate_first), parts, ir.DataType.UINT8, shape, name)
            value = graph.initializer(self.model, name, tensor)
            if names := graph.sources(codes):
                graph.set_sources(value, names)
            self._arranged[key] = value
        return self._arranged[key]

    def _source(self, node: ir.Node) -> tuple[ir.Value, Norm | None]:
        """Find what the layer is to read: what is before a norm, where that goes into the layer."""
        value = node.inputs[0]
        assert value is not None
        rows = value.producer()
        if rows is not None and _selects_rows(rows) and len(value.uses()) == 1:
            before = rows.inputs[0]
            assert before is not None
            norm = _norm(before)
            if norm is not None and len(before.uses()) == 1:  # rows are selected from what the norm reads
                rows.replace_input_with(0, norm.input)
                return value, norm
            return value, None
        norm = _norm(value)
        if norm is not None and self._only_layers_read(value):
            return norm.input, norm
        return value, None

    def _only_layers_read(self, value: ir.Value) -> bool:
        """Say whether every reader of `value` is a layer that becomes a Linear, or the rows of one."""
        if value.is_graph_output() or not value.uses():
            return False
        return all(self._takes_norm(node, index) for node, index in value.uses())

    def _takes_norm(self, node: ir.Node, index: int) -> bool:
        if _selects_rows(node):
            layer = _only_reader(node.outputs[0])
            return index == 0 and layer in self.ready and layer is not None and layer.inputs[0] is node.outputs[0]
        return index == 0 and node in self.ready


@cache
def _arrangement(n: int, k: int, grid: Grid, gate_first: bool | None) -> Function:
    """Return what makes groups of codes, scales and zero points of MatMulNBits; one object for equal arguments."""

    def arrange(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        blocks = k // grid.block_size
        codes = unpack_bits(parts[0].reshape(n, -1), grid.bits, k)
        scales = parts[1].reshape(n, blocks)
        points = unpack_bits(parts[2].reshape(n, -1), grid.bits, blocks) if len(parts) > 2 else None
        if gate_first is not None:
            order = layout.alternating(n) if gate_first else (layout.alternating(n) + n // 2) % n
            codes, scales = codes[order], scales[order]
            points = None if points is None else points[order]
        return layout.arrange(codes, scales, points, grid)

    return arrange


class Gate(NamedTuple):
    """A gated activation behind a layer of two halves: `output` = f(gate)·up."""

    output: ir.Value
    activation: int
    first: bool  # the gate is the first half


def _gate(value: ir.Value, n: int) -> Gate | None:
    """Recognize Split in two, SiLU or the tanh form of GELU of one half, and the product with the other."""
    split = _only_reader(value)
    if split is None or (split.domain, split.op_type) != ("", "Split") or len(split.outputs) != 2 or n % 32:
        return None
    shape = graph.dims(split.outputs[0])
    if split.attributes.get_int("axis", 0) not in (-1, _rank(value) - 1) or shape is None or shape[-1] != n // 2:
        return None
    for first, (gate, up) in ((True, split.outputs), (False, tuple(split.outputs[::-1]))):
        activated = _activated(gate)
        product = _only_reader(activated[0]) if activated else None
        if activated and product is not None and product is _only_reader(up) and product.op_type == "Mul":
            return Gate(product.outputs[0], activated[1], first)
    return None


def _activated(gate: ir.Value) -> tuple[ir.Value, int] | None:
    readers = [use.node for use in gate.uses()]
    if len(readers) == 1 and readers[0].op_type == "Gelu":
        return (
            (readers[0].outputs[0], GELU_TANH)
            if readers[0].attributes.get_string("approximate", "none") == "tanh"
            else None
        )
    sigmoid = next((node for node in readers if node.op_type == "Sigmoid"), None)
    product = next((node for node in readers if node.op_type == "Mul"), None)
    if len(readers) != 2 or sigmoid is None or product is None or _only_reader(sigmoid.outputs[0]) is not product:
        return None
    return product.outputs[0], SILU


def _residual(value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Find what is added to `value`, the output of a layer, and the sum; (value, None) where nothing is."""
    add = _only_reader(value)
    if add is None or (add.domain, add.op_type) != ("", "Add"):
        return value, None
    other = add.inputs[1] if add.inputs[0] is value else add.inputs[0]
    if other is None or other is value or other.is_initializer():
        return value, None
    if other.dtype != ir.DataType.FLOAT or graph.dims(other) is None or graph.dims(other) != graph.dims(value):
        return value, None
    return add.outputs[0], other


def _norm(value: ir.Value) -> Norm | None:
    node = value.producer()
    if node is None or (node.domain, node.op_type) not in _NORMS or value is not node.outputs[0]:
        return None
    source, weight = node.inputs[:2]
    if node.attributes.get_int("axis", -1) not in (-1, _rank(value) - 1) or source is None or weight is None:
        return None
    if not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT or len(graph.dims(weight) or ()) != 1:
        return None
    if any(output.uses() for output in node.outputs[1:]):
        return None
    return Norm(source, weight, node.attributes.get_float("epsilon", 1e-5))


def _selects_rows(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == ("", "Gather") and node.attributes.get_int("axis", 0) == 1


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _through(value: ir.Value | None, op_type: str) -> ir.Value | None:
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type else value


def _rank(value: ir.Value) -> int:
    return len(value.shape) if value.shape is not None else 0


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [graph.operand(node, index) for index in range(count)]


def _grid_attributes(n: int, k: int, grid: Grid) -> dict[str, Any]:
    return {
        "N": n,
        "K": k,
        "bits": grid.bits,
        "block_size": grid.block_size,
        "zero_points": int(not grid.symmetric),
    }

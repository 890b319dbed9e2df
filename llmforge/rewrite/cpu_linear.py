"""Quantized linear layers and embeddings as operators of `llmforge.cpu`, with what stands before and behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived, Function
from llmforge.ir.operators import canonical, contrib, cpu
from llmforge.ir.operators.standard import (
    Add,
    Cast,
    Gather,
    Gelu,
    Mul,
    Reshape,
    RMSNormalization,
    Sigmoid,
    SimplifiedLayerNormalization,
    Split,
)
from llmforge.ir.scratch import Scratch
from llmforge.quantization import cpu_layout
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import unpack_bits

NO_ACTIVATION, SILU, GELU_TANH, GELU = 0, 1, 2, 3  # attribute `activation` of Linear: of the gate, if it is not 0
ALONE = 8  # added to one that is of the whole row

_Norm = RMSNormalization | SimplifiedLayerNormalization


SCALES: Mapping[Scale, int] = {"fp32": 0, "fp16": 1, "int8": 2}  # attribute `scales`


def grid_of(packed: cpu.CpuLinear | cpu.Embedding) -> Grid:
    """Return the grid of a node's weights."""
    [scale] = [name for name, number in SCALES.items() if number == packed.scales]
    minimums = bool(packed.minimums)
    symmetric = not (packed.zero_points or minimums)
    return Grid(packed.bits, packed.block_size, symmetric, scale, bool(packed.trellis), minimums)


def grid_attributes(n: int, k: int, grid: Grid) -> dict[str, Any]:
    """Return the attributes that say what the weights of a Linear or Embedding are."""
    return {
        "N": n,
        "K": k,
        "bits": grid.bits,
        "block_size": grid.block_size,
        "zero_points": int(grid.zero_points),
        "scales": SCALES[grid.scale],
        "trellis": int(grid.trellis),
        "minimums": int(grid.minimums),
    }


def plain(packed: cpu.CpuLinear) -> bool:
    """Say whether a Linear has taken nothing over yet: as quantize-weights writes it."""
    taken = packed.norm is not None or packed.residual is not None or packed.activation != NO_ACTIVATION
    return not taken


def reason_against(layer: contrib.MatMulNBits) -> str | None:
    """Say why `layer` cannot become a Linear; None where it can."""
    if layer.accuracy_level != contrib.INT8_ACTIVATIONS:
        return "its activations stay fp32 (accuracy_level), but the kernel quantizes them to int8"
    if layer.bits not in (4, 8):
        return f"weights of {layer.bits} bits; the kernel reads 4 or 8"
    if reason := reason_against_grid(layer.K, layer.block_size):
        return reason
    if layer.g_idx is not None:
        return "its columns are in another order (g_idx)"
    stored = (layer.b, _stored_scales(layer.scales)[0], layer.zero_points, layer.bias)
    if (cast := Cast.made(layer.scales)) is not None and cast.x.dtype == ir.DataType.BFLOAT16:
        return "its scales are bf16, which are for servers of others"
    if any(value is not None and not value.is_initializer() for value in stored):
        return "its weights are computed"
    if layer.zero_points is not None and layer.zero_points.dtype != ir.DataType.UINT8:
        return f"its zero points are {layer.zero_points.dtype}"
    floats = (layer.a, layer.scales, layer.bias)
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in floats):
        return "it does not compute in fp32"
    return None


def parameters(layer: contrib.MatMulNBits | cpu.CpuLinear) -> list[str]:
    """Name the parameters of the checkpoint that the weights of `layer` come from."""
    return graph.sources(layer.b if isinstance(layer, contrib.MatMulNBits) else layer.weights)


def reason_against_grid(k: int, block: int) -> str | None:
    """Say why the kernels do not read blocks of `block` columns of `k`; None where they do."""
    if block < cpu_layout.SMALLEST_BLOCK:
        return f"blocks of {block}; the kernel needs {cpu_layout.SMALLEST_BLOCK} or more"
    if k % block:
        return f"blocks of {block} do not divide {k} columns"
    return None


@dataclass(eq=False)
class Rewriting:
    """Rewrites of one graph; `ready` are the nodes MatMulNBits against which there is no reason.

    Arranged weights are kept in `scratch`, where there is one.
    """

    model: ir.Model
    ready: frozenset[ir.Node]
    scratch: Scratch | None = None
    _arranged: dict[tuple[ir.Value, bool | None], ir.Value] = field(default_factory=dict)

    def separate_norms(self) -> None:
        """Write SkipSimplifiedLayerNormalization in front of linear layers as Add and RMSNormalization.

        Both then go into the layers: the Add into the one before, the norm into those behind.
        """
        for skip in contrib.SkipSimplifiedLayerNormalization.all(self.model):
            node, y = skip.node, skip.output
            if skip.bias is not None or not self._only_layers_read(y) or any(v.uses() for v in node.outputs[1:3]):
                continue
            added = Add.insert(node, {"a": skip.input, "b": skip.skip}, name=f"{skip.name}/Add")
            total = added.output
            if len(node.outputs) > 3 and skip.sum.name:
                graph.replace_value(skip.sum, total)
            else:
                total.name, total.type, total.shape = f"{skip.name}/sum", y.type, y.shape
            attributes: dict[str, Any] = {"axis": -1, "epsilon": skip.epsilon}
            operands = {"x": total, "scale": skip.gamma}
            normed = RMSNormalization.insert(node, operands, attributes, name=f"{skip.name}/norm")
            graph.replace_value(y, normed.output)
            self.model.graph.remove(node, safe=True)

    def linear(self, layer: contrib.MatMulNBits | cpu.CpuLinear, terms: int = 1, outliers: float = 0.0) -> str | None:
        """Put Linear in the place of `layer` and of what it takes over; return what was done.

        What it reads is the sum of so many `terms` of int8; of two in blocks of a row whose largest magnitude is more
        than `outliers` times the mean of the row's blocks, if that is not 0. None: it is such a Linear, with nothing to
        take over.
        """
        bias, n, k = layer.bias, layer.N, layer.K
        source, norm = self._source(layer.a if isinstance(layer, contrib.MatMulNBits) else layer.x)
        gate = _gate(layer.output, n) if bias is None else None
        alone = None if gate else _alone(layer.output, n)
        last, residual = (gate.output, None) if gate else _residual(layer.output)
        last = last if alone is None else alone[0]
        same = isinstance(layer, cpu.CpuLinear) and (layer.terms, layer.outliers) == (
            terms,
            float(np.float32(outliers)),
        )
        if same and not (norm or gate or residual or alone):
            return None
        grid, weights = self._weights_of(layer, gate.first if gate else None)
        attributes: dict[str, Any] = {
            **grid_attributes(n, k, grid),
            "terms": terms,
            "outliers": outliers,
            "activation": gate.activation if gate else alone[1] if alone else NO_ACTIVATION,
            "epsilon": norm.epsilon if norm else 0.0,
        }
        operands = {
            "x": source,
            "weights": weights,
            "bias": bias,
            "norm": norm.scale if norm else None,
            "residual": residual,
        }
        name = layer.name
        layer.node.name = f"{name}.replaced"
        lowered = cpu.CpuLinear.insert(graph.producer(last), operands, attributes, name=name)
        graph.replace_value(last, lowered.output)
        taken: dict[str, object] = {"RMSNormalization": norm, "gated activation": gate, "activation": alone}
        taken |= {"residual Add": residual, "bias": bias}
        besides = [what for what, value in taken.items() if value is not None]
        what = f"Linear of {grid.bits} bits, [{n}, {k}]{', activations int8x2' if terms == 2 else ''}"
        return ", ".join([what, *besides])

    def _weights_of(self, layer: contrib.MatMulNBits | cpu.CpuLinear, gate_first: bool | None) -> tuple[Grid, ir.Value]:
        """Return the grid and the weights of `layer` as the kernels read them, halves alternating for a gate."""
        n, k = layer.N, layer.K
        if isinstance(layer, cpu.CpuLinear):
            grid = grid_of(layer)
            if gate_first is None:
                return grid, layer.weights
            return grid, self._derived([layer.weights], n, k, grid, gate_first, _alternation(gate_first=gate_first))
        scales, scale = _stored_scales(layer.scales)
        grid = Grid(layer.bits, layer.block_size, layer.zero_points is None, scale)
        stored = [layer.b, scales] + ([] if layer.zero_points is None else [layer.zero_points])
        return grid, self._weights(stored, n, k, grid, gate_first)

    def embedding(self, lookup: contrib.GatherBlockQuantized) -> str | None:
        """Put Embedding in the place of a lookup of `input_ids`' kind; return what was done, None if it cannot be."""
        codes, ids, bits, shape = lookup.data, lookup.indices, lookup.bits, graph.static(lookup.data)
        reshaped = Reshape.made(lookup.scales)
        scales, scale = _stored_scales(lookup.scales if reshaped is None else reshaped.x)
        if not (codes.is_initializer() and scales.is_initializer() and shape):
            return None
        if lookup.zero_points is not None or lookup.gather_axis != 0:
            return None
        n, k = shape[0], math.prod(shape[1:]) * 8 // bits
        unfit = reason_against_grid(k, lookup.block_size)
        if codes.dtype != ir.DataType.UINT8 or ids.dtype != ir.DataType.INT64 or unfit:
            return None
        grid, rows = Grid(bits, lookup.block_size, True, scale), lookup.output
        if (row := Reshape.only_reader(rows)) is not None:  # of a tied table: blocks become a row
            rows = row.output
        elif len(shape) != 2:
            return None
        operands = {"ids": ids, "weights": self._weights([codes, scales], n, k, grid, None)}
        name = lookup.name
        lookup.node.name = f"{name}.replaced"
        lowered = cpu.Embedding.insert(lookup.node, operands, grid_attributes(n, k, grid), name=name)
        graph.replace_value(rows, lowered.output)
        return f"Embedding of {bits} bits, [{n}, {k}]"

    def _weights(self, stored: Sequence[ir.Value], n: int, k: int, grid: Grid, gate_first: bool | None) -> ir.Value:
        """Register the matrix as the kernels read it; `gate_first`: its halves alternate, the gates in front.

        `stored` are its codes, its scales and its zero points, where it has some.
        """
        return self._derived(stored, n, k, grid, gate_first, _arrangement(n, k, grid, gate_first))

    def _derived(
        self, stored: Sequence[ir.Value], n: int, k: int, grid: Grid, gate_first: bool | None, function: Function
    ) -> ir.Value:
        codes = stored[0]
        key = (codes, gate_first)
        if key not in self._arranged:
            tensors = [graph.tensor(value) for value in stored]
            shape = ir.Shape([cpu_layout.groups(n), cpu_layout.group_bytes(k, grid)])
            name = str(codes.name).removesuffix(".codes").removesuffix(".groups") + ".groups"
            if name == codes.name:
                name += ".alternating"
            tensor = Derived(function, tensors, ir.DataType.UINT8, shape, name, scratch=self.scratch)
            self._arranged[key] = graph.initializer(self.model, name, tensor, graph.sources(codes))
        return self._arranged[key]

    def _source(self, value: ir.Value) -> tuple[ir.Value, _Norm | None]:
        """Find what the layer that reads `value` is to read: what is before a norm, where that goes into the layer."""
        rows = _selection(value.producer())
        if rows is not None and len(value.uses()) == 1:
            norm = _norm(rows.data)
            if norm is not None and len(rows.data.uses()) == 1:  # rows are selected from what the norm reads
                rows.data = norm.x
                rows.output.name = f"{rows.output.name}.before_norm"  # other numbers than under the old name
                return value, norm
        norm = _norm(value)
        if norm is not None and self._only_layers_read(value):
            return norm.x, norm
        return value, None

    def _only_layers_read(self, value: ir.Value) -> bool:
        """Say whether every reader of `value` is a layer that becomes a Linear, or the rows of one."""
        if value.is_graph_output() or not value.uses():
            return False
        return all(self._takes_norm(node, value) for node, _ in value.uses())

    def _takes_norm(self, node: ir.Node, value: ir.Value) -> bool:
        if (rows := _selection(node)) is not None:
            return rows.data is value and graph.only_reader(rows.output) in self.ready
        return node in self.ready  # all else that these read are initializers


@cache
def _arrangement(n: int, k: int, grid: Grid, gate_first: bool | None) -> Function:
    """Return what makes groups of codes, scales and zero points of MatMulNBits; one object for equal arguments."""

    def arrange(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        blocks = k // grid.block_size
        codes = unpack_bits(parts[0].reshape(n, -1), grid.bits, k)
        scales = parts[1].reshape(n, blocks)
        points = unpack_bits(parts[2].reshape(n, -1), grid.bits, blocks) if len(parts) > 2 else None
        if gate_first is not None:
            order = cpu_layout.alternating(n) if gate_first else (cpu_layout.alternating(n) + n // 2) % n
            codes, scales = codes[order], scales[order]
            points = None if points is None else points[order]
        return cpu_layout.arrange(codes, scales, points, grid)

    return arrange


@cache
def _alternation(*, gate_first: bool) -> Function:
    """Return what lets groups of gate and up take turns; one object for equal arguments."""

    def alternate(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        gate, up = np.split(parts[0], 2)[:: 1 if gate_first else -1]
        return np.stack([gate, up], axis=1).reshape(parts[0].shape)

    return alternate


def _stored_scales(scales: ir.Value) -> tuple[ir.Value, Scale]:
    """Find the initializer of scales, behind a Cast where they are stored as fp16."""
    cast = Cast.made(scales)
    stored = cast.x if cast is not None else scales
    if stored.is_initializer() and stored.dtype == ir.DataType.FLOAT16:
        return stored, "fp16"
    return scales, "fp32"


class Gate(NamedTuple):
    """A gated activation behind a layer of two halves: `output` = f(gate)·up."""

    output: ir.Value
    activation: int
    first: bool  # the gate is the first half


def _gate(value: ir.Value, n: int) -> Gate | None:
    """Recognize Split in two, SiLU or GELU of one half, and the product with the other."""
    split = Split.only_reader(value)
    if split is None or len(split.node.outputs) != 2 or n % 32:
        return None
    if split.axis not in (-1, _rank(value) - 1) or graph.static(split.output)[-1:] != (n // 2,):
        return None
    for first, (gate, up) in ((True, split.node.outputs), (False, split.node.outputs[::-1])):
        activated = _activated(gate)
        product = Mul.only_reader(activated[0]) if activated else None
        if activated and product is not None and product.node is graph.only_reader(up):
            return Gate(product.output, activated[1], first)
    return None


def _activated(gate: ir.Value) -> tuple[ir.Value, int] | None:
    if (gelu := Gelu.only_reader(gate)) is not None:
        return gelu.output, GELU_TANH if gelu.approximate == "tanh" else GELU
    readers = [node for node, _ in gate.uses()]
    sigmoid = next(filter(None, map(Sigmoid.of, readers)), None)
    product = None if sigmoid is None else Mul.only_reader(sigmoid.output)
    return (product.output, SILU) if len(readers) == 2 and product is not None and product.node in readers else None


def _alone(value: ir.Value, n: int) -> tuple[ir.Value, int] | None:
    """Recognize GELU of all that a layer of `n` features makes: its output, and the attribute `activation`."""
    gelu = Gelu.only_reader(value)
    if gelu is None or value.is_graph_output() or n % cpu_layout.LANES:
        return None
    return gelu.output, ALONE + (GELU_TANH if gelu.approximate == "tanh" else GELU)


def _residual(value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Find what is added to `value`, the output of a layer, and the sum; (value, None) where nothing is."""
    add = Add.only_reader(value)
    if add is None:
        return value, None
    other = add.b if add.a is value else add.a
    alike = graph.dims(value) is not None and graph.dims(other) == graph.dims(value)
    if alike and other.dtype == ir.DataType.FLOAT and not other.is_initializer():
        return add.output, other
    return value, None


def _norm(value: ir.Value) -> _Norm | None:
    """Recognize an RMSNormalization over the last axis whose weights are an fp32 initializer."""
    norm = RMSNormalization.made(value) or SimplifiedLayerNormalization.made(value)
    if norm is None or value is not norm.output or norm.axis not in (-1, _rank(value) - 1):
        return None
    weight, read = norm.scale, [output for output in norm.node.outputs[1:] if output.uses()]
    if read or not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT or _rank(weight) != 1:
        return None
    return norm


def _selection(node: ir.Node | None) -> Gather | None:
    """View the Gather that selects rows of a step; None where `node` is something else."""
    rows = Gather.of(node)
    return rows if rows is not None and rows.axis == 1 else None


def _rank(value: ir.Value) -> int:
    return len(value.shape) if value.shape is not None else 0


def add_before_adapter(layer: canonical.LowRankAdapter) -> None:
    """Let what is added behind an adapter be added in front of it, where the linear layer takes it over.

    Add(r, LowRankAdapter(base, …)) becomes LowRankAdapter(Add(r, base), …).
    """
    add = Add.only_reader(layer.output)
    if add is None or layer.base.producer() is None:
        return
    other = add.b if add.a is layer.output else add.a
    alike = graph.dims(other) is not None and graph.dims(other) == graph.dims(layer.base)
    if not alike or other.is_initializer() or other is layer.output:
        return
    order = {node: place for place, node in enumerate(graph.owner(layer.node))}
    producer = other.producer()
    if producer is not None and order[producer] > order[layer.node]:
        return
    base, total = layer.base, add.output
    summed = Add.insert(layer.node, {"a": other, "b": base}, name=f"{add.name}.first")
    summed.output.name, summed.output.type, summed.output.shape = f"{base.name}.sum", base.type, base.shape
    layer.base = summed.output
    graph.replace_value(total, layer.output)
    graph.owner(add.node).remove(add.node, safe=True)


def lower_adapter(layer: canonical.LowRankAdapter) -> str:
    """Put the kernel in the place of an adapter; return what was done."""
    node, stacked = layer.node, graph.tensor(layer.a)
    count, k, rows = stacked.shape.numpy()
    name = f"{layer.a.name}.rows"
    turned = Derived(_matrix_rows, [stacked], ir.DataType.FLOAT, ir.Shape((count, rows, k)), name)
    model = graph.owner(node)
    widths = np.array(list(layer.widths), np.int64)
    operands = {
        "base": layer.base,
        "x": layer.x,
        "adapter_ids": layer.adapter_ids,
        "a": graph.initializer(model, name, turned),
        "b": layer.b,
        "widths": graph.initializer(model, f"parts_{'_'.join(map(str, widths))}", widths),
    }
    own = layer.name
    node.name = f"{own}.replaced"
    lowered = cpu.CpuLowRankAdapter.insert(node, operands, name=own)
    graph.replace_value(layer.output, lowered.output)
    return f"LowRankAdapter of rank {layer.rank}, {count - 1} adapters"


def _matrix_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Turn each of several matrices."""
    return np.ascontiguousarray(arrays[0].swapaxes(1, 2))

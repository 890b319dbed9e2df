"""Layers and embeddings in codes of blocks: operators of ONNX Runtime, or of llmforge's CPU kernels, that read them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import UsageError
from llmforge.base.located_yaml import nearest
from llmforge.ir import graph
from llmforge.ir.operators import contrib, cpu
from llmforge.ir.operators.standard import Add, Gather, MatMul, Transpose
from llmforge.quantization import cpu_layout, initializers
from llmforge.quantization.grid import OF_2_BITS, OF_CODEBOOK, Grid
from llmforge.quantization.initializers import LazyMatrix, PackedInitializers
from llmforge.rewrite import cpu_linear, linear
from llmforge.rewrite.pass_base import Context
from llmforge.rewrite.patterns import NotApplicable, skip_if


@dataclass(eq=False)
class BlockWriter:
    """Writes quantized layers and embeddings into `model`, for the pass `step`."""

    step: str
    model: ir.Model
    context: Context
    accuracy_level: int
    reordered: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)  # inputs, by the order of columns

    def store(self, weight: ir.Value, matrix: LazyMatrix, *, flat: bool = False) -> PackedInitializers | ir.Value:
        """Register a matrix as ONNX Runtime reads it, or as the CPU kernels do, where they alone can."""
        if matrix.grid.portable:
            return self.register(weight, matrix, flat=flat)
        self.context.require_cpu(f"{self.step} with {described(matrix.grid)}")
        native.require()
        if not cpu_layout.reads(matrix.k, matrix.grid):
            skip_if(cpu_linear.reason_against_grid(matrix.k, matrix.grid.block_size))
        return initializers.register_groups(self.model, weight, matrix, self.context.scratch)

    def register(
        self, weight: ir.Value, matrix: LazyMatrix, *, flat: bool = False, experts: int = 0
    ) -> PackedInitializers:
        """Register the parts of a matrix, which is computed when the first of them is read."""
        scratch = self.context.scratch
        return initializers.register(self.model, weight, matrix, flat=flat, experts=experts, scratch=scratch)

    def reorder(self, layer: linear.LinearLayer, columns: NDArray[np.intp]) -> None:
        """Let a layer read the features of its input in the order of its columns; one that reads the same shares it."""
        key = layer.input, columns.tobytes()
        if key not in self.reordered:
            indices = graph.initializer(self.model, f"{layer.weight.name}.columns", columns.astype(np.int64))
            inputs, name = [layer.input, indices], f"{layer.matmul.name}/columns"
            [made] = graph.insert(layer.matmul, "Gather", inputs, {"axis": -1}, name=name)
            made.type, made.shape, made.name = layer.input.type, layer.input.shape, name
            self.reordered[key] = made
        layer.matmul.replace_input_with(0, self.reordered[key])

    def multiply(self, layer: linear.LinearLayer, matrix: LazyMatrix, parts: PackedInitializers | ir.Value) -> None:
        """Put MatMulNBits, or Linear, in the place of a linear layer."""
        if isinstance(parts, ir.Value):
            attributes = {
                **cpu_linear.grid_attributes(matrix.n, matrix.k, matrix.grid),
                "terms": 1,
                "outliers": 0.0,
                "activation": cpu_linear.NO_ACTIVATION,
                "epsilon": 0.0,
            }
            operands = {"x": layer.input, "weights": parts, "bias": layer.bias}
            kernel = cpu.CpuLinear.insert(layer.matmul, operands, attributes, name=layer.matmul.name)
            self._replace(layer, kernel.output)
            return
        attributes = {
            "N": matrix.n,
            "K": matrix.k,
            "bits": matrix.grid.bits,
            "block_size": matrix.grid.block_size,
            "accuracy_level": self.accuracy_level,
        }
        inputs = {
            "a": layer.input,
            "b": parts.codes,
            "scales": self._in_fp32(layer.matmul, parts.scales),
            "zero_points": parts.zero_points,
            "bias": layer.bias,
        }
        product = contrib.MatMulNBits.insert(layer.matmul, inputs, attributes, name=layer.matmul.name)
        self._replace(layer, product.output)

    def _in_fp32(self, reader: ir.Node, scales: ir.Value) -> ir.Value:
        """Cast scales that are stored in 16 bits in front of `reader`; ONNX Runtime does so once, when it loads."""
        if scales.dtype == ir.DataType.FLOAT:
            return scales
        [cast] = graph.insert(reader, "Cast", [scales], {"to": ir.DataType.FLOAT}, name=f"{reader.name}/scales_fp32")
        cast.type, cast.shape = ir.TensorType(ir.DataType.FLOAT), scales.shape
        return cast

    def _replace(self, layer: linear.LinearLayer, output: ir.Value) -> None:
        graph.replace_value(layer.output, output)
        self.model.graph.remove([node for node in (layer.add, layer.matmul) if node is not None], safe=True)

    def gather(self, lookup: Gather, matrix: LazyMatrix, parts: PackedInitializers | ir.Value, tied: bool) -> None:
        """Put GatherBlockQuantized, or Embedding, in the place of the embedding."""
        if isinstance(parts, ir.Value):
            operands = {"ids": lookup.indices, "weights": parts}
            attributes = cpu_linear.grid_attributes(matrix.n, matrix.k, matrix.grid)
            found = cpu.Embedding.insert(lookup.node, operands, attributes, name=lookup.name)
            graph.replace_value(lookup.output, found.y)
            self.model.graph.remove(lookup.node, safe=True)
            return
        v, k, grid = matrix.n, matrix.k, matrix.grid
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": grid.block_size, "bits": grid.bits}
        node, name = lookup.node, lookup.name
        scales = self._in_fp32(node, parts.scales)
        if tied:
            attributes["quantize_axis"] = 2
            shape = graph.initializer(self.model, f"{parts.scales.name}.shape", np.array([v, grid.blocks(k), 1]))
            [scales] = graph.insert(node, "Reshape", [scales, shape], name=f"{name}/scales")
            scales.name = f"{name}/scales"
        inputs = {"data": parts.codes, "indices": lookup.indices, "scales": scales}
        rows = contrib.GatherBlockQuantized.insert(node, inputs, attributes, name=name).output
        if tied:
            rows.name = f"{name}/blocks"
            shape = graph.initializer(self.model, f"{parts.codes.name}.row_shape", np.array([0, 0, k]))  # 0: as it is
            [rows] = graph.insert(node, "Reshape", [rows, shape], name=f"{name}/rows")
        graph.replace_value(lookup.output, rows)
        self.model.graph.remove(node, safe=True)


def parameters(weight: ir.Value) -> list[str]:
    """Name the parameters that `weight` comes from, or itself where it comes from none."""
    return graph.sources(weight) or [str(weight.name)]


def require_matches(model: ir.Model, globs: Iterable[str]) -> None:
    """Return if each of `globs` matches a parameter of a weight of `model` (UsageError: one does not)."""
    names = {name for value in model.graph.initializers.values() for name in parameters(value)}
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            closest = nearest(glob, sorted(names))
            raise UsageError(
                f"layer_bits: no parameter of the checkpoint matches {glob!r}",
                hint=f"{f'the closest is {closest}; ' if closest else ''}all of a layer are model.layers.0.*",
            )


def summary(matrix: LazyMatrix) -> str:
    """Write the format and the shape of a matrix."""
    return f"{described(matrix.grid)}, [{matrix.n}, {matrix.k}]"


def described(grid: Grid) -> str:
    """Write a format."""
    kind = "trellis" if grid.trellis else "symmetric" if grid.symmetric else "asymmetric"
    if grid.minimums:
        kind = "minima"
    scales = "" if grid.scale == "fp32" else f", scales {grid.scale}"
    fewer = {OF_CODEBOOK: 4, OF_2_BITS: 2}.get(grid)  # types of GGUF, as kernels hold them
    bits = f"{grid.bits} bits" if fewer is None else f"{fewer} bits held in {grid.bits}"
    return f"{bits}, blocks of {grid.block_size}, {kind}{scales}"


def layer_of(matmul: ir.Node) -> linear.LinearLayer | None:
    """Recognize the linear layer of `matmul`, with the bias that is added next; None where it has no weight."""
    adding = [node for node in matmul.outputs[0].consumers() if Add.matches(node)]
    layer = linear.of(adding[0].outputs[0]) if len(adding) == 1 else None
    return layer if layer is not None and layer.matmul is matmul else linear.of(matmul.outputs[0])


def shape_of(weight: ir.Value) -> tuple[int, int]:
    """Return the shape of an fp32 matrix (NotApplicable: `weight` is none)."""
    dims = graph.dims(weight)
    if weight.dtype != ir.DataType.FLOAT or dims is None or len(dims) != 2:
        raise NotApplicable(f"{weight.name} is {weight.dtype} {dims}; expected an fp32 matrix")
    rows, columns = graph.static(weight)
    return rows, columns


def require_own(weight: ir.Value) -> None:
    """Return if one node alone reads `weight` (NotApplicable: others read it, too)."""
    if len(weight.uses()) > 1 or weight.is_graph_input() or weight.is_graph_output():
        raise NotApplicable(f"{weight.name} has other readers")


def reads_transposed_initializer(matmul: ir.Node) -> bool:
    """Say whether a product is that of a tied head."""
    turned = Transpose.made(MatMul(matmul).w)
    return turned is not None and turned.x.is_initializer()


def tied_head(table: ir.Value, gather: ir.Node, on_rows: set[ir.Node]) -> linear.LinearLayer | None:
    """Return the head that multiplies by the transpose of `table`, which only `gather` reads besides; None: no head.

    Raises:
        NotApplicable: others read it, too.
    """
    others = [node for node in table.consumers() if node is not gather]
    if table.is_graph_input() or table.is_graph_output():
        raise NotApplicable(f"{table.name} has other readers")
    if not others:
        return None
    heads = others[0].outputs[0].consumers()
    if len(others) > 1 or not Transpose.matches(others[0]) or len(heads) != 1 or heads[0] not in on_rows:
        raise NotApplicable(
            f"{table.name} is read by {', '.join(str(other.name) for other in others)}; only the embedding and a tied "
            "head may"
        )
    [matmul] = heads
    product = MatMul.of(matmul)
    if product is None or product.w is not others[0].outputs[0]:
        raise NotApplicable(
            f"{table.name} is also read by {matmul.op_type} {matmul.name}, which is not the output head"
        )
    return linear.LinearLayer(matmul, table)

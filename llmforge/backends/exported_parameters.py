"""The parameters of a checkpoint as passes left them: for engines that are files of parameters, by their names.

A graph says how a model computes; a file for servers of others says that by the name of an architecture, and holds
nothing but parameters. So every parameter is found again in the graph: as it was traced, or as codes that stand for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import BACKENDS, BackendName
from llmforge.backends.record import ExportFormat
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.ir.operators.contrib import GatherBlockQuantized, MatMulNBits, QMoE
from llmforge.ir.operators.standard import Cast, DequantizeLinear, Div, MatMul, QuantizeLinear, Reshape
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import Packed, QuantizedMatrix, unpack
from llmforge.quantization.initializers import SCALES
from llmforge.rewrite import smoothing
from llmforge.rewrite.pass_base import Pass

_REMOVE = "leave the pass that merges or changes it out of the recipe"


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix [n, k] in blocks of integer codes."""

    parameter: str
    n: int
    k: int
    bits: int
    block_size: int
    codes: ir.Value  # uint8, as com.microsoft::MatMulNBits has them
    scales: ir.Value  # fp32, fp16 or bf16
    zero_points: ir.Value | None
    table: bool = False  # an embedding reads it, and perhaps a tied head

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is the middle of the codes everywhere."""
        return self.zero_points is None

    @property
    def stored_scales(self) -> Scale:
        """The dtype of the scales."""
        return next(scale for scale, dtype in SCALES.items() if dtype == graph.dtype(self.scales))

    def read(self) -> QuantizedMatrix:
        """Compute codes, scales and zero points."""
        grid = Grid(self.bits, self.block_size, self.symmetric, self.stored_scales)
        blocks = grid.blocks(self.k)
        codes = graph.tensor(self.codes).numpy().reshape(self.n, blocks, -1)
        scales = graph.tensor(self.scales).numpy().reshape(self.n, blocks).astype(np.float32)
        points = None if self.zero_points is None else graph.tensor(self.zero_points).numpy().reshape(self.n, -1)
        return unpack(Packed(codes, scales, points), grid, self.k)


@dataclass(frozen=True, eq=False)
class ChannelMatrix:
    """A matrix [n, k] of codes with one scale for each of its n output features, or for each square of them."""

    parameter: str
    n: int
    k: int
    dtype: str  # int8 or fp8
    codes: ir.Value  # [k, n]
    scales: ir.Value  # fp32 [n]
    inputs: Literal["none", "static", "per_token"]  # how what the layer reads is rounded
    input_scale: ir.Value | None  # fp32 [], where that is static
    square: int | None = None  # features, of either kind, that share a scale; scales are then [k / square, n]

    @cached_property
    def by_output(self) -> NDArray[Any]:
        """The codes [n, k]."""
        return np.ascontiguousarray(graph.tensor(self.codes).numpy().T)

    @cached_property
    def scales_by_output(self) -> NDArray[np.float32]:
        """The scales [n, 1], or [ceil(n / square), k / square]."""
        scales = graph.tensor(self.scales).numpy()
        if self.square is None:
            return scales.astype(np.float32)[:, None]
        return np.ascontiguousarray(scales[:, :: self.square].T)


@dataclass(frozen=True, eq=False)
class Fp4Matrix:
    """A matrix [n, k] in NVFP4, and the scale of what is multiplied by it."""

    parameter: str
    n: int
    k: int
    codes: ir.Value  # e2m1 [k, n]
    scales: ir.Value  # fp8 [k / 16, n]
    weight_scale: ir.Value  # fp32 [], of the whole
    input_scale: ir.Value  # fp32 []

    @property
    def codes_by_output(self) -> NDArray[Any]:
        """The codes [n, k], a byte each."""
        return np.ascontiguousarray(graph.tensor(self.codes).numpy().T)

    @property
    def scales_by_output(self) -> NDArray[Any]:
        """The scales of blocks [n, k / 16]."""
        return np.ascontiguousarray(graph.tensor(self.scales).numpy().T)


Quantized = Blocks | ChannelMatrix | Fp4Matrix


@dataclass(frozen=True, eq=False)
class Exported:
    """A checkpoint, and what stands for some of its tensors, by their names: codes, or other numbers."""

    checkpoint: Checkpoint
    quantized: Mapping[str, Quantized]
    changed: Mapping[str, ir.TensorProtocol]  # vectors, fp32: weights of norms and biases, times powers of two


def check_passes(backend: BackendName, steps: Sequence[type[Pass]], registry: Sequence[type[Pass]]) -> None:
    """Return if a file of `backend` can say what `steps` do to a model; `registry` is what there is instead.

    Raises:
        UnsupportedError: it cannot; names the first that it cannot.
    """
    record = BACKENDS[backend].export_format
    if record is None:
        return
    for step in steps:
        if not _holds(record, step):
            taken = ", ".join(each.name for each in registry if _holds(record, each))
            raise UnsupportedError(
                f"{step.name}: a {BACKENDS[backend].title} holds the parameters of the checkpoint by their own names, "
                "and cannot say what this pass does",
                hint=f"leave {step.name} out of the recipe; {backend} takes {taken}",
            )


def _holds(record: ExportFormat, step: type[Pass]) -> bool:
    """Say whether a file can say what `step` does: nothing to parameters, or codes that it has a form for."""
    return step.keeps_parameters or step.writes_codes in record.codes


def found_in(model: ir.Model, traced: ir.Model) -> tuple[dict[str, Quantized], dict[str, ir.TensorProtocol]]:
    """Find the parameters of `model` that are stored as codes, and those that outliers were moved out of.

    All others are as in the `traced` graph.

    Raises:
        UnsupportedError: a parameter is none of these.
    """
    found: dict[str, Quantized] = {}
    for node in model.graph.all_nodes():
        if QMoE.matches(node):
            raise UnsupportedError(
                f"{node.name}: quantized experts cannot be exported: the checkpoint has each of them by itself",
                hint="exclude them: `quantize-weights: {exclude: ['*.experts.*']}`",
            )
        made = _of_product(node) or _of_lookup(node) or _of_channels(node) or _of_fp4(node)
        if made is None:
            continue
        before = found.get(made.parameter)
        if isinstance(before, Blocks):  # a tied head reads the codes of the embedding
            made = before if before.table else made
        found[made.parameter] = made
    there = model.graph.initializers
    changed: dict[str, ir.TensorProtocol] = {}
    smoothed = {
        id(each.operands[0]): each
        for value in there.values()
        if isinstance(each := value.const_value, Derived) and each.function is smoothing.divided
    }
    for value in traced.graph.initializers.values():
        names = graph.sources(value)
        if not names or set(names) <= found.keys():
            continue
        same = there.get(str(value.name))
        if same is not None and same.const_value is value.const_value:
            continue
        if (moved := smoothed.get(id(value.const_value))) is not None and len(names) == 1:
            changed[names[0]] = moved
        else:
            raise UnsupportedError(
                f"parameter {names[0]} is no longer in the graph as the checkpoint has it", hint=_REMOVE
            )
    return found, changed


def exported(
    model: ir.Model, traced: ir.Model, checkpoint: Checkpoint, bound: Mapping[str, tuple[str, bool]]
) -> Exported:
    """Find what is written in place of tensors of the checkpoint.

    `bound` names the tensor that is a parameter as a whole, and whether the graph holds it transposed.

    Raises:
        UnsupportedError: a parameter was changed in a way that no file can say, or codes stand for one that is made of
            several tensors, or is stored the other way round.
    """
    found, changed = found_in(model, traced)
    by_tensor: dict[str, Quantized] = {}
    for parameter, matrix in found.items():
        tensor, transposed = bound.get(parameter, ("", False))
        entry, is_table = checkpoint.tensors.get(tensor), isinstance(matrix, Blocks) and matrix.table
        if entry is None or entry.shape != (matrix.n, matrix.k) or transposed == is_table:
            raise UnsupportedError(
                f"parameter {parameter} is not a tensor [{matrix.n}, {matrix.k}] of the checkpoint, so that its codes "
                "have no name there",
                hint=f"exclude it: `exclude: [{parameter}]`",
            )
        by_tensor[tensor] = matrix
    others: dict[str, ir.TensorProtocol] = {}
    for parameter, numbers in changed.items():
        tensor, _ = bound.get(parameter, ("", False))
        entry = checkpoint.tensors.get(tensor)
        if entry is None or entry.shape != tuple(numbers.shape.numpy()) or len(entry.shape) != 1:
            raise UnsupportedError(
                f"parameter {parameter} was smoothed, and is no vector of the checkpoint", hint=_REMOVE
            )
        others[tensor] = numbers
    return Exported(checkpoint, by_tensor, others)


def _parameter(value: ir.Value, place: str) -> str:
    """Name the one parameter that codes come from."""
    names = graph.sources(value)
    if len(names) != 1:
        what = (
            f"is made of {', '.join(names)}" if names else "is no parameter of the checkpoint: a tied head of its own"
        )
        raise UnsupportedError(
            f"{place}: its matrix {what}", hint=_REMOVE if names else "set `head: false`: the embedding serves it"
        )
    return names[0]


def _plain(value: ir.Value) -> ir.Value:
    """Look through what brings scales into another dtype or shape."""
    while (made := Cast.made(value) or Reshape.made(value)) is not None:
        value = made.node.inputs[0]  # type: ignore[assignment]
    return value


def _of_product(node: ir.Node) -> Quantized | None:
    product = MatMulNBits.of(node)
    if product is None:
        return None
    parameter = _parameter(product.b, product.name)
    return Blocks(
        parameter,
        product.N,
        product.K,
        product.bits,
        product.block_size,
        product.b,
        _plain(product.scales),
        product.zero_points,
    )


def _of_lookup(node: ir.Node) -> Quantized | None:
    lookup = GatherBlockQuantized.of(node)
    if lookup is None:
        return None
    parameter, scales = _parameter(lookup.data, lookup.name), _plain(lookup.scales)
    shape = graph.static(lookup.data)
    n = shape[0]
    k = int(np.prod(shape[1:])) * 8 // lookup.bits
    return Blocks(parameter, n, k, lookup.bits, lookup.block_size, lookup.data, scales, None, table=True)


def _of_channels(node: ir.Node) -> Quantized | None:
    product = MatMul.of(node)
    wide = None if product is None else DequantizeLinear.made(product.w)
    if product is None or wide is None:
        return None
    parameter = _parameter(wide.codes, product.name)
    k, n = graph.static(wide.codes)
    dtype = {ir.DataType.INT8: "int8", ir.DataType.FLOAT8E4M3FN: "fp8"}[graph.dtype(wide.codes)]
    if wide.block_size:  # where each token and block has a scale, too
        return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "per_token", None, wide.block_size)
    read = DequantizeLinear.made(product.x)
    if read is None:
        return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "none", None)
    rounded = QuantizeLinear.made(read.codes)
    if rounded is not None and Div.made(rounded.x) is not None:  # by the scale of each token
        return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "per_token", None)
    return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "static", read.scales)


def _of_fp4(node: ir.Node) -> Quantized | None:
    layer = Fp4Linear.of(node)
    if layer is None:
        return None
    parameter = _parameter(layer.codes, layer.name)
    k, n = graph.static(layer.codes)
    return Fp4Matrix(parameter, n, k, layer.codes, layer.scales, layer.weight_scale, layer.input_scale)

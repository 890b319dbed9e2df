"""The parameters of a checkpoint as passes left them: for engines that are files of parameters, by their names.

A graph says how a model computes; a file for servers of others says that by the name of an architecture, and holds
nothing but parameters. So every parameter is found again in the graph: as it was traced, or as codes that stand for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import BACKENDS, BackendName
from llmforge.backends.low_precision_matrices import (
    ChannelMatrix,
    ExpertChannels,
    ExpertFp4,
    Fp4Matrix,
    LowPrecisionCodes,
    LowPrecisionMatrix,
    MxMatrix,
)
from llmforge.backends.record import ExportFormat
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.interface import PAST
from llmforge.ir.operators.canonical import Attention, Fp4Linear, LowPrecisionMoE, MxLinear
from llmforge.ir.operators.contrib import GatherBlockQuantized, GroupQueryAttention, MatMulNBits, QMoE
from llmforge.ir.operators.cpu import CpuLinear, Embedding
from llmforge.ir.operators.standard import Cast, DequantizeLinear, Div, MatMul, QuantizeLinear, Reshape
from llmforge.quantization import cpu_layout
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import Packed, QuantizedMatrix, unpack
from llmforge.quantization.initializers import SCALES
from llmforge.rewrite import cpu_linear, smoothing
from llmforge.rewrite.pass_base import Pass

_KEYS = re.compile(r"(.*\blayers\.(\d+)\.\w+)\.k_proj\.weight")  # a module of attention, and its layer
_KEY_AND_VALUE = 2
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
    def grid(self) -> Grid:
        """The grid of its codes."""
        return Grid(self.bits, self.block_size, self.symmetric, self.stored_scales)

    @property
    def stored_scales(self) -> Scale:
        """The dtype of the scales."""
        return next(scale for scale, dtype in SCALES.items() if dtype == graph.dtype(self.scales))

    def read(self) -> QuantizedMatrix:
        """Compute codes, scales and zero points."""
        grid = self.grid
        blocks = grid.blocks(self.k)
        codes = graph.tensor(self.codes).numpy().reshape(self.n, blocks, -1)
        scales = graph.tensor(self.scales).numpy().reshape(self.n, blocks).astype(np.float32)
        points = None if self.zero_points is None else graph.tensor(self.zero_points).numpy().reshape(self.n, -1)
        return unpack(Packed(codes, scales, points), grid, self.k)


@dataclass(eq=False)
class ExpertCodes:
    """The codes of one matrix of each of E experts, [E, n, k], computed once until each was read."""

    parameter: str
    node: QMoE
    codes: ir.Value  # uint8 [E, n, k·bits/8]
    scales: ir.Value  # fp32, fp16 or bf16 [E, n, blocks]
    zero_points: ir.Value | None
    of_gates: bool  # rows are those of a gate and of the rest in turn
    unread: int = 0  # matrices of it that are still to be read, while the arrays are held
    _arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many experts there are, output features, and input features at most."""
        count, n, blocks = graph.static(self.scales)
        return count, n, blocks * self.node.block_size

    def matrices(self, k: int) -> Callable[[int, int], Quantized]:
        """Return what makes, of an expert and a part, rows of k input features: of a gate and of the rest in turn."""
        (count, n, _), parts = self.shape, 1 + self.of_gates

        def made(expert: int, part: int) -> Quantized:
            return ExpertBlocks(
                self.parameter, n // parts, k, self.node.expert_weight_bits, self.node.block_size,
                self.codes, self.scales, self.zero_points,
                experts=self, expert=expert, matrices=count * parts, rows=np.arange(part, n, parts),
            )  # fmt: skip

        return made

    def take(self, expert: int, matrices: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """Return codes, scales and zero points of one expert; in all, so many `matrices` are to be read."""
        if self._arrays is None:
            points = None if self.zero_points is None else graph.tensor(self.zero_points).numpy()
            self._arrays = graph.tensor(self.codes).numpy(), graph.tensor(self.scales).numpy(), points
            self.unread = matrices
        codes, scales, points = self._arrays
        self.unread -= 1
        if not self.unread:
            self._arrays = None
        return codes[expert], scales[expert], None if points is None else points[expert]


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertBlocks(Blocks):
    """Some rows of a matrix of one of several experts."""

    experts: ExpertCodes
    expert: int
    rows: NDArray[np.intp]
    matrices: int  # parts of those of all experts, that there are

    def read(self) -> QuantizedMatrix:
        """Compute codes, scales and zero points."""
        codes, scales, points = self.experts.take(self.expert, self.matrices)
        blocks = self.grid.blocks(self.k)
        packed = Packed(
            np.ascontiguousarray(codes[self.rows]).reshape(self.n, blocks, -1),
            scales[self.rows].astype(np.float32),
            None if points is None else np.ascontiguousarray(points[self.rows]),
        )
        return unpack(packed, self.grid, self.k)


@dataclass(frozen=True, eq=False)
class KernelBlocks:
    """A matrix [n, k] in blocks of codes on `grid`, as llmforge's CPU kernels have them."""

    parameter: str
    n: int
    k: int
    grid: Grid
    groups: ir.Value  # uint8 (`quantization.cpu_layout`)
    table: bool = False  # an embedding reads it, and perhaps a tied head

    def read(self) -> QuantizedMatrix:
        """Compute codes, scales, and zero points or minima."""
        return cpu_layout.read(graph.tensor(self.groups).numpy(), self.n, self.k, self.grid)


@dataclass(frozen=True)
class CacheScales:
    """By what keys and values of one layer are divided before they are cached in fp8."""

    key: np.float32
    value: np.float32


Quantized = Blocks | KernelBlocks | LowPrecisionMatrix
OF_EXPERTS = (ExpertBlocks, ExpertChannels, ExpertFp4)


@dataclass(frozen=True, eq=False)
class Exported:
    """A checkpoint, and what stands for some of its tensors, by their names: codes, or other numbers."""

    checkpoint: Checkpoint
    quantized: Mapping[str, Quantized]
    changed: Mapping[str, ir.TensorProtocol]  # vectors, fp32: weights of norms and biases, times powers of two
    caches: Mapping[str, CacheScales] = field(default_factory=dict)  # by the module of attention; none: not in fp8


def check_passes(backend: BackendName, steps: Sequence[type[Pass]], registry: Sequence[type[Pass]]) -> None:
    """Return if an engine of `backend` can say what `steps` do to a model; `registry` is what there is instead.

    Raises:
        UnsupportedError: it cannot; names the first that it cannot.
    """
    record = BACKENDS[backend].export_format
    for step in steps:
        if record is None and step.servers_alone:
            raise UnsupportedError(
                f"{step.name}: only servers of others compute as it says, and no engine of {backend}",
                hint=f"leave {step.name} out of the recipe, or set `engine: {{backend: compressed-tensors, …}}`",
            )
        if record is not None and not _holds(record, step):
            taken = ", ".join(each.name for each in registry if _holds(record, each))
            raise UnsupportedError(
                f"{step.name}: a {BACKENDS[backend].title} holds the parameters of the checkpoint by their own names, "
                "and cannot say what this pass does",
                hint=f"leave {step.name} out of the recipe; {backend} takes {taken}",
            )


def _holds(record: ExportFormat, step: type[Pass]) -> bool:
    """Say whether a file can say what `step` does: nothing to parameters, or codes that it has a form for."""
    if step.writes_codes is not None:
        return step.writes_codes in record.codes
    return step.keeps_parameters or (step.servers_alone and record.fp8_caches)


def found_in(
    model: ir.Model, traced: ir.Model
) -> tuple[dict[str, Quantized], dict[str, ExpertCodes | LowPrecisionCodes], dict[str, ir.TensorProtocol]]:
    """Find parameters of `model` that are stored as codes, those of experts, and those that outliers were moved out of.

    All others are as in the `traced` graph.

    Raises:
        UnsupportedError: a parameter is none of these.
    """
    found: dict[str, Quantized] = {}
    experts: dict[str, ExpertCodes | LowPrecisionCodes] = {}
    for node in model.graph.all_nodes():
        if (layer := QMoE.of(node)) is not None:
            experts |= {each.parameter: each for each in _of_experts(layer)}
            continue
        if (rounded := LowPrecisionMoE.of(node)) is not None:
            for codes in (rounded.up, rounded.down):
                parameter = _parameter(codes, rounded.name)
                experts[parameter] = LowPrecisionCodes(parameter, rounded, codes is rounded.up)
            continue
        made = _of_product(node) or _of_lookup(node) or _of_channels(node) or _of_kernels(node)
        made = made or _of_fp4(node) or _of_mx(node)
        if made is None:
            continue
        before = found.get(made.parameter)
        if isinstance(before, Blocks | KernelBlocks):  # a tied head reads the codes of the embedding
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
        if not names or set(names) <= found.keys() | experts.keys():
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
    return found, experts, changed


def exported(
    model: ir.Model,
    traced: ir.Model,
    checkpoint: Checkpoint,
    bound: Mapping[str, tuple[str, bool]],
    stacked: Mapping[str, Sequence[Sequence[str]]],
) -> Exported:
    """Find what is written in place of tensors of the checkpoint.

    `bound` names the tensor that is a parameter as a whole, and whether the graph holds it transposed; `stacked` the
    tensors on top of each other that each expert's part of a parameter is.

    Raises:
        UnsupportedError: a parameter was changed in a way that no file can say, or codes stand for one that is made of
            several tensors, or is stored the other way round.
    """
    found, experts, changed = found_in(model, traced)
    by_tensor: dict[str, Quantized] = {}
    for parameter, codes in experts.items():
        by_tensor |= _by_expert(codes, stacked.get(parameter, ()), checkpoint)
    for parameter, matrix in found.items():
        tensor, transposed = bound.get(parameter, ("", False))
        entry, is_table = checkpoint.tensors.get(tensor), isinstance(matrix, Blocks | KernelBlocks) and matrix.table
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
    return Exported(checkpoint, by_tensor, others, _caches_in(model, [tensor for tensor, _ in bound.values()]))


def _by_expert(
    codes: ExpertCodes | LowPrecisionCodes, stacked: Sequence[Sequence[str]], checkpoint: Checkpoint
) -> dict[str, Quantized]:
    """Divide the codes of experts among the tensors of each, as `stacked` names them.

    Raises:
        UnsupportedError: the checkpoint has not a tensor for each matrix of each expert.
    """
    parts = 1 + codes.of_gates
    count, n, wanted = codes.shape
    entries = [[checkpoint.tensors.get(tensor) for tensor in tensors] for tensors in stacked]
    shapes = {() if entry is None else entry.shape for each in entries for entry in each}
    k = max((shape[-1] for shape in shapes if shape), default=0)
    if [len(each) for each in entries] != [parts] * count or shapes != {(n // parts, k)} or k > wanted:
        raise UnsupportedError(
            f"{codes.parameter}: the checkpoint has no tensor of {n // parts} output features for each of {count} "
            "experts, so that their codes have no name there",
            hint=f"exclude them: `exclude: [{codes.parameter}]`",
        )
    matrices = codes.matrices(k)
    return {
        tensor: matrices(expert, part) for expert, tensors in enumerate(stacked) for part, tensor in enumerate(tensors)
    }


def _caches_in(model: ir.Model, tensors: Sequence[str]) -> dict[str, CacheScales]:
    """Find by which scales keys and values are rounded to fp8, by the module of `tensors` that makes them."""
    found: dict[int, CacheScales | None] = {}
    for node in model.graph.all_nodes():
        attention = Attention.of(node) or GroupQueryAttention.of(node)
        past = None if attention is None else PAST.fullmatch(str(attention.past_key.name))
        if past is not None and attention is not None:
            read = [DequantizeLinear.made(each) for each in attention.projections[1:]]
            steps = [np.float32(graph.tensor(each.scales).numpy()) for each in read if each is not None]
            found[int(past[1])] = CacheScales(*steps) if len(steps) == _KEY_AND_VALUE else None
    named = {int(match[2]): match[1] for match in map(_KEYS.fullmatch, tensors) if match is not None}
    if not any(found.values()):
        return {}
    for layer, scales in found.items():
        if scales is None or layer not in named:
            raise UnsupportedError(
                f"keys and values of layer {layer} "
                + ("are not rounded to fp8, as others are" if scales is None else "are made by no k_proj of their own"),
                hint="leave quantize-kv-fp8 out of the recipe",
            )
    return {named[layer]: scales for layer, scales in found.items() if scales is not None}


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


def _of_experts(layer: QMoE) -> list[ExpertCodes]:
    gates = layer.swiglu_fusion == 1
    first = layer.fc1_experts_weights, _plain(layer.fc1_scales), layer.fc1_zero_points, gates
    second = layer.fc2_experts_weights, _plain(layer.fc2_scales), layer.fc2_zero_points, False
    return [ExpertCodes(_parameter(each[0], layer.name), layer, *each) for each in (first, second)]


def _of_lookup(node: ir.Node) -> Quantized | None:
    lookup = GatherBlockQuantized.of(node)
    if lookup is None:
        return None
    parameter, scales = _parameter(lookup.data, lookup.name), _plain(lookup.scales)
    shape = graph.static(lookup.data)
    n = shape[0]
    k = int(np.prod(shape[1:])) * 8 // lookup.bits
    return Blocks(parameter, n, k, lookup.bits, lookup.block_size, lookup.data, scales, None, table=True)


def _of_kernels(node: ir.Node) -> Quantized | None:
    packed = CpuLinear.of(node) or Embedding.of(node)
    if packed is None:
        return None
    parameter, is_table = _parameter(packed.weights, packed.name), isinstance(packed, Embedding)
    return KernelBlocks(parameter, packed.N, packed.K, cpu_linear.grid_of(packed), packed.weights, is_table)


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
    read, whole = DequantizeLinear.made(product.x), graph.static(wide.scales) == ()
    if read is None:
        return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "none", None, whole=whole)
    rounded = QuantizeLinear.made(read.codes)
    if rounded is not None and Div.made(rounded.x) is not None:  # by the scale of each token
        return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "per_token", None)
    return ChannelMatrix(parameter, n, k, dtype, wide.codes, wide.scales, "static", read.scales, whole=whole)


def _of_fp4(node: ir.Node) -> Quantized | None:
    layer = Fp4Linear.of(node)
    if layer is None:
        return None
    parameter = _parameter(layer.codes, layer.name)
    k, n = graph.static(layer.codes)
    return Fp4Matrix(parameter, n, k, layer.codes, layer.scales, layer.weight_scale, layer.input_scale)


def _of_mx(node: ir.Node) -> Quantized | None:
    layer = MxLinear.of(node)
    if layer is None:
        return None
    k, n = graph.static(layer.codes)
    dtype = {ir.DataType.FLOAT4E2M1: "fp4", ir.DataType.FLOAT8E4M3FN: "fp8"}[graph.dtype(layer.codes)]
    return MxMatrix(_parameter(layer.codes, layer.name), n, k, dtype, layer.codes, layer.scales)

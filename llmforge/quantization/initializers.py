"""Quantized matrices as initializers of a graph, computed when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.ir import graph
from llmforge.ir.derived import by_output, computed
from llmforge.ir.scratch import Scratch
from llmforge.quantization import codebook, cpu_layout
from llmforge.quantization.formats import K_SCALES
from llmforge.quantization.grid import OF_2_BITS, OF_CODEBOOK, Q2_K, Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, pack, stack
from llmforge.quantization.methods.base import NO_INPUTS, LayerInputs, Method

Parts = dict[str, NDArray[np.generic]]  # of a matrix in the layout of MatMulNBits: codes, scales, zero_points
# Of a portable grid.
SCALES: Mapping[Scale, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True, eq=False)
class PackedInitializers:
    """The initializers of a matrix in the layout of com.microsoft::MatMulNBits (`quantization.grids.Packed`).

    scales are fp32 [N, blocks], or fp16 or bf16 where the grid stores them so.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None  # None where the grid is symmetric
    grid: Grid


@dataclass(eq=False)
class LazyMatrix:
    """A quantized matrix [n, k] on `grid`, computed when the first of its parts is read.

    With a `scratch` it is computed once. Without one, or where it is idle, the other parts are kept until each has been
    read once: writing a model computes the matrix once and keeps nothing.
    """

    calculate: Callable[[], QuantizedMatrix]
    n: int
    k: int
    grid: Grid
    scratch: Scratch | None = None
    _unread: Parts = field(default_factory=dict)

    def take(self, part: str) -> NDArray[np.generic]:
        """Return one part."""
        if self.scratch is not None and (kept := self.scratch.get((self, part))) is not None:
            return kept
        if part not in self._unread:
            made = self._laid_out(self.calculate())
            if self.scratch is not None and not self.scratch.is_idle:
                for name, array in made.items():
                    self.scratch.put((self, name), array)
                return made[part]
            self._unread = made
        return self._unread.pop(part)

    def _laid_out(self, matrix: QuantizedMatrix) -> Parts:
        assert matrix.grid == self.grid
        assert matrix.shape == (self.n, self.k), f"{matrix.shape} was computed for a weight [{self.n}, {self.k}]"
        return laid_out(matrix) if self.grid.portable else {"groups": arrange(matrix)}

    def parts(self) -> Iterator[tuple[str, ir.DataType, tuple[int, ...]]]:
        """Name each part, with its dtype and shape.

        `groups` alone, in the layout of the CPU kernels, where the grid is not portable.
        """
        if not self.grid.portable:
            shape = (cpu_layout.groups(self.n), cpu_layout.group_bytes(self.k, self.grid))
            yield "groups", ir.DataType.UINT8, shape
            return
        blocks, bits = self.grid.blocks(self.k), self.grid.bits
        yield "codes", ir.DataType.UINT8, (self.n, blocks, self.grid.block_size * bits // 8)
        yield "scales", SCALES[self.grid.scale], (self.n, blocks)
        if self.grid.zero_points:
            yield "zero_points", ir.DataType.UINT8, (self.n, -(-blocks * self.grid.zero_bits // 8))


def readable(matrix: LazyMatrix) -> LazyMatrix:
    """Return a matrix on a grid that kernels read, which holds the same numbers.

    Scales and minima of K types of GGUF are in fp32; 2 bits are held in 3; levels of a codebook in 8, with a minimum.
    """
    own, calculate = matrix.grid, matrix.calculate
    if own.codebook:
        grid = OF_CODEBOOK

        def read() -> QuantizedMatrix:
            made = calculate()
            lowest = codebook.LOWEST * made.scales
            return QuantizedMatrix(grid, codebook.as_bytes(made.codes), made.scales, None, lowest)

        return LazyMatrix(read, matrix.n, matrix.k, grid)
    if own.scale not in K_SCALES:
        return matrix
    grid = OF_2_BITS if own == Q2_K else replace(own, scale="fp32")
    return LazyMatrix(lambda: replace(calculate(), grid=grid), matrix.n, matrix.k, grid)


def laid_out(matrix: QuantizedMatrix) -> Parts:
    """Lay out a matrix on a portable grid as its initializers are."""
    packed = pack(matrix)
    scales = packed.scales.astype(SCALES[matrix.grid.scale].numpy(), copy=False)
    made: Parts = {"codes": packed.codes, "scales": scales}
    return made if packed.zero_points is None else {**made, "zero_points": packed.zero_points}


def arrange(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Lay a matrix out as the CPU kernels read it, uint8 [groups, bytes]."""
    return cpu_layout.arrange(matrix.codes, matrix.scales, matrix.zero_points, matrix.grid, matrix.minimums)


def quantized(
    weight: ir.Value, method: Method, grid: Grid, inputs: LayerInputs = NO_INPUTS, *, transposed: bool = True
) -> LazyMatrix:
    """Quantize an initializer [K, N], or [N, K] if not `transposed`, by a method that demands no more than `inputs`.

    When it is read, that may raise a CheckpointError: the method refuses the numbers.
    """
    n, k = graph.static(weight)[:: -1 if transposed else 1]

    def calculate(tensor: ir.TensorProtocol) -> QuantizedMatrix:
        return method.quantize(by_output(tensor, transposed=transposed), grid, inputs)

    return _lazy(weight, n, k, grid, calculate)


def quantized_experts(weight: ir.Value, order: NDArray[np.intp], method: Method, grid: Grid) -> LazyMatrix:
    """Quantize the matrices of an initializer [E, K, N] on top of each other, the rows of each in `order`."""
    count, k, n = graph.static(weight)

    def calculate(tensor: ir.TensorProtocol) -> QuantizedMatrix:
        return stack([method.quantize(each.T[order], grid) for each in tensor.numpy()])

    return _lazy(weight, count * n, k, grid, calculate)


def register_groups(owner: ir.Model, weight: ir.Value, matrix: LazyMatrix, scratch: Scratch | None = None) -> ir.Value:
    """Register a matrix as the CPU kernels read it, `weight`'s .groups; with a `scratch` it is computed once."""
    matrix.scratch = scratch
    [(part, dtype, shape)] = matrix.parts()
    name = f"{weight.name}.{part}"
    return graph.initializer(owner, name, _tensor(matrix, part, dtype, shape, name), graph.sources(weight))


def register(
    owner: ir.Model,
    weight: ir.Value,
    matrix: LazyMatrix,
    *,
    flat: bool = False,
    experts: int = 0,
    scratch: Scratch | None = None,
) -> PackedInitializers:
    """Register the parts of `matrix`, named after `weight`: .codes, .scales and, where there are any, .zero_points.

    Codes are [n, blocks, bytes of a block], and come from the parameters that `weight` comes from (docs/dialect.md,
    Provenance); `flat` makes them [n, bytes of a row], for GatherBlockQuantized. Where the matrix is those of
    `experts`, on top of each other, each part gets an axis of experts in front: codes [experts, n / experts, bytes of a
    row]. With a `scratch` the matrix is computed once, and its parts are kept there.
    """
    matrix.scratch = scratch
    values = {}
    for part, dtype, shape in matrix.parts():
        if (flat or experts) and part == "codes":
            shape = (shape[0], shape[1] * shape[2])
        if experts:
            shape = (experts, shape[0] // experts, *shape[1:])
        name, sources = f"{weight.name}.{part}", graph.sources(weight) if part == "codes" else []
        values[part] = graph.initializer(owner, name, _tensor(matrix, part, dtype, shape, name), sources)
    return PackedInitializers(values["codes"], values["scales"], values.get("zero_points"), matrix.grid)


def _lazy(
    weight: ir.Value, n: int, k: int, grid: Grid, calculate: Callable[[ir.TensorProtocol], QuantizedMatrix]
) -> LazyMatrix:
    """Return the matrix [n, k] that `calculate` makes of `weight` when it is read."""
    tensor, name = graph.tensor(weight), weight.name

    def read() -> QuantizedMatrix:
        try:
            return calculate(tensor)
        except ValueError as error:
            raise CheckpointError(f"parameter {name} cannot be quantized: {error}") from error

    return LazyMatrix(read, n, k, grid)


def _tensor(matrix: LazyMatrix, part: str, dtype: ir.DataType, shape: tuple[int, ...], name: str) -> ir.LazyTensor:
    return computed(lambda: matrix.take(part).reshape(shape), dtype, shape, name)

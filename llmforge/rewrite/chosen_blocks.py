"""Codes of blocks that a method chooses for the weights of a graph, or has chosen while the model was calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Stored, stored_in
from llmforge.quantization import initializers, methods
from llmforge.quantization.grid import QMOE_BITS, SMALLEST_BLOCK, Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, rows, stack
from llmforge.quantization.initializers import LazyMatrix, readable
from llmforge.quantization.methods.base import NO_INPUTS, Method
from llmforge.quantization.statistics import LayerBits, Statistics, exclusion, with_bits
from llmforge.quantization.stored import (
    QuantizedSource,
    SkippedCodes,
    StoredCodes,
    UnrepresentableCodes,
    common,
    on_grid,
    stack_codes,
)
from llmforge.rewrite.block_codes import described, parameters
from llmforge.rewrite.moe_kernels import FusableExperts
from llmforge.rewrite.patterns import NotApplicable, skip_if

KEPT_BITS = 16  # of embedding and head that are left alone
_PLAIN = methods.PLAIN()  # of an embedding or head that was not calibrated


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """Quantizes weights by `method` to `grid`, and embedding and head to `tables` (None: they stay).

    Parameters that match a glob of `layer_bits` have those bits instead.
    """

    method: Method
    grid: Grid
    tables: Grid | None
    statistics: Statistics | None
    layer_bits: LayerBits = ()

    def of_experts(self, experts: FusableExperts, excluded: Sequence[str]) -> tuple[LazyMatrix, LazyMatrix]:
        """Quantize `up` and `down` on the grid that QMoE reads.

        Raises:
            NotApplicable: QMoE reads no such grid, or they are `excluded`.
        """
        wanted = with_bits(self.grid, experts.parameters, self.layer_bits)
        grid = wanted.fitting(experts.hidden, experts.inner)
        if grid is None and wanted.bits not in QMOE_BITS:
            raise NotApplicable(f"QMoE has 4 and 8 bits, not {wanted.bits}; its matrices stay fp32")
        if grid is None:
            widths = f"{experts.hidden} and {experts.inner}"
            raise NotApplicable(f"its widths, {widths}, are not divisible into blocks of {SMALLEST_BLOCK} or more")
        skip_if(exclusion(experts.parameters, excluded))
        up, down = experts.layer.up, experts.layer.down
        order = np.arange(experts.hidden)
        return self._of_experts(up, experts.order, grid), self._of_experts(down, order, grid)

    def _of_experts(self, weight: ir.Value, order: NDArray[np.intp], grid: Grid) -> LazyMatrix:
        """Quantize [E, K, N] as one matrix [E·N, K], the output features of each expert in `order`."""
        if not self.method.demands or self.method.is_by_channel():
            return initializers.quantized_experts(weight, order, self.of_plain_experts, grid)
        count, k, n = graph.static(weight)
        calibrated = self._calibrated(parameters(weight))
        stacked = (n * np.arange(count)[:, None] + order).reshape(-1)
        return LazyMatrix(lambda: rows(calibrated(), stacked), count * n, k, grid)

    @property
    def of_plain_experts(self) -> Method:
        """What quantizes experts where that reads no moments: of their inputs nothing is known by channel."""
        return _PLAIN if self.method.is_by_channel() else self.method

    def matrix(self, weight: ir.Value, n: int, k: int) -> tuple[LazyMatrix, str]:
        """Quantize the weight [K, N] of a linear layer; returns the name of the method, too.

        Raises:
            NotApplicable: calibration has no result for it, or several formats.
        """
        names = parameters(weight)
        if not self.method.demands or self.method.is_by_channel():
            return self._lazily(weight, with_bits(self.grid, names, self.layer_bits).of_rows(k), transposed=True)
        calculate, grids = self._calibrated(names), self._grids(names)
        if len(grids) > 1:
            raise NotApplicable(f"{', '.join(names)} are one matrix, and have {len(grids)} formats")
        return readable(LazyMatrix(calculate, n, k, grids.pop())), self.method.name

    def _lazily(self, weight: ir.Value, grid: Grid, *, transposed: bool) -> tuple[LazyMatrix, str]:
        """Quantize a weight when it is written, rounded to nearest where its inputs were to be seen and were not."""
        found = {} if self.statistics is None else self.statistics.inputs
        inputs, method = NO_INPUTS, self.method
        if method.demands:
            inputs = next((found[name].seen() for name in parameters(weight) if name in found), NO_INPUTS)
            method = method if inputs.tokens and method.is_by_channel() else _PLAIN
        return readable(initializers.quantized(weight, method, grid, inputs, transposed=transposed)), method.name

    def table(self, weight: ir.Value, v: int, k: int, *, transposed: bool = True) -> tuple[LazyMatrix, str]:
        """Quantize an embedding [V, K], or a head, `transposed`; returns the name of the method, too.

        One whose inputs, or outputs, calibration has not seen is rounded to nearest.

        Raises:
            NotApplicable: they stay, or no block divides K.
        """
        if self.tables is None:
            raise NotApplicable(f"embedding_bits is {KEPT_BITS}")
        names = parameters(weight)
        grid = with_bits(self.tables, names, self.layer_bits).dividing(k)
        if grid is None:
            raise NotApplicable(f"its {k} features are not a multiple of {SMALLEST_BLOCK}, the smallest block")
        statistics = self.statistics
        if self.method.demands and statistics is not None and len(names) == 1 and names[0] in statistics.linears:
            return readable(LazyMatrix(self._calibrated(names), v, k, statistics.grid(names[0]))), self.method.name
        return self._lazily(weight, grid, transposed=transposed)

    def _grids(self, names: list[str]) -> set[Grid]:
        """Return the grids that calibration has given to `names`, which it knows."""
        statistics = self.statistics
        assert statistics is not None
        return {statistics.grid(name) for name in names}

    def _calibrated(self, names: list[str]) -> Callable[[], QuantizedMatrix]:
        """Return what puts the matrix together from the calibrated ones of `names`."""
        statistics = self.statistics
        matrices = {} if statistics is None else statistics.linears
        if missing := [name for name in names if name not in matrices]:
            raise NotApplicable(f"calibration has no result for {', '.join(missing)}")
        return lambda: stack([matrices[name] for name in names])


@dataclass(eq=False)
class StoredBlocks:
    """Finds the codes of `source` for the pass `step`, with scales of type `scale` where that holds them.

    `native`: llmforge's CPU kernels read them, which have more formats than ONNX Runtime.
    """

    step: str
    source: QuantizedSource
    scale: Scale
    native: bool = True
    skipped: SkippedCodes = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedCodes(self.step)

    def are_codes(self, weight: ir.Value, *, transposed: bool = True) -> bool:
        """Say whether the checkpoint stores all of a weight as codes, which a format here may hold or not."""
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        try:
            for tensor in tensors:
                self.source.codes(tensor)
        except UnrepresentableCodes as reason:
            return not reason.is_plain
        return bool(tensors)

    def matrix(
        self, weight: ir.Value, n: int, k: int, *, transposed: bool = True
    ) -> tuple[LazyMatrix, NDArray[np.intp] | None]:
        """Take the codes of a weight [K, N] from the checkpoint, with the input feature of each of their columns.

        Raises:
            NotApplicable: it has none that are held here.
        """
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        if not tensors:
            raise NotApplicable(
                f"its numbers are not those of the checkpoint any more; put {self.step} further in front"
            )
        try:
            found = self._stacked(tensors)
            if not (found.grid.portable or self.native):
                raise UnrepresentableCodes(f"are {described(found.grid)}, which llmforge's CPU kernels alone read")
        except UnrepresentableCodes as reason:
            self.skipped.add(tensors, reason)
            raise NotApplicable(
                f"its codes {reason}" + ("" if reason.is_plain else "; it stays dequantized")
            ) from reason
        return LazyMatrix(found.read, n, k, found.grid), found.columns

    def _stacked(self, tensors: Sequence[str]) -> StoredCodes:
        """Put the codes of tensors on top of each other, with fp32 scales unless fp16 is wanted and holds them."""
        found = stack_codes([self.source.codes(tensor) for tensor in tensors])
        if found.grid.scale == self.scale:
            return found
        grid = replace(found.grid, scale="fp32")
        return StoredCodes(grid, found.columns, lambda: on_grid(found.read(), grid))

    def of_experts(self, experts: FusableExperts) -> tuple[LazyMatrix, LazyMatrix]:
        """Take the codes of experts, `up` and `down`, on one grid that QMoE reads.

        Raises:
            NotApplicable: the checkpoint has none that QMoE reads.
        """
        layer = experts.layer
        try:
            up, down = (self._codes_of_experts(weight) for weight in (layer.up, layer.down))
            grid = common(up.grid, down.grid).fitting(experts.hidden, experts.inner)
            if grid is None:
                raise UnrepresentableCodes("have bits, or blocks, that QMoE does not read")
        except UnrepresentableCodes as reason:
            self.skipped.add(experts.parameters, reason)
            raise NotApplicable(f"its codes {reason}; its matrices stay dequantized") from reason
        return (
            _ordered(layer.up, up, grid, experts.order),
            _ordered(layer.down, down, grid, np.arange(experts.hidden)),
        )

    def _codes_of_experts(self, weight: ir.Value) -> StoredCodes:
        """Return the codes of an initializer [E, K, N] as one matrix [E·N, K]."""
        tensor = graph.tensor(weight)
        if not isinstance(tensor, Stored) or tensor.is_matrix or not tensor.sources or not tensor.transposed:
            raise UnrepresentableCodes("are not put together of matrices of experts")
        found = self._stacked([name for names in tensor.sources for name in names])
        if found.columns is not None:
            raise UnrepresentableCodes("have input features in another order, which QMoE does not read")
        return found


def _ordered(weight: ir.Value, found: StoredCodes, grid: Grid, order: NDArray[np.intp]) -> LazyMatrix:
    """Make a matrix [E·N, K] on `grid` of the codes of experts [E, K, N], the output features of each in `order`."""
    count, k, n = graph.static(weight)
    stacked = (n * np.arange(count)[:, None] + order).reshape(-1)
    return LazyMatrix(lambda: rows(on_grid(found.read(), grid), stacked), count * n, k, grid)

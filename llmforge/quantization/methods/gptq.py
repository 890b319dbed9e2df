"""Rounding weights with their inputs in view: GPTQ and what refines it. Numpy alone.

The figures in the docstrings are mean KLD × 1000 of the sample checkpoint (tests/data) with 4-bit, asymmetric, block 32
decoder linears and all else in fp32, measured on every third window of the evaluation text; plain rounding has 29.07,
GPTQ alone 11.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import Field

from llmforge.quantization.formats import BLOCKS, Format
from llmforge.quantization.grids import (
    Grid,
    QuantizedMatrix,
    assemble,
    nearest,
    require_finite,
    round_to_nearest,
    span,
)
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method

COLUMNS = 128  # columns whose updates of the others are applied at once, as one matrix product (GPTQ's lazy batch)
DRIFT = np.float32(0.75)  # of the least-squares correction: all of it fits the calibration text a little too well
SWEEPS = 2  # of refinement; each takes three times as long as GPTQ itself, and a third one gained nothing
TRIANGLE = 64  # below this size LAPACK inverts a triangle as fast as matrix products could
# Damping rises by SCARCITY · K / tokens: an expert that few tokens chose has a Hessian of low rank, which GPTQ would
# fit at the cost of all other tokens. Error on other tokens, against plain rounding, of random [128, 256] matrices in
# 4 bits, blocks of 32; the spectrum of the inputs falls like i^-0.3: with 128 tokens 1.93 without it and 0.92 with it,
# with 2048 tokens 0.73 and 0.71; like i^-0.6: 0.54 and 0.37, 0.23 and 0.24.
SCARCITY = 0.3


@pydantic.dataclasses.dataclass(frozen=True)
class Gptq(Method):
    """Round weights so that products with the calibration inputs change least."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "minimize the output error on the calibration text"
    formats: ClassVar[tuple[Format, ...]] = BLOCKS
    demands: ClassVar[frozenset[InputStatistic]] = frozenset({InputStatistic.MOMENTS, InputStatistic.DRIFT})
    remedy: ClassVar[str] = "more damping"

    damping: Annotated[float, Field(gt=0, le=1, description="fraction of the mean Hessian diagonal added to it")] = 0.01

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Run GPTQ; an expert that no token chose is rounded to nearest."""
        hessian, damping = inputs.sums[InputStatistic.MOMENTS], self.damping
        if inputs.routed:
            if not hessian.any():
                return round_to_nearest(weight, grid)
            damping += SCARCITY * weight.shape[1] / inputs.tokens
        return gptq(weight, Curvature.of(hessian, damping), grid, inputs.sums[InputStatistic.DRIFT])


@dataclass(frozen=True, eq=False)
class Curvature:
    """What GPTQ knows of the inputs x [K] of a linear layer: H = Σ x xᵀ over the calibration tokens, and its inverse.

    hessian: fp32 [K, K], damped, in the order of `order`.  order: int [K], the columns by falling diagonal of H.
    inverse: fp32 [K, K], the upper triangle R with RᵀR = H⁻¹, in that order.
    """

    hessian: NDArray[np.float32]
    order: NDArray[np.intp]
    inverse: NDArray[np.float32]

    @classmethod
    def of(cls, hessian: NDArray[np.float32], damping: float) -> Curvature:
        """Damp and factor H [K, K] in fp64; `damping` is the share of the mean diagonal that is added to it.

        A column whose input was always 0 has only the damping, shares it with no other, and is rounded to nearest.

        Raises:
            ValueError: H is not a square matrix of finite numbers, or is zero: no input was seen.
        """
        require_finite(hessian)
        mean = float(hessian.diagonal().mean(dtype=np.float64))
        if hessian.shape[0] != hessian.shape[1] or mean <= 0:
            raise ValueError(f"a Hessian must be square with a positive diagonal, is {hessian.shape}, mean {mean}")
        order = np.argsort(-hessian.diagonal(), kind="stable")
        damped = hessian[np.ix_(order, order)].astype(np.float64)
        damped[np.diag_indices_from(damped)] += damping * mean
        # L Lᵀ of the reversed matrix is U Uᵀ of the matrix itself, and R = U⁻¹: one factorization in place of three.
        upper: NDArray[np.float64] = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1].astype(np.float64, copy=False)
        return cls(damped.astype(np.float32), order, _invert_upper(upper).astype(np.float32))


def gptq(
    weight: NDArray[np.float32],
    curvature: Curvature,
    grid: Grid,
    drift: NDArray[np.float32] | None = None,
    *,
    sweeps: int = SWEEPS,
) -> QuantizedMatrix:
    """Round a weight [N, K] so that its products with the calibration inputs change least (Frantar et al. 2022).

    Column by column in the order of the Hessian's diagonal, each is rounded and its error moved onto the columns that
    are still to come (arXiv 2210.17323, section 3.3). The scales are those of the unmoved weight, fixed before, so that
    the codes can be put back in place and no `g_idx` is needed. Rows are independent: layers that read the same input
    may be stacked along N. Three things go beyond the paper, because each pays:

    - `drift` [K, K] = Σ (x̃ - x) xᵀ, with x̃ the input that the unquantized model would give: the weight first moves to
      W + ¾·W·drift·H⁻¹, which makes up for what the layers before have lost (GPTAQ, arXiv 2504.02692, corrects within
      the column loop; in closed form it is the same least-squares target). 10.55 → 8.82 (the whole of it: 9.01).
    - Coordinate descent: with all columns rounded, each is rounded again given the others. 11.23 → 10.86.
    - Scales: with the codes fixed, those of a row that minimize the same error. 11.23 → 10.73; all sweeps: 10.55.

    Returns codes in the order of the columns. What the descent minimizes never rises.

    Raises:
        ValueError: `weight` is not finite, or its K is not that of `curvature`.
    """
    require_finite(weight)
    if weight.shape[1] != len(curvature.order):
        raise ValueError(f"the weight has {weight.shape[1]} input features, its Hessian {len(curvature.order)}")
    scales, zeros = span(weight, grid)
    target = np.ascontiguousarray(weight.T[curvature.order], np.float32)  # [K, N], so that a column is contiguous
    if drift is not None:
        target += DRIFT * _correction(weight, drift, curvature).T
    columns = np.ascontiguousarray
    block = curvature.order // grid.block_size
    state = _State(target, np.empty_like(target), columns(scales.T), columns(zeros.T), block, curvature, grid)
    state.propagate()  # chooses every code
    for _ in range(sweeps):
        state.descend()
        state.rescale()
    codes = np.empty((weight.shape[1], len(weight)), np.uint8)
    codes[curvature.order] = state.codes
    return assemble(grid, np.ascontiguousarray(codes.T), np.ascontiguousarray(state.scales.T), zeros)


@dataclass(eq=False)
class _State:
    """One GPTQ run; everything is transposed and in the order of `curvature`: row j is the j-th column to round.

    target: fp32 [K, N].  codes: fp32 [K, N] (whole numbers).  scales: fp32 [blocks, N].  zeros: fp32 [blocks, N].
    block: int [K], the block of each row.
    """

    target: NDArray[np.float32]
    codes: NDArray[np.float32]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32]
    block: NDArray[np.intp]
    curvature: Curvature
    grid: Grid

    def propagate(self) -> None:
        """Round row by row and move each error onto the rows below: GPTQ proper."""
        moved, inverse = self.target.copy(), self.curvature.inverse
        for start, end in _batches(len(moved)):
            errors = np.empty((end - start, moved.shape[1]), np.float32)
            for j in range(start, end):
                self._choose(j, moved[j])
                errors[j - start] = (moved[j] - self._value(j)) / inverse[j, j]
                moved[j + 1 : end] -= inverse[j, j + 1 : end, None] * errors[j - start]
            moved[end:] -= inverse[start:end, end:].T @ errors

    def descend(self) -> None:
        """Round each row again, where the others' errors put its optimum: one sweep of coordinate descent."""
        hessian = self.curvature.hessian
        gradient = hessian @ self._error()  # [K, N]
        for start, end in _batches(len(hessian)):
            moves = np.empty((end - start, gradient.shape[1]), np.float32)
            for j in range(start, end):
                before = self._value(j)
                self._choose(j, before + gradient[j] / hessian[j, j])
                moves[j - start] = before - self._value(j)
                gradient[start:end] += hessian[start:end, j, None] * moves[j - start]
            gradient[end:] += hessian[end:, start:end] @ moves

    def rescale(self) -> None:
        """Set the scales of one block after another to their optimum, codes fixed."""
        hessian = self.curvature.hessian
        gradient = hessian @ self._error()
        for block in range(len(self.scales)):
            [rows] = np.nonzero(self.block == block)
            steps = self.codes[rows] - self.zeros[block]  # [block_size, N]
            curve = np.einsum("kn,kn->n", steps, hessian[np.ix_(rows, rows)] @ steps)
            slope = np.einsum("kn,kn->n", steps, gradient[rows])
            change = np.divide(slope, curve, out=np.zeros_like(slope), where=curve > 0)
            change[self.scales[block] + change == 0] = 0  # a scale of 0 has no codes to go back to
            self.scales[block] += change
            gradient -= hessian[:, rows] @ (steps * change)

    def _choose(self, j: int, value: NDArray[np.float32]) -> None:
        """Set the codes of row `j` to the nearest of `value` [N]."""
        block = self.block[j]
        self.codes[j] = nearest(value, self.scales[block], self.zeros[block], self.grid)

    def _value(self, j: int) -> NDArray[np.float32]:
        """Dequantize row `j`."""
        block = self.block[j]
        value: NDArray[np.float32] = (self.codes[j] - self.zeros[block]) * self.scales[block]
        return value

    def _error(self) -> NDArray[np.float32]:
        """Return what is left to be matched, [K, N]."""
        return self.target - (self.codes - self.zeros[self.block]) * self.scales[self.block]


def _correction(weight: NDArray[np.float32], drift: NDArray[np.float32], curvature: Curvature) -> NDArray[np.float32]:
    """Return W·drift·H⁻¹ [N, K], its columns in the order of `curvature`."""
    moved = (weight @ drift)[:, curvature.order]
    return np.asarray(moved @ curvature.inverse.T @ curvature.inverse, np.float32)


def _batches(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + COLUMNS, count)) for start in range(0, count, COLUMNS)]


def _invert_upper(upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Invert an upper triangular matrix by halves: almost all of it is matrix products, which use every core."""
    size = len(upper)
    if size <= TRIANGLE:
        return np.asarray(np.triu(np.linalg.inv(upper)), np.float64)
    half = size // 2
    left, right = _invert_upper(upper[:half, :half]), _invert_upper(upper[half:, half:])
    inverse = np.zeros_like(upper)
    inverse[:half, :half], inverse[half:, half:] = left, right
    inverse[:half, half:] = -left @ (upper[:half, half:] @ right)
    return inverse

"""Rounding weights with their inputs, and what their outputs do to the loss, in view: GPTQ and what refines it.

What is minimized is tr(O (T - Ŵ) H (T - Ŵ)ᵀ): H = Σ x xᵀ of what the layer reads, O = mean g gᵀ of the gradients of the
loss in what it makes, and T the weight that makes up best for what quantized layers before it have changed. The
ablation of each part stands in docs/quantization-method.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import Field

from llmforge.quantization import rounding
from llmforge.quantization.formats import NATIVE, TRELLISES, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import (
    Float32,
    QuantizedMatrix,
    dequantize,
    require_finite,
    round_to_nearest,
    rows,
    stack,
)
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method
from llmforge.quantization.trellis import LANES

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a correction; the one is taken that fits text best that it was not made from
DRIFT = 0.75  # where there is no such text
SWEEPS = 2  # of refinement
SWEEPS_AGAIN = 1  # where rows are rounded again: KLD of the sample, held out, 6.64; with two 6.68
SAMPLED = 256  # rows of a weight that shares are chosen by
STEPS = 20  # ranges that are tried for a block
OFF_DIAGONAL = 0.5  # of O: gradients of few tokens say less of pairs of outputs than of each
PASSES = 2  # over all groups of rows
GROUPS = 8  # of rows that are rounded in turn, each with the errors of the others in view
SMALLEST_GROUP = 16  # rows
ATTEMPTS = 6  # to factor a Hessian, each with ten times the damping of the last
PANEL = 256  # columns of a triangle that are multiplied at once
TRIANGLE = 64  # below this size LAPACK inverts a triangle as fast as matrix products could
# Damping rises by SCARCITY · K / tokens: an expert that few tokens chose has a Hessian of low rank, which GPTQ would
# fit at the cost of all other tokens. Error on other tokens, against plain rounding, of random [128, 256] matrices in
# 4 bits, blocks of 32; the spectrum of the inputs falls like i^-0.3: with 128 tokens 1.93 without it and 0.92 with it,
# with 2048 tokens 0.73 and 0.71; like i^-0.6: 0.54 and 0.37, 0.23 and 0.24.
SCARCITY = 0.3


@pydantic.dataclasses.dataclass(frozen=True)
class Gptq(Method):
    """Round weights so that the loss on the calibration text changes least."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "minimize the error on the calibration text"
    formats: ClassVar[tuple[Format, ...]] = (*NATIVE, *TRELLISES)
    demands: ClassVar[frozenset[InputStatistic]] = frozenset(InputStatistic)
    demands_outputs: ClassVar[bool] = True
    remedy: ClassVar[str] = "more damping"

    damping: Annotated[float, Field(gt=0, le=1, description="fraction of the mean Hessian diagonal added to it")] = 0.01

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Run GPTQ; an expert that no token chose is rounded to nearest."""
        hessian, damping = inputs.sums[InputStatistic.MOMENTS], self.damping
        if inputs.routed:
            if not hessian.any():
                return round_to_nearest(weight, grid)
            damping += SCARCITY * weight.shape[1] / inputs.tokens
        require_finite(weight)
        curvature = Curvature.of(hessian, damping)
        if curvature.damping > damping:
            inputs.notes.append(
                f"damping rose from {damping:g} to {curvature.damping:g}: its Hessian could not be factored"
            )
        wanted = target(np.asarray(weight, np.float32), curvature, inputs)
        return gptq(wanted, curvature, grid, inputs.outputs, threads=inputs.threads)


@dataclass(frozen=True, eq=False)
class Curvature:
    """What GPTQ knows of the inputs x [K] of a linear layer: H = Σ x xᵀ over the calibration tokens, and its inverse.

    hessian: fp32 [K, K], damped, in the order of `order`.  order: int [K], the columns by falling diagonal of H.
    inverse: fp32 [K, K], the upper triangle R with RᵀR = H⁻¹, in that order.  damping: the share of the mean diagonal
    that was added.
    """

    hessian: NDArray[np.float32]
    order: NDArray[np.intp]
    inverse: NDArray[np.float32]
    damping: float

    @classmethod
    def of(cls, hessian: NDArray[np.float32], damping: float) -> Curvature:
        """Damp and factor H [K, K] in fp64; `damping` is the share of the mean diagonal that is added to it.

        Where H cannot be factored, damping rises tenfold until it can; `damping` of the result says to what. A column
        whose input was always 0 has only the damping, shares it with no other, and is rounded to nearest.

        Raises:
            ValueError: H is not a square matrix of finite numbers, or is zero: no input was seen; or no damping helps.
        """
        require_finite(hessian)
        mean = float(hessian.diagonal().mean(dtype=np.float64))
        if hessian.shape[0] != hessian.shape[1] or mean <= 0:
            raise ValueError(f"a Hessian must be square with a positive diagonal, is {hessian.shape}, mean {mean}")
        order = np.argsort(-hessian.diagonal(), kind="stable")
        damped: NDArray[np.float64] = hessian[np.ix_(order, order)].astype(np.float64)
        diagonal, places = damped.diagonal().copy(), np.diag_indices(len(damped))
        for attempt in range(ATTEMPTS):
            share = damping * 10**attempt
            damped[places] = diagonal + share * mean
            try:
                # L Lᵀ of the reversed matrix is U Uᵀ of the matrix itself, and R = U⁻¹: one factorization, not three.
                upper = np.asarray(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1], np.float64)
            except np.linalg.LinAlgError:
                continue
            narrow = damped.astype(np.float32)
            del damped  # two in fp64 are enough
            return cls(narrow, order, _invert_upper(upper).astype(np.float32), share)
        raise ValueError(f"a Hessian is not positive, even with {share:g} of its mean diagonal {mean:g} added")

    def solve(self, products: Float32) -> Float32:
        """Return products·H⁻¹, [N, K], of the unpermuted columns."""
        ordered, between = products[:, self.order], np.empty_like(products)
        for part in _panels(len(self.order)):  # R is 0 below the diagonal
            between[:, part] = ordered[:, part.start :] @ self.inverse[part, part.start :].T
        solved = np.empty_like(products)
        for part in _panels(len(self.order)):
            solved[:, self.order[part]] = between[:, : part.stop] @ self.inverse[: part.stop, part]
        return solved


def target(weight: Float32, curvature: Curvature, inputs: LayerInputs) -> Float32:
    """Return the weight [N, K] that makes up for what the layers before have lost: W + α·W·C·H⁻¹ + β·R·H⁻¹.

    With α = β = 1 it is the least-squares solution of Ŵx ≈ Wx̃ + r̃ - r over the calibration tokens: C = Σ (x̃ - x) xᵀ
    (GPTAQ, arXiv 2504.02692), R = Σ (r̃ - r) xᵀ (LoaQ, arXiv 2509.06297). That fits those tokens a little too well: α
    and β are those of `SHARES` that leave the least error on the tokens of `inputs.held` when made of the others; they
    are chosen by `SAMPLED` rows, and hold for all.
    """
    if InputStatistic.DRIFT not in inputs.sums:
        return weight
    shares: tuple[float, ...] = (DRIFT, 0.0)
    if inputs.held is not None:
        rest = {key: total - inputs.held[key] for key, total in inputs.sums.items()}
        some = np.linspace(0, len(weight) - 1, min(len(weight), SAMPLED)).round().astype(np.intp)
        told, held = ({key: _of_rows(key, total, some) for key, total in sums.items()} for sums in (rest, inputs.held))
        shares = _shares(weight[some], Curvature.of(rest[InputStatistic.MOMENTS], curvature.damping), told, held)
    drift = inputs.sums[InputStatistic.DRIFT]
    if InputStatistic.RESIDUAL not in inputs.sums and len(weight) > len(drift):  # C·H⁻¹ has fewer rows than W·C
        return weight + np.float32(shares[0]) * (weight @ curvature.solve(drift))
    pulls = _pulls(weight, inputs.sums)
    return weight + curvature.solve(
        sum((np.float32(share) * pull for share, pull in zip(shares, pulls, strict=False)), np.zeros_like(weight))
    )


def _of_rows(statistic: InputStatistic, total: Float32, some: NDArray[np.intp]) -> Float32:
    """Return of a sum what belongs to `some` outputs."""
    return total[some] if statistic is InputStatistic.RESIDUAL else total


def _pulls(weight: Float32, sums: Mapping[InputStatistic, Float32]) -> list[Float32]:
    """Return W·C and, where something is added to the output, R."""
    pulls = [weight @ sums[InputStatistic.DRIFT]]
    return [*pulls, sums[InputStatistic.RESIDUAL]] if InputStatistic.RESIDUAL in sums else pulls


def _shares(
    weight: Float32,
    curvature: Curvature,
    rest: Mapping[InputStatistic, Float32],
    held: Mapping[InputStatistic, Float32],
) -> tuple[float, ...]:
    """Return the shares of corrections, made of the tokens of `rest`, that leave the least error on those of `held`."""
    moves = [curvature.solve(pull) for pull in _pulls(weight, rest)]
    pull = sum(_pulls(weight, held))
    # Σ |M x - (W(x̃ - x) + r̃ - r)|² over the tokens, M = Σ share·move, is quadratic in the shares.
    curved = [move @ held[InputStatistic.MOMENTS] for move in moves]
    curve = np.array([[np.vdot(one, other) for other in moves] for one in curved], np.float64)
    slope = np.array([np.vdot(move, pull) for move in moves], np.float64)

    def error(shares: tuple[float, ...]) -> float:
        taken = np.array(shares)
        return float(taken @ curve @ taken - 2 * taken @ slope)

    return min(itertools.product(SHARES, repeat=len(moves)), key=error)


def gptq(
    wanted: Float32,
    curvature: Curvature,
    grid: Grid,
    outputs: tuple[Float32, ...] = (),
    *,
    sweeps: int = SWEEPS,
    steps: int = STEPS,
    threads: int = 1,
) -> QuantizedMatrix:
    """Round a weight [N, K] so that its products with the calibration inputs change the loss least.

    Column by column in the order of the Hessian's diagonal, each is rounded and its error moved onto the columns that
    are still to come (Frantar et al. 2022, arXiv 2210.17323, section 3.3), on grids that were fitted before, so that
    the codes can be put back in place and no `g_idx` is needed. Then coordinate descent: each column is rounded again
    given the others, and scale and zero point of each block are fitted again given the codes.

    `outputs` are Hessians of the loss in the layer's output, one [Nᵢ, Nᵢ] for each of the layers on top of each other
    (none: all outputs count alike). Where outputs hang together, so should their errors: rows are rounded again in
    groups, each with the target that makes up for the errors of the others: T_b + O_bb⁻¹ O_bc E_c (the feedback of
    YAQA, arXiv 2505.22988, as a descent).

    Returns codes in the order of the columns.

    Raises:
        ValueError: `wanted` is not finite, or shapes do not fit.
    """
    require_finite(wanted)
    n, k = wanted.shape
    if k != len(curvature.order):
        raise ValueError(f"the weight has {k} input features, its Hessian {len(curvature.order)}")
    if outputs and sum(map(len, outputs)) != n:
        raise ValueError(f"the weight has {n} output features, their Hessians {sum(map(len, outputs))}")
    order = curvature.order.astype(np.int32)
    columns = rounding.OrderedColumns(order, curvature.hessian, np.ascontiguousarray(curvature.inverse.T))

    def choose(of: Float32, start: QuantizedMatrix | None = None) -> QuantizedMatrix:
        matrix, _ = rounding.choose(
            of,
            columns,
            grid,
            steps=steps,
            sweeps=sweeps if start is None else min(sweeps, SWEEPS_AGAIN),
            start=start,
            with_loss=False,
            threads=threads,
        )
        return matrix

    if not outputs:
        return choose(wanted)
    bounds = np.cumsum([0, *map(len, outputs)])
    parts = zip(outputs, itertools.pairwise(bounds), strict=True)
    together = LANES if grid.trellis else 1
    return stack([_coupled(wanted[first:last], hessian, choose, together) for hessian, (first, last) in parts])


def _coupled(
    wanted: Float32, outputs: Float32, choose: Callable[..., QuantizedMatrix], together: int
) -> QuantizedMatrix:
    """Round `wanted` [N, K] with the Hessian `outputs` [N, N] of the loss in its outputs.

    Codes of `together` rows hang together: those are in one group.
    """
    matrix = choose(wanted)
    mean = float(outputs.diagonal().mean(dtype=np.float64))
    count = min(GROUPS, len(wanted) // SMALLEST_GROUP)
    if count < 2 or not mean > 0:
        return matrix
    hessian = OFF_DIAGONAL * outputs.astype(np.float64)
    hessian[np.diag_indices_from(hessian)] = outputs.diagonal() + 1e-3 * mean
    every = np.arange(len(wanted))
    groups = []
    for first in range(count):
        mine = every // together % count == first
        own, others = every[mine], every[~mine]
        pull = np.linalg.solve(hessian[np.ix_(own, own)], hessian[np.ix_(own, others)]).astype(np.float32)
        groups.append((own, others, pull))
    error = wanted - dequantize(matrix)
    for own, others, pull in groups * PASSES:
        again = choose(wanted[own] + pull @ error[others], rows(matrix, own))
        matrix.codes[own], matrix.scales[own] = again.codes, again.scales
        if matrix.zero_points is not None and again.zero_points is not None:
            matrix.zero_points[own] = again.zero_points
        error[own] = wanted[own] - dequantize(again)
    return matrix


def _panels(width: int) -> list[slice]:
    """Divide the columns of a triangle."""
    return [slice(first, min(first + PANEL, width)) for first in range(0, width, PANEL)]


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

"""Rounding weights with their inputs, and what their outputs do to the loss, in view: GPTQ and what refines it.

What is minimized is tr(O (T - Ŵ) H (T - Ŵ)ᵀ): H = Σ x xᵀ of what the layer reads, O = mean g gᵀ of the gradients of the
loss in what it makes, and T the weight that makes up best for what quantized layers before it have changed. The
ablation of each part stands in docs/quantization-method.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import Field

from llmforge.quantization import rounding
from llmforge.quantization.formats import GGUF, NATIVE, TRELLISES, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import (
    Float32,
    QuantizedMatrix,
    require_finite,
    round_to_nearest,
    rows,
)
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method
from llmforge.quantization.rounding import products
from llmforge.quantization.trellis import LANES

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a correction; the one is taken that fits text best that it was not made from
DRIFT = 0.75  # where there is no such text
SWEEPS = 2  # of refinement
# From 5 bits on one: a second lowers Σ (Ex)² of an embedding by 1.4 %, and took a third of its time.
FINE, SWEEPS_FINE = 5, 1
SWEEPS_BEFORE = 1  # … of rows that will be rounded again: the loss is .2 % larger than with two
SWEEPS_AGAIN = 1  # where they are: KLD of the sample, held out, 6.64; with two 6.68
SAMPLED = 256  # rows of a weight that shares are chosen by
STEPS = 20  # ranges that are tried for a block
OFF_DIAGONAL = 0.5  # of O: gradients of few tokens say less of pairs of outputs than of each
PASSES = 2  # over all groups of rows
GROUPS = 12  # of rows, about, that are rounded in turn, each with the errors of the others in view: with 8 +.5 %
SMALLEST_GROUP = 16  # rows
ATTEMPTS = 6  # to factor a Hessian, each with ten times the damping of the last
# Damping rises by SCARCITY · K / tokens: an expert that few tokens chose has a Hessian of low rank, which GPTQ would
# fit at the cost of all other tokens. Error on other tokens, against plain rounding, of random [128, 256] matrices in
# 4 bits, blocks of 32; the spectrum of the inputs falls like i^-0.3: with 128 tokens 1.93 without it and 0.92 with it,
# with 2048 tokens 0.73 and 0.71; like i^-0.6: 0.54 and 0.37, 0.23 and 0.24.
SCARCITY = 0.3
# H's numbers off the diagonal are made smaller by this share: those of few tokens fit them better than others. KLD with
# it, as a share of that without: SmolLM2-135M at 5 bits, documentation 0.97 (95 %: 0.92 – 1.02), answers of chats 0.92
# (0.85 – 1.00); at 4 bits the sample 0.98 (0.95 – 1.01), experts 0.98 (0.94 – 1.02). 0.2: both 0.99.
SHRINKAGE = 0.1


@pydantic.dataclasses.dataclass(frozen=True)
class Gptq(Method):
    """Round weights so that the loss on the calibration text changes least."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "minimize the error on the calibration text"
    formats: ClassVar[tuple[Format, ...]] = (*NATIVE, *TRELLISES, *GGUF)
    demands: ClassVar[frozenset[InputStatistic]] = frozenset(
        {InputStatistic.MOMENTS, InputStatistic.DRIFT, InputStatistic.RESIDUAL}
    )
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
        curvature = Curvature.of(hessian, damping, inputs.threads)
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
    that was added.  threads: how many may compute.
    """

    hessian: NDArray[np.float32]
    order: NDArray[np.intp]
    inverse: NDArray[np.float32]
    damping: float

    threads: int = 1

    @classmethod
    def of(cls, hessian: NDArray[np.float32], damping: float, threads: int = 1) -> Curvature:
        """Shrink H [K, K] towards its diagonal, damp and factor it in fp64.

        `damping` is the share of the mean diagonal that is added to it, `SHRINKAGE` what the other numbers lose.
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
        places = np.diag_indices(len(order))
        narrow = hessian.take(order, 0).take(order, 1)
        narrow *= np.float32(1 - SHRINKAGE)
        for attempt in range(ATTEMPTS):
            share = damping * 10**attempt
            # UᵀU of the reversed matrix is L'L'ᵀ, L' upper, of the matrix itself, and R = L'⁻¹.
            narrow[places] = hessian.diagonal()[order] + np.float64(share * mean)
            inverse = products.inverse_factor(narrow[::-1, ::-1].astype(np.float64, order="C"), threads)
            if inverse is not None:
                return cls(narrow, order, inverse[::-1, ::-1].astype(np.float32).T, share, threads)
        raise ValueError(f"a Hessian is not positive, even with {share:g} of its mean diagonal {mean:g} added")

    def solve(self, wanted: Float32) -> Float32:
        """Return wanted·H⁻¹, [N, K], of the unpermuted columns."""
        between = products.multiply(wanted[:, self.order], self.inverse.T, form="lower", threads=self.threads)
        solved = np.empty_like(wanted)
        solved[:, self.order] = products.multiply(between, self.inverse, form="upper", threads=self.threads)
        return solved


def target(weight: Float32, curvature: Curvature, inputs: LayerInputs) -> Float32:
    """Return the weight [N, K] that makes up for what the layers before have lost: W + α·W·C·H⁻¹ + β·R·H⁻¹.

    With α = β = 1 it is the least-squares solution of Ŵx ≈ Wx̃ + r̃ - r over the calibration tokens: C = Σ (x̃ - x) xᵀ
    (GPTAQ, arXiv 2504.02692), R = Σ (r̃ - r) xᵀ (LoaQ, arXiv 2509.06297). That fits those tokens a little too well: α
    and β are those of `SHARES` that leave the least error on the tokens of `inputs.held` when C and R are of the
    others, H of all; they are chosen by `SAMPLED` rows, and hold for all. H of the others, with a factor of its own,
    chose no better: KLD with that of all, as a share, the sample at 4 bits 0.98, experts 0.96.
    """
    if InputStatistic.DRIFT not in inputs.sums:
        return weight
    shares: tuple[float, ...] = (DRIFT, 0.0)
    if inputs.held is not None:
        some = np.linspace(0, len(weight) - 1, min(len(weight), SAMPLED)).round().astype(np.intp)
        whole, held = (
            {key: _of_rows(key, total, some) for key, total in sums.items()} for sums in (inputs.sums, inputs.held)
        )
        shares = _shares(weight[some], curvature, whole, held)
    drift, threads = inputs.sums[InputStatistic.DRIFT], curvature.threads
    if InputStatistic.RESIDUAL not in inputs.sums and len(weight) > len(drift):  # C·H⁻¹ has fewer rows than W·C
        return weight + np.float32(shares[0]) * products.multiply(weight, curvature.solve(drift), threads=threads)
    pulls = _pulls(weight, inputs.sums, threads)
    return weight + curvature.solve(
        sum((np.float32(share) * pull for share, pull in zip(shares, pulls, strict=False)), np.zeros_like(weight))
    )


def _of_rows(statistic: InputStatistic, total: Float32, some: NDArray[np.intp]) -> Float32:
    """Return of a sum what belongs to `some` outputs."""
    return total[some] if statistic is InputStatistic.RESIDUAL else total


def _pulls(weight: Float32, sums: Mapping[InputStatistic, Float32], threads: int) -> list[Float32]:
    """Return W·C and, where something is added to the output, R."""
    pulls = [products.multiply(weight, sums[InputStatistic.DRIFT], threads=threads)]
    return [*pulls, sums[InputStatistic.RESIDUAL]] if InputStatistic.RESIDUAL in sums else pulls


def _shares(
    weight: Float32,
    curvature: Curvature,
    whole: Mapping[InputStatistic, Float32],
    held: Mapping[InputStatistic, Float32],
) -> tuple[float, ...]:
    """Return the shares of corrections, made of those tokens that are not `held`, that leave the least error on `held`.

    The others' corrections count as if they were as many tokens as all.
    """
    threads = curvature.threads
    of_all, of_held = (float(sums[InputStatistic.MOMENTS].trace()) for sums in (whole, held))
    more = np.float32(of_all / (of_all - of_held) if of_all > of_held else 1)
    pulls = _pulls(weight, held, threads)
    rest = [(of - own) * more for of, own in zip(_pulls(weight, whole, threads), pulls, strict=True)]
    moves, pull = [curvature.solve(each) for each in rest], sum(pulls)
    # Σ |M x - (W(x̃ - x) + r̃ - r)|² over the tokens, M = Σ share·move, is quadratic in the shares.
    curved = [products.multiply(move, held[InputStatistic.MOMENTS], threads=threads) for move in moves]
    curve = np.array([[(one * other).sum(dtype=np.float64) for other in moves] for one in curved])
    slope = np.array([(move * pull).sum(dtype=np.float64) for move in moves])

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
    sweeps: int | None = None,
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
    if sweeps is None:
        sweeps = SWEEPS if grid.bits < FINE else SWEEPS_FINE
    order = curvature.order.astype(np.int32)
    columns = rounding.OrderedColumns(order, curvature.hessian, np.ascontiguousarray(curvature.inverse.T))
    choose = partial(rounding.choose, columns=columns, grid=grid, steps=steps, threads=threads)
    groups = _groups(outputs, LANES if grid.trellis else 1, threads)
    matrix, error = choose(wanted, sweeps=min(sweeps, SWEEPS_BEFORE) if groups else sweeps, with_errors=bool(groups))
    for group in groups * PASSES:
        own, moved = group.rows, group.feedback(error, threads)
        start, again_sweeps = rows(matrix, own), min(sweeps, SWEEPS_AGAIN)
        again, left = choose(wanted[own] + moved, sweeps=again_sweeps, start=start, with_errors=True)
        matrix.codes[own], matrix.scales[own] = again.codes, again.scales
        if matrix.zero_points is not None and again.zero_points is not None:
            matrix.zero_points[own] = again.zero_points
        if matrix.minimums is not None and again.minimums is not None:
            matrix.minimums[own] = again.minimums
        error[own] = left - moved
    return matrix


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows of a weight that are rounded again at once, of each of the layers on top of each other."""

    rows: NDArray[np.intp]
    pulls: tuple[tuple[slice, Float32], ...]  # of each layer: its rows, and (O_bb⁻¹ O_bc)ᵀ, 0 for the group's own

    def feedback(self, error: Float32, threads: int) -> Float32:
        """Return what moves the group's target, so that it makes up for the `error` [N, K] of all other rows."""
        if not products.has_bf16():
            return np.concatenate([products.multiply(pull.T, error[of], threads=threads) for of, pull in self.pulls])
        moved = np.zeros((len(self.rows), error.shape[1]), np.float32)
        bounds = itertools.pairwise(np.cumsum([0, *(pull.shape[1] for _, pull in self.pulls)]).tolist())
        for (layer, pull), (first, last) in zip(self.pulls, bounds, strict=True):
            products.add_tokens(moved[first:last], pull, error[layer], threads=threads)
        return moved


def _count(n: int) -> int:
    """Return into how many groups `n` rows are divided; where they are many, into such of whole tiles."""
    if n < GROUPS * SMALLEST_GROUP:
        return n // SMALLEST_GROUP
    return -(-n // (rounding.TILE * max(1, round(n / (GROUPS * rounding.TILE)))))


def damped_outputs(moments: Float32) -> Float32:
    """Return O [N, N] as rows make up for the errors of others: `OFF_DIAGONAL` of the pairs, .1 % of the mean added."""
    damped = np.float32(OFF_DIAGONAL) * moments
    mean = moments.diagonal().mean(dtype=np.float64)
    damped[np.diag_indices(len(moments))] = moments.diagonal() + np.float32(1e-3 * mean)
    return damped


def _groups(outputs: Sequence[Float32], together: int, threads: int) -> list[_Group]:
    """Divide the rows of layers with the Hessians `outputs` [Nᵢ, Nᵢ] of the loss in their outputs.

    Codes of `together` rows hang together: those are in one group.

    Raises:
        ValueError: such a Hessian is none of moments.
    """
    parts: dict[int, list[tuple[NDArray[np.intp], slice, Float32]]] = {}
    bounds = itertools.pairwise(np.cumsum([0, *map(len, outputs)]).tolist())
    with ThreadPoolExecutor(threads) as pool:
        for moments, (first, last) in zip(outputs, bounds, strict=True):
            n, mean = last - first, float(moments.diagonal().mean(dtype=np.float64))
            count = _count(n)
            if count < 2 or not mean > 0:
                continue
            owned = [np.flatnonzero(np.arange(n) // together % count == number) for number in range(count)]
            for number, pull in enumerate(pool.map(partial(_pull, damped_outputs(moments)), owned)):
                parts.setdefault(number, []).append((first + owned[number], slice(first, last), pull))
    return [
        _Group(np.concatenate([own for own, *_ in each]), tuple((layer, pull) for _, layer, pull in each))
        for each in parts.values()
    ]


def _pull(hessian: Float32, own: NDArray[np.intp]) -> Float32:
    """Return (O_bb⁻¹ O_bc)ᵀ [N, B] of rows b that are `own`, 0 for these, of the damped O [N, N]."""
    factor = products.inverse_factor(hessian[np.ix_(own, own)].astype(np.float64), 1)
    if factor is None:
        raise ValueError("moments of the gradients of its outputs are not positive")
    narrow = factor.astype(np.float32)
    pull = products.multiply(narrow.T, hessian[own], threads=1)
    pull = products.multiply(narrow, pull, threads=1)
    pull[:, own] = 0
    return np.ascontiguousarray(pull.T)

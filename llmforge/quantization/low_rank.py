"""Low-rank correction of what quantization loses: W ≈ Q(W) + B·A, with the least error over calibration inputs.

With H = Σ x xᵀ = L Lᵀ, an error E = W - Q(W) [N, K] costs Σ |E x|² = |E L|² of outputs. By Eckart and Young, the one
product of rank r that leaves the least is made of the r largest singular values of E L: B = U_r S_r, A = V_rᵀ L⁻¹
(QERA, arXiv 2410.06040, theorem 1, with the square root of H for L; any L with L Lᵀ = H gives the same product; LQER,
arXiv 2402.02446, takes the diagonal of H). Both factors are rounded as they are stored: A first, then B is fitted again
to what A became.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest

Float32 = NDArray[np.float32]
Dtype = Literal["fp32", "int8"]

INT8 = Grid(8, 32, symmetric=True)  # of factors in int8: codes of MatMulNBits, whose CPU kernels read blocks of 32
BITS = {"fp32": 32.0, "int8": 9.0}  # of a number: 8 bits of code and an fp32 scale for 32
_NEXT = {3: 4, 4: 5, 5: 6, 6: 8}  # bits of codes, and those of the next larger format


@dataclass(frozen=True, eq=False)
class LowRankCorrection:
    """What is added to a quantized weight [N, K] of linear layers that read the same: (a·b)ᵀ, a [K, r], b [r, N].

    `group` names the first of those layers, which share `a`. Errors are shares of Σ |W x|² over the calibration text:
    `before` of the codes alone, `after` with the correction, `codes` what as many bits more in the codes would leave
    (None: there is no larger format to tell by).
    """

    a: Float32
    b: Float32
    group: str
    before: float
    after: float
    codes: float | None

    @property
    def rank(self) -> int:
        """Inner features of the product."""
        return int(self.a.shape[1])

    def product(self) -> Float32:
        """Return what is added to the weight, [N, K]."""
        made: Float32 = (self.a @ self.b).T
        return made


def rank_within(bits: float, k: int, n: int, dtype: Dtype) -> int:
    """Return the largest rank of factors for a weight [n, k] that take at most `bits` for each of its numbers.

    0 where there is none; int8 factors have whole blocks.
    """
    rank = min(int(bits * k * n / (BITS[dtype] * (k + n))), k, n)
    return rank if dtype == "fp32" else rank // INT8.block_size * INT8.block_size


def bits_of(rank: int, k: int, n: int, dtype: Dtype) -> float:
    """Return what factors take for each number of a weight [n, k]."""
    return rank * (k + n) * BITS[dtype] / (k * n)


def fit(error: Float32, hessian: Float32, rank: int, dtype: Dtype = "fp32") -> tuple[Float32, Float32]:
    """Return a [K, r] and b [r, N], as they are stored, so that Σ |(E - (a·b)ᵀ) x|² is least for E = `error` [N, K].

    `hessian` is Σ x xᵀ [K, K], damped so that it is positive definite.

    Raises:
        LinAlgError: it is not.
    """
    lower = np.linalg.cholesky(hessian.astype(np.float64))
    left, values, right = np.linalg.svd(error.astype(np.float64) @ lower, full_matrices=False)
    root = np.sqrt(values[:rank])  # on either side, so that both factors have numbers of one size
    a = np.linalg.solve(lower.T, right[:rank].T * root)
    if dtype == "fp32":
        return a.astype(np.float32), (left[:, :rank] * root).T.astype(np.float32)
    a = _int8(a.T.astype(np.float32)).T.astype(np.float64)
    pull = hessian @ a  # b = (aᵀ H a)⁻¹ aᵀ H Eᵀ is best for the a that is stored
    b = np.linalg.lstsq(a.T @ pull, pull.T @ error.T.astype(np.float64), rcond=None)[0]
    return a.astype(np.float32), _int8(b.T.astype(np.float32)).T


def compute_correction(
    wanted: Float32, codes: Float32, hessian: Float32, rank: int, dtype: Dtype, grid: Grid
) -> LowRankCorrection:
    """Correct `codes`, the dequantized weight [N, K] on `grid`, towards the `wanted` one; `group` is left empty.

    Raises:
        LinAlgError: as `fit`.
    """
    error, whole = wanted - codes, max(_cost(wanted, hessian), 1e-30)
    a, b = fit(error, hessian, rank, dtype)
    before = _cost(error, hessian) / whole
    more = bits_of(rank, wanted.shape[1], wanted.shape[0], dtype)
    left = _left_by_codes(wanted, hessian, grid, more)
    return LowRankCorrection(
        a, b, "", before, _cost(error - (a @ b).T, hessian) / whole, None if left is None else before * left
    )


def _left_by_codes(wanted: Float32, hessian: Float32, grid: Grid, bits: float) -> float | None:
    """Return what share of an error stays with `bits` more in the codes, by what the next format leaves if rounded."""
    if grid.bits not in _NEXT or grid.trellis:
        return None
    larger = Grid(_NEXT[grid.bits], grid.block_size, grid.symmetric, grid.scale)
    now, then = (_cost(wanted - dequantize(round_to_nearest(wanted, each)), hessian) for each in (grid, larger))
    if not 0 < then < now:
        return None
    return math.exp(math.log(then / now) * bits / (larger.bits - grid.bits))


def _cost(error: Float32, hessian: Float32) -> float:
    return float(np.einsum("nk,nk->", error @ hessian, error, dtype=np.float64))


def _int8(weight: Float32) -> Float32:
    return dequantize(round_to_nearest(weight, INT8))

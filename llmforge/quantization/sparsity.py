"""2:4 sparsity: of every 4 neighbours along the input features, 2 are 0, as NVIDIA's GPUs multiply since SM80.

`sparsegpt` chooses which, and lets the others make up for them: OBS updates column by column on H = Σ x xᵀ, the inverse
Hessian shared by all rows (Frantar and Alistarh 2023, arXiv 2301.00774, algorithm 1; of 4 weights, the two with the
least w² / [H⁻¹]ₖₖ go when their group is reached). Weights are [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP, KEPT = 4, 2
_BLOCK = 128  # columns whose updates are applied to the others together
ATTEMPTS = 6  # to factor a Hessian, each with ten times the damping of the last
Float32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A matrix [N, K] of which 2 of every 4 neighbours are stored: fp32 values [N, K / 2], and which, uint8, alike.

    `lost` is what that costs of the outputs of layers that were pruned together (`output_error`), where it is known.
    """

    values: Float32
    places: NDArray[np.uint8]  # 0 … 3, rising within a group
    lost: float | None = None

    @classmethod
    def of(cls, weight: Float32, kept: NDArray[np.bool_]) -> SparseMatrix:
        """Store those of `weight` that are `kept`, exactly 2 of every 4 neighbours."""
        n, k = weight.shape
        places = np.nonzero(kept.reshape(n, k // GROUP, GROUP))[2].reshape(n, k // KEPT).astype(np.uint8)
        return cls(weight[kept].reshape(n, k // KEPT).astype(np.float32), places)

    def dense(self) -> Float32:
        """Write it out, [N, K]."""
        n, half = self.values.shape
        made = np.zeros((n, half // KEPT, GROUP), np.float32)
        places = self.places.reshape(n, half // KEPT, KEPT).astype(np.int64)
        np.put_along_axis(made, places, self.values.reshape(places.shape), axis=2)
        return made.reshape(n, -1)


def is_sparse(weight: NDArray[Any]) -> bool:
    """Say whether at most 2 of every 4 neighbours along the rows [K, N] of a matrix, or its codes, are not 0."""
    k, n = weight.shape
    return k % GROUP == 0 and bool(((weight != 0).reshape(k // GROUP, GROUP, n).sum(1) <= KEPT).all())


def sparsegpt(weight: Float32, moments: Float32, damping: float) -> tuple[SparseMatrix, float]:
    """Prune a weight [N, K] that reads Σ x xᵀ = `moments` [K, K]; also return the damping that it took.

    Raises:
        ValueError: K is no multiple of 4, or numbers are not finite.
        LinAlgError: the moments cannot be factored, whatever the damping.
    """
    n, k = weight.shape
    if k % GROUP or not (np.isfinite(weight).all() and np.isfinite(moments).all()):
        raise ValueError(
            f"finite numbers in groups of {GROUP} features are needed; the weight has shape {weight.shape}"
        )
    upper, used = _inverse_factor(moments, damping)
    left = weight.astype(np.float32).copy()
    left[:, np.diag(moments) == 0] = 0
    kept = np.zeros((n, k), bool)
    for first in range(0, k, _BLOCK):
        last = min(first + _BLOCK, k)
        own, factor = left[:, first:last], upper[first:last, first:last]
        errors = np.zeros_like(own)
        for column in range(last - first):
            if column % GROUP == 0:
                group = slice(column, column + GROUP)
                cost = np.square(own[:, group] / np.diag(factor)[group])
                chosen = np.argsort(-cost, axis=1, kind="stable")[:, :KEPT]
                np.put_along_axis(kept[:, first:last][:, group], chosen, values=True, axis=1)
            gone = ~kept[:, first + column]
            error = np.where(gone, own[:, column], 0) / factor[column, column]
            own[:, column:] -= np.outer(error, factor[column, column:])
            own[gone, column] = 0
            errors[:, column] = error
        left[:, last:] -= errors @ upper[first:last, last:]
    return SparseMatrix.of(left, kept), used


def magnitude(weight: Float32) -> SparseMatrix:
    """Keep the 2 largest of every 4, as they are."""
    n, k = weight.shape
    size = np.abs(weight).reshape(n, k // GROUP, GROUP)
    kept = np.zeros(size.shape, bool)
    np.put_along_axis(kept, np.argsort(-size, axis=2, kind="stable")[:, :, :KEPT], values=True, axis=2)
    return SparseMatrix.of(weight, kept.reshape(n, k))


def output_error(weight: Float32, other: Float32, moments: Float32) -> float:
    """Return what `other` costs of the outputs of `weight`: tr(E H Eᵀ) / tr(W H Wᵀ)."""
    lost = weight - other
    return float(
        np.einsum("nk,nk->", lost @ moments, lost) / max(np.einsum("nk,nk->", weight @ moments, weight), 1e-30)
    )


def stacked(matrices: Sequence[SparseMatrix]) -> Float32:
    """Write matrices out side by side, as [K, N₁ + N₂ + …]."""
    return np.concatenate([matrix.dense() for matrix in matrices]).T


def _inverse_factor(moments: Float32, damping: float) -> tuple[Float32, float]:
    """Return the upper triangle R with RᵀR = (H + damping·mean(diag H)·I)⁻¹, and the damping that could be factored."""
    hessian = moments.astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    mean = float(np.diag(hessian).mean())
    for attempt in range(ATTEMPTS):
        used = damping * 10**attempt
        try:
            inverse = np.linalg.inv(np.linalg.cholesky(hessian + used * mean * np.eye(len(hessian))))
            # of the inverse LᵀL: its own lower factor, turned round
            return np.linalg.cholesky(inverse.T @ inverse).T.astype(np.float32), used
        except np.linalg.LinAlgError:
            continue
    raise np.linalg.LinAlgError(f"Σ x xᵀ cannot be factored with a damping of {used:g}")

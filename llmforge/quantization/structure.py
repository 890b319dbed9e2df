"""Structured pruning: which heads and channels cost least, and how the others make up for them.

A unit is a KV head with the query heads that read it, or a channel of an MLP: columns of the matrix that alone reads
it, W [N, K], the output projection or the down projection. With H = Σ x xᵀ / tokens of what that matrix reads, and O
the mean g gᵀ of the loss's gradient in its outputs, taking the columns S away, with the best update of all others,
costs

    ½ tr(O W_S ([H⁻¹]_SS)⁻¹ W_Sᵀ)  nats a token, and the others become  W - W_S ([H⁻¹]_SS)⁻¹ [H⁻¹]_S:

(Optimal Brain Surgeon for columns that go together, as in ZipLM, arXiv 2302.04089, and SlimGPT, arXiv 2412.18110, with
O for the identity). They go step by step, each time those of least cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
ATTEMPTS = 6  # to factor a Hessian, each with ten times the damping of the last


@dataclass(frozen=True)
class PrunableHeads:
    """The attention of a layer: parameters of its projections, how many heads, and channels of keys and values."""

    query: str
    key: str
    value: str
    output: str
    count: int
    kv_count: int
    dim: int
    value_dim: int
    unit_parameters: int  # of a KV head and the query heads that read it, in all four matrices

    @property
    def shared(self) -> int:
        """Query heads that read one KV head."""
        return self.count // self.kv_count


@dataclass(frozen=True)
class MlpChannels:
    """The MLP of a layer: parameters of the matrices that make its channels, and of the one that reads them."""

    inner: tuple[str, ...]
    output: str
    count: int
    unit_parameters: int


@dataclass(frozen=True)
class PrunableLayer:
    """A decoder layer, whose parameters begin with `prefix`, "model.layers.0."; what of it may go, or why not."""

    index: int
    prefix: str
    parameters: int  # of its matrices
    heads: PrunableHeads | None
    channels: MlpChannels | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structure:
    """Decoder layers with attention, in their order; `fixed` says why no layer can go as a whole, "" where one can."""

    blocks: tuple[PrunableLayer, ...]
    fixed: str

    @cached_property
    def parameters(self) -> int:
        """Count what the matrices of all layers hold."""
        return sum(block.parameters for block in self.blocks)


@dataclass(frozen=True)
class PrunedStructure:
    """What is left of a decoder: layers that are gone, and by layer the KV heads and the channels that are left."""

    dropped: tuple[int, ...] = ()
    heads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    channels: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def of_heads(self, layer: int) -> tuple[int, ...] | None:
        """Name the KV heads that are left of a layer; None: all."""
        return dict(self.heads).get(layer)

    def of_channels(self, layer: int) -> tuple[int, ...] | None:
        """Name the channels that are left of a layer; None: all."""
        return dict(self.channels).get(layer)


@dataclass(frozen=True)
class PruningStep:
    """Units that go next, and what that adds to the loss, in nats a token."""

    units: tuple[int, ...]
    loss: float


def columns(units: Sequence[int], width: int) -> NDArray[np.intp]:
    """Return the features of units that have `width` each, side by side."""
    return (np.asarray(units, np.intp)[:, None] * width + np.arange(width)).reshape(-1)


def damped(moments: Float32 | Float64, damping: float) -> Float64:
    """Add a share of the mean diagonal to the diagonal of Σ x xᵀ, in fp64, so that it can be factored.

    Where it cannot, the share rises tenfold until it can.

    Raises:
        ValueError: it is zero, or not finite.
        LinAlgError: no share helps.
    """
    hessian = np.asarray(moments, np.float64)
    mean = float(hessian.diagonal().mean())
    if not (np.isfinite(hessian).all() and mean > 0):
        raise ValueError(f"moments must be finite and positive; the mean of their diagonal is {mean:g}")
    for attempt in range(ATTEMPTS):
        made: Float64 = hessian + damping * 10**attempt * mean * np.eye(len(hessian))
        try:
            np.linalg.cholesky(made)
        except np.linalg.LinAlgError:
            continue
        return made
    raise np.linalg.LinAlgError("moments cannot be factored, whatever the damping")


def eliminate(
    weight: Float32, hessian: Float64, outputs: Float32, *, width: int, together: int, least: int
) -> list[PruningStep]:
    """Take units of `width` columns from a weight [N, K], `together` in a step, until `least` or fewer more are left.

    `hessian` [K, K] is damped, `outputs` [N, N]. Losses are as above.
    """
    left = weight.astype(np.float64)
    weighed: Float64 = outputs.astype(np.float64) @ left
    inverse: Float64 = np.linalg.inv(hessian).astype(np.float64)
    units = np.arange(weight.shape[1] // width)
    steps = []
    while len(units) - together >= max(least, 1):
        chosen = np.sort(np.argsort(_costs(left, weighed, inverse, width), kind="stable")[:together])
        gone = columns(chosen.tolist(), width)
        block = inverse[np.ix_(gone, gone)]
        loss = 0.5 * float(np.trace(np.linalg.solve(block, left[:, gone].T @ weighed[:, gone])))
        steps.append(PruningStep(tuple(units[chosen].tolist()), loss))
        stay = np.setdiff1d(np.arange(left.shape[1]), gone)
        move = np.linalg.solve(block, inverse[np.ix_(gone, stay)])
        weighed = weighed[:, stay] - weighed[:, gone] @ move
        left = left[:, stay] - left[:, gone] @ move
        inverse = inverse[np.ix_(stay, stay)] - inverse[np.ix_(stay, gone)] @ move
        units = np.delete(units, chosen)
    return steps


def _costs(left: Float64, weighed: Float64, inverse: Float64, width: int) -> Float64:
    """Return what each unit costs alone."""
    if width == 1:
        alone: Float64 = np.einsum("nk,nk->k", left, weighed) / inverse.diagonal()
        return alone
    parts = (slice(first, first + width) for first in range(0, left.shape[1], width))
    return np.array([np.trace(np.linalg.solve(inverse[p, p], left[:, p].T @ weighed[:, p])) for p in parts])


def compensate(weight: Float32, hessian: Float64, kept: NDArray[np.intp]) -> Float32:
    """Return the weight [N, kept] whose products with the features `kept` are nearest to those of all, on average.

    In least squares, W H_:S (H_SS)⁻¹ for the features S that are kept: what the steps of `eliminate` come to.
    """
    pull = weight.astype(np.float64) @ hessian[:, kept]
    made: Float32 = np.linalg.solve(hessian[np.ix_(kept, kept)], pull.T).T.astype(np.float32)
    return made


def allocate(
    curves: Mapping[tuple[int, str], Sequence[PruningStep]], sizes: Mapping[tuple[int, str], int], target: int
) -> tuple[dict[tuple[int, str], int], float, int]:
    """Choose how many steps each curve, by layer and kind, goes, so that `target` parameters go at the least loss.

    The next step is always that of the least loss for each parameter. Returns steps, the loss they add up to, and how
    many parameters go, fewer than `target` where all curves end. `sizes` are those of a unit.
    """
    taken = dict.fromkeys(curves, 0)
    waiting: list[tuple[float, tuple[int, str]]] = []

    def offer(which: tuple[int, str]) -> None:
        if taken[which] < len(curves[which]):
            step = curves[which][taken[which]]
            heapq.heappush(waiting, (step.loss / (len(step.units) * sizes[which]), which))

    for which in curves:
        offer(which)
    loss, gone = 0.0, 0
    while gone < target and waiting:
        _, which = heapq.heappop(waiting)
        step = curves[which][taken[which]]
        taken[which] += 1
        loss, gone = loss + step.loss, gone + len(step.units) * sizes[which]
        offer(which)
    return taken, loss, gone

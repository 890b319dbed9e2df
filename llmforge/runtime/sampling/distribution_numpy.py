"""Draws of tokens from whole rows (`runtime.sampling.distribution`) in numpy, for where no kernels are compiled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import HEAD

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Indices = NDArray[np.int64]


def further(uniform: float) -> Iterator[float]:
    """Give further random numbers for a token, from its first one: SplitMix64 (Steele, Lea and Flood 2014)."""
    state, every = int(uniform * 2**53), (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & every
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & every
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & every
        yield ((z ^ z >> 31) >> 11) * 2.0**-53


def _rank_within(sums: Sums, uniform: float, wanted: float) -> int:
    """Find the rank that a random number points at, where top-p cuts at `wanted` of running `sums`."""
    end = min(int(sums.searchsorted(wanted)), len(sums) - 1)
    return min(int(sums.searchsorted(uniform * float(sums[end]), side="right")), end)


def _draw_block(logits: Floats, best: float, least: float, temperature: float, min_p: float, uniform: float) -> int:
    weights = _weights(logits, best, temperature, min_p) * ~(logits > least)
    sums = weights.cumsum(dtype=np.float64)
    if not 0 < sums[-1] < np.inf:
        return -1
    return min(int(sums.searchsorted(uniform * float(sums[-1]), side="right")), int(np.flatnonzero(weights)[-1]))


def draw_row(logits: Floats, block: int, draw: tuple[float, float, int, float, float]) -> int:
    """Draw a token from `logits` [V], as `llmforge.native.sampling.draw_row` does."""
    uniform, top_p, top_k, temperature, min_p = draw
    if HEAD < top_k < len(logits):
        tokens = np.sort(largest(logits, top_k))
        return int(tokens[draw_row(logits[tokens], block, (uniform, top_p, 0, temperature, min_p))])
    few = 0 < top_k <= HEAD
    head = largest(logits, top_k if few else HEAD)
    best, least = logits[head[0]], logits[head[-1]]
    weights = _weights(logits[head], best, temperature, min_p)
    sums = weights.cumsum(dtype=np.float64)
    if few or len(head) < HEAD or len(logits) <= HEAD or weights[-1] == 0:
        return int(head[_rank_within(sums, uniform, top_p * float(sums[-1]))])
    above = int(np.count_nonzero(logits[head] > least))
    ahead = float(sums[above - 1]) if above else 0.0
    others = _weights(logits, best, temperature, min_p) * (logits <= least)
    running = np.add.reduceat(others, np.arange(0, len(others), block), dtype=np.float64).cumsum()
    whole = ahead + float(running[-1])
    if top_p < 1 and sums[-1] >= top_p * whole:
        return int(head[_rank_within(sums, uniform, top_p * whole)])
    numbers, beyond = further(uniform), (-np.inf, -len(logits))  # as (logit, -id): the first that is known to be
    while True:
        if uniform * whole < ahead:
            return int(head[sums[:above].searchsorted(uniform * whole, side="right")])
        last = int(running.searchsorted(running[-1]))
        start = block * min(int(running.searchsorted(uniform * whole - ahead, side="right")), last)
        inside = logits[start : start + block]
        token = start + _draw_block(inside, best, least, temperature, min_p, next(numbers))
        rank = (float(logits[token]), -token)
        if top_p >= 1:
            return token
        if rank > beyond:
            before = ahead + float((others * (logits > rank[0])).sum(dtype=np.float64))
            if before + float(others[token]) * int(np.count_nonzero(logits[:token] == rank[0])) < top_p * whole:
                return token
            beyond = rank
        uniform = next(numbers)


def _weights(logits: Floats, best: float, temperature: float, min_p: float) -> Floats:
    """Give probabilities but for a common factor: the most probable token weighs 1, what min-p drops 0."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weights: Floats = logits - np.float32(best)
        if temperature != 1:
            weights /= np.float32(temperature)
        np.exp(weights, out=weights)
    if min_p > 0:
        weights *= weights >= np.float32(min_p)
    return weights


def largest(values: Floats, count: int) -> Indices:
    """Give the indices of the largest, as `llmforge.native.sampling.largest` does."""
    place = max(0, len(values) - count)
    threshold = np.partition(values, place)[place]
    indices = np.flatnonzero(values >= threshold if threshold > -np.inf else values > -np.inf)
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def sum_exponentials(values: Floats, best: float) -> float:
    """Sum e^(x - best) over `values` [n]."""
    with np.errstate(under="ignore"):
        return float(np.exp(values - np.float32(best)).sum(dtype=np.float64))

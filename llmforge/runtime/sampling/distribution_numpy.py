"""Draws of tokens (`llmforge.runtime.sampling.distribution`) in numpy, for installations without compiled kernels.

Written for vocabularies of 150,000 tokens: nothing here sorts or selects over all of them, since numpy takes 1 ms to
partition as many numbers and 4 ms to sort them, but 0.01 ms to compare or to take maxima (one core, AVX-512).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import HEAD

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Indices = NDArray[np.int64]
Records = NDArray[np.void]  # of `llmforge.native.sampling.DRAW`

# How far a device's sum of what lies beyond a head may be from the host's, of itself. Each is off by some 1e-6: fp32
# sums in blocks, exponents of up to some 20, whose last bit is 2e-6, and exp itself, which is wrong in its last bits.
MARGIN = 1e-5
_COLUMN = 128  # numbers of which one is the largest


def further(uniform: float) -> Iterator[float]:
    """Give further random numbers for a token, from its first one: SplitMix64 (Steele, Lea and Flood 2014)."""
    state, every = int(uniform * 2**53), (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & every
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & every
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & every
        yield ((z ^ z >> 31) >> 11) * 2.0**-53


def draw_heads(
    logits: Floats, ids: NDArray[np.int32], masses: Floats, vocabulary: int, draws: Records
) -> tuple[Indices, Indices]:
    """Draw a token from each of some heads, as `llmforge.native.sampling.draw_heads` does."""
    found = np.full((2, len(logits)), -1, np.int64)
    for row in range(len(logits)):
        found[:, row] = _draw_head(logits[row], ids[row], masses[row], len(logits[row]) >= vocabulary, draws[row])
    return found[0], found[1]


def _draw_head(
    logits: Floats, ids: NDArray[np.int32], masses: Floats, all_of_it: bool, how: np.void
) -> tuple[int, int]:
    """Draw from a row: its token, or -1 and its block, or -1 in both."""
    beyond = float(masses.sum(dtype=np.float64))
    if not np.isfinite(beyond) or not np.isfinite(logits[0]):
        return -1, -1
    if how["temperature"] == 0:
        return _token_of_rank(logits, ids, all_of_it, 0), -1
    weights = _weights(logits, logits[0], how["temperature"], how["min_p"])
    few = 0 < how["top_k"] <= HEAD
    complete = few or all_of_it or weights[-1] == 0
    sums = weights[: how["top_k"] if few else None].cumsum(dtype=np.float64)
    uniform, top_p, most = float(how["uniform"]), float(how["top_p"]), float(sums[-1])
    if complete:
        return _token_of_rank(logits, ids, all_of_it, _rank_within(sums, uniform, top_p * most)), -1
    if how["top_k"] > 0 or how["min_p"] > 0:  # they change a sum that nobody took
        return -1, -1
    above = int(np.count_nonzero(logits > logits[-1]))
    ahead, off = float(sums[above - 1]) if above else 0.0, MARGIN * beyond
    whole = ahead + beyond
    if top_p < 1 and most >= top_p * (whole - off):
        ranks = {_rank_within(sums, uniform, top_p * (whole + sign * off)) for sign in (-1, 1)}
        certain = most >= top_p * (whole + off) and len(ranks) == 1
        return (_token_of_rank(logits, ids, all_of_it, ranks.pop()) if certain else -1), -1
    low, high = uniform * (whole - off), uniform * (whole + off)
    if high < ahead:
        first, last = sums[:above].searchsorted([low, high], side="right")
        return (_token_of_rank(logits, ids, all_of_it, int(first)) if first == last else -1), -1
    if top_p < 1 or low < ahead:
        return -1, -1
    target, running = uniform * whole - ahead, masses.cumsum(dtype=np.float64)
    first, last = running.searchsorted([target - 2 * off, target + 2 * off], side="right")
    return -1, (int(first) if first == last < len(masses) else -1)


def _token_of_rank(logits: Floats, ids: NDArray[np.int32], all_of_it: bool, rank: int) -> int:
    """Give the token of a rank; -1: it is one of those that equal the least, and others may follow."""
    if not all_of_it and logits[rank] == logits[-1]:
        return -1
    equals = np.flatnonzero(logits == logits[rank])
    return int(np.sort(ids[equals])[rank - equals[0]])


def _rank_within(sums: Sums, uniform: float, wanted: float) -> int:
    """Find the rank that a random number points at, where top-p cuts at `wanted` of running `sums`."""
    end = min(int(sums.searchsorted(wanted)), len(sums) - 1)
    return min(int(sums.searchsorted(uniform * float(sums[end]), side="right")), end)


def draw_block(logits: Floats, best: float, least: float, draw: Records) -> int:
    """Draw one of `logits` [n] that are at most `least`, as `llmforge.native.sampling.draw_block` does."""
    how = draw[0]
    return _draw_block(logits, best, least, how["temperature"], how["min_p"], next(further(float(how["uniform"]))))


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
    threshold = _threshold(values, count)
    indices = np.flatnonzero(values >= threshold if threshold > -np.inf else values > -np.inf)
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def sum_exponentials(values: Floats, best: float) -> float:
    """Sum e^(x - best) over `values` [n]."""
    with np.errstate(under="ignore"):
        return float(np.exp(values - np.float32(best)).sum(dtype=np.float64))


def _threshold(values: Floats, count: int) -> np.float32:
    """Give a number that at least `count` of `values` [n], and seldom many more, reach: all where there are fewer.

    The values stand in columns, whose maxima are cheap. `count` columns have a value of at least the `count`-th largest
    maximum.
    """
    rows = max(1, min(_COLUMN, len(values) // (4 * count)))
    columns = len(values) // rows
    if count >= columns:
        return np.float32(values.min())
    peaks = values[: rows * columns].reshape(rows, columns).max(axis=0)
    return np.float32(np.partition(peaks, columns - count)[columns - count])

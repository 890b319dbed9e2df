"""Draws from heads of rows, as the compiled kernels are to make them: written out in numpy, a row at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import HEAD
from llmforge.runtime.sampling.distribution_numpy import Floats, Indices, _rank_within, _weights

Records = NDArray[np.void]  # of `llmforge.native.sampling.DRAW`
# How far a device's sum of what lies beyond a head may be from the host's, of itself. Each is off by some 1e-6: fp32
# sums in blocks, exponents of up to some 20, whose last bit is 2e-6, and exp itself, which is wrong in its last bits.
MARGIN = 1e-5


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

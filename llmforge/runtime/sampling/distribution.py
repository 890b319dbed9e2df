"""From logits to a token: truncation of the distribution, a draw from it, and log probabilities.

**The order of a draw.** A token is drawn by inversion: tokens stand in a row, each as wide as its probability, and a
random number points at one. First stand the `HEAD` most probable, by rank, then all others by id. So most draws are
decided by the head and the sum of the whole row, which is all that a device need give back (`draw_of_head`); a row that
is there as a whole gives the same token (`draw`).

Where top-p cuts behind the head, a token of the others that is beyond the cut is drawn again, which gives the same
distribution and needs no cut: one token's rank is found in a twentieth of the time of the cut's.

Written for vocabularies of 150,000 tokens: nothing here sorts or selects over all of them, since numpy takes 1 ms to
partition as many numbers and 4 ms to sort them, but 0.01 ms to compare or to take maxima (one core, AVX-512).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import HEAD, Heads, mass_blocks
from llmforge.runtime.sampling.options import Sampling

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

# How far a device's sum of what lies behind a head may be from the host's, of itself. Each is off by some 1e-6: fp32
# sums in blocks, exponents of up to some 20, whose last bit is 2e-6, and exp itself, which is wrong in its last bits.
MARGIN = 1e-5
_LIMITS = np.finfo(np.float32)
_own = threading.local()  # of each thread that samples: `_scratch`
_BLOCK = 128  # numbers that are summed as one; then the 1,187 sums of a vocabulary of 151,936 are cheap to walk


@dataclass(frozen=True, eq=False)
class Truncations:
    """What B rows of `Heads` are sampled with: fields of `Sampling`, [B] each; temperature 0 is greedy."""

    temperature: Floats
    top_p: NDArray[np.float64]
    top_k: Indices
    min_p: Floats

    @classmethod
    def of(cls, samplings: list[tuple[float, float, int, float]]) -> Truncations:
        """Put together (temperature, top_p, top_k, min_p) of each row."""
        temperature, top_p, top_k, min_p = np.array(samplings, np.float64).reshape(-1, 4).T
        few = np.minimum(top_k, HEAD + 1).astype(np.int64)
        return cls(temperature.astype(np.float32), top_p, few, min_p.astype(np.float32))


def held(temperature: float) -> float:
    """Bring a temperature above 0 to within float32, at whose limits all but the best get -inf, or all get 0."""
    return min(max(temperature, float(_LIMITS.tiny)), float(_LIMITS.max))


class Draws(NamedTuple):
    """What heads decided of B rows: `tokens` [B], and -1 where `blocks` [B] has the block that holds the token.

    -1 in both: the whole row must decide.
    """

    tokens: Indices
    blocks: Indices


def draw_of_heads(heads: Heads, how: Truncations, uniforms: NDArray[np.float64]) -> Draws:
    """Choose a token, or a block, for each row of `heads`.

    `uniforms` [B] in [0, 1): a row's random number, which greedy rows do not use. A token is the one that `draw` gives
    with it, or the first of the largest logits.
    """
    logits, masses = heads.logits, heads.masses.astype(np.float64)
    count, width = logits.shape
    greedy = how.temperature == 0
    blocks = np.full(count, -1, np.int64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        behind = masses.sum(axis=1)
        sane = np.isfinite(behind) & np.isfinite(logits[:, 0])
        if greedy.all():
            return Draws(_tokens(heads, np.zeros(count, np.int64), sane), blocks)
        weights = logits - logits[:, :1]
        weights /= np.where(greedy, np.float32(1), how.temperature)[:, None]
        np.exp(weights, out=weights)
        if how.min_p.any():
            weights *= weights >= how.min_p[:, None]
        complete = weights[:, -1] == 0
        if how.top_k.any():
            few = (how.top_k > 0) & (how.top_k <= width)
            weights[few] *= np.arange(width) < how.top_k[few, None]
            complete |= few
        if heads.whole:
            complete[:] = True
        sums = weights.cumsum(axis=1, dtype=np.float64)
        # Of a row that ends behind its head, what equals the least of it stands with those behind.
        rows, above = np.arange(count), np.count_nonzero(logits > logits[:, -1:], axis=1)
        ahead, most = np.where(above > 0, sums[rows, above - 1], 0.0), sums[:, -1]
        whole, margin = np.where(complete, most, ahead + behind), np.where(complete, 0.0, MARGIN * behind)
        # A row of which the head is a part: min-p and top-k beyond the head change a sum that nobody took.
        sane &= complete | ((how.top_k == 0) & (how.min_p == 0))
        cut = how.top_p < 1
        low, high = how.top_p * (whole - margin), how.top_p * (whole + margin)
        within = complete | (cut & (most >= high))
        sane &= within | ~cut | (most < low)
        # What a random number is a part of: the sum up to the cut, which the margin may leave open; all that is left of
        # a row that ends within its head; or the sum of the row.
        first, last = whole - margin, whole + margin
        end = np.count_nonzero(weights, axis=1) - 1
        if cut.any():
            cuts = [np.minimum(_below(sums, edge), width - 1) for edge in (low, high)]
            end = np.where(cut & within, cuts[1], end)
            first, last = (
                np.where(cut & within, sums[rows, at], edge) for at, edge in zip(cuts, (first, last), strict=True)
            )
        rank = np.minimum(_reached(sums, uniforms * first), end)
        same = complete | (np.minimum(_reached(sums, uniforms * last), end) == rank)
        found = sane & same & (within | (uniforms * last < ahead))
        for row in np.flatnonzero(sane & ~greedy & ~within & ~cut & (uniforms * first >= ahead)).tolist():
            blocks[row] = _block_of(masses[row], float(ahead[row]), uniforms[row])
    return Draws(
        _tokens(heads, np.where(greedy, 0, rank), found | (greedy & np.isfinite(behind) & np.isfinite(logits[:, 0]))),
        blocks,
    )


def _block_of(masses: NDArray[np.float64], ahead: float, uniform: float) -> int:
    """Find the block that a random number points at, behind tokens that weigh `ahead`; -1: the sums do not tell."""
    running = masses.cumsum()
    target, margin = uniform * (ahead + running[-1]) - ahead, 2 * MARGIN * running[-1]
    low, high = running.searchsorted([target - margin, target + margin], side="right")
    return int(low) if low == high < len(masses) else -1


def draw_of_block(heads: Heads, row: int, logits: Floats, temperature: float, uniform: float) -> int:
    """Draw a token of a block, as its number among the `logits` [n]: one that does not stand in a row of `heads`."""
    best, least = heads.logits[row, 0], heads.logits[row, -1]
    return _draw_of_block(logits, best, least, np.float32(temperature), 0.0, uniform)


def _draw_of_block(
    logits: Floats, best: np.float32, least: np.float32, temperature: np.float32, min_p: float, uniform: float
) -> int:
    """Draw the number of one of `logits` [n] that are at most `least`."""
    weights = _weights(logits, best, temperature, min_p)
    weights *= logits <= least
    sums = weights.cumsum(dtype=np.float64)
    return min(int(sums.searchsorted(uniform * float(sums[-1]), side="right")), int(np.flatnonzero(weights)[-1]))


def _below(sums: NDArray[np.float64], wanted: NDArray[np.float64]) -> Indices:
    """Count, in each row of `sums` [B, H], those less than `wanted` [B]."""
    counts: Indices = np.count_nonzero(sums < wanted[:, None], axis=1)
    return counts


def _reached(sums: NDArray[np.float64], wanted: NDArray[np.float64]) -> Indices:
    """Count, in each row of `sums` [B, H], those of at most `wanted` [B]."""
    counts: Indices = np.count_nonzero(sums <= wanted[:, None], axis=1)
    return counts


def _tokens(heads: Heads, ranks: Indices, sane: NDArray[np.bool_]) -> Indices:
    """Give the tokens at some `ranks` [B], -1 where they are not `sane` or not certain.

    Of the least logit of a head, others may lie behind it. Equals before that are ranked by id.
    """
    logits, rows = heads.logits, np.arange(len(ranks))
    width = logits.shape[1]
    ranks = np.minimum(ranks, width - 1)
    values = logits[rows, ranks]
    tokens = np.where(sane, heads.ids[rows, ranks], -1).astype(np.int64)
    if not heads.whole:
        tokens[values == logits[:, -1]] = -1
    before, after = logits[rows, np.maximum(ranks - 1, 0)], logits[rows, np.minimum(ranks + 1, width - 1)]
    tied = ((before == values) & (ranks > 0)) | ((after == values) & (ranks < width - 1))
    for row in np.flatnonzero(tied & (tokens >= 0)).tolist():
        equals = np.flatnonzero(logits[row] == values[row])
        tokens[row] = np.sort(heads.ids[row, equals])[ranks[row] - equals[0]]
    return tokens


def draw(
    logits: Floats, sampling: Sampling, uniform: float, more: Callable[[], float], head: Indices | None = None
) -> int:
    """Draw a token from `logits` [V], which are finite or -inf, not all of them -inf.

    `uniform` in [0, 1) decides, and then what `more` gives, where top-p forbids what it points at. Where equal logits
    stand at the threshold of top-k or top-p, the lower token ids are taken. `head`: the `HEAD` most probable tokens by
    their ranks, where they are known.
    """
    if HEAD < sampling.top_k < len(logits):
        tokens = np.sort(largest(logits, sampling.top_k))
        kept = logits[tokens]
        return int(tokens[_draw(kept, sampling, 0, uniform, more, largest(kept, HEAD))])
    top_k = sampling.top_k if sampling.top_k <= HEAD else 0
    if head is None or top_k:
        head = largest(logits, top_k or HEAD)
    return _draw(logits, sampling, top_k, uniform, more, head)


def known_head(heads: Heads, row: int, logits: Floats) -> Indices | None:
    """Give the tokens of a head by their ranks, if `logits` [V], the whole row, have no other of the least of them."""
    values = heads.logits[row]
    if heads.whole or values[-1] == values[-2] or np.count_nonzero(logits >= values[-1]) != len(values):
        return None
    ids: Indices = heads.ids[row].astype(np.int64)
    if (values[1:] == values[:-1]).any():
        ids = ids[np.lexsort((ids, -values))]
    return ids


def _draw(
    logits: Floats, sampling: Sampling, top_k: int, uniform: float, more: Callable[[], float], head: Indices
) -> int:
    """Draw from `logits` [V], of which `head` are the most probable, the index of one; `top_k` is at most `HEAD`."""
    best, temperature = logits[head[0]], np.float32(held(sampling.temperature))
    weights = _weights(logits[head], best, temperature, sampling.min_p)
    sums = weights.cumsum(dtype=np.float64)
    complete = top_k > 0 or len(head) < HEAD or len(logits) <= HEAD or weights[-1] == 0
    if complete:
        whole = float(sums[-1])
    else:
        every = _weights(logits, best, temperature, sampling.min_p, _scratch(len(logits)))
        least = logits[head[-1]]
        # What equals the least of the head, within it and behind, stands with the others.
        ahead = np.append(0.0, sums[: np.count_nonzero(logits[head] > least)])
        others = every * (logits <= least)
        size = mass_blocks(len(logits))[1]
        blocks = np.add.reduceat(others, np.arange(0, len(others), size), dtype=np.float64)
        running = blocks.cumsum()
        whole = float(ahead[-1] + running[-1])
    wanted, most = sampling.top_p * whole, float(sums[-1])
    if complete or (sampling.top_p < 1 and most >= wanted):
        end = int(sums.searchsorted(wanted)) if sampling.top_p < 1 else int(np.count_nonzero(weights)) - 1
        return int(head[min(int(sums.searchsorted(uniform * float(sums[end]), side="right")), end)])
    filled = np.flatnonzero(blocks)
    allowed, forbidden = (math.inf, -1), (-math.inf, len(logits))  # as (logit, -id): the last, the first that is known
    while True:
        if not len(filled) or uniform * whole < ahead[-1]:
            return int(head[min(int(ahead[1:].searchsorted(uniform * whole, side="right")), len(ahead) - 2)])
        block = min(int(running.searchsorted(uniform * whole - ahead[-1], side="right")), int(filled[-1]))
        start = block * size
        token = start + _draw_of_block(logits[start : start + size], best, least, temperature, sampling.min_p, more())
        rank = (float(logits[token]), -token)
        if wanted >= whole or rank >= allowed:
            return token
        if rank > forbidden:
            level = logits[token]
            before = ahead[-1] + _sum(others * (logits > level))
            before += float(others[token]) * int(np.count_nonzero((logits == level)[:token] & (others[:token] > 0)))
            if before < wanted:
                return token
            forbidden = rank
        uniform = more()


def _scratch(size: int) -> Floats:
    """Give an array of this thread's own: where a server's heap gives memory back, a new one costs its pages anew."""
    held: Floats | None = getattr(_own, "scratch", None)
    if held is None or len(held) < size:
        held = _own.scratch = np.empty(size, np.float32)
    return held[:size]


def _weights(
    logits: Floats, best: np.float32, temperature: np.float32, min_p: float, out: Floats | None = None
) -> Floats:
    """Give probabilities but for a common factor, in `out`: the most probable token weighs 1, what min-p drops 0."""
    weights: Floats = np.subtract(logits, best, out=out)
    with np.errstate(over="ignore", under="ignore"):
        if temperature != 1:
            weights /= temperature
        np.exp(weights, out=weights)
    if min_p > 0:
        weights *= weights >= np.float32(min_p)
    return weights


def largest(values: Floats, count: int) -> Indices:
    """Give the indices of the `count` largest of `values` [n], largest first, lower indices first among equals.

    There are fewer where fewer are above -inf.
    """
    threshold = _threshold(values, count)
    indices = np.flatnonzero(values >= threshold if threshold > -np.inf else values > -np.inf)
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def log_probabilities(logits: Floats, tokens: Indices) -> NDArray[np.float64]:
    """Give the natural log probabilities of some `tokens` [n] in the softmax of `logits` [V]."""
    highest = logits.max()
    with np.errstate(under="ignore"):
        whole = _sum(np.exp(logits - highest))
    return logits[tokens].astype(np.float64) - (float(highest) + math.log(whole))


def _threshold(values: Floats, count: int) -> np.float32:
    """Give a number that at least `count` of `values` [n], and seldom many more, reach: all where there are fewer.

    The values stand in columns, whose maxima are cheap. `count` columns have a value of at least the `count`-th largest
    maximum.
    """
    rows = max(1, min(_BLOCK, len(values) // (4 * count)))
    columns = len(values) // rows
    if count >= columns:
        return np.float32(values.min())
    peaks = values[: rows * columns].reshape(rows, columns).max(axis=0)
    return np.float32(np.partition(peaks, columns - count)[columns - count])


def _block_sums(values: Floats) -> Floats:
    """Sum `values` [n] in blocks of 128 neighbours, the rest last: [ceil(n / 128)]."""
    whole = len(values) // _BLOCK * _BLOCK
    blocks = np.einsum("ij->i", values[:whole].reshape(-1, _BLOCK))  # 3 times faster than sum(axis=1)
    return blocks if whole == len(values) else np.append(blocks, values[whole:].sum())


def _sum(values: Floats) -> float:
    return float(_block_sums(values).sum(dtype=np.float64))

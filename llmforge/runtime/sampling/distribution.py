"""From logits to a token: truncation of the distribution, a draw from it, and log probabilities.

Written for vocabularies of 150,000 tokens: nothing here sorts or selects over all of them, since numpy takes 1 ms to
partition as many numbers and 4 ms to sort them, but 0.01 ms to compare or to take maxima (one core, AVX-512).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llmforge.runtime.sampling.options import Sampling

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_LIMITS = np.finfo(np.float32)
_BLOCK = 128  # numbers that are summed as one; then the 1,187 sums of a vocabulary of 151,936 are cheap to walk
_LIKELY = 64  # tokens that mostly hold the nucleus of a trained model
_SAMPLE, _MARGIN = 2048, 48  # weights that show where the threshold is, and ranks to each side: two deviations of 23
_SORTABLE = 1024  # numbers that may be sorted
_HALVINGS = 24  # of a bracket, in its logarithm: enough to part any two float32; what is left then are equals


def draw(logits: Floats, sampling: Sampling, uniform: float) -> int:
    """Draw a token from `logits` [V] by inversion: `uniform` in [0, 1) decides, tokens stand in order of their ids."""
    tokens, weights = weigh(logits, sampling)
    index = inverse_cdf(weights, uniform)
    return index if tokens is None else int(tokens[index])


def weigh(logits: Floats, sampling: Sampling) -> tuple[Indices | None, Floats]:
    """Give the tokens that are left of `logits` [V], ascending (None: all V), and a weight for each, 0 for none.

    Weights are probabilities but for a common factor: the most probable token weighs 1. Where equal logits stand at the
    threshold of top-k or top-p, the lower token ids are taken. `logits` are finite or -inf, not all of them -inf.
    """
    tokens = None
    # Top-k first: it leaves little to do, and min-p, relative to the best token, keeps the same of what is left.
    if 0 < sampling.top_k < len(logits):
        tokens = np.sort(largest(logits, sampling.top_k))
        logits = logits[tokens]
    # Beyond what float32 can hold, as at its limits, either all but the best get -inf, or all get 0.
    temperature = np.float32(min(max(sampling.temperature, float(_LIMITS.tiny)), float(_LIMITS.max)))
    weights = logits - logits.max()
    with np.errstate(over="ignore", under="ignore"):
        weights /= temperature
        np.exp(weights, out=weights)
    if sampling.min_p > 0:
        weights *= weights >= np.float32(sampling.min_p)
    if sampling.top_p < 1:
        indices = nucleus(weights, logits, sampling.top_p)
        tokens, weights = indices if tokens is None else tokens[indices], weights[indices]
    return tokens, weights


def nucleus(weights: Floats, logits: Floats, top_p: float) -> Indices:
    """Give the indices, ascending, of the fewest largest of `weights` [n] whose sum reaches `top_p` of the whole.

    `logits` [n] put in order what weighs the same.
    """
    whole = _sum(weights)
    wanted = top_p * whole
    likely = _threshold(weights, _LIKELY)
    indices = np.flatnonzero(weights >= likely)
    mass = float(weights[indices].sum(dtype=np.float64))
    if mass >= wanted:
        return np.sort(_until_mass(indices, weights, logits, wanted))
    low, high, above = _nucleus_bracket(weights, whole, wanted, likely, mass)
    inside = np.flatnonzero((weights >= low) & (weights < high))
    kept = weights >= high
    kept[_until_mass(inside, weights, logits, wanted - above)] = True
    return np.flatnonzero(kept)


def _until_mass(indices: Indices, weights: Floats, logits: Floats, wanted: float) -> Indices:
    """Take from `indices`, largest first, up to the first with which the sum of weights is at least `wanted`."""
    indices = indices[np.argsort(-logits[indices], kind="stable")]
    sums = weights[indices].cumsum(dtype=np.float64)
    return indices[: np.searchsorted(sums, wanted) + 1]


def _nucleus_bracket(
    weights: Floats, whole: float, wanted: float, likely: np.float32, mass: float
) -> tuple[np.float32, np.float32, float]:
    """Narrow down where the largest of `weights` [n], of sum `whole`, sum up to `wanted`.

    Those of `likely` and more sum up to `mass`, which is less. Returns `low`, `high`, and the sum of the weights of at
    least `high`: it is less than `wanted`, and with the weights from `low` to `high`, which are few, it is not.
    """
    # All weights below `low` sum up to less than `whole - wanted`: the nucleus is above.
    low, high, above = np.float32(min((whole - wanted) / len(weights), float(likely))), likely, mass
    for bound in _sampled_bracket(weights, likely, (wanted - mass) / (whole - mass)):
        if low < bound < high:
            mass = _sum(weights * (weights >= bound))
            low, high, above = (bound, high, above) if mass >= wanted else (low, bound, mass)
    inside = weights[np.flatnonzero((weights >= low) & (weights < high))]
    for _ in range(_HALVINGS):
        if len(inside) <= _SORTABLE:
            break
        middle = np.sqrt(low * high)
        upper = inside[inside >= middle]
        mass = above + _sum(upper)
        if mass >= wanted:
            low, inside = middle, upper
        else:
            high, above, inside = middle, mass, inside[inside < middle]
    return low, high, above


def _sampled_bracket(weights: Floats, below: np.float32, part: float) -> Floats:
    """Estimate from a sample two close weights between which the largest sum up to `part` of all `below`."""
    sample = weights[:: max(1, len(weights) // _SAMPLE)]
    sample = np.sort(sample[sample < below])[::-1]
    if not len(sample):
        return sample
    rank = int(np.searchsorted(sample.cumsum(dtype=np.float64), part * sample.sum(dtype=np.float64)))
    return sample[[max(0, min(len(sample) - 1, index)) for index in (rank - _MARGIN, rank + _MARGIN)]]


def inverse_cdf(weights: Floats, uniform: float) -> int:
    """Find the index at which the running sum of `weights` [n] exceeds `uniform` of the whole; it never weighs 0."""
    blocks = _block_sums(weights)
    sums = blocks.cumsum(dtype=np.float64)
    target = uniform * sums[-1]
    block = min(int(np.searchsorted(sums, target, side="right")), int(np.flatnonzero(blocks)[-1]))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = sums[block - 1] if block else 0.0
    index = np.searchsorted(inside.cumsum(dtype=np.float64), target - before, side="right")
    # The block's own sum was rounded in another order: the target may stand a rounding error behind its end.
    return block * _BLOCK + min(int(index), int(np.flatnonzero(inside)[-1]))


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

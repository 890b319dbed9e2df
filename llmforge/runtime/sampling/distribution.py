"""From logits to a token: truncation of the distribution, a draw from it, and log probabilities.

**The order of a draw.** A token is drawn by inversion: tokens stand in a row, each as wide as its probability, and a
random number points at one. First stand the `HEAD` most probable, by rank, then the others in blocks of neighbours
(`interface.mass_blocks`), by id; what equals the last of the head stands with the others. Beyond the head a second
number, made of the first, draws within the block. So most draws are decided by the head and the sums of blocks, which
is all that a device need give back (`draw_from_top_logits`), and others by one block (`draw_from_block`); a row that is
there as a whole gives the same token (`draw`).

Where top-p cuts beyond the head, a token of the others that is beyond the cut is drawn again, which gives the same
distribution and needs no cut: one token's rank is found in a fraction of the time of the cut's.

A token takes one random number of its sequence's, whatever is drawn: those after it are made of it. So the number that
a later token will take is known before this one is.

Compiled kernels compute all of it (`llmforge.native.sampling`). Where llmforge was installed without them,
`distribution_numpy` draws from whole rows, much slower, and with an exponential function that differs in the last bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import HEAD, TopLogits, mass_blocks
from llmforge.native import sampling as kernels
from llmforge.runtime.sampling import distribution_numpy
from llmforge.runtime.sampling.options import Sampling

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Records = NDArray[np.void]  # of DRAW

_LIMITS = np.finfo(np.float32)


class Draws(NamedTuple):
    """What heads decided of B rows: `tokens` [B], and -1 where `blocks` [B] has the block that the token stands in.

    -1 in both: the whole row must decide.
    """

    tokens: Indices
    blocks: Indices


def held(temperature: float) -> float:
    """Bring a temperature above 0 to within float32, at whose limits all but the best get -inf, or all get 0."""
    return min(max(temperature, float(_LIMITS.tiny)), float(_LIMITS.max))


def record(sampling: Sampling, uniform: float = 0.0) -> tuple[float, float, int, float, float]:
    """Give the fields of `DRAW` of a token."""
    temperature = held(sampling.temperature) if sampling.temperature else 0.0
    return uniform, sampling.top_p, min(sampling.top_k, 2**62), temperature, sampling.min_p


def draw_from_top_logits(heads: TopLogits, how: Records) -> Draws:
    """Choose a token, or a block, for each row of `heads`, as `how` [B] says; its random numbers are in [0, 1).

    A token is the one that `draw` gives, or the first of the largest logits where the temperature is 0.
    """
    if not kernels.available():
        return Draws(*np.full((2, len(how)), -1, np.int64))
    return Draws(*kernels.draw_heads(heads.logits, heads.ids, heads.masses, heads.vocabulary, how))


def draw_from_block(heads: TopLogits, row: int, logits: Floats, how: Records) -> int:
    """Draw a token of a block, as its number among the `logits` [n]: one that does not stand in a row of `heads`.

    `how`: [1], as of `draw_from_top_logits`. -1: one of them is NaN.
    """
    return kernels.draw_block(logits, float(heads.logits[row, 0]), float(heads.logits[row, -1]), how)


def draw(logits: Floats, sampling: Sampling, uniform: float, head: tuple[TopLogits, int] | None = None) -> int:
    """Draw a token from `logits` [V], which are finite or -inf, not all of them -inf.

    `uniform` in [0, 1) decides. Where equal logits stand at the threshold of top-k or top-p, the lower token ids are
    taken. `head`: the row of heads that is theirs, where there is one.
    """
    block, how = mass_blocks(len(logits))[1], record(sampling, uniform)
    if not kernels.available():
        return distribution_numpy.draw_row(logits, block, how)
    if head is None or head[0].vocabulary <= HEAD:
        return kernels.draw_row(logits, block, how)
    heads, row = head
    return kernels.draw_row(logits, block, how, (heads.logits[row], heads.ids[row], heads.masses[row]))


def second_numbers(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the second random number of each token, with which it is drawn within a block, from its first one [B].

    SplitMix64, as in `native/sampling.inc` and `distribution_numpy.further`.
    """
    with np.errstate(over="ignore"):
        z = (uniforms * 2**53).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((z ^ z >> np.uint64(31)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def largest(values: Floats, count: int) -> Indices:
    """Give the indices of the `count` largest of `values` [n], largest first, lower indices first among equals.

    There are fewer where fewer are above -inf.
    """
    return kernels.largest(values, count) if kernels.available() else distribution_numpy.largest(values, count)


def log_probabilities(logits: Floats, tokens: Indices) -> NDArray[np.float64]:
    """Give the natural log probabilities of some `tokens` [n] in the softmax of `logits` [V]."""
    highest = float(logits.max())
    of = kernels.sum_exponentials if kernels.available() else distribution_numpy.sum_exponentials
    whole = of(logits, highest)
    return logits[tokens].astype(np.float64) - (highest + math.log(whole))

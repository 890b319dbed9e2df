"""What chooses tokens, held to its definition: compiled kernels beside numpy, on rows that nobody can foresee.

No graph has this part of an engine, so that no proof of a pass runs it. Rows are as wide as the vocabulary, and of
random numbers, so that any token may be the largest, or be drawn; one has many equal ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir.interface import HEAD, mass_blocks
from llmforge.native import sampling as kernels
from llmforge.runtime.sampling import distribution, distribution_numpy
from llmforge.runtime.sampling.options import Sampling

# Rows are random, so that a draw falls on any id alike: no more than one of 140 meets a fault in 5 % of them in .6 % of
# builds.
DRAWS = 140
# Draws that the last bit of an exponential function decides, since numpy has another: 1 of 20,000 from 264 logits, none
# of 20,000 from 8,192 and none of 3,000 from 151,936; none of 5,750 proofs was refused.
BY_ROUNDING = 1
_SUM = 1e-5  # relative; sums of 150,000 exponentials differed by 2e-7
_EQUAL = 0.25  # to multiples of which one row is rounded
_LIMITED = (
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=1.0, top_k=4 * HEAD),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.3, min_p=0.05),
)


def require_right(vocabulary: int, seed: int) -> int:
    """Hold the choice of tokens from `vocabulary` logits to its definition; return how many were drawn.

    `seed` draws the rows. Without compiled kernels there is nothing to compare, and none is drawn.

    Raises:
        VerificationError: another token is chosen, or another probability is told.
    """
    if not kernels.available():
        return 0
    random = np.random.default_rng(seed)
    rows = random.standard_normal((2, vocabulary), np.float32)
    rows[1] = np.round(rows[1] / _EQUAL) * _EQUAL
    for row in rows:
        _require_largest(row, random)
        found, exact = (of.sum_exponentials(row, float(row.max())) for of in (kernels, distribution_numpy))
        if not abs(found - exact) <= _SUM * exact:
            raise _wrong(f"the sum of exponentials is {found:.7g}, must be {exact:.7g}")
    block, others = mass_blocks(vocabulary)[1], []
    for number, uniform in enumerate(random.random(DRAWS)):
        how = Sampling(temperature=1.0) if number % 2 else _LIMITED[number // 2 % len(_LIMITED)]
        row, draw = rows[number // 2 % len(rows)], distribution.record(how, float(uniform))
        found, exact = kernels.draw_row(row, block, draw), distribution_numpy.draw_row(row, block, draw)
        if found != exact:
            others.append(f"{uniform:.6g} draws token {found}, must draw {exact} ({how})")
    if len(others) > BY_ROUNDING:
        raise _wrong(f"{len(others)} of {DRAWS} draws are others, the first: {others[0]}")
    return DRAWS


def _require_largest(row: NDArray[np.float32], random: np.random.Generator) -> None:
    for count in (1, int(random.integers(2, HEAD)), HEAD, 4 * HEAD):
        found, exact = (of.largest(row, count) for of in (kernels, distribution_numpy))
        if not np.array_equal(found, exact):
            raise _wrong(f"the {count} largest logits are others")


def _wrong(what: str) -> VerificationError:
    return VerificationError(
        f"the compiled kernels do not choose tokens as defined: {what}",
        hint="install llmforge again; if it happens again, this is a bug in llmforge",
    )

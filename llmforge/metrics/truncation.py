"""Bounds of what logits tell, where a server gives only some log-probabilities of each distribution.

Let p be the reference's distribution of a token and q the served one, K the ids of which both are known, U all others,
and p(U), q(U) what is left of 1. KL(p || q) = Σ_K p ln(p / q) + Σ_U p ln(p / q), of which the second sum is not known.

*From below.* By the log-sum inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1) it is at least
p(U) ln(p(U) / q(U)), which a q in proportion to p reaches. A server that lists the likeliest tokens says more: no other
has more than the least listed one, c. Where p is known in U, the smallest sum over all q ≤ c has
q_i = min(c, λ p_i) with Σ_U q = q(U), the water-filling of a convex programme (Boyd and Vandenberghe, section 5.5.3).

*From above* nothing finite can be said of any softmax: a token whose p is above 0 may have any small q. It takes one
statement from outside, `spread`: no token is more than so many nats below the likeliest one. Then -ln q_i ≤ spread -
ln max q, and the sum over U is at most Σ_U p_i (ln p_i + spread - ln max q).

Both hold for a single token, hence for sums over documents. Where everything is given they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.tokens import Floats

# nats from the likeliest token to the least likely one: at most 55.6 of SmolLM2-135M, 32.3 of docs-llama-7m, 27.9 of
# docs-moe-12m, on 2,048 tokens of documentation each.
SPREAD = 100.0
# What a sum of probabilities may be off by that were rounded to fp32 as logarithms: 2⁻²⁴ of up to 20 nats each.
SLACK = 2e-6

Bounds = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Told:
    """What is told of the distribution of one token: ln p [K] of some of its ids [K].

    Of all others is known that each has `largest_other` at most, a logarithm, and what is left of 1 together.
    """

    ids: NDArray[np.int64]
    logprobs: Floats
    vocabulary: int  # how many ids there are
    largest_other: float = 0.0

    @classmethod
    def of_logits(cls, logits: NDArray[np.float32]) -> Told:
        """Take a whole distribution from its logits [V]."""
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide -= math.log(np.exp(wide).sum())
        return cls(np.arange(len(wide)), wide, len(wide))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return len(self.ids) >= self.vocabulary

    @cached_property
    def left(self) -> float:
        """Probability of all ids that are not told."""
        return 0.0 if self.is_whole else max(0.0, 1.0 - float(np.exp(self.logprobs).sum()))

    @cached_property
    def ceiling(self) -> float:
        """Logarithm of what an id that is not told can have at most."""
        return min(self.largest_other, math.log(self.left + SLACK))

    @cached_property
    def highest(self) -> float:
        """Logarithm of what the likeliest id that is told has."""
        return float(self.logprobs.max()) if len(self.logprobs) else -math.inf

    def floor(self, spread: float) -> float:
        """Logarithm of what every id has at least, where none is more than `spread` below the likeliest."""
        return max(self.highest, math.log(1.0 / self.vocabulary)) - spread

    def of(self, token: int, spread: float) -> Bounds:
        """Bound the log-probability of an id."""
        at = np.flatnonzero(self.ids == token)
        if len(at):
            known = float(self.logprobs[at[0]])
            return known, known
        return self.floor(spread), self.ceiling

    @cached_property
    def tops(self) -> tuple[int, ...]:
        """Ids of which one is the most likely; several, where an id that is not told may be as likely: then with -1.

        Of equal ones the lowest id counts, as in `llmforge.metrics.tokens`.
        """
        best = self.ids[self.logprobs == self.highest]
        if len(best) and (self.is_whole or self.ceiling < self.highest):
            return (int(best.min()),)
        return (*best.tolist(), -1)

    @cached_property
    def dense(self) -> Floats:
        """Log-probabilities by id [V]; NaN of those that are not told."""
        found = np.full(self.vocabulary, math.nan)
        found[self.ids] = self.logprobs
        return found


def kld(reference: Told, served: Told, spread: float = SPREAD) -> Bounds:
    """Bound KL(reference || served) of one token, in nats (module docstring)."""
    size = max(reference.vocabulary, served.vocabulary)
    p, q = (np.pad(each.dense, (0, size - each.vocabulary), constant_values=math.nan) for each in (reference, served))
    both = ~np.isnan(p) & ~np.isnan(q)
    seen = float((np.exp(p[both]) * (p[both] - q[both])).sum())
    if reference.is_whole and served.is_whole and size == served.vocabulary == reference.vocabulary:
        return max(seen, 0.0), max(seen, 0.0)
    hidden = ~both
    told, floor = hidden & ~np.isnan(p), served.floor(spread)
    known = np.exp(p[told])  # of the reference, where the served one is not told
    above = float((known * (p[told] - floor)).sum())
    if reference.is_whole:
        unknown = 0.0
        below = _filled(known, max(0.0, 1.0 - float(np.exp(q[both]).sum())) + SLACK, math.exp(served.ceiling))
    else:
        unknown = reference.left + SLACK
        lowest = min([floor, *q[hidden & ~np.isnan(q)].tolist()])
        above += max(0.0, unknown * (min(reference.ceiling, math.log(unknown)) - lowest))
        below = _log_sum(known.sum() + reference.left, 1.0 - float(np.exp(q[both]).sum()))
    low = max(0.0, seen + below)
    return low, max(low, seen + above)


def sampled_kld(reference: Told, served: Told, token: int, logprob: float) -> float:
    """Estimate KL(reference || served) without bias, where the reference is whole.

    `token` was drawn from the reference, and `logprob` is what the server gives it. With r = q / p of that token,
    Σ_U p ln(p / q) = E[1_U (r - 1 - ln r)] + p(U) - q(U): terms that are never negative, and small where both agree.
    """
    p = reference.dense
    known = served.ids[served.ids < len(p)]
    q = served.logprobs[served.ids < len(p)]
    at = np.exp(p[known])
    found = float((at * (p[known] - q)).sum()) + max(0.0, 1.0 - float(at.sum())) - served.left
    if token in known:
        return found
    moved = logprob - float(p[token])
    return found + math.expm1(moved) - moved


def same_top(reference: Told, served: Told) -> Bounds:
    """Bound whether both have the same most likely token: 0 or 1."""
    ours, theirs = set(served.tops), set(reference.tops)
    can = (
        bool(ours & theirs)
        or (-1 in ours and _may_lead(served, theirs))
        or (-1 in theirs and _may_lead(reference, ours))
    )
    must = len(ours) == len(theirs) == 1 and ours == theirs
    return float(must), float(can)


def _may_lead(told: Told, tops: set[int]) -> bool:
    """Say if one of the ids `tops` may be the most likely though it is not told."""
    return any(each == -1 or each not in told.ids for each in tops)


def _filled(known: Floats, left: float, most: float) -> float:
    """Return the smallest Σ p ln(p / q) over q ≤ `most` that sum to `left` at most, of p [U]: water-filling."""
    if not len(known):
        return 0.0
    capped = np.zeros(len(known), bool)
    while True:
        rest, free = left - most * int(capped.sum()), float(known[~capped].sum())
        if free <= 0 or rest <= 0:
            scale = 0.0
            break
        scale = rest / free
        more = ~capped & (scale * known > most)
        if not more.any():
            break
        capped |= more
    chosen = np.where(capped, most, scale * known)
    counts = known > 0
    if (chosen[counts] <= 0).any():  # no room is left for what rounding put above `left`
        return _log_sum(float(known.sum()), left)
    return float((known[counts] * np.log(known[counts] / chosen[counts])).sum())


def _log_sum(p: float, q: float) -> float:
    """Return the smallest p ln(p / q) of two sums that may be off by `SLACK`."""
    q = max(q, 0.0) + SLACK
    near = (max(p - SLACK, 0.0), p + SLACK, min(max(q / math.e, p - SLACK), p + SLACK))
    return min(each * math.log(each / q) if each > 0 else 0.0 for each in near)

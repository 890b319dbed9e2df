"""How far logits moved, token by token: the values that figures of quality are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError

Floats = NDArray[np.float64]

TOP = 5  # of the most likely tokens, how many are compared

_BLOCK_LOGITS = 2**17  # logits a time: 1 MB of fp64, which stays in a core's L2 cache


@dataclass(frozen=True)
class TokenBlock:
    """Both logits [R, V] of a few predicted tokens `targets` [R], and what several values of a token share.

    Everything but the logits is fp64, in nats, and computed once, when it is first asked for. With p, q the two
    distributions and a, b the logits less their maximum, KL(p || q) = Σ eᵃ(a - b) / Σ eᵃ - ln Σ eᵃ + ln Σ eᵇ, so that
    no log-probability of the whole vocabulary is ever stored.
    """

    reference: NDArray[np.float32]
    logits: NDArray[np.float32]
    targets: NDArray[np.int64]
    ends: Sequence[int] = ()  # ids that end an answer

    @cached_property
    def reference_shifted(self) -> Floats:
        """Logits of the reference less each row's maximum [R, V]."""
        return _shifted(self.reference)

    @cached_property
    def shifted(self) -> Floats:
        """Logits less each row's maximum [R, V]."""
        return _shifted(self.logits)

    @cached_property
    def reference_exp(self) -> Floats:
        """Probabilities of the reference, not normalized [R, V]."""
        return np.exp(self.reference_shifted)

    @cached_property
    def reference_sum(self) -> Floats:
        """Sum of `reference_exp` over the vocabulary [R]."""
        total: Floats = self.reference_exp.sum(-1)
        return total

    @cached_property
    def log_sum(self) -> Floats:
        """Logarithm of the sum of exp(`shifted`) over the vocabulary [R]."""
        total: Floats = np.log(np.exp(self.shifted).sum(-1))
        return total

    @cached_property
    def reference_nll(self) -> Floats:
        """-ln p_reference(true token) [R]."""
        return np.log(self.reference_sum) - self._of_target(self.reference_shifted)

    @cached_property
    def nll(self) -> Floats:
        """-ln p(true token) [R]."""
        return self.log_sum - self._of_target(self.shifted)

    @cached_property
    def kld(self) -> Floats:
        """KL(reference || logits) [R]."""
        moved = self.reference_shifted - self.shifted
        mean: Floats = np.einsum("rv,rv->r", self.reference_exp, moved) / self.reference_sum
        return mean - np.log(self.reference_sum) + self.log_sum

    @cached_property
    def delta_p(self) -> Floats:
        """p(true token) - p_reference(true token), -1 … 1 [R]."""
        return np.exp(-self.nll) - np.exp(-self.reference_nll)

    @cached_property
    def reference_top(self) -> NDArray[np.int64]:
        """The most likely tokens of the reference, the first first [R, TOP]."""
        return _top(self.reference)

    @cached_property
    def top(self) -> NDArray[np.int64]:
        """The most likely tokens, the first first [R, TOP]."""
        return _top(self.logits)

    @cached_property
    def top_shared(self) -> Floats:
        """Share of the most likely tokens that both have, in any order [R]."""
        both = (self.reference_top[:, :, None] == self.top[:, None, :]).any(-1)
        shared: Floats = both.mean(-1)
        return shared

    @cached_property
    def end_shift(self) -> Floats:
        """ln p(an end) - ln p_reference(an end), of all `ends` together [R]."""
        ours = _log_sum(self.shifted[:, self.ends]) - self.log_sum
        theirs = _log_sum(self.reference_shifted[:, self.ends]) - np.log(self.reference_sum)
        return ours - theirs

    def _of_target(self, values: Floats) -> Floats:
        return np.take_along_axis(values, self.targets[:, None], -1)[:, 0]


@dataclass(frozen=True)
class TokenValue:
    """A value of each predicted token; a report keeps its sum over each document under `name`."""

    name: str
    of: Callable[[TokenBlock], NDArray[Any]]  # [R], of floats or of booleans
    of_ends: bool = False  # made only where it is known which tokens end an answer


REFERENCE_NLL = TokenValue("baseline_nll", lambda block: block.reference_nll)
NLL = TokenValue("nll", lambda block: block.nll)
KLD = TokenValue("kld", lambda block: block.kld)
SAME_TOP = TokenValue("same_top", lambda block: block.reference_top[:, 0] == block.top[:, 0])
SHARED_TOP = TokenValue("shared_top", lambda block: block.top_shared)
DELTA_P = TokenValue("delta_p", lambda block: block.delta_p)
DELTA_P_SQUARED = TokenValue("delta_p_squared", lambda block: np.square(block.delta_p))
END_SHIFT = TokenValue("end_shift", lambda block: block.end_shift, of_ends=True)
END_SHIFT_ELSEWHERE = TokenValue(  # 0 of the few tokens that are an end
    "end_shift_elsewhere",
    lambda block: np.where(np.isin(block.targets, block.ends), 0.0, block.end_shift),
    of_ends=True,
)


def score(
    reference: NDArray[np.float32],
    logits: NDArray[np.float32],
    targets: NDArray[np.int64],
    values: Sequence[TokenValue],
    ends: Sequence[int] = (),
) -> dict[str, NDArray[Any]]:
    """Compare two sets of logits [R, V] on the true next tokens `targets` [R], a few rows at a time.

    `ends` are the ids that end an answer. Returns each of `values` [R], by its name. All logits are finite
    (`require_finite`).
    """
    rows = len(targets)
    if reference.shape != logits.shape or logits.shape[:1] != (rows,):
        raise ValueError(f"logits of shapes {reference.shape} and {logits.shape} for {rows} targets")
    found: dict[str, list[NDArray[Any]]] = {value.name: [] for value in values}
    step = max(1, _BLOCK_LOGITS // logits.shape[-1])
    for low in range(0, rows, step):
        part = slice(low, low + step)
        block = TokenBlock(reference[part], logits[part], targets[part], ends)
        for value in values:
            found[value.name].append(value.of(block))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def mean_kld(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Average KL(reference || logits) over all rows of two logit arrays [..., V], in nats a token.

    Raises:
        VerificationError: a logit is NaN or infinite.
    """
    vocabulary = logits.shape[-1]
    reference, logits = reference.reshape(-1, vocabulary), logits.reshape(-1, vocabulary)
    require_finite("reference", reference)
    require_finite("compared", logits)
    scores = score(reference, logits, np.zeros(len(logits), np.int64), (KLD,))
    return float(scores[KLD.name].mean())


def require_finite(what: str, logits: NDArray[np.float32], where: str = "") -> None:
    """Refuse logits [R, V] that hold NaN or an infinity; `what` names the side and `where` the place.

    Raises:
        VerificationError: a logit is NaN or infinite.
    """
    finite = np.isfinite(logits)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise VerificationError(
            f"{what} logits hold {int((~finite).sum())} values that are not finite{where and ' in ' + where}, "
            f"the first ({logits[row, column]}) at row {row}, token id {column}",
            hint="check for overflow in the weights or in the last pass",
        )


def _top(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Find the `TOP` largest of each row of finite logits [R, V], of equal ones the lowest ids; all of a smaller V.

    So many passes for the largest take a tenth of the time of a partial sort.
    """
    left, rows, found = logits.copy(), np.arange(len(logits)), []
    for _ in range(min(TOP, logits.shape[-1])):
        largest = left.argmax(-1)
        left[rows, largest] = -np.inf
        found.append(largest)
    return np.stack(found, 1)


def _log_sum(shifted: Floats) -> Floats:
    """Return ln Σ exp of each row [R, E]; a number far below 0 is no underflow."""
    highest = shifted.max(-1)
    total: Floats = highest + np.log(np.exp(shifted - highest[:, None]).sum(-1))
    return total


def _shifted(logits: NDArray[np.float32]) -> Floats:
    """Widen logits to fp64 and move each row's maximum to 0."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide

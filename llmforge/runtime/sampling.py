"""How the next token is chosen: greedy, or drawn from a truncated distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmforge.errors import InputError, UsageError


@dataclass(frozen=True)
class Sampling:
    """What a caller may choose about an answer.

    `temperature` 0 is greedy; otherwise logits are divided by it, then cut to the `top_k` largest (0: all), then to
    the smallest set of tokens whose probability reaches `top_p` (Holtzman et al. 2020). Equal seeds give equal
    answers. Generation ends at `max_tokens` (None: where the context ends), at an end-of-sequence token (unless
    `ignore_eos`) or before one of the `stop` strings.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature {self.temperature}: wanted a finite number, 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}: wanted more than 0, at most 1 (1: all tokens)")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k}: wanted 0 (all tokens) or more")
        if self.seed < 0:
            raise UsageError(f"seed {self.seed}: wanted 0 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens {self.max_tokens}: wanted 1 or more")
        if not all(self.stop):
            raise UsageError("an empty stop string would end every answer before it begins")


GREEDY = Sampling()


class Sampler:
    """Chooses tokens for the rows of a batch; each row draws from its own seeded stream.

    So a row's tokens do not depend on what runs beside it.
    """

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self._samplings = tuple(samplings)
        self._streams = [np.random.default_rng(sampling.seed) for sampling in samplings]

    def choose(self, logits: NDArray[np.float32], rows: Sequence[int]) -> list[int]:
        """Choose one token for each of `rows` from `logits` [B, V]; a sampled row takes one number of its stream.

        Raises:
            InputError: the logits of a row are NaN or infinite, which no intact engine yields.
        """
        best = logits.argmax(axis=1)  # the first NaN where there is one
        for row in rows:
            if not np.isfinite(logits[row, best[row]]):
                raise InputError(f"the engine gave logits that are not finite, for row {row}")
        return [
            int(best[row])
            if self._samplings[row].temperature == 0
            else draw(logits[row], self._samplings[row], self._streams[row].random())
            for row in rows
        ]


def draw(logits: NDArray[np.float32], sampling: Sampling, uniform: float) -> int:
    """Draw a token from `logits` [V] by inversion: `uniform` in [0, 1) decides."""
    candidates, probabilities = distribution(logits, sampling)
    cumulative = probabilities.cumsum()
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def distribution(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Give the tokens that may be drawn from `logits` [V], in ascending order, and their probabilities.

    Where equal logits stand on the border of top-k or top-p, the lower token ids are taken.
    """
    scaled = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        scaled /= sampling.temperature
    tokens = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        border = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        tokens = tokens[logits >= border]  # with every token that equals the border
        order = np.argsort(-logits[tokens], kind="stable")
        tokens = np.sort(tokens[order[: sampling.top_k]])
    probabilities = np.exp(scaled[tokens])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        # All tokens below (1 - p) / n weigh less than 1 - p together: none of them is in the nucleus, none is sorted.
        likely = np.flatnonzero(probabilities >= (1 - sampling.top_p) / len(tokens))
        order = likely[np.argsort(-logits[tokens][likely], kind="stable")]  # logits tell apart what exp rounds to one
        before = probabilities[order].cumsum() - probabilities[order]
        kept = np.sort(order[before < sampling.top_p])
        tokens, probabilities = tokens[kept], probabilities[kept] / probabilities[kept].sum()
    return tokens, probabilities

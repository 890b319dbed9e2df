"""Chooses the tokens of answers, each from its own state: what was said before, a stream of numbers, a constraint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.base.errors import InputError, UsageError
from llmforge.runtime.sampling.constraints import Constraints, ConstraintState
from llmforge.runtime.sampling.distribution import draw, largest, log_probabilities
from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.sampling.penalties import Penalties
from llmforge.runtime.serving.request import TokenLogprob


class Choice(NamedTuple):
    """A chosen token, and its log probability if the caller wants it."""

    token: int
    logprob: TokenLogprob | None = None


class TokenChooser:
    """Chooses the tokens of one answer, in the order of `Sampling`'s steps.

    `stops` end the answer: end-of-sequence tokens (unless they are ignored) and the caller's own.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], stops: Iterable[int], constraint: ConstraintState | None = None
    ) -> None:
        self.sampling = sampling
        self.stops = frozenset(stops)
        self._stops = np.array(sorted(self.stops), np.int64)
        self._made = 0
        self._stream = np.random.default_rng(sampling.seed)
        self._constraint = constraint
        self._penalties = Penalties(sampling, prompt)
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._as_they_are = (
            constraint is None and not self._penalties.needed and not sampling.logit_bias and not sampling.min_tokens
        )
        # Greedy, nothing changes the logits, nobody asks for their probabilities: the largest logit is all there is.
        self.plain = self._as_they_are and sampling.temperature == 0 and sampling.logprobs is None

    def ends(self, token: int) -> bool:
        """Say whether the answer ends with `token`."""
        return token in self.stops

    def choose(self, logits: NDArray[np.float32]) -> Choice:
        """Choose the next token of the answer from `logits` [V], which stay as they are.

        A sampled token takes one number of the answer's stream.

        Raises:
            InputError: logits are NaN or infinite, which no intact engine yields; or -inf for all that may come next.
            UnsupportedError: the constraint became too large at this point of the answer.
        """
        best = int(logits.argmax())  # the first NaN where there is one
        if not math.isfinite(logits[best]):
            raise InputError("the engine gave logits that are not finite")
        if self.plain:
            return Choice(best)
        sampling = self.sampling
        adjusted = logits if self._as_they_are else self._adjust(logits)
        token = int(adjusted.argmax())
        if adjusted[token] == -np.inf:
            raise InputError("the engine gave logits of -inf to every token that may come next")
        if sampling.temperature > 0:
            token = draw(adjusted, sampling, self._stream.random())
        self._take(token)
        return Choice(token, None if sampling.logprobs is None else _logprob(logits, token, sampling.logprobs))

    def accept(self, logits: NDArray[np.float32], draft: Sequence[int]) -> list[Choice]:
        """Choose tokens from `logits` [k + 1, V] for as long as they are those of `draft` [k], and one more.

        Row i of `logits` follows the answer so far and the first i tokens of the draft. Each token is chosen as
        `choose` would, from its own row, with the answer's next number; the draft only says whether the row after it
        can be used. So the tokens are those that would come without a draft, under any sampling. A drafted token stands
        with the probability that the model gives it, as in speculative sampling from a draft that is certain (Leviathan
        et al. 2023). Nothing follows a token that ends the answer. A draft that would pass `max_tokens` must be cut.
        """
        choices: list[Choice] = []
        for row, drafted in zip(logits, [*draft, None], strict=True):
            choices.append(self.choose(row))
            if choices[-1].token != drafted or self.ends(choices[-1].token):
                break
        return choices

    def _adjust(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Give a copy of `logits` [V] with steps 2 to 6 applied."""
        adjusted = logits.copy() if self._constraint is None else logits + self._constraint.penalty()
        if self._made < self.sampling.min_tokens:
            ends = adjusted[self._stops]
            adjusted[self._stops] = -np.inf
            if adjusted.max() == -np.inf:  # a constraint that allows nothing else
                adjusted[self._stops] = ends
        adjusted[self._biased] += self._bias
        if self._penalties.needed:
            self._penalties.apply(adjusted)
        return adjusted

    def _take(self, token: int) -> None:
        self._made += 1
        if self._penalties.needed:
            self._penalties.take(token)
        if self._constraint is not None:
            self._constraint.take(token)


class Choosers:
    """Starts the chooser of each answer for one model: it knows the vocabulary, the tokens that end, the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._constraints = Constraints(tokenizer, vocabulary, eos_token_ids)

    def start(self, sampling: Sampling, prompt: Sequence[int]) -> TokenChooser:
        """Start an answer to `prompt`. Any thread may call it; a constraint that is new takes milliseconds to seconds.

        Raises:
            UsageError: a token id is outside of the vocabulary, or the constraint does not compile.
            UnsupportedError: answers of this model cannot be constrained.
            EnvironmentLacks: there is a constraint, and its library is not installed.
        """
        biased = (token for token, _ in sampling.logit_bias)
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
            for token in tokens:
                if token >= self._vocabulary:
                    raise UsageError(f"{name}: token id {token}; the vocabulary has {self._vocabulary}")
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        constraint = None if sampling.constraint is None else self._constraints.start(sampling.constraint)
        return TokenChooser(sampling, prompt, stops, constraint)


def _logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Read the log probability of `token` and of the `count` most probable tokens from the model's own logits [V]."""
    best = largest(logits, count) if count else np.empty(0, np.int64)
    own, *top = log_probabilities(logits, np.append(token, best)).tolist()
    return TokenLogprob(token, own, tuple(zip(best.tolist(), top, strict=True)))

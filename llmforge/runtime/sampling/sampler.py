"""Samples the tokens of sequences, each from its own state: tokens before, random numbers, a constraint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.base.errors import InputError, UsageError
from llmforge.ir.interface import GREEDY, HEAD, TopLogits, mass_blocks
from llmforge.native import sampling as kernels
from llmforge.native.sampling import DRAW
from llmforge.runtime.sampling.constraints import ConstraintCompiler, ConstraintState, TriggeredState
from llmforge.runtime.sampling.distribution import (
    draw,
    draw_from_block,
    draw_from_top_logits,
    held,
    largest,
    log_probabilities,
    record,
    second_numbers,
)
from llmforge.runtime.sampling.options import Sampling


class Penalties:
    """Counts the tokens of one sequence, and lowers their logits: repetition, frequency, presence (see `Sampling`)."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self.needed = penalties != (1, 0, 0)
        seen = np.unique(np.asarray(prompt, np.int64)) if sampling.repetition_penalty != 1 else np.empty(0, np.int64)
        self._index_of = {int(token): index for index, token in enumerate(seen)}
        self._size = len(seen)  # of the arrays below, which grow ahead of need
        self._tokens = seen
        self._counts = np.zeros(len(seen), np.float32)  # of generated tokens: 0 for those of the prompt alone

    def count(self, token: int) -> None:
        """Count one more generated token."""
        index = self._index_of.setdefault(token, self._size)
        if index == self._size:
            if self._size == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * self._size + 64)
                self._counts = np.resize(self._counts, 2 * self._size + 64)
            self._tokens[index], self._counts[index] = token, 0
            self._size += 1
        self._counts[index] += 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change `logits` [V] in place."""
        tokens, counts = self._tokens[: self._size], self._counts[: self._size]
        values = logits[tokens]
        repetition = np.float32(self._sampling.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(self._sampling.frequency_penalty) * counts
        values -= np.float32(self._sampling.presence_penalty) * (counts > 0)
        logits[tokens] = values


# Fetches one block of each of some rows, fp32 [n, size]: of rows of heads, and the numbers of their blocks.
FetchBlocks = Callable[[list[int], list[int]], NDArray[np.float32]]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural, of the model's own distribution at temperature 1) of a token, and of the best ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the `Sampling.logprobs` most probable, best first


class SampledToken(NamedTuple):
    """A token, and its log probability if the caller wants it."""

    token: int
    logprob: TokenLogprob | None = None


class TokenSampler:
    """Samples the tokens of one sequence, in the order of `Sampling`'s steps.

    `stop_tokens` end the sequence: end-of-sequence tokens (unless they are ignored) and the caller's own.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        stop_tokens: Iterable[int],
        constraint: ConstraintState | TriggeredState | None = None,
    ) -> None:
        self.sampling = sampling
        self._stop_tokens = frozenset(stop_tokens)
        self._stop_ids = np.array(sorted(self._stop_tokens), np.int64)
        self._generated = 0
        self._rng = np.random.default_rng(sampling.seed)
        self._uniforms: deque[float] = deque()  # of the next tokens, that were taken
        self._constraint = constraint
        self._penalties = Penalties(sampling, prompt)
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._thinking = sampling.thinking is not None and sampling.thinking.begun
        self._thought = 0  # tokens
        self._raw_logits = (
            constraint is None and not self._penalties.needed and not sampling.logit_bias and not sampling.min_tokens
        ) and sampling.thinking is None
        # Nothing changes the logits, nobody asks for their probabilities: most tokens are decided by a head of the row,
        self.head_only = self._raw_logits and sampling.logprobs is None
        self.argmax_only = self.head_only and sampling.temperature == 0  # and greedy ones by the largest logit.
        self.temperature = held(sampling.temperature) if sampling.temperature else 0.0
        self.record = np.array([record(sampling)], DRAW).tobytes()  # without its random number

    def is_stop(self, token: int) -> bool:
        """Say whether the sequence ends with `token`."""
        return token in self._stop_tokens

    def sample(self, logits: NDArray[np.float32], head: tuple[TopLogits, int] | None = None) -> SampledToken:
        """Sample the next token of the sequence from `logits` [V], which stay as they are.

        `head`: the row of heads that is theirs, if there is one; then less is computed anew.

        Unless it is greedy, this takes a random number of the sequence's own.

        Raises:
            InputError: logits are NaN or infinite, which no intact engine yields; or -inf for all that may come next.
            UnsupportedError: the constraint became too large at this token.
        """
        sampling, processed = self.sampling, logits
        if head is not None and self._raw_logits and sampling.temperature > 0 and head[0].is_finite(head[1]):
            return self._draw(logits, logits, head)
        token = int(logits.argmax())  # the first NaN where there is one
        if not math.isfinite(logits[token]):
            raise InputError("the engine returned NaN or infinite logits")
        if self.argmax_only:
            return SampledToken(token)
        if not self._raw_logits:
            processed = self._process(logits)
            token = int(processed.argmax())
        if processed[token] == -np.inf:
            raise InputError("the engine returned -inf for every allowed token")
        if sampling.temperature > 0:
            return self._draw(processed, logits, None)
        return self._sampled(token, logits)

    def _draw(
        self, processed: NDArray[np.float32], logits: NDArray[np.float32], head: tuple[TopLogits, int] | None
    ) -> SampledToken:
        """Draw from what has become of `logits`, with a random number."""
        token = draw(processed, self.sampling, self.next_uniform(), head)
        self._uniforms.popleft()
        return self._sampled(token, logits)

    def _sampled(self, token: int, logits: NDArray[np.float32]) -> SampledToken:
        self._advance(token)
        wanted = self.sampling.logprobs
        return SampledToken(token, None if wanted is None else _logprob(logits, token, wanted))

    def next_uniform(self, ahead: int = 0) -> float:
        """Give the random number that decides about the next token, or about one so many tokens `ahead` of it."""
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._rng.random())
        return self._uniforms[ahead]

    def take(self, token: int) -> SampledToken:
        """Take the token that a head of the row decided."""
        if self._uniforms:
            self._uniforms.popleft()
        self._generated += 1
        return SampledToken(token)

    def _process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Give a copy of `logits` [V] with steps 2 to 6 applied."""
        mask = None if self._constraint is None else self._constraint.mask()
        processed = logits.copy() if mask is None else logits + mask
        budget = self.sampling.thinking
        if budget is not None and self._thinking and self._thought >= budget.tokens:
            kept, processed[:] = processed[budget.end], -np.inf
            processed[budget.end] = kept
        if self._generated < self.sampling.min_tokens:
            stops = processed[self._stop_ids]
            processed[self._stop_ids] = -np.inf
            if processed.max() == -np.inf:  # a constraint that allows nothing else
                processed[self._stop_ids] = stops
        processed[self._biased] += self._bias
        if self._penalties.needed:
            self._penalties.apply(processed)
        return processed

    def _advance(self, token: int) -> None:
        budget = self.sampling.thinking
        if budget is not None:
            self._thinking = token != budget.end and (self._thinking or (not self._generated and token == budget.begin))
            self._thought += self._thinking and token != budget.begin
        self._generated += 1
        if self._penalties.needed:
            self._penalties.count(token)
        if self._constraint is not None:
            self._constraint.advance(token)


def sample_top_logits(
    samplers: Sequence[TokenSampler], heads: TopLogits, fetch: FetchBlocks
) -> list[SampledToken | None]:
    """Sample the next token of each sequence from its row of `heads`, and what `fetch` fetches, all at once.

    None: `TokenSampler.sample` must have the whole row; then it gives the token that it would give without this.
    """
    how = np.frombuffer(bytearray().join([sampler.record for sampler in samplers]), DRAW)
    how["uniform"] = [s.next_uniform() if s.temperature and s.head_only else 0.0 for s in samplers]
    tokens, blocks = draw_from_top_logits(heads, how)
    beyond = [row for row in np.flatnonzero(blocks >= 0).tolist() if samplers[row].head_only]
    if beyond:
        chosen, size = blocks[beyond].tolist(), mass_blocks(heads.vocabulary)[1]
        for row, block, logits in zip(beyond, chosen, fetch(beyond, chosen), strict=True):
            token = draw_from_block(heads, row, logits, how[row : row + 1])
            tokens[row] = block * size + token if token >= 0 else -1
    return [
        sampler.take(token) if token >= 0 and sampler.head_only else None
        for sampler, token in zip(samplers, tokens.tolist(), strict=True)
    ]


def guesses(samplers: Sequence[TokenSampler], ahead: Sequence[int]) -> NDArray[np.float32]:
    """Give what a device guesses a token of each sequence with (`interface.Draw`), fp32 [B, fields].

    `ahead` [B]: 0 for its next token, 1 for the one after that.
    """
    how = np.frombuffer(bytearray().join([sampler.record for sampler in samplers]), DRAW)
    uniforms = np.array([s.next_uniform(n) if s.temperature else 0.0 for s, n in zip(samplers, ahead, strict=True)])
    made = np.tile(np.array(GREEDY, np.float32), (len(samplers), 1))
    drawn = how["temperature"] > 0
    kept = np.where((how["top_k"] > 0) & (how["top_k"] < HEAD), how["top_k"], HEAD)
    beyond = (how["top_k"] == 0) & (how["min_p"] == 0)
    columns = (uniforms, second_numbers(uniforms), how["top_p"], kept, how["min_p"], beyond)
    made[drawn] = np.stack([each.astype(np.float32) for each in columns], axis=1)[drawn]
    return made


class Samplers:
    """Makes the sampler of each sequence of one model, whose vocabulary, stop tokens and tokenizer it knows."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._constraints = ConstraintCompiler(tokenizer, vocabulary, eos_token_ids)

    @property
    def notes(self) -> tuple[str, ...]:
        """What sampling does without, and why."""
        return () if kernels.available() else ("tokens are drawn by numpy: the kernels are not compiled here",)

    def start(self, sampling: Sampling, prompt: Sequence[int]) -> TokenSampler:
        """Make the sampler of a sequence that begins with `prompt`. Any thread may call it.

        A constraint that is new takes milliseconds to seconds.

        Raises:
            UsageError: a token id is outside of the vocabulary, or the constraint does not compile.
            UnsupportedError: sequences of this model cannot be constrained.
            EnvironmentLacks: there is a constraint, and its library is not installed.
        """
        biased = (token for token, _ in sampling.logit_bias)
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
            for token in tokens:
                if token >= self._vocabulary:
                    raise UsageError(f"{name}: token id {token}; the vocabulary has {self._vocabulary}")
        stop_tokens = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        constraint = None if sampling.constraint is None else self._constraints.start(sampling.constraint)
        return TokenSampler(sampling, prompt, stop_tokens, constraint)


def _logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Read the log probability of `token` and of the `count` most probable tokens from the model's own logits [V]."""
    best = largest(logits, count) if count else np.empty(0, np.int64)
    own, *top = log_probabilities(logits, np.append(token, best)).tolist()
    return TokenLogprob(token, own, tuple(zip(best.tolist(), top, strict=True)))

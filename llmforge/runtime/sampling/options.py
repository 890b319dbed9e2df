"""Options of sampling: how tokens are sampled, and where the generated text ends."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint

MOST_LOGPROBS = 20  # as OpenAI's `top_logprobs`
MOST_ANSWERS = 128  # as OpenAI's `n`
# Every token of every sequence is searched for them by the one thread that serves all.
MOST_STOPS, LONGEST_STOP = 64, 1024


@dataclass(frozen=True)
class ThinkingBudget:
    """How many `tokens` a sequence may think: then the token `end` is the only one that may come.

    It thinks from its first token on where its prompt ended with the token `begin` (`begun`), else if that is its first
    token.
    """

    tokens: int
    begin: int
    end: int
    begun: bool

    def __post_init__(self) -> None:
        _within("thinking_token_budget", self.tokens, 0, math.inf, "0 or more")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are sampled, and where it ends. Every default leaves the model as it is.

    A token is sampled in this order, which is that of vLLM's sampler (`vllm/v1/sample/sampler.py`):

    1. `logprobs` are read from the model's own logits: temperature 1, nothing applied (None: none are given; 0: that of
       the sampled token; N: also the N most probable).
    2. `constraint` forbids what would leave its grammar, and the end where the grammar is not complete; `thinking`
       forbids all but the end of thoughts where they have had their tokens.
    3. `min_tokens` forbids end-of-sequence and `stop_token_ids` until so many tokens are made. Where a constraint
       allows nothing but the end, the sequence ends.
    4. `logit_bias`, pairs of a token id and a number from -100 to 100, is added to the logits (OpenAI).
    5. `repetition_penalty` divides positive logits, and multiplies negative ones, of every token in the prompt or the
       output (CTRL: Keskar et al. 2019, section 4.1, in the form of Hugging Face transformers); 1 is none.
    6. `frequency_penalty` times the count of a token in the output, and `presence_penalty` if it is there at all, are
       subtracted (OpenAI; the prompt does not count); 0 is none.
    7. `temperature` 0 takes the largest logit, the lowest id among equals. Else logits are divided by it, and
    8. `min_p` drops tokens less probable than so large a part of the most probable one's (Nguyen et al. 2024),
    9. `top_k` keeps so many of the most probable (0: all; Fan et al. 2018),
    10. `top_p` keeps the fewest of the most probable whose share of what is left reaches it (Holtzman et al. 2020),
    11. and one token is drawn from the rest with a random number of the sequence's own, which `seed` starts.

    Equal seeds give equal outputs, whatever else runs. A sequence ends at an end-of-sequence token (unless
    `ignore_eos`), at one of `stop_token_ids`, before one of the `stop` strings (after it with `include_stop`; strings
    that are complete within the first `min_tokens` tokens do not count), or at `max_tokens` (None: where the context
    ends).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, math.inf, "a finite number, 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}: expected more than 0, at most 1 (1: all tokens)")
        _within("top_k", self.top_k, 0, math.inf, "0 (all tokens) or more")
        _within("min_p", self.min_p, 0, 1, "0 (all tokens) to 1")
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100, "0.01 to 100 (1: none)")
        _within("presence_penalty", self.presence_penalty, -2, 2, "-2 to 2 (0: none)")
        _within("frequency_penalty", self.frequency_penalty, -2, 2, "-2 to 2 (0: none)")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise UsageError("logit_bias: duplicate token id")
        for token, bias in self.logit_bias:
            _within("logit_bias: token id", token, 0, math.inf, "0 or more")
            _within(f"logit_bias of token {token}:", bias, -100, 100, "-100 to 100")
        _within("seed", self.seed, 0, math.inf, "0 or more")
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, math.inf, "1 or more")
        _within("min_tokens", self.min_tokens, 0, math.inf, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens}: expected at most max_tokens, which is {self.max_tokens}")
        if not all(self.stop):
            raise UsageError("stop: strings must not be empty")
        if len(self.stop) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in self.stop):
            raise UsageError(f"stop: expected at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters")
        for token in self.stop_token_ids:
            _within("stop_token_ids:", token, 0, math.inf, "0 or more")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}")
        if self.constraint is not None and self.ignore_eos:
            raise UsageError("ignore_eos cannot be used with a constraint")

    def repeated(self, n: int) -> tuple[Sampling, ...]:
        """Give the sampling of each of `n` outputs of a prompt: the first keeps the seed, the others get derived ones.

        Raises:
            UsageError: `n` is not 1 to 128.
        """
        _within("n", n, 1, MOST_ANSWERS, f"1 to {MOST_ANSWERS}")
        others = (np.random.SeedSequence((self.seed, i)).generate_state(1, np.uint64)[0] for i in range(1, n))
        return (self, *(dataclasses.replace(self, seed=int(seed)) for seed in others))


def _within(name: str, value: float, low: float, high: float, wanted: str) -> None:
    """Refuse a value outside of [low, high], NaN, and infinity."""
    if not (low <= value <= high and value < math.inf):
        raise UsageError(f"{name} {value}: expected {wanted}")


GREEDY = Sampling()

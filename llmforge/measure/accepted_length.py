"""How many tokens a step of the decoder gives where drafts are verified: reckoned of answers that are there.

A greedy answer is the same with drafts and without, so that which drafts would have stood follows from its tokens: no
clock and no other work on the machine are in it, and it is reckoned of the checkpoint's answers as of an artifact's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmforge.measure.load.speculation import speedup
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.intervals import Estimate
from llmforge.runtime.config import SpeculationFacts
from llmforge.serving.drafting import speculation_of
from llmforge.serving.engine import Engine
from llmforge.serving.interface import EngineOptions
from llmforge.serving.runner import Runner
from llmforge.serving.speculation import Proposer

METHODS: tuple[Literal["prompt-lookup", "draft"], ...] = ("prompt-lookup", "draft")  # that draft of tokens alone
TIMED, TIMED_TOKENS = 12, 48  # chats that are timed with drafts and without, and tokens of each


@dataclass(frozen=True)
class Drafting:
    """What drafts tokens of texts, as an artifact is built, and how many at once."""

    proposer: Proposer
    max_tokens: int
    method: str

    @classmethod
    def of(cls, runner: Runner) -> Drafting | str | None:
        """Give what drafts for an artifact; None: nothing does; a text: why it cannot be said what would stand."""
        facts: SpeculationFacts | None = runner.config.speculation
        if facts is None:
            return None
        if facts.method not in METHODS:
            return f"drafts of {facts.method} follow from more than an answer's tokens"
        speculation = speculation_of(runner, rows=1)
        assert speculation is not None
        return cls(speculation.proposer, speculation.max_tokens, facts.method)

    def accepted_length(self, prompt: Sequence[int], answer: Sequence[int]) -> float | None:
        """Give the tokens of an answer, after its first, that a step gives; None: it has no second token."""
        taken = [tokens for tokens, _ in self.steps(prompt, answer)]
        return sum(taken) / len(taken) if taken else None

    def steps(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Give the tokens of each step, the drafted ones that stand and the one after them, and if there was a draft.

        `answer` begins with the token that the prompt's own step gave.
        """
        text, end, key = [*prompt, *answer[:1]], len(prompt) + len(answer), object()
        whole = [*prompt, *answer]
        while len(text) < end:
            most = min(self.max_tokens, end - len(text) - 1)
            draft = self.proposer.propose(key, text, most) if most > 0 else []
            pairs = enumerate(zip(draft, whole[len(text) :], strict=False))
            stood = next((at for at, (guess, token) in pairs if guess != token), len(draft))
            yield stood + 1, bool(draft)
            text = whole[: len(text) + stood + 1]
        self.proposer.forget(key)


def timed(runner: Runner, prompts: Sequence[Sequence[int]]) -> Estimate | None:
    """Measure how many times faster a token after the first comes with the artifact's drafts than without.

    `TIMED` prompts at most, each asked with drafts and without in turns; None: there is no pair.
    """
    chosen = prompts[:: max(1, len(prompts) // TIMED)][:TIMED]
    longest = runner.config.max_context - TIMED_TOKENS
    load = [LoadRequest(tuple(ids), TIMED_TOKENS) for ids in chosen if 0 < len(ids) <= longest]
    if not load:
        return None
    with Engine(runner, EngineOptions(prefix_cache_bytes=0)) as engine:
        return speedup(engine, load)

"""Tokens of sequences from their logits to those who asked for them, and the ends of sequences."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from numpy import float32
from numpy.typing import NDArray

from llmforge.base.errors import ForgeError
from llmforge.ir.interface import TopLogits
from llmforge.runtime.sampling.sampler import SampledToken
from llmforge.serving.request import Chunk
from llmforge.serving.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepFigures:
    """Sums over all steps, for `EngineStats`: tokens by the names of its fields, decode steps by rows, and ends."""

    totals: Counter[str] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    decode_s: float = 0.0
    verify_s: float = 0.0


@dataclass(eq=False)
class Delivery:
    """Samples tokens of `sequences`, hands them over, and ends those whose last token that was.

    Args:
        sequences: those that wait or run; one that ends is removed.
        figures: count tokens and ends.
        clock: seconds.
        release: frees the place of a sequence that ends, or its place in the queue.
        forget: lets no other text begin with what was computed for a sequence.
    """

    sequences: dict[Sequence, None]
    figures: StepFigures
    clock: Callable[[], float]
    release: Callable[[Sequence], None]
    forget: Callable[[Sequence], None]
    undelivered: list[tuple[Sequence, SampledToken]] = field(default_factory=list)  # of the last decode step, in order

    def sample(self, sequence: Sequence, logits: NDArray[float32], drafted: int | None = None) -> bool:
        """Sample the next token of `sequence` from `logits` [V] and deliver it; the last one ends the sequence.

        Return whether the token is `drafted`, and more may follow.
        """
        sampled = self.choose(sequence, logits)
        if sampled is None:
            return False
        self.take(sequence, sampled, self.clock())
        if sampled.token == drafted:
            sequence.accepted_tokens += 1
            self.figures.totals["accepted_tokens"] += 1
        return self.hand_over(sequence, sampled) and sampled.token == drafted

    def choose(
        self, sequence: Sequence, logits: NDArray[float32], head: tuple[TopLogits, int] | None = None
    ) -> SampledToken | None:
        """Sample a token from a whole row, whose head may be known; None: it cannot be, and the sequence has ended."""
        try:
            return sequence.sampler.sample(logits, head)
        except ForgeError as error:
            sequence.failed = True
            self.forget(sequence)  # whatever was wrong with this text, it must not spread to others
            self._remove(sequence, "error")
            self._deliver(sequence, error)
            return None

    def take(self, sequence: Sequence, sampled: SampledToken, now: float) -> None:
        """Go on from a token."""
        sequence.tokens.append(sampled.token)
        sequence.token_times.append(now)
        self.figures.totals["output_tokens"] += 1

    def hand_over(self, sequence: Sequence, sampled: SampledToken) -> bool:
        """Deliver a token that was taken; the last one ends the sequence. Return whether more may follow."""
        token, logprob = sampled
        if sequence.sampler.is_stop(token):
            if not sequence.request.detokenize:  # who reads tokens wants this one, too
                self._deliver(sequence, Chunk("", token, logprob=logprob))
            self.finish(sequence, "stop")
        elif not self._deliver(sequence, Chunk(sequence.text.push(token), token, logprob=logprob)):
            self._remove(sequence, "error")
        elif sequence.text.stopped:
            self.finish(sequence, "stop")
        elif sequence.remaining_tokens == 0:
            self.finish(sequence, "length")
        else:
            return True
        return False

    def hand_over_all(self) -> None:
        """Deliver the tokens of the last decode step, and end what they end."""
        undelivered, self.undelivered = self.undelivered, []
        for sequence, sampled in undelivered:
            if sequence in self.sequences:
                self.hand_over(sequence, sampled)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence; its last chunk has the rest of the text."""
        rest = sequence.text.flush()
        if reason == "length" and sequence.text.stopped:  # the text that was held back completes a stop string
            reason = "stop"
        self._remove(sequence, reason)
        self._deliver(sequence, Chunk(rest, None, reason, sequence.usage(self.clock())))

    def fail(self, error: ForgeError) -> None:
        """Hand `error` to every request that runs or waits, and forget them."""
        self.undelivered.clear()
        for sequence in list(self.sequences):
            self._remove(sequence, "error")
            self._deliver(sequence, error)

    def _deliver(self, sequence: Sequence, item: Chunk | ForgeError) -> bool:
        """Hand `item` to the receiver of `sequence`; one that raises loses its own sequence and nobody else's."""
        try:
            sequence.receive(item)
        except Exception:
            logger.exception("the receiver of an answer failed; the answer is dropped")
            return False
        return True

    def _remove(self, sequence: Sequence, reason: str) -> None:
        del self.sequences[sequence]
        self.figures.finished[reason] += 1
        self.release(sequence)

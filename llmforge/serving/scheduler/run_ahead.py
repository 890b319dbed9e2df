"""Decode steps that a device runs concurrently with the host, and steps that begin on its guesses of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import TopLogits
from llmforge.runtime.interface import Decoder, DecodeRun
from llmforge.runtime.sampling.sampler import sample_top_logits
from llmforge.serving.scheduler.delivery import Delivery
from llmforge.serving.sequence import Sequence

# A step begins on the guesses of the one before it while they are as good as this, of the last ones, with weights that
# fall by an eighth a token: a wrong guess costs its row a step, and going ahead saves all rows the host's part of one.
RIGHT, RIGHT_OF_ONE, WEIGHT = 15 / 16, 3 / 4, 1 / 8


@dataclass(eq=False)
class Decoding:
    """A decode step that a device runs: rows and their sequences, padded to `size` rows.

    Of those in `wrong`, it runs another token than the one that was chosen: what it gives them is nobody's.
    """

    run: DecodeRun
    rows: list[tuple[int, Sequence]]
    size: int
    wrong: set[Sequence] = field(default_factory=set)


D = TypeVar("D", bound=Decoding)


class RunAhead(Generic[D]):
    """Holds the `step` that has begun on the guesses of the one before it, whose tokens are all taken; None: none has.

    `guesses` says whether steps begin so at all: whether the device guesses tokens, and has no states that a wrong one
    would change.
    """

    def __init__(self, backend: Decoder[Any], sequences: Collection[Sequence], delivery: Delivery) -> None:
        self._sequences = sequences
        self._delivery = delivery
        self.guesses = backend.decodes_ahead and backend.guesses_tokens and not backend.signature.states
        self.step: D | None = None

    def drop_unwanted(self) -> None:
        """Forget a step that was begun ahead if nobody waits for any of its tokens."""
        if self.step is not None and not self.live(self.step):
            self.step.run.launched()
            self.step = None

    def end_unwanted(self) -> None:
        """Wait for a step that was begun ahead if there is no sequence any more: nothing runs when nobody waits."""
        if self.step is not None and not self._sequences:
            self.step.run.top_logits()
            self.step = None

    def live(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give the rows of a step whose tokens somebody waits for."""
        return [(row, each) for row, each in step.rows if each in self._sequences and each not in step.wrong]

    def continuing_rows(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give the rows of `step` that go on in the next one, if its guesses promise to be right.

        A sequence that ends with its token runs no other one. One that `step` runs with a wrong token runs the right
        one.
        """
        live = [(row, each) for row, each in step.rows if each in self._sequences]
        right = [each.guessed_right for _, each in live]
        if not (self.guesses and live) or min(right) < RIGHT_OF_ONE or sum(right) < RIGHT * len(right):
            return []
        return [(row, each) for row, each in live if each in step.wrong or each.remaining_tokens > 1]

    def sample(self, live: list[tuple[int, Sequence]], run: DecodeRun, heads: TopLogits, *, ahead: bool = True) -> None:
        """Sample the next token of each sequence from its row of `run`, all at once; `ahead`: compare with its guesses.

        First and last tokens are delivered now, others while the next step runs.
        """
        guessed = run.next_ids() if ahead and self.guesses else None
        if not live:
            return
        own = [row for row, _ in live]
        heads = heads.of(own)

        def fetch(rows: list[int], blocks: list[int]) -> NDArray[np.float32]:
            return run.blocks([own[row] for row in rows], blocks)

        delivery = self._delivery
        found = sample_top_logits([sequence.sampler for _, sequence in live], heads, fetch)
        now = delivery.clock()
        for place, ((row, sequence), sampled) in enumerate(zip(live, found, strict=True)):
            if sampled is None:
                sampled = delivery.choose(sequence, run.logits(row), (heads, place))
            if sampled is not None:
                if guessed is not None:
                    self.note_guess(sequence, bool(guessed[row] == sampled.token))
                delivery.take(sequence, sampled, now)
                first, last = len(sequence.token_times) == 1, sequence.remaining_tokens == 0
                if first or last or sequence.sampler.is_stop(sampled.token):
                    delivery.hand_over(sequence, sampled)  # who waits for its answer has it, or its place is free, now
                else:
                    delivery.undelivered.append((sequence, sampled))

    def note_guess(self, sequence: Sequence, right: bool) -> None:
        """Note whether the device's guess was the token of `sequence`, which may run already."""
        sequence.guessed_right += WEIGHT * (right - sequence.guessed_right)
        if not right and self.step is not None:
            self.step.wrong.add(sequence)


def temperatures(sequences: Iterable[Sequence]) -> list[float]:
    """Give what the mass of each sequence's row is summed at."""
    return [sequence.sampler.temperature or 1.0 for sequence in sequences]

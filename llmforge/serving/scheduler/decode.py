"""Decode steps over slots: the next token of every sequence whose prompt is read."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Generic

import numpy as np

from llmforge.ir.interface import GREEDY
from llmforge.runtime.interface import C, Decoder, StepInputs
from llmforge.runtime.sampling.sampler import guesses
from llmforge.serving.scheduler.delivery import Delivery, StepFigures
from llmforge.serving.scheduler.run_ahead import Decoding, RunAhead, temperatures
from llmforge.serving.scheduler.slots import Slots
from llmforge.serving.sequence import Sequence
from llmforge.serving.speculation import Speculation


@dataclass(eq=False)
class SlotDecode(Generic[C]):
    """Decodes in `slots`, one step ahead where the device guesses tokens, and verifies what `speculation` drafts."""

    backend: Decoder[C]
    slots: Slots[C]
    ahead: RunAhead[Decoding]
    delivery: Delivery
    figures: StepFigures
    speculation: Speculation | None

    def __post_init__(self) -> None:
        backend, speculation = self.backend, self.speculation
        batch = self.slots.cache.batch
        self._input_ids = np.zeros((batch, 1), np.int64)
        self._past_lengths = np.zeros(batch, np.int32)
        self._adapter_ids = np.zeros(batch, np.int64)
        self._lengths = np.zeros(batch, np.int32)
        self._temperatures = np.ones(batch, np.float32)
        self._draws = np.zeros((batch, len(GREEDY)), np.float32)
        rows = 0 if backend.decodes_ahead else batch  # where a device gives heads, rows are fetched one at a time
        logits = backend.logits_array((rows, 1, backend.vocabulary))
        self._logits = [logits[: n + 1] for n in range(rows)]  # equal steps hand the backend one object
        most = 0 if speculation is None else speculation.max_tokens
        verified = backend.logits_array((1, most + 1, backend.vocabulary))
        self._verify_logits = [verified[:, : k + 1] for k in range(most + 1)]  # by drafted tokens

    @property
    def is_next(self) -> bool:
        """Whether nothing but a decode step of all that run comes next, during which tokens can be delivered."""
        running = [each for each in self.slots.taken if each is not None]
        return bool(running) and self.speculation is None and all(each.decoding for each in running)

    def run(self) -> int:
        """Give every slot whose prompt is read its next token, or several; return how many tokens ran for that."""
        decoding = [(slot, each) for slot, each in enumerate(self.slots.taken) if each is not None and each.decoding]
        speculation = self.speculation
        if speculation is None:
            batch, ran = decoding, 0
        else:
            batch, ran = [], 0
            for slot, sequence in decoding:
                start = self.delivery.clock()
                draft = speculation.propose(sequence, sequence.tokens, sequence.remaining_tokens - 1, len(decoding))
                if draft:
                    self._verify(slot, sequence, draft, start, speculation)
                    ran += 1 + len(draft)
                else:
                    batch.append((slot, sequence))
        if batch:
            self._run_batch(batch)
        return ran + len(batch)

    def _run_batch(self, batch: list[tuple[int, Sequence]]) -> None:
        """Run one token of each sequence of `batch`, which are in the order of their slots."""
        start = self.delivery.clock()
        if self.backend.decodes_ahead:
            n, ran = self._run_ahead(batch)
        else:
            inputs = self._fill(batch)
            n, ran = len(inputs.ids), len(batch)
            logits = self._logits[n - 1]
            self.backend.step(inputs, self.slots.cache.rows(0, n), out=logits)
            for slot, sequence in batch:
                if self.speculation is not None:
                    self.speculation.observe(sequence, sequence.tokens, sequence.computed_tokens, self.backend, slot)
                sequence.computed_tokens += 1
                self.slots.store_blocks(sequence, slot)
                self.delivery.sample(sequence, logits[slot, 0])
        seconds = self.delivery.clock() - start
        figures = self.figures
        figures.steps[n] += 1
        figures.totals["decode_tokens"] += ran
        figures.decode_s += seconds
        if self.speculation is not None:
            self.speculation.payoff.decoded(ran, seconds)

    def _fill(self, batch: list[tuple[int, Sequence]], running: Set[Sequence] = frozenset()) -> StepInputs:
        """Fill the inputs of a step of `batch`, after one that is `running` some of them.

        A row that does not decode runs, too, and its logits are not read. What it writes lands after the tokens that
        it holds, where its next token will overwrite it.
        """
        rows = 1 + batch[-1][0]
        n = min((size for size in self.backend.buckets if rows <= size <= len(self._lengths)), default=rows)
        slots = self.slots.taken[:n]
        self._past_lengths[:n] = [0 if each is None else each.computed_tokens + (each in running) for each in slots]
        self._adapter_ids[:n] = [0 if each is None else each.adapter for each in slots]
        self.slots.idle_rows += slots.count(None)
        self._lengths[:n] = self._input_ids[:n] = 0
        decoding = [slot for slot, _ in batch]
        self._lengths[decoding] = 1
        self._input_ids[decoding, 0] = [-1 - slot if each in running else each.tokens[-1] for slot, each in batch]
        ids, past_lengths = self._input_ids[:n], self._past_lengths[:n]
        return StepInputs(ids, past_lengths, lengths=self._lengths[:n], adapters=self._adapter_ids[:n])

    def _begin(self, batch: list[tuple[int, Sequence]], before: Decoding | None = None) -> Decoding:
        """Begin to run one token of each sequence of `batch`; of those that run `before`, the one that is guessed."""
        running = frozenset() if before is None else {each for _, each in before.rows if each not in before.wrong}
        inputs, slots = self._fill(batch, running), [slot for slot, _ in batch]
        n = len(inputs.ids)
        self._temperatures[:n] = 1
        self._temperatures[slots] = temperatures(each for _, each in batch)
        if self.ahead.guesses:
            self._draws[:n] = GREEDY
            self._draws[slots] = guesses([each.sampler for _, each in batch], [each in running for _, each in batch])
        inputs = inputs._replace(temperatures=self._temperatures[:n], draws=self._draws[:n])
        return Decoding(self.backend.begin_decode(inputs, self.slots.cache.rows(0, n)), batch, n)

    def _next_rows(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give what to run after `step` before its tokens are known; nothing where they had better be."""
        return self.ahead.continuing_rows(step) if self.is_next and not self.slots.is_due else []

    def _run_ahead(self, batch: list[tuple[int, Sequence]]) -> tuple[int, int]:
        """Run one token of each sequence of `batch` while the host delivers the tokens of the step before.

        If possible, the next step begins before this one's tokens are chosen, with those that the device guesses. A
        guess that was wrong has run for nothing, and so has a sequence that has ended meanwhile: that row's token is
        dropped, and the right one runs in the next step. Return rows of the step, and how many were not in vain.
        """
        ahead = self.ahead
        step = ahead.step or self._begin(batch)
        rows = self._next_rows(step)
        ahead.step = self._begin(rows, step) if rows else None
        if ahead.step is None:
            step.run.launched()  # the thread that does so needs the interpreter, which delivering would keep
        self.delivery.hand_over_all()
        heads, live = step.run.top_logits(), ahead.live(step)
        for slot, sequence in live:
            sequence.computed_tokens += 1
            self.slots.store_blocks(sequence, slot)
        ahead.sample(live, step.run, heads)
        return step.size, len(live)

    def _verify(self, slot: int, sequence: Sequence, draft: list[int], start: float, speculation: Speculation) -> None:
        """Run the last token of `sequence` and `draft`, and sample tokens for as long as they are those drafted.

        Each token is sampled from its own row of logits, as without a draft; the draft only says whether the row after
        it can be used. So the tokens are those that would come without one, under any sampling: a drafted token stands
        with the probability that the model gives it, as in speculative sampling from a draft that is certain.
        """
        k, figures = len(draft), self.figures
        ids = np.array([[sequence.tokens[-1], *draft]], np.int64)
        past_lengths, view = np.array([sequence.computed_tokens], np.int32), self.slots.cache.rows(slot, slot + 1)
        (logits,) = self.backend.step(
            StepInputs(ids, past_lengths, np.arange(k + 1), adapters=np.array([sequence.adapter])),
            view,
            out=self._verify_logits[k],
        )
        sequence.drafted_tokens += k
        figures.totals["drafted_tokens"] += k
        tokens = 0
        for row, drafted in zip(logits, [*draft, None], strict=True):
            sequence.computed_tokens += 1
            accepted = self.delivery.sample(sequence, row, drafted)
            tokens += 1
            if not accepted:
                break
        self.slots.store_blocks(sequence, slot)
        seconds = self.delivery.clock() - start
        figures.totals["verified_tokens"] += tokens
        figures.verify_s += seconds
        speculation.payoff.verified(sequence, k, tokens, seconds)
        if self.slots.taken[slot] is not sequence:  # it has ended
            speculation.forget(sequence)
        else:
            past = sequence.computed_tokens - tokens
            speculation.observe(sequence, sequence.tokens, past, self.backend, 0, tokens)

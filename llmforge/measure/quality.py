"""Quality of an artifact against its checkpoint: the same text through both, compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint import text
from llmforge.checkpoint.text import TokenWindow
from llmforge.metrics import catalog
from llmforge.metrics.quality import Form, GreedyAnswer, Quality, Sample, summarize, values
from llmforge.metrics.quality_metrics import PREFILL_KLD, QualityMetric
from llmforge.metrics.token_records import WindowScores
from llmforge.metrics.tokens import END_SHIFT, KLD, require_finite, score

BLOCK_BYTES = 128 << 20  # of the baseline's logits, which wait for the artifact's
Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # ids [S] -> logits [S, V]


@dataclass(frozen=True)
class QualityRun:
    """What is compared beyond the text itself.

    `half_of`, the length of a full window, scores the second half of full windows alone, as llama.cpp does
    (tools/perplexity/perplexity.cpp: rows n_ctx / 2 … n_ctx - 2 of each chunk). `decode` gives the logits of the
    artifact through decode steps; about `decode_tokens` tokens, spread over all documents, are read by it as well.
    """

    half_of: int | None = None
    decode: Logits | None = None
    decode_tokens: int = 0
    answers: Sequence[GreedyAnswer] = ()
    samples: Sequence[Sample] = ()
    metrics: Sequence[str] = ()  # those of plug-ins to measure besides
    only: Sequence[QualityMetric] | None = None  # these are made; None: all of the catalog
    ends: Sequence[int] = ()  # ids that end an answer; (): what needs to know them is not measured

    @property
    def forms(self) -> dict[str, Form]:
        """Give the figures to make, by name."""
        metrics = self.only or catalog.of_quality(self.metrics)
        forms = {metric.name: metric.form for metric in metrics}
        return {name: form for name, form in forms.items() if self.ends or not any(v.of_ends for v in values([form]))}

    def ending_rows(self, window: TokenWindow) -> NDArray[np.int64]:
        """Find the rows of logits after which a text ends, or an answer: one of `ends` is what follows."""
        if not self.ends:
            return np.empty(0, np.int64)
        ended = np.isin(window.ids[1:], self.ends)
        if window.answers is not None:
            ended &= window.answers[1:]
        rows = np.flatnonzero(ended)
        is_end = window.is_end and window.ids[-1] not in self.ends
        rows = np.append(rows, len(window.ids) - 1) if is_end else rows
        return rows[rows >= self.first]

    @property
    def first(self) -> int:
        """Row of the first token of a window that is scored, less one."""
        return 0 if self.half_of is None else self.half_of // 2

    def scored(self, windows: Sequence[TokenWindow]) -> list[TokenWindow]:
        """Leave the windows that have a token to score.

        Raises:
            DataError: there are none.
        """
        found = [window for window in windows if len(window.ids) > 1]
        if not found:
            raise DataError("the evaluation text has no tokens to predict", hint="use documents of 2 tokens or more")
        if self.half_of is None:
            return found
        found = [window for window in found if len(window.ids) == self.half_of]
        if not found or self.first > self.half_of - 2:
            raise DataError(
                f"the evaluation text has no window of {self.half_of} tokens to score the second half of",
                hint="use longer documents, a smaller `context`, or `scored: all`",
            )
        return found


def compare(
    windows: Sequence[TokenWindow],
    baseline: Logits,
    artifact: Logits,
    run: QualityRun = QualityRun(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Run every window through `baseline` and `artifact` and compare them on each next token.

    Both take turns, a block of windows each: threads that wait for the next window by spinning would take the cores
    from the other side. Logits of one block are in memory, log-probabilities never; kept are a few numbers a token.
    `progress` is told the windows done and their total.

    Raises:
        DataError: there is nothing to predict.
        VerificationError: a logit of either side is NaN or infinite; the message names the window.
    """
    windows = run.scored(windows)
    decoded_windows = text.spread(windows, run.decode_tokens) if run.decode and run.decode_tokens else ()
    again = {id(window) for window in decoded_windows}
    forms = run.forms
    of_tokens = values(tuple(forms.values()))
    scores: dict[str, list[WindowScores]] = {}
    chats: dict[str, list[WindowScores]] = {}
    endings: dict[str, list[WindowScores]] = {}
    decoded: dict[str, list[WindowScores]] = {}
    done = 0
    progress(done, len(windows))
    while done < len(windows):
        expected: list[NDArray[np.float32]] = []
        while done + len(expected) < len(windows) and sum(logits.nbytes for logits in expected) < BLOCK_BYTES:
            expected.append(_finite("baseline", baseline, windows, done + len(expected)))
        for theirs in expected:
            window, ours = windows[done], _finite("artifact", artifact, windows, done)
            # Nothing follows the last token, and nothing predicts the first.
            rows, targets = slice(run.first, -1), np.asarray(window.ids[run.first + 1 :])
            found = score(theirs[rows], ours[rows], targets, of_tokens, run.ends)
            scores.setdefault(window.document, []).append(WindowScores(run.first + 1, found))
            if window.answers is not None and (said := window.answers[run.first + 1 :]).any():
                answers = {name: value[said] for name, value in found.items()}
                chats.setdefault(window.document, []).append(WindowScores(run.first + 1, answers))
            if len(ending := run.ending_rows(window)):
                shifts = score(theirs[ending], ours[ending], np.full(len(ending), run.ends[0]), (END_SHIFT,), run.ends)
                endings.setdefault(window.document, []).append(WindowScores(int(ending[0]) + 1, shifts))
            if run.decode is not None and id(window) in again:
                stepped = score(theirs[rows], _finite("artifact", run.decode, windows, done)[rows], targets, (KLD,))
                both = {**stepped, PREFILL_KLD.name: found[KLD.name]}
                decoded.setdefault(window.document, []).append(WindowScores(run.first + 1, both))
            done += 1
            progress(done, len(windows))
    return summarize(
        forms,
        scores,
        context=max(len(window.ids) for window in windows),
        scored="all" if run.half_of is None else "second-half",
        chats=chats,
        endings=endings,
        decoded=decoded,
        answers=run.answers,
        samples=run.samples,
    )


def _finite(side: str, logits: Logits, windows: Sequence[TokenWindow], number: int) -> NDArray[np.float32]:
    window = windows[number]
    made = logits(window.ids)
    require_finite(side, made, f"window {number} (document {window.document}, {len(window.ids)} tokens)")
    return made

"""Quality of an artifact against its checkpoint: the same text through both, compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import Window
from llmforge.metrics import catalog
from llmforge.metrics.catalog import QualityMetric
from llmforge.metrics.quality import Quality, TokenScores, summarize, values
from llmforge.metrics.tokens import require_finite, score

BLOCK_BYTES = 128 << 20  # of the baseline's logits, which wait for the artifact's
Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # ids [S] -> logits [S, V]


def compare(
    windows: Sequence[Window],
    baseline: Logits,
    artifact: Logits,
    *,
    seed: int = 0,
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
    windows = [window for window in windows if len(window.ids) > 1]
    if not windows:
        raise DataError("the evaluation text has no tokens to predict", hint="use documents of 2 tokens or more")
    forms = {metric.name: metric.form for metric in catalog.of_kind(QualityMetric)}
    of_tokens = values(tuple(forms.values()))
    scores: dict[str, list[TokenScores]] = {}
    done = 0
    progress(done, len(windows))
    while done < len(windows):
        expected: list[NDArray[np.float32]] = []
        while done + len(expected) < len(windows) and sum(logits.nbytes for logits in expected) < BLOCK_BYTES:
            expected.append(_finite("baseline", baseline, windows, done + len(expected)))
        for theirs in expected:
            ours = _finite("artifact", artifact, windows, done)
            # Nothing follows the last token, and nothing predicts the first.
            found = score(theirs[:-1], ours[:-1], np.asarray(windows[done].ids[1:]), of_tokens)
            scores.setdefault(windows[done].document, []).append(found)
            done += 1
            progress(done, len(windows))
    return summarize(forms, scores, context=max(len(window.ids) for window in windows), seed=seed)


def _finite(side: str, logits: Logits, windows: Sequence[Window], number: int) -> NDArray[np.float32]:
    window = windows[number]
    made = logits(window.ids)
    require_finite(side, made, f"window {number} (document {window.document}, {len(window.ids)} tokens)")
    return made

"""Greedy answers of an artifact beside those of its checkpoint: how long they are the same, and how they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import Window
from llmforge.evaluation.quality import Logits
from llmforge.metrics.quality import ANSWER_TOKENS, PROMPT_TOKENS, Answer, Sample

SHOWN = 5  # answers whose text a report has

Generate = Callable[[NDArray[np.int64], int], Iterable[int]]  # ids [S] and a number of tokens -> so many greedy tokens


def compare(
    windows: Sequence[Window],
    count: int,
    *,
    artifact: Generate,
    baseline: Logits,
    go_on: Generate,
    ends: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[Answer, ...], tuple[Sample, ...]]:
    """Let `artifact` continue the beginnings of `count` documents, or of all there are, and hold it to the baseline.

    Up to its first difference a greedy answer of the baseline has the artifact's tokens before it. So one run of
    `baseline` over prompt and answer tells where it would have chosen another token, and the baseline itself generates
    (`go_on`) only what is shown, from there on. An answer ends behind the first of `ends`. `decode` makes text of ids.

    Raises:
        DataError: no document has a token to begin with.
    """
    picked = beginnings(windows, count)
    answers: list[Answer] = []
    samples: list[Sample] = []
    for done, window in enumerate(picked):
        progress(done, len(picked))
        prompt = window.ids[:PROMPT_TOKENS]
        ours = ended(artifact(prompt, ANSWER_TOKENS), ends)
        whole = np.concatenate([prompt, np.asarray(ours[:-1], np.int64)])
        chosen = baseline(whole)[len(prompt) - 1 :].argmax(-1)
        differs = np.flatnonzero(chosen != np.asarray(ours))
        same = int(differs[0]) if len(differs) else None
        answers.append(
            Answer(document=window.document, prompt_tokens=len(prompt), tokens=len(ours), first_difference=same)
        )
        if len(samples) < SHOWN:
            theirs = ours
            if same is not None:
                shared = np.concatenate([prompt, np.asarray(ours[:same], np.int64)])
                theirs = ended([*ours[:same], *go_on(shared, ANSWER_TOKENS - same)], ends)
            samples.append(_sample(window.document, *(decode(ids) for ids in (prompt.tolist(), theirs, ours))))
    progress(len(picked), len(picked))
    return tuple(answers), tuple(samples)


def beginnings(windows: Sequence[Window], count: int) -> list[Window]:
    """Choose the first windows of `count` documents, or of all there are, spread over them.

    Raises:
        DataError: no document has a token to begin with.
    """
    first = list({window.document: window for window in reversed(windows) if len(window.ids)}.values())[::-1]
    if not first:
        raise DataError("the evaluation text has no document to continue", hint="use documents of 2 tokens or more")
    return [first[place] for place in np.unique(np.linspace(0, len(first) - 1, count).round().astype(int))]


def ended(ids: Iterable[int], ends: Sequence[int]) -> list[int]:
    """Cut an answer behind its end."""
    found: list[int] = []
    for token in ids:
        found.append(int(token))
        if token in ends:
            break
    return found


def _sample(document: str, prompt: str, baseline: str, artifact: str) -> Sample:
    differs = (at for at, (ours, theirs) in enumerate(zip(artifact, baseline, strict=False)) if ours != theirs)
    shared = baseline[: next(differs, min(len(artifact), len(baseline)))]
    rest = baseline[len(shared) :], artifact[len(shared) :]
    return Sample(document=document, prompt=prompt, shared=shared, baseline=rest[0], artifact=rest[1])

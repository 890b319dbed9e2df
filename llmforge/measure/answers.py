"""Greedy answers of an artifact beside those of its checkpoint: how long they are the same, and how they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure.quality import Logits
from llmforge.metrics.quality import ANSWER_TOKENS, PROMPT_TOKENS, GreedyAnswer, Sample

SHOWN = 5  # answers whose text a report has

Generate = Callable[[NDArray[np.int64], int], Iterable[int]]  # ids [S] and a number of tokens -> so many greedy tokens
Texts = Sequence[NDArray[np.int64]]  # ids [S] each


def compare(
    windows: Sequence[TokenWindow],
    count: int,
    *,
    artifact: Generate,
    baseline: Callable[[Texts], Logits],
    continued: Callable[[Texts, Sequence[int]], Sequence[Sequence[int]]],
    ends: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[GreedyAnswer, ...], tuple[Sample, ...]]:
    """Let `artifact` continue the beginnings of `count` documents, or of all there are, and hold it to the baseline.

    Up to its first difference a greedy answer of the baseline has the artifact's tokens before it. So one run of
    `baseline` over prompt and answer tells where it would have chosen another token, and the baseline itself generates
    (`continued`) only from there on: at most so many tokens of each text, of which it may give fewer. All texts are
    given to either at once. An answer ends after the first of `ends`. `decode` makes text of ids.

    Raises:
        DataError: no document has a token to begin with.
    """
    chosen = beginnings(windows, count)
    said: list[list[int]] = []
    for done, window in enumerate(chosen):
        progress(done, len(chosen))
        said.append(ended(artifact(window.ids[:PROMPT_TOKENS], ANSWER_TOKENS), ends))
    progress(len(chosen), len(chosen))
    prompts = [window.ids[:PROMPT_TOKENS] for window in chosen]
    wholes = [_joined(prompt, ours[:-1]) for prompt, ours in zip(prompts, said, strict=True)]
    logits = baseline(wholes)
    same: list[int | None] = []  # tokens before the first difference
    for prompt, whole, ours in zip(prompts, wholes, said, strict=True):
        differs = np.flatnonzero(logits(whole)[len(prompt) - 1 :].argmax(-1) != np.asarray(ours))
        same.append(int(differs[0]) if len(differs) else None)
    theirs = [ours[:until] for ours, until in zip(said, same, strict=True)]
    differing = [place for place, until in enumerate(same) if until is not None]
    shared = [_joined(prompts[place], theirs[place]) for place in differing]
    more = continued(shared, [ANSWER_TOKENS - len(theirs[place]) for place in differing])
    for place, tokens in zip(differing, more, strict=True):
        theirs[place] = ended([*theirs[place], *tokens], ends)
    answers = tuple(
        _answer(window, ours, them, until, ends)
        for window, ours, them, until in zip(chosen, said, theirs, same, strict=True)
    )
    samples = tuple(
        _sample(window.document, *(decode(ids) for ids in (prompt.tolist(), them, ours)))
        for window, prompt, them, ours in zip(chosen[:SHOWN], prompts, theirs, said, strict=False)
    )
    return answers, samples


def _answer(
    window: TokenWindow, ours: Sequence[int], theirs: Sequence[int], until: int | None, ends: Sequence[int]
) -> GreedyAnswer:
    """Describe the answers to one beginning; of the baseline's the length alone is not known where it broke off."""
    over = bool(theirs) and theirs[-1] in ends
    known = over or len(theirs) == ANSWER_TOKENS
    return GreedyAnswer(
        document=window.document,
        prompt_tokens=len(window.ids[:PROMPT_TOKENS]),
        tokens=len(ours),
        first_difference=until,
        ended=ours[-1] in ends,
        baseline_tokens=len(theirs) if known else None,
        baseline_ended=over if known else None,
    )


def _joined(prompt: NDArray[np.int64], tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([prompt, np.asarray(tokens, np.int64)])


def beginnings(windows: Sequence[TokenWindow], count: int) -> list[TokenWindow]:
    """Choose the first windows of `count` documents, or of all there are, spread over them.

    Raises:
        DataError: no document has a token to begin with.
    """
    first = list({window.document: window for window in reversed(windows) if len(window.ids)}.values())[::-1]
    if not first:
        raise DataError("the evaluation text has no document to continue", hint="use documents of 2 tokens or more")
    return [first[place] for place in np.unique(np.linspace(0, len(first) - 1, count).round().astype(int))]


def ended(ids: Iterable[int], ends: Sequence[int]) -> list[int]:
    """Cut an answer after its end."""
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

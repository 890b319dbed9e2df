"""Retrieval as a recipe asks for it: an encoder and its checkpoint on the same queries and passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.base.progress import Progress
from llmforge.metrics.retrieval import ranking, results
from llmforge.metrics.retrieval.corpus import RetrievalCorpus
from llmforge.metrics.retrieval.results import RetrievalResult, Side
from llmforge.metrics.tokens import require_finite
from llmforge.recipe import RetrievalSpec
from llmforge.runtime.encoder import EncoderSession
from llmforge.serving.encoder_runner import EncoderInput, EncoderRunner

BLOCK = 256  # sequences between two reports of progress; batches of similar lengths are made within
QUERY_PROMPTS = ("query",)  # names of prompts that sentence-transformers' encode_query and encode_document look for
TEXT_PROMPTS = ("document", "passage", "corpus")


def run(
    spec: RetrievalSpec,
    runner: EncoderRunner,
    checkpoint: EncoderSession,
    progress: Progress,
    *,
    engine: str,
    baseline: str,
) -> RetrievalResult:
    """Measure what `runner` and `checkpoint` make of the same token ids; `engine` and `baseline` describe them.

    Passages that are longer than the model reads are cut.

    Raises:
        UsageError: a query is longer than the model reads.
        VerificationError: a value of either side is NaN or infinite.
    """
    corpus = spec.corpus()
    theirs = EncoderRunner(checkpoint, runner.tokenizer)
    embeds = runner.config.kind == "embedder"
    chosen = None
    if embeds:
        inputs = runner.texts(corpus.queries, _prompt(runner, QUERY_PROMPTS), truncate=True)
        if any(each.truncated for each in inputs):
            raise UsageError(f"a query has more than the {runner.config.max_tokens:,} tokens that the model reads")
        inputs += runner.texts(corpus.passages, _prompt(runner, TEXT_PROMPTS), truncate=True)
    else:
        chosen = ranking.candidates(corpus.queries, corpus.passages, corpus.relevant, spec.candidates)
        pairs = [(corpus.queries[at], corpus.passages[number]) for at, some in enumerate(chosen) for number in some]
        inputs = runner.pairs(pairs, truncate=True)
    progress.stage("Encode texts")
    made = _encode(runner, inputs, "artifact", progress.advance)
    progress.stage("Let the checkpoint encode texts")
    expected = _encode(theirs, inputs, "baseline", progress.advance)
    sides = (_embedded(corpus, side) if chosen is None else _scored(chosen, side) for side in (made, expected))
    return results.measured(corpus, chosen, *sides, engine=engine, baseline=baseline)


def _encode(
    runner: EncoderRunner, inputs: Sequence[EncoderInput], side: str, advance: Callable[[int, int], None]
) -> NDArray[np.float32]:
    order = sorted(range(len(inputs)), key=lambda at: len(inputs[at]))
    made: NDArray[np.float32] | None = None
    for start in range(0, len(order), BLOCK):
        advance(start, len(order))
        some = order[start : start + BLOCK]
        rows = runner.run([inputs[at] for at in some])
        made = np.empty((len(inputs), rows.shape[1]), np.float32) if made is None else made
        made[some] = rows
    advance(len(order), len(order))
    assert made is not None
    require_finite(side, made, f"what {len(inputs):,} texts give")
    return made


def _embedded(corpus: RetrievalCorpus, made: NDArray[np.float32]) -> Side:
    """Score every passage for each query by the cosine."""
    unit = made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    count = len(corpus.queries)
    return Side(list(unit[:count] @ unit[count:].T), made)


def _scored(chosen: Sequence[Sequence[int]], made: NDArray[np.float32]) -> Side:
    ends = np.cumsum([len(some) for some in chosen])[:-1]
    return Side(np.split(made[:, 0], ends))


def _prompt(runner: EncoderRunner, names: Sequence[str]) -> str | None:
    """Choose the prompt that the model has for a kind of text; None: its default."""
    return next((name for name in names if name in runner.config.prompts), None)

"""Retrieval of an encoder beside its checkpoint: the same token ids to both, prompts, long passages."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.base.errors import UsageError, VerificationError
from llmforge.base.progress import Silent
from llmforge.measure import retrieval
from llmforge.metrics.retrieval.results import RetrievalResult
from llmforge.recipe import RetrievalSpec
from llmforge.serving.encoder_runner import EncoderRunner

from ..fakes.fake_encoder import FakeEncoder, fake_embedder, fake_reranker, word_tokenizer

SPEC = RetrievalSpec(queries=12, passages=40, candidates=4)


def measured(runner: EncoderRunner, checkpoint: FakeEncoder, spec: RetrievalSpec = SPEC) -> RetrievalResult:
    return retrieval.run(spec, runner, checkpoint, Silent(), engine="ours", baseline="theirs")


def test_an_embedder_like_its_checkpoint_loses_nothing() -> None:
    runner = fake_embedder(max_tokens=64)
    found = measured(runner, FakeEncoder(max_tokens=64))
    assert (found.kind, found.queries, found.passages, found.engine, found.baseline) == (
        "embedder", 12, 40, "ours", "theirs",
    )  # fmt: skip
    assert found.metrics["retrieval.cosine_mean"].artifact.value == 1
    moved = found.metrics["retrieval.ndcg_10"].difference
    assert moved is not None
    assert moved.value == 0


def test_a_changed_embedder_is_seen() -> None:
    runner = fake_embedder(max_tokens=64)
    session = runner.session
    assert isinstance(session, FakeEncoder)
    session.vectors += np.random.default_rng(1).standard_normal(session.vectors.shape).astype(np.float32)
    assert measured(runner, FakeEncoder(max_tokens=64)).metrics["retrieval.cosine_mean"].artifact.value < 0.99


def test_queries_and_passages_have_their_prompts() -> None:
    prompts = {"query": "query ", "passage": "the file "}
    runner = fake_embedder(max_tokens=64, prompts=prompts)
    seen: list[str | None] = []
    texts = runner.texts

    def watched(given: list[str], name: str | None = None, *, truncate: bool = False) -> object:
        seen.append(name)
        return texts(given, name, truncate=truncate)

    runner.texts = watched  # type: ignore[method-assign, assignment]
    measured(runner, FakeEncoder(max_tokens=64, prompts=prompts))
    assert seen == ["query", "passage"]


def test_passages_are_cut_and_queries_are_not() -> None:
    assert measured(fake_embedder(max_tokens=24), FakeEncoder(max_tokens=24)).queries == 12
    with pytest.raises(UsageError, match="a query has more than the 6 tokens that the model reads"):
        measured(fake_embedder(max_tokens=6), FakeEncoder(max_tokens=6))


def test_a_reranker_orders_candidates() -> None:
    runner = fake_reranker(max_tokens=64)
    found = measured(runner, FakeEncoder(kind="reranker", max_tokens=64))
    assert found.kind == "reranker"
    assert found.metrics["retrieval.spearman"].artifact.value == 1
    assert found.digest.endswith("/4")
    session = runner.session
    assert isinstance(session, FakeEncoder)
    assert sum(map(len, session.batches)) == 12 * 4


def test_values_that_are_no_numbers_end_it() -> None:
    runner = EncoderRunner(FakeEncoder(max_tokens=64), word_tokenizer())
    assert isinstance(runner.session, FakeEncoder)
    runner.session.vectors[:] = np.nan
    with pytest.raises(VerificationError, match="artifact"):
        measured(runner, FakeEncoder(max_tokens=64))

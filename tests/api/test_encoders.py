"""Embedders and rerankers as Python programs use them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmforge.api.model import Model
from llmforge.base.errors import UsageError

from ..fakes.fake_encoder import fake_embedder, fake_reranker

ARTIFACT: Any = SimpleNamespace(manifest=SimpleNamespace(name="small", version="1"))


def test_texts_are_embedded() -> None:
    model = Model(ARTIFACT, fake_embedder())
    made = model.embed(["the file", "token"], prompt_name="query", dimensions=3)
    np.testing.assert_array_equal(made, fake_embedder().embed(["the file", "token"], "query", 3))
    np.testing.assert_array_equal(model.embed("the file"), model.embed(["the file"])[0])
    assert model.embed("file " * 40, truncate=True).shape == (8,)
    assert repr(model) == "<llmforge.Model small/1: 16 tokens>"
    assert model.tokenizer.get_vocab_size() == 21
    with pytest.raises(UsageError, match="the model embeds texts, and scores no pairs"):
        model.score("file", ["file"])
    with pytest.raises(UsageError, match="the artifact is an embedder or a reranker"):
        model.generate("file")


def test_texts_are_scored() -> None:
    scores = Model(ARTIFACT, fake_reranker()).score("the file", ["token", "the file"])
    assert scores[1] > scores[0]


def test_a_language_model_embeds_nothing() -> None:
    runner: Any = SimpleNamespace(config=SimpleNamespace(max_context=5))
    model = Model(ARTIFACT, runner)
    assert model.runner is runner
    with pytest.raises(UsageError, match="the artifact is a language model"):
        model.embed(["file"])

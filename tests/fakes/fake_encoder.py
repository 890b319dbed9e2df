"""Encoders of numpy for tests of what stands around a session: each token has a vector, and texts are their mean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from llmforge.runtime.encoder import EncoderConfig
from llmforge.serving.encoder_runner import EncoderRunner

WORDS = ["the", "a", "file", "model", "passage", "of", "query", "runs", "lies", "build", "cache", "server", "token"]
WORDS += ["gate", "is", "in", "and"]


def word_tokenizer() -> Tokenizer:
    """Make BERT's kind of tokenizer: a word a token, `[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]` with types."""
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    return tokenizer


class FakeEncoder:
    """Gives the normalized mean of the vectors of tokens, or how many tokens two texts share."""

    def __init__(self, **fields: Any) -> None:
        settings: dict[str, Any] = {
            "kind": "embedder", "pooling": "mean", "normalize": True, "dimensions": 8, "max_tokens": 16,
            "prompts": {"query": "query ", "document": ""}, "token_types": True,
        }  # fmt: skip
        self.config = EncoderConfig(**(settings | fields))
        self.vectors = np.random.default_rng(0).standard_normal((64, self.config.dimensions)).astype(np.float32)
        self.batches: list[list[int]] = []  # lengths of the sequences of each run
        self.delay_s = 0.0
        self.error: Exception | None = None

    def encode(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> NDArray[np.float32]:
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.batches.append([len(ids) for ids in sequences])
        if self.config.kind == "reranker":
            assert token_types is not None
            return np.stack([self._shared(ids, types) for ids, types in zip(sequences, token_types, strict=True)])
        means = np.stack([self.vectors[ids].mean(0) for ids in sequences])
        return means / np.linalg.norm(means, axis=1, keepdims=True) if self.config.normalize else means

    def _shared(self, ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.float32]:
        common = set(ids[types == 0].tolist()) & set(ids[types == 1].tolist()) - {2, 3}
        return np.full(self.config.labels, len(common) - 1.5, np.float32)


def fake_embedder(**fields: Any) -> EncoderRunner:
    return EncoderRunner(FakeEncoder(**fields), word_tokenizer())


def fake_reranker(**fields: Any) -> EncoderRunner:
    return EncoderRunner(FakeEncoder(**({"kind": "reranker", "prompts": {}} | fields)), word_tokenizer())

"""What an engine that encodes is: its configuration, and the session that runs it. It has no cache and no steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.pair_template import PairTemplate


@dataclass(frozen=True)
class EncoderConfig:
    """What a runtime must know about an embedder or a reranker."""

    kind: Literal["embedder", "reranker"]
    pooling: str
    normalize: bool  # embeddings have length 1
    dimensions: int  # of an embedding
    max_tokens: int  # of a sequence, special tokens included
    labels: int = 1  # logits of a sequence; an embedder has none
    prompts: Mapping[str, str] = field(default_factory=dict)  # what texts begin with, by the name of a prompt
    default_prompt: str | None = None
    token_types: bool = False  # whether the graph reads which of two texts a token is of
    template: PairTemplate | None = None  # what a pair is written as; null: two texts, as the tokenizer joins them
    packed: bool = True  # whether its attention takes no memory for pairs of tokens: sequences run side by side

    @property
    def title(self) -> str:
        """What the engine is, for a reader."""
        return "an embedder" if self.kind == "embedder" else "a reranker"

    @property
    def classifies(self) -> bool:
        """Whether it gives texts classes: a score needs one logit."""
        return self.kind == "reranker" and self.labels != 1


class EncoderSession(Protocol):
    """Runs sequences of token ids."""

    config: EncoderConfig

    def encode(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> NDArray[np.float32]:
        """Give embeddings, pooled (and normalized), [sequences, dimensions], or logits [sequences, labels]."""

"""The section `validation.retrieval` of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

from llmforge.metrics.retrieval import corpus as corpora
from llmforge.metrics.retrieval.corpus import MOST_PASSAGES, MOST_QUERIES, RetrievalCorpus
from llmforge.recipe.section import Section, anchor

SHIPPED = "default"


def _anchored(data: str, info: ValidationInfo) -> str:
    return data if data == SHIPPED else str(anchor(Path(data), info))


class RetrievalSpec(Section):
    """Find passages with the embedder, or order them with the reranker, and do so with the checkpoint."""

    data: Annotated[str, AfterValidator(_anchored)] = Field(
        default=SHIPPED,
        description="folder of BEIR's form: corpus.jsonl, queries.jsonl, qrels/test.tsv; default: 300 queries over "
        "2,996 passages that llmforge ships",
    )
    queries: int | None = Field(
        default=None, ge=1, le=MOST_QUERIES, description="queries, spread over all; default: all of them"
    )
    passages: int | None = Field(
        default=None, ge=1, le=MOST_PASSAGES,
        description="passages: those that answer the queries, and others spread over all; default: all of them",
    )  # fmt: skip
    candidates: int = Field(
        default=10, ge=2, le=1000,
        description="passages that a reranker orders for each query: those that answer it, and the best others by BM25",
    )  # fmt: skip

    def corpus(self) -> RetrievalCorpus:
        """Read the queries and passages.

        Raises:
            DataError: see `corpus.read_folder`.
        """
        whole = corpora.shipped() if self.data == SHIPPED else corpora.read_folder(Path(self.data))
        return whole.limited(self.queries, self.passages)

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked."""
        return self.corpus().digest

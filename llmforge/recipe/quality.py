"""The section `validation.quality` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from llmforge.metrics import catalog
from llmforge.metrics.quality import ANSWER_TOKENS, PROMPT_TOKENS
from llmforge.recipe.section import Contradiction, RecipePath, RecipePaths, Section

MOST_METRICS = 64  # of plug-ins


class QualitySpec(Section):
    """Measure perplexity, KL divergence, and agreement of the engine with the checkpoint, by document and position."""

    newer: ClassVar[frozenset[str]] = frozenset({"reference", "adapter_tokens", "metrics"})

    data: RecipePaths = Field(
        description="JSON Lines file of {text} or {messages}, or a list of them; must not overlap the calibration data"
    )
    context: int = Field(ge=2, le=2**24, description="tokens per window")
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**40, description="maximum tokens to evaluate, spread over all documents; default: all"
    )
    max_documents: int | None = Field(
        default=None, ge=1, le=10_000, description="maximum documents to evaluate, spread over the file; default: all"
    )
    scored: Literal["all", "second-half"] = Field(
        default="all",
        description="tokens of each window that count; second-half: as llama.cpp, and full windows alone",
    )
    decode_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens, in whole windows, to read one by one as well, through the KV cache; default: none",
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description=f"documents whose first {PROMPT_TOKENS} tokens both models continue by {ANSWER_TOKENS}, greedily; "
        "default: none",
    )
    reference: RecipePath | None = Field(
        default=None,
        description="folder of the checkpoint before it was quantized, which quality is measured against; default: "
        "`checkpoint`",
    )
    metrics: tuple[catalog.PluginMetricName, ...] = Field(
        default=(), max_length=MOST_METRICS, description="metrics of plug-ins to measure besides (docs/plugins.md)"
    )

    adapter_tokens: int = Field(
        default=4096,
        ge=0,
        le=2**40,
        description="tokens, in whole windows, on which each adapter that is kept apart is compared with the "
        "checkpoint that has it merged; 0: none",
    )

    def contradictions(self, longest: int) -> Iterator[Contradiction]:
        """Find windows and documents that are longer than the `longest` text of the engine."""
        if self.context > longest:
            yield Contradiction(("context",), f"{self.context} is above engine.max_context, {longest}")
        if self.samples is not None and longest < PROMPT_TOKENS + ANSWER_TOKENS:
            what = f"{PROMPT_TOKENS} tokens of each document and {ANSWER_TOKENS} after them exceed engine.max_context"
            yield Contradiction(("samples",), f"{what}, {longest}")

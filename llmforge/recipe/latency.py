"""The section `validation.latency` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from llmforge.metrics.latency import MOST_LENGTHS, MOST_OF_SURFACE, MOST_STARTS
from llmforge.metrics.workload import MOST_RUNS
from llmforge.recipe.engine import EngineSpec
from llmforge.recipe.section import Contradiction, RecipePath, Section


class SloSpec(Section):
    """A service level objective: a request is good if it meets all of these bounds."""

    ttft_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum time to the first token")
    tpot_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum mean time per later token")
    latency_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum time to the last token")

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None and self.latency_ms is None:
            raise ValueError("an SLO needs `ttft_ms`, `tpot_ms` or `latency_ms`")
        return self


class SurfaceSpec(Section):
    """Measure every combination of batch size, prompt length and output length."""

    newer: ClassVar[frozenset[str]] = frozenset({"baseline_repetitions"})

    batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1,), min_length=1, max_length=MOST_OF_SURFACE, description="numbers of sequences at once"
    )
    prompt_tokens: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        min_length=1, max_length=MOST_OF_SURFACE, description="prompt lengths"
    )
    output_tokens: tuple[Annotated[int, Field(ge=2, le=2**24)], ...] = Field(
        min_length=1, max_length=MOST_OF_SURFACE, description="output lengths"
    )
    repetitions: int = Field(default=6, ge=1, le=1000, description="runs per combination; an interval needs at least 6")
    baseline_repetitions: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="runs per combination of the checkpoint; an interval of the speed-up needs at least 6",
    )


class WorkloadSpec(Section):
    """Requests as users send them."""

    requests: int = Field(default=32, ge=1, le=1000, description="number of requests, or of sessions")
    prompt_tokens: int = Field(default=128, ge=1, le=2**24, description="tokens of a prompt, or that a turn adds")
    output_tokens: int = Field(default=64, ge=2, le=2**24, description="tokens of an answer")
    runs: int = Field(
        default=1, ge=1, le=MOST_RUNS, description="times the load is sent; intervals of rates need at least 6"
    )

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of its longest request."""
        return self.prompt_tokens + self.output_tokens


class ChatSpec(WorkloadSpec):
    """Single requests that arrive at random."""

    rate: float = Field(default=1.0, gt=0, le=1e6, description="mean arrivals per second (Poisson)")


class SessionsSpec(WorkloadSpec):
    """Conversations: each turn repeats what was said before and adds a prompt."""

    requests: int = Field(default=8, ge=1, le=1000, description="number of sessions")
    turns: int = Field(default=3, ge=2, le=100, description="requests of a session, one after the other")
    concurrency: int = Field(default=2, ge=1, le=256, description="sessions at once")

    @property
    def longest_tokens(self) -> int:
        """The last turn, which repeats all others."""
        return self.turns * super().longest_tokens


class SharedPrefixSpec(WorkloadSpec):
    """Long prompts that begin with the same text, as in retrieval."""

    prefix_tokens: int = Field(default=512, ge=1, le=2**24, description="tokens that all prompts begin with")
    concurrency: int = Field(default=2, ge=1, le=256, description="requests at once")

    @property
    def longest_tokens(self) -> int:
        """Prompt, behind the prefix, and answer."""
        return self.prefix_tokens + super().longest_tokens


class OfflineSpec(WorkloadSpec):
    """All requests at once: how many tokens per second the engine gives."""


class TraceSpec(Section):
    """Replay a file of arrivals: JSON Lines of `{at_s, prompt_tokens or prompt, output_tokens}`."""

    data: RecipePath = Field(description="JSON Lines file; relative to the recipe")


class WorkloadsSpec(Section):
    """Loads to send to the engine as it serves."""

    chat: ChatSpec | None = None
    sessions: SessionsSpec | None = None
    shared_prefix: SharedPrefixSpec | None = None
    offline: OfflineSpec | None = None
    trace: TraceSpec | None = None


class LatencySpec(Section):
    """Measure the engine and the checkpoint in the same run: TTFT and TPOT, or the time that batches of texts take."""

    newer: ClassVar[frozenset[str]] = frozenset({"prompt_tokens", "output_tokens", "lengths", "batches"})

    prompt_tokens: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        default=(), min_length=1, max_length=MOST_LENGTHS, description="prompt lengths to measure"
    )
    output_tokens: int = Field(default=0, ge=2, le=2**24, description="tokens to generate after each prompt")
    lengths: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        default=(),
        min_length=1,
        max_length=MOST_OF_SURFACE,
        description="of an embedder or a reranker, in place of both: tokens of the texts to encode",
    )
    batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1,), min_length=1, max_length=MOST_OF_SURFACE, description="with lengths: numbers of texts at once"
    )
    repetitions: int = Field(
        default=10, ge=1, le=1000, description="runs per length; an interval of the median needs at least 6"
    )
    surface: SurfaceSpec | None = None
    workloads: WorkloadsSpec | None = None
    slo: SloSpec | None = None
    precision: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="repeat until half the interval of the median TTFT and TPOT is at most this share of it",
    )
    budget_s: float = Field(default=120.0, gt=0, le=86400, description="with precision: when to stop, in seconds")
    starts: int = Field(
        default=0, ge=0, le=MOST_STARTS, description="starts in a process of its own, for load time and peak memory"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.lengths:
            of_prompts = ("prompt_tokens", "output_tokens", "surface", "workloads")
            given = [name for name in of_prompts if getattr(self, name)]
            if given:
                raise ValueError(f"lengths are of texts to encode, and {given[0]} is of prompts; expected one of both")
            if self.slo is not None and (self.slo.ttft_ms is not None or self.slo.tpot_ms is not None):
                raise ValueError("an embedder or a reranker gives no tokens: its slo has latency_ms alone")
        elif not self.prompt_tokens or not self.output_tokens:
            raise ValueError(
                "latency needs `prompt_tokens` and `output_tokens`, or, of an embedder or a reranker, `lengths`"
            )
        elif self.batches != (1,):
            raise ValueError("batches are of `lengths`; of prompts write `surface: {batches: …}`")
        return self

    @property
    def encodes(self) -> bool:
        """Whether texts are encoded, and no tokens generated."""
        return bool(self.lengths)

    @property
    def trace(self) -> TraceSpec | None:
        """The arrivals to replay, if there are some."""
        return None if self.workloads is None else self.workloads.trace

    def too_long(self, longest: int) -> Iterator[Contradiction]:
        """Find prompts that leave the `longest` text of the engine no room for their answer, and texts beyond it."""
        if self.lengths:
            if max(self.lengths) > longest:
                what = f"texts of {max(self.lengths)} tokens exceed engine.max_context, {longest}"
                yield Contradiction(("lengths",), what)
        elif max(self.prompt_tokens) + self.output_tokens > longest:
            what = f"{max(self.prompt_tokens)} prompt tokens and {self.output_tokens} output tokens exceed"
            yield Contradiction(("prompt_tokens",), f"{what} engine.max_context, {longest}")

    def overloads(self, engine: EngineSpec) -> Iterator[Contradiction]:
        """Find loads beyond the largest request, or the largest batch, that the engine serves."""
        longest, surface = engine.max_context, self.surface
        if surface is not None:
            if max(surface.batches) > engine.max_batch:
                what = f"{max(surface.batches)} sequences exceed engine.max_batch, {engine.max_batch}"
                yield Contradiction(("surface", "batches"), what)
            prompts, outputs = max(surface.prompt_tokens), max(surface.output_tokens)
            if prompts + outputs > longest:
                what = f"{prompts} prompt tokens and {outputs} output tokens exceed engine.max_context, {longest}"
                yield Contradiction(("surface", "prompt_tokens"), what)
        for name, load in () if self.workloads is None else self.workloads:
            if isinstance(load, WorkloadSpec) and load.longest_tokens > longest:
                what = f"its longest request has {load.longest_tokens} tokens of prompt and answer"
                yield Contradiction(("workloads", name), f"{what}, more than engine.max_context, {longest}")

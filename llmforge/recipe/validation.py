"""The section `validation` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from llmforge.backends import BACKENDS
from llmforge.metrics.agreement import PROMPT_AND_ANSWER, RuntimeName
from llmforge.metrics.tasks import MOST_TASKS
from llmforge.recipe.behaviour import BehaviourSpec
from llmforge.recipe.engine import EngineSpec
from llmforge.recipe.latency import LatencySpec
from llmforge.recipe.quality import QualitySpec
from llmforge.recipe.retrieval import RetrievalSpec
from llmforge.recipe.section import Contradiction, Section, TaskName

_ADD_QUALITY = "add `validation: {quality: …}`"


class ValidationSpec(Section):
    """What to measure on the finished engine."""

    newer: ClassVar[frozenset[str]] = frozenset({"runtimes", "tasks", "behaviour", "retrieval"})

    quality: QualitySpec | None = None
    latency: LatencySpec | None = None
    attribution: bool = Field(
        default=False, description="measure what each lossy pass, and each layer in it, costs; requires quality"
    )
    runtimes: tuple[RuntimeName, ...] = Field(
        default=(),
        description="other runtimes to run the artifact in, and to hold against our own; requires quality, for its "
        "text, and `--runtime NAME=PYTHON` where llmforge's own Python lacks one",
    )
    tasks: Annotated[tuple[TaskName, ...], Field(min_length=1, max_length=MOST_TASKS)] | None = Field(
        default=None,
        description="tasks of lm-evaluation-harness to run: names, or YAML files; requires the extra `eval`",
    )
    behaviour: BehaviourSpec | None = Field(
        default=None, description="chats to answer, and what is held of their answers; requires a chat template"
    )
    retrieval: RetrievalSpec | None = Field(
        default=None, description="queries to find passages for; of an embedder or a reranker"
    )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is measured."""
        return all(each is None for each in (self.quality, self.latency, self.tasks, self.behaviour, self.retrieval))

    @model_validator(mode="after")
    def _each_runtime_once(self) -> Self:
        if len(set(self.runtimes)) != len(self.runtimes):
            raise ValueError(f"runtimes is {list(self.runtimes)}; expected each name once")
        return self

    def contradictions(self, engine: EngineSpec) -> Iterator[Contradiction]:
        """Find what cannot be measured on an engine, or not without another key."""
        longest = engine.max_context
        if self.quality is not None:
            yield from (each.inside("quality") for each in self.quality.contradictions(longest))
        if self.latency is not None:
            yield from (each.inside("latency") for each in self.latency.too_long(longest))
        if self.attribution and self.quality is None:
            what, hint = "there is no text to measure it on", _ADD_QUALITY
            if self.retrieval is not None:
                what = "is of language models: of an embedder or a reranker, each lossy pass is measured by its budget"
                hint = "leave it out"
            yield Contradiction(("attribution",), what, hint)
        if self.runtimes and self.quality is None:
            yield Contradiction(("runtimes",), "there is no text to answer", _ADD_QUALITY)
        if self.runtimes and longest < PROMPT_AND_ANSWER:
            what = f"prompts and answers of {PROMPT_AND_ANSWER} tokens exceed engine.max_context, {longest}"
            yield Contradiction(("runtimes",), what)
        yield from self._not_in_servers(engine)
        if self.latency is not None:
            yield from (each.inside("latency") for each in self.latency.overloads(engine))

    def _not_in_servers(self, engine: EngineSpec) -> Iterator[Contradiction]:
        """Find what is not measured on files that servers of others load; times are where one of them runs here."""
        if (record := BACKENDS[engine.backend].export_format) is None:
            return
        if self.tasks is not None:
            hint = f"serve the artifact, `{record.serve.format(engine='ARTIFACT/engine')}`, then `llmforge eval --url`"
            yield Contradiction(("tasks",), f"are answered by what serves, and that is {record.servers}", hint)
        if self.behaviour is not None:
            hint = f"serve the artifact, `{record.serve.format(engine='ARTIFACT/engine')}`, and ask it there"
            yield Contradiction(("behaviour",), f"is answered by what serves, and that is {record.servers}", hint)
        if self.latency is None:
            return
        if record.served_by not in self.runtimes:
            hint = f"add {record.served_by} to `runtimes`, which measures in it"
            yield Contradiction(("latency",), f"is measured on what serves, and that is {record.servers}", hint)
        for key in ("surface", "workloads", "starts"):
            if getattr(self.latency, key):
                what = f"is measured of llmforge's own engines alone, and {record.servers} loads this one"
                yield Contradiction(("latency", key), what, "leave it out")

"""The section `serving` of a recipe, with that of Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from llmforge.base.errors import InputError
from llmforge.base.located_yaml import Source, dotted
from llmforge.recipe.errors import NAME, collect, describe
from llmforge.recipe.overrides import apply
from llmforge.recipe.section import RecipePath, Section

MOST_PREFIXES = 64  # what a runtime reads at most (llmforge.serving.saved_prefixes)
MOST_DRAFT_TOKENS = 7  # what a runtime reads at most (llmforge.runtime.config)


class TritonSpec(Section):
    """Settings of the Triton model repository."""

    kind: Literal["cpu", "gpu"] | None = Field(
        default=None,
        description="KIND_… of `instance_group`; default: the target's; never KIND_MODEL: an engine has one device",
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="number of processes, each with its own weights and KV cache"
    )
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field(
        default=(), max_length=1024, description="GPU indices, for kind gpu; default: all"
    )
    versions: int | None = Field(default=1, ge=1, le=2**20, description="number of newest versions to serve; null: all")

    @field_validator("kind", mode="before")
    @classmethod
    def _has_one_device(cls, kind: object) -> object:
        if kind == "model":
            raise ValueError("must be 'cpu' or 'gpu': an instance of KIND_MODEL has no device, and an engine needs one")
        return kind


class SpeculationSpec(Section):
    """Who drafts tokens, and how many at once; drafts are verified, and change no answer."""

    method: Literal["prompt-lookup", "draft", "eagle3"] = Field(
        description="prompt-lookup: what followed the last words where they stood before; draft: a smaller model; "
        "eagle3: a head that reads what the model computed"
    )
    max_tokens: int = Field(
        default=MOST_DRAFT_TOKENS, ge=1, le=MOST_DRAFT_TOKENS, description="maximum number of tokens of a draft"
    )
    checkpoint: RecipePath | None = Field(
        default=None,
        description="with method draft: folder of a smaller checkpoint with the same tokenizer, relative to the "
        "recipe; with method eagle3: folder of the head",
    )
    recipe: RecipePath | None = Field(
        default=None, description="with method draft or eagle3: the recipe of the smaller engine; default: this one"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _is_built(cls, method: object) -> object:
        if method in ("mtp", "eagle", "medusa", "heads"):
            raise ValueError(
                f"must be 'prompt-lookup', 'draft' or 'eagle3', not {method!r}: of heads, EAGLE-3's are compiled, and "
                "layers for multi-token prediction (MTP) or other heads are not"
            )
        return method

    @model_validator(mode="after")
    def _draft_has_a_model(self) -> Self:
        given = self.checkpoint is not None or self.recipe is not None
        if self.method == "eagle3":
            if self.checkpoint is None:
                raise ValueError("method is eagle3; expected `checkpoint`, the folder of the head")
            return self
        if given != (self.method == "draft"):
            expected = "expected none of `checkpoint` and `recipe`" if given else "expected `checkpoint` or `recipe`"
            raise ValueError(f"method is {self.method}; {expected}")
        return self


class PrefixSpec(Section):
    """What prompts begin with: a text, or what the chat template writes before the user's next message."""

    prompt: str | None = Field(default=None, min_length=1, description="a text that plain prompts begin with")
    messages: tuple[dict[str, Any], ...] | None = Field(
        default=None, min_length=1, max_length=4096, description="messages before the user's next one"
    )
    tools: tuple[dict[str, Any], ...] | None = Field(
        default=None, min_length=1, max_length=128, description="with `messages`: functions that the model is shown"
    )

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None) or (self.prompt is not None and self.tools is not None):
            raise ValueError("expected either `prompt`, or `messages` with `tools` or without")
        return self


_PrefixName = Annotated[str, Field(pattern=NAME)]
_SystemPrompt = Annotated[str, Field(min_length=1)]


class ServingSpec(Section):
    """Serving options; unset ones take the default of the runtime."""

    newer: ClassVar[frozenset[str]] = frozenset({"prefixes"})

    max_queue: int | None = Field(
        default=None, ge=0, le=2**20, description="maximum number of waiting requests; further ones are refused"
    )
    step_tokens: int | None = Field(default=None, ge=1, le=2**24, description="maximum tokens per engine step")
    prefix_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        le=2**50,
        description="memory for reusing the KV cache of shared prefixes, in bytes; 0 disables it",
    )
    speculation: Literal["off", "prompt-lookup"] | SpeculationSpec | None = Field(
        default=None, description="speculative decoding: `prompt-lookup`, or a method and its options"
    )
    prefixes: dict[Annotated[str, Field(pattern=NAME)], Annotated[str, Field(min_length=1)] | PrefixSpec] | None = (
        Field(
            default=None,
            min_length=1,
            max_length=MOST_PREFIXES,
            description="what prompts begin with, by names: a system prompt, or `messages` or a `prompt`; keys and "
            "values of each are computed by the build, and ship",
        )
    )
    timeout_s: float | None = Field(default=None, gt=0, le=1e6, description="default deadline of a request")
    triton: TritonSpec = Field(default_factory=TritonSpec)

    @model_validator(mode="after")
    def _gpus_have_a_kind(self) -> Self:
        if self.triton.gpus and self.triton.kind == "cpu":
            raise ValueError(f"`gpus` requires kind gpu, not {self.triton.kind}")
        return self

    @property
    def draft(self) -> SpeculationSpec | None:
        """Who drafts tokens; None: nobody does."""
        given = self.speculation
        if isinstance(given, SpeculationSpec):
            return given
        return SpeculationSpec(method="prompt-lookup") if given == "prompt-lookup" else None

    @property
    def named_prefixes(self) -> dict[str, dict[str, Any]]:
        """What prompts begin with, as `llmforge.serving.saved_prefixes.prefix_ids` takes it, by its name."""
        return {
            name: {"messages": [{"role": "system", "content": given}]}
            if isinstance(given, str)
            else given.model_dump(mode="json", exclude_none=True)
            for name, given in (self.prefixes or {}).items()
        }

    def of_language_models(self) -> list[str]:
        """Name the options that are set and that embedders and rerankers do not have."""
        of_texts = ("step_tokens", "prefix_cache_bytes", "speculation", "prefixes")
        return [name for name in of_texts if getattr(self, name) is not None]

    @classmethod
    def published(cls, recipe: Mapping[str, Any], where: str) -> ServingSpec:
        """Read the section of a resolved recipe that stands in an artifact; `where` names that.

        Raises:
            InputError: there is none, or it is not one of this version.
        """
        try:
            return cls.model_validate_json(json.dumps(recipe.get("serving")))
        except ValidationError as error:
            first = error.errors()[0]
            key = dotted(("serving", *first["loc"]))
            raise InputError(f"{where}: recipe: {key}: {first['msg']}", hint="build the artifact again") from None

    def changed(self, overrides: Sequence[str]) -> ServingSpec:
        """Apply overrides, `KEY.KEY=VALUE` with values in YAML.

        Raises:
            RecipeError, UsageError: one names nothing that could be set, or a value that is not allowed.
        """
        source, schema = Source(Path("serving"), self.model_dump(mode="json")), self.model_json_schema()
        apply(overrides, source, schema)
        try:
            return ServingSpec.model_validate_json(json.dumps(source.data))
        except ValidationError as error:
            raise collect(describe(error, source, schema)) from None

"""The section `adapters` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from llmforge.checkpoint.adapters.source import AdapterSource
from llmforge.recipe.errors import NAME
from llmforge.recipe.section import Contradiction, RecipePath, Section

MOST_ADAPTERS = 1024


class AdapterSpec(Section):
    """A LoRA adapter as peft saves it: merged into the weights, or kept apart and chosen by each request."""

    name: str = Field(pattern=NAME, description="name; requests choose one kept apart by it")
    path: RecipePath = Field(description="folder with adapter_config.json; relative to the recipe")
    mode: Literal["merged", "apart"] = Field(
        default="merged", description="merged: into the weights; apart: chosen by each request, of several"
    )
    weight: float = Field(
        default=1.0, allow_inf_nan=False, ge=-1e3, le=1e3, description="factor of what it adds to the weights"
    )

    @property
    def source(self) -> AdapterSource:
        """The adapter as a checkpoint reads it."""
        return AdapterSource(self.name, self.path, self.weight)


def contradictions(adapters: Sequence[AdapterSpec]) -> Iterator[Contradiction]:
    """Find names that stand twice."""
    named = [each.name for each in adapters]
    for number, name in enumerate(named):
        if name in named[:number]:
            yield Contradiction((number, "name"), f"there are two adapters {name}")

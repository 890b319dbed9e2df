"""The section `validation.behaviour` of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from llmforge import recipes
from llmforge.metrics.behaviour import document
from llmforge.metrics.behaviour.document import MOST_CHATS, BehaviourDocument
from llmforge.recipe.section import Section, anchor

SHIPPED = {"default": "behaviour.jsonl", "long": "behaviour-long.jsonl"}  # in llmforge.recipes.TEXT, by name


def _anchored(data: str, info: ValidationInfo) -> str:
    return data if data in SHIPPED else str(anchor(Path(data), info))


class BehaviourSpec(Section):
    """Answer chats with the engine and with the checkpoint, and compare what both do."""

    data: Annotated[str, AfterValidator(_anchored)] = Field(
        default="default",
        description="JSON Lines file of {messages} with what is expected (docs/behaviour.md); default: the documents "
        "that llmforge ships; long: ten more, with answers of up to 4,096 tokens",
    )
    of_each_slice: int | None = Field(
        default=None, ge=1, le=MOST_CHATS, description="documents of each slice, the first ones; default: all"
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=document.MOST_TOKENS, description="tokens of an answer, if a document allows more"
    )

    @property
    def file(self) -> Path:
        """The file of the documents."""
        return recipes.TEXT / SHIPPED[self.data] if self.data in SHIPPED else Path(self.data)

    def documents(self) -> tuple[BehaviourDocument, ...]:
        """Read the documents.

        Raises:
            DataError: see `document.read_documents`.
        """
        found = document.read_documents(self.file)
        if self.of_each_slice is not None:
            found = document.quick(found, self.of_each_slice)
        if self.max_tokens is None:
            return found
        update: list[dict[str, Any]] = [{"max_tokens": min(self.max_tokens, each.max_tokens)} for each in found]
        return tuple(each.model_copy(update=change) for each, change in zip(found, update, strict=True))

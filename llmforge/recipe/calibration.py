"""The section `calibration` of a recipe."""

from __future__ import annotations

from pydantic import Field

from llmforge.recipe.section import RecipePaths, Section


class CalibrationSpec(Section):
    """Text for calibration: JSON Lines files of `{text}` or `{messages, tools?}`."""

    data: RecipePaths = Field(
        description="JSON Lines file of {text} or {messages}, or a list of them, each read as evenly as there is text; "
        "relative to the recipe"
    )
    samples: int = Field(
        ge=1, le=2**20, description="number of sequences to run; of chats, which are shorter, more: as many tokens"
    )
    length: int = Field(ge=2, le=2**24, description="tokens per sequence")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed for choosing sequences")
    threads: int = Field(
        default=2, ge=1, le=64, description="threads of every product that decides a code; another number, other bits"
    )

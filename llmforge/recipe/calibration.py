"""The section `calibration` of a recipe."""

from __future__ import annotations

from pydantic import Field

from llmforge.recipe.section import RecipePath, Section


class CalibrationSpec(Section):
    """Text for calibration: a JSON Lines file of `{id, text}`."""

    data: RecipePath = Field(description="JSON Lines file of {id, text}; relative to the recipe")
    samples: int = Field(ge=1, le=2**20, description="number of sequences to run")
    length: int = Field(ge=2, le=2**24, description="tokens per sequence")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed for choosing sequences")
    threads: int = Field(
        default=2, ge=1, le=64, description="threads of every product that decides a code; another number, other bits"
    )

"""Recipes: their schema, overrides from the command line, and errors with file and line."""

from llmforge.recipe.schema import (
    CalibrationSpec,
    EngineSpec,
    GatesFile,
    GateSpec,
    QualitySpec,
    Recipe,
    ServingSpec,
    ValidationSpec,
    json_schema,
    misdirected,
)

__all__ = [
    "CalibrationSpec",
    "EngineSpec",
    "GateSpec",
    "GatesFile",
    "QualitySpec",
    "Recipe",
    "ServingSpec",
    "ValidationSpec",
    "json_schema",
    "misdirected",
]

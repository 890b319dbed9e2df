"""Recipes: their schema, overrides from the command line, and errors with file and line."""

from llmforge.recipe.schema import (
    CalibrationSpec,
    EngineSpec,
    GateSpec,
    LatencySpec,
    Recipe,
    ServingSpec,
    ValidationSpec,
    WorkloadsSpec,
    json_schema,
)

__all__ = [
    "CalibrationSpec",
    "EngineSpec",
    "GateSpec",
    "LatencySpec",
    "Recipe",
    "ServingSpec",
    "ValidationSpec",
    "WorkloadsSpec",
    "json_schema",
]

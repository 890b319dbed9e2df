"""Recipes: their schema, overrides from the command line, and errors with file and line."""

from llmforge.recipe.schema import (
    TASK_FILES,
    CalibrationSpec,
    EngineSpec,
    Gates,
    GatesFile,
    GateSpec,
    LatencySpec,
    QualitySpec,
    Recipe,
    ServingSpec,
    ValidationSpec,
    WorkloadsSpec,
    json_schema,
    misdirected,
)

__all__ = [
    "TASK_FILES",
    "CalibrationSpec",
    "EngineSpec",
    "GateSpec",
    "Gates",
    "GatesFile",
    "LatencySpec",
    "QualitySpec",
    "Recipe",
    "ServingSpec",
    "ValidationSpec",
    "WorkloadsSpec",
    "json_schema",
    "misdirected",
]

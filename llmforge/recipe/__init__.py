"""Recipes: their sections, overrides from the command line, and errors with file and line."""

from llmforge.recipe.behaviour import BehaviourSpec
from llmforge.recipe.calibration import CalibrationSpec
from llmforge.recipe.engine import EngineSpec
from llmforge.recipe.gates import Gates, GatesFile, GateSpec, misdirected
from llmforge.recipe.json_schema import json_schema
from llmforge.recipe.latency import LatencySpec, WorkloadSpec, WorkloadsSpec
from llmforge.recipe.quality import QualitySpec
from llmforge.recipe.recipe import Recipe
from llmforge.recipe.retrieval import RetrievalSpec
from llmforge.recipe.section import TASK_FILES
from llmforge.recipe.serving import ServingSpec
from llmforge.recipe.validation import ValidationSpec

__all__ = [
    "TASK_FILES",
    "BehaviourSpec",
    "CalibrationSpec",
    "EngineSpec",
    "GateSpec",
    "Gates",
    "GatesFile",
    "LatencySpec",
    "QualitySpec",
    "Recipe",
    "RetrievalSpec",
    "ServingSpec",
    "ValidationSpec",
    "WorkloadSpec",
    "WorkloadsSpec",
    "json_schema",
    "misdirected",
]

"""Recipes that ship with llmforge, and the text that a recipe has where its user gives none."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TEXT = FOLDER / "text"  # technical documentation: calibration.jsonl, evaluation.jsonl, NOTICE

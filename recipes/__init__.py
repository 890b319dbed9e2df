"""Recipes that ship with llmforge, and the text that a recipe has where its user gives none."""

from pathlib import Path

TEXT = Path(__file__).with_name("text")  # technical documentation: calibration.jsonl, evaluation.jsonl, NOTICE

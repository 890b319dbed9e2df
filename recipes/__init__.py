"""Recipes that ship with llmforge, and the text that a recipe has where its user gives none."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OF_ENCODERS = ("embedder", "reranker")  # the others are for language models
TEXT = FOLDER / "text"  # technical documentation: calibration.jsonl, evaluation.jsonl, NOTICE

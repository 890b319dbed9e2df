"""The texts of a build: what calibration reads, what quality is measured on, and what budgets are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmforge.base.errors import CheckpointError, DataError
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.documents import Document
from llmforge.checkpoint.text import TokenWindow
from llmforge.metrics.quality import MOST_DOCUMENTS
from llmforge.recipe import CalibrationSpec, QualitySpec, Recipe

BUDGET_WINDOWS = 24  # windows of text, spread over all documents, that the budget of a lossy pass is measured on


def check(recipe: Recipe) -> None:
    """Read both texts; refuse evaluation on what calibration has seen, and on too many documents."""
    calibration, quality = recipe.calibration, recipe.validation.quality
    measured = _measured(quality) if quality else []
    if quality and len(measured) > MOST_DOCUMENTS:
        raise DataError(
            f"{quality.data}: {len(measured)} documents; quality is measured on at most {MOST_DOCUMENTS}",
            hint=f"set validation.quality.max_documents: {MOST_DOCUMENTS}",
        )
    documents.refuse_overlap(documents.read_documents(calibration.data) if calibration else [], measured)


def _measured(spec: QualitySpec) -> list[Document]:
    """Read the documents that quality is measured on: all of the file, or as many as are asked for, evenly spread."""
    found = documents.read_documents(spec.data)
    count = min(spec.max_documents or len(found), len(found))
    return [found[place * len(found) // count] for place in range(count)]


def _windows(checkpoint: Checkpoint, read: Sequence[Document], length: int) -> list[TokenWindow]:
    """Cut documents into windows of tokens that the model has.

    Raises:
        CheckpointError: the tokenizer gives others.
    """
    found = text.windows(checkpoint.tokenizer, read, length, checkpoint.bos_token_id)
    highest, vocabulary = max((int(each.ids.max()) for each in found), default=0), checkpoint.geometry.vocabulary
    if highest >= vocabulary:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer gives token {highest}, and vocab_size of the model is {vocabulary}",
            hint="use the tokenizer that the model was trained with, or resize the model's embedding",
        )
    return found


def calibration_windows(spec: CalibrationSpec, read: Sequence[Document], checkpoint: Checkpoint) -> list[TokenWindow]:
    """Draw the windows that calibration reads of the documents `read`."""
    pool = _windows(checkpoint, read, spec.length)
    return text.sample(pool, spec.samples, spec.seed)


def evaluation_windows(recipe: Recipe, checkpoint: Checkpoint) -> list[TokenWindow]:
    """Cut the text that quality is measured on into windows; [] where the recipe asks for none."""
    spec = recipe.validation.quality
    if spec is None:
        return []
    cut = _windows(checkpoint, _measured(spec), spec.context)
    return cut if spec.max_tokens is None else text.spread(cut, spec.max_tokens)


def budget_windows(evaluation: Sequence[TokenWindow], recipe: Recipe, checkpoint: Checkpoint) -> list[TokenWindow]:
    """Choose the windows that budgets are measured on: of the `evaluation` text, else of the calibration text.

    Each third of them is spread over all documents: a budget may be decided before the others are read.
    """
    pool = evaluation
    if not pool and recipe.calibration is not None:
        read = documents.read_documents(recipe.calibration.data)
        pool = calibration_windows(recipe.calibration, read, checkpoint)
    pool = [window for window in pool if len(window.ids) > 1]
    picked = np.linspace(0, len(pool) - 1, min(BUDGET_WINDOWS, len(pool))).round().astype(int)
    return [pool[i] for third in range(3) for i in picked[third::3]]


def of_documents(recipe: Recipe, checkpoint: Checkpoint, evaluation: Sequence[TokenWindow]) -> list[TokenWindow]:
    """Choose the first window of each document of the `evaluation` text, else of the calibration text.

    What is lost in parts of a graph is compared between documents, which are independent of one another.
    """
    pool = evaluation
    if not pool and recipe.calibration is not None:
        read = documents.read_documents(recipe.calibration.data)
        pool = _windows(checkpoint, read, recipe.calibration.length)
    first: dict[str, TokenWindow] = {}
    for window in pool:
        if len(window.ids) > 1:
            first.setdefault(window.document, window)
    return list(first.values())

"""The texts of a build, as tokens: what calibration reads, what quality is measured on, and what budgets are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from llmforge.base.errors import DataError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.documents import Document
from llmforge.checkpoint.text import TokenizedDocument, TokenWindow
from llmforge.measure import chat_answers
from llmforge.metrics import catalog
from llmforge.metrics.quality import MOST_DOCUMENTS
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.quantization.statistics import Demand
from llmforge.recipe import QualitySpec, Recipe

if TYPE_CHECKING:
    from llmforge.serving.prompts import TextEncoder

BUDGET_WINDOWS = 24  # windows of text, spread over all documents, that the budget of a lossy pass is measured on

# From a checkpoint, prompts by the ids of their documents, and progress: what it says, or why it is not asked.
Answering = Callable[[Checkpoint, Mapping[str, Sequence[int]], Progress], Mapping[str, Sequence[int]] | str]


def check(recipe: Recipe) -> None:
    """Read both texts; refuse evaluation on what calibration has seen, and on too many documents."""
    calibration, quality = recipe.calibration, recipe.validation.quality
    measured = [*itertools.chain.from_iterable(_measured(quality))] if quality else []
    if quality and len(measured) > MOST_DOCUMENTS:
        raise DataError(
            f"{', '.join(map(str, quality.data))}: {len(measured)} documents; quality is measured on at most "
            f"{MOST_DOCUMENTS}",
            hint=f"set validation.quality.max_documents: {MOST_DOCUMENTS}",
        )
    _check_gates(recipe, any(document.is_chat for document in measured))
    seen = itertools.chain.from_iterable(documents.read_all(calibration.data) if calibration else [])
    documents.refuse_overlap([*seen], measured)


def _check_gates(recipe: Recipe, has_chats: bool) -> None:
    """Refuse a gate on answers of chats where the evaluation text has none."""
    named = {name: catalog.named(name) for name in recipe.gates}
    of_answers = [n for n, m in named.items() if isinstance(m, QualityMetric) and m.source == "answer_tokens"]
    if of_answers and not has_chats:
        raise DataError(
            f"gates.{of_answers[0]}: the evaluation text has no chats, so that it is not measured",
            hint="add a file of {messages} to validation.quality.data, or remove the gate",
        )


def check_template(recipe: Recipe, template: object) -> None:
    """Refuse chats where there is no chat `template`, neither the checkpoint's nor the recipe's.

    Raises:
        DataError: the message names the first; or the documents of `validation.behaviour` cannot be read.
    """
    sections = recipe.calibration, recipe.validation.quality
    paths = dict.fromkeys(path for section in sections if section is not None for path in section.data)
    chats = (each for path in paths for each in documents.read_documents(path) if each.is_chat)
    if template is None and (first := next(chats, None)) is not None:
        raise DataError(f"{first.where}: a chat, and the checkpoint has no chat template", hint=text.NO_TEMPLATE)
    if (behaviour := recipe.validation.behaviour) is not None:
        behaviour.documents()
        if template is None:
            raise DataError(f"{behaviour.file}: chats, and the checkpoint has no chat template", hint=text.NO_TEMPLATE)


def encoder_of(checkpoint: Checkpoint) -> TextEncoder:
    """Make what turns texts and chats into tokens, as serving will."""
    from llmforge.serving.chat import ChatTemplate, special_tokens  # which loads engines
    from llmforge.serving.prompts import TextEncoder

    if checkpoint.chat_template is None:
        return TextEncoder(checkpoint.tokenizer, None)
    template = ChatTemplate(checkpoint.chat_template, special_tokens(checkpoint.path), str(checkpoint.path))
    return TextEncoder(checkpoint.tokenizer, template)


def windows_of(checkpoint: Checkpoint, read: Sequence[Document], length: int) -> list[TokenWindow]:
    """Cut answered documents into windows."""
    return text.windows(text.ids_of(read, encoder_of(checkpoint), checkpoint.eos_token_ids), length)


def _measured(spec: QualitySpec) -> list[list[Document]]:
    """Read the documents that quality is measured on: all of each file, or as many as are asked for, evenly spread."""
    found = documents.read_all(spec.data)
    asked = sum(map(len, found)) if spec.max_documents is None else spec.max_documents
    counts = text.shares(asked, [*map(len, found)])
    return [
        [read[place * len(read) // count] for place in range(count)] for read, count in zip(found, counts, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class BuildTexts:
    """The texts of `recipe` as tokens of `checkpoint`; each is read when it is asked for.

    Chats that end before the assistant speaks are answered by the checkpoint, through `answering`, all at once; where
    it is not asked, they are left out, and a note says why. `demands` are those of the passes: without any, nothing
    is calibrated.
    """

    recipe: Recipe
    checkpoint: Checkpoint
    demands: Sequence[Demand]
    answering: Answering
    progress: Progress

    @cached_property
    def calibration_documents(self) -> list[list[Document]]:
        """What calibration reads, by file."""
        spec = self.recipe.calibration
        return [] if spec is None else documents.read_all(spec.data)

    @cached_property
    def calibration(self) -> list[TokenWindow]:
        """The windows that calibration reads.

        Raises:
            DataError: there are fewer than the recipe asks for.
            CheckpointError: the tokenizer gives tokens that the model does not have.
        """
        spec = self.recipe.calibration
        assert spec is not None
        pools = [self._windows(read, spec.length) for read in self.calibration_documents]
        if not any(window.answers is not None for pool in pools for window in pool):
            counts = text.shares(spec.samples, [*map(len, pools)])
            if sum(counts) < spec.samples:
                return text.sample([*itertools.chain(*pools)], spec.samples, spec.seed)  # which refuses it
            drawn = [text.sample(pool, count, spec.seed) for pool, count in zip(pools, counts, strict=True)]
        else:
            shares = text.shares(spec.samples * spec.length, [sum(len(w.ids) for w in pool) for pool in pools])
            drawn = [text.sample_tokens(pool, share, spec.seed) for pool, share in zip(pools, shares, strict=True)]
        return [*itertools.chain(*drawn)]

    @cached_property
    def evaluation(self) -> list[TokenWindow]:
        """The windows that quality is measured on; [] where the recipe asks for none.

        Raises:
            CheckpointError: the tokenizer gives tokens that the model does not have.
        """
        spec = self.recipe.validation.quality
        if spec is None:
            return []
        pools = [self._windows(read, spec.context) for read in self._evaluation_documents]
        if spec.max_tokens is not None:
            shares = text.shares(spec.max_tokens, [sum(len(window.ids) for window in pool) for pool in pools])
            pools = [text.spread(pool, share) for pool, share in zip(pools, shares, strict=True) if share]
        return [*itertools.chain(*pools)]

    @property
    def notes(self) -> list[str]:
        """Say what was left out of the texts that were read."""
        said = self._said
        if isinstance(said, str):
            return [f"{len(self._unanswered)} chats that the checkpoint was to answer are left out: {said}"]
        left = sum(each.id not in said for each in self._unanswered)
        why = f"with an answer they take more than the model's {self.checkpoint.geometry.context} tokens"
        return [f"{left} chats that the checkpoint was to answer are left out: {why}"] if left else []

    def budget_windows(self) -> list[TokenWindow]:
        """Choose the windows that budgets are measured on: of the evaluation text, else of the calibration text.

        Each third of them is spread over all documents: a budget may be decided before the others are read.
        """
        pool = self.evaluation or (self.calibration if self.recipe.calibration is not None else [])
        pool = [window for window in pool if len(window.ids) > 1]
        picked = np.linspace(0, len(pool) - 1, min(BUDGET_WINDOWS, len(pool))).round().astype(int)
        return [pool[i] for third in range(3) for i in picked[third::3]]

    def of_documents(self) -> list[TokenWindow]:
        """Choose the first window of each document of the evaluation text, else of the calibration text.

        What is lost in parts of a graph is compared between documents, which are independent of one another.
        """
        pool, spec = self.evaluation, self.recipe.calibration
        if not pool and spec is not None:
            pool = [window for read in self.calibration_documents for window in self._windows(read, spec.length)]
        first: dict[str, TokenWindow] = {}
        for window in pool:
            if len(window.ids) > 1:
                first.setdefault(window.document, window)
        return list(first.values())

    def further(self, read: Sequence[Document], length: int) -> list[TokenWindow]:
        """Cut further documents, which are no part of the recipe's text, into windows."""
        said = self._answers([each for each in read if each.is_unanswered])
        return self._cut(read, length, {} if isinstance(said, str) else said)

    @cached_property
    def _evaluation_documents(self) -> list[list[Document]]:
        spec = self.recipe.validation.quality
        return [] if spec is None else _measured(spec)

    @cached_property
    def _encoder(self) -> TextEncoder:
        return encoder_of(self.checkpoint)

    @cached_property
    def _unanswered(self) -> list[Document]:
        """List the chats that the checkpoint is to answer: all that this build reads."""
        calibrated = self.calibration_documents if self.demands or not self._evaluation_documents else []
        every = itertools.chain(*calibrated, *self._evaluation_documents)
        return [document for document in every if document.is_unanswered]

    @cached_property
    def _said(self) -> Mapping[str, Sequence[int]] | str:
        return self._answers(self._unanswered)

    def _answers(self, unanswered: Sequence[Document]) -> Mapping[str, Sequence[int]] | str:
        if not unanswered:
            return {}
        prompts = {each.id: each.ids.tolist() for each in text.ids_of(unanswered, self._encoder)}
        if (context := self.checkpoint.geometry.context) is not None:
            prompts = {name: ids for name, ids in prompts.items() if len(ids) + chat_answers.MOST_TOKENS <= context}
        return self.answering(self.checkpoint, prompts, self.progress)

    def _windows(self, read: Sequence[Document], length: int) -> list[TokenWindow]:
        return self._cut(read, length, {} if isinstance(self._said, str) else self._said)

    def _cut(self, read: Sequence[Document], length: int, said: Mapping[str, Sequence[int]]) -> list[TokenWindow]:
        """Cut documents into windows of tokens that the model has; chats without an answer are left out."""
        answered = [document for document in read if not document.is_unanswered or document.id in said]
        found: list[TokenizedDocument] = text.ids_of(answered, self._encoder, self.checkpoint.eos_token_ids, said)
        cut = text.windows(found, length)
        text.check_vocabulary(cut, self.checkpoint.geometry.vocabulary, str(self.checkpoint.path))
        return cut

"""A figure of documents that were measured, and the paired difference of two artifacts over the same documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llmforge.metrics import catalog
from llmforge.metrics.quality import DocumentSums, OfSums, Quality
from llmforge.metrics.studentized import Studentized, studentized
from llmforge.metrics.tokens import REFERENCE_NLL, Floats

SAME_BASELINE = 1e-4  # relative; the baseline's fp32 logits differ by less between processors


def figure(form: OfSums, documents: Sequence[DocumentSums]) -> Studentized:
    """Studentize a figure of `documents`."""
    return studentized(_columns(form, documents), lambda totals: _figures(form, totals)[:, None])[0]


def spreads(quality: Quality | None, metrics: Iterable[str]) -> dict[str, Studentized]:
    """Studentize those of `metrics` that are made of sums over documents and were measured."""
    if quality is None:
        return {}
    found = {}
    for name in metrics:
        form = getattr(catalog.named(name), "form", None)
        if isinstance(form, OfSums) and form.bounded and name in quality.figures:
            documents = quality.per_document if form.source == "text" else quality.per_document_decoded
            found[name] = figure(form, documents)
    return found


def difference(form: OfSums, ours: Sequence[DocumentSums], theirs: Sequence[DocumentSums]) -> Studentized:
    """Studentize ours - theirs of a figure, both over the same documents in the same order."""
    if [each.document for each in ours] != [each.document for each in theirs]:
        raise ValueError("a paired difference is of the same documents in the same order")
    left, right = _columns(form, ours), _columns(form, theirs)
    width = left.shape[1]

    def statistic(totals: Floats) -> Floats:
        moved: Floats = _figures(form, totals[:, :width]) - _figures(form, totals[:, width:])
        return moved[:, None]

    return studentized(np.concatenate([left, right], 1), statistic)[0]


def paired(
    ours: Sequence[DocumentSums], theirs: Sequence[DocumentSums]
) -> tuple[list[DocumentSums], list[DocumentSums]]:
    """Keep the documents that both sides measured: by the same name, as many tokens, beside the same baseline."""
    known = {each.document: each for each in theirs}
    pairs = [(each, known[each.document]) for each in ours if _same(each, known.get(each.document))]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def _same(ours: DocumentSums, theirs: DocumentSums | None) -> bool:
    if theirs is None or ours.tokens != theirs.tokens:
        return False
    # The same text in another cut, or beside another checkpoint, has another likelihood.
    sums: list[Mapping[str, float]] = [ours.figures, theirs.figures]
    here, there = (each.get(REFERENCE_NLL.name, math.nan) for each in sums)
    return math.isclose(here, there, rel_tol=SAME_BASELINE)


def _columns(form: OfSums, documents: Sequence[DocumentSums]) -> Floats:
    names = [value.name for value in form.values]
    return np.array([(each.tokens, *(each.figures[name] for name in names)) for each in documents], np.float64)


def _figures(form: OfSums, totals: Floats) -> Floats:
    made = form.figure(*totals.T)
    if form.finish is float:
        return made
    return np.array([form.finish(float(each)) for each in made])

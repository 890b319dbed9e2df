"""A figure of documents that were measured, and the paired difference of two artifacts over the same documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from llmforge.metrics import catalog, document_quantiles
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import DocumentSums, OfSums, Quality, Quantile, Source
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
            found[name] = figure(form, quality.sums(form.source))
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


def of_source(
    source: Source, ours: Quality | None, theirs: Quality | None, measured: Sequence[DocumentSums]
) -> tuple[list[DocumentSums], list[DocumentSums]]:
    """Keep those of the documents `measured` of both that both have as many tokens of in another source than text."""
    if ours is None or theirs is None:
        return [], []
    known, same = {each.document: each for each in theirs.sums(source)}, {each.document for each in measured}
    found = [(each, known.get(each.document)) for each in ours.sums(source) if each.document in same]
    pairs = [(left, right) for left, right in found if right is not None and left.tokens == right.tokens]
    return [left for left, _ in pairs], [right for _, right in pairs]


def quantile_differences(
    forms: Mapping[str, Quantile], ours: Quality | None, theirs: Quality | None, documents: Set[str]
) -> dict[str, Estimate]:
    """Bound ours - theirs of quantiles over the tokens that both kept of `documents`; {}: of none in the same windows.

    `documents` were measured of both.
    """
    if ours is None or theirs is None:
        return {}
    known = {each.document: each for each in theirs.per_token if each.document in documents}
    pairs = [(each, known[each.document]) for each in ours.per_token if each.document in known]
    pairs = [(left, right) for left, right in pairs if left.windows == right.windows]
    if not pairs:
        return {}
    owners = np.repeat(np.arange(len(pairs)), [left.tokens for left, _ in pairs])
    found: dict[str, Estimate] = {}
    for value in {form.value.name for form in forms.values()}:
        mine = {name: form for name, form in forms.items() if form.value.name == value}
        left, right = (np.concatenate([pair[side].values(value) for pair in pairs]) for side in (0, 1))
        shares = [form.share for form in mine.values()]
        moved: list[float] = [math.nan] * len(mine)
        within: Sequence[tuple[float, float] | None] | None = None
        if np.isfinite(left).all() and np.isfinite(right).all():
            moved = (np.quantile(left, shares) - np.quantile(right, shares)).tolist()
            within = document_quantiles.difference_bounds(left, right, owners, shares)
        for name, difference, bound in zip(mine, moved, within or (None,) * len(mine), strict=True):
            low, high = (None, None) if bound is None else (min(bound[0], difference), max(bound[1], difference))
            found[name] = Estimate(value=difference, low=low, high=high, samples=len(pairs))
    return found


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

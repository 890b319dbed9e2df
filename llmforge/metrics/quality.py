"""Figures of quality: made from values of each predicted token, with intervals over documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from llmforge.metrics.intervals import Estimate, bootstrap
from llmforge.metrics.record import Figures
from llmforge.metrics.tokens import Floats, TokenValue

MOST_DOCUMENTS = 10_000  # of an evaluation; as many bound their figures in 3 s, when `verify` makes them again

TokenScores = Mapping[str, NDArray[Any]]  # of each token of a text [R], by the name of its value


@dataclass(frozen=True)
class OfSums:
    """A figure that sums over tokens are enough for, of all documents, of one, or of a resample."""

    values: tuple[TokenValue, ...]
    figure: Callable[..., Floats]  # makes figures [r] of the number of tokens [r] and the sum of each value [r]
    finish: Callable[[float], float] = float  # monotone; applied to a figure and to its bounds
    bounded: bool = True  # with an interval, so that a gate can decide on it

    def of(self, sums: DocumentSums) -> float:
        """Make the figure of one document."""
        totals = (sums.tokens, *(sums.figures[value.name] for value in self.values))
        return self.finish(float(self.figure(*(np.float64(total) for total in totals))))


@dataclass(frozen=True)
class OfTokens:
    """A figure of a value of all tokens [N], with no interval."""

    value: TokenValue
    figure: Callable[[Floats], float]

    def of(self, values: Floats) -> float:
        """Make the figure."""
        return float(self.figure(values))


@dataclass(frozen=True)
class Histogram:
    """Tokens by the logarithm of a value. What lies beyond the ends, and rounding below 0, goes to the end bins."""

    value: TokenValue
    decades: tuple[int, int]  # log10 of both ends
    bins_per_decade: int = 4
    marks: Mapping[str, str] = field(default_factory=dict)  # figures marked on it: label, and name of the metric

    def of(self, values: Floats) -> tuple[int, ...]:
        """Count the tokens in each bin."""
        low, high = self.decades
        bins = (high - low) * self.bins_per_decade
        decades = np.log10(np.maximum(values, 10.0**low))
        at = np.clip(np.floor((decades - low) * self.bins_per_decade).astype(int), 0, bins - 1)
        return tuple(int(tokens) for tokens in np.bincount(at, minlength=bins))


Form = OfSums | OfTokens | Histogram


class DocumentSums(Figures):
    """Sums over the predicted tokens of one document, by the names of the values; resamples are made of them."""

    __pydantic_extra__: dict[str, int | float]

    document: str
    tokens: int


class Quality(Figures):
    """How far the artifact is from the baseline, over all predicted tokens; intervals are over documents."""

    __pydantic_extra__: dict[str, Estimate | float | tuple[int, ...]]

    context: int  # tokens of the longest window, BOS included
    documents: int
    windows: int
    tokens: int  # predicted ones
    seed: int  # of the bootstrap
    per_document: tuple[DocumentSums, ...] = Field(max_length=MOST_DOCUMENTS)

    @model_serializer(mode="wrap")
    def _long_ones_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what is long behind the figures."""
        fields: dict[str, Any] = write(self)
        fields["per_document"] = fields.pop("per_document")
        return fields


def values(forms: Sequence[Form]) -> tuple[TokenValue, ...]:
    """List what has to be known of each token, every value once."""
    found = (form.values if isinstance(form, OfSums) else (form.value,) for form in forms)
    return tuple({value.name: value for group in found for value in group}.values())


def summarize(
    forms: Mapping[str, Form], scores: Mapping[str, Sequence[TokenScores]], *, context: int, seed: int
) -> Quality:
    """Make the figures of `forms`, by name, with their bounds, from the scores of each document's windows."""
    of_sums = {name: form for name, form in forms.items() if isinstance(form, OfSums)}
    per_document = tuple(_sums(document, parts, _summed(of_sums)) for document, parts in scores.items())
    figures: dict[str, Any] = {**estimates(of_sums, per_document, seed)}
    for name, form in forms.items():
        if not isinstance(form, OfSums):
            parts = [part[form.value.name] for windows in scores.values() for part in windows]
            figures[name] = form.of(np.concatenate(parts))
    return Quality(
        context=context,
        documents=len(per_document),
        windows=sum(len(windows) for windows in scores.values()),
        tokens=sum(sums.tokens for sums in per_document),
        seed=seed,
        per_document=per_document,
        **{name: figures[name] for name in forms},
    )


def _summed(forms: Mapping[str, OfSums]) -> list[str]:
    return [value.name for value in values(list(forms.values()))]


def estimates(
    forms: Mapping[str, OfSums], per_document: Sequence[DocumentSums], seed: int
) -> dict[str, Estimate | float]:
    """Make figures of the sums of each document, and bound them."""
    names = _summed(forms)
    sums = np.array([(d.tokens, *(d.figures[name] for name in names)) for d in per_document], np.float64)

    def make(totals: Floats) -> Floats:  # [r, M] to [r, K]
        tokens, *others = totals.T
        total = dict(zip(names, others, strict=True))
        return np.stack([form.figure(tokens, *(total[v.name] for v in form.values)) for form in forms.values()], 1)

    bounds = bootstrap(sums, make, seed=seed)
    found: dict[str, Estimate | float] = {}
    for i, (name, form) in enumerate(forms.items()):
        value = form.finish(float(make(sums.sum(0, keepdims=True))[0, i]))
        low, high = (None, None) if bounds is None else (form.finish(float(bound)) for bound in bounds[i])
        bounded = Estimate(value=value, low=low, high=high, samples=len(per_document))
        found[name] = bounded if form.bounded else value
    return found


def exp(nats: float) -> float:
    """Raise e to a power; beyond fp64, infinity instead of an exception."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else math.inf


def _sums(document: str, parts: Sequence[TokenScores], names: Sequence[str]) -> DocumentSums:
    """Sum the values `names` over the windows of a document: floats, or how many are true."""
    tokens = sum(len(part[names[0]]) for part in parts)
    sums: dict[str, Any] = {}
    for name in names:
        totals = [part[name].sum().item() for part in parts]
        sums[name] = sum(totals) if isinstance(totals[0], int) else math.fsum(totals)
    return DocumentSums(document=document, tokens=tokens, **sums)

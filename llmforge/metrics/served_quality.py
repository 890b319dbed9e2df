"""Quality of what a server serves, from what it tells of each token: figures between two bounds, over documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from llmforge.metrics import quality
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import MOST_DOCUMENTS, DocumentSums, OfSums
from llmforge.metrics.quality_metrics import QUALITY
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.tokens import DELTA_P, KLD, NLL, REFERENCE_NLL, SAME_TOP

ALONE = ("perplexity",)  # metrics that take no reference
PAIRED = ("kld_mean", "top1_agreement", "perplexity_ratio", "baseline_perplexity", "perplexity", "delta_p_mean")
VALUES = (KLD.name, SAME_TOP.name, NLL.name, REFERENCE_NLL.name, DELTA_P.name)
_FORMS = {each.name: each.form for each in QUALITY if each.name in PAIRED and isinstance(each.form, OfSums)}
_FALLING = {("perplexity_ratio", REFERENCE_NLL.name)}  # figures that fall where a value of theirs rises


class BoundedSums(ReportRecord):
    """Sums over the tokens of one document, of the least and of the most that each value can be, by its name."""

    document: str
    tokens: int = Field(gt=0)
    low: dict[str, float]
    high: dict[str, float]
    sampled_kld: float | None = None  # an estimate without bias, where tokens were drawn

    @property
    def estimated(self) -> BoundedSums:
        """The same with the estimate of KLD in place of its bounds."""
        found = {} if self.sampled_kld is None else {KLD.name: self.sampled_kld}
        return self.model_copy(update={"low": {**self.low, **found}, "high": {**self.high, **found}})


class BoundedFigure(ReportRecord):
    """A figure that lies between two, each with its interval over documents; they are the same where all is told."""

    at_least: Estimate
    at_most: Estimate

    @property
    def is_exact(self) -> bool:
        """Whether nothing was hidden that the figure depends on."""
        return math.isclose(self.at_least.value, self.at_most.value, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def estimate(self) -> Estimate:
        """What a gate decides on: from the lower bound of the one to the upper bound of the other.

        So a limit that the hidden part or the documents leave open stays open. The value is the middle of both.
        """
        low, high = self.at_least, self.at_most
        middle = (low.value + high.value) / 2
        value = low.value if self.is_exact or not math.isfinite(middle) else middle
        return Estimate(value=value, low=low.low, high=high.high, samples=low.samples, of=low.of)


class ServedQuality(ReportRecord):
    """How far what a server serves is from its reference, on the same text; without one, how likely it finds the text.

    `told_share` is the mean probability of the tokens that the server tells of a place, `spread` what is assumed of
    those that it does not: none is more nats below the likeliest one (`llmforge.metrics.truncation`).
    """

    way: str  # how log-probabilities were asked for (`llmforge.measure.logprobs`)
    listed: int  # of a place, at most
    vocabulary: int
    told_share: float
    spread: float
    context: int
    windows: int
    windows_skipped: int  # that the server reads as other tokens
    tokens_untold: int  # of which it told nothing
    tokens: int
    per_document: tuple[BoundedSums, ...] = Field(max_length=MOST_DOCUMENTS)
    figures: dict[str, BoundedFigure]
    kld_truncated: BoundedFigure | None = None  # bounds of the mean KLD, where `figures` has an estimate of it

    def again(self) -> ServedQuality:
        """Make every figure again of the sums."""
        return made(self.model_copy(update={"figures": {}, "kld_truncated": None}))


def made(raw: ServedQuality) -> ServedQuality:
    """Make the figures of sums over documents."""
    documents = raw.per_document
    paired = KLD.name in documents[0].low
    figures = {name: _figure(name, documents) for name in (PAIRED if paired else ALONE)}
    truncated = None
    if paired and all(each.sampled_kld is not None for each in documents):
        truncated = figures["kld_mean"]
        sampled = [each.estimated for each in documents]
        figures["kld_mean"] = _figure("kld_mean", sampled)
    return raw.model_copy(update={"figures": figures, "kld_truncated": truncated})


def _figure(name: str, documents: Sequence[BoundedSums]) -> BoundedFigure:
    form = _FORMS[name]
    used = [value.name for value in form.values]

    def side(upper: bool) -> Estimate:
        sums = []
        for each in documents:
            chosen: Mapping[str, Any] = {
                value: (each.high if upper != ((name, value) in _FALLING) else each.low)[value] for value in used
            }
            sums.append(DocumentSums(document=each.document, tokens=each.tokens, **chosen))
        found = quality.estimates({name: form}, sums)[name]
        if isinstance(found, Estimate):
            return found
        return Estimate(value=found, low=None, high=None, samples=len(documents))

    return BoundedFigure(at_least=side(False), at_most=side(True))

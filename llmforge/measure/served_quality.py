"""Measure what a server serves, on text: token by token against a reference, which is whole or another server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure.logprobs import Place, ServedLogprobs
from llmforge.measure.quality import Logits
from llmforge.metrics import served_quality, truncation
from llmforge.metrics.served_quality import BoundedSums, ServedQuality
from llmforge.metrics.tokens import DELTA_P, KLD, NLL, REFERENCE_NLL, SAME_TOP, require_finite
from llmforge.metrics.truncation import Bounds, Told

Reference = Logits | ServedLogprobs | None


@dataclass
class _Totals:
    """Sums over the tokens of one document, as they grow."""

    tokens: int = 0
    low: dict[str, list[float]] = field(default_factory=dict)
    high: dict[str, list[float]] = field(default_factory=dict)
    sampled: list[float] = field(default_factory=list)

    def add(self, values: dict[str, Bounds], sampled: float | None) -> None:
        self.tokens += 1
        for name, (low, high) in values.items():
            self.low.setdefault(name, []).append(low)
            self.high.setdefault(name, []).append(high)
        if sampled is not None:
            self.sampled.append(sampled)

    def sums(self, document: str) -> BoundedSums:
        return BoundedSums(
            document=document,
            tokens=self.tokens,
            low={name: math.fsum(each) for name, each in self.low.items()},
            high={name: math.fsum(each) for name, each in self.high.items()},
            sampled_kld=math.fsum(self.sampled) if len(self.sampled) == self.tokens else None,
        )


def compare(
    windows: Sequence[TokenWindow],
    served: ServedLogprobs,
    reference: Reference,
    *,
    spread: float,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ServedQuality:
    """Run every window through the server and its reference; both are open.

    Raises:
        DataError: there is nothing that both read as the same tokens.
        VerificationError: a logit of the reference is NaN or infinite.
        RunFailed, EnvironmentLacks: a server refuses, or there is no answer.
    """
    windows = [window for window in windows if len(window.ids) > 1]
    totals: dict[str, _Totals] = {}
    skipped, untold, shares, listed = 0, 0, list[float](), 1
    vocabulary = served.names.vocabulary
    for number, window in enumerate(windows):
        progress(number, len(windows))
        pairs = _told(window, served, reference, np.random.default_rng([seed, number]))
        if pairs is None:
            skipped += 1
            continue
        for target, (place, other) in zip(window.ids[1:].tolist(), pairs, strict=True):
            if not len(place.told.ids) or (other is not None and not len(other.ids)):
                untold += 1
                continue
            vocabulary = max(vocabulary, place.told.vocabulary)
            listed = max(listed, min(len(place.told.ids), served.top or 1))
            shares.append(1.0 - place.told.left)
            values = _values(place.told, other, target, spread)
            totals.setdefault(window.document, _Totals()).add(values, _sampled(place, other))
    progress(len(windows), len(windows))
    if not totals:
        raise DataError(
            f"{served.completions.description}: reads no document as the tokenizer does, or tells nothing of any token",
            hint="is it the same model? Give its own tokenizer",
        )
    sums = tuple(each.sums(document) for document, each in totals.items())
    assert served.way is not None
    return served_quality.made(
        ServedQuality(
            way=served.way,
            listed=listed,
            vocabulary=vocabulary,
            told_share=float(np.mean(shares)),
            spread=spread,
            context=max(len(window.ids) for window in windows),
            windows=len(windows),
            windows_skipped=skipped,
            tokens_untold=untold,
            tokens=sum(each.tokens for each in sums),
            per_document=sums,
            figures={},
        )
    )


def _sampled(place: Place, other: Told | None) -> float | None:
    """Estimate the KLD of a token by the one that was forced there; None: none was."""
    if place.forced is None or other is None:
        return None
    return truncation.sampled_kld(other, place.told, *place.forced)


def _told(
    window: TokenWindow, served: ServedLogprobs, reference: Reference, drawn: np.random.Generator
) -> Iterator[tuple[Place, Told | None]] | None:
    """Tell the distributions of each token of a window but the first; None: a server reads it as other tokens."""
    ids = window.ids.tolist()
    if reference is None or isinstance(reference, ServedLogprobs):
        ours = served.of(ids)
        theirs = None if reference is None or ours is None else reference.of(ids)
        if ours is None or (theirs is None and reference is not None):
            return None
        return iter([(place, None if theirs is None else theirs[at].told) for at, place in enumerate(ours)])
    logits = reference(window.ids)[:-1]
    require_finite("reference", logits, f"document {window.document}")
    ours = served.of(ids, _draw(logits, drawn) if served.forces else ())
    if ours is None:
        return None
    return ((place, Told.of_logits(row)) for place, row in zip(ours, logits, strict=True))


def _draw(logits: NDArray[np.float32], drawn: np.random.Generator) -> list[int]:
    """Draw a token of each row's distribution."""
    found = []
    for row in logits:
        share = np.exp(Told.of_logits(row).logprobs)
        found.append(int(drawn.choice(len(share), p=share / share.sum())))
    return found


def _values(served: Told, reference: Told | None, target: int, spread: float) -> dict[str, Bounds]:
    """Bound the values of one token (`llmforge.metrics.tokens`)."""
    low, high = served.of(target, spread)
    values = {NLL.name: (-high, -low)}
    if reference is None:
        return values
    least, most = reference.of(target, spread)
    return values | {
        REFERENCE_NLL.name: (-most, -least),
        KLD.name: truncation.kld(reference, served, spread),
        SAME_TOP.name: truncation.same_top(reference, served),
        DELTA_P.name: (math.exp(low) - math.exp(most), math.exp(high) - math.exp(least)),
    }

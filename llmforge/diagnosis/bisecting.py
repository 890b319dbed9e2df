"""Find the parts of a model that explain what its lossy passes cost, and a recipe that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmforge.base.progress import Progress
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile.attribution import choose_texts
from llmforge.compile.lossy_parts import LossyPart, LossyStep, PartLoss, of_pass
from llmforge.diagnosis import mixed_precision_recipe
from llmforge.ir import graph
from llmforge.measure import footprint
from llmforge.metrics import outlier_tests
from llmforge.metrics.attribution import estimate
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.outlier_tests import ALPHA
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.tokens import Floats
from llmforge.recipe import Recipe
from llmforge.verification.divergence import Divergence

DOCUMENTS, TOKENS = 48, 128  # that are run, and of each; 1.2 s a graph of the sample on two cores
EXPLAINED = 0.5  # share of a loss that the smallest set of tensors has to explain


class Outlier(ReportRecord):
    """A part that loses more than its format should."""

    name: str
    lost: Estimate  # nats a token
    expected: float  # what rounding to nearest in its format costs there
    parameters: tuple[str, ...]
    layers: tuple[int, ...]


class Share(ReportRecord):
    """What a part contributes: the gain of keeping it, nats a token."""

    name: str
    gain: Estimate
    share: float  # of the loss


class KeptParts(ReportRecord):
    """What a recipe keeps in higher precision, and what that is predicted to gain and to cost."""

    names: tuple[str, ...]
    how: str
    entries: tuple[tuple[str, dict[str, Any]], ...]  # in the place of the pass in the recipe
    kld_mean: Estimate  # with what is kept
    gain: Estimate
    weight_bytes: int  # more that a decode step reads
    kv_bytes_per_token: int  # more of the cache


class PassFindings(ReportRecord):
    """One lossy pass: what it costs and which parts explain it."""

    name: str
    number: int  # among the passes of the recipe
    kld_mean: Estimate  # against the graph before it
    stands_out: tuple[Outlier, ...]
    groups: int  # tested
    layers: tuple[Share, ...]  # () where the pass has no parts
    explains: tuple[Share, ...]  # the fewest tensors that explain half of the loss; () where something stands out
    kept: KeptParts | None


class Findings(ReportRecord):
    """What `llmforge bisect` found."""

    documents: int
    tokens: int
    alpha: float
    passes: tuple[PassFindings, ...]

    @property
    def stands_out(self) -> bool:
        """Whether any part does."""
        return any(each.stands_out for each in self.passes)


@dataclass(frozen=True, eq=False)
class PartSearch:
    """The search in one pass."""

    loss: PartLoss
    total: Floats  # what the pass costs, sums over each document [D]
    tokens: Floats
    progress: Progress

    def estimate(self, sums: Floats) -> Estimate:
        """Make the mean over tokens of sums over documents, with its interval."""
        return estimate(sums, self.tokens)

    def share(self, part: LossyPart, gain: Floats) -> Share:
        """Say what keeping a part gains."""
        return Share(name=part.name, gain=self.estimate(gain), share=float(gain.sum() / self.total.sum()))

    def outliers(self) -> tuple[list[tuple[LossyPart, Floats, Floats]], int]:
        """Look into groups where renewing them is worth it, down to the smallest parts, and test these on the way.

        Return what stands out, the smallest parts of it, each with what it lost and what its format costs there; and
        how many parts were looked at.
        """
        levels = _levels(self.loss.parts)
        found: list[tuple[LossyPart, Floats, Floats]] = []
        seen = 0
        waiting: list[tuple[LossyPart, LossyPart | None, int]] = [(part, None, 0) for part in self.loss.parts]
        while waiting:
            part, inside, depth = waiting.pop(0)
            self.progress.advance(seen, seen + 1 + len(waiting))
            seen += 1
            fresh = self.loss.requantized(part.leaves, inside=inside)
            if fresh is None:
                continue
            now = self.loss.of(inside=inside)
            if (now - fresh).sum() < outlier_tests.worth(float(self.total.sum())):
                continue
            waiting = [(each, part, depth + 1) for each in part.parts] + waiting
            kept = self.loss.of(part.leaves, inside=inside)
            lost, expected = now - kept, fresh - kept
            level = ALPHA / (len(levels) * levels[depth])
            if outlier_tests.judge(lost, expected, self.total, level=level).stands_out:
                found = [entry for entry in found if not part.leaves <= entry[0].leaves]  # the smaller one explains it
                found.append((part, lost, expected))
        return found, seen

    def layers(self) -> list[tuple[LossyPart, Floats]]:
        """Measure what keeping each of the largest parts gains; the largest gain first."""
        return self._gains(self.loss.parts)

    def explaining(self, layers: Sequence[tuple[LossyPart, Floats]]) -> list[tuple[LossyPart, Floats]]:
        """Choose the fewest tensors, largest gain first, that explain half of the loss together.

        Tensors are looked for in layers that together explain it. [] where that takes more than half of them all.
        """
        number = sum(len(_tensors(part)) for part in self.loss.parts)
        wanted, chosen, gained = EXPLAINED * self.total.sum(), list[LossyPart](), 0.0
        for part, gain in layers:
            if gained >= wanted or gain.sum() <= 0:
                break
            chosen.append(part)
            gained += float(gain.sum())
        tensors = self._gains([each for part in chosen for each in _tensors(part)])
        found: list[tuple[LossyPart, Floats]] = []
        for part, gain in tensors:
            found.append((part, gain))
            leaves = frozenset().union(*(each.leaves for each, _ in found))
            if (self.total - self.loss.of(leaves)).sum() >= wanted:
                return found
            if 2 * len(found) > number:
                break
        return []

    def _gains(self, parts: Sequence[LossyPart]) -> list[tuple[LossyPart, Floats]]:
        found = []
        for number, part in enumerate(parts):
            self.progress.advance(number, len(parts))
            found.append((part, self.total - self.loss.of(part.leaves)))
        return sorted(found, key=lambda pair: -float(pair[1].sum()))


def _levels(parts: Sequence[LossyPart]) -> list[int]:
    """Count the parts of each level of the tree."""
    counts, level = [], list(parts)
    while level:
        counts.append(len(level))
        level = [inner for part in level for inner in part.parts]
    return counts


def _tensors(part: LossyPart) -> Sequence[LossyPart]:
    """Return what an option keeps of a part: the tensors of a layer; a cache as a whole."""
    return part.parts if part.parameters and part.parts and part.name.startswith("layer ") else (part,)


def bisect(
    lossy: Sequence[LossyStep],
    windows: Sequence[TokenWindow],
    recipe: Recipe,
    progress: Progress,
    *,
    threads: int,
    vocabulary: int,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> Findings:
    """Look for what explains the loss of each pass of `lossy`.

    Raises:
        DataError: the text has too few documents.
        VerificationError: a logit is NaN or infinite.
    """
    with TemporaryDirectory() as folder:
        divergence = Divergence([], Path(folder), threads)
        largest = max((graph.weight_bytes(each.before) for each in lossy), default=0)
        divergence.texts = choose_texts(windows, largest, vocabulary, documents, tokens, divergence.whole_bytes)
        found = [_in_pass(each, divergence, recipe, progress) for each in lossy]
    counted = divergence.tokens
    return Findings(documents=len(counted), tokens=int(counted.sum()), alpha=ALPHA, passes=tuple(found))


def _in_pass(lossy: LossyStep, divergence: Divergence, recipe: Recipe, progress: Progress) -> PassFindings:
    name, number = lossy.step.name, lossy.number
    progress.stage(f"Bisect {name}")
    loss = of_pass(lossy, divergence)
    divergence.hold_against(lossy.before, None if loss is None else loss.watch)
    if loss is None:
        total = divergence.of(lossy.after)
        whole = estimate(total, divergence.tokens)
        return PassFindings(
            name=name, number=number, kld_mean=whole, stands_out=(), groups=0, layers=(), explains=(), kept=None
        )
    search = PartSearch(loss, loss.of(), divergence.tokens, progress)
    found, groups = search.outliers()
    layers = search.layers()
    explaining = [] if found else search.explaining(layers)
    parts = [part for part, *_ in found] or [part for part, _ in explaining]
    kept = _kept(lossy, loss, search, parts, recipe.passes[number].options)
    return PassFindings(
        name=name,
        number=number,
        kld_mean=search.estimate(divergence.of(lossy.after)),
        stands_out=tuple(
            Outlier(
                name=part.name,
                lost=search.estimate(lost),
                expected=float(expected.sum() / divergence.tokens.sum()),
                parameters=part.parameters,
                layers=part.layers,
            )
            for part, lost, expected in found
        ),
        groups=groups,
        layers=tuple(search.share(part, gain) for part, gain in layers),
        explains=tuple(search.share(part, gain) for part, gain in explaining),
        kept=kept,
    )


def _kept(
    lossy: LossyStep, loss: PartLoss, search: PartSearch, parts: Sequence[LossyPart], written: Mapping[str, Any]
) -> KeptParts | None:
    """Predict what a recipe gains that keeps `parts`."""
    if not parts:
        return None
    model = lossy.before.clone()
    for step in mixed_precision_recipe.passes(lossy.step, written, parts):
        step.run(model, lossy.context)
    loss.share(model, parts)
    after, whole = loss.divergence.of(model), loss.divergence.of(lossy.after)
    read, before = footprint.count(model), footprint.count(lossy.after)
    return KeptParts(
        names=tuple(dict.fromkeys(name for part in parts for name in mixed_precision_recipe.names(part))),
        how=mixed_precision_recipe.how(lossy.step, written, parts),
        entries=tuple(mixed_precision_recipe.entries(lossy.step, written, parts)),
        kld_mean=search.estimate(after),
        gain=search.estimate(whole - after),
        weight_bytes=read.weights - before.weights,
        kv_bytes_per_token=read.kv - before.kv,
    )

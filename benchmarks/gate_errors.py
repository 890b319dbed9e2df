"""How often gates pass wrongly, and how often rightly, on simulated releases: `python -m benchmarks.gate_errors`.

In each run the documents of a release are drawn from a population whose true figure is known. *False PASS*: the true
figure is exactly at the limit, where α says 2.5 %. *Power*: the figure is at half the limit. Verdicts are those of
`llmforge.gates.decision.judge`, on figures made as a build and `llmforge gate` make them (in the first
runs of each row; the others are decided by the same rule, faster). `--runs` sets how many
(20,000; a tenth for quantiles of 50 documents and more), `--only` which kinds of gates.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from llmforge.gates.decision import ALPHA, Earlier, Verdict, judge, schedule
from llmforge.metrics import catalog, document_figures, document_quantiles, quality, skewed_t
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import DocumentSums, OfSums
from llmforge.recipe import GateSpec

Floats = NDArray[np.float64]
SIZES = (8, 20, 50, 200)
LOOKS = ((8, 64), (20, 160))  # documents of the first look, and the most
TOKENS = 1000  # of a document; of a quantile's 600
REAL = Path(__file__).parents[1] / "tests/data/releases.json"  # documents of two builds of the sample checkpoint


@dataclass(frozen=True)
class Population:
    """Documents whose loss per token and length are drawn; `truth` is the loss over all their tokens."""

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Floats, Floats]]  # loss a token, tokens
    truth: float


def populations() -> Iterator[Population]:
    """Make every kind of document."""
    yield _population("exponential", _exponential)
    for sigma in (1.0, 1.5):
        yield _population(f"lognormal {sigma:g}", _Lognormal(sigma))
    for correlation in (0.6, -0.6):
        yield _population(f"exponential, lengths correlated {correlation:+g}", _Lengths(correlation))
    for name, other in (("rtn", None), ("rtn", "gptq")):
        yield _real(name, other)
    yield _population("2 % of the documents at 50 times the loss", _rare)


def _exponential(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return rng.exponential(size=n), np.full(n, TOKENS)


@dataclass(frozen=True)
class _Lognormal:
    sigma: float

    def __call__(self, rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
        return np.exp(self.sigma * rng.standard_normal(n)), np.full(n, TOKENS)


@dataclass(frozen=True)
class _Lengths:
    """Exponential losses; lengths are even from 250 to 2,000 tokens, and correlated through a Gaussian copula."""

    correlation: float

    def __call__(self, rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
        loss = rng.standard_normal(n)
        length = self.correlation * loss + math.sqrt(1 - self.correlation**2) * rng.standard_normal(n)
        return -np.log(ndtr(-loss)), np.round(250 + 1750 * ndtr(length))


def _rare(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return rng.gamma(16, 1 / 16, n) * np.where(rng.random(n) < 0.02, 50, 1), np.full(n, TOKENS)


def _population(name: str, draw: Callable[[np.random.Generator, int], tuple[Floats, Floats]]) -> Population:
    known = {"exponential": 1.0, "lognormal 1": math.exp(0.5), "lognormal 1.5": math.exp(1.125)}
    if name in known:
        return Population(name, draw, known[name])
    loss, tokens = draw(np.random.default_rng(1), 4_000_000)
    return Population(name, draw, float((loss * tokens).sum() / tokens.sum()))


def _real(name: str, other: str | None) -> Population:
    read = json.loads(REAL.read_text(encoding="utf-8"))
    loss = np.array([each["kld"] for each in read[name]])
    if other is not None:
        loss = loss - np.array([each["kld"] for each in read[other]])
    tokens = np.array([each["tokens"] for each in read[name]], np.float64)
    what = "real documents" if other is None else "real documents, differences"
    draw = _Drawn(loss / tokens, tokens)
    return Population(what, draw, float(loss.sum() / tokens.sum()))


@dataclass(frozen=True)
class _Drawn:
    loss: Floats
    tokens: Floats

    def __call__(self, rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
        at = rng.integers(0, len(self.tokens), n)
        return self.loss[at], self.tokens[at]


# A gate of each bound, and the figure that has the loss in it: KLD is worse if higher, agreement if lower.
GATES = {"max": "kld_mean", "min": "top1_agreement", "rise_max": "kld_mean", "drop_max": "top1_agreement"}
LOST = 1e-3  # agreement that a unit of loss costs


def passes(bound: str, loss: Floats, tokens: Floats, limit: float) -> bool:
    """Say if a gate passes on documents with these losses: of the figure itself, or of how far it moved."""
    metric = GATES[bound]
    form = catalog.named(metric).form  # type: ignore[attr-defined]
    assert isinstance(form, OfSums)
    agreement = metric == "top1_agreement"
    before = 0.2 + 0.1 * np.arange(len(loss)) / len(loss)  # of another artifact
    if bound in ("max", "min"):
        limits = {bound: 1 - LOST * limit if agreement else limit}
        ours = _documents(form, 1 - LOST * loss if agreement else loss, tokens)
        specs = {metric: GateSpec.model_validate(limits)}
        (result,) = judge(specs, quality.estimates({metric: form}, ours))  # type: ignore[arg-type]
    else:
        specs = {metric: GateSpec.model_validate({bound: LOST * limit if agreement else limit})}
        ours = _documents(form, before + (-LOST * loss if agreement else loss), tokens)
        moved = document_figures.difference(form, ours, _documents(form, before, tokens))
        (result,) = judge(specs, {}, earlier=Earlier("before", {metric: moved}, {metric: 0.25}))
    return result.verdict is Verdict.PASS


def _documents(form: OfSums, values: Floats, tokens: Floats) -> list[DocumentSums]:
    name = form.values[0].name
    return [
        DocumentSums.model_construct(document=str(number), tokens=int(of), **{name: float(value * of)})
        for number, (value, of) in enumerate(zip(values, tokens, strict=True))
    ]


CHECKED = 50  # runs of a row that `judge` decides as well


def within(loss: Floats, tokens: Floats, limits: Floats, alpha: float) -> NDArray[np.bool_]:
    """Say in which runs the upper bound of the loss is at most each limit [L]: of losses and tokens [R, D], [R, L].

    This is `passes` of all runs at once.
    """
    sums, counts = (loss * tokens).sum(1, keepdims=True), tokens.sum(1, keepdims=True)
    without = (sums - loss * tokens) / (counts - tokens)
    influence = (loss.shape[1] - 1) * (without.mean(1, keepdims=True) - without)
    errors = influence.std(1, ddof=1) / math.sqrt(loss.shape[1])
    skewness, effective = skewed_t.l_skewness(influence), tokens.sum(1) ** 2 / (tokens**2).sum(1)
    if np.ptp(effective) < 1e-9:
        critical = skewed_t.critical(float(effective[0]), skewness, alpha)
    else:
        critical = np.array([skewed_t.critical(of, one, alpha) for of, one in zip(effective, skewness, strict=True)])
    return (sums / counts)[:, 0, None] + (critical * errors)[:, None] <= limits


def mean_row(population: Population, bound: str, size: int, runs: int, first: int | None) -> tuple[float, float]:
    """Simulate a gate on a mean: shares of runs that pass with the figure at the limit, and at half of it."""
    rng = np.random.default_rng((size, list(GATES).index(bound)))
    limits = population.truth * np.array([1.0, 2.0])
    looked = [(size, ALPHA)] if first is None else list(schedule(first, size))
    step, found = max(1, 1_000_000 // size), []
    for low in range(0, runs, step):
        drawn = [population.draw(rng, size) for _ in range(min(step, runs - low))]
        loss, tokens = (np.array(each, np.float64) for each in zip(*drawn, strict=True))
        found.append(np.any([within(loss[:, :of], tokens[:, :of], limits, alpha) for of, alpha in looked], 0))
        for run in range(CHECKED if low == 0 and first is None else 0):
            said = [passes(bound, loss[run], tokens[run], limit) for limit in limits]
            assert found[0][run].tolist() == said, (population.name, bound, size, run)
    wrong, right = np.concatenate(found).mean(0).tolist()
    return wrong, right


def quantile_row(sigma: float, share: float, paired: bool, size: int, runs: int) -> tuple[float, float]:
    """Simulate a gate on a quantile of KLD: tokens are exponential, documents' scales lognormal `sigma`.

    Paired, theirs has about half of the KLD of the same tokens.
    """
    rng = np.random.default_rng(size)
    truth = _truth(sigma, share, paired)
    name = {0.99: "kld_p99", 0.9: "kld_p90"}[share]
    owners = np.repeat(np.arange(size), 600)
    passed = np.zeros(2)
    for run in range(runs):
        values = rng.exponential(size=len(owners)) * np.exp(sigma * rng.standard_normal(size))[owners]
        theirs = _theirs(values, rng) if paired else None
        limits = truth * np.array([1.0, 2.0])
        if run < CHECKED or theirs is not None:
            found = _figure(values, theirs, owners, share)
            within = np.array([_passes(name, found, limit, paired) for limit in limits])
        if theirs is None:
            high = document_quantiles.OwnedTokens(values, owners).upper(share)
            assert run >= CHECKED or (within == (high <= limits)).all(), (sigma, share, size, run)
            within = high <= limits
        passed += within
    return float(passed[0] / runs), float(passed[1] / runs)


def _figure(ours: Floats, theirs: Floats | None, owners: NDArray[np.int64], share: float) -> Estimate:
    value = float(np.quantile(ours, share))
    if theirs is None:
        found = document_quantiles.bounds(ours, owners, [share])
    else:
        found = document_quantiles.difference_bounds(ours, theirs, owners, [share])
        value -= float(np.quantile(theirs, share))
    assert found is not None
    return Estimate(value=value, low=found[0][0], high=found[0][1], samples=int(owners.max()) + 1)


def _passes(name: str, found: Estimate, limit: float, paired: bool) -> bool:
    specs = {name: GateSpec.model_validate({"rise_max" if paired else "max": limit})}
    (result,) = judge(specs, {name: found}, earlier=Earlier("before", {name: found}, {}) if paired else None)
    return result.verdict is Verdict.PASS


def _theirs(ours: Floats, rng: np.random.Generator) -> Floats:
    return ours / 2 * rng.uniform(0.8, 1.2, len(ours))


def _truth(sigma: float, share: float, paired: bool) -> float:
    rng = np.random.default_rng(1)
    values = rng.exponential(size=8_000_000) * np.exp(sigma * rng.standard_normal(8_000_000))
    quantile = float(np.quantile(values, share))
    return quantile - float(np.quantile(_theirs(values, rng), share)) if paired else quantile


def main() -> None:
    """Simulate, and print a row for each kind of gate, documents and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--only", choices=("means", "quantiles", "looks"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    rows: list[tuple[str, Callable[..., tuple[float, float]], tuple[object, ...]]] = []
    known = list(populations())
    if asked.only in (None, "means"):
        rows += [
            (f"{bound:9} {each.name}, {size} documents", mean_row, (each, bound, size, asked.runs, None))
            for bound, each, size in product(GATES, known, asked.sizes)
        ]
    if asked.only in (None, "looks"):
        rows += [
            (f"looks     {each.name}, {first} to {most} documents", mean_row, (each, "max", most, asked.runs, first))
            for each, (first, most) in product(known, LOOKS)
        ]
    if asked.only in (None, "quantiles"):
        for paired, share, sigma, size in product((False, True), (0.9, 0.99), (0.25, 1.0), asked.sizes):
            what = f"{'rise_max' if paired else 'max':9} quantile {share:g}, lognormal {sigma:g}, {size} documents"
            runs = asked.runs if size < 50 else max(1, asked.runs // 10)
            rows.append((what, quantile_row, (sigma, share, paired, size, runs)))
    with ProcessPoolExecutor(asked.processes) as pool:
        waiting = [(what, pool.submit(make, *arguments)) for what, make, arguments in rows]
        print(f"{'gate, documents':70} false PASS   power", flush=True)
        for what, future in waiting:
            wrong, right = future.result()
            print(f"{what:70} {100 * wrong:9.2f} %  {100 * right:4.0f} %", flush=True)


if __name__ == "__main__":
    main()

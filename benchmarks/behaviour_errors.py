"""How often gates on behaviour are wrong: `python -m benchmarks.behaviour_errors [--runs N] [--together]`.

The checkpoint's answers are right with probability .8, and the artifact's are drawn so that the true difference is
exactly at the limit of the gate: some documents are lost, and some are gained. Printed is the share of runs in which
the gate passes: nominal 2.5 %.

`--together`: all gates of `benchmarks.planted_damage` at once, each exactly at its limit and independent of the others,
which is the worst case of Holm's correction. Printed is the share of releases of which any gate is a FAIL (a false
alarm), and in which each gate passes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.planted_damage import GATES
from llmforge.gates.decision import Earlier, Verdict, judge
from llmforge.metrics import tasks
from llmforge.recipe import GateSpec

RIGHT, GAINED, LIMIT = 0.8, 0.02, 0.1  # of the checkpoint; of documents that the artifact gains; of the gate
QUARTER = 0.25  # of the documents of a slice

Floats = NDArray[np.float64]
Drawn = tuple[Floats, Floats, NDArray[np.int64]]  # ours, theirs, and of which document each is
Draw = Callable[[np.random.Generator, int], Drawn]


def share(rng: np.random.Generator, documents: int) -> Drawn:
    """Draw right or wrong."""
    theirs = rng.random(documents) < RIGHT
    lost = rng.random(documents) < (LIMIT + GAINED) / RIGHT
    gained = rng.random(documents) < GAINED / (1 - RIGHT)
    return np.where(theirs, ~lost, gained).astype(np.float64), theirs.astype(np.float64), np.arange(documents)


def checks(rng: np.random.Generator, documents: int) -> Drawn:
    """Draw the one to four checks of each document, all of which are right or wrong alike."""
    clusters = np.repeat(np.arange(documents), rng.integers(1, 5, documents))
    ours, theirs = share(rng, documents)[:2]
    return ours[clusters], theirs[clusters], clusters


def lengths(rng: np.random.Generator, documents: int) -> Drawn:
    """Draw how far lengths are apart: most not at all, the others exponentially, with a mean of the limit; and none."""
    apart = np.where(rng.random(documents) < 0.3, rng.exponential(LIMIT / 0.3, documents), 0.0)
    return apart, np.zeros(documents), np.arange(documents)


def passes(ours: Floats, theirs: Floats, clusters: NDArray[np.int64], *, rises: bool) -> bool:
    """Say whether a gate passes whose limit is a change of `LIMIT` against the checkpoint."""
    made = tasks.figures("mean", tuple(ours), tuple(theirs), tuple(clusters.tolist()))
    name, bound = ("behaviour.length_change", "rise_max") if rises else ("behaviour.checks", "drop_max")
    assert made.difference is not None
    beside = Earlier("the checkpoint", {name: made.difference}, {name: float(theirs.mean())})
    (result,) = judge({name: GateSpec.model_validate({bound: LIMIT})}, {name: made.artifact}, original=beside)
    return result.verdict is Verdict.PASS


def at_limit(rng: np.random.Generator, documents: int, name: str) -> tuple[Floats, Floats]:
    """Draw ours and theirs so that a gate is exactly at its limit: shares as above, other figures exponentially.

    What a slice loses it loses in a quarter of its documents, as when one of its languages is lost.
    """
    ((bound, limit),) = GATES[name].items()
    if bound == "max":
        return rng.exponential(limit, documents), np.zeros(documents)
    if name.startswith("answer_odds"):
        sure, part = rng.normal(5, 2, documents), QUARTER if "." in name else 1.0
        return sure - np.where(rng.random(documents) < part, rng.exponential(limit / part, documents), 0.0), sure
    theirs = rng.random(documents) < RIGHT
    lost = rng.random(documents) < (limit + GAINED) / RIGHT
    gained = rng.random(documents) < GAINED / (1 - RIGHT)
    ours = np.where(theirs, ~lost, gained)
    return (ours if bound == "drop_max" else ~ours).astype(np.float64), (
        theirs if bound == "drop_max" else ~theirs
    ).astype(np.float64)


def together(rng: np.random.Generator, documents: int) -> dict[str, Verdict]:
    """Decide all gates of one release whose every figure is at the limit of its gate."""
    figures = {}
    for name in GATES:
        ours, theirs = at_limit(rng, documents, name)
        figures[f"behaviour.{name}"] = tasks.figures("mean", tuple(ours), tuple(theirs), tuple(range(documents)))
    beside = Earlier(
        "the checkpoint",
        {name: each.difference for name, each in figures.items() if each.difference is not None},
        {name: each.baseline.value for name, each in figures.items() if each.baseline is not None},
    )
    gates = {f"behaviour.{name}": GateSpec.model_validate(limits) for name, limits in GATES.items()}
    found = judge(gates, {name: each.artifact for name, each in figures.items()}, original=beside)
    return {each.metric: each.verdict for each in found}


def print_together(runs: int, documents: int) -> None:
    """Simulate all gates at once, and print."""
    rng, alarms, passed = np.random.default_rng(documents), 0, Counter[str]()
    for _ in range(runs):
        found = together(rng, documents)
        alarms += Verdict.FAIL in found.values()
        passed.update(name for name, verdict in found.items() if verdict is Verdict.PASS)
    print(f"{len(GATES)} gates, {documents} documents: a false alarm in {100 * alarms / runs:.2f} %", flush=True)
    for name in GATES:
        print(f"  {name} passes in {100 * passed[f'behaviour.{name}'] / runs:.2f} %", flush=True)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args()
    runs = given.runs
    if given.together:
        for documents in (110, 40):
            print_together(runs, documents)
        return
    kinds: dict[str, tuple[Draw, bool]] = {
        "share": (share, False), "checks": (checks, False), "length_change": (lengths, True),
    }  # fmt: skip
    for name, (draw, rises) in kinds.items():
        for documents in (40, 100, 300):
            rng = np.random.default_rng(documents)
            wrong = sum(passes(*draw(rng, documents), rises=rises) for _ in range(runs))
            print(f"{name} {documents} documents: {100 * wrong / runs:.2f} %", flush=True)


if __name__ == "__main__":
    main()

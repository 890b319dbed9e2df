"""How often gates on behaviour pass wrongly: `python -m benchmarks.behaviour_errors [--runs N]`.

The checkpoint's answers are right with probability .8, and the artifact's are drawn so that the true difference is
exactly at the limit of the gate: some documents are lost, and some are gained. Printed is the share of runs in which
the gate passes: nominal 2.5 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmforge.gates.decision import Earlier, Verdict, judge
from llmforge.metrics import tasks
from llmforge.recipe import GateSpec

RIGHT, GAINED, LIMIT = 0.8, 0.02, 0.1  # of the checkpoint; of documents that the artifact gains; of the gate

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


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    runs = parser.parse_args().runs
    kinds: dict[str, tuple[Draw, bool]] = {
        "share": (share, False), "checks": (checks, False), "length_change": (lengths, True),
    }  # fmt: skip
    for name, (draw, rises) in kinds.items():
        for documents in (40, 100, 217):
            rng = np.random.default_rng(documents)
            wrong = sum(passes(*draw(rng, documents), rises=rises) for _ in range(runs))
            print(f"{name} {documents} documents: {100 * wrong / runs:.2f} %", flush=True)


if __name__ == "__main__":
    main()

"""Say in how many samples of its chats an artifact passes its gates of behaviour.

    python -m benchmarks.resampled_gates ARTIFACT
    python -m benchmarks.resampled_gates ARTIFACT --planted

Chats of the artifact's report are drawn with replacement, of each slice as many as it has, 20 times: how many a slice
has is chosen, and no chance of the chats. The gates are those of its recipe, with `--planted` those of
`benchmarks.planted_damage`, too. Nothing is answered again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planted_damage import GATES, SAMPLES, within_slices
from llmforge.artifact import Artifact
from llmforge.gates import decision, records
from llmforge.gates.decision import Verdict
from llmforge.metrics import catalog
from llmforge.metrics.behaviour.results import PREFIX, BehaviourResult
from llmforge.metrics.metric import Measured
from llmforge.recipe import GateSpec


def drawn(found: BehaviourResult, chosen: Sequence[int]) -> BehaviourResult:
    """Make the figures of chosen chats, by number, some perhaps several times."""
    outcomes = {}
    for name, each in found.outcomes.items():
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(each.documents):
            rows.setdefault(number, []).append(row)
        taken = [(place, row) for place, number in enumerate(chosen) for row in rows.get(number, [])]
        if taken:
            outcomes[name] = each.model_copy(
                update={
                    "documents": tuple(place for place, _ in taken),
                    "artifact": tuple(each.artifact[row] for _, row in taken),
                    "baseline": None if each.baseline is None else tuple(each.baseline[row] for _, row in taken),
                }
            )
    sample = found.model_copy(
        update={
            "documents": tuple(map(str, range(len(chosen)))),
            "slices": tuple(found.slices[number] for number in chosen),
            "outcomes": outcomes,
        }
    )
    return sample.model_copy(update={"outcomes": sample.again()})


def failing(found: BehaviourResult, gates: Mapping[str, GateSpec]) -> list[str]:
    """Name the gates that do not pass."""
    measured = Measured(behaviour=found)
    estimates = catalog.estimates(measured)
    judged = decision.judge(gates, estimates, original=decision.checkpoint(measured))
    return [f"{each.metric} {each.verdict.value}" for each in judged if each.verdict is not Verdict.PASS]


def main() -> None:
    """Draw, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--planted", action="store_true")
    given = parser.parse_args()
    report = records.read(Artifact.open(given.artifact))
    found = report.behaviour
    if found is None:
        raise SystemExit(f"{given.artifact}: its report has no behaviour")
    limits: dict[str, dict[str, float]] = {}
    for each in report.gates:
        if each.metric.startswith(PREFIX):
            limits.setdefault(each.metric, {})[each.bound] = each.limit
    if given.planted:
        limits |= {f"{PREFIX}{name}": dict(spec) for name, spec in GATES.items() if f"{PREFIX}{name}" in found.metrics}
    gates = {name: GateSpec.model_validate(spec) for name, spec in limits.items()}
    count, rng = len(found.documents), np.random.default_rng(0)
    print(f"{count} chats; gates: {', '.join(gates)}; all: {failing(found, gates) or 'pass'}")
    samples = [failing(drawn(found, within_slices(found.slices, rng)), gates) for _ in range(SAMPLES)]
    missed = Counter(gate for each in samples for gate in each)
    print(f"{sum(not each for each in samples)} of {SAMPLES} samples pass", *missed.items())


if __name__ == "__main__":
    main()

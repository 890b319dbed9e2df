"""A farm that builds nothing: what it answers is written down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from llmforge.farm import preflight
from llmforge.farm.cluster import Farm, Lost
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.preflight import NodeLack, NodeNeeds
from llmforge.farm.worker import BuildOutcome, Figure, Job

NEEDS = NodeNeeds(preflight.code(), Path("out").absolute())
NODE: Resources = {"CPU": 8.0, "memory": 32e9}


def built(path: Path | str = "artifacts/a/0", **figures: float) -> BuildOutcome:
    """A build that ended well."""
    measured = {name: Figure(value, 0.9 * value, 1.1 * value) for name, value in figures.items()}
    return BuildOutcome(0, "node", 1.0, Path(path), figures=measured)


@dataclass
class FakeFarm:
    """Answers each job by `answer`, one a turn."""

    answer: Callable[[str, Job, NodePlacement], BuildOutcome | Lost]
    resources: Sequence[Resources] = (NODE,)
    submitted: list[tuple[str, Job, NodePlacement]] = field(default_factory=list)
    waiting: list[tuple[str, Job, NodePlacement]] = field(default_factory=list)
    lacks: dict[str, NodeLack | Lost | None] = field(default_factory=dict)  # what nodes answer that are asked
    dead: set[str] = field(default_factory=set)
    out: dict[str, str] = field(default_factory=dict)
    address: str | None = None

    def nodes(self, avoided: Collection[str] = ()) -> list[Resources]:
        return [node for number, node in enumerate(self.resources) if f"n{number}" not in {*self.out, *avoided}]

    def ask(self, function: Any, *arguments: Any, nodes: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        asked = [f"n{number}" for number in range(len(self.resources))] if nodes is None else nodes
        return {node: self.lacks.get(node) for node in asked}

    def name(self, node: str) -> str:
        return f"node {node}"

    def is_alive(self, node: str) -> bool:
        return node not in self.dead

    def withdraw(self, name: str) -> None:
        self.waiting = [each for each in self.waiting if each[0] != name]

    def submit(self, name: str, job: Job, place: NodePlacement) -> None:
        self.submitted.append((name, job, place))
        self.waiting.append((name, job, place))

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def wait(self, seconds: float) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, BuildOutcome | Lost]]]:
        name, job, place = self.waiting.pop(0)
        told: list[tuple[str, dict[str, Any]]] = [
            (name, {"event": "begun", "node": "n0"}),
            (name, {"event": "stage", "name": "Trace"}),
            (name, {"event": "progress", "name": "Trace", "done": 1, "total": 2}),
        ]
        result = self.answer(name, job, place)
        if isinstance(result, BuildOutcome):
            result = replace(result, node="n0" if result.node == "node" else result.node)
        return told, [(name, result)]

    @property
    def as_farm(self) -> Farm:
        return cast(Farm, self)

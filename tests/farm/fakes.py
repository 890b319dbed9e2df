"""A farm that builds nothing: what it answers is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from llmforge.farm.cluster import Farm, Lost
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.worker import BuildOutcome, Figure, Job

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

    def nodes(self) -> list[Resources]:
        return list(self.resources)

    def submit(self, name: str, job: Job, place: NodePlacement) -> None:
        self.submitted.append((name, job, place))
        self.waiting.append((name, job, place))

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def wait(self, seconds: float) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, BuildOutcome | Lost]]]:
        name, job, place = self.waiting.pop(0)
        told = [
            (name, {"event": "stage", "name": "Trace"}),
            (name, {"event": "progress", "name": "Trace", "done": 1, "total": 2}),
        ]
        return told, [(name, self.answer(name, job, place))]

    @property
    def as_farm(self) -> Farm:
        return cast(Farm, self)

"""Rows of a matrix: one build each, how far it is, and what the exit code of all of them is."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from llmforge.base.errors import EnvironmentLacks
from llmforge.farm.matrix import Build
from llmforge.farm.placing import NodePlacement
from llmforge.farm.worker import BuildOutcome, Job

BUG = 1  # exit code of an error that is no `ForgeError`
LACKS = EnvironmentLacks.exit_code
FINISH = "finish the engine"  # what a node with the device of a target is waited for
_PENDING = 10  # exit code of a build whose engine waits for its device
# What ends of builds mean for a release, the worst first: bugs, proofs that failed, builds that could not be made, then
# gates; what only waits is better than what is undecided.
WORST_FIRST = (BUG, 7, 5, 6, 8, 9, 2, 3, 4, _PENDING, 0)

State = Literal["waiting", "building", "finishing", "done", "failed"]
_ON_NODE = "building", "finishing"


@dataclass
class Row:
    """One build: how far it is, and in the end how it ended."""

    build: Build
    state: State = "waiting"
    stage: str = ""
    done: int = 0  # of `total`, in the units of the stage
    total: int = 0
    attempts: int = 0  # of the current step
    handed_in: int = 0  # times, of the current step
    submitted: float = field(default_factory=time.monotonic)  # when the current step was handed in
    began: float | None = None  # time.monotonic(), when it was first on a node
    waited_s: float = 0.0  # in all, for a node
    seconds: float = 0.0  # in all, of builds that returned
    node_ids: list[str] = field(default_factory=list)  # identities of nodes that it was on, the last one last
    node: str = ""  # name of the last
    outcome: BuildOutcome | None = None
    notes: list[str] = field(default_factory=list)  # lost workers, deferred engines
    reused: tuple[str, ...] = ()  # stages and passes that the build took from the cache
    computed: tuple[str, ...] = ()  # passes that it did not
    deferred: bool = False
    job: Job | None = None
    place: NodePlacement | None = None

    @property
    def exit_code(self) -> int:
        """As of `llmforge build`, and 10 where only the engine is missing; one that was killed lacked something."""
        if self.outcome is None:
            return LACKS
        if self.outcome.exit_code == 0 and self.outcome.pending:
            return _PENDING
        return self.outcome.exit_code if self.outcome.exit_code >= 0 else LACKS

    @property
    def verdict(self) -> str:
        """In one word: pass, fail, inconclusive, none, pending or error."""
        if self.outcome is None or self.outcome.artifact is None:
            return "error"
        if self.outcome.pending and self.outcome.verdict != "fail":
            return "pending"
        return self.outcome.verdict

    @property
    def waits_for(self) -> str:
        """Say what it waits for that has not ended, or whose engine is not built; empty: for nothing."""
        if self.outcome is not None and self.outcome.artifact is not None:
            return f"a node with the device of its target, to {FINISH}" if self.verdict == "pending" else ""
        if self.state == "waiting" and self.place is not None:
            return str(self.place)
        return f"the end of {self.stage or 'its build'} on {self.node}" if self.state in _ON_NODE else ""


def worst(codes: Iterable[int]) -> int:
    """Choose the exit code of several builds, by `WORST_FIRST`; one that is not listed is a bug."""
    return min((code if code in WORST_FIRST else BUG for code in codes), key=WORST_FIRST.index, default=0)

"""Follow the builds of a matrix to their end: hand them in, again if they were lost, and finish deferred engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llmforge import targets
from llmforge.base.errors import EnvironmentLacks, ForgeError
from llmforge.farm import placing, worker
from llmforge.farm.cluster import Farm, Lost
from llmforge.farm.matrix import Build
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.worker import BuildOutcome, Job
from llmforge.planning import request
from llmforge.recipe import Recipe
from llmforge.targets import Target

ATTEMPTS = 4  # of one step, before it counts as failed: the first, and three after a worker or its memory was lost
_TICK_S = 0.25
_DEFERRED = "engine.deferred=true"
_PENDING = 10  # exit code of a build whose engine waits for its device
_BUG = 1
# What ends of builds mean for a release, the worst first: bugs, proofs that failed, builds that could not be made, then
# gates; what only waits is better than what is undecided.
WORST_FIRST = (_BUG, 7, 5, 6, 8, 9, 2, 3, 4, _PENDING, 0)

State = Literal["waiting", "building", "finishing", "done", "failed"]
Told = Callable[["Row"], None]


@dataclass(frozen=True)
class FarmSettings:
    """What all builds of a matrix have in common."""

    out: Path
    store: str | None = None  # URL
    jobs: int | None = None  # builds that share a node
    arguments: tuple[str, ...] = ()  # more of `llmforge build`


@dataclass
class Row:
    """One build: how far it is, and in the end how it ended."""

    build: Build
    state: State = "waiting"
    stage: str = ""
    done: int = 0  # of `total`, in the units of the stage
    total: int = 0
    attempts: int = 0  # of the current step
    began: float | None = None  # time.monotonic(), when it was first on a node
    seconds: float = 0.0
    outcome: BuildOutcome | None = None
    notes: list[str] = field(default_factory=list)  # lost workers, deferred engines
    reused: tuple[str, ...] = ()  # stages and passes that the build took from the cache
    computed: tuple[str, ...] = ()  # passes that it did not
    deferred: bool = False
    job: Job | None = None
    place: NodePlacement | None = None

    @property
    def exit_code(self) -> int:
        """As of `llmforge build`; a build that was killed counts as what lacked memory."""
        if self.outcome is None:
            return _BUG
        return self.outcome.exit_code if self.outcome.exit_code >= 0 else EnvironmentLacks.exit_code

    @property
    def verdict(self) -> str:
        """In one word: pass, fail, inconclusive, none, pending or error."""
        if self.outcome is None or self.outcome.artifact is None:
            return "error"
        if self.outcome.pending and self.outcome.verdict != "fail":
            return "pending"
        return self.outcome.verdict


def worst(codes: Iterable[int]) -> int:
    """Choose the exit code of several builds, by `WORST_FIRST`; one that is not listed is a bug."""
    return min((code if code in WORST_FIRST else _BUG for code in codes), key=WORST_FIRST.index, default=0)


@dataclass
class BuildRunner:
    """Follows builds on a farm; `tell` is called with a row when something of it has changed."""

    farm: Farm
    settings: FarmSettings
    tell: Told = lambda row: None
    _rows: dict[str, Row] = field(default_factory=dict)  # by title, those that have not ended
    _code: str = field(default_factory=worker.code)

    def add(self, build: Build) -> Row:
        """Hand a build in; one that no node can make has ended at once."""
        row = self._rows[build.title] = Row(build)
        try:
            _begin(row, self.farm, self.settings, self._code)
        except ForgeError as error:
            _fail(row, BuildOutcome(error.exit_code, "", 0.0, message=error.message, hint=error.hint))
        self.tell(row)
        return row

    @property
    def running(self) -> int:
        """Number of builds that have not ended, as far as `turn` has told."""
        return len(self._rows)

    def turn(self) -> list[Row]:
        """Wait a moment, and return the rows that have ended since the last turn."""
        told, ended = self.farm.wait(_TICK_S) if self.farm.busy else ([], [])
        for name, event in told:
            row = self._rows.get(name)
            if row is not None and row.state not in ("done", "failed"):
                _hear(row, event)
                self.tell(row)
        for name, result in ended:
            row = self._rows[name]
            _end(row, result, self.farm, self.settings)
            self.tell(row)
        over = [name for name, row in self._rows.items() if row.state in ("done", "failed")]
        return [self._rows.pop(name) for name in over]


def run(builds: Sequence[Build], farm: Farm, settings: FarmSettings, tell: Told = lambda row: None) -> list[Row]:
    """Run all builds, and return their rows in the same order.

    A build that cannot be made is a row; the others go on.
    """
    runner = BuildRunner(farm, settings, tell)
    rows = [runner.add(build) for build in builds]
    while runner.running:
        runner.turn()
    return rows


def _begin(row: Row, farm: Farm, settings: FarmSettings, code: str) -> None:
    """Hand a build in: on its device, or, where its engine is deferred, anywhere."""
    recipe = row.build.load()
    target, nodes = targets.find(recipe.target), farm.nodes()
    overrides = [*row.build.overrides]
    on_device = target.kind == "cpu" or not recipe.engine.deferred
    if on_device and target.kind == "gpu" and placing.mark(target, nodes) is None:
        on_device = False
        why = f"no node has the device of target {target.name}"
        if target.require_engine(recipe.engine.backend).needs_device is not None:
            overrides.append(_DEFERRED)
            row.notes.append(f"{why}: its engine is deferred")
        else:
            row.notes.append(f"{why}: it was built elsewhere, and not run")
    row.deferred = recipe.engine.deferred or _DEFERRED in overrides
    row.place = _place(recipe, target, nodes, settings, on_device)
    arguments = _arguments(row.build, overrides, settings)
    row.job = Job((*arguments, "--out", str(settings.out), *settings.arguments), code, settings.store)
    _submit(row, farm)


def _place(
    recipe: Recipe, target: Target, nodes: Sequence[Resources], settings: FarmSettings, on_device: bool
) -> NodePlacement:
    predicted = request.build_of(recipe)
    memory = None if predicted is None else predicted.memory_bytes
    return placing.place(recipe, target, nodes, jobs=settings.jobs, memory_bytes=memory, on_device=on_device)


def _arguments(build: Build, overrides: Sequence[str], settings: FarmSettings) -> list[str]:
    return [str(build.recipe), *(word for override in overrides for word in ("--set", override))]


def _submit(row: Row, farm: Farm) -> None:
    assert row.job is not None
    assert row.place is not None
    row.attempts += 1
    farm.submit(row.build.title, row.job, row.place)


def _hear(row: Row, event: Mapping[str, object]) -> None:
    if row.began is None:
        row.began = time.monotonic()
    row.state = "building" if row.job is None or row.job.finishes is None else "finishing"
    row.stage = str(event["name"])
    row.done, row.total = (int(str(event.get(name, 0))) for name in ("done", "total"))


def _end(row: Row, result: BuildOutcome | Lost, farm: Farm, settings: FarmSettings) -> None:
    """Take what a task returned: try again, go on to the engine, or close the row."""
    if isinstance(result, Lost):
        if result.kind != "bug" and _again(row, farm, result.why, more_memory=result.kind == "memory"):
            return
        code = _BUG if result.kind == "bug" else EnvironmentLacks.exit_code
        kept = row.outcome  # of a step before, which published something
        _fail(row, BuildOutcome(code, "", 0.0, kept.artifact if kept else None, message=result.why))
        return
    row.seconds += result.seconds
    if result.out_of_memory and _again(row, farm, "out of memory", more_memory=True):
        return
    finishes = None if row.job is None else row.job.finishes
    if finishes is None:
        row.reused, row.computed = result.reused, result.computed
    elif result.artifact is None:
        row.notes.append(f"published without its engine: {finishes}")
    row.outcome = result
    row.done = row.total = 0
    row.stage = ""
    row.state = "failed" if result.artifact is None else "done"
    if result.pending and finishes is None:
        _finish(row, farm, settings)


def _again(row: Row, farm: Farm, why: str, *, more_memory: bool) -> bool:
    """Hand a step in once more; False where that was done often enough, or there is no more memory to give."""
    assert row.place is not None
    place = row.place.grown(farm.nodes()) if more_memory else row.place
    if row.attempts >= ATTEMPTS or place is None:
        return False
    if more_memory:
        row.notes.append(f"{why}; again with {place.memory_bytes / 1e9:.1f} GB")
    else:
        row.notes.append(f"{why}; again from what the cache kept")
    row.place, row.state, row.stage, row.done, row.total = place, "waiting", "", 0, 0
    _submit(row, farm)
    return True


def _finish(row: Row, farm: Farm, settings: FarmSettings) -> None:
    """Let the node that has the device build the engine; without one the row stays as it is, pending."""
    assert row.job is not None
    assert row.outcome is not None
    assert row.outcome.artifact is not None
    recipe = row.build.load()
    target, nodes = targets.find(recipe.target), farm.nodes()
    if placing.mark(target, nodes) is None:
        row.notes.append("run the same command when a node with the device has joined, to finish the engine")
        return
    row.place = _place(recipe, target, nodes, settings, True)
    overrides = (*row.build.overrides, *(() if recipe.engine.deferred else (_DEFERRED,)))
    arguments = _arguments(row.build, overrides, settings)
    path = row.outcome.artifact
    row.job = Job((*arguments, "--finish", str(path)), row.job.code, settings.store, finishes=path)
    row.attempts = 0
    row.state = "waiting"
    _submit(row, farm)


def _fail(row: Row, outcome: BuildOutcome) -> None:
    row.outcome, row.state = outcome, "failed"
    row.stage, row.done, row.total = "", 0, 0

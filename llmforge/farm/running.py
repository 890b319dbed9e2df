"""Follow the builds of a matrix to their end: hand them in, again if they were lost, and finish deferred engines.

Whose fault a failure was is asked of the node that it happened on: one that lacks something gets no more builds, and
what failed there is built elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmforge import targets
from llmforge.base.errors import EnvironmentLacks, ForgeError, kind_of
from llmforge.farm import placing, preflight
from llmforge.farm import store as stores
from llmforge.farm.cluster import ClusterLost, Farm, Lost
from llmforge.farm.matrix import Build
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.preflight import NodeLack, NodeNeeds
from llmforge.farm.rows import BUG, FINISH, LACKS, Row
from llmforge.farm.store import StoreLost
from llmforge.farm.worker import BuildOutcome, Job
from llmforge.planning import request
from llmforge.recipe import Recipe
from llmforge.targets import Target

ATTEMPTS = 4  # of one step, before it counts as failed: the first, and three after a worker or its memory was lost
MOST_HANDED_IN = 12  # times that a step is handed in, those that nodes took with them counted
_TICK_S = 0.25
_LOOK_S = 5.0  # between two looks if nodes are left for what waits
_DEFERRED = "engine.deferred=true"
_OF_NODES = 2, 5, LACKS  # exit codes of what a node may lack: files and rights, checkpoints, the environment
Told = Callable[[Row], None]


@dataclass(frozen=True)
class FarmSettings:
    """What all builds of a matrix have in common."""

    needs: NodeNeeds
    jobs: int | None = None  # builds that share a node
    arguments: tuple[str, ...] = ()  # more of `llmforge build`


def admit(farm: Farm, needs: NodeNeeds) -> None:
    """Ask every node for what builds need; those that lack something are out.

    Raises:
        ForgeError: all are, as the first of them says.
    """
    answers = farm.ask(preflight.lack, needs, writes=True)
    for node, answer in answers.items():
        _put_out(farm, node, answer)
    if answers and set(answers) <= set(farm.out):
        first = next(iter(answers))
        found = answers[first]
        kind, hint = (kind_of(found.exit_code), found.hint) if isinstance(found, NodeLack) else (EnvironmentLacks, None)
        raise kind(f"no node can build: {farm.name(first)}: {farm.out[first]}", hint=hint)


def _put_out(farm: Farm, node: str, answer: NodeLack | Lost | None) -> bool:
    """Give a node no more builds if it lacks something, or does not say."""
    if answer is None:
        return False
    why = answer.message if isinstance(answer, NodeLack) else answer.why
    farm.out[node] = why.strip().rpartition("\n")[2]
    return True


@dataclass
class BuildRunner:
    """Follows builds on a farm; `tell` is called with a row when something of it has changed."""

    farm: Farm
    settings: FarmSettings
    tell: Told = lambda row: None
    _rows: dict[str, Row] = field(default_factory=dict)  # by title, those that have not ended
    _looked: float = field(default_factory=time.monotonic)

    def add(self, build: Build) -> Row:
        """Hand a build in; one that no node can make has ended at once."""
        row = self._rows[build.title] = Row(build)
        self._start(row)
        self.tell(row)
        return row

    def _start(self, row: Row) -> None:
        try:
            _begin(row, self.farm, self.settings)
        except ForgeError as error:
            _fail(row, BuildOutcome(error.exit_code, "", 0.0, message=error.message, hint=error.hint))

    @property
    def running(self) -> int:
        """Number of builds that have not ended, as far as `turn` has told."""
        return len(self._rows)

    def turn(self) -> list[Row]:
        """Wait a moment, and return the rows that have ended since the last turn.

        Raises:
            ClusterLost: the head of the cluster does not answer any more.
            StoreLost: the store does not.
        """
        told, ended = self.farm.wait(_TICK_S) if self.farm.busy else ([], [])
        for name, event in told:
            row = self._rows.get(name)
            if row is not None and row.state not in ("done", "failed"):
                _hear(row, event, self.farm)
                self.tell(row)
        for name, result in ended:
            row = self._rows[name]
            _end(row, result, self.farm, self.settings)
            self.tell(row)
        self._place_again()
        over = [name for name, row in self._rows.items() if row.state in ("done", "failed")]
        return [self._rows.pop(name) for name in over]

    def close(self, error: ForgeError) -> None:
        """Give up what has not ended, for something that all builds need was lost."""
        for row in self._rows.values():
            waited = row.waits_for
            kept = row.outcome.artifact if row.outcome is not None else None
            row.notes.append(f"it waited for {waited}")
            row.outcome = BuildOutcome(error.exit_code, row.node, 0.0, kept, message=error.message, hint=error.hint)
            self.tell(row)
        self._rows.clear()

    def _place_again(self) -> None:
        """Find another place for what waits where the nodes that it waits for are gone."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for row in self._rows.values():
            if row.state != "waiting" or row.place is None:
                continue
            if not any(row.place.fits(node) for node in self.farm.nodes(row.place.avoided)):
                self.farm.withdraw(row.build.title)
                row.notes.append(f"no node is left as it asked for: {row.place}")
                self._start(row)
                self.tell(row)


def run(
    builds: Sequence[Build],
    farm: Farm,
    settings: FarmSettings,
    tell: Told = lambda row: None,
    rows: list[Row] | None = None,
) -> list[Row]:
    """Run all builds, and return their rows in the same order; `rows` gets them as they are handed in.

    A build that cannot be made is a row; the others go on. Where the cluster or the store is lost, rows that have not
    ended say so.
    """
    made = [] if rows is None else rows
    runner = BuildRunner(farm, settings, tell)
    try:
        for build in builds:
            made.append(runner.add(build))
        while runner.running:
            runner.turn()
    except (ClusterLost, StoreLost) as error:
        runner.close(error)
    return made


def _begin(row: Row, farm: Farm, settings: FarmSettings) -> None:
    """Hand a build in: on its device, or, where its engine is deferred, anywhere."""
    recipe = row.build.load()
    target, nodes = targets.find(recipe.target), farm.nodes(_avoided(row))
    overrides = [*row.build.overrides, *_pinned(recipe)]
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
    place = _place(recipe, target, nodes, settings, on_device)
    row.place = replace(place, avoided=_avoided(row))
    arguments = _arguments(row.build, overrides)
    words = (*arguments, "--out", str(settings.needs.out), *settings.arguments)
    row.job = Job(words, settings.needs, recipe.checkpoint)
    _submit(row, farm)


def _pinned(recipe: Recipe) -> tuple[str, ...]:
    """Name the commit of a checkpoint on the Hub: a branch may move before other nodes ask for it."""
    return () if recipe.snapshot is None else (f"revision={recipe.snapshot.commit}",)


def _avoided(row: Row) -> frozenset[str]:
    return frozenset() if row.place is None else row.place.avoided


def _place(
    recipe: Recipe, target: Target, nodes: Sequence[Resources], settings: FarmSettings, on_device: bool
) -> NodePlacement:
    predicted = request.build_of(recipe)
    memory = None if predicted is None else predicted.memory_bytes
    return placing.place(recipe, target, nodes, jobs=settings.jobs, memory_bytes=memory, on_device=on_device)


def _arguments(build: Build, overrides: Sequence[str]) -> list[str]:
    return [str(build.recipe), *(word for override in overrides for word in ("--set", override))]


def _submit(row: Row, farm: Farm) -> None:
    assert row.job is not None
    assert row.place is not None
    row.attempts += 1
    row.handed_in += 1
    row.submitted = time.monotonic()
    row.state, row.stage, row.done, row.total = "waiting", "", 0, 0
    farm.submit(row.build.title, row.job, row.place)


def _hear(row: Row, event: Mapping[str, object], farm: Farm) -> None:
    row.state = "building" if row.job is None or row.job.finishes is None else "finishing"
    if event["event"] == "begun":
        row.waited_s += time.monotonic() - row.submitted
        _is_on(row, str(event["node"]), farm)
        row.began = time.monotonic() if row.began is None else row.began
        return
    row.stage = str(event["name"])
    row.done, row.total = (int(str(event.get(name, 0))) for name in ("done", "total"))


def _is_on(row: Row, node: str, farm: Farm) -> None:
    row.node_ids = [*(each for each in row.node_ids if each != node), node]
    row.node = farm.name(node)


def _end(row: Row, result: BuildOutcome | Lost, farm: Farm, settings: FarmSettings) -> None:
    """Take what a task returned: try again, go on to the engine, or close the row.

    Raises:
        StoreLost: it failed, and the store does not answer from here either.
    """
    if isinstance(result, Lost):
        if result.kind != "bug" and _again(row, farm, result.why, more_memory=result.kind == "memory"):
            return
        code = BUG if result.kind == "bug" else LACKS
        kept = row.outcome  # of a step before, which published something
        _fail(row, BuildOutcome(code, row.node, 0.0, kept.artifact if kept else None, message=result.why))
        return
    row.seconds += result.seconds
    _is_on(row, result.node, farm)
    if result.out_of_memory and _again(row, farm, "out of memory", more_memory=True):
        return
    if result.killed and _again(row, farm, f"the build was killed on {row.node}", more_memory=False):
        return
    if result.artifact is None and result.exit_code in _OF_NODES and _elsewhere(row, result, farm, settings):
        return
    finishes = None if row.job is None else row.job.finishes
    if finishes is None:
        row.reused, row.computed = result.reused, result.computed
    elif result.artifact is None:
        row.notes.append(f"published without its engine: {finishes}")
    row.outcome = replace(result, node=row.node)
    row.done = row.total = 0
    row.stage = ""
    row.state = "failed" if result.artifact is None else "done"
    if result.pending and finishes is None:
        _finish(row, farm, settings)


def _again(row: Row, farm: Farm, why: str, *, more_memory: bool) -> bool:
    """Hand a step in once more; False where that was done often enough, or there is no more memory to give."""
    assert row.place is not None
    place = row.place.grown(farm.nodes()) if more_memory else row.place
    if row.node_ids and not farm.is_alive(row.node_ids[-1]):
        row.attempts -= 1  # its node died, whatever the build did
    if row.attempts >= ATTEMPTS or row.handed_in >= MOST_HANDED_IN or place is None:
        return False
    if more_memory:
        row.notes.append(f"{why}; again with {place.memory_bytes / 1e9:.1f} GB")
    else:
        row.notes.append(f"{why}; again from what the cache kept")
    row.place = place
    _submit(row, farm)
    return True


def _elsewhere(row: Row, result: BuildOutcome, farm: Farm, settings: FarmSettings) -> bool:
    """Hand in on another node what failed for want of something that the node should have; False: it has it.

    Raises:
        StoreLost: the store does not answer from here either.
    """
    if settings.needs.store is not None:
        try:
            stores.require_answer(settings.needs.store)
        except ForgeError as error:
            raise StoreLost(f"the store was lost: {error.message}", hint=error.hint) from error
    answer = farm.ask(preflight.lack, settings.needs, writes=True, nodes=[result.node]).get(result.node)
    lacks = _put_out(farm, result.node, answer)
    if not lacks and result.exit_code != LACKS:
        return False
    assert row.place is not None
    place = replace(row.place, avoided=row.place.avoided | {result.node})
    if not any(place.fits(node) for node in farm.nodes(place.avoided)) or row.handed_in >= MOST_HANDED_IN:
        return False
    row.notes.append(f"{result.message}, on {row.node}; again on another node")
    row.place = place
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
        row.notes.append(f"run the same command when a node with the device has joined, to {FINISH}")
        return
    row.place = _place(recipe, target, nodes, settings, True)
    overrides = (*row.build.overrides, *_pinned(recipe), *(() if recipe.engine.deferred else (_DEFERRED,)))
    arguments = _arguments(row.build, overrides)
    path = row.outcome.artifact
    row.job = Job((*arguments, "--finish", str(path)), settings.needs, recipe.checkpoint, path)
    row.attempts = row.handed_in = 0
    _submit(row, farm)


def _fail(row: Row, outcome: BuildOutcome) -> None:
    row.outcome, row.state = outcome, "failed"
    row.stage, row.done, row.total = "", 0, 0

"""A search by Optuna over builds on Ray: ask, estimate, build on few documents, build, tell.

The study is a journal beside the output. What a trial has computed is in the cache of builds; what was lost with a
search that was killed is asked for again. Optuna's heartbeats do not work with ask and tell: a running trial has a
lease of its own, which the search that runs it renews.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from llmforge.base.errors import CheckpointError, ForgeError, UnsupportedError, UsageError
from llmforge.farm import pareto, space
from llmforge.farm import store as stores
from llmforge.farm.cluster import Farm
from llmforge.farm.matrix import Build
from llmforge.farm.rows import Row
from llmforge.farm.running import BuildRunner, FarmSettings
from llmforge.farm.space import Choice, Limit, Space
from llmforge.farm.worker import Figure
from llmforge.metrics import catalog
from llmforge.planning import request
from llmforge.recipe import Recipe

Sampler = Literal["tpe", "random", "nsga2"]
SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "nsga2")
JOURNAL = "journal.log"
_LEASE_S = 120.0
_RENEW_S = 20.0
_STARTUP = 4  # trials before TPE models what it saw; those that were chosen count
_DUPLICATES = 50  # in a row, after which the space counts as searched
_NEAR = 0.02  # a figure that is worse by less is no reason to leave a change out of the combination
# Of predictions: how much worse is worse. The plan does not know how scales are stored, which is 5 bits or 4.25.
_MARGIN = {"size_bytes": 1.3, "tpot_p50_ms": 1.5}
_FEW = ("validation.quality.max_documents=4", "validation.quality.max_tokens=2048")
_UNASKED = ("gates={}", "validation.attribution=false")
_SECTIONS = {"latency": "null", "runtimes": "[]", "tasks": "null"}  # of validation, left out where nobody asks
_OVER_BUDGET = 7  # exit code of a build one of whose passes loses more than its budget, or does not run at all


@dataclass(frozen=True)
class Search:
    """What to search, and where it is kept."""

    recipe: Path
    overrides: tuple[str, ...]
    objectives: tuple[str, ...]  # metrics
    limits: tuple[Limit, ...]
    space: Space
    written: Choice  # of the recipe
    folder: Path
    sampler: Sampler = "tpe"
    seed: int = 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics that a trial is judged by."""
        return tuple(dict.fromkeys((*self.objectives, *(limit.metric for limit in self.limits))))

    @property
    def identity(self) -> str:
        """Digest of what makes trials comparable."""
        facts = [
            self.recipe.read_text(encoding="utf-8"), self.overrides, self.objectives, list(map(str, self.limits)),
            {key: list(values) for key, values in self.space.items()}, self.sampler, self.seed,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SearchTrial:
    """A trial that has ended, as the journal has it."""

    number: int
    choice: Choice
    state: Literal["complete", "pruned", "failed", "running", "invalid"]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    feasible: bool = False
    why: str = ""  # it was pruned, or failed


def asked(search: Search) -> list[Build]:
    """Give the build of the recipe as it is, by which nodes are judged."""
    return [Build("trial", "0", "all", search.recipe, (*search.overrides, "name=trial"))]


def check(search: Search) -> None:
    """Refuse what cannot be searched.

    Raises:
        UsageError: the recipe does not measure what is asked for.
    """
    validation = Recipe.load(search.recipe, search.overrides).validation
    for name in search.metrics:
        section = catalog.named(name).section
        if section and getattr(validation, section, None) in (None, ()):
            raise UsageError(f"{search.recipe}: does not measure {name}", hint=f"add `validation: {{{section}: …}}`")


def run(
    search: Search,
    farm: Farm,
    settings: FarmSettings,
    *,
    trials: int,
    slots: int,
    tell: Callable[[Row], None] = lambda row: None,
    ended: Callable[[SearchTrial], None] = lambda trial: None,
) -> list[SearchTrial]:
    """Search until so many trials count, and return all of them; those of earlier runs count.

    What was impossible (`invalid`) does not count.

    Raises:
        UsageError: the folder holds another search.
    """
    return _Driver(search, farm, settings, tell, ended).run(trials, slots)


def read(search: Search) -> list[SearchTrial]:
    """Read the trials that the journal of a search has."""
    study = _open(search)
    return [_trial(search, frozen) for frozen in study.get_trials(deepcopy=False) if frozen.state.name != "WAITING"]


def best(search: Search, trials: Sequence[SearchTrial]) -> list[SearchTrial]:
    """Give the front: trials that keep all limits and that no other beats in every objective, the best first."""
    found = [
        (losses, trial)
        for trial in trials
        if trial.state == "complete"
        and trial.feasible
        and (losses := pareto.losses(trial.figures, search.objectives)) is not None
    ]
    places = pareto.front([losses for losses, _ in found])
    unique = {found[place][0]: found[place][1] for place in reversed(places)}
    return [unique[losses] for losses in sorted(unique)]


def _open(search: Search) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search.folder.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(search.folder / JOURNAL)))
    better = [catalog.named(name).better for name in search.objectives]
    study = optuna.create_study(
        storage=storage,
        study_name="search",
        load_if_exists=True,
        directions=["maximize" if each == "higher" else "minimize" for each in better],
    )
    known = study.user_attrs.setdefault("search", search.identity)
    if "search" not in _attributes(study):
        study.set_user_attr("search", search.identity)
    elif known != search.identity:
        raise UsageError(
            f"{search.folder}: holds a search of another recipe, or with other options",
            hint="choose another folder with -o, or remove this one",
        )
    # A search that goes on does not draw the numbers again that it began with.
    study.sampler = _sampler(search, len(study.get_trials(deepcopy=False)))
    return study


def _attributes(study: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = study.user_attrs
    return found


def _sampler(search: Search, drawn: int) -> Any:
    import optuna

    seed = search.seed + drawn
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if search.sampler == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP, constant_liar=True)


@dataclass
class _RunningTrial:
    """A trial with its lease."""

    trial: Any  # optuna.trial.Trial
    choice: Choice
    step: Literal["few", "all"]
    predicted: Mapping[str, float]


@dataclass
class _Driver:
    search: Search
    farm: Farm
    settings: FarmSettings
    tell: Callable[[Row], None]
    ended: Callable[[SearchTrial], None]

    def __post_init__(self) -> None:
        self.study = _open(self.search)
        self.owner = f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"
        self.runner = BuildRunner(self.farm, self.settings, self.tell)
        self.running: dict[str, _RunningTrial] = {}
        self.extended = 0.0
        self.combined = False

    def run(self, trials: int, slots: int) -> list[SearchTrial]:
        self._requeue()
        if not self.study.get_trials(deepcopy=False):
            self._enqueue(self.search.written, "the recipe as it is")
            for choice, why in self._singles(max(0, (trials - 1) // 2)):
                self._enqueue(choice, why)
        duplicates = 0
        while True:
            while len(self.running) < slots and self._counted() + len(self.running) < trials:
                if duplicates >= _DUPLICATES:
                    break
                duplicates = 0 if self._ask() else duplicates + 1
            if not self.running:
                return read(self.search)
            self._renew()
            for row in self.runner.turn():
                self._end(self.running.pop(row.build.title), row)

    def _counted(self) -> int:
        """Count the trials that have ended, but for those that were impossible or repeated another."""
        return sum(
            frozen.state.is_finished() and not {"invalid", "lost"} & frozen.user_attrs.keys()
            for frozen in self.study.get_trials(deepcopy=False)
        )

    def _enqueue(self, choice: Choice, why: str) -> None:
        self.study.enqueue_trial(dict(choice), user_attrs={"why": why})

    def _singles(self, count: int) -> Iterator[tuple[Choice, str]]:
        """Choose changes of one option each, of all options in turn, those first that are predicted to gain most."""
        waiting: dict[str, list[str]] = {}
        for key, values in self.search.space.items():
            others = [value for value in values if value != self.search.written[key]]
            size = {value: self._predict({**self.search.written, key: value}).get("size_bytes", 0) for value in others}
            waiting[key] = sorted(others, key=size.__getitem__)
        while count > 0 and any(waiting.values()):
            for key, left in waiting.items():
                if left and count > 0:
                    count -= 1
                    value = left.pop(0)
                    yield {**self.search.written, key: value}, f"{key}={value}"

    def _ask(self) -> bool:
        """Begin a trial; False where what was asked for was decided without a build."""
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState

        self._combine()
        distributions = {key: CategoricalDistribution(values) for key, values in self.search.space.items()}
        trial = self.study.ask(fixed_distributions=distributions)
        choice: Choice = {key: str(trial.params[key]) for key in self.search.space}
        self._lease(trial)
        if not space.is_valid(self.search.recipe, self.search.overrides, choice):
            return self._drop(trial, "invalid", "the recipe cannot have these options together")
        if self._repeats(trial.number, choice):
            return self._drop(trial, "invalid", "it repeats another trial")
        predicted = self._predict(choice)
        trial.set_user_attr("predicted", dict(predicted))
        if why := self._hopeless(predicted):
            trial.set_user_attr("pruned", why)
            self._told(self.study.tell(trial, state=TrialState.PRUNED))
            return True
        judged = any(catalog.named(limit.metric).section == "quality" for limit in self.search.limits)
        self._build(_RunningTrial(trial, choice, "few" if judged else "all", predicted))
        return True

    def _drop(self, trial: Any, attribute: str, why: str) -> bool:
        from optuna.trial import TrialState

        trial.set_user_attr(attribute, why)
        self.study.tell(trial, state=TrialState.PRUNED)
        return False

    def _repeats(self, number: int, choice: Choice) -> bool:
        return any(
            frozen.number != number and frozen.params == choice and not {"invalid", "lost"} & frozen.user_attrs.keys()
            and frozen.state.name != "WAITING"
            for frozen in self.study.get_trials(deepcopy=False)
        )  # fmt: skip

    def _build(self, running: _RunningTrial) -> None:
        """Hand in a trial's next build: of all that is measured, or of its quality on few documents."""
        overrides = [*self.search.overrides, *space.words(running.choice), *_UNASKED]
        sections = {catalog.named(name).section for name in self.search.metrics}
        unmeasured = [each for each in _SECTIONS if running.step == "few" or each not in sections]
        overrides += [f"validation.{each}={_SECTIONS[each]}" for each in unmeasured]
        if running.step == "few":
            overrides += _FEW
        overrides.append("name=trial")
        build = Build("trial", str(running.trial.number), running.step, self.search.recipe, tuple(overrides))
        self.running[build.title] = running
        self.runner.add(build)

    def _end(self, running: _RunningTrial, row: Row) -> None:
        from optuna.trial import TrialState

        outcome = row.outcome
        assert outcome is not None
        self._remove(row)
        if outcome.artifact is None:
            over = outcome.exit_code == _OVER_BUDGET and "its budget" in (outcome.message or "")
            running.trial.set_user_attr("pruned" if over else "failed", outcome.message or "it was not built")
            self._told(self.study.tell(running.trial, state=TrialState.PRUNED if over else TrialState.FAIL))
            return
        figures = {name: outcome.figures[name] for name in self.search.metrics if name in outcome.figures}
        if running.step == "few":
            if why := self._too_bad(figures):
                running.trial.set_user_attr("pruned", f"on few documents: {why}")
                self._told(self.study.tell(running.trial, state=TrialState.PRUNED))
            else:
                self._build(replace(running, step="all"))
            return
        kept = {name: [each.value, each.low, each.high] for name, each in figures.items()}
        running.trial.set_user_attr("figures", kept)
        values = [figures[name].value for name in self.search.objectives if name in figures]
        if len(figures) < len(self.search.metrics):
            running.trial.set_user_attr("failed", "not everything was measured")
            self._told(self.study.tell(running.trial, state=TrialState.FAIL))
            return
        for limit in self.search.limits:
            running.trial.set_constraint(str(limit), limit.excess(figures[limit.metric].value))
        self._told(self.study.tell(running.trial, values))

    def _remove(self, row: Row) -> None:
        """Remove what a trial has published, from its nodes and the store."""
        assert row.outcome is not None
        both = row.outcome.artifact, None if row.job is None else row.job.finishes
        paths = [path for path in both if path is not None]
        if not paths:
            return
        if self.farm.address is None:
            remove(paths)
        else:
            self.farm.ask(remove, paths, nodes=[each for each in row.node_ids if self.farm.is_alive(each)])
        if self.settings.needs.store is not None:
            with suppress(ForgeError):
                for path in paths:
                    stores.remove(path, self.settings.needs.store)

    def _told(self, frozen: Any) -> None:
        self.ended(_trial(self.search, frozen))

    def _too_bad(self, figures: Mapping[str, Figure]) -> str | None:
        """Say which limit is broken by a whole interval."""
        for limit in self.search.limits:
            figure = figures.get(limit.metric)
            bound = None if figure is None else figure.low if limit.at_most else figure.high
            if bound is not None and limit.excess(bound) > 0:
                return f"{limit.metric} is {bound:.3g} at best; {limit}"
        return None

    def _predict(self, choice: Choice) -> dict[str, float]:
        """Estimate by the plan what a trial would measure, as far as that tells."""
        try:
            recipe = Recipe.load(self.search.recipe, (*self.search.overrides, *space.words(choice)))
            built, planned = request.build_of(recipe), request.of_recipe(recipe)
        except (CheckpointError, UnsupportedError, UsageError):
            return {}
        found = {} if built is None else {"size_bytes": float(built.disk_bytes)}
        if planned is not None:
            found["tpot_p50_ms"] = planned.plan.asked.decode.step.seconds * 1e3
        return found

    def _hopeless(self, predicted: Mapping[str, float]) -> str | None:
        """Say why a trial is not built: the plan says that it breaks a limit, or that another beats it by far."""
        for limit in self.search.limits:
            value = predicted.get(limit.metric)
            if value is not None and limit.at_most and value > limit.value * _MARGIN[limit.metric]:
                return f"predicted {limit.metric} {value:.4g}; {limit}"
        if not all(name in predicted for name in self.search.objectives):
            return None
        for trial in read(self.search):
            other = self._predicted_of(trial)
            if trial.feasible and all(
                name in other and predicted[name] > other[name] * _MARGIN[name] for name in self.search.objectives
            ):
                return f"predicted to be worse than trial {trial.number} in every objective"
        return None

    def _predicted_of(self, trial: SearchTrial) -> Mapping[str, float]:
        found: Mapping[str, float] = self.study.get_trials(deepcopy=False)[trial.number].user_attrs.get("predicted", {})
        return found

    def _combine(self) -> None:
        """Once the changes of one option are through, ask for all of them together that cost nothing."""
        if self.combined:
            return
        frozen = self.study.get_trials(deepcopy=False)
        if any("together" in each.user_attrs.get("why", "") for each in frozen):
            self.combined = True
            return
        if any(each.state.name == "WAITING" for each in frozen) or not frozen:
            return
        trials = read(self.search)
        base = next((each for each in trials if each.choice == self.search.written and each.figures), None)
        if base is None:
            return
        self.combined = True
        changes: dict[str, tuple[float, str]] = {}
        for each in trials:
            changed = [key for key in self.search.space if each.choice[key] != self.search.written[key]]
            if each.state != "complete" or len(changed) != 1:
                continue
            gain = _gain(base, each, self.search.metrics)
            if gain is not None and gain > changes.get(changed[0], (0.0, ""))[0]:
                changes[changed[0]] = gain, each.choice[changed[0]]
        if len(changes) > 1:
            together = {**self.search.written, **{key: value for key, (_, value) in changes.items()}}
            self._enqueue(together, "what cost nothing alone, together")

    def _lease(self, trial: Any) -> None:
        trial.set_user_attr("lease", {"owner": self.owner, "until": time.time() + _LEASE_S})

    def _renew(self) -> None:
        if time.monotonic() - self.extended > _RENEW_S:
            self.extended = time.monotonic()
            for running in self.running.values():
                self._lease(running.trial)

    def _requeue(self) -> None:
        """Give back what searches that ended were running: the trial is lost, and its options are asked for again."""
        from optuna.trial import TrialState

        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            lease = frozen.user_attrs.get("lease", {"owner": "", "until": 0.0})
            if lease["until"] > time.time() and not _is_dead(lease["owner"]):
                continue
            self.study._storage.set_trial_user_attr(frozen._trial_id, "lost", "the search that ran it ended")
            self.study.tell(frozen.number, state=TrialState.FAIL)
            if frozen.params:
                why = f"again after trial {frozen.number}, which was lost"
                self.study.enqueue_trial(frozen.params, user_attrs={"why": why})


def _is_dead(owner: str) -> bool:
    """Say whether the owner of a lease is a process of this machine that has ended."""
    host, _, rest = owner.partition(":")
    if host != platform.node():
        return False
    pid, _, started = rest.partition(":")
    try:
        return f"{psutil.Process(int(pid)).create_time():.0f}" != started
    except (psutil.NoSuchProcess, ValueError):
        return True


def _gain(base: SearchTrial, other: SearchTrial, metrics: Sequence[str]) -> float | None:
    """Give the share by which the figures of a trial are better in all; None where one is worse."""
    before, after = pareto.losses(base.figures, metrics), pareto.losses(other.figures, metrics)
    if before is None or after is None:
        return None
    shares = [(a - b) / abs(a) if a else 0.0 for a, b in zip(before, after, strict=True)]
    return None if min(shares) < -_NEAR else sum(shares)


def _trial(search: Search, frozen: Any) -> SearchTrial:
    attributes = frozen.user_attrs
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    figures = {name: Figure(*values) for name, values in attributes.get("figures", {}).items()}
    kept = all(limit.excess(figures[limit.metric].value) <= 0 for limit in search.limits if limit.metric in figures)
    why = next((str(attributes[name]) for name in ("invalid", "lost", "pruned", "failed") if name in attributes), "")
    state: Any = "invalid" if {"invalid", "lost"} & attributes.keys() else states[frozen.state.name]
    choice = {key: str(value) for key, value in frozen.params.items()}
    return SearchTrial(frozen.number, choice, state, figures, state == "complete" and kept, why)


def remove(paths: Sequence[Path]) -> None:
    """Remove from this machine what a trial has published: its figures are read, and the cache makes it again.

    Folders in which nothing is left go too.
    """
    from llmforge.artifact import versions

    for path in paths:
        with suppress(ForgeError):  # it stays; nothing depends on it
            if path.is_dir():
                versions.remove([path])

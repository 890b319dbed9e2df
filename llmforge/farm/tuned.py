"""What a search found: a page, plain data, and the recipe of the best trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmforge import passes
from llmforge.diagnosis import mixed_precision_recipe
from llmforge.farm import page, pareto, space
from llmforge.farm.pareto import ParetoPoint, Plot
from llmforge.farm.searching import Search, SearchTrial, best
from llmforge.metrics import catalog
from llmforge.recipe import Recipe


def data(search: Search, trials: Sequence[SearchTrial]) -> dict[str, Any]:
    """Write a search as plain data."""
    return {
        "objectives": list(search.objectives),
        "subject_to": [str(limit) for limit in search.limits],
        "sampler": search.sampler,
        "seed": search.seed,
        "trials": [_data(search, each) for each in trials],
        "front": [each.number for each in best(search, trials)],
    }


def _data(search: Search, trial: SearchTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state,
        "feasible": trial.feasible,
        "options": {key: json.loads(value) for key, value in trial.choice.items()},
        "changed": changed(search, trial),
        "figures": {
            name: {"value": each.value, "low": each.low, "high": each.high} for name, each in trial.figures.items()
        },
        "why": trial.why or None,
    }


def changed(search: Search, trial: SearchTrial) -> dict[str, Any]:
    """Give the options that a trial has otherwise than the recipe, without the passes' prefix."""
    return {
        key.removeprefix("passes."): json.loads(value)
        for key, value in trial.choice.items()
        if value != search.written.get(key)
    }


def options(search: Search, trial: SearchTrial) -> str:
    """Write what a trial changes for people."""
    found = changed(search, trial)
    return ", ".join(f"{key}: {value}" for key, value in found.items()) or "as the recipe"


def figure(trial: SearchTrial, name: str) -> str:
    """Write a figure of a trial, or a dash."""
    found = trial.figures.get(name)
    return "–" if found is None else catalog.named(name).unit.write(found.value)


def html(search: Search, trials: Sequence[SearchTrial]) -> str:
    """Write the page of a search."""
    front = {each.number for each in best(search, trials)}
    shown = [each for each in trials if each.state != "invalid"]
    return page.render(
        "tune.html.jinja",
        search=search,
        trials=shown,
        impossible=len(trials) - len(shown),
        front=front,
        plots=_plots(search, shown),
        options=lambda trial: options(search, trial),
        written=lambda trial, name: figure(trial, name),
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
    )


def _plots(search: Search, trials: Sequence[SearchTrial]) -> list[Plot]:
    points = [
        ParetoPoint(
            str(each.number), f"trial {each.number}: {options(search, each)}", 0 if each.feasible else 5, each.figures
        )
        for each in trials
        if each.state == "complete"
    ]
    first, *rest = search.metrics
    found = (pareto.plot(points, first, other) for other in rest)
    return [each for each in found if each is not None]


def write_recipe(search: Search, trials: Sequence[SearchTrial], path: Path) -> SearchTrial | None:
    """Write the recipe of the first trial of the front to `path`, with the figures and the others of the front.

    Return the trial; None where no trial keeps all limits, and nothing is written.
    """
    front = best(search, trials)
    if not front:
        return None
    chosen = front[0]
    overrides = (*search.overrides, *space.words(chosen.choice))
    mixed_precision_recipe.write(Recipe.load(search.recipe, overrides), {}, path)
    lines = [*_comments(search, front, len([each for each in trials if each.state == "complete"]))]
    path.write_text("".join(f"# {line}\n" for line in lines) + path.read_text(encoding="utf-8"), encoding="utf-8")
    Recipe.load(path).instantiate(passes.ALL)
    return chosen


def _comments(search: Search, front: Sequence[SearchTrial], complete: int) -> list[str]:
    chosen, *others = front
    aims = ", ".join(catalog.named(name).title for name in search.objectives)
    kept = f", with {', '.join(map(str, search.limits))}" if search.limits else ""
    lines = [f"Written by `llmforge tune {search.recipe.name}`: best {aims}{kept}, of {complete} trials."]
    lines.append(f"Trial {chosen.number}: {_figures(search, chosen)}. Changed: {options(search, chosen)}.")
    if others:
        lines.append("Also on the front, with what they change:")
        lines += [f"  trial {each.number}: {_figures(search, each)}; {options(search, each)}" for each in others]
    return lines


def _figures(search: Search, trial: SearchTrial) -> str:
    titles: Mapping[str, str] = {name: catalog.named(name).title for name in search.metrics}
    return ", ".join(f"{title} {figure(trial, name)}" for name, title in titles.items())

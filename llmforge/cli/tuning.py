"""The command `tune`: search options of a recipe. Imports late what it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, GateFailed, UsageError
from llmforge.cli import farming, output
from llmforge.cli.caching import CacheOptions, cache_options
from llmforge.cli.parameters import PATH, POSITIVE, options_record

if TYPE_CHECKING:
    from llmforge.farm.searching import Search, SearchTrial

_EXAMPLES = """\b
Examples:
  llmforge tune recipe.yaml --objective tpot --subject-to 'kld_mean<=0.02' --trials 24
  llmforge tune recipe.yaml --objective size --objective kld_mean --trials 40 --jobs 4
  llmforge tune recipe.yaml --objective tpot --option 'engine.threads=[2,4,8]' --address auto
"""


@dataclass(frozen=True)
class TuneOptions:
    """Options of `tune`."""

    objectives: tuple[str, ...]
    limits: tuple[str, ...]
    trials: int
    given: tuple[str, ...]
    sampler: str
    seed: int
    folder: Path | None
    overrides: tuple[str, ...]
    address: str | None
    jobs: int | None
    store: str | None
    share_checkpoints: bool
    wheel: Path | None
    as_json: bool
    cache: CacheOptions


@click.command(epilog=_EXAMPLES)
@click.argument("recipe", type=PATH)
@click.option(
    "--objective", "objectives", multiple=True, required=True, metavar="METRIC",
    help="What to optimize: a metric that a gate can limit, such as tpot, ttft, size or kld_mean. Repeatable.",
)  # fmt: skip
@click.option(
    "--subject-to", "limits", multiple=True, metavar="METRIC<=NUMBER", help="Limit that a recipe must meet. Repeatable."
)
@click.option("--trials", type=POSITIVE, metavar="N", default=24, help="Trials in all, those of earlier runs counted.")
@click.option(
    "--option", "given", multiple=True, metavar="KEY=[VALUE,…]",
    help="Values to try for a key of the recipe. Default: the choices of its quantize- passes. One value fixes an "
    "option. Repeatable.",
)  # fmt: skip
@click.option("--sampler", type=click.Choice(["tpe", "random", "nsga2"]), default="tpe", help="Sampler of Optuna.")
@click.option("--seed", type=click.IntRange(0, 2**31), metavar="S", default=0, help="Random seed.")
@click.option(
    "-o", "--output", "folder", type=PATH, metavar="DIR",
    help="Folder for the trials, the page and the recipe. Default: tune/NAME. A search already there is continued.",
)  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe value; repeatable.")
@farming.ray_options
@cache_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options_record(CacheOptions, "cache")
@options_record(TuneOptions)
def tune(recipe: Path, options: TuneOptions) -> None:
    """Search the options of RECIPE for the best engine within your limits.

    Each trial is a build. Trials are dropped early by what `plan` predicts and by quality on few documents. Ends with
    the Pareto front, a page, and the recipe of its first trial, whose path is the last line of standard output.
    """
    extras.require("build", "farm", *(("remote",) if options.store else ()))
    from llmforge.cli import console
    from llmforge.farm import connection, running, searching
    from llmforge.recipe import Recipe

    folder = options.folder or Path("tune") / Recipe.load(recipe, options.overrides).name
    search = _search(recipe, folder, options)
    arguments = tuple(options.cache.arguments())
    needed = farming.needs(searching.asked(search), search.folder / "artifacts", options, options.cache)
    settings = running.FarmSettings(needed, options.jobs, arguments)
    console.say(f"searching {len(search.space)} options: {', '.join(search.space)}")
    began = time.monotonic()
    try:
        with connection.opened(options.address, wheel=options.wheel) as farm, farming.shown() as shown:
            slots = options.jobs or 1
            if options.address is not None:
                running.admit(farm, needed)
                slots *= max(1, len(farm.nodes()))
            tell = partial(_tell, search)
            ended = searching.run(
                search, farm, settings, trials=options.trials, slots=slots, tell=shown.tell, ended=tell
            )
    except (KeyboardInterrupt, EnvironmentLacks) as error:  # the latter: the cluster was lost, or the store
        error.add_note("run the same command to go on: trials that have ended are kept")
        if (search.folder / searching.JOURNAL).exists():
            _write_page(search, searching.read(search), folder / "search.html")
        raise
    _write(search, ended, folder, options, seconds=time.monotonic() - began)


def _search(recipe: Path, folder: Path, options: TuneOptions) -> Search:
    """Choose what to search, and the `folder` that keeps it.

    Raises:
        UsageError: the folder is a file, or the recipe does not measure what is asked for.
    """
    from llmforge.farm import searching, space

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder")
    searched, written = space.of_recipe(recipe, options.overrides, options.given)
    search = searching.Search(
        recipe.absolute(),
        options.overrides,
        tuple(dict.fromkeys(map(space.objective_of, options.objectives))),
        tuple(map(space.limit_of, options.limits)),
        searched,
        written,
        folder.absolute(),
        next(each for each in searching.SAMPLERS if each == options.sampler),
        options.seed,
    )
    searching.check(search)
    return search


def _tell(search: Search, trial: SearchTrial) -> None:
    from llmforge.cli import console
    from llmforge.farm import tuned

    figures = ", ".join(f"{each} {tuned.figure(trial, each)}" for each in search.metrics if each in trial.figures)
    console.say(f"trial {trial.number}: {trial.state}: {figures or trial.why} ({tuned.options(search, trial)})")


def _write_page(search: Search, ended: Sequence[SearchTrial], page: Path) -> None:
    from llmforge.farm import tuned

    with output.writing(page):
        page.write_text(tuned.html(search, ended), encoding="utf-8")


def _write(search: Search, ended: Sequence[SearchTrial], folder: Path, options: TuneOptions, *, seconds: float) -> None:
    """Write the page and the recipe of the best trial, and print what was found.

    Raises:
        GateFailed: no trial keeps the limits.
    """
    from llmforge.farm import searching, tuned

    page, best = folder / "search.html", folder / "recipe.yaml"
    _write_page(search, ended, page)
    with output.writing(best):
        chosen = tuned.write_recipe(search, ended, best)
    if options.as_json:
        facts = {"seconds": round(seconds, 3), "page": str(page)}
        output.write_json({**tuned.data(search, ended), **facts, "recipe": str(best) if chosen else None})
    else:
        rows = [(str(each.number), *(tuned.figure(each, name) for name in search.metrics), tuned.options(search, each))
                for each in searching.best(search, ended)]  # fmt: skip
        if rows:
            output.write_columns([("trial", *search.metrics, "changed"), *rows])
        output.write_lines(str(page), *([str(best)] if chosen else []))
    if chosen is None:
        limits = ", ".join(options.limits)
        raise GateFailed(
            f"none of {len(ended)} trials keeps {limits}" if limits else "no trial was measured",
            hint=f"{page} says why; loosen the limits, or search more options",
        )

"""The command `tune`: search options of a recipe. Imports late what it needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras
from llmforge.base.errors import GateFailed, UsageError
from llmforge.cli import farming, output
from llmforge.cli.parameters import PATH, POSITIVE

if TYPE_CHECKING:
    from llmforge.farm.searching import Trial

_EXAMPLES = """\b
Examples:
  llmforge tune recipe.yaml --objective tpot --subject-to 'kld_mean<=0.02' --trials 24
  llmforge tune recipe.yaml --objective size --objective kld_mean --trials 40 --jobs 4
  llmforge tune recipe.yaml --objective tpot --option 'engine.threads=[2,4,8]' --address auto
"""


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    recipe: Path,
    objectives: tuple[str, ...],
    limits: tuple[str, ...],
    trials: int,
    given: tuple[str, ...],
    sampler: str,
    seed: int,
    folder: Path | None,
    overrides: tuple[str, ...],
    address: str | None,
    jobs: int | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Search the options of RECIPE for the best engine within your limits.

    Each trial is a build. Trials are dropped early by what `plan` predicts and by quality on few documents. Ends with
    the Pareto front, a page, and the recipe of its first trial, whose path is the last line of standard output.
    """
    extras.require("build", "farm", *(("remote",) if store else ()))
    from llmforge.cli import console
    from llmforge.farm import cluster, searching, space, tuned
    from llmforge.farm.running import Settings
    from llmforge.recipe import Recipe

    name = Recipe.load(recipe, overrides).name
    folder = folder or Path("tune") / name
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder")
    searched, written = space.of_recipe(recipe, overrides, given)
    search = searching.Search(
        recipe.absolute(),
        overrides,
        tuple(dict.fromkeys(map(space.metric_of, objectives))),
        tuple(map(space.limit_of, limits)),
        searched,
        written,
        folder.absolute(),
        next(each for each in searching.SAMPLERS if each == sampler),
        seed,
    )
    searching.check(search)
    settings = Settings(folder.absolute() / "artifacts", store, jobs)
    console.say(f"searching {len(searched)} options: {', '.join(searched)}")
    began = time.monotonic()

    def tell(trial: Trial) -> None:
        figures = ", ".join(f"{each} {tuned.figure(trial, each)}" for each in search.metrics if each in trial.figures)
        said = figures or trial.why
        console.say(f"trial {trial.number}: {trial.state}: {said} ({tuned.options(search, trial)})")

    try:
        with cluster.opened(address) as farm, farming.shown() as shown:
            slots = jobs or 1
            if address is not None:
                slots *= max(1, len(farm.nodes()))
            ended = searching.run(search, farm, settings, trials=trials, slots=slots, tell=shown.tell, ended=tell)
    except KeyboardInterrupt as error:
        error.add_note("run the same command to go on: trials that have ended are kept")
        raise
    page, best = folder / "search.html", folder / "recipe.yaml"
    with output.writing(page):
        page.write_text(tuned.html(search, ended), encoding="utf-8")
        chosen = tuned.write_recipe(search, ended, best)
    if as_json:
        facts = {"seconds": round(time.monotonic() - began, 3), "page": str(page)}
        output.write_json({**tuned.data(search, ended), **facts, "recipe": str(best) if chosen else None})
    else:
        rows = [(str(each.number), *(tuned.figure(each, name) for name in search.metrics), tuned.options(search, each))
                for each in searching.best(search, ended)]  # fmt: skip
        if rows:
            output.write_columns([("trial", *search.metrics, "changed"), *rows])
        output.write_lines(str(page), *([str(best)] if chosen else []))
    if chosen is None:
        raise GateFailed(
            f"none of {len(ended)} trials keeps {', '.join(limits)}" if limits else "no trial was measured",
            hint=f"{page} says why; loosen the limits, or search more options",
        )

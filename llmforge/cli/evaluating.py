"""The command `eval`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process
from llmforge.base.errors import UsageError
from llmforge.cli import output, verdicts
from llmforge.cli.parameters import (
    ARTIFACT,
    NATURAL,
    PATH,
    POSITIVE,
    api_key_option,
    keep_quiet,
    options_record,
    require_given,
    server_of,
)
from llmforge.cli.recorded import recipe_of

if TYPE_CHECKING:
    from llmforge.checkpoint import Checkpoint
    from llmforge.compile.validating import Evaluated
    from llmforge.gates.decision import GateResult
    from llmforge.metrics.tasks import TaskResult

_EXAMPLES = """\b
Examples:
  llmforge eval NAME/VERSION --tasks docs/tasks/next-sentence.yaml
  llmforge eval NAME/VERSION --tasks arc_easy,hellaswag --limit 200 --checkpoint CHECKPOINT
  llmforge eval NAME/VERSION --tasks task.yaml --url http://127.0.0.1:8000
"""


@dataclass(frozen=True)
class EvalOptions:
    """What the command `eval` is given."""

    artifact: Path
    wanted: str
    recipe: Path | None
    checkpoint: Path | None
    limit: int | None
    few_shot: int | None
    url: str | None
    api_key: str | None
    model: str | None
    no_cache: bool
    as_json: bool
    quiet: bool


@click.command("eval", epilog=_EXAMPLES)
@click.argument("artifact", type=ARTIFACT)
@click.option(
    "--tasks", "wanted", required=True, metavar="TASK,…",
    help="Names of tasks of lm-evaluation-harness, or YAML files.",
)  # fmt: skip
@click.option("--recipe", type=PATH, help="The recipe of ARTIFACT, for its checkpoint. Default: its own.")
@click.option("--checkpoint", type=PATH, help="The checkpoint's folder, in place of a recipe.")
@click.option("--limit", type=POSITIVE, metavar="N", help="Only the first N items of each task.")
@click.option("--num-fewshot", "few_shot", type=NATURAL, metavar="K", help="Examples before each item.")
@click.option(
    "--url", metavar="URL",
    help="Ask this server in place of the engine: an OpenAI endpoint, or http://HOST:PORT/v2/models/MODEL of Triton. "
    "What it answers is shown, and not recorded.",
)  # fmt: skip
@api_key_option
@click.option("--model", metavar="NAME", help="With --url: the model of an OpenAI endpoint. Default: its first.")
@click.option("--no-cache", is_flag=True, help="Reuse no answers of earlier runs, and keep none.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, item by item.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@options_record(EvalOptions)
def evaluate(options: EvalOptions) -> None:
    """Run tasks on ARTIFACT and on its checkpoint, and record the scores.

    The scores are evidence of ARTIFACT. Both answer the same requests; items are kept, and differences are taken item
    by item. Nothing is downloaded. The recipe's gates are decided again; those on scores of these tasks give the exit
    code.
    """
    process.prepare()
    extras.require("build")
    extras.require("eval")
    if options.recipe is not None and options.checkpoint is not None:
        raise UsageError("--checkpoint cannot be used with --recipe", hint="remove one of them")
    if options.url is None:
        require_given("--url", "model")
    found = _evaluated(options)
    result = found.result
    decided = [] if result is None else _of_tasks(result.report.gates, found.tasks)
    _show(found, decided, as_json=options.as_json)
    if result is None:
        return
    if not options.as_json:
        output.write_lines(str(result.path))
    _note_others(result.report.gates, decided)
    verdicts.end_of(result.report, result.path, gates=decided)


def _evaluated(options: EvalOptions) -> Evaluated:
    server = server_of(options.url, options.api_key)
    from llmforge import cache
    from llmforge.cli import console
    from llmforge.compile import validating
    from llmforge.measure.scoring import TaskRequest
    from llmforge.measure.tasks import TaskServer

    store = None if options.no_cache else partial(cache.Cache, cache.default_folder(), cache.default_size())
    names = tuple(task for task in options.wanted.split(",") if task)
    with console.traced("eval", quiet=options.quiet, trace=None) as progress:
        return validating.evaluate(
            options.artifact,
            TaskRequest(names, options.limit, options.few_shot),
            _checkpoint(options),
            progress,
            server=None if server is None else TaskServer(server, options.model),
            cache=store,
        )


def _show(found: Evaluated, decided: Sequence[GateResult], *, as_json: bool) -> None:
    """Write the scores; as JSON with the verdict of the gates on them."""
    from llmforge.cli import console
    from llmforge.gates import decision
    from llmforge.report import view

    if as_json:
        facts = {"tasks": [task.model_dump(mode="json") for task in found.tasks], "notes": found.skipped}
        verdict = None if found.result is None else decision.overall(decided).value
        output.write_json({**facts, "verdict": verdict, "gates": [gate.model_dump(mode="json") for gate in decided]})
        return
    output.write_columns(view.task_rows(found.tasks))
    for note in found.skipped:
        console.say(f"note: {note}")


def _note_others(gates: Sequence[GateResult], decided: Sequence[GateResult]) -> None:
    """Say how the gates ended that these tasks do not decide, where they did not pass."""
    from llmforge.cli import console
    from llmforge.gates import decision

    others = [gate for gate in gates if gate not in decided]
    if others and (ended := decision.overall(others)) is not decision.Verdict.PASS:
        what = "failed" if ended is decision.Verdict.FAIL else "is inconclusive"
        console.say(f"note: a gate of the artifact that these tasks do not decide {what}: see `llmforge gate`")


def _of_tasks(results: Sequence[GateResult], tasks: Sequence[TaskResult]) -> list[GateResult]:
    """Take the gates on scores of `tasks`."""
    from llmforge.metrics.tasks import PREFIX

    names = tuple(f"{PREFIX}{task.name}." for task in tasks)
    return [gate for gate in results if gate.metric.startswith(names)]


def _checkpoint(options: EvalOptions) -> Checkpoint:
    from llmforge.checkpoint import Checkpoint

    if options.checkpoint is not None:
        return Checkpoint.open(options.checkpoint)
    recipe = recipe_of(options.artifact, options.recipe)
    return Checkpoint.open(*recipe.origin())

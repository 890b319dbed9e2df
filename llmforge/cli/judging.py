"""The commands that judge releases: gate, validate, diff, history. They import late what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process
from llmforge.base.errors import EnginePending, GateFailed, GateInconclusive, UsageError
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, PATH, POSITIVE, out_option

if TYPE_CHECKING:
    from llmforge.evaluation.gates import Figure
    from llmforge.recipe import GateSpec
    from llmforge.report.release import Judgement, Subject

LATEST, NOTHING = "latest-passed", "none"
_GATE = """\b
Examples:
  llmforge gate NAME/VERSION --against NAME:prod
  llmforge gate NAME/VERSION --against latest-passed --gates release.yaml --junit gates.xml
  llmforge gate NAME/VERSION --against NAME:prod --until-decided --recipe RECIPE --text more.jsonl
"""


@click.command(epilog=_GATE)
@click.argument("artifact", type=ARTIFACT)
@click.option(
    "--against", metavar="ARTIFACT",
    help="Hold it against this artifact; `latest-passed`: the newest earlier version whose gates passed; `none`: "
    "leave out limits that need one, as for a first release.",
)  # fmt: skip
@click.option("--gates", "file", type=PATH, metavar="FILE.yaml", help="Limits in place of those of the recipe.")
@click.option("--until-decided", is_flag=True, help="Measure further documents until the gates are decided.")
@click.option("--recipe", type=PATH, help="With --until-decided: the recipe that ARTIFACT was built by.")
@click.option(
    "--text", "texts", type=PATH, multiple=True, metavar="FILE.jsonl",
    help="With --until-decided: more documents, of {id, text}; repeatable.",
)  # fmt: skip
@click.option("--max-documents", type=POSITIVE, metavar="N", help="With --until-decided: stop at N documents.")
@click.option("--junit", type=PATH, metavar="FILE.xml", help="Write JUnit XML.")
@click.option("--markdown", type=PATH, metavar="FILE.md", help="Write Markdown, for a pull request.")
@out_option("Folder of the artifacts.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def gate(
    artifact: Path,
    against: str | None,
    file: Path | None,
    until_decided: bool,
    recipe: Path | None,
    texts: tuple[Path, ...],
    max_documents: int | None,
    junit: Path | None,
    markdown: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """Decide gates on the evidence of ARTIFACT, alone and against an earlier artifact.

    Nothing is built or measured again, unless a limit on latency against an earlier artifact is to be decided, or with
    --until-decided. The exit code tells the verdict.
    """
    from llmforge.artifact import Artifact
    from llmforge.recipe import GatesFile, Recipe
    from llmforge.report import release, release_text, verdict

    if not until_decided and (recipe is not None or texts or max_documents is not None):
        raise UsageError("--recipe, --text and --max-documents require --until-decided")
    if until_decided and recipe is None:
        raise UsageError("--until-decided requires --recipe", hint="give the recipe that ARTIFACT was built by")
    for path in filter(None, (junit, markdown)):
        output.check_file(path)
    opened = Artifact.open(artifact)
    verdict.recompute(opened)
    subject = release.Subject.of(opened)
    given = None if file is None else GatesFile.load(file)
    specs = subject.sealed_limits if given is None else dict(given.gates)
    source = f"the recipe of {subject.side.reference}" if file is None else str(file)
    release.check(specs, source)
    if not specs:
        raise UsageError(f"{source} has no gates: nothing to decide", hint="give limits with --gates FILE.yaml")
    notes: list[str] = []
    earlier = _earlier(subject, specs, against or (given.baseline if given else None), out, notes)
    if until_decided:
        extras.require("build")
        from llmforge.build import validating
        from llmforge.cli import console

        assert recipe is not None
        process.prepare()
        with console.traced("gate", quiet=as_json, trace=None) as progress:
            judged = validating.decide(
                subject, specs, earlier, Recipe.load(recipe), texts, most=max_documents, progress=progress, notes=notes
            )
    else:
        turns = {} if earlier is None else _in_turns(subject, earlier, specs)
        judged = release.judge(subject, specs, earlier, in_turns=turns, notes=notes)
    if junit is not None:
        with output.writing(junit):
            junit.write_text(release_text.junit(judged), encoding="utf-8")
    if markdown is not None:
        with output.writing(markdown):
            markdown.write_text(release_text.markdown(judged), encoding="utf-8")
    click.echo(judged.to_json().rstrip("\n") if as_json else "\n".join(release_text.text(judged)))
    _end(judged)


def _end(judged: Judgement) -> None:
    """Raise what gives the exit code of a verdict."""
    from llmforge.evaluation.gates import Verdict
    from llmforge.report import release_text

    said = release_text.headline(judged)
    if judged.verdict is Verdict.FAIL:
        raise GateFailed(said)
    if judged.pending and judged.verdict is not Verdict.PASS:
        raise EnginePending(said, hint="build it on the target: llmforge build --finish ARTIFACT")
    if judged.verdict is not Verdict.PASS:
        raise GateInconclusive(said, hint="measure more documents: llmforge gate --until-decided")


def _earlier(
    subject: Subject, specs: dict[str, GateSpec], named: str | None, out: Path, notes: list[str]
) -> Subject | None:
    """Find the artifact that a release is held against; None: there is none to be held against."""
    from llmforge.artifact import Artifact, resolve, versions
    from llmforge.report import release, verdict

    needed = release.is_relative(specs)
    if named == NOTHING:
        if needed:
            notes.append("limits against an earlier artifact were left out: --against none")
        return None
    if named is None and not needed:
        return None
    if named not in (None, LATEST):
        opened = Artifact.open(resolve(str(named), out))
    else:
        parent = subject.opened.path.parent
        home = parent.parent if parent.name == subject.report.name else out
        made = subject.opened.evidence[0].created
        found = [
            each.artifact
            for each in versions.listed(home, subject.report.name)
            if each.artifact is not None
            and each.artifact.manifest.content_digest != subject.report.content
            and each.artifact.verdict == "pass"
            and each.artifact.evidence[0].created <= made
        ]
        if not found:
            raise UsageError(
                f"{subject.side.reference}: no earlier version of {subject.report.name} in {home} passed its gates",
                hint="name one with --against ARTIFACT; for a first release: --against none",
            )
        opened = found[0]
    verdict.recompute(opened)
    if not needed:
        notes.append("no gate limits a change against the earlier artifact: add `rise_max` or `drop_max`")
    return release.Subject.of(opened)


_NO_TAIL = "both run in turns, where medians alone can be compared: hold a tail to a `max`"


def _in_turns(ours: Subject, theirs: Subject, specs: dict[str, GateSpec]) -> dict[str, Figure | str]:
    """Time both artifacts in turns, where a gate limits how durations change; else say why that cannot be done."""
    from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError
    from llmforge.metrics import catalog
    from llmforge.metrics.catalog import SlowestMetric

    wanted = [
        name
        for name, spec in specs.items()
        if isinstance(catalog.deciding()[name], SlowestMetric) and "rise_max" in spec.limits
    ]
    if not wanted:
        return {}
    if (lack := extras.trouble(extras.RUNTIME)) is not None:
        return dict.fromkeys(wanted, f"both must run in turns, and {lack.message}")
    latency = ours.report.latency
    if latency is None or ours.report.engine.pending or theirs.report.engine.pending:
        return dict.fromkeys(wanted, "both must run in turns, and an engine is not built yet or was never timed")
    from llmforge import runtime
    from llmforge.evaluation import turns
    from llmforge.evaluation.latency import Load
    from llmforge.evaluation.latency import Subject as Timed

    try:
        runners = []
        for side in (ours, theirs):
            side.opened.verify()
            runners.append(runtime.load(side.opened.path, threads=latency.threads))
    except (EnvironmentLacks, UnsupportedError, InputError) as error:
        return dict.fromkeys(wanted, f"both must run in turns on one device: {error.message}")
    left, right = (
        Timed.of_runner(runner, description=str(side.opened.path), load_seconds=0.0)
        for runner, side in zip(runners, (ours, theirs), strict=True)
    )
    repetitions = max(turns.REPETITIONS, latency.repetitions)
    loads = [Load(p.batch, p.prompt_tokens, p.output_tokens, repetitions) for p in latency.single]
    found = turns.differences(left, right, loads, vocabulary=min(runner.config.vocabulary for runner in runners))
    return {**dict.fromkeys(wanted, _NO_TAIL), **{name: found[name] for name in wanted if name in found}}


_VALIDATE = """\b
Examples:
  llmforge validate NAME/VERSION --recipe RECIPE
"""


@click.command(epilog=_VALIDATE)
@click.argument("artifact", type=ARTIFACT)
@click.option("--recipe", type=PATH, required=True, help="The recipe that ARTIFACT was built by.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a summary.")
@click.option("--quiet", is_flag=True, help="Hide progress.")
def validate(artifact: Path, recipe: Path, as_json: bool, quiet: bool) -> None:
    """Measure ARTIFACT again, on this machine, and add the evidence to it.

    Content and version stay. Its verdict is then that of the newest record which decided its gates.
    """
    process.prepare()
    extras.require("build")
    from llmforge.build import validating
    from llmforge.cli import console
    from llmforge.evaluation.gates import Verdict
    from llmforge.recipe import Recipe

    loaded = Recipe.load(recipe)
    with console.traced("validate", quiet=quiet, trace=None) as progress:
        result = validating.validate(artifact, loaded, progress)
    if as_json:
        output.write_json({"artifact": str(result.path), "report": json.loads(result.report.to_json())})
    else:
        output.write_summary(result.report, result.previous)
        click.echo(str(result.path))
    undecided = [each.explanation for each in result.report.gates if each.verdict is result.report.verdict]
    if result.report.verdict is Verdict.FAIL:
        raise GateFailed("\n".join(["a gate failed", *undecided]))
    if result.report.verdict is Verdict.INCONCLUSIVE:
        raise GateInconclusive("\n".join(["a gate is inconclusive", *undecided]))


_HTML = click.option("--html", type=PATH, metavar="FILE.html", help="Write a page with everything in one file.")
_DIFF = """\b
Examples:
  llmforge diff NAME:prod NAME/VERSION
  llmforge diff NAME:prod NAME/VERSION --html diff.html
"""


@click.command(epilog=_DIFF)
@click.argument("a", type=ARTIFACT)
@click.argument("b", type=ARTIFACT)
@_HTML
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def diff(a: Path, b: Path, html: Path | None, as_json: bool) -> None:
    """Compare the artifacts A and B: recipe, graph, size, and every metric with its interval.

    Differences are B less A; those of quality are of the same documents, one by one.
    """
    from llmforge.artifact import Artifact
    from llmforge.report import comparing

    if html is not None:
        output.check_file(html)
    found = comparing.compare(Artifact.open(a), Artifact.open(b))
    graph = _graphs(a, b)
    if html is not None:
        from llmforge.report import render

        with output.writing(html):
            html.write_text(render.diff_page(found, graph), encoding="utf-8")
    if as_json:
        output.write_json({**json.loads(found.to_json()), "graph": graph})
        return
    click.echo("\n".join([*comparing.text(found), *(f"graph: {line}" for line in graph)]))


def _graphs(a: Path, b: Path) -> list[str]:
    """Compare the engines' graphs, where both are ONNX and what reads it is here."""
    files = [path / "engine" / "model.onnx" for path in (a, b)]
    if not all(file.is_file() for file in files):
        return ["not compared: an engine is no ONNX graph"]
    if (lack := extras.trouble("onnx_ir")) is not None:
        return [f"not compared: {lack.message} ({lack.hint})"]
    from llmforge.ir import diff as graphs
    from llmforge.ir import onnx_file

    return graphs.text(graphs.diff(onnx_file.load(files[0]), onnx_file.load(files[1])))


_HISTORY = """\b
Examples:
  llmforge history NAME
  llmforge history NAME --metric kld_mean --json
  llmforge history NAME --html history.html
"""


@click.command(epilog=_HISTORY)
@click.argument("name")
@click.option(
    "--metric", "metrics", multiple=True, metavar="METRIC", help="Show this metric; repeatable. Default: all."
)
@out_option("Folder of the artifacts.")
@_HTML
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def history(name: str, metrics: tuple[str, ...], out: Path, html: Path | None, as_json: bool) -> None:
    """Show each metric of NAME by version, oldest first, and mark regressions.

    A regression is a change for the worse, against the version before, whose 95 % interval does not include 0.
    """
    from llmforge.artifact import versions
    from llmforge.cli import console
    from llmforge.metrics import catalog
    from llmforge.report import comparing

    if html is not None:
        output.check_file(html)
    known = catalog.deciding()
    if unknown := [metric for metric in metrics if metric not in known]:
        raise UsageError(f"no such metric: {', '.join(unknown)}; known: {', '.join(known)}")
    found = versions.listed(out, name)
    for each in found:
        if each.damage is not None:
            console.say(f"warning: {each.reference} is left out: {each.damage}")
    whole = sorted(
        (each.artifact for each in found if each.artifact is not None), key=lambda each: each.evidence[0].created
    )
    entries = comparing.history(whole, metrics or tuple(known))
    if html is not None:
        from llmforge.report import render

        with output.writing(html):
            html.write_text(render.history_page(name, entries), encoding="utf-8")
    if as_json:
        output.write_json([json.loads(entry.to_json()) for entry in entries])
    elif entries:
        output.write_columns(comparing.history_rows(entries, metrics or tuple(known)))

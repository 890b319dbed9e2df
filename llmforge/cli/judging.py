"""The commands that judge releases: gate, validate, diff, history. They import late what they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process
from llmforge.base.errors import UsageError
from llmforge.cli import output, verdicts
from llmforge.cli.parameters import ARTIFACT, PATH, POSITIVE, keep_quiet, options_record, out_option, runtime_option
from llmforge.cli.recorded import recipe_of

if TYPE_CHECKING:
    from llmforge.gates.decision import Figure
    from llmforge.gates.release import Judgement, MeasuredArtifact, ReleaseQuestion
    from llmforge.measure.latency import TimedModel
    from llmforge.metrics.agreement import RuntimeName
    from llmforge.metrics.latency_metrics import SlowestMetric
    from llmforge.recipe import GateSpec

_GATE = """\b
Examples:
  llmforge gate NAME/VERSION --against NAME:prod
  llmforge gate NAME/VERSION --against latest-passed --gates release.yaml --junit gates.xml
  llmforge gate NAME/VERSION --against NAME:prod --until-decided --text more.jsonl
"""


@dataclass(frozen=True)
class GateOptions:
    """What the command `gate` is given."""

    artifact: Path
    against: str | None
    file: Path | None
    until_decided: bool
    recipe: Path | None
    texts: tuple[Path, ...]
    max_documents: int | None
    repetitions: int | None
    junit: Path | None
    markdown: Path | None
    out: Path
    as_json: bool

    def check(self) -> None:
        """Refuse options that have no meaning together, and files that cannot be written."""
        further = self.recipe is not None or self.texts or self.max_documents is not None
        if further and not self.until_decided:
            raise UsageError("--recipe, --text and --max-documents require --until-decided")
        for path in filter(None, (self.junit, self.markdown)):
            output.check_file(path)


@click.command(epilog=_GATE)
@click.argument("artifact", type=ARTIFACT)
@click.option(
    "--against", metavar="ARTIFACT",
    help="Compare with this artifact; `latest-passed`: the newest earlier version whose gates passed; `none`: "
    "leave out limits that need one, as for a first release.",
)  # fmt: skip
@click.option("--gates", "file", type=PATH, metavar="FILE.yaml", help="Limits in place of those of the recipe.")
@click.option("--until-decided", is_flag=True, help="Measure further documents until the gates are decided.")
@click.option("--recipe", type=PATH, help="With --until-decided: the recipe of ARTIFACT. Default: its own.")
@click.option(
    "--text", "texts", type=PATH, multiple=True, metavar="FILE.jsonl",
    help="With --until-decided: more documents, {text} or {messages} a line; repeatable.",
)  # fmt: skip
@click.option("--max-documents", type=POSITIVE, metavar="N", help="With --until-decided: stop at N documents.")
@click.option(
    "--repetitions", type=POSITIVE, metavar="N",
    help="Where a limit is on the change of a duration, time both artifacts N times; default: as many as such limits "
    "need, 30 or more.",
)  # fmt: skip
@click.option("--junit", type=PATH, metavar="FILE.xml", help="Write JUnit XML.")
@click.option("--markdown", type=PATH, metavar="FILE.md", help="Write Markdown, for a pull request.")
@out_option("Folder of the artifacts.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@options_record(GateOptions)
def gate(options: GateOptions) -> None:
    """Decide the gates of ARTIFACT, alone or against an earlier artifact.

    They are decided on its evidence. Nothing is built or measured again, unless a limit on latency against an earlier
    artifact is to be decided, or with --until-decided. The exit code tells the verdict.
    """
    from llmforge.artifact import Artifact
    from llmforge.gates import release
    from llmforge.report import release_text

    options.check()
    opened = Artifact.open(options.artifact)
    asked = _question(release.MeasuredArtifact.checked(opened), options)
    judged = _decided(asked, options) if options.until_decided else release.judge(asked)
    if options.junit is not None:
        with output.writing(options.junit):
            options.junit.write_text(release_text.junit(judged), encoding="utf-8")
    if options.markdown is not None:
        with output.writing(options.markdown):
            options.markdown.write_text(release_text.markdown(judged), encoding="utf-8")
    if options.as_json:
        output.write_data(judged.to_json())
    else:
        output.write_lines(*release_text.text(judged))
    _end(judged, asked.release)


def _question(subject: MeasuredArtifact, options: GateOptions) -> ReleaseQuestion:
    """Find limits and the earlier artifact; time both in turns, where a limit needs that."""
    from llmforge.gates import earlier, release
    from llmforge.recipe import GatesFile

    file, out = options.file, options.out
    given = None if file is None else GatesFile.load(file)
    specs = subject.sealed_limits if given is None else dict(given.gates)
    source = f"the recipe of {subject.side.reference}" if file is None else str(file)
    release.check(specs, source, hint="give limits with --gates FILE.yaml")
    named = options.against or (given.baseline if given else None)
    against, notes = earlier.find(subject, specs, named, out)
    if options.repetitions is not None and (against is None or not _of_turns(specs)):
        raise UsageError("--repetitions requires a `rise_max` of a duration, and an artifact to hold it against")
    turns: Mapping[str, Figure | str] = {}
    if against is not None:
        turns = _in_turns(subject, against, specs, options.repetitions, quiet=options.as_json)
    return release.ReleaseQuestion(subject, specs, against, turns, notes)


def _decided(asked: ReleaseQuestion, options: GateOptions) -> Judgement:
    """Measure further documents until the gates are decided."""
    extras.require("build")
    from llmforge.cli import console
    from llmforge.compile import validating

    process.prepare()
    with console.traced("gate", quiet=options.as_json, trace=None) as progress:
        recipe = recipe_of(options.artifact, options.recipe)
        return validating.decide(asked, recipe, options.texts, most=options.max_documents, progress=progress)


def _end(judged: Judgement, subject: MeasuredArtifact) -> None:
    """Raise what gives the exit code of a verdict; say what would decide it."""
    from llmforge.gates.decision import Verdict
    from llmforge.gates.release import NO_PAIRS
    from llmforge.report import release_text

    undecided = [each for each in judged.gates if each.verdict is Verdict.INCONCLUSIVE]
    samples = {each.measured.of for each in undecided if each.measured}
    ways = []
    if "repetitions" in samples:
        ways.append("time both more often: llmforge gate --repetitions N")
    if "documents" in samples or any(NO_PAIRS in each.explanation for each in undecided):
        ways.append("measure more documents: llmforge gate --until-decided --text MORE.jsonl")
    failed = "other limits: llmforge gate --gates FILE.yaml"
    if subject.report.quality is not None:  # encoders have none: their layers are not told apart
        failed += "; what it lost, and where: llmforge bisect ARTIFACT"
    verdicts.end(
        judged.verdict, [release_text.headline(judged)], artifact=subject.opened.path, pending=judged.pending,
        failed=failed, undecided="; ".join(ways) or None,
    )  # fmt: skip


def _of_turns(specs: Mapping[str, GateSpec]) -> list[SlowestMetric]:
    """List the durations whose change `specs` limit."""
    from llmforge.metrics import catalog
    from llmforge.metrics.latency_metrics import SlowestMetric

    known = catalog.named
    limited = (known(name) for name, spec in specs.items() if "rise_max" in spec.limits)
    return [metric for metric in limited if isinstance(metric, SlowestMetric)]


def _in_turns(
    ours: MeasuredArtifact,
    theirs: MeasuredArtifact,
    specs: dict[str, GateSpec],
    repetitions: int | None,
    *,
    quiet: bool,
) -> dict[str, Figure | str]:
    """Time both artifacts in turns, where a gate limits how durations change; else say why that cannot be done."""
    from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError

    wanted = _of_turns(specs)
    names = [metric.name for metric in wanted]
    if not wanted:
        return {}
    if (lack := extras.trouble(extras.RUNTIME)) is not None:
        return dict.fromkeys(names, f"both must run in turns, and {lack.message}")
    latency = ours.report.latency
    if latency is None or ours.report.engine.pending or theirs.report.engine.pending:
        return dict.fromkeys(names, "both must run in turns, and an engine is not built yet or was never timed")
    if theirs.report.latency is not None and theirs.report.latency.encodes != latency.encodes:
        return dict.fromkeys(names, "both must run in turns, and one of them encodes texts")
    from llmforge.cli import console
    from llmforge.measure import turns
    from llmforge.measure.latency import TimedLoad

    with console.traced("gate", quiet=quiet, trace=None) as progress:
        progress.stage("Load both engines")
        try:
            (left, known), (right, others) = (_timed(side, latency.threads) for side in (ours, theirs))
        except (EnvironmentLacks, UnsupportedError, InputError) as error:
            return dict.fromkeys(names, f"both must run in turns on one device: {error.message}")
        count = repetitions or max(turns.repetitions(wanted), latency.repetitions)
        loads = [TimedLoad(p.batch, p.prompt_tokens, p.output_tokens, count) for p in latency.single]
        progress.stage("Time both in turns")
        found = turns.differences(
            left,
            right,
            loads,
            vocabulary=min(known, others),
            progress=progress.advance,
        )
    absent = f"both {'encode texts' if latency.encodes else 'generate tokens'}, and have no such duration"
    return {name: found.get(name, absent) for name in names}


def _timed(side: MeasuredArtifact, threads: int) -> tuple[TimedModel, int]:
    """Load an engine to be timed, and say how many token ids it knows."""
    from llmforge import serving
    from llmforge.measure.latency import TimedModel
    from llmforge.serving.encoder_runner import encodes, load_encoder

    side.opened.verify()
    path, described = side.opened.path, str(side.opened.path)
    if encodes(path):
        encoder = load_encoder(path, threads)
        return TimedModel.of_encoder(encoder, description=described, load_seconds=0.0), encoder.vocabulary
    runner = serving.load(path, threads=threads)
    return TimedModel.of_runner(runner, description=described, load_seconds=0.0), runner.config.vocabulary


_VALIDATE = """\b
Examples:
  llmforge validate NAME/VERSION
  llmforge validate NAME/VERSION --runtime onnxruntime-genai=ENV/bin/python
"""


@click.command(epilog=_VALIDATE)
@click.argument("artifact", type=ARTIFACT)
@click.option("--recipe", type=PATH, help="The recipe that ARTIFACT was built by. Default: its own, which it has.")
@runtime_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a summary.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
def validate(
    artifact: Path, recipe: Path | None, runtimes: tuple[tuple[RuntimeName, Path], ...], as_json: bool, quiet: bool
) -> None:
    """Measure ARTIFACT again, on this machine, and add the evidence to it.

    Content and version stay. Its verdict is then that of the newest record which decided its gates. With --runtime, it
    is also run in another runtime, and held against our own run.
    """
    process.prepare()
    extras.require("build")
    from llmforge.cli import console
    from llmforge.compile import validating
    from llmforge.planning import request

    loaded = recipe_of(artifact, recipe)
    expected = request.expected_stages(loaded)
    with console.traced("validate", quiet=quiet, trace=None, expected=expected) as progress:
        result = validating.validate(artifact, loaded, progress, pythons=dict(runtimes))
    if as_json:
        output.write_json({"artifact": str(result.path), "report": json.loads(result.report.to_json())})
    else:
        output.write_summary(result.report, result.previous)
        output.write_lines(str(result.path))
    verdicts.end_of(result.report, result.path)


_HTML = click.option("--html", type=PATH, metavar="FILE.html", help="Write a page with everything in one file.")
_DIFF = """\b
Examples:
  llmforge diff NAME:prod NAME/VERSION
  llmforge diff NAME:prod NAME/VERSION --html diff.html
"""


@click.command(epilog=_DIFF)
@click.argument("a", type=ARTIFACT)
@click.argument("b", type=ARTIFACT)
@click.option("--all", "every", is_flag=True, help="Write every difference of recipes and graphs, one by one.")
@_HTML
@click.option("--json", "as_json", is_flag=True, help="Write JSON, which has every difference.")
def diff(a: Path, b: Path, every: bool, html: Path | None, as_json: bool) -> None:
    """Compare the artifacts A and B, metric by metric with intervals.

    Size, recipe and graph follow. Differences are B less A; those of quality are of the same documents, one by one. Of
    graphs, inputs and outputs that differ alike in every layer are one line, and nodes and weights are counted; --all
    writes each.
    """
    from llmforge.gates import comparison, confirmed
    from llmforge.report import comparison_text

    if html is not None:
        output.check_file(html)
    found = comparison.compare(confirmed.open_artifact(a), confirmed.open_artifact(b))
    graph = _graphs(a, b, brief=not (as_json or every))
    if html is not None:
        from llmforge.report import render

        with output.writing(html):
            html.write_text(render.diff_page(found, graph), encoding="utf-8")
    if as_json:
        output.write_json({**json.loads(found.to_json()), "graph": graph})
        return
    output.write_lines(*comparison_text.text(found, every=every), *(f"graph: {line}" for line in graph))


def _graphs(a: Path, b: Path, *, brief: bool) -> list[str]:
    """Compare the engines' graphs, where both are ONNX and what reads it is here; `brief`: count nodes and weights."""
    files = [path / "engine" / "model.onnx" for path in (a, b)]
    if not all(file.is_file() for file in files):
        return ["not compared: an engine is no ONNX graph"]
    if (lack := extras.trouble("onnx_ir")) is not None:
        return [f"not compared: {lack.message} ({lack.hint})"]
    from llmforge.ir import diff, onnx_file

    found = diff.diff(onnx_file.load(files[0]), onnx_file.load(files[1]))
    if not brief:
        return diff.text(found)
    return [*diff.summary(found), *(["one by one: --all"] if found else [])]


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

    A regression is a change for the worse, against the version before, whose 95% interval does not include 0.
    """
    from llmforge.artifact import versions
    from llmforge.cli import console
    from llmforge.gates import comparison, confirmed, release
    from llmforge.metrics import catalog
    from llmforge.report import comparison_text

    if html is not None:
        output.check_file(html)
    if unknown := [metric for metric in metrics if catalog.find(metric) is None]:
        known = ", ".join(catalog.deciding())
        raise UsageError(f"no such metric: {', '.join(unknown)}; known: {known}, task.NAME.SCORE")
    found = versions.listed(out, name)
    whole = []
    for each in found:
        if (damage := confirmed.damage(each)) is not None:
            console.say(f"warning: {each.reference} is left out: {damage.message}", always=True)
        elif each.artifact is not None:
            whole.append(each.artifact)
    whole.sort(key=lambda each: each.evidence[0].created)
    shown = metrics or catalog.names(*(release.MeasuredArtifact.of(each).measured for each in whole))
    entries = comparison.history(whole, shown)
    if html is not None:
        from llmforge.report import render

        with output.writing(html):
            html.write_text(render.history_page(name, entries), encoding="utf-8")
    if as_json:
        output.write_json([json.loads(entry.to_json()) for entry in entries])
    elif entries:
        output.write_columns(comparison_text.history_rows(entries, shown))

"""The command `judge`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process
from llmforge.base.errors import UsageError
from llmforge.base.http_server import HttpServer, ServerOptions
from llmforge.cli import output, verdicts
from llmforge.cli.parameters import (
    NATURAL,
    PATH,
    POSITIVE,
    api_key_option,
    keep_quiet,
    options_record,
    out_option,
    require_given,
)

if TYPE_CHECKING:
    from llmforge.artifact import Artifact
    from llmforge.checkpoint import Checkpoint
    from llmforge.compile.endpoints import EndpointQuestion, ServedModel
    from llmforge.gates.endpoint import EndpointJudgement
    from llmforge.recipe import BehaviourSpec

_OF_REFERENCE = ServerOptions("--reference-key", "LLMFORGE_REFERENCE_KEY", "--reference-model")

_EXAMPLES = """\b
Examples:
  llmforge judge --url http://127.0.0.1:8000 --reference CHECKPOINT --data text.jsonl
  llmforge judge --url http://127.0.0.1:8000 --reference NAME:prod --data text.jsonl --gates gates.yaml -o judged
  llmforge judge --url http://new:8000 --reference http://old:8000 --tokenizer CHECKPOINT --data text.jsonl
  llmforge judge --url http://new:8000 --reference NAME:prod --data text.jsonl --behaviour default --gates gates.yaml
  llmforge judge --verify judged
"""


@dataclass(frozen=True)
class JudgeOptions:
    """What the command `judge` is given."""

    url: str | None
    model: str | None
    api_key: str | None
    reference: str | None
    reference_model: str | None
    reference_key: str | None
    tokenizer: str | None
    data: Path | None
    gates: Path | None
    context: int
    tokens: int
    top: int | None
    one_by_one: bool
    spread: float | None
    answers: int
    answer_tokens: int
    behaviour: str | None
    of_each_slice: int | None
    threads: int | None
    folder: Path | None
    verified: Path | None
    out: Path
    as_json: bool
    quiet: bool


@click.command(epilog=_EXAMPLES)
@click.option("--url", metavar="URL", help="The OpenAI-compatible endpoint that is judged.")
@click.option("--model", metavar="NAME", help="Its model. Default: the first that it serves.")
@api_key_option
@click.option(
    "--reference", metavar="CHECKPOINT|ARTIFACT|URL",
    help="What it is held against. Without it: perplexity, answers and times alone.",
)  # fmt: skip
@click.option("--reference-model", metavar="NAME", help="With a URL as --reference: its model.")
@click.option(
    "--reference-key", metavar="KEY", envvar=_OF_REFERENCE.variable, show_envvar=True,
    help="With a URL as --reference: its key.",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="CHECKPOINT|ARTIFACT",
    help="Whose tokenizer both endpoints have. Default: that of --reference.",
)  # fmt: skip
@click.option("--data", type=PATH, metavar="FILE.jsonl", help="Documents, {text} or {messages} a line.")
@click.option("--gates", type=PATH, metavar="FILE.yaml", help="Limits that decide the verdict.")
@click.option("--context", type=click.IntRange(min=4), default=128, metavar="N", help="Longest window, in tokens.")
@click.option("--max-tokens", "tokens", type=POSITIVE, default=4096, metavar="N", help="Tokens to measure, in all.")
@click.option(
    "--top", type=POSITIVE, metavar="N", help="Log-probabilities a place. Default: as many as the server gives."
)
@click.option(
    "--one-by-one", is_flag=True,
    help="Ask for each token by itself, so that KLD is estimated without bias where a server truncates.",
)  # fmt: skip
@click.option(
    "--spread", type=click.FloatRange(min=0), metavar="NATS",
    help="No token is so much less likely than the likeliest one; upper bounds assume it. Default: 100.",
)  # fmt: skip
@click.option("--answers", type=NATURAL, default=16, metavar="N", help="Greedy answers to compare and time.")
@click.option("--answer-tokens", type=POSITIVE, default=64, metavar="N", help="Tokens of an answer at most.")
@click.option(
    "--behaviour", metavar="FILE.jsonl|default|long",
    help="Chats that both answer through their chat APIs: calls, JSON, refusals, languages, loops (docs/behaviour.md).",
)  # fmt: skip
@click.option("--of-each-slice", type=POSITIVE, metavar="N", help="With --behaviour: the first N chats of each slice.")
@click.option("--threads", type=POSITIVE, metavar="N", help="Threads of the reference. Default: all physical cores.")
@click.option(
    "-o", "--output", "folder", type=PATH, metavar="DIR",
    help="Folder for the sealed record (behind those that it has), report.html and junit.xml.",
)  # fmt: skip
@click.option(
    "--verify", "verified", type=PATH, metavar="DIR",
    help="Make the figures and verdicts in DIR again from what was measured, and end as the newest did.",
)  # fmt: skip
@out_option("Folder of the artifacts.")
@click.option("--json", "as_json", is_flag=True, help="Write the record as JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@options_record(JudgeOptions)
def judge(options: JudgeOptions) -> None:
    """Judge a served model, whoever made and serves it, against a checkpoint, an artifact or another server.

    KLD and top-1 agreement come from the server's log-probabilities: exact where it gives all, between two bounds where
    it gives some. Answers and times are measured beside. The exit code tells the verdict.
    """
    from llmforge.gates import endpoint
    from llmforge.report import endpoint_text

    made = endpoint.read(options.verified)[-1] if options.verified is not None else _judged(options)
    if options.verified is None and options.folder is not None:
        with output.writing(options.folder):
            _, made = endpoint.seal(options.folder, made)
            (options.folder / "report.html").write_text(endpoint_text.page(made), encoding="utf-8")
            (options.folder / "junit.xml").write_text(endpoint_text.junit(made), encoding="utf-8")
    if options.as_json:
        output.write_data(made.to_json())
    else:
        output.write_lines(*endpoint_text.text(made))
    _end(made, options)


def _judged(options: JudgeOptions) -> EndpointJudgement:
    process.prepare()
    from llmforge.cli import console
    from llmforge.compile import endpoints

    asked = _question(options)
    with console.traced("judge", quiet=options.quiet, trace=None) as progress:
        return endpoints.judge(asked, progress)


def _question(options: JudgeOptions) -> EndpointQuestion:
    if options.url is None or options.data is None:
        raise UsageError("judge requires --url and --data", hint="llmforge help judge")
    from llmforge.compile.endpoints import EndpointQuestion, ServedModel
    from llmforge.gates import endpoint
    from llmforge.metrics.truncation import SPREAD
    from llmforge.recipe import GatesFile
    from llmforge.runtime.config import physical_cores

    given = None if options.gates is None else GatesFile.load(options.gates)
    if given is not None and given.baseline is not None:
        raise UsageError(f"{options.gates}: `baseline` names an artifact", hint="give it with --reference")
    limits = {} if given is None else dict(given.gates)
    endpoint.check(limits, str(options.gates))
    reference = _reference(options)
    if limits and reference is None:
        raise UsageError("--gates requires --reference", hint="name what the endpoint is held against")
    tokenizer = reference if options.tokenizer is None else _folder(options.tokenizer, options.out)
    if tokenizer is None or isinstance(tokenizer, ServedModel):
        raise UsageError("no tokenizer is known", hint="name a checkpoint or an artifact that has it with --tokenizer")
    return EndpointQuestion(
        served=ServedModel(HttpServer(options.url, options.api_key), options.model),
        reference=reference,
        tokenizer=tokenizer,
        data=options.data,
        limits=limits,
        context=options.context,
        tokens=options.tokens,
        top=options.top,
        one_by_one=options.one_by_one,
        spread=SPREAD if options.spread is None else options.spread,
        answers=options.answers,
        answer_tokens=options.answer_tokens,
        behaviour=_chats(options),
        threads=options.threads or physical_cores(),
    )


def _chats(options: JudgeOptions) -> BehaviourSpec | None:
    from llmforge.recipe import BehaviourSpec

    if options.behaviour is None:
        if options.of_each_slice is not None:
            raise UsageError("--of-each-slice requires --behaviour")
        return None
    named = {"data": options.behaviour, "of_each_slice": options.of_each_slice}
    try:
        return BehaviourSpec.model_validate(named, context=Path.cwd())
    except ValueError as error:
        raise UsageError(f"--behaviour: {error}") from error


def _reference(options: JudgeOptions) -> ServedModel | Checkpoint | Artifact | None:
    from llmforge.compile.endpoints import ServedModel

    if options.reference is None or "://" not in options.reference:
        require_given("a URL as --reference", "reference_model", "reference_key")
        return None if options.reference is None else _folder(options.reference, options.out)
    return ServedModel(HttpServer(options.reference, options.reference_key, _OF_REFERENCE), options.reference_model)


def _folder(named: str, out: Path) -> Checkpoint | Artifact:
    """Open an artifact, by its path or name, or a checkpoint."""
    from llmforge.artifact import references
    from llmforge.artifact.sealed import MANIFEST
    from llmforge.base import folders
    from llmforge.gates import confirmed

    found = references.resolve(named, folders.artifacts(out))
    if (found / MANIFEST).is_file():
        extras.require("cpu")
        return confirmed.open_artifact(found)
    extras.require("build")
    from llmforge.checkpoint import Checkpoint

    return Checkpoint.open(found)


def _end(made: EndpointJudgement, options: JudgeOptions) -> None:
    """Raise what gives the exit code of a verdict; say what would decide it."""
    from llmforge.gates.endpoint import headline

    undecided = (
        "measure more documents: --max-tokens N; see more of each place: --one-by-one, or a server that gives all"
    )
    verdicts.end(
        made.verdict, [headline(made)], artifact=options.folder or Path(), pending=False,
        failed="other limits: --gates FILE", undecided=undecided,
    )  # fmt: skip

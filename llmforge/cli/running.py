"""The command `run`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base.errors import UsageError
from llmforge.cli import output
from llmforge.cli.parameters import PATH, POSITIVE

if TYPE_CHECKING:
    from llmforge.runtime.sampling.constraints import Constraint


@click.command()
@click.argument("artifact", type=PATH)
@click.argument("prompt")
@click.option("--max-tokens", type=POSITIVE, default=256, help="End after N tokens.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this mass.")
@click.option("--top-k", type=int, default=0, help="Keep the K likeliest tokens; 0 keeps all.")
@click.option("--min-p", type=float, default=0.0, help="Drop what is less likely than P times the best.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less.")
@click.option("--presence-penalty", type=float, default=0.0, help="Above 0: repeat less.")
@click.option("--frequency-penalty", type=float, default=0.0, help="Above 0: repeat seldom.")
@click.option("--seed", type=int, default=0, help="Seed of sampling.")
@click.option("--stop", multiple=True, help="End before this text; may be given again.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: log probabilities, also of the N likeliest.")
@click.option("--json-schema", type=PATH, metavar="FILE.json", help="Answer with such JSON.")
@click.option("--regex", help="Answer with a text that matches all of it.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template, as the user's turn.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object at the end instead of a stream.")
def run(
    artifact: Path, prompt: str, json_schema: Path | None, regex: str | None, chat: bool, as_json: bool, **options: Any
) -> None:
    """Generate from ARTIFACT, as it will be served. PROMPT `-` reads standard input."""
    from llmforge import runtime
    from llmforge.artifact import Artifact

    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs are shown with --json alone")
    # What is left of the options are fields of `Sampling`, by name.
    sampling = runtime.Sampling(**options, constraint=_constraint(json_schema, regex))
    text = _stdin() if prompt == "-" else prompt
    runner = runtime.load(Artifact.open(artifact).path)  # tells more than the runtime what is wrong with a folder
    chunks = []
    for chunk in runner.generate(runner.encode_chat([{"role": "user", "content": text}]) if chat else text, sampling):
        chunks.append(chunk)
        if not as_json:
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()
    if not as_json:
        click.echo()
        return
    last = chunks[-1]
    logprobs = [vars(chunk.logprob) for chunk in chunks if chunk.logprob is not None]
    output.write_json(
        {
            "text": "".join(chunk.text for chunk in chunks),
            "token_ids": [chunk.token_id for chunk in chunks if chunk.token_id is not None],
            "finish_reason": last.finish_reason,
            "usage": vars(last.usage),
            **({"logprobs": logprobs} if sampling.logprobs is not None else {}),
        }
    )


def _constraint(json_schema: Path | None, regex: str | None) -> Constraint | None:
    from llmforge.runtime.sampling.constraints import Constraint

    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex: an answer has one form")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    try:
        schema = json.loads(json_schema.read_bytes())
    except OSError as error:
        raise UsageError(f"{json_schema}: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise UsageError(f"{json_schema}: not a JSON file: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"{json_schema}: {type(schema).__name__}; wanted a JSON schema, which is an object")
    return Constraint.json_schema(schema)


def _stdin() -> str:
    """Read the prompt from standard input, less one newline at its end."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: byte {error.start} is not UTF-8") from error

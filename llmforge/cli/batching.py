"""The command `batch`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llmforge.base import extras, process
from llmforge.base.errors import UsageError
from llmforge.cli import output
from llmforge.cli.parameters import (
    ARTIFACT,
    PATH,
    chat_template_option,
    keep_quiet,
    record,
    tool_prompt_option,
)
from llmforge.cli.provenance import admit, loading_options
from llmforge.cli.serving import engine_options

_WAITING = 4096  # requests that may wait in the engine: all choices of some calls, of at most 128 each

_BATCH = """\b
Examples:
  llmforge batch artifacts/NAME/VERSION requests.jsonl -o answers.jsonl
  llmforge batch artifacts/NAME/VERSION requests.jsonl -o answers.jsonl --name gpt-4o-mini
A line of requests.jsonl:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
"""


@click.command(epilog=_BATCH)
@click.argument("artifact", type=ARTIFACT)
@click.argument("requests", type=PATH, metavar="REQUESTS.jsonl")
@click.option("-o", "--output", "path", type=PATH, required=True, metavar="ANSWERS.jsonl", help="File to write.")
@click.option("--name", help="Model name in requests. Defaults to the name of ARTIFACT.")
@chat_template_option
@tool_prompt_option
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@loading_options
def batch(artifact: Path, requests: Path, path: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Answers are those of `serve`, in the order of the requests; a request that is refused has its status and error.
    Until all are there they are in ANSWERS.jsonl.partial: the same command goes on behind what a kill left.
    """
    extras.require("serve")
    process.share_heaps()
    from llmforge.artifact import Artifact
    from llmforge.cli import console
    from llmforge.serving import EngineOptions, EngineProcess
    from llmforge.serving.http import batch as batches
    from llmforge.serving.prompts import PromptEncoder
    from llmforge.serving.protocol.tool_prompt import chosen

    options = record(_BatchOptions, given)
    output.check_file(path)
    if path.exists():
        raise UsageError(f"{path}: it is there already", hint="remove it, or write to another file")
    opened = Artifact.open(artifact)
    admit(opened, options.allow, options.rehash)
    model = options.name or opened.manifest.name
    template = chosen(opened.path / "tokenizer", options.chat_template, tool_prompt=options.tool_prompt)
    served = record(EngineOptions, given, max_queue=_WAITING)
    with console.progress(quiet=quiet) as progress:
        progress.stage("Read requests")
        asked = batches.read(requests, PromptEncoder.read(opened.path, template))
        of = {
            "requests": batches.digest_of(requests),
            "artifact": opened.manifest.content_digest,
            "template": hashlib.sha256((template.source if template else "").encode()).hexdigest(),
            "model": model,
        }
        partial = path.with_name(f"{path.name}.partial")
        progress.stage("Load engine")
        with (
            EngineProcess(opened.path, served, options.threads, template=template) as engine,
            output.writing(partial),
            batches.Journal.opened(partial, of) as journal,
        ):
            if len(journal) and not quiet:
                console.say(f"note: {len(journal):,} of {len(asked):,} answers are in {output.here(partial)}")
            progress.stage("Answer requests")
            counts = batches.answer_all(engine, model, asked, journal, progress.advance)
            journal.finish(path, asked)
    if as_json:
        facts = {"requests": counts.total, "completed": counts.completed, "failed": counts.failed}
        output.write_json({"output": str(path), **facts})
    else:
        failed = f", {counts.failed:,} refused or failed (see status_code)" if counts.failed else ""
        output.write_lines(f"{path}: {counts.completed:,} of {counts.total:,} requests answered{failed}")


@dataclass(frozen=True)
class _BatchOptions:
    """Options of `batch`, besides those of its engine."""

    name: str | None
    chat_template: Path | None
    tool_prompt: bool
    threads: int | None
    allow: str | None
    rehash: bool

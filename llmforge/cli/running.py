"""The command `run`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base import small_file
from llmforge.base.errors import UsageError
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, PATH, POSITIVE, chat_template_option, record, require_given
from llmforge.cli.provenance import admit, loading_options, signature_options

if TYPE_CHECKING:
    from llmforge.runtime.sampling.constraints import Constraint
    from llmforge.serving import Chunk, Runner, Sampling
    from llmforge.serving.conversation import Conversation


_SCHEMA_BYTES = 1 << 20
_TOKENS, _CHAT_TOKENS = 256, 1024

_EXAMPLES = """\b
Examples:
  llmforge run artifacts/NAME/VERSION "If the file does not exist,"
  llmforge run artifacts/NAME/VERSION --chat    # a conversation
  echo "What is a KV cache?" | llmforge run artifacts/NAME/VERSION - --chat
"""


@click.command(epilog=_EXAMPLES)
@click.argument("artifact", type=ARTIFACT)
@click.argument("prompt", required=False)
@click.option(
    "--max-tokens", type=POSITIVE, metavar="N",
    help=f"Generate at most N tokens. Defaults to {_TOKENS}, for each answer of a conversation to {_CHAT_TOKENS}.",
)  # fmt: skip
@click.option("--temperature", type=float, metavar="T", default=0.0, help="Sampling temperature; 0 is greedy.")
@click.option(
    "--top-p", type=float, metavar="P", default=1.0, help="Sample from the most likely tokens with total probability P."
)
@click.option("--top-k", type=int, metavar="K", default=0, help="Sample from the K most likely tokens; 0 for all.")
@click.option(
    "--min-p", type=float, metavar="P", default=0.0, help="Drop tokens less likely than P times the most likely one."
)
@click.option(
    "--repetition-penalty", type=float, metavar="X", default=1.0, help="Above 1, penalize tokens of prompt and answer."
)
@click.option("--presence-penalty", type=float, metavar="X", default=0.0, help="Above 0, penalize generated tokens.")
@click.option(
    "--frequency-penalty", type=float, metavar="X", default=0.0, help="Above 0, penalize generated tokens by count."
)
@click.option("--seed", type=int, metavar="N", default=0, help="Random seed.")
@click.option("--stop", multiple=True, help="Stop before TEXT; repeatable.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: also print log probabilities, with those of the N most likely tokens.",
)
@click.option("--json-schema", type=PATH, metavar="FILE.json", help="Constrain the answer to a JSON schema.")
@click.option("--regex", metavar="PATTERN", help="Constrain the answer to a regular expression.")
@click.option("--adapter", metavar="NAME", default="", help="Use an adapter that the artifact keeps apart.")
@click.option(
    "--chat", is_flag=True,
    help="Apply the chat template, with PROMPT as the user's message. Without PROMPT: a conversation, a line for each "
    "message; /help lists its commands.",
)  # fmt: skip
@click.option("--system", metavar="TEXT", help="With --chat: the system prompt.")
@chat_template_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming.")
@loading_options
@signature_options
def run(artifact: Path, prompt: str | None, adapter: str, chat: bool, as_json: bool, **options: Any) -> None:
    """Generate text with ARTIFACT.

    Uses the same engine as `serve`. Pass `-` as PROMPT to read it from standard input. With --chat and no PROMPT, it is
    a conversation in the terminal, or one over the lines of standard input.
    """
    from llmforge import serving
    from llmforge.artifact import Artifact
    from llmforge.serving.conversation import Conversation
    from llmforge.serving.protocol.tool_prompt import chosen

    if not chat:
        require_given("--chat", "chat_template", "system")
    if prompt is None and not chat:
        raise UsageError("no PROMPT given", hint='llmforge run ARTIFACT "PROMPT"; `--chat` starts a conversation')
    if prompt is None and as_json:
        raise UsageError("--json requires a PROMPT", hint="add one, or leave --json out")
    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs requires --json")
    most = options.pop("max_tokens") or (_CHAT_TOKENS if prompt is None else _TOKENS)
    constraint = _constraint(options["json_schema"], options["regex"])
    sampling = record(serving.Sampling, options, constraint=constraint, max_tokens=most)
    text = _stdin() if prompt == "-" else prompt or ""
    opened = Artifact.open(artifact)  # tells more than the runtime what is wrong with a folder
    signature = {name: options[name] for name in ("require_signature", "key")}
    admit(opened, options["allow"], options["rehash"], **signature)
    template = chosen(opened.path / "tokenizer", options["chat_template"], tool_prompt=False)
    runner = serving.load(opened.path, template=template)
    if prompt is None:
        title = f"{opened.manifest.name} {opened.manifest.version}"
        _converse(opened.path, runner, title, Conversation(runner, most, options["system"]), sampling, adapter)
        return
    chunks = []
    prompted = runner.encode_chat(_messages(text, options["system"])) if chat else text
    for chunk in _generate(opened.path, runner, prompted, sampling, adapter):
        chunks.append(chunk)
        if not as_json:
            output.write_generated(chunk.text)
    if not as_json:
        output.write_lines("")
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


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _generate(
    artifact: Path, runner: Runner, prompt: str | Sequence[int], sampling: Sampling, adapter: str
) -> Iterator[Chunk]:
    """Go on from one prompt; what the artifact has of its beginning is not computed."""
    from llmforge.serving import Engine, Request
    from llmforge.serving.saved_prefixes import ShippedPrefixes

    shipped = ShippedPrefixes.read(artifact)
    if shipped.prefixes:
        prompt = runner.encode(prompt) if isinstance(prompt, str) else prompt
        shipped = shipped.of(prompt)
    if adapter or isinstance(prompt, str) or not shipped.prefixes:
        yield from runner.generate(prompt, sampling, adapter)
        return
    with Engine(runner, shipped=shipped) as engine:
        yield from engine.stream(Request(tuple(prompt), sampling))


def _converse(artifact: Path, runner: Runner, title: str, held: Conversation, sampling: Sampling, adapter: str) -> None:
    from llmforge.cli import chatting
    from llmforge.serving import Engine
    from llmforge.serving.saved_prefixes import ShippedPrefixes

    with Engine(runner, shipped=ShippedPrefixes.read(artifact)) as engine:
        chatting.converse(engine, held, sampling, adapter, title)


def _constraint(json_schema: Path | None, regex: str | None) -> Constraint | None:
    from llmforge.runtime.sampling.constraints import Constraint

    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema cannot be used with --regex")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    schema = small_file.read_json(json_schema, _SCHEMA_BYTES, error=UsageError)
    if not isinstance(schema, dict):
        raise UsageError(f"{json_schema}: {type(schema).__name__}; expected a JSON schema, an object")
    return Constraint.json_schema(schema)


def _stdin() -> str:
    """Read the prompt from standard input, less one newline at its end."""
    try:
        if sys.stdin is None:
            raise OSError(errno.EBADF, "it is closed")
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error

"""Tasks of lm-evaluation-harness on an artifact and its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import metadata

from llmforge.base import extras
from llmforge.base.errors import UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.base.plugins import Package
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.measure.baseline import Baseline, why_not_whole
from llmforge.measure.scoring import AnswerCache, CheckpointSide, EngineSide, Keep, TaskRequest, TaskSide
from llmforge.measure.served import ServedSide, connect
from llmforge.metrics.tasks import TaskResult
from llmforge.serving import Runner

EXTRA = "eval"

TaskResults = tuple[tuple[TaskResult, ...], tuple[str, ...]]  # and which scores were left out, and why


@dataclass(frozen=True)
class TaskServer:
    """An address that answers in the place of an artifact's engine."""

    at: HttpServer
    model: str | None = None


@dataclass(frozen=True)
class TaskEngine:
    """The engine of an artifact, loaded."""

    runner: Runner
    description: str
    threads: int
    content: str | None = None  # digest of the artifact; None: its answers are not kept


def run(
    asked: TaskRequest,
    engine: TaskEngine,
    checkpoint: Checkpoint,
    progress: Progress,
    *,
    cache: AnswerCache | None = None,
    server: TaskServer | None = None,
) -> TaskResults:
    """Run tasks on an engine and on its checkpoint.

    Answers of the checkpoint are kept in the `cache`, and those of the engine where its content is known. `server`
    answers in the engine's place.

    Raises:
        UsageError, DataError, UnsupportedError: see `harness.measure`.
        EnvironmentLacks, RunFailed: the extra is not here, or the server does not answer as it should.
    """
    extras.require(EXTRA)
    from llmforge.measure import harness

    tokenizer, config = engine.runner.tokenizer, engine.runner.config
    prefix = next((each for each in (config.bos_token_id, *config.eos_token_ids) if each is not None), None)
    if prefix is None:
        raise UnsupportedError("the artifact names neither a first token nor a last: nothing could stand before a text")

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    render = None if engine.runner.template is None else engine.runner.render

    def kept(side: str | None) -> Keep:
        return Keep() if cache is None or side is None else cache.of(side)

    content = engine.content
    ours: TaskSide = EngineSide(engine.runner, engine.description)
    if server is not None:
        ours, content = ServedSide(connect(server.at, server.model), config.max_context, tokenizer.decode), None
    theirs = CheckpointSide(
        partial(Baseline, checkpoint, threads=engine.threads),
        f"{checkpoint.name}, transformers {metadata.version('transformers')}, fp32 arithmetic",
        config.max_context,
        config.eos_token_ids,
        tokenizer.decode,
    )
    beside = theirs, kept(f"{checkpoint.digest} {engine.threads} {','.join(map(str, config.eos_token_ids))}")
    alone, code = why_not_whole(checkpoint), ""
    if config.plugin is not None and cache is not None:
        code = cache.code_of(Package(config.plugin.package, config.plugin.version))
    results, skipped = harness.measure(
        asked,
        harness.TaskTokens(encode, prefix, render),
        (ours, kept(content and f"{content} {engine.threads} {code}")),
        beside if alone is None else None,
        stage=progress.stage,
        advance=progress.advance,
    )
    if render is not None:
        skipped = (*skipped, "tasks: asked through the chat template")
    return results, skipped if alone is None else (*skipped, f"tasks: the checkpoint does not run: {alone}")

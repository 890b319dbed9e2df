"""Tasks of lm-evaluation-harness on an artifact and its checkpoint; what was answered is kept in the build cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from llmforge.base import extras
from llmforge.base.errors import UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.base.plugins import Package
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.compile.reuse import Reuse
from llmforge.measure.baseline import Baseline, why_not_whole
from llmforge.measure.scoring import CheckpointSide, EngineSide, Keep, Side
from llmforge.measure.served import ServedSide, connect
from llmforge.metrics.tasks import TaskResult
from llmforge.serving import Runner

EXTRA = "eval"
ANSWERS = "answers.json"
_CODE = ("llmforge.measure.scoring", "llmforge.measure.baseline", "llmforge.runtime")

Measured = tuple[tuple[TaskResult, ...], tuple[str, ...]]  # results, and what was left out


@dataclass(frozen=True)
class Kept(Keep):
    """Blocks of requests whose answers are kept in a cache: a run that was killed goes on where it was."""

    reuse: Reuse
    side: str  # digest of what answers

    def block(self, kind: str, requests: Sequence[Any], compute: Callable[[], list[Any]]) -> list[Any]:
        """Give what was answered to a block of requests, or `compute` it; JSON has no tuples, so that all are lists."""
        asked = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
        key = self.reuse.key("task-answers", _CODE, side=self.side, requests=asked, asks=kind)
        with self.reuse.cache.computing(key) as entry:
            if entry is not None:
                return list(entry.json(ANSWERS))
            found = compute()
            self.reuse.cache.put(key, partial(_write, found))
            return found


@dataclass(frozen=True)
class Server:
    """What answers in the place of an artifact's engine."""

    at: HttpServer
    model: str | None = None


def run(
    tasks: Sequence[str],
    runner: Runner,
    checkpoint: Checkpoint,
    progress: Progress,
    *,
    engine: str,
    threads: int,
    limit: int | None = None,
    few_shot: int | None = None,
    content: str | None = None,
    reuse: Reuse | None = None,
    server: Server | None = None,
) -> Measured:
    """Run tasks on `runner`, called `engine`, and on its checkpoint.

    Answers of the checkpoint are kept where there is `reuse`, and those of the engine where its `content` digest is
    known. `server` answers in the engine's place.

    Raises:
        UsageError, DataError, UnsupportedError: see `harness.measure`.
        EnvironmentLacks, RunFailed: the extra is not here, or the server does not answer as it should.
    """
    extras.require(EXTRA)
    from llmforge.measure import harness

    tokenizer, config = runner.tokenizer, runner.config
    prefix = next((each for each in (config.bos_token_id, *config.eos_token_ids) if each is not None), None)
    if prefix is None:
        raise UnsupportedError("the artifact names neither a first token nor a last: nothing could stand before a text")

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    def kept(side: str | None) -> Keep:
        return Keep() if reuse is None or side is None else Kept(reuse, side)

    ours: Side = EngineSide(runner, engine)
    if server is not None:
        ours, content = ServedSide(connect(server.at, server.model), config.max_context, tokenizer.decode), None
    theirs = CheckpointSide(
        partial(Baseline, checkpoint, threads=threads),
        f"{checkpoint.name}, transformers {metadata.version('transformers')}, fp32 arithmetic",
        config.max_context,
        config.eos_token_ids,
        tokenizer.decode,
    )
    beside = theirs, kept(f"{checkpoint.digest} {threads} {','.join(map(str, config.eos_token_ids))}")
    alone, code = why_not_whole(checkpoint), ""
    if config.plugin is not None and reuse is not None:  # which may change under one version
        code = reuse.code.digest_of(Package(config.plugin.package, config.plugin.version))
    results, left_out = harness.measure(
        harness.Asked(tuple(tasks), limit, few_shot),
        harness.Tokens(encode, prefix),
        (ours, kept(content and f"{content} {threads} {code}")),
        beside if alone is None else None,
        stage=progress.stage,
        advance=progress.advance,
    )
    return results, left_out if alone is None else (*left_out, f"tasks: the checkpoint does not run: {alone}")


def merge(before: Sequence[TaskResult], measured: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Put results in the place of those of the same name."""
    return tuple({each.name: each for each in (*before, *measured)}.values())


def _write(found: list[Any], folder: Path) -> None:
    (folder / ANSWERS).write_text(json.dumps(found), encoding="utf-8")

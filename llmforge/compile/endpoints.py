"""Judge an endpoint: text through it and through what it is held against, answers of both, times, gates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from llmforge.artifact import Artifact
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile.texts import encoder_of
from llmforge.gates import decision, endpoint
from llmforge.gates.endpoint import EndpointJudgement, JudgedSide, ServedAnswer
from llmforge.measure import served_answers, served_quality
from llmforge.measure.baseline import baseline_on, open_baseline
from llmforge.measure.completions import Completions
from llmforge.measure.logprobs import ServedLogprobs, TokenNames
from llmforge.measure.quality import Logits
from llmforge.measure.scoring import before_end
from llmforge.measure.served_answers import Prompt, Streamed
from llmforge.metrics.serving import figures
from llmforge.metrics.truncation import SPREAD
from llmforge.recipe import GateSpec
from llmforge.serving import Runner, Sampling
from llmforge.serving import load as load_runner
from llmforge.serving.prompts import TextEncoder


@dataclass(frozen=True)
class ServedModel:
    """A model of a server."""

    server: HttpServer
    model: str | None  # None: its first


@dataclass(frozen=True)
class EndpointQuestion:
    """What is to be judged, on which text, and against what."""

    served: ServedModel
    reference: ServedModel | Checkpoint | Artifact | None
    tokenizer: Checkpoint | Artifact  # that of the reference, where it has one
    data: Path
    limits: dict[str, GateSpec] = field(default_factory=dict)
    context: int = 128
    tokens: int = 4096
    top: int | None = None
    one_by_one: bool = False
    spread: float = SPREAD
    answers: int = 16
    answer_tokens: int = 64
    threads: int = 1


def judge(asked: EndpointQuestion, progress: Progress) -> EndpointJudgement:
    """Measure an endpoint, and decide its gates.

    Where it tells nothing that quality could be made of, and neither a reference nor a limit needs that, answers and
    times are measured alone.

    Raises:
        UnsupportedError: it tells nothing, and something needs that.
        InputError: the data, the tokenizer or the reference cannot be used.
        RunFailed, EnvironmentLacks: a server refuses, or there is no answer.
    """
    progress.stage("Read text")
    encoder, vocabulary, ends = _encoder(asked.tokenizer)
    windows = _windows(asked, encoder, vocabulary, ends)
    completions = Completions(asked.served.server, asked.served.model)
    names = TokenNames(encoder.tokenizer, vocabulary)
    progress.stage("Ask what the server tells")
    served, unmeasured = ServedLogprobs(completions, names, asked.top, asked.one_by_one), None
    try:
        served.open(windows[0].ids.tolist())
    except UnsupportedError as error:
        if asked.reference is not None or asked.limits:
            raise
        unmeasured = error.message
    side = _side(asked, names, windows, progress)
    quality = None
    if unmeasured is None:
        progress.stage("Measure quality")
        quality = served_quality.compare(
            windows, served, side.distributions, spread=asked.spread, progress=progress.advance
        )
    progress.stage("Compare answers")
    prompts = served_answers.prompts(windows, asked.answers)
    said = served_answers.ask(completions, prompts, asked.answer_tokens, encoder.tokenizer, progress.advance)
    theirs = side.greedy(prompts, asked.answer_tokens)
    failed = [each.outcome.error for each in said if each.outcome.error is not None]
    results = endpoint.decide(asked.limits, quality, unmeasured)
    return EndpointJudgement(
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        served=JudgedSide(kind="endpoint", title=completions.description),
        reference=side.record,
        data=asked.data.name,
        data_digest=documents.digest(asked.data),
        limits=asked.limits,
        quality=quality,
        unmeasured=unmeasured,
        latency=figures([[each.outcome for each in said]]) if said else None,
        answers=_answers(prompts, said, theirs, encoder),
        gates=results,
        verdict=decision.overall(results),
        notes=tuple(_notes(asked, served, quality is not None, failed)),
    )


def _answers(
    prompts: Sequence[Prompt], said: Sequence[Streamed], theirs: Sequence[str] | None, encoder: TextEncoder
) -> tuple[ServedAnswer, ...]:
    """Pair the answers that came with those of the reference, if it gave any."""
    return tuple(
        ServedAnswer(
            document=prompt.document,
            prompt=encoder.tokenizer.decode(prompt.ids, skip_special_tokens=False),
            served=each.text,
            reference=None if theirs is None else theirs[place],
        )
        for place, (prompt, each) in enumerate(zip(prompts, said, strict=True))
        if each.outcome.error is None
    )


@dataclass(frozen=True)
class _Side:
    """What an endpoint is held against; `greedy` gives answers, or None."""

    record: JudgedSide | None
    distributions: Logits | ServedLogprobs | None
    greedy: Callable[[Sequence[Prompt], int], list[str] | None]


def _side(asked: EndpointQuestion, names: TokenNames, windows: Sequence[TokenWindow], progress: Progress) -> _Side:
    reference = asked.reference
    if reference is None:
        return _Side(None, None, lambda prompts, tokens: None)
    if isinstance(reference, ServedModel):
        return _of_server(reference, asked, names, windows)
    tokenizer = names.tokenizer
    progress.stage("Load reference")
    if isinstance(reference, Artifact):
        runner = load_runner(reference.path, asked.threads)
        ends = runner.config.eos_token_ids
        title = f"{reference.manifest.name}/{reference.manifest.version}"
        record = JudgedSide(kind="artifact", title=title, digest=reference.manifest.content_digest)
        return _Side(
            record,
            lambda ids: runner.logits(ids.tolist()),
            lambda prompts, tokens: [
                tokenizer.decode(before_end(_greedy(runner, each.ids, tokens), ends)) for each in prompts
            ],
        )
    baseline = open_baseline(reference, threads=asked.threads)
    record = JudgedSide(
        kind="checkpoint", title=reference.path.name, digest=reference.digest, description=baseline.description
    )

    def continued(prompts: Sequence[Prompt], tokens: int) -> list[str]:
        texts = [np.array(each.ids, np.int64) for each in prompts]
        made = baseline.greedy(texts, [tokens] * len(texts))
        return [tokenizer.decode(before_end(each, reference.eos_token_ids)) for each in made]

    return _Side(record, baseline_on([window.ids for window in windows], baseline, progress), continued)


def _of_server(
    reference: ServedModel, asked: EndpointQuestion, names: TokenNames, windows: Sequence[TokenWindow]
) -> _Side:
    completions = Completions(reference.server, reference.model)
    other = ServedLogprobs(completions, names, asked.top, asked.one_by_one)
    other.open(windows[0].ids.tolist())
    return _Side(
        JudgedSide(kind="endpoint", title=completions.description),
        other,
        lambda prompts, tokens: [
            each.text for each in served_answers.ask(completions, prompts, tokens, names.tokenizer)
        ],
    )


def _greedy(runner: Runner, prompt: Sequence[int], tokens: int) -> list[int]:
    made = (chunk.token_id for chunk in runner.generate(prompt, Sampling(max_tokens=tokens)))
    return [token for token in made if token is not None]


def _encoder(source: Checkpoint | Artifact) -> tuple[TextEncoder, int, tuple[int, ...]]:
    """Give what makes tokens of text, how many ids there are, and those that end an answer."""
    if isinstance(source, Artifact):
        from llmforge.serving.prompts import PromptEncoder

        read = PromptEncoder.read(source.path)
        return read, read.config.vocabulary, tuple(read.config.eos_token_ids)
    return encoder_of(source), source.geometry.vocabulary, tuple(source.eos_token_ids)


def _windows(
    asked: EndpointQuestion, encoder: TextEncoder, vocabulary: int, ends: Collection[int]
) -> list[TokenWindow]:
    read = documents.read_documents(asked.data)
    found = text.windows(text.ids_of(read, encoder, ends), asked.context)
    text.check_vocabulary(found, vocabulary, "the tokenizer")
    chosen = text.spread([each for each in found if len(each.ids) > 3], asked.tokens)
    if not chosen:
        raise DataError(f"{asked.data}: no document has 4 tokens", hint="use longer documents")
    return chosen


def _notes(asked: EndpointQuestion, served: ServedLogprobs, measured: bool, failed: Sequence[str | None]) -> list[str]:
    notes = []
    if measured and served.shift:
        notes.append("the server's log-probabilities of a prompt lie one place too far to the front: put right")
    if measured and served.as_text:
        notes.append("the server takes no token ids: prompts are text, and what it reads as other tokens is left out")
    if measured and served.way == "logprobs" and asked.reference is not None and not served.forces:
        notes.append("the server tells of the likeliest tokens alone: KLD has bounds, and no estimate")
    if failed:
        notes.append(f"{len(failed)} answers failed; the first: {failed[0]}")
    return notes

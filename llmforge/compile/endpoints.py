"""Judge an endpoint: text through it and through what it is held against, answers of both, times, gates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from llmforge.artifact import Artifact
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile.texts import encoder_of
from llmforge.gates import decision, endpoint
from llmforge.gates.endpoint import EndpointJudgement, JudgedSide, ServedAnswer
from llmforge.measure import behaviour, served_answers, served_chats, served_quality
from llmforge.measure.baseline import Baseline, baseline_on, open_baseline, why_not_whole
from llmforge.measure.behaviour import ChatSide
from llmforge.measure.completions import Completions
from llmforge.measure.logprobs import ServedLogprobs, TokenNames
from llmforge.measure.quality import Logits
from llmforge.measure.scoring import CheckpointSide, EngineSide, before_end
from llmforge.measure.served_answers import Prompt, Streamed
from llmforge.metrics.behaviour import results
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.serving import figures
from llmforge.metrics.truncation import SPREAD
from llmforge.recipe import BehaviourSpec, GateSpec
from llmforge.serving import Runner, Sampling
from llmforge.serving import load as load_runner
from llmforge.serving.prompts import PromptEncoder, TextEncoder

CHAT_CONTEXT = 4096  # of a checkpoint whose configuration names no longest text


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
    behaviour: BehaviourSpec | None = None
    threads: int = 1

    @property
    def needs_quality(self) -> bool:
        """Whether something cannot be said without log-probabilities."""
        of_text = any(not endpoint.of_behaviour(metric) for metric in self.limits)
        return of_text or (self.reference is not None and self.behaviour is None)


def judge(asked: EndpointQuestion, progress: Progress) -> EndpointJudgement:
    """Measure an endpoint, and decide its gates.

    Where it tells nothing that quality could be made of, and nothing needs that, answers and times are measured alone.

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
        if asked.needs_quality:
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
    chats, unasked = None, tuple[str, ...]()
    if asked.behaviour is not None:
        progress.stage("Answer chats")
        chats, unasked = _behaviour(asked, asked.behaviour, completions, encoder.tokenizer, progress)
    decided = endpoint.decide(asked.limits, quality, unmeasured, chats)
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
        behaviour=chats,
        answers=_answers(prompts, said, theirs, encoder),
        gates=decided,
        verdict=decision.overall(decided),
        notes=(*_notes(asked, served, quality is not None, failed), *unasked),
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


def _behaviour(
    asked: EndpointQuestion, spec: BehaviourSpec, completions: Completions, tokenizer: Tokenizer, progress: Progress
) -> tuple[BehaviourResult | None, tuple[str, ...]]:
    """Let the endpoint and its reference answer the same chats; also say what was left out."""
    chosen, notes = spec.documents(), tuple[str, ...]()
    beside: dict[str, BehaviourAnswer] | None = None
    title = None
    if isinstance(asked.reference, ServedModel):
        other = Completions(asked.reference.server, asked.reference.model)
        theirs, title = served_chats.ask(other, chosen, tokenizer, progress.advance), other.description
        notes += theirs.notes
        pairs = zip(chosen, theirs.answers, strict=True)
        beside = {each.id: answer for each, answer in pairs if answer is not None}
    elif asked.reference is not None:
        side, encoder = _chat_side(asked.reference, asked.threads)
        if encoder.template is None:
            return None, (behaviour.NO_TEMPLATE,)
        prompts, notes = behaviour.prepare(chosen, encoder)
        said = behaviour.ask(side, prompts, progress.advance)
        answers = behaviour.read(side, prompts, said, encoder)
        beside = {prompt.document.id: answer for prompt, answer in zip(prompts, answers, strict=True)}
        title = side.description
    if beside is not None:
        chosen = tuple(each for each in chosen if each.id in beside)
    ours = served_chats.ask(completions, chosen, tokenizer, progress.advance)
    both = [(each, answer) for each, answer in zip(chosen, ours.answers, strict=True) if answer is not None]
    notes += ours.notes
    if not both:
        return None, (*notes, "behaviour: not measured, for no document is left")
    found = results.measured(
        [each for each, _ in both],
        [answer for _, answer in both],
        None if beside is None else [beside[each.id] for each, _ in both],
        engine=completions.description,
        baseline=title,
    )
    return found, notes


def _chat_side(reference: Checkpoint | Artifact, threads: int) -> tuple[ChatSide, PromptEncoder]:
    """Open what answers chats, and what writes them."""
    if isinstance(reference, Artifact):
        runner = load_runner(reference.path, threads)
        return EngineSide(runner, f"{reference.manifest.name}/{reference.manifest.version}"), runner
    if (why := why_not_whole(reference)) is not None:
        raise UnsupportedError(f"{reference.path}: the checkpoint does not run: {why}")
    encoder = behaviour.encoder_of(reference, reference.geometry.context or CHAT_CONTEXT)
    side = CheckpointSide(
        partial(Baseline, reference, threads=threads),
        reference.path.name,
        encoder.config.max_context,
        encoder.config.eos_token_ids,
        encoder.tokenizer.decode,
    )
    return side, encoder


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

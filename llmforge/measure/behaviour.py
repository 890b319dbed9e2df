"""Chats that an artifact and its checkpoint answer, and what both do in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, Protocol

from llmforge.base.errors import InputError, UsageError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.measure import accepted_length, decisive_tokens
from llmforge.measure.accepted_length import Drafting
from llmforge.measure.baseline import Baseline, why_not_whole
from llmforge.measure.decisive_tokens import DecisiveTokens
from llmforge.measure.scoring import (
    AnswerCache,
    CheckpointSide,
    EngineSide,
    Keep,
    Likelihood,
    Pair,
    ReadingSide,
    ReduceRows,
    blocks,
)
from llmforge.measure.tasks import TaskEngine
from llmforge.metrics.behaviour import results
from llmforge.metrics.behaviour.answer import BehaviourAnswer, MadeCall, TokenOdds
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.metrics.behaviour.results import BehaviourResult, SpeculationRecord
from llmforge.runtime.config import FORMAT, RuntimeConfig, SessionOptions
from llmforge.runtime.sampling.options import GREEDY
from llmforge.serving.chat import ChatTemplate, special_tokens
from llmforge.serving.detokenize import Detokenizer
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import answer as answers_
from llmforge.serving.protocol import tools
from llmforge.serving.protocol.answer import AnswerReader
from llmforge.serving.protocol.harmony import HarmonyChannels
from llmforge.serving.protocol.reasoning import Reasoning
from llmforge.serving.protocol.tools import ToolUse
from llmforge.serving.runner import Runner

BLOCK = 64  # chats whose answers are kept together

NO_TEMPLATE = "behaviour: not measured, for the artifact has no chat template"


class ChatSide(ReadingSide, Protocol):
    """What answers chats: token ids in, token ids out."""

    @property
    def description(self) -> str:
        """Its description."""
        ...

    def answers(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Answer prompts greedily, at most so many tokens each; those that end an answer are left out."""
        ...

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Say how likely what follows each context is."""
        ...


class AnsweringSide(Protocol):
    """What answers, and tells the logits that it chose by."""

    def answers_read(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], reduce: ReduceRows | None
    ) -> list[tuple[list[int], list[Any]]]:
        """Answer prompts greedily; also give what `reduce` makes of each row of logits."""
        ...


@dataclass(frozen=True)
class ChatPrompt:
    """A document as the model reads it."""

    document: BehaviourDocument
    ids: list[int]
    use: ToolUse | None
    openings: tuple[list[int], ...] = ()  # of a refusal and of an answer, as they would follow


def run(
    documents: Sequence[BehaviourDocument],
    engine: TaskEngine,
    checkpoint: Checkpoint,
    progress: Progress,
    *,
    cache: AnswerCache | None = None,
) -> tuple[BehaviourResult | None, tuple[str, ...]]:
    """Let an engine and its checkpoint answer `documents`; also say what was left out, and why.

    Answers of the checkpoint are kept in the `cache`. None: nothing can be asked.

    Raises:
        InputError: the engine returns logits that are NaN or infinite.
    """
    runner = engine.runner
    if runner.template is None:
        return None, (NO_TEMPLATE,)
    prompts, notes = prepare(documents, runner)
    if not prompts:
        return None, (*notes, "behaviour: not measured, for no document is left")
    ours = EngineSide(runner, engine.description)
    chosen = [prompt.document for prompt in prompts]
    progress.stage("Answer chats")
    said = ask(ours, prompts, progress.advance)
    if (alone := why_not_whole(checkpoint)) is not None:
        notes = (*notes, f"behaviour: the checkpoint does not run: {alone}")
        (mine,), drafted, more = _drafted(runner, prompts, [(said, read(ours, prompts, said, runner))], progress)
        found = results.measured(chosen, mine, None, engine=ours.description, baseline=None, speculation=drafted)
        return found, (*notes, *more)
    ends = runner.config.eos_token_ids
    theirs = CheckpointSide(
        partial(Baseline, checkpoint, threads=engine.threads),
        f"{checkpoint.name}, transformers {metadata.version('transformers')}, fp32 arithmetic",
        runner.config.max_context,
        ends,
        runner.tokenizer.decode,
    )
    keep = Keep() if cache is None else cache.of(f"{checkpoint.digest} {engine.threads} {','.join(map(str, ends))}")
    progress.stage("Let the checkpoint answer chats")
    tokens = DecisiveTokens.of(runner)
    right, sure = ask_reading(theirs, prompts, tokens, progress.advance, keep)
    beside = read(theirs, prompts, right, runner, sure, keep)
    progress.stage("Read the checkpoint's answers")
    answers = read(ours, prompts, said, runner, odds(ours, prompts, right, tokens, runner))
    (answers, beside), drafted, more = _drafted(runner, prompts, [(said, answers), (right, beside)], progress)
    found = results.measured(
        chosen, answers, beside, engine=ours.description, baseline=theirs.description, speculation=drafted
    )
    return found, (*notes, *more)


_Said = tuple[Sequence[Sequence[int]], list[BehaviourAnswer]]  # token ids, and what was read of them


def _drafted(
    runner: Runner, prompts: Sequence[ChatPrompt], sides: Sequence[_Said], progress: Progress
) -> tuple[list[list[BehaviourAnswer]], SpeculationRecord | None, tuple[str, ...]]:
    """Say of each answer how many tokens a step gives with the artifact's drafts, and how much faster they make it."""
    drafting = Drafting.of(runner)
    if not isinstance(drafting, Drafting):
        notes = () if drafting is None else (f"behaviour.accepted_length: not measured: {drafting}",)
        return [answers for _, answers in sides], None, notes
    progress.stage("Verify drafts along the answers")
    found = [
        [
            replace(answer, accepted_length=drafting.accepted_length(prompt.ids, ids))
            for prompt, ids, answer in zip(prompts, said, answers, strict=True)
        ]
        for said, answers in sides
    ]
    speedup = accepted_length.timed(runner, [prompt.ids for prompt in prompts])
    return found, SpeculationRecord(method=drafting.method, max_tokens=drafting.max_tokens, speedup=speedup), ()


def prepare(documents: Sequence[BehaviourDocument], encoder: PromptEncoder) -> tuple[list[ChatPrompt], tuple[str, ...]]:
    """Write documents with the chat template; those that it cannot, or that do not fit the context, are left out."""
    found: list[ChatPrompt] = []
    left: dict[str, list[str]] = {}
    for document in documents:
        try:
            prompt = _prompt(document, encoder)
        except (UsageError, InputError) as error:
            left.setdefault(error.message[:160], []).append(document.id)
            continue
        longest = max([document.max_tokens, *map(len, prompt.openings)])
        if len(prompt.ids) + longest > encoder.config.max_context:
            left.setdefault(f"they exceed engine.max_context, {encoder.config.max_context}", []).append(document.id)
        else:
            found.append(prompt)
    return found, tuple(
        f"behaviour: {len(ids)} of {len(documents)} documents are left out ({ids[0]}{', …' if ids[1:] else ''}): {why}"
        for why, ids in left.items()
    )


def encoder_of(checkpoint: Checkpoint, context: int) -> PromptEncoder:
    """Make what writes chats as a checkpoint reads them, for answers within `context` tokens."""
    template = None
    if checkpoint.chat_template is not None:
        template = ChatTemplate(checkpoint.chat_template, special_tokens(checkpoint.path), str(checkpoint.path))
    config = RuntimeConfig(
        format=FORMAT,
        onnxruntime=None,
        kernels=None,
        max_context=context,
        max_batch=1,
        vocabulary=checkpoint.geometry.vocabulary,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
        bos_token_id=checkpoint.bos_token_id,
        caches=(),
        session=SessionOptions(None, False, {}),
    )
    return PromptEncoder(config, checkpoint.tokenizer, template)


def _prompt(document: BehaviourDocument, encoder: PromptEncoder) -> ChatPrompt:
    fields: dict[str, Any] = {"tools": [dict(tool) for tool in document.tools]}
    use = tools.read(fields, encoder) if document.tools else None
    ids = encoder.encode_chat(document.messages, document.tools if use is None else use.tools)
    openings = () if document.refusal is None else document.refusal.openings or ()
    written = [list(each.ids) for each in encoder.tokenized(list(openings), special=False)] if openings else []
    return ChatPrompt(document, ids, use, tuple(written))


def ask(
    side: ChatSide, prompts: Sequence[ChatPrompt], progress: Callable[[int, int], None], keep: Keep | None = None
) -> list[list[int]]:
    """Let a side answer: token ids, without those that end an answer."""
    return _by_block("chats", prompts, partial(_answers, side), progress, keep or Keep())


def ask_reading(
    side: AnsweringSide,
    prompts: Sequence[ChatPrompt],
    tokens: DecisiveTokens,
    progress: Callable[[int, int], None],
    keep: Keep | None = None,
) -> tuple[list[list[int]], list[dict[str, TokenOdds]]]:
    """Let the checkpoint's side answer, and say how likely decisive tokens were as it did."""

    def compute(part: Sequence[ChatPrompt]) -> list[Any]:
        asked = [prompt.document.max_tokens for prompt in part]
        found = []
        for prompt, count, (said, rows) in zip(
            part, asked, side.answers_read([prompt.ids for prompt in part], asked, tokens.odds), strict=True
        ):
            sure = decisive_tokens.answer_of(said, rows, tokens, count, tools=prompt.use is not None)
            found.append([said, {kind: [each.due, each.elsewhere] for kind, each in sure.items()}])
        return found

    kind = f"chats and odds of {sorted(tokens.ids.items())}"
    found = _by_block(kind, prompts, compute, progress, keep or Keep())
    odds_ = [{kind: TokenOdds(*values) for kind, values in sure.items()} for _, sure in found]
    return [said for said, _ in found], odds_


def _by_block(
    kind: str,
    prompts: Sequence[ChatPrompt],
    compute: Callable[[Sequence[ChatPrompt]], list[Any]],
    progress: Callable[[int, int], None],
    keep: Keep,
) -> list[Any]:
    """Compute what is kept of blocks of prompts, those of about the same length and count together."""
    found: dict[int, Any] = {}
    sizes = [(len(each.ids).bit_length(), each.document.max_tokens, len(each.ids)) for each in prompts]
    order = sorted(range(len(prompts)), key=lambda at: sizes[at])
    for part in blocks(len(order), BLOCK):
        progress(part.start, len(order))
        chosen = [prompts[at] for at in order[part]]
        asked = [(prompt.ids, prompt.document.max_tokens, prompt.use is not None) for prompt in chosen]
        found |= zip(order[part], keep.block(kind, asked, partial(compute, chosen)), strict=True)
    progress(len(order), len(order))
    return [found[at] for at in range(len(prompts))]


def read(
    side: ChatSide,
    prompts: Sequence[ChatPrompt],
    said: Sequence[Sequence[int]],
    encoder: PromptEncoder,
    sure: Sequence[Mapping[str, TokenOdds]] | None = None,
    keep: Keep | None = None,
) -> list[BehaviourAnswer]:
    """Read what a side said as the server does, and let it judge openings; `sure`: its odds along right answers."""
    keep = keep or Keep()
    pairs = [(prompt.ids, opening) for prompt in prompts for opening in prompt.openings]
    scored = keep.block("openings", pairs, partial(side.score, pairs)) if pairs else []
    likelihoods = iter([value for value, _ in scored])
    reasoning = answers_.reasoning_of(encoder)
    found = []
    for prompt, ids, each in zip(prompts, said, sure or [{}] * len(prompts), strict=True):
        margin = next(likelihoods) - next(likelihoods) if prompt.openings else None
        found.append(replace(read_answer(prompt, ids, encoder, reasoning), margin=margin, odds=each))
    return found


def odds(
    side: ReadingSide,
    prompts: Sequence[ChatPrompt],
    right: Sequence[Sequence[int]],
    tokens: DecisiveTokens,
    encoder: PromptEncoder,
) -> list[dict[str, TokenOdds]]:
    """Let a side read the checkpoint's answers, `right`, and say how likely decisive tokens were."""
    ended = [len(ids) < prompt.document.max_tokens for prompt, ids in zip(prompts, right, strict=True)]
    end = encoder.config.eos_token_ids[:1]
    texts = [
        (prompt.ids, [*ids, *(end if last else ())]) for prompt, ids, last in zip(prompts, right, ended, strict=True)
    ]
    return decisive_tokens.measure(side, texts, tokens, ended, [prompt.use is not None for prompt in prompts])


def _answers(side: ChatSide, asked: Sequence[ChatPrompt]) -> list[list[int]]:
    return side.answers([prompt.ids for prompt in asked], [prompt.document.max_tokens for prompt in asked])


def read_answer(
    prompt: ChatPrompt,
    ids: Sequence[int],
    encoder: PromptEncoder,
    reasoning: Reasoning | HarmonyChannels | None,
) -> BehaviourAnswer:
    """Take an answer apart: thoughts, calls and text, by what serving reads them with."""
    cut_off = len(ids) >= prompt.document.max_tokens
    thoughts = None if reasoning is None else reasoning.parser(prompt.ids, encoder, GREEDY)()
    shown = {*(() if prompt.use is None else prompt.use.special_tokens)}
    shown |= set() if reasoning is None else reasoning.special_tokens
    decoder = Detokenizer(encoder.tokenizer, shown)
    reader = AnswerReader(None if prompt.use is None else prompt.use.parser(), thoughts)
    pieces = [piece for token in ids for piece in reader.read(decoder.push(token), None, 1)[0]]
    last, reason = reader.read(decoder.flush(), "length" if cut_off else "stop")
    pieces += last
    calls = [call["function"] for call in answers_.call_deltas(pieces)]
    return BehaviourAnswer(
        text=answers_.text_of(pieces),
        calls=tuple(MadeCall(call["name"], call["arguments"]) for call in calls),
        reasoning=answers_.thoughts_of(pieces),
        reasoning_tokens=reader.reasoning_tokens,
        thinking_open=thoughts is not None and thoughts.thinking,
        finish_reason="tool_calls" if reason == "tool_calls" else ("length" if cut_off else "stop"),
        tokens=len(ids),
    )

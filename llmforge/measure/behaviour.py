"""Chats that an artifact and its checkpoint answer, and what both do in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Protocol

from llmforge.base.errors import InputError, UsageError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.measure.baseline import Baseline, why_not_whole
from llmforge.measure.scoring import AnswerCache, CheckpointSide, EngineSide, Keep, Likelihood, Pair, blocks
from llmforge.measure.tasks import TaskEngine
from llmforge.metrics.behaviour import results
from llmforge.metrics.behaviour.answer import BehaviourAnswer, MadeCall
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.runtime.sampling.options import GREEDY
from llmforge.serving.detokenize import Detokenizer
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import answer as answers_
from llmforge.serving.protocol import tools
from llmforge.serving.protocol.answer import AnswerReader
from llmforge.serving.protocol.harmony import HarmonyChannels
from llmforge.serving.protocol.reasoning import Reasoning
from llmforge.serving.protocol.tools import ToolUse

BLOCK = 32  # chats whose answers are kept together

NO_TEMPLATE = "behaviour: not measured, for the artifact has no chat template"


class ChatSide(Protocol):
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
    progress.stage("Answer chats")
    said = ask(ours, prompts, runner, progress.advance)
    chosen = [prompt.document for prompt in prompts]
    if (alone := why_not_whole(checkpoint)) is not None:
        notes = (*notes, f"behaviour: the checkpoint does not run: {alone}")
        return results.measured(chosen, said, None, engine=ours.description, baseline=None), notes
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
    beside = ask(theirs, prompts, runner, progress.advance, keep)
    found = results.measured(chosen, said, beside, engine=ours.description, baseline=theirs.description)
    return found, notes


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


def _prompt(document: BehaviourDocument, encoder: PromptEncoder) -> ChatPrompt:
    fields: dict[str, Any] = {"tools": [dict(tool) for tool in document.tools]}
    use = tools.read(fields, encoder) if document.tools else None
    ids = encoder.encode_chat(document.messages, document.tools if use is None else use.tools)
    openings = () if document.refusal is None else document.refusal.openings or ()
    written = [list(each.ids) for each in encoder.tokenized(list(openings), special=False)] if openings else []
    return ChatPrompt(document, ids, use, tuple(written))


def ask(
    side: ChatSide,
    prompts: Sequence[ChatPrompt],
    encoder: PromptEncoder,
    progress: Callable[[int, int], None],
    keep: Keep | None = None,
) -> list[BehaviourAnswer]:
    """Let a side answer, and read what it says as the server does."""
    keep = keep or Keep()
    said: list[list[int]] = []
    for part in blocks(len(prompts), BLOCK):
        progress(part.start, len(prompts))
        asked = [(prompt.ids, prompt.document.max_tokens) for prompt in prompts[part]]
        said += keep.block("chats", asked, partial(_answers, side, asked))
    progress(len(prompts), len(prompts))
    pairs = [(prompt.ids, opening) for prompt in prompts for opening in prompt.openings]
    scored = keep.block("openings", pairs, partial(side.score, pairs)) if pairs else []
    likelihoods = iter([value for value, _ in scored])
    reasoning = answers_.reasoning_of(encoder)
    found = []
    for prompt, ids in zip(prompts, said, strict=True):
        margin = next(likelihoods) - next(likelihoods) if prompt.openings else None
        found.append(read_answer(prompt, ids, encoder, reasoning, margin))
    return found


def _answers(side: ChatSide, asked: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    return side.answers([ids for ids, _ in asked], [count for _, count in asked])


def read_answer(
    prompt: ChatPrompt,
    ids: Sequence[int],
    encoder: PromptEncoder,
    reasoning: Reasoning | HarmonyChannels | None,
    margin: float | None,
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
        margin=margin,
    )

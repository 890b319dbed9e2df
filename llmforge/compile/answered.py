"""Chats that the checkpoint answers itself, once: what it said is kept in the build cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.compile.reuse import Reuse, hash_of, write_json
from llmforge.compile.texts import Answering
from llmforge.measure import chat_answers

THREADS = 2  # as many everywhere: another number would round otherwise, and might say otherwise
SAID = "answers.json"
_CODE = ("llmforge.measure.chat_answers", "llmforge.measure.baseline")


def answering(kept: Reuse | None = None) -> Answering:
    """Give what asks a checkpoint; None: nothing is kept."""
    return partial(_answers, kept)


def _answers(
    kept: Reuse | None, checkpoint: Checkpoint, prompts: Mapping[str, Sequence[int]], progress: Progress
) -> Mapping[str, Sequence[int]] | str:
    if (why_not := chat_answers.why_not(checkpoint)) is not None:
        return why_not
    ends = sorted(checkpoint.eos_token_ids)
    if kept is None:
        return _ask(checkpoint, prompts, ends, progress)
    parts = {"checkpoint": checkpoint.digest, "prompts": hash_of({name: [*ids] for name, ids in prompts.items()})}
    key = kept.key("chat-answers", _CODE, **parts, ends=hash_of(ends), threads=str(THREADS))
    with kept.cache.computing(key) as entry:
        if entry is not None:
            progress.stage("Answer chats: reused")
            found: Mapping[str, Sequence[int]] = entry.json(SAID)
            return found
        said = _ask(checkpoint, prompts, ends, progress)
        kept.cache.put(key, partial(write_json, SAID, said))
        return said


def _ask(
    checkpoint: Checkpoint, prompts: Mapping[str, Sequence[int]], ends: Sequence[int], progress: Progress
) -> dict[str, list[int]]:
    progress.stage("Answer chats")
    return chat_answers.answer(checkpoint, prompts, ends, threads=THREADS, progress=progress.advance)

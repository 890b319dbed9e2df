"""Chats that a server answers through its chat API: calls and thoughts as the server takes them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from llmforge.base.errors import RunFailed
from llmforge.measure.completions import Completions
from llmforge.metrics.behaviour.answer import BehaviourAnswer, MadeCall
from llmforge.metrics.behaviour.document import BehaviourDocument


@dataclass(frozen=True)
class ServedChats:
    """What a server answered: of each document an answer, or why there is none."""

    answers: list[BehaviourAnswer | None]
    refused: dict[str, list[str]]  # ids of documents, by what the server says

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what is left out."""
        of = len(self.answers)
        return tuple(
            f"behaviour: {len(ids)} of {of} chats are left out ({ids[0]}{', …' if ids[1:] else ''}): {why}"
            for why, ids in self.refused.items()
        )


def ask(
    completions: Completions,
    documents: Sequence[BehaviourDocument],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ServedChats:
    """Let a server answer chats greedily, one at a time; those that it refuses are left out.

    Thoughts are what it gives as `reasoning_content` or `reasoning`, and counted with the `tokenizer`; where it never
    gives any, it does not think.

    Raises:
        EnvironmentLacks: there is no answer, or access is denied.
    """
    found: list[BehaviourAnswer | None] = []
    refused: dict[str, list[str]] = {}
    for number, document in enumerate(documents):
        progress(number, len(documents))
        try:
            found.append(_answer(completions.chat(_body(document)), tokenizer))
        except RunFailed as error:
            refused.setdefault(error.message[:160], []).append(document.id)
            found.append(None)
    progress(len(documents), len(documents))
    if not any(each is not None and each.reasoning for each in found):
        found = [None if each is None else replace(each, reasoning_tokens=None) for each in found]
    return ServedChats(found, refused)


def _body(document: BehaviourDocument) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": list(document.messages), "max_tokens": document.max_tokens}
    return {**body, "tools": list(document.tools)} if document.tools else body


def _answer(said: dict[str, Any], tokenizer: Tokenizer) -> BehaviourAnswer:
    """Take an answer apart.

    Raises:
        RunFailed: it has another form than OpenAI's API says.
    """
    try:
        (choice, *_), tokens = said["choices"], int(said["usage"]["completion_tokens"])
        message = choice["message"]
        calls = tuple(
            MadeCall(str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        text = str(message.get("content") or "")
        thoughts = str(message.get("reasoning_content") or message.get("reasoning") or "")
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFailed(f"an answer is none of OpenAI's chat API: {type(error).__name__}: {error}") from error
    return BehaviourAnswer(
        text=text,
        calls=calls,
        reasoning=thoughts,
        reasoning_tokens=len(tokenizer.encode(thoughts, add_special_tokens=False).ids) if thoughts else 0,
        thinking_open=bool(thoughts) and reason == "length" and not (text or calls),
        finish_reason="length" if reason == "length" else ("tool_calls" if calls else "stop"),
        tokens=tokens,
    )

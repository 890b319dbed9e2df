"""Conversations: what is said, what of it the context holds, and what the prefix cache saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmforge.base.errors import InputError, UsageError
from llmforge.serving import Engine, Request, Sampling, load
from llmforge.serving.conversation import Conversation
from llmforge.serving.prompts import PromptEncoder

from ..samples.small_artifact import publish_small


class Words:
    """An encoder of 40 tokens of context: a token for each word, and one for each role."""

    config = SimpleNamespace(max_context=40)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["content"] == "refused" for message in messages):
            raise InputError("the chat template refuses this")
        return [len(word) for message in messages for word in (message["role"], *message["content"].split())]


def words(count: int) -> str:
    return "w " * count


def conversation(answer_tokens: int = 10, system: str | None = None) -> Conversation:
    return Conversation(cast(PromptEncoder, Words()), answer_tokens, system)


def test_what_was_said_stands_before_what_is_asked() -> None:
    chat = conversation(system="Be short")
    chat.ask("one two")
    chat.answer("three")
    ids, dropped = chat.ask("four")
    assert (ids, dropped) == ([6, 2, 5, 4, 3, 3, 9, 5, 4, 4], 0)
    chat.answer("five")
    chat.reset()
    assert chat.ask("six") == ([6, 2, 5, 4, 3], 0)


def test_the_oldest_turns_make_room_and_the_system_prompt_stays() -> None:
    chat = conversation(system="Be short")
    for number in range(3):
        chat.ask(f"{number} {words(3)}")
        chat.answer(words(3))
    ids, dropped = chat.ask(words(6))  # 3 + 3 * 9 + 7 tokens, of 30
    assert (len(ids), dropped) == (28, 2)
    assert ids[:3] == [6, 2, 5]
    assert [message["content"][0] for message in chat.messages] == ["1", "w", "2", "w", "w"]


def test_an_answer_is_given_half_of_the_context_at_most() -> None:
    chat = conversation(answer_tokens=1000)
    chat.ask(words(8))
    chat.answer(words(4))
    assert chat.ask(words(4))[1] == 0  # 9 + 5 + 5 tokens, of 20
    chat.answer(words(1))
    assert chat.ask(words(1))[1] == 2


def test_a_message_alone_may_fill_the_context_but_for_a_token() -> None:
    chat = conversation()
    assert len(chat.ask(words(38))[0]) == 39
    chat.answer("x")
    before = list(chat.messages)
    with pytest.raises(UsageError, match="the message takes 40 tokens, and the context holds 40"):
        chat.ask(words(39))
    with pytest.raises(InputError):
        chat.ask("refused")
    assert chat.messages == before


def test_what_got_no_answer_is_taken_back() -> None:
    chat = conversation()
    chat.ask("one")
    chat.answer("")
    assert chat.messages == []


def test_turns_before_are_found_in_the_prefix_cache(tmp_path: Path, sample_checkpoint: Path) -> None:
    runner = load(publish_small(tmp_path, sample_checkpoint).path)
    chat = Conversation(runner, 16, "Answer in short words, and name the file that you mean.")
    cached = []
    with Engine(runner) as engine:
        for text in ("What is a path of a file?", "And what is a link to it?", "Which of them is older?"):
            ids, _ = chat.ask(text)
            chunks = list(engine.stream(Request(tuple(ids), Sampling(max_tokens=16, ignore_eos=True))))
            chat.answer("".join(chunk.text for chunk in chunks))
            assert chunks[-1].usage is not None
            cached.append(chunks[-1].usage.cached_tokens)
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]

"""Thoughts of `llmforge serve`: taken out of answers, switched by requests, shown to templates again."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmforge import serving as runtime
from llmforge.base.errors import UsageError
from llmforge.serving import Constraint, Engine, Receiver, Request
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.http import create_app
from llmforge.serving.protocol import reasoning
from llmforge.serving.protocol.reasoning import Reasoning, ReasoningParser, Thought

from ...models import thinking_templates, tool_templates
from ...samples.small_artifact import publish_small

pytest.importorskip("llguidance")

TAGS = Reasoning("<think>", "</think>", frozenset())
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "temperature": 0, "max_tokens": 60}


def parsed(pieces: Sequence[str], *, begun: bool) -> tuple[str, str, bool]:
    """Return thoughts, answer, and whether it still thinks."""
    parser = ReasoningParser(TAGS, begun=begun)
    found = [each for piece in pieces for each in parser.push(piece)] + parser.flush()
    thoughts = "".join(each.text for each in found if isinstance(each, Thought))
    return thoughts, "".join(each for each in found if isinstance(each, str)), parser.thinking


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nA <b>?\n\nYes.\n</think>\n\nB. ", False, "A <b>?\n\nYes.", "B. "),
        ("\n <think></think>B", False, "", "B"),
        ("A\n</think>\n\nB", True, "A", "B"),
        ("</think>B", True, "", "B"),
        ("A </thin", True, "A </thin", ""),
        ("A  \n", True, "A", ""),
        ("  plain text\n", False, "  plain text\n", ""),
        ("<thin", False, "<thin", ""),
        ("   ", False, "   ", ""),
        ("B <think>A</think>", False, "B <think>A</think>", ""),
        ("<think>A</think>B</think>\nC", False, "A", "B</think>\nC"),
        ("<think>A<think>A</think>B", False, "A<think>A", "B"),
    ],
)
def test_however_an_answer_is_cut_it_adds_up_to_the_same(text: str, begun: bool, thoughts: str, answer: str) -> None:
    if not begun and not text.lstrip().startswith("<think>"):  # all of it is the answer
        thoughts, answer = "", thoughts
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            found = parsed([text[:first], text[first:second], text[second:]], begun=begun)
            assert found[:2] == (thoughts, answer), (first, second)
    assert parsed(list(text), begun=begun) == (thoughts, answer, begun and "</think>" not in text)


class Scripted:
    """An engine that says a text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.says = ""
        self.prompts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, receive: Receiver) -> Any:
        tokenizer = self._engine.encoder.tokenizer
        (prompt,) = tokenizer.decode_batch([list(request.prompt)], skip_special_tokens=False)
        self.prompts.append(prompt)
        if self.says:
            # Tags are tokens of their own, as the model would write them.
            rule = " ".join(
                part if part in ("<think>", "</think>") else json.dumps(part) for part in self.says.split("|")
            )
            form = Constraint("grammar", f"start: {rule}")
            request = replace(request, sampling=replace(request.sampling, constraint=form))
        return self._engine.submit(request, receive)


@contextlib.contextmanager
def serving(out: Path, checkpoint: Path, template: str) -> Iterator[tuple[TestClient, Scripted]]:
    """Serve a small artifact of a template, with two special tokens for thoughts."""
    folder = out / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = (folder / "tokenizer.json").read_text()
    for old, new in (("<|im_start|>", "<think>"), ("<|im_end|>", "</think>")):
        assert old in tokenizer
        tokenizer = tokenizer.replace(old, new)
    (folder / "tokenizer.json").write_text(tokenizer)
    artifact = publish_small(out / "artifacts", folder)
    with Engine(runtime.load(artifact.path)) as engine:
        scripted = Scripted(engine)
        with TestClient(create_app(scripted, "small")) as client:  # type: ignore[arg-type]
            yield client, scripted


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("switched"), sample_checkpoint, thinking_templates.SWITCHED) as served:
        yield served


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("always"), sample_checkpoint, thinking_templates.ALWAYS) as served:
        yield served


def ask(served: Any, says: str, **options: Any) -> dict[str, Any]:
    client, scripted = served
    scripted.says = says
    answer = client.post(CHAT, json={**ASK, **options})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(served: Any, says: str, **options: Any) -> tuple[str, str, Any]:
    """Add up the thoughts and the text of a stream; give its counts of tokens, too."""
    client, scripted = served
    scripted.says = says
    body = {**ASK, **options, "stream": True, "stream_options": {"include_usage": True}}
    thoughts, text, usage = "", "", None
    for line in client.post(CHAT, json=body).text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            usage = event["usage"] or usage
            for choice in event["choices"]:
                thoughts += choice["delta"].get("reasoning_content", "")
                text += choice["delta"].get("content", "")
    return thoughts, text, usage


def test_thoughts_are_no_part_of_the_answer(switched: Any) -> None:
    says = r"<think>|Let me see.|</think>|Because."
    made = ask(switched, says)
    (choice,) = made["choices"]
    assert choice["message"]["reasoning_content"] == "Let me see."
    assert choice["message"]["content"] == "Because."
    assert choice["finish_reason"] == "stop"
    tokens = made["usage"]
    thought = tokens["completion_tokens_details"]["reasoning_tokens"]
    assert 2 < thought < tokens["completion_tokens"] - 1
    found = streamed(switched, says)
    assert found[:2] == ("Let me see.", "Because.")
    assert found[2]["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_an_answer_without_thoughts_has_none(switched: Any) -> None:
    made = ask(switched, "Because.")
    assert "reasoning_content" not in made["choices"][0]["message"]
    assert made["choices"][0]["message"]["content"] == "Because."
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_prompt_may_end_with_the_tag(always: Any) -> None:
    message = ask(always, "Let me see.|</think>|Because.")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Because.")
    cut = ask(always, "Let me see. And see again.|</think>|Because.", max_tokens=3)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    # An answer that is held to a form from its beginning has no thoughts.
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    message = ask(always, "", response_format=form)["choices"][0]["message"]
    assert message["content"] == "7"
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ({}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n"),
        ({"reasoning_effort": "none"}, "</think>\n\n"),
        ({"reasoning_effort": "high"}, "assistant\n"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
    ],
)
def test_requests_switch_thinking(switched: Any, asked: dict[str, Any], ends: str) -> None:
    client, scripted = switched
    ask(switched, "Because.", **asked)
    assert scripted.prompts[-1].endswith(ends)
    ids = client.post("/tokenize", json={"messages": ASK["messages"], **asked}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == scripted.prompts[-1]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"chat_template_kwargs": {"thinking": False}}, "no variable 'thinking' (it reads enable_thinking)"),
        ({"chat_template_kwargs": {"messages": []}}, "messages is given by the request itself"),
        ({"chat_template_kwargs": {"a b": 1}}, "expected an object of variables"),
        ({"chat_template_kwargs": [1]}, "expected an object of variables"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 5000}}, "larger than 4,096 bytes"),
        ({"reasoning_effort": "much"}, "expected none, minimal, low, medium, high, xhigh"),
        ({"reasoning_effort": 3}, "expected none, minimal"),
    ],
)
def test_what_the_template_does_not_read_is_refused(switched: Any, asked: dict[str, Any], says: str) -> None:
    client, _ = switched
    refused = client.post(CHAT, json={**ASK, **asked})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert says in error["message"]
    assert error["param"] == next(iter(asked))
    assert client.post("/v1/completions", json={"prompt": "Why?", **asked}).status_code == 400


@pytest.mark.parametrize("tokens", [0, 3])
def test_thoughts_end_with_their_budget(always: Any, tokens: int) -> None:
    free, held = ask(always, ""), ask(always, "", thinking_token_budget=tokens)
    counts = [made["usage"]["completion_tokens_details"]["reasoning_tokens"] for made in (free, held)]
    assert counts[0] > tokens + 1  # this model does not stop by itself
    assert counts[1] == tokens + 1  # with the tag
    thoughts, text, usage = streamed(always, "", thinking_token_budget=tokens)
    message = held["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, text)
    assert free["choices"][0]["message"]["reasoning_content"].startswith(thoughts)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens + 1


def test_a_budget_is_for_thoughts_alone(switched: Any) -> None:
    free, held = ask(switched, ""), ask(switched, "", thinking_token_budget=0)
    assert held["choices"][0]["message"] == free["choices"][0]["message"]
    for wrong in (-1, 1.5, "3", True):
        refused = switched[0].post(CHAT, json={**ASK, "thinking_token_budget": wrong})
        assert refused.status_code == 400
        assert "expected" in refused.json()["error"]["message"]


def test_effort_is_told_to_templates_that_read_it() -> None:
    template = ChatTemplate(thinking_templates.EFFORT, {}, "template")
    assert reasoning.variables({"reasoning_effort": "low"}, template) == {"reasoning_effort": "low"}
    with pytest.raises(UsageError, match="no switch for thinking"):
        reasoning.variables({"reasoning_effort": "low"}, ChatTemplate(tool_templates.HERMES, {}, "template"))
    with pytest.raises(UsageError, match="no switch for thinking"):
        reasoning.variables({"reasoning_effort": "low"}, None)


def test_thoughts_of_earlier_turns_are_shown_to_the_template(switched: Any) -> None:
    _, scripted = switched
    earlier = {"role": "assistant", "content": "Because.", "reasoning_content": "Let me see."}
    ask(switched, "Ah.", messages=[*ASK["messages"], earlier, {"role": "user", "content": "And then?"}])
    assert "<think>\nLet me see.\n</think>\n\nBecause." in scripted.prompts[-1]

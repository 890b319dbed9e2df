"""`run --chat` without a prompt: a conversation over a pipe, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.base.errors import Unavailable, UsageError
from llmforge.base.signals import Interrupted
from llmforge.cli import chatting, cli
from llmforge.serving import Chunk, Engine, Request, Sampling, Usage
from llmforge.serving.conversation import Conversation
from llmforge.serving.prompts import PromptEncoder

from ..samples.small_artifact import publish_small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("artifacts"), sample_checkpoint)


def run(artifact: Artifact, lines: bytes, *options: str) -> Result:
    return CliRunner().invoke(cli, ["run", str(artifact.path), "--chat", *options], input=lines)


def test_a_pipe_has_a_message_in_each_line_and_answers_alone_come_out(small: Artifact) -> None:
    one = CliRunner().invoke(cli, ["run", str(small.path), "Hello there", "--chat", "--max-tokens", "5"])
    done = run(small, b"Hello there\n\n/reset\nHello there\n", "--max-tokens", "5")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == one.stdout * 2
    assert done.stderr.count("note: the answer was cut at --max-tokens, after 5 tokens") == 2
    assert "> " not in done.output
    quiet = run(small, b"Hello there\n/system Be short.\n/exit\nHello there\n", "--max-tokens", "5", "-q")
    assert (quiet.stdout, quiet.stderr) == (one.stdout, "")


def test_turns_and_the_system_prompt_change_what_is_answered(small: Artifact) -> None:
    def answers(text: bytes, *options: str) -> str:
        return run(small, text, "--max-tokens", "8", *options).stdout

    once, twice = answers(b"Go on.\n"), answers(b"Go on.\nGo on.\n")
    assert twice.startswith(once)
    assert twice != once * 2
    assert answers(b"Go on.\n", "--system", "Be a pirate.") != once
    assert answers(b"/system Be a pirate.\nGo on.\n") == answers(b"Go on.\n", "--system", "Be a pirate.")
    assert answers(b"/system\nGo on.\n", "--system", "Be a pirate.") == once


def test_the_oldest_turns_are_dropped_with_a_line_that_says_so(small: Artifact) -> None:
    done = run(small, b"Tell me of files and of folders, of links and of paths, please.\n" * 6, "--max-tokens", "60")
    assert done.exit_code == 0, done.stderr
    assert "note: the oldest 2 messages were dropped: the context holds 256 tokens" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"ab\xff\n", "byte 2 of a line is not UTF-8"), (b"word " * 300, "and the context holds 256")],
    ids=["no text", "too long"],
)
def test_a_pipe_ends_with_what_cannot_be_answered(small: Artifact, text: bytes, message: str) -> None:
    done = run(small, text)
    assert (done.exit_code, message in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], 'error: no PROMPT given\nhint: llmforge run ARTIFACT "PROMPT"; `--chat` starts a conversation\n'),
        (["--chat", "--json"], "error: --json requires a PROMPT\n"),
        (["Hi", "--system", "Be short."], "error: --system requires --chat\n"),
        (["Hi", "--chat-template", "x"], "error: --chat-template requires --chat\n"),
    ],
)
def test_what_does_not_go_together_is_refused(small: Artifact, words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["run", str(small.path), *words])
    assert (done.exit_code, done.stderr.startswith(message)) == (2, True), done.stderr


class Typed:
    """A terminal: what is typed, line by line; an exception is what happens in place of a line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str | BaseException] = []
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", self.input)

    def input(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


class Parrot:
    """An engine that repeats its prompt; what it meets after the first word is raised."""

    def __init__(self) -> None:
        self.meets: list[BaseException | None] = []
        self.closed = 0

    def stream(self, request: Request) -> Any:
        def chunks() -> Iterator[Chunk]:
            yield Chunk(f"{len(request.prompt)} ", 1)
            met = self.meets.pop(0) if self.meets else None
            if met is not None:
                raise met
            yield Chunk("said", 2)
            yield Chunk("", None, "stop", Usage(1, 2, 1.0, 1.0))

        class Stream:
            def __init__(self, parrot: Parrot) -> None:
                self._chunks, self._parrot = chunks(), parrot

            def __iter__(self) -> Iterator[Chunk]:
                return self._chunks

            def close(self) -> None:
                self._parrot.closed += 1

        return Stream(self)


class Letters:
    """An encoder: a token for each letter."""

    config = SimpleNamespace(max_context=100)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    return Typed(monkeypatch)


Converse = Callable[..., Conversation]


@pytest.fixture
def converse(typed: Typed) -> Converse:
    def converse(engine: Parrot, *lines: str | BaseException) -> Conversation:
        typed.lines = list(lines)
        chat = Conversation(cast(PromptEncoder, Letters()), 10)
        chatting.converse(cast(Engine, engine), chat, Sampling(max_tokens=9), "", "small 1")
        return chat

    return converse


def test_a_terminal_gets_a_prompt_and_answers(converse: Converse, capsys: pytest.CaptureFixture[str]) -> None:
    chat = converse(Parrot(), "four", "/help", "/what", "/exit now", "/exit", "never")
    shown = capsys.readouterr()
    assert shown.out == "4 said\n19 said\n"  # no prompt: it is read by what runs the command
    assert shown.err.startswith("small 1, 100 tokens of context. /help lists commands, Ctrl-D ends the conversation.\n")
    assert "/system TEXT  set the system prompt" in shown.err
    assert "/what: no such command; /help lists them\n" in shown.err
    assert [message["content"] for message in chat.messages] == ["four", "4 said", "/exit now", "19 said"]


def test_ctrl_c_stops_an_answer_and_keeps_what_came(converse: Converse, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot()
    engine.meets = [Interrupted(2)]
    chat = converse(engine, Interrupted(2), "four", "go on")
    shown = capsys.readouterr()
    assert shown.out == "4 \n11 said\n"
    assert "(Ctrl-D or /exit ends the conversation)" in shown.err
    assert engine.closed == 1
    assert [message["content"] for message in chat.messages] == ["four", "4 ", "go on", "11 said"]


@pytest.mark.parametrize("error", [Interrupted(15), Unavailable("the engine failed")])
def test_a_signal_that_ends_a_command_ends_it_and_so_does_an_engine(converse: Converse, error: BaseException) -> None:
    engine = Parrot()
    engine.meets = [error]
    with pytest.raises(type(error)):
        converse(engine, "four", "never")


def test_an_error_of_a_message_ends_its_turn_alone(converse: Converse, capsys: pytest.CaptureFixture[str]) -> None:
    chat = converse(Parrot(), "x" * 100, "four")
    shown = capsys.readouterr()
    assert "error: the message takes 100 tokens, and the context holds 100\nhint: write a shorter one\n" in shown.err
    assert shown.out == "4 said\n"
    assert len(chat.messages) == 2


def test_a_system_prompt_that_the_template_refuses_is_told_at_once(typed: Typed) -> None:
    class Strict(Letters):
        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            if messages[0]["role"] == "system":
                raise UsageError("System role not supported")
            return super().encode_chat(messages)

    chat = Conversation(cast(PromptEncoder, Strict()), 10, "Be short.")
    with pytest.raises(UsageError, match="System role not supported"):
        chatting.converse(cast(Engine, Parrot()), chat, Sampling(), "", "small 1")


@pytest.mark.slow
def test_a_real_terminal(small: Artifact) -> None:
    process, terminal = pty.fork()
    if process == 0:
        words = ["run", str(small.path), "--chat", "--max-tokens", "200", "--temperature", "2", "--seed", "4"]
        os.execv(sys.executable, [sys.executable, "-m", "llmforge", *words])
    shown = ""

    def wait_for(pattern: str, then: bytes) -> None:
        nonlocal shown
        began, seen = time.monotonic(), len(shown)
        while not re.search(pattern, shown[seen:]):
            assert time.monotonic() - began < 120, shown
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
        os.write(terminal, then)

    wait_for("> ", b"Tell me of files.\n")
    wait_for(r"files\.\r\n.{20}", b"\x03")  # while it answers
    wait_for(r"\n> ", b"")
    time.sleep(0.5)  # Python's readline shows the prompt just before it listens to signals
    os.write(terminal, b"\x03")
    wait_for(r"ends the conversation\)\r\n> ", b"/reset\n")
    wait_for(r"forgotten\r\n> ", b"\x04")
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "Traceback" not in shown

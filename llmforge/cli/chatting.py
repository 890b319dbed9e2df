"""The conversation of `run --chat`: lines of a terminal or a pipe in, streamed answers out.

Standard output has the answers alone. Whatever else there is to say goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import sys
from typing import TYPE_CHECKING

from llmforge.base.errors import ForgeError, InputError, UsageError
from llmforge.base.signals import Interrupted
from llmforge.cli import console, output

if TYPE_CHECKING:
    from llmforge.serving import Engine, Request, Sampling
    from llmforge.serving.conversation import Conversation

_PROMPT = "> "
_COMMANDS = {
    "/reset": "forget what was said",
    "/system TEXT": "set the system prompt; without TEXT there is none",
    "/help": "list these commands",
    "/exit": "end the conversation, as Ctrl-D does",
}
_NAMES = {usage.split()[0] for usage in _COMMANDS}


def converse(engine: Engine, conversation: Conversation, sampling: Sampling, adapter: str, title: str) -> None:
    """Answer line by line, until there are no more; on a terminal, Ctrl-C ends an answer and an error only its turn.

    Raises:
        ForgeError: a message that is not read from a terminal cannot be answered, or the engine failed.
        UsageError: standard input is closed, or no UTF-8.
    """
    conversation.check()
    lines = _Terminal() if sys.stdin is not None and sys.stdin.isatty() else _Pipe()
    if lines.interactive:
        context = conversation.encoder.config.max_context
        console.say(f"{title}, {context:,} tokens of context. /help lists commands, Ctrl-D ends the conversation.")
    chat = _Chat(engine, conversation, sampling, adapter, lines.interactive)
    while (line := lines.read()) is not None:
        command, _, rest = line.strip().partition(" ")
        if not command:
            continue
        known = command in _NAMES and (command == "/system" or not rest)
        if known and command == "/exit":
            break
        if known:
            chat.obey(command, rest.strip())
        elif lines.interactive and not rest and re.fullmatch("/[a-z]+", command):
            console.say(f"{command}: no such command; /help lists them", always=True)
        else:
            chat.say(line)


class _Terminal:
    """Lines that are typed, with a prompt and, where Python has readline, their history."""

    interactive = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")

    def read(self) -> str | None:
        """Read a line; None at the end. Ctrl-C begins another line."""
        while True:
            try:
                if sys.stdout.isatty():
                    return input(_PROMPT)
                console.prompt(_PROMPT)
                return input()
            except EOFError:
                output.write_lines("", err=True)
                return None
            except KeyboardInterrupt as error:
                _must_be_ctrl_c(error)
                output.write_lines("", "(Ctrl-D or /exit ends the conversation)", err=True)


class _Pipe:
    """Lines of a file or another program, a message each."""

    interactive = False

    def read(self) -> str | None:
        """Read a line; None at the end.

        Raises:
            UsageError: standard input is closed, cannot be read, or is no UTF-8.
        """
        try:
            line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
            return line.decode("utf-8").rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input: byte {error.start} of a line is not UTF-8") from error
        except OSError as error:
            raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error


class _Chat:
    """Says to the engine what the user says, and does what commands ask for."""

    def __init__(
        self, engine: Engine, conversation: Conversation, sampling: Sampling, adapter: str, interactive: bool
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._sampling = sampling
        self._adapter = adapter
        self._interactive = interactive

    def obey(self, command: str, rest: str) -> None:
        """Do what a command asks for."""
        if command == "/reset":
            self._conversation.reset()
            console.say("note: what was said is forgotten")
        elif command == "/system":
            self._conversation.system = rest or None
            console.say("note: the system prompt is set" if rest else "note: there is no system prompt")
        else:
            width = max(map(len, _COMMANDS))
            lines = [f"{usage.ljust(width)}  {what}" for usage, what in _COMMANDS.items()]
            output.write_lines(*lines, "Ctrl-C stops an answer.", err=True)

    def say(self, text: str) -> None:
        """Answer a message; on a terminal, what keeps it from being answered is shown."""
        from llmforge.serving import Request

        conversation = self._conversation
        try:
            ids, dropped = conversation.ask(text)
        except (UsageError, InputError) as error:
            if not self._interactive:
                raise
            console.show_error(error)
            return
        if dropped:
            context = conversation.encoder.config.max_context
            console.say(
                f"note: the oldest {dropped} messages were dropped: the context holds {context:,} tokens", always=True
            )
        self._stream(Request(tuple(ids), self._sampling, adapter=self._adapter))

    def _stream(self, request: Request) -> None:
        """Write an answer as it comes, and keep it; Ctrl-C on a terminal ends it, and what came is kept."""
        pieces: list[str] = []
        stream = self._engine.stream(request)
        reason, count = None, 0
        try:
            for chunk in stream:
                pieces.append(chunk.text)
                output.write_generated(chunk.text)
                reason, count = chunk.finish_reason, count + (chunk.token_id is not None)
        except KeyboardInterrupt as error:
            stream.close()
            if not self._interactive:
                raise
            _must_be_ctrl_c(error)
        except ForgeError:
            self._conversation.answer("")
            raise
        output.write_lines("")
        self._conversation.answer("".join(pieces))
        if reason == "length":
            at = "--max-tokens" if count == self._sampling.max_tokens else "the end of the context"
            console.say(f"note: the answer was cut at {at}, after {count} tokens")


def _must_be_ctrl_c(error: KeyboardInterrupt) -> None:
    """Raise what another signal raised: it ends the command."""
    if isinstance(error, Interrupted) and error.exit_code != 128 + signal.SIGINT:
        raise error

"""Chat templates of checkpoints: code that came with the weights, rendered in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.meta

from llmforge.base import interpreter, small_file
from llmforge.base.child_process import ChildEnded, ChildProcess
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError
from llmforge.runtime.artifact_files import SPECIAL_TOKEN_FILES, TEMPLATE_FILE
from llmforge.serving import template_worker

MOST_BYTES = 256 << 10  # of a template: the largest that are known have 30 kB
START_S = 30.0  # for a process on a busy machine
_REASONING = ("reasoning_content", "thinking", "reasoning")  # as transformers' `apply_chat_template` takes them
SMALL = 32 << 10  # characters of a conversation; longer ones wait for each other only
RENDER_S = 3.0  # of wall clock for one text, in which it gets `template_worker.CPU_S` of CPU time

_HINT = "correct the template, or give another one: --chat-template FILE, or `chat_template: FILE` in a recipe"
_PASSED = ("LD_LIBRARY_PATH", "TZ")  # of the environment: where Python's libraries are, and what `strftime_now` says


class ChatTemplate:
    """A chat template, `where` names its file in errors.

    Raises:
        InputError: the template has a syntax error, or is too large.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.where = where
        self._begin = {"source": source, "special_tokens": self.special_tokens}
        self._renderers = (_Renderer(self._begin), _Renderer(self._begin))
        if len(source.encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise InputError(f"{where}: the chat template has more than {MOST_BYTES} bytes", hint=_HINT)
        try:
            template_worker.make_environment().parse(source)  # it compiles where it is rendered
        except jinja2.TemplateSyntaxError as error:
            what = f"{where}:{error.lineno}: the chat template has an error: {error.message}"
            raise InputError(what, hint=_HINT) from error
        except RecursionError:
            what = f"{where}: the chat template has an error: it is nested too deeply"
            raise InputError(what, hint=_HINT) from None

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that it reads; none of a template that does not compile."""
        try:
            return frozenset(
                jinja2.meta.find_undeclared_variables(template_worker.make_environment().parse(self.source))
            )
        except jinja2.TemplateError:
            return frozenset()

    @classmethod
    def read(cls, tokenizer: Path) -> ChatTemplate | None:
        """Read the template of a tokenizer folder; None where it has none."""
        path = tokenizer / TEMPLATE_FILE
        return cls.of_file(path, special_tokens(tokenizer)) if path.exists() else None

    @classmethod
    def of_file(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read the template in `path`.

        Raises:
            InputError: the file cannot be read, is too large or not UTF-8, or the template has a syntax error.
        """
        hint = "give a Jinja template, a text file"
        source = small_file.decode(small_file.read(path, MOST_BYTES, hint=hint), path, hint=hint)
        return cls(source, special_tokens, str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Write `messages` (JSON objects with `role` and `content`) as the model was trained to read them.

        `tools` are functions that the model may call, in OpenAI's shape; `variables` are others of the template's.

        The first call starts the process that renders, the first long one another; they live as long as the template.
        Any thread may call.

        Raises:
            InputError: the template refuses the messages, fails on them, or takes too much time or memory.
            EnvironmentLacks: no process can be started.
        """
        return self._render(messages, tools, {**variables, "add_generation_prompt": add_generation_prompt})

    def render_generations(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Write a whole conversation, and say which characters of it stand in `{% generation %}` blocks.

        Raises:
            InputError, EnvironmentLacks: as `render`.
        """
        mark = f"\x02{secrets.token_hex(8)}\x03"
        options = {"add_generation_prompt": False, **dict.fromkeys(template_worker.MARKS, mark)}
        marked = self._render(messages, tools, options)
        pieces, spans, at = marked.split(mark), [], 0
        for number, piece in enumerate(pieces):
            if number % 2:
                spans.append((at, at + len(piece)))
            at += len(piece)
        return "".join(pieces), spans

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        named = [_with_reasoning(message) for message in messages]
        values = {"messages": named, "tools": list(tools) or None, "documents": None, **options}
        try:
            line = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._failed(f"they are not JSON: {error}") from error
        try:
            answer = self._renderers[len(line) > SMALL].render(line)
        except ChildEnded as error:
            raise self._failed(str(error)) from None
        if "text" not in answer:
            raise self._failed(str(answer.get("error")))
        return str(answer["text"])

    def _failed(self, why: str) -> ForgeError:
        return InputError(f"{self.where}: the chat template cannot render these messages: {why}")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name what an assistant thought as templates read it, by any of its names: gpt-oss' reads `thinking`."""
    given = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


class _Renderer:
    """Renders one conversation after the other, in a process that runs `template_worker`, started when one comes."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._begin = begin
        self._turn = threading.Lock()
        self._process: ChildProcess | None = None

    def render(self, line: str) -> dict[str, Any]:
        """Send one line and return the answer.

        Raises:
            ChildEnded: there is none.
            EnvironmentLacks: no process can be started.
        """
        with self._turn:
            if self._process is None:
                self._process = self._start()
            try:
                answer = json.loads(self._process.ask(line, RENDER_S))
            except ChildEnded:
                self._process = None  # the next call starts another
                raise
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> ChildProcess:
        process = ChildProcess(
            interpreter.file_command(template_worker.__file__, "rendering chat templates"),
            "chat templates: no process can be started",
            answers=True,
            quiet=True,
            environment={name: os.environ[name] for name in _PASSED if name in os.environ},
            reasons={signal.SIGXCPU: f"it takes more than {template_worker.CPU_S} s of CPU time"},
        )
        if json.loads(process.ask(json.dumps(self._begin), START_S)) != {"ready": True}:
            raise EnvironmentLacks("chat templates: the process that renders them does not start")
        return process


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Read the special tokens by their names (`bos_token`, …) from a tokenizer folder."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_FILES:
        path = tokenizer / name
        if not path.exists():
            continue
        data = small_file.read_json(path)
        if not isinstance(data, dict):
            raise InputError(f"{path}: {type(data).__name__}; expected an object")
        for key, value in data.items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens

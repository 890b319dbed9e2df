"""Chat templates of checkpoints: code that came with the weights, rendered in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from llmforge.base import interpreter, small_file
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError
from llmforge.runtime.tokenizer_files import SPECIAL_TOKEN_FILES, TEMPLATE_FILE
from llmforge.serving import template_worker

MOST_BYTES = 256 << 10  # of a template: the largest that are known have 30 kB
START_S = 30.0  # for a process on a busy machine
SMALL = 32 << 10  # characters of a conversation; longer ones wait for each other only
RENDER_S = 3.0  # of wall clock for one text, in which it gets `template_worker.CPU_S` of CPU time

_PASSED = ("LD_LIBRARY_PATH", "TZ")  # of the environment: where Python's libraries are, and what `strftime_now` says
# Nothing of this process's environment or current folder decides what the other one imports.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"


class ChatTemplate:
    """A chat template; `where` names its file in errors.

    Raises:
        InputError: the template has a syntax error, or is too large.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self._where = where
        self._begin = {"source": source, "special_tokens": dict(special_tokens)}
        self._lanes = (_Lane(self._begin), _Lane(self._begin))
        if len(source.encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise InputError(f"{where}: the chat template has more than {MOST_BYTES} bytes")
        try:
            template_worker.make_environment().parse(source)  # it compiles where it is rendered
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{where}:{error.lineno}: the chat template has an error: {error.message}") from error
        except RecursionError:
            raise InputError(f"{where}: the chat template has an error: it is nested too deeply") from None

    @classmethod
    def read(cls, tokenizer: Path) -> ChatTemplate | None:
        """Read the template of a tokenizer folder; None where it has none."""
        path = tokenizer / TEMPLATE_FILE
        if not path.exists():
            return None
        return cls(small_file.decode(small_file.read(path, MOST_BYTES), path), special_tokens(tokenizer), str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Write `messages` (JSON objects with `role` and `content`) as the model was trained to read them.

        `tools` are functions that the model may call, in OpenAI's shape.

        The first call starts the process that renders, the first long one another; they live as long as the template.
        Any thread may call.

        Raises:
            InputError: the template refuses the messages, fails on them, or takes too much time or memory.
            EnvironmentLacks: no process can be started.
        """
        values = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._failed(f"they are not JSON: {error}") from error
        try:
            answer = self._lanes[len(line) > SMALL].ask(line)
        except _Ended as error:
            raise self._failed(str(error)) from None
        if "text" not in answer:
            raise self._failed(str(answer.get("error")))
        return str(answer["text"])

    def _failed(self, why: str) -> ForgeError:
        return InputError(f"{self._where}: the chat template cannot render these messages: {why}")


class _Ended(Exception):
    """The process has ended, or was ended for the time it took."""


class _Lane:
    """Renders one conversation after the other, in a process that is started when one comes."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._begin = begin
        self._turn = threading.Lock()
        self._worker: _Worker | None = None

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line and return the answer; raises what `_Worker` does."""
        with self._turn:
            if self._worker is None:
                self._worker = _Worker(self._begin)
            try:
                return self._worker.ask(line)
            except _Ended:
                self._worker = None  # the next call starts another
                raise


class _Worker:
    """A process that runs `template_worker`."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        command = [interpreter.find("rendering chat templates"), "-I", "-c", _BOOT, template_worker.__file__, *sys.path]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the other one
                env={name: os.environ[name] for name in _PASSED if name in os.environ}, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentLacks(f"chat templates: no process can be started: {error.strerror}") from error
        self._end = weakref.finalize(self, _end, self._process)
        if self._ask(json.dumps(begin), START_S) != {"ready": True}:
            raise EnvironmentLacks("chat templates: the process that renders them does not start")

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line and return the answer.

        Raises:
            _Ended: there is none.
        """
        return self._ask(line, RENDER_S)

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        waiting, out = memoryview(line.encode() + b"\n"), self._process.stdout.fileno()
        into = self._process.stdin.fileno()
        os.set_blocking(into, False)
        ready = select.poll()  # `select` stops at 1024 descriptors, which a server has
        ready.register(out, select.POLLIN)
        ready.register(into, select.POLLOUT)
        received: list[bytes] = []
        while not (received and received[-1].endswith(b"\n")):
            events = dict(ready.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
            if not events:
                self._end()
                raise _Ended(f"it takes more than {seconds:g} s")
            if into in events:
                with contextlib.suppress(BrokenPipeError):
                    waiting = waiting[os.write(into, waiting[: 1 << 16]) :]
                if not waiting or events[into] & (select.POLLERR | select.POLLHUP):
                    ready.unregister(into)
            if out in events:
                received.append(os.read(out, 1 << 20))
                if not received[-1]:
                    self._end()
                    raise _Ended(_why_ended(self._process.returncode))
        answer = json.loads(b"".join(received))
        assert isinstance(answer, dict)
        return answer


def _why_ended(code: int) -> str:
    """Say why a worker is no more; signals are negative numbers."""
    if code == -signal.SIGXCPU:
        return f"it takes more than {template_worker.CPU_S} s of CPU time"
    return f"its process ended with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and forget it."""
    if process.poll() is None:
        try:
            process.wait(0.05)  # one whose output ended is about to
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


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

"""Files of OpenAI's batch format: requests, one a line, and their answers. No HTTP here.

Shapes: https://platform.openai.com/docs/guides/batch, as of 2026. Answers are written one by one to a journal beside
the file that they will be in, and copied to it in the order of the requests when all are there: what is killed goes on
behind the answers that it has.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import queue
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmforge.base import small_file, whole_file
from llmforge.base.errors import EnvironmentLacks, ForgeError, UsageError
from llmforge.base.wording import quoted
from llmforge.serving.http.completion_call import CompletionCall, chat_call, text_call
from llmforge.serving.http.responses import ResponseWriter, error_body, status
from llmforge.serving.interface import Serving
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import client_json
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.serving.request import Chunk
from llmforge.serving.sequence import Ticket
from llmforge.serving.token_bytes import TokenBytes

JOURNAL_VERSION = 1
AHEAD = 2  # times as many sequences as an engine has slots are handed to it: none is free while the next is sent
_URLS: Mapping[str, Callable[[Any, PromptEncoder, str], CompletionCall]] = {
    "/v1/chat/completions": chat_call,
    "/v1/completions": text_call,
}


@dataclass(frozen=True)
class BatchRequest:
    """One line of a file of requests."""

    custom_id: str
    url: str
    body: Any  # unchecked


@dataclass(frozen=True)
class Counts:
    """How a batch ended: requests, those that were answered, and those that were refused or failed."""

    total: int
    completed: int
    failed: int


def read(path: Path, encoder: PromptEncoder) -> list[BatchRequest]:
    """Read a file of requests; whether a body makes sense is said in its answer.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is no request of a known URL with an id of its own.
    """
    limits, found = JsonLimits.of(encoder), dict[str, BatchRequest]()
    with small_file.open_regular(path, error=UsageError) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            each = _request(client_json.parse(line, limits, where), where)
            if each.custom_id in found:
                raise UsageError(f"{where}: custom_id {quoted(each.custom_id)} stands in an earlier line, too")
            found[each.custom_id] = each
    if not found:
        raise UsageError(f"{path}: it has no requests", hint='a line: {"custom_id", "method", "url", "body"}')
    return list(found.values())


def _request(value: Any, where: str) -> BatchRequest:
    """Take a line apart."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected an object with custom_id, method, url and body")
    custom_id, method, url = value.get("custom_id"), value.get("method", "POST"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise UsageError(f"{where}: custom_id: expected a string that is not empty")
    if method != "POST":
        raise UsageError(f"{where}: method: expected POST")
    if not isinstance(url, str) or url not in _URLS:
        raise UsageError(f"{where}: url: expected {' or '.join(_URLS)}")
    return BatchRequest(custom_id, url, value.get("body"))


class Journal:
    """The answers so far, a line each, behind a first line that says of what they are.

    A line that is not whole, which a kill may leave, is cut off. Another process cannot open it meanwhile.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream
        self._places: dict[str, int] = {}  # where the line of an id begins
        self.failed = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path, of: Mapping[str, str]) -> Iterator[Journal]:
        """Open or begin the journal of what `of` says: digests of the requests and of what answers them.

        Raises:
            UsageError: it is of something else, or another process writes to it.
            OSError: it cannot be written.
        """
        with path.open("a+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{path}: another process writes answers to it") from None
            journal = cls(path, stream)
            journal._read({"llmforge_batch": JOURNAL_VERSION, **of})
            yield journal

    def __contains__(self, custom_id: str) -> bool:
        """Whether a request has its answer."""
        return custom_id in self._places

    def __len__(self) -> int:
        """Count the answers."""
        return len(self._places)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Write the answer to a request."""
        place = self._stream.seek(0, os.SEEK_END)
        self._stream.write(json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()
        self._note(answer, place)

    def finish(self, path: Path, requests: Sequence[BatchRequest]) -> None:
        """Write all answers to `path`, in the order of their requests, and remove the journal."""

        def copy(file: Path) -> None:
            with file.open("wb") as written:
                for request in requests:
                    self._stream.seek(self._places[request.custom_id])
                    written.write(self._stream.readline())

        whole_file.write(path, copy)
        self.path.unlink()

    def _read(self, head: Mapping[str, Any]) -> None:
        """Find the answers that are there."""
        self._stream.seek(0)
        end = 0
        for number, line in enumerate(iter(self._stream.readline, b"")):
            if not line.endswith(b"\n"):
                break
            value = json.loads(line)
            if number:
                self._note(value, end)
            elif value != head:
                raise UsageError(
                    f"{self.path}: it has answers to other requests, or of another artifact or template",
                    hint="remove it, or write to another file",
                )
            end += len(line)
        self._stream.truncate(end)
        if not end:
            self._stream.write(json.dumps(head).encode() + b"\n")
            self._stream.flush()

    def _note(self, answer: Mapping[str, Any], place: int) -> None:
        self._places[answer["custom_id"]] = place
        self.failed += answer["response"]["status_code"] != 200


def digest_of(path: Path) -> str:
    """Hash a file of requests."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def answer_all(
    engine: Serving,
    model: str,
    requests: Sequence[BatchRequest],
    journal: Journal,
    advance: Callable[[int, int], None],
) -> Counts:
    """Answer the requests that `journal` lacks, in the order of their prompts, so that those alike share a prefix.

    Raises:
        EnvironmentLacks: something that a request needs is not installed, or no process can be started.
        ForgeError: the engine ended. What was answered stays in the journal.
    """
    run = _Run(engine, journal)
    for custom_id, call in _in_order(engine.encoder, model, requests, journal):
        run.submit(custom_id, call)
        advance(len(journal), len(requests))
    while run.open:
        run.take()
        advance(len(journal), len(requests))
    return Counts(len(requests), len(requests) - journal.failed, journal.failed)


def _in_order(
    encoder: PromptEncoder, model: str, requests: Sequence[BatchRequest], journal: Journal
) -> list[tuple[str, CompletionCall]]:
    """Read the bodies of requests without an answer, and sort them by adapter and prompt; what is refused is answered.

    A prompt of `n` choices, or several prompts of one call, stay together.
    """
    calls = []
    for request in requests:
        if request.custom_id in journal:
            continue
        try:
            call = _URLS[request.url](request.body, encoder, model)
            if call.stream:
                raise UsageError("stream: answers of a batch are whole", hint="leave stream out")
        except EnvironmentLacks:  # it is no fault of the request
            raise
        except ForgeError as error:
            journal.add(_answer(request.custom_id, None, status(error), error_body(error)))
        else:
            calls.append((request.custom_id, call))
    return sorted(calls, key=lambda each: (each[1].requests[0].adapter, each[1].requests[0].prompt))


class _OpenCall:
    """A call whose choices are being written."""

    def __init__(self, custom_id: str, call: CompletionCall) -> None:
        self.custom_id, self.call = custom_id, call
        self.chunks: list[list[Chunk]] = [[] for _ in call.requests]
        self.left = len(call.requests)
        self.tickets: list[Ticket] = []
        self.error: ForgeError | None = None


class _Run:
    """Calls that an engine has, of which one thread takes what comes."""

    def __init__(self, engine: Serving, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._bytes = TokenBytes(engine.encoder.tokenizer)
        self._most = AHEAD * engine.stats().slots
        self._items = queue.SimpleQueue[tuple[_OpenCall, int, Chunk | ForgeError]]()
        self.open = 0  # sequences

    def submit(self, custom_id: str, call: CompletionCall) -> None:
        """Hand a call to the engine when that has room for it, or has nothing else to do."""
        while self.open and self.open + len(call.requests) > self._most:
            self.take()
        opened = _OpenCall(custom_id, call)
        for index, request in enumerate(call.requests):
            try:
                ticket = self._engine.submit(request, functools.partial(self._receive, opened, index))
            except ForgeError as error:
                self._fail(opened, error)
                opened.left -= len(call.requests) - index
                self._end(opened)
                return
            opened.tickets.append(ticket)
            self.open += 1

    def take(self) -> None:
        """Wait for the next chunk."""
        opened, index, item = self._items.get()
        if isinstance(item, ForgeError):
            self._fail(opened, item)
        else:
            opened.chunks[index].append(item)
            if item.finish_reason is None:
                return
        self.open -= 1
        opened.left -= 1
        self._end(opened)

    def _receive(self, opened: _OpenCall, index: int, item: Chunk | ForgeError) -> None:
        self._items.put((opened, index, item))

    def _fail(self, opened: _OpenCall, error: ForgeError) -> None:
        """Let the other choices of a call end; an engine that has ended answers nobody any more."""
        if isinstance(error, EnvironmentLacks) or not self._engine.alive:
            raise error
        opened.error = opened.error or error
        for ticket in opened.tickets:
            self._engine.cancel(ticket)

    def _end(self, opened: _OpenCall) -> None:
        """Write the answer to a call whose last choice has ended."""
        if opened.left:
            return
        if (error := opened.error) is not None:
            answer = _answer(opened.custom_id, opened.call, status(error), error_body(error))
        else:
            body = ResponseWriter(opened.call, self._bytes).completion(opened.chunks)
            answer = _answer(opened.custom_id, opened.call, 200, body)
        self._journal.add(answer)


def _answer(custom_id: str, call: CompletionCall | None, code: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Write a line of answers."""
    number = secrets.token_hex(12)
    request_id = f"req_{number}" if call is None else call.id
    response = {"status_code": code, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None}

"""Requests go to one server, copies of them to another, and both answers are handed over as a pair.

The copy is sent once the first server has answered, by threads of its own over a queue of bounded length: a second
server that is slow or dead takes nothing from the first one. Copies that find no room are dropped and counted.
"""

from __future__ import annotations

import http.client
import json
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmforge.base import small_file
from llmforge.base.errors import DataError
from llmforge.base.http_server import HttpServer
from llmforge.checkpoint.documents import read_lines
from llmforge.metrics.behaviour.answer import BehaviourAnswer, MadeCall
from llmforge.metrics.paired_answers import ServedReply

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COPIED = (CHAT, TEXT)  # other calls are not compared
MOST_ANSWER = 16 << 20  # bytes of an answer that are kept to be compared
OUTPUT_TOKENS = 64  # of an answer, where a line of a trace does not say
_PIECE = 1 << 16  # bytes
_SAID = 200  # characters of what a server says of an error


@dataclass(frozen=True)
class ShadowRequest:
    """One call; `path` behind the servers' addresses, such as /v1/completions."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    method: str = "POST"


@dataclass(frozen=True)
class ReplyPair:
    """Both answers to the JSON body of a request."""

    body: Mapping[str, Any]
    a: ServedReply
    b: ServedReply


class Exchange:
    """One request to one server, over a connection of its own, and its answer as it comes."""

    def __init__(self, server: HttpServer, request: ShadowRequest, timeout_s: float) -> None:
        self._request, self._kept, self._size = request, list[bytes](), 0
        self._error: str | None = None
        self._first_s: float | None = None
        self._ended_s: float | None = None
        parts = urlsplit(server.url)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.netloc, timeout=timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + request.path
        # What a client sends goes on as it is, its content type too: the server asks web pages for JSON by it.
        self._headers = {name.lower(): value for name, value in request.headers.items()}
        if not request.headers:
            self._headers["content-type"] = "application/json"
        if server.key is not None:
            self._headers["authorization"] = f"Bearer {server.key}"
        self._sent_s = time.perf_counter()
        self.response: http.client.HTTPResponse | None = None

    def open(self) -> http.client.HTTPResponse:
        """Send the request and wait for the head of its answer.

        Raises:
            OSError, http.client.HTTPException: there is none.
        """
        self._sent_s = time.perf_counter()
        try:
            self._connection.request(self._request.method, self._path, self._request.body or None, self._headers)
            self.response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._end(f"{type(error).__name__}: {error}")
            raise
        return self.response

    def pieces(self) -> Iterator[bytes]:
        """Yield the answer as it comes.

        Raises:
            OSError, http.client.HTTPException: it breaks off.
        """
        assert self.response is not None
        try:
            while piece := self.response.read1(_PIECE):
                self._first_s = self._first_s or time.perf_counter()
                if self._size <= MOST_ANSWER:
                    self._kept.append(piece)
                    self._size += len(piece)
                yield piece
            self._end(None)
        except (OSError, http.client.HTTPException) as error:
            self._end(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @property
    def complete(self) -> bool:
        """Whether the server has answered, or failed to; not so where the client left before."""
        return self._ended_s is not None

    def reply(self) -> ServedReply:
        """Read the answer."""
        latency_ms = ((self._ended_s or time.perf_counter()) - self._sent_s) * 1e3
        status = None if self.response is None else self.response.status
        if self._error is not None or status != http.client.OK:
            return ServedReply(BehaviourAnswer(""), latency_ms, error=self._error or f"HTTP {status}")
        try:
            answer, streamed = read_answer(b"".join(self._kept))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return ServedReply(BehaviourAnswer(""), latency_ms, error=f"no answer of a known form: {error}"[:_SAID])
        ttft_ms = (self._first_s - self._sent_s) * 1e3 if streamed and self._first_s is not None else None
        return ServedReply(answer, latency_ms, ttft_ms)

    def _end(self, error: str | None) -> None:
        self._error, self._ended_s = error, time.perf_counter()
        if error is not None:
            self.close()


def ask(server: HttpServer, request: ShadowRequest, timeout_s: float) -> ServedReply:
    """Ask one server, and wait for the whole answer; what goes wrong is an answer with an error."""
    exchange = Exchange(server, request, timeout_s)
    with suppress(OSError, http.client.HTTPException):
        exchange.open()
        for _ in exchange.pieces():
            pass
    return exchange.reply()


def read_answer(data: bytes) -> tuple[BehaviourAnswer, bool]:
    """Read the first choice of a completion, whole or as server-sent events; say whether it was a stream.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is none, or says that it failed.
    """
    if not data.lstrip().startswith((b"data:", b"event:", b":")):
        whole = json.loads(data)
        return _answer([_delta_of(whole["choices"][0])], whole.get("usage") or {}), False
    deltas, usage, events = [], dict[str, Any](), 0
    for line in data.splitlines():
        if not line.startswith(b"data:") or (said := line[len(b"data:") :].strip()) == b"[DONE]":
            continue
        event = json.loads(said)
        if "error" in event:
            raise ValueError(str(event["error"])[:_SAID])
        usage = event.get("usage") or usage
        chosen = [choice for choice in event.get("choices", ()) if choice.get("index", 0) == 0]
        deltas += [_delta_of(choice) for choice in chosen]
        events += len(chosen)
    if not deltas or deltas[-1]["finish_reason"] is None:
        raise ValueError("the stream ends before the answer does")
    return _answer(deltas, usage or {"completion_tokens": events}), True


def _delta_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    said = choice.get("delta") or choice.get("message") or {}
    return {
        "text": said.get("content") or choice.get("text") or "",
        "reasoning": said.get("reasoning_content") or said.get("reasoning") or "",
        "calls": said.get("tool_calls") or (),
        "finish_reason": choice.get("finish_reason"),
    }


def _answer(deltas: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> BehaviourAnswer:
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        for place, call in enumerate(delta["calls"]):
            name, arguments = calls.get(at := call.get("index", place), ("", ""))
            made = call.get("function", {})
            calls[at] = name + (made.get("name") or ""), arguments + (made.get("arguments") or "")
    reason = deltas[-1]["finish_reason"]
    text = "".join(delta["text"] for delta in deltas)
    return BehaviourAnswer(
        text=text,
        calls=tuple(MadeCall(*call) for _, call in sorted(calls.items())),
        reasoning="".join(delta["reasoning"] for delta in deltas),
        finish_reason=reason if reason in ("length", "tool_calls") else "stop",
        tokens=int(usage.get("completion_tokens") or len(text.split())),
    )


class Mirror:
    """Sends copies to a second server, and hands over pairs, one at a time.

    Args:
        server: the second one.
        observe: is given each pair; one call at a time.
        workers: copies at once.
        waiting: copies that may wait.
        timeout_s: for a byte of its answer.
        model: what copies name in place of the request's model; None: the same.
    """

    def __init__(
        self,
        server: HttpServer,
        observe: Callable[[ReplyPair], None],
        *,
        model: str | None = None,
        workers: int = 4,
        waiting: int = 64,
        timeout_s: float = 60.0,
    ) -> None:
        self.dropped = 0
        self.ended = threading.Event()  # no more is sent
        self._server, self._observe, self._timeout_s, self._model = server, observe, timeout_s, model
        self._items: queue.Queue[tuple[ShadowRequest, Exchange | ServedReply]] = queue.Queue(waiting)
        self._lock = threading.Lock()
        for number in range(workers):
            threading.Thread(target=self._run, name=f"llmforge-shadow-{number}", daemon=True).start()

    def offer(self, request: ShadowRequest, a: Exchange | ServedReply, *, wait: bool = False) -> None:
        """Take a request that the first server has answered; without `wait`, drop it where there is no room."""
        if self.ended.is_set():
            return
        try:
            self._items.put((request, a), block=wait)
        except queue.Full:
            with self._lock:
                self.dropped += 1

    def drain(self) -> None:
        """Wait until all that was taken is answered, or no more is sent."""
        while self._items.unfinished_tasks and not self.ended.is_set():
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            request, first = self._items.get()
            try:
                if not self.ended.is_set():
                    self._pair(request, first)
            finally:
                self._items.task_done()

    def _pair(self, request: ShadowRequest, first: Exchange | ServedReply) -> None:
        try:
            body = json.loads(request.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return  # no request that a model could answer
        a = first.reply() if isinstance(first, Exchange) else first
        named = body if self._model is None else {**body, "model": self._model}
        b = ask(self._server, ShadowRequest(request.path, json.dumps(named).encode()), self._timeout_s)
        with self._lock:
            if not self.ended.is_set():
                self._observe(ReplyPair(body, a, b))


def replay(requests: Sequence[ShadowRequest], server: HttpServer, mirror: Mirror, *, workers: int, timeout_s: float
) -> None:  # fmt: skip
    """Send requests to the first server, so many at once, until all are sent or the mirror has ended."""
    left = iter(requests)
    lock = threading.Lock()

    def run() -> None:
        while not mirror.ended.is_set():
            with lock:
                request = next(left, None)
            if request is None:
                return
            mirror.offer(request, ask(server, request, timeout_s), wait=True)

    threads = [threading.Thread(target=run, name="llmforge-replay", daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # so that a signal is seen
            thread.join(0.1)
    mirror.drain()


def read_requests(path: Path, model: str | None) -> list[ShadowRequest]:
    """Read a trace with text: lines with `prompt`, as `serve --record DIR --record-text` writes them, or `messages`.

    Answers are greedy streams of at most as many tokens as the line says (`output_length`, `output_tokens` or
    `max_tokens`).

    Raises:
        DataError: the file cannot be read, is empty, or a line has no text.
    """
    made = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = small_file.parse_json(line, where, error=DataError)
        if not isinstance(entry, dict) or not (entry.get("prompt") or entry.get("messages")):
            raise DataError(
                f"{where}: no text: expected `prompt` or `messages`",
                hint="record it: llmforge serve ARTIFACT --record DIR --record-text",
            )
        asked = [entry.get(name) for name in ("output_length", "output_tokens", "max_tokens")]
        tokens = next((each for each in asked if isinstance(each, int) and each > 0), OUTPUT_TOKENS)
        body: dict[str, Any] = {} if model is None else {"model": model}
        body |= {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if entry.get("messages"):
            body |= {name: entry[name] for name in ("messages", "tools", "response_format") if entry.get(name)}
            if "schema" in entry:
                form = {"name": "answer", "schema": entry["schema"]}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
            made.append(ShadowRequest(CHAT, json.dumps(body).encode()))
        else:
            made.append(ShadowRequest(TEXT, json.dumps({**body, "prompt": entry["prompt"]}).encode()))
    if not made:
        raise DataError(f"{path}: contains no requests")
    return made

"""A server of completions whose answers a test gives, whole or streamed, as fast as it says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from .text_server import TextHandler, serving

Answer = Callable[[dict[str, Any]], dict[str, Any]]  # the body of a call -> the message of a chat


@dataclass
class ChatServer:
    """What is served, and what was asked."""

    answer: Answer
    delay_s: float = 0.0  # before an answer
    status: int = 200
    breaks: bool = False  # a stream ends before its answer does
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def say(text: str) -> Answer:
    """Answer everything with one text."""
    return lambda body: {"content": text}


@contextmanager
def chat_server(answer: Answer, **options: Any) -> Iterator[ChatServer]:
    """Serve at `url`."""
    served = ChatServer(answer, **options)

    class Handler(TextHandler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # pieces of a stream are small, and would wait for each other for 40 ms

        def do_GET(self) -> None:
            self.send_text(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.asked.append(body)
                served.headers.append({name.lower(): value for name, value in self.headers.items()})
            time.sleep(served.delay_s)
            if served.status != 200 or not isinstance(body, dict):
                self.send_text(max(served.status, 400), json.dumps({"error": {"message": "no"}}))
                return
            message, chat = served.answer(body), "chat" in self.path
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            usage = {"prompt_tokens": 1, "completion_tokens": len((message.get("content") or "").split())}
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            if not body.get("stream"):
                choice |= {"message": message} if chat else {"text": message["content"]}
                self.send_text(200, json.dumps({"choices": [choice], "usage": usage}))
                return
            pieces = [{"content": piece} for piece in (message.get("content") or "").partition(" ")]
            if message.get("tool_calls"):
                pieces.append({"tool_calls": message["tool_calls"]})
            events: list[dict[str, Any]] = [
                {"choices": [{"index": 0, "finish_reason": None, **({"delta": each} if chat else
                                                                     {"text": each["content"]})}]}
                for each in pieces
            ]  # fmt: skip
            if not served.breaks:
                events += [{"choices": [{**choice, "delta": {}}]}, {"choices": [], "usage": usage}]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for said in [*map(json.dumps, events), *([] if served.breaks else ["[DONE]"])]:
                data = f"data: {said}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

    with serving(Handler) as served.url:
        yield served

"""A completions server that wants an API key, and repeats one that it does not take, as some do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from .text_server import TextHandler, serving

KEY = "sk-right-0123456789"


@contextmanager
def keyed_server(*, open_models: bool = False, status: int = 401, models: tuple[str, ...] = ("m",)) -> Iterator[str]:
    """Serve at the URL that is given; with `open_models` only completions want the key."""

    class Handler(TextHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if open_models or self._admitted():
                self.send_text(200, json.dumps({"data": [{"id": each} for each in models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._admitted():
                return
            events = [{"choices": [{"text": "a"}]}] * body.get("max_tokens", 1)
            usage = {"usage": {"completion_tokens": len(events), "prompt_tokens": len(body.get("prompt", ()))}}
            self.send_text(
                200, "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, usage]) + "data: [DONE]\n"
            )

        def _admitted(self) -> bool:
            given = self.headers.get("Authorization")
            if given != f"Bearer {KEY}":
                self.send_text(status, json.dumps({"error": {"message": f"Incorrect API key provided: {given}"}}))
            return given == f"Bearer {KEY}"

    with serving(Handler) as url:
        yield url

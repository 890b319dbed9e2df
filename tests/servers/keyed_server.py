"""A completions server that wants an API key, and repeats one that it does not take, as some do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-right-0123456789"


@contextmanager
def keyed_server(*, open_models: bool = False, status: int = 401) -> Iterator[str]:
    """Serve at the URL that is given; with `open_models` only completions want the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if open_models or self._admitted():
                self._send(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._admitted():
                return
            events = [{"choices": [{"text": "a"}]}] * body.get("max_tokens", 1)
            usage = {"usage": {"completion_tokens": len(events), "prompt_tokens": len(body.get("prompt", ()))}}
            self._send(200, "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, usage]) + "data: [DONE]\n")

        def _admitted(self) -> bool:
            given = self.headers.get("Authorization")
            if given != f"Bearer {KEY}":
                self._send(status, json.dumps({"error": {"message": f"Incorrect API key provided: {given}"}}))
            return given == f"Bearer {KEY}"

        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

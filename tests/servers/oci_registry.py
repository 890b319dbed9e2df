"""An OCI registry in this process: what the distribution specification asks, and answers that no registry gives."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class Registry:
    """What it holds, what it was asked, and how it misbehaves."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # by tag and by digest
    asked: Counter[str] = field(default_factory=Counter)  # method and kind of path
    login: str | None = None  # `user:password` that it wants
    bearer: bool = False  # for a token, which is got for the login
    forbids: int | None = None  # status of every answer
    headers: dict[str, str] = field(default_factory=dict)  # of manifests, in place of the right ones
    cuts: list[int] = field(default_factory=list)  # bytes after which the next answers with a blob break off
    ranges: bool = True  # answers a part of a blob where it is asked for one
    challenge: str | None = None
    location: str | None = None
    host: str = ""

    def tag(self, name: str, manifest: dict[str, Any] | bytes) -> bytes:
        raw = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        self.manifests[name] = self.manifests[digest(raw)] = raw
        return raw


@contextmanager
def running() -> Iterator[Registry]:
    """Serve one on a port of this machine."""
    registry = Registry()
    server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"registry": registry}))
    server.daemon_threads = True
    registry.host = f"127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, address: Any) -> None:
        """Say nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        path, registry = urlsplit(self.path).path, self.registry
        found = re.fullmatch(r"/v2/(?:models/\w+/)?(manifests|blobs|blobs/uploads)/([^/]*)", path)
        kind = found[1] if found else path
        registry.asked[f"{self.command} {kind}"] += 1
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/token":
            self._token()
        elif registry.forbids is not None:
            self._answer(registry.forbids, b'{"errors": [{"code": "X", "message": "said\\nso"}]}')
        elif not self._admitted():
            scheme = (
                f'Bearer realm="https://{registry.host}/token",service="x"' if registry.bearer else 'Basic realm="x"'
            )
            self._answer(401, b"{}", {"WWW-Authenticate": scheme if registry.challenge is None else registry.challenge})
        elif kind == "manifests" and found:
            self._manifest(found[2], content)
        elif kind == "blobs" and found:
            self._blob(found[2])
        elif kind == "blobs/uploads" and found:
            self._upload(content)
        else:
            self._answer(404, b"404 page not found")

    do_GET = do_HEAD = do_PUT = do_POST = _serve  # noqa: N815

    def _admitted(self) -> bool:
        login = self.registry.login
        given = self.headers.get("Authorization")
        return login is None or given == f"Basic {base64.b64encode(login.encode()).decode()}"

    def _token(self) -> None:
        self._answer(200, b'{"token": "t"}')

    def _manifest(self, name: str, content: bytes) -> None:
        registry = self.registry
        if self.command == "PUT":
            registry.tag(name, content)
            self._answer(201, b"", {"Docker-Content-Digest": digest(content)})
        elif name in registry.manifests:
            raw = registry.manifests[name]
            headers = {"Content-Type": MANIFEST, "Docker-Content-Digest": digest(raw), **registry.headers}
            self._answer(200, raw, headers)
        else:
            self._answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')

    def _blob(self, name: str) -> None:
        content = self.registry.blobs.get(name)
        if content is None:
            self._answer(404, b"{}")
            return
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.registry.ranges else None
        if begin is not None:
            at, whole = int(begin[1]), len(content)
            self._answer(206, content[at:], {"Content-Range": f"bytes {at}-{whole - 1}/{whole}"}, blob=True)
        else:
            self._answer(200, content, blob=True)

    def _upload(self, content: bytes) -> None:
        if self.command == "POST":
            self._answer(202, b"", {"Location": self.registry.location or "/v2/models/tiny/blobs/uploads/1?state=x"})
            return
        (said,) = parse_qs(urlsplit(self.path).query)["digest"]
        if said != digest(content):
            self._answer(400, b'{"errors": [{"code": "DIGEST_INVALID", "message": "other bytes"}]}')
            return
        self.registry.blobs[said] = content
        self._answer(201, b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, blob: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if blob and self.registry.cuts:
            body = body[: self.registry.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)
